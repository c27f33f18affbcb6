"""What a row of the benchmark says: how it is printed, read and compared with an older one."""

from __future__ import annotations

import json
from pathlib import Path

KEY = ("op", "pass", "setting", "gate", "state", "layout", "peer")
SLOWER = 0.05  # the change of a row's time that --against calls a loss


def _cell(value: float | str | None, digits: str = ".4g") -> str:
    return "-" if value is None else format(value, digits)


def ratio(row: dict) -> float | None:
    """How many times faster we are."""
    return row["peer_ms"] / row["ours_ms"] if row["ours_ms"] and row["peer_ms"] else None


HEAD = (
    "op",
    "pass",
    "setting",
    "gate",
    "state",
    "peer",
    "ours",
    "peer's",
    "ratio",
    "error",
    "peer's",
)
WIDTHS = (4, 13, 15, 13, 8, 13, 11, 11, 8, 8, 8)


def format_row(row: dict) -> str:
    """One line of the table in a terminal."""
    faster = ratio(row)
    cells = (
        row["op"],
        row["pass"],
        row["setting"],
        row["gate"],
        f"{row['state']} {row['layout']}",
        row["peer"] or "none",
        _cell(row["ours_ms"]),
        _cell(row["peer_ms"]),
        "-" if faster is None else f"{faster:.2f}x",
        _cell(row["ours_error"], ".1e"),
        _cell(row["peer_error"], ".1e"),
    )
    line = "".join(c.ljust(w) for c, w in zip(cells, WIDTHS)).rstrip()
    if "ours_share" in row["also"]:
        line += (
            "  of a copy "
            + _both(row, "share", ".0%")
            + ", us per call "
            + _both(row, "call_us", ".0f")
        )
    if "ours_worst" in row["also"]:
        line += "  worst " + _both(row, "worst", "")
    return line + "".join(
        f"  {side} says {row['also'][f'{side}_says']}"
        for side in ("ours", "peer")
        if f"{side}_says" in row["also"]
    )


def _both(row: dict, column: str, digits: str) -> str:
    return " | ".join(
        _cell(row["also"].get(f"{side}_{column}"), digits) for side in ("ours", "peer")
    )


def name_of(key: tuple[str | None, ...]) -> str:
    """What a row is called that has not been measured: its key, "alone" for no peer."""
    return " ".join(k or "alone" for k in key)


def case_of(row: dict) -> str:
    """The name of a row's case: its key without the peer."""
    return " ".join(row[n] for n in KEY[:-1])


def compare_rows(
    new: list[dict], old: list[dict], skipped: dict[str, str] | None = None
) -> tuple[list[str], list[str]]:
    """What changed since `old`, a line per row whose case both have, and the names of the losses:
    rows slower by more than 5 %, or without a time now; rows that were `skipped`, by name and
    reason, too, unless our side of the case has a row beside another peer.

    It is our time that is compared: with that beside the same peer, or else with the first of the
    case that there is.
    """
    before, skipped = {tuple(r[n] for n in KEY): r["ours_ms"] for r in old}, skipped or {}
    of_case = {key[:-1]: ms for key, ms in reversed(before.items()) if ms is not None}
    lines, losses, cases = [], [], {tuple(r[n] for n in KEY[:-1]) for r in new}
    for key, ms in before.items():
        if ms is not None and (name := name_of(key)) in skipped and key[:-1] not in cases:
            lines.append(f"{name}: {ms:.4g} -> no time ({skipped[name]})")
            losses.append(name)
    for row in new:
        key = tuple(row[n] for n in KEY)
        ms = of_case.get(key[:-1]) if before.get(key) is None else before[key]
        if ms is None:
            continue
        name = name_of(key)
        if row["ours_ms"] is None:
            lines.append(f"{name}: {ms:.4g} -> no time")
            losses.append(name)
            continue
        change = row["ours_ms"] / ms - 1
        lines.append(f"{name}: {ms:.4g} -> {row['ours_ms']:.4g} ({change:+.1%})")
        if change > SLOWER:
            losses.append(name)
    return lines, losses


def read_rows(path: str | Path, dtype: str | None = None) -> list[dict]:
    """The rows of a file that ``--json`` or ``evidence`` wrote, of this dtype if it says of
    which.
    """
    data = json.loads(Path(path).read_text())
    rows = data.get("rows") if isinstance(data, dict) else None
    if not isinstance(rows, list) or not all(
        isinstance(row, dict) and {*KEY, "ours_ms"} <= row.keys() for row in rows
    ):
        raise ValueError(f"{path} holds no rows of bench --json or evidence.")
    of = data.get("dtype", "bfloat16" if "suite" in data else dtype)  # evidence is of bf16
    if dtype is not None and of != dtype:
        raise ValueError(f"{path} is of {of}, this run of {dtype}: pass --dtype {of}.")
    return rows
