"""What a call computes for one sequence depends on that sequence alone, and a sequence may be cut
anywhere.
"""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from kda_ops import dispatch
from tests.support.calls import as_leaves, forward, overload, run, with_gradients
from tests.support.cases import PACKED, Case, alone, cases, followed, replace, take
from tests.support.closeness import assert_all_identical, assert_identical, assert_meets_budget
from tests.support.target import TARGET

EQUAL = dict(B=2, T=129, H=2, HV=4, K=24, V=1, keys="repeated")
WIDE = st.sampled_from((8, 24, 33, 40))  # widths of one have a test of their own


def needs_products_of_one_shape():
    """Skip where BLAS multiplies: it promises no bits for matrices of other shapes or vectors."""
    if dispatch.backend_name(TARGET.device) == "native":
        pytest.skip("no promise for CPUs: docs/numerics.md")


@pytest.mark.quick
@pytest.mark.parametrize("op", ("chunk", "recurrent"))
@example(  # equal rows, whose rounding errors do not average out
    case=Case(dtype=torch.float16, gate="zero", beta="none", l2norm=True, seed=10513, **EQUAL),
    cuts=[0],
)
@given(
    case=cases(B=2, T=129, lengths=None, final=True),
    cuts=st.lists(st.sampled_from((0, 1, 37, 63, 64, 65, 128, 129)), min_size=1, max_size=2),
)
def test_splitting_a_sequence_and_carrying_the_state_does_not_change_it(op, case, cuts):
    inputs = case.inputs(TARGET.device)
    leaves = as_leaves(inputs)
    inputs, edges, state, parts = inputs | leaves, [0, *sorted(cuts), case.T], None, []
    state = inputs["initial_state"]
    for a, b in zip(edges, edges[1:]):
        x = take(inputs, a, b) | {"initial_state": state}
        o, state = overload(case.variant, op)(*x.values(), **case.flags(op))
        parts.append(o)
    outs = {"o": torch.cat(parts, 1), "final_state": state}
    got = with_gradients(outs, leaves, case.cotangents(TARGET.device))
    # the parts' gradients of parameters are rounded before they are summed
    if case.dtype.itemsize == 2 or case.narrow:
        got = {n: x for n, x in got.items() if n not in ("dA_log", "ddt_bias")}
    assert_meets_budget(case, op, got)


@pytest.mark.bits
@pytest.mark.parametrize("op", ("chunk", "recurrent"))
@given(case=cases(lengths=PACKED, final=True, tail=3, V=WIDE))
@example(case=Case(lengths=PACKED, tail=3, H=1, HV=1))
def test_packed_sequences_are_separate_sequences(op, case):
    packed, inputs = forward(case, op), case.inputs(TARGET.device)
    assert not packed["o"][:, sum(case.lengths) :].any(), (
        "tokens past the last sequence have an output"
    )
    for n, (_, a, b) in enumerate(case.spans):
        x = alone(case, inputs, n)
        o, final_state = overload(case.variant, op)(*x.values(), **case.flags(op))
        if op == "chunk":
            assert_identical(packed["o"][:, a:b], o, f"o of sequence {n}")
            assert_identical(
                packed["final_state"][n : n + 1], final_state, f"state of sequence {n}"
            )
        else:
            torch.testing.assert_close(packed["o"][:, a:b], o)
            torch.testing.assert_close(packed["final_state"][n : n + 1], final_state)
        if a == b:
            assert_identical(
                final_state,
                torch.zeros_like(final_state)
                if x["initial_state"] is None
                else x["initial_state"].contiguous(),
                "passed through",
            )


def _assert_same_but_for_sums(got, want):
    """Check for the same bits, except in the gradients of parameters.

    These are sums over tokens, which may run in another order.
    """
    for name in ("dA_log", "ddt_bias"):
        if name in want:
            torch.testing.assert_close(got.pop(name), want.pop(name))
    assert_all_identical(got, want)


@pytest.mark.bits
@pytest.mark.parametrize("op", ("chunk", "recurrent"))
@given(case=cases(H=3, HV=6, strides="contiguous"))
def test_permuting_heads_permutes_every_result(op, case):
    order = torch.tensor([2, 0, 1])
    # value heads follow their key head, and change places within it
    values = (2 * order[:, None] + torch.tensor([1, 0])).flatten()

    def permute(name, x):
        if x is None or name == "cu_seqlens":
            return x
        if name in ("q", "k"):
            return x[:, :, order]
        if name == "dt_bias":
            return x.reshape(6, -1)[values].reshape(x.shape)
        return (
            x[values]
            if name == "A_log"
            else x.index_select(1 if name == "initial_state" else 2, values.to(x.device))
        )

    inputs = {n: permute(n, x) for n, x in case.inputs(TARGET.device).items()}
    do, dfinal_state = case.cotangents(TARGET.device)
    got = run(
        case, op, inputs, cotangents=(permute("v", do), permute("initial_state", dfinal_state))
    )
    names = {"o": "v", "final_state": "initial_state"}
    _assert_same_but_for_sums(
        got, {n: permute(names.get(n, n[1:]), x) for n, x in run(case, op).items()}
    )


@pytest.mark.bits
@pytest.mark.parametrize("op", ("chunk", "recurrent"))
@given(case=cases(B=3, T=65, lengths=None))
def test_permuting_batch_rows_permutes_every_result(op, case):
    order = torch.tensor([2, 0, 1])
    inputs = {
        n: x if x is None or n in ("A_log", "dt_bias") else x[order]
        for n, x in case.inputs(TARGET.device).items()
    }
    got = run(case, op, inputs, cotangents=tuple(d[order] for d in case.cotangents(TARGET.device)))
    want = {n: x if n in ("dA_log", "ddt_bias") else x[order] for n, x in run(case, op).items()}
    _assert_same_but_for_sums(got, want)


LONG = 66 if TARGET.slow else 129


@pytest.mark.bits
@pytest.mark.parametrize("op", ("chunk", "recurrent"))
@given(
    case=cases(B=2, T=LONG, lengths=None),
    seen=st.sampled_from([n for n in (1, 15, 16, 37, 63, 64, 65, 100, 128) if n < LONG]),
)
@example(case=Case(B=2, T=LONG, gate="reset", K=16), seen=37)
@example(case=Case("gdn", B=2, T=LONG, gate="forget", K=16), seen=37)
def test_later_tokens_change_no_earlier_bit(op, case, seen):
    inputs = case.inputs(TARGET.device)
    other = replace(case, seed=case.seed + 1).inputs(TARGET.device)
    changed, shared = followed(inputs, seen, other), followed(inputs, seen, inputs)
    assert_identical(
        forward(case, op, shared)["o"][:, :seen], forward(case, op, changed)["o"][:, :seen], "o"
    )


@pytest.mark.bits
@pytest.mark.parametrize("K, V", ((2, 2), (2, 5), (4, 4), (3, 8), (5, 5), (8, 8)))
@pytest.mark.parametrize("seen", (1, 10, 30, 33, 64))
def test_later_tokens_change_no_bit_of_narrow_heads(K, V, seen):
    """torch multiplies small matrices with other code, which rounds otherwise."""
    if seen <= 32:
        needs_products_of_one_shape()
    case = Case(T=74, H=1, HV=1, K=K, V=V)
    inputs = case.inputs(TARGET.device)
    want = forward(case, inputs=inputs)["o"][:, :seen]
    assert_identical(forward(case, inputs=take(inputs, 0, seen))["o"], want, "o")


@pytest.mark.bits
@pytest.mark.quick
@given(case=cases(B=3, lengths=None, V=WIDE))
@example(case=Case(B=3, T=129, K=16, V=33, H=1, HV=1))
def test_the_batch_around_a_sequence_changes_no_bit_of_the_chunk_forward(case):
    got, inputs = forward(case), case.inputs(TARGET.device)
    for row in range(3):
        again = forward(case, inputs=alone(case, inputs, row))
        assert_identical(got["o"][row : row + 1], again["o"], f"o of row {row}")
        if case.final:
            assert_identical(
                got["final_state"][row : row + 1], again["final_state"], f"final_state of row {row}"
            )


@pytest.mark.bits
@pytest.mark.parametrize("K, V", ((16, 1), (1, 8)))
def test_the_batch_changes_no_bit_where_a_width_is_one(variant, K, V):
    needs_products_of_one_shape()
    case = Case(variant, B=3, T=129, K=K, V=V, H=1, HV=1)
    got, inputs = forward(case), case.inputs(TARGET.device)
    for row in range(3):
        again = forward(case, inputs=alone(case, inputs, row))
        assert_identical(got["o"][row : row + 1], again["o"], f"o of row {row}")


@pytest.mark.bits
@pytest.mark.quick
@pytest.mark.parametrize("op", ("chunk", "recurrent"))
@given(case=cases())
def test_two_runs_give_the_same_bits_forward_and_backward(op, case):
    assert_all_identical(run(case, op), run(case, op))
