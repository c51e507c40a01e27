"""The published schedules of tensor parallelism around a MoE layer.

They are the baseline that Parm compares with, TED, and Parm's dedicated schedules S1, S2 and S3. S3
is S2 with an all-gather and reduce-scatter among the expert shards.

Pan et al., "Parm: Efficient Training of Large Sparsely-Activated Models with Dedicated Schedules"
(INFOCOM 2024).

A line of a schedule is a task; its result is the name of a slot, a value on every rank. Inputs are
`x` the tokens, `gates` the routing weights, `index` the token of each copy; `y` is the result, `h`
and `g` are rows and gates at the experts. A layout says which rows a slot has on a rank: those of
all ranks over the axes `spread` (the rank itself alone if none), for all experts or those of the
rank; with `whole_tp`, a tensor-parallel group counts as one origin. A state says how the values on
the ranks of an axis relate (`State` in `task.py`); axes that are not named are sharded.
"""

from __future__ import annotations

from moesaic.program.build.builder import Builder, States, collect, declare, deliver
from moesaic.program.task import Layout, Program, Stage, State


def baseline(bias: bool = False) -> Program:
    """Return Parm's baseline (eq. 1): all-gather over etp, all-to-all over ep, all-reduce,
    all-to-all, keep the rank's own part.

    Parm (INFOCOM 2024), section III. The m ranks of a tensor-parallel group hold the same tokens
    and each do the same work, m times in total; `vary` and `agree` account for that. Each rank is
    the origin of all tokens of its tensor-parallel group.
    """
    build = Builder("baseline", bias)
    tokens = Layout(flow="tokens")
    copies = Layout()
    x, gates, index = declare(build, tokens, copies, {"tp": State.IDENTICAL})
    # Each rank of the tensor-parallel group takes the same tokens for its own.
    x_own = build.vary(x, "x_own", "tp")
    gates_own = build.vary(gates, "gates_own", "tp")
    # All-gather over etp: every shard gets what any rank of its group has.
    shards: States = {"etp": State.REPLICATED}
    wide_tokens = Layout(flow="tokens", spread=("etp",))
    wide = Layout(spread=("etp",))
    x_wide = build.move(
        x_own, "x_wide", wide_tokens, group=("etp",), states=shards, stage=Stage.DISPATCH
    )
    gates_wide = build.move(
        gates_own, "gates_wide", wide, group=("etp",), states=shards, stage=Stage.DISPATCH
    )
    index_wide = build.move(
        index, "index_wide", wide, group=("etp",), states=shards, stage=Stage.DISPATCH
    )
    rows = build.permute(x_wide, index_wide, "rows", wide)
    # All-to-all over ep, the experts, and an all-reduce of the shards' results.
    at_experts = Layout(spread=("ep", "etp"), experts="rank")
    rows_there = build.move(rows, "h", at_experts, group=("ep",), states={}, stage=Stage.DISPATCH)
    gates_there = build.move(
        gates_wide, "g", at_experts, group=("ep",), states={}, stage=Stage.DISPATCH
    )
    out = build.expert(rows_there, gates_there, "out")
    summed = build.move(
        out,
        "summed",
        at_experts,
        group=("etp",),
        states={"etp": State.IDENTICAL},
        stage=Stage.COMBINE,
    )
    # All-to-all back, and the rank's own part of what its etp group has.
    back = build.move(summed, "back", wide, group=("ep",), states={}, stage=Stage.COMBINE)
    own = build.move(
        back, "own", copies, group=("etp",), states={"etp": State.SHARDED}, stage=Stage.COMBINE
    )
    y_own = build.combine(own, index, "y_own", tokens)
    build.agree(y_own, "y", "tp")
    return build.build("y")


def ted(bias: bool = False) -> Program:
    """Return TED, DeepSpeed's schedule when tensor-parallel and expert-shard groups coincide: the
    strong baseline.

    Singh et al., "A Hybrid Tensor-Expert-Data Parallelism Approach" (ICS 2023); DeepSpeed 0.8.1.
    Each shard receives each token once, so nothing is gathered and nothing is computed twice. It
    needs tp = etp over the same ranks, so that identical tokens are identical over etp.
    """
    build = Builder("ted", bias)
    tokens = Layout(flow="tokens", whole_tp=True)
    copies = Layout(whole_tp=True)
    x, gates, index = declare(build, tokens, copies, {"etp": State.IDENTICAL})
    rows = build.permute(x, index, "rows", copies)
    # All-to-all over ep. The shards have identical rows then, which they use differently.
    at_experts = Layout(spread=("ep",), whole_tp=True, experts="rank")
    arrived = build.move(rows, "h_same", at_experts, group=("ep",), states={}, stage=Stage.DISPATCH)
    gates_arrived = build.move(
        gates, "g_same", at_experts, group=("ep",), states={}, stage=Stage.DISPATCH
    )
    out = deliver(build, arrived, gates_arrived, at_experts=at_experts, group=("etp",))
    summed = build.move(
        out,
        "summed",
        at_experts,
        group=("etp",),
        states={"etp": State.IDENTICAL},
        stage=Stage.COMBINE,
    )
    back = build.move(summed, "back", copies, group=("ep",), states={}, stage=Stage.COMBINE)
    build.combine(back, index, "y", tokens)
    return build.build("y")


def s1(bias: bool = False) -> Program:
    """Return S1: tensor parallelism pauses before the gate, so each rank routes and sends its slice
    of the tokens.

    Parm, section III. `gates` and `index` belong to the rank's slice, `x` and `y` to all tokens of
    the tensor-parallel group.
    """
    build = Builder("s1", bias)
    own = Layout(flow="tokens")
    whole = Layout(flow="tokens", whole_tp=True)
    copies = Layout()
    x, gates, index = declare(build, whole, copies, {"tp": State.IDENTICAL}, gate_states={})
    x_mine = build.move(
        x, "x_mine", own, group=("tp",), states={"tp": State.SHARDED}, stage=Stage.DISPATCH
    )
    rows = build.permute(x_mine, index, "rows", copies)
    out = deliver(build, rows, gates)
    returned = collect(build, out, copies)
    y_mine = build.combine(returned, index, "y_mine", own)
    build.move(
        y_mine, "y", whole, group=("tp",), states={"tp": State.IDENTICAL}, stage=Stage.COMBINE
    )
    return build.build("y")


def s2(bias: bool = False) -> Program:
    """Return S2: tensor parallelism pauses after the gate, so each rank sends its share of every
    run of copies.

    Parm, section III. `gates` and `index` belong to all copies of the tensor-parallel group.
    """
    build = Builder("s2", bias)
    whole_tokens = Layout(flow="tokens", whole_tp=True)
    whole = Layout(whole_tp=True)
    share = Layout()
    x, gates, index = declare(build, whole_tokens, whole, {"tp": State.IDENTICAL})
    rows = build.permute(x, index, "rows", whole)
    mine, gates_mine = _own_share(build, rows, gates, share)
    out = deliver(build, mine, gates_mine)
    returned = collect(build, out, share)
    full = _joined(build, returned, whole)
    build.combine(full, index, "y", whole_tokens)
    return build.build("y")


def s3(bias: bool = False) -> Program:
    """Return S3: like S2, but the all-to-all covers ep only, and the shards of an expert gather and
    reduce among themselves.

    DeepSpeed adopted this order in 2024 for tp = etp; here it works for any sizes. The ep links
    carry etp times fewer bytes than under S1 and S2, at the price of an all-gather and a
    reduce-scatter over etp. `gates` and `index` belong to all copies of the tensor-parallel group.
    """
    build = Builder("s3", bias)
    whole_tokens = Layout(flow="tokens", whole_tp=True)
    whole = Layout(whole_tp=True)
    share = Layout()
    x, gates, index = declare(build, whole_tokens, whole, {"tp": State.IDENTICAL})
    rows = build.permute(x, index, "rows", whole)
    mine, gates_mine = _own_share(build, rows, gates, share)
    # All-to-all over ep, then an all-gather over etp: each shard had the rows of some origins only.
    at_ep_ranks = Layout(spread=("ep",), experts="rank")
    arrived = build.move(
        mine, "arrived", at_ep_ranks, group=("ep",), states={}, stage=Stage.DISPATCH
    )
    gates_arrived = build.move(
        gates_mine, "gates_arrived", at_ep_ranks, group=("ep",), states={}, stage=Stage.DISPATCH
    )
    out = deliver(build, arrived, gates_arrived, group=("etp",))
    # The same back: a reduce-scatter over etp, then an all-to-all over ep.
    reduced = build.move(
        out,
        "reduced",
        at_ep_ranks,
        group=("etp",),
        states={"etp": State.SHARDED},
        stage=Stage.COMBINE,
    )
    returned = build.move(reduced, "z", share, group=("ep",), states={}, stage=Stage.COMBINE)
    full = _joined(build, returned, whole)
    build.combine(full, index, "y", whole_tokens)
    return build.build("y")


def _own_share(build: Builder, rows: str, gates: str, share: Layout) -> tuple[str, str]:
    """Keep, of the rows and gates that all ranks of a tensor-parallel group have, the rank's
    share."""
    own: States = {"tp": State.SHARDED}
    mine = build.move(rows, "mine", share, group=("tp",), states=own, stage=Stage.DISPATCH)
    gates_mine = build.move(
        gates, "gates_mine", share, group=("tp",), states=own, stage=Stage.DISPATCH
    )
    return mine, gates_mine


def _joined(build: Builder, returned: str, whole: Layout) -> str:
    """Gather the results of all shares on every rank of the tensor-parallel group."""
    same: States = {"tp": State.IDENTICAL}
    return build.move(returned, "z_full", whole, group=("tp",), states=same, stage=Stage.COMBINE)
