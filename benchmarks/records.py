"""Files of results: what each row says of its measurement, and how a file is written.

A row is a record. It names its card, the versions of torch and Triton, the commit and the day, and
it stays until a person measures it again.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
from pathlib import Path

import torch

from kda_ops.tools.machine import installed

STAMP = ("card", "torch", "triton", "commit", "date")
COMMIT = "KDA_OPS_COMMIT"  # the commit of a copy of the tree without git


def checkout() -> Path:
    """Return the root of the checkout."""
    return Path(__file__).resolve().parents[1]


def results() -> Path:
    """Return the folder of the checkout that holds what was measured."""
    return checkout() / "benchmarks" / "results"


def commit() -> str:
    """Return the commit of the checkout, with "+" after it if the package has changes."""
    if given := os.environ.get(COMMIT):
        return given

    def git(*words: str) -> subprocess.CompletedProcess:
        return subprocess.run(("git", *words), cwd=checkout(), capture_output=True, text=True)

    try:
        head = git("rev-parse", "--short=10", "HEAD")
        changed = git("diff", "--quiet", "HEAD", "--", "kda_ops", "registrations").returncode
    except FileNotFoundError:  # no git on this machine
        head = None
    if head is None or head.returncode:
        raise SystemExit(
            f"results name the commit that they are of, and {checkout()} is no git checkout: set "
            f"{COMMIT} to the commit that it is a copy of."
        )
    return head.stdout.strip() + "+" * (changed != 0)


def stamp(device: str) -> dict[str, str]:
    """Return what each row says of its measurement: `STAMP`."""
    cuda = device.startswith("cuda")
    card = torch.cuda.get_device_name() if cuda else f"CPU, {torch.get_num_threads()} threads"
    today = datetime.date.today().isoformat()
    values = card, torch.__version__, installed("triton") or "none", commit(), today
    return dict(zip(STAMP, values))


def need_writable(parser: argparse.ArgumentParser, path: str | Path | None) -> None:
    """Refuse a file that cannot be written, before anything is measured for it."""
    if path is not None and Path(path).is_dir():
        parser.error(f"{path} cannot be written: it is a folder.")
    if path is not None and not Path(path).absolute().parent.is_dir():
        parser.error(f"{path} cannot be written: there is no folder {Path(path).parent}.")


def write_json(path: str | Path, found: dict) -> None:
    """Replace a file as a whole, so that a reader or a run that was cut finds no half of it.

    Each row has one line.
    """
    path = Path(path)
    new = path.with_name(path.name + ".new")
    new.write_text(
        "{\n" + ",\n".join(f" {json.dumps(n)}: {_lines(x)}" for n, x in found.items()) + "\n}\n"
    )
    os.replace(new, path)


def _lines(value: object) -> str:
    if isinstance(value, list) and value:
        return "[\n" + ",\n".join(f"  {json.dumps(x)}" for x in value) + "\n ]"
    if isinstance(value, dict) and value:
        some = (f"  {json.dumps(n)}: {json.dumps(x)}" for n, x in value.items())
        return "{\n" + ",\n".join(some) + "\n }"
    return json.dumps(value)
