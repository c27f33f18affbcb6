"""Every private name of PyTorch that the package uses, each with its reason.

Another version of torch may change these names without notice: ``tests/tools/test_private.py``
tests the behaviour that the package relies on, or names the tests that do. They hold for torch 2.11
to 2.13 (`VERSIONS`). "Public:" names what could replace a private name, and what keeps us from it.

Names are bound at import, so a call costs what it costs in torch. What takes long to import, or
belongs to a part of torch that imports us (`kda_ops.registrations.lazy`), is bound when it is first
asked for (`LATER`).

One private name is not here: `torch.autograd.forward_ad._current_level`, the level of forward mode,
-1 outside. It changes between calls, so it cannot be bound, and a function would cost every call of
an operator. ``registrations/autograd.py`` reads it. Public: none.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy
from torch._C._dynamo.eval_frame import set_code_exec_strategy as set_code_exec_strategy
from torch._functorch.utils import (
    enable_single_level_autograd_function as enable_single_level_autograd_function,
)
from torch.autograd import forward_ad, grad_mode
from torch.autograd.function import _SingleLevelFunction
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

if TYPE_CHECKING:
    from torch._dynamo import register_backend as register_backend
    from torch._inductor import list_mode_options as list_mode_options
    from torch._inductor.compile_fx import compile_fx as compile_fx
    from torch._inductor.custom_graph_pass import CustomGraphPass as CustomGraphPass
    from torch._inductor.custom_graph_pass import get_hash_for_files as get_hash_for_files
    from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor as FunctionalTensor
    from torch.distributed.tensor._op_schema import OpSchema as OpSchema
    from torch.distributed.tensor._op_schema import OpStrategy as OpStrategy
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo as RuntimeSchemaInfo
    from torch.nested._internal.nested_tensor import NestedTensor as NestedTensor

F = TypeVar("F", bound=Callable)
VERSIONS = "2.11", "2.13"  # the first and the last torch that the tests of these names ran with

# --- operators and graph nodes --------------------------------------------------------------------

# The types of an operator: `torch.ops.kda.chunk.default`, `torch.ops.kda.chunk`, and operators that
# take functions. The pass tells nodes of a graph apart by them. Public: none.
OpOverload = torch._ops.OpOverload
OpOverloadPacket = torch._ops.OpOverloadPacket
HigherOrderOperator = torch._ops.HigherOrderOperator


def schema_of(op: OpOverload) -> torch.FunctionSchema:
    """Return an operator's schema: names, defaults and writes of its arguments.

    Public: none; `torch.library.infer_schema` reads a Python function.
    """
    return op._schema


# The collectives that `torch.compile` keeps in its graphs. Public: `torch.distributed`'s own are
# not functional: they write their output, and a graph cannot move them.
COLLECTIVES = torch.ops._c10d_functional

# Targets of nodes in a Dynamo graph: what `torch.no_grad`, `torch.autocast` and
# `torch.inference_mode` become. Public: none.
set_grad_enabled = torch._C._set_grad_enabled
enter_autocast = torch.amp.autocast_mode._enter_autocast
ENTERS = enter_autocast, grad_mode._enter_inference_mode
EXITS = torch.amp.autocast_mode._exit_autocast, grad_mode._exit_inference_mode


def storage_of(x: torch.Tensor) -> int:
    """Return a number that views of one memory share, and fake tensors have too.

    Public: `untyped_storage().data_ptr()`, which is 0 for every fake tensor.
    """
    return x.untyped_storage()._cdata


# --- what a tensor is -----------------------------------------------------------------------------

# Whether a tensor is a wrapper of torch.func (vmap, grad), which has no memory. Public: none.
is_functorch_wrapped_tensor = torch._C._functorch.is_functorch_wrapped_tensor
# Whether a tensor is one that AOTAutograd traces, as operators see it. Public: none.
is_functional_tensor = torch._is_functional_tensor
# Whether a tensor wraps others, as a DTensor does. Its memory may be theirs. Public: none.
is_wrapper = is_traceable_wrapper_subclass
# Whether a tensor is a zero without memory, as autograd makes them. Public: none.
is_zero_tensor = torch._is_zerotensor
# Whether any tensor of the arguments, also in lists, requires a gradient. Public: `requires_grad`
# of each, in a loop that takes about three times as long.
any_requires_grad = torch._C._any_requires_grad

# --- dispatch -------------------------------------------------------------------------------------

# A context in which operators skip autograd. Public: none; `torch.no_grad` still runs its kernels.
BelowAutograd = torch._C._AutoDispatchBelowAutograd
# The dispatch keys below autograd, for `redispatch`. Public: none.
AFTER_AUTOGRAD = torch._C._after_autograd_keyset
# A context in which operators skip the given dispatch keys. Public: `torch.autocast(device,
# enabled=False)`, which clears the cache of casts when it ends and costs several times as much.
ExcludeKeys = torch._C._ExcludeDispatchKeyGuard
AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.AutocastCUDA
)

# --- autograd and transforms ----------------------------------------------------------------------

# Whether a transform of torch.func runs. Public: none.
transforms_are_active = torch._C._are_functorch_transforms_active
# Whether operators record tangents, and a context that sets it. Public: none.
is_fwd_grad_enabled = torch._C._is_fwd_grad_enabled
set_fwd_grad_enabled = forward_ad._set_fwd_grad_enabled


class SingleLevelFunction(_SingleLevelFunction):
    """Be an autograd function of one level of transforms, the one that the dispatcher has reached.

    Under a transform its `apply` needs the context `enable_single_level_autograd_function`. Public:
    `torch.autograd.Function`, which would begin with all transforms again.
    """

    @staticmethod
    def _compiled_autograd_key(ctx) -> tuple:
        """Return what compiled autograd tells nodes apart by."""
        return (ctx._autograd_function_id,)


# --- Dynamo, without its import -------------------------------------------------------------------

# `set_code_exec_strategy(function.__code__, SKIP)` keeps Dynamo out of a function and of what it
# calls, at no cost per call. Public: `torch.compiler.disable`, which imports Dynamo and wraps every
# call.
SKIP = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)


def constant_in_graphs(method: F) -> F:
    """Have Dynamo call a method while it traces, and take its result as a constant.

    Dynamo looks the method up by its ``__name__`` on a module.

    Public: `torch.compiler.assume_constant_result`, which imports Dynamo.
    """
    method._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return method


# --- modules and process groups -------------------------------------------------------------------


def pre_hooks(module: nn.Module) -> dict:
    """Return the hooks that may change a module's input before its forward. Public: none."""
    return module._forward_pre_hooks


def backend_of(group: torch.distributed.ProcessGroup, kind: str) -> str:
    """Return the backend of a group for a device type; a RuntimeError says that it has none.

    Public: `torch.distributed.get_backend`, which names one backend whatever the device.
    """
    return group._get_backend(torch.device(kind)).name()


def sharding_propagator() -> Any:
    """Return DTensor's table of sharding rules, by operator.

    Public: `torch.distributed.tensor.experimental.register_sharding`, which knows no rule that
    depends on flags or absent tensors. The rules refine what it registers.
    """
    from torch.distributed.tensor import DTensor

    return DTensor._op_dispatcher.sharding_propagator


def result_shapes(op: OpOverload, args: tuple, flags: dict) -> list[torch.Size]:
    """Return the shapes that DTensor gives the results of a call whose tensors are specs.

    Public: none; rules see the arguments alone.
    """
    from torch.distributed.tensor._op_schema import OpSchema

    propagator = sharding_propagator()
    schema = OpSchema(op, args, flags, propagator.op_to_schema_info[op])
    found = propagator._propagate_tensor_meta(schema)
    # one result is a named tuple
    return [x.shape for x in ([found] if hasattr(found, "shape") else found)]


# --- what is imported when it is first asked for --------------------------------------------------

LATER = {
    # the base class of a graph pass whose hash is part of Inductor's cache key, and that hash
    "CustomGraphPass": "torch._inductor.custom_graph_pass",
    "get_hash_for_files": "torch._inductor.custom_graph_pass",
    # Inductor as a backend, its settings, and the settings of a mode. Public: none;
    # `torch.compile` calls a backend of ours, which must call Inductor.
    "compile_fx": "torch._inductor.compile_fx",
    "inductor_config": "torch._inductor.config",
    "list_mode_options": "torch._inductor",
    # Public: the entry point `torch_dynamo_backends`, which only an installed package has.
    "register_backend": "torch._dynamo",
    # tensors without values, which no check may read. Public: none.
    "FakeTensor": "torch._subclasses.fake_tensor",
    "FunctionalTensor": "torch._subclasses.functional_tensor",
    # the class of nested tensors with layout jagged. Public: none.
    "NestedTensor": "torch.nested._internal.nested_tensor",
    # what DTensor's rules take and return. Public: none.
    "OpSchema": "torch.distributed.tensor._op_schema",
    "OpStrategy": "torch.distributed.tensor._op_schema",
    "RuntimeSchemaInfo": "torch.distributed.tensor._op_schema",
}


def __getattr__(name: str) -> Any:
    if name not in LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(LATER[name])
    value = module if name == "inductor_config" else getattr(module, name)
    globals()[name] = value
    return value


def takes_several_passes() -> bool:
    """Return whether `pre_grad_custom_pass` may be a list, as in torch 2.13 and later."""
    from torch._inductor import custom_graph_pass

    return hasattr(custom_graph_pass, "get_custom_graph_passes")
