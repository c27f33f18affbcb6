"""The decode kernel under the Triton interpreter: any legal call against the definition in
float64.
"""

import numpy as np
import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder

from kda_ops import dispatch
from kda_ops.backends.reference import Reference
from kda_ops.backends.triton.backend import Triton
from kda_ops.problem import Problem
from tests.operators.test_layouts import test_pools_of_both_layouts_hold_the_same_bits  # noqa: F401, on the kernels too
from tests.operators.test_pools import (  # noqa: F401, on the kernels too
    test_a_negative_column_silences_one_token_and_keeps_the_rest,
    test_a_second_pool_is_that_of_the_definition,
    test_a_second_pool_to_start_from_is_only_read,
    test_a_token_without_a_column_gives_zero_and_writes_nothing,
    test_a_written_slot_belongs_to_one_sequence,
    test_every_slot_up_to_null_slot_counts_as_a_negative_one,
    test_padding_may_have_any_accepted_count,
    test_sequences_that_share_a_slot_compute_what_each_computes_alone,
)
from tests.support.closeness import assert_identical
from tests.support.steps import EDGES, Step, assert_step, random_step

TRITON = dispatch.load("triton")
DTYPES = (torch.float32, torch.float16)


@pytest.mark.parametrize(
    "seed", [*range(12), *(pytest.param(n, marks=pytest.mark.nightly) for n in range(12, 40))]
)
def test_any_call_meets_the_definition(seed):
    assert_step(random_step(seed, DTYPES), TRITON)


@pytest.mark.parametrize(
    "case",
    [
        *EDGES,
        Step(K=130, V=70, H=1, HV=1),
        Step("gdn", K=1, V=5, transposed=True),
        Step(lengths=(3, 0, 1), tail=40, slots=3, accepted=True, H=1, HV=1),
        Step(lengths=(5, 1), slots=3, H=1, HV=1),
        Step(slots=1, dead=(0, 1)),
        Step(slots=3, T=3, dead=(1,), B=1, transposed=True),
        Step(slots=4, T=2, accepted=True, B=3, gap=True),
    ],
    ids=str,
)
def test_edges_meet_the_definition(case):
    assert_step(case, TRITON)


@pytest.mark.bits
def test_a_planned_call_runs_no_stage(monkeypatch):
    q, beta, pool = torch.randn(2, 1, 3, 16), torch.rand(2, 1, 3), torch.zeros(2, 3, 16, 16)

    def call():
        return torch.ops.kda.recurrent_(
            q.clone(),
            q.clone(),
            q.clone(),
            None,
            beta.clone(),
            pool.zero_(),
            use_qk_l2norm_in_kernel=True,
        )

    first = call()
    monkeypatch.setattr(Triton, "step", None)  # what looks alike has a plan
    assert_identical(call(), first, "o")
    with pytest.raises(TypeError, match="not callable"):
        torch.ops.kda.recurrent_(q, q, q, None, beta, pool, use_qk_l2norm_in_kernel=True, scale=0.5)


@pytest.mark.bits
def test_a_token_more_does_not_change_those_before_it():
    long = Step(B=1, T=5, H=1, HV=2, K=16, V=24, seed=7)
    p = long.problem()
    o, final = p.new_output(), p.new_final_state()
    TRITON.step(p, o, final)
    q = long.problem()
    q.T = 3
    for name in ("q", "k", "v", "g", "beta"):
        setattr(q, name, getattr(q, name)[:, :3])
    o_short = q.new_output()
    TRITON.step(q, o_short, None)
    assert_identical(o[:, :3], o_short)


def test_weak_decays_do_not_gather_the_error_of_ex2(monkeypatch):
    """The instruction errs with one sign at every token; here by one unit in the last place."""
    exact = InterpreterBuilder.create_exp2

    def above(self, x):
        found = exact(self, x)
        if found.data.dtype == np.float32:
            found.data = np.nextafter(found.data, np.float32(np.inf))
        return found

    T, H, D, gen = 64, 1, 16, torch.Generator().manual_seed(0)
    q, k, v = (0.1 * torch.randn(1, T, H, D, generator=gen) for _ in range(3))
    g, state = torch.full((1, T, H, D), -1e-3), torch.ones(1, H, D, D)
    args = [q, k, v, g, torch.full((1, T, H), 0.01)]
    exactly = [x.double() for x in (*args, state)]
    p = Problem.parse_step(1, *exactly)
    Reference().step(p, p.new_output(), want := p.state)
    monkeypatch.setattr(InterpreterBuilder, "create_exp2", above)
    torch.ops.kda.recurrent_(*args, state)
    error = (state.double() - want).abs().max() / want.abs().max()
    assert error < 16 * torch.finfo(torch.float32).eps
