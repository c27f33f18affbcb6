"""Files, links and commands that README.md names exist, and its first program runs."""

import functools
import re
from pathlib import Path

import pytest
import torch

from benchmarks import tables
from kda_ops.__main__ import COMMANDS

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text()


@pytest.mark.quick
def test_files_links_and_commands_exist():
    named = re.findall(r"`((?:benchmarks|examples|tests|kda_ops)/[\w/]+\.\w+)`", TEXT) + re.findall(
        r"\]\(([^)#:]+)\)", TEXT
    )
    assert len(named) > 10
    assert not [n for n in named if not (ROOT / n).exists()]
    commands = re.findall(r"python -m kda_ops (\w+)", TEXT)
    assert "doctor" in commands and set(commands) <= set(COMMANDS)
    assert {"evidence"} <= set(re.findall(r"python -m benchmarks (\w+)", TEXT))


@pytest.mark.quick
def test_the_tables_are_those_of_their_files():
    """Fails where a figure was typed, or ``python -m benchmarks tables`` forgotten."""
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = page.read_text()
        assert ("<!-- evidence: " in text) == (str(page.relative_to(ROOT)) in tables.PAGES)
    for page in (ROOT / name for name in tables.PAGES):
        text = page.read_text()
        assert tables.rewrite(text, ROOT, "" if page.parent == ROOT else "../") == text
        assert text.count("<!-- evidence: ") == text.count("<!-- end -->") > 0


def test_the_summary_shows_losses():
    table = TEXT[TEXT.index("<!-- evidence: summary") : TEXT.index("<!-- end -->")]
    ratios = [float(r) for r in re.findall(r"\| (\d+\.\d+)× \|", table)]
    assert len(ratios) == len(tables.SUMMARY) and min(ratios) < 1 < max(ratios)


@pytest.mark.quick
def test_the_ten_lines_run(monkeypatch):
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    # Inductor needs half a minute here
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    names: dict = {}
    exec(code, names)
    assert names["q"].grad.abs().sum() > 0 and names["o"].shape == (2, 1, 4, 64)
    torch._dynamo.reset()
