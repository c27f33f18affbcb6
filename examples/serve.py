"""Serve requests with continuous batching: prefill and decode in one packed batch on a state pool.

Usage::

    python examples/serve.py                   # CPU, some seconds
    python examples/serve.py --device cuda --requests 256 --slots 64 --hidden 1024 --heads 8 \\
        --layers 4
    python examples/serve.py --invariant       # the bits of training: examples/serve_bits.py

A request owns one slot of the pool from admission to its last token. Per layer the slot holds
``heads * K * V`` numbers, independent of the request's length.

Each step of the engine packs one row of tokens. Each active request contributes either some chunks
of its prompt, or its last output token. The step makes one call per layer: `chunk_kda_` if any
request reads its prompt, otherwise `recurrent_kda_`. Both operators update the states in their
slots in place, without gather, copy or padding. The engine zeroes a free slot and gives it to the
next request.

The model has random weights, so its output is meaningless. `--check` (the default) compares every
request's output with the same request served alone.
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kda_ops
from kda_ops.tools.machine import need_device

FLAGS = dict(use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True)
CHUNK = 64  # prompts are cut at multiples of this, so their chunks match those of one long call


@dataclass
class Request:
    """A prompt and the number of tokens to generate."""

    prompt: list[int]
    wanted: int
    arrival: int = 0  # engine step
    slot: int = -1
    done: int = 0  # tokens in its state
    output: list[int] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        """Return whether all tokens are generated."""
        return len(self.output) == self.wanted

    def next_tokens(self, budget: int) -> list[int]:
        """Return its tokens of the next step: prompt tokens, or the last output token.

        At most `budget` prompt tokens, in whole chunks unless they finish the prompt.
        """
        left = len(self.prompt) - self.done
        if left <= 0:
            return self.output[-1:]
        return self.prompt[
            self.done : self.done + (left if left <= budget else budget // CHUNK * CHUNK)
        ]


class Layer(nn.Module):
    """Kimi Delta Attention and a gated MLP; x ``[1, T, hidden]`` packs several requests."""

    def __init__(self, hidden: int, heads: int, width: int):
        super().__init__()
        self.heads, self.width = heads, width
        self.qkvg_proj = nn.Linear(hidden, 4 * heads * width, bias=False)
        self.b_proj = nn.Linear(hidden, heads, bias=False)
        self.o_proj = nn.Linear(heads * width, hidden, bias=False)
        self.up_proj = nn.Linear(hidden, 4 * hidden, bias=False)
        self.down_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.A_log = nn.Parameter(torch.linspace(-3, 0, heads))
        self.dt_bias = nn.Parameter(torch.zeros(heads, width))

    def forward(
        self, x: Tensor, pool: Tensor, slots: Tensor, cu_seqlens: Tensor, decoding: bool
    ) -> Tensor:
        """Run each request's tokens on the state in its slot of `pool`, and update it in place."""
        normed = F.rms_norm(x, x.shape[-1:])
        q, k, v, g = self.qkvg_proj(normed).unflatten(-1, (4, self.heads, self.width)).unbind(2)
        operator = kda_ops.recurrent_kda_ if decoding else kda_ops.chunk_kda_
        o = operator(
            q,
            k,
            v,
            g,
            self.b_proj(normed),
            pool,
            slots,
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            cu_seqlens=cu_seqlens,
            **FLAGS,
        )
        x = x + self.o_proj(F.rms_norm(o, o.shape[-1:]).flatten(-2))
        gate, up = self.up_proj(F.rms_norm(x, x.shape[-1:])).chunk(2, -1)
        return x + self.down_proj(F.silu(gate) * up)


class Model(nn.Module):
    """A language model with a constant-size state per request."""

    def __init__(self, vocabulary: int = 256, hidden: int = 64, layers: int = 2, heads: int = 2):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList(Layer(hidden, heads, hidden // heads) for _ in range(layers))
        self.head = nn.Linear(hidden, vocabulary, bias=False)

    def new_pools(self, slots: int) -> list[Tensor]:
        """Return one zeroed pool per layer, [slots, heads, K, V]."""
        return [
            torch.zeros(slots, m.heads, m.width, m.width, device=self.head.weight.device)
            for m in self.layers
        ]

    def forward(
        self, tokens: Tensor, pools: list[Tensor], slots: Tensor, cu_seqlens: Tensor, decoding: bool
    ) -> Tensor:
        """Return logits after the last token of each request, [N, vocabulary]."""
        x = self.embedding(tokens)[None]
        for layer, pool in zip(self.layers, pools):
            x = layer(x, pool, slots, cu_seqlens, decoding)
        return self.head(F.rms_norm(x[0, cu_seqlens[1:].long() - 1], x.shape[-1:]))


class Engine:
    """Runs requests on `slots` slots; a step reads at most `budget` prompt tokens per request."""

    def __init__(self, model: Model, slots: int, budget: int = 128):
        self.model, self.budget = model, max(budget, CHUNK)
        self.pools, self.free = model.new_pools(slots), list(range(slots))
        self.active: list[Request] = []
        self.steps = self.tokens = self.mixed = 0

    def admit(self, waiting: deque[Request]) -> None:
        """Zero the free slots and give them to the requests that have arrived."""
        while waiting and self.free and waiting[0].arrival <= self.steps:
            request = waiting.popleft()
            request.slot = self.free.pop()
            for pool in self.pools:
                pool[request.slot] = 0
            self.active.append(request)

    @torch.inference_mode()
    def step(self) -> None:
        """Run one packed batch: every active request reads prompt tokens or generates a token."""
        self.steps += 1
        work = [request.next_tokens(self.budget) for request in self.active]
        if not work:
            return
        decoding = [request.done >= len(request.prompt) for request in self.active]
        device = self.pools[0].device
        tokens = torch.tensor([token for part in work for token in part], device=device)
        slots = torch.tensor(
            [request.slot for request in self.active], dtype=torch.int32, device=device
        )
        cu_seqlens = torch.tensor(
            [0, *(len(part) for part in work)], dtype=torch.int32, device=device
        ).cumsum(0, dtype=torch.int32)
        best = self.model(tokens, self.pools, slots, cu_seqlens, all(decoding)).argmax(-1).tolist()
        for request, part, token in zip(self.active, work, best):
            request.done += len(part)
            if request.done >= len(request.prompt):
                request.output.append(token)
        self.tokens += len(tokens)
        self.mixed += any(decoding) and not all(decoding)
        self.free += [request.slot for request in self.active if request.finished]
        self.active = [request for request in self.active if not request.finished]

    def run(self, requests: list[Request]) -> None:
        """Run steps until every request is finished."""
        waiting = deque(sorted(requests, key=lambda request: request.arrival))
        while waiting or self.active:
            self.admit(waiting)
            self.step()


def make_requests(count: int, vocabulary: int, seed: int) -> list[Request]:
    """Make requests with prompts of 1 to 299 tokens and 1 to 39 tokens to generate."""
    gen = torch.Generator().manual_seed(seed)
    lengths, wanted, gaps = (
        torch.randint(low, high, (count,), generator=gen).tolist()
        for low, high in ((1, 300), (1, 40), (0, 5))
    )
    arrivals = torch.tensor(gaps).cumsum(0).tolist()
    return [
        Request(torch.randint(vocabulary, (n,), generator=gen).tolist(), w, at)
        for n, w, at in zip(lengths, wanted, arrivals)
    ]


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Serve, print tokens per second, and compare every request with itself served alone."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, default in (
        ("requests", 12),
        ("slots", 4),
        ("hidden", 64),
        ("layers", 2),
        ("heads", 2),
        ("budget", 128),
        ("seed", 0),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--check", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--invariant", action="store_true", help="compare bits with training's")
    args = parser.parse_args(argv)
    need_device(parser, args.device)
    if min(args.requests, args.hidden, args.layers, args.heads) < 1:
        parser.error("--requests, --hidden, --layers and --heads must be at least 1.")
    if min(args.slots, args.budget) < 1:
        parser.error(
            f"--slots and --budget must be at least 1, got {args.slots} and {args.budget}."
        )

    if args.invariant:
        name = f"{__package__}.serve_bits" if __package__ else "serve_bits"
        bits, found = importlib.import_module(name), {}
        for mixer in bits.MIXERS:
            found[mixer] = bits.run(mixer, make_requests(args.requests, 256, args.seed), args)
        return found

    torch.manual_seed(args.seed)
    model = (
        Model(hidden=args.hidden, layers=args.layers, heads=args.heads)
        .to(args.device)
        .requires_grad_(False)
    )
    requests = make_requests(args.requests, 256, args.seed)
    engine, start = Engine(model, args.slots, args.budget), time.perf_counter()
    engine.run(requests)
    seconds = time.perf_counter() - start
    produced = sum(len(request.output) for request in requests)
    print(
        f"{len(requests)} requests on {args.slots} slots: {engine.steps} steps, {engine.mixed} "
        "mixed prefill and decode"
    )
    print(
        f"{engine.tokens} tokens in {seconds:.2f} s: {engine.tokens / seconds:.0f} tokens/s, "
        f"{produced / seconds:.0f} generated/s"
    )

    if args.check:
        for request in requests:
            alone = Request(request.prompt, request.wanted)
            Engine(model, 1, args.budget).run([alone])
            if alone.output != request.output:
                raise SystemExit("a request's output differs from that of the request alone")
        print("every request gives the same output alone")
    return {
        "steps": engine.steps,
        "mixed": engine.mixed,
        "tokens": engine.tokens,
        "produced": produced,
        "tokens_per_second": engine.tokens / seconds,
    }


if __name__ == "__main__":
    main()
