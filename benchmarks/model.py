"""Time the training step of a model with our operator, and of the same model with a peer's.

The model is that of examples/train.py: 8 layers and their MLPs, parameters in fp32 under autocast,
AdamW. A peer's side calls its operator where ours calls ours. Ours is compiled with
``fullgraph=True``, a peer's as far as it goes. A side has a process of its own with empty caches:
``python -m benchmarks.model JSON``, as of `benchmarks.worker.work_of`. The side "bare" calls an
operator that only allocates; "mode" in the JSON is torch.compile's.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor

from benchmarks import bare
from benchmarks.cases import Case
from benchmarks.peers import PEERS
from benchmarks.worker import report
from examples.train import LanguageModel, loss_of

LAYERS, STEPS = 8, 20


def probe(i: int, gradient: Tensor) -> float:
    """Return a random direction's share of a gradient, which another process can compare."""
    x, seeded = gradient.float(), torch.Generator(gradient.device).manual_seed(i)
    direction = torch.randn(x.shape, generator=seeded, device=x.device)
    return ((x * direction).sum() / x.norm().clamp(min=1e-30)).item()


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return how long at least one of some spans lasts."""
    total, until = 0.0, -math.inf
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def busy_ms(step: Callable[[], object], count: int = 3) -> float:
    """Return how long kernels and copies keep the GPU busy in a step, by the profiler."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        for _ in range(count):
            step()
    on_gpu = (e for e in found.events() or () if e.device_type == torch.autograd.DeviceType.CUDA)
    work = (e.time_range for e in on_gpu if not e.is_user_annotation)
    return covered((t.start, t.end) for t in work) / 1e3 / count


def measure(case: Case, side: str | None, mode: str | None = None) -> None:
    """Report the figures of one side, ours, a peer's or "bare", in this process."""
    from torch._dynamo.utils import counters

    cuda, (B, T, H, D) = case.device == "cuda", (case.sizes[n] for n in "BTHD")
    synchronize = torch.cuda.synchronize if cuda else lambda: None
    torch.manual_seed(0)
    with torch.device(case.device):
        tokens = torch.randint(256, (B, T + 1))
        model = LanguageModel(LAYERS, hidden=H * D, head_dim=D, gdn=case.op == "gdn")
    peer = next((p for p in PEERS if p.name == side), None)
    layer: Callable | None = bare.layer if side == "bare" else None
    layer = peer.layer if peer is not None else layer
    for block in model.blocks:
        if layer is not None:
            block.mixer._chunk = partial(layer, block.mixer)  # type: ignore[union-attr]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    backend = "inductor" if cuda else "aot_eager"
    options: dict = {"backend": backend} | ({"mode": mode} if mode and cuda else {})
    loss = torch.compile(partial(loss_of, model), fullgraph=peer is None, **options)
    counters.clear()
    found: dict = {}

    def step() -> float:
        synchronize()
        start = time.perf_counter()
        with torch.autocast(case.device, case.dtype, enabled=case.dtype != torch.float32):
            error = loss(tokens)
        error.backward()
        if not found:
            grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
            lost = dict(model.named_parameters()).keys() - {n for n in grads if grads[n].any()}
            if lost and side != "bare":
                raise RuntimeError(f"no gradient reached {', '.join(lost)}")  # by a compiler
            found["probe"] = [probe(i, x) for i, x in enumerate(grads.values())]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        synchronize()
        return time.perf_counter() - start

    found["first_step_s"] = step()
    report(**found)
    step()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    found["ms"] = 1e3 * statistics.median(step() for _ in range(STEPS if cuda else 1))
    found["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9 if cuda else None
    found["breaks"] = sum(counters["graph_break"].values())
    report(**found, graphs=counters["stats"]["unique_graphs"])
    if cuda:
        report(**found, graphs=counters["stats"]["unique_graphs"], busy_ms=busy_ms(step))


if __name__ == "__main__":
    work = json.loads(sys.argv[1])
    named = Case.named(work["cases"][0], work["device"], getattr(torch, work["dtype"]))
    measure(named, work["peer"], work.get("mode"))
