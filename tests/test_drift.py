"""Decoding beside the chunk form: what the command measures, and that it notices a decode that drifts."""

import torch

from kda_ops.bench import drift


def test_hundreds_of_steps_stay_with_the_chunk_form(tmp_path, capsys):
    picture, rows = tmp_path / "drift.png", tmp_path / "drift.json"
    words = "--device cpu --steps 400 --width 16 --ops kda --dtype bfloat16".split()
    assert drift.main([*words, "--plot", str(picture), "--json", str(rows)]) == 0
    assert "0 of 40 windows" in capsys.readouterr().out and picture.stat().st_size > 1000 and rows.stat().st_size > 1000
    got = drift.measure("cpu", 400, ["gdn"], ["fp32", "bf16"], torch.float32, 16)
    for pool, most in (("fp32", 1e-5), ("bf16", 2e-2)):
        errors = [r["error"] for r in got if r["pool"] == pool]
        assert 0 < max(errors) < most and max(errors[-10:]) < 1.5 * max(errors[1:10])


def test_a_decode_that_loses_its_state_is_over_the_limit(monkeypatch, capsys):
    """Every 50th token lands on an empty state, on our side only: the twin comes second."""
    right, calls = drift.decode, []

    def forgetful(op, inputs, pool):
        calls.append(pool)
        if len(calls) % 2 == 0:
            return right(op, inputs, pool)
        return torch.cat([right(op, [x[:, t : t + 50] for x in inputs], pool) for t in range(0, inputs[0].shape[1], 50)], 1)

    monkeypatch.setattr(drift, "decode", forgetful)
    assert drift.main("--device cpu --steps 200 --width 16 --ops gdn --pools fp32 bf16 --dtype float32".split()) == 1
    assert " 0 of 40" not in " ".join(capsys.readouterr().out.splitlines())
