"""Planted bugs that the conformance cases must catch.

Each is a mistake that somebody has made, or one that a pass could make. Its source is given as
repository#number of a public thread, or as the name of a paper or of its code. A mutant is the
library with one such bug; a case compares a layer on several ranks with a float64 reference.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch

from moesaic.program.compile import Compiled
from moesaic.program.grid import Grid
from moesaic.program.plan import Plan
from moesaic.program.validate import ProgramError, validate
from moesaic.routing.capacity import Capacity, Dropless
from moesaic.routing.losses import Importance, LoadBalance, ZLoss
from moesaic.runtime import expert_parallel, messages
from moesaic.testing.cases import Case
from moesaic.testing.equivalence import Patch, Ran, ran_case
from moesaic.testing.runner import ProcessCase, run_on_gloo
from moesaic_lab.planted import plants

Catcher = Literal["validator", "crash", "numbers", "nobody"]
"""What caught a bug: the validator of programs, an exception, wrong numbers, or nothing."""

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
_SMALL = replace(
    BASE, grid=Grid(world=4, tp=2, ep=2, etp=2), lengths=((4, 3),), padding=False, evaluate=False
)
_ACROSS = Grid(world=4, ep=4, ranks_per_node=2)
CASES: dict[str, Case] = {
    "step": BASE,
    "once": replace(BASE, lengths=BASE.lengths[:1], evaluate=False),
    "recompute": replace(BASE, recompute=True, router="noisy", evaluate=False, seed=12),
    "drops": replace(BASE, capacity=Capacity.fixed(0.7), seed=13),
    "chunks": replace(
        _SMALL,
        plan=Plan(schedule="s2", chunks=2),
        experts="gelu",
        top_k=4,
        lengths=((4, 4),),
        seed=14,
    ),
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
        plan=Plan(replication="arbiter"),
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
        plan=Plan(schedule="s1", replication="shadow"),
        num_experts=8,
        lengths=((4, 3, 5, 2), (3, 4, 2, 5)),
        by_policy=True,
        experts_move=True,
        skew=4.0,
        evaluate=False,
        seed=22,
    ),
    "unlike": replace(
        BASE,
        grid=Grid(world=8, tp=4, ep=2, etp=2),
        lengths=((4, 3), (3, 4)),
        padding=False,
        evaluate=False,
        seed=23,
    ),
    "shared": replace(_SMALL, shared=True, lengths=((4, 3), (3, 4)), seed=24),
    "global": replace(
        BASE, losses=(LoadBalance(0.7, level="global_batch"),), evaluate=False, seed=25
    ),
    "codec": replace(_SMALL, plan=Plan(schedule="s2", codec="int8"), router="softmax", seed=18),
}
"""The cases that mutants run on, by name."""
GLOO = tuple(
    replace(
        BASE,
        grid=Grid(world=4, tp=tp, ep=ep, etp=etp),
        lengths=((4, 3, 2, 4)[: 4 // tp], (3, 4, 2, 3)[: 4 // tp]),
        seed=19,
    )
    for tp, ep, etp in ((2, 2, 2), (2, 2, 1), (4, 2, 1), (1, 4, 1), (1, 1, 2))
)
"""The cases for mutants that need processes, on several meshes of four ranks."""


@dataclass(frozen=True)
class Mutant:
    """A planted bug."""

    name: str
    source: str
    """Where the bug was seen: a thread as repository#number, a paper, or "own"."""
    case: str
    """Key of `CASES`, or "gloo" for the cases `GLOO`."""
    caught_by: Catcher
    """What must catch the bug; a test verifies it."""
    patch: Patch = nullcontext
    """Context manager that replaces parts of the library while the case runs."""
    change: Callable[[Compiled], Compiled] | None = None
    """Changes the compiled programs; None to leave them."""
    off_by: str = ""
    """The first ratio that the failure must name, such as "expert gradient: 2"; empty if none does,
    and for gradient norms."""


MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "expert gradients scaled by ep",
        "DeepSpeed#5618, pytorch#160285",
        "once",
        "numbers",
        plants.experts_times(lambda layer, grid: grid.ep),
        off_by="expert gradient: 2",
    ),
    Mutant(
        "expert gradients averaged over their copies only",
        "Megatron-LM#5956, DeepSpeed#6546",
        "once",
        "numbers",
        plants.experts_times(lambda layer, grid: grid.dp / grid.edp),
        off_by="expert gradient: 2",
    ),
    Mutant(
        "expert gradients scaled for tp, made good for etp",
        "Megatron-LM#7165, #7160",
        "unlike",
        "numbers",
        plants.experts_times(lambda layer, grid: grid.tp / grid.etp),
        off_by="expert gradient: 2",
    ),
    Mutant(
        "expert gradients divided by all ranks",
        "own",
        "once",
        "numbers",
        plants.experts_times(lambda layer, grid: 1 / grid.tp),
        off_by="expert gradient: 0.5",
    ),
    Mutant(
        "expert gradients a mean over chunks",
        "own",
        "chunks",
        "numbers",
        plants.experts_times(lambda layer, grid: 1 / layer.on_mesh.compiled.plan.chunks),
        off_by="expert gradient: 0.5",
    ),
    Mutant(
        "expert gradients not summed over their copies",
        "Megatron-LM#5916, fairseq#4220",
        "once",
        "numbers",
        plants.experts_summed_over(None),
    ),
    Mutant(
        "expert gradients summed over the dense axis",
        "Megatron-LM#5916",
        "once",
        "numbers",
        plants.experts_summed_over("dp"),
    ),
    Mutant(
        "shards of an expert summed",
        "Megatron-LM#5916",
        "once",
        "numbers",
        plants.experts_summed_over("etp"),
    ),
    Mutant(
        "all gradients averaged twice",
        "own",
        "once",
        "numbers",
        plants.everything_times(lambda grid: 1 / grid.dp),
        off_by="router gradient: 0.25",
    ),
    Mutant(
        "all gradients summed, never averaged",
        "own",
        "once",
        "numbers",
        plants.everything_times(lambda grid: grid.dp),
        off_by="router gradient: 4",
    ),
    Mutant(
        "router's gradient not reduced over dp",
        "torchtitan#4054",
        "once",
        "numbers",
        plants.gradients_then(plants.router_of_own_group),
    ),
    Mutant(
        "S1: the gate's gradient not summed over tp",
        "Parm; torchtitan#2416",
        "once",
        "numbers",
        plants.replaced(
            expert_parallel, "share", lambda transport, group, value: value.view_as(value)
        ),
    ),
    Mutant(
        "S1: the gate's gradient averaged over tp",
        "own",
        "once",
        "numbers",
        plants.replaced(expert_parallel, "share", plants.averaged_over_peers),
        off_by="router gradient: 0.5",
    ),
    Mutant(
        "router trained by its losses alone",
        "Automodel#2995",
        "once",
        "numbers",
        plants.weights_without_gradient,
    ),
    Mutant(
        "router's gradient from local experts only",
        "transformers#48205",
        "once",
        "numbers",
        plants.weights_of_local_experts,
    ),
    Mutant(
        "selection bias in the routing weights",
        "PaddleFormers#3452",
        "step",
        "numbers",
        plants.biased_weights,
    ),
    Mutant(
        "noise drawn by every tensor rank",
        "own",
        "recompute",
        "numbers",
        plants.noise_of_every_rank,
    ),
    Mutant(
        "auxiliary loss scaled by tp",
        "Megatron-LM#5047, #7452 (10)",
        "once",
        "numbers",
        plants.loss_share(lambda grid: grid.dp * grid.tp),
    ),
    Mutant(
        "auxiliary loss too small by dp",
        "Megatron-LM#3672",
        "once",
        "numbers",
        plants.loss_share(lambda grid: 1),
    ),
    Mutant(
        "auxiliary loss never reaches the router",
        "Automodel#1408; ScheMoE",
        "once",
        "numbers",
        plants.loss_never_used,
    ),
    Mutant(
        "auxiliary losses of a rank's own tokens",
        "own",
        "once",
        "numbers",
        plants.losses_of_own_tokens,
    ),
    Mutant(
        "load-balance loss nearly constant",
        "hyper-parallel#752",
        "step",
        "numbers",
        plants.load_balance(plants.balance_over_wrong_pairs),
    ),
    Mutant(
        "load-balance loss without the number of experts",
        "Automodel#1408",
        "once",
        "numbers",
        plants.load_balance(plants.balance_without_experts),
        off_by="auxiliary loss: 0.25",
    ),
    Mutant(
        "load-balance loss counts choices per token",
        "own",
        "once",
        "numbers",
        plants.load_balance(plants.balance_of_choices),
        off_by="auxiliary loss: 2",
    ),
    Mutant(
        "load of a step over the tokens of a micro-batch",
        "Megatron-LM#7197",
        "global",
        "numbers",
        plants.load_balance(plants.balance_of_this_micro_batch),
        off_by="auxiliary loss: 2",
    ),
    Mutant(
        "softmax twice before the load-balance loss",
        "transformers#45120",
        "step",
        "numbers",
        plants.softmax_again,
    ),
    Mutant(
        "copies counted again under recompute",
        "torchtitan#1593",
        "recompute",
        "numbers",
        plants.counting(lambda layer, routed, replaying: replaying),
        off_by="counts: 2",
    ),
    Mutant(
        "copies counted by every tensor rank",
        "Megatron-DeepSpeed#63",
        "once",
        "numbers",
        plants.counting_anew(plants.every_tensor_rank),
        off_by="counts: 2",
    ),
    Mutant(
        "copies of other ranks not counted",
        "torchtitan#4154",
        "once",
        "numbers",
        plants.counting_anew(plants.own_copies),
    ),
    Mutant(
        "evaluation tokens in the bias update",
        "torchtitan#4148",
        "step",
        "numbers",
        plants.counting(lambda layer, routed, replaying: not layer.training),
    ),
    Mutant(
        "padding in the bias update", "Megatron-LM#6114", "once", "numbers", plants.padding_counts
    ),
    Mutant("padding is routed", "torchtitan#4168", "once", "numbers", plants.padding_routed),
    Mutant(
        "padding mask of another group's tokens",
        "Megatron-LM#7452 (5)",
        "once",
        "numbers",
        plants.padding_mask_of_others,
    ),
    Mutant(
        "bias updated per micro-batch",
        "torchtitan#1304",
        "step",
        "numbers",
        plants.bias_each_micro_batch,
    ),
    Mutant(
        "routing again under recompute", "Automodel#2635", "recompute", "crash", plants.routes_again
    ),
    Mutant(
        "drops per rank instead of global", "the papers", "drops", "numbers", plants.drops_per_rank
    ),
    Mutant("counts over the wrong axis", "FastMoE", "baseline", "crash", plants.counted_over_tp),
    Mutant(
        "gradient norm without experts",
        "Megatron-LM#5916, FastMoE#29",
        "gloo",
        "numbers",
        plants.norm_without_experts,
    ),
    Mutant("gradient norm counts replicas", "own", "gloo", "numbers", plants.norm_with_replicas),
    Mutant(
        "gradient norm: experts of one tensor rank only",
        "Megatron-LM#5916, radixark/Megatron-LM#80",
        "gloo",
        "numbers",
        plants.norm_of_first_tensor_rank,
    ),
    Mutant(
        "gradient norm: dense weights once per tensor rank",
        "ROCm/TransformerEngine#715",
        "gloo",
        "numbers",
        plants.norm_of_every_tensor_rank,
    ),
    Mutant(
        "gradient norm: experts once per copy",
        "own",
        "gloo",
        "numbers",
        plants.norm_of_every_expert_copy,
    ),
    Mutant(
        "input gradient summed over tp twice",
        "own",
        "once",
        "numbers",
        plants.input_gradient_summed_over_tp,
    ),
    Mutant(
        "gathered rows' gradient sliced, not summed",
        "Automodel#1260",
        "chunks",
        "validator",
        change=plants.shards_not_summed_backward,
    ),
    Mutant(
        "shared expert's partial sums not added",
        "tpu-inference#3435",
        "shared",
        "numbers",
        plants.shared_partial,
        off_by="shared gradient: 0.5",
    ),
    Mutant(
        "shared expert's gradient taken for a routed one's",
        "own",
        "shared",
        "numbers",
        plants.gradients_then(plants.shared_of_its_copies),
    ),
    Mutant(
        "first expert skipped in combine",
        "sglang#26473",
        "once",
        "numbers",
        plants.first_expert_skipped,
    ),
    Mutant(
        "results put back by the order that sorted them",
        "own",
        "once",
        "numbers",
        plants.replaced(messages, "placed", plants.sorted_again),
    ),
    Mutant(
        "2DH divides by the wrong size",
        "Tutel, algorithm 2",
        "nodes",
        "crash",
        plants.stride_by_columns,
    ),
    Mutant(
        "partial sums of shards not summed",
        "own",
        "chunks",
        "numbers",
        plants.replaced(messages, "placed", plants.last_shard_only),
        off_by="expert gradient: 0.5",
    ),
    Mutant(
        "output bias added by every shard",
        "torchtitan#4245",
        "chunks",
        "numbers",
        plants.bias_of_every_shard,
        off_by="expert gradient: 2",
    ),
    Mutant("chunks of weights swapped", "own", "chunks", "numbers", change=plants.chunks_swapped),
    Mutant(
        "gather of a replicated gradient reduced",
        "own",
        "chunks",
        "numbers",
        change=plants.last_gather_reduced,
        off_by="expert gradient: 2",
    ),
    Mutant(
        "baseline's copies not divided",
        "Parm, eq. 1; Megatron-DeepSpeed#63",
        "baseline",
        "numbers",
        change=plants.backward_scale_dropped,
        off_by="expert gradient: 2",
    ),
    Mutant("visits off by one", "own", "multicast", "numbers", plants.node_tokens_off_by_one),
    Mutant("gradients coded", "ScheMoE", "codec", "numbers", change=plants.gradients_coded),
    Mutant(
        "codec on the wrong side: own rows coded", "own", "codec", "numbers", plants.own_rows_coded
    ),
    Mutant("read before waiting", "own", "once", "numbers", plants.read_before_waiting),
    Mutant("messages of two peers swapped", "own", "nodes", "numbers", plants.messages_swapped),
    Mutant(
        "the arbiter decides again under recompute", "own", "arbiter", "crash", plants.decides_again
    ),
    Mutant("samples moved, labels stayed", "NetMoE", "placed", "numbers", plants.labels_stay),
    Mutant(
        "results in another sample's place", "NetMoE", "placed", "numbers", plants.slots_reversed
    ),
    Mutant("experts moved, counts stayed", "own", "experts", "numbers", plants.counts_by_number),
    Mutant(
        "experts moved, gradients stayed", "SmartMoE", "experts", "numbers", plants.gradients_stay
    ),
    Mutant("a dependency removed", "own", "once", "validator", change=plants.edge_removed),
    Mutant(
        "partial sums not declared", "own", "once", "validator", change=plants.partial_forgotten
    ),
)


@dataclass(frozen=True)
class MutantVerdict:
    """The result of running a mutant."""

    mutant: Mutant
    caught_by: Catcher
    how: str
    """The wrong quantities with their errors and ratios, or the exception."""
    off_by: str = ""
    """The first ratio, as in `Mutant.off_by`."""


def judge(mutant: Mutant) -> MutantVerdict:
    """Run a mutant that needs no processes and return what catches it."""
    assert mutant.case != "gloo", f"{mutant.name} needs processes"
    try:
        ran = ran_case(CASES[mutant.case], partial(_validated, mutant), mutant.patch)
        return _verdict_of(mutant, ran)
    except ProgramError as error:
        return MutantVerdict(mutant, "validator", str(error))
    except Exception as error:  # any exception catches a bug
        first_line, _, _ = str(error).partition("\n")
        return MutantVerdict(mutant, "crash", f"{type(error).__name__}: {first_line}")


def judge_on_gloo(mutant: Mutant, ran: Sequence[Ran]) -> MutantVerdict:
    """Return what catches a mutant that needs processes.

    Args:
        ran: the results of the cases `GLOO`, run with the mutant.
    """
    wrong = [each for each in ran if each.wrong]
    return _verdict_of(mutant, wrong[0] if wrong else ran[0])


def _verdict_of(mutant: Mutant, ran: Ran) -> MutantVerdict:
    """Return the verdict on a mutant that ran without an exception."""
    ratios = [f"{quantity}: {ratio:.4g}" for quantity, ratio in ran.ratios.items()]
    return MutantVerdict(
        mutant,
        caught_by="numbers" if ran.wrong else "nobody",
        how=", ".join(ran.wrong),
        off_by=ratios[0] if ratios else "",
    )


def _validated(mutant: Mutant, compiled: Compiled) -> Compiled:
    """Return the compiled plan with the mutant's change, once its programs are valid."""
    changed = compiled if mutant.change is None else mutant.change(compiled)
    validate(changed.forward)
    validate(changed.backward)
    return changed


def judge_all(workers: int, told: Callable[[str], object]) -> Iterator[MutantVerdict]:
    """Yield the verdicts on the mutants that need no processes, in the order of `MUTANTS`.

    Args:
        workers: number of processes that run the mutants; 1 runs them in this process.
        told: called with each mutant's name after it has run.
    """
    numbers = [number for number, mutant in enumerate(MUTANTS) if mutant.case != "gloo"]
    with ExitStack() as stack:
        run: Callable[..., Iterable[tuple[Catcher, str, str]]] = map
        if workers > 1:
            context = multiprocessing.get_context("spawn")
            pool = ProcessPoolExecutor(workers, context, torch.set_num_threads, (1,))
            run = stack.enter_context(pool).map
        for number, (caught_by, how, off_by) in zip(numbers, run(_judge_number, numbers)):
            mutant = MUTANTS[number]
            told(mutant.name)
            yield MutantVerdict(mutant, caught_by, how, off_by)


def _judge_number(number: int) -> tuple[Catcher, str, str]:
    """Return (caught by, how, off by) of a mutant in `MUTANTS`: its verdict without the mutant,
    which cannot be pickled."""
    verdict = judge(MUTANTS[number])
    return verdict.caught_by, verdict.how, verdict.off_by


def judge_all_on_gloo() -> Iterator[MutantVerdict]:
    """Run all mutants that need processes together, and then yield their verdicts."""
    mutants = [mutant for mutant in MUTANTS if mutant.case == "gloo"]
    results = run_on_gloo([ProcessCase(case, mutant.patch) for mutant in mutants for case in GLOO])
    for number, mutant in enumerate(mutants):
        first = number * len(GLOO)
        yield judge_on_gloo(mutant, results[first : first + len(GLOO)])
