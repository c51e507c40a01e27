"""TED: what DeepSpeed does when the tensor group is the expert-shard group: the honest strong baseline.

Singh et al., "A Hybrid Tensor-Expert-Data Parallelism Approach" (ICS 2023); DeepSpeed 0.8.1. Each shard receives each
token once, so nothing is gathered and nothing computed twice.
"""

from __future__ import annotations

from moesaic.program.build.builder import Builder, States, declare
from moesaic.program.task import Layout, Program, Stage, State


def ted(bias: bool = False) -> Program:
    """Return the program; it needs tp = etp over the same ranks, so that identical tokens are identical over etp."""
    build = Builder("ted", bias)
    tokens, copies = Layout(flow="tokens", whole_tp=True), Layout(whole_tp=True)
    x, gates, index = declare(build, tokens, copies, {"etp": State.IDENTICAL})
    rows = build.permute(x, index, "rows", copies)
    at_experts = Layout(spread=("ep",), whole_tp=True, experts="rank")
    h = build.move(rows, "h_same", at_experts, ("ep",), {}, Stage.DISPATCH)
    g = build.move(gates, "g_same", at_experts, ("ep",), {}, Stage.DISPATCH)
    shards: States = {"etp": State.REPLICATED}
    h = build.move(h, "h", at_experts, ("etp",), shards, Stage.DISPATCH)
    g = build.move(g, "g", at_experts, ("etp",), shards, Stage.DISPATCH)
    out = build.expert(h, g, "out")
    summed = build.move(out, "summed", at_experts, ("etp",), {"etp": State.IDENTICAL}, Stage.COMBINE)
    back = build.move(summed, "back", copies, ("ep",), {}, Stage.COMBINE)
    build.combine(back, index, "y", tokens)
    return build.build("y")
