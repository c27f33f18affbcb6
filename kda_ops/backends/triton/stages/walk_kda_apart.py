"""Walk KDA's forward in two kernels, for few sequences and heads, in Gluon for Hopper.

A program of `scan_walk` takes one sequence and head. The chunks of each are prepared by SHARES
programs of `prepare_walk`, at the same time, on multiprocessors that no scan occupies. Both kernels
consist of the partitions of `walk_kda`. Only the way of a tile from `prepare` to `scan` differs: it
goes through global memory instead of shared memory, rounded to the same type. So the bits are those
of `walk_kda`.

`scan_walk` begins once all programs of `prepare_walk` have begun, and waits for one tile after
another (`Left.ready`). `prepare_walk` never waits for `scan_walk`, so the two cannot hang.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from kda_ops.backends.triton.device.channels import Column, find_span, find_tiles, from_span, signal
from kda_ops.backends.triton.device.gluon_names import barrier, load_tile, reinterpret
from kda_ops.backends.triton.device.gluon_tile import FLAT
from kda_ops.backends.triton.stages.walk_kda import (
    BLOCKS,
    SQUARE,
    Buffers,
    Inputs,
    Left,
    Meetings,
    Output,
    Snapshots,
    load_beta,
    make_rows,
    prepare,
    produce,
    scan,
)


@gluon.jit
def let_next_begin():
    """Let the next kernel begin, once all programs of this one have called this."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.b32 $0, 0;", "=r", [], gl.int32, False, 1
    )


@gluon.jit
def wait_ready(ready):
    """Wait until a tile is written, and order later copies after that.

    Return 0. A caller adds it to the index of the tile, so that no read moves before the wait.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; WAIT: ld.acquire.gpu.global.b32 $0, [$1]; setp.eq.s32 p, $0, 0; "
        "@p bra WAIT; fence.proxy.async; sub.s32 $0, $0, 1; }",
        "=r,l",
        [ready],
        gl.int32,
        False,
        1,
    )


@gluon.jit
def rows(x, on, span, beta, flags):
    """Write beta and the norms of each chunk, which `scan` does in the walk."""
    B: gl.constexpr = gl.BlockedLayout([1], [32], [8], [0])
    b = load_beta(beta, span, 0, B)
    for n in range(span.chunks):
        on.tile.wait(n - 2)  # `prepare` has read what lies in the same place
        make_rows(x, on, b, n, span, flags, flags.L2NORM)
        b = load_beta(beta, span, n + 1, B)


@gluon.jit
def feed(x, on, span, v_d, v_at, AP_d, left, tiles):
    """Copy v and the tiles of each chunk to shared memory, once `prepare_walk` has written them."""
    C: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    for n in range(span.chunks):
        s, i_tile = n & 1, tiles.at(n)
        i_tile += wait_ready(left.ready + i_tile)
        gamma = gl.load(left.gamma + i_tile.to(gl.int64) * 256 + gl.arange(0, 256, C))
        on.done.wait(n - 2)
        on.tile.expect(n, 64 * (3 * 128 + 64) * 2)
        load_tile(left.wqk, [i_tile * 192, 0], on.tile.at(n), x.kr.index(s))
        load_tile(AP_d, [i_tile * 64, 0], on.tile.at(n), x.AP.index(s))
        load_tile(left.wqk, [i_tile * 192 + 128, 0], on.tile.at(n), x.kg.index(s))
        load_tile(left.wqk, [i_tile * 192 + 64, 0], on.tile.at(n), x.q.index(s))
        on.v_full.expect(n, 64 * 128 * 2)
        load_tile(v_d, [span.token + n * 64, v_at], on.v_full.at(n), x.v.index(s))
        reinterpret(x.gamma, gl.float32, [2, 256], FLAT).index(s).store(gamma)
        barrier()
        on.v_full.arrive(n)


@gluon.jit(
    do_not_specialize=["beta_b", "beta_t", "beta_h", "q_h", "k_h", "g_h", "N", "T", "H", "HV"]
)
def prepare_walk(
    q_d,
    k_d,
    g_d,
    AP_d,
    wqk_d,
    gamma,
    ready,
    beta,
    gate,
    slots,
    cu_seqlens,
    beta_b,
    beta_t,
    beta_h,
    q_h,
    k_h,
    g_h,
    N,
    T,
    H,
    HV,
    flags,
    INVERSE: gl.constexpr,
    SHARE: gl.constexpr,
    SHARES: gl.constexpr,
    NULL: gl.constexpr,
):
    """Prepare every SHARES-th chunk of one sequence and head; `prepare` says what that makes."""
    let_next_begin()
    TYPE: gl.constexpr = q_d.dtype
    span = find_span(cu_seqlens, slots, N, T, HV, SHARES, NULL)
    i_g = span.i_h // (HV // H)
    R_TYPE: gl.constexpr = gl.float16 if INVERSE == "fp16" else gl.float32
    G_STAGES: gl.constexpr = 32 // g_d.dtype.primitive_bitwidth if SHARE == 8 else 1
    KC_STAGES: gl.constexpr = 2 if SHARE == 8 else 1
    q = gl.allocate_shared_memory(TYPE, [2, 64, 128], q_d.layout)
    ones = gl.allocate_shared_memory(gl.float32, [2, 64], FLAT)
    x = Buffers(
        q,
        gl.allocate_shared_memory(TYPE, [1, 64, 128], q_d.layout),
        q,  # in the places of v, o and gamma, which are not used here
        gl.allocate_shared_memory(g_d.dtype, [G_STAGES, 64, 128], g_d.layout),
        gl.allocate_shared_memory(TYPE, [2, 64, 128], q_d.layout),
        gl.allocate_shared_memory(TYPE, [KC_STAGES, 64, 128], q_d.layout),
        gl.allocate_shared_memory(TYPE, [2, 64, 128], q_d.layout),
        gl.allocate_shared_memory(TYPE, [2, 64, 64], SQUARE),
        gl.allocate_shared_memory(R_TYPE, [4, 16, 16], BLOCKS),
        q,
        ones,
        ones,
        gl.allocate_shared_memory(gl.float32, [2, 64], FLAT),
        gl.allocate_shared_memory(gl.float32, [2, 64], FLAT),
    )
    on = Meetings(signal(1), signal(1), signal(2), signal(1), signal(2), signal(2), signal(1))
    fence_async_shared()
    barrier()
    if beta is not None:
        beta = from_span(beta, span, cu_seqlens, T, beta_b, beta_t, beta_h)
    tiles = find_tiles(span, cu_seqlens, T, HV, 64)
    left = Left(wqk_d, gamma, ready)
    of = Inputs(q_d, k_d, g_d, i_g * q_h, i_g * k_h, span.i_h * g_h)
    gl.warp_specialize(
        [
            (prepare, (x, on, span, gate, AP_d, left, tiles, flags.L2NORM, SHARE)),
            (rows, (x, on, span, Column(beta, beta_t), flags)),
            (produce, (of, None, 0, x, on, span)),
        ],
        [8, 1],
        [64, 24],
    )


@gluon.jit(
    do_not_specialize=[
        "beta_b",
        "beta_t",
        "beta_h",
        "v_h",
        "N",
        "T",
        "HV",
        "every",
        "columns",
        "scale",
    ],
    do_not_specialize_on_alignment=["resumed"],
)
def scan_walk(
    v_d,
    o_d,
    AP_d,
    wqk_d,
    gamma,
    ready,
    S,
    u_d,
    o,
    beta,
    states,
    cu_seqlens,
    beta_b,
    beta_t,
    beta_h,
    v_h,
    N,
    T,
    HV,
    every,
    columns,
    scale,
    flags,
    resumed,
    NULL: gl.constexpr,
):
    """Scan the chunks of one sequence and head that `prepare_walk` prepares; `scan` says how."""
    TYPE: gl.constexpr = v_d.dtype
    span = find_span(cu_seqlens, states.slots, N, T, HV, 1, NULL)
    AP = gl.allocate_shared_memory(TYPE, [2, 64, 64], SQUARE)
    ones = gl.allocate_shared_memory(gl.float32, [2, 64], FLAT)
    x = Buffers(
        gl.allocate_shared_memory(TYPE, [2, 64, 128], wqk_d.layout),
        AP,  # in the places of k, g, kc, R and the norms, which are not used here
        gl.allocate_shared_memory(TYPE, [2, 64, 128], v_d.layout),
        AP,
        gl.allocate_shared_memory(TYPE, [2, 64, 128], wqk_d.layout),
        AP,
        gl.allocate_shared_memory(TYPE, [2, 64, 128], wqk_d.layout),
        AP,
        AP,
        gl.allocate_shared_memory(TYPE, [1, 64, 128], o_d.layout),
        gl.allocate_shared_memory(gl.float32, [4, 128], FLAT),
        ones,
        ones,
        ones,
    )
    # `v_full` also signals gamma. `done` has two slots, because the scan of chunk n may end before
    # `feed` waits for that of chunk n - 1.
    on = Meetings(signal(1), signal(1), signal(2), signal(2, 2), signal(2), signal(2), signal(2))
    fence_async_shared()
    barrier()
    if beta is not None:
        beta = from_span(beta, span, cu_seqlens, T, beta_b, beta_t, beta_h)
    tiles = find_tiles(span, cu_seqlens, T, HV, 64)
    left = Left(wqk_d, gamma, ready)
    halves = find_tiles(span, cu_seqlens, T, HV, 32) if S is not None else None
    to, beta = Output(o_d, o, HV, scale, S, u_d, halves), Column(beta, beta_t)
    snapshots = Snapshots(every, columns, NULL)
    gl.warp_specialize(
        [
            (feed, (x, on, span, v_d, span.i_h * v_h, AP_d, left, tiles)),
            (scan, (x, on, span, to, beta, states, snapshots, resumed, flags, False)),
        ],
        [8],
        [192],
    )
