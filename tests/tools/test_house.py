"""Functions of kernels are of a size to read, and the wheel holds the package alone."""

import ast
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# In lines: a quarter above the longest function of Triton at the time of writing (120), and the
# longest of Gluon. pytest -s prints the ten largest functions.
LONGEST = {"triton.jit": 150, "gluon.jit": 137}


def functions_of(tree):
    """Yield lines, arguments that are no constexpr, decorator and name of compiled functions."""
    for node in ast.walk(tree):
        for decorator in getattr(node, "decorator_list", ()):
            kind = ast.unparse(decorator).split("(")[0]
            if kind in LONGEST and isinstance(node, ast.FunctionDef):
                given = [a for a in node.args.args if "constexpr" not in ast.unparse(a)]
                yield (node.end_lineno or 0) - node.lineno + 1, len(given), kind, node.name


@pytest.mark.quick
def test_functions_of_kernels_are_of_a_size_to_read():
    files = (ROOT / "kda_ops" / "backends" / "triton").rglob("*.py")
    found = sorted(
        (f for file in files for f in functions_of(ast.parse(file.read_text("utf-8")))),
        reverse=True,
    )
    assert {kind for *_, kind, _ in found} == set(LONGEST)
    for lines, arguments, kind, name in found[:10]:
        print(f"{lines:4} lines, {arguments:2} arguments: @{kind} {name}")
    assert not [name for lines, _, kind, name in found if lines > LONGEST[kind]]


def test_the_wheel_holds_the_package_and_nothing_else(tmp_path):
    pytest.importorskip("setuptools", minversion="77", reason="builds a wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("kda_ops", "registrations", "tests", "benchmarks", "examples"):
        shutil.copytree(ROOT / name, tmp_path / name)
    build = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, "."], cwd=tmp_path, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"kda_ops"}
    folders = {part for name in names for part in name.split("/")[1:-1]}
    assert not {"tests", "benchmarks", "examples"} & folders
    assert {"kda_ops/py.typed", "kda_ops/registrations/schemas.py"} <= {*names}
