"""``python -m kda_ops bench``: which cases it measures and in which order, what its command line
refuses, how rows are compared.
"""

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from kda_ops import __main__
from kda_ops.bench import compare, machine, rows
from kda_ops.bench.sides import Peer, our_forward, our_step
from tests.support.benchmark import SMALL, case, row

ROOT = Path(__file__).parents[2]


@pytest.mark.quick
def test_slower_rows_and_lost_times_are_losses():
    old = [row(), row(op="gdn"), row(gate="strong"), row(**{"pass": "decode"})]
    new = [
        row(ours_ms=1.04),
        row(op="gdn", ours_ms=1.06),
        row(gate="strong", ours_ms=None),
        row(setting="B2T1H1", ours_ms=9.0),
    ]
    lines, losses = rows.compare_rows(new, old)
    assert len(lines) == 3 and "+4.0%" in lines[0] and "+6.0%" in lines[1] and "no time" in lines[2]
    assert [name.split()[0] + name.split()[3] for name in losses] == ["gdnweak", "kdastrong"]


def test_a_row_is_compared_whichever_peer_it_stood_beside_before(tmp_path, monkeypatch, capsys):
    old = [row(peer="fla"), row(peer="sdpa", ours_ms=2.0)]
    assert rows.compare_rows([row(peer=None, ours_ms=9.0)], old)[1] == [
        rows.name_of(tuple(row(peer=None)[n] for n in rows.KEY))
    ]
    assert (
        rows.compare_rows([row(peer="sdpa", ours_ms=2.0)], old)[1] == []
        and rows.compare_rows([row(peer="cudnn", ours_ms=1.5)], old)[1]
    )
    file = tmp_path / "rows.json"
    file.write_text(json.dumps({"rows": [row(op="gdn")]}))
    monkeypatch.setattr(compare, "run", lambda device, **words: [row()])
    assert (
        compare.main(["--device", "cpu", "--against", str(file)]) == 1
        and "has a time of none of these cases" in capsys.readouterr().out
    )


def test_the_command_line_compares_and_writes(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compare, "run", lambda device, **words: [row(ours_ms=1.2)])
    old, new, drawn = tmp_path / "old.json", tmp_path / "new.json", tmp_path / "rows.svg"
    old.write_text(json.dumps({"rows": [row()]}))
    assert (
        compare.main(
            ["--device", "cpu", "--json", str(new), "--plot", str(drawn), "--against", str(old)]
        )
        == 1
    )
    assert "SLOWER: kda fwd" in capsys.readouterr().out
    assert rows.read_rows(new) == [row(ours_ms=1.2)] and "1 rows, 0 lost" in drawn.read_text()
    assert json.loads(new.read_text())["peers"].keys() == {"transformers", "fla-naive"}
    assert compare.main(["--device", "cpu", "--against", str(new)]) == 0


@pytest.mark.parametrize("command", ["bench", "bench --model", "counters", "drift", "parallel"])
def test_a_device_that_is_not_here_is_refused_in_words(command, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit):
        __main__.main([*command.split(), "--device", "cuda"])
    assert "torch finds no CUDA device here" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, said",
    [
        ("bench --settings foo", "a setting is written like B1T8192H96"),
        ("bench --settings B0T64H1", "a setting is written like B1T8192H96"),
        ("bench --settings B1T64H2HV3", "a setting has an HV that is a multiple of H"),
        ("bench --passes none", "'none' is none of fwd"),
        ("bench --ops gdn,", "'' is none of kda"),
        ("bench --device cpu --against benchmarks/results/parallel.json", "holds no rows of bench"),
        (
            "bench --device cpu --against benchmarks/results/evidence.json",
            "is of bfloat16, this run of float32",
        ),
        ("parallel --length 0", "--heads and --width must be at least 1"),
        (
            "parallel --device cpu --processes 2 --length 255",
            "--length must be a multiple of 2, the ranks that share it, got 255",
        ),
        ("parallel --width 300", "--width at most 256"),
        ("bench --peers foo", "'foo' is none of "),
        ("bench --against /no/such/file", "--against /no/such/file: "),
        ("bench --json /no/such/rows.json", "there is no folder /no/such"),
        ("bench --json tests", "tests cannot be written: it is a folder"),
        ("drift --plot tests", "tests cannot be written: it is a folder"),
        ("bench --plot /no/such/rows.svg", "there is no folder /no/such"),
        ("bench --readme --nonsense", "unrecognized arguments: --nonsense"),
        ("bench --model --heads 0", "--heads must be at least 1, got 0"),
        ("bench --model --steps 0", "--steps must be at least 1, got 0"),
        ("bench --model --backend foo", "--backend foo is none of"),
        ("counters --layers 0", "--layers must be at least 1, got 0"),
        ("bench --model --json /no/such/rows.json", "there is no folder /no/such"),
        ("counters --backend foo", "--backend foo is none of"),
        ("counters --json /no/such/rows.json", "there is no folder /no/such"),
        ("compile --jobs 0", "--jobs must be at least 1, got 0"),
        ("drift --width 300", "--width must be between 1 and 256, got 300"),
        ("bench --device cpu --peers fla", "--peers fla: it does not run on --device cpu"),
        (
            "bench --ops gdn --gates bound",
            "that gate is KDA's, and --ops gdn leaves nothing to measure",
        ),
        (
            "tune --setting 1,8192,96",
            "a call is written like B1T8192H96, its widths are -K and -V, got '1,8192,96'",
        ),
        ("tune --setting B1T64H8HV16", "its widths are -K and -V, got 'B1T64H8HV16'"),
        ("drift --json /no/such/rows.json", "there is no folder /no/such"),
        ("parallel --output /no/such/rows.json", "there is no folder /no/such"),
    ],
)
def test_a_wrong_option_is_refused_in_words_before_anything_is_measured(
    words, said, capsys, monkeypatch
):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as stopped:
        __main__.main(words.split())
    assert stopped.value.code == 2 and said in capsys.readouterr().err


def test_rows_are_compared_with_rows_of_their_dtype(monkeypatch, tmp_path, capsys):
    file, other = tmp_path / "rows.json", tmp_path / "other.json"
    monkeypatch.setattr(compare, "run", lambda device, **words: [row()])
    assert compare.main(["--device", "cpu", "--dtype", "bfloat16", "--json", str(file)]) == 0
    assert compare.main(["--device", "cpu", "--dtype", "bfloat16", "--against", str(file)]) == 0
    other.write_text("{}")
    for path, said in (
        (file, "is of bfloat16, this run of float32: pass --dtype bfloat16"),
        (other, "holds no rows"),
    ):
        with pytest.raises(SystemExit):
            compare.main(["--device", "cpu", "--against", str(path)])
        assert said in capsys.readouterr().err


def test_a_row_that_lost_its_time_or_its_process_fails_the_command(monkeypatch, tmp_path, capsys):
    file, skips = tmp_path / "rows.json", []
    file.write_text(json.dumps({"rows": [row(peer=None), row(peer="fla")]}))
    alone, beside = (
        rows.name_of(tuple(row(peer=None)[n] for n in rows.KEY)),
        rows.name_of(tuple(row(peer="fla")[n] for n in rows.KEY)),
    )

    def run(device, *, keep, **words):
        for line in skips:
            keep(line)
        return found

    monkeypatch.setattr(compare, "run", run)
    found = []
    skips[:] = [f"{alone}: out of time"]
    assert (
        compare.main(["--device", "cpu"]) == 1 and "nothing was measured" in capsys.readouterr().out
    )
    found = [row(peer="fla")]
    assert compare.main(["--device", "cpu"]) == 0
    found = []
    assert (
        compare.main(["--device", "cpu", "--against", str(file)]) == 1
        and "no time (out of time)" in capsys.readouterr().out
    )
    # perhaps the peer's doing: our side stands alone then
    skips[:] = [f"{beside}: the process ended with -11"]
    found = [row(peer=None)]
    assert compare.main(["--device", "cpu", "--against", str(file)]) == 0
    skips[:], found = [f"{alone}: the process ended with -11"], []
    assert compare.main(["--device", "cpu"]) == 1 and f"DIED: {alone}" in capsys.readouterr().out


def test_our_wrong_row_fails_the_command(monkeypatch, capsys):
    monkeypatch.setattr(compare, "run", lambda device, **words: [row(ours_ms=None)])
    assert compare.main(["--device", "cpu"]) == 1 and "WRONG" in capsys.readouterr().out


def test_every_case_of_the_default_table_is_one_that_some_peer_or_none_measures():
    cuda = compare.list_cases(
        "cuda", ["kda", "gdn"], compare.PASSES, compare.GATES, None, torch.bfloat16, None
    )
    seen = {(c.op, c.pass_, c.setting, c.gate) for c in cuda}
    for setting in ("B1T8192H96", "B8T4096H32"):
        assert {
            ("kda", p, setting, g)
            for p in ("fwd", "fwdbwd")
            for g in ("bound", "softplus", "strong", "weak")
        } <= seen
        assert {
            ("gdn", p, setting, g)
            for p in ("fwd", "fwdbwd")
            for g in ("softplus", "strong", "weak")
        } <= seen
    assert ("kda", "decode", "B128T1H32", "bound") in seen and not any(
        c.op == "gdn" and c.gate == "bound" for c in cuda
    )


def test_what_matters_most_is_measured_first():
    cases = compare.order(
        compare.list_cases(
            "cuda", ["kda", "gdn"], compare.PASSES, compare.GATES, None, torch.bfloat16, None
        )
    )
    names = [(c.op, c.pass_, c.gate) for c in cases]
    assert names[:4] == [("kda", p, "bound") for _ in range(2) for p in ("fwdbwd", "fwd")]
    assert (
        names.index(("kda", "decode", "bound"))
        < names.index(("kda", "fwdbwd", "strong"))
        < names.index(("kda", "first_call_s", "bound"))
    )


def test_what_a_peer_tunes_is_compiled_just_before_it_is_measured(monkeypatch):
    calls = []
    monkeypatch.setattr(
        compare,
        "peers_of",
        lambda device: [Peer("a", "cpu", None, our_forward, our_step, tunes=True)],
    )
    monkeypatch.setattr(
        compare,
        "compile_ahead",
        lambda cases, *rest: calls.append(("compile", {(c.op, c.gate, c.setting) for c in cases})),
    )
    monkeypatch.setattr(
        compare,
        "measure",
        lambda cases, peer, *rest: calls.append(("measure" if peer else "alone", cases)) or [],
    )
    words = dict(
        ops=("kda", "gdn"),
        passes=("fwd", "fwdbwd", "decode"),
        gates=("bound", "softplus", "weak"),
        settings=None,
        dtype=torch.float32,
    )
    compare.run("cpu", **words, peers=None, echo=lambda line: None)
    compiled = [i for i, (what, _) in enumerate(calls) if what == "compile"]
    for i in compiled:
        (shared,), (what, cases) = calls[i][1], calls[i + 1]
        assert (
            what == "measure"
            and {c.pass_ for c in cases} == {"fwd", "fwdbwd"}
            and {(c.op, c.gate, c.setting) for c in cases} == {shared}
        )
    measured = [c for what, cases in calls if what == "measure" for c in cases]
    assert (
        len(compiled) == 5
        and measured == compare.order(measured)
        and {c.pass_ for c in measured} == {"fwd", "fwdbwd", "decode"}
    )


def test_several_gpus_measure_whole_passes_side_by_side_and_the_first_one_alone_what_times_the_host(
    monkeypatch,
):
    # broken unless two are measured at a time
    calls, together = [], threading.Barrier(2, timeout=60)

    def measure(cases, peer, report, until, gpu):
        if cases[0].whole:
            together.wait()
        calls.append((cases, gpu))
        return [len(calls)]

    monkeypatch.setattr(compare, "peers_of", lambda device: [])
    monkeypatch.setattr(compare, "gpus", lambda device: ["4", "7"])
    monkeypatch.setattr(compare, "measure", measure)
    words = dict(
        ops=("kda",),
        passes=("fwd", "decode"),
        gates=("bound", "weak"),
        settings=[SMALL],
        dtype=torch.float32,
    )
    assert sorted(compare.run("cpu", **words, peers=None, echo=lambda line: None)) == [1, 2, 3]
    assert {gpu for cases, gpu in calls[:2]} == {"4", "7"} and all(
        c.whole for cases, _ in calls[:2] for c in cases
    )
    assert calls[2][1] == "4" and {c.pass_ for c in calls[2][0]} == {"decode"}


def test_a_table_out_of_time_names_what_it_lacks():
    said = []
    rows = compare.measure([case(setting="B1T64H1D16")] * 2, None, said.append, until=time.time())
    assert rows == [] and len(said) == 2 and all("out of time" in line for line in said)


def test_rows_at_hand_are_not_measured_again(monkeypatch):
    asked = []
    monkeypatch.setattr(compare, "peers_of", lambda device: [])
    monkeypatch.setattr(compare, "measure", lambda cases, *rest: asked.extend(cases) or [])
    words = dict(
        ops=["kda"],
        passes=["fwd"],
        gates=["weak", "strong"],
        settings=[SMALL],
        dtype=torch.float32,
        peers=None,
        echo=lambda line: None,
    )
    assert compare.run("cpu", have=[row(peer="fla")], **words) == [row(peer="fla")]
    assert [c.gate for c in asked] == ["strong"]


def test_a_peer_that_stands_beside_others_needs_one_of_them():
    assert Peer("x", "cpu", "torch", None, beside=("no-such-package", "pytest")).version
    assert Peer("x", "cpu", "torch", None, beside=("no-such-package",)).version is None


def test_a_whole_run_in_processes_of_its_own():
    options = "--device cpu --settings B1T64H1D16 --passes fwd --gates weak --peers none"
    done = subprocess.run(
        [sys.executable, "-m", "kda_ops", "bench", *options.split()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [line[:2] for line in lines if line[:1] in (["kda"], ["gdn"])] == [
        ["kda", "fwd"],
        ["gdn", "fwd"],
    ]


def test_a_file_that_is_read_while_it_is_replaced_is_whole(tmp_path):
    file, rounds, stop = tmp_path / "rows.json", [], threading.Event()
    machine.write_json(file, {"rows": [0]})

    def read():
        while not stop.is_set():
            rounds.append(file.read_text())

    reader = threading.Thread(target=read)
    reader.start()
    for n in range(1, 200):
        machine.write_json(file, {"rows": [n] * n * 50})
    stop.set()
    reader.join()
    assert len({len(json.loads(text)["rows"]) for text in rounds}) > 1 and list(
        tmp_path.iterdir()
    ) == [file]
