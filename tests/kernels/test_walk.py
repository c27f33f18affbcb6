"""KDA's forward as one walk: when it is taken, and what it computes, on the emulator of Gluon."""

from dataclasses import replace

import pytest
import torch

from kda_ops import chunk
from kda_ops.backends.reference import Reference
from kda_ops.backends.triton import tuning
from kda_ops.backends.triton.stages import walk
from kda_ops.problem import Problem
from kda_ops.stages import GRADIENTS
from tests.support.calls import Results
from tests.support.cases import EDGES, FAR, Case, Tensors
from tests.support.closeness import assert_all_close, assert_all_identical, assert_identical, drawn
from tests.support.emulated import emulated
from tests.support.gates import gated, hidden
from tests.support.pools import Pool

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
PER_TOKEN = ("q", "k", "v", "g", "beta")
pytestmark = pytest.mark.usefixtures("poisoned_scratch")


class Walking(Reference):
    """A backend whose forward is the walk."""

    def infer(self, p, o, final_state):
        walk.walk(p, o, final_state)


def walked(case: Case, inputs: Tensors | None = None, **options) -> Results:
    """Return the results of a call that walks."""
    args = tuple((case.inputs() if inputs is None else inputs).values())
    with torch.no_grad(), emulated(walk, **options):
        o, final_state = chunk.Infer(1, args, case.flags()).run(Walking())
    return {"o": o, "final_state": final_state} if case.final else {"o": o}


def defined(inputs: Tensors, flags: dict, twin: Reference | None = None) -> Results:
    """Return the results of the recurrence in float64, or those of a twin of the kernels."""
    if twin is None:
        inputs = {
            n: x.double() if x is not None and x.is_floating_point() else x
            for n, x in inputs.items()
        }
    with torch.no_grad():
        p = Problem.parse(1, *inputs.values(), **flags)
        o, final_state = p.new_output(), p.new_final_state()
        if twin is None:
            Reference().step(p, o, final_state)
        else:
            twin.scan(p, twin.prepare(p), o, final_state, keep=False)
    return {"o": o, "final_state": final_state} if p.output_final_state else {"o": o}


def assert_right(got: Results, inputs: Tensors, flags: dict) -> None:
    """Hold results to the error budget of the definition."""
    want = defined(inputs, flags)

    def twin(draw: int) -> Results:
        made = defined(inputs, flags, drawn(draw, FP32, BF16))
        return {n: x.to(got[n].dtype) for n, x in made.items()}  # a pool may have bf16

    assert_all_close(got, want, twin)


GIVEN = Case(T=97, K=128, V=128, dtype=BF16, gate="weak", safe_gate=True)
RAW = replace(GIVEN, gate="bounded", beta="sigmoid", l2norm=True, seed=1)
# decays without a bound: given without a promise, or made by the softplus gate
FREE = replace(GIVEN, safe_gate=False)
SOFTPLUS = replace(RAW, gate="softplus", safe_gate=False)
PACKED = replace(GIVEN, lengths=(0, 1, 31, 32, 33, 63, 64, 65, 37, 131), tail=70)
CASES = {
    "weak decays": GIVEN,
    "strong decays": replace(GIVEN, gate="strong", T=130),
    "no decay": replace(GIVEN, gate="zero", state=False, final=False),
    "raw": RAW,
    "raw, without A_log": replace(RAW, seed=3, T=64),
    "raw, equal keys": replace(RAW, keys="repeated"),
    "raw, negative eigenvalues": replace(RAW, beta="neg_eigval"),
    "raw gate, given norm and beta": replace(GIVEN, gate="bounded"),
    "given gate, norm and sigmoid inside": replace(RAW, gate="strong"),
    "no beta": replace(GIVEN, beta="none"),
    "promised keys and beta": replace(GIVEN, gate="strong", safe_beta=True, safe_keys=True),
    "promised, equal keys, beta 0 or 1": replace(
        GIVEN, keys="repeated", beta=EDGES, gate="zero", safe_beta=True, safe_keys=True
    ),
    "keys of norm 1.4": replace(GIVEN, k_length=1.4),
    "no beta, raw gate": replace(RAW, beta="none"),
    "g and beta in bf16": replace(GIVEN, narrow=True, gate="strong"),
    "raw in bf16": replace(RAW, narrow=True),
    "batch": replace(GIVEN, B=2),
    "batch, raw": replace(RAW, B=2, T=65, transposed=True),
    "packed": PACKED,
    "packed, raw": replace(RAW, lengths=PACKED.lengths, tail=3),
    "packed, no tail": replace(GIVEN, lengths=(37, 91), transposed=True),
    "grouped": replace(RAW, H=2, HV=4, T=70),
    "no final state": replace(GIVEN, final=False, T=31),
    "no initial state": replace(GIVEN, state=False, T=32),
    "another scale": replace(GIVEN, scale=0.3, T=33),
    "a state with heads first": replace(GIVEN, strides="heads_first", T=1),
    "no sequences": replace(GIVEN, lengths=(), tail=5),
    "empty sequences": replace(RAW, lengths=(0, 0), tail=70),
    "equal keys, beta 0 or 1, no decay": replace(GIVEN, keys="repeated", beta=EDGES, gate="zero"),
    **{name: replace(GIVEN, gate="strong", **more) for name, more in FAR.items()},
    "softplus": SOFTPLUS,
    "softplus, without a norm": replace(SOFTPLUS, l2norm=False, beta="given"),
    "softplus in bf16, grouped": replace(SOFTPLUS, narrow=True, H=2, HV=4, T=70),
    "softplus, packed": replace(SOFTPLUS, lengths=PACKED.lengths, tail=3),
    "no promise, packed": replace(PACKED, safe_gate=False, gate="blocks"),
    "no promise, batch": replace(FREE, gate="strong", B=2, T=65, state=False, transposed=True),
    "no promise, in bf16": replace(FREE, gate="strong", narrow=True),
    "no promise, equal keys, beta 0 or 1": replace(FREE, keys="repeated", beta=EDGES, gate="zero"),
    **{
        f"no promise, {gate}": replace(FREE, gate=gate, T=130)
        for gate in ("weak", "strong", "steep", "blocks", "reset", "forget")
    },
    **{f"no promise, {n}": replace(FREE, gate="strong", **more) for n, more in FAR.items()},
}


@pytest.mark.parametrize("name", CASES)
def test_the_walk_meets_the_error_budget(name):
    case = CASES[name]
    assert_right(walked(case), case.inputs(), case.flags())


@pytest.mark.quick
@pytest.mark.parametrize(
    "case, decay", ((GIVEN, -5.0), (FREE, -5.0), (FREE, -19.0), (FREE, -88.0)), ids=str
)
def test_equal_decays_meet_the_error_budget(case, decay):
    inputs = case.inputs() | {"g": torch.full((1, case.T, case.HV, case.K), decay)}
    assert_right(walked(case, inputs), inputs, case.flags())


@pytest.mark.parametrize("A_log", (-200.0, 0.0, 3.0, 200.0))
@pytest.mark.parametrize("case", (RAW, SOFTPLUS), ids=("bounded", "softplus"))
def test_infinite_logits_and_extreme_rates_meet_the_error_budget(case, A_log):
    inputs = case.inputs()
    inputs["A_log"] = torch.full_like(inputs["A_log"], A_log)
    if abs(A_log) < 100.0:  # a rate of zero or infinity would make them NaN
        inputs["g"][:, 3:9], inputs["g"][:, 40:50] = -torch.inf, torch.inf
    assert_right(walked(case, inputs), inputs, case.flags())


@pytest.mark.parametrize("case", (RAW, SOFTPLUS), ids=("bounded", "softplus"))
def test_a_rate_that_is_nan_makes_its_head_nan(case):
    case = replace(case, T=5, HV=2)
    inputs, want = case.inputs(), walked(case)
    inputs["A_log"][0] = torch.nan
    got = walked(case, inputs)
    assert got["o"][:, :, 0].isnan().all()
    assert_identical(got["o"][:, :, 1], want["o"][:, :, 1])


@pytest.mark.parametrize("T", (1, 33, 70))
@pytest.mark.parametrize("gate", ("bounded", "softplus"))
def test_rows_past_the_end_do_not_decay(gate, T):
    case = gated("kda", gate, BF16, T=T, HV=1, K=128, V=128)
    assert_right(walked(case, hidden(case)), hidden(case), case.flags())


@pytest.mark.parametrize("T", (1, 31, 32, 33, 37, 63, 64, 65, 127, 128))
@pytest.mark.parametrize("case", (RAW, SOFTPLUS), ids=("bounded", "softplus"))
def test_every_length_meets_the_error_budget(case, T):
    case = replace(case, T=T, HV=1)
    assert_right(walked(case), case.inputs(), case.flags())


EACH = (GIVEN, RAW, replace(FREE, gate="blocks"), SOFTPLUS)


def cut(inputs: Tensors, first: int, end: int) -> Tensors:
    """Return the inputs of some tokens of the first batch row."""
    return {
        n: x[:1, first:end] if n in PER_TOKEN and x is not None else x for n, x in inputs.items()
    }


def alone(inputs: Tensors, first: int, end: int, initial: torch.Tensor | None) -> Tensors:
    """Return the inputs of some tokens as a call of their own."""
    return cut(inputs, first, end) | {"initial_state": initial, "cu_seqlens": None}


@pytest.mark.bits
@pytest.mark.parametrize(
    "name", ("strong decays", "raw", "packed, raw", "grouped", "softplus in bf16, grouped")
)
def test_no_order_of_the_partitions_changes_a_bit(name):
    want = walked(CASES[name])
    for seed in range(1, 5):
        assert_all_identical(walked(CASES[name], seed=seed), want)


# The two kernels for few sequences and heads: `prepare_walk`, several programs per head, and
# `scan_walk`.
APART = {
    name: 2 + i % 2
    for i, name in enumerate(
        (
            *("strong decays", "raw", "raw in bf16", "no beta, raw gate", "batch", "batch, raw"),
            *("packed", "packed, raw", "packed, no tail", "grouped", "no initial state"),
            *("a state with heads first", "no sequences", "empty sequences"),
            *("softplus", "softplus in bf16, grouped", "softplus, packed", "no promise, packed"),
        )
    )
} | {"no promise, strong": 5}


@pytest.mark.bits
@pytest.mark.parametrize("name", APART)
def test_two_kernels_give_the_bits_of_one(name, force):
    want = walked(CASES[name])
    force(shares=APART[name])
    for seed in range(2):
        assert_all_identical(walked(CASES[name], seed=seed), want)


@pytest.mark.bits
def test_views_of_one_projection_give_the_bits_of_copies():
    case = replace(GIVEN, H=2)
    inputs = case.inputs()
    fused = torch.cat([inputs[n].flatten(2) for n in "qkv"], -1)
    views = (x.unflatten(-1, (2, 128)) for x in fused.split(256, -1))
    assert_all_identical(walked(case, inputs | dict(zip("qkv", views))), walked(case, inputs))


@pytest.mark.bits
def test_shared_keys_give_the_bits_of_repeated_ones():
    case = CASES["grouped"]
    inputs = case.inputs()
    repeated = {n: inputs[n].repeat_interleave(2, 2) for n in "qk"}
    assert_all_identical(walked(replace(case, H=4), inputs | repeated), walked(case))


@pytest.mark.bits
def test_both_layouts_of_a_state_give_the_same_bits():
    case = replace(RAW, transposed=True)
    inputs = case.inputs()
    turned = inputs | {"initial_state": inputs["initial_state"].mT.contiguous()}
    want = walked(replace(case, transposed=False), turned)
    assert_all_identical(walked(case, inputs), want | {"final_state": want["final_state"].mT})


@pytest.mark.bits
@pytest.mark.parametrize("name", ("packed", "packed, raw", "no promise, packed"))
def test_a_packed_sequence_gives_the_bits_of_the_sequence_alone(name):
    case = CASES[name]
    inputs, got = case.inputs(), walked(case)
    for n, (_, first, end) in enumerate(case.spans):
        if first == end:  # a call without tokens does not walk
            continue
        one = alone(inputs, first, end, inputs["initial_state"][n : n + 1])
        want = {"o": got["o"][:, first:end], "final_state": got["final_state"][n : n + 1]}
        assert_all_identical(walked(case, one), want)


@pytest.mark.once
@pytest.mark.bits
@pytest.mark.parametrize("seen", (1, 31, 32, 33, 37, 63, 64, 65, 96))
@pytest.mark.parametrize("case", EACH, ids=("given", "raw", "no promise", "softplus"))
def test_later_tokens_change_no_earlier_bit(case, seen):
    prefix = walked(case, cut(case.inputs(), 0, seen))["o"]
    assert_identical(prefix, walked(case)["o"][:, :seen], "o")


@pytest.mark.once
@pytest.mark.bits
@pytest.mark.parametrize("name", PER_TOKEN)
@pytest.mark.parametrize("case", EACH, ids=("given", "raw", "no promise", "softplus"))
@pytest.mark.parametrize("token", (33, 64, 95))
def test_a_token_of_nan_reaches_no_half_of_a_chunk_before_its_own(case, name, token):
    inputs = case.inputs()
    spoilt = inputs[name].clone()
    spoilt[:, token] = torch.nan
    got, before = walked(case, inputs | {name: spoilt})["o"], token // 32 * 32
    assert_identical(got[:, :before], walked(case)["o"][:, :before], "o")
    assert got[:, token].isnan().all()


@pytest.mark.bits
@pytest.mark.parametrize("name", ("packed", "packed, raw", "softplus, packed"))
def test_tokens_of_no_sequence_change_no_bit_and_get_zeros(name):
    case, want = CASES[name], walked(CASES[name])
    inputs, end = case.inputs(), sum(case.lengths)
    for x in (inputs[n] for n in PER_TOKEN):
        x[:, end:] = torch.nan
    assert_all_identical(walked(case, inputs), want)
    assert not want["o"][:, end:].any()


@pytest.mark.bits
@pytest.mark.parametrize(
    "name", ("raw, dead first", "snapshots", "bf16", "null slots", "new requests")
)
def test_two_kernels_write_the_bits_of_one_to_a_pool(name, force):
    want = prefilled(POOLS[name])
    force(shares=2)
    for got, expected in zip(prefilled(POOLS[name]), want):
        assert_identical(got, expected, "o and the pool")


def prefilled(pool: Pool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return o and the pool after a prefill that walks."""
    x, state = pool.case.inputs(), pool.state()
    slots, _, snapshots = pool.indices()
    per_token = (x[n] for n in PER_TOKEN)
    args = (*per_token, state, slots, snapshots, x["A_log"], x["dt_bias"], x["cu_seqlens"])
    args += (pool.resumed(),)
    with torch.no_grad(), emulated(walk):
        (o,) = chunk.Prefill(1, args, pool.flags()).run(Walking())
    return o, state


def slots_after(pool: Pool, n: int) -> dict[int, int]:
    """Return each slot that sequence n writes, and after how many of its tokens."""
    _, first, end = pool.case.spans[n]
    _, _, snapshots = pool.indices()
    written = {int(pool.start()[n]): end - first} if pool.final else {}
    for j, slot in enumerate([] if snapshots is None else snapshots[n].tolist()):
        length = 64 * pool.every * (j + 1)
        if slot > pool.null and length <= end - first:
            written[slot] = length
    return written


POOLS = {
    "given": Pool(
        replace(GIVEN, lengths=(70, 0, 130, 5), tail=2), dead=(False, False, False, True)
    ),
    "raw, dead first": Pool(replace(RAW, lengths=(64, 33), tail=2), dead=(True, False)),
    "snapshots": Pool(replace(GIVEN, lengths=(131, 64, 200), HV=1), snapshots=2),
    "moved on": Pool(replace(RAW, lengths=(64, 131, 33), HV=1), snapshots=1, final=False),
    "every second chunk": Pool(replace(RAW, lengths=(300, 128), HV=1), snapshots=2, every=2),
    "bf16": Pool(replace(RAW, lengths=(65, 64)), snapshots=1, dtype=BF16),
    "softplus": Pool(replace(SOFTPLUS, lengths=(131, 64), HV=1), snapshots=2),
    "turned, not packed": Pool(replace(GIVEN, B=2, transposed=True), snapshots=1),
    "without slots": Pool(replace(GIVEN, B=2, T=33), indexed=False),
    "new requests": Pool(
        replace(GIVEN, lengths=(70, 0, 131, 5), HV=1),
        dead=(False, False, False, True),
        snapshots=1,
        fresh=(True, True, False, True),
    ),
    "new requests, not packed": Pool(
        replace(RAW, B=2, T=33), indexed=False, dtype=BF16, fresh=(False, True)
    ),
    "null slots": Pool(
        replace(GIVEN, lengths=(131, 70, 64), HV=1), dead=(False, False, True), snapshots=2, null=1
    ),
}


@pytest.mark.parametrize("name", POOLS)
def test_a_prefill_writes_the_slots_it_names_and_nothing_else(name):
    pool = POOLS[name]
    case, before, (o, after) = pool.case, pool.state(), prefilled(pool)
    inputs, flags = case.inputs(), replace(case, final=True).flags()
    inputs |= {n: None if x is None else x.contiguous() for n, x in inputs.items()}
    untouched = set(range(pool.slots))
    for n, (row, first, end) in enumerate(case.spans):
        if pool.is_dead(n):
            assert not o[row, first:end].any(), "a sequence without a slot has an output"
            continue
        here = {m: x[row:] if m in PER_TOKEN and x is not None else x for m, x in inputs.items()}
        for slot, length in slots_after(pool, n).items():
            x = alone(here, first, first + length, pool.initial(n).float())
            got = {"o": o[row : row + 1, first : first + length], "final_state": after[slot][None]}
            assert_right(got, x, flags)
            untouched.remove(slot)
    rest = sorted(untouched)
    assert_identical(after[rest], before[rest], "slots that no sequence names")


def empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def asks(
    B=1,
    T=256,
    H=64,
    HV=64,
    K=128,
    V=128,
    dtype=BF16,
    q=None,
    g=FP32,
    rank=1,
    beta=BF16,
    bound: float | None = -5.0,
    state=None,
    final=None,
    **changed,
) -> bool:
    """Return whether a call walks, on tensors that only have shapes."""
    flags = dict(use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=beta is not None)
    if bound is not None:
        flags |= dict(use_gate_in_kernel=True, lower_bound=bound)
    width = [K] if rank else []
    p = Problem.parse(
        rank,
        empty(B, T, H, K, dtype=dtype) if q is None else q,
        empty(B, T, H, K, dtype=dtype),
        empty(B, T, HV, V, dtype=dtype),
        None if g is None else empty(B, T, HV, *width, dtype=g),
        None if beta is None else empty(B, T, HV, dtype=beta),
        None,
        None,
        state,
        None,
        **flags | changed,
    )
    with tuning.force(processors=132):
        return walk.walks_forward(p, final)


GIVEN_FLAGS = dict(
    use_qk_l2norm_in_kernel=False, use_beta_sigmoid_in_kernel=False, safe_beta=True, safe_keys=True
)
FAR_STATE = torch.empty(1, device="meta").as_strided((1, 64, 128, 128), (0, 0, 2**30, 1))


@pytest.mark.quick
@pytest.mark.parametrize(
    "call",
    (
        {},
        dict(B=8, T=1),
        dict(H=16),
        dict(HV=96, H=96),
        dict(HV=23, H=23),
        dict(g=BF16),
        dict(bound=None, safe_gate=True),
        dict(bound=-2.0),
        dict(bound=None, safe_gate=True, **GIVEN_FLAGS),
        dict(allow_neg_eigval=True),
        dict(**GIVEN_FLAGS | dict(safe_beta=False)),
        dict(**GIVEN_FLAGS | dict(safe_keys=False)),
        dict(beta=None),
        dict(beta=FP32),
        dict(q=empty(1, 256, 3 * 64 * 128)[..., : 64 * 128].unflatten(-1, (64, 128))),
        dict(final=empty(1, 64, 128, 128, dtype=FP32).mT),
    ),
    ids=str,
)
def test_bounded_decays_of_many_heads_walk(call):
    assert asks(**call)


@pytest.mark.quick
@pytest.mark.parametrize(
    "call",
    (
        dict(HV=22, H=22),
        dict(B=8, HV=16, H=16),  # the batch must not count
        dict(T=0),
        dict(rank=0),
        dict(dtype=FP16),
        dict(dtype=FP32),
        dict(K=64),
        dict(V=64),
        dict(bound=None),
        dict(bound=-6.0),
        dict(g=None, bound=None),
        dict(q=empty(1, 64, 256, 128).transpose(1, 2)),
        dict(q=empty(1, 256, 64, 129)[..., :128]),
        dict(state=FAR_STATE.float()),
        dict(final=FAR_STATE),
    ),
    ids=str,
)
def test_other_calls_do_not_walk(call):
    assert not asks(**call)


@pytest.mark.quick
@pytest.mark.parametrize(
    "name, value", (("architecture", 8), ("architecture", 10), ("walk", False))
)
def test_other_architectures_do_not_walk(name, value, force):
    force(**{name: value})
    assert not asks()


@pytest.mark.quick
def test_few_heads_walk_where_tests_say_so(force):
    force(walk=True)
    assert asks(H=1, HV=1) and not asks(dtype=FP16)


@pytest.mark.quick
def test_decays_without_a_bound_walk_forward_where_tests_say_so(force):
    assert not asks(bound=None)
    force(walk=True)
    x, g = empty(1, 256, 64, 128), empty(1, 256, 64, 128, dtype=FP32)
    p = Problem.parse(1, x, x, x, g, None, None, None, None, None)
    assert asks(bound=None) and asks(bound=-6.0) and not asks(bound=None, dtype=FP16)
    assert tuning.walks(p) and not tuning.walks_back(p, frozenset(GRADIENTS))


@pytest.mark.quick
def test_without_gluon_nothing_walks(monkeypatch):
    monkeypatch.setattr(walk, "KERNEL", None)
    monkeypatch.setattr(tuning, "has_gluon", lambda: False)
    assert not asks()
    assert "no known Gluon" in walk.path(torch.device("meta"))


@pytest.mark.quick
def test_the_doctor_is_told_why(force):
    meta = torch.device("meta")
    force(processors=132)
    said = walk.path(meta)
    assert "from 23 value heads on" in said and "two kernels up to 44" in said
    assert "back from 53" in said
    force(architecture=10)
    assert "capability 9.0" in walk.path(meta)


@pytest.mark.quick
@pytest.mark.parametrize(
    "B, T, HV, shares, unbounded",
    (
        *((1, 8192, 23, 3, 4), (1, 8192, 26, 3, 4), (1, 8192, 27, 3, 3), (1, 8192, 33, 3, 3)),
        *((1, 8192, 34, 2, 2), (1, 8192, 44, 2, 2), (1, 8192, 45, 0, 0), (1, 512, 32, 3, 3)),
        *((1, 511, 32, 0, 0), (2, 8192, 32, 0, 0), (0, 8192, 32, 0, 0), (1, 8192, 22, 3, 5)),
    ),
)
def test_scans_have_as_many_preparing_programs_as_find_room(B, T, HV, shares, unbounded, force):
    force(processors=132)
    x, g = empty(B, T, HV, 128), empty(B, T, HV, 128, dtype=FP32)
    for safe, want in ((True, shares), (False, unbounded)):
        p = Problem.parse(1, x, x, x, g, None, None, None, None, None, safe_gate=safe)
        assert tuning.shares(p) == want
