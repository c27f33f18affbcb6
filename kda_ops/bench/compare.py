"""``python -m kda_ops bench``: our operators beside the peers that are installed, one table.

A row is ``{op, pass, setting, gate, state, layout, peer, ours_ms, peer_ms, ours_error, peer_error}``. Times are medians in milliseconds (seconds for the pass
"first_call_s"), errors relative RMS against float64; a side whose error is over its limit has no time. Each peer has its own process, in
which both sides of its rows run on the same inputs, because some are configured by environment variables that are read at import.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from kda_ops.bench.cases import DECODE_SETTINGS, GATES, PASSES, SETTINGS, Case
from kda_ops.bench.sides import Peer, peers_of

KEY = ("op", "pass", "setting", "gate", "state", "layout", "peer")
SLOWER = 0.05  # the change of a row's time that --against calls a loss


def default_dtype(device: str) -> torch.dtype:
    """What is measured unless asked otherwise: bf16 on GPUs, fp32 on CPUs."""
    return torch.bfloat16 if device == "cuda" else torch.float32


def list_cases(
    device: str, ops: Iterable[str], passes: Iterable[str], gates: Iterable[str], settings: Iterable[str] | None, dtype: torch.dtype, peer: Peer | None
) -> list[Case]:
    """The cases of a table for one peer, in its order. A bounded gate is KDA's; decode runs on states of both dtypes in both layouts."""
    cases = []
    for op in ops:
        for pass_ in passes:
            wanted = [g for g in gates if op == "kda" or g != "bound"]
            if pass_ == "first_call_s":
                wanted = wanted[:1]
            if pass_ == "decode":
                wanted = [g for g in wanted if g in ("bound", "softplus")][:1]
            for setting in settings or (DECODE_SETTINGS if pass_ == "decode" else SETTINGS)[device]:
                for gate in wanted:
                    variants = [(s, lay) for s in ("fp32", "bf16") for lay in ("kv", "vk")] if pass_ == "decode" else [("fp32", "kv")]
                    cases += [Case(op, pass_, setting, gate, device, dtype, *v) for v in variants]
    if peer is not None:
        cases = [c for c in cases if (c.pass_ != "decode" or peer.step is not None) and (c.pass_ != "first_call_s" or peer.same)]
    return cases


def measure(cases: list[Case], peer: Peer | None, report: Callable[[dict | str], None]) -> list[dict]:
    """The rows of some cases against one peer, from a process of their own; `report` gets each row, or the reason why there is none, as it comes."""
    if not cases:
        return []
    work = json.dumps({"peer": peer.name if peer else None, "cases": [c.spec() for c in cases]})
    environment = os.environ | (peer.environment if peer else {})
    rows, command = [], [sys.executable, "-m", "kda_ops.bench.worker", work]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        for line in process.stdout:
            if not line.startswith(('{"row"', '{"skip"')):
                continue  # what a peer prints
            done = json.loads(line)
            if "row" in done:
                rows.append(done["row"])
            report(done.get("row", done.get("skip")))
    if process.returncode:
        report(f"{peer.name if peer else 'ours alone'}: the process ended with {process.returncode}")
    return rows


def _cell(value: float | None, digits: str = ".4g") -> str:
    return "-" if value is None else format(value, digits)


def ratio(row: dict) -> float | None:
    """How many times faster we are."""
    return row["peer_ms"] / row["ours_ms"] if row["ours_ms"] and row["peer_ms"] else None


HEAD = ("op", "pass", "setting", "gate", "state", "peer", "ours", "peer's", "ratio", "error", "peer's")
WIDTHS = (4, 13, 15, 9, 8, 13, 9, 9, 7, 8, 8)


def format_row(row: dict) -> str:
    """One line of the table in a terminal."""
    faster = ratio(row)
    cells = (
        row["op"], row["pass"], row["setting"], row["gate"], f"{row['state']} {row['layout']}", row["peer"] or "none",
        _cell(row["ours_ms"]), _cell(row["peer_ms"]), "-" if faster is None else f"{faster:.2f}x",
        _cell(row["ours_error"], ".1e"), _cell(row["peer_error"], ".1e"),
    )  # fmt: skip
    line = "".join(c.ljust(w) for c, w in zip(cells, WIDTHS)).rstrip()
    if row.get("ours_share") is not None:
        line += "  of a copy " + _both(row, "share", ".0%") + ", us per call " + _both(row, "call_us", ".0f")
    return line


def _both(row: dict, column: str, digits: str) -> str:
    return " | ".join(_cell(row.get(f"{side}_{column}"), digits) for side in ("ours", "peer"))


def compare_rows(new: list[dict], old: list[dict]) -> tuple[list[str], list[str]]:
    """What changed since `old`, a line per row that both have, and the names of the losses: rows slower by more than 5 %, or without a time now."""
    before = {tuple(r[n] for n in KEY): r["ours_ms"] for r in old}
    lines, losses = [], []
    for row in new:
        key = tuple(row[n] for n in KEY)
        if before.get(key) is None:
            continue
        name = " ".join(str(k) for k in key)
        if row["ours_ms"] is None:
            lines.append(f"{name}: {before[key]:.4g} -> no time")
            losses.append(name)
            continue
        change = row["ours_ms"] / before[key] - 1
        lines.append(f"{name}: {before[key]:.4g} -> {row['ours_ms']:.4g} ({change:+.1%})")
        if change > SLOWER:
            losses.append(name)
    return lines, losses


def read_rows(path: str | Path) -> list[dict]:
    """The rows of a file that ``--json`` or ``evidence`` wrote."""
    data = json.loads(Path(path).read_text())
    return data["rows"] if isinstance(data, dict) else data


def plot(rows: list[dict], path: str) -> None:
    """Both sides of every whole row as bars."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [r for r in rows if r["pass"] in ("fwd", "fwdbwd") and r["ours_ms"] and r["peer_ms"]]
    figure, axes = pyplot.subplots(figsize=(10, 1 + 0.35 * len(shown)))
    y = range(len(shown))
    axes.barh([i - 0.2 for i in y], [r["ours_ms"] for r in shown], 0.4, label="kda-ops")
    axes.barh([i + 0.2 for i in y], [r["peer_ms"] for r in shown], 0.4, label="peer")
    axes.set_yticks(list(y), [f"{r['op']} {r['pass']} {r['setting']} {r['gate']} ({r['peer']})" for r in shown])
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("ms (median)")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def describe(device: str) -> dict[str, str]:
    """The machine and the versions that the numbers belong to."""
    from importlib import metadata

    import kda_ops

    try:
        triton = metadata.version("triton")
    except metadata.PackageNotFoundError:
        triton = "none"
    name = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    return {"device": name, "kda_ops": kda_ops.__version__, "torch": torch.__version__, "triton": triton}


def run(device: str, *, ops, passes, gates, settings, dtype, peers, echo: Callable[[str], None]) -> list[dict]:
    """Measure and print a table; the rows."""
    about = describe(device)
    echo(", ".join(f"{n} {v}" for n, v in about.items()))
    known = [p for p in peers_of(device) if peers is None or p.name in peers]
    for p in known:
        echo(f"peer {p.name}: {p.version or 'not installed, skipped'}")
    present = [p for p in known if p.version]
    echo("".join(h.ljust(w) for h, w in zip(HEAD, WIDTHS)).rstrip())
    rows: list[dict] = []
    compared: set[Case] = set()
    for peer in (*present, None):  # last what no peer does
        cases = [c for c in list_cases(device, ops, passes, gates, settings, dtype, peer) if peer is not None or c not in compared]
        compared.update(cases)
        rows += measure(cases, peer, lambda x: echo(format_row(x) if isinstance(x, dict) else f"skipped: {x}"))
    return rows


def _names(known: Iterable[str]):
    def parse(text: str) -> list[str]:
        names = text.split(",")
        if wrong := [n for n in names if n not in known]:
            raise argparse.ArgumentTypeError(f"{wrong[0]!r} is none of {', '.join(known)}")
        return names

    return parse


def add_arguments(parser: argparse.ArgumentParser, device: str | None = None) -> None:
    """The options that choose what is measured."""
    if device is None:
        parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--ops", type=_names(("kda", "gdn")), default=["kda", "gdn"], help="comma-separated")
    parser.add_argument("--passes", type=_names(PASSES), default=list(PASSES), help=f"of {','.join(PASSES)}")
    parser.add_argument("--gates", type=_names(GATES), default=list(GATES), help=f"of {','.join(GATES)}")
    parser.add_argument("--settings", type=lambda s: s.split(","), help="such as B1T8192H96,B1T65536H16HV32")
    parser.add_argument("--dtype", choices=("float16", "bfloat16", "float32"), help="bfloat16 on CUDA, float32 on CPU by default")
    parser.add_argument("--peers", type=lambda s: s.split(","), help="names; all that are installed by default")


def measure_arguments(args: argparse.Namespace, device: str, echo: Callable[[str], None]) -> list[dict]:
    """Run what `add_arguments` parsed."""
    dtype = getattr(torch, args.dtype) if args.dtype else default_dtype(device)
    return run(device, ops=args.ops, passes=args.passes, gates=args.gates, settings=args.settings, dtype=dtype, peers=args.peers, echo=echo)


def main(argv: list[str]) -> int:
    """Run the command line; non-zero if our side failed its error check anywhere, or a row lost more than 5 % against ``--against``."""
    parser = argparse.ArgumentParser(prog="python -m kda_ops bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--json", metavar="FILE", help="write the rows")
    parser.add_argument("--plot", metavar="FILE", help="draw the rows (needs matplotlib)")
    parser.add_argument("--against", metavar="FILE", help="compare with rows written earlier")
    parser.add_argument("--readme", action="store_true", help="measure nothing: rewrite the tables of README.md from tests/gpu/evidence.json")
    args = parser.parse_args(argv)
    if args.readme:
        from kda_ops.bench import readme

        return readme.main([])
    old = read_rows(args.against) if args.against else []
    rows = measure_arguments(args, args.device, lambda line: print(line, flush=True))
    if args.json:
        Path(args.json).write_text(json.dumps(describe(args.device) | {"rows": rows}, indent=1) + "\n")
    if args.plot:
        plot(rows, args.plot)
    lines, losses = compare_rows(rows, old)
    print(*lines, sep="\n" if lines else "")
    wrong = [r for r in rows if r["ours_ms"] is None]
    for row in wrong:
        print(f"WRONG: {format_row(row)}")
    for name in losses:
        print(f"SLOWER: {name}")
    return 1 if wrong or losses else 0
