"""Sequences in pieces have the bits of one call, and with `invariant` a head of a sequence has its
bits in any call (docs/numerics.md).
"""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import kda_ops
from kda_ops import dispatch
from kda_ops.stages import GRADIENTS
from tests.support.calls import forward, overload, run
from tests.support.cases import Case, cases, replace, take
from tests.support.closeness import assert_all_identical, assert_identical, assert_meets_budget
from tests.support.pieces import (
    ANY,
    LONG,
    SHARED,
    cuts,
    head_alone,
    keeps_any_piece,
    of_heads,
    prefill,
    results_of,
    run_in_pieces,
)
from tests.support.target import TARGET

WIDE = st.sampled_from((8, 24, 33, 40))  # widths of one: docs/numerics.md, "Bits on a CPU"
MANY = 2 if TARGET.slow else 3


@st.composite
def calls(draw, invariant, **fixed):
    """Draw a call of several chunks: a batch, or packed sequences of different lengths."""
    lengths = st.sampled_from(ANY if keeps_any_piece(invariant) else LONG)
    if draw(st.booleans()):
        fixed["lengths"] = tuple(draw(st.lists(lengths, min_size=1, max_size=MANY)))
    else:
        fixed |= dict(lengths=None, B=draw(st.sampled_from((1, 2))), T=draw(lengths))
    return draw(cases(tail=0, **({"V": WIDE} | fixed)))


@pytest.mark.bits
@pytest.mark.parametrize("invariant", (False, True))
@given(data=st.data())
def test_pieces_of_chunk_give_the_bits_of_one_call(invariant, data):
    case = data.draw(calls(invariant))
    where = data.draw(cuts(case))
    got = run_in_pieces(case, where, need=None, invariant=invariant)
    assert_all_identical(got, forward(case, invariant=invariant))


@pytest.mark.bits
@pytest.mark.parametrize("invariant", (False, True))
@given(data=st.data())
def test_pieces_on_a_pool_give_the_bits_of_one_call(invariant, data):
    case = data.draw(calls(invariant, state=False, final=False, disable_recompute=False))
    where = data.draw(cuts(case))
    whole, got = (prefill(case, x, invariant=invariant) for x in (None, where))
    assert_identical(got.o, whole.o, "o")
    assert_identical(got.pool, whole.pool, "states and snapshots")


@pytest.mark.bits
@given(data=st.data())
def test_pieces_of_an_invariant_call_give_the_gradients_of_one_call(data):
    case = data.draw(calls(True))
    where = data.draw(cuts(case))
    whole = run(case, invariant=True)
    got = run_in_pieces(case, where, invariant=True)
    assert_all_identical(got, {n: x for n, x in whole.items() if n[1:] not in SHARED})


@pytest.mark.bits
@given(data=st.data())
def test_a_head_of_a_sequence_has_its_bits_in_any_invariant_call(data):
    """Alone, contiguous, in pieces, and with some gradients asked for."""
    case = data.draw(calls(True, H=st.sampled_from((1, 2, 3))))
    n, head = data.draw(st.integers(0, max(case.N - 1, 0))), data.draw(st.integers(0, case.H - 1))
    need = data.draw(st.lists(st.sampled_from(GRADIENTS), min_size=1, unique=True))
    own, inputs, cotangents = head_alone(case, n, head)
    where = data.draw(cuts(own, calls=2))
    whole = results_of(case, run(case, invariant=True), n, head)
    got = run_in_pieces(own, where, inputs, cotangents, need, invariant=True)
    assert_all_identical(got, {n: x for n, x in whole.items() if n in got})


@pytest.mark.bits
@given(data=st.data())
def test_strides_and_the_gradients_asked_for_change_no_bit_of_an_invariant_call(data):
    case = data.draw(calls(True))
    inputs = {
        n: x if x is None else x.clone(memory_format=torch.contiguous_format)
        for n, x in case.inputs(TARGET.device).items()
    }
    given_ = [n for n in GRADIENTS if inputs[n] is not None]
    need = data.draw(st.lists(st.sampled_from(given_), min_size=1, unique=True))
    whole = run(case, invariant=True)
    got = run(case, inputs=inputs, need=need, invariant=True)
    assert_all_identical(got, {n: x for n, x in whole.items() if n in got})


@pytest.mark.bits
def test_vmap_changes_no_bit_of_an_invariant_call(variant):
    """It folds the mapped dimension into the heads."""
    case = Case(variant, T=129, H=2, HV=4, gate="softplus", invariant=True)
    slices = [replace(case, seed=seed).inputs(TARGET.device) for seed in (1, 3, 5)]
    names = [n for n, x in slices[0].items() if x is not None]

    def loss(*given):
        x = slices[0] | dict(zip(names, given))
        o, state = overload(variant, "chunk")(*x.values(), **case.flags())
        return o.square().sum() + state.square().sum(), (o, state)

    step = torch.func.grad(loss, tuple(range(len(names))), has_aux=True)
    given = [torch.stack([x[n] for x in slices]) for n in names]
    grads, outs = torch.vmap(step)(*given)
    for i, x in enumerate(slices):
        alone, (o, state) = step(*(x[n] for n in names))
        assert_identical(outs[0][i], o, "o")
        assert_identical(outs[1][i], state, "final_state")
        for name, got, want in zip(names, grads, alone):
            assert_identical(got[i], want, f"d{name}")


def off(x, by):
    """Copy a tensor to an address `by` elements behind one at which torch allocates."""
    if x is None or not x.is_floating_point():
        return x
    return torch.cat([x.new_zeros(by), x.flatten()])[by:].view(x.shape)


@pytest.mark.bits
@given(
    case=cases(H=1, HV=1, lengths=None, T=64, V=WIDE, strides="contiguous"), by=st.integers(1, 5)
)
@example(case=Case("gdn", B=2, T=64, HV=1, K=33, V=24, dtype=torch.float64, gate="softplus"), by=1)
@example(case=Case("gdn", T=64, HV=1, K=33, V=24, gate="none"), by=2)
def test_addresses_change_no_bit_of_an_invariant_call(case, by):
    if case.dtype not in TARGET.dtypes:
        pytest.skip("not on this device")
    inputs, given_ = case.inputs(TARGET.device), case.cotangents(TARGET.device)
    moved = {n: off(x, by) for n, x in inputs.items()}
    got = run(case, inputs=moved, cotangents=[off(x, by) for x in given_], invariant=True)
    assert_all_identical(got, run(case, invariant=True))


@pytest.mark.bits
@given(data=st.data())
def test_heads_change_no_bit_of_the_sums_over_the_batch(data):
    """The gradients of A_log and dt_bias are sums over the batch in an order of their own."""
    gate = st.sampled_from(("softplus", "bounded"))
    case = data.draw(calls(True, gate=gate, H=2, HV=4))
    whole = run(case, invariant=True)
    for half in (slice(0, 2), slice(2, 4)):
        inputs, (do, dfinal) = case.inputs(TARGET.device), case.cotangents(TARGET.device)
        own = {n: x[:, :, half] for n, x in inputs.items() if x is not None and n in ("v", "g")}
        if inputs["beta"] is not None:
            own["beta"] = inputs["beta"][:, :, half]
        own |= {n: inputs[n][:, :, half.start // 2 : half.stop // 2] for n in "qk"}
        own |= {n: of_heads(inputs[n], 4, half) for n in SHARED if inputs[n] is not None}
        if inputs["initial_state"] is not None:
            own["initial_state"] = inputs["initial_state"][:, half]
        got = run(
            replace(case, H=1, HV=2),
            inputs=inputs | own,
            cotangents=(do[:, :, half], dfinal[:, half]),
            invariant=True,
        )
        for name in ("dA_log", "ddt_bias"):
            if name in whole:
                want = whole[name].reshape(4, -1)[half].reshape(got[name].shape)
                assert_identical(got[name], want, name)


@given(case=cases(V=WIDE))
@example(case=Case(lengths=(0, 65, 1), H=1, HV=2, gate="softplus", l2norm=True, beta="sigmoid"))
def test_an_invariant_call_meets_the_budget(case):
    assert_meets_budget(case, got=run(case, invariant=True))


@pytest.mark.quick
def test_a_cut_that_is_no_multiple_of_64_changes_bits():
    """So the tests above can fail."""
    case = Case(T=165, H=2, HV=4)
    inputs = case.inputs(TARGET.device)
    want = forward(case, invariant=True)["o"][:, 100:]
    state = forward(case, inputs=take(inputs, 0, 100), invariant=True)["final_state"]
    rest = take(inputs, 100, 165) | {"initial_state": state}
    got = forward(case, inputs=rest, invariant=True)["o"]
    assert not torch.equal(got, want)
    torch.testing.assert_close(got, want)


@pytest.mark.quick
@pytest.mark.parametrize("suffix", ("", "_"))
def test_a_cpu_cuts_at_chunks(variant, suffix):
    if dispatch.backend_name(torch.device("cpu")) == "triton":
        pytest.skip("tests/kernels/interpreted/test_pieces.py forces what decides")
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        assert kda_ops.cut_length(f"chunk_{variant}{suffix}", 4, 128, 128, dtype, "cpu") == 64


@pytest.mark.quick
@pytest.mark.parametrize(
    "call, error, message",
    (
        (("recurrent_kda", 1, 8, 8, torch.float32, "cpu"), ValueError, "op must be one of chunk_k"),
        ((torch.add, 1, 8, 8, torch.float32, "cpu"), TypeError, "op must be the name of a funct"),
        (("chunk_kda", 0, 8, 8, torch.float32, "cpu"), ValueError, "HV must be at least 1, got 0"),
        (("chunk_kda", 1.0, 8, 8, torch.float32, "cpu"), TypeError, "HV must be a whole number"),
        (
            ("chunk_kda", 1, 300, 8, torch.float32, "cpu"),
            ValueError,
            "K must be at least 1 and at most 256, got 300",
        ),
        (("chunk_kda", 1, 8, 0, torch.float32, "cpu"), ValueError, "V must be at least 1, got 0"),
        (("chunk_kda", 1, 8, 8, torch.int8, "cpu"), TypeError, "dtype must be float16, bfloat16"),
        (("chunk_kda", 1, 8, 8, "bf16", "cpu"), TypeError, "dtype must be a torch.dtype, got str"),
        (("chunk_kda", 1, 8, 8, torch.float32, 0), TypeError, "device must be a device or its na"),
        (
            ("chunk_kda", 1, 8, 8, torch.float64, "cuda"),
            TypeError,
            r"dtype must be float16, bfloat16, float32 or \(on CPU\) float64",
        ),
        (
            ("chunk_kda", 1, 8, 8, torch.float32, "cuda:99"),
            RuntimeError,
            "device must be a GPU of this machine, got cuda:99",
        ),
        (("chunk_kda", 1, 8, 8, torch.float32, "xla"), TypeError, "device must be a CPU or a CUDA"),
    ),
)
def test_a_wrong_question_about_cuts_is_refused(call, error, message):
    with pytest.raises(error, match=f"^{message}"):
        kda_ops.cut_length(*call)


@pytest.mark.quick
def test_a_bf16_pool_is_refused_before_it_is_written(variant):
    case = Case(variant, state=False, final=False)
    message = r"^state must be float32 with invariant=True, got torch.bfloat16: it would round"
    with pytest.raises(TypeError, match=message):
        prefill(case, None, torch.bfloat16, invariant=True)
    prefill(case, None, torch.bfloat16)
