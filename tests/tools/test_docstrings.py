"""The examples in docstrings run and print what they say."""

import doctest
import importlib
import inspect
import pkgutil

import pytest
import torch

import kda_ops
from tests.support.calls import operator_of

PUBLIC = [
    name
    for _, name, _ in pkgutil.walk_packages(kda_ops.__path__, "kda_ops.")
    if not any(part.startswith("_") for part in name.split(".")[1:])
    and not name.startswith(("kda_ops.backends.triton", "kda_ops.tools"))
]


# all functions call an operator, but the one that says where to cut sequences
OPERATORS = [n for n in kda_ops.__all__ if callable(getattr(kda_ops, n)) and n != "cut_length"]


@pytest.mark.quick
@pytest.mark.parametrize("name", ["kda_ops", *PUBLIC])
def test_examples_run(name):
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] == "kda_ops":
            raise
        pytest.skip(f"needs {error.name}")
    for needed in getattr(module, "__doctest_requires__", ()):
        pytest.importorskip(needed)
    torch.manual_seed(0)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    for examples in doctest.DocTestFinder().find(module):
        # Dynamo's guards still name the globals of what was compiled
        runner.run(examples, clear_globs=False)
    assert not runner.summarize(verbose=False).failed


@pytest.mark.quick
@pytest.mark.parametrize("name", OPERATORS)
def test_every_public_function_has_an_example_and_a_source(name):
    doc = inspect.getdoc(getattr(kda_ops, name))
    assert ">>> " in doc and "Source:" in doc


@pytest.mark.parametrize("name", OPERATORS)
def test_a_function_has_the_words_of_its_operator(name):
    packet = operator_of(name).overloadpacket
    schema = getattr(packet, packet.overloads()[-1])._schema  # with `out`, where there is one
    assert len(packet.overloads()) == 1 + ("out" in packet.overloads())
    face = inspect.signature(getattr(kda_ops, name))
    assert list(face.parameters) == [a.name for a in schema.arguments]
    for a in schema.arguments:
        parameter = face.parameters[a.name]
        assert (parameter.kind is parameter.KEYWORD_ONLY) == a.kwarg_only, a.name
        if a.name == "out":  # the overload without it is another one
            assert parameter.default is None
            continue
        # a default that is not given is the operator's
        assert (parameter.default is not parameter.empty) == a.has_default_value(), a.name
        if a.has_default_value():
            assert parameter.default == a.default_value, a.name
