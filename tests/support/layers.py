"""Build small layers of `kda_ops.nn` and inputs, and compute their outputs token by token."""

import pytest
import torch
import torch.nn.functional as F

from kda_ops.nn import GatedDeltaNet, KimiDeltaAttention

LAYERS = [KimiDeltaAttention, GatedDeltaNet]
HIDDEN = 32
LENGTHS = [0, 1, 63, 64, 0, 65, 2, 7]  # of packed sequences
variants = pytest.mark.parametrize("make", LAYERS)


def build(make, **kwargs):
    """Build a small layer in float64, in which exact laws hold to 1e-9."""
    torch.manual_seed(0)
    layer = make(
        **(dict(hidden_size=HIDDEN, head_dim=8, num_heads=2, expand_v=1.5) | kwargs)
    ).double()
    with torch.no_grad():
        for name, p in layer.named_parameters():
            if name.endswith("bias") or "norm" in name:
                p.add_(torch.rand_like(p))
    return layer


def rows(B, T):
    """Return inputs [B, T, HIDDEN], the same for the same B and T."""
    return torch.randn(
        B, T, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(B * 1000 + T)
    )


def close(a, b, atol=1e-9):
    """Return whether a and b are equal up to float64 rounding."""
    torch.testing.assert_close(a, b, rtol=0, atol=atol)


def gradients(layer, y, x):
    """Return the gradients of a weighted sum of y with respect to x and every parameter."""
    weight = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
    return torch.autograd.grad((y * weight).sum(), [x, *layer.parameters()])


def by_definition(layer, x):
    """Compute the layer's output for one row x [T, hidden], token by token."""

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
        o = o * (
            F.silu(gate) if layer.o_norm.activation in ("swish", "silu") else torch.sigmoid(gate)
        )
    return layer.o_proj(o.flatten(-2))
