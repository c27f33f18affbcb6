"""Exchange the tokens before a shard, which a short convolution reads across ranks."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st

import kda_ops.distributed as cp
from kda_ops.nn.short_convolution import ShortConvolution
from tests.support.context import cuts_of


def tails(groups, size, lengths, cuts, taps, planned):
    """Return this rank's tail of a counting x, and the gradient of a weighted sum of all tails."""
    group, rank = groups[size], dist.get_rank(groups[size])
    whole_x, weight = tail_case(lengths, cuts, taps)
    x = whole_x[:, cuts[rank] : cuts[rank + 1]].requires_grad_()
    cu_seqlens = None if lengths is None else torch.tensor(cuts_of(*lengths))
    tail = cp.exchange_tail(
        x, taps, cp.plan_context(x.shape[1], group) if planned else group, cu_seqlens
    )
    (dx,) = torch.autograd.grad((tail * weight[rank]).sum(), [x])
    return tail.detach(), dx


def tail_case(lengths, cuts, taps):
    """Return x [B, T, D] of all ranks, and for each rank weights of its tail's shape."""
    B, N = (2, 2) if lengths is None else (1, len(lengths))
    gen = torch.Generator().manual_seed(0)
    return torch.randn(B, cuts[-1], 3, generator=gen), torch.randn(
        len(cuts) - 1, N, taps - 1, 3, generator=gen
    )


def expected_tails(lengths, cuts, taps):
    x, weight = tail_case(lengths, cuts, taps)
    dx = torch.zeros_like(x)
    seams = cuts_of(*lengths) if lengths is not None else (0, cuts[-1])
    out = []
    for rank, start in enumerate(cuts[:-1]):
        tail = torch.zeros_like(weight[rank])
        for n, (begin, end) in enumerate(zip(seams, seams[1:])):
            if lengths is None or begin < start < end:
                row = slice(None) if lengths is None else n
                source = slice(None) if lengths is None else 0
                for j, place in enumerate(range(start - taps + 1, start)):
                    if place >= begin:
                        tail[row, j] = x[source, place]
                        dx[source, place] += weight[rank][row, j]
        out.append(tail)
    return out, dx


@st.composite
def tail_cuts(draw):
    lengths = draw(st.none() | st.lists(st.integers(0, 9), min_size=1, max_size=4).map(tuple))
    T = draw(st.integers(0, 20)) if lengths is None else sum(lengths) + draw(st.integers(0, 3))
    size = draw(st.sampled_from((2, 3, 4)))
    inner = sorted(draw(st.lists(st.integers(0, T), min_size=size - 1, max_size=size - 1)))
    return lengths, (0, *inner, T), draw(st.sampled_from((4, 1, 2, 7)))


@given(tail_cuts(), st.booleans())
@example((None, (0, 1, 2, 3, 9), 4), False)  # three ranks contribute one token each
@example(((2, 7), (0, 4, 4, 5, 9), 4), True)  # an empty shard, and a sequence start in the tail
def test_a_tail_is_the_tokens_before_the_shard(ranks, drawn, planned):
    lengths, cuts, taps = drawn
    size = len(cuts) - 1
    answers = ranks.run(size, tails, size, lengths, cuts, taps, planned)
    want, dx = expected_tails(lengths, cuts, taps)
    for (tail, _), expected in zip(answers, want):
        assert torch.equal(tail, expected)
    assert torch.allclose(torch.cat([d for _, d in answers], 1), dx, atol=1e-6)


def convolution(groups, size, lengths, cuts):
    """Run a layer's convolution on whole sequences, and on this rank's shard with its tail."""
    group, rank = groups[size], dist.get_rank(groups[size])
    torch.manual_seed(0)
    layer = ShortConvolution(6, 4, bias=True).double()
    x = torch.randn(2 if lengths is None else 1, cuts[-1], 6, dtype=torch.float64)
    plan = cp.plan_context(cuts[rank + 1] - cuts[rank], group)
    cu_seqlens = None if lengths is None else torch.tensor(cuts_of(*lengths))

    def run(x, tail, offsets):
        x, weight = x.clone().requires_grad_(), layer.weight
        y = layer(x, None, offsets, initial_tail=None if tail is None else tail(x))
        dx, dweight = torch.autograd.grad(y.square().sum(), [x, weight])
        return y.detach(), dx, dweight

    shard = x[:, cuts[rank] : cuts[rank + 1]]
    return run(x, None, cu_seqlens), run(
        shard,
        lambda x: cp.exchange_tail(x, 4, plan, cu_seqlens),
        None if lengths is None else plan.local(cu_seqlens),
    )


@pytest.mark.quick
@pytest.mark.parametrize("lengths", [None, (3, 20, 7)])
def test_the_layers_convolution_takes_the_tail(ranks, lengths):
    answers = ranks.run(3, convolution, 3, lengths, cuts_of(10, 2, 18))
    (y, dx, dweight), shards = answers[0][0], [shard for _, shard in answers]
    assert torch.allclose(torch.cat([s[0] for s in shards], 1), y, atol=1e-12)
    assert torch.allclose(torch.cat([s[1] for s in shards], 1), dx, atol=1e-12)
    assert torch.allclose(sum(s[2] for s in shards), dweight, atol=1e-12)


def compiled_tail(groups, size, cuts):
    """Run a convolution across a cut, compiled and eager, without a plan."""
    group, rank = groups[size], dist.get_rank(groups[size])

    def convolve(x, group):
        return torch.cat([cp.exchange_tail(x, 3, group), x], 1).unfold(1, 3, 1).prod(-1)

    torch._dynamo.reset()
    found = []
    for function in (convolve, torch.compile(convolve, fullgraph=True, backend="aot_eager")):
        x = tail_case(None, cuts, 3)[0][:, cuts[rank] : cuts[rank + 1]].requires_grad_()
        y = function(x, group)
        found.append({"y": y.detach(), "dx": torch.autograd.grad(y.sum(), [x])[0]})
    return found


def test_exchange_tail_compiles(ranks):
    for eager, graph in ranks.run(2, compiled_tail, 2, cuts_of(5, 9)):
        for name in eager:
            torch.testing.assert_close(graph[name], eager[name], rtol=1e-6, atol=1e-6)
