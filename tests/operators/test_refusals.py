"""Check errors for what schemas accept silently or the dispatcher refuses unclearly."""

import contextlib
import inspect
import warnings
from itertools import product
from unittest.mock import patch

import pytest
import torch
from torch._subclasses import FakeTensorMode

import kda_ops
import kda_ops.distributed
from kda_ops import checks
from kda_ops.nn import GatedRMSNorm
from tests.operators.test_layer_operators import LEGAL, LEGAL_NORM
from tests.operators.test_validation import ARGUMENTS, arguments
from tests.support.calls import overload
from tests.support.cases import TOKENS, on
from tests.support.fresh import python
from tests.support.target import TARGET

VARIANTS = ("kda", "gdn")
IN_PLACE = ("recurrent_", "chunk_")
FUNCTIONS = [
    getattr(module, name)
    for module, names in (
        (kda_ops, kda_ops.__all__),
        (kda_ops.distributed, ("chunk_kda", "chunk_gdn")),
    )
    for name in names
    if inspect.isfunction(getattr(module, name)) and name != "cut_length"  # takes no tensors
]


# of one rank; a call that is refused asks nothing of a group
PLAN = kda_ops.distributed.ContextPlan("", 0, 1, (5,), None)


def group_of(function):
    """Return what a public function needs besides the arguments of `legal`."""
    return {"group": PLAN} if "group" in inspect.signature(function).parameters else {}


_TAIL = {"tail": torch.zeros(2, 3, 6), "tail_indices": torch.tensor([1, 0])}
LAYER = {
    "short_conv": {n: t for n, t in LEGAL.items() if t is not None},
    "short_conv_": {n: LEGAL[n] for n in ("x", "weight", "bias")} | _TAIL,
    "gated_rms_norm": LEGAL_NORM,
}


def legal(function):
    """Return a legal call of a public function by name; a call across ranks lacks its group."""
    name = function.__name__
    if name in LAYER:
        return dict(LAYER[name])
    variant = "kda" if "kda" in name else "gdn"
    op = name.replace(f"_{variant}", "").replace(f"{variant}_", "")
    return arguments(variant, op)


def takes(name):
    return [f for f in FUNCTIONS if name in inspect.signature(f).parameters]


def named(function):
    return f"{function.__module__}.{function.__name__}"


@pytest.mark.parametrize("name,hint", (("scale", "multiply o by it"), ("lower_bound", "constant")))
def test_a_number_whose_gradient_would_be_lost_is_refused(name, hint):
    number = torch.tensor(-1.0, requires_grad=True)
    for function in takes(name):
        with pytest.raises(TypeError, match=f"^{name} must be a number, got a tensor that.*{hint}"):
            function(**legal(function), **group_of(function), **{name: number})
        for value in ("half", 1j, [1.0], torch.ones(2), torch.ones(2).numpy()):
            with pytest.raises(TypeError, match=f"^{name} must be a number, got"):
                function(**legal(function), **group_of(function), **{name: value})
    q = arguments("kda", "chunk") | {"initial_state": None}
    want = kda_ops.chunk_kda(**q, scale=-1.0)[0]
    assert torch.equal(kda_ops.chunk_kda(**q, scale=number.detach())[0], want)


@pytest.mark.parametrize("function", FUNCTIONS, ids=named)
def test_a_number_in_place_of_a_tensor_is_refused(function):
    """FLA's functions take scale where these take A_log."""
    x = legal(function)
    names = list(x)
    place = min(5, len(names) - 1)
    before = [x[n] for n in names[:place]]
    hint = ".*scale=0.5" if "scale" in inspect.signature(function).parameters else ""
    with pytest.raises(TypeError, match=rf"^{names[place]} must be a tensor.*got float{hint}"):
        function(*before, 0.5, **group_of(function))
    for name in names:
        with pytest.raises(TypeError, match=f"^{name} must be a tensor.*, got ndarray"):
            function(**(x | group_of(function) | {name: torch.zeros(2).numpy()}))


@pytest.mark.parametrize("value", (None, "yes"))
@pytest.mark.parametrize("function", FUNCTIONS, ids=named)
def test_a_flag_is_true_or_false(function, value):
    flags = [p.name for p in inspect.signature(function).parameters.values() if p.default is False]
    for flag in flags:
        with pytest.raises(TypeError, match=f"^{flag} must be True or False, got {value!r}"):
            function(**legal(function), **group_of(function), **{flag: value})


@pytest.mark.parametrize(
    "error, words, values",
    (
        (ValueError, "must fit in 64 bits, got", (2**63, 2**70, -(2**70))),
        (TypeError, "must be a whole number, got", (None, 1.5, "two", True)),
    ),
)
def test_the_distance_of_snapshots_is_a_whole_number_of_64_bits(error, words, values):
    for function, value in product(takes("snapshot_every"), values):
        with pytest.raises(error, match=f"^snapshot_every {words}"):
            function(**legal(function), snapshot_every=value)


def odd(kind, x):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if kind == "nested":
            return torch.nested.nested_tensor([x[0], x[0]])
        if kind == "jagged":
            return torch.nested.nested_tensor([x[0], x[0]], layout=torch.jagged)
        if kind == "quantised":
            return torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8)
        if kind == "mkldnn":
            return x.float().to_mkldnn()
        if kind == "csr":
            return torch.eye(3).to_sparse_csr()
        return x.to_sparse()


KINDS = ("sparse", "csr", "quantised", "mkldnn", "nested", "jagged")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("op", ARGUMENTS)
@torch.no_grad()
def test_a_tensor_without_strides_is_named(variant, op, kind):
    """Each argument of each operator; `torch.ops` and the functions alike, for one calls the
    other.
    """
    x = arguments(variant, op)
    pool = x["state"].clone() if op in IN_PLACE else None
    for name in x:
        if name in ("A_log", "dt_bias") and op != "gate":
            x |= {"A_log": torch.zeros(4)}
        given = x[name] if x[name] is not None else torch.zeros(2, 2)
        if kind == "jagged" and given.dim() < 2:
            continue
        call = x | {name: odd(kind, given)}
        with pytest.raises(
            TypeError, match=f"^{name} must be a dense tensor, got .*: (call|pass) "
        ):
            overload(variant, op)(*call.values())
    assert pool is None or torch.equal(pool, x["state"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "function, name", [(f, n) for f in ("short_conv", "gated_rms_norm") for n in LAYER[f]]
)
def test_a_tensor_without_strides_is_named_by_the_operators_of_layers(function, name, kind):
    call = LAYER[function]
    if kind == "jagged" and call[name].dim() < 2:
        pytest.skip("no such tensor")
    call = call | {name: odd(kind, call[name])}
    words = f"^{name} must be a dense tensor, got .*: (call|pass its values)"
    with pytest.raises(TypeError, match=words):
        getattr(kda_ops, function)(**call)
    if function == "gated_rms_norm" and name != "weight":
        del call["weight"]
        with pytest.raises(TypeError, match=words):
            GatedRMSNorm(6)(**call)


@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_without_strides_is_named_where_a_gradient_is_wanted(kind):
    x = arguments("kda", "chunk")
    x["v"] = x["v"].requires_grad_()
    with pytest.raises(TypeError, match="^k must be a dense tensor, got"):
        kda_ops.chunk_kda(**(x | {"k": odd(kind, x["k"])}))


def slots(*rows, dtype=torch.int64, **rest):
    return {"state_indices": torch.tensor(rows, dtype=dtype)} | rest


COUNT = {"state_indices": torch.tensor([[1] + [-1] * 4, [2, 0, -1, -1, -1]])}
SLOTS = [
    ("recurrent_", slots(0, 3), "state_indices must be below the number of slots, 3, got 3"),
    ("chunk_", slots(0, 3), "state_indices must be below the number of slots, 3, got 3"),
    ("recurrent_", slots([0] + [-1] * 4, [2, 1, 9, -1, -1]), "state_indices must .* got 9"),
    ("recurrent_", slots(1, 1), "state_indices must name distinct slots, .*: copy what sequences"),
    (
        "recurrent_",
        slots([0] * 5, [1, 0, 2, 2, 2]),
        "state_indices must not let two sequences write one slot, .*: give each sequence slots",
    ),
    (
        "recurrent_",
        slots([0] * 5 + [2], [2] * 5 + [-1], num_accepted_tokens=torch.tensor([6, 1])),
        "state_indices must .* slot 2, which sequence 1 writes and sequence 0 reads: let both",
    ),
    ("chunk_", slots(1, 1, dtype=torch.int32), "state_indices must name distinct slots"),
    (
        "chunk_",
        {"snapshot_indices": torch.tensor([[-1], [5]])},
        "state_indices and snapshot_indices must be below the number of slots, 3, got 5",
    ),
    (
        "chunk_",
        {"snapshot_indices": torch.tensor([[2], [-1]])},
        "state_indices and snapshot_indices must name distinct slots",
    ),
    (
        "chunk_",
        slots(2, -1, snapshot_indices=torch.tensor([[7], [1]])),
        "state_indices and snapshot_indices must be below the number of slots, 3, got 7",
    ),
    *(
        (
            "recurrent_",
            COUNT | {"num_accepted_tokens": torch.tensor(counts)},
            "num_accepted_tokens must lie between 1 and S = 5, the columns of state_indices",
        )
        for counts in ([1, 0], [-1, 1], [6, 1])
    ),
    (
        "recurrent_",
        slots([0, 1], [2, -1], cu_seqlens=torch.tensor([0, 1, 5])),
        "state_indices must name a slot for every token, .* S at least 4, the longest sequence",
    ),
]


NULL = [
    ("recurrent_", {"null_slot": -2}, {}, "null_slot must lie between -1 and"),
    ("chunk_", {"null_slot": 2**31}, {}, "null_slot must lie between -1 and"),
    ("recurrent_", {"null_slot": 0}, {"state_indices": None}, "null_slot must be -1 without state"),
    ("chunk_", {"null_slot": 0}, {"state_indices": None}, "null_slot must be -1 without state"),
    ("chunk_", {"null_slot": 0}, slots(1, 1), "state_indices must name"),
    (
        "recurrent_",
        {"null_slot": 0},
        slots([0] * 5, [1, 0, 2, 9, 2]),
        "state_indices must .* got 9",
    ),
]


SLOT = torch.zeros(2, dtype=torch.int32)
SOURCES = [
    ({"source_indices": None}, ValueError, "source_indices must name the slot of source"),
    ({"source": None}, ValueError, "source_indices must be None without source"),
    (
        {"state_indices": SLOT[:, None].expand(2, 5), "num_accepted_tokens": SLOT + 1},
        ValueError,
        "source must be None with num_accepted_tokens",
    ),
    ({"source_indices": SLOT[:1]}, ValueError, r"source_indices must have shape \[N\]"),
    ({"source_indices": SLOT.float()}, TypeError, "source_indices must be int32 or int64"),
    ({"source_indices": SLOT + 3}, ValueError, "source_indices must be below .* slots, 3, got 3"),
    ({"source": torch.zeros(3, 1, 1, 1)}, ValueError, "source must have shape"),
    ({"source": lambda state: state[1:]}, ValueError, "state must not share memory with source"),
    ({"source": torch.Tensor.bfloat16}, TypeError, "source must be torch.float32, the dtype of"),
]


@pytest.mark.parametrize("change, kind, words", SOURCES)
def test_wrong_second_pools_are_refused(variant, change, kind, words):
    x = on(arguments(variant, "recurrent_"), TARGET.device) | {"num_accepted_tokens": None}
    before = x["state"].clone()
    x |= {"source": before.clone(), "source_indices": SLOT} | change
    if callable(x["source"]):
        x["source"] = x["source"](x["state"])
    x = on(x, TARGET.device)
    with patch.object(checks, "CHECK_VALUES", True), pytest.raises(kind, match=f"^{words}"):
        overload(variant, "recurrent_")(*x.values())
    assert torch.equal(x["state"], before)


@pytest.mark.parametrize("op, flags, change, words", NULL)
def test_wrong_null_slots_and_tables_with_one_are_refused(variant, op, flags, change, words):
    x = on(arguments(variant, op) | change, TARGET.device)
    if "state_indices" in change and change["state_indices"] is None:
        x["state"] = x["state"][:2]
    before = x["state"].clone()
    with patch.object(checks, "CHECK_VALUES", True), pytest.raises(ValueError, match=f"^{words}"):
        overload(variant, op)(*x.values(), **flags)
    assert torch.equal(x["state"], before)


def test_tables_may_name_a_null_slot_many_times_and_count_anything_for_it(variant):
    x = arguments(variant, "recurrent_")
    x["state_indices"] = torch.zeros(2, 5, dtype=torch.int32)
    x["num_accepted_tokens"] = torch.tensor([0, 99])
    x, before = on(x, TARGET.device), x["state"].clone()
    with patch.object(checks, "CHECK_VALUES", True):
        o = overload(variant, "recurrent_")(*x.values(), null_slot=0)
    assert not o.any() and torch.equal(x["state"].cpu(), before)


@pytest.mark.skipif(TARGET.device.type != "cpu", reason="the values live on the device")
@pytest.mark.parametrize("op,change,words", SLOTS)
def test_wrong_slots_and_counts_are_refused_before_the_pool_is_written(variant, op, change, words):
    x = arguments(variant, op)
    if op == "chunk_":  # long enough for a snapshot
        x |= {n: x[n].repeat_interleave(14, 1) for n in TOKENS}
    if "cu_seqlens" in change:
        x |= {n: x[n][:1] for n in TOKENS}
    before = x["state"].clone()
    for _ in range(2):
        with pytest.raises(ValueError, match=f"^{words}"):
            overload(variant, op)(*(x | change).values())
        assert torch.equal(x["state"], before)


@pytest.mark.parametrize("backend", ("reference", "triton"))
def test_every_backend_on_a_cpu_refuses_wrong_slots_at_every_call(backend):
    pytest.importorskip("triton")
    script = """
import torch, kda_ops
q = torch.randn(2, 1, 1, 16)
pool, right, wrong = torch.zeros(3, 1, 16, 16), torch.tensor([0, 1]), torch.tensor([2, 3])
kda_ops.recurrent_kda_(q, q, q, None, None, pool, right)
before = pool.clone()
for _ in range(2):
    try:
        kda_ops.recurrent_kda_(q, q, q, None, None, pool, wrong)
        print("passed")
    except ValueError as error:
        print(error)
two, accepted = torch.tensor([[0, 1], [2, -1]]), torch.tensor([1, 2])
kda_ops.recurrent_kda_(q, q, q, None, None, pool, two, accepted)
before = pool.clone()
try:
    kda_ops.recurrent_kda_(q, q, q, None, None, pool, two, accepted + 1)
    print("passed")
except ValueError as error:
    print(error)
assert torch.equal(pool, before)
"""
    out = python(script, KDA_OPS_CPU=backend, TRITON_INTERPRET="1")
    assert out.stdout.count("must be below the number of slots, 3, got 3") == 2, out.stderr
    assert out.stdout.count("num_accepted_tokens must lie between 1 and S = 2") == 1, out.stderr


@pytest.mark.parametrize("op", IN_PLACE)
def test_a_pool_of_inference_mode_is_refused_outside_before_it_is_written(variant, op):
    x = arguments(variant, op)
    with torch.inference_mode():
        x["state"] = x["state"].clone()
    before = x["state"].clone()
    for mode in (torch.no_grad, torch.enable_grad):
        with (
            mode(),
            pytest.raises(RuntimeError, match="^state was made under torch.inference_mode"),
        ):
            overload(variant, op)(*x.values())
        assert torch.equal(x["state"], before)
    with torch.inference_mode():
        overload(variant, op)(*x.values())
    assert not torch.equal(x["state"], before)


LAZY = {
    "negated": lambda x: torch.complex(x, -x).conj().imag,
    "zero": lambda x: torch._efficientzerotensor(x.shape),
}


@pytest.mark.bits
@pytest.mark.parametrize("kind", LAZY)
@pytest.mark.parametrize("op", IN_PLACE)
@torch.no_grad()
def test_a_state_that_is_a_lazy_view_is_refused_and_other_inputs_may_be(variant, op, kind):
    x = arguments(variant, op)
    with pytest.raises(ValueError, match="^state must be memory that can be written.*: clone it"):
        overload(variant, op)(*(x | {"state": LAZY[kind](x["state"])}).values())
    q = LAZY[kind](x["q"])
    want = overload(variant, op)(*(x | {"q": q.clone(), "state": x["state"].clone()}).values())
    assert torch.equal(overload(variant, op)(*(x | {"q": q}).values()), want)


@pytest.mark.parametrize("every", (2**62, 2**63 - 1))
def test_snapshots_may_be_spaced_as_far_as_integers_go(every):
    x = arguments("kda", "chunk_") | {"snapshot_indices": torch.tensor([[-1], [-1]])}
    kda_ops.chunk_kda_(**x, snapshot_every=every)


@pytest.mark.bits
def test_the_gate_s_bias_may_be_left_out_of_the_operator_too(variant):
    x = arguments(variant, "gate")
    g, A_log = x["g"].requires_grad_(), x["A_log"].requires_grad_()
    op = overload(variant, "gate")
    want, got = op(g, A_log, None), op(g, A_log)
    assert torch.equal(want, got)
    grads = [torch.autograd.grad(y.sum(), (g, A_log)) for y in (want, got)]
    assert all(map(torch.equal, *grads))
    mapped = torch.vmap(op, in_dims=(0, None))(torch.stack([g, g]), A_log)
    assert torch.equal(mapped[1], want)
    compiled = torch.compile(op, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(g, A_log), want)


def test_a_cotangent_of_the_gate_must_have_its_shape(variant):
    x = arguments(variant, "gate")
    for wrap in (contextlib.nullcontext(), FakeTensorMode(allow_non_fake_inputs=True)):
        with wrap, pytest.raises(ValueError, match=r"^dy must have shape \[B, T, HV"):
            overload(variant, "gate_bwd")(x["g"][:, 1:], **x)


@pytest.mark.parametrize(
    "name, tensor",
    [(f"{op}_{v}", "q") for op in ("chunk", "recurrent") for v in VARIANTS]
    + [(f"{v}_gate", "g") for v in VARIANTS]
    + [("short_conv", "x"), ("gated_rms_norm", "x")],
)
def test_float64_on_cuda_is_refused(name, tensor):
    function = getattr(kda_ops, name)
    with FakeTensorMode():
        x = {
            n: t if t is None else torch.empty(t.shape, dtype=torch.float64, device="cuda")
            for n, t in legal(function).items()
        }
        message = f"^{tensor} must be float16.*: float64 runs on CPU only"
        with pytest.raises(TypeError, match=message):
            function(**x)


def test_the_kernels_on_a_cpu_ask_for_the_interpreter():
    pytest.importorskip("triton")
    script = "import torch, kda_ops\nq = torch.zeros(1, 1, 1, 16)\n"
    script += "kda_ops.chunk_kda(q, q, q, None, None)"
    out = python(script, check=False, KDA_OPS_CPU="triton", TRITON_INTERPRET="0")
    assert "RuntimeError: KDA_OPS_CPU=triton runs the kernels under Triton's interp" in out.stderr
