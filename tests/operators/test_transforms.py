"""What torch.func makes of the operators: forward mode is refused, reverse mode reaches through,
and a mapped call is a loop.
"""

from itertools import product

import pytest
import torch
from torch.autograd import forward_ad

from tests.support.calls import forward, overload, run
from tests.support.cases import Case, replace
from tests.support.closeness import assert_identical
from tests.support.pools import Pool
from tests.support.target import TARGET

OPS = ("chunk", "recurrent")


def _dual(call, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(call(forward_ad.make_dual(x, x))).tangent


@pytest.mark.quick
@pytest.mark.parametrize(
    "mode",
    (
        _dual,
        lambda call, x: torch.func.jvp(call, (x,), (x,)),
        lambda call, x: torch.func.jacfwd(call)(x),
    ),
)
@pytest.mark.parametrize("op", (*OPS, "gate", "recurrent_", "chunk_"))
def test_tangents_are_refused_in_words(variant, op, mode):
    """torch gives zeros for an operator without a forward-mode formula, unless a gradient is wanted
    too.
    """
    pool = Pool(
        Case(variant, B=2, T=3, gate="softplus", state=False, final=False), op, indexed=False
    )
    x = pool.case.inputs(TARGET.device)
    state = (pool.state(),) if op in ("recurrent_", "chunk_") else ()

    def call(g):
        if op == "gate":
            return overload(variant, op)(g, x["A_log"], x["dt_bias"])
        given = x["q"], x["k"], x["v"], g, x["beta"], *state
        gate = dict(A_log=x["A_log"], dt_bias=x["dt_bias"])
        out = overload(variant, op)(*given, **gate, **pool.case.flags(op))
        return out if state else out[0]

    with pytest.raises(
        NotImplementedError, match=f"^{variant}::{op} has no forward-mode derivative"
    ):
        mode(call, x["g"])
    # a constant has none
    y, tangent = torch.func.jvp(
        lambda t: t * call(x["g"]).sum(), (x["g"],), (torch.ones_like(x["g"]),)
    )
    assert y.isfinite().all() and tangent.isfinite().all() and tangent.any()


FORWARD_OVER_REVERSE = {
    "jvp of grad": lambda f, x: torch.func.jvp(torch.func.grad(f), (x,), (x,)),
    "jacfwd of grad": lambda f, x: torch.func.jacfwd(torch.func.grad(f))(x),
    "jvp of vmap of grad": lambda f, x: torch.func.jvp(
        torch.func.vmap(torch.func.grad(f)), (x[None],), (x[None],)
    ),
    "jvp of the value of vjp": lambda f, x: torch.func.jvp(
        lambda t: torch.func.vjp(f, t)[0], (x,), (x,)
    ),
    "jvp along a factor": lambda f, x: torch.func.jvp(
        lambda c: torch.func.grad(lambda t: c * f(t))(x), (x.sum(),), (x.sum(),)
    ),
    "dual": lambda f, x: _dual(torch.func.grad(f), x),
}


@pytest.mark.parametrize("mode", FORWARD_OVER_REVERSE)
@pytest.mark.parametrize("op", (*OPS, "gate"))
def test_forward_over_reverse_is_refused_in_words(variant, op, mode):
    """A formula's forward runs without gradients and tangents: what lies below would find none, and
    give zeros.
    """
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
    with (
        forward_ad.dual_level(),
        pytest.raises(NotImplementedError, match="^kda::chunk_bwd has no forward-mode derivative"),
    ):
        torch.autograd.grad(o, x["q"], forward_ad.make_dual(torch.ones_like(o), torch.ones_like(o)))


def squared(case, op):
    """Return the sum of squares of an operator's results, as a function of its floating inputs.

    Also return those inputs, and their gradients by torch.autograd.
    """
    x = {
        n: t
        for n, t in case.inputs(TARGET.device).items()
        if t is not None and (op != "gate" or n in ("g", "A_log", "dt_bias"))
    }
    integers = {n: x.pop(n) for n in ("cu_seqlens",) if n in x}

    def loss(*args):
        words = (
            dict(zip(x, args))
            if op == "gate"
            else {"g": None, "beta": None} | dict(zip(x, args)) | integers | case.flags(op)
        )
        out = overload(case.variant, op)(**words)
        return sum(y.square().sum() for y in ((out,) if op == "gate" else out))

    leaves = [t.clone().requires_grad_() for t in x.values()]
    return loss, tuple(x.values()), torch.autograd.grad(loss(*leaves), leaves)


INSIDE = {"T": 37, "H": 1, "HV": 2, "gate": "softplus", "beta": "sigmoid", "l2norm": True}


each_operator = pytest.mark.parametrize("op", (*OPS, "gate"))


@pytest.mark.bits
@pytest.mark.quick
@each_operator
def test_functional_transforms_give_the_gradients_of_autograd(variant, op):
    loss, x, want = squared(Case(variant, B=2, **INSIDE), op)
    every = tuple(range(len(x)))
    grad = torch.func.grad(loss, every)
    found = {
        "grad": grad(*x),
        "vjp": torch.func.vjp(loss, *x)[1](torch.ones_like(loss(*x))),
        "jacrev": torch.func.jacrev(loss, every)(*x),
    }
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
    """There torch would give zeros; an inner transform of something else leaves the operator to the
    outer one.
    """
    loss, x, want = squared(Case(variant, B=2, **INSIDE), op)
    nested = torch.func.grad(
        lambda first, *rest: torch.func.grad(lambda last: loss(first, *rest[:-1], last))(
            rest[-1]
        ).sum()
    )
    with pytest.raises(RuntimeError, match="double backward is not implemented"):
        nested(*x)
    through = torch.func.grad(
        lambda *args: torch.func.grad(lambda a: a.square().sum() * loss(*args))(
            torch.ones_like(x[0])
        ).sum(),
        tuple(range(len(x))),
    )
    for got, expected in zip(through(*x), want):
        expected = 2 * x[0].numel() * expected
        torch.testing.assert_close(
            got, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max())
        )


SAMPLES = {
    "dense": dict(B=2),
    "packed": dict(lengths=(65, 0, 3), tail=2, transposed=True),
    "all kept": dict(disable_recompute=True),
    "half": dict(dtype=torch.float16, narrow=True),
    "nothing optional": dict(gate="none", beta="none", l2norm=False, state=False, final=False),
}


@pytest.mark.bits
@pytest.mark.filterwarnings("error::UserWarning")  # torch warns where it goes sample by sample
@pytest.mark.parametrize("op, name", [*product(OPS, SAMPLES), ("gate", "dense")])
def test_gradients_per_sample(variant, op, name):
    loss, x, _ = squared(Case(variant, **(INSIDE | SAMPLES[name])), op)
    every = tuple(range(len(x)))
    # Of what is not mapped there is a gradient per sample too.
    for mapped in (every, every[:1], every[-1:]):
        samples = [torch.stack([t, 0.5 * t]) if n in mapped else t for n, t in enumerate(x)]
        found = torch.func.vmap(
            torch.func.grad(loss, every), tuple(0 if n in mapped else None for n in every)
        )(*samples)
        for s in range(2):
            want = torch.func.grad(loss, every)(
                *(t[s] if n in mapped else t for n, t in enumerate(samples))
            )
            for n in every:
                if x[n].dim() > 2:
                    assert_identical(
                        found[n][s], want[n], f"input {n} of sample {s}, {mapped} mapped"
                    )
                else:  # a parameter's is a sum over tokens, whose order is torch's
                    torch.testing.assert_close(
                        found[n][s], want[n], rtol=1e-4, atol=1e-4 * float(want[n].abs().max())
                    )


def stacked(case, names, size=3):
    """`size` calls that differ in the inputs named, and those inputs stacked."""
    calls = [case.inputs(TARGET.device)] + [
        case.inputs(TARGET.device)
        | {n: replace(case, seed=case.seed + 2 * s).inputs(TARGET.device)[n] for n in names}
        for s in range(1, size)
    ]
    return calls, {
        n: torch.stack([c[n] for c in calls]) if n in names else x for n, x in calls[0].items()
    }


MAPPED = {
    "all": ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state"),
    "parameters only": ("A_log", "dt_bias"),
    "state only": ("initial_state",),
    "values and decay": ("v", "g"),
}


@pytest.mark.bits
@pytest.mark.parametrize("lengths", (None, (65, 0, 3)), ids=("dense", "packed"))
@pytest.mark.parametrize("names", MAPPED.values(), ids=MAPPED)
@pytest.mark.parametrize("op", OPS)
def test_vmap_is_a_loop(variant, op, names, lengths):
    case = Case(variant, B=1 if lengths else 2, lengths=lengths, **INSIDE)
    calls, x = stacked(case, names)
    fn = torch.func.vmap(
        lambda *args: overload(variant, op)(*args, **case.flags(op)),
        in_dims=tuple(0 if n in names else None for n in x),
    )
    o, final_state = fn(*x.values())
    for s, call in enumerate(calls):
        want = forward(case, op, call)
        if op == "chunk":
            assert_identical(o[s], want["o"], "o")
            assert_identical(final_state[s], want["final_state"], "final_state")
        else:
            torch.testing.assert_close(o[s], want["o"])
            torch.testing.assert_close(final_state[s], want["final_state"])


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
    torch.testing.assert_close(
        torch.func.vmap(call, in_dims=0, out_dims=1)(*args), loop.movedim(0, 1)
    )
    twice = [torch.stack([t, t.flip(0)]) for t in args]
    torch.testing.assert_close(
        torch.func.vmap(torch.func.vmap(call))(*twice), torch.stack([loop, loop.flip(0)])
    )
    leaves = [t.clone().requires_grad_() for t in args]
    torch.func.vmap(call)(*leaves).sum().backward()
    for s, one in enumerate(calls):
        want = run(
            case,
            inputs=one,
            need=("q", "k", "v", "g", "beta"),
            cotangents=(torch.ones_like(loop[s]), torch.zeros_like(x["initial_state"])),
        )
        for name, leaf in zip(("q", "k", "v", "g", "beta"), leaves):
            torch.testing.assert_close(leaf.grad[s], want["d" + name])


def test_what_cannot_be_mapped_is_refused(variant):
    case = Case(variant, lengths=(3, 2))
    x = case.inputs(TARGET.device)
    both = torch.stack([x["cu_seqlens"]] * 2)
    with pytest.raises(ValueError, match="cu_seqlens cannot be mapped by vmap"):
        torch.func.vmap(
            lambda c: overload(variant, "chunk")(*(x | {"cu_seqlens": c}).values(), **case.flags())
        )(both)
    pool = Pool(Case(variant, B=2, T=3, state=False, final=False), "recurrent_")
    y, q = pool.case.inputs(TARGET.device), torch.stack([pool.case.inputs(TARGET.device)["q"]] * 2)
    state = pool.state()
    for op in ("recurrent_", "chunk_"):
        with (
            pytest.raises(
                ValueError,
                match=f"{variant}::{op} writes its state in place and cannot be mapped by vmap",
            ),
            torch.no_grad(),
        ):
            torch.func.vmap(
                lambda q, op=op: overload(variant, op)(q, y["k"], y["v"], y["g"], y["beta"], state)
            )(q)
