"""Call the operators by the signature that transformers gives its delta rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kda_ops.checks import check_float


def delta_rule(
    op: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    seq_idx: Tensor | None = None,
    **unused: object,
) -> tuple[Tensor, Tensor | None]:
    """Run `op`, one of `kda_ops.chunk_kda`, `chunk_gdn`, `recurrent_kda` and `recurrent_gdn`.

    Shapes are those of `op`. Models pass on all of their keywords. Keywords that `op` does not
    need are ignored.
    """
    if cu_seqlens is None:
        cu_seqlens = cu_seq_lens_q  # some models pass on their own keyword
    if cu_seqlens is None and seq_idx is not None:
        raise ValueError(
            "cu_seq_lens_q must be given with seq_idx, got None: seq_idx alone does not "
            "give the number of sequences."
        )
    # with a cache, the other layers of the model mix the sequences
    if cu_seqlens is not None and output_final_state:
        raise ValueError(
            "use_cache must be False for packed rows: pass use_cache=False or set "
            "model.config.use_cache = False."
        )
    if initial_state is not None:
        check_float("initial_state", initial_state, query.device, "query")
        initial_state = initial_state.to(torch.promote_types(query.dtype, torch.float32))
    return op(
        query,
        key,
        value,
        g,
        beta,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
    )
