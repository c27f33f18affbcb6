"""``python -m kda_ops tune`` times a candidate only after its results were right, and the same
twice.
"""

import json
from dataclasses import asdict, replace

import pytest
import torch

from kda_ops.backends.triton import BACKEND, tuning
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
        warps = tuning.choose(kernel, p).warps
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
    chosen = {"a row of another kernel": asdict(tuning.Options(16))}
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
    assert tuning.tuned()["a row of another kernel"] == tuning.Options(16)


def test_the_table_stands_first_among_the_options():
    for rank, kernel in ((1, "prepare_kda"), (1, "scan_kda"), (0, "prepare_gdn"), (0, "scan_gdn")):
        p = tune.Check(rank, 16, 16, torch.float32, "bound", "cpu").p
        found = tune._options(kernel, p)
        assert found[0] == tuning.table(kernel, p) and len(set(found)) == len(found) > 4
