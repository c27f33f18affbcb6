"""``python -m kda_ops doctor | bench | counters | drift | tune | compile | digests | parallel |
evidence``.
"""

from __future__ import annotations

import argparse
import importlib
import sys

COMMANDS = {
    "doctor": ("kda_ops.doctor", "versions, devices, backends, known compiler hazards"),
    "bench": ("kda_ops.bench.command", "our operators beside the installed peers"),
    "counters": (
        "kda_ops.bench.counters",
        "graphs, breaks, recompilations and folds of a small model under torch.compile",
    ),
    "drift": (
        "kda_ops.bench.drift",
        "thousands of decode steps beside the chunk form, against float64",
    ),
    "tune": ("kda_ops.bench.tune", "measure kernel configurations on this GPU and cache the best"),
    "compile": (
        "kda_ops.bench.offline",
        "compile the kernels without a GPU and report registers, spills and shared memory",
    ),
    "digests": (
        "kda_ops.bench.digests",
        "compile the kernels of every row of the evidence and tell which rows are stale",
    ),
    "parallel": (
        "kda_ops.bench.parallel",
        "one long sequence on one device and spread over several",
    ),
    "evidence": (
        "kda_ops.bench.evidence",
        "run the GPU suite and the benchmark, write tests/gpu/evidence.json",
    ),
}


def main(argv: list[str] | None = None) -> int:
    """Run one command; its options follow its name."""
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
