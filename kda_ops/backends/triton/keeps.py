"""What training keeps on the Triton backend."""

from __future__ import annotations

import torch

from kda_ops.problem import Problem
from kda_ops.stages import KEPT, Keeps


class AsGiven(Keeps):
    """What training keeps where operands have the dtype of the inputs."""

    def operand_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the inputs."""
        return dtype

    def names(
        self, rank: int, dtype: torch.dtype, l2norm: bool, disable_recompute: bool
    ) -> frozenset[str]:
        """Name what is kept: by default A, if operands have 16 bits.

        The scans of GDN read q, k and v themselves, so A is enough to make the rest of the tile
        again. The scans of KDA apply beta themselves, from `Tile.factors`, so its tile has no u.
        With a norm, KDA's gradient reads o, because do · o is the product of unit q with its
        gradient.
        """
        if not disable_recompute:
            return frozenset(("A",)) if dtype.itemsize == 2 else frozenset()
        if not rank:
            return frozenset(("A", "states", "v_new"))
        return frozenset((*KEPT, "o") if l2norm else KEPT) - {"u"}

    def trains(self, p: Problem) -> bool:
        """Return whether KDA's walk serves the call."""
        if not p.rank or p.q.dtype is not torch.bfloat16:
            return False
        try:
            from kda_ops.backends.triton import tuning
        except ModuleNotFoundError:  # the call is a fake one, where there is no Triton
            return False
        return tuning.walks(p)

    def trained_names(self, p: Problem) -> frozenset[str]:
        """Return what a walk in training keeps: nothing without a bound on decays.

        No kernel of backward could read it there.
        """
        from kda_ops.backends.triton import tuning

        return super().trained_names(p) if tuning.centred(p) else frozenset()

    def keeps_AP(self, p: Problem) -> bool:
        """Return whether A is kept in one tile with P: KDA in 16 bits, where backward recomputes.

        No scan reads that tile before `prepare` takes it back, and `prepare` then needs no scores.
        """
        return bool(p.rank) and not p.disable_recompute and p.q.dtype.itemsize == 2

    def tile_names(self, rank: int) -> frozenset[str]:
        """Return what the scans read."""
        names = frozenset(("A", "P", "gamma", "factors"))
        return names | {"w", "qg", "kg"} if rank else names

    def runs(self, p: Problem) -> int:
        """Return how many runs a shard has, the tail of a packed row included."""
        try:
            from kda_ops.backends.triton import tuning
        except ModuleNotFoundError:  # as above
            return 0
        return tuning.pieces(p) + (p.cu_seqlens is not None) if tuning.run_length(p) else 0


KEEPS = AsGiven()
