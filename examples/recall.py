"""Train associative recall: the model sees 16 pairs once and recalls them after 64 noise tokens.

Usage::

    python examples/recall.py                 # CPU, under 2 minutes on two cores

A row holds 16 times ``key value``, then 64 noise tokens, then the 16 keys in another order. At each
of these keys the model predicts the value of the key. Only the state can carry that value, because
at least 64 tokens lie between a value and its question, and the convolutions see four tokens.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from kda_ops.nn import KimiDeltaAttention
from kda_ops.tools.machine import need_device

PAIRS, NOISE, KEYS, VALUES, FILLERS = 16, 64, 64, 64, 16
VOCABULARY = KEYS + VALUES + FILLERS


def rows(batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return tokens [batch, 2 * 16 + 64 + 16] and the answers [batch, 16] to the last 16."""
    keys = torch.rand(batch, KEYS, generator=generator).argsort(1)[:, :PAIRS]  # without repetition
    values = torch.randint(VALUES, (batch, PAIRS), generator=generator)
    noise = torch.randint(FILLERS, (batch, NOISE), generator=generator) + KEYS + VALUES
    order = torch.rand(batch, PAIRS, generator=generator).argsort(1)
    shown = torch.stack([keys, values + KEYS], 2).flatten(1)
    return torch.cat([shown, noise, keys.gather(1, order)], 1), values.gather(1, order)


class RecallModel(nn.Module):
    """Two residual KDA layers between an embedding and a head over values."""

    def __init__(self, hidden: int):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, hidden)
        self.norms = nn.ModuleList(nn.RMSNorm(hidden) for _ in range(3))
        self.mixers = nn.ModuleList(
            KimiDeltaAttention(hidden_size=hidden, head_dim=hidden // 2, num_heads=2)
            for _ in range(2)
        )
        self.head = nn.Linear(hidden, VALUES, bias=False)
        for mixer in self.mixers:
            # by default most channels decay within 64 tokens, which leaves little gradient
            nn.init.constant_(mixer.A_log, -4.0)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the 16 answers, [batch, 16, VALUES]."""
        x = self.embed(tokens)
        for norm, mixer in zip(self.norms, self.mixers):
            x = x + mixer(norm(x))
        return self.head(self.norms[-1](x[:, -PAIRS:]))


def main(argv: list[str] | None = None) -> float:
    """Train, then return the accuracy on unseen rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument(
        "--steps",
        type=int,
        default=600,
        help="at most; training ends after 20 batches in a row above 98 %% accuracy",
    )
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    need_device(parser, args.device)
    if min(args.hidden, args.batch, args.steps) < 1:
        parser.error(
            "--hidden, --batch and --steps must be at least 1, got "
            f"{args.hidden}, {args.batch} and {args.steps}."
        )
    begin = time.perf_counter()
    torch.manual_seed(args.seed)
    training = torch.Generator().manual_seed(args.seed)
    testing = torch.Generator().manual_seed(args.seed + 1)
    model = RecallModel(args.hidden).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, args.lr, total_steps=args.steps, pct_start=0.1
    )
    progress, streak = tqdm(range(args.steps), unit="step"), 0
    for _ in progress:
        tokens, answers = (x.to(args.device) for x in rows(args.batch, training))
        logits = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), answers.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        right = (logits.argmax(-1) == answers).float().mean().item()
        progress.set_description(f"loss {loss.item():.2f}, accuracy {right:.0%}")
        streak = streak + 1 if right > 0.98 else 0
        if streak == 20:
            break
    with torch.no_grad():
        tokens, answers = (x.to(args.device) for x in rows(512, testing))
        accuracy = (model(tokens).argmax(-1) == answers).float().mean().item()
    print(
        f"accuracy {accuracy:.1%} on {answers.numel()} questions (chance: "
        f"{1 / VALUES:.1%}); {time.perf_counter() - begin:.0f} s"
    )
    return accuracy


if __name__ == "__main__":
    main()
