"""`kda_ops.inductor` folds no other functions, and nothing whose result would change."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import kda_ops
from tests.support.folding import (
    NAMES,
    Captured,
    assert_folds,
    assert_refuses,
    attend,
    capture,
    inputs,
    norm,
)


def invariant(*args):
    """Call the operator with a flag whose bits a fold would change."""
    return kda_ops.chunk_kda(*args, invariant=True)


# --- other functions are not folded ---------------------------------------------------------------


def total(x):
    return x.sum(-1, keepdim=True)


def gate(g, A, dt, **options):
    return -A.exp()[:, None] * F.softplus(g + dt, **options)


OTHERS = {
    "F.normalize": attend(
        norm=lambda x: F.normalize(x, dim=-1), decay=lambda g, A, dt: -F.softplus(g)
    ),
    "invariant": attend(norm=norm, beta=lambda b: b.sigmoid(), op=invariant),
    "another eps": attend(norm=lambda x: x * torch.rsqrt(total(x.square()) + 1e-5)),
    "no eps": attend(norm=lambda x: x * torch.rsqrt(total(x.square()))),
    "absolute value": attend(
        norm=lambda x: x.square().sqrt() * torch.rsqrt(total(x.square()) + 1e-6)
    ),
    "only q": attend(lambda q, k: (norm(q), k)),
    "mean": attend(norm=lambda x: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)),
    "over tokens": attend(norm=lambda x: x * torch.rsqrt(x.square().sum(1, keepdim=True) + 1e-6)),
    "of something else": attend(lambda q, k: (q * torch.rsqrt(total(k.square()) + 1e-6), norm(k))),
    "scaled": attend(lambda q, k: (2 * norm(q), norm(k))),
    "cube": attend(norm=lambda x: x * torch.rsqrt(total(x * x * x).abs() + 1e-6)),
    "an older sum": attend(
        norm=lambda x: x * torch.rsqrt(torch.add(total(x.square()), 1e-6, x.abs()[..., :1]))
    ),
    "one axis by name": attend(
        norm=lambda x: norm(x.transpose(1, 3).contiguous()).swapaxes(1, axis1=3)
    ),
    "masked": attend(
        norm=lambda x: x * torch.rsqrt(torch.masked.sum(x * x, -1, keepdim=True, mask=x > 0) + 1e-6)
    ),
    "3 sigmoid": attend(beta=lambda b: 0.3 * b.sigmoid()),
    "infinite power": attend(beta=lambda b: b.sigmoid().detach() ** math.inf),
    "sigmoid squared": attend(beta=lambda b: b.sigmoid() ** 2),
    "softplus beta": attend(decay=lambda g, A, dt: gate(g, A, dt, beta=2.0)),
    "softplus threshold": attend(decay=lambda g, A, dt: gate(g, A, dt, threshold=1.0)),
    "no A_log": attend(decay=lambda g, A, dt: -F.softplus(g + dt)),
    "twice": attend(decay=lambda g, A, dt: 2 * gate(g, A, dt)),
    "per channel": attend(decay=lambda g, A, dt: -dt[0].exp() * F.softplus(g + dt)),
    "exp2": attend(decay=lambda g, A, dt: -A.exp2()[:, None] * F.softplus(g + dt)),
    "rounded down": attend(
        decay=lambda g, A, dt: torch.div(
            -A.sigmoid()[:, None] * g.sigmoid(), 0.2, rounding_mode="trunc"
        )
    ),
}


@pytest.mark.quick
@pytest.mark.parametrize("call", OTHERS.values(), ids=OTHERS)
def test_another_function_is_not_folded(call):
    assert_refuses(call, inputs(), None)


CONSTANTS = {
    "0": lambda s: -s / 0.0,
    "minus 0": lambda s: s / -0.0,
    "infinity": lambda s: -math.inf * s,
    "NaN": lambda s: math.nan * s,
    "beyond float32": lambda s: -1e39 * s,
    "beyond float32, in turn": lambda s: -1e30 * (1e30 * s),
    "beyond float32, between": lambda s: -5e-39 * (1e39 * s),
    "below float32": lambda s: (-1e-46 * s) * 5e46,
    "below float32, below the line": lambda s: -s / 1e-46,
    "an inverse of infinity": lambda s: -(math.inf * s).reciprocal().reciprocal(),
}


@pytest.mark.once
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("name", CONSTANTS)
def test_a_constant_that_a_dtype_does_not_hold_is_not_folded(name, dtype):
    f = attend(decay=lambda g, *_: CONSTANTS[name](g.sigmoid()))
    captured = capture(f, inputs(dtype=dtype, grad=False))
    assert not captured.fold.folded and not captured.fold.promised


def test_a_constant_beyond_float16_is_not_folded_there():
    for factor, bound in ((-7e4, 0), (-5.0, 1)):
        call = attend(decay=lambda g, A, dt, factor=factor: factor * g.sigmoid())
        captured = capture(call, inputs(dtype=torch.float16, grad=False))
        assert captured.fold.folded == Counter(bounded_gate=bound) + Counter()


def test_an_input_is_not_activated_twice():
    def f(q, k, v, g, beta, *_):
        flags = dict(use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True)
        return kda_ops.chunk_kda(norm(q), norm(k), v, None, beta.sigmoid(), **flags)[0]

    assert_refuses(f, inputs(), None)


def test_a_bias_per_head_stays_in_the_logits():
    call = attend(decay=lambda g, A, dt: gate(g, A, dt[:, :1]))
    captured = assert_folds(call, inputs(), gate=1)
    assert captured.calls[0].args[NAMES.index("dt_bias")] is None


def test_a_product_of_logits_folds_without_its_factor():
    call = attend(decay=lambda g, A, dt: -5 * torch.sigmoid(0.5 * g))
    assert_folds(call, inputs(), bounded_gate=1)


def test_a_contradicting_bound_is_kept():
    def f(q, k, v, g, beta, A_log, dt_bias):
        return kda_ops.chunk_kda(
            q, k, v, -3.0 * torch.sigmoid(g), None, safe_gate=True, lower_bound=-4.0
        )[0]

    assert_refuses(f, inputs(), "flags")


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.quick
def test_nothing_folds_across_a_change_of_grad_mode():
    def f(q, k, v, g, beta, *_):
        with torch.no_grad():
            b = beta.sigmoid()
        return kda_ops.chunk_kda(q, k, v, None, b)[0]

    assert_refuses(f, inputs(), "grad mode")
    assert_refuses(f, inputs(grad=False), "grad mode")

    def both_inside(q, k, v, g, beta, *_):
        with torch.no_grad():
            o = kda_ops.chunk_kda(q, k, v, None, beta.sigmoid())[0]
        return o * q.sum()

    assert_folds(both_inside, inputs(), sigmoid=1)


def test_one_factor_under_no_grad_prevents_the_fold():
    def f(q, k, v, g, beta, A_log, dt_bias):
        with torch.no_grad():
            A = A_log.exp()[:, None]
        return kda_ops.chunk_kda(q, k, v, -A * F.softplus(g + dt_bias), None)[0]

    assert_refuses(f, inputs(), "grad mode")
    # a detached leaf folds like any other
    assert_folds(attend(decay=lambda g, A, dt: gate(g, A.detach(), dt)), inputs(), gate=1)


@pytest.mark.quick
def test_nothing_folds_across_a_change_of_autocast():
    def f(q, k, v, g, beta, *_):
        with torch.autocast("cpu", torch.bfloat16):
            b = beta.sigmoid()
        return kda_ops.chunk_kda(q, k, v, None, b)[0]

    assert_refuses(f, inputs(), "autocast")

    def both_inside(q, k, v, g, beta, *_):
        with torch.autocast("cpu", torch.bfloat16):
            return kda_ops.chunk_kda(q, k, v, None, beta.sigmoid())[0]

    assert_folds(both_inside, inputs(), tolerance=2e-2, sigmoid=1)


def _attend(q, k, v, *_):
    return kda_ops.chunk_kda(norm(3e5 * q), norm(3e5 * k), v, None, None)[0]


def _within(*modes):
    """Return `_attend` under nested autocast modes, the first one outermost."""
    if not modes:
        return _attend
    inner = _within(*modes[1:])

    def f(*x):
        with torch.autocast("cpu", **modes[0]):
            return inner(*x)

    return f


HALF = dict(dtype=torch.float16)
NO_NAME = {}
OFF = dict(dtype=torch.float16, enabled=False)
BFLOAT = dict(dtype=torch.bfloat16)


@pytest.mark.parametrize(
    "ambient, modes, dtype, folds",
    [
        (None, [HALF], torch.float32, False),
        (torch.float16, [], torch.float32, False),
        (None, [NO_NAME], torch.float32, False),
        (None, [BFLOAT, HALF], torch.float32, False),
        (torch.float16, [OFF], torch.float32, True),
        (None, [HALF, OFF], torch.float32, True),
        (torch.bfloat16, [], torch.float32, True),
        (torch.float16, [BFLOAT], torch.float32, True),
        (None, [HALF], torch.float64, True),
    ],
)
def test_a_norm_does_not_fold_if_autocast_would_cast_its_input_to_float16(
    ambient, modes, dtype, folds
):
    """The raw q and k may overflow float16; only the norm brings them into its range."""
    before = torch.get_autocast_dtype("cpu")
    torch.set_autocast_dtype("cpu", torch.float16)  # the default of a mode without a dtype
    try:
        with torch.autocast("cpu", ambient or torch.float16, enabled=ambient is not None):
            captured = Captured()
            o = captured.compile(_within(*modes))(*inputs(dtype=dtype, grad=False).values())
    finally:
        torch.set_autocast_dtype("cpu", before)
    assert o.isfinite().all()
    assert (captured.fold.folded, captured.fold.refused) == (
        (Counter(l2norm=1), Counter()) if folds else (Counter(), Counter(["precision"]))
    )


aten = torch.ops.aten
LIBRARY = torch.library.Library("folding", "DEF")  # noqa: TOR901
for _schema, _run, _fake in (
    # an overload that writes what the first one reads
    ("scale(Tensor x, Tensor y) -> Tensor", lambda x, y: x * y, torch.mul),
    (
        "scale.in_place(Tensor(a!) x, float y) -> Tensor",
        lambda x, y: x.mul_(y) * 1.0,
        lambda x, y: x * 1.0,
    ),
    # a name that says what the schema keeps quiet
    ("halve_(Tensor x) -> Tensor", lambda x: x.mul_(0.5) * 1.0, lambda x: x * 1.0),
):
    LIBRARY.define(_schema)
    _name = _schema.partition("(")[0]
    LIBRARY.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"folding::{_name}", _fake, lib=LIBRARY)


@torch.library.custom_op("folding::custom", mutates_args="unknown")
def _custom(x: torch.Tensor) -> None:
    x.mul_(0.5)


@torch._dynamo.allow_in_graph
def _passes_on(*args, **kwargs):
    return F.relu(*args, **kwargs)


@torch._dynamo.allow_in_graph
def _halves(x):
    return x.mul_(0.5) * 1.0


def _by_item(b, y, out):
    b[0, 1] = 0.25


def _by_statement(b, y, out):
    b *= 0.5


# How a program writes beta (b), its sigmoid (y) or, by an argument, one of them.
WRITES = {
    "a leaf": lambda b, y, out: b.mul_(0.5),
    "a view": _by_item,
    "an activation": lambda b, y, out: y.clamp_(0.2, 0.6),
    "out": lambda b, y, out: torch.mul(out, 0.5, out=b),
    "out of two": lambda b, y, out: torch.max(
        out[None], 0, out=(b, torch.empty(b.shape, dtype=torch.long))
    ),
    "out by position": lambda b, y, out: F.normalize(out, 0.5, 1, 1e-12, b),
    "out by position in norm": lambda b, y, out: torch.norm(out[None], 2, 0, False, b),
    "statement": _by_statement,
    "method of the statement": lambda b, y, out: b.__imul__(0.5),
    "inplace by position": lambda b, y, out: F.silu(b, True),
    "module": lambda b, y, out: torch.nn.Dropout(1.0, inplace=True)(b),
    "rows that are too long": lambda b, y, out: F.embedding(
        torch.tensor([0, 1]), b[0], max_norm=0.1
    ),
    "what is counted": lambda b, y, out: F.batch_norm(
        out.flatten(0, 1), b[0, 0], b[0, 1], training=True
    ),
    "what is counted in C": lambda b, y, out: torch.batch_norm(
        out.flatten(0, 1), None, None, b[0, 0], b[0, 1], True, 0.1, 1e-5, False
    ),
    "what aten counts": lambda b, y, out: aten.native_batch_norm(
        out.flatten(0, 1), None, None, b[0, 0], b[0, 1], True, 0.1, 1e-5
    ),
    "function of anything": lambda b, y, out: _passes_on(b, inplace=True),
    "function that does not say so": lambda b, y, out: _halves(b),
    "any overload": lambda b, y, out: aten.mul(out, 0.5, out=b),
    "an overload": lambda b, y, out: aten.mul.out(out, out, out=b),
    "another overload": lambda b, y, out: torch.ops.folding.scale(b, 0.5),
    "quiet schema": lambda b, y, out: torch.ops.folding.halve_(b),
    "custom operator": lambda b, y, out: _custom(b),
    "a list": lambda b, y, out: torch._foreach_mul_([out, b], 0.5),
    "a list of views": lambda b, y, out: aten._foreach_mul_(b.split(1, -1), 0.5),
    "a list of outs": lambda b, y, out: torch.unbind_copy(
        torch.stack((out, out)), out=[torch.empty_like(b), b]
    ),
    "numpy": lambda b, y, out: np.multiply(b.detach().numpy(), 0.5, out=b.detach().numpy()),
}


@pytest.mark.once
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("when", ("before", "after"))
def test_nothing_folds_across_a_write_in_place(write, when):
    def f(q, k, v, g, beta, *_):
        b, out = beta.clone(), beta.detach() + 1
        y = b.sigmoid()
        if when == "before":
            write(b, y, out)
        o = kda_ops.chunk_kda(q, k, v, None, y)[0]
        if when == "after":
            write(b, y, out)
        return o + b.sum() + y.sum()

    assert_refuses(f, inputs(grad=False), "in-place")


@pytest.mark.parametrize(
    "activate",
    (
        lambda b, out: torch.sigmoid(b, out=out),
        lambda b, out: aten.sigmoid(b, out=out),
        lambda b, out: torch.special.expit(b, out=out),
        lambda b, out: 2 * torch.sigmoid(b, out=out),
        lambda b, out: torch.mul(b.sigmoid(), 2, out=out),
    ),
)
def test_an_activation_that_writes_its_result_is_not_removed(activate):
    def f(q, k, v, g, beta, *_):
        outs = torch.zeros(2, *beta.shape)
        o = kda_ops.chunk_kda(q, k, v, None, activate(beta, outs[0]))[0]
        return o + outs.sum()

    captured = assert_folds(f, inputs(grad=False))
    assert not captured.fold.promised


def test_a_write_to_another_tensor_does_not_prevent_a_fold():
    def f(q, k, v, g, beta, *_):
        y, other = beta.sigmoid(), torch.zeros_like(beta)
        other.add_(1)
        return kda_ops.chunk_kda(q, k, v, None, y)[0] + other.sum()

    assert_folds(f, inputs(), sigmoid=1)


def test_vmap_around_an_operator_folds_unless_something_is_written():
    """Mapped tensors have no storage to compare with the written one."""

    def f(q, k, v, g, beta, *_):
        o = torch.vmap(lambda q, b: kda_ops.chunk_kda(q, k, v, None, b.sigmoid())[0])(
            torch.stack([q, 2 * q]), torch.stack([beta, -beta])
        )
        return o.sum(0)

    def writes(q, k, v, g, beta, *_):
        c = beta * 1.0
        o = torch.vmap(
            lambda b: kda_ops.chunk_kda(q, k, v, None, b.sigmoid())[0] + b.mul_(2.0).sum()
        )(torch.stack([beta, c]))
        return o.sum(0)

    def elsewhere(q, k, v, g, beta, *_):
        return (
            kda_ops.chunk_kda(q, k, v, None, beta.sigmoid())[0]
            + torch.vmap(lambda t: t.mul_(2.0))(g * 1.0).sum()
        )

    def beneath(q, k, v, g, beta, *_):
        c = torch.stack([beta, -beta])
        o = torch.vmap(lambda b: kda_ops.chunk_kda(q, k, v, None, b.sigmoid())[0])(c)
        return o.sum(0) + c.mul_(2.0).sum()

    assert_folds(f, inputs(grad=False), sigmoid=1)
    assert_refuses(beneath, inputs(grad=False), "in-place")
    assert_refuses(writes, inputs(grad=False), "in-place")
    assert_refuses(elsewhere, inputs(grad=False), "in-place")


def test_a_write_before_the_activation_does_not_prevent_a_fold():
    def f(q, k, v, g, beta, *_):
        b = beta.clone()
        b.mul_(0.5)
        return kda_ops.chunk_kda(q, k, v, None, b.sigmoid())[0]

    assert_folds(f, inputs(), sigmoid=1)


FP8 = torch.float8_e4m3fn
LOSSY = {
    "beta": attend(beta=lambda b: b.sigmoid().bfloat16()),
    "decay": attend(decay=lambda g, A, dt: gate(g, A, dt).half()),
    "q and k": attend(norm=lambda x: norm(x).half()),
    "squares in fp16": attend(norm=lambda x: norm(x.half())),
    "fp8 beta": attend(beta=lambda b: b.sigmoid().to(FP8).float()),
    "fp8 decay": attend(decay=lambda g, A, dt: gate(g, A, dt).to(torch.float8_e5m2).float()),
    "fp8 q and k": attend(norm=lambda x: norm(x).to(FP8).to(x.dtype)),
    "there and back": attend(norm=lambda x: norm(x).bfloat16().float()),
    "back and there": attend(norm=lambda x: norm(x.bfloat16().float()).bfloat16().float()),
    "wider A_log": attend(decay=lambda g, A, dt: gate(g, A.double(), dt)),
}


@pytest.mark.bits
@pytest.mark.parametrize("call", LOSSY.values(), ids=LOSSY)
def test_a_cast_that_loses_precision_is_not_folded(call):
    captured, x = Captured(), inputs(grad=False)
    assert torch.equal(captured.compile(call)(*x.values()), call(*x.values()))
    assert not captured.fold.folded and captured.fold.refused == Counter(["precision"])


def test_logits_rounded_by_the_program_stay_rounded():
    """A narrowing cast of the logits is kept; only the activation after it folds."""
    call = attend(beta=lambda b: b.bfloat16().float().sigmoid())
    captured = assert_folds(call, inputs(grad=False), sigmoid=1)
    assert captured.calls[0].args[4].meta["example_value"].dtype is torch.bfloat16
