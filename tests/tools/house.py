"""Measure the checkout: ``python -m tests.tools.house`` prints the longest line, what the wheel
holds, the top-level files of tests, the lines of benchmark, and how large the kernels are.
"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Function:
    """A function of Triton: a kernel if it is launched, else a device function."""

    file: str
    name: str
    kernel: bool
    arguments: int  # besides constexprs and numbers in `do_not_specialize`
    lines: int


def _is_constexpr(x: ast.arg) -> bool:
    return x.annotation is not None and "constexpr" in ast.unparse(x.annotation)


def kernel_sources() -> Iterator[tuple[str, ast.Module]]:
    """Yield the name and the syntax of each file of the Triton backend."""
    for file in sorted((ROOT / "kda_ops" / "backends" / "triton").glob("*.py")):
        yield file.name, ast.parse(file.read_text(encoding="utf-8"))


def kernel_functions() -> list[Function]:
    """Measure all functions of Triton. A function is a kernel if `launch` names it."""
    sources = dict(kernel_sources())
    texts = "\n".join(ast.unparse(tree) for tree in sources.values())
    found = []
    for file, tree in sources.items():
        for node in tree.body:
            jits = [
                x
                for x in getattr(node, "decorator_list", ())
                if ast.unparse(x).startswith("triton.jit")
            ]
            if not jits or not isinstance(node, ast.FunctionDef):
                continue
            words = jits[0].keywords if isinstance(jits[0], ast.Call) else []
            plain = [
                x for k in words if k.arg == "do_not_specialize" for x in ast.literal_eval(k.value)
            ]
            taken = [a for a in node.args.args if not _is_constexpr(a) and a.arg not in plain]
            kernel = bool(words) or re.search(rf"launch\(\s*{node.name}\b", texts) is not None
            lines = (node.end_lineno or 0) - node.lineno + 1
            found.append(Function(file, node.name, kernel, len(taken), lines))
    return found


def kernel_literals() -> dict[int, int]:
    """Count numbers of two digits and more in functions of Triton, by their value.

    Those of powers of two up to 32 are not counted: they are shifts and layouts of threads.
    """
    counts: dict[int, int] = {}
    for _, tree in kernel_sources():
        for node in tree.body:
            if not any(
                ast.unparse(x).startswith("triton.jit") for x in getattr(node, "decorator_list", ())
            ):
                continue
            for x in ast.walk(node):
                if isinstance(x, ast.Constant) and type(x.value) in (int, float) and x.value >= 40:
                    counts[int(x.value)] = counts.get(int(x.value), 0) + 1
    return counts


def _arguments(f: Function) -> int:
    return f.arguments


def _lines(f: Function) -> int:
    return f.lines


def main() -> None:
    """Print all of it."""
    columns, where = longest_line()
    names = wheel()
    folders = sorted({"/".join(n.split("/")[:2]) for n in names if n.count("/") > 1})
    print(f"longest line            {columns} columns, {where}")
    print(f"wheel                   {len(names)} files, folders {', '.join(folders)}")
    print(f"top-level files, tests  {', '.join(sorted(top_level_tests()))}")
    print(f"lines of benchmark      {benchmark_lines()}")
    functions = kernel_functions()
    for title, some in (
        ("kernel", [f for f in functions if f.kernel]),
        ("device function", [f for f in functions if not f.kernel]),
    ):
        widest, longest = max(some, key=_arguments), max(some, key=_lines)
        print(f"widest {title:16} {widest.arguments} arguments, {widest.file}: {widest.name}")
        print(f"longest {title:15} {longest.lines} lines, {longest.file}: {longest.name}")
    counts = kernel_literals()
    print(f"literals in kernels     {sum(counts.values())}, of them {counts.get(64, 0)} are 64")


if __name__ == "__main__":
    main()
