"""Diagnosis: planted bugs are explained, correct cases give no finding, and the further cases that are run are legal."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moesaic.testing.cases import draw_case
from moesaic.testing.diagnosis import diagnose, factors_of, relatives, sizes_of
from moesaic.testing.equivalence import failures, ran_case
from moesaic.testing.expected import expect, expect_parts
from moesaic.testing.factors import is_right
from moesaic.testing.workload import draw_workload
from moesaic_lab.planted.mutants import BASE, CASES


@pytest.mark.parametrize("name", ["step", "chunks", "shared", "nodes", "placed", "recompute"])
def test_all_factors_of_a_case_that_passes_are_one(name):
    factors = factors_of(ran_case(CASES[name]))
    assert {what: factor for what, factor in factors.items() if not is_right(factor)} == {}
    assert {"outputs", "expert gradients", "router gradients"} <= set(factors)
    assert "router gradients from the auxiliary losses" in factors
    assert ("input gradients through the shared expert" in factors) == CASES[name].shared


def test_parts_add_up_to_the_gradients():
    case = replace(BASE, shared=True)
    work = draw_workload(case)
    expected, parts = expect(case, work), expect_parts(case, work)
    for name, by_source in parts.router.items():
        whole = expected.gradients[name]
        assert whole is not None
        torch.testing.assert_close(sum(by_source.values()), whole, rtol=1e-12, atol=1e-12)
    for micro, of_groups in enumerate(parts.inputs):
        for group, by_source in enumerate(of_groups):
            whole = expected.input_gradients[micro][group]
            torch.testing.assert_close(sum(by_source.values()), whole, rtol=1e-12, atol=1e-12)
            assert set(by_source) >= {"the experts", "the routing weights", "the shared expert", "z_loss"}


def test_a_case_that_passes_looks_like_nothing():
    diagnosis = diagnose(CASES["chunks"], ran_case)
    assert diagnosis.wrong == {}
    assert diagnosis.findings == ()


def spoiled(change):
    def run(case):
        ran = ran_case(case)
        for result in ran.results:
            change(case, result)
        return ran

    return run


def test_rows_in_other_places_are_said_to_be():
    def change(case, result):
        result.outputs = [y.flip(0).flip(1) for y in result.outputs]

    findings = diagnose(CASES["chunks"], spoiled(change)).findings
    assert [str(finding) for finding in findings] == [
        "outputs are wrong by no single factor: they are the right values in other places"
    ]


def test_a_wrong_shape_is_no_factor():
    def change(case, result):
        result.outputs = [y[:, :1] for y in result.outputs]

    findings = diagnose(CASES["chunks"], spoiled(change)).findings
    assert [finding.factor for finding in findings] == [""]
    assert "another shape" in str(findings[0])


def test_one_parameter_alone_is_named():
    def change(case, result):
        result.gradients["experts.w2"] *= case.grid.etp

    findings = diagnose(CASES["step"], spoiled(change)).findings
    assert [str(finding) for finding in findings] == [
        "gradients of experts.w2 are 2.00 times too large: looks like a missing division by etp (=2)"
    ]


def test_one_auxiliary_loss_alone_is_named():
    def change(case, result):
        parts = expect_parts(case, draw_workload(case)).router
        for name, by_source in parts.items():
            result.gradients[name] += (case.top_k - 1) * by_source["z_loss"]

    findings = diagnose(CASES["step"], spoiled(change)).findings
    assert [str(finding) for finding in findings] == [
        "router gradients from z_loss are 2.00 times too large: looks like a missing division by top_k (=2)"
    ]


@pytest.mark.parametrize("seed", range(12))
def test_cases_like_a_case_pass_as_it_does(seed):
    """Otherwise a bug would be explained by errors of the cases that are run to explain it."""
    case = draw_case(seed)
    others = [other for other in relatives(case) if other.grid.world <= 4][:3]
    for other in others:
        assert failures(other, ran_case(other).errors) == {}, other


def test_cases_like_a_case_differ_in_every_size():
    found = [sizes_of(other) for other in relatives(CASES["chunks"])]
    own = sizes_of(CASES["chunks"])
    assert all(any(sizes[name] != own[name] for sizes in found) for name in own)
    assert CASES["chunks"] not in list(relatives(CASES["chunks"]))
