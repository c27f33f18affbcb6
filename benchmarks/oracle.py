"""The errors of a call, and what rounding allows: a call over its budget is not timed."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.cases import Case, flags
from kda_ops import dispatch
from kda_ops.backends.reference import Reference
from kda_ops.problem import Problem
from kda_ops.registrations import schemas
from kda_ops.stages import Backend
from kda_ops.tools.timer import relative_error

HEADS = {"cpu": 8, "cuda": 96}  # at most so many key heads are compared
# Tokens times value heads in one go, which takes about 70 float64 numbers per channel of each.
AT_ONCE = 2**19


class Oracle:
    """Hold the float64 result and the error budget of a case, on the device of its inputs.

    Key heads are independent, so some of them, spread evenly, tell the error of all. They are many,
    because A_log has one gradient per head: of two heads its error would be chance. An error is a
    relative RMS. The budget is twice the error of the twin plus what rounding to the case's dtype
    may add. (Tests allow for the largest entry too. Over tensors as large as these, whose largest
    entry is hundreds of times the RMS, that would allow anything.)
    """

    def __init__(self, case: Case, x: dict[str, Tensor], do: Tensor | None):
        self.case, self.training = case, do is not None
        H, self.group = case.sizes["H"], case.sizes["HV"] // case.sizes["H"]
        count, device = min(H, HEADS[x["q"].device.type]), x["q"].device
        spread = sorted({round(i * (H - 1) / max(1, count - 1)) for i in range(count)})
        self.key_heads = torch.tensor(spread, device=device)
        # On CUDA the definition itself, which is plain torch and takes any dtype.
        exact: Backend = dispatch.load("native") if device.type == "cpu" else Reference()
        twin = Reference(operand=case.dtype if case.dtype.itemsize == 2 else None)
        tensors = x if do is None else x | {"do": do}
        tokens = case.sizes["B"] * case.sizes["T"] * self.group
        found: list[list[dict[str, Tensor]]] = [[], []]
        for heads in self.key_heads.split(max(1, AT_ONCE // tokens)):
            some = self._cut(tensors, heads)
            for parts, backend, dtype in zip(found, (exact, twin), (torch.float64, torch.float32)):
                parts.append(self._stages(backend, some, dtype))
        self.exact, rounded = (
            {n: torch.cat([p[n] for p in parts], _heads_axis(n)) for n in parts[0]}
            for parts in found
        )
        eps = torch.finfo(case.dtype).eps
        self.limits = {n: 2 * (self._error(n, t) + eps) for n, t in rounded.items()}

    def _cut(self, tensors: dict[str, Tensor], key_heads: Tensor) -> dict[str, Tensor]:
        # whole groups, over which dq and dk sum
        one_group = torch.arange(self.group, device=key_heads.device)
        heads = (key_heads[:, None] * self.group + one_group).flatten()
        return {
            n: t.detach().index_select(_heads_axis(n), key_heads if n in ("q", "k") else heads)
            for n, t in tensors.items()
        }

    def _stages(
        self, backend: Backend, tensors: dict[str, Tensor], dtype: torch.dtype
    ) -> dict[str, Tensor]:
        args = {n: t for n, t in tensors.items() if n != "do"}
        p = Problem.parse(schemas.VARIANTS[self.case.op], **args, **flags(self.case))
        for n, t in args.items():  # only here, for a call in float64 would be refused on CUDA
            setattr(p, n, t.to(dtype))
        p.state_dtype = dtype
        tile, o = backend.prepare(p), p.new_output()
        trace = backend.scan(p, tile, o, None, keep=self.training)
        if trace is None:
            return {"o": o}
        do = tensors["do"].to(dtype)
        reverse = backend.reverse_scan(p, tile, do, None, frozenset(args))
        grads = vars(backend.gradient(p, tile, trace, do, reverse, frozenset(args)))
        return {"o": o} | {n: grads[n] for n in args}

    def _error(self, name: str, got: Tensor) -> float:
        return relative_error(got, self.exact[name])

    def errors(self, got: dict[str, Tensor]) -> dict[str, float]:
        """Return the error of each tensor of a result ``{"o": .., "q": gradient, ..}``."""
        return {n: self._error(n, t) for n, t in self._cut(got, self.key_heads).items()}

    def worst_share(self, errors: dict[str, float]) -> float:
        """Return the largest share of its budget that an error takes."""
        return max(e / self.limits[n] for n, e in errors.items())


def _heads_axis(name: str) -> int:
    return 0 if name in ("A_log", "dt_bias") else 2
