"""Check that every wrong call is refused before a kernel runs, in real and fake mode.

The message names the argument.
"""

import math
import re
from contextlib import nullcontext

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import kda_ops
from kda_ops import dispatch, stages
from tests.support.calls import overload
from tests.support.cases import Case
from tests.support.fresh import python

B, T, H, HV, K, V = 2, 5, 2, 4, 8, 6
KEPT = {"A": (64, 64), "w": (64, K), "v_new": (64, V), "states": (K, V), "factors": (3, 64)}
SEQUENCES = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "cu_seqlens")
ARGUMENTS = {
    "chunk": SEQUENCES,
    "recurrent": SEQUENCES,
    "recurrent_": tuple(
        "q k v g beta state state_indices num_accepted_tokens A_log dt_bias cu_seqlens".split()
    ),
    "chunk_": tuple(
        "q k v g beta state state_indices snapshot_indices A_log dt_bias cu_seqlens "
        "has_initial_state".split()
    ),
    "gate": ("g", "A_log", "dt_bias"),
}


def arguments(variant, op):
    """Return the tensors of a legal call by name."""
    x = Case(variant, B=B, T=T, H=H, HV=HV, K=K, V=V).inputs() | {
        n: None
        for n in ("state_indices", "num_accepted_tokens", "snapshot_indices", "has_initial_state")
    }
    x["state"] = torch.randn(3, HV, K, V)
    if op in ("recurrent_", "chunk_"):
        x["state_indices"] = torch.tensor([2, 0])
    if op == "gate":
        x["A_log"] = torch.randn(HV)
        x["dt_bias"] = torch.randn(HV, K) if variant == "kda" else torch.randn(HV)
    return {n: x[n] for n in ARGUMENTS[op]}


def call(variant, op, change, fake):
    x = arguments(variant, op) | change
    kind = f"{op}.out" if "out" in x else op
    if fake:
        with FakeTensorMode(allow_non_fake_inputs=False) as mode:
            x = {n: mode.from_tensor(t) if isinstance(t, torch.Tensor) else t for n, t in x.items()}
            return overload(variant, kind)(*[x.pop(n) for n in ARGUMENTS[op]], **x)
    return overload(variant, kind)(*[x.pop(n) for n in ARGUMENTS[op]], **x)


def z(*shape, dtype=torch.float32, device="cpu"):
    return torch.zeros(shape, dtype=dtype, device=device)


def ints(*shape, dtype=torch.int64, device="cpu"):
    return torch.zeros(shape, dtype=dtype, device=device)


SHAPES = {"q": (T, H, K), "k": (T, H, K), "v": (T, HV, V)}
PACKED = {n: z(1, *s) for n, s in SHAPES.items()} | dict.fromkeys(("g", "beta", "initial_state"))
SIGMOID = {"use_beta_sigmoid_in_kernel": True}
GATED = {"use_gate_in_kernel": True, "A_log": z(HV)}
DOUBLE = {n: z(B, *s).double() for n, s in SHAPES.items()}
ELSEWHERE = r"must be on cpu, where q is, got meta: move it there\."

FLOATING = "must be float16, bfloat16, float32 or float64, got"

EVERY = "chunk recurrent recurrent_ chunk_"
POOLS = "recurrent_ chunk_"
PAIR = "chunk recurrent_"
# A legal tensor of each name: which operators take it, the tensor, what the call needs besides.
GIVEN = {
    "g": ("kda:chunk", z(B, T, HV, K), {}),
    "beta": ("chunk", z(B, T, HV), {}),
    "A_log": ("chunk", z(HV), GATED),
    "dt_bias": ("kda:chunk", z(HV, K), GATED),
    "initial_state": ("chunk recurrent", z(B, HV, K, V), {}),
    "state": (POOLS, z(3, HV, K, V), {}),
    "cu_seqlens": ("chunk", ints(2), PACKED),
    "state_indices": (POOLS, ints(2), {}),
    "num_accepted_tokens": ("recurrent_", ints(2), {"state_indices": ints(2, 5)}),
    "snapshot_indices": ("chunk_", ints(2, 1), {}),
    "has_initial_state": ("chunk_", z(2, dtype=torch.bool), {}),
}


def of_another(dtype, said, names):
    """Return rows in which one of the names has another dtype."""
    for name in names:
        ops, x, rest = GIVEN[name]
        yield ops, rest | {name: x.to(dtype)}, f"^{name} {said} {dtype}"


# (operators, what is changed in a legal call, words of the ValueError)
VALUES = [
    # shapes of q, k, v
    (EVERY, {"q": z(B, T, K)}, r"^q must have 4 dimensions \[B, T, H, K\], got shape \[2, 5, 8\]"),
    (EVERY, {"k": z(B, T, H, 9)}, r"^k must have .* = \[2, 5, 2, 8\], got \[2, 5, 2, 9\] \(as q"),
    ("chunk", {"k": z(B, T, H)}, "^k must have shape"),
    ("chunk", {"k": z(B, T, HV, K)}, "^k must have shape"),
    (
        PAIR,
        {"v": z(B, 6, HV, V)},
        r"^v must have .* = \[2, 5, HV, V\], .* of q, got \[2, 6, 4, 6\]",
    ),
    ("chunk", {"v": z(B + 1, T, HV, V)}, "^v must have shape"),
    ("chunk", {"v": z(B, T, HV)}, "^v must have shape"),
    (EVERY, {"v": z(B, T, 3, V)}, r"^HV must be a multiple .* HV = 3 \(v\) and H = 2 \(q\)"),
    ("chunk", {"q": z(B, T, 0, K), "k": z(B, T, 0, K)}, "^HV must be a multiple of H"),
    (PAIR, {n: z(B, T, H, 257) for n in "qk"}, "^K, .* of q and k, .* between 1 and 256, got 257"),
    ("chunk", {n: z(B, T, H, 0) for n in "qk"}, "must be between 1 and 256, got 0"),
    # g and beta
    (EVERY, {"g": z(B, T, 1)}, r"^g must have .*HV(, K)?\] = \[2, 5, 4(, 8)?\], got \[2, 5, 1\]"),
    ("kda:chunk kda:recurrent_", {"g": z(B, T, HV)}, "^g must have shape .*call the gdn operator"),
    ("gdn:chunk gdn:recurrent_", {"g": z(B, T, HV, K)}, "^g must .*call the kda operator"),
    (EVERY, {"beta": z(B, T, H)}, r"^beta must have .*HV\] = \[2, 5, 4\], got \[2, 5, 2\]"),
    ("chunk", {"beta": z(B, T, HV, 1)}, "^beta must have shape"),
    (PAIR, SIGMOID | {"beta": None}, "^beta must be given with use_beta_sigmoid_in_kernel=True"),
    (PAIR, {"allow_neg_eigval": True}, "^allow_neg_eigval=True .* use_beta_sigmoid_in_kernel=True"),
    # the gate
    (EVERY, {"use_gate_in_kernel": True}, "^A_log must be given to activate the gate"),
    ("chunk", GATED | {"g": None}, "^g must be given with use_gate_in_kernel=True"),
    (PAIR, GATED | {"A_log": z(H)}, r"^A_log must have shape \[HV\] = \[4\], got \[2\]"),
    ("chunk", GATED | {"A_log": z(1, 1, HV, 1)}, "^A_log must have shape"),
    ("kda:chunk", GATED | {"dt_bias": z(HV)}, r"^dt_bias must .* \[4, 8\], got \[4\] \(flat .*too"),
    ("kda:recurrent_", GATED | {"dt_bias": z(K, HV)}, r"^dt_bias must have shape \[HV, K\]"),
    ("gdn:chunk", GATED | {"dt_bias": z(HV, K)}, r"^dt_bias must have .* \[4\], got \[4, 8\]"),
    (PAIR, {"A_log": z(HV)}, "^A_log is a parameter .* needs use_gate_in_kernel=True"),
    (
        "kda:chunk",
        {"dt_bias": z(HV, K)},
        "^dt_bias is a parameter .* needs use_gate_in_kernel=True",
    ),
    *(
        (PAIR, GATED | {"lower_bound": bound}, "^lower_bound must be a finite number below 0")
        for bound in (0.0, 1.0, -math.inf, math.nan)
    ),
    (EVERY, {"lower_bound": -5.0}, "^lower_bound must be None without .*, got -5.0: pass raw"),
    (
        "chunk",
        {"lower_bound": 5.0, "safe_gate": True},
        "^lower_bound must be a finite number below",
    ),
    *((EVERY, {"scale": x}, "^scale must be a finite number") for x in (math.inf, math.nan)),
    # packing
    (EVERY, {"cu_seqlens": ints(2)}, "^cu_seqlens packs .* needs B == 1, got B = 2: reshape"),
    (
        "chunk recurrent",
        {n: x if x is None else x[:0] for n, x in PACKED.items()} | {"cu_seqlens": ints(1)},
        r"^cu_seqlens packs .* got B = 0: pass q and .* as \[1, 0, \.\.\.\], and offsets of 0\.$",
    ),
    *(
        ("chunk", PACKED | {"cu_seqlens": x}, rf"^cu_seqlens .*shape \[N \+ 1\], got {said}")
        for x, said in ((ints(1, 2), r"\[1, 2\]"), (ints(0), r"\[0\]"))
    ),
    # states
    (
        "chunk recurrent",
        {"initial_state": z(B, HV, V, K)},
        r"^initial_state must .*, K, V\] = \[2, 4, 8, 6\] .*=False\), got \[2, 4, 6, 8\]: "
        r"that is the \[V, K\] layout, pass transpose_state_layout=True",
    ),
    (
        "chunk recurrent",
        {"transpose_state_layout": True},
        r"^initial_state must .*, V, K\] = \[2, 4, 6, 8\] .*=True\), got \[2, 4, 8, 6\]: "
        r"that is the \[K, V\] layout, pass transpose_state_layout=False",
    ),
    (POOLS, {"state": z(3, HV, V, K)}, r"^state must .* = \[3, 4, 8, 6\] .* the \[V, K\] layout"),
    (
        "chunk recurrent",
        {"initial_state": z(3, HV, K, V)},
        r"^initial_state must have shape \[N, HV, K, V\] = \[2, 4, 8, 6\] .*got \[3, 4, 8, 6\]\.$",
    ),
    (
        "chunk",
        PACKED | {"cu_seqlens": ints(4), "initial_state": z(1, HV, K, V)},
        r"^initial_state must have shape \[N, HV, K, V\] = \[3, 4, 8, 6\]",
    ),
    ("chunk", {"initial_state": z(HV, K, V)}, "^initial_state must have shape"),
    # pools
    (POOLS, {"state": z(HV, K, V)}, r"^state must have 4 dimensions \[slots, HV, K, V\]"),
    (POOLS, {"state": z(1, HV, K, V).expand(3, HV, K, V)}, "^state must not .*itself.*: clone it"),
    (
        POOLS,
        {"state": z(5 * HV * K * V).as_strided((3, HV, K, V), (96, 48, 6, 1))},
        "^state must not overlap itself",
    ),
    (POOLS, {"state_indices": None}, r"^state must .*= \[2, 4, 8, 6\] .* got \[3, 4, 8, 6\]"),
    (POOLS, {"state_indices": ints(3)}, r"^state_indices must have shape \[N\] .*N = 2, got \[3\]"),
    ("recurrent_", {"state_indices": ints(2, 5, 1)}, "^state_indices must have shape"),
    (
        "recurrent_",
        {"state_indices": ints(2, 4)},
        r"^state_indices must name a slot for every token, .* at least T = 5, got \[2, 4\]",
    ),
    ("recurrent_", {"num_accepted_tokens": ints(2)}, "^num_accepted_tokens .* needs state_indices"),
    (
        "recurrent_",
        {"state_indices": ints(2, 5), "num_accepted_tokens": ints(3)},
        r"^num_accepted_tokens must have shape \[N\] = \[2\], got \[3\]",
    ),
    ("chunk_", {"state_indices": ints(2, 5)}, r"^state_indices must .* = \[2\], got \[2, 5\]"),
    ("chunk_", {"snapshot_indices": ints(2)}, r"^snapshot_indices must .*snapshots\] .* got \[2\]"),
    ("chunk_", {"snapshot_indices": ints(3, 1)}, "^snapshot_indices must have shape"),
    ("chunk_", {"has_initial_state": z(3).bool()}, r"^has_initial_state must .* \[2\], got \[3\]"),
    ("chunk_", {"snapshot_every": 2}, "^snapshot_every spaces .* needs snapshot_indices"),
    (
        "chunk_",
        {"snapshot_indices": ints(2, 1), "snapshot_every": 0},
        r"^snapshot_every must be at least 1 \(chunks of 64 tokens\), got 0",
    ),
    (POOLS, {"out": z(B, T, HV, 7)}, r"^out must have shape \[B, T, HV, V\] = \[2, 5, 4, 6"),
    (POOLS, {"out": z(B, 1, HV, V).expand(B, T, HV, V)}, "^out must not overlap itself"),
    # the gate operator
    ("kda:gate", {"g": z(B, T, HV)}, r"^g must have shape \[B, T, HV, K\], got \[2, 5, 4\]"),
    ("gdn:gate", {"g": z(B, T, HV, K)}, r"^g must have shape \[B, T, HV\], got \[2, 5, 4, 8\]"),
    ("gate", {"A_log": None}, "^A_log must be given to activate the gate"),
    ("gate", {"A_log": z(HV + 1)}, r"^A_log must have shape \[HV\] = \[4\], got \[5\]"),
    ("gate", {"dt_bias": z(HV + 1)}, "^dt_bias must have shape"),
    ("gate", {"lower_bound": 0.5}, "^lower_bound must be a finite number below 0"),
]
# the same, for a TypeError
TYPES = [
    *(
        row
        for dtype in (torch.int32, torch.int64, torch.bool, torch.float8_e5m2)
        for row in of_another(dtype, FLOATING, ("g", "beta", "A_log", "dt_bias"))
    ),
    *(
        row
        for dtype in (torch.float32, torch.int16)
        for row in of_another(
            dtype,
            "must be int32 or int64, got",
            [n for n, x in GIVEN.items() if x[1].dtype is torch.int64],
        )
    ),
    *(
        (ops, rest | {name: x.to("meta")}, f"^{name} {ELSEWHERE}")
        for name, (ops, x, rest) in GIVEN.items()
    ),
    # what is no tensor, which schemas let through
    *((EVERY, {n: None}, f"^{n} must be a tensor, got None") for n in "qkv"),
    (POOLS, {"state": None}, "^state must be a tensor, the pool .* got None"),
    (
        PAIR,
        {n: x.long() for n, x in DOUBLE.items()},
        r"^q must be float16, .* float64, got .*int64",
    ),
    (EVERY, {"k": z(B, T, H, K).bfloat16()}, "^q, k and v must share one dtype, got .*: cast"),
    ("chunk", {"v": z(B, T, HV, V).half()}, "^q, k and v must share one dtype"),
    (PAIR, {"k": z(B, T, H, K).to("meta")}, "^q, k and v must .*cpu, meta and cpu: move"),
    (PAIR, {"v": z(B, T, HV, V).to("meta")}, "^q, k and v must .*cpu, cpu and meta: move"),
    (
        "chunk recurrent",
        {"initial_state": z(B, HV, K, V).bfloat16()},
        r"^initial_state must be torch.float32, got torch.bfloat16 \(states are kept in "
        r"torch.float32 for torch.float32 inputs\)",
    ),
    ("chunk", DOUBLE, "^initial_state must be torch.float64, got torch.float32"),
    (POOLS, DOUBLE, "^state must be torch.float64, got torch.float32"),
    (POOLS, {"state": z(3, HV, K, V).half()}, "^state must be float32 or bfloat16, got .*float16"),
    ("chunk_", {"has_initial_state": ints(2)}, "^has_initial_state must be bool, .*int64: compare"),
    (POOLS, {"out": z(B, T, HV, V).bfloat16()}, "^out must have the dtype of v, .*32, got .*16"),
    (POOLS, {"out": z(B, T, HV, V).to("meta")}, "^out must have the device of v, cpu, got"),
    ("kda:gate", {"g": ints(B, T, HV, K)}, "^g must be float16, bfloat16, float32 or float64"),
    ("gate", {"A_log": z(HV).to("meta")}, r"^A_log must be on cpu, where g is, got meta: move it"),
]


def rows():
    for number, (where, change, words) in enumerate((*VALUES, *TYPES)):
        for place in where.split():
            *variants, op = place.split(":")
            for variant in variants or ("kda", "gdn"):
                name = f"{number}-{variant}-{op}-{'-'.join(change)}"
                error = ValueError if number < len(VALUES) else TypeError
                yield pytest.param(variant, op, change, error, words, id=name)


@pytest.mark.quick
@pytest.mark.parametrize("fake", (False, True), ids=("real", "fake"))
@pytest.mark.parametrize("variant,op,change,error,words", [*rows()])
def test_a_wrong_call_is_refused_before_anything_is_written(
    variant, op, change, error, words, fake
):
    written = {"state": change.get("state", arguments(variant, op).get("state"))}
    written = {n: x for n, x in (written | change).items() if n in ("state", "out")}
    written = {n: x for n, x in written.items() if x is not None and not x.is_meta}
    before = {n: x.clone() for n, x in written.items()}
    with pytest.raises(error, match=words):
        call(variant, op, change | written, fake)
    assert all(torch.equal(x, before[n]) for n, x in written.items())


def takes_memory(x):
    """Return a tensor for o in the memory of another tensor, and one that takes its place."""
    count = B * T * HV * V
    bytes = torch.zeros(max(4 * count, x.nbytes) + 8, dtype=torch.uint8)
    bytes = bytes[-bytes.data_ptr() % 8 :]
    other = bytes[: x.nbytes].view(x.dtype).view(x.shape).copy_(x)
    return bytes[: 4 * count].view(torch.float32).view(B, T, HV, V), other


@pytest.mark.quick
@pytest.mark.parametrize("op", ("recurrent_", "chunk_"))
def test_an_out_that_shares_memory_with_another_tensor_is_refused(variant, op):
    gates = {"use_gate_in_kernel": True, "lower_bound": -1.0, "A_log": torch.zeros(HV)}
    gates["dt_bias"] = torch.zeros((HV, K) if variant == "kda" else HV)
    tables = {"state_indices": torch.zeros(2, 5, dtype=torch.int64) + torch.tensor([[2], [0]])}
    tables["num_accepted_tokens"] = torch.ones(2, dtype=torch.int64)
    if op == "chunk_":
        tables = {"snapshot_indices": -torch.ones(2, 1, dtype=torch.int64)}
        tables["has_initial_state"] = torch.tensor([True, False])
    given = arguments(variant, op) | gates | tables
    tested = [n for n in ARGUMENTS[op] if given[n] is not None]
    assert {*ARGUMENTS[op]} - {*tested} == {"cu_seqlens"}
    call(variant, op, given | {"out": z(B, T, HV, V)}, False)
    for name in tested:
        out, shared = takes_memory(given[name])
        state = shared if name == "state" else given["state"]
        before, kept = state.clone(), out.view(torch.int32).clone()
        with pytest.raises(ValueError, match=f"^out must not share memory with {name}, because"):
            call(variant, op, given | {name: shared, "state": state, "out": out}, False)
        assert torch.equal(state, before) and torch.equal(out.view(torch.int32), kept)


@pytest.mark.quick
@pytest.mark.parametrize("op", ("recurrent_", "chunk_"))
def test_out_may_lie_between_the_rows_of_an_input(op):
    """As columns of one buffer, in front of those of v or behind them, or as rows of it."""
    x = arguments("kda", op)
    want = call("kda", op, x | {"state": x["state"].clone()}, False)
    v = x["v"]
    for columns in (slice(0, V), slice(V, 2 * V)):
        buffer = torch.zeros(B, T, HV, 2 * V)
        out = buffer[..., columns]
        own = buffer[..., V:] if columns.start == 0 else buffer[..., :V]
        call("kda", op, x | {"v": own.copy_(v), "state": x["state"].clone(), "out": out}, False)
        assert torch.equal(out, want) and torch.equal(own, v)
    buffer = torch.zeros(B, 2, T, HV, V)
    own, out = buffer.unbind(1)
    call("kda", op, x | {"v": own.copy_(v), "state": x["state"].clone(), "out": out}, False)
    assert torch.equal(out, want) and torch.equal(own, v)
    wide = torch.zeros(2 * B * T * HV * V + V)
    strides = (T * HV * 2 * V, HV * 2 * V, 2 * V, 1)
    out, own = (wide.as_strided((B, T, HV, V), strides, first) for first in (0, V + 1))
    with pytest.raises(ValueError, match="^out must not share memory with v"):  # of the next row
        call("kda", op, x | {"v": own, "out": out}, False)
    with pytest.raises(ValueError, match="^out must not share memory with v"):  # by one element
        rest = torch.zeros(2 * B * T * HV * V).as_strided((B, T, HV, V), (T * HV * V, HV * V, V, 1))
        own = torch.as_strided(rest, rest.shape, rest.stride(), rest.numel() - 1)
        call("kda", op, x | {"v": own, "out": rest}, False)


@pytest.mark.parametrize("op", ARGUMENTS)
def test_the_call_that_the_table_changes_is_legal(variant, op):
    real, fake = call(variant, op, {}, False), call(variant, op, {}, True)
    for a, b in zip(
        (real,) if isinstance(real, torch.Tensor) else real,
        (fake,) if isinstance(fake, torch.Tensor) else fake,
    ):
        assert a.shape == b.shape and a.dtype == b.dtype and a.stride() == b.stride()


def test_another_gpu_is_another_device():
    with FakeTensorMode():
        q, k, v = (torch.empty(1, 5, 2, 8, device="cuda:0") for _ in range(3))
        with pytest.raises(TypeError, match="^g must be on cuda:0, where q is, got cuda:1"):
            kda_ops.chunk_kda(q, k, v, torch.empty(1, 5, 2, 8, device="cuda:1"), None)


def test_a_device_without_kernels_is_named():
    with pytest.raises(TypeError, match="^q must be on a CPU or CUDA device, got xpu"):
        dispatch.backend_name(torch.device("xpu"))


def test_a_pool_of_any_strides_without_overlap_is_accepted():
    x = arguments("kda", "recurrent_")
    whole = torch.zeros(7, 2 * HV, K + 3, 2 * V)
    none = arguments("kda", "recurrent_") | {
        n: x[n][:0] for n in ("q", "k", "v", "g", "beta", "state_indices")
    }
    overload("kda", "recurrent_")(
        *(none | {"state": torch.zeros(1, 1, 1, 1).expand(0, HV, K, V)}).values()
    )
    for state in (
        whole[::2, ::2, :K, ::2],
        whole[1:4, HV:, 3:, V:],
        torch.zeros(V, K, 3, HV).permute(2, 3, 1, 0),
        torch.zeros(3, HV, V, K).mT,
    ):
        overload("kda", "recurrent_")(*(x | {"state": state}).values())
        assert state[0].any()


def test_None_for_a_tensor_is_refused_under_autocast_and_vmap_too(variant):
    x = arguments(variant, "chunk")
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(TypeError, match="^k must be a tensor, got None"),
    ):
        overload(variant, "chunk")(*(x | {"k": None}).values())
    with pytest.raises(TypeError, match="^v must be a tensor, got None"):
        torch.func.vmap(
            lambda q: overload(variant, "chunk")(*(x | {"q": q, "v": None}).values())[0]
        )(torch.stack([x["q"]] * 2))
    with pytest.raises(
        ValueError,
        match=(
            r"^beta must have at least 3 dimensions besides those that vmap maps, got shape \[2, "
            r"2, 5\] in all"
        ),
    ):
        torch.func.vmap(lambda b: overload(variant, "chunk")(*(x | {"beta": b}).values())[0])(
            z(2, B, T)
        )
    y = arguments(variant, "gate")
    with pytest.raises(TypeError, match="^g must be a tensor, got None"):
        torch.func.vmap(lambda a: overload(variant, "gate")(None, a, None))(
            torch.stack([y["A_log"]] * 2)
        )


@pytest.mark.parametrize(
    "flag", ("safe_gate", "safe_beta", "safe_keys", "disable_recompute", "invariant")
)
def test_a_flag_that_means_nothing_for_recurrent_is_unknown_there(flag):
    with pytest.raises(TypeError, match="unexpected keyword"):
        kda_ops.recurrent_kda(*arguments("kda", "recurrent").values(), **{flag: True})


# Calls of the functions in `test_values_are_checked_...`, and the words of their errors.
CHECKED = {
    "run(cu=[1, 5])": (
        r"cu_seqlens must start at 0, never decrease and end at or before T = 5, got \[1, 5\]"
    ),
    "run(cu=[0, 4, 3])": "cu_seqlens must start at 0",
    "run(cu=[0, 6])": "cu_seqlens must start at 0",
    "run(g=0.5)": (
        "g must be at most 0 .*, got a maximum of 0.5: pass raw logits with use_gate_in_kernel=True"
    ),
    "run(g=math.nan)": "g must be at most 0",
    "run(g=-6.0, safe_gate=True)": (
        r"g must stay in \[-5.0, 0\] as safe_gate=True promises, got a minimum of -6.0"
    ),
    "run(g=-2.0, safe_gate=True, lower_bound=-1.0)": r"g must stay in \[-1.0, 0\]",
    "run(beta=2.1)": (
        r"beta must lie in \[0, 2\], got 2.09\d* to 2.09\d*: pass raw logits with "
        r"use_beta_sigmoid_in_kernel=True"
    ),
    "run(beta=-0.1)": r"beta must lie in \[0, 2\]",
    "run(beta=math.nan)": r"beta must lie in \[0, 2\]",
    "run(beta=1.5, safe_beta=True)": (
        r"beta must lie in \[0, 1\] as safe_beta=True promises, got 1.5 to 1.5: drop the "
        r"flag, or pass raw logits with use_beta_sigmoid_in_kernel=True"
    ),
    "run(beta=-0.1, safe_beta=True)": r"beta must lie in \[0, 1\] as",
    "run(beta=math.nan, safe_beta=True)": r"beta must lie in \[0, 1\] as",
    "run(length=1.02, safe_keys=True)": (
        r"k must have keys of at most unit length as safe_keys=True promises, got a length"
        r" of 1.0\d*: drop the flag, or set use_qk_l2norm_in_kernel=True"
    ),
    "run(length=math.nan, safe_keys=True)": "k must have keys of at most unit",
    "prefill([[1, 2]], length=2.0, safe_keys=True)": "k must have keys of at most unit length",
    "pool([-1, 2], g=[-1.0, math.nan])": "g must be at most 0",
    "packed([-1, 1], [0, 4, 5], g=[5.0, 5.0, 5.0, 5.0, 5.0])": "g must be at most 0",
}
LEGAL = [
    "run(cu=[0, 5])",
    "run(cu=[0, 0, 3])",
    "packed([[0, 1], [-1, -1]], [0, 2, 5])",
    "run(g=-math.inf)",
    "run(g=-5.0, safe_gate=True)",
    "run(beta=2.0)",
    "run(beta=0.0, safe_beta=True)",
    "run(beta=1.0, safe_beta=True)",
    "run(beta=5.0, safe_beta=True, use_beta_sigmoid_in_kernel=True)",  # logits
    "run(length=1.0, safe_keys=True)",
    "run(length=1.0, narrow=True, safe_keys=True)",  # rounded to 16 bits
    "run(length=0.0, safe_keys=True)",
    "run(length=9.0, safe_keys=True, use_qk_l2norm_in_kernel=True)",
    "prefill([[1, 2]], length=9.0, slot=-1, safe_keys=True, use_qk_l2norm_in_kernel=False)",
    "run(beta=0.0)",
    "run(beta=5.0, use_beta_sigmoid_in_kernel=True)",
    "pool([2, 0])",
    "pool([-1, -1])",
    "pool([[0, 1], [2, -1]], [1, 2])",
    "pool([[1, 0], [2, 0]], [2, 2])",  # two samples of one prompt
    "pool([[1, 2], [-1, 1]], [1, 1])",  # a sequence without a slot to read writes nothing
    "packed([[1, 0], [1, 2]], [0, 0, 2])",  # nor does a sequence without tokens
    "packed([[1, 2], [2, 1]], [0, 1, 2])",  # a column past the tokens is not used
    "packed([[0, 1]], [0, 2])",
    "prefill([[1, -1]])",
    "prefill([[0, 0]], slot=-1)",  # a sequence without a slot leaves no snapshots
    "prefill([[1, 2, 0]])",  # nor does a sequence of 130 tokens leave a third one
    "prefill([[1, 0]], every=2)",
    "run(cu=[0, 3], g=[-1.0, -1.0, -1.0, math.nan, 5.0])",
    "run(g=0.5, A_log=torch.zeros(2), use_gate_in_kernel=True)",  # logits
    "pool([[0, 1], [-1, -1]], [1, 0])",  # nor what a row without a slot accepted
    "packed([[0, 1], [2, -1]], [0, 2, 3])",
    "pool([2, -1], g=[-1.0, math.nan])",  # of a row without a slot nothing is read
    "packed([-1, 1], [0, 4, 5], g=[5.0, 5.0, 5.0, 5.0, -1.0])",
    "torch.compile(run, backend='eager')(cu=[0, 5])",
]


def test_values_are_checked_when_the_environment_asks():
    """Run all lines of `CHECKED` in one fresh process with KDA_OPS_CHECK=1; each must raise."""
    script = """
        import math, sys, torch, kda_ops
        def of_length(x, length):
            return x if length is None else torch.nn.functional.normalize(x, dim=-1) * length
        def run(cu=None, g=None, beta=None, length=None, narrow=False, **flags):
            q, k, v = (torch.randn(1, 5, 2, 4) for _ in range(3))
            q, k, v = (x.bfloat16() if narrow else x for x in (q, of_length(k, length), v))
            beta = None if beta is None else torch.full((1, 5, 2), beta)
            g = None if g is None else torch.tensor(g).reshape(1, -1, 1, 1).expand(1, 5, 2, 4)
            cu = None if cu is None else torch.tensor(cu)
            return kda_ops.chunk_kda(q, k, v, g, beta, cu_seqlens=cu, **flags)
        def pool(slots, accepted=None, g=None):
            q, k, v = (torch.randn(2, 1, 2, 4) for _ in range(3))
            accepted = None if accepted is None else torch.tensor(accepted)
            g = None if g is None else torch.tensor(g).reshape(2, 1, 1, 1).expand(2, 1, 2, 4)
            pool, slots = torch.zeros(3, 2, 4, 4), torch.tensor(slots)
            return kda_ops.recurrent_kda_(q, k, v, g, None, pool, slots, accepted)
        def packed(slots, cu, g=None):
            q, k, v = (torch.randn(1, 5, 2, 4) for _ in range(3))
            g = None if g is None else torch.tensor(g).reshape(1, 5, 1, 1).expand(1, 5, 2, 4)
            pool, slots, cu = torch.zeros(3, 2, 4, 4), torch.tensor(slots), torch.tensor(cu)
            return kda_ops.recurrent_kda_(q, k, v, g, None, pool, slots, cu_seqlens=cu)
        def prefill(snapshots, slot=0, every=1, length=None, **flags):
            q, k, v = (torch.randn(1, 130, 2, 4) for _ in range(3))
            k = of_length(k, length)
            pool = torch.zeros(3, 2, 4, 4)
            indices = torch.tensor([slot]), torch.tensor(snapshots)
            flags = dict(use_qk_l2norm_in_kernel=length is None) | flags
            flags["snapshot_every"] = every
            return kda_ops.chunk_kda_(q, k, v, None, None, pool, *indices, **flags)
        for line in sys.argv[1:]:
            try:
                eval(line)
                print("passed")
            except ValueError as error:
                print(error)
    """

    lines = [*CHECKED, *LEGAL]
    out = python(script, *lines, KDA_OPS_CHECK="1").stdout.splitlines()
    for (line, words), said in zip(CHECKED.items(), out):
        assert re.search(words, said), f"{line}: {said}"
    assert out[len(CHECKED) :] == ["passed"] * len(LEGAL)
    unchecked = python(script, *lines[:7], KDA_OPS_CHECK="0").stdout.splitlines()
    # which the CPU backend reads anyway
    assert all("cu_seqlens must start at 0" in said for said in unchecked[:3])
    assert unchecked[3:] == ["passed"] * 4, "values were read on the host without being asked to"


@pytest.mark.quick
@pytest.mark.parametrize("packed", (False, True))
@pytest.mark.parametrize("fake", (False, True))
@pytest.mark.parametrize("name", KEPT)
def test_what_another_call_kept_is_refused(name, variant, fake, packed):
    """A kernel would read past its end."""
    q, v = torch.randn(1, 70, H, K), torch.randn(1, 70, HV, V)
    offsets = torch.tensor([0, 3, 70]) if packed else None
    chunks, empty = 3 if packed else 2, torch.empty(0)
    rest = (7, 64) if (variant, name) == ("gdn", "factors") else KEPT[name]

    def backward(shape, device="cpu"):
        kept = {n: empty for n in stages.KEPT} | {name: torch.zeros(shape, device=device)}
        inputs = q, q, v, None, None, None, None, None, offsets
        overload(variant, "chunk_bwd")(v, None, *kept.values(), *inputs, need=7)

    with FakeTensorMode(allow_non_fake_inputs=True) if fake else nullcontext():
        if fake:
            backward((chunks, HV, *rest))
        for wrong in ((chunks - 1, HV), (chunks + 1, HV), (chunks, H)):
            with pytest.raises(ValueError, match=rf"^{name} must have shape \[{chunks}, {HV}, "):
                backward((*wrong, *rest))
        with pytest.raises(TypeError, match=f"^{name} must be on cpu, where q is, got meta"):
            backward((chunks, HV, *rest), "meta")
