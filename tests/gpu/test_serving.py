"""Serving on a GPU: prefill on a pool and its snapshots, prefill then decode, CUDA graphs, compiled
code that copies no state, and the engine.
"""

import contextlib
import subprocess
import sys
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import kda_ops
from examples import serve
from kda_ops import checks
from kda_ops.backends.triton import tuning
from kda_ops.problem import Problem
from tests.support import drift
from tests.support.cases import Case
from tests.support.closeness import assert_identical, assert_meets_budget
from tests.support.forks import Fork, assert_fork, assert_null_slots, broken, by_operator, forks
from tests.support.pools import OUTS, Pool, assert_out, assert_source, pools
from tests.support.splits import Split, assert_split, splits

CUDA = torch.device("cuda")
POOLS = (torch.float32, torch.bfloat16)
VARIANTS = ("kda", "gdn")
H, D, SLOTS = 2, 64, 24


@contextlib.contextmanager
def no_synchronisation():
    """Within it, whatever makes the host wait for the GPU raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def inputs(variant, T, seed, B=1):
    """q, k, v, g, beta of packed tokens, and the gate's parameters."""
    gen = torch.Generator(CUDA).manual_seed(seed)

    def randn(*shape):
        return torch.randn(shape, device=CUDA, generator=gen)

    decay = (H, D) if variant == "kda" else (H,)
    x = [randn(B, T, *s).bfloat16() for s in ((H, D), (H, D), (H, D), decay, (H,))]
    return x, dict(A_log=randn(H), dt_bias=randn(*decay))


FLAGS = dict(use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True)
PREFILL = {"kda": kda_ops.chunk_kda_, "gdn": kda_ops.chunk_gdn_}
CHUNK = {"kda": kda_ops.chunk_kda, "gdn": kda_ops.chunk_gdn}


@pytest.mark.parametrize("pool_dtype", POOLS, ids=str)
@pytest.mark.parametrize("transposed", (False, True))
@pytest.mark.parametrize("variant", VARIANTS)
@settings(max_examples=12)
@given(
    lengths=st.lists(st.sampled_from((0, 1, 37, 63, 64, 65, 128, 200)), min_size=1, max_size=6),
    every=st.integers(1, 2),
    dead=st.integers(0, 6),
    wide=st.booleans(),
    seed=st.integers(0, 999),
    null=st.sampled_from((-1, 0, 2)),
    fresh=st.sets(st.integers(0, 5)),
)
@example(lengths=[200, 0, 64, 128], every=1, dead=6, wide=True, seed=0, null=-1, fresh=set())
@example(lengths=[200, 0, 64, 128], every=1, dead=2, wide=True, seed=1, null=1, fresh={0, 1, 2})
def test_prefill_is_the_functional_call_on_its_slots_to_the_bit(
    variant, transposed, pool_dtype, lengths, every, dead, wide, seed, null, fresh
):
    """o, every state, every snapshot, and every slot that is not named; on slots that lie apart if
    `wide`, and without the host waiting for anything.
    """
    N, T, shots = len(lengths), sum(lengths) + 5, 2
    x, gate = inputs(variant, T, seed)
    gen = torch.Generator().manual_seed(seed)
    around = torch.randn((SLOTS, 2 if wide else 1, H, D, D), generator=gen).to(CUDA, pool_dtype)
    pool = around[:, 0]
    around[: null + 1] = torch.nan
    order = torch.randperm(SLOTS - null - 1, generator=gen) + null + 1
    slots, into = order[:N].clone(), order[N : N * (1 + shots)].view(N, shots).clone()
    if dead < N:
        slots[dead] = null
    into[0, 1] = null if null >= 0 else -3
    begins = [n in fresh for n in range(N)]
    around[[int(s) for s, anew in zip(slots, begins) if anew and s > null], 0] = torch.nan
    before = around.clone()
    resumed = None if not fresh else ~torch.tensor(begins, device=CUDA)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    index = torch.int32 if seed % 2 else torch.int64
    there = [t.to(CUDA, index) for t in (slots, into, cu_seqlens)]
    flags = FLAGS | gate | {"transpose_state_layout": transposed}
    null_slot = {"null_slot": null} if null >= 0 else {}
    with no_synchronisation(), torch.inference_mode():
        o = PREFILL[variant](
            *x,
            pool,
            there[0],
            there[1],
            cu_seqlens=there[2],
            has_initial_state=resumed,
            snapshot_every=every,
            **flags,
            **null_slot,
        )
    expected, expected_o = before.clone(), torch.zeros_like(o)
    ends = cu_seqlens.tolist()
    for n, (a, b) in enumerate(zip(ends, ends[1:])):
        if slots[n] <= null:
            continue
        initial = before[slots[n] : slots[n] + 1, 0].float()
        if begins[n]:
            initial = torch.zeros_like(initial)
        chunks = [
            (j, (j + 1) * every * 64)
            for j in range(shots)
            if into[n, j] > null and (j + 1) * every * 64 <= b - a
        ]
        for slot, length in [*((into[n, j], end) for j, end in chunks), (slots[n], b - a)]:
            part = [t[:, a : a + length] for t in x]
            with torch.inference_mode():
                one = torch.tensor([0, length], dtype=index, device=CUDA)
                part_o, final = CHUNK[variant](
                    *part, initial_state=initial, cu_seqlens=one, output_final_state=True, **flags
                )
            expected[slot, 0] = final[0].to(pool_dtype)
            expected_o[:, a : a + length] = part_o
    assert_identical(o, expected_o, "o")
    assert_identical(around, expected, "the pool and what lies between its slots")


WIDE = dict(K=128, V=128, dtype=torch.bfloat16, state=False, final=False)
ANSWER = WIDE | dict(B=3, T=141)


@settings(max_examples=25)
@given(split=splits((torch.bfloat16,), POOLS, H=1, HV=2, K=D, V=D))
@example(
    split=Split(Case("kda", **ANSWER), (("chunk_", 117), *[("recurrent_", 1)] * 24), torch.bfloat16)
)
@example(
    split=Split(Case("gdn", **ANSWER), (("chunk_", 117), *[("recurrent_", 1)] * 24), torch.float32)
)
def test_prefill_then_decode_is_one_prefill(split):
    assert_split(split, CUDA)


@pytest.mark.parametrize("seed", range(124))
def test_decode_in_four_calls_keeps_the_budget_of_fp32_states(seed):
    """A decay that errs with one sign at every token exceeds it in 3 of these 124 draws."""
    flags = dict(gate="softplus", l2norm=True, beta="sigmoid", state=False, final=False)
    case = Case("kda", B=3, T=64, H=1, HV=2, K=D, V=D, dtype=torch.bfloat16, seed=seed, **flags)
    assert_split(Split(case, (("recurrent_", 16),) * 4, torch.float32), CUDA)


# 64 samples of one prompt, in slot 64
SAMPLES = Fork(tuple((n, 64) for n in range(64)), (1,) * 64, (2,) * 64, 65)
# 48 branches of up to four tokens, of six prompts in slots 192 to 197
BRANCHES = Fork(
    tuple((*range(4 * n, 4 * n + 4), 192 + n % 6) for n in range(48)),
    tuple(n % 5 for n in range(48)),
    (5,) * 48,
    198,
    packed=True,
)


@pytest.mark.parametrize("fork", (SAMPLES, BRANCHES), ids=("samples", "branches"))
@pytest.mark.parametrize("pool", POOLS, ids=str)
@pytest.mark.parametrize("transposed", (False, True))
@pytest.mark.parametrize("variant", VARIANTS)
def test_sequences_that_share_a_slot_have_the_bits_of_each_alone(variant, transposed, pool, fork):
    options = dict(variant=variant, transposed=transposed, pool=pool, dtype=torch.bfloat16)
    fork = replace(fork, gate="softplus", H=8, HV=16, K=128, V=128, **options)
    assert fork.legal and fork.forks
    with torch.inference_mode():
        o, after = assert_fork(fork, CUDA, bits=True)
        again = assert_fork(fork, CUDA, bits=True)
    assert_identical(o, again[0], "o of a second run")
    assert_identical(after, again[1], "the pool of a second run")


@settings(max_examples=25)
@given(fork=forks(dtype=torch.bfloat16, H=2, HV=4, K=64, V=48))
def test_any_legal_table_has_the_bits_of_each_sequence_alone(fork):
    assert_fork(fork, CUDA, bits=True)


@settings(max_examples=25)
@given(fork=forks(dtype=torch.bfloat16, H=2, HV=4, K=64, V=48), null=st.sampled_from((0, 3)))
def test_every_slot_up_to_null_slot_counts_as_a_negative_one(fork, null):
    assert_null_slots(fork, null, CUDA)


@settings(max_examples=40)
@given(pool=pools(dtype=torch.bfloat16, H=2, HV=4, K=64, V=48), layout=st.sampled_from(OUTS))
def test_out_takes_what_the_call_would_return(pool, layout):
    assert_out(pool, layout)


@settings(max_examples=40)
@given(pool=pools("recurrent_", dtype=torch.bfloat16, H=2, HV=4, K=64, V=48))
def test_a_second_pool_to_start_from_is_only_read(pool):
    assert_source(pool)


@pytest.mark.parametrize("layout", OUTS)
def test_a_prefill_that_walks_writes_out(layout, force):
    force(walk=True)
    gates = dict(gate="bounded", beta="sigmoid", l2norm=True)
    case = Case(lengths=(130, 0, 64, 7), tail=9, H=2, HV=4, **WIDE, **gates)
    assert_out(Pool(case, "chunk_", dead=(False, False, True), fresh=(True,)), layout)


@pytest.mark.parametrize("variant", VARIANTS)
def test_decode_to_out_allocates_nothing_and_is_captured(variant):
    x, gate = inputs(variant, 1, 0, B=4)
    pool, out = torch.randn(SLOTS, H, D, D, device=CUDA), torch.empty_like(x[2])
    slots = torch.tensor([3, 0, 0, 5], device=CUDA)
    function = getattr(kda_ops, f"recurrent_{variant}_")

    def call(state, out):
        return function(*x, state, slots, null_slot=0, out=out, **FLAGS, **gate)

    with torch.inference_mode():
        other = pool.clone()
        call(other, out)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with no_synchronisation():
            assert call(other, out) is out
        assert torch.cuda.max_memory_allocated() == before
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call(pool, out)
        want = pool.clone()
        expected = function(*x, want, slots, null_slot=0, **FLAGS, **gate)
        out.fill_(torch.nan)
        graph.replay()
        assert_identical(out, expected, "out")
        assert_identical(pool, want, "the pool")


@pytest.mark.parametrize("op, T", (("chunk", 700), ("recurrent", 3)))
@pytest.mark.parametrize("variant", VARIANTS)
def test_views_of_a_packed_projection_have_the_bits_of_copies_and_cost_none(variant, op, T):
    """With raw gates of Qwen3-Next in bf16 and parameters in fp32; also through the convolution."""
    heads, groups, d = 32, 16, 128
    mixed = torch.randn(1, T, (2 * groups + heads) * d + 512, device=CUDA).bfloat16()[..., :-512]
    g = torch.randn(1, T, heads, *((d,) if variant == "kda" else ()), device=CUDA).bfloat16()
    beta, A_log = torch.randn(1, T, heads, device=CUDA).bfloat16(), torch.randn(heads, device=CUDA)
    dt_bias, weight = torch.randn_like(g[0, 0].float()), torch.randn(mixed.shape[-1], 4).to(CUDA)
    slots = torch.tensor([5, 2, 0], device=CUDA)
    offsets = torch.tensor([0, T // 3, T // 3 * 2, T], device=CUDA)
    tails = torch.zeros(9, 3, mixed.shape[-1], device=CUDA, dtype=torch.bfloat16)
    pool = torch.randn(9, heads, d, d, device=CUDA)
    function = getattr(kda_ops, f"{op}_{variant}_")

    def convolve():
        return kda_ops.short_conv_(mixed, weight, None, tails, slots, offsets, null_slot=0)

    def attend(x, state):
        parts = x.split((groups * d, groups * d, heads * d), -1)
        views = [y.unflatten(-1, (-1, d)) for y in parts]
        return call(views, state)

    def call(qkv, state):
        given = dict(A_log=A_log, dt_bias=dt_bias, cu_seqlens=offsets, null_slot=0)
        return function(*qkv, g, beta, state, slots, **given, **FLAGS)

    def peak(f):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # else the peak counts all of a cached block that is a bit larger
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = f()
        return result, torch.cuda.max_memory_allocated() - before

    with torch.inference_mode():
        convolve()
        y, cost = peak(convolve)
        assert cost < 1.1 * y.nbytes  # the output, rounded up by the allocator
        parts = y.split((groups * d, groups * d, heads * d), -1)
        copies = [x.unflatten(-1, (-1, d)).contiguous() for x in parts]
        other, own = pool.clone(), pool.clone()
        attend(y, pool.clone()), call(copies, pool.clone())  # compiles both
        want, cost_of_copies = peak(lambda: call(copies, other))
        o, cost = peak(lambda: attend(y, own))
    assert_identical(o, want, "o")
    assert_identical(own, other, "the pool")
    assert cost <= cost_of_copies


@settings(max_examples=25)
@given(fork=forks(dtype=torch.bfloat16), wrong=broken(dtype=torch.bfloat16))
def test_checked_tables_that_share_a_slot_run_and_wrong_ones_are_refused(fork, wrong):
    before, flags = wrong.state(CUDA), wrong.case.flags("recurrent_")
    x = wrong.arguments(before)
    with patch.object(checks, "CHECK_VALUES", True):
        assert_fork(fork, CUDA, bits=True)
        with pytest.raises(ValueError, match="^state_indices must (not let|be below the number)"):
            by_operator(wrong.variant, list(x.values()), flags)
    assert_identical(x["state"], before, "the pool")


@pytest.mark.parametrize(
    "heads, pieces, pool_dtype, whole",
    (
        (96, (64, 2048, 388), torch.float32, True),
        (4, (640, 300), torch.float32, True),  # shorter than a run
        (4, (64, 4096, 840), torch.float32, False),
        (96, (64, 2048, 388), torch.bfloat16, True),
    ),
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_prompt_cut_at_chunks_has_the_bits_of_one_call_where_it_stays_whole(
    variant, heads, pieces, pool_dtype, whole
):
    """On an fp32 pool. Where it is cut into runs, and on a bf16 pool, both agree up to rounding."""
    case = Case(variant, T=sum(pieces), H=heads, HV=heads, gate="weak", l2norm=True, **WIDE)
    split = Split(case, tuple(("chunk_", n) for n in pieces), pool_dtype)
    x = case.inputs(CUDA)
    p = Problem.parse(case.rank, *x.values(), **case.flags())
    assert (tuning.run_length(p) == 0) == whole
    o, pool = split.run(CUDA)
    want, after = split.run(CUDA, (("chunk_", case.T),))
    if whole and pool_dtype is torch.float32:
        assert_identical(o, want, "o")
        assert_identical(pool, after, "the pool")
    for got, expected in ((o, want), (pool, after)):
        error = (got.double() - expected.double()).norm() / expected.double().norm()
        assert error < 0.01


@pytest.mark.parametrize(
    "op, tokens, batches",
    (
        (
            "chunk",
            320,
            (((64, 0, 130, 1, 65), (3, 0, 7, 19, 2)), ((320, 0, 0, 0, 0), (0, 1, 2, -1, -1))),
        ),
        ("recurrent", 12, (((1,) * 5, (3, 0, 7, 19, 2)), ((4, 0, 3, 1, 0), (0, 1, 2, 3, -1)))),
    ),
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_captured_call_replays_with_new_tokens_slots_and_offsets(variant, op, tokens, batches):
    N = 5
    x, gate = inputs(variant, tokens, 0)
    pool = torch.randn(SLOTS, H, D, D, device=CUDA)
    slots = torch.full((N,), -1, dtype=torch.int32, device=CUDA)
    into = torch.full((N, 2), -1, device=CUDA)
    cu_seqlens = torch.zeros(N + 1, dtype=torch.int32, device=CUDA)
    snapshots = (into,) if op == "chunk" else ()
    resumed = torch.ones(N, dtype=torch.bool, device=CUDA)
    more = dict(has_initial_state=resumed) if op == "chunk" else {}
    function = getattr(kda_ops, f"{op}_{variant}_")

    def call(state):
        given = *x, state, slots, *snapshots
        return function(*given, cu_seqlens=cu_seqlens, **more, **FLAGS, **gate)

    with torch.inference_mode():
        call(pool)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            o = call(pool)
        for seed, (lengths, named) in enumerate((*batches, ((0,) * N, (-1,) * N))):
            for t, new in zip(x, inputs(variant, tokens, seed + 1)[0]):
                t.copy_(new)
            slots.copy_(torch.tensor(named))
            into.copy_(torch.tensor([[20, 21], [-1, -1], [22, 23], [-1, -1], [18, -1]]))
            cu_seqlens.copy_(torch.tensor([0, *lengths]).cumsum(0))
            resumed.copy_(torch.arange(N) % 2 == seed % 2)
            expected_pool = pool.clone()
            expected = call(expected_pool)
            o.fill_(torch.nan)
            graph.replay()
            assert_identical(o, expected, "o")
            assert_identical(pool, expected_pool, "the pool")


class _Layer(torch.nn.Module):
    def __init__(self, variant, slots):
        super().__init__()
        self.step = {"kda": kda_ops.recurrent_kda_, "gdn": kda_ops.recurrent_gdn_}[variant]
        self.register_buffer("state", torch.zeros(slots, H, D, D))

    def forward(self, x, gate, slots):
        return self.step(*x, self.state, slots, **gate, **FLAGS)


@pytest.mark.parametrize("variant", VARIANTS)
def test_compiled_to_a_graph_no_copy_of_the_state_is_made(variant):
    """And the numbers are eager's. The state is 256 MB: a copy, in the generated code or into the
    graph's own memory, would show in the peak of what is allocated and in the kernels run.
    """
    from torch._dynamo.utils import counters
    from torch._inductor.utils import run_and_get_code

    torch._dynamo.reset()
    counters.clear()
    layer, eager = (_Layer(variant, 2**28 // (4 * H * D * D)).to(CUDA) for _ in range(2))
    compiled = torch.compile(layer, mode="reduce-overhead", fullgraph=True)
    slots = torch.tensor([4, 0, -1], device=CUDA)
    state, size = layer.state.data_ptr(), layer.state.nbytes
    assert size == 2**28
    with torch.inference_mode():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        x, gate = inputs(variant, 1, 0, B=3)
        _, (code, *_) = run_and_get_code(lambda: compiled(x, gate, slots))
        eager(x, gate, slots)
        for seed in range(1, 6):  # warm up, record, replay
            new = inputs(variant, 1, seed, B=3)[0]
            torch.compiler.cudagraph_mark_step_begin()
            o = compiled(new, gate, slots)
            assert_identical(o, eager(new, gate, slots), f"o of step {seed}")
        torch.cuda.synchronize()
        assert torch.cuda.max_memory_allocated() - before < size // 2
        assert_identical(layer.state, eager.state, "the state")
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            torch.compiler.cudagraph_mark_step_begin()
            compiled(x, gate, slots)
            torch.cuda.synchronize()
    assert layer.state.data_ptr() == state and layer.state[4].any() and not layer.state[1].any()
    assert (
        code.count(f"torch.ops.{variant}.recurrent_.default(") == 1
        and ".clone" not in code
        and "copy_(" not in code.split("def call")[1]
    )
    assert counters["inductor"]["cudagraph_skips"] == 0
    times = {
        e.key: e.self_device_time_total for e in profile.key_averages() if e.self_device_time_total
    }
    assert any("recur" in name for name in times), times  # it was replayed
    # us; 256 MB there and back take 125
    assert sum(t for name, t in times.items() if "recur" not in name) < 60, times


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    "options", (dict(B=2, T=16), dict(lengths=(3, 0, 70, 1), tail=2, transposed=True)), ids=str
)
def test_recurrent_is_differentiable(variant, options):
    case = Case(
        variant,
        dtype=torch.bfloat16,
        H=2,
        HV=8,
        K=D,
        V=D,
        gate="softplus",
        l2norm=True,
        beta="sigmoid",
        **options,
    )
    got = assert_meets_budget(case, "recurrent")
    assert {
        "dq",
        "dk",
        "dv",
        "dg",
        "dbeta",
        "dA_log",
        "ddt_bias",
        "dinitial_state",
    } <= got.keys() and got["dq"].is_cuda


def test_padding_slots_cost_nothing():
    """A batch of 256 with 8 live slots takes a fraction of the time of 256.

    Both run in a CUDA graph, so that a host that is slow under the suite is not timed.
    """
    from triton.testing import do_bench_cudagraph

    B, heads, width = 256, 32, 128
    q, k, v, g = (torch.randn(B, 1, heads, width, device=CUDA).bfloat16() for _ in range(4))
    pool = torch.randn(B, heads, width, width, device=CUDA)
    slots, A_log = torch.empty(B, dtype=torch.int32, device=CUDA), torch.zeros(heads, device=CUDA)
    times = []

    def decode():
        with torch.inference_mode():
            kda_ops.recurrent_kda_(q, k, v, g, g[..., 0], pool, slots, A_log=A_log, **FLAGS)

    for live in (B, 8, 0):
        slots.copy_(torch.arange(B)).masked_fill_(slots >= live, -1)
        times.append(1e3 * do_bench_cudagraph(decode, return_mode="median"))
    print(f"256 live: {times[0]:.1f} us, 8 live: {times[1]:.1f} us, none: {times[2]:.1f} us")
    assert times[1] < times[0] / 5 and times[2] <= times[1] + 3


@pytest.mark.parametrize("op", VARIANTS)
def test_ten_thousand_steps_stay_with_the_chunk_form(op):
    """The limit of each window, and no growth: the last windows are no worse than the early
    ones.
    """
    rows = drift.measure("cuda", 10_000, [op], ["fp32", "bf16"], torch.bfloat16, 64)
    assert all(r["error"] <= r["limit"] for r in rows)
    assert max(drift.growth(rows).values()) < 1.1, drift.growth(rows)


def test_every_request_gives_the_same_output_alone(capsys):
    result = serve.main("--device cuda --requests 24 --slots 6 --hidden 128".split())
    assert (
        "every request gives the same output alone" in capsys.readouterr().out
        and result["mixed"] > 0
    )


def test_the_engine_runs_as_a_program():
    done = subprocess.run(
        [sys.executable, "examples/serve.py", "--device", "cuda", "--no-check"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert all(f"decode, batch of {n}: " in done.stdout for n in (1, 8, 128)), done.stdout


def test_the_engine_replays_one_graph_per_batch_size():
    """A replay gives the tokens and the states of a step that runs eagerly."""
    torch.manual_seed(0)
    engine = serve.Engine(serve.Model(hidden=128).cuda().requires_grad_(False), 6)
    engine.run([serve.Request([1], 2 + i) for i in range(6)])
    assert engine.decodes.keys() == {1, 2, 4, 6}
    with torch.inference_mode():
        for decode in engine.decodes.values():
            for pool in engine.pools:
                pool[0] = 0  # nobody's, which is not initialised
            before = [pool.clone() for pool in engine.pools]
            best = decode([7], [3]).clone()
            after = [pool.clone() for pool in engine.pools]
            for pool, old in zip(engine.pools, before):
                pool.copy_(old)
            assert decode.graph is not None and decode.run()[:1].equal(best)
            for pool, want, old in zip(engine.pools, after, before):
                torch.testing.assert_close(pool, want)
                assert not want[3].equal(old[3]) and want[0].equal(old[0])
