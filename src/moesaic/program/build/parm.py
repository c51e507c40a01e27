"""Parm's dedicated schedules, S1 and S2, and S3, which is S2 with the expert shards gathering among themselves.

Yin et al., "Parm: Efficient Training of Large Sparsely-Activated Models with Dedicated Schedules" (INFOCOM 2024).
"""

from __future__ import annotations

from moesaic.program.build.builder import Builder, collect, declare, deliver
from moesaic.program.task import Layout, Program, Stage, State


def s1(bias: bool = False) -> Program:
    """Return S1: tensor parallelism pauses before the gate: each rank routes and sends its slice of the tokens (section IV-A).

    Gates and index belong to the rank's slice, x and y to all tokens of the tensor group.
    """
    build = Builder("s1", bias)
    own, whole, copies = Layout(flow="tokens"), Layout(flow="tokens", whole_tp=True), Layout()
    x, gates, index = declare(build, whole, copies, {"tp": State.IDENTICAL}, gate_states={})
    mine = build.move(x, "x_mine", own, ("tp",), {"tp": State.SHARDED}, Stage.DISPATCH)
    rows = build.permute(mine, index, "rows", copies)
    out = deliver(build, rows, gates)
    z = collect(build, out, copies)
    y_mine = build.combine(z, index, "y_mine", own)
    build.move(y_mine, "y", whole, ("tp",), {"tp": State.IDENTICAL}, Stage.COMBINE)
    return build.build("y")


def s2(bias: bool = False) -> Program:
    """Return S2: tensor parallelism pauses after the gate: each rank sends its share of every run of copies (section IV-B).

    Gates and index belong to all copies of the tensor group.
    """
    build = Builder("s2", bias)
    whole_tokens, whole, share = Layout(flow="tokens", whole_tp=True), Layout(whole_tp=True), Layout()
    x, gates, index = declare(build, whole_tokens, whole, {"tp": State.IDENTICAL})
    rows = build.permute(x, index, "rows", whole)
    mine = build.move(rows, "mine", share, ("tp",), {"tp": State.SHARDED}, Stage.DISPATCH)
    gates_mine = build.move(gates, "gates_mine", share, ("tp",), {"tp": State.SHARDED}, Stage.DISPATCH)
    out = deliver(build, mine, gates_mine)
    z = collect(build, out, share)
    full = build.move(z, "z_full", whole, ("tp",), {"tp": State.IDENTICAL}, Stage.COMBINE)
    build.combine(full, index, "y", whole_tokens)
    return build.build("y")


def s3(bias: bool = False) -> Program:
    """Return S3: as S2, but the all-to-all goes over ep only, and the shards gather and reduce on the links between them.

    The order that DeepSpeed took up in 2024 for tp = etp, here for any: etp times fewer bytes cross the ep links than in S1
    and S2, for a gather and a reduce-scatter over etp. Gates and index belong to all copies of the tensor group.
    """
    build = Builder("s3", bias)
    whole_tokens, whole, share = Layout(flow="tokens", whole_tp=True), Layout(whole_tp=True), Layout()
    x, gates, index = declare(build, whole_tokens, whole, {"tp": State.IDENTICAL})
    rows = build.permute(x, index, "rows", whole)
    mine = build.move(rows, "mine", share, ("tp",), {"tp": State.SHARDED}, Stage.DISPATCH)
    gates_mine = build.move(gates, "gates_mine", share, ("tp",), {"tp": State.SHARDED}, Stage.DISPATCH)
    half, at_experts = Layout(spread=("ep",), experts="rank"), Layout(spread=("ep", "etp"), experts="rank")
    arrived = build.move(mine, "arrived", half, ("ep",), {}, Stage.DISPATCH)
    gates_arrived = build.move(gates_mine, "gates_arrived", half, ("ep",), {}, Stage.DISPATCH)
    h = build.move(arrived, "h", at_experts, ("etp",), {"etp": State.REPLICATED}, Stage.DISPATCH)
    g = build.move(gates_arrived, "g", at_experts, ("etp",), {"etp": State.REPLICATED}, Stage.DISPATCH)
    out = build.expert(h, g, "out")
    reduced = build.move(out, "reduced", half, ("etp",), {"etp": State.SHARDED}, Stage.COMBINE)
    z = build.move(reduced, "z", share, ("ep",), {}, Stage.COMBINE)
    full = build.move(z, "z_full", whole, ("tp",), {"tp": State.IDENTICAL}, Stage.COMBINE)
    build.combine(full, index, "y", whole_tokens)
    return build.build("y")
