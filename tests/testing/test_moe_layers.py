"""`certify_layer`: a correct layer passes every situation; for a layer with a bug, the findings name quantity and factor."""

from __future__ import annotations

from functools import partial

import pytest
import torch.nn.functional as F

from moesaic.testing.moe_layers import EXPERTS, LAYER_SITUATIONS, AbstractMoELayer, certify_layer
from testing import routed_ranks
from worlds import on_ranks

BUGS = ["", "router averaged", "loss without a gradient", "keeps all", "fails"]


class Layer(AbstractMoELayer):
    """A router before experts that gather all tokens, with a balance loss over the rank's own tokens."""

    def __init__(self, bug, spec):
        self.bug, self.spec = bug, spec
        self.router = spec.router.clone().requires_grad_()
        self.experts = routed_ranks.Gathering(spec.experts, spec.group)

    def run(self, x):
        if self.bug == "fails":
            raise ValueError("no such layer")
        probs = F.linear(x, self.router).softmax(-1)
        gates, experts = probs.topk(self.spec.top_k)
        share = F.one_hot(experts.flatten(), EXPERTS).double().sum(0) / max(experts.numel(), 1)
        loss = 3 * EXPERTS * (share * probs.sum(0) / max(len(x), 1)).sum()
        gates = gates / gates.sum(-1, keepdim=True) if self.spec.top_k > 1 else gates
        if self.spec.capacity is not None and self.bug != "keeps all":
            place = F.one_hot(experts[:, 0], EXPERTS).cumsum(0).gather(1, experts)
            gates = gates * (place <= self.spec.capacity * len(x) / EXPERTS)
        return self.experts.run(x, experts, gates), loss.detach() + 0 * loss if self.bug.startswith("loss") else loss

    def gradients(self):
        gradient = self.router.grad / self.spec.group.size() if self.bug == "router averaged" else self.router.grad
        return gradient, self.experts.gradients()


def findings():
    return {bug: certify_layer(partial(Layer, bug)) for bug in BUGS}


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
    assert {finding.quantity.removeprefix("auxiliary loss over ") for finding in losses} >= {"own tokens"}
    assert all(finding.factor == pytest.approx(3, rel=1e-4) for finding in losses)


def test_bugs_are_told_from_each_other(found):
    averaged = [finding for finding in found["router averaged"] if not finding.holds()]
    assert {finding.quantity.partition(" over")[0] for finding in averaged} == {"router", "auxiliary loss"}
    assert {round(finding.factor, 4) for finding in averaged if finding.quantity == "router"} == {0.5}
    assert {quantity.partition(" over")[0] for quantity in wrong(found["loss without a gradient"])} == {
        "auxiliary loss"
    }
    assert wrong(found["keeps all"]) == {"capacity"}
    assert {str(finding) for finding in found["fails"]} == {
        f"{each.name}: ValueError: no such layer" for each in LAYER_SITUATIONS
    }
