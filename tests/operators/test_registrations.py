"""What the operators promise to PyTorch besides their numbers: schemas, fakes, autograd, in-place
writes, autocast, vmap.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

import kda_ops
from kda_ops import dispatch
from kda_ops.registrations import schemas
from kda_ops.stages import GRADIENTS
from tests.support.calls import as_leaves, forward, overload, run
from tests.support.cases import STRIDES, Case, replace
from tests.support.closeness import assert_all_identical, assert_identical
from tests.support.pools import Pool, pool_arguments
from tests.support.target import TARGET

VARIANTS = ("kda", "gdn")
OPS = ("chunk", "recurrent")
QUICK = ("test_schema", "test_faketensor", "test_autograd_registration")
COMPILED = (*QUICK, "test_aot_dispatch_dynamic")
NOTHING = dict(gate="none", beta="none", state=False, final=False)
INSIDE = dict(gate="softplus", beta="neg_eigval", l2norm=True, H=1, HV=2)
OPTIONS = {
    "plain": {},
    "nothing optional": NOTHING,
    "packed": dict(lengths=(65, 0, 3), tail=2),
    "everything inside": INSIDE | dict(strides="fused"),
    "bounded, transposed": dict(gate="bounded", beta="sigmoid", transposed=True, seed=3),
    "nothing optional, all kept": NOTHING | dict(disable_recompute=True),
    "all kept": dict(disable_recompute=True, strides="heads_first"),
    "16 bit": dict(dtype=torch.float16, narrow=True),
    "expanded heads": dict(strides="expanded", H=2, HV=2),
    "no rows": dict(T=0),
}


def differentiable(case):
    inputs = case.inputs(TARGET.device)
    return [*(inputs | as_leaves(inputs)).values()]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("op", OPS)
def test_opcheck_of_functional_operators(variant, op, options):
    case = Case(
        variant, **({"B": 1 if "lengths" in options else 2, "T": 5, "K": 8, "V": 6} | options)
    )
    compiled = (
        op == "chunk"
        and case.seed == 0
        and case.rows
        and (variant == "kda") == (len(options) % 2 == 0)
    )
    opcheck(
        overload(variant, op),
        differentiable(case),
        case.flags(op),
        test_utils=COMPILED if compiled else QUICK,
    )
    opcheck(
        overload(variant, op),
        [*case.inputs(TARGET.device).values()],
        case.flags(op),
        test_utils=QUICK[:2],
    )


@pytest.mark.parametrize("strides", ("contiguous", "heads_first", "fused", "expanded"))
@pytest.mark.parametrize("keep", (False, True))
def test_opcheck_of_the_operators_of_training_graphs(variant, keep, strides):
    promises = dict(safe_beta=keep, safe_keys=keep, invariant=keep)
    sizes = dict(B=2, T=5, H=2, HV=2, K=8, V=6, strides=strides)
    case = Case(variant, **sizes, l2norm=True, disable_recompute=keep, **promises)
    inputs = [*case.inputs(TARGET.device).values()]
    opcheck(overload(variant, "chunk_fwd"), differentiable(case), case.flags(), test_utils=QUICK)
    o, _, *kept = overload(variant, "chunk_fwd")(*inputs, **case.flags())
    for need in ([True] * 8, [n in ("q", "v") for n in GRADIENTS]):
        for do, dfinal_state in (
            case.cotangents(TARGET.device),
            (case.cotangents(TARGET.device)[0], None),
            (None, case.cotangents(TARGET.device)[1]),
        ):
            opcheck(
                overload(variant, "chunk_bwd"),
                (do, dfinal_state, *kept, *inputs, o),
                case.flags() | {"need": schemas.mask_of(need)},
                test_utils=QUICK[:2],
            )


@pytest.mark.parametrize("lengths", (None, (0, 3, 2)))
def test_opcheck_of_the_halves_of_a_shard(variant, lengths):
    sizes = dict(B=2, T=5, H=2, HV=2, K=8, V=6, lengths=lengths)
    case = Case(variant, **sizes, beta="sigmoid", l2norm=True)
    flags = {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
    *inputs, state, offsets = case.inputs(TARGET.device).values()
    do, dfinal_state = case.cotangents(TARGET.device)

    def check(op, *args, **more):
        opcheck(overload(variant, op), args, flags | more, test_utils=QUICK[:2])
        return overload(variant, op)(*args, **flags, **more)

    _, *passed, _ = check("chunk_map", *inputs, offsets)
    for asked in (True, False):
        joined = check("chunk_join", *inputs, state, offsets, *passed, output_final_state=asked)
    for dstate in (dfinal_state, None):
        _, runs, *tile = check("chunk_map_bwd", *inputs, offsets, do, dstate)
        check(
            "chunk_join_bwd", do, dstate, runs, joined[2], *tile, *inputs, state, offsets, need=255
        )
    for op, args in (("chunk_map", (offsets,)), ("chunk_join", (state, offsets, *passed))):
        got = overload(variant, op)(*as_leaves({"q": inputs[0]}).values(), *inputs[1:], *args)
        with pytest.raises(RuntimeError, match=f"call kda_ops.distributed.chunk_{variant}, which"):
            got[0].sum().backward()


POOLS = {
    "plain": Pool(Case(B=2, T=3), "", False),
    "indexed, one dead": Pool(
        Case(B=3, T=3, gate="softplus", l2norm=True), "", True, (False, True)
    ),
    "bfloat16, transposed": Pool(Case(B=2, T=3, transposed=True), "", dtype=torch.bfloat16),
    "one anew, a null slot": Pool(Case(B=3, T=3), "", dead=(False, True), null=0, fresh=(True,)),
}


@pytest.mark.parametrize("pool", POOLS.values(), ids=POOLS)
@pytest.mark.parametrize("op", ("recurrent_", "chunk_"))
def test_opcheck_of_in_place_operators(variant, op, pool):
    if TARGET.slow and pool.dtype is torch.bfloat16:
        pytest.skip("the interpreter has no bfloat16")
    pool = replace(pool, op=op, case=replace(pool.case, variant=variant, state=False, final=False))
    if op == "recurrent_":
        pool = replace(pool, fresh=())
    args = pool.arguments(pool.state().nan_to_num())  # opcheck compares pools
    utils = COMPILED if pool.indexed and pool.dtype is None else QUICK
    opcheck(overload(variant, op), tuple(args), pool.flags(), test_utils=utils)
    out = torch.empty_like(args[2], memory_format=torch.contiguous_format)
    given = pool.flags() | {"out": out}
    opcheck(overload(variant, f"{op}.out"), tuple(args), given, test_utils=utils)


@pytest.mark.quick
def test_opcheck_of_the_gate(variant):
    for gate in ("softplus", "bounded"):
        flags = {"lower_bound": -5.0 if gate == "bounded" else None}
        for strides in STRIDES:
            x = Case(variant, T=3, gate=gate, seed=1, strides=strides).inputs(TARGET.device)
            args = [x[n].detach().requires_grad_() for n in ("g", "A_log", "dt_bias")]
            utils = COMPILED if strides == "contiguous" else QUICK
            opcheck(overload(variant, "gate"), args, flags, test_utils=utils)
            args = [t.detach() for t in (torch.ones_like(args[0]), *args)]
            opcheck(overload(variant, "gate_bwd"), args, flags, test_utils=QUICK[:2])


# --- autograd


@pytest.mark.quick
@pytest.mark.parametrize("op", (*OPS, "gate"))
def test_double_backward_is_refused_in_words(variant, op):
    case = Case(variant, T=3, gate="softplus")
    x = case.inputs(TARGET.device)
    x |= as_leaves(x)
    if op == "gate":
        y, leaf = overload(variant, "gate")(x["g"], x["A_log"], x["dt_bias"]), x["g"]
    else:
        (y, _), leaf = overload(variant, op)(*x.values(), **case.flags(op)), x["v"]
    (grad,) = torch.autograd.grad(y.square().sum(), leaf, create_graph=True)
    with pytest.raises(
        RuntimeError,
        match=rf"^{variant}::(chunk and recurrent|gate): double backward is not implemented",
    ):
        grad.sum().backward()


@pytest.mark.bits
@pytest.mark.parametrize("op", ("recurrent_", "chunk_"))
def test_an_in_place_operator_refuses_autograd_and_accepts_parameters_without(variant, op):
    pool = Pool(Case(variant, B=2, T=3, gate="softplus", state=False, final=False), op)
    want, _ = pool.run()
    parameter = torch.nn.Parameter(pool.case.inputs(TARGET.device)["A_log"])
    assert_identical(pool.run(A_log=parameter)[0], want, "o")  # Pool.run is under no_grad
    x, state = pool.case.inputs(TARGET.device) | {"A_log": parameter}, pool.state()
    before = state.clone()
    args = pool_arguments(x, state, pool.indices()[0].to(TARGET.device), None)
    with pytest.raises(
        RuntimeError,
        match=(
            rf"^{variant}::{op} writes its state in place and has no gradient: "
            rf".*{variant}::{op[:-1]}, which is differentiable"
        ),
    ):
        overload(variant, op)(*args, **pool.flags())
    assert_identical(state, before, "the pool")
    # grad mode on, nothing requires it
    plain = [x.detach() if x is parameter else x for x in args]
    o = overload(variant, op)(*plain, **pool.flags())
    assert not o.requires_grad and not state.requires_grad
    with torch.inference_mode():
        assert_identical(pool.run(A_log=parameter)[0], want, "o")


@pytest.mark.parametrize("op", ("recurrent_", "chunk_"))
def test_a_call_on_a_pool_counts_as_a_version(variant, op, monkeypatch):
    """Torch's own operations count for themselves, a Triton kernel does not: here nothing writes,
    and the call must count all the same.
    """
    backend = dispatch.backend(TARGET.device)
    monkeypatch.setattr(
        backend, "run", lambda kind, rank, args, flags: (torch.zeros_like(args[2]),)
    )
    pool = Pool(Case(variant, B=2, T=3, state=False, final=False), op)
    state = pool.state()
    version = state._version
    pool.run(state=state)
    assert state._version > version


def test_a_checkpoint_policy_can_name_what_chunked_attention_computed():
    assert {op.name() for op in kda_ops.SAVE_OPS} == {
        f"{v}::{op}" for v in VARIANTS for op in ("chunk", "chunk_fwd", "chunk_join", "recurrent")
    }


# --- autocast


@pytest.mark.bits
@pytest.mark.quick
@pytest.mark.parametrize("op", OPS)
def test_autocast_casts_q_k_and_v_only(variant, op):
    low = torch.bfloat16 if not TARGET.slow else torch.float16
    case = Case(variant, T=65, gate="softplus", beta="sigmoid")
    x, (do, dfinal_state) = case.inputs(TARGET.device), case.cotangents(TARGET.device)
    with torch.autocast(TARGET.device.type, dtype=low):  # backward too runs inside, which is legal
        got = run(case, op, x, cotangents=(do.to(low), dfinal_state))
    by_hand = run(
        replace(case, dtype=low),
        op,
        x | {n: x[n].to(low) for n in ("q", "k", "v")},
        cotangents=(do.to(low), dfinal_state),
    )
    assert got["o"].dtype is low and got["final_state"].dtype is torch.float32
    assert all(got["d" + n].dtype is torch.float32 for n in GRADIENTS if "d" + n in got)
    assert_all_identical(
        got, by_hand | {"d" + n: by_hand["d" + n].float() for n in ("q", "k", "v")}
    )


@pytest.mark.parametrize("op", ("recurrent_", "chunk_"))
def test_autocast_leaves_a_pool_in_its_dtype(variant, op):
    if TARGET.slow:
        pytest.skip("the interpreter has no bfloat16")
    pool = Pool(Case(variant, B=2, T=3, state=False, final=False), op)
    with torch.autocast(TARGET.device.type, dtype=torch.bfloat16):
        o, state = pool.run()
    assert o.dtype is torch.bfloat16 and state.dtype is torch.float32
    assert not torch.equal(state, pool.state())


@pytest.mark.bits
def test_autocast_leaves_float64_alone():
    if torch.float64 not in TARGET.dtypes:
        pytest.skip("no float64 here")
    case = Case(T=3, dtype=torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_all_identical(forward(case), forward(case))
        assert forward(case)["o"].dtype is torch.float64


@pytest.mark.bits
def test_autocast_does_not_reach_the_arithmetic_of_the_gate(variant):
    x = Case(variant, T=5, gate="softplus").inputs(TARGET.device)
    leaves = [x[n].detach().requires_grad_() for n in ("g", "A_log", "dt_bias")]
    plain = overload(variant, "gate")(*leaves)
    want = torch.autograd.grad(plain.sum(), leaves)
    with torch.autocast(TARGET.device.type, dtype=torch.float16 if TARGET.slow else torch.bfloat16):
        inside = overload(variant, "gate")(*leaves)
        got = torch.autograd.grad(inside.sum(), leaves)
    assert_all_identical(
        {"y": inside.detach()} | dict(zip("gAd", got)),
        {"y": plain.detach()} | dict(zip("gAd", want)),
    )


@pytest.mark.parametrize("device, other", (("cuda", "cpu"), ("cpu", "cuda")))
def test_autocast_goes_by_the_device_of_the_call(device, other):
    before = {
        d: (torch.get_autocast_dtype(d), torch.is_autocast_enabled(d)) for d in (device, other)
    }
    with FakeTensorMode():
        q, k, v = (torch.empty(1, 5, 2, 8, device=device) for _ in range(3))
        try:
            torch.set_autocast_dtype(device, torch.float16)
            torch.set_autocast_dtype(other, torch.bfloat16)
            torch.set_autocast_enabled(device, True)
            o, _ = kda_ops.chunk_kda(q, k, v, None, None)
        finally:
            for d, (dtype, on) in before.items():
                torch.set_autocast_dtype(d, dtype)
                torch.set_autocast_enabled(d, on)
    assert o.dtype is torch.float16


def test_integers_are_refused_under_autocast_too():
    q, k, v = (torch.zeros(1, 5, 2, 8, dtype=torch.int64, device=TARGET.device) for _ in range(3))
    with (
        torch.autocast(TARGET.device.type, dtype=torch.bfloat16),
        pytest.raises(TypeError, match="^q must be float16"),
    ):
        kda_ops.chunk_kda(q, k, v, None, None)
