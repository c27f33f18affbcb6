"""Time the training step of a model with our operator, and of the same model with a peer's.

The model is that of examples/train.py: 8 layers and their MLPs, parameters in fp32 under autocast,
AdamW. A peer's side calls its operator where ours calls ours. Ours is compiled with
``fullgraph=True``, a peer's as far as it goes. A side has a process of its own with empty caches:
``python -m benchmarks.model JSON``, as of `benchmarks.worker.work_of`.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from functools import partial

import torch
from torch import Tensor

from benchmarks.peers import PEERS
from benchmarks.worker import report
from examples.train import LanguageModel, loss_of
from kda_ops.tools.cases import Case

LAYERS, STEPS = 8, 20


def probe(i: int, gradient: Tensor) -> float:
    """Return a random direction's share of a gradient, which another process can compare."""
    x, seeded = gradient.float(), torch.Generator(gradient.device).manual_seed(i)
    direction = torch.randn(x.shape, generator=seeded, device=x.device)
    return ((x * direction).sum() / x.norm().clamp(min=1e-30)).item()


def measure(case: Case, side: str | None) -> None:
    """Report the figures of one side, ours or a peer's, in this process."""
    from torch._dynamo.utils import counters

    cuda, (B, T, H, D) = case.device == "cuda", (case.sizes[n] for n in "BTHD")
    synchronize = torch.cuda.synchronize if cuda else lambda: None
    torch.manual_seed(0)
    with torch.device(case.device):
        tokens = torch.randint(256, (B, T + 1))
        model = LanguageModel(LAYERS, hidden=H * D, head_dim=D, gdn=case.op == "gdn")
    peer = next((p for p in PEERS if p.name == side), None)
    for block in model.blocks:
        if peer is not None and peer.layer is not None:
            block.mixer._chunk = partial(peer.layer, block.mixer)  # type: ignore[union-attr]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    backend = "inductor" if cuda else "aot_eager"
    loss = torch.compile(partial(loss_of, model), fullgraph=peer is None, backend=backend)
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
            if lost:
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
    breaks = sum(counters["graph_break"].values())
    report(**found, graphs=counters["stats"]["unique_graphs"], breaks=breaks)


if __name__ == "__main__":
    work = json.loads(sys.argv[1])
    named = Case.named(work["cases"][0], work["device"], getattr(torch, work["dtype"]))
    measure(named, work["peer"])
