"""The token recurrence on a state or a pool of states: decode and short sequences, one launch for
any number of tokens (docs/maths.md).
"""

import functools

import triton
import triton.language as tl
from torch import Tensor

from kda_ops.backends.triton import tuning
from kda_ops.backends.triton.gate import load_rate, log2_decay, strength
from kda_ops.backends.triton.launch import launch, shape_of, strides_of
from kda_ops.backends.triton.tile import dense, let_next_begin, locate_sequence, wait_for_previous
from kda_ops.problem import Problem

_NOWHERE = (0, 0, 0, 0)
_ANY = 2**32 + 1  # a stride of which nothing is assumed; one less: a multiple of 16


@triton.jit
def find_slot(slots, strides, i_n, column, mask):
    """Entry [i_n, column] of the slot table as int64, negative where `mask` is false; row i_n
    itself without a table.
    """
    if slots is None:
        return tl.where(mask, i_n.to(tl.int64), -1)
    else:
        return tl.load(
            slots + i_n.to(tl.int64) * strides[0] + column * strides[1], mask=mask, other=-1
        ).to(tl.int64)


@triton.jit
def load_vector(x, strides, i_b, i_t, i_h, o_d, D: tl.constexpr, here):
    """Entries o_d of row (i_b, i_t, i_h) of a [B, T, heads, D] tensor in their own dtype, zero past
    D and where `here` is false.
    """
    p_x = x + (i_b * strides[0] + i_t * strides[1] + i_h.to(tl.int64) * strides[2])
    return tl.load(p_x + o_d.to(tl.int64) * strides[3], mask=(o_d < D) & here, other=0.0)


@triton.jit
def state_tile(
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
    """Pointers to columns first.. of one slot and head, and which exist, as [KO * BV, KI]; the
    caller's layout is in the strides.

    A state goes to and from memory in two dimensions, so that the threads of a warp lie along the
    contiguous axis and then along columns, and is computed on as [KO, BV, KI], the same registers,
    where a sum over the outer keys stays within a thread.
    """
    o_r = tl.arange(0, KO * BV)
    o_k = ((o_r // BV) * KI)[:, None] + tl.arange(0, KI)[None, :]
    o_v = (first + o_r % BV)[:, None]
    p_x = x + (i_slot * strides[0] + i_h.to(tl.int64) * strides[1])
    return p_x + o_k.to(tl.int64) * strides[2] + o_v.to(tl.int64) * strides[3], (o_k < K) & (
        o_v < V
    )


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
    """Write columns first.. of one slot and head, if there is a slot and anything to write to."""
    if x is not None:
        p_x, m_x = state_tile(x, strides, i_slot, i_h, first, K, V, KO, KI, BV)
        tl.store(
            p_x, tl.reshape(b_S.to(x.dtype.element_ty), (KO * BV, KI)), mask=m_x & (i_slot >= 0)
        )


@triton.jit
def over_keys(x, y):
    """Sums over the keys of two [KO, BV, KI], both in one pass through shared memory: [BV] each."""
    return tl.split(tl.sum(tl.sum(tl.join(x, y), 0), 1))


@triton.jit
def widen(x):
    """x as float32. bfloat16 in other words than ``to``, so that the compiler does not keep one
    result for two uses: the wide copy is half of all registers.
    """
    if x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def products(q, k):
    """q·q, k·k and k·q of two [KO, KI], in one pass."""
    squares, mixed = tl.split(
        tl.sum(tl.sum(tl.join(tl.join(q * q, k * k), tl.join(k * q, k * q)), 0), 0)
    )
    qq, kk = tl.split(squares)
    kq, same = tl.split(mixed)
    return qq, kk, kq


@triton.jit
def settle(x):
    """The same [KO, KI], by a sum that the compiler does not see through.

    Without it, it would move x to the threads of the state while x is narrow, and compute what
    makes x once per column instead of once.
    """
    return tl.sum(x[:, :, None], 2)


@triton.jit(
    do_not_specialize=["N", "width", "scale", "lower_bound"],
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
    A_log,
    dt_bias,
    cu_seqlens,
    final,
    q_s,
    k_s,
    v_s,
    g_s,
    beta_s,
    slots_s,
    state_s,
    final_s,
    N,
    T,
    width,
    scale,
    lower_bound,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    D: tl.constexpr,
    KO: tl.constexpr,
    KI: tl.constexpr,
    BV: tl.constexpr,
    L2NORM: tl.constexpr,
    ACTIVATE: tl.constexpr,
    BOUNDED: tl.constexpr,
    SIGMOID: tl.constexpr,
    NEG_EIGVAL: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    ONE: tl.constexpr,
):
    """One sequence and head, BV columns of its state; S [K, BV] fp32 stays in registers from token
    to token::

        u  = beta (v - S^T (k exp g)),   o = scale (S^T (q exp g) + (k·q) u)    [BV];
        g [D], D = K or 1
        S <- diag(exp g) S + k u^T

    The read is written with the state before the write, so that both sums over K are taken in one
    pass; it is the same as ``scale S^T q`` after it. With ONE token on a bfloat16 state, the state
    is held as it was loaded and widened twice, which lets more programs share a multiprocessor. The
    state comes from `state` (row i_n, or a slot) and goes to `final` after the last token, or after
    each with PER_TOKEN. Sequences without a slot, and tokens past the last sequence, which are
    sequence N, get zeros.

    A launch may begin beside the last programs of the one before it. It waits for all of their
    work, and lets the next one begin likewise.
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

    column = 0
    here = i_n < N
    if accepted is not None:
        column = tl.load(accepted + i_n, mask=here, other=1).to(tl.int32) - 1
        here = here & (column >= 0) & (column < width)
    i_slot = find_slot(slots, slots_s, i_n, column, here)
    rate = load_rate(A_log, i_h)
    b_bound = tl.full((1, 1), lower_bound, tl.float32)
    b_bias = tl.zeros((DO, DI), tl.float32)
    if dt_bias is not None:
        b_bias = tl.load(dt_bias + i_h * D + o_d, mask=o_d < D, other=0.0).to(tl.float32)
    if i_slot < 0:
        o_t = tl.arange(0, 16)
        for i_t in range(0, n_tokens, 16):
            m_o = (i_t + o_t < n_tokens)[:, None] & (o_v < V)[None, :]
            tl.store(
                p_o[None, :] + ((i_t + o_t).to(tl.int64) * HV * V)[:, None],
                tl.zeros((16, BV), o.dtype.element_ty),
                mask=m_o,
            )
        return

    here = n_tokens > 0
    b_R = tl.zeros((KO, BV, KI), tl.float32)
    if state is not None:
        p_S, m_S = state_tile(state, state_s, i_slot, i_h, i_v * BV, K, V, KO, KI, BV)
        b_R = tl.reshape(tl.load(p_S, mask=m_S, other=0.0), (KO, BV, KI))
    b_S = b_R.to(tl.float32)

    for i_t in range(n_tokens):
        b_q = load_vector(q, q_s, i_b, bos + i_t, i_g, o_k, K, here).to(tl.float32)
        b_k = load_vector(k, k_s, i_b, bos + i_t, i_g, o_k, K, here).to(tl.float32)
        b_v = load_vector(v, v_s, i_b, bos + i_t, i_h, o_v, V, here).to(tl.float32)
        if g is not None:
            b_g = load_vector(g, g_s, i_b, bos + i_t, i_h, o_d, D, here).to(tl.float32)
        if beta is not None:
            b_beta = tl.load(
                beta + (i_b * beta_s[0] + (bos + i_t) * beta_s[1] + i_h.to(tl.int64) * beta_s[2])
            ).to(tl.float32)
        tl.debug_barrier()  # or the compiler waits for these before it asks for the state
        if g is not None:
            b_decay = settle(tl.exp2(log2_decay(b_g, b_bias, rate, b_bound, ACTIVATE, BOUNDED)))
        b_qq, b_kk, b_kq = products(b_q, b_k)
        b_qn, b_kn = 1.0 * scale, 1.0
        if L2NORM:
            b_qn *= tl.rsqrt(b_qq + 1e-6)
            b_kn = tl.rsqrt(b_kk + 1e-6)
        b_q, b_k = settle(b_q * b_qn), settle(b_k * b_kn)
        b_kd, b_qd = b_k, b_q  # the state is read decayed; [K] is cheaper to decay than [K, V]
        if g is not None:
            b_kd, b_qd = b_k * b_decay, b_q * b_decay
        b_u, b_o = over_keys(b_S * b_kd[:, None, :], b_S * b_qd[:, None, :])
        b_u = b_v - b_u
        if beta is not None:
            b_u *= strength(b_beta, SIGMOID, NEG_EIGVAL)
        b_o += b_kq * b_kn * b_qn * b_u
        if ONE:
            b_S = widen(b_R)
        if g is not None:
            b_S *= b_decay[:, None, :]
        b_S += b_k[:, None, :] * b_u[None, :, None]
        if PER_TOKEN:
            i_slot = find_slot(slots, slots_s, i_n, i_t, i_t < width)
            b_o = tl.where(i_slot >= 0, b_o, 0.0)
        if PER_TOKEN or ONE:
            store_state(final, final_s, i_slot, i_h, i_v * BV, b_S, K, V, KO, KI, BV)
        tl.store(p_o, b_o.to(o.dtype.element_ty), mask=o_v < V)
        p_o += HV * V

    if not (PER_TOKEN or ONE):
        store_state(final, final_s, i_slot, i_h, i_v * BV, b_S, K, V, KO, KI, BV)


@functools.lru_cache(maxsize=256)
def tile(
    K: int, V: int, itemsize: int, keys_contiguous: bool, one: bool
) -> tuple[int, int, int, dict[str, int]]:
    """How a state is cut: KO, KI, BV and launch options. 256 bytes per thread; where keys are
    contiguous 256 bytes of one column to 16 threads.

    Where keys are contiguous a sum over them stays within a warp, and a program of one warp never
    waits for another; otherwise a program reads rows of 64 columns, for memory likes them long.
    Registers are capped where another program per multiprocessor is worth it. One tiling for all N,
    on which bits therefore do not depend.
    """
    BK, columns, wide = 1 << (K - 1).bit_length(), 1 << (V - 1).bit_length(), itemsize == 4
    KI = min(256 // itemsize, BK) if keys_contiguous else 1
    BV = max(
        1,
        min(
            columns,
            ((8192 if one or not wide else 16384) // itemsize if keys_contiguous else 8192) // BK,
        ),
    )
    cap = 128 if wide and not one else 168 if one and not (wide or keys_contiguous) else None
    return (
        BK // KI,
        KI,
        BV,
        {"num_warps": max(1, BK * BV * itemsize // 8192)}
        | ({} if cap is None else {"maxnreg": cap}),
    )


def step(p: Problem, o: Tensor, final_state: Tensor | None) -> None:
    """The token recurrence of the contract (`kda_ops.stages.Backend.step`), in one launch whatever
    the number of tokens.

    A kernel is compiled for what it may assume: dtypes, sizes and flags of the model, one token or
    any number, how states lie in memory. It is shown odd 64-bit numbers for other strides, so that
    one kernel holds for all values.
    """
    final = None if final_state is None or final_state.dim() != 4 else final_state
    slots = p.state_indices
    per_token = slots is not None and slots.dim() == 2
    slots_s: tuple[int, ...] = (0, 0)
    width: int = 1
    if slots is not None:
        slots_s = strides_of(slots)
        slots_s, width = (slots_s, shape_of(slots)[1]) if per_token else ((slots_s[0], 0), 1)
    rank = (0,) * (1 - p.rank)
    g_s = _NOWHERE if p.g is None else (*strides_of(p.g), *rank)
    beta_s = _NOWHERE[:3] if p.beta is None else strides_of(p.beta)
    given = [strides_of(p.q), strides_of(p.k), strides_of(p.v), g_s, beta_s, slots_s]
    state_s = _strides_kv(p.state, p.transposed)
    final_s = state_s if final is p.state else _strides_kv(final, p.transposed)
    held, held_s = (p.state, state_s) if p.state is not None else (final, final_s)
    one = p.cu_seqlens is None and bool(p.T == 1)
    keys_contiguous = bool(held_s[2] == 1) and bool(held_s[3] != 1)
    KO, KI, BV, options = tile(
        p.K, p.V, 4 if held is None else held.element_size(), keys_contiguous, one
    )
    constants = (
        *(p.H, p.HV, p.K, p.V, p.K if p.rank else 1, KO, KI, BV),
        *(p.l2norm, p.activate_gate, p.lower_bound is not None, p.sigmoid_beta, p.neg_eigval),
        *(per_token, one),
    )
    tensors = (
        *(o, p.q, p.k, p.v, p.g, p.beta, p.state, slots, p.num_accepted_tokens),
        *(dense(p.A_log), dense(p.dt_bias), p.cu_seqlens, final),
    )
    numbers = (width, p.scale, p.lower_bound or 0.0)
    shown = [(_ANY,) * len(s) for s in given] + [_show(s, p.K, p.V) for s in (state_s, final_s)]
    launch(
        recur,
        (p.N if p.cu_seqlens is None else p.N + 1) * p.HV * -(-p.V // BV),
        p.q.device,
        *tensors,
        *given,
        state_s,
        final_s,
        p.N,
        p.T,
        *numbers,
        *constants,
        shown=(*tensors, *shown, 2, 1 if one else 2, *numbers, *constants),
        **options,
        **tuning.begins_early(p.q.device),
    )


def _strides_kv(state: Tensor | None, transposed: bool) -> tuple[int, ...]:
    """The strides of a state or pool seen as [slots, HV, K, V]."""
    if state is None:
        return _NOWHERE
    *outer, a, b = strides_of(state)
    return (*outer, b, a) if transposed else (*outer, a, b)


def _show(strides: tuple[int, ...], K: int, V: int) -> tuple:
    """What a kernel may assume of a state's strides: the inner two where a head is dense, else
    which is 1; of the others whether 16 divides them.
    """
    dense_head = any(strides[2:] == inner for inner in ((V, 1), (1, K)))
    some = [_ANY if s % 16 else _ANY - 1 for s in strides]
    return (
        *some[:2],
        *(
            1 if s == 1 else tl.constexpr(int(s)) if dense_head else x
            for s, x in zip(strides[2:], some[2:])
        ),
    )
