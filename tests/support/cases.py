"""Describe one operator call as data: printable, hashable, with reproducible tensors.

`Case` holds what makes a call hard: sizes, packing, strides, gates, keys. It builds its tensors
from ``torch.Generator(seed)``. hypothesis draws cases through `cases`; paste a failure it finds
into an ``@example``.
"""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import replace as replace
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.support.target import TARGET

LENGTHS = (0, 1, 63, 64, 65, 37)  # nothing, one token, a chunk and its neighbours, a prime
PACKED = (0, 65, 1, 0, 64, 37, 63, 0)
# sizes of a call that computes nothing
EMPTY = [
    *(dict(T=0), dict(B=0), dict(H=0, HV=0), dict(V=0)),
    *(dict(lengths=()), dict(lengths=(), tail=5), dict(lengths=(0, 0))),
]
BARE = "bare"  # the bounded gate without A_log and dt_bias; only fixed cases name it
GATES = ("weak", "strong", "zero", "reset", "forget", "blocks", "softplus", "bounded", "none")
KEYS = ("random", "correlated", "repeated")
AXES = "axes"  # keys on the axes, of a length of exactly 1; only fixed cases name them
STRIDES = ("contiguous", "heads_first", "fused", "expanded", "every_second")
BETAS = ("given", "none", "sigmoid", "neg_eigval")
EDGES = "edges"  # a given beta that is 0 or 1; only fixed cases name it
RANK = {"kda": 1, "gdn": 0}
TOKENS = ("q", "k", "v", "g", "beta")  # what has a row for each token
INPUTS = (*TOKENS, "A_log", "dt_bias", "initial_state", "cu_seqlens")
BOUND = -5.0
# the gates of logits, and the flags that select each
INSIDE: dict[str, dict[str, object]] = {
    "softplus": {},
    "bounded": {"lower_bound": BOUND},
    BARE: {"lower_bound": BOUND},
}
STEEP = -30.0  # of "steep", a gate that only fixed cases name
# queries and keys that a promised bound of -5 does not hold (docs/numerics.md), by a name
FAR = {
    "entries of scale * q to 80,000": {"q_length": 1.1e5, "scale": 1.0},
    "keys of norm 2^-16": {"k_length": 2.0**-16},
}

Tensors = dict[str, Tensor | None]


@dataclass(frozen=True)
class Case:
    """A call to `chunk` or `recurrent`.

    `lengths` packs sequences into one row, followed by `tail` tokens outside any sequence.
    """

    variant: str = "kda"
    B: int = 1
    T: int = 65
    lengths: tuple[int, ...] | None = None
    tail: int = 0
    H: int = 1
    HV: int = 2
    K: int = 16
    V: int = 24
    dtype: torch.dtype = torch.float32
    gate: str = "weak"
    keys: str = "random"
    strides: str = "contiguous"
    beta: str = "given"
    l2norm: bool = False
    q_length: float = 1.0  # of rows that are not normalised inside
    k_length: float = 1.0
    scale: float | None = None
    state: bool = True
    final: bool = True
    transposed: bool = False
    safe_gate: bool = False
    safe_beta: bool = False
    safe_keys: bool = False
    disable_recompute: bool = False
    narrow: bool = False  # g, beta, A_log and dt_bias in `dtype` instead of at least float32
    seed: int = 0
    invariant: bool = False

    @property
    def rank(self) -> int:
        """Return the rank of the decay per token and value head."""
        return RANK[self.variant]

    @property
    def rows(self) -> int:
        """Return the length of the token axis."""
        return self.T if self.lengths is None else sum(self.lengths) + self.tail

    @property
    def spans(self) -> list[tuple[int, int, int]]:
        """Return (batch row, first token, one past the last token) of each sequence."""
        if self.lengths is None:
            return [(b, 0, self.T) for b in range(self.B)]
        ends = list(accumulate(self.lengths))
        return [(0, b - n, b) for b, n in zip(ends, self.lengths)]

    @property
    def N(self) -> int:
        """Return the number of sequences."""
        return len(self.spans)

    @property
    def state_dtype(self) -> torch.dtype:
        """Return the dtype of states and sums."""
        return torch.float64 if self.dtype is torch.float64 else torch.float32

    @property
    def state_shape(self) -> tuple[int, ...]:
        """Return the shape of states in the layout of the call."""
        return (
            (self.N, self.HV, self.V, self.K)
            if self.transposed
            else (self.N, self.HV, self.K, self.V)
        )

    def flags(self, op: str = "chunk") -> dict[str, object]:
        """Return the keyword arguments of a call to `op`."""
        flags: dict[str, object] = {
            "transpose_state_layout": self.transposed,
            "use_qk_l2norm_in_kernel": self.l2norm,
            "scale": self.scale,
        }
        flags["use_gate_in_kernel"] = self.gate in INSIDE
        flags["use_beta_sigmoid_in_kernel"] = self.beta in ("sigmoid", "neg_eigval")
        flags["allow_neg_eigval"] = self.beta == "neg_eigval"
        flags |= INSIDE.get(self.gate, {})
        if op in ("chunk", "recurrent"):
            flags["output_final_state"] = self.final
        if op in ("chunk", "chunk_"):
            flags["safe_gate"] = self.safe_gate
            given = (n for n in ("safe_beta", "safe_keys", "invariant") if getattr(self, n))
            flags |= dict.fromkeys(given, True)
        if op == "chunk":
            flags["disable_recompute"] = self.disable_recompute
        return flags

    def inputs(self, device: torch.device | str = "cpu") -> Tensors:
        """Build the tensors by name, in the order of the schemas."""
        return on(self._kept("_build", device), device)

    def _kept(self, build: str, device: torch.device | str) -> Any:
        """Return what the method `build` makes, and keep the last two of large cases on a GPU."""
        large = self.rows * self.HV * self.K >= 2**23 and torch.device(device).type == "cuda"
        return _last(self, build) if large else getattr(self, build)()

    def _build(self) -> Tensors:
        gen = torch.Generator().manual_seed(self.seed)
        B = self.B if self.lengths is None else 1
        T = self.rows
        H = self.H
        HV = self.HV
        K = self.K
        V = self.V
        wide = self.dtype if self.narrow else torch.promote_types(self.dtype, torch.float32)

        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=gen, dtype=torch.float64)

        def uniform(*shape: int) -> Tensor:
            return torch.rand(shape, generator=gen, dtype=torch.float64)

        q, k, v = randn(B, T, H, K), randn(B, T, H, K), randn(B, T, HV, V)
        if self.keys == AXES:
            k = k.sign() * torch.nn.functional.one_hot(k.abs().argmax(-1), K)
        elif self.keys != "random":
            common = 0.9 if self.keys == "correlated" else 1.0
            k = common * randn(B, 1, H, K) + (1 - common**2) ** 0.5 * k
        if not self.l2norm:  # longer keys make the recurrence unstable
            k = self.k_length * k / k.norm(dim=-1, keepdim=True).clamp(min=1e-3)
            q = self.q_length * q / q.norm(dim=-1, keepdim=True).clamp(min=1e-3)
        g_shape = (B, T, HV, K) if self.rank else (B, T, HV)
        g = A_log = dt_bias = None
        if self.gate in ("weak", "reset", "forget", "blocks"):
            g = -0.1 * uniform(*g_shape)
            if self.gate == "blocks":  # 8 strong rows before 8 weak ones, in most channels
                row = torch.arange(T).reshape(-1, *[1] * (len(g_shape) - 2))
                g = torch.where((row % 16 < 8) & (uniform(*g_shape) < 0.9), -1000.0, g)
            if self.gate in ("reset", "forget"):
                never = -1000.0 if self.gate == "reset" else -torch.inf
                token, entry = uniform(*g_shape[:3], *([1] if self.rank else [])), uniform(*g_shape)
                g = torch.where((token < 0.06) | (entry < 0.03), never, g)
        elif self.gate in ("strong", "steep"):
            g = (BOUND if self.gate == "strong" else STEEP) * uniform(*g_shape)
        elif self.gate == "zero":
            g = torch.zeros(g_shape, dtype=torch.float64)
        elif self.gate == BARE:
            g = randn(*g_shape)
        elif self.gate in INSIDE:
            g, A_log = randn(*g_shape), 0.5 * randn(HV)
            dt_bias = randn(HV, K) if self.rank else randn(HV)
            if self.rank and self.seed % 2:
                dt_bias = dt_bias.flatten()
            if self.gate == "bounded" and self.seed % 3 == 0:
                A_log = None
        beta = {"none": None, "given": uniform(B, T, HV)}.get(self.beta, randn(B, T, HV))
        if self.beta == EDGES:
            beta = (beta > -1.0).double()
        q, k, v = self._stride(*(x.to(self.dtype) for x in (q, k, v)))
        g, beta = self._stride(*(None if x is None else x.to(wide) for x in (g, beta)))
        out: Tensors = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
        out |= {
            n: None if x is None else x.to(wide)
            for n, x in (("A_log", A_log), ("dt_bias", dt_bias))
        }
        out["initial_state"] = self._strided_state(randn(*self.state_shape)) if self.state else None
        out["cu_seqlens"] = None
        if self.lengths is not None:
            out["cu_seqlens"] = torch.tensor(
                [0, *accumulate(self.lengths)], dtype=torch.int32 if self.seed % 2 else torch.int64
            )
        return out

    def _stride(self, *tensors: Tensor | None) -> list[Tensor | None]:
        """Return x with other strides and the same values; an expanded axis has equal heads."""
        if self.strides == "contiguous":
            return list(tensors)
        if self.strides == "heads_first":
            return [
                None if x is None else x.transpose(1, 2).contiguous().transpose(1, 2)
                for x in tensors
            ]
        if self.strides == "expanded":
            return [None if x is None else x[:, :, :1].expand(x.shape) for x in tensors]
        if self.strides == "every_second":  # no dimension has stride 1
            return [
                None if x is None else torch.stack((x, torch.full_like(x, torch.nan)), -1)[..., 0]
                for x in tensors
            ]
        given = [x for x in tensors if x is not None]
        if not given:
            return list(tensors)
        widths = [x.shape[2:].numel() for x in given]
        fused = torch.cat(
            [x.reshape(*x.shape[:2], w) for x, w in zip(given, widths)]
            + [given[0].new_zeros((*given[0].shape[:2], 1))],
            -1,
        )
        slices = iter(
            s.unflatten(-1, x.shape[2:]) for s, x in zip(fused.split([*widths, 1], -1), given)
        )
        return [None if x is None else next(slices) for x in tensors]

    def _strided_state(self, state: Tensor) -> Tensor:
        state = state.to(self.state_dtype)
        return (
            state
            if self.strides == "contiguous"
            else state.transpose(1, 2).contiguous().transpose(1, 2)
        )

    def cotangents(self, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """Build the gradients of o and of the final state."""
        do, dfinal = self._kept("_build_cotangents", device)
        return do.to(device), dfinal.to(device)

    def _build_cotangents(self) -> tuple[Tensor, Tensor]:
        gen = torch.Generator().manual_seed(self.seed + 1)
        B = self.B if self.lengths is None else 1
        do = torch.randn((B, self.rows, self.HV, self.V), generator=gen, dtype=torch.float64)
        dfinal = torch.randn(self.state_shape, generator=gen, dtype=torch.float64)
        return do.to(self.dtype), dfinal.to(self.state_dtype)


@lru_cache(maxsize=2)
def _last(case: Case, build: str) -> Any:
    return getattr(case, build)()


def on(inputs: Tensors, device: torch.device | str) -> Tensors:
    """Copy the inputs of a call to another device; their strides stay."""
    return {n: None if x is None else _to_strided(x, device) for n, x in inputs.items()}


def _to_strided(x: Tensor, device: torch.device | str) -> Tensor:
    if torch.device(device).type == x.device.type or x.is_contiguous():
        return x.to(device)
    out = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
    return out.copy_(x) if 0 not in x.stride() else x[:, :, :1].to(device).expand(x.shape)


def take(inputs: Tensors, a: int | None, b: int | None) -> Tensors:
    """Return the inputs with tokens a to b alone."""
    return {n: x[:, a:b] if x is not None and n in TOKENS else x for n, x in inputs.items()}


def alone(case: Case, inputs: Tensors, n: int) -> Tensors:
    """Return the inputs of sequence n as a call of its own."""
    row, a, b = case.spans[n]
    rows = {m: x[row : row + 1] for m, x in inputs.items() if x is not None and m in TOKENS}
    state = inputs["initial_state"]
    rest = {"initial_state": None if state is None else state[n : n + 1], "cu_seqlens": None}
    return inputs | take(rows, a, b) | rest


def followed(inputs: Tensors, seen: int, other: Tensors) -> Tensors:
    """Return the inputs with the tokens of another call in place of those from `seen` on."""
    return {
        n: torch.cat([x[:, :seen], other[n][:, seen:]], 1) if x is not None and n in TOKENS else x
        for n, x in inputs.items()
    }


def double(inputs: Tensors) -> Tensors:
    """Return the inputs of a call in float64, but for offsets and slots."""
    return {
        n: x.double() if x is not None and x.is_floating_point() else x for n, x in inputs.items()
    }


def is_safe(gate: str) -> bool:
    """Return whether every decay of this kind lies in [-5, 0], as `safe_gate` promises."""
    return gate in ("weak", "strong", "zero", "bounded", "none")


@st.composite
def cases(draw, **fixed: object) -> Case:
    """Draw a legal call, small enough for a token-by-token oracle.

    A field in `fixed` is a value or a strategy.
    """
    chosen = {n: draw(x) if isinstance(x, st.SearchStrategy) else x for n, x in fixed.items()}

    def pick(name: str, options) -> object:
        if name not in chosen:
            chosen[name] = draw(st.sampled_from(options))
        return chosen[name]

    pick("variant", ("kda", "gdn"))
    pick("dtype", TARGET.dtypes)
    pick("H", (1, 2) if TARGET.slow else (1, 2, 3))
    if "HV" not in chosen:
        chosen["HV"] = chosen["H"] * draw(st.sampled_from((1, 2) if TARGET.slow else (1, 2, 3)))
    pick("K", (16, 24, 7, 33))
    pick("V", (24, 8, 33, 1, 40))
    if "lengths" not in chosen:
        packed = draw(st.booleans()) if "B" not in chosen and "T" not in chosen else False
        chosen["lengths"] = (
            tuple(draw(st.lists(st.sampled_from(LENGTHS), min_size=1, max_size=4)))
            if packed
            else None
        )
    if chosen["lengths"] is None:
        pick("B", (1, 2))
        pick("T", (65, 1, 37, 63, 64, 129))
    else:
        pick("tail", (0, 3))
    for name, options in (("gate", GATES), ("keys", KEYS), ("strides", STRIDES), ("beta", BETAS)):
        pick(name, options)
    for name in ("l2norm", "state", "final", "transposed", "disable_recompute", "narrow"):
        pick(name, (False, True))
    pick("scale", (None, 1.0, 0.3))
    if "safe_gate" not in chosen:
        chosen["safe_gate"] = is_safe(chosen["gate"]) and draw(st.booleans())
    if "seed" not in chosen:
        chosen["seed"] = draw(st.integers(0, 2**16))
    return Case(**chosen)
