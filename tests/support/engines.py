"""Stand in for a serving engine: its recurrence in float64, its batches, and a package of stubs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

SLOTS, H, K, V = 9, 2, 16, 8  # H: query heads of a whole model
HEADS = {"kda": H, "gdn": 2 * H}  # value heads, as in Kimi-Linear and Qwen3-Next
POOLS = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Batch:
    """Tokens of one call: `lengths` per sequence, `tail` tokens of nobody behind them.

    q, k, v are views of ``mixed_qkv`` ``[tokens, 2 H K + HV V]``, which is itself a view of a wider
    projection. `a` and `b` are the logits of the decay and of beta, per token.
    """

    variant: str
    lengths: tuple[int, ...]
    HV: int
    dtype: torch.dtype = torch.bfloat16
    tail: int = 0
    bound: float | None = None
    seed: int = 0
    H: int = H

    def __post_init__(self):
        gen, T = torch.Generator().manual_seed(self.seed), sum(self.lengths) + self.tail
        width, HV = 2 * self.H * K + self.HV * V, self.HV
        decay = (HV, K) if self.variant == "kda" else (HV,)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=gen)

        x = {
            "mixed_qkv": draw(T, width + 5).to(self.dtype)[:, :width],
            "a": draw(T, *decay).to(self.dtype),
            "b": draw(T, 2 * HV).to(self.dtype)[:, :HV],
            "A_log": 0.3 * draw(HV),
            "dt_bias": draw(*decay),
            "starts": torch.tensor([0, *self.lengths], dtype=torch.int32).cumsum(0).int(),
        }
        for name, value in x.items():
            object.__setattr__(self, name, value)

    @property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v, ``[1, tokens, heads, width]``, without a copy."""
        keys = self.H * K
        q, k, v = self.mixed_qkv[None].split([keys, keys, self.HV * V], -1)
        return q.unflatten(-1, (-1, K)), k.unflatten(-1, (-1, K)), v.unflatten(-1, (-1, V))

    def on_rank(self, rank: int) -> Batch:
        """Return the batch of one of H ranks: one query head and its value heads."""
        size = self.HV // self.H
        h, part = slice(rank * size, (rank + 1) * size), replace(self, HV=size, H=1)
        for name in ("a", "b", "A_log", "dt_bias"):
            x = getattr(self, name)
            object.__setattr__(part, name, x[:, h] if name in "ab" else x[h])
        q, k, v = self.qkv
        rows = (q[0, :, rank], k[0, :, rank], v[0, :, h].flatten(1))
        object.__setattr__(part, "mixed_qkv", torch.cat(rows, -1))
        return part

    def gates(self) -> tuple[Tensor, Tensor]:
        """Return the log decay ``[tokens, HV, K or 1]`` and beta ``[tokens, HV]`` in float64."""
        x, A = (self.a + self.dt_bias.double()).double(), self.A_log.double().exp()
        x, A = (x, A[:, None]) if self.variant == "kda" else (x[..., None], A[:, None])
        g = -A * F.softplus(x) if self.bound is None else self.bound * torch.sigmoid(A * x)
        return g, torch.sigmoid(self.b.double())

    def span(self, n: int) -> range:
        """Return the tokens of sequence n."""
        return range(int(self.starts[n]), int(self.starts[n + 1]))

    def along(self, n: int, state: Tensor, scale: float = K**-0.5) -> tuple[Tensor, list[Tensor]]:
        """Run the recurrence of sequence n from `state` ``[HV, V, K]`` in float64.

        Return o ``[length, HV, V]`` and the state after each token.
        """
        (q, k, v), (g, beta) = (x[0].double() for x in self.qkv), self.gates()
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        q, k = (x.repeat_interleave(self.HV // self.H, 1) for x in (q, k))
        S, o, states = state.double(), [], []
        for t in self.span(n):
            S = S * g[t].exp()[:, None, :]
            missing = beta[t][:, None] * (v[t] - torch.einsum("hvk,hk->hv", S, k[t]))
            S = S + torch.einsum("hv,hk->hvk", missing, k[t])
            o.append(scale * torch.einsum("hvk,hk->hv", S, q[t]))
            states.append(S)
        return torch.stack(o) if o else torch.zeros(0, self.HV, V).double(), states


def pool(HV: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    """Return a pool ``[SLOTS, HV, V, K]`` with gaps between its slots, as in pages."""
    page = torch.randn(SLOTS, HV * V * K + 7, generator=torch.Generator().manual_seed(seed))
    return page.to(dtype)[:, : HV * V * K].unflatten(-1, (HV, V, K))


def assert_near(got: Tensor, want: Tensor, name: str) -> None:
    """Fail unless `got` is the float64 `want`, up to float32 sums and one rounding to its dtype."""
    assert got.shape == want.shape, f"{name}: {list(got.shape)}, expected {list(want.shape)}"
    atol = (torch.finfo(got.dtype).eps + 1e-5) * float(want.abs().max()) if want.numel() else 0.0
    torch.testing.assert_close(
        got.double(), want, rtol=0.0, atol=atol, msg=lambda said: f"{name}: {said}"
    )


def assert_decoded(
    batch: Batch,
    before: Tensor,
    after: Tensor,
    o: Tensor,
    table: list[list[int]],
    started: list[int],
    what: str,
    null: int = 0,
) -> None:
    """Check a call: sequence n starts from slot `started[n]` and writes the slots of `table[n]`.

    Slots up to `null` are nobody's. Slots that the call does not write keep their bits.
    """
    written = set()
    for n, start in enumerate(started):
        span = batch.span(n)
        if start <= null:
            assert not o[span].any(), f"{what}: o of sequence {n}, which has no slot"
            continue
        values, states = batch.along(n, before[start])
        assert_near(o[span], values, f"{what}: o of sequence {n}")
        for slot, state in zip(table[n], states if len(table[n]) > 1 else states[-1:]):
            if slot > null:
                written.add(slot)
                assert_near(after[slot], state, f"{what}: slot {slot}")
    for slot in set(range(SLOTS)) - written:
        assert after[slot].equal(before[slot]), f"{what}: slot {slot} was written"


def i32(*values) -> Tensor:
    """Return an int32 tensor, the dtype of engines' tables."""
    return torch.tensor(values, dtype=torch.int32)


@contextmanager
def installed(
    monkeypatch: pytest.MonkeyPatch, folder: Path, package: str, files: dict[str, str]
) -> Iterator[None]:
    """Put a package of stubs in front of the path; `files` maps dotted modules to their text."""
    for module, text in files.items():
        is_package = any(other.startswith(f"{module}.") for other in files)
        parts = module.split(".")
        path = folder.joinpath(*parts, "__init__.py") if is_package else None
        path = path or folder.joinpath(*parts[:-1], f"{parts[-1]}.py")
        for parent in path.relative_to(folder).parents:
            if parent != Path():
                (folder / parent).mkdir(exist_ok=True, parents=True)
                (folder / parent / "__init__.py").touch()
        path.write_text(text)
    before = _forget(package)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield
    _forget(package)
    sys.modules.update(before)


def _forget(package: str) -> dict[str, ModuleType]:
    """Take a package out of ``sys.modules``, and return its modules."""
    names = [name for name in sys.modules if name.split(".")[0] == package]
    return {name: sys.modules.pop(name) for name in names}


def stub(*names: str) -> str:
    """Return the text of a module whose functions return their name and arguments."""
    return "".join(f"def {n}(*args, **given):\n    return {n!r}, args, given\n\n\n" for n in names)
