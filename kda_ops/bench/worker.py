"""Measures rows: both sides in one process, same inputs, error first, then medians. One worker
serves one peer, whose environment is set before imports.

The parent (`kda_ops.bench.compare`) starts ``python -m kda_ops.bench.worker JSON`` and reads a line
per case: a JSON row, or why there is none.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch
from torch import Tensor

from kda_ops import dispatch
from kda_ops.bench.cases import INPUTS, STAGES, Case, Oracle, make_inputs
from kda_ops.bench.sides import PEERS, Peer, Unsupported, our_forward, our_step

PEER_LIMIT = 10.0  # a peer must compute the same function; our budget of rounding is ours alone
# of the calls that only compile: their kernels do not depend on it, their memory does
SHARE_TOKENS = 1024
FIRST_LIMIT = 400  # seconds
UNCACHED = 300_000_000  # bytes of states, more than any cache holds
ROUNDS = 3  # sides alternate; each has the smallest of its rounds' medians, the one least disturbed


def median_ms(call: Callable[[], object], device: str) -> float:
    """The median time of a call, that of the GPU alone on CUDA, whatever the host takes to launch
    it (`_gpu_ms`).
    """
    if device == "cuda":
        return _gpu_ms(call)
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < 3 or (time.perf_counter() - begin < 1.0 and len(times) < 50):
        start = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - start))
        if times[-1] > 5e3:
            break
    return statistics.median(times)


def _gpu_ms(call: Callable[[], object]) -> float:
    """The median between events around a call. Before each the L2 cache is flushed, and then again
    until that takes the device longer than the host needs to launch the call: a host that is busy
    or slow would otherwise be timed where kernels take less than it does.
    """
    flushed = torch.empty(2**30, dtype=torch.uint8, device="cuda")

    def times(count: int, flushes: int, call: Callable[[], object]) -> list[float]:
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
        for start, end in pairs:
            for _ in range(flushes):
                flushed.zero_()
            start.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in pairs]

    def host_ms() -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - start)

    times(2, 1, call)
    flushes = 1 + math.ceil(
        1.5
        * statistics.median(host_ms() for _ in range(9))
        / statistics.median(times(9, 0, flushed.zero_))
    )
    once = statistics.median(times(5, flushes, call))
    return statistics.median(times(max(5, min(500, int(250 / once))), flushes, call)[2:])


def _row(case: Case, peer: Peer | None) -> dict:
    times = {"ours_ms": None, "peer_ms": None, "ours_error": None, "peer_error": None}
    return case.key() | {"peer": peer.name if peer else None} | times | {"also": {}}


def _peak_gb(call: Callable[[], object]) -> float:
    """What a call allocates at once above what was there before, its results included."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 1e9


def _missing(case: Case) -> str | None:
    """Why our side cannot run the case."""
    backend = dispatch.backend(torch.device(case.device))
    absent = [s for s in STAGES[case.pass_] if not hasattr(backend, s)]
    return (
        (
            f"the {dispatch.backend_name(torch.device(case.device))} backend has no "
            f"{', '.join(absent)} yet"
        )
        if absent
        else None
    )


def _timed(sides: dict[str, Callable[[], object]], device: str) -> dict[str, float]:
    best = dict.fromkeys(sides, float("inf"))
    for _ in range(ROUNDS):
        for name, call in sides.items():
            best[name] = min(best[name], median_ms(call, device))
    return best


def _measure(
    row: dict,
    sides: dict[str, Callable[[], Callable[[], object] | None]],
    device: str,
    memory: bool = False,
    more: Callable[[Callable[[], object], float], dict] | None = None,
    timed: Callable[[Callable], Callable[[], object]] = lambda call: call,
    count: int = 1,
) -> dict:
    """The row with the times of the sides, each made and checked by its function; None where it is
    wrong. A side that breaks leaves its reason instead.

    `more` gives what else to record of a side, from its call and its time; `timed` what is timed,
    from the call, and `count` how many calls that makes.
    """
    calls: dict[str, Callable[[], object]] = {}
    for name, make in sides.items():
        try:
            if (call := make()) is not None:
                calls[name] = call
        except Unsupported:
            raise
        except Exception as error:
            row["also"][f"{name.removesuffix('_ms')}_says"] = _line(error)
    if memory and device == "cuda":
        row["also"] |= {
            f"{n.removesuffix('_ms')}_peak_gb": _peak_gb(call) for n, call in calls.items()
        }
    times = {
        n: ms / count
        for n, ms in _timed({n: timed(call) for n, call in calls.items()}, device).items()
    }
    if more is not None:
        row["also"] |= {
            f"{n.removesuffix('_ms')}_{name}": x
            for n, call in calls.items()
            for name, x in more(call, times[n]).items()
        }
    return row | times


def _line(error: Exception) -> str:
    said = str(error).strip().splitlines()
    return f"{type(error).__name__}: {said[0] if said else ''}"


def _oracle(case: Case, x: dict[str, Tensor], do: Tensor | None, oracles: dict) -> Oracle:
    """The last oracle, where it serves: that of a training pass tells the error of a forward
    too.
    """
    name = (case.op, case.setting, case.gate, case.dtype)
    if name not in oracles or (do is not None and not oracles[name].training):
        oracles.clear()
        oracles[name] = Oracle(case, x, do)
    return oracles[name]


def whole(case: Case, peer: Peer | None, oracles: dict) -> dict:
    """A row of "fwd" or "fwdbwd"; of the latter with the error of every tensor and the peak of
    memory of each side.
    """
    row, training = _row(case, peer), case.pass_ == "fwdbwd"
    x = make_inputs(case)
    names = [n for n in INPUTS if n in x]
    do = (
        torch.randn(
            x["v"].shape, generator=torch.Generator(case.device).manual_seed(1), device=case.device
        ).to(case.dtype)
        if training
        else None
    )
    oracle = _oracle(case, x, do, oracles)
    if training:
        x = {n: t.requires_grad_() for n, t in x.items()}

    def call(forward) -> dict[str, Tensor]:
        if not training:
            with torch.no_grad():
                return {"o": forward(x)}
        o = forward(x)
        return {"o": o} | dict(
            zip(names, torch.autograd.grad(o, [x[n] for n in names], do, allow_unused=True))
        )

    def side(make_forward, name, limit, same=True):
        forward = make_forward(case)
        if same:
            errors = oracle.errors(call(forward))
            worst = max(errors, key=errors.__getitem__)
            row[f"{name}_error"] = errors[worst]
            if training:
                row["also"] |= {
                    f"{name}_worst": worst,
                    f"{name}_errors": {n: float(f"{e:.1e}") for n, e in errors.items()},
                }
            if not oracle.worst_share(errors) <= limit:
                return None
        return lambda: call(forward)

    sides = {"ours_ms": lambda: side(our_forward, "ours", 1.0)}
    if peer is not None:
        sides["peer_ms"] = lambda: side(peer.forward, "peer", PEER_LIMIT, peer.same)
    return _measure(row, sides, case.device, memory=training)


def decode(case: Case, peer: Peer | None, _oracles: dict) -> dict:
    """A row of "decode": one token per sequence on a pool of states, in place.

    The time is a call's share of a CUDA graph's replay, in which calls follow each other on pools
    of their own, as the layers of a model do: enough that none finds its states in a cache. The
    error is that of o or of the states after it, whichever takes more of its limit. Recorded
    beside, for each side: its share of the rate of a copy in the same process, and what a call
    costs Python.
    """
    row, (B, HV, D) = _row(case, peer), (case.sizes[n] for n in ("B", "HV", "D"))
    x = make_inputs(case)
    start = torch.randn(
        (B, HV, D, D), generator=torch.Generator(case.device).manual_seed(2), device=case.device
    )
    start = start.to(torch.bfloat16 if case.state == "bf16" else torch.float32)
    exact_case = Case(
        case.op, "decode", case.setting, case.gate, "cpu", torch.float64, layout=case.layout
    )
    exact = our_step(exact_case, {n: t.cpu().double() for n, t in x.items()})(start.cpu().double())
    limits = [
        4 * torch.finfo(t).eps
        for t in (case.dtype, max(case.dtype, start.dtype, key=lambda t: torch.finfo(t).eps))
    ]
    count = min(64, -(-UNCACHED // start.nbytes)) if case.device == "cuda" else 1
    graphs: dict[Callable, Callable[[], None]] = {}

    def side(make_step, column, factor):
        step = make_step(case, x)
        with torch.inference_mode():
            found = step(start.clone())
        shares = [
            ((got.cpu().double() - want).norm() / want.norm()).nan_to_num(torch.inf).item() / limit
            for got, want, limit in zip(found, exact, limits)
        ]
        worst = shares.index(max(shares))
        row[column] = shares[worst] * limits[worst]
        if shares[worst] > factor:
            return None
        pools = [start.clone() for _ in range(count)]

        def call():
            return step(pools[0])

        def layers():
            with torch.inference_mode():
                for pool in pools:
                    step(pool)

        graphs[call] = layers
        return call

    sides = {"ours_ms": lambda: side(our_step, "ours_error", 1.0)}
    if peer is not None:
        if peer.step is None:
            raise Unsupported("it has no decode")
        sides["peer_ms"] = lambda: side(peer.step, "peer_error", PEER_LIMIT)
    least = 2 * start.nbytes / copy_rate(case.device)  # each state read once and written once

    def more(call, ms):
        with torch.inference_mode():  # entered once, as by a server
            return {"share": 1e3 * least / ms, "call_us": call_us(call, case.device)}

    return _measure(
        row,
        sides,
        case.device,
        more=more,
        timed=lambda call: replayed(graphs[call], case.device),
        count=count,
    )


def replayed(call: Callable[[], object], device: str) -> Callable[[], object]:
    """On CUDA the replay of a graph of the call, so that what launches a short kernel is not timed
    with it; the call where it cannot be captured.
    """
    if device != "cuda":
        return call
    for _ in range(3):
        call()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            call()
    except RuntimeError:
        return call
    return graph.replay


@functools.cache
def copy_rate(device: str) -> float:
    """Bytes per second, read and written, of a copy too large for any cache."""
    x = torch.empty(2**30 if device == "cuda" else 2**28, dtype=torch.uint8, device=device)
    y = torch.empty_like(x)
    return 2 * x.nbytes / (1e-3 * median_ms(lambda: y.copy_(x), device))


def call_us(call: Callable[[], object], device: str, count: int = 200) -> float:
    """Microseconds of Python and launch for a call, the GPU left to follow; the least of some
    rounds, which go from core to core and take a second, for a host has other work too, and what
    slows a core down stays there for longer than a round.
    """
    best = float("inf")
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    with one_core_after_another() as move:
        for _ in range(20):
            move()
            synchronize()
            call()
            start = time.perf_counter()
            for _ in range(count):
                call()
            best = min(best, 1e6 * (time.perf_counter() - start) / count)
            time.sleep(0.04)
        synchronize()
    return best


@contextmanager
def one_core_after_another() -> Iterator[Callable[[], None]]:
    """While it lasts, a function that moves this thread to the next of the cores that it may run
    on; where a system can't say which, it does nothing.
    """
    if not hasattr(os, "sched_getaffinity"):
        yield lambda: None
        return

    def run_on(some: set[int]) -> None:
        with suppress(OSError):  # refused: this thread stays where it is
            os.sched_setaffinity(0, some)

    cores = os.sched_getaffinity(0)
    following = itertools.cycle(sorted(cores))
    try:
        yield lambda: run_on({next(following)})
    finally:
        run_on(cores)


FIRST = """
import json, sys, time, torch
from kda_ops.bench.cases import Case, Oracle, make_inputs
from kda_ops.bench import sides
spec = json.loads(sys.argv[1])
case = Case.read(spec["case"])
x = {n: t.requires_grad_() for n, t in make_inputs(case).items()}
torch.ones((), requires_grad=True).backward(torch.ones(()))
synchronize = torch.cuda.synchronize if case.device == "cuda" else lambda: None
synchronize()
start = time.perf_counter()
peers = {None: sides.our_forward} | {p.name: p.forward for p in sides.PEERS}
o = peers[spec["peer"]](case)(x)
synchronize()
forward = time.perf_counter() - start
print(forward, flush=True)
if spec["check"]:
    oracle = Oracle(case, {n: t.detach() for n, t in x.items()}, None)
    errors = oracle.errors({"o": o.detach()})
    print("error", errors["o"], oracle.worst_share(errors), flush=True)
start = time.perf_counter()
o.backward(o.detach())
synchronize()
print(forward + time.perf_counter() - start, flush=True)
"""


def _first(
    case: Case, name: str | None, folder: str, check: bool
) -> tuple[list[float], list[float], str]:
    """Seconds from inputs to o and to every gradient, as far as it came, in a new process whose
    caches are in a folder; if `check`, the error of o and its share of the budget; and why it came
    no further.
    """
    environment = os.environ | {
        "TRITON_CACHE_DIR": f"{folder}/triton",
        "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
    }
    command = [
        sys.executable,
        "-c",
        FIRST,
        json.dumps({"case": case.spec(), "peer": name, "check": check}),
    ]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=FIRST_LIMIT
        )
        out, why = (
            done.stdout,
            (done.stderr.strip().splitlines() or ["no output"])[-1] if done.returncode else "",
        )
    except subprocess.TimeoutExpired as cut:
        out, why = bytes(cut.stdout or b"").decode(), f"not done after {FIRST_LIMIT} s"
    error = re.search(r"^error (\S+) (\S+)$", out, re.MULTILINE)
    return (
        [float(line) for line in out.splitlines() if re.fullmatch(r"[0-9.e-]+", line)],
        list(map(float, error.groups())) if error else [],
        why,
    )


def first_call(case: Case, peer: Peer | None, _oracles: dict) -> dict:
    """A row of "first_call_s": seconds (in the columns of times) from inputs to the first o of a
    training call in a fresh process with empty caches.

    Beside it, to the first gradients, and both in a second process that finds the caches of the
    first. What torch imports for its own first backward is there before. A side whose o is wrong,
    or could not be checked, gets no time.
    """
    row = _row(case, peer)
    for side, name, limit in (
        ("ours", None, 1.0),
        *([("peer", peer.name, PEER_LIMIT)] if peer else []),
    ):
        with tempfile.TemporaryDirectory() as folder:
            for cache in ("empty", "warm") if side == "ours" else ("empty",):
                seconds, checked, why = _first(case, name, folder, cache == "empty")
                if why:
                    row["also"][f"{side}_says"] = why
                if cache == "empty":
                    row[f"{side}_error"], of_budget = checked or (None, math.inf)
                    if not of_budget <= limit:
                        break
                    row[f"{side}_ms"] = seconds[0]
                elif seconds:
                    row["also"][f"{side}_warm_fwd_s"] = seconds[0]
                if len(seconds) > 1:
                    row["also"][f"{side}{'' if cache == 'empty' else '_warm'}_fwdbwd_s"] = seconds[
                        1
                    ]
    return row


RUN = {"fwd": whole, "fwdbwd": whole, "decode": decode, "first_call_s": first_call}


def share(i: int, n: int) -> None:
    """From here on autotuned kernels run every n-th of their configurations, from the i-th, once: n
    such processes compile all of them on n cores.

    What they leave in the compiler's cache makes a measuring process tune without compiling; it
    still measures every configuration itself.
    """
    from triton.runtime.autotuner import Autotuner

    run, prune = Autotuner.run, Autotuner.prune_configs

    def run_share(self, *args, **kwargs):
        self.cache.clear()  # the tuning key leaves out flags that the compiler's key has
        return run(self, *args, **kwargs)

    def some(self, kwargs):
        every = prune(self, kwargs)
        return list(dict.fromkeys((every[0], *every[i::n])))

    Autotuner.run, Autotuner.prune_configs = run_share, some
    Autotuner.do_bench = property(lambda self: lambda call, quantiles: (call(), [0.0, 0.0, 0.0])[1])


def compile_share(case: Case, peer: Peer) -> None:
    """Call a peer once as a row would, on fewer tokens."""
    if case.pass_ not in ("fwd", "fwdbwd"):
        return
    short = Case.read(
        case.spec()
        | {"setting": re.sub(r"T\d+", f"T{min(case.sizes['T'], SHARE_TOKENS)}", case.setting)}
    )
    x = {n: t.requires_grad_(case.pass_ == "fwdbwd") for n, t in make_inputs(short).items()}
    o = peer.forward(short)(x)
    if case.pass_ == "fwdbwd":
        o.backward(torch.randn_like(o))


def main(argv: list[str]) -> int:
    """Measure the cases of ``{"peer": name or null, "cases": [..]}`` and print a line for each;
    with ``"share": [i, n]`` only compile.
    """
    work = json.loads(argv[0])
    peer = next((p for p in PEERS if p.name == work["peer"]), None)
    if work.get("share"):
        share(*work["share"])
    oracles: dict = {}
    for spec in work["cases"]:
        case = Case.read(spec)
        name = " ".join((*case.key().values(), peer.name if peer else "alone"))
        try:
            if work.get("share"):
                assert peer is not None  # it is a peer's kernels that are shared out
                compile_share(case, peer)
                continue
            missing = _missing(case)
            line = (
                {"skip": f"{name}: {missing}"}
                if missing
                else {"row": RUN[case.pass_](case, peer, oracles)}
            )
        except Exception as error:  # a side that breaks costs its row, never the table
            line = {"skip": f"{name}: {error if isinstance(error, Unsupported) else _line(error)}"}
        print(json.dumps(line), flush=True)
        if case.device == "cuda":
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
