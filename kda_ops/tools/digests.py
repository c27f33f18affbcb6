"""``python -m kda_ops digests``: the machine code that each row of the evidence was measured with.

A row stays valid while its case compiles, offline for sm_90, to the same code. Words, names, format
and moved files change no digest. Digests compare within one version of Triton. The GPU suite runs
the host's lines too, so its result belongs to `source_hash`.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from importlib import metadata
from multiprocessing import get_context
from pathlib import Path

import torch

from kda_ops.registrations import schemas
from kda_ops.tools.cases import Case, case_of, flags, make_inputs, name_of
from kda_ops.tools.machine import Help, checkout, results, write_json

PROCESSORS = 132  # of an H100 or H200, by which the launchers cut their work


def launch(case: Case) -> None:
    """Launch the kernels of our side of a row on meta tensors, within `offline.offline`."""
    from kda_ops import chunk, recurrent
    from kda_ops.backends.triton import BACKEND, tuning

    tuning.processors = lambda device: PROCESSORS  # type: ignore[assignment]
    rank, words = schemas.VARIANTS[case.op], flags(case)
    x = make_inputs(case)
    if case.pass_ == "decode":
        B, HV, D = (case.sizes[n] for n in ("B", "HV", "D"))
        dtype = torch.bfloat16 if case.state == "bf16" else torch.float32
        x["state"] = torch.empty((B, HV, D, D), dtype=dtype, device="meta")
        x["state_indices"] = torch.empty(B, dtype=torch.int32, device="meta")
        words = words | {"transpose_state_layout": case.layout == "vk"}
        BACKEND.run(recurrent.Decode, rank, _in_order(recurrent.Decode.names, x), words)
        return
    args = _in_order(chunk.INPUTS, x)
    if case.pass_ == "fwd":
        BACKEND.run(chunk.Infer, rank, args, words)
        return
    o, _, *kept = BACKEND.run(chunk.Forward, rank, args, words)
    need = schemas.mask_of(x is not None for x in args)
    both = (torch.empty_like(o), None, *kept, *args, None)
    BACKEND.run(chunk.Backward, rank, both, words | {"need": need})


def _in_order(names: Iterable[str], x: dict[str, torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
    return tuple(x.get(n) for n in names)


def kernels_of(name: str) -> str:
    """List the kernels of a case, each with its digest, in the order of their launches."""
    from kda_ops.tools.offline import offline

    case = Case.named(name, "meta")
    os.environ.pop("TRITON_PTXAS_PATH", None)  # digests are of the ptxas that Triton ships
    with offline(90, ["", ""]) as rows:
        launch(case)
    return " ".join(f"{row.kernel}:{row.code}" for row in rows)


def kernels_of_all(names: Iterable[str], jobs: int) -> dict[str, str]:
    """Map names of cases to their kernels; those of an operator and gate share a process."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name in sorted(set(names)):
        op, _, _, gate, *_ = name.split()
        groups.setdefault((op, gate.partition("_")[0]), []).append(name)
    found: dict[str, str] = {}
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        for some in pool.map(_kernels_of_some, sorted(groups.values(), key=len, reverse=True)):
            found |= some
    return found


def _kernels_of_some(names: list[str]) -> dict[str, str]:
    return {name: kernels_of(name) for name in names}


def code_of(kernels: str) -> str:
    """Hash the digests of a row's kernels, without names and order: the key of the row."""
    digests = sorted(kernel.rpartition(":")[2] for kernel in kernels.split())
    return hashlib.sha256(" ".join(digests).encode()).hexdigest()[:16]


def is_valid(row: dict, kernels: dict[str, str]) -> bool:
    """Whether a row was measured with the kernels that its case has, by the case's name."""
    return row["code"] == code_of(kernels.get(case_of(row), ""))


def changed_kernels(before: str, after: str) -> str:
    """Name the kernels whose digests differ."""
    old, new = (
        {k.rpartition(":")[2]: k.rpartition(":")[0] for k in x.split()} for x in (before, after)
    )
    names = {(old | new)[digest] for digest in old.keys() ^ new.keys()}
    return ", ".join(sorted(names)) or "how often kernels are launched"


def source_hash(root: Path) -> str:
    """Hash the syntax of the package in a checkout, without its tools.

    Comments, docstrings, format and the places of files do not count, nor does the version of
    Python.
    """
    files = [f for folder in ("kda_ops", "registrations") for f in (root / folder).rglob("*.py")]
    sources = (f.read_bytes() for f in files if f.parent != root / "kda_ops" / "tools")
    hashes = sorted(
        hashlib.sha256(repr(syntax(ast.parse(s))).encode()).hexdigest() for s in sources
    )
    return hashlib.sha256(" ".join(hashes).encode()).hexdigest()[:16]


def syntax(node: object) -> object:
    """Turn a syntax tree into tuples, without docstrings, positions and empty fields."""
    if isinstance(node, list):
        return [syntax(x) for x in node if not _is_string(x)]
    if not isinstance(node, ast.AST):
        return node
    fields = ((n, syntax(x)) for n, x in ast.iter_fields(node) if n not in ("kind", "type_comment"))
    return type(node).__name__, *((n, x) for n, x in fields if x is not None and x != [])


def _is_string(node: object) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def report(found: dict, kernels: dict[str, str], root: Path) -> list[str]:
    """List the kernels that differ from an evidence file, its stale rows, and what to do."""
    before, lines = found["code"]["rows"], list[str]()
    for name, now in kernels.items():
        if code_of(before.get(name, "")) != code_of(now):
            lines.append(f"changed: {name}: {changed_kernels(before.get(name, ''), now)}")
    stale = [r for r in found["rows"] if not is_valid(r, kernels)]
    lines += [f"stale: {name_of(r)}" for r in stale]
    if stale:
        lines.append(f"{len(stale)} of {len(found['rows'])} rows were measured with other kernels.")
    source, own = source_hash(root), found["code"]["triton"]
    if own not in found["suites"]:
        lines.append(f"tests/gpu did not run with Triton {own}.")
    for triton, ran in found["suites"].items():
        if ran["source"] != source:
            with_triton = f"tests/gpu ran with Triton {triton} on source {ran['source']}"
            lines.append(f"{with_triton}, which is {source} here.")
    if lines:
        lines.append(
            f"On a GPU, python -m benchmarks evidence measures these again, where Triton {own} is "
            "installed. With another Triton, --no-rows runs its tests."
        )
    return lines


def main(argv: list[str]) -> int:
    """Write the tree's digests into the evidence file; with ``--check`` fail if they differ."""
    parser = argparse.ArgumentParser(
        prog="python -m kda_ops digests", description=__doc__, formatter_class=Help
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing; fail if the file has digests of other kernels",
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    args = parser.parse_args(argv)
    root = checkout()
    path = results() / "evidence.json"
    found = json.loads(path.read_text())
    if (here := metadata.version("triton")) != found["code"]["triton"]:
        of = found["code"]["triton"]
        raise SystemExit(f"{path} has digests of triton {of}, here is {here}: they do not compare.")
    names = list(dict.fromkeys(map(case_of, found["rows"])))
    made = kernels_of_all(names, args.jobs)
    kernels = {name: made[name] for name in names}
    for line in report(found, kernels, root):
        print(line)
    codes = [
        {name: code_of(k) for name, k in rows.items()} for rows in (found["code"]["rows"], kernels)
    ]
    if args.check and codes[0] != codes[1]:
        print(f"{path} has digests of other kernels: run python -m kda_ops digests,")
        print("then python -m benchmarks tables, which leaves the stale rows out of the pages.")
        return 1
    if not args.check:
        write_json(path, found | {"code": {"triton": here, "rows": kernels}})
    count = len({k for each in kernels.values() for k in each.split()})
    print(f"{len(kernels)} cases, {len(set(codes[1].values()))} sets of kernels, {count} kernels")
    return 0
