"""Serve requests with continuous batching: prefill and decode in one packed batch on a state pool.

Usage::

    python examples/serve.py                   # CPU, some seconds
    python examples/serve.py --device cuda --requests 256 --slots 64 --hidden 1024 --heads 8 \\
        --layers 4
    python examples/serve.py --invariant       # the bits of training: examples/serve_bits.py

A request owns one slot of the pool from admission to its last token. Per layer the slot holds
``heads * K * V`` numbers, independent of the request's length.

Each step packs one row of tokens: the last output token of each request that decodes, then pieces
of prompts. Per layer, `recurrent_kda_` takes the first part and `chunk_kda_` the second. Both
operators update the states in their slots in place and write their outputs to one buffer (`out`).
Free slots are not zeroed, because `has_initial_state` lets a new request start from zero.

A step without prompts is padded to the next power of two by sequences of slot 0, which belongs to
nobody (`null_slot=0`). On a GPU it is a CUDA graph, captured once per batch size.

The model has random weights, so its output is meaningless. `--check` (the default) compares every
request's output with the same request served alone. Then the example prints the speed of decode
for several numbers of requests.
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kda_ops
from kda_ops.tools.machine import need_device

FLAGS = dict(use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True)
NOBODY = 0  # this slot and those below it are neither read nor written
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
    def reading(self) -> bool:
        """Return whether a part of the prompt is left to read."""
        return self.done < len(self.prompt)

    @property
    def finished(self) -> bool:
        """Return whether all tokens are generated."""
        return len(self.output) == self.wanted

    def next_tokens(self, budget: int) -> list[int]:
        """Return its tokens of the next step: prompt tokens, or the last output token.

        At most `budget` prompt tokens, in whole chunks unless they finish the prompt.
        """
        if not self.reading:
            return self.output[-1:]
        left = len(self.prompt) - self.done
        return self.prompt[
            self.done : self.done + (left if left <= budget else budget // CHUNK * CHUNK)
        ]


@dataclass
class Batch:
    """A row of tokens: one for each of `decoding` requests, then the pieces of prompts."""

    tokens: Tensor  # [T]
    slots: Tensor  # [requests]
    decoding: int
    cu_seqlens: Tensor | None = None  # [prompts + 1], from the first prompt's first token
    has_initial_state: Tensor | None = None  # [prompts], false at the first piece of a prompt


class Layer(nn.Module):
    """Kimi Delta Attention and a gated MLP, on the tokens ``[T, hidden]`` of a batch."""

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

    def forward(self, x: Tensor, pool: Tensor, batch: Batch) -> Tensor:
        """Run each request's tokens on the state in its slot of `pool`, and update it in place."""
        normed, n = F.rms_norm(x, x.shape[-1:]), batch.decoding
        q, k, v, g = self.qkvg_proj(normed).unflatten(-1, (4, self.heads, self.width)).unbind(1)
        vectors, o = (q, k, v, g, self.b_proj(normed)), v.new_empty(v.shape)
        flags = dict(FLAGS, A_log=self.A_log, dt_bias=self.dt_bias, null_slot=NOBODY)
        if n:
            tokens = (t[:n, None] for t in vectors)  # [n, 1, ...]
            kda_ops.recurrent_kda_(*tokens, pool, batch.slots[:n], out=o[:n, None], **flags)
        if batch.cu_seqlens is not None:
            kda_ops.chunk_kda_(
                *(t[None, n:] for t in vectors),
                pool,
                batch.slots[n:],
                cu_seqlens=batch.cu_seqlens,
                has_initial_state=batch.has_initial_state,
                out=o[None, n:],
                **flags,
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
        """Return one pool per layer, [slots, heads, K, V], whose states are not initialised."""
        return [
            torch.empty(slots, m.heads, m.width, m.width, device=self.head.weight.device)
            for m in self.layers
        ]

    def forward(self, batch: Batch, pools: list[Tensor]) -> Tensor:
        """Return the most likely token after the last token of each request, [requests]."""
        x, n = self.embedding(batch.tokens), batch.decoding
        for layer, pool in zip(self.layers, pools):
            x = layer(x, pool, batch)
        if batch.cu_seqlens is not None:
            x = torch.cat([x[:n], x[n:][batch.cu_seqlens[1:] - 1]])
        return self.head(F.rms_norm(x, x.shape[-1:])).argmax(-1)


class Decode:
    """A step of up to `size` requests that all decode; on a GPU a captured CUDA graph."""

    def __init__(self, model: Model, pools: list[Tensor], size: int):
        self.model, self.pools, self.size = model, pools, size
        device = pools[0].device
        self.inputs = torch.full((2, size), NOBODY, device=device)  # tokens and slots
        self.graph = None
        if device.type == "cuda":
            self.run()  # compiles kernels; nobody's slot is not written
            torch.cuda.synchronize(device)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.device(device), torch.cuda.graph(self.graph):
                self.best = self.run()

    def run(self) -> Tensor:
        """Launch the step on the inputs, and return the next tokens [size]."""
        return self.model(Batch(*self.inputs, self.size), self.pools)

    def __call__(self, tokens: list[int], slots: list[int]) -> Tensor:
        """Return the next token of each request."""
        padding = [NOBODY] * (self.size - len(tokens))
        self.inputs.copy_(torch.tensor([tokens + padding, slots + padding]))
        if self.graph is None:
            best = self.run()
        else:
            self.graph.replay()
            best = self.best
        return best[: len(tokens)]


class Engine:
    """Runs requests on `slots` slots; a step reads at most `budget` prompt tokens per request."""

    def __init__(self, model: Model, slots: int, budget: int = 128):
        self.model, self.slots, self.budget = model, slots, max(budget, CHUNK)
        self.pools, self.free = model.new_pools(slots + 1), list(range(1, slots + 1))
        self.active: list[Request] = []
        self.decodes: dict[int, Decode] = {}  # batch size -> its step
        self.steps = self.tokens = self.mixed = 0

    def admit(self, waiting: deque[Request]) -> None:
        """Give free slots, as they are, to the requests that have arrived."""
        while waiting and self.free and waiting[0].arrival <= self.steps:
            waiting[0].slot = self.free.pop()
            self.active.append(waiting.popleft())

    @torch.inference_mode()
    def step(self) -> None:
        """Run one packed batch: every active request reads prompt tokens or generates a token."""
        self.steps += 1
        if not self.active:
            return
        self.active.sort(key=lambda request: request.reading)  # those that decode come first
        work = [request.next_tokens(self.budget) for request in self.active]
        slots = [request.slot for request in self.active]
        decoding = sum(not request.reading for request in self.active)
        if decoding < len(work):
            best = self.model(self.pack(work, slots, decoding), self.pools)
        else:
            size = min(self.slots, 1 << (decoding - 1).bit_length())
            if size not in self.decodes:
                self.decodes[size] = Decode(self.model, self.pools, size)
            best = self.decodes[size]([token for (token,) in work], slots)
        for request, part, token in zip(self.active, work, best.tolist()):
            request.done += len(part)
            if not request.reading:
                request.output.append(token)
        self.tokens += sum(map(len, work))
        self.mixed += 0 < decoding < len(work)
        self.free += [request.slot for request in self.active if request.finished]
        self.active = [request for request in self.active if not request.finished]

    def pack(self, work: list[list[int]], slots: list[int], decoding: int) -> Batch:
        """Return a batch whose requests past the first `decoding` read pieces of their prompts."""
        tensor = partial(torch.tensor, device=self.pools[0].device)
        return Batch(
            tensor([token for part in work for token in part]),
            tensor(slots),
            decoding,
            tensor([0, *accumulate(map(len, work[decoding:]))]),
            tensor([request.done > 0 for request in self.active[decoding:]]),
        )

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


def measure(model: Model, count: int, wanted: int) -> float:
    """Return the tokens per second that `count` requests generate together, prompts not timed."""
    engine = Engine(model, count)
    engine.active = [Request([1], wanted + 2, slot=slot) for slot in engine.free]
    engine.free = []
    engine.step()  # the prompts
    engine.step()  # on a GPU, compiles and captures
    start = time.perf_counter()
    engine.run([])
    return count * wanted / (time.perf_counter() - start)


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Serve, compare every request with itself served alone, and print tokens per second."""
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
    counts, wanted = ((1, 8), 8) if args.device == "cpu" else ((1, 8, 128), 256)
    for count in counts:
        speed = measure(model, count, wanted)
        print(f"decode, batch of {count}: {speed:.0f} tokens/s")
    return {
        "steps": engine.steps,
        "mixed": engine.mixed,
        "tokens": engine.tokens,
        "produced": produced,
        "tokens_per_second": engine.tokens / seconds,
    }


if __name__ == "__main__":
    main()
