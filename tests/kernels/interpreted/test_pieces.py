"""Bits of pieces and of invariant calls under the interpreter, with any number of processors."""

import pytest
import torch

import kda_ops
from kda_ops.backends.triton.stages.gradient import sum_parts
from kda_ops.backends.triton.tuning import force
from kda_ops.problem import Problem
from tests.operators.test_sequences import test_later_tokens_change_no_earlier_bit  # noqa: F401, on the kernels too
from tests.support.calls import as_leaves, forward, run
from tests.support.cases import Case, replace
from tests.support.closeness import assert_all_identical, assert_identical
from tests.support.pieces import head_alone, prefill, results_of, run_in_pieces
from tests.support.served import serve

pytestmark = pytest.mark.bits
CPU = torch.device("cpu")
CASE = Case(H=1, HV=2, K=16, V=24, lengths=(150, 0, 65), beta="sigmoid", l2norm=True)
GATED = replace(CASE, gate="softplus", lengths=(70, 1))
CUTS = [[1, 2], [0, 0], [1, 1]]


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16))
def test_pieces_have_the_bits_of_one_call_where_sequences_stay_whole(variant, dtype):
    case = replace(CASE, variant=variant, dtype=dtype)
    with force(processors=1):
        assert kda_ops.cut_length(f"chunk_{variant}", 4, 16, 24, dtype, CPU) == 64
        assert_all_identical(run_in_pieces(case, CUTS, need=None), forward(case))
        alone = replace(case, state=False, final=False)
        assert_identical(prefill(alone, CUTS).pool, prefill(alone, None).pool)


def test_no_cut_keeps_the_bits_of_runs(variant):
    case = replace(CASE, variant=variant, lengths=(200,), H=1, HV=1)
    with force(processors=1, run=1):
        assert kda_ops.cut_length(f"chunk_{variant}_", 1, 16, 24, torch.float32, CPU) is None
        got, want = run_in_pieces(case, [[2]], need=None), forward(case)
    assert not torch.equal(got["o"], want["o"])
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    "HV, K, V, count, L",
    (
        *((22, 128, 128, 132, None), (23, 128, 128, 132, 64), (12, 128, 256, 132, 64)),
        *((1, 129, 128, 132, 64), (4, 128, 128, 23, 64), (4, 128, 128, 24, None)),
    ),
)
def test_what_decides_on_runs_decides_where_to_cut(HV, K, V, count, L):
    with force(processors=count):
        assert kda_ops.cut_length("chunk_kda", HV, K, V, torch.bfloat16, CPU) == L


def test_the_number_of_multiprocessors_changes_no_bit_of_an_invariant_call(variant):
    """It chooses runs, and programs that are wide."""
    case = replace(CASE, variant=variant, lengths=(0, 130, 1), HV=1, K=128, V=128)
    found, runs = [], []
    for count, length in ((1, None), (10**6, 1)):
        with force(processors=count, run=length):
            found.append(run(case, invariant=True))
            runs.append(forward(case)["o"])
    assert_all_identical(*found)
    assert not torch.equal(*runs)


@pytest.mark.parametrize("variant, group", (("kda", 2), ("gdn", 1)))
def test_a_head_of_a_sequence_alone_and_in_pieces_has_its_bits(variant, group):
    case = replace(CASE, variant=variant, H=3, HV=3 * group, strides="fused", transposed=True)
    with force(processors=1):
        whole = results_of(case, run(case, invariant=True), 0, 2)
    own, inputs, cotangents = head_alone(case, 0, 2)
    with force(processors=10**6, run=1):
        got = run_in_pieces(own, [[1]], inputs, cotangents, invariant=True)
        assert_all_identical(got, whole)
        some = run(own, inputs=inputs, cotangents=cotangents, need=("k",), invariant=True)
        assert_identical(some["dk"], whole["dk"])


@pytest.mark.parametrize("variant, dtype", (("kda", torch.float16), ("gdn", torch.float32)))
def test_prompts_tokens_and_drafts_of_a_cache_have_the_bits_of_one_call(variant, dtype):
    """Served on one number of multiprocessors, computed on another."""
    case = replace(GATED, variant=variant, dtype=dtype, lengths=(131, 70), state=False, final=False)
    with force(processors=1):
        want = forward(case, invariant=True)["o"]
    calls = [[(1, 63, 2), (0, 65, 0), (None, 2, 0)], [(1, 1, 2)], [(0, 66, 0), (1, 6, 1)]]
    with force(processors=10**6, run=1):
        assert_identical(serve(case, calls, 2, null=0), want, "o")


def test_an_invariant_call_without_the_gradient_of_an_output_takes_zeros(variant):
    case = replace(GATED, variant=variant)
    op = getattr(torch.ops, variant).chunk.default
    found = []
    for zeros in (False, True):
        inputs = case.inputs()
        leaves = as_leaves(inputs)
        o, state = op(*(inputs | leaves).values(), **case.flags(), invariant=True)
        outs = [state, o] if zeros else [state]
        given = [case.cotangents()[1], torch.zeros_like(o)][: len(outs)]
        grads = torch.autograd.grad(outs, [*leaves.values()], given)
        found.append(dict(zip(leaves, grads)))
    assert_all_identical(*found)


@pytest.mark.parametrize("count", (0, 1, 64, 65, 4097))
def test_shares_of_chunks_are_added_up_in_an_order_of_their_number_alone(count):
    """One after another in groups of 64, then the groups likewise."""
    parts, like = torch.randn(count, 3, 50), torch.empty(150, dtype=torch.float16)
    p = Problem.parse(1, *Case().inputs().values(), **Case().flags(), invariant=True)
    want = parts.flatten(1)
    while len(want) > 1:
        groups = [torch.zeros(150) for _ in range(0, len(want), 64)]
        for i, row in enumerate(want):
            groups[i // 64] += row
        want = torch.stack(groups)
    got = sum_parts(p, "dt_bias", parts, like)
    assert_identical(got, want.sum(0).half())
    few = sum_parts(p, "dt_bias", parts[:, 1:2].contiguous(), like[:50])
    assert_identical(few, got[50:100])
