"""A plan's fields: what each refuses, and that their choices are those of the tables that run
them."""

from __future__ import annotations

from dataclasses import fields
from typing import get_args

import numpy as np
import pytest

from helpers import refused
from moesaic.program.all_to_all import ALL_TO_ALLS
from moesaic.program.build import SCHEDULES
from moesaic.program.order import ORDERS
from moesaic.program.plan import AllToAll, Order, Plan, Schedule


def test_every_choice_of_a_field_exists_and_everything_that_exists_is_a_choice() -> None:
    assert get_args(Schedule) == tuple(SCHEDULES)
    assert get_args(AllToAll) == (*ALL_TO_ALLS, "multicast", "deepep")
    assert set(get_args(Order)) == set(ORDERS)


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"chunks": 0}, "plan.chunks=0: must be at least 1"),
        ({"chunks": 1_000_000}, "plan.chunks=1000000: must be at most 256"),
        (
            {"codec": "int3"},
            (
                "plan.codec: codec 'int3' is unknown: write one of none, bf16, fp16, int8, fp8, "
                "zfp:RATE"
            ),
        ),
        (
            {"codec": "zfp:3"},
            "plan.codec: codec 'zfp:3': write rate as a whole number from 4 to 32, such as zfp:8",
        ),
        (
            {"codec": "int8:4"},
            "plan.codec: codec 'int8:4': int8 takes no option: leave out what follows the colon",
        ),
        ({"backward_codec": ""}, "plan.backward_codec='' is unknown: write none for no codec"),
        ({"peer_groups": -1}, "plan.peer_groups=-1: must be at least 1"),
        (
            {"schedule": "s9"},
            f"plan.schedule='s9' is unknown: choose one of {', '.join(SCHEDULES)}",
        ),
        (
            {"all_to_all": "2dh"},
            (
                "plan.all_to_all='2dh' is unknown: choose one of "
                f"{', '.join((*ALL_TO_ALLS, 'multicast', 'deepep'))}"
            ),
        ),
        ({"gather_weights": -1}, "plan.gather_weights=-1: choose 0, or a divisor of mesh.etp"),
    ],
)
def test_values_that_no_mesh_allows_are_refused(fields: dict, line: str) -> None:
    assert refused(Plan, **fields) == line


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, True),
        ({"chunks": 3}, True),
        ({"codec": "bf16"}, False),
        ({"backward_codec": "int8"}, False),
    ],
)
def test_only_codecs_lose_anything(fields: dict, expected: bool) -> None:
    assert Plan(**fields).is_lossless is expected


WRONG = {
    "bool": [1, "yes", None, 0.0],
    "int": [2.5, "2", None, True, 1.0],
    "int | None": [2.5, "2", True],
}
"""Values of another kind, by annotation; the other fields are names."""
NO_NAMES = [3, None, True, ["s1"], b"s1"]


@pytest.mark.parametrize(
    ("name", "value"),
    [(f.name, value) for f in fields(Plan) for value in WRONG.get(str(f.type), NO_NAMES)],
    ids=str,
)
def test_every_field_refuses_values_of_another_kind_in_one_line(name: str, value: object) -> None:
    assert refused(Plan, **{name: value}).startswith(f"plan.{name}={value!r}: must be ")


def test_an_unknown_order_is_refused_with_those_that_there_are() -> None:
    assert "plan.order='soon' is unknown: choose one of fifo, early, optsche" in refused(
        Plan, order="soon"
    )


def test_whole_numbers_of_numpy_become_pythons() -> None:
    plan = Plan(chunks=np.int64(2), gather_weights=np.int32(0), memory_budget=np.int64(9))
    assert plan == Plan(chunks=2, gather_weights=0, memory_budget=9)
    assert {type(value) for value in (plan.chunks, plan.gather_weights, plan.memory_budget)} == {
        int
    }
