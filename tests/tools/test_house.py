"""The checkout keeps its limits: length of lines, size of kernels, content of the wheel, folders
of tests.
"""

import pytest

from tests.tools import house


@pytest.mark.quick
def test_no_line_is_longer_than_100_columns():
    columns, where = house.longest_line()
    assert columns <= 100, where


@pytest.mark.quick
def test_tests_lie_in_folders_by_subject():
    assert house.top_level_tests() == {"__init__.py", "conftest.py", "README.md"}


def test_the_wheel_holds_the_package_and_nothing_else():
    pytest.importorskip("setuptools", minversion="77", reason="builds a wheel")
    parts = [name.split("/") for name in house.wheel()]
    assert {p[0].split("-")[0] for p in parts} == {"kda_ops"}
    assert not [p for p in parts if {"tests", "benchmarks", "examples"} & set(p)]
    assert ["kda_ops", "py.typed"] in parts
    assert ["kda_ops", "registrations", "schemas.py"] in parts
    tools = {p[2] for p in parts if p[:2] == ["kda_ops", "tools"]}
    assert tools == {"__init__.py", "machine.py", "timer.py", "tune.py"}  # of `doctor` and `tune`


@pytest.mark.quick
def test_kernels_are_small_enough_to_read():
    functions = house.kernel_functions()
    assert {"prepare_kda", "scan_gdn", "recur"} <= {f.name for f in functions if f.kernel}
    wide = {f.name for f in functions if f.kernel and f.arguments > 16}
    long = {f.name for f in functions if f.lines > (120 if f.kernel else 60)}
    assert not wide | long


@pytest.mark.quick
def test_numbers_in_kernels_have_names():
    counts = house.kernel_literals()
    assert sum(counts.values()) <= 140
