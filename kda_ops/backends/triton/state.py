"""States in memory: S[k, v] of a slot and a head, whatever the caller's layout."""

import triton
import triton.language as tl


@triton.jit
def state_at(state, strides, slot, i_h, o_k, o_v):
    """Pointers to S[k, v] of one slot and head, [BK, BV]; the caller's layout is in the strides."""
    p_s = state + (slot.to(tl.int64) * strides[0] + i_h.to(tl.int64) * strides[1])
    return p_s + (o_k.to(tl.int64) * strides[2])[:, None] + (o_v.to(tl.int64) * strides[3])[None, :]


@triton.jit
def open_state(state, strides, slots, i_n, i_h, o_k, o_v, live, K: tl.constexpr, V: tl.constexpr):
    """The state a sequence starts from, [BK, BV] fp32."""
    if state is None:
        b_S = tl.zeros((o_k.shape[0], o_v.shape[0]), tl.float32)
    else:
        slot = tl.load(slots + i_n, mask=live, other=0) if slots is not None else i_n
        m_s = ((o_k < K)[:, None] & (o_v < V)[None, :]) & live
        b_S = tl.load(state_at(state, strides, slot, i_h, o_k, o_v), mask=m_s, other=0.0).to(
            tl.float32
        )
    return b_S


@triton.jit
def close_state(
    final, strides, slots, i_n, i_h, b_S, o_k, o_v, live, K: tl.constexpr, V: tl.constexpr
):
    """Write the state after the last token."""
    slot = tl.load(slots + i_n, mask=live, other=0) if slots is not None else i_n
    m_s = ((o_k < K)[:, None] & (o_v < V)[None, :]) & live
    tl.store(
        state_at(final, strides, slot, i_h, o_k, o_v), b_S.to(final.dtype.element_ty), mask=m_s
    )
