"""Exported programs: one for all sizes, through a file, and compiled into a package that another
process runs.
"""

from __future__ import annotations

import io

import pytest
import torch
from torch.export import Dim

import kda_ops
from examples.export import Decoder, Mixer, export_decode, export_prefill, package, run_elsewhere
from kda_ops.nn import GatedDeltaNet, KimiDeltaAttention


def through_file(program):
    """Save and load in memory; the module of what was loaded."""
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file).module()


def calls(program):
    """Return the operators that a program calls."""
    return [
        str(n.target) for n in program.graph.nodes if str(n.target).startswith(("kda.", "gdn."))
    ]


@pytest.mark.bits
@pytest.mark.parametrize("operator", (kda_ops.chunk_kda, kda_ops.recurrent_kda))
@torch.no_grad()
def test_one_program_serves_every_batch_and_length(operator):
    mixer = Mixer(operator=operator)
    program = export_prefill(mixer)
    assert calls(program) == [f"kda.{operator.__name__.removesuffix('_kda')}.default"]
    run = through_file(program)
    for shape in ((2, 70), (3, 5), (1, 129), (1, 1), (2, 0)):
        x = torch.randn(*shape, 32)
        torch.testing.assert_close(run(x), mixer(x), rtol=0, atol=0)


@pytest.mark.bits
@torch.no_grad()
def test_states_are_a_buffer_of_the_program():
    decoder = Decoder()
    decoder.states.normal_()
    program = export_decode(decoder)
    assert calls(program) == ["kda.recurrent_.default"]
    assert list(program.run_decompositions().graph_signature.buffers_to_mutate.values()) == [
        "states"
    ]
    run = through_file(program)
    for slots in ([1], [2, 5, 0], [2, -1, 1]):
        x, slots = torch.randn(len(slots), 1, 32), torch.tensor(slots)
        torch.testing.assert_close(run(x, slots), decoder(x, slots), rtol=0, atol=0)
        torch.testing.assert_close(run.states, decoder.states, rtol=0, atol=0)


@pytest.mark.bits
@pytest.mark.quick
def test_an_exported_program_trains():
    mixer = Mixer()
    run = through_file(export_prefill(mixer))
    x = torch.randn(3, 80, 32)
    for module in (run, mixer):
        module(x).square().sum().backward()
    got = dict(run.named_parameters())
    for name, p in mixer.named_parameters():
        torch.testing.assert_close(got[name].grad, p.grad, rtol=0, atol=0)


class States(torch.nn.Module):
    """The final states of packed sequences, which a second call goes on from."""

    def __init__(self, operator, calls):
        super().__init__()
        self.operator, self.calls = operator, calls

    def forward(self, q, offsets):
        state = None
        for _ in range(self.calls):
            o, state = self.operator(
                q, q, q, None, None, None, None, state, offsets, output_final_state=True
            )
        return o, state.transpose(1, 2).contiguous(), (state * 2).sum()


PACKINGS = ([0], [0, 70], [0, 10, 60], [0, 0, 1, 64, 65, 65])
ANY_PACKING = ({1: Dim("T", max=4096)}, {0: Dim("offsets", min=1)})


@pytest.mark.bits
@pytest.mark.parametrize("strict", (False, True))
@pytest.mark.parametrize("count", (1, 2))
@pytest.mark.parametrize("name", ("chunk_kda", "recurrent_kda", "chunk_gdn", "recurrent_gdn"))
def test_one_program_serves_any_number_of_packed_sequences(name, count, strict):
    module, q = States(getattr(kda_ops, name), count), torch.randn(1, 70, 2, 8) / 8
    example = q, torch.tensor([0, 30, 70])
    run = through_file(
        torch.export.export(module, example, dynamic_shapes=ANY_PACKING, strict=strict)
    )
    for offsets in map(torch.tensor, PACKINGS):
        torch.testing.assert_close(run(q, offsets), module(q, offsets), rtol=0, atol=0)
    with pytest.raises(ValueError, match="^cu_seqlens must start at 0"):
        run(q, torch.tensor([0, 71]))


class Tails(torch.nn.Module):
    """The final tails of packed sequences, which a second call goes on from."""

    def __init__(self, calls):
        super().__init__()
        self.calls = calls

    def forward(self, x, weight, offsets):
        tail = None
        for _ in range(self.calls):
            x, tail = kda_ops.short_conv(
                x, weight, None, tail, offsets, activation="silu", output_final_tail=True
            )
        return x, tail.transpose(1, 2).contiguous(), (tail * 2).sum()


@pytest.mark.parametrize("strict", (False, True))
@pytest.mark.parametrize("count", (1, 2))
def test_one_program_serves_any_number_of_packed_tails(count, strict):
    module, x, weight = Tails(count), torch.randn(1, 70, 8), torch.randn(8, 4)
    example = x, weight, torch.tensor([0, 30, 70])
    shapes = (ANY_PACKING[0], None, ANY_PACKING[1])
    run = through_file(torch.export.export(module, example, dynamic_shapes=shapes, strict=strict))
    for offsets in map(torch.tensor, PACKINGS):
        got, want = run(x, weight, offsets), module(x, weight, offsets)
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    with pytest.raises(ValueError, match="^cu_seqlens must start at 0"):
        run(x, weight, torch.tensor([0, 71]))


class Continued(torch.nn.Module):
    """Packed sequences that start from given states."""

    def __init__(self, variant):
        super().__init__()
        self.operator, self.width = getattr(kda_ops, f"chunk_{variant}"), variant == "kda"

    def forward(self, q, state, offsets):
        g, beta = -q.abs() if self.width else -q[..., 0].abs(), q[..., 0].sigmoid()
        x = q, q, q, g, beta, None, None, state, offsets
        return self.operator(*x, output_final_state=True)


@pytest.mark.bits
@pytest.mark.parametrize("strict", (False, True))
@pytest.mark.parametrize("example", ([0, 30, 70], [0, 70]))
def test_one_program_serves_any_number_of_states(variant, example, strict):
    module = Continued(variant)
    q, N = torch.randn(1, 70, 2, 8) / 8, Dim("sequences", min=0, max=64)
    shapes = (ANY_PACKING[0], {0: N}, {0: N + 1})
    # as docs/compile.md says: torch makes a constant of an example's size of 1
    with torch.fx.experimental._config.patch(backed_size_oblivious=len(example) == 2):
        state = torch.randn(len(example) - 1, 2, 8, 8)
        program = torch.export.export(
            module, (q, state, torch.tensor(example)), dynamic_shapes=shapes, strict=strict
        )
    run = through_file(program)
    for offsets in map(torch.tensor, PACKINGS):
        state = torch.randn(len(offsets) - 1, 2, 8, 8)
        got, want = run(q, state, offsets), module(q, state, offsets)
        torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.bits
@pytest.mark.parametrize("layer", (KimiDeltaAttention, GatedDeltaNet))
@torch.no_grad()
def test_a_layer_exports_for_any_number_of_packed_sequences(layer):
    module = layer(32, head_dim=16, num_heads=2)
    x = torch.randn(1, 70, 32)
    program = torch.export.export(
        module,
        (x,),
        {"cu_seqlens": torch.tensor([0, 30, 70])},
        dynamic_shapes={"x": ANY_PACKING[0], "cu_seqlens": ANY_PACKING[1]},
    )
    run = through_file(program)
    for offsets in map(torch.tensor, PACKINGS):
        got, want = run(x, cu_seqlens=offsets), module(x, cu_seqlens=offsets)
        torch.testing.assert_close(got, want, rtol=0, atol=0)


@torch.no_grad()
def test_a_package_runs_in_a_process_that_imports_kda_ops(tmp_path):
    decoder = Decoder()
    decoder.states.normal_()
    path = package(export_decode(decoder), tmp_path / "decode.pt2")
    x, slots = torch.randn(3, 1, 32), torch.tensor([5, 0, 2])
    torch.testing.assert_close(
        run_elsewhere(path, x, slots), decoder(x, slots), rtol=1e-5, atol=1e-6
    )


class Engine(torch.nn.Module):
    """A prefill as an engine calls it."""

    def forward(self, q, k, v, state, slots, offsets, resumed, out):
        """Return o, which lies in `out`."""
        return kda_ops.chunk_kda_(
            *(q, k, v, None, None, state, slots),
            cu_seqlens=offsets,
            has_initial_state=resumed,
            null_slot=0,
            out=out,
        )


@pytest.mark.bits
@torch.no_grad()
def test_a_program_takes_the_options_of_engines():
    def call(offsets, slots, resumed):
        q, k, v = (torch.randn(1, offsets[-1] + 2, 2, 16) for _ in range(3))
        x = q, k, v, torch.randn(5, 2, 16, 16), torch.tensor(slots), torch.tensor(offsets)
        return *x, torch.tensor(resumed), torch.empty_like(v)

    tokens, N = Dim("tokens"), Dim("sequences", min=2)
    shapes = {n: {1: tokens} for n in ("q", "k", "v", "out")}
    shapes |= {"state": None, "slots": {0: N}, "offsets": {0: N + 1}, "resumed": {0: N}}
    example = call([0, 3, 70], [3, 0], [True, False])
    program = torch.export.export(Engine(), example, dynamic_shapes=shapes)
    assert calls(program) == ["kda.chunk_.out"]
    run = through_file(program)
    for given in (([0, 3, 70], [3, 0], [True, False]), ([0, 9, 9, 10], [4, 1, 0], [False] * 3)):
        x = call(*given)
        y = [t.clone() for t in x]
        o, want = run(*x), Engine()(*y)
        torch.testing.assert_close(o, want, rtol=0, atol=0)
        for a, b in zip(x, y):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
        assert not o[0, given[0][-1] :].any()
