"""One function says which gate a call has; every other file asks its record."""

import ast
from pathlib import Path

import pytest
import torch

from kda_ops import gates
from kda_ops.backends import activations
from kda_ops.gates import BOUNDED, GIVEN, SOFTPLUS, Gate, gate_of
from kda_ops.problem import Problem

PACKAGE = Path(gates.__file__).parent
KINDS = {x for n, x in vars(gates).items() if n.isupper() and isinstance(x, str)}


@pytest.mark.quick
@pytest.mark.parametrize(
    "inside, lower_bound, safe, decays, gate",
    (
        (False, None, False, True, Gate(GIVEN)),
        (False, None, True, True, Gate(GIVEN, -5.0)),
        (False, -3.0, True, True, Gate(GIVEN, -3.0)),
        (False, None, False, False, Gate(GIVEN, 0.0)),
        (False, -3.0, True, False, Gate(GIVEN, 0.0)),
        (True, None, False, True, Gate(SOFTPLUS)),
        (True, None, True, True, Gate(SOFTPLUS)),  # its decay has no bound, whatever is promised
        (True, -3.0, False, True, Gate(BOUNDED, -3.0)),
        (True, -7.0, True, True, Gate(BOUNDED, -7.0)),
    ),
)
def test_the_flags_of_a_call_name_its_gate(inside, lower_bound, safe, decays, gate):
    assert gate_of(inside, lower_bound, safe, decays) == gate
    x = torch.zeros(1, 3, 2, 4)
    p = Problem.parse(
        1, x, x, x, x if decays else None, None, torch.zeros(2) if inside else None,
        use_gate_in_kernel=inside, lower_bound=lower_bound, safe_gate=safe,
    )  # fmt: skip
    assert p.gate == gate and p.gate.inside == inside


@pytest.mark.quick
def test_every_kind_has_a_formula_and_a_derivative_on_every_host():
    assert KINDS - {GIVEN} == {*activations.FORMULAS}
    pytest.importorskip("jax")
    from kda_ops.jax import activations as in_jax

    assert {*in_jax.FORMULAS} == {*activations.FORMULAS}


@pytest.mark.quick
def test_only_the_record_says_which_gate_a_bound_selects():
    """`nn` and `compat` check their callers' arguments."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.name == "gates.py" or {"nn", "compat"} & {*path.parts}:
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, (ast.Compare, ast.BoolOp)):
                operand = node.left if isinstance(node, ast.Compare) else node.values[0]
                assert not ast.unparse(operand).endswith("lower_bound"), f"{path}:{node.lineno}"
