"""Check short sequences on a CPU: they lie in chunks of few rows, whatever else the call holds."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kda_ops import dispatch
from kda_ops.backends.parts import HEIGHTS, parts
from kda_ops.problem import CHUNK, Problem
from tests.support.calls import forward, run, run_stages
from tests.support.cases import TOKENS, Case, alone, followed, replace, take
from tests.support.closeness import assert_all_identical, assert_identical
from tests.support.target import TARGET

if dispatch.backend_name(TARGET.device) != "native":
    pytest.skip("what the CPU backend alone does", allow_module_level=True)

native = dispatch.load("native")
WIDTHS = ((16, 24), (8, 33), (33, 8), (64, 64), (128, 128))
EACH = (1, 2, 15, 16, 17, 32, 33, 63, 64, 65, 130)  # lengths around every height


class Count(TorchDispatchMode):
    """The number of operators that run below."""

    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


def problem(case):
    return Problem.parse(case.rank, *case.inputs().values(), **case.flags())


@pytest.mark.parametrize("lengths,rows", (((1,) * 50, 50), ((1, 2, 16, 17, 32, 33, 64, 0), 225)))
def test_a_short_sequence_takes_few_rows(lengths, rows):
    found = parts(problem(Case(lengths=lengths)))
    assert sum(part.NT * part.height for part in found) == rows
    assert {part.height for part in found} <= {*HEIGHTS, CHUNK}


@pytest.mark.parametrize("length", (1, 5, 40))
def test_the_number_of_operator_calls_does_not_grow_with_N(variant, length):
    """On a CPU the cost is the number of operator calls on small tensors."""
    counts = []
    for N in (20, 300):
        case = Case(variant, lengths=(length,) * N, H=1, HV=1, K=8, V=8, gate="softplus")
        p, cotangents = problem(case), case.cotangents()
        p.scratch = {}
        with Count() as count:
            run_stages(native, p, cotangents)
        counts.append(count.calls)
    assert counts[0] == counts[1]


@pytest.mark.bits
@pytest.mark.parametrize("state", (False, True))
@pytest.mark.parametrize("K,V", WIDTHS)
def test_the_number_of_sequences_changes_no_bit(variant, K, V, state):
    """Each length alone, among a few, and among many of its own and of other heights."""
    few = Case(variant, lengths=EACH, H=1, HV=1, K=K, V=V, state=True, final=True, l2norm=True)
    many = replace(few, lengths=EACH + (1, 2, 16, 17, 33, 65, 0) * 7)
    inputs, more, end = few.inputs(), replace(many, seed=9).inputs(), sum(EACH)
    more = followed(more | {n: inputs[n] for n in TOKENS}, end, more)
    more["initial_state"] = torch.cat([inputs["initial_state"], more["initial_state"][len(EACH) :]])
    if not state:
        inputs["initial_state"] = more["initial_state"] = None
    got, among = forward(few, inputs=inputs), forward(many, inputs=more)
    assert_identical(got["o"][:, :end], among["o"][:, :end], "o")
    assert_identical(got["final_state"], among["final_state"][: len(EACH)], "final_state")
    for n, (_, a, b) in enumerate(few.spans):
        want = forward(few, inputs=alone(few, inputs, n))
        assert_identical(got["o"][:, a:b], want["o"], f"o of {b - a} tokens")
        assert_identical(got["final_state"][n : n + 1], want["final_state"], f"state of {b - a}")


@pytest.mark.bits
@pytest.mark.parametrize("state", (False, True))
@pytest.mark.parametrize("H", (1, 2))
@pytest.mark.parametrize("K,V", WIDTHS)
def test_tokens_that_follow_change_nothing(variant, K, V, H, state):
    """No bit, where the sequence lies in chunks of C rows without them; else only roundings."""
    case = Case(variant, B=2, T=70, H=H, HV=H, K=K, V=V, state=state, l2norm=True)
    inputs = case.inputs()
    want = forward(case, inputs=inputs)["o"]
    for n in (1, 2, 5, 16, 17, 32, 33, 63, 64):
        got = forward(case, inputs=take(inputs, 0, n))["o"]
        if n > max(HEIGHTS):
            assert_identical(got, want[:, :n], f"o of {n} tokens")
        else:
            atol = 8 * torch.finfo(case.dtype).eps * want[:, :n].abs().max().item()
            torch.testing.assert_close(got, want[:, :n], rtol=0.0, atol=atol)


@pytest.mark.bits
def test_what_is_kept_for_backward_has_the_bits_of_what_is_computed_again(variant):
    case = Case(variant, lengths=EACH + (0, 1, 1), H=1, HV=2, state=True, final=True)
    assert_all_identical(run(case), run(case, disable_recompute=True))
