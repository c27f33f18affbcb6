"""Each operator has one record, and a record that lacks something is an error that names it."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from kda_ops import operators
from kda_ops.registrations import schemas
from tests.support.calls import overload

RECORDS = (*operators.ATTENTION, *operators.LAYER)

INCOMPLETE = {
    "an argument without axes": (
        dict(schema="(Tensor q, Tensor v, Tensor? mask=None, *, int n=1) -> Tensor o"),
        "chunk: the tensor mask has no axes",
    ),
    "a result without axes": (
        dict(schema="(Tensor q, Tensor v) -> (Tensor o, Tensor scores)"),
        "chunk: the tensor scores has no axes",
    ),
    "a result without a name that has axes": (
        dict(schema="(Tensor q, Tensor v) -> Tensor", result="out"),
        "chunk: the tensor out has no axes",
    ),
    "an unknown axis": (
        dict(axes=operators.CHUNK.axes | {"beta": "BTZ"}),
        "chunk: axis 'Z' of beta is unknown",
    ),
    "an unknown axis to fold": (dict(folds="Z"), "chunk: axis 'Z' of folds or splits is unknown"),
    "an unknown axis to split": (
        dict(splits=("Hh", "Z")),
        "chunk: axis 'Z' of folds or splits is unknown",
    ),
    "a length that varies behind one that does not": (
        dict(axes=operators.CHUNK.axes | {"beta": "BhT"}),
        "chunk: the axes 'BhT' of beta",
    ),
    "a written argument without a name": (
        dict(schema="(Tensor q, Tensor(a!), Tensor v) -> Tensor o"),
        r"chunk: 'Tensor\(a!\)' of its schema",
    ),
    "two written arguments": (
        dict(schema="(Tensor(a!) q, Tensor(b!) v) -> Tensor o"),
        "chunk: .* q and v",
    ),
    "a flag among the tensors": (
        dict(schema="(Tensor q, float scale, Tensor v) -> Tensor o"),
        "chunk: 'float scale' of its schema",
    ),
    "a list of tensors": (
        dict(schema="(Tensor q, Tensor[] more) -> Tensor o"),
        r"chunk: 'Tensor\[\] more' of its schema",
    ),
    "a tensor among the flags": (
        dict(schema="(Tensor q, *, Tensor? out=None) -> Tensor o"),
        "chunk: tensors must come before the flags",
    ),
    "gradients in another order": (
        dict(schema="(Tensor q, Tensor v) -> (Tensor dv, Tensor dq)"),
        "chunk: its results must be gradients in the order of their arguments",
    ),
    "a placeholder that is no argument": (
        dict(placeholders=("dfinal_state",)),
        "chunk: the schema has no argument dfinal_state",
    ),
}


@pytest.mark.quick
@pytest.mark.parametrize("change, words", INCOMPLETE.values(), ids=INCOMPLETE)
def test_an_incomplete_record_is_an_error_that_names_operator_and_tensor(change, words):
    with pytest.raises(ValueError, match=words):
        replace(operators.CHUNK, **change)


@pytest.mark.quick
@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.name)
def test_a_record_in_no_table_is_an_error_at_import(record):
    """Without a table nothing would register the operator."""
    source = Path(operators.__file__).read_text()
    code = re.sub(
        rf"^((?:ATTENTION|LAYER) = [^=]*)\b{record.name.upper()}\b,? ?", r"\1", source, flags=re.M
    )
    assert code != source
    with pytest.raises(ValueError, match=f"^Operator {record.name}: it is in no table"):
        exec(compile(code, operators.__file__, "exec"), {"__name__": operators.__name__})


@pytest.mark.quick
@pytest.mark.parametrize("variant", schemas.VARIANTS)
def test_a_record_reads_its_schema_as_pytorch_does(variant):
    for record in schemas.operators(variant):
        schema = overload(variant, record.name)._schema
        given = [x for x in schema.arguments if not x.kwarg_only or "Tensor" in str(x.type)]
        assert record.names == tuple(x.name for x in given)
        written = [x.name for x in given if x.alias_info is not None and x.alias_info.is_write]
        assert record.writes == tuple(written)
        assert record.takes_out == (written[1:] == ["out"]) == (not schema.returns)
        assert record.mutates == "".join(written[:1])
        assert record.results == tuple(x.name or record.result for x in schema.returns)


@pytest.mark.quick
def test_each_record_has_a_pass_of_its_own():
    assert [record.kind.operator for record in RECORDS] == [*RECORDS]
