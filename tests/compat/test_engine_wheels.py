"""Our functions have the signatures of vLLM's and SGLang's, and compute what theirs compute.

The functions come from the engines' wheels (``KDA_OPS_ENGINES``). They run under Triton's
interpreter (``TRITON_INTERPRET=1``), or on a GPU with ``KDA_OPS_TEST_DEVICE=cuda``.
"""

from __future__ import annotations

import importlib
import inspect
import os
from functools import partial

import pytest
import torch

from kda_ops.compat import engines, sglang, vllm
from tests.support import engine_wheels
from tests.support.engines import HEADS, POOLS, Batch, H, K, V, assert_near, i32, installed, pool
from tests.support.target import TARGET

pytestmark = pytest.mark.nightly
needs_triton = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1" and TARGET.device.type != "cuda",
    reason="the engines' functions need TRITON_INTERPRET=1, or KDA_OPS_TEST_DEVICE=cuda",
)
VLLM, SGLANG = vllm.VERSIONS[0], sglang.VERSIONS[0]

# --- signatures -----------------------------------------------------------------------------------


@pytest.mark.parametrize("module", vllm._OURS)
def test_signatures_are_vllms(module):
    theirs = engine_wheels.text(engine_wheels.wheel("vllm", VLLM), module)
    for name in vllm._OURS[module]:
        ours = engine_wheels.parameters(inspect.getsource(vllm), name)
        want = engine_wheels.parameters(theirs, name)
        assert ours == want, name


@pytest.mark.parametrize("target", sglang._METHODS)
def test_signatures_are_sglangs(target):
    """Each parameter of ours is SGLang's, in its place, or arrives among its further keywords."""
    module, kernel, name = target.rsplit(".", 2)
    theirs = engine_wheels.text(engine_wheels.wheel("sglang", SGLANG), module)
    want = engine_wheels.parameters(theirs, name, of=kernel)
    ours = engine_wheels.parameters(inspect.getsource(sglang), name)
    assert want[0] == ("self", None) and ours[0] == ("operator", None)
    place = want.index(("*", None))
    assert ours[1 : place + 1] == want[1 : place + 1]  # positions, and where keywords begin
    missing = {row[0]: row for row in want[place:]}.keys() - {row[0] for row in ours}
    assert not missing, f"{name}: {missing}"


# --- results --------------------------------------------------------------------------------------


def on_device(call):
    """Move the tensors of a call. Views keep their strides, because the engines check them."""

    def moved(x):
        if not isinstance(x, torch.Tensor):
            return x
        whole = x if x._base is None else x._base
        return whole.to(TARGET.device).as_strided(x.shape, x.stride(), x.storage_offset())

    return {n: moved(x) for n, x in call.items()}


def assert_alike(ours, theirs, call, batch, name, dtype):
    """Call both sides, each with a pool of its own as argument `name`; compare o and the pools."""
    outs, pools = [], []
    for run in (ours, theirs):
        mine = on_device(call | {name: pool(batch.HV, dtype)})
        if "out" in mine:
            mine["out"] = mine["out"].clone()
        result = run(**mine)
        outs.append((result[0] if isinstance(result, tuple) else result).cpu())
        pools.append(mine[name].cpu())
    assert_near(outs[0], outs[1].double(), "o")
    assert_near(pools[0], pools[1].double(), "the pool")
    assert not pools[1].equal(pool(batch.HV, dtype)) and outs[1].any()


@pytest.fixture
def their_vllm(monkeypatch, tmp_path):
    engine_wheels.one_configuration(monkeypatch)

    def function(name):
        module = next(m for m, functions in vllm._OURS.items() if name in functions)
        return getattr(importlib.import_module(module), name)

    with installed(monkeypatch, tmp_path, "vllm", engine_wheels.package("vllm", VLLM)):
        yield function


@pytest.fixture
def their_sglang(monkeypatch, tmp_path):
    engine_wheels.one_configuration(monkeypatch)
    monkeypatch.setattr(sglang, "_HOOKED", set())
    monkeypatch.setattr(sglang, "DEVICES", ("cuda", "cpu"))
    monkeypatch.setattr(engines, "_WARNED", {})

    def kernel(variant):
        kind = {"kda": "TritonKDAKernel", "gdn": "TritonGDNKernel"}[variant]
        return getattr(importlib.import_module(f"{sglang._KERNELS}.{variant}_triton"), kind)()

    with installed(monkeypatch, tmp_path, "sglang", engine_wheels.package("sglang", SGLANG)):
        sglang.enable()
        yield kernel


VARIANTS = [("kda", None), ("kda", -5.0), ("gdn", None)]


@needs_triton
@pytest.mark.parametrize("dtype", POOLS, ids=str)
@pytest.mark.parametrize("variant, bound", VARIANTS)
def test_drafts_and_null_slots_give_vllms_results(their_vllm, variant, bound, dtype):
    batch = Batch(variant, (3, 2, 1), HEADS[variant], bound=bound)
    call = dict(zip("qkv", batch.qkv), A_log=batch.A_log, dt_bias=batch.dt_bias)
    call |= dict(cu_seqlens=batch.starts, num_accepted_tokens=i32(2, 1, 1))
    call |= dict(ssm_state_indices=i32([1, 2, 3], [4, 5, 0], [7, 0, 0]))
    if variant == "kda":
        name = "fused_recurrent_kda"
        call |= dict(raw_g=batch.a[None], raw_beta=batch.b[None], lower_bound=bound)
    else:
        name = "fused_sigmoid_gating_delta_rule_update"
        call |= dict(a=batch.a, b=batch.b, use_qk_l2norm_in_kernel=True)
    assert_alike(getattr(vllm, name), their_vllm(name), call, batch, "initial_state", dtype)


@needs_triton
@pytest.mark.parametrize("dtype", POOLS, ids=str)
@pytest.mark.parametrize("variant, bound", VARIANTS)
def test_packed_decode_gives_vllms_results(their_vllm, variant, bound, dtype):
    batch = Batch(variant, (1, 1, 1), HEADS[variant], bound=bound)
    call = dict(mixed_qkv=batch.mixed_qkv, A_log=batch.A_log, dt_bias=batch.dt_bias)
    slots = i32(8, 0, 2)
    if variant == "kda":
        name = "fused_recurrent_kda_packed_decode"
        call |= dict(raw_g=batch.a[None], raw_beta=batch.b[None], lower_bound=bound)
        call |= dict(state_indices=slots)
    else:
        name = "fused_recurrent_gated_delta_rule_packed_decode"
        # vLLM rounds beta to the dtype of b
        call |= dict(a=batch.a, b=batch.b.float(), scale=K**-0.5, use_qk_l2norm_in_kernel=True)
        call |= dict(ssm_state_indices=slots, out=torch.empty(3, 1, batch.HV, V).bfloat16())
    assert_alike(getattr(vllm, name), their_vllm(name), call, batch, "initial_state", dtype)


@needs_triton
@pytest.mark.parametrize("variant, bound", VARIANTS)
def test_prefill_is_as_close_to_the_recurrence_as_vllms(their_vllm, variant, bound):
    batch = Batch(variant, (70, 1, 5), HEADS[variant], torch.float16, bound=bound)
    states = pool(batch.HV, torch.float32)[:3].contiguous()
    states[0] = 0
    call = dict(zip("qkv", batch.qkv), initial_state=states, output_final_state=True)
    call |= dict(cu_seqlens=batch.starts, use_qk_l2norm_in_kernel=True)
    if variant == "kda":
        name = "chunk_kda_with_fused_gate"
        call |= dict(raw_g=batch.a[None], raw_beta=batch.b[None], A_log=batch.A_log)
        call |= dict(g_bias=batch.dt_bias, lower_bound=bound)
    else:
        name = "chunk_gated_delta_rule"
        g, beta = batch.gates()
        call |= dict(g=g.float()[None, ..., 0].contiguous(), beta=beta.float()[None])
    ours, theirs = (f(**on_device(call)) for f in (getattr(vllm, name), their_vllm(name)))
    assert_as_close(batch, states, ours, theirs)


def assert_as_close(batch, states, ours, theirs):
    """Check o and the last states of both sides, whose sequences start from `states`."""
    exact = [batch.along(n, state) for n, state in enumerate(states)]
    want = torch.cat([o for o, _ in exact])[None], torch.stack([s[-1] for _, s in exact])
    for what, x, y, ref in zip(("o", "states"), ours, theirs, want):
        assert x.dtype == y.dtype and x.shape == y.shape == ref.shape
        error, allowed = ((t.cpu().double() - ref).abs().max() for t in (x, y))
        # one rounding of theirs and of ours
        assert error <= 2 * (allowed + torch.finfo(torch.float16).eps * ref.abs().max()), what
        assert allowed < 0.02 * ref.abs().max(), f"{what}: their error is {allowed}"


@needs_triton
@pytest.mark.parametrize("dtype", POOLS, ids=str)
@pytest.mark.parametrize("name", ["decode", "packed_decode"])
@pytest.mark.parametrize("variant, bound", VARIANTS)
def test_hooked_methods_give_sglangs_results(their_sglang, caplog, variant, bound, name, dtype):
    batch = Batch(variant, (1, 1, 1), HEADS[variant], bound=bound)
    call = dict(A_log=batch.A_log, dt_bias=batch.dt_bias, cache_indices=i32(8, 0, 2))
    call |= dict(a=batch.a.flatten(1), b=batch.b.float())
    if bound is not None:
        call |= dict(lower_bound=bound)
    if name == "decode":
        call |= dict(zip("qkv", batch.qkv), query_start_loc=batch.starts)
    else:
        call |= dict(mixed_qkv=batch.mixed_qkv, scale=K**-0.5)
        call |= dict(num_v_heads=batch.HV, head_v_dim=V)
    kernel = their_sglang(variant)
    ours = getattr(kernel, name)
    own = partial(getattr(type(kernel), name).__wrapped__, kernel)
    assert_alike(ours, own, call, batch, "ssm_states", dtype)
    assert not caplog.records  # ours was ours


@needs_triton
@pytest.mark.parametrize("dtype", POOLS, ids=str)
@pytest.mark.parametrize("variant, bound", VARIANTS)
def test_chains_of_drafts_give_sglangs_results(their_sglang, caplog, variant, bound, dtype):
    batch = Batch(variant, (4, 4), HEADS[variant], bound=bound)
    call = dict(zip("qkv", batch.qkv), A_log=batch.A_log, dt_bias=batch.dt_bias)
    call |= dict(a=batch.a.flatten(1), b=batch.b.float(), cache_indices=i32(6, 6))
    call |= dict(ssm_states=pool(batch.HV, dtype), query_start_loc=batch.starts)
    call |= dict(intermediate_state_indices=i32(1, 0), cache_steps=4, retrieve_parent_token=None)
    call |= dict(lower_bound=bound) if variant == "kda" else {}
    kernel = their_sglang(variant)
    found = []
    for run in (kernel.target_verify, partial(type(kernel).target_verify.__wrapped__, kernel)):
        drafts = torch.zeros(2, 4, batch.HV, V, K, dtype=dtype)
        mine = on_device(call | dict(intermediate_states_buffer=drafts))
        found.append((run(**mine).cpu(), mine["intermediate_states_buffer"].cpu()))
    (o, states), (want_o, want) = found
    if dtype is torch.float32:  # SGLang rounds a bf16 state after each draft
        assert_near(o, want_o.double(), "o")
        assert_near(states, want.double(), "the pool for drafts")
    assert torch.allclose(states.float(), want.float(), rtol=0.05, atol=0.05)
    assert not caplog.records  # ours was ours


@needs_triton
@pytest.mark.parametrize("raw", [True, False])
@pytest.mark.parametrize("bound", [None, -5.0])
def test_extend_is_as_close_to_the_recurrence_as_sglangs(their_sglang, caplog, bound, raw):
    batch = Batch("kda", (70, 1, 5), H, torch.float16, bound=bound)
    slots, before = [4, 0, 7], pool(H, torch.float32)
    call = dict(zip("qkv", batch.qkv), cache_indices=i32(*slots), query_start_loc=batch.starts)
    call |= dict(beta_is_raw=raw, lower_bound=bound)
    if raw:
        call |= dict(g=batch.a[None], beta=batch.b[None].contiguous(), A_log=batch.A_log)
        call |= dict(dt_bias=batch.dt_bias.flatten())
    else:
        g, beta = batch.gates()
        call |= dict(g=g[None].float(), beta=beta[None].float())
    kernel = their_sglang("kda")
    call |= dict(track_chunk_idx=i32(1, -1, 0), track_state=torch.zeros(3, H, V, K))
    call |= dict(return_intermediate_states=True)
    results, tracked = [], []
    for run in (kernel.extend, partial(type(kernel).extend.__wrapped__, kernel)):
        mine = on_device(call | dict(ssm_states=pool(H, torch.float32).contiguous()))
        mine["track_state"] = mine["track_state"].clone()
        # SGLang overwrites v
        o, _ = run(**{n: x.clone() if n == "v" else x for n, x in mine.items()})
        results.append((o, mine["ssm_states"][slots]))
        tracked.append(mine["track_state"])
    torch.testing.assert_close(*tracked, rtol=0.0, atol=2e-3)  # operands are fp16, states about 3
    assert not caplog.records  # ours was ours
    assert_as_close(batch, before[slots], *results)
