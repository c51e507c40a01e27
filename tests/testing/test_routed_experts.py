"""`certify`: correct experts pass every situation; for experts with a bug, the findings name
quantity and factor."""

from __future__ import annotations

import pytest

from moesaic.testing.certify import SITUATIONS
from testing import routed_ranks
from worlds import on_ranks

BUGS = ["", "experts averaged", "router detached", "fails"]


@pytest.fixture(scope="module")
def found():
    """Return the findings of two ranks, which are equal on both."""
    first, second = on_ranks(2, routed_ranks.findings, BUGS)
    assert str(first) == str(second)
    return first


def wrong(findings):
    return {finding.quantity for finding in findings if not finding.holds()}


def test_experts_that_are_right_pass_every_situation(found):
    assert {finding.situation for finding in found[""]} == {each.name for each in SITUATIONS}
    assert [str(finding) for finding in found[""] if not finding.holds()] == []
    assert max(finding.error for finding in found[""]) > 0  # compared, not skipped


def test_averaged_experts_are_found_with_their_factor(found):
    assert wrong(found["experts averaged"]) == {"experts"}
    message = next(str(finding) for finding in found["experts averaged"] if not finding.holds())
    assert message.startswith("even: experts wrong, ")
    assert message.endswith(", 0.5 times what it should be")


def test_a_router_that_learns_nothing_is_found(found):
    assert wrong(found["router detached"]) == {"gates"}
    assert {finding.factor for finding in found["router detached"] if not finding.holds()} == {0.0}


def test_what_is_raised_is_the_finding(found):
    assert {str(finding) for finding in found["fails"]} == {
        f"{each.name}: ValueError: no such thing" for each in SITUATIONS
    }


def test_one_rank_alone_is_certified_as_well():
    (found,) = on_ranks(1, routed_ranks.findings, ["", "router detached"])
    assert [str(finding) for finding in found[""] if not finding.holds()] == []
    assert wrong(found["router detached"]) == {"gates"}


def test_where_one_rank_fails_the_others_say_so_and_the_rest_is_left_out():
    found = on_ranks(2, routed_ranks.findings_of_one_that_fails)
    assert str(found[0]) == str(found[1])
    messages = {finding.situation: str(finding) for finding in found[0]}
    assert "right" in messages["even"]
    assert messages["uneven"].startswith("uneven: rank 0: RuntimeError: ")
    assert messages["uneven"].endswith("; rank 1: ValueError: not with one token")
    assert all("is left out" in messages[each.name] for each in SITUATIONS[2:])
