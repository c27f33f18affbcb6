"""The benchmark of whole layers runs, and restores the choice of plain forms."""

import json

import pytest
import torch

from benchmarks import layer


def once(call, device, count=1):
    call()
    return 1.0


@pytest.mark.quick
@pytest.mark.parametrize("variant", layer.OURS)
def test_eager_and_decode_give_a_time_for_every_pass(variant, monkeypatch):
    monkeypatch.setattr(layer, "ms", once)
    monkeypatch.setattr(layer, "host_us", once)
    found = [*layer.eager(variant, "cpu")]
    assert [(r["side"], r["pass"]) for r in found] == [("ours", "fwd"), ("ours", "fwdbwd")]
    assert all("error" not in row for row in found)
    assert [row["B"] for row in layer.decode(variant, "cpu")] == [1, 64]


def test_kernels_are_timed_forward_and_backward(monkeypatch):
    monkeypatch.setattr(layer, "ms", once)
    rows = [*layer.kernels("kda", "cpu")]
    assert {(r["side"], r["pass"]) for r in rows} == {
        (side, name) for side in ("conv", "norm") for name in ("fwd", "bwd")
    }


def test_a_pass_that_fails_is_reported_in_its_row():
    def broken(x):
        raise RuntimeError("refuses this Triton\nand more")

    rows = [*layer.rows_of("eager", "gdn", "fla", broken, "cpu")]
    assert [row["error"] for row in rows] == ["refuses this Triton"] * 2


def test_every_choice_of_forms_is_compiled_and_the_usual_one_is_left(monkeypatch):
    import torch._inductor.decomposition as inductor

    from kda_ops.registrations import decompositions

    seen = []

    def note(module, fullgraph):
        table = inductor.select_decomp_table()
        seen.append(sum(getattr(op, "namespace", "") == "kda" for op in table))
        return module

    monkeypatch.setattr(torch, "compile", note)
    monkeypatch.setattr(layer, "ms", lambda call, device: 1.0)
    before = torch._inductor.config.force_disable_caches
    try:
        rows = [*layer.compiled("gdn", "cpu")]
        alone = [*layer.compiled("gdn", "cpu", alone=True)]
    finally:  # monkeypatch cannot restore an alias
        torch._inductor.config.force_disable_caches = before
    chosen = len(decompositions.PLAIN)
    assert seen == [*(len(names) for names in layer.FORMS.values()), chosen]
    assert {row["side"] for row in alone} == {"ours"}
    assert {row["side"] for row in rows} == {*layer.FORMS}
    left = [op for op in inductor.select_decomp_table() if getattr(op, "namespace", "") == "kda"]
    assert len(left) == chosen


def test_each_row_names_the_triton_that_it_was_measured_with(monkeypatch, tmp_path):
    monkeypatch.setattr(layer, "ms", once)
    monkeypatch.setattr(layer, "installed", lambda name: "3.99.0")
    monkeypatch.setattr(layer, "before", lambda *given: [{"side": "before"}])
    out = tmp_path / "rows.json"
    words = ["--parts", "eager", "--variant", "gdn", "--alone", "--device", "cpu"]
    monkeypatch.setattr("sys.argv", ["layer", *words, "--before", ".", "--out", str(out)])
    layer.main()
    rows = json.loads(out.read_text())
    assert {r["side"] for r in rows} == {"before", "ours"}
    assert {r["triton"] for r in rows} == {"3.99.0"}
