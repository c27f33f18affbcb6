"""Walk over the chunks of each head: KDA's forward in one Gluon kernel, for Hopper.

A program takes one sequence and head. Its warps are three partitions that work at the same time:
one warp copies the inputs of the chunks to shared memory, four warps `prepare` chunk n + 1, and
eight warps `scan` chunk n with the state in registers. The tiles that `prepare` hands to `scan`
never leave the multiprocessor. docs/kernels/design.md, "The walk of KDA", draws the partitions and
lists what lies in shared memory.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mma_v2,
    tma,
    warpgroup_mma,
)

from kda_ops.backends.triton.device.channels import (
    Column,
    Signal,
    Tiles,
    find_span,
    find_tiles,
    from_span,
    signal,
)
from kda_ops.backends.triton.device.gate import load_bias, load_rate
from kda_ops.backends.triton.device.gluon_blocks import (
    LESS,
    block_decays,
    by_block,
    join_scores,
    repeated,
)
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
    FAR,
    FLAT,
    LOG2E,
    PAIR,
    ROWS,
    ROWS_4,
    SHIFT,
    UNSHIFT,
    decay_rows,
    ex2,
    fill_decays,
    fill_rows,
    growth,
    halve,
    left_right,
    load_rows,
    narrow,
    product,
    rcp,
    state_at,
    widen,
)
from kda_ops.backends.triton.device.state import drop_null, is_resumed

SMALLER = gl.constexpr(2.0**-4)  # of q that has no norm inside, so that its entries may be larger
SQUARE = gl.constexpr(gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16))
BLOCKS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, order=[2, 1, 0]))


@gluon.jit
def unshift(x):
    """Return x 2^-115 of bf16, exactly."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 c; mov.b32 c, 0x06000600; mul.rn.bf16x2 $0, $1, c; }",
        "=r,r",
        [x],
        gl.bfloat16,
        True,
        2,
    )


@gluon.jit
def smaller(x):
    """Return x SMALLER of bf16, exactly, two entries in one instruction."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 c; mov.b32 c, 0x3d803d80; mul.rn.bf16x2 $0, $1, c; }",
        "=r,r",
        [x],
        gl.bfloat16,
        True,
        2,
    )


@aggregate
class Meetings:
    """Where the partitions meet, once per chunk each."""

    kg_full: Signal  # k and g are copied
    kg_free: Signal  # `prepare` has read the places of k and g for the last time
    q_full: Signal
    v_full: Signal
    rows: Signal  # beta and the norms of a chunk are there
    tile: Signal  # all that `prepare` makes of a chunk
    done: Signal  # the scan of a chunk has ended, so that its tiles are free

    @gluon.constexpr_function
    def __init__(self, kg_full, kg_free, q_full, v_full, rows, tile, done):
        self.kg_full, self.kg_free, self.q_full, self.v_full = kg_full, kg_free, q_full, v_full
        self.rows, self.tile, self.done = rows, tile, done


@aggregate
class Buffers:
    """What lies in shared memory. The first axis counts stages; shapes are those of SHARE = 32.

    With SHARE = 8, qr and kc lie in the place of g, near and far keys in that of kc, and `walk_kda`
    has room for only one stage of kg.
    """

    q: gl.shared_memory_descriptor  # [2, 64, K]  then qr, then qg
    k: gl.shared_memory_descriptor  # [1, 64, K]
    v: gl.shared_memory_descriptor  # [1, 64, V]
    g: gl.shared_memory_descriptor  # [1, 64, K]
    kr: gl.shared_memory_descriptor  # [2, 64, K]  then w
    kc: gl.shared_memory_descriptor  # [1, 64, K]
    kg: gl.shared_memory_descriptor  # [2, 64, K]
    AP: gl.shared_memory_descriptor  # [2, 64, 64]  A' and P of each half, next to each other
    R: gl.shared_memory_descriptor  # [4, 16, 16] fp16 or fp32, inverses of blocks of 16
    o: gl.shared_memory_descriptor  # [1, 64, V]
    gamma: gl.shared_memory_descriptor  # [4, K] fp32, of each stage and half
    beta: gl.shared_memory_descriptor  # [2, 64] fp32
    norm_q: gl.shared_memory_descriptor  # [2, 64] fp32
    norm_k: gl.shared_memory_descriptor  # [2, 64] fp32

    @gluon.constexpr_function
    def __init__(self, q, k, v, g, kr, kc, kg, AP, R, o, gamma, beta, norm_q, norm_k):
        self.q, self.k, self.v, self.g, self.kr, self.kc, self.kg = q, k, v, g, kr, kc, kg
        self.AP, self.R, self.o, self.gamma, self.beta = AP, R, o, gamma, beta
        self.norm_q, self.norm_k = norm_q, norm_k


@aggregate
class Inputs:
    """The inputs that `produce` copies, except v, and the first column of this head in each."""

    q: tensor_descriptor
    k: tensor_descriptor
    g: tensor_descriptor
    q_at: gl.tensor
    k_at: gl.tensor
    g_at: gl.tensor

    @gluon.constexpr_function
    def __init__(self, q, k, g, q_at, k_at, g_at):
        self.q, self.k, self.g = q, k, g
        self.q_at, self.k_at, self.g_at = q_at, k_at, g_at


@aggregate
class Output:
    """Where o goes, and where training keeps the state that enters each half of a chunk, and u."""

    o_d: tensor_descriptor
    o: gl.tensor
    HV: gl.tensor
    scale: gl.tensor
    S: gl.tensor | gl.constexpr  # [halves, HV, V, K], or None
    u_d: tensor_descriptor | gl.constexpr  # [halves, HV, 32, V] in blocks of 64 columns, or None
    halves: Tiles | gl.constexpr  # where the halves lie in S and u, or None

    @gluon.constexpr_function
    def __init__(self, o_d, o, HV, scale, S, u_d, halves):
        self.o_d, self.o, self.HV, self.scale = o_d, o, HV, scale
        self.S = gl.constexpr(None) if S is None else S
        self.u_d = gl.constexpr(None) if u_d is None else u_d
        self.halves = gl.constexpr(None) if halves is None else halves


@aggregate
class Snapshots:
    """When the state is written on the way: after each `every` chunks, at most `columns` times."""

    every: gl.tensor
    columns: gl.tensor
    NULL: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, every, columns, NULL):
        self.every, self.columns, self.NULL = every, columns, gl.constexpr(NULL)


@gluon.jit
def quarters(x):
    """Return the four column blocks of 16 of x [64, 64], or the two of x [64, 32] twice."""
    if x.shape[1] == 32:
        x0, x1 = left_right(x)
        return x0, x1, x0, x1
    else:
        x = gl.permute(gl.reshape(x, (64, 2, 2, 16)), (0, 3, 1, 2))
        x0, x1 = gl.split(x)  # even and odd blocks
        x0, x2 = gl.split(x0)
        x1, x3 = gl.split(x1)
        return x0, x1, x2, x3


@gluon.jit
def times(x, y, EXACT: gl.constexpr):
    """Multiply blocks [4, 16, 16] fp32 of each warp, as fp16, or EXACT: each as two bf16."""
    M: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, M, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, M, 2)
    xy = gl.zeros([4, 16, 16], gl.float32, M)
    if EXACT:
        x_0, y_0 = narrow(x), narrow(y)
        x_1 = gl.convert_layout(narrow(x - widen(x_0)), A)
        y_1 = gl.convert_layout(narrow(y - widen(y_0)), B)
        x_0, y_0 = gl.convert_layout(x_0, A), gl.convert_layout(y_0, B)
        xy = mma_v2(x_0, y_0, mma_v2(x_0, y_1, mma_v2(x_1, y_0, xy)))
    else:
        xy = mma_v2(gl.convert_layout(halve(x), A), gl.convert_layout(halve(y), B), xy)
    return xy


@gluon.jit
def inverse(L, b_r, R, quarter):
    """Return the inverse of I + strict_tril(b L) for each half of a chunk, [64, 32] fp32.

    Only the two blocks [32, 32] on the diagonal of L count, and of these only what lies below the
    diagonal. L is [64, 64], or [64, 32] with these two blocks alone. `quarter` is row >> 4. Each
    warp inverts its own block [16, 16] by recursion over the levels at which two rows first differ
    (docs/maths.md), without a barrier. The lower left block of a half is R_1 (-b L_10) R_0, with
    R_0 from the other warp, by way of `R`. With `R` in fp16 products take fp16.
    """
    EXACT: gl.constexpr = R.dtype == gl.float32
    M: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8])
    x0, x1, x2, x3 = quarters(L)
    C: gl.constexpr = x0.type.layout
    q = gl.expand_dims(gl.convert_layout(quarter, gl.SliceLayout(1, C)), 1)
    less = -gl.expand_dims(gl.convert_layout(b_r, gl.SliceLayout(1, C)), 1)
    own = gl.reshape(
        gl.where(q == 0, x0, gl.where(q == 1, x1, gl.where(q == 2, x2, x3))) * less, (4, 16, 16)
    )
    left = gl.reshape(gl.where(q == 1, x0, x2) * less, (4, 16, 16))
    BLOCKS: gl.constexpr = own.type.layout
    l, l_10 = gl.convert_layout(own, M), gl.convert_layout(left, M)
    i = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, M)))
    i = gl.expand_dims(gl.expand_dims(i, 0), 2)
    j = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, M)))
    j = gl.expand_dims(gl.expand_dims(j, 0), 1)
    low = i ^ j
    l = gl.where(i > j, l, 0.0)
    r = gl.where(low == 0, 1.0, gl.where(low == 1, l, 0.0))
    for level in gl.static_range(1, 4):
        r = gl.where((low >> level) == 1, times(times(r, l, EXACT), r, EXACT), r)
    if EXACT:
        R.store(r)
    else:
        R.store(halve(r))
    y = times(r, l_10, EXACT)
    HALVES: gl.constexpr = gl.reshape(r, (2, 2, 256)).type.layout
    b = reinterpret(R, R.dtype, [2, 512], PAIR).slice(0, 256, dim=1)  # R_0 of each half
    b = gl.expand_dims(b.load(gl.SliceLayout(1, HALVES)).to(gl.float32), 1)
    second = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(2, HALVES)))
    second = gl.expand_dims(gl.expand_dims(second, 0), 2) == 1
    b = gl.convert_layout(gl.reshape(gl.where(second, b, 0.0), (4, 16, 16)), M)
    y = times(y, b, EXACT)
    y = gl.reshape(gl.convert_layout(y, BLOCKS), (64, 16))
    r = gl.reshape(gl.convert_layout(r, BLOCKS), (64, 16))
    C16: gl.constexpr = y.type.layout
    second = gl.expand_dims(gl.convert_layout(quarter, gl.SliceLayout(1, C16)) & 1, 1) == 1
    r = gl.join(gl.where(second, y, r), gl.where(second, r, 0.0))
    return gl.reshape(gl.permute(r, (0, 2, 1)), (64, 32))


@gluon.jit
def produce(of, v_d, v_at, x, on, span):
    """Copy the inputs of each chunk to shared memory, in the order of their use.

    v, which may be absent, is copied last: its buffer is free when the scan of the chunk before has
    ended.
    """
    G_BYTES: gl.constexpr = x.g.dtype.primitive_bitwidth // 8
    for n in range(span.chunks + 1):
        zero = n >> 30
        t = span.token + n * span.step
        if n < span.chunks:
            on.kg_free.wait(n - 1)
            on.kg_full.expect(n, 64 * 128 * (2 + G_BYTES))
            load_tile(of.g, [t, of.g_at], on.kg_full.at(n), x.g.index(zero))
            load_tile(of.k, [t, of.k_at], on.kg_full.at(n), x.k.index(zero))
        on.done.wait(n - 2, pred=n > 1)
        if n < span.chunks:
            on.q_full.expect(n, 64 * 128 * 2)
            load_tile(of.q, [t, of.q_at], on.q_full.at(n), x.q.index(n & 1))
        if v_d is not None:
            if n > 0:
                on.v_full.expect(n - 1, 64 * 128 * 2)
                load_tile(v_d, [t - 64, v_at], on.v_full.at(n - 1), x.v.index(zero))


@gluon.jit
def load_queries(tile, norms, E: gl.constexpr, NORM: gl.constexpr):
    """Return the rows q in `tile` as fp32 in layout E: normalised if NORM, else SMALLER."""
    if NORM:
        q = load_rows(tile, norms, E, NORM)
    else:
        q = widen(smaller(tile.load(E)))
    return q


@gluon.jit
def store_gamma(gamma, x, s, p_gamma):
    """Store gamma [2, K] of the chunk in stage s: at `p_gamma` if given, else in shared memory."""
    K: gl.constexpr = 128
    if p_gamma is None:
        reinterpret(x.gamma, gl.float32, [2, 2, K], PAIR).index(s).store(gamma)
    else:
        G: gl.constexpr = gamma.type.layout
        half = gl.arange(0, 2, gl.SliceLayout(1, G))[:, None]
        gl.store(p_gamma + (half * K + gl.arange(0, K, gl.SliceLayout(0, G))[None, :]), gamma)


@gluon.jit
def factors(x, on, gate, rate, bias, n, here, p_gamma, NORM: gl.constexpr):
    """Make kr, qr, kc, kg and gamma of chunk n, from k, q and the decay. Return three for products.

    ::

        kr = k 2^(D - c);  qr = q 2^(D - c);  kc = k 2^(c - D);  kg = kc 2^(total - c)   [64, K]
        gamma = 2^total                                                                  [2, K]

    D sums the decays from the start of a half, c = -SHIFT.
    """
    E: gl.constexpr = gl.BlockedLayout([32, 2], [1, 32], [2, 2], [1, 0])
    K: gl.constexpr = 128
    s, zero = n & 1, n >> 30
    q_b, k_b, kr, kc, kg = (
        x.q.index(s),
        x.k.index(zero),
        x.kr.index(s),
        x.kc.index(zero),
        x.kg.index(s),
    )
    on.kg_full.wait(n)
    on.rows.wait(n)
    fill_decays(x.g.index(zero), here, gate)
    fill_rows(k_b, here, 0.0, ROWS_4)
    g = decay_rows(x.g.index(zero), bias, rate, gate, E)
    D, total = growth(g, 2, E)
    k = load_rows(k_b, x.norm_k.index(s), E, NORM)
    on.q_full.wait(n)  # and so the scan of chunk n - 2, which has read kr and kg, is over
    kr.store(narrow(k * D))
    k = k * rcp(D)
    kc.store(narrow(k))
    rest = gl.expand_dims(ex2(total * LOG2E + SHIFT), 1)
    k = gl.convert_layout(gl.reshape(gl.reshape(k, (2, 32, K)) * rest, (64, K)), E)
    kg.store(narrow(k))
    fill_rows(q_b, here, 0.0, ROWS_4)
    q = load_queries(q_b, x.norm_q.index(s), E, NORM)
    q_b.store(narrow(q * D))
    store_gamma(ex2(total * LOG2E), x, s, p_gamma)
    fence_async_shared()
    barrier()
    on.kg_free.arrive(n)
    return q_b, kr, kc


@gluon.jit
def block_factors(x, on, gate, rate, bias, n, here, p_gamma, NORM: gl.constexpr):
    """Make the factors of chunk n for decays without a bound. Return five tiles for products.

    They are the rows qr and kr, and the own, near and far keys kc, ke and kf of `gluon_blocks`. kr
    takes the place of k, and qr and kc that of g. x.kr and x.q get 2^-c k and 2^-c q, decayed from
    the start of the half, from which `make_w` makes w and qg.
    """
    E: gl.constexpr = gl.BlockedLayout([32, 2], [1, 32], [2, 2], [1, 0])
    K: gl.constexpr = 128
    s, zero = n & 1, n >> 30
    q_b, kr = x.q.index(s), x.k.index(zero)
    KG_STAGES: gl.constexpr = x.kg.shape[0]
    own = reinterpret(x.g, x.q.dtype, [2, 64, K], x.q.layout)
    qr, kc, ke, kf = own.index(zero), own.index(1 + zero), x.kc.index(zero), x.kc.index(1 + zero)
    on.kg_full.wait(n)
    fill_decays(x.g.index(zero), here, gate)
    g = decay_rows(x.g.index(zero), bias, rate, gate, E)
    D, total, early, late, further, gamma = block_decays(g, E)
    on.rows.wait(n)  # as late as possible, because norms are made only once k is copied
    on.q_full.wait(n)  # and so the tiles of chunk n - 2 are free, scanned or copied out
    fill_rows(kr, here, 0.0, ROWS_4)
    fill_rows(q_b, here, 0.0, ROWS_4)
    q = load_queries(q_b, x.norm_q.index(s), E, NORM)
    q = q * D
    qr.store(narrow(q))
    q_b.store(narrow(by_block(q, early, E)))
    k = load_rows(kr, x.norm_k.index(s), E, NORM)
    rows = k * D
    kr.store(narrow(rows))
    x.kr.index(s).store(narrow(by_block(rows, early, E)))
    k = k * rcp(D)
    kc.store(narrow(k))
    k = by_block(k, total, E)
    store_gamma(gamma, x, s, p_gamma)
    if KG_STAGES == 1:
        on.done.wait(n - 1)  # the scan of chunk n - 1 reads the only stage of kg
    x.kg.index(s if KG_STAGES == 2 else zero).store(narrow(by_block(k, late, E)))
    k = k * LESS
    ke.store(narrow(k))
    kf.store(narrow(by_block(repeated(k, E), further, E)))
    fence_async_shared()
    barrier()
    return qr, kr, kc, ke, kf


@gluon.jit
def make_w(kr, AP, q_b):
    """Make w = -2^c A' kr in the place of kr, qg = 2^c qr in that of qr, [64, K], c = -SHIFT."""
    N: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16])
    none = gl.zeros([128, 32], gl.float32, N)
    kr0, kr1 = kr.slice(0, 32, dim=0).permute((1, 0)), kr.slice(32, 32, dim=0).permute((1, 0))
    A0 = AP.slice(0, 32, dim=0).slice(0, 32, dim=1)
    A1 = AP.slice(32, 32, dim=0).slice(0, 32, dim=1)
    w0 = product(kr0, A0.permute((1, 0)), none)
    w1 = product(kr1, A1.permute((1, 0)), none)
    q_b.store(unshift(q_b.load(ROWS_4)))
    w0, w1 = wait_products(0, deps=(w0, w1))
    barrier()  # all warps have read kr
    kr0.store(narrow(w0 * -UNSHIFT))
    kr1.store(narrow(w1 * -UNSHIFT))
    fence_async_shared()
    barrier()


@aggregate
class Left:
    """Where the tiles of all chunks lie between the kernel that prepares and the one that scans."""

    wqk: tma.tensor_descriptor  # [tiles * 192, K]: 64 rows of each of w, qg and kg
    gamma: gl.tensor  # [tiles, 2, K] fp32
    ready: gl.tensor  # [tiles] int32, 1 once the tile is there

    @gluon.constexpr_function
    def __init__(self, wqk, gamma, ready):
        self.wqk, self.gamma, self.ready = wqk, gamma, ready


@gluon.jit
def wait_written(OUTSTANDING: gl.constexpr):
    """Wait until other kernels may read what stores have written, but the last OUTSTANDING."""
    NONE: gl.constexpr = "cp.async.bulk.wait_group 0; fence.proxy.async; mov.b32 $0, 0;"
    FOUR: gl.constexpr = "cp.async.bulk.wait_group 4; fence.proxy.async; mov.b32 $0, 0;"
    WAIT: gl.constexpr = FOUR if OUTSTANDING == 4 else NONE
    gl.inline_asm_elementwise(WAIT, "=r", [], gl.int32, False, 1)


@gluon.jit
def tell(ready):
    """Say that a tile is written. All warps of the partition must have passed a barrier."""
    gl.atomic_xchg(ready, 1, sem="release", scope="gpu")


@gluon.jit
def leave(x, on, left, n, tiles):
    """Copy the tiles of chunk n to global memory, and tell that those of chunk n - 1 are there."""
    s, row = n & 1, tiles.at(n) * 192
    store_tile(left.wqk, [row, 0], x.kr.index(s))
    store_tile(left.wqk, [row + 64, 0], x.q.index(s))
    store_tile(left.wqk, [row + 128, 0], x.kg.index(s))
    wait_written(4)  # all but these three, and A' and P
    barrier()
    if n > 0:
        tell(left.ready + tiles.at(n - 1))
        on.done.arrive(n - 1)


@gluon.jit
def prepare(x, on, span, gate, AP_d, left, tiles, NORM: gl.constexpr, SHARE: gl.constexpr):
    """Make the tiles of each chunk that the scan needs; halves of 32 rows are chunks of their own::

        L = kr kc^T;   P = tril(qr kc^T);   A' = (I + strict_tril(beta L))^-1 beta     [32, 32]

    Training keeps A' and P in `AP_d`. If another kernel scans, `left` is where all tiles go.
    """
    E: gl.constexpr = gl.BlockedLayout([32, 2], [1, 32], [2, 2], [1, 0])
    Q: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    H: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16])
    QR: gl.constexpr = gl.SliceLayout(1, Q)
    HC: gl.constexpr = gl.SliceLayout(0, H)
    none_q = gl.zeros([64, 64], gl.float32, Q)
    rate = load_rate(gate, span.i_h)
    bias = load_bias(gate, span.i_h, gl.arange(0, 128, gl.SliceLayout(0, E)), 128)[None, :]
    for n in range(span.chunks):
        s, zero = n & 1, n >> 30
        i_tile = tiles.at(n)
        here, p_gamma = span.length - n * span.step, None
        if left is not None:
            p_gamma = left.gamma + i_tile.to(gl.int64) * 256
        if SHARE == 32:
            qr, kr, kc = factors(x, on, gate, rate, bias, n, here, p_gamma, NORM)
            L = product(kr, kc.permute((1, 0)), none_q)
            P = product(qr, kc.permute((1, 0)), none_q)
        else:
            qr, kr, kc, ke, kf = block_factors(x, on, gate, rate, bias, n, here, p_gamma, NORM)
            L = product(kr, kc.permute((1, 0)), none_q)
            L_1 = product(kr, ke.permute((1, 0)), none_q)
            L_2 = product(kr, kf.permute((1, 0)), none_q)
        AP, b_s = x.AP.index(s), x.beta.index(s)
        # The unknown zero is on rows alone: with one on columns, masks of blocks cost instructions.
        quarter = (gl.arange(0, 64, QR) >> 4) + zero
        row = gl.arange(0, 64, gl.SliceLayout(1, H))[:, None] + zero
        column = gl.arange(0, 32, HC)[None, :]
        if SHARE == 32:
            L = wait_products(1, deps=(L,))
        else:
            L, L_1, L_2 = wait_products(0, deps=(L, L_1, L_2))
            L = join_scores(L, L_1, L_2, row)
        R = gl.convert_layout(inverse(L, b_s.load(QR), x.R, quarter), H)
        if SHARE == 8:  # begun after the inverse, which needs the registers of these products
            P = product(qr, kc.permute((1, 0)), none_q)
            P_1 = product(qr, ke.permute((1, 0)), none_q)
            P_2 = product(qr, kf.permute((1, 0)), none_q)
        b_0, b_1 = b_s.slice(0, 32).load(HC)[None, :], b_s.slice(32, 32).load(HC)[None, :]
        if AP_d is not None and left is None:
            tma.store_wait(1)  # of chunk n - 2, which has left from the same place
        AP.slice(0, 32, dim=1).store(narrow(R * gl.where(row < 32, b_0, b_1)))
        if SHARE == 32:
            P = wait_products(0, deps=(P,))
            P_0, P_1 = left_right(P)
            P = gl.where(row < 32, gl.convert_layout(P_0, H), gl.convert_layout(P_1, H))
        else:
            P, P_1, P_2 = wait_products(0, deps=(P, P_1, P_2))
            P = join_scores(P, P_1, P_2, row)
        behind, same = (column >> 4) < ((row >> 4) & 1), (column >> 4) == ((row >> 4) & 1)
        P = gl.where(behind | (same & ((row & 15) >= (column & 15))), P, 0.0)
        AP.slice(32, 32, dim=1).store(narrow(P))
        fence_async_shared()
        barrier()
        if AP_d is not None:
            store_tile(AP_d, [i_tile * 64, 0], AP)
        if SHARE == 8:
            on.kg_free.arrive(n)
            qr, kr = x.q.index(s), x.kr.index(s)
        make_w(kr, AP, qr)
        if left is not None:
            leave(x, on, left, n, tiles)
        on.tile.arrive(n)
    if left is not None:
        if span.chunks > 0:
            wait_written(0)
            barrier()
            tell(left.ready + tiles.at(span.chunks - 1))
    if AP_d is not None and left is None:
        tma.store_wait(0)


@gluon.jit
def load_beta(beta, span, n, B: gl.constexpr):
    """Return beta of chunk n as it is given, [64] fp32; 1 without it, 0 past the sequence."""
    row = n * span.step + gl.arange(0, 64, B)
    m_b = row < span.length
    if beta.first is not None:
        b = gl.load(beta.first + row.to(gl.int64) * beta.step, mask=m_b, other=0.0).to(gl.float32)
    else:
        b = gl.where(m_b, 1.0, 0.0)
    return b


@gluon.jit
def inverse_norms(x, n, here):
    """Write the inverse norms of rows x to n, zeros from row `here` on."""
    x = widen(x.load(ROWS))
    row = gl.arange(0, 64, gl.SliceLayout(1, ROWS))
    n.store(gl.where(row < here, gl.rsqrt(gl.sum(x * x, 1) + 1e-6), 0.0))


@gluon.jit
def make_rows(x, on, b, n, span, flags, NORM: gl.constexpr):
    """Write beta and the norms of chunk n for `prepare`, zeros of rows that are no tokens."""
    B: gl.constexpr = b.type.layout
    s = n & 1
    if flags.SIGMOID:
        b = rcp(1.0 + ex2(b * -LOG2E))
        if flags.NEG_EIGVAL:
            b = 2.0 * b
        b = gl.where(n * span.step + gl.arange(0, 64, B) < span.length, b, 0.0)
    x.beta.index(s).store(b)
    if NORM:
        on.kg_full.wait(n, pred=span.chunks > 0)
        inverse_norms(x.k.index(n >> 30), x.norm_k.index(s), span.length - n * span.step)
        on.q_full.wait(n, pred=span.chunks > 0)
        inverse_norms(x.q.index(s), x.norm_q.index(s), span.length - n * span.step)
    barrier()
    on.rows.arrive(n)


@gluon.jit
def scan(x, on, span, to, beta, states, snapshots, resumed, flags, NORM: gl.constexpr):
    """Carry S, held as [V, K], through the chunks; each half of a chunk in turn::

        u = A' v + w S;   o = scale (qg S + P u);   S <- gamma S + kg^T u

    In Triton 3.6 `mbarrier.arrive` is one thread's, and each warp waits for its own products: so
    arrivals follow a barrier that follows the wait.
    """
    K: gl.constexpr = 128
    V: gl.constexpr = 128
    W: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, K, 16])
    N32: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, 32, 16])
    WA: gl.constexpr = gl.DotOperandLayout(0, W, 2)
    NA: gl.constexpr = gl.DotOperandLayout(0, N32, 2)
    NC: gl.constexpr = gl.SliceLayout(0, N32)
    B: gl.constexpr = gl.BlockedLayout([1], [32], [8], [0])
    S = gl.zeros([V, K], gl.float32, W)
    slot = span.i_n
    if states.slots is not None:
        slot = gl.load(states.slots + span.i_n, mask=span.live, other=0)
    if states.initial.pointer is not None:
        if is_resumed(resumed, span.i_n, span.live):
            p_s = state_at(states.initial.pointer, states.initial.strides, slot, span.i_h, W)
            S = gl.load(p_s).to(gl.float32)
    none = gl.zeros([V, 32], gl.float32, N32)
    b = load_beta(beta, span, 0, B)
    make_rows(x, on, b, 0, span, flags, NORM)
    b = load_beta(beta, span, 1, B)
    for n in range(span.chunks):
        s, zero = n & 1, n >> 30
        if n + 1 < span.chunks:
            make_rows(x, on, b, n + 1, span, flags, NORM)
        b = load_beta(beta, span, n + 2, B)
        here = span.length - n * 64
        q_b, kg, AP, v_b, o_b = (
            x.q.index(s),
            x.kg.index(s if x.kg.shape[0] == 2 else zero),
            x.AP.index(s),
            x.v.index((n & (on.v_full.slots - 1)) + zero),
            x.o.index(zero),
        )
        on.v_full.wait(n)
        fill_rows(v_b, here, 0.0, ROWS)
        on.tile.wait(n)
        w_b = x.kr.index(s)
        for h in gl.static_range(2):
            b_S = gl.convert_layout(narrow(S), NA)
            if to.S is not None:
                keep_state(b_S, to, 2 * n + h, here > h * 32)
            v = v_b.slice(h * 32, 32, dim=0).permute((1, 0)).load(N32)
            AP_h = AP.slice(h * 32, 32, dim=0)
            b_h = x.beta.index(s).slice(h * 32, 32).load(NC)
            # what rounding has lost on the diagonal of A'
            u = widen(v) * (b_h - b_h.to(gl.bfloat16).to(gl.float32))[None, :]
            u = warpgroup_mma(
                gl.convert_layout(v, NA), AP_h.slice(0, 32, dim=1).permute((1, 0)), u, is_async=True
            )
            w_t = w_b.slice(h * 32, 32, dim=0).permute((1, 0))
            u = warpgroup_mma(b_S, w_t, u, is_async=True)
            # waits for nothing: it tells ptxas that no product in flight writes S
            S = wait_products(2, deps=(S,))
            S = S * x.gamma.index(2 * s + h).load(gl.SliceLayout(0, W))[None, :]
            u = wait_products(0, deps=(u,))
            b_u = narrow(u)
            if to.u_d is not None:  # in the place of v, of which each warp has read its part
                v_b.slice(h * 32, 32, dim=0).permute((1, 0)).store(b_u)
            S = warpgroup_mma(
                gl.convert_layout(b_u, WA), kg.slice(h * 32, 32, dim=0), S, is_async=True
            )
            q_t = q_b.slice(h * 32, 32, dim=0).permute((1, 0))
            b_o = product(b_S, q_t, none)
            P_t = AP_h.slice(32, 32, dim=1).permute((1, 0))
            b_o = warpgroup_mma(gl.convert_layout(b_u, NA), P_t, b_o, is_async=True)
            if h == 0:
                tma.store_wait(0)
            S, b_o = wait_products(0, deps=(S, b_o))
            o_b.slice(h * 32, 32, dim=0).permute((1, 0)).store(narrow(b_o * to.scale))
        fence_async_shared()
        barrier()
        if to.u_d is not None:
            keep_u(v_b, to, n, here)
        on.done.arrive(n)
        # a chunk with rows that are no tokens is written below; here it is out of range
        store_tile(to.o_d, [gl.where(here < 64, FAR, span.token + n * 64), span.i_h * V], o_b)
        if states.into.pointer is not None:
            snapshot(S, states, snapshots, span, n + 1, W)
    if states.final.pointer is not None:
        if span.live:
            p_s = state_at(states.final.pointer, states.final.strides, slot, span.i_h, W)
            gl.store(p_s, S.to(states.final.pointer.dtype.element_ty))
    tma.store_wait(0)
    write_rest(x, span, to.o, to.HV)


@gluon.jit
def keep_state(b_S, to, half, there):
    """Keep b_S [V, K] bf16, the state that enters a half of a chunk, if there is such a half.

    A product leaves two neighbouring columns of a row in each thread. C gives each thread eight, so
    that it stores 16 bytes at once. The columns move inside a warp, through shared memory.
    """
    C: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0]],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0], [64, 0]],
        [],
        [128, 32],
    )
    row = gl.arange(0, 128, gl.SliceLayout(1, C))[:, None]
    p_S = to.S + to.halves.at(half).to(gl.int64) * (128 * 128)
    p_S = p_S + (row * 128 + gl.arange(0, 32, gl.SliceLayout(0, C))[None, :])
    left, right = left_right(b_S)
    S_0, S_1 = left_right(left)
    S_2, S_3 = left_right(right)
    gl.store(p_S, gl.convert_layout(S_0, C), mask=there)
    gl.store(p_S + 32, gl.convert_layout(S_1, C), mask=there)
    gl.store(p_S + 64, gl.convert_layout(S_2, C), mask=there)
    gl.store(p_S + 96, gl.convert_layout(S_3, C), mask=there)


@gluon.jit
def keep_u(u_b, to, n, here):
    """Copy u [64, V] of chunk n from shared memory to where it is kept, and wait for the copy."""
    for h in gl.static_range(2):
        # the second half may have no tokens: then it has no place, and is out of range
        row = gl.where(here > h * 32, to.halves.at(2 * n + h) * 32, FAR)
        for i in gl.static_range(2):
            part = u_b.slice(h * 32, 32, dim=0).slice(i * 64, 64, dim=1)
            store_tile(to.u_d, [row, i * 64], part)
    tma.store_wait(0)
    barrier()


@gluon.jit
def snapshot(S, states, snapshots, span, chunk, W: gl.constexpr):
    """Write the state after `chunk` chunks to its snapshot's slot, if one is due."""
    into, every = states.into, snapshots.every
    pool = states.final if states.final.pointer is not None else states.initial
    due = (chunk % every == 0) & (span.length >= chunk * 64)
    due = due & (chunk // every <= snapshots.columns)
    p_slot = into.pointer + span.i_n.to(gl.int64) * into.strides[0]
    slot = gl.load(p_slot + (chunk // every - 1).to(gl.int64) * into.strides[1], mask=due, other=-1)
    slot = drop_null(slot, snapshots.NULL)
    if slot >= 0:
        p_s = state_at(pool.pointer, pool.strides, slot, span.i_h, W)
        gl.store(p_s, S.to(pool.pointer.dtype.element_ty))


@gluon.jit
def write_rest(x, span, o, HV):
    """Write o of a last chunk with fewer than 64 tokens, or zeros of tokens that are not walked."""
    row = gl.arange(0, 64, gl.SliceLayout(1, ROWS))
    p_o = o + (span.token.to(gl.int64) * HV + span.i_h) * 128
    p_o = p_o + (row * (HV * 128))[:, None] + gl.arange(0, 128, gl.SliceLayout(0, ROWS))[None, :]
    if span.chunks > 0:
        here = span.length - (span.chunks - 1) * 64
        if here < 64:
            b_o = x.o.index(0).load(ROWS)
            p_o = p_o + ((span.chunks - 1) * 64).to(gl.int64) * (HV * 128)
            gl.store(p_o, b_o, mask=(row < here)[:, None])
    else:
        zeros = gl.zeros([64, 128], gl.bfloat16, ROWS)
        for first in range(0, span.length, 64):
            gl.store(
                p_o + first.to(gl.int64) * (HV * 128),  # type: ignore[attr-defined]
                zeros,
                mask=(first + row < span.length)[:, None],
            )


@gluon.jit(
    do_not_specialize=[
        "beta_b",
        "beta_t",
        "beta_h",
        "q_h",
        "k_h",
        "v_h",
        "g_h",
        "N",
        "T",
        "H",
        "HV",
        "every",
        "columns",
        "scale",
    ],
    do_not_specialize_on_alignment=["resumed"],
)
def walk_kda(
    q_d,
    k_d,
    v_d,
    g_d,
    o_d,
    AP_d,
    S,
    u_d,
    o,
    beta,
    gate,
    states,
    cu_seqlens,
    beta_b,
    beta_t,
    beta_h,
    q_h,
    k_h,
    v_h,
    g_h,
    N,
    T,
    H,
    HV,
    every,
    columns,
    scale,
    flags,
    resumed,
    INVERSE: gl.constexpr,
    REGISTERS: gl.constexpr,
    SHARE: gl.constexpr,
    NULL: gl.constexpr,
):
    """Run KDA over one sequence and head, chunk after chunk, with S [K, V] fp32 in registers.

    A chunk is two halves of 32 rows, each a chunk of its own (docs/maths.md, chunk form)::

        kr = k 2^(D - c);   kc = k 2^(c - D);   qr = q 2^(D - c);   kg = kc 2^(total - c)   [32, K]
        P = tril(qr kc^T);  A' = (I + strict_tril(beta kr kc^T))^-1 beta                    [32, 32]
        u = A' v - 2^c A' kr S;   o = scale (2^c qr S + P u);   S <- 2^total S + kg^T u

    D sums the log decays in base 2 from the start of the half, total over all of it. With decays of
    at least -5, c = -115 keeps all factors in the range of bf16. `Buffers` and `Meetings` say what
    lies in shared memory, and who waits for whom. Training passes AP_d, to which A' and P go. It
    may pass S and u_d, to which the state that enters each half and u go, as `states_kda` makes
    them.

    These factors are those of SHARE = 32. With SHARE = 8, for decays without a bound, only 8 rows
    share an anchor (`gluon_blocks`), and tiles lie in other places (`block_factors`).
    """
    TYPE: gl.constexpr = q_d.dtype
    span = find_span(cu_seqlens, states.slots, N, T, HV, 1, NULL)
    i_g = span.i_h // (HV // H)
    R_TYPE: gl.constexpr = gl.float16 if INVERSE == "fp16" else gl.float32
    G_STAGES: gl.constexpr = 32 // g_d.dtype.primitive_bitwidth if SHARE == 8 else 1
    KC_STAGES: gl.constexpr = 2 if SHARE == 8 else 1
    KG_STAGES: gl.constexpr = 1 if SHARE == 8 else 2
    x = Buffers(
        gl.allocate_shared_memory(TYPE, [2, 64, 128], q_d.layout),
        gl.allocate_shared_memory(TYPE, [1, 64, 128], q_d.layout),
        gl.allocate_shared_memory(TYPE, [1, 64, 128], q_d.layout),
        gl.allocate_shared_memory(g_d.dtype, [G_STAGES, 64, 128], g_d.layout),
        gl.allocate_shared_memory(TYPE, [2, 64, 128], q_d.layout),
        gl.allocate_shared_memory(TYPE, [KC_STAGES, 64, 128], q_d.layout),
        gl.allocate_shared_memory(TYPE, [KG_STAGES, 64, 128], q_d.layout),
        gl.allocate_shared_memory(TYPE, [2, 64, 64], SQUARE),
        gl.allocate_shared_memory(R_TYPE, [4, 16, 16], BLOCKS),
        gl.allocate_shared_memory(TYPE, [1, 64, 128], o_d.layout),
        gl.allocate_shared_memory(gl.float32, [4, 128], FLAT),
        gl.allocate_shared_memory(gl.float32, [2, 64], FLAT),
        gl.allocate_shared_memory(gl.float32, [2, 64], FLAT),
        gl.allocate_shared_memory(gl.float32, [2, 64], FLAT),
    )
    on = Meetings(signal(1), signal(1), signal(2), signal(1), signal(2), signal(2), signal(1))
    fence_async_shared()
    barrier()
    if beta is not None:
        beta = from_span(beta, span, cu_seqlens, T, beta_b, beta_t, beta_h)
    tiles = find_tiles(span, cu_seqlens, T, HV, 64)
    of = Inputs(q_d, k_d, g_d, i_g * q_h, i_g * k_h, span.i_h * g_h)
    halves = find_tiles(span, cu_seqlens, T, HV, 32) if S is not None else None
    to, beta = Output(o_d, o, HV, scale, S, u_d, halves), Column(beta, beta_t)
    snapshots = Snapshots(every, columns, NULL)
    gl.warp_specialize(
        [
            (prepare, (x, on, span, gate, AP_d, None, tiles, flags.L2NORM, SHARE)),
            (scan, (x, on, span, to, beta, states, snapshots, resumed, flags, flags.L2NORM)),
            (produce, (of, v_d, span.i_h * v_h, x, on, span)),
        ],
        [8, 1],
        [REGISTERS, 24],
    )
