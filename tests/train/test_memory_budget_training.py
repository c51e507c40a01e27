"""Training under a memory budget equals training without one, and the metrics report how the budget
was met."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from moesaic.errors import InputError
from runs import lines, losses, parameters, run_quietly, tiny


def test_one_process_trains_the_same_in_slices(tmp_path: Path) -> None:
    base = {"steps": 2, "precision": "float64", "model": {"checkpoint_activations": True}}
    found = {}
    with pytest.raises(InputError, match=r"plan\.memory_budget=1: ") as refused:
        run_quietly(
            tiny(tmp_path, **base, balance={"memory_budget": 1}, out=str(tmp_path / "refused"))
        )
    budget = int(re.findall(r"holds (\d+) bytes", str(refused.value))[0]) * 11 // 10
    for name, balance in (("plain", {}), ("sliced", {"memory_budget": budget})):
        config = tiny(tmp_path, **base, balance=balance, out=str(tmp_path / name))
        run_quietly(config)
        found[name] = losses(tmp_path / name)
    assert found["sliced"] == [
        (step, pytest.approx(loss, rel=1e-9)) for step, loss in found["plain"]
    ]
    assert parameters(tmp_path / "sliced").keys() == parameters(tmp_path / "plain").keys()
    assert "memory_budget" not in lines(tmp_path / "plain", "train")[0]
    for line in lines(tmp_path / "sliced", "train"):
        for layer in line["memory_budget"]:
            assert layer["calls"] == layer["sliced_calls"] > 0
            assert layer["slices"] > layer["calls"]
            assert layer["bytes_over"] > 0
            assert layer["rows_spilled"] == 0


def test_a_budget_below_one_byte_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"balance\.memory_budget=0: choose bytes per rank, at least 1"
    ) as found:
        tiny(tmp_path, balance={"memory_budget": 0})
    assert "\n" not in str(found.value)
