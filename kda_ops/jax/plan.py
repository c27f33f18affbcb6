"""The static half of a call: sizes, flags, and the blocks that one program of a kernel sees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from kda_ops.problem import CHUNK, Problem

LANES = 128  # a block's last dimension is a multiple of it on a TPU
NEXT, FIRST, LAST = 2, 1, 2  # an entry of the chunk table: sequence << NEXT | FIRST | LAST


def padded(width: int) -> int:
    """Return the next multiple of `LANES`."""
    return -(-width // LANES) * LANES


@dataclass(frozen=True)
class BlockPlan:
    """Sizes and flags of one call of the kernels. K and V are padded; NT counts chunks per row.

    `rank` is that of the decay (1: KDA, 0: GDN or none). `operand` names the dtype of dot operands
    and of the kept states, `sums` that of sums and of the states in VMEM. `heads` value heads share
    a program. They have one key head (`shared`), or each its own.
    """

    B: int
    NT: int
    N: int
    H: int
    HV: int
    K: int
    V: int
    rank: int
    scale: float
    l2norm: bool
    operand: str
    sums: str
    packed: bool
    interpret: Any

    @classmethod
    def of(cls, p: Problem, dtype, sums, interpret) -> BlockPlan:
        """Return the plan of a parsed call whose dot operands have `dtype`."""
        packed = p.cu_seqlens is not None
        # sequences that end inside a chunk, empty ones included, add at most one chunk each
        NT = p.T // CHUNK + p.N if packed else -(-p.T // CHUNK)
        return cls(
            p.B,
            NT,
            p.N,
            p.H,
            p.HV,
            padded(p.K),
            padded(p.V),
            p.rank if p.g is not None else 0,
            float(p.scale),
            p.l2norm,
            jnp.dtype(dtype).name,
            jnp.dtype(sums).name,
            packed,
            interpret,
        )

    @property
    def shared(self) -> bool:
        """Whether several value heads read one key head."""
        return self.HV > self.H

    @property
    def heads(self) -> int:
        """Value heads per program: what 16 MiB of VMEM hold on v5e and v5p, the smallest limit."""
        wide = max(self.K, self.V) // LANES
        most = (4 if jnp.dtype(self.operand).itemsize == 2 else 2) // wide or 1
        of = self.HV // self.H if self.shared else self.HV
        return max(n for n in (1, 2, 4) if n <= most and of % n == 0)

    @property
    def key_heads(self) -> int:
        """Key heads of dq and dk as the kernel writes them: the sum over a program's heads."""
        return self.HV // self.heads if self.shared else self.HV

    @property
    def rows(self) -> int:
        """Rows of the token axis, whole chunks."""
        return self.NT * CHUNK

    def blocks(self) -> dict[str, tuple[tuple[int, ...], Any]]:
        """Block shape and index map of every kind of array; the maps take (b, h, t, table)."""
        n, K, V = self.heads, self.K, self.V
        group, keys = self.HV // self.H, 1 if self.shared else self.heads

        def key(b, h, t, table):  # lax.div: // asks which TPU it is; of int32, with x64 on too
            return b, t, lax.div(h * n, jnp.int32(group)) if self.shared else h

        def per_head(b, h, t, table):
            return b, t, h

        def chunk(b, h, t, table):
            return b, h, t, 0, 0

        def state(b, h, t, table):
            return b + (table[t] >> NEXT), h, 0, 0

        return {
            "key": ((1, CHUNK, keys * K), key),
            "dkey": ((1, CHUNK, keys * K), per_head),
            "K": ((1, CHUNK, n * K), per_head),
            "V": ((1, CHUNK, n * V), per_head),
            "row": ((1, n, 1, 1, CHUNK), chunk),
            "states": ((1, n, 1, V, K), chunk),
            "state": ((1, n, V, K), state),
        }

    def shape(self, kind: str) -> tuple[int, ...]:
        """Return the shape of a whole array of a kind of `blocks`."""
        B, R, HV, K, V = self.B, self.rows, self.HV, self.K, self.V
        return {
            "key": (B, R, self.H * K),
            "dkey": (B, R, self.key_heads * K),
            "K": (B, R, HV * K),
            "V": (B, R, HV * V),
            "row": (B, HV, self.NT, 1, CHUNK),
            "states": (B, HV, self.NT, V, K),
            "state": (self.N, HV, V, K),
        }[kind]
