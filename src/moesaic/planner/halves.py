"""The time of a fine-tune's step whose micro-batches run as two halves in flight
(`moesaic finetune --micro-batches-in-flight 2`): one half computes while the messages of the other
travel.

A half is half the sequences of a rank's micro-batch. Forward and backward passes of the two take
turns (`in_flight.py`). What backward recomputes does not: a checkpointed block runs forward again
within its turn and waits for its messages.
"""

from __future__ import annotations

from dataclasses import replace

from moesaic.planner.in_flight import layers_in_flight
from moesaic.planner.step import StepCostModel
from moesaic.program.compile import compile_plan
from moesaic.program.plan import Plan
from moesaic.program.task import Program

COST = 1.1
"""Factor on the predicted seconds of two halves in flight. On emulated clusters measured steps took
0.99 to 1.09 times the prediction (`moesaic bench small`): a call of half the tokens starts as many
messages and kernels as a whole one. Where it is close, whole micro-batches are chosen."""


def without_chunks(plan: Plan) -> Plan:
    """Return a plan whose messages the other half hides, so that it needs no chunks."""
    return replace(plan, chunks=1)


def seconds_in_turn(model: StepCostModel, plan: Plan) -> float:
    """Return the seconds in which a rank computes a whole micro-batch, forward and backward.

    Args:
        model: the cost model of steps with whole micro-batches.
        plan: the plan of the MoE layers.
    """
    compiled = compile_plan(plan, model.grid)
    passes = model.simulator.passes(
        compiled.forward, compiled.backward, model.model.layer, compiled.grid
    )
    return model.busy_seconds(*passes)


def seconds_in_flight(half: StepCostModel, plan: Plan) -> float:
    """Return the seconds in which a rank computes a micro-batch as two halves in flight, forward
    and backward.

    Args:
        half: the cost model of steps whose micro-batches have half the sequences.
        plan: the plan of the MoE layers.
    """
    compiled = compile_plan(plan, half.grid)
    forward, backward = half.simulator.passes(
        compiled.forward, compiled.backward, half.model.layer, compiled.grid
    )
    layers = half.model.moe_layers
    before_forward, before_backward = half.between_seconds(forward, backward)
    before_backward += half.model.recomputes("moe") * forward.seconds
    # what the two take in turn, less what they take in flight
    forward_in_turn = 2 * layers * (before_forward + forward.seconds)
    backward_in_turn = 2 * layers * (before_backward + backward.seconds)

    def flight(program: Program, between: float) -> float:
        """Return the seconds of a pass of both halves, with `between` seconds of other work per
        layer."""
        return layers_in_flight(
            half.simulator, program, half.model.layer, compiled.grid, between=between, layers=layers
        ).seconds

    forward_in_flight = flight(compiled.forward, before_forward)
    backward_in_flight = flight(compiled.backward, before_backward)
    saved = forward_in_turn - forward_in_flight + backward_in_turn - backward_in_flight
    return COST * (2 * half.busy_seconds(forward, backward) - saved)
