"""`moesaic check`: its options, its table, its JSON, and that a failure is told and makes the exit
code 1."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from moesaic.cli.main import main
from moesaic.errors import InputError
from moesaic.kernels.codecs import missing_codecs
from moesaic.kernels.codecs.zfp import Zfp
from moesaic.testing import runner
from moesaic.testing.cases import draw_case


@pytest.fixture
def broken(monkeypatch):
    """Let all outputs be half of what they should be."""
    original = runner.ran_case

    def halved(case):
        ran = original(case)
        for values in ran.results:
            values.update({key: value / 2 for key, value in values.items() if key[0] == "output"})
        return ran

    monkeypatch.setattr(runner, "ran_case", halved)


def words(text: str) -> str:
    return " ".join(text.split())


def test_a_table_of_what_was_found(capsys):
    assert main(["check", "--cases", "5", "--no-gloo", "--workers", "1"]) == 0
    out = words(capsys.readouterr().out)
    for part in ("cases on loopback │ 5, 0 failed", "worst error, expert gradient"):
        assert part in out


@pytest.fixture
def without_zfpy(monkeypatch):
    def refuse(self):
        raise InputError("codec zfp needs zfpy: install it, or choose another codec")

    monkeypatch.setattr(Zfp, "check_available", refuse)


@pytest.mark.usefixtures("without_zfpy")
def test_where_a_codec_is_not_installed_no_case_has_it_and_the_table_says_so(capsys):
    """Seed 27 is drawn with zfp where that is installed."""
    assert main(["check", "--cases", "1", "--seed", "27", "--no-gloo", "--workers", "1"]) == 0
    assert "codecs that are not installed, and so in no case │ zfp" in words(
        capsys.readouterr().out
    )
    assert (
        main(["check", "--cases", "1", "--seed", "27", "--no-gloo", "--workers", "1", "--json"])
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert (found["codecs_not_installed"], found["failures"], found["passed"]) == (
        ["zfp"],
        [],
        True,
    )


@pytest.mark.usefixtures("without_zfpy")
def test_no_case_is_drawn_with_a_codec_that_is_not_installed():
    cases = [draw_case(seed) for seed in range(60)]
    assert "zfp" not in {
        codec for case in cases for codec in (case.plan.codec, case.plan.backward_codec)
    }
    assert missing_codecs() == ["zfp"]


def test_findings_as_json(capsys):
    assert (
        main(["check", "--cases", "4", "--seed", "7", "--no-gloo", "--workers", "1", "--json"]) == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert (found["passed"], found["cases"], found["failures"], found["cases_by_processes"]) == (
        True,
        4,
        [],
        {},
    )
    assert found["worst_errors"]["output"] < 1e-10
    assert found["machine"]["cores"] >= 1


def test_a_failure_names_the_case_and_how_to_run_it_again(broken, capsys):
    assert main(["check", "--cases", "2", "--seed", "40", "--no-gloo", "--workers", "1"]) == 1
    out = capsys.readouterr().out
    for part in ("2 failed", "failed: seed 40: output ", "Case(seed=41", "moesaic check --only 41"):
        assert part in words(out)
    assert "(0.5 times what it should be)" in words(out)


def test_processes_are_counted_and_their_failures_are_failures(monkeypatch, capsys):
    def run(jobs):
        wrong = ["output 9.0e+00"]
        return [
            SimpleNamespace(case=job.case, errors={}, wrong=[] if i else wrong)
            for i, job in enumerate(jobs)
        ]

    monkeypatch.setattr(runner, "run_on_gloo", run)
    assert main(["check", "--cases", "1", "--workers", "1", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert list(found["cases_by_processes"]) == ["2", "4", "8"]
    assert len(found["failures"]) == 3  # the first case of each world


def test_one_case_with_all_its_errors(capsys):
    assert main(["check", "--only", "3"]) == 0
    out = words(capsys.readouterr().out)
    assert "Case(" in out
    assert "expert gradient" in out
    assert "passed" in out


def test_one_case_that_fails(broken, capsys):
    assert main(["check", "--only", "3", "--world", "2"]) == 1
    out = words(capsys.readouterr().out)
    assert "failed: output " in out
    assert "(0.5 times what it should be)" in out
    assert "world=2" in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--cases", "0"], "--cases 0: must be at least 1"),
        (["--world", "2"], "--world 2: goes with --only and is 1, 2, 4 or 8"),
        (["--only", "1", "--world", "3"], "--world 3: goes with --only and is 1, 2, 4 or 8"),
    ],
)
def test_bad_options_are_one_line(flags, message, capsys):
    assert main(["check", *flags]) == 2
    assert capsys.readouterr().err == f"moesaic check: {message}\n"
