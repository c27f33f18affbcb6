"""A model of four layers under torch.compile: one graph, a recompilation per size that changes, and
every site folded.
"""

import pytest
import torch

from tests.support import counters


@pytest.mark.parametrize("side, pass_", [("flags", "infer"), ("plain", "train")])
def test_a_model_of_four_layers_is_one_graph_and_folds_every_site(side, pass_):
    found = counters.count(side, pass_, "cpu", "aot_eager")
    assert found == {"graphs": 1, "breaks": 0, "recompiles": 2, "folded": 12 * (side == "plain")}
    torch._dynamo.reset()
