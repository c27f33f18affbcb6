"""Check that layers refuse wrong calls with clear errors and leave the cache unchanged."""

import math
import re

import pytest
import torch

import kda_ops
from kda_ops.nn import GatedDeltaNet, GatedRMSNorm, KimiDeltaAttention, ShortConvolution
from tests.support.layers import HIDDEN, LAYERS, build, rows


@torch.no_grad()
def decode(*args):
    """Convolve on tails that are updated in place."""
    return ShortConvolution(4)(*args)


@torch.no_grad()
def short_of_bits(tokens):
    """Call an invariant layer with a cache whose states are bf16."""
    layer = build(GatedDeltaNet, invariant=True).float()
    cache = layer.new_cache(1)
    cache.state = cache.state.bfloat16()
    return layer(rows(1, tokens).float(), cache=cache)


def kda(**options):
    return KimiDeltaAttention(64, **options)


def gdn(**options):
    return GatedDeltaNet(64, **options)


def call(x, *args, **kwargs):
    """Call a small layer."""
    return build(GatedDeltaNet)(x, *args, **kwargs)


OFFSETS, ONES, MASK = torch.tensor([0, 5]), torch.ones(2, 5, 4), torch.ones(2, 5)
JAGGED = torch.nested.nested_tensor([rows(1, 5)[0]], layout=torch.jagged)
NEW = build(GatedDeltaNet).new_cache
CACHES = (
    *(dict(use_short_conv=False), dict(conv_size=6), dict(conv_size=3)),
    *(dict(num_v_heads=4), dict(head_dim=16)),
)
# (call, words of the ValueError)
VALUES = [
    (lambda: kda(num_heads=4, num_v_heads=2), "num_v_heads must be a multiple of num_heads = 4"),
    (lambda: gdn(num_heads=4, num_v_heads=6), "num_v_heads must be a multiple of num_heads = 4"),
    (lambda: gdn(num_heads=2, head_dim=8, expand_v=1.3), "expand_v must make head_dim"),
    (lambda: gdn(expand_v=math.nan), "expand_v must be a finite number, got nan"),
    (lambda: kda(num_heads=0), "num_heads must be at least 1, got 0"),
    (lambda: gdn(head_dim=300), "head_dim must be at least 1 and at most 256, got 300"),
    (lambda: kda(safe_gate=True), "pass lower_bound"),
    (lambda: kda(lower_bound=1.0), "lower_bound must be a finite number below 0"),
    (lambda: gdn(conv_size=0), "conv_size must be at least 1, got 0"),
    (lambda: NEW(-1), "num_sequences must be at least 0, got -1"),
    (lambda: NEW(2**70), "num_sequences must fit in 64 bits, got"),
    (lambda: GatedDeltaNet(2**70), "hidden_size must fit in 64 bits, got"),
    (lambda: GatedRMSNorm(8, activation="relu"), "activation must be one of"),
    (lambda: gdn(output_gate_activation="relu"), "activation must be one of"),
    (lambda: call(rows(2, 5)[..., :-1]), "x must have shape [B, T, hidden_size] = [B, T, 32], got"),
    *(
        (lambda m=mask: call(rows(2, 5), m), "attention_mask must have shape [B, T] = [2, 5]")
        for mask in (torch.ones(2, 4), torch.ones(2, 1, 5, 5))
    ),
    (lambda: call(rows(2, 5), cu_seqlens=OFFSETS), "needs B == 1, got B = 2: reshape x and"),
    (lambda: call(rows(1, 5), cu_seqlens=OFFSETS[None]), "cu_seqlens must have shape [N + 1]"),
    (lambda: call(rows(1, 5), torch.ones(1, 5), cu_seqlens=OFFSETS), "pass one of them"),
    (lambda: call(rows(1, 5), cache=NEW(2)), "make it with new_cache(1)"),
    *(
        (
            lambda o=options: call(rows(1, 5), cache=build(GatedDeltaNet, **o).new_cache(1)),
            "cache must hold a state and convolution tails of shapes",
        )
        for options in CACHES
    ),
    *(
        (lambda m=make, e=eps: m(64, norm_eps=e), f"norm_eps must be .* above 0, got {eps}")
        for make in LAYERS
        for eps in (-1.0, 0.0, math.nan, math.inf)
    ),
    (lambda: GatedRMSNorm(8, -1e-5), "eps must be a finite number above 0, got -1e-05"),
    (lambda: decode(ONES, ONES[:, :2]), "tail must have shape [N, W - 1, D] = [2, 3, 4], got"),
    (lambda: GatedRMSNorm(4)(ONES[0, :, :1]), "x must have shape [..., V] = [..., 4], got [5, 1]"),
    (lambda: GatedRMSNorm(4)(ONES, ONES[..., :1]), "gate must have the shape of x, [2, 5, 4], got"),
    (lambda: ShortConvolution(4)(ONES[..., :1]), "x must have shape [B, T, D] = [B, T, 4], got"),
    (lambda: kda_ops.gated_rms_norm(ONES, ONES[0, 0, :3]), "weight must have shape [V] = [4], got"),
    (lambda: kda_ops.gated_rms_norm(ONES.sum(), ONES[0, 0]), "x must have shape [..., V], got []"),
]
AS_WEIGHTS = "x must be torch.float64, as q_proj.weight is, got torch."
FLOATING = "float32 or float64, got torch."
# the same, for a TypeError
TYPES = [
    *(
        (lambda n=tokens: short_of_bits(n), "cache must hold states of torch.float32 on cpu, got")
        for tokens in (1, 5)
    ),
    *((lambda n=n: NEW(n), "num_sequences must be a whole") for n in ("2", 2.0, True, None)),
    (lambda: call(rows(1, 5), cu_seqlens=[0, 5]), "tensor of shape [N + 1], got list"),
    (lambda: call(rows(1, 5), [[1] * 5]), "attention_mask must be .*, got list"),
    (lambda: call(rows(1, 5), cache={}), "kda_ops.nn.Cache, got dict: make it with new_cache"),
    (lambda: decode(ONES, ONES[:, :3], [0, 5]), "cu_seqlens must be .*, got list: torch.as_tensor"),
    *(
        (lambda m=make, d=dtype: m(64, dtype=d), f"dtype must be float16, .*, got {dtype}")
        for make in (*LAYERS, GatedRMSNorm, ShortConvolution)
        for dtype in (torch.complex64, torch.int8, torch.float8_e4m3fn)
    ),
    (lambda: GatedRMSNorm(4)(ONES.long()), FLOATING + "int64"),
    (lambda: GatedRMSNorm(4)(ONES.to("meta")), "x must be on cpu, where weight is, got meta"),
    (lambda: GatedRMSNorm(4)(ONES, ONES.int()), "gate must be float16, bfloat16, float32"),
    (lambda: GatedRMSNorm(4)(None), "x must be a tensor, got None"),
    (lambda: GatedRMSNorm(4)(ONES, [1.0]), "gate must be a tensor, got list"),
    (lambda: ShortConvolution(4)(ONES.int()), FLOATING + "int32"),
    (lambda: ShortConvolution(4)(ONES.to("meta")), "x must be on cpu, where weight is, got meta"),
    (lambda: ShortConvolution(4)([1.0]), "x must be a tensor, got list"),
    (lambda: decode(ONES, ONES[:, :3].to("meta")), "tail must be on cpu, where x is"),
    (lambda: decode(ONES, [1.0]), "tail must be a tensor, got list"),
    (
        lambda: kda_ops.short_conv(ONES, ONES[0, :4], activation=1),
        "activation must be text or None",
    ),
    *(
        (lambda m=make, x=x, o=options: build(m)(x, **o), words)
        for make in LAYERS
        for x, options, words in (
            (rows(2, 5).float(), {}, AS_WEIGHTS + "float32: convert x"),
            (rows(2, 5).bfloat16(), {}, AS_WEIGHTS + "bfloat16: convert x"),
            (rows(2, 5).long(), {}, FLOATING + "int64: embed or convert it"),
            (rows(2, 5).cfloat(), {}, FLOATING + "complex64"),
            (rows(2, 5).to(torch.float8_e4m3fn), {}, FLOATING + "float8_e4m3fn"),
            (rows(2, 5).to("meta"), {}, "where q_proj.weight is, got meta: move x or the layer"),
            (rows(2, 5).numpy(), {}, "x must be .*, hidden_size], got ndarray"),
            (rows(2, 5), dict(attention_mask=MASK.to("meta")), "attention_mask must be on cpu"),
            (rows(2, 5).to_sparse(), {}, "x must be a dense tensor, got a tensor of layout"),
            (JAGGED, {}, "x must be a dense tensor, got a nested tensor"),
            (rows(2, 5), dict(attention_mask=MASK.to_sparse()), "attention_mask must be a dense"),
            (rows(1, 5), dict(cu_seqlens=OFFSETS.to_sparse()), "cu_seqlens must be a dense tensor"),
        )
    ),
]


WHOLE, NUMBER, FLAG = "must be a whole number", "must be a number", "must be True or False"
OPTIONS = [
    *(
        (make, name, x, WHOLE)
        for make in LAYERS
        for name in ("hidden_size", "head_dim", "num_heads", "num_v_heads", "conv_size")
        for x in (True, "2", 2.0, [2])
    ),
    *((make, name, None, WHOLE) for make in LAYERS for name in ("head_dim", "num_heads")),
    *(
        (make, name, x, NUMBER)
        for make in LAYERS
        for name in ("expand_v", "norm_eps")
        for x in (True, "1", None, [1.0], 1j)
    ),
    *((KimiDeltaAttention, "lower_bound", x, NUMBER) for x in (False, "-5", [-5.0])),
    *(
        (make, name, x, FLAG)
        for make in LAYERS
        for name in ("use_short_conv", "allow_neg_eigval", "conv_bias", "invariant")
        for x in (None, "no")
    ),
    (KimiDeltaAttention, "safe_gate", "no", FLAG),
    (GatedDeltaNet, "use_gate", "no", FLAG),
    (GatedDeltaNet, "output_gate_activation", ["silu"], "activation must be one of"),
    (GatedRMSNorm, "eps", "a", NUMBER),
    (GatedRMSNorm, "width", True, WHOLE),
    (ShortConvolution, "channels", "4", WHOLE),
    (ShortConvolution, "size", 2.5, WHOLE),
    (ShortConvolution, "bias", "no", FLAG),
]


@pytest.mark.quick
@pytest.mark.parametrize(
    "make, name, x, words", OPTIONS, ids=lambda x: getattr(x, "__name__", None)
)
def test_an_option_of_a_wrong_type_is_refused_by_name(make, name, x, words):
    sizes = {GatedRMSNorm: {"width": 4}, ShortConvolution: {"channels": 4}}
    with pytest.raises((TypeError, ValueError)) as raised:
        make(**sizes.get(make, {"hidden_size": 16, "head_dim": 8, "num_heads": 2}) | {name: x})
    said = "" if words.startswith("activation") else f"{name} "
    assert str(raised.value).startswith(said + words)


@pytest.mark.quick
@pytest.mark.parametrize(
    "call, words, error",
    [(*row, ValueError) for row in VALUES] + [(*row, TypeError) for row in TYPES],
    ids=[words[:60] for _, words in (*VALUES, *TYPES)],
)
def test_a_wrong_call_is_refused_with_a_clear_error(call, words, error):
    with pytest.raises(error, match=re.escape(words).replace(r"\.\*", ".*")):
        call()


@pytest.mark.parametrize(
    "offsets", ([0, 4, 2, 5], [1, 2, 4, 5], [0, 1, 2, 12], [0.0, 1.0, 2.0, 5.0]), ids=str
)
@torch.no_grad()
def test_a_call_refused_for_its_offsets_or_dtype_leaves_the_cache_as_it_was(make, offsets):
    layer = build(make)
    cache = layer.new_cache(3)
    with pytest.raises((TypeError, ValueError), match="^cu_seqlens must"):
        layer(rows(1, 5), cache=cache, cu_seqlens=torch.tensor(offsets))
    half = layer.new_cache(1).half()
    with pytest.raises(
        TypeError, match=r"^cache must hold states of torch.float64 on .*, got torch.float16 on"
    ):
        layer(rows(1, 5), cache=half)
    other, whole = layer.new_cache(1), layer.new_cache(1)
    other.v_conv, whole.k_conv = other.v_conv.repeat(2, 1, 1), whole.k_conv.long()
    with pytest.raises(
        ValueError, match="^cache must hold a state and convolution tails of shapes"
    ):
        layer(rows(1, 5), cache=other)
    with pytest.raises(
        TypeError, match="^cache must hold convolution tails .*, got torch.int64 on"
    ):
        layer(rows(1, 5), cache=whole)
    assert not any(x.any() for c in (cache, half, other, whole) for x in c.buffers())


@torch.no_grad()
def test_offsets_past_the_row_are_refused_by_compiled_layers_too():
    layer = build(GatedDeltaNet)
    compiled, cache = torch.compile(layer, fullgraph=True, backend="aot_eager"), layer.new_cache(2)
    with pytest.raises(
        ValueError, match="^cu_seqlens must start at 0, never decrease and end at or before T = 10"
    ):
        compiled(rows(1, 10), cache=cache, cu_seqlens=torch.tensor([0, 4, 12]))


def test_a_refused_call_leaves_the_cache_as_it_was():
    """Freeze q, k and v's projections and convolutions; other parameters need gradients."""
    layer = KimiDeltaAttention(HIDDEN, head_dim=8, num_heads=2)
    for n in "qkv":
        getattr(layer, f"{n}_proj").requires_grad_(False)
        getattr(layer, f"{n}_conv1d").requires_grad_(False)
    cache = layer.new_cache(1)
    with pytest.raises(RuntimeError, match="written in place"):
        layer(torch.randn(1, 5, HIDDEN), cache=cache)
    assert not cache.q_conv.any()


@torch.no_grad()
def test_x_of_another_dtype_is_refused_under_autocast_only_where_torch_would(make):
    layer, x = make(HIDDEN, head_dim=8, num_heads=2), rows(2, 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for given in (x.float(), x.bfloat16(), x.half()):
            assert layer(given).dtype is torch.bfloat16
        with pytest.raises(TypeError, match="^x must be torch.float32, as q_proj.weight is"):
            layer(x)


@pytest.mark.bits
@torch.no_grad()
def test_x_of_another_dtype_is_left_to_projections_that_convert_it(make):
    """A hook, or a forward of its own, may convert x, as offloading and sharding do."""
    layer, x = build(make), rows(2, 5)
    want = layer(x.float().double())
    for name in ("q_proj", "k_proj", "v_proj", "b_proj"):
        getattr(layer, name).register_forward_pre_hook(lambda _, args: (args[0].double(),))
    other = layer.f_proj if make is KimiDeltaAttention else layer.a_proj
    for part in (other, layer.g_proj):
        part.register_forward_pre_hook(lambda _, args: (args[0].double(),))
    assert torch.equal(layer(x.float()), want)
