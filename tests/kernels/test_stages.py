"""Each stage of the backend against its twin in the reference, alone: on the same inputs, made by
the reference.
"""

import inspect
from dataclasses import fields

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kda_ops import chunk, dispatch
from kda_ops.backends import native as native_module
from kda_ops.backends.reference import Reference
from kda_ops.problem import CHUNK, Problem
from kda_ops.sequences import Chunks, count_chunks
from kda_ops.stages import GRADIENTS, Backend, Gradients, Tile, Trace
from tests.support.calls import run
from tests.support.cases import Case, cases, replace
from tests.support.closeness import assert_identical
from tests.support.pools import pool_arguments, pools
from tests.support.target import TARGET

if dispatch.backend_name(TARGET.device) != "native":
    pytest.skip("the stages of the kernels have their own twins' tests", allow_module_level=True)

native = dispatch.load("native")
# the same formulas in float64 leave no doubt which stage is wrong
WIDE = {"dtype": torch.float64, "narrow": False}


def parse(case, **changed):
    return Problem.parse(case.rank, *(case.inputs() | changed).values(), **case.flags())


def close(got, want, name=""):
    """To float64 rounding; resets of -1000 cost no digits."""
    assert (got is None) == (want is None), name
    if want is None:
        return
    assert got.dtype == want.dtype and got.shape == want.shape, name
    top = want.abs().max().item() if want.numel() else 0.0
    torch.testing.assert_close(
        got, want, rtol=1e-11, atol=1e-11 * max(1.0, top), msg=lambda m: f"{name}: {m}"
    )


def same_fields(got, want, but=()):
    for f in fields(want):
        if f.name in but:
            continue
        close(getattr(got, f.name), getattr(want, f.name), f.name)


@pytest.mark.bits
@pytest.mark.quick
@given(case=cases(**WIDE))
def test_prepare(case):
    p = parse(case)
    want = Reference().prepare(p)
    same_fields(native.prepare(p), want)
    assert_identical(native.prepare(p, want.A).A, want.A, "a kept A")


@pytest.mark.quick
@given(case=cases(**WIDE))
def test_scan(case):
    p, reference = parse(case), Reference()
    tile = reference.prepare(p)
    want_o = p.new_output()
    want_state = p.new_final_state()
    o = p.new_output()
    state = p.new_final_state()
    want = reference.scan(p, tile, want_o, want_state, keep=True)
    same_fields(native.scan(p, tile, o, state, keep=True), want)
    close(o, want_o, "o")
    close(state, want_state, "final_state")
    assert native.scan(p, tile, o, state, keep=False) is None
    same_fields(native.scan(p, tile, None, None, keep=True), replace(want, o=None))


@pytest.mark.parametrize("backend", ("native", "reference"))
def test_a_product_with_a_later_key_that_overflows_reaches_no_earlier_token(variant, backend):
    case = Case(variant, T=61, H=1, HV=1, gate="weak", l2norm=False, dtype=torch.float32)
    inputs, outs = case.inputs(), []
    inputs["q"][:, 5] *= 1e20
    for factor in (1.0, 1e20):
        inputs["k"][:, 60] *= factor
        args, b = tuple(inputs.values()), dispatch.load(backend)
        outs.append(chunk.Infer(case.rank, args, case.flags()).run(b)[0])
    assert_identical(outs[1][:, :60], outs[0][:, :60], "o")


@pytest.mark.parametrize("op", ("chunk_", "recurrent_"))
@given(data=st.data())
def test_a_stage_on_a_pool(op, data):
    pool, outs = data.draw(pools(op=op, dtype=torch.float64)), []
    for backend in (Reference(), native):
        x, state, (indices, *extra) = pool.case.inputs(), pool.state(), pool.indices()
        args = pool_arguments(x, state, indices, extra[op == "chunk_"], pool.resumed())
        parse = Problem.parse_prefill if op == "chunk_" else Problem.parse_step
        p = parse(pool.case.rank, *args, **pool.flags())
        o = p.new_output()
        if op == "chunk_":
            backend.scan(p, Reference().prepare(p), o, p.state, keep=False)
        else:
            backend.step(p, o, p.state)
        outs.append((o, state))
    close(outs[1][0], outs[0][0], "o")
    close(outs[1][1], outs[0][1], "state")


@given(case=cases(**WIDE))
def test_reverse_scan(case):
    p, reference = parse(case), Reference()
    tile = reference.prepare(p)
    do, dfinal_state = case.cotangents()
    for d_o in (do, None):
        for d_s in (dfinal_state, None) if case.final else (None,):
            got, want = (
                b.reverse_scan(p, tile, d_o, d_s, frozenset(GRADIENTS)) for b in (native, reference)
            )
            same_fields(got, want, but=("dv",))  # native takes that from z
    assert native.reverse_scan(p, tile, do, None, frozenset()).dinitial_state is None


@given(case=cases(**WIDE))
def test_gradient(case):
    p, reference = parse(case), Reference()
    tile = reference.prepare(p)
    trace = reference.scan(p, tile, None, None, keep=True)
    do, dfinal_state = case.cotangents()
    for d_o in (do, None):
        reverse = reference.reverse_scan(
            p, tile, d_o, dfinal_state if case.final else None, frozenset(GRADIENTS)
        )
        need = frozenset(GRADIENTS)
        same_fields(
            native.gradient(p, tile, trace, d_o, reverse, need),
            reference.gradient(p, tile, trace, d_o, reverse, need),
        )


@pytest.mark.bits
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradient_gives_what_was_asked_for_and_the_same(variant, name):
    case = Case(variant, gate="softplus", dtype=torch.float64)
    p = parse(case)
    tile = native.prepare(p)
    trace, (do, _) = native.scan(p, tile, None, None, keep=True), case.cotangents()
    reverse = native.reverse_scan(p, tile, do, None, frozenset(GRADIENTS))
    alone, together = (
        native.gradient(p, tile, trace, do, reverse, frozenset(need))
        for need in ((name,), GRADIENTS)
    )
    assert {f.name for f in fields(Gradients) if getattr(alone, f.name) is not None} == {name}
    assert_identical(getattr(alone, name).contiguous(), getattr(together, name).contiguous(), name)


@given(case=cases(**WIDE))
def test_step(case):
    p = parse(case)
    (want_o, want_state), (o, state) = ((p.new_output(), p.new_final_state()) for _ in range(2))
    Reference().step(p, want_o, want_state)
    native.step(p, o, state)
    close(o, want_o, "o")
    close(state, want_state, "final_state")


@given(case=cases(**WIDE))
def test_a_chunk_s_inverse_is_unit_lower_triangular(case):
    A = native.prepare(parse(case)).A
    assert torch.equal(A, A.tril()) and bool((torch.diagonal(A, dim1=-2, dim2=-1) == 1).all())


@pytest.mark.quick
@given(case=cases())
def test_splitting_into_chunks_and_joining_is_the_identity(case):
    p = parse(case)
    chunks = Chunks(p)
    x = torch.randn(p.B, p.T, 2, 3)
    split = chunks.split(x, torch.float32)
    assert split.shape == (count_chunks(p), 2, CHUNK, 3)
    inside = torch.zeros(p.B, p.T, 1, 1)
    for row, a, b in case.spans:
        inside[row, a:b] = 1.0
    assert torch.equal(chunks.join(split), x * inside)


@pytest.mark.quick
def test_a_backend_is_the_stages_of_its_contract():
    functions = [(n, f) for n, f in vars(Backend).items() if inspect.isfunction(f)]
    stages = {n for n, f in functions if "raise NotImplementedError" in inspect.getsource(f)}
    # `walks` says no, and so do `Keeps.trains` and `Keeps.runs`
    stages -= {"reverse_walk", "train", "walk_back", "starts_of_runs"}
    assert {"prepare", "scan", "step"} < stages
    for name in ("native", "reference"):
        backend = type(dispatch.load(name))
        assert not [n for n in stages if getattr(backend, n) is getattr(Backend, n)]
    assert not {f.name for f in fields(Tile)} & {f.name for f in fields(Trace)}


def test_a_call_of_several_slabs_matches_a_call_of_one(variant, monkeypatch):
    case = Case(variant, B=2, T=200, H=1, HV=2, gate="softplus", beta="sigmoid", l2norm=True)
    want = run(case)
    # three of the eight chunks at a time
    monkeypatch.setattr(native_module, "SLAB", 3 * case.HV * CHUNK * case.K)
    for name, x in run(case).items():
        torch.testing.assert_close(
            x, want[name], rtol=1e-4, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}"
        )
