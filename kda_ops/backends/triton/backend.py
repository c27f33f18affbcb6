"""The Triton backend: run each call by the plan of an earlier call that looked like it.

Without such a plan the stages run, and what they allocate and launch becomes the plan.
"""

from __future__ import annotations

from contextvars import Context
from copy import copy
from typing import Any

import torch
from torch import Tensor

from kda_ops import checks, convolution, recurrent
from kda_ops.backends.triton import tuning
from kda_ops.backends.triton.keeps import KEEPS
from kda_ops.backends.triton.plans import launch
from kda_ops.backends.triton.plans.call_key import CallKey, call_key, exact, named
from kda_ops.backends.triton.plans.descriptors import (
    fit_call,
    fit_state,
    fit_tokens,
    uniform_call,
    uniform_gradients,
)
from kda_ops.backends.triton.plans.plan import Bound, Plan
from kda_ops.backends.triton.plans.recording import Recording
from kda_ops.backends.triton.private import INTERPRET
from kda_ops.backends.triton.stages.gate import gate, gate_backward
from kda_ops.backends.triton.stages.gated_norm import gated_norm, gated_norm_backward
from kda_ops.backends.triton.stages.gradient import gradient
from kda_ops.backends.triton.stages.prepare import prepare
from kda_ops.backends.triton.stages.reverse_scan import map_shard_back, reverse_scan
from kda_ops.backends.triton.stages.reverse_walk import reverse_walk, walks
from kda_ops.backends.triton.stages.runs import starts_of_runs
from kda_ops.backends.triton.stages.scan import map_shard, overlap_scans, scan
from kda_ops.backends.triton.stages.short_conv import (
    short_conv,
    short_conv_backward,
    short_conv_in_place,
)
from kda_ops.backends.triton.stages.step import step
from kda_ops.backends.triton.stages.walk import walk, walk_training, walks_forward
from kda_ops.backends.triton.stages.walk_back import walk_back
from kda_ops.operators import Operator
from kda_ops.problem import Problem
from kda_ops.stages import Backend, Gradients, Pass, Walked

MOST_PLANS = 1024  # of a process; after that all are dropped
# passes that meet the same few sizes thousands of times
_DECODES = frozenset((recurrent.Decode, recurrent.DecodeInto, convolution.ConvolveInPlace))


class _Recorded(Problem):
    """A problem whose sizes carry formulas, and whose results the recording knows."""

    __slots__ = ()

    def new_output(self) -> Tensor:
        return launch.new(self.v, "o", self.v.shape)

    def new_final_state(self) -> Tensor:
        if not self.output_final_state:
            return super().new_final_state()
        width = (self.V, self.K) if self.transposed else (self.K, self.V)
        return launch.new(self.q, "final_state", (self.N, self.HV, *width), self.state_dtype)


class Triton(Backend):
    """The stages as kernels, and the plans that replay them.

    `plans` lists the plans of each key. `decodes` has a plan with its values for each exact size
    that decode has met (`call_key.exact`).
    """

    prepare, scan = staticmethod(prepare), staticmethod(scan)
    reverse_scan = staticmethod(reverse_scan)
    map_shard, map_shard_back = staticmethod(map_shard), staticmethod(map_shard_back)
    starts_of_runs = staticmethod(starts_of_runs)
    gradient, step = staticmethod(gradient), staticmethod(step)
    train = staticmethod(walk_training)
    walks_back = staticmethod(tuning.walks_back)
    walks, reverse_walk = staticmethod(walks), staticmethod(reverse_walk)
    overlap_streams = staticmethod(overlap_scans)
    gate, gate_backward = staticmethod(gate), staticmethod(gate_backward)
    short_conv, short_conv_backward = staticmethod(short_conv), staticmethod(short_conv_backward)
    short_conv_in_place = staticmethod(short_conv_in_place)
    gated_norm, gated_norm_backward = staticmethod(gated_norm), staticmethod(gated_norm_backward)
    cut_length = staticmethod(tuning.cut_length)
    uniform = staticmethod(uniform_call)
    uniform_gradients = staticmethod(uniform_gradients)

    keeps = KEEPS

    def __init__(self) -> None:
        self.plans: dict[tuple, list[Plan]] = {}
        self.decodes: dict[tuple, tuple[Plan, Bound]] = {}

    def forget(self) -> None:
        """Drop all plans."""
        self.plans.clear()
        self.decodes.clear()

    def writes_to(self, out: Tensor) -> bool:
        """Return whether kernels write to a caller's tensor: a contiguous one."""
        return out.is_contiguous()

    def copy_to(self, out: Tensor, o: Tensor) -> None:
        """Copy o to a caller's tensor."""
        launch.copy_to(out, o)

    def infer(self, p: Problem, o: Tensor, final_state: Tensor | None) -> None:
        """Walk where `walks_forward` says so; else run `prepare` and `scan`."""
        if walks_forward(p, final_state):
            walk(p, o, final_state)
        else:
            super().infer(p, o, final_state)

    def walk_back(
        self,
        p: Problem,
        kept: Walked,
        do: Tensor,
        dfinal_state: Tensor | None,
        need: frozenset[str],
    ) -> Gradients:
        """Return the gradients; see `kda_ops.stages.Backend.walk_back`."""
        return walk_back(fit_call(p), kept, fit_tokens(p, do), fit_state(dfinal_state), need)

    def run(self, kind: type[Pass], rank: int, args: tuple, flags: dict[str, Any]) -> Any:
        """Run one pass by a plan that fits the call, or by the stages, which make that plan."""
        if checks.CHECK_VALUES or INTERPRET:
            kind(rank, args, flags)  # checks values; under the interpreter they are on the host
        same: tuple | None = None
        if kind in _DECODES:
            same, args, pointers = exact(kind, rank, args, flags)
            if (known := self.decodes.get(same)) is not None:
                return known[0].run(args, pointers, known[1])
        seen = call_key(kind, rank, args, flags)
        if seen is None:
            return super().run(kind, rank, args, flags)
        for plan in self.plans.get(seen.key, ()):
            bound = plan.bind(seen.numbers)
            if bound is not None:
                if same and all(x is y for x, y in zip(seen.tensors, args)):  # none was copied
                    if len(self.decodes) >= MOST_PLANS:
                        self.decodes.clear()
                    self.decodes[same] = plan, bound
                return plan.run(seen.tensors, seen.pointers, bound)
        if any(x is not None and not x.numel() for x in seen.tensors):  # may launch nothing
            return super().run(kind, rank, args, flags)
        return self._record(kind, rank, seen, flags)

    def _record(self, kind: type[Pass], rank: int, seen: CallKey, flags: dict[str, Any]) -> Any:
        """Run a pass by the stages, and keep its plan."""
        kept = Recording(named(kind, seen))
        # one tensor may be given twice, and the recording tells inputs apart by object
        args = tuple(None if x is None else x.detach() for x in seen.tensors)
        work: Any = kind(rank, args, flags)
        device = next(x.device for x in args if x is not None)
        uniform = flags.get("invariant", False)
        if device.type == "meta":  # offline compilation
            with launch.uniform(uniform):
                return work.run(self)
        if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            # In a context of its own: Triton keeps its mode in a context variable, and does not
            # reset it if a kernel fails to compile.
            with launch.uniform(uniform):
                Context().run(_compile, work, self)
        refs = {
            id(x): kept.take(name, x, *_shape(kind.operator, name, x, kept))
            for name, x in zip(kind.operator.names, args)
        }
        vars(work).update({name: _recorded(x, refs, kept) for name, x in vars(work).items()})
        with launch.recorded(kept), launch.uniform(uniform):
            results = work.run(self)
        plan = Plan(kept, results, device)
        if sum(map(len, self.plans.values())) >= MOST_PLANS:
            self.forget()
        self.plans.setdefault(seen.key, []).append(plan)
        return launch.values(tuple(results))


def _compile(work, b: Triton) -> None:
    """Compile the kernels of a pass in parallel; nothing is launched."""
    with launch.compiling():
        work.run(b)


def _recorded(x: Any, refs: dict[int, Any], kept: Recording) -> Any:
    """Return what a pass has, with refs in the place of its tensors, and sizes of B, T and N."""
    if isinstance(x, Tensor):
        return refs[id(x)]
    if isinstance(x, dict):
        return {name: _recorded(y, refs, kept) for name, y in x.items()}
    if isinstance(x, tuple):
        return tuple(_recorded(y, refs, kept) for y in x)
    if isinstance(x, (Problem, convolution.Convolution)):
        p: Any = copy(x)
        for name in (slot for each in type(x).__mro__ for slot in getattr(each, "__slots__", ())):
            setattr(p, name, _recorded(getattr(p, name), refs, kept))
        p.B, p.T, p.N = (kept.sizes[letter] for letter in "BTN")
        p.__class__ = _Recorded if isinstance(p, Problem) else type(p)
        return p
    return x


def _shape(
    operator: Operator, name: str, x: Tensor | None, kept: Recording
) -> tuple[tuple, tuple | None]:
    """Return the shape of an input as sizes, and its strides as sizes, or None if contiguous."""
    if x is None:
        return (), None
    shape = tuple(kept.sizes.get(letter, n) for letter, n in zip(operator.axes_of(name), x.shape))
    if x.is_contiguous():
        return shape, None
    return shape, tuple(kept.sizes[f"{name}_{i}"] for i in range(x.dim()))


BACKEND = Triton()
