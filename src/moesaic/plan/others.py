"""Layouts of other training systems: read from Megatron's flags, predicted on a cluster, and ours in the words of others.

What a system overlaps and shards is data here (`OthersLayout`), so that a published step and somebody's flags are predicted by
one function, and by the same models of time and memory as our own plans.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np

from moesaic.configfile import suggestion
from moesaic.cost.cluster import ELEMENT_BYTES, ClusterSpec, ScoreKernel
from moesaic.cost.pipeline import Pipeline
from moesaic.cost.simulate import Simulator
from moesaic.cost.step import StepCostModel
from moesaic.cost.step_model import COSTS, PARTS, Part, Sharded, StageRun, StepModel
from moesaic.errors import InputError
from moesaic.plan.candidates import compile_on
from moesaic.plan.model import Job
from moesaic.plan.plan import AllToAll, Crossing, Plan
from moesaic.plan.search import Found
from moesaic.program.grid import Grid
from moesaic.program.passes.multicast import in_pieces


@dataclass(frozen=True, kw_only=True)
class OthersLayout:
    """How a system splits a model over ranks, and what it runs at once."""

    tp: int = 1
    """Tensor parallelism of attention."""
    pp: int = 1
    """Pipeline stages."""
    schedule: str = "1f1b"
    """Of the pipeline, a key of `SCHEDULES` (`cost/pipeline.py`)."""
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
    local_batch: int = 0
    """Sequences of a data-parallel group at once, where a pipeline cuts them into micro-batches; 0 for a micro-batch."""
    global_batch: int = 0
    """Sequences of an optimizer step; 0 for those that all groups have at once."""
    recompute: tuple[Part, ...] = ()
    """Parts of blocks that backward computes again; "block" for all of them."""
    sharded: Sharded = "optimizer"
    """As of `StepModel`."""
    replicas: int = 1
    """As of `StepModel`."""
    precision: Literal["bf16", "fp8", "mxfp8"] = "bf16"
    """Of products with parameters."""
    all_to_all: AllToAll = "linear"
    """What comes nearest to its dispatcher among ours; deepep for those whose kernels forward between nodes and inside them at
    once (DeepEP, HybridEP)."""
    overlapped: bool = False
    """All-to-alls run beside another micro-batch's computing."""
    hides_parameters: bool = True
    """As of `StepModel`."""
    hides_gradients: bool = True
    """As of `StepModel`."""
    fused_loss: bool = True
    """The loss is one kernel or few, which read logits as they are."""
    float32_states: bool = True
    """Gradients and moments have four bytes."""
    stepwise: tuple[str, ...] = ()
    """What runs step by step in eager PyTorch, in place of fused or compiled kernels."""
    score_kernel: ScoreKernel = "best"
    """What computes attention's scores: the fastest kernels of the device, FlashAttention-2, or FlexAttention."""

    @property
    def is_narrow(self) -> bool:
        """Whether products read numbers of less than two bytes."""
        return ELEMENT_BYTES[self.precision] < 2

    def sequences(self, world: int) -> int:
        """Return the sequences of an optimizer step on so many ranks."""
        groups = world // (self.tp * self.cp * self.pp)
        return self.global_batch or groups * max(self.local_batch, self.micro_batch)

    def __post_init__(self) -> None:
        for part in self.recompute:
            if part not in PARTS:
                raise InputError(f"layout: recompute={part!r}: choose of {', '.join(PARTS)}")
        for each in self.stepwise:
            if each not in COSTS:
                raise InputError(f"layout: stepwise={each!r}: choose of {', '.join(COSTS)}")
        Pipeline(schedule=self.schedule, ranks=self.pp, runs=self.virtual_pp)
        for number in fields(self):
            value = getattr(self, number.name)
            least = 0 if number.name in ("global_batch", "local_batch", "virtual_layers", "mtp") else 1
            if number.type == "int" and value < least:
                raise InputError(f"layout: {number.name}={value}: must be at least {least}")


FUSED_LOSS_BYTES, LOSS_BYTES, TORCH_LOSS_BYTES = 10, 52, 36
"""Read and written per logit of two bytes by a loss of Transformer Engine's, which goes over them five times, by that of
Megatron without it, in eight steps on a float32 copy, and by PyTorch's cross entropy of one (as of `StepModel`)."""
STRATEGIES: dict[str, Sharded] = {
    "no_shard": "none", "optim": "optimizer", "optim_grads": "gradients", "optim_grads_params": "parameters",
}  # fmt: skip
"""What Megatron's FSDP calls what lies in parts."""
RECIPES: dict[str, str] = dict.fromkeys(("delayed", "tensorwise", "blockwise"), "fp8") | {"mxfp8": "mxfp8"}
"""What Transformer Engine calls ways to scale narrow numbers."""
SCHEDULES: dict[str, str] = {
    "1F1B": "1f1b", "Interleaved1F1B": "1f1b", "InterleavedZeroBubble": "zb-h1", "ZBVZeroBubble": "zb-v",
    "DualPipeV": "dualpipev",
}  # fmt: skip
"""What PyTorch calls the schedules of a pipeline."""
MODES: dict[str, tuple[Part, ...]] = {"none": (), "full": ("block",), "selective": ("layernorm", "moe")}
"""What torchtitan calls what is computed again. Selective keeps the scores and every second dense product; grouped products are
not among the operations whose results it keeps (its `_op_sac_save_list`). Dense products are counted as if it kept all."""


class Alone(NamedTuple):
    """A flag without a value, and what it sets; where `yields`, unless another flag says more."""

    value: Any
    yields: bool = False


MEGATRON: dict[str, tuple[str, Any]] = {
    "tensor-model-parallel-size": ("tp", int),
    "pipeline-model-parallel-size": ("pp", int),
    "num-virtual-stages-per-pipeline-rank": ("virtual_pp", int),
    "num-layers-per-virtual-pipeline-stage": ("virtual_layers", int),
    "enable-zero-bubble": ("schedule", Alone("zb-h1", yields=True)),
    "zero-bubble-v-schedule": ("schedule", Alone("zb-v")),
    "schedules-method": ("schedule", {"dualpipev": "dualpipev"}),
    "mtp-num-layers": ("mtp", int),
    "context-parallel-size": ("cp", int),
    "expert-model-parallel-size": ("ep", int),
    "expert-tensor-parallel-size": ("etp", int),
    "micro-batch-size": ("micro_batch", int),
    "global-batch-size": ("global_batch", int),
    "recompute-activations": ("recompute", Alone(("core_attn",), yields=True)),
    "recompute-granularity": ("recompute", {"full": ("block",), "selective": ("core_attn",)}),
    "recompute-modules": ("recompute", list),
    "overlap-moe-expert-parallel-comm": ("overlapped", Alone(True)),
    "use-distributed-optimizer": ("sharded", Alone("optimizer", yields=True)),
    "num-distributed-optimizer-instances": ("replicas", int),
    "data-parallel-sharding-strategy": ("sharded", STRATEGIES),
    "overlap-param-gather": ("hides_parameters", Alone(True)),
    "overlap-grad-reduce": ("hides_gradients", Alone(True)),
    "cross-entropy-loss-fusion": ("fused_loss", Alone(True)),
    "moe-enable-deepep": ("all_to_all", Alone("deepep", yields=True)),
    "moe-token-dispatcher-type": ("all_to_all", lambda word: "deepep" if word == "flex" else "linear"),
    "fp8-format": ("precision", lambda word: "fp8"),
    "fp8-recipe": ("precision", RECIPES),
}
"""Flags of Megatron, and of what is built on it (zero bubbles, DualPipeV), that say how a model is split: the field, and how a
word becomes its value, or what each word means; `list` for several words."""
APART = ("hides_parameters", "hides_gradients", "fused_loss")
"""Fields that Megatron has to be told."""
TORCHTITAN: dict[str, tuple[str, Any]] = {
    "parallelism.tensor-parallel-degree": ("tp", int),
    "parallelism.pipeline-parallel-degree": ("pp", int),
    "parallelism.pipeline-parallel-schedule": ("schedule", SCHEDULES),
    "parallelism.pipeline-parallel-microbatch-size": ("micro_batch", int),
    "parallelism.context-parallel-degree": ("cp", int),
    "parallelism.expert-parallel-degree": ("ep", int),
    "parallelism.expert-tensor-parallel-degree": ("etp", int),
    "parallelism.data-parallel-replicate-degree": ("replicas", int),
    "training.local-batch-size": ("local_batch", int),
    "training.global-batch-size": ("global_batch", int),
    "activation-checkpoint.mode": ("recompute", MODES),
}
"""The same of torchtitan."""


def from_flags(flags: str) -> OthersLayout:
    """Return the layout that flags of Megatron or torchtitan ask for; flags that split nothing are passed over.

    Raises:
        InputError: if no flag is known, one lacks its value, or a value is none that it takes.
    """
    found: dict[str, Any] = {}
    try:
        words = [part for word in shlex.split(flags) for part in word.split("=", 1)]
    except ValueError as error:
        raise InputError(f"--explain: the flags do not parse ({error}): close what is quoted") from error
    known, weak = MEGATRON | TORCHTITAN, dict[str, Any]()
    named = {place: word.lstrip("-").replace("_", "-") for place, word in enumerate(words) if word.startswith("--")}
    for place, name in named.items():
        field, make = known.get(name, ("", None))
        if isinstance(make, Alone):
            (weak if make.yields else found)[field] = make.value
        elif field:
            until = min((other for other in named if other > place), default=len(words))
            found[field] = _value(words[place], words[place + 1 : until], make)
    found = weak | found
    if not found:
        first = next((word for word in words if word.startswith("--")), "nothing")
        near = suggestion(first.lstrip("-"), list(known)) if first != "nothing" else ""
        raise InputError(
            f"--explain: no flag of Megatron or torchtitan that splits a model is there, but {first}{near}"
        )
    if any(name in TORCHTITAN for name in named.values()):
        # FSDP2 gathers parameters for every block, but keeps them whole between the micro-batches of a pipeline.
        local = found.get("local_batch", 1)
        micro = local if found.get("pp", 1) == 1 else found.get("micro_batch", 1)
        sharded: Sharded = "parameters" if found.get("pp", 1) == 1 else "gradients"
        return OthersLayout(**{"sharded": sharded, **found, "local_batch": local, "micro_batch": micro})
    # Megatron splits experts as it splits attention, keeps all of the optimizer on every rank, hides no parameters and
    # gradients, and computes the loss step by step, unless it is told otherwise.
    return OthersLayout(**{"etp": found.get("tp", 1), "sharded": "none", **dict.fromkeys(APART, False), **found})


SIZES: dict[str, Callable[[Job], int]] = {
    "seq-length": lambda job: job.model.seq_len, "training.seq-len": lambda job: job.model.seq_len,
    "num-layers": lambda job: job.model.num_layers, "hidden-size": lambda job: job.model.dim,
    "num-experts": lambda job: job.model.moe.num_experts, "moe-router-topk": lambda job: job.model.moe.top_k,
    "moe-ffn-hidden-size": lambda job: job.model.moe.hidden,
}  # fmt: skip
"""Flags that say what is trained, and what a job says of it."""
ASSUMED = (
    "sequence-parallel", "use-megatron-fsdp", "recompute-method", "recompute-num-layers",
    "parallelism.data-parallel-shard-degree",
)  # fmt: skip
"""Flags whose usual value a prediction takes."""
MATTERING = ("parallel", "pipeline", "offload", "overlap", "capacity", "dtype", "checkpoint", "recompute", "converters")
"""Parts of names of flags that may change how long a step takes, or its memory."""


def unread_flags(flags: str, job: Job) -> list[str]:
    """Return the flags of a layout that may matter and that no prediction reads.

    Args:
        flags: as of `from_flags`.
        job: what is trained.

    Raises:
        InputError: if the flags are those of another model, or of longer or shorter sequences.
    """
    words = [part for word in shlex.split(flags) for part in word.split("=", 1)]
    names = {word: word.lstrip("-").replace("_", "-") for word in words if word.startswith("--")}
    for word, value in pairwise(words):
        size = SIZES.get(names.get(word, ""))
        if size is not None and value.isdecimal() and int(value) != size(job):
            flag = " (--seq-len)" if "seq" in word else ""
            raise InputError(f"--explain: {word} {value}, and what is planned has {size(job)}: make them agree{flag}")
    read = {*MEGATRON, *TORCHTITAN, *SIZES, *ASSUMED}
    return [word for word, name in names.items() if name not in read and any(part in name for part in MATTERING)]


def _value(flag: str, given: list[str], make: Any) -> Any:
    """Return what a flag's words mean."""
    if make is list:
        if not given:
            raise InputError(f"--explain: {flag} is empty: name at least one of {', '.join(PARTS)}")
        return tuple(given)
    word = given[0] if given else ""
    if isinstance(make, dict):
        if word not in make:
            raise InputError(f"--explain: {flag}={word!r}: choose one of {', '.join(make)}")
        return make[word]
    try:
        return make(word)
    except ValueError as error:
        raise InputError(f"--explain: {flag} needs a whole number, got {word!r}") from error


def predict(job: Job, cluster: ClusterSpec, layout: OthersLayout) -> Found:
    """Return a step under a layout of another system; its plan is the nearest of ours, without chunks.

    Blocks are dealt to the pipeline's stages in runs, of unequal ones the first are longer; the last has the output. Ranks that
    share a sequence have a part of its tokens each and the means of its scores, and pass keys and values round behind them.

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
    batch = layout.sequences(world)
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
    by_deepep = Plan(all_to_all=layout.all_to_all).crossing is Crossing.DEEPEP and layout.ep > 1
    crossing = "multicast" if by_deepep else layout.all_to_all
    plan = Plan(all_to_all=crossing if layout.ep > 1 else "linear", order="fifo")
    whole = replace(job, batch_size=groups * layout.micro_batch).step_model(cluster, groups)
    whole = replace(whole, micro_batches=batch // (groups * layout.micro_batch))
    step, simulator = _stage(whole, layout), Simulator(cluster)
    step = replace(step, runs=_runs(job, whole, step, layout.mtp))
    around, compiled = StepCostModel(step, grid, simulator), compile_on(plan, grid, simulator, step.layer)
    programs = compiled.forward, compiled.backward
    forward, backward = map(in_pieces, programs) if by_deepep else programs
    there, back = simulator.passes(forward, backward, step.layer, compiled.grid)
    both = around.simulate_overlapped(forward, backward, compiled.grid) if step.overlapped else None
    ranks = [StepCostModel(each, grid, simulator) for each in _ranks(whole, step)]
    return Found(
        plan=plan,
        grid=grid,
        estimate=around.estimate(there, back, both),
        memory=max((each.memory(*programs, compiled.grid) for each in ranks), key=lambda memory: memory.total),
        bound_seconds=max(around.compute_bound, around.link_bound),
    )


def longer_by_narrow_rate(job: Job, cluster: ClusterSpec, layout: OthersLayout) -> tuple[float, float]:
    """Return between how many times its time a step may take because nobody measured narrow products as training uses them;
    1 and 1 where somebody did, or products are not narrow.

    Args:
        job, cluster, layout: as of `predict`.
    """
    device = cluster.device
    if not layout.is_narrow or not device.narrow_between:
        return 1.0, 1.0
    usual = predict(job, cluster, layout).seconds

    def seconds(times: float) -> float:
        rates = replace(device.tflops, **{layout.precision: times * getattr(device.tflops, layout.precision)})
        return predict(job, replace(cluster, device=replace(device, tflops=rates)), layout).seconds

    slow, fast = map(seconds, device.narrow_between)
    return fast / usual, slow / usual


def _stage(step: StepModel, layout: OthersLayout) -> StepModel:
    """Return the rank of a pipeline with the most layers; of the output each has an equal part, as `StepModel.runs` has not."""
    blocks = step.num_layers + layout.mtp
    layers, runs = -(-blocks // layout.pp), layout.virtual_pp
    if layout.virtual_layers:
        runs, rest = divmod(layers, layout.virtual_layers)
        if rest:
            raise InputError(
                f"a stage of {layers} layers has no whole runs of {layout.virtual_layers}: choose a divisor"
            )
    pipeline = Pipeline(schedule=layout.schedule, ranks=layout.pp, runs=runs)
    attention = (blocks * step.attention + layout.mtp * 2 * step.layer.dim**2) / blocks
    tokens = step.layer.tokens // layout.cp
    return replace(
        step,
        num_layers=layers,
        sparse_layers=-(-(step.moe_layers + layout.mtp) // layout.pp),
        attention_parameters=attention,
        outputs=1 + layout.mtp,
        vocab=step.vocab // layout.pp,
        layer=replace(step.layer, tokens=tokens, products=layout.precision if layout.is_narrow else None),
        seq_len=step.seq_len // layout.cp,
        shares_sequence=layout.cp,
        score_operations=step.scores,
        recomputed=layout.recompute,
        keeps_activated=True,
        pipeline=pipeline,
        replicas=layout.replicas,
        overlapped=layout.overlapped or pipeline.pairs,
        hides_parameters=layout.hides_parameters,
        hides_gradients=layout.hides_gradients,
        loss_bytes=_loss_bytes(layout),
        stepwise=layout.stepwise,
        score_kernel=layout.score_kernel,
        # Megatron asks for it wherever a model has experts and tensor parallelism.
        sequence_parallel=layout.tp > 1,
        sharded=layout.sharded,
        parameter_bytes=4 if layout.float32_states else 2,
        # FSDP2 and Megatron's gather what products read (mixed precision), not the float32 master.
        gathered_bytes=step.layer.element_bytes,
    )


def _loss_bytes(layout: OthersLayout) -> int:
    """Return what the loss reads and writes per logit."""
    if "loss" in layout.stepwise:
        return TORCH_LOSS_BYTES
    return FUSED_LOSS_BYTES if layout.fused_loss else LOSS_BYTES


def _runs(job: Job, whole: StepModel, step: StepModel, mtp: int) -> tuple[StageRun, ...]:
    """Return the runs of layers of a pipeline; () without one.

    Blocks are dealt in equal numbers, of unequal ones the first are longer; further predictions come last, and the output.
    """
    count = step.pipeline.num_runs
    if count == 1:
        return ()
    sparse = [job.model.is_sparse(block) for block in range(whole.num_layers)] + [True] * mtp
    return tuple(
        StageRun(len(run), int(run.sum()), step.outputs * (number == count - 1))
        for number, run in enumerate(np.array_split(np.array(sparse), count))
    )


def _ranks(whole: StepModel, step: StepModel) -> list[StepModel]:
    """Return every rank of a pipeline with the blocks that it has, and with the embedding or the output if it has them."""
    if not step.runs:
        return [step]
    alive, found = step.pipeline.alive(step.micro_batches), []
    for rank, numbers in enumerate(step.pipeline.runs_of_ranks):
        runs = [step.runs[number] for number in numbers]
        embeds, ends = 0 in numbers, any(run.outputs for run in runs)
        found.append(
            replace(
                step,
                num_layers=max(sum(run.blocks for run in runs), 1),
                sparse_layers=sum(run.sparse for run in runs),
                vocab=whole.vocab * (embeds or ends),
                embeddings=max(1, embeds + ends * (whole.embeddings - 1)) if embeds and ends else 1,
                outputs=step.outputs * ends,
                pipeline=Pipeline(),
                runs=(),
                alive=alive[rank],
            )
        )
    return list(dict.fromkeys(found))


def layout_of(job: Job, found: Found) -> OthersLayout:
    """Return what comes nearest to a plan of ours among the layouts of other systems."""
    grid, plan = found.grid, found.plan
    return OthersLayout(
        tp=grid.tp,
        ep=grid.ep,
        etp=grid.etp,
        micro_batch=job.batch_size // grid.dp,
        global_batch=job.batch_size * job.accumulation,
        recompute=("block",) if job.model.checkpoint_activations else (),
        all_to_all="multicast" if plan.crossing is not Crossing.LINK else "linear",
        overlapped=plan.chunks > 1,
        sharded="parameters",
    )


def _only(system: str, layout: OthersLayout, **known: tuple[Any, ...]) -> None:
    """Raise InputError if a layout has what a system has not.

    Args:
        system: its name.
        layout: to write.
        known: the values of fields that it has.
    """
    for name, values in known.items():
        if getattr(layout, name) not in values:
            raise InputError(
                f"--emit {system}: it has no {name}={getattr(layout, name)!r}: choose {' or '.join(map(repr, values))}, or "
                "another system"
            )


ZERO_BUBBLES = {
    "1f1b": "", "zb-h1": "--enable-zero-bubble", "zb-v": "--enable-zero-bubble --zero-bubble-v-schedule",
    "dualpipev": "--schedules-method dualpipev",
}  # fmt: skip
"""Flags of schedules, in Megatron and what is built on it."""
PRECISIONS = {
    "bf16": "", "fp8": "--fp8-format hybrid --fp8-recipe tensorwise", "mxfp8": "--fp8-format e4m3 --fp8-recipe mxfp8",
}  # fmt: skip
"""Megatron's flags of narrow products."""
CONVERTERS = {"bf16": "", "fp8": "float8", "mxfp8": "mx"}
"""Torchtitan's names of them."""


def _megatron(job: Job, layout: OthersLayout, found: Found | None) -> list[str]:
    _only("megatron", layout, schedule=tuple(ZERO_BUBBLES))
    moe, model = job.model.moe, job.model
    lines = [
        f"--tensor-model-parallel-size {layout.tp}" + " --sequence-parallel" * (layout.tp > 1),
        f"--pipeline-model-parallel-size {layout.pp}", f"--expert-model-parallel-size {layout.ep}",
        f"--expert-tensor-parallel-size {layout.etp}", f"--micro-batch-size {layout.micro_batch}",
        f"--seq-length {model.seq_len}", f"--num-experts {moe.num_experts}", f"--moe-router-topk {moe.top_k}",
        f"--moe-ffn-hidden-size {moe.hidden}", "--moe-grouped-gemm", "--moe-token-dispatcher-type "
        + ("alltoall" if Plan(all_to_all=layout.all_to_all).crossing is Crossing.LINK else "flex --moe-enable-deepep"),
        "--bf16",
    ]  # fmt: skip
    numbers = {
        "global-batch-size": (layout.global_batch, 0), "context-parallel-size": (layout.cp, 1),
        "num-distributed-optimizer-instances": (layout.replicas, 1), "mtp-num-layers": (layout.mtp, 0),
        "num-virtual-stages-per-pipeline-rank": (layout.virtual_pp, 1),
        "num-layers-per-virtual-pipeline-stage": (layout.virtual_layers, 0),
    }  # fmt: skip
    lines += [f"--{flag} {number}" for flag, (number, usual) in numbers.items() if number != usual]
    lines += [f"--{flag}" for flag, (name, _) in MEGATRON.items() if name in APART and getattr(layout, name)]
    if layout.sharded == "optimizer":
        lines.append("--use-distributed-optimizer")
    elif layout.sharded != "none":
        strategy = next(name for name, sharded in STRATEGIES.items() if sharded == layout.sharded)
        lines.append(f"--use-megatron-fsdp --data-parallel-sharding-strategy {strategy}")
    lines += ["--overlap-moe-expert-parallel-comm"] * layout.overlapped
    if "block" in layout.recompute:
        lines.append("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1")
    elif layout.recompute:
        lines.append(f"--recompute-granularity selective --recompute-modules {' '.join(layout.recompute)}")
    lines += [flags for flags in (ZERO_BUBBLES[layout.schedule], PRECISIONS[layout.precision]) if flags]
    routing = model.routing
    if routing.get("groups", 1) > 1:
        lines += [f"--moe-router-num-groups {routing['groups']} --moe-router-group-topk {routing['top_groups']}"]
    return lines


def _torchtitan(job: Job, layout: OthersLayout, found: Found | None) -> list[str]:
    if layout.etp > 1:
        raise InputError(
            f"--emit torchtitan: it has no expert tensor parallelism, the best layout etp {layout.etp}: pin --etp 1"
        )
    _only("torchtitan", layout, mtp=(0,), recompute=tuple(MODES.values()), schedule=tuple(SCHEDULES.values()))
    mode = next(mode for mode, parts in MODES.items() if parts == layout.recompute)
    lines = [
        f"--parallelism.tensor_parallel_degree {layout.tp}", "--parallelism.data_parallel_shard_degree -1",
        f"--parallelism.expert_parallel_degree {layout.ep}",
        f"--training.local_batch_size {max(layout.local_batch, layout.micro_batch)}",
        f"--training.seq_len {job.model.seq_len}", f"--activation_checkpoint.mode {mode}",
    ]  # fmt: skip
    lines += [f"--training.global_batch_size {layout.global_batch}"] * (layout.global_batch > 0)
    lines += [f"--parallelism.context_parallel_degree {layout.cp}"] * (layout.cp > 1)
    lines += [f"--parallelism.data_parallel_replicate_degree {layout.replicas}"] * (layout.replicas > 1)
    if layout.pp > 1:
        lines += [
            f"--parallelism.pipeline_parallel_degree {layout.pp}",
            f"--parallelism.pipeline_parallel_schedule {_schedule_name(layout)}",
            f"--parallelism.pipeline_parallel_microbatch_size {layout.micro_batch}",
        ]
    kind = CONVERTERS[layout.precision]
    return lines + [f"--model.converters quantize.linear.{kind},quantize.grouped_mm.{kind}"] * bool(kind)


def _automodel(job: Job, layout: OthersLayout, found: Found | None) -> list[str]:
    _only("automodel", layout, schedule=tuple(SCHEDULES.values()), etp=(1,), mtp=(0,), precision=("bf16",),
          recompute=((), ("block",)))  # fmt: skip
    sizes = {"tp_size": layout.tp, "cp_size": layout.cp, "pp_size": layout.pp, "ep_size": layout.ep}
    sizes |= {"dp_replicate_size": layout.replicas} if layout.replicas > 1 else {}
    # A pipeline cuts the sequences that a data-parallel group has at once into micro-batches.
    local = max(layout.local_batch, layout.micro_batch * layout.pp)
    lines = ["--distributed.strategy fsdp2", *(f"--distributed.{name} {size}" for name, size in sizes.items())]
    lines += [f"--step_scheduler.local_batch_size {local}", f"--dataset.seq_length {job.model.seq_len}"]
    lines += [f"--step_scheduler.global_batch_size {layout.global_batch}"] * (layout.global_batch > 0)
    lines += ["--distributed.activation_checkpointing true"] * bool(layout.recompute)
    by_link = Plan(all_to_all=layout.all_to_all).crossing is Crossing.LINK
    lines += [] if by_link else ["--model.backend.dispatcher deepep"]
    if layout.pp > 1:
        lines += [
            f"--distributed.pipeline.pp_schedule {_schedule_name(layout).lower()}",
            f"--distributed.pipeline.pp_microbatch_size {layout.micro_batch}",
        ]
    return lines


def _schedule_name(layout: OthersLayout) -> str:
    """Return what PyTorch calls the schedule of a layout."""
    names = [name for name, schedule in SCHEDULES.items() if schedule == layout.schedule]
    return names[-1 if layout.virtual_pp > 1 else 0]


def _moesaic(job: Job, layout: OthersLayout, found: Found | None) -> list[str]:
    _only("moesaic", layout, schedule=("1f1b",), cp=(1,), mtp=(0,), replicas=(1,), precision=("bf16",),
          recompute=((), ("block",)))  # fmt: skip
    mesh: dict[str, Any] = {"tp": layout.tp, "ep": layout.ep, "etp": layout.etp}
    mesh |= {} if found is None else {"innermost": found.grid.innermost}
    mesh |= {"pp": f"{layout.pp} {layout.virtual_pp}"} if layout.pp > 1 else {}
    lines, usual = [f"--mesh.{name} {value}" for name, value in mesh.items()], Plan()
    plan = Plan(all_to_all=layout.all_to_all) if found is None else found.plan
    for each in fields(Plan):
        value = getattr(plan, each.name)
        if value != getattr(usual, each.name):
            flag = each.name.replace("_", "-")
            lines.append(f"--plan.{flag} {value}" if not isinstance(value, bool) else f"--plan.{flag}")
    if found is not None:
        lines += [f"--batch-size {job.batch_size}", f"--accumulation {job.accumulation}"]
    return lines + ["--model.checkpoint-activations"] * bool(layout.recompute)


EMITTERS: dict[str, Callable[[Job, OthersLayout, Found | None], list[str]]] = {
    "megatron": _megatron, "torchtitan": _torchtitan, "automodel": _automodel, "moesaic": _moesaic,
}  # fmt: skip
"""By the name of a training system: the flags that ask it for a layout and, of one of our plans, for that plan as far as the
system has it."""
