"""S3: as S2, but the all-to-all goes over ep only, and the shards gather and reduce on the links between them.

The order that DeepSpeed took up in 2024 for tp = etp, here for any: etp times fewer bytes cross the ep links than in S1
and S2, for a gather and a reduce-scatter over etp.
"""

from __future__ import annotations

from moesaic.program.build.builder import Builder, declare
from moesaic.program.task import Layout, Program, Stage, State


def s3(bias: bool = False) -> Program:
    """Return the program; gates and index belong to all copies of the tensor group."""
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
