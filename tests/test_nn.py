"""Laws of the layers in `kda_ops.nn`."""

import functools
import math
import re

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F

from kda_ops import recurrent
from kda_ops.nn import GatedDeltaNet, GatedRMSNorm, KimiDeltaAttention, ShortConvolution, kimi_delta_attention

LAYERS = [KimiDeltaAttention, GatedDeltaNet]
HIDDEN = 32
variants = pytest.mark.parametrize("make", LAYERS)


def build(make, **kwargs):
    """A small layer in float64, where laws that hold exactly hold to 1e-9."""
    torch.manual_seed(0)
    layer = make(**(dict(hidden_size=HIDDEN, head_dim=8, num_heads=2, expand_v=1.5) | kwargs)).double()
    with torch.no_grad():
        for name, p in layer.named_parameters():
            if name.endswith("bias") or "norm" in name:
                p.add_(torch.rand_like(p))
    return layer


def rows(B, T):
    return torch.randn(B, T, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(B * 1000 + T))


def close(a, b, atol=1e-9):
    torch.testing.assert_close(a, b, rtol=0, atol=atol)


def gradients(layer, y, x):
    weight = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
    return torch.autograd.grad((y * weight).sum(), [x, *layer.parameters()])


def by_definition(layer, x):
    """The layer for one row x [T, hidden], token by token, written out."""

    def conv(module, z):
        k = module.weight.shape[-1]
        padded = torch.cat([z.new_zeros(k - 1, z.shape[1]), z])
        y = torch.stack([(padded[t : t + k] * module.weight[:, 0].T).sum(0) for t in range(len(z))])
        return F.silu(y if module.bias is None else y + module.bias)

    H, HV, K, V = layer.num_heads, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim
    q, k, v = (conv(getattr(layer, f"{n}_conv1d"), getattr(layer, f"{n}_proj")(x)) for n in "qkv")
    q, k = (t.unflatten(-1, (H, K)).repeat_interleave(HV // H, 1) for t in (q, k))
    q, k = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
    v = v.unflatten(-1, (HV, V))
    kda = isinstance(layer, KimiDeltaAttention)
    g = (layer.f_proj(x) if kda else layer.a_proj(x)) + layer.dt_bias
    g = g.unflatten(-1, (HV, -1))  # [T, HV, K] or [T, HV, 1]
    A = layer.A_log.exp()[:, None]
    bound = getattr(layer, "lower_bound", None)
    g = -A * F.softplus(g) if bound is None else bound * torch.sigmoid(A * g)
    beta = torch.sigmoid(layer.b_proj(x)) * (2 if layer.allow_neg_eigval else 1)
    S, out = x.new_zeros(HV, K, V), []
    for t in range(len(x)):
        S = g[t].exp()[..., None] * S
        missing = v[t] - torch.einsum("hkv,hk->hv", S, k[t])
        S = S + torch.einsum("hk,hv->hkv", k[t], beta[t][:, None] * missing)
        out.append(torch.einsum("hkv,hk->hv", S, q[t]) * K**-0.5)
    o = torch.stack(out)
    o = o / (o.square().mean(-1, keepdim=True) + layer.o_norm.eps).sqrt() * layer.o_norm.weight
    if layer.g_proj is not None:
        gate = layer.g_proj(x).unflatten(-1, (HV, V))
        o = o * (F.silu(gate) if layer.o_norm.activation in ("swish", "silu") else torch.sigmoid(gate))
    return layer.o_proj(o.flatten(-2))


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
    assert build(KimiDeltaAttention).o_norm.activation == "sigmoid" and build(GatedDeltaNet).o_norm.activation == "swish"


@pytest.mark.parametrize("make, options", OPTIONS)
def test_a_layer_is_its_definition(make, options):
    layer, x = build(make, **options), rows(2, 70)
    close(layer(x), torch.stack([by_definition(layer, row) for row in x]))


@pytest.mark.parametrize("make, options", [(KimiDeltaAttention, dict(num_v_heads=4)), (GatedDeltaNet, {})])
def test_gradients_are_those_of_the_definition(make, options):
    layer, x = build(make, **options), rows(1, 20).requires_grad_()
    for ours, theirs in zip(gradients(layer, layer(x), x), gradients(layer, by_definition(layer, x[0])[None], x)):
        close(ours, theirs)
        assert ours.any()


CACHED = [
    (KimiDeltaAttention, dict(num_v_heads=4)),
    (KimiDeltaAttention, dict(use_short_conv=False, lower_bound=-5.0, safe_gate=True)),
    (GatedDeltaNet, dict(num_v_heads=4, conv_bias=True)),
    (GatedDeltaNet, dict(conv_size=1)),
]


@torch.no_grad()
@pytest.mark.parametrize("prompt", [0, 1, 2, 64, 67])
@pytest.mark.parametrize("make, options", CACHED)
def test_token_by_token_decode_equals_one_forward(make, options, prompt):
    layer, x = build(make, **options), rows(2, 70)
    cache, steps = layer.new_cache(2), [prompt] * (prompt > 0) + [1] * min(70 - prompt, 9)
    parts = [layer(part, cache=cache) for part in x[:, : sum(steps)].split(steps, 1)]
    close(torch.cat(parts, 1), layer(x[:, : sum(steps)]))


@torch.no_grad()
@pytest.mark.parametrize("make, options", CACHED)
def test_prefill_in_pieces_equals_one_forward(make, options):
    layer, x = build(make, **options), rows(2, 70)
    cache = layer.new_cache(2)
    close(torch.cat([layer(part, cache=cache) for part in x.split([2, 40, 1, 3, 24], 1)], 1), layer(x))


@torch.no_grad()
@pytest.mark.parametrize("make, options", CACHED)
def test_left_padding_does_not_change_a_sequence_nor_its_decode(make, options):
    layer, lengths = build(make, **options), [70, 0, 1, 33]
    x, T = rows(4, 75), 70
    mask = torch.arange(T) >= T - torch.tensor(lengths)[:, None]
    cache = layer.new_cache(4)
    y = layer(x[:, :T].masked_fill(~mask[..., None], 100.0), attention_mask=mask, cache=cache)
    assert not y[~mask].any()
    steps = [layer(x[:, t : t + 1], cache=cache) for t in range(T, 75)]
    for n, length in enumerate(lengths):
        alone = layer(x[n : n + 1, T - length :])[0]
        close(torch.cat([y[n, T - length :], *(s[n] for s in steps)]), alone)


@pytest.mark.parametrize("hole", (math.nan, math.inf))
@variants
def test_padding_may_hold_anything_in_training(make, hole):
    layer, x, mask = build(make), rows(2, 12), torch.ones(2, 12)
    mask[0, :5] = mask[1, 7:9] = 0
    found = []
    for fill in (0.0, hole):
        filled = x.masked_fill(mask[..., None] == 0, fill).requires_grad_()
        y = layer(filled, attention_mask=mask)
        found.append((y, *gradients(layer, y, filled)))
    for want, got in zip(*found):
        assert torch.equal(want, got)
    assert not found[1][0][mask == 0].any() and not found[1][1][mask == 0].any()


@torch.no_grad()
@variants
def test_a_growing_mask_counts_by_its_last_columns(make):
    layer, x = build(make), rows(2, 12)
    mask = torch.ones(2, 12, dtype=torch.int64)
    mask[1, :5] = 0
    with_mask, without = layer.new_cache(2), layer.new_cache(2)
    for cache in (with_mask, without):
        layer(x[:, :10], attention_mask=mask[:, :10], cache=cache)
    for t in (10, 11):
        close(layer(x[:, t : t + 1], attention_mask=mask[:, : t + 1], cache=with_mask), layer(x[:, t : t + 1], cache=without))


@torch.no_grad()
@variants
def test_a_masked_sequence_keeps_its_cache(make):
    layer, x = build(make), rows(2, 10)
    cache = layer.new_cache(2)
    layer(x[:, :9], cache=cache)
    before = [buffer[1].clone() for buffer in cache.buffers()]
    y = layer(x[:, 9:], attention_mask=torch.tensor([[1], [0]]), cache=cache)
    assert y[0].any() and not y[1].any()
    for buffer, kept in zip(cache.buffers(), before):
        assert torch.equal(buffer[1], kept)


@variants
@pytest.mark.parametrize("T", [1, 63, 65])
def test_masked_rows_have_the_gradients_of_separate_ones(make, T):
    layer, x = build(make, num_v_heads=4), rows(3, T).requires_grad_()
    mask = torch.rand(3, T, generator=torch.Generator().manual_seed(1)) < 0.7
    y = layer(x, attention_mask=mask)
    apart = torch.zeros_like(y)
    for n in range(3):
        apart[n, mask[n]] = layer(x[n : n + 1, mask[n]])[0]
    close(y, apart)
    for ours, theirs in zip(gradients(layer, y, x), gradients(layer, apart, x)):
        close(ours, theirs)


LENGTHS = [0, 1, 63, 64, 0, 65, 2, 7]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@variants
def test_packed_sequences_are_separate_ones(make, dtype):
    layer, T = build(make, num_v_heads=4), sum(LENGTHS)
    x = rows(1, T + 3).requires_grad_()
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0).to(dtype)
    y = layer(x, cu_seqlens=offsets)[:, :T]
    apart = torch.cat([layer(part) for part in x[:, :T].split(LENGTHS, 1)], 1)
    close(y, apart)
    for ours, theirs in zip(gradients(layer, y, x), gradients(layer, apart, x)):
        close(ours, theirs)


@torch.no_grad()
@variants
def test_packed_sequences_carry_their_caches(make):
    layer, longest = build(make, num_v_heads=4), 80
    x, packed, dense = rows(8, 2 * longest), layer.new_cache(8), layer.new_cache(1)
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0)
    for start in (0, longest):
        y = layer(torch.cat([x[n, start : start + m] for n, m in enumerate(LENGTHS)])[None], cache=packed, cu_seqlens=offsets)
    for n, m in enumerate(LENGTHS):
        dense.reset()
        alone = [layer(x[n : n + 1, start : start + m], cache=dense) for start in (0, longest)]
        close(y[:, offsets[n] : offsets[n + 1]], alone[1])
        for ours, theirs in zip(packed.buffers(), dense.buffers()):
            close(ours[n], theirs[0])


@torch.no_grad()
def test_a_reset_cache_starts_new_sequences_in_place():
    layer, x = build(KimiDeltaAttention), rows(3, 6)
    cache = layer.new_cache(3)
    addresses = [buffer.data_ptr() for buffer in cache.buffers()]
    layer(x, cache=cache)
    cache.reset(torch.tensor([0, 2]))
    y = layer(x[:, :1], cache=cache)
    close(y[[0, 2]], layer(x[[0, 2], :1]))
    assert not torch.equal(y[1], layer(x[1:2, :1])[0])
    assert addresses == [buffer.data_ptr() for buffer in cache.buffers()]


@torch.no_grad()
def test_a_cache_travels_by_state_dict():
    layer, x = build(GatedDeltaNet), rows(2, 6)
    cache, copy = layer.new_cache(2), layer.new_cache(2)
    layer(x[:, :5], cache=cache)
    copy.load_state_dict(cache.state_dict())
    assert torch.equal(layer(x[:, 5:], cache=cache), layer(x[:, 5:], cache=copy))


@torch.no_grad()
@variants
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cache_keeps_its_state_in_float32_as_v_by_k(make, dtype):
    cache = make(hidden_size=HIDDEN, head_dim=8, num_heads=2, num_v_heads=4, expand_v=2, dtype=dtype).new_cache(3)
    assert cache.state.shape == (3, 4, 16, 8) and cache.state.dtype is torch.float32
    assert cache.v_conv.shape == (3, 3, 64) and cache.v_conv.dtype is dtype


@variants
def test_bfloat16_and_autocast_stay_near_float32(make):
    layer, x = build(make).float(), rows(2, 40).float()
    want = layer(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        autocast = layer(x)
    half = layer.bfloat16()(x.bfloat16())
    assert autocast.dtype is half.dtype is torch.bfloat16
    for y in (autocast, half):
        assert (y.float() - want).norm() < 0.03 * want.norm()


# Compiled


@variants
def test_training_compiles_to_one_graph_for_all_sizes(make):
    torch._dynamo.reset()
    layer = build(make, num_v_heads=4)
    frames = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=frames)
    for B, T in [(2, 65), (3, 40), (4, 130)]:
        x = rows(B, T).requires_grad_()
        y, want = compiled(x), layer(x)
        close(y, want)
        for ours, theirs in zip(gradients(layer, y, x), gradients(layer, want, x)):
            close(ours, theirs)
    assert frames.frame_count <= 2


@torch.no_grad()
@variants
def test_masked_and_packed_calls_compile(make):
    torch._dynamo.reset()
    layer = build(make, num_v_heads=4)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x, mask = rows(3, 70), torch.arange(70) >= torch.tensor([0, 69, 30])[:, None]
    close(compiled(x, attention_mask=mask), layer(x, attention_mask=mask))
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0)
    x = rows(1, int(offsets[-1]))
    close(compiled(x, cu_seqlens=offsets), layer(x, cu_seqlens=offsets))


@torch.no_grad()
@variants
def test_compiled_decode_writes_the_cache_in_place_and_compiles_once(make):
    torch._dynamo.reset()
    layer, x = build(make, num_v_heads=4), rows(2, 12)
    frames = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=frames)
    for _ in range(2):  # a second cache runs the same code
        cache = layer.new_cache(2)
        addresses = [buffer.data_ptr() for buffer in cache.buffers()]
        prompt = layer(x[:, :4], cache=cache)
        close(torch.cat([prompt, *(compiled(x[:, t : t + 1], cache=cache) for t in range(4, 12))], 1), layer(x))
        assert addresses == [buffer.data_ptr() for buffer in cache.buffers()]
    assert frames.frame_count == 1


@pytest.mark.parametrize("gated", (False, True))
def test_the_gated_norm_computes_in_float32(gated):
    norm, x = GatedRMSNorm(64).bfloat16(), torch.randn(50, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    gate = x.flip(0) if gated else None
    want = norm.float()(x.float(), None if gate is None else gate.float()).bfloat16()
    assert torch.equal(norm.bfloat16()(x, gate), want)


@torch.no_grad()
def test_a_layer_decodes_whose_projections_are_other_modules():
    class Halved(torch.nn.Module):
        def __init__(self, linear):
            super().__init__()
            self.packed = linear.weight.detach() / 2

        def forward(self, x):
            return 2 * F.linear(x, self.packed)

    layer, x = build(KimiDeltaAttention), rows(2, 5)
    cache, want = layer.new_cache(2), layer(x)
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        setattr(layer, name, Halved(getattr(layer, name)))
    close(torch.cat([layer(x[:, t : t + 1], cache=cache) for t in range(5)], 1), want)


@torch.no_grad()
def test_inductor_decodes_without_copying_the_state(monkeypatch):
    torch._dynamo.reset()
    states, decode = [], recurrent.decode
    monkeypatch.setattr(recurrent, "decode", lambda rank, args, flags: states.append(args[5].data_ptr()) or decode(rank, args, flags))
    layer, x = build(KimiDeltaAttention).float(), rows(2, 3).float()
    compiled, cache = torch.compile(layer, fullgraph=True), layer.new_cache(2)
    y = torch.cat([compiled(x[:, t : t + 1], cache=cache) for t in range(3)], 1)
    assert states == [cache.state.data_ptr()] * 3  # the operator gets the buffer itself
    close(y, layer(x), atol=1e-5)


# Parameters

KDA_NAMES = {
    "q_proj.weight": (16, 32), "k_proj.weight": (16, 32), "v_proj.weight": (64, 32), "q_conv1d.weight": (16, 1, 4), "k_conv1d.weight": (16, 1, 4),
    "v_conv1d.weight": (64, 1, 4), "f_proj.0.weight": (16, 32), "f_proj.1.weight": (32, 16), "b_proj.weight": (4, 32), "A_log": (4,), "dt_bias": (32,),
    "g_proj.0.weight": (16, 32), "g_proj.1.weight": (64, 16), "g_proj.1.bias": (64,), "o_norm.weight": (16,), "o_proj.weight": (32, 64),
}  # fmt: skip
GDN_NAMES = {
    "q_proj.weight": (16, 32), "k_proj.weight": (16, 32), "v_proj.weight": (64, 32), "q_conv1d.weight": (16, 1, 4), "k_conv1d.weight": (16, 1, 4),
    "v_conv1d.weight": (64, 1, 4), "a_proj.weight": (4, 32), "b_proj.weight": (4, 32), "A_log": (4,), "dt_bias": (4,), "g_proj.weight": (64, 32),
    "o_norm.weight": (16,), "o_proj.weight": (32, 64),
}  # fmt: skip


@pytest.mark.parametrize("make, names", [(KimiDeltaAttention, KDA_NAMES), (GatedDeltaNet, GDN_NAMES)])
def test_parameters_have_the_names_and_shapes_of_published_checkpoints(make, names):
    layer = make(hidden_size=HIDDEN, head_dim=8, num_heads=2, num_v_heads=4, expand_v=2)
    assert {name: tuple(p.shape) for name, p in layer.state_dict().items()} == names


def test_defaults_are_the_published_sizes():
    with torch.device("meta"):
        kda, gdn = KimiDeltaAttention(), GatedDeltaNet()
    assert (kda.hidden_size, kda.num_heads, kda.num_v_heads, kda.head_k_dim, kda.head_v_dim, kda.conv_size) == (2048, 16, 16, 128, 128, 4)
    assert (gdn.hidden_size, gdn.num_heads, gdn.num_v_heads, gdn.head_k_dim, gdn.head_v_dim, gdn.conv_size) == (2048, 6, 6, 256, 512, 4)


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


@pytest.mark.parametrize("make, options", [(KimiDeltaAttention, {}), (KimiDeltaAttention, dict(safe_gate=True, lower_bound=-5.0)), (GatedDeltaNet, {})])
def test_a_layer_starts_alike_built_directly_or_on_the_meta_device(make, options):
    sizes = dict(hidden_size=HIDDEN, head_dim=8, num_heads=64, expand_v=1, dtype=torch.bfloat16) | options
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


# Refusals

REFUSALS = [
    (lambda: KimiDeltaAttention(64, num_heads=4, num_v_heads=2), ValueError, "num_v_heads must be a multiple of num_heads = 4"),
    (lambda: GatedDeltaNet(64, num_heads=4, num_v_heads=6), ValueError, "num_v_heads must be a multiple of num_heads = 4"),
    (lambda: GatedDeltaNet(64, num_heads=2, head_dim=8, expand_v=1.3), ValueError, "expand_v must make head_dim"),
    (lambda: KimiDeltaAttention(64, num_heads=0), ValueError, "num_heads must be at least 1, got 0"),
    (lambda: GatedDeltaNet(64, head_dim=300), ValueError, "head_dim must be at least 1 and at most 256, got 300"),
    (lambda: KimiDeltaAttention(64, safe_gate=True), ValueError, "pass lower_bound"),
    (lambda: GatedDeltaNet(64, head_dim=8, conv_size=0), ValueError, "conv_size must be at least 1, got 0"),
    (lambda: GatedDeltaNet(64, head_dim=8).new_cache(-1), ValueError, "num_sequences must be at least 0, got -1"),
    (lambda: KimiDeltaAttention(64, lower_bound=1.0), ValueError, "lower_bound must be a finite number below 0"),
    (lambda: KimiDeltaAttention(64, conv_size=0), ValueError, "size must be at least 1"),
    (lambda: GatedRMSNorm(8, activation="relu"), ValueError, "activation must be one of"),
    (lambda: GatedDeltaNet(64, output_gate_activation="relu"), ValueError, "activation must be one of"),
    (lambda: build(GatedDeltaNet)(rows(2, 5)[..., :-1]), ValueError, "x must have shape [B, T, hidden_size] = [B, T, 32], got [2, 5, 31]"),
    (lambda: build(GatedDeltaNet)(rows(2, 5), attention_mask=torch.ones(2, 4)), ValueError, "attention_mask must have shape [B, T] = [2, 5]"),
    (lambda: build(GatedDeltaNet)(rows(2, 5), attention_mask=torch.ones(2, 1, 5, 5)), ValueError, "attention_mask must have shape [B, T] = [2, 5]"),
    (lambda: build(GatedDeltaNet)(rows(2, 5), cu_seqlens=torch.tensor([0, 5])), ValueError, "needs B == 1, got B = 2: reshape x and"),
    (lambda: build(GatedDeltaNet)(rows(1, 5), cu_seqlens=[0, 5]), TypeError, "cu_seqlens must be an int32 or int64 tensor of shape [N + 1], got list"),
    (lambda: build(GatedDeltaNet)(rows(1, 5), [[1] * 5]), TypeError, "attention_mask must be a tensor of shape [B, T], got list"),
    (lambda: ShortConvolution(4)(torch.ones(2, 5, 4), torch.ones(2, 2, 4)), ValueError, "tail must have shape [N, size - 1, D] = [2, 3, 4], got [2, 2, 4]"),
    (lambda: build(GatedDeltaNet)(rows(1, 5), cache={}), TypeError, "cache must be a kda_ops.nn.Cache, got dict: make it with new_cache(1)"),
    (lambda: GatedRMSNorm(4)(torch.ones(2, 1)), ValueError, "x must have shape [..., V] = [..., 4], got [2, 1]"),
    (lambda: GatedRMSNorm(4)(torch.ones(2, 3, 4), torch.ones(3, 1)), ValueError, "gate must have the shape of x, [2, 3, 4], got [3, 1]"),
    (lambda: ShortConvolution(4)(torch.ones(2, 5, 1)), ValueError, "x must have shape [B, T, D] = [B, T, 4], got [2, 5, 1]"),
    (lambda: build(GatedDeltaNet)(rows(1, 5), cu_seqlens=torch.tensor([[0, 5]])), ValueError, "cu_seqlens must have shape [N + 1]"),
    (lambda: build(GatedDeltaNet)(rows(1, 5), torch.ones(1, 5), cu_seqlens=torch.tensor([0, 5])), ValueError, "pass one of them"),
    (lambda: build(GatedDeltaNet)(rows(1, 5), cache=build(GatedDeltaNet).new_cache(2)), ValueError, "make it with new_cache(1)"),
    *(
        (
            lambda o=other: build(GatedDeltaNet)(rows(1, 5), cache=build(GatedDeltaNet, **o).new_cache(1)),
            ValueError,
            "cache must hold a state and convolution tails of shapes",
        )
        for other in (dict(use_short_conv=False), dict(conv_size=6), dict(conv_size=3), dict(num_v_heads=4), dict(head_dim=16))
    ),
    (lambda: build(GatedDeltaNet)(rows(1, 5), cache=build(GatedDeltaNet).new_cache(1)), RuntimeError, "call the layer under torch.no_grad()"),
]


@pytest.mark.parametrize("call, error, words", REFUSALS, ids=[words[:40] for *_, words in REFUSALS])
def test_a_wrong_call_is_refused_in_words(call, error, words):
    with pytest.raises(error, match=re.escape(words)):
        call()


@pytest.mark.parametrize("offsets", ([0, 4, 2, 5], [1, 2, 4, 5], [0, 1, 2, 12], [0.0, 1.0, 2.0, 5.0]), ids=str)
@pytest.mark.parametrize("make", LAYERS)
@torch.no_grad()
def test_a_call_refused_for_its_offsets_or_dtype_leaves_the_cache_as_it_was(make, offsets):
    layer = build(make)
    cache = layer.new_cache(3)
    with pytest.raises((TypeError, ValueError), match="^cu_seqlens must"):
        layer(rows(1, 5), cache=cache, cu_seqlens=torch.tensor(offsets))
    half = layer.new_cache(1).half()
    with pytest.raises(TypeError, match=r"^cache must hold states of torch.float64 on .*, got torch.float16 on"):
        layer(rows(1, 5), cache=half)
    other, whole = layer.new_cache(1), layer.new_cache(1)
    other.v_conv, whole.k_conv = other.v_conv.repeat(2, 1, 1), whole.k_conv.long()
    with pytest.raises(ValueError, match="^cache must hold a state and convolution tails of shapes"):
        layer(rows(1, 5), cache=other)
    with pytest.raises(TypeError, match="^cache must hold convolution tails of torch.float64 on .*, got torch.int64 on"):
        layer(rows(1, 5), cache=whole)
    assert not any(x.any() for c in (cache, half, other, whole) for x in c.buffers())


@torch.no_grad()
def test_offsets_past_the_row_are_refused_by_compiled_layers_too():
    layer = build(GatedDeltaNet)
    compiled, cache = torch.compile(layer, fullgraph=True, backend="aot_eager"), layer.new_cache(2)
    with pytest.raises(ValueError, match="^cu_seqlens must start at 0, never decrease and end at or before T = 10"):
        compiled(rows(1, 10), cache=cache, cu_seqlens=torch.tensor([0, 4, 12]))


@pytest.mark.parametrize("make", LAYERS)
@torch.no_grad()
def test_a_layer_with_offsets_goes_through_transforms(make):
    layer, x, offsets = build(make), rows(1, 10), torch.tensor([0, 4, 10])
    want = layer(x, cu_seqlens=offsets)
    torch.testing.assert_close(torch.func.functionalize(lambda x, offsets: layer(x, cu_seqlens=offsets))(x, offsets), want)
    torch.testing.assert_close(torch.func.vmap(lambda x: layer(x, cu_seqlens=offsets))(x[None])[0], want)
    with pytest.raises(ValueError, match="cu_seqlens cannot be mapped by vmap"):
        torch.func.vmap(lambda offsets: layer(x, cu_seqlens=offsets))(offsets[None])


def test_a_width_is_whole_up_to_rounding():
    assert GatedDeltaNet(64, num_heads=1, head_dim=100, expand_v=0.29).head_v_dim == 29  # 28.999999999999996


@pytest.mark.parametrize("make", (KimiDeltaAttention, GatedDeltaNet))
def test_without_convolutions_there_is_silu_still(make):
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
        assert layer.o_norm.eps == 0.5 and layer.allow_neg_eigval and all(getattr(layer, f"{n}_conv1d").bias is not None for n in "qkv")
    assert kda.lower_bound == -2.0 and gdn.g_proj is None and gdn.o_norm.activation == "sigmoid"


def test_no_tokens_with_a_longer_mask():
    assert build(GatedDeltaNet)(rows(2, 5)[:, :0], attention_mask=torch.ones(2, 3)).shape == (2, 0, HIDDEN)


@pytest.mark.parametrize("name", ("chunk_kda", "chunk_kda_"))
def test_a_promise_reaches_the_operator(name, monkeypatch):
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


def test_a_refused_call_leaves_the_cache_as_it_was():
    """Also where what is frozen is all that the cache's convolutions come from."""
    layer = KimiDeltaAttention(HIDDEN, head_dim=8, num_heads=2)
    for n in "qkv":
        getattr(layer, f"{n}_proj").requires_grad_(False)
        getattr(layer, f"{n}_conv1d").requires_grad_(False)
    cache = layer.new_cache(1)
    with pytest.raises(RuntimeError, match="written in place"):
        layer(torch.randn(1, 5, HIDDEN), cache=cache)
    assert not cache.q_conv.any()
