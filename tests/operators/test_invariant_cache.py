"""Tokens that a cache of the chunk form has served have the bits of one call on their sequence."""

import copy
import pickle

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import kda_ops
from kda_ops.nn import InvariantCache
from tests.support.calls import forward
from tests.support.cases import Case, cases
from tests.support.closeness import assert_identical
from tests.support.served import new_cache, serve, served
from tests.support.target import TARGET

WIDE = st.sampled_from((8, 24, 33, 40))  # widths of one: docs/numerics.md, "Bits on a CPU"
LENGTHS = st.sampled_from((0, 1, 37, 64, 65, 129, 200))
FIXED = dict(V=WIDE, state=False, final=False, disable_recompute=False)
CASE = Case(lengths=(200, 64, 3), state=False, final=False, gate="softplus", l2norm=True)


@st.composite
def calls(draw):
    """Draw sequences, and how they are served."""
    lengths = draw(st.lists(LENGTHS, min_size=1, max_size=2 if TARGET.slow else 3))
    case = draw(cases(lengths=tuple(lengths), tail=0, **FIXED))
    drafts = draw(st.sampled_from((0, 1, 4, 70)))
    return case, drafts, draw(served(case, drafts, draw(st.integers(1, 3 if TARGET.slow else 6))))


@pytest.mark.bits
@given(call=calls(), null=st.sampled_from((-1, 0)))
@example(call=(CASE, 4, [[(1, 63, 4), (0, 60, 4), (None, 2, 0)], [(0, 4, 4)], [(0, 1, 0)],
         [(2, 3, 0), (0, 135, 1), (1, 1, 4)]]), null=0)  # fmt: skip
def test_any_order_of_prompts_tokens_and_drafts_gives_the_bits_of_one_call(call, null):
    case, drafts, steps = call
    want = forward(case, invariant=True)["o"]
    assert_identical(serve(case, steps, drafts, null), want, "o")


@pytest.mark.bits
@pytest.mark.quick
def test_rejected_drafts_that_count_change_bits(variant):
    """So the test above can fail."""
    case = Case(variant, T=70, state=False, final=False)
    want, got = forward(case, invariant=True)["o"], None
    x = case.inputs(TARGET.device)
    cache = InvariantCache(torch.zeros(1, 2, 16, 24, device=TARGET.device), *tokens(x), drafts=1)
    for a, b in ((0, 60), (59, 70)):
        got = step(cache, case, x, a, b)
    assert not torch.equal(got, want[:, 59:])


def tokens(x, a=None, b=None):
    return [None if x[n] is None else x[n][:, a:b] for n in ("q", "k", "v", "g", "beta")]


def step(cache, case, x, a, b, run=None, **words):
    """Append tokens a to b of every sequence of a dense call."""
    with torch.no_grad():
        return (run or cache.step)(
            getattr(kda_ops, f"chunk_{case.variant}_"),
            *tokens(x, a, b),
            A_log=x["A_log"],
            dt_bias=x["dt_bias"],
            **words,
            **case.flags("chunk_"),
        )


DENSE = Case(B=3, T=140, state=False, final=False, gate="bounded", beta="sigmoid")


def prefilled(case, drafts=0, a=70):
    """Return the inputs of a case, and a cache that has seen `a` tokens of each sequence."""
    x, cache = case.inputs(TARGET.device), new_cache(case, case.B, drafts)
    cache.reset()
    step(cache, case, x, 0, a)
    return x, cache


@pytest.mark.bits
@pytest.mark.quick
@pytest.mark.parametrize("drafts", (0, 10))
def test_methods_move_sequences_as_those_of_a_cache(variant, drafts):
    case = Case(**vars(DENSE) | dict(variant=variant))
    want, (x, cache) = forward(case, invariant=True)["o"], prefilled(case, drafts)

    def rest(cache, order):
        x_n = {n: t[order] if n in ("q", "k", "v", "g", "beta") else t for n, t in x.items()}
        assert_identical(step(cache, case, x_n, 70, 140), want[order, 70:], "o")

    other = copy.deepcopy(cache)
    rest(other, [0, 1, 2])
    assert cache.seen.tolist() == [70] * 3 and cache.start.tolist() == [0 if drafts else 64] * 3
    rest(pickle.loads(pickle.dumps(cache)), [0, 1, 2])
    loaded = new_cache(case, 3, drafts)
    loaded.load_state_dict(cache.state_dict())
    rest(loaded, [0, 1, 2])
    addresses = [buffer.data_ptr() for buffer in cache.buffers()]
    cache.reorder_cache(torch.tensor([2, 0, 0], device=TARGET.device))
    rest(copy.deepcopy(cache), [2, 0, 0])
    cache.reset(1)
    assert addresses == [buffer.data_ptr() for buffer in cache.buffers()]
    assert_identical(
        step(cache, case, x, 0, 65)[1], want[1, :65], "o of a sequence that begins anew"
    )
    other = prefilled(case, drafts)[1]
    other.batch_select_indices([1])
    other.batch_repeat_interleave(2)
    rest(other, [1, 1])


@pytest.mark.quick
def test_the_size_of_a_slot_is_that_of_the_docs():
    case = Case(dtype=torch.bfloat16, H=1, HV=1, K=128, V=128, narrow=True)
    for variant, most in (("kda", 129), ("gdn", 113)):
        cache = new_cache(Case(**vars(case) | dict(variant=variant)), 2, 0)
        size = sum(x.nbytes for x in cache.buffers()) / 2 / 1024
        assert most - 1 < size < most + 0.5


@pytest.mark.bits
@pytest.mark.quick
def test_steps_compile_to_one_graph(variant):
    torch._dynamo.reset()
    case = Case(**vars(DENSE) | dict(variant=variant))
    want, (x, cache) = forward(case, invariant=True)["o"], prefilled(case, 2, 60)
    run = torch.compile(cache.step, fullgraph=True, backend="aot_eager")
    crop = torch.compile(cache.crop, fullgraph=True, backend="aot_eager")
    for a in (60, 61, 62, 63, 64, 65):
        got = step(cache, case, x, a, a + 3, run)
        assert_identical(got[:, :1], want[:, a : a + 1], "o")
        with torch.no_grad():
            crop(torch.tensor([2, 2, 2], device=TARGET.device))


@pytest.mark.quick
@pytest.mark.parametrize(
    "words, error, message",
    (
        (dict(q="bf16"), TypeError, "q must be torch.float32, got torch.bfloat16, which the cache"),
        (dict(k="half"), ValueError, r"k must have shape \[B, T, ...\] = \[3, 2, 1, 16\], got"),
        (dict(g=None), TypeError, "g must be a tensor, as when the cache was made, got None"),
        (dict(out=1), TypeError, "out must not be given: step sets it, or returns o itself"),
        (dict(invariant=True), TypeError, "invariant must not be given"),
        (dict(state_indices=[0, 1]), ValueError, r"state_indices must have shape \[N\] = \[3\]"),
        (dict(state_indices=[0, 1, 1]), ValueError, "state_indices must name distinct slots"),
        (dict(state_indices=[0, 1, 3]), ValueError, "state_indices must be below the number of"),
        (dict(has_initial_state=[1, 1, 1]), TypeError, "has_initial_state must be bool"),
        (dict(cu_seqlens=[0, 2]), ValueError, "cu_seqlens packs its sequences into one row"),
    ),
)
def test_a_wrong_step_is_refused_and_changes_nothing(words, error, message):
    x, cache = prefilled(DENSE)
    before, given = copy.deepcopy(cache.state_dict()), dict(words)
    x["q"] = x["q"].bfloat16() if given.pop("q", None) else x["q"]
    x["k"] = x["k"][..., :8] if given.pop("k", None) else x["k"]
    x["g"] = given.pop("g", x["g"])
    for name, value in given.items():
        if isinstance(value, list):
            given[name] = torch.tensor(value, device=TARGET.device)
    with pytest.raises(error, match=f"^{message}"):
        step(cache, DENSE, x, 70, 72, **given)
    for name, buffer in cache.state_dict().items():
        assert torch.equal(buffer, before[name])


@pytest.mark.quick
def test_a_wrong_cache_is_refused():
    x = DENSE.inputs(TARGET.device)
    pool = torch.zeros(3, 2, 16, 24, dtype=torch.bfloat16, device=TARGET.device)
    cache = InvariantCache(pool, *tokens(x), drafts=2)
    with pytest.raises(TypeError, match="^state must be float32 with invariant=True, got torch.bf"):
        step(cache, DENSE, x, 0, 2)
    with pytest.raises(ValueError, match="^drafts must be at least 0, got -1"):
        InvariantCache(pool.float(), *tokens(x), drafts=-1)
    x["q"].requires_grad_()
    cache = InvariantCache(pool.float(), *tokens(x))
    with pytest.raises(RuntimeError, match="^kda::chunk_ writes its state in place and"):
        cache.step(kda_ops.chunk_kda_, *tokens(x, 0, 2), **DENSE.flags("chunk_"))
    assert not cache.seen.any()


@pytest.mark.quick
def test_no_more_tokens_are_taken_back_than_a_state_allows():
    _, cache = prefilled(DENSE, drafts=2, a=66)
    cache.crop(torch.tensor([0, 1, 2], device=TARGET.device))
    assert cache.seen.tolist() == [66, 65, 64] and cache.start.tolist() == [64] * 3
    with pytest.raises(ValueError, match="^tokens_to_remove must lie between 0 and 0 for sequence"):
        cache.crop(torch.tensor([1, 1, 0], device=TARGET.device).flip(0))
    with pytest.raises(ValueError, match="^tokens_to_remove must lie .* got -1"):
        cache.crop(torch.tensor([0, 0, -1], device=TARGET.device))
    with pytest.raises(ValueError, match=r"^tokens_to_remove must have shape \[N\] = \[3\]"):
        cache.crop(torch.tensor([1, 1], device=TARGET.device))
    with pytest.raises(ValueError, match="^state_indices must be given for 2 sequences on a cach"):
        cache.step(kda_ops.chunk_kda_, *(x[:2] for x in tokens(DENSE.inputs(TARGET.device))))
