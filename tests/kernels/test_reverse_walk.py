"""GDN's backward as one walk: when it is taken, and what it computes, on the emulator of Gluon."""

from dataclasses import replace

import pytest
import torch

from kda_ops import chunk
from kda_ops.backends.reference import Reference
from kda_ops.backends.triton import tuning
from kda_ops.backends.triton.stages import reverse_walk
from kda_ops.problem import Problem
from kda_ops.registrations import schemas
from kda_ops.stages import GRADIENTS
from tests.support.cases import Case
from tests.support.closeness import assert_all_identical, assert_identical, assert_meets_budget
from tests.support.fresh import python
from tests.support.reverse_walk import walked
from tests.support.target import GPU

PER_TOKEN = ("q", "k", "v", "g", "beta")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
pytestmark = pytest.mark.usefixtures("poisoned_scratch")


def empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def asks(
    B=2,
    T=256,
    H=32,
    HV=32,
    K=128,
    V=128,
    dtype=BF16,
    sigmoid=True,
    rank=0,
    need=GRADIENTS,
    q=None,
    do=True,
    dfinal=None,
    packed=0,
    **promises,
) -> bool:
    """Return whether a call walks, on tensors that only have shapes."""
    g = empty(B, T, HV, *([K] if rank else []), dtype=FP32)
    p = Problem.parse(
        rank,
        empty(B, T, H, K, dtype=dtype) if q is None else q,
        empty(B, T, H, K, dtype=dtype),
        empty(B, T, HV, V, dtype=dtype),
        g,
        empty(B, T, HV, dtype=dtype),
        None,
        None,
        None,
        empty(packed + 1, dtype=torch.int32) if packed else None,
        use_beta_sigmoid_in_kernel=sigmoid,
        **promises,
    )
    return reverse_walk.walks(p, p.new_output() if do else None, dfinal, frozenset(need))


@pytest.mark.quick
def test_gluon_is_known_here():
    assert reverse_walk.KERNEL is not None


@pytest.mark.quick
@pytest.mark.parametrize(
    "call",
    (
        {},
        dict(B=3, H=16, HV=16),  # 48 programs
        dict(B=1, packed=6, H=8, HV=8),
        dict(B=1, T=1088, H=24, HV=24),  # two runs
        dict(B=1, T=65536, H=4, HV=8, packed=3),
        dict(H=16),
        dict(dtype=FP16),
        dict(sigmoid=False),
        dict(sigmoid=False, safe_beta=True, safe_keys=True),
        dict(need=("q", "k", "v")),
        dict(q=empty(2, 256, 3 * 32 * 128)[..., : 32 * 128].unflatten(-1, (32, 128))),
        dict(dfinal=empty(2, 32, 128, 128, dtype=FP32).mT),
    ),
    ids=str,
)
def test_many_heads_or_runs_of_a_layer_walk(call, force):
    force(processors=132)
    assert asks(**call)


@pytest.mark.quick
@pytest.mark.parametrize(
    "call",
    (
        dict(B=1, HV=47, H=47),
        dict(B=1, T=1024, HV=24, H=24),
        dict(B=1, T=16384, H=1, HV=2),
        dict(B=1, T=0, H=64, HV=64),
        dict(rank=1),
        dict(dtype=FP32),
        dict(dtype=FP16, sigmoid=False),
        dict(K=64),
        dict(V=64),
        dict(H=8),  # four value heads of a key head
        dict(need=("q", "k", "g")),
        dict(do=False),
        dict(q=empty(2, 32, 256, 128).transpose(1, 2)),
        dict(q=empty(2, 256, 32, 129)[..., :128]),
        dict(dfinal=empty(1, 32, 128, 128).as_strided((2, 32, 128, 128), (0, 0, 2**30, 1))),
    ),
    ids=str,
)
def test_other_calls_do_not_walk(call, force):
    force(processors=132)
    assert not asks(**call)


@pytest.mark.quick
@pytest.mark.parametrize(
    "name, value", (("architecture", 8), ("architecture", 10), ("walk", False))
)
def test_other_architectures_do_not_walk(name, value, force):
    force(**{name: value})
    assert not asks()


@pytest.mark.quick
def test_without_gluon_nothing_walks(monkeypatch):
    monkeypatch.setattr(reverse_walk, "KERNEL", None)
    assert not asks()


COMPILED = r"""
import re
from triton.runtime.jit import JITFunction
from benchmarks.compile import offline
from benchmarks.calls import Call

ptx = {}
with offline(90, [""]):
    run = JITFunction.run
    def keep(self, *args, **options):
        made = run(self, *args, **options)
        ptx[self.fn.__name__] = made.asm["ptx"]
        return made
    JITFunction.run = keep
    Call(0, gate="softplus", keep=True, walk=True, group=1).compile()
blocks = re.split(r"(?m)^\$L__BB", ptx["reverse_walk_gdn"])
step, = (block for block in blocks if "wgmma.mma_async" in block)
swizzled = f" {str(1 << 62)[:6]}"  # what descriptors of operands begin with
formed = [part.count(swizzled) for part in step.split("wgmma.mma_async")]
print(step.count("bar.sync"), max(formed), sum(formed))
"""


@pytest.mark.quick
def test_a_step_has_no_extra_barrier_and_forms_descriptors_late(tmp_path):
    """Hazards "Waits for products" and "Descriptors of operands"."""
    shown = python(COMPILED, TRITON_CACHE_DIR=str(tmp_path))
    barriers, most, descriptors = map(int, shown.stdout.split())
    assert barriers == 7
    assert descriptors > 60 and most <= 16  # those of one product


class Walks(Reference):
    """A backend that walks, in the float64 of the definition."""

    def walks(self, p, do, dfinal_state, need):
        return True

    def reverse_scan(self, *args):
        raise AssertionError("the walk takes its place")

    def reverse_walk(self, p, tile, trace, do, dfinal_state, need):
        trace = trace or self.scan(p, tile, None, None, keep=True)
        reverse = Reference().reverse_scan(p, tile, do, dfinal_state, need)
        return self.gradient(p, tile, trace, do, reverse, need)


@pytest.mark.quick
@pytest.mark.bits
@pytest.mark.parametrize("kept", (False, True))
def test_backward_asks_for_the_walk_where_a_backend_has_one(kept):
    case = Case(variant="gdn", dtype=torch.float64, T=70, disable_recompute=kept)
    args = tuple(case.inputs().values())
    o, _, *saved = chunk.Forward(0, args, case.flags()).run(Reference())
    do, dfinal = case.cotangents()
    both = (do, dfinal, *saved, *args, None)
    flags = case.flags() | {"need": schemas.mask_of(x is not None for x in args)}
    found = [chunk.Backward(0, both, flags).run(b) for b in (Walks(), Reference())]
    for got, want in zip(*found):
        assert (got is None and want is None) or torch.equal(got, want)


@pytest.mark.quick
def test_the_doctor_is_told_why(monkeypatch, force):
    meta = torch.device("meta")
    assert "one walk" in reverse_walk.path(meta)
    force(architecture=10)
    assert "capability 9.0" in reverse_walk.path(meta)
    monkeypatch.setattr(reverse_walk, "KERNEL", None)
    assert "no known Gluon" in reverse_walk.path(meta)


LAYER = Case(
    "gdn", dtype=BF16, K=128, V=128, T=130, H=1, HV=1, gate="weak", l2norm=True, beta="sigmoid"
)
GIVEN = replace(LAYER, gate="strong", beta="given", l2norm=False)
PACKED = replace(LAYER, lengths=(0, 65, 1, 128, 37), tail=70, seed=1)
CUT = replace(PACKED, lengths=(0, 200, 1, 64, 130, 0))
# chunks per run, where sequences are cut
RUNS = {"runs": 1, "runs of two": 2, "runs, grouped": 1, "runs, no tails": 2}
CASES = {
    "norm and sigmoid inside": LAYER,
    "given": GIVEN,
    "packed": PACKED,
    "packed, given": replace(GIVEN, lengths=(63, 65, 0, 130), tail=5, final=False),
    "grouped": replace(LAYER, HV=2, B=2, T=70, transposed=True),
    "grouped, given": replace(GIVEN, HV=2, T=65, gate="reset", keys="correlated"),
    "no tails": replace(LAYER, T=128, state=False),
    "no gate, no beta": replace(LAYER, T=31, gate="none", beta="none", final=False),
    "negative eigenvalues": replace(LAYER, T=63, beta="neg_eigval"),
    "fp16": replace(LAYER, T=70, dtype=FP16),
    "runs": CUT,
    "runs of two": replace(GIVEN, T=330, B=2),
    "runs, grouped": replace(CUT, HV=2, dtype=FP16, transposed=True, final=False),
    "runs, no tails": replace(GIVEN, T=256, HV=2, state=False),
}


def walked_as(name, **options):
    """Return the gradients of a case whose sequences are cut as RUNS says."""
    with tuning.force(run=RUNS.get(name, 0)):
        return walked(CASES[name], **options)


@pytest.mark.parametrize("name", CASES)
def test_every_gradient_meets_the_error_budget(name):
    got = walked_as(name)
    assert_meets_budget(CASES[name], got=got, only=got, target=GPU)


@pytest.mark.bits
@pytest.mark.parametrize("name", ("given", "packed", "grouped", "runs"))
def test_no_order_of_the_partitions_changes_a_bit(name):
    want = walked_as(name)
    for seed in range(1, 4):
        assert_all_identical(walked_as(name, seed=seed), want)


@pytest.mark.bits
@pytest.mark.parametrize("name", ("runs", "runs, grouped"))
def test_a_sequence_of_one_run_has_the_bits_of_a_whole_one(name):
    """The last run of every sequence has them too, up to where the next run begins."""
    got, want, bos = walked_as(name), walked(CASES[name]), 0
    for n, length in enumerate(CUT.lengths):
        eos, tokens = bos + length, 64 * RUNS[name]
        here = slice(bos + max(0, length - 1) // tokens * tokens, eos)
        for x in PER_TOKEN:
            assert_identical(got["d" + x][:, here], want["d" + x][:, here], x)
        if length <= tokens:
            assert_identical(got["dinitial_state"][n], want["dinitial_state"][n], str(n))
        bos = eos


@pytest.mark.quick
@pytest.mark.parametrize(
    "B, T, HV, packed, chunks",
    (
        (1, 65536, 32, None, 256),  # 4 runs a head
        (1, 65536, 40, None, 384),  # 3
        (1, 65536, 66, None, 512),
        (1, 65536, 67, None, 0),
        (2, 65536, 32, None, 512),
        (1, 65536, 8, None, 64),
        (1, 65536, 8, 4, 96),  # at most 10 + 4
        (1, 1024, 32, None, 0),
        (1, 1025, 32, None, 16),
        (1, 100, 32, 2, 0),
        (1, 65536, 32, 3, 0),  # more than half of 132 programs without runs
        (1, 65536, 32, 0, 0),  # no sequence
    ),
)
def test_runs_of_the_walk_are_the_shortest_that_all_run_at_once(B, T, HV, packed, chunks, force):
    force(processors=132)
    q = empty(B, T, HV, 128)
    offsets = None if packed is None else empty(packed + 1, dtype=torch.int32)
    p = Problem.parse(0, q, q, q, q[..., 0], q[..., 0], None, None, None, offsets)
    assert tuning.walk_run_length(p) == chunks


@pytest.mark.bits
def test_tokens_of_no_sequence_change_no_bit_and_get_zeros():
    want, inputs, (do, dfinal) = walked(PACKED), PACKED.inputs(), PACKED.cotangents()
    end = sum(PACKED.lengths)
    for x in (do, *(inputs[n] for n in PER_TOKEN)):
        x[:, end:] = torch.nan
    assert_all_identical(walked(PACKED, inputs, (do, dfinal)), want)
    assert not any(want["d" + n][:, end:].any() for n in PER_TOKEN)
