"""The doctor reports versions, backends, and the known defects that affect this machine."""

import json
import subprocess

import pytest
import torch

import kda_ops
from benchmarks import budgets
from benchmarks.records import checkout, results
from kda_ops import doctor
from kda_ops.__main__ import COMMANDS, main
from tests.support.fresh import python

DOCTOR = "from kda_ops.__main__ import main; raise SystemExit(main(['doctor']))"


@pytest.mark.quick
def test_the_report_names_versions_backends_and_compilers(capsys):
    assert doctor.main([]) == 0
    out = capsys.readouterr().out
    for words in (
        "kda_ops 0.",
        "torch 2.",
        "CPU tensors: native",
        "KDA_OPS_CHECK",
        "C++:",
        "kda: chunk against recurrence",
        "gdn: chunk against recurrence",
    ):
        assert words in out
    assert "PROBLEM" not in out


@pytest.mark.quick
@pytest.mark.parametrize(
    "triton, how",
    (
        ("3.6.0", "timed ("),
        ("3.8.0+git1", "timed ("),
        ("3.9.0", "timed ("),
        ("3.10.0", "not tried ("),
    ),
)
def test_the_doctor_says_what_was_measured_with_a_triton(triton, how):
    said = doctor.measured(triton)
    assert said.startswith(how) and "timed: 3.6.0, 3.7.1, 3.8.0, 3.9.0;" in said


def test_every_triton_of_the_evidence_counts_as_timed():
    rows = json.loads((results() / "evidence.json").read_text())["rows"]
    assert {doctor.parse_version(r["triton"]) for r in rows} <= {*doctor.TIMED}


@pytest.mark.quick
def test_every_triton_that_is_compiled_has_budgets_and_a_part_of_the_nightly_run():
    listed = subprocess.run([checkout() / ".ci/nightly", "--list"], capture_output=True, text=True)
    versions = [".".join(map(str, v)) for v in doctor.COMPILED]
    assert [f"triton-{v}" for v in versions] == [
        part for part in listed.stdout.split() if part.startswith("triton-")
    ]
    assert tuple(v[:2] for v in doctor.COMPILED) == budgets.TRITONS
    each_change = (checkout() / ".ci/run").read_text()
    assert f"for version in {versions[-1]} {versions[0]}; do" in each_change


def test_the_doctor_reads_the_version_of_triton_without_importing_it():
    python("""
        import sys
        from kda_ops import doctor
        doctor.report()
        assert "triton" not in sys.modules
    """)


def test_the_report_says_who_chose_the_backend():
    out = python(DOCTOR, KDA_OPS_CPU="reference").stdout
    assert "CPU tensors: reference (chosen by KDA_OPS_CPU)" in out


def test_a_failing_section_becomes_a_problem_line():
    done = python(DOCTOR, check=False, KDA_OPS_CPU="triton", TRITON_INTERPRET="0")
    assert done.returncode == 1
    assert "PROBLEM: KDA_OPS_CPU=triton needs TRITON_INTERPRET=1" in done.stdout
    assert "Self-test\n  PROBLEM: " in done.stdout and "Traceback" not in done.stderr


@pytest.mark.quick
@pytest.mark.parametrize(
    "triton, archs, words",
    [
        ("3.6.0", [9], ["then transposed", "64 x 64 backward", "numpy"]),
        ("3.7.0+git1", [9], ["then transposed", "64 x 64 backward"]),
        ("3.7.1", [9], ["64 x 64 backward"]),
        ("3.7.1", [8], ["interpreter"]),
        ("3.7.1", [10], ["interpreter"]),
        ("3.8.0", [9], ["interpreter"]),
        ("3.9.0", [9], ["block pointers", "merge two sums"]),
        ("3.9.0", [10], ["block pointers"]),
        ("3.10.0", [10], ["block pointers", "fma"]),
    ],
)
def test_hazards_follow_the_version_and_the_architecture(triton, archs, words):
    lines = list(doctor.hazards(triton, archs))
    assert all(any(w in line for line in lines) for w in words)
    assert len(lines) == len({*words, "interpreter"})


def test_without_a_gpu_every_architecture_counts():
    assert len(list(doctor.hazards("3.7.0", []))) == len(list(doctor.hazards("3.7.0", [8, 9, 10])))


def test_a_missing_compiler_is_reported(monkeypatch):
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    assert any("aot_eager" in line for line in doctor.compilers())


class Broken(torch.autograd.Function):
    """The identity, with a gradient of NaN."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dx):
        return dx * torch.nan


@pytest.mark.parametrize("wrong", (Broken.apply, lambda o: 1.0001 * o), ids=("gradient", "numbers"))
def test_a_wrong_output_or_gradient_is_a_problem(wrong, monkeypatch):
    right = kda_ops.chunk_kda
    monkeypatch.setattr(
        doctor.kda_ops, "chunk_kda", lambda *x, **flags: (wrong(right(*x, **flags)[0]), None)
    )
    assert ["PROBLEM" in line for line in doctor.self_test()] == [True, False]


def test_a_missing_triton_is_named(monkeypatch):
    monkeypatch.setattr(doctor, "installed", lambda name: None)
    assert any("CUDA tensors: none, triton is not installed" in line for line in doctor.backends())


def test_without_a_command_the_commands_are_listed(capsys):
    assert main([]) == 2
    said = capsys.readouterr().err
    assert all(f"  {name} " in said for name in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    assert stopped.value.code == 0 and "--help" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words, said",
    [
        (
            "tune --setting 1,8192,96",
            "a call is written like B1T8192H96, its widths are -K and -V, got '1,8192,96'",
        ),
        ("tune --setting B1T64H8HV16", "its widths are -K and -V, got 'B1T64H8HV16'"),
    ],
)
def test_a_wrong_option_is_refused_in_words(words, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(words.split())
    assert stopped.value.code == 2 and said in capsys.readouterr().err
