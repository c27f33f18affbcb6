"""The recorded training runs on a GPU follow the native ones, and the measure of that tells runs
apart.
"""

import json
import math

import pytest

from tests.tools import parity


@pytest.mark.quick
def test_training_in_bfloat16_on_a_gpu_follows_float32_on_a_cpu(variant):
    if not parity.FILE.exists():
        pytest.skip("no runs are recorded")
    curves = json.loads(parity.FILE.read_text())["curves"].get(variant, {})
    if not curves:
        pytest.skip("it is not recorded")
    apart, noise = parity.verdict(curves)
    assert apart < noise
    for side in curves.values():
        for losses in side.values():
            assert len(losses) == parity.STEPS and losses[-1] < losses[0] - 3


@pytest.mark.quick
def test_a_run_that_drifts_away_is_told_from_noise():
    def curve(seed, drift=0.0):
        return [
            2
            + 6 * math.exp(-t / 30)
            + 0.05 * math.sin(7 * t + seed)
            + 0.02 * seed
            + drift * t / parity.STEPS
            for t in range(parity.STEPS)
        ]

    native = {"0": curve(0), "1": curve(1)}
    apart, noise = parity.verdict(
        {"native": native, "cuda": {"0": curve(0, 0.01), "1": curve(1, 0.01)}}
    )
    assert 0 < apart < noise
    apart, noise = parity.verdict({"native": native, "cuda": {"0": curve(0, 0.2), "1": curve(1)}})
    assert apart > noise
