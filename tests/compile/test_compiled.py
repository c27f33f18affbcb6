"""Under torch.compile and activation checkpointing an operator is one node, whatever the sizes."""

import functools
import os
from contextlib import nullcontext

import pytest
import torch
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend
from torch._inductor.utils import run_and_get_code
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import kda_ops
from kda_ops import dispatch
from kda_ops.chunk import Forward
from kda_ops.nn import GatedDeltaNet, KimiDeltaAttention
from kda_ops.recurrent import Recur
from kda_ops.stages import GRADIENTS
from tests.support.calls import overload, run
from tests.support.cases import Case, replace
from tests.support.closeness import assert_all_close, assert_identical, oracle, twin
from tests.support.pools import Pool, out_like
from tests.support.target import TARGET

OPS = ("chunk", "recurrent")
FULL = {"gate": "softplus", "beta": "sigmoid", "l2norm": True, "H": 1, "HV": 2}


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def functional(variant, op="chunk"):
    return getattr(kda_ops, f"{op.rstrip('_')}_{variant}{'_' if op.endswith('_') else ''}")


@pytest.mark.once
@pytest.mark.parametrize("op", ("chunk", "recurrent"))
def test_fullgraph_training_and_inference_with_inductor_equal_eager(variant, op):
    case = Case(variant, B=2, T=65, **FULL)
    x = case.inputs(TARGET.device)
    leaves = {
        n: t.detach().requires_grad_() for n, t in x.items() if t is not None and n in GRADIENTS
    }
    fn = torch.compile(
        lambda *args: functional(variant, op)(*args, **case.flags(op)), fullgraph=True
    )
    with torch.no_grad():
        inference = fn(*x.values())
    outs = fn(*(x | leaves).values())
    grads = torch.autograd.grad(outs, list(leaves.values()), case.cotangents(TARGET.device))
    got = {"o": outs[0].detach(), "final_state": outs[1].detach()} | {
        "d" + n: d for n, d in zip(leaves, grads)
    }
    assert_all_close(got, oracle(case), lambda draw: twin(case, op, draw=draw))
    eager = run(case, op)
    for name, tensor in got.items():
        torch.testing.assert_close(tensor, eager[name])
    for name, tensor in zip(("o", "final_state"), inference):
        torch.testing.assert_close(tensor, eager[name])


@pytest.mark.quick
def test_only_one_gradient_wanted_and_no_state_under_compile(variant):
    case = Case(variant, T=65, final=False)
    x = case.inputs(TARGET.device)
    x["v"].requires_grad_()
    o, final_state = torch.compile(
        lambda *args: functional(variant)(*args, **case.flags()),
        fullgraph=True,
        backend="aot_eager",
    )(*x.values())
    assert final_state is None
    o.sum().backward()
    v = x["v"].detach().requires_grad_()
    functional(variant)(*(x | {"v": v}).values(), **case.flags())[0].sum().backward()
    torch.testing.assert_close(x["v"].grad, v.grad)


def frames(fn, calls):
    """How many frames were compiled for the calls of fn, and whether each equals eager."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(fn, fullgraph=True, backend=counter)
    for args in calls:
        for got, want in zip(compiled(*args), fn(*args)):
            assert got.shape == want.shape
    return counter.frame_count


SIZES = (1, 63, 64, 65, 200, 1000)


@pytest.mark.parametrize("training", (False, True), ids=("no_grad", "training"))
@pytest.mark.parametrize("op", ("chunk", "recurrent_"))
def test_six_lengths_compile_at_most_twice(variant, op, training):
    if op == "recurrent_" and training:
        pytest.skip("inference only")
    calls = []
    for T in SIZES if op == "chunk" else (1, 2, 3, 5, 8):
        x = Case(variant, B=2, T=T, H=1, HV=1, K=4, V=3, state=False).inputs(TARGET.device)
        calls.append([x[n] for n in ("q", "k", "v", "g", "beta")])

    def chunk(q, k, v, g, beta):
        return functional(variant)(q, k, v, g, beta, output_final_state=True)

    def step(q, k, v, g, beta):
        state = q.new_zeros(2, 1, 4, 3)
        return functional(variant, "recurrent_")(q, k, v, g, beta, state), state

    if not training:
        with torch.no_grad():
            assert frames(chunk if op == "chunk" else step, calls) <= 2
        return
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        lambda *args: functional(variant)(*args, output_final_state=True),
        fullgraph=True,
        backend=counter,
    )
    for q, k, v, g, beta in calls:
        leaf, other = v.clone().requires_grad_(), v.clone().requires_grad_()
        o, state = compiled(q, k, leaf, g, beta)
        (o.sum() + state.sum()).backward()
        o, state = functional(variant)(q, k, other, g, beta, output_final_state=True)
        (o.sum() + state.sum()).backward()
        torch.testing.assert_close(leaf.grad, other.grad)
    assert counter.frame_count <= 2


@pytest.mark.quick
@pytest.mark.parametrize("what", ("batch", "packed tokens and sequences"))
def test_other_batch_sizes_and_packings_do_not_recompile(variant, what):
    packings = ((3, 0, 65), (64, 1, 2, 5), (7, 9), (2, 2, 2, 130, 1))
    cases = (
        [Case(variant, B=B, T=5, H=1, HV=1, K=4, V=3) for B in (2, 3, 5, 7)]
        if what == "batch"
        else [Case(variant, lengths=n, H=1, HV=1, K=4, V=3) for n in packings]
    )
    names = ("q", "k", "v", "g", "beta", "initial_state", "cu_seqlens")

    def call(*given):
        return functional(variant)(**dict(zip(names, given)), output_final_state=True)

    calls = [[replace(c, seed=0).inputs(TARGET.device)[n] for n in names] for c in cases]
    with torch.no_grad():
        assert frames(call, calls) <= 2


@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_a_length_that_only_a_tensor_knows_compiles():
    torch._dynamo.reset()

    def cut(x, g, beta, n):
        T = n.item()
        torch._check(T >= 0)
        torch._check(T <= x.shape[1])
        q, k, v = torch.cat([x, x, x], -1)[:, :T].split(8, -1)  # not contiguous
        return kda_ops.chunk_kda(q, k, v, g[:, :T], beta[:, :T])[0]

    x = torch.randn(1, 20, 2, 8, device=TARGET.device)
    args = x, -torch.rand_like(x), torch.rand(1, 20, 2, device=TARGET.device), torch.tensor(7)
    torch.testing.assert_close(
        torch.compile(cut, fullgraph=True, backend="aot_eager")(*args), cut(*args)
    )


@pytest.mark.bits
@pytest.mark.parametrize("device", ("cpu", "cuda"))
def test_a_graph_can_ask_what_a_backend_keeps(device):
    """As the calls of `kda_ops.distributed` do; no GPU is needed to ask for one."""

    def cast(x):
        return x.to(dispatch.keeps(torch.device(device)).operand_dtype(x.dtype))

    x = torch.randn(3, dtype=torch.bfloat16)
    assert_identical(torch.compile(cast, fullgraph=True, backend="eager")(x), cast(x))


@pytest.mark.quick
def test_a_wrong_call_is_refused_while_compiling(variant):
    x = Case(variant).inputs(TARGET.device)
    with pytest.raises(Exception, match="beta must have shape") as caught:
        torch.compile(functional(variant), fullgraph=True, backend="aot_eager")(
            x["q"], x["k"], x["v"], x["g"], x["beta"][:, :1]
        )
    assert isinstance(caught.value, ValueError) or "ValueError" in str(caught.value)


# --- states in place


@pytest.mark.once
@pytest.mark.parametrize("op", ("recurrent_", "chunk_"))
def test_inductor_writes_a_pool_in_place_without_copying_it(variant, op):
    pool = Pool(Case(variant, B=2, T=3, K=13, V=17, state=False, final=False), op)
    x = pool.case.inputs(TARGET.device)
    indices = pool.indices()[0].to(TARGET.device)
    state = pool.state()

    def two_steps(q, k, v, g, beta, state, indices):
        o = functional(variant, op)(q * 1.5, k, v, g, beta, state, indices)
        return functional(variant, op)(o[..., :13] * 0.1, k, v, g, beta, state, indices) + 1.0

    args = [x[n] for n in ("q", "k", "v", "g", "beta")]
    if pool.case.H != pool.case.HV:
        args[0], args[1] = (t.repeat_interleave(pool.case.HV // pool.case.H, 2) for t in args[:2])
    want_state = state.clone()
    with torch.inference_mode():
        want = two_steps(*args, want_state, indices)
    pointer = state.data_ptr()
    with torch.inference_mode():
        got, codes = run_and_get_code(
            torch.compile(two_steps, fullgraph=True), *args, state, indices
        )
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(state, want_state)
    assert state.data_ptr() == pointer
    code = "\n".join(codes)
    assert code.count(f"torch.ops.{variant}.{op}.default(") == 2
    size = ", ".join(map(str, state.shape))
    assert f"({size})" in code, "the state's size is in the code as a guard on the input"
    assert (
        f"empty_strided_{TARGET.device.type}(({size})" not in code
        and "clone" not in code
        and "copy_(" not in code
    ), "a state was copied"


# --- checkpointing


@pytest.mark.parametrize("backend", (None, "aot_eager"), ids=("eager", "compiled"))
@pytest.mark.parametrize("op", ("chunk", "recurrent"))
def test_a_checkpoint_that_saves_our_operators_computes_them_once(op, backend, monkeypatch):
    calls, here = {"n": 0}, dispatch.backend(TARGET.device)
    plain = here.run

    def counted(kind, *call):
        calls["n"] += kind in (Forward, Recur)
        return plain(kind, *call)

    monkeypatch.setattr(here, "run", counted)
    case = Case(T=65, **FULL)
    x = case.inputs(TARGET.device)

    def block(v):
        return (
            functional("kda", op)(*(x | {"v": v * 2.0}).values(), **case.flags(op))[0].relu() * 3.0
        )

    def policy(ctx, target, *args, **kwargs):
        return (
            CheckpointPolicy.MUST_SAVE
            if target in kda_ops.SAVE_OPS
            else CheckpointPolicy.PREFER_RECOMPUTE
        )

    grads = {}
    for kind, contexts in (
        ("selective", functools.partial(create_selective_checkpoint_contexts, policy)),
        ("full", None),
    ):
        v = x["v"].detach().requires_grad_()
        calls["n"] = 0

        def outer(v, contexts=contexts):
            extra = {} if contexts is None else {"context_fn": contexts}
            return checkpoint(block, v, use_reentrant=False, **extra)

        (torch.compile(outer, fullgraph=True, backend=backend) if backend else outer)(
            v
        ).sum().backward()
        grads[kind] = v.grad
        if kind == "selective":
            assert calls["n"] == 1, f"computed {calls['n']} times although the policy saves it"
        elif backend is None:
            assert calls["n"] == 2, "a plain checkpoint recomputes"
    v = x["v"].detach().requires_grad_()
    block(v).sum().backward()
    for grad in grads.values():
        torch.testing.assert_close(grad, v.grad)


@pytest.mark.parametrize("op", (*OPS, "gate"))
@pytest.mark.parametrize("mode", ("gradients", "none wanted", "inference", "autocast"))
def test_dynamo_compiles_no_function_below_an_operator(op, mode):
    """In a frame that it gave up on, operators run as they are, and so do the Python functions that
    they are made of.
    """
    case = Case("kda", T=5, gate="softplus")
    x = case.inputs(TARGET.device)
    arguments = (x["g"], x["A_log"], x["dt_bias"]) if op == "gate" else tuple(x.values())
    x["g"].requires_grad_(mode in ("gradients", "autocast"))
    inside = {
        "inference": torch.inference_mode,
        "autocast": lambda: torch.autocast(TARGET.device.type, torch.bfloat16),
    }.get(mode, nullcontext)

    def attend():
        with open(os.devnull), inside():
            torch._dynamo.graph_break()
            return overload("kda", op)(*arguments, **({} if op == "gate" else case.flags(op)))

    counter = CompileCounter()
    torch.compile(attend, backend=counter)()
    assert counter.frame_count == 0


@pytest.mark.bits
@pytest.mark.parametrize("op", (*OPS, "gate"))
def test_dynamo_leaves_the_formulas_of_a_backward_alone(op):
    """Its guards would read what checkpointing lets be read once."""
    case = Case("kda", T=5, gate="softplus")
    x = case.inputs(TARGET.device)
    x["g"].requires_grad_()

    def loss(g):
        if op == "gate":
            return overload("kda", op)(g, x["A_log"], x["dt_bias"]).sum()
        return overload("kda", op)(*(x | {"g": g}).values(), **case.flags(op))[0].sum()

    checkpointed = torch.compiler.disable(lambda g: checkpoint(loss, g, use_reentrant=False))

    def step(g):
        checkpointed(g).backward()

    torch.compile(step, backend="eager")(x["g"])
    got, x["g"].grad = x["g"].grad, None
    loss(x["g"]).backward()
    assert_identical(got, x["g"].grad)


@pytest.mark.parametrize("make", (KimiDeltaAttention, GatedDeltaNet))
def test_dynamo_leaves_the_formulas_of_a_layer_alone(make):
    layer, x = make(hidden_size=32, head_dim=8, num_heads=2), torch.randn(1, 10, 32)
    checkpointed = torch.compiler.disable(
        lambda x: checkpoint(layer, x, cu_seqlens=torch.tensor([0, 4, 10]), use_reentrant=False)
    )

    def step(x):
        checkpointed(x).sum().backward()

    torch.compile(step, backend="eager")(x)
    assert all(p.grad is not None for p in layer.parameters())


@pytest.mark.parametrize("forward", ("eager", "compiled"))
def test_backward_compiles_under_compiled_autograd(variant, forward):
    run = kda_ops.chunk_kda if variant == "kda" else kda_ops.chunk_gdn
    width = (8,) if variant == "kda" else ()
    x = [torch.randn(1, 5, 2, 8) for _ in range(3)]
    x += [-torch.rand(1, 5, 2, *width), torch.rand(1, 5, 2)]
    leaves = [t.requires_grad_() for t in x]
    want = torch.autograd.grad(run(*leaves)[0].sum(), leaves)
    if forward == "compiled":
        run = torch.compile(run, backend="aot_eager", fullgraph=True)
    loss = run(*leaves)[0].sum()
    compiler = torch.compile(backend="aot_eager", fullgraph=True)
    with torch._dynamo.compiled_autograd._enable(compiler):
        loss.backward()
    for leaf, dx in zip(leaves, want):
        torch.testing.assert_close(leaf.grad, dx)


@pytest.mark.once
@pytest.mark.bits
@pytest.mark.parametrize("layout", ("contiguous", "columns"))
@pytest.mark.parametrize("op", ("recurrent_", "chunk_"))
def test_options_of_engines_compile_to_one_graph(variant, op, layout):
    fresh = (True,) if op == "chunk_" else ()
    case = Case(variant, B=3, T=3, state=False, final=False)
    pool = Pool(case, op, dead=(False, True), null=0, fresh=fresh)
    want, after = pool.run()
    names = [a.name for a in overload(variant, op)._schema.arguments]
    x, function = dict(zip(names, pool.arguments(pool.state()))), functional(variant, op)
    out, around = out_like(want, layout)

    @torch.compile(fullgraph=True, backend=(counter := CompileCounterWithBackend("inductor")))
    def step(x, out):
        given = function(**x, **pool.flags(), out=out)
        return given.sum(), given

    with torch.no_grad():
        total, given = step(x, out)
    assert counter.frame_count == 1 and given.data_ptr() == out.data_ptr()
    assert_identical(out.contiguous(), want, "out")
    assert_identical(x["state"], after, "the pool")
    assert int(around.isnan().sum()) == around.numel() - want.numel()
    torch.testing.assert_close(total, want.sum())


@pytest.mark.parametrize("op", ("recurrent_", "chunk_"))
def test_a_strided_out_is_refused_in_a_graph_too(op):
    pool = Pool(Case(B=2, T=3, state=False, final=False), op)
    names = [a.name for a in overload("kda", op)._schema.arguments]
    x = dict(zip(names, pool.arguments(pool.state())))
    step = torch.compile(lambda out: functional("kda", op)(**x, out=out), backend="eager")
    with pytest.raises(ValueError, match="^out must have shape"), torch.no_grad():
        step(torch.empty(1, *x["v"].shape[1:])[..., ::2])
    assert_identical(x["state"], pool.state(), "the pool")
