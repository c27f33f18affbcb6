"""What a stage does with its tensors is in the plan as a formula, or raises an error."""

import math

import pytest
import torch

pytest.importorskip("triton")

from kda_ops.backends.triton.plans.launch import launch, new, recorded, values
from kda_ops.backends.triton.plans.recording import Recording
from kda_ops.backends.triton.plans.refs import Ref
from kda_ops.backends.triton.plans.sizes import Size, text_of, value_of


class Kernel:
    """A kernel of a pointer and a number that runs nowhere."""

    arg_names, do_not_specialize, __name__ = ("a", "b"), ("b",), "kernel"

    def __getitem__(self, grid):
        assert isinstance(grid[0], int)
        return lambda *args, **options: None


def reference(T=6, strided=False):
    """Return a recording, and its input of T rows of 4 columns."""
    x = torch.arange(8.0 * T).view(T, 8)[:, :4] if strided else torch.arange(4.0 * T).view(T, 4)
    kept = Recording({"T": T} | ({"x_0": 8, "x_1": 1} if strided else {}))
    strides = tuple(kept.sizes[n] for n in ("x_0", "x_1")) if strided else None
    return kept, kept.take("x", x, (kept.sizes["T"], 4), strides), x


def texts(some):
    return [*map(text_of, some)]


@pytest.mark.quick
@pytest.mark.parametrize("strided", (False, True))
def test_shapes_strides_and_views_have_the_formulas_of_what_torch_gives(strided):
    kept, x, data = reference(strided=strided)
    views = {
        "whole": (x, data, ["T", "4"], 0),
        "row": (x[2], data[2], ["4"], 2 * data.stride(0) * 4),
        "columns": (x[..., :3], data[..., :3], ["T", "3"], 0),
        "turned": (x.mT, data.mT, ["4", "T"], 0),
    }
    if not strided:
        wide = x.view(torch.float64), data.view(torch.float64)
        views |= {"wide": (*wide, ["T", "2"], 0)}
        views |= {"row of a row": (x[kept.sizes["T"] - 1][1], data[5, 1], [], 5 * 16 + 4)}
    for name, (ref, view, shape, offset) in views.items():
        assert texts(ref.shape) == shape, name
        assert tuple(map(value_of, ref.shape)) == view.shape, name
        assert tuple(map(value_of, ref.stride())) == view.stride(), name
        assert torch.equal(ref.data, view) and ref.dtype is view.dtype, name
        assert value_of(ref.memory.offset) == offset, name
        assert view.data_ptr() - data.data_ptr() == offset, name
        assert value_of(ref.numel()) == view.numel() and ref.dim() == view.dim(), name
    assert isinstance(x.shape[0], Size) and isinstance(x.stride(0), Size) == strided


WRONG = {
    "int(x.shape[0])": "T has no plain value",
    "range(x.shape[0])": "T has no plain value",
    "[7, 8][x.shape[0]]": "T has no plain value",
    "float(T)": "T has no plain value",
    "2.5 * T": r"use \+, -, \*, //",
    "T * 2.5": r"use \+, -, \*, //",
    "T / 2": r"\(n \+ d - 1\) // d rounds up",
    "{T: 1}": "T cannot be a key of a cache",
    "x.zero_()": "zero_ of the tensor 'x' would not be in the plan.*use new, total or copy_of",
    "x + x": "__add__ of the tensor 'x' would not be in the plan",
    "1 - x": "__rsub__ of the tensor 'x'",
    "x.sum(0)": "sum of the tensor 'x' would not be in the plan",
    "torch.empty_like(x)": "torch.empty_like of the tensor 'x' would not be in the plan",
    "torch.cat([x, x])": "torch.cat of the tensor 'x'",
    "torch.add(1, other=x)": "torch.add of the tensor 'x'",
    "x[1:]": r"views are x\[i\]",
    "x[..., 1:]": r"views are x\[i\]",
    "x[0, 1]": r"views are x\[i\]",
    "x.view(2, 2)": "views are",
    "x.mT.contiguous()": "copy_of",
    "x.new_empty((3,))": r"new\(x, name, shape\)",
    "x == x": "__eq__ of the tensor",
    "1 if x else 0": "a branch on the values of the tensor",
    "[*x]": "__iter__ of the tensor",
    "x.item()": "item of the tensor",
}


@pytest.mark.quick
@pytest.mark.parametrize("wrong", WRONG)
def test_what_a_plan_cannot_replay_is_an_error_that_says_what_to_write(wrong):
    kept, x, _ = reference()
    with pytest.raises(TypeError, match=WRONG[wrong]), recorded(kept):
        eval(wrong, {"x": x, "T": kept.sizes["T"], "torch": torch, "math": math})


@pytest.mark.quick
def test_a_tensor_that_the_plan_does_not_know_is_an_error():
    kept, x, data = reference()
    with recorded(kept), pytest.raises(TypeError, match="does not know: make it by new"):
        launch(Kernel(), 1, data.device, data + 1, 0)


@pytest.mark.quick
def test_what_is_launched_and_allocated_by_lengths_of_a_tensor_is_a_formula():
    kept, x, data = reference()
    with recorded(kept):
        y = new(x, "y", (2, *x.shape))
        launch(Kernel(), (x.shape[0] + 3) // 4, data.device, y, x.numel())
    assert values(y).shape == (2, 6, 4)
    (step,) = kept.steps
    assert text_of(step.programs) == "((T + 3) // 4)"
    assert texts(kept.buffers["y"].shape) == ["2", "T", "4"]
    assert text_of(step.arguments["b"]) == "T * 4" and type(y) is Ref


@pytest.mark.quick
def test_a_result_is_a_whole_buffer():
    kept, x, _ = reference()
    with recorded(kept):
        y = new(x, "y", x.shape)
    assert kept.name_of(y) == kept.name_of(y.mT.mT) == "y"
    for part in (y[0], y[..., :2], y.mT, y.view(torch.float64)):
        with pytest.raises(AssertionError, match="whole buffer|likewise"):
            kept.name_of(part)
