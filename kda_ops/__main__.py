"""Run a command line tool: ``python -m kda_ops COMMAND``; the commands are in `COMMANDS`."""

from __future__ import annotations

import argparse
import importlib
import sys

COMMANDS = {
    "doctor": ("kda_ops.doctor", "report versions, devices, backends and known compiler hazards"),
    "bench": ("kda_ops.bench.command", "benchmark our operators and the installed peers"),
    "counters": (
        "kda_ops.bench.counters",
        "count graphs, breaks, recompilations and folds of a small compiled model",
    ),
    "drift": (
        "kda_ops.bench.drift",
        "compare thousands of decode steps and the chunk form with float64",
    ),
    "tune": ("kda_ops.bench.tune", "measure kernel configurations on this GPU and cache the best"),
    "compile": (
        "kda_ops.bench.offline",
        "compile the kernels without a GPU and report registers, spills and shared memory",
    ),
    "digests": (
        "kda_ops.bench.digests",
        "compile the kernels of each evidence row and list the stale rows",
    ),
    "parallel": (
        "kda_ops.bench.parallel",
        "time one long sequence on one device and sharded over several",
    ),
    "evidence": (
        "kda_ops.bench.evidence",
        "run the GPU suite and the benchmark, write benchmarks/results/evidence.json",
    ),
}


def main(argv: list[str] | None = None) -> int:
    """Run one command; the arguments are its name and its options."""
    width = max(map(len, COMMANDS))
    parser = argparse.ArgumentParser(
        prog="python -m kda_ops",
        description="Kimi Delta Attention and Gated DeltaNet as PyTorch operators.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(f"  {n.ljust(width)}  {what}" for n, (_, what) in COMMANDS.items()),
    )
    parser.add_argument("command", choices=COMMANDS, nargs="?")
    parser.add_argument(
        "options", nargs=argparse.REMAINDER, help="see python -m kda_ops COMMAND --help"
    )
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help(sys.stderr)
        return 2
    return importlib.import_module(COMMANDS[args.command][0]).main(args.options) or 0


if __name__ == "__main__":
    sys.exit(main())
