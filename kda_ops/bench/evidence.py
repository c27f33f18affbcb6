"""``python -m kda_ops evidence``: run the GPU suite and the benchmark, and write down what they found.

tests/gpu/evidence.json holds the hash of the kernels it belongs to, so a test that needs no GPU can tell when it no longer does.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from kda_ops.bench import compare

KERNELS = Path(__file__).resolve().parent.parent / "backends" / "triton"


def kernels_sha256(folder: Path = KERNELS) -> str:
    """The hash of the concatenated contents of ``**/*.py`` below a folder, in sorted path order."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def checkout() -> Path:
    """The root of the checkout that the package runs from."""
    root = KERNELS.parent.parent.parent
    if not (root / "tests").is_dir():
        raise SystemExit("evidence belongs to a checkout: there is no folder tests beside the package.")
    return root


def count_tests(summary: str) -> dict[str, int]:
    """Passed, failed and skipped from the last line of pytest; errors count as failed."""
    found = {word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|skipped|errors?)\b", summary)}
    return {
        "passed": found.get("passed", 0),
        "failed": found.get("failed", 0) + found.get("error", 0) + found.get("errors", 0),
        "skipped": found.get("skipped", 0),
    }


def run_suite(root: Path) -> dict[str, int]:
    """Run tests/gpu, its output passing through."""
    lines = []
    with subprocess.Popen([sys.executable, "-m", "pytest", "tests/gpu", "-q"], cwd=root, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    return count_tests(next((x for x in reversed(lines) if re.search(r"\d+ (passed|failed|skipped|error)", x)), ""))


def main(argv: list[str]) -> int:
    """Run the command line; non-zero if a test failed or our side was wrong in a row."""
    import torch

    parser = argparse.ArgumentParser(prog="python -m kda_ops evidence", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    compare.add_arguments(parser, device="cuda")
    parser.add_argument("--output", metavar="FILE", help="tests/gpu/evidence.json by default")
    args = parser.parse_args(argv)
    root = checkout()
    if not torch.cuda.is_available():
        raise SystemExit("evidence needs a CUDA device.")
    before = kernels_sha256()
    tests = run_suite(root)
    rows = compare.measure_arguments(args, "cuda", lambda line: print(line, flush=True))
    found = {
        "kernels_sha256": before,
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": metadata.version("triton"),
        "tests": tests,
        "rows": rows,
    }
    Path(args.output or root / "tests" / "gpu" / "evidence.json").write_text(json.dumps(found, indent=1) + "\n")
    if kernels_sha256() != before:
        raise SystemExit("the kernels changed while the evidence was taken: take it again.")
    return 1 if tests["failed"] or not tests["passed"] or any(r["ours_ms"] is None for r in rows) else 0
