"""The benchmark: what it measures, what it refuses to time, how it compares; no time is judged
here.
"""

import json
import os
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kda_ops.bench import cases, compare, readme, rows, sides, worker
from kda_ops.bench.cases import GATES, KDA_GATES, Case, Oracle, activated, flags, make_inputs
from kda_ops.bench.sides import Peer, Unsupported, our_forward
from tests.support.benchmark import case, row


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
@pytest.mark.parametrize("gate", GATES)
def test_plain_torch_activations_are_those_inside_the_operator(op, gate):
    if op == "gdn" and gate in KDA_GATES:
        pytest.skip("no row has it")
    c = case(op, gate=gate)
    x = {n: t.double() for n, t in make_inputs(c).items()}
    g, flag_words = activated(c, x)[3], flags(c)
    assert (
        flag_words.get("use_gate_in_kernel", False) == (gate in ("bound", "softplus"))
        and flag_words.get("safe_gate", False) == c.promised
    )
    assert (g <= 0).all() and (gate == "softplus" or (g >= -5).all())
    import kda_ops

    chunk = {"kda": kda_ops.chunk_kda, "gdn": kda_ops.chunk_gdn}[op]
    # one side activates in float32
    assert (our_forward(c)(x) - chunk(*activated(c, x))[0]).abs().max() < 1e-6


@pytest.mark.quick
@pytest.mark.parametrize("op", ["kda", "gdn"])
@pytest.mark.parametrize("pass_", ["fwd", "fwdbwd"])
def test_our_side_passes_its_check_and_gets_a_time(op, pass_):
    got = worker.whole(case(op, pass_, "softplus"), None, {})
    assert got["ours_ms"] == 1.0 and got["ours_error"] < 1e-3 and got["peer_ms"] is None
    assert set(got) == set(row())


def test_both_state_layouts_and_dtypes_decode():
    worker.copy_rate.cache_clear()
    for there in compare.list_cases(
        "cpu", ["kda"], ["decode"], ["bound"], ["B3T1H2D16"], torch.float32, None
    ):
        got = worker.decode(there, None, {})
        assert got["ours_ms"] == 1.0 and got["ours_error"] < 1e-6
        # a copy takes 1 ms too, so the share is that of the bytes
        assert got["also"]["ours_share"] == pytest.approx(
            3 * 2 * 16 * 16 * (2 if there.state == "bf16" else 4) / 2**28
        )
        assert got["also"]["ours_call_us"] > 1 and "peer_share" not in got["also"]
        assert "of a copy 0% | -, us per call" in rows.format_row(got)


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
    monkeypatch.setattr(worker, "call_us", lambda call, device: 1.0)
    there = case("kda", "decode", "softplus", "B3T1H2D16", state=state)

    def step(c, x):
        def call(pool):
            o, pool = sides.our_step(c, x)(pool)
            wrong(o, pool)
            return o, pool

        return call

    got = worker.decode(there, Peer("wrong", "cpu", None, our_forward, step), {})
    assert got["ours_ms"] == 1.0 and got["peer_ms"] is None and not got["peer_error"] < 1e-2


@pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity"),
    reason="a system that does not say on which cores a thread may run",
)
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
    assert all(len(cores) == 1 for cores in seen) and set().union(
        *seen
    ) == free == os.sched_getaffinity(0)


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


@pytest.mark.quick
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
def test_the_oracle_of_a_gpu_and_that_of_a_cpu_agree_however_many_heads_they_take_at_once(
    op, gate, monkeypatch
):
    c = case(op, "fwdbwd", gate, "B2T130H3HV6D16")
    native = Oracle(c, *training_inputs(c))
    monkeypatch.setattr(cases.dispatch, "load", lambda name: cases.Reference())
    monkeypatch.setattr(cases, "AT_ONCE", 1)
    reference = Oracle(c, *training_inputs(c))
    assert set(native.exact) == set(reference.exact) == {"o", *make_inputs(c)}
    for n, want in native.exact.items():
        assert (
            want.dtype is torch.float64
            and (reference.exact[n] - want).abs().max() <= 1e-12 * want.abs().max()
        ), n
        assert reference.limits[n] == pytest.approx(native.limits[n], rel=0.1)


def test_compared_heads_are_spread_evenly_and_their_gradients_whole(monkeypatch):
    monkeypatch.setitem(cases.HEADS, "cpu", 3)
    c = case("gdn", "fwdbwd", "softplus", "B1T64H9HV18D16")
    oracle = Oracle(c, *training_inputs(c))
    assert (
        oracle.key_heads.tolist() == [0, 4, 8]
        and oracle.exact["q"].shape[2] == 3
        and oracle.exact["A_log"].shape == (6,)
    )
    monkeypatch.setitem(cases.HEADS, "cpu", 9)
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
    monkeypatch.setitem(cases.HEADS, "meta", 2)
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

    got = worker.whole(case("gdn", "fwdbwd", "softplus"), Peer("steep", "cpu", None, forward), {})
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
    assert f"worst {got['also']['ours_worst']} | beta" in rows.format_row(got)
    assert f"({got['also']['ours_worst']}) |" in readme.table(
        [got], "fwdbwd"
    ) and "(beta) |" in readme.table([got], "fwdbwd")
    assert "ours_worst" not in worker.whole(case("gdn", "fwd"), None, {})["also"]


def test_a_side_that_cannot_or_breaks_costs_its_row_or_its_time_alone(monkeypatch, capsys):
    def unable(c):
        raise Unsupported("not today")

    monkeypatch.setattr(
        worker,
        "PEERS",
        (
            Peer("unable", "cpu", None, unable),
            Peer("broken", "cpu", None, lambda c: lambda x: 1 / 0),
        ),
    )
    for name in ("unable", "broken"):
        worker.main([json.dumps({"peer": name, "cases": [case().spec(), case("gdn").spec()]})])
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert len(lines) == 2
        for line in lines:
            if name == "unable":
                assert "not today" in line["skip"]
            else:
                assert "ZeroDivisionError" in line["row"]["also"]["peer_says"]
                assert (
                    line["row"]["ours_ms"] == 1.0
                    and line["row"]["peer_ms"] is line["row"]["peer_error"] is None
                )


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
    assert (
        0 < got["ours_error"] < 1e-5
        and 0 < got["ours_ms"] < got["also"]["ours_fwdbwd_s"]
        and 0 < got["also"]["ours_warm_fwd_s"] < got["also"]["ours_warm_fwdbwd_s"]
    )


@pytest.mark.parametrize("share, timed", ((0.9, True), (1.1, False), (float("nan"), False)))
def test_a_first_call_that_is_wrong_gets_no_time(share, timed, monkeypatch):
    monkeypatch.setattr(
        worker,
        "_first",
        lambda case, name, folder, check: ([1.0, 2.0], [0.3, share] if check else [], ""),
    )
    got = worker.first_call(case(pass_="first_call_s"), None, {})
    assert (got["ours_ms"] == 1.0) == timed == ("ours_fwdbwd_s" in got["also"]) and got[
        "ours_error"
    ] == 0.3


def test_a_first_call_that_cannot_be_checked_gets_no_time(monkeypatch):
    monkeypatch.setattr(
        worker, "_first", lambda case, name, folder, check: ([1.0], [], "OutOfMemoryError")
    )
    got = worker.first_call(case(pass_="first_call_s"), None, {})
    assert got["ours_ms"] is None and got["also"] == {"ours_says": "OutOfMemoryError"}


def test_a_first_call_that_breaks_says_so():
    got = worker.first_call(
        case(pass_="first_call_s", gate="softplus", setting="B1T64H1D300"), None, {}
    )
    assert got["ours_ms"] is None and "K" in got["also"]["ours_says"]


def test_every_share_of_a_tuning_is_compiled_by_some_process(monkeypatch):
    autotuner = pytest.importorskip("triton.runtime.autotuner")

    class Tuner:
        cache, seen = {}, []

        def prune_configs(self, kwargs):
            return list(range(10))

        def run(self):
            self.seen.append(
                [c for c in self.prune_configs({}) if self.do_bench(lambda: None, None)]
            )

    monkeypatch.setattr(autotuner, "Autotuner", Tuner)
    plain = Tuner.prune_configs, Tuner.run
    for i in range(3):
        worker.share(i, 3)
        Tuner().run()
        Tuner.prune_configs, Tuner.run = plain
    assert set().union(*Tuner.seen) == set(range(10)) and all(
        0 in some and len(some) <= 5 for some in Tuner.seen
    )


def test_stages_that_a_backend_lacks_are_named(monkeypatch):
    class Half:
        prepare = scan = None

    monkeypatch.setattr(worker.dispatch, "backend", lambda device: Half)
    assert worker._missing(case()) is None
    assert "reverse_scan, gradient" in worker._missing(case(pass_="fwdbwd"))
    assert "step" in worker._missing(case(pass_="decode"))


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


@pytest.mark.parametrize(
    "dtype, least, most",
    (
        (torch.float32, 2.4e-7, 4e-6),
        (torch.bfloat16, 0.0166, 0.06),
        (torch.float16, 0.00204, 0.008),
    ),
)
def test_a_budget_is_that_of_its_dtype(dtype, least, most):
    c = replace(case(), dtype=dtype)
    assert least < Oracle(c, make_inputs(c), None).limits["o"] < most


def test_what_stands_there_for_scale_is_causal():
    c = case(setting="B1T8H2D16")
    x = make_inputs(c)
    y, z = (
        sides._sdpa(c)(given)
        for given in (x, {n: torch.cat([t[:, :4], 0 * t[:, 4:]], 1) for n, t in x.items()})
    )
    torch.testing.assert_close(y[:, :4], z[:, :4])


def test_our_decode_names_its_slots(monkeypatch):
    seen = []
    monkeypatch.setattr("kda_ops.recurrent_kda_", lambda *args, **words: seen.append(args))
    c = case(pass_="decode", gate="bound", setting="B3T1H2D16")
    sides.our_step(c, make_inputs(c))(torch.zeros(3, 2, 16, 16))
    assert seen[0][6].tolist() == [0, 1, 2] and seen[0][8] is not None
