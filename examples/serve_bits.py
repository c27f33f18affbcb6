"""Generate with an engine, then compute the same log-probabilities by one training forward.

Usage::

    python examples/serve.py --invariant                    # CPU, some seconds
    python examples/serve.py --invariant --device cuda --requests 64 --slots 16 --hidden 1024 \\
        --heads 8

Every bit must be the same, as trainers need that learn from their own samples. The engine mixes
pieces of prompts, single tokens and drafts in one packed batch, and takes rejected drafts back.
Layers keep their past in `kda_ops.nn.InvariantCache`, which gives each token the bits of the chunk
form. Matrix products, norms and log-probabilities are torch's, whose bits may depend on the number
of rows. So they run on blocks of a fixed number of rows: 1 on a CPU, 64 on a GPU.
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from kda_ops.nn import GatedDeltaNet, InvariantCache, KimiDeltaAttention
from kda_ops.tools.bits import FixedRows, fix_rows

MIXERS: dict[str, Callable[..., nn.Module]] = {"KDA": KimiDeltaAttention, "GDN": GatedDeltaNet}
DRAFTS = 3


class Request(Protocol):
    """A request of `serve.py`."""

    prompt: list[int]
    wanted: int
    arrival: int
    output: list[int]


class Feed(nn.Sequential):
    """Two linear maps with a SiLU in between."""

    def __init__(self, hidden: int):
        super().__init__(
            nn.RMSNorm(hidden), nn.Linear(hidden, 4 * hidden), nn.SiLU(),
            nn.Linear(4 * hidden, hidden),
        )  # fmt: skip


class Head(nn.Sequential):
    """The log-probabilities of the next token."""

    def __init__(self, hidden: int, vocabulary: int):
        super().__init__(nn.RMSNorm(hidden), nn.Linear(hidden, vocabulary), nn.LogSoftmax(-1))


class Model(nn.Module):
    """A language model of delta layers, each followed by a feed-forward layer."""

    def __init__(self, mixer: str, vocabulary: int, hidden: int, layers: int, heads: int):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        sizes = dict(head_dim=hidden // heads, num_heads=heads, expand_v=1, invariant=True)
        self.norms = nn.ModuleList(nn.RMSNorm(hidden) for _ in range(layers))
        self.mixers = nn.ModuleList(MIXERS[mixer](hidden, **sizes) for _ in range(layers))
        self.feeds = nn.ModuleList(Feed(hidden) for _ in range(layers))
        self.head = Head(hidden, vocabulary)

    def forward(
        self, tokens: Tensor, cu_seqlens: Tensor, caches: Sequence[InvariantCache | None]
    ) -> Tensor:
        """Return log-probabilities after each of the packed tokens [T], [T, vocabulary]."""
        x = self.embedding(tokens)[None]
        for norm, mixer, feed, cache in zip(self.norms, self.mixers, self.feeds, caches):
            x = x + mixer(norm(x), cache=cache, cu_seqlens=cu_seqlens)
            x = x + feed(x)
        return self.head(x[0])


def guess(tokens: list[int], count: int) -> list[int]:
    """Return the tokens that followed the last token the time before: drafts for free."""
    before = [i for i, token in enumerate(tokens[:-1]) if token == tokens[-1]]
    return tokens[before[-1] + 1 :][:count] if before else []


class Engine:
    """Runs requests on the slots of one cache per layer; every slot takes part in every step."""

    def __init__(self, model: Model, slots: int, budget: int):
        self.model, self.budget = model, budget
        self.caches: list[InvariantCache] = [
            mixer.new_cache(slots, invariant=True, drafts=DRAFTS)  # type: ignore[operator]
            for mixer in model.mixers
        ]
        self.slots: list[Request | None] = [None] * slots
        self.done = [0] * slots  # tokens of each slot that its states and caches have
        self.found: dict[int, list[Tensor]] = {}  # log-probabilities of each request's output
        self.steps = self.mixed = self.accepted = self.rejected = 0

    def admit(self, waiting: deque[Request]) -> None:
        """Give the free slots to requests that have arrived."""
        for slot, request in enumerate(self.slots):
            if request is None and waiting and waiting[0].arrival <= self.steps:
                self.slots[slot], self.done[slot] = waiting.popleft(), 0
                for cache in self.caches:
                    cache.reset(slot)

    @torch.inference_mode()
    def step(self) -> None:
        """Let every request read a piece of its prompt, or its last token and drafts."""
        self.steps += 1
        feeds, decoding = [], []
        for request, done in zip(self.slots, self.done):
            feed: list[int] = []
            if request is not None:
                known = request.prompt + request.output
                feed = known[done : done + self.budget]
                if request.output:
                    feed = feed + guess(known, DRAFTS)
                decoding.append(bool(request.output))
            feeds.append(feed)
        if not any(feeds):
            return  # nobody has arrived
        self.mixed += any(decoding) and not all(decoding)
        device = self.model.embedding.weight.device
        tokens = torch.tensor([token for feed in feeds for token in feed], device=device)
        offsets = torch.tensor([0, *map(len, feeds)], device=device).cumsum(0)
        log_p = self.model(tokens, offsets, self.caches)
        best = log_p.max(-1)
        drafts = zip(best.values.split([*map(len, feeds)]), best.indices.split([*map(len, feeds)]))
        rejected = [
            self.take(slot, feed, *found) for slot, (feed, found) in enumerate(zip(feeds, drafts))
        ]
        for cache in self.caches:
            cache.crop(torch.tensor(rejected, device=device))

    def take(self, slot: int, feed: list[int], values: Tensor, best: Tensor) -> int:
        """Give a request its new tokens; return how many of the fed ones were wrong drafts."""
        request = self.slots[slot]
        if request is None:
            return 0
        decodes, first = bool(request.output), len(request.prompt) - 1 - self.done[slot]
        self.done[slot] += len(feed)
        if not decodes and first >= len(feed):
            return 0  # a piece of the prompt
        i = wrong = 0
        kept = self.found.setdefault(id(request), [])
        for i in range(0 if decodes else first, len(feed)):
            token = int(best[i])
            request.output.append(token)
            kept.append(values[i])
            wrong = len(feed) - 1 - i
            if len(request.output) == request.wanted:
                self.slots[slot] = None
                break
            if wrong and feed[i + 1] != token:
                break
        self.accepted += i if decodes else 0
        self.rejected += wrong
        self.done[slot] -= wrong
        return wrong

    def run(self, requests: Sequence[Request]) -> None:
        """Run steps until every request is finished."""
        waiting = deque(sorted(requests, key=lambda request: request.arrival))
        while waiting or any(self.slots):
            self.admit(waiting)
            self.step()


def train(model: Model, requests: Sequence[Request]) -> list[Tensor]:
    """Return the log-probabilities of each request's output, with gradients, from one forward."""
    rows = [torch.tensor(r.prompt + r.output[:-1]) for r in requests]
    offsets = torch.tensor([0, *map(len, rows)]).cumsum(0)
    device = model.embedding.weight.device
    log_p = model(torch.cat(rows).to(device), offsets.to(device), [None] * len(model.mixers))
    each = zip(log_p.split([*map(len, rows)]), requests)
    return [
        p[-len(r.output) :].gather(1, torch.tensor(r.output, device=device)[:, None])[:, 0]
        for p, r in each
    ]


def run(mixer: str, requests: Sequence[Request], args: argparse.Namespace) -> dict[str, int]:
    """Serve, train and compare one kind of layer; exit if a bit differs."""
    torch.manual_seed(args.seed)
    model = Model(mixer, 256, args.hidden, args.layers, args.heads)
    rows = 1 if args.device == "cpu" else 64
    fix_rows(model, rows, (nn.Linear, Feed, Head))
    model.norms = nn.ModuleList(FixedRows(norm, rows) for norm in model.norms)
    model.to(args.device)
    engine = Engine(model, args.slots, args.budget)
    engine.run(requests)
    trained = train(model, requests)
    differ = sum(
        int((torch.stack(engine.found[id(r)]) != p).sum()) for r, p in zip(requests, trained)
    )
    count = sum(map(len, trained))
    print(
        f"{mixer}: {engine.steps} steps, {engine.mixed} mixed prefill and decode; "
        f"{engine.accepted} drafts accepted, {engine.rejected} rejected\n"
        f"{mixer}: {differ} of {count} log-probabilities differ from those of training"
    )
    if differ:
        raise SystemExit("the generator's bits are not the trainer's")
    return dict(
        produced=count, mixed=engine.mixed, accepted=engine.accepted, rejected=engine.rejected
    )
