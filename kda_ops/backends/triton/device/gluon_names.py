"""The names of Gluon that differ between versions of Triton.

Importing this module fails with an ImportError where Triton has no Gluon that these kernels know.
"""

import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import tma, warpgroup_mma_wait
from triton.language.core import _aggregate as aggregate  # noqa: F401 (structures of kernels)

VERSIONS = (3, 6), (3, 9)  # the first and the last that the kernels were compiled with
VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
if not VERSIONS[0] <= VERSION <= VERSIONS[1]:
    raise ImportError(f"Gluon kernels need triton 3.6 to 3.9, got {triton.__version__}.")

# a barrier of the warps of a partition; in 3.6 it has the older name
barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
# copies of tiles between global and shared memory; 3.8 renamed them
if hasattr(tma, "async_load"):
    load_tile, store_tile = tma.async_load, tma.async_store
else:
    load_tile, store_tile = tma.async_copy_global_to_shared, tma.async_copy_shared_to_global
tensor_descriptor = tma.tensor_descriptor
# a view of shared memory with another shape; 3.9 made it public
_BUFFER = gl.shared_memory_descriptor
reinterpret = _BUFFER.reinterpret if hasattr(_BUFFER, "reinterpret") else _BUFFER._reinterpret

# whether a descriptor is a 32-bit sum (docs/kernels/hazards.md, "Descriptors of operands")
SUMS_OF_WORDS = gl.constexpr(VERSION >= (3, 9))


@builtin
def wait_alone(num_outstanding, deps, _semantic=None):
    """Wait for products of this warpgroup; see docs/kernels/hazards.md, "Waits for products"."""
    waited = warpgroup_mma_wait(num_outstanding, deps, _semantic=_semantic)
    first = waited if len(deps) == 1 else waited[0]
    first.handle.set_attr("warpGroupLocal", _semantic.builder.get_unit_attr())
    return waited


# 3.9 puts a barrier of all warps behind a wait for products, unless an attribute forbids it
wait_products = wait_alone if VERSION >= (3, 9) else warpgroup_mma_wait
