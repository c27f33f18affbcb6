"""The FLOP formulas of the operators, for `torch.utils.flop_counter`.

They count the operations of the algorithm (letters: docs/maths.md), not those of one kernel. A
multiply-add of a matrix product counts as 2. Scores count as one dense product, even where a kernel
with pairwise decays takes several. Elementwise work counts as 0, and a partial chunk as C tokens. A
packed call counts as one sequence, because its offsets are on the device.
"""

from __future__ import annotations

from kda_ops.problem import CHUNK
from kda_ops.stages import KEPT

C = CHUNK


def product_flops(rows, inner, columns):
    """Count the operations of ``[rows, inner] @ [inner, columns]``."""
    return 2 * rows * inner * columns


def inverse():
    """Count the operations of ``(I + L)^-1`` by rows, about 2/3 C^3.

    Row i is one product ``[1, i] @ [i, i]`` with the rows above it.
    """
    return sum(product_flops(1, i, i) for i in range(C))


def forward(K, V):
    """Count the operations of one chunk and value head, 11.7 million at K = V = 128::

        P, L         scores q k^T and k k^T      2 [C,K][K,C]
        A            (I + L)^-1                  inverse()
        w, u         A k and A v                 [C,C][C,K] + [C,C][C,V]
        v_new        u - w S                     [C,K][K,V]
        o            qg S + P v_new              [C,K][K,V] + [C,C][C,V]
        S            gamma S + kg^T v_new        [K,C][C,V]

    The first three rows are `prepare`, the others `scan`. Some backends form u in `scan`.
    """
    scores, tile = 2 * product_flops(C, K, C), product_flops(C, C, K) + product_flops(C, C, V)
    return scores + inverse() + tile + 3 * product_flops(C, K, V) + product_flops(C, C, V)


def backward(K, V, kept: frozenset[str]):
    """Count the operations of one chunk and value head.

    They are 32.5 million at K = V = 128 with A kept and the rest recomputed.

    Recomputed are A, P, w, v_new (with u) and the states, each unless it is in `kept`. The last two
    come from the scan without its output. Always computed::

        k k^T        for dbeta                             [C,K][K,C]
        dv_new       P^T do + kg dS                        [C,C][C,V] + [C,K][K,V]
        dS           gamma dS + qg^T do - w^T dv_new       2 [K,C][C,V]
        dqg dkg dw   do S^T, v_new dS^T, -dv_new S^T       3 [C,V][V,K]
        dP           do v_new^T                            [C,V][V,C]
        dA           dv_new v^T + dw k^T                   [C,V][V,C] + [C,K][K,C]
        dL           -A^T dA A^T                           2 [C,C][C,C]
        Zv, Zk       A^T dv_new, A^T dw                    [C,C][C,V] + [C,C][C,K]
        dq, dk       rows dP k, dL k; columns dP^T q, dL^T k   4 [C,C][C,K]

    A backend may need fewer operations, for example with dL = -(A^T dv_new) v_new^T. The count
    ignores that, so that rates are comparable.
    """
    again = {
        "A": inverse(),
        "P": product_flops(C, K, C),
        "w": product_flops(C, C, K),
        "v_new": product_flops(C, C, V) + product_flops(C, K, V),
        "states": product_flops(K, C, V),
    }
    recompute = sum(n for name, n in again.items() if name not in kept)
    reverse_scan = product_flops(C, C, V) + 3 * product_flops(C, K, V)
    inter = 3 * product_flops(C, V, K) + product_flops(C, V, C)
    through_inverse = (
        product_flops(C, V, C)
        + product_flops(C, K, C)
        + 2 * product_flops(C, C, C)
        + product_flops(C, C, V)
        + product_flops(C, C, K)
    )
    return (
        recompute
        + product_flops(C, K, C)
        + reverse_scan
        + inter
        + through_inverse
        + 4 * product_flops(C, C, K)
    )


def token(K, V):
    """Count the operations of one token and value head of the recurrence.

    They are S^T k, k u^T and S^T q.
    """
    return 3 * product_flops(1, K, V)


def chunk(*, q, v, **call):
    """Count the operations of all chunks and value heads."""
    return _chunks(v) * forward(q[3], v[3])


def chunk_bwd(*, q, v, **call):
    """Count the operations of a backward; what is not kept is an empty tensor of one dimension."""
    kept = frozenset(n for n in KEPT if len(call[n]) > 1)
    return _chunks(v) * backward(q[3], v[3], kept)


def chunk_map(*, q, v, **call):
    """Count `forward` without o, whose scan has K columns more."""
    K, V = q[3], v[3]
    outputs = product_flops(C, K, V) + product_flops(C, C, V)
    return _chunks(v) * (forward(K, V) - outputs + 2 * product_flops(C, K, K))


def chunk_join(*, q, v, **call):
    """Count the second and third row of `forward`'s scan, and v_new."""
    K, V = q[3], v[3]
    return _chunks(v) * (3 * product_flops(C, K, V) + product_flops(C, C, V))


def chunk_map_bwd(*, q, v, A, **call):
    """Count the tile again, and dv_new and dS of `backward`, whose scan has K columns more."""
    K, V = q[3], v[3]
    kept = frozenset("A" if A is not None and len(A) > 1 else "")
    tile = backward(K, V, kept) - backward(K, V, kept | {"A", "P", "w"})
    scan = product_flops(C, C, V) + 3 * product_flops(C, K, V) + 2 * product_flops(C, K, K)
    return _chunks(v) * (tile + scan)


def chunk_join_bwd(*, q, v, **call):
    """Count `backward` with the tile given."""
    return _chunks(v) * backward(q[3], v[3], frozenset(("A", "P", "w")))


def _chunks(v):
    """Return chunks times value heads, from the shape of v [B, T, HV, V]."""
    B, T, HV, _ = v
    return B * ((T + C - 1) // C) * HV


def recurrent(*, q, v, **call):
    """Count the operations of all tokens and value heads."""
    B, T, HV, V = v
    return B * T * HV * token(q[3], V)


def short_conv(*, x, weight, **call):
    """Count the operations of a convolution's products, one per tap, token and channel."""
    B, T, _ = x
    D, W = weight
    return product_flops(B * T, W, D)


def short_conv_bwd(*, need, **call):
    """Count the products for x and for weight, not those that are computed again."""
    return (bool(need & 1) + bool(need & 2)) * short_conv(**call)
