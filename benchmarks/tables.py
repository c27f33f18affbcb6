"""Write the tables and the picture of README.md and docs/performance.md from the results.

``<!-- evidence: fwd -->`` ... ``<!-- end -->`` holds the rows of one pass, losses included, a table
per card and versions. Each row, or the caption of the table, names the commit that was measured.
The other marks: ``summary`` holds the picture and the rows of `SUMMARY`, and ``pictures`` all
pictures. ``cpu`` holds the rows of evidence_cpu.json, which ``--device cpu --json`` wrote.
``elsewhere`` holds the peers of elsewhere.json, measured in runs of their own, next to our rows.
``layers`` and ``steps`` hold the times of layer.json and the training steps of model.json.
``tritons`` compares the versions of Triton in tritons.json, and has the GPU tests with each.
``fla_models`` holds the training steps of FLA's models in fla_models.json, and ``parallel`` the
times on several GPUs in parallel.json. ``engines`` holds the functions of serving engines next to
ours in engines.json.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.cases import GATES, PASSES, case_of, name_of
from benchmarks.records import checkout
from kda_ops.doctor import parse_version
from kda_ops.tools.machine import Help

PAGES = (
    "README.md",
    "docs/performance.md",
    "docs/drop-ins.md",
    "docs/parallel.md",
    "docs/engines.md",
)
FOLDER = "benchmarks/results"
PICTURES = {
    "evidence.svg": "How many times as fast as each peer: every GPU row that has both times.",
    "drift.png": "Error of 10,000 decode steps and of the chunk form, from drift.json.",
}
# The rows of README and their names in the results. Losses are among them.
SUMMARY = {
    "KDA forward": "kda fwd B8T4096H32 bound fp32 kv fla",
    "KDA forward and backward": "kda fwdbwd B1T8192H96 bound fp32 kv fla",
    "KDA forward, strong": "kda fwd B8T4096H32 strong_safe fp32 kv cudnn",
    "KDA with backward, strong": "kda fwdbwd B8T4096H32 strong_safe fp32 kv cudnn",
    "KDA with backward, weak": "kda fwdbwd B1T8192H96 weak_safe fp32 kv cudnn",
    "KDA forward, long": "kda fwd B1T65536H32 strong_safe fp32 kv cudnn",
    "GDN forward": "gdn fwd B8T4096H32 softplus fp32 kv fla",
    "GDN forward, strong": "gdn fwd B8T4096H32 strong fp32 kv flashqla",
    "KDA decode, one token": "kda decode B128T1H32 bound fp32 kv fla",
}
SHOWN = {"fla": "FLA 0.6.0 (Triton)", "flashqla": "FlashQLA 0.1.3", "cudnn": "cuDNN frontend 1.32"}
TITLES = {
    "fwd": "Forward",
    "fwdbwd": "Forward and backward",
    "decode": "Decode, one token",
    "first_call_s": "First call of a process, empty caches",
    "model": "Training step of 8 layers",
}
# What a pass records of each side next to times and errors: column, name and form.
MORE = {
    "fwdbwd": (("peak, GB", "peak_gb", ".2f"),),
    "first_call_s": (("with backward, s", "fwdbwd_s", ".1f"),),
    "decode": (("of a copy", "share", ".0%"), ("µs per call from Python", "call_us", ".0f")),
    "model": (
        ("first step, s", "first_step_s", ".0f"),
        ("peak, GB", "peak_gb", ".1f"),
        ("graphs", "graphs", "d"),
        ("breaks", "breaks", "d"),
    ),
}
SHORT = 7  # digits of a commit in a table
PROTOCOL = "medians, error: relative RMS against float64."
_MARKED = re.compile(r"(<!-- evidence: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def ratio(row: dict) -> float | None:
    """Return how many times faster we are."""
    return row["peer_ms"] / row["ours_ms"] if row["ours_ms"] and row["peer_ms"] else None


def _number(x: float | None, form: str) -> str:
    return "–" if x is None else format(x, form)


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _header(*names: str) -> str:
    return f"{_line(*names)}\n|{'---|' * len(names)}"


def _times(row: dict) -> list[str]:
    faster = "–" if ratio(row) is None else f"{ratio(row):.2f}×"
    times = (_number(row[n], ".3g") for n in ("ours_ms", "peer_ms"))
    return [next(times), row["peer"] or "none", next(times), faster]


def header(pass_: str | None) -> str:
    """Return the two first lines of a table of one pass, or of all."""
    unit = "s" if pass_ == "first_call_s" else "ms"
    names = ["op", *(["pass"] if pass_ is None else []), "setting", "gate", "state"]
    names += [f"ours, {unit}", "peer", f"its {unit}", "ratio", "error", "its error"]
    more = [f"{column}, ours / its" for column, *_ in MORE.get(pass_ or "", ())]
    return _header(*names, *more, "commit")


def row_line(row: dict, pass_: str | None = None) -> str:
    """Return a row of such a table."""
    cells = [row["op"], *([row["pass"]] if pass_ is None else []), row["setting"], row["gate"]]
    cells += [f"{row['state']} {row['layout']}", *_times(row)]
    for side in ("ours", "peer"):
        worst = row["also"].get(f"{side}_worst")
        cells.append(_number(row[f"{side}_error"], ".1e") + (f" ({worst})" if worst else ""))
    for _, name, form in MORE.get(pass_ or "", ()):
        both = (_number(row["also"].get(f"{side}_{name}"), form) for side in ("ours", "peer"))
        cells.append(" / ".join(both))
    return _line(*cells, row["commit"][:SHORT])


def table(rows: list[dict], pass_: str | None) -> str:
    """Return a Markdown table of one pass, or of all, by operator, gate and setting."""
    rows = [r for r in rows if pass_ in (None, r["pass"])]
    rows.sort(key=lambda r: (r["op"] != "kda", GATES.index(r["gate"]), r["setting"]))
    return "\n".join([header(pass_), *(row_line(r, pass_) for r in rows)])


def machine(row: dict, names: tuple[str, ...] = ("card", "torch", "triton")) -> str:
    """Return the card and the versions of a row."""
    return ", ".join(f"{n} {row[n]}" if n != "card" else row[n] for n in names)


def about(rows: list[dict], names: tuple[str, ...] = ("card", "torch", "triton")) -> str:
    """Return the cards, the versions and the commits of some rows."""
    commits: dict[str, dict[str, None]] = {}
    for r in rows:
        commits.setdefault(machine(r, names), {})[r["commit"][:SHORT]] = None
    return "; ".join(f"{name}, commit {', '.join(some)}" for name, some in commits.items())


def by_machine(rows: list[dict]) -> dict[str, list[dict]]:
    """Return rows by card and versions."""
    found: dict[str, list[dict]] = {}
    for r in rows:
        found.setdefault(machine(r), []).append(r)
    return found


def of_suite(triton: str, ran: dict) -> str:
    """Return what became of the GPU tests with a Triton, where and of which commit."""
    counts = [f"{ran[w]} {w}" for w in ("passed", "failed", "skipped") if ran[w]]
    cut = [ran["cut"]] if ran["cut"] else []
    return f"tests/gpu, {about([ran | {'triton': triton}])}: {', '.join([*counts, *cut])}"


def of_pass(rows: list[dict], pass_: str) -> str:
    """Return the tables of a pass, one per card and versions, with a caption each."""
    some = by_machine([r for r in rows if r["pass"] == pass_])
    return "\n".join(
        f"{TITLES[pass_]}. {name}; {PROTOCOL}\n\n{table(rows, pass_)}\n"
        for name, rows in some.items()
    )


def of_cpu(cpu: dict) -> str:
    """Return the table of a file of a CPU."""
    peers = "".join(f", {name} {version}" for name, version in cpu["peers"].items())
    where = "; ".join(by_machine(cpu["rows"]))
    return f"{where}{peers}; {cpu['dtype']}, {PROTOCOL}\n\n{table(cpu['rows'], None)}\n"


def with_ours(peers: list[dict], rows: list[dict]) -> list[dict]:
    """Return rows of peers from other runs, with our times of the same call on the same card.

    A row that has our time of its own run keeps it. The commit is the one of our time.
    """
    ours = {(case_of(r), r["card"]): r for r in rows}

    def joined(peer: dict) -> dict:
        if "ours_ms" in peer:
            return peer
        there = ours.get((case_of(peer), peer["card"]), {"ours_ms": None})
        return there | peer | {"commit": there.get("commit", peer["commit"])}

    return [joined(p) for p in peers]


def of_elsewhere(apart: list[dict]) -> str:
    """Return a table per card and versions of the peers of other runs."""
    return "\n".join(
        f"{name}.\n\n{table(rows, None)}\n" for name, rows in by_machine(apart).items()
    )


def of_layers(rows: list[dict]) -> str:
    """Return the times of whole layers, forward / forward and backward, by version of Triton."""
    rows = [r for r in rows if "variant" in r and "pass" in r]
    ms = {(r["variant"], r["triton"], r["part"], r["side"], r["pass"]): r.get("ms") for r in rows}
    layers = sorted({key[:2] for key in ms}, key=lambda k: (k[0] != "kda", parse_version(k[1])))
    columns = {
        "eager": ("eager", "ours"),
        "eager before": ("eager", "before"),
        "FLA": ("eager", "fla"),
        "compiled": ("compiled", "plain norm"),
        "compiled before": ("compiled", "before"),
    }
    lines = [
        _line(
            f"{variant.upper()}, Triton {triton}",
            *(
                " / ".join(
                    _number(ms.get((variant, triton, *side, p)), ".3g") for p in ("fwd", "fwdbwd")
                )
                for side in columns.values()
            ),
        )
        for variant, triton in layers
    ]
    return "\n".join([f"{about(rows)}.\n", _header("layer", *columns), *lines, ""])


def of_tritons(found: dict, suites: dict[str, dict]) -> str:
    """Return the times with each version of Triton, and their ratio to the oldest version's.

    The GPU tests with each version follow.
    """
    times: dict[tuple, dict[str, list[float]]] = {}
    for r in found["rows"]:
        call = times.setdefault((r["op"], r["gate"], r["setting"], r["pass"]), {})
        call.setdefault(r["triton"], []).append(r["ms"])
    first, *others = sorted({r["triton"] for r in found["rows"]}, key=parse_version)
    lines = []
    for names, by in times.items():
        ms = {triton: statistics.mean(some) for triton, some in by.items()}
        cells = [_number(ms.get(t), ".3g") for t in (first, *others)]
        for i, t in enumerate(others, 1):
            cells[i] += f" ({ms[t] / ms[first]:.2f})" if {t, first} <= ms.keys() else ""
        lines.append(_line(*names, *cells))
    head = _header("op", "gate", "setting", "pass", first, *others)
    lines = [f"{about(found['rows'], ('card', 'torch'))}; ms.\n", head, *lines, ""]
    lines += [f"- {of_suite(t, suites[t])}." for t in sorted(suites, key=parse_version)]
    return "\n".join([*lines, ""])


def of_steps(rows: list[dict]) -> str:
    """Return what a training step of a model takes with each side's operator."""
    sides = {r["side"]: r for r in reversed(rows)}  # the first run of a side
    shown = {
        "step, ms": ("step_ms", ".3g"),
        "peak memory, GB": ("peak_gb", ".2g"),
        "first step, caches empty, s": ("first_step_s", ".0f"),
        "graphs": ("graphs", "d"),
        "breaks": ("breaks", "d"),
    }
    both = [sides[side] for side in ("ours", "fla")]
    lines = (
        _line(words, *(_number(side[name], form) for side in both))
        for words, (name, form) in shown.items()
    )
    return "\n".join([f"{about(both)}.\n", _header("", "kda-ops", "FLA"), *lines, ""])


def of_fla_models(found: dict) -> str:
    """Return what a training step of FLA's models takes on each side's kernels."""
    ms = {(r["variant"], r["side"]): r.get("ms") for r in found["rows"]}
    lines = (
        _line(v.upper(), *(_number(ms[v, side], ".1f") for side in ("fla", "kda_ops")))
        for v in dict.fromkeys(variant for variant, _ in ms)
    )
    head = _header("step of FLA's model, ms", "FLA's kernels", "kda-ops, by the backend")
    return "\n".join([f"{about(found['rows'])}.\n", head, *lines, ""])


def of_parallel(found: dict) -> str:
    """Return the times of one sequence on one GPU and spread over several, with the speedup."""
    ms: dict[tuple, dict[int, dict]] = {}
    for r in found["rows"]:
        ms.setdefault((r["op"], r["gate"]), {})[r["gpus"]] = r
    lines = []
    for names, by in ms.items():
        one = by.pop(1)
        for gpus, several in by.items():
            both = ((one[n], several[n]) for n in ("fwd_ms", "fwdbwd_ms"))
            cells = (f"{a:.3g} to {b:.3g}, {a / b:.2f}×" for a, b in both)
            lines.append(_line(*names, str(gpus), *cells))
    head = _header("op", "gate", "GPUs", "forward, ms", "forward and backward, ms")
    return "\n".join([f"{about(found['rows'])}; {found['setting']}.\n", head, *lines, ""])


def of_engines(rows: list[dict]) -> str:
    """Return the times of the engines' functions next to ours, and the errors of both."""
    lines = [
        _line(
            r["engine"],
            f"`{r['function']}`",
            r["variant"].upper(),
            r["setting"],
            r["pool"],
            *(_number(r[f"{side}_ms"], ".3g") for side in ("ours", "theirs")),
            f"{r['theirs_ms'] / r['ours_ms']:.2f}×",
            *(
                " / ".join(_number(r[f"{side}_{name}"], form) for side in ("ours", "theirs"))
                for name, form in (("host_us", ".0f"), ("error", ".1e"))
            ),
        )
        for r in rows
    ]
    head = _header(
        *("engine", "function", "op", "sequences × tokens", "pool", "ours, ms", "its ms", "ratio"),
        *("host us, ours / its", "error, ours / its"),
    )
    lost = sum(r["theirs_ms"] < r["ours_ms"] for r in rows)
    about_all = f"{about(rows)}. We lose {lost} of {len(rows)} rows in GPU time.\n"
    return "\n".join([about_all, head, *lines, ""])


def of_summary(rows: list[dict]) -> str:
    """Return the caption and the table of README: the rows of `SUMMARY` that have both times."""
    named = {name_of(r): r | {"peer": SHOWN.get(r["peer"], r["peer"])} for r in rows if ratio(r)}
    some = {title: named[name] for title, name in SUMMARY.items() if name in named}
    lines = (
        _line(title, row["setting"], *_times(row), row["commit"][:SHORT])
        for title, row in some.items()
    )
    head = _header("call", "setting", "kda-ops, ms", "peer", "its ms", "ratio", "commit")
    where = "; ".join(by_machine([*some.values()]))
    return "\n".join([f"{where}; GPU time.\n", head, *lines, ""])


def rewrite(text: str, root: Path, up: str = "") -> str:
    """Return a page with tables between its marks; `up` leads from it to the root."""
    folder = root / FOLDER

    def read(name: str, missing=None):
        return json.loads((folder / name).read_text()) if (folder / name).exists() else missing

    evidence = read("evidence.json")
    rows = evidence["rows"]
    apart = with_ours(read("elsewhere.json", {"rows": []})["rows"], rows)
    shown = {n: f"![{words}]({up}{FOLDER}/{n})\n" for n, words in PICTURES.items()}
    shown = {n: line for n, line in shown.items() if (folder / n).exists()}
    made = {
        "summary": "\n".join(
            filter(None, [shown.get("evidence.svg"), of_summary([*rows, *apart])])
        ),
        "pictures": "\n".join(shown.values()),
        "elsewhere": of_elsewhere(apart),
    }
    files: dict[str, tuple[str, Callable[[Any], str]]] = {
        "cpu": ("evidence_cpu.json", of_cpu),
        "layers": ("layer.json", lambda found: of_layers(found["rows"])),
        "steps": ("model.json", lambda found: of_steps(found["rows"])),
        "tritons": ("tritons.json", lambda found: of_tritons(found, evidence["suites"])),
        "fla_models": ("fla_models.json", of_fla_models),
        "parallel": ("parallel.json", of_parallel),
        "engines": ("engines.json", lambda found: of_engines(found["rows"])),
    }

    def fill(m: re.Match) -> str:
        if m[2] in made:
            return made[m[2]]
        if m[2] not in files:
            return of_pass(rows, m[2])
        name, table_of = files[m[2]]
        return "" if (found := read(name)) is None else table_of(found)

    return _MARKED.sub(lambda m: m[1] + fill(m) + m[3], text)


def draw(rows: list[dict], about: str) -> str:
    """Draw rows that have both times, as SVG: a line per operator, pass and peer, a dot per row."""
    import matplotlib
    from matplotlib.figure import Figure

    lines: dict[tuple[str, str, str], list[float]] = {}
    for row in rows:
        lines.setdefault((row["op"], row["pass"], row["peer"]), []).append(ratio(row) or 0.0)
    keys = sorted(lines, key=lambda x: (x[0] != "kda", PASSES.index(x[1]), x[2]))
    every = sum(lines.values(), [])
    figure = Figure(figsize=(8, 1.3 + 0.38 * len(keys)), layout="constrained")
    axes = figure.add_subplot()
    for y, key in enumerate(keys):
        for faster in lines[key]:
            axes.plot(faster, y, "o", color="#1a7f37" if faster >= 1 else "#d1242f", alpha=0.7)
        median = f"median {statistics.median(lines[key]):.2f}×"
        axes.annotate(median, (1.01, y), xycoords=("axes fraction", "data"), va="center")
    names = (f"{op.upper()} {TITLES[pass_].split(',')[0].lower()}, {p}" for op, pass_, p in keys)
    axes.set_yticks(range(len(keys)), list(names))
    axes.set_ylim(len(keys) - 0.4, -0.6)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_xlim(min([0.8, *every]) / 1.1, max([4, *every]) * 1.1)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}×")
    axes.xaxis.set_minor_formatter(lambda x, _: "")
    axes.grid(axis="x", alpha=0.3)
    axes.spines[["top", "right", "left"]].set_visible(False)
    lost = sum(faster < 1 for faster in every)
    caption = f"Speed of kda-ops relative to the peer: {len(every)} rows, {lost} lost (red)."
    axes.set_xlabel(f"{caption}\n{about}")
    out = io.StringIO()
    # the same bytes for the same rows: no date, and identifiers from a fixed salt
    with matplotlib.rc_context({"svg.hashsalt": "kda-ops", "svg.fonttype": "none"}):
        figure.savefig(out, format="svg", metadata={"Date": None})
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def main(argv: list[str]) -> int:
    """Rewrite the pages of the checkout, or of another folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    parser.add_argument("folder", nargs="?", type=Path, help="the checkout by default")
    root = parser.parse_args(argv).folder or checkout()
    source = root / FOLDER / "evidence.json"
    if not source.exists():
        raise SystemExit(f"{source} does not exist: run python -m benchmarks evidence on a GPU.")
    known, other = json.loads(source.read_text())["rows"], source.with_name("elsewhere.json")
    apart = with_ours(json.loads(other.read_text())["rows"], known) if other.exists() else []
    rows = [r for r in known if ratio(r) is not None]
    picture = source.with_suffix(".svg")
    picture.unlink(missing_ok=True)
    if rows:
        both = [*rows, *(r for r in apart if ratio(r) is not None)]
        picture.write_text(draw(both, "; ".join(by_machine(rows))))
    for page in (root / name for name in PAGES if (root / name).exists()):
        page.write_text(rewrite(page.read_text(), root, "" if page.parent == root else "../"))
    return 0
