"""The command that a person with a TPU runs finds a wrong operator and says what it checked."""

import pytest

pytest.importorskip("jax")

import jax.numpy as jnp

from kda_ops.jax import check, recurrent_kda


@pytest.fixture
def small(monkeypatch):
    def small(operator):
        monkeypatch.setattr(check, "OPERATORS", {"kda": (operator, recurrent_kda)})
        monkeypatch.setattr(check, "GATES", {"mild": 0.1})
        monkeypatch.setattr(check.offline, "is_available", lambda: False)

    return small


@pytest.mark.nightly
def test_a_right_operator_passes(small, capsys):
    small(recurrent_kda)
    assert check.main(["--tokens", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "jax" in lines[0] and lines[1] == "device: no TPU: interpret mode"
    assert [line.split()[:3] for line in lines[2:4]] == [
        ["right", "kda", "float32"],
        ["right", "kda", "bfloat16"],
    ]
    assert lines[-1].endswith("Not checked: a TPU.")


@pytest.mark.parametrize("fault", (1.001, pytest.param(jnp.nan, marks=pytest.mark.nightly)))
def test_a_wrong_operator_fails(small, capsys, fault):
    def wrong(**x):
        o, state = recurrent_kda(**x)
        return o * fault, state

    small(wrong)
    assert check.main(["--tokens", "3"]) == 1
    assert "WRONG  kda float32" in capsys.readouterr().out


def test_compiling_needs_libtpu(small, capsys):
    small(recurrent_kda)
    assert check.main(["--compile"]) == 1
    assert capsys.readouterr().out == "libtpu is not installed: nothing can be compiled.\n"


@pytest.mark.nightly
def test_the_kernels_pass():
    assert check.main([]) == 0
