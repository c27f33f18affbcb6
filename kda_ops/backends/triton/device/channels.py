"""Where the partitions of a Gluon kernel meet, and which sequence and head a program walks."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from kda_ops.backends.triton.device.gluon_names import aggregate


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
    token: gl.tensor  # the first token of its chunks
    length: gl.tensor  # how many tokens there are from that one on
    live: gl.tensor  # whether it has a state: there is such a sequence, and it has a slot
    chunks: gl.tensor  # how many are its own, 0 if it is not live
    step: gl.constexpr  # from the first token of a chunk to that of its next one

    @gluon.constexpr_function
    def __init__(self, i_n, i_h, token, length, live, chunks, step):
        self.i_n, self.i_h, self.token, self.length = i_n, i_h, token, length
        self.live, self.chunks = live, chunks
        self.step = gl.constexpr(step)


@gluon.jit
def find_span(cu_seqlens, slots, N, T, HV, SHARES: gl.constexpr = 1):
    """Return the span of this program. A sequence without a slot has no chunks.

    With cu_seqlens, "sequence" N holds the tokens after the last one, and has no chunks either.
    SHARES programs one after another take every SHARES-th chunk of a head, each from its own on.
    """
    pid = gl.program_id(0) // SHARES
    i_n, i_h = pid // HV, pid % HV
    if cu_seqlens is not None:
        token = gl.load(cu_seqlens + i_n).to(gl.int32)
        end = gl.load(cu_seqlens + i_n + 1, mask=i_n < N, other=T).to(gl.int32)
        length = end - token
    else:
        token, length = i_n * T, T
    live = i_n < N
    if slots is not None:
        live = live & (gl.load(slots + i_n, mask=live, other=-1) >= 0)
    if SHARES > 1:
        skipped = gl.minimum(gl.program_id(0) % SHARES * 64, length)
        token, length = token + skipped, length - skipped
    chunks = gl.where(live, (length + (64 * SHARES - 1)) // (64 * SHARES), 0)
    return Span(i_n, i_h, token, length, live, chunks, 64 * SHARES)


@gluon.jit
def first_tile(span, cu_seqlens, T, ROWS: gl.constexpr):
    """Return the number of the span's first tile of ROWS rows (`kda_ops.sequences`)."""
    if cu_seqlens is not None:
        first = span.token // ROWS + span.i_n
    else:
        first = span.i_n * ((T + (ROWS - 1)) // ROWS)
        if span.step > 64:
            first += (span.token - span.i_n * T) // ROWS
    return first


@gluon.jit
def beta_at(beta, strides, span, cu_seqlens, T):
    """Return the pointer to beta of the span's first token. A batch may have any strides."""
    beta += span.i_h.to(gl.int64) * strides[2]
    if cu_seqlens is None:
        beta += span.i_n.to(gl.int64) * strides[0]
        if span.step > 64:
            beta += (span.token - span.i_n * T).to(gl.int64) * strides[1]
    else:
        beta += span.token.to(gl.int64) * strides[1]
    return beta
