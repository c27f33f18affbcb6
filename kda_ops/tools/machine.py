"""What commands share: their help, checks of their options, and versions."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable
from importlib import metadata

import torch

WIDTH = 128  # K = V, unless a setting says otherwise


class Help(argparse.RawDescriptionHelpFormatter):
    """Keep the lines of a description, and name an option's default where it says something."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        says = isinstance(action.default, (int, float, str)) and action.default not in (
            False,
            float("inf"),
            argparse.SUPPRESS,
        )
        return f"{action.help} (default: %(default)s)" if says else action.help


def installed(package: str) -> str | None:
    """Return the version of an installed package, or None, without importing it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


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


def parse_setting(text: str) -> dict[str, int]:
    """Return the sizes of a setting, with those it leaves out."""
    found = {n: int(x) for n, x in re.findall(r"(HV|B|T|H|D)(\d+)", text)}
    if (
        "".join(f"{n}{x}" for n, x in found.items()) != text
        or not {"B", "T", "H"} <= set(found)
        or not all(found.values())
    ):
        raise ValueError(f"a setting is written like B1T8192H96 (then HV.., D..), got {text!r}.")
    sizes = {"HV": found["H"], "D": WIDTH} | found
    if sizes["HV"] % sizes["H"]:
        raise ValueError(f"a setting has an HV that is a multiple of H, got {text!r}.")
    return sizes
