"""The host benchmark: the bare operators have our results' metadata, and every part gives rows."""

import json

import pytest
import torch
from torch._subclasses import FakeTensor, FakeTensorMode

from benchmarks import bare, host, model, runner
from kda_ops.registrations import schemas
from kda_ops.tools.cases import INPUTS, Case, flags, make_inputs

ENTRIES = {entry.name: entry for entry in bare.OPERATORS}


def case_of(op, device="cpu", setting="B2T70H2HV4D16"):
    return Case(op, "fwdbwd", setting, "softplus", device, torch.bfloat16)


def arguments(case):
    x = make_inputs(case)
    return [x[n] for n in INPUTS], flags(case) | {"output_final_state": True}


def metadata(found):
    tensors = found if isinstance(found, (tuple, list)) else [found]
    return [(x.shape, x.dtype, x.device, x.stride()) for x in tensors if x is not None]


@pytest.mark.quick
@pytest.mark.parametrize("op", schemas.VARIANTS)
def test_a_bare_operator_has_the_schema_results_and_gradients_of_ours(op):
    for name, entry in ENTRIES.items():
        schema = str(bare.operator(op, name)._schema)
        assert schema.removeprefix("bare_") == str(entry.overload(op)._schema)
    args, words = arguments(case_of(op))
    found = []
    for chunk in (ENTRIES["chunk"].overload(op), bare.operator(op, "chunk")):
        leaves = [args[0], *(x.detach().requires_grad_() for x in args[1:])]
        out = chunk(*leaves, **words)
        dout = [torch.ones_like(x) for x in out]
        grads = torch.autograd.grad(out, leaves[1:], dout)
        with torch.no_grad():
            found.append(metadata([*out, *grads, *chunk(*args, **words)]))
    assert found[0] == found[1] and len(found[0]) == 2 + len(args) - 1 + 2


@pytest.mark.parametrize("op", schemas.VARIANTS)
def test_a_bare_operator_keeps_what_ours_keeps(op):
    args, words = arguments(case_of(op))
    for keep in (False, True):
        sides = (ENTRIES["chunk_fwd"].overload(op), bare.operator(op, "chunk_fwd"))
        with torch.no_grad():
            ours, like = (side(*args, **words, disable_recompute=keep) for side in sides)
        assert metadata(ours) == metadata(like)
        assert any(x.dim() > 1 for x in like[2:]) == keep  # on a CPU; a GPU keeps A in any case


@pytest.mark.parametrize("op", schemas.VARIANTS)
def test_a_bare_operator_keeps_A_for_16_bits_on_a_gpu(op):
    args, words = arguments(case_of(op))
    meta = [x.to("meta") for x in args]
    with FakeTensorMode() as mode, torch.no_grad():
        gpu = [FakeTensor(mode, x, torch.device("cuda:0")) for x in meta]
        kept = bare.operator(op, "chunk_fwd")(*gpu, **words)[2:]
    found = [x for x in kept if x.dim() > 1]
    assert found and all(x.dtype == torch.bfloat16 and x.is_cuda for x in found)


def test_a_call_of_other_shapes_or_flags_gets_results_of_its_own():
    chunk = bare.operator("kda", "chunk")
    for T in (70, 33):
        for ask in (False, True):
            args, words = arguments(case_of("kda", setting=f"B1T{T}H1D16"))
            o, state = chunk(*args, **words | {"output_final_state": ask})
            assert o.shape == (1, T, 1, 16) and o.is_contiguous()
            assert state.shape == ((1, 1, 16, 16) if ask else (0,))


def test_every_part_gives_rows_on_a_cpu(monkeypatch, tmp_path, capsys):
    torch._dynamo.reset()
    asked = []

    def apart(module, work, limit):
        asked.append((work["peer"], work["mode"]))
        return {"ms": 2.0, "busy_ms": 1.0} if work["peer"] else {"ms": 4.0, "says": "no profiler"}

    monkeypatch.setattr(host, "apart", apart)
    monkeypatch.setattr(host, "LAYERS", 2)
    path = tmp_path / "host.json"
    command = f"host --device cpu --ops gdn --rounds 2 --count 2 --output {path}"
    assert runner.main(command.split()) == 0
    torch._dynamo.reset()
    found = json.loads(path.read_text())
    assert found["torch"] == torch.__version__ and "triton" in found and "device" in found
    figures = {(r["part"], r["call"]): r["figures"] for r in found["rows"]}
    assert {part for part, _ in figures} == set(host.PARTS)
    for part in ("eager", "compiled"):
        for call in ("fwd", "fwdbwd"):
            assert figures[part, call]["ours"] > figures[part, call]["bare"] > 0
    for part in ("varying", "packed"):
        assert figures[part, "fwdbwd"].keys() == {"fixed", "new"}
    assert figures["wall", "fwd"].keys() == {"wall", "gpu"}
    assert figures["model", "bare"] == {"wall": 2.0, "gpu busy": 1.0}
    assert figures["model", "ours"] == {"wall": 4.0}
    assert asked == [(None, None), ("bare", None), (None, "reduce-overhead")]
    shown = capsys.readouterr().out.splitlines()
    assert sum(x.startswith("skipped: ") for x in shown) == 2
    assert [x for x in shown[1:] if not x.startswith("skipped: ")] == [
        *map(host.line, found["rows"])
    ]


def test_a_loop_of_new_lengths_never_repeats_one(monkeypatch):
    seen = []
    monkeypatch.setattr(host, "our_forward", lambda case, **words: lambda x: seen.append(x["v"]))
    case = Case("gdn", "fwdbwd", "B1T64H1D2", "softplus", "cpu", torch.float32)
    monkeypatch.setattr(torch.autograd, "grad", lambda *_: None)
    host.varying(case, 12, 20, packed=False)
    new = [v.shape[1] for v in seen if v.shape[1] != 64]
    assert len(new) == len(set(new)) == 2 * 12 * 5 and set(new) <= set(host.TOKENS)


def test_a_peer_that_breaks_loses_its_column_and_ours_may_not(capsys):
    case = Case("gdn", "fwdbwd", "B1T8H1D2", "softplus", "cpu", torch.float32)
    x = make_inputs(case)

    def no_backward(x):
        if torch.is_grad_enabled():
            raise RuntimeError("no backward here")
        return x["v"]

    sides = {"ours": (lambda x: x["v"] * 2, {"v": x["v"]}), "fla": (no_backward, x)}
    found = host.both_us(sides, case, 1, 1)
    assert found["fwd"].keys() == {"ours", "fla"} and found["fwdbwd"].keys() == {"ours"}
    assert "skipped: gdn fla: RuntimeError: no backward here" in capsys.readouterr().out
    with pytest.raises(RuntimeError, match="no backward here"):
        host.both_us({"bare": (no_backward, x)}, case, 1, 1)


@pytest.mark.parametrize("op", schemas.VARIANTS)
def test_a_model_of_bare_operators_is_one_graph(monkeypatch, capsys, op):
    monkeypatch.setattr(model, "LAYERS", 2)
    torch._dynamo.reset()
    small = Case(op, "model", "B1T66H1D16", "softplus", "cpu", torch.bfloat16)
    model.measure(small, "bare", "reduce-overhead")
    torch._dynamo.reset()
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])["figures"]
    assert figures["graphs"] == 1 and figures["breaks"] == 0 and figures["ms"] > 0
