"""Modules that got clearer names are still found under the names that documentation once gave."""

import importlib

import pytest


@pytest.mark.parametrize(
    ("earlier", "module", "name"),
    [
        ("moesaic.draw", "moesaic.initial_values", "SeededDraw"),
        ("moesaic.chosen", "moesaic.given_routing", "ChosenExperts"),
        ("moesaic.planner.simulate", "moesaic.planner.simulator", "Simulator"),
        ("moesaic.planner.rates", "moesaic.planner.policy_rates", "levels_of"),
    ],
)
def test_an_earlier_name_gives_the_same_object(earlier, module, name):
    former = importlib.import_module(earlier)
    assert name in former.__all__
    for each in former.__all__:
        assert getattr(former, each) is getattr(importlib.import_module(module), each)
