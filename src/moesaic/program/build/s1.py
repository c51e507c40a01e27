"""S1: tensor parallelism pauses before the gate: each rank routes and sends its slice of the tokens (Parm, section IV-A)."""

from __future__ import annotations

from moesaic.program.build.builder import Builder, collect, declare, deliver
from moesaic.program.task import Layout, Program, Stage, State


def s1(bias: bool = False) -> Program:
    """Return the program; gates and index belong to the rank's slice, x and y to all tokens of the tensor group."""
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
