"""Layers under torch.compile and torch.func."""

import copy

import pytest
import torch
import torch._dynamo.testing

from kda_ops import dispatch
from kda_ops.nn import GatedRMSNorm, KimiDeltaAttention, ShortConvolution
from kda_ops.recurrent import Decode
from tests.support.layers import LENGTHS, build, close, gradients, rows


@pytest.mark.quick
def test_training_compiles_to_one_graph_for_all_sizes(make):
    torch._dynamo.reset()
    layer = build(make, num_v_heads=4)
    frames = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=frames)
    for B, T in [(2, 65), (3, 40), (4, 130)]:
        x = rows(B, T).requires_grad_()
        y, want = compiled(x), layer(x)
        close(y, want)
        for ours, theirs in zip(gradients(layer, y, x), gradients(layer, want, x)):
            close(ours, theirs)
    assert frames.frame_count <= 2


@torch.no_grad()
def test_masked_and_packed_calls_compile(make):
    torch._dynamo.reset()
    layer = build(make, num_v_heads=4)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x, mask = rows(3, 70), torch.arange(70) >= torch.tensor([0, 69, 30])[:, None]
    close(compiled(x, attention_mask=mask), layer(x, attention_mask=mask))
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0)
    x = rows(1, int(offsets[-1]))
    close(compiled(x, cu_seqlens=offsets), layer(x, cu_seqlens=offsets))


@torch.no_grad()
def test_compiled_decode_writes_the_cache_in_place_and_compiles_once(make):
    torch._dynamo.reset()
    layer, x = build(make, num_v_heads=4), rows(2, 12)
    frames = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=frames)
    for _ in range(2):  # a second cache runs the same code
        cache = layer.new_cache(2)
        addresses = [buffer.data_ptr() for buffer in cache.buffers()]
        prompt = layer(x[:, :4], cache=cache)
        close(
            torch.cat([prompt, *(compiled(x[:, t : t + 1], cache=cache) for t in range(4, 12))], 1),
            layer(x),
        )
        assert addresses == [buffer.data_ptr() for buffer in cache.buffers()]
    assert frames.frame_count == 1


@torch.no_grad()
def test_inductor_decodes_without_copying_the_state(monkeypatch):
    torch._dynamo.reset()
    states, backend = [], dispatch.backend(torch.device("cpu"))
    run = backend.run

    def note(kind, rank, args, flags):
        states.extend([args[5].data_ptr()] if kind is Decode else ())
        return run(kind, rank, args, flags)

    monkeypatch.setattr(backend, "run", note)
    layer, x = build(KimiDeltaAttention).float(), rows(2, 3).float()
    compiled, cache = torch.compile(layer, fullgraph=True), layer.new_cache(2)
    y = torch.cat([compiled(x[:, t : t + 1], cache=cache) for t in range(3)], 1)
    assert states == [cache.state.data_ptr()] * 3  # the operator gets the buffer itself
    close(y, layer(x), atol=1e-5)


WRITES = {
    "decode": lambda layer, x, cache: layer(x[:, :1], cache=cache),
    "prefill": lambda layer, x, cache: layer(x, cache=cache),
    "tail": lambda layer, x, cache: layer.q_conv1d(x[..., :16], cache.q_conv),
    "reset": lambda layer, x, cache: cache.reset(),
}


@pytest.mark.once
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("backend", ("eager", "aot_eager", "inductor"))
@torch.no_grad()
def test_a_graph_refuses_a_cache_of_inference_mode_before_it_is_written(backend, write):
    torch._dynamo.reset()
    layer, x = build(KimiDeltaAttention), rows(2, 7)
    compiled = torch.compile(WRITES[write], fullgraph=True, backend=backend)
    compiled(layer, x, layer.new_cache(2))  # a graph for other caches does not serve this one
    with torch.inference_mode():
        cache = layer.new_cache(2)
        layer(x, cache=cache)
    before = [buffer.clone() for buffer in cache.buffers()]
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"was made under torch.inference_mode\(\) and must"):
            compiled(layer, x, cache)
        assert all(map(torch.equal, cache.buffers(), before))
    want = copy.deepcopy(cache)
    with torch.inference_mode():
        compiled(layer, x, cache)
        WRITES[write](layer, x, want)
    for ours, theirs in zip(cache.buffers(), want.buffers()):
        close(ours, theirs)


@pytest.mark.parametrize("mode", (torch.no_grad, torch.inference_mode))
def test_a_graph_checks_at_run_time_only_caches_of_inference_mode(mode):
    torch._dynamo.reset()
    layer, graphs = build(KimiDeltaAttention), []
    with mode():
        compiled = torch.compile(layer, backend=lambda graph, _: graphs.append(graph) or graph)
        compiled(rows(2, 1), cache=layer.new_cache(2))
    checks = [n for n in graphs[0].graph.nodes if "check_writable" in str(n.target)]
    assert len(checks) == (mode is torch.inference_mode)


@torch.no_grad()
def test_a_layer_with_offsets_goes_through_transforms(make):
    layer, x, offsets = build(make), rows(1, 10), torch.tensor([0, 4, 10])
    want = layer(x, cu_seqlens=offsets)
    torch.testing.assert_close(
        torch.func.functionalize(lambda x, offsets: layer(x, cu_seqlens=offsets))(x, offsets), want
    )
    torch.testing.assert_close(
        torch.func.vmap(lambda x: layer(x, cu_seqlens=offsets))(x[None])[0], want
    )
    with pytest.raises(ValueError, match="cu_seqlens cannot be mapped by vmap"):
        torch.func.vmap(lambda offsets: layer(x, cu_seqlens=offsets))(offsets[None])


@pytest.mark.quick
def test_a_mapped_layer_and_gradients_per_sample_compile_in_grad_mode(make):
    torch._dynamo.reset()
    layer, x = build(make), torch.stack([rows(2, 9), 2 * rows(2, 9), -rows(2, 9)])
    # a lambda, because vmap calls `repr` of a module, which Dynamo cannot trace
    mapped = torch.vmap(lambda x: layer(x))
    close(torch.compile(mapped, fullgraph=True, backend="aot_eager")(x), mapped(x))

    def loss(words, x):
        return torch.func.functional_call(layer, words, (x,)).square().sum()

    words = {n: p.detach() for n, p in layer.named_parameters()}
    per_sample = torch.vmap(torch.func.grad(loss), (None, 0))
    got = torch.compile(per_sample, fullgraph=True, backend="aot_eager")(words, x)
    for i, sample in enumerate(x):
        leaves = {n: p.clone().requires_grad_() for n, p in words.items()}
        for n, d in zip(leaves, torch.autograd.grad(loss(leaves, sample), [*leaves.values()])):
            close(got[n][i], d)


def test_a_vectorised_jacobian_is_the_jacobian(make):
    layer, x = build(make), rows(1, 3)
    jacobian = torch.autograd.functional.jacobian
    close(jacobian(layer, x, vectorize=True), jacobian(layer, x))


def test_a_compiled_training_layer_comes_from_the_cache_of_AOTAutograd(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    layer, x = build(KimiDeltaAttention).float(), rows(2, 9).float().requires_grad_()
    for outcome in ("miss", "hit"):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        torch.compile(layer, fullgraph=True)(x).sum().backward()
        counts = torch._dynamo.utils.counters["aot_autograd"]
        assert counts[f"autograd_cache_{outcome}"] == 1, dict(counts)
        assert not counts["autograd_cache_bypass"]


@pytest.mark.parametrize("stage", ("conv", "norm"))
def test_compiled_code_rounds_once_as_eager_code_does(stage):
    torch._dynamo.reset()
    gen = torch.Generator().manual_seed(0)
    x, gate, dy = (torch.randn(2, 65, 4, 16, generator=gen).bfloat16() for _ in range(3))
    layer = GatedRMSNorm(16) if stage == "norm" else ShortConvolution(64)
    inputs = [x, gate] if stage == "norm" else [x.flatten(2)]
    leaves = [t.requires_grad_() for t in inputs]
    found = []
    for call in (layer.bfloat16(), torch.compile(layer, fullgraph=True)):
        y = call(*leaves)
        found.append((y, *torch.autograd.grad(y, leaves, dy.reshape(y.shape))))
    for eager, compiled in zip(*found):
        # sums differ in float32, so a result next to a tie may round to the other side
        apart = (eager.float() - compiled.float()).abs()
        assert (apart <= 2**-7 * eager.float().abs() + 1e-6).all()
        assert (apart > 0).float().mean() < 0.01
