"""vLLM's functions run on our operators: against the recurrence in float64, and behind stubs.

vLLM is not needed. The stubs have its module paths and its version.
"""

from __future__ import annotations

import importlib
import logging
import re
import sys
from pathlib import Path

import pytest
import torch

from kda_ops.compat import engines, vllm
from tests.support.engines import (
    HEADS,
    POOLS,
    SLOTS,
    Batch,
    H,
    K,
    V,
    assert_decoded,
    assert_near,
    i32,
    installed,
    pool,
    stub,
)

KDA = "vllm.models.kimi_k3.nvidia.ops.third_party.kda"
GDN = "vllm.third_party.flash_linear_attention.ops"
QWEN = "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn"


def decode(batch, state, slots, accepted=None, **changed):
    """Call vLLM's decode function of the variant, and return o and the pool."""
    call = dict(zip("qkv", batch.qkv), A_log=batch.A_log, dt_bias=batch.dt_bias)
    call |= dict(initial_state=state, cu_seqlens=batch.starts)
    call |= dict(ssm_state_indices=slots, num_accepted_tokens=accepted)
    if batch.variant == "kda":
        call |= dict(raw_g=batch.a[None], raw_beta=batch.b[None], lower_bound=batch.bound)
        return vllm.fused_recurrent_kda(**(call | changed))
    call |= dict(a=batch.a, b=batch.b, inplace_final_state=True, use_qk_l2norm_in_kernel=True)
    return vllm.fused_sigmoid_gating_delta_rule_update(**(call | changed))


def packed(batch, state, slots, **changed):
    """Call vLLM's packed decode function of the variant; return o ``[B, HV, V]`` and the pool."""
    B = batch.mixed_qkv.shape[0]
    if batch.variant == "kda":
        o, after = vllm.fused_recurrent_kda_packed_decode(
            *(batch.mixed_qkv, batch.a[None], batch.b[None], batch.A_log, batch.dt_bias.flatten()),
            *(batch.bound, state, slots),
            **changed,
        )
        assert o.shape == (1, B, batch.HV, V)
        return o[0], after
    out = torch.full((B, 1, batch.HV, V), torch.nan, dtype=batch.dtype)
    o, after = vllm.fused_recurrent_gated_delta_rule_packed_decode(
        *(batch.mixed_qkv, batch.a, batch.b, batch.A_log, batch.dt_bias, K**-0.5, state, out),
        slots,
        **(dict(use_qk_l2norm_in_kernel=True) | changed),
    )
    assert o is out
    return o[:, 0], after


# --- the functions --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", POOLS, ids=str)
@pytest.mark.parametrize("variant, bound", [("kda", None), ("kda", -5.0), ("gdn", None)])
def test_decode_reads_and_writes_the_slots_of_its_sequences(variant, bound, dtype):
    batch = Batch(variant, (1, 1, 1, 1), HEADS[variant], tail=2, bound=bound)
    state = pool(batch.HV, dtype)
    before = state.clone()
    # the table is that of the largest batch, and two sequences are padding
    o, after = decode(batch, state, i32(3, 0, 7, -1, 5, 5))
    assert after is state and o.dtype == batch.dtype
    assert_decoded(batch, before, after, o[0], [[3], [0], [7], [-1]], [3, 0, 7, -1], variant)


@pytest.mark.parametrize("dtype", POOLS, ids=str)
def test_packed_decode_splits_the_projection_without_a_copy(variant, dtype, monkeypatch):
    batch = Batch(variant, (1, 1, 1), HEADS[variant])
    state = pool(batch.HV, dtype)
    before = state.clone()
    memory = batch.mixed_qkv.untyped_storage().data_ptr()
    seen = []
    name = f"recurrent_{variant}_"
    operator = getattr(vllm.functional, name)
    monkeypatch.setattr(
        vllm.functional, name, lambda *args, **given: seen.append(args) or operator(*args, **given)
    )
    o, after = packed(batch, state, i32(8, 0, 2))
    assert after is state
    assert all(x.untyped_storage().data_ptr() == memory for x in seen[0][:3])
    assert_decoded(batch, before, after, o, [[8], [0], [2]], [8, 0, 2], variant)


@pytest.mark.parametrize("dtype", POOLS, ids=str)
def test_drafts_go_to_a_slot_each_and_the_next_call_starts_from_the_last_accepted(variant, dtype):
    table = [[1, 2, 3], [4, 5, 6], [0, 0, 0], [7, 0, 0]]
    drafts = Batch(variant, (3, 2, 3, 1), HEADS[variant], seed=3)
    state = pool(drafts.HV, dtype)
    before = state.clone()
    rows = i32(*table, [0, 0, 0])  # one row more than sequences
    o, _ = decode(drafts, state, rows, i32(1, 1, 1, 1, 1))
    assert_decoded(drafts, before, state, o[0], table, [1, 4, 0, 7], "first")

    before = state.clone()
    later = Batch(variant, (3, 3, 3, 1), HEADS[variant], seed=4)
    o, _ = decode(later, state, rows, i32(3, 1, 1, 1, 1))  # all accepted, and the first alone
    assert_decoded(later, before, state, o[0], table, [3, 4, 0, 7], "second")


@pytest.mark.parametrize("dtype", POOLS, ids=str)
@pytest.mark.parametrize("variant, bound", [("kda", None), ("kda", -5.0), ("gdn", None)])
@pytest.mark.parametrize("given_out", [False, True])
def test_prefill_starts_from_gathered_states_and_returns_the_last_in_fp32(
    variant, bound, dtype, given_out
):
    # a fresh request, one that goes on, a decoding one, and an empty sequence
    batch = Batch(variant, (70, 5, 1, 0), HEADS[variant], torch.float32, bound=bound)
    gathered = pool(batch.HV, dtype)[:4].contiguous()
    gathered[0] = 0
    before, (q, k, v) = gathered.clone(), batch.qkv
    out = torch.full((1, 80, batch.HV, V), torch.nan)[:, :76] if given_out else None
    kept = dict(initial_state=gathered, output_final_state=True, cu_seqlens=batch.starts)
    if variant == "kda":
        o, final = vllm.chunk_kda_with_fused_gate(
            *(q, k, v, batch.a[None], batch.b[None], batch.A_log, batch.dt_bias),
            **(kept | dict(lower_bound=bound, use_qk_l2norm_in_kernel=True, out=out)),
        )
    else:
        g, beta = batch.gates()  # vLLM activates both before the call
        flat = None if out is None else out.flatten()
        o, final = vllm.chunk_gated_delta_rule(
            *(q, k, v, g.float()[None, ..., 0], beta.float()[None]),
            **(kept | dict(use_qk_l2norm_in_kernel=True, core_attn_out=flat)),
        )
    assert out is None or o.untyped_storage().data_ptr() == out.untyped_storage().data_ptr()
    assert final.dtype == torch.float32 and gathered.equal(before)
    for n in range(4):
        values, states = batch.along(n, before[n])
        assert_near(o[0, batch.span(n)], values, f"o of sequence {n}")
        assert_near(final[n], states[-1] if states else before[n].double(), f"state of {n}")


def test_prefill_without_states_starts_from_zero_and_returns_none():
    batch = Batch("kda", (5,), H, torch.float32)
    q, k, v = batch.qkv
    o, final = vllm.chunk_kda_with_fused_gate(
        *(q, k, v, batch.a[None], batch.b[None], batch.A_log, None),
        use_qk_l2norm_in_kernel=True,
        unknown=1,
    )
    assert final is None and o.isfinite().all()


# --- wrong calls, without vLLM --------------------------------------------------------------------


def refused(variant, changed, reason, call=decode, slots=None):
    batch = Batch(variant, (1, 1), HEADS[variant])
    state = pool(batch.HV, torch.float32)
    before = state.clone()
    with pytest.raises((TypeError, ValueError), match=reason):
        call(batch, state, i32(1, 2) if slots is None else slots, **changed)
    assert state.equal(before)


WRONG_DECODE = [
    ("kda", dict(q=torch.zeros(1, 2, H, K)), "q, k and v must share one dtype"),
    ("kda", dict(initial_state=torch.zeros(3, H, V, K).half()), "float32 or bfloat16"),
    ("kda", dict(initial_state=torch.zeros(3, H, K, V)), "state must have shape"),
    ("kda", dict(initial_state=None), "must be a tensor"),
    ("kda", dict(ssm_state_indices=None), "the table of slots must be a tensor"),
    ("kda", dict(ssm_state_indices=torch.zeros(2)), "int32 or int64"),
    ("kda", dict(cu_seqlens=torch.tensor([0.0, 2.0])), "int32 or int64"),
    ("kda", dict(out=torch.zeros(1, 2, H, V + 1)), "out must (have|be)"),
    ("kda", dict(num_accepted_tokens=i32(1, 1)), r"\[N, S\]"),
    ("kda", dict(v=None), "v must be a tensor, got None"),
    ("kda", dict(cu_seqlens=[0, 1, 2]), "cu_seqlens must be a tensor, got list"),
    ("gdn", dict(a=torch.zeros(3, 4)), r"a must have the 8 numbers of \[1, 2, 4\], got \[3, 4\]"),
    ("gdn", dict(beta=0.5), "beta must be 1.0 to run on kda_ops"),
    ("gdn", dict(threshold=10.0), "threshold must be 20.0"),
    ("gdn", dict(inplace_final_state=False), "inplace_final_state must be True"),
    ("gdn", dict(is_kda=True), "is_kda must be False"),
    ("gdn", dict(ssm_state_indices=None), "ssm_state_indices must be a tensor, got None"),
    ("gdn", dict(initial_state=None), "initial_state must be a tensor, got None"),
]


@pytest.mark.parametrize(
    "variant, changed, reason", WRONG_DECODE, ids=[f"{v}-{[*c][0]}" for v, c, _ in WRONG_DECODE]
)
def test_a_wrong_decode_is_refused_before_it_writes(variant, changed, reason):
    refused(variant, changed, reason)


@pytest.mark.parametrize(
    "changed, reason",
    [
        (dict(raw_g=torch.zeros(2, K)), r"raw_g must have the 64 numbers of \[2, 1, 2, 16\]"),
        (dict(raw_beta=None), "raw_beta must be a tensor, got None"),
        (
            dict(out=torch.zeros(2, 1, H, V)),
            r"out must have shape \[1, B, HV, V\] = \[1, 2, 2, 8\]",
        ),
    ],
)
def test_a_wrong_packed_decode_is_refused(changed, reason):
    batch = Batch("kda", (1, 1), H)
    call = dict(mixed_qkv=batch.mixed_qkv, raw_g=batch.a[None], raw_beta=batch.b[None])
    call |= dict(A_log=batch.A_log, dt_bias=batch.dt_bias, lower_bound=None)
    call |= dict(initial_state=pool(H, torch.float32), state_indices=i32(1, 2))
    with pytest.raises((TypeError, ValueError), match=reason):
        vllm.fused_recurrent_kda_packed_decode(**(call | changed))


def test_a_slot_outside_of_the_pool_is_refused_on_a_cpu(variant):
    refused(variant, {}, "slot", slots=i32(1, SLOTS))
    refused(variant, {}, "slot", packed, slots=i32(1, SLOTS))


@pytest.mark.parametrize(
    "shape, state, reason",
    [
        ((2, 7), (3, H, V, K), r"mixed_qkv must have shape \[B, 2 H K \+ HV V\]"),
        ((1, 2, 2 * H * K + H * V), (3, H, V, K), "mixed_qkv must have shape"),
        ((2, 2 * H * K + H * V + 1), (3, H, V, K), "mixed_qkv must have shape"),
        ((2, 2 * H * K + H * V), (3, H, V * K), "initial_state must have shape"),
        ((2, 2 * H * K + H * V), (3, H, V, 0), "mixed_qkv must have shape"),
    ],
)
def test_a_projection_that_does_not_fit_the_pool_is_refused(shape, state, reason):
    batch = Batch("kda", (1, 1), H)
    with pytest.raises(ValueError, match=reason):
        vllm.fused_recurrent_kda_packed_decode(
            *(torch.zeros(shape), batch.a[None], batch.b[None], batch.A_log, batch.dt_bias, None),
            *(torch.zeros(state), i32(1, 2)),
        )


def test_a_buffer_that_is_too_small_is_refused():
    x = torch.zeros(1, 4, H, K)
    for buffer in (torch.zeros(4 * H * K - 1), torch.zeros(4, H * K)):
        with pytest.raises(ValueError, match="core_attn_out must be flat and hold 128 numbers"):
            vllm.chunk_gated_delta_rule(
                x, x, x, torch.zeros(1, 4, H), torch.zeros(1, 4, H), core_attn_out=buffer
            )


# --- behind vLLM's own names ----------------------------------------------------------------------

FILES = {
    "vllm": "__version__ = '0.33.0'\n",
    f"{KDA}": (
        "from .chunk import chunk_kda_with_fused_gate\n"
        "from .fused_recurrent import fused_recurrent_kda, fused_recurrent_kda_packed_decode\n"
    ),
    f"{KDA}.chunk": stub("chunk_kda_with_fused_gate", "chunk_kda"),
    f"{KDA}.fused_recurrent": stub("fused_recurrent_kda", "fused_recurrent_kda_packed_decode"),
    f"{GDN}": (
        "from .chunk import chunk_gated_delta_rule\n"
        "from .fused_recurrent import fused_recurrent_gated_delta_rule_packed_decode\n"
        "from .fused_sigmoid_gating import fused_sigmoid_gating_delta_rule_update\n"
    ),
    f"{GDN}.chunk": stub("chunk_gated_delta_rule"),
    f"{GDN}.fused_recurrent": stub(
        "fused_recurrent_gated_delta_rule_packed_decode", "fused_recurrent_gated_delta_rule"
    ),
    f"{GDN}.fused_sigmoid_gating": stub("fused_sigmoid_gating_delta_rule_update"),
    QWEN: (
        f"from {GDN} import chunk_gated_delta_rule as fla_chunk_gated_delta_rule\n"
        f"from {GDN} import fused_sigmoid_gating_delta_rule_update\n"
    ),
}
NAMES = [name for name in vllm.__all__ if name != "enable"]


@pytest.fixture
def stubs(monkeypatch, tmp_path):
    """Install stubs of vLLM; the adapter has replaced nothing."""
    monkeypatch.setattr(vllm, "_THEIRS", {})
    monkeypatch.setattr(engines, "_WARNED", {})
    with installed(monkeypatch, tmp_path, "vllm", FILES):
        yield


@pytest.mark.parametrize("early", [False, True], ids=["imported-later", "imported-before"])
def test_enable_replaces_the_functions_wherever_vllm_imports_them(stubs, early):
    if early:
        importlib.import_module(QWEN), importlib.import_module(KDA)
        sys.modules["vllm.absent"] = None  # an import that is forbidden
    vllm.enable()
    vllm.enable()
    qwen, kda, gdn = (importlib.import_module(name) for name in (QWEN, KDA, GDN))
    for name in NAMES:
        held = kda if "kda" in name else gdn
        assert getattr(held, name) is getattr(vllm, name)
    assert qwen.fla_chunk_gated_delta_rule is vllm.chunk_gated_delta_rule
    untouched = sys.modules[f"{GDN}.fused_recurrent"].fused_recurrent_gated_delta_rule
    assert untouched.__module__ == f"{GDN}.fused_recurrent"


def test_enable_imports_no_module_of_kernels(stubs):
    vllm.enable()
    assert not [name for name in sys.modules if name.startswith("vllm.")]


def test_a_call_that_we_refuse_runs_on_vllms_function_and_the_log_says_why(stubs, caplog):
    vllm.enable()
    gdn = importlib.import_module(GDN)
    caplog.set_level(logging.DEBUG, logger="kda_ops.compat.vllm")
    batch = Batch("gdn", (1, 1), HEADS["gdn"])
    state = pool(batch.HV, torch.float32)
    name = "fused_sigmoid_gating_delta_rule_update"
    assert getattr(gdn, name) is getattr(vllm, name)
    for _ in range(2):
        own, args, given = decode(batch, state, rows := i32(1, 2), inplace_final_state=False)
        assert own == name and not args and given["ssm_state_indices"] is rows
    assert [record.levelname for record in caplog.records] == ["WARNING", "DEBUG"]
    assert "inplace_final_state must be True" in caplog.text
    o, _ = decode(batch, state, rows)
    assert o.shape == (1, 2, batch.HV, V)

    for n in range(2 * engines.REASONS):
        decode(batch, state, rows, threshold=n)
    levels = [record.levelname for record in caplog.records]
    assert levels.count("WARNING") == engines.REASONS and levels[-1] == "DEBUG"


def test_vllms_warm_up_with_a_flat_pool_stays_on_vllms_function(stubs):
    vllm.enable()
    importlib.import_module(GDN)
    batch = Batch("gdn", (1,), HEADS["gdn"])
    flat = torch.empty(1, batch.HV * V * K)
    assert decode(batch, flat, i32([0]))[0] == "fused_sigmoid_gating_delta_rule_update"


@pytest.mark.parametrize("name", NAMES)
def test_each_function_keeps_vllms_own_for_wrong_calls(stubs, name):
    vllm.enable()
    importlib.import_module(KDA), importlib.import_module(GDN)
    assert getattr(vllm, name)(1, wrong=2) == (name, (1,), {"wrong": 2})


def test_an_error_of_vllms_own_function_is_raised_alone(stubs):
    vllm.enable()
    importlib.import_module(KDA)

    def raises(*args, **given):
        raise ValueError("vLLM's own reason")

    vllm._THEIRS["fused_recurrent_kda"] = raises
    with pytest.raises(ValueError, match="vLLM's own reason") as caught:
        vllm.fused_recurrent_kda(1)
    assert caught.value.__context__ is None


@pytest.mark.parametrize("version, known", [("0.33.0", True), ("0.33.0+cu130", True),
    ("0.33.1", False), ("0.34.0rc1", False), ("dev", False)])  # fmt: skip
def test_enable_takes_the_versions_that_it_knows(stubs, version, known):
    importlib.import_module("vllm").__version__ = version
    if known:
        vllm.enable()
        return
    want = f"knows the functions of vLLM 0.33.0, got vLLM {version}: install one of these, or unset"
    with pytest.raises(RuntimeError, match=re.escape(want)):
        vllm.enable()
    assert importlib.import_module(GDN).chunk_gated_delta_rule is not vllm.chunk_gated_delta_rule


def test_without_vllm_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ImportError, match="needs vLLM 0.33.0: pip install vllm"):
        vllm.enable()


def test_the_package_names_the_plugin_to_vllm():
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    entry = (
        '[project.entry-points."vllm.general_plugins"]\nkda_ops = "kda_ops.compat.vllm:plugin"\n'
    )
    assert entry in text


@pytest.mark.parametrize("value, on", [("1", True), ("0", False), ("", False), (None, False)])
def test_the_plugin_follows_its_variable(stubs, monkeypatch, value, on):
    monkeypatch.delenv("KDA_OPS_VLLM", raising=False)
    if value is not None:
        monkeypatch.setenv("KDA_OPS_VLLM", value)
    vllm.plugin()
    gdn = importlib.import_module(GDN)
    assert (gdn.chunk_gated_delta_rule is vllm.chunk_gated_delta_rule) == on


def test_an_amd_gpu_stays_on_vllms_kernels(stubs, monkeypatch):
    vllm.enable()
    importlib.import_module(KDA)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    batch = Batch("kda", (1,), H)
    assert decode(batch, pool(H, torch.float32), i32(1))[0] == "fused_recurrent_kda"
