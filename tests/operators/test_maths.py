"""docs/maths.md is executed: its code blocks run in order, in float64, and each claim in them is
checked.
"""

import re
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import kda_ops

DOCUMENT = next(d for d in Path(__file__).parents if (d / "docs").is_dir()) / "docs" / "maths.md"
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks():
    """Return the code of each block, and the number of lines before it in the file."""
    text = DOCUMENT.read_text()
    return [(text[: m.start(1)].count("\n"), m[1]) for m in _BLOCK.finditer(text)]


def inputs():
    torch.manual_seed(0)
    T, C, K, V = 80, 32, 20, 12  # the last chunk has 16 rows
    x = dict(
        q=torch.randn(T, K),
        k=torch.nn.functional.normalize(torch.randn(T, K), dim=-1),
        v=torch.randn(T, V),
        g=-3 * torch.rand(T, K),
        beta=torch.rand(T),
        S_0=torch.randn(K, V),
    )
    return x, dict(T=T, C=C, K=K, V=V, scale=0.3, do=torch.randn(T, V), dS_T=torch.randn(K, V))


def definition(q, k, v, g, beta, S_0, scale):
    """Run the recurrence by the reference backend, not by the document's code, for autograd."""
    from kda_ops.backends.reference import step_tokens

    o, S = [], S_0
    for t in range(len(q)):
        S, out = step_tokens(S, q[t], k[t], v[t], g[t], beta[t], scale)
        o.append(out)
    return torch.stack(o), S


@contextmanager
def in_float64():
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(default)


def run_document():
    """Execute every block of the page; return its claims with their errors, and its names."""
    with in_float64():
        x, sizes = inputs()
        leaves = {n: t.clone().requires_grad_() for n, t in x.items()}
        o, S = definition(**leaves, scale=sizes["scale"])
        grads = torch.autograd.grad(
            (o * sizes["do"]).sum() + (S * sizes["dS_T"]).sum(), list(leaves.values())
        )
        logits, A_log, bias = (
            torch.randn(shape, requires_grad=True) for shape in ((50, 6), (), (6,))
        )
        dy = torch.randn(50, 6)

        def kda_gate(x, A_log, bias, **words):  # one head of one sequence
            return kda_ops.kda_gate(x[None, :, None], A_log[None], bias[None], **words)[0, :, 0]

        def by_autograd(y, of):
            return torch.autograd.grad((y * dy).sum(), of, retain_graph=True)

        rate, of = A_log.exp(), (logits, A_log, bias)
        claims = []

        def check(claim, got, want):
            error = ((got - want).abs().max() / (want.abs().max() + 1e-30)).item()
            claims.append((claim, error if got.shape == want.shape else float("inf")))

        scope = (
            x
            | sizes
            | {
                "torch": torch,
                "check": check,
                "by_autograd": dict(zip(leaves, grads)),
                "kda_gate": kda_gate,
                "x": logits.detach(),
                "A_log": A_log.detach(),
                "bias": bias.detach(),
                "dy": dy,
                "gate_by_autograd": {
                    "softplus": by_autograd(-rate * torch.log1p((logits + bias).exp()), of),
                    "bounded": by_autograd(-5 / (1 + (-rate * (logits + bias)).exp()), of),
                },
                "norm_by_autograd": by_autograd(
                    logits * (logits.pow(2).sum(-1, keepdim=True) + 1e-6).pow(-0.5), logits
                )[0],
            }
        )
        with torch.no_grad():
            for line, code in blocks():
                # line numbers of a traceback are those of the document
                exec(compile("\n" * line + code, str(DOCUMENT), "exec"), scope)
        return claims, scope


@pytest.fixture(scope="module")
def document():
    return run_document()


@pytest.mark.quick
def test_every_claim_of_the_document_holds(document):
    claims, _ = document
    assert len(claims) >= 30
    assert not [c for c in claims if not c[1] < 1e-10], claims


def test_the_document_computes_what_the_operator_computes(document):
    _, scope = document
    with in_float64():
        x, sizes = inputs()
    heads = {n: x[n][None, :, None] for n in ("q", "k", "v", "g", "beta")}
    o, state = kda_ops.chunk_kda(
        **heads, initial_state=x["S_0"][None, None], scale=sizes["scale"], output_final_state=True
    )
    assert (o[0, :, 0] - scope["o"]).abs().max() < 1e-10
    assert (state[0, 0] - scope["S_T"]).abs().max() < 1e-10


def test_a_wrong_formula_is_noticed(monkeypatch):
    text = DOCUMENT.read_text()
    wrong = text.replace("(early - col)", "(early + col)")
    assert wrong != text
    monkeypatch.setattr(Path, "read_text", lambda self, *a: wrong)
    claims, _ = run_document()
    assert [c for c, error in claims if not error < 1e-10] == ["backward: dg"]
