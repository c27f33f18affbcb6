"""The operators, one record each: what PyTorch and the backends are told follows from it.

A record has the schema of an operator, its pass, the axes of its tensors, and what vmap, sharding
and the FLOP counter do with it. The schema alone has the order of the tensors, and names the one
that is written. An incomplete record, and one that no table lists, are errors at import.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NoReturn

import torch

from kda_ops import chunk, convolution, flops, gate, norm, recurrent, shard
from kda_ops.private import OpOverload
from kda_ops.stages import CONVOLVED, GRADIENTS, KEPT, NORMALISED, TILE, Pass

# The letters of axes. Two calls of one model may differ in the length of these.
VARYING = {
    "B": "batch",
    "T": "tokens",
    "N": "sequences",
    "M": "offsets of packed sequences, N + 1",
    "S": "slots of a sequence, one for each token",
    "J": "snapshots of a sequence",
    "L": "slots of a pool; N without a table of slots",
    "I": "slots of a pool that is only read",
    "c": "chunks",
    "s": "chunks whose states are kept: halves of chunks where training walks",
    "r": "runs of a shard",
}
FIXED = {
    "H": "key heads",
    "h": "value heads",
    "K": "width of keys",
    "V": "width of values",
    "D": "width of the decay",
    "C": "rows of a chunk",
    "R": "factors of a row",
    "X": "channels",
    "W": "taps",
    "P": "inputs before a sequence, W - 1",
    "G": "rows of a norm's weight",
    "Y": "columns of a map, V + K",
}


@dataclass(frozen=True, eq=False)
class Operator:
    """An operator of each variant.

    `axes` has the axes of tensors by name, those of `VARYING` first. A last axis in parentheses may
    be missing. States are in the layout [K, V]. A tensor ``dx`` without axes of its own is the
    gradient of x.
    """

    name: str
    schema: str
    kind: type[Pass]
    axes: Mapping[str, str]
    folds: str  # axes along which nothing is coupled: vmap folds the mapped dimension into one
    # Sets of axes over which sharding may spread a call, those with B only if nothing is packed.
    # Without any, DTensor gets no rule.
    splits: tuple[str, ...] = ()
    # FLOPs from shapes and flags by name; None: elementwise work alone, which counts as 0
    flops: Callable[..., int] | None = None
    # arguments that may be an empty tensor of one dimension in the place of None
    placeholders: tuple[str, ...] = ()
    result: str = "o"  # the name of a result to which the schema gives none

    def __post_init__(self) -> None:
        known = {*VARYING, *FIXED, *"()"}
        for letter in {*self.folds, *"".join(self.splits)} - known:
            self._refuse(f"axis {letter!r} of folds or splits is unknown")
        for name in (*self.names, *self.results):
            axes = self._written_axes(name)
            if not axes:
                self._refuse(f"the tensor {name} has no axes: add a letter for each to the record")
            for letter in {*axes} - known:
                self._refuse(f"axis {letter!r} of {name} is unknown: add it to VARYING or FIXED")
            if not re.fullmatch(f"[{''.join(VARYING)}]*[{''.join(FIXED)}]*(\\(.\\))?", axes):
                self._refuse(f"the axes {axes!r} of {name} must begin with those of VARYING")
        if not self._written_axes(self.lead).startswith("BT"):
            self._refuse(f"the axes of {self.lead} must begin with B and T")
        if self.mutates and self.mutates not in self.names:
            self._refuse(f"it must write one tensor, got {self.mutates}")
        if unknown := {*self.placeholders} - {*self.names}:
            self._refuse(f"the schema has no argument {', '.join(sorted(unknown))}")
        if self.gradients and self.results != tuple(
            f"d{name}" for name in self.names if f"d{name}" in self.results
        ):
            self._refuse("its results must be gradients in the order of their arguments")

    def _refuse(self, what: str) -> NoReturn:
        raise ValueError(f"Operator {self.name}: {what}.")

    @cached_property
    def _arguments(self) -> dict[str, str]:
        """The types of the arguments before the flags, by name."""
        positional, _, flags = self.schema.split(" -> ")[0][1:-1].partition("*, ")
        flags, out, _ = flags.partition(f", {_OUT}")
        found = {}
        for argument in positional.removesuffix(", ").split(", "):
            kind, _, name = argument.partition("=")[0].partition(" ")
            if not name or not kind.startswith("Tensor") or kind.endswith("[]"):
                self._refuse(f"{argument!r} of its schema must be a tensor with a name, or a flag")
            found[name] = kind
        if "Tensor" in flags:
            self._refuse("tensors must come before the flags in its schema")
        return found | ({"out": _OUT.split()[0]} if out else {})

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The arguments that are tensors, in the order of the schema; `out` is the last."""
        return tuple(self._arguments)

    @cached_property
    def results(self) -> tuple[str, ...]:
        """The results in the order of the schema."""
        results = self.schema.split(" -> ")[1].strip("()")
        if not results:
            return ()
        return tuple(x.removeprefix("Tensor").strip() or self.result for x in results.split(", "))

    @cached_property
    def writes(self) -> tuple[str, ...]:
        """The arguments that are written."""
        return tuple(name for name, kind in self._arguments.items() if "!" in kind)

    @cached_property
    def mutates(self) -> str:
        """The argument that is read and written, or nothing."""
        return " and ".join(name for name in self.writes if name != "out")

    @cached_property
    def takes_out(self) -> bool:
        """Whether the operator writes its result to the caller's `out`, and returns nothing."""
        return "out" in self.writes

    @cached_property
    def gradients(self) -> bool:
        """Whether the results are gradients of arguments; no other result may be absent."""
        return any(f"d{name}" in self.results for name in self.names)

    @cached_property
    def lead(self) -> str:
        """The first argument, or in a backward the first that has a gradient.

        An absent gradient has its device and dtype.
        """
        return self.results[0][1:] if self.gradients else self.names[0]

    def _written_axes(self, name: str) -> str:
        return self.axes.get(name) or self.axes.get(name.removeprefix("d"), "")

    def axes_of(self, name: str) -> str:
        """Return the axes of an argument or result, the last even where it may be missing."""
        return self._written_axes(name).replace("(", "").replace(")", "")

    def may_lack_last(self, name: str) -> bool:
        """Return whether the last axis of an argument may be missing."""
        return self._written_axes(name).endswith(")")

    def overload(self, namespace: str) -> OpOverload:
        """Return the registered operator of one variant."""
        name, _, kind = self.name.partition(".")
        return getattr(getattr(getattr(torch.ops, namespace), name), kind or "default")

    def joined(self, args: tuple, flags: dict[str, Any]) -> tuple:
        """Return the tensors of a call by position, to which `out` moves from the keywords."""
        if not self.takes_out:
            return args
        return (*args, *(None,) * (len(self.names) - 1 - len(args)), flags.pop("out"))


_OUT = "Tensor(b!) out"

# --- attention ------------------------------------------------------------------------------------

_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? beta"
_GATE = "Tensor? A_log=None, Tensor? dt_bias=None"
_SEQUENCES = f"{_INPUTS}, {_GATE}, Tensor? initial_state=None, Tensor? cu_seqlens=None"
_POOL = f"{_INPUTS}, Tensor(a!) state, Tensor? state_indices=None"
_END = f"{_GATE}, Tensor? cu_seqlens=None"
_SCALE = "float? scale=None"
_ASK = "bool output_final_state=False"
_L2NORM_AND_GATE = (
    "bool use_qk_l2norm_in_kernel=False, bool use_gate_in_kernel=False, float? lower_bound=None"
)
_SAFE = "bool safe_gate=False, bool safe_beta=False, bool safe_keys=False"
_BETA = "bool use_beta_sigmoid_in_kernel=False, bool allow_neg_eigval=False"
_REST = f"{_BETA}, bool transpose_state_layout=False"
_KEEP = "bool disable_recompute=False"
_INVARIANT = "bool invariant=False"
_NULL = "int null_slot=-1"
_RESUMED = "Tensor? has_initial_state=None"
_SOURCE = "Tensor? source=None, Tensor? source_indices=None"
_CHUNK_FLAGS = f"{_SCALE}, {_ASK}, {_L2NORM_AND_GATE}, {_SAFE}, {_REST}, {_KEEP}, {_INVARIANT}"
_KEPT = ", ".join(f"Tensor {n}" for n in KEPT)
_TILE = ", ".join(f"Tensor {n}" for n in TILE)
_SHARD = f"{_INPUTS}, {_GATE}, Tensor? cu_seqlens=None"
_SHARD_FLAGS = f"{_SCALE}, {_L2NORM_AND_GATE}, {_SAFE}, {_BETA}"

_AXES = {
    "q": "BTHK",
    "k": "BTHK",
    "v": "BThV",
    "g": "BTh(D)",  # missing in GDN
    "beta": "BTh",
    "A_log": "h",
    "dt_bias": "h(K)",  # missing in GDN, and where the two are one
    "initial_state": "NhKV",
    "cu_seqlens": "M",
    "state": "LhKV",
    "state_indices": "N(S)",
    "num_accepted_tokens": "N",
    "source": "IhKV",
    "source_indices": "N",
    "snapshot_indices": "NJ",
    "has_initial_state": "N",
    "o": "BThV",
    "final_state": "NhKV",
    "y": "BTh(D)",
    "AP": KEPT["A"],
    "map": "NhKY",
    "runs": "rhKY",
    "starts": "rhKV",
    "entering": "NhKV",
} | KEPT
_ATTENTION: dict[str, Any] = dict(axes=_AXES, folds="Hh")
_SPLIT: dict[str, Any] = dict(_ATTENTION, splits=("Hh", "V", "BNcs"))

CHUNK = Operator(
    "chunk",
    f"({_SEQUENCES}, *, {_CHUNK_FLAGS}) -> (Tensor o, Tensor final_state)",
    chunk.Infer,
    **_SPLIT,
    flops=flops.chunk,
)
CHUNK_FWD = Operator(
    "chunk_fwd",
    f"({_SEQUENCES}, *, {_CHUNK_FLAGS}) -> (Tensor o, Tensor final_state, {_KEPT})",
    chunk.Forward,
    **_SPLIT,
    flops=flops.chunk,
)
CHUNK_BWD = Operator(
    "chunk_bwd",
    f"(Tensor? do, Tensor? dfinal_state, {_KEPT}, {_SEQUENCES}, Tensor? o=None, *, "
    f"{_CHUNK_FLAGS}, int need) -> ({', '.join(f'Tensor d{n}' for n in GRADIENTS)})",
    chunk.Backward,
    **_SPLIT,
    flops=flops.chunk_bwd,
    placeholders=("dfinal_state", *KEPT),
)
# The halves of a call on a shard (`kda_ops.shard`). Without a rule, DTensor gathers their tensors.
CHUNK_MAP = Operator(
    "chunk_map",
    f"({_SHARD}, *, {_SHARD_FLAGS}) -> (Tensor map, Tensor runs, {_TILE}, Tensor AP)",
    shard.MapForward,
    **_ATTENTION,
    flops=flops.chunk_map,
)
CHUNK_JOIN = Operator(
    "chunk_join",
    f"({_SEQUENCES}, {', '.join(f'Tensor? {n}=None' for n in ('runs', *TILE))}, *, {_ASK}, "
    f"{_SHARD_FLAGS}) -> (Tensor o, Tensor final_state, Tensor starts)",
    shard.JoinForward,
    **_ATTENTION,
    flops=flops.chunk_join,
    placeholders=("runs", *TILE),
)
CHUNK_MAP_BWD = Operator(
    "chunk_map_bwd",
    f"({_SHARD}, Tensor? do=None, Tensor? dfinal_state=None, Tensor? A=None, *, {_SHARD_FLAGS}) -> "
    f"(Tensor entering, Tensor runs, {_TILE})",
    shard.MapBackward,
    **_ATTENTION,
    flops=flops.chunk_map_bwd,
    placeholders=("dfinal_state", "A"),
)
CHUNK_JOIN_BWD = Operator(
    "chunk_join_bwd",
    f"(Tensor? do, Tensor? dfinal_state, Tensor runs, Tensor starts, {_TILE}, {_SEQUENCES}, *, "
    f"{_SHARD_FLAGS}, int need) -> ({', '.join(f'Tensor d{n}' for n in GRADIENTS)})",
    shard.JoinBackward,
    **_ATTENTION,
    flops=flops.chunk_join_bwd,
    placeholders=("dfinal_state", "runs", "starts", *TILE),
)
CHUNK_ = Operator(
    "chunk_",
    f"({_POOL}, Tensor? snapshot_indices=None, {_END}, {_RESUMED}, *, int snapshot_every=1, "
    f"{_SCALE}, bool output_final_state=True, {_L2NORM_AND_GATE}, {_SAFE}, {_REST}, {_INVARIANT}, "
    f"{_NULL}) -> Tensor",
    chunk.Prefill,
    **_ATTENTION,
    flops=flops.chunk,
)
RECURRENT = Operator(
    "recurrent",
    f"({_SEQUENCES}, *, {_SCALE}, {_ASK}, {_L2NORM_AND_GATE}, {_REST}) -> "
    "(Tensor o, Tensor final_state)",
    recurrent.Recur,
    **_SPLIT,
    flops=flops.recurrent,
)
RECURRENT_ = Operator(
    "recurrent_",
    f"({_POOL}, Tensor? num_accepted_tokens=None, {_END}, {_SOURCE}, *, {_SCALE}, "
    f"{_L2NORM_AND_GATE}, {_REST}, {_NULL}) -> Tensor",
    recurrent.Decode,
    **_ATTENTION,
    flops=flops.recurrent,
)
GATE = Operator(
    "gate",
    "(Tensor g, Tensor? A_log, Tensor? dt_bias=None, *, float? lower_bound=None) -> Tensor",
    gate.GatePass,
    **_ATTENTION,
    result="y",
)
GATE_BWD = Operator(
    "gate_bwd",
    "(Tensor dy, Tensor g, Tensor? A_log, Tensor? dt_bias, *, float? lower_bound=None) -> "
    "(Tensor dg, Tensor dA_log, Tensor ddt_bias)",
    gate.GateBackwardPass,
    **_ATTENTION,
)


def _into(operator: Operator, kind: type[Pass]) -> Operator:
    """Return the overload of an operator on a pool that writes its result to the caller's `out`."""
    return replace(
        operator,
        name=f"{operator.name}.out",
        schema=operator.schema.replace(") -> Tensor", f", {_OUT}) -> ()"),
        kind=kind,
        axes={**operator.axes, "out": operator.axes["o"]},
    )


CHUNK__OUT = _into(CHUNK_, chunk.PrefillInto)
RECURRENT__OUT = _into(RECURRENT_, recurrent.DecodeInto)
ATTENTION = (
    *(CHUNK, CHUNK_FWD, CHUNK_BWD, CHUNK_MAP, CHUNK_JOIN, CHUNK_MAP_BWD, CHUNK_JOIN_BWD),
    *(RECURRENT, RECURRENT_, CHUNK_, GATE, GATE_BWD),
    CHUNK__OUT,
    RECURRENT__OUT,
)

# --- the rest of a layer --------------------------------------------------------------------------

_CONVOLUTION = (
    "Tensor x, Tensor weight, Tensor? bias=None, Tensor? initial_tail=None, Tensor? cu_seqlens=None"
)
_CONVOLUTION_FLAGS = "str? activation=None, bool output_final_tail=False"
_CONVOLUTION_AXES = {
    "x": "BTX",
    "weight": "XW",
    "bias": "X",
    "initial_tail": "NPX",
    "tail": "LPX",
    "tail_indices": "N",
    "has_initial_state": "N",
    "cu_seqlens": "M",
    "y": "BTX",
    "final_tail": "NPX",
}
_CHANNELS: dict[str, Any] = dict(axes=_CONVOLUTION_AXES, folds="X")
_SPLIT_CHANNELS: dict[str, Any] = dict(_CHANNELS, splits=("X", "BN"))

SHORT_CONV = Operator(
    "short_conv",
    f"({_CONVOLUTION}, *, {_CONVOLUTION_FLAGS}) -> (Tensor y, Tensor final_tail)",
    convolution.Convolve,
    **_SPLIT_CHANNELS,
    flops=flops.short_conv,
)
SHORT_CONV_BWD = Operator(
    "short_conv_bwd",
    f"(Tensor? dy, Tensor? dfinal_tail, {_CONVOLUTION}, *, {_CONVOLUTION_FLAGS}, int need) -> "
    f"({', '.join(f'Tensor d{n}' for n in CONVOLVED)})",
    convolution.ConvolveBackward,
    **_SPLIT_CHANNELS,
    flops=flops.short_conv_bwd,
    placeholders=("dfinal_tail",),
)
SHORT_CONV_ = Operator(
    "short_conv_",
    "(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) tail, Tensor? tail_indices=None, "
    f"Tensor? cu_seqlens=None, {_RESUMED}, *, str? activation=None, {_NULL}) -> Tensor y",
    convolution.ConvolveInPlace,
    **_CHANNELS,
    flops=flops.short_conv,
)
_NORM = "Tensor x, Tensor weight, Tensor? gate=None"
_NORM_FLAGS = 'float eps=1e-05, str activation="sigmoid"'
_ROWS: dict[str, Any] = dict(
    axes={"x": "BThV", "weight": "GV", "gate": "BThV", "y": "BThV"},
    folds="hG",
    splits=("hG", "B", "T"),
)

GATED_RMS_NORM = Operator(
    "gated_rms_norm", f"({_NORM}, *, {_NORM_FLAGS}) -> Tensor y", norm.NormPass, **_ROWS
)
GATED_RMS_NORM_BWD = Operator(
    "gated_rms_norm_bwd",
    f"(Tensor dy, {_NORM}, *, {_NORM_FLAGS}) -> ({', '.join(f'Tensor d{n}' for n in NORMALISED)})",
    norm.NormBackwardPass,
    **_ROWS,
)
# registered in the namespace `schemas.KDA` only
LAYER = (SHORT_CONV, SHORT_CONV_BWD, SHORT_CONV_, GATED_RMS_NORM, GATED_RMS_NORM_BWD)

_TABLES = (*ATTENTION, *LAYER)
for _record in [x for x in globals().values() if isinstance(x, Operator)]:
    if _record not in _TABLES:
        _record._refuse("it is in no table, add it to ATTENTION or LAYER")
for _operator in _TABLES:
    _operator.kind.operator = _operator
