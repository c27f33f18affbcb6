"""Serve requests with continuous batching over a pool of states, prefill and decode mixed in one
packed batch.

    python examples/serve.py                   # CPU, some seconds
    python examples/serve.py --device cuda --requests 256 --slots 64 --hidden 1024 --heads 8 \\
        --layers 4

A request owns one slot of the pool from its arrival to its last token: its whole memory is
``layers * heads * K * V`` numbers, however long it gets. Each step of the engine packs what every
active request has to do into one row of tokens, a chunk of the prompt or the one token it produced
last, and makes one call per layer: `chunk_kda_` while some prompt is being read, `recurrent_kda_`
when every request decodes. Both read the states from their slots and write them back in place;
nothing is gathered, copied or padded. A slot that falls free is zeroed and given to the next
request.

The model has random weights, so what it says means nothing; that every request says what it says
alone does (`--check`, on by default).
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kda_ops
from kda_ops.bench.machine import need_device

FLAGS = dict(use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True)
CHUNK = 64  # a prompt is read in multiples of this, so that its chunks are those of one long call


@dataclass
class Request:
    """A prompt and how many tokens to add to it."""

    prompt: list[int]
    wanted: int
    arrival: int = 0  # the step of the engine at which it arrives
    slot: int = -1
    done: int = 0  # tokens that its state has seen
    output: list[int] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        """Whether nothing is left to do."""
        return len(self.output) == self.wanted

    def next_tokens(self, budget: int) -> list[int]:
        """What its state sees next: some of the prompt, whole chunks unless it is the rest, or the
        last token it produced.
        """
        left = len(self.prompt) - self.done
        if left <= 0:
            return self.output[-1:]
        return self.prompt[
            self.done : self.done + (left if left <= budget else budget // CHUNK * CHUNK)
        ]


class Layer(nn.Module):
    """Kimi Delta Attention and a gated MLP; x ``[1, T, hidden]`` packs the tokens of several
    requests.
    """

    def __init__(self, hidden: int, heads: int, width: int):
        super().__init__()
        self.heads, self.width = heads, width
        self.qkvg_proj = nn.Linear(hidden, 4 * heads * width, bias=False)
        self.b_proj = nn.Linear(hidden, heads, bias=False)
        self.o_proj = nn.Linear(heads * width, hidden, bias=False)
        self.up_proj, self.down_proj = (
            nn.Linear(hidden, 4 * hidden, bias=False),
            nn.Linear(2 * hidden, hidden, bias=False),
        )
        self.A_log = nn.Parameter(torch.linspace(-3, 0, heads))
        self.dt_bias = nn.Parameter(torch.zeros(heads, width))

    def forward(
        self, x: Tensor, pool: Tensor, slots: Tensor, cu_seqlens: Tensor, decoding: bool
    ) -> Tensor:
        """Each request's tokens mixed with the state in its slot of `pool`, which moves on in
        place.
        """
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
    """A language model with states instead of a cache that grows."""

    def __init__(self, vocabulary: int = 256, hidden: int = 64, layers: int = 2, heads: int = 2):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList(Layer(hidden, heads, hidden // heads) for _ in range(layers))
        self.head = nn.Linear(hidden, vocabulary, bias=False)

    def new_pools(self, slots: int) -> list[Tensor]:
        """One pool per layer, [slots, heads, K, V]."""
        return [
            torch.zeros(slots, m.heads, m.width, m.width, device=self.head.weight.device)
            for m in self.layers
        ]

    def forward(
        self, tokens: Tensor, pools: list[Tensor], slots: Tensor, cu_seqlens: Tensor, decoding: bool
    ) -> Tensor:
        """Logits after the last token of each request, [N, vocabulary]."""
        x = self.embedding(tokens)[None]
        for layer, pool in zip(self.layers, pools):
            x = layer(x, pool, slots, cu_seqlens, decoding)
        return self.head(F.rms_norm(x[0, cu_seqlens[1:].long() - 1], x.shape[-1:]))


class Engine:
    """Runs requests on `slots` slots; `budget` bounds the prompt tokens that one step reads for one
    request.
    """

    def __init__(self, model: Model, slots: int, budget: int = 128):
        self.model, self.budget = model, max(budget, CHUNK)
        self.pools, self.free = model.new_pools(slots), list(range(slots))
        self.active: list[Request] = []
        self.steps = self.tokens = self.mixed = 0

    def admit(self, waiting: deque[Request]) -> None:
        """Give free slots, zeroed, to the requests that have arrived."""
        while waiting and self.free and waiting[0].arrival <= self.steps:
            request = waiting.popleft()
            request.slot = self.free.pop()
            for pool in self.pools:
                pool[request.slot] = 0
            self.active.append(request)

    @torch.inference_mode()
    def step(self) -> None:
        """One packed batch: every active request reads some of its prompt or produces a token."""
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
        """Until every request is finished."""
        waiting = deque(sorted(requests, key=lambda request: request.arrival))
        while waiting or self.active:
            self.admit(waiting)
            self.step()


def make_requests(count: int, vocabulary: int, seed: int) -> list[Request]:
    """Prompts of 1 to 300 tokens that arrive over time and want 1 to 40 more."""
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
    """Serve, print tokens per second, and compare with every request alone."""
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
    args = parser.parse_args(argv)
    need_device(parser, args.device)
    if min(args.requests, args.hidden, args.layers, args.heads) < 1:
        parser.error("--requests, --hidden, --layers and --heads must be at least 1.")
    if min(args.slots, args.budget) < 1:
        parser.error(
            "without slots, or a budget of tokens per step, no request would ever end: --slots "
            "and --budget must be at least 1."
        )

    torch.manual_seed(args.seed)
    model = (
        Model(hidden=args.hidden, layers=args.layers, heads=args.heads)
        .to(args.device)
        .requires_grad_(False)
    )
    requests = make_requests(args.requests, 256, args.seed)
    engine, start = Engine(model, args.slots, args.budget), time.perf_counter()
    engine.run(requests)
    seconds, produced = (
        time.perf_counter() - start,
        sum(len(request.output) for request in requests),
    )
    print(
        f"{len(requests)} requests on {args.slots} slots: {engine.steps} steps, {engine.mixed} of "
        "them mixed prefill and decode"
    )
    print(
        f"{engine.tokens} tokens in {seconds:.2f} s: {engine.tokens / seconds:.0f} tokens/s, "
        f"{produced / seconds:.0f} produced/s"
    )

    if args.check:
        for request in requests:
            alone = Request(request.prompt, request.wanted)
            Engine(model, 1, args.budget).run([alone])
            if alone.output != request.output:
                raise SystemExit("a request says something else in company")
        print("every request says what it says alone")
    return {
        "steps": engine.steps,
        "mixed": engine.mixed,
        "tokens": engine.tokens,
        "produced": produced,
        "tokens_per_second": engine.tokens / seconds,
    }


if __name__ == "__main__":
    main()
