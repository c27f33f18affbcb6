"""What chooses kernels of calls with `invariant`: flags, dtypes and widths, no sizes or devices."""

import importlib.util
import os
from itertools import product

import pytest
import torch

if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("needs triton, without its interpreter", allow_module_level=True)

from kda_ops.backends.triton import tuning
from kda_ops.backends.triton.keeps import KEEPS
from kda_ops.backends.triton.stages import reverse_walk, walk
from kda_ops.problem import Problem
from kda_ops.stages import GRADIENTS

needs_gluon = pytest.mark.skipif(walk.KERNEL is None, reason="this triton has no known Gluon")
pytestmark = pytest.mark.quick
BF16, FP32 = torch.bfloat16, torch.float32
SIZES = tuple(product((1, 16), (64, 2**15), (1, 4, 96)))  # B, T, HV
DEVICES = (1, 78, 132, 10**6)


def parse(rank, B, T, HV, K=128, V=128, dtype=BF16, **flags):
    """Return a call on tensors that only have shapes."""

    def empty(*shape, dtype=dtype):
        return torch.empty(shape, dtype=dtype, device="meta")

    g = empty(B, T, HV, *([K] if rank else []), dtype=FP32)
    x = empty(B, T, HV, K), empty(B, T, HV, K), empty(B, T, HV, V), g, empty(B, T, HV)
    return Problem.parse(
        rank, *x, safe_gate=True, use_beta_sigmoid_in_kernel=True, output_final_state=True, **flags
    )


def choices(rank, **words):
    """Return what is chosen for calls of all sizes on all devices, as one set per choice."""
    found: dict[str, set] = {}
    for count, (B, T, HV) in product(DEVICES, SIZES):
        with tuning.force(processors=count):
            p = parse(rank, B, T, HV, **words)
            got = {
                "forward": walk.walks_forward(p, None),
                "training": KEEPS.trains(p),
                "backward": tuning.walks_back(p, frozenset(GRADIENTS)),
                "GDN's backward": reverse_walk.walks(p, p.v, None, frozenset(GRADIENTS)),
                "runs": (tuning.run_length(p), tuning.walk_run_length(p)),
            }
        for name, x in got.items():
            found.setdefault(name, set()).add(x)
    return found


@needs_gluon
@pytest.mark.parametrize("rank", (1, 0))
@pytest.mark.parametrize("words", ({}, dict(dtype=torch.float16), dict(K=64)), ids=str)
def test_sizes_and_the_number_of_multiprocessors_choose_nothing(rank, words):
    invariant = choices(rank, invariant=True, **words)
    assert all(len(each) == 1 for each in invariant.values())
    assert invariant["runs"] == {(0, 0)}
    if not words:
        assert invariant["forward"] == invariant["training"] == {bool(rank)}
        assert invariant["backward"] == {bool(rank)}
        assert invariant["GDN's backward"] == {not rank}
        assert any(len(each) > 1 for each in choices(rank).values())


def test_the_tuned_file_chooses_nothing(monkeypatch):
    given = tuning.Blocks(block_k=16, block_v=16, warps=2)
    for rank, kernel in ((1, "gradient_keys"), (0, "gradient_gdn")):
        plain, p = parse(rank, 1, 64, 4), parse(rank, 1, 64, 4, invariant=True)
        rows = {tuning.row(kernel, plain): given}
        monkeypatch.setattr(tuning, "tuned", lambda device=None, rows=rows: rows)
        assert tuning.choose(kernel, plain, tuning.Blocks) == given
        assert tuning.choose(kernel, p, tuning.Blocks) == tuning.table(kernel, p) != given


@needs_gluon
def test_a_pool_that_a_walk_cannot_reach_is_refused():
    p = parse(1, 1, 64, 4, invariant=True)
    far = torch.empty(1, device="meta").as_strided((1, 4, 128, 128), (0, 0, 2**30, 1))
    with pytest.raises(ValueError, match="state must reach .* with invariant=True"):
        walk.walks_forward(p, far)
