"""Planted bugs that the suite must catch: each is a mistake that somebody made, or one that a pass could make.

"users" numbers the complaints of users of today's MoE stacks; the papers' own mistakes are named by paper.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Literal

from moesaic.plan import Compiled, Plan
from moesaic.program.grid import Grid
from moesaic.program.validate import ProgramError, validate
from moesaic.routing.capacity import Capacity, Dropless
from moesaic.routing.losses import Importance, LoadBalance, ZLoss
from moesaic.runtime import movements, sharing
from moesaic.testing import plants, plants_balance
from moesaic.testing.cases import Case
from moesaic.testing.equivalence import Patch, failures, run_case

Catcher = Literal["validator", "crash", "numbers", "nobody"]
"""What noticed a bug: the validator of programs, an error that was raised, or wrong values."""

BASE = Case(
    seed=11,
    grid=Grid(world=8, tp=2, ep=2, etp=2, ranks_per_node=4),
    plan=Plan(schedule="s1"),
    num_experts=4,
    top_k=2,
    router="sigmoid",
    experts="swiglu",
    shared=False,
    apply_weight="after",
    capacity=Dropless(),
    losses=(LoadBalance(0.7), ZLoss(0.2), Importance(0.3)),
    sequences=1,
    lengths=((4, 3, 5, 2), (3, 4, 2, 5)),
    padding=True,
    skew=1.0,
    recompute=False,
    evaluate=True,
    precision="float64",
)
_SMALL = replace(BASE, grid=Grid(world=4, tp=2, ep=2, etp=2), lengths=((4, 3),), padding=False, evaluate=False)
_ACROSS = Grid(world=4, ep=4, ranks_per_node=2)
CASES: dict[str, Case] = {
    "step": BASE,
    "recompute": replace(BASE, recompute=True, router="noisy", evaluate=False, seed=12),
    "drops": replace(BASE, capacity=Capacity.fixed(0.7), seed=13),
    "chunks": replace(_SMALL, plan=Plan(schedule="s2", chunks=2), experts="gelu", top_k=4, lengths=((4, 4),), seed=14),
    "baseline": replace(_SMALL, plan=Plan(schedule="baseline"), seed=15),
    "nodes": replace(
        BASE,
        grid=Grid(world=8, ep=8, ranks_per_node=2),
        plan=Plan(schedule="s1", all_to_all="hier2d"),
        num_experts=8,
        lengths=((2, 3, 4, 1, 2, 3, 2, 4),),
        evaluate=False,
        seed=16,
    ),
    "multicast": replace(
        BASE,
        grid=Grid(world=8, ep=4, etp=2, ranks_per_node=4),
        plan=Plan(schedule="s1", all_to_all="multicast"),
        lengths=((2, 3, 4, 3, 2, 3, 2, 4),),
        padding=False,
        evaluate=False,
        seed=17,
    ),
    "arbiter": replace(
        BASE,
        grid=_ACROSS,
        plan=Plan(lending="arbiter"),
        lengths=((4, 3, 5, 2),),
        recompute=True,
        evaluate=False,
        seed=20,
    ),
    "placed": replace(
        BASE,
        grid=_ACROSS,
        plan=Plan(chunks=2),
        sequences=3,
        lengths=((4, 4, 4, 4),),
        placement="random",
        evaluate=False,
        padding=False,
        seed=21,
    ),
    "experts": replace(
        BASE,
        grid=Grid(world=4, ep=4, etp=1, ranks_per_node=2),
        plan=Plan(schedule="s1", lending="shadow"),
        num_experts=8,
        lengths=((4, 3, 5, 2), (3, 4, 2, 5)),
        by_policy=True,
        experts_move=True,
        skew=4.0,
        evaluate=False,
        seed=22,
    ),
    "codec": replace(_SMALL, plan=Plan(schedule="s2", codec="int8"), router="softmax", seed=18),
}
"""The few cases that mutants are run on."""
GLOO = replace(BASE, grid=Grid(world=4, tp=2, ep=2, etp=2), lengths=((4, 3), (3, 4)), seed=19)
"""The case for mutants of what needs processes."""


@dataclass(frozen=True)
class Mutant:
    """A planted bug."""

    name: str
    source: str
    case: str
    """In `CASES`, or "gloo"."""
    caught_by: Catcher
    """What catches it: part of the evidence, held by a test."""
    patch: Patch = nullcontext
    change: Callable[[Compiled], Compiled] | None = None


MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "expert gradients scaled by ep", "users A6", "step", "numbers", plants.gradients_then(plants.experts_times_ep)
    ),
    Mutant(
        "router's gradient not reduced over dp",
        "users A8",
        "step",
        "numbers",
        plants.gradients_then(plants.router_of_own_group),
    ),
    Mutant(
        "auxiliary loss scaled by tp", "users A2", "step", "numbers", plants.loss_share(lambda grid: grid.dp * grid.tp)
    ),
    Mutant("auxiliary loss too small by dp", "users A3", "step", "numbers", plants.loss_share(lambda grid: 1)),
    Mutant(
        "auxiliary loss never reaches the router",
        "users A1, ScheMoE",
        "step",
        "numbers",
        plants.loss_never_used,
    ),
    Mutant(
        "S1: the gate's gradient not summed over tp",
        "Parm",
        "step",
        "numbers",
        plants.replaced(sharing, "share", lambda wire, group, value: value.view_as(value)),
    ),
    Mutant(
        "copies counted again under recompute",
        "users A9",
        "recompute",
        "numbers",
        plants.counting(lambda layer, routed, replaying: replaying),
    ),
    Mutant(
        "evaluation tokens in the bias update",
        "users A10",
        "step",
        "numbers",
        plants.counting(lambda layer, routed, replaying: not layer.training),
    ),
    Mutant("padding in the bias update", "users A10", "step", "numbers", plants.padding_counts),
    Mutant("padding is routed", "users A10", "step", "numbers", plants.padding_routed),
    Mutant("bias updated per micro-batch", "users A11", "step", "numbers", plants.bias_each_micro_batch),
    Mutant("routing again under recompute", "users B14", "recompute", "crash", plants.routes_again),
    Mutant("gradient norm without experts", "users A7", "gloo", "numbers", plants.norm_without_experts),
    Mutant("gradient norm counts replicas", "users A7", "gloo", "numbers", plants.norm_with_replicas),
    Mutant("drops per rank instead of global", "the papers", "drops", "numbers", plants.drops_per_rank),
    Mutant("counts over the wrong axis", "FastMoE", "baseline", "crash", plants.counted_over_tp),
    Mutant("2DH divides by the wrong size", "Tutel, algorithm 2", "nodes", "crash", plants.stride_by_columns),
    Mutant(
        "partial sums of shards not summed",
        "own",
        "chunks",
        "numbers",
        plants.replaced(movements, "placed", plants.last_shard_only),
    ),
    Mutant("output bias added by every shard", "users A8", "chunks", "numbers", plants.bias_of_every_shard),
    Mutant("chunks of weights swapped", "own", "chunks", "numbers", change=plants.chunks_swapped),
    Mutant("gather of a replicated gradient reduced", "own", "chunks", "numbers", change=plants.last_gather_reduced),
    Mutant("baseline's copies not divided", "Parm, eq. 1", "baseline", "numbers", change=plants.backward_scale_dropped),
    Mutant("visits off by one", "own", "multicast", "numbers", plants.visits_off_by_one),
    Mutant("gradients coded", "ScheMoE", "codec", "numbers", change=plants.gradients_coded),
    Mutant("codec on the wrong side: own rows coded", "own", "codec", "numbers", plants.own_rows_coded),
    Mutant("read before waiting", "own", "step", "numbers", plants.read_before_waiting),
    Mutant("messages of two peers swapped", "own", "nodes", "numbers", plants.messages_swapped),
    Mutant("the arbiter decides again under recompute", "own", "arbiter", "crash", plants_balance.decides_again),
    Mutant("samples moved, labels stayed", "NetMoE", "placed", "numbers", plants_balance.labels_stay),
    Mutant("results in another sample's place", "NetMoE", "placed", "numbers", plants_balance.slots_reversed),
    Mutant("experts moved, counts stayed", "own", "experts", "numbers", plants_balance.counts_by_number),
    Mutant("experts moved, gradients stayed", "SmartMoE", "experts", "numbers", plants_balance.gradients_stay),
    Mutant("a dependency removed", "own", "step", "validator", change=plants.edge_removed),
    Mutant("partial sums not declared", "own", "step", "validator", change=plants.partial_forgotten),
)


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant."""

    mutant: Mutant
    caught_by: Catcher
    how: str
    """The quantities that were wrong, or the error."""


def judge(mutant: Mutant) -> Verdict:
    """Run a mutant that needs no processes, and say who catches it."""
    assert mutant.case != "gloo", f"{mutant.name} needs processes"
    try:
        errors = run_case(CASES[mutant.case], lambda compiled: _validated(mutant, compiled), mutant.patch)
    except ProgramError as error:
        return Verdict(mutant, "validator", str(error))
    except Exception as error:  # any error catches a bug
        return Verdict(mutant, "crash", f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
    wrong = failures(CASES[mutant.case], errors)
    return Verdict(mutant, "numbers" if wrong else "nobody", ", ".join(f"{q} {e:.1e}" for q, e in wrong.items()))


def _validated(mutant: Mutant, compiled: Compiled) -> Compiled:
    changed = compiled if mutant.change is None else mutant.change(compiled)
    validate(changed.forward)
    validate(changed.backward)
    return changed
