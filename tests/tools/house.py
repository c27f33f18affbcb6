"""Measure the checkout: ``python -m tests.tools.house`` prints the longest line, what the wheel
holds, the top-level files of tests and the lines of benchmark.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("benchmarks", "examples", "kda_ops", "registrations", "tests")
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "kda_ops", "registrations")
_DIRECTIVE = re.compile(r"\s+# (noqa|type: ignore)\b.*$")
_BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"


def longest_line() -> tuple[int, str]:
    """Return the most columns of a line of Python, without its directives to tools, and where."""
    return max(
        (len(_DIRECTIVE.sub("", line)), f"{file.relative_to(ROOT).as_posix()}:{number}")
        for folder in FOLDERS
        for file in (ROOT / folder).rglob("*.py")
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
    )


def wheel() -> list[str]:
    """Build a wheel from a copy of the sources and return the names in it."""
    with tempfile.TemporaryDirectory() as folder:
        for name in SOURCES:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, Path(folder) / name)
        # a folder that packages must leave out, wherever `packages` would find it
        for name in ("tests", "benchmarks", "examples"):
            shutil.copytree(ROOT / name, Path(folder) / name, dirs_exist_ok=True)
        subprocess.run(
            [sys.executable, "-c", _BUILD, folder], cwd=folder, check=True, capture_output=True
        )
        (built,) = Path(folder).glob("*.whl")
        return sorted(zipfile.ZipFile(built).namelist())


def top_level_tests() -> set[str]:
    """Return the names of the files that lie in tests itself."""
    return {f.name for f in (ROOT / "tests").iterdir() if f.is_file()}


def benchmark_lines() -> int:
    """Return how many lines of Python the benchmark has."""
    files = (ROOT / "benchmarks").rglob("*.py")
    return sum(len(f.read_text(encoding="utf-8").splitlines()) for f in files)


def main() -> None:
    """Print all of it."""
    columns, where = longest_line()
    names = wheel()
    folders = sorted({"/".join(n.split("/")[:2]) for n in names if n.count("/") > 1})
    print(f"longest line            {columns} columns, {where}")
    print(f"wheel                   {len(names)} files, folders {', '.join(folders)}")
    print(f"top-level files, tests  {', '.join(sorted(top_level_tests()))}")
    print(f"lines of benchmark      {benchmark_lines()}")


if __name__ == "__main__":
    main()
