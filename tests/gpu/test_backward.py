"""The backward kernels on a GPU: every width and dtype that is shipped, stage by stage, against
float64; and twice the same bits.
"""

import pytest
import torch

from kda_ops import dispatch
from kda_ops.backends.triton import tuning
from kda_ops.backends.triton.stages.gradient_small import SMALL
from kda_ops.problem import Problem
from tests.support.calls import run
from tests.support.cases import Case, replace
from tests.support.closeness import assert_all_identical, assert_identical
from tests.support.plans import forget_plans
from tests.support.small_beta import LIMIT, error, small_beta
from tests.support.stage import Stages, assert_stage

CUDA = torch.device("cuda")
TRITON = dispatch.load("triton")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

SIZES = dict(dtype=BF16, K=128, V=128, H=2, HV=4)
LAYER = Case(gate="bounded", beta="sigmoid", l2norm=True, **SIZES)


pytestmark = pytest.mark.usefixtures("poisoned_scratch")


@pytest.mark.parametrize("dtype", (BF16, FP16, FP32), ids=str)
@pytest.mark.parametrize("K, V", ((128, 128), (64, 64), (256, 256), (100, 200), (16, 512), (7, 1)))
def test_every_width_meets_its_budget(variant, dtype, K, V):
    case = Case(variant, dtype=dtype, K=K, V=V, T=130, HV=1, gate="softplus", l2norm=True)
    stages = Stages.build(replace(case, keys="correlated"))
    for stage in ("reverse_scan", "gradient"):
        assert_stage(stage, stages, TRITON, CUDA)


@pytest.mark.parametrize("gate", ("weak", "strong", "zero", "reset", "forget", "bounded", "none"))
@pytest.mark.parametrize("keys", ("random", "repeated"))
def test_every_gate_meets_its_budget(variant, gate, keys):
    safe = gate in ("weak", "strong", "zero", "none")
    case = Case(variant, gate=gate, keys=keys, safe_gate=safe, **SIZES)
    stages = Stages.build(replace(case, lengths=(0, 65, 1, 128, 37), tail=70))
    for stage in ("reverse_scan", "gradient"):
        assert_stage(stage, stages, TRITON, CUDA)


@pytest.mark.parametrize("gate", ("bounded", "softplus"))
def test_two_runs_give_the_same_bits(variant, gate):
    """Also what a cast, transposed product as an operand would break: it is wrong in some runs of
    some widths.
    """
    stages = Stages.build(replace(LAYER, variant=variant, T=257, gate=gate))
    for stage in ("reverse_scan", "gradient"):
        first, second = stages.run(stage, TRITON, CUDA), stages.run(stage, TRITON, CUDA)
        for name in first:
            assert_identical(first[name], second[name], name)


@pytest.mark.parametrize("length", (0, 2))
def test_the_cut_of_the_scans_changes_no_bit(monkeypatch, variant, length, force):
    """All columns or half of them per program: the table chooses by the number of heads and
    sequences, or of runs and their maps, which results may not depend on.
    """
    case = replace(LAYER, variant=variant, lengths=(0, 65, 1, 300, 37), beta="given")
    found, table = [], tuning.table
    force(run=length, walk=False)
    # no room for two programs per head; room for all
    for processors, columns in ((1, 128), (10**6, 64)):
        chosen = {}
        forget_plans()
        force(processors=processors)
        monkeypatch.setattr(
            tuning,
            "table",
            lambda kernel, *args, chosen=chosen: chosen.setdefault(kernel, table(kernel, *args)),
        )
        found.append(run(case))
        assert [options.block_v for kernel, options in chosen.items() if "scan" in kernel] == [
            columns
        ] * (4 if length else 2)
    assert_all_identical(*found)


@pytest.mark.parametrize("kept", (False, True))
def test_scans_side_by_side_change_no_bit(force, variant, kept):
    """On a second stream or not, eager, again and again over memory that is used anew, and in a
    CUDA graph.
    """
    packed = dict(lengths=(2100, 65, 3000), disable_recompute=kept)
    case = replace(LAYER, variant=variant, HV=2, **packed)
    inputs, cotangents = case.inputs(CUDA), case.cotangents(CUDA)

    def gradients():
        return run(case, inputs=inputs, cotangents=cotangents)

    force(leaves_room=False)
    want = gradients()
    force(leaves_room=True)
    forget_plans()
    for _ in range(5):
        assert_all_identical(want, gradients())
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        found = gradients()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=other):
            captured = gradients()
        graph.replay()
    torch.cuda.current_stream().wait_stream(other)
    assert_all_identical(want, found)
    assert_all_identical(want, captured)


def test_one_long_sequence_of_few_heads_leaves_room(force):
    force(processors=132)

    def asks(T, H):
        x = torch.empty(1, T, H, 128, dtype=BF16, device=CUDA)
        beta = torch.empty(1, T, H, dtype=BF16, device=CUDA)
        return tuning.leaves_room(Problem.parse(1, x, x, x, x.float(), beta))

    # too short, too many heads, cut into runs
    assert asks(16384, 32) and not asks(8192, 32) and not asks(16384, 96) and not asks(16384, 8)


def test_lengths_and_batches_do_not_recompile(variant):
    """KDA's backward has two versions, for B T that 16 divides or not (docs/compile.md)."""
    from triton.runtime.jit import JITFunction

    counted, compiled = [], JITFunction._do_compile

    def count(self, *args, **kwargs):
        counted.append(self.fn.__name__)
        return compiled(self, *args, **kwargs)

    case = replace(LAYER, variant=variant, B=2, T=96, H=1, HV=2)
    run(case)
    JITFunction._do_compile = count
    try:
        for B, T, scale in (
            (2, 96, 0.1),
            (3, 208, 0.2),
            (5, 131 if variant == "gdn" else 144, 0.3),
        ):
            case = replace(case, B=B, T=T, scale=scale)
            run(case)
    finally:
        JITFunction._do_compile = compiled
    assert not counted


def test_the_first_call_compiles_all_its_kernels_at_once(variant):
    from triton.runtime.jit import JITFunction

    asked, compiled = [], JITFunction._do_compile

    def note(self, key, signature, device, constexprs, options, attrs, warmup):
        asked.append((self.fn.__name__, warmup))
        return compiled(self, key, signature, device, constexprs, options, attrs, warmup)

    # no other test's widths
    case = replace(LAYER, variant=variant, K=40, V=72, T=150, HV=2, gate="softplus")
    JITFunction._do_compile = note
    try:
        first = run(case)
        count = len(asked)
        assert_all_identical(first, run(case))
    finally:
        JITFunction._do_compile = compiled
    assert count >= 4 and len(asked) == count and all(warmup for _, warmup in asked), asked


@pytest.mark.parametrize("neg_eigval", (False, True))
def test_float16_keeps_the_gradient_of_a_small_beta(variant, neg_eigval):
    case, inputs, cotangents, want = small_beta(variant, neg_eigval, T=150, K=64, V=64)
    inputs = {n: None if x is None else x.to(CUDA) for n, x in inputs.items()}
    cotangents = [None if x is None else x.to(CUDA) for x in cotangents]
    got = run(case, inputs=inputs, cotangents=cotangents)
    assert error(got, want, "dbeta") < LIMIT and error(got, want, "dg") < LIMIT


def test_the_scratch_of_a_training_step_is_bounded():
    """300 KB per chunk of a value head besides the inputs, outputs and gradients included: 4.9 GB
    at B8 T4096 H32.
    """
    torch.use_deterministic_algorithms(False)
    B, T, H, K = 1, 8192, 16, 128
    q, k, v, g = (
        torch.randn(B, T, H, K, device=CUDA, dtype=BF16, requires_grad=True) for _ in "qkvg"
    )
    beta, A_log, dt_bias = (
        torch.randn(*s, device=CUDA, requires_grad=True) for s in ((B, T, H), (H,), (H, K))
    )

    def step():
        flags = dict(
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            lower_bound=-5.0,
            use_beta_sigmoid_in_kernel=True,
        )
        o, _ = torch.ops.kda.chunk(q, k, v, g, beta, A_log, dt_bias, **flags)
        return torch.autograd.grad(o, (q, k, v, g, beta, A_log, dt_bias), torch.ones_like(o))

    step()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    assert torch.cuda.max_memory_allocated() - before <= 300_000 * (T // 64) * B * H


@pytest.mark.parametrize("gate", ("strong", "weak"))
def test_gradients_of_a_promised_beta_are_those_of_one_that_is_not(gate):
    """`gradient_small` computes dbeta where beta is too small to divide by."""
    case = Case(T=330, gate=gate, safe_gate=True, l2norm=True, **SIZES)
    inputs, cotangents = case.inputs(CUDA), case.cotangents(CUDA)
    values = (0.0, 1e-12, SMALL.value / 2, SMALL.value)
    for i, value in enumerate(values):
        inputs["beta"][:, i::7] = value
    got, again, want = (
        run(case, inputs=inputs, cotangents=cotangents, safe_beta=safe)
        for safe in (True, True, False)
    )
    assert_all_identical(got, again)
    for name, x in want.items():
        error = (got[name].double() - x.double()).norm() / x.double().norm()
        assert error < 1e-2, name
    for value in values:
        rows = inputs["beta"] == torch.tensor(value, dtype=torch.float32)
        off = (got["dbeta"] - want["dbeta"])[rows].abs().max()
        assert off < 1e-2 * want["dbeta"][rows].abs().max()
