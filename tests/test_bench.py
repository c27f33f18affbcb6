"""The benchmark: what it measures, what it refuses to time, how it compares; no time is judged here."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kda_ops import __main__
from kda_ops.bench import cases, compare, machine, picture, readme, rows, worker
from kda_ops.bench.cases import Case, Oracle, activated, flags, make_inputs
from kda_ops.bench.sides import Peer, Unsupported, our_forward, our_step

SMALL = "B1T130H2HV4D16"
ROOT = Path(__file__).parents[1]


def case(op="kda", pass_="fwd", gate="weak", setting=SMALL, **words):
    return Case(op, pass_, setting, gate, "cpu", torch.float32, **words)


def row(**changed):
    base = dict(op="kda", setting=SMALL, gate="weak", state="fp32", layout="kv", peer="fla", ours_ms=1.0, peer_ms=2.0, ours_error=1e-3, peer_error=1e-3)
    return {"op": "kda", "pass": "fwd"} | base | {"also": {}} | changed


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(worker, "ROUNDS", 1)
    monkeypatch.setattr(worker, "median_ms", lambda call, device: (call(), 1.0)[1])


def test_a_setting_is_read_and_a_wrong_one_refused():
    assert case(setting="B1T65536H16HV32").sizes == dict(B=1, T=65536, H=16, HV=32, D=128)
    for wrong in ("T8H2", "B1T8H2X3", "B1 T8 H2", ""):
        with pytest.raises(ValueError, match="setting"):
            case(setting=wrong)


def test_a_case_survives_the_way_to_another_process():
    there = case("gdn", "decode", "softplus", state="bf16", layout="vk")
    assert Case.read(json.loads(json.dumps(there.spec()))) == there


@pytest.mark.parametrize("op", ["kda", "gdn"])
@pytest.mark.parametrize("gate", ["bound", "softplus", "strong", "weak"])
def test_plain_torch_activations_are_those_inside_the_operator(op, gate):
    if op == "gdn" and gate == "bound":
        pytest.skip("no row has it")
    c = case(op, gate=gate)
    x = {n: t.double() for n, t in make_inputs(c).items()}
    g, flag_words = activated(c, x)[3], flags(c)
    assert bool(flag_words) == (gate in ("bound", "softplus"))
    assert (g <= 0).all() and (gate not in ("bound", "strong") or (g >= -5).all())
    import kda_ops

    chunk = {"kda": kda_ops.chunk_kda, "gdn": kda_ops.chunk_gdn}[op]
    assert (our_forward(c)(x) - chunk(*activated(c, x))[0]).abs().max() < 1e-6  # one side activates in float32


@pytest.mark.parametrize("op", ["kda", "gdn"])
@pytest.mark.parametrize("pass_", ["fwd", "fwdbwd"])
def test_our_side_passes_its_check_and_gets_a_time(op, pass_):
    got = worker.whole(case(op, pass_, "softplus"), None, {})
    assert got["ours_ms"] == 1.0 and got["ours_error"] < 1e-3 and got["peer_ms"] is None
    assert set(got) == set(row())


def test_both_state_layouts_and_dtypes_decode():
    worker.copy_rate.cache_clear()
    for there in compare.list_cases("cpu", ["kda"], ["decode"], ["bound"], ["B3T1H2D16"], torch.float32, None):
        got = worker.decode(there, None, {})
        assert got["ours_ms"] == 1.0 and got["ours_error"] < 1e-6
        # a copy takes 1 ms too, so the share is that of the bytes
        assert got["also"]["ours_share"] == pytest.approx(3 * 2 * 16 * 16 * (2 if there.state == "bf16" else 4) / 2**28)
        assert got["also"]["ours_call_us"] > 1 and "peer_share" not in got["also"]
        assert "of a copy 0% | -, us per call" in rows.format_row(got)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="a system that does not say on which cores a thread may run")
def test_rounds_go_from_core_to_core_and_leave_the_thread_free():
    free, seen = os.sched_getaffinity(0), []
    try:
        os.sched_setaffinity(0, free)
    except OSError:
        pytest.skip("a system that does not let a thread choose its core")
    with pytest.raises(RuntimeError), worker.one_core_after_another() as move:
        for _ in free:
            move()
            seen.append(os.sched_getaffinity(0))
        raise RuntimeError
    assert all(len(cores) == 1 for cores in seen) and set().union(*seen) == free == os.sched_getaffinity(0)


def test_a_thread_that_may_not_choose_its_core_is_timed_where_it_is(monkeypatch):
    def refuse(*args):
        raise PermissionError

    monkeypatch.setattr(os, "sched_setaffinity", refuse, raising=False)
    assert worker.call_us(lambda: None, "cpu", count=1) > 0


def wrong_peer(change):
    def forward(c):
        ours = our_forward(c)
        return lambda x: ours(x) * change

    return Peer("wrong", "cpu", None, forward)


def test_a_side_that_is_wrong_gets_no_time():
    for change, timed in ((1.0, True), (1.01, False), (float("nan"), False)):
        got = worker.whole(case(pass_="fwdbwd"), wrong_peer(change), {})
        assert (got["peer_ms"] is not None) == timed and got["ours_ms"] is not None
        assert got["peer_error"] < 1e-5 if timed else got["peer_error"] > 9e-3


def test_what_computes_something_else_is_timed_without_an_error():
    peer = Peer("scale", "cpu", None, lambda c: lambda x: x["v"] * x["q"].sum(), same=False)
    got = worker.whole(case(pass_="fwdbwd"), peer, {})
    assert got["peer_ms"] == 1.0 and got["peer_error"] is None


def test_one_wrong_head_among_those_looked_at_is_an_error():
    c = case()
    x = make_inputs(c)
    o = our_forward(c)(x)
    oracle = Oracle(c, x, None)
    assert oracle.worst_share(oracle.errors({"o": o})) <= 1
    o[:, :, -1] = 0
    assert oracle.worst_share(oracle.errors({"o": o})) > 1


def training_inputs(c):
    x = make_inputs(c)
    return x, torch.randn(x["v"].shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("op,gate", [("kda", "bound"), ("gdn", "softplus"), ("kda", "strong")])
def test_the_oracle_of_a_gpu_and_that_of_a_cpu_agree_however_many_heads_they_take_at_once(op, gate, monkeypatch):
    c = case(op, "fwdbwd", gate, "B2T130H3HV6D16")
    native = Oracle(c, *training_inputs(c))
    monkeypatch.setattr(cases.dispatch, "load", lambda name: cases.Reference())
    monkeypatch.setattr(cases, "AT_ONCE", 1)
    reference = Oracle(c, *training_inputs(c))
    assert set(native.exact) == set(reference.exact) == {"o", *make_inputs(c)}
    for n, want in native.exact.items():
        assert want.dtype is torch.float64 and (reference.exact[n] - want).abs().max() <= 1e-12 * want.abs().max(), n
        assert reference.limits[n] == pytest.approx(native.limits[n], rel=0.1)


def test_compared_heads_are_spread_evenly_and_their_gradients_whole(monkeypatch):
    monkeypatch.setitem(cases.HEADS, "cpu", 3)
    c = case("gdn", "fwdbwd", "softplus", "B1T64H9HV18D16")
    oracle = Oracle(c, *training_inputs(c))
    assert oracle.key_heads.tolist() == [0, 4, 8] and oracle.exact["q"].shape[2] == 3 and oracle.exact["A_log"].shape == (6,)
    monkeypatch.setitem(cases.HEADS, "cpu", 9)
    every = Oracle(c, *training_inputs(c))
    for n, want in every.exact.items():
        heads = oracle.key_heads if n in "qk" else torch.tensor([0, 1, 8, 9, 16, 17])
        torch.testing.assert_close(oracle.exact[n], want.index_select(0 if n in ("A_log", "dt_bias") else 2, heads), rtol=1e-12, atol=1e-14)


class OneDevice(TorchDispatchMode):
    """Refuses an operation on tensors of more than one device, copies and numbers apart: of a tensor's own device kernels would be absent."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves((args, kwargs, out)) if isinstance(t, torch.Tensor) and t.dim()]
        assert function in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default) or len({t.device for t in tensors}) <= 1, function
        return out


@pytest.mark.parametrize("op,gate", [("kda", "bound"), ("gdn", "softplus"), ("kda", "strong")])
def test_the_oracle_stays_on_the_device_of_its_inputs(op, gate, monkeypatch):
    """On "meta", where tensors have no values: errors, which are numbers of the host, are left out."""
    monkeypatch.setitem(cases.HEADS, "meta", 2)
    monkeypatch.setattr(Oracle, "_error", lambda self, name, got: float((got.double() - self.exact[name]).device.type == "meta"))
    for setting in ("B2T130H3HV6D16", "B1T128H2D16"):
        c = case(op, "fwdbwd", gate, setting)
        x, do = training_inputs(c)
        x = {n: t.to("meta") for n, t in x.items()}
        with OneDevice():
            oracle = Oracle(c, x, do.to("meta"))
            assert oracle.errors({"o": do.to("meta")} | x) == dict.fromkeys(("o", *x), 1.0)
        assert {t.device.type for t in oracle.exact.values()} == {"meta"}


def test_a_row_names_the_worst_gradient_and_has_the_error_of_each(capsys):
    def forward(c):
        ours = our_forward(c)
        return lambda x: ours(x | {"beta": x["beta"].detach() + 1.5 * (x["beta"] - x["beta"].detach())})

    got = worker.whole(case("gdn", "fwdbwd", "softplus"), Peer("steep", "cpu", None, forward), {})
    ours, its = got["also"]["ours_errors"], got["also"]["peer_errors"]
    assert set(ours) == set(its) == {"o", *make_inputs(case("gdn"))} | {"A_log", "dt_bias"}
    assert got["also"]["peer_worst"] == "beta" and got["peer_error"] == pytest.approx(0.5, abs=1e-4) and its["beta"] == 0.5 and got["peer_ms"] is None
    assert max(e for n, e in its.items() if n != "beta") < 1e-4 and max(ours, key=ours.get) == got["also"]["ours_worst"]
    assert f"worst {got['also']['ours_worst']} | beta" in rows.format_row(got)
    assert f"({got['also']['ours_worst']}) |" in readme.table([got], "fwdbwd") and "(beta) |" in readme.table([got], "fwdbwd")
    assert "ours_worst" not in worker.whole(case("gdn", "fwd"), None, {})["also"]


def test_a_side_that_cannot_or_breaks_costs_its_row_or_its_time_alone(monkeypatch, capsys):
    def unable(c):
        raise Unsupported("not today")

    monkeypatch.setattr(worker, "PEERS", (Peer("unable", "cpu", None, unable), Peer("broken", "cpu", None, lambda c: lambda x: 1 / 0)))
    for name in ("unable", "broken"):
        worker.main([json.dumps({"peer": name, "cases": [case().spec(), case("gdn").spec()]})])
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert len(lines) == 2
        for line in lines:
            if name == "unable":
                assert "not today" in line["skip"]
            else:
                assert "ZeroDivisionError" in line["row"]["also"]["peer_says"]
                assert line["row"]["ours_ms"] == 1.0 and line["row"]["peer_ms"] is line["row"]["peer_error"] is None


def test_our_side_that_breaks_has_no_time(monkeypatch, capsys):
    monkeypatch.setattr(worker, "our_forward", lambda c: lambda x: 1 / 0)
    worker.main([json.dumps({"peer": None, "cases": [case().spec()]})])
    got = json.loads(capsys.readouterr().out)["row"]
    assert got["ours_ms"] is None and "ours says ZeroDivisionError" in rows.format_row(got)


def test_one_oracle_serves_both_passes(monkeypatch):
    made = []
    monkeypatch.setattr(worker, "Oracle", lambda *args: (made.append(args), Oracle(*args))[1])
    oracles = {}
    for pass_ in ("fwdbwd", "fwd"):
        assert worker.whole(case(pass_=pass_), None, oracles)["ours_ms"] == 1.0
    assert len(made) == 1


@pytest.mark.parametrize("op", ("kda", "gdn"))
def test_a_first_call_is_timed_with_backward_and_with_warm_caches(op):
    got = worker.first_call(case(op, "first_call_s", "softplus", "B1T64H1D16"), None, {})
    assert 0 < got["ours_ms"] < got["also"]["ours_fwdbwd_s"] and 0 < got["also"]["ours_warm_fwd_s"] < got["also"]["ours_warm_fwdbwd_s"]


def test_a_first_call_that_breaks_says_so():
    got = worker.first_call(case(pass_="first_call_s", gate="softplus", setting="B1T64H1D300"), None, {})
    assert got["ours_ms"] is None and "K" in got["also"]["ours_says"]


def test_every_share_of_a_tuning_is_compiled_by_some_process(monkeypatch):
    autotuner = pytest.importorskip("triton.runtime.autotuner")

    class Tuner:
        cache, seen = {}, []

        def prune_configs(self, kwargs):
            return list(range(10))

        def run(self):
            self.seen.append([c for c in self.prune_configs({}) if self.do_bench(lambda: None, None)])

    monkeypatch.setattr(autotuner, "Autotuner", Tuner)
    plain = Tuner.prune_configs, Tuner.run
    for i in range(3):
        worker.share(i, 3)
        Tuner().run()
        Tuner.prune_configs, Tuner.run = plain
    assert set().union(*Tuner.seen) == set(range(10)) and all(0 in some and len(some) <= 5 for some in Tuner.seen)


def test_stages_that_a_backend_lacks_are_named(monkeypatch):
    class Half:
        prepare = scan = None

    monkeypatch.setattr(worker.dispatch, "backend", lambda device: Half)
    assert worker._missing(case()) is None
    assert "reverse_scan, gradient" in worker._missing(case(pass_="fwdbwd"))
    assert "step" in worker._missing(case(pass_="decode"))


def test_slower_rows_and_lost_times_are_losses():
    old = [row(), row(op="gdn"), row(gate="strong"), row(**{"pass": "decode"})]
    new = [row(ours_ms=1.04), row(op="gdn", ours_ms=1.06), row(gate="strong", ours_ms=None), row(setting="B2T1H1", ours_ms=9.0)]
    lines, losses = rows.compare_rows(new, old)
    assert len(lines) == 3 and "+4.0%" in lines[0] and "+6.0%" in lines[1] and "no time" in lines[2]
    assert [name.split()[0] + name.split()[3] for name in losses] == ["gdnweak", "kdastrong"]


def test_the_command_line_compares_and_writes(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compare, "run", lambda device, **words: [row(ours_ms=1.2)])
    old, new, drawn = tmp_path / "old.json", tmp_path / "new.json", tmp_path / "rows.svg"
    old.write_text(json.dumps({"rows": [row()]}))
    assert compare.main(["--device", "cpu", "--json", str(new), "--plot", str(drawn), "--against", str(old)]) == 1
    assert "SLOWER: kda fwd" in capsys.readouterr().out
    assert rows.read_rows(new) == [row(ours_ms=1.2)] and "1 rows, 0 lost" in drawn.read_text()
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
        ("bench --device cpu --against tests/gpu/parallel.json", "holds no rows of bench"),
        ("bench --device cpu --against tests/gpu/evidence.json", "is of bfloat16, this run of float32"),
        ("parallel --length 0", "--heads and --width must be at least 1"),
        ("parallel --width 300", "--width at most 256"),
        ("bench --peers foo", "'foo' is none of "),
        ("bench --against /no/such/file", "--against: "),
        ("bench --json /no/such/rows.json", "there is no folder /no/such"),
        ("bench --plot /no/such/rows.svg", "there is no folder /no/such"),
        ("bench --readme --nonsense", "unrecognized arguments: --nonsense"),
        ("bench --model --json /no/such/rows.json", "there is no folder /no/such"),
        ("counters --backend foo", "--backend foo is none of"),
        ("counters --json /no/such/rows.json", "there is no folder /no/such"),
        ("compile --jobs 0", "--jobs must be at least 1, got 0"),
        ("drift --width 300", "--width must be between 1 and 256, got 300"),
        ("drift --json /no/such/rows.json", "there is no folder /no/such"),
        ("parallel --output /no/such/rows.json", "there is no folder /no/such"),
    ],
)
def test_a_wrong_option_is_refused_in_words_before_anything_is_measured(words, said, capsys, monkeypatch):
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
    for path, said in ((file, "is of bfloat16, this run of float32: pass --dtype bfloat16"), (other, "holds no rows")):
        with pytest.raises(SystemExit):
            compare.main(["--device", "cpu", "--against", str(path)])
        assert said in capsys.readouterr().err


def test_a_row_that_lost_its_time_or_its_process_fails_the_command(monkeypatch, tmp_path, capsys):
    file, skips = tmp_path / "rows.json", []
    file.write_text(json.dumps({"rows": [row(peer=None), row(peer="fla")]}))
    alone, beside = rows.name_of(tuple(row(peer=None)[n] for n in rows.KEY)), rows.name_of(tuple(row(peer="fla")[n] for n in rows.KEY))

    def run(device, *, keep, **words):
        for line in skips:
            keep(line)
        return found

    monkeypatch.setattr(compare, "run", run)
    found = []
    skips[:] = [f"{alone}: out of time"]
    assert compare.main(["--device", "cpu"]) == 0
    assert compare.main(["--device", "cpu", "--against", str(file)]) == 1 and "no time (out of time)" in capsys.readouterr().out
    skips[:] = [f"{beside}: the process ended with -11"]  # perhaps the peer's doing: our side stands alone then
    found = [row(peer=None)]
    assert compare.main(["--device", "cpu", "--against", str(file)]) == 0
    skips[:], found = [f"{alone}: the process ended with -11"], []
    assert compare.main(["--device", "cpu"]) == 1 and f"DIED: {alone}" in capsys.readouterr().out


def test_our_wrong_row_fails_the_command(monkeypatch, capsys):
    monkeypatch.setattr(compare, "run", lambda device, **words: [row(ours_ms=None)])
    assert compare.main(["--device", "cpu"]) == 1 and "WRONG" in capsys.readouterr().out


def test_every_case_of_the_default_table_is_one_that_some_peer_or_none_measures():
    cuda = compare.list_cases("cuda", ["kda", "gdn"], compare.PASSES, compare.GATES, None, torch.bfloat16, None)
    seen = {(c.op, c.pass_, c.setting, c.gate) for c in cuda}
    for setting in ("B1T8192H96", "B8T4096H32"):
        assert {("kda", p, setting, g) for p in ("fwd", "fwdbwd") for g in ("bound", "softplus", "strong", "weak")} <= seen
        assert {("gdn", p, setting, g) for p in ("fwd", "fwdbwd") for g in ("softplus", "strong", "weak")} <= seen
    assert ("kda", "decode", "B128T1H32", "bound") in seen and not any(c.op == "gdn" and c.gate == "bound" for c in cuda)


def test_what_matters_most_is_measured_first():
    cases = compare.order(compare.list_cases("cuda", ["kda", "gdn"], compare.PASSES, compare.GATES, None, torch.bfloat16, None))
    names = [(c.op, c.pass_, c.gate) for c in cases]
    assert names[:4] == [("kda", p, "bound") for _ in range(2) for p in ("fwdbwd", "fwd")]
    assert names.index(("kda", "decode", "bound")) < names.index(("kda", "fwdbwd", "strong")) < names.index(("kda", "first_call_s", "bound"))


def test_what_a_peer_tunes_is_compiled_just_before_it_is_measured(monkeypatch):
    calls = []
    monkeypatch.setattr(compare, "peers_of", lambda device: [Peer("a", "cpu", None, our_forward, our_step, tunes=True)])
    monkeypatch.setattr(compare, "compile_ahead", lambda cases, *rest: calls.append(("compile", {(c.op, c.gate, c.setting) for c in cases})))
    monkeypatch.setattr(compare, "measure", lambda cases, peer, *rest: calls.append(("measure" if peer else "alone", cases)) or [])
    words = dict(ops=("kda", "gdn"), passes=("fwd", "fwdbwd", "decode"), gates=("bound", "softplus", "weak"), settings=None, dtype=torch.float32)
    compare.run("cpu", **words, peers=None, echo=lambda line: None)
    compiled = [i for i, (what, _) in enumerate(calls) if what == "compile"]
    for i in compiled:
        (shared,), (what, cases) = calls[i][1], calls[i + 1]
        assert what == "measure" and {c.pass_ for c in cases} == {"fwd", "fwdbwd"} and {(c.op, c.gate, c.setting) for c in cases} == {shared}
    measured = [c for what, cases in calls if what == "measure" for c in cases]
    assert len(compiled) == 5 and measured == compare.order(measured) and {c.pass_ for c in measured} == {"fwd", "fwdbwd", "decode"}


def test_several_gpus_measure_whole_passes_side_by_side_and_the_first_one_alone_what_times_the_host(monkeypatch):
    calls, together = [], threading.Barrier(2, timeout=60)  # broken unless two are measured at a time

    def measure(cases, peer, report, until, gpu):
        if cases[0].whole:
            together.wait()
        calls.append((cases, gpu))
        return [len(calls)]

    monkeypatch.setattr(compare, "peers_of", lambda device: [])
    monkeypatch.setattr(compare, "gpus", lambda device: ["4", "7"])
    monkeypatch.setattr(compare, "measure", measure)
    words = dict(ops=("kda",), passes=("fwd", "decode"), gates=("bound", "weak"), settings=[SMALL], dtype=torch.float32)
    assert sorted(compare.run("cpu", **words, peers=None, echo=lambda line: None)) == [1, 2, 3]
    assert {gpu for cases, gpu in calls[:2]} == {"4", "7"} and all(c.whole for cases, _ in calls[:2] for c in cases)
    assert calls[2][1] == "4" and {c.pass_ for c in calls[2][0]} == {"decode"}


def test_a_table_out_of_time_names_what_it_lacks():
    said = []
    rows = compare.measure([case(setting="B1T64H1D16")] * 2, None, said.append, until=time.time())
    assert rows == [] and len(said) == 2 and all("out of time" in line for line in said)


def test_rows_at_hand_are_not_measured_again(monkeypatch):
    asked = []
    monkeypatch.setattr(compare, "peers_of", lambda device: [])
    monkeypatch.setattr(compare, "measure", lambda cases, *rest: asked.extend(cases) or [])
    words = dict(ops=["kda"], passes=["fwd"], gates=["weak", "strong"], settings=[SMALL], dtype=torch.float32, peers=None, echo=lambda line: None)
    assert compare.run("cpu", have=[row(peer="fla")], **words) == [row(peer="fla")]
    assert [c.gate for c in asked] == ["strong"]


def test_a_peer_that_stands_beside_others_needs_one_of_them():
    assert Peer("x", "cpu", "torch", None, beside=("no-such-package", "pytest")).version
    assert Peer("x", "cpu", "torch", None, beside=("no-such-package",)).version is None


EVIDENCE = {"gpu": "G", "torch": "1", "triton": "2", "tests": {"passed": 5, "failed": 1, "skipped": 0}}


def test_a_readme_gets_every_row_between_its_markers():
    evidence = EVIDENCE | {"rows": [row(ours_ms=4.0), row(**{"pass": "decode"}, ours_ms=None)]}
    text = "a\n<!-- evidence: fwd -->\nold\n<!-- end -->\nb\n<!-- evidence -->\n<!-- end -->\nc\n"
    new = readme.rewrite(text, evidence)
    assert "old" not in new and new.count("0.50×") == 2 and "5 passed, 1 failed" in new  # losses are shown
    assert readme.rewrite("<!-- evidence: first_call_s -->\nold\n<!-- end -->", evidence) == "<!-- evidence: first_call_s -->\n<!-- end -->"
    assert new.count("decode") == 1 and new.startswith("a\n") and new.endswith("c\n")
    assert readme.rewrite(new, evidence) == new
    decode = row(**{"pass": "decode"}, also={"ours_share": 0.91, "ours_call_us": 27.2, "peer_share": 0.7})
    assert readme.table([decode], "decode").endswith("| 91% / 70% | 27 / – |")
    assert len({line.count("|") for line in readme.table([decode], "decode").splitlines()}) == 1
    assert readme.rewrite(text, evidence, {"x.svg": "words"}).count("![words](tests/gpu/x.svg)") == 1
    missing = {"kda fwd B1 weak fp32 kv fla": "out of time", "kda fwd B2 weak fp32 kv fla": "it has none", "tests/gpu": "cut"}
    lacking = readme.rewrite(text, evidence | {"missing": missing})
    assert "not reached" not in new and lacking.count("1 rows were not reached") == 2 and "decode" in lacking.split("1 rows were not reached")[2]
    earlier = readme.rewrite(text, evidence | {"earlier": [row(peer="older")]})
    assert earlier.count("Measured on earlier kernels") == 2 and earlier.count("| older |") == 2


def test_the_picture_has_a_dot_for_every_row_and_losses_left_of_one():
    rows = [row(ours_ms=m, **{"pass": p}) for p in ("fwd", "decode") for m in (0.002, 0.5, 4.0)] + [row(ours_ms=None), row(peer="sdpa", peer_error=None)]
    root = ElementTree.fromstring(picture.draw(rows, "G <1>"))
    dots = {kind: [float(c.get("cx")) for c in root.findall(".//{*}circle") if c.get("class") == kind] for kind in ("won", "lost")}
    one = [float(line.get("x1")) for line in root.findall(".//{*}line") if line.get("class") == "one"]
    assert len(dots["won"]) == 5 and len(dots["lost"]) == 2 and max(dots["lost"]) < one[0] < min(dots["won"])
    words = [t.text for t in root.findall(".//{*}text")]
    assert "7 rows, 2 lost. G <1>" in words and "kda decode · fla" in words and "kda fwd · sdpa, for scale" in words
    width = float(root.get("viewBox").split()[2])
    assert all(0 < x < width for x in dots["won"] + dots["lost"])
    assert ElementTree.fromstring(picture.draw([], "")) is not None


def test_the_readme_command_writes_the_picture_and_nothing_without_evidence(tmp_path):
    (tmp_path / "tests" / "gpu").mkdir(parents=True)
    text, evidence = "a\n<!-- evidence -->\n<!-- end -->\n", EVIDENCE | {"rows": [row()]}
    (tmp_path / "README.md").write_text(text)
    with pytest.raises(SystemExit, match="does not exist"):
        readme.main([str(tmp_path)])
    assert (tmp_path / "README.md").read_text() == text and not list((tmp_path / "tests" / "gpu").iterdir())
    (tmp_path / "tests" / "gpu" / "evidence.json").write_text(json.dumps(evidence))
    assert readme.main([str(tmp_path)]) == 0
    written = (tmp_path / "README.md").read_text()
    assert "(tests/gpu/evidence.svg)" in written and "drift.png" not in written and "2.00×" in written
    assert ElementTree.parse(tmp_path / "tests" / "gpu" / "evidence.svg") is not None
    assert readme.main([str(tmp_path)]) == 0 and (tmp_path / "README.md").read_text() == written
    (tmp_path / "tests" / "gpu" / "evidence.json").write_text(json.dumps(evidence | {"rows": [row(peer=None, peer_ms=None)]}))
    assert readme.main([str(tmp_path)]) == 0 and not (tmp_path / "tests" / "gpu" / "evidence.svg").exists()  # nothing to compare
    assert "evidence.svg" not in (tmp_path / "README.md").read_text()


def test_a_whole_run_in_processes_of_its_own():
    options = "--device cpu --settings B1T64H1D16 --passes fwd --gates weak --peers none"
    done = subprocess.run([sys.executable, "-m", "kda_ops", "bench", *options.split()], capture_output=True, text=True, timeout=120, check=True)
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [line[:2] for line in lines if line[:1] in (["kda"], ["gdn"])] == [["kda", "fwd"], ["gdn", "fwd"]]


def test_parallel_leaves_the_file_of_the_gpus_alone_without_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    file, small = ROOT / "tests" / "gpu" / "parallel.json", "--device cpu --length 64 --heads 1 --width 16 --time-limit 0".split()
    before = file.read_bytes()
    done = subprocess.run([sys.executable, "-m", "kda_ops", "parallel", *small], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and '"fwd_ms"' in done.stdout and file.read_bytes() == before


def parallel(file, *more):
    command = [sys.executable, "-m", "kda_ops", "parallel", "--device", "cpu", "--length", "256", "--heads", "2", "--width", "16", "--output", str(file), *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)})


def test_parallel_writes_times_and_the_bytes_that_the_documentation_computes(tmp_path):
    file = tmp_path / "parallel.json"
    with parallel(file) as process:
        assert process.stdout.readline() and process.stdout.readline()  # a row stands in the file before the next one is printed
        assert json.loads(file.read_text())["rows"] and process.wait(120) == 0
    assert json.loads(file.read_text())["missing"] == []
    for found in (json.loads(file.read_text()), json.loads((ROOT / "tests" / "gpu" / "parallel.json").read_text())):
        measured = {(r["op"], r["gate"], r["gpus"]) for r in found["rows"]}
        assert measured >= {(op, gate, n) for op in ("kda", "gdn") for gate in ("strong", "weak") for n in (1, 2)}
        for row in found["rows"]:
            assert row["fwd_ms"] > 0 and row["fwdbwd_ms"] > 0
            assert row["gpus"] == 1 or row["sent_bytes"] == row["computed_bytes"] > 0


def test_parallel_out_of_time_has_what_it_reached_and_names_the_rest(tmp_path):
    file = tmp_path / "parallel.json"
    with parallel(file, "--time-limit", "0") as process:
        said = process.communicate(timeout=120)[0]
    found = json.loads(file.read_text())
    assert process.returncode == 0 and [(r["op"], r["gate"], r["gpus"]) for r in found["rows"]] == [("kda", "strong", 1)]
    assert len(found["missing"]) == 7 and found["missing"][0] == "kda strong on 2" and said.rstrip().endswith(", ".join(found["missing"]))


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
    assert len({len(json.loads(text)["rows"]) for text in rounds}) > 1 and list(tmp_path.iterdir()) == [file]
