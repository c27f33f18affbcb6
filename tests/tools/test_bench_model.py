"""The whole-model benchmark at a size for a CPU: both sides are one model, breaks are counted, and
a side that computes something else has no time.
"""

import json
import re

import pytest
import torch

import kda_ops
from kda_ops.bench import command, model

SPEC = dict(
    device="cpu",
    gate="bound",
    backend="aot_eager",
    layers=2,
    hidden=16,
    heads=2,
    mlp=2,
    batch=2,
    length=70,
    steps=1,
)


@torch.compiler.disable
def behind_a_break(layer, q, k, v, g, beta, **flags):
    return kda_ops.chunk_kda(
        q, k, v, g, beta, lower_bound=layer.lower_bound, safe_gate=layer.safe_gate, **flags
    )


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(
        model,
        "PEERS",
        {
            "broken": behind_a_break,
            "other": lambda *args, **flags: (behind_a_break(*args, **flags)[0].flip(1), None),
        },
    )
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def ours():
    torch._dynamo.reset()
    return model.measure("ours", SPEC)


def test_our_side_is_one_graph(ours):
    assert ours["graphs"] == 1 and ours["breaks"] == 0
    assert ours["step_ms"] > 0 and ours["first_step_s"] > 0 and len(ours["probe"]) > 20


def test_a_peer_is_the_same_model_with_its_breaks_counted(ours):
    found = model.measure("broken", SPEC)
    assert found["breaks"] >= 1 and found["graphs"] > 1
    assert found["loss"] == pytest.approx(ours["loss"], rel=1e-5) and found[
        "probe"
    ] == pytest.approx(ours["probe"], abs=1e-2)
    assert model.refuse(found, ours) == found


def test_a_peer_may_bring_its_layer(ours, monkeypatch):
    made = []

    class Theirs(kda_ops.nn.KimiDeltaAttention):
        def __init__(self, layer):
            super().__init__(
                SPEC["hidden"],
                head_dim=SPEC["hidden"] // SPEC["heads"],
                num_heads=SPEC["heads"],
                safe_gate=True,
                lower_bound=-5.0,
            )
            self.load_state_dict(layer.state_dict(), assign=True)
            self._parameters["A_log"] = self._parameters.pop("A_log")  # registered in another order
            made.append(self)

    monkeypatch.setattr(model, "LAYERS", {"theirs": Theirs})
    found = model.measure("theirs", SPEC)
    assert len(made) == SPEC["layers"]
    assert found["loss"] == pytest.approx(ours["loss"], rel=1e-5) and found[
        "probe"
    ] == pytest.approx(ours["probe"], abs=1e-2)


def test_a_side_that_is_not_known_is_no_side():
    with pytest.raises(ValueError, match="no fla_layer among the peers .*fla-layer"):
        model.measure("fla_layer", SPEC)


def test_a_peer_that_computes_something_else_gets_no_time(ours):
    found = model.refuse(model.measure("other", SPEC), ours)
    assert (
        "step_ms" not in found
        and "first_step_s" not in found
        and found["says"] == "other gradients than ours"
    )
    assert "step_ms" not in model.refuse(ours | {"probe": [float("nan")]}, ours)


def test_a_side_that_loses_a_gradient_is_no_side(monkeypatch):
    for lose in (torch.Tensor.detach, lambda q: q * 0):
        monkeypatch.setitem(
            model.PEERS,
            "broken",
            lambda layer, q, *args, lose=lose, **flags: behind_a_break(
                layer, lose(q), *args, **flags
            ),
        )
        with pytest.raises(RuntimeError, match="no gradient reached .*mixer.q_proj.weight"):
            model.measure("broken", SPEC)


def test_the_command_line_measures_and_writes(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(model, "PEERS", {"slow": None})
    slow = {"loss": 1.0, "probe": [1.1], "first_step_s": 9.0, "says": "not done after 10 s"}
    apart = {"ours": {"loss": 1.0, "probe": [1.0], "step_ms": 5.0}, "slow": slow}
    monkeypatch.setattr(model, "measure_apart", lambda side, spec, limit, ahead: apart[side])
    assert (
        command.main(
            ["--model", "--device", "cpu", "--peers", "slow", "--json", str(tmp_path / "m.json")]
        )
        == 0
    )
    assert "not done after 10 s" in capsys.readouterr().out
    assert json.loads((tmp_path / "m.json").read_text())["sides"] == apart
    apart["ours"] = {"says": "broke"}
    assert command.main(["--model", "--device", "cpu", "--peers", ""]) == 1


def test_a_peer_that_is_not_known_is_refused_before_any_side_is_measured(capsys):
    with pytest.raises(SystemExit):
        command.main(["--model", "--device", "cpu", "--peers", "fla-layer,fla_layer"])
    assert re.search("--peers: no fla_layer among the peers .*fla-layer", capsys.readouterr().err)


def test_a_side_is_cut_at_its_limit_and_one_that_breaks_says_why():
    assert model.measure_apart("ours", SPEC, 0.01)["says"] == "not done after 0.01 s"
    assert "TypeError" in model.measure_apart("ours", SPEC | {"hidden": None}, 60.0)["says"]


def test_a_peer_compiled_ahead_has_no_first_step(monkeypatch):
    asked = []
    monkeypatch.setattr(
        model,
        "compile_ahead",
        lambda cases, peer, until: asked.append(
            (cases[0].setting, peer.environment["TRITON_CACHE_DIR"])
        ),
    )
    monkeypatch.setattr(
        model.subprocess, "run", lambda command, env, **words: _Done(env["TRITON_CACHE_DIR"])
    )
    found = model.measure_apart("fla", SPEC, 60.0, ahead=True)
    assert found == {"loss": 1.0, "step_ms": 2.0} and asked == [("B2T70H2D8", _Done.cache)]


class _Done:
    """A process that measured a side with a cache."""

    cache, returncode, stdout = (
        "",
        0,
        json.dumps({"first_step_s": 9.0, "loss": 1.0, "step_ms": 2.0}),
    )

    def __init__(self, cache):
        _Done.cache = cache


def test_a_side_in_a_process_of_its_own_finishes():
    found = model.measure_apart("ours", SPEC, 120.0)
    assert "says" not in found and found["graphs"] == 1 and found["step_ms"] > 0
