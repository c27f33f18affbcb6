"""A plan serves no call that the pass refuses, and launches what a new recording would launch.

Calls are made from the records of operators (`record_calls`), so a new operator or argument is
covered as soon as it has a record.
"""

import os
from itertools import product
from unittest import mock

import pytest

if os.environ.get("KDA_OPS_PRETEND") != "1":
    pytest.skip("needs a process of its own: KDA_OPS_PRETEND=1", allow_module_level=True)

from kda_ops.backends.triton import BACKEND
from kda_ops.backends.triton.backend import Triton
from kda_ops.registrations import schemas
from kda_ops.stages import Backend
from tests.support import record_calls
from tests.support.pretend import described, pretend_gpu

OPERATORS = [  # those of GDN run nightly: `test_specialisation` draws calls of both variants
    pytest.param(record, rank, id=f"{name}-{record.name}", marks=[pytest.mark.nightly] * (not rank))
    for name, rank in schemas.VARIANTS.items()
    for record in schemas.operators(name)
]


class NotPlanned(Exception):
    """No plan serves the call."""


def refuse(*_):
    """Stand for what runs a call that no plan serves."""
    raise NotPlanned


@pytest.fixture(scope="module")
def gpu():
    with pretend_gpu() as launches:
        yield launches


def run(call, tensors, gpu):
    """Run a call; return its launches, and shape, dtype and device of its results."""
    gpu.clear()
    results = BACKEND.run(call.record.kind, call.rank, tuple(tensors.values()), call.flags)
    inputs = {x.data_ptr(): name for name, x in tensors.items() if x is not None}
    about = [x if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in results]
    return [described(launched, inputs) for launched in gpu], about


def run_by_plan(call, tensors, gpu):
    """Run a call only if a plan serves it; None otherwise."""
    with mock.patch.object(Triton, "_record", refuse), mock.patch.object(Backend, "run", refuse):
        try:
            return run(call, tensors, gpu)
        except NotPlanned:
            return None
        except (TypeError, ValueError):
            assert call.error(tensors) is not None and not gpu
            return None


def run_by_stages(call, tensors, gpu):
    """Run a call as if no call had been before."""
    saved = BACKEND.plans, BACKEND.decodes
    BACKEND.plans, BACKEND.decodes = {}, {}
    try:
        return run(call, tensors, gpu)
    finally:
        BACKEND.plans, BACKEND.decodes = saved


def assert_lawful(call, tensors, gpu, what):
    """Check a call; return whether a plan serves it."""
    served = run_by_plan(call, tensors, gpu)
    if served is None:
        return False
    assert call.error(tensors) is None, what
    if BACKEND.decodes:  # decode remembers sizes
        assert run_by_plan(call, tensors, gpu) == served, what
    assert run_by_stages(call, tensors, gpu) == served, what
    return True


def calls(record, rank, every):
    """Return calls that differ in what they are given: every one, or one of each style."""
    three, found = ((1, 0, "full"), (0, 1, "short"), (1, 1, "bare")), []
    each = product((0, 1), (0, 1), ("full", "short", "bare")) if every else three
    for packed, flagged, style in each:
        call = record_calls.find(record, rank, bool(packed), bool(flagged), style)
        if call is not None and all((call.given, call.flags) != known for known, _ in found):
            found.append(((call.given, call.flags), call))
    return [call for _, call in found]


@pytest.mark.parametrize("record, rank", OPERATORS)
@pytest.mark.parametrize("every", (False, pytest.param(True, marks=pytest.mark.nightly)))
def test_a_plan_serves_what_the_pass_accepts_as_a_new_recording_would(record, rank, every, gpu):
    changed = set()
    for call in calls(record, rank, every):
        BACKEND.forget()
        tensors = call.tensors()
        run(call, tensors, gpu)
        assert assert_lawful(call, tensors, gpu, call)
        assert assert_lawful(call, call.tensors(), gpu, call)
        for name, x in tensors.items():
            changed |= {name} - ({name} if x is None else set())
            for what, other in record_calls.changed(call, name):
                assert_lawful(call, tensors | {name: other}, gpu, (name, what, call))
        for what, other in (*record_calls.resized(call), *record_calls.reflagged(call)):
            assert_lawful(other, other.tensors(), gpu, (what, call))
    assert changed == {*record.names}


@pytest.mark.parametrize("record, rank", OPERATORS)
def test_nor_does_a_plan_of_a_strided_argument_serve_other_strides_otherwise(record, rank, gpu):
    call = record_calls.find(record, rank, packed=False, flagged=True, style="full")
    for name in record.names:
        BACKEND.forget()
        for what, x in record_calls.laid_out(call, name):
            tensors = call.tensors() | {name: x}
            if not assert_lawful(call, tensors, gpu, (name, what)) and call.error(tensors) is None:
                run(call, tensors, gpu)
                assert assert_lawful(call, tensors, gpu, (name, what))
