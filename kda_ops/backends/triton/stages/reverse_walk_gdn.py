"""Walk over the chunks of each head, last chunk first: GDN's backward in Gluon, for Hopper.

A program takes one sequence and head, 64 rows at a step. One warp copies tiles to shared memory,
and eight warps `walk` with the gradient of the state in registers. Each step makes dq, dk, dv and
the sums of dG and dbeta of its chunk. So neither the gradient of the state nor z goes through
memory. docs/kernels/design.md, "The walk of GDN", lists what lies in shared memory.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma, warpgroup_mma

from kda_ops.backends.triton.device.channels import Signal, find_span, find_tiles, signal
from kda_ops.backends.triton.device.gluon_names import (
    SUMS_OF_WORDS,
    aggregate,
    barrier,
    load_tile,
    reinterpret,
    store_tile,
    tensor_descriptor,
    wait_products,
)
from kda_ops.backends.triton.device.gluon_tile import (
    CHUNK,
    FAR,
    FLAT,
    PAIR,
    ROWS,
    WIDTH,
    fill_rows,
    product,
    state_at,
)
from kda_ops.backends.triton.device.operands import (
    BETA,
    COUNT_GDN,
    FROM_START_K,
    FROM_START_Q,
    LOG_DECAY,
    NORM_K,
    NORM_Q,
    SUM_DG,
    SUM_LATE,
    SUM_OWN,
    SUM_PART,
    SUM_STATE,
    SUM_STRENGTH,
    SUMS,
    TO_END_K,
)

# A given beta counts as no less than this in dv, so that sums over dv can be divided by it.
LEAST = gl.constexpr(2.0**-64)
# How eight warps hold what products make: W a state [V, K], N a tile [V, 64], R a tile [64, K], and
# Q the pairs of rows [64, 64]. Each of the two warpgroups has half of the rows of W and N, and half
# of the columns of R and Q.
W = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [8, 1], [16, 128, 16]))
N = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [8, 1], [16, 64, 16]))
R = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 64, 16]))
Q = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16]))
# of left operands in registers, and of vectors along the first or second axis
WA, NA = gl.constexpr(gl.DotOperandLayout(0, W, 2)), gl.constexpr(gl.DotOperandLayout(0, N, 2))
WV, NC = gl.constexpr(gl.SliceLayout(1, W)), gl.constexpr(gl.SliceLayout(0, N))
RR, RC = gl.constexpr(gl.SliceLayout(1, R)), gl.constexpr(gl.SliceLayout(0, R))
QR, QC = gl.constexpr(gl.SliceLayout(1, Q)), gl.constexpr(gl.SliceLayout(0, Q))


@aggregate
class Meetings:
    """Where the partitions meet, once per chunk each."""

    rows_full: Signal  # k, the factors and q are copied
    AP_full: Signal
    do_full: Signal
    S_full: Signal
    vn_full: Signal
    AP_free: Signal  # A and P are read; what has two stages is free of the chunk before
    do_free: Signal  # do, v_new and S are read

    @gluon.constexpr_function
    def __init__(self, rows_full, AP_full, do_full, S_full, vn_full, AP_free, do_free):
        self.rows_full, self.AP_full, self.do_full = rows_full, AP_full, do_full
        self.S_full, self.vn_full, self.AP_free, self.do_free = S_full, vn_full, AP_free, do_free


@aggregate
class Buffers:
    """What lies in shared memory; the first axis counts stages, and halves of K for row sums."""

    q: gl.shared_memory_descriptor  # [2, 64, K]  then dq
    k: gl.shared_memory_descriptor  # [2, 64, K]  then dk
    factors: gl.shared_memory_descriptor  # [14, 64] fp32, seven of each stage
    do: gl.shared_memory_descriptor  # [1, 64, V]
    z: gl.shared_memory_descriptor  # [1, 64, V]  dv, or z if TILED
    vn: gl.shared_memory_descriptor  # [1, 64, V]  v_new
    S: gl.shared_memory_descriptor  # [1, K, V]
    D: gl.shared_memory_descriptor  # [1, V, K]  dS
    A: gl.shared_memory_descriptor  # [1, 64, 64]
    P: gl.shared_memory_descriptor  # [1, 64, 64]
    M: gl.shared_memory_descriptor  # [1, 64, 64]
    N: gl.shared_memory_descriptor  # [1, 64, 64]
    along_q: gl.shared_memory_descriptor  # [2, 64] fp32  sums of q dq
    along_k: gl.shared_memory_descriptor  # [2, 64] fp32  of k part
    along_late: gl.shared_memory_descriptor  # [2, 64] fp32  of k rest
    along_qk: gl.shared_memory_descriptor  # [2, 64] fp32  of q k, for the norm

    @gluon.constexpr_function
    def __init__(
        self, q, k, factors, do, z, vn, S, D, A, P, M, N, along_q, along_k, along_late, along_qk
    ):
        self.q, self.k, self.factors, self.do, self.z, self.vn = q, k, factors, do, z, vn
        self.S, self.D, self.A, self.P, self.M, self.N = S, D, A, P, M, N
        self.along_q, self.along_k = along_q, along_k
        self.along_late, self.along_qk = along_late, along_qk


@aggregate
class Inputs:
    """What is copied to shared memory, and at which columns the head lies in it."""

    q: tensor_descriptor
    k: tensor_descriptor
    do: tensor_descriptor
    vn: tensor_descriptor
    S: tensor_descriptor
    A: tensor_descriptor
    P: tensor_descriptor
    factors: tensor_descriptor
    q_at: gl.tensor
    k_at: gl.tensor
    do_at: gl.tensor

    @gluon.constexpr_function
    def __init__(self, q, k, do, vn, S, A, P, factors, q_at, k_at, do_at):
        self.q, self.k, self.do, self.vn, self.S, self.A, self.P = q, k, do, vn, S, A, P
        self.factors, self.q_at, self.k_at, self.do_at = factors, q_at, k_at, do_at


@aggregate
class Outputs:
    """What is written, and the column of the head in it."""

    dq: tensor_descriptor | gl.tensor  # a pointer if GROUPED
    dk: tensor_descriptor | gl.tensor  # likewise
    dv: tensor_descriptor
    tails: tensor_descriptor
    sums: gl.tensor
    at: gl.tensor

    @gluon.constexpr_function
    def __init__(self, dq, dk, dv, tails, sums, at):
        self.dq, self.dk, self.dv, self.tails, self.sums, self.at = dq, dk, dv, tails, sums, at


@aggregate
class Step:
    """Step n of a walk, which takes chunk c: views of its buffers, and its places in memory."""

    q: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    do: gl.shared_memory_descriptor
    z: gl.shared_memory_descriptor
    vn: gl.shared_memory_descriptor
    S: gl.shared_memory_descriptor
    D: gl.shared_memory_descriptor
    M: gl.shared_memory_descriptor
    N: gl.shared_memory_descriptor
    n: gl.tensor
    c: gl.tensor
    s: gl.tensor  # the stage of what has two
    # A 0 that the compiler does not know. Buffers of one stage are indexed by it. With a constant,
    # the compiler keeps the addresses of all buffers in registers, and spills.
    zero: gl.tensor
    here: gl.tensor  # rows that are tokens: 64 in all chunks but the last
    token: gl.tensor  # the first token
    place: gl.tensor  # `token`, or out of range if some rows are no tokens
    tail: gl.tensor  # the first row of `tails`, or out of range if all rows are tokens
    sums: gl.tensor  # of the chunk

    @gluon.constexpr_function
    def __init__(self, tiles, numbers, sums):
        self.q, self.k, self.do, self.z, self.vn, self.S, self.D, self.M, self.N = tiles
        self.n, self.c, self.s, self.zero = numbers[0:4]
        self.here, self.token, self.place, self.tail = numbers[4:8]
        self.sums = sums


@gluon.jit
def find_step(x, span, tiles, to, n, here, form):
    """Return step n, whose chunk has `here` tokens.

    The addresses of its tiles are formed here: formed where they are used, more of them spill.
    """
    c, s, zero = span.chunks - 1 - n, n & 1, n >> 30
    token = span.token + c * CHUNK
    place = gl.where(here < CHUNK, FAR, token)
    head = span.i_n * tiles.step + span.i_h if form.RUN > 0 else gl.program_id(0)
    tail = gl.where(here < CHUNK, head * ((1 if form.GROUPED else 3) * CHUNK), FAR)
    sums = to.sums + tiles.at(c).to(gl.int64) * SUMS
    return Step(
        (
            x.q.index(s),
            x.k.index(s),
            x.do.index(zero),
            x.z.index(zero),
            x.vn.index(zero),
            x.S.index(zero),
            x.D.index(zero),
            x.M.index(zero),
            x.N.index(zero),
        ),
        (n, c, s, zero, here, token, place, tail),
        sums,
    )


@gluon.jit
def near(buffers, i):
    """Return buffer i, with an address that the compiler forms here and no earlier.

    docs/kernels/hazards.md, "Descriptors of operands", says which products need it.
    """
    if SUMS_OF_WORDS:
        i = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [i], gl.int32, False, 1)
    return buffers.index(i)


@gluon.jit
def factor(x, at, WHICH: gl.constexpr, LAYOUT: gl.constexpr):
    """Return a factor of each row [64]."""
    return x.factors.index(at.s * COUNT_GDN + WHICH).load(LAYOUT)


@gluon.jit
def strength(x, at, form):
    """Return beta of each row [64]; a given one below LEAST counts as LEAST."""
    beta = factor(x, at, BETA, NC)
    if form.GIVEN:
        beta = gl.where(gl.abs(beta) < LEAST, LEAST, beta)
    return beta


@gluon.jit
def halves(x):
    """Return the sums over each half of the columns, [64, 2]: each warpgroup holds one half."""
    return gl.sum(gl.reshape(x, (CHUNK, 2, x.shape[1] // 2)), 2)


@gluon.jit
def leave_halves(sums, x):
    """Write the sums over each half of the columns of x [64, K] to shared memory [2, 64]."""
    reinterpret(sums, gl.float32, [2, CHUNK], PAIR).permute((1, 0)).store(halves(x))


@gluon.jit
def join_halves(sums):
    """Return the sums over all columns [64]."""
    return sums.index(0).load(RR) + sums.index(1).load(RR)


@gluon.jit
def leave(target, column, tails, at, tile, PART: gl.constexpr):
    """Copy a tile to its tokens, or to part PART of `tails` if some of its rows are no tokens.

    The other copy is out of range and writes nothing: that costs less than a branch.
    """
    store_tile(target, [at.place, column], tile)
    store_tile(tails, [at.tail + PART * CHUNK, 0], tile)


@gluon.jit
def copy(of, x, on, span, tiles):
    """Copy the tiles of each chunk to shared memory, in the order of their use."""
    for n in range(span.chunks):
        c = span.chunks - 1 - n
        s, zero = n & 1, n >> 30
        t, i = span.token + c * CHUNK, tiles.at(c)
        on.AP_free.wait(n - 1)
        rows = on.rows_full.at(n)
        on.rows_full.expect(n, 2 * CHUNK * WIDTH * 2 + COUNT_GDN * CHUNK * 4)
        load_tile(of.k, [t, of.k_at], rows, x.k.index(s))
        for j in gl.static_range(COUNT_GDN):
            row = (i * COUNT_GDN + j) * CHUNK
            load_tile(of.factors, [row], rows, x.factors.index(s * COUNT_GDN + j))
        load_tile(of.q, [t, of.q_at], rows, x.q.index(s))
        on.AP_full.expect(n, 2 * CHUNK * CHUNK * 2)
        load_tile(of.P, [i * CHUNK, 0], on.AP_full.at(n), x.P.index(zero))
        load_tile(of.A, [i * CHUNK, 0], on.AP_full.at(n), x.A.index(zero))
        on.do_free.wait(n - 1)
        on.do_full.expect(n, CHUNK * WIDTH * 2)
        load_tile(of.do, [t, of.do_at], on.do_full.at(n), x.do.index(zero))
        on.S_full.expect(n, WIDTH * WIDTH * 2)
        load_tile(of.S, [i * WIDTH, 0], on.S_full.at(n), x.S.index(zero))
        on.vn_full.expect(n, CHUNK * WIDTH * 2)
        load_tile(of.vn, [i * CHUNK, 0], on.vn_full.at(n), x.vn.index(zero))


@gluon.jit
def enter(x, on, at, dS):
    """Return dv_new [V, 64], dS and do [V, 64]; leave dS in 16 bits, and sum_k S dS."""
    none = gl.zeros([WIDTH, CHUNK], gl.float32, N)
    b_dS = dS.to(x.q.dtype)
    on.rows_full.wait(at.n)
    y = product(gl.convert_layout(b_dS, NA), near(x.k, at.s).permute((1, 0)), none)
    on.do_full.wait(at.n)
    do = at.do.permute((1, 0)).load(N)
    on.AP_full.wait(at.n)
    y_P = product(gl.convert_layout(do, NA), near(x.P, at.zero), none)
    at.D.store(b_dS)
    on.S_full.wait(at.n)
    # waits for nothing: it tells ptxas that no product in flight writes dS
    dS = wait_products(2, deps=(dS,))
    both = gl.sum(at.S.permute((1, 0)).load(W).to(gl.float32) * dS, 1)
    gl.store(at.sums + (SUM_STATE + (gl.arange(0, WIDTH, WV) + at.zero)), both)
    to_end = factor(x, at, TO_END_K, NC)
    y, y_P, dS = wait_products(0, deps=(y, y_P, dS))
    return y_P + y * to_end[None, :], dS, do


@gluon.jit
def carry(x, on, to, at, y, do, dS, gamma, form):
    """Write dv, and return dS of the chunk before, of which the last product is in flight."""
    from_start_q = factor(x, at, FROM_START_Q, NC)
    b_y = y.to(x.q.dtype)
    # On A's diagonal, which is one, z takes y unrounded
    rest = y - b_y.to(gl.float32)
    z = warpgroup_mma(gl.convert_layout(b_y, NA), near(x.A, at.zero), rest, is_async=True)
    dS = dS * gamma
    read = gl.convert_layout((do.to(gl.float32) * from_start_q[None, :]).to(x.q.dtype), WA)
    dS = warpgroup_mma(read, near(x.q, at.s), dS, is_async=True)
    from_start_k, beta = factor(x, at, FROM_START_K, NC), strength(x, at, form)
    z = wait_products(1, deps=(z,))
    if form.TILED:
        from_start_k = from_start_k * beta
    else:
        z = z * beta[None, :]
    tma.store_wait(0)  # dv, dq and dk of the step before are stored
    barrier()  # all warps have read A and P
    # In Triton 3.6 one thread arrives, and each warp waits for its own products: so arrivals follow
    # a barrier. They follow it at once, because the compiler adds another one otherwise.
    on.AP_free.arrive(at.n)
    z_b = at.z
    z_b.permute((1, 0)).store(z.to(x.q.dtype))
    less = gl.convert_layout((z * -from_start_k[None, :]).to(x.q.dtype), WA)
    dS = warpgroup_mma(less, near(x.k, at.s), dS, is_async=True)
    fence_async_shared()
    barrier()
    leave(to.dv, to.at, to.tails, at, z_b, 0 if form.GROUPED else 2)
    return dS


@gluon.jit
def score(x, on, at, dS, scale, form):
    """Write M, N and the sums of do v_new and dv v_new. Return dS; do S^T and dv S^T, in flight."""
    none, none_r = gl.zeros([CHUNK, CHUNK], gl.float32, Q), gl.zeros([CHUNK, WIDTH], gl.float32, R)
    on.vn_full.wait(at.n)
    z_b, S_t = at.z, at.S.permute((1, 0))
    p = product(near(x.do, at.zero), near(x.vn, at.zero).permute((1, 0)), none)
    l = product(z_b, at.vn.permute((1, 0)), none)
    dq = product(at.do, S_t, none_r)
    dk = product(near(x.z, at.zero), near(x.S, at.zero).permute((1, 0)), none_r)
    # Here, and norm_k below, for registers: ptxas 13.4 spills five addresses otherwise.
    row = gl.arange(0, CHUNK, QR)[:, None] + at.zero
    col = gl.arange(0, CHUNK, QC)[None, :] + (at.c >> 30)
    G_r, G_c = factor(x, at, LOG_DECAY, QR), factor(x, at, LOG_DECAY, QC)
    norm_q, less = factor(x, at, NORM_Q, QR), -factor(x, at, NORM_K, QR)
    if form.TILED:
        less = less * factor(x, at, BETA, QR)
    E = gl.where(row > col, gl.exp2(G_r[:, None] - G_c[None, :]), 0.0)
    p, l, dS = wait_products(2, deps=(p, l, dS))
    gl.store(at.sums + (SUM_STRENGTH + row) + 0 * col, l, mask=row == col)
    gl.store(at.sums + (SUM_OWN + row) + 0 * col, p, mask=row == col)
    norm_k = factor(x, at, NORM_K, QC)
    E = E * norm_k[None, :]
    at.M.store((p * E * (norm_q * scale)[:, None]).to(x.q.dtype))
    at.N.store((l * E * less[:, None]).to(x.q.dtype))
    fence_async_shared()
    return dS, dq, dk


@gluon.jit
def add_rows(x, on, at, dq, dk, form):
    """Return `into`, `part` and `rest` [64, K], in flight; leave sum_k k r_1 (v_new dS^T)."""
    none = gl.zeros([CHUNK, WIDTH], gl.float32, R)
    rest = product(near(x.vn, at.zero), near(x.D, at.zero), none)
    from_start_k, to_end = factor(x, at, FROM_START_K, RR), factor(x, at, TO_END_K, RR)
    from_start_q = factor(x, at, FROM_START_Q, RR)
    if form.TILED:
        from_start_k = from_start_k * factor(x, at, BETA, RR)
    dq, dk, rest = wait_products(0, deps=(dq, dk, rest))
    barrier()  # all warps have written M, N and p's diagonal, and read do, v_new and S
    on.do_free.arrive(at.n)
    dq = dq * from_start_q[:, None]
    dq = warpgroup_mma(near(x.M, at.zero), near(x.k, at.s), dq, is_async=True)
    dk = dk * -from_start_k[:, None]
    dk = warpgroup_mma(near(x.N, at.zero), near(x.k, at.s), dk, is_async=True)
    rest = rest * to_end[:, None]
    late = halves(at.k.load(R).to(gl.float32) * rest)
    HALF: gl.constexpr = late.type.layout
    o_half = (gl.arange(0, CHUNK, gl.SliceLayout(1, HALF))[:, None] + at.zero) * 2
    o_half += gl.arange(0, 2, gl.SliceLayout(0, HALF))[None, :]
    gl.store(at.sums + (SUM_LATE + o_half), late)
    rest = warpgroup_mma(near(x.N, at.zero).permute((1, 0)), near(x.k, at.s), rest, is_async=True)
    rest = warpgroup_mma(near(x.M, at.zero).permute((1, 0)), near(x.q, at.s), rest, is_async=True)
    return dq, dk, rest


@gluon.jit
def finish(x, to, at, dq, part, rest, scale, tiles, form):
    """Write dq, dk and the sums of dG and of k part, from the products of `add_rows`."""
    q_b, k_b = at.q, at.k
    o_r = gl.arange(0, CHUNK, RR) + at.zero
    norm_k, norm_q = factor(x, at, NORM_K, RR), factor(x, at, NORM_Q, RR)
    q = q_b.load(R).to(gl.float32)
    dq, part, rest = wait_products(0, deps=(dq, part, rest))
    k = k_b.load(R).to(gl.float32)
    leave_halves(x.along_q, q * dq)
    leave_halves(x.along_k, k * part)
    leave_halves(x.along_late, k * rest)
    if form.L2NORM:
        leave_halves(x.along_qk, q * k)
    own = gl.load(at.sums + (SUM_OWN + o_r)) * (norm_q * norm_k * scale)
    dq += k * own[:, None]
    dk = part + (rest + q * own[:, None])
    barrier()  # all warps have written the sums, and read q and k
    along_q, along_k = join_halves(x.along_q), join_halves(x.along_k)
    along_late = join_halves(x.along_late)
    # The last token decays before no other token of its chunk: its `rest` counts for no row.
    counted = gl.where(o_r < at.here - 1, along_late, 0.0)
    gl.store(at.sums + (SUM_DG + o_r), along_q + along_k - counted)
    if form.GIVEN:
        gl.store(at.sums + (SUM_PART + o_r), along_k)
    if form.L2NORM:
        own *= join_halves(x.along_qk)
        along_q += own
        along_k += along_late + own
        dq = dq - q * (norm_q * norm_q * along_q)[:, None]
        dk = dk - k * (norm_k * norm_k * along_k)[:, None]
    if form.GROUPED:
        row = tiles.step * WIDTH
        first = at.token.to(gl.int64) * row + to.at
        o_x = (o_r * row)[:, None] + (gl.arange(0, WIDTH, RC) + at.zero)[None, :]
        m_x = (o_r < at.here)[:, None]
        gl.store(to.dq + first + o_x, dq, mask=m_x)
        gl.store(to.dk + first + o_x, dk, mask=m_x)
    else:
        q_b.store(dq.to(x.q.dtype))
        k_b.store(dk.to(x.q.dtype))
        fence_async_shared()
        barrier()
        leave(to.dq, to.at, to.tails, at, q_b, 0)
        leave(to.dk, to.at, to.tails, at, k_b, 1)


@gluon.jit
def walk(x, on, span, tiles, to, gamma, dfinal, dinitial, scale, form):
    """Compute the equations of `reverse_walk_gdn` for each chunk, last chunk first.

    dS is held as [V, K].
    """
    dS = gl.zeros([WIDTH, WIDTH], gl.float32, W)
    if dfinal.pointer is not None:
        dS = gl.load(state_at(dfinal.pointer, dfinal.strides, span.run, span.i_h, W))
        dS = dS.to(gl.float32)
    here = span.length - (span.chunks - 1) * CHUNK
    if (here < CHUNK) & (span.chunks > 0):
        # the rows after the last token belong to another sequence, and may be NaN
        on.rows_full.wait(0)
        on.do_full.wait(0)
        fill_rows(x.q.index(0), here, 0.0, ROWS)
        fill_rows(x.k.index(0), here, 0.0, ROWS)
        fill_rows(x.do.index(0), here, 0.0, ROWS)
        fence_async_shared()
        barrier()
    g = gl.load(gamma + tiles.at(span.chunks - 1), mask=span.chunks > 0, other=1.0)
    for n in range(span.chunks):
        at = find_step(x, span, tiles, to, n, here, form)
        y, dS, do = enter(x, on, at, dS)
        ahead = gl.load(gamma + tiles.at(gl.maximum(at.c - 1, 0)))
        dS = carry(x, on, to, at, y, do, dS, g, form)
        g = ahead
        dS, dq, dk = score(x, on, at, dS, scale, form)
        dq, part, rest = add_rows(x, on, at, dq, dk, form)
        finish(x, to, at, dq, part, rest, scale, tiles, form)
        here = CHUNK
    if dinitial.pointer is not None:
        if span.skipped == 0:
            gl.store(state_at(dinitial.pointer, dinitial.strides, span.i_n, span.i_h, W), dS)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["sequences", "T", "H", "HV", "q_h", "k_h", "do_h", "scale"])
def reverse_walk_gdn(
    q_d,
    k_d,
    do_d,
    vn_d,
    S_d,
    A_d,
    P_d,
    r_d,
    gamma,
    dfinal,
    cu_seqlens,
    dq,
    dk,
    dv_d,
    tails_d,
    sums,
    dinitial,
    sequences,
    T,
    H,
    HV,
    q_h,
    k_h,
    do_h,
    scale,
    form,
):
    """Form the gradients of one sequence and head, last chunk first, with dS [K, V] in registers.

    With `form.RUN` a program takes a run of so many chunks, and `dfinal` is [runs, HV, K, V].
    `sequences` is N for runs of packed sequences, else None.

    dS is fp32. r_0 to r_6 are the factors of GDN (`operands`), n_q and n_k inverse norms. E_ij is
    the decay from row j to row i, and o multiplies entry by entry::

        dv_new = P^T do + r_1 (k dS);   z = A^T dv_new;   dv = beta z    [64, V]
        dS <- gamma dS + q^T (r_3 do) - k^T (r_0 dv)                     [K, V]
        d = scale n_q n_k sum_v do v_new                                 [64]
        M = scale strict_tril(n_q n_k do v_new^T o E);   N = -strict_tril(n_k n_k dv v_new^T o E)
        into = r_3 (do S^T) + M k;   dq = into + d k                     [64, K]
        part = N k - r_0 (dv S^T);   rest = r_1 (v_new dS^T) + N^T k + M^T q
        dk = part + rest + d q                                           [64, K]
        dG = sum_k q into + k part - k rest                              [64]
        dbeta = sum_v dv v_new / beta^2 = sum_v z v + sum_k k part / beta

    With L2NORM, dq and dk are then taken through the norm, which needs q dq and k dk anyway. What
    pairs of rows add to dG cancels in a sum over a chunk: both sides use the same rounded M and N.
    The pair of a row with itself does not decay and would cancel, so dG leaves it out. The rest of
    the last token would cancel with the sum of k r_1 (v_new dS^T), and both leave it out.

    If TILED, z takes the place of dv, in the output too, and beta is a factor of rows. If GIVEN,
    dv is LEAST z where beta is below LEAST. If GROUPED, several value heads share q and k, and dq
    and dk are fp32 per value head. `finish_walk` makes dg and dbeta from the sums, whose places
    `operands` lists.
    """
    TYPE: gl.constexpr = q_d.dtype
    span = find_span(cu_seqlens, None, sequences, T, HV, RUN=form.RUN)
    tiles = find_tiles(span, cu_seqlens, T, HV, CHUNK)
    i_g = span.i_h // (HV // H)
    x = Buffers(
        gl.allocate_shared_memory(TYPE, [2, CHUNK, WIDTH], q_d.layout),
        gl.allocate_shared_memory(TYPE, [2, CHUNK, WIDTH], q_d.layout),
        gl.allocate_shared_memory(gl.float32, [2 * COUNT_GDN, CHUNK], r_d.layout),
        gl.allocate_shared_memory(TYPE, [1, CHUNK, WIDTH], do_d.layout),
        gl.allocate_shared_memory(TYPE, [1, CHUNK, WIDTH], do_d.layout),
        gl.allocate_shared_memory(TYPE, [1, CHUNK, WIDTH], do_d.layout),
        gl.allocate_shared_memory(TYPE, [1, WIDTH, WIDTH], S_d.layout),
        gl.allocate_shared_memory(TYPE, [1, WIDTH, WIDTH], S_d.layout),
        gl.allocate_shared_memory(TYPE, [1, CHUNK, CHUNK], A_d.layout),
        gl.allocate_shared_memory(TYPE, [1, CHUNK, CHUNK], A_d.layout),
        gl.allocate_shared_memory(TYPE, [1, CHUNK, CHUNK], A_d.layout),
        gl.allocate_shared_memory(TYPE, [1, CHUNK, CHUNK], A_d.layout),
        # one by one: with one buffer for all four, the compiler places barriers between its parts
        gl.allocate_shared_memory(gl.float32, [2, CHUNK], FLAT),
        gl.allocate_shared_memory(gl.float32, [2, CHUNK], FLAT),
        gl.allocate_shared_memory(gl.float32, [2, CHUNK], FLAT),
        gl.allocate_shared_memory(gl.float32, [2, CHUNK], FLAT),
    )
    on = Meetings(signal(2), signal(1), signal(1), signal(1), signal(1), signal(1), signal(1))
    fence_async_shared()
    barrier()
    of = Inputs(q_d, k_d, do_d, vn_d, S_d, A_d, P_d, r_d, i_g * q_h, i_g * k_h, span.i_h * do_h)
    to = Outputs(dq, dk, dv_d, tails_d, sums, span.i_h * WIDTH)
    gl.warp_specialize(
        [
            (walk, (x, on, span, tiles, to, gamma, dfinal, dinitial, scale, form)),
            (copy, (of, x, on, span, tiles)),
        ],
        [1],
        [24],
    )
