"""The calls that are measured: a case, its name, its inputs and its flags.

The inputs of a case are random and follow from its name, so both sides of a row get the same.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kda_ops.tools.machine import parse_setting

PASSES = ("fwd", "fwdbwd", "decode", "first_call_s", "model")
SAFE = ("strong_safe", "weak_safe")
PROMISED = ("strong_promised", "weak_promised")
GATES = ("bound", "softplus", "strong", "weak", *SAFE, *PROMISED)
KDA_GATES = ("bound", *SAFE)  # gates that only KDA has
LOWER_BOUND = -5.0
INPUTS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias")
OURS = ("safe_beta", "safe_keys")  # promises that no peer takes
KEY = ("op", "pass", "setting", "gate", "state", "layout", "peer")  # what names a row


@dataclass(frozen=True)
class Case:
    """One call of ours, which a row measures.

    `setting` is B, T, H and, where they differ, HV and D: ``B1T65536H16HV32``, ``B1T256H2D64``.
    The gates "bound" and "softplus" run norm, gate and sigmoid inside the operator. "strong" and
    "weak" give unit keys, beta in (0, 1) and a log decay uniform in [-5, 0] or [-0.1, 0].
    "strong_safe" and "weak_safe" promise both sides that it stays in [-5, 0] (`safe_gate`).
    "strong_promised" and "weak_promised" also promise our side `safe_beta` and `safe_keys`.
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
    def safe(self) -> bool:
        """Whether the caller promises that a given decay of KDA stays within bounds."""
        return self.op == "kda" and self.gate in (*SAFE, *PROMISED)

    @property
    def promised(self) -> bool:
        """Whether the caller also promises a given beta in [0, 1] and unit keys."""
        return self.gate in PROMISED

    @property
    def lower_bound(self) -> float | None:
        """The bound of a bounded gate."""
        return LOWER_BOUND if self.gate == "bound" else None

    @property
    def name(self) -> str:
        """The columns that name the row, without the peer."""
        return f"{self.op} {self.pass_} {self.setting} {self.gate} {self.state} {self.layout}"

    @classmethod
    def named(cls, name: str, device: str, dtype: torch.dtype = torch.bfloat16) -> Case:
        """Return the case of a name."""
        op, pass_, setting, gate, state, layout = name.split()
        return cls(op, pass_, setting, gate, device, dtype, state, layout)


def case_of(row: dict) -> str:
    """Return the name of a row's case."""
    return " ".join(row[n] for n in KEY[:-1])


def name_of(row: dict) -> str:
    """Return the name of a row: its case and its peer, "alone" without one."""
    return f"{case_of(row)} {row['peer'] or 'alone'}"


def make_inputs(case: Case) -> dict[str, Tensor]:
    """Return q, k, v, g, beta in the case's dtype, and A_log, dt_bias in fp32 of a gate inside.

    A given decay is in fp32.
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
    """Return our keyword arguments."""
    if not case.inside:
        promises = {"safe_gate": case.safe} | dict.fromkeys(OURS, case.promised)
        return {n: True for n, given in promises.items() if given}
    return dict(
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        lower_bound=case.lower_bound,
    )
