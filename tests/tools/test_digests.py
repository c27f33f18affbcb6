"""Only an instruction makes a row of the evidence stale; any line of code the suite's result."""

import ast
import importlib.util
import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from kda_ops.tools import digests
from kda_ops.tools.cases import case_of
from tests.support.benchmark import row

ROOT = Path(__file__).parents[2]
STEP = "kda_ops/backends/triton/step.py"
DECODE, FORWARD = "kda decode B1T1H32 bound fp32 kv", "gdn fwd B8T4096H32 softplus fp32 kv"
RUN = """
import json, sys
from kda_ops.tools.digests import kernels_of
print(json.dumps({n: kernels_of(n) for n in sys.argv[1:]}))
"""


def copy(folder, *changes):
    """Copy the package to a folder; a change is a file, a text in it and what takes its place."""
    for name in ("kda_ops", "registrations"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name, old, new in changes:
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new))
    return folder


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Compile cases of a copy of the tree; what it shares with another copy is compiled once."""
    cache = str(tmp_path_factory.mktemp("cache"))

    def compile_copy(tree):
        environment = {
            n: x for n, x in os.environ.items() if n not in ("TRITON_INTERPRET", "PYTHONPATH")
        }
        triton = Path(importlib.util.find_spec("triton").origin).parents[1]
        environment |= {"TRITON_CACHE_DIR": cache, "PYTHONPATH": f"{triton}{os.pathsep}{tree}"}
        command = [sys.executable, "-c", RUN, DECODE, FORWARD]
        said = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
        assert said.returncode == 0, said.stderr[-2000:]
        return json.loads(said.stdout)

    return compile_copy


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_only_an_instruction_makes_rows_stale_and_only_those_of_its_kernels(compiled, tmp_path):
    comment = "    # a comment,\n\n    # and lines that move\n"
    words = [
        (STEP, "recur", "steps"),
        (STEP, "    b_S = b_R", f"{comment}    b_S = b_R"),
        (STEP, "b_u", "b_write"),
    ]
    both = "o, final_state = p.new_output(), p.new_final_state()\n"
    apart = "o = p.new_output()\n        final_state = p.new_final_state()\n"
    host = ("kda_ops/chunk.py", both, apart)
    instruction = (STEP, "b_u = b_v - b_u", "b_u = b_v + b_u")
    kernels = {
        "tree": compiled(copy(tmp_path / "tree")),
        "words": compiled(copy(tmp_path / "words", *words)),
        "host": compiled(copy(tmp_path / "host", host)),
        "instruction": compiled(copy(tmp_path / "instruction", instruction)),
    }
    columns = ("op", "pass", "setting", "gate", "state", "layout")
    rows = [row(**dict(zip(columns, name.split()))) for name in (DECODE, FORWARD)]
    rows = [r | {"code": digests.code_of(kernels["tree"][case_of(r)])} for r in rows]
    valid = {name: [digests.is_valid(r, found) for r in rows] for name, found in kernels.items()}
    all_valid = dict.fromkeys(("tree", "words", "host"), [True, True])
    assert valid == all_valid | {"instruction": [False, True]}
    assert (
        kernels["words"][DECODE].startswith("steps:") and len(kernels["tree"][FORWARD].split()) == 2
    )

    source = digests.source_hash(tmp_path / "tree")
    suites = {"3.6.0": {"source": source}, "3.9.0": {"source": source}}
    code = {"triton": "3.6.0", "rows": kernels["tree"]}
    found = {"code": code, "suites": suites, "rows": rows}
    assert digests.report(found, kernels["tree"], tmp_path / "tree") == []
    said = "\n".join(digests.report(found, kernels["instruction"], tmp_path / "instruction"))
    assert (
        f"changed: {DECODE}: recur" in said
        and f"stale: {DECODE} fla" in said
        and "1 of 2 rows" in said
    )
    assert (
        FORWARD not in said
        and "tests/gpu ran with Triton 3.9.0 on source" in said
        and "python -m benchmarks evidence" in said
    )
    (oldest, newest, _) = digests.report(found, kernels["host"], tmp_path / "host")
    assert oldest.startswith(f"tests/gpu ran with Triton 3.6.0 on source {source}")
    assert newest.startswith(f"tests/gpu ran with Triton 3.9.0 on source {source}")
    del suites["3.6.0"]
    (absent, advice) = digests.report(found, kernels["tree"], tmp_path / "tree")
    assert absent == "tests/gpu did not run with Triton 3.6.0." and "--no-rows" in advice


def test_a_digest_is_of_what_reaches_the_device():
    def cubin(text=b"\1\2", name="scan", line=b"7", shared=64):
        """Make an ELF file with code, shared memory and line numbers."""
        sections = [("", 0, 0, b"", 0), (f".text.{name}", 1, 6, text, 0)]
        sections += [(f".nv.shared.{name}", 8, 3, b"", shared), (".debug_line", 1, 0, line, 0)]
        names = b"".join(s[0].encode() + b"\0" for s in sections) + b".shstrtab\0"
        body, headers, at = b"", b"", 0
        for label, kind, flags, data, size in (*sections, (".shstrtab", 3, 0, names, 0)):
            headers += struct.pack(
                "<2I4Q", at, kind, flags, 0, 64 + len(body), size or len(data)
            ).ljust(64, b"\0")
            body, at = body + data, at + len(label) + 1
        start = b"\x7fELF".ljust(40, b"\0") + struct.pack("<Q10x3H", 64 + len(body), 64, 5, 4)
        return start.ljust(64, b"\0") + body + headers

    from kda_ops.tools.machine_code import code_digest

    digest = code_digest(cubin(), "scan", 255)
    assert digest == code_digest(cubin(name="pass_over", line=b"8888"), "pass_over", 255)
    others = {code_digest(c, "scan", 255) for c in (cubin(b"\1\3"), cubin(shared=65))}
    assert len(others | {digest, code_digest(cubin(), "scan", 254)}) == 4


def test_the_key_of_a_row_has_neither_names_nor_order_but_every_launch():
    assert (
        digests.code_of("a:1 b:2") == digests.code_of("c:2 d:1") != digests.code_of("a:1 b:2 b:2")
    )
    assert digests.changed_kernels("a:1 b:2", "a:1 b:3 c:4") == "b, c"
    assert digests.changed_kernels("a:1", "a:1 a:1") == "how often kernels are launched"


SAME = {
    "a comment": ("x = 1", "x = 1  # one"),
    "a docstring": ('"""Say."""', '"""Say it."""'),
    "no docstring": ('    """Say."""\n', ""),
    "the format": ("f(a, b)", "f(\n        a,\n        b,\n    )"),
}
OTHER = {
    "a number": ("x = 1", "x = 2"),
    "an error's words": ("'no'", "'No'"),
    "a default": ("b=None", "b=0"),
    "a name": ("x", "y"),
}
TEXT = """x = 1

def g(a, b=None):
    \"\"\"Say.\"\"\"
    if a:
        raise ValueError('no')
    return f(a, b)
"""
CHANGES = [(c, True) for c in SAME.values()] + [(c, False) for c in OTHER.values()]


@pytest.mark.parametrize("change, same", CHANGES, ids=[*SAME, *OTHER])
def test_the_source_is_what_python_runs(change, same, tmp_path):
    def source(text, name="kda_ops/a.py"):
        file = tmp_path / str(len(list(tmp_path.iterdir()))) / name
        file.parent.mkdir(parents=True)
        file.write_text(text)
        return digests.source_hash(file.parents[len(Path(name).parts) - 1])

    assert change[0] in TEXT and (source(TEXT.replace(*change)) == source(TEXT)) == same
    assert source(TEXT) == source(TEXT, "registrations/b/c.py")
    assert source(TEXT) != source(TEXT, "kda_ops/tools/a.py")  # tools do not count


def test_the_tree_of_a_source_holds_nothing_that_a_version_of_python_adds():
    arguments = ("arguments", ("args", [("arg", ("arg", "a"))]))
    returns = ("Return", ("value", ("Name", ("id", "a"), ("ctx", ("Load",)))))
    function = ("FunctionDef", ("name", "f"), ("args", arguments), ("body", [returns]))
    assert digests.syntax(ast.parse("def f(a): return a\n")) == ("Module", ("body", [function]))
