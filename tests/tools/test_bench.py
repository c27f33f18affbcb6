"""The benchmark: what it measures, what it refuses to time, what it prints; no time is judged."""

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import kda_ops
from benchmarks import cuts, peers, runner, tables, worker
from benchmarks.peers import Peer, Unsupported, activated, our_forward
from kda_ops.tools import oracle as oracles
from kda_ops.tools import timer
from kda_ops.tools.cases import GATES, KDA_GATES, OURS, PASSES, Case, flags, make_inputs
from kda_ops.tools.oracle import Oracle
from tests.support.benchmark import case, row

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    worker.oracle_of.cache_clear()
    monkeypatch.setattr(worker, "ROUNDS", 1)
    monkeypatch.setattr(worker, "median_ms", lambda call, device: (call(), 1.0)[1])


def test_a_setting_is_read_and_a_wrong_one_refused():
    assert case(setting="B1T65536H16HV32").sizes == dict(B=1, T=65536, H=16, HV=32, D=128)
    for wrong in ("T8H2", "B1T8H2X3", "B1 T8 H2", ""):
        with pytest.raises(ValueError, match="setting"):
            case(setting=wrong)


@pytest.mark.parametrize("op", ["kda", "gdn"])
@pytest.mark.parametrize("gate", GATES)
def test_plain_torch_activations_are_those_inside_the_operator(op, gate):
    if op == "gdn" and gate in KDA_GATES:
        pytest.skip("no row has it")
    c = case(op, gate=gate)
    x = {n: t.double() for n, t in make_inputs(c).items()}
    g, flag_words = activated(c, x)[3], flags(c)
    assert (
        flag_words.get("use_gate_in_kernel", False) == (gate in ("bound", "softplus"))
        and flag_words.get("safe_gate", False) == c.safe
        and all(flag_words.get(n, False) == c.promised for n in OURS)
    )
    assert (g <= 0).all() and (gate == "softplus" or (g >= -5).all())
    chunk = {"kda": kda_ops.chunk_kda, "gdn": kda_ops.chunk_gdn}[op]
    # one side activates in float32
    assert (our_forward(c)(x) - chunk(*activated(c, x))[0]).abs().max() < 1e-6


@pytest.mark.quick
@pytest.mark.parametrize("op", ["kda", "gdn"])
@pytest.mark.parametrize("pass_", ["fwd", "fwdbwd"])
def test_our_side_passes_its_check_and_gets_a_time(op, pass_):
    got = worker.whole(case(op, pass_, "softplus"), None)
    assert got["ours_ms"] == 1.0 and got["ours_error"] < 1e-3 and got["peer_ms"] is None
    assert set(got) == set(row())


@pytest.mark.parametrize(
    "wrong",
    [
        lambda o, pool: pool.zero_(),
        lambda o, pool: o[1].fill_(7),
        lambda o, pool: pool[1, 0, 0, 0].fill_(torch.nan),
    ],
)
@pytest.mark.parametrize("state", ["fp32", "bf16"])
def test_a_decode_that_is_wrong_anywhere_gets_no_time(wrong, state, monkeypatch):
    monkeypatch.setattr(worker, "host_us", lambda call, device: 1.0)
    there = case("kda", "decode", "softplus", "B3T1H2D16", state=state)

    def step(c, x):
        def call(pool):
            o, pool = peers.our_step(c, x)(pool)
            wrong(o, pool)
            return o, pool

        return call

    got = worker.decode(there, Peer("wrong", "cpu", "", our_forward, step))
    assert got["ours_ms"] == 1.0 and got["peer_ms"] is None and not got["peer_error"] < 1e-2


def test_rounds_go_from_core_to_core_and_leave_the_thread_free(monkeypatch):
    if not hasattr(os, "sched_getaffinity"):
        pytest.skip("a system that does not say on which cores a thread may run")
    free, seen = os.sched_getaffinity(0), []
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: seen.append(cores))
    timer.host_us(lambda: None, "cpu", count=1)
    assert all(len(cores) == 1 for cores in seen[:-1]) and len(seen) == 21
    assert set().union(*seen[:-1]) == free == seen[-1]


def test_a_thread_that_may_not_choose_its_core_is_timed_where_it_is(monkeypatch):
    def refuse(*args):
        raise PermissionError

    monkeypatch.setattr(os, "sched_setaffinity", refuse, raising=False)
    assert timer.host_us(lambda: None, "cpu", count=1) > 0


def wrong_peer(change):
    def forward(c):
        ours = our_forward(c)
        return lambda x: ours(x) * change

    return Peer("wrong", "cpu", "", forward)


@pytest.mark.quick
def test_a_side_that_is_wrong_gets_no_time():
    for change, timed in ((1.0, True), (1.01, False), (float("nan"), False)):
        got = worker.whole(case(pass_="fwdbwd"), wrong_peer(change))
        assert (got["peer_ms"] is not None) == timed and got["ours_ms"] is not None
        assert got["peer_error"] < 1e-5 if timed else got["peer_error"] > 9e-3


def test_one_wrong_head_among_those_looked_at_is_an_error():
    c = case()
    x = make_inputs(c)
    o = our_forward(c)(x)
    oracle = Oracle(c, x, None)
    assert oracle.worst_share(oracle.errors({"o": o})) <= 1
    o[:, :, -1] = 0
    assert oracle.worst_share(oracle.errors({"o": o})) > 1


@pytest.mark.parametrize(
    "dtype, least, most", [(torch.bfloat16, 1e-3, 5e-2), (torch.float32, 1e-7, 1e-5)]
)
def test_a_budget_is_that_of_its_dtype(dtype, least, most):
    c = replace(case(), dtype=dtype)
    assert least < Oracle(c, make_inputs(c), None).limits["o"] < most


def test_our_decode_names_its_slots(monkeypatch):
    seen = []
    monkeypatch.setattr("kda_ops.recurrent_kda_", lambda *args, **words: seen.append(args))
    c = case(pass_="decode", gate="bound", setting="B3T1H2D16")
    peers.our_step(c, make_inputs(c))(torch.zeros(3, 2, 16, 16))
    assert seen[0][6].tolist() == [0, 1, 2] and seen[0][8] is not None


def training_inputs(c):
    x = make_inputs(c)
    return x, torch.randn(x["v"].shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("op,gate", [("kda", "bound"), ("gdn", "softplus"), ("kda", "strong")])
def test_the_oracle_of_a_gpu_and_that_of_a_cpu_agree_however_many_heads_they_take_at_once(
    op, gate, monkeypatch
):
    c = case(op, "fwdbwd", gate, "B2T130H3HV6D16")
    native = Oracle(c, *training_inputs(c))
    monkeypatch.setattr(oracles.dispatch, "load", lambda name: oracles.Reference())
    monkeypatch.setattr(oracles, "AT_ONCE", 1)
    reference = Oracle(c, *training_inputs(c))
    assert set(native.exact) == set(reference.exact) == {"o", *make_inputs(c)}
    for n, want in native.exact.items():
        assert (
            want.dtype is torch.float64
            and (reference.exact[n] - want).abs().max() <= 1e-12 * want.abs().max()
        ), n
        assert reference.limits[n] == pytest.approx(native.limits[n], rel=0.1)


def test_compared_heads_are_spread_evenly_and_their_gradients_whole(monkeypatch):
    monkeypatch.setitem(oracles.HEADS, "cpu", 3)
    c = case("gdn", "fwdbwd", "softplus", "B1T64H9HV18D16")
    oracle = Oracle(c, *training_inputs(c))
    assert (
        oracle.key_heads.tolist() == [0, 4, 8]
        and oracle.exact["q"].shape[2] == 3
        and oracle.exact["A_log"].shape == (6,)
    )
    monkeypatch.setitem(oracles.HEADS, "cpu", 9)
    every = Oracle(c, *training_inputs(c))
    for n, want in every.exact.items():
        heads = oracle.key_heads if n in "qk" else torch.tensor([0, 1, 8, 9, 16, 17])
        torch.testing.assert_close(
            oracle.exact[n],
            want.index_select(0 if n in ("A_log", "dt_bias") else 2, heads),
            rtol=1e-12,
            atol=1e-14,
        )


class OneDevice(TorchDispatchMode):
    """Refuses an operation on tensors of more than one device, copies and numbers apart: of a
    tensor's own device kernels would be absent.
    """

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        tensors = [
            t for t in tree_leaves((args, kwargs, out)) if isinstance(t, torch.Tensor) and t.dim()
        ]
        assert (
            function in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
            or len({t.device for t in tensors}) <= 1
        ), function
        return out


@pytest.mark.parametrize("op,gate", [("kda", "bound"), ("gdn", "softplus"), ("kda", "strong")])
def test_the_oracle_stays_on_the_device_of_its_inputs(op, gate, monkeypatch):
    """On "meta", where tensors have no values: errors, which are numbers of the host, are left
    out.
    """
    monkeypatch.setitem(oracles.HEADS, "meta", 2)
    monkeypatch.setattr(
        Oracle,
        "_error",
        lambda self, name, got: float((got.double() - self.exact[name]).device.type == "meta"),
    )
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
        return lambda x: ours(
            x | {"beta": x["beta"].detach() + 1.5 * (x["beta"] - x["beta"].detach())}
        )

    got = worker.whole(case("gdn", "fwdbwd", "softplus"), Peer("steep", "cpu", "", forward))
    ours, its = got["also"]["ours_errors"], got["also"]["peer_errors"]
    assert set(ours) == set(its) == {"o", *make_inputs(case("gdn"))} | {"A_log", "dt_bias"}
    assert (
        got["also"]["peer_worst"] == "beta"
        and got["peer_error"] == pytest.approx(0.5, abs=1e-4)
        and its["beta"] == 0.5
        and got["peer_ms"] is None
    )
    assert (
        max(e for n, e in its.items() if n != "beta") < 1e-4
        and max(ours, key=ours.get) == got["also"]["ours_worst"]
    )
    assert f"({got['also']['ours_worst']}) |" in tables.row_line(
        got
    ) and "(beta) |" in tables.row_line(got)
    assert "ours_worst" not in worker.whole(case("gdn", "fwd"), None)["also"]


def test_given_decays_are_those_of_their_gate_and_keys_have_unit_length():
    for gate, least in (
        ("strong", -5.0),
        ("weak", -0.1),
        ("strong_safe", -5.0),
        ("weak_safe", -0.1),
    ):
        x = make_inputs(replace(case(gate=gate), dtype=torch.bfloat16))
        assert least <= x["g"].min() < 0.95 * least and x["g"].max() <= 0
        assert x["g"].dtype is torch.float32 and x["beta"].dtype is x["q"].dtype is torch.bfloat16
        torch.testing.assert_close(
            x["k"].float().norm(dim=-1), torch.ones(1, 130, 2), rtol=0, atol=0.01
        )


def test_both_state_layouts_and_dtypes_decode(monkeypatch):
    timer.copy_rate.cache_clear()
    monkeypatch.setattr(timer, "median_ms", lambda call, device: 1.0)  # of a copy
    args = argparse.Namespace(ops=["kda"], passes=["decode"], gates=["bound"])
    args.settings = ["B3T1H2D16"]
    cases = list(runner.list_cases(args, "cpu", torch.float32))
    assert {(c.state, c.layout) for c in cases} == {
        (s, o) for s in ("fp32", "bf16") for o in ("kv", "vk")
    }
    for there in cases:
        got = worker.decode(there, None)
        assert got["ours_ms"] == 1.0 and got["ours_error"] < 1e-6
        assert got["also"]["ours_share"] == pytest.approx(
            3 * 2 * 16 * 16 * (2 if there.state == "bf16" else 4) / 2**28
        )
        assert got["also"]["ours_call_us"] > 1 and "peer_share" not in got["also"]
        assert tables.row_line(got, "decode").endswith("/ – |")
    timer.copy_rate.cache_clear()


def test_a_case_has_a_name_that_leads_back_to_it():
    there = case("gdn", "decode", "softplus", state="bf16", layout="vk")
    assert Case.named(there.name, "cpu", torch.float32) == there
    work = worker.work_of([there], None)
    assert work["cases"] == [there.name] and getattr(torch, work["dtype"]) is there.dtype


def say(monkeypatch, capsys, peer, *cases):
    """Return what a worker prints of some cases next to a peer."""
    monkeypatch.setattr(worker, "PEERS", [peer] if peer else [])
    work = worker.work_of(list(cases), peer and peer.name)
    worker.main([json.dumps(work)])
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_a_side_that_cannot_or_breaks_costs_its_row_or_its_time_alone(monkeypatch, capsys):
    def unable(c):
        raise Unsupported("not today")

    both = case(), case("gdn")
    for line in say(monkeypatch, capsys, Peer("unable", "cpu", "", unable), *both):
        assert line["why"] == "not today" and line["name"].endswith(" unable")
    broken = Peer("broken", "cpu", "", lambda c: lambda x: 1 / 0)
    for line in say(monkeypatch, capsys, broken, *both):
        got = line["row"]
        assert "ZeroDivisionError" in got["also"]["peer_says"] and got["ours_ms"] == 1.0
        assert got["peer_ms"] is got["peer_error"] is None


def test_our_side_that_breaks_has_no_time(monkeypatch, capsys):
    monkeypatch.setattr(worker, "our_forward", lambda c: lambda x: 1 / 0)
    (line,) = say(monkeypatch, capsys, None, case())
    assert line["row"]["ours_ms"] is None and "Zero" in line["row"]["also"]["ours_says"]


@pytest.mark.parametrize("op", ("kda", "gdn"))
def test_a_first_call_is_timed_in_a_process_of_its_own(op):
    got = worker.first_call(case(op, "first_call_s", "softplus", "B1T64H1D16"), None)
    assert 0 < got["ours_error"] < 1e-5 and 0 < got["ours_ms"] < got["also"]["ours_fwdbwd_s"]


def test_a_first_call_that_breaks_says_so():
    got = worker.first_call(case("kda", "first_call_s", "softplus", "B1T64H1D300"), None)
    assert got["ours_ms"] is None and "K" in got["also"]["ours_says"]


@pytest.mark.parametrize("share, timed", ((0.9, True), (1.1, False), (float("nan"), False)))
def test_a_first_call_that_is_wrong_gets_no_time(share, timed, monkeypatch):
    found = {"fwd_s": 1.0, "error": 0.3, "share": share, "fwdbwd_s": 2.0}
    monkeypatch.setattr(worker, "apart", lambda *words: dict(found))
    got = worker.first_call(case(pass_="first_call_s"), None)
    assert (got["ours_ms"] == 1.0) == timed == ("ours_fwdbwd_s" in got["also"])
    monkeypatch.setattr(worker, "apart", lambda *words: {"fwd_s": 1.0, "says": "OutOfMemoryError"})
    got = worker.first_call(case(pass_="first_call_s"), None)
    assert got["ours_ms"] is None and got["also"] == {"ours_says": "OutOfMemoryError"}


def listed(device="cuda", **changed):
    words = dict(ops=["kda", "gdn"], passes=list(PASSES), gates=list(GATES), settings=None)
    return list(runner.list_cases(argparse.Namespace(**words | changed), device, torch.bfloat16))


def test_the_default_table_has_every_pass_gate_and_setting():
    seen = {(c.op, c.pass_, c.setting, c.gate) for c in listed()}
    for setting in ("B1T8192H96", "B8T4096H32"):
        for op, gates in (("kda", GATES), ("gdn", ("softplus", "strong", "weak"))):
            assert {(op, p, setting, g) for p in ("fwd", "fwdbwd") for g in gates} <= seen
    assert ("kda", "decode", "B128T1H32", "bound") in seen
    assert {s for _, p, s, _ in seen if p == "model"} == {"B4T4096H16"}
    assert not [c for c in listed() if c.op == "gdn" and c.gate in KDA_GATES]
    assert listed(ops=["gdn"], gates=["bound"]) == []


def test_peers_have_their_turn_and_what_none_did_is_measured_alone(monkeypatch):
    asked = []
    step = Peer("step", "cpu", "", our_forward, peers.our_step)
    chunk = Peer("chunk", "cpu", "", our_forward)

    def measure(cases, peer, keep, until):
        asked.append((peer and peer.name, [c.pass_ for c in cases]))
        for c in cases if peer is not step else ():
            done = row(**{"pass": c.pass_}, setting=c.setting, peer=peer and peer.name)
            keep(done if c.pass_ == "fwd" else {"name": c.name, "why": "no"})

    monkeypatch.setattr(runner, "measure", measure)
    runner.run([case(pass_=p) for p in ("fwdbwd", "fwd", "decode")], [step, chunk], print)
    assert asked == [
        ("step", ["decode", "fwd", "fwdbwd"]),
        ("chunk", ["fwd", "fwdbwd"]),
        (None, ["decode", "fwdbwd"]),
    ]


def test_a_run_out_of_time_names_what_it_lacks():
    said = []
    cases = [case(setting="B1T64H1D16"), case("gdn", setting="B1T64H1D16")]
    runner.measure(cases, None, said.append, until=time.time())
    assert [line["why"] for line in said] == ["out of time"] * 2
    assert [line["name"] for line in said] == [f"{c.name} alone" for c in cases]


def test_a_process_that_dies_is_named(monkeypatch):
    said = []
    monkeypatch.setattr(sys, "executable", "false")
    runner.measure([case()], None, said.append)
    assert said == [{"name": f"{case().name} alone", "why": "the process ended with 1"}]


def test_a_row_of_ours_without_a_time_fails_the_command(monkeypatch, capsys):
    alone = {"name": f"{case().name} alone", "why": "no"}
    for found, code in (
        (row(), 0),
        (row(ours_ms=None), 1),
        (alone, 1),
        (alone | {"name": f"{case().name} fla"}, 1),  # nothing was measured
    ):
        monkeypatch.setattr(runner, "run", lambda c, p, keep, until, f=found: keep(f))
        assert runner.main(["--device", "cpu", "--peers", "none"]) == code, found
    assert "no time of ours: kda fwd" in capsys.readouterr().out


def test_a_whole_run_in_processes_of_its_own_writes_its_rows(tmp_path):
    file = tmp_path / "rows.json"
    options = "--device cpu --settings B1T64H1D16 --passes fwd --gates weak --peers transformers"
    command = [sys.executable, "-m", "benchmarks", *options.split(), "--json", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    assert found["dtype"] == "float32" and set(found["peers"]) == {"transformers"}
    for r, op in zip(found["rows"], ("gdn", "kda"), strict=True):
        assert r["op"] == op and r["ours_ms"] > 0 and r["peer_ms"] > 0 and r["peer_error"] < 1e-5
        assert tables.row_line(r) in done.stdout


@pytest.mark.parametrize(
    "words, said",
    [
        ("--ops kd", "'kd' is none of kda, gdn"),
        ("--settings B1T64", "a setting is written like B1T8192H96"),
        ("--json /no/such/rows.json", "there is no folder /no/such"),
        ("--device cpu --peers fla", "--peers fla: not installed, or not for cpu"),
        ("--ops gdn --gates bound", "leave nothing to measure"),
    ],
)
def test_a_wrong_option_is_refused_before_anything_is_measured(words, said):
    command = [sys.executable, "-m", "benchmarks", *words.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode and said in done.stderr


@pytest.mark.parametrize("command", ("", "evidence", "tables"))
def test_help_names_the_commands(command, capsys):
    with pytest.raises(SystemExit) as stop:
        runner.main([*command.split(), "--help"])
    said = capsys.readouterr().out
    assert stop.value.code == 0 and (command or "python -m benchmarks evidence") in said


@pytest.mark.parametrize("layout", ["kv", "vk"])
def test_the_first_cut_of_decode_is_the_one_in_use(layout):
    step = pytest.importorskip("kda_ops.backends.triton.step")
    (KI, BV, warps), *others = cuts.CUTS[layout]
    used = step.cut(cuts.WIDTH, cuts.WIDTH, 4, layout == "vk", True)
    assert used == step.Cut(cuts.WIDTH // KI, KI, BV, {"num_warps": warps})
    for KI, BV, warps in others:  # whole registers of every thread
        assert cuts.WIDTH * BV % (32 * warps) == 0 == cuts.WIDTH % KI
