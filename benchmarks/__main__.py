"""Run a tool of a developer: ``python -m benchmarks [COMMAND]``; without one, the benchmark."""

import importlib
import sys

COMMANDS = {
    "evidence": "run the GPU tests and the benchmark, and record both",
    "tables": "write tables and picture of the documentation from the results",
    "host": "what calls cost the host, next to operators that only allocate",
    "compile": "compile the kernels without a GPU: registers, spills and shared memory",
    "compare": "compare the machine code of two trees, on a GPU their bits too",
    "hub": "write the package as a kernel of the Hugging Face hub",
}
EPILOG = "\n".join(
    (
        "other commands:",
        *(f"  python -m benchmarks {name:10}{what}" for name, what in COMMANDS.items()),
        "  python -m benchmarks.layer               whole layers",
        "  python -m benchmarks.invariant           what invariant=True costs",
        "  python -m benchmarks.tritons FOLDER...   several versions of Triton",
        "  torchrun --nproc-per-node 2 -m benchmarks.parallel   one long sequence on several GPUs",
    )
)


def main(argv: list[str]) -> int:
    """Run one command; the arguments are its name and its options."""
    if argv and argv[0] in COMMANDS:
        return importlib.import_module(f"benchmarks.{argv[0]}").main(argv[1:])
    return importlib.import_module("benchmarks.runner").main(argv, EPILOG)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
