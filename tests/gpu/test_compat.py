"""Compare transformers models with and without our operators on a GPU, eager and compiled."""

import pytest
import torch

pytest.importorskip("transformers")

from kda_ops.compat import transformers as compat
from tests.support import models
from tests.support.models import (
    assert_generates_the_same,
    assert_same,
    left_padded,
    packed,
    step,
    to,
    torch_path,
)

SHORT = ("kimi_linear", "qwen3_next")
# the others have the same delta rules, behind other projections and gates
MAIN = (*SHORT, *(n for n in models.CONFIGS if n not in (*SHORT, "qwen3_5_moe", "olmo_hybrid")))


@pytest.fixture(autouse=True)
def _take_out_again():
    yield
    compat.disable()
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "name, mode", [(name, "eager") for name in MAIN] + [(name, "compiled") for name in SHORT]
)
def test_logits_loss_and_gradients_are_the_same(name, mode):
    net, x = models.model(name, "cuda"), to(left_padded((70, 33)), "cuda")
    with torch_path():
        want = step(net, x, x["attention_mask"])
    with compat.enable():
        torch._dynamo.utils.counters.clear()
        got = step(
            net,
            x,
            x["attention_mask"],
            torch.compile(net, fullgraph=True) if mode == "compiled" else None,
        )
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == (mode == "compiled")
    assert_same(got, want)


@pytest.mark.parametrize("name", SHORT)
def test_bfloat16_is_as_close_to_float32_as_the_path_of_transformers(name):
    x = to(left_padded((70, 33)), "cuda")
    wide, narrow = models.model(name, "cuda"), models.model(name, "cuda", torch.bfloat16)
    results = []
    with torch_path():
        want = step(wide, x, x["attention_mask"])
        results.append(step(narrow, x, x["attention_mask"]))
    with compat.enable():
        results.append(step(narrow, x, x["attention_mask"]))

    def error(got: dict, part: str) -> float:
        squares = [
            ((got[n].double() - y.double()).square().sum(), y.double().square().sum())
            for n, y in want.items()
            if n.startswith(part)
        ]
        return (sum(a for a, _ in squares) / sum(b for _, b in squares)).sqrt().item()

    for part in ("logits", "d "):
        own, ours = (error(got, part) for got in results)
        assert ours <= 1.3 * own, f"{part}: {ours:.2e}, transformers' own {own:.2e}"


@pytest.mark.parametrize(
    "name, lengths",
    [
        ("kimi_linear", (66,)),
        ("kimi_linear", (20, 7, 1)),
        ("qwen3_next", (66,)),
        ("qwen3_5", (20, 7, 1)),
    ],
    ids=str,
)
def test_generated_tokens_are_the_same(name, lengths):
    assert_generates_the_same(name, lengths, "cuda")


@pytest.mark.parametrize("name", SHORT)
def test_packed_sequences_equal_the_sequences_alone(name):
    """The reference is transformers' path on a CPU in float64, to exclude this device's rounding.

    transformers casts some of it to float32 itself.
    """
    ids = [models.tokens(n, seed=n) for n in (5, 1, 70, 64, 37)]
    exact, net = models.model(name, "cpu", torch.float64), models.model(name, "cuda")

    def results(net, logits):
        logits.logsumexp(-1).sum().backward()
        return {"logits": logits.detach().cpu()} | {
            "d " + n: p.grad.cpu() for n, p in net.named_parameters() if p.grad is not None
        }

    with torch_path():
        want = results(exact, torch.cat([exact(x[None], use_cache=False).logits for x in ids], 1))
    with compat.enable():
        got = results(net, net(**to(packed(ids), "cuda")).logits)
    assert_same(got, want)
