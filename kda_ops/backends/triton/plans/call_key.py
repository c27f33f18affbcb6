"""Reduce a call to what plans need of it: a key, its tensors, and its numbers.

The numbers are the lengths of axes that vary from call to call (`operators.VARYING`), and the
strides of tensors that are not contiguous. The key holds all else that decides which kernels run:
the pass and its flags, and of each tensor the lengths of its other axes, dtype, device and
alignment, and whether it is absent or contiguous. A plan is stored under the key. It serves all
numbers for which its guards hold (`plan.Plan`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from torch import Tensor

from kda_ops.backends.triton import tuning
from kda_ops.backends.triton.device.tile import spans
from kda_ops.checks import check_no_overlap
from kda_ops.operators import VARYING, Operator
from kda_ops.stages import KEPT, Pass

MADE = frozenset((*KEPT, "AP", "runs", "starts"))  # names of tensors that other operators make


class CallKey(NamedTuple):
    """A call as plans see it: the key of its plans, its tensors in order, and its numbers."""

    key: tuple
    tensors: tuple[Tensor | None, ...]
    pointers: list[int]
    numbers: tuple[int, ...]


def call_key(kind: type[Pass], rank: int, args: tuple, flags: dict[str, Any]) -> CallKey | None:
    """Return a call as key, tensors and numbers; None without tokens, or if shapes do not fit."""
    operator = kind.operator
    lengths, dense = reader(operator)
    found = lengths(*args)
    if found is None:
        return None
    numbers, static, args = found
    key: list[Any] = [kind, rank, static, *flags.items(), tuning.FORCED]
    pointers = []
    for i, x in enumerate(args):
        if x is None:
            key.append(None)
            pointers.append(0)
            continue
        if not x.is_contiguous():
            name = operator.names[i]
            written = name in operator.writes
            if written:  # it is written in place: writes to a copy would be lost
                check_no_overlap(name, x)
            if name in dense or not (written or spans(x)):
                x = x.contiguous()
                args = (*args[:i], x, *args[i + 1 :])
            else:
                key.append("strided")
                numbers += x.stride()
        pointer = x.data_ptr()
        pointers.append(pointer)
        key += x.dtype, x.get_device(), pointer & 15
    return CallKey(tuple(key), args, pointers, numbers)


def exact(kind: type[Pass], rank: int, args: tuple, flags: dict) -> tuple[tuple, tuple, list]:
    """Return a key of all that `call_key` reads, the tensors in order, and their pointers.

    The key contains B, T and N, so it serves one size. It costs less Python than `call_key`, for
    decode, which meets the same few sizes thousands of times.
    """
    args += (None,) * (len(kind.operator.names) - len(args))
    key: list[Any] = [kind, rank, *flags.items()]
    pointers = []
    for x in args:
        if x is None:
            key.append(None)
            pointers.append(0)
        else:
            pointer = x.data_ptr()
            pointers.append(pointer)
            strides = x.is_contiguous() or x.stride()
            key += x.shape, strides, x.dtype, x.get_device(), pointer & 15
    return tuple(key), args, pointers


def varying(operator: Operator) -> list[str]:
    """Return the letters of axes that vary, of those that the arguments have; N comes with M."""
    used = "".join(operator.axes_of(name) for name in operator.names).replace("M", "MN")
    return [letter for letter in VARYING if letter in used]


def named(kind: type[Pass], seen: CallKey) -> dict[str, int]:
    """Return the numbers of a call by name."""
    names = varying(kind.operator)
    for name, x in zip(kind.operator.names, seen.tensors):
        if x is not None and not x.is_contiguous():
            names += (f"{name}_{i}" for i in range(x.dim()))
    return dict(zip(names, seen.numbers))


class Reader(NamedTuple):
    """What `call_key` asks of an operator's record.

    `lengths` returns the lengths that vary, by letter, then the others, then the tensors without
    placeholders. It returns None if there is nothing to compute, if a letter has two lengths, or if
    a tensor has other axes than its record says. Kernels read `dense` tensors as contiguous ones.
    """

    lengths: Callable[..., tuple[tuple, tuple, tuple] | None]
    dense: frozenset[str]


@cache
def reader(operator: Operator) -> Reader:
    """Read a record: compile `source`, and find what is dense.

    That is what may have a single axis, and what another operator has made. `vmap` and hooks of
    saved tensors may have given that other strides.
    """
    made: dict[str, Any] = {}
    exec(source(operator), made)
    sure = {n: len(operator.axes_of(n)) - operator.may_lack_last(n) for n in operator.names}
    return Reader(made["lengths"], frozenset(n for n, a in sure.items() if a == 1 or n in MADE))


def source(operator: Operator) -> str:
    """Write the code of `Reader.lengths`, because a loop over tensors and axes takes longer."""
    lead, letters = operator.lead, varying(operator)
    rest = [n for n in operator.names if n not in (lead, "cu_seqlens")]
    code = [f"if {lead} is None:", "    return None", *_read(operator, lead), "N = B"]
    code += [f"{letter} = 0" for letter in letters if letter not in "BTN"]
    packed = "cu_seqlens" in operator.names
    if packed:
        code += ["if cu_seqlens is not None:", "    M, = cu_seqlens.shape", "    N = M - 1"]
        code += ["    if B != 1:", "        return None"]
    for name in rest:
        if name in operator.placeholders:
            code += [f"if {name} is not None and {name}.dim() == 1:", f"    {name} = None"]
        code += [f"if {name} is not None:", *_indent(_read(operator, name))]
        if keyed := _keyed(operator, name):
            code += ["else:", f"    {' = '.join(keyed)} = None"]
    wrong = ["not B", "not T", "N < 1"]
    if "L" in letters:  # without a table, sequence n has slot n
        table = f"{operator.mutates}_indices"
        wrong += [f"{table} is None and L != N" if table in rest else "L != N"]
    if "S" in letters:  # one slot for each token, but the lengths of packed ones are on the device
        wrong += ["S and T > S" + " and cu_seqlens is None" * packed]
    code += [f"if {' or '.join(wrong)}:", "    return None"]
    static = [x for name in (lead, *rest) for x in _keyed(operator, name)]
    parts = (f"({', '.join(part)},)" for part in (letters, static, operator.names))
    code += [f"return {', '.join(parts)}"]
    return "\n".join(
        [
            *(f"def lengths({', '.join(f'{x}=None' for x in operator.names)}):", "    try:"),
            *_indent(_indent(code)),
            *("    except ValueError:  # more or fewer axes", "        return None"),
        ]
    )


def _keyed(operator: Operator, name: str) -> list[str]:
    """Return the variables of a tensor that are part of the key: all lengths but the numbers."""
    axes = operator.axes_of(name)
    lengths = [f"{name}_{i}" for i, letter in enumerate(axes) if letter not in VARYING]
    return lengths + [f"{name}_axes"] * operator.may_lack_last(name)


def _read(operator: Operator, name: str) -> list[str]:
    """Write code that reads the lengths of a tensor, and compares the numbers with those known."""
    axes = operator.axes_of(name)
    whole = _compare(operator, name, axes)
    if not operator.may_lack_last(name):
        return whole
    less = [*_compare(operator, name, axes[:-1]), f"{name}_{len(axes) - 1} = None"]
    return [
        *(f"{name}_axes = {name}.dim()", f"if {name}_axes == {len(axes)}:", *_indent(whole)),
        *("else:", *_indent(less)),
    ]


def _indent(code: list[str]) -> list[str]:
    return ["    " + line for line in code]


def _compare(operator: Operator, name: str, axes: str) -> list[str]:
    found, wrong, code = [], [], []
    for i, letter in enumerate(axes):
        length = f"{name}_{i}"
        if name == operator.lead and letter in VARYING:
            length = letter
        elif letter in "BTN":
            wrong += [f"{length} != {letter}"]
        elif letter in VARYING:  # the first tensor that has it decides
            wrong += [f"not {length}", f"{letter} and {letter} != {length}"]
            code += [f"{letter} = {length}"]
        found.append(length)
    if wrong:
        code = [f"if {' or '.join(wrong)}:", "    return None", *code]
    return [f"{', '.join(found)}, = {name}.shape", *code]
