"""The rows of an evidence file as a picture, in SVG by hand: it needs no package, and its colours
follow the reader's light or dark page.

A line per operator, pass and peer; a dot per row, at how many times as fast we are, on a
logarithmic axis. A dot left of the line at 1 is a row that we lost and has a colour of its own.
Every row with both times is there.
"""

from __future__ import annotations

import math
import statistics
from html import escape

from kda_ops.bench.cases import PASSES
from kda_ops.bench.rows import ratio
from kda_ops.bench.sides import PEERS

LEFT, WIDTH, RIGHT, STEP, TOP = 215, 440, 190, 26, 48
OTHERS = {p.name for p in PEERS if not p.same}
TICKS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
STYLE = """
svg { color: #1f2328; font: 12px system-ui, sans-serif }
text { fill: currentColor } .small { font-size: 11px; opacity: 0.75 } \
line { stroke: currentColor; opacity: 0.2 } .one { opacity: 0.8 }
.won { fill: #1a7f37 } .lost { fill: #d1242f } circle { opacity: 0.75 }
@media (prefers-color-scheme: dark) { svg { color: #e6edf3 } \
.won { fill: #3fb950 } .lost { fill: #ff7b72 } }
"""


def _text(x: float, y: float, words: str, anchor: str = "start", small: bool = False) -> str:
    kind = ' class="small"' if small else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{kind}>{escape(words)}</text>'


def draw(rows: list[dict], about: str) -> str:
    """The picture as text; `about` says what it was measured on."""
    lines: dict[tuple[str, str, str], list[tuple[float, dict]]] = {}
    for row in rows:
        if (faster := ratio(row)) is not None:
            lines.setdefault((row["op"], row["pass"], row["peer"]), []).append((faster, row))
    every = [faster for dots in lines.values() for faster, _ in dots]
    low = max((t for t in TICKS if t <= min([*every, 0.9])), default=min(every, default=0.5))
    high = min((t for t in TICKS if t >= max([*every, 2])), default=max(every, default=2))

    def place(faster: float) -> float:
        return LEFT + WIDTH * math.log(faster / low) / math.log(high / low)

    bottom = TOP + STEP * len(lines)
    lost = sum(faster < 1 for faster in every)
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + RIGHT} '
            f'{bottom + 40}" role="img">'
        ),
        (
            f"<title>{escape(f'{len(every)} rows, {lost} of them slower than the peer')}</title>"
            f"<style>{STYLE}</style>"
        ),
        _text(place(1) - 6, TOP - 24, "slower", "end", True),
        _text(place(1) + 6, TOP - 24, "kda-ops is faster, times", small=True),
    ]
    for tick in TICKS:
        if low <= tick <= high:
            x, one = place(tick), ' class="one"' if tick == 1 else ""
            parts.append(
                f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 4}" y2="{bottom - 4}"{one}/>'
                + _text(x, TOP - 9, f"{tick:g}", "middle", True)
            )
    for i, ((op, pass_, peer), dots) in enumerate(
        sorted(lines.items(), key=lambda x: (x[0][0] != "kda", PASSES.index(x[0][1]), x[0][2]))
    ):
        y = TOP + STEP * (i + 0.5)
        for_scale = ", for scale" if peer in OTHERS else ""
        parts.append(
            _text(
                LEFT - 12,
                y,
                f"{op} {pass_.removesuffix('_s').replace('_', ' ')} · {peer}{for_scale}",
                "end",
            )
        )
        for faster, row in sorted(dots, key=lambda x: x[0]):
            name = (
                f"{row['setting']} {row['gate']} {row['state']} {row['layout']}: "
                f"{row['ours_ms']:.3g} against {row['peer_ms']:.3g}, {faster:.2f}×"
            )
            kind = "won" if faster >= 1 else "lost"
            parts.append(
                f'<circle class="{kind}" cx="{place(faster):.1f}" cy="{y - 4:.1f}" '
                f'r="5"><title>{escape(name)}</title></circle>'
            )
        found = [faster for faster, _ in dots]
        median = f"median {statistics.median(found):.3g}×" + (
            f", worst {min(found):.2g}×" if len(found) > 1 else ""
        )
        parts.append(_text(LEFT + WIDTH + 12, y, median, small=True))
    parts.append(
        _text(
            LEFT + WIDTH + RIGHT - 8,
            bottom + 24,
            f"{len(every)} rows, {lost} lost. {about}",
            "end",
            True,
        )
    )
    return "\n".join([*parts, "</svg>", ""])
