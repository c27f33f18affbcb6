"""Sequences that lie across ranks: real processes against one, for every output and gradient, and what happens when the ranks disagree."""

import inspect
import os
import subprocess
import sys
from itertools import accumulate
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh

import kda_ops
import kda_ops.distributed as cp
from kda_ops import dispatch
from kda_ops.nn.packing import Packing
from kda_ops.nn.short_convolution import ShortConvolution
from tests.support.calls import run
from tests.support.cases import Case, cases, replace
from tests.support.closeness import assert_all_close, assert_all_identical, oracle
from tests.support.ranks import device
from tests.support.shards import cut_twin

CHUNK = {"kda": cp.chunk_kda, "gdn": cp.chunk_gdn}
SPREAD = ("q", "k", "v", "g", "beta")
WEIGHTS = {2: (0.5, 0.5), 3: (0.5, 0.25, 0.25), 4: (0.25, 0.25, 0.25, 0.25)}  # each rank's part of the loss on the final state: exact in any dtype


# --- on a rank ----------------------------------------------------------------------------------------------------------------


def leaves_of(case, rank, cuts):
    """This rank's inputs, as leaves where they have gradients."""
    a, b = cuts[rank : rank + 2]
    inputs = {n: x if x is None or n not in SPREAD else x[:, a:b] for n, x in case.inputs(device()).items()}
    return {n: x if x is None or not x.is_floating_point() else x.detach().requires_grad_() for n, x in inputs.items()}


def gradients(case, rank, size, cuts, x, o, final_state):
    do, dfinal_state = case.cotangents(o.device)
    outs = [(o, do[:, cuts[rank] : cuts[rank + 1]])] + ([(final_state, WEIGHTS[size][rank] * dfinal_state)] if case.final else [])
    wanted = {n: t for n, t in x.items() if t is not None and t.requires_grad}
    grads = torch.autograd.grad([y for y, _ in outs], list(wanted.values()), [d for _, d in outs])
    found = {"o": o.detach()} | ({"final_state": final_state.detach()} if case.final else {})
    return found | {"d" + n: d for n, d in zip(wanted, grads)}


def step(groups, size, case, cuts, how="group"):
    """One training step on a shard."""
    group = groups[size]
    rank = group.rank if how == "planned" else dist.get_rank(group)
    if how == "plan":
        group = cp.plan_context(cuts[rank + 1] - cuts[rank], group)
    if how == "mesh":
        group = DeviceMesh.from_group(group, "cpu")
    x, chunk = leaves_of(case, rank, cuts), CHUNK[case.variant]
    o, final_state = chunk(**x, **case.flags(), group=group)
    assert (final_state is not None) == case.final
    return gradients(case, rank, size, cuts, x, o, final_state)


# --- in the test --------------------------------------------------------------------------------------------------------------


def whole(parts):
    """The results of all ranks as those of one process would be."""
    merged = {}
    for name in parts[0]:
        each = [p[name] for p in parts]
        if name == "final_state":
            assert_all_identical({name: each[0]}, {name: each[-1]})
            merged[name] = each[0]
        elif name in ("dA_log", "ddt_bias", "dinitial_state"):
            merged[name] = sum(each)
        else:
            merged[name] = torch.cat(each, 1)
    return merged


def assert_equal(got, want, bound=1e-10):
    assert got.keys() == want.keys()
    for name, x in want.items():
        assert got[name].shape == x.shape and got[name].dtype == x.dtype, name
        error = (got[name] - x).abs().max().item() if x.numel() else 0.0
        assert error <= bound * max(1.0, x.abs().max().item() if x.numel() else 0.0), f"{name} is off by {error}"


def assert_meets_cut_budget(case, cuts, got):
    """Every output and gradient against the definition, by the twin of a call that is cut there: chunks begin anew in each shard, and what the terms
    of a gate's gradient leave of their roundings depends on where.
    """
    operand = case.dtype if dispatch.backend_name(torch.device("cpu")) == "triton" else case.state_dtype
    assert_all_close(got, oracle(case), lambda draw: cut_twin(case, cuts, operand, draw))


def cuts_of(*lengths):
    return (0, *accumulate(lengths))


@st.composite
def spread(draw, **fixed):
    """A call and where it is cut: two to four shards, any of them possibly empty."""
    case = draw(cases(narrow=False, **fixed))
    size = draw(st.sampled_from((2, 3, 4)))
    inner = sorted(draw(st.lists(st.integers(0, case.rows), min_size=size - 1, max_size=size - 1)))
    return case, (0, *inner, case.rows)


EVERYTHING = Case(T=150, H=2, HV=4, gate="softplus", beta="sigmoid", l2norm=True, seed=1)
CUTS = {2: cuts_of(70, 80), 3: cuts_of(64, 23, 63), 4: cuts_of(1, 85, 0, 64)}


@given(spread(dtype=torch.float64))
@example((replace(EVERYTHING, dtype=torch.float64, B=2), cuts_of(0, 70, 0, 80)))
@example((replace(EVERYTHING, dtype=torch.float64, lengths=(0, 20, 120, 0, 9, 0)), cuts_of(30, 40, 50, 29)))  # over every boundary
@example((replace(EVERYTHING, dtype=torch.float64, lengths=(20, 120, 0), tail=9), cuts_of(20, 0, 0, 129)))  # cuts at seams, and behind the end
@example((replace(EVERYTHING, dtype=torch.float64, lengths=(5, 0, 0)), cuts_of(0, 0, 5, 0)))
@example((replace(EVERYTHING, dtype=torch.float64, lengths=(), tail=9), cuts_of(4, 5)))  # no sequence at all
@example((replace(EVERYTHING, dtype=torch.float64, T=0), cuts_of(0, 0)))
def test_cutting_a_batch_does_not_change_it(ranks, drawn):
    case, cuts = drawn
    size = len(cuts) - 1
    assert_equal(whole(ranks.run(size, step, size, case, cuts)), run(case))


@pytest.mark.parametrize("variant", ["kda", "gdn"])
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("gate", ["softplus", "strong", "weak"])
def test_every_output_and_gradient_meets_the_budget(ranks, variant, size, packed, gate):
    case = replace(EVERYTHING, variant=variant, gate=gate, B=2, lengths=(3, 130, 17) if packed else None, transposed=size == 3, seed=size)
    assert_meets_cut_budget(case, CUTS[size], whole(ranks.run(size, step, size, case, CUTS[size])))


@given(spread())
def test_the_budget_holds_wherever_it_is_cut(ranks, drawn):
    case, cuts = drawn
    assert_meets_cut_budget(case, cuts, whole(ranks.run(len(cuts) - 1, step, len(cuts) - 1, case, cuts)))


@pytest.mark.parametrize("variant", ["kda", "gdn"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_inputs_meet_their_budget(ranks, variant, dtype):
    case = replace(EVERYTHING, variant=variant, dtype=dtype)
    assert_meets_cut_budget(case, CUTS[4], whole(ranks.run(4, step, 4, case, CUTS[4])))


@pytest.mark.parametrize("how", ["plan", "mesh"])
@pytest.mark.parametrize("packed", [False, True])
def test_a_plan_or_a_mesh_stands_for_the_group(ranks, how, packed):
    case = replace(EVERYTHING, lengths=(3, 130, 17) if packed else None)
    assert_all_identical(whole(ranks.run(3, step, 3, case, CUTS[3], how)), whole(ranks.run(3, step, 3, case, CUTS[3])))


# --- chains, and losses that only some ranks see ------------------------------------------------------------------------------


def two_calls(groups, size, case, cuts, halves):
    """The sequences in two calls: the second starts from the states the first ends with."""
    group, rank = groups[size], dist.get_rank(groups[size])
    x = leaves_of(case, rank, cuts)
    chunk, flags = CHUNK[case.variant], case.flags() | {"output_final_state": True}
    half = halves[rank]

    def part(s):
        return {n: t if t is None or n not in SPREAD else t[:, s] for n, t in x.items()}

    o1, state = chunk(**part(slice(0, half)), **flags, group=group)
    o2, state = chunk(**part(slice(half, None)) | {"initial_state": state}, **flags, group=group)
    return gradients(case, rank, size, cuts, x, torch.cat([o1, o2], 1), state)


def test_states_chain_and_their_gradients_too(ranks):
    # Two calls read the tokens in the order: first halves of all shards, second halves of all shards.
    case, cuts, halves = replace(EVERYTHING, dtype=torch.float64, T=120), cuts_of(50, 30, 40), (20, 30, 1)
    middles = [a + h for a, h in zip(cuts, halves)]
    order = [t for a, m in zip(cuts, middles) for t in range(a, m)] + [t for m, b in zip(middles, cuts[1:]) for t in range(m, b)]
    back = torch.tensor(order).argsort()
    inputs = {n: x if n not in SPREAD or x is None else x[:, order] for n, x in case.inputs().items()}
    do, dfinal_state = case.cotangents()
    want = run(case, inputs=inputs, cotangents=(do[:, order], dfinal_state))
    want = {n: x[:, back] if n == "o" or n[1:] in SPREAD else x for n, x in want.items()}
    assert_equal(whole(ranks.run(3, two_calls, 3, case, cuts, halves)), want)


def last_rank_loss(groups, size, case, cuts):
    """Only the last rank's outputs count, but all ranks run backward."""
    group, rank = groups[size], dist.get_rank(groups[size])
    x = leaves_of(case, rank, cuts)
    o, _ = CHUNK[case.variant](**x, **case.flags(), group=group)
    (o.sum() * float(rank == size - 1)).backward()
    return {n: t.grad for n, t in x.items() if t is not None and t.requires_grad}


def test_early_tokens_learn_from_a_loss_on_late_ones(ranks):
    case, cuts = replace(EVERYTHING, dtype=torch.float64, gate="weak", final=False), cuts_of(40, 40, 0, 70)
    parts = ranks.run(4, last_rank_loss, 4, case, cuts)
    x = {n: t if t is None else t.requires_grad_() for n, t in case.inputs().items()}
    o, _ = getattr(torch.ops, case.variant).chunk(**x, **case.flags())
    o[:, cuts[3] :].sum().backward()
    got = {n: torch.cat([p[n] for p in parts], 1) if n in SPREAD else sum(p[n] for p in parts) for n in parts[0]}
    assert_equal(got, {n: x[n].grad for n in got})
    assert parts[0]["v"].abs().max() > 0


def inference(groups, size, case, cuts):
    group, rank = groups[size], dist.get_rank(groups[size])
    with torch.no_grad():
        o, state = CHUNK[case.variant](**leaves_of(case, rank, cuts), **case.flags(), group=group)
    return {"o": o, "final_state": state}


def test_inference_gives_the_bits_of_training(ranks):
    got, want = whole(ranks.run(3, inference, 3, EVERYTHING, CUTS[3])), whole(ranks.run(3, step, 3, EVERYTHING, CUTS[3]))
    assert_all_identical(got, {n: want[n] for n in got})


def repeated(groups, size, case, cuts):
    return [step(groups, size, case, cuts) for _ in range(2)]


def test_two_runs_give_the_same_bits(ranks):
    for first, second in ranks.run(4, repeated, 4, EVERYTHING, CUTS[4]):
        assert_all_identical(first, second)


def autocast(groups, size, case, cuts):
    """o with q, k and v cast by autocast, and cast by hand."""
    group, rank = groups[size], dist.get_rank(groups[size])
    x = leaves_of(case, rank, cuts)
    with torch.autocast("cpu", torch.bfloat16):
        o, _ = CHUNK[case.variant](**x, **case.flags(), group=group)
        (dk,) = torch.autograd.grad(o.float().sum(), [x["k"]])
    by_hand = {n: t.bfloat16() if n in ("q", "k", "v") else t for n, t in x.items()}
    o2, _ = CHUNK[case.variant](**by_hand, **case.flags(), group=group)
    (dk2,) = torch.autograd.grad(o2.float().sum(), [x["k"]])
    return {"o": o.detach(), "dk": dk}, {"o": o2.detach(), "dk": dk2}


def test_autocast_casts_q_k_and_v_and_nothing_else(ranks):
    for under, by_hand in ranks.run(2, autocast, 2, replace(EVERYTHING, final=False), CUTS[2]):
        assert under["o"].dtype is torch.bfloat16
        assert_all_identical(under, by_hand)


def counted(groups, size, case, cuts):
    """Elements that this rank sends in each collective of a planned step."""
    from kda_ops.distributed import collectives

    sent, names = [], ("start_all_gather", "start_all_reduce")
    originals = [getattr(collectives, n) for n in names]
    plan = cp.plan_context(cuts[dist.get_rank(groups[size]) + 1] - cuts[dist.get_rank(groups[size])], groups[size])
    try:
        for n, original in zip(names, originals):
            setattr(collectives, n, lambda x, *args, n=n, original=original: (sent.append((n, x.numel())), original(x, *args))[1])
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
            ("start_all_gather", slots * HV * K * (V + K)), ("start_all_reduce", case.N * HV * K * V),
            ("start_all_reduce", case.N * HV * K * V), ("start_all_gather", slots * HV * K * V),
        ]  # fmt: skip


def double_backward(groups, size):
    group, rank = groups[size], dist.get_rank(groups[size])
    x = leaves_of(EVERYTHING, rank, CUTS[size])
    o, _ = cp.chunk_kda(**x, **EVERYTHING.flags(), group=group)
    (dv,) = torch.autograd.grad(o.square().sum(), [x["v"]], create_graph=True)
    try:
        dv.sum().backward()
    except RuntimeError as error:
        return str(error)


def test_double_backward_is_refused(ranks):
    assert all("differentiate twice" in message for message in ranks.run(2, double_backward, 2))


@pytest.mark.parametrize("variant", ["kda", "gdn"])
def test_the_words_are_those_of_the_operator_and_group(variant):
    face, operator = (inspect.signature(f).parameters for f in (CHUNK[variant], getattr(kda_ops, f"chunk_{variant}")))
    assert list(face) == [*list(operator)[:9], "group", *list(operator)[9:]]
    assert {n: p for n, p in face.items() if n != "group"} == dict(operator)


# --- the tokens before a shard ------------------------------------------------------------------------------------------------


def tails(groups, size, lengths, cuts, taps, planned):
    """The tail of this rank's shard of a counting x, and the gradient of a weighted sum of all tails."""
    group, rank = groups[size], dist.get_rank(groups[size])
    whole_x, weight = tail_case(lengths, cuts, taps)
    x = whole_x[:, cuts[rank] : cuts[rank + 1]].requires_grad_()
    cu_seqlens = None if lengths is None else torch.tensor(cuts_of(*lengths))
    tail = cp.exchange_tail(x, taps, cp.plan_context(x.shape[1], group) if planned else group, cu_seqlens)
    (dx,) = torch.autograd.grad((tail * weight[rank]).sum(), [x])
    return tail.detach(), dx


def tail_case(lengths, cuts, taps):
    """x [B, T, D] of all ranks, and a weight per rank like its tail."""
    B, N = (2, 2) if lengths is None else (1, len(lengths))
    gen = torch.Generator().manual_seed(0)
    return torch.randn(B, cuts[-1], 3, generator=gen), torch.randn(len(cuts) - 1, N, taps - 1, 3, generator=gen)


def expected_tails(lengths, cuts, taps):
    x, weight = tail_case(lengths, cuts, taps)
    dx = torch.zeros_like(x)
    seams = cuts_of(*lengths) if lengths is not None else (0, cuts[-1])
    out = []
    for rank, start in enumerate(cuts[:-1]):
        tail = torch.zeros_like(weight[rank])
        for n, (begin, end) in enumerate(zip(seams, seams[1:])):
            if lengths is None or begin < start < end:
                row = slice(None) if lengths is None else n
                source = slice(None) if lengths is None else 0
                for j, place in enumerate(range(start - taps + 1, start)):
                    if place >= begin:
                        tail[row, j] = x[source, place]
                        dx[source, place] += weight[rank][row, j]
        out.append(tail)
    return out, dx


@st.composite
def tail_cuts(draw):
    lengths = draw(st.none() | st.lists(st.integers(0, 9), min_size=1, max_size=4).map(tuple))
    T = draw(st.integers(0, 20)) if lengths is None else sum(lengths) + draw(st.integers(0, 3))
    size = draw(st.sampled_from((2, 3, 4)))
    inner = sorted(draw(st.lists(st.integers(0, T), min_size=size - 1, max_size=size - 1)))
    return lengths, (0, *inner, T), draw(st.sampled_from((4, 1, 2, 7)))


@given(tail_cuts(), st.booleans())
@example((None, (0, 1, 2, 3, 9), 4), False)  # three ranks give one token each
@example(((2, 7), (0, 4, 4, 5, 9), 4), True)  # an empty shard in between, and a seam within reach
def test_a_tail_is_the_tokens_before_the_shard(ranks, drawn, planned):
    lengths, cuts, taps = drawn
    size = len(cuts) - 1
    answers = ranks.run(size, tails, size, lengths, cuts, taps, planned)
    want, dx = expected_tails(lengths, cuts, taps)
    for (tail, _), expected in zip(answers, want):
        assert torch.equal(tail, expected)
    assert torch.allclose(torch.cat([d for _, d in answers], 1), dx, atol=1e-6)


def convolution(groups, size, lengths, cuts):
    """A layer's convolution over the whole, and over this rank's shard with the tail."""
    group, rank = groups[size], dist.get_rank(groups[size])
    torch.manual_seed(0)
    layer = ShortConvolution(6, 4, bias=True).double()
    x, plan = torch.randn(2 if lengths is None else 1, cuts[-1], 6, dtype=torch.float64), cp.plan_context(cuts[rank + 1] - cuts[rank], group)
    cu_seqlens = None if lengths is None else torch.tensor(cuts_of(*lengths))

    def run(x, tail, offsets):
        x, weight = x.clone().requires_grad_(), layer.weight
        y = layer(x, None if tail is None else tail(x), None if offsets is None else Packing(offsets, x.shape[1]))
        dx, dweight = torch.autograd.grad(y.square().sum(), [x, weight])
        return y.detach(), dx, dweight

    shard = x[:, cuts[rank] : cuts[rank + 1]]
    return run(x, None, cu_seqlens), run(shard, lambda x: cp.exchange_tail(x, 4, plan, cu_seqlens), None if lengths is None else plan.local(cu_seqlens))


@pytest.mark.parametrize("lengths", [None, (3, 20, 7)])
def test_the_layers_convolution_takes_the_tail(ranks, lengths):
    answers = ranks.run(3, convolution, 3, lengths, cuts_of(10, 2, 18))
    (y, dx, dweight), shards = answers[0][0], [shard for _, shard in answers]
    assert torch.allclose(torch.cat([s[0] for s in shards], 1), y, atol=1e-12)
    assert torch.allclose(torch.cat([s[1] for s in shards], 1), dx, atol=1e-12)
    assert torch.allclose(sum(s[2] for s in shards), dweight, atol=1e-12)


# --- compiled -----------------------------------------------------------------------------------------------------------------


def compiled(groups, size, case, cuts, planned):
    """A training step in one graph each way, and the operators of note that stand in the graphs."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func

    group, rank = groups[size], dist.get_rank(groups[size])
    graphs = []

    def look(graph, example_inputs):
        names = [n.target._schema.name.split("::") for n in graph.graph.nodes if isinstance(n.target, torch._ops.OpOverload)]
        graphs.append([name for namespace, name in names if namespace in ("_c10d_functional", case.variant)])
        return make_boxed_func(graph.forward)

    def function(group, **x):
        return CHUNK[case.variant](**x, **case.flags(), group=group)

    torch._dynamo.reset()
    function = torch.compile(function, fullgraph=True, dynamic=True, backend=aot_autograd(fw_compiler=look, bw_compiler=look))
    x = leaves_of(case, rank, cuts)
    o, state = function(cp.plan_context(cuts[rank + 1] - cuts[rank], group) if planned else group, **x)
    found = gradients(case, rank, size, cuts, x, o, state)
    # Other lengths, another plan: the same graphs.
    x = {n: t if n not in SPREAD or t is None else t[:, 3:].detach().requires_grad_() for n, t in x.items()}
    o, _ = function(cp.plan_context(cuts[rank + 1] - cuts[rank] - 3, group) if planned else group, **x)
    o.sum().backward()
    return found, graphs


@pytest.mark.parametrize("variant,packed,planned", [("kda", False, False), ("gdn", True, True)])
def test_fullgraph_holds_one_all_gather_each_way_for_any_lengths(ranks, variant, packed, planned):
    case, cuts = replace(EVERYTHING, variant=variant, lengths=(3, 130, 17) if packed else None, final=packed), cuts_of(61, 89)  # lengths that no other size has
    answers = ranks.run(2, compiled, 2, case, cuts, planned)
    assert_all_identical(whole([found for found, _ in answers]), whole(ranks.run(2, step, 2, case, cuts)))
    state = ["all_reduce"] if case.final else []
    for _, graphs in answers:
        assert len(graphs) == 2
        forward, backward = ([n for n in names if n.startswith("all_")] for names in graphs)
        assert forward == ["all_gather_into_tensor", *state]
        assert backward == [*state, "all_gather_into_tensor"]
        assert graphs[0].count("chunk_fwd") == 1 and graphs[1].count("chunk_bwd") == 1


def compiled_tail(groups, size, cuts):
    """A convolution across a cut, compiled and not, without a plan."""
    group, rank = groups[size], dist.get_rank(groups[size])

    def convolve(x, group):
        return torch.cat([cp.exchange_tail(x, 3, group), x], 1).unfold(1, 3, 1).prod(-1)

    torch._dynamo.reset()
    found = []
    for function in (convolve, torch.compile(convolve, fullgraph=True, backend="aot_eager")):
        x = tail_case(None, cuts, 3)[0][:, cuts[rank] : cuts[rank + 1]].requires_grad_()
        y = function(x, group)
        found.append({"y": y.detach(), "dx": torch.autograd.grad(y.sum(), [x])[0]})
    return found


def test_exchange_tail_compiles(ranks):
    for eager, graph in ranks.run(2, compiled_tail, 2, cuts_of(5, 9)):
        for name in eager:
            torch.testing.assert_close(graph[name], eager[name], rtol=1e-6, atol=1e-6)


# --- faults: an error on every rank, never a hang -----------------------------------------------------------------------------

PACKED = replace(EVERYTHING, lengths=(3, 130, 17))
ODD = {  # what group rank 1 does otherwise, and what every rank must be told
    "scale": (EVERYTHING, lambda x, flags: flags.update(scale=0.3), "scale is None on rank 0, 0.3 on rank 1"),
    "bound": (EVERYTHING, lambda x, flags: flags.update(lower_bound=-4.0), "lower_bound is None on rank 0, -4.0 on rank 1"),
    "V": (EVERYTHING, lambda x, flags: x.update(v=x["v"][..., :5], initial_state=x["initial_state"][..., :5]), "v is float32 [1, T, 4, 24] on rank 0"),
    "absent": (EVERYTHING, lambda x, flags: x.update(initial_state=None), "initial_state is float32 [1, 4, 16, 24] on rank 0, None on rank 1"),
    "dtype": (EVERYTHING, lambda x, flags: x.update({n: x[n].bfloat16() for n in "qkv"}), "q is float32 [1, T, 2, 16] on rank 0, bfloat16"),
    "gradient": (EVERYTHING, lambda x, flags: x.update({n: t.detach() for n, t in x.items() if t is not None}), "a gradient wanted is True on rank 0, False"),
    "variant": (EVERYTHING, lambda x, flags: (flags.update(variant="gdn"), x.update(g=x["g"][..., 0], dt_bias=x["dt_bias"].view(4, 16)[:, 0])), "a rank"),
    "local offsets": (PACKED, lambda x, flags: x.update(cu_seqlens=torch.tensor([0, 0, 23, 23])), "cu_seqlens is [0, 3, 133, 150] on rank 0, [0, 0, 23, 23]"),
    "refused": (EVERYTHING, lambda x, flags: x.update(beta=x["beta"][:, :-1]), "rank 1 of the group refused its call: beta must have shape"),
}


def odd_one_out(groups, size, fault):
    """Rank 1 passes something else; then all make a right call, to see that the group still works."""
    group, rank = groups[size], dist.get_rank(groups[size])
    case, change, _ = ODD[fault]
    x, flags = leaves_of(case, rank, CUTS[size]), case.flags()
    if rank == 1:
        change(x, flags)
    try:
        CHUNK[flags.pop("variant", case.variant)](**x, **flags, group=group)
        raised = None
    except (ValueError, TypeError) as error:
        raised = str(error)
    step(groups, size, EVERYTHING, CUTS[size])
    return raised


@pytest.mark.parametrize("fault", [f for f in ODD if f != "variant"])
def test_every_rank_is_told_what_differs(ranks, fault):
    answers = ranks.run(3, odd_one_out, 3, fault)
    for rank, message in enumerate(answers):
        want = ODD[fault][2]
        assert message is not None and (want in message or (fault == "refused" and rank == 1 and want.split(": ")[1] in message)), message


def test_kda_on_one_rank_and_gdn_on_another_is_refused(ranks):
    assert all("operator is kda on rank 0, gdn on rank 1" in message for message in ranks.run(3, odd_one_out, 3, "variant"))


def wrong_arguments(groups, size):
    """Messages of calls that are wrong on every rank."""
    group, rank = groups[size], dist.get_rank(groups[size])
    x, packed = leaves_of(EVERYTHING, rank, CUTS[size]), leaves_of(PACKED, rank, CUTS[size])
    plan, mesh = cp.plan_context(5, group), DeviceMesh("cpu", torch.arange(4).view(2, 2), _init_backend=False)
    calls = {
        "mesh": lambda: cp.chunk_kda(**x, **EVERYTHING.flags(), group=mesh),
        "none": lambda: cp.chunk_kda(**x, **EVERYTHING.flags(), group=None),
        "outside": lambda: cp.chunk_kda(**x, **EVERYTHING.flags(), group=dist.GroupMember.NON_GROUP_MEMBER),
        "plan": lambda: cp.chunk_kda(**x, **EVERYTHING.flags(), group=plan),
        "too long": lambda: cp.chunk_kda(**packed | {"cu_seqlens": torch.tensor([0, 3, 133, 151])}, **PACKED.flags(), group=group),
        "tail": lambda: cp.exchange_tail(x["beta"], 0, group),
        "tails": lambda: cp.exchange_tail(x["beta"].detach(), 2 + rank, group),
        "length": lambda: cp.plan_context(-1, group),
        "device": lambda: cp.plan_context(5, group, device="cuda"),
        "devices": lambda: cp.chunk_kda(**{n: t if t is None or rank else t.to("meta") for n, t in x.items()}, **EVERYTHING.flags(), group=group),
    }
    messages = {}
    for name, call in calls.items():
        try:
            call()
        except (ValueError, TypeError) as error:
            messages[name] = str(error)
    return messages


def test_wrong_arguments_are_named(ranks):
    want = {
        "mesh": "group must be one dimension of a DeviceMesh, got a mesh of 2 dimensions: pass one by name, as in mesh['cp']",
        "none": "group must be a ProcessGroup, a DeviceMesh of one dimension or a ContextPlan, got NoneType",
        "outside": "group must contain the calling rank",
        "plan": "the shard must have the 5 tokens of this rank's plan, got T = ",
        "too long": "cu_seqlens are offsets on the global token axis and must end at or before 150, the tokens of all ranks (64 + 23 + 63), got 151",
        "tail": "size must be the taps of the convolution, at least 1, got 0",
        "tails": "size is 2 on rank 0, 3 on rank 1, 4 on rank 2",
        "length": "length must be the tokens of this rank's shard, at least 0, got -1",
        "device": "plan_context: group cannot gather cuda tensors with its backends cpu:gloo,cuda:gloo: make one with a backend for them, nccl for cuda",
        "devices": "group cannot gather meta tensors",  # one rank's are, and all are told
    }
    for messages in ranks.run(3, wrong_arguments, 3):
        for name, message in want.items():
            assert message in messages[name]


def test_a_gloo_group_works_on_the_host_where_there_are_gpus(monkeypatch):
    """Gloo says that it serves CUDA; given a GPU's address it ends the process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        assert cp.plan_context(5, dist.group.WORLD).device_lengths.device.type == "cpu"
    finally:
        dist.destroy_process_group()


def two_groups(groups, size):
    """Ranks 0 and 1 pass a group of their own; 2 and 3 the group of four, whose timeout is two seconds."""
    rank = dist.get_rank()
    x, cuts = leaves_of(EVERYTHING, rank, CUTS[4]), CUTS[4]
    try:
        cp.chunk_kda(**x, **EVERYTHING.flags(), group=groups["lower half" if rank < 2 else "impatient"])
        return None, cuts[rank]
    except RuntimeError as error:
        return str(error), cuts[rank]


def test_a_rank_with_another_group_is_not_waited_for_forever(ranks):
    (first, _), (second, _), (third, _), (fourth, _) = ranks.run(4, two_groups, 4)
    assert first is None and second is None  # among themselves they agree
    for rank, message in ((2, third), (3, fourth)):
        assert message is not None and f"rank {rank} waited in vain for the other 3 ranks of group" in message


# --- the example --------------------------------------------------------------------------------------------------------------

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("launcher", [[], ["-m", "torch.distributed.run", "--nproc-per-node", "2"]], ids=["alone", "torchrun"])
def test_the_example_proves_its_point(launcher):
    command = [sys.executable, *launcher, "examples/context_parallel.py", "--length", "300", *(["--gdn"] if launcher else [])]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "300 tokens on 2 ranks (100, 200)" in done.stdout and "dt_bias" in done.stdout
