"""Scratch tensors share a place only if their uses cannot meet."""

import pytest
import torch

pytest.importorskip("triton")

from kda_ops.backends.triton.plans.plan import lay_out
from kda_ops.backends.triton.plans.recording import Recording
from kda_ops.backends.triton.plans.sizes import text_of


class Kernel:
    """A kernel of two pointers that runs nowhere."""

    arg_names, do_not_specialize = ("a", "b"), ()


def places(*steps: tuple[int, int] | str) -> dict[str, str]:
    """Return the places, for T = 64, of buffers that steps use: pairs, "fork" and "join".

    Where streams are apart, every second launch goes to the second one.
    """
    kept = Recording({"T": 64})
    count = 1 + max(i for step in steps if not isinstance(step, str) for i in step)
    shape = (kept.sizes["T"],)
    tensors = [kept.allocate(f"b{i}", torch.empty(64), shape, False) for i in range(count)]
    on_side_stream = False
    for step in steps:
        if isinstance(step, str):
            kept.wait(joins=step == "join")
            on_side_stream = step == "fork"
        else:
            kept.launch(Kernel(), 1, tuple(tensors[i] for i in step), {}, on_side_stream, True)
    found, _ = lay_out(list(kept.buffers.values()))
    return {name: text_of(place) for name, place in found.items()}


@pytest.mark.quick
def test_buffers_share_a_place_if_one_is_done_before_the_other_begins():
    found = places((0, 1), (1, 1), (2, 2))
    assert found["b0"] == found["b2"] != found["b1"]


def test_buffers_of_two_streams_share_no_place_until_the_streams_join():
    # in one stream the second and the third launch would share a place
    found = places((0, 0), "fork", (1, 1), (2, 2), "join", (3, 3))
    assert found["b1"] != found["b2"] and found["b3"] in (found["b1"], found["b2"])


def test_the_alignment_of_a_row_is_a_guard():
    kept = Recording({"T": 6})
    x = kept.allocate("x", torch.empty(3, 6), (3, kept.sizes["T"]), False)
    kept.launch(Kernel(), 1, (x, x[1]), {}, False, True)
    assert kept.guards == {"T * 4 % 16 == 0": False}
