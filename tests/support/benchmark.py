"""Build cases and rows of the benchmark for its tests."""

from __future__ import annotations

import torch

from benchmarks.cases import Case

SMALL = "B1T130H2HV4D16"


def case(op="kda", pass_="fwd", gate="weak", setting=SMALL, **words):
    return Case(op, pass_, setting, gate, "cpu", torch.float32, **words)


def row(**changed):
    base = dict(op="kda", setting=SMALL, gate="weak", state="fp32", layout="kv", peer="fla")
    base |= dict(ours_ms=1.0, peer_ms=2.0, ours_error=1e-3, peer_error=1e-3, card="G", torch="1")
    base |= dict(triton="2", commit="0123456789", date="2026-11-01")
    return {"op": "kda", "pass": "fwd"} | base | {"also": {}} | changed
