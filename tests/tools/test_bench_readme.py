"""``bench --readme``: tables and picture come from the files of evidence."""

import json
from xml.etree import ElementTree

import pytest

from kda_ops.bench import picture, readme
from kda_ops.bench.digests import code_of
from kda_ops.bench.rows import KEY, case_of
from tests.support.benchmark import row

SUITE = {"source": "s", "passed": 5, "failed": 1, "skipped": 0, "cut": None}


def evidence_of(*rows, **changed):
    """Make an evidence file of rows, which are valid unless they have a `code`."""
    code = {"triton": "2", "rows": {case_of(r): "scan:1" for r in rows}}
    made = [{"gpu": "G", "torch": "1", "triton": "2", "code": code_of("scan:1")} | r for r in rows]
    return {"code": code, "suite": SUITE, "rows": made, "missing": {}} | changed


@pytest.mark.quick
def test_a_readme_gets_every_row_between_its_markers():
    evidence = evidence_of(row(ours_ms=4.0), row(**{"pass": "decode"}, ours_ms=None))
    text = "a\n<!-- evidence: fwd -->\nold\n<!-- end -->\nb\n<!-- evidence -->\n<!-- end -->\nc\n"
    new = readme.rewrite(text, evidence)
    # losses are shown
    assert "old" not in new and new.count("0.50×") == 2 and "5 passed, 1 failed" in new
    assert (
        readme.rewrite("<!-- evidence: first_call_s -->\nold\n<!-- end -->", evidence)
        == "<!-- evidence: first_call_s -->\n<!-- end -->"
    )
    assert new.count("decode") == 1 and new.startswith("a\n") and new.endswith("c\n")
    assert readme.rewrite(new, evidence) == new
    decode = row(
        **{"pass": "decode"}, also={"ours_share": 0.91, "ours_call_us": 27.2, "peer_share": 0.7}
    )
    assert readme.table([decode], "decode").endswith("| 91% / 70% | 27 / – |")
    assert len({line.count("|") for line in readme.table([decode], "decode").splitlines()}) == 1
    assert (
        readme.rewrite(text, evidence, {"x.svg": "words"}).count(
            "![words](benchmarks/results/x.svg)"
        )
        == 1
    )
    missing = {f"kda fwd B1 weak fp32 kv {side}": "out of time" for side in ("fla", "alone")}
    missing |= {
        "kda fwd B2 weak fp32 kv fla": "it has none",
        f"{' '.join(row()[n] for n in KEY[:-1])} fla": "out of time",
    }
    lacking = readme.rewrite(text, evidence | {"missing": missing})
    assert (
        "not reached" not in new
        and lacking.count("1 more cases were not reached") == 2
        and "decode" in lacking.split("1 more cases were not reached")[2]
    )


def test_a_readme_has_no_row_of_other_kernels_and_a_table_for_each_card():
    text = "<!-- evidence: fwd -->\n<!-- end -->\n<!-- evidence: decode -->\n<!-- end -->\n"
    rows = (
        row(peer="new"),
        row(peer="other", gpu="H"),
        row(peer="stale", code="0"),
        row(**{"pass": "decode"}, peer="stale", code="0"),
    )
    new = readme.rewrite(text, evidence_of(*rows))
    assert "| stale |" not in new and new.count("| new |") == new.count("| other |") == 1
    assert new.count("G, torch 1, triton 2; ") == new.count("H, torch 1, triton 2; ") == 1
    assert (
        new.count("; 1 rows of earlier kernels are left out; ") == 2
        and "1 rows of earlier kernels are left out.\n<!-- end -->" in new
    )
    peers = [
        {
            "op": "kda",
            "peer": "p",
            "setting": rows[0]["setting"],
            "gate": "weak",
            "ours": "weak",
            "fwd": 1.0,
            "fwdbwd": 1.0,
        }
    ]
    found = evidence_of(row(ours_ms=3.0, code="0"), row(ours_ms=2.0))
    assert "| 2 |" in readme.rewrite(
        "<!-- evidence: elsewhere -->\n<!-- end -->", found, elsewhere=peers
    )


def test_rows_whose_process_died_were_not_reached():
    missing = {"kda fwd B1 weak fp32 kv fla": "the process ended with -11"}
    said = readme.rewrite(
        "<!-- evidence: fwd -->\n<!-- end -->", evidence_of(row(), missing=missing)
    )
    assert "1 more cases were not reached" in said
    assert "ours, s |" in readme.table([row(**{"pass": "first_call_s"})], "first_call_s")


def test_a_readme_gets_the_table_of_the_cpu_from_a_file_of_its_own():
    text = "<!-- evidence: cpu -->\nold\n<!-- end -->"
    cpu = {
        "device": "CPU, 2 threads",
        "torch": "2",
        "dtype": "float32",
        "peers": {"here": "1.5", "not here": None},
        "rows": [row(ours_ms=4.0)],
    }
    new = readme.rewrite(text, evidence_of(), None, cpu)
    assert (
        "CPU, 2 threads, torch 2, here 1.5; float32, medians" in new
        and "0.50×" in new
        and "old" not in new
        and "not here" not in new
    )
    assert readme.rewrite(text, evidence_of()) == "<!-- evidence: cpu -->\n<!-- end -->"


def test_the_picture_has_a_dot_for_every_row_and_losses_left_of_one():
    rows = [row(ours_ms=m, **{"pass": p}) for p in ("fwd", "decode") for m in (0.002, 0.5, 4.0)] + [
        row(ours_ms=None),
        row(peer="sdpa", peer_error=None),
    ]
    root = ElementTree.fromstring(picture.draw(rows, "G <1>"))
    dots = {
        kind: [float(c.get("cx")) for c in root.findall(".//{*}circle") if c.get("class") == kind]
        for kind in ("won", "lost")
    }
    one = [
        float(line.get("x1")) for line in root.findall(".//{*}line") if line.get("class") == "one"
    ]
    assert (
        len(dots["won"]) == 5
        and len(dots["lost"]) == 2
        and max(dots["lost"]) < one[0] < min(dots["won"])
    )
    words = [t.text for t in root.findall(".//{*}text")]
    assert (
        "7 rows, 2 lost. G <1>" in words
        and "kda decode · fla" in words
        and "kda fwd · sdpa, for scale" in words
    )
    width = float(root.get("viewBox").split()[2])
    assert all(0 < x < width for x in dots["won"] + dots["lost"])
    assert ElementTree.fromstring(picture.draw([], "")) is not None


def test_the_readme_command_writes_the_picture_and_nothing_without_evidence(tmp_path):
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    text, evidence = "a\n<!-- evidence -->\n<!-- end -->\n", evidence_of(row())
    (tmp_path / "README.md").write_text(text)
    with pytest.raises(SystemExit, match="does not exist"):
        readme.main([str(tmp_path)])
    assert (tmp_path / "README.md").read_text() == text and not list(
        (tmp_path / "benchmarks" / "results").iterdir()
    )
    (tmp_path / "benchmarks" / "results" / "evidence.json").write_text(json.dumps(evidence))
    assert readme.main([str(tmp_path)]) == 0
    written = (tmp_path / "README.md").read_text()
    assert (
        "(benchmarks/results/evidence.svg)" in written
        and "drift.png" not in written
        and "2.00×" in written
    )
    assert ElementTree.parse(tmp_path / "benchmarks" / "results" / "evidence.svg") is not None
    assert readme.main([str(tmp_path)]) == 0 and (tmp_path / "README.md").read_text() == written
    (tmp_path / "benchmarks" / "results" / "evidence.json").write_text(
        json.dumps(evidence_of(row(peer=None, peer_ms=None)))
    )
    # nothing to compare
    assert (
        readme.main([str(tmp_path)]) == 0
        and not (tmp_path / "benchmarks" / "results" / "evidence.svg").exists()
    )
    assert "evidence.svg" not in (tmp_path / "README.md").read_text()
