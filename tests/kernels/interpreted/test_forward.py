"""The chunk kernels under the Triton interpreter: any legal forward call against the definition in
float64, and the laws that hold bit by bit.
"""

import sys
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings

from kda_ops import dispatch
from kda_ops.backends import activations
from kda_ops.backends.triton import tuning
from kda_ops.backends.triton.device.decay import ANCHOR_SHARE, check_anchor
from kda_ops.backends.triton.device.tile import UnfinishedTile
from kda_ops.gates import SAFE_BOUND, gate_of
from kda_ops.problem import Problem
from tests.operators import test_pools
from tests.operators.test_limits import test_any_size_may_be_zero  # noqa: F401, on the kernels too
from tests.support.calls import forward, run
from tests.support.cases import GATES, KEYS, PACKED, STRIDES, Case, cases, followed, replace, take
from tests.support.closeness import (
    assert_all_close,
    assert_all_identical,
    assert_identical,
    assert_meets_budget,
    oracle,
    twin,
)
from tests.support.plans import forget_plans
from tests.support.pools import Pool
from tests.support.target import TARGET

TRITON = dispatch.load("triton")
SMALL = Case(H=1, HV=1, K=16, V=16, T=65)
HALF = replace(SMALL, dtype=torch.float16, beta="sigmoid", l2norm=True)


def assert_forward(case):
    got = forward(case)
    assert_all_close(got, oracle(case, ()), lambda draw: twin(case, "chunk", (), draw))
    return got


@settings(max_examples=8, deadline=None, derandomize=True, database=None)
@given(case=cases())
def test_any_call_meets_the_definition(case):
    assert_forward(case)


@pytest.mark.parametrize("dtype", TARGET.dtypes)
@pytest.mark.parametrize("gate", GATES)
def test_every_gate(variant, gate, dtype):
    assert_forward(
        replace(SMALL, variant=variant, gate=gate, dtype=dtype, beta="sigmoid", l2norm=True)
    )


@pytest.mark.parametrize(
    "rows, gate",
    (
        (32, "bounded"),
        (32, "strong"),
        (8, "softplus"),
        (8, "strong"),
        (8, "zero"),
        (8, "reset"),
        (8, "forget"),
        (8, "blocks"),
    ),
)
@pytest.mark.parametrize("K", (40, 130))
def test_rows_that_share_an_anchor_change_nothing_beyond_rounding(K, rows, gate, force):
    """Take the path of bf16 with operands in fp32, where rounding does not hide a lost pair."""
    case = replace(
        SMALL, gate=gate, safe_gate=gate == "strong", beta="sigmoid", l2norm=True, K=K, T=100
    )
    full = forward(case)
    force(anchored_rows=rows)
    forget_plans()
    # Half of the 32 rows of a prefix sum lie at FLOOR: each of its decays is rounded by that much.
    limit = 16 * -tuning.FLOOR * 2**-24 if gate == "blocks" else 1e-5
    for name, x in forward(case).items():
        largest = full[name].abs().max().item()
        torch.testing.assert_close(x, full[name], rtol=0, atol=limit * largest)


@pytest.mark.bits
@pytest.mark.parametrize("rows", (1, 8, 32))
def test_a_row_of_a_chunk_has_the_same_bits_whatever_comes_later(rows, force):
    case = replace(
        SMALL, gate="bounded" if rows == 32 else "weak", beta="sigmoid", l2norm=True, T=64
    )
    force(anchored_rows=rows)
    tiles = []
    for later in (0, 5, 6, 7, 47):
        given = case.inputs()
        given["g"][:, later:] *= 0.5 if later else 1.0
        tiles.append(
            (later, TRITON.prepare(Problem.parse(case.rank, *given.values(), **case.flags())))
        )
    (_, whole), *others = tiles
    for later, tile in others:
        for name in ("P", "A", "w", "qg"):
            assert_identical(
                getattr(tile, name)[:, :, :later],
                getattr(whole, name)[:, :, :later],
                f"{name} before row {later}",
            )


@pytest.mark.parametrize("rows", (1, 8, 32))
def test_long_keys_with_a_small_beta_leave_numbers(rows, force):
    """Whatever has no norm inside: |k| is 200 here, and beta what the delta rule is stable with."""
    case = replace(SMALL, gate="bounded" if rows == 32 else "zero", keys="repeated", beta="given")
    force(anchored_rows=rows)
    given = case.inputs()
    given["k"] *= 200 / given["k"].norm(dim=-1, keepdim=True)
    given["beta"] *= 200**-2
    tile = TRITON.prepare(Problem.parse(case.rank, *given.values(), **case.flags()))
    assert all(x.isfinite().all() for x in (tile.A, tile.P, tile.w))


@pytest.mark.bits
@pytest.mark.parametrize("rows, dtype", ((1, torch.float16), (8, torch.bfloat16)))
def test_the_diagonal_of_the_scores_is_not_rounded_as_an_operand(rows, dtype):
    """Where decays are given; under a strong one o is little else."""
    case = replace(SMALL, gate="blocks", dtype=dtype, T=64)
    given = case.inputs()
    for name in "qk":
        gen = torch.Generator().manual_seed(ord(name))
        given[name] = torch.randint(-3, 4, given[name].shape, generator=gen).to(dtype)
    p = Problem.parse(case.rank, *given.values(), **case.flags() | dict(scale=1.0))
    assert tuning.anchored_rows(p) == rows
    want = (given["q"].float() * given["k"].float()).sum(-1).to(dtype)[0].mT  # small integers
    assert_identical(TRITON.prepare(p).P[0].diagonal(dim1=-2, dim2=-1), want, "diagonal")


@pytest.mark.parametrize(
    "floor, share, broken",
    (
        (-20.0, 0.5, "columns of the block before"),  # 2^-173: flushed
        (-20.0, 0.92, "products with them"),
        (-19.15, 0.865, "the anchor"),
    ),
)
def test_an_anchor_outside_the_limits_of_fp32_is_refused(floor, share, broken):
    with pytest.raises(ValueError, match=f"floor {floor} and share {share}: .*{broken}"):
        check_anchor(floor, share)
    check_anchor(tuning.FLOOR, ANCHOR_SHARE.value)
    check_anchor(-17.5, 0.8)


@pytest.mark.parametrize(
    "beta, never, hardly",
    (("given", 0.0, (1e-39, -1e-42, 1.17e-38)), ("sigmoid", -torch.inf, (-87.5, -88.0, -100.0))),
)
def test_a_beta_that_is_no_normal_number_is_as_good_as_zero(beta, never, hardly):
    """A kernel that took its reciprocal, which is infinite, would leave no number in the whole
    head.
    """
    case = replace(SMALL, gate="weak", beta=beta, l2norm=True)
    want, got = case.inputs(), case.inputs()
    for row, x in enumerate(hardly):
        want["beta"][0, 5 + 20 * row, 0], got["beta"][0, 5 + 20 * row, 0] = never, x
    found = run(case, inputs=got)
    for name, x in run(case, inputs=want).items():
        assert x.isfinite().all()
        # 8 10^7 times the greatest of these betas
        torch.testing.assert_close(found[name], x, rtol=0.0, atol=1e-30, msg=name)


@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("beta", ("none", "neg_eigval"))
def test_every_inverse_survives_repeated_keys(beta, keys):
    assert_forward(replace(SMALL, gate="zero", keys=keys, beta=beta, l2norm=True))
    assert_forward(replace(HALF, variant="gdn", keys=keys))


def test_packed_sequences_and_the_tail(variant):
    assert_forward(replace(SMALL, variant=variant, lengths=PACKED, tail=70, HV=2, transposed=True))


@pytest.mark.parametrize("strides", STRIDES)
def test_any_strides(strides):
    assert_forward(replace(SMALL, strides=strides, H=2, HV=4, K=20, V=33, gate="softplus"))
    assert_forward(
        replace(
            SMALL, strides=strides, H=2, HV=4, K=20, V=33, gate="bounded", variant="gdn", B=2, T=37
        )
    )


@pytest.mark.parametrize("K, V", ((1, 1), (5, 70), (130, 16), (256, 8)))
def test_any_width(K, V):
    for variant in ("kda", "gdn"):
        assert_forward(replace(SMALL, variant=variant, K=K, V=V, l2norm=True, gate="bounded", T=37))


@pytest.mark.bits
def test_later_tokens_and_neighbours_do_not_change_a_bit(variant):
    case = replace(HALF, variant=variant, gate="softplus", lengths=(100, 30), final=False)
    inputs = case.inputs()
    other = followed(inputs, 80, replace(case, seed=case.seed + 2).inputs())
    assert_identical(
        forward(case, inputs=inputs)["o"][:, :80], forward(case, inputs=other)["o"][:, :80]
    )


@pytest.mark.bits
@pytest.mark.parametrize(
    "case",
    [
        HALF,
        Case(dtype=torch.float16, gate="softplus", lengths=(100, 0, 30), K=70),
        replace(SMALL, dtype=torch.float16, gate="strong", beta="none"),
        replace(HALF, variant="gdn"),
    ],
    ids=str,
)
def test_what_is_kept_as_AP_gives_the_same_bits(case):
    p = Problem.parse(case.rank, *case.inputs().values(), **case.flags())
    made, with_AP = TRITON.prepare(p, norms=True), case.rank == 1
    first = TRITON.prepare(p, with_AP=with_AP)
    again = TRITON.prepare(p, first.AP if with_AP else first.A, with_AP=with_AP, norms=True)
    for name, x in vars(made).items():
        if x is not None:
            written = (
                slice(1) if name == "factors" and case.rank and not case.l2norm else slice(None)
            )
            assert_identical(getattr(again, name)[:, :, written], x[:, :, written], name)


@pytest.mark.bits
def test_rows_that_share_an_anchor_are_kept_likewise():
    for rows, gate in ((32, "bounded"), (8, "blocks")):
        case = replace(SMALL, gate=gate, dtype=torch.bfloat16, beta="sigmoid", l2norm=True)
        p = Problem.parse(case.rank, *case.inputs().values(), **case.flags())
        assert tuning.anchored_rows(p) == rows
        made = TRITON.prepare(p)
        again = TRITON.prepare(p, TRITON.prepare(p, with_AP=True).AP, with_AP=True)
        for name in ("A", "P", "w", "qg", "kg", "gamma"):
            assert_identical(getattr(again, name), getattr(made, name), name)


@pytest.mark.once
@pytest.mark.bits
@pytest.mark.parametrize(
    "case",
    (
        Case(T=130, state=False),
        Case(T=130, dtype=torch.float16, l2norm=True, state=False, H=1, HV=1),
        replace(HALF, T=129, K=16, V=24, disable_recompute=True, transposed=True),
    ),
    ids=str,
)
def test_chunks_prepared_beside_their_scan_change_no_bit(variant, case, monkeypatch, force):
    """Whether a scan finds them in time or another one goes on where it stopped; and only where one
    sequence starts from a state of its own, and is long enough.
    """
    case = replace(case, variant=variant, B=1, beta="sigmoid")
    # what backward reads was made beside the scan too: A and P, and with disable_recompute all
    call = forward if case.dtype is torch.float32 else run
    whole = call(case)
    for ahead in (1, (case.T - 1) // 64):
        force(ahead=ahead)
        assert_all_identical(whole, call(case))
        for other in (
            case,
            replace(case, T=64 * ahead),
            replace(case, B=2),
            replace(case, lengths=(0, 200), tail=0),
        ):
            p = Problem.parse(other.rank, *other.inputs().values(), **other.flags())
            assert tuning.ahead(p) == (ahead if other is case else None)
        tile = TRITON.prepare(
            Problem.parse(case.rank, *case.inputs().values(), **case.flags()), overlap=True
        )
        assert tile.until == ahead and not tile.ready.any()

        @dataclass
        class Prompt(UnfinishedTile):
            def __post_init__(self):
                self.rest()
                self.rest = lambda: None

        with monkeypatch.context() as patch:
            patch.setattr(
                sys.modules["kda_ops.backends.triton.stages.prepare"], "UnfinishedTile", Prompt
            )
            forget_plans()
            assert_all_identical(whole, call(case))
        forget_plans()


@pytest.mark.once
@pytest.mark.parametrize("fresh", ((), (True,)))
def test_a_pool_keeps_the_state_that_a_scan_has_to_start_from_again(variant, fresh, force):
    """Where a scan that follows `prepare` has missed a tile, nothing is written to the slot that it
    also began with.
    """
    force(ahead=1)
    case = Case(variant=variant, B=1, T=150, state=False, final=False, dtype=torch.float32)
    test_pools.test_a_call_on_a_pool_is_the_functional_call_on_its_slots.hypothesis.inner_test(
        pool=Pool(case, "chunk_", False, (), fresh=fresh)
    )


def test_the_cuts_for_gpus_before_hopper_are_right(variant, force):
    case = replace(SMALL, variant=variant, dtype=torch.float16, K=64, V=70, T=130, HV=2)
    options = {
        n: tuning.table(n, Problem.parse(case.rank, *case.inputs().values(), **case.flags()))
        for n in ("scan_kda", "gradient_gdn")
    }
    force(architecture=8)
    now = {
        n: tuning.table(n, Problem.parse(case.rank, *case.inputs().values(), **case.flags()))
        for n in options
    }
    assert now != options
    assert_meets_budget(case)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16))
@pytest.mark.parametrize("lower_bound", (None, -5.0))
@pytest.mark.parametrize("rank", (0, 1))
def test_gate_alone(rank, lower_bound, dtype):
    """Of so many tokens that several programs share the sums of the parameters' gradients, which
    are rounded once.
    """
    gen, which = torch.Generator().manual_seed(rank), gate_of(True, lower_bound)
    shape = (2, 700, 2, 20) if rank else (2, 17000, 2)
    g, A_log, dt_bias = (
        x.to(dtype)
        for x in (
            4 * torch.randn(shape, generator=gen),
            torch.randn(2, generator=gen),
            torch.randn(shape[2:], generator=gen),
        )
    )
    g = g.transpose(1, 2).contiguous().transpose(1, 2)
    dy = torch.randn((*shape, 2), generator=gen)[..., 0]
    dt_bias = dt_bias.mT.contiguous().mT if rank else dt_bias
    wide = [x.double() for x in (g, A_log, dt_bias)]
    torch.testing.assert_close(
        TRITON.gate(g, A_log, dt_bias, which, rank).double(),
        activations.gate(*wide, which, rank),
        rtol=1e-5,
        atol=1e-5,
    )
    got = TRITON.gate_backward(dy, g, A_log, dt_bias, which, rank)
    want = activations.gate_backward(dy.double(), *wide, which, rank)
    for x, y in zip(got, want):
        assert x.dtype is dtype
        torch.testing.assert_close(
            x.double(),
            y,
            rtol=1e-4 if dtype is torch.float32 else 6e-4,
            atol=1e-6 * y.abs().max().item() + 1e-4,
        )


@pytest.mark.bits
def test_parameters_of_the_gate_need_not_be_contiguous():
    case = replace(SMALL, H=2, HV=2, gate="softplus", beta="sigmoid")
    inputs = case.inputs()
    apart = inputs | {
        "A_log": torch.stack((inputs["A_log"], inputs["A_log"] + 9), -1)[:, 0],
        "dt_bias": inputs["dt_bias"].mT.contiguous().mT,
    }
    assert not (apart["A_log"].is_contiguous() or apart["dt_bias"].is_contiguous())
    assert_all_identical(forward(case, inputs=apart), forward(case, inputs=inputs))
    few = replace(case, T=9)
    assert_all_identical(
        *(run(few, "recurrent", inputs=take(x, 0, few.T)) for x in (apart, inputs))
    )


def test_rows_too_far_apart_for_32_bits_are_copied():
    from kda_ops.backends.triton.device.tile import fit

    far, near = (
        torch.empty_strided((1, 64, 1, 8), (1, step, 8, 1), device="meta")
        for step in (2**31 // 63 + 1, 2**31 // 63 - 1)
    )
    assert fit(far).is_contiguous() and fit(near) is near and fit(None) is None
    far, near = (
        torch.empty_strided((1, 64, 4), (1, step, 1), device="meta")
        for step in (2**31 // 63 + 1, 2**31 // 63 - 1)
    )
    assert fit(far).is_contiguous() and fit(near) is near


@pytest.mark.bits
def test_a_promise_without_a_bound_promises_nothing(monkeypatch):
    """bf16 would let the halves of a chunk share an anchor if it trusted the promise, and these
    decays go far below what an anchor holds.
    """
    monkeypatch.setattr(
        tuning, "centred", lambda p: p.gate.bound is not None and p.gate.bound >= SAFE_BOUND
    )
    case = replace(SMALL, gate="softplus", beta="sigmoid", l2norm=True)
    inputs = case.inputs()
    inputs["g"] += 10.0
    inputs["A_log"] += 3.0
    assert_all_identical(forward(case, inputs=inputs, safe_gate=True), forward(case, inputs=inputs))
