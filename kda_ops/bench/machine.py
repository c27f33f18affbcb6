"""The machine that something is measured on, and the file that says what was found."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path

import torch


class Help(argparse.RawDescriptionHelpFormatter):
    """A description as it was written, and with each option its default, where that says
    something.
    """

    def _get_help_string(self, action: argparse.Action) -> str | None:
        says = isinstance(action.default, (int, float, str)) and action.default not in (
            False,
            float("inf"),
            argparse.SUPPRESS,
        )
        return f"{action.help} (default: %(default)s)" if says else action.help


def checkout() -> Path:
    """The root of the checkout that the package runs from."""
    root = Path(__file__).resolve().parents[2]
    if not (root / "tests").is_dir():
        raise SystemExit(
            "evidence belongs to a checkout: there is no folder tests beside the package."
        )
    return root


def default_dtype(device: str) -> torch.dtype:
    """What is measured unless asked otherwise: bf16 on GPUs, fp32 on CPUs."""
    return torch.bfloat16 if device == "cuda" else torch.float32


def installed(package: str) -> str | None:
    """The version of an installed package, read without importing it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def describe(device: str) -> dict[str, str]:
    """The machine and the versions that the numbers belong to."""
    import kda_ops

    name = (
        torch.cuda.get_device_name()
        if device == "cuda"
        else f"CPU, {torch.get_num_threads()} threads"
    )
    return {
        "device": name,
        "kda_ops": kda_ops.__version__,
        "torch": torch.__version__,
        "triton": installed("triton") or "none",
    }


def names(known: Iterable[str], none: bool = False) -> Callable[[str], list[str]]:
    """The type of an option that takes some of the `known` names between commas; with `none`, that
    word for none of them.
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


def need_backend(parser: argparse.ArgumentParser, backend: str) -> None:
    """Refuse a backend that torch.compile does not have."""
    if backend not in torch.compiler.list_backends(exclude_tags=()):
        parser.error(
            f"--backend {backend} is none of {', '.join(torch.compiler.list_backends())}, nor of "
            "torch's backends for debugging."
        )


def need_writable(parser: argparse.ArgumentParser, *paths: str | None) -> None:
    """Refuse files that cannot be written, before something is measured for them."""
    for path in paths:
        if path is not None and Path(path).is_dir():
            parser.error(f"{path} cannot be written: it is a folder.")
        if path is not None and not Path(path).absolute().parent.is_dir():
            parser.error(f"{path} cannot be written: there is no folder {Path(path).parent}.")


def need_positive(parser: argparse.ArgumentParser, args: argparse.Namespace, *names: str) -> None:
    """Refuse sizes and counts below 1."""
    for name in names:
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(args, name)}.")


def write_json(path: str | Path, found: dict) -> None:
    """Put `found` in the place of a file, whole: who reads meanwhile, or is left with what a run
    cut short, has the last or this.
    """
    path = Path(path)
    new = path.with_name(path.name + ".new")
    new.write_text(json.dumps(found, indent=1) + "\n")
    os.replace(new, path)
