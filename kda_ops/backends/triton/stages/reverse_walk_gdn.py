"""Walk over the chunks of each head, last chunk first: GDN's backward in Gluon, for Hopper.

The gradient of the state stays in registers from chunk to chunk. Each step makes dq, dk, dv and the
sums of dG and dbeta of its chunk. So neither the gradient of the state nor z goes through memory.

One warp copies tiles to shared memory, and eight warps compute. They synchronise by mbarriers:
`full` and `f_*` say that buffers are filled, `e_*` that they are free. Buffers are named after
their tensor, with `_s` in shared memory, `_d` for a descriptor. docs/kernels/design.md, "The walk
of GDN", lists their sizes.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
)

from kda_ops.backends.triton.device.gluon_names import (
    SUMS_OF_WORDS,
    barrier,
    load_tile,
    reinterpret,
    store_tile,
    wait_products,
)

# The fp32 numbers that fit into a tile of P. A chunk leaves its sums for `finish_walk` at the start
# of its P, which has been read by then:
#     dG [64];   sum_v dv v_new [64];   sum_k k r_1 (v_new dS^T) [64, 2], one per half of K;
#     sum_k S dS [V];   sum_k k part [64], if beta is given;   sum_v do v_new [64], for the walk
SUMS = gl.constexpr(64 * 64 // 2)
# A given beta counts as no less than this in dv, so that sums over dv can be divided by it.
LEAST = gl.constexpr(2.0**-64)
FAR = gl.constexpr(1 << 30)  # past the end of every tensor that is written
COPIED = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0]))  # layout in `clear_rows`


@gluon.jit
def near(view, buffers, i):
    """Return view, which is buffer i, with an address that the compiler forms here and no earlier.

    docs/kernels/hazards.md, "Descriptors of operands", says which products need it.
    """
    if SUMS_OF_WORDS:
        i = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [i], gl.int32, False, 1)
        view = buffers.index(i)
    return view


@gluon.jit
def halves(x):
    """Return the sums over each half of the columns, [64, 2]: each warpgroup holds one half."""
    return gl.sum(gl.reshape(x, (64, 2, x.shape[1] // 2)), 2)


@gluon.jit
def clear_rows(tile, n_rows):
    """Zero rows n_rows to 63 of a tile in shared memory."""
    row = gl.arange(0, 64, gl.SliceLayout(1, COPIED))[:, None]
    tile.store(gl.where(row < n_rows, tile.load(COPIED), 0.0).to(tile.dtype))


@gluon.jit
def state_at(state, strides, HV, o_k, o_v):
    """Return pointers to S[k, v] of the program's sequence and head, as [V, K]."""
    i_n, i_h = gl.program_id(0) // HV, gl.program_id(0) % HV
    p_s = state + (i_n.to(gl.int64) * strides[0] + i_h.to(gl.int64) * strides[1])
    return p_s + (o_v * strides[3])[:, None] + (o_k * strides[2])[None, :]


@gluon.jit
def produce(
    q_d,
    k_d,
    do_d,
    vn_d,
    S_d,
    A_d,
    P_d,
    r_d,
    q_s,
    k_s,
    do_s,
    vn_s,
    S_s,
    A_s,
    P_s,
    r_s,
    full,
    f_ap,
    e_ap,
    f_do,
    e_do,
    f_S,
    f_vn,
    token,
    tile,
    HV,
    q_column,
    k_column,
    column,
    chunks,
    K: gl.constexpr,
    V: gl.constexpr,
):
    """Copy the tiles of each chunk to shared memory, in the order of their use.

    Names are those of `reverse_walk_gdn`: `x_d` describes tensor x, `x_s` are its buffers.
    """
    for n in range(chunks):
        c = chunks - 1 - n
        s, one, zero = n & 1, n & 1, n >> 30
        t, i = token + c * 64, tile + c * HV
        mbarrier.wait(e_ap, one ^ 1)
        bar = full.index(s)
        mbarrier.expect(bar, 4 * 64 * K + 7 * 256)
        load_tile(k_d, [t, k_column], bar, k_s.index(s))
        for j in gl.static_range(7):
            load_tile(r_d, [i * 448 + j * 64], bar, r_s.index(s * 7 + j))
        load_tile(q_d, [t, q_column], bar, q_s.index(s))
        mbarrier.expect(f_ap, 4 * 64 * 64)
        load_tile(P_d, [i * 64, 0], f_ap, P_s.index(zero))
        load_tile(A_d, [i * 64, 0], f_ap, A_s.index(zero))
        mbarrier.wait(e_do, one ^ 1)
        mbarrier.expect(f_do, 2 * 64 * V)
        load_tile(do_d, [t, column], f_do, do_s.index(zero))
        mbarrier.expect(f_S, 2 * K * V)
        load_tile(S_d, [i * K, 0], f_S, S_s.index(zero))
        mbarrier.expect(f_vn, 2 * 64 * V)
        load_tile(vn_d, [i * 64, 0], f_vn, vn_s.index(zero))


@gluon.jit
def consume(
    dq_d,
    dk_d,
    dv_d,
    tails_d,
    dq,
    dk,
    q_s,
    k_s,
    do_s,
    vn_s,
    S_s,
    A_s,
    P_s,
    r_s,
    z_s,
    D_s,
    M_s,
    N_s,
    s0,
    s1,
    s2,
    s3,
    full,
    f_ap,
    e_ap,
    f_do,
    e_do,
    f_S,
    f_vn,
    gamma,
    sums,
    dfinal,
    dfinal_s,
    dinitial,
    dinitial_s,
    token,
    tile,
    HV,
    column,
    chunks,
    length,
    scale,
    K: gl.constexpr,
    V: gl.constexpr,
    TILED: gl.constexpr,
    GIVEN: gl.constexpr,
    GROUPED: gl.constexpr,
    L2NORM: gl.constexpr,
):
    """Compute the equations of `reverse_walk_gdn` for each chunk, last chunk first.

    dS is held as [V, K], each of the two warpgroups with half of its rows. Of tiles with tokens as
    rows, each has half of the columns.
    """
    W: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, K, 16])
    N: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, 64, 16])
    R: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, K // 2, 16])
    Q: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16])
    WA: gl.constexpr = gl.DotOperandLayout(0, W, 2)
    NA: gl.constexpr = gl.DotOperandLayout(0, N, 2)
    NC: gl.constexpr = gl.SliceLayout(0, N)
    RR: gl.constexpr = gl.SliceLayout(1, R)
    QR: gl.constexpr = gl.SliceLayout(1, Q)
    QC: gl.constexpr = gl.SliceLayout(0, Q)
    PAIR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    TYPE: gl.constexpr = q_s.dtype
    none_n, none_q = gl.zeros([V, 64], gl.float32, N), gl.zeros([64, 64], gl.float32, Q)
    none_r = gl.zeros([64, K], gl.float32, R)
    dS = gl.zeros([V, K], gl.float32, W)
    o_v, o_k = gl.arange(0, V, gl.SliceLayout(1, W)), gl.arange(0, K, gl.SliceLayout(0, W))
    if dfinal is not None:
        dS = gl.load(state_at(dfinal, dfinal_s, HV, o_k, o_v)).to(gl.float32)
    here = length - (chunks - 1) * 64  # rows that are tokens: 64 in all chunks but the last
    if (here < 64) & (chunks > 0):
        # the rows after the last token belong to another sequence, and may be NaN
        mbarrier.wait(full.index(0), 0)
        mbarrier.wait(f_do, 0)
        clear_rows(q_s.index(0), here)
        clear_rows(k_s.index(0), here)
        clear_rows(do_s.index(0), here)
        fence_async_shared()
        barrier()
    g = gl.load(gamma + tile + (chunks - 1) * HV, mask=chunks > 0, other=1.0)
    for n in range(chunks):
        c = chunks - 1 - n
        # `zero` is a 0 that the compiler does not know. Buffers of one stage are indexed by it too.
        # With a constant, the compiler keeps the addresses of all buffers in registers, and spills.
        s, one, zero = n & 1, n & 1, n >> 30
        i = tile + c * HV
        o_r, o_v = gl.arange(0, 64, RR) + zero, gl.arange(0, V, gl.SliceLayout(1, W)) + zero
        p_sum = sums + i.to(gl.int64) * SUMS
        k, q, r = k_s.index(s), q_s.index(s), s * 7
        # A tile with rows that are no tokens goes to `tails`, others to their place. The other
        # store is out of range and writes nothing: that costs less than a branch.
        place = gl.where(here < 64, FAR, token + c * 64)
        tail = gl.where(here < 64, gl.program_id(0) * (64 if GROUPED else 192), FAR)
        do_b, z_b, vn_b = do_s.index(zero), z_s.index(zero), vn_s.index(zero)
        S_b, D_b = S_s.index(zero), D_s.index(zero)
        A_b, P_b, M_b, N_b = A_s.index(zero), P_s.index(zero), M_s.index(zero), N_s.index(zero)
        b_ds = dS.to(TYPE)
        mbarrier.wait(full.index(s), n // 2 & 1)
        k_t = near(k, k_s, s).permute((1, 0))
        x = warpgroup_mma(gl.convert_layout(b_ds, NA), k_t, none_n, use_acc=False, is_async=True)
        mbarrier.wait(f_do, one)
        b_do = do_b.permute((1, 0)).load(N)
        mbarrier.wait(f_ap, one)
        P_b = near(P_b, P_s, zero)
        y = warpgroup_mma(gl.convert_layout(b_do, NA), P_b, none_n, use_acc=False, is_async=True)
        D_b.store(b_ds)
        mbarrier.wait(f_S, one)
        # waits for nothing: it tells ptxas that no product in flight writes dS
        dS = wait_products(2, deps=(dS,))
        both = gl.sum(S_b.permute((1, 0)).load(W).to(gl.float32) * dS, 1)
        gl.store(p_sum + (256 + o_v), both)
        r1 = r_s.index(r + 1).load(NC)
        x, y, dS = wait_products(0, deps=(x, y, dS))
        r3 = r_s.index(r + 3).load(NC)
        y = y + x * r1[None, :]
        b_y = y.to(TYPE)
        # On A's diagonal, which is one, z takes y unrounded
        A_b = near(A_b, A_s, zero)
        z = warpgroup_mma(gl.convert_layout(b_y, NA), A_b, y - b_y.to(gl.float32), is_async=True)
        dS = dS * g
        g = gl.load(gamma + tile + gl.maximum(c - 1, 0) * HV)
        b_read = gl.convert_layout((b_do.to(gl.float32) * r3[None, :]).to(TYPE), WA)
        dS = warpgroup_mma(b_read, near(q, q_s, s), dS, is_async=True)
        r0, r2 = r_s.index(r).load(NC), r_s.index(r + 2).load(NC)
        z = wait_products(1, deps=(z,))
        if TILED:
            r0 = r0 * r2
        else:
            z = z * strength(r2, GIVEN)[None, :]
        tma.store_wait(0)  # dv, dq and dk of the step before are stored
        barrier()  # all warps have read A and P
        # This frees A, P, and the q, k and factors of the step before. In Triton 3.6 one thread
        # arrives, and each warp waits for its own products: so arrivals follow a barrier. They
        # follow it at once, because the compiler adds another one otherwise.
        mbarrier.arrive(e_ap, count=1)
        z_b.permute((1, 0)).store(z.to(TYPE))
        b_less = gl.convert_layout((z * -r0[None, :]).to(TYPE), WA)
        dS = warpgroup_mma(b_less, near(k, k_s, s), dS, is_async=True)
        fence_async_shared()
        barrier()
        store_tile(dv_d, [place, column], z_b)
        store_tile(tails_d, [tail + (0 if GROUPED else 128), 0], z_b)
        mbarrier.wait(f_vn, one)
        vn_t, S_t = vn_b.permute((1, 0)), S_b.permute((1, 0))
        do_p, vn_p = near(do_b, do_s, zero), near(vn_b, vn_s, zero).permute((1, 0))
        p = warpgroup_mma(do_p, vn_p, none_q, use_acc=False, is_async=True)
        l = warpgroup_mma(z_b, vn_t, none_q, use_acc=False, is_async=True)
        dq_b = warpgroup_mma(do_b, S_t, none_r, use_acc=False, is_async=True)
        z_dk, S_dk = near(z_b, z_s, zero), near(S_b, S_s, zero).permute((1, 0))
        dk_b = warpgroup_mma(z_dk, S_dk, none_r, use_acc=False, is_async=True)
        # Here, and nk_c below, for registers: ptxas 13.4 spills five addresses otherwise.
        row = gl.arange(0, 64, QR)[:, None] + zero
        col = gl.arange(0, 64, QC)[None, :] + (c >> 30)
        G_r, G_c = r_s.index(r + 6).load(QR), r_s.index(r + 6).load(QC)
        nq_r, nk_r = r_s.index(r + 5).load(QR), r_s.index(r + 4).load(QR)
        less = -nk_r
        if TILED:
            less = less * r_s.index(r + 2).load(QR)
        E = gl.where(row > col, gl.exp2(G_r[:, None] - G_c[None, :]), 0.0)
        p, l, dS = wait_products(2, deps=(p, l, dS))
        gl.store(p_sum + (64 + row) + 0 * col, l, mask=row == col)
        gl.store(p_sum + (448 + row) + 0 * col, p, mask=row == col)
        nk_c = r_s.index(r + 4).load(QC)
        E = E * nk_c[None, :]
        M_b.store((p * E * (nq_r * scale)[:, None]).to(TYPE))
        N_b.store((l * E * less[:, None]).to(TYPE))
        fence_async_shared()
        vn_b, D_b = near(vn_b, vn_s, zero), near(D_b, D_s, zero)
        late = warpgroup_mma(vn_b, D_b, none_r, use_acc=False, is_async=True)
        f0, f1, f3 = (r_s.index(r).load(RR), r_s.index(r + 1).load(RR), r_s.index(r + 3).load(RR))
        if TILED:
            f0 = f0 * r_s.index(r + 2).load(RR)
        dq_b, dk_b, late = wait_products(0, deps=(dq_b, dk_b, late))
        barrier()  # all warps have written M, N and p's diagonal, and read do, v_new and S
        mbarrier.arrive(e_do, count=1)
        dq_b = dq_b * f3[:, None]
        dq_b = warpgroup_mma(near(M_b, M_s, zero), near(k, k_s, s), dq_b, is_async=True)
        dk_b = dk_b * -f0[:, None]
        dk_b = warpgroup_mma(near(N_b, N_s, zero), near(k, k_s, s), dk_b, is_async=True)
        late = late * f1[:, None]
        b_late = halves(k.load(R).to(gl.float32) * late)
        HALF: gl.constexpr = b_late.type.layout
        o_half = (gl.arange(0, 64, gl.SliceLayout(1, HALF))[:, None] + zero) * 2
        o_half += gl.arange(0, 2, gl.SliceLayout(0, HALF))[None, :]
        gl.store(p_sum + (128 + o_half), b_late)
        N_t, k_b = near(N_b, N_s, zero).permute((1, 0)), near(k, k_s, s)
        late = warpgroup_mma(N_t, k_b, late, is_async=True)
        M_t, q_b = near(M_b, M_s, zero).permute((1, 0)), near(q, q_s, s)
        late = warpgroup_mma(M_t, q_b, late, is_async=True)
        n_k, n_q = r_s.index(r + 4).load(RR), r_s.index(r + 5).load(RR)
        b_q = q.load(R).to(gl.float32)
        dq_b, dk_b, late = wait_products(0, deps=(dq_b, dk_b, late))
        b_k = k.load(R).to(gl.float32)
        reinterpret(s0, gl.float32, [2, 64], PAIR).permute((1, 0)).store(halves(b_q * dq_b))
        reinterpret(s1, gl.float32, [2, 64], PAIR).permute((1, 0)).store(halves(b_k * dk_b))
        reinterpret(s2, gl.float32, [2, 64], PAIR).permute((1, 0)).store(halves(b_k * late))
        if L2NORM:
            reinterpret(s3, gl.float32, [2, 64], PAIR).permute((1, 0)).store(halves(b_q * b_k))
        own = gl.load(p_sum + (448 + o_r)) * (n_q * n_k * scale)
        dq_b += b_k * own[:, None]
        dk_b += late + b_q * own[:, None]
        barrier()  # all warps have written the sums, and read q and k
        along_q = s0.index(0).load(RR) + s0.index(1).load(RR)
        along_k = s1.index(0).load(RR) + s1.index(1).load(RR)
        along_late = s2.index(0).load(RR) + s2.index(1).load(RR)
        # The last token decays before no other token of its chunk: its `rest` counts for no row.
        counted = gl.where(o_r < here - 1, along_late, 0.0)
        gl.store(p_sum + o_r, along_q + along_k - counted)
        if GIVEN:
            gl.store(p_sum + (384 + o_r), along_k)
        if L2NORM:
            own *= s3.index(0).load(RR) + s3.index(1).load(RR)
            along_q += own
            along_k += along_late + own
            dq_b = dq_b - b_q * (n_q * n_q * along_q)[:, None]
            dk_b = dk_b - b_k * (n_k * n_k * along_k)[:, None]
        if GROUPED:
            first = (token + c * 64).to(gl.int64) * (HV * K) + column
            o_x = (o_r * (HV * K))[:, None] + (gl.arange(0, K, gl.SliceLayout(0, R)) + zero)[
                None, :
            ]
            m_x = (o_r < here)[:, None]
            gl.store(dq + first + o_x, dq_b, mask=m_x)
            gl.store(dk + first + o_x, dk_b, mask=m_x)
        else:
            q.store(dq_b.to(TYPE))
            k.store(dk_b.to(TYPE))
            fence_async_shared()
            barrier()
            store_tile(dq_d, [place, column], q)
            store_tile(dk_d, [place, column], k)
            store_tile(tails_d, [tail, 0], q)
            store_tile(tails_d, [tail + 64, 0], k)
        here = 64
    if dinitial is not None:
        o_v, o_k = gl.arange(0, V, gl.SliceLayout(1, W)), gl.arange(0, K, gl.SliceLayout(0, W))
        gl.store(state_at(dinitial, dinitial_s, HV, o_k, o_v), dS)
    tma.store_wait(0)


@gluon.jit
def strength(r2, GIVEN: gl.constexpr):
    """Return beta of each row; a given one below LEAST counts as LEAST."""
    if GIVEN:
        r2 = gl.where(gl.abs(r2) < LEAST, LEAST, r2)
    return r2


@gluon.jit(do_not_specialize=["T", "H", "HV", "q_h", "k_h", "do_h", "scale"])
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
    dfinal_s,
    cu_seqlens,
    dq_d,
    dk_d,
    dv_d,
    tails_d,
    dq,
    dk,
    sums,
    dinitial,
    dinitial_s,
    T,
    H,
    HV,
    q_h,
    k_h,
    do_h,
    scale,
    K: gl.constexpr,
    V: gl.constexpr,
    TILED: gl.constexpr,
    GIVEN: gl.constexpr,
    GROUPED: gl.constexpr,
    L2NORM: gl.constexpr,
):
    """Form the gradients of one sequence and head, last chunk first, with dS [K, V] in registers.

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
    and dk are fp32 per value head. `finish_walk` makes dg and dbeta from the sums. `SUMS` lists
    where they are.
    """
    TYPE: gl.constexpr = q_d.dtype
    pid = gl.program_id(0)
    i_n, i_h = pid // HV, pid % HV
    if cu_seqlens is not None:
        bos = gl.load(cu_seqlens + i_n).to(gl.int32)
        length = gl.load(cu_seqlens + i_n + 1).to(gl.int32) - bos
        tile = (bos // 64 + i_n) * HV + i_h
    else:
        bos, length = i_n * T, T
        tile = i_n * ((T + 63) // 64) * HV + i_h
    chunks = (length + 63) // 64
    i_g = i_h // (HV // H)
    q_s = gl.allocate_shared_memory(TYPE, [2, 64, K], q_d.layout)
    k_s = gl.allocate_shared_memory(TYPE, [2, 64, K], q_d.layout)
    r_s = gl.allocate_shared_memory(gl.float32, [14, 64], r_d.layout)
    do_s = gl.allocate_shared_memory(TYPE, [1, 64, V], do_d.layout)
    z_s = gl.allocate_shared_memory(TYPE, [1, 64, V], do_d.layout)
    vn_s = gl.allocate_shared_memory(TYPE, [1, 64, V], do_d.layout)
    S_s = gl.allocate_shared_memory(TYPE, [1, K, V], S_d.layout)
    D_s = gl.allocate_shared_memory(TYPE, [1, V, K], S_d.layout)
    A_s = gl.allocate_shared_memory(TYPE, [1, 64, 64], A_d.layout)
    P_s = gl.allocate_shared_memory(TYPE, [1, 64, 64], A_d.layout)
    M_s = gl.allocate_shared_memory(TYPE, [1, 64, 64], A_d.layout)
    N_s = gl.allocate_shared_memory(TYPE, [1, 64, 64], A_d.layout)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    s0 = gl.allocate_shared_memory(gl.float32, [2, 64], FLAT)
    s1 = gl.allocate_shared_memory(gl.float32, [2, 64], FLAT)
    s2 = gl.allocate_shared_memory(gl.float32, [2, 64], FLAT)
    s3 = gl.allocate_shared_memory(gl.float32, [2, 64], FLAT)
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    f_ap = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    e_ap = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    f_do = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    e_do = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    f_S = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    f_vn = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(full.index(i), count=1)
    mbarrier.init(f_ap, count=1)
    mbarrier.init(e_ap, count=1)
    mbarrier.init(f_do, count=1)
    mbarrier.init(e_do, count=1)
    mbarrier.init(f_S, count=1)
    mbarrier.init(f_vn, count=1)
    fence_async_shared()
    barrier()
    gl.warp_specialize(
        [
            (
                consume,
                (
                    dq_d,
                    dk_d,
                    dv_d,
                    tails_d,
                    dq,
                    dk,
                    q_s,
                    k_s,
                    do_s,
                    vn_s,
                    S_s,
                    A_s,
                    P_s,
                    r_s,
                    z_s,
                    D_s,
                    M_s,
                    N_s,
                    s0,
                    s1,
                    s2,
                    s3,
                    full,
                    f_ap,
                    e_ap,
                    f_do,
                    e_do,
                    f_S,
                    f_vn,
                    gamma,
                    sums,
                    dfinal,
                    dfinal_s,
                    dinitial,
                    dinitial_s,
                    bos,
                    tile,
                    HV,
                    i_h * V,
                    chunks,
                    length,
                    scale,
                    K,
                    V,
                    TILED,
                    GIVEN,
                    GROUPED,
                    L2NORM,
                ),
            ),
            (
                produce,
                (
                    q_d,
                    k_d,
                    do_d,
                    vn_d,
                    S_d,
                    A_d,
                    P_d,
                    r_d,
                    q_s,
                    k_s,
                    do_s,
                    vn_s,
                    S_s,
                    A_s,
                    P_s,
                    r_s,
                    full,
                    f_ap,
                    e_ap,
                    f_do,
                    e_do,
                    f_S,
                    f_vn,
                    bos,
                    tile,
                    HV,
                    i_g * q_h,
                    i_g * k_h,
                    i_h * do_h,
                    chunks,
                    K,
                    V,
                ),
            ),
        ],
        [1],
        [24],
    )
