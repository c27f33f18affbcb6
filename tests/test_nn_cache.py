"""Caches of layers: sequences that move."""

import copy

import pytest
import torch
import torch._dynamo.testing

from kda_ops.nn import Cache, GatedDeltaNet, KimiDeltaAttention
from tests.support.layers import LAYERS, build, close, rows, variants

CACHED = [
    (KimiDeltaAttention, dict(num_v_heads=4)),
    (GatedDeltaNet, dict(conv_bias=True)),
    (GatedDeltaNet, dict(use_short_conv=False)),
]
MOVES = {
    "reorder": (lambda c: c.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0]),
    "reorder int32": (lambda c: c.reorder_cache(torch.tensor([1, 2, 0]).int()), [1, 2, 0]),
    "select": (lambda c: c.batch_select_indices(torch.tensor([2, 1])), [2, 1]),
    "select a list": (lambda c: c.batch_select_indices([0, 0, 2, -1]), [0, 0, 2, 2]),
    "select by mask": (lambda c: c.batch_select_indices(torch.tensor([True, False, True])), [0, 2]),
    "select a slice": (lambda c: c.batch_select_indices(slice(1, None)), [1, 2]),
    "select none": (lambda c: c.batch_select_indices([]), []),
    "repeat": (lambda c: c.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
    "crop nothing": (lambda c: c.crop(0), [0, 1, 2]),
}


@torch.no_grad()
@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("make, options", CACHED)
def test_sequences_go_on_where_they_are_moved_to(make, options, move):
    layer, x = build(make, **options), rows(3, 9)
    cache, (act, order) = layer.new_cache(3), MOVES[move]
    layer(x[:, :6], cache=cache)
    addresses = [b.data_ptr() for b in cache.buffers()]
    act(cache)
    assert cache.batch_size == len(order)
    x = torch.cat([x[order, :6], rows(len(order), 3)], 1)  # each goes on in its own way
    parts = [layer(x[:, 6:7], cache=cache), layer(x[:, 7:], cache=cache)]
    close(torch.cat(parts, 1), layer(x)[:, 6:])
    if move.startswith("reorder"):
        assert addresses == [b.data_ptr() for b in cache.buffers()]


@torch.no_grad()
@variants
def test_a_compiled_step_goes_on_with_a_reordered_cache(make):
    torch._dynamo.reset()
    layer, x = build(make), rows(3, 9)
    frames = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled, cache = torch.compile(layer, fullgraph=True, backend=frames), layer.new_cache(3)
    compiled(x[:, :1], cache=cache)
    cache.reorder_cache(torch.tensor([1, 1, 0]))
    close(
        compiled(x[:, 1:2], cache=cache), layer(torch.cat([x[[1, 1, 0], :1], x[:, 1:2]], 1))[:, 1:]
    )
    assert frames.frame_count == 1


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@variants
def test_a_copied_cache_goes_its_own_way(make, mode):
    with mode():
        layer, x = build(make), rows(2, 9)
        cache = layer.new_cache(2)
        layer(x[:, :5], cache=cache)
        fork = copy.deepcopy(cache)
        close(layer(x[:, 5:], cache=cache), layer(x)[:, 5:])
        other = torch.cat([x[:, :5], x[:, :4]], 1)
        close(layer(other[:, 5:], cache=fork), layer(other)[:, 5:])


REFUSED = [
    (
        lambda c: c.reorder_cache(torch.tensor([0, 1])),
        ValueError,
        "beam_idx must have shape [N] = [3]",
    ),
    (
        lambda c: c.reorder_cache(torch.tensor([0, 1, 3])),
        IndexError,
        "beam_idx must name some of the N",
    ),
    (
        lambda c: c.reorder_cache(torch.tensor([0.0, 1.0, 2.0])),
        ValueError,
        "beam_idx must be integers",
    ),
    (
        lambda c: c.batch_select_indices(torch.zeros(2, 2).long()),
        ValueError,
        "indices must be integers",
    ),
    (
        lambda c: c.batch_select_indices(2),
        ValueError,
        "indices must be integers or bools along one",
    ),
    (lambda c: c.batch_select_indices([-4]), IndexError, "indices must name some of the N = 3"),
    (lambda c: c.batch_select_indices([True]), IndexError, "indices must name some of the N = 3"),
    (lambda c: c.batch_repeat_interleave(0), ValueError, "repeats must be at least 1, got 0"),
    (lambda c: c.crop(-1), NotImplementedError, "crop cannot take tokens out of a recurrent state"),
    (lambda c: c.crop(1), NotImplementedError, "copy.deepcopy the cache before those tokens"),
]


@pytest.mark.parametrize("call, error, words", REFUSED, ids=[words[:40] for *_, words in REFUSED])
def test_a_wrong_move_is_refused_and_changes_nothing(call, error, words):
    layer = build(KimiDeltaAttention)
    with torch.no_grad():
        cache = layer.new_cache(3)
        layer(rows(3, 5), cache=cache)
    before = [b.clone() for b in cache.buffers()]
    with pytest.raises(error) as raised:
        call(cache)
    assert words in str(raised.value)
    assert all(torch.equal(a, b) for a, b in zip(cache.buffers(), before, strict=True))


def test_a_cache_has_what_the_caches_of_transformers_have():
    transformers = pytest.importorskip("transformers")
    for name in (
        "reorder_cache",
        "batch_select_indices",
        "batch_repeat_interleave",
        "crop",
        "reset",
    ):
        assert callable(getattr(Cache, name)) and callable(getattr(transformers.Cache, name))
    cache = build(LAYERS[0]).new_cache(2)
    assert not cache.is_croppable and cache.batch_size == 2
