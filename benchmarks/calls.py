"""Calls of the operators that compile without a GPU, on meta tensors (`benchmarks.budgets`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kda_ops import convolution, norm
from kda_ops.problem import Problem
from kda_ops.stages import GRADIENTS


@dataclass(frozen=True)
class Call:
    """Hold a call to compile; the defaults are those of a layer."""

    rank: int = 1
    dtype: torch.dtype = torch.bfloat16
    K: int = 128
    V: int = 128
    gate: str = "bound"
    keep: bool = False
    packed: bool = False
    pool: torch.dtype | None = None  # one token per sequence on a pool of states
    transposed: bool = False
    # chunks prepared before the scan of one sequence; the others overlap it; 0: all of them
    ahead: int = 0
    run: int = 0  # chunks per run, where sequences are cut (backends/triton/stages/runs.py)
    shard: bool = False  # the first halves of forward and backward (kda_ops/shard.py)
    group: int = 2  # value heads per key head
    gates: bool = False  # the decay by itself, forward and backward
    # as walks: KDA's forward, with `keep` its training, or GDN's backward with `keep`
    # (backends/triton/stages/walk.py, walk_back.py and reverse_walk.py)
    walk: bool = False
    states: bool = False  # `disable_recompute`: training keeps the states too
    shares: int = 0  # programs that prepare for each one that scans, in a kernel of their own
    # so few heads that scans take half the columns each: on a GPU that has multiprocessors for all
    # of them at once
    few: bool = False
    invariant: bool = False  # kernels in their one form for all calls
    # on a pool of states, with snapshots, null slots and sequences that begin anew
    prefill: bool = False

    @property
    def label(self) -> str:
        """Return the label of the call's rows."""
        name = (
            f"{'kda' if self.rank else 'gdn'} {str(self.dtype)[6:]} {self.K}x{self.V} {self.gate}"
        )
        if self.pool is not None:
            return f"{name} on {str(self.pool)[6:]} {'vk' if self.transposed else 'kv'}"
        marks = {
            "keep": self.keep,
            "packed": self.packed,
            "runs": self.run,
            "shard": self.shard,
            "ahead": self.ahead,
            "few": self.few,
            "gate": self.gates,
            "walk": self.walk,
            "states": self.states,
            "apart": self.shares,
            "invariant": self.invariant,
            "prefill": self.prefill,
            "grouped": (self.rank > 0 or self.walk) and self.group > 1,
        }
        return " ".join([name, *(mark for mark, there in marks.items() if there)])

    def problem(self) -> Problem:
        """Build the call on meta tensors."""
        B, T, H, HV = 1 if self.packed or self.ahead else 2, 4096, 32 // self.group, 32
        if self.pool is not None:
            B, T = 128, 1
        fp32, index = torch.float32, torch.int32

        def empty(*shape: int, dtype: torch.dtype = self.dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device="meta")

        D = (self.K,) if self.rank else ()
        activated, promised = self.gate in ("bound", "softplus"), self.gate == "promised"
        flags: dict[str, Any] = dict(
            use_qk_l2norm_in_kernel=activated,
            use_gate_in_kernel=activated,
            use_beta_sigmoid_in_kernel=activated,
            lower_bound=-5.0 if self.gate == "bound" else None,
        )
        g = empty(B, T, HV, *D, dtype=self.dtype if activated else fp32)
        gate = (empty(HV, dtype=fp32), empty(HV, *D, dtype=fp32)) if activated else (None, None)
        q, k = (empty(B, T, H, self.K) for _ in range(2))
        x = q, k, empty(B, T, HV, self.V), g, empty(B, T, HV)
        if self.pool is not None:
            width = (self.V, self.K) if self.transposed else (self.K, self.V)
            state, slots = empty(B, HV, *width, dtype=self.pool), empty(B, dtype=index)
            flags["transpose_state_layout"] = self.transposed
            return Problem.parse_step(self.rank, *x, state, slots, None, *gate, **flags)
        if self.prefill:
            N, state = 8 if self.packed else B, empty(64, HV, self.K, self.V, dtype=fp32)
            slots, snapshots = empty(N, dtype=index), empty(N, 4, dtype=index)
            rest = empty(N + 1, dtype=index) if self.packed else None, empty(N, dtype=torch.bool)
            given = *x, state, slots, snapshots, *gate, *rest
            return Problem.parse_prefill(self.rank, *given, null_slot=0, **flags)
        return Problem.parse(
            self.rank,
            *(*x, *gate, None, empty(9, dtype=index) if self.packed else None),
            output_final_state=True,
            safe_gate=promised or self.gate == "safe",
            safe_beta=promised,
            safe_keys=promised,
            disable_recompute=self.states,
            invariant=self.invariant,
            sharded=self.shard,
            **flags,
        )

    def compile(self) -> None:
        """Launch the kernels of the call.

        That is prepare and scan as in inference, or all of training's backward with `keep`, or the
        step on a pool, or the gate.
        """
        from kda_ops.backends.triton import tuning
        from kda_ops.backends.triton.plans import launch

        rules = dict(run=self.run, ahead=self.ahead or None, walk=self.walk, shares=self.shares)
        with tuning.force(**rules), launch.uniform(self.invariant):
            p = self.problem()
            with tuning.force(processors=2 * tuning.pieces(p) * p.HV if self.few else 0):
                self._launch(p)

    def _launch(self, p: Problem) -> None:
        from kda_ops.backends.triton import BACKEND as kernels
        from kda_ops.backends.triton.stages import walk

        if self.pool is not None:
            return kernels.step(p, p.new_output(), p.state)
        if self.gates:
            assert p.g is not None  # a gate's call has its logits
            parameters = p.A_log, p.dt_bias, p.gate, p.rank
            kernels.gate_backward(kernels.gate(p.g, *parameters), p.g, *parameters)
            return None
        if self.prefill:
            assert walk.walks_forward(p, p.state) == self.walk
            return kernels.infer(p, p.new_output(), p.state)
        if self.walk and not self.keep:
            assert walk.walks_forward(p, None)
            return kernels.infer(p, p.new_output(), p.new_final_state())
        need = frozenset(n for n, x in zip(GRADIENTS, p.differentiable()) if x is not None)
        if self.walk and self.rank:
            assert kernels.walks_back(p, need)
            kept = kernels.train(p, p.new_output(), p.new_final_state())
            kernels.walk_back(p, kept, p.new_output(), None, need)
            return None
        with_AP = self.keep and kernels.keeps.keeps_AP(p)
        tile = kernels.prepare(
            p, with_AP=with_AP, norms=self.keep and not with_AP, overlap=self.ahead > 0
        )
        if with_AP:  # as backward calls it
            tile = kernels.prepare(p, tile.AP, with_AP=True, norms=True)
        if self.shard:
            for back in (False, True):
                given = (p.new_output(), None) if back else ()
                _, runs = (kernels.map_shard_back if back else kernels.map_shard)(p, tile, *given)
                kernels.starts_of_runs(p, runs, back, None)
            return None
        o = (
            p.new_output()
            if not self.keep or "o" in kernels.keeps.names(p.rank, p.q.dtype, p.l2norm, True)
            else None
        )
        trace = kernels.scan(p, tile, o, None if self.keep else p.new_final_state(), self.keep)
        if self.keep:
            do = p.new_output()
            if self.walk:
                assert trace is not None and kernels.walks(p, do, None, need)
                kernels.reverse_walk(p, tile, trace, do, None, need)
                return
            reverse = kernels.reverse_scan(p, tile, do, None, need)
            assert trace is not None  # as keep asks
            kernels.gradient(p, tile, trace, do, reverse, need)


@dataclass(frozen=True)
class LayerCall:
    """A convolution of 16 heads of 128 channels, or the gated norm of such heads."""

    op: str  # "conv" or "norm"
    gate: str = "silu"  # the activation
    dtype: torch.dtype = torch.bfloat16
    packed: bool = False
    pool: bool = False  # one token per sequence on a pool of tails

    @property
    def label(self) -> str:
        """Return the label of the call's rows."""
        marks = " packed" * self.packed + " on a pool" * self.pool
        return f"{self.op} {str(self.dtype)[6:]} {self.gate}{marks}"

    def _empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype, device="meta")

    def compile(self) -> None:
        """Launch forward and backward, or decode on a pool."""
        from kda_ops.backends.triton import BACKEND

        flags: dict[str, Any] = {"activation": self.gate}
        inputs: tuple[torch.Tensor | None, ...]
        if self.op == "norm":
            x = self._empty(2, 4096, 16, 128)
            inputs = x, self._empty(1, 128), x
            BACKEND.run(norm.NormPass, 0, inputs, flags)
            BACKEND.run(norm.NormBackwardPass, 0, (x, *inputs), flags)
            return
        weight, bias = self._empty(2048, 4), self._empty(2048)
        if self.pool:
            pool, slots = self._empty(256, 3, 2048), self._empty(128, dtype=torch.int32)
            inputs = self._empty(128, 1, 2048), weight, None, pool, slots
            BACKEND.run(convolution.ConvolveInPlace, 0, inputs, flags)
            return
        x, tail, offsets = self._empty(2, 4096, 2048), None, None
        if self.packed:
            x, tail = self._empty(1, 4096, 2048), self._empty(8, 3, 2048)
            offsets = self._empty(9, dtype=torch.int32)
        inputs = x, weight, bias if self.packed else None, tail, offsets
        flags |= {"output_final_tail": self.packed}
        BACKEND.run(convolution.Convolve, 0, inputs, flags)
        cotangents = x, tail if self.packed else None
        BACKEND.run(convolution.ConvolveBackward, 0, (*cotangents, *inputs), flags | {"need": 15})
