"""Draw the rows of an evidence file with matplotlib.

One line per operator, pass and peer, and one dot per row: how many times as fast as the peer, on a
logarithmic axis. Dots left of 1 are losses, in red. Every row that has both times is drawn.
"""

from __future__ import annotations

import io
import statistics

from kda_ops.bench.cases import PASSES
from kda_ops.bench.rows import ratio
from kda_ops.bench.sides import PEERS

WON, LOST = "#1a7f37", "#d1242f"
TICKS = (0.1, 0.2, 0.5, 0.7, 1, 1.5, 2, 3, 4, 6, 10, 20, 50, 100, 200, 500, 1000)
SHOWN = {"fla": "FLA 0.6.0", "sdpa": "SDPA"}
NAMES = {"fwd": "forward", "fwdbwd": "forward and backward", "first_call_s": "first call"}
OTHERS = {p.name for p in PEERS if not p.same}


def draw(rows: list[dict], about: str) -> str:
    """Return the picture as SVG; `about` says what it was measured on."""
    import matplotlib
    from matplotlib.figure import Figure

    lines: dict[tuple[str, str, str], list[float]] = {}
    for row in rows:
        if (faster := ratio(row)) is not None:
            lines.setdefault((row["op"], row["pass"], row["peer"]), []).append(faster)
    order = sorted(lines, key=lambda x: (x[0] != "kda", PASSES.index(x[1]), x[2]))
    every = [faster for dots in lines.values() for faster in dots]
    figure = Figure(figsize=(8, 1.3 + 0.38 * len(order)), layout="constrained")
    axes = figure.add_subplot()
    for y, key in enumerate(order):
        for i, faster in enumerate(lines[key]):
            color, kind = (WON, "won") if faster >= 1 else (LOST, "lost")
            axes.plot(faster, y, "o", color=color, alpha=0.7, markersize=7, gid=f"{kind}-{y}-{i}")
        median = f"median {statistics.median(lines[key]):.2f}×"
        axes.annotate(median, (1.01, y), xycoords=("axes fraction", "data"), va="center")
    names = [
        f"{op.upper()} {NAMES.get(pass_, pass_)}, {SHOWN.get(peer, peer)}"
        + (" (for scale)" if peer in OTHERS else "")
        for op, pass_, peer in order
    ]
    axes.set_yticks(range(len(order)), names)
    axes.set_ylim(len(order) - 0.4, -0.6)
    axes.axvline(1, color="black", linewidth=1, gid="one")
    axes.set_xscale("log")
    axes.set_xlim(min([0.8, *every]) / 1.1, max([4, *every]) * 1.1)
    low, high = axes.get_xlim()
    ticks = [x for x in TICKS if low <= x <= high]
    axes.set_xticks(ticks, [f"{x:g}×" for x in ticks])
    axes.set_xticks([], minor=True)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", alpha=0.3)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_xlabel(
        f"Speed of kda-ops relative to the peer: {len(every)} rows, "
        f"{sum(f < 1 for f in every)} lost (red).\n{about}"
    )
    out = io.StringIO()
    # the same bytes for the same rows: no date, and identifiers from a fixed salt
    with matplotlib.rc_context({"svg.hashsalt": "kda-ops", "svg.fonttype": "none"}):
        figure.savefig(out, format="svg", metadata={"Date": None})
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"
