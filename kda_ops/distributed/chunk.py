"""Run KDA and GDN on sequences sharded over ranks: one all-gather per direction.

A shard is an affine map from its entering state to its leaving state, ``S_out = M S_in + b``, and
so is its backward, ``dS_in = M^T dS_out + c``. Both directions have two halves (`kda_ops.shard`).
The first prepares the tiles of the shard and scans them without outputs for ``[b | M]``, or c. The
ranks gather these, and fold the maps of earlier ranks into S_in, of later ranks into dS_out. From
that and the same tiles, the second half computes all outputs, or gradients.

On a GPU a shard is cut into runs of 2,048 tokens, unless K exceeds 128. All are scanned at once,
for their maps and again for the outputs, so few heads fill the device. A join inside the rank makes
the maps of runs the map of the shard.

A sequence that begins in the shard has no entering state. It leaves with M S + b of its own S, and
the fold restarts there. A mask restarts it: zero times a NaN of another sequence would be NaN.

Every rank runs the same program, including the first.

Cost per call, with ``slots`` = B for dense rows and 1 for packed sequences; an element has 4 bytes
(8 for float64 inputs)::

    sent per rank, forward       slots HV K (V + K)       received: times the size of the group
                   backward      slots HV K V             received: times the size of the group
    with a final state           N HV K V all-reduced, forward and backward
    extra work                   a scan of V + K columns without outputs, each way; a fold of one
                                 small product per rank, on CUDA a join of one per run too
    until the second half        the tiles of `Backend.prepare`; on CUDA [b | M] of each run, and no
                                 u. In 16 bits a tile has 6 K + 4 K / C + 6 C + 12 bytes per token
                                 and value head for KDA, 4 C + 28 for GDN
    kept for backward            A, as on one rank; M of every rank; S_in; on CUDA the state that
                                 each run starts from, HV K V elements. A packed row has a run more
                                 for each of its sequences, also of those on other ranks

The fold multiplies in float32 at torch's precision setting: leave
``torch.set_float32_matmul_precision`` at "highest".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kda_ops import dispatch, functional
from kda_ops.arguments import check_dense, types_of
from kda_ops.distributed import collectives
from kda_ops.distributed.plan import ContextPlan, Contract, agree, place_of
from kda_ops.distributed.span import Span, only
from kda_ops.operators import CHUNK
from kda_ops.problem import Problem
from kda_ops.registrations import schemas
from kda_ops.stages import TILE

Flags = dict[str, Any]
if TYPE_CHECKING:
    from typing_extensions import Unpack

    # in the order of the schema: q, k, v, then the optional tensors
    Tensors = tuple[Tensor, Tensor, Tensor, Unpack[tuple[Tensor | None, ...]]]
_INPUTS = CHUNK.names
_TYPES = {n: types_of(getattr(functional, f"chunk_{n}")) for n in schemas.VARIANTS}


@dataclass(frozen=True)
class ShardedCall:
    """The parts of a call that are not tensors: operator, group and flags."""

    namespace: str
    name: str
    rank: int
    size: int
    keeps_A: bool  # for backward
    transposed: bool
    output_final_state: bool
    flags: tuple[tuple[str, object], ...]

    def op(self, name: str):
        """Return the registered operator."""
        return getattr(getattr(torch.ops, self.namespace), name).default


def run(namespace: str, group, tensors: Tensors, flags: Flags) -> tuple[Tensor, Tensor | None]:
    """Run `kda_ops.distributed.chunk_kda` or `chunk_gdn`; tensors in the order of the schema."""
    q, cu_seqlens = tensors[0], tensors[-1]

    def parse() -> tuple[Problem, Tensors]:
        given = (*zip(_INPUTS, tensors), *flags.items())
        _TYPES[namespace](given)
        for name, x in given:
            check_dense(name, x)
        cast = _autocast(tensors)
        return _parse(namespace, cast, flags), cast

    plan, (p, cast) = agree(
        group,
        *place_of(q),
        cu_seqlens,
        f"kda_ops.distributed.chunk_{namespace}",
        parse,
        lambda parsed: _contract(namespace, parsed[1], flags),
        lengths_needed=cu_seqlens is not None,
    )
    refuse_invariant(flags["invariant"], plan)
    asked = flags["output_final_state"]
    if plan.size == 1:
        o, final_state = getattr(torch.ops, namespace).chunk.default(*cast, **flags)
        return o, final_state if asked else None
    rest = {
        n: x
        for n, x in flags.items()
        if n
        not in ("transpose_state_layout", "output_final_state", "disable_recompute", "invariant")
    }
    call = ShardedCall(
        namespace,
        plan.name,
        plan.rank,
        plan.size,
        "A"
        in dispatch.keeps(q.device).names(schemas.VARIANTS[namespace], cast[0].dtype, False, False),
        flags["transpose_state_layout"],
        asked,
        tuple(rest.items()),
    )
    out = _Shard.apply(call, plan.device_lengths, *cast)
    return out if asked else (out, None)


def refuse_invariant(invariant: bool, plan: ContextPlan) -> None:
    """Refuse the flag where sequences lie across ranks; all ranks of a plan have the same flag."""
    if invariant and plan.size > 1:
        raise ValueError(
            f"invariant must be False on a group of {plan.size} ranks, got True: the state that "
            "enters a shard is a product of maps, whose bits depend on the shards. Split the batch "
            "or the heads over the ranks instead."
        )


def _autocast(tensors: Tensors) -> Tensors:
    """Cast q, k and v to the autocast dtype, as the operator does."""
    if tensors[0] is None:
        return tensors  # `_parse` refuses it
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)

    def lower(x: Tensor) -> Tensor:
        return x.to(dtype) if x.dtype is not torch.float64 and x.dtype.is_floating_point else x

    q, k, v, *rest = tensors
    return lower(q), lower(k), lower(v), *rest


def _parse(namespace: str, tensors: tuple[Tensor | None, ...], flags: Flags) -> Problem:
    """Raise the operator's errors for this shard.

    Offsets are global and do not fit the shard's tokens: their values are checked by `agree`.
    """
    given = dict(zip(_INPUTS, tensors))
    if given["cu_seqlens"] is not None:
        given["cu_seqlens"] = torch.zeros_like(given["cu_seqlens"])
    return Problem.parse(schemas.VARIANTS[namespace], **given, **flags)


def _contract(namespace: str, tensors: tuple[Tensor | None, ...], flags: Flags) -> Contract:
    """Return what all ranks must agree on: everything but values and the shard's length."""
    contract: Contract = {"operator": namespace}
    for name, x in zip(_INPUTS, tensors):
        shape = (
            None
            if x is None
            else [
                n if axis != 1 or name not in ("q", "k", "v", "g", "beta") else "T"
                for axis, n in enumerate(x.shape)
            ]
        )
        contract[name] = (
            None if x is None else f"{x.dtype} {shape}".replace("torch.", "").replace("'", "")
        )
    if tensors[-1] is not None:
        contract["cu_seqlens"] = tensors[-1].tolist()
    wanted = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    return contract | flags | {"a gradient wanted": wanted}


class _Shard(torch.autograd.Function):
    """Forward and backward of one rank.

    Inputs: the call, the lengths, then the tensors in the order of the schema.
    """

    @staticmethod
    def forward(
        ctx,
        call: ShardedCall,
        lengths: Tensor | None,
        q,
        k,
        v,
        g,
        beta,
        A_log,
        dt_bias,
        initial_state,
        cu_seqlens,
    ):
        V, inputs = v.shape[-1], (q, k, v, g, beta, A_log, dt_bias)
        with torch.autocast(q.device.type, enabled=False):
            span = Span(call.rank, call.size, q.shape[0], cu_seqlens, lengths, q.device)
            flags, first = dict(call.flags), _as_kv(initial_state, call.transposed)
            whole, runs, *tile, AP = call.op("chunk_map")(*inputs, span.cu_seqlens, **flags)
            sent = span.pick(whole, span.leaving)
            if first is not None:
                M, begun = sent[..., V:], span.pick(first, span.leaving & ~span.entering)
                sent = torch.cat([sent[..., :V] + M @ begun, M], -1)
            gathered = collectives.wait(collectives.start_all_gather(sent, call.size, call.name))
            maps = gathered.unflatten(0, (call.size, span.slots))
            entered = _fold(maps[..., :V], maps[..., V:], span.before, span.through)
            start = span.put(entered, span.entering, first)
            o, final, starts = call.op("chunk_join")(
                *inputs,
                start,
                span.cu_seqlens,
                runs,
                *tile,
                output_final_state=call.output_final_state,
                **flags,
            )
            if call.output_final_state:
                final = _as_kv(only(final, span.ending), call.transposed)
                final = collectives.wait(collectives.start_all_reduce(final, call.name))
            A = (AP if AP.dim() > 1 else tile[TILE.index("A")]) if call.keeps_A else None
            ctx.call = call
            # A graph keeps the collective's whole result: for a slice of it, backward's graph would
            # repeat the collective.
            kept_maps = (
                gathered if torch.compiler.is_compiling() else gathered[..., V:].contiguous()
            )
            rest = initial_state, cu_seqlens, lengths, A, starts, entered, kept_maps
            ctx.save_for_backward(*inputs, *rest)
            return (o, final) if call.output_final_state else o

    @staticmethod
    @once_differentiable
    def backward(ctx, do, dfinal_state=None):
        call: ShardedCall = ctx.call
        *inputs, initial_state, cu_seqlens, lengths, A, starts, entered, kept_maps = (
            ctx.saved_tensors
        )
        q = inputs[0]
        with torch.autocast(q.device.type, enabled=False):
            span = Span(call.rank, call.size, q.shape[0], cu_seqlens, lengths, q.device)
            flags, dfinal = dict(call.flags), None
            if call.output_final_state:
                dfinal = collectives.wait(collectives.start_all_reduce(dfinal_state, call.name))
                dfinal = only(_as_kv(dfinal, call.transposed), span.ending)
            c, runs, *tile = call.op("chunk_map_bwd")(
                *inputs, span.cu_seqlens, do, dfinal, A, **flags
            )
            gathered = collectives.wait(
                collectives.start_all_gather(span.pick(c, span.entering), call.size, call.name)
            ).unflatten(0, (call.size, span.slots))
            M = kept_maps[..., -q.shape[-1] :].unflatten(0, (call.size, span.slots))
            left = _fold(gathered.flip(0), M.mT.flip(0), span.behind.flip(0), span.through.flip(0))
            dstate = span.put(left, span.leaving, dfinal)
            start = span.put(entered, span.entering, _as_kv(initial_state, call.transposed))
            if tile[TILE.index("A")].dim() == 1:  # the kept A is that of the tile
                tile[TILE.index("A")] = A
            # In the order of the schema: the call and the lengths come first, cu_seqlens last.
            need = list(ctx.needs_input_grad[2:-1])
            grads = call.op("chunk_join_bwd")(
                do,
                dstate,
                runs,
                starts,
                *tile,
                *inputs,
                start,
                span.cu_seqlens,
                need=schemas.mask_of(need),
                **flags,
            )
            grads = [d if wanted else None for d, wanted in zip(grads, need)]
            if need[-1]:
                grads[-1] = _as_kv(only(grads[-1], ~span.entering), call.transposed)
            return None, None, *grads, None


@overload
def _as_kv(state: Tensor, transposed: bool) -> Tensor: ...
@overload
def _as_kv(state: None, transposed: bool) -> None: ...
def _as_kv(state: Tensor | None, transposed: bool) -> Tensor | None:
    """Convert a state between the caller's layout and S[k, v], in either direction."""
    return state.mT if transposed and state is not None else state


def _fold(b: Tensor, M: Tensor, mask: Tensor, through: Tensor) -> Tensor:
    """Apply ``S <- M S + b`` of the ranks in the mask, in order, to a state of zero.

    b is [ranks, slots, HV, K, V], M [ranks, slots, HV, K, K]. Where no sequence goes `through` a
    rank, M is zero and S restarts from b.
    """
    S = only(b, mask)[0]
    for i in range(1, b.shape[0]):
        S = torch.where(mask[i], b[i] + torch.where(through[i], M[i] @ S, 0.0), S)
    return S
