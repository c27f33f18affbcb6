"""kda_ops.compat.fla matches FLA: its signatures, and its own references where FLA is installed."""

from __future__ import annotations

import inspect
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kda_ops
from kda_ops import functional
from kda_ops.compat import fla, fla_calls
from tests.support.calls import as_leaves, forward, with_gradients
from tests.support.cases import PACKED, TOKENS, Case, cases, replace
from tests.support.closeness import assert_all_identical, assert_identical
from tests.support.pools import Pool
from tests.support.target import TARGET

# Signatures of FLA 0.6.0, in order; after the bar, what FLA takes from **kwargs, or drops.
_HEAD = "q k v g beta"
SIGNATURES = {
    "chunk_kda": (
        f"{_HEAD} scale=None initial_state=None output_final_state=False "
        "use_qk_l2norm_in_kernel=False use_gate_in_kernel=False use_beta_sigmoid_in_kernel=False "
        "allow_neg_eigval=False safe_gate=False lower_bound=None disable_recompute=False "
        "return_intermediate_states=False state_v_first=False cu_seqlens=None cu_seqlens_cpu=None "
        "cp_context=None use_graph=False max_num_seqs=None | A_log dt_bias chunk_size "
        "transpose_state_layout safe_beta safe_keys"
    ),
    "fused_recurrent_kda": (
        f"{_HEAD} A_log=None dt_bias=None scale=None initial_state=None output_final_state=False "
        "use_qk_l2norm_in_kernel=False use_gate_in_kernel=False use_beta_sigmoid_in_kernel=False "
        "allow_neg_eigval=False lower_bound=None state_v_first=False cu_seqlens=None | "
        "transpose_state_layout"
    ),
    "fused_recurrent_kda_fwd": (
        f"{_HEAD} A_log=None dt_bias=None initial_state=None scale=None output_final_state=False "
        "inplace_final_state=True state_v_first=False cu_seqlens=None ssm_state_indices=None "
        "num_accepted_tokens=None use_qk_l2norm_in_kernel=False use_gate_in_kernel=False "
        "use_beta_sigmoid_in_kernel=False allow_neg_eigval=False lower_bound=None out=None |"
    ),
    "chunk_gated_delta_rule": (
        f"{_HEAD} scale=None initial_state=None output_final_state=False "
        "use_qk_l2norm_in_kernel=False use_beta_sigmoid_in_kernel=False allow_neg_eigval=False "
        "state_v_first=False cu_seqlens=None cu_seqlens_cpu=None chunk_indices=None "
        "cp_context=None | use_gate_in_kernel A_log dt_bias chunk_size transpose_state_layout "
        "safe_beta safe_keys"
    ),
    "fused_recurrent_gated_delta_rule": (
        "q k v g=None gk=None gv=None beta=None scale=None initial_state=None "
        "output_final_state=False use_qk_l2norm_in_kernel=False use_gate_in_kernel=False "
        "A_log=None dt_bias=None use_beta_sigmoid_in_kernel=False allow_neg_eigval=False "
        "state_v_first=False cu_seqlens=None | transpose_state_layout"
    ),
    "fused_kda_gate": f"g A_log=None dt_bias=None lower_bound=None output_dtype={torch.float32}",
    "fused_gdn_gate": f"g A_log dt_bias=None output_dtype={torch.float32}",
}
WHERE = {
    "chunk_kda": "kda",
    "fused_recurrent_kda": "kda",
    "fused_recurrent_kda_fwd": "kda.fused_recurrent",
    "chunk_gated_delta_rule": "gated_delta_rule",
    "fused_recurrent_gated_delta_rule": "gated_delta_rule",
    "fused_kda_gate": "kda.gate",
    "fused_gdn_gate": "gated_delta_rule.gate",
}
WHOLE = {
    "kda": ("chunk_kda", "fused_recurrent_kda"),
    "gdn": ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"),
}
FOUR = [*WHOLE["kda"], *WHOLE["gdn"]]


def positional(function) -> str:
    shown = [
        p
        for p in inspect.signature(function).parameters.values()
        if p.kind is p.POSITIONAL_OR_KEYWORD
    ]
    return " ".join(p.name if p.default is p.empty else f"{p.name}={p.default}" for p in shown)


@pytest.mark.quick
@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_those_of_fla(name):
    given, _, hidden = SIGNATURES[name].partition(" |")
    ours = getattr(fla, name)
    assert positional(ours) == given
    assert {
        n for n, p in inspect.signature(ours).parameters.items() if p.kind is p.KEYWORD_ONLY
    } == {*hidden.split()}


@pytest.mark.parametrize("name", SIGNATURES)
def test_recorded_signatures_are_those_of_an_installed_fla(name):
    module = pytest.importorskip(f"fla.ops.{WHERE[name]}")
    assert positional(getattr(module, name)) == SIGNATURES[name].partition(" |")[0]


def test_short_names_are_the_same_functions():
    assert fla.chunk_gdn is fla.chunk_gated_delta_rule
    assert fla.fused_recurrent_gdn is fla.fused_recurrent_gated_delta_rule
    assert {*fla.__all__} == {*SIGNATURES, "chunk_gdn", "fused_recurrent_gdn"}


# --- what the functions compute -------------------------------------------------------------------


def fla_flags(case: Case, op: str = "chunk") -> dict:
    """Return the flags of a call under FLA's names."""
    flags = dict(case.flags(op))
    return flags | {"state_v_first": flags.pop("transpose_state_layout")}


def taken(name: str, words: dict) -> dict:
    """Return those of the words that a function of FLA's signature takes."""
    return {n: x for n, x in words.items() if n in inspect.signature(getattr(fla, name)).parameters}


def fla_call(case: Case, name: str, inputs) -> tuple:
    """Call a function of FLA's signature on a case."""
    return getattr(fla, name)(**taken(name, inputs | fla_flags(case)))


def outputs_and_gradients(case: Case, call, device: torch.device = TARGET.device) -> dict:
    inputs = case.inputs(device)
    leaves = as_leaves(inputs)
    o, final_state = call(inputs | leaves)
    outs = {"o": o} | ({} if final_state is None else {"final_state": final_state})
    return with_gradients(outs, leaves, case.cotangents(device))


@pytest.mark.bits
@pytest.mark.parametrize("form", (0, 1))
@given(case=cases())
def test_calls_equal_our_operators_bitwise_forward_and_backward(form, case):
    if case.variant == "gdn" and case.gate == "bounded":
        case = replace(case, gate="softplus", safe_gate=False)  # FLA's GDN has no bounded gate
    if case.variant == "gdn" or form == 1:
        case = replace(case, safe_gate=False, disable_recompute=False)
    name = WHOLE[case.variant][form]
    ours = getattr(kda_ops, ("chunk_", "recurrent_")[form] + case.variant)
    flags = case.flags(("chunk", "recurrent")[form])
    want = outputs_and_gradients(case, lambda inputs: ours(**inputs, **flags))
    assert_all_identical(
        outputs_and_gradients(case, lambda inputs: fla_call(case, name, inputs)), want
    )


@pytest.mark.parametrize("name", ("chunk_kda", "chunk_gated_delta_rule"))
def test_promises_reach_the_operator(name, monkeypatch):
    seen, case = {}, Case("kda" if name == "chunk_kda" else "gdn", T=3)
    ours = functional.chunk_kda if name == "chunk_kda" else functional.chunk_gdn

    def watched(*args, **flags):
        seen.update(flags)
        return ours(*args, **flags)

    monkeypatch.setattr(functional, ours.__name__, watched)
    monkeypatch.setitem(fla_calls._RANKS, watched, case.rank)
    for safe in (True, False):
        getattr(fla, name)(**case.inputs("cpu"), safe_beta=safe, safe_keys=not safe)
        assert (seen["safe_beta"], seen["safe_keys"]) == (safe, not safe)


@pytest.mark.bits
@given(
    case=cases(variant="kda", strides="contiguous", gate=st.sampled_from(("softplus", "bounded")))
)
def test_the_gate_takes_any_leading_dimensions(case):
    x = case.inputs(TARGET.device)
    bound = case.flags().get("lower_bound")
    want = kda_ops.kda_gate(x["g"], x["A_log"], x["dt_bias"], lower_bound=bound)
    A_log = None if x["A_log"] is None else x["A_log"].view(1, 1, -1, 1)
    got = fla.fused_kda_gate(
        x["g"].flatten(0, 1), A_log, x["dt_bias"], bound, output_dtype=torch.bfloat16
    )
    assert_identical(got, want.flatten(0, 1).bfloat16())


@pytest.mark.bits
def test_the_scalar_gate_takes_any_leading_dimensions_and_gives_any_dtype():
    x = Case("gdn", gate="softplus", B=2).inputs(TARGET.device)
    want = kda_ops.gdn_gate(x["g"], x["A_log"], x["dt_bias"])
    assert_identical(fla.fused_gdn_gate(x["g"][None], x["A_log"], x["dt_bias"])[0], want)
    assert_identical(fla.fused_gdn_gate(x["g"], x["A_log"].view(1, 1, -1, 1), x["dt_bias"]), want)
    got = fla.fused_gdn_gate(x["g"], x["A_log"], x["dt_bias"], output_dtype=torch.bfloat16)
    assert_identical(got, want.bfloat16())


@pytest.mark.bits
@pytest.mark.parametrize("form", (0, 1))
def test_A_log_may_have_any_shape(variant, form):
    """Kimi-Linear in transformers has A_log [1, 1, HV, 1]."""
    case = Case(variant, gate="softplus", T=5)
    x = case.inputs(TARGET.device)
    want, got = (
        fla_call(case, WHOLE[variant][form], x | {"A_log": A_log})
        for A_log in (x["A_log"], x["A_log"].view(1, 1, -1, 1))
    )
    assert_identical(got[0], want[0])


SERVED = dict(beta="neg_eigval", l2norm=True, scale=0.3, transposed=True, K=16, V=16)


@pytest.mark.bits
@pytest.mark.parametrize(
    "case",
    [
        *(Case("gdn", T=9, gate=gate, B=2, H=1, HV=2) for gate in ("weak", "softplus", "none")),
        Case("gdn", lengths=(2, 0, 3), gate="softplus", **SERVED),
    ],
    ids=str,
)
def test_gk_adds_a_log_decay_per_key_channel_to_g(case):
    x = case.inputs(TARGET.device)
    gk = -0.3 * torch.rand(*x["v"].shape[:3], case.K, device=TARGET.device)
    got, state = fla_call(case, "fused_recurrent_gated_delta_rule", x | {"gk": gk})
    g = x["g"]
    if case.gate == "softplus":
        g = kda_ops.gdn_gate(g, x.pop("A_log"), x.pop("dt_bias"))
    decay = gk if g is None else gk + g[..., None]
    flags = replace(case, gate="weak").flags("recurrent")
    want, want_state = kda_ops.recurrent_kda(**x | {"g": decay}, **flags)
    assert_identical(got, want)
    assert_identical(state, want_state)


@pytest.mark.bits
@pytest.mark.quick
def test_beta_is_one_by_default_for_every_value_head():
    """FLA 0.6.0 makes ones for q's heads and reads past their end if there are more value heads."""
    x = Case("gdn", T=5, H=1, HV=3).inputs(TARGET.device)
    del x["beta"]
    ones = torch.ones(1, 5, 3, device=TARGET.device)
    got, want = (fla.fused_recurrent_gated_delta_rule(**x, **b) for b in ({}, {"beta": ones}))
    assert_identical(got[0], want[0])


@pytest.mark.bits
@pytest.mark.parametrize(
    "name", ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule", "fused_recurrent_kda")
)
def test_a_narrow_initial_state_is_widened_where_fla_takes_it(name):
    x = Case("kda" if name.endswith("kda") else "gdn").inputs(TARGET.device)
    narrow = x["initial_state"].bfloat16()
    assert_identical(
        getattr(fla, name)(**x | {"initial_state": narrow})[0],
        getattr(fla, name)(**x | {"initial_state": narrow.float()})[0],
    )


@pytest.mark.parametrize(
    "case",
    [
        Case(B=2, T=150),
        Case(B=2, T=128, transposed=True, state=False),
        Case(lengths=PACKED),
        Case(lengths=(0, 0)),
        Case(lengths=(65, 0, 130), dtype=torch.bfloat16),
        Case(lengths=(65, 0, 130), dtype=torch.float64),
        Case(T=1),
        Case(T=0),
        Case(
            lengths=(65, 130),
            tail=3,
            gate="softplus",
            l2norm=True,
            dtype=torch.float32,
            final=False,
        ),
    ],
    ids=str,
)
def test_intermediate_states_are_the_states_before_each_chunk(case):
    x = case.inputs(TARGET.device)
    words = taken("fused_recurrent_kda", fla_flags(case))
    with torch.inference_mode():
        o, final_state, h = fla.chunk_kda(**x, **words, return_intermediate_states=True)
        want, want_state = kda_ops.chunk_kda(**x, **case.flags())
        before = []
        for n, (b, start, end) in enumerate(case.spans):
            for stop in range(start, end, 64):
                part = x | {m: x[m][b : b + 1, start:stop] for m in TOKENS} | {"cu_seqlens": None}
                if case.state:
                    part["initial_state"] = x["initial_state"][n : n + 1]
                before.append(
                    kda_ops.chunk_kda(**part, **case.flags() | {"output_final_state": True})[1]
                )
    torch.testing.assert_close(o, want, rtol=0, atol=1e-5)
    assert (final_state is None) == (want_state is None)
    if case.final:
        torch.testing.assert_close(final_state, want_state, rtol=0, atol=1e-5)
    shape = (case.V, case.K) if case.transposed else (case.K, case.V)
    assert h.dtype is x["k"].dtype
    assert h.shape == (x["q"].shape[0], len(before) // x["q"].shape[0], case.HV, *shape)
    if before:
        torch.testing.assert_close(
            h.flatten(0, 1), torch.cat(before).to(h.dtype), rtol=0, atol=1e-5
        )


DECODE = SERVED | dict(H=1, HV=2, state=False, final=False)
PACKED_DECODE = Case(lengths=(2, 0, 1), gate="bounded", seed=1, **DECODE)


@pytest.mark.bits
@pytest.mark.parametrize(
    "pool",
    [
        Pool(Case(B=3, T=1, state=False, H=2, HV=2, final=False), "recurrent_"),
        Pool(Case(B=2, T=3, gate="softplus", **DECODE), "recurrent_", columns=3, accepted=True),
        Pool(PACKED_DECODE, "recurrent_"),
    ],
    ids=str,
)
def test_decoding_writes_the_pool_and_out_in_place(pool):
    x, flags = pool.case.inputs(TARGET.device), fla_flags(pool.case, "recurrent_")
    x.pop("initial_state")
    indices, accepted, _ = (None if i is None else i.to(TARGET.device) for i in pool.indices())
    if x["A_log"] is not None:
        x["A_log"] = x["A_log"].view(1, 1, -1, 1)
    want, after = pool.run()
    for out in (None, torch.full_like(x["v"], torch.nan)):
        state = pool.state()
        words = dict(ssm_state_indices=indices, num_accepted_tokens=accepted, out=out)
        o, same = fla.fused_recurrent_kda_fwd(**x, initial_state=state, **words, **flags)
        assert same is state and (out is None or o is out)
        assert_identical(o, want)
        assert_identical(state, after)


@pytest.mark.bits
def test_decoding_without_a_pool_leaves_the_initial_state():
    case = replace(PACKED_DECODE, lengths=(2, 0, 3), state=True, final=True)
    x, flags = case.inputs(TARGET.device), fla_flags(case, "recurrent")
    initial = x["initial_state"].clone()
    o, state = fla.fused_recurrent_kda_fwd(**x, inplace_final_state=False, **flags)
    want = forward(case, "recurrent")
    assert_identical(o, want["o"])
    assert_identical(state, want["final_state"])
    assert_identical(x["initial_state"], initial)


@pytest.mark.bits
@pytest.mark.parametrize("name", FOUR)
def test_one_graph(name):
    x = Case("kda" if name.endswith("kda") else "gdn", T=20).inputs(TARGET.device)
    call = getattr(fla, name)
    torch._dynamo.reset()
    o, state = torch.compile(call, fullgraph=True, backend="aot_eager")(
        **x, output_final_state=True, transpose_state_layout=False
    )
    want, want_state = call(**x, output_final_state=True)
    assert_identical(o, want)
    assert_identical(state, want_state)


# --- what is refused ------------------------------------------------------------------------------

X = Case(T=3, H=1, HV=1, state=False)


def minimal(name: str) -> dict:
    x = replace(X, variant="gdn" if "gated" in name else "kda").inputs()
    return {n: x[n] for n in TOKENS}


@pytest.mark.parametrize("name", [n for n in SIGNATURES if "gate" not in n.split("_")])
def test_an_unknown_keyword_is_an_error(name):
    with pytest.raises(
        TypeError, match=f"{name} got an unexpected keyword argument 'use_qk_l2norm'"
    ):
        getattr(fla, name)(**minimal(name), use_qk_l2norm=True)


@pytest.mark.bits
@pytest.mark.parametrize(
    "name", [n for n in SIGNATURES if "transpose_state_layout" in SIGNATURES[n]]
)
def test_the_old_name_of_the_layout_warns_and_works(name):
    call, x = getattr(fla, name), minimal(name)
    with pytest.warns(DeprecationWarning, match="renamed to `state_v_first`") as record:
        _, state = call(**x, output_final_state=True, transpose_state_layout=True)
    assert record[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_identical(state, call(**x, output_final_state=True, state_v_first=True)[1])
    with pytest.raises(ValueError, match="must not both be given"):
        call(**x, state_v_first=True, transpose_state_layout=True)


def z(*shape):
    return torch.zeros(shape)


CP = "cp_context must be a FLACPContext, got object: call fla.ops.cp.build_cp_context"
CHUNK_KDA, KDA, CHUNK_GDN, GDN = FOUR
DECODER, KDA_GATE, GDN_GATE = "fused_recurrent_kda_fwd", "fused_kda_gate", "fused_gdn_gate"
STATE, GK = z(1, 1, 16, 24), z(1, 3, 1, 16)
FLOATING = "^initial_state must be float16, bfloat16, float32 or float64, got"
INSIDE, FUNCTIONAL = dict(use_gate_in_kernel=True, A_log=z(2)), dict(inplace_final_state=False)
GRAPH = dict(use_graph=True, max_num_seqs=3)
# (function, words, message of the ValueError)
VALUES = [
    (CHUNK_KDA, dict(safe_gate=True, **INSIDE), "lower_bound must be given with safe_gate=True"),
    (CHUNK_KDA, dict(lower_bound=-3.0), "lower_bound must be None without use_gate_in_kernel"),
    (CHUNK_KDA, dict(cu_seqlens_cpu=torch.tensor([0, 3])), "as cu_seqlens"),
    (CHUNK_KDA, dict(chunk_size=16), r"chunk_size must be one of \[32, 64\], got 16"),
    *(
        (CHUNK_KDA, GRAPH | dict(cu_seqlens=torch.tensor(x)), "must have max_num_seqs . 1 = 4 entr")
        for x in ([0, 3], 5)
    ),
    (CHUNK_KDA, dict(A_log=z(1)), "A_log is a parameter .* needs use_gate_in_kernel=True"),
    (CHUNK_GDN, dict(chunk_size=128), r"chunk_size must be one of \[16, 32, 64\], got 128"),
    (KDA, dict(beta=z(1, 3, 1, 24)), r"beta must have shape \[B, T, HV\], got \[1, 3, 1, 24\]"),
    (GDN, dict(gk=z(1, 3, 1, 1)), r"^gk must have shape \[B, T, HV, K\] ="),
    (GDN, dict(gk=GK, g=z(1, 1, 1)), r"^g must have shape \[B, T, HV\] ="),
    (GDN, dict(gv=z(1, 3, 1, 24)), "gv must be None: no operator of kda_ops decays value channels"),
    (GDN, dict(beta=z(1, 3, 1, 24)), "a beta per value channel is not supported"),
    (DECODER, dict(beta=z(1, 3, 1, 24), **FUNCTIONAL), "a beta per value channel is not supported"),
    (DECODER, dict(), "initial_state must be the pool"),
    (DECODER, dict(initial_state=STATE, out=z(2, 3, 1, 24)), "out must be floating point and have"),
    (DECODER, dict(initial_state=STATE, out=z(1, 3, 1, 24).int()), "got torch.int32"),
    (DECODER, dict(ssm_state_indices=z(1), **FUNCTIONAL), "need inplace_final_state=True"),
    (GDN_GATE, dict(g=z(), A_log=z(1)), r"^g must have shape \[B, T, HV\]"),
]
# the same, for a TypeError
TYPES = [
    (CHUNK_KDA, dict(head_first=False), r"takes no head_first: .*: call transpose\(1, 2\)"),
    (CHUNK_KDA, dict(cp_context=object()), CP),
    (CHUNK_KDA, dict(initial_state=STATE.bfloat16()), "initial_state"),
    (CHUNK_GDN, dict(safe_gate=True), "the per-channel decay of chunk_kda: drop it"),
    (CHUNK_GDN, dict(offsets=None), "takes no offsets: pass it as cu_seqlens"),
    (CHUNK_GDN, dict(cp_context=object()), CP),
    (CHUNK_GDN, dict(q=None, initial_state=STATE), "^q must be a tensor, got None"),
    (KDA, dict(safe_gate=True), "takes no safe_gate: it describes the per-channel decay"),
    (KDA, dict(chunk_size=64), "takes no chunk_size: there are no chunks: drop it"),
    (KDA, dict(ssm_state_indices=None), "on a pool of states, call `fused_recurrent_kda_fwd`"),
    (KDA, dict(initial_state=STATE.numpy()), "^initial_state must be a tensor .*, got ndarray"),
    (KDA, dict(v=None), "^v must be a tensor, got None"),
    *(
        (name, dict(initial_state=STATE.to(dtype)), FLOATING)
        for name in (KDA, CHUNK_GDN, GDN)
        for dtype in (torch.float8_e4m3fn, torch.complex64, torch.int32)
    ),
    *(
        (name, dict(initial_state=STATE.to("meta")), "^initial_state must be on cpu, where q is")
        for name in (KDA, CHUNK_GDN, GDN)
    ),
    (GDN, dict(head_first=True), "takes no head_first"),
    (GDN, dict(gk=GK.to(torch.float8_e5m2)), "^gk must be float"),
    (GDN, dict(gk=GK.cfloat(), g=None), "^gk must be float16"),
    (GDN, dict(gk=GK.to("meta")), "^gk must be on cpu, where q"),
    (GDN, dict(gk=GK.to_sparse()), "^gk must be a dense tensor"),
    (GDN, dict(gk=GK, g=z(1, 3, 1).int()), "^g must be float16"),
    (GDN, dict(gk=GK, q=None), "^q must be a tensor, got None"),
    (
        DECODER,
        dict(initial_state=STATE, output_final_state="no"),
        "^output_final_state must be True",
    ),
    (DECODER, dict(initial_state=STATE.half()), "state must be float32 or bfloat16"),
    (KDA_GATE, dict(g=0.5), "^g must be a tensor, got float: torch"),
    (KDA_GATE, dict(g=None, A_log=z(2)), "^g must be a tensor, got None"),
    (GDN_GATE, dict(g=torch.eye(3).to_sparse(), A_log=z(3)), "^g must be a dense tensor"),
    (GDN_GATE, dict(g=None, A_log=z(2)), "^g must be a tensor, got None"),
    (GDN_GATE, dict(A_log=None), "^A_log must be a tensor, got None"),
]
RECORDED = dict(initial_state=STATE, g=z(1, 3, 1, 16).requires_grad_())
REFUSALS = [
    *((*row, ValueError) for row in VALUES),
    *((*row, TypeError) for row in TYPES),
    (CHUNK_KDA, dict(return_intermediate_states=True), "use torch.inference_mode", RuntimeError),
    (DECODER, RECORDED, "in place and has no gradient: call .*under torch.no_grad", RuntimeError),
]


@pytest.mark.quick
@pytest.mark.parametrize(
    "name, words, message, error", REFUSALS, ids=[f"{n}-{[*w]}" for n, w, *_ in REFUSALS]
)
def test_refusals_say_what_to_do(name, words, message, error):
    with pytest.raises(error, match=message):
        getattr(fla, name)(**taken(name, minimal(name)) | words)


OUT = {
    "sparse": (lambda: torch.zeros(1, 3, 1, 24).to_sparse(), "must be a dense tensor"),
    "expanded": (lambda: torch.zeros(1, 3, 1, 1).expand(1, 3, 1, 24), "must not overlap itself"),
    "elsewhere": (lambda: torch.zeros(1, 3, 1, 24, device="meta"), "must be on cpu, where v is"),
    "of inference mode": (None, r"was made under torch.inference_mode\(\)"),
    "leaf": (lambda: torch.zeros(1, 3, 1, 24, requires_grad=True), "is written in place and has"),
}


def test_a_graph_refuses_an_out_of_inference_mode_before_the_pool_is_written():
    torch._dynamo.reset()
    compiled = torch.compile(fla.fused_recurrent_kda_fwd, fullgraph=True, backend="aot_eager")
    with torch.inference_mode():
        out = torch.zeros(1, 3, 1, 24)
    pool = torch.zeros(1, 1, 16, 24)
    with pytest.raises(RuntimeError, match=OUT["of inference mode"][1]):
        compiled(**minimal("fused_recurrent_kda_fwd"), initial_state=pool, out=out)
    assert not pool.any()


@pytest.mark.parametrize("kind", OUT)
def test_an_out_that_cannot_be_written_is_refused_before_the_pool_is(kind):
    make, message = OUT[kind]
    with torch.inference_mode(make is None):
        out = torch.zeros(1, 3, 1, 24) if make is None else make()
    pool = torch.zeros(1, 1, 16, 24)
    with pytest.raises((TypeError, ValueError, RuntimeError), match=f"^out {message}"):
        fla.fused_recurrent_kda_fwd(
            **minimal("fused_recurrent_kda_fwd"), initial_state=pool, out=out
        )
    assert not pool.any()


@pytest.mark.parametrize(
    "words, error, message",
    [
        (dict(chunk_size=32), ValueError, "chunk_size must be 64"),
        (dict(disable_recompute=True), ValueError, "disable_recompute must be False"),
        # without a check, the pool would broadcast the state
        (dict(initial_state=z(2, 16, 24)), ValueError, "^initial_state must"),
        (dict(initial_state=z(1, 1, 16, 24)), ValueError, "^initial_state must"),
        (dict(initial_state=z(1, 2, 16, 24).bfloat16()), TypeError, "^initial_state must"),
    ],
    ids=str,
)
def test_intermediate_states_are_refused_with_what_they_do_not_support(words, error, message):
    x = replace(X, HV=2, T=130).inputs()
    with torch.inference_mode(), pytest.raises(error, match=message):
        fla.chunk_kda(**x | words, return_intermediate_states=True)


@pytest.mark.bits
def test_keywords_without_effect_are_accepted():
    x = Case(lengths=(3, 70), H=1, HV=1).inputs(TARGET.device)
    y = Case("gdn", lengths=(3, 70), H=1, HV=1).inputs(TARGET.device)
    host = x["cu_seqlens"].cpu()
    for call, inputs, words in (
        (
            fla.chunk_kda,
            x,
            dict(cu_seqlens_cpu=host, chunk_size=32, use_graph=True, max_num_seqs=2),
        ),
        (fla.chunk_kda, x, dict(max_num_seqs=7)),
        (fla.chunk_gdn, y, dict(cu_seqlens_cpu=host, chunk_size=16, chunk_indices=host)),
    ):
        assert_identical(call(**inputs, **words)[0], call(**inputs)[0])


# --- an installed FLA -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", FOUR)
@given(
    case=cases(
        dtype=torch.float32,
        lengths=None,
        transposed=False,
        beta="given",
        final=True,
        strides="contiguous",
        l2norm=False,
        gate=st.sampled_from(("weak", "strong", "zero", "reset")),
    )
)
def test_references_of_fla_compute_the_same(name, case):
    variant = "kda" if name.endswith("kda") else "gdn"
    naive = pytest.importorskip(
        f"fla.ops.{'kda' if variant == 'kda' else 'gated_delta_rule'}.naive"
    )
    # FLA's GDN reference needs HV = H
    case = replace(
        case, variant=variant, safe_gate=False, H=case.HV if variant == "gdn" else case.H
    )
    x = case.inputs(TARGET.device)
    reference = (
        naive.naive_recurrent_kda if variant == "kda" else naive.naive_recurrent_gated_delta_rule
    )
    words = {n: x[n] for n in ("q", "k", "v", "g", "beta", "initial_state")} | {
        "scale": case.scale,
        "output_final_state": True,
    }
    want, want_state = reference(**words)
    got, state = getattr(fla, name)(**words)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(state, want_state, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("bound", (None, -3.0))
def test_gates_of_fla_compute_the_same(bound):
    naive = pytest.importorskip("fla.ops.kda.gate")
    x = Case(gate="softplus", B=2).inputs(TARGET.device)
    words = (x["g"], x["A_log"], x["dt_bias"])
    want = (
        naive.naive_kda_gate(*words)
        if bound is None
        else naive.naive_kda_lowerbound_gate(*words, lower_bound=bound)
    )
    torch.testing.assert_close(fla.fused_kda_gate(*words, lower_bound=bound), want)
    gdn = pytest.importorskip("fla.ops.gated_delta_rule.gate")
    y = Case("gdn", gate="softplus").inputs(TARGET.device)
    words = (y["g"], y["A_log"], y["dt_bias"])
    torch.testing.assert_close(fla.fused_gdn_gate(*words), gdn.naive_gdn_gate(*words))


@pytest.mark.parametrize("B, offsets", ((0, None), (1, torch.tensor([0]))))
def test_intermediate_states_of_no_sequence_are_empty(B, offsets):
    q, beta = torch.zeros(B, 5, 2, 16), torch.zeros(B, 5, 2)
    with torch.inference_mode():
        o, _, h = fla.chunk_kda(
            q, q, q, q, beta, cu_seqlens=offsets, return_intermediate_states=True
        )
    assert o.shape == q.shape and h.shape[:2].numel() == 0
