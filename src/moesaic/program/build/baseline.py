"""Parm's baseline, eq. 1: gather the tokens of the expert shards, all-to-all over ep, all-reduce, all-to-all, keep one's own.

Yin et al., "Parm: Efficient Training of Large Sparsely-Activated Models with Dedicated Schedules" (INFOCOM 2024), section
III. Ranks of one tensor group hold the same tokens and do the same work m times over; `vary` and `agree` account for it.
"""

from __future__ import annotations

from moesaic.program.build.builder import Builder, States, declare
from moesaic.program.task import Layout, Program, Stage, State


def baseline(bias: bool = False) -> Program:
    """Return the program; every rank is the origin of all its tokens, those of its tensor group included."""
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
