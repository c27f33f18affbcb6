"""The adapters of the benchmark's peers, against stand-ins that have a peer's signatures and these
operators inside.
"""

import sys
from types import ModuleType

import pytest
import torch

import kda_ops
from benchmarks import peers
from kda_ops.compat import fla
from kda_ops.tools.cases import flags, make_inputs
from tests.support.benchmark import case


def chunk_gated_delta_rule(q, k, v, g, beta, *, auto_cp):
    """FlashQLA's, which has neither gate nor norm inside."""
    return kda_ops.chunk_gdn(q, k, v, g, beta)


def kimi_delta_attention(q, k, v, g, beta, offsets):
    """Stand in for the cuDNN frontend: packed sequences, no batch axis, a decay in fp32."""
    assert q.dim() == v.dim() == g.dim() == 3 and g.dtype == torch.float32
    return kda_ops.chunk_kda(*(t[None] for t in (q, k, v, g, beta)), cu_seqlens=offsets)[0][0]


@pytest.fixture
def installed(monkeypatch):
    """Install fakes of the modules that the adapters import."""

    def install(name, **members):
        for end in range(1, name.count(".") + 2):
            path = ".".join(name.split(".")[:end])
            if not isinstance(sys.modules.get(path), ModuleType) or path == name:
                module = ModuleType(path)
                module.__path__ = []
                monkeypatch.setitem(sys.modules, path, module)
        vars(sys.modules[name]).update(members)

    everything = {name: getattr(fla, name) for name in fla.__all__}
    for name in ("fla.ops.kda", "fla.ops.gated_delta_rule"):
        install(name, **everything)
    install("fla.ops.kda.fused_recurrent", **everything)
    install("flash_qla", chunk_gated_delta_rule=chunk_gated_delta_rule)
    install("cudnn.linear_attention", kimi_delta_attention=kimi_delta_attention)


GATES = {"kda": ["bound", "softplus", "strong", "weak"], "gdn": ["softplus", "strong", "weak"]}
WHOLE = [
    (op, peer, gate)
    for op, peer in (("kda", "fla"), ("kda", "cudnn"), ("gdn", "fla"), ("gdn", "flashqla"))
    for gate in GATES[op]
]
WHOLE += [("kda", "fla", "strong_safe"), ("kda", "fla", "weak_promised")]
WHOLE += [("kda", "cudnn", "strong_promised"), ("gdn", "fla", "strong_promised")]
DECODE = [
    (op, state, gate)
    for op, state in (("kda", "fp32"), ("kda", "bf16"), ("gdn", "fp32"))
    for gate in GATES[op]
]


@pytest.mark.parametrize("op, peer, gate", WHOLE)
def test_a_peer_is_asked_for_what_we_compute(installed, op, peer, gate):
    there = case(op, gate=gate, setting="B2T70H1HV2D128" if peer == "cudnn" else "B2T70H2HV4D16")
    (side,) = (p for p in peers.PEERS if p.name == peer)
    x = {n: t.double() for n, t in make_inputs(there).items()}
    off = (side.forward(there)(x) - peers.our_forward(there)(x)).abs().max()
    assert off < 1e-6  # a side whose gate is not inside activates it in float32


def test_what_is_promised_to_us_is_promised_to_the_peer():
    for gate in ("strong", "strong_safe", "weak_safe", "strong_promised"):
        there = case("kda", gate=gate)
        theirs = peers.fla_flags(there, {})
        assert theirs == ({} if gate == "strong" else {"safe_gate": True})
        assert flags(there).get("safe_gate", False) == (gate != "strong")
        assert peers.fla_flags(case("gdn", gate="weak_promised"), {}) == {}


@pytest.mark.parametrize("layout", ["kv", "vk"])
@pytest.mark.parametrize("op, state, gate", DECODE)
def test_a_peer_decodes_from_the_same_states_in_the_same_layout(installed, op, state, gate, layout):
    there = case(op, "decode", gate, setting="B3T1H2HV4D16", state=state, layout=layout)
    (side,) = (p for p in peers.PEERS if p.name == "fla")
    x, dtype = make_inputs(there), {"fp32": torch.float32, "bf16": torch.bfloat16}[state]
    pool = torch.randn(3, 4, 16, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    o, after = peers.our_step(there, x)(pool.clone())
    peer_o, peer_after = side.step(there, x)(pool.clone())
    torch.testing.assert_close(peer_o, o)
    torch.testing.assert_close(peer_after, after)
    assert not torch.equal(after, pool)


def test_what_a_peer_has_not_is_said(installed):
    for name, there in (
        ("fla", case("gdn", "decode", "softplus", setting="B3T1H2D16", state="bf16")),
        ("flashqla", case("kda")),
        ("cudnn", case("gdn")),
        ("cudnn", case("kda")),
    ):
        (side,) = (p for p in peers.PEERS if p.name == name)
        with pytest.raises(peers.Unsupported):
            (
                side.step(there, make_inputs(there))
                if there.pass_ == "decode"
                else side.forward(there)
            )
