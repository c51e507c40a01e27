"""Invariants of programs, over the plans of random cases: text form, validity, transposes, and
equal replicas."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from helpers import thinned
from moesaic.program.plan import Plan
from moesaic.program.task import Op
from moesaic.program.text import to_text
from moesaic.program.validate import validate
from moesaic.runtime import messages, tasks
from moesaic.testing.cases import Case, draw_case
from moesaic.testing.equivalence import compile_case, run_case
from moesaic.testing.runner import disagreements, observed
from moesaic_lab.planted.mutants import CASES
from program_text import from_text

from .dot_products import dot_errors, is_reversible, one_task, restores


@pytest.mark.parametrize("seed", thinned(range(0, 400, 5), every=2))
def test_programs_are_valid_and_round_trip_as_text(seed):
    compiled = compile_case(draw_case(seed))
    for program in (compiled.logical, compiled.forward, compiled.backward):
        validate(program)
        assert from_text(to_text(program)) == program
    for task in compiled.logical.tasks:
        assert not is_reversible(compiled.logical, task) or restores(compiled.logical, task), task


def calls_of(case: Case) -> list:
    """Return every rank's call of the forward program."""
    compiled = compile_case(case)
    with observed() as runs:
        run_case(case)
    calls = {run.call.rank: run.call for run in runs if run.program == compiled.forward}
    return [calls[rank] for rank in sorted(calls)]


@pytest.mark.parametrize("seed", thinned(range(1000, 1040), every=5))
def test_every_movement_has_its_transpose(seed):
    case = draw_case(seed)
    errors = dot_errors(compile_case(case), calls_of(case), seed)
    assert all(error < 1e-12 for error in errors.values()), errors
    assert errors


def test_the_dot_test_notices_a_sum_that_is_none(monkeypatch):
    case = CASES["chunks"]
    calls = calls_of(case)
    original = tasks.placed
    monkeypatch.setattr(
        messages, "placed", lambda *call: original(*call) * 2 if call[3] else original(*call)
    )
    errors = dot_errors(compile_case(case), calls, 0)
    assert max(errors.values()) > 0.1


def test_replicas_that_differ_are_named():
    case = CASES["baseline"]
    with observed() as runs:
        run_case(dataclasses.replace(case, plan=Plan(schedule="s2")))
    assert disagreements(runs) == []
    spoiled = next(
        run for run in runs if run.call.rank == 1 and "h" in run.values and run.program.name == "s2"
    )
    spoiled.values["h"] = torch.full_like(spoiled.values["h"], 7.0)
    assert any(": h differs between ranks" in line for line in disagreements(runs))


def test_a_task_alone_is_a_program():
    compiled = compile_case(CASES["chunks"])
    for task in compiled.logical.tasks:
        if task.op is not Op.EXPERT:
            validate(one_task(compiled.logical, task))
