"""The examples run, resume, show what they claim, and reach the accuracy that they promise."""

from __future__ import annotations

import argparse
import contextlib
import io
import math
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
    serve_bits,
    train,
)

ROOT = Path(__file__).parents[2]
SMALL = "--layers 1 --hidden 32 --head-dim 16 --batch 2 --length 64 --write 20".split()


@pytest.fixture
def without_compiler(monkeypatch):
    """Hide the C++ compiler from the example: faster, and tests the fallback."""
    torch._dynamo.reset()
    monkeypatch.setattr(train, "can_build_cpp", lambda: False)


def run(folder, *arguments):
    return train.main([*SMALL, "--out", str(folder), *arguments])


@pytest.mark.parametrize("variant", [[], pytest.param(["--gdn"], marks=pytest.mark.nightly)])
def test_training_lowers_the_loss_and_writes_its_files(without_compiler, tmp_path, capsys, variant):
    result = run(tmp_path, "--steps", "30", "--lr", "1e-2", *variant)
    assert "aot_eager" in capsys.readouterr().out
    losses = [bits for _, bits in result["curve"]["train"]]
    assert len(losses) == 30 and losses[0] > 7.5 and result["held_out"] < losses[0] - 1
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert result["text"]
    assert (tmp_path / "text.txt").exists()
    assert (tmp_path / "checkpoint.pt").exists()


def test_a_resumed_run_equals_the_uninterrupted_one_bitwise(without_compiler, tmp_path):
    whole = run(tmp_path / "whole", "--steps", "6")
    run(tmp_path / "parts", "--steps", "6", "--stop", "3")
    resumed = run(tmp_path / "parts", "--steps", "6", "--resume")
    assert resumed["curve"]["train"] == whole["curve"]["train"]
    assert resumed["held_out"] == whole["held_out"] and resumed["text"] == whole["text"]
    a, b = (torch.load(tmp_path / name / "checkpoint.pt")["model"] for name in ("whole", "parts"))
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.nightly
def test_resuming_a_finished_run_only_generates(without_compiler, tmp_path):
    whole = run(tmp_path, "--steps", "2")
    assert run(tmp_path, "--steps", "2", "--resume")["text"] == whole["text"]


def test_resuming_needs_a_checkpoint(tmp_path):
    with pytest.raises(SystemExit, match="--resume needs"):
        run(tmp_path, "--resume")


@pytest.mark.nightly
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


@pytest.mark.nightly
def test_recall_reaches_95_percent_through_the_state_alone():
    assert recall.main([]) > 0.95


# --- serving --------------------------------------------------------------------------------------


def test_every_request_gives_the_same_output_alone(capsys):
    result = serve.main(["--requests", "8", "--slots", "3", "--hidden", "32"])
    out = capsys.readouterr().out
    assert "alone" in out and "decode, batch of 1: " in out and "decode, batch of 8: " in out
    assert result["mixed"] > 0 and result["produced"] > 8


@pytest.mark.parametrize("nothing", ["--slots", "--budget"])
def test_an_engine_without_slots_or_budget_is_refused(nothing):
    with pytest.raises(SystemExit):
        serve.main([nothing, "0"])


@pytest.mark.quick
def test_slots_are_reused_and_given_back():
    torch.manual_seed(0)
    engine = serve.Engine(serve.Model(hidden=32).requires_grad_(False), 2)
    requests = serve.make_requests(5, 256, seed=1)
    engine.run(requests)
    assert sorted(engine.free) == [1, 2] and not engine.active
    assert all(request.finished and request.slot in (1, 2) for request in requests)


def test_padded_steps_on_slots_of_nan_decode_what_a_prefill_does(monkeypatch):
    """Free slots hold NaN. Three requests are padded to four, and slot 0 keeps its ones."""

    def new_pools(model, slots, make=serve.Model.new_pools):
        pools = make(model, slots)
        for pool in pools:
            pool.fill_(torch.nan)[0] = 1
        return pools

    monkeypatch.setattr(serve.Model, "new_pools", new_pools)
    torch.manual_seed(0)
    model = serve.Model(hidden=32).requires_grad_(False)
    engine = serve.Engine(model, 5)
    prompts = ([1], list(range(70)), [5, 7])
    requests = [serve.Request(prompt, 6) for prompt in prompts]
    engine.run(requests)
    assert engine.decodes.keys() == {4} and all((pool[0] == 1).all() for pool in engine.pools)
    for request in requests:
        for i, token in enumerate(request.output):
            alone = serve.Request(request.prompt + request.output[:i], 1)
            serve.Engine(model, 1).run([alone])
            assert alone.output == [token]


@pytest.mark.quick
def test_sizes_of_decode_steps_are_powers_of_two_up_to_the_slots():
    torch.manual_seed(0)
    engine = serve.Engine(serve.Model(hidden=32, layers=1).requires_grad_(False), 6)
    engine.run([serve.Request([1], 2 + i) for i in range(6)])
    assert engine.decodes.keys() == {1, 2, 4, 6}


@pytest.mark.parametrize("budget", (64, 128, 1000))
def test_how_a_prompt_is_cut_does_not_change_the_output(budget):
    torch.manual_seed(0)
    model, outputs = serve.Model(hidden=32).requires_grad_(False), []
    for size in (budget, 64):
        request = serve.Request(list(range(200)), 6)
        serve.Engine(model, 1, size).run([request])
        outputs.append(request.output)
    assert outputs[0] == outputs[1]


def test_an_invariant_generator_has_the_bits_of_training(capsys):
    words = "--invariant --requests 4 --slots 2 --hidden 32 --layers 1 --budget 50 --seed 1"
    result = serve.main(words.split())
    assert capsys.readouterr().out.count("0 of ") == 2
    for found in result.values():
        assert min(found.values()) > 0  # mixed batches, accepted and rejected drafts


@pytest.mark.nightly
def test_drafts_that_are_not_taken_back_change_the_bits(monkeypatch):
    monkeypatch.setattr(serve_bits.InvariantCache, "crop", lambda *_: None)
    with pytest.raises(SystemExit, match="the generator's bits are not the trainer's"):
        serve.main("--invariant --requests 4 --slots 2 --hidden 32 --layers 1 --seed 1".split())


# --- guides ---------------------------------------------------------------------------------------


def test_exported_programs_compute_what_the_module_does(capsys):
    off = export.main([])
    assert (
        set(off) == {"prefill", "packed sequences", "decode, 5 tokens"} and max(off.values()) < 1e-6
    )
    assert "prefill" in capsys.readouterr().out


@pytest.mark.nightly
def test_a_policy_avoids_recomputing_the_attention():
    torch._dynamo.reset()
    layers = 3
    steps = checkpoint_policy.main(["--layers", str(layers), "--tokens", "128"])
    for mode in ("eager", "compiled"):
        keep, recompute, select = (steps[name, mode] for name in checkpoint_policy.POLICIES)
        assert (keep.forwards, recompute.forwards, select.forwards) == (layers, 2 * layers, layers)
        assert recompute.peak < keep.peak and select.peak < keep.peak
        for step in (recompute, select):
            assert abs(step.loss - keep.loss) <= 1e-5 * keep.loss
            assert abs(step.gradient - keep.gradient) <= 1e-4 * keep.gradient


@pytest.mark.nightly
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


TORCHRUN = tuple("-m torch.distributed.run --standalone --nproc-per-node 2".split())


def torchrun(*words, launcher=TORCHRUN):
    """Run a script with its options on two ranks, and return what it prints."""
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


@pytest.mark.nightly
def test_fsdp_under_torchrun_matches_one_process():
    out = torchrun("examples/fsdp.py", "--steps", "3")
    assert "rows over 2 ranks, heads over 1: a rank holds 61728 of 123456 parameters" in out
    assert "step 2: loss" in out and "losses differ by at most" in out


@pytest.mark.parametrize(
    "launcher, words", [((), ()), pytest.param(TORCHRUN, ("--gdn",), marks=pytest.mark.nightly)]
)
def test_a_sequence_over_two_ranks_matches_one_process(launcher, words):
    out = torchrun("examples/context_parallel.py", "--length", "300", *words, launcher=launcher)
    assert "300 tokens on 2 ranks (100, 200)" in out and "dt_bias" in out


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


@pytest.mark.parametrize(
    "example",
    [
        pytest.param("fsdp.py --steps 2", marks=pytest.mark.nightly),
        "context_parallel.py --length 300",
    ],
)
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


@pytest.mark.parametrize(
    "precision", [pytest.param("float32", marks=pytest.mark.nightly), "bfloat16"]
)
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
        (train, "--hidden 32 --head-dim 48", "must be a multiple of --head-dim, got 32 and 48"),
        *(
            (example, "--device cuda", "--device cuda: torch finds no CUDA device here")
            for example in (train, export, recall, serve, finetune_transformers)
        ),
        (recall, "--steps 0", "--steps must be at least 1"),
        (serve, "--heads 0", "--heads must be at least 1"),
        (checkpoint_policy, "--layers 0", "--layers must be at least 1"),
        (finetune_transformers, "--tokens 1", "--tokens must be at least 2"),
        (finetune_transformers, "--compare --compile", "times eager code: drop --compile"),
        (train, "--stop 0", "--stop must be at least 1, got 0"),
    ],
)
def test_invalid_options_are_refused(example, words, said, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit):
        example.main(words.split())
    assert said in capsys.readouterr().err
