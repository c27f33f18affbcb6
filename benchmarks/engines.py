"""Time the functions of vLLM and SGLang next to ours, after the errors of both.

``KDA_OPS_ENGINES=FOLDER python -m benchmarks.engines [--engines vllm sglang] [--out JSON]``

The folder has the engines' wheels (`tests.support.engine_wheels`). Models: KDA with 32 heads, as in
Kimi-Linear, and GDN with 16 key heads and 32 value heads, as in Qwen3-Next; bf16, K = V = 128. A
call is made on one pool by each side. An error is the relative RMS of o against float64. A time is
the median of the GPU alone (`kda_ops.tools.timer`), "host" is Python and launch. Without a GPU,
``TRITON_INTERPRET=1`` checks errors at small sizes and times nothing.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kda_ops
from benchmarks.records import stamp, write_json
from benchmarks.timer import host_us
from kda_ops.compat import sglang, vllm
from kda_ops.tools.timer import median_ms, relative_error
from tests.support import engine_wheels
from tests.support.engines import installed

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
D = 128 if GPU else 16
DTYPE = torch.bfloat16 if GPU else torch.float16  # the interpreter lacks a part of bf16
HEADS = {"kda": (32, 32), "gdn": (16, 32)} if GPU else {"kda": (2, 2), "gdn": (1, 2)}
PROMPTS = tuple(range(1000, 9000, 1000)) if GPU else (70, 5, 64)
BATCHES = (1, 8, 128) if GPU else (1, 3)
DRAFTS = 4
CHECKED = 2  # value heads of which the error is taken
Call = Callable[..., Any]
Words = dict[str, Any]


@dataclass
class Tokens:
    """Packed sequences of one call, and a pool of states [slots, HV, V, K] with a null slot."""

    variant: str
    lengths: tuple[int, ...]
    pool: Tensor
    qkv: Tensor  # [tokens, 2 H K + HV V]
    a: Tensor  # logits of the decay, [tokens, HV, K] or [tokens, HV]
    b: Tensor  # logits of beta, [tokens, HV]
    A_log: Tensor
    dt_bias: Tensor
    table: Tensor  # the slots of each sequence, [N, tokens that are states] int32

    @property
    def split(self) -> dict[str, Tensor]:
        """Return q, k and v, [1, tokens, heads, D], as views."""
        H, HV = HEADS[self.variant]
        parts = self.qkv[None].split([H * D, H * D, HV * D], -1)
        return {n: x.unflatten(-1, (-1, D)) for n, x in zip("qkv", parts)}

    @property
    def starts(self) -> Tensor:
        """Return the offsets of the sequences, [N + 1] int32."""
        return torch.tensor([0, *self.lengths], device=DEVICE).cumsum(0).int()

    @property
    def slots(self) -> Tensor:
        """Return the slot from which each sequence starts, [N] int32."""
        return self.table[:, 0].contiguous()

    def gates(self) -> tuple[Tensor, Tensor]:
        """Return the log decay and beta in fp32."""
        gate = kda_ops.kda_gate if self.variant == "kda" else kda_ops.gdn_gate
        return gate(self.a[None], self.A_log, self.dt_bias), self.b[None].float().sigmoid()

    def exact(self, heads: Tensor) -> Tensor:
        """Return o [tokens, heads, V] of some value heads in float64, on the CPU."""
        H, HV = HEADS[self.variant]
        x = self.split | {"g": self.a[None], "beta": self.b[None]}
        some = {n: t[:, :, heads * t.shape[2] // HV].cpu().double() for n, t in x.items()}
        o, _ = getattr(kda_ops, f"chunk_{self.variant}")(
            **some,
            A_log=self.A_log[heads].cpu().double(),
            dt_bias=self.dt_bias[heads].cpu().double(),
            initial_state=self.pool[self.slots.long()][:, heads].cpu().double(),
            cu_seqlens=self.starts.cpu(),
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            transpose_state_layout=True,
        )
        return o[0]


def draw(variant: str, lengths: tuple[int, ...], dtype: torch.dtype, columns: int) -> Tokens:
    """Return random tokens and states, with so many slots for each sequence after the null slot."""
    (H, HV), T = HEADS[variant], sum(lengths)
    table = torch.arange(1, 1 + len(lengths) * columns, dtype=torch.int32, device=DEVICE)
    gen = torch.Generator(DEVICE).manual_seed(T)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=gen, device=DEVICE)

    decay = (HV, D) if variant == "kda" else (HV,)
    given = (randn(T, (2 * H + HV) * D), randn(T, *decay), randn(T, HV))
    qkv, a, b = (x.to(DTYPE) for x in given)
    pool, gate = randn(1 + len(table), HV, D, D).to(dtype), (0.3 * randn(HV), randn(*decay))
    return Tokens(variant, lengths, pool, qkv, a, b, *gate, table.view(-1, columns))


def vllm_calls(x: Tokens, kind: str) -> tuple[str, Words]:
    """Return the name of vLLM's function for a kind of call, and its arguments but the pool."""
    gate: Words = dict(A_log=x.A_log, dt_bias=x.dt_bias)
    raw: Words = dict(raw_g=x.a[None], raw_beta=x.b[None])
    if kind == "prefill":
        common: Words = dict(initial_state=x.pool[x.slots.long()], cu_seqlens=x.starts)
        common |= dict(output_final_state=True, use_qk_l2norm_in_kernel=True)
        if x.variant == "kda":
            more = raw | dict(A_log=x.A_log, g_bias=x.dt_bias)
            return "chunk_kda_with_fused_gate", x.split | common | more
        g, beta = x.gates()
        return "chunk_gated_delta_rule", x.split | common | dict(g=g, beta=beta)
    if kind == "verify":
        call: Words = dict(x.split, **gate, cu_seqlens=x.starts, ssm_state_indices=x.table)
        call |= dict(num_accepted_tokens=torch.ones_like(x.slots))
        if x.variant == "kda":
            return "fused_recurrent_kda", call | raw | dict(lower_bound=None)
        name = "fused_sigmoid_gating_delta_rule_update"
        return name, call | dict(a=x.a, b=x.b, use_qk_l2norm_in_kernel=True)
    if x.variant == "kda":
        call = dict(mixed_qkv=x.qkv, **gate, **raw, lower_bound=None, state_indices=x.slots)
        return "fused_recurrent_kda_packed_decode", call
    call = dict(mixed_qkv=x.qkv, **gate, a=x.a, b=x.b.float(), scale=D**-0.5)
    call |= dict(use_qk_l2norm_in_kernel=True, ssm_state_indices=x.slots)
    out = torch.empty(len(x.lengths), 1, HEADS["gdn"][1], D, dtype=DTYPE, device=DEVICE)
    return "fused_recurrent_gated_delta_rule_packed_decode", call | dict(out=out)


def sglang_calls(x: Tokens, kind: str) -> tuple[str, Words]:
    """Return the name of SGLang's method for a kind of call, and its arguments but the pool."""
    call: Words = dict(A_log=x.A_log, dt_bias=x.dt_bias, cache_indices=x.slots)
    if kind == "decode":
        call |= dict(mixed_qkv=x.qkv, a=x.a.flatten(1), b=x.b.float(), scale=D**-0.5)
        return "packed_decode", call | dict(num_v_heads=HEADS[x.variant][1], head_v_dim=D)
    call |= x.split | dict(query_start_loc=x.starts)
    if kind == "verify":
        N, states = len(x.lengths), x.pool.shape[1:]
        drafts = torch.empty((N, 1 + DRAFTS, *states), dtype=x.pool.dtype, device=DEVICE)
        call |= dict(a=x.a.flatten(1), b=x.b.float(), intermediate_states_buffer=drafts)
        call |= dict(intermediate_state_indices=torch.arange(N, device=DEVICE).int())
        return "target_verify", call | dict(cache_steps=1 + DRAFTS, retrieve_parent_token=None)
    call |= dict(g=x.a[None], beta=x.b[None], beta_is_raw=True, lower_bound=None)
    return "extend", call | dict(dt_bias=x.dt_bias.flatten())


@contextmanager
def engine(name: str) -> Iterator[Callable[[str, str], tuple[Call, Call]]]:
    """Import an engine's functions; yield what finds (ours, theirs) by variant and name."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        if not GPU:
            engine_wheels.one_configuration(patch)
        version = (vllm if name == "vllm" else sglang).VERSIONS[0]
        files = engine_wheels.package(name, version)
        with installed(patch, Path(folder), name, files):
            if name == "vllm":
                yield vllm_sides
            else:
                patch.setattr(sglang, "DEVICES", ("cuda", "cpu"))
                sglang.enable()
                yield sglang_sides


def vllm_sides(variant: str, name: str) -> tuple[Call, Call]:
    """Return our function and vLLM's."""
    module = next(m for m, functions in vllm._OURS.items() if name in functions)
    return getattr(vllm, name), getattr(importlib.import_module(module), name)


def sglang_sides(variant: str, name: str) -> tuple[Call, Call]:
    """Return our method and SGLang's, which ours has replaced."""
    kind = {"kda": "TritonKDAKernel", "gdn": "TritonGDNKernel"}[variant]
    kernel = getattr(importlib.import_module(f"{sglang._KERNELS}.{variant}_triton"), kind)()
    return getattr(kernel, name), partial(getattr(type(kernel), name).__wrapped__, kernel)


def settings(name: str) -> Iterator[tuple[str, str, tuple[int, ...], torch.dtype]]:
    """Yield variant, kind of call, lengths and the pool's dtype."""
    for variant in HEADS:
        for dtype in (torch.float32, torch.bfloat16):
            for B in BATCHES:
                yield variant, "decode", (1,) * B, dtype
                yield variant, "verify", (1 + DRAFTS,) * B, dtype
        if name == "vllm" or variant == "kda":  # SGLang's GDN prefill stays its own
            yield variant, "prefill", PROMPTS, torch.float32


def measure(name: str, sides: Callable, case: tuple) -> dict[str, Any]:
    """Return the row of a case: errors, times and host times of both sides."""
    variant, kind, lengths, dtype = case
    x = draw(variant, lengths, dtype, 1 + DRAFTS if kind == "verify" else 1)
    if name == "vllm":
        make, pool = vllm_calls, "initial_state"
    else:
        make, pool = sglang_calls, "ssm_states"
    heads = torch.arange(CHECKED, device=DEVICE) * (HEADS[variant][1] // CHECKED)
    want, row = x.exact(heads), {}
    function, _ = make(x, kind)
    for side, run in zip(("ours", "theirs"), sides(variant, function)):
        # both write to the pool, and SGLang's prefill to v
        mine = replace(x, qkv=x.qkv.clone(), pool=x.pool.clone())
        given = {pool: mine.pool} | make(mine, kind)[1]
        o = run(**given)
        o = (o[0] if isinstance(o, tuple) else o).reshape(-1, HEADS[variant][1], D)
        row[f"{side}_error"] = relative_error(o[:, heads], want)
        if GPU:
            again = partial(run, **given)
            row[f"{side}_ms"] = median_ms(again, DEVICE)
            row[f"{side}_host_us"] = host_us(again, DEVICE)
    setting = f"{len(lengths)} x {lengths[0]}" if len(set(lengths)) == 1 else "prompts"
    words = dict(engine=name, function=function, variant=variant, setting=setting)
    return words | dict(pool=str(dtype).removeprefix("torch.")) | row


def main(argv: list[str]) -> int:
    """Print a line per call; return 1 if an error of ours is above 1.5 times theirs."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engines", description=__doc__)
    parser.add_argument("--engines", nargs="+", default=("vllm", "sglang"))
    parser.add_argument("--out", type=Path)
    given, rows = parser.parse_args(argv), []
    if not GPU and os.environ.get("TRITON_INTERPRET") != "1":
        parser.error("needs a GPU, or TRITON_INTERPRET=1")
    for name in given.engines:
        with engine(name) as sides:
            for case in settings(name):
                rows.append(measure(name, sides, case))
                print(*(f"{x:.3g}" if isinstance(x, float) else x for x in rows[-1].values()))
                sys.stdout.flush()
                if given.out:  # after each, so that a run that is cut leaves what it measured
                    write_json(given.out, {"rows": [row | stamp(DEVICE) for row in rows]})
    return int(any(row["ours_error"] > 1.5 * row["theirs_error"] for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
