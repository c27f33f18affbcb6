"""Sequences cut into runs on a GPU: the definition, the laws that hold bit by bit, and CUDA graphs;
tests/kernels/test_split.py has the rest.
"""

from itertools import product

import pytest
import torch

from kda_ops import dispatch
from kda_ops.backends.triton.stages.runs import Runs
from kda_ops.problem import Problem
from tests.gpu.test_forward import (
    CUDA,
    DTYPES,
    LAYER,
    assert_a_graph_replays,
    assert_forward,
    forward,
)
from tests.support.cases import alone, replace, take
from tests.support.closeness import assert_identical
from tests.support.stage import Stages, assert_stage

TRITON = dispatch.load("triton")
LONG = replace(LAYER, lengths=(0, 700, 65, 1, 330), tail=130)
BF16, VARIANTS = torch.bfloat16, ("kda", "gdn")


@pytest.fixture
def two_chunks_per_run(force, poisoned_scratch):
    """Cut sequences into runs of two chunks."""
    force(run=2)


@pytest.mark.parametrize(
    "gate, dtype",
    (*product(("weak",), DTYPES), ("strong", BF16), ("reset", BF16), ("bounded", BF16)),
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_forward_meets_its_budget_twice_with_the_same_bits(
    variant, gate, dtype, two_chunks_per_run
):
    assert_forward(
        replace(LONG, variant=variant, gate=gate, dtype=dtype, transposed=gate == "reset")
    )


@pytest.mark.parametrize("K, V", ((16, 32), (60, 100), (64, 64), (128, 24)))
@pytest.mark.parametrize("variant", VARIANTS)
def test_any_width(variant, K, V, two_chunks_per_run):
    assert_forward(replace(LONG, variant=variant, K=K, V=V))


@pytest.mark.parametrize(
    "gate, dtype", (*product(("weak",), DTYPES), ("strong", BF16), ("softplus", BF16))
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_reverse_scan_meets_its_budget_twice_with_the_same_bits(
    variant, gate, dtype, two_chunks_per_run
):
    stages = Stages.build(replace(LONG, variant=variant, gate=gate, dtype=dtype, H=2))
    assert_stage("reverse_scan", stages, TRITON, CUDA)
    first = stages.run("reverse_scan", TRITON, CUDA)
    second = stages.run("reverse_scan", TRITON, CUDA)
    assert_identical(first["dinitial_state"], second["dinitial_state"])


@pytest.mark.parametrize("gate", ("bounded", "softplus"))
@pytest.mark.parametrize("variant", VARIANTS)
def test_company_and_later_tokens_change_no_bit(variant, gate):
    """By the device's own rule: 5000 tokens among others, alone in a batch, and every shorter
    length.
    """
    case = replace(LAYER, variant=variant, gate=gate, lengths=(70, 5000, 2100), final=False)
    inputs = case.inputs(CUDA)
    p = Problem.parse(case.rank, *inputs.values(), **case.flags())
    assert Runs(p).length * 64 < 2100
    want = forward(case, inputs)["o"][:, 70:5070]
    for seen in (5000, 4096, 3001, 2000, 64):
        mine = take(alone(case, inputs, 1), 0, seen)
        got = forward(replace(case, lengths=None, T=seen), mine)["o"]
        assert_identical(got, want[:, :seen], f"first {seen} tokens")
        twice = {
            n: x if x is None or n in ("A_log", "dt_bias") else torch.cat([x, x])
            for n, x in mine.items()
        }
        assert_identical(
            forward(replace(case, lengths=None, T=seen, B=2), twice)["o"][1:],
            want[:, :seen],
            f"first {seen} tokens in a batch",
        )


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_graph_replays_with_other_sequences(variant, two_chunks_per_run):
    case = replace(LAYER, variant=variant, lengths=(64, 500, 436), tail=10, seed=2)
    lengths = ((1, 150, 849), (1000, 0, 0), (0, 10, 900))
    assert_a_graph_replays(
        case, *(replace(case, lengths=x, tail=1010 - sum(x), seed=10) for x in lengths)
    )


def test_heads_that_fill_the_device_are_not_cut():
    for HV, cut in ((1, True), (96, False), (1024, False)):
        p = Problem.parse(
            1, *replace(LAYER, H=1, HV=HV, T=3000).inputs(CUDA).values(), **LAYER.flags()
        )
        assert bool(Runs(p).length) == cut
