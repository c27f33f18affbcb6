"""The two Pallas TPU kernels, forward and backward, of KDA and GDN.

One program is one chunk of C = 64 tokens of some value heads. The last grid axis runs over the
chunks in order, backward from the last one. The states, transposed to [V, K], or their gradients
stay in VMEM scratch: the decay of a key channel is then a row that broadcasts. Formulas and names:
MATHS.md. Decays are only ever summed, so every gate is right; -inf becomes `FORGET`.

Heads are a batch dimension, [n, C, .]: the scheduler does not interleave heads that are written one
after the other. Masks combine with & and |, indices with shifts: jnp.where of masks does not
compile, and // asks which TPU it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kda_ops.backends.reference import FORGET
from kda_ops.jax.activations import l2norm, l2norm_backward
from kda_ops.jax.plan import FIRST, LAST, BlockPlan
from kda_ops.problem import CHUNK

LEVELS = CHUNK.bit_length() - 1  # pairs of rows part into blocks of 1, 2, 4 .. C / 2 rows
_NN, _NT, _TN = ((2,), (1,)), ((2,), (2,)), ((1,), (1,))  # a b, a b^T, a^T b


def _iota(shape: tuple[int, ...], axis: int):
    return lax.broadcasted_iota(jnp.int32, shape, axis)


class _Dot:
    """Products of heads, [n, ., .]. A 32-bit product is one bfloat16 pass on a TPU unless HIGHEST
    is asked for.
    """

    def __init__(self, plan: BlockPlan):
        self.operand, self.sums = jnp.dtype(plan.operand), jnp.dtype(plan.sums)

    def __call__(self, contract, a, b):
        """Multiply a and b, rounded to the operand dtype; sums are not."""
        precision = None if self.operand.itemsize == 2 else lax.Precision.HIGHEST
        return lax.dot_general(
            a.astype(self.operand),
            b.astype(self.operand),
            (contract, ((0,), (0,))),
            precision=precision,
            preferred_element_type=self.sums,
        )

    def fine(self, contract, a, b):
        """As exact as 16 bits more: of 16-bit operands three products, of two terms each."""
        if self.operand.itemsize != 2:
            return self(contract, a, b)
        a_high, b_high = a.astype(self.operand), b.astype(self.operand)
        a_low, b_low = a - a_high.astype(self.sums), b - b_high.astype(self.sums)
        return self(contract, a_high, b_high) + (
            self(contract, a_high, b_low) + self(contract, a_low, b_high)
        )


def _roll(x, rows: int):
    """Rotate axis 1 of [n, C, .]; an int32 amount, because with x64 on a plain int does not
    compile.
    """
    return jnp.stack([pltpu.roll(y, jnp.int32(rows % CHUNK), 0) for y in x])


def _block_sums(x):
    """Yield, for blocks of 1, 2, 4 .. C rows, the sums of x up to and including a row of its block,
    and over the rows after it.
    """
    before, after, row = x, jnp.zeros_like(x), _iota(x.shape[1:], 0)
    for level in range(LEVELS):
        yield before, after
        later, whole, half = ((row >> level) & 1) == 1, before + after, 1 << level
        before = before + jnp.where(later, _roll(whole, half), 0.0)
        after = after + jnp.where(later, 0.0, _roll(whole, -half))
    yield before, after


def _sums(x, reverse: bool = False):
    """Return the sums of x [n, C, .] over the rows up to and with each, or from it on."""
    row = _iota(x.shape[1:], 0)
    for level in range(LEVELS):
        step = 1 << level
        inside = row < CHUNK - step if reverse else row >= step
        x = x + jnp.where(inside, _roll(x, -step if reverse else step), 0.0)
    return x


def _shifted(x, rows: int):
    """x [n, C, .] moved down by one row, or up for rows = -1; zero where nothing moves in."""
    row = _iota(x.shape[1:], 0)
    return jnp.where(row == (0 if rows > 0 else CHUNK - 1), 0.0, _roll(x, rows))


def _pair(level: int):
    """[C, C]: i in the later and j in the earlier half, of 1 << level rows, of one block."""
    i, j = _iota((CHUNK, CHUNK), 0), _iota((CHUNK, CHUNK), 1)
    return (((i >> level) & 1) == 1) & ((j >> level) == (i >> level) - 1)


def _column(row):
    """[n, 1, C] as [n, C, 1]: a masked sum, for a column of one lane is not loaded as such."""
    i, j = _iota((CHUNK, CHUNK), 0), _iota((CHUNK, CHUNK), 1)
    return jnp.sum(jnp.where(i == j, row, 0.0), 2, keepdims=True)


def _row(column):
    """[n, C, 1] as [n, 1, C]."""
    i, j = _iota((CHUNK, CHUNK), 0), _iota((CHUNK, CHUNK), 1)
    return jnp.sum(jnp.where(i == j, column, 0.0), 1, keepdims=True)


class _Level(NamedTuple):
    """A part of the pairwise decays: E_ij = select(f_i f_j) with one factor f per row, or none."""

    select: Callable
    f: Any

    def scaled(self, x):
        return x if self.f is None else x * self.f


def _kda_levels(g):
    """Pairwise decays of g [n, C, K], and exp of its sums up to and after each row: a pair belongs
    to the one level that parts it.
    """
    *inside, (before, after) = _block_sums(g)
    levels = []
    for level, (upto, beyond) in enumerate(inside):
        later = ((_iota(g.shape[1:], 0) >> level) & 1) == 1
        pair = _pair(level)
        levels.append(
            _Level(
                functools.partial(lambda pair, x: jnp.where(pair, x, 0.0), pair),
                jnp.exp(jnp.where(later, upto, beyond)),
            )
        )
    return levels, jnp.exp(before), jnp.exp(after)


def _gdn_levels(g, K: int):
    """Return the same for one decay per row, g [n, C, 1].

    E is one matrix. Its exponents are the sums down the columns of g_i below the diagonal. The mask
    selects products: zero times one that overflows is NaN.
    """
    i, j = _iota((CHUNK, CHUNK), 0), _iota((CHUNK, CHUNK), 1)
    E = jnp.exp(_sums(jnp.where(i > j, g, 0.0)))
    g = jnp.broadcast_to(g, (*g.shape[:2], K))
    before, after = _sums(g), _shifted(_sums(g, reverse=True), -1)
    return [_Level(lambda x: jnp.where(i > j, E * x, 0.0), None)], jnp.exp(before), jnp.exp(after)


def _of_heads(ref, n: int, shared: bool, dtype):
    """[1, C, n D] as [n, C, D]; [1, C, D] of a shared head as n times the same."""
    D = ref.shape[2] // (1 if shared else n)
    x = [ref[0, :, h * D : (h + 1) * D].astype(dtype) for h in range(1 if shared else n)]
    return jnp.stack(x * n if shared else x)


def _to_heads(ref, x) -> None:
    for h in range(len(x)):
        ref[0, :, h * x.shape[2] : (h + 1) * x.shape[2]] = x[h].astype(ref.dtype)


class _Loaded(NamedTuple):
    """The inputs of a chunk, and 1 / |q| and 1 / |k|, where the norm is taken here."""

    q: Any  # [n, C, K], normalised, not scaled
    k: Any
    v: Any
    g: Any  # [n, C, K], or [n, C, 1] of rank 0
    b: Any  # [n, C, 1]
    q_rstd: Any
    k_rstd: Any


def _load(q, k, v, g, beta, plan: BlockPlan) -> _Loaded:
    n, sums = plan.heads, jnp.dtype(plan.sums)
    b_q, b_k = _of_heads(q, n, plan.shared, sums), _of_heads(k, n, plan.shared, sums)
    q_rstd = k_rstd = None
    if plan.l2norm:
        (b_q, q_rstd), (b_k, k_rstd) = l2norm(b_q), l2norm(b_k)
    b_v, b = _of_heads(v, n, False, sums), _column(beta[0, :, 0].astype(sums))
    if plan.rank:
        b_g = _of_heads(g, n, False, sums)
    else:
        b_g = _column(g[0, :, 0].astype(sums))
    return _Loaded(b_q, b_k, b_v, b_g, b, q_rstd, k_rstd)


class _Chunk(NamedTuple):
    """What a chunk needs besides the state; q is scaled, P and M = L / beta lack their diagonal,
    that of P is a column.
    """

    q: Any  # [n, C, K]
    k: Any
    b: Any  # beta [n, C, 1]
    levels: list[_Level]
    P: Any  # [n, C, C]
    diagonal: Any  # [n, C, 1]
    M: Any
    A: Any
    decay: Any  # [n, C, K]: exp(G)
    tail: Any  # exp of the sum over later rows


def _prepare(x: _Loaded, plan: BlockPlan, dot: _Dot) -> _Chunk:
    # exp of FORGET is 0: nothing here depends on what a TPU makes of infinities
    q, k, b, g = x.q * plan.scale, x.k, x.b, jnp.maximum(x.g, FORGET)
    levels, decay, tail = _kda_levels(g) if plan.rank else _gdn_levels(g, plan.K)
    P = M = jnp.zeros((plan.heads, CHUNK, CHUNK), dot.sums)
    for level in levels:  # the scores of q and of k in one product
        kf = level.scaled(k)
        scores = dot(_NT, jnp.concatenate([level.scaled(q), kf], 1), kf)
        P, M = P + level.select(scores[:, :CHUNK]), M + level.select(scores[:, CHUNK:])
    i, j = _iota((CHUNK, CHUNK), 0), _iota((CHUNK, CHUNK), 1)
    one, zero = dot.sums.type(1), dot.sums.type(0)  # two plain numbers are float64 with x64 on
    A = jnp.broadcast_to(jnp.where(i == j, one, zero), P.shape)
    for half in range(LEVELS):
        low = jnp.where(_pair(half), b * M, 0.0)
        A = A - (low if half == 0 else dot.fine(_NN, dot.fine(_NN, A, low), A))
    return _Chunk(q, k, b, levels, P, jnp.sum(q * k, 2, keepdims=True), M, A, decay, tail)


def _forward(table, q, k, v, g, beta, s0, o, sT, *rest, plan: BlockPlan) -> None:
    """v_new = A (beta (v - k exp(G) S));   o = q exp(G) S + P v_new;   S <- gamma S + kg^T v_new.

    `rest` is the array that keeps the entering states, if backward follows, and the scratch.
    """
    *entering, S = rest
    step, dot = table[pl.program_id(2)], _Dot(plan)

    @pl.when((step & FIRST) != 0)
    def _():
        S[...] = s0[0]

    x = _load(q, k, v, g, beta, plan)
    c = _prepare(x, plan, dot)
    state = S[...]
    for kept in entering:
        kept[0, :, 0] = state.astype(kept.dtype)
    v_new = dot(_NN, c.A, c.b * (x.v - dot(_NT, c.k * c.decay, state)))
    _to_heads(o, dot(_NT, c.q * c.decay, state) + dot(_NN, c.P, v_new) + c.diagonal * v_new)
    S[...] = state * c.decay[:, CHUNK - 1 :] + dot(_TN, v_new, c.k * c.tail)

    @pl.when((step & LAST) != 0)
    def _():
        sT[0] = S[...]


def _over_pairs(c: _Chunk, dP, dL, dot: _Dot):
    """sum_j dP_ij k_j E_ij and beta_i sum_j dL_ij k_j E_ij, one above the other, and
    sum_i (dP_ij q_i + dL_ij beta_i k_i) E_ij, of pairs j < i.
    """
    rows: Any = 0.0
    columns: Any = 0.0
    for x in c.levels:
        d = jnp.concatenate([x.select(dP), x.select(c.b * dL)], 1)  # [n, 2 C, C]
        kf = x.scaled(c.k)
        down = dot(_NN, d, kf)
        rows = rows + (down if x.f is None else jnp.concatenate([x.f, x.f], 1) * down)
        columns = columns + x.scaled(dot(_TN, d, jnp.concatenate([x.scaled(c.q), kf], 1)))
    return rows[:, :CHUNK], rows[:, CHUNK:], columns


def _backward(
    table, q, k, v, g, beta, do, dsT, entering, dq, dk, dv, dg, dbeta, ds0, dS, *, plan: BlockPlan
) -> None:
    """Do the reverse scan and the gradients of a chunk in one pass, the last chunk first."""
    t = pl.num_programs(2) - 1 - pl.program_id(2)
    step, dot = table[t], _Dot(plan)

    @pl.when((step & LAST) != 0)
    def _():
        dS[...] = dsT[0]

    x = _load(q, k, v, g, beta, plan)
    c = _prepare(x, plan, dot)
    state, dstate = entering[0, :, 0].astype(dot.sums), dS[...]
    b_do = _of_heads(do, plan.heads, False, dot.sums)
    error = x.v - dot(_NT, c.k * c.decay, state)
    v_new = dot(_NN, c.A, c.b * error)
    dv_new = dot(_TN, c.P, b_do) + c.diagonal * b_do + dot(_NT, c.k * c.tail, dstate)
    z = dot(_TN, c.A, dv_new)
    dP, dL = dot(_NT, b_do, v_new), -dot(_NT, z, v_new)
    into_q, into_k, columns = _over_pairs(c, dP, dL, dot)
    into_q = into_q + c.decay * dot(_NN, b_do, state)
    early = into_k - c.b * c.decay * dot(_NN, z, state)
    late = c.tail * dot(_NN, v_new, dstate)
    # The diagonal of P does not decay: its part cancels in dG and is left out there.
    on_diagonal = jnp.sum(b_do * v_new, 2, keepdims=True)
    dG = c.q * into_q + c.k * (early - columns)
    last = c.decay[:, CHUNK - 1 :] * jnp.sum(state * dstate, 1, keepdims=True)
    dG = dG + jnp.where(_iota(dG.shape[1:], 0) == CHUNK - 1, last, 0.0)
    # What a row adds to the state decays after it: a sum over earlier rows, where the suffix sum
    # of MATHS.md would cancel.
    b_dg = _sums(dG, reverse=True) + _shifted(_sums(c.k * late), 1)
    b_dq = plan.scale * (into_q + on_diagonal * c.k)
    b_dk = early + columns + late + on_diagonal * c.q
    if plan.l2norm:
        b_dq, b_dk = l2norm_backward(b_dq, x.q, x.q_rstd), l2norm_backward(b_dk, x.k, x.k_rstd)
    if plan.shared:  # the program's heads have one key head
        b_dq, b_dk = jnp.sum(b_dq, 0, keepdims=True), jnp.sum(b_dk, 0, keepdims=True)
    _to_heads(dq, b_dq)
    _to_heads(dk, b_dk)
    _to_heads(dv, c.b * z)
    if plan.rank:
        _to_heads(dg, b_dg)
    else:
        dg[0, :, 0] = _row(jnp.sum(b_dg, 2, keepdims=True)).astype(dg.dtype)
    i, j = _iota((CHUNK, CHUNK), 0), _iota((CHUNK, CHUNK), 1)
    b_dbeta = jnp.sum(z * error, 2, keepdims=True)
    b_dbeta = b_dbeta + jnp.sum(jnp.where(j < i, dL * c.M, 0.0), 2, keepdims=True)
    dbeta[0, :, 0] = _row(b_dbeta).astype(dbeta.dtype)
    dS[...] = (
        dstate * c.decay[:, CHUNK - 1 :]
        + dot(_TN, b_do, c.q * c.decay)
        - dot(_TN, z, c.b * c.k * c.decay)
    )

    @pl.when((step & FIRST) != 0)
    def _():
        ds0[0] = dS[...]


def _call(kernel, plan: BlockPlan, name: str, table, inputs: dict, outputs: dict, reverse: bool):
    """Launch a kernel. `inputs` and `outputs` map a name to (kind, array) and (kind, dtype)."""
    blocks = plan.blocks()

    def spec(kind: str) -> pl.BlockSpec:
        shape, index = blocks[kind]
        if not reverse:
            return pl.BlockSpec(shape, index)
        return pl.BlockSpec(shape, lambda b, h, t, table: index(b, h, plan.NT - 1 - t, table))

    scratch = pltpu.VMEM((plan.heads, plan.V, plan.K), jnp.dtype(plan.sums))
    out_shape = [jax.ShapeDtypeStruct(plan.shape(kind), dtype) for kind, dtype in outputs.values()]
    found = pl.pallas_call(
        functools.partial(kernel, plan=plan),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(plan.B, plan.HV // plan.heads, plan.NT),
            in_specs=[spec(kind) for kind, _ in inputs.values()],
            out_specs=[spec(kind) for kind, _ in outputs.values()],
            scratch_shapes=[scratch],
        ),
        out_shape=out_shape,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
        interpret=plan.interpret,
        name=name,
    )(table, *(x for _, x in inputs.values()))
    return dict(zip(outputs, found))


def forward(plan: BlockPlan, table, q, k, v, g, beta, s0, keep: bool):
    """o and the final states, and the state that enters each chunk if `keep`."""
    decay = "K" if plan.rank else "row"
    inputs = dict(
        q=("key", q), k=("key", k), v=("V", v), g=(decay, g), beta=("row", beta), s0=("state", s0)
    )
    outputs = dict(o=("V", v.dtype), sT=("state", jnp.dtype(plan.sums)))
    if keep:
        outputs["entering"] = ("states", jnp.dtype(plan.operand))
    name = f"{'kda' if plan.rank else 'gdn'}_chunk_fwd"
    return _call(_forward, plan, name, table, inputs, outputs, reverse=False)


def backward(plan: BlockPlan, table, q, k, v, g, beta, do, dsT, entering):
    """Return the gradients of q, k, v, g, beta and of the initial states; those of a key head that
    several programs share are partial sums.
    """
    decay = "K" if plan.rank else "row"
    inputs = dict(
        q=("key", q), k=("key", k), v=("V", v), g=(decay, g), beta=("row", beta),
        do=("V", do), dsT=("state", dsT), entering=("states", entering),
    )  # fmt: skip
    sums = jnp.dtype(plan.sums)
    whole = plan.key_heads == plan.H
    outputs = dict(
        dq=("dkey", q.dtype if whole else sums), dk=("dkey", k.dtype if whole else sums),
        dv=("V", v.dtype), dg=(decay, g.dtype), dbeta=("row", beta.dtype), ds0=("state", sums),
    )  # fmt: skip
    name = f"{'kda' if plan.rank else 'gdn'}_chunk_bwd"
    return _call(_backward, plan, name, table, inputs, outputs, reverse=True)
