"""`kda_ops.inductor` folds PyTorch code into the operators' flags, and changes only rounding.

Most tests run the pass on a Dynamo graph and call that graph; a few use Inductor.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch._dynamo.utils import counters
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import fresh_cache

import kda_ops
from kda_ops.inductor import FoldPreprocessing, fold_preprocessing
from tests.support.closeness import DRAWS, excess
from tests.support.folding import (
    BOUNDED,
    DOUBLE_SIGMOIDS,
    GATES,
    HV,
    NORMS,
    RANK,
    SIGMOIDS,
    B,
    Captured,
    H,
    K,
    V,
    assert_folds,
    assert_near,
    attend,
    capture,
    column,
    inputs,
    norm,
    results,
)
from tests.support.fresh import python

ROOT = Path(__file__).parents[2]


# --- every spelling is found ----------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize("name", NORMS)
def test_l2norm_folds(name):
    captured = assert_folds(attend(norm=NORMS[name]), inputs(), l2norm=1)
    assert captured.calls[0].kwargs["use_qk_l2norm_in_kernel"] is True


@pytest.mark.parametrize("name", ("float", "cast", "rsqrt"))
def test_l2norm_of_16_bit_inputs_folds_with_the_cast_back(name):
    x = inputs(dtype=torch.bfloat16, grad=False)
    captured = capture(attend(norm=NORMS[name]), x)
    assert captured.fold.folded == Counter(l2norm=1)


@pytest.mark.quick
@pytest.mark.parametrize("bounded, name", [*((0, n) for n in GATES), *((1, n) for n in BOUNDED)])
def test_gate_folds(bounded, name, variant):
    op, gate = getattr(torch.ops, variant).chunk, (BOUNDED if bounded else GATES)[name]
    call = attend(decay=lambda *x: gate(*x, RANK[variant]), op=op.default if bounded else op)
    x = inputs(variant, flat=name == "flat" and not bounded)
    captured = assert_folds(call, x, **{"bounded_gate" if bounded else "gate": 1})
    flags = captured.calls[-1].kwargs
    assert flags["use_gate_in_kernel"] is True
    assert flags["lower_bound"] == (-5.0 if bounded else None)


@pytest.mark.parametrize(
    "double, name", [*((0, n) for n in SIGMOIDS), *((1, n) for n in DOUBLE_SIGMOIDS)]
)
def test_sigmoid_folds(double, name):
    beta = (DOUBLE_SIGMOIDS if double else SIGMOIDS)[name]
    folded = {"double_sigmoid" if double else "sigmoid": 1}
    captured = assert_folds(attend(beta=beta), inputs(), **folded)
    assert captured.calls[0].kwargs.get("allow_neg_eigval", False) is bool(double)


def everything(
    op, variant, norm="rsqrt", gate="float", sigmoid="method", bounded=False, double=False
):
    """Return a function of all inputs that writes every activation in PyTorch."""
    gates, sigmoids = BOUNDED if bounded else GATES, DOUBLE_SIGMOIDS if double else SIGMOIDS

    def f(q, k, v, g, beta, A_log, dt_bias):
        return op(
            NORMS[norm](q),
            NORMS[norm](k),
            v,
            gates[gate](g, A_log, dt_bias, RANK[variant]),
            sigmoids[sigmoid](beta),
        )[0]

    return f


ALL = dict(l2norm=1, gate=1, sigmoid=1)


@pytest.mark.parametrize("form", ("functional", "packet", "overload"))
@pytest.mark.parametrize("name", ("chunk", "recurrent"))
def test_every_way_to_call_an_operator_folds(variant, name, form):
    packet = getattr(getattr(torch.ops, variant), name)
    op = {
        "functional": getattr(kda_ops, f"{name}_{variant}"),
        "packet": packet,
        "overload": packet.default,
    }[form]
    assert_folds(everything(op, variant), inputs(variant), **ALL)


@pytest.mark.parametrize("into", (False, True))
@pytest.mark.parametrize("name", ("chunk_kda_", "recurrent_kda_"))
def test_operators_on_a_state_pool_fold(name, into):
    op, x = getattr(kda_ops, name), inputs(grad=False)
    pools = [torch.zeros(B, HV, K, V) for _ in range(2)]
    outs = [torch.full_like(x["v"], torch.nan) if into else None for _ in range(2)]

    def f(q, k, v, g, beta, A_log, dt_bias, pool, out):
        return op(
            NORMS["rsqrt"](q),
            NORMS["rsqrt"](k),
            v,
            GATES["float"](g, A_log, dt_bias, 1),
            beta.sigmoid(),
            pool,
            out=out,
        )

    captured = Captured()
    got = captured.compile(f)(*x.values(), pools[0], outs[0])
    torch.testing.assert_close(got, f(*x.values(), pools[1], outs[1]), rtol=1e-4, atol=1e-5)
    assert not into or torch.equal(got, outs[0])
    torch.testing.assert_close(*pools, rtol=1e-4, atol=1e-5)
    assert captured.fold.folded == Counter(ALL)


def test_a_fold_removes_the_folded_nodes():
    captured = capture(everything(kda_ops.chunk_kda, "kda"), inputs())
    nodes = captured.calls[0].graph.nodes
    # the operator, and its first output
    assert [n.op for n in nodes if n.op not in ("placeholder", "output")] == ["call_function"] * 2


BIASES = {
    "one row": (lambda dt: dt.reshape(1, -1), lambda dt: dt.view(HV, K)),
    "one row of all channels": (lambda dt: dt.reshape(1, -1), lambda dt: dt.unflatten(-1, (HV, K))),
    "other heads": (lambda dt: dt.reshape(K, HV), lambda dt: dt.reshape(HV, K)),
    "transposed": (lambda dt: dt.t().contiguous(), lambda dt: dt.t().reshape(-1).view(HV, K)),
}


@pytest.mark.parametrize("name", BIASES)
def test_a_bias_of_any_shape_folds(name):
    x, (stored, used) = inputs(), BIASES[name]
    x["dt_bias"] = stored(x["dt_bias"].detach()).requires_grad_()
    call = attend(decay=lambda g, A, dt: -A.exp()[:, None] * F.softplus(g + used(dt)))
    assert_folds(call, x, gate=1)


def test_parameters_stored_in_another_shape_fold():
    x = inputs()
    x["A_log"], x["dt_bias"] = (
        x[n].detach().reshape(1, 1, HV, -1).requires_grad_() for n in ("A_log", "dt_bias")
    )
    assert_folds(attend(decay=lambda g, A, dt: -A.exp() * F.softplus(g + dt)), x, gate=1)


def test_heads_repeated_after_the_norm_fold():
    call = attend(norm=lambda x: norm(x).repeat_interleave(HV // H, dim=2))
    assert_folds(call, inputs(), l2norm=1)


def test_an_activation_with_another_reader_stays():
    def f(q, k, v, g, beta, *_):
        b = beta.sigmoid()
        return kda_ops.chunk_kda(q, k, v, None, b)[0] * b.mean()

    assert_folds(f, inputs(), sigmoid=1)


def test_inference_with_parameters_folds():
    x = inputs()
    with torch.no_grad():
        captured = capture(everything(kda_ops.chunk_kda, "kda"), x)
    assert captured.fold.folded == Counter(ALL)


def test_a_checkpointed_region_folds():
    f = everything(kda_ops.chunk_kda, "kda")
    assert_folds(
        lambda *x: torch.utils.checkpoint.checkpoint(f, *x, use_reentrant=False), inputs(), **ALL
    )


def test_two_layers_fold():
    f = everything(kda_ops.chunk_kda, "kda")
    assert_folds(lambda q, k, v, *x: f(q, k, f(q, k, v, *x), *x), inputs(), **{n: 2 for n in ALL})


def test_one_token_of_one_row_folds(variant):
    """Here the bias has the same shape as the logits of the token."""
    x = {
        n: t.detach()[:1] if t.dim() > 2 else t.detach()
        for n, t in inputs(variant, tokens=1).items()
    }
    x["dt_bias"] = x["dt_bias"][None, None]
    # with one token and no initial state, these have no gradient
    x |= {n: t.requires_grad_() for n, t in x.items() if n not in ("g", "A_log", "dt_bias")}
    rank = RANK[variant]

    def f(q, k, v, g, beta, A_log, dt_bias):
        gate = -column(A_log.exp(), rank) * F.softplus(dt_bias + g)
        return getattr(torch.ops, variant).recurrent(norm(q), norm(k), v, gate, beta.sigmoid())[0]

    assert_folds(f, x, **ALL)


# --- nothing changes beyond rounding --------------------------------------------------------------


def redraw(f, x, rank, draw):
    """Compute the same results with the sums over channels in another order."""
    gen = torch.Generator().manual_seed(draw)
    order = {"K": torch.randperm(K, generator=gen), "V": torch.randperm(V, generator=gen)}
    axis = dict(q="K", k="K", v="V", o="V") | (dict(g="K", dt_bias="K") if rank else {})
    moved = {
        n: t.detach()[..., order[axis[n]]].requires_grad_() if n in axis else t
        for n, t in x.items()
    }

    found = {
        n: (t, axis.get(n if n == "o" else n[1:])) for n, t in results(f, moved, order["V"]).items()
    }
    return {n: t[..., order[i].argsort()] if i else t for n, (t, i) in found.items()}


# do not shrink: each example compiles, and a smaller one is not clearer
@settings(phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(
    variant=st.sampled_from(sorted(RANK)),
    name=st.sampled_from(("chunk", "recurrent")),
    dtype=st.sampled_from((torch.float32, torch.bfloat16)),
    wide=st.booleans(),
    norm=st.sampled_from(sorted(NORMS)),
    gate=st.sampled_from(
        sorted((False, n) for n in GATES if n != "flat") + sorted((True, n) for n in BOUNDED)
    ),
    sigmoid=st.sampled_from(
        sorted((False, n) for n in SIGMOIDS) + sorted((True, n) for n in DOUBLE_SIGMOIDS)
    ),
    tokens=st.sampled_from((5, 37, 65)),  # with one token the decay's gradient cancels to rounding
    seed=st.integers(0, 2**16),
)
def test_folding_changes_nothing_beyond_rounding(
    variant, name, dtype, wide, norm, gate, sigmoid, tokens, seed
):
    """A folded program is as close to float64 as the plain one, in maximum and RMS::

        |x - ref| <= 4 (|plain - ref| + eps max|ref|)

    The plain program's error is one random draw. If it is too small, permuted channels give more
    draws, as in `tests.support.closeness`. The factor is twice that budget's, because the programs
    round in different places. `test_folding_changes_nothing_in_float64` is the strict test.
    """
    op = getattr(getattr(torch.ops, variant), name)
    (bounded, gate), (double, sigmoid) = gate, sigmoid
    f = everything(op, variant, norm, gate, sigmoid, bounded, double)
    exact = everything(
        op,
        variant,
        "rsqrt",
        gate if gate.startswith("no") else "operators",
        "left" if double else "method",
        bounded,
        double,
    )
    x = inputs(variant, dtype, seed, tokens=tokens, wide=torch.float32 if wide else None)
    captured = Captured()
    got, plain = results(captured.compile(f), x), [results(f, x)]
    ref = results(exact, {n: t.detach().double().requires_grad_() for n, t in x.items()})
    assert captured.fold.folded.total() == 3, (captured.fold.folded, captured.fold.refused)
    assert got.keys() == plain[0].keys() == ref.keys()

    def over():
        return {
            n: e
            for n in got
            for e in excess(got[n], ref[n], *(p[n] for p in plain)).values()
            if not e <= 2.0
        }

    if over():
        plain += [redraw(f, x, RANK[variant], draw) for draw in range(DRAWS)]
    assert not over(), over()


@pytest.mark.quick
@pytest.mark.parametrize("bounded", (False, True))
def test_folding_changes_nothing_in_float64(variant, bounded):
    """In float64 the plain and the folded program agree up to rounding."""
    x = inputs(variant, torch.float64)
    f = everything(
        getattr(torch.ops, variant).chunk,
        variant,
        "product",
        "operators",
        "right" if bounded else "function",
        bounded,
        double=bounded,
    )
    kinds = dict(bounded_gate=1, double_sigmoid=1) if bounded else dict(gate=1, sigmoid=1)
    assert_folds(f, x, 1e-11, l2norm=1, **kinds)


# --- through Inductor -----------------------------------------------------------------------------


@pytest.fixture
def fresh():
    """Clear caches and counters before and after a test that compiles with Inductor."""
    torch._dynamo.reset()
    counters.clear()
    with fresh_cache():
        yield
    torch._dynamo.reset()


class Recorder(CustomGraphPass):
    """Another pass, which counts the unfolded activations."""

    def __init__(self):
        self.seen = []

    def __call__(self, graph):
        self.seen.append(sum(n.target == "sigmoid" for n in graph.nodes))

    def uuid(self):
        return b"recorder"


def test_inductor_trains_at_any_length_with_one_graph(fresh):
    fold, f = FoldPreprocessing(), everything(kda_ops.chunk_kda, "kda")
    compiled = torch.compile(
        f, dynamic=True, fullgraph=True, options={"pre_grad_custom_pass": fold}
    )
    for tokens in (65, 37, 70):
        x = inputs(tokens=tokens)
        assert_near(results(compiled, x), results(f, x), 1e-5, rtol=1e-4)
    assert fold.folded == Counter(ALL) and not fold.refused
    assert counters["stats"]["unique_graphs"] == 1


def test_the_backend_composes_with_another_pass(fresh):
    """The fold runs after the passes in the options, and the cache holds the folded graph."""
    before, f = Recorder(), everything(kda_ops.chunk_gdn, "gdn")
    x = inputs("gdn", grad=False)
    fold_preprocessing.folded.clear()
    assert "kda_inductor" in torch._dynamo.list_backends()
    got = torch.compile(
        f, backend="kda_inductor", options={"pre_grad_custom_pass": before}, fullgraph=True
    )(*x.values())
    torch.testing.assert_close(got, f(*x.values()), rtol=1e-4, atol=1e-5)
    assert before.seen == [1] and fold_preprocessing.folded == Counter(ALL)
    if not hasattr(torch._inductor.custom_graph_pass, "get_custom_graph_passes"):
        return  # torch 2.12 and older accept only one pass in the options
    after = Recorder()
    torch._dynamo.reset()
    torch.compile(f, options={"pre_grad_custom_pass": [fold_preprocessing, after]})(*x.values())
    assert after.seen == [0]


class Another(FoldPreprocessing):
    def uuid(self):
        return b"another"


def test_the_cache_key_includes_the_pass(fresh):
    """A second compilation hits the cache; one with another pass, or none, misses."""
    x = inputs(grad=False)

    def f(q, k, v, g, beta, *_):
        return kda_ops.chunk_kda(q, k, v, None, torch.sigmoid(beta))[0]

    def compile_again(**options):
        torch._dynamo.reset()
        counters.clear()
        torch.compile(f, options=options)(*x.values())
        return counters["aot_autograd"]["autograd_cache_hit"], counters["aot_autograd"][
            "autograd_cache_miss"
        ]

    first, second = FoldPreprocessing(), FoldPreprocessing()
    assert first.uuid() == second.uuid() == fold_preprocessing.uuid()
    assert compile_again(pre_grad_custom_pass=first) == (0, 1) and first.folded == Counter(
        sigmoid=1
    )
    assert compile_again(pre_grad_custom_pass=second) == (1, 0)
    assert compile_again(pre_grad_custom_pass=Another()) == (0, 1)
    assert compile_again() == (0, 1)


# --- in a fresh process ---------------------------------------------------------------------------


def run(code: str, *path: Path) -> str:
    return python(code, PYTHONPATH=os.pathsep.join(map(str, (ROOT, *path)))).stdout


def test_an_installed_entry_point_names_the_backend(tmp_path):
    """torch.compile finds an installed distribution's entry point without importing kda_ops."""
    line = re.search(
        r'torch_dynamo_backends"?\]\s*\n(kda_inductor) = "([\w.:]+)"',
        (ROOT / "pyproject.toml").read_text(),
    )
    info = tmp_path / "kda_ops-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kda-ops\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[torch_dynamo_backends]\n{line[1]} = {line[2]}\n")
    code = (
        "import torch._dynamo as d; print('kda_inductor' in d.list_backends(), "
        "d.lookup_backend('kda_inductor'))"
    )
    assert run(code, tmp_path).startswith("True <function kda_inductor")
