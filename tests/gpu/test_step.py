"""The decode kernel on a GPU: any legal call against the definition, pools in both dtypes, CUDA
graphs and compiled code.
"""

from dataclasses import replace
from itertools import chain

import pytest
import torch

from kda_ops import dispatch
from kda_ops.backends.triton.plans.recording import Launch
from tests.support.calls import overload
from tests.support.cases import TOKENS
from tests.support.closeness import assert_identical
from tests.support.plans import forget_plans
from tests.support.pools import pool_arguments
from tests.support.steps import EDGES, Step, assert_step, random_step

CUDA = torch.device("cuda")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
POOLS = (torch.float32, torch.bfloat16)
VARIANTS = ("kda", "gdn")
TRITON = dispatch.load("triton")


LAYER = Step(B=8, H=4, HV=8, K=128, V=128, dtype=torch.bfloat16, gate="softplus", slots=1)
USUAL = dict(use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True)


@pytest.mark.parametrize("seed", range(40))
def test_any_call_meets_the_definition(seed):
    assert_step(
        random_step(1000 + seed, DTYPES, POOLS, widths=(16, 33, 64, 100, 128, 256), most=7),
        TRITON,
        CUDA,
    )


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("transposed", (False, True))
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_usual_decode_meets_the_definition(variant, transposed, pool):
    layout = dict(transposed=transposed, pool=pool, dead=(3,))
    case = replace(LAYER, variant=variant, B=5, gate="bounded", beta="sigmoid", **layout)
    assert_step(case, TRITON, CUDA)


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("transposed", (False, True))
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_sequence_has_the_same_bits_alone_and_among_many(variant, transposed, pool):
    case = replace(LAYER, variant=variant, B=80, H=16, HV=16, transposed=transposed, pool=pool)
    p = case.problem(CUDA)
    start, flags = p.state.clone(), dict(transpose_state_layout=transposed, **USUAL)
    step = overload(variant, "recurrent_")
    with torch.inference_mode():
        rows = [p.q, p.k, p.v, p.g, p.beta]
        o = step(*rows, p.state, p.state_indices, None, p.A_log, p.dt_bias, **flags)
        some = start.clone()
        for n in (0, 41, 78):
            part = step(
                *[x[n : n + 2] for x in rows],
                some,
                p.state_indices[n : n + 2],
                None,
                p.A_log,
                p.dt_bias,
                **flags,
            )
            assert_identical(part, o[n : n + 2], "o")
            slots = p.state_indices[n : n + 2].long()
            assert_identical(some[slots], p.state[slots], "the states")


@pytest.mark.parametrize(
    "case",
    [
        *EDGES,
        Step(lengths=(3, 0, 1), tail=40, slots=3, accepted=True),
        Step(B=2200, H=1, HV=32, K=8, V=4, slots=1),
    ],
    ids=str,
)
def test_edges_meet_the_definition(case):
    assert_step(case, TRITON, CUDA)


def decoders() -> set[int]:
    """Which compiled kernels the plans launch."""
    plans = chain.from_iterable(TRITON.plans.values())
    return {id(x.compiled) for plan in plans for x in plan.steps if isinstance(x, Launch)}


@pytest.mark.parametrize("one", (False, True))
def test_scale_strides_and_sizes_do_not_recompile(one):
    def decode(B, T, scale, wide=False):
        case = replace(LAYER, B=B, T=T, HV=4, K=48, V=40, beta="sigmoid", scale=scale, slots=None)
        x = case.inputs(CUDA)
        pool = torch.randn(B * (3 if wide else 1), 4, 48, 40, device=CUDA)[:: 3 if wide else 1]
        if wide:
            x |= {n: x[n].repeat_interleave(3, 1)[:, ::3] for n in TOKENS}
        args = pool_arguments(x, pool, None, None)
        overload("kda", "recurrent_")(*args, **case.flags("recurrent_"))

    forget_plans()
    decode(3, 1 if one else 2, 0.5)
    kernels = decoders()
    for B, T, scale, wide in ((7, 3, 0.25, False), (8, 16, 1.0, True), (3, 5, 0.1, True)):
        decode(B, 1 if one else T, scale, wide)
    assert decoders() == kernels


@pytest.mark.parametrize("transposed", (False, True))
@pytest.mark.parametrize("variant", VARIANTS)
def test_launches_that_overlap_see_the_work_of_those_before_them(variant, transposed):
    """Two hundred tokens on a pool, each with the output of the one before it as its values: with a
    wait after each, without, and replayed.
    """
    case = replace(LAYER, variant=variant, transposed=transposed, beta="sigmoid")
    p = case.problem(CUDA)
    start, values = p.state.clone(), p.v.clone()
    step = overload(variant, "recurrent_")
    flags = dict(transpose_state_layout=transposed, use_beta_sigmoid_in_kernel=True, **USUAL)

    def run(pool, wait):
        o = values
        for _ in range(200):
            o = step(
                p.q, p.k, o, p.g, p.beta, pool, p.state_indices, None, p.A_log, p.dt_bias, **flags
            )
            if wait:
                torch.cuda.synchronize()
        return o

    with torch.inference_mode():
        one, two, three = start.clone(), start.clone(), start.clone()
        want = run(one, True)
        assert want.isfinite().all()
        assert_identical(run(two, False), want, "o")
        assert_identical(two, one, "the states")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            replayed = run(three, False)
        three.copy_(start)
        graph.replay()
        assert_identical(replayed, want, "o of a replay")
        assert_identical(three, one, "the states of a replay")
