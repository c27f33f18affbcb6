"""``python -m benchmarks tables``: tables and picture come from the files of results."""

import json
from xml.etree import ElementTree

import pytest

from benchmarks import tables
from kda_ops.tools.cases import case_of, name_of
from kda_ops.tools.digests import code_of
from tests.support.benchmark import row

COUNTS = {"passed": 5, "failed": 1, "skipped": 0}
SUITE = {"source": "s", "gpu": "G", "torch": "1", "cut": None} | COUNTS


def evidence_of(*rows):
    """Build an evidence file of rows that are valid unless they have a `code`."""
    code = {"triton": "2", "rows": {case_of(r): "scan:1" for r in rows}}
    made = [{"gpu": "G", "torch": "1", "triton": "2", "code": code_of("scan:1")} | r for r in rows]
    return {"code": code, "suites": {"2": SUITE}, "rows": made, "missing": {}}


def page(folder, text, *rows, **files):
    """Make a checkout with a README, an evidence file of rows and other files of results."""
    results = folder / tables.FOLDER
    results.mkdir(parents=True, exist_ok=True)
    (folder / "README.md").write_text(text)
    for name, found in ({"evidence": evidence_of(*rows)} | files).items():
        (results / f"{name}.json").write_text(json.dumps(found))
    return lambda: (tables.main([str(folder)]), (folder / "README.md").read_text())[1]


def marked(*names):
    return "".join(f"a\n<!-- evidence: {name} -->\nold\n<!-- end -->\nb\n" for name in names)


def test_a_page_gets_every_row_of_a_pass_losses_included(tmp_path):
    decode = row(**{"pass": "decode"}, also={"ours_share": 0.91, "ours_call_us": 27.2})
    write = page(tmp_path, marked("fwd", "decode", "model"), row(ours_ms=4.0), decode)
    new = write()
    fwd, decoded, model = new.split("b\n")[:3]
    assert (
        "old" not in new
        and fwd.count("0.50×") == 1
        and "tests/gpu on G: 5 passed, 1 failed;" in fwd
    )
    assert "| 91% / – | 27 / – |" in decoded and "0.50×" not in decoded
    assert model == "a\n<!-- evidence: model -->\n<!-- end -->\n" and write() == new
    lines = [line for line in new.splitlines() if line[:1] == "|"]
    assert {line.count("|") for line in lines} == {11, 13}
    assert "ours, s |" in tables.header("first_call_s")


def test_no_row_of_other_kernels_is_published_and_each_card_has_its_table(tmp_path):
    stale = {"peer": "stale", "code": "0"}
    rows = (
        row(peer="new"),
        row(peer="other", gpu="H"),
        row(**stale),
        row(**{"pass": "decode"} | stale),
    )
    new = page(tmp_path, marked("fwd", "decode", "pictures"), *rows)()
    assert "| stale |" not in new and new.count("| new |") == new.count("| other |") == 1
    assert new.count("G, torch 1, triton 2; ") == new.count("H, torch 1, triton 2; ") == 1
    assert new.count(". 1 rows of earlier kernels are left out; ") == 2
    assert "Decode, one token. 1 rows of earlier kernels are left out.\n<!-- end -->" in new
    assert "![How many" in new and "](benchmarks/results/evidence.svg)" in new


def test_peers_of_other_runs_stand_next_to_our_valid_rows(tmp_path):
    peers = [row(peer="p", peer_ms=1.0) | {"ours_error": None, "gpu": "G"}]
    del peers[0]["ours_ms"]
    rows = row(ours_ms=3.0, code="0"), row(ours_ms=2.0)
    assert "| 2 | p | 1 | 0.50× |" in page(tmp_path, marked("elsewhere"), *rows, elsewhere=peers)()
    assert "| – | p | 1 | – |" in page(tmp_path, marked("elsewhere"), rows[0], elsewhere=peers)()
    peers[0]["gpu"] = "another card"
    assert "| – | p | 1 | – |" in page(tmp_path, marked("elsewhere"), *rows, elsewhere=peers)()


def test_a_row_of_another_run_keeps_our_time_of_that_run_and_each_card_has_its_table(tmp_path):
    peers = [row(peer=card, gpu=card, ours_ms=4.0, peer_ms=1.0) for card in ("G", "H")]
    new = page(tmp_path, marked("elsewhere"), row(ours_ms=2.0), elsewhere=peers)()
    assert "G.\n\n| op |" in new and "H.\n\n| op |" in new
    assert "| 4 | G | 1 | 0.25× |" in new and "| 4 | H | 1 | 0.25× |" in new


def test_layers_and_steps_come_from_their_files(tmp_path):
    sides = (("eager", "ours"), ("eager", "before"), ("eager", "fla"), ("compiled", "plain norm"))
    layer = [
        {"part": part, "side": side, "variant": variant, "pass": pass_, "ms": ms, "triton": "3.6.0"}
        for part, side in (*sides, ("compiled", "before"))
        for variant in ("kda", "gdn")
        for pass_, ms in (("fwd", 1.5), ("fwdbwd", 3.25))
        if (side, variant, pass_) != ("fla", "gdn", "fwdbwd")
    ]
    layer.append(
        layer[-1] | {"part": "eager", "side": "fla", "variant": "gdn", "ms": None, "error": "no"}
    )
    side = {"step_ms": 50.41, "peak_gb": 8.6, "first_step_s": 53.2, "graphs": 1, "breaks": 0}
    model = {"sides": {"ours": side, "fla": side | {"step_ms": 84.6, "breaks": 5}}}
    none = page(tmp_path, marked("layers", "steps"), row())()
    assert "<!-- evidence: layers -->\n<!-- end -->" in none and "| step" not in none
    new = page(tmp_path, marked("layers", "steps"), row(), layer=layer, model=model)()
    assert f"| KDA, Triton 3.6.0 |{' 1.5 / 3.25 |' * 5}\n" in new
    two = " 1.5 / 3.25 |" * 2
    assert f"| GDN, Triton 3.6.0 |{two} 1.5 / – |{two}\n" in new
    assert "| step, ms | 50.4 | 84.6 |" in new and "| breaks | 0 | 5 |" in new


def test_steps_of_the_models_of_fla_come_from_their_file(tmp_path):
    ms = {("kda", "fla"): 107.73, ("kda", "kda_ops"): 85.5, ("gdn", "fla"): 3.0}
    rows = [{"variant": v, "side": s, "ms": x} for (v, s), x in ms.items()]
    rows.append({"variant": "gdn", "side": "kda_ops", "refused": "no"})
    found = {"environment": {"gpu": "G", "torch": "1", "triton": "3"}, "rows": rows}
    assert "| KDA |" not in page(tmp_path, marked("fla_models"), row())()
    new = page(tmp_path, marked("fla_models"), row(), fla_models=found)()
    assert "G, torch 1, triton 3.\n" in new
    assert "| KDA | 107.7 | 85.5 |\n| GDN | 3.0 | – |" in new


def test_speedups_over_several_gpus_are_computed_from_their_times(tmp_path):
    call = {"op": "kda", "gate": "weak"}
    rows = [
        call | {"gpus": n, "fwd_ms": fwd, "fwdbwd_ms": both}
        for n, fwd, both in ((1, 8.0, 30.0), (2, 5.0, 15.0), (4, 4.0, 8.0))
    ]
    found = {"device": "G", "torch": "1", "triton": "2", "setting": "B1T64H1", "rows": rows}
    assert "GPUs" not in page(tmp_path, marked("parallel"), row())()
    new = page(tmp_path, marked("parallel"), row(), parallel=found)()
    assert "G, torch 1, triton 2; B1T64H1.\n" in new
    assert "| kda | weak | 2 | 8 to 5, 1.60× | 30 to 15, 2.00× |\n" in new
    assert "| kda | weak | 4 | 8 to 4, 2.00× | 30 to 8, 3.75× |\n" in new


def test_a_layer_measured_with_another_triton_has_a_line_of_its_own(tmp_path):
    kinds = {"part": "eager", "side": "fla", "variant": "gdn", "pass": "fwd"}
    layer = [kinds | {"ms": ms, "triton": t} for t, ms in (("3.10.0", 2.0), ("3.6.0", 1.0))]
    new = page(tmp_path, marked("layers"), row(), layer=layer)()
    empty = " – / – | – / – |"
    first = f"| GDN, Triton 3.6.0 |{empty} 1 / – |{empty}\n"
    assert first + f"| GDN, Triton 3.10.0 |{empty} 2 / – |{empty}\n" in new


def test_tritons_are_compared_with_the_mean_of_the_oldest(tmp_path):
    call = {"op": "kda", "gate": "bound", "setting": "B1T64H1", "pass": "fwd"}
    some = (("3.6.0", 1.0), ("3.10.0", 3.0), ("3.8.0", 1.8), ("3.6.0", 3.0))
    rows = [call | {"triton": triton, "ms": ms} for triton, ms in some]
    rows += [call | {"pass": "fwdbwd", "triton": t, "ms": 4.0} for t in ("3.6.0", "3.8.0")]
    rows.append(call | {"op": "gdn", "triton": "3.8.0", "ms": 5.0})
    found = {"gpu": "G", "torch": "1", "rows": rows}
    new = page(tmp_path, marked("tritons"), row(), tritons=found)()
    assert "G, torch 1; ms.\n\n| op | gate | setting | pass | 3.6.0 | 3.8.0 | 3.10.0 |\n" in new
    assert "| kda | bound | B1T64H1 | fwd | 2 | 1.8 (0.90) | 3 (1.50) |\n" in new
    assert "| kda | bound | B1T64H1 | fwdbwd | 4 | 4 (1.00) | – |\n" in new
    assert "| gdn | bound | B1T64H1 | fwd | – | 5 | – |\n\n" in new
    assert "- Triton 2, torch 1, tests/gpu on G: 5 passed, 1 failed.\n<!-- end -->" in new
    assert "3.8.0" not in page(tmp_path / "none", marked("tritons"), row())()


def test_the_tests_are_those_of_the_triton_of_the_rows(tmp_path):
    found = evidence_of(row(), row(gate="strong", triton="3.10.0"))
    found["suites"] = {"3.10.0": SUITE | {"passed": 7, "cut": "cut after 1 s"}}
    new = page(tmp_path, marked("fwd", "tritons"), evidence=found)()
    assert "triton 2; tests/gpu did not run; " in new
    assert "triton 3.10.0; tests/gpu on G: 7 passed, 1 failed, cut after 1 s; " in new
    found["suites"] |= {"2": SUITE}
    tritons = {"gpu": "G", "torch": "1", "rows": []}
    call = {"op": "kda", "gate": "bound", "setting": "B1T64H1", "pass": "fwd", "ms": 1.0}
    tritons["rows"] = [call | {"triton": t} for t in ("2", "3.10.0")]
    new = page(tmp_path, marked("fwd", "tritons"), evidence=found, tritons=tritons)()
    assert "; tests/gpu on G: 5 passed, 1 failed; " in new
    assert (
        "failed.\n- Triton 3.10.0, torch 1, tests/gpu on G: 7 passed, 1 failed, cut after 1 s.\n"
        in new
    )


def test_a_summary_has_at_most_eight_rows_and_the_picture(tmp_path, monkeypatch):
    assert len(tables.SUMMARY) <= 8
    monkeypatch.setattr(tables, "SUMMARY", {"A": name_of(row()), "B": "kda fwd none"})
    new = page(tmp_path, marked("summary"), row(ours_ms=4.0))()
    assert "| A | B1T130H2HV4D16 | 4 | FLA 0.6.0 (Triton) | 2 | 0.50× |\n<!-- end -->" in new
    assert "evidence.svg" in new and "G, torch 1, triton 2; GPU time." in new


def test_the_table_of_the_cpu_comes_from_a_file_of_its_own(tmp_path):
    cpu = {"device": "CPU, 2 threads", "torch": "2", "dtype": "float32", "peers": {"here": "1.5"}}
    new = page(tmp_path, marked("cpu"), evidence_cpu=cpu | {"rows": [row(ours_ms=4.0)]})()
    assert "CPU, 2 threads, torch 2, here 1.5; float32, medians" in new and "0.50×" in new


def test_the_picture_has_a_dot_for_every_row_and_the_losses_in_red():
    pytest.importorskip("matplotlib")
    rows = [row(ours_ms=m, **{"pass": p}) for p in ("fwd", "decode") for m in (0.002, 0.5, 4.0)]
    text = tables.draw(rows, "G <1>")
    ElementTree.fromstring(text)
    dots = {colour: text.count(f"fill: {colour}") for colour in ("#1a7f37", "#d1242f")}
    assert dots["#1a7f37"] == 2 * dots["#d1242f"] > 0
    assert "6 rows, 2 lost (red)" in text and "KDA decode, fla" in text and "G &lt;1&gt;" in text
    assert tables.draw(rows, "G <1>") == text  # the same bytes for the same rows
    one = next(line for line in text.splitlines() if "stroke: #000000" in line)
    assert one


def test_the_picture_has_the_peers_of_other_runs(tmp_path):
    pytest.importorskip("matplotlib")
    apart = [
        row(peer="elsewhere", gpu="G", ours_ms=4.0),
        row(peer="untimed", gpu="H", ours_ms=None),
    ]
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
