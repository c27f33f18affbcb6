"""Register rules for FLOPs, sharding, Inductor and others when a program imports those parts.

If a part is imported already, its rules are registered at once.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable

from kda_ops.operators import Operator
from kda_ops.private import LATER
from kda_ops.registrations import schemas


class _AfterImport(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Run `callback` once, right after the module `name` has been executed.

    ``importlib.util.find_spec`` alone does not trigger it.
    """

    def __init__(self, name: str, callback: Callable[[], None]):
        self.name, self.callback, self.searching = name, callback, False

    def find_spec(self, name, path=None, target=None):
        if name != self.name or self.searching:
            return None
        self.searching = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.searching = False
        if spec is None or spec.loader is None:
            return spec
        self.loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module):
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        module.__spec__.loader = module.__loader__ = self.loader
        self.loader.exec_module(module)
        callback, self.callback = self.callback, lambda: None
        callback()


def when_imported(name: str, callback: Callable[[], None]) -> None:
    """Call `callback` at once if module `name` is imported, else right after its import."""
    if name in sys.modules:
        callback()
    else:
        sys.meta_path.insert(0, _AfterImport(name, callback))


def _flops() -> None:
    from torch.utils.flop_counter import register_flop_formula

    def of_shapes(operator: Operator) -> Callable:
        def count(*args, out_shape=None, **flags):
            return operator.flops(**dict(zip(operator.names, args)), **flags)

        return count

    for namespace in schemas.VARIANTS:
        for operator in schemas.operators(namespace):
            # a formula serves all overloads
            if operator.flops is not None and not operator.takes_out:
                register_flop_formula(operator.overload(namespace).overloadpacket)(
                    of_shapes(operator)
                )


def _sharding() -> None:
    from kda_ops.registrations import sharding  # noqa: F401


def _decompositions() -> None:
    from kda_ops.registrations import decompositions  # noqa: F401


def _nested() -> None:
    from kda_ops.registrations import refusals

    refusals.refuse_nested()


def _torchax() -> None:
    from kda_ops.jax import torchax

    torchax.register()


when_imported("torch.utils.flop_counter", _flops)
when_imported(LATER["NestedTensor"], _nested)
when_imported("torch.distributed.tensor", _sharding)
when_imported("torch._inductor.decomposition", _decompositions)
when_imported("torchax", _torchax)
