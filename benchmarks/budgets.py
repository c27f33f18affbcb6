"""The calls that are compiled without a GPU, and what each of their kernels may take on sm_90.

A row of `TABLE` is a call, a kernel and its limits. ``python -m benchmarks compile`` holds each
kernel to its row. A kernel that the rows of its call lack is an error, as is a row whose kernel the
call does not launch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch

from benchmarks.calls import Call, LayerCall

# the versions of Triton that have limits of their own
TRITONS: tuple[tuple[int, ...], ...] = ((3, 6), (3, 7), (3, 8), (3, 9))
# A kernel may have at most MARGIN times the instructions that the best of these versions needs.
MARGIN = 1.1


@dataclass(frozen=True)
class Limits:
    """The most that a kernel may take: stack and registers per thread, and instructions."""

    stack: tuple[int, ...]  # bytes, with each of `TRITONS`; four equal ones are the largest of four
    instructions: int | None = None  # the fewest of these versions; None: as many as it likes
    registers: int = 255  # fewer where more programs are to run at once

    def faults(
        self, registers: int, stack: int, instructions: int, triton: tuple[int, ...]
    ) -> list[str]:
        """List what a kernel exceeds with this version of Triton.

        A version without limits of its own has the largest of the four.
        """
        found = []
        known = triton[:2] in TRITONS
        budget = self.stack[TRITONS.index(triton[:2])] if known else max(self.stack)
        if stack > budget:
            found.append(f"{stack} bytes of stack, the budget is {budget}")
        fewest = self.instructions
        if fewest is not None and instructions > MARGIN * fewest:
            found.append(
                f"{instructions} instructions, the best version of triton takes {fewest}: the "
                f"budget is {MARGIN} times as many"
            )
        if registers > self.registers:
            found.append(
                f"{registers} registers, the budget is {self.registers}: fewer programs run at once"
            )
        return found


def most(*stack: int, instructions: int | None = None, registers: int = 255) -> Limits:
    """Return limits with one number of bytes for every Triton, or with four."""
    return Limits(stack if len(stack) > 1 else stack * len(TRITONS), instructions, registers)


kda, gdn, layer = partial(Call, 1), partial(Call, 0), LayerCall

# Limits of kernels that calls share.
PREPARE_KDA = {"prepare_kda": most(32, 56, 64, 112, instructions=4304)}
SOFTPLUS_KDA = {"prepare_kda": most(48, 208, 72, 264, instructions=5728), "scan_kda": most(80)}
PROMISED_KDA = {"prepare_kda": most(0, 56, 56, 64, instructions=3488), "scan_kda": most(0)}
FORWARD_KDA = PREPARE_KDA | {"scan_kda": most(104)}
FORWARD_FEW_KDA = PREPARE_KDA | {"scan_kda": most(136, 136, 136, 272)}
GRADIENTS_KDA = {
    "gradient_pairs": most(120, registers=168),
    "sum_decays": most(0, registers=64),
    "gradient_keys": most(288, 328, 280, 256),
    "sum_gradients": most(0, registers=64),
}
BACKWARD_KDA = {"reverse_scan_kda": most(0)} | GRADIENTS_KDA
BACKWARD_FEW_KDA = {"reverse_scan_kda": most(0, 8, 8, 24)} | GRADIENTS_KDA
PREPARE_GDN = {"prepare_gdn": most(96, 112, 104, 152, registers=168)}
FORWARD_GDN = PREPARE_GDN | {"scan_gdn": most(8)}
FORWARD_FEW_GDN = PREPARE_GDN | {"scan_gdn": most(0, 8, 0, 104)}
SOFTPLUS_GDN = {"prepare_gdn": most(88, 120, 112, 144, registers=168), "scan_gdn": most(0)}
BACKWARD_GDN = {
    "reverse_scan_gdn": most(8),
    "gradient_gdn": most(1440, 1368, 1280, 1480, instructions=6328),
}
RECUR = {"recur": most(0, registers=168)}
JOIN_RUNS = {"join_runs": most(0)}
GATHER_HEADS = {"gather_heads": most(0, registers=64)}
ADD_PARTS = {"add_parts": most(0, registers=64)}
FINISH_WALK = {"finish_walk": most(0, registers=128)}
CONVOLVE = {"convolve": most(0, registers=128)}
CONVOLVE_GRADIENT = {"convolve_gradient": most(80, registers=128)}
NORMALISE = {"normalise": most(0, registers=128), "normalise_gradient": most(8)}

# The configurations of a layer.
TABLE: dict[Call | LayerCall, dict[str, Limits]] = {
    kda(group=1): FORWARD_KDA,
    kda(keep=True, group=1): FORWARD_KDA | BACKWARD_KDA,
    kda(gate="softplus", group=1): SOFTPLUS_KDA,
    kda(gate="softplus", keep=True, group=1): SOFTPLUS_KDA | BACKWARD_KDA,
    gdn(): FORWARD_GDN,
    gdn(keep=True): FORWARD_GDN | BACKWARD_GDN,
    gdn(gate="softplus"): SOFTPLUS_GDN,
    gdn(gate="softplus", keep=True): SOFTPLUS_GDN
    | {
        "reverse_scan_gdn": most(8),
        "gradient_gdn": most(1440, 1368, 1280, 1480, instructions=6352),
    },
    kda(pool=torch.float32): RECUR,
    kda(pool=torch.float32, transposed=True): RECUR,
    kda(pool=torch.bfloat16): RECUR,
    kda(pool=torch.bfloat16, transposed=True): RECUR,
    kda(gate="promised", group=1): PROMISED_KDA,
    gdn(gate="promised"): {
        "prepare_gdn": most(96, 88, 80, 144, registers=168),
        "scan_gdn": most(0),
    },
    kda(gate="promised", keep=True, group=1): PROMISED_KDA
    | {
        "reverse_scan_kda": most(0),
        "gradient_pairs": most(0, registers=168),
        "sum_decays": most(0, registers=64),
        "gradient_small": most(0, registers=168),
        "gradient_keys": most(352),
        "sum_gradients": most(0, registers=64),
    },
    # With 226 KB of shared memory, L1 cannot hold 100 B of stack per thread in a scan that follows
    # `prepare`: 1.5 times as slow.
    kda(ahead=32, group=1): PREPARE_KDA | {"scan_kda": most(0)},
    gdn(ahead=32, group=1): PREPARE_GDN | {"scan_gdn": most(0)},
    kda(group=1, few=True): FORWARD_FEW_KDA,
    kda(keep=True, group=1, few=True): FORWARD_FEW_KDA | BACKWARD_FEW_KDA,
    gdn(group=1, few=True): FORWARD_FEW_GDN,
    gdn(keep=True, group=1, few=True): FORWARD_FEW_GDN
    | {
        "reverse_scan_gdn": most(32, 24, 16, 112),
        "gradient_gdn": most(368, 344, 312, 472, instructions=4208),
    },
    kda(gates=True): {
        "gate_forward": most(0, registers=128),
        "gate_gradient": most(0, registers=168),
    },
    kda(gate="softplus", gates=True): {
        "gate_forward": most(0, registers=128),
        "gate_gradient": most(8, 0, 0, 0, registers=168),  # 3.6: a register short for its mask
    },
    gdn(gate="softplus", gates=True): {
        "gate_forward": most(0, registers=128),
        "gate_gradient": most(8, 0, 0, 0, registers=168),
    },
    kda(gate="softplus", keep=True, group=1, invariant=True): SOFTPLUS_KDA
    | BACKWARD_KDA
    | ADD_PARTS,
    gdn(keep=True, invariant=True): FORWARD_GDN | BACKWARD_GDN | ADD_PARTS,
    kda(packed=True, run=32): FORWARD_KDA | JOIN_RUNS,
    kda(packed=True, run=32, shard=True): FORWARD_KDA | JOIN_RUNS | {"reverse_scan_kda": most(0)},
    kda(packed=True, run=32, group=1, few=True): FORWARD_FEW_KDA | JOIN_RUNS,
    kda(keep=True, packed=True, run=32): FORWARD_KDA | JOIN_RUNS | BACKWARD_KDA | GATHER_HEADS,
    kda(keep=True, packed=True, run=32, group=1, few=True): FORWARD_FEW_KDA
    | JOIN_RUNS
    | BACKWARD_FEW_KDA,
    gdn(packed=True, run=32): FORWARD_GDN | JOIN_RUNS,
    gdn(packed=True, run=32, shard=True): FORWARD_GDN | JOIN_RUNS | {"reverse_scan_gdn": most(8)},
    gdn(packed=True, run=32, group=1, few=True): FORWARD_FEW_GDN | JOIN_RUNS,
    gdn(keep=True, packed=True, run=32): FORWARD_GDN | JOIN_RUNS | BACKWARD_GDN,
    gdn(keep=True, packed=True, run=32, group=1, few=True): FORWARD_FEW_GDN
    | JOIN_RUNS
    | {
        "reverse_scan_gdn": most(32, 24, 16, 112),
        "gradient_gdn": most(368, 344, 312, 472, instructions=4296),
    },
    kda(walk=True): {"walk_kda": most(8, 0, 0, 96)},
    kda(gate="promised", packed=True, group=1, walk=True): {"walk_kda": most(8, 0, 8, 136)},
    kda(gate="safe", group=1, walk=True): {"walk_kda": most(8, 0, 8, 136)},
    # decays without a bound, which walk only where `tuning.force` says so
    kda(gate="softplus", group=1, walk=True): {"walk_kda": most(40, 40, 48, 264)},
    kda(gate="plain", packed=True, group=1, walk=True): {"walk_kda": most(48, 56, 72, 200)},
    kda(gate="softplus", group=1, walk=True, shares=3): {
        "prepare_walk": most(0),
        "scan_walk": most(0, 0, 0, 16),
    },
    kda(gate="plain", packed=True, group=1, walk=True, shares=5): {
        "prepare_walk": most(0),
        "scan_walk": most(0, 0, 0, 16),
    },
    kda(walk=True, shares=3): {"prepare_walk": most(0), "scan_walk": most(0, 0, 0, 16)},
    kda(gate="promised", packed=True, group=1, walk=True, shares=2): {
        "prepare_walk": most(0),
        "scan_walk": most(0, 0, 0, 16),
    },
    # A state that is also stored as a snapshot costs stack, with and without the other options.
    kda(packed=True, group=1, prefill=True): PREPARE_KDA | {"scan_kda": most(216, 216, 152, 192)},
    gdn(packed=True, prefill=True): PREPARE_GDN | {"scan_gdn": most(216, 216, 216, 296)},
    gdn(packed=True, run=32, prefill=True): PREPARE_GDN
    | {"scan_gdn": most(288, 192, 248, 288)}
    | JOIN_RUNS,
    kda(packed=True, walk=True, prefill=True): {"walk_kda": most(144, 112, 120, 424)},
    kda(packed=True, walk=True, shares=3, prefill=True): {
        "prepare_walk": most(0),
        "scan_walk": most(24, 8, 8, 136),
    },
    kda(keep=True, walk=True): {
        "walk_kda": most(8, 0, 0, 136),
        "states_kda": most(8, 0, 0, 16),
        "reverse_walk_kda": most(216, 208, 192, 376),
        "finish_back": most(0),
    }
    | GATHER_HEADS,
    kda(gate="promised", keep=True, packed=True, group=1, walk=True): {
        "walk_kda": most(16, 0, 8, 144),
        "states_kda": most(8, 0, 0, 8),
        "reverse_walk_kda": most(200, 216, 200, 280),
        "finish_back": most(0, 0, 0, 8),
    },
    kda(keep=True, walk=True, states=True): {
        "walk_kda": most(8, 0, 8, 112),
        "reverse_walk_kda": most(216, 208, 192, 376),
        "finish_back": most(0),
    }
    | GATHER_HEADS,
    kda(gate="promised", keep=True, packed=True, group=1, walk=True, states=True): {
        "walk_kda": most(16, 0, 8, 152),
        "reverse_walk_kda": most(200, 216, 200, 280),
        "finish_back": most(0, 0, 0, 8),
    },
    gdn(keep=True, group=1, walk=True): FORWARD_GDN
    | {"reverse_walk_gdn": most(0, 0, 24, 24, instructions=3120)}
    | FINISH_WALK,
    gdn(gate="softplus", keep=True, packed=True, walk=True): SOFTPLUS_GDN
    | {"reverse_walk_gdn": most(0, 0, 24, 16, instructions=3200)}
    | FINISH_WALK
    | GATHER_HEADS,
    gdn(gate="plain", keep=True, packed=True, group=1, walk=True): {
        "prepare_gdn": most(0, registers=168),
        "scan_gdn": most(0),
        "reverse_walk_gdn": most(0, 0, 0, 8, instructions=3032),
    }
    | FINISH_WALK,
    gdn(keep=True, packed=True, run=32, walk=True): FORWARD_GDN
    | JOIN_RUNS
    | {"reverse_scan_gdn": most(8), "reverse_walk_gdn": most(16, 16, 40, 8, instructions=3344)}
    | FINISH_WALK
    | GATHER_HEADS,
    gdn(gate="softplus", keep=True, group=1, run=32, walk=True): SOFTPLUS_GDN
    | JOIN_RUNS
    | {"reverse_scan_gdn": most(8), "reverse_walk_gdn": most(0, 0, 32, 24, instructions=3312)}
    | FINISH_WALK,
    layer("conv", packed=True): {
        "convolve": most(0, registers=128),
        "write_tails": most(0, registers=64),
        "convolve_gradient": most(80, registers=128),
        "tail_gradient": most(0, registers=128),
    },
    layer("conv"): CONVOLVE | CONVOLVE_GRADIENT,
    layer("conv", pool=True): CONVOLVE,
    layer("norm", gate="sigmoid"): {
        "normalise": most(0, registers=128),
        "normalise_gradient": most(0),
    },
    layer("norm"): NORMALISE,
    layer("conv", dtype=torch.float32): CONVOLVE | CONVOLVE_GRADIENT,
    layer("norm", dtype=torch.float32): NORMALISE,
    layer("conv", dtype=torch.float32, pool=True): CONVOLVE,
}

# Dtypes and widths of other callers. Their kernels have no limits but shared memory.
OTHERS: tuple[Call, ...] = (
    kda(dtype=torch.float32, gate="softplus", group=1),
    gdn(dtype=torch.float32, gate="softplus"),
    gdn(dtype=torch.float16, gate="softplus", keep=True, group=1, walk=True),
    kda(dtype=torch.float16, gate="plain"),
    gdn(dtype=torch.float16, gate="plain"),
    kda(K=256, V=256),
    kda(dtype=torch.float16, K=130, V=24, gate="plain"),
    gdn(K=64, V=64, gate="softplus", keep=True),
    kda(dtype=torch.float32, K=16, V=16, gate="plain", group=1),
    kda(dtype=torch.float32, K=16, V=16, gate="plain", keep=True, group=1),
    kda(dtype=torch.float32, K=256, V=256, gate="plain", group=1),
    gdn(dtype=torch.float32, K=16, V=16, gate="plain", group=1),
    gdn(dtype=torch.float32, K=16, V=16, gate="plain", keep=True, group=1),
    gdn(dtype=torch.float32, K=256, V=256, gate="plain", group=1),
)

# One call of each kernel, for the architectures that they have never run on.
ELSEWHERE: tuple[Call | LayerCall, ...] = (
    kda(group=1),
    kda(keep=True, group=1),
    gdn(),
    gdn(keep=True),
    kda(keep=True),
    gdn(dtype=torch.float32, gate="plain", keep=True),
    kda(pool=torch.float32),
    kda(packed=True, run=32),
    kda(packed=True, run=32, shard=True),
    gdn(gate="softplus", gates=True),
    layer("conv", packed=True),
    layer("conv"),
    layer("conv", pool=True),
    layer("norm", gate="sigmoid"),
)


def everything() -> Iterator[Call]:
    """Yield dtypes, widths, gates and modes.

    Neighbours differ in variant, dtype or width. Processes that take them in turn then seldom
    compile the same kernel at once.
    """
    gates = "bound", "softplus", "plain", "safe"
    for gate, keep, packed in product(gates, (False, True), (False, True)):
        for rank, dtype, K in product(
            (1, 0), (torch.bfloat16, torch.float16, torch.float32), (16, 60, 64, 128, 256)
        ):
            V, group = (128, 2) if packed else (K, 2 - rank)
            yield Call(rank, dtype, K, V, gate, keep, packed, group=group)
