"""Compare several GPUs over NCCL with one GPU or the definition.

Covers shards, layers, compiled code, and tensors on a device that is not the current one.
"""

import copy

import pytest
import torch

if torch.cuda.device_count() < 2:
    pytest.skip("needs two GPUs", allow_module_level=True)

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module

import kda_ops
import kda_ops.distributed as cp
from kda_ops.nn import GatedDeltaNet, KimiDeltaAttention
from kda_ops.nn.tensor_parallel import HeadParallel
from tests.distributed.test_context_faults import ODD, REFUSED, odd_one_out
from tests.distributed.test_context_parallel import compiled
from tests.support.calls import as_leaves
from tests.support.cases import Case, replace, take
from tests.support.closeness import assert_all_close, assert_all_identical, assert_identical, oracle
from tests.support.context import step, whole
from tests.support.ranks import Ranks, device
from tests.support.shards import cut_twin

pytestmark = pytest.mark.xdist_group("ranks")  # one set of processes for all
COUNT = min(torch.cuda.device_count(), 4)
SIZES = [n for n in (2, 4) if n <= COUNT]
BF16 = torch.bfloat16
CALL = Case(H=1, HV=2, K=128, V=128, T=300, dtype=BF16, seed=3)
CUTS = {2: (0, 130, 300), 4: (0, 77, 210, 210, 300)}  # uneven, and an empty shard
LENGTHS = (65, 0, 190, 1, 20)  # one crosses every cut
sizes = pytest.mark.parametrize("size", SIZES)


@pytest.fixture(scope="module")
def ranks():
    ranks = Ranks(COUNT, "nccl")
    yield ranks
    ranks.stop()


# --- shards of the token axis ---------------------------------------------------------------------


@sizes
@pytest.mark.parametrize("gate", ["strong", "weak"])
@pytest.mark.parametrize("packed", [False, True])
def test_every_output_and_gradient_of_a_cut_call_meets_the_budget(
    ranks, variant, size, gate, packed
):
    case = replace(
        CALL,
        variant=variant,
        gate=gate,
        lengths=LENGTHS if packed else None,
        tail=24 if packed else 0,
    )
    cuts = CUTS[size]
    assert case.rows == cuts[-1]
    got = whole(ranks.run(size, step, size, case, cuts))
    assert_all_close(got, oracle(case), lambda draw: cut_twin(case, cuts, BF16, draw))


def twice(groups, size, case, cuts):
    return step(groups, size, case, cuts), step(groups, size, case, cuts, "plan")


def test_two_runs_give_the_same_bits_with_a_plan_or_without(ranks, variant):
    for first, second in ranks.run(
        SIZES[-1], twice, SIZES[-1], replace(CALL, variant=variant), CUTS[SIZES[-1]]
    ):
        assert_all_identical(first, second)


def test_one_graph_each_way_holds_the_collectives(ranks, variant):
    case, cuts = replace(CALL, variant=variant, lengths=LENGTHS, tail=24), CUTS[2]
    answers = ranks.run(2, compiled, 2, case, cuts, False)
    assert_all_identical(
        whole([found for found, _ in answers]), whole(ranks.run(2, step, 2, case, cuts))
    )
    for _, graphs in answers:
        forward, backward = ([n for n in names if n.startswith("all_")] for names in graphs)
        assert "all_gather_into_tensor" in forward and backward.count("all_gather_into_tensor") == 1


@pytest.mark.parametrize("fault", ["scale", "V", "gradient", "refused"])
def test_every_rank_is_told_what_differs_and_the_group_still_works(ranks, fault):
    for message in ranks.run(2, odd_one_out, 2, fault):
        assert message is not None and ODD[fault][1].removeprefix(REFUSED) in message, message


def graph_step(groups, size, case, cuts):
    """Run a step compiled by Inductor, and the eager one."""
    group, rank = groups[size], dist.get_rank(groups[size])
    x = take(case.inputs(device()), cuts[rank], cuts[rank + 1])
    chunk, found = {"kda": cp.chunk_kda, "gdn": cp.chunk_gdn}[case.variant], []
    for function in (chunk, torch.compile(chunk, fullgraph=True)):
        leaves = as_leaves(x)
        flags = case.flags() | {"output_final_state": False}
        o, _ = function(**(x | leaves), **flags, group=group)
        grads = torch.autograd.grad(o.float().square().sum(), list(leaves.values()))
        found.append([o.detach(), *grads])
    return max((relative(a, b) for a, b in zip(*found)), default=0.0)


def test_inductor_compiles_it(ranks):
    assert all(off < 1e-2 for off in ranks.run(2, graph_step, 2, CALL, CUTS[2]))


# --- layers ---------------------------------------------------------------------------------------


class Block(nn.Module):
    """A KDA and a GDN layer around an MLP."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.kda, self.gdn = (
            layer(256, head_dim=128, num_heads=4, expand_v=1.0)
            for layer in (KimiDeltaAttention, GatedDeltaNet)
        )
        self.up, self.down = nn.Linear(256, 512), nn.Linear(512, 256)

    def forward(self, x, group=None):
        x = x + self.kda(x, group=group)
        x = x + self.down(self.up(x).relu())
        return x + self.gdn(x, group=group)


def relative(a, b):
    return ((a.double() - b.double()).norm() / (b.double().norm() + 1e-30)).item()


def batch():
    gen = torch.Generator().manual_seed(1)
    return (torch.randn(4, 320, 256, generator=gen) for _ in range(2))


def learned(model, x, weight, group=None):
    """Return the output and gradients of one step under autocast."""
    with torch.autocast(x.device.type, BF16):
        y = model(x, group=group)
    (y.float() * weight).sum().backward()
    return {"y": y.detach().float()} | {
        n.removeprefix("module."): full(p.grad) for n, p in model.named_parameters()
    }


def full(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def layered(groups, size, how):
    """Run the step of a block sharded by rows, tokens or heads, one mesh axis per part of `how`."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    group, rank = groups[size], dist.get_rank(groups[size])
    model, (x, weight) = Block().to(device()), (t.to(device()) for t in batch())
    how, compiled = how.removesuffix(" compiled"), how.endswith("compiled")

    def compile_layers():
        if compiled:
            torch._dynamo.reset()
            for layer in (model.kda, model.gdn):
                layer.compile(backend="aot_eager", fullgraph=True)

    if how == "ddp":
        compile_layers()
        rows = slice(rank * 4 // size, (rank + 1) * 4 // size)
        return learned(
            nn.parallel.DistributedDataParallel(model, process_group=group),
            x[rows],
            size * weight[rows],
        )
    names = tuple(how.split("+"))
    mesh = (
        init_device_mesh("cuda", (2, 2), mesh_dim_names=names)
        if len(names) == 2
        else DeviceMesh.from_group(group, "cuda", mesh_dim_names=names)
    )
    if "tp" in names:
        plan = {
            "kda": HeadParallel(),
            "gdn": HeadParallel(),
            "up": ColwiseParallel(),
            "down": RowwiseParallel(),
        }
        parallelize_module(model, mesh["tp"], plan)
    data = [n for n in names if n != "tp"]
    if data:
        over = mesh[tuple(data)]._flatten("data") if len(data) > 1 else mesh[data[0]]
        for module in (model.kda, model.gdn, model):
            fully_shard(module, mesh=over)
            module.set_gradient_divide_factor(1.0)
    compile_layers()
    if "dp" in names:
        x, weight = (t.chunk(mesh["dp"].size())[mesh.get_local_rank("dp")] for t in (x, weight))
    if "cp" in names:
        x, weight = (
            t.tensor_split([100 * i for i in range(1, mesh["cp"].size())], 1)[
                mesh.get_local_rank("cp")
            ]
            for t in (x, weight)
        )
    return learned(model, x, weight, group=mesh["cp"] if "cp" in names else None)


@pytest.fixture(scope="module")
def reference():
    """Return the step in float64 on the CPU, and on one GPU."""
    block, (x, weight) = Block(), batch()
    exact = copy.deepcopy(block).double()
    y = exact(x.double())
    (y * weight).sum().backward()
    exact_found = {"y": y.detach()} | {n: p.grad for n, p in exact.named_parameters()}
    return exact_found, {
        n: t.cpu() for n, t in learned(block.cuda(), x.cuda(), weight.cuda()).items()
    }


WAYS = [(2, how) for how in ("ddp", "ddp compiled", "dp", "dp compiled", "tp", "cp")] + [
    (4, how) for how in ("cp", "dp+tp", "cp+tp", "dp+cp")
]


@pytest.mark.parametrize("size,how", WAYS)
def test_a_block_on_several_gpus_matches_one(ranks, reference, size, how):
    if size not in SIZES:
        pytest.skip("needs four GPUs")
    exact, one = reference
    parts = ranks.run(size, layered, size, how)
    for name in exact:
        if name == "y":
            continue
        budget = 2 * relative(one[name], exact[name]) + torch.finfo(BF16).eps
        for part in parts:
            assert relative(part[name], exact[name]) <= budget, (
                f"{how}: {name} is off by {relative(part[name], exact[name])}, on one GPU "
                f"{budget / 2}"
            )


def sequence_parallel(groups, size):
    """Return what is said of shards of other lengths, and an output eager and by a CUDA graph."""
    mesh = DeviceMesh.from_group(groups[size], "cuda", mesh_dim_names=("tp",))
    rank, style = mesh.get_local_rank(), HeadParallel(input_layouts=Shard(1))
    layer, (x, _) = parallelize_module(Block().kda.to(device()), mesh, style), batch()
    x, told = x.chunk(size, 1)[rank].to(device()), "nothing"
    with torch.no_grad(), torch.autocast("cuda", BF16):
        try:
            layer(x[:, rank:])
        except ValueError as error:
            told = str(error)
        layer(x)
        want = layer(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            y = layer(x)
        graph.replay()
    return told, want, y


def test_shards_of_other_lengths_are_refused_and_equal_ones_can_be_captured(ranks):
    for told, want, y in ranks.run(2, sequence_parallel, 2):
        assert told.startswith("x must have the same length on every rank"), told
        assert_identical(y, want, "the output of a replay")


# --- a device that is not the current one ---------------------------------------------------------


def test_the_device_is_that_of_the_tensors(variant):
    case = replace(CALL, variant=variant, gate="softplus", beta="sigmoid", l2norm=True, T=130)
    found = []
    chunk, recurrent, step_ = (
        getattr(kda_ops, f"{n}_{variant}{end}")
        for n, end in (("chunk", ""), ("recurrent", ""), ("recurrent", "_"))
    )
    assert torch.cuda.current_device() == 0
    for index in (0, 1):
        x = case.inputs(torch.device("cuda", index))
        leaves = {n: t if t is None else t.requires_grad_() for n, t in x.items()}
        o, state = chunk(**leaves, **case.flags())
        grads = torch.autograd.grad(
            o.float().sum() + state.sum(), [t for t in leaves.values() if t is not None]
        )
        with torch.no_grad():
            token = take(x, 0, 1)
            del token["initial_state"], token["cu_seqlens"]
            flags = {n: f for n, f in case.flags("recurrent_").items()}
            pool = x["initial_state"].detach().clone()
            decoded = step_(**token, state=pool, **flags)
            again, _ = recurrent(
                **{n: t if t is None else t.detach() for n, t in x.items()},
                **case.flags("recurrent"),
            )
        assert o.device.index == index and torch.cuda.current_device() == 0
        found.append([t.detach().cpu() for t in (o, state, *grads, decoded, pool, again)])
    for i, (a, b) in enumerate(zip(*found)):
        assert_identical(a, b, str(i))
