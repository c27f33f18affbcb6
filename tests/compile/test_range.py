"""A bound of the decay limits q and k in bf16: the pass sets one only where both are normalised."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F

import kda_ops
from tests.support.folding import BOUNDED, NORMS, capture, inputs, norm

BF16 = torch.bfloat16


def unit(x):
    return F.normalize(x, dim=-1)


def attend(*, q=unit, k=unit, op=kda_ops.chunk_kda, decay=BOUNDED["operators"], **flags):
    """Return a function of all inputs whose decay is bounded."""

    def f(x, y, v, g, beta, A_log, dt_bias):
        return op(q(x), k(y), v, decay(g, A_log, dt_bias, int(g.dim() == 4)), None, **flags)[0]

    return f


def rounded(g, A, dt, rank):
    """Return a decay that does not fold, but is proved to lie above its bound."""
    return (-5.0 * g.float().sigmoid()).to(BF16)


def written(x):
    y = unit(x)
    y.mul_(1e6)
    return y


# --- q and k that nothing limits ------------------------------------------------------------------

UNLIMITED = {
    "neither": dict(q=lambda x: x, k=lambda x: x),
    "k alone": dict(q=lambda x: x),
    "q alone": dict(k=lambda x: x),
    "the norm of k alone": dict(q=lambda x: x, k=norm),
    "scaled": dict(q=lambda x: 1e6 * unit(x)),
    "a large scale": dict(scale=1e6),
    "a large scale, norm inside": dict(scale=1e6, use_qk_l2norm_in_kernel=True),
    "written": dict(q=written),
    "kept short": dict(k=lambda x: F.normalize(x, dim=-1, eps=10.0)),
    "over tokens": dict(q=lambda x: F.normalize(x, dim=1)),
    "in 8 bits": dict(k=lambda x: unit(x).to(torch.float8_e5m2).to(BF16)),
}


@pytest.mark.quick
@pytest.mark.parametrize("decay", ("operators", "operator", rounded))
@pytest.mark.parametrize("name", UNLIMITED)
def test_no_bound_is_set_where_q_or_k_may_have_any_size(name, decay):
    chosen = decay if callable(decay) else BOUNDED[decay]
    captured = capture(attend(decay=chosen, **UNLIMITED[name]), inputs(dtype=BF16, grad=False))
    call = captured.calls[-1].kwargs
    assert call.get("lower_bound") is None and not call.get("safe_gate")
    assert not captured.fold.folded and not captured.fold.promised["safe_gate"]
    assert captured.fold.refused == Counter(["precision" if decay is rounded else "range"])


def test_autocast_to_16_bits_limits_q_and_k():
    def f(*x):
        with torch.autocast("cpu", BF16):
            return attend(q=lambda x: x, decay=lambda g, *_: -5.0 * g.sigmoid())(*x)

    for dtype, folds in ((torch.float32, False), (torch.float64, True)):
        captured = capture(f, inputs(dtype=dtype, grad=False))
        assert captured.fold.folded == Counter(bounded_gate=int(folds)) + Counter()
        assert captured.fold.refused == Counter(range=int(not folds)) + Counter()


# --- q and k that are in range --------------------------------------------------------------------

LIMITED = {
    "normalised": {},
    "by heads": dict(q=lambda x: unit(x.transpose(1, 2)).transpose(1, 2)),
    "norm inside": dict(q=lambda x: x, k=lambda x: x, use_qk_l2norm_in_kernel=True),
    "two ways": dict(q=NORMS["float"]),
    "a scale": dict(scale=8.0),
}
# calls of which a bound limits nothing
UNCONCERNED = {
    "recurrent": dict(op=kda_ops.recurrent_kda),
    "promised before": dict(safe_gate=True),
    "a bound that kernels do not use": dict(decay=lambda g, *_: -6.0 * g.sigmoid()),
    "one decay per head": dict(op=kda_ops.chunk_gdn, variant="gdn"),
    "float16": dict(dtype=torch.float16),
    "float32": dict(dtype=torch.float32),
}


@pytest.mark.quick
@pytest.mark.parametrize("name", LIMITED)
def test_a_bounded_decay_folds_where_q_and_k_are_normalised(name):
    captured = capture(attend(**LIMITED[name]), inputs(dtype=BF16, grad=False))
    assert captured.fold.folded == Counter(bounded_gate=1) and not captured.fold.refused
    captured = capture(attend(decay=rounded, **LIMITED[name]), inputs(dtype=BF16, grad=False))
    assert captured.fold.promised["safe_gate"] == 1


def test_a_norm_that_folds_first_lets_the_decay_fold():
    captured = capture(attend(q=norm, k=norm), inputs(dtype=BF16, grad=False))
    assert captured.fold.folded == Counter(l2norm=1, bounded_gate=1)


@pytest.mark.parametrize("name", UNCONCERNED)
def test_a_bounded_decay_folds_where_it_limits_nothing(name):
    flags = dict(UNCONCERNED[name])
    variant, dtype = flags.pop("variant", "kda"), flags.pop("dtype", BF16)
    f = attend(q=lambda x: x, k=lambda x: x, **flags)
    captured = capture(f, inputs(variant, dtype=dtype, grad=False))
    assert captured.fold.folded == Counter(bounded_gate=1)
