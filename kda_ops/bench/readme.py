"""Rewrites the tables of README.md from tests/gpu/evidence.json: every row, those that lost included, between two markers.

``<!-- evidence: fwd -->`` ... ``<!-- end -->`` holds the rows of one pass; ``<!-- evidence -->`` ... ``<!-- end -->`` all of them.
"""

from __future__ import annotations

import json
import re
import sys

from kda_ops.bench.compare import ratio
from kda_ops.bench.evidence import checkout

_MARKED = re.compile(r"(<!-- evidence(?:: (\w+))? -->\n).*?(<!-- end -->)", re.DOTALL)


def _number(x: float | None, form: str) -> str:
    return "–" if x is None else format(x, form)


def table(rows: list[dict], pass_: str | None) -> str:
    """A Markdown table of one pass, or of all."""
    shown = [r for r in rows if pass_ is None or r["pass"] == pass_]
    unit = "s" if pass_ == "first_call_s" else "ms"
    lines = [
        f"| op | {'pass | ' if pass_ is None else ''}setting | gate | state | ours, {unit} | peer | its {unit} | ratio | error | its error |",
        f"|---|{'---|' if pass_ is None else ''}---|---|---|---|---|---|---|---|---|",
    ]
    for r in shown:
        faster = ratio(r)
        cells = [
            r["op"], *([r["pass"]] if pass_ is None else []), r["setting"], r["gate"], f"{r['state']} {r['layout']}",
            _number(r["ours_ms"], ".3g"), r["peer"] or "none",
            _number(r["peer_ms"], ".3g"), "–" if faster is None else f"{faster:.2f}×", _number(r["ours_error"], ".1e"), _number(r["peer_error"], ".1e"),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def rewrite(text: str, evidence: dict) -> str:
    """The README with the tables of an evidence file between its markers."""
    about = f"{evidence['gpu']}, torch {evidence['torch']}, triton {evidence['triton']}; medians, error: relative RMS against float64.\n\n"
    return _MARKED.sub(lambda m: m[1] + about + table(evidence["rows"], m[2]) + "\n" + m[3], text)


def main(argv: list[str]) -> int:
    """Rewrite README.md of the checkout."""
    root = checkout()
    source, readme = root / "tests" / "gpu" / "evidence.json", root / "README.md"
    if not source.exists():
        raise SystemExit(f"{source} does not exist: run python -m kda_ops evidence on a GPU first.")
    text = readme.read_text()
    if not _MARKED.search(text):
        raise SystemExit("README.md has no <!-- evidence --> ... <!-- end --> to write between.")
    readme.write_text(rewrite(text, json.loads(source.read_text())))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
