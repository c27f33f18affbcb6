"""SGLang's methods run on our operators: against the recurrence in float64, and behind stubs.

SGLang is not needed. The stubs have its module paths, its version and the form of its hooks.
"""

from __future__ import annotations

import importlib
import logging
import re
import sys
from pathlib import Path

import pytest
import torch

from kda_ops import functional
from kda_ops.compat import engines, sglang
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
)

OPERATORS = {"kda": functional.recurrent_kda_, "gdn": functional.recurrent_gdn_}


def decode_arguments(batch, state, slots):
    call = dict(zip("qkv", batch.qkv), a=batch.a.flatten(1), b=batch.b[None])
    call |= dict(A_log=batch.A_log, dt_bias=batch.dt_bias, query_start_loc=batch.starts)
    call |= dict(ssm_states=state, cache_indices=slots, layer_id=3)
    return call | (dict(lower_bound=batch.bound) if batch.variant == "kda" else {})


def packed_arguments(batch, state, slots):
    call = dict(mixed_qkv=batch.mixed_qkv, a=batch.a.flatten(1), b=batch.b[:, None])
    call |= dict(A_log=batch.A_log[None, None, :, None], dt_bias=batch.dt_bias, scale=K**-0.5)
    call |= dict(ssm_states=state, cache_indices=slots, num_v_heads=batch.HV, head_v_dim=V)
    return call | (dict(lower_bound=batch.bound) if batch.variant == "kda" else {})


def extend_arguments(batch, state, slots, raw=True):
    call = dict(zip("qkv", batch.qkv), ssm_states=state, cache_indices=slots)
    call |= dict(query_start_loc=batch.starts, beta_is_raw=raw, is_spec_decode=False)
    if raw:
        gates = dict(A_log=batch.A_log[None, None, :, None], dt_bias=batch.dt_bias.flatten())
        return call | gates | dict(g=batch.a[None], beta=batch.b[None], lower_bound=batch.bound)
    g, beta = batch.gates()
    return call | dict(g=g[None].float(), beta=beta[None].float(), lower_bound=batch.bound)


ROWS, STEPS = 5, 4  # of the pool for drafts


def verify_arguments(batch, state, slots):
    drafts = torch.full((ROWS, STEPS, *state.shape[1:]), torch.nan, dtype=state.dtype)
    call = decode_arguments(batch, state, slots) | dict(intermediate_states_buffer=drafts)
    call |= dict(intermediate_state_indices=torch.arange(len(slots)).flip(0).int())
    return call | dict(cache_steps=STEPS, retrieve_parent_token=None)


def assert_verified(batch, call, before, o, slots):
    """Check that drafts start from the pool, which stays, and that their states go to the rows."""
    assert call["ssm_states"].equal(before)
    drafts = call["intermediate_states_buffer"]
    left = drafts.isnan().flatten(2).all(2)
    for n, (slot, row) in enumerate(zip(slots, call["intermediate_state_indices"].tolist())):
        span = batch.span(n)
        if slot < 0:
            assert not o[span].any() and left[row].all()
            continue
        values, states = batch.along(n, before[slot])
        assert_near(o[span], values, f"o of sequence {n}")
        assert_near(drafts[row, : len(span)], torch.stack(states), f"drafts of sequence {n}")
        assert left[row, len(span) :].all()


ARGUMENTS = {
    "decode": decode_arguments,
    "packed_decode": packed_arguments,
    "extend": extend_arguments,
    "target_verify": verify_arguments,
}


# --- the functions --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", POOLS, ids=str)
@pytest.mark.parametrize("name", ["decode", "packed_decode"])
@pytest.mark.parametrize("variant, bound", [("kda", None), ("kda", -5.0), ("gdn", None)])
def test_decode_reads_and_writes_the_slots_of_its_sequences(variant, bound, name, dtype):
    batch = Batch(variant, (1, 1, 1), HEADS[variant], bound=bound)
    state = pool(batch.HV, dtype)
    before = state.clone()
    call = ARGUMENTS[name](batch, state, i32(0, -1, 7))
    o = getattr(sglang, name)(OPERATORS[variant], **call)
    assert o.shape == (1, 3, batch.HV, V) and o.dtype == batch.dtype
    assert_decoded(batch, before, state, o[0], [[0], [-1], [7]], [0, -1, 7], name, null=-1)


@pytest.mark.parametrize("dtype", POOLS, ids=str)
@pytest.mark.parametrize("variant, bound", [("kda", None), ("kda", -5.0), ("gdn", None)])
def test_chains_of_drafts_go_to_a_pool_of_their_own(variant, bound, dtype):
    batch, slots = Batch(variant, (4, 1, 3), HEADS[variant], bound=bound), [6, -1, 6]
    before = pool(batch.HV, dtype)
    call = verify_arguments(batch, before.clone(), i32(*slots))
    o = sglang.target_verify(OPERATORS[variant], **call)
    assert_verified(batch, call, before, o[0], slots)


@pytest.mark.parametrize("dtype", POOLS, ids=str)
@pytest.mark.parametrize("bound", [None, -5.0])
@pytest.mark.parametrize("raw", [True, False])
def test_extend_mixes_prompts_and_decoding_requests_in_place(raw, bound, dtype):
    lengths = (70, 1, 3, 0, 5)
    batch = Batch("kda", lengths, H, torch.float32, tail=2, bound=bound)
    state = pool(H, dtype)
    state[4] = 0  # a fresh request
    before = state.clone()
    slots = [4, 0, -1, 2, 8]
    o = sglang.extend(functional.chunk_kda_, **extend_arguments(batch, state, i32(*slots), raw))
    rows = [[slot] for slot in slots]
    assert_decoded(batch, before, state, o[0], rows, slots, "extend", null=-1)
    assert not o[0, sum(lengths) :].any()


@pytest.mark.parametrize("dtype", POOLS, ids=str)
def test_extend_tracks_states_inside_of_prompts(dtype):
    batch = Batch("kda", (150, 70, 200, 65, 64, 3), H, torch.float32, bound=-5.0)
    slots, chunks = [4, 0, -1, 2, 8, 3], [2, 0, 1, -1, 1, 1]
    before, tracked = pool(H, dtype), torch.full((7, H, V, K), torch.nan)
    states, want = before.clone(), before.clone()
    call = extend_arguments(batch, states, i32(*slots))
    words = dict(track_state=tracked, track_chunk_idx=i32(*chunks), return_intermediate_states=True)
    o, none = sglang.extend(functional.chunk_kda_, **call, **words)
    assert none is None
    plain = call | dict(ssm_states=want)
    assert torch.equal(o, sglang.extend(functional.chunk_kda_, **plain))
    assert torch.equal(states, want)
    aligned = dict(return_intermediate_states=True, track_ssm_h_src=i32())
    o, none = sglang.extend(functional.chunk_kda_, **call | dict(ssm_states=want), **aligned)
    assert none is None and not torch.equal(states, want)
    for n, (slot, count) in enumerate(zip(slots, chunks)):
        a = int(batch.starts[n])
        span, state = slice(a, a + 64 * count), before.float()
        if slot < 0 or count < 0 or span.stop > int(batch.starts[n + 1]):
            assert tracked[n].isnan().all()
            continue
        words = {m: x[:, span] for m, x in call.items() if m in ("q", "k", "v", "g", "beta")}
        words |= dict(query_start_loc=i32(0, 64 * count), cache_indices=i32(slot))
        sglang.extend(functional.chunk_kda_, **call | words | dict(ssm_states=state))
        assert torch.equal(tracked[n], state[slot])
    assert tracked[6:].isnan().all()
    call = extend_arguments(Batch("kda", (), H, torch.float32, tail=2), states, i32())
    o = sglang.extend(functional.chunk_kda_, **call, track_state=tracked, track_chunk_idx=i32())
    assert not o.any()


@pytest.mark.parametrize("variant, name", [("kda", "decode"), ("gdn", "decode"), ("kda", "extend")])
def test_heads_split_over_ranks_give_the_heads_of_one_rank(variant, name):
    batch = Batch(variant, (1, 1), HEADS[variant], torch.float32)
    run = functional.chunk_kda_ if name == "extend" else OPERATORS[variant]
    for rank in range(H):
        part = batch.on_rank(rank)
        h = slice(rank * part.HV, (rank + 1) * part.HV)
        whole, state = pool(batch.HV, torch.float32), pool(part.HV, torch.float32)
        whole[:, h] = state
        o, want = (
            getattr(sglang, name)(run, **ARGUMENTS[name](x, s, i32(3, 5)))
            for x, s in ((part, state), (batch, whole))
        )
        assert_near(o, want[:, :, h].double(), f"o of rank {rank}")
        assert_near(state, whole[:, h].double(), f"states of rank {rank}")


# --- wrong calls ----------------------------------------------------------------------------------

WRONG = [
    ("decode", dict(q=torch.zeros(1, 2, H, K)), "q, k and v must share one dtype"),
    ("decode", dict(v=None), "v must be a tensor, got None"),
    ("decode", dict(a=torch.zeros(2, K)), r"a must have the 64 numbers of \[1, 2, 2, 16\]"),
    ("decode", dict(b=None), "b must be a tensor, got None"),
    ("decode", dict(ssm_states=torch.zeros(SLOTS, H, V, K).half()), "float32 or bfloat16"),
    ("decode", dict(ssm_states=torch.zeros(SLOTS, H, K, V)), "state must have shape"),
    ("decode", dict(cache_indices=i32(1, SLOTS)), "slot"),
    ("packed_decode", dict(num_v_heads=1), "ssm_states must have 1 heads of 8 values"),
    ("packed_decode", dict(replayssm_d=torch.zeros(1)), "replayssm_d must be None to run on kda"),
    ("packed_decode", dict(mixed_qkv=torch.zeros(2, 81)), "mixed_qkv must have shape"),
    (
        "target_verify",
        dict(retrieve_parent_token=i32([-1], [-1])),
        "retrieve_parent_token must not",
    ),
    ("target_verify", dict(cache_ring=True), "cache_ring must not be set to run on kda_ops"),
    (
        "target_verify",
        dict(intermediate_states_buffer=torch.zeros(2, H, 3, V, K).transpose(1, 2)),
        "intermediate_states_buffer must be contiguous",
    ),
    ("extend", dict(return_intermediate_states=True), "return_intermediate_states must be"),
    ("extend", dict(track_state=torch.zeros(2, H, V, K)), "track_chunk_idx must be given"),
    (
        "extend",
        dict(track_state=torch.zeros(2, H, V, K).half(), track_chunk_idx=i32(0, 0)),
        "track_state must be float32",
    ),
    *(
        ("extend", dict(track_state=torch.zeros(2, H, V, K), track_chunk_idx=i32(0, 0)) | more, why)
        for more, why in (
            (dict(track_state=torch.zeros(1, H, V, K)), r"got torch.float32 \[1, 2, 8, 16\]"),
            (dict(track_chunk_idx=i32(0)), r"track_chunk_idx must .* \[N\] = \[2\], got \[1\]"),
            (dict(cache_indices=torch.zeros(2)), "int32 or int64"),
            (dict(cache_indices=i32(1, SLOTS)), "below the number of slots, 9, got 9"),
            (dict(cache_indices=i32(1, 1)), "distinct slots"),
        )
    ),
    ("extend", dict(cache_indices=torch.zeros(2)), "int32 or int64"),
]


@pytest.mark.parametrize(
    "name, changed, reason", WRONG, ids=[f"{name}-{[*c][0]}" for name, c, _ in WRONG]
)
def test_a_wrong_call_is_refused_before_it_writes(name, changed, reason):
    batch = Batch("kda", (1, 1), H)
    state = pool(H, torch.float32)
    before, run = state.clone(), functional.recurrent_kda_
    call = ARGUMENTS[name](batch, state, i32(1, 2)) | changed
    with pytest.raises((TypeError, ValueError), match=reason):
        getattr(sglang, name)(functional.chunk_kda_ if name == "extend" else run, **call)
    assert state.equal(before)


# --- behind SGLang's own methods ------------------------------------------------------------------

LINEAR = "sglang.srt.layers.attention.linear.kernels"
REGISTRY = "sglang.srt.plugins.hook_registry"


def kernel(name: str) -> str:
    methods = "".join(
        f"    def {m}(self, *args, **given):\n        return {m!r}, args, given\n\n"
        for m in ("decode", "packed_decode", "extend", "target_verify")
    )
    return f"class {name}:\n{methods}"


FILES = {
    "sglang": "__version__ = '0.5.23'\n",
    f"{LINEAR}.kda_triton": kernel("TritonKDAKernel"),
    f"{LINEAR}.gdn_triton": kernel("TritonGDNKernel"),
    REGISTRY: """
import enum
import pkgutil

HookType = enum.Enum("HookType", "AROUND REPLACE")


class HookRegistry:
    registered, applied = [], set()

    @classmethod
    def register(cls, target, hook, kind):
        assert kind is HookType.AROUND
        cls.registered.append((target, hook))

    @classmethod
    def apply_hooks(cls):
        for target, hook in cls.registered:
            if target not in cls.applied:
                cls.applied.add(target)
                holder, name = target.rsplit(".", 1)
                holder = pkgutil.resolve_name(holder)
                own = getattr(holder, name)
                setattr(holder, name, lambda *a, own=own, hook=hook, **k: hook(own, *a, **k))
""",
}


@pytest.fixture
def stubs(monkeypatch, tmp_path):
    """Install stubs of SGLang, which run our functions on a CPU; nothing is hooked."""
    monkeypatch.setattr(sglang, "_HOOKED", set())
    monkeypatch.setattr(sglang, "DEVICES", ("cuda", "cpu"))
    monkeypatch.setattr(engines, "_WARNED", {})
    with installed(monkeypatch, tmp_path, "sglang", FILES):
        yield


def kernels():
    kda = importlib.import_module(f"{LINEAR}.kda_triton").TritonKDAKernel()
    return {"kda": kda, "gdn": importlib.import_module(f"{LINEAR}.gdn_triton").TritonGDNKernel()}


HOOKED = [
    *(("kda", name) for name in ("decode", "packed_decode", "extend", "target_verify")),
    *(("gdn", name) for name in ("decode", "packed_decode", "target_verify")),
]


@pytest.mark.parametrize("variant, name", HOOKED)
def test_enable_runs_each_method_on_its_operator(stubs, variant, name):
    sglang.enable()
    sglang.enable()
    batch = Batch(variant, (1, 1), HEADS[variant])
    state = pool(batch.HV, torch.float32)
    before = state.clone()
    call = ARGUMENTS[name](batch, state, i32(1, 2))
    o = getattr(kernels()[variant], name)(**call)
    if name == "target_verify":
        assert_verified(batch, call, before, o[0], [1, 2])
    else:
        assert_decoded(batch, before, state, o[0], [[1], [2]], [1, 2], name, null=-1)


@pytest.mark.parametrize("variant, name", HOOKED)
def test_a_call_that_we_refuse_runs_on_sglangs_method_and_the_log_says_why(
    stubs, caplog, variant, name
):
    sglang.enable()
    caplog.set_level(logging.DEBUG, logger="kda_ops.compat.sglang")
    batch = Batch(variant, (1, 1), HEADS[variant])
    state = pool(batch.HV, torch.float32).half()
    call = ARGUMENTS[name](batch, state, i32(1, 2))
    for _ in range(2):
        own, args, given = getattr(kernels()[variant], name)(**call)
        assert own == name and not args and given == call
    assert [record.levelname for record in caplog.records] == ["WARNING", "DEBUG"]
    kind = {"kda": "TritonKDAKernel", "gdn": "TritonGDNKernel"}[variant]
    assert f"kda_ops.compat.sglang.{kind}.{name} runs on the engine's kernels" in caplog.text


def test_methods_that_we_lack_stay_as_they_are(stubs):
    sglang.enable()
    assert kernels()["gdn"].extend(1, x=2) == ("extend", (1,), {"x": 2})


def test_a_cpu_stays_on_sglangs_kernels(stubs, monkeypatch, caplog):
    monkeypatch.setattr(sglang, "DEVICES", ("cuda",))
    sglang.enable()
    batch = Batch("kda", (1,), H)
    call = decode_arguments(batch, pool(H, torch.float32), i32(1))
    assert kernels()["kda"].decode(**call)[0] == "decode" and not caplog.records


def test_the_plugin_leaves_applying_to_sglang(stubs, monkeypatch):
    monkeypatch.setenv("KDA_OPS_SGLANG", "1")
    sglang.plugin()
    registry = importlib.import_module(REGISTRY).HookRegistry
    assert len(registry.registered) == len(HOOKED) and not registry.applied
    assert f"{LINEAR}.kda_triton" not in sys.modules
    sglang.enable()
    assert len(registry.registered) == len(registry.applied) == len(HOOKED)


@pytest.mark.parametrize("value", ["0", "", None])
def test_the_plugin_does_nothing_without_its_variable(stubs, monkeypatch, value):
    monkeypatch.delenv("KDA_OPS_SGLANG", raising=False)
    if value is not None:
        monkeypatch.setenv("KDA_OPS_SGLANG", value)
    sglang.plugin()
    assert not importlib.import_module(REGISTRY).HookRegistry.registered


@pytest.mark.parametrize("version", ["0.5.22", "0.6.0", "0.0.0.dev0"])
def test_enable_refuses_a_version_that_it_does_not_know(stubs, version):
    importlib.import_module("sglang").__version__ = version
    want = f"knows the functions of SGLang 0.5.23, got SGLang {version}: install one of these"
    with pytest.raises(RuntimeError, match=re.escape(want)):
        sglang.enable()
    assert not importlib.import_module(REGISTRY).HookRegistry.registered


def test_without_sglang_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sglang", None)
    with pytest.raises(ImportError, match="needs SGLang 0.5.23: pip install sglang"):
        sglang.enable()


def test_the_package_names_the_plugin_to_sglang():
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    entry = (
        '[project.entry-points."sglang.srt.plugins"]\nkda_ops = "kda_ops.compat.sglang:plugin"\n'
    )
    assert entry in text
