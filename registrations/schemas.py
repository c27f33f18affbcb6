"""The operators: one table that every other registration file loops over.

An operator's schema is a list of groups of arguments. A group holds tensors that autograd, vmap
and sharding treat alike. A formula returns gradients in the order of the group's names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from kda_ops.private import OpOverload
from kda_ops.stages import AXES, CONVOLUTION, CONVOLVED, GRADIENTS, KEPT, NORM, NORMALISED, axes_of

KDA, GDN = "kda", "gdn"  # the namespaces, which `benchmarks/hub.py` makes unique
VARIANTS = {KDA: 1, GDN: 0}  # namespace -> rank of the decay per token and value head

_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? beta"
_GATE = "Tensor? A_log=None, Tensor? dt_bias=None"
_SEQUENCES = f"{_INPUTS}, {_GATE}, Tensor? initial_state=None, Tensor? cu_seqlens=None"
_STEP = (
    f"{_INPUTS}, Tensor(a!) state, Tensor? state_indices=None, Tensor? num_accepted_tokens=None, "
    f"{_GATE}, Tensor? cu_seqlens=None"
)
_PREFILL = (
    f"{_INPUTS}, Tensor(a!) state, Tensor? state_indices=None, Tensor? snapshot_indices=None, "
    f"{_GATE}, Tensor? cu_seqlens=None"
)
_SCALE = "float? scale=None"
_ASK = "bool output_final_state=False"
_L2NORM_AND_GATE = (
    "bool use_qk_l2norm_in_kernel=False, bool use_gate_in_kernel=False, float? lower_bound=None"
)
_SAFE = "bool safe_gate=False, bool safe_beta=False, bool safe_keys=False"
_REST = (
    "bool use_beta_sigmoid_in_kernel=False, bool allow_neg_eigval=False, bool "
    "transpose_state_layout=False"
)
_KEEP = "bool disable_recompute=False"
_CHUNK_FLAGS = f"{_SCALE}, {_ASK}, {_L2NORM_AND_GATE}, {_SAFE}, {_REST}, {_KEEP}"


@dataclass(frozen=True)
class Operator:
    """A name within a namespace and its schema.

    `mutates` names the argument that it writes, if any; `axes` tells the axes of its tensors.
    """

    name: str
    schema: str
    mutates: str = ""
    axes: Mapping[str, str] = field(default_factory=lambda: AXES, compare=False)

    def axes_of(self, name: str) -> str:
        """Return the axes of an argument or result by name."""
        return axes_of(name, self.axes)

    def overload(self, namespace: str) -> OpOverload:
        """Return the registered operator of one variant."""
        return getattr(getattr(torch.ops, namespace), self.name).default


_KEPT = ", ".join(f"Tensor {n}" for n in KEPT)
_GRADIENTS_OUT = ", ".join(f"Tensor d{n}" for n in GRADIENTS)

CHUNK = Operator("chunk", f"({_SEQUENCES}, *, {_CHUNK_FLAGS}) -> (Tensor o, Tensor final_state)")
CHUNK_FWD = Operator(
    "chunk_fwd", f"({_SEQUENCES}, *, {_CHUNK_FLAGS}) -> (Tensor o, Tensor final_state, {_KEPT})"
)
CHUNK_BWD = Operator(
    "chunk_bwd",
    f"(Tensor? do, Tensor? dfinal_state, {_KEPT}, {_SEQUENCES}, Tensor? o=None, *, "
    f"{_CHUNK_FLAGS}, int need) -> ({_GRADIENTS_OUT})",
)


def mask_of(wanted: Iterable[bool]) -> int:
    """Return `need` of a backward: bit i asks for the gradient of differentiable input i."""
    return sum(bool(x) << i for i, x in enumerate(wanted))


RECURRENT = Operator(
    "recurrent",
    (
        f"({_SEQUENCES}, *, {_SCALE}, {_ASK}, {_L2NORM_AND_GATE}, {_REST}) -> (Tensor o, Tensor "
        "final_state)"
    ),
)
RECURRENT_ = Operator(
    "recurrent_", f"({_STEP}, *, {_SCALE}, {_L2NORM_AND_GATE}, {_REST}) -> Tensor", mutates="state"
)
CHUNK_ = Operator(
    "chunk_",
    (
        f"({_PREFILL}, *, int snapshot_every=1, {_SCALE}, {_L2NORM_AND_GATE}, {_SAFE}, {_REST}) "
        "-> Tensor"
    ),
    mutates="state",
)
GATE = Operator(
    "gate", "(Tensor g, Tensor? A_log, Tensor? dt_bias=None, *, float? lower_bound=None) -> Tensor"
)
GATE_BWD = Operator(
    "gate_bwd",
    (
        "(Tensor dy, Tensor g, Tensor? A_log, Tensor? dt_bias, *, float? lower_bound=None) -> "
        "(Tensor dg, Tensor dA_log, Tensor ddt_bias)"
    ),
)
_CONVOLUTION = (
    "Tensor x, Tensor weight, Tensor? bias=None, Tensor? initial_tail=None, Tensor? cu_seqlens=None"
)
_CONVOLUTION_FLAGS = "str? activation=None, bool output_final_tail=False"
SHORT_CONV = Operator(
    "short_conv",
    f"({_CONVOLUTION}, *, {_CONVOLUTION_FLAGS}) -> (Tensor y, Tensor final_tail)",
    axes=CONVOLUTION,
)
SHORT_CONV_BWD = Operator(
    "short_conv_bwd",
    f"(Tensor? dy, Tensor? dfinal_tail, {_CONVOLUTION}, *, {_CONVOLUTION_FLAGS}, int need) -> "
    f"({', '.join(f'Tensor d{n}' for n in CONVOLVED)})",
    axes=CONVOLUTION,
)
SHORT_CONV_ = Operator(
    "short_conv_",
    (
        "(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) tail, Tensor? tail_indices=None, "
        "Tensor? cu_seqlens=None, *, str? activation=None) -> Tensor y"
    ),
    mutates="tail",
    axes=CONVOLUTION,
)
_NORM = "Tensor x, Tensor weight, Tensor? gate=None"
_NORM_FLAGS = 'float eps=1e-05, str activation="sigmoid"'
GATED_RMS_NORM = Operator("gated_rms_norm", f"({_NORM}, *, {_NORM_FLAGS}) -> Tensor y", axes=NORM)
GATED_RMS_NORM_BWD = Operator(
    "gated_rms_norm_bwd",
    f"(Tensor dy, {_NORM}, *, {_NORM_FLAGS}) -> ({', '.join(f'Tensor d{n}' for n in NORMALISED)})",
    axes=NORM,
)
OPERATORS = (CHUNK, CHUNK_FWD, CHUNK_BWD, RECURRENT, RECURRENT_, CHUNK_, GATE, GATE_BWD)
# the other operators of a layer, registered in the namespace KDA only
LAYER = (SHORT_CONV, SHORT_CONV_BWD, SHORT_CONV_, GATED_RMS_NORM, GATED_RMS_NORM_BWD)


def operators(namespace: str) -> tuple[Operator, ...]:
    """Return the operators of a namespace."""
    return (*OPERATORS, *LAYER) if namespace == KDA else OPERATORS


def _define(namespace: str) -> torch.library.Library:
    if hasattr(getattr(torch.ops, namespace), "chunk"):
        raise ImportError(
            f"torch.ops.{namespace}.chunk is already registered: two copies of kda_ops are on the "
            "path, or another package took the name."
        )
    library = torch.library.Library(namespace, "FRAGMENT")  # noqa: TOR901  (held below for the life of the process)
    for operator in operators(namespace):
        library.define(operator.name + operator.schema, tags=(torch.Tag.pt2_compliant_tag,))
    return library


LIBRARIES = {namespace: _define(namespace) for namespace in VARIANTS}
