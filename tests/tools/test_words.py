"""README and docs/ keep to the project's rules of plain writing; the counter finds what breaks
them.
"""

from pathlib import Path

import pytest

from tests.tools import words

ROOT = next(
    d for d in Path(__file__).parents if (d / "README.md").exists() and (d / "docs").exists()
)
PAGES = [ROOT / "README.md", *words.files([ROOT / "docs"])]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_sentence_is_read_twice(page):
    counts = words.count(page)
    assert not counts.too_long
    assert not counts.avoided
    assert counts.share <= 0.02, [found for _, _, found in counts.long]


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 130


LONG = " ".join(["word"] * 26)
TOO_LONG = " ".join(["word"] * 41)
PAGE = f"""# A heading that says {LONG} has no sentences

One. Two `a. B` and [three](https://x.y/{"z" * 9}).

```
{TOO_LONG}.
```

| {LONG} |
|---|

    {TOO_LONG}

- {LONG.capitalize()}. A kernel stands here.
- {TOO_LONG.capitalize()}.
"""
MODULE = f'''"""Return nothing."""


def one():
    """The number one."""
    raise ValueError(f"{LONG} {{1}}.")  # beside the point


class Two:
    """Hold two.

    Args:
        x: a number
        y: {TOO_LONG}
    """

    @property
    def three(self):
        """The number three."""
'''


def test_the_counter_finds_what_breaks_the_rules(tmp_path):
    (tmp_path / "page.md").write_text(PAGE)
    page = words.count(tmp_path / "page.md")
    assert (page.sentences, len(page.long), len(page.too_long)) == (5, 2, 1)
    assert [word for _, word, _ in page.avoided] == ["stands"]
    (tmp_path / "module.py").write_text(MODULE)
    module = words.count(tmp_path / "module.py")
    assert [(kind, first) for _, kind, first in module.openings] == [
        ("function", "The number one.")
    ]
    assert (module.functions, module.others) == (1, 2)
    assert [n for _, n, _ in module.long] == [41, 27] and len(module.too_long) == 1
    assert [word for _, word, _ in module.avoided] == ["beside"]


def test_the_report_names_each_file_and_the_total(tmp_path, capsys):
    (tmp_path / "module.py").write_text(MODULE)
    assert words.main([str(tmp_path), "--show"]) == 0
    said = capsys.readouterr().out
    assert "module.py:5: function opens with no imperative: The number one." in said
    assert said.splitlines()[-1].endswith("total") and " 1/1 " in said
