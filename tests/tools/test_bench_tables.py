"""``python -m benchmarks tables``: tables and picture come from the files of results."""

import json
from xml.etree import ElementTree

import pytest

from benchmarks import tables
from benchmarks.cases import name_of
from tests.support.benchmark import row

STAMP = {n: row()[n] for n in ("card", "torch", "triton", "commit", "date")}
COUNTS = {"passed": 5, "failed": 1, "skipped": 0, "cut": None}
SUITE = {n: STAMP[n] for n in ("card", "torch", "commit", "date")} | COUNTS
ABOUT = "G, torch 1, triton 2, commit 0123456"


def page(folder, text, *rows, **files):
    """Make a checkout with a README, an evidence file of rows and other files of results."""
    results = folder / tables.FOLDER
    results.mkdir(parents=True, exist_ok=True)
    (folder / "README.md").write_text(text)
    evidence = {"evidence": {"suites": {"2": SUITE}, "rows": rows, "missing": {}}}
    for name, found in (evidence | files).items():
        found = {"rows": found} if isinstance(found, list) else found
        (results / f"{name}.json").write_text(json.dumps(found))
    return lambda: (tables.main([str(folder)]), (folder / "README.md").read_text())[1]


def marked(*names):
    return "".join(f"a\n<!-- evidence: {name} -->\nold\n<!-- end -->\nb\n" for name in names)


@pytest.mark.quick
def test_a_page_gets_every_row_of_a_pass_losses_included(tmp_path):
    decode = row(**{"pass": "decode"}, also={"ours_share": 0.91, "ours_call_us": 27.2})
    older = row(peer="older", commit="fedcba9876")
    write = page(tmp_path, marked("fwd", "decode", "model"), row(ours_ms=4.0), older, decode)
    new = write()
    fwd, decoded, model = new.split("b\n")[:3]
    assert "old\n" not in new and fwd.count("0.50×") == 1
    assert fwd.count("| 0123456 |") == fwd.count("| fedcba9 |") == 1
    assert "Forward. G, torch 1, triton 2; medians" in fwd
    assert "| 91% / – | 27 / – | 0123456 |" in decoded and "0.50×" not in decoded
    assert model == "a\n<!-- evidence: model -->\n<!-- end -->\n" and write() == new
    lines = [line for line in new.splitlines() if line[:1] == "|"]
    assert {line.count("|") for line in lines} == {12, 14}


def test_each_card_and_each_triton_has_its_table(tmp_path):
    rows = row(peer="new"), row(peer="other", card="H"), row(peer="third", triton="3")
    new = page(tmp_path, marked("fwd"), *rows)()
    assert new.count("Forward. ") == 3 and "H, torch 1, triton 2;" in new


def test_peers_of_other_runs_are_next_to_our_rows_and_name_our_commit(tmp_path):
    peers = [row(peer="p", peer_ms=1.0, ours_error=None, commit="fedcba9876")]
    del peers[0]["ours_ms"]
    new = page(tmp_path, marked("elsewhere"), row(ours_ms=2.0), elsewhere=peers)()
    assert "| 2 | p | 1 | 0.50× |" in new and new.count("| 0123456 |") == 1
    peers[0]["card"] = "H"
    new = page(tmp_path, marked("elsewhere"), row(ours_ms=2.0), elsewhere=peers)()
    assert "| – | p | 1 | – |" in new and new.count("| fedcba9 |") == 1
    peers[0]["ours_ms"] = 4.0  # of the peer's run
    new = page(tmp_path, marked("elsewhere"), row(ours_ms=2.0), elsewhere=peers)()
    assert "H, torch 1, triton 2.\n\n| op |" in new and "| 4 | p | 1 | 0.25× |" in new


def test_layers_and_steps_come_from_their_files(tmp_path):
    kinds = {"variant": "gdn", "pass": "fwd", "part": "eager"} | STAMP
    layer = [
        kinds | {"side": "ours", "ms": 1.5},
        kinds | {"side": "ours", "ms": 3.25, "pass": "fwdbwd"},
        kinds | {"side": "fla", "ms": None, "error": "no"},
        kinds | {"side": "ours", "ms": 2.0, "triton": "3.10.0", "commit": "fedcba9876"},
    ]
    side = {"step_ms": 50.41, "peak_gb": 8.6, "first_step_s": 53.2, "graphs": 1, "breaks": 0}
    model = [
        side | STAMP | {"side": s, "step_ms": ms} for s, ms in (("ours", 50.41), ("fla", 84.6))
    ]
    model.append(model[0] | {"step_ms": 1.0})  # an earlier run
    none = page(tmp_path, marked("layers", "steps"), row())()
    assert "<!-- evidence: layers -->\n<!-- end -->" in none and "| step" not in none
    new = page(tmp_path, marked("layers", "steps"), row(), layer=layer, model=model)()
    assert f"{ABOUT}; G, torch 1, triton 3.10.0, commit fedcba9.\n" in new
    empty = " – / – |" * 4
    assert f"| GDN, Triton 2 | 1.5 / 3.25 |{empty}\n| GDN, Triton 3.10.0 | 2 / – |{empty}" in new
    assert f"{ABOUT}.\n" in new and "| step, ms | 50.4 | 84.6 |" in new


def test_steps_of_the_models_of_fla_and_several_gpus_come_from_their_files(tmp_path):
    ms = {("kda", "fla"): 107.73, ("kda", "kda_ops"): 85.5, ("gdn", "fla"): 3.0}
    fla = [{"variant": v, "side": s, "ms": x} | STAMP for (v, s), x in ms.items()]
    fla.append({"variant": "gdn", "side": "kda_ops", "refused": "no"} | STAMP)
    gpus = [
        {"op": "kda", "gate": "weak", "gpus": n, "fwd_ms": fwd, "fwdbwd_ms": both} | STAMP
        for n, fwd, both in ((1, 8.0, 30.0), (2, 5.0, 15.0))
    ]
    parallel = {"setting": "B1T64H1", "rows": gpus}
    marks = marked("fla_models", "parallel")
    new = page(tmp_path, marks, row(), fla_models=fla, parallel=parallel)()
    assert f"{ABOUT}.\n" in new and "| KDA | 107.7 | 85.5 |\n| GDN | 3.0 | – |" in new
    assert f"{ABOUT}; B1T64H1.\n" in new
    assert "| kda | weak | 2 | 8 to 5, 1.60× | 30 to 15, 2.00× |\n" in new


def test_tritons_are_compared_with_the_mean_of_the_oldest(tmp_path):
    call = {"op": "kda", "gate": "bound", "setting": "B1T64H1", "pass": "fwd"} | STAMP
    some = (("3.6.0", 1.0), ("3.10.0", 3.0), ("3.8.0", 1.8), ("3.6.0", 3.0))
    rows = [call | {"triton": triton, "ms": ms} for triton, ms in some]
    rows.append(call | {"op": "gdn", "triton": "3.8.0", "ms": 5.0})
    new = page(tmp_path, marked("tritons"), row(), tritons=rows)()
    assert (
        "G, torch 1, commit 0123456; ms.\n\n| op | gate | setting | pass | 3.6.0 | 3.8.0 |" in new
    )
    assert "| kda | bound | B1T64H1 | fwd | 2 | 1.8 (0.90) | 3 (1.50) |\n" in new
    assert "| gdn | bound | B1T64H1 | fwd | – | 5 | – |\n\n" in new
    assert f"- tests/gpu, {ABOUT}: 5 passed, 1 failed.\n<!-- end -->" in new


def test_a_summary_has_its_rows_and_the_picture(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "SUMMARY", {"A": name_of(row()), "B": "kda fwd none"})
    new = page(tmp_path, marked("summary"), row(ours_ms=4.0))()
    cells = "| A | B1T130H2HV4D16 | 4 | FLA 0.6.0 (Triton) | 2 | 0.50× | 0123456 |"
    assert f"{cells}\n<!-- end -->" in new
    assert "evidence.svg" in new and "G, torch 1, triton 2; GPU time." in new


def test_the_table_of_the_cpu_comes_from_a_file_of_its_own(tmp_path):
    cpu = {"dtype": "float32", "peers": {"here": "1.5"}, "rows": [row(ours_ms=4.0, card="CPU")]}
    new = page(tmp_path, marked("cpu"), evidence_cpu=cpu)()
    assert "CPU, torch 1, triton 2, here 1.5; float32, medians" in new and "0.50×" in new


def test_the_picture_has_a_dot_for_every_row_and_the_losses_in_red(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [row(ours_ms=m, **{"pass": p}) for p in ("fwd", "decode") for m in (0.002, 0.5, 4.0)]
    text = tables.draw(rows, "G <1>")
    ElementTree.fromstring(text)
    dots = {colour: text.count(f"fill: {colour}") for colour in ("#1a7f37", "#d1242f")}
    assert dots["#1a7f37"] == 2 * dots["#d1242f"] > 0
    assert "6 rows, 2 lost (red)" in text and "KDA decode, fla" in text and "G &lt;1&gt;" in text
    assert tables.draw(rows, "G <1>") == text  # the same bytes for the same rows
    apart = [row(peer="elsewhere", ours_ms=4.0), row(peer="untimed", card="H", ours_ms=None)]
    page(tmp_path, marked("pictures"), row(), elsewhere=apart)()
    text = (tmp_path / tables.FOLDER / "evidence.svg").read_text()
    assert "KDA forward, elsewhere" in text and "untimed" not in text and "2 rows" in text


def test_without_a_pair_of_times_there_is_no_picture(tmp_path):
    with pytest.raises(SystemExit, match="does not exist"):
        tables.main([str(tmp_path)])
    new = page(tmp_path, marked("pictures", "fwd"), row(peer=None, peer_ms=None))()
    assert "evidence.svg" not in new and not (tmp_path / tables.FOLDER / "evidence.svg").exists()


def test_a_page_in_a_folder_leads_back_to_the_results(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "performance.md").write_text(marked("pictures"))
    page(tmp_path, marked("fwd"), row())()
    said = (tmp_path / "docs" / "performance.md").read_text()
    assert "](../benchmarks/results/evidence.svg)" in said
