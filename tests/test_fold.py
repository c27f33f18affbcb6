"""`kda_ops.inductor`: plain PyTorch around the operators folds into their flags, and only where this changes nothing beyond rounding.

Most tests run the pass on the graph that Dynamo captured and then call that graph; a few go through Inductor.
"""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch._dynamo.utils import counters
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import fresh_cache

import kda_ops
from kda_ops.inductor import FoldPreprocessing, fold_preprocessing
from tests.support.closeness import DRAWS, excess

ROOT = Path(__file__).resolve().parent.parent
B, T, H, HV, K, V = 2, 70, 2, 4, 8, 6
NAMES = ("q", "k", "v", "g", "beta", "A_log", "dt_bias")
RANK = {"kda": 1, "gdn": 0}

# Every function below takes what its formula names and writes it in one of its spellings.

NORMS = {
    "rsqrt": lambda x: x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6),
    "methods": lambda x: x.mul(x.pow(2).sum(dim=-1, keepdim=True).add(1e-6).rsqrt()),
    "functions": lambda x: torch.mul(torch.rsqrt(torch.add(torch.sum(torch.square(x), -1, keepdim=True), 1e-6)), x),
    "operators": lambda x: x / (1e-6 + (x**2).sum(-1, True)) ** 0.5,
    "product": lambda x: x / torch.sqrt((x * x).sum(dim=[-1], keepdim=True) + 1e-6),
    "inverse": lambda x: x * (1.0 / torch.sqrt(torch.pow(x, 2.0).sum(3, keepdim=True) + 1e-6)),
    "power": lambda x: (torch.sum(x * x, dim=-1, keepdim=True) + 1e-6).pow(-0.5) * x,
    "reciprocal": lambda x: x * (x.square().sum(-1, keepdim=True) + 1e-6).sqrt().reciprocal(),
    "root of the reciprocal": lambda x: x * (x.square().sum(-1, keepdim=True) + 1e-6).reciprocal().sqrt(),
    "power of the inverse": lambda x: x * ((x.square().sum(-1, keepdim=True) + 1e-6) ** -1) ** 0.5,
    "unsqueeze": lambda x: x * torch.rsqrt(x.square().sum(-1) + 1e-6).unsqueeze(-1),
    "index": lambda x: x / ((x * x).sum(axis=-1) + 1e-6).sqrt()[..., None],
    "float": lambda x: (x.float() * torch.rsqrt(x.float().square().sum(-1, keepdim=True) + 1e-6)).to(x.dtype),
    "cast": lambda x: _norm(x.to(torch.float32)).type_as(x),
    "layout": lambda x: _norm(x.transpose(1, 2)).transpose(1, 2),
    "rows": lambda x: _norm(x.reshape(-1, x.shape[-1])).view(x.shape),
    "contiguous": lambda x: _norm(x.contiguous()).contiguous(),
}


def _norm(x):
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def _column(x, rank):
    return x.unsqueeze(-1) if rank else x


def _bias(dt_bias, rank):
    return dt_bias.view(-1, K) if rank else dt_bias


GATES = {
    "operators": lambda g, A, dt, rank: -_column(A.exp(), rank) * F.softplus(g + _bias(dt, rank)),
    "float": lambda g, A, dt, rank: -_column(A.float().exp(), rank) * F.softplus(g.float() + _bias(dt, rank)),
    "methods": lambda g, A, dt, rank: F.softplus(g.add(_bias(dt, rank))).mul(_column(A.exp(), rank).neg()),
    "functions": lambda g, A, dt, rank: torch.neg(torch.mul(torch.exp(_column(A, rank)), F.softplus(torch.add(g, _bias(dt, rank)), 1.0, 20.0))),
    "outside": lambda g, A, dt, rank: -(F.softplus(_bias(dt, rank) + g) * (A[:, None] if rank else A).exp()),
    "minus one": lambda g, A, dt, rank: -1 * A.exp().view((1, 1, -1) + (1,) * rank) * F.softplus(g + _bias(dt, rank)[None, None]),
    "reshape": lambda g, A, dt, rank: F.softplus(g + dt.reshape((1, 1, -1) + (K,) * rank)) * -A.reshape((1, 1, -1) + (1,) * rank).float().exp(),
    "flat": lambda g, A, dt, rank: -_column(A.exp(), rank) * F.softplus((g.flatten(2) + dt).view(g.shape)),
    "no bias": lambda g, A, dt, rank: -_column(A.exp(), rank) * torch.nn.Softplus()(g),
    "operator": lambda g, A, dt, rank: (kda_ops.kda_gate if rank else kda_ops.gdn_gate)(g, A, dt),
}
BOUNDED = {
    "operators": lambda g, A, dt, rank: -5.0 * torch.sigmoid(_column(A.exp(), rank) * (g + _bias(dt, rank))),
    "methods": lambda g, A, dt, rank: (g.float() + _bias(dt, rank)).mul(_column(A.float().exp(), rank)).sigmoid().mul(-5),
    "outside": lambda g, A, dt, rank: -(5.0 * ((g + _bias(dt, rank)) * _column(A, rank).exp()).sigmoid()),
    "functions": lambda g, A, dt, rank: torch.special.expit(torch.multiply(_column(torch.exp(A), rank), g + _bias(dt, rank))) / -0.2,
    "no A_log": lambda g, A, dt, rank: -5.0 * F.sigmoid(g + _bias(dt, rank)),
    "operator": lambda g, A, dt, rank: (kda_ops.kda_gate if rank else kda_ops.gdn_gate)(g, A, dt, lower_bound=-5.0),
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
    """q, k, v, g, beta, A_log and dt_bias by name."""
    gen, rank = torch.Generator().manual_seed(seed), RANK[variant]
    bias = (HV,) if not rank else (HV * K,) if flat else (HV, K)
    shapes = ((B, tokens, H, K), (B, tokens, H, K), (B, tokens, HV, V), (B, tokens, HV, K)[: 3 + rank], (B, tokens, HV), (HV,), bias)
    out = {n: torch.randn(s, generator=gen, dtype=torch.float64) for n, s in zip(NAMES, shapes)}
    out |= {n: 0.4 * out[n] for n in "qk"}  # without normalisation a longer key makes the recurrence unstable
    return {n: x.to(wide if wide and n in ("A_log", "dt_bias") else dtype).requires_grad_(grad) for n, x in out.items()}


class Captured:
    """A backend that folds, in the graph and in those it calls, and runs what came out; `calls` are the operator nodes of the last graph."""

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
                self.calls += [n for n in m.graph.nodes if str(n.target).split(".")[0] in ("kda", "gdn")]
        return gm.forward

    def compile(self, f, **options):
        torch._dynamo.reset()
        return torch.compile(f, backend=self, fullgraph=True, **options)


def results(f, x, channels=slice(None)):
    """Output, and the gradient of every input that has one; `channels` is the order of V."""
    o = f(*x.values())
    if not o.requires_grad:
        return {"o": o}
    do = torch.randn(o.shape, generator=torch.Generator().manual_seed(1)).bfloat16().to(o.dtype)[..., channels]  # the same numbers in every dtype
    leaves = {n: t for n, t in x.items() if t.requires_grad}
    grads = torch.autograd.grad(o, list(leaves.values()), do, allow_unused=True)
    return {"o": o.detach()} | {"d" + n: d for n, d in zip(leaves, grads) if d is not None}


def assert_folds(f, x, tolerance=1e-5, **kinds):
    """f folds into exactly these kinds, and computes what it computed."""
    captured = Captured()
    got, want = results(captured.compile(f), x), results(f, x)
    assert captured.fold.folded == Counter(kinds), captured.fold
    assert got.keys() == want.keys()
    for n in got:
        atol = tolerance * float(want[n].abs().max())
        torch.testing.assert_close(got[n], want[n], rtol=10 * tolerance, atol=atol, msg=lambda m, n=n: f"{n}: {m}")
    return captured


def assert_refuses(f, x, reason, **kinds):
    captured = assert_folds(f, x, **kinds)
    assert captured.fold.refused == Counter([reason] if reason else []), captured.fold


# --- every spelling is found --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NORMS)
def test_l2norm_folds(name):
    def f(q, k, v, *_):
        return kda_ops.chunk_kda(NORMS[name](q), NORMS[name](k), v, None, None)[0]

    captured = assert_folds(f, inputs(), l2norm=1)
    assert captured.calls[0].kwargs["use_qk_l2norm_in_kernel"] is True


@pytest.mark.parametrize("name", ("float", "cast", "rsqrt"))
def test_l2norm_of_16_bit_inputs_folds_with_the_cast_back(name):
    x = inputs(dtype=torch.bfloat16, grad=False)
    captured = Captured()
    captured.compile(lambda q, k, v, *_: kda_ops.chunk_kda(NORMS[name](q), NORMS[name](k), v, None, None)[0])(*x.values())
    assert captured.fold.folded == Counter(l2norm=1)


@pytest.mark.parametrize("variant", RANK)
@pytest.mark.parametrize("name", GATES)
def test_gate_folds(name, variant):
    def f(q, k, v, g, beta, A_log, dt_bias):
        return getattr(torch.ops, variant).chunk(q, k, v, GATES[name](g, A_log, dt_bias, RANK[variant]), None)[0]

    captured = assert_folds(f, inputs(variant, flat=name == "flat"), gate=1)
    flags = captured.calls[-1].kwargs
    assert flags["use_gate_in_kernel"] is True and flags["lower_bound"] is None


@pytest.mark.parametrize("variant", RANK)
@pytest.mark.parametrize("name", BOUNDED)
def test_bounded_gate_folds(name, variant):
    def f(q, k, v, g, beta, A_log, dt_bias):
        return getattr(torch.ops, variant).chunk.default(q, k, v, BOUNDED[name](g, A_log, dt_bias, RANK[variant]), None)[0]

    captured = assert_folds(f, inputs(variant), bounded_gate=1)
    assert captured.calls[-1].kwargs["lower_bound"] == -5.0


@pytest.mark.parametrize("name", SIGMOIDS)
def test_sigmoid_folds(name):
    assert_folds(lambda q, k, v, g, beta, *_: kda_ops.chunk_kda(q, k, v, None, SIGMOIDS[name](beta))[0], inputs(), sigmoid=1)


@pytest.mark.parametrize("name", DOUBLE_SIGMOIDS)
def test_double_sigmoid_folds(name):
    captured = assert_folds(lambda q, k, v, g, beta, *_: kda_ops.chunk_kda(q, k, v, None, DOUBLE_SIGMOIDS[name](beta))[0], inputs(), double_sigmoid=1)
    assert captured.calls[0].kwargs["allow_neg_eigval"] is True


def everything(op, variant, norm="rsqrt", gate="float", sigmoid="method", bounded=False, double=False):
    """A function of all inputs that writes every activation out."""
    gates, sigmoids = BOUNDED if bounded else GATES, DOUBLE_SIGMOIDS if double else SIGMOIDS

    def f(q, k, v, g, beta, A_log, dt_bias):
        return op(NORMS[norm](q), NORMS[norm](k), v, gates[gate](g, A_log, dt_bias, RANK[variant]), sigmoids[sigmoid](beta))[0]

    return f


ALL = dict(l2norm=1, gate=1, sigmoid=1)


@pytest.mark.parametrize("form", ("functional", "packet", "overload"))
@pytest.mark.parametrize("name", ("chunk", "recurrent"))
@pytest.mark.parametrize("variant", RANK)
def test_every_way_to_call_an_operator_folds(variant, name, form):
    packet = getattr(getattr(torch.ops, variant), name)
    op = {"functional": getattr(kda_ops, f"{name}_{variant}"), "packet": packet, "overload": packet.default}[form]
    assert_folds(everything(op, variant), inputs(variant), **ALL)


@pytest.mark.parametrize("name", ("chunk_kda_", "recurrent_kda_"))
def test_operators_on_a_state_pool_fold(name):
    op, x = getattr(kda_ops, name), inputs(grad=False)
    pools = [torch.zeros(B, HV, K, V) for _ in range(2)]

    def f(q, k, v, g, beta, A_log, dt_bias, pool):
        return op(NORMS["rsqrt"](q), NORMS["rsqrt"](k), v, GATES["float"](g, A_log, dt_bias, 1), beta.sigmoid(), pool)

    captured = Captured()
    got = captured.compile(f)(*x.values(), pools[0])
    torch.testing.assert_close(got, f(*x.values(), pools[1]), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(*pools, rtol=1e-4, atol=1e-5)
    assert captured.fold.folded == Counter(ALL)


def test_nothing_is_left_of_what_was_folded():
    captured = Captured()
    captured.compile(everything(kda_ops.chunk_kda, "kda"))(*inputs().values())
    nodes = captured.calls[0].graph.nodes
    assert [n.op for n in nodes if n.op not in ("placeholder", "output")] == ["call_function"] * 2  # the operator, and its first output


BIASES = {
    "one row": (lambda dt: dt.reshape(1, -1), lambda dt: dt.view(HV, K)),
    "one row of all channels": (lambda dt: dt.reshape(1, -1), lambda dt: dt.unflatten(-1, (HV, K))),
    "other heads": (lambda dt: dt.reshape(K, HV), lambda dt: dt.reshape(HV, K)),
    "transposed": (lambda dt: dt.t().contiguous(), lambda dt: dt.t().reshape(-1).view(HV, K)),
}


@pytest.mark.parametrize("name", BIASES)
def test_a_bias_of_any_shape_folds(name):
    x, (stored, used) = inputs(), BIASES[name]
    x["dt_bias"] = stored(x["dt_bias"].detach()).requires_grad_()
    assert_folds(lambda q, k, v, g, b, A, dt: kda_ops.chunk_kda(q, k, v, -A.exp()[:, None] * F.softplus(g + used(dt)), None)[0], x, gate=1)


def test_parameters_stored_in_another_shape_fold():
    x = inputs()
    x["A_log"], x["dt_bias"] = (x[n].detach().reshape(1, 1, HV, -1).requires_grad_() for n in ("A_log", "dt_bias"))

    def f(q, k, v, g, beta, A_log, dt_bias):
        return kda_ops.chunk_kda(q, k, v, -A_log.exp() * F.softplus(g + dt_bias), None)[0]

    assert_folds(f, x, gate=1)


def test_heads_repeated_after_the_norm_fold():
    def f(q, k, v, *_):
        q, k = (_norm(x).repeat_interleave(HV // H, dim=2) for x in (q, k))
        return kda_ops.chunk_kda(q, k, v, None, None)[0]

    assert_folds(f, inputs(), l2norm=1)


def test_what_else_reads_an_activation_keeps_it():
    def f(q, k, v, g, beta, *_):
        b = beta.sigmoid()
        return kda_ops.chunk_kda(q, k, v, None, b)[0] * b.mean()

    assert_folds(f, inputs(), sigmoid=1)


def test_inference_with_parameters_folds():
    x, captured = inputs(), Captured()
    with torch.no_grad():
        captured.compile(everything(kda_ops.chunk_kda, "kda"))(*x.values())
    assert captured.fold.folded == Counter(ALL)


def test_a_checkpointed_region_folds():
    f = everything(kda_ops.chunk_kda, "kda")
    assert_folds(lambda *x: torch.utils.checkpoint.checkpoint(f, *x, use_reentrant=False), inputs(), **ALL)


def test_two_layers_fold():
    f = everything(kda_ops.chunk_kda, "kda")
    assert_folds(lambda q, k, v, *x: f(q, k, f(q, k, v, *x), *x), inputs(), **{n: 2 for n in ALL})


def test_any_length_folds_in_one_graph():
    captured = Captured()
    f = captured.compile(everything(kda_ops.chunk_kda, "kda"), dynamic=True)
    for tokens in (65, 7, 130):
        x = inputs(tokens=tokens)
        torch.testing.assert_close(f(*x.values()), everything(kda_ops.chunk_kda, "kda")(*x.values()), rtol=1e-4, atol=1e-5)
    assert captured.graphs == 1 and captured.fold.folded == Counter(ALL)


@pytest.mark.parametrize("variant", RANK)
def test_one_token_of_one_row_folds(variant):
    """There the bias has as many sizes as the logits."""
    x = {n: t.detach()[:1] if t.dim() > 2 else t.detach() for n, t in inputs(variant, tokens=1).items()}
    x["dt_bias"] = x["dt_bias"][None, None]
    x |= {n: t.requires_grad_() for n, t in x.items() if n not in ("g", "A_log", "dt_bias")}  # from an empty state, nothing depends on these
    rank = RANK[variant]

    def f(q, k, v, g, beta, A_log, dt_bias):
        gate = -_column(A_log.exp(), rank) * F.softplus(dt_bias + g)
        return getattr(torch.ops, variant).recurrent(_norm(q), _norm(k), v, gate, beta.sigmoid())[0]

    assert_folds(f, x, **ALL)


# --- what is not the operator's activation is left alone -----------------------------------------------------------------------

OTHERS = {
    "F.normalize": lambda q, k, v, g, b, A, dt: (F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, -F.softplus(g), b),
    "another eps": lambda q, k, v, g, b, A, dt: (*(x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-5) for x in (q, k)), v, None, b),
    "no eps": lambda q, k, v, g, b, A, dt: (*(x * torch.rsqrt(x.square().sum(-1, keepdim=True)) for x in (q, k)), v, None, b),
    "absolute value": lambda q, k, v, g, b, A, dt: (*(x.square().sqrt() * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k)), v, None, b),
    "only q": lambda q, k, v, g, b, A, dt: (NORMS["rsqrt"](q), k, v, None, b),
    "mean": lambda q, k, v, g, b, A, dt: (*(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) for x in (q, k)), v, None, b),
    "over tokens": lambda q, k, v, g, b, A, dt: (*(x * torch.rsqrt(x.square().sum(1, keepdim=True) + 1e-6) for x in (q, k)), v, None, b),
    "of something else": lambda q, k, v, g, b, A, dt: (q * torch.rsqrt(k.square().sum(-1, keepdim=True) + 1e-6), NORMS["rsqrt"](k), v, None, b),
    "scaled": lambda q, k, v, g, b, A, dt: (2 * NORMS["rsqrt"](q), NORMS["rsqrt"](k), v, None, b),
    "cube": lambda q, k, v, g, b, A, dt: (*(x * torch.rsqrt((x * x * x).sum(-1, keepdim=True).abs() + 1e-6) for x in (q, k)), v, None, b),
    "3 sigmoid": lambda q, k, v, g, b, A, dt: (q, k, v, None, 0.3 * b.sigmoid()),
    "infinite power": lambda q, k, v, g, b, A, dt: (q, k, v, None, b.sigmoid().detach() ** math.inf),
    "sigmoid squared": lambda q, k, v, g, b, A, dt: (q, k, v, None, b.sigmoid() ** 2),
    "softplus beta": lambda q, k, v, g, b, A, dt: (q, k, v, -A.exp()[:, None] * F.softplus(g + dt, beta=2.0), b),
    "softplus threshold": lambda q, k, v, g, b, A, dt: (q, k, v, -A.exp()[:, None] * F.softplus(g + dt, threshold=1.0), b),
    "no A_log": lambda q, k, v, g, b, A, dt: (q, k, v, -F.softplus(g + dt), b),
    "twice": lambda q, k, v, g, b, A, dt: (q, k, v, -2 * A.exp()[:, None] * F.softplus(g + dt), b),
    "per channel": lambda q, k, v, g, b, A, dt: (q, k, v, -dt[0].exp() * F.softplus(g + dt), b),
    "exp2": lambda q, k, v, g, b, A, dt: (q, k, v, -A.exp2()[:, None] * F.softplus(g + dt), b),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_another_function_is_left_alone(name):
    assert_refuses(lambda *x: kda_ops.chunk_kda(*OTHERS[name](*x))[0], inputs(), None)


def test_an_input_is_not_activated_twice():
    def f(q, k, v, g, beta, *_):
        flags = dict(use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True)
        return kda_ops.chunk_kda(_norm(q), _norm(k), v, None, beta.sigmoid(), **flags)[0]

    assert_refuses(f, inputs(), None)


def test_a_bias_per_head_stays_in_the_logits():
    def f(q, k, v, g, beta, A_log, dt_bias):
        return kda_ops.chunk_kda(q, k, v, -A_log.exp()[:, None] * F.softplus(g + dt_bias[:, :1]), None)[0]

    captured = assert_folds(f, inputs(), gate=1)
    assert captured.calls[0].args[NAMES.index("dt_bias")] is None


def test_a_product_of_logits_folds_without_its_factor():
    assert_folds(lambda q, k, v, g, beta, A_log, dt: kda_ops.chunk_kda(q, k, v, -5 * torch.sigmoid(0.5 * g), None)[0], inputs(), bounded_gate=1)


def test_a_contradicting_bound_is_kept():
    def f(q, k, v, g, beta, A_log, dt_bias):
        return kda_ops.chunk_kda(q, k, v, -3.0 * torch.sigmoid(g), None, safe_gate=True, lower_bound=-4.0)[0]

    assert_refuses(f, inputs(), "flags")


# --- refusals -----------------------------------------------------------------------------------------------------------------


def test_grad_mode_is_a_wall():
    def f(q, k, v, g, beta, *_):
        with torch.no_grad():
            b = beta.sigmoid()
        return kda_ops.chunk_kda(q, k, v, None, b)[0]

    assert_refuses(f, inputs(), "grad mode")
    assert_refuses(f, inputs(grad=False), "grad mode")

    def both_inside(q, k, v, g, beta, *_):
        with torch.no_grad():
            o = kda_ops.chunk_kda(q, k, v, None, beta.sigmoid())[0]
        return o * q.sum()

    assert_folds(both_inside, inputs(), sigmoid=1)


def test_one_detached_factor_is_enough():
    def f(q, k, v, g, beta, A_log, dt_bias):
        with torch.no_grad():
            A = A_log.exp()[:, None]
        return kda_ops.chunk_kda(q, k, v, -A * F.softplus(g + dt_bias), None)[0]

    assert_refuses(f, inputs(), "grad mode")
    # A detached leaf is a leaf like any other.
    assert_folds(lambda q, k, v, g, b, A, dt: kda_ops.chunk_kda(q, k, v, -A.detach().exp()[:, None] * F.softplus(g + dt), None)[0], inputs(), gate=1)


def test_autocast_is_a_wall():
    def f(q, k, v, g, beta, *_):
        with torch.autocast("cpu", torch.bfloat16):
            b = beta.sigmoid()
        return kda_ops.chunk_kda(q, k, v, None, b)[0]

    assert_refuses(f, inputs(), "autocast")

    def both_inside(q, k, v, g, beta, *_):
        with torch.autocast("cpu", torch.bfloat16):
            return kda_ops.chunk_kda(q, k, v, None, beta.sigmoid())[0]

    assert_folds(both_inside, inputs(), tolerance=2e-2, sigmoid=1)


def _attend(q, k, v, *_):
    return kda_ops.chunk_kda(_norm(3e5 * q), _norm(3e5 * k), v, None, None)[0]


def _within(*modes):
    """`_attend` under autocast modes that the program enters one after the other."""
    if not modes:
        return _attend
    inner = _within(*modes[1:])

    def f(*x):
        with torch.autocast("cpu", **modes[0]):
            return inner(*x)

    return f


HALF, NO_NAME, OFF, BFLOAT = dict(dtype=torch.float16), {}, dict(dtype=torch.float16, enabled=False), dict(dtype=torch.bfloat16)


@pytest.mark.parametrize(
    "ambient, modes, dtype, folds",
    [
        (None, [HALF], torch.float32, False),
        (torch.float16, [], torch.float32, False),
        (None, [NO_NAME], torch.float32, False),
        (None, [BFLOAT, HALF], torch.float32, False),
        (torch.float16, [OFF], torch.float32, True),
        (None, [HALF, OFF], torch.float32, True),
        (torch.bfloat16, [], torch.float32, True),
        (torch.float16, [BFLOAT], torch.float32, True),
        (None, [HALF], torch.float64, True),
    ],
)
def test_a_norm_that_autocast_would_round_to_float16_first_is_a_wall(ambient, modes, dtype, folds):
    """It may be what brings q and k into its range."""
    before = torch.get_autocast_dtype("cpu")
    torch.set_autocast_dtype("cpu", torch.float16)  # what a mode without a dtype means
    try:
        with torch.autocast("cpu", ambient or torch.float16, enabled=ambient is not None):
            captured = Captured()
            o = captured.compile(_within(*modes))(*inputs(dtype=dtype, grad=False).values())
    finally:
        torch.set_autocast_dtype("cpu", before)
    assert o.isfinite().all()
    assert (captured.fold.folded, captured.fold.refused) == ((Counter(l2norm=1), Counter()) if folds else (Counter(), Counter(["precision"])))


def _write_leaf(b, y, out):
    b.mul_(0.5)


def _write_view(b, y, out):
    b[0, 1] = 0.25


def _write_activation(b, y, out):
    y.clamp_(0.2, 0.6)


def _write_out(b, y, out):
    torch.mul(out, 0.5, out=b)


def _write_by_operator(b, y, out):
    b *= 0.5


def _write_by_its_method(b, y, out):
    b.__imul__(0.5)


def _write_by_position(b, y, out):
    F.silu(b, True)


def _write_by_module(b, y, out):
    torch.nn.Dropout(1.0, inplace=True)(b)


def _write_where_rows_are_too_long(b, y, out):
    F.embedding(torch.tensor([0, 1]), b[0], max_norm=0.1)


def _write_what_is_counted(b, y, out):
    F.batch_norm(out.flatten(0, 1), b[0, 0], b[0, 1], training=True)


def _write_what_is_counted_in_c(b, y, out):
    torch.batch_norm(out.flatten(0, 1), None, None, b[0, 0], b[0, 1], True, 0.1, 1e-5, False)


@torch._dynamo.allow_in_graph
def _passes_on(*args, **kwargs):
    return F.relu(*args, **kwargs)


def _write_by_a_function_of_anything(b, y, out):
    _passes_on(b, inplace=True)


WRITES = (
    _write_leaf, _write_view, _write_activation, _write_out, _write_by_operator, _write_by_its_method, _write_by_position, _write_by_module,
    _write_where_rows_are_too_long, _write_what_is_counted, _write_what_is_counted_in_c, _write_by_a_function_of_anything,
)  # fmt: skip


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("when", ("before", "after"))
def test_a_write_in_place_is_a_wall(write, when):
    def f(q, k, v, g, beta, *_):
        b, out = beta.clone(), beta.detach() + 1
        y = b.sigmoid()
        if when == "before":
            write(b, y, out)
        o = kda_ops.chunk_kda(q, k, v, None, y)[0]
        if when == "after":
            write(b, y, out)
        return o + b.sum() + y.sum()

    x = inputs(grad=False)
    assert_refuses(f, x, "in-place")


def test_a_write_to_something_else_is_no_wall():
    def f(q, k, v, g, beta, *_):
        y, other = beta.sigmoid(), torch.zeros_like(beta)
        other.add_(1)
        return kda_ops.chunk_kda(q, k, v, None, y)[0] + other.sum()

    assert_folds(f, inputs(), sigmoid=1)


def test_vmap_around_an_operator_is_no_wall_unless_something_is_written():
    """What is mapped has no storage to compare."""

    def f(q, k, v, g, beta, *_):
        o = torch.vmap(lambda q, b: kda_ops.chunk_kda(q, k, v, None, b.sigmoid())[0])(torch.stack([q, 2 * q]), torch.stack([beta, -beta]))
        return o.sum(0)

    def writes(q, k, v, g, beta, *_):
        c = beta * 1.0
        o = torch.vmap(lambda b: kda_ops.chunk_kda(q, k, v, None, b.sigmoid())[0] + b.mul_(2.0).sum())(torch.stack([beta, c]))
        return o.sum(0)

    def elsewhere(q, k, v, g, beta, *_):
        return kda_ops.chunk_kda(q, k, v, None, beta.sigmoid())[0] + torch.vmap(lambda t: t.mul_(2.0))(g * 1.0).sum()

    def beneath(q, k, v, g, beta, *_):
        c = torch.stack([beta, -beta])
        o = torch.vmap(lambda b: kda_ops.chunk_kda(q, k, v, None, b.sigmoid())[0])(c)
        return o.sum(0) + c.mul_(2.0).sum()

    assert_folds(f, inputs(grad=False), sigmoid=1)
    assert_refuses(beneath, inputs(grad=False), "in-place")
    assert_refuses(writes, inputs(grad=False), "in-place")
    assert_refuses(elsewhere, inputs(grad=False), "in-place")


def test_a_write_before_is_part_of_the_leaf():
    def f(q, k, v, g, beta, *_):
        b = beta.clone()
        b.mul_(0.5)
        return kda_ops.chunk_kda(q, k, v, None, b.sigmoid())[0]

    assert_folds(f, inputs(), sigmoid=1)


LOSSY = {
    "beta": lambda q, k, v, g, b, A, dt: (q, k, v, None, b.sigmoid().bfloat16()),
    "decay": lambda q, k, v, g, b, A, dt: (q, k, v, (-A.exp()[:, None] * F.softplus(g + dt)).half(), None),
    "q and k": lambda q, k, v, g, b, A, dt: (_norm(q).half(), _norm(k).half(), v.half(), None, None),
    "squares in fp16": lambda q, k, v, g, b, A, dt: (_norm(q.half()), _norm(k.half()), v.half(), None, None),
    "fp8 beta": lambda q, k, v, g, b, A, dt: (q, k, v, None, b.sigmoid().to(torch.float8_e4m3fn).float()),
    "fp8 decay": lambda q, k, v, g, b, A, dt: (q, k, v, (-A.exp()[:, None] * F.softplus(g + dt)).to(torch.float8_e5m2).float(), None),
    "fp8 q and k": lambda q, k, v, g, b, A, dt: (*(_norm(x).to(torch.float8_e4m3fn).to(x.dtype) for x in (q, k)), v, None, None),
    "there and back": lambda q, k, v, g, b, A, dt: (*(_norm(x).bfloat16().float() for x in (q, k)), v, None, None),
    "back and there": lambda q, k, v, g, b, A, dt: (*(_norm(x.bfloat16().float()).bfloat16().float() for x in (q, k)), v, None, None),
    "wider A_log": lambda q, k, v, g, b, A, dt: (q, k, v, -A.double().exp()[:, None] * F.softplus(g + dt), None),
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSY)
def test_a_cast_that_loses_precision_is_not_folded(name):
    captured, x = Captured(), inputs(grad=False)
    f = lambda *x: kda_ops.chunk_kda(*LOSSY[name](*x))[0]  # noqa: E731
    assert torch.equal(captured.compile(f)(*x.values()), f(*x.values()))
    assert not captured.fold.folded and captured.fold.refused == Counter(["precision"])


def test_logits_rounded_by_the_program_stay_rounded():
    """A narrowing cast of the logits comes before the activation: it is folded up to there."""
    x = inputs(grad=False)
    captured = assert_folds(lambda q, k, v, g, beta, *_: kda_ops.chunk_kda(q, k, v, None, beta.bfloat16().float().sigmoid())[0], x, sigmoid=1)
    assert captured.calls[0].args[4].meta["example_value"].dtype is torch.bfloat16


# --- nothing changes beyond rounding ------------------------------------------------------------------------------------------


def redraw(f, x, rank, draw):
    """The same results with the sums over channels in another order."""
    gen = torch.Generator().manual_seed(draw)
    order = {"K": torch.randperm(K, generator=gen), "V": torch.randperm(V, generator=gen)}
    axis = dict(q="K", k="K", v="V", o="V") | (dict(g="K", dt_bias="K") if rank else {})
    moved = {n: t.detach()[..., order[axis[n]]].requires_grad_() if n in axis else t for n, t in x.items()}

    found = {n: (t, axis.get(n if n == "o" else n[1:])) for n, t in results(f, moved, order["V"]).items()}
    return {n: t[..., order[i].argsort()] if i else t for n, (t, i) in found.items()}


@settings(phases=(Phase.explicit, Phase.reuse, Phase.generate))  # a smaller example is no clearer, and each one compiles
@given(
    variant=st.sampled_from(sorted(RANK)),
    name=st.sampled_from(("chunk", "recurrent")),
    dtype=st.sampled_from((torch.float32, torch.bfloat16)),
    wide=st.booleans(),
    norm=st.sampled_from(sorted(NORMS)),
    gate=st.sampled_from(sorted((False, n) for n in GATES if n != "flat") + sorted((True, n) for n in BOUNDED)),
    sigmoid=st.sampled_from(sorted((False, n) for n in SIGMOIDS) + sorted((True, n) for n in DOUBLE_SIGMOIDS)),
    tokens=st.sampled_from((5, 37, 65)),  # at one token the decay has no gradient but what cancels
    seed=st.integers(0, 2**16),
)
def test_folding_changes_nothing_beyond_rounding(variant, name, dtype, wide, norm, gate, sigmoid, tokens, seed):
    """A folded program is as close to the same function in float64 as a plain one: |x - ref| <= 4 (|plain - ref| + eps max|ref|), maximum and RMS.

    The error of the plain program is one draw; where it does not settle it, permuted channels give others, as in `tests.support.closeness`.
    Twice its budget, because the two programs do not round in the same places; `test_folding_changes_nothing_in_float64` is the sharp one.
    """
    op = getattr(getattr(torch.ops, variant), name)
    (bounded, gate), (double, sigmoid) = gate, sigmoid
    f = everything(op, variant, norm, gate, sigmoid, bounded, double)
    exact = everything(op, variant, "rsqrt", gate if gate.startswith("no") else "operators", "left" if double else "method", bounded, double)
    x = inputs(variant, dtype, seed, tokens=tokens, wide=torch.float32 if wide else None)
    captured = Captured()
    got, plain = results(captured.compile(f), x), [results(f, x)]
    ref = results(exact, {n: t.detach().double().requires_grad_() for n, t in x.items()})
    assert captured.fold.folded.total() == 3, (captured.fold.folded, captured.fold.refused)
    assert got.keys() == plain[0].keys() == ref.keys()

    def over():
        return {n: e for n in got for e in excess(got[n], ref[n], *(p[n] for p in plain)).values() if not e <= 2.0}

    if over():
        plain += [redraw(f, x, RANK[variant], draw) for draw in range(DRAWS)]
    assert not over(), over()


@pytest.mark.parametrize("variant", RANK)
@pytest.mark.parametrize("bounded", (False, True))
def test_folding_changes_nothing_in_float64(variant, bounded):
    """Where rounding is far below everything else, plain and folded agree in every digit that the formulas determine."""
    x = inputs(variant, torch.float64)
    f = everything(getattr(torch.ops, variant).chunk, variant, "product", "operators", "right" if bounded else "function", bounded, double=bounded)
    captured = Captured()
    got, want = results(captured.compile(f), x), results(f, x)
    assert captured.fold.folded.total() == 3
    for n in want:
        torch.testing.assert_close(got[n], want[n], rtol=0, atol=1e-10 * float(want[n].abs().max()), msg=lambda m, n=n: f"{n}: {m}")


# --- through Inductor ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh():
    """Empty caches and counters around a test that compiles with Inductor."""
    torch._dynamo.reset()
    counters.clear()
    with fresh_cache():
        yield
    torch._dynamo.reset()


class Recorder(CustomGraphPass):
    """Another pass: counts the operators' activations still to be seen."""

    def __init__(self):
        self.seen = []

    def __call__(self, graph):
        self.seen.append(sum(n.target == "sigmoid" for n in graph.nodes))

    def uuid(self):
        return b"recorder"


def test_inductor_trains_at_any_length_with_one_graph(fresh):
    fold, f = FoldPreprocessing(), everything(kda_ops.chunk_kda, "kda")
    compiled = torch.compile(f, dynamic=True, fullgraph=True, options={"pre_grad_custom_pass": fold})
    for tokens in (65, 37, 70):
        x = inputs(tokens=tokens)
        got, want = results(compiled, x), results(f, x)
        for n in want:
            torch.testing.assert_close(got[n], want[n], rtol=1e-4, atol=1e-5 * float(want[n].abs().max()), msg=lambda m, n=n: f"{n}: {m}")
    assert fold.folded == Counter(ALL) and not fold.refused
    assert counters["stats"]["unique_graphs"] == 1


def test_the_backend_composes_with_another_pass(fresh):
    """By name, after the passes that the options give; and what was folded is what is cached."""
    before, f = Recorder(), everything(kda_ops.chunk_gdn, "gdn")
    x = inputs("gdn", grad=False)
    fold_preprocessing.folded.clear()
    assert "kda_inductor" in torch._dynamo.list_backends()
    got = torch.compile(f, backend="kda_inductor", options={"pre_grad_custom_pass": before}, fullgraph=True)(*x.values())
    torch.testing.assert_close(got, f(*x.values()), rtol=1e-4, atol=1e-5)
    assert before.seen == [1] and fold_preprocessing.folded == Counter(ALL)
    if not hasattr(torch._inductor.custom_graph_pass, "get_custom_graph_passes"):
        return  # torch 2.12 and older take one pass in the options
    after = Recorder()
    torch._dynamo.reset()
    torch.compile(f, options={"pre_grad_custom_pass": [fold_preprocessing, after]})(*x.values())
    assert after.seen == [0]


class Another(FoldPreprocessing):
    def uuid(self):
        return b"another"


def test_the_cache_knows_the_pass(fresh):
    """A second compilation finds the folded graph; one with another pass, or none, does not."""
    f, x = lambda q, k, v, g, beta, *_: kda_ops.chunk_kda(q, k, v, None, torch.sigmoid(beta))[0], inputs(grad=False)

    def compile_again(**options):
        torch._dynamo.reset()
        counters.clear()
        torch.compile(f, options=options)(*x.values())
        return counters["aot_autograd"]["autograd_cache_hit"], counters["aot_autograd"]["autograd_cache_miss"]

    first, second = FoldPreprocessing(), FoldPreprocessing()
    assert first.uuid() == second.uuid() == fold_preprocessing.uuid()
    assert compile_again(pre_grad_custom_pass=first) == (0, 1) and first.folded == Counter(sigmoid=1)
    assert compile_again(pre_grad_custom_pass=second) == (1, 0)
    assert compile_again(pre_grad_custom_pass=Another()) == (0, 1)
    assert compile_again() == (0, 1)


# --- in a process of its own --------------------------------------------------------------------------------------------------


def run(code: str, *path: Path) -> str:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, *path)))}
    return subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True).stdout


def test_importing_kda_ops_leaves_inductor_alone():
    assert run("import sys, kda_ops; print([m for m in ('torch._inductor', 'torch._dynamo', 'kda_ops.inductor') if m in sys.modules])") == "[]\n"


def test_an_installed_entry_point_names_the_backend(tmp_path):
    """pyproject's entry point, as an installed distribution shows it, is found without importing kda_ops first."""
    line = re.search(r'torch_dynamo_backends"?\]\s*\n(kda_inductor) = "([\w.:]+)"', (ROOT / "pyproject.toml").read_text())
    info = tmp_path / "kda_ops-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kda-ops\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[torch_dynamo_backends]\n{line[1]} = {line[2]}\n")
    code = "import torch._dynamo as d; print('kda_inductor' in d.list_backends(), d.lookup_backend('kda_inductor'))"
    assert run(code, tmp_path).startswith("True <function kda_inductor")
