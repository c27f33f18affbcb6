"""States in memory: S[k, v] of a slot and a head, whatever the caller's layout.

Kernels of Gluon call `drop_null` and `is_resumed` too.
"""

import triton
import triton.language as tl


@triton.jit
def drop_null(slot, NULL: tl.constexpr):
    """Return a slot, or -1 if it is at most NULL and so nobody's."""
    if NULL >= 0:
        slot = tl.where(slot > NULL, slot, -1)
    return slot


@triton.jit
def is_resumed(resumed, i_n, live):
    """Return whether a live sequence starts from its slot, and not from zero."""
    if resumed is not None:
        live = live & tl.load(resumed + i_n, mask=live, other=0)
    return live


@triton.jit
def state_at(state, slot, i_h, o_k, o_v):
    """Return pointers to S[k, v] of one slot and head, [BK, BV]; strides hold the layout."""
    p_s = state.pointer + (
        slot.to(tl.int64) * state.strides[0] + i_h.to(tl.int64) * state.strides[1]
    )
    return (
        p_s
        + (o_k.to(tl.int64) * state.strides[2])[:, None]
        + (o_v.to(tl.int64) * state.strides[3])[None, :]
    )


@triton.jit
def open_state(state, slots, i_n, i_h, o_k, o_v, live, K: tl.constexpr, V: tl.constexpr):
    """Read the state that a sequence starts from, [BK, BV] fp32; zero without one."""
    if state.pointer is None:
        b_S = tl.zeros((o_k.shape[0], o_v.shape[0]), tl.float32)
    else:
        slot = tl.load(slots + i_n, mask=live, other=0) if slots is not None else i_n
        m_s = ((o_k < K)[:, None] & (o_v < V)[None, :]) & live
        b_S = tl.load(state_at(state, slot, i_h, o_k, o_v), mask=m_s, other=0.0).to(tl.float32)
    return b_S


@triton.jit
def close_state(state, slots, i_n, i_h, b_S, o_k, o_v, live, K: tl.constexpr, V: tl.constexpr):
    """Write the state that a sequence ends with."""
    slot = tl.load(slots + i_n, mask=live, other=0) if slots is not None else i_n
    m_s = ((o_k < K)[:, None] & (o_v < V)[None, :]) & live
    p_s = state_at(state, slot, i_h, o_k, o_v)
    tl.store(p_s, b_S.to(state.pointer.dtype.element_ty), mask=m_s)
