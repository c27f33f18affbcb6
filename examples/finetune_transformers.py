"""Train transformers' Kimi-Linear on packed documents, on these operators.

Usage::

    # a tiny model on a CPU, under a minute
    python examples/finetune_transformers.py
    # then time one step, with and without these operators
    python examples/finetune_transformers.py --compare

The only change to a training loop is `kda_ops.compat.transformers.enable()`; model and checkpoints
stay the same. `enable` also works for Qwen3-Next and Qwen3.5. The model of this script is random
and reads bytes, so use ``KimiLinearForCausalLM.from_pretrained(...)`` and its tokenizer instead.

The script packs documents (functions of the Python standard library) into rows without padding. Do
all four of the following, or transformers mixes the documents of a row without an error:

- pass ``cu_seq_lens_q``, where documents start, which the linear layers read;
- pass ``position_ids`` that count from 0 in each document, which the full attention reads;
- pass no ``attention_mask``, because with a mask, even of ones, the full attention mixes documents;
- pass ``use_cache=False``, because packed rows with a cache raise an error.

A loop over padded batches needs no change: pass its ``attention_mask``.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kda_ops.compat.transformers
from kda_ops.tools.machine import need_device


def tiny(hidden: int = 64, heads: int = 2, head_dim: int = 32, layers: int = 4) -> nn.Module:
    """Build a byte-level Kimi-Linear; every fourth layer is full attention, the others KDA."""
    from transformers import KimiLinearConfig, KimiLinearForCausalLM

    return KimiLinearForCausalLM(
        KimiLinearConfig(
            vocab_size=257,
            pad_token_id=256,
            bos_token_id=None,
            eos_token_id=None,
            hidden_size=hidden,
            intermediate_size=3 * hidden,
            num_hidden_layers=layers,
            layer_types=[
                "full_attention" if i % 4 == 3 else "linear_attention" for i in range(layers)
            ],
            mlp_layer_types=["dense"] * layers,
            linear_num_heads=heads,
            linear_head_dim=head_dim,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            kv_lora_rank=head_dim,
            qk_nope_head_dim=head_dim,
            qk_rope_head_dim=head_dim // 2,
            v_head_dim=head_dim,
        )
    )


def documents() -> Iterator[bytes]:
    """Yield functions of the standard library in random order, forever."""
    texts = [
        path.read_text(errors="ignore")
        for path in sorted(Path(random.__file__).parent.glob("*.py"))
    ]
    found = ["def " + part for text in texts for part in text.split("\ndef ")[1:]]
    order = random.Random(0)
    while True:
        yield from (text[:250].encode() for text in order.sample(found, len(found)))


def rows(tokens: int, device: str) -> Iterator[dict[str, Tensor | bool]]:
    """Yield rows of `tokens` tokens, filled with documents; the last one is cut."""
    source = documents()
    while True:
        lengths: list[int] = []
        row = b""
        while len(row) < tokens:
            document = next(source)[: tokens - len(row)]
            row += document
            lengths.append(len(document))
        starts = torch.tensor([0, *lengths]).cumsum(0)
        yield {
            "input_ids": torch.tensor([list(row)], device=device),
            "position_ids": torch.cat([torch.arange(n) for n in lengths])[None].to(device),
            "cu_seq_lens_q": starts.to(device, torch.int32),
            "use_cache": False,
        }


def loss_of(call: Callable, row: dict) -> Tensor:
    """Return the mean cross entropy of each byte given the bytes before it in its document."""
    logits, ids = call(**row).logits[0], row["input_ids"][0]
    inside = row["position_ids"][0, 1:] > 0  # a document's first byte has no context
    return F.cross_entropy(logits[:-1].float(), torch.where(inside, ids[1:], -100))


def step_time(model: nn.Module, call: Callable, row: dict, repeat: int = 5) -> float:
    """Return the median milliseconds of a forward and backward."""
    times = []
    for _ in range(repeat + 2):
        if row["input_ids"].is_cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        loss_of(call, row).backward()
        if row["input_ids"].is_cuda:
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
        model.zero_grad(set_to_none=True)
    return statistics.median(times[2:])


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Train, generate, and with --compare time; return losses and milliseconds by name."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--tokens", type=int, default=1024, help="tokens per row")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=32)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true", help="use torch.compile(fullgraph=True)")
    parser.add_argument(
        "--compare",
        action="store_true",
        help="time one unpacked row, with and without these operators",
    )
    args = parser.parse_args(argv)
    need_device(parser, args.device)
    if min(args.steps, args.hidden, args.heads, args.head_dim, args.layers) < 1 or args.tokens < 2:
        parser.error("--tokens must be at least 2, --steps and the other sizes at least 1.")
    if args.compare and args.compile:
        parser.error("--compare times eager code: drop --compile.")
    torch.manual_seed(0)
    if args.device == "cpu":
        torch.set_num_threads(1)  # faster for tensors this small
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    model = tiny(args.hidden, args.heads, args.head_dim, args.layers).to(args.device)
    call = torch.compile(model, fullgraph=True, dynamic=True) if args.compile else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    data, out = rows(args.tokens, args.device), {}

    def autocast():
        return torch.autocast(args.device, dtype) if dtype is torch.bfloat16 else nullcontext()

    kda_ops.compat.transformers.enable()  # before or after the model is built
    for step in range(args.steps):
        with autocast():
            loss = loss_of(call, next(data))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step == 0 or (step + 1) % 20 == 0:
            print(f"step {step + 1:4d}  loss {loss.item():.3f}")
        out.setdefault("first loss", loss.item())
        out["last loss"] = loss.item()

    prompt = torch.tensor([list(b"def get_")], device=args.device)
    with autocast():
        written = model.eval().generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=24, do_sample=False
        )
    print(bytes(b for b in written[0].tolist() if b < 256).decode(errors="replace"))

    if args.compare:
        model.train()
        row = {n: x for n, x in next(data).items() if n != "cu_seq_lens_q"} | {
            "position_ids": torch.arange(args.tokens, device=args.device)[None]
        }
        with autocast():
            out["ours, ms"] = step_time(model, call, row)
            kda_ops.compat.transformers.disable()
            out["transformers, ms"] = step_time(model, model, row)
        print(
            f"one forward and backward of {args.tokens} tokens: {out['ours, ms']:.1f} ms with "
            f"these operators, {out['transformers, ms']:.1f} ms without"
        )
    kda_ops.compat.transformers.disable()
    return out


if __name__ == "__main__":
    main()
