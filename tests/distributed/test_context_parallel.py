"""Compare sequences sharded over real processes with one process: outputs and gradients."""

import inspect
from functools import partial

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st

import kda_ops
import kda_ops.distributed as cp
from kda_ops import dispatch
from tests.support.calls import as_leaves, run, with_gradients
from tests.support.cases import TOKENS, cases, replace, take
from tests.support.closeness import assert_all_close, assert_all_identical, oracle
from tests.support.context import (
    CHUNK,
    CUTS,
    EVERYTHING,
    WEIGHTS,
    assert_equal,
    cuts_of,
    gradients,
    leaves_of,
    step,
    whole,
)
from tests.support.shards import cut_twin


def assert_meets_cut_budget(case, cuts, got):
    """Check every output and gradient against the definition, by the twin of the sharded call.

    Chunks restart in each shard, and the rounding of the gates' gradients depends on their starts.
    """
    operand = (
        case.dtype if dispatch.backend_name(torch.device("cpu")) == "triton" else case.state_dtype
    )
    assert_all_close(got, oracle(case), lambda draw: cut_twin(case, cuts, operand, draw))


@st.composite
def spread(draw, **fixed):
    """Draw a call and its cuts into two to four shards, which may be empty."""
    case = draw(cases(narrow=False, **fixed))
    size = draw(st.sampled_from((2, 3, 4)))
    inner = sorted(draw(st.lists(st.integers(0, case.rows), min_size=size - 1, max_size=size - 1)))
    return case, (0, *inner, case.rows)


@given(spread(dtype=torch.float64))
@example((replace(EVERYTHING, dtype=torch.float64, B=2), cuts_of(0, 70, 0, 80)))
# a sequence crosses every cut
@example(
    (
        replace(EVERYTHING, dtype=torch.float64, lengths=(0, 20, 120, 0, 9, 0)),
        cuts_of(30, 40, 50, 29),
    )
)
# cuts between sequences, and after the last one
@example(
    (replace(EVERYTHING, dtype=torch.float64, lengths=(20, 120, 0), tail=9), cuts_of(20, 0, 0, 129))
)
@example((replace(EVERYTHING, dtype=torch.float64, lengths=(5, 0, 0)), cuts_of(0, 0, 5, 0)))
# no sequences
@example((replace(EVERYTHING, dtype=torch.float64, lengths=(), tail=9), cuts_of(4, 5)))
@example((replace(EVERYTHING, dtype=torch.float64, T=0), cuts_of(0, 0)))
def test_cutting_a_batch_does_not_change_it(ranks, drawn):
    case, cuts = drawn
    size = len(cuts) - 1
    assert_equal(whole(ranks.run(size, step, size, case, cuts)), run(case))


@given(spread())
@example((replace(EVERYTHING, B=2, transposed=True), CUTS[3]))
@example((replace(EVERYTHING, variant="gdn", lengths=(3, 130, 17), gate="strong"), CUTS[4]))
@example((replace(EVERYTHING, variant="gdn", B=2, gate="weak"), CUTS[2]))
def test_the_budget_holds_wherever_it_is_cut(ranks, drawn):
    case, cuts = drawn
    assert_meets_cut_budget(
        case, cuts, whole(ranks.run(len(cuts) - 1, step, len(cuts) - 1, case, cuts))
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_inputs_meet_their_budget(ranks, variant, dtype):
    case = replace(EVERYTHING, variant=variant, dtype=dtype)
    assert_meets_cut_budget(case, CUTS[4], whole(ranks.run(4, step, 4, case, CUTS[4])))


@pytest.mark.bits
@pytest.mark.parametrize("how", ["plan", "mesh"])
@pytest.mark.parametrize("packed", [False, True])
def test_a_plan_or_a_mesh_gives_the_same_as_the_group(ranks, how, packed):
    case = replace(EVERYTHING, lengths=(3, 130, 17) if packed else None)
    assert_all_identical(
        whole(ranks.run(3, step, 3, case, CUTS[3], how)),
        whole(ranks.run(3, step, 3, case, CUTS[3])),
    )


# --- chains, and losses that only some ranks see --------------------------------------------------


def two_calls(groups, size, case, cuts, halves):
    """Run the sequences in two calls; the second starts from the final states of the first."""
    group, rank = groups[size], dist.get_rank(groups[size])
    x = leaves_of(case, rank, cuts)
    chunk, flags = CHUNK[case.variant], case.flags() | {"output_final_state": True}
    half = halves[rank]

    o1, state = chunk(**take(x, 0, half), **flags, group=group)
    o2, state = chunk(**take(x, half, None) | {"initial_state": state}, **flags, group=group)
    return gradients(case, rank, size, cuts, x, torch.cat([o1, o2], 1), state)


@pytest.mark.quick
def test_states_chain_and_their_gradients_too(ranks):
    # The first call reads the first half of every shard, the second the second half.
    case = replace(EVERYTHING, dtype=torch.float64, T=120)
    cuts = cuts_of(50, 30, 40)
    halves = (20, 30, 1)
    middles = [a + h for a, h in zip(cuts, halves)]
    order = [t for a, m in zip(cuts, middles) for t in range(a, m)] + [
        t for m, b in zip(middles, cuts[1:]) for t in range(m, b)
    ]
    back = torch.tensor(order).argsort()
    inputs = {
        n: x if n not in TOKENS or x is None else x[:, order] for n, x in case.inputs().items()
    }
    do, dfinal_state = case.cotangents()
    want = run(case, inputs=inputs, cotangents=(do[:, order], dfinal_state))
    want = {n: x[:, back] if n == "o" or n[1:] in TOKENS else x for n, x in want.items()}
    assert_equal(whole(ranks.run(3, two_calls, 3, case, cuts, halves)), want)


def holed(case, chunk, a, b, holes, weight=1.0):
    """Run the step of tokens a to b, with NaN in k and v of one token and in do of another."""
    x = {
        n: t if t is None else t.clone()[:, a:b] if n in TOKENS else t.clone()
        for n, t in case.inputs().items()
    }
    do, dfinal_state = case.cotangents("cpu")
    do = do[:, a:b].clone()
    for t, hole in zip((x["k"], x["v"], do), (holes[0], *holes)):
        if hole is not None and a <= hole < b:
            t[:, hole - a] = torch.nan
    leaves = as_leaves(x)
    o, final_state = chunk(**(x | leaves), **case.flags())
    outs = {"o": o, "final_state": final_state}
    return with_gradients(outs, leaves, (do, weight * dfinal_state))


def holed_shard(groups, size, case, cuts, holes):
    group = groups[size]
    rank = dist.get_rank(group)
    return holed(
        case,
        partial(CHUNK[case.variant], group=group),
        cuts[rank],
        cuts[rank + 1],
        holes,
        WEIGHTS[size][rank],
    )


@pytest.mark.parametrize(
    "holes", [(50, None), (105, None), (None, 50), (None, 105), (None, 125), (None, 159)]
)
@pytest.mark.parametrize("cuts", [cuts_of(64, 16, 80), cuts_of(20, 140), cuts_of(90, 20, 0, 50)])
def test_NaN_does_not_spread_to_other_sequences_across_ranks(ranks, cuts, holes):
    """As on one rank, NaN affects only its own sequence, and NaN in padding affects nothing."""
    case = replace(EVERYTHING, dtype=torch.float64, lengths=(3, 97, 20, 30), tail=10)
    size = len(cuts) - 1
    got = whole(ranks.run(size, holed_shard, size, case, cuts, holes))
    want = holed(case, getattr(torch.ops, case.variant).chunk, 0, cuts[-1], holes)
    seams = cuts_of(*case.lengths)
    hurt = [
        n
        for n in range(4)
        if any(hole is not None and seams[n] <= hole < seams[n + 1] for hole in holes)
    ]
    token, sequence = torch.ones(cuts[-1], dtype=torch.bool), torch.ones(4, dtype=torch.bool)
    for n in hurt:
        token[seams[n] : seams[n + 1]] = sequence[n] = False

    def others(found):
        states = {
            n: x[sequence] for n, x in found.items() if n in ("final_state", "dinitial_state")
        }
        return states | {
            n: x if not hurt else x[:0] if n in ("dA_log", "ddt_bias") else x[:, token]
            for n, x in found.items()
            if n not in states
        }

    assert all(x.isfinite().all() for x in others(want).values())
    assert_equal(others(got), others(want))
    assert (
        not hurt
        or not want["final_state" if holes[1] is None else "dinitial_state"][hurt]
        .isfinite()
        .any(0)
        .all()
    )


def inference(groups, size, case, cuts):
    group, rank = groups[size], dist.get_rank(groups[size])
    with torch.no_grad():
        o, state = CHUNK[case.variant](**leaves_of(case, rank, cuts), **case.flags(), group=group)
    return {"o": o, "final_state": state}


def planned_in_inference_mode(groups, size, case, cuts):
    group = groups[size]
    with torch.inference_mode():
        plan = cp.plan_context(cuts[dist.get_rank(group) + 1] - cuts[dist.get_rank(group)], group)
    return step({size: plan}, size, case, cuts, "planned")


@pytest.mark.bits
@pytest.mark.parametrize("lengths", [None, (3, 130, 17)])
def test_a_plan_made_in_inference_mode_works_for_training(ranks, lengths):
    case = replace(EVERYTHING, lengths=lengths)
    assert_all_identical(
        whole(ranks.run(2, planned_in_inference_mode, 2, case, CUTS[2])),
        whole(ranks.run(2, step, 2, case, CUTS[2])),
    )


@pytest.mark.bits
def test_inference_gives_the_bits_of_training(ranks):
    got = whole(ranks.run(3, inference, 3, EVERYTHING, CUTS[3]))
    want = whole(ranks.run(3, step, 3, EVERYTHING, CUTS[3]))
    assert_all_identical(got, {n: want[n] for n in got})


def repeated(groups, size, case, cuts):
    return [step(groups, size, case, cuts) for _ in range(2)]


@pytest.mark.bits
@pytest.mark.quick
def test_two_runs_give_the_same_bits(ranks):
    for first, second in ranks.run(4, repeated, 4, EVERYTHING, CUTS[4]):
        assert_all_identical(first, second)


def autocast(groups, size, case, cuts):
    """Return o with q, k and v cast by autocast, and cast by hand."""
    group, rank = groups[size], dist.get_rank(groups[size])
    x = leaves_of(case, rank, cuts)
    with torch.autocast("cpu", torch.bfloat16):
        o, _ = CHUNK[case.variant](**x, **case.flags(), group=group)
        (dk,) = torch.autograd.grad(o.float().sum(), [x["k"]])
    by_hand = {n: t.bfloat16() if n in ("q", "k", "v") else t for n, t in x.items()}
    o2, _ = CHUNK[case.variant](**by_hand, **case.flags(), group=group)
    (dk2,) = torch.autograd.grad(o2.float().sum(), [x["k"]])
    return {"o": o.detach(), "dk": dk}, {"o": o2.detach(), "dk": dk2}


@pytest.mark.bits
def test_autocast_casts_q_k_and_v_and_nothing_else(ranks):
    for under, by_hand in ranks.run(2, autocast, 2, replace(EVERYTHING, final=False), CUTS[2]):
        assert under["o"].dtype is torch.bfloat16
        assert_all_identical(under, by_hand)


def wide_autocast(groups, size, case, cuts):
    with torch.autocast("cpu", torch.bfloat16):
        return step(groups, size, case, cuts)


@pytest.mark.bits
def test_autocast_leaves_float64_alone(ranks):
    case = replace(EVERYTHING, dtype=torch.float64)
    assert_all_identical(
        whole(ranks.run(2, wide_autocast, 2, case, CUTS[2])),
        whole(ranks.run(2, step, 2, case, CUTS[2])),
    )


def counted(groups, size, case, cuts):
    """Return the elements that this rank sends in each collective of a planned step."""
    from kda_ops.distributed import collectives

    sent, names = [], ("start_all_gather", "start_all_reduce")
    originals = [getattr(collectives, n) for n in names]
    plan = cp.plan_context(
        cuts[dist.get_rank(groups[size]) + 1] - cuts[dist.get_rank(groups[size])], groups[size]
    )
    try:
        for n, original in zip(names, originals):
            setattr(
                collectives,
                n,
                lambda x, *args, n=n, original=original: (
                    sent.append((n, x.numel())),
                    original(x, *args),
                )[1],
            )
        step(groups | {size: plan}, size, case, cuts, "planned")
    finally:
        for n, original in zip(names, originals):
            setattr(collectives, n, original)
    return sent


@pytest.mark.parametrize("packed", [False, True])
def test_a_rank_sends_what_the_documentation_says(ranks, packed):
    case = replace(EVERYTHING, B=2, lengths=(3, 130, 17) if packed else None)
    slots, HV, K, V = 1 if packed else 2, case.HV, case.K, case.V
    for sent in ranks.run(3, counted, 3, case, CUTS[3]):
        assert sent == [
            ("start_all_gather", slots * HV * K * (V + K)),
            ("start_all_reduce", case.N * HV * K * V),
            ("start_all_reduce", case.N * HV * K * V),
            ("start_all_gather", slots * HV * K * V),
        ]


def double_backward(groups, size):
    group, rank = groups[size], dist.get_rank(groups[size])
    x = leaves_of(EVERYTHING, rank, CUTS[size])
    o, _ = cp.chunk_kda(**x, **EVERYTHING.flags(), group=group)
    tail = cp.exchange_tail(x["v"].flatten(2), 3, group)
    messages = []
    for y in (o, tail):
        (dv,) = torch.autograd.grad(y.square().sum(), [x["v"]], create_graph=True)
        try:
            dv.sum().backward()
        except RuntimeError as error:
            messages.append(str(error))
    return messages


def test_double_backward_is_refused(ranks):
    for messages in ranks.run(2, double_backward, 2):
        assert len(messages) == 2 and all("differentiate twice" in message for message in messages)


def test_the_signature_is_that_of_the_operator_plus_group(variant):
    face, operator = (
        inspect.signature(f).parameters
        for f in (CHUNK[variant], getattr(kda_ops, f"chunk_{variant}"))
    )
    assert list(face) == [*list(operator)[:9], "group", *list(operator)[9:]]
    assert {n: p for n, p in face.items() if n != "group"} == dict(operator)


# --- compiled -------------------------------------------------------------------------------------


def compiled(groups, size, case, cuts, planned):
    """Compile a training step to one graph each way; return results and the graphs' collectives."""
    from functorch.compile import min_cut_rematerialization_partition  # as Inductor has
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func

    group, rank = groups[size], dist.get_rank(groups[size])
    graphs = []

    def look(graph, example_inputs):
        names = [
            n.target._schema.name.split("::")
            for n in graph.graph.nodes
            if isinstance(n.target, torch._ops.OpOverload)
        ]
        graphs.append(
            [name for namespace, name in names if namespace in ("_c10d_functional", case.variant)]
        )
        return make_boxed_func(graph.forward)

    def function(group, **x):
        return CHUNK[case.variant](**x, **case.flags(), group=group)

    torch._dynamo.reset()
    function = torch.compile(
        function,
        fullgraph=True,
        dynamic=True,
        backend=aot_autograd(
            fw_compiler=look, bw_compiler=look, partition_fn=min_cut_rematerialization_partition
        ),
    )
    x = leaves_of(case, rank, cuts)
    o, state = function(
        cp.plan_context(cuts[rank + 1] - cuts[rank], group) if planned else group, **x
    )
    found = gradients(case, rank, size, cuts, x, o, state)
    # other lengths and another plan use the same graphs
    x = {
        n: t if n not in TOKENS or t is None else t[:, 3:].detach().requires_grad_()
        for n, t in x.items()
    }
    o, _ = function(
        cp.plan_context(cuts[rank + 1] - cuts[rank] - 3, group) if planned else group, **x
    )
    o.sum().backward()
    return found, graphs


@pytest.mark.bits
@pytest.mark.parametrize("variant,packed,planned", [("kda", False, False), ("gdn", True, True)])
def test_fullgraph_holds_one_all_gather_each_way_for_any_lengths(ranks, variant, packed, planned):
    # lengths that differ from every other size
    case = replace(
        EVERYTHING, variant=variant, lengths=(3, 130, 17) if packed else None, final=packed
    )
    cuts = cuts_of(61, 89)
    answers = ranks.run(2, compiled, 2, case, cuts, planned)
    assert_all_identical(
        whole([found for found, _ in answers]), whole(ranks.run(2, step, 2, case, cuts))
    )
    state = ["all_reduce"] if case.final else []
    for _, graphs in answers:
        assert len(graphs) == 2
        forward, backward = ([n for n in names if n.startswith("all_")] for names in graphs)
        assert forward == ["all_gather_into_tensor", *state]
        assert backward == [*state, "all_gather_into_tensor"]
        # each collective of maps lies between the halves
        there, back = (
            [n for n in names if n.startswith("chunk") or "gather" in n] for names in graphs
        )
        assert there == ["chunk_map", "all_gather_into_tensor", "chunk_join"]
        assert back == ["chunk_map_bwd", "all_gather_into_tensor", "chunk_join_bwd"]
