"""The guides in examples/ run, and show what they claim."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from examples import (
    checkpoint_policy,
    context_parallel,
    export,
    finetune_transformers,
    fsdp,
    recall,
    serve,
    train,
)

ROOT = Path(__file__).parents[2]


def test_exported_programs_compute_what_the_module_does(capsys):
    off = export.main([])
    assert (
        set(off) == {"prefill", "packed sequences", "decode, 5 tokens"} and max(off.values()) < 1e-6
    )
    assert "prefill" in capsys.readouterr().out


def test_a_policy_avoids_recomputing_the_attention():
    torch._dynamo.reset()
    layers = 3
    steps = checkpoint_policy.main(["--layers", str(layers), "--tokens", "128"])
    for mode in ("eager", "compiled"):
        keep, recompute, select = (steps[name, mode] for name in checkpoint_policy.POLICIES)
        assert (keep.forwards, recompute.forwards, select.forwards) == (layers, 2 * layers, layers)
        assert recompute.peak < keep.peak and select.peak < keep.peak
        for step in (recompute, select):
            assert (
                abs(step.loss - keep.loss) <= 1e-5 * keep.loss
                and abs(step.gradient - keep.gradient) <= 1e-4 * keep.gradient
            )


def test_a_model_of_transformers_learns_from_packed_documents(capsys):
    pytest.importorskip("transformers")
    out = finetune_transformers.main(["--steps", "30", "--tokens", "512"])
    assert out["last loss"] < 0.75 * out["first loss"]
    assert "def get_" in capsys.readouterr().out


@pytest.mark.quick
def test_packed_rows_hold_whole_documents():
    row = next(finetune_transformers.rows(700, "cpu"))
    starts = row["cu_seq_lens_q"].tolist()
    assert starts[0] == 0 and starts[-1] == 700 == row["input_ids"].shape[1]
    assert [
        i for i, position in enumerate(row["position_ids"][0].tolist()) if position == 0
    ] == starts[:-1]
    assert all(
        bytes(row["input_ids"][0, a : a + 4].tolist()) == b"def "
        for a, b in zip(starts, starts[1:])
        if b - a >= 4
    )


def torchrun(*words):
    """Run a script with its options on two ranks, and return what it prints."""
    launcher = "-m torch.distributed.run --standalone --nproc-per-node 2".split()
    done = subprocess.run(
        [sys.executable, *launcher, *words],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_fsdp_under_torchrun_matches_one_process():
    out = torchrun("examples/fsdp.py", "--steps", "3")
    assert "rows over 2 ranks, heads over 1: a rank holds 61728 of 123456 parameters" in out
    assert "step 2: loss" in out and "losses differ by at most" in out


STILL_BUSY = """
import runpy, sys, time, torch, torch.distributed as dist
class Late:
    def __del__(self):
        time.sleep(1)
held = [Late()]
def destroy_process_group():
    for _ in range(4000):
        held.append(torch.ones(10_000))
        dist.all_reduce(held[-1], async_op=True)
dist.destroy_process_group = destroy_process_group
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("example", ["fsdp.py --steps 2", "context_parallel.py --length 300"])
def test_a_rank_exits_cleanly_while_gloo_frees_tensors(example, tmp_path):
    """Gloo may free tensors shortly after the last collective; here it does while Python exits."""
    script, *arguments = example.split()
    busy = tmp_path / "still_busy.py"
    busy.write_text(STILL_BUSY)
    assert "differ" in torchrun(str(busy), str(ROOT / "examples" / script), *arguments)


def fsdp_with_heads(groups, precision):
    """Run the example with rows and heads over two ranks each; return what it prints."""
    printed = io.StringIO()
    options = dict(tensor_parallel=2, steps=3, seed=1, precision=precision)
    with contextlib.redirect_stdout(printed), warnings.catch_warnings():
        warnings.filterwarnings("error", "A_log and dt_bias must stay in float32")
        fsdp.run(argparse.Namespace(device="cpu", **options))
    return printed.getvalue()


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_fsdp_with_sharded_heads_matches_one_process(ranks, precision):
    assert "rows over 2 ranks, heads over 2" in ranks.run(4, fsdp_with_heads, precision)[0]


@pytest.mark.quick
@pytest.mark.parametrize(
    "example, words, said",
    [
        (fsdp, "--processes 3", "must divide the 8 rows of a batch, got 3 / 1"),
        (fsdp, "--processes 0", "both must be at least 1, got 1 and 0 ranks"),
        (fsdp, "--steps 1", "--steps must be at least 2"),
        (context_parallel, "--processes 0", "--processes must be at least 1"),
        (context_parallel, "--length 1", "got 1 tokens for 2 ranks"),
        (
            train,
            "--hidden 32 --head-dim 48",
            "--hidden must be a multiple of --head-dim, got 32 and 48",
        ),
        (train, "--device cuda", "--device cuda: torch finds no CUDA device here"),
        (export, "--device cuda", "--device cuda: torch finds no CUDA device here"),
        (recall, "--device cuda", "--device cuda: torch finds no CUDA device here"),
        (serve, "--device cuda", "--device cuda: torch finds no CUDA device here"),
        (finetune_transformers, "--device cuda", "--device cuda: torch finds no CUDA device here"),
        (recall, "--steps 0", "--steps must be at least 1"),
        (serve, "--heads 0", "--heads must be at least 1"),
        (checkpoint_policy, "--layers 0", "--layers must be at least 1"),
        (finetune_transformers, "--tokens 1", "--tokens must be at least 2"),
        (
            finetune_transformers,
            "--compare --compile",
            "--compare times eager code: drop --compile",
        ),
        (train, "--stop 0", "--stop must be at least 1, got 0"),
    ],
)
def test_invalid_options_are_refused(example, words, said, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit):
        example.main(words.split())
    assert said in capsys.readouterr().err
