"""What training keeps where it walks, and when backward walks back, whatever makes it."""

from dataclasses import replace

import pytest
import torch
from torch.func import vjp, vmap
from torch.utils.checkpoint import checkpoint

from kda_ops import chunk, dispatch
from kda_ops.registrations import autograd, schemas
from kda_ops.stages import GRADIENTS, KEPT, Keeps
from tests.support.calls import overload, run
from tests.support.cases import Case
from tests.support.closeness import assert_all_identical
from tests.support.training_walk import training_walks

BACKEND = dispatch.backend(torch.device("cpu"))
CASE = Case(T=70, dtype=torch.float64, l2norm=True, beta="sigmoid", gate="bounded")
PACKED = replace(CASE, lengths=(0, 65, 1, 30), tail=5, transposed=True)


@pytest.fixture
def walks():
    with training_walks(BACKEND) as keeps:
        yield keeps


def backward(case, kept, do=True, dfinal=True, need=GRADIENTS):
    """Run the backward pass on what a forward pass has kept, and o."""
    o, *kept = kept
    cotangents = [x if there else None for x, there in zip(case.cotangents(), (do, dfinal))]
    inputs = tuple(case.inputs().values())
    flags = case.flags() | {"need": schemas.mask_of(n in need for n in GRADIENTS)}
    found = chunk.Backward(1, (*cotangents, *kept, *inputs, o), flags).run(BACKEND)
    return {n: x for n, x in zip(GRADIENTS, found) if x is not None}


def forward(case):
    """Return o and what the forward pass keeps."""
    o, _, *kept = chunk.Forward(1, tuple(case.inputs().values()), case.flags()).run(BACKEND)
    return o, *kept


@pytest.mark.quick
@pytest.mark.bits
@pytest.mark.parametrize("keep", (False, True))
@pytest.mark.parametrize("case", (CASE, PACKED, replace(CASE, final=False, state=False)), ids=str)
def test_a_training_step_walks_there_and_back(case, keep):
    case = replace(case, disable_recompute=keep)
    want = run(case)
    with training_walks(BACKEND) as walks:
        got = run(case)
    assert (walks.trained, walks.walked) == (1, 1)
    assert_all_identical(got, want)


@pytest.mark.quick
def test_gdn_does_not_walk(walks):
    run(Case("gdn", T=70))
    assert (walks.trained, walks.walked) == (0, 0)


@pytest.mark.parametrize("keep", (False, True))
@pytest.mark.parametrize("case", (CASE, PACKED), ids=("dense", "packed"))
def test_forward_keeps_a_and_if_asked_the_states_of_halves(walks, case, keep):
    case = replace(case, disable_recompute=keep)
    _, *kept = forward(case)
    there = {n: tuple(x.shape) for n, x in zip(KEPT, kept) if x.shape != (0,)}
    # T = 70 has 2 chunks and 3 halves; 4 sequences in 101 tokens have places for 5 and 7
    chunks, halves = (5, 7) if case.lengths else (2, 3)
    states = dict(states=(halves, case.HV, case.V, case.K), v_new=(halves, case.HV, 32, case.V))
    assert there == {"A": (chunks, case.HV, 32, 128)} | (states if keep else {})
    fake = overload("kda", "chunk_fwd")(
        *(x if x is None else x.to("meta") for x in case.inputs().values()), **case.flags()
    )
    assert [x.shape for x in fake[2:]] == [x.shape for x in kept]


@pytest.mark.quick
def test_kept_tensors_of_another_call_or_of_other_stages_are_refused():
    case = replace(CASE, disable_recompute=True)
    others = dict(zip(("o", *KEPT), forward(case)))
    with training_walks(BACKEND) as walks:
        kept = dict(zip(("o", *KEPT), forward(case)))
        backward(case, kept.values())
        assert walks.walked == 1
        for name in ("A", "states", "v_new"):
            x = kept[name]
            for wrong in (x[1:], torch.cat([x, x]), x[:, :1], x[..., 1:], others[name]):
                some = kept | {name: wrong}
                # the shape of A tells which shapes the others have
                named = "states" if wrong is others["A"] else name
                with pytest.raises(ValueError, match=f"^{named} must have shape"):
                    backward(case, some.values())
        assert walks.walked == 1
    for name in ("states", "v_new"):
        with pytest.raises(ValueError, match=f"^{name} must have shape"):
            backward(case, (others | {name: kept[name]}).values())


@pytest.mark.parametrize("keep", (False, True))
def test_backward_saves_o_only_with_kept_states(keep, monkeypatch):
    names = Keeps.names

    def with_o(self, rank, dtype, l2norm, disable_recompute):
        found = names(self, rank, dtype, l2norm, disable_recompute)
        return found | {"o"} if disable_recompute else found

    monkeypatch.setattr(Keeps, "names", with_o)
    autograd._reads_output.cache_clear()
    case = replace(CASE, disable_recompute=keep)

    def saved(heads):
        with training_walks(BACKEND, heads):
            x = case.inputs()
            x["v"].requires_grad_()
            o, _ = overload("kda", "chunk")(*x.values(), **case.flags())
            return any(x is not None and x.is_set_to(o) for x in o.grad_fn.saved_tensors)

    assert saved(heads=99) == keep and not saved(heads=1)
    autograd._reads_output.cache_clear()


@pytest.mark.bits
@pytest.mark.parametrize("keep", (False, True))
def test_backward_without_a_gradient_of_o_reads_nothing_of_the_walk(keep):
    case = replace(CASE, disable_recompute=keep)
    want = backward(case, forward(case), do=False)
    with training_walks(BACKEND) as walks:
        got = backward(case, forward(case), do=False)
    assert (walks.trained, walks.walked) == (1, 0)
    assert_all_identical(got, want)


@pytest.mark.bits
@pytest.mark.parametrize("keep", (False, True))
def test_backward_of_fewer_heads_reads_nothing_of_the_walk(keep):
    """As where DTensor has redistributed what was kept."""
    case = replace(CASE, disable_recompute=keep)
    want = backward(case, forward(case))
    with training_walks(BACKEND) as walks:
        kept = forward(case)
        walks.heads = case.HV + 1
        got = backward(case, kept)
    assert (walks.trained, walks.walked) == (1, 0)
    assert_all_identical(got, want)


def test_backward_reads_the_a_of_other_stages_as_they_do(monkeypatch):
    """Even for a call that walks in training."""
    kept = forward(replace(CASE, disable_recompute=True))
    A, seen, prepare = kept[1 + list(KEPT).index("A")], [], BACKEND.prepare

    def note(p, A=None, *args, **options):
        seen.append(A)
        return prepare(p, A, *args, **options)

    monkeypatch.setattr(BACKEND, "prepare", note)
    # shards of a call that walks as a whole keep more, but get only what the whole call keeps
    for keep, names in ((False, ("A",)), (True, ("A",)), (True, ("A", "states", "v_new"))):
        passed = [x if n in names else x.new_empty(0) for n, x in zip(KEPT, kept[1:])]
        with training_walks(BACKEND) as walks:
            backward(replace(CASE, disable_recompute=keep), (None, *passed))
        assert walks.walked == 0 and seen.pop() is A and not seen


@pytest.mark.bits
def test_a_call_without_tokens_or_sequences_does_not_walk_back():
    packed = [replace(CASE, lengths=x, tail=n) for x, n in (((), 5), ((), 70), ((0, 0), 0))]
    for case in (replace(CASE, T=0), *packed):
        want = run(case)
        with training_walks(BACKEND) as walks:
            got = run(case)
        assert (walks.trained, walks.walked) == (1, 0)
        assert_all_identical(got, want)


@pytest.mark.bits
def test_the_backward_of_recurrent_does_not_walk(walks):
    got = run(CASE, "recurrent")
    assert (walks.trained, walks.walked) == (0, 0)
    walks.heads = 99
    assert_all_identical(got, run(CASE, "recurrent"))


@pytest.mark.bits
def test_backward_alone_may_be_mapped_over_more_heads_than_forward_had():
    """`vmap` folds what it maps into the heads, and forward has kept what it keeps of few."""
    case = replace(CASE, final=False)
    x, flags = case.inputs(), case.flags()
    dos = torch.randn(3, *case.cotangents()[0].shape, dtype=case.dtype)

    def gradients(heads):
        with training_walks(BACKEND, heads) as walks:
            _, pull = vjp(
                lambda v: overload("kda", "chunk")(*(x | {"v": v}).values(), **flags)[0], x["v"]
            )
            (dv,) = vmap(pull)(dos)
        return walks, {"dv": dv}

    (_, want), (several, got), (all_of_them, again) = map(gradients, (99, 2 * case.HV, 1))
    assert (several.trained, several.walked) == (0, 0)
    assert (all_of_them.trained, all_of_them.walked) == (1, 1)
    assert_all_identical(got, want)
    assert_all_identical(again, want)


@pytest.mark.parametrize("keep", (False, True))
def test_a_compiled_training_step_walks(walks, keep):
    case = replace(CASE, disable_recompute=keep)

    def step(*args):
        o, final = overload("kda", "chunk")(*args, **case.flags())
        return o.square().sum() + final.square().sum()

    def gradients(step):
        x = [t if t is None else t.requires_grad_() for t in case.inputs().values()]
        step(*x).backward()
        return {str(i): t.grad for i, t in enumerate(x) if t is not None}

    want = gradients(step)
    got = gradients(torch.compile(step, backend="aot_eager", fullgraph=True))
    assert (walks.trained, walks.walked) == (2, 2)
    assert_all_identical(got, want)


def test_a_checkpointed_step_walks_forward_again(walks):
    x = CASE.inputs()
    x["v"].requires_grad_()
    o, _ = checkpoint(overload("kda", "chunk"), *x.values(), **CASE.flags(), use_reentrant=False)
    o.sum().backward()
    assert (walks.trained, walks.walked) == (2, 1)
