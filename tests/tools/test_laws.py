"""tests/README.md names every test file, and `pytest -m quick` has a test of every law in it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
LAWS = {
    law.strip(): re.findall(r"`([\w/]+\.py)`", files)
    for law, files in re.findall(
        r"^\| (.+?) \| (`.+`) \|$",
        (TESTS / "README.md").read_text(encoding="utf-8").split("## Which law")[1],
        re.MULTILINE,
    )
}


@pytest.mark.quick
def test_every_test_file_has_a_law():
    named = [f for files in LAWS.values() for f in files]
    assert len(named) == len(set(named)), "a file has two laws"
    assert set(named) == {f.relative_to(TESTS).as_posix() for f in TESTS.rglob("test_*.py")}


@pytest.mark.quick
def test_every_law_has_a_quick_test():
    """Collect in another process, because this one may have been asked for one file only."""
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "-o", "addopts=", "-m", "quick", "--collect-only", "-qq"],
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-2000:]
    quick = dict(re.findall(r"^tests/(\S+): (\d+)$", found.stdout, re.MULTILINE))
    assert len(LAWS) > 40 and quick
    assert not [law for law, files in LAWS.items() if not quick.keys() & set(files)]
