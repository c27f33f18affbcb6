"""Patched transformers models compute the same; `disable` restores every function."""

from __future__ import annotations

import ast
import importlib
import inspect
import sys

import pytest
import torch

pytest.importorskip("transformers")

from kda_ops.compat import transformers as compat
from tests.support import models
from tests.support.calls import Recorded
from tests.support.closeness import assert_identical
from tests.support.models import (
    CONFIGS,
    assert_generates_the_same,
    assert_same,
    left_padded,
    packed,
    step,
    torch_path,
)

MIXING = ("glm5_next", "qwen4_exp")  # their other layers mix packed sequences
# qwen3_5_moe and olmo_hybrid have the linear layers of qwen3_5
MAIN = tuple(n for n in CONFIGS if n not in ("qwen3_5_moe", "olmo_hybrid"))
PACKING = tuple(n for n in CONFIGS if n not in MIXING)
LENGTHS = (5, 1, 70, 64, 37)


def to_compile(now, names):
    """Return names of models as parameters; all but one run nightly, because compiling takes long.

    The indexer of qwen4_exp loops over tokens, which no graph holds.
    """
    names = [n for n in names if n != "qwen4_exp"]
    return [n if n == now else pytest.param(n, marks=pytest.mark.nightly) for n in names]


@pytest.fixture(autouse=True)
def _take_out_again():
    yield
    compat.disable()
    torch._dynamo.reset()


# --- in and out -----------------------------------------------------------------------------------


def test_assert_same_names_every_tensor_that_differs():
    want = {n: torch.tensor([1.0, -100.0]) for n in "abcd"}
    # 2e-4, 4e-4
    got = {"a": want["a"] + 0.02, "b": want["b"] + 0.04, "c": want["c"] * torch.nan, "d": want["d"]}
    with pytest.raises(
        AssertionError,
        match=(
            "2 of 4: b by 4.00e-04, c by nan; the median of the others 1.00e-04, products in fp32 "
            "highest"
        ),
    ):
        assert_same(got, want)
    assert_same(got | {"b": want["b"], "c": want["c"]}, want)


@pytest.mark.quick
def test_disable_restores_every_binding():
    before = models.bindings()
    compat.enable()
    during = models.bindings()
    changed = {place for place in before if during[place] is not before[place]}
    assert before.keys() == during.keys()
    assert {n for _, n in changed} == {*compat._REPLACEMENTS, "forward"}
    assert len(changed) == 5 * len(CONFIGS)
    compat.disable()
    assert all(x is before[place] for place, x in models.bindings().items())
    compat.disable()
    assert all(x is before[place] for place, x in models.bindings().items())


def test_leaving_a_context_restores_what_it_replaced():
    before = models.bindings()
    with pytest.raises(KeyError), compat.enable():
        inside = models.bindings()
        with compat.enable():
            assert models.bindings() == inside
        assert models.bindings() == inside  # the inner call replaced nothing
        raise KeyError
    assert all(x is before[place] for place, x in models.bindings().items())


def test_leaving_a_context_keeps_what_a_later_call_replaced():
    before, first = models.bindings(), compat.enable()
    compat.disable()
    with compat.enable():
        inside = models.bindings()
        first.__exit__()
        assert models.bindings() == inside != before
    assert models.bindings() == before


@pytest.mark.quick
@pytest.mark.parametrize("name", CONFIGS)
def test_our_operators_run_only_while_enabled(name):
    net, ids = models.model(name), models.tokens(1, 8)  # built before `enable`
    variant = "kda" if name in models.KDA else "gdn"
    with torch_path(), Recorded() as calls:
        net.generate(ids, max_new_tokens=4, do_sample=False)
    assert not calls.counts
    with compat.enable(), Recorded() as calls, torch.no_grad():
        net.generate(ids, max_new_tokens=4, do_sample=False)
        net(ids, use_cache=False)
    assert calls.counts == {
        f"{variant}.chunk": 2 * 2,
        f"{variant}.recurrent": 2 * 3,
        "kda.short_conv": 2 * 2,
        "kda.short_conv_": 2 * 3,
        "kda.gated_rms_norm": 2 * 5,
    }


@pytest.mark.parametrize("name", CONFIGS)
def test_a_beta_is_promised_where_the_model_computes_a_sigmoid(name):
    changed = dict(linear_allow_neg_eigval=True) if name == "olmo_hybrid" else {}
    net = models.model(name, **changed)
    with torch.no_grad(), compat.enable(), Recorded() as calls:
        net(input_ids=models.tokens(2, 70), use_cache=False)
    chunks = [given for name, given in calls.calls if name.endswith(".chunk")]
    assert {given.get("safe_beta", False) for given in chunks} == {name in compat._SIGMOIDS}
    largest = max(given["beta"].max().item() for given in chunks)
    assert (largest > 1.0) == (name == "olmo_hybrid")


@pytest.mark.parametrize("name", sorted(compat._SIGMOIDS & CONFIGS.keys()))
def test_the_source_of_a_model_gives_beta_by_a_sigmoid_alone(name):
    source = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    forwards = [
        f
        for f in ast.walk(ast.parse(inspect.getsource(source)))
        if isinstance(f, ast.FunctionDef)
        and f.name == "forward"
        and any(isinstance(x, ast.keyword) and x.arg == "beta" for x in ast.walk(f))
    ]
    assert forwards
    for forward in forwards:
        made = [
            x.value
            for x in ast.walk(forward)
            if isinstance(x, (ast.Assign, ast.AugAssign))
            and any(
                isinstance(t, ast.Name) and t.id == "beta" and isinstance(t.ctx, ast.Store)
                for t in ast.walk(x)
            )
        ]
        assert made
        for value in made:
            assert isinstance(value, ast.Call) and value.func.attr == "sigmoid", ast.dump(value)
        passed = [
            x.value for x in ast.walk(forward) if isinstance(x, ast.keyword) and x.arg == "beta"
        ]
        assert all(isinstance(x, ast.Name) and x.id == "beta" for x in passed)


def test_an_old_transformers_is_refused(monkeypatch):
    import transformers

    monkeypatch.setattr(transformers, "__version__", "5.9.0")
    with pytest.raises(
        RuntimeError, match="needs transformers 5.16 or later, got 5.9.0: upgrade transformers"
    ):
        compat.enable()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(
        ModuleNotFoundError, match="needs transformers 5.16 or later: pip install transformers"
    ):
        compat.enable()


# --- the same results -----------------------------------------------------------------------------


@pytest.mark.once
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("lengths", ((70,), (70, 33), (3, 1)), ids=str)
def test_logits_loss_and_gradients_are_the_same(name, lengths):
    net, x = models.model(name), left_padded(lengths)
    with torch_path():
        want = step(net, x, x["attention_mask"])
    with compat.enable():
        got = step(net, x, x["attention_mask"])
    assert_same(got, want)


@pytest.mark.parametrize("name", to_compile("kimi_linear", CONFIGS))
def test_a_model_compiled_before_enable_gives_the_same_in_one_graph(name):
    net, x = models.model(name), left_padded((20, 13))
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    with torch_path():
        want = step(net, x, x["attention_mask"])
    with compat.enable():
        torch._dynamo.utils.counters.clear()
        got = step(net, x, x["attention_mask"], compiled)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
        assert not torch._dynamo.utils.counters["graph_break"]
    assert_same(got, want)


@pytest.mark.bits
def test_a_compiled_model_follows_enable_and_disable():
    net, ids = models.model("qwen3_5"), models.tokens(1, 12)
    ran = []

    def backend(graph, _):
        ran.append(
            {
                str(node.target)
                for node in graph.graph.nodes
                if str(node.target).startswith(("kda.", "gdn."))
            }
        )
        return graph.forward

    compiled = torch.compile(net, fullgraph=True, backend=backend)
    with torch.no_grad():
        with torch_path():
            want = compiled(ids, use_cache=False).logits
        with compat.enable():
            got = compiled(ids, use_cache=False).logits
        with torch_path():
            again = compiled(ids, use_cache=False).logits
    assert [bool(graph) for graph in ran] == [False, True]  # the first graph is reused
    assert_same({"logits": got}, {"logits": want})
    assert_identical(again, want)


@pytest.mark.once
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("lengths", ((66,), (20, 7, 1)), ids=str)
def test_generated_tokens_are_the_same(name, lengths):
    assert_generates_the_same(name, lengths)


@pytest.mark.parametrize("name", to_compile("qwen3_next", (n for n in MAIN if n != "qwen3_5")))
def test_decoding_with_a_static_cache_is_one_graph(name):
    from transformers import StaticCache

    net, ids = models.model(name), models.tokens(2, 10)

    def decode(call):
        cache, out = StaticCache(config=net.config, max_cache_len=24), []
        with torch.no_grad():
            out.append(
                net(ids, past_key_values=cache, position_ids=torch.arange(10)[None]).logits[:, -1:]
            )
            for t in range(10, 15):
                out.append(
                    call(
                        out[-1].argmax(-1), past_key_values=cache, position_ids=torch.tensor([[t]])
                    ).logits
                )
        return {"logits": torch.cat(out, 1)}

    with torch_path():
        want = decode(net)
    with compat.enable():
        torch._dynamo.utils.counters.clear()
        got = decode(torch.compile(net, fullgraph=True, backend="aot_eager"))
        assert not torch._dynamo.utils.counters["graph_break"]
    assert_same(got, want)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_cache_continues_with_any_number_of_tokens(name):
    from transformers import DynamicCache

    net, ids = models.model(name), models.tokens(1, 90)
    with torch.no_grad(), compat.enable():
        cache, parts = DynamicCache(config=net.config), []
        for part in ids.split((8, 1, 66, 1, 14), 1):
            parts.append(net(part, past_key_values=cache).logits)
    with torch.no_grad(), torch_path():
        want = net(ids, use_cache=False).logits
    assert_same({"logits": torch.cat(parts, 1)}, {"logits": want})


@pytest.mark.parametrize(
    "name, mode",
    [(name, "eager") for name in PACKING]
    + [
        pytest.param(name, "compiled", marks=pytest.mark.nightly)
        for name in PACKING
        if name in ("kimi_linear", "qwen3_next", "bailing_hybrid", "lara_mini")
    ],
)
def test_packed_sequences_equal_the_sequences_alone(name, mode):
    """The path of transformers cannot pack, so it runs each sequence alone.

    The loss omits the step from one sequence to the next.
    """
    net = models.model(name)
    ids = [models.tokens(n, seed=n) for n in LENGTHS]
    x = packed(ids)
    with torch_path():
        net.zero_grad(set_to_none=True)
        logits = [net(part[None], use_cache=False).logits for part in ids]
        losses = [
            torch.nn.functional.cross_entropy(y[0, :-1], part[1:], reduction="sum")
            for y, part in zip(logits, ids)
        ]
        total = torch.stack(losses).sum() / sum(n - 1 for n in LENGTHS)
        total.backward()
        want = {"logits": torch.cat(logits, 1).detach(), "loss": total.detach()} | {
            "d " + n: p.grad for n, p in net.named_parameters() if p.grad is not None
        }
    with compat.enable():
        net.zero_grad(set_to_none=True)
        y = (
            torch.compile(net, fullgraph=True, backend="aot_eager") if mode == "compiled" else net
        )(**x).logits
        inside = x["position_ids"][0, 1:] > 0
        total = torch.nn.functional.cross_entropy(y[0, :-1][inside], x["input_ids"][0, 1:][inside])
        total.backward()
        got = {"logits": y.detach(), "loss": total.detach()} | {
            "d " + n: p.grad for n, p in net.named_parameters() if p.grad is not None
        }
    assert_same(got, want)


@pytest.mark.parametrize("name", MAIN)
def test_checkpointed_layers_give_the_same_gradients(name):
    net, x = models.model(name), left_padded((40, 9)) | {"use_cache": False}
    net.train()
    with compat.enable():
        want = step(net, x, x["attention_mask"])
        net.gradient_checkpointing_enable()
        assert_same(step(net, x, x["attention_mask"]), want, tighter=1e-3)


@pytest.mark.parametrize("name", MAIN)
def test_bfloat16_is_as_close_to_float32_as_the_path_of_transformers(name):
    x = left_padded((70, 33))
    wide, narrow = models.model(name), models.model(name, dtype=torch.bfloat16)
    with torch.no_grad(), torch_path():
        want, own = wide(**x).logits, narrow(**x).logits
    with torch.no_grad(), compat.enable():
        got = narrow(**x).logits
    real = x["attention_mask"].bool()
    errors = [(y.float() - want)[real].square().mean().sqrt() for y in (got, own)]
    assert got.dtype is torch.bfloat16 and errors[0] <= 1.3 * errors[1]


def test_seq_idx_without_cu_seq_lens_q_is_refused():
    net = models.model("qwen3_next")
    with (
        torch_path(),
        compat.enable(),
        pytest.raises(ValueError, match="cu_seq_lens_q must be given with seq_idx, got None"),
    ):
        net(
            models.tokens(1, 6),
            seq_idx=torch.tensor([[0, 0, 0, 1, 1, 1]], dtype=torch.int32),
            use_cache=False,
        )


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_rows_are_refused_where_other_layers_mix_them(name):
    """With a cache, which is the default, the full attention of the models mixes rows."""
    words = "use_cache must be False for packed rows"
    if name in MIXING:
        words = f"cu_seq_lens_q must be None for {name}, whose other"
    net, x = models.model(name), packed([models.tokens(n, seed=n) for n in LENGTHS])
    x["use_cache"] = name not in MIXING
    with torch.no_grad(), compat.enable(), pytest.raises(ValueError, match=words):
        net(**x)


@pytest.mark.parametrize("name", [n for n in MIXING if n in CONFIGS])
def test_those_layers_do_mix_them(name, monkeypatch):
    """The refusal is needed: without it, tokens see the sequences before theirs."""
    monkeypatch.setattr(compat, "_MIXING", {})
    net, ids = models.model(name), [models.tokens(n, seed=n) for n in LENGTHS]
    with torch.no_grad(), compat.enable():
        together = net(**packed(ids)).logits
        alone = torch.cat([net(part[None], use_cache=False).logits for part in ids], 1)
    first = LENGTHS[0]
    assert_same({"first": together[:, :first]}, {"first": alone[:, :first]})
    assert (together - alone)[:, first:].abs().max() > 0.1 * alone.abs().max()


@pytest.mark.quick
@pytest.mark.parametrize("columns", (3, 4, 6))  # of a cache; W taps read W - 1 of them
@pytest.mark.parametrize("tokens", (1, 2, 9))
def test_the_convolution_on_a_cache_writes_all_its_columns(tokens, columns):
    from transformers.models.qwen3_next import modeling_qwen3_next as module

    gen = torch.Generator().manual_seed(0)
    x, weight = torch.randn(2, 8, tokens, generator=gen), torch.randn(8, 4, generator=gen)
    state, bias = torch.randn(2, 8, columns, generator=gen), torch.randn(8, generator=gen)
    theirs, ours, recorded = (state.clone() for _ in range(3))
    call = x, weight, bias, "silu"
    with torch_path():
        want = module.causal_conv1d_update(call[0], theirs, *call[1:])
    with compat.enable(), Recorded() as calls:
        got = module.causal_conv1d_update(call[0], ours, *call[1:])
        leaf = weight.clone().requires_grad_()
        y = module.causal_conv1d_update(x, recorded, leaf, bias, "silu")
    assert calls.counts == {"kda.short_conv_": 1} and y.requires_grad
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(y.detach(), want)
    assert torch.equal(ours, theirs) and torch.equal(recorded, theirs)


@pytest.mark.quick
def test_a_refused_convolution_leaves_its_cache_as_it_was():
    from transformers.models.qwen3_next import modeling_qwen3_next as module

    x, weight, bias = torch.randn(2, 8, 1), torch.randn(8, 4), torch.randn(7)
    state = torch.randn(2, 8, 4)
    before = state.clone()
    with compat.enable(), pytest.raises(ValueError, match="^bias must have shape"):
        module.causal_conv1d_update(x, state, weight, bias, "silu")
    assert torch.equal(state, before)


def test_a_gate_that_is_not_ours_keeps_the_norm_of_transformers():
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

    layer, x = Qwen3NextRMSNormGated(8), torch.randn(3, 8)
    layer.activation = "relu"
    with torch_path():
        want = layer(x, x)
    with compat.enable(), Recorded() as calls:
        assert torch.equal(layer(x, x), want)
    assert not calls.counts
