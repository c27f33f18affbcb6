"""What the benchmark runs: a case, its inputs, and how wrong a result is.

Everything is random and the same for both sides of a row: the inputs of a case follow from its name.
"""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass, field, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kda_ops import dispatch
from kda_ops.backends.reference import Reference
from kda_ops.problem import Problem
from kda_ops.registrations import schemas

PASSES = ("fwd", "fwdbwd", "decode", "first_call_s")
GATES = ("bound", "softplus", "strong", "weak")
STAGES = {"fwd": ("prepare", "scan"), "fwdbwd": ("prepare", "scan", "reverse_scan", "gradient"), "decode": ("step",), "first_call_s": ("prepare", "scan")}
SETTINGS = {"cuda": ("B1T8192H96", "B8T4096H32"), "cpu": ("B1T2048H8",)}
DECODE_SETTINGS = {"cuda": ("B128T1H32", "B8T1H32", "B1T1H32"), "cpu": ("B8T1H8",)}
WIDTH = 128  # K = V
LOWER_BOUND = -5.0
INPUTS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias")


@dataclass(frozen=True)
class Case:
    """One row's left side. `setting` is B, T, H and, where they differ, HV and D: ``B1T8192H96``, ``B1T65536H16HV32``, ``B1T256H2D64``.

    `gate`: "bound" and "softplus" run norm, gate and sigmoid inside the operator; "strong" and "weak" give unit keys, beta in (0, 1) and a
    log decay uniform in [-5, 0] or [-0.1, 0].
    """

    op: str  # "kda" or "gdn"
    pass_: str
    setting: str
    gate: str
    device: str
    dtype: torch.dtype
    state: str = "fp32"
    layout: str = "kv"
    sizes: dict[str, int] = field(init=False, compare=False, repr=False)

    def __post_init__(self):
        found = dict(re.findall(r"(HV|B|T|H|D)(\d+)", self.setting))
        if "".join(a + b for a, b in found.items()) != self.setting or not {"B", "T", "H"} <= set(found):
            raise ValueError(f"a setting is written like B1T8192H96 (then HV.., D..), got {self.setting!r}.")
        sizes = {"HV": found["H"], "D": str(WIDTH)} | found
        object.__setattr__(self, "sizes", {n: int(x) for n, x in sizes.items()})

    @property
    def inside(self) -> bool:
        """Whether norm, gate and sigmoid run inside the operator."""
        return self.gate in ("bound", "softplus")

    @property
    def whole(self) -> bool:
        """Whether whole sequences are timed on the device, and nothing of the host; a peer that tunes its kernels has many to compile for them."""
        return self.pass_ in ("fwd", "fwdbwd")

    @property
    def lower_bound(self) -> float | None:
        """The bound of a bounded gate."""
        return LOWER_BOUND if self.gate == "bound" else None

    def spec(self) -> dict[str, str]:
        """What `Case.read` makes this case from, in another process."""
        return {f.name: str(getattr(self, f.name)).removeprefix("torch.") for f in fields(self) if f.init}

    @classmethod
    def read(cls, spec: dict[str, str]) -> Case:
        """The case of a `spec`."""
        return cls(**spec | {"dtype": getattr(torch, spec["dtype"])})

    def key(self) -> dict[str, str]:
        """The columns that name the row."""
        return {"op": self.op, "pass": self.pass_, "setting": self.setting, "gate": self.gate, "state": self.state, "layout": self.layout}


def make_inputs(case: Case) -> dict[str, Tensor]:
    """q, k, v, g, beta in the case's dtype (a given decay in fp32), and A_log, dt_bias in fp32 where the gate is inside."""
    B, T, H, HV, D = (case.sizes[n] for n in ("B", "T", "H", "HV", "D"))
    generator = torch.Generator(device=case.device).manual_seed(zlib.crc32(f"{case.op}{case.setting}{case.gate}".encode()))

    def draw(make, *shape):
        return make(shape, generator=generator, device=case.device)

    decay = (B, T, HV, D) if case.op == "kda" else (B, T, HV)
    x = {"q": draw(torch.randn, B, T, H, D), "k": draw(torch.randn, B, T, H, D), "v": draw(torch.randn, B, T, HV, D)}
    if case.inside:
        x |= {"g": draw(torch.randn, *decay), "beta": draw(torch.randn, B, T, HV)}
        x = {n: t.to(case.dtype) for n, t in x.items()}
        return x | {"A_log": draw(torch.rand, HV).mul(15).add(1).log(), "dt_bias": draw(torch.randn, *decay[2:])}
    x |= {"q": F.normalize(x["q"], dim=-1), "k": F.normalize(x["k"], dim=-1), "beta": draw(torch.rand, B, T, HV)}
    x = {n: t.to(case.dtype) for n, t in x.items()}
    return x | {"g": draw(torch.rand, *decay).mul(-5.0 if case.gate == "strong" else -0.1)}


def flags(case: Case) -> dict[str, Any]:
    """Our keyword arguments."""
    if not case.inside:
        return {}
    return dict(use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, lower_bound=case.lower_bound)


def activated(case: Case, x: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, g, beta after norm, gate and sigmoid in plain torch: for a peer that has none of them inside, within its time."""
    q, k, v, g, beta = (x[n] for n in INPUTS[:5])
    if not case.inside:
        return q, k, v, g, beta
    rate, logits = x["A_log"].exp(), g.float() + x["dt_bias"]
    rate = rate[:, None] if case.op == "kda" else rate
    decay = -rate * F.softplus(logits) if case.lower_bound is None else case.lower_bound * torch.sigmoid(rate * logits)
    q, k = ((t.float() * (t.float().square().sum(-1, keepdim=True) + 1e-6).rsqrt()).to(t.dtype) for t in (q, k))
    return q, k, v, decay, torch.sigmoid(beta)


class Oracle:
    """The float64 result of a case on its first and last key head, the budget that rounding allows there, and the error of a result.

    Key heads do not see each other, so two of them tell the error of all for a hundredth of the work. An error is a relative RMS, the worst over the
    output and, for a training pass, every gradient; the budget is twice the twin's error plus what rounding to the case's dtype may add. (The tests
    allow for the largest entry too; over tensors as large as these, whose largest entry is hundreds of times the RMS, that would allow anything.)
    """

    def __init__(self, case: Case, x: dict[str, Tensor], do: Tensor | None):
        self.case = case
        H, group = case.sizes["H"], case.sizes["HV"] // case.sizes["H"]
        self.key_heads = sorted({0, H - 1})
        self.heads = [h * group + i for h in self.key_heads for i in range(group)]  # whole groups, over which dq and dk sum
        self.training = do is not None
        some = self._cut(x)
        args = {n: t.double() for n, t in some.items()}
        d_o = None if do is None else do[:, :, self.heads].cpu()
        exact = self._stages(dispatch.load("native"), args, None if d_o is None else d_o.double())
        twin_args = {n: t.float() if n in ("q", "k", "v") else t for n, t in some.items()}
        twin = self._stages(Reference(torch.float32, case.dtype if case.dtype.itemsize == 2 else None), twin_args, d_o)
        self.exact = exact
        eps = torch.finfo(case.dtype).eps
        self.limits = {n: 2 * (self._error(n, twin[n]) + eps) for n in exact}

    def _cut(self, x: dict[str, Tensor]) -> dict[str, Tensor]:
        out = {}
        for n, t in x.items():
            axis = 0 if n in ("A_log", "dt_bias") else 2
            index = torch.tensor(self.key_heads if n in ("q", "k") else self.heads, device=t.device)
            out[n] = t.detach().index_select(axis, index).cpu()
        return out

    def _stages(self, backend, args: dict[str, Tensor], do: Tensor | None) -> dict[str, Tensor]:
        p = Problem.parse(schemas.VARIANTS[self.case.op], **args, **flags(self.case))
        tile, o = backend.prepare(p), p.new_output()
        trace = backend.scan(p, tile, o, None, keep=do is not None)
        if do is None:
            return {"o": o.double()}
        reverse = backend.reverse_scan(p, tile, do.to(p.state_dtype), None, False)
        grads = vars(backend.gradient(p, tile, trace, do.to(p.state_dtype), reverse, frozenset(args)))
        return {"o": o.double()} | {n: grads[n].double() for n in args}

    def _error(self, name: str, got: Tensor) -> float:
        want = self.exact[name]
        return _rms(got - want) / (_rms(want) + 1e-30)

    def error(self, got: dict[str, Tensor]) -> tuple[float, float]:
        """The worst error of a result ``{"o": .., "q": gradient, ..}``, and the worst ratio of error to budget."""
        cut = self._cut({n: t for n, t in got.items() if n != "o"}) | {"o": got["o"].detach()[:, :, self.heads].cpu()}
        errors = {n: self._error(n, t.double()) for n, t in cut.items()}
        errors = {n: e if e == e else float("inf") for n, e in errors.items()}
        return max(errors.values()), max(e / self.limits[n] for n, e in errors.items())


def _rms(x: Tensor) -> float:
    return x.square().mean().sqrt().item()
