"""What commands share: their help, checks of their options, versions, and files of results."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path

import torch


class Help(argparse.RawDescriptionHelpFormatter):
    """Keep the lines of a description, and name an option's default where it says something."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        says = isinstance(action.default, (int, float, str)) and action.default not in (
            False,
            float("inf"),
            argparse.SUPPRESS,
        )
        return f"{action.help} (default: %(default)s)" if says else action.help


def checkout() -> Path:
    """Return the root of the checkout that the package runs from."""
    root = Path(__file__).resolve().parents[2]
    if not (root / "benchmarks").is_dir():
        raise SystemExit("evidence needs a checkout: there is no folder benchmarks here.")
    return root


def results() -> Path:
    """Return the folder of the checkout that holds what was measured."""
    return checkout() / "benchmarks" / "results"


def installed(package: str) -> str | None:
    """Return the version of an installed package, or None, without importing it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def describe(device: str) -> dict[str, str]:
    """Return the machine and the versions that the numbers belong to."""
    cuda = device == "cuda"
    name = torch.cuda.get_device_name() if cuda else f"CPU, {torch.get_num_threads()} threads"
    return {"device": name, "torch": torch.__version__, "triton": installed("triton") or "none"}


def names(known: Iterable[str], none: bool = False) -> Callable[[str], list[str]]:
    """Return the type of an option that takes some of the `known` names between commas.

    With `none`, that word means an empty list.
    """

    def parse(text: str) -> list[str]:
        given = [] if none and text in ("", "none") else text.split(",")
        if wrong := [n for n in given if n not in known]:
            raise argparse.ArgumentTypeError(f"{wrong[0]!r} is none of {', '.join(known)}")
        return given

    return parse


def need_device(parser: argparse.ArgumentParser, device: str) -> None:
    """Refuse a device that is not here."""
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device here; pass --device cpu.")


def need_writable(parser: argparse.ArgumentParser, path: str | Path | None) -> None:
    """Refuse a file that cannot be written, before anything is measured for it."""
    if path is not None and Path(path).is_dir():
        parser.error(f"{path} cannot be written: it is a folder.")
    if path is not None and not Path(path).absolute().parent.is_dir():
        parser.error(f"{path} cannot be written: there is no folder {Path(path).parent}.")


def write_json(path: str | Path, found: dict) -> None:
    """Replace a file as a whole, so that a reader or a run that was cut finds no half of it."""
    path = Path(path)
    new = path.with_name(path.name + ".new")
    new.write_text(json.dumps(found, indent=1) + "\n")
    os.replace(new, path)
