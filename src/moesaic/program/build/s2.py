"""S2: tensor parallelism pauses after the gate: each rank sends its share of every run of copies (Parm, section IV-B)."""

from __future__ import annotations

from moesaic.program.build.builder import Builder, collect, declare, deliver
from moesaic.program.task import Layout, Program, Stage, State


def s2(bias: bool = False) -> Program:
    """Return the program; gates and index belong to all copies of the tensor group."""
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
