"""`moesaic certify`: one line per failure, the exit code, JSON, and what it says to a name that is
no system."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from moesaic.cli.main import main
from moesaic.testing import runner
from moesaic.testing.certify import Certified, system_named

SYSTEM = '''
"""Experts on one rank that return half of what they should."""
from moesaic.testing.certify import AbstractRoutedExperts, MoEWeights
import torch, torch.nn.functional as F

class Half(AbstractRoutedExperts):
    part = 0.5

    def __init__(self, spec):
        own = spec.weights
        self.w1 = own.w1.clone().requires_grad_()
        self.w3 = own.w3.clone().requires_grad_()
        self.w2 = own.w2.clone().requires_grad_()

    def run(self, x, experts, gates):
        gate = torch.einsum("td,ehd->teh", x, self.w1)
        hidden = F.silu(gate) * torch.einsum("td,ehd->teh", x, self.w3)
        y = torch.einsum("teh,edh->ted", hidden, self.w2)
        chosen = y.gather(1, experts.unsqueeze(-1).expand(-1, -1, y.shape[-1]))
        return self.part * (gates.unsqueeze(-1) * chosen).sum(1)

    def gradients(self):
        weights = (self.w1, self.w3, self.w2)
        return MoEWeights(*(torch.zeros_like(w) if w.grad is None else w.grad for w in weights))


class Whole(Half):
    part = 1.0


class Unwritten(Whole):
    """Leaves a row unwritten, which is 0 in fresh memory."""

    def run(self, x, experts, gates):
        y = super().run(x, experts, gates)
        return y + 0 * torch.empty_like(y)
'''


@pytest.fixture
def system(tmp_path: Path) -> str:
    path = tmp_path / "experts_under_test.py"
    path.write_text(SYSTEM)
    return str(path)


def test_a_wrong_system_gets_a_line_per_failure_and_exit_code_1(system, capsys):
    assert main(["certify", f"{system}:Half", "--ranks", "1"]) == 1
    *lines, last = capsys.readouterr().out.splitlines()
    assert "1 ranks, even: output wrong, 5.0e-01, 0.5 times what it should be" in lines
    assert last.endswith(f" right, {len(lines)} wrong")
    assert not any(": Whole" in line or " right" in line for line in lines)


def test_a_right_one_passes_and_json_has_every_finding(system, capsys):
    assert main(["certify", f"{system}:Whole", "--ranks", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["passed"]
    assert {"even", "summed"} <= {each["situation"] for each in found["findings"]}


def test_unwritten_rows_are_found_only_when_memory_is_poisoned(system, capsys, monkeypatch):
    assert main(["certify", f"{system}:Unwritten", "--ranks", "1", "--json"]) == 1
    wrong = [each for each in json.loads(capsys.readouterr().out)["findings"] if not each["holds"]]
    assert {each["quantity"] for each in wrong} == {"output"}
    assert all(each["error"] is None for each in wrong), "JSON has no infinity"


def test_a_rank_that_dies_is_a_failure(system, capsys, monkeypatch):
    def dies(*arguments, **options):
        raise RuntimeError("process 1 terminated\nwith signal SIGSEGV")

    monkeypatch.setattr(runner, "on_ranks", dies)
    assert main(["certify", f"{system}:Whole"]) == 1
    assert "2 ranks, every situation: RuntimeError: with signal SIGSEGV" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("no_such_module:Layer", "No module named 'no_such_module': write package.module:Class"),
        (
            "moesaic.testing.certify:Nothing",
            "has no attribute 'Nothing': write package.module:Class",
        ),
        (
            "moesaic.testing.certify:Situation",
            "must be a class derived from AbstractRoutedExperts or AbstractMoELayer",
        ),
    ],
)
def test_a_name_that_is_no_system_is_refused_in_one_line(name, says, capsys):
    assert main(["certify", name]) == 2
    assert says in capsys.readouterr().err


def test_an_impossible_number_of_ranks_is_refused(capsys):
    assert main(["certify", "a:B", "--ranks", "3"]) == 2
    assert "--ranks 3: choose among 1, 2, 4 and 8" in capsys.readouterr().err


def test_a_failure_is_not_a_number():
    assert str(Certified("even", "experts", math.inf, None)) == "even: experts wrong, inf"
    assert system_named("testing.routed_ranks:Gathering").__name__ == "Gathering"


def test_the_template_of_the_page_is_right(tmp_path, capsys, monkeypatch) -> None:
    """Somebody who puts calls of their own in its place begins with a layer that passes."""
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "certificates.md").read_text("utf-8")
    (code,) = re.findall(r"```python\n(# python moe\.py\n.*?)```", page, re.DOTALL)
    Path("moe.py").write_text(code, encoding="utf-8")
    (command,) = re.findall(r"^    moesaic (certify moe\.py:\w+) --ranks 2 4", page, re.MULTILINE)
    assert main([*command.split(), "--ranks", "2"]) == 0
    assert re.search(
        r"moe\.py:MyExperts on 2 ranks: [1-9]\d right, 0 wrong", capsys.readouterr().out
    )
