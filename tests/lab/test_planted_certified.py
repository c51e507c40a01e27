"""Reported faults of expert parallelism, planted into systems that pass: `certify` finds what each
makes wrong, and no more."""

from __future__ import annotations

import pytest

from moesaic_lab.planted.certified import FAULTS, wrong_quantities
from worlds import on_ranks

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def found():
    """Return what is wrong without and with each fault, from one start of two ranks."""
    first, second = on_ranks(2, wrong_quantities)
    assert first == second
    return dict(zip((fault.name for fault in FAULTS), first))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_reported_fault_is_found_in_what_it_makes_wrong_and_nothing_else(found, fault):
    without, planted = found[fault.name]
    assert without == set()
    assert planted == fault.wrong


def test_each_reported_thread_is_planted():
    threads = {word.strip() for fault in FAULTS for word in fault.source.split(",")}
    assert threads == {
        "transformers#48205",
        "transformers#48687",
        "Automodel#3816",
        "DeepSpeed#8475",
        "#8478",
        "DeepSpeed#8613",
    }
