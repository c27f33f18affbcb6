"""Compare the short convolution and its gradients with torch, for packed sequences too."""

import functools

import pytest
import torch
import torch.nn.functional as F

from kda_ops.nn import ShortConvolution

close = functools.partial(torch.testing.assert_close, rtol=0, atol=1e-9)  # in float64


@pytest.mark.quick
def test_the_convolution_matches_torch():
    conv = ShortConvolution(6, 4, bias=True).double()
    other = torch.nn.Conv1d(6, 6, 4, groups=6, padding=3).double()
    other.load_state_dict(conv.state_dict())
    x = torch.randn(2, 9, 6, dtype=torch.float64)
    close(conv(x), F.silu(other(x.mT)[..., :9]).mT)


@pytest.mark.quick
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("size", [1, 4])
def test_the_gradients_of_the_convolution_match_torch(size, packed):
    conv = ShortConvolution(3, size, bias=True).double()
    x = torch.randn(1 if packed else 2, 9, 3, dtype=torch.float64, requires_grad=True)
    offsets = torch.tensor([0, 2, 2, 7, 9]) if packed else None

    def theirs(x):
        return F.silu(F.conv1d(F.pad(x.mT, (size - 1, 0)), conv.weight, conv.bias, groups=3)).mT

    inputs, dy = (x, *conv.parameters()), torch.randn_like(x)
    want = (
        torch.cat([theirs(part) for part in (x[:, :2], x[:, 2:7], x[:, 7:])], 1)
        if packed
        else theirs(x)
    )
    close(conv(x, cu_seqlens=offsets), want)
    for wanted, mine in zip(
        torch.autograd.grad(want, inputs, dy),
        torch.autograd.grad(conv(x, cu_seqlens=offsets), inputs, dy),
    ):
        close(mine, wanted)
    # a compiler that loses them raises nothing
    compiled = torch.compile(conv, fullgraph=True, backend="aot_eager")
    for wanted, mine in zip(
        torch.autograd.grad(theirs(x), inputs, dy), torch.autograd.grad(compiled(x), inputs, dy)
    ):
        close(mine, wanted)
    with torch.no_grad():
        close(conv(x, cu_seqlens=offsets), want)


@pytest.mark.parametrize("packed", [False, True])
def test_compiled_training_saves_one_copy_of_the_convolution_s_input(packed):
    torch._dynamo.reset()
    conv, kept = ShortConvolution(8, 4), []
    offsets = torch.tensor([0, 9, 30]) if packed else None
    x = torch.randn(1, 30, 8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = torch.compile(
            lambda x: conv(x * 2, cu_seqlens=offsets),
            fullgraph=True,
            backend="aot_eager_decomp_partition",
        )(x)
    assert (
        sum(t.numel() >= x.numel() for t in kept) == 1
        and sum(t.numel() for t in kept) < 2 * x.numel()
    ), [t.shape for t in kept]
    y.square().sum().backward()
    expected = x.detach().clone().requires_grad_()
    conv(expected * 2, cu_seqlens=offsets).square().sum().backward()
    torch.testing.assert_close(x.grad, expected.grad)


def test_the_convolution_supports_vmap():
    conv = ShortConvolution(3, 4, bias=True).double()
    x = torch.randn(5, 2, 9, 3, dtype=torch.float64, requires_grad=True)
    words = {n: p.detach() for n, p in conv.named_parameters()}

    def loss(words, x):
        return torch.func.functional_call(conv, words, (x,)).square().sum()

    each = torch.vmap(torch.func.grad(loss), (None, 0))(words, x)
    for part, mine in zip(x.detach(), zip(*each.values())):
        for wanted, found in zip(
            torch.autograd.grad(conv(part).square().sum(), list(conv.parameters())), mine
        ):
            close(found, wanted)


@pytest.mark.parametrize("grad", (True, False))
def test_a_convolution_keeps_the_dtype_of_its_input(grad):
    with torch.set_grad_enabled(grad):
        # as autocast leaves them
        assert ShortConvolution(8, 4)(torch.randn(1, 9, 8).bfloat16()).dtype is torch.bfloat16


@pytest.mark.bits
def test_the_gradient_of_silu_is_computed_in_float32():
    conv = ShortConvolution(64, 1).bfloat16()
    with torch.no_grad():
        conv.weight.fill_(1.0)  # y is x: nothing else is rounded
    x = (
        torch.randn(1, 200, 64, generator=torch.Generator().manual_seed(0))
        .bfloat16()
        .requires_grad_()
    )
    (got,) = torch.autograd.grad(conv(x), x, torch.ones(1, 200, 64).bfloat16())
    wide = x.detach().float().requires_grad_()
    (want,) = torch.autograd.grad(torch.nn.functional.silu(wide), wide, torch.ones(1, 200, 64))
    assert torch.equal(got, want.bfloat16())


def test_reset_parameters_draws_the_bias():
    conv = ShortConvolution(512, 4, bias=True)
    with torch.no_grad():
        conv.bias.fill_(float("nan"))
    conv.reset_parameters()
    assert 0.4 < conv.bias.abs().max() <= 0.5
