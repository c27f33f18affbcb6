"""Calls of FLA's functions run on our operators once the backend is registered.

Without FLA, `verdict` and the refusal to register are tested; the rest needs FLA's own dispatcher.
"""

from __future__ import annotations

import logging
import os
import re
import sys

import pytest
import torch

import kda_ops
from kda_ops.compat import fla as ours
from kda_ops.compat import fla_backend
from tests.compat.test_fla import REFUSALS, fla_flags, outputs_and_gradients
from tests.support.cases import PACKED, TOKENS, Case, replace
from tests.support.closeness import assert_all_identical, assert_identical
from tests.support.fresh import python
from tests.support.target import TARGET

ENV = dict(PYTHONPATH=os.pathsep.join(sys.path), PYTHONWARNINGS="ignore")
FUNCTIONS = ("chunk_kda", "chunk_gated_delta_rule", "fused_recurrent_kda_fwd")


def short(name: str, **changed) -> dict:
    """Return the required arguments of a function."""
    case = Case("gdn" if "gated" in name else "kda", T=3, H=1, HV=1, state=False, **changed)
    x = case.inputs(TARGET.device)
    return {n: x[n] for n in TOKENS}


# --- without FLA ----------------------------------------------------------------------------------


def test_without_fla_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "fla", None)
    monkeypatch.setitem(sys.modules, "fla.backends", None)
    with pytest.raises(ImportError, match="needs FLA 0.6.0 or later: pip install flash-linear-att"):
        fla_backend.enable()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_call_that_the_operator_takes_is_accepted(name):
    inplace = {} if "chunk" in name else {"inplace_final_state": False}
    assert fla_backend.verdict(name, **short(name), **inplace) == (True, None)
    assert fla_backend.verdict(name, *short(name).values(), **inplace) == (True, None)


REFUSED = [row for row in REFUSALS if row[0] in FUNCTIONS]
REFUSED.append(("chunk_kda", dict(q=None), "q must be a tensor, got None", TypeError))
REFUSED.append(("chunk_kda", dict(unknown=1), "unexpected keyword argument 'unknown'", TypeError))


@pytest.mark.parametrize(
    "name, words, reason, _", REFUSED, ids=[f"{n}-{[*w]}" for n, w, *_ in REFUSED]
)
def test_a_call_that_the_operator_refuses_is_refused_with_its_reason(name, words, reason, _):
    """`test_refusals_say_what_to_do` has these calls, so none is lost that would have run here."""
    given = {n: x.cpu() if isinstance(x, torch.Tensor) else x for n, x in short(name).items()}
    accepted, said = fla_backend.verdict(name, **given | words)
    assert not accepted and said is not None and re.search(reason, said), said


# --- with FLA -------------------------------------------------------------------------------------


@pytest.fixture
def theirs(caplog):
    """Return FLA's dispatched functions with our backend registered."""
    pytest.importorskip("fla.backends")
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.kda import chunk_kda, fused_recurrent_kda
    from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd

    fla_backend.enable()
    caplog.set_level(logging.INFO, logger="fla.backends")
    return {
        f.__name__: f
        for f in (chunk_kda, chunk_gated_delta_rule, fused_recurrent_kda, fused_recurrent_kda_fwd)
    }


def registries() -> dict:
    from fla.backends import _function_registries, _operation_registries
    from fla.ops.kda import chunk_kda

    function = next(r for f, r in _function_registries.items() if f.__name__ == chunk_kda.__name__)
    return {
        "chunk_kda": function,
        "chunk_gated_delta_rule": _operation_registries["gated_delta_rule"],
        "fused_recurrent_kda_fwd": _operation_registries["kda"],
    }


def test_a_second_call_registers_nothing_more(theirs):
    before = {name: [*r._backends] for name, r in registries().items()}
    fla_backend.enable()
    assert before == {name: [*r._backends] for name, r in registries().items()}
    assert all(types.count("kda_ops") == 1 for types in before.values())


FLAGS = [
    Case(B=2, l2norm=True, H=1, HV=2),
    Case(gate="softplus", beta="sigmoid", seed=1),
    Case(gate="softplus", beta="neg_eigval", l2norm=True, transposed=True, scale=0.3),
    Case(gate="bounded", seed=1, safe_gate=True),
    Case(gate="bounded", seed=3, dtype=torch.bfloat16),  # without A_log
    Case(gate="strong", safe_gate=True, disable_recompute=True),
    Case(lengths=PACKED, tail=3, transposed=True),
    Case(state=False, final=False, strides="fused"),
    Case("gdn", B=2, l2norm=True, H=1, HV=2),
    Case("gdn", gate="softplus", beta="sigmoid", transposed=True, scale=0.3),
    Case("gdn", gate="softplus", beta="neg_eigval", l2norm=True, dtype=torch.bfloat16),
    Case("gdn", lengths=PACKED, tail=3, state=False, final=False),
]


@pytest.mark.bits
@pytest.mark.parametrize("case", FLAGS, ids=str)
def test_every_flag_reaches_our_operators_forward_and_backward(theirs, caplog, case):
    name = "chunk_kda" if case.variant == "kda" else "chunk_gated_delta_rule"
    for registry in registries().values():
        registry._logged.clear()
    flags = case.flags("chunk" if case.variant == "kda" else "recurrent")
    operator = getattr(kda_ops, f"chunk_{case.variant}")
    want = outputs_and_gradients(case, lambda x: operator(**x, **flags))
    words = fla_flags(case, "chunk" if case.variant == "kda" else "recurrent")
    got = outputs_and_gradients(case, lambda x: theirs[name](**x, **words))
    assert_all_identical(got, want)
    assert any(m.endswith(f"{name} -> kda_ops") for m in caplog.messages)


@pytest.mark.bits
@pytest.mark.parametrize("case", FLAGS[:8], ids=str)
def test_the_recurrent_function_reaches_our_operator(theirs, caplog, case):
    registries()["fused_recurrent_kda_fwd"]._logged.clear()
    # FLA copies to contiguous tensors before it dispatches
    x = {n: None if t is None else t.contiguous() for n, t in case.inputs(TARGET.device).items()}
    words = fla_flags(case, "recurrent")
    with torch.no_grad():
        o, state = theirs["fused_recurrent_kda"](**x, **words)
        want, want_state = ours.fused_recurrent_kda(**x, **words)
    assert_identical(o, want)
    if case.final:
        assert_identical(state, want_state)
    assert any(m.endswith("fused_recurrent_kda_fwd -> kda_ops") for m in caplog.messages)


@pytest.mark.bits
def test_decoding_writes_the_pool_in_place(theirs):
    x = Case(B=3, T=1, state=False, H=2, HV=2).inputs(TARGET.device)
    tokens = {n: x[n] for n in TOKENS}
    pool = torch.randn(5, 2, 16, 24, device=TARGET.device)
    slots, want_pool = torch.tensor([4, 0, 2], device=TARGET.device), pool.clone()
    out = torch.full_like(x["v"], torch.nan)
    with torch.no_grad():
        o, same = theirs["fused_recurrent_kda_fwd"](
            **tokens, initial_state=pool, ssm_state_indices=slots, out=out
        )
    assert o is out and same is pool
    assert_identical(o, kda_ops.recurrent_kda_(*tokens.values(), want_pool, slots))
    assert_identical(pool, want_pool)


@pytest.mark.bits
def test_intermediate_states_come_from_our_operator(theirs):
    x = Case(B=2, T=150).inputs(TARGET.device)
    words = dict(return_intermediate_states=True, output_final_state=True)
    with torch.inference_mode():
        got, want = theirs["chunk_kda"](**x, **words), ours.chunk_kda(**x, **words)
    for a, b in zip(got, want, strict=True):
        assert_identical(a, b)


@pytest.mark.bits
def test_keywords_without_effect_are_accepted(theirs):
    case = Case(lengths=(3, 70), H=1, HV=1)
    x = case.inputs(TARGET.device)
    host = x["cu_seqlens"].cpu()
    got, _ = theirs["chunk_kda"](
        **x, cu_seqlens_cpu=host, chunk_size=32, use_graph=True, max_num_seqs=2
    )
    assert_identical(got, ours.chunk_kda(**x)[0])
    x = replace(case, variant="gdn").inputs(TARGET.device)
    got, _ = theirs["chunk_gated_delta_rule"](
        **x, cu_seqlens_cpu=host, chunk_size=16, chunk_indices=host
    )
    assert_identical(got, ours.chunk_gdn(**x)[0])


@pytest.mark.bits
def test_autocast_keeps_the_dtype_as_in_fla(theirs):
    x = Case(T=5, final=False).inputs(TARGET.device)
    with torch.autocast(TARGET.device.type, torch.bfloat16):
        o, _ = theirs["chunk_kda"](**x)
    assert_identical(o, ours.chunk_kda(**x)[0])


class Sentinel(Exception):
    """Raised by the last function of a registry, FLA's own."""


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_refused_call_goes_to_fla_and_the_reason_is_logged(theirs, caplog, name):
    registry = registries()[name]
    registry._logged.clear()

    def own(*args, **given):
        raise Sentinel

    own.__name__ = name
    with pytest.raises(Sentinel):
        registry.dispatch(own)(**short(name), unknown_keyword=1)
    assert any(
        "kda_ops rejected" in m and "argument 'unknown_keyword'" in m for m in caplog.messages
    )


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_switch_of_the_environment_is_read_at_every_call(theirs, monkeypatch, name):
    def own(*args, **given):
        raise Sentinel

    own.__name__ = name
    call = registries()[name].dispatch(own)
    words = short(name) | ({} if "chunk" in name else {"inplace_final_state": False})
    call(**words)
    monkeypatch.setenv("FLA_KDA_OPS", "0")
    with pytest.raises(Sentinel):
        call(**words)


@pytest.mark.bits
def test_a_compiled_caller_breaks_its_graph_over_fla_and_not_over_ours(theirs):
    x = short("chunk_kda")
    for function, breaks in ((theirs["chunk_kda"], True), (ours.chunk_kda, False)):
        torch._dynamo.reset()

        def caller(q, function=function):
            return function(**x | {"q": 2 * q})[0] + 1

        compiled = torch.compile(caller, fullgraph=True, backend="aot_eager")
        if breaks:
            with pytest.raises(torch._dynamo.exc.Unsupported):
                compiled(x["q"])
        else:
            assert_identical(compiled(x["q"]), caller(x["q"]))


BYPASSED = """
import torch
from fla.backends import _DISPATCH_DISABLED, _operation_registries
from kda_ops.compat import fla_backend
from fla.ops.kda import chunk_kda
assert _DISPATCH_DISABLED
fla_backend.enable()
def ours(*args, **given):
    raise AssertionError("our operators were called")
for name in fla_backend._REGISTRIES:
    setattr(fla_backend.fla, name, ours)
q = torch.randn(1, 3, 1, 16)
try:
    chunk_kda(q, q, q, q, q[..., 0])
except AssertionError:
    raise
except Exception as error:  # FLA's kernels need a GPU
    print("FLA's own", type(error).__name__)
else:
    print("FLA's own ran")
"""


def test_disabled_dispatch_takes_the_backend_out():
    pytest.importorskip("fla.backends")
    assert "FLA's own" in python(BYPASSED, FLA_DISABLE_BACKEND_DISPATCH="1", **ENV).stdout


@pytest.mark.parametrize("name, mixes", [("kimi_linear", True), ("qwen3_next", False)])
def test_transformers_loses_the_offsets_of_packed_kda_rows_and_our_patch_does_not(
    theirs, monkeypatch, name, mixes
):
    """transformers calls FLA without ``cu_seq_lens_q``; docs/drop-ins.md says what to do."""
    pytest.importorskip("transformers")
    from kda_ops.compat import transformers as compat
    from tests.support import models

    net, ids = models.model(name), [models.tokens(n, seed=n) for n in (5, 1, 70, 64)]
    module = sys.modules[type(net).__module__]
    with torch.no_grad(), models.torch_path():
        want = torch.cat([net(part[None], use_cache=False).logits for part in ids], 1)
    # transformers' own convolution refuses or mixes packed rows: replace it in both runs
    monkeypatch.setattr(module, "causal_conv1d_fn", compat._convolution(module.causal_conv1d_fn))
    with torch.no_grad():
        through_fla = net(**models.packed(ids)).logits
        with compat.enable():
            patched = net(**models.packed(ids)).logits
    models.assert_same({"logits": patched}, {"logits": want})
    off = (through_fla - want).abs().max() / want.abs().max()
    assert off > 0.1 if mixes else off < models.TOLERANCE


STEP = """
import gc, logging, torch
from tests.support.interpreter import mend

mend()
from triton.runtime.autotuner import Autotuner

from benchmarks.fla_models import chosen, model
from kda_ops.compat import fla as ours
from kda_ops.compat import fla_backend

fla_backend.enable()
for variant, layers, name in (
    ("kda", "kda", "chunk_kda"), ("gdn", "gated_deltanet", "chunk_gated_delta_rule")
):
    net = model(variant, 2, 2, 16, vocab_size=64, fuse_cross_entropy=False).train()
    for x in gc.get_objects():
        if isinstance(x, Autotuner):
            x.configs = x.configs[:1]  # tuning needs a driver
    ids = torch.randint(3, 64, (2, 40), generator=torch.Generator().manual_seed(0))

    def step():
        net.zero_grad(set_to_none=True)
        out = net(input_ids=ids, labels=ids)
        out.loss.backward()
        assert all(p.grad is not None and p.grad.any() for p in net.parameters())
        return [out.logits.detach(), *(p.grad for p in net.parameters())]

    chosen()
    got = step()
    assert chosen(), variant
    module = __import__(f"fla.layers.{layers}", fromlist=["_"])
    setattr(module, name, getattr(ours, name))
    want = step()
    assert not chosen(), variant
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b), variant
    print(variant, "stepped")
"""


def test_a_training_step_of_flas_models_runs_on_our_operators():
    """FLA's convolutions and norms run under Triton's interpreter; the delta rule is ours."""
    pytest.importorskip("fla.backends")
    pytest.importorskip("triton")
    pytest.importorskip("transformers")
    out = python(STEP, TRITON_INTERPRET="1", **ENV).stdout
    assert out.split() == ["kda", "stepped", "gdn", "stepped"]
