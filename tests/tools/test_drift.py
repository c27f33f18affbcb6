"""Decoding next to the chunk form, and that the measure notices a decode that drifts."""

import json
from pathlib import Path

import pytest
import torch

from tests.support import drift

FILE = Path(__file__).parents[2] / "benchmarks" / "results" / "drift.json"


def assert_holds(rows, steps, ops=tuple(drift.CHUNK)):
    """Check that a record is whole, within its limits, and no worse at its end."""
    assert [(r["op"], r["pool"], r["step"]) for r in rows] == [
        (op, pool, steps // drift.WINDOWS * (i + 1))
        for op in ops
        for pool in drift.POOLS
        for i in range(drift.WINDOWS)
    ]
    assert all(0 < r["error"] <= r["limit"] for r in rows)
    assert max(drift.growth(rows).values()) < 1.1, drift.growth(rows)


def test_the_recorded_steps_of_a_gpu_stay_with_the_chunk_form():
    found = json.loads(FILE.read_text())
    assert not any(r["card"].startswith("CPU") for r in found["rows"])
    assert_holds(found["rows"], 10_000)


def test_hundreds_of_steps_stay_with_the_chunk_form():
    assert_holds(
        drift.measure("cpu", 400, ["kda"], ["fp32", "bf16"], torch.bfloat16, 16), 400, ("kda",)
    )
    got = drift.measure("cpu", 400, ["gdn"], ["fp32", "bf16"], torch.float32, 16)
    for pool, most in (("fp32", 1e-5), ("bf16", 2e-2)):
        errors = [r["error"] for r in got if r["pool"] == pool]
        assert 0 < max(errors) < most and max(errors[-10:]) < 1.5 * max(errors[1:10])


def test_a_record_that_drifts_lacks_a_window_or_exceeds_its_limit_does_not_hold():
    rows = [
        {"op": op, "pool": pool, "step": 500 * (i + 1), "error": 1.0, "limit": 2.0}
        for op in drift.CHUNK
        for pool in drift.POOLS
        for i in range(drift.WINDOWS)
    ]
    assert_holds(rows, 10_000)
    for wrong in (
        rows[:-1],
        [*rows[:-1], rows[-1] | {"error": 2.1}],
        [r | {"error": 1 + r["step"] / 1e4} for r in rows],
        rows[: len(rows) // 2],
    ):
        with pytest.raises(AssertionError):
            assert_holds(wrong, 10_000)


def test_a_decode_that_loses_its_state_is_over_the_limit(monkeypatch):
    """Every 50th token lands on an empty state, on our side only: the twin comes second."""
    right, calls = drift.decode, []

    def forgetful(op, inputs, pool):
        calls.append(pool)
        if len(calls) % 2 == 0:
            return right(op, inputs, pool)
        return torch.cat(
            [
                right(op, [x[:, t : t + 50] for x in inputs], pool)
                for t in range(0, inputs[0].shape[1], 50)
            ],
            1,
        )

    monkeypatch.setattr(drift, "decode", forgetful)
    rows = drift.measure("cpu", 200, ["gdn"], ["fp32", "bf16"], torch.float32, 16)
    assert any(r["error"] > r["limit"] for r in rows)


def test_a_decode_that_is_one_percent_off_is_over_the_limit(monkeypatch):
    right, calls = drift.decode, []

    def off(op, inputs, pool):
        calls.append(pool)
        return right(op, inputs, pool) * (1.01 if len(calls) % 2 else 1.0)

    monkeypatch.setattr(drift, "decode", off)
    rows = drift.measure("cpu", 200, ["kda"], ["fp32"], torch.bfloat16, 16)
    assert all(r["error"] > 2 * r["limit"] for r in rows)
