"""A training that walks, on a backend without such kernels: what is kept can be told and is of no
other use.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch

from kda_ops import dispatch
from kda_ops.chunk import walked_shapes
from kda_ops.problem import Problem
from kda_ops.stages import Backend, Gradients, Keeps, Walked


class Walks(Keeps):
    """What is kept where KDA with at least `heads` value heads, and V of `columns`, walks.

    Other calls keep A too, as in 16 bits.
    """

    def __init__(self, heads: int = 1, columns: int | None = None):
        self.heads, self.columns = heads, columns
        self.trained = self.walked = 0  # calls

    def names(self, *args, **flags) -> frozenset[str]:
        """Return what other calls keep."""
        return super().names(*args, **flags) | {"A"}

    def trains(self, p: Problem) -> bool:
        """Return whether a call walks."""
        return bool(p.rank and p.HV >= self.heads and self.columns in (None, p.V))


@contextmanager
def training_walks(b: Backend, heads: int = 1, columns: int | None = None) -> Iterator[Walks]:
    """Let a backend walk in training; what is kept is NaN, and the walk back takes nothing else."""
    keeps, whole_tile = Walks(heads, columns), b.prepare

    def prepare(p, *args, overlap=False, **options):
        return whole_tile(p, *args, **options)

    def train(p, o, final_state):
        assert keeps.trains(p)
        keeps.trained += 1
        b.scan(p, b.prepare(p), o, final_state, keep=False)
        shapes, names = walked_shapes(p), keeps.trained_names(p)
        return Walked(**{n: p.q.new_full(shapes[n], torch.nan) for n in names})

    def walk_back(p, kept, do, dfinal_state, need) -> Gradients:
        assert keeps.trains(p)
        shapes, names = walked_shapes(p), keeps.trained_names(p)
        for name, x in vars(kept).items():
            assert (x is not None) == (name in names), name
            assert x is None or x.shape == shapes[name] and x.isnan().all()
        keeps.walked += 1
        tile = b.prepare(p, norms=True)
        trace = b.scan(p, tile, p.new_output(), None, keep=True)
        assert trace is not None  # as keep asks
        reverse = b.reverse_scan(p, tile, do, dfinal_state, need)
        return b.gradient(p, tile, trace, do, reverse, need)

    stages = dict(keeps=keeps, prepare=prepare, train=train, walk_back=walk_back)
    with mock.patch.multiple(b, **stages):
        with mock.patch.object(dispatch, "keeps", lambda device: keeps):
            yield keeps
