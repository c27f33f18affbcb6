"""Time a training step of FLA's own models, on FLA's kernels and on ours through its backend.

``python -m benchmarks.fla_models [--variant kda gdn] [--tokens 4096] [--out JSON]``

Needs FLA 0.6.0 with einops and transformers. Both sides run in one process on the same weights and
tokens, in turns: FLA reads ``FLA_KDA_OPS`` at every call. The model has 8 layers of FLA's
configuration with heads of 128. It trains in bf16 with AdamW, not compiled. FLA's GDN backward
refuses some versions of Triton. Then the reason is reported in place of times.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.records import stamp, write_json
from kda_ops.compat import fla_backend

SIDES = {"fla": "0", "kda_ops": "1"}  # side -> FLA_KDA_OPS
WARM, STEPS = 3, 20


def model(variant: str, layers: int, heads: int, head_dim: int, **words: Any) -> torch.nn.Module:
    """Build one of FLA's models with reproducible weights."""
    sizes: dict[str, Any] = dict(
        hidden_size=heads * head_dim,
        num_heads=heads,
        head_dim=head_dim,
        expand_v=1.0,
        num_hidden_layers=layers,
        use_cache=False,
        **words,
    )
    torch.manual_seed(0)
    if variant == "kda":
        from fla.models.kda import KDAConfig, KDAForCausalLM

        return KDAForCausalLM(KDAConfig(**sizes))
    from fla.models.gated_deltanet import GatedDeltaNetConfig, GatedDeltaNetForCausalLM

    return GatedDeltaNetForCausalLM(GatedDeltaNetConfig(**sizes))


def chosen() -> bool:
    """Return whether FLA passed any call to our backend after the last call of this function."""
    from fla.backends import _function_registries, _operation_registries

    found = False
    for registry in (*_function_registries.values(), *_operation_registries.values()):
        found |= any(said.endswith(":kda_ops") for said in registry._logged)
        registry._logged.clear()
    return found


def measure(net: torch.nn.Module, ids: torch.Tensor, steps: int = STEPS) -> dict[str, Any]:
    """Return each side's median step in ms, its first losses and, where it fails, the reason."""
    optimizer: torch.optim.Optimizer
    synchronize = torch.cuda.synchronize if ids.is_cuda else lambda: None
    start = {n: x.detach().clone() for n, x in net.state_dict().items()}
    found: dict[str, Any] = {side: {"ms": []} for side in SIDES}

    def step(side: str) -> tuple[float, float]:
        os.environ["FLA_KDA_OPS"] = SIDES[side]
        synchronize()
        begin = time.perf_counter()
        loss = net(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        synchronize()
        return 1e3 * (time.perf_counter() - begin), loss.item()

    for side in SIDES:
        net.load_state_dict(start)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
        chosen()
        try:
            found[side]["losses"] = [step(side)[1] for _ in range(WARM)]
        except (RuntimeError, AssertionError) as error:
            found[side] = {"refused": str(error).splitlines()[0][:200]}
            net.zero_grad(set_to_none=True)
            continue
        if chosen() != (side == "kda_ops"):
            raise RuntimeError(f"the calls of side {side} went to the other kernels")
    for _ in range(steps):  # in turns, so that both see the same clocks
        for side in SIDES:
            if "ms" in found[side]:
                found[side]["ms"].append(step(side)[0])
    for side in SIDES:
        if "ms" in found[side]:
            found[side]["ms"] = statistics.median(found[side]["ms"])
    return found


def main() -> None:
    """Print one line for each variant and side; write them to a file if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variant", nargs="+", choices=("kda", "gdn"), default=["kda", "gdn"])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    fla_backend.enable()
    about, rows = stamp("cuda"), list[dict[str, Any]]()
    for variant in args.variant:
        ids = torch.randint(3, 32000, (1, args.tokens), device="cuda")
        net = model(variant, args.layers, args.heads, 128).to("cuda", torch.bfloat16).train()
        for side, row in measure(net, ids).items():
            rows.append({"variant": variant, "side": side, "tokens": args.tokens} | row | about)
            print(rows[-1], flush=True)
    if args.out:
        write_json(args.out, {"rows": rows})


if __name__ == "__main__":
    main()
