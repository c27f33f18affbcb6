"""Bits of pieces and of invariant calls on a GPU, over 10,000 tokens (docs/numerics.md)."""

from itertools import product

import pytest
import torch

import kda_ops
from examples import serve as example
from kda_ops.backends.triton import tuning
from kda_ops.stages import GRADIENTS
from tests.gpu.test_forward import CUDA, DTYPES
from tests.support.calls import forward, run
from tests.support.cases import Case, replace
from tests.support.closeness import assert_all_identical, assert_identical, assert_meets_budget
from tests.support.pieces import SHARED, head_alone, of_heads, prefill, results_of, run_in_pieces
from tests.support.served import new_cache, serve

pytestmark = pytest.mark.bits
BF16, VARIANTS = torch.bfloat16, ("kda", "gdn")
# KDA walks on these in bf16
LONG = Case(
    T=10_000, K=128, V=128, dtype=BF16, gate="weak", beta="sigmoid", l2norm=True, safe_gate=True
)
SMALL = replace(LONG, T=700, H=4, HV=4)
WHERE = [[1, 40, 130]]  # in chunks
COUNTS = (1, 66, 132, 10**6)  # multiprocessors


def few_bits(x):
    return {n: t for n, t in x.items() if n[1:] not in SHARED}


# Tests loop over what takes the same kernels, because each process compiles for itself.
EACH = pytest.mark.parametrize("variant, dtype", list(product(VARIANTS, DTYPES)))


def long_cases(variant, dtype):
    for H, transposed in product((4, 16, 96), (False, True)):
        # without decay, what one run leaves still counts in the next
        case = replace(LONG, variant=variant, dtype=dtype, H=H, HV=H, transposed=transposed)
        yield replace(case, gate="zero") if transposed else case


@EACH
def test_prompts_in_pieces_have_the_bits_of_one_call(variant, dtype):
    for case in long_cases(variant, dtype):
        case = replace(case, state=False, final=False)
        L = kda_ops.cut_length(f"chunk_{variant}_", case.H, 128, 128, dtype, CUDA)
        for flags in [{"invariant": True}, *([{}] if L is not None else [])]:
            whole, got = (prefill(case, x, **flags) for x in (None, WHERE))
            where = f"H {case.H}, transposed {case.transposed}, {flags}"
            assert_identical(got.o, whole.o, f"o, {where}")
            assert_identical(got.pool, whole.pool, f"states and snapshots, {where}")


@EACH
def test_training_in_pieces_has_the_bits_of_one_call(variant, dtype):
    for case in long_cases(variant, dtype):
        whole = few_bits(run(case, invariant=True))
        assert_all_identical(run_in_pieces(case, WHERE, invariant=True), whole)


@EACH
def test_prompts_tokens_and_drafts_have_the_bits_of_one_call(variant, dtype):
    steps = [[(1, 1, n % 4), (0, 1, 3 - n % 4)] for n in range(70)]
    calls = [[(0, 4097, 3)], [(1, 50, 0), (0, 3, 2), (None, 4, 0)], *steps]
    calls += [[(0, 5000, 0), (1, 1, 3)], [(1, 579, 0), (0, 830, 1)]]
    for case in long_cases(variant, dtype):
        case = replace(case, state=False, final=False, lengths=(10_000, 700), T=0)
        assert_identical(serve(case, calls, 3, null=0), forward(case, invariant=True)["o"], "o")


def test_a_captured_step_replays_with_new_tokens_and_slots(variant):
    case = replace(SMALL, variant=variant, lengths=(160, 160), state=False, final=False)
    want, x = forward(case, invariant=True)["o"], case.inputs(CUDA)
    cache, names = new_cache(case, 4, 2), ("q", "k", "v", "g", "beta")
    cache.reset()
    given = [torch.zeros_like(x[n][:, :9]) for n in names]
    slots, rejected = (torch.zeros(3, dtype=torch.int64, device=CUDA) for _ in range(2))
    offsets = torch.zeros(4, dtype=torch.int32, device=CUDA)

    def call():
        flags = case.flags("chunk_")
        o = cache.step(getattr(kda_ops, f"chunk_{variant}_"), *given, slots, offsets, **flags)
        cache.crop(rejected, slots)
        return o

    with torch.inference_mode():
        slots.fill_(-1)
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            o = call()
        slots.copy_(torch.tensor([3, -1, 1]))
        for t in range(0, 160, 2):
            for buffer, n in zip(given, names):  # two tokens, two drafts; three of nobody's; two
                first, second = x[n][:, t : t + 4], x[n][:, 160 + t : 162 + t]
                buffer[:, : first.shape[1]] = first
                buffer[:, 2:4] = x[n][:, :2]
                buffer[:, 7:9] = second
            offsets.copy_(torch.tensor([0, 4, 7, 9]))
            rejected.copy_(torch.tensor([2, 0, 0]))
            graph.replay()
            assert_identical(o[:, :2], want[:, t : t + 2], "o")
            assert_identical(o[:, 7:9], want[:, 160 + t : 162 + t], "o")
            assert not o[:, 4:7].any()


@pytest.mark.parametrize("words", ("", "--budget 1000 --slots 7"))
def test_a_model_whose_matmuls_have_fixed_rows_generates_the_bits_of_training(words):
    """fp32, products on blocks of 64 rows, TF32 as torch has it."""
    example.main(f"--invariant --device cuda --hidden 256 --heads 2 {words}".split())


@pytest.mark.parametrize(
    "group, words",
    ((1, {}), (2, {}), (1, dict(gate="softplus", safe_gate=False)), (2, dict(K=64, V=60))),
)
@EACH
def test_a_head_of_a_sequence_has_its_bits_in_any_call(variant, dtype, group, words):
    """Among many heads or alone, packed or not, strided or not, on any number of processors."""
    case = replace(LONG, variant=variant, dtype=dtype, lengths=(70, 3001, 0, 64, 1000), T=0)
    case = replace(case, H=48, HV=48 * group, strides="fused", **words)
    with tuning.force(processors=1):
        found = run(case, invariant=True)
    for n, head in ((1, 17), (3, 0)):
        whole = results_of(case, found, n, head)
        own, inputs, cotangents = head_alone(case, n, head)
        for count in COUNTS:
            with tuning.force(processors=count):
                got = few_bits(run(own, inputs=inputs, cotangents=cotangents, invariant=True))
            assert_all_identical(got, whole)
        for need in (("q",), ("v", "beta"), ("g",)):
            got = run(own, inputs=inputs, cotangents=cotangents, need=need, invariant=True)
            assert_all_identical(got, {m: x for m, x in whole.items() if m in got})


@pytest.mark.parametrize("K, V", ((128, 128), (64, 128), (20, 40)))
@EACH
def test_the_number_of_heads_changes_no_bit(variant, dtype, K, V):
    case = replace(SMALL, variant=variant, dtype=dtype, K=K, V=V, gate="softplus", safe_gate=False)
    for H in (1, 3, 4, 16, 44, 96):
        case = replace(case, H=H, HV=H)
        whole = results_of(case, run(case, invariant=True), 0, H - 1)
        own, inputs, cotangents = head_alone(case, 0, H - 1)
        got = run(own, inputs=inputs, cotangents=cotangents, invariant=True)
        assert_all_identical(few_bits(got), whole)


@EACH
def test_strides_and_addresses_change_no_bit(variant, dtype):
    case = replace(SMALL, variant=variant, dtype=dtype, B=2)
    for strides in ("heads_first", "fused", "expanded", "every_second", "off"):
        given = case if strides == "off" else replace(case, strides=strides)
        inputs = given.inputs(CUDA)
        dense = {n: None if x is None else x.clone(memory_format=torch.contiguous_format)
                 for n, x in inputs.items()}  # fmt: skip
        if strides == "off":
            inputs = {n: None if x is None else off(x) for n, x in inputs.items()}
        got, want = (run(given, inputs=x, invariant=True) for x in (inputs, dense))
        assert_all_identical(got, want)


def off(x):
    """Copy a tensor to an address that is no multiple of 16 bytes."""
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


@EACH
def test_heads_change_no_bit_of_the_sums_over_the_batch(variant, dtype):
    case = replace(SMALL, variant=variant, dtype=dtype, B=3, T=5000, H=8, HV=8, gate="bounded")
    case, half = replace(case, safe_gate=False), slice(4, 8)
    inputs, (do, dfinal) = case.inputs(CUDA), case.cotangents(CUDA)
    own = {n: inputs[n][:, :, half] for n in ("q", "k", "v", "g", "beta")}
    own |= {n: of_heads(inputs[n], 8, half) for n in SHARED if inputs[n] is not None}
    own |= {"initial_state": inputs["initial_state"][:, half]}
    given = do[:, :, half], dfinal[:, half]
    whole = run(case, invariant=True)
    got = run(replace(case, H=4, HV=4), inputs=inputs | own, cotangents=given, invariant=True)
    for name in ("dA_log", "ddt_bias"):
        if name in whole:
            want = of_heads(whole[name], 8, half)
            assert_identical(got[name].flatten(), want.flatten(), name)


@EACH
def test_what_a_gpu_chooses_by_changes_no_bit(variant, dtype):
    case = replace(LONG, variant=variant, dtype=dtype, H=16, HV=16)
    want = run(case, invariant=True)
    for run_length, count in ((1, 132), (None, 1), (None, 10**6)):
        with tuning.force(processors=count, run=run_length):
            assert_all_identical(run(case, invariant=True), want)


@EACH
def test_training_and_inference_have_the_same_bits(variant, dtype):
    case = replace(LONG, variant=variant, dtype=dtype, H=4, HV=4)
    kept = replace(case, disable_recompute=True)
    want = run(case, invariant=True)
    assert_all_identical(run(kept, invariant=True), want)
    got = run_in_pieces(case, [[]], need=None, invariant=True)
    assert_all_identical(got, {n: want[n] for n in ("o", "final_state")})


@pytest.mark.parametrize("gate", ("weak", "bounded", "softplus"))
@EACH
def test_invariant_calls_meet_the_budget(variant, dtype, gate, poisoned_scratch):
    # enough heads that the twin's error of dA_log is not near zero by chance
    case = replace(SMALL, variant=variant, dtype=dtype, T=300, H=4, HV=8, gate=gate)
    case = replace(case, safe_gate=gate == "weak")
    assert_meets_budget(case, got=run(case, invariant=True))


def test_the_device_s_own_rule_cuts_few_heads():
    """So the tests above can fail."""
    assert tuning.longest_run(4, 128, 128, BF16, torch.device("cuda", 0))
    case = replace(LONG, variant="gdn", H=4, HV=4, gate="zero")
    got, want = run_in_pieces(case, WHERE, need=None), run(case, need=GRADIENTS)
    assert not torch.equal(got["o"], want["o"])
