"""Run KDA and GDN on sequences sharded over ranks: one pass, one all-gather per direction.

A shard is an affine map from its entering state to its leaving state and its outputs::

    S_out = M S_in + b            o_t = (o_b)_t + S_in^T (o_M)_t

One call of the operator computes all four. With values ``[v | 0]`` and initial state ``[0 | I]`` it
returns outputs ``[o_b | o_M]`` and final state ``[b | M]``.

Forward gathers ``[b | M]`` in the state dtype, folds the maps of the earlier ranks into S_in and
adds ``S_in^T o_M`` to the outputs.

Backward uses the transposed maps: the gradient of S_in is ``c + M^T dS_out`` with
``c = sum_t (o_M)_t do_t^T``. It gathers only c and folds it over the later ranks into dS_out. Then
it calls the operator's backward with S_in and dS_out.

A sequence that begins in the shard starts from ``[S | 0]``. Its M is zero, so b is its state and
the fold restarts there. A mask restarts it: zero times a NaN of another sequence would be NaN.

Every rank runs the same program, including the first.

Cost per call, with ``slots`` = B for dense rows and 1 for packed sequences; an element has 4 bytes
(8 for float64 inputs)::

    sent per rank, forward       slots HV K (V + K)       received: times the size of the group
                   backward      slots HV K V             received: times the size of the group
    with a final state           N HV K V all-reduced, forward and backward
    extra work                   K more columns in forward's scan; two products [T, K] x [K, V] per
                                 value head; a fold of one small product per rank
    kept for backward            o_M, K elements (of q's dtype on CUDA) per token and
                                 value head; S_in; M of every rank. In eager code, one dense
                                 row keeps o and o_M in one tensor of V + K columns, which
                                 lives as long as either

A 16-bit output is a sum of two terms, each rounded to 16 bits. The fold multiplies in float32 at
torch's precision setting: leave ``torch.set_float32_matmul_precision`` at "highest".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

import torch
import torch.nn.functional as F
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
from kda_ops.stages import KEPT

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
    # dtype in which o_M is kept for backward: that of the backend's operands
    operand: torch.dtype
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
        dispatch.keeps(q.device).operand_dtype(q.dtype),
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
        K, V = q.shape[-1], v.shape[-1]
        with torch.autocast(q.device.type, enabled=False):
            # launched first: the device works on it while the host prepares the small masks
            values = _beside_zeros(v, K)
            span = Span(call.rank, call.size, q.shape[0], cu_seqlens, lengths, q.device)
            start = _with_identity(span, _as_kv(initial_state, call.transposed), q, v)
            out, final, *kept = call.op("chunk_fwd")(
                q.to(call.operand),
                k.to(call.operand),
                values.to(call.operand),
                g,
                beta,
                A_log,
                dt_bias,
                start,
                span.cu_seqlens,
                output_final_state=True,
                **dict(call.flags),
            )
            b, M = final[..., :V], final[..., V:]
            gathering = collectives.start_all_gather(
                span.pick(final, span.leaving), call.size, call.name
            )
            o_b, o_M = out[..., :V], span.of_entered(out[..., V:])
            # otherwise o overwrites o_b, and o_M shares its tensor
            if span.packed or out.shape[0] > 1 or torch.compiler.is_compiling():
                o_b, o_M = o_b.clone(memory_format=torch.contiguous_format), o_M.contiguous()
            gathered = collectives.wait(gathering)
            maps = gathered.unflatten(0, (call.size, span.slots))
            entered = _fold(maps[..., :V], maps[..., V:], span.before, span.through)
            o = span.of_entered(_read(o_b, o_M, entered), out[..., :V])
            # `to` without a cast returns an alias, which loses its gradient in torch 2.11 graphs
            if o.dtype is not v.dtype:
                o = o.to(v.dtype)
            M_end = None
            if call.output_final_state:
                M_end = span.pick(M, span.entering & span.ending)
                final = only(b + only(M @ entered, span.entering), span.ending)
                final = collectives.wait(
                    collectives.start_all_reduce(_as_kv(final, call.transposed), call.name)
                )
            ctx.call = call
            # A graph keeps the collective's whole result: for a slice of it, backward's graph would
            # repeat the collective.
            kept_maps = (
                gathered if torch.compiler.is_compiling() else gathered[..., V:].contiguous()
            )
            ctx.save_for_backward(
                q,
                k,
                v,
                g,
                beta,
                A_log,
                dt_bias,
                initial_state,
                cu_seqlens,
                lengths,
                kept[tuple(KEPT).index("A")],
                o_M,
                M_end,
                entered,
                kept_maps,
            )
            return (o, final) if call.output_final_state else o

    @staticmethod
    @once_differentiable
    def backward(ctx, do, dfinal_state=None):
        call: ShardedCall = ctx.call
        (
            q,
            k,
            v,
            g,
            beta,
            A_log,
            dt_bias,
            initial_state,
            cu_seqlens,
            lengths,
            A,
            o_M,
            M_end,
            entered,
            kept_maps,
        ) = ctx.saved_tensors
        with torch.autocast(q.device.type, enabled=False):
            span = Span(call.rank, call.size, q.shape[0], cu_seqlens, lengths, q.device)
            c, dfinal = _write(o_M, span.of_entered(do), entered.dtype), None
            if call.output_final_state:
                dfinal = _as_kv(
                    collectives.wait(collectives.start_all_reduce(dfinal_state, call.name)),
                    call.transposed,
                )
                c = c + M_end.mT @ span.pick(dfinal, span.entering & span.ending)
                dfinal = only(dfinal, span.ending)
            gathered = collectives.wait(
                collectives.start_all_gather(c, call.size, call.name)
            ).unflatten(0, (call.size, span.slots))
            M = kept_maps[..., -q.shape[-1] :].unflatten(0, (call.size, span.slots))
            left = _fold(gathered.flip(0), M.mT.flip(0), span.behind.flip(0), span.through.flip(0))
            dstate = span.put(left, span.leaving, dfinal)
            first_state = _as_kv(initial_state, call.transposed)
            start = span.put(entered, span.entering, first_state)
            # In the order of the schema: the call and the lengths come first, cu_seqlens last.
            need, none = list(ctx.needs_input_grad[2:-1]), q.new_empty((0,))
            grads = call.op("chunk_bwd")(
                do,
                dstate,
                *(A if n == "A" else none for n in KEPT),
                q,
                k,
                v,
                g,
                beta,
                A_log,
                dt_bias,
                start,
                span.cu_seqlens,
                output_final_state=True,
                need=schemas.mask_of(need),
                **dict(call.flags),
            )
            grads = [d if wanted else None for d, wanted in zip(grads, need)]
            if need[-1]:
                grads[-1] = _as_kv(only(grads[-1], ~span.entering), call.transposed)
            return None, None, *grads, None


def _beside_zeros(v: Tensor, K: int) -> Tensor:
    """Return [v | 0] with K columns of zeros.

    Eager code copies 8 bytes at a time where it can: copies of single 16-bit elements take twice as
    long on a GPU.
    """
    if torch.compiler.is_compiling() or not v.is_contiguous() or not v.numel():
        return F.pad(v, (0, K))
    V, each = v.shape[-1], 8 // v.element_size()
    out = v.new_empty((*v.shape[:-1], V + K))
    # flat, because axes of size 1 may have any stride
    rows, given = out.view(-1, V + K), v.view(-1)
    if V % each == 0 == K % each and v.data_ptr() % 8 == 0:
        rows, given, V = rows.view(torch.int64), given.view(torch.int64), V // each
    rows[:, :V].copy_(given.view(-1, V))
    rows[:, V:].zero_()
    return out


@overload
def _as_kv(state: Tensor, transposed: bool) -> Tensor: ...
@overload
def _as_kv(state: None, transposed: bool) -> None: ...
def _as_kv(state: Tensor | None, transposed: bool) -> Tensor | None:
    """Convert a state between the caller's layout and S[k, v], in either direction."""
    return state.mT if transposed and state is not None else state


def _with_identity(span: Span, first_state: Tensor | None, q: Tensor, v: Tensor) -> Tensor:
    """Return [N, HV, K, V + K]: ``[0 | I]`` for entering sequences, ``[S | 0]`` for the others."""
    N, (HV, V), K = span.entering.shape[0], v.shape[2:], q.shape[-1]
    eye = torch.eye(K, dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
    begun = (
        eye.new_zeros((N, HV, K, V)) if first_state is None else only(first_state, ~span.entering)
    )
    return torch.cat([begun, only(eye.expand(N, HV, K, K), span.entering)], -1)


def _fold(b: Tensor, M: Tensor, mask: Tensor, through: Tensor) -> Tensor:
    """Apply ``S <- M S + b`` of the ranks in the mask, in order, to a state of zero.

    b is [ranks, slots, HV, K, V], M [ranks, slots, HV, K, K]. Where no sequence goes `through` a
    rank, M is zero and S restarts from b.
    """
    S = only(b, mask)[0]
    for i in range(1, b.shape[0]):
        S = torch.where(mask[i], b[i] + torch.where(through[i], M[i] @ S, 0.0), S)
    return S


def _read(o_b: Tensor, o_M: Tensor, S: Tensor) -> Tensor:
    """Return o_b + S^T o_M for every token, summed in the state dtype and rounded once.

    o_b is [B, T, HV, V], o_M [B, T, HV, K], S [B, HV, K, V]. For B == 1 this overwrites o_b.
    """
    o = o_b.transpose(1, 2).flatten(0, 1)  # a view for B == 1
    o.baddbmm_(o_M.transpose(1, 2).flatten(0, 1), S.flatten(0, 1).to(o.dtype))
    return o.unflatten(0, (o_b.shape[0], o_b.shape[2])).transpose(1, 2)


def _write(o_M: Tensor, do: Tensor, dtype: torch.dtype) -> Tensor:
    """Return sum_t (o_M)_t do_t^T, [B, HV, K, V], summed in `dtype`.

    On CUDA 16-bit operands are not cast, because the product sums them in `dtype`.
    """
    a, b = o_M.permute(0, 2, 3, 1), do.transpose(1, 2)
    if a.is_cuda and a.dtype.itemsize == 2:
        return torch.bmm(a.flatten(0, 1), b.flatten(0, 1), out_dtype=dtype).unflatten(
            0, a.shape[:2]
        )
    return a.to(dtype) @ b.to(dtype)
