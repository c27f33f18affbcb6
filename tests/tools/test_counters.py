"""A model of four layers under torch.compile: one graph, a recompilation per size that changes, and
every site folded.
"""

import pytest
import torch

from kda_ops.bench import counters


@pytest.mark.parametrize("side, pass_", [("flags", "infer"), ("plain", "train")])
def test_a_model_of_four_layers_is_one_graph_and_folds_every_site(side, pass_):
    found = counters.count(side, pass_, "cpu", "aot_eager")
    want = {"graphs": 1, "breaks": 0, "recompiles": 2, "folded": 12 if side == "plain" else 0}
    assert {n: found[n] for n in counters.COLUMNS} == want
    torch._dynamo.reset()


def test_a_model_with_a_break_fails_the_command(monkeypatch, capsys):
    broken = {"graphs": 2, "breaks": 1, "recompiles": 0, "folded": 0}
    monkeypatch.setattr(
        counters,
        "count",
        lambda side, pass_, device, **spec: {"side": side, "pass": pass_} | broken,
    )
    assert counters.main(["--device", "cpu"]) == 1
    monkeypatch.setattr(
        counters,
        "count",
        lambda side, pass_, device, **spec: (
            {"side": side, "pass": pass_} | broken | {"graphs": 1, "breaks": 0}
        ),
    )
    assert counters.main(["--device", "cpu"]) == 0 and "recompiles" in capsys.readouterr().out
