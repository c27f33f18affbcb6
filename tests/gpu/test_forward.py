"""The chunk kernels on a GPU: the definition, the laws that hold bit by bit, memory that must not
be touched, and CUDA graphs.
"""

import pytest
import torch

from kda_ops import dispatch
from kda_ops.backends.triton import tuning
from kda_ops.problem import Problem
from tests.support import calls, closeness
from tests.support.calls import overload
from tests.support.cases import (
    AXES,
    EDGES,
    GATES,
    KEYS,
    PACKED,
    STRIDES,
    TOKENS,
    Case,
    alone,
    replace,
    take,
)
from tests.support.closeness import assert_all_close, assert_all_identical, assert_identical, oracle

CUDA = torch.device("cuda")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TRITON = dispatch.load("triton")
SIZES = dict(H=1, HV=2, K=128, V=128, T=200)
LAYER = Case(**SIZES, dtype=torch.bfloat16, gate="bounded", beta="sigmoid", l2norm=True)


def twin(case, draw=0):
    """Return the forward of the twin."""
    return closeness.twin(case, "chunk", (), draw)


def forward(case, inputs=None):
    """Run the forward of a case."""
    return calls.forward(case, inputs=inputs)


def assert_forward(case):
    got = forward(case)
    assert_all_close(got, oracle(case, ()), lambda draw: twin(case, draw))
    again = forward(case)
    for name in got:
        assert_identical(got[name], again[name], name)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gate", GATES)
def test_every_gate(variant, gate, dtype):
    assert_forward(replace(LAYER, variant=variant, gate=gate, dtype=dtype))


@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("beta", ("none", "sigmoid", "neg_eigval"))
def test_every_inverse_survives_repeated_keys(variant, beta, keys):
    assert_forward(replace(LAYER, variant=variant, beta=beta, keys=keys, gate="weak"))


@pytest.mark.parametrize("keys", (AXES, "repeated"))
@pytest.mark.parametrize(
    "variant, gate, safe", (("kda", "strong", True), ("kda", "zero", False), ("gdn", "zero", False))
)
def test_the_edges_of_promises(variant, gate, safe, keys):
    given = replace(LAYER, beta=EDGES, l2norm=False, safe_beta=True, safe_keys=True)
    assert_forward(replace(given, variant=variant, gate=gate, safe_gate=safe, keys=keys))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("K, V", ((1, 1), (16, 32), (60, 100), (64, 64), (130, 24), (256, 256)))
def test_any_width(variant, K, V, dtype):
    assert_forward(
        replace(LAYER, variant=variant, K=K, V=V, dtype=dtype, gate="softplus", transposed=True)
    )


@pytest.mark.parametrize("strides", STRIDES)
def test_packed_sequences_in_any_strides(variant, strides):
    assert_forward(
        replace(LAYER, variant=variant, strides=strides, lengths=PACKED, tail=70, HV=4, H=2)
    )


def test_later_tokens_and_neighbours_do_not_change_a_bit(variant):
    for gate in ("bounded", "softplus"):
        case = replace(LAYER, variant=variant, gate=gate, lengths=(200, 70, 130), final=False)
        inputs = case.inputs(CUDA)
        some = take(alone(case, inputs, 0), 0, 150)
        assert_identical(
            forward(case, inputs)["o"][:, :150],
            forward(replace(case, lengths=None, T=150), some)["o"],
            gate,
        )


def test_nothing_outside_the_outputs_is_written_and_all_of_them_is(variant):
    case = replace(LAYER, variant=variant, K=60, V=100, T=130)
    p = Problem.parse(case.rank, *case.inputs(CUDA).values(), **case.flags())
    guard = 4096
    buffer = torch.full((2 * guard + p.new_output().numel(),), 7.0, dtype=p.v.dtype, device=CUDA)
    o = buffer[guard:-guard].view(p.new_output().shape).fill_(float("nan"))
    final_state = p.new_final_state().fill_(float("nan"))
    torch.cuda.empty_cache()
    TRITON.scan(p, TRITON.prepare(p), o, final_state, keep=False)
    assert o.isfinite().all() and final_state.isfinite().all()
    assert (buffer[:guard] == 7).all() and (buffer[-guard:] == 7).all()


def assert_a_graph_replays(case, *others):
    """Check that a graph captured on a case replays on the inputs of the others.

    Their inputs are copied into its memory; the bits must be those of an eager call.
    """
    static = case.inputs(CUDA)
    forward(case, static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = forward(case, static)
    for other in others:
        for x, y in zip(static.values(), other.inputs(CUDA).values()):
            if x is not None and y is not None:
                x.copy_(y)
        graph.replay()
        want = forward(case, static)
        for name in got:
            assert_identical(got[name], want[name], name)


def test_a_graph_replays_with_other_inputs_and_other_sequences(variant):
    case = replace(LAYER, variant=variant, lengths=(64, 100, 36), tail=10, seed=2)
    assert_a_graph_replays(case, replace(case, lengths=(1, 150, 49), seed=10))


def test_more_heads_than_a_grid_axis_holds(variant):
    case = replace(
        LAYER, variant=variant, B=700, T=3, H=100, HV=100, K=16, V=8, state=False, final=False
    )
    inputs = case.inputs(CUDA)
    o = forward(case, inputs)["o"]
    few = {n: x[690:] if n in TOKENS else x for n, x in inputs.items()}
    assert_identical(o[690:], forward(replace(case, B=10), few)["o"])


@pytest.mark.parametrize("gate, heads", (("bounded", 48), ("softplus", 96)))
def test_chunks_prepared_beside_their_scan_change_no_bit(variant, gate, heads, force):
    """Check eager calls over reused memory, a CUDA graph, and training, which keeps the tile.

    Where the scan does not wait, its result is garbage and a second scan makes it again.
    """
    case = replace(LAYER, variant=variant, gate=gate, B=1, T=8000, H=heads, HV=heads, state=False)
    inputs = case.inputs(CUDA)
    force(ahead=10**6)
    want, graph = forward(case, inputs), torch.cuda.CUDAGraph()
    for ahead, patience in ((100, tuning.PATIENCE), (1, tuning.PATIENCE), (60, 1), (1, 0)):
        force(ahead=ahead, patience=patience)
        for _ in range(3):
            assert_all_identical(want, forward(case, inputs))
    force(ahead=70, patience=None)
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        trained = overload(variant, "chunk_fwd")(*inputs.values(), **case.flags())
        with torch.cuda.graph(graph, stream=other):
            captured = forward(case, inputs)
        graph.replay()
        graph.replay()
    torch.cuda.current_stream().wait_stream(other)
    assert_all_identical(want, captured)
    assert_all_identical(want, dict(zip(want, trained)))


def test_a_scan_does_not_wait_for_ever(force, variant):
    """For chunks that nobody prepares: each program says that it has missed them."""
    case = replace(LAYER, variant=variant, B=1, T=8000, H=48, HV=48, state=False)
    p = Problem.parse(case.rank, *case.inputs(CUDA).values(), **case.flags())
    force(ahead=60)
    tile = TRITON.prepare(p, overlap=True)
    tile.rest = lambda: None
    TRITON.scan(p, tile, p.new_output(), p.new_final_state(), keep=False)
    assert (
        tile.missed[: case.HV].all() and not tile.missed[case.HV :].any() and not tile.ready.any()
    )


def test_long_sequences_of_few_heads_are_prepared_beside_their_scan(force):
    force(processors=132)

    def asks(T, H, B=1, rank=1, **given):
        x = torch.empty(B, T, H, 128, dtype=torch.bfloat16, device=CUDA)
        beta = torch.empty(B, T, H, dtype=torch.bfloat16, device=CUDA)
        return tuning.ahead(
            Problem.parse(rank, x, x, x, x.float() if rank else beta.float(), beta, **given)
        )

    assert (
        0 < asks(32768, 32) < 512 and 0 < asks(8192, 96) < 128 and 0 < asks(8192, 96, rank=0) < 128
    )
    # fewer than half: one multiprocessor a head, and the others prepare
    assert asks(8192, 32) is not None and asks(32768, 32) < 256
    # too short, several sequences, scans and chunks on the same multiprocessors, no multiprocessor
    # idle, cut into runs, packed
    assert (
        asks(4096, 32)
        is asks(32768, 32, B=2)
        is asks(32768, 32, rank=0)
        is asks(16384, 128)
        is asks(32768, 8)
        is None
    )
    assert (
        asks(32768, 32, cu_seqlens=torch.tensor([0, 32768], dtype=torch.int32, device=CUDA)) is None
    )
