"""A model of two layers under torch.compile: one graph, a recompilation per size that changes, and
every site that is written in PyTorch folded.
"""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters

import kda_ops
from examples.train import LanguageModel, loss_of
from kda_ops.inductor import fold_preprocessing

# batch and length; the first is compiled first
SHAPES = ((2, 130), (2, 97), (2, 200), (3, 200), (5, 321))


def plain(layer, q, k, v, g, beta, **flags):
    """Call the operator with norms, gate and sigmoid written in PyTorch."""
    q, k = (
        x * torch.rsqrt(x.float().square().sum(-1, keepdim=True) + 1e-6).to(x.dtype) for x in (q, k)
    )
    bias = layer.dt_bias.unflatten(0, (-1, layer.head_k_dim))
    g = -layer.A_log.exp()[:, None] * F.softplus(g.float() + bias)
    beta = torch.sigmoid(beta.float())
    return kda_ops.chunk_kda(q, k, v, g, beta, cu_seqlens=flags["cu_seqlens"])


def fold(gm, inputs):
    fold_preprocessing(gm.graph)
    gm.recompile()
    return torch._dynamo.lookup_backend("aot_eager")(gm, inputs)


@pytest.mark.parametrize(
    "folds", (True, pytest.param(False, marks=pytest.mark.nightly)), ids=("plain", "flags")
)
@pytest.mark.parametrize(
    "training", (True, pytest.param(False, marks=pytest.mark.nightly)), ids=("train", "infer")
)
def test_a_model_is_one_graph_and_folds_every_site(folds, training):
    torch.manual_seed(0)
    model = LanguageModel(layers=2, hidden=64, head_dim=32, gdn=False)
    for block in model.blocks if folds else ():
        block.mixer._chunk = partial(plain, block.mixer)
    torch._dynamo.reset()
    counters.clear()
    fold_preprocessing.folded.clear()
    backend = fold if folds else "aot_eager"
    call = torch.compile(partial(loss_of, model), fullgraph=True, backend=backend)
    graphs = []
    for B, T in SHAPES:
        tokens = torch.randint(256, (B, T + 1), generator=torch.Generator().manual_seed(T))
        with torch.inference_mode(not training):
            loss = call(tokens)
        if training:
            loss.backward()
        graphs.append(counters["stats"]["unique_graphs"])
        if len(graphs) == 1:
            assert fold_preprocessing.folded.total() == 6 * folds
    # torch makes a size dynamic when it first changes: the length, and the batch
    assert graphs == [1, 2, 2, 3, 3] and not counters["graph_break"]
    torch._dynamo.reset()
