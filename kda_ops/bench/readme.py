"""Rewrites the tables of README.md from benchmarks/results: every row, those that lost
included, between two markers; and draws them beside that file.

``<!-- evidence: fwd -->`` ... ``<!-- end -->`` holds the rows of one pass;
``<!-- evidence -->`` ... ``<!-- end -->`` all of them. The first has the pictures. Each card and
its versions have a table of their own. Rows that were measured with other kernels than the file has
digests of are left out. ``<!-- evidence: cpu -->`` ... ``<!-- end -->`` holds the rows of
evidence_cpu.json, which ``bench --device cpu --json`` wrote; ``<!-- evidence: elsewhere -->`` what
elsewhere.json has of peers that were measured in runs of their own, with our rows beside it.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

from kda_ops.bench import picture
from kda_ops.bench.cases import GATES
from kda_ops.bench.compare import UNFINISHED
from kda_ops.bench.digests import is_valid
from kda_ops.bench.machine import checkout
from kda_ops.bench.rows import case_of, ratio

PICTURES = {
    "evidence.svg": "how many times as fast as each peer, every row that has both times",
    "drift.png": "error of 10,000 decode steps beside that of the chunk form, from drift.json",
}
TITLES = {
    "fwd": "Forward",
    "fwdbwd": "Forward and backward",
    "decode": "Decode, one token",
    "first_call_s": "First call of a process, empty caches",
}
DECODE_COLUMNS = {
    "of a copy, ours / its": ("share", ".0%"),
    "µs per call from Python": ("call_us", ".0f"),
}
_MARKED = re.compile(r"(<!-- evidence(?:: (\w+))? -->\n).*?(<!-- end -->)", re.DOTALL)


def _number(x: float | None, form: str) -> str:
    return "–" if x is None else format(x, form)


def _error(row: dict, side: str) -> str:
    """The error of a side, and of a training pass the name of the output or gradient that has
    it.
    """
    worst = row["also"].get(f"{side}_worst")
    return _number(row[f"{side}_error"], ".1e") + (f" ({worst})" if worst else "")


def _of(rows: list[dict], pass_: str | None) -> list[dict]:
    return [r for r in rows if pass_ in (None, r["pass"])]


def table(rows: list[dict], pass_: str | None) -> str:
    """A Markdown table of one pass, or of all, by operator, gate and setting."""
    shown = sorted(
        _of(rows, pass_), key=lambda r: (r["op"] != "kda", GATES.index(r["gate"]), r["setting"])
    )
    columns = DECODE_COLUMNS if pass_ == "decode" else {}
    unit = "s" if pass_ == "first_call_s" else "ms"
    lines = [
        (
            f"| op | {'pass | ' if pass_ is None else ''}setting | gate | state | ours, {unit} | "
            f"peer | its {unit} | ratio | error | its error |"
        )
        + "".join(f" {n} |" for n in columns),
        (
            f"|---|{'---|' if pass_ is None else ''}---|---|---|---|---|---|---|---|---|"
            f"{'---|' * len(columns)}"
        ),
    ]
    for r in shown:
        faster = ratio(r)
        cells = [
            r["op"],
            *([r["pass"]] if pass_ is None else []),
            r["setting"],
            r["gate"],
            f"{r['state']} {r['layout']}",
            _number(r["ours_ms"], ".3g"),
            r["peer"] or "none",
            _number(r["peer_ms"], ".3g"),
            "–" if faster is None else f"{faster:.2f}×",
            _error(r, "ours"),
            _error(r, "peer"),
            *(
                " / ".join(
                    _number(r["also"].get(f"{side}_{name}"), form) for side in ("ours", "peer")
                )
                for name, form in columns.values()
            ),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def machine(about: dict) -> str:
    """The card and the versions of a row, or of a run of the suite."""
    return f"{about['gpu']}, torch {about['torch']}, triton {about['triton']}"


def machines(rows: list[dict]) -> dict[str, list[dict]]:
    """Rows by card and versions."""
    found: dict[str, list[dict]] = {}
    for row in rows:
        found.setdefault(machine(row), []).append(row)
    return found


def _suite(suite: dict) -> str:
    counts = ", ".join(
        f"{suite[word]} {word}" for word in ("passed", "failed", "skipped") if suite[word]
    )
    return (
        f"tests/gpu {counts}{', ' + suite['cut'] if suite['cut'] else ''} (source "
        f"{suite['source']})"
    )


def _of_cpu(cpu: dict, protocol: str) -> str:
    peers = "".join(f", {name} {version}" for name, version in cpu["peers"].items() if version)
    return (
        f"{cpu['device']}, torch {cpu['torch']}{peers}; {cpu['dtype']}, "
        f"{protocol}{table(cpu['rows'], None)}\n"
    )


def _elsewhere(peers: list[dict], rows: list[dict]) -> str:
    """Peers' times of other runs beside ours, each of the first row that has it."""

    def ours(peer: dict, pass_: str) -> str:
        want = (peer["op"], pass_, peer["setting"], peer["ours"])
        times = (
            r["ours_ms"] for r in rows if (r["op"], r["pass"], r["setting"], r["gate"]) == want
        )
        return _number(next((ms for ms in times if ms is not None), None), ".3g")

    lines = [
        (
            "| op | peer | setting | gate, its / ours | forward, its | ours, ms | forward and "
            "backward, its | ours, ms |"
        ),
        f"|{'---|' * 8}",
    ]
    for p in peers:
        times = (f"{p['fwd']:.3g}", ours(p, "fwd"), f"{p['fwdbwd']:.3g}", ours(p, "fwdbwd"))
        lines.append(
            "| {} |".format(
                " | ".join(
                    (p["op"], p["peer"], p["setting"], p["gate"] + " / " + p["ours"], *times)
                )
            )
        )
    return "\n".join(lines) + "\n"


def valid_rows(evidence: dict) -> list[dict]:
    """The rows of an evidence file that may be published."""
    return [r for r in evidence["rows"] if is_valid(r, evidence["code"]["rows"])]


def rewrite(
    text: str,
    evidence: dict,
    pictures: dict[str, str] | None = None,
    cpu: dict | None = None,
    elsewhere: list[dict] | None = None,
) -> str:
    """The README with the tables of an evidence file between its markers, none where a pass has no
    rows, and pictures before the first of them; and, of `cpu` and `elsewhere` files, their own.
    """
    shown = "".join(
        f"![{words}](benchmarks/results/{name})\n\n" for name, words in (pictures or {}).items()
    )
    protocol = "medians, error: relative RMS against float64.\n\n"
    rows, late = (
        valid_rows(evidence),
        {
            name.rsplit(" ", 1)[0]
            for name, why in evidence["missing"].items()
            if why.startswith(UNFINISHED)
        },
    )
    late -= set(map(case_of, rows))
    stale = [r for r in evidence["rows"] if r not in rows]

    def fill(m: re.Match) -> str:
        nonlocal shown
        if m[2] == "elsewhere":
            return m[1] + (_elsewhere(elsewhere, rows) if elsewhere else "") + m[3]
        if m[2] == "cpu":
            return m[1] + (_of_cpu(cpu, protocol) if cpu else "") + m[3]
        of_pass = _of(rows, m[2])
        if not of_pass and not _of(stale, m[2]):
            return m[1] + m[3]
        notes = [_suite(evidence["suite"])]
        if lacking := sum(m[2] in (None, case.split()[1]) for case in late):
            notes.append(f"{lacking} more cases were not reached")
        if older := len(_of(stale, m[2])):
            notes.append(f"{older} rows of earlier kernels are left out")
        tables = [
            f"{name}; {'; '.join(notes)}; {protocol}{table(some, m[2])}"
            for name, some in machines(of_pass).items()
        ]
        tables = tables or [f"{'; '.join(notes)}."]
        before, shown = shown, ""
        title = TITLES.get(m[2])
        return m[1] + before + (f"{title}. " if title else "") + "\n\n".join(tables) + "\n" + m[3]

    return _MARKED.sub(fill, text)


def main(argv: list[str]) -> int:
    """Rewrite README.md of the checkout, or of another folder."""
    parser = argparse.ArgumentParser(
        prog="python -m kda_ops bench --readme",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", nargs="?", type=Path, help="the checkout by default")
    root = parser.parse_args(argv).folder or checkout()
    folder, readme = root / "benchmarks" / "results", root / "README.md"
    source = folder / "evidence.json"
    if not source.exists():
        raise SystemExit(f"{source} does not exist: run python -m kda_ops evidence on a GPU first.")
    text = readme.read_text()
    if not _MARKED.search(text):
        raise SystemExit("README.md has no <!-- evidence --> ... <!-- end --> to write between.")
    evidence = json.loads(source.read_text())
    drawn = folder / "evidence.svg"
    drawn.unlink(missing_ok=True)
    if rows := [r for r in valid_rows(evidence) if ratio(r) is not None]:
        drawn.write_text(picture.draw(rows, "; ".join(machines(rows))))
    there = {name: words for name, words in PICTURES.items() if (folder / name).exists()}
    others = (
        json.loads(f.read_text()) if f.exists() else None
        for f in (folder / "evidence_cpu.json", folder / "elsewhere.json")
    )
    readme.write_text(rewrite(text, evidence, there, *others))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
