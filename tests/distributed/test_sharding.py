"""Sharded tensors: placements on a mesh of pretended ranks, and two real processes against one."""

from functools import partial
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import kda_ops
from kda_ops import dispatch
from kda_ops.stages import KEPT
from tests.support.cases import TOKENS
from tests.support.ranks import mesh_of
from tests.support.training_walk import training_walks

R = Replicate()
CHUNK = {"kda": kda_ops.chunk_kda, "gdn": kda_ops.chunk_gdn}
RECURRENT = {"kda": kda_ops.recurrent_kda, "gdn": kda_ops.recurrent_gdn}


def make_inputs(namespace, transposed=False, seed=0, B=2, T=70, H=4, HV=8, K=16, V=12):
    """Every differentiable input, with the gate, the norm and the sigmoid inside; the same on every
    rank.
    """
    torch.manual_seed(seed)
    width = (K,) if namespace == "kda" else ()
    shapes = dict(
        q=(B, T, H, K),
        k=(B, T, H, K),
        v=(B, T, HV, V),
        g=(B, T, HV, *width),
        beta=(B, T, HV),
        A_log=(HV,),
        dt_bias=(HV, *width),
        initial_state=(B, HV, V, K) if transposed else (B, HV, K, V),
    )
    return {n: torch.randn(s) for n, s in shapes.items()}


FLAGS = dict(
    use_qk_l2norm_in_kernel=True,
    use_gate_in_kernel=True,
    use_beta_sigmoid_in_kernel=True,
    output_final_state=True,
)


def spread(inputs, mesh, placements):
    return {
        n: distribute_tensor(x, mesh, placements.get(n, [R] * mesh.ndim)).requires_grad_()
        for n, x in inputs.items()
    }


@pytest.fixture
def mesh():
    """Four ranks of which only this one exists: collectives move nothing, placements and local
    shapes are those of a real run.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield init_device_mesh("cpu", (2, 2))
    dist.destroy_process_group()


@pytest.mark.parametrize("namespace", ["kda", "gdn"])
class TestPlacements:
    @pytest.mark.quick
    @pytest.mark.parametrize("operators", (CHUNK, RECURRENT), ids=("chunk", "recurrent"))
    def test_batch_and_heads_spread_over_two_axes(self, mesh, namespace, operators):
        both, per_head = [Shard(0), Shard(2)], [R, Shard(0)]
        placements = dict.fromkeys(TOKENS, both) | dict(
            A_log=per_head, dt_bias=per_head, initial_state=[Shard(0), Shard(1)]
        )
        x = spread(make_inputs(namespace), mesh, placements)
        o, state = operators[namespace](**x, **FLAGS)
        assert o.placements == tuple(both) and o.to_local().shape == (1, 70, 4, 12)
        assert state.placements == (Shard(0), Shard(1)) and state.to_local().shape == (1, 4, 16, 12)
        (o.sum() + state.sum()).backward()
        for n in (*TOKENS, "initial_state"):
            assert x[n].grad.placements == x[n].placements
        for n in ("A_log", "dt_bias"):  # each rank has seen its rows only
            assert x[n].grad.placements == (Partial(), Shard(0))

    @pytest.mark.parametrize("transposed", [False, True])
    def test_columns_of_v_spread_and_the_state_follows_in_either_layout(
        self, mesh, namespace, transposed
    ):
        axis = 2 if transposed else 3
        x = spread(
            make_inputs(namespace, transposed),
            mesh,
            dict(v=[R, Shard(3)], initial_state=[R, Shard(axis)]),
        )
        o, state = CHUNK[namespace](**x, **FLAGS, transpose_state_layout=transposed)
        assert o.placements == (R, Shard(3)) and state.placements == (R, Shard(axis))
        (o.sum() + state.sum()).backward()
        assert x["v"].grad.placements == (R, Shard(3))
        assert x["initial_state"].grad.placements == (R, Shard(axis))
        for n in ("q", "k", "g", "beta", "A_log", "dt_bias"):
            assert x[n].grad.placements == (R, Partial()), n

    def test_an_invariant_call_is_not_spread_over_columns_of_v(self, mesh, namespace):
        for invariant in (False, True, False):  # nor is the flag a cached decision
            x = spread(make_inputs(namespace), mesh, dict(v=[R, Shard(3)]))
            o, _ = CHUNK[namespace](**x, **FLAGS, invariant=invariant)
            assert o.placements == ((R, R) if invariant else (R, Shard(3)))
        placements = dict.fromkeys(TOKENS, [R, Shard(2)]) | dict.fromkeys(
            ("A_log", "dt_bias"), [R, Shard(0)]
        )
        x = spread(make_inputs(namespace), mesh, placements | dict(initial_state=[R, Shard(1)]))
        o, _ = CHUNK[namespace](**x, **FLAGS, invariant=True)
        assert o.placements == (R, Shard(2))

    def test_layout_is_no_cached_decision(self, mesh, namespace):
        # K = V: nothing but the flag tells the layouts apart
        for transposed in (False, True, False):
            x = spread(
                make_inputs(namespace, V=16),
                mesh,
                dict(v=[Shard(3)] * 2, initial_state=[Shard(2 if transposed else 3)] * 2),
            )
            _, state = CHUNK[namespace](**x, **FLAGS, transpose_state_layout=transposed)
            assert state.placements == (Shard(2 if transposed else 3),) * 2

    def test_an_absent_tensor_is_no_cached_decision(self, mesh, namespace):
        # here g and beta have one shape
        x = spread(make_inputs("gdn"), mesh, dict.fromkeys(TOKENS, [Shard(0), Shard(2)]))
        shown = {n: x[n] for n in TOKENS}
        for absent in ("g", "beta", "g"):
            o, _ = kda_ops.chunk_gdn(**shown | {absent: None})
            o.sum().backward()
            assert o.placements == (Shard(0), Shard(2))
            assert shown["v"].grad.placements == (Shard(0), Shard(2))

    def test_packed_sequences_spread_over_heads_but_not_over_the_batch(self, mesh, namespace):
        x = {
            n: t[:1].contiguous() if n in TOKENS else t
            for n, t in make_inputs(namespace).items()
            if n != "initial_state"
        }
        x = spread(
            x,
            mesh,
            dict.fromkeys(TOKENS, [R, Shard(2)]) | dict(A_log=[R, Shard(0)], dt_bias=[R, Shard(0)]),
        )
        cu_seqlens = distribute_tensor(torch.tensor([0, 30, 70]), mesh, [R, R])
        o, state = CHUNK[namespace](**x, cu_seqlens=cu_seqlens, **FLAGS)
        assert o.placements == (R, Shard(2))
        assert state.placements == (R, Shard(1))
        assert state.shape[0] == 2

    @pytest.mark.quick
    @pytest.mark.parametrize("axis, sizes", ((0, {"B": 3}), (1, {}), (2, {"H": 3, "HV": 6})))
    def test_tokens_and_what_does_not_divide_are_gathered(self, mesh, namespace, axis, sizes):
        x = {n: t for n, t in make_inputs(namespace, **sizes).items() if n in TOKENS}
        o, _ = CHUNK[namespace](**spread(x, mesh, dict.fromkeys(TOKENS, [R, Shard(axis)])))
        assert Shard(axis) not in o.placements and o.to_local().shape == o.shape

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("keep", [False, True])
    def test_what_is_kept_for_backward_is_spread_like_the_rest(self, mesh, namespace, dtype, keep):
        x = {n: t.to(dtype) for n, t in make_inputs(namespace).items() if n in TOKENS}
        x = spread(x, mesh, dict.fromkeys(TOKENS, [Shard(0), Shard(2)]))
        out = getattr(torch.ops, namespace).chunk_fwd(
            **x, use_qk_l2norm_in_kernel=True, disable_recompute=keep
        )
        for kept in out[2:]:
            assert kept.placements == ((R, R) if kept.shape == (0,) else (Shard(0), Shard(1)))
            # 2 chunks of one row, 4 of 8 heads
            assert kept.shape == (0,) or kept.to_local().shape[:2] == (2, 4)


# --- two processes --------------------------------------------------------------------------------

SPLITS = {
    "batch": dict.fromkeys((*TOKENS, "initial_state"), Shard(0)),
    "heads": dict.fromkeys(TOKENS, Shard(2))
    | dict(A_log=Shard(0), dt_bias=Shard(0), initial_state=Shard(1)),
    "V": dict(v=Shard(3), initial_state=Shard(2)),
}


def _train(chunk, x):
    """One training step's outputs and gradients."""
    o, state = chunk(**x, **FLAGS, transpose_state_layout=True)
    (o.square().sum() + state.square().sum()).backward()
    return dict(o=o, state=state) | {f"d{n}": t.grad for n, t in x.items()}


def _whole(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def errors(groups, compiled):
    """How far each output and gradient of a step on two ranks is off one process's, by operator,
    split and name.
    """
    mesh, rows = mesh_of(groups[2]), {}
    for namespace, chunk in CHUNK.items():
        if compiled:
            chunk = torch.compile(chunk, backend="aot_eager", fullgraph=True)
        inputs = {n: t.double() for n, t in make_inputs(namespace, transposed=True).items()}
        want = _train(CHUNK[namespace], {n: t.clone().requires_grad_() for n, t in inputs.items()})
        for split, placements in SPLITS.items():
            got = _train(chunk, spread(inputs, mesh, {n: [p] for n, p in placements.items()}))
            for n, w in want.items():
                rows[namespace, split, n] = (
                    (_whole(got[n]) - w).abs().max() / w.abs().max()
                ).item()
    return rows


# which calls walk in training, and the splits whose shards do
WALKS = {
    "all": ({}, ("batch", "heads", "V")),
    "all heads": ({"heads": 8}, ("batch", "V")),
    "all columns": ({"columns": 12}, ("batch", "heads")),
    "half of the columns": ({"columns": 6}, ("V",)),
}


def walked_errors(groups, compiled):
    """Return the same for a training that walks, by which calls walk, split and policy.

    A row begins with the walks forward and back on this rank.
    """
    mesh, rows = mesh_of(groups[2]), {}
    for T, (walks, (sizes, _)) in enumerate(
        WALKS.items(), 65
    ):  # DTensor remembers calls by their sizes
        inputs = {n: t.double() for n, t in make_inputs("kda", transposed=True, T=T).items()}
        want = _train(CHUNK["kda"], {n: t.clone().requires_grad_() for n, t in inputs.items()})
        for split, keep in product(SPLITS, (False, True)):
            chunk = partial(CHUNK["kda"], disable_recompute=keep)
            if compiled and keep != bool((T + list(SPLITS).index(split)) % 2):
                continue  # one policy each
            if compiled:
                torch._dynamo.reset()
                chunk = torch.compile(chunk, backend="aot_eager", fullgraph=True)
            x = spread(inputs, mesh, {n: [p] for n, p in SPLITS[split].items()})
            with training_walks(dispatch.backend(torch.device("cpu")), **sizes) as counts:
                got = _train(chunk, x)
            errors = [
                ((_whole(got[n]) - w).abs().max() / w.abs().max()).item() for n, w in want.items()
            ]
            rows[walks, split, keep] = counts.trained, counts.walked, *errors
    return rows


@pytest.mark.parametrize(
    "compiled",
    [pytest.param(False, id="eager"), pytest.param(True, id="compiled", marks=pytest.mark.nightly)],
)
def test_shards_that_walk_in_training_or_not_agree_with_the_whole_call(ranks, compiled):
    for rows in ranks.run(2, walked_errors, compiled):
        assert len(rows) == (2 - compiled) * len(WALKS) * len(SPLITS)
        for (walks, split, keep), (trained, walked, *errors) in rows.items():
            assert trained == walked == (split in WALKS[walks][1]), (walks, split, keep)
            assert not [e for e in errors if not e <= 1e-12], (walks, split, keep)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_sharded_training_step_equals_the_whole_one(ranks, compiled):
    for rows in ranks.run(2, errors, compiled):
        assert len(rows) == 2 * len(SPLITS) * 10
        # float64, the same sums in another order
        assert not {name: e for name, e in rows.items() if not e <= 1e-12}


@pytest.mark.parametrize("namespace", ["kda", "gdn"])
def test_what_is_kept_of_columns_is_spread_as_they_are(mesh, namespace):
    x = {n: t for n, t in make_inputs(namespace).items() if n in TOKENS}
    _, _, *kept = getattr(torch.ops, namespace).chunk_fwd(
        **spread(x, mesh, dict(v=[R, Shard(3)])), disable_recompute=True
    )
    for name, t in zip(KEPT, kept):
        assert t.placements == (R, Shard(3) if name in ("u", "states", "v_new") else R), name


class TestLayerOperators:
    def test_a_convolution_spreads_over_batch_and_channels(self, mesh):
        both, per_channel = [Shard(0), Shard(2)], [R, Shard(0)]
        shapes = {"x": (4, 6, 8), "weight": (8, 4), "initial_tail": (4, 3, 8)}
        placements = dict(x=both, weight=per_channel, initial_tail=both)
        x = spread({n: torch.randn(s) for n, s in shapes.items()}, mesh, placements)
        y, tail = kda_ops.short_conv(**x, activation="silu", output_final_tail=True)
        assert y.placements == tail.placements == tuple(both)
        assert y.to_local().shape == (2, 6, 4)
        (y.sum() + tail.sum()).backward()
        assert x["x"].grad.placements == x["initial_tail"].grad.placements == tuple(both)
        assert x["weight"].grad.placements == (Partial(), Shard(0))

    def test_a_packed_convolution_spreads_over_channels_only(self, mesh):
        x = spread(
            {"x": torch.randn(1, 6, 8), "weight": torch.randn(8, 4)}, mesh, {"x": [Shard(2)] * 2}
        )
        offsets = distribute_tensor(torch.tensor([0, 2, 6]), mesh, [R, R])
        y, _ = kda_ops.short_conv(**x, cu_seqlens=offsets)
        assert y.placements == (Shard(2),) * 2

    @pytest.mark.parametrize("rows", (1, 4))
    def test_a_norm_spreads_over_tokens_and_heads(self, mesh, rows):
        both = [Shard(1), Shard(2)]
        shapes = {"x": (2, 6, 8, 5), "weight": (rows, 5), "gate": (2, 6, 8, 5)}
        placements = dict(x=both, gate=both, weight=[R, R if rows == 1 else Shard(0)])
        x = spread({n: torch.randn(s) for n, s in shapes.items()}, mesh, placements)
        y = kda_ops.gated_rms_norm(**x)
        assert y.placements == tuple(both) and y.to_local().shape == (2, 3, 4, 5)
        y.sum().backward()
        assert x["x"].grad.placements == x["gate"].grad.placements == tuple(both)
        assert x["weight"].grad.placements == (Partial(), Partial() if rows == 1 else Shard(0))
