"""FLA's functions on a GPU: its own kernels and ours through the same call.

Needs FLA: ``pip install --no-deps flash-linear-attention==0.6.0 fla-core==0.6.0`` and ``einops``.
The environment variable FLA_KDA_OPS chooses, since FLA reads it at every call.
"""

import os
from unittest import mock

import pytest
import torch

pytest.importorskip("fla.backends")

from fla.ops.gated_delta_rule import chunk_gated_delta_rule
from fla.ops.kda import chunk_kda, fused_recurrent_kda
from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd
from triton.runtime.autotuner import Autotuner

import kda_ops
from benchmarks import fla_models
from kda_ops.compat import fla_backend
from tests.compat.test_fla import fla_flags, outputs_and_gradients
from tests.compat.test_fla_backend import registries
from tests.compat.test_fla_context import cut, dispatched
from tests.support.cases import Case, replace
from tests.support.closeness import assert_all_close, assert_identical, excess, oracle
from tests.support.context import whole
from tests.support.ranks import Ranks
from tests.support.shards import cut_twin

BF16 = torch.bfloat16
CHUNK = {"kda": chunk_kda, "gdn": chunk_gated_delta_rule}
WIDE = dict(H=2, HV=4, K=128, V=128, T=300, dtype=BF16)
PACKED = (65, 0, 190, 1, 20)
CASES = [
    Case(l2norm=True, **WIDE),
    Case(gate="softplus", beta="sigmoid", seed=1, **WIDE),
    Case(gate="softplus", beta="neg_eigval", l2norm=True, transposed=True, scale=0.3, **WIDE),
    Case(gate="bounded", safe_gate=True, seed=1, l2norm=True, **WIDE),
    Case(gate="bounded", seed=3, l2norm=True, **WIDE),
    Case(gate="strong", safe_gate=True, disable_recompute=True, l2norm=True, **WIDE),
    Case(lengths=PACKED, transposed=True, l2norm=True, **WIDE),
    Case(state=False, final=False, l2norm=True, B=2, **WIDE),
    Case("gdn", l2norm=True, **WIDE),
    Case("gdn", gate="softplus", beta="sigmoid", transposed=True, scale=0.3, **WIDE),
    Case("gdn", gate="softplus", beta="neg_eigval", l2norm=True, **WIDE),
    Case("gdn", lengths=PACKED, l2norm=True, **WIDE),
]


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    fla_backend.enable()
    monkeypatch.delenv("FLA_KDA_OPS", raising=False)


def chosen() -> set[str]:
    """Return the functions that FLA handed to our backend since its logs were cleared."""
    said = [x for r in registries().values() for x in r._logged if x.endswith(":kda_ops")]
    return {x.split(":")[1] for x in said}


def forget() -> None:
    for registry in registries().values():
        registry._logged.clear()


def results(case: Case) -> dict:
    """Call FLA's function on a case, forward and backward."""
    words = fla_flags(case, "chunk" if case.variant == "kda" else "recurrent")
    call = CHUNK[case.variant]
    return outputs_and_gradients(case, lambda x: call(**x, **words), torch.device("cuda"))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_our_kernels_meet_the_budget_through_flas_call(case, monkeypatch, record_property):
    """FLA's own kernels run through the same call; their errors are recorded, not judged."""
    forget()
    got, want = results(case), oracle(case)

    def twin(draw):
        return cut_twin(case, (0, case.rows), BF16, draw)

    assert CHUNK[case.variant].__name__ in chosen()
    assert_all_close(got, want, twin)
    monkeypatch.setenv("FLA_KDA_OPS", "0")
    forget()
    try:
        own = results(case)
    except (RuntimeError, AssertionError) as error:  # GDN's backward refuses some Tritons
        record_property("fla", f"refused: {str(error)[:200]}")
        own = {}
    assert not chosen()
    first = twin(0)
    for name, x in own.items():
        ours = max(excess(got[name].cpu(), want[name], first[name]).values())
        theirs = max(excess(x.cpu().to(got[name].dtype), want[name], first[name]).values())
        record_property(name, f"{ours:.3f} of the budget, FLA {theirs:.3f}")
        print(f"{name}: {ours:.3f} of the budget, FLA's kernels {theirs:.3f}")


@pytest.mark.parametrize("transposed", (False, True))
def test_decoding_gives_the_same_pool_as_flas_kernel(monkeypatch, transposed):
    case = Case(gate="softplus", beta="sigmoid", l2norm=True, transposed=transposed, seed=1, B=3)
    case = replace(case, T=1, K=128, V=128, dtype=BF16, state=False, final=False, H=2, HV=4)
    x, words = case.inputs("cuda"), fla_flags(case, "recurrent_")
    del x["initial_state"]
    before = torch.randn(6, 4, 128, 128, device="cuda")
    found = []
    for switch in ("1", "0"):
        monkeypatch.setenv("FLA_KDA_OPS", switch)
        forget()
        pool, slots = before.clone(), torch.tensor([4, 0, 2], device="cuda")
        with torch.no_grad():
            o, same = fused_recurrent_kda_fwd(
                **x, **words, initial_state=pool, ssm_state_indices=slots
            )
        assert same is pool
        assert ("fused_recurrent_kda_fwd" in chosen()) == (switch == "1")
        found.append((o, pool))
    (o, pool), (want, want_pool) = found
    torch.testing.assert_close(o, want, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(pool, want_pool, rtol=1e-3, atol=1e-3)


def test_the_recurrent_function_reaches_our_kernel():
    case = Case(T=7, K=128, V=128, dtype=BF16, l2norm=True)
    x = case.inputs("cuda")
    forget()
    with torch.no_grad():
        o, state = fused_recurrent_kda(**x, **fla_flags(case, "recurrent"))
        want, want_state = kda_ops.recurrent_kda(**x, **case.flags("recurrent"))
    assert "fused_recurrent_kda_fwd" in chosen()
    assert_identical(o, want)
    assert_identical(state, want_state)


def small(variant: str, dtype: torch.dtype):
    """Build a small model of FLA with reproducible weights."""
    net = fla_models.model(variant, 2, 4, 64, vocab_size=199, fuse_cross_entropy=False)
    return net.to("cuda", dtype).train()


def step(net, ids) -> dict:
    """Return logits and the gradient of every parameter."""
    net.zero_grad(set_to_none=True)
    out = net(input_ids=ids, labels=ids)
    out.loss.backward()
    return {"logits": out.logits.detach()} | {
        "d " + n: p.grad for n, p in net.named_parameters() if p.grad is not None
    }


def error(got: dict, want: dict, part: str) -> float:
    pairs = [(got[n].double(), x.double()) for n, x in want.items() if n.startswith(part)]
    missed = sum((a - b).square().sum() for a, b in pairs)
    return (missed / sum(b.square().sum() for _, b in pairs)).sqrt().item()


def test_a_training_step_of_flas_model_is_as_exact_as_on_its_own_kernels(monkeypatch, variant):
    pytest.importorskip("transformers")
    ids = torch.randint(3, 199, (2, 200), generator=torch.Generator().manual_seed(0)).cuda()
    want = step(small(variant, torch.float32), ids)
    net = small(variant, BF16)
    forget()
    got = step(net, ids)
    assert CHUNK[variant].__name__ in chosen()
    monkeypatch.setenv("FLA_KDA_OPS", "0")
    try:
        own = step(net, ids)
    except (RuntimeError, AssertionError) as refusal:
        pytest.skip(f"FLA's own backward refuses: {str(refusal)[:200]}")
    assert got.keys() == own.keys() == want.keys()
    for part in ("logits", "d "):
        ours, theirs = error(got, want, part), error(own, want, part)
        print(f"{variant} {part}: {ours:.2e}, FLA's kernels {theirs:.2e}")
        assert ours <= 1.3 * theirs


# --- FLA's context of a sharded call --------------------------------------------------------------


def own(groups, size, case):
    """Make the call on FLA's own kernels, in the first of their configurations.

    To time all of them takes minutes.
    """
    prune = Autotuner.prune_configs
    first = mock.patch.object(Autotuner, "prune_configs", lambda *args: prune(*args)[:1])
    with first, mock.patch.dict(os.environ, FLA_KDA_OPS="0"):
        return dispatched(groups, size, case)


@pytest.fixture(scope="module")
def ranks():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    ranks = Ranks(2, "nccl", limit=180.0)  # FLA's kernels compile one after another
    yield ranks
    ranks.stop()


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("lengths", ((300,), (65, 0, 190, 1, 44), (150, 150)), ids=str)
def test_flas_context_over_nccl_meets_the_budget(ranks, variant, lengths):
    case = Case(variant, lengths=lengths, gate="softplus", l2norm=True, **WIDE)
    case = replace(case, state=False, final=False)
    cuts = cut(case, 2)
    got = whole(ranks.run(2, dispatched, 2, case))
    assert_all_close(got, oracle(case), lambda draw: cut_twin(case, cuts, BF16, draw))


@pytest.mark.xdist_group("ranks")
def test_flas_kernels_take_the_same_context(ranks):
    case = Case("kda", lengths=(65, 190, 45), gate="softplus", l2norm=True, **WIDE)
    case = replace(case, state=False, final=False)
    got, theirs = whole(ranks.run(2, dispatched, 2, case)), whole(ranks.run(2, own, 2, case))
    want = oracle(case)
    for name, x in got.items():
        errors = [(y.cpu().double() - want[name]).norm() for y in (x, theirs[name])]
        print(f"{name}: {errors[0]:.2e}, FLA's kernels {errors[1]:.2e}")
        eps = torch.finfo(x.dtype).eps * want[name].norm()
        assert errors[0] <= 2 * (errors[1] + eps), name
