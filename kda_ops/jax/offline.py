"""Compile the kernels for TPUs that are not there, where libtpu is installed.

``libtpu`` is not free software: it is never a dependency. A row names the VMEM of the kernels and
what XLA's memory analysis says of HBM.
"""

from __future__ import annotations

import importlib.util
import os
import re
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from kda_ops.jax import chunk_gdn, chunk_kda

TOPOLOGIES = ("v4:1x1x1", "v5e:1x1", "v5p:1x1x1", "v6e:1x1", "TPU7x:1x1x1")
_QUIET = dict(  # no TPU is looked for; several processes may hold libtpu
    TPU_ACCELERATOR_TYPE="v5litepod-1",
    TPU_WORKER_HOSTNAMES="localhost",
    TPU_SKIP_MDS_QUERY="1",
    ALLOW_MULTIPLE_LIBTPU_LOAD="true",
)
_SCOPED = re.compile(
    r'"used_scoped_memory_configs":\[\{"memory_space":"1","offset":"0","size":"(\d+)"'
)


@dataclass(frozen=True)
class Shape:
    """What is compiled: B rows of T tokens (packed: of N sequences), H and HV heads."""

    variant: str = "kda"
    B: int = 1
    T: int = 8192
    H: int = 32
    HV: int = 32
    K: int = 128
    V: int = 128
    N: int = 0  # 0: not packed
    l2norm: bool = False
    activate_gate: bool = False


@dataclass(frozen=True)
class Compiled:
    """Bytes: VMEM of each kernel; arguments and outputs in HBM; temporaries in HBM."""

    vmem: tuple[int, ...]
    moved: int
    temporaries: int

    def __str__(self) -> str:
        vmem = ", ".join(f"{x / 2**20:.2f}" for x in self.vmem)
        return (
            f"VMEM {vmem} MiB; HBM: arguments and outputs {self.moved / 1e6:.0f} MB, temporaries "
            f"{self.temporaries / 1e6:.0f} MB"
        )


def is_available() -> bool:
    """Whether libtpu is installed."""
    return importlib.util.find_spec("libtpu") is not None


def _programs(s: Shape, dtype):
    """Return the forward and the training step, with heads in the lanes, and their arguments."""
    operator = dict(kda=chunk_kda, gdn=chunk_gdn)[s.variant]
    B, T = s.B, s.T
    wide = s.HV * s.K if s.variant == "kda" else s.HV

    def forward(q, k, v, g, beta, *offsets):
        q, k = (x.reshape(B, T, s.H, s.K) for x in (q, k))
        g = g.reshape(B, T, s.HV, -1) if s.variant == "kda" else g
        more = dict(A_log=jnp.zeros(s.HV)) if s.activate_gate else {}
        o, _ = operator(
            q, k, v.reshape(B, T, s.HV, s.V), g, beta, **more,
            cu_seqlens=offsets[0] if offsets else None, use_qk_l2norm_in_kernel=s.l2norm,
            use_gate_in_kernel=s.activate_gate, interpret=False,
        )  # fmt: skip
        return o.reshape(B, T, -1)

    def training(do, *x):
        return jax.vjp(forward, *x)[1](do)

    def of(width, dtype=dtype):
        return jax.ShapeDtypeStruct((B, T, width), dtype)

    x = [of(s.H * s.K), of(s.H * s.K), of(s.HV * s.V), of(wide, jnp.float32)]
    x += [of(s.HV, jnp.float32)]
    x += [jax.ShapeDtypeStruct((s.N + 1,), jnp.int32)] if s.N else []
    return dict(forward=(forward, x), training=(training, [of(s.HV * s.V), *x]))


def compile_for(topology: str, dtype, shape: Shape = Shape()) -> dict[str, Compiled]:
    """Compile the forward and the training step for a topology of `TOPOLOGIES`."""
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    from jax.experimental import topologies

    device = topologies.get_topology_desc(topology, "tpu").devices[0]
    sharding = jax.sharding.SingleDeviceSharding(device)
    found = {}
    for name, (f, x) in _programs(shape, dtype).items():
        compiled = jax.jit(f, in_shardings=sharding, out_shardings=sharding).lower(*x).compile()
        memory, text = compiled.memory_analysis(), compiled.as_text()
        assert memory is not None and text is not None  # which XLA has of every TPU program
        calls = [line for line in text.split("\n") if "tpu_custom_call" in line]
        vmem = tuple(int(m.group(1)) for m in map(_SCOPED.search, calls) if m)
        moved = memory.argument_size_in_bytes + memory.output_size_in_bytes
        found[name] = Compiled(vmem, moved, memory.temp_size_in_bytes)
    return found
