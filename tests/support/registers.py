"""What ptxas made of the kernels that this process has launched on a GPU: one that has lost its registers is slow, and may be wrong (NOTES.md)."""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

from kda_ops.backends import triton as backend
from kda_ops.bench import offline


def kernel_modules() -> list[ModuleType]:
    """The modules that kernels are written in."""
    return [importlib.import_module(f"{backend.__name__}.{found.name}") for found in pkgutil.iter_modules(backend.__path__)]


def lost_registers(modules: list[ModuleType]) -> list[str]:
    """The launched kernels of these modules that have lost their registers, as `offline.lost_registers` says it."""
    found = []
    for module in modules:
        for name, kernel in vars(module).items():
            if getattr(kernel, "__module__", None) != module.__name__:
                continue  # imported
            for caches in getattr(kernel, "device_caches", {}).values():
                for made in caches[0].values():
                    registers, words = getattr(made, "n_regs", None), getattr(made, "n_spills", None)  # of one that was compiled, not launched: None
                    if registers and offline.lost_registers(registers, 4 * words):
                        found.append(f"{module.__name__}.{name}: {registers} registers, {4 * words} bytes of stack")
    return found
