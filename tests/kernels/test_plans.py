"""Decode keeps the launches it has planned: for which calls, on a backend that computes nothing."""

from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kda_ops import dispatch, problem, recurrent


@pytest.fixture
def plans(monkeypatch):
    """Return the planned calls and the outputs passed to them, recorded by a stub."""
    made, outputs = [], []
    stub = SimpleNamespace(
        step=lambda p, o, final: None,
        plan_step=lambda p, final: made.append(p) or (lambda o, *rest: outputs.append(o)),
    )
    monkeypatch.setattr(dispatch, "backend", lambda device: stub)
    monkeypatch.setattr(recurrent, "_PLANS", {})
    return made, outputs


@pytest.mark.quick
def test_a_plan_is_of_one_device(plans):
    with FakeTensorMode():
        for device in ("cuda:0", "cuda:1", "cuda:0"):
            q = torch.empty(2, 1, 2, 8, device=device)
            recurrent.decode(1, (q, q, q, None, None, torch.empty(2, 2, 8, 8, device=device)), {})
    assert [p.q.device.index for p in plans[0]] == [0, 1]


def test_values_are_checked_at_every_call(plans, monkeypatch):
    monkeypatch.setattr(problem, "CHECK_VALUES", True)
    q, pool = torch.empty(2, 1, 2, 8), torch.empty(2, 2, 8, 8)
    recurrent.decode(1, (q, q, q, None, None, pool, torch.tensor([0, 1])), {})
    with pytest.raises(ValueError, match="distinct slots"):
        recurrent.decode(1, (q, q, q, None, None, pool, torch.tensor([1, 1])), {})


@pytest.mark.parametrize("place", (7, 10), ids=("num_accepted_tokens", "cu_seqlens"))
def test_integers_that_do_not_lie_together_have_no_plan(plans, place):
    def there(*shape, dtype=torch.int64):
        # not on a CPU, where offsets are read and nothing is planned
        return torch.empty(shape, dtype=dtype, device="meta")

    q, pool, wide = (
        there(1, 4, 2, 8, dtype=torch.float32),
        there(2, 2, 8, 8, dtype=torch.float32),
        there(3, 2)[:, 0],
    )
    x = [q, q, q, None, None, pool, there(2, 4), there(2), None, None, there(3)]
    recurrent.decode(1, tuple(x), {})
    x[place] = wide if place == 10 else there(2, 2)[:, 0]
    recurrent.decode(1, tuple(x), {})
    assert len(plans[0]) == 1 and not plans[1]


@pytest.mark.quick
def test_offsets_on_a_cpu_are_read_at_every_call(plans):
    q, pool = torch.empty(1, 5, 2, 8), torch.empty(1, 2, 8, 8)
    for offsets in ([0, 5], [0, 3]):
        recurrent.decode(
            1, (q, q, q, None, None, pool, None, None, None, None, torch.tensor(offsets)), {}
        )
    with pytest.raises(ValueError, match="cu_seqlens must start at 0"):
        recurrent.decode(
            1, (q, q, q, None, None, pool, None, None, None, None, torch.tensor([0, 9])), {}
        )
    assert not plans[0]


def test_a_planned_call_writes_a_contiguous_output(plans):
    q, v = torch.empty(2, 1, 2, 8), torch.empty(2, 1, 8, 2).mT
    for _ in range(2):
        o = recurrent.decode(1, (q, q, v, None, None, torch.empty(2, 2, 8, 8)), {})
    assert [x.is_contiguous() for x in plans[1]] == [True] and o.is_contiguous()
