"""The guides in examples/ for loops that exist already: each runs, and shows what it says."""

from __future__ import annotations

import pytest
import torch

from examples import checkpoint_policy, export, finetune_transformers


def test_exported_programs_compute_what_the_module_does(capsys):
    off = export.main([])
    assert set(off) == {"prefill", "packed sequences", "decode, 5 tokens"} and max(off.values()) < 1e-6
    assert "prefill" in capsys.readouterr().out


def test_a_policy_spares_the_attention_its_recomputation():
    torch._dynamo.reset()
    layers = 3
    steps = checkpoint_policy.main(["--layers", str(layers), "--tokens", "128"])
    for mode in ("eager", "compiled"):
        keep, recompute, select = (steps[name, mode] for name in checkpoint_policy.POLICIES)
        assert (keep.forwards, recompute.forwards, select.forwards) == (layers, 2 * layers, layers)
        assert recompute.peak < keep.peak and select.peak < keep.peak
        for step in (recompute, select):
            assert abs(step.loss - keep.loss) <= 1e-5 * keep.loss and abs(step.gradient - keep.gradient) <= 1e-4 * keep.gradient


def test_the_public_operator_alone_is_not_what_a_policy_meets():
    """SAVE_OPS names `chunk_fwd`, which stands in training graphs; a policy that names `chunk` saves nothing."""
    assert {torch.ops.kda.chunk_fwd.default, torch.ops.gdn.chunk_fwd.default, torch.ops.kda.chunk.default} <= checkpoint_policy.kda_ops.SAVE_OPS


def test_a_model_of_transformers_learns_from_packed_documents(capsys):
    pytest.importorskip("transformers")
    out = finetune_transformers.main(["--steps", "30", "--tokens", "512"])
    assert out["last loss"] < 0.75 * out["first loss"]
    assert "def get_" in capsys.readouterr().out


def test_packed_rows_hold_whole_documents():
    row = next(finetune_transformers.rows(700, "cpu"))
    starts = row["cu_seq_lens_q"].tolist()
    assert starts[0] == 0 and starts[-1] == 700 == row["input_ids"].shape[1]
    assert [i for i, position in enumerate(row["position_ids"][0].tolist()) if position == 0] == starts[:-1]
    assert all(bytes(row["input_ids"][0, a : a + 4].tolist()) == b"def " for a, b in zip(starts, starts[1:]) if b - a >= 4)
