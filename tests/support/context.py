"""Shard calls across ranks: run one rank's shard, and join the results of all ranks."""

from __future__ import annotations

from itertools import accumulate

import torch
import torch.distributed as dist

import kda_ops.distributed as cp
from tests.support.calls import as_leaves, with_gradients
from tests.support.cases import Case, take
from tests.support.closeness import assert_all_identical
from tests.support.ranks import device, mesh_of

CHUNK = {"kda": cp.chunk_kda, "gdn": cp.chunk_gdn}
# each rank's part of the loss on the final state: exact in any dtype
WEIGHTS = {2: (0.5, 0.5), 3: (0.5, 0.25, 0.25), 4: (0.25, 0.25, 0.25, 0.25)}


def cuts_of(*lengths):
    return (0, *accumulate(lengths))


EVERYTHING = Case(T=150, H=2, HV=4, gate="softplus", beta="sigmoid", l2norm=True, seed=1)
CUTS = {2: cuts_of(70, 80), 3: cuts_of(64, 23, 63), 4: cuts_of(1, 85, 0, 64)}


def leaves_of(case, rank, cuts):
    """Return this rank's inputs; those with gradients are leaves."""
    a, b = cuts[rank : rank + 2]
    inputs = take(case.inputs(device()), a, b)
    return inputs | as_leaves(inputs)


def gradients(case, rank, size, cuts, x, o, final_state):
    do, dfinal_state = case.cotangents(o.device)
    outs = {"o": o} | ({"final_state": final_state} if case.final else {})
    cotangents = do[:, cuts[rank] : cuts[rank + 1]], WEIGHTS[size][rank] * dfinal_state
    wanted = {n: t for n, t in x.items() if t is not None and t.requires_grad}
    return with_gradients(outs, wanted, cotangents)


def step(groups, size, case, cuts, how="group"):
    """Run one training step on a shard."""
    group = groups[size]
    rank = group.rank if how == "planned" else dist.get_rank(group)
    if how == "plan":
        group = cp.plan_context(cuts[rank + 1] - cuts[rank], group)
    if how == "mesh":
        group = mesh_of(group)
    x, chunk = leaves_of(case, rank, cuts), CHUNK[case.variant]
    o, final_state = chunk(**x, **case.flags(), group=group)
    assert (final_state is not None) == case.final
    return gradients(case, rank, size, cuts, x, o, final_state)


def whole(parts):
    """Join the results of all ranks into those of one process."""
    merged = {}
    for name in parts[0]:
        each = [p[name] for p in parts]
        if name == "final_state":
            assert_all_identical({name: each[0]}, {name: each[-1]})
            merged[name] = each[0]
        elif name in ("dA_log", "ddt_bias", "dinitial_state"):
            merged[name] = sum(each)
        else:
            merged[name] = torch.cat(each, 1)
    return merged


def assert_equal(got, want, bound=1e-10):
    assert got.keys() == want.keys()
    for name, x in want.items():
        assert got[name].shape == x.shape and got[name].dtype == x.dtype, name
        error = (got[name] - x).abs().max().item() if x.numel() else 0.0
        assert error <= bound * max(1.0, x.abs().max().item() if x.numel() else 0.0), (
            f"{name} is off by {error}"
        )
