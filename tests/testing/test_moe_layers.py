"""`certify` with whole layers: a correct one passes every situation; findings on a bug name
quantity and factor."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch.nn.functional as F

from moesaic.testing.certify import LAYER_SITUATIONS, SITUATIONS, AbstractMoELayer, certify
from testing import routed_ranks
from worlds import on_ranks

NUM_EXPERTS = 8
BUGS = ["", "router averaged", "loss without a gradient", "keeps all", "fails"]


class Layer(AbstractMoELayer):
    """A router before experts that gather all tokens, with a balance loss over the rank's own
    tokens."""

    has_capacity = True
    bug = ""

    def __init__(self, spec):
        self.spec = spec
        self.router = spec.weights.router.clone().requires_grad_()
        self.experts = routed_ranks.Gathering(spec)

    def run(self, x):
        if self.bug == "fails":
            raise ValueError("no such layer")
        probs = F.linear(x, self.router).softmax(-1)
        gates, experts = probs.topk(self.spec.top_k)
        share = F.one_hot(experts.flatten(), NUM_EXPERTS).double().sum(0) / max(experts.numel(), 1)
        loss = 3 * NUM_EXPERTS * (share * probs.sum(0) / max(len(x), 1)).sum()
        gates = gates / gates.sum(-1, keepdim=True) if self.spec.top_k > 1 else gates
        if self.spec.capacity is not None and self.bug != "keeps all":
            place = F.one_hot(experts[:, 0], NUM_EXPERTS).cumsum(0).gather(1, experts)
            gates = gates * (place <= self.spec.capacity * len(x) / NUM_EXPERTS)
        return self.experts.run(x, experts, gates), loss.detach() + 0 * loss if self.bug.startswith(
            "loss"
        ) else loss

    def gradients(self):
        gradient = (
            self.router.grad / self.spec.group.size()
            if self.bug == "router averaged"
            else self.router.grad
        )
        return replace(self.experts.gradients(), router=gradient)


def findings():
    return {bug: certify(type("Buggy", (Layer,), {"bug": bug})) for bug in BUGS}


def findings_in_other_situations():
    """Return the findings in situations that by default only experts go through, and of a layer
    without a capacity."""
    further = [
        each
        for each in SITUATIONS
        if each.name in ("accumulation", "frozen tokens", "recomputation", "summed")
    ]
    without = certify(
        type("Unlimited", (Layer,), {"has_capacity": False}), situations=LAYER_SITUATIONS[-1:]
    )
    return [*certify(Layer, situations=further), *without]


@pytest.fixture(scope="module")
def found():
    """Return the findings of two ranks, which are equal on both."""
    first, second = on_ranks(2, findings)
    assert str(first) == str(second)
    return first


def wrong(findings):
    return {finding.quantity for finding in findings if not finding.holds()}


def test_a_layer_that_is_right_passes_every_situation(found):
    assert {finding.situation for finding in found[""]} == {each.name for each in LAYER_SITUATIONS}
    assert [str(finding) for finding in found[""] if not finding.holds()] == []
    losses = [finding for finding in found[""] if finding.quantity.startswith("auxiliary loss")]
    assert {finding.quantity.removeprefix("auxiliary loss over ") for finding in losses} >= {
        "own tokens"
    }
    assert all(finding.factor == pytest.approx(3, rel=1e-4) for finding in losses)


def test_bugs_are_told_from_each_other(found):
    averaged = [finding for finding in found["router averaged"] if not finding.holds()]
    assert {finding.quantity.partition(" over")[0] for finding in averaged} == {
        "router",
        "auxiliary loss",
    }
    assert {round(finding.factor, 4) for finding in averaged if finding.quantity == "router"} == {
        0.5
    }
    assert {
        quantity.partition(" over")[0] for quantity in wrong(found["loss without a gradient"])
    } == {"auxiliary loss"}
    assert wrong(found["keeps all"]) == {"capacity"}
    assert {str(finding) for finding in found["fails"]} == {
        f"{each.name}: ValueError: no such layer" for each in LAYER_SITUATIONS
    }


def test_a_whole_layer_may_run_in_the_situations_of_experts():
    (found, _) = on_ranks(2, findings_in_other_situations)
    assert [str(finding) for finding in found if not finding.holds()] == []
    assert {finding.situation for finding in found} == {
        "accumulation",
        "frozen tokens",
        "recomputation",
        "summed",
    }
