"""README, the pages of docs/ and the guides for contributors are right: their programs run, their
links and names exist, their tables are those of the results, and schemas are the registered ones.
"""

import re
from pathlib import Path

import pytest
import torch

import kda_ops
from benchmarks import tables
from benchmarks.__main__ import COMMANDS as BENCHMARKS
from kda_ops.__main__ import COMMANDS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "tests/README.md")]
PAGES += (p for p in sorted((ROOT / "docs").rglob("*.md")) if "_build" not in p.parts)
TEXTS = {str(page.relative_to(ROOT)): page.read_text() for page in PAGES}
_PROGRAM = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# docs/maths.md has a test of its own; the program of CONTRIBUTING.md needs the interpreter
PROGRAMS = {n: _PROGRAM.findall(TEXTS[n]) for n in {*TEXTS} - {"docs/maths.md", "CONTRIBUTING.md"}}
COMPILE = torch.compile


def compile_soon(f, backend="aot_eager", **words):
    """Compile without Inductor, which would need a minute for these pages."""

    def fold(gm, inputs):
        from kda_ops.inductor import fold_preprocessing

        before = fold_preprocessing.folded.total()
        fold_preprocessing(gm.graph)
        assert fold_preprocessing.folded.total() == before + 2  # the norms, and the sigmoid
        gm.recompile()
        return gm

    return COMPILE(f, backend=fold if backend == "kda_inductor" else backend, **words)


@pytest.mark.parametrize("name", sorted(n for n, programs in PROGRAMS.items() if programs))
def test_programs_run(name, monkeypatch):
    if "transformers" in "".join(PROGRAMS[name]):
        pytest.importorskip("transformers")
    if "kda_ops.jax" in "".join(PROGRAMS[name]):
        pytest.importorskip("jax")
    monkeypatch.setattr(torch, "compile", compile_soon)
    torch._dynamo.reset()
    torch.manual_seed(0)
    for program in PROGRAMS[name]:
        exec(compile(program, name, "exec"), {})
    torch._dynamo.reset()


@pytest.mark.parametrize("name", TEXTS)
def test_links_files_and_commands_exist(name):
    text, folder = TEXTS[name], (ROOT / name).parent
    targets = [t for t in re.findall(r"\]\(([^)#:\s]+)(?:#[\w-]+)?\)", text)]
    named = re.findall(r"`((?:benchmarks|examples|tests|kda_ops|docs)/[\w/]+\.\w+)`", text)
    missing = [t for t in targets if not (folder / t).exists()]
    missing += [n for n in named if not (ROOT / n).exists()]
    assert not missing
    assert set(re.findall(r"python -m kda_ops (\w+)", text)) <= set(COMMANDS)
    assert set(re.findall(r"python -m benchmarks (\w+)", text)) <= set(BENCHMARKS)
    folder = ROOT / "tests"
    tests = {path.relative_to(folder).as_posix() for path in folder.rglob("test_*.py")}
    named = re.findall(r"`(?:tests/)?((?:\w+/)*test_\w+\.py)`", text)
    assert not [n for n in named if not any(x == n or x.endswith("/" + n) for x in tests)]


@pytest.mark.quick
def test_the_tables_are_those_of_their_files():
    """Fails where a figure was typed, or ``python -m benchmarks tables`` forgotten."""
    for name, text in TEXTS.items():
        assert ("<!-- evidence: " in text) == (name in tables.PAGES)
    for name in tables.PAGES:
        text = TEXTS[name]
        assert tables.rewrite(text, ROOT, "../" if "/" in name else "") == text
        assert text.count("<!-- evidence: ") == text.count("<!-- end -->") > 0


def test_the_summary_shows_losses():
    text = TEXTS["README.md"]
    table = text[text.index("<!-- evidence: summary") : text.index("<!-- end -->")]
    ratios = [float(r) for r in re.findall(r"\| (\d+\.\d+)× \|", table)]
    assert len(ratios) == len(tables.SUMMARY) and min(ratios) < 1 < max(ratios)


def test_the_schemas_of_the_page_are_the_registered_ones():
    found = re.findall(r"^kda::(\w+)(\(.*?-> [^\n]*)$", TEXTS["docs/operators.md"], re.S | re.M)
    both, layer = {"chunk", "recurrent", "chunk_", "recurrent_", "gate"}, {"gated_rms_norm"}
    layer |= {"short_conv", "short_conv_"}
    assert {name for name, _ in found} == both | layer
    for name, text in found:
        for namespace in ("kda",) if name in layer else ("kda", "gdn"):
            registered = getattr(getattr(torch.ops, namespace), name).default._schema
            schema = f"{namespace}::{name}{' '.join(text.split())}"
            assert str(torch._C.parse_schema(schema)) == str(registered)


def test_every_public_function_is_in_the_reference():
    listed = set(re.findall(r"autofunction:: (\w+)$", TEXTS["docs/api.md"], re.M))
    assert listed == {n for n in kda_ops.__all__ if callable(getattr(kda_ops, n))}


SOURCES = [
    path
    for folder in ("kda_ops", "registrations", "benchmarks", "tests", "examples")
    for path in (ROOT / folder).rglob("*.py")
]


def test_pages_that_the_code_cites_exist():
    cited = {
        (path.name, page)
        for path in SOURCES
        for page in re.findall(r"\b(docs/[\w./-]*[\w/])", path.read_text())
    }
    assert len(cited) >= 10
    assert not {(name, page) for name, page in cited if not (ROOT / page).exists()}


def test_the_index_of_the_journal_lists_every_finding():
    folder = ROOT / "docs/kernels/journal"
    listed = re.findall(
        r"^\| \[.*?\]\(([\w.-]+\.md)\) \| \S", (folder / "README.md").read_text(), re.M
    )
    assert sorted([*listed, "README.md"]) == sorted(path.name for path in folder.iterdir())


def test_what_the_code_cites_is_a_section_of_the_page():
    cited = set()
    for path in SOURCES:
        text = " ".join(path.read_text().split())
        cited |= set(re.findall(r"(docs/[\w/-]+\.md), [\"']+ ?[\"']?([A-Z][^\"']+)[\"']", text))
    assert len(cited) >= 3
    for page, section in cited:
        assert re.search(rf"^#+ ([\d-]+: )?{re.escape(section)}$", TEXTS[page], re.M), (
            page,
            section,
        )


PASSED = {
    "`position_ids` alone": {"position_ids"},
    "`cu_seq_lens_q` alone": {"cu_seq_lens_q"},
    "`cu_seq_lens_q`, `position_ids` and an `attention_mask` of ones": {
        "cu_seq_lens_q",
        "position_ids",
        "attention_mask",
    },
    "`cu_seq_lens_q`, `position_ids` that restart, no mask, `use_cache=False`": {
        "cu_seq_lens_q",
        "position_ids",
    },
}


@pytest.mark.parametrize("kind", ("linear_attention", "full_attention"))
def test_packed_rows_mix_where_the_page_says_so(kind):
    """transformers' doing: when a row changes, so must the page, the guide and its example."""
    pytest.importorskip("transformers")
    import kda_ops.compat.transformers
    from tests.support import models

    model, ids = models.model("qwen3_next", layer_types=[kind] * 3), models.tokens(1, 50)
    known = {
        "position_ids": torch.cat([torch.arange(20), torch.arange(30)])[None],
        "cu_seq_lens_q": torch.tensor([0, 20, 50], dtype=torch.int32),
        "attention_mask": torch.ones(1, 50, dtype=torch.long),
    }
    said = dict(re.findall(r"^\| (`.*?) \| (.*) \|$", TEXTS["docs/drop-ins.md"], re.M))
    with torch.inference_mode(), kda_ops.compat.transformers.enable():
        alone = model(ids[:, 20:], use_cache=False).logits
        for row, names in PASSED.items():
            words = {n: known[n] for n in names}
            packed = model(ids, use_cache=False, **words).logits[:, 20:]
            mixes = bool((packed - alone).abs().max() > 1e-3 * alone.abs().max())
            column = said[row].split(" | ")[kind == "full_attention"]
            assert column == ("**mix**" if mixes else "kept apart"), (row, kind)
