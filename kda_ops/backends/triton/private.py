"""Every private name of Triton that the package uses, each with its reason.

It is apart from `kda_ops.private`, because the import of kda_ops loads no Triton. The names hold
for Triton 3.6 to 3.9 (`VERSIONS`); ``tests/tools/test_private.py`` tests what the package relies
on. "Public:" names what could replace a private name. Names of Gluon that differ between
versions are in `gluon_names`.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import getclosurevars, isfunction
from typing import Any

import triton
from triton.backends.compiler import GPUTarget as GPUTarget
from triton.runtime import driver as driver

VERSIONS = (3, 6), (3, 9)  # the first and the last that `starter` knows

# `driver.active.get_current_stream(index)` is the address of torch's current stream. Public:
# `torch.cuda.current_stream(device).cuda_stream`, which makes an object at each call.

# A `GPUTarget` is what kernels are compiled for; a driver without a GPU gives one, for offline
# compilation. Public: none.

# Settings of the process. `launch_enter_hook` is what a profiler sets; it may be a chain of hooks,
# `calls`. Public: none.
RUNTIME = triton.knobs.runtime
# Whether kernels run in Triton's interpreter, which TRITON_INTERPRET=1 asks for. Public: none;
# Triton reads the variable once, at its first import.
INTERPRET: bool = RUNTIME.interpret


def starter(compiled) -> Callable[[int, int, tuple], None]:
    """Return a function of (programs, stream, arguments) that launches a compiled kernel.

    Triton's launcher checks at each call whether the kernel wants scratch memory. For a kernel that
    wants none, the function calls what the launcher calls, with half of the Python. Public: `run`,
    which the function calls for a kernel that wants some, and for other versions of Triton.
    """
    made = compiled
    launcher: Any = getattr(compiled, "run", None)
    sizes = (getattr(launcher, f"{kind}_scratch_size", 1) for kind in ("global", "profile"))
    if type(launcher).__name__ != "CudaLauncher" or any(sizes) or not _known(launcher):
        nothing = (None, None, None)
        return lambda programs, stream, args: made.run(
            programs, 1, 1, stream, made.function, made.packed_metadata, *nothing, *args
        )
    start, expand = _encoded_once(launcher.launch)
    about = made.packed_metadata
    how = made.function, launcher.launch_cooperative_grid, launcher.launch_pdl
    if hasattr(launcher, "kernel_signature"):  # Triton 3.7 and later
        last = launcher.arg_annotations, launcher.kernel_signature
        return lambda programs, stream, args: start(
            programs, 1, 1, stream, *how, about, None, None, None, None, None, *last, expand(args)
        )
    return lambda programs, stream, args: start(
        programs, 1, 1, stream, *how, None, None, about, None, None, None, *expand(args)
    )


def _encoded_once(launch: Callable) -> tuple[Callable, Callable[[tuple], tuple]]:
    """Return what launches encoded descriptors, and what puts them in the place of descriptors.

    Triton encodes each descriptor at each call, in 5 us. Here a descriptor keeps its encoding, so
    one object must be an argument of one kernel, always in the same place. Public: none.
    """
    inside = getclosurevars(launch).nonlocals if isfunction(launch) else {}
    if not {"launcher", "tensordesc_meta"} <= inside.keys():  # it takes no descriptors
        return launch, lambda args: args
    encode = inside.get("make_tensordesc_arg") or launch.__globals__["make_tensordesc_arg"]
    more = (None,) * (encode.__code__.co_argcount - 2)  # Triton 3.8 and later pass the grid
    metas: list[tuple[int, Any]] = []  # with the place of each descriptor, the last one first

    def expand(args: tuple) -> tuple:
        if not metas:
            places = [i for i, x in enumerate(args) if hasattr(x, "block_shape")]
            # another thread may do the same at this moment
            metas[:] = zip(reversed(places), reversed(inside["tensordesc_meta"]))
        expanded = [*args]
        for i, meta in metas:
            known = vars(args[i])
            if "encoded" not in known:
                known["encoded"] = encode(args[i], meta, *more)
            expanded[i : i + 1] = known["encoded"]
        return tuple(expanded)

    return inside["launcher"], expand


def _known(launcher) -> bool:
    """Return whether the launcher is one that `starter` knows."""
    if getattr(launcher, "gsan_enabled", False):  # then it appends arguments
        return False
    major, minor, *_ = triton.__version__.split(".")
    return VERSIONS[0] <= (int(major), int(minor)) <= VERSIONS[1]
