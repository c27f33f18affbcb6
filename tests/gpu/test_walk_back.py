"""KDA's training as walks forward and back, on Hopper: errors, and the bits that are promised."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from kda_ops.backends.triton import tuning
from kda_ops.backends.triton.stages import walk_back
from tests.gpu.test_walk_training import CASES as TRAINED
from tests.gpu.test_walk_training import GIVEN, LAYER, PACKED
from tests.support import closeness
from tests.support.calls import Results, run
from tests.support.cases import EDGES, Case, replace
from tests.support.closeness import assert_all_close, assert_all_identical, oracle, twin
from tests.support.plans import forget_plans
from tests.support.target import Target

CUDA = torch.device("cuda")
if walk_back.KERNEL is None or not tuning.is_hopper(CUDA):
    pytest.skip("needs Hopper, and a Triton whose Gluon is known", allow_module_level=True)

BF16 = torch.bfloat16
PER_TOKEN = ("q", "k", "v", "g", "beta")
CASES = TRAINED | {
    "one token": replace(LAYER, T=1),
    "logits in bf16": replace(LAYER, narrow=True),
    "given decays in bf16, norm": replace(LAYER, gate="strong", narrow=True, safe_gate=True),
    "beta 0 or 1, repeated keys": replace(GIVEN, beta=EDGES, keys="repeated", gate="weak"),
    "beta 0 or 1, packed": replace(GIVEN, B=1, beta=EDGES, lengths=(33, 65, 0, 130), tail=5),
    "beta 0 or 1, gate inside": replace(GIVEN, beta=EDGES, gate="bounded", safe_gate=False),
    "no promise": replace(GIVEN, safe_beta=False, safe_keys=False, k_length=1.4),
    "negative eigenvalues": replace(LAYER, beta="neg_eigval", transposed=True),
    "no final state": replace(LAYER, final=False, T=129),
    "grouped, given": replace(GIVEN, H=2, HV=4, T=70),
    "many chunks": replace(LAYER, T=1500, B=1),
}


@pytest.fixture(autouse=True)
def walks(monkeypatch, force):
    """Walk with few heads too; twins round as the kernels do; torch.empty gives NaN."""
    force(walk=True)
    monkeypatch.setattr(closeness, "TARGET", Target(CUDA, (BF16,), slow=False))
    closeness._twin.cache_clear()
    forget_plans()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    closeness._twin.cache_clear()
    forget_plans()


def step(case: Case, **options) -> Results:
    """Return the outputs and gradients of a training step, on the CPU."""
    options.setdefault("inputs", case.inputs(CUDA))
    return {n: x.cpu() for n, x in run(case, **options).items()}


@pytest.mark.parametrize("name", CASES)
def test_every_gradient_meets_the_error_budget(name):
    case, got = CASES[name], step(CASES[name])
    want = oracle(case)
    assert_all_close(got, {n: want[n] for n in got}, lambda i: _of(twin(case, draw=i), got))


def _of(found: Results, names) -> Results:
    return {n: found[n] for n in names}


@pytest.mark.parametrize("name", ("raw, packed", "given, strong", "many chunks"))
def test_steps_repeat_their_bits(name):
    want = step(CASES[name])
    for _ in range(10):
        assert_all_identical(step(CASES[name]), want)


@pytest.mark.parametrize("case", (LAYER, replace(GIVEN, beta=EDGES)), ids=("raw", "given"))
def test_gradients_of_a_sequence_do_not_depend_on_its_batch(case):
    """But those of A_log and dt_bias, which are sums over the batch."""
    case = replace(case, B=3)
    inputs, (do, dfinal) = case.inputs(CUDA), case.cotangents(CUDA)
    whole = step(case, inputs=inputs, cotangents=(do, dfinal))
    shared = ("A_log", "dt_bias")
    for b in range(3):
        one = {
            n: x if x is None or n in shared else x[b : b + 1].contiguous()
            for n, x in inputs.items()
        }
        alone = step(replace(case, B=1), inputs=one, cotangents=(do[b : b + 1], dfinal[b : b + 1]))
        for n, x in alone.items():
            if n[1:] not in shared:
                assert torch.equal(x, whole[n][b : b + 1]), n


def test_nan_stays_in_its_sequence_and_tokens_of_none_get_zeros():
    want, inputs, (do, dfinal) = step(PACKED), PACKED.inputs(CUDA), PACKED.cotangents(CUDA)
    end = sum(PACKED.lengths)
    bad = slice(65, 66)  # the sequence of one token
    for x in (do, *(inputs[n] for n in PER_TOKEN)):
        x[:, end:] = torch.nan
        x[:, bad] = torch.nan
    got = step(PACKED, inputs=inputs, cotangents=(do, dfinal))
    for n in PER_TOKEN:
        x, y = got["d" + n], want["d" + n]
        assert not x[:, end:].any() and not y[:, end:].any()
        assert x[:, bad].isnan().any()
        assert torch.equal(x[:, :65], y[:, :65]) and torch.equal(x[:, 66:], y[:, 66:]), n


@pytest.mark.parametrize("need", (("g",), ("v",), ("beta", "initial_state"), ("A_log", "dt_bias")))
def test_some_gradients_are_those_of_all(need):
    whole = step(LAYER)
    for n, x in step(LAYER, need=need).items():
        assert torch.equal(x, whole[n]), n
