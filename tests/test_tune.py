"""Tuning survives candidates that end their process, and prefers the table where nothing is clearly faster."""

import subprocess
import sys

import pytest

from kda_ops.bench import tune

CALL = dict(op="gdn", K=128, V=128, dtype="bf16", gate="softplus", B=1, T=64, H=1)


def stand_in(times: str) -> str:
    """A process that tries five candidates: a number is a time, None a wrong result, "end" what ends the process."""
    return f"""
import json, os, sys
work = json.loads(sys.argv[-1])
for place, ms in enumerate({times}):
    if place in work["skip"]:
        continue
    print(json.dumps(dict(place=place, name=work["kernel"], options=dict(warps=place))), flush=True)
    if ms == "end":
        print("illegal memory access", file=sys.stderr)
        os._exit(1)
    print(json.dumps(dict(place=place, ms=ms, why="wrong results")), flush=True)
"""


@pytest.fixture
def candidates(monkeypatch):
    start = subprocess.Popen

    def install(times):
        monkeypatch.setattr(tune.subprocess, "Popen", lambda command, **words: start([sys.executable, "-c", stand_in(times), command[-1]], **words))

    return install


def test_a_candidate_that_ends_its_process_costs_itself_alone(candidates):
    candidates("[2.0, 'end', None, 'end', 1.0]")
    lines = []
    assert tune.tune(**CALL, echo=lines.append) == {"prepare_gdn": {"warps": 4}, "scan_rows": {"warps": 4}}
    assert sum("illegal memory access" in line for line in lines) == 4 and sum("wrong results" in line for line in lines) == 2


def test_the_table_stays_unless_it_is_wrong_or_clearly_slower(candidates):
    for times, found in (("[1.0, 0.99]", {}), ("[1.0, None, 'end']", {}), ("[None, 'end']", {}), ("['end', 9.0]", {"warps": 1})):
        candidates(times)
        assert tune.tune(**CALL, echo=lambda line: None) == ({"prepare_gdn": found, "scan_rows": found} if found else {})


def test_a_process_that_tries_nothing_is_an_error(candidates):
    candidates("[].fail")
    with pytest.raises(RuntimeError, match="prepare_gdn cannot be measured: AttributeError"):
        tune.tune(**CALL, echo=lambda line: None)
