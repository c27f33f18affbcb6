"""``python -m kda_ops.jax.check``: what a TPU gives, and what to report of it.

On a TPU: errors against the recurrence, and times. Elsewhere: errors in interpret mode. Where
libtpu is installed: whether the kernels compile for each generation of TPU, and what they take.
"""

from __future__ import annotations

import argparse
import functools
import platform
import sys
import time
from collections.abc import Callable
from importlib import metadata

import jax
import jax.numpy as jnp

from kda_ops.jax import chunk_gdn, chunk_kda, offline, recurrent_gdn, recurrent_kda

ALIKE = "none, keys alike"
# how strong a gate is at most, apart from the token that resets
GATES = {"mild": 0.1, "to -30": 30.0, "reset to -1000": 1.0, "reset to -inf": 1.0, ALIKE: 0.0}
RESETS = {"reset to -1000": -1000.0, "reset to -inf": -jnp.inf}
# Of the largest entry of a tensor. bf16 rounds operands to 8 bits; a test holds it to less.
LIMITS = {"float32": 2e-6, "bfloat16": 3e-2}
OPERATORS = {"kda": (chunk_kda, recurrent_kda), "gdn": (chunk_gdn, recurrent_gdn)}


def _inputs(variant: str, gate: str, dtype, T: int, H: int, HV: int, K: int, V: int) -> dict:
    """Build a call with values that are the same on every machine."""
    keys = iter(jax.random.split(jax.random.key(0), 8))

    def normal(*shape):
        return jax.random.normal(next(keys), shape)

    def unit(x):
        return (x / jnp.linalg.norm(x, axis=-1, keepdims=True)).astype(dtype)

    q, k, v = normal(1, T, H, K), normal(1, T, H, K), normal(1, T, HV, V).astype(dtype)
    k = k + 3 * normal(1, 1, H, K) if gate == ALIKE else k
    shape = (1, T, HV, K) if variant == "kda" else (1, T, HV)
    g = -GATES[gate] * jax.random.uniform(next(keys), shape)
    if gate in RESETS:
        g = g.at[:, T // 3].set(RESETS[gate])
    beta = jax.random.uniform(next(keys), (1, T, HV))
    state = normal(1, HV, K, V)
    return dict(q=unit(q), k=unit(k), v=v, g=g, beta=beta, initial_state=state)


@functools.lru_cache
def _both(operator: Callable) -> Callable:
    """o, the final state, and every gradient, for cotangents that are cosines."""

    def both(x):
        out, pull = jax.vjp(lambda x: operator(**x, output_final_state=True), x)
        d = (jnp.cos(jnp.arange(o.size)).reshape(o.shape).astype(o.dtype) for o in out)
        return dict(zip(("o", "final_state"), out)) | {
            "d" + n: y for n, y in pull(tuple(d))[0].items()
        }

    return jax.jit(both)


def _errors(variant: str, gate: str, dtype, T: int) -> dict[str, float]:
    """Errors of a call over the largest entries, against the recurrence in float64 on the CPU."""
    import numpy as np

    chunk, recurrent = OPERATORS[variant]
    cpu = jax.devices("cpu")[0]
    with jax.default_device(cpu):
        x = _inputs(variant, gate, dtype, T, H=1, HV=2, K=128, V=128)
    found = _both(chunk)(jax.device_put(x, jax.devices()[0]))
    with jax.default_device(cpu), jax.enable_x64(True):
        exact = {
            n: jnp.asarray(np.asarray(y.astype(jnp.float32), np.float64)) for n, y in x.items()
        }
        want = {n: np.asarray(y) for n, y in _both(recurrent)(exact).items()}
    return {
        n: float(abs(np.asarray(y.astype(jnp.float32), np.float64) - want[n]).max())
        / float(abs(want[n]).max())
        for n, y in found.items()
    }


def check_errors(T: int) -> bool:
    """Print a row per gate, dtype and variant; return whether all are within `LIMITS`."""
    right = True
    for variant in OPERATORS:
        for dtype in (jnp.float32, jnp.bfloat16):
            for gate in GATES:
                found, name = _errors(variant, gate, dtype, T), jnp.dtype(dtype).name
                worst = max(found, key=lambda n: (found[n] != found[n], found[n]))
                ok = all(e <= LIMITS[name] for e in found.values())
                right &= ok
                print(
                    f"{'right' if ok else 'WRONG'}  {variant} {name:8} {gate:17} largest error "
                    f"{found[worst]:.1e} ({worst})",
                    flush=True,
                )
    return right


def _median(f: Callable, x: dict, calls: int) -> float:
    """Return the median of single calls, in milliseconds; the first one compiles."""
    jax.block_until_ready(f(x))
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        jax.block_until_ready(f(x))
        times.append(1e3 * (time.perf_counter() - start))
    return sorted(times)[calls // 2]


def print_times(T: int = 8192, H: int = 32, calls: int = 20) -> None:
    """Print the times of one call on the TPU, host included."""
    for variant, (chunk, _) in OPERATORS.items():
        x = _inputs(variant, "mild", jnp.bfloat16, T, H, H, 128, 128)
        forward = _median(jax.jit(lambda x, f=chunk: f(**x)[0]), x, calls)
        training = _median(_both(chunk), x, calls)
        print(
            f"{variant} bf16, B 1, T {T}, {H} heads, K = V = 128: forward {forward:.2f} ms, "
            f"forward and backward {training:.2f} ms (median of {calls} calls)",
            flush=True,
        )


def check_compiles(topologies: tuple[str, ...], T: int) -> bool:
    """Print what the kernels take on TPUs that are not there; return whether all compile."""
    right = True
    for topology in topologies:
        for variant in OPERATORS:
            for dtype in (jnp.bfloat16, jnp.float32):
                row = f"{topology} {variant} {jnp.dtype(dtype).name}"
                try:
                    found = offline.compile_for(topology, dtype, offline.Shape(variant, T=T))
                except Exception as error:  # the compiler's own kinds are many
                    right = False
                    print(f"FAILS  {row}: {str(error).splitlines()[0]}", flush=True)
                else:
                    for program, compiled in found.items():
                        print(f"right  {row} {program}: {compiled}", flush=True)
    return right


def _versions() -> str:
    names = ("kda-ops", "torch", "jax", "jaxlib", "libtpu")
    found = []
    for name in names:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            found.append(f"{name} -")
    return f"Python {platform.python_version()}, " + ", ".join(found)


def main(argv: list[str] | None = None) -> int:
    """Check what this machine can check; 1 if something is wrong."""
    parser = argparse.ArgumentParser(prog="python -m kda_ops.jax.check", description=__doc__)
    parser.add_argument("--tokens", type=int, default=250, help="of the errors (default 250)")
    parser.add_argument(
        "--compile",
        nargs="*",
        metavar="TOPOLOGY",
        help=f"only compile, for these ({' '.join(offline.TOPOLOGIES)}), or for all",
    )
    args = parser.parse_args(argv)
    if args.compile is not None:
        if not offline.is_available():
            print("libtpu is not installed: nothing can be compiled.")
            return 1
        jax.config.update("jax_platforms", "cpu")
        return 0 if check_compiles(tuple(args.compile) or offline.TOPOLOGIES, T=8192) else 1
    on_tpu = jax.default_backend() == "tpu"
    device = jax.devices()[0].device_kind if on_tpu else "no TPU: interpret mode"
    print(_versions(), f"device: {device}", sep="\n")
    right = check_errors(args.tokens)
    if on_tpu:
        print_times()
        print("Please report all of the above, with the kind and number of TPUs of the machine.")
    else:
        print("Checked: outputs and gradients in interpret mode. Not checked: a TPU.")
        if offline.is_available():
            print("libtpu is installed: --compile checks that the kernels compile for TPUs.")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
