"""What the benchmark runs: a case, its inputs, and how wrong a result is.

Everything is random and the same for both sides of a row: the inputs of a case follow from its
name.
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
from kda_ops.stages import Backend

PASSES = ("fwd", "fwdbwd", "decode", "first_call_s")
PROMISED = ("strong_safe", "weak_safe")
GATES = ("bound", "softplus", "strong", "weak", *PROMISED)
KDA_GATES = ("bound", *PROMISED)  # of which GDN has none
STAGES = {
    "fwd": ("prepare", "scan"),
    "fwdbwd": ("prepare", "scan", "reverse_scan", "gradient"),
    "decode": ("step",),
    "first_call_s": ("prepare", "scan"),
}
SETTINGS = {"cuda": ("B1T8192H96", "B8T4096H32"), "cpu": ("B1T2048H8",)}
DECODE_SETTINGS = {"cuda": ("B128T1H32", "B8T1H32", "B1T1H32"), "cpu": ("B8T1H8",)}
WIDTH = 128  # K = V
LOWER_BOUND = -5.0
INPUTS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias")
HEADS = {"cpu": 8, "cuda": 96}  # at most so many key heads are compared
# tokens times value heads in one go of the oracle, which holds about 70 float64 numbers per channel
# of each: 35 GB
AT_ONCE = 2**19


def parse_setting(text: str) -> dict[str, int]:
    """Its sizes, those by default too."""
    found = {n: int(x) for n, x in re.findall(r"(HV|B|T|H|D)(\d+)", text)}
    if (
        "".join(f"{n}{x}" for n, x in found.items()) != text
        or not {"B", "T", "H"} <= set(found)
        or not all(found.values())
    ):
        raise ValueError(f"a setting is written like B1T8192H96 (then HV.., D..), got {text!r}.")
    sizes = {"HV": found["H"], "D": WIDTH} | found
    if sizes["HV"] % sizes["H"]:
        raise ValueError(f"a setting has an HV that is a multiple of H, got {text!r}.")
    return sizes


@dataclass(frozen=True)
class Case:
    """One row's left side. `setting` is B, T, H and, where they differ, HV and D: ``B1T8192H96``,
    ``B1T65536H16HV32``, ``B1T256H2D64``.

    `gate`: "bound" and "softplus" run norm, gate and sigmoid inside the operator; "strong" and
    "weak" give unit keys, beta in (0, 1) and a log decay uniform in [-5, 0] or [-0.1, 0];
    "strong_safe" and "weak_safe" the same, with the promise that it stays in [-5, 0] (`safe_gate`)
    to either side.
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
        object.__setattr__(self, "sizes", parse_setting(self.setting))

    @property
    def inside(self) -> bool:
        """Whether norm, gate and sigmoid run inside the operator."""
        return self.gate in ("bound", "softplus")

    @property
    def whole(self) -> bool:
        """Whether whole sequences are timed on the device, and nothing of the host; a peer that
        tunes its kernels has many to compile for them.
        """
        return self.pass_ in ("fwd", "fwdbwd")

    @property
    def promised(self) -> bool:
        """Whether the caller promises that a given decay stays within bounds."""
        return self.gate in PROMISED

    @property
    def lower_bound(self) -> float | None:
        """The bound of a bounded gate."""
        return LOWER_BOUND if self.gate == "bound" else None

    def spec(self) -> dict[str, str]:
        """What `Case.read` makes this case from, in another process."""
        return {
            f.name: str(getattr(self, f.name)).removeprefix("torch.")
            for f in fields(self)
            if f.init
        }

    @classmethod
    def read(cls, spec: dict[str, str]) -> Case:
        """The case of a `spec`."""
        return cls(**spec | {"dtype": getattr(torch, spec["dtype"])})

    def key(self) -> dict[str, str]:
        """The columns that name the row."""
        return {
            "op": self.op,
            "pass": self.pass_,
            "setting": self.setting,
            "gate": self.gate,
            "state": self.state,
            "layout": self.layout,
        }


def make_inputs(case: Case) -> dict[str, Tensor]:
    """q, k, v, g, beta in the case's dtype (a given decay in fp32), and A_log, dt_bias in fp32
    where the gate is inside.
    """
    B, T, H, HV, D = (case.sizes[n] for n in ("B", "T", "H", "HV", "D"))
    seed = zlib.crc32(f"{case.op}{case.setting}{case.gate}".encode())
    generator = (
        None if case.device == "meta" else torch.Generator(device=case.device).manual_seed(seed)
    )

    def draw(make, *shape):
        return make(shape, generator=generator, device=case.device)

    decay = (B, T, HV, D) if case.op == "kda" else (B, T, HV)
    x = {
        "q": draw(torch.randn, B, T, H, D),
        "k": draw(torch.randn, B, T, H, D),
        "v": draw(torch.randn, B, T, HV, D),
    }
    if case.inside:
        x |= {"g": draw(torch.randn, *decay), "beta": draw(torch.randn, B, T, HV)}
        x = {n: t.to(case.dtype) for n, t in x.items()}
        return x | {
            "A_log": draw(torch.rand, HV).mul(15).add(1).log(),
            "dt_bias": draw(torch.randn, *decay[2:]),
        }
    x |= {
        "q": F.normalize(x["q"], dim=-1),
        "k": F.normalize(x["k"], dim=-1),
        "beta": draw(torch.rand, B, T, HV),
    }
    x = {n: t.to(case.dtype) for n, t in x.items()}
    return x | {"g": draw(torch.rand, *decay).mul(-5.0 if case.gate.startswith("strong") else -0.1)}


def flags(case: Case) -> dict[str, Any]:
    """Our keyword arguments."""
    if not case.inside:
        return {"safe_gate": True} if case.promised else {}
    return dict(
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        lower_bound=case.lower_bound,
    )


def activated(case: Case, x: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, g, beta after norm, gate and sigmoid in plain torch: for a peer that has none of
    them inside, within its time.
    """
    q, k, v, g, beta = (x[n] for n in INPUTS[:5])
    if not case.inside:
        return q, k, v, g, beta
    rate, logits = x["A_log"].exp(), g.float() + x["dt_bias"]
    rate = rate[:, None] if case.op == "kda" else rate
    decay = (
        -rate * F.softplus(logits)
        if case.lower_bound is None
        else case.lower_bound * torch.sigmoid(rate * logits)
    )
    q, k = (
        (t.float() * (t.float().square().sum(-1, keepdim=True) + 1e-6).rsqrt()).to(t.dtype)
        for t in (q, k)
    )
    return q, k, v, decay, torch.sigmoid(beta)


class Oracle:
    """The float64 result of a case, the budget that rounding allows beside it, and the errors of a
    result, all on the device of the inputs.

    Key heads do not see each other, so some of them, evenly spread, tell the error of all. They are
    many, because a gradient of a parameter has one number (A_log), or as many as channels
    (dt_bias), of a whole head: of two heads its error would be chance. An error is a relative RMS;
    the budget is twice the twin's error plus what rounding to the case's dtype may add. (The tests
    allow for the largest entry too; over tensors as large as these, whose largest entry is hundreds
    of times the RMS, that would allow anything.)
    """

    def __init__(self, case: Case, x: dict[str, Tensor], do: Tensor | None):
        self.case, self.training = case, do is not None
        H, self.group = case.sizes["H"], case.sizes["HV"] // case.sizes["H"]
        count, device = min(H, HEADS[x["q"].device.type]), x["q"].device
        self.key_heads = torch.tensor(
            sorted({round(i * (H - 1) / max(1, count - 1)) for i in range(count)}), device=device
        )
        # On CUDA the definition itself, which is plain torch, a kernel for each operation: it has
        # no limits of dtype.
        exact: Backend = dispatch.load("native") if device.type == "cpu" else Reference()
        twin = Reference(operand=case.dtype if case.dtype.itemsize == 2 else None)
        tensors = x if do is None else x | {"do": do}
        found: list[list[dict[str, Tensor]]] = [[], []]
        for heads in self.key_heads.split(
            max(1, AT_ONCE // (case.sizes["B"] * case.sizes["T"] * self.group))
        ):
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
        heads = (
            key_heads[:, None] * self.group + torch.arange(self.group, device=key_heads.device)
        ).flatten()
        return {
            n: t.detach().index_select(_heads_axis(n), key_heads if n in ("q", "k") else heads)
            for n, t in tensors.items()
        }

    def _stages(
        self, backend: Backend, tensors: dict[str, Tensor], dtype: torch.dtype
    ) -> dict[str, Tensor]:
        args = {n: t for n, t in tensors.items() if n != "do"}
        p = Problem.parse(schemas.VARIANTS[self.case.op], **args, **flags(self.case))
        for n, t in args.items():  # only now, for a call in float64 would be refused on CUDA
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
        want = self.exact[name]
        error = _rms(got.double() - want) / (_rms(want) + 1e-30)
        return error if error == error else float("inf")

    def errors(self, got: dict[str, Tensor]) -> dict[str, float]:
        """The error of each tensor of a result ``{"o": .., "q": gradient, ..}``."""
        return {n: self._error(n, t) for n, t in self._cut(got, self.key_heads).items()}

    def worst_share(self, errors: dict[str, float]) -> float:
        """The largest share of its budget that an error takes."""
        return max(e / self.limits[n] for n, e in errors.items())


def _heads_axis(name: str) -> int:
    return 0 if name in ("A_log", "dt_bias") else 2


def _rms(x: Tensor) -> float:
    return x.square().mean().sqrt().item()
