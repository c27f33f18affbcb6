"""Tuning survives candidates that end their process, and prefers the table where nothing is clearly
faster.
"""

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from kda_ops.problem import Problem
from kda_ops.tools import tune

CALL = dict(op="gdn", K=128, V=128, dtype="bf16", gate="softplus", B=1, T=64, H=1)


def stand_in(times: str) -> str:
    """Return a script that tries five candidates.

    A number is a time, None a wrong result; "end" ends the process.
    """
    return f"""
import json, os, sys
work = json.loads(sys.argv[-1])
for place, ms in enumerate({times}):
    if place in work["skip"]:
        continue
    print(json.dumps(dict(place=place, name=work["kernel"], options=dict(warps=place))), flush=True)
    if ms == "end":
        print("illegal memory access", file=sys.stderr)
        os._exit(1)
    print(json.dumps(dict(place=place, ms=ms, why="wrong results")), flush=True)
"""


@pytest.fixture
def candidates(monkeypatch):
    start = subprocess.Popen

    def install(times):
        monkeypatch.setattr(
            tune.subprocess,
            "Popen",
            lambda command, **words: start(
                [sys.executable, "-c", stand_in(times), command[-1]], **words
            ),
        )

    return install


def test_a_candidate_that_ends_its_process_costs_itself_alone(candidates):
    candidates("[2.0, 'end', None, 'end', 1.0]")
    lines = []
    assert tune.tune(**CALL, echo=lines.append) == {
        kernel: {"warps": 4} for kernel in tune.TUNED[0]
    }
    count = len(tune.TUNED[0])
    assert sum("illegal memory access" in line for line in lines) == 2 * count
    assert sum("wrong results" in line for line in lines) == count


def test_the_table_stays_unless_it_is_wrong_or_clearly_slower(candidates):
    for times, found in (
        ("[1.0, 0.99]", {}),
        ("[1.0, None, 'end']", {}),
        ("[None, 'end']", {}),
        ("['end', 9.0]", {"warps": 1}),
    ):
        candidates(times)
        assert tune.tune(**CALL, echo=lambda line: None) == (
            dict.fromkeys(tune.TUNED[0], found) if found else {}
        )


@pytest.mark.quick
def test_a_process_that_tries_nothing_is_an_error(candidates):
    candidates("[].fail")
    with pytest.raises(RuntimeError, match="prepare_gdn cannot be measured: AttributeError"):
        tune.tune(**CALL, echo=lambda line: None)


@pytest.fixture
def tuning(monkeypatch, tmp_path):
    """Return the tuning module with its own file at `tuning.cache_file()`."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs triton")
    from kda_ops.backends.triton import tuning

    monkeypatch.setenv("KDA_OPS_TUNING", str(tmp_path / "folder" / "tuning.json"))
    tuning.forget()
    yield tuning
    tuning.forget()


def choose(kernel, p):
    from kda_ops.backends.triton import tuning

    return tuning.choose(kernel, p, tuning.KERNELS[kernel])


def call(K=128, **flags):
    q = torch.zeros(1, 64, 2, K, dtype=torch.bfloat16)
    v = torch.zeros(1, 64, 2, 128, dtype=torch.bfloat16)
    one = torch.ones(1, 64, 2)
    return Problem.parse(1, q, q, v, -torch.ones(1, 64, 2, K), one, **flags)


@pytest.mark.quick
def test_a_row_of_the_file_is_used_and_others_are_kept(tuning):
    p, found, other = call(), tuning.Rows(block_k=32, warps=8), tuning.Columns(block_v=16)
    assert choose("prepare_kda", p) == tuning.table("prepare_kda", p) != found
    tuning.save({"join_runs.any": other})
    assert tuning.save({tuning.row("prepare_kda", p): found}) == tuning.cache_file()
    assert choose("prepare_kda", p) == found and tuning.tuned()["join_runs.any"] == other
    assert choose("scan_kda", p) == tuning.table("scan_kda", p)


@pytest.mark.quick
def test_a_row_serves_a_call_without_keys_too(tuning):
    kernels = [n for n, kind in tuning.KERNELS.items() if kind in (tuning.Held, tuning.Runs)]
    w = tuning.Widths(torch.float32, torch.device("cpu"), 128, 128)
    plain = {n: choose(n, w) for n in kernels}
    found = {n: replace(o, warps=8) for n, o in plain.items()}
    tuning.save({tuning.row(n, w): o for n, o in found.items()})
    assert {n: choose(n, w) for n in kernels} == found != plain
    assert {n: choose(n, w._replace(invariant=True)) for n in kernels} == plain


def test_a_row_counts_for_the_source_of_its_own_kernel(tuning, monkeypatch):
    rows = {
        "prepare_gdn.any": tuning.Launch(warps=8),
        "scan_kda.any": tuning.Columns(block_v=16),
        "scan_kda_maps.any": tuning.Columns(block_v=16),
    }
    tuning.save(rows)
    assert tuning.tuned() == rows
    names = {n: tuning.source_of(n.split(".")[0]) for n in rows}
    assert len({*names.values()}) == 2 and names["scan_kda.any"] == names["scan_kda_maps.any"]
    changed = {"prepare_gdn": "another source"}
    source_of = tuning.source_of
    monkeypatch.setattr(tuning, "source_of", lambda name: changed.get(name) or source_of(name))
    tuning.forget()
    assert tuning.tuned().keys() == {"scan_kda.any", "scan_kda_maps.any"}


@pytest.mark.quick
def test_every_kernel_that_has_options_is_found(tuning):
    for name in tuning.KERNELS:
        kernel = tuning.kernel_of(name)
        assert name.startswith(kernel.fn.__name__), name


@pytest.mark.quick
def test_keys_that_do_not_fill_256_columns_have_rows_of_their_own(tuning):
    full, some = call(256), (call(129), call(255))
    (ragged,), even = tuning.TABLE["prepare_ragged"], tuning.TABLE["prepare_kda"][-1]
    blocks = [choose("prepare_kda", p).block_k for p in (call(100), call(), full, *some)]
    assert blocks == [even.options.block_k] * 3 + [ragged.options.block_k] * 2
    tuning.save({tuning.row("prepare_kda", full): tuning.Rows(block_k=128, warps=8)})
    assert choose("prepare_kda", full).warps == 8
    assert all(choose("prepare_kda", p) == tuning.table("prepare_kda", p) for p in some)


def test_a_file_of_another_machine_or_no_file_at_all_is_not_used(tuning):
    source, mine = {"source": tuning.source_of("prepare_gdn")}, tuning.fingerprint()
    row = {"prepare_gdn.a": {"warps": 8, "of_a_later_version": 1} | source}
    read = {"prepare_gdn.a": tuning.Launch(warps=8)}
    tuning.cache_file().parent.mkdir()
    for text, found in (
        (json.dumps({mine: row}), read),
        (json.dumps({mine + "0": row}), {}),
        ("{", {}),
        ("null", {}),
        ("[]", {}),
        (json.dumps({mine: [1]}), {}),
        (
            json.dumps(
                {
                    mine: {
                        "prepare_gdn.b": 1,
                        "prepare_gdn.c": {"warps": "8"} | source,
                        "prepare_gdn.d": {"registers": True} | source,
                        "prepare_gdn.e": {"warps": 8},  # of no known source
                        "scan_kda.f": {"source": tuning.source_of("scan_kda")},  # without a size
                        "no_kernel": {"warps": 8} | source,
                    }
                    | row
                }
            ),
            read,
        ),
    ):
        tuning.cache_file().write_text(text)
        tuning.forget()
        assert tuning.tuned() == found, text
        tuning.save({"prepare_gdn.new": tuning.Launch(warps=16)})
        assert tuning.tuned() == found | {"prepare_gdn.new": tuning.Launch(warps=16)}, text


def test_what_is_tuned_holds_for_a_device_and_a_compiler(tuning, monkeypatch):
    names = [tuning.fingerprint()]
    monkeypatch.setattr(tuning.triton, "__version__", "0.1")
    tuning.forget()
    names.append(tuning.fingerprint())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda,
        "get_device_name",
        lambda device: "GPU" if device is None else f"GPU {device.index}",
    )
    tuning.forget()
    names.append(tuning.fingerprint(torch.device("cpu")))
    # of the tensors' device, not of the current one
    assert tuning.fingerprint(torch.device("cuda", 1)).startswith("GPU 1|")
    monkeypatch.undo()
    tuning.forget()
    assert len(set(names)) == 3 and "GPU" in names[2] and "0.1" in names[2]
