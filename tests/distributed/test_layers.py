"""Compare layers sharded over processes by tokens, heads or rows with one process.

The tests check outputs and the gradient of every parameter.
"""

import math
import warnings
from itertools import accumulate

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import parallelize_module

import kda_ops.distributed as cp
from kda_ops.nn import GatedDeltaNet, KimiDeltaAttention
from kda_ops.nn.tensor_parallel import HeadParallel
from tests.support.ranks import Ranks, mesh_of

HIDDEN, T = 24, 30
LAYERS = {"kda": KimiDeltaAttention, "gdn": GatedDeltaNet}
PLAIN = dict(num_heads=2, head_dim=8, expand_v=1.5)
GROUPED = PLAIN | dict(num_v_heads=4, conv_bias=True)


def build(variant, options):
    """Build a small layer in float64, the same on every rank."""
    torch.manual_seed(0)
    layer = LAYERS[variant](HIDDEN, **options).double()
    with torch.no_grad():
        layer.o_norm.weight.add_(torch.rand_like(layer.o_norm.weight))
    return layer


def batch(B=1, tokens=T):
    """Return x and the weights of its outputs in the loss."""
    gen = torch.Generator().manual_seed(B * 1000 + tokens)
    return (torch.randn(B, tokens, HIDDEN, dtype=torch.float64, generator=gen) for _ in range(2))


def offsets(lengths):
    return None if lengths is None else torch.tensor([0, *accumulate(lengths)])


def whole(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def step(layer, x, weight, **options):
    """Return output, loss and gradients of one step; the loss is a sum over tokens."""
    x = x.detach().requires_grad_()
    y = layer(x, **options)
    (y * weight).sum().backward()
    return {"y": y.detach(), "dx": x.grad} | {n: whole(p.grad) for n, p in layer.named_parameters()}


def one_process(variant, options, B=1, lengths=None, tokens=T):
    return step(build(variant, options), *batch(B, tokens), cu_seqlens=offsets(lengths))


def assert_same(got, want, bound=1e-10):
    assert got.keys() == want.keys()
    for name, x in want.items():
        assert got[name].shape == x.shape, name
        assert x.abs().max() > 0, f"{name}: nothing to compare"
        error = ((got[name] - x).abs().max() / x.abs().max()).item()
        assert error <= bound, f"{name} is off by {error}"


def joined(parts, axis):
    """Join the ranks' results: concatenate tokens or rows, sum gradients of parameters."""
    return {
        n: torch.cat([p[n] for p in parts], axis) if n in ("y", "dx") else sum(p[n] for p in parts)
        for n in parts[0]
    }


# --- tokens ---------------------------------------------------------------------------------------


def over_tokens(groups, size, variant, options, cuts, B, lengths, how):
    group, rank = groups[size], dist.get_rank(groups[size])
    mine = slice(cuts[rank], cuts[rank + 1])
    layer, (x, weight) = build(variant, options), batch(B, cuts[-1])
    if how == "plan":
        group = cp.plan_context(mine.stop - mine.start, group)
    if how == "compiled":
        torch._dynamo.reset()
        layer = torch.compile(layer, backend="aot_eager", fullgraph=True)
    found = step(layer, x[:, mine], weight[:, mine], cu_seqlens=offsets(lengths), group=group)
    return {n.removeprefix("_orig_mod."): d for n, d in found.items()}


@pytest.mark.parametrize(
    "size,cuts,lengths,options",
    [
        (2, (0, 17, T), None, PLAIN),
        (2, (0, 17, T), (3, 20, 0, 5), GROUPED),  # two tokens after the last offset
        (3, (0, 1, 3, T), None, GROUPED),  # shards shorter than a convolution's tail
        (3, (0, 12, 12, T), (11, 19), PLAIN),  # an empty shard
        (3, (0, 10, 20, T), (4, 26), PLAIN | dict(use_short_conv=False)),
        (2, (0, 10, T), None, PLAIN | dict(conv_size=1)),
    ],
    ids=str,
)
def test_a_layer_across_ranks_matches_one_process(ranks, variant, size, cuts, lengths, options):
    B = 2 if lengths is None else 1
    parts = ranks.run(size, over_tokens, size, variant, options, cuts, B, lengths, "group")
    assert_same(joined(parts, 1), one_process(variant, options, B, lengths))


@pytest.mark.parametrize("how", ["plan", "compiled"])
@pytest.mark.parametrize("variant,lengths", [("kda", (3, 20, 0, 5)), ("gdn", None)])
def test_a_plan_or_one_compiled_graph_gives_the_same(ranks, variant, lengths, how):
    parts = ranks.run(2, over_tokens, 2, variant, GROUPED, (0, 17, T), 1, lengths, how)
    assert_same(joined(parts, 1), one_process(variant, GROUPED, 1, lengths))


REFUSED = "rank 1 of the group refused its call: "
# what rank 1 changes in (layer, x, arguments), and what every rank is told
FAULTS = {
    "hidden": (
        lambda layer, x: dict(x=x[..., 1:]),
        REFUSED + "x must have shape [B, T, hidden_size]",
    ),
    "rows": (
        lambda layer, x: dict(x=x.repeat(2, 1, 1)),
        f"x is torch.float64 [1, T, {HIDDEN}] on rank 0",
    ),
    "dtype": (
        lambda layer, x: dict(layer=layer.float(), x=x.float()),
        f"torch.float32 [1, T, {HIDDEN}] on rank 1",
    ),
    "offsets": (
        lambda layer, x: dict(cu_seqlens=offsets((3, 20))),
        "cu_seqlens is None on rank 0, [0, 3, 23] on rank 1",
    ),
    "variant": (
        lambda layer, x: dict(layer=build("gdn", PLAIN)),
        "layer is KimiDeltaAttention on rank 0, GatedDeltaNet on rank 1",
    ),
    "heads": (
        lambda layer, x: dict(layer=build("kda", PLAIN | dict(num_heads=3))),
        "num_heads is 2 on rank 0, 3 on rank 1",
    ),
    "frozen input": (
        lambda layer, x: dict(x=x.detach()),
        "a gradient of x wanted is True on rank 0, False on rank 1",
    ),
    "frozen": (
        lambda layer, x: dict(layer=layer.requires_grad_(False), x=x.detach()),
        "a gradient wanted is True on rank 0, False on rank 1",
    ),
    "mask": (
        lambda layer, x: dict(attention_mask=torch.ones(x.shape[:2])),
        REFUSED + "attention_mask: padding is not skipped across ranks",
    ),
}


def odd_one_out(groups, size):
    """Return each rank's message for each fault of rank 1; a correct call follows each."""
    group, rank, told = groups[size], dist.get_rank(groups[size]), {}
    for fault, (change, _) in FAULTS.items():
        layer, (x, weight) = build("kda", PLAIN), batch()
        x = x[:, :10].requires_grad_()
        given = dict(layer=layer, x=x, group=group) | (change(layer, x) if rank == 1 else {})
        try:
            given.pop("layer")(**given)
        except (ValueError, TypeError) as error:
            told[fault] = str(error)
        same = x.detach()[:, :, :1].expand(1, 10, HIDDEN)
        step(build("kda", PLAIN), same, weight[:, :10], group=group)
    return told


def test_every_rank_is_told_what_differs(ranks):
    for rank, told in enumerate(ranks.run(3, odd_one_out, 3)):
        for fault, (_, want) in FAULTS.items():
            mine = want.removeprefix(REFUSED) if rank == 1 else want
            assert mine in told.get(fault, "nothing"), fault


def test_a_cache_belongs_to_one_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        layer = build("kda", PLAIN)
        with (
            torch.no_grad(),
            pytest.raises(
                ValueError, match="cache: across ranks a layer neither reads nor fills one"
            ),
        ):
            layer(next(batch()), cache=layer.new_cache(1), group=dist.group.WORLD)
    finally:
        dist.destroy_process_group()


@pytest.mark.bits
def test_across_ranks_projections_may_be_modules_without_a_weight():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        layer, (x, _) = build("kda", PLAIN), batch()
        want = layer(x)
        for name in ("q_proj", "k_proj", "v_proj"):
            setattr(layer, name, nn.Sequential(getattr(layer, name)))
        assert torch.equal(layer(x, group=dist.group.WORLD), want)
    finally:
        dist.destroy_process_group()


# --- heads ----------------------------------------------------------------------------------------

SEQUENCES = dict(input_layouts=Shard(1), output_layouts=Shard(1))
HOW = (
    "dense",
    "packed",
    "padded",
    "sequence parallel",
    "compiled",
    "compiled and sequence parallel",
)


def over_heads(groups, size, variant, options, how):
    """Run a step of a layer whose heads are sharded over two ranks.

    x is whole on both, or sharded with sequence parallelism.
    """
    mesh, rank = mesh_of(groups[size]), dist.get_rank(groups[size])
    layouts = SEQUENCES if "sequence parallel" in how else {}
    layer = parallelize_module(build(variant, options), mesh, HeadParallel(**layouts))
    frozen = parallelize_module(build(variant, options).requires_grad_(False), mesh, HeadParallel())
    assert all(p.requires_grad for p in layer.parameters()) and not any(
        p.requires_grad for p in frozen.parameters()
    )
    assert layer.A_log._no_weight_decay
    assert layer.A_log.to_local().shape[0] == layer.num_v_heads // size
    B, arguments = 2, {}
    if how == "packed":
        B, arguments = 1, {"cu_seqlens": offsets((3, 20, 0, 5))}
    x, weight = batch(B)
    if how == "padded":
        arguments = {"attention_mask": (torch.arange(T) >= torch.tensor([[7], [0]])).double()}
    if "sequence parallel" in how:
        x, weight = x.chunk(size, 1)[rank], weight.chunk(size, 1)[rank]
    if "compiled" in how:
        torch._dynamo.reset()
        layer = torch.compile(layer, backend="aot_eager", fullgraph=True)
    found = step(layer, x, weight, **arguments)
    return {n.removeprefix("_orig_mod."): d for n, d in found.items()}


@pytest.mark.parametrize("how", HOW)
def test_a_layer_with_heads_on_two_ranks_matches_one_process(ranks, variant, how):
    options = GROUPED if how != "dense" else PLAIN
    parts = ranks.run(2, over_heads, 2, variant, options, how)
    if "sequence parallel" in how:
        parts = [p | {n: torch.cat([q[n] for q in parts], 1) for n in ("y", "dx")} for p in parts]
    layer, (x, weight) = build(variant, options), batch(1 if how == "packed" else 2)
    mask = (torch.arange(T) >= torch.tensor([[7], [0]])).double() if how == "padded" else None
    want = step(
        layer,
        x,
        weight,
        cu_seqlens=offsets((3, 20, 0, 5)) if how == "packed" else None,
        attention_mask=mask,
    )
    for part in parts:
        assert_same(part, want)


def over_tokens_and_heads(groups, size, tokens, how):
    """Run a step on x whose tokens `Shard(1)` gives the ranks, the first ones more than the last.

    x is a DTensor, or each rank's plain part.
    """
    mesh, rank = mesh_of(groups[size]), dist.get_rank(groups[size])
    style = HeadParallel(**SEQUENCES, use_local_output=how == "plain")
    layer, (x, weight) = parallelize_module(build("kda", GROUPED), mesh, style), batch(2, tokens)
    x, weight = (distribute_tensor(t, mesh, [Shard(1)]) for t in (x, weight))
    if how == "DTensor":
        assert x.to_local().shape[1] == (tokens + size - 1 - rank) // size
        return {n: whole(t) for n, t in step(layer, x, weight).items()}
    try:
        step(layer, x.to_local(), weight.to_local())
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("tokens", (7, 1))
def test_heads_of_a_dtensor_of_any_length_match_one_process(ranks, tokens):
    want = step(build("kda", GROUPED), *batch(2, tokens))
    want = {n: d for n, d in want.items() if tokens > 1 or d.any()}  # one token reads no decay
    for got in ranks.run(2, over_tokens_and_heads, 2, tokens, "DTensor"):
        assert_same({n: got[n] for n in want}, want)


@pytest.mark.quick
@pytest.mark.parametrize("tokens, lengths", ((71, "36, 35"), (1, "1, 0")))
def test_every_rank_is_told_that_plain_shards_differ_in_length(ranks, tokens, lengths):
    want = (
        "x must have the same length on every rank, because HeadParallel shards a plain x by "
        f"input_layouts=Shard(1), got T = {lengths} by rank: pass a DTensor, or the whole x"
    )
    for told in ranks.run(2, over_tokens_and_heads, 2, tokens, "plain"):
        assert told is not None and told.startswith(want)


# what rank 1 passes as x, and what every rank is told
ODD = {
    "rows": (
        lambda x: x[:1],
        "x is torch.float64 [2, T, 24] on rank 0, torch.float64 [1, T, 24] on rank 1",
    ),
    "hidden": (lambda x: x[..., 1:], "torch.float64 [2, T, 23] on rank 1"),
    "dtype": (lambda x: x.float(), "torch.float32 [2, T, 24] on rank 1"),
    "gradient": (lambda x: x.detach(), "a gradient of x wanted is True on rank 0, False on rank 1"),
    "rank": (lambda x: x[0], "torch.float64 [30, T] on rank 1"),
    "tensor": (lambda x: None, "NoneType on rank 1"),
    "layout": (lambda x: x.detach().to_sparse(), "x must be a dense tensor"),
}


def odd_shard(groups, size):
    """Return each rank's message for each fault of rank 1; a correct call follows each."""
    mesh, rank, told = mesh_of(groups[size]), dist.get_rank(groups[size]), {}
    layer = parallelize_module(build("kda", PLAIN), mesh, HeadParallel(**SEQUENCES))
    x = next(batch(2)).requires_grad_()
    for fault, (change, _) in ODD.items():
        try:
            layer(change(x) if rank == 1 else x)
        except (ValueError, TypeError) as error:
            told[fault] = str(error)
        layer(x).sum().backward()
    return told


def test_every_rank_is_told_how_plain_shards_differ(ranks):
    for told in ranks.run(2, odd_shard, 2):
        for fault, (_, words) in ODD.items():
            assert words in told.get(fault, "nothing"), fault


def collectives(groups, size):
    """Count the collectives of a forward call: of layouts, with plain x and with DTensors."""
    mesh, counts = mesh_of(groups[size]), {}
    for name, layouts, kind in (
        ("whole", {}, "plain"),
        ("whole", {}, "DTensor"),
        ("sharded", SEQUENCES, "DTensor"),
        ("sharded", SEQUENCES, "plain"),
    ):
        layer = parallelize_module(build("kda", PLAIN), mesh, HeadParallel(**layouts))
        x = distribute_tensor(next(batch(2)), mesh, [layouts.get("input_layouts", Replicate())])
        with CommDebugMode() as counted:
            layer(x.to_local() if kind == "plain" else x)
        counts[name, kind] = counted.get_total_counts()
    return counts


def test_only_plain_shards_are_compared(ranks):
    """Gathering x and scattering y are one collective each, summing y is one, comparing another."""
    for counts in ranks.run(2, collectives, 2):
        assert counts == {
            ("whole", "plain"): 1,
            ("whole", "DTensor"): 1,
            ("sharded", "DTensor"): 2,
            ("sharded", "plain"): 3,
        }


def decode_sharded(groups, size, variant, heads):
    """Make a cache before any forward of a layer sharded by heads, by FSDP2, or by both."""
    layer, mesh, (x, _) = build(variant, GROUPED), mesh_of(groups[size]), batch(2)
    if heads == size:
        layer = parallelize_module(layer, mesh, HeadParallel())
    elif heads > 1:
        grid = init_device_mesh("cpu", (size // heads, heads), mesh_dim_names=("dp", "tp"))
        layer, mesh = parallelize_module(layer, grid["tp"], HeadParallel()), grid["dp"]
    if heads < size:
        layer = fully_shard(layer, mesh=mesh)
    with torch.no_grad():
        cache = layer.new_cache(2)
        assert cache.state.shape[1] == 4 // heads
        steps = (layer(x[:, t : t + 1], cache=cache) for t in range(25, T))
        return torch.cat([layer(x[:, :25], cache=cache), *steps], 1)


@pytest.mark.parametrize("size, heads", [(2, 1), (2, 2), (4, 2)])
def test_a_cache_has_the_heads_of_its_rank_before_the_first_forward(ranks, variant, size, heads):
    x, _ = batch(2)
    want = build(variant, GROUPED)(x)
    for got in ranks.run(size, decode_sharded, size, variant, heads):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-10)


def wrong_plans(groups, size):
    mesh = mesh_of(groups[size])
    for module, kind in (
        (build("kda", PLAIN | dict(num_heads=3)), ValueError),
        (nn.Linear(2, 2), TypeError),
    ):
        with pytest.raises(kind, match="HeadParallel"):
            parallelize_module(module, mesh, HeadParallel())


@pytest.mark.quick
def test_heads_that_the_ranks_do_not_divide_are_refused(ranks):
    ranks.run(2, wrong_plans, 2)


# --- rows, heads and tokens on the dimensions of one mesh -----------------------------------------


class Block(nn.Module):
    """A KDA and a GDN layer around an MLP."""

    def __init__(self):
        super().__init__()
        self.kda, self.gdn = build("kda", GROUPED), build("gdn", PLAIN)
        self.up, self.down = nn.Linear(HIDDEN, 40).double(), nn.Linear(40, HIDDEN).double()

    def forward(self, x, group=None):
        x = x + self.kda(x, group=group)
        x = x + self.down(self.up(x).relu())
        return x + self.gdn(x, group=group)


def trained(model, x, weight, mesh=None, group=None):
    """Return the parameters after two steps of SGD, and the output before them."""
    first, optimizer = None, torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(2):
        y = model(x, group=group)
        first = y.detach() if first is None else first
        (y * weight).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"y": first} | {n: whole(p.detach()) for n, p in model.named_parameters()}


def over_a_mesh(groups, sizes, names):
    """Train with rows on "dp" by FSDP2, tokens on "cp" and heads on "tp".

    FSDP2 shards the other parameters over "dp"; they are replicated on "tp".
    """
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    torch.manual_seed(0)
    model, (x, weight) = Block(), batch(2)
    if "tp" in names:
        plan = {
            "kda": HeadParallel(),
            "gdn": HeadParallel(),
            "up": ColwiseParallel(),
            "down": RowwiseParallel(),
        }
        model = parallelize_module(model, mesh["tp"], plan)
    replicas = [n for n in names if n != "tp"]
    data = mesh[tuple(replicas)]._flatten("data") if len(replicas) > 1 else mesh[replicas[0]]
    for module in (model.kda, model.gdn, model):
        fully_shard(module, mesh=data)
        module.set_gradient_divide_factor(1.0)  # the loss is a sum, so FSDP2 must not average
    if "dp" in names:
        x, weight = (t.chunk(mesh["dp"].size(), 0)[mesh.get_local_rank("dp")] for t in (x, weight))
    if "cp" in names:
        x, weight = (
            t[:, :13] if mesh.get_local_rank("cp") == 0 else t[:, 13:] for t in (x, weight)
        )
    found = trained(model, x, weight, group=mesh["cp"] if "cp" in names else None)
    return {n: mesh.get_local_rank(n) for n in names}, found


@pytest.mark.parametrize("names", [("dp", "tp"), ("cp", "tp"), ("dp", "cp")], ids="+".join)
def test_training_on_a_mesh_of_two_dimensions_matches_one_process(ranks, names):
    assert_mesh(ranks.run(4, over_a_mesh, (2, 2), names))


@pytest.mark.nightly  # any two of the dimensions are tested at every change
def test_training_on_a_mesh_of_three_dimensions_matches_one_process():
    ranks = Ranks(8)
    try:
        assert_mesh(ranks.run(8, over_a_mesh, (2, 2, 2), ("dp", "cp", "tp")))
    finally:
        ranks.stop()


def assert_mesh(answers):
    torch.manual_seed(0)
    want = trained(Block(), *batch(2))
    y = want.pop("y")
    for place, found in answers:
        part = y.chunk(2, 0)[place["dp"]] if "dp" in place else y
        part = part if "cp" not in place else part[:, :13] if place["cp"] == 0 else part[:, 13:]
        assert_same(found, {"y": part} | want)


def over_rows(groups, size, how, compiled):
    """Train with rows sharded over the ranks.

    DistributedDataParallel averages gradients, so each loss is multiplied by the number of ranks.
    FSDP2 sums.
    """
    rank = dist.get_rank(groups[size])
    torch.manual_seed(0)
    model, (x, weight) = Block(), batch(2)
    if how == "fsdp":
        for module in (model.kda, model.gdn, model):
            fully_shard(module, mesh=mesh_of(groups[size]))
            module.set_gradient_divide_factor(1.0)
    if compiled:
        torch._dynamo.reset()
        for layer in (model.kda, model.gdn):
            layer.compile(backend="aot_eager", fullgraph=True)
    if how == "ddp":
        model = nn.parallel.DistributedDataParallel(model, process_group=groups[size])
        weight = size * weight
    found = trained(model, x[rank : rank + 1], weight[rank : rank + 1])
    return {n.removeprefix("module."): p for n, p in found.items()}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_data_parallel_training_matches_one_process(ranks, how, compiled):
    parts = ranks.run(2, over_rows, 2, how, compiled)
    torch.manual_seed(0)
    want = trained(Block(), *batch(2))
    for rank, part in enumerate(parts):
        assert_same(part, want | {"y": want["y"][rank : rank + 1]})


def in_two_precisions(groups, size, variant, how):
    """Two steps in bfloat16: the gate's dtypes in forward, gradients, and what was warned of."""
    mesh, found = mesh_of(groups[size]), {"gate": set(), "projections": set()}
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    torch.manual_seed(0)
    layer = LAYERS[variant](HIDDEN, **GROUPED, dtype=torch.bfloat16 if how == "dtype" else None)
    model = nn.Sequential(nn.RMSNorm(HIDDEN, dtype=layer.q_proj.weight.dtype), layer)
    if how == "dtype":
        fully_shard(list(layer.children()), mesh=mesh)
        fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    if how == "policy":
        fully_shard(list(layer.children()), mesh=mesh, mp_policy=policy)
        fully_shard(layer, mesh=mesh)
    if how in ("policy", "whole"):
        fully_shard(model, mesh=mesh, mp_policy=policy)
    x = next(batch(size))[dist.get_rank(groups[size])][None]
    x = x.to(torch.bfloat16 if how == "dtype" else torch.float32)

    def look(q_conv1d, args):
        found["gate"] |= {layer.A_log.dtype, layer.dt_bias.dtype}
        found["projections"] |= {args[0].dtype, q_conv1d.weight.dtype}

    layer.q_conv1d.register_forward_pre_hook(look)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(2):
            model(x).float().square().sum().backward()
    found["warned"] = {str(w.message) for w in warned if "A_log" in str(w.message)}
    found["gradients"] = {n: whole(p.grad).float() for n, p in layer.named_parameters()}
    return found


@pytest.mark.parametrize("how", ["dtype", "policy"])
def test_fsdp_in_bfloat16_keeps_the_gate_in_float32(ranks, variant, how):
    torch.manual_seed(0)
    layer = LAYERS[variant](HIDDEN, **GROUPED, dtype=torch.bfloat16 if how == "dtype" else None)
    model = nn.Sequential(nn.RMSNorm(HIDDEN), layer.float())
    (model(next(batch(2)).float()).square().sum()).backward()  # a mean of two ranks, two steps
    for found in ranks.run(2, in_two_precisions, 2, variant, how):
        assert found["gate"] == {torch.float32} and found["projections"] == {torch.bfloat16}
        assert not found["warned"]
        for name, p in layer.named_parameters():
            error = (found["gradients"][name] - p.grad).norm() / p.grad.norm()
            assert error < 0.1, f"{name} is off by {error}"


def test_a_policy_that_rounds_the_gate_warns_and_says_what_to_do(ranks, variant):
    for found in ranks.run(2, in_two_precisions, 2, variant, "whole"):
        assert found["gate"] == {torch.bfloat16}
        (words,) = found["warned"]
        assert words.startswith("A_log and dt_bias must stay in float32, got torch.bfloat16")
        assert "list(layer.children())" in words


def decode_in_bfloat16(groups, size, variant):
    """FSDP2 converts what children sharded with a policy get, a cache's tails too."""
    mesh, (x, _) = mesh_of(groups[size]), batch(2)
    policy, x = MixedPrecisionPolicy(param_dtype=torch.bfloat16), x.bfloat16()

    def sharded():
        torch.manual_seed(0)
        layer = LAYERS[variant](HIDDEN, **GROUPED)
        fully_shard(list(layer.children()), mesh=mesh, mp_policy=policy)
        return fully_shard(layer, mesh=mesh)

    with torch.no_grad():
        layer = sharded()
        cache = layer.new_cache(2)
        with pytest.raises(TypeError, match="convolution tails of torch.bfloat16 on cpu") as raised:
            layer(x, cache=cache)
        assert "new_cache(2, dtype=torch.bfloat16" in str(raised.value)
        assert not any(b.any() for b in cache.buffers())
        layer = sharded()  # torch 2.11 cannot reset FSDP2 after a forward that raised
        cache = layer.new_cache(2, dtype=torch.bfloat16)
        steps = (layer(x[:, t : t + 1], cache=cache) for t in (9, 10))
        parts = [layer(x[:, :9], cache=cache), *steps]
        return torch.cat(parts, 1).float(), layer(x[:, :11]).float()


def test_a_cache_of_another_dtype_is_refused_where_fsdp_would_convert_it(ranks, variant):
    for steps, at_once in ranks.run(2, decode_in_bfloat16, 2, variant):
        torch.testing.assert_close(steps, at_once, rtol=0, atol=0.02 * at_once.abs().max().item())


def test_training_changes_the_compared_parameters():
    torch.manual_seed(0)
    before, after = dict(Block().named_parameters()), trained(Block(), *batch(2))
    assert all(
        math.isfinite(after[n].sum()) and (after[n] - p).abs().max() > 1e-6
        for n, p in before.items()
        if n in after
    )
