"""Training under torch.compile on a GPU: one graph, any length, CUDA graphs, checkpoints, folding;
and calls off the usual stream and beyond 2^31 elements.
"""

from collections import Counter
from unittest import mock

import pytest
import torch
import torch._inductor.config
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

import kda_ops
from examples.checkpoint_policy import POLICIES, Model
from examples.train import LanguageModel, loss_of
from kda_ops.backends.triton import BACKEND
from kda_ops.chunk import Forward
from kda_ops.inductor import fold_preprocessing
from tests.support.closeness import assert_identical

DEVICE = "cuda"
LAYERS = 2
# of gradients whose float32 arithmetic is compiled, relative RMS; one that lacks a part is off by a
# hundred times as much
CLOSE = 1e-3


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def chunk(variant):
    return getattr(kda_ops, f"chunk_{variant}")


def new_model(variant):
    torch.manual_seed(0)
    return LanguageModel(layers=LAYERS, hidden=64, head_dim=32, gdn=variant == "gdn").to(DEVICE)


def new_tokens(length=130, seed=0, batch=2):
    return torch.randint(
        256, (batch, length + 1), generator=torch.Generator().manual_seed(seed)
    ).to(DEVICE)


def gradients(model, call, windows):
    """Return the gradients accumulated over the windows' losses, and the losses."""
    model.zero_grad(set_to_none=True)
    losses = []
    for window in windows:
        loss = call(model, window)
        loss.backward()
        losses.append(loss.detach().clone())
    return {n: p.grad.clone() for n, p in model.named_parameters()} | {"loss": torch.stack(losses)}


def distance(got, want):
    """Return the largest relative RMS difference over the tensors of two dictionaries."""
    assert got.keys() == want.keys()
    return max(
        (
            (got[n].double() - want[n].double()).square().mean().sqrt()
            / (want[n].double().square().mean().sqrt() + 1e-12)
        ).item()
        for n in want
    )


def autocast(model, window):
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        return loss_of(model, window)


def assert_one_graph():
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


def test_a_model_is_one_graph_and_accumulates_the_gradients_of_eager(variant):
    model, windows = new_model(variant), [new_tokens(seed=s) for s in range(2)]
    want = gradients(model, loss_of, windows)
    got = gradients(model, torch.compile(loss_of, fullgraph=True), windows)
    assert_one_graph()
    assert distance(got, want) < CLOSE
    assert (
        distance(gradients(model, loss_of, windows[:1]), want | {"loss": want["loss"][:1]})
        > 10 * CLOSE
    ), "the second backward added nothing"


def test_inference_is_one_graph(variant):
    model, tokens = new_model(variant), new_tokens()
    with torch.inference_mode():
        got, want = torch.compile(model, fullgraph=True)(tokens), model(tokens)
    assert_one_graph()
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_bfloat16_autocast_compiled_is_as_close_to_float32_as_eager(variant):
    model, windows = new_model(variant), [new_tokens()]
    exact, eager = gradients(model, loss_of, windows), gradients(model, autocast, windows)
    got = gradients(model, torch.compile(autocast, fullgraph=True), windows)
    assert_one_graph()
    assert distance(got, exact) < 2 * distance(eager, exact) + torch.finfo(torch.bfloat16).eps


# A timing decides whether Inductor pads the two columns of a projection, one per head, to four. If
# it does, torch 2.11 assumes the stride of one length for all, and the backward of another fails.
@torch._inductor.config.patch(shape_padding=False)
def test_any_length_trains_with_two_compilations(variant):
    model, counter = new_model(variant), CompileCounterWithBackend("inductor")
    compiled = torch.compile(loss_of, fullgraph=True, backend=counter)
    for length in (130, 65, 64, 200, 321):
        windows = [new_tokens(length)]
        assert (
            distance(gradients(model, compiled, windows), gradients(model, loss_of, windows))
            < CLOSE
        ), length
    assert counter.frame_count <= 2


def test_reduce_overhead_replays_a_training_step(variant):
    model = new_model(variant)
    compiled = torch.compile(loss_of, fullgraph=True, mode="reduce-overhead")

    def call(model, window):
        torch.compiler.cudagraph_mark_step_begin()
        return compiled(model, window)

    for seed in range(4):  # warm-up, capture, replay, replay
        windows = [new_tokens(seed=seed)]
        assert (
            distance(gradients(model, call, windows), gradients(model, loss_of, windows)) < CLOSE
        ), f"step {seed}"
    assert_one_graph()
    assert not counters["inductor"]["cudagraph_skips"]


def test_max_autotune_trains(variant):
    torch.manual_seed(0)
    x = torch.randn(2, 130, 64, device=DEVICE)
    weight = torch.randn(64, 4 * 64, device=DEVICE, requires_grad=True)

    def loss(x, weight):
        q, k, v, g = (x @ weight).unflatten(-1, (4, 2, 32)).unbind(2)
        g = F.logsigmoid(g if variant == "kda" else g[..., 0])
        return (
            chunk(variant)(q, k, v, g, torch.sigmoid(v[..., 0]), use_qk_l2norm_in_kernel=True)[0]
            .square()
            .mean()
        )

    compiled = torch.compile(loss, fullgraph=True, mode="max-autotune")
    (want,) = torch.autograd.grad(loss(x, weight), weight)
    for _ in range(3):
        torch.compiler.cudagraph_mark_step_begin()
        (got,) = torch.autograd.grad(compiled(x, weight), weight)
        assert distance({"w": got}, {"w": want}) < CLOSE
    assert_one_graph()


@pytest.mark.parametrize("compiled", (False, True), ids=("eager", "compiled"))
def test_a_checkpoint_policy_spares_the_second_forward_of_attention(compiled):
    x = torch.randn(2, 130, 64, device=DEVICE)
    want, forwards = None, {}
    for name, policy in POLICIES.items():
        torch.manual_seed(0)
        torch._dynamo.reset()
        model = Model(policy, layers=LAYERS).to(DEVICE)
        call = torch.compile(model, fullgraph=True) if compiled else model
        with mock.patch.object(BACKEND, "run", wraps=BACKEND.run) as run:
            call(x).square().mean().backward()
        forwards[name] = sum(given.args[0] is Forward for given in run.call_args_list)
        got = {n: p.grad for n, p in model.named_parameters()}
        want = got if want is None else want
        assert distance(got, want) < CLOSE, name
    assert forwards["but not attention"] == forwards["keep everything"] == LAYERS
    # a compiler may keep what it was told to recompute
    assert forwards["recompute blocks"] == 2 * LAYERS or compiled


def test_plain_pytorch_folds_into_the_flags():
    torch.manual_seed(0)
    q, k, v, g = (torch.randn(2, 130, 2, 64, device=DEVICE) for _ in range(4))
    beta = torch.randn(2, 130, 2, device=DEVICE)
    A_log = torch.randn(2, device=DEVICE)
    dt_bias = torch.randn(2, 64, device=DEVICE)
    x = {
        n: t.requires_grad_()
        for n, t in dict(q=q, k=k, v=v, g=g, beta=beta, A_log=A_log, dt_bias=dt_bias).items()
    }

    def plain(q, k, v, g, beta, A_log, dt_bias):
        q, k = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6) for t in (q, k))
        return kda_ops.chunk_kda(
            q, k, v, -A_log.exp()[:, None] * F.softplus(g + dt_bias), torch.sigmoid(beta)
        )[0]

    def flags(**x):
        return kda_ops.chunk_kda(
            **x,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
        )[0]

    def results(call):
        o = call(**x)
        return {"o": o.detach()} | dict(
            zip(x, torch.autograd.grad(o.square().sum(), list(x.values())))
        )

    fold_preprocessing.folded.clear()
    with torch._inductor.utils.fresh_cache():
        got = results(torch.compile(plain, backend="kda_inductor", fullgraph=True))
    assert fold_preprocessing.folded == Counter(l2norm=1, gate=1, sigmoid=1)
    assert_one_graph()
    assert distance(got, results(flags)) < 1e-6
    assert distance(got, results(plain)) < CLOSE


@pytest.mark.parametrize("compiled", (False, True), ids=("eager", "compiled"))
def test_work_goes_to_the_stream_of_the_call(variant, compiled):
    """On another stream, behind a wait: inputs arrive late, and a launch elsewhere would read what
    was there before.
    """
    decay = (2, 130, 2, 64) if variant == "kda" else (2, 130, 2)
    source = [torch.randn(2, 130, 2, 64, device=DEVICE, dtype=torch.bfloat16) for _ in range(3)]
    source += [-torch.rand(decay, device=DEVICE), torch.rand(2, 130, 2, device=DEVICE)]

    def step(*x):
        o, state = chunk(variant)(*x, use_qk_l2norm_in_kernel=True, output_final_state=True)
        return o * 1, state * 1

    call = torch.compile(step, fullgraph=True) if compiled else step

    def results():
        leaves = [t.detach().requires_grad_() for t in late]
        o, state = call(*leaves)
        return [
            o.detach(),
            state.detach(),
            *torch.autograd.grad([o, state], leaves, [o.detach(), state.detach()]),
        ]

    late = source
    want = results()
    late = [torch.zeros_like(t) for t in source]
    results()  # compiled and with cuBLAS at hand: what follows only launches
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10**8)
        for x, y in zip(late, source):
            x.copy_(y)
        got = results()
    stream.synchronize()
    for i, (a, b) in enumerate(zip(got, want)):
        assert_identical(a, b, f"result {i}")


@pytest.fixture
def room():
    """Free a test's GPU memory for the other processes."""
    yield
    torch.cuda.empty_cache()


@pytest.mark.xdist_group("memory")  # one at a time
@pytest.mark.usefixtures("room")
def test_strides_beyond_two_billion_elements(variant):
    T, D = 130, 64
    far = -(-(2**31) // (T - 1)) // 64 * 64 + 64  # from token to token
    buffer = torch.empty(T * far, device=DEVICE, dtype=torch.bfloat16)
    near = [torch.randn(1, T, 2, D, device=DEVICE, dtype=torch.bfloat16) for _ in range(3)]
    spread = [
        buffer[i * 256 :].as_strided((1, T, 2, D), (T * far, far, D, 1)).copy_(x)
        for i, x in enumerate(near)
    ]
    assert (T - 1) * far > 2**31
    rest = [
        -torch.rand((1, T, 2, D) if variant == "kda" else (1, T, 2), device=DEVICE),
        torch.rand(1, T, 2, device=DEVICE),
    ]

    def results(q, k, v):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        o = chunk(variant)(*leaves, *rest, use_qk_l2norm_in_kernel=True)[0]
        return [o.detach(), *torch.autograd.grad(o, leaves, torch.ones_like(o))]

    for a, b in zip(results(*spread), results(*near)):
        assert_identical(a, b)


@pytest.mark.xdist_group("memory")
@pytest.mark.usefixtures("room")
def test_more_than_two_billion_elements(variant):
    D, last = 128, 130
    T = 2**31 // D + 200
    if torch.cuda.mem_get_info()[0] < 80e9:
        pytest.skip("needs 80 GB of free memory")
    q, k, v = (torch.randn(1, T, 1, D, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
    g = torch.randn(
        (1, T, 1, D) if variant == "kda" else (1, T, 1), device=DEVICE, dtype=torch.bfloat16
    )
    beta = torch.randn(1, T, 1, device=DEVICE, dtype=torch.bfloat16)

    def call(rows, ends):
        offsets = torch.tensor(ends, device=DEVICE)
        words = dict(
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            lower_bound=-5.0,
            cu_seqlens=offsets,
        )
        with torch.no_grad():
            return chunk(variant)(*(x[:, rows] for x in (q, k, v, g, beta)), **words)[0]

    whole = call(slice(None), [0, T - last, T])
    assert whole.numel() > 2**31
    assert_identical(whole[:, -last:], call(slice(T - last, None), [0, last]), "the last sequence")
    assert_identical(whole[:, :last], call(slice(0, last), [0, last]), "the first tokens")
