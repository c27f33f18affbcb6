"""torch.ops.kda and torch.ops.gdn on tensors of torchax give what the definition gives."""

import pytest
import torch

pytest.importorskip("torchax", exc_type=ImportError)

import torchax

import kda_ops  # noqa: F401
from tests.support.arrays import errors
from tests.support.cases import Case
from tests.support.closeness import oracle

CASES = {
    "kda": Case("kda", T=70, K=8, V=8, gate="forget"),
    "gdn": Case("gdn", lengths=(0, 65, 3), K=8, V=8, gate="softplus", beta="sigmoid", l2norm=True),
    "state not asked for": Case("kda", T=5, K=8, V=8, final=False, state=False),
}


@pytest.mark.bits
@pytest.mark.parametrize("op", ("chunk", "recurrent"))
@pytest.mark.parametrize("name", CASES)
def test_the_operators_of_torch_run_on_torchax_with_their_gradients(name, op):
    case = CASES[name]
    inputs, cotangents = case.inputs(), case.cotangents()
    need = [n for n, x in inputs.items() if x is not None and x.is_floating_point()]
    want = oracle(case, tuple(need))
    with torchax.default_env():
        x = {n: None if t is None else t.to("jax") for n, t in inputs.items()}
        for n in need:
            x[n].requires_grad_()
        operator = getattr(getattr(torch.ops, case.variant), op)
        given = {n: t for n, t in x.items() if t is not None or n in ("g", "beta")}
        out = operator(*x.values(), **case.flags(op))
        by_name = operator(**given, **case.flags(op))
        assert torch.equal(*(torch.from_numpy(y[0].detach().numpy()) for y in (out, by_name)))
        out = dict(zip(("o", "final_state"), out if case.final else out[:1]))
        d = [t.to("jax") for t, _ in zip(cotangents, out)]
        grads = torch.autograd.grad(list(out.values()), [x[n] for n in need], d)
        found = out | {"d" + n: d for n, d in zip(need, grads)}
        found = {n: torch.from_numpy(t.detach().numpy()) for n, t in found.items()}
    off = errors(found, want)
    assert max(off.values()) < 2e-6, off


def test_a_gate_runs_on_torchax(variant):
    inputs = Case(variant, gate="softplus").inputs()
    given = [inputs[n] for n in ("g", "A_log", "dt_bias")]
    gate = getattr(torch.ops, variant).gate
    want = gate(*given)
    with torchax.default_env():
        leaves = [x.to("jax").requires_grad_() for x in given]
        y = gate(*leaves)
        y.sum().backward()
        found = torch.from_numpy(y.detach().numpy())
        assert all(x.grad is not None for x in leaves)
    assert torch.allclose(found, want, rtol=1e-5)
