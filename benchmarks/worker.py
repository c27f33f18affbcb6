"""Measure rows: both sides in one process on the same inputs, errors before times.

``python -m benchmarks.worker JSON`` serves one peer and prints a line of JSON per case: the row, or
the reason for its absence. Whoever starts it sets the peer's environment, before any import.
"""

from __future__ import annotations

import functools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.cases import KEY, Case, make_inputs
from benchmarks.oracle import Oracle
from benchmarks.peers import PEERS, Peer, Unsupported, our_forward, our_step
from benchmarks.timer import copy_rate, host_us, replayed
from kda_ops.tools.timer import median_ms, relative_error

SHARE = {"ours": 1.0, "peer": 10.0}  # of our budget of rounding, that a side's error may take
FIRST_LIMIT, MODEL_LIMIT = 400.0, 500.0  # seconds
MODEL_APART = 0.2  # RMS difference of probes: 1.4 where gradients have nothing in common
UNCACHED = 300_000_000  # bytes of states, more than any cache holds
ROUNDS = 3  # the sides take turns; each has the smallest of its medians, the least disturbed


class Side(NamedTuple):
    """A side that is right: one call, and what is timed, which makes so many `calls`."""

    call: Callable[[], object]
    timed: Callable[[], object]
    calls: int = 1


def new_row(case: Case, peer: Peer | None) -> dict:
    """Return a row without figures."""
    figures = dict.fromkeys(("ours_ms", "peer_ms", "ours_error", "peer_error"))
    key = dict(zip(KEY, case.name.split())) | {"peer": peer.name if peer else None}
    return key | figures | {"also": {}}


def fill(
    row: dict, make: Callable[[str], Side | None], device: str, more: Callable[[Side, float], dict]
) -> dict:
    """Put the times of both sides into a row; a side that breaks leaves its reason.

    `make` checks a side and returns None if it is wrong. `more` returns what else to record of it.
    """
    sides: dict[str, Side] = {}
    for name in ("ours", "peer") if row["peer"] else ("ours",):
        try:
            if (side := make(name)) is not None:
                sides[name] = side
        except Unsupported:
            raise
        except Exception as error:
            row["also"][f"{name}_says"] = first_line(error)
    best = dict.fromkeys(sides, math.inf)
    for _ in range(ROUNDS):
        for name, side in sides.items():
            best[name] = min(best[name], median_ms(side.timed, device) / side.calls)
    for name, side in sides.items():
        row[f"{name}_ms"] = best[name]
        row["also"] |= {f"{name}_{n}": x for n, x in more(side, best[name]).items()}
    return row


def first_line(error: Exception) -> str:
    """Return what an error says, in one line."""
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"


@functools.lru_cache(1)
def oracle_of(case: Case) -> tuple[Oracle, Tensor]:
    """Return the oracle of a training pass, which serves its forward too, and the gradient of o."""
    x, seeded = make_inputs(case), torch.Generator(case.device).manual_seed(1)
    do = torch.randn(x["v"].shape, generator=seeded, device=case.device).to(case.dtype)
    return Oracle(case, x, do), do


def whole(case: Case, peer: Peer | None) -> dict:
    """Measure a row of "fwd" or "fwdbwd"; the latter with every error and the peak of memory."""
    row, training = new_row(case, peer), case.pass_ == "fwdbwd"
    oracle, do = oracle_of(replace(case, pass_="fwdbwd"))
    x = {n: t.requires_grad_(training) for n, t in make_inputs(case).items()}

    def make(side: str) -> Side | None:
        run = (peer.forward if peer and side == "peer" else our_forward)(case)

        def call() -> dict[str, Tensor]:
            with torch.set_grad_enabled(training):
                o = run(x)
            grads = torch.autograd.grad(o, list(x.values()), do) if training else ()
            return {"o": o} | dict(zip(x, grads))

        errors = oracle.errors(call())
        worst = max(errors, key=errors.__getitem__)
        row[f"{side}_error"] = errors[worst]
        if training:
            each = {n: float(f"{e:.1e}") for n, e in errors.items()}
            row["also"] |= {f"{side}_worst": worst, f"{side}_errors": each}
        return Side(call, call) if oracle.worst_share(errors) <= SHARE[side] else None

    def more(side: Side, ms: float) -> dict:
        if not training or case.device != "cuda":
            return {}
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        side.call()
        return {"peak_gb": (torch.cuda.max_memory_allocated() - before) / 1e9}

    return fill(row, make, case.device, more)


def in_layers(step: Callable[[Tensor], Any], pools: list[Tensor]) -> Callable[[], None]:
    """Return a function that makes one decode call on each pool, like the layers of a model.

    It keeps all results to the end. Otherwise a peer that returns new states would write them to
    the same memory in every call, and that memory would stay in L2.
    """

    def call() -> None:
        with torch.inference_mode():
            list(map(step, pools))

    return call


def decode(case: Case, peer: Peer | None) -> dict:
    """Measure a row of "decode": one token per sequence on a pool of states, in place.

    The time is a call's share of a CUDA graph of many calls. Each has a pool of its own, like the
    layers of a model, so that no call finds its states in a cache. The error is of o
    or of the states, whichever takes more of its limit. Recorded too: the share of the rate of a
    copy, and what a call costs the host.
    """
    row, x = new_row(case, peer), make_inputs(case)
    shape = [case.sizes[n] for n in ("B", "HV", "D", "D")]
    seeded = torch.Generator(case.device).manual_seed(2)
    start = torch.randn(shape, generator=seeded, device=case.device)
    start = start.to(torch.bfloat16 if case.state == "bf16" else torch.float32)
    wide = {n: t.cpu().double() for n, t in x.items()}
    exact = our_step(Case.named(case.name, "cpu", torch.float64), wide)(start.cpu().double())
    eps = torch.finfo(case.dtype).eps
    limits = 4 * eps, 4 * max(eps, torch.finfo(start.dtype).eps)
    count = min(64, -(-UNCACHED // start.nbytes)) if case.device == "cuda" else 1

    def make(side: str) -> Side | None:
        step = (peer.step if peer and peer.step and side == "peer" else our_step)(case, x)
        with torch.inference_mode():
            found = step(start.clone())
        errors = [relative_error(got, want) for got, want in zip(found, exact)]
        shares = [error / limit for error, limit in zip(errors, limits)]
        row[f"{side}_error"] = errors[shares.index(max(shares))]
        if max(shares) > SHARE[side]:
            return None
        pools = [start.clone() for _ in range(count)]
        return Side(lambda: step(pools[0]), replayed(in_layers(step, pools), case.device), count)

    least = 2 * start.nbytes / copy_rate(case.device)  # each state read once and written once

    def more(side: Side, ms: float) -> dict:
        with torch.inference_mode():  # entered once, as by a server
            return {"share": 1e3 * least / ms, "call_us": host_us(side.call, case.device)}

    return fill(row, make, case.device, more)


def in_new_process(module: str, work: dict, limit: float | None) -> dict:
    """Run a module in a new process with empty caches; return what it reported last."""
    command, why = [sys.executable, "-m", module, json.dumps(work)], None
    with tempfile.TemporaryDirectory() as caches:
        empty = {"TRITON_CACHE_DIR": caches, "TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor"}
        peer = next((p for p in PEERS if p.name == work["peer"]), None)
        env = os.environ | empty | (peer.environment if peer else {})
        try:
            done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=limit)
            out = done.stdout
            if done.returncode:
                why = (done.stderr.strip().splitlines() or ["no output"])[-1]
        except subprocess.TimeoutExpired as cut:
            out, why = bytes(cut.stdout or b"").decode(), f"not done after {limit:g} s"
    found = [json.loads(line) for line in out.splitlines() if line.startswith('{"figures"')]
    return (found[-1]["figures"] if found else {}) | ({"says": why} if why else {})


def report(**figures: object) -> None:
    """Print what `in_new_process` reads."""
    print(json.dumps({"figures": figures}), flush=True)


def first_call(case: Case, peer: Peer | None) -> dict:
    """Measure a row of "first_call_s": a fresh process, seconds (in the columns of times) to o.

    Recorded too: the seconds to the first gradients. Without a right o there is no time.
    """
    row = new_row(case, peer)
    for side in ("ours", "peer") if peer else ("ours",):
        name = row["peer"] if side == "peer" else None
        found = in_new_process(
            "benchmarks.worker", work_of([case], name) | {"first": True}, FIRST_LIMIT
        )
        row[f"{side}_error"] = found.get("error")
        if found.get("share", math.inf) <= SHARE[side]:
            row[f"{side}_ms"] = found["fwd_s"]
            if "fwdbwd_s" in found:
                row["also"][f"{side}_fwdbwd_s"] = found["fwdbwd_s"]
        if "says" in found:
            row["also"][f"{side}_says"] = found["says"]
    return row


def first_here(case: Case, peer: Peer | None) -> None:
    """Time the first call of this process, check it, then time its backward."""
    x = {n: t.requires_grad_() for n, t in make_inputs(case).items()}
    # what torch imports for its own first backward is not ours
    torch.ones((), requires_grad=True).backward(torch.ones(()))
    synchronize = torch.cuda.synchronize if case.device == "cuda" else lambda: None
    synchronize()
    start = time.perf_counter()
    o = (peer.forward if peer else our_forward)(case)(x)
    synchronize()
    forward = time.perf_counter() - start
    oracle = Oracle(case, x, None)
    errors = oracle.errors({"o": o})
    found = {"fwd_s": forward, "error": errors["o"], "share": oracle.worst_share(errors)}
    report(**found)
    start = time.perf_counter()
    o.backward(o.detach())
    synchronize()
    report(**found, fwdbwd_s=forward + time.perf_counter() - start)


def model(case: Case, peer: Peer | None) -> dict:
    """Measure a row of "model": the training step of 8 layers, each side in a process of its own.

    The error of a peer is how far its first gradients are from ours. Recorded too: the first step,
    graphs, breaks and the peak of memory.
    """
    row, probe = new_row(case, peer), None
    for side in ("ours", "peer") if peer else ("ours",):
        name = row["peer"] if side == "peer" else None
        found = in_new_process("benchmarks.model", work_of([case], name), MODEL_LIMIT)
        figures, step = found.pop("probe", None), found.pop("ms", None)
        row["also"] |= {f"{side}_{n}": x for n, x in found.items()}
        probe = probe or figures
        off = [(a - b) ** 2 for a, b in zip(figures or (), probe or ())]
        error = (sum(off) / len(off)) ** 0.5 if off else None
        if side == "peer":
            row["peer_error"] = error
        if error is not None and error < MODEL_APART:
            row[f"{side}_ms"] = step
    return row


RUN = {"fwd": whole, "fwdbwd": whole, "decode": decode, "first_call_s": first_call, "model": model}


def work_of(cases: list[Case], peer: str | None) -> dict:
    """Return the JSON that `main` reads, for cases of one device and dtype."""
    dtype = str(cases[0].dtype).removeprefix("torch.")
    about = {"peer": peer, "device": cases[0].device, "dtype": dtype}
    return about | {"cases": [c.name for c in cases]}


def main(argv: list[str]) -> int:
    """Measure the cases of `work_of` and print a line for each."""
    work = json.loads(argv[0])
    peer = next((p for p in PEERS if p.name == work["peer"]), None)
    for name in work["cases"]:
        case = Case.named(name, work["device"], getattr(torch, work["dtype"]))
        if work.get("first"):
            first_here(case, peer)
            continue
        try:
            line: dict = {"row": RUN[case.pass_](case, peer)}
        except Exception as error:  # a side that breaks costs its row, never the table
            why = str(error) if isinstance(error, Unsupported) else first_line(error)
            line = {"name": f"{name} {work['peer'] or 'alone'}", "why": why}
        print(json.dumps(line), flush=True)
        if case.device == "cuda":
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
