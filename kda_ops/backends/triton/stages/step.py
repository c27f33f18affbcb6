"""Run the recurrence token by token, on a state or a pool of states (docs/maths.md).

It serves decode and short sequences, with one launch for any number of tokens.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kda_ops.backends.triton import tuning
from kda_ops.backends.triton.device.activations import decay_of, gate_of, strength
from kda_ops.backends.triton.device.gate import load_bias, load_rate, log_decay
from kda_ops.backends.triton.device.operands import Gate
from kda_ops.backends.triton.device.state import drop_null
from kda_ops.backends.triton.device.tile import let_next_begin, locate_sequence, wait_for_previous
from kda_ops.backends.triton.plans.launch import launch, strides_of
from kda_ops.problem import Problem

_NOWHERE = (0, 0, 0, 0)
_ANY = 2**32 + 1  # a stride of which nothing is assumed; one less: a multiple of 16


class Strides(NamedTuple):
    """The strides of the tensors that `recur` takes, in elements, one tuple for each.

    The pointers are separate arguments. Inside a tuple Triton would specialise each on its
    alignment, and decode would compile again for other addresses of a cache.
    """

    q: tuple[Any, ...]
    k: tuple[Any, ...]
    v: tuple[Any, ...]
    g: tuple[Any, ...]
    beta: tuple[Any, ...]
    slots: tuple[Any, ...]
    state: tuple[Any, ...]
    final: tuple[Any, ...]


@triton.jit
def find_slot(slots, strides, i_n, column, mask, NULL: tl.constexpr):
    """Return entry [i_n, column] of the slot table as int64; without a table, i_n itself.

    It is negative where `mask` is false, and in the place of slots up to NULL.
    """
    if slots is None:
        return tl.where(mask, i_n.to(tl.int64), -1)
    else:
        slot = tl.load(
            slots + i_n.to(tl.int64) * strides[0] + column * strides[1], mask=mask, other=-1
        )
        return drop_null(slot.to(tl.int64), NULL)


@triton.jit
def load_vector(x, strides, i_b, i_t, i_h, o_d, D: tl.constexpr, here):
    """Read entries o_d of row (i_b, i_t, i_h) of a [B, T, heads, D] tensor, in its dtype.

    They are zero past D, and where `here` is false.
    """
    p_x = x + (i_b * strides[0] + i_t * strides[1] + i_h.to(tl.int64) * strides[2])
    return tl.load(p_x + o_d.to(tl.int64) * strides[3], mask=(o_d < D) & here, other=0.0)


@triton.jit
def load_number(x, strides, i_b, i_t, i_h):
    """Return entry (i_b, i_t, i_h) of a [B, T, HV] tensor in its own dtype."""
    return tl.load(x + (i_b * strides[0] + i_t * strides[1] + i_h.to(tl.int64) * strides[2]))


@triton.jit
def state_entries(
    x,
    strides,
    i_slot,
    i_h,
    first,
    K: tl.constexpr,
    V: tl.constexpr,
    KO: tl.constexpr,
    KI: tl.constexpr,
    BV: tl.constexpr,
):
    """Return pointers to BV columns, from `first` on, of one slot and head, and a mask.

    Both are [KO * BV, KI]; key k is KI i + j for i < KO. Strides hold the caller's layout.

    Loads have two dimensions, so that the threads of a warp lie along the contiguous axis and then
    along columns. The same registers are computed on as [KO, BV, KI]. There a sum over the outer
    keys stays within a thread.
    """
    o_r = tl.arange(0, KO * BV)
    o_k = ((o_r // BV) * KI)[:, None] + tl.arange(0, KI)[None, :]
    o_v = (first + o_r % BV)[:, None]
    p_x = x + (i_slot * strides[0] + i_h.to(tl.int64) * strides[1])
    return p_x + o_k.to(tl.int64) * strides[2] + o_v.to(tl.int64) * strides[3], (o_k < K) & (
        o_v < V
    )


@triton.jit
def load_start(
    x,
    strides,
    i_slot,
    i_h,
    first,
    K: tl.constexpr,
    V: tl.constexpr,
    KO: tl.constexpr,
    KI: tl.constexpr,
    BV: tl.constexpr,
):
    """Read BV columns, from `first` on, of one slot and head: [KO, BV, KI] in the state's dtype.

    Without a state they are zero.
    """
    b_S = tl.zeros((KO, BV, KI), tl.float32)
    if x is not None:
        p_x, m_x = state_entries(x, strides, i_slot, i_h, first, K, V, KO, KI, BV)
        b_S = tl.reshape(tl.load(p_x, mask=m_x, other=0.0), (KO, BV, KI))
    return b_S


@triton.jit
def store_state(
    x,
    strides,
    i_slot,
    i_h,
    first,
    b_S,
    K: tl.constexpr,
    V: tl.constexpr,
    KO: tl.constexpr,
    KI: tl.constexpr,
    BV: tl.constexpr,
):
    """Write BV columns, from `first` on, of one slot and head, if slot and tensor are given."""
    if x is not None:
        p_x, m_x = state_entries(x, strides, i_slot, i_h, first, K, V, KO, KI, BV)
        tl.store(
            p_x, tl.reshape(b_S.to(x.dtype.element_ty), (KO * BV, KI)), mask=m_x & (i_slot >= 0)
        )


@triton.jit
def sum_over_keys(x, y):
    """Return the sums of two [KO, BV, KI] over their keys, [BV] each, by one reduction."""
    return tl.split(tl.sum(tl.sum(tl.join(x, y), 0), 1))


@triton.jit
def widen_again(x):
    """Return x as float32, a second time.

    bfloat16 takes other instructions than ``to``. With the same ones, the compiler would keep one
    result for both uses, and that result takes half of all registers.
    """
    if x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def products(q, k):
    """Return q·q, k·k and k·q of two vectors [KO, KI], by one reduction."""
    squares, mixed = tl.split(
        tl.sum(tl.sum(tl.join(tl.join(q * q, k * k), tl.join(k * q, k * q)), 0), 0)
    )
    qq, kk = tl.split(squares)
    kq, same = tl.split(mixed)
    return qq, kk, kq


@triton.jit
def norms(b_q, b_k, scale, L2NORM: tl.constexpr):
    """Return the factors of q and k, and k·q without these factors.

    The factors are scale / |q| and 1 / |k| with L2NORM, else scale and 1.
    """
    b_qq, b_kk, b_kq = products(b_q, b_k)
    b_qn, b_kn = 1.0 * scale, 1.0
    if L2NORM:
        b_qn *= tl.rsqrt(b_qq + 1e-6)
        b_kn = tl.rsqrt(b_kk + 1e-6)
    return b_qn, b_kn, b_kq


@triton.jit
def keep_layout(x):
    """Return x [KO, KI] by way of a sum, which the compiler cannot move x across.

    Without it, the compiler would change to the layout of the state before it computes x. Then x
    would be computed once per column instead of once.
    """
    return tl.sum(x[:, :, None], 2)


@triton.jit
def clear_output(p_o, n_tokens, o_v, HV: tl.constexpr, V: tl.constexpr):
    """Write zeros to the rows of n_tokens tokens of one head."""
    o_t = tl.arange(0, 16)
    for i_t in range(0, n_tokens, 16):
        m_o = (i_t + o_t < n_tokens)[:, None] & (o_v < V)[None, :]
        tl.store(
            p_o[None, :] + ((i_t + o_t).to(tl.int64) * HV * V)[:, None],
            tl.zeros((16, o_v.shape[0]), p_o.dtype.element_ty),
            mask=m_o,
        )


@triton.jit
def first_slot(slots, strides, accepted, sources, i_n, N, width, NULL: tl.constexpr):
    """Return the slot of the state before the first token, negative without one.

    It is in the column of the last accepted token, or in column 0 without `accepted`. With
    `sources` [N], a sequence starts from slot ``sources[i_n]`` of another pool.
    """
    here = i_n < N
    if sources is not None:
        return find_slot(sources, (1, 0), i_n, 0, here, NULL)
    else:
        column = 0
        if accepted is not None:
            column = tl.load(accepted + i_n, mask=here, other=1).to(tl.int64) - 1
            here = here & (column >= 0) & (column < width)
        return find_slot(slots, strides, i_n, column, here, NULL)


@triton.jit(
    do_not_specialize=["N", "width", "scale", "bound"],
    do_not_specialize_on_alignment=[
        "o",
        "q",
        "k",
        "v",
        "g",
        "beta",
        "A_log",
        "dt_bias",
        "cu_seqlens",
        "slots",
        "accepted",
        "sources",
        "T",
    ],
)
def recur(
    o,
    q,
    k,
    v,
    g,
    beta,
    state,
    slots,
    accepted,
    sources,
    A_log,
    dt_bias,
    cu_seqlens,
    final,
    strides,
    N,
    T,
    width,
    scale,
    bound,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    D: tl.constexpr,
    KO: tl.constexpr,
    KI: tl.constexpr,
    BV: tl.constexpr,
    L2NORM: tl.constexpr,
    KIND: tl.constexpr,
    SIGMOID: tl.constexpr,
    NEG_EIGVAL: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    ONE: tl.constexpr,
    NULL: tl.constexpr,
):
    """Run the recurrence for one sequence and head, over BV columns of its state S [K, BV] fp32::

        u  = beta (v - S^T (k exp g)),   o = scale (S^T (q exp g) + (k·q) u)    [BV]
        S <- diag(exp g) S + k u^T                            g [D], D = K or 1

    S stays in registers from token to token. This o equals ``scale S^T q`` after the update, but
    is formed from the state before it. So one reduction takes both sums over K. With ONE token on a
    bfloat16 state, the state is held as loaded and widened twice. That takes fewer registers, and
    more programs share a multiprocessor.

    The state comes from `state` (row i_n, or a slot; with `sources`, a slot of that table). It goes
    to `final` after the last token, or after each with PER_TOKEN. Sequences without a slot to read
    get zeros. So do tokens past the last sequence, which count as sequence N.

    A launch may begin while the last programs of the previous one run. It waits for all of their
    work, and lets the next launch begin likewise.
    """
    wait_for_previous()
    let_next_begin()
    NV: tl.constexpr = (V + BV - 1) // BV
    DO: tl.constexpr = KO if D > 1 else 1
    DI: tl.constexpr = KI if D > 1 else 1
    i_v, i_h, i_n = (
        tl.program_id(0) % NV,
        (tl.program_id(0) // NV) % HV,
        tl.program_id(0) // NV // HV,
    )
    i_b, bos, n_tokens, _ = locate_sequence(cu_seqlens, i_n, N, T)
    i_g = i_h // (HV // H)  # the query and key head
    o_k = KI * tl.arange(0, KO)[:, None] + tl.arange(0, KI)[None, :]
    o_d = KI * tl.arange(0, DO)[:, None] + tl.arange(0, DI)[None, :]
    o_v = i_v * BV + tl.arange(0, BV)
    p_o = o + ((i_b * T + bos) * HV + i_h) * V + o_v

    i_slot = first_slot(slots, strides.slots, accepted, sources, i_n, N, width, NULL)
    # made anew for each use, because KIND would not stay a constant in a variable
    rate = load_rate(Gate(A_log, dt_bias, bound, KIND), i_h)
    b_bias = load_bias(Gate(A_log, dt_bias, bound, KIND), i_h, o_d, D)
    if i_slot < 0:
        clear_output(p_o, n_tokens, o_v, HV, V)
        return

    here = n_tokens > 0
    b_R = load_start(state, strides.state, i_slot, i_h, i_v * BV, K, V, KO, KI, BV)
    b_S = b_R.to(tl.float32)
    if sources is not None and not PER_TOKEN:
        i_slot = find_slot(slots, strides.slots, i_n, 0, i_n < N, NULL)

    for i_t in range(n_tokens):
        t = bos + i_t
        b_q = load_vector(q, strides.q, i_b, t, i_g, o_k, K, here).to(tl.float32)
        b_k = load_vector(k, strides.k, i_b, t, i_g, o_k, K, here).to(tl.float32)
        b_v = load_vector(v, strides.v, i_b, t, i_h, o_v, V, here).to(tl.float32)
        if g is not None:
            b_g = load_vector(g, strides.g, i_b, t, i_h, o_d, D, here).to(tl.float32)
        if beta is not None:
            b_beta = load_number(beta, strides.beta, i_b, t, i_h).to(tl.float32)
        tl.debug_barrier()  # without it, the compiler waits for these before it loads the state
        if g is not None:
            b_log = log_decay(
                b_g, b_bias, rate, Gate(A_log, dt_bias, bound, KIND), None, EXACT=True
            )
            b_decay = keep_layout(decay_of(b_log))
        b_qn, b_kn, b_kq = norms(b_q, b_k, scale, L2NORM)
        b_q, b_k = keep_layout(b_q * b_qn), keep_layout(b_k * b_kn)
        b_kd, b_qd = b_k, b_q  # the state is read decayed; [K] is cheaper to decay than [K, V]
        if g is not None:
            b_kd, b_qd = b_k * b_decay, b_q * b_decay
        b_u, b_o = sum_over_keys(b_S * b_kd[:, None, :], b_S * b_qd[:, None, :])
        b_u = b_v - b_u
        if beta is not None:
            b_u *= strength(b_beta, SIGMOID, NEG_EIGVAL)
        b_o += b_kq * b_kn * b_qn * b_u
        if ONE:
            b_S = widen_again(b_R)
        if g is not None:
            b_S *= b_decay[:, None, :]
        b_S += b_k[:, None, :] * b_u[None, :, None]
        if PER_TOKEN:
            i_slot = find_slot(slots, strides.slots, i_n, i_t, i_t < width, NULL)
            b_o = tl.where(i_slot >= 0, b_o, 0.0)
        if PER_TOKEN or ONE:
            store_state(final, strides.final, i_slot, i_h, i_v * BV, b_S, K, V, KO, KI, BV)
        tl.store(p_o, b_o.to(o.dtype.element_ty), mask=o_v < V)
        p_o += HV * V

    if not (PER_TOKEN or ONE):
        store_state(final, strides.final, i_slot, i_h, i_v * BV, b_S, K, V, KO, KI, BV)


def _cut(w: tuning.Widths, keys_contiguous: bool, one: bool) -> dict[str, int]:
    """Return how a program holds its part [KO, BV, KI] of a state, and its launch options.

    One cut serves all N, so bits do not depend on N.
    """
    form = "_one" * one + "_rows" * (not keys_contiguous)
    o = tuning.choose(f"recur{form}", w, tuning.Held)
    BK, columns = (triton.next_power_of_2(n) for n in (w.K, max(w.V, 1)))
    KI, BV = min(o.keys, BK), max(1, min(columns, o.entries // BK))
    options = replace(o, warps=max(1, o.warps * BK * BV // o.entries)).launch
    return dict(KO=BK // KI, KI=KI, BV=BV, **options)


def step(p: Problem, o: Tensor, final_state: Tensor | None) -> None:
    """Run the recurrence for any number of tokens in one launch; see `stages.Backend.step`.

    The kernel is compiled for dtypes, sizes, flags, the layout of states, and one token or any
    number. For all other strides it is shown odd 64-bit numbers, so that one kernel serves all
    values.
    """
    final = None if final_state is None or final_state.dim() != 4 else final_state
    initial = p.state if p.source is None else p.source
    strides, width, per_token = _strides(p, initial, final)
    held, held_s = (final, strides.final) if initial is None else (initial, strides.state)
    one = p.cu_seqlens is None and bool(p.T == 1)
    cut = _cut(
        tuning.Widths(torch.float32 if held is None else held.dtype, p.q.device, p.K, p.V),
        bool(held_s[2] == 1) and bool(held_s[3] != 1),
        one,
    )
    compiled_for = Strides(*((_ANY,) * len(s) for s in strides))
    compiled_for = compiled_for._replace(
        state=_show(strides.state, p.K, p.V), final=_show(strides.final, p.K, p.V)
    )
    gate = gate_of(p)
    launch(
        recur,
        (p.N if p.cu_seqlens is None else p.N + 1) * p.HV * -(-p.V // cut["BV"]),
        p.q.device,
        compiled_for=dict(strides=compiled_for, N=2, T=1 if one else 2),
        o=o,
        q=p.q,
        k=p.k,
        v=p.v,
        g=p.g,
        beta=p.beta,
        state=initial,
        slots=p.state_indices,
        accepted=p.num_accepted_tokens,
        sources=p.source_indices,
        A_log=gate.A_log,
        dt_bias=gate.dt_bias,
        cu_seqlens=p.cu_seqlens,
        final=final,
        strides=strides,
        N=p.N,
        T=p.T,
        width=width,
        scale=p.scale,
        bound=gate.bound,
        H=p.H,
        HV=p.HV,
        K=p.K,
        V=p.V,
        D=p.K if p.rank else 1,
        L2NORM=p.l2norm,
        KIND=gate.kind.value,
        SIGMOID=p.sigmoid_beta,
        NEG_EIGVAL=p.neg_eigval,
        PER_TOKEN=per_token,
        ONE=one,
        NULL=p.null_slot,
        **cut,
        **tuning.begins_early(p.q.device),
    )


def _strides(p: Problem, initial: Tensor | None, final: Tensor | None) -> tuple[Strides, int, bool]:
    """Return all strides, the columns of the slot table, and whether each token has a column."""
    slots_s, width, per_token = (0, 0), 1, False
    if p.state_indices is not None:
        found = strides_of(p.state_indices)
        per_token = len(found) == 2
        slots_s = (found[0], found[1] if per_token else 0)
        width = p.state_indices.shape[1] if per_token else 1
    state = _strides_kv(initial, p.transposed)
    strides = Strides(
        q=strides_of(p.q),
        k=strides_of(p.k),
        v=strides_of(p.v),
        g=_NOWHERE if p.g is None else (*strides_of(p.g), *(0,) * (1 - p.rank)),
        beta=_NOWHERE[:3] if p.beta is None else strides_of(p.beta),
        slots=slots_s,
        state=state,
        final=state if final is initial else _strides_kv(final, p.transposed),
    )
    return strides, width, per_token


def _strides_kv(state: Tensor | None, transposed: bool) -> tuple[int, ...]:
    """Return the strides of a state or pool seen as [slots, HV, K, V]."""
    if state is None:
        return _NOWHERE
    *outer, a, b = strides_of(state)
    return (*outer, b, a) if transposed else (*outer, a, b)


def _show(strides: tuple[int, ...], K: int, V: int) -> tuple:
    """Return the strides of a state that a kernel is compiled for.

    The inner two are exact where a head is dense, else only a stride of 1 is. Of the others the
    kernel knows whether 16 divides them.
    """
    some = tuple(_ANY if s % 16 else _ANY - 1 for s in strides)
    for inner in ((V, 1), (1, K)):  # as plain numbers, which the comparison fixes
        if strides[2:] == inner:
            return (*some[:2], *(1 if s == 1 else tl.constexpr(s) for s in inner))
    return (*some[:2], *(1 if s == 1 else x for s, x in zip(strides[2:], some[2:])))
