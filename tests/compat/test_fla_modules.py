"""The functions of fla.modules take FLA's arguments and give its results."""

import pytest
import torch
import torch.nn.functional as F

from kda_ops.compat.fla_modules import causal_conv1d, causal_conv1d_update, rms_norm_gated


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def reference(x, weight, bias, state):
    """Return FLA's output and final state of one sequence x [T, D] after a state [D, W]."""
    W = weight.shape[1]
    every = torch.cat([state, x.mT], 1)
    padded = every[:, 1 : W + len(x)][None]
    y = F.silu(F.conv1d(padded, weight[:, None], bias, groups=len(weight)))[0].mT
    return y, every[:, -W:]


@pytest.mark.quick
@pytest.mark.parametrize("packed", (False, True))
@pytest.mark.parametrize("start", (False, True))
def test_the_convolution_and_its_state_are_those_of_fla(packed, start):
    lengths, weight, bias = (2, 7, 5), draw(6, 4, seed=1), draw(6, seed=2)
    x = draw(1, 14, 6) if packed else draw(3, 9, 6)
    parts = x[0].split(lengths) if packed else x.unbind(0)
    states = draw(3, 6, 4, seed=3) if start else torch.zeros(3, 6, 4)
    offsets = torch.tensor([0, 2, 9, 14]) if packed else None
    words = dict(initial_state=states if start else None, activation="silu", cu_seqlens=offsets)
    y, final = causal_conv1d(x, weight, bias, output_final_state=True, **words)
    want = [reference(part, weight, bias, state) for part, state in zip(parts, states)]
    torch.testing.assert_close(y.flatten(0, 1), torch.cat([w for w, _ in want]))
    assert torch.equal(final, torch.stack([state for _, state in want]))
    alone, none = causal_conv1d(x, weight, bias, residual=x, **words)
    torch.testing.assert_close(alone, y + x)
    assert none is None


@pytest.mark.quick
@pytest.mark.parametrize("shape", ((3, 6), (1, 3, 6), (3, 1, 6)))
def test_decode_continues_a_convolution_on_its_state(shape):
    x, weight = draw(3, 9, 6), draw(6, 4, seed=1)
    want, last = causal_conv1d(x, weight, activation="silu", output_final_state=True)
    _, cache = causal_conv1d(x[:, :5], weight, activation="silu", output_final_state=True)
    for t in range(5, 9):
        token = x[:, t].reshape(shape)
        y, same = causal_conv1d_update(token, cache, token, weight, activation="silu")
        assert same is cache and y.shape == torch.Size(shape)
        torch.testing.assert_close(y.reshape(3, 6), want[:, t] + x[:, t])
    assert torch.equal(cache, last)


@pytest.mark.bits
def test_the_channels_may_be_spread_over_the_last_axes():
    weight = draw(12, 4, seed=1)
    for x in (draw(2, 5, 3, 4), draw(2, 5, 1, 12)):
        y, _ = causal_conv1d(x, weight)
        assert y.shape == x.shape
        assert torch.equal(y.flatten(2), causal_conv1d(x.flatten(2), weight)[0])


@pytest.mark.quick
@pytest.mark.parametrize("activation", ("swish", "sigmoid"))
def test_the_norm_is_that_of_fla(activation):
    x, g, weight = draw(2, 5, 4, 8), draw(2, 5, 4, 8, seed=1), draw(8, seed=2)
    gate = F.silu(g) if activation == "swish" else g.sigmoid()
    want = F.rms_norm(x, (8,), weight, 1e-6) * gate
    torch.testing.assert_close(rms_norm_gated(x, g, weight, None, activation), want)
    torch.testing.assert_close(
        rms_norm_gated(x, g, None, None, activation, eps=1e-3),
        F.rms_norm(x, (8,), None, 1e-3) * gate,
    )


WRONG = (
    (lambda x, w: causal_conv1d(x), TypeError, "^weight must be a tensor"),
    (lambda x, w: causal_conv1d(None, w), TypeError, "^x must be a tensor, got None"),
    (lambda x, w: causal_conv1d(x, w[None]), ValueError, r"^weight must have shape .* \[1, 6, 4\]"),
    (lambda x, w: causal_conv1d(x, w, cp_context=1), ValueError, "^cp_context must be None"),
    (lambda x, w: causal_conv1d(x, w, head_first=True), TypeError, "^causal_conv1d takes no head"),
    (lambda x, w: rms_norm_gated(None, x, None, None), TypeError, "^x must be a tensor, got None"),
    (lambda x, w: rms_norm_gated(x, x, None, x), ValueError, "^bias must be None"),
    (lambda x, w: rms_norm_gated(x, x, None, None, residual=x), ValueError, "^residual must be"),
    (lambda x, w: rms_norm_gated(x, x, None, None, prenorm=True), ValueError, "^prenorm must be"),
)


@pytest.mark.parametrize("call, error, words", WRONG)
def test_what_is_not_supported_is_refused_in_words(call, error, words):
    with pytest.raises(error, match=words):
        call(draw(2, 5, 6), draw(6, 4))


@pytest.mark.bits
@pytest.mark.quick
@pytest.mark.parametrize("packed", (False, True))
@pytest.mark.parametrize("W", (1, 4))
def test_the_first_column_of_a_state_is_never_read(packed, W):
    x, weight, state = draw(1 if packed else 3, 5, 6), draw(6, W, seed=1), draw(3, 6, W, seed=3)
    offsets = torch.tensor([0, 0, 1, 5]) if packed else None
    words = dict(cu_seqlens=offsets, output_final_state=True)
    want, last = causal_conv1d(x, weight, initial_state=state, **words)
    other = state.clone()
    other[..., 0] = torch.nan
    y, final = causal_conv1d(x, weight, initial_state=other, **words)
    assert torch.equal(y, want)
    kept = ~final.isnan()
    assert torch.equal(final[kept], last[kept]) and kept.all((1, 2)).tolist() == [not packed, 1, 1]
    tokens = draw(3, 1, 6, seed=4)
    want, _ = causal_conv1d_update(tokens, state, weight=weight)
    y, _ = causal_conv1d_update(tokens, other, weight=weight)
    assert torch.equal(y, want) and torch.equal(other, state)


def test_no_tokens_pass_a_state_through():
    weight, state = draw(6, 4), draw(3, 6, 4, seed=3)
    for x, offsets in ((draw(3, 0, 6), None), (draw(1, 0, 6), torch.zeros(4, dtype=torch.int32))):
        words = dict(cu_seqlens=offsets, output_final_state=True)
        assert torch.equal(causal_conv1d(x, weight, initial_state=state, **words)[1], state)
        assert not causal_conv1d(x, weight, **words)[1].any()


def test_the_state_has_a_gradient():
    drawn = draw(1, 7, 2), draw(2, 3), draw(2, 2, 3)
    x, weight, state = (t.double().requires_grad_() for t in drawn)
    offsets = torch.tensor([0, 2, 7])

    def call(x, weight, state):
        y, final = causal_conv1d(
            x, weight, initial_state=state, cu_seqlens=offsets, output_final_state=True
        )
        return y, final

    assert torch.autograd.gradcheck(call, (x, weight, state))


@pytest.mark.parametrize("packed", (False, True))
def test_the_functions_of_fla_compile(packed):
    x, weight, state = draw(1 if packed else 3, 9, 6), draw(6, 4, seed=1), draw(3, 6, 4, seed=3)
    offsets = torch.tensor([0, 2, 2, 9]) if packed else None

    def call(x, state):
        y, final = causal_conv1d(
            x, weight, initial_state=state, cu_seqlens=offsets, output_final_state=True
        )
        token, _ = causal_conv1d_update(final[..., -1], final, weight=weight)
        return y, final, token

    graph = torch.compile(call, fullgraph=True, backend="aot_eager")
    for got, want in zip(graph(x, state), call(x, state)):
        torch.testing.assert_close(got, want)


STATE = r"must have shape \[N, D, W\] = \[2, 6, 4\], got"


@pytest.mark.parametrize("shape", ((2, 6, 3), (2, 4, 6), (3, 6, 4), (2, 6)))
def test_a_state_of_another_shape_is_refused_in_the_words_of_fla(shape):
    x, weight, state = draw(2, 5, 6), draw(6, 4), torch.ones(shape)
    for final in (False, True):
        with pytest.raises(ValueError, match=f"^initial_state {STATE}"):
            causal_conv1d(x, weight, initial_state=state, output_final_state=final)
    other = r"x must hold one token of each sequence, .* N = 3 \(cache\)"
    with pytest.raises(ValueError, match="^" + (other if shape[0] == 3 else f"cache {STATE}")):
        causal_conv1d_update(x[:, :1], state, weight=weight)
    assert (state == 1).all()


def test_an_update_is_refused_in_the_words_of_fla():
    x, weight, cache = draw(2, 5, 6), draw(6, 4), torch.ones(2, 6, 4)
    for call, error, words in (
        ((x, cache, None, weight), ValueError, "^x must hold one token of each sequence"),
        ((x[:, :1, :5], cache, None, weight), ValueError, "^x must hold one token of each seq"),
        ((x[:, :1], None, None, weight), TypeError, "^cache must be a tensor, got None"),
        ((None, cache, None, weight), TypeError, "^x must be a tensor, got None"),
        ((x[:, :1], cache, x, weight), ValueError, "^residual must have the shape of x"),
        ((x[:, :1], cache, x[:, :1].to("meta"), weight), TypeError, "^residual must be on cpu"),
        (
            (x[:, :1], torch.ones(100).as_strided((2, 6, 4), (20, 3, 1)), None, weight),
            ValueError,
            "^cache must not overlap itself",
        ),
        ((x[:, :1], cache, None, weight, None, "gelu"), ValueError, "^activation must be one of"),
        ((x[:, :1], cache.long(), None, weight), TypeError, "^cache must be float16"),
    ):
        with pytest.raises(error, match=words):
            causal_conv1d_update(*call)
    assert (cache == 1).all()
    with pytest.raises(ValueError, match="^residual must have the shape of x"):
        causal_conv1d(x, weight, residual=x[:, :1])
