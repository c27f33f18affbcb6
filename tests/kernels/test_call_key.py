"""A plan is looked up by the length of every axis of every tensor, as the records name them."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from kda_ops import operators
from kda_ops.backends.triton.backend import _shape
from kda_ops.backends.triton.plans.call_key import call_key, named, reader
from kda_ops.backends.triton.plans.recording import Recording
from kda_ops.backends.triton.plans.sizes import Size, value_of

RECORDS = (*operators.ATTENTION, *operators.LAYER)
# a length of its own for each letter, but for B and N, which agree unless a call is packed
PLAIN = dict(B=2, T=5, N=2, S=7, J=3, L=2, c=8)
PLAIN |= {letter: 11 + i for i, letter in enumerate(operators.FIXED)}
SLOTS = PLAIN | {"L": 9}  # a pool with a table of slots
PACKED = SLOTS | {"B": 1, "M": 3}


def tensors(record, sizes):
    """Make the tensors of a call; those without a letter in `sizes` are absent."""
    axes = {name: record.axes_of(name) for name in record.names}
    table = f"{record.mutates}_indices"
    absent = {table, "num_accepted_tokens"} if sizes["L"] == sizes["N"] else set()
    return {
        name: torch.zeros([sizes[x] for x in letters])
        if name not in absent and {*letters} <= {*sizes}
        else None
        for name, letters in axes.items()
    }


def key_of(record, given):
    return call_key(record.kind, 1, tuple(given.values()), {})


CALLS = [
    pytest.param(record, sizes, id=f"{record.name}-{name}")
    for record in RECORDS
    for name, sizes in (("plain", PLAIN), ("slots", SLOTS), ("packed", PACKED))
    if name == "plain"
    or (name == "packed" and "cu_seqlens" in record.names)
    or (name == "slots" and record.mutates)
]


def resized(given, name, axis, length):
    """Return the tensors with another length of one axis."""
    shape = list(given[name].shape)
    shape[axis] = length
    return given | {name: torch.zeros(shape)}


@pytest.mark.quick
@pytest.mark.parametrize("record, sizes", CALLS)
def test_a_recording_sees_each_length_that_varies_as_a_size(record, sizes):
    given = tensors(record, sizes)
    kept = Recording(named(record.kind, key_of(record, given)))
    for name, x in given.items():
        shape, _ = _shape(record, name, x, kept)
        for letter, length in zip(record.axes_of(name), shape):
            varies = letter in operators.VARYING
            assert isinstance(length, Size) == varies and value_of(length) == sizes[letter]
            assert not varies or length.text == letter


@pytest.mark.quick
@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.name)
def test_an_axis_more_or_less_has_no_plan_unless_the_record_allows_it(record):
    given = tensors(record, SLOTS if record.mutates else PLAIN)
    for name, x in given.items():
        if x is None:
            continue
        assert key_of(record, given | {name: x[None]}) is None, name
        less = given | {name: x[..., 0].clone()}
        if name in record.placeholders and less[name].dim() == 1:
            continue  # stands for an absent one
        assert (key_of(record, less) is not None) == record.may_lack_last(name), name


@pytest.mark.quick
def test_a_new_argument_is_in_the_key_as_soon_as_its_record_is_complete():
    """Nothing else has to name it: the fault was a [4] that shared the plan of a [1]."""
    schema = operators.CHUNK.schema.replace("cu_seqlens=None", "cu_seqlens=None, Tensor? mask=None")
    with pytest.raises(ValueError, match="chunk: the tensor mask has no axes"):
        replace(operators.CHUNK, schema=schema)
    for axes in ("h", "D", "c", "J", "h(K)", "N(S)"):
        record = replace(operators.CHUNK, schema=schema, axes=operators.CHUNK.axes | {"mask": axes})
        given, lengths = tensors(operators.CHUNK, PACKED | {"N": 4, "M": 5}), reader(record).lengths
        four, one = (lengths(**given, mask=torch.zeros(n)) for n in (4, 1))
        assert four is not None
        assert one is None if axes[0] == "N" else one[:2] != four[:2], axes
