"""A layer that decodes from an `InvariantCache` has the bits of its training forward.

Its projections multiply rows one by one: the bits of a BLAS depend on the number of rows.
"""

import copy

import pytest
import torch
import torch._dynamo.testing

from kda_ops.nn import Cache, GatedDeltaNet, KimiDeltaAttention
from kda_ops.tools.bits import fix_rows
from tests.support.closeness import assert_identical
from tests.support.layers import HIDDEN, variants

MADE = [
    (KimiDeltaAttention, dict(num_v_heads=4)),
    (KimiDeltaAttention, dict(lower_bound=-5.0, safe_gate=True, conv_bias=True)),
    (GatedDeltaNet, dict(num_v_heads=4, conv_bias=True, allow_neg_eigval=True)),
    (GatedDeltaNet, dict(conv_size=1)),
    (GatedDeltaNet, dict(use_short_conv=False, head_dim=11)),
    (GatedDeltaNet, dict(conv_size=70)),
]
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def build(make, dtype=torch.float32, **options):
    """Build a small layer whose projections multiply rows one by one."""
    torch.manual_seed(0)
    sizes = dict(hidden_size=HIDDEN, head_dim=16, num_heads=2, invariant=True, dtype=dtype)
    return fix_rows(make(**(sizes | options)).requires_grad_(False), 1)


def rows(dtype, *shape):
    return torch.randn(*shape, HIDDEN, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.bits
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("make, options", MADE)
def test_any_pieces_and_rejected_drafts_give_the_bits_of_training(make, options, dtype):
    layer, x, wrong = build(make, dtype, **options), rows(dtype, 2, 201), rows(dtype, 3, 2).flip(0)
    want, cache, parts, a = layer(x), layer.new_cache(2, invariant=True, drafts=3), [], 0
    for length in (1, 61, 1, 2, 70, 1, 1, 1, 63):
        draft = torch.cat([x[:, a : a + length], wrong[:2], wrong[1:, :1]], 1)
        parts.append(layer(draft, cache=cache)[:, :length])
        cache.crop(3)
        a += length
    assert_identical(torch.cat(parts, 1), want, "y")
    assert cache.seen.tolist() == [201] * 2


@pytest.mark.bits
@variants
def test_padded_and_packed_rows_give_the_bits_of_training(make):
    layer, x = build(make), rows(torch.float32, 3, 90)
    want = [layer(x[n : n + 1, :m])[0] for n, m in enumerate((90, 0, 71))]
    cache, mask = layer.new_cache(3, invariant=True), torch.ones(3, 70)
    mask[1] = 0
    mask[2, :3] = 0
    first = torch.cat([x[:2, :70], torch.cat([x[2:, :3] * 9, x[2:, :67]], 1)])
    y = layer(first, attention_mask=mask, cache=cache)
    offsets = torch.tensor([0, 20, 20, 24])
    z = layer(torch.cat([x[:1, 70:], x[2:, 67:71], x[:1, :2]], 1), cache=cache, cu_seqlens=offsets)
    assert_identical(torch.cat([y[0], z[0, :20]]), want[0], "y")
    assert_identical(torch.cat([y[2, 3:], z[0, 20:24]]), want[2], "y")
    assert not y[1].any() and not z[0, 24:].any() and cache.seen.tolist() == [90, 0, 71]


@pytest.mark.bits
@variants
def test_compiled_decode_gives_the_same_bits_and_compiles_once(make):
    torch._dynamo.reset()
    layer, x = build(make, num_v_heads=4), rows(torch.float32, 2, 70)
    want = layer(x)
    frames = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=frames)
    for _ in range(2):  # a second cache runs the same code
        cache = layer.new_cache(2, invariant=True)
        addresses = [buffer.data_ptr() for buffer in cache.buffers()]
        parts = [layer(x[:, :60], cache=cache)]
        parts += [compiled(x[:, t : t + 1], cache=cache) for t in range(60, 70)]
        assert_identical(torch.cat(parts, 1), want, "y")
        assert addresses == [buffer.data_ptr() for buffer in cache.buffers()]
    assert frames.frame_count == 1


@pytest.mark.quick
@variants
def test_new_cache_makes_what_it_is_asked_for(make):
    layer = build(make, torch.bfloat16, num_v_heads=4)
    cache = layer.new_cache(3, invariant=True, drafts=5, device="meta")
    assert cache.rows == 63 + 5 + 3 and cache.batch_size == 3
    assert {x.dtype for x in (cache.q, cache.v, cache.g, cache.beta)} == {torch.bfloat16}
    assert cache.state.dtype is torch.float32 and cache.g.is_meta
    assert type(layer.new_cache(3)) is Cache
    with pytest.raises(ValueError, match="^drafts must be 0 without invariant=True, got 2"):
        layer.new_cache(3, drafts=2)
    with pytest.raises(ValueError, match="^invariant must be False for a layer without that flag"):
        make(HIDDEN, head_dim=8).new_cache(3, invariant=True)


@pytest.mark.quick
@variants
def test_a_refused_call_leaves_the_cache_unchanged(make):
    layer, x = build(make), rows(torch.float32, 2, 5)
    cache = layer.new_cache(2, invariant=True)
    layer(x, cache=cache)
    before = copy.deepcopy(cache.state_dict())
    for call, error, message in (
        (lambda: layer(x[:1], cache=cache), ValueError, "cache must hold the N = 1 sequences"),
        (lambda: layer.bfloat16()(x.bfloat16(), cache=cache), TypeError, "q must be torch.float32"),
        (
            lambda: layer.float().requires_grad_()(x, cache=cache),
            RuntimeError,
            r"(kda|gdn)::chunk_ writes its state in place and has no gradient",
        ),
    ):
        with (
            pytest.raises(error, match=f"^{message}"),
            pytest.warns(UserWarning) if error is TypeError else torch.enable_grad(),
        ):
            call()
        for name, buffer in cache.state_dict().items():
            assert torch.equal(buffer, before[name])
