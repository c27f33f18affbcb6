"""Check caches: shapes from the configuration for any kind of weights, and moved sequences."""

import copy

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch import nn

from kda_ops.nn import Cache, GatedDeltaNet, KimiDeltaAttention
from tests.support.layers import HIDDEN, LAYERS, build, close, rows, variants

SIZES = dict(head_dim=8, num_heads=2, num_v_heads=4, expand_v=1.5)
NAMES = ("q_conv", "k_conv", "v_conv")
PROJECTIONS = ("q_proj", "k_proj", "v_proj")


class Wrapped(nn.Module):
    """A linear layer that is no nn.Linear: other names, another storage."""

    def __init__(self, linear, store):
        super().__init__()
        self.store, self.shape, self.dtype = store, linear.weight.shape, linear.weight.dtype
        weight = linear.weight.detach()
        if store == "lora":
            self.base_layer = linear
            self.A, self.B = nn.Linear(HIDDEN, 2, bias=False), nn.Linear(2, len(weight), bias=False)
            nn.init.zeros_(self.B.weight)
            self.to(self.dtype)
        elif store == "fp8":
            self.weight = nn.Parameter(weight.to(torch.float8_e4m3fn), requires_grad=False)
        else:  # as 4-bit storage is: one axis of bytes
            flat = weight.contiguous().view(torch.uint8).flatten()
            self.weight = nn.Parameter(flat, requires_grad=False)

    def forward(self, x):
        if self.store == "lora":
            return self.base_layer(x) + self.B(self.A(x))
        if self.store == "fp8":
            return F.linear(x, self.weight.to(x.dtype))
        return F.linear(x, self.weight.data.view(self.dtype).view(self.shape))


def assert_fits(layer, cache, x):
    """Check that decoding with the cache gives what one forward gives."""
    want = layer(x)
    parts = [layer(x[:, :5], cache=cache), *(layer(x[:, t : t + 1], cache=cache) for t in (5, 6))]
    close(torch.cat(parts, 1), want, 1e-9 if x.dtype is torch.float64 else 1e-5)


@torch.no_grad()
@variants
@pytest.mark.parametrize("store", ["lora", "fp8", "flat"])
def test_a_cache_fits_a_layer_whose_projections_are_stored_otherwise(make, store):
    layer, x = build(make, num_v_heads=4), rows(2, 7)
    for name in PROJECTIONS:
        setattr(layer, name, Wrapped(getattr(layer, name), store))
    cache = layer.new_cache(2)
    assert {b.dtype for b in cache.buffers()} == {torch.float64}
    assert_fits(layer, cache, x)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:torch.:DeprecationWarning", "ignore:torch.:UserWarning")
@variants
def test_a_cache_fits_a_layer_that_quantize_dynamic_has_converted(make):
    layer, x = make(HIDDEN, **SIZES), rows(2, 7).float()
    layer = torch.ao.quantization.quantize_dynamic(layer, {nn.Linear}, dtype=torch.qint8)
    assert not isinstance(layer.q_proj, nn.Linear)
    cache = layer.new_cache(2)
    assert cache.q_conv.dtype is torch.float32 and cache.v_conv.shape == (2, 3, 48)
    # Scales are drawn per call from all of x, so that one forward is no oracle.
    x = x[:, :1].expand(2, 7, HIDDEN)
    y = torch.cat([layer(x[:, t : t + 1], cache=cache) for t in range(7)], 1)
    close(y, layer(x), 2e-2)


@torch.no_grad()
@variants
def test_a_cache_can_be_on_another_device_than_meta_weights(make):
    with torch.device("meta"):
        layer = make(HIDDEN, **SIZES, dtype=torch.bfloat16)
    assert layer.new_cache(3).state.is_meta
    cache, want = layer.new_cache(3, device="cpu"), make(HIDDEN, **SIZES).bfloat16().new_cache(3)
    for ours, theirs in zip(cache.buffers(), want.buffers(), strict=True):
        assert (
            ours.device.type == "cpu" and torch.equal(ours, theirs) and ours.dtype is theirs.dtype
        )


@variants
def test_dtype_and_device_of_a_cache_are_arguments(make):
    layer = make(HIDDEN, **SIZES, dtype=torch.bfloat16)
    for dtype, state in (
        (None, torch.float32),
        (torch.float16, torch.float32),
        (torch.float64, torch.float64),
    ):
        cache = layer.new_cache(2, dtype=dtype, device="meta")
        assert cache.state.is_meta and cache.state.dtype is state
        assert cache.k_conv.is_meta and cache.k_conv.dtype is (dtype or torch.bfloat16)


@torch.no_grad()
@variants
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.uint8])
def test_tails_of_8_bits_are_refused(make, dtype):
    layer, x = build(make), rows(1, 5)
    with pytest.raises(TypeError, match="^dtype must be float16, .* got torch.*: pass the one in"):
        layer.new_cache(1, dtype=dtype)
    if dtype.is_floating_point:
        layer.o_norm.weight = nn.Parameter(layer.o_norm.weight.to(dtype))
        with pytest.raises(TypeError, match="^dtype must be float16, .* got torch.float8_e4m3fn"):
            layer.new_cache(1)
    layer, cache = build(make), build(make).new_cache(1)
    cache.v_conv = cache.v_conv.to(dtype)
    with pytest.raises(
        TypeError, match="^cache must hold convolution tails of .*: make it with new"
    ):
        layer(x, cache=cache)
    with pytest.raises(TypeError, match="^tail must be float16, bfloat16, float32 or float64, got"):
        layer.v_conv1d(torch.zeros(1, 5, 24, dtype=x.dtype), cache.v_conv)
    assert not any(b.float().any() for b in cache.buffers())


@torch.no_grad()
@pytest.mark.parametrize("name, width", [("k_proj", 8), ("v_proj", 12)])
def test_projections_of_other_widths_than_the_configuration_are_named(name, width):
    layer = build(GatedDeltaNet)
    cache = layer.new_cache(1)
    setattr(layer, name, nn.Linear(HIDDEN, width, bias=False).double())  # one head of two
    with pytest.raises(ValueError, match="the projections have other widths .* HeadParallel"):
        layer(rows(1, 5), cache=cache)
    assert not any(b.any() for b in cache.buffers())


@torch.no_grad()
@variants
def test_a_cache_made_under_inference_mode_is_refused_outside_before_it_is_written(make):
    layer, x = build(make), rows(2, 7)
    with torch.inference_mode():
        cache = layer.new_cache(2)
        layer(x[:, :5], cache=cache)
    for part in (x[:, 5:6], x[:, 5:]):
        with pytest.raises(RuntimeError, match=r"^cache was made under torch.inference_mode\(\)"):
            layer(part, cache=cache)
    for act in (lambda c: c.reset(), lambda c: c.reorder_cache(torch.tensor([1, 0]))):
        with pytest.raises(RuntimeError, match=r"^cache was made under torch.inference_mode\(\)"):
            act(cache)
    with pytest.raises(RuntimeError, match=r"^tail was made under torch.inference_mode\(\)"):
        layer.q_conv1d(torch.zeros_like(cache.q_conv)[:, :1], cache.q_conv)
    with torch.inference_mode():
        close(layer(x[:, 5:], cache=cache), layer(x)[:, 5:])


BUFFERS = ("state", "q_conv", "k_conv", "v_conv")
USES = {
    "decode": lambda layer, cache: layer(rows(2, 1), cache=cache),
    "prefill": lambda layer, cache: layer(rows(2, 5), cache=cache),
    "reset": lambda layer, cache: cache.reset(),
    "reorder": lambda layer, cache: cache.reorder_cache(torch.tensor([1, 1])),
}


@torch.no_grad()
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("name", BUFFERS)
def test_a_buffer_that_cannot_be_written_is_refused_before_another_one_is(name, use):
    layer = build(KimiDeltaAttention)
    cache = layer.new_cache(2)
    layer(rows(2, 5), cache=cache)
    own = getattr(cache, name)
    before = {n: b.clone() for n, b in cache.named_buffers() if n != name}
    for x, error, words in (
        (own[:1].expand_as(own), ValueError, "must not overlap itself, because it is written"),
        (own.to_sparse(), TypeError, "must be a dense tensor, got a tensor of layout"),
        (torch.complex(own, own).conj().imag, ValueError, "must be memory that can be written"),
    ):
        setattr(cache, name, x)
        with pytest.raises(error, match=f"^cache {words}"):
            USES[use](layer, cache)
        assert all(torch.equal(getattr(cache, n), b) for n, b in before.items())


@pytest.mark.parametrize("name", BUFFERS)
def test_a_buffer_that_requires_a_gradient_is_refused_before_another_one_is_written(name):
    layer = build(KimiDeltaAttention).requires_grad_(False)
    cache = layer.new_cache(2)
    getattr(cache, name).requires_grad_()
    with pytest.raises(RuntimeError, match="^cache is written in place and has no gradient"):
        layer(rows(2, 1), cache=cache)
    assert not any(b.any() for b in cache.buffers())
    cache.reset()


# --- sequences that move --------------------------------------------------------------------------


CACHED = [
    (KimiDeltaAttention, dict(num_v_heads=4)),
    (GatedDeltaNet, dict(conv_bias=True)),
    (GatedDeltaNet, dict(use_short_conv=False)),
]


def index(values, **options):
    """Return an index on the CPU, whatever the default device is."""
    return torch.tensor(values, device="cpu", **options)


MOVES = {
    "reorder": (lambda c: c.reorder_cache(index([2, 0, 0])), [2, 0, 0]),
    "reorder int32": (lambda c: c.reorder_cache(index([1, 2, 0]).int()), [1, 2, 0]),
    "reorder uint8": (lambda c: c.reorder_cache(index([1, 1, 1]).byte()), [1, 1, 1]),
    "reorder int8": (lambda c: c.reorder_cache(index([1, 2, 0], dtype=torch.int8)), [1, 2, 0]),
    "select": (lambda c: c.batch_select_indices(index([2, 1])), [2, 1]),
    "select a list": (lambda c: c.batch_select_indices([0, 0, 2, -1]), [0, 0, 2, 2]),
    "select by mask": (lambda c: c.batch_select_indices(index([True, False, True])), [0, 2]),
    "select a slice": (lambda c: c.batch_select_indices(slice(1, None)), [1, 2]),
    "select backwards": (lambda c: c.batch_select_indices(slice(None, None, -1)), [2, 1, 0]),
    "select none": (lambda c: c.batch_select_indices([]), []),
    "repeat": (lambda c: c.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
    "crop nothing": (lambda c: c.crop(0), [0, 1, 2]),
}


@torch.no_grad()
@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("make, options", CACHED)
def test_moved_sequences_continue_from_their_own_past(make, options, move):
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
def test_a_copied_cache_is_independent(make, mode):
    with mode():
        layer, x = build(make), rows(2, 9)
        cache = layer.new_cache(2)
        layer(x[:, :5], cache=cache)
        fork = copy.deepcopy(cache)
        close(layer(x[:, 5:], cache=cache), layer(x)[:, 5:])
        other = torch.cat([x[:, :5], x[:, :4]], 1)
        close(layer(other[:, 5:], cache=fork), layer(other)[:, 5:])


@torch.no_grad()
@pytest.mark.parametrize("move", [m for m in MOVES if m != "crop nothing"])
def test_moves_do_not_depend_on_the_default_device(move):
    layer, x = build(KimiDeltaAttention), rows(3, 6)
    cache, (act, order) = layer.new_cache(3), MOVES[move]
    layer(x, cache=cache)
    before = [b.clone() for b in cache.buffers()]
    torch.set_default_device("meta")
    try:
        act(cache)
    finally:
        torch.set_default_device(None)
    assert cache.batch_size == len(order)
    assert all(torch.equal(a, b[order]) for a, b in zip(cache.buffers(), before, strict=True))


def test_a_buffer_given_twice_is_refused():
    state, tail = torch.zeros(2, 4, 8, 8), torch.zeros(2, 3, 16)
    for second in (tail, tail.view(2, 3, 16), tail[:1]):
        with pytest.raises(ValueError, match="^k_conv must be a buffer of its own, got the memory"):
            Cache(state, tail, second, tail.clone())
    with pytest.raises(ValueError, match="^v_conv must be .* got the memory of q_conv: clone it"):
        Cache(state.to("meta"), tail := tail.to("meta"), tail.clone(), tail)
    parts = torch.zeros(2, 3, 48).split(16, -1)  # neighbours in one allocation share nothing
    assert [name for name, _ in Cache(state, *parts).named_buffers()][1:] == list(NAMES)
    empty = torch.zeros(2, 0, 16)
    Cache(state, empty, empty.clone(), empty.clone())


class Fault(Exception):
    """An error in the middle of a layer."""


@torch.no_grad()
@pytest.mark.parametrize("T", (1, 2))
@pytest.mark.parametrize("part", ("b_proj", "decay", "g_proj"))
@variants
def test_a_call_that_fails_in_a_projection_can_be_repeated(make, part, T):
    layer, x = build(make), rows(2, 9)
    name = {"decay": "f_proj" if make is KimiDeltaAttention else "a_proj"}.get(part, part)
    cache = layer.new_cache(2)
    layer(x[:, :5], cache=cache)
    before = [b.clone() for b in cache.buffers()]

    def fail(*_):
        raise Fault

    hook = getattr(layer, name).register_forward_hook(fail)
    with pytest.raises(Fault):
        layer(x[:, 5 : 5 + T], cache=cache)
    hook.remove()
    assert all(torch.equal(a, b) for a, b in zip(cache.buffers(), before, strict=True))
    parts = [layer(x[:, 5 : 5 + T], cache=cache), layer(x[:, 5 + T :], cache=cache)]
    close(torch.cat(parts, 1), layer(x)[:, 5:])


@torch.no_grad()
@pytest.mark.parametrize("part, words", (("b", "beta"), ("decay", "g"), ("g", "gate")))
@variants
def test_a_projection_of_another_width_or_dtype_is_refused_before_the_cache_is_written(
    make, part, words
):
    layer = build(make)
    kda, cache = make is KimiDeltaAttention, layer.new_cache(2)
    name = {"decay": "f_proj" if kda else "a_proj"}.get(part, f"{part}_proj")
    for change, error in (
        (lambda y: torch.cat([y, y], -1), f"^{words} must have shape"),
        (lambda y: y.long(), f"^{words} must be float16"),
    ):
        hook = getattr(layer, name).register_forward_hook(lambda _, x, y, f=change: f(y))
        with pytest.raises((ValueError, TypeError), match=error):
            layer(rows(2, 1), cache=cache)
        hook.remove()
        assert not any(b.any() for b in cache.buffers())


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
    *(
        (lambda c, x=x: c.reset(x), error, f"sequences must {words}")
        for x, error, words in (
            ([0, 3], IndexError, "name some of the N = 3"),
            (3, IndexError, "name some of the N = 3"),
            (torch.tensor([True, False]), IndexError, "name some of the N = 3"),
            (None, TypeError, "be integers or bools along one axis, got None"),
            ("0", TypeError, "be integers or bools along one axis, got '0'"),
            (slice("0"), TypeError, "be integers or bools along one axis"),
            (slice(None, None, 0), TypeError, "be integers or bools along one axis"),
            ([0.5], ValueError, "be integers or bools along one axis"),
            (torch.zeros(3, 1).bool(), ValueError, "be integers or bools along one axis"),
            (True, ValueError, "be integers or bools along one axis"),
        )
    ),
    (lambda c: c.batch_repeat_interleave(True), TypeError, "repeats must be a whole number, got"),
    (lambda c: c.reorder_cache(None), TypeError, "beam_idx must be integers or bools along one"),
    (lambda c: c.batch_repeat_interleave(1.5), TypeError, "repeats must be a whole number, got"),
    (lambda c: c.batch_repeat_interleave(0), ValueError, "repeats must be at least 1, got 0"),
    (lambda c: c.crop(-1), NotImplementedError, "crop cannot remove tokens from a recurrent state"),
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


@pytest.mark.parametrize("default", (None, "meta"))
@pytest.mark.parametrize(
    "sequences, zeroed",
    (
        (slice(None), [0, 1, 2]),
        (slice(2, 0, -1), [1, 2]),
        (-1, [2]),
        ([0, 2], [0, 2]),
        ([], []),
        (torch.tensor([1], dtype=torch.uint8), [1]),
        (torch.tensor([True, False, True]), [0, 2]),
    ),
)
def test_reset_zeroes_the_named_sequences(sequences, zeroed, default):
    with torch.no_grad():
        layer = build(KimiDeltaAttention)
        cache = layer.new_cache(3)
        layer(rows(3, 5), cache=cache)
    addresses = [buffer.data_ptr() for buffer in cache.buffers()]
    torch.set_default_device(default)
    try:
        cache.reset(sequences)
    finally:
        torch.set_default_device(None)
    assert addresses == [buffer.data_ptr() for buffer in cache.buffers()]
    for buffer in cache.buffers():
        assert [n for n in range(3) if not buffer[n].any()] == zeroed


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
