"""Run the model tests of transformers on models that call our operators.

This is not part of the suite, because it needs transformers' test files::

    pip download --no-deps --no-binary transformers transformers==5.24.0
    tar xzf transformers-5.24.0.tar.gz
    pip install parameterized accelerate psutil
    export TRANSFORMERS_TESTS=transformers-5.24.0/tests
    python -m pytest tests/compat/transformers_suite.py             # with our operators
    PLAIN=1 python -m pytest tests/compat/transformers_suite.py     # without

The source distribution holds the tests that all models share: forward, batching, dtypes, attention
backends, checkpointing, saving, training to overfit. It lacks the tests of `generate` and of single
models; our suite checks their laws. Results: benchmarks/results/TRANSFORMERS.md.
"""

from __future__ import annotations

import os
import sys
import unittest
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
import torch

from kda_ops.compat import transformers as compat
from kda_ops.problem import Problem
from tests.support import models

_FOLDER = Path(os.environ["TRANSFORMERS_TESTS"]).resolve()


def _module(name: str, **contents: object) -> None:
    sys.modules[name] = ModuleType(name)
    vars(sys.modules[name]).update(contents)


# The shared tests import two mixins that the source distribution lacks.
_module("upstream", __path__=[str(_FOLDER)])
_module("upstream.exporters", __path__=[])
_module("upstream.generation", __path__=[])
_module("upstream.exporters.test_export", ExportTesterMixin=object)
_module(
    "upstream.generation.test_utils", GenerationTesterMixin=type("GenerationTesterMixin", (), {})
)

import transformers  # noqa: E402
from upstream.test_modeling_common import (  # noqa: E402
    GenerationTesterMixin,
    ModelTesterMixin,
    ids_tensor,
    torch_device,
)
from upstream.test_training_mixin import TrainingTesterMixin  # noqa: E402

RAN: set[str] = set()  # the tests in which our operators ran


@pytest.fixture(autouse=True)
def _count(request):
    with mock.patch.object(Problem, "parse", wraps=Problem.parse) as parse:
        yield
    if parse.called:
        RAN.add(request.node.name)


def setup_module():
    if not os.environ.get("PLAIN"):
        compat.enable()


def teardown_module():
    compat.disable()
    print(f"\nour operators ran in {len(RAN)} tests, by name:", *sorted(RAN))


class Tester:
    """A small configuration, inputs and classes of a model, for the shared tests."""

    __test__ = False  # not a class of tests
    is_training, batch_size, seq_length, hidden_size = True, 3, 7, 32
    num_hidden_layers, num_attention_heads = 2, 2

    def __init__(self, name: str):
        self.arguments, stem = models.CONFIGS[name][1], models.CONFIGS[name][0]
        kinds = [kind for kind in ("TextConfig", "Config") if hasattr(transformers, stem + kind)]
        self.config_class = getattr(transformers, stem + kinds[0])
        base = stem + kinds[0].replace("Config", "Model")
        self.base_model_class = getattr(transformers, base)
        self.causal_lm_class = getattr(transformers, stem + "ForCausalLM", None)

    def get_config(self):
        arguments = (
            models._COMMON
            | self.arguments
            | dict(
                num_hidden_layers=2,
                layer_types=["linear_attention", "full_attention"],
                initializer_range=0.02,
                vocab_size=99,
                eos_token_id=2,
            )
        )
        if "mlp_layer_types" in arguments:
            arguments["mlp_layer_types"] = ["dense", "sparse"]
        if "mlp_only_layers" in arguments:
            arguments |= dict(mlp_only_layers=[], decoder_sparse_step=1)
        return self.config_class(**arguments)

    def prepare_config_and_inputs_for_common(self):
        ids = ids_tensor([self.batch_size, self.seq_length], 99)
        return self.get_config(), {
            "input_ids": ids,
            "attention_mask": torch.tril(torch.ones_like(ids)).to(torch_device),
        }


class Shared(ModelTesterMixin, GenerationTesterMixin, TrainingTesterMixin):
    name: str
    # expects an attention map from every layer; transformers' tests of these models replace it
    test_attention_outputs = None

    @property
    def model_tester(self):
        return self._tester

    def setUp(self):
        self._tester = Tester(self.name)
        classes = self._tester.base_model_class, self._tester.causal_lm_class
        self.all_model_classes = tuple(filter(None, classes))


for _name, (_stem, _) in models.CONFIGS.items():
    globals()[f"Test{_stem}"] = type(f"Test{_stem}", (Shared, unittest.TestCase), {"name": _name})
