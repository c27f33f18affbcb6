"""Measure our operators next to the installed peers and print one table.

Each peer has a process of its own (`benchmarks.worker`), in which both sides of its rows run on the
same inputs. Cases without a peer come last, alone. Times are medians in milliseconds (seconds for
the pass "first_call_s"), errors relative RMS against float64, the worst of o and all gradients. A
side whose error is over its limit has no time.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import product

import torch

from benchmarks import records, tables
from benchmarks.cases import GATES, KDA_GATES, PASSES, PROMISED, SAFE, Case, case_of, parse_setting
from benchmarks.peers import PEERS, Peer
from benchmarks.worker import work_of
from kda_ops.tools import machine

SETTINGS = {
    "cuda": {"decode": "B128T1H32,B8T1H32,B1T1H32", "model": "B4T4096H16"},
    "cpu": {"decode": "B8T1H8", "model": "B1T128H2D32"},
}
LONG = {"cuda": "B1T8192H96,B8T4096H32", "cpu": "B1T2048H8"}  # of the other passes
# The start of a reason why a row is missing that another run may measure.
UNFINISHED = ("out of time", "the process ended")


def list_cases(args: argparse.Namespace, device: str, dtype: torch.dtype) -> Iterator[Case]:
    """Yield the cases that options name; the layers of a model have the gate "softplus"."""
    for op, pass_ in product(args.ops, args.passes):
        gates = [g for g in args.gates if op == "kda" or g not in KDA_GATES]
        settings = args.settings or SETTINGS[device].get(pass_, LONG[device]).split(",")
        states = [("fp32", "kv")]
        if pass_ == "decode":
            gates = [g for g in gates if g in ("bound", "softplus")][:1]
            states = list(product(("fp32", "bf16"), ("kv", "vk")))
        elif pass_ == "first_call_s":
            gates, settings = gates[:1], settings[-1:]
        elif pass_ == "model":
            gates = [g for g in gates if g == "softplus"]
        for setting, gate, state in product(settings, gates, states):
            yield Case(op, pass_, setting, gate, device, dtype, *state)


def end_group(process: subprocess.Popen) -> None:
    """End a process that was started in a session of its own, and what it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def measure(
    cases: list[Case], peer: Peer | None, keep: Callable[[dict], None], until: float = float("inf")
) -> None:
    """Measure cases next to one peer, in a process that ends at `until`.

    `keep` gets each row as it comes, or ``{"name": .., "why": ..}`` of a row that has none.
    """
    name = peer.name if peer else None
    left = [f"{c.name} {name or 'alone'}" for c in cases]
    command = [sys.executable, "-m", "benchmarks.worker", json.dumps(work_of(cases, name))]
    words: dict = dict(stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    words["env"] = os.environ | (peer.environment if peer else {})
    with subprocess.Popen(command, start_new_session=True, **words) as process:
        limit = min(max(0.0, until - time.time()), threading.TIMEOUT_MAX)
        timer = threading.Timer(limit, end_group, [process])
        timer.start()
        try:
            for line in process.stdout or ():
                if line.startswith(('{"row"', '{"name"')):  # a peer may print too
                    found = json.loads(line)
                    left.pop(0)
                    keep(found.get("row", found))
            process.wait()
        finally:
            timer.cancel()
            end_group(process)
    ended = f"{UNFINISHED[1]} with {process.returncode}"
    for row in left:
        keep({"name": row, "why": UNFINISHED[0] if time.time() >= until else ended})


def run(
    cases: Iterable[Case],
    peers: list[Peer],
    keep: Callable[[dict], None],
    until: float = float("inf"),
) -> None:
    """Measure cases next to each peer in turn, then the cases without a row, alone.

    `keep` gets each row with its stamp, or the reason for its absence.
    """
    # a training pass and its forward follow each other, for they share an oracle
    todo, done = sorted(cases, key=lambda c: (c.op, c.gate, c.setting, c.pass_)), set()
    stamp = records.stamp(todo[0].device) if todo else {}

    def report(found: dict) -> None:
        if "why" in found:
            print(f"skipped: {found['name']}: {found['why']}", flush=True)
        else:
            found = found | stamp
            done.add(case_of(found))
            says = (f" {n}: {x}" for n, x in found["also"].items() if n.endswith("_says"))
            print(tables.row_line(found), *says, flush=True)
        keep(found)

    for peer in peers:
        has = {"decode": peer.step, "model": peer.layer}
        if some := [c for c in todo if has.get(c.pass_, True)]:
            measure(some, peer, report, until)
    if some := [c for c in todo if c.name not in done]:
        measure(some, None, report, until)


def _settings(text: str) -> list[str]:
    try:
        return [name for name in text.split(",") if parse_setting(name)]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose what is measured."""
    ops, known = ["kda", "gdn"], dict.fromkeys(p.name for p in PEERS)
    gates, passes = [g for g in GATES if g not in (*SAFE, *PROMISED)], list(PASSES[:-1])
    add = parser.add_argument
    add("--ops", type=machine.names(ops), default=ops, help="comma-separated")
    add("--passes", type=machine.names(PASSES), default=passes, help=f"of {','.join(PASSES)}")
    add("--gates", type=machine.names(GATES), default=gates, help=f"of {','.join(GATES)}")
    add("--settings", type=_settings, help="such as B1T8192H96,B1T65536H16HV32")
    add("--peers", type=machine.names(known, none=True), help=f"of {','.join(known)}, or none")
    add("--time-limit", type=float, default=float("inf"), metavar="S", help="end after S seconds")


def peers_of(device: str, chosen: list[str] | None) -> list[Peer]:
    """Return the installed peers of a device, of the chosen ones; None means all."""
    here = {p.name: p for p in PEERS if p.device == device and machine.installed(p.package)}
    if absent := [n for n in chosen or () if n not in here]:
        raise SystemExit(f"--peers {','.join(absent)}: not installed, or not for {device}.")
    return [p for n, p in here.items() if chosen is None or n in chosen]


def main(argv: list[str], epilog: str = "") -> int:
    """Run the command line; non-zero if nothing was measured or our side has no time."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        epilog=epilog,
        formatter_class=machine.Help,
    )
    add_arguments(parser)
    cuda = torch.cuda.is_available()
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if cuda else "cpu")
    parser.add_argument("--json", metavar="FILE", help="write the rows")
    args = parser.parse_args(argv)
    machine.need_device(parser, args.device)
    records.need_writable(parser, args.json)
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    cases = list(list_cases(args, args.device, dtype))
    if not cases:
        parser.error("these options leave nothing to measure: GDN has no bounded gate.")
    peers = peers_of(args.device, args.peers)
    versions = {p.name: machine.installed(p.package) for p in peers}
    about = {"dtype": str(dtype)[6:], "peers": versions}
    print(json.dumps(records.stamp(args.device) | about), tables.header(None), sep="\n", flush=True)
    rows, missing = list[dict](), list[str]()

    def keep(found: dict) -> None:
        if "why" in found:
            missing.append(found["name"])
            return
        rows.append(found)
        if args.json:
            records.write_json(args.json, about | {"rows": rows})

    run(cases, peers, keep, time.time() + args.time_limit)
    wrong = [case_of(r) for r in rows if r["ours_ms"] is None]
    wrong += [name for name in missing if name.endswith(" alone")]
    print("\n".join(f"no time of ours: {name}" for name in wrong))
    return int(bool(wrong) or not rows)
