"""Write PyTorch code in front of the operators in many spellings, and check that it folds."""

from __future__ import annotations

from collections import Counter

import torch
import torch.nn.functional as F

import kda_ops
from kda_ops.inductor import FoldPreprocessing

B, T, H, HV, K, V = 2, 70, 2, 4, 8, 6
NAMES = ("q", "k", "v", "g", "beta", "A_log", "dt_bias")
RANK = {"kda": 1, "gdn": 0}

# Each function below writes one spelling of its formula.

NORMS = {
    "rsqrt": lambda x: x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6),
    "methods": lambda x: x.mul(x.pow(2).sum(dim=-1, keepdim=True).add(1e-6).rsqrt()),
    "functions": lambda x: torch.mul(
        torch.rsqrt(torch.add(torch.sum(torch.square(x), -1, keepdim=True), 1e-6)), x
    ),
    "operators": lambda x: x / (1e-6 + (x**2).sum(-1, True)) ** 0.5,
    "product": lambda x: x / torch.sqrt((x * x).sum(dim=[-1], keepdim=True) + 1e-6),
    "inverse": lambda x: x * (1.0 / torch.sqrt(torch.pow(x, 2.0).sum(3, keepdim=True) + 1e-6)),
    "power": lambda x: (torch.sum(x * x, dim=-1, keepdim=True) + 1e-6).pow(-0.5) * x,
    "reciprocal": lambda x: x * (x.square().sum(-1, keepdim=True) + 1e-6).sqrt().reciprocal(),
    "root of the reciprocal": lambda x: (
        x * (x.square().sum(-1, keepdim=True) + 1e-6).reciprocal().sqrt()
    ),
    "power of the inverse": lambda x: x * ((x.square().sum(-1, keepdim=True) + 1e-6) ** -1) ** 0.5,
    "unsqueeze": lambda x: x * torch.rsqrt(x.square().sum(-1) + 1e-6).unsqueeze(-1),
    "index": lambda x: x / ((x * x).sum(axis=-1) + 1e-6).sqrt()[..., None],
    "float": lambda x: (
        x.float() * torch.rsqrt(x.float().square().sum(-1, keepdim=True) + 1e-6)
    ).to(x.dtype),
    "cast": lambda x: norm(x.to(torch.float32)).type_as(x),
    "layout": lambda x: norm(x.transpose(1, 2)).transpose(1, 2),
    "rows": lambda x: norm(x.reshape(-1, x.shape[-1])).view(x.shape),
    "contiguous": lambda x: norm(x.contiguous()).contiguous(),
}


def norm(x):
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def column(x, rank):
    return x.unsqueeze(-1) if rank else x


def bias_of(dt_bias, rank):
    return dt_bias.view(-1, K) if rank else dt_bias


GATES = {
    "operators": lambda g, A, dt, rank: -column(A.exp(), rank) * F.softplus(g + bias_of(dt, rank)),
    "float": lambda g, A, dt, rank: (
        -column(A.float().exp(), rank) * F.softplus(g.float() + bias_of(dt, rank))
    ),
    "methods": lambda g, A, dt, rank: F.softplus(g.add(bias_of(dt, rank))).mul(
        column(A.exp(), rank).neg()
    ),
    "functions": lambda g, A, dt, rank: torch.neg(
        torch.mul(
            torch.exp(column(A, rank)), F.softplus(torch.add(g, bias_of(dt, rank)), 1.0, 20.0)
        )
    ),
    "outside": lambda g, A, dt, rank: (
        -(F.softplus(bias_of(dt, rank) + g) * (A[:, None] if rank else A).exp())
    ),
    "minus one": lambda g, A, dt, rank: (
        -1 * A.exp().view((1, 1, -1) + (1,) * rank) * F.softplus(g + bias_of(dt, rank)[None, None])
    ),
    "reshape": lambda g, A, dt, rank: (
        F.softplus(g + dt.reshape((1, 1, -1) + (K,) * rank))
        * -A.reshape((1, 1, -1) + (1,) * rank).float().exp()
    ),
    "flat": lambda g, A, dt, rank: (
        -column(A.exp(), rank) * F.softplus((g.flatten(2) + dt).view(g.shape))
    ),
    "no bias": lambda g, A, dt, rank: -column(A.exp(), rank) * torch.nn.Softplus()(g),
    "operator": lambda g, A, dt, rank: (kda_ops.kda_gate if rank else kda_ops.gdn_gate)(g, A, dt),
}
BOUNDED = {
    "operators": lambda g, A, dt, rank: (
        -5.0 * torch.sigmoid(column(A.exp(), rank) * (g + bias_of(dt, rank)))
    ),
    "methods": lambda g, A, dt, rank: (
        (g.float() + bias_of(dt, rank)).mul(column(A.float().exp(), rank)).sigmoid().mul(-5)
    ),
    "outside": lambda g, A, dt, rank: (
        -(5.0 * ((g + bias_of(dt, rank)) * column(A, rank).exp()).sigmoid())
    ),
    "functions": lambda g, A, dt, rank: (
        torch.special.expit(torch.multiply(column(torch.exp(A), rank), g + bias_of(dt, rank)))
        / -0.2
    ),
    "no A_log": lambda g, A, dt, rank: -5.0 * F.sigmoid(g + bias_of(dt, rank)),
    "operator": lambda g, A, dt, rank: (kda_ops.kda_gate if rank else kda_ops.gdn_gate)(
        g, A, dt, lower_bound=-5.0
    ),
}
SIGMOIDS = {
    "method": lambda b: b.sigmoid(),
    "function": lambda b: torch.sigmoid(b),
    "float": lambda b: b.float().sigmoid(),
    "functional": lambda b: F.sigmoid(b.to(torch.float32)),
    "module": lambda b: torch.nn.Sigmoid()(b).float(),
    "layout": lambda b: b.transpose(1, 2).sigmoid().transpose(1, 2).contiguous(),
}
DOUBLE_SIGMOIDS = {
    "left": lambda b: 2 * b.sigmoid(),
    "right": lambda b: torch.sigmoid(b) * 2.0,
    "method": lambda b: b.float().sigmoid().mul(2),
}


def inputs(variant="kda", dtype=torch.float32, seed=0, grad=True, tokens=T, flat=False, wide=None):
    """Return q, k, v, g, beta, A_log and dt_bias by name."""
    gen, rank = torch.Generator().manual_seed(seed), RANK[variant]
    bias = (HV,) if not rank else (HV * K,) if flat else (HV, K)
    shapes = (
        (B, tokens, H, K),
        (B, tokens, H, K),
        (B, tokens, HV, V),
        (B, tokens, HV, K)[: 3 + rank],
        (B, tokens, HV),
        (HV,),
        bias,
    )
    out = {n: torch.randn(s, generator=gen, dtype=torch.float64) for n, s in zip(NAMES, shapes)}
    # without normalisation longer keys make the recurrence unstable
    out |= {n: 0.4 * out[n] for n in "qk"}
    return {
        n: x.to(wide if wide and n in ("A_log", "dt_bias") else dtype).requires_grad_(grad)
        for n, x in out.items()
    }


class Captured:
    """A backend that folds a graph and its subgraphs, then runs it.

    `calls` are the operator nodes of the last graph.
    """

    def __init__(self):
        self.fold, self.graphs, self.calls = FoldPreprocessing(), 0, []

    def __call__(self, gm, example_inputs):
        self.graphs += 1
        self.calls = []
        for m in gm.modules():
            if isinstance(m, torch.fx.GraphModule):
                self.fold(m.graph)
                m.graph.lint()
                m.recompile()
                self.calls += [
                    n for n in m.graph.nodes if str(n.target).split(".")[0] in ("kda", "gdn")
                ]
        return gm.forward

    def compile(self, f, **options):
        torch._dynamo.reset()
        return torch.compile(f, backend=self, fullgraph=True, **options)


def capture(f, x):
    """Compile f, call it once with the inputs x, and return what was captured."""
    captured = Captured()
    captured.compile(f)(*x.values())
    return captured


def attend(pair=None, norm=None, decay=None, beta=None, op=kda_ops.chunk_kda):
    """Return a call of an operator whose q and k (both by `norm`, or as a pair), decay and beta
    these functions make; without one, q and k are as they are, and decay and beta None.
    """

    def f(q, k, v, g, b, A, dt):
        if norm:
            q, k = norm(q), norm(k)
        if pair:
            q, k = pair(q, k)
        g, b = decay and decay(g, A, dt), beta and beta(b)
        return op(q, k, v.to(q.dtype), g, b)[0]

    return f


def results(f, x, channels=slice(None)):
    """Return the output and the inputs' gradients; `channels` permutes V."""
    o = f(*x.values())
    if not o.requires_grad:
        return {"o": o}
    # the same numbers in every dtype
    do = (
        torch.randn(o.shape, generator=torch.Generator().manual_seed(1))
        .bfloat16()
        .to(o.dtype)[..., channels]
    )
    leaves = {n: t for n, t in x.items() if t.requires_grad}
    grads = torch.autograd.grad(o, list(leaves.values()), do, allow_unused=True)
    return {"o": o.detach()} | {"d" + n: d for n, d in zip(leaves, grads) if d is not None}


def assert_near(got, want, share, rtol=0.0):
    """Fail unless all results differ by at most a share of their largest entry, and `rtol`."""
    assert got.keys() == want.keys()
    for n in got:
        atol = share * float(want[n].abs().max())
        torch.testing.assert_close(
            got[n], want[n], rtol=rtol, atol=atol, msg=lambda m, n=n: f"{n}: {m}"
        )


def assert_folds(f, x, tolerance=1e-5, **kinds):
    """Fail unless f folds into exactly these kinds and its results stay the same."""
    captured = Captured()
    got, want = results(captured.compile(f), x), results(f, x)
    assert captured.fold.folded == Counter(kinds), captured.fold
    assert_near(got, want, tolerance, rtol=10 * tolerance)
    return captured


def assert_refuses(f, x, reason, **kinds):
    captured = assert_folds(f, x, **kinds)
    assert captured.fold.refused == Counter([reason] if reason else []), captured.fold
