"""Layers over a cache, padded rows and packed sequences: each is the sequence alone."""

import math

import pytest
import torch

from kda_ops.nn import GatedDeltaNet, KimiDeltaAttention
from tests.support.layers import HIDDEN, LENGTHS, build, close, gradients, rows

CACHED = [
    (KimiDeltaAttention, dict(num_v_heads=4)),
    (KimiDeltaAttention, dict(use_short_conv=False, lower_bound=-5.0, safe_gate=True)),
    (GatedDeltaNet, dict(num_v_heads=4, conv_bias=True)),
    (GatedDeltaNet, dict(conv_size=1)),
]


PIECES = [[prompt] * (prompt > 0) + [1] * min(70 - prompt, 9) for prompt in (0, 1, 2, 64, 67)]


@pytest.mark.quick
@torch.no_grad()
@pytest.mark.parametrize("pieces", [*PIECES, [2, 40, 1, 3, 24]], ids=str)
@pytest.mark.parametrize("make, options", CACHED)
def test_prompts_and_tokens_on_a_cache_equal_one_forward(make, options, pieces):
    layer, x = build(make, **options), rows(2, sum(pieces))
    cache = layer.new_cache(2)
    close(torch.cat([layer(part, cache=cache) for part in x.split(pieces, 1)], 1), layer(x))


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


@pytest.mark.bits
@pytest.mark.parametrize("hole", (math.nan, math.inf))
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
def test_a_growing_mask_counts_by_its_last_columns(make):
    layer, x = build(make), rows(2, 12)
    mask = torch.ones(2, 12, dtype=torch.int64)
    mask[1, :5] = 0
    with_mask, without = layer.new_cache(2), layer.new_cache(2)
    for cache in (with_mask, without):
        layer(x[:, :10], attention_mask=mask[:, :10], cache=cache)
    for t in (10, 11):
        close(
            layer(x[:, t : t + 1], attention_mask=mask[:, : t + 1], cache=with_mask),
            layer(x[:, t : t + 1], cache=without),
        )


@torch.no_grad()
def test_a_masked_sequence_keeps_its_cache(make):
    layer, x = build(make), rows(2, 10)
    cache = layer.new_cache(2)
    layer(x[:, :9], cache=cache)
    before = [buffer[1].clone() for buffer in cache.buffers()]
    y = layer(x[:, 9:], attention_mask=torch.tensor([[1], [0]]), cache=cache)
    assert y[0].any() and not y[1].any()
    for buffer, kept in zip(cache.buffers(), before):
        assert torch.equal(buffer[1], kept)


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


@pytest.mark.quick
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
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
def test_packed_sequences_carry_their_caches(make):
    layer, longest = build(make, num_v_heads=4), 80
    x, packed, dense = rows(8, 2 * longest), layer.new_cache(8), layer.new_cache(1)
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0)
    for start in (0, longest):
        y = layer(
            torch.cat([x[n, start : start + m] for n, m in enumerate(LENGTHS)])[None],
            cache=packed,
            cu_seqlens=offsets,
        )
    for n, m in enumerate(LENGTHS):
        dense.reset()
        alone = [layer(x[n : n + 1, start : start + m], cache=dense) for start in (0, longest)]
        close(y[:, offsets[n] : offsets[n + 1]], alone[1])
        for ours, theirs in zip(packed.buffers(), dense.buffers()):
            close(ours[n], theirs[0])


@pytest.mark.bits
@torch.no_grad()
def test_a_cache_travels_by_state_dict():
    layer, x = build(GatedDeltaNet), rows(2, 6)
    cache, copy = layer.new_cache(2), layer.new_cache(2)
    layer(x[:, :5], cache=cache)
    copy.load_state_dict(cache.state_dict())
    assert torch.equal(layer(x[:, 5:], cache=cache), layer(x[:, 5:], cache=copy))


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cache_keeps_its_state_in_float32_as_v_by_k(make, dtype):
    cache = make(
        hidden_size=HIDDEN, head_dim=8, num_heads=2, num_v_heads=4, expand_v=2, dtype=dtype
    ).new_cache(3)
    assert cache.state.shape == (3, 4, 16, 8) and cache.state.dtype is torch.float32
    assert cache.v_conv.shape == (3, 3, 64) and cache.v_conv.dtype is dtype


def test_an_input_without_tokens_may_have_a_longer_mask():
    assert build(GatedDeltaNet)(rows(2, 5)[:, :0], attention_mask=torch.ones(2, 3)).shape == (
        2,
        0,
        HIDDEN,
    )
