"""`kda_ops.inductor` sets the promises that a graph proves, and no others."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
import torch.nn.functional as F

import kda_ops
from tests.support.folding import BOUNDED, NORMS, Captured, capture, inputs, results

BF16 = torch.bfloat16


def without_gradient(x):
    with torch.no_grad():
        return x.sigmoid()


def written(x):
    x = x.sigmoid()
    x.add_(1.0)
    return x


def written_view(x):
    y = x.sigmoid()
    y[:, 0].mul_(2.0)
    return y.bfloat16()


def source_written(k):
    x = k.clone()
    r = torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
    x.mul_(100.0)
    return x * r


def rows_swapped(k):
    y = F.normalize(k.transpose(2, 3).contiguous(), dim=-1)
    return y.swapaxes(axis0=2, axis1=3)


def rows_swapped_in_part(k):
    y = F.normalize(k.transpose(1, 3).contiguous(), dim=-1)
    return y.swapaxes(1, axis1=3)


PROVEN = {
    "rounded": ("safe_beta", lambda b: b.sigmoid().to(BF16)),
    "rounded before": ("safe_beta", lambda b: b.to(BF16).sigmoid().half()),
    "moved": ("safe_beta", lambda b: b.mT.sigmoid().to(BF16).transpose(1, 2).contiguous()),
    "without gradient": ("safe_beta", without_gradient),
    "F.normalize": ("safe_keys", lambda k: F.normalize(k, dim=-1)),
    "F.normalize, last": ("safe_keys", lambda k: F.normalize(k.float(), p=2.0, dim=3, eps=1e-6)),
    "by axes with names": (
        "safe_keys",
        lambda k: F.normalize(k.swapaxes(1, axis1=2), dim=-1).swapaxes(1, axis1=2),
    ),
    "aten, by name": ("safe_beta", lambda b: torch.ops.aten.sigmoid(self=b).to(BF16)),
    "by heads": ("safe_keys", lambda k: F.normalize(k.transpose(1, 2), dim=-1).transpose(1, 2)),
    "k alone": ("safe_keys", NORMS["rsqrt"]),
    "bounded": ("safe_gate", lambda g: (-5.0 * g.sigmoid()).to(BF16)),
    "less": ("safe_gate", lambda g: -0.5 * without_gradient(3.0 * g)),
}
OTHERS = {
    "twice": ("safe_beta", lambda b: (2.0 * b.sigmoid()).to(BF16)),
    "more": ("safe_beta", lambda b: b.sigmoid() + 0.5),
    "written": ("safe_beta", written),
    "a view written": ("safe_beta", written_view),
    "over tokens": ("safe_keys", lambda k: F.normalize(k, dim=1)),
    "by default": ("safe_keys", F.normalize),
    "scaled": ("safe_keys", lambda k: 0.5 * F.normalize(k, dim=-1)),
    "rows cut": ("safe_keys", lambda k: F.normalize(k.unflatten(-1, (2, -1)), dim=-1).flatten(-2)),
    "other power": ("safe_keys", lambda k: F.normalize(k, p=3.0, dim=-1)),
    "16 bits": ("safe_keys", lambda k: F.normalize(k.half(), dim=-1).float()),
    "its source written": ("safe_keys", source_written),
    "rows swapped": ("safe_keys", rows_swapped),
    "rows swapped, one axis by name": ("safe_keys", rows_swapped_in_part),
    "never unit": ("safe_keys", lambda k: F.normalize(k, dim=-1, eps=1.0)),
    "divided by 0": ("safe_gate", lambda g: (-g.sigmoid() / 0.0).to(BF16)),
    "divided by infinity, twice": ("safe_gate", lambda g: -g.sigmoid() / math.inf / 0.0),
    "beyond float32": ("safe_gate", lambda g: ((1e39 * g.sigmoid()) * -5e-39).to(BF16)),
    "no floor": ("safe_keys", lambda k: F.normalize(1e-30 * k, dim=-1, eps=0.0)),
    "8 bits": ("safe_keys", lambda k: F.normalize(k, dim=-1).to(torch.float8_e4m3fn).to(k.dtype)),
    "other bits": ("safe_beta", lambda b: b.sigmoid().to(BF16).view(dtype=torch.float16)),
    "below the bound": ("safe_gate", lambda g: (-5.5 * g.sigmoid()).to(BF16)),
    "a softplus": ("safe_gate", lambda g: -F.softplus(g).to(BF16)),
    "a product": ("safe_gate", lambda g: -5.0 * g.sigmoid() * g.exp()),
}
ARGUMENT = {"safe_beta": "beta", "safe_keys": "k", "safe_gate": "g"}


def attend(flag, make, op=kda_ops.chunk_kda, **flags):
    """Return a function of all inputs in which one argument is made by `make`."""

    def f(q, k, v, g, beta, *_):
        given = {"q": q, "k": k, "v": v, "g": -g.abs(), "beta": beta.abs()}
        made = {"k": k, "g": g, "beta": beta}[ARGUMENT[flag]]
        return op(**(given | {ARGUMENT[flag]: make(made)}), **flags)[0]

    return f


@pytest.mark.quick
@pytest.mark.parametrize("name", PROVEN)
def test_a_promise_that_the_graph_proves_is_set(name):
    flag, make = PROVEN[name]
    f, captured = attend(flag, make), Captured()
    got, want = results(captured.compile(f), inputs()), results(f, inputs())
    assert captured.calls[-1].kwargs.get(flag) is True
    assert captured.fold.promised == Counter({flag: 1}) and not captured.fold.folded
    for n in want:
        torch.testing.assert_close(got[n], want[n], msg=lambda m, n=n: f"{n}: {m}")


@pytest.mark.parametrize("name", OTHERS)
def test_nothing_else_is_promised(name):
    flag, make = OTHERS[name]
    captured = capture(attend(flag, make), inputs(grad=False))
    assert not captured.fold.promised and not captured.calls[-1].kwargs.get(flag)


@pytest.mark.parametrize("name", ("rounded", "F.normalize", "bounded"))
def test_a_promise_of_the_caller_stays(name):
    flag, make = PROVEN[name]
    captured = capture(attend(flag, make, **{flag: True}), inputs(grad=False))
    assert captured.calls[-1].kwargs[flag] is True and not captured.fold.promised


def test_what_folds_needs_no_promise():
    def f(q, k, v, g, beta, A_log, dt_bias):
        decay = BOUNDED["operator"](g, A_log, dt_bias, 1)
        return kda_ops.chunk_kda(NORMS["rsqrt"](q), NORMS["rsqrt"](k), v, decay, beta.sigmoid())[0]

    captured = capture(f, inputs())
    assert captured.fold.folded == Counter(l2norm=1, bounded_gate=1, sigmoid=1)
    assert not captured.fold.promised


def test_recurrent_operators_take_no_promise():
    f = attend("safe_beta", PROVEN["rounded"][1], kda_ops.recurrent_kda)
    captured = capture(f, inputs(grad=False))
    assert not captured.fold.promised and "safe_beta" not in captured.calls[-1].kwargs


def test_a_prefill_on_a_pool_takes_promises():
    def f(q, k, v, g, beta, *_):
        pool = v.new_zeros((q.shape[0], v.shape[2], q.shape[3], v.shape[3]))
        return kda_ops.chunk_kda_(q, k, v, None, beta.sigmoid().to(BF16), pool)

    captured = capture(f, inputs(grad=False))
    assert captured.fold.promised == Counter(safe_beta=1)
