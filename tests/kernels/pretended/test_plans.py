"""Which calls share a plan on a GPU, and where a plan keeps its scratch."""

from dataclasses import replace
from inspect import signature
from unittest import mock

import pytest
import torch
from hypothesis import given
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

from kda_ops import chunk, convolution, recurrent
from kda_ops.backends.triton import BACKEND
from kda_ops.backends.triton import backend as triton_backend
from kda_ops.backends.triton.plans.plan import Copy, CopyBack, Launch, Memory, Wait, lay_out
from kda_ops.backends.triton.plans.sizes import formula, text_of
from kda_ops.stages import KEPT
from tests.support import pretended_calls
from tests.support.pretend import pretend_gpu


@pytest.fixture(scope="module")
def gpu():
    with pretend_gpu() as launches:
        yield launches


@pytest.fixture(autouse=True)
def no_plans(gpu):
    BACKEND.forget()


KERNELS = ["prepare_kda", "scan_kda"]


def plans():
    return [plan for some in BACKEND.plans.values() for plan in some]


def decode(q, v=None, pool=None, device="cuda:0", **given):
    v = q if v is None else v
    H, K, V = *q.shape[2:], v.shape[3]
    pool = torch.empty(2, H, K, V, device=device) if pool is None else pool
    x = dict(q=q, k=q, v=v, state=pool) | given
    args = tuple(x.get(n) for n in recurrent.Decode.operator.names)
    return BACKEND.run(recurrent.Decode, 1, args, {})[0]


def test_a_plan_is_of_one_device():
    for device in ("cuda:0", "cuda:1", "cuda:0"):
        decode(torch.empty(2, 1, 2, 8, device=device), device=device)
    assert [plan.device.index for plan in plans()] == [0, 1]


def test_a_planned_call_writes_a_contiguous_output():
    q, v = torch.empty(2, 1, 2, 8, device="cuda:0"), torch.empty(2, 1, 8, 2, device="cuda:0").mT
    outs = [decode(q, v) for _ in range(2)]
    assert len(plans()) == 1 and all(o.is_contiguous() and o.shape == v.shape for o in outs)


@pytest.mark.parametrize("kind", pretended_calls.INTO)
def test_a_contiguous_out_costs_no_memory_and_a_strided_one_a_copy(kind):
    model = pretended_calls.Model(
        kind=kind, rank=0, kept=False, **pretended_calls.MODEL | dict(V=64, slots=1)
    )
    for layout, copies in (("dense", 0), ("fused", 1)):
        BACKEND.forget()
        numbers = replace(pretended_calls.usual(1, B=2), layout=layout)
        for _ in range(2):
            assert not BACKEND.run(*pretended_calls.run(BACKEND, model, numbers))
        (plan,) = plans()
        assert [type(step) for step in plan.steps].count(CopyBack) == copies
        assert [b.name for b in plan.own] == ["o"] * copies


def projection(rank, T):
    """Return a layer's inputs as engines have them: q, k and v as columns of one row, raw gates.

    The gates of Qwen3-Next are in bf16, and A_log is in fp32.
    """
    H, HV, D = 2, 4, 128

    def empty(*shape, dtype=torch.bfloat16):
        return torch.empty(shape, dtype=dtype, device="cuda:0")

    mixed = empty(1, T, (2 * H + HV) * D)
    columns = mixed.split((H * D, H * D, HV * D), -1)
    x = {n: y.unflatten(-1, (-1, D)) for n, y in zip("qkv", columns)}
    gate = (HV, D) if rank else (HV,)
    x |= {"g": empty(1, T, *gate), "beta": empty(1, T, HV)}
    x |= {"A_log": empty(HV, dtype=torch.float32), "dt_bias": empty(*gate, dtype=torch.float32)}
    x |= {"state": empty(9, HV, D, D, dtype=torch.float32)}
    flags = dict(use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True)
    return x, flags | dict(use_beta_sigmoid_in_kernel=True, transpose_state_layout=True)


@pytest.mark.parametrize("walked", (False, True))
@pytest.mark.parametrize("kind, T", ((chunk.Prefill, 170), (recurrent.Decode, 3)))
@pytest.mark.parametrize("rank", (0, 1))
def test_views_of_a_packed_projection_cost_no_copy(rank, kind, T, walked, force):
    x, flags = projection(rank, T)
    force(walk=walked)
    if walked:
        flags["lower_bound"] = -5.0
    N = 3
    x["state_indices"] = torch.empty(N, dtype=torch.int32, device="cuda:0")
    x["cu_seqlens"] = torch.empty(N + 1, dtype=torch.int32, device="cuda:0")
    args = tuple(x.get(n) for n in kind.operator.names)
    for _ in range(2):
        BACKEND.run(kind, rank, args, flags | {"null_slot": 0})
    (plan,) = plans()
    assert not any(isinstance(step, Copy) for step in plan.steps)
    assert [b.name for b in plan.own if not b.zero] == ["o"]
    launched = [step.kernel.__name__ for step in plan.steps if isinstance(step, Launch)]
    walks = walked and rank == 1 and kind is chunk.Prefill
    assert any("walk" in name for name in launched) == walks


def test_the_convolution_of_columns_of_a_projection_costs_no_copy():
    """As an engine calls it: q, k, v and the output gate come from one product."""
    wide = torch.empty(1, 170, 1024 + 512, dtype=torch.bfloat16, device="cuda:0")
    x = {"x": wide[..., :1024], "weight": torch.empty(1024, 4, device="cuda:0")}
    tails = torch.empty(9, 1024, 3, dtype=torch.bfloat16, device="cuda:0")
    x |= {"tail": tails.mT, "tail_indices": torch.empty(3, dtype=torch.int32, device="cuda:0")}
    x |= {"cu_seqlens": torch.empty(4, dtype=torch.int32, device="cuda:0")}
    kind = convolution.ConvolveInPlace
    args = tuple(x.get(n) for n in kind.operator.names)
    (y,) = BACKEND.run(kind, 1, args, {"activation": "silu"})
    (plan,) = plans()
    assert not any(isinstance(step, Copy) for step in plan.steps)
    assert [b.name for b in plan.own] == ["y"] and y.is_contiguous()


def test_decode_remembers_sizes_and_only_for_calls_that_look_alike():
    q = torch.empty(2, 1, 2, 8, device="cuda:0")
    for _ in range(4):
        decode(q)
    assert len(BACKEND.decodes) == 1
    strided = torch.empty(2, 1, 2, 16, device="cuda:0")[..., ::2]
    for other in (q.to(torch.bfloat16), torch.empty(2, 1, 4, 8, device="cuda:0"), strided):
        for _ in range(3):
            assert decode(other).dtype == other.dtype
    assert len(BACKEND.decodes) == 4
    slots = torch.empty(2, 2, dtype=torch.int32, device="cuda:0")[:, 0]
    for _ in range(3):
        decode(q, state_indices=slots)
    assert len(BACKEND.decodes) == 4  # slots apart are copied at each call
    BACKEND.forget()
    assert not BACKEND.decodes


@pytest.mark.parametrize("name", ("num_accepted_tokens", "cu_seqlens"))
def test_integers_that_do_not_lie_together_are_copied(name, gpu):
    def there(*shape):
        return torch.empty(shape, dtype=torch.int64, device="cuda:0")

    q = torch.empty(1, 4, 2, 8, device="cuda:0")
    given = dict(state_indices=there(2, 4), num_accepted_tokens=there(2), cu_seqlens=there(3))
    decode(q, **given)
    given[name] = there(3, 2)[: 3 if name == "cu_seqlens" else 2].select(1, 0)
    gpu.clear()
    decode(q, **given)
    (launched,) = gpu
    place = list(launched.made.kernel.arg_names).index(
        "accepted" if name == "num_accepted_tokens" else name
    )
    assert len(plans()) == 1 and launched.args[place] != given[name].data_ptr()


def test_plans_are_bounded_in_number(monkeypatch):
    monkeypatch.setattr(triton_backend, "MOST_PLANS", 3)
    q = torch.empty(1, 1, 1, 8, device="cuda:0")
    found = []
    for scale in (0.1, 0.2, 0.3, 0.4, 0.1):
        args = (q, q, q, None, None, None, None, None, None)
        BACKEND.run(recurrent.Recur, 1, args, {"scale": scale})
        found.append(len(plans()))
    assert found == [1, 2, 3, 1, 2]


def test_the_first_call_of_a_kind_compiles_at_once_and_never_in_a_capture(gpu, monkeypatch):
    capturing, compiled, warmup = [True], [], JITFunction.warmup

    def note(self, *args, **words):
        compiled.append(self.fn.__name__)
        return warmup(self, *args, **words)

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    monkeypatch.setattr(JITFunction, "warmup", note)

    def call(T=70, device="cuda:0", dtype=torch.bfloat16, **flags):
        x = torch.empty(1, T, 1, 64, device=device, dtype=dtype)
        compiled.clear()
        gpu.clear()
        args = (x, x, x, x.float(), None, None, None, None, None)
        BACKEND.run(chunk.Infer, 1, args, {"output_final_state": True} | flags)
        assert [launched.made.kernel.fn.__name__ for launched in gpu] == KERNELS
        return [*compiled]

    assert call() == []
    BACKEND.forget()
    capturing[0] = False
    assert call() == KERNELS and call() == [] and call(T=71) == []
    for words in (dict(device="cuda:1"), dict(dtype=torch.float16), dict(scale=0.5)):
        assert call(**words) == KERNELS and call(**words) == [], words


def test_a_kernel_that_does_not_compile_leaves_no_trace(monkeypatch):
    """The compiler would keep its mode, and every first launch of the process fail."""
    from triton.runtime import _async_compile

    def compile_kernel():
        raise ZeroDivisionError

    def warmup(self, *args, **words):
        mode = _async_compile.active_mode.get()
        # triton 3.9 takes two after these, others one
        rest = [lambda kernel: None] * (len(signature(mode.submit).parameters) - 2)
        mode.submit("key", compile_kernel, *rest)

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    q = torch.empty(1, 70, 1, 64, device="cuda:0")
    call = chunk.Infer, 1, (q, q, q, None, None, None, None, None, None), {}
    with monkeypatch.context() as patch:
        patch.setattr(JITFunction, "warmup", warmup)
        for _ in range(2):  # the same error again, not one of what was left
            with pytest.raises(ZeroDivisionError):
                BACKEND.run(*call)
            assert _async_compile.active_mode.get() is None and not plans()
    BACKEND.run(*call)
    assert len(plans()) == 1


class Peak(TorchDispatchMode):
    """The most bytes that what is allocated in it takes at once."""

    def __init__(self, known):
        super().__init__()
        self.known = {x.untyped_storage()._cdata for x in known if x is not None}
        self.live, self.peak = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor) and x.device.type == "cuda":
                self.note(x.untyped_storage())
        return out

    def note(self, storage):
        self.live = [found for found in self.live if not found[0].expired()]
        if storage._cdata in self.known or any(r.cdata == storage._cdata for r, _ in self.live):
            return
        self.live.append((StorageWeakRef(storage), storage.nbytes()))
        self.peak = max(self.peak, sum(size for _, size in self.live))


LARGE = [
    (pretended_calls.Model(kind=kind, rank=rank, kept=kept, **(pretended_calls.MODEL | words)), T)
    for kind, kept in ((chunk.Infer, False), (chunk.Forward, False), (chunk.Backward, False))
    + ((chunk.Forward, True), (chunk.Backward, True))
    + tuple((half, False) for half in pretended_calls.SHARDS)
    for rank in (1, 0)
    for words, T in (
        ({}, 4096),
        ({"H": 32}, 16384),  # backward's scans beside each other
        ({"H": 48}, 16384),  # chunks prepared beside their scan
        ({"group": 2, "dtype": torch.float32}, 1000),
        ({"H": 1}, 4096),  # in runs
    )
]


def recording_of(call):
    """Run a call without a plan, and return its recording and the plan that was made."""
    found, made = [], triton_backend.Plan

    def note(recording, *rest):
        found.append((recording, made(recording, *rest)))
        return found[-1][1]

    with mock.patch.object(triton_backend, "Plan", note):
        BACKEND.forget()
        BACKEND.run(*call)
    return found[0]


WALKS = [
    (pretended_calls.Model(kind=kind, rank=1, kept=kept, **fields), numbers)
    for fields in (pretended_calls.MODEL | {"H": 64}, pretended_calls.MODEL | {"H": 32, "group": 2})
    for kind in (chunk.Forward, chunk.Backward)
    for kept in (False, True)
    for numbers in (pretended_calls.usual(4096), replace(pretended_calls.usual(4096), layout="off"))
]
EVERY = [(model, pretended_calls.usual(T)) for model, T in LARGE] + WALKS


@pytest.mark.parametrize("model, numbers", EVERY, ids=str)
def test_a_plan_takes_no_more_memory_than_its_stages(model, numbers):
    call = pretended_calls.run(BACKEND, model, numbers)
    kind, rank, args, flags = call
    with Peak(args) as stages:
        kind(rank, args, flags).run(BACKEND)
    BACKEND.forget()
    BACKEND.run(*call)
    with Peak(args) as plan:
        BACKEND.run(*call)
    room = 512 * -(-numbers.T // 64)  # what a buffer has per chunk is a multiple of the alignment
    assert len(plans()) == 1 and 0 < plan.peak <= stages.peak + room, (plan.peak, stages.peak)


def spans(recording):
    """Find the steps in which each buffer may be read or written, on whichever stream."""
    steps = recording.steps
    found: dict[str, list[int]] = {}
    for i, step in enumerate(steps):
        if not isinstance(step, Launch):
            continue
        first = last = i
        if step.on_side_stream:  # at any time between what it waits for and what waits for it
            first = max(j for j in range(i) if isinstance(steps[j], Wait) and not steps[j].joins)
            last = min(j for j in range(i, len(steps)) if getattr(steps[j], "joins", False))
        for x in memories(tuple(step.arguments.values())):
            a, z = found.setdefault(x.name, [first, last])
            found[x.name] = [min(a, first), max(z, last)]
    return found


def memories(x):
    """Yield the buffers and inputs that an argument names."""
    x = getattr(x, "memory", x)  # of a descriptor
    if isinstance(x, Memory):
        yield x
    elif isinstance(x, tuple):
        for y in x:
            yield from memories(y)


def assert_apart(recording, plan, numbers):
    """Assert that no two buffers of a place are ever in use at once."""
    places, block = lay_out(plan.scratch)
    names = [b.name for b in plan.scratch]
    texts = [text_of(places[n]) for n in names] + [text_of(b.bytes) for b in plan.scratch]
    values = formula(recording.numbers, [*texts, text_of(block)])(*numbers)
    begins, sizes, whole = values[: len(names)], values[len(names) : -1], values[-1]
    used = spans(recording)
    there = [(n, a, a + z, *used[n]) for n, a, z in zip(names, begins, sizes)]
    assert all(0 <= a and z <= whole for _, a, z, _, _ in there)
    for i, (x, a, z, first, last) in enumerate(there):
        for y, b, w, begin, end in there[:i]:
            same = a < w and b < z
            assert not (same and first <= end and begin <= last), (x, y)


@pytest.mark.parametrize("model, numbers", EVERY, ids=str)
def test_buffers_that_are_used_at_once_do_not_share_a_place(model, numbers):
    call = pretended_calls.run(BACKEND, model, numbers)
    recording, plan = recording_of(call)
    assert_apart(recording, plan, [x.value for x in recording.sizes.values()])


@given(model=pretended_calls.models, numbers=pretended_calls.sequences())
def test_nor_do_those_of_any_call(model, numbers, gpu):
    call = pretended_calls.run(BACKEND, model, numbers[0])
    recording, plan = recording_of(call)
    assert_apart(recording, plan, [x.value for x in recording.sizes.values()])


BACK = ["states_kda", "reverse_walk_kda"]


def names(gpu):
    return [launched.made.kernel.fn.__name__ for launched in gpu]


def walked(gpu, kind, numbers=None, device="cuda:0", **fields):
    """Run a call of 64 heads; return its arguments, its results and what it launches."""
    fields = pretended_calls.MODEL | {"H": 64, "kept": False} | fields
    model = pretended_calls.Model(kind=kind, rank=1, **fields)
    call = pretended_calls.run(BACKEND, model, numbers or pretended_calls.usual(70))
    gpu.clear()
    return call, BACKEND.run(*call), names(gpu)


@pytest.mark.parametrize("kept", (False, True))
def test_training_of_64_heads_walks_and_keeps_a_and_if_asked_states(gpu, kept):
    _, (_, _, *made), launched = walked(gpu, chunk.Forward, kept=kept)
    assert launched == ["walk_kda"]
    states = {"states": (3, 64, 128, 128), "v_new": (3, 64, 32, 128)}
    want = {"A": (2, 64, 32, 128)} | (states if kept else {})
    assert {n: tuple(x.shape) for n, x in zip(KEPT, made) if x.shape != (0,)} == want
    back = walked(gpu, chunk.Backward, kept=kept)[2]
    assert back == [*(() if kept else BACK[:1]), *BACK[1:], "finish_back"]
    assert "walk_kda" not in walked(gpu, chunk.Forward, kept=kept, H=22)[2]


@pytest.mark.parametrize("kept", (False, True))
def test_training_without_a_bound_walks_forward_alone_and_keeps_nothing(gpu, kept, force):
    fields = dict(gate="softplus", kept=kept)
    assert "walk_kda" not in walked(gpu, chunk.Forward, **fields)[2]
    force(walk=True)
    _, (_, _, *others), launched = walked(gpu, chunk.Forward, **fields)
    assert launched == walked(gpu, chunk.Infer, **fields)[2] == ["walk_kda"]
    assert all(x.shape == (0,) for x in others)
    back = walked(gpu, chunk.Backward, **fields)[2]
    assert back[0] == "prepare_kda" and "gradient_keys" in back


@pytest.mark.parametrize("kept", (False, True))
def test_one_plan_of_a_walk_serves_other_numbers_of_tokens(gpu, kept):
    for kind in (chunk.Forward, chunk.Backward):
        BACKEND.forget()
        for T in (700, 800, 33 * 64):
            found = walked(gpu, kind, pretended_calls.usual(T), kept=kept)[1]
        ours = [some for key, some in BACKEND.plans.items() if kind in key]
        assert [len(some) for some in ours] == [1]
        if kept and kind is chunk.Forward:
            assert found[-1].shape == (66, 64, 32, 128)


def test_states_of_halves_do_not_serve_where_backward_does_not_walk(gpu):
    few = pretended_calls.usual(70)
    _, (_, _, *made), _ = walked(gpu, chunk.Forward, few, H=32, kept=True)
    assert made[-1].shape == (3, 32, 32, 128)
    back = walked(gpu, chunk.Backward, few, H=32, kept=True)[2]
    assert back[0] == "prepare_kda" and "scan_kda" in back and not {*BACK} & {*back}


def test_few_programs_walk_forward_in_two_kernels_and_do_not_walk_back(gpu):
    few = pretended_calls.usual(1000)
    for kind in (chunk.Infer, chunk.Forward):
        _, (_, _, *kept), launched = walked(gpu, kind, few, H=32)
        assert launched == ["prepare_walk", "scan_walk"]
    assert kept[0].shape == (16, 32, 32, 128)
    assert "prepare_kda" in walked(gpu, chunk.Backward, few, H=32)[2]
    assert walked(gpu, chunk.Backward, few, H=53)[2][:2] == BACK


def test_a_plan_of_the_walk_does_not_serve_the_a_of_other_stages(gpu):
    (kind, rank, args, flags), _, launched = walked(gpu, chunk.Backward)
    assert "states_kda" in launched
    i = kind.operator.names.index("A")
    other = args[i].new_empty((*args[i].shape[:2], 64, 64))
    for A, walks in ((other, False), (args[i], True), (other, False)):
        gpu.clear()
        BACKEND.run(kind, rank, (*args[:i], A, *args[i + 1 :]), flags)
        assert ("states_kda" in names(gpu)) == walks
    assert len(plans()) == 3  # one of Forward


def test_a_plan_of_gdn_walks_as_many_tokens_as_have_runs_of_one_length(gpu):
    """24 heads: up to five runs a head run at once, here of 64 chunks and of 128."""
    fields = pretended_calls.MODEL | dict(kind=chunk.Backward, rank=0, H=24, kept=False)
    for T, runs, count in ((20000, 5, 1), (17000, 5, 1), (40000, 5, 2), (1024, 0, 3)):
        model, numbers = pretended_calls.Model(**fields), pretended_calls.usual(T)
        call = pretended_calls.run(BACKEND, model, numbers)
        gpu.clear()
        BACKEND.run(*call)
        launched = {x.made.kernel.fn.__name__: x for x in gpu}
        assert ("join_runs" in launched) == ("reverse_walk_gdn" in launched) == (runs > 0)
        assert not runs or launched["reverse_walk_gdn"].programs == 24 * runs
        backward = [some for key, some in BACKEND.plans.items() if chunk.Backward in key]
        assert sum(map(len, backward)) == count


@pytest.mark.parametrize("T, N, packed", ((0, 1, False), (0, 2, True), (70, 0, True)))
def test_a_call_without_tokens_or_sequences_trains(T, N, packed, gpu):
    numbers = replace(pretended_calls.usual(T), N=N)
    _, (_, _, A, *_), launched = walked(gpu, chunk.Forward, numbers, packed=packed)
    assert A.shape[1:] == (64, 32, 128)
    assert launched[-1] == ("walk_kda" if T else "scan_kda")
    assert not {*BACK} & {*walked(gpu, chunk.Backward, numbers, packed=packed)[2]}


def test_what_tma_cannot_copy_is_copied_in_plans_too(gpu):
    for kind, launched in ((chunk.Forward, ["walk_kda"]), (chunk.Backward, BACK)):
        found = []
        for T in (70, 130, 1000):
            far = replace(pretended_calls.usual(T), layout="heads_first", state_layout="far")
            (_, _, args, _), _, seen = walked(gpu, kind, far)
            assert seen[:2] == launched
            inputs = {x.data_ptr() for x in args if x is not None and not x.is_contiguous()}
            given = [
                x.base.data_ptr()
                for launch in gpu
                for x in launch.args
                if hasattr(x, "block_shape")
            ]
            assert len(given) >= 5 and not inputs & {*given}
            found.append(len(plans()))
        assert found[0] == found[-1]


def test_a_stage_that_does_what_no_plan_replays_has_no_plan(gpu):
    """`test_refs.py` lists what plans do not replay."""
    q = torch.empty(2, 1, 2, 8, device="cuda:0")
    with (
        mock.patch.object(type(BACKEND), "step", staticmethod(lambda p, o, final: p.q.zero_())),
        pytest.raises(TypeError, match="zero_ of the tensor 'q'"),
    ):
        decode(q)
    assert not plans() and not BACKEND.decodes
