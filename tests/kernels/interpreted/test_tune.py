"""``python -m kda_ops tune`` times a candidate only after its results were right, and the same
twice.
"""

import json
from dataclasses import replace

import pytest
import torch

from kda_ops.backends.triton import BACKEND, tuning
from kda_ops.problem import Problem
from kda_ops.tools import tune

CALL = dict(K=16, V=16, dtype="fp32", gate="softplus", B=1, T=64, H=1, device="cpu")


@pytest.fixture(autouse=True)
def no_file(monkeypatch, tmp_path):
    monkeypatch.setenv("KDA_OPS_TUNING", str(tmp_path / "tuning.json"))
    tuning.forget()
    yield
    tuning.forget()


@pytest.mark.parametrize("rank, kernel", [(1, "prepare_kda"), (0, "scan_gdn")])
def test_what_is_wrong_fails_or_varies_gets_no_time(rank, kernel, monkeypatch, capsys):
    right_scan = BACKEND.scan

    def scan(p, tile, o, final_state, keep):
        assert tuning.choose(other, p, tuning.Launch).warps == (8 if tuning.FORCED.options else 4)
        warps = tuning.choose(kernel, p, tuning.Launch).warps
        if warps == 32:
            raise RuntimeError
        trace = right_scan(p, tile, o, final_state, keep)
        if warps == 8:
            o.mul_(1.01)
        if warps == 16:
            final_state.add_(1e-8 * torch.rand_like(final_state))
        return trace

    def options(name, p):
        assert name == kernel
        return [replace(tuning.table(name, p), warps=warps) for warps in (4, 8, 16, 32, 2, 1)]

    timed = []
    monkeypatch.setattr(BACKEND, "scan", scan)
    monkeypatch.setattr(tune, "_options", options)
    monkeypatch.setattr(
        tune, "median_ms", lambda call, device: timed.append(device) or call() and 3.0
    )
    other = {1: "scan_kda", 0: "prepare_gdn"}[rank]
    chosen = {other: {"warps": 8} | ({"block_v": 16} if rank else {})}
    tune.measure(kernel, CALL | {"rank": rank}, chosen, [4])
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    tried, found = said[::2], said[1::2]
    # the fourth was tried before
    assert [t["place"] for t in tried] == [f["place"] for f in found] == [0, 1, 2, 3, 5]
    assert [t["options"]["warps"] for t in tried] == [4, 8, 16, 32, 1] and len(
        {t["name"] for t in tried}
    ) == 1
    assert [f["ms"] for f in found] == [3.0, None, None, None, 3.0] and timed == ["cpu"] * 2
    assert [f["why"] for f in found] == [
        None,
        "wrong results",
        "wrong results",
        "RuntimeError",
        None,
    ]
    assert not tuning.FORCED.options


@pytest.mark.parametrize("rank, kernel", [(r, k) for r in tune.TUNED for k in tune.TUNED[r]])
def test_the_table_stands_first_among_options_that_differ(rank, kernel):
    p = Problem.parse(rank, **tune.inputs(rank, 1, 64, 1, 16, 16, torch.float32, "bound", "cpu"))
    found = tune._options(kernel, p)
    assert found[0] == tuning.table(kernel, p) and len(set(found)) == len(found) > 3
    assert all(type(x) is tuning.KERNELS[kernel] for x in found)


@pytest.mark.parametrize("rank", (0, 1))
def test_gradients_of_the_table_pass_and_wrong_ones_do_not(rank):
    check = tune.Check(tune.TUNED[rank][-1], rank, 16, 16, torch.float32, "bound", "cpu")
    found = check.run(check.p)
    check.run = lambda p: found
    assert len(found) == len(check.want) == 5 and check.passes()
    for x in found:
        x.mul_(1.01)
        assert not check.passes()
        x.div_(1.01)
    assert check.passes()


@pytest.mark.quick
def test_every_kernel_of_the_table_is_tuned_or_named():
    tuned = [k for kernels in tune.TUNED.values() for k in kernels]
    assert sorted((*tuned, *tune.UNTUNED)) == sorted(tuning.KERNELS)
