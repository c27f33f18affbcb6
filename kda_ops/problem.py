"""Validate one operator call and allocate its outputs, for kernels and fake implementations alike.

A `Problem` names every size of a call and holds its tensors and flags. It refuses calls that mean
nothing. Under ``torch.compile`` sizes may be symbolic, so it compares sizes and never branches on
them. It reads shapes, dtypes and devices; values only as the last section says.
"""

from __future__ import annotations

import math
import os
from typing import Any, NoReturn

import torch
from torch import Tensor

from kda_ops.arguments import check_dense
from kda_ops.private import is_functional_tensor, is_functorch_wrapped_tensor

CHUNK = 64  # tokens per chunk, C in docs/maths.md
MAX_K = 256
SAFE_BOUND = -5.0  # what `safe_gate` promises when no lower_bound names another bound
# The length that `safe_keys` allows: 1, plus what normalising and rounding in 16 bits may add.
SAFE_LENGTH = 1.0 + 2.0**-6
# whether to check values too, which costs a synchronisation on a GPU
CHECK_VALUES = os.environ.get("KDA_OPS_CHECK", "0") not in ("", "0")

_INPUT_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_INDEX_DTYPES = frozenset({torch.int32, torch.int64})


def shape_error(name: str, letters: str, want: tuple, got: Tensor, hint: str = "") -> NoReturn:
    """Raise an error about a tensor's shape."""
    raise ValueError(
        f"{name} must have shape {letters} = {list(want)}, got {list(got.shape)}{hint}."
    )


def _dtype_error(name: str, want: str, got: torch.dtype, hint: str = "") -> NoReturn:
    raise TypeError(f"{name} must be {want}, got {got}{hint}.")


def _check_there(name: str, x: Tensor, device: torch.device, of: str = "q") -> None:
    if x.device != device:
        raise TypeError(
            f"{name} must be on {device}, where {of} is, got {x.device}: move it there."
        )


def check_float(name: str, x: Tensor, device: torch.device, of: str = "q") -> None:
    """Check the dtype and device of a decay, a write strength or a gate parameter."""
    if x.dtype not in _INPUT_DTYPES:
        _dtype_error(name, "float16, bfloat16, float32 or float64", x.dtype)
    _check_there(name, x, device, of)


def check_index(name: str, x: Tensor, device: torch.device, of: str = "q") -> None:
    """Check the dtype and device of offsets or slots."""
    if x.dtype not in _INDEX_DTYPES:
        _dtype_error(name, "int32 or int64", x.dtype)
    _check_there(name, x, device, of)


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
        raise ValueError(
            f"cu_seqlens packs its sequences into one row and needs B == 1, got B = {B}: reshape "
            f"{of} and every other tensor with tokens to [1, B * T, ...]."
        )
    if T is not None and can_read(cu_seqlens):
        _check_cu_seqlens(cu_seqlens, T)


def check_lower_bound(lower_bound: float | None) -> None:
    """Refuse a bound that no decay can have."""
    if lower_bound is not None and not -math.inf < lower_bound < 0.0:
        raise ValueError(
            "lower_bound must be a finite number below 0 (natural log; the lower limit of the "
            f"gate), got {lower_bound}."
        )


def check_gate_parameters(
    rank: int,
    HV: int,
    K: int,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float | None,
    device: torch.device,
    of: str = "q",
) -> None:
    """Check A_log [HV] and dt_bias of a gate that the operator activates.

    dt_bias is [HV, K] or flat, or [HV] when the decay has rank 0. Both must be on `device`, where
    the argument named `of` is.
    """
    if A_log is None:
        if lower_bound is None:
            raise ValueError(
                "A_log must be given to activate the gate -exp(A_log) * softplus(g + dt_bias); "
                "only the bounded gate (lower_bound=...) does not need it."
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


class Problem:
    """The sizes, tensors and flags of one call to an operator of either variant.

    Sizes: B batch, T tokens, N sequences, H query/key heads, HV value heads (a multiple of H), K
    and V widths. `rank` is the rank of the decay per token and value head: 1 for KDA (a K-vector),
    0 for GDN (a scalar). `state_dtype` is the dtype of states and of all sums: float32, or float64
    when q is.

    `scratch` is None, or a dictionary. The stages of one pass keep there what they compute from the
    inputs and share.
    """

    __slots__ = (
        "rank",
        "q",
        "k",
        "v",
        "g",
        "beta",
        "A_log",
        "dt_bias",
        "state",
        "cu_seqlens",
        "state_indices",
        "num_accepted_tokens",
        "snapshot_indices",
        "B",
        "T",
        "N",
        "H",
        "HV",
        "K",
        "V",
        "scale",
        "l2norm",
        "activate_gate",
        "lower_bound",
        "safe_gate",
        "safe_beta",
        "safe_keys",
        "sigmoid_beta",
        "neg_eigval",
        "transposed",
        "disable_recompute",
        "output_final_state",
        "snapshot_every",
        "state_dtype",
        "scratch",
    )

    def __init__(
        self,
        rank: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor | None,
        beta: Tensor | None,
        A_log: Tensor | None,
        dt_bias: Tensor | None,
        cu_seqlens: Tensor | None,
        scale: float | None = None,
        use_qk_l2norm_in_kernel: bool = False,
        use_gate_in_kernel: bool = False,
        lower_bound: float | None = None,
        safe_gate: bool = False,
        safe_beta: bool = False,
        safe_keys: bool = False,
        use_beta_sigmoid_in_kernel: bool = False,
        allow_neg_eigval: bool = False,
        transpose_state_layout: bool = False,
        output_final_state: bool = False,
        disable_recompute: bool = False,
    ):
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
        HV, V = v_shape[2], v_shape[3]
        if dtype not in _INPUT_DTYPES:
            _dtype_error("q", "float16, bfloat16, float32 or (on CPU) float64", dtype)
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
        if dtype is torch.float64:
            if device.type == "cuda":
                raise TypeError(
                    "q must be float16, bfloat16 or float32 on CUDA, got torch.float64: float64 "
                    "runs on CPU only."
                )
            self.state_dtype = torch.float64
        else:
            self.state_dtype = torch.float32
        if K < 1 or K > MAX_K:
            raise ValueError(
                f"K, the last dimension of q and k, must be between 1 and {MAX_K}, got {K}."
            )
        if HV % H if H else HV:
            raise ValueError(
                "HV must be a multiple of H: value head h reads key head h // (HV // H); got HV = "
                f"{HV} (v) and H = {H} (q)."
            )
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
        if beta is not None:
            if beta.shape != (B, T, HV):
                shape_error("beta", "[B, T, HV]", (B, T, HV), beta)
            check_float("beta", beta, device)
        elif use_beta_sigmoid_in_kernel:
            raise ValueError(
                "beta must be given with use_beta_sigmoid_in_kernel=True, got None: pass raw "
                "logits, or drop the flag."
            )
        if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
            raise ValueError(
                "allow_neg_eigval=True doubles the sigmoid of beta and needs "
                "use_beta_sigmoid_in_kernel=True: set that flag too, or pass an activated beta in "
                "[0, 2]."
            )
        if lower_bound is not None:
            check_lower_bound(lower_bound)
        if use_gate_in_kernel:
            if g is None:
                raise ValueError(
                    "g must be given with use_gate_in_kernel=True, got None: pass raw logits, or "
                    "drop the flag."
                )
            check_gate_parameters(rank, HV, K, A_log, dt_bias, lower_bound, device)
        else:
            if A_log is not None or dt_bias is not None:
                name = "A_log" if A_log is not None else "dt_bias"
                raise ValueError(
                    f"{name} is a parameter of the gate and needs use_gate_in_kernel=True: set "
                    "it and pass raw logits as g, or drop the parameter."
                )
            if lower_bound is not None and not safe_gate:
                raise ValueError(
                    "lower_bound must be None without use_gate_in_kernel=True (or safe_gate=True "
                    f"of chunk, which promises that bound), got {lower_bound}: "
                    "pass raw logits with use_gate_in_kernel=True, or drop it."
                )
        if cu_seqlens is None:
            self.N = B
        else:
            check_offsets(cu_seqlens, B, T, device, "q")
            self.N = cu_seqlens.shape[0] - 1
        self.rank, self.q, self.k, self.v, self.g, self.beta = rank, q, k, v, g, beta
        self.A_log, self.dt_bias = A_log, dt_bias
        # kernels read it with stride 1
        self.cu_seqlens = None if cu_seqlens is None else cu_seqlens.contiguous()
        self.B, self.T, self.H, self.HV, self.K, self.V = B, T, H, HV, K, V
        if scale is not None and not -math.inf < scale < math.inf:
            raise ValueError(f"scale must be a finite number, got {scale}.")
        self.scale = K**-0.5 if scale is None else scale
        self.l2norm, self.activate_gate, self.lower_bound, self.safe_gate = (
            use_qk_l2norm_in_kernel,
            use_gate_in_kernel,
            lower_bound,
            safe_gate,
        )
        self.sigmoid_beta, self.neg_eigval, self.transposed = (
            use_beta_sigmoid_in_kernel,
            allow_neg_eigval,
            transpose_state_layout,
        )
        self.safe_beta, self.safe_keys = safe_beta, safe_keys
        self.output_final_state, self.disable_recompute = output_final_state, disable_recompute
        self.state: Tensor | None = None
        self.state_indices: Tensor | None = None
        self.num_accepted_tokens: Tensor | None = None
        self.snapshot_indices: Tensor | None = None
        self.snapshot_every = 1
        self.scratch: dict[str, Any] | None = None

    @classmethod
    def parse(
        cls,
        rank,
        q,
        k,
        v,
        g,
        beta,
        A_log=None,
        dt_bias=None,
        initial_state=None,
        cu_seqlens=None,
        **flags,
    ) -> Problem:
        """Parse a call of `chunk` or `recurrent`: whole sequences, optional initial state."""
        p = cls(rank, q, k, v, g, beta, A_log, dt_bias, cu_seqlens, **flags)
        if initial_state is not None:
            p._take_state("initial_state", "N", p.N, initial_state, pool=False)
        p._check_gates()
        return p

    @classmethod
    def parse_step(
        cls,
        rank,
        q,
        k,
        v,
        g,
        beta,
        state,
        state_indices=None,
        num_accepted_tokens=None,
        A_log=None,
        dt_bias=None,
        cu_seqlens=None,
        **flags,
    ) -> Problem:
        """Parse a call of `recurrent_`: decode on a state pool."""
        p = cls(rank, q, k, v, g, beta, A_log, dt_bias, cu_seqlens, **flags)
        p._take_pool(state, state_indices)
        if num_accepted_tokens is not None:
            if state_indices is None or state_indices.dim() != 2:
                got = "None" if state_indices is None else list(state_indices.shape)
                raise ValueError(
                    "num_accepted_tokens picks the column of state_indices to start from and "
                    f"needs state_indices of shape [N, S], got {got}."
                )
            if num_accepted_tokens.shape != (p.N,):
                shape_error("num_accepted_tokens", "[N]", (p.N,), num_accepted_tokens)
            check_index("num_accepted_tokens", num_accepted_tokens, q.device)
            if can_read(num_accepted_tokens):
                _check_accepted(num_accepted_tokens, state_indices)
            p.num_accepted_tokens = num_accepted_tokens.contiguous()
        if (
            state_indices is not None
            and state_indices.dim() == 2
            and cu_seqlens is None
            and p.T > state_indices.shape[1]
        ):
            raise ValueError(
                "state_indices must name a slot for every token, shape [N, S] with S at least T = "
                f"{p.T}, got {list(state_indices.shape)}."
            )
        if (
            state_indices is not None
            and state_indices.dim() == 2
            and cu_seqlens is not None
            and can_read(cu_seqlens)
        ):
            _check_columns(cu_seqlens, state_indices)
        if state_indices is not None and can_read(state_indices):
            check_slots(state_indices, state.shape[0], "state_indices")
        return p

    @classmethod
    def parse_prefill(
        cls,
        rank,
        q,
        k,
        v,
        g,
        beta,
        state,
        state_indices=None,
        snapshot_indices=None,
        A_log=None,
        dt_bias=None,
        cu_seqlens=None,
        *,
        snapshot_every=1,
        **flags,
    ) -> Problem:
        """Parse a call of `chunk_`: prefill on a state pool."""
        p = cls(rank, q, k, v, g, beta, A_log, dt_bias, cu_seqlens, **flags)
        if state_indices is not None and state_indices.dim() != 1:
            shape_error("state_indices", "[N]", (p.N,), state_indices)
        p._take_pool(state, state_indices)
        if snapshot_indices is not None:
            if snapshot_indices.dim() != 2 or snapshot_indices.shape[0] != p.N:
                raise ValueError(
                    f"snapshot_indices must have shape [N, snapshots] = [{p.N}, ...], got "
                    f"{list(snapshot_indices.shape)}."
                )
            check_index("snapshot_indices", snapshot_indices, q.device)
            if snapshot_every >= 1 and can_read(snapshot_indices):
                own = (
                    torch.arange(p.N, device=q.device)
                    if state_indices is None
                    else state_indices.long()
                )
                lengths = torch.full_like(own, p.T) if cu_seqlens is None else cu_seqlens.diff()
                column = torch.arange(1, snapshot_indices.shape[1] + 1, device=q.device)
                written = column <= (lengths // CHUNK // snapshot_every)[:, None]
                into = snapshot_indices.long().where(written & (own >= 0)[:, None], -1)
                check_slots(
                    torch.cat([own, into.flatten()]),
                    state.shape[0],
                    "state_indices and snapshot_indices",
                )
            p.snapshot_indices = snapshot_indices
        elif snapshot_every != 1:
            raise ValueError(
                "snapshot_every spaces the snapshots and needs snapshot_indices of shape [N, "
                "snapshots], got None: pass the slots to write to."
            )
        if snapshot_every < 1:
            raise ValueError(
                f"snapshot_every must be at least 1 (chunks of {CHUNK} tokens), got "
                f"{snapshot_every}."
            )
        p.snapshot_every = snapshot_every
        if snapshot_indices is None and state_indices is not None and can_read(state_indices):
            check_slots(state_indices, state.shape[0], "state_indices")
        return p

    def _take_state(self, name: str, letter: str, count, state: Tensor, pool: bool) -> None:
        HV, K, V = self.HV, self.K, self.V
        shape = state.shape
        if _is_any_size(shape[0] if shape else 0):
            count = shape[0]  # checked when the exported program runs
        want = (count, HV, V, K) if self.transposed else (count, HV, K, V)
        if shape != want:
            hint = ""
            layout, other = ("V, K", "K, V") if self.transposed else ("K, V", "V, K")
            if shape == (count, HV, want[3], want[2]):
                hint = (
                    f": that is the [{other}] layout, pass "
                    f"transpose_state_layout={not self.transposed}"
                )
            layout = f"[{letter}, HV, {layout}]"
            raise ValueError(
                f"{name} must have shape {layout} = {list(want)} "
                f"(transpose_state_layout={self.transposed}), got {list(shape)}{hint}."
            )
        if state.dtype is not self.state_dtype:
            if not pool or self.state_dtype is torch.float64:
                _dtype_error(
                    name,
                    str(self.state_dtype),
                    state.dtype,
                    f" (states are kept in {self.state_dtype} for {self.q.dtype} inputs)",
                )
            if state.dtype is not torch.bfloat16:
                _dtype_error(name, "float32 or bfloat16", state.dtype)
        _check_there(name, state, self.q.device)
        self.state = state

    def _take_pool(self, state: Tensor, state_indices: Tensor | None) -> None:
        if state is None:
            raise TypeError(
                "state must be a tensor, the pool of states that is read and written in place, "
                "got None."
            )
        if state.dim() != 4:
            layout = "[slots, HV, V, K]" if self.transposed else "[slots, HV, K, V]"
            raise ValueError(
                f"state must have 4 dimensions {layout} "
                f"(transpose_state_layout={self.transposed}), got shape {list(state.shape)}."
            )
        check_no_overlap("state", state)
        if state_indices is None:
            self._take_state("state", "N", self.N, state, pool=True)
        else:
            self._take_state("state", "slots", state.shape[0], state, pool=True)
            if (
                state_indices.dim() not in (1, 2)
                or state_indices.shape[0] != self.N
                or 0 in state_indices.shape[1:]
            ):
                hint = ": S is at least 1" if 0 in state_indices.shape[1:] else ""
                raise ValueError(
                    f"state_indices must have shape [N] or [N, S] with N = {self.N}, got "
                    f"{list(state_indices.shape)}{hint}."
                )
            check_index("state_indices", state_indices, self.q.device)
        self.state_indices = state_indices
        self._check_gates()

    # Kernels and fake implementations allocate outputs with the same two functions.

    def new_output(self) -> Tensor:
        """Allocate o [B, T, HV, V] in v's dtype, contiguous for any strides of v."""
        return new_output(self.v)

    def new_final_state(self) -> Tensor:
        """Allocate the final state, [N, HV, K, V] or [N, HV, V, K], in `state_dtype`.

        If the call does not ask for it, return an empty float32 tensor.
        """
        if not self.output_final_state:
            return self.q.new_empty((0,), dtype=torch.float32)
        N = self.N
        if self.cu_seqlens is not None and not isinstance(N, int) and torch.compiler.is_exporting():
            N = _any_size(N) if self.state is None else self.state.shape[0]
        width = (self.V, self.K) if self.transposed else (self.K, self.V)
        return self.q.new_empty((N, self.HV, *width), dtype=self.state_dtype)

    def differentiable(self) -> tuple[Tensor | None, ...]:
        """Return the inputs that have gradients, in the order of `stages.GRADIENTS`."""
        return self.q, self.k, self.v, self.g, self.beta, self.A_log, self.dt_bias, self.state

    def as_kv(self, state: Tensor) -> Tensor:
        """View a state in the caller's layout as S[k, v], by swapping two strides if needed."""
        return state.transpose(-1, -2) if self.transposed else state

    def _check_gates(self) -> None:
        """Refuse gates and keys outside their range, if KDA_OPS_CHECK=1.

        A decay must not exceed 0 nor fall below the bound that `safe_gate` promises. A given beta
        must lie in [0, 2], or in [0, 1] with `safe_beta`. With `safe_keys`, no key may be longer
        than SAFE_LENGTH. Tokens of sequences without a slot are not checked.
        """
        if not CHECK_VALUES:
            return
        if self.g is not None and not self.activate_gate and not _is_symbolic(self.g):
            _check_decay(
                self._live(self.g), (self.lower_bound or SAFE_BOUND) if self.safe_gate else None
            )
        if self.beta is not None and not self.sigmoid_beta and not _is_symbolic(self.beta):
            _check_strength(self._live(self.beta), self.safe_beta)
        if self.safe_keys and not self.l2norm and not _is_symbolic(self.k):
            _check_lengths(self._live(self.k))

    def _live(self, x: Tensor) -> Tensor:
        """Select from x [B, T, ...] the tokens of sequences that have a slot."""
        slots = self.state_indices
        if self.cu_seqlens is not None:
            x = x[:, : int(self.cu_seqlens[-1])]
        if slots is None:
            return x
        live = (slots if slots.dim() == 1 else slots.amax(1)) >= 0
        return (
            x[live]
            if self.cu_seqlens is None
            else x[:, live.repeat_interleave(self.cu_seqlens.diff())]
        )

    @property
    def gate_bound(self) -> float | None:
        """The lower bound of the decay that the caller's flags promise, or None.

        Kernels choose their number of anchors by it; it changes the result by rounding only.
        """
        if self.g is None:
            return SAFE_BOUND
        if self.lower_bound is not None:
            return self.lower_bound
        # the softplus gate has no lower bound, whatever the caller promises
        return SAFE_BOUND if self.safe_gate and not self.activate_gate else None

    @property
    def bounded_inverse(self) -> bool:
        """Whether the flags promise keys of at most unit length and beta in [0, 1].

        Then no entry of a chunk's inverse exceeds 1, and kernels may form it in fp16. That changes
        the result by rounding only.
        """
        if self.beta is None:
            strength = True  # beta is 1
        else:
            strength = not self.neg_eigval if self.sigmoid_beta else self.safe_beta
        return strength and (self.l2norm or self.safe_keys)


def _any_size(N: torch.SymInt) -> torch.SymInt:
    """Return a new symbol that equals N, for a fake implementation under ``torch.export``.

    torch guards every size against 1, and N is one less than the number of offsets. That guard
    would refuse a single sequence. Two inequalities express the equality, because with ``==`` torch
    would replace the symbol by N again. The second is quadratic on purpose. torch assumes at least
    2 offsets, so from ``size >= N`` it would deduce size >= 1 and refuse an empty batch.
    """
    size = torch.library.get_ctx().new_dynamic_size()
    torch._check(size <= N)
    torch._check((N - size) * (N - size) <= 0)
    return size


def _is_any_size(size: int | torch.SymInt) -> bool:
    """Return whether a size comes from `_any_size` or otherwise depends on data."""
    if isinstance(size, int) or not torch.compiler.is_exporting():
        return False
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return bool(free_unbacked_symbols(size))


def check_no_overlap(name: str, x: Tensor) -> None:
    """Refuse a pool or cache of which two elements may share a place."""
    if not x.is_contiguous() and _overlaps(x):
        raise ValueError(
            f"{name} must not overlap itself, because it is written in place, got strides "
            f"{list(x.stride())}: clone it."
        )


def new_output(v: Tensor) -> Tensor:
    """Allocate what `Problem.new_output` does, for a call that is parsed already."""
    return torch.empty_like(v, memory_format=torch.contiguous_format)


def gate_problem(
    rank: int, g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None
) -> torch.dtype:
    """Validate a call to `kda::gate` or `gdn::gate`; return the dtype of its result."""
    if g is None:
        raise TypeError("g must be a tensor, got None.")
    if g.dim() != 3 + rank:
        raise ValueError(
            f"g must have shape {'[B, T, HV, K]' if rank else '[B, T, HV]'}, got {list(g.shape)}."
        )
    check_float("g", g, g.device)
    check_lower_bound(lower_bound)
    check_gate_parameters(
        rank, g.shape[2], g.shape[3] if rank else 1, A_log, dt_bias, lower_bound, g.device, "g"
    )
    return torch.float64 if g.dtype is torch.float64 else torch.float32


# --- checks of values: on a GPU only under KDA_OPS_CHECK=1 ----------------------------------------


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


def _is_symbolic(x: Tensor) -> bool:
    if torch.compiler.is_compiling() or x.is_meta:
        return True
    if type(x) is not Tensor:  # saves the import at most calls
        from kda_ops.private import FakeTensor, FunctionalTensor

        if isinstance(x, (FakeTensor, FunctionalTensor)):
            return True
    # layers see functorch's wrappers, operators see functional tensors
    return is_functorch_wrapped_tensor(x) or is_functional_tensor(x)


def can_read(x: Tensor) -> bool:
    """Return whether to check offsets, slots or counts: on a CPU always, unless symbolic."""
    return (CHECK_VALUES or x.device.type == "cpu") and not _is_symbolic(x)


def _check_cu_seqlens(cu_seqlens: Tensor, T: int) -> None:
    offsets = cu_seqlens.tolist()
    if offsets[0] != 0 or any(a > b for a, b in zip(offsets, offsets[1:])) or offsets[-1] > T:
        raise ValueError(
            f"cu_seqlens must start at 0, never decrease and end at or before T = {T}, got "
            f"{offsets}."
        )


def _check_decay(g: Tensor, bound: float | None) -> None:
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


def _check_strength(beta: Tensor, safe: bool) -> None:
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


def _check_lengths(k: Tensor) -> None:
    lengths = k.to(torch.promote_types(k.dtype, torch.float32)).norm(dim=-1)
    if lengths.numel() and not bool((lengths <= SAFE_LENGTH).all()):
        raise ValueError(
            "k must have keys of at most unit length as safe_keys=True promises, got a length of "
            f"{lengths.max().item()}: drop the flag, or set use_qk_l2norm_in_kernel=True."
        )


def check_slots(indices: Tensor, slots: int, name: str) -> None:
    """Refuse slots that a pool does not have, and a slot named twice."""
    live = [slot for slot in indices.flatten().tolist() if slot >= 0]
    if live and max(live) >= slots:
        raise ValueError(f"{name} must be below the number of slots, {slots}, got {max(live)}.")
    if len(set(live)) != len(live):
        raise ValueError(f"{name} must name distinct slots, got one slot twice.")


def _check_accepted(accepted: Tensor, indices: Tensor) -> None:
    # sequences without a slot are padding and may have any count
    columns, live = indices.shape[1], accepted[(indices >= 0).any(1)]
    if live.numel() and (int(live.min()) < 1 or int(live.max()) > columns):
        raise ValueError(
            f"num_accepted_tokens must lie between 1 and S = {columns}, the columns of "
            f"state_indices, got {accepted.tolist()}."
        )


def _check_columns(cu_seqlens: Tensor, indices: Tensor) -> None:
    columns, live = indices.shape[1], cu_seqlens.diff()[(indices >= 0).any(1)]
    longest = max(live.tolist(), default=0)  # padding may be longer
    if longest > columns:
        raise ValueError(
            "state_indices must name a slot for every token, shape [N, S] with S at least "
            f"{longest}, the longest sequence, got S = {columns}."
        )
