"""Find the modules of a model whose bits for a token depend on how many tokens a call has.

``python -m kda_ops bits package.module:function [--lengths 1 2 7 64]``

The function returns a model and the arguments of one forward: ``(model, *args)``. Tokens lie on the
second axis of the arguments, or on the first one of tensors that flatten batch and tokens. Every
module runs again on the first tokens of the first sequence, as many as each length says. A causal
module whose bits do not depend on shapes gives the bits of the whole call. Layers of `kda_ops.nn`
also decode from a cache. Where a module differs because of one inside, only that one is printed.
The exit status is 1 if bits differ.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kda_ops.nn.delta_attention import DeltaAttention

LENGTHS = (1, 2, 7, 64)


class FixedRows(nn.Module):
    """Run a module of rows ``[.., D]`` on blocks of a fixed number of rows.

    So a matrix product has one shape in every call, and BLAS no reason to choose other kernels. The
    last block is filled up with zeros.

    On a CPU take `rows` = 1, because a BLAS may also treat the rows of one matrix differently.

    Example:
        >>> import torch
        >>> from kda_ops.tools.bits import FixedRows
        >>> map, x = FixedRows(torch.nn.Linear(32, 48), rows=1), torch.randn(2, 100, 32)
        >>> torch.equal(map(x)[:, :3], map(x[:, :3]))
        True
    """

    def __init__(self, module: nn.Module, rows: int):
        super().__init__()
        self.module, self.rows = module, rows

    def forward(self, x: Tensor) -> Tensor:
        """Return the results of all rows."""
        flat = x.flatten(0, -2)
        blocks = F.pad(flat, (0, 0, 0, -flat.shape[0] % self.rows)).split(self.rows)
        # clones begin where torch allocates: bits may depend on addresses
        y = torch.cat([self.module(block.clone()) for block in blocks])
        return y[: flat.shape[0]].unflatten(0, x.shape[:-1])


def fix_rows(model: nn.Module, rows: int, kinds: tuple[type, ...] = (nn.Linear,)) -> nn.Module:
    """Put `FixedRows` around the outermost modules of these kinds inside a model; return it."""
    for name, child in model.named_children():
        if isinstance(child, kinds):
            setattr(model, name, FixedRows(child, rows))
        elif not isinstance(child, FixedRows):
            fix_rows(child, rows, kinds)
    return model


@dataclass(frozen=True)
class Finding:
    """What a module has shown: how many entries differ by call, or why it was not compared."""

    name: str
    kind: str
    differ: dict[str, int]
    skipped: str = ""


@torch.no_grad()
def check(model: nn.Module, *args: Any, lengths: Sequence[int] = LENGTHS) -> list[Finding]:
    """Compare the bits of every module of a model in one forward with those of shorter calls."""
    B, T = next(x.shape[:2] for x in _tensors(args) if x.dim() > 1)
    calls: dict[str, tuple[nn.Module, tuple, dict, Any]] = {}
    hooks = []
    inside = {m.module for m in model.modules() if isinstance(m, FixedRows)}
    for name, module in model.named_modules():
        if module in inside:
            continue

        def keep(module, given, words, result, name=name):
            copied = _map(torch.clone, (given, words))
            calls.setdefault(name, (module, *copied, result))

        hooks.append(module.register_forward_hook(keep, with_kwargs=True))
    training = model.training
    try:
        model.eval()(*args)
        for hook in hooks:
            hook.remove()
        return [_compare(name, *call, B, T, lengths) for name, call in calls.items()]
    finally:
        for hook in hooks:
            hook.remove()
        model.train(training)


def _map(function: Callable[[Tensor], Tensor], x: Any) -> Any:
    """Apply a function to the tensors in arguments or results."""
    if isinstance(x, dict):
        return {name: _map(function, y) for name, y in x.items()}
    if type(x) in (tuple, list):
        return type(x)(_map(function, y) for y in x)
    return function(x) if isinstance(x, Tensor) else x


def _tensors(x: Any) -> list[Tensor]:
    found: list[Tensor] = []
    _map(lambda y: found.append(y) or y, x)  # type: ignore[func-returns-value]
    return found


def _first(x: Tensor, B: int, T: int, n: int) -> Tensor:
    """Return the first n tokens of the first sequence of a tensor that has tokens."""
    if x.shape[:2] == (B, T):
        return x[:1, :n]
    if x.dim() and x.shape[0] == B * T:
        return x[:n]
    return x


def _rows(x: Any, B: int, T: int) -> Tensor | None:
    """Return the first result that has tokens."""
    return next((y for y in _tensors(x) if _first(y, B, T, 1) is not y), None)


def _compare(
    name: str,
    module: nn.Module,
    args: tuple,
    words: dict,
    result: Any,
    B: int,
    T: int,
    lengths: Sequence[int],
) -> Finding:
    kind = type(module).__name__
    want = _rows(result, B, T)
    given = (args, words)
    if want is None or _rows(given, B, T) is None:
        return Finding(name, kind, {}, "no tokens in its arguments or results")
    differ: dict[str, int] = {}
    for n in (n for n in lengths if n < T):
        some, others = _map(partial(_first, B=B, T=T, n=n), given)
        try:
            got = _tensors(module(*some, **others))[0]
        except Exception as error:  # any module of the user's
            return Finding(name, kind, {}, f"fails on {n} tokens: {error}")
        differ[f"{n} tokens"] = _count(got, _first(want, B, T, n))
    if isinstance(module, DeltaAttention):
        differ["decode"] = _count(_decode(module, args[0][:1]), want[:1])
    return Finding(name, kind, differ)


def _decode(module: DeltaAttention, x: Tensor) -> Tensor:
    """Return the output of a layer for x, of which it reads the first half as a prompt."""
    prompt, steps = x[:, : x.shape[1] // 2], x[:, x.shape[1] // 2 :]
    cache = module.new_cache(1, invariant=module.invariant)
    return torch.cat([module(part, cache=cache) for part in (prompt, *steps.split(1, 1))], 1)


def _count(got: Tensor, want: Tensor) -> int:
    same = (got == want) | (got.isnan() & want.isnan())
    return int((~same).sum()) if got.shape == want.shape else want.numel()


def main(argv: list[str] | None = None) -> int:
    """Print one line per module that differs, or that could not be compared; return 1 for bits."""
    parser = argparse.ArgumentParser(
        prog="python -m kda_ops bits",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("function", help="package.module:function, which returns (model, *args)")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    given = parser.parse_args(argv)
    module, colon, function = given.function.partition(":")
    if not (module and colon and function):
        parser.error(f"name it as package.module:function, got {given.function}.")
    if min(given.lengths) < 1:
        parser.error(f"--lengths must be at least 1, got {min(given.lengths)}.")
    sys.path.insert(0, os.getcwd())
    model, *args = getattr(importlib.import_module(module), function)()
    found = check(model, *args, lengths=given.lengths)
    wrong = [x for x in found if any(x.differ.values())]
    for x in found:
        prefix = f"{x.name}." if x.name else ""
        inner = any(y is not x and y.name.startswith(prefix) for y in wrong)
        what = ", ".join(f"{n} entries with {call}" for call, n in x.differ.items() if n)
        if what and not inner:
            print(f"{x.name or 'the model'} ({x.kind}): {what} differ")
        elif x.skipped:
            print(f"{x.name or 'the model'} ({x.kind}): not compared, {x.skipped}")
    print(f"{len(found)} modules: bits of {len(wrong)} depend on the number of tokens")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
