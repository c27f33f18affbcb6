"""Names, shapes and first values of a layer's parameters."""

import math

import pytest
import torch
import torch.nn.functional as F

from kda_ops.nn import GatedDeltaNet, KimiDeltaAttention
from tests.support.layers import HIDDEN

NAMES = {
    "q_proj.weight": (16, 32),
    "k_proj.weight": (16, 32),
    "v_proj.weight": (64, 32),
    "q_conv1d.weight": (16, 1, 4),
    "k_conv1d.weight": (16, 1, 4),
    "v_conv1d.weight": (64, 1, 4),
    "b_proj.weight": (4, 32),
    "A_log": (4,),
    "o_norm.weight": (16,),
    "o_proj.weight": (32, 64),
}
KDA_NAMES = NAMES | {
    "f_proj.0.weight": (16, 32),
    "f_proj.1.weight": (32, 16),
    "dt_bias": (32,),
    "g_proj.0.weight": (16, 32),
    "g_proj.1.weight": (64, 16),
    "g_proj.1.bias": (64,),
}
GDN_NAMES = NAMES | {"a_proj.weight": (4, 32), "dt_bias": (4,), "g_proj.weight": (64, 32)}


@pytest.mark.quick
@pytest.mark.parametrize(
    "make, names", [(KimiDeltaAttention, KDA_NAMES), (GatedDeltaNet, GDN_NAMES)]
)
def test_parameters_have_the_names_and_shapes_of_published_checkpoints(make, names):
    layer = make(hidden_size=HIDDEN, head_dim=8, num_heads=2, num_v_heads=4, expand_v=2)
    assert {name: tuple(p.shape) for name, p in layer.state_dict().items()} == names


def test_defaults_are_the_published_sizes():
    with torch.device("meta"):
        kda, gdn = KimiDeltaAttention(), GatedDeltaNet()
    names = "hidden_size num_heads num_v_heads head_k_dim head_v_dim conv_size".split()
    assert [getattr(kda, n) for n in names] == [2048, 16, 16, 128, 128, 4]
    assert [getattr(gdn, n) for n in names] == [2048, 6, 6, 256, 512, 4]


def has_the_stated_start(layer):
    lo, hi = (0, 16) if isinstance(layer, GatedDeltaNet) else (1, 1) if layer.safe_gate else (1, 16)
    A, rate = layer.A_log.exp(), F.softplus(layer.dt_bias)
    assert (A >= lo - 1e-4).all() and (A <= hi + 1e-4).all() and layer.A_log.isfinite().all()
    assert (rate > 0.99e-3).all() and (rate < 1.01e-1).all()
    assert math.isclose(rate.log().mean().item(), math.log(1e-2), abs_tol=0.5)
    assert layer.A_log.dtype is layer.dt_bias.dtype is torch.float32
    assert layer.A_log._no_weight_decay and layer.dt_bias._no_weight_decay
    assert (layer.o_norm.weight == 1).all()
    for name in ("q_proj", "o_proj", "b_proj", "q_conv1d"):
        weight = getattr(layer, name).weight
        bound = math.prod(weight.shape[1:]) ** -0.5
        assert bound * 0.8 < weight.abs().max() <= bound


@pytest.mark.parametrize(
    "make, options",
    [
        (KimiDeltaAttention, {}),
        (KimiDeltaAttention, dict(safe_gate=True, lower_bound=-5.0)),
        (GatedDeltaNet, {}),
    ],
)
def test_a_layer_starts_alike_built_directly_or_on_the_meta_device(make, options):
    sizes = (
        dict(hidden_size=HIDDEN, head_dim=8, num_heads=64, expand_v=1, dtype=torch.bfloat16)
        | options
    )
    torch.manual_seed(0)
    has_the_stated_start(make(**sizes))
    with torch.device("meta"):
        layer = make(**sizes)
    assert all(p.is_meta for p in layer.parameters())
    layer = layer.to_empty(device="cpu")
    with torch.no_grad():
        for p in layer.parameters():
            p.fill_(math.nan)
    layer.reset_parameters()
    has_the_stated_start(layer)
