"""Measures rows: both sides in one process, same inputs, error first, then medians. One worker serves one peer, whose environment is set before imports.

The parent (`kda_ops.bench.compare`) starts ``python -m kda_ops.bench.worker JSON`` and reads one JSON row, or one line that says why there is none, per line.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import torch
from torch import Tensor

from kda_ops import dispatch
from kda_ops.bench.cases import INPUTS, STAGES, Case, Oracle, make_inputs
from kda_ops.bench.sides import PEERS, Peer, Unsupported, our_forward, our_step

PEER_LIMIT = 10.0  # a peer must compute the same function; our budget of rounding is ours alone
ROUNDS = 3  # sides alternate; each has the smallest of its rounds' medians, the one least disturbed


def median_ms(call: Callable[[], object], device: str) -> float:
    """The median time of a call: CUDA with the L2 cache flushed between calls."""
    if device == "cuda":
        from triton.testing import do_bench

        return do_bench(call, warmup=50, rep=200, return_mode="median")
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < 3 or (time.perf_counter() - begin < 1.0 and len(times) < 50):
        start = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - start))
        if times[-1] > 5e3:
            break
    return statistics.median(times)


def _row(case: Case, peer: Peer | None) -> dict:
    return case.key() | {"peer": peer.name if peer else None, "ours_ms": None, "peer_ms": None, "ours_error": None, "peer_error": None}


def _missing(case: Case) -> str | None:
    """Why our side cannot run the case."""
    backend = dispatch.backend(torch.device(case.device))
    absent = [s for s in STAGES[case.pass_] if not hasattr(backend, s)]
    return f"the {dispatch.backend_name(torch.device(case.device))} backend has no {', '.join(absent)} yet" if absent else None


def _timed(sides: dict[str, Callable[[], object]], device: str) -> dict[str, float]:
    best = dict.fromkeys(sides, float("inf"))
    for _ in range(ROUNDS):
        for name, call in sides.items():
            best[name] = min(best[name], median_ms(call, device))
    return best


def whole(case: Case, peer: Peer | None, oracles: dict) -> dict:
    """A row of "fwd" or "fwdbwd"."""
    row, training = _row(case, peer), case.pass_ == "fwdbwd"
    x = make_inputs(case)
    names = [n for n in INPUTS if n in x]
    do = torch.randn(x["v"].shape, generator=torch.Generator(case.device).manual_seed(1), device=case.device).to(case.dtype) if training else None
    if case not in oracles:
        oracles.clear()
        oracles[case] = Oracle(case, x, do)
    oracle = oracles[case]
    if training:
        x = {n: t.requires_grad_() for n, t in x.items()}

    def call(forward) -> dict[str, Tensor]:
        if not training:
            with torch.no_grad():
                return {"o": forward(x)}
        o = forward(x)
        return {"o": o} | dict(zip(names, torch.autograd.grad(o, [x[n] for n in names], do, allow_unused=True)))

    def side(forward, error_column, limit, same=True):
        if same:
            row[error_column], ratio = oracle.error(call(forward))
            if ratio > limit:
                return None
        return lambda: call(forward)

    sides = {"ours_ms": side(our_forward(case), "ours_error", 1.0)}
    if peer is not None:
        sides["peer_ms"] = side(peer.forward(case), "peer_error", PEER_LIMIT, peer.same)
    return row | _timed({n: f for n, f in sides.items() if f is not None}, case.device)


def decode(case: Case, peer: Peer | None, _oracles: dict) -> dict:
    """A row of "decode": one token per sequence on a pool of states, in place.

    Besides the columns of every row, for each side: its share of the rate of a copy in the same process, and what a call costs Python.
    """
    row, (B, HV, D) = _row(case, peer), (case.sizes[n] for n in ("B", "HV", "D"))
    x = make_inputs(case)
    start = torch.randn((B, HV, D, D), generator=torch.Generator(case.device).manual_seed(2), device=case.device)
    start = start.to(torch.bfloat16 if case.state == "bf16" else torch.float32)
    some = sorted({0, B - 1})  # sequences do not see each other: the first and the last tell the error of all
    setting = case.setting.replace(f"B{B}T", f"B{len(some)}T")
    exact_case = Case(case.op, "decode", setting, case.gate, "cpu", torch.float64, layout=case.layout)
    cut = {n: (t if n in ("A_log", "dt_bias") else t[some]).cpu().double() for n, t in x.items()}
    exact = our_step(exact_case)(cut, start[some].cpu().double())
    limit = 4 * torch.finfo(case.dtype).eps

    def side(step, column, factor):
        with torch.inference_mode():
            o = step(x, start.clone())[some].cpu().double()
        error = ((o - exact).square().mean().sqrt() / exact.square().mean().sqrt()).item()
        row[column] = error
        if not error <= factor * limit:
            return None
        pool = start.clone()

        def call():
            with torch.inference_mode():
                return step(x, pool)

        return call

    sides = {"ours_ms": side(our_step(case), "ours_error", 1.0)}
    if peer is not None:
        if peer.step is None:
            raise Unsupported("it has no decode")
        sides["peer_ms"] = side(peer.step(case), "peer_error", PEER_LIMIT)
    sides = {n: f for n, f in sides.items() if f is not None}
    row |= _timed(sides, case.device)
    least = 2 * start.nbytes / copy_rate(case.device)  # each state read once and written once
    for column, call in sides.items():
        name = column.removesuffix("_ms")
        row |= {f"{name}_share": 1e3 * least / row[column], f"{name}_call_us": call_us(call, case.device)}
    return row


@functools.cache
def copy_rate(device: str) -> float:
    """Bytes per second, read and written, of a copy too large for any cache."""
    x = torch.empty(2**30 if device == "cuda" else 2**28, dtype=torch.uint8, device=device)
    y = torch.empty_like(x)
    return 2 * x.nbytes / (1e-3 * median_ms(lambda: y.copy_(x), device))


def call_us(call: Callable[[], object], device: str, count: int = 200) -> float:
    """Microseconds of Python and launch for a call, the GPU left to follow; the least of some rounds."""
    best = float("inf")
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    for _ in range(5):
        synchronize()
        start = time.perf_counter()
        for _ in range(count):
            call()
        best = min(best, 1e6 * (time.perf_counter() - start) / count)
    synchronize()
    return best


FIRST = """
import json, sys, time, torch
from kda_ops.bench.cases import Case, make_inputs
from kda_ops.bench import sides
spec = json.loads(sys.argv[1])
case = Case.read(spec["case"])
x = make_inputs(case)
synchronize = torch.cuda.synchronize if case.device == "cuda" else lambda: None
synchronize()
start = time.perf_counter()
forward = sides.our_forward(case) if spec["peer"] is None else next(p for p in sides.PEERS if p.name == spec["peer"]).forward(case)
with torch.no_grad():
    forward(x)
synchronize()
print(time.perf_counter() - start)
"""


def first_call(case: Case, peer: Peer | None, _oracles: dict) -> dict:
    """A row of "first_call_s": seconds (in the columns of times) from inputs to the first result of a forward, in a fresh process with empty caches."""
    row = _row(case, peer)
    if peer is not None:
        peer.forward(case)  # raises where it cannot
    for column, name in (("ours_ms", None), ("peer_ms", peer.name if peer else None)):
        if column == "peer_ms" and name is None:
            continue
        with tempfile.TemporaryDirectory() as empty:
            environment = os.environ | {"TRITON_CACHE_DIR": f"{empty}/triton", "TORCHINDUCTOR_CACHE_DIR": f"{empty}/inductor"}
            command = [sys.executable, "-c", FIRST, json.dumps({"case": case.spec(), "peer": name})]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=590)
        if done.returncode:
            raise RuntimeError((done.stderr.strip().splitlines() or ["no output"])[-1])
        row[column] = float(done.stdout.split()[-1])
    return row


RUN = {"fwd": whole, "fwdbwd": whole, "decode": decode, "first_call_s": first_call}


def main(argv: list[str]) -> int:
    """Measure the cases of ``{"peer": name or null, "cases": [..]}`` and print a line for each."""
    work = json.loads(argv[0])
    peer = next((p for p in PEERS if p.name == work["peer"]), None)
    oracles: dict = {}
    for spec in work["cases"]:
        case = Case.read(spec)
        name = " ".join((*case.key().values(), peer.name if peer else "alone"))
        try:
            missing = _missing(case)
            line = {"skip": f"{name}: {missing}"} if missing else {"row": RUN[case.pass_](case, peer, oracles)}
        except Unsupported as reason:
            line = {"skip": f"{name}: {reason}"}
        except Exception as error:  # a side that breaks costs its row, never the table
            line = {"skip": f"{name}: {type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"}
        print(json.dumps(line), flush=True)
        if case.device == "cuda":
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
