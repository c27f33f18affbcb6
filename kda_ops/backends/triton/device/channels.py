"""Where the partitions of a Gluon kernel meet, and which sequence and head a program walks."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from kda_ops.backends.triton.device.gluon_names import aggregate
from kda_ops.backends.triton.device.sequence import find_sequence
from kda_ops.backends.triton.device.state import drop_null


@aggregate
class Signal:
    """An mbarrier at which partitions meet once per chunk; phases count from 0.

    With one slot, the side that arrives must not be two phases ahead of the side that waits.
    """

    bars: gl.shared_memory_descriptor
    slots: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, bars, slots):
        self.bars = bars
        self.slots = gl.constexpr(slots)

    @gluon.jit
    def at(self, n):
        """Return the barrier of phase n."""
        return self.bars.index(n & (self.slots - 1))

    @gluon.jit
    def wait(self, n, pred=True):
        """Wait until phase n is complete; phase -1 is, from the start."""
        mbarrier.wait(self.at(n), (n >> (self.slots - 1)) & 1, pred=pred)

    @gluon.jit
    def arrive(self, n):
        """Arrive at phase n. All warps of the partition must have passed a barrier."""
        mbarrier.arrive(self.at(n), count=1)

    @gluon.jit
    def expect(self, n, size):
        """Let copies of `size` bytes complete phase n."""
        mbarrier.expect(self.at(n), size)


@gluon.jit
def signal(SLOTS: gl.constexpr, ARRIVALS: gl.constexpr = 1):
    """Allocate a signal, each of whose phases takes ARRIVALS to complete."""
    bars = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(bars.index(i), count=ARRIVALS)
    return Signal(bars, SLOTS)


@aggregate
class Span:
    """The sequence and head of a program, and which chunks are its own."""

    i_n: gl.tensor
    i_h: gl.tensor
    run: gl.tensor  # the number of its run, or that of the sequence
    skipped: gl.tensor  # tokens of the sequence before its chunks
    token: gl.tensor  # the first token of its chunks
    length: gl.tensor  # how many tokens there are from that one on
    live: gl.tensor  # whether it has a state: there is such a sequence, and it has a slot
    chunks: gl.tensor  # how many are its own, 0 if it is not live
    step: gl.constexpr  # from the first token of a chunk to that of its next one

    @gluon.constexpr_function
    def __init__(self, i_n, i_h, run, skipped, token, length, live, chunks, step):
        self.i_n, self.i_h, self.run, self.skipped = i_n, i_h, run, skipped
        self.token, self.length = token, length
        self.live, self.chunks = live, chunks
        self.step = gl.constexpr(step)


@gluon.jit
def first_tile(i_n, token, cu_seqlens, T, ROWS: gl.constexpr):
    """Return the number of a sequence's first tile of ROWS rows (`kda_ops.sequences`)."""
    if cu_seqlens is not None:
        return token // ROWS + i_n
    else:
        return i_n * ((T + (ROWS - 1)) // ROWS)


@gluon.jit
def find_span(
    cu_seqlens,
    slots,
    N,
    T,
    HV,
    SHARES: gl.constexpr = 1,
    NULL: gl.constexpr = -1,
    RUN: gl.constexpr = 0,
):
    """Return the span of this program. A sequence without a slot has no chunks.

    With cu_seqlens, "sequence" N holds the tokens after the last one, and has no chunks either. N
    is None if every program has a sequence. Then the compiler sees that `chunks` is the same for
    all threads, and keeps what a loop counts in uniform registers.

    SHARES programs one after another take every SHARES-th chunk of a head, each from its own on.

    With RUN, a program takes one run of so many chunks (`stages.runs`), of N sequences if they are
    packed. A number that no run has gets no chunks.
    """
    pid = gl.program_id(0) // SHARES
    run, i_h = pid // HV, pid % HV
    i_n, skipped = run, run * 0
    if RUN > 0:
        if cu_seqlens is not None:
            i_n = find_sequence(cu_seqlens, run, N, RUN * 64)
        else:
            i_n = run // ((T + (RUN * 64 - 1)) // (RUN * 64))
    live = i_n >= 0
    if N is not None:
        live = i_n < N
    if cu_seqlens is not None:
        token = gl.load(cu_seqlens + i_n).to(gl.int32)
        if N is None:
            end = gl.load(cu_seqlens + i_n + 1).to(gl.int32)
        else:
            end = gl.load(cu_seqlens + i_n + 1, mask=live, other=T).to(gl.int32)
        length = end - token
    else:
        token, length = i_n * T, T
    if slots is not None:
        live = live & (drop_null(gl.load(slots + i_n, mask=live, other=-1), NULL) >= 0)
    if SHARES > 1:
        skipped = gl.minimum(gl.program_id(0) % SHARES * 64, length)
        token, length = token + skipped, length - skipped
    if RUN > 0:
        first = first_tile(i_n, token, cu_seqlens, T, RUN * 64)
        skipped = (run - first) * (RUN * 64)
        token, length = token + skipped, gl.minimum(length - skipped, RUN * 64)
    chunks = (length + (64 * SHARES - 1)) // (64 * SHARES)
    if N is not None and RUN == 0:
        chunks = gl.where(live, chunks, 0)
    return Span(i_n, i_h, run, skipped, token, length, live, chunks, 64 * SHARES)


@gluon.jit
def from_span(x, span, cu_seqlens, T, x_b, x_t, x_h):
    """Return the pointer to a span's first number of x [B, T, HV], of a batch with any strides."""
    x += span.i_h.to(gl.int64) * x_h
    if cu_seqlens is None:
        x += span.i_n.to(gl.int64) * x_b
        x += span.skipped.to(gl.int64) * x_t
    else:
        x += span.token.to(gl.int64) * x_t
    return x


@aggregate
class Column:
    """One number per token of a head: the address of the first, or None, and the stride."""

    first: gl.tensor | gl.constexpr
    step: gl.tensor

    @gluon.constexpr_function
    def __init__(self, first, step):
        self.first = gl.constexpr(None) if first is None else first
        self.step = step


@aggregate
class Tiles:
    """Where what is kept of a program's chunks lies, in tensors [NT, HV, ..]."""

    first: gl.tensor  # of the first chunk
    step: gl.tensor  # from chunk to chunk

    @gluon.constexpr_function
    def __init__(self, first, step):
        self.first, self.step = first, step

    @gluon.jit
    def at(self, c):
        """Return the number of chunk c's tile."""
        return self.first + c * self.step


@gluon.jit
def find_tiles(span, cu_seqlens, T, HV, ROWS: gl.constexpr):
    """Return where chunks of ROWS rows are kept."""
    step = HV
    if span.step > 64:
        step = HV * (span.step // 64)
    first = first_tile(span.i_n, span.token, cu_seqlens, T, ROWS)
    if cu_seqlens is None:
        first += span.skipped // ROWS
    return Tiles(first * HV + span.i_h, step)
