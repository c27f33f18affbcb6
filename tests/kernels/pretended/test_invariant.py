"""With `invariant`, kernels are compiled in one form for all calls of one width, and the same
kernels run.
"""

from dataclasses import replace

import pytest
import torch

from kda_ops import chunk
from kda_ops.backends.triton import BACKEND, tuning
from kda_ops.registrations.schemas import mask_of
from tests.support import pretended_calls
from tests.support.pretend import pretend_gpu
from tests.support.pretended_calls import MODEL, Model, usual

KINDS = (chunk.Infer, chunk.Forward, chunk.Backward, chunk.Prefill)
LAYOUTS = ("dense", "off", "heads_first", "fused", "second", "far")


@pytest.fixture(scope="module")
def launches():
    with pretend_gpu() as launches:
        yield launches


def forms(model, numbers, launches, **flags):
    """Return what the kernels of a call are compiled for."""
    BACKEND.forget()
    call = pretended_calls.run(BACKEND, model, numbers, **flags)
    launches.clear()
    BACKEND.run(*call)
    return {
        (x.made.kernel.fn.__name__, str(x.made.specialisation), x.made.options) for x in launches
    }


def variations(kind):
    """Yield what a call may differ in from another one with the same bits."""
    for H in (1, 3, 16, 96):
        yield dict(H=H), {}
    for layout in LAYOUTS:
        yield {}, dict(layout=layout)
    for B, T in ((1, 1), (3, 100), (16, 1024)):
        yield {}, dict(B=B, T=T)
    if kind is chunk.Backward:
        for need in (("v",), ("q", "g"), ("beta", "A_log")):
            yield dict(need=mask_of([n in need for n in chunk.GRADIENTS])), {}


@pytest.mark.parametrize("rank", (1, 0))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "widths",
    (
        dict(K=128, V=128),
        dict(K=64, V=64, dtype=torch.float16),
        dict(K=20, V=40, dtype=torch.float32),
        dict(K=128, V=128, group=2),
    ),
    ids=str,
)
def test_one_form_of_each_kernel_serves_all_calls(widths, kind, rank, launches):
    # the number of programs chooses between scans, and of chunks ahead, that have the same bits
    with tuning.force(processors=0, ahead=10**9):
        model = Model(kind=kind, rank=rank, **MODEL | dict(kept=False) | widths)
        want = forms(model, usual(130), launches, invariant=True)
        assert want
        for words, numbers in variations(kind):
            got = forms(
                replace(model, **words), replace(usual(130), **numbers), launches, invariant=True
            )
            assert got == want, (words, numbers)


@pytest.mark.parametrize("rank", (1, 0))
def test_without_the_flag_forms_differ(rank, launches):
    """So the test above can fail."""
    model = Model(kind=chunk.Backward, rank=rank, **MODEL | dict(kept=False, K=20, V=40))
    few, many = (forms(replace(model, H=H), usual(130), launches) for H in (3, 16))
    assert few != many


@pytest.mark.parametrize("processors", (1, 132, 1000))
@pytest.mark.parametrize("H", (1, 16, 96))
def test_walks_serve_every_invariant_call_that_they_can(H, processors, launches):
    with tuning.force(processors=processors):
        names = {}
        for kind in KINDS:
            for rank in (1, 0):
                for do in (True, False):  # without a gradient of o, it is zeros
                    model = Model(kind=kind, rank=rank, **MODEL | dict(kept=False, H=H, do=do))
                    found = forms(model, usual(2048), launches, invariant=True)
                    names[kind, rank, do] = {name for name, *_ in found}
    for do in (True, False):
        for kind in (chunk.Infer, chunk.Forward, chunk.Prefill):
            assert names[kind, 1, do] & {"walk_kda", "scan_walk"}
        assert {"states_kda", "reverse_walk_kda"} <= names[chunk.Backward, 1, do]
        assert "reverse_walk_gdn" in names[chunk.Backward, 0, do]
    assert not any("join_runs" in each for each in names.values())
