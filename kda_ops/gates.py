"""The kinds of gates, and which one a call has.

The backends hold the formulas, each in a table by kind: `backends.activations` in plain torch,
`jax.activations` in JAX, `backends/triton/device/gate.py` in Triton.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

GIVEN = "given"  # g is the log decay itself, or there is none
SOFTPLUS = "softplus"  # -exp(A_log) softplus(g + dt_bias)
BOUNDED = "bounded"  # bound sigmoid(exp(A_log) (g + dt_bias))

SAFE_BOUND = -5.0  # what `safe_gate` promises when no lower_bound names another bound


@dataclass(frozen=True)
class Gate:
    """A kind of gate, and the least log decay that the caller's flags allow; None: any is allowed.

    Kernels choose their number of anchors by the bound, and scale factors by it. That limits the
    range of q and k (docs/numerics.md), but not without a decay, where the bound is 0.
    """

    kind: str
    bound: float | None = None

    @property
    def inside(self) -> bool:
        """Whether g are logits, which the operator activates."""
        return self.kind != GIVEN

    @property
    def needs_log(self) -> bool:
        """Whether the gate has no meaning without A_log."""
        return self.kind == SOFTPLUS


def gate_of(
    inside: bool, lower_bound: float | None = None, safe: bool = False, decays: bool = True
) -> Gate:
    """Return the gate that the public flags of a call name; `decays` says whether g is given."""
    check_lower_bound(lower_bound)
    if inside:  # the softplus gate has no lower bound, whatever the caller promises
        return Gate(SOFTPLUS) if lower_bound is None else Gate(BOUNDED, lower_bound)
    if lower_bound is not None and not safe:
        raise ValueError(
            "lower_bound must be None without use_gate_in_kernel=True (or safe_gate=True "
            f"of chunk, which promises that bound), got {lower_bound}: "
            "pass raw logits with use_gate_in_kernel=True, or drop it."
        )
    if not decays:
        return Gate(GIVEN, 0.0)
    promised = SAFE_BOUND if lower_bound is None else lower_bound
    return Gate(GIVEN, promised if safe else None)


def check_lower_bound(lower_bound: float | None) -> None:
    """Refuse a bound that no decay can have."""
    if lower_bound is not None and not -math.inf < lower_bound < 0.0:
        raise ValueError(
            "lower_bound must be a finite number below 0 (natural log; the lower limit of the "
            f"gate), got {lower_bound}."
        )
