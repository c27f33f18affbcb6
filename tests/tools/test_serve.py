"""The serving example: continuous batching does not change any request's output."""

import pytest
import torch

from examples.serve import Engine, Model, Request, main, make_requests


def test_every_request_gives_the_same_output_alone(capsys):
    result = main(["--requests", "8", "--slots", "3", "--hidden", "32"])
    out = capsys.readouterr().out
    assert "tokens/s" in out and "alone" in out
    assert result["mixed"] > 0 and result["produced"] > 8


@pytest.mark.parametrize("nothing", ["--slots", "--budget"])
def test_an_engine_without_slots_or_budget_is_refused(nothing):
    with pytest.raises(SystemExit):
        main([nothing, "0"])


@pytest.mark.quick
def test_slots_are_reused_and_given_back():
    torch.manual_seed(0)
    engine = Engine(Model(hidden=32).requires_grad_(False), 2)
    requests = make_requests(5, 256, seed=1)
    engine.run(requests)
    assert sorted(engine.free) == [0, 1] and not engine.active
    assert all(request.finished and 0 <= request.slot < 2 for request in requests)


@pytest.mark.parametrize("budget", (64, 128, 1000))
def test_how_a_prompt_is_cut_does_not_change_the_output(budget):
    torch.manual_seed(0)
    model, outputs = Model(hidden=32).requires_grad_(False), []
    for size in (budget, 64):
        request = Request(list(range(200)), 6)
        Engine(model, 1, size).run([request])
        outputs.append(request.output)
    assert outputs[0] == outputs[1]
