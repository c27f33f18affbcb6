"""The examples run, resume, and reach the accuracy that they promise."""

import math

import pytest
import torch

from examples import recall, train

SMALL = "--layers 1 --hidden 32 --head-dim 16 --batch 2 --length 64 --write 20".split()


@pytest.fixture
def without_compiler(monkeypatch):
    """Hide the C++ compiler from the example: faster, and tests the fallback."""
    torch._dynamo.reset()
    monkeypatch.setattr(train, "can_build_cpp", lambda: False)


def run(folder, *arguments):
    return train.main([*SMALL, "--out", str(folder), *arguments])


@pytest.mark.parametrize("variant", [[], ["--gdn"]])
def test_training_lowers_the_loss_and_writes_its_files(without_compiler, tmp_path, capsys, variant):
    result = run(tmp_path, "--steps", "30", "--lr", "1e-2", *variant)
    assert "aot_eager" in capsys.readouterr().out
    losses = [bits for _, bits in result["curve"]["train"]]
    assert len(losses) == 30 and losses[0] > 7.5 and result["held_out"] < losses[0] - 1
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (
        result["text"]
        and (tmp_path / "text.txt").exists()
        and (tmp_path / "checkpoint.pt").exists()
    )


def test_a_resumed_run_equals_the_uninterrupted_one_bitwise(without_compiler, tmp_path):
    whole = run(tmp_path / "whole", "--steps", "6")
    run(tmp_path / "parts", "--steps", "6", "--stop", "3")
    resumed = run(tmp_path / "parts", "--steps", "6", "--resume")
    assert resumed["curve"]["train"] == whole["curve"]["train"]
    assert resumed["held_out"] == whole["held_out"] and resumed["text"] == whole["text"]
    a, b = (torch.load(tmp_path / name / "checkpoint.pt")["model"] for name in ("whole", "parts"))
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_resuming_a_finished_run_only_generates(without_compiler, tmp_path):
    whole = run(tmp_path, "--steps", "2")
    assert run(tmp_path, "--steps", "2", "--resume")["text"] == whole["text"]


def test_resuming_needs_a_checkpoint(tmp_path):
    with pytest.raises(SystemExit, match="--resume needs"):
        run(tmp_path, "--resume")


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_training_runs_under_inductor(tmp_path, monkeypatch, mode):
    torch._dynamo.reset()
    if not train.can_build_cpp():
        pytest.skip("no C++ compiler")
    compiled, given = torch.compile, []

    def keep(function, **options):
        given.append(options)
        return compiled(function, **options)

    monkeypatch.setattr(torch, "compile", keep)
    assert math.isfinite(run(tmp_path, "--steps", "2", "--mode", mode)["held_out"])
    assert [options["mode"] for options in given] == [mode]


@pytest.mark.quick
def test_a_missing_compiler_is_noticed(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert not train.can_build_cpp()


def test_generation_with_caches_matches_one_forward(without_compiler):
    torch.manual_seed(0)
    model = train.LanguageModel(layers=2, hidden=32, head_dim=16, gdn=False)
    out = train.generate(model, b"import os", 30, temperature=1e-3, seed=0)
    with torch.no_grad():
        logits = model(torch.tensor([list(out[:-1])]))[0]
    assert out[9:] == bytes(logits[8:].argmax(-1).tolist())


@pytest.mark.quick
def test_the_bigram_entropy_of_a_coin_is_one_bit():
    text = torch.randint(
        2, (400_000,), generator=torch.Generator().manual_seed(0), dtype=torch.uint8
    )
    held_out = train.windows(text, torch.arange(0, 100_000, 100), 100)
    assert abs(train.bigram_entropy(text, held_out) - 1) < 0.01


def test_train_and_held_out_text_share_no_file():
    held_out, (first, second) = bytes(train.read_library()[1].tolist()), train.read_library()
    assert held_out == bytes(second.tolist()) and len(first) > 5 * len(second) > 0


def test_recall_reaches_95_percent_through_the_state_alone():
    assert recall.main([]) > 0.95
