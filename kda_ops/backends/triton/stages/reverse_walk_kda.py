"""Walk over the chunks of each head, last chunk first: KDA's backward in Gluon, for Hopper.

A program takes one sequence and head, 32 rows at a step. Its warps are four partitions: one warp
copies inputs to shared memory, four warps `prepare` what q, k and the decay give, and two
partitions of four warps `walk`, each with half of V in the gradient of the state, which stays in
registers, and with half of K in the gradients of the rows. docs/kernels/design.md, "The reverse
walk of KDA", derives the products.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mma_v2,
    tma,
    warpgroup_mma,
)

from kda_ops.backends.triton.device.channels import Column, Signal, find_span, find_tiles, signal
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
    decay_rows,
    ex2,
    fill_decays,
    fill_rows,
    inverse_norms,
    left_right,
    load_rows,
    narrow,
    product,
    rcp,
    state_at,
    sums_by_block,
    widen,
)

# Half of what 16 rows decay by at the most, in base 2, as a whole number: 8 * 5 / ln 2.
SHIFT = gl.constexpr(58.0)
UP = gl.constexpr(2.0**58)
DOWN = gl.constexpr(2.0**-58)
# From this given beta on, sum_v dv u / beta^2 is as accurate as a rounding.
SMALL = gl.constexpr(2.0**-10)
# How the four warps of `walk` hold what products make: W a state [64, K], N a tile [64, 32], and Q
# a tile [64, 64]; left operands in registers, and vectors along the first or second axis.
W = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
N = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16]))
Q = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
NA, WC = gl.constexpr(gl.DotOperandLayout(0, N, 2)), gl.constexpr(gl.SliceLayout(0, W))
NR, NC = gl.constexpr(gl.SliceLayout(1, N)), gl.constexpr(gl.SliceLayout(0, N))


@aggregate
class Meetings:
    """Where the partitions meet, once per 32 rows each."""

    rows_full: Signal  # q, k and g are copied
    do_full: Signal  # do, A' and P are copied
    S_full: Signal  # the state and u are copied
    chain: Signal  # kg, G and the decays are made
    pairs: Signal  # X, C and `late` are made
    dv: Signal  # both halves of dv and D are there
    scores: Signal  # both parts of Z are there
    dots: Signal  # q dq and k dk of all channels are there
    half: Signal  # what was copied but q, k and g is read for the last time; so are kg, G and D
    done: Signal  # all is read for the last time

    @gluon.constexpr_function
    def __init__(self, rows_full, do_full, S_full, chain, pairs, dv, scores, dots, half, done):
        self.rows_full, self.do_full, self.S_full = rows_full, do_full, S_full
        self.chain, self.pairs, self.dv, self.scores, self.dots = chain, pairs, dv, scores, dots
        self.half, self.done = half, done


@aggregate
class Buffers:
    """What lies in shared memory; the first axis counts stages, and halves of V for R."""

    q: gl.shared_memory_descriptor  # [2, 32, K]  then dq
    k: gl.shared_memory_descriptor  # [2, 32, K]  then dk
    g: gl.shared_memory_descriptor  # [2, 32, K]  then dg
    late: gl.shared_memory_descriptor  # [1, 32, K] fp32, then dg; or g itself, if that is fp32
    X: gl.shared_memory_descriptor  # [1, 64, K]
    G: gl.shared_memory_descriptor  # [1, 64, K]
    C: gl.shared_memory_descriptor  # [1, 64, K]
    kg: gl.shared_memory_descriptor  # [1, 32, K]
    R: gl.shared_memory_descriptor  # [2, 64, 64]  do, below it dv
    u: gl.shared_memory_descriptor  # [1, 32, V]
    S: gl.shared_memory_descriptor  # [1, V, K]
    D: gl.shared_memory_descriptor  # [1, V, K]  dS; then, with a norm, q dq, k dk and dq
    Z: gl.shared_memory_descriptor  # [1, 64, 64]
    AP: gl.shared_memory_descriptor  # [1, 32, 64]  A' and P next to each other
    U: gl.shared_memory_descriptor  # [1, 32, 64]  ones that sum later rows, and earlier ones
    gamma: gl.shared_memory_descriptor  # [2 K] fp32, of each block of 16 rows
    own: gl.shared_memory_descriptor  # [2, 64] fp32, of each row: dP with itself, and sum_v dv u
    lost: gl.shared_memory_descriptor  # [32], of beta by the rounding of A'
    norms: gl.shared_memory_descriptor  # [2, 64] fp32, of q and k

    @gluon.constexpr_function
    def __init__(self, q, k, g, late, X, G, C, kg, R, u, S, D, Z, AP, U, gamma, own, lost, norms):
        self.q, self.k, self.g, self.late, self.X, self.G, self.C = q, k, g, late, X, G, C
        self.kg, self.R, self.u, self.S, self.D, self.Z, self.AP = kg, R, u, S, D, Z, AP
        self.U, self.gamma, self.own = U, gamma, own
        self.lost, self.norms = lost, norms


@aggregate
class Inputs:
    """Inputs to copy to shared memory: the head's first column in each, for AP its first row.

    S and u are found by `tiles`.
    """

    q: tensor_descriptor
    k: tensor_descriptor
    g: tensor_descriptor
    do: tensor_descriptor
    u: tensor_descriptor
    S: tensor_descriptor
    AP: tensor_descriptor
    q_at: gl.tensor
    k_at: gl.tensor
    g_at: gl.tensor
    do_at: gl.tensor
    AP_at: gl.tensor

    @gluon.constexpr_function
    def __init__(self, q, k, g, do, u, S, AP, q_at, k_at, g_at, do_at, AP_at):
        self.q, self.k, self.g, self.do, self.u, self.S, self.AP = q, k, g, do, u, S, AP
        self.q_at, self.k_at, self.g_at, self.do_at, self.AP_at = q_at, k_at, g_at, do_at, AP_at


@aggregate
class Outputs:
    """Where the gradients go. A last block of fewer than 32 rows goes to the last three."""

    dq: tensor_descriptor
    dk: tensor_descriptor
    dg: tensor_descriptor
    dv: tensor_descriptor
    tails: tensor_descriptor  # of dq and dk
    v_tails: tensor_descriptor
    ends: tensor_descriptor  # of dg

    @gluon.constexpr_function
    def __init__(self, dq, dk, dg, dv, tails, v_tails, ends):
        self.dq, self.dk, self.dg, self.dv = dq, dk, dg, dv
        self.tails, self.v_tails, self.ends = tails, v_tails, ends


@gluon.jit
def late_of(x, n):
    """Return where `late` of step n is."""
    if x.g.dtype == gl.float32:
        late = x.g.index(n & 1)
    else:
        late = x.late.index(n >> 30)
    return late


@gluon.jit
def leave(d, tails_d, t, column, tail, tile, here):
    """Copy rows of a tile to tokens from t on; a last block with fewer than 32 to its tail."""
    if here < 32:
        store_tile(tails_d, [tail, column & 127], tile)
    else:
        store_tile(d, [t, column], tile)


@gluon.jit
def fetch_rows(of, x, on, t, n):
    """Copy q, k and g of step n, from token t on."""
    s = n & 1
    on.rows_full.expect(n, 32 * 128 * (4 + x.g.dtype.primitive_bitwidth // 8))
    load_tile(of.g, [t, of.g_at], on.rows_full.at(n), x.g.index(s))
    load_tile(of.k, [t, of.k_at], on.rows_full.at(n), x.k.index(s))
    load_tile(of.q, [t, of.q_at], on.rows_full.at(n), x.q.index(s))


@gluon.jit
def fetch_state(of, tiles, x, on, t, c, n):
    """Copy what else step n needs; its block is the sequence's block c, from token t on."""
    zero = n >> 30
    on.do_full.expect(n, 32 * (128 + 64) * 2)
    row = of.AP_at + (c >> 1) * (tiles.step * 64) + (c & 1) * 32
    load_tile(of.AP, [row, 0], on.do_full.at(n), x.AP.index(zero))
    load_tile(of.do, [t, of.do_at], on.do_full.at(n), x.R.index(zero).slice(0, 32, dim=0))
    load_tile(of.do, [t, of.do_at + 64], on.do_full.at(n), x.R.index(1 + zero).slice(0, 32, dim=0))
    on.S_full.expect(n, (32 + 128) * 128 * 2)
    load_tile(of.u, [tiles.at(c) * 32, 0], on.S_full.at(n), x.u.index(zero))
    load_tile(of.S, [tiles.at(c) * 128, 0], on.S_full.at(n), x.S.index(zero))


@gluon.jit
def copy(of, to, sums_d, tiles, x, on, span):
    """Copy the inputs of each step to shared memory, and its gradients from there.

    A copy to shared memory follows the copy from the same place. So `do_full` of a step also says
    that dv of the step before has left, and `rows_full` that dq, dk and dg of two steps before
    have.
    """
    steps = (span.length + 31) // 32
    column, end = span.i_h * 128, (span.i_n * tiles.step + span.i_h) * 32
    if steps > 0:
        t = span.token + (steps - 1) * 32
        fetch_rows(of, x, on, t, 0)
        fetch_state(of, tiles, x, on, t, steps - 1, 0)
    if steps > 1:
        fetch_rows(of, x, on, span.token + (steps - 2) * 32, 1)
    for n in range(steps):
        c, s, zero = steps - 1 - n, n & 1, n >> 30
        t, here = span.token + c * 32, span.length - c * 32
        on.dv.wait(n)
        dv_0, dv_1 = x.R.index(zero).slice(32, 32, dim=0), x.R.index(1 + zero).slice(32, 32, dim=0)
        leave(to.dv, to.v_tails, t, column, 3 * end + 64, dv_0, here)
        leave(to.dv, to.v_tails, t, column + 64, 3 * end + 64, dv_1, here)
        tma.store_wait(0)
        on.half.wait(n)
        if c > 0:
            fetch_state(of, tiles, x, on, t - 32, c - 1, n + 1)
        on.done.wait(n)
        leave(to.dq, to.tails, t, column, 3 * end, x.q.index(s), here)
        leave(to.dk, to.tails, t, column, 3 * end + 32, x.k.index(s), here)
        leave(to.dg, to.ends, t, column, end, x.g.index(s), here)
        if sums_d is not None:
            store_tile(sums_d, [tiles.at(c) * 32], x.own.index(s).slice(32, 32))
        tma.store_wait(0)
        if c > 1:
            fetch_rows(of, x, on, t - 64, n + 2)


@gluon.jit
def load_beta(beta, span, c, flags):
    """Return beta of block c, through its sigmoid, [32] fp32; 1 where there is no such token."""
    B: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    b = gl.zeros([32], gl.float32, B) + 1.0
    if beta.first is not None:
        row = c * 32 + gl.arange(0, 32, B)
        mask = (row >= 0) & (row < span.length)
        p_beta = beta.first + (span.token + row).to(gl.int64) * beta.step
        b = gl.load(p_beta, mask=mask, other=1.0).to(gl.float32)
        if flags.SIGMOID:
            b = rcp(1.0 + ex2(b * -LOG2E))
            if flags.NEG_EIGVAL:
                b = 2.0 * b
    return b


@gluon.jit
def write_y(x, factor, y, zero):
    """Write y = kg dS + factor P^T do of a block [32, V], by products of each warp."""
    M: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [2, 2], [16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, M, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, M, 2)
    none = gl.zeros([32, 32], gl.float32, M)
    # the unknown zero keeps addresses out of registers where they are not needed
    row = gl.arange(0, 32, gl.SliceLayout(1, M)) + zero
    column = gl.arange(0, 32, gl.SliceLayout(0, M))
    p_y = y + (row * 128)[:, None] + column[None, :]
    kg = x.kg.index(zero).load(A)
    P = x.AP.index(zero).slice(32, 32, dim=1).permute((1, 0)).load(A)
    for i in gl.static_range(4):
        D = x.D.index(zero).slice(32 * i, 32, dim=0).permute((1, 0))
        do = x.R.index(zero + i // 2).slice(0, 32, dim=0).slice(i % 2 * 32, 32, dim=1)
        b_y = mma_v2(kg, D.load(B), none) + mma_v2(P, do.load(B), none) * factor
        gl.store(p_y + 32 * i, narrow(b_y))


@gluon.jit
def prepare(x, on, span, tiles, gate, scale, factor, beta, y, flags):
    """Make of q, k and the decay what `walk` multiplies, [32, K] each::

        late = 2^(D + SHIFT);   h = 2^-SHIFT of the first block, e_0 2^-SHIFT of the second
        X = [scale q late; -k late];   G = [scale q late h; -k late h];   kg = k exp(total - D)
        C = [k / late; k / late e_0 of the first block]

    D sums the log decays in base 2 from the start of a block of 16 rows, e_0 and e_1 are the decays
    of the blocks, and total is that of both.
    """
    steps = (span.length + 31) // 32
    NORM: gl.constexpr = flags.L2NORM
    E: gl.constexpr = gl.BlockedLayout([16, 2], [1, 32], [2, 2], [1, 0])
    EC: gl.constexpr = gl.SliceLayout(0, E)
    R: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    K: gl.constexpr = 128
    first = (gl.arange(0, 32, gl.SliceLayout(1, E)) < 16)[:, None]
    rate = load_rate(gate, span.i_h)
    bias = load_bias(gate, span.i_h, gl.arange(0, K, EC), K)[None, :]
    b = load_beta(beta, span, steps - 1, flags)
    for n in range(steps):
        c, s, zero = steps - 1 - n, n & 1, n >> 30
        here = span.length - c * 32
        q_b, k_b, g_b = x.q.index(s), x.k.index(s), x.g.index(s)
        X_b, G_b, C_b, kg_b = x.X.index(zero), x.G.index(zero), x.C.index(zero), x.kg.index(zero)
        n_q, n_k = x.norms.index(s).slice(0, 32), x.norms.index(s).slice(32, 32)
        on.rows_full.wait(n)
        fill_decays(g_b, here, gate)
        fill_rows(k_b, here, 0.0, ROWS_4)
        fill_rows(q_b, here, 0.0, ROWS_4)
        if here < 32:
            on.do_full.wait(n)
            fill_rows(x.R.index(zero).slice(0, 32, dim=0), here, 0.0, R)
            fill_rows(x.R.index(1 + zero).slice(0, 32, dim=0), here, 0.0, R)
        if NORM:
            inverse_norms(q_b, n_q)
            inverse_norms(k_b, n_k)
        g = decay_rows(g_b, bias, rate, gate, E) * LOG2E
        D, total = sums_by_block(g, 2)
        total = ex2(total)
        late = ex2(gl.convert_layout(gl.reshape(D, (32, K)), E) + SHIFT)
        on.half.wait(n - 1)
        reinterpret(x.gamma, gl.float32, [2, K], PAIR).store(total)
        x.lost.store(narrow(b - widen(narrow(b))))
        barrier()
        e_0 = x.gamma.slice(0, K).load(EC)[None, :]
        e_1 = x.gamma.slice(K, K).load(EC)[None, :]
        h = gl.where(first, DOWN, e_0 * DOWN)
        G_b.slice(0, 32, dim=0).store(narrow(load_rows(q_b, n_q, E, NORM) * (late * (h * scale))))
        k = load_rows(k_b, n_k, E, NORM)
        G_b.slice(32, 32, dim=0).store(narrow(k * (late * -h)))
        kg_b.store(narrow(k * (rcp(late) * gl.where(first, e_0 * e_1 * UP, e_1 * UP))))
        fence_async_shared()
        barrier()
        on.chain.arrive(n)
        on.done.wait(n - 1)
        X_b.slice(0, 32, dim=0).store(narrow(load_rows(q_b, n_q, E, NORM) * (late * scale)))
        k = load_rows(k_b, n_k, E, NORM)
        X_b.slice(32, 32, dim=0).store(narrow(k * -late))
        k = k * rcp(late)
        C_b.slice(0, 32, dim=0).store(narrow(k))
        C_b.slice(32, 32, dim=0).store(narrow(gl.where(first, k * e_0, 0.0)))
        late_of(x, n).store(late)
        fence_async_shared()
        if y is not None:
            small = gl.sum(gl.where(gl.abs(b) < SMALL, 1, 0), 0)
            if small > 0:
                on.dv.wait(n)
                write_y(x, factor, y + tiles.at(c).to(gl.int64) * (32 * 128), zero)
        barrier()
        on.pairs.arrive(n)
        b = load_beta(beta, span, c - 1, flags)


@gluon.jit
def carry(x, on, n, R, D, AP, dS, factor, NORM: gl.constexpr, I: gl.constexpr):
    """Write dv, and return dS of the rows before, of which the last product is in flight."""
    K: gl.constexpr = 128
    zero = n >> 30
    none = gl.zeros([64, 32], gl.float32, N)
    on.chain.wait(n)
    b_dS = narrow(dS)
    y = product(gl.convert_layout(b_dS, NA), x.kg.index(zero).permute((1, 0)), none)
    on.do_full.wait(n)
    y_P = product(R.slice(0, 32, dim=0).permute((1, 0)), AP.slice(32, 32, dim=1), none)
    if NORM:
        on.done.wait(n - 1)  # both have read what took the place of D
    D.slice(I * 64, 64, dim=0).store(b_dS)
    # waits for nothing: it tells ptxas that no product in flight writes dS
    dS = wait_products(2, deps=(dS,))
    dS = dS * (x.gamma.slice(0, K).load(WC) * x.gamma.slice(K, K).load(WC))[None, :]
    y, y_P = wait_products(0, deps=(y, y_P))
    y = y + y_P * factor
    b_dv = R.slice(32, 32, dim=0)
    z = warpgroup_mma(
        gl.convert_layout(narrow(y), NA),
        AP.slice(0, 32, dim=1),
        y * widen(x.lost.load(NC))[None, :],
        is_async=True,
    )
    z = wait_products(0, deps=(z,))
    b_dv.permute((1, 0)).store(narrow(z))
    fence_async_shared()
    barrier()
    on.dv.arrive(n)
    dS = warpgroup_mma(R.permute((1, 0)), x.G.index(zero), dS, is_async=True)
    return dS


@gluon.jit
def add_rows(x, zero, later_of, earlier_of, d_g):
    """Return d_g [64, 32], plus the sums of later rows of one tile, and of earlier rows of another.

    Products with ones add them up. Channels are rows here.
    """
    later, earlier = x.U.index(zero).slice(0, 32, dim=1), x.U.index(zero).slice(32, 32, dim=1)
    high = narrow(later_of)
    d_g = warpgroup_mma(gl.convert_layout(high, NA), later, d_g, is_async=True)
    low = narrow(later_of - widen(high))
    d_g = warpgroup_mma(gl.convert_layout(low, NA), later, d_g, is_async=True)
    high = narrow(earlier_of)
    d_g = warpgroup_mma(gl.convert_layout(high, NA), earlier, d_g, is_async=True)
    low = narrow(earlier_of - widen(high))
    d_g = warpgroup_mma(gl.convert_layout(low, NA), earlier, d_g, is_async=True)
    return wait_products(0, deps=(d_g,))


@gluon.jit
def walk(x, on, span, dfinal, dinitial, scale, factor, flags, I: gl.constexpr):
    """Carry the rows of dS^T [V, K] from 64 I on, and make the gradients of channels 64 I on::

        y = kg dS + factor P^T do;   dv = A'^T y;   dS <- e_0 e_1 dS + G^T [do; dv]
        [dP; -beta dL] = [do; dv] u^T, of which Z keeps pairs inside blocks, and pairs across
        aq = h S do^T + C^T Z_q^T;   ak = h S dv^T + C^T Z_k^T;   cs = dS u^T
        co = X^T Z_own;   cx = X^T Z_cross
        dq = scale late aq + scale dP_ii k
        dk = -late ak + (co + e_0 cx + w cs) / late + scale dP_ii q,   w = exp(total) / h
        dG = X_q aq + X_k ak - C_own co - C_cross cx;   kl = w cs k / late
        dg_i = sum_{j >= i} dG_j + sum_{j < i} kl_j + e_0 e_1 sum_v S dS

    What pairs add to dG cancels in a sum over rows, because both sides use the same rounded
    factors. The pair of a row with itself does not decay, so dG leaves it out. Operands of products
    lie with channels as rows. In Triton 3.6 `mbarrier.arrive` is one thread's, and each warp waits
    for its own products: so arrivals follow a barrier that follows the wait.
    """
    steps = (span.length + 31) // 32
    NORM: gl.constexpr = flags.L2NORM
    K: gl.constexpr = 128
    TYPE: gl.constexpr = x.q.dtype
    none, wide = gl.zeros([64, 32], gl.float32, N), gl.zeros([64, 64], gl.float32, Q)
    dS = gl.zeros([64, K], gl.float32, W)
    if dfinal.pointer is not None:
        p_s = state_at(dfinal.pointer, dfinal.strides, span.i_n, span.i_h, W, 64, I)
        dS = gl.load(p_s).to(gl.float32)
    for n in range(steps):
        s, zero = n & 1, n >> 30
        tok = gl.arange(0, 32, NC)[None, :] + zero
        q = x.q.index(s).slice(I * 64, 64, dim=1)
        k = x.k.index(s).slice(I * 64, 64, dim=1)
        late = late_of(x, n).slice(I * 64, 64, dim=1).permute((1, 0))
        X_t = x.X.index(zero).slice(I * 64, 64, dim=1).permute((1, 0))
        C_t = x.C.index(zero).slice(I * 64, 64, dim=1).permute((1, 0))
        S_b, D, Z, AP = x.S.index(zero), x.D.index(zero), x.Z.index(zero), x.AP.index(zero)
        R_0, R_1, R, u = x.R.index(zero), x.R.index(1 + zero), x.R.index(I + zero), x.u.index(zero)
        if NORM:
            along_q = reinterpret(x.D, TYPE, [4, 32, K], x.q.layout).index(zero)
            along_k = reinterpret(x.D, TYPE, [4, 32, K], x.q.layout).index(1 + zero)
            parked = reinterpret(x.D, gl.float32, [2, 32, K], x.late.layout).index(1 + zero)
            parked = parked.slice(I * 64, 64, dim=1).permute((1, 0))
        dS = carry(x, on, n, R, D, AP, dS, factor, NORM, I)
        # gradients of the scores: both partitions form all, and keep pairs inside blocks, or across
        on.S_full.wait(n)
        on.dv.wait(n)
        sc = product(R_0, u.slice(0, 64, dim=1).permute((1, 0)), none)
        sc = warpgroup_mma(R_1, u.slice(64, 64, dim=1).permute((1, 0)), sc, is_async=True)
        M = product(S_b.slice(I * 64, 64, dim=1).permute((1, 0)), D.slice(I * 64, 64, dim=1), wide)
        pair = (gl.arange(0, 64, NR)[:, None] + zero) & 31
        sc, dS = wait_products(1, deps=(sc, dS))
        if I == 0:
            own = gl.sum(gl.reshape(gl.where(pair == tok, sc, 0.0), (2, 32, 32)), 1)
            reinterpret(x.own.index(s), gl.float32, [2, 32], PAIR).store(own)
            inside = (pair > tok) & ((pair >> 4) == (tok >> 4))
            Z.slice(0, 32, dim=1).store(narrow(gl.where(inside, sc, 0.0)))
        else:
            Z.slice(32, 32, dim=1).store(narrow(gl.where((pair >> 4) > (tok >> 4), sc, 0.0)))
        fence_async_shared()
        M = wait_products(0, deps=(M,))
        barrier()
        on.scores.arrive(n)
        o_k = gl.arange(0, 64, gl.SliceLayout(1, Q))[:, None] + zero
        dgamma = gl.sum(gl.where(o_k == gl.arange(0, 64, gl.SliceLayout(0, Q))[None, :], M, 0.0), 1)
        dgamma = gl.convert_layout(dgamma, NR)
        # as the later row of a pair: what the state gives, then earlier rows
        S_0 = S_b.slice(0, 64, dim=0).slice(I * 64, 64, dim=1).permute((1, 0))
        S_1 = S_b.slice(64, 64, dim=0).slice(I * 64, 64, dim=1).permute((1, 0))
        do_0, do_1 = R_0.slice(0, 32, dim=0), R_1.slice(0, 32, dim=0)
        dv_0, dv_1 = R_0.slice(32, 32, dim=0), R_1.slice(32, 32, dim=0)
        aq = product(S_0, do_0.permute((1, 0)), none)
        aq = warpgroup_mma(S_1, do_1.permute((1, 0)), aq, is_async=True)
        ak = product(S_0, dv_0.permute((1, 0)), none)
        ak = warpgroup_mma(S_1, dv_1.permute((1, 0)), ak, is_async=True)
        cs = product(D.slice(I * 64, 64, dim=1).permute((1, 0)), u.permute((1, 0)), none)
        on.pairs.wait(n)
        e = x.gamma.slice(I * 64, 64).load(gl.SliceLayout(1, Q))
        e_0 = gl.convert_layout(e, NR)
        e_1 = x.gamma.slice(K + I * 64, 64).load(NR)
        first = tok < 16
        on.scores.wait(n)
        aq, ak, cs = wait_products(0, deps=(aq, ak, cs))
        barrier()
        on.half.arrive(n)
        h = gl.where(first, DOWN, (e_0 * DOWN)[:, None])
        Z_q, Z_k = Z.slice(0, 32, dim=0), Z.slice(32, 32, dim=0)
        aq = warpgroup_mma(C_t, Z_q.permute((1, 0)), aq * h, is_async=True)
        ak = warpgroup_mma(C_t, Z_k.permute((1, 0)), ak * h, is_async=True)
        b_late = late.load(N)
        dP = x.own.index(s).slice(0, 32).load(NC)[None, :] * scale
        n_q, n_k = x.norms.index(s).slice(0, 32), x.norms.index(s).slice(32, 32)
        aq, ak = wait_products(0, deps=(aq, ak))
        dG = widen(X_t.slice(0, 32, dim=1).load(N)) * aq
        b_q = widen(q.permute((1, 0)).load(N))
        b_k = widen(k.permute((1, 0)).load(N))
        if NORM:
            aq = aq * (b_late * scale) + b_k * (n_k.load(NC)[None, :] * dP)
            b_q = b_q * n_q.load(NC)[None, :]
            on.half.wait(n)  # both have read D: q dq, k dk and dq take its place
            along_q.slice(I * 64, 64, dim=1).permute((1, 0)).store(narrow(b_q * aq))
            parked.store(aq)
        else:
            q.permute((1, 0)).store(narrow(aq * (b_late * scale) + b_k * dP))
        dG = dG + widen(X_t.slice(32, 32, dim=1).load(N)) * ak
        d_k = b_q * dP - ak * b_late
        # as the earlier row: later rows, and what the state gets
        co = product(X_t, Z, wide)
        co, cx = left_right(wait_products(0, deps=(co,)))
        co, cx = gl.convert_layout(co, N), gl.convert_layout(cx, N)
        b_c = widen(C_t.slice(0, 32, dim=1).load(N))
        dG = dG - b_c * co - widen(C_t.slice(32, 32, dim=1).load(N)) * cx
        co = co + cx * e_0[:, None]
        cs = cs * gl.where(first, (e_0 * e_1 * UP)[:, None], (e_1 * UP)[:, None])
        kl = b_c * cs
        d_k = d_k + (co + cs) * rcp(late.load(N))
        if NORM:
            b_k = widen(k.permute((1, 0)).load(N)) * n_k.load(NC)[None, :]
            along_k.slice(I * 64, 64, dim=1).permute((1, 0)).store(narrow(b_k * d_k))
            fence_async_shared()
            barrier()
            on.dots.arrive(n)
        else:
            k.permute((1, 0)).store(narrow(d_k))
        d_g = gl.zeros([64, 32], gl.float32, N) + (dgamma * (e_0 * e_1))[:, None]
        d_g = add_rows(x, zero, dG, kl, d_g)
        g_b = x.g.index(s).slice(I * 64, 64, dim=1)
        g_b.permute((1, 0)).store(d_g if x.g.dtype == gl.float32 else narrow(d_g))
        if NORM:
            on.dots.wait(n)
            through_norm(k, d_k, along_k, n_k)
            through_norm(q, parked.load(N), along_q, n_q)
        fence_async_shared()
        barrier()
        on.done.arrive(n)
    if dinitial.pointer is not None:
        gl.store(state_at(dinitial.pointer, dinitial.strides, span.i_n, span.i_h, W, 64, I), dS)


@gluon.jit
def through_norm(x, dy, along, norm):
    """Write dx = n (dy - y sum_k y dy) in the place of x, where y = n x; `along` is y dy [32, K].

    A product with ones adds up all channels.
    """
    ones = (gl.zeros([64, 128], gl.float32, NA) + 1.0).to(x.dtype)
    none = gl.zeros([64, 32], gl.float32, N)
    dot = product(ones, along.permute((1, 0)), none)
    n = norm.load(NC)[None, :]
    y = widen(x.permute((1, 0)).load(N)) * n
    dot = wait_products(0, deps=(dot,))
    x.permute((1, 0)).store(narrow((dy - y * dot) * n))


@gluon.jit(
    do_not_specialize=[
        "beta_b",
        "beta_t",
        "beta_h",
        "q_h",
        "k_h",
        "g_h",
        "do_h",
        "N",
        "T",
        "H",
        "HV",
        "scale",
        "factor",
    ]
)
def reverse_walk_kda(
    q_d,
    k_d,
    g_d,
    do_d,
    u_d,
    S_d,
    AP_d,
    dq_d,
    dk_d,
    dg_d,
    dv_d,
    tails_d,
    v_tails_d,
    ends_d,
    y,
    sums_d,
    beta,
    gate,
    dfinal,
    dinitial,
    cu_seqlens,
    beta_b,
    beta_t,
    beta_h,
    q_h,
    k_h,
    g_h,
    do_h,
    N,
    T,
    H,
    HV,
    scale,
    factor,
    flags,
    REGISTERS: gl.constexpr,
):
    """Write the gradients of one sequence and head, from what `walk_kda` and `states_kda` left.

    `walk` has the formulas. dq and dk are per value head, dg is that of the log decays even where
    `prepare` makes them of logits. `factor` completes P. The last rows of a sequence, if they are
    fewer than 32, go to tails [N HV, 3, 32, 128], of dq, dk and dv, and ends [N HV, 32, 128], of
    dg. sums [.., 32] fp32 gets sum_v dv u. If a given beta of a block is below SMALL, y of the
    block goes to y [.., 32, 128]. `finish_back` reads all these.
    """
    TYPE: gl.constexpr = q_d.dtype
    span = find_span(cu_seqlens, None, N, T, HV)
    i_g = span.i_h // (HV // H)
    SUM: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    LATE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([32, 128], gl.float32)
    g_s = gl.allocate_shared_memory(g_d.dtype, [2, 32, 128], g_d.layout)
    late_s = g_s
    if g_d.dtype != gl.float32:
        late_s = gl.allocate_shared_memory(gl.float32, [1, 32, 128], LATE)
    x = Buffers(
        gl.allocate_shared_memory(TYPE, [2, 32, 128], q_d.layout),
        gl.allocate_shared_memory(TYPE, [2, 32, 128], q_d.layout),
        g_s,
        late_s,
        gl.allocate_shared_memory(TYPE, [1, 64, 128], q_d.layout),
        gl.allocate_shared_memory(TYPE, [1, 64, 128], q_d.layout),
        gl.allocate_shared_memory(TYPE, [1, 64, 128], q_d.layout),
        gl.allocate_shared_memory(TYPE, [1, 32, 128], q_d.layout),
        gl.allocate_shared_memory(TYPE, [2, 64, 64], do_d.layout),
        gl.allocate_shared_memory(TYPE, [1, 32, 128], u_d.layout),
        gl.allocate_shared_memory(TYPE, [1, 128, 128], S_d.layout),
        gl.allocate_shared_memory(TYPE, [1, 128, 128], S_d.layout),
        gl.allocate_shared_memory(TYPE, [1, 64, 64], do_d.layout),
        gl.allocate_shared_memory(TYPE, [1, 32, 64], AP_d.layout),
        gl.allocate_shared_memory(TYPE, [1, 32, 64], AP_d.layout),
        gl.allocate_shared_memory(gl.float32, [256], FLAT),
        gl.allocate_shared_memory(gl.float32, [2, 64], SUM),
        gl.allocate_shared_memory(TYPE, [32], FLAT),
        gl.allocate_shared_memory(gl.float32, [2, 64], FLAT),
    )
    on = Meetings(
        signal(2),
        signal(1),
        signal(1),
        signal(1),
        signal(1),
        signal(1, 2),
        signal(1, 2),
        signal(1, 2),
        signal(1, 2),
        signal(2, 2),
    )
    R: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    o_j = gl.arange(0, 32, gl.SliceLayout(1, R))[:, None]
    o_i = gl.arange(0, 64, gl.SliceLayout(0, R))[None, :]
    ones = gl.where(gl.where(o_i < 32, o_j >= o_i, o_j < o_i - 32), 1.0, 0.0)
    x.U.index(0).store(ones.to(TYPE))
    fence_async_shared()
    barrier()
    if beta is not None:
        # Offsets count tokens of all sequences; beta of a batch may have any strides.
        beta += span.i_h.to(gl.int64) * beta_h
        if cu_seqlens is None:
            beta += span.i_n.to(gl.int64) * beta_b - span.token.to(gl.int64) * beta_t
    beta = Column(beta, beta_t)
    AP_at = find_tiles(span, cu_seqlens, T, HV, 64).first * 64
    tiles = find_tiles(span, cu_seqlens, T, HV, 32)
    q_at, k_at, g_at, do_at = i_g * q_h, i_g * k_h, span.i_h * g_h, span.i_h * do_h
    of = Inputs(q_d, k_d, g_d, do_d, u_d, S_d, AP_d, q_at, k_at, g_at, do_at, AP_at)
    to = Outputs(dq_d, dk_d, dg_d, dv_d, tails_d, v_tails_d, ends_d)
    gl.warp_specialize(
        [
            (prepare, (x, on, span, tiles, gate, scale, factor, beta, y, flags)),
            (walk, (x, on, span, dfinal, dinitial, scale, factor, flags, 0)),
            (walk, (x, on, span, dfinal, dinitial, scale, factor, flags, 1)),
            (copy, (of, to, sums_d, tiles, x, on, span)),
        ],
        [4, 4, 1],
        [REGISTERS, REGISTERS, 24],
    )
