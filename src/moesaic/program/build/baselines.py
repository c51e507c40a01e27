"""What was done before dedicated schedules: the baseline that Parm compares with, and TED."""

from __future__ import annotations

from moesaic.program.build.builder import Builder, States, declare
from moesaic.program.task import Layout, Program, Stage, State


def baseline(bias: bool = False) -> Program:
    """Return eq. 1: gather the tokens of the expert shards, all-to-all over ep, all-reduce, all-to-all, keep one's own.

    Parm (INFOCOM 2024), section III. Ranks of one tensor group hold the same tokens and do the same work m times over; `vary`
    and `agree` account for it. Every rank is the origin of all its tokens, those of its tensor group included.
    """
    build = Builder("baseline", bias)
    tokens, copies = Layout(flow="tokens"), Layout()
    x, gates, index = declare(build, tokens, copies, {"tp": State.IDENTICAL})
    xv = build.vary(x, "x_own", "tp")
    gv = build.vary(gates, "gates_own", "tp")
    shards: States = {"etp": State.REPLICATED}
    wide_tokens, wide = Layout(flow="tokens", spread=("etp",)), Layout(spread=("etp",))
    xg = build.move(xv, "x_wide", wide_tokens, ("etp",), shards, Stage.DISPATCH)
    gg = build.move(gv, "gates_wide", wide, ("etp",), shards, Stage.DISPATCH)
    ig = build.move(index, "index_wide", wide, ("etp",), shards, Stage.DISPATCH)
    rows = build.permute(xg, ig, "rows", wide)
    at_experts = Layout(spread=("ep", "etp"), experts="rank")
    h = build.move(rows, "h", at_experts, ("ep",), {}, Stage.DISPATCH)
    g = build.move(gg, "g", at_experts, ("ep",), {}, Stage.DISPATCH)
    out = build.expert(h, g, "out")
    summed = build.move(out, "summed", at_experts, ("etp",), {"etp": State.IDENTICAL}, Stage.COMBINE)
    back = build.move(summed, "back", wide, ("ep",), {}, Stage.COMBINE)
    own = build.move(back, "own", copies, ("etp",), {"etp": State.SHARDED}, Stage.COMBINE)
    y_own = build.combine(own, index, "y_own", tokens)
    build.agree(y_own, "y", "tp")
    return build.build("y")


def ted(bias: bool = False) -> Program:
    """Return TED: what DeepSpeed does when the tensor group is the expert-shard group: the honest strong baseline.

    Singh et al., "A Hybrid Tensor-Expert-Data Parallelism Approach" (ICS 2023); DeepSpeed 0.8.1. Each shard receives each
    token once, so nothing is gathered and nothing computed twice. It needs tp = etp over the same ranks, so that identical
    tokens are identical over etp.
    """
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
