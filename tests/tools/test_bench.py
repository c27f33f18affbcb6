"""The benchmark's error gate: a side that is wrong gets no time, and a wrong row of ours fails."""

import json
from dataclasses import replace

import pytest
import torch

import kda_ops
from benchmarks import model, peers, runner, worker
from benchmarks import oracle as oracles
from benchmarks.cases import make_inputs
from benchmarks.oracle import Oracle
from benchmarks.peers import Peer, Unsupported, our_forward
from benchmarks.records import STAMP
from tests.support.benchmark import case, row


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    worker.oracle_of.cache_clear()
    monkeypatch.setenv("KDA_OPS_COMMIT", "c0ffee")
    monkeypatch.setattr(worker, "ROUNDS", 1)
    monkeypatch.setattr(worker, "median_ms", lambda call, device: (call(), 1.0)[1])


@pytest.mark.quick
@pytest.mark.parametrize("op", ["kda", "gdn"])
@pytest.mark.parametrize("pass_", ["fwd", "fwdbwd"])
def test_our_side_passes_its_check_and_gets_a_time(op, pass_):
    got = worker.whole(case(op, pass_, "softplus"), None)
    assert got["ours_ms"] == 1.0 and got["ours_error"] < 1e-3 and got["peer_ms"] is None
    assert set(got) == set(row()) - set(STAMP)


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
    assert oracle.key_heads.tolist() == [0, 4, 8]
    assert oracle.exact["q"].shape[2] == 3
    assert oracle.exact["A_log"].shape == (6,)
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


@pytest.mark.parametrize("share, timed", ((0.9, True), (1.1, False), (float("nan"), False)))
def test_a_first_call_that_is_wrong_gets_no_time(share, timed, monkeypatch):
    found = {"fwd_s": 1.0, "error": 0.3, "share": share, "fwdbwd_s": 2.0}
    monkeypatch.setattr(worker, "in_new_process", lambda *words: dict(found))
    got = worker.first_call(case(pass_="first_call_s"), None)
    assert (got["ours_ms"] == 1.0) == timed == ("ours_fwdbwd_s" in got["also"])
    monkeypatch.setattr(
        worker, "in_new_process", lambda *words: {"fwd_s": 1.0, "says": "OutOfMemoryError"}
    )
    got = worker.first_call(case(pass_="first_call_s"), None)
    assert got["ours_ms"] is None and got["also"] == {"ours_says": "OutOfMemoryError"}


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


def test_a_model_that_breaks_or_is_no_number_has_no_time(monkeypatch):
    def row_of(*figures):
        found = iter(figures)
        monkeypatch.setattr(worker, "in_new_process", lambda *words: dict(next(found)))
        peer = Peer("peer", "cpu", "", our_forward) if figures[1:] else None
        return worker.model(case(pass_="model", gate="softplus"), peer)

    good = {"probe": [1.0, 2.0], "ms": 5.0}
    assert row_of(good)["ours_ms"] == 5.0 == row_of(good, good)["peer_ms"]
    nan, far = {"probe": [1.0, float("nan")], "ms": 5.0}, {"probe": [1.0, 3.0], "ms": 5.0}
    for wrong in ({"says": "not done after 9 s"}, nan, far):
        assert row_of(good, wrong)["peer_ms"] is None
    for wrong in ({"says": "not done after 9 s"}, nan):
        assert row_of(wrong)["ours_ms"] is None


def test_a_model_that_loses_a_gradient_is_no_side(monkeypatch):
    def layer(it, q, *args, group, **words):
        bound = dict(lower_bound=it.lower_bound, safe_gate=it.safe_gate)
        return kda_ops.chunk_kda(q.detach(), *args, **bound, **words)

    monkeypatch.setattr(model, "PEERS", (Peer("peer", "cpu", "", our_forward, layer=layer),))
    monkeypatch.setattr(model, "LAYERS", 1)
    torch._dynamo.reset()
    small = case(pass_="model", gate="softplus", setting="B2T70H2D16")
    with pytest.raises(RuntimeError, match="no gradient reached .*mixer.q_proj.weight"):
        model.measure(small, "peer")
    torch._dynamo.reset()
