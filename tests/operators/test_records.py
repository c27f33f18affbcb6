"""Each operator has one record, and a record that lacks something is an error that names it."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from kda_ops import operators
from kda_ops.registrations import schemas
from tests.support.calls import overload

RECORDS = (*operators.ATTENTION, *operators.LAYER)

AXES = operators.CHUNK.axes
# what is changed in the record of `chunk` (a text is its schema), and the words of the error
INCOMPLETE = (
    (
        "(Tensor q, Tensor v, Tensor? mask=None, *, int n=1) -> Tensor o",
        "the tensor mask has no axes",
    ),
    ("(Tensor q, Tensor v) -> (Tensor o, Tensor scores)", "the tensor scores has no axes"),
    (dict(schema="(Tensor q, Tensor v) -> Tensor", result="out"), "the tensor out has no axes"),
    (dict(axes=AXES | {"beta": "BTZ"}), "axis 'Z' of beta is unknown"),
    (dict(folds="Z"), "axis 'Z' of folds or splits is unknown"),
    (dict(splits=("Hh", "Z")), "axis 'Z' of folds or splits is unknown"),
    (dict(axes=AXES | {"beta": "BhT"}), "the axes 'BhT' of beta"),
    ("(Tensor q, Tensor(a!), Tensor v) -> Tensor o", r"'Tensor\(a!\)' of its schema"),
    ("(Tensor(a!) q, Tensor(b!) v) -> Tensor o", ".* q and v"),
    ("(Tensor q, float scale, Tensor v) -> Tensor o", "'float scale' of its schema"),
    ("(Tensor q, Tensor[] more) -> Tensor o", r"'Tensor\[\] more' of its schema"),
    ("(Tensor q, *, Tensor? out=None) -> Tensor o", "tensors must come before the flags"),
    (
        "(Tensor q, Tensor v) -> (Tensor dv, Tensor dq)",
        "its results must be gradients in the order of their arguments",
    ),
    (dict(placeholders=("dfinal_state",)), "the schema has no argument dfinal_state"),
)


@pytest.mark.quick
@pytest.mark.parametrize("change, words", INCOMPLETE)
def test_an_incomplete_record_is_an_error_that_names_operator_and_tensor(change, words):
    change = change if isinstance(change, dict) else dict(schema=change)
    with pytest.raises(ValueError, match=f"chunk: {words}"):
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
