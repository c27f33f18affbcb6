"""Check the tensors of a call. An error names the argument, what it must be, and what it is.

Shapes, dtypes and devices are always checked. Offsets, slots and counts are read on a CPU. With
KDA_OPS_CHECK=1 all values are read, on any device: on a GPU that synchronises. Symbolic tensors
have no values.
"""

from __future__ import annotations

import os
from typing import NoReturn

import torch
from torch import Tensor

from kda_ops.arguments import check_dense
from kda_ops.gates import Gate
from kda_ops.private import is_functional_tensor, is_functorch_wrapped_tensor

# The length that `safe_keys` allows: 1, plus what normalising and rounding in 16 bits may add.
SAFE_LENGTH = 1.0 + 2.0**-6
MAX_K = 256  # the widest key
CHECK_VALUES = os.environ.get("KDA_OPS_CHECK", "0") not in ("", "0")
_INPUT_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_INDEX_DTYPES = frozenset({torch.int32, torch.int64})


def shape_error(
    name: str, letters: str, want: tuple, got: Tensor | None, hint: str = ""
) -> NoReturn:
    """Raise an error about a tensor's shape, or about None, which a schema does not refuse."""
    shape = None if got is None else list(got.shape)
    raise ValueError(f"{name} must have shape {letters} = {list(want)}, got {shape}{hint}.")


def dtype_error(name: str, want: str, got: torch.dtype, hint: str = "") -> NoReturn:
    """Raise an error about a tensor's dtype."""
    raise TypeError(f"{name} must be {want}, got {got}{hint}.")


def check_on_device(name: str, x: Tensor, device: torch.device, of: str = "q") -> None:
    """Refuse a tensor that is not on `device`, where the argument named `of` is."""
    if x.device != device:
        raise TypeError(
            f"{name} must be on {device}, where {of} is, got {x.device}: move it there."
        )


def check_float(name: str, x: Tensor, device: torch.device, of: str = "q") -> None:
    """Check the dtype and device of a decay, a write strength or a gate parameter."""
    if x.dtype not in _INPUT_DTYPES:
        dtype_error(name, "float16, bfloat16, float32 or float64", x.dtype)
    check_on_device(name, x, device, of)


def check_index(name: str, x: Tensor, device: torch.device, of: str = "q") -> None:
    """Check the dtype and device of offsets or slots."""
    if x.dtype not in _INDEX_DTYPES:
        dtype_error(name, "int32 or int64", x.dtype)
    check_on_device(name, x, device, of)


def refuse_float64_on_cuda(name: str, x: Tensor) -> None:
    """Refuse a float64 tensor on CUDA, where no kernel computes in float64."""
    if x.dtype is torch.float64 and x.device.type == "cuda":
        raise TypeError(
            f"{name} must be float16, bfloat16 or float32 on CUDA, got torch.float64: float64 runs "
            "on CPU only."
        )


def check_vectors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Check q and k [B, T, H, K] and v [B, T, HV, V], which set the sizes of a call."""
    if q is None or k is None or v is None:  # a schema does not refuse None
        raise TypeError(
            f"{'q' if q is None else 'k' if k is None else 'v'} must be a tensor, got None."
        )
    shape, v_shape, dtype, device = q.shape, v.shape, q.dtype, q.device
    if len(shape) != 4:
        raise ValueError(f"q must have 4 dimensions [B, T, H, K], got shape {list(shape)}.")
    if k.shape != shape:
        shape_error("k", "[B, T, H, K]", tuple(shape), k, " (as q has)")
    B, T, H, K = shape
    if len(v_shape) != 4 or v_shape[0] != B or v_shape[1] != T:
        raise ValueError(
            f"v must have shape [B, T, HV, V] = [{B}, {T}, HV, V], with B and T of q, got "
            f"{list(v_shape)}."
        )
    HV = v_shape[2]
    if dtype not in _INPUT_DTYPES:
        dtype_error("q", "float16, bfloat16, float32 or (on CPU) float64", dtype)
    if k.dtype != dtype or v.dtype != dtype:
        raise TypeError(
            f"q, k and v must share one dtype, got {dtype}, {k.dtype} and {v.dtype}: cast "
            "them to the same one."
        )
    if k.device != device or v.device != device:
        raise TypeError(
            f"q, k and v must be on one device, got {device}, {k.device} and {v.device}: move "
            "them together."
        )
    refuse_float64_on_cuda("q", q)
    if K < 1 or K > MAX_K:
        raise ValueError(
            f"K, the last dimension of q and k, must be between 1 and {MAX_K}, got {K}."
        )
    if HV % H if H else HV:
        raise ValueError(
            "HV must be a multiple of H: value head h reads key head h // (HV // H); got HV = "
            f"{HV} (v) and H = {H} (q)."
        )


def check_decay(rank: int, g: Tensor | None, sizes: tuple, device: torch.device) -> None:
    """Check g [B, T, HV, K], or [B, T, HV] when the decay has rank 0; sizes are B, T, HV, K."""
    B, T, HV, K = sizes
    if g is not None:
        want = (B, T, HV, K) if rank else (B, T, HV)
        if g.shape != want:
            hint = ""
            if not rank and g.shape == (B, T, HV, K):
                hint = ": a decay per key channel is KDA's, call the kda operator"
            elif rank and g.shape == (B, T, HV):
                hint = ": one decay per head is GDN's, call the gdn operator"
            shape_error("g", "[B, T, HV, K]" if rank else "[B, T, HV]", want, g, hint)
        check_float("g", g, device)


def check_beta(
    beta: Tensor | None, sizes: tuple, sigmoid: bool, doubled: bool, device: torch.device
) -> None:
    """Check beta [B, T, HV], and the flags that activate it; sizes begin with B, T, HV."""
    B, T, HV, _ = sizes
    if beta is not None:
        if beta.shape != (B, T, HV):
            shape_error("beta", "[B, T, HV]", (B, T, HV), beta)
        check_float("beta", beta, device)
    elif sigmoid:
        raise ValueError(
            "beta must be given with use_beta_sigmoid_in_kernel=True, got None: pass raw "
            "logits, or drop the flag."
        )
    if doubled and not sigmoid:
        raise ValueError(
            "allow_neg_eigval=True doubles the sigmoid of beta and needs "
            "use_beta_sigmoid_in_kernel=True: set that flag too, or pass an activated beta in "
            "[0, 2]."
        )


def check_gate(
    rank: int,
    g: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    gate: Gate,
    sizes: tuple,
    device: torch.device,
) -> None:
    """Check the gate's parameters, and that the gate needs them; sizes are B, T, HV, K."""
    HV, K = sizes[2:]
    if gate.inside:
        if g is None:
            raise ValueError(
                "g must be given with use_gate_in_kernel=True, got None: pass raw logits, or "
                "drop the flag."
            )
        check_gate_parameters(rank, HV, K, A_log, dt_bias, gate, device)
    elif A_log is not None or dt_bias is not None:
        name = "A_log" if A_log is not None else "dt_bias"
        raise ValueError(
            f"{name} is a parameter of the gate and needs use_gate_in_kernel=True: set "
            "it and pass raw logits as g, or drop the parameter."
        )


def check_gate_parameters(
    rank: int,
    HV: int,
    K: int,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    gate: Gate,
    device: torch.device,
    of: str = "q",
) -> None:
    """Check A_log [HV] and dt_bias of a gate that the operator activates.

    dt_bias is [HV, K] or flat, or [HV] when the decay has rank 0. Both must be on `device`, where
    the argument named `of` is.
    """
    if A_log is None:
        if gate.needs_log:
            raise ValueError(
                "A_log must be given to activate the gate, whose factor is exp(A_log): only the "
                "bounded gate (lower_bound=...) has a factor of 1 without it."
            )
    else:
        if A_log.shape != (HV,):
            shape_error("A_log", "[HV]", (HV,), A_log)
        check_float("A_log", A_log, device, of)
    if dt_bias is not None:
        if rank:
            if dt_bias.shape != (HV, K) and dt_bias.shape != (HV * K,):
                shape_error(
                    "dt_bias",
                    "[HV, K]",
                    (HV, K),
                    dt_bias,
                    f" (flat [HV * K] = [{HV * K}] is accepted too)",
                )
        elif dt_bias.shape != (HV,):
            shape_error("dt_bias", "[HV]", (HV,), dt_bias)
        check_float("dt_bias", dt_bias, device, of)


def check_offsets(
    cu_seqlens: Tensor, B: int, T: int | None, device: torch.device, of: str = "q"
) -> None:
    """Check the offsets [N + 1] of sequences packed into one row of T tokens.

    With T None the row is spread over several ranks, and the values are not read.
    """
    if not isinstance(cu_seqlens, Tensor):
        raise TypeError(
            "cu_seqlens must be an int32 or int64 tensor of shape [N + 1], got "
            f"{type(cu_seqlens).__name__}: torch.tensor(...) makes one."
        )
    check_dense("cu_seqlens", cu_seqlens)
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        raise ValueError(f"cu_seqlens must have shape [N + 1], got {list(cu_seqlens.shape)}.")
    check_index("cu_seqlens", cu_seqlens, device, of)
    if B != 1:
        row = f"{of} and every other tensor with tokens"
        hint = f"reshape {row} to [1, B * T, ...]"
        if B == 0:  # the offsets of such a row are zeros, too
            hint = f"pass {row} as [1, 0, ...], and offsets of 0"
        raise ValueError(
            f"cu_seqlens packs its sequences into one row and needs B == 1, got B = {B}: {hint}."
        )
    if T is not None and can_read(cu_seqlens):
        _check_cu_seqlens(cu_seqlens, T)


def check_no_overlap(name: str, x: Tensor) -> None:
    """Refuse a pool or cache of which two elements may share a place."""
    if not x.is_contiguous() and _overlaps(x):
        raise ValueError(
            f"{name} must not overlap itself, because it is written in place, got strides "
            f"{list(x.stride())}: clone it."
        )


def _overlaps(x: Tensor) -> bool:
    """Return whether two elements may share an address.

    There is no overlap if each stride exceeds what the smaller strides reach. Symbolic sizes are
    skipped: the operator checks them when it runs.
    """
    if any(isinstance(size, int) and size == 0 for size in x.shape):
        return False
    reach = 0
    steps = [
        (stride, size)
        for size, stride in zip(x.shape, x.stride())
        if isinstance(size, int) and isinstance(stride, int) and size > 1
    ]
    for stride, size in sorted(steps):
        if stride <= reach:
            return True
        reach += (size - 1) * stride
    return False


# --- values ---------------------------------------------------------------------------------------


def is_symbolic(x: Tensor) -> bool:
    """Return whether x has no values: it is traced, fake or on the meta device."""
    if torch.compiler.is_compiling() or x.is_meta:
        return True
    if type(x) is not Tensor:  # saves the import at most calls
        from kda_ops.private import FakeTensor, FunctionalTensor

        if isinstance(x, (FakeTensor, FunctionalTensor)):
            return True
    # layers see functorch's wrappers, operators see functional tensors
    return is_functorch_wrapped_tensor(x) or is_functional_tensor(x)


def can_read(x: Tensor) -> bool:
    """Return whether to check offsets, slots or counts: on a CPU, or with KDA_OPS_CHECK=1."""
    return (CHECK_VALUES or x.device.type == "cpu") and not is_symbolic(x)


def _check_cu_seqlens(cu_seqlens: Tensor, T: int) -> None:
    offsets = cu_seqlens.tolist()
    if offsets[0] != 0 or any(a > b for a, b in zip(offsets, offsets[1:])) or offsets[-1] > T:
        raise ValueError(
            f"cu_seqlens must start at 0, never decrease and end at or before T = {T}, got "
            f"{offsets}."
        )


def check_decay_values(g: Tensor, bound: float | None) -> None:
    """Refuse decays above 0, or below the bound that `safe_gate` promises."""
    if g.numel() and not bool((g <= 0).all()):
        raise ValueError(
            f"g must be at most 0 (natural-log decay), got a maximum of {g.max().item()}: pass "
            "raw logits with use_gate_in_kernel=True."
        )
    if bound is not None and g.numel() and bool((g < bound).any()):
        raise ValueError(
            f"g must stay in [{bound}, 0] as safe_gate=True promises, got a minimum of "
            f"{g.min().item()}."
        )


def check_beta_values(beta: Tensor, safe: bool) -> None:
    """Refuse a beta outside [0, 2], or outside [0, 1] if `safe_beta` promises that."""
    if not beta.numel() or bool(((beta >= 0) & (beta <= (1 if safe else 2))).all()):
        return
    low, high = beta.min().item(), beta.max().item()
    if safe:
        raise ValueError(
            f"beta must lie in [0, 1] as safe_beta=True promises, got {low} to {high}: drop the "
            "flag, or pass raw logits with use_beta_sigmoid_in_kernel=True."
        )
    raise ValueError(
        f"beta must lie in [0, 2], got {low} to {high}: pass raw logits with "
        "use_beta_sigmoid_in_kernel=True."
    )


def check_key_lengths(k: Tensor) -> None:
    """Refuse keys longer than SAFE_LENGTH, which `safe_keys` excludes."""
    lengths = k.to(torch.promote_types(k.dtype, torch.float32)).norm(dim=-1)
    if lengths.numel() and not bool((lengths <= SAFE_LENGTH).all()):
        raise ValueError(
            "k must have keys of at most unit length as safe_keys=True promises, got a length of "
            f"{lengths.max().item()}: drop the flag, or set use_qk_l2norm_in_kernel=True."
        )


def check_null_slot(null_slot: int, slots: Tensor | None, name: str) -> None:
    """Check the number up to which slots are nobody's; `name` is the table of slots."""
    if not -1 <= null_slot < 2**31:
        raise ValueError(
            f"null_slot must lie between -1 and 2**31 - 1, got {null_slot}: negative slots are "
            "nobody's in any case."
        )
    if slots is None and null_slot != -1:
        raise ValueError(
            f"null_slot must be -1 without {name}, because then sequence n has slot n, got "
            f"{null_slot}: pass {name}, or drop null_slot."
        )


def without_null(slots: Tensor, null_slot: int) -> Tensor:
    """Return a table of slots with -1 in the place of slots up to `null_slot`."""
    return slots if null_slot < 0 else slots.where(slots > null_slot, -1)


def check_resumed(resumed: Tensor, N: int, device: torch.device, of: str = "q") -> None:
    """Check has_initial_state [N], which tells whether sequences start from their slots."""
    if resumed.shape != (N,):
        shape_error("has_initial_state", "[N]", (N,), resumed)
    if resumed.dtype is not torch.bool:
        dtype_error("has_initial_state", "bool", resumed.dtype, ": compare, such as lengths > 0")
    check_on_device("has_initial_state", resumed, device, of)


def check_slots(slots: Tensor, count: int, name: str, written: bool = True) -> None:
    """Refuse slots that a pool of `count` does not have, and a slot named twice that is written."""
    live = [slot for slot in slots.flatten().tolist() if slot >= 0]
    check_range(live, count, name)
    if written and len(set(live)) != len(live):
        twice = next(slot for slot in live if live.count(slot) > 1)
        raise ValueError(
            f"{name} must name distinct slots, because the call writes each of them, got slot "
            f"{twice} twice: copy what sequences share to a slot for each."
        )


def check_readers(own: Tensor, into: Tensor) -> None:
    """Refuse a snapshot in a slot that another sequence reads: own [N], into [N, snapshots]."""
    readers = own.tolist()
    for n, row in enumerate(into.tolist()):
        for slot in row:
            if slot >= 0 and any(slot == s for m, s in enumerate(readers) if m != n):
                raise ValueError(
                    f"snapshot_indices must not name the slot of another sequence, got slot {slot} "
                    f"for sequence {n}: the other one may read it before or after the write."
                )


def check_token_slots(
    indices: Tensor, accepted: Tensor | None, source: Tensor | None, lengths: list[int], count: int
) -> None:
    """Refuse slots that a pool does not have, and a slot that one sequence writes and another uses.

    Sequence n of `lengths[n]` tokens reads the column of its accepted token, or a slot of another
    pool (`source`), and writes the columns of its tokens. It does neither if it has no tokens, or
    no slot to read.
    """
    rows = indices.tolist()
    check_range([slot for row in rows for slot in row], count, "state_indices")
    starts = [1] * len(rows) if accepted is None else accepted.tolist()
    elsewhere = None if source is None else source.tolist()
    read: dict[int, int] = {}  # slots by sequence
    writer: dict[int, int] = {}  # sequences by slot
    for n, (row, start, length) in enumerate(zip(rows, starts, lengths)):
        if elsewhere is None:
            if not length or not 1 <= start <= len(row) or row[start - 1] < 0:
                continue
            read[n] = row[start - 1]
        elif not length or elsewhere[n] < 0:
            continue
        for slot in row[:length]:
            if slot >= 0 and writer.setdefault(slot, n) != n:
                raise ValueError(
                    "state_indices must not let two sequences write one slot, got slot "
                    f"{slot}, which sequences {writer[slot]} and {n} write: give each sequence "
                    "slots of its own."
                )
    for n, slot in read.items():
        if writer.get(slot, n) != n:
            raise ValueError(
                "state_indices must not let a sequence write a slot that another one reads, got "
                f"slot {slot}, which sequence {writer[slot]} writes and sequence {n} reads: let "
                "both write slots of their own."
            )


def check_range(slots: list[int], count: int, name: str) -> None:
    """Refuse slots that a pool of `count` does not have."""
    if (most := max(slots, default=-1)) >= count:
        raise ValueError(f"{name} must be below the number of slots, {count}, got {most}.")


def check_accepted(accepted: Tensor, indices: Tensor) -> None:
    """Refuse counts that are no column of the slots, except of sequences without a slot."""
    columns, live = indices.shape[1], accepted[(indices >= 0).any(1)]
    if live.numel() and (int(live.min()) < 1 or int(live.max()) > columns):
        raise ValueError(
            f"num_accepted_tokens must lie between 1 and S = {columns}, the columns of "
            f"state_indices, got {accepted.tolist()}."
        )


def check_columns(lengths: list[int], indices: Tensor) -> None:
    """Refuse a sequence with more tokens than it has slots, except one without a slot."""
    columns, live = indices.shape[1], (indices >= 0).any(1).tolist()
    longest = max((length for length, some in zip(lengths, live) if some), default=0)
    if longest > columns:
        raise ValueError(
            "state_indices must name a slot for every token, shape [N, S] with S at least "
            f"{longest}, the longest sequence, got S = {columns}."
        )
