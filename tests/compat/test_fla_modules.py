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


def test_the_channels_may_be_spread_over_the_last_axes():
    x, weight = draw(2, 5, 3, 4), draw(12, 4, seed=1)
    y, _ = causal_conv1d(x, weight)
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
    (lambda x, w: causal_conv1d(x, w, cp_context=1), ValueError, "^cp_context must be None"),
    (lambda x, w: causal_conv1d(x, w, head_first=True), TypeError, "^causal_conv1d takes no head"),
    (lambda x, w: rms_norm_gated(x, x, None, x), ValueError, "^bias must be None"),
    (lambda x, w: rms_norm_gated(x, x, None, None, residual=x), ValueError, "^residual must be"),
    (lambda x, w: rms_norm_gated(x, x, None, None, prenorm=True), ValueError, "^prenorm must be"),
)


@pytest.mark.parametrize("call, error, words", WRONG)
def test_what_is_not_supported_is_refused_in_words(call, error, words):
    with pytest.raises(error, match=words):
        call(draw(2, 5, 6), draw(6, 4))
