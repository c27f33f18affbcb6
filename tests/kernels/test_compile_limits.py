"""The limits of docs/compile.md, "When kernels compile", are those of the functions that decide."""

import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from kda_ops.backends.triton import tuning
from kda_ops.backends.triton.stages import gradient, reverse_walk
from kda_ops.problem import Problem
from kda_ops.stages import GRADIENTS

TEXT = (Path(__file__).parents[2] / "docs" / "compile.md").read_text("utf-8")
SECTION = TEXT.split("### When kernels compile")[1].split("\n## ")[0]
ROWS = [line.strip("| ").split(" | ") for line in SECTION.splitlines() if line.startswith("| ")]
LIMITS = [limit for limit, _ in ROWS if limit != "limit"]
LONG = 10**5  # tokens
needs_gluon = pytest.mark.skipif(reverse_walk.KERNEL is None, reason="needs Gluon")


def numbers(text):
    """Return the numbers of a text, without those inside words such as bf16."""
    found = re.findall(r"(?<!\w)(?:\d{1,3}(?:,\d{3})+|\d+)", text)
    return [int(x.replace(",", "")) for x in found]


def row(words):
    """Return the numbers of the one limit that has these words."""
    (limit,) = (x for x in LIMITS if words in x)
    return numbers(limit)


PROCESSORS = int(re.search(r"a GPU of (\d+)\s+multiprocessors", SECTION)[1])
pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("card")]


@pytest.fixture
def card(force):
    force(processors=PROCESSORS)


def call(rank, T, HV, N=1, packed=False):
    """Return a call of 16 bits with K = V = 128 and a bounded decay, of N rows or sequences."""
    B = 1 if packed else N
    x = torch.empty(B, T, HV, 128, dtype=torch.bfloat16, device="meta")
    beta, offsets = x[..., 0], torch.empty(N + 1, dtype=torch.int32, device="meta")
    return Problem.parse(
        rank, x, x, x, x if rank else beta, beta, None, None, None, offsets if packed else None,
        safe_gate=True, safe_beta=True, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip


def last_before(decide, values):
    """Return the last value before the first change of a decision."""
    return next(a for a, b in pairwise(values) if decide(a) != decide(b))


def near(chunks):
    """Return lengths on both sides of every whole number of chunks."""
    return [64 * c + more for c in range(1, chunks) for more in (-1, 0, 1)]


def test_the_table_has_no_limit_that_is_not_checked():
    assert len(LIMITS) == 8


@pytest.mark.parametrize("rank", (0, 1))
def test_sequences_of_few_heads_are_scanned_in_runs(rank):
    def limit(HV):
        if not tuning.run_length(call(rank, LONG, HV)):
            return None
        return last_before(lambda T: tuning.run_length(call(rank, T, HV)), near(40))

    heads = {}
    for HV in range(1, 40):
        heads.setdefault(limit(HV), []).append(HV)
    short, long, _ = heads  # with more heads sequences stay whole
    found = [short, heads[short][-1], long, heads[long][0], heads[long][-1]]
    assert row("up to 11 value heads") == found

    for T in (short, 3 * short + 5):
        (a, b) = numbers(re.search(r"A packed call has (.*) runs", SECTION)[1])
        p = call(rank, T, heads[short][-1], N=3, packed=True)
        assert (a, b) == (short, long)
        assert tuning.pieces(p) == (T // a + 3 if T > a else 3)


@pytest.mark.parametrize("rank", (0, 1))
def test_the_last_chunks_of_a_long_sequence_are_prepared_during_its_scan(rank):
    def ahead(T, HV, **more):
        return tuning.ahead(call(rank, T, HV, **more)) is not None

    heads = [HV for HV in range(1, 200) if ahead(LONG, HV)]
    tokens = last_before(lambda T: ahead(T, 96), near(130))
    limit, most, kda, gdn = row("one sequence that is not packed")
    assert (tokens, heads[-1], heads[0]) == (limit, most, kda if rank else gdn)
    assert not ahead(LONG, 96, packed=True) and not ahead(LONG, 96, N=2)


@pytest.mark.parametrize("rank", (0, 1))
def test_scans_of_many_heads_take_twice_as_many_columns(rank):
    name = "scan_kda" if rank else "scan_gdn"

    def columns(p):
        return tuning.table(name, p).block_v

    (limit,) = row("with runs, their number times HV")
    assert last_before(lambda N: columns(call(rank, 64, 1, N)), range(1, 200)) == limit
    assert last_before(lambda HV: columns(call(rank, 64, HV)), range(1, 200)) == limit
    assert columns(call(rank, 64, 1)) < columns(call(rank, 64, 200)) == 128
    for T in range(2048, 12 * 1024, 512):  # 11 heads are scanned in runs
        p = call(rank, T, 11)
        assert (columns(p) == 128) == (tuning.pieces(p) * 11 > limit)


@needs_gluon
def test_walks_make_the_gradients_of_kda():
    limit, least = row("KDA with backward")
    pairs = [(N, HV) for HV in range(1, 70) for N in (1, 2, 3)]
    assert min(HV for HV in range(1, 70) if tuning.walks(call(1, 256, HV))) == least
    for N, HV in pairs:
        walks = tuning.walks_back(call(1, 256, HV, N), frozenset(GRADIENTS))
        assert walks == (HV >= least and N * HV > limit), (N, HV)


@needs_gluon
def test_the_walk_forward_is_one_kernel_or_two():
    three, two, tokens, least = row("tokens per sequence")
    assert least == row("KDA with backward")[1]
    for HV in range(1, 70):
        want = 3 if HV <= three else 2 if HV <= two else 0
        assert tuning.shares(call(1, 8192, HV)) == want, HV
    for N in (1, 2):
        found = last_before(lambda T, N=N: tuning.shares(call(1, T, 12, N)), range(1, 1000))
        assert found == tokens


@needs_gluon
def test_one_kernel_makes_the_gradients_of_gdn():
    limit, of_runs = row("GDN with backward")
    need = frozenset(GRADIENTS) - {"A_log", "dt_bias", "initial_state"}

    def walks(N, HV, group=1, T=256, packed=False):
        p = call(0, T, HV, N, packed)
        p.H = HV // group
        return reverse_walk.walks(p, p.new_output(), None, need)

    assert last_before(lambda HV: walks(1, HV), range(1, 200)) == limit
    assert last_before(lambda N: walks(N, 1), range(1, 200)) == limit
    assert walks(2, 64, 2) and not walks(2, 64, 3) and "up to two value heads" in SECTION
    for N, HV, packed in ((1, 4, False), (1, 16, False), (2, 8, True), (8, 4, True)):
        for T in range(256, 16000, 256):
            p = call(0, T, HV, N, packed)
            length = tuning.walk_run_length(p)
            runs = (T // (length * 64) if packed else -(-T // (length * 64))) if length else 0
            assert walks(N, HV, T=T, packed=packed) == (runs * HV > of_runs), (N, HV, T)


@pytest.mark.parametrize("HV, N, packed", ((24, 1, False), (8, 3, True), (33, 2, False)))
def test_the_walk_of_gdn_takes_longer_runs_where_programs_would_wait(HV, N, packed):
    few, tokens, room = row("GDN's backward")
    (text,) = (change for limit, change in ROWS if "GDN's backward" in limit)
    known = numbers(text)
    assert N * HV <= few and known == list(tuning.WALK_RUNS[: len(known)])
    assert tuning.walk_run_length(call(0, LONG, few))
    assert not tuning.walk_run_length(call(0, LONG, few + 1))
    count = N if packed else 1
    found = last_before(lambda T: tuning.walk_run_length(call(0, T, HV, N, packed)), near(100))
    assert found == tokens * count
    for T in range(2048, 20000, 512):
        p = call(0, T, HV, N, packed)
        length = tuning.walk_run_length(p)
        shorter = [n for n in known if n < length]
        assert T <= max(length * 64, count * tokens) or tuning.pieces(p, length) * HV <= room
        assert all(tuning.pieces(p, n) * HV > room for n in shorter)


def test_two_numbers_have_versions_of_their_kernel_for_multiples_of_16():
    """Triton specialises every number that a kernel does not exclude; interpreted, it has none."""
    assert row("any size") == [] and "divisible by 16 and not divisible" in SECTION
    for kernel, name in (
        (gradient.gradient_keys, "dbeta_slice"),
        (gradient.gather_heads, "tokens"),
    ):
        params = {p.name: p for p in getattr(kernel, "params", ())}
        assert not params or not params[name].do_not_specialize
