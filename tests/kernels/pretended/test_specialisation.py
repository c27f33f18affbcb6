"""Whenever a call finds a plan, Triton itself would launch the kernels that the plan launches."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kda_ops import chunk, operators, recurrent
from kda_ops.backends.triton import BACKEND, tuning
from kda_ops.backends.triton.plans.recording import Launch
from kda_ops.gate import GateBackwardPass, GatePass
from tests.support import pretended_calls, record_calls
from tests.support.pretend import Pointer, described, plain, pretend_gpu, specialise

DTYPES = {
    "*fp64": torch.float64,
    "*fp32": torch.float32,
    "*bf16": torch.bfloat16,
    "*fp16": torch.float16,
    "*i32": torch.int32,
    "*i64": torch.int64,
    "*i16": torch.int16,
    "*u8": torch.uint8,
    "*i8": torch.int8,
    "*i1": torch.bool,
    "*u1": torch.bool,
}


@pytest.fixture(scope="module")
def launches():
    with pretend_gpu() as launches:
        yield launches


def as_taken(x, taken):
    """Give an address the dtype that Triton's binder has seen."""
    if isinstance(taken, tuple) and isinstance(taken[0], tuple):
        return tuple(as_taken(*both) for both in zip(x, zip(*taken)))
    if isinstance(taken[0], str) and taken[0].startswith("*"):
        return Pointer(DTYPES[taken[0]], x)
    return x


def assert_implied(actual, compiled_for, where):
    """Assert that a kernel compiled for what it was shown may be launched with these arguments."""
    for i, (a, s) in enumerate(zip(actual, compiled_for, strict=True)):
        if s[0] == "constexpr":
            continue
        if isinstance(s[0], tuple):
            assert_implied(list(zip(*a)), list(zip(*s)), (*where, i))
        elif s[1] is not None and s[1] != "":
            assert s[1] == a[1], (*where, i, a, s)


def check(backend, model, n, launches):
    before = sum(map(len, backend.plans.values()))
    return check_call(backend, pretended_calls.run(backend, model, n), launches, before)


def check_call(backend, call, launches, before):
    launches.clear()
    backend.run(*call)
    planned = list(launches)
    if sum(map(len, backend.plans.values())) > before:
        return False
    launches.clear()
    backend.run(*call)  # the second call with these sizes, which decode has met
    assert [*map(described, launches)] == [*map(described, planned)]
    saved = backend.plans, backend.decodes
    backend.plans, backend.decodes = {}, {}
    launches.clear()
    backend.run(*call)
    (plans,) = backend.plans.values()
    steps = [x for x in plans[0].steps if isinstance(x, Launch)]
    (backend.plans, backend.decodes), fresh = saved, list(launches)
    assert len(planned) == len(fresh) == len(steps)
    for got, want, step in zip(planned, fresh, steps):
        name = got.made.kernel.fn.__name__
        # what the plan's kernel was compiled for is what this call asks for ...
        assert got.made == want.made, name
        assert got.programs == want.programs, name
        args = tuple(map(as_taken, got.args, got.made.specialisation))
        assert len(args) == len(want.args)
        # ... and what the arguments that it passes say themselves
        actual, _ = specialise(got.made.kernel, args, step.options)
        assert_implied(actual, got.made.specialisation, (name,))
        taken = got.made.specialisation
        assert [*map(plain, got.args, taken)] == [*map(plain, want.args, taken)], name
    return True


@settings(max_examples=3 * settings().max_examples)
@given(data=st.data())
def test_a_plan_is_used_for_calls_that_compile_to_its_kernels(data, launches):
    BACKEND.forget()
    model = data.draw(pretended_calls.models)
    used = [check(BACKEND, model, n, launches) for n in data.draw(pretended_calls.sequences())]
    assert not used[0]


@given(data=st.data())
def test_a_plan_of_the_walk_is_used_for_calls_that_compile_to_it(data, launches):
    BACKEND.forget()
    fields = pretended_calls.MODEL | dict(K=128, V=128)
    model = pretended_calls.Model(kind=chunk.Backward, rank=0, kept=False, **fields)
    with tuning.force(walk=True):
        used = [check(BACKEND, model, n, launches) for n in data.draw(pretended_calls.sequences())]
    assert not used[0]


@pytest.mark.parametrize("kind", (chunk.Forward, chunk.Backward))
@given(data=st.data())
def test_a_plan_of_training_that_walks_is_used_for_calls_that_compile_to_it(kind, data, launches):
    BACKEND.forget()
    packed, kept = data.draw(st.booleans()), data.draw(st.booleans())
    fields = pretended_calls.MODEL | dict(packed=packed, kept=kept)
    model = pretended_calls.Model(kind=kind, rank=1, **fields)
    with tuning.force(walk=True):
        used = [check(BACKEND, model, n, launches) for n in data.draw(pretended_calls.sequences())]
    assert not used[0]
    names = {x.made.kernel.fn.__name__ for x in launches}
    if kind is chunk.Forward:
        assert "walk_kda" in names or names >= {"prepare_walk", "scan_walk"}
    else:
        assert "reverse_walk_kda" in names and ("states_kda" in names) != kept


def test_a_call_of_48_heads_has_a_plan_of_the_walk(launches):
    BACKEND.forget()
    fields = pretended_calls.MODEL | dict(H=48, K=128, V=128)
    model = pretended_calls.Model(kind=chunk.Backward, rank=0, kept=False, **fields)
    used = [check(BACKEND, model, pretended_calls.usual(T), launches) for T in (64, 130)]
    assert used == [False, True]
    assert any("reverse_walk_gdn" in str(plan) for some in BACKEND.plans.values() for plan in some)


@pytest.mark.parametrize("kind", (chunk.Infer, chunk.Forward, chunk.Backward, recurrent.Recur))
@pytest.mark.parametrize("rank", (1, 0))
def test_numbers_of_32_and_of_64_bits_have_plans_of_their_own(rank, kind, launches, force):
    force(run=0)  # GDN's reverse walk has other runs, and so other plans, for twice the tokens
    BACKEND.forget()
    model = pretended_calls.Model(kind=kind, rank=rank, kept=False, **pretended_calls.MODEL)
    some = [pretended_calls.usual(T, B=2) for T in (2**20, 2**21, 2**25, 2**26)]
    used = [check(BACKEND, model, n, launches) for n in some]
    assert used == [False, True, False, True]


LENGTHS = (48, 64, 65, 70, 100, 1000, 1024)  # multiples of 16 and others; none that cuts runs
# Most compilations of a kernel over these lengths and two batch sizes, where H K and HV V are odd:
# the stride of the batch, T H K, is a multiple of 16 for some. `gradient_keys` also takes B T HV.
MOST = {"gradient_keys": 3}
KERNELS = {
    (
        chunk.Backward,
        1,
    ): "prepare_kda gradient_pairs sum_decays gradient_keys sum_gradients".split(),
    (chunk.Backward, 0): ["prepare_gdn", "gradient_gdn"],
    (chunk.Infer, 1): ["prepare_kda", "scan_kda"],
    (chunk.Infer, 0): ["prepare_gdn", "scan_gdn"],
    (chunk.Prefill, 1): ["prepare_kda", "scan_kda"],
    (chunk.Prefill, 0): ["prepare_gdn", "scan_gdn"],
    (recurrent.Recur, 1): ["recur"],
    (recurrent.Recur, 0): ["recur"],
    (GatePass, 1): ["gate_forward"],
    (GateBackwardPass, 1): ["gate_gradient"],
}


def compilations(kind, rank, launches, **sizes):
    """Name the kernels of a pass, and count how often each is compiled over all lengths."""
    words = pretended_calls.MODEL | dict(kind=kind, rank=rank, kept=False, gate="softplus") | sizes
    if kind is chunk.Prefill:
        words["slots"] = 1
    model, found = pretended_calls.Model(**words), {}
    for B in (1, 2):  # scans have another cut for more
        for T in LENGTHS:
            BACKEND.plans.clear()
            launches.clear()
            BACKEND.run(*pretended_calls.run(BACKEND, model, pretended_calls.usual(T, B=B)))
            for i, launched in enumerate(launches):
                made = launched.made
                key = i, made.kernel.fn.__name__
                found.setdefault(key, set()).add((str(made.specialisation), made.options))
    return {key: len(each) for key, each in found.items()}


@pytest.mark.parametrize("kind, rank", KERNELS)
def test_one_compilation_serves_all_lengths_where_16_divides_a_token(kind, rank, launches):
    """Elsewhere, two or three do."""
    found = compilations(kind, rank, launches, H=32)
    assert set(KERNELS[kind, rank]) <= {name for _, name in found}
    assert not {key: n for key, n in found.items() if n > 1}
    odd = compilations(kind, rank, launches, H=33, K=15, V=15)
    assert not {key: n for key, n in odd.items() if n > MOST.get(key[1], 2)}


SIZES = ((2, 16), (2, 48), (4, 48), (2, 1), (3, 17), (2, 70), (2, 4096), (8, 4096))  # B, T


@pytest.mark.parametrize("layout", ("dense", "fused", "heads_first"))
@pytest.mark.parametrize("packed", (False, True))
@pytest.mark.parametrize("record", operators.LAYER, ids=lambda record: record.name)
def test_a_plan_of_a_layer_s_operator_is_used_for_calls_that_compile_to_it(
    record, packed, layout, launches
):
    call = record_calls.find(record, 1, packed, flagged=True, style="full")
    if call is None:
        pytest.skip("has no packed calls")
    BACKEND.forget()
    used = []
    for B, T in SIZES:
        sizes = {"T": T} if packed else {"T": T, "B": B, "N": B}
        tensors = replace(call, lengths=call.lengths | sizes).tensors().values()
        args = tuple(
            x if x is None or x.dim() < 3 else pretended_calls.make(x.shape, x.dtype, layout)
            for x in tensors
        )
        before = sum(map(len, BACKEND.plans.values()))
        used.append(check_call(BACKEND, (record.kind, 1, args, call.flags), launches, before))
    assert not used[0] and used[2] and used[-1]
