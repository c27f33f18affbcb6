"""Compare the layers of `kda_ops.nn` with their definition, for every option."""

import functools

import pytest
import torch

from kda_ops.nn import GatedDeltaNet, GatedRMSNorm, KimiDeltaAttention, kimi_delta_attention
from tests.support.layers import HIDDEN, build, by_definition, close, gradients, rows

OPTIONS = [
    (KimiDeltaAttention, {}),
    (KimiDeltaAttention, dict(num_v_heads=4, conv_bias=True, allow_neg_eigval=True)),
    (KimiDeltaAttention, dict(safe_gate=True, lower_bound=-5.0, conv_size=3)),
    (KimiDeltaAttention, dict(lower_bound=-2.0)),
    (GatedDeltaNet, {}),
    (GatedDeltaNet, dict(num_v_heads=6, conv_bias=True, allow_neg_eigval=True)),
    (GatedDeltaNet, dict(use_gate=False, conv_size=1)),
    (GatedDeltaNet, dict(output_gate_activation="sigmoid")),
    (GatedDeltaNet, dict(output_gate_activation="silu")),
]


def test_kimi_gates_with_a_sigmoid_and_gated_deltanet_with_a_swish():
    assert build(KimiDeltaAttention).o_norm.activation == "sigmoid"
    assert build(GatedDeltaNet).o_norm.activation == "swish"


@pytest.mark.quick
@pytest.mark.parametrize("make, options", OPTIONS)
def test_a_layer_matches_its_definition(make, options):
    layer, x = build(make, **options), rows(2, 70)
    close(layer(x), torch.stack([by_definition(layer, row) for row in x]))


@pytest.mark.quick
@pytest.mark.parametrize(
    "make, options", [(KimiDeltaAttention, dict(num_v_heads=4)), (GatedDeltaNet, {})]
)
def test_gradients_match_those_of_the_definition(make, options):
    layer, x = build(make, **options), rows(1, 20).requires_grad_()
    for ours, theirs in zip(
        gradients(layer, layer(x), x), gradients(layer, by_definition(layer, x[0])[None], x)
    ):
        close(ours, theirs)
        assert ours.any()


@pytest.mark.quick
@pytest.mark.parametrize("invariant", (False, True))
def test_the_chunk_form_of_a_layer_is_invariant_if_the_layer_is(make, invariant, monkeypatch):
    layer, x, seen = build(make, invariant=invariant), rows(2, 70), []
    for name in ("_chunk", "_chunk_", "_recurrent_"):
        run = getattr(layer, name)
        monkeypatch.setattr(
            layer,
            name,
            lambda *args, name=name, run=run, **flags: (
                seen.append((name, flags.get("invariant"))),
                run(*args, **flags),
            )[1],
        )
    want = by_definition(layer, x[0])
    close(layer(x)[0], want)
    cache = layer.new_cache(2)
    with torch.no_grad():
        parts = [layer(x[:, :64], cache=cache), layer(x[:, 64:69], cache=cache)]
        parts.append(layer(x[:, 69:], cache=cache))
    close(torch.cat(parts, 1)[0], want)
    prefill = ("_chunk_", invariant)
    assert seen == [("_chunk", invariant), prefill, prefill, ("_recurrent_", None)]


def test_bfloat16_and_autocast_stay_near_float32(make):
    layer, x = build(make).float(), rows(2, 40).float()
    want = layer(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        autocast = layer(x)
    with pytest.warns(UserWarning, match="^A_log and dt_bias must stay in float32, got"):
        half = layer.bfloat16()(x.bfloat16())
    assert autocast.dtype is half.dtype is torch.bfloat16
    for y in (autocast, half):
        assert (y.float() - want).norm() < 0.03 * want.norm()


@pytest.mark.filterwarnings("error")
def test_a_layer_built_in_bfloat16_keeps_its_gate_and_warns_of_nothing(make):
    layer = make(HIDDEN, head_dim=8, num_heads=2, dtype=torch.bfloat16)
    assert layer(rows(2, 5).bfloat16()).dtype is torch.bfloat16
    assert layer.A_log.dtype is layer.dt_bias.dtype is torch.float32


@pytest.mark.bits
@pytest.mark.parametrize("gated", (False, True))
def test_the_gated_norm_computes_in_float32(gated):
    norm = GatedRMSNorm(64).bfloat16()
    x = torch.randn(50, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    gate = x.flip(0) if gated else None
    want = norm.float()(x.float(), None if gate is None else gate.float()).bfloat16()
    assert torch.equal(norm.bfloat16()(x, gate), want)


def test_expand_v_may_carry_a_rounding_error():
    # 28.999999999999996
    assert GatedDeltaNet(64, num_heads=1, head_dim=100, expand_v=0.29).head_v_dim == 29


def test_silu_is_applied_without_convolutions_too(make):
    layer, other, x = build(make, use_short_conv=False), build(make, conv_size=1), rows(2, 5)
    with torch.no_grad():
        for n in "qkv":
            getattr(other, f"{n}_conv1d").weight.fill_(1.0)
    assert not other.load_state_dict(layer.state_dict(), strict=False).unexpected_keys
    close(layer(x), other(x))


def test_options_reach_the_layer():
    options = dict(head_dim=8, num_heads=2, norm_eps=0.5, conv_bias=True, allow_neg_eigval=True)
    kda = KimiDeltaAttention(HIDDEN, lower_bound=-2.0, **options)
    gdn = GatedDeltaNet(HIDDEN, use_gate=False, output_gate_activation="sigmoid", **options)
    for layer in (kda, gdn):
        assert layer.o_norm.eps == 0.5
        assert layer.allow_neg_eigval
        assert all(getattr(layer, f"{n}_conv1d").bias is not None for n in "qkv")
    assert kda.lower_bound == -2.0 and gdn.g_proj is None and gdn.o_norm.activation == "sigmoid"


@pytest.mark.parametrize("name", ("chunk_kda", "chunk_kda_"))
def test_safe_gate_and_lower_bound_reach_the_operator(name, monkeypatch):
    seen, call = [], getattr(kimi_delta_attention, name)

    @functools.wraps(call)
    def spy(*args, **flags):
        seen.append((flags.get("safe_gate"), flags["lower_bound"]))
        return call(*args, **flags)

    monkeypatch.setattr(kimi_delta_attention, name, spy)
    layer = KimiDeltaAttention(HIDDEN, head_dim=8, num_heads=2, safe_gate=True, lower_bound=-3.0)
    with torch.no_grad():
        layer(torch.randn(1, 5, HIDDEN), cache=layer.new_cache(1) if name.endswith("_") else None)
    assert seen == [(True, -3.0)]
