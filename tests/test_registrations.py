"""What the operators promise to PyTorch besides their numbers: schemas, fakes, autograd, in-place writes, autocast, vmap."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.library import opcheck

import kda_ops
from kda_ops.registrations import schemas
from kda_ops.stages import GRADIENTS
from tests.support.calls import forward, overload, run
from tests.support.cases import Case, replace
from tests.support.closeness import assert_all_identical, assert_identical, assert_meets_budget
from tests.support.pools import Pool
from tests.support.target import TARGET

VARIANTS = ("kda", "gdn")
OPS = ("chunk", "recurrent")
QUICK = ("test_schema", "test_faketensor", "test_autograd_registration")
COMPILED = (*QUICK, "test_aot_dispatch_dynamic")
OPTIONS = {
    "plain": {},
    "nothing optional": {"gate": "none", "beta": "none", "state": False, "final": False},
    "packed": {"lengths": (65, 0, 3), "tail": 2},
    "everything inside": {"gate": "softplus", "beta": "neg_eigval", "l2norm": True, "H": 1, "HV": 2, "strides": "fused"},
    "bounded, transposed": {"gate": "bounded", "beta": "sigmoid", "transposed": True, "seed": 3},
    "nothing optional, all kept": {"gate": "none", "beta": "none", "state": False, "final": False, "disable_recompute": True},
    "all kept": {"disable_recompute": True, "strides": "heads_first"},
    "16 bit": {"dtype": torch.float16, "narrow": True},
    "expanded heads": {"strides": "expanded", "H": 2, "HV": 2},
    "no rows": {"T": 0},
}


def differentiable(case):
    inputs = case.inputs(TARGET.device)
    return [x.detach().requires_grad_() if x is not None and n in GRADIENTS else x for n, x in inputs.items()]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_opcheck_of_functional_operators(variant, op, options):
    case = Case(variant, **({"B": 1 if "lengths" in options else 2, "T": 5, "K": 8, "V": 6} | options))
    compiled = op == "chunk" and case.seed == 0 and case.rows and (variant == "kda") == (len(options) % 2 == 0)
    opcheck(overload(variant, op), differentiable(case), case.flags(op), test_utils=COMPILED if compiled else QUICK)
    opcheck(overload(variant, op), [*case.inputs(TARGET.device).values()], case.flags(op), test_utils=QUICK[:2])


@pytest.mark.parametrize("keep", (False, True))
@pytest.mark.parametrize("variant", VARIANTS)
def test_opcheck_of_the_operators_of_training_graphs(variant, keep):
    case = Case(variant, T=5, K=8, V=6, l2norm=True, disable_recompute=keep)
    inputs = [*case.inputs(TARGET.device).values()]
    opcheck(overload(variant, "chunk_fwd"), differentiable(case), case.flags(), test_utils=QUICK)
    o, _, *kept = overload(variant, "chunk_fwd")(*inputs, **case.flags())
    for need in ([True] * 8, [n in ("q", "v") for n in GRADIENTS]):
        for do, dfinal_state in (case.cotangents(TARGET.device), (case.cotangents(TARGET.device)[0], None), (None, case.cotangents(TARGET.device)[1])):
            for args in ((*kept[:-1], *inputs), schemas.join_backward(kept, inputs, o)):
                opcheck(overload(variant, "chunk_bwd"), (do, dfinal_state, *args), case.flags() | {"need": need}, test_utils=QUICK[:2])


@pytest.mark.parametrize("variant", VARIANTS)
def test_compiled_graphs_of_earlier_versions_still_find_their_arguments_and_outputs(variant):
    kept = ["A", "P", "w", "u", "qg", "kg", "gamma", "states", "v_new"]
    inputs = ["q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "cu_seqlens"]
    forward, backward = (overload(variant, name)._schema for name in ("chunk_fwd", "chunk_bwd"))
    assert [x.name for x in forward.returns][:11] == ["o", "final_state", *kept]
    assert [x.name for x in backward.arguments][:20] == ["do", "dfinal_state", *kept, *inputs]
    assert [x.name for x in backward.arguments[20:] if not x.kwarg_only] == ["o", "norms"]
    assert all(x.has_default_value() for x in backward.arguments[20:] if not x.kwarg_only)


def test_what_backward_is_given_comes_apart_as_it_was_put_together():
    inputs, kept, rows, o = tuple(range(9)), (*map(str, range(9)),), torch.zeros(2, 1), object()
    assert schemas.split_backward(schemas.join_backward((*kept, rows), inputs, o)) == ((*kept, rows), inputs, o)
    assert schemas.split_backward(schemas.join_backward((*kept, torch.zeros(0)), inputs, None)) == ((*kept, None), inputs, None)
    assert schemas.split_backward((*kept, *inputs)) == ((*kept, None), inputs, None)


POOLS = {
    "plain": Pool(Case(B=2, T=3), "", False),
    "indexed, one dead": Pool(Case(B=3, T=3, gate="softplus", l2norm=True), "", True, (False, True)),
    "bfloat16, transposed": Pool(Case(B=2, T=3, transposed=True), "", dtype=torch.bfloat16),
}


@pytest.mark.parametrize("pool", POOLS.values(), ids=POOLS)
@pytest.mark.parametrize("op", ("recurrent_", "chunk_"))
@pytest.mark.parametrize("variant", VARIANTS)
def test_opcheck_of_in_place_operators(variant, op, pool):
    if TARGET.slow and pool.dtype is torch.bfloat16:
        pytest.skip("the interpreter has no bfloat16")
    pool = replace(pool, op=op, case=replace(pool.case, variant=variant, state=False, final=False))
    x = pool.case.inputs(TARGET.device)
    indices = pool.indices()[0]
    args = (
        x["q"],
        x["k"],
        x["v"],
        x["g"],
        x["beta"],
        pool.state(),
        None if indices is None else indices.to(TARGET.device),
        None,
        x["A_log"],
        x["dt_bias"],
        None,
    )
    opcheck(overload(variant, op), args, pool.case.flags(op), test_utils=COMPILED if pool.indexed and pool.dtype is None else QUICK)


@pytest.mark.parametrize("variant", VARIANTS)
def test_opcheck_of_the_gate(variant):
    for gate in ("softplus", "bounded"):
        x = Case(variant, T=3, gate=gate, seed=1).inputs(TARGET.device)
        args = [t.detach().requires_grad_() for t in (x["g"], x["A_log"], x["dt_bias"])]
        opcheck(overload(variant, "gate"), args, {"lower_bound": -5.0 if gate == "bounded" else None}, test_utils=COMPILED)


# --- autograd


@pytest.mark.parametrize("op", (*OPS, "gate"))
@pytest.mark.parametrize("variant", VARIANTS)
def test_double_backward_is_refused_in_words(variant, op):
    case = Case(variant, T=3, gate="softplus")
    x = case.inputs(TARGET.device)
    x = {n: t.detach().requires_grad_() if t is not None and n in GRADIENTS else t for n, t in x.items()}
    if op == "gate":
        y, leaf = overload(variant, "gate")(x["g"], x["A_log"], x["dt_bias"]), x["g"]
    else:
        (y, _), leaf = overload(variant, op)(*x.values(), **case.flags(op)), x["v"]
    (grad,) = torch.autograd.grad(y.square().sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match=rf"^{variant}::(chunk and recurrent|gate): double backward is not implemented"):
        grad.sum().backward()


def _dual(call, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(call(forward_ad.make_dual(x, x))).tangent


@pytest.mark.parametrize("mode", (_dual, lambda call, x: torch.func.jvp(call, (x,), (x,)), lambda call, x: torch.func.jacfwd(call)(x)))
@pytest.mark.parametrize("op", (*OPS, "gate", "recurrent_", "chunk_"))
@pytest.mark.parametrize("variant", VARIANTS)
def test_tangents_are_refused_in_words(variant, op, mode):
    """torch gives zeros for an operator without a forward-mode formula, unless a gradient is wanted too."""
    pool = Pool(Case(variant, B=2, T=3, gate="softplus", state=False, final=False), op, indexed=False)
    x = pool.case.inputs(TARGET.device)
    state = (pool.state(),) if op in ("recurrent_", "chunk_") else ()

    def call(g):
        if op == "gate":
            return overload(variant, op)(g, x["A_log"], x["dt_bias"])
        out = overload(variant, op)(x["q"], x["k"], x["v"], g, x["beta"], *state, A_log=x["A_log"], dt_bias=x["dt_bias"], **pool.case.flags(op))
        return out if state else out[0]

    with pytest.raises(NotImplementedError, match=f"^{variant}::{op} has no forward-mode derivative"):
        mode(call, x["g"])
    y, tangent = torch.func.jvp(lambda t: t * call(x["g"]).sum(), (x["g"],), (torch.ones_like(x["g"]),))  # of what is a constant there is none
    assert y.isfinite().all() and tangent.isfinite().all() and tangent.any()


FORWARD_OVER_REVERSE = {
    "jvp of grad": lambda f, x: torch.func.jvp(torch.func.grad(f), (x,), (x,)),
    "jacfwd of grad": lambda f, x: torch.func.jacfwd(torch.func.grad(f))(x),
    "jvp of vmap of grad": lambda f, x: torch.func.jvp(torch.func.vmap(torch.func.grad(f)), (x[None],), (x[None],)),
    "jvp of the value of vjp": lambda f, x: torch.func.jvp(lambda t: torch.func.vjp(f, t)[0], (x,), (x,)),
    "jvp along a factor": lambda f, x: torch.func.jvp(lambda c: torch.func.grad(lambda t: c * f(t))(x), (x.sum(),), (x.sum(),)),
    "dual": lambda f, x: _dual(torch.func.grad(f), x),
}


@pytest.mark.parametrize("mode", FORWARD_OVER_REVERSE)
@pytest.mark.parametrize("op", (*OPS, "gate"))
@pytest.mark.parametrize("variant", VARIANTS)
def test_forward_over_reverse_is_refused_in_words(variant, op, mode):
    """A formula's forward runs without gradients and tangents: what lies below would find none, and give zeros."""
    case = Case(variant, T=3, gate="softplus")
    x = case.inputs(TARGET.device)

    def f(g):
        if op == "gate":
            return overload(variant, op)(g, x["A_log"], x["dt_bias"]).square().sum()
        return overload(variant, op)(*(x | {"g": g}).values(), **case.flags(op))[0].square().sum()

    with pytest.raises(NotImplementedError, match="has no forward-mode derivative"):
        FORWARD_OVER_REVERSE[mode](f, x["g"])


@pytest.mark.parametrize("op", OPS)
def test_a_tangent_of_a_cotangent_is_refused_in_words(op):
    case = Case("kda", T=3)
    x = case.inputs(TARGET.device)
    x["q"].requires_grad_()
    o, _ = overload("kda", op)(*x.values(), **case.flags(op))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="^kda::chunk_bwd has no forward-mode derivative"):
        torch.autograd.grad(o, x["q"], forward_ad.make_dual(torch.ones_like(o), torch.ones_like(o)))


# --- transforms of functions


def squared(case, op):
    """The sum of squares of what an operator gives, as a function of its floating inputs; those inputs; and their gradients by torch.autograd."""
    x = {n: t for n, t in case.inputs(TARGET.device).items() if t is not None and (op != "gate" or n in ("g", "A_log", "dt_bias"))}
    integers = {n: x.pop(n) for n in ("cu_seqlens",) if n in x}

    def loss(*args):
        words = dict(zip(x, args)) if op == "gate" else {"g": None, "beta": None} | dict(zip(x, args)) | integers | case.flags(op)
        out = overload(case.variant, op)(**words)
        return sum(y.square().sum() for y in ((out,) if op == "gate" else out))

    leaves = [t.clone().requires_grad_() for t in x.values()]
    return loss, tuple(x.values()), torch.autograd.grad(loss(*leaves), leaves)


INSIDE = {"T": 37, "H": 1, "HV": 2, "gate": "softplus", "beta": "sigmoid", "l2norm": True}
each_operator = pytest.mark.parametrize(("variant", "op"), [(v, o) for v in VARIANTS for o in (*OPS, "gate")])


@each_operator
def test_functional_transforms_give_the_gradients_of_autograd(variant, op):
    loss, x, want = squared(Case(variant, B=2, **INSIDE), op)
    every = tuple(range(len(x)))
    grad = torch.func.grad(loss, every)
    found = {"grad": grad(*x), "vjp": torch.func.vjp(loss, *x)[1](torch.ones_like(loss(*x))), "jacrev": torch.func.jacrev(loss, every)(*x)}
    with torch.no_grad():
        found["inside no_grad"] = grad(*x)
    found["compiled"] = torch.compile(grad, fullgraph=True, backend="aot_eager")(*x)
    for transform, grads in found.items():
        for n, (got, expected) in enumerate(zip(grads, want)):
            assert_identical(got, expected, f"input {n}, {transform}")

    def loss_without(*args):
        with torch.no_grad():
            constant = loss(*args)
        return constant * args[0].sum()

    value = loss(*x)
    first, *rest = torch.func.grad(loss_without, every)(*x)
    torch.testing.assert_close(first, value.expand_as(first))
    assert not any(g.any() for g in rest)


@each_operator
def test_double_backward_is_refused_where_transforms_nest_too(variant, op):
    """There torch would give zeros; an inner transform of something else leaves the operator to the outer one."""
    loss, x, want = squared(Case(variant, B=2, **INSIDE), op)
    nested = torch.func.grad(lambda first, *rest: torch.func.grad(lambda last: loss(first, *rest[:-1], last))(rest[-1]).sum())
    with pytest.raises(RuntimeError, match="double backward is not implemented"):
        nested(*x)
    through = torch.func.grad(lambda *args: torch.func.grad(lambda a: a.square().sum() * loss(*args))(torch.ones_like(x[0])).sum(), tuple(range(len(x))))
    for got, expected in zip(through(*x), want):
        expected = 2 * x[0].numel() * expected
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


SAMPLES = {
    "dense": {"B": 2},
    "packed": {"lengths": (65, 0, 3), "tail": 2, "transposed": True},
    "all kept": {"disable_recompute": True},
    "half": {"dtype": torch.float16, "narrow": True},
    "nothing optional": {"gate": "none", "beta": "none", "l2norm": False, "state": False, "final": False},
}


@pytest.mark.filterwarnings("error::UserWarning")  # torch warns where it goes sample by sample
@pytest.mark.parametrize(("variant", "op", "name"), [(v, o, n) for v in VARIANTS for o in (*OPS, "gate") for n in (SAMPLES if o != "gate" else ("dense",))])
def test_gradients_per_sample(variant, op, name):
    loss, x, _ = squared(Case(variant, **(INSIDE | SAMPLES[name])), op)
    every = tuple(range(len(x)))
    # Of what is not mapped there is a gradient per sample too.
    for mapped in (every, every[:1], every[-1:]):
        samples = [torch.stack([t, 0.5 * t]) if n in mapped else t for n, t in enumerate(x)]
        found = torch.func.vmap(torch.func.grad(loss, every), tuple(0 if n in mapped else None for n in every))(*samples)
        for s in range(2):
            want = torch.func.grad(loss, every)(*(t[s] if n in mapped else t for n, t in enumerate(samples)))
            for n in every:
                if x[n].dim() > 2:
                    assert_identical(found[n][s], want[n], f"input {n} of sample {s}, {mapped} mapped")
                else:  # a parameter's is a sum over tokens, whose order is torch's
                    torch.testing.assert_close(found[n][s], want[n], rtol=1e-4, atol=1e-4 * float(want[n].abs().max()))


@pytest.mark.parametrize("op", ("recurrent_", "chunk_"))
@pytest.mark.parametrize("variant", VARIANTS)
def test_an_in_place_operator_refuses_autograd_and_accepts_parameters_without(variant, op):
    pool = Pool(Case(variant, B=2, T=3, gate="softplus", state=False, final=False), op)
    want, _ = pool.run()
    parameter = torch.nn.Parameter(pool.case.inputs(TARGET.device)["A_log"])
    assert_identical(pool.run(A_log=parameter)[0], want, "o")  # Pool.run is under no_grad
    x, state = pool.case.inputs(TARGET.device), pool.state()
    before = state.clone()
    args = (x["q"], x["k"], x["v"], x["g"], x["beta"], state, pool.indices()[0].to(TARGET.device), None)
    with pytest.raises(RuntimeError, match=rf"^{variant}::{op} writes its state in place and has no gradient: .*{variant}::{op[:-1]}, which is differentiable"):
        overload(variant, op)(*args, parameter, x["dt_bias"], None, **pool.case.flags(op))
    assert_identical(state, before, "the pool")
    o = overload(variant, op)(*args, parameter.detach(), x["dt_bias"], None, **pool.case.flags(op))  # grad mode on, nothing requires it
    assert not o.requires_grad and not state.requires_grad
    with torch.inference_mode():
        assert_identical(pool.run(A_log=parameter)[0], want, "o")


@pytest.mark.parametrize("op", ("recurrent_", "chunk_"))
@pytest.mark.parametrize("variant", VARIANTS)
def test_writing_a_pool_counts_as_a_version(variant, op):
    pool = Pool(Case(variant, B=2, T=3, state=False, final=False), op)
    state = pool.state()
    scale = torch.ones((), device=TARGET.device, requires_grad=True)
    saved = (state * scale).sum()  # saves the state for backward
    version = state._version
    pool.run(state=state)
    assert state._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.backward()


@pytest.mark.parametrize("op", ("recurrent_", "chunk_"))
def test_a_kernel_that_writes_raw_memory_counts_as_a_version_too(op, monkeypatch):
    """Torch's own operations count for themselves, a Triton kernel does not: here nothing writes, and the call must count all the same."""
    from kda_ops import chunk, recurrent

    if op == "recurrent_":
        monkeypatch.setattr(recurrent, "decode", lambda rank, args, flags: torch.zeros_like(args[2]))
    else:
        monkeypatch.setattr(chunk, "prefill", lambda p: p.new_output().zero_())
    pool = Pool(Case(B=2, T=3, state=False, final=False), op)
    state = pool.state()
    version = state._version
    pool.run(state=state)
    assert state._version > version


def test_a_checkpoint_policy_can_name_what_chunked_attention_computed():
    assert {op.name() for op in kda_ops.SAVE_OPS} == {f"{v}::{op}" for v in VARIANTS for op in ("chunk", "chunk_fwd", "recurrent")}


# --- autocast


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_autocast_casts_q_k_and_v_only(variant, op):
    low = torch.bfloat16 if not TARGET.slow else torch.float16
    case = Case(variant, T=65, gate="softplus", beta="sigmoid")
    x, (do, dfinal_state) = case.inputs(TARGET.device), case.cotangents(TARGET.device)
    with torch.autocast(TARGET.device.type, dtype=low):  # backward too runs inside, which is legal
        got = run(case, op, x, cotangents=(do.to(low), dfinal_state))
    by_hand = run(replace(case, dtype=low), op, x | {n: x[n].to(low) for n in ("q", "k", "v")}, cotangents=(do.to(low), dfinal_state))
    assert got["o"].dtype is low and got["final_state"].dtype is torch.float32
    assert all(got["d" + n].dtype is torch.float32 for n in GRADIENTS if "d" + n in got)
    assert_all_identical(got, by_hand | {"d" + n: by_hand["d" + n].float() for n in ("q", "k", "v")})


@pytest.mark.parametrize("op", ("recurrent_", "chunk_"))
@pytest.mark.parametrize("variant", VARIANTS)
def test_autocast_leaves_a_pool_in_its_dtype(variant, op):
    if TARGET.slow:
        pytest.skip("the interpreter has no bfloat16")
    pool = Pool(Case(variant, B=2, T=3, state=False, final=False), op)
    with torch.autocast(TARGET.device.type, dtype=torch.bfloat16):
        o, state = pool.run()
    assert o.dtype is torch.bfloat16 and state.dtype is torch.float32
    assert not torch.equal(state, pool.state())


def test_autocast_leaves_float64_alone():
    if torch.float64 not in TARGET.dtypes:
        pytest.skip("no float64 here")
    case = Case(T=3, dtype=torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_all_identical(forward(case), forward(case))
        assert forward(case)["o"].dtype is torch.float64


@pytest.mark.parametrize("variant", VARIANTS)
def test_autocast_does_not_reach_the_arithmetic_of_the_gate(variant):
    x = Case(variant, T=5, gate="softplus").inputs(TARGET.device)
    leaves = [x[n].detach().requires_grad_() for n in ("g", "A_log", "dt_bias")]
    plain = overload(variant, "gate")(*leaves)
    want = torch.autograd.grad(plain.sum(), leaves)
    with torch.autocast(TARGET.device.type, dtype=torch.float16 if TARGET.slow else torch.bfloat16):
        inside = overload(variant, "gate")(*leaves)
        got = torch.autograd.grad(inside.sum(), leaves)
    assert_all_identical({"y": inside.detach()} | dict(zip("gAd", got)), {"y": plain.detach()} | dict(zip("gAd", want)))


# --- vmap


def stacked(case, names, size=3):
    """`size` calls that differ in the inputs named, and those inputs stacked."""
    calls = [case.inputs(TARGET.device)] + [
        case.inputs(TARGET.device) | {n: replace(case, seed=case.seed + 2 * s).inputs(TARGET.device)[n] for n in names} for s in range(1, size)
    ]
    return calls, {n: torch.stack([c[n] for c in calls]) if n in names else x for n, x in calls[0].items()}


MAPPED = {
    "all": ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state"),
    "parameters only": ("A_log", "dt_bias"),
    "state only": ("initial_state",),
    "values and decay": ("v", "g"),
}


@pytest.mark.parametrize("lengths", (None, (65, 0, 3)), ids=("dense", "packed"))
@pytest.mark.parametrize("names", MAPPED.values(), ids=MAPPED)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_vmap_is_a_loop(variant, op, names, lengths):
    case = Case(variant, B=1 if lengths else 2, T=37, lengths=lengths, H=1, HV=2, gate="softplus", beta="sigmoid", l2norm=True)
    calls, x = stacked(case, names)
    fn = torch.func.vmap(lambda *args: overload(variant, op)(*args, **case.flags(op)), in_dims=tuple(0 if n in names else None for n in x))
    o, final_state = fn(*x.values())
    for s, call in enumerate(calls):
        want = forward(case, op, call)
        if op == "chunk":
            assert_identical(o[s], want["o"], "o")
            assert_identical(final_state[s], want["final_state"], "final_state")
        else:
            torch.testing.assert_close(o[s], want["o"])
            torch.testing.assert_close(final_state[s], want["final_state"])


@pytest.mark.parametrize("variant", VARIANTS)
def test_vmap_over_any_dimension_and_twice_and_through_backward(variant):
    case = Case(variant, B=2, T=5)
    calls, x = stacked(case, MAPPED["all"][:5])
    loop = torch.stack([forward(case, inputs=c)["o"] for c in calls])
    op = overload(variant, "chunk")

    def call(q, k, v, g, beta):
        return op(q, k, v, g, beta, initial_state=x["initial_state"])[0]

    args = [x[n] for n in ("q", "k", "v", "g", "beta")]
    last = [t.movedim(0, -1) for t in args]
    torch.testing.assert_close(torch.func.vmap(call, in_dims=-1)(*last), loop)
    torch.testing.assert_close(torch.func.vmap(call, in_dims=0, out_dims=1)(*args), loop.movedim(0, 1))
    twice = [torch.stack([t, t.flip(0)]) for t in args]
    torch.testing.assert_close(torch.func.vmap(torch.func.vmap(call))(*twice), torch.stack([loop, loop.flip(0)]))
    leaves = [t.clone().requires_grad_() for t in args]
    torch.func.vmap(call)(*leaves).sum().backward()
    for s, one in enumerate(calls):
        want = run(case, inputs=one, need=("q", "k", "v", "g", "beta"), cotangents=(torch.ones_like(loop[s]), torch.zeros_like(x["initial_state"])))
        for name, leaf in zip(("q", "k", "v", "g", "beta"), leaves):
            torch.testing.assert_close(leaf.grad[s], want["d" + name])


@pytest.mark.parametrize("variant", VARIANTS)
def test_vmap_of_the_gate_and_of_a_call_without_a_final_state(variant):
    case = Case(variant, T=5, gate="softplus", final=False)
    calls, x = stacked(case, ("g", "A_log", "q"))
    mapped = torch.func.vmap(overload(variant, "gate"), in_dims=(0, 0, None))(x["g"], x["A_log"], x["dt_bias"])
    for s, call in enumerate(calls):
        torch.testing.assert_close(mapped[s], overload(variant, "gate")(call["g"], call["A_log"], call["dt_bias"]))
    fn = torch.func.vmap(lambda *args: overload(variant, "chunk")(*args, **case.flags())[0], in_dims=tuple(0 if n in ("g", "A_log", "q") else None for n in x))
    torch.testing.assert_close(fn(*x.values()), torch.stack([forward(case, inputs=c)["o"] for c in calls]))


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_cannot_be_mapped_is_refused(variant):
    case = Case(variant, lengths=(3, 2))
    x = case.inputs(TARGET.device)
    both = torch.stack([x["cu_seqlens"]] * 2)
    with pytest.raises(ValueError, match="cu_seqlens cannot be mapped by vmap"):
        torch.func.vmap(lambda c: overload(variant, "chunk")(*(x | {"cu_seqlens": c}).values(), **case.flags()))(both)
    pool = Pool(Case(variant, B=2, T=3, state=False, final=False), "recurrent_")
    y, q = pool.case.inputs(TARGET.device), torch.stack([pool.case.inputs(TARGET.device)["q"]] * 2)
    state = pool.state()
    for op in ("recurrent_", "chunk_"):
        with pytest.raises(ValueError, match=f"{variant}::{op} writes its state in place and cannot be mapped by vmap"), torch.no_grad():
            torch.func.vmap(lambda q, op=op: overload(variant, op)(q, y["k"], y["v"], y["g"], y["beta"], state))(q)


def test_a_mapped_call_meets_the_budget():
    case = Case(B=2, T=65, H=1, HV=2)
    x = case.inputs(TARGET.device)
    o, final_state = torch.func.vmap(lambda *args: overload("kda", "chunk")(*args, None, None, **replace(case, state=False).flags()))(
        *(x[n].unsqueeze(1) for n in ("q", "k", "v", "g", "beta"))
    )
    assert_meets_budget(replace(case, state=False), got={"o": o.squeeze(1), "final_state": final_state.squeeze(1)})


@pytest.mark.parametrize("transposed", (False, True))
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_an_initial_state_is_never_written(variant, op, transposed):
    case = Case(variant, lengths=(0, 2, 1), V=8, transposed=transposed)
    x = case.inputs(TARGET.device)
    before = x["initial_state"].clone()
    forward(case, op, x)
    assert_identical(x["initial_state"], before)


@pytest.mark.parametrize("strides", ("heads_first", "fused", "expanded"))
@pytest.mark.parametrize("variant", VARIANTS)
def test_fake_gradients_are_contiguous_whatever_the_strides(variant, strides):
    case = Case(variant, B=2, T=5, H=2, HV=2, K=8, V=6, strides=strides, gate="softplus")
    x, cotangents = case.inputs(TARGET.device), case.cotangents(TARGET.device)
    _, _, *kept = overload(variant, "chunk_fwd")(*x.values(), **case.flags())
    opcheck(overload(variant, "chunk_bwd"), (*cotangents, *kept[:-1], *x.values()), case.flags() | {"need": [True] * 8}, test_utils="test_faketensor")
    gate = x["g"], x["A_log"], x["dt_bias"]
    opcheck(overload(variant, "gate"), gate, test_utils="test_faketensor")
    opcheck(overload(variant, "gate_bwd"), (torch.ones(x["g"].shape, device=TARGET.device), *gate), test_utils="test_faketensor")


@pytest.mark.parametrize("device, other", (("cuda", "cpu"), ("cpu", "cuda")))
def test_autocast_goes_by_the_device_of_the_call(device, other):
    before = {d: (torch.get_autocast_dtype(d), torch.is_autocast_enabled(d)) for d in (device, other)}
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
    with torch.autocast(TARGET.device.type, dtype=torch.bfloat16), pytest.raises(TypeError, match="^q must be float16"):
        kda_ops.chunk_kda(q, k, v, None, None)
