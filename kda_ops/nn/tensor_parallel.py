"""Shard the heads of the layers over the ranks of a mesh dimension: tensor parallelism.

`HeadParallel` is a style for `torch.distributed.tensor.parallel.parallelize_module`, used with
torch's own styles for the rest of a model. Parameters become DTensors::

    sharded by heads     q_proj k_proj v_proj b_proj, q_conv1d k_conv1d v_conv1d, A_log dt_bias,
                         the last of f_proj (a_proj) and of g_proj; o_proj by columns
    replicated           what heads share: the first of f_proj and of g_proj, o_norm

Heads do not interact, so between its two ends a layer computes locally. Packed sequences, padding,
caches and context parallelism along another mesh dimension work as on one process.

There is one collective each way, as with ``ColwiseParallel`` and ``RowwiseParallel`` around an MLP.
Forward sums the outputs over the ranks, backward the gradients of x. Backward also sums the
gradients of replicated parameters. `kda_ops.registrations.sharding` shards operators that are
called with DTensors, by the same rule.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import ParallelStyle

from kda_ops.arguments import check_dense
from kda_ops.checks import is_symbolic
from kda_ops.distributed.plan import agree, place_of
from kda_ops.nn.delta_attention import DeltaAttention
from kda_ops.nn.local import LocalLinear


class HeadParallel(ParallelStyle):
    """Shard the heads of a `KimiDeltaAttention` or `GatedDeltaNet` over a mesh of one dimension.

    Apply it before `fully_shard`. The size of the mesh must divide num_heads. Call ``new_cache``
    afterwards: the cache holds this rank's heads.

    Args:
        input_layouts: placement of a plain x ``[B, T, hidden_size]``: ``Replicate()`` (the
            default), or ``Shard(1)`` in a model with sequence parallelism. A DTensor has its own.
        output_layouts: placement of the output, likewise.
        use_local_output: return this rank's plain tensor instead of a DTensor.

    A plain x with ``Shard(1)`` must have the same length on every rank, because a rank takes the
    others' lengths from its own. An eager call compares the ranks' x on the host first. Compiled
    code and captured CUDA graphs do not. In compiled code the size of the mesh must divide the
    length of the whole x. In eager code a DTensor may have any length, and
    ``use_local_output=False`` returns one.

    Raises:
        TypeError: when applied, the module is not one of these layers.
        ValueError: when applied, the mesh does not divide num_heads. In an eager call with
            ``Shard(1)``, on every rank: plain x differ between ranks in shape, dtype or whether
            their gradient is wanted.
        RuntimeError: in such a call, a rank does not take part within the timeout.

    Example:
        >>> import torch, torch.distributed as dist, kda_ops.nn
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> from torch.distributed.tensor.parallel import (
        ...     ColwiseParallel, RowwiseParallel, parallelize_module)
        >>> from kda_ops.nn.tensor_parallel import HeadParallel
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> block = torch.nn.Sequential(
        ...     kda_ops.nn.KimiDeltaAttention(64, head_dim=16, num_heads=4),
        ...     torch.nn.Linear(64, 256), torch.nn.Linear(256, 64))
        >>> plan = {"0": HeadParallel(), "1": ColwiseParallel(), "2": RowwiseParallel()}
        >>> block = parallelize_module(block, init_device_mesh("cpu", (1,)), plan)
        >>> block(torch.randn(2, 100, 64)).shape, block[0].A_log.placements
        (torch.Size([2, 100, 64]), (Shard(dim=0),))
        >>> dist.destroy_process_group()

    Source: Megatron-LM, arXiv:1909.08053 (attention by heads).
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ):
        super().__init__()
        self.input_layouts, self.output_layouts, self.use_local_output = (
            input_layouts or Replicate(),
            output_layouts or Replicate(),
            use_local_output,
        )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, DeltaAttention):
            raise TypeError(
                "HeadParallel shards the heads of KimiDeltaAttention and GatedDeltaNet, got "
                f"{type(module).__name__}."
            )
        if device_mesh.ndim != 1 or module.num_heads % device_mesh.size():
            raise ValueError(
                "HeadParallel needs a mesh of one dimension that divides num_heads = "
                f"{module.num_heads}, got the sizes {list(device_mesh.mesh.shape)}."
            )
        for name, part in module.named_modules():
            for key, parameter in part.named_parameters(recurse=False):
                part.register_parameter(
                    key, _distribute(parameter, device_mesh, _placement(f"{name}.{key}"))
                )
            if type(part) is nn.Linear:
                part.__class__ = LocalLinear
        module.head_ranks = device_mesh.size()
        module.register_forward_pre_hook(partial(self._enter, device_mesh), with_kwargs=True)
        module.register_forward_hook(partial(self._leave, device_mesh))
        return module

    def _enter(
        self, mesh: DeviceMesh, module: nn.Module, args: tuple, kwargs: dict
    ) -> tuple[tuple, dict]:
        """Replace x by a replicated plain tensor, whose gradients are summed over the ranks."""
        x = args[0] if args else kwargs["x"]
        if not isinstance(x, DTensor):
            if self.input_layouts in (Shard(1), Shard(-2)):
                _compare(x, mesh)
            x = DTensor.from_local(x, mesh, [self.input_layouts], run_check=False)
        x = x.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
        return ((x, *args[1:]), kwargs) if args else (args, kwargs | {"x": x})

    def _leave(self, mesh: DeviceMesh, module: nn.Module, args: tuple, y: Tensor) -> Tensor:
        """Sum the output over the heads of all ranks."""
        y = DTensor.from_local(y, mesh, [Partial()], run_check=False).redistribute(
            placements=[self.output_layouts]
        )
        return y.to_local() if self.use_local_output else y


def _compare(x: Tensor, mesh: DeviceMesh) -> None:
    """Refuse shards of tokens from which the ranks cannot gather one x.

    `DTensor.from_local` takes the other shards to be as long as this one: with other lengths
    collectives abort or hang. Neither a compiled nor a captured graph can raise, so both compare
    nothing.
    """
    if isinstance(x, Tensor) and is_symbolic(x):
        return
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return

    def contract(_) -> dict[str, object]:
        if not isinstance(x, Tensor):
            return {"x": type(x).__name__}
        shape = ", ".join("T" if axis == 1 else str(n) for axis, n in enumerate(x.shape))
        return {
            "x": f"{x.dtype} [{shape}]",
            "a gradient of x wanted": torch.is_grad_enabled() and x.requires_grad,
        }

    plan, _ = agree(mesh, *place_of(x), None, "HeadParallel", lambda: check_dense("x", x), contract)
    lengths = plan.lengths or ()
    if len(set(lengths)) > 1:
        raise ValueError(
            "x must have the same length on every rank, because HeadParallel shards a plain x by "
            f"input_layouts=Shard(1), got T = {', '.join(map(str, lengths))} by rank: pass a "
            "DTensor, or the whole x with input_layouts=Replicate()."
        )


def _placement(name: str) -> Placement:
    """Return the placement of a layer's parameter.

    What heads share is replicated. ``o_proj`` has its heads on axis 1, all others on axis 0.
    """
    if name.startswith(("f_proj.0.", "g_proj.0.", "o_norm.")):
        return Replicate()
    return Shard(1) if name.startswith("o_proj.") else Shard(0)


def _distribute(parameter: nn.Parameter, mesh: DeviceMesh, placement: Placement) -> nn.Parameter:
    spread = nn.Parameter(
        distribute_tensor(parameter, mesh, [placement]), requires_grad=parameter.requires_grad
    )
    spread.__dict__.update(parameter.__dict__)  # keeps _no_weight_decay
    return spread
