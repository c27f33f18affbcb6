"""Random calls of every pass on a GPU that is not there (`pretend`)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from kda_ops import chunk, recurrent, shard
from kda_ops.gate import GateBackwardPass, GatePass
from kda_ops.registrations.schemas import mask_of
from kda_ops.stages import GRADIENTS, KEPT

KINDS: tuple[Any, ...] = (chunk.Infer, chunk.Forward, chunk.Backward, chunk.Prefill)
KINDS += (recurrent.Recur, recurrent.Decode, GatePass, GateBackwardPass)
INTO = (chunk.PrefillInto, recurrent.DecodeInto)
PREFILLS, DECODES = (chunk.Prefill, INTO[0]), (recurrent.Decode, INTO[1])
KINDS += INTO
SHARDS = (shard.MapForward, shard.JoinForward, shard.MapBackward, shard.JoinBackward)
KINDS += SHARDS
LAYOUTS = ("dense", "off", "heads_first", "fused", "second", "far")
TOKENS: tuple[int, ...] = 1, 2, 15, 16, 17, 32, 63, 64, 65, 70, 128, 192
TOKENS += 1000, 1024, 2048, 20000, 32768
TOKENS += 2**20, 2**24 + 16, 2**25  # with H K: strides of 32 bits and of more


@dataclass(frozen=True)
class Model:
    """What a plan is looked up by: the pass, sizes of the model, dtypes, flags, absent tensors."""

    kind: Any  # a class of passes
    rank: int
    H: int
    group: int
    K: int
    V: int
    dtype: torch.dtype
    wide: torch.dtype  # of g and beta
    pool: torch.dtype
    index: torch.dtype
    packed: bool
    slots: int  # 0: no table; 2: a table of columns
    accepted: bool
    sourced: bool
    gate: str
    beta: str
    state: bool
    do: bool
    kept: bool
    need: int
    flags: tuple[tuple[str, Any], ...]
    null: int = -1  # up to which slots are nobody's
    resumed: bool = False  # whether a prefill is told which sequences begin anew


@dataclass(frozen=True)
class Numbers:
    """What differs from call to call of a model."""

    B: int
    T: int
    N: int
    columns: int
    layout: str
    state_layout: str


# a usual one, for fixed calls
MODEL = dict(
    **dict(H=2, group=1, K=128, V=128, dtype=torch.bfloat16, wide=torch.float32),
    **dict(
        pool=torch.float32, index=torch.int32, packed=False, slots=0, accepted=False, sourced=False
    ),
    **dict(gate="bounded", beta="given", state=True, do=True, need=255),
    flags=tuple({"use_qk_l2norm_in_kernel": True, "output_final_state": True}.items())
    + (("transpose_state_layout", False), ("safe_gate", False))
    + (("safe_beta", False), ("safe_keys", False))
    + (("use_beta_sigmoid_in_kernel", True),),
)

bools = st.booleans()
models = st.builds(
    Model,
    kind=st.sampled_from(KINDS),
    rank=st.sampled_from((1, 0)),
    H=st.sampled_from((1, 2, 3, 16)),
    group=st.sampled_from((1, 2)),
    K=st.sampled_from((1, 8, 15, 16, 64, 128, 256)),
    V=st.sampled_from((1, 8, 15, 64, 128)),
    dtype=st.sampled_from((torch.bfloat16, torch.float16, torch.float32)),
    wide=st.sampled_from((torch.float32, torch.bfloat16)),
    pool=st.sampled_from((torch.float32, torch.bfloat16)),
    index=st.sampled_from((torch.int32, torch.int64)),
    packed=bools,
    slots=st.sampled_from((0, 1, 2)),
    accepted=bools,
    sourced=bools,
    gate=st.sampled_from(("given", "none", "softplus", "bounded")),
    beta=st.sampled_from(("given", "none")),
    state=bools,
    do=bools,
    kept=bools,
    need=st.integers(1, 255),
    null=st.sampled_from((-1, -1, 0)),
    resumed=bools,
    flags=st.tuples(
        *(
            st.tuples(st.just(name), bools)
            for name in (
                "use_qk_l2norm_in_kernel",
                "use_beta_sigmoid_in_kernel",
                "transpose_state_layout",
                "output_final_state",
                "safe_gate",
                "safe_beta",
                "safe_keys",
                "invariant",
            )
        )
    ),
)
_EACH = dict(
    B=st.sampled_from((1, 1, 1, 2, 3, 16, 17, 4096)),
    T=st.one_of(st.sampled_from((1, 15, 16, 17, 32, 33)), st.sampled_from(TOKENS)),
    N=st.sampled_from((1, 2, 15, 16, 17, 1000)),
    columns=st.sampled_from((1, 2, 3, 16)),
    layout=st.sampled_from(("dense", "dense", *LAYOUTS)),
    state_layout=st.sampled_from(("dense", "dense", "off", "second", "heads_first")),
)


@st.composite
def sequences(draw) -> list[Numbers]:
    """Draw numbers, and others that differ from them in one or two."""
    found = [draw(st.builds(Numbers, **_EACH))]
    for _ in range(draw(st.integers(3, 9))):
        names = draw(st.lists(st.sampled_from((*_EACH, "T")), min_size=1, max_size=2))
        found.append(replace(draw(st.sampled_from(found)), **{n: draw(_EACH[n]) for n in names}))
    return found


def usual(T: int, B: int = 1) -> Numbers:
    """Return the numbers of a call whose tensors are dense."""
    return Numbers(B=B, T=T, N=1, columns=1, layout="dense", state_layout="dense")


def make(shape: tuple[int, ...], dtype: torch.dtype, layout: str = "dense") -> Tensor:
    """Make a tensor whose strides and address are those of a layout."""
    device = "cuda:0"
    if layout == "off":  # one element from an address that 16 divides
        count = 1
        for n in shape:
            count *= n
        return torch.empty(count + 1, dtype=dtype, device=device).narrow(0, 1, count).view(shape)
    if layout == "heads_first" and len(shape) > 2:
        x = torch.empty((shape[0], shape[2], shape[1], *shape[3:]), dtype=dtype, device=device)
        return x.transpose(1, 2)
    if layout == "fused":  # columns of a wider row
        return torch.empty((*shape[:-1], shape[-1] + 24), dtype=dtype, device=device).narrow(
            -1, 8, shape[-1]
        )
    if layout == "second":
        return (
            torch.empty((*shape[:-1], 2 * shape[-1]), dtype=dtype, device=device)
            .unflatten(-1, (-1, 2))
            .select(-1, 1)
        )
    if layout == "far":  # 64-bit strides of the first axis
        rest = torch.empty(shape[1:], device=device).stride() if len(shape) > 1 else ()
        # beyond a row of the axis, because `out` must not overlap itself
        far = max(2**31, 16 * (prod(shape[1:]) // 16 + 1)) + 16 * (shape[0] % 2) + 8
        return torch.empty_strided(shape, (far, *rest), dtype=dtype, device=device)
    return torch.empty(shape, dtype=dtype, device=device)


def arguments(model: Model, n: Numbers) -> tuple[tuple[Tensor | None, ...], dict[str, Any]]:
    """Make the arguments and flags of a call; of a backward its own, without what is kept."""
    kind, HV = model.kind, model.H * model.group
    in_place = kind in (*PREFILLS, *DECODES)
    packed = model.packed and kind not in (GatePass, GateBackwardPass)
    B, N = (1, n.N) if packed else (n.B, n.B)
    T = n.T
    if kind in DECODES and model.slots == 2 and not packed:
        T = min(T, n.columns)
    D = (model.K,) if model.rank else ()
    activated = model.gate in ("softplus", "bounded")
    names = ["use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel"]
    names += [] if kind in SHARDS else ["transpose_state_layout"]
    names += [] if kind in (*DECODES, *SHARDS) else ["output_final_state"]
    if kind not in (recurrent.Recur, *DECODES):
        names += ["safe_gate", "safe_beta", "safe_keys"]
        names += [] if kind in SHARDS else ["invariant"]
    flags: dict[str, Any] = {x: y for x, y in model.flags if x in names}
    flags |= {"use_gate_in_kernel": activated, "scale": 0.125}
    if model.gate == "bounded":
        flags["lower_bound"] = -5.0
    if kind in (chunk.Forward, chunk.Backward):
        flags["disable_recompute"] = model.kept
    x: dict[str, Tensor | None] = {
        "q": make((B, T, model.H, model.K), model.dtype, n.layout),
        "k": make((B, T, model.H, model.K), model.dtype, n.layout),
        "v": make((B, T, HV, model.V), model.dtype, n.layout),
        "g": make((B, T, HV, *D), model.wide, n.layout),
        "beta": make((B, T, HV), model.wide, n.layout),
    }
    if model.gate == "none":
        x["g"] = None
        flags["use_gate_in_kernel"] = False
        flags.pop("lower_bound", None)
    if model.beta == "none":
        x["beta"] = None
        flags["use_beta_sigmoid_in_kernel"] = False
    if activated:
        x["A_log"] = make((HV,), torch.float32, n.state_layout)
        x["dt_bias"] = make((HV, *D), torch.float32, "dense")
    if packed:
        x["cu_seqlens"] = make((N + 1,), model.index, n.layout if n.layout == "off" else "dense")
    turned = flags.get("transpose_state_layout")
    width = (model.V, model.K) if turned else (model.K, model.V)
    if in_place:
        rows = N if not model.slots else 5 * N
        x["state"] = make((rows, HV, *width), model.pool, n.state_layout)
        if model.slots:
            flags["null_slot"] = model.null
        if kind in INTO:
            x["out"] = make((B, T, HV, model.V), model.dtype, n.layout)
        if kind in PREFILLS:
            flags["snapshot_every"] = 1
            if model.resumed:
                x["has_initial_state"] = make((N,), torch.bool, n.state_layout)
            x["state"] = make((rows, HV, *width), torch.float32, n.state_layout)
            if model.slots:
                x["state_indices"] = make((N,), model.index)
            if model.slots == 2:
                x["snapshot_indices"] = make((N, n.columns), model.index)
        elif model.slots:
            shape = (N,) if model.slots == 1 else (N, n.columns)
            x["state_indices"] = make(shape, model.index, "dense")
            if model.accepted and model.slots == 2:
                x["num_accepted_tokens"] = make((N,), model.index)
        if kind in DECODES and model.sourced and "num_accepted_tokens" not in x:
            x["source"] = make((3 * N, HV, *width), model.pool, n.state_layout)
            x["source_indices"] = make((N,), model.index)
    elif model.state:
        x["initial_state"] = make((N, HV, *width), torch.float32, n.state_layout)
    if kind in (GatePass, GateBackwardPass):
        flags = {"lower_bound": flags["lower_bound"]} if "lower_bound" in flags else {}
        x["g"] = make((B, T, HV, *D), model.wide, n.layout)
        x.setdefault("A_log", make((HV,), torch.float32))
        x["dy"] = make((B, T, HV, *D), torch.float32, n.layout)
    if kind in (chunk.Backward, *SHARDS):
        o = (B, T, HV, model.V)
        x["do"] = make(o, model.dtype, n.layout) if model.do else None
        if flags.get("output_final_state", True) and (model.state or not model.do):
            x["dfinal_state"] = make((N, HV, *width), torch.float32, n.state_layout)
    return tuple(x.get(name) for name in kind.operator.names), flags


def run(backend, model: Model, n: Numbers, **more: Any):
    """Return how to run a call: the pass, the rank, the arguments and the flags, with `more`."""
    if model.kind in SHARDS:
        return _half(backend, model, n, more)
    args, flags = arguments(model, n)
    flags |= more
    if model.kind is chunk.Backward:
        given = dict(zip(chunk.Backward.operator.names, args))
        inputs = tuple(given[name] for name in chunk.INPUTS)
        o, _, *kept = backend.run(chunk.Forward, model.rank, inputs, flags)
        reads = "o" in backend.keeps.names(
            model.rank, model.dtype, flags["use_qk_l2norm_in_kernel"], model.kept
        )
        A, states = (kept[list(KEPT).index(name)] for name in ("A", "states"))
        reads = reads and states.dim() > 1 and not chunk.has_walked(A)  # as autograd saves it
        args = (*args[:2], *kept, *inputs, o if reads else None)
        present = [given.get(name) is not None for name in GRADIENTS]
        flags = flags | {"need": model.need & mask_of(present)}
    return model.kind, model.rank, args, flags


def _half(backend, model: Model, n: Numbers, more: dict[str, Any]):
    """Return how to run a half of a call on a shard, after those before it."""
    names = shard.JoinBackward.operator.names  # every tensor
    args, flags = arguments(replace(model, kind=shard.JoinBackward), n)
    x, flags = dict(zip(names, args)), flags | more
    need = model.need & mask_of(x[name] is not None for name in GRADIENTS)

    def call(kind):
        asked = {"need": need} if kind is shard.JoinBackward else {}
        asked |= {"output_final_state": model.kept} if kind is shard.JoinForward else {}
        return kind, model.rank, tuple(map(x.get, kind.operator.names)), flags | asked

    for kind in SHARDS[: SHARDS.index(model.kind)]:
        found = dict(zip(kind.operator.results, backend.run(*call(kind))))
        x |= {name: y for name, y in found.items() if name != "A" or y.dim() > 1}
        if kind is shard.JoinForward:  # what is kept
            x["A"] = next((x[name] for name in ("AP", "A") if x[name].dim() > 1), None)
    return call(model.kind)
