"""``python -m kda_ops bench``: our operators beside the peers that are installed, one table.

A row is ``{op, pass, setting, gate, state, layout, peer, ours_ms, peer_ms, ours_error, peer_error,
also}``. Times are medians in milliseconds (seconds for the pass "first_call_s"), errors relative
RMS against float64, the worst of o and all gradients; a side whose error is over its limit has no
time. `also` holds what else was measured: of a training pass the error of each tensor by name,
which is the worst and the peak of memory; first calls with backward and with warm caches; what a
peer that broke said. Each peer has its own process, in which both sides of its rows run on the same
inputs, because some are configured by environment variables that are read at import. Where a peer
tunes at run time, several processes compile what it will choose from, each time just before it is
measured. Several GPUs measure side by side, except what times the host too (decode, first calls).
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import chain, groupby
from pathlib import Path

import torch

from kda_ops.bench import picture
from kda_ops.bench.cases import (
    DECODE_SETTINGS,
    GATES,
    KDA_GATES,
    PASSES,
    PROMISED,
    SETTINGS,
    Case,
    parse_setting,
)
from kda_ops.bench.machine import (
    Help,
    default_dtype,
    describe,
    names,
    need_device,
    need_writable,
    write_json,
)
from kda_ops.bench.rows import HEAD, KEY, WIDTHS, compare_rows, format_row, read_rows
from kda_ops.bench.sides import PEERS, Peer, peers_of

# how the reason begins why a case has no row that it may get another time
UNFINISHED = ("out of time", "the process ended")
SHARE = 0.75  # of the time that is left, for each peer; the rest is for the sides after it


def list_cases(
    device: str,
    ops: Sequence[str],
    passes: Iterable[str],
    gates: Iterable[str],
    settings: Sequence[str] | None,
    dtype: torch.dtype,
    peer: Peer | None,
) -> list[Case]:
    """The cases of a table for one peer. Bounds and promises are for KDA; decode is on fp32 and
    bf16 states, both layouts, a first call at the last setting.
    """
    cases = []
    for op in ops:
        for pass_ in passes:
            wanted = [g for g in gates if op == "kda" or g not in KDA_GATES]
            if pass_ == "first_call_s":
                wanted = wanted[:1]
            if pass_ == "decode":
                wanted = [g for g in wanted if g in ("bound", "softplus")][:1]
            sizes = settings or (DECODE_SETTINGS if pass_ == "decode" else SETTINGS)[device]
            for setting in sizes[-1:] if pass_ == "first_call_s" else sizes:
                for gate in wanted:
                    variants = (
                        [(s, o) for s in ("fp32", "bf16") for o in ("kv", "vk")]
                        if pass_ == "decode"
                        else [("fp32", "kv")]
                    )
                    cases += [Case(op, pass_, setting, gate, device, dtype, *v) for v in variants]
    return suited(cases, peer)


def suited(cases: list[Case], peer: Peer | None) -> list[Case]:
    """The cases that a peer has a side of; what stands there for scale does so once, beside the
    first operator and gate.
    """
    if peer is not None:
        cases = [
            c
            for c in cases
            if (c.pass_ != "decode" or peer.step is not None)
            and (c.pass_ != "first_call_s" or peer.same)
        ]
    if peer is not None and not peer.same:
        cases = [c for c in cases if (c.op, c.gate) == (cases[0].op, cases[0].gate)]
    return cases


def order(cases: list[Case]) -> list[Case]:
    """What is measured first, for a run that may be cut: gates inside before given ones, forward
    and backward before decode, first calls last.
    """
    stages = {"fwdbwd": 0, "fwd": 0, "decode": 1, "first_call_s": 3}

    def rank(case: Case) -> tuple:
        stage = stages[case.pass_] or (0 if case.inside else 2)
        return stage, GATES.index(case.gate), case.op != "kda", case.setting, case.pass_ == "fwd"

    return sorted(cases, key=rank)


def in_turn(cases: list[Case]) -> list[list[Case]]:
    """Ordered cases in groups that share what a peer tunes, so that each can be compiled just
    before it is measured and a run that is cut has rows.
    """
    return [
        list(group)
        for _, group in groupby(cases, lambda c: (c.op, c.gate, c.setting) if c.whole else None)
    ]


def gpus(device: str) -> list[str]:
    """The GPUs to measure on, as CUDA_VISIBLE_DEVICES names them; one nameless place on a CPU."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return (
        (visible.split(",") if visible else list(map(str, range(torch.cuda.device_count()))))
        or [""]
        if device == "cuda"
        else [""]
    )


def _worker(work: dict, peer: Peer | None, gpu: str = "", **words) -> subprocess.Popen:
    command = [sys.executable, "-m", "kda_ops.bench.worker", json.dumps(work)]
    environment = (
        os.environ
        | (peer.environment if peer else {})
        | ({"CUDA_VISIBLE_DEVICES": gpu} if gpu else {})
    )
    return subprocess.Popen(command, env=environment, text=True, preexec_fn=os.setpgrp, **words)


def end_group(process: subprocess.Popen) -> None:
    """End a worker and what it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def compile_ahead(
    cases: list[Case], peer: Peer, until: float, gpu: str = "", places: int = 1
) -> None:
    """Compile what a peer's tuning will choose from, on all cores, or on the share of one of
    several places.
    """
    count = max(1, min(30, ((os.cpu_count() or 1) - 2) // places))
    specs = [c.spec() for c in cases]
    works = [{"peer": peer.name, "cases": specs, "share": [i, count]} for i in range(count)]
    shares = [
        _worker(work, peer, gpu, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for work in works
    ]
    try:
        for process in shares:
            with suppress(subprocess.TimeoutExpired):
                process.wait(None if until == float("inf") else max(0.0, until - time.time()))
    finally:
        for process in shares:
            end_group(process)
            process.wait()


def measure(
    cases: list[Case],
    peer: Peer | None,
    report: Callable[[dict | str], None],
    until: float = float("inf"),
    gpu: str = "",
) -> list[dict]:
    """The rows of some cases against one peer, from a process of their own that ends at `until`;
    `report` gets each row, or why there is none, as it comes.
    """
    if not cases:
        return []
    rows, reached = [], 0
    work = {"peer": peer.name if peer else None, "cases": [c.spec() for c in cases]}
    with _worker(work, peer, gpu, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        timer = threading.Timer(
            min(max(0.0, until - time.time()), threading.TIMEOUT_MAX), end_group, [process]
        )
        timer.daemon = True
        timer.start()
        try:
            assert process.stdout is not None  # it is a pipe
            for line in process.stdout:
                if not line.startswith(('{"row"', '{"skip"')):
                    continue  # what a peer prints
                done, reached = json.loads(line), reached + 1
                if "row" in done:
                    rows.append(done["row"])
                report(done.get("row", done.get("skip")))
            process.wait()
        finally:
            timer.cancel()
            end_group(process)
    if process.returncode:
        why = (
            "out of time"
            if time.time() >= until
            else f"the process ended with {process.returncode}"
        )
        for case in cases[reached:]:
            report(f"{' '.join(case.key().values())} {peer.name if peer else 'alone'}: {why}")
    return rows


def versions(device: str, peers: list[str] | None) -> dict[str, str | None]:
    """What is installed of some peers, or of all, that run on a device."""
    return {p.name: p.version for p in peers_of(device) if peers is None or p.name in peers}


def run(
    device: str,
    *,
    ops,
    passes,
    gates,
    settings,
    dtype,
    peers,
    echo: Callable[[str], None],
    until: float = float("inf"),
    have: Iterable[dict] = (),
    keep: Callable[[dict | str], None] = lambda x: None,
    only: list[Case] | None = None,
) -> list[dict]:
    """Measure and print a table; the rows, those that it `have` already first. `keep` gets each
    row, or the reason why there is none, as it comes.

    `only` are cases in place of those that the words list.
    """
    about = describe(device)
    echo(", ".join(f"{n} {v}" for n, v in about.items()))
    known = versions(device, peers)
    for name, version in known.items():
        echo(f"peer {name}: {version or 'not installed, skipped'}")
    present = [p for p in peers_of(device) if known.get(p.name)]
    echo("".join(h.ljust(w) for h, w in zip(HEAD, WIDTHS)).rstrip())
    rows, places, one = list(have), gpus(device), threading.Lock()

    def report(x: dict | str) -> None:
        with one:
            echo(format_row(x) if isinstance(x, dict) else f"skipped: {x}")
            keep(x)

    def take(
        group: list[Case], peer: Peer | None, end: float, gpu: str, at_once: int = 1
    ) -> list[dict]:
        if peer is not None and peer.tunes and group[0].whole:
            compile_ahead(group, peer, end, gpu, at_once)
        return measure(group, peer, report, end, gpu)

    free: queue.SimpleQueue[str] = queue.SimpleQueue()
    for place in places:
        free.put(place)

    def beside(group: list[Case], peer: Peer | None, end: float) -> list[dict]:
        gpu = free.get()
        try:
            return take(group, peer, end, gpu, len(places))
        finally:
            free.put(gpu)

    for peer in (*present, None):  # last what no peer did
        done = {
            tuple(r[n] for n in KEY[:-1]) for r in rows if peer is None or r["peer"] == peer.name
        }
        listed = (
            list_cases(device, ops, passes, gates, settings, dtype, peer)
            if only is None
            else suited(only, peer)
        )
        cases = order([c for c in listed if tuple(c.key().values()) not in done])
        end = until if peer is None else time.time() + SHARE * (until - time.time())
        several = len(places) > 1
        groups = in_turn(cases) if several or (peer is not None and peer.tunes) else [cases]
        if several:
            with ThreadPoolExecutor(len(places)) as pool:
                rows += chain.from_iterable(
                    pool.map(partial(beside, peer=peer, end=end), [g for g in groups if g[0].whole])
                )
            groups = [g for g in groups if not g[0].whole]
        for group in groups:
            rows += take(group, peer, end, places[0])
    return rows


def died(skipped: dict[str, str]) -> list[str]:
    """The names of cases whose process ended where nothing but our side ran."""
    return [
        name
        for name, why in skipped.items()
        if name.endswith(" alone") and why.startswith("the process ended")
    ]


def _settings(text: str) -> list[str]:
    for name in text.split(","):
        try:
            parse_setting(name)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return text.split(",")


def add_arguments(parser: argparse.ArgumentParser, device: str | None = None) -> None:
    """The options that choose what is measured."""
    if device is None:
        parser.add_argument(
            "--device",
            choices=("cpu", "cuda"),
            default="cuda" if torch.cuda.is_available() else "cpu",
        )
    parser.add_argument(
        "--ops", type=names(("kda", "gdn")), default=["kda", "gdn"], help="comma-separated"
    )
    parser.add_argument(
        "--passes", type=names(PASSES), default=list(PASSES), help=f"of {','.join(PASSES)}"
    )
    parser.add_argument(
        "--gates",
        type=names(GATES),
        default=[g for g in GATES if g not in PROMISED],
        help=f"of {','.join(GATES)}",
    )
    parser.add_argument("--settings", type=_settings, help="such as B1T8192H96,B1T65536H16HV32")
    parser.add_argument(
        "--dtype",
        choices=("float16", "bfloat16", "float32"),
        help="bfloat16 on CUDA, float32 on CPU by default",
    )
    peers = list(dict.fromkeys(p.name for p in PEERS))
    parser.add_argument(
        "--peers",
        type=names(peers, none=True),
        help=f"of {','.join(peers)}, or none; all that are installed by default",
    )
    parser.add_argument(
        "--time-limit",
        type=float,
        default=float("inf"),
        metavar="S",
        help="stop after S seconds; what was not reached is named",
    )


def measure_arguments(
    args: argparse.Namespace, device: str, echo: Callable[[str], None], **words
) -> list[dict]:
    """Run what `add_arguments` parsed; `words` as of `run`."""
    dtype = getattr(torch, args.dtype) if args.dtype else default_dtype(device)
    words = dict(until=time.time() + args.time_limit) | words
    return run(
        device,
        ops=args.ops,
        passes=args.passes,
        gates=args.gates,
        settings=args.settings,
        dtype=dtype,
        peers=args.peers,
        echo=echo,
        **words,
    )


def main(argv: list[str]) -> int:
    """Run the command line; non-zero if nothing was measured, our side broke or failed its error
    check, or a row of ``--against`` lost its time or over 5 %, or the file it names has none of
    these cases.
    """
    parser = argparse.ArgumentParser(
        prog="python -m kda_ops bench",
        description=__doc__,
        formatter_class=Help,
        epilog=(
            "bench --model: a training step of a whole model instead (bench --model --help)\n"
            "bench --readme: measure nothing, rewrite the tables of README.md and their picture "
            "from benchmarks/results/evidence.json"
        ),
    )
    add_arguments(parser)
    parser.add_argument("--json", metavar="FILE", help="write the rows")
    parser.add_argument("--plot", metavar="FILE", help="draw the rows (SVG)")
    parser.add_argument("--against", metavar="FILE", help="compare with rows written earlier")
    args = parser.parse_args(argv)
    need_device(parser, args.device)
    need_writable(parser, args.json, args.plot)
    if args.plot:
        import matplotlib  # noqa: F401  (fail before measuring, not after)
    for peer in args.peers or ():
        if peer not in (p.name for p in peers_of(args.device)):
            parser.error(f"--peers {peer}: it does not run on --device {args.device}.")
    if set(args.ops) == {"gdn"} and set(args.gates) == {"bound"}:
        parser.error("--gates bound: that gate is KDA's, and --ops gdn leaves nothing to measure.")
    dtype = args.dtype or str(default_dtype(args.device)).removeprefix("torch.")
    try:
        old = read_rows(args.against, dtype) if args.against else []
    except (OSError, ValueError) as error:
        parser.error(f"--against {args.against}: {error}")
    skipped: dict[str, str] = {}

    def keep(x: dict | str) -> None:
        if isinstance(x, str):
            name, why = x.split(": ", 1)
            skipped[name] = why

    rows = measure_arguments(args, args.device, lambda line: print(line, flush=True), keep=keep)
    if args.json:
        write_json(
            args.json,
            describe(args.device)
            | {"dtype": dtype, "peers": versions(args.device, args.peers), "rows": rows},
        )
    if args.plot:
        Path(args.plot).write_text(
            picture.draw(rows, ", ".join(f"{n} {v}" for n, v in describe(args.device).items()))
        )
    lines, losses = compare_rows(rows, old, skipped)
    print(*lines, sep="\n" if lines else "")
    wrong = [r for r in rows if r["ours_ms"] is None]
    for row in wrong:
        print(f"WRONG: {format_row(row)}")
    for name in losses:
        print(f"SLOWER: {name}")
    for name in died(skipped):
        print(f"DIED: {name}: {skipped[name]}")
    if not rows:
        print("nothing was measured")
    if incomparable := bool(args.against and not lines):
        print(f"{args.against} has a time of none of these cases")
    return 1 if wrong or losses or died(skipped) or not rows or incomparable else 0
