"""Walk forward again in KDA's backward and write the states, in Gluon for Hopper.

A program takes one sequence and head. One warp copies inputs to shared memory, four warps `prepare`
w and kg of 32 rows, and two partitions of four warps `scan` these rows, each with half of V. The
scans write the state that enters the rows, and u. A' is what forward has kept.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma, warpgroup_mma

from kda_ops.backends.triton.device.channels import (
    Column,
    Signal,
    find_span,
    find_tiles,
    from_span,
    signal,
)
from kda_ops.backends.triton.device.gate import load_bias, load_rate
from kda_ops.backends.triton.device.gluon_names import (
    aggregate,
    barrier,
    load_tile,
    reinterpret,
    store_tile,
    tensor_descriptor,
    wait_products,
)
from kda_ops.backends.triton.device.gluon_tile import (
    FLAT,
    LOG2E,
    PAIR,
    ROWS_4,
    SHIFT,
    UNSHIFT,
    decay_rows,
    ex2,
    fill_decays,
    fill_rows,
    growth,
    inverse_norms,
    load_rows,
    narrow,
    product,
    rcp,
    state_at,
    widen,
)


@aggregate
class Meetings:
    """Where the partitions meet, once per 32 rows each."""

    kg_full: Signal  # k and g are copied
    kg_free: Signal  # `prepare` has read them
    v_full: Signal  # v, A' and P are copied
    tile: Signal  # all that `prepare` makes
    done: Signal  # both scans have ended, so that all tiles but k and g are free

    @gluon.constexpr_function
    def __init__(self, kg_full, kg_free, v_full, tile, done):
        self.kg_full, self.kg_free, self.v_full = kg_full, kg_free, v_full
        self.tile, self.done = tile, done


@aggregate
class Buffers:
    """What lies in shared memory; the first axis counts stages, and halves of V for S and u."""

    k: gl.shared_memory_descriptor  # [2, 32, K]
    v: gl.shared_memory_descriptor  # [2, 32, V]
    g: gl.shared_memory_descriptor  # [2, 32, K]
    AP: gl.shared_memory_descriptor  # [2, 32, 64]  A' and P next to each other
    w: gl.shared_memory_descriptor  # [2, 32, K]  kr before that
    kg: gl.shared_memory_descriptor  # [2, 32, K]
    S: gl.shared_memory_descriptor  # [2, 64, K]
    u: gl.shared_memory_descriptor  # [2, 32, 64]
    gamma: gl.shared_memory_descriptor  # [2, K] fp32
    norm_k: gl.shared_memory_descriptor  # [32] fp32
    lost: gl.shared_memory_descriptor  # [2, 32] fp32, of beta by rounding

    @gluon.constexpr_function
    def __init__(self, k, v, g, AP, w, kg, S, u, gamma, norm_k, lost):
        self.k, self.v, self.g, self.AP, self.w, self.kg = k, v, g, AP, w, kg
        self.S, self.u, self.gamma, self.norm_k, self.lost = S, u, gamma, norm_k, lost


@aggregate
class Inputs:
    """Inputs to copy to shared memory: the head's first column in each, for AP its first row."""

    k: tensor_descriptor
    v: tensor_descriptor
    g: tensor_descriptor
    AP: tensor_descriptor
    k_at: gl.tensor
    v_at: gl.tensor
    g_at: gl.tensor
    AP_at: gl.tensor

    @gluon.constexpr_function
    def __init__(self, k, v, g, AP, k_at, v_at, g_at, AP_at):
        self.k, self.v, self.g, self.AP = k, v, g, AP
        self.k_at, self.v_at, self.g_at, self.AP_at = k_at, v_at, g_at, AP_at


@gluon.jit
def produce(of, tiles, x, on, span):
    """Copy the inputs of each 32 rows to shared memory, in the order of their use."""
    G_BYTES: gl.constexpr = x.g.dtype.primitive_bitwidth // 8
    for n in range((span.length + 31) // 32):
        s, t = n & 1, span.token + n * 32
        on.kg_free.wait(n - 2)
        on.kg_full.expect(n, 32 * 128 * (2 + G_BYTES))
        load_tile(of.g, [t, of.g_at], on.kg_full.at(n), x.g.index(s))
        load_tile(of.k, [t, of.k_at], on.kg_full.at(n), x.k.index(s))
        on.done.wait(n - 2)
        on.v_full.expect(n, 32 * (128 + 64) * 2)
        load_tile(of.v, [t, of.v_at], on.v_full.at(n), x.v.index(s))
        row = of.AP_at + (n >> 1) * (tiles.step * 64) + s * 32
        load_tile(of.AP, [row, 0], on.v_full.at(n), x.AP.index(s))


@gluon.jit
def lost(beta, span, n, flags, B: gl.constexpr):
    """Return what A' has lost of beta by rounding, for block n of 32 rows; 0 past the sequence."""
    row = n * 32 + gl.arange(0, 32, B)
    m_b = row < span.length
    if beta.first is not None:
        b = gl.load(beta.first + row.to(gl.int64) * beta.step, mask=m_b, other=0.0).to(gl.float32)
        if flags.SIGMOID:
            b = rcp(1.0 + ex2(b * -LOG2E))
            if flags.NEG_EIGVAL:
                b = 2.0 * b
            b = gl.where(m_b, b, 0.0)
        b = b - b.to(gl.bfloat16).to(gl.float32)
    else:
        b = gl.zeros([32], gl.float32, B)
    return b


@gluon.jit
def prepare(x, on, span, beta, gate, flags):
    """Make w and kg [32, K]; `states_kda` defines D, total and A'::

        kr = k 2^(D - c);   kg = k 2^(total - D);   w = -2^c A' kr,   c = -SHIFT

    The operations are those of `walk_kda`, so the states have the same bits as in forward.
    """
    NORM: gl.constexpr = flags.L2NORM
    B: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    E: gl.constexpr = gl.BlockedLayout([32, 1], [1, 32], [1, 4], [1, 0])
    N: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16])
    K: gl.constexpr = 128
    none = gl.zeros([K, 32], gl.float32, N)
    rate = load_rate(gate, span.i_h)
    bias = load_bias(gate, span.i_h, gl.arange(0, K, gl.SliceLayout(0, E)), K)[None, :]
    b = lost(beta, span, 0, flags, B)
    for n in range((span.length + 31) // 32):
        s, here = n & 1, span.length - n * 32
        k_b, g_b, w_b, kg_b = x.k.index(s), x.g.index(s), x.w.index(s), x.kg.index(s)
        on.kg_full.wait(n)
        fill_decays(g_b, here, gate)
        fill_rows(k_b, here, 0.0, ROWS_4)
        g = decay_rows(g_b, bias, rate, gate, E)
        D, total = growth(g, 1, E)
        if NORM:
            inverse_norms(k_b, x.norm_k)
        k = load_rows(k_b, x.norm_k, E, NORM)
        on.done.wait(n - 2)
        x.lost.index(s).store(b)
        b = lost(beta, span, n + 1, flags, B)
        w_b.store(narrow(k * D))
        k = k * rcp(D)
        rest = gl.expand_dims(ex2(total * LOG2E + SHIFT), 1)
        kg_b.store(
            narrow(gl.convert_layout(gl.reshape(gl.reshape(k, (1, 32, K)) * rest, (32, K)), E))
        )
        reinterpret(x.gamma.index(s), gl.float32, [1, K], PAIR).store(ex2(total * LOG2E))
        fence_async_shared()
        barrier()
        on.kg_free.arrive(n)
        on.v_full.wait(n)
        A = x.AP.index(s).slice(0, 32, dim=1)
        w = product(w_b.permute((1, 0)), A.permute((1, 0)), none)
        w = wait_products(0, deps=(w,))
        barrier()  # all warps have read kr
        w_b.permute((1, 0)).store(narrow(w * -UNSHIFT))
        fence_async_shared()
        barrier()
        on.tile.arrive(n)


@gluon.jit
def scan(x, on, span, S_d, u_d, tiles, initial, I: gl.constexpr):
    """Carry 64 rows of S^T [V, K], from 64 I on, and write them and u for each 32 tokens.

    In Triton 3.6 `mbarrier.arrive` is one thread's, and each warp waits for its own products: so
    arrivals follow a barrier that follows the wait.
    """
    K: gl.constexpr = 128
    W: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    N: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16])
    WA: gl.constexpr = gl.DotOperandLayout(0, W, 2)
    NA: gl.constexpr = gl.DotOperandLayout(0, N, 2)
    R: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    S = gl.zeros([64, K], gl.float32, W)
    if initial.pointer is not None:
        p_s = state_at(initial.pointer, initial.strides, span.i_n, span.i_h, W, 64, I)
        S = gl.load(p_s).to(gl.float32)
    for n in range((span.length + 31) // 32):
        s, zero = n & 1, n >> 30
        S_b, u_b = x.S.index(I + zero), x.u.index(I + zero)
        v_b = x.v.index(s).slice(I * 64, 64, dim=1)
        b_S = narrow(S)
        tma.store_wait(0)
        on.v_full.wait(n)
        fill_rows(v_b, span.length - n * 32, 0.0, R)
        v = v_b.permute((1, 0)).load(N)
        on.tile.wait(n)
        A = x.AP.index(s).slice(0, 32, dim=1)
        u = widen(v) * x.lost.index(s).load(gl.SliceLayout(0, N))[None, :]
        u = warpgroup_mma(gl.convert_layout(v, NA), A.permute((1, 0)), u, is_async=True)
        u = warpgroup_mma(
            gl.convert_layout(b_S, NA), x.w.index(s).permute((1, 0)), u, is_async=True
        )
        S_b.store(b_S)
        # waits for nothing: it tells ptxas that no product in flight writes S
        S = wait_products(2, deps=(S,))
        S = S * x.gamma.index(s).load(gl.SliceLayout(0, W))[None, :]
        u = wait_products(0, deps=(u,))
        b_u = narrow(u)
        S = warpgroup_mma(gl.convert_layout(b_u, WA), x.kg.index(s), S, is_async=True)
        u_b.permute((1, 0)).store(b_u)
        S = wait_products(0, deps=(S,))
        fence_async_shared()
        barrier()
        on.done.arrive(n)
        row = tiles.at(n)
        store_tile(S_d, [row * 128 + I * 64, 0], S_b)
        store_tile(u_d, [row * 32, I * 64], u_b)
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=["beta_b", "beta_t", "beta_h", "k_h", "v_h", "g_h", "N", "T", "H", "HV"]
)
def states_kda(
    k_d,
    v_d,
    g_d,
    AP_d,
    S_d,
    u_d,
    beta,
    gate,
    initial,
    cu_seqlens,
    beta_b,
    beta_t,
    beta_h,
    k_h,
    v_h,
    g_h,
    N,
    T,
    H,
    HV,
    flags,
    REGISTERS: gl.constexpr,
):
    """Write for each 32 rows of a sequence and head the state [V, K] that enters, and u [32, V]::

        w = -A' (k 2^D);   kg = k 2^(total - D)    [32, K]
        u = A' v + w S;    S <- 2^total S + kg^T u

    D sums the log decays in base 2 from the start of the 32 rows, total over all of them. `AP_d`
    has A' and P as `walk_kda` writes them. Rows past the end of a sequence have u = 0. What A' has
    lost by the rounding of beta is given back on its diagonal. States and u have the same bits as
    in forward, so a training step may be cut where forward may be cut (docs/numerics.md).
    """
    TYPE: gl.constexpr = k_d.dtype
    span = find_span(cu_seqlens, None, N, T, HV)
    i_g = span.i_h // (HV // H)
    x = Buffers(
        gl.allocate_shared_memory(TYPE, [2, 32, 128], k_d.layout),
        gl.allocate_shared_memory(TYPE, [2, 32, 128], v_d.layout),
        gl.allocate_shared_memory(g_d.dtype, [2, 32, 128], g_d.layout),
        gl.allocate_shared_memory(TYPE, [2, 32, 64], AP_d.layout),
        gl.allocate_shared_memory(TYPE, [2, 32, 128], k_d.layout),
        gl.allocate_shared_memory(TYPE, [2, 32, 128], k_d.layout),
        gl.allocate_shared_memory(TYPE, [2, 64, 128], S_d.layout),
        gl.allocate_shared_memory(TYPE, [2, 32, 64], u_d.layout),
        gl.allocate_shared_memory(gl.float32, [2, 128], FLAT),
        gl.allocate_shared_memory(gl.float32, [32], FLAT),
        gl.allocate_shared_memory(gl.float32, [2, 32], FLAT),
    )
    on = Meetings(signal(2), signal(2), signal(2), signal(2), signal(2, 2))
    fence_async_shared()
    barrier()
    if beta is not None:
        beta = from_span(beta, span, cu_seqlens, T, beta_b, beta_t, beta_h)
    beta = Column(beta, beta_t)
    AP_at = find_tiles(span, cu_seqlens, T, HV, 64).first * 64
    tiles = find_tiles(span, cu_seqlens, T, HV, 32)
    of = Inputs(k_d, v_d, g_d, AP_d, i_g * k_h, span.i_h * v_h, span.i_h * g_h, AP_at)
    gl.warp_specialize(
        [
            (prepare, (x, on, span, beta, gate, flags)),
            (scan, (x, on, span, S_d, u_d, tiles, initial, 0)),
            (scan, (x, on, span, S_d, u_d, tiles, initial, 1)),
            (produce, (of, tiles, x, on, span)),
        ],
        [4, 4, 1],
        [REGISTERS, REGISTERS, 24],
    )
