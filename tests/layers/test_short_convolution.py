"""The layer of the short convolution; tests/operators/test_layer_operators.py has its operator."""

import pytest
import torch
import torch.nn.functional as F

from kda_ops.nn import ShortConvolution


@pytest.mark.quick
def test_the_convolution_matches_torch():
    conv = ShortConvolution(6, 4, bias=True).double()
    other = torch.nn.Conv1d(6, 6, 4, groups=6, padding=3).double()
    other.load_state_dict(conv.state_dict())
    x = torch.randn(2, 9, 6, dtype=torch.float64)
    torch.testing.assert_close(conv(x), F.silu(other(x.mT)[..., :9]).mT, rtol=0, atol=1e-9)


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
    (want,) = torch.autograd.grad(F.silu(wide), wide, torch.ones(1, 200, 64))
    assert torch.equal(got, want.bfloat16())


def test_reset_parameters_draws_the_bias():
    conv = ShortConvolution(512, 4, bias=True)
    with torch.no_grad():
        conv.bias.fill_(float("nan"))
    conv.reset_parameters()
    assert 0.4 < conv.bias.abs().max() <= 0.5
