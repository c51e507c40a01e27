"""Layouts of other training systems: read from Megatron's flags, predicted on a cluster, and ours in the words of others.

What a system overlaps and shards is data here (`OthersLayout`), so that a published step and somebody's flags are predicted by
one function, and by the same models of time and memory as our own plans.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from moesaic.configfile import suggestion
from moesaic.cost.cluster import ClusterSpec
from moesaic.cost.simulate import Simulator
from moesaic.cost.step import Sharded, StepCostModel, StepModel
from moesaic.errors import InputError
from moesaic.plan.findings import Found
from moesaic.plan.layouts import compile_on
from moesaic.plan.model import Job
from moesaic.plan.plan import AllToAll, Crossing, Plan
from moesaic.program.grid import Grid


@dataclass(frozen=True, kw_only=True)
class OthersLayout:
    """How a system splits a model over ranks, and what it runs at once."""

    tp: int = 1
    """Tensor parallelism of attention."""
    pp: int = 1
    """Pipeline stages."""
    virtual_pp: int = 1
    """Runs of layers that a rank has of the pipeline."""
    virtual_layers: int = 0
    """Layers of such a run, where these are given and `virtual_pp` is not; 0 where they are not."""
    mtp: int = 0
    """Further tokens that are predicted, each by a block of its own with a projection of twice a token's width before it."""
    cp: int = 1
    """Context parallelism: so many ranks share a sequence."""
    ep: int = 1
    """Expert parallelism."""
    etp: int = 1
    """Tensor parallelism of experts."""
    micro_batch: int = 1
    """Sequences of a data-parallel group at once."""
    global_batch: int = 0
    """Sequences of an optimizer step; 0 for one micro-batch of every group."""
    recompute: bool = False
    """Blocks are computed again in backward."""
    sharded: Sharded = "optimizer"
    """As of `StepModel`."""
    all_to_all: AllToAll = "linear"
    """What comes nearest to its dispatcher among ours."""
    overlapped: bool = False
    """All-to-alls run beside another micro-batch's computing."""
    float32_states: bool = True
    """Gradients and moments have four bytes."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            least = 0 if each.name in ("global_batch", "virtual_layers", "mtp") else 1
            if each.type == "int" and value < least:
                raise InputError(f"layout: {each.name}={value}: must be at least {least}")


STRATEGIES: dict[str, Sharded] = {
    "no_shard": "none", "optim": "optimizer", "optim_grads": "gradients", "optim_grads_params": "parameters",
}  # fmt: skip
"""What Megatron's FSDP calls what lies in parts."""
MEGATRON: dict[str, tuple[str, Any]] = {
    "tensor-model-parallel-size": ("tp", int),
    "pipeline-model-parallel-size": ("pp", int),
    "num-virtual-stages-per-pipeline-rank": ("virtual_pp", int),
    "num-layers-per-virtual-pipeline-stage": ("virtual_layers", int),
    "mtp-num-layers": ("mtp", int),
    "context-parallel-size": ("cp", int),
    "expert-model-parallel-size": ("ep", int),
    "expert-tensor-parallel-size": ("etp", int),
    "micro-batch-size": ("micro_batch", int),
    "global-batch-size": ("global_batch", int),
    "recompute-granularity": ("recompute", lambda word: word == "full"),
    "overlap-moe-expert-parallel-comm": ("overlapped", None),
    "use-distributed-optimizer": ("sharded", "optimizer"),
    "data-parallel-sharding-strategy": ("sharded", STRATEGIES),
    "moe-enable-deepep": ("all_to_all", "multicast"),
    "moe-token-dispatcher-type": ("all_to_all", lambda word: "multicast" if word == "flex" else "linear"),
}
"""Megatron's flags that say how a model is split: the field, and how a word becomes its value, or what each word means; None
for a flag that stands alone, and a text for one that stands alone and sets this unless another flag says more."""


def from_megatron(flags: str) -> OthersLayout:
    """Return the layout that Megatron's flags ask for; flags that split nothing are passed over.

    Raises:
        InputError: if no flag is known, one lacks its number, or a number is none.
    """
    found: dict[str, Any] = {}
    try:
        words = [part for word in shlex.split(flags) for part in word.split("=", 1)]
    except ValueError as error:
        raise InputError(f"--explain: the flags do not parse ({error}): close what is quoted") from error
    for place, word in enumerate(words):
        field, make = (
            MEGATRON.get(word.lstrip("-").replace("_", "-"), ("", None)) if word.startswith("--") else ("", None)
        )
        if not field:
            continue
        if make is None or isinstance(make, str):
            found.setdefault(field, True if make is None else make)
            continue
        given = words[place + 1] if place + 1 < len(words) else ""
        if isinstance(make, dict):
            if given not in make:
                raise InputError(f"--explain: {word}={given!r}: choose one of {', '.join(make)}")
            found[field] = make[given]
            continue
        try:
            found[field] = make(given)
        except ValueError as error:
            raise InputError(f"--explain: {word} needs a whole number, got {given!r}") from error
    if not found:
        first = next((word for word in words if word.startswith("--")), "nothing")
        near = suggestion(first.lstrip("-"), list(MEGATRON)) if first != "nothing" else ""
        raise InputError(f"--explain: no flag of Megatron that splits a model is there, but {first}{near}")
    # Megatron splits experts as it splits attention, and keeps all of the optimizer on every rank, unless it is told otherwise.
    return OthersLayout(**{"etp": found.get("tp", 1), "sharded": "none", **found})


def predict(job: Job, cluster: ClusterSpec, layout: OthersLayout) -> Found:
    """Return a step under a layout of another system; its plan is the nearest of ours, without chunks.

    Pipeline stages are equal, and wait for the first and the last micro-batch only. Ranks that share a sequence have a part of
    its tokens each and the means of its scores; what they send each other hides behind them.

    Args:
        job: sizes of the model; its own batch does not count.
        cluster: all of it.
        layout: of all its ranks.

    Raises:
        InputError: if the layout does not fit the model or the cluster.
    """
    world, model = cluster.world, job.model
    split = layout.tp * layout.cp * layout.pp
    if world % split or (world // layout.pp) % (layout.ep * layout.etp):
        raise InputError(
            f"{world} ranks do not split into tp {layout.tp}, cp {layout.cp}, pp {layout.pp}, ep {layout.ep}, etp "
            f"{layout.etp}: their products must divide the ranks"
        )
    groups = world // split
    batch = layout.global_batch or groups * layout.micro_batch
    if batch % (groups * layout.micro_batch):
        raise InputError(
            f"a global batch of {batch} does not split over {groups} data-parallel groups of micro-batches of "
            f"{layout.micro_batch}: choose a multiple of {groups * layout.micro_batch}"
        )
    stage = world // layout.pp
    if model.num_layers < layout.pp or model.moe.num_experts % layout.ep or model.moe.hidden % layout.etp:
        raise InputError(
            f"pp {layout.pp}, ep {layout.ep} and etp {layout.etp} do not split the model's layers and experts"
        )
    grid = Grid(
        world=stage, tp=layout.tp, ep=layout.ep, etp=layout.etp, ranks_per_node=min(cluster.devices_per_node, stage)
    )
    plan = Plan(all_to_all=layout.all_to_all if layout.ep > 1 else "linear", order="fifo")
    step = _stage(replace(job, batch_size=groups * layout.micro_batch).step_model(cluster, groups), layout)
    step = replace(step, micro_batches=batch // (groups * layout.micro_batch))
    simulator = Simulator(cluster)
    around, compiled = StepCostModel(step, grid, simulator), compile_on(plan, grid, cluster)
    there, back = (simulator.run(each, step.layer, compiled.grid) for each in (compiled.forward, compiled.backward))
    return Found(
        plan=plan,
        grid=grid,
        estimate=around.estimate(there, back),
        memory=around.memory(compiled.forward, compiled.backward, compiled.grid),
        bound_seconds=max(around.compute_bound, around.link_bound),
    )


def _stage(step: StepModel, layout: OthersLayout) -> StepModel:
    """Return one pipeline stage of a step; the last stages' output and further predictions count for all of them alike."""
    blocks = step.num_layers + layout.mtp
    layers, runs = -(-blocks // layout.pp), layout.virtual_pp
    if layout.virtual_layers:
        runs, rest = divmod(layers, layout.virtual_layers)
        if rest:
            raise InputError(
                f"a stage of {layers} layers has no whole runs of {layout.virtual_layers}: choose a divisor"
            )
    attention = (blocks * step.attention + layout.mtp * 2 * step.layer.dim**2) / blocks
    tokens = step.layer.tokens // layout.cp
    return replace(
        step,
        num_layers=layers,
        sparse_layers=max(1, round((step.moe_layers + layout.mtp) / layout.pp)),
        attention_parameters=attention,
        outputs=1 + layout.mtp,
        vocab=step.vocab // layout.pp,
        layer=replace(step.layer, tokens=tokens),
        seq_len=step.seq_len // layout.cp,
        score_operations=step.scores,
        checkpoint_activations=layout.recompute,
        stages=layout.pp,
        virtual_stages=runs,
        overlapped=layout.overlapped,
        # Megatron asks for it wherever a model has experts and tensor parallelism.
        sequence_parallel=layout.tp > 1,
        sharded=layout.sharded,
        parameter_bytes=4 if layout.float32_states else 2,
    )


def _megatron(job: Job, found: Found) -> list[str]:
    grid, moe, model = found.grid, job.model.moe, job.model
    lines = [
        f"--tensor-model-parallel-size {grid.tp}" + " --sequence-parallel" * (grid.tp > 1), "--pipeline-model-parallel-size 1",
        f"--expert-model-parallel-size {grid.ep}", f"--expert-tensor-parallel-size {grid.etp}",
        f"--micro-batch-size {job.batch_size // grid.dp}", f"--global-batch-size {job.batch_size * job.accumulation}",
        f"--seq-length {model.seq_len}", f"--num-experts {moe.num_experts}", f"--moe-router-topk {moe.top_k}",
        f"--moe-ffn-hidden-size {moe.hidden}", "--moe-grouped-gemm", "--moe-token-dispatcher-type "
        + ("flex --moe-enable-deepep" if found.plan.crossing is not Crossing.LINK else "alltoall"),
        "--bf16", "--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather",
    ]  # fmt: skip
    lines += ["--overlap-moe-expert-parallel-comm"] * (found.plan.chunks > 1)
    lines += [
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    ] * model.checkpoint_activations
    routing = model.routing
    if routing.get("groups", 1) > 1:
        lines += [f"--moe-router-num-groups {routing['groups']} --moe-router-group-topk {routing['top_groups']}"]
    return lines


def _torchtitan(job: Job, found: Found) -> list[str]:
    grid = found.grid
    if grid.etp > 1:
        raise InputError(
            f"--emit torchtitan: it has no expert tensor parallelism, the best layout etp {grid.etp}: pin --etp 1"
        )
    return [
        f"--parallelism.tensor_parallel_degree {grid.tp}", "--parallelism.data_parallel_shard_degree -1",
        f"--parallelism.expert_parallel_degree {grid.ep}", f"--training.local_batch_size {job.batch_size // grid.dp}",
        f"--training.global_batch_size {job.batch_size * job.accumulation}", f"--training.seq_len {job.model.seq_len}",
        f"--activation_checkpoint.mode {'full' if job.model.checkpoint_activations else 'none'}",
    ]  # fmt: skip


def _moesaic(job: Job, found: Found) -> list[str]:
    grid, usual = found.grid, Plan()
    mesh = {"tp": grid.tp, "ep": grid.ep, "etp": grid.etp, "innermost": grid.innermost}
    lines = [f"--mesh.{name} {value}" for name, value in mesh.items()]
    for each in fields(Plan):
        value = getattr(found.plan, each.name)
        if value != getattr(usual, each.name):
            flag = each.name.replace("_", "-")
            lines.append(f"--plan.{flag} {value}" if not isinstance(value, bool) else f"--plan.{flag}")
    lines += [f"--batch-size {job.batch_size}", f"--accumulation {job.accumulation}"]
    return lines + ["--model.checkpoint-activations"] * job.model.checkpoint_activations


EMITTERS: dict[str, Callable[[Job, Found], list[str]]] = {
    "megatron": _megatron, "torchtitan": _torchtitan, "moesaic": _moesaic,
}  # fmt: skip
"""By the name of a training system: the flags that ask it for a layout and, as far as it has it, a plan."""
