"""Time calls with `invariant=True` next to the same calls without, on a GPU.

``python -m benchmarks.invariant [--settings B1T8192H4 ...] [--gate bound] [--out JSON]``

A time is the median of the GPU alone (`kda_ops.tools.timer`), and "factor" is that of the flag.
Before it is timed, a call in two pieces is compared with one call, bit by bit. In a setting of one
token, a step of `InvariantCache` is timed next to `recurrent_`. Steps follow on each other, so
sequences have from 1 to 64 tokens since their state.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import kda_ops
from benchmarks.cases import INPUTS, Case, flags, make_inputs
from benchmarks.records import stamp, write_json
from benchmarks.timer import replayed
from kda_ops.nn import InvariantCache
from kda_ops.tools.timer import median_ms

SETTINGS = ("B1T8192H4", "B1T8192H16", "B1T8192H96", "B1T1H32", "B8T1H32", "B128T1H32")
CHUNK: dict[str, Callable[..., Any]] = {"kda": kda_ops.chunk_kda, "gdn": kda_ops.chunk_gdn}
TOKENS = ("q", "k", "v", "g", "beta")
DECODED = 80  # tokens that decode is compared on


def calls(case: Case, invariant: bool) -> dict[str, Callable[[], object]]:
    """Return the forward of a case, and its forward with backward."""
    x, chunk = make_inputs(case), CHUNK[case.op]
    words = flags(case) | {"invariant": invariant}
    leaves = {n: t.detach().requires_grad_() for n, t in x.items()}
    do = torch.randn_like(x["v"])

    def forward() -> object:
        with torch.no_grad():
            return chunk(*map(x.get, INPUTS), **words)[0]

    def training() -> object:
        o, _ = chunk(*map(leaves.get, INPUTS), **words)
        return torch.autograd.grad(o, [*leaves.values()], do)

    return {"fwd": forward, "fwd+bwd": training}


def pieces_agree(case: Case) -> bool:
    """Return whether two pieces of an invariant call have the bits of one call."""
    x, chunk = make_inputs(case), CHUNK[case.op]
    words: dict[str, Any] = flags(case) | dict(invariant=True, output_final_state=True)
    cut, parts = case.sizes["T"] // 128 * 64, []
    state: Any = None
    with torch.no_grad():
        whole, final = chunk(*map(x.get, INPUTS), **words)
        for a, b in ((0, cut), (cut, None)):
            piece = {n: t[:, a:b] if n in TOKENS else t for n, t in x.items()}
            o, state = chunk(*map(piece.get, INPUTS), initial_state=state, **words)
            parts.append(o)
    return torch.equal(torch.cat(parts, 1), whole) and torch.equal(state, final)


def shared_flags(case: Case) -> dict[str, Any]:
    """Return the flags that both operators have: `recurrent_` takes no promises."""
    return {n: x for n, x in flags(case).items() if not n.startswith("safe_")}


def decode(case: Case) -> dict[str, Callable[[], Any]]:
    """Return a step of `recurrent_`, and one of a cache, of a case of one token."""
    x, B = make_inputs(case), case.sizes["B"]
    HV, D = case.sizes["HV"], case.sizes["D"]
    words: dict[str, Any] = {n: x.get(n) for n in INPUTS} | shared_flags(case)
    pool = torch.zeros(B, HV, D, D, device=case.device)
    cache = InvariantCache(pool.clone(), *(x[n] for n in TOKENS))
    recurrent, chunk_ = (getattr(kda_ops, f"{n}_{case.op}_") for n in ("recurrent", "chunk"))

    @torch.inference_mode()
    def recur() -> object:
        return recurrent(state=pool, **words)

    @torch.inference_mode()
    def step() -> Tensor:
        return cache.step(chunk_, **words)

    return {"recurrent_": recur, "step": step}


def decode_agrees(case: Case) -> bool:
    """Return whether steps have the bits of one call, for one token over and over."""
    x = make_inputs(case)
    whole = {n: t.expand(-1, DECODED, *t.shape[2:]) if n in TOKENS else t for n, t in x.items()}
    words = shared_flags(case)
    with torch.no_grad():
        want, _ = CHUNK[case.op](*map(whole.get, INPUTS), **words, invariant=True)
    step = decode(case)["step"]
    return torch.equal(torch.cat([step() for _ in range(DECODED)], 1), want)


def main(argv: list[str]) -> int:
    """Print one line for each variant, setting and pass; return 1 if bits differ."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.invariant", description=__doc__)
    parser.add_argument("--settings", nargs="+", default=SETTINGS)
    parser.add_argument("--gate", default="bound")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows: list[dict[str, Any]] = []
    for op in CHUNK:
        for setting in given.settings:
            dtype = torch.bfloat16 if device == "cuda" else torch.float32
            case = Case(op, "fwd", setting, given.gate, device, dtype)
            if case.sizes["T"] == 1:
                agree, both = decode_agrees(case), decode(case)
                plain, flagged = [{"decode": replayed(call, device)} for call in both.values()]
            else:
                agree = pieces_agree(case)
                plain, flagged = [calls(case, invariant) for invariant in (False, True)]
            for name in plain:
                before, after = (median_ms(side[name], device) for side in (plain, flagged))
                rows.append(
                    dict(op=op, setting=setting, gate=given.gate, **{"pass": name})
                    | dict(ms=before, invariant_ms=after, factor=after / before, agree=agree)
                )
                print(
                    f"{op} {setting:12} {given.gate:8} {name:8} {before:8.3f} ms  invariant "
                    f"{after:8.3f} ms  factor {after / before:5.2f}  "
                    f"pieces {'agree' if agree else 'DIFFER'}",
                    flush=True,
                )
    if given.out:
        write_json(given.out, {"rows": [row | stamp(device) for row in rows]})
    return int(not all(row["agree"] for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
