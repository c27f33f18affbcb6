"""The Gluon kernels need each wait, barrier, fence and arrival that they have, or a table says why
not.

Each is taken out once. What notices that, notices it in every order of the partitions.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import ModuleType

import pytest

from kda_ops.backends.triton import tuning
from kda_ops.backends.triton.stages import reverse_walk, walk, walk_back
from tests.kernels import test_reverse_walk, test_walk
from tests.kernels.test_walk import FREE, GIVEN, RAW, SOFTPLUS
from tests.kernels.test_walk_training import defined, problem, trained
from tests.support import reverse_walk as gdn
from tests.support.calls import Results
from tests.support.cases import EDGES, Case
from tests.support.closeness import assert_all_identical
from tests.support.emulated import source_of, without_each
from tests.support.walk_back import trained_back
from tests.support.walk_training import kept_blocks

pytestmark = [pytest.mark.bits, pytest.mark.usefixtures("poisoned_scratch")]


def in_two_kernels(case: Case, **options) -> Results:
    with tuning.force(shares=2):
        return test_walk.walked(case, **options)


def kept(case: Case, **options) -> Results:
    return defined(trained(case, **options)[1], kept_blocks(problem(case)))


def keeping_states(case: Case, **options) -> Results:
    return kept(replace(case, disable_recompute=True), **options)


def lengths(case: Case, *some: int, **more) -> Case:
    """Return a call with several chunks, last rows that fill none, and tokens of no sequence."""
    return replace(case, **dict(lengths=some, tail=1, HV=1, H=1) | more)


FORWARD = {"given": lengths(GIVEN, 300, 5), "raw": lengths(RAW, 300, 5)}
UNBOUNDED = {"given": lengths(FREE, 300, 5), "raw": lengths(SOFTPLUS, 300, 5)}
BACKWARD = {
    "given": lengths(replace(GIVEN, beta=EDGES), 135, 5),  # given beta that are small
    "raw": lengths(RAW, 135, 5),
}
GDN = {
    "alone": lengths(test_reverse_walk.LAYER, 300, 5),
    "grouped": lengths(test_reverse_walk.LAYER, 300, 5, HV=2),
}

BEGINS = "`warp_specialize` begins with a barrier of all warps"
TELLS = "it waits for nothing, and only tells ptxas so"
TRAINING = "is in the training form alone"
STATES = "is in the form that keeps states alone"
TWO = "is in the form of two kernels alone"
BLOCKS = "is in the form without a bound alone"
IN_RAW = "is in the raw form alone"
SCAN_WAITS = "the scan has waited for q, k and g before `rows`"
NORM = "only a norm has it"
OVERWRITTEN = "q and k are overwritten and stored only where value heads do not share them"
OF_TRAINING = ("prepare: tma.store_wait(1)", "prepare: tma.store_wait(0)")
OF_STATES = ("keep_u: tma.store_wait(0)", "keep_u: barrier()")
OF_TWO_KERNELS = (
    *("leave: wait_written(4)", "leave: barrier()", "leave: on.done.arrive(n - 1)"),
    *("leave: tell(left.ready + tiles.at(n - 1))", "prepare: wait_written(0)"),
    *("prepare: barrier() #2", "prepare: tell(left.ready + tiles.at(span.chunks - 1))"),
)
OF_BLOCKS = (
    *("block_factors: on.kg_full.wait(n)", "block_factors: on.rows.wait(n)"),
    *("block_factors: on.q_full.wait(n)", "block_factors: on.done.wait(n - 1)"),
    *("block_factors: fence_async_shared()", "block_factors: barrier()"),
    *(f"prepare: wait_products(0, deps=({x}, {x}_1, {x}_2))" for x in "LP"),
    "prepare: on.kg_free.arrive(n)",
)


@dataclass(frozen=True)
class Form:
    """A way to run a kernel, and what may be taken out there without an effect, and why."""

    run: Callable[..., Results]
    module: ModuleType
    cases: dict[str, Case]
    least: int = 1  # calls that order the kernel
    needless: dict[str, str] = field(default_factory=dict)
    needless_in: dict[str, dict[str, str]] = field(default_factory=dict)  # by the name of a case
    only: tuple[str, ...] | None = None  # what else there is, another form needs

    def changes(self) -> dict[str, str]:
        """Return the changed sources by what is taken out."""
        found = without_each(source_of(self.module))
        return found if self.only is None else {name: found[name] for name in self.only}


FORMS = {
    "walk_kda": Form(
        test_walk.walked,
        walk.KERNEL,
        FORWARD,
        30,
        dict.fromkeys(OF_TRAINING, TRAINING)
        | dict.fromkeys(OF_STATES, STATES)
        | dict.fromkeys(OF_TWO_KERNELS, TWO)
        | dict.fromkeys(OF_BLOCKS, BLOCKS)
        | {"walk_kda: barrier()": BEGINS, "scan: wait_products(2, deps=(S,))": TELLS},
        {
            "given": {
                "make_rows: on.kg_full.wait(n, pred=span.chunks > 0)": IN_RAW,
                "make_rows: on.q_full.wait(n, pred=span.chunks > 0)": IN_RAW,
            },
            "raw": {
                "factors: on.kg_full.wait(n)": SCAN_WAITS,
                "factors: on.q_full.wait(n)": SCAN_WAITS,
            },
        },
    ),
    "walk_kda, training": Form(kept, walk.KERNEL, {"raw": FORWARD["raw"]}, only=OF_TRAINING),
    "walk_kda, states kept": Form(
        keeping_states,
        walk.KERNEL,
        FORWARD,
        needless={"keep_u: barrier()": "before 3.9, Triton places its own behind `store_wait`"},
        only=OF_STATES,
    ),
    "walk_kda, two kernels": Form(in_two_kernels, walk.KERNEL, FORWARD, only=OF_TWO_KERNELS),
    "walk_kda, without a bound": Form(
        test_walk.walked,
        walk.KERNEL,
        UNBOUNDED,
        needless_in={"raw": {"block_factors: on.q_full.wait(n)": SCAN_WAITS}},
        only=OF_BLOCKS,
    ),
    "walk_kda, two kernels without a bound": Form(
        in_two_kernels,
        walk.KERNEL,
        UNBOUNDED,
        needless_in={"raw": {"block_factors: on.q_full.wait(n)": SCAN_WAITS}},
        only=tuple(name for name in OF_BLOCKS if "on.done" not in name),
    ),
    # that `feed` waits for tiles, only a GPU can show
    "walk_kda_apart": Form(
        in_two_kernels,
        walk.APART,
        FORWARD,
        needless={"prepare_walk: barrier()": BEGINS, "scan_walk: barrier()": BEGINS},
    ),
    "states_kda": Form(
        kept,
        walk.STATES,
        FORWARD,
        20,
        {"states_kda: barrier()": BEGINS, "scan: wait_products(2, deps=(S,))": TELLS},
    ),
    "reverse_walk_kda": Form(
        trained_back,
        walk_back.KERNEL,
        BACKWARD,
        40,
        {
            "reverse_walk_kda: barrier()": BEGINS,
            "prepare: barrier()": "without it, Triton places its own between a store and a load",
            "carry: wait_products(2, deps=(dS,))": TELLS,
        },
        {
            "given": {
                "carry: on.done.wait(n - 1)": NORM,
                "walk: on.half.wait(n)": NORM,
                "walk: fence_async_shared() #2": NORM,
                "walk: barrier() #3": NORM,
                "walk: on.dots.arrive(n)": NORM,
                "walk: on.dots.wait(n)": NORM,
                "through_norm: wait_products(0, deps=(dot,))": NORM,
            },
            "raw": {"prepare: on.dv.wait(n)": "only a given beta is small"},
        },
    ),
    "reverse_walk_gdn": Form(
        gdn.walked,
        reverse_walk.KERNEL,
        GDN,
        30,
        {
            "reverse_walk_gdn: barrier()": BEGINS,
            "enter: wait_products(2, deps=(dS,))": TELLS,
            "carry: barrier()": "without it, Triton places its own behind `store_wait`",
        },
        {
            "grouped": {
                "finish: barrier()": OVERWRITTEN,
                "finish: fence_async_shared()": OVERWRITTEN,
                "finish: barrier() #2": OVERWRITTEN,
            }
        },
    ),
}
CHANGES = {name: form.changes() for name, form in FORMS.items()}


@lru_cache
def unchanged(form: str, case: str) -> Results:
    return FORMS[form].run(FORMS[form].cases[case])


def parameters():
    """Yield form, case and change; all but one case that needs what is taken out run nightly."""
    for name, form in FORMS.items():
        for i, change in enumerate(CHANGES[name]):
            needing = [c for c in form.cases if change not in form.needless_in.get(c, {})]
            for case in form.cases:
                nightly = case != needing[i % len(needing)]
                yield pytest.param(name, case, change, marks=[pytest.mark.nightly] * nightly)


@pytest.mark.parametrize("name, case, change", list(parameters()))
def test_a_kernel_needs_everything_that_orders_it(name, case, change):
    """Or the table above says why not."""
    form = FORMS[name]
    source = {form.module.__name__.rpartition(".")[2]: CHANGES[name][change]}

    def run(seed: int = 0) -> Results:
        return form.run(form.cases[case], seed=seed, changed=source)

    if change in form.needless | form.needless_in.get(case, {}):
        for seed in range(3):
            assert_all_identical(run(seed), unchanged(name, case))
    else:
        with pytest.raises(AssertionError):
            assert_all_identical(run(), unchanged(name, case))


@pytest.mark.parametrize("name", FORMS)
def test_the_table_is_of_the_kernels_as_they_are(name):
    form = FORMS[name]
    assert len(CHANGES[name]) >= form.least and form.needless_in.keys() <= form.cases.keys()
    for names in (form.needless, *form.needless_in.values()):
        assert names.keys() <= CHANGES[name].keys()
