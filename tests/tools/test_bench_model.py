"""The step of a model: both sides are one model, breaks are counted, and a side that computes
something else has no time.
"""

import json
import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import kda_ops
from benchmarks import fla_models, model, worker
from benchmarks.peers import Peer, our_forward
from tests.support.benchmark import case

SMALL = case(pass_="model", gate="softplus", setting="B2T70H2D16")


@torch.compiler.disable
def behind_a_break(layer, *args, group, **flags):
    bound = dict(lower_bound=layer.lower_bound, safe_gate=layer.safe_gate)
    return kda_ops.chunk_kda(*args, **bound, **flags)


def flipped(layer, *args, **flags):
    return behind_a_break(layer, *args, **flags)[0].flip(1), None


def measured(monkeypatch, capsys, layer=None):
    """Return what one side reports in this process."""
    peer = Peer("peer", "cpu", "", our_forward, layer=layer)
    monkeypatch.setattr(model, "PEERS", (peer,))
    monkeypatch.setattr(model, "LAYERS", 2)
    torch._dynamo.reset()
    model.measure(SMALL, "peer" if layer else None)
    torch._dynamo.reset()
    return json.loads(capsys.readouterr().out.splitlines()[-1])["figures"]


def row(monkeypatch, *figures):
    """Return the row of what processes report, ours first."""
    found = iter(figures)
    monkeypatch.setattr(worker, "apart", lambda *words: dict(next(found)))
    return worker.model(SMALL, Peer("peer", "cpu", "", our_forward) if figures[1:] else None)


def test_our_side_is_one_graph_and_a_peer_the_same_model_with_its_breaks(monkeypatch, capsys):
    ours = measured(monkeypatch, capsys)
    assert ours["graphs"] == 1 and ours["breaks"] == 0 and len(ours["probe"]) > 20
    peer = measured(monkeypatch, capsys, behind_a_break)
    assert peer["breaks"] >= 1 and peer["graphs"] > 1
    assert peer["probe"] == pytest.approx(ours["probe"], abs=1e-2)
    got = row(monkeypatch, ours, peer)
    assert got["ours_ms"] == ours["ms"] and got["peer_ms"] == peer["ms"]
    assert got["also"]["peer_breaks"] == peer["breaks"] and "peer_probe" not in got["also"]
    other = measured(monkeypatch, capsys, flipped)
    got = row(monkeypatch, ours, other)
    assert got["ours_ms"] and got["peer_ms"] is None and got["peer_error"] > 0.2


def test_a_side_that_breaks_or_is_no_number_has_no_time(monkeypatch):
    good = {"probe": [1.0, 2.0], "ms": 5.0}
    assert row(monkeypatch, good)["ours_ms"] == 5.0
    for wrong in ({"says": "not done after 9 s"}, {"probe": [1.0, float("nan")], "ms": 5.0}):
        assert row(monkeypatch, good, wrong)["peer_ms"] is None
        assert row(monkeypatch, wrong)["ours_ms"] is None


def test_a_side_that_loses_a_gradient_is_no_side(monkeypatch, capsys):
    for lose in (torch.Tensor.detach, lambda q: q * 0):

        def layer(it, q, *args, lose=lose, **flags):
            return behind_a_break(it, lose(q), *args, **flags)

        with pytest.raises(RuntimeError, match="no gradient reached .*mixer.q_proj.weight"):
            measured(monkeypatch, capsys, layer)


def test_a_process_of_its_own_says_what_it_found_or_why_not(monkeypatch):
    work = worker.work_of([replace(SMALL, setting="B1T66H1D16")], None)
    found = worker.apart("benchmarks.model", work, 300.0)
    assert "says" not in found and found["graphs"] == 1 and found["ms"] > 0
    assert worker.apart("benchmarks.model", work, 0.01) == {"says": "not done after 0.01 s"}
    assert "ValueError" in worker.apart("benchmarks.model", work | {"cases": ["kda"]}, 60)["says"]


def test_a_gpu_is_busy_once_where_kernels_overlap_and_not_in_gaps():
    assert model.covered([(5, 7), (0, 4), (1, 2), (3, 4.5)]) == 6.5
    assert model.covered([]) == 0


def test_both_sides_of_a_model_of_fla_start_alike(monkeypatch):
    class Net(torch.nn.Linear):
        def forward(self, input_ids, labels):
            taken.append(os.environ["FLA_KDA_OPS"])
            return SimpleNamespace(loss=super().forward(input_ids).square().mean())

    taken: list[str] = []
    monkeypatch.setenv("FLA_KDA_OPS", "0")
    monkeypatch.setattr(fla_models, "chosen", lambda: taken[-1:] == ["1"])
    net = Net(4, 4)
    for x in net.parameters():  # as small as a step of the optimiser, so that gradients change
        x.data *= 1e-4
    found = fla_models.measure(net, torch.ones(2, 4), steps=2)
    ours, fla = found["kda_ops"]["losses"], found["fla"]["losses"]
    assert ours == fla and len(set(ours)) == fla_models.WARM  # the moments of AdamW too
    assert taken == ["0"] * 3 + ["1"] * 3 + ["0", "1"] * 2 and found["fla"]["ms"] > 0
