"""Compiled graphs keep the operators that are not chosen; plain forms compute the same."""

from dataclasses import replace

import pytest
import torch
import torch._inductor.decomposition as inductor  # registers ours
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import kda_ops
from kda_ops.registrations import decompositions
from tests.support.layer_operators import Conv, NormCase, cotangents, operator, outputs, run

CASES = {
    "convolution": Conv(),
    "convolution without anything": Conv(bias=False, tail=False, final=False, silu=False),
    "one tap": Conv(W=1),
    "packed": Conv(lengths=(2, 0, 5), behind=2),
    "norm": NormCase(silu=True),
    "two rows of weight": NormCase(G=2),
    "no gate": NormCase(gate=False),
}


@pytest.fixture(autouse=True)
def chosen_again():
    yield
    decompositions.choose()


def traced(case, chosen, call):
    """Return the graph of a call on the case's inputs, as Inductor would get it."""
    decompositions.choose(chosen)
    table = inductor.select_decomp_table()
    return make_fx(call, decomposition_table=table)(*case.inputs().values())


def trained(case):
    """Return a function of the inputs that returns the case's results and gradients."""
    found = outputs(case, operator(case)(*case.inputs().values(), **case.flags()))
    dys = cotangents(case, found)  # drawn here: a graph would draw others
    names = list(case.inputs())  # likewise

    def step(*inputs):
        x = dict(zip(names, inputs))
        leaves = {n: t for n, t in x.items() if t is not None and n != "cu_seqlens"}
        leaves = {n: t.detach().requires_grad_() for n, t in leaves.items()}
        outs = outputs(case, operator(case)(*(x | leaves).values(), **case.flags()))
        return (*outs, *torch.autograd.grad(outs, [*leaves.values()], dys))

    return step


def kept(graph):
    return [str(n.target) for n in graph.graph.nodes if "kda" in str(n.target)]


@pytest.mark.quick
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_plain_form_gives_the_results_and_gradients_of_the_operator(case):
    want = run(case, torch.device("cpu"))
    graph = traced(case, (case.name, f"{case.name}_bwd"), trained(case))
    assert not kept(graph)
    for name, x in zip(want, graph(*case.inputs().values())):
        torch.testing.assert_close(x, want[name], rtol=1e-5, atol=1e-5)


@pytest.mark.quick
@pytest.mark.parametrize("case", (CASES["packed"], CASES["norm"]), ids=("packed", "norm"))
def test_a_graph_keeps_the_operators_that_are_not_chosen(case):
    forward, backward = f"kda.{case.name}.default", f"kda.{case.name}_bwd.default"
    assert kept(traced(case, (), trained(case))) == [forward, backward]
    assert kept(traced(case, (case.name,), trained(case))) == [backward]
    assert kept(traced(case, (f"{case.name}_bwd",), trained(case))) == [forward]


@pytest.mark.quick
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_plain_form_has_the_strides_of_the_operator(case):
    case = replace(case, strides="first")
    with FakeTensorMode(allow_non_fake_inputs=True):
        want = trained(case)(*case.inputs().values())
    graph = traced(case, (case.name, f"{case.name}_bwd"), trained(case))
    pairs = [(x, y) for x, y in zip(graph(*case.inputs().values()), want) if x.numel()]
    assert pairs and all(x.stride() == y.stride() for x, y in pairs)


def test_the_norm_of_permuted_rows_can_be_viewed_in_a_graph():
    x, weight = torch.randn(2, 5, 3, 8).transpose(1, 2), torch.ones(8)

    def normalise(x):
        return kda_ops.gated_rms_norm(x, weight, x).view(2, 3, 40)

    got = torch.compile(normalise, fullgraph=True, backend="inductor")(x)
    torch.testing.assert_close(got, normalise(x))


def test_the_norm_of_chosen_rows_compiles():
    """Their number is known only when the graph runs."""
    x, chosen = torch.randn(9, 8), torch.tensor([True, False, True] * 3)

    def normalise(x, chosen):
        return kda_ops.gated_rms_norm(x[chosen], torch.ones(8), x[chosen])

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        got = torch.compile(normalise, fullgraph=True)(x, chosen)
    torch.testing.assert_close(got, normalise(x, chosen))
