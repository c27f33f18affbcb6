"""Run a command line tool: ``python -m kda_ops COMMAND``; the commands are in `COMMANDS`."""

from __future__ import annotations

import argparse
import importlib
import sys

COMMANDS = {
    "bits": ("kda_ops.tools.bits", "find modules whose bits depend on the number of tokens"),
    "doctor": ("kda_ops.doctor", "report versions, devices, backends and known compiler hazards"),
    "tune": ("kda_ops.tools.tune", "measure kernel configurations on this GPU and cache the best"),
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
