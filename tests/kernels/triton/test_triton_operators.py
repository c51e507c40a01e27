"""How many operators a call issues on a GPU, in the dtypes that people train in."""

from __future__ import annotations

import pytest

from moesaic_lab.operators import CLAIMED, MOST, as_on_a_gpu, count_form


@pytest.mark.parametrize("form", CLAIMED)
def test_a_call_issues_few_operators_besides_the_experts(form, interpreted):
    if not interpreted:
        pytest.skip("counts on CPU tensors")
    with as_on_a_gpu():
        found = {each: len(names) for each, names in count_form(form).items()}
    assert {
        each: (number, MOST[each]) for each, number in found.items() if number > MOST[each]
    } == {}
