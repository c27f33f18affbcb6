"""Run code, and files of tests, in fresh processes."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def python(
    script: str, *args: str, check: bool = True, timeout: float = 300.0, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run `script` in a new interpreter from the root of the checkout; add `env`."""
    out = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *args],
        env=os.environ | env,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert not check or out.returncode == 0, out.stdout + out.stderr
    return out


def run_tests(*words: str, **env: str) -> None:
    """Run files of tests in a process of their own, in which Triton meets another environment."""
    outer = {n: x for n, x in os.environ.items() if n != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=outer | {"OMP_NUM_THREADS": "1"} | env,
    )
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
