"""The check of the GPU suite that no kernel has lost its registers finds one that has."""

import importlib.util
import os
from types import ModuleType, SimpleNamespace

import pytest

_COMPILES = importlib.util.find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") != "1"
pytestmark = pytest.mark.skipif(not _COMPILES, reason="needs triton, and not its interpreter")


def module(**kernels: list) -> ModuleType:
    """A module that has kernels, each with what was made of it: (registers, words of stack)."""
    made = ModuleType("made")
    for name, builds in kernels.items():
        cache = {i: SimpleNamespace(n_regs=registers, n_spills=stack) for i, (registers, stack) in enumerate(builds)}
        setattr(made, name, SimpleNamespace(__module__="made", device_caches={0: (cache, {}, None)}))
    return made


def test_a_kernel_that_has_lost_its_registers_is_named():
    from tests.support.registers import lost_registers

    found = module(scan=[(255, 240), (32, 2842)], small=[(24, 0), (128, 24)], compiled=[(None, None)])
    assert lost_registers([found]) == ["made.scan: 32 registers, 11368 bytes of stack"]
    found.scan.__module__ = "elsewhere"
    assert lost_registers([found]) == []


def test_all_modules_of_kernels_are_looked_at():
    from tests.support.registers import kernel_modules, lost_registers

    modules = kernel_modules()
    assert {"scan", "gradient_keys", "prepare", "step"} <= {m.__name__.rsplit(".", 1)[1] for m in modules} and lost_registers(modules) == []
    assert any(hasattr(x, "device_caches") and x.__module__ == m.__name__ for m in modules for x in vars(m).values())
