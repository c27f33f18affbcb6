"""Run code in fresh processes, to test imports and first calls."""

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
