"""Prove the promises of a call from its Dynamo graph, for `kda_ops.inductor`.

A proof is the list of nodes that it rests on, from the argument back to its activation. None means
that nothing is proved. Rounding to 16 bits or more keeps every limit that is proved here.
The caller checks for in-place writes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from kda_ops.backends.activations import EPS
from kda_ops.gates import SAFE_BOUND
from kda_ops.patterns import (
    Refused,
    example,
    expand,
    find_l2norm,
    is_cast,
    is_layout,
    name_of,
    operands,
    source,
)

# The default eps of F.normalize. With a much smaller one, squares of short rows underflow in fp32,
# and lengths may exceed 1. Rows shorter than the largest one stay short, as in the operator's norm.
LEAST_EPS, MOST_EPS = 1e-12, EPS**0.5


def _behind(value: Any, rows: bool) -> list[Any]:
    """Return a value and its sources, back through casts and shape changes; the last is neither.

    With `rows`, shape changes must move whole rows of the last dimension.
    """
    nodes = [value]
    while isinstance(nodes[-1], Node) and (is_cast(nodes[-1]) or is_layout(nodes[-1], rows)):
        nodes.append(source(nodes[-1]))
    return nodes


def prove_strength(value: Node) -> list[Node] | None:
    """Prove that beta is in [0, 1], because it is a sigmoid."""
    nodes = _behind(value, rows=False)
    return nodes if name_of(nodes[-1]) == "sigmoid" else None


def prove_lengths(value: Node) -> list[Node] | None:
    """Prove that rows are normalised, by F.normalize or the norm that folds.

    Then their length is at most 1, and shorter only where the raw row is tiny.
    """
    nodes = _behind(value, rows=True)
    if any(is_cast(n) and example(n).dtype.itemsize < 2 for n in nodes):
        return None
    last = nodes[-1]
    if name_of(last) == "normalize":
        x, p, dim, eps, out = operands(last, "p", "dim", "eps", "out")
        # in float16 small squares underflow to zero at any eps, so lengths may exceed 1
        plain = p in (None, 2) and out is None and example(last).dtype is not torch.float16
        plain = plain and (eps is None or isinstance(eps, float) and LEAST_EPS <= eps <= MOST_EPS)
        return nodes if plain and x is not None and dim in (-1, example(x).dim() - 1) else None
    try:
        norm = find_l2norm(value)
    except Refused:
        return None
    return None if norm is None else [*norm.nodes, norm.x]


def prove_decay(value: Node) -> list[Node] | None:
    """Prove that g is in [SAFE_BOUND, 0], because it is c * sigmoid(x) with c in that range."""
    nodes = _behind(value, rows=False)
    product = expand(nodes[-1])
    found = product.take("sigmoid")
    if found is None or len(product.factors) != 1 or not SAFE_BOUND <= product.coefficient <= 0.0:
        return None
    return [*nodes, *product.nodes, found.base]
