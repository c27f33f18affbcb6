"""Every option of the table changes how its kernel is launched, and no other kernel."""

import importlib
from dataclasses import fields, replace

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.calls import Call, LayerCall
from kda_ops.backends.triton import BACKEND, tuning

STAGES = ("prepare", "scan", "reverse_scan", "runs", "gradient")
STAGES += ("step", "gate", "gated_norm", "short_conv")


class Recurrent(Call):
    """The recurrence over any number of tokens, without a pool."""

    def problem(self):
        p = super().problem()
        p.transposed = self.transposed
        return p

    def _launch(self, p):
        BACKEND.step(p, p.new_output(), p.new_final_state())


CALLS = {
    "prepare_kda": Call(),
    "prepare_gdn": Call(rank=0),
    "scan_kda": Call(),
    "scan_gdn": Call(rank=0),
    "scan_kda_overlapped": Call(ahead=1),
    "scan_gdn_overlapped": Call(rank=0, ahead=1),
    "reverse_scan_kda": Call(keep=True),
    "reverse_scan_gdn": Call(rank=0, keep=True),
    "scan_kda_maps": Call(run=16),
    "scan_gdn_maps": Call(rank=0, run=16),
    "reverse_scan_kda_maps": Call(keep=True, run=16),
    "reverse_scan_gdn_maps": Call(rank=0, keep=True, run=16),
    "gradient_gdn": Call(rank=0, keep=True),
    "gradient_pairs": Call(keep=True),
    "gradient_keys": Call(keep=True),
    "gradient_small": Call(gate="promised", keep=True),
    "gather_heads": Call(keep=True),
    "join_runs": Call(run=16),
    "recur": Recurrent(transposed=True),
    "recur_rows": Recurrent(),
    "recur_one": Call(pool=torch.float32, transposed=True),
    "recur_one_rows": Call(pool=torch.float32),
    "gate_forward": Call(gates=True),
    "gate_gradient": Call(gates=True),
    "normalise": LayerCall("norm"),
    "normalise_gradient": LayerCall("norm"),
    "convolve": LayerCall("conv", packed=True),
    "convolve_one": LayerCall("conv", pool=True),
    "write_tails": LayerCall("conv", packed=True),
    "convolve_gradient": LayerCall("conv"),
    "tail_gradient": LayerCall("conv", packed=True),
}


def table(kernel, dtype=torch.bfloat16):
    """Return the options of the table for the call of a kernel."""
    call = CALLS[kernel]
    if isinstance(call, LayerCall) or call.pool or isinstance(call, Recurrent):
        state = torch.float32 if kernel.startswith("recur") else dtype
        return tuning.table(kernel, tuning.Widths(state, torch.device("meta"), 128, 128))
    with tuning.force(run=call.run, processors=0):
        return tuning.table(kernel, replace(call, dtype=dtype).problem())


def launches(kernel, options, monkeypatch):
    """Return the launches of a call by kernel: programs, numbers, flags and Triton's options."""
    found: dict[str, list] = {}

    def note(kernel, programs, device, *args, **given):
        plain = {n: x for n, x in given.items() if isinstance(x, (int, float, str, type(None)))}
        found.setdefault(kernel.fn.__name__, []).append((programs, plain))

    for stage in STAGES:
        module = importlib.import_module(f"kda_ops.backends.triton.stages.{stage}")
        monkeypatch.setattr(module, "launch", note)
    with tuning.force(options=options):
        CALLS[kernel].compile()
    return found


@pytest.mark.quick
@pytest.mark.parametrize("kernel, option", [
    (kernel, f.name) for kernel, kind in tuning.KERNELS.items() for f in fields(kind)
])  # fmt: skip
def test_every_option_acts(kernel, option, monkeypatch):
    base = table(kernel)
    before = launches(kernel, {kernel: base}, monkeypatch)
    value = getattr(base, option) or 64
    # more channels would not fit the registers of `convolve_gradient`
    other = replace(base, **{option: value // 2 if option == "channels" else 2 * value})
    after = launches(kernel, {kernel: other}, monkeypatch)
    name = tuning.kernel_of(kernel).fn.__name__
    assert before.keys() == after.keys() and before[name] != after[name]
    assert not {n for n in before if before[n] != after[n]} - {name}


@pytest.mark.quick
def test_a_kernel_has_calls_and_rows_and_no_option_of_another():
    assert CALLS.keys() == tuning.KERNELS.keys()
    for kernel, kind in tuning.KERNELS.items():
        for dtype in (torch.float32, torch.bfloat16):
            assert type(table(kernel, dtype)) is kind, kernel


@pytest.mark.quick
def test_rules_return_after_force_even_if_it_raises():
    before = tuning.FORCED
    with pytest.raises(RuntimeError), tuning.force(processors=5):
        with tuning.force(run=3):
            assert tuning.processors(torch.device("meta")) == 5 and tuning.FORCED.run == 3
        assert tuning.FORCED.run is None
        raise RuntimeError
    assert tuning.FORCED is before
