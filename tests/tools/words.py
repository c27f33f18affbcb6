"""Count how plainly the project's prose is written.

Run ``python -m tests.tools.words PATH ...`` on Markdown and Python files or folders. For each file
and in total it prints the sentences, the share over 25 words, the sentences over 40 words, the
docstrings that do not open with an imperative, and the words that the project avoids. ``--show``
prints each find with its line. Of Python it reads docstrings, comments and the messages of raised
exceptions.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from dataclasses import dataclass, field
from pathlib import Path

LONG, TOO_LONG = 25, 40

# Coinages that readers had to read twice, and words that tell history.
AVOIDED = re.compile(
    r"\b(no number|beside|is there|are there|there is none|stands?|in words|those that|"
    r"the road|any ?more|as before|no longer|now|since)\b",
    re.IGNORECASE,
)

# Verbs that may open a docstring.
IMPERATIVES = frozenset(
    """
    accept accumulate add advance align allocate allow anchor append apply ask assert assign
    attach average bind bound broadcast build cache call capture carry cast change check choose
    clamp clear close collect combine compare compile complete compute concatenate configure
    connect contract convert convolve copy correct count cover create cut decay declare decode
    define delete derive describe detach detect disable discard dispatch display divide do
    download draw drop emit enable encode ensure enter estimate evaluate exchange exclude
    execute exit expand export express extend extract fail feed fetch fill filter find finish
    fit flag flatten flush fold follow force form format forward free fuse gather generate get
    give go group guard handle hash hold ignore import include increment index infer inherit
    initialise initialize insert inspect install integrate invert join keep kill launch leave
    let limit link list load locate log look loop lower make map mark mask match materialise
    materialize measure merge mirror modify move multiply name negate normalise normalize note
    number omit open order overlap override overwrite pack pad parse partition pass patch
    permute pick place plan plot point poll pop prefetch prepare prevent print process produce
    project promise prove provide pull push put query quote raise reach read rebuild receive
    recompute reconstruct record recover reduce refer refuse register reject release reload
    remove rename reorder repeat replace replay report represent request require reserve reset
    reshape resolve restore resume retrieve return reuse reverse rewrite rotate round route run
    sample save say scale scan scatter search select send serve set shard share shift show
    shrink simulate skip slice solve sort split spread stack start state step stop store stream
    subtract sum support swap switch synchronise synchronize take tell test time trace track
    train transform translate transpose treat trim try tune turn undo unpack unregister update
    use validate verify view visit wait walk warm warn wrap write yield zero
    """.split()
)


@dataclass
class Counts:
    """What was found in one file."""

    sentences: int = 0
    long: list[tuple[int, int, str]] = field(default_factory=list)  # line, words, sentence
    functions: int = 0
    others: int = 0
    openings: list[tuple[int, str, str]] = field(default_factory=list)  # line, kind, first line
    avoided: list[tuple[int, str, str]] = field(default_factory=list)  # line, word, context

    @property
    def too_long(self) -> list[tuple[int, int, str]]:
        """Return the sentences that no page may have."""
        return [found for found in self.long if found[1] > TOO_LONG]

    @property
    def share(self) -> float:
        """Return the share of sentences over 25 words."""
        return len(self.long) / self.sentences if self.sentences else 0.0

    def add(self, other: Counts) -> None:
        """Add the counts of another file."""
        self.sentences += other.sentences
        self.functions += other.functions
        self.others += other.others
        for name in ("long", "openings", "avoided"):
            getattr(self, name).extend(getattr(other, name))


def sentences(text: str) -> list[str]:
    """Split one paragraph into sentences."""
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", " ", text)
    text = re.sub(r"\]\([^)]*\)", "]", text)  # a link's address is no word
    text = re.sub(r"``[^`]*``|`[^`]*`", "code", text)
    text = re.sub(r"\b(e\.g|i\.e|cf|vs|Fig|No|approx)\.", r"\1", text)
    # A capital, a quoted word or a number opens the next sentence.
    parts = re.split(r"(?<=[.!?])[\"')*_]*\s+(?=[\"'(*_\[]*(?:[A-Z0-9]|code))", text.strip())
    return [part for part in parts if re.search(r"[A-Za-z]{2}", part)]


def words(sentence: str) -> int:
    """Count the words of a sentence; numbers, symbols and punctuation alone are none."""
    return sum(bool(re.search(r"[^\W\d_]", word)) for word in sentence.split())


def paragraphs(lines: list[tuple[int, str]], markdown: bool) -> list[tuple[int, str]]:
    """Join lines to paragraphs; leave out code, tables, formulas and headings."""
    found: list[tuple[int, list[str]]] = []
    fenced = code = comment = False
    indent_of_code = 0
    opened = True  # the next line starts a paragraph
    for number, line in lines:
        bare = line.strip()
        indent = len(line) - len(line.lstrip())
        if markdown and re.match(r"(```|~~~|:::|\$\$)", bare):
            fenced = not fenced if bare != ":::" and not bare.startswith(":::") else fenced
            opened = True
            continue
        if markdown and ("<!--" in bare or comment):
            comment = "-->" not in bare
            opened = True
            continue
        if not bare:
            opened = True
            continue
        if code and indent > indent_of_code:
            continue
        code = False
        if fenced or bare.startswith((">>>", "...", "|", "![")) or (markdown and bare[0] == "#"):
            opened = True
            continue
        item = re.match(r"([-*+]|\d+\.)\s+", bare)
        if markdown and opened and indent >= 4 and not item:  # an indented formula
            continue
        entry = not markdown and re.match(r"[\w*`][\w,.*` ()\[\]]*:(\s|$)", bare)
        if item or entry:
            opened = True
            bare = bare[(item or entry).end() :]
        if opened:
            found.append((number, []))
        found[-1][1].append(bare)
        opened = False
        if not markdown and line.rstrip().endswith("::"):
            code, indent_of_code, opened = True, indent, True
    return [(number, " ".join(parts)) for number, parts in found if any(parts)]


def prose(lines: list[tuple[int, str]], markdown: bool) -> Counts:
    """Count sentences and avoided words of some lines."""
    counts = Counts()
    for number, paragraph in paragraphs(lines, markdown):
        for sentence in sentences(paragraph):
            counts.sentences += 1
            if (n := words(sentence)) > LONG:
                counts.long.append((number, n, sentence))
            for word in AVOIDED.findall(sentence):
                counts.avoided.append((number, word.lower(), sentence))
    return counts


def _docstrings(tree: ast.AST):
    """Yield node, kind and text of each docstring."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef)):
            kind = "module" if isinstance(node, ast.Module) else "class"
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            named = {getattr(d, "attr", getattr(d, "id", "")) for d in node.decorator_list}
            kind = "property" if {"property", "cached_property"} & named else "function"
        else:
            continue
        first = node.body[0] if node.body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            if isinstance(first.value.value, str):
                yield first.value, kind, first.value.value


def _messages(tree: ast.AST):
    """Yield line and text of each message of a raised exception, {…} for what it fills in."""
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args):
            continue
        message = node.exc.args[0]
        if isinstance(message, ast.JoinedStr):
            parts = (v.value if isinstance(v, ast.Constant) else "X" for v in message.values)
            yield node.lineno, "".join(str(part) for part in parts)
        elif isinstance(message, ast.Constant) and isinstance(message.value, str):
            yield node.lineno, message.value


def _comments(text: str) -> list[list[tuple[int, str]]]:
    """Return the comments, those on neighbouring lines as one."""
    found: list[list[tuple[int, str]]] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT or re.match(r"#\s*(noqa|type:|fmt:|!)", token.string):
            continue
        line = token.string.lstrip("# ")
        alone = not token.line[: token.start[1]].strip()
        if alone and found and found[-1][-1][0] == token.start[0] - 1 and found[-1][0][1] != "":
            found[-1].append((token.start[0], line))
        else:
            found.append([(token.start[0], line)])
    return found


def python(text: str) -> Counts:
    """Count docstrings, comments and messages of one module."""
    counts = Counts()
    tree = ast.parse(text)
    for node, kind, docstring in _docstrings(tree):
        body = docstring.split("\n")
        counts.add(prose([(node.lineno + i, line) for i, line in enumerate(body)], False))
        first = re.match(r"\W*(\w+)", docstring)
        if kind == "property":  # a noun, as an attribute has
            continue
        counts.functions += kind == "function"
        counts.others += kind != "function"
        if not first or first[1].lower() not in IMPERATIVES:
            counts.openings.append((node.lineno, kind, docstring.strip().split("\n")[0]))
    for comment in _comments(text):
        counts.add(prose(comment, False))
    for line, message in _messages(tree):
        counts.add(prose([(line, message)], False))
    return counts


def count(path: Path) -> Counts:
    """Count one file."""
    text = path.read_text()
    if path.suffix == ".py":
        return python(text)
    return prose(list(enumerate(text.split("\n"), 1)), True)


def files(paths: list[Path]) -> list[Path]:
    """Return the Markdown and Python files at or below some paths."""
    found: list[Path] = []
    for path in paths:
        inside = path.rglob("*") if path.is_dir() else [path]
        found += sorted(p for p in inside if p.suffix in (".md", ".py") and "_build" not in p.parts)
    return found


def line(name: str, counts: Counts) -> str:
    """Return the line of the report for one file, or for all."""
    functions = sum(kind == "function" for _, kind, _ in counts.openings)
    others = len(counts.openings) - functions
    return (
        f"{counts.sentences:6} {100 * counts.share:6.1f} % {len(counts.too_long):6} "
        f"{functions:6}/{counts.functions:<5} {others:5}/{counts.others:<5}"
        f"{len(counts.avoided):6}  {name}"
    )


def main(argv: list[str]) -> int:
    """Print the counts of the files that are named."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.tools.words",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--show", action="store_true", help="print each find with its line")
    parser.add_argument("--total", action="store_true", help="print the last line alone")
    args = parser.parse_args(argv)
    total = Counts()
    print(f"{'sent.':>6} {'> 25':>8} {'> 40':>6} {'functions':>12} {'others':>11}{'words':>6}")
    for path in files(args.paths):
        counts = count(path)
        total.add(counts)
        if not args.total:
            print(line(str(path), counts))
        if args.show:
            for at, n, sentence in counts.long:
                print(f"    {path}:{at}: {n} words: {sentence}")
            for at, kind, first in counts.openings:
                print(f"    {path}:{at}: {kind} opens with no imperative: {first}")
            for at, word, sentence in counts.avoided:
                print(f"    {path}:{at}: {word!r}: {sentence}")
    print(line("total", total))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
