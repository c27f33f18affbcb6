"""Replace operators by plain torch for Inductor, where that takes less time or memory.

Registered when Inductor's table is imported. A graph then has the plain form, which Inductor fuses.
What `PLAIN` does not name stays an operator. Results match the operator's up to one rounding: the
plain forms are those of the CPU backends, with sums in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor
from torch._inductor.decomposition import decompositions, fast_random_decomps

from kda_ops import operators
from kda_ops.backends import convolution, norm
from kda_ops.convolution import Convolve, ConvolveBackward
from kda_ops.norm import NormBackwardPass, NormPass
from kda_ops.registrations import schemas

# Names of the operators that Inductor decomposes; forward and backward have separate names.
# `benchmarks.layer` measures both forms. The plain norm takes less memory in training.
PLAIN = frozenset(("gated_rms_norm", "gated_rms_norm_bwd"))


def _present(like: Tensor, results: tuple) -> tuple[Tensor, ...]:
    # contiguous like the operator's: a graph's views rely on the strides
    return tuple(like.new_empty((0,)) if x is None else x.contiguous() for x in results)


def _short_conv(*args, **flags):
    p = Convolve(0, args, flags).p
    return _present(p.x, convolution.short_conv(p))


def _short_conv_bwd(*args, **flags):
    work = ConvolveBackward(0, args, flags)
    found = convolution.short_conv_backward(work.p, work.dy, work.dfinal_tail, work.need)
    return _present(work.p.x, found)


def _gated_rms_norm(*args, **flags):
    n = NormPass(0, args, flags)
    (y,) = _present(n.x, (norm.gated_norm(n.x, n.weight, n.gate, n.eps, n.silu),))
    return y


def _gated_rms_norm_bwd(*args, **flags):
    n = NormBackwardPass(0, args, flags)
    found = norm.gated_norm_backward(n.dy, n.x, n.weight, n.gate, n.eps, n.silu)
    return _present(n.x, found)


_FORMS: dict[operators.Operator, Callable] = {
    operators.SHORT_CONV: _short_conv,
    operators.SHORT_CONV_BWD: _short_conv_bwd,
    operators.GATED_RMS_NORM: _gated_rms_norm,
    operators.GATED_RMS_NORM_BWD: _gated_rms_norm_bwd,
}


def choose(names: Iterable[str] = PLAIN) -> None:
    """Let later compilations use the plain forms of these operators, and no others.

    The choice is no part of the key of Inductor's caches: turn them off to compile both forms.
    """
    for operator, form in _FORMS.items():
        op = operator.overload(schemas.KDA)
        if operator.name in names:
            decompositions[op] = form
        else:
            decompositions.pop(op, None)
    clear = getattr(fast_random_decomps, "cache_clear", None)
    if clear is not None:  # it keeps a copy of the table
        clear()


choose()
