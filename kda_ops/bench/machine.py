"""The machine that something is measured on, and the file that says what was found."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch


def default_dtype(device: str) -> torch.dtype:
    """What is measured unless asked otherwise: bf16 on GPUs, fp32 on CPUs."""
    return torch.bfloat16 if device == "cuda" else torch.float32


def describe(device: str) -> dict[str, str]:
    """The machine and the versions that the numbers belong to."""
    from importlib import metadata

    import kda_ops

    try:
        triton = metadata.version("triton")
    except metadata.PackageNotFoundError:
        triton = "none"
    name = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    return {"device": name, "kda_ops": kda_ops.__version__, "torch": torch.__version__, "triton": triton}


def need_device(parser: argparse.ArgumentParser, device: str) -> None:
    """Refuse a device that is not here."""
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device here; pass --device cpu.")


def need_folder(parser: argparse.ArgumentParser, *paths: str | None) -> None:
    """Refuse files that cannot be written, before something is measured for them."""
    for path in paths:
        if path is not None and not Path(path).absolute().parent.is_dir():
            parser.error(f"{path} cannot be written: there is no folder {Path(path).parent}.")


def write_json(path: str | Path, found: dict) -> None:
    """Put `found` in the place of a file, whole: who reads meanwhile, or is left with what a run cut short, has the last or this."""
    path = Path(path)
    new = path.with_name(path.name + ".new")
    new.write_text(json.dumps(found, indent=1) + "\n")
    os.replace(new, path)
