"""The short convolution and the gated norm: numbers, and the promises of every operator."""

from dataclasses import replace
from itertools import accumulate, product

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode

import kda_ops
from tests.support.calls import Recorded
from tests.support.cases import on
from tests.support.closeness import assert_all_identical, assert_identical
from tests.support.layer_operators import (
    CASES,
    Conv,
    NormCase,
    assert_meets_budget,
    cotangents,
    dtypes_of,
    operator,
    outputs,
    run,
)
from tests.support.target import TARGET

BOTH = (Conv(), Conv(lengths=(2, 0, 5), behind=2), NormCase(), NormCase(G=2, silu=True))
QUICK = ("test_schema", "test_faketensor", "test_autograd_registration")
COMPILED = (*QUICK, "test_aot_dispatch_dynamic")
each = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
both = pytest.mark.parametrize("case", BOTH, ids=lambda case: case.name)


def leaves(case):
    return [
        t if t is None or not t.is_floating_point() else t.to(TARGET.device).requires_grad_()
        for t in case.inputs().values()
    ]


@pytest.mark.quick
@each
def test_results_and_gradients_meet_the_error_budget(case):
    for one in dtypes_of(case, TARGET.dtypes):
        assert_meets_budget(one, TARGET.device)


@pytest.mark.bits
@each
def test_two_runs_give_the_same_bits(case):
    assert_all_identical(run(case, TARGET.device), run(case, TARGET.device))


def test_gradients_are_finite_differences():
    if torch.float64 not in TARGET.dtypes:
        pytest.skip("no float64 here")
    for case in BOTH:
        inputs = case.inputs()
        wide = [
            t if t is None or not t.is_floating_point() else t.double().requires_grad_()
            for t in inputs.values()
        ]
        torch.autograd.gradcheck(
            lambda *x, case=case: outputs(case, operator(case)(*x, **case.flags())), wide
        )


@pytest.mark.bits
@pytest.mark.parametrize("subset", (("x",), ("weight",), ("initial_tail",), ("bias", "x")))
def test_any_subset_of_gradients_is_the_same(subset):
    case = Conv(lengths=(2, 0, 5), behind=2)
    want = run(case, TARGET.device)
    inputs = on(case.inputs(), TARGET.device)
    wanted = [inputs[n].requires_grad_() for n in subset]
    outs = outputs(case, operator(case)(*inputs.values(), **case.flags()))
    known = [(y, d) for y, d in zip(outs, cotangents(case, outs)) if y.requires_grad]
    found = torch.autograd.grad([y for y, _ in known], wanted, [d for _, d in known])
    for name, d in zip(subset, found):
        assert_identical(d, want[f"d{name}"], name)


def test_a_gradient_of_the_final_tail_alone_is_enough():
    case = Conv(T=2, W=4)
    x = leaves(case)
    _, final = operator(case)(*x, **case.flags())
    dx, dtail, dweight = torch.autograd.grad(final.sum(), (x[0], x[3], x[1]))
    assert torch.equal(dx, torch.ones_like(dx)) and not dweight.any()
    assert torch.equal(dtail.sum((0, 2)).cpu(), torch.tensor([0.0, 0.0, 2.0 * case.D]))


@pytest.mark.bits
@pytest.mark.quick
def test_splitting_a_sequence_does_not_change_it():
    case = Conv(T=41, D=8)
    x = on(case.inputs(), TARGET.device)
    y, final = operator(case)(*x.values(), **case.flags())
    tail, parts = x["initial_tail"], []
    for part in x["x"].split((1, 1, 0, 33, 6), 1):
        some, tail = operator(case)(part, x["weight"], x["bias"], tail, None, **case.flags())
        parts.append(some)
    assert_identical(torch.cat(parts, 1), y, "y")
    assert_identical(tail, final, "final_tail")


@pytest.mark.bits
def test_a_sequence_has_the_same_bits_alone_and_packed():
    case = Conv(lengths=(3, 0, 70, 1), behind=4, D=8)
    x = on(case.inputs(), TARGET.device)
    y, final = operator(case)(*x.values(), **case.flags())
    begin = 0
    for n, length in enumerate(case.lengths):
        part = x["x"][:, begin : begin + length]
        tail = x["initial_tail"][n : n + 1]
        alone = operator(case)(part, x["weight"], x["bias"], tail, None, **case.flags())
        assert_identical(alone[0][0], y[0, begin : begin + length], "y")
        assert_identical(alone[1][0], final[n], "final_tail")
        begin += length
    assert not y[:, begin:].any()


def test_tokens_of_no_sequence_reach_no_gradient():
    case = Conv(lengths=(3, 0, 5), behind=3)
    x = leaves(case)
    with torch.no_grad():
        x[0][:, 8:] = float("nan")
    y, final = operator(case)(*x, **case.flags())
    grads = torch.autograd.grad((y.square().sum() + final.sum()), [t for t in x[:4]])
    assert y.isfinite().all() and all(d.isfinite().all() for d in grads)
    assert not grads[0][:, 8:].any()


@pytest.mark.quick
@pytest.mark.parametrize("n", range(5))
def test_a_nan_of_a_sequence_reaches_no_other_sequence(n):
    case = Conv(lengths=(3, 0, 5, 1, 2), behind=2)
    want, got = run(case, TARGET.device), run(replace(case, nan=n), TARGET.device)
    begin, length = sum(case.lengths[:n]), case.lengths[n]
    token = torch.arange(sum(case.lengths) + case.behind, device=TARGET.device)
    others = (token < begin) | (token >= begin + length)
    rest = torch.arange(case.N, device=TARGET.device) != n
    for name in ("y", "dx"):
        assert_identical(got[name][:, others], want[name][:, others], name)
    for name in ("final_tail", "dinitial_tail"):
        assert_identical(got[name][rest], want[name][rest], name)
    if not length:  # an empty sequence passes its tail on and multiplies nothing
        for name in ("dinitial_tail", "dweight", "dbias"):
            assert_identical(got[name], want[name], name)


POOLED = {  # a call, and the slots of its sequences, or None if sequence n has slot n
    "dense": (Conv(B=3, T=5), None),
    "one token": (Conv(B=3, T=1), None),
    "slots": (Conv(B=3, T=1), (4, -1, 1)),
    "many tokens": (Conv(B=2, T=150), (4, 0)),
    "packed": (Conv(lengths=(2, 0, 5), behind=2), (4, -1, 1)),
}


def pooled(pool, dtype=torch.float32, wide=None):
    """Return a case, its inputs, a pool of tails in `wide` and the slot of each sequence."""
    case, slots = replace(POOLED[pool][0], dtype=dtype), POOLED[pool][1]
    gen = torch.Generator().manual_seed(5)
    tails = torch.randn(6 if slots else case.N, 3, case.D, generator=gen).to(wide or dtype)
    indices = None if slots is None else torch.tensor(slots, device=TARGET.device)
    return case, on(case.inputs(), TARGET.device), tails.to(TARGET.device), indices


@pytest.mark.bits
@pytest.mark.quick
@pytest.mark.parametrize("pool", POOLED)
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16))
def test_a_call_on_a_pool_touches_the_slots_it_names_and_nothing_else(pool, dtype):
    case, x, tails, indices = pooled(pool, dtype)
    own = list(POOLED[pool][1] or range(case.N))
    held = torch.stack([tails[max(s, 0)] for s in own])
    y, final = operator(case)(x["x"], x["weight"], x["bias"], held, x["cu_seqlens"], **case.flags())
    before = tails.clone()
    got = operator(case, "_")(
        x["x"], x["weight"], x["bias"], tails, indices, x["cu_seqlens"], activation="silu"
    )
    offsets = [0, *accumulate(case.lengths or ())]
    for n, slot in enumerate(own):
        mine = (0, slice(*offsets[n : n + 2])) if case.lengths else n
        if slot < 0:
            assert not got[mine].any()
        else:
            assert_identical(got[mine], y[mine], "y")
            assert_identical(tails[slot], final[n], "tail")
    rest = [s for s in range(len(tails)) if s not in own]
    assert_identical(tails[rest], before[rest], "other slots")


@pytest.mark.quick
@pytest.mark.parametrize("null", (-1, 0, 2))
@pytest.mark.parametrize("pool", ("slots", "many tokens", "packed"))
def test_every_slot_up_to_null_slot_counts_as_a_negative_one(pool, null):
    slots = POOLED[pool][1]
    case, x, pool, _ = pooled(pool)
    moved = torch.cat([torch.full_like(pool[: null + 1], torch.nan), pool])

    def step(tails, own, **flags):
        own = torch.tensor(own, device=TARGET.device)
        given = x["x"], x["weight"], x["bias"], tails, own, x["cu_seqlens"]
        return operator(case, "_")(*given, **flags)

    for nobody in (*range(-1, null + 1), -(2**32), -(2**40) + 5, -(2**63)):
        got, before = moved.clone(), pool.clone()
        own = [nobody if s < 0 else s + null + 1 for s in slots]
        assert_identical(step(got, own, null_slot=null), step(before, slots), "y")
        assert_identical(got[null + 1 :], before, "the pool")
        assert got[: null + 1].isnan().all(), "a slot that is nobody's was written"


@pytest.mark.bits
@pytest.mark.quick
@pytest.mark.parametrize("pool", POOLED)
@pytest.mark.parametrize("wide", (None, torch.float64))
def test_a_sequence_that_begins_anew_has_the_bits_of_a_zeroed_tail(pool, wide):
    case, x, tails, own = pooled(pool, wide=wide)
    for resumed in product((False, True), repeat=case.N):
        nan, zero = tails.clone(), tails.clone()
        for n, slot in enumerate(POOLED[pool][1] or range(case.N)):
            if not resumed[n] and slot >= 0:
                nan[slot], zero[slot] = torch.nan, 0
        given = x["x"], x["weight"], x["bias"]
        has = torch.tensor(resumed, device=TARGET.device)
        y = operator(case, "_")(*given, nan, own, x["cu_seqlens"], has)
        assert_identical(y, operator(case, "_")(*given, zero, own, x["cu_seqlens"]), "y")
        assert_identical(nan, zero, "the pool")


@pytest.mark.parametrize("length", (0, 1, 2, 3))
@pytest.mark.parametrize("packed", (False, True))
@pytest.mark.parametrize(
    "dtype, wide",
    (
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.bfloat16),
        (torch.float32, torch.float64),
    ),
    ids=str,
)
def test_kept_rows_of_a_pool_keep_its_dtype(dtype, wide, packed, length):
    """Of a call with fewer tokens than a tail has rows, only the new rows are cast to x's dtype."""
    case = Conv(B=1, T=length, lengths=(length,) if packed else None, dtype=dtype)
    x = on(case.inputs(), TARGET.device)
    pool = torch.randn(3, 3, case.D, generator=torch.Generator().manual_seed(5)).to(wide)
    pool[1, 2] = 1e6 + 1.0 / 3  # beyond float16
    pool = pool.to(TARGET.device)
    want = torch.cat([pool[1], x["x"][0].to(wide)])[length:]
    slots = torch.tensor([1], device=TARGET.device)
    operator(case, "_")(x["x"], x["weight"], x["bias"], pool, slots, x["cu_seqlens"])
    assert_identical(pool[1], want, "the tail")


@pytest.mark.quick
@both
def test_opcheck(case):
    opcheck(operator(case), leaves(case), case.flags(), test_utils=COMPILED)
    x = [None if t is None else t.detach() for t in leaves(case)]
    outs = outputs(case, operator(case)(*x, **case.flags()))
    words = dict(case.flags())
    if case.name == "short_conv":
        for dy, dtail in ((outs[0], outs[1]), (None, outs[1]), (outs[0], None)):
            for need in (15, 2):
                args = dy, dtail, *x
                opcheck(operator(case, "_bwd"), args, words | {"need": need}, test_utils=QUICK[:2])
    else:
        opcheck(operator(case, "_bwd"), (outs[0], *x), words, test_utils=QUICK[:2])


def test_opcheck_in_place():
    case = Conv(B=3, T=2)
    x, weight, bias, _, _ = (None if t is None else t.detach() for t in leaves(case))
    tails, slots = torch.randn(5, 3, case.D), torch.tensor([4, -1, 0])
    args = x, weight, bias, tails.to(TARGET.device), slots.to(TARGET.device)
    opcheck(operator(case, "_"), args, {"activation": "silu"}, test_utils=COMPILED)


@both
def test_double_backward_is_refused_in_words(case):
    x = leaves(case)
    y, *_ = outputs(case, operator(case)(*x, **case.flags()))
    (d,) = torch.autograd.grad(y.square().sum(), x[0], create_graph=True)
    with pytest.raises(RuntimeError, match=f"^kda::{case.name}: double backward is not impl"):
        d.sum().backward()


def test_the_in_place_operator_refuses_autograd_and_vmap_and_counts_as_a_version():
    case = Conv(B=3, T=1)
    x, weight, bias, _, _ = leaves(case)
    tails = torch.zeros(3, 3, case.D, device=TARGET.device)
    with pytest.raises(RuntimeError, match="^kda::short_conv_ writes its tail in place and has no"):
        torch.ops.kda.short_conv_(x, weight, bias, tails)
    with torch.no_grad():
        version = tails._version
        torch.ops.kda.short_conv_(x, weight, bias, tails)
        assert tails._version > version
        with pytest.raises(
            ValueError, match="short_conv_ writes its tail in place and cannot be m"
        ):
            torch.func.vmap(torch.ops.kda.short_conv_, (0, None, None, None))(
                x[None], weight, bias, tails
            )


@pytest.mark.bits
@both
def test_autocast_leaves_inputs_as_they_are(case):
    want = run(case, TARGET.device)
    with torch.autocast(TARGET.device.type, dtype=torch.float16):
        assert_all_identical(run(case, TARGET.device), want)


@both
def test_tangents_are_refused_in_words(case):
    x = [None if t is None else t.detach() for t in leaves(case)]

    def call(first):
        return outputs(case, operator(case)(first, *x[1:], **case.flags()))[0]

    with pytest.raises(NotImplementedError, match=f"^kda::{case.name} has no forward-mode"):
        torch.func.jvp(call, (x[0],), (x[0],))


@pytest.mark.quick
@both
def test_gradients_per_sample_are_those_of_each_sample(case):
    x = [None if t is None else t.detach() for t in leaves(case)]
    samples = torch.stack([x[0], 2 * x[0], -x[0]])

    def loss(weight, first):
        outs = outputs(case, operator(case)(first, weight, *x[2:], **case.flags()))
        return sum(y.square().sum() for y in outs)

    got = torch.func.vmap(torch.func.grad(loss, (0, 1)), (None, 0))(x[1], samples)
    for i, sample in enumerate(samples):
        for mine, want in zip(got, torch.func.grad(loss, (0, 1))(x[1], sample)):
            torch.testing.assert_close(mine[i], want, rtol=1e-5, atol=1e-5)
    weights = torch.stack([x[1], -x[1]])
    many = torch.func.vmap(loss, (0, None))(weights, x[0])
    torch.testing.assert_close(many, torch.stack([loss(w, x[0]) for w in weights]))


@pytest.mark.quick
def test_flops_are_those_of_the_products():
    case = Conv(T=5, tail=False)
    once = 2 * case.B * case.T * case.D * case.W
    with FlopCounterMode(display=False) as counter:
        operator(case)(*leaves(case), **case.flags())[0].sum().backward()
    got = {str(op): n for op, n in counter.get_flop_counts()["Global"].items()}
    assert got == {"kda.short_conv": once, "kda.short_conv_bwd": 2 * once}


def z(*shape, dtype=torch.float32, device="cpu"):
    return torch.zeros(shape, dtype=dtype, device=device)


LEGAL = dict(x=z(2, 5, 6), weight=z(6, 4), bias=z(6), initial_tail=z(2, 3, 6), cu_seqlens=None)
LEGAL_NORM = dict(x=z(2, 5, 4, 6), weight=z(1, 6), gate=z(2, 5, 4, 6))
OFFSETS = torch.tensor([0, 2, 5])
WRONG = (
    ({"x": z(5, 6)}, ValueError, r"^x must have shape \[B, T, D\], got \[5, 6\]"),
    ({"x": z(2, 5, 6, dtype=torch.int64)}, TypeError, "^x must be float16, bfloat16"),
    ({"x": None}, TypeError, "^x must be a tensor, got None"),
    ({"weight": None}, TypeError, "^weight must be a tensor, got None"),
    ({"weight": z(6, 1, 4)}, ValueError, r"^weight must have shape .*: pass weight\[:, 0\]"),
    ({"weight": z(7, 4)}, ValueError, r"^weight must have shape \[D, W\] = \[6, W\]"),
    ({"weight": z(6, 0)}, ValueError, "^weight must have shape .* at least one tap"),
    ({"weight": z(6, 4, device="meta")}, TypeError, "^weight must be on cpu, where x is"),
    ({"bias": z(4)}, ValueError, r"^bias must have shape \[D\] = \[6\], got \[4\]"),
    ({"initial_tail": z(2, 6, 3)}, ValueError, "^initial_tail must have .*: pass its transpose"),
    ({"initial_tail": z(3, 3, 6)}, ValueError, "^initial_tail must have shape"),
    ({"initial_tail": z(2, 3, 6).long()}, TypeError, "^initial_tail must be float16"),
    ({"cu_seqlens": OFFSETS}, ValueError, "^cu_seqlens packs its sequences into one row"),
    ({"activation": "relu"}, ValueError, "^activation must be one of"),
)
WRONG_NORM = (
    ({"x": z(5, 6)}, ValueError, "^x must have 4 dimensions"),
    ({"x": None}, TypeError, "^x must be a tensor, got None"),
    ({"weight": z(6)}, ValueError, r"^weight must have shape \[G, V\] = \[G, 6\]"),
    ({"weight": z(3, 6)}, ValueError, "^H must be a multiple of G"),
    ({"gate": z(2, 5, 4, 5)}, ValueError, r"^gate must have shape \[B, T, H, V\]"),
    ({"gate": z(2, 5, 4, 6).int()}, TypeError, "^gate must be float16"),
    ({"eps": 0.0}, ValueError, "^eps must be a finite number above 0"),
    ({"activation": None}, (ValueError, RuntimeError), "activation"),
    ({"activation": "relu"}, ValueError, "^activation must be one of"),
)


@pytest.mark.quick
@pytest.mark.parametrize("fake", (False, True))
@pytest.mark.parametrize(
    "op, change, error, words",
    [("short_conv", *w) for w in WRONG] + [("gated_rms_norm", *w) for w in WRONG_NORM],
)
def test_a_wrong_call_is_refused_in_words(op, change, error, words, fake):
    x = (LEGAL if op == "short_conv" else LEGAL_NORM) | change
    if fake:
        mode = FakeTensorMode()
        x = {n: mode.from_tensor(t) if isinstance(t, torch.Tensor) else t for n, t in x.items()}
        with mode, pytest.raises(error, match=words):
            getattr(torch.ops.kda, op)(**x)
        return
    with pytest.raises(error, match=words):
        getattr(torch.ops.kda, op)(**x)


WRONG_POOL = (
    ({"tail": z(3, 3)}, r"^tail must have shape \[slots, W - 1, D\], got \[3, 3\]"),
    ({"tail": z(4, 3, 7)}, "^tail must have shape"),
    ({"tail": z(1, 3, 6).expand(4, 3, 6)}, "^tail must not overlap itself"),
    ({"tail_indices": torch.tensor([1])}, r"^tail_indices must have shape \[N\] = \[2\]"),
    ({"tail_indices": torch.tensor([1, 4])}, "^tail_indices must be below the number of slots"),
    ({"tail_indices": torch.tensor([1, 1])}, "^tail_indices must name distinct slots"),
    ({"tail_indices": None}, "^tail must have shape"),
    ({"null_slot": -2}, "^null_slot must lie between -1 and"),
    ({"has_initial_state": torch.ones(3, dtype=torch.bool)}, "^has_initial_state must have shape"),
    ({"null_slot": 1, "tail_indices": torch.tensor([2, 2])}, "^tail_indices must name distinct"),
    ({"null_slot": 0, "tail_indices": None}, "^null_slot must be -1 without tail_indices"),
)


@pytest.mark.quick
@pytest.mark.parametrize("change, words", WRONG_POOL)
def test_a_wrong_pool_is_refused_before_it_is_written(change, words):
    x = dict(tail=torch.ones(4, 3, 6), tail_indices=torch.tensor([2, 0])) | change
    before = x["tail"].clone()
    with pytest.raises(ValueError, match=words):
        torch.ops.kda.short_conv_(torch.ones(2, 1, 6), z(6, 4), None, **x)
    assert torch.equal(x["tail"], before)


def test_numbers_in_the_place_of_has_initial_state_are_refused():
    tail = torch.ones(2, 3, 6)
    given = torch.ones(2, 1, 6), z(6, 4), None, tail, None, None
    with pytest.raises(TypeError, match="^has_initial_state must be bool, got torch.int32"):
        torch.ops.kda.short_conv_(*given, torch.ones(2, dtype=torch.int32))
    assert tail.eq(1).all()


@pytest.mark.bits
def test_the_functions_take_any_rank_and_a_plain_weight():
    case = NormCase(G=2, silu=True)
    x, weight, gate = case.inputs().values()
    want = operator(case)(x, weight, gate, **case.flags())
    got = kda_ops.gated_rms_norm(x[0, 0], weight, gate[0, 0], **case.flags())
    assert_identical(got, want[0, 0], "y")
    one = kda_ops.gated_rms_norm(x[0, 0, 0], weight[0], gate[0, 0, 0], **case.flags())
    assert_identical(one, want[0, 0, 0], "y")
    with pytest.raises(ValueError, match="^gate must have shape"):
        kda_ops.gated_rms_norm(x, weight, gate[0])


def test_no_tokens_no_channels_and_no_sequences_are_calls():
    for case in (Conv(T=0), Conv(B=0), Conv(D=0), Conv(lengths=(0, 0)), Conv(lengths=(), behind=2)):
        x, got = case.inputs(), run(case, TARGET.device)
        assert all(d.shape == x[n[1:]].shape for n, d in got.items() if n[0] == "d")
        assert got["y"].shape == x["x"].shape and not got["y"].any()
        assert_identical(got["final_tail"].cpu(), x["initial_tail"], "final_tail")
        assert not got["dweight"].any() and not got["dbias"].any()
    for case in (NormCase(T=0), NormCase(H=0)):
        assert not run(case, TARGET.device)["dweight"].any()


@pytest.mark.parametrize(
    "change, words",
    (
        ({"x": None}, "x must be a tensor, got None"),
        ({"weight": None}, "weight must be a tensor, got None"),
        ({"x": torch.randn(2, 3, 4).to_sparse()}, "x must be a dense tensor"),
        ({"eps": None}, "eps must be a number, got None"),
        ({"eps": torch.tensor(1e-5, requires_grad=True)}, "eps must be a number"),
        ({"activation": None}, "activation must be text, got None"),
    ),
)
def test_the_function_of_the_norm_refuses_in_words(change, words):
    call = {"x": torch.randn(2, 3, 4), "weight": torch.ones(4)} | change
    with pytest.raises(TypeError, match=words):
        kda_ops.gated_rms_norm(**call)


@pytest.mark.parametrize("shape", ((5, 0, 4), (0, 3, 4), (2, 5, 0, 4), (1, 0, 5, 3, 4)))
def test_the_function_of_the_norm_takes_no_rows(shape):
    assert kda_ops.gated_rms_norm(torch.randn(shape), torch.ones(4)).shape == shape


def test_rows_with_one_weight_are_tokens_of_one_head():
    """Kernels put tokens of a head into one program, and share one sum of its weight's gradient."""
    with Recorded() as seen:
        for shape in ((4,), (7, 4), (7, 5, 4), (7, 5, 3, 4), (2, 7, 5, 3, 4)):
            x = torch.randn(shape)
            assert kda_ops.gated_rms_norm(x, torch.ones(4), x).shape == shape
        kda_ops.gated_rms_norm(torch.randn(6, 4), torch.ones(3, 4))
    assert [tuple(given["x"].shape) for _, given in seen.calls] == [
        *((1, 1, 1, 4), (1, 7, 1, 4), (7, 5, 1, 4), (7, 5, 3, 4), (1, 70, 3, 4), (1, 1, 6, 4))
    ]
