"""The hub kernel on a GPU: the same bits as the package, in one process with it, compiled too."""

import pytest
import torch

import kda_ops
from benchmarks import hub
from tests.support.cases import Case
from tests.support.closeness import assert_identical
from tests.tools.test_hub import LAYERS, load


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    return load(hub.write(tmp_path_factory.mktemp("hub")))


@pytest.mark.parametrize("mode", ("eager", "compiled"))
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_gives_the_bits_of_the_operator(kernel, name, mode):
    variant, form = LAYERS[name]
    case = Case(variant, T=200, H=2, HV=2, K=128, V=128, dtype=torch.bfloat16, seed=1)
    x = case.inputs("cuda")
    words = {n: x[n] for n in ("g", "beta", "initial_state")}
    flags = dict(output_final_state=True, use_qk_l2norm_in_kernel=True)
    layer, operator = getattr(kernel.layers, name)(), getattr(kda_ops, f"{form}_{variant}")
    if mode == "compiled":
        torch._dynamo.reset()
        layer = torch.compile(layer, fullgraph=True)
    found = []
    for call in (layer, operator):
        leaves = [x[n].detach().requires_grad_() for n in ("q", "k", "v")]
        o, state = call(*leaves, **words, **flags)
        found.append((o, state, *torch.autograd.grad(o.float().sum() + state.sum(), leaves)))
    for a, b in zip(*found, strict=True):
        assert_identical(a, b)
