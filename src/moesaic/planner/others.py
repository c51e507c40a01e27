"""Layouts of other training systems: reads them from flags, predicts them on a cluster, and writes our layouts as flags.

`OthersLayout` describes what a system overlaps and shards. One function predicts published steps and layouts from flags, with
the models of time and memory that also predict our own plans.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np

from moesaic.configfile import suggestion
from moesaic.errors import InputError
from moesaic.planner.cluster import ELEMENT_BYTES, ClusterSpec, ScoreKernel
from moesaic.planner.model import Job
from moesaic.planner.pipeline import Pipeline
from moesaic.planner.search import PlannedStep
from moesaic.planner.simulate import Simulator
from moesaic.planner.step import StepCostModel
from moesaic.planner.step_model import COSTS, PARTS, Part, Sharded, StageRun, StepModel
from moesaic.program.compile import compile_plan
from moesaic.program.grid import Grid
from moesaic.program.passes.multicast import in_pieces
from moesaic.program.plan import AllToAll, Crossing, Plan


@dataclass(frozen=True, kw_only=True)
class OthersLayout:
    """A layout of another training system: how it splits a model over ranks, and what it overlaps and fuses."""

    tp: int = 1
    """Tensor parallelism of attention."""
    pp: int = 1
    """Pipeline stages."""
    schedule: str = "1f1b"
    """Pipeline schedule, a key of `SCHEDULES` (`planner/pipeline.py`)."""
    virtual_pp: int = 1
    """Runs of consecutive layers (virtual stages) that each pipeline rank has."""
    virtual_layers: int = 0
    """Layers per run, if given instead of `virtual_pp`; else 0."""
    mtp: int = 0
    """Number of further tokens that are predicted (multi-token prediction). Each has a block of its own, preceded by a
    projection from twice the width of a token."""
    cp: int = 1
    """Context parallelism: number of ranks that share a sequence."""
    ep: int = 1
    """Expert parallelism."""
    etp: int = 1
    """Tensor parallelism of experts."""
    micro_batch: int = 1
    """Sequences per micro-batch of a data-parallel group."""
    local_batch: int = 0
    """Sequences of a data-parallel group that a pipeline cuts into micro-batches; 0 for one micro-batch."""
    global_batch: int = 0
    """Sequences per optimizer step; 0 for one local batch of every data-parallel group."""
    recompute: tuple[Part, ...] = ()
    """Parts of blocks that backward recomputes; "block" for whole blocks."""
    sharded: Sharded = "optimizer"
    """See `StepModel.sharded`."""
    replicas: int = 1
    """See `StepModel.replicas`."""
    precision: Literal["bf16", "fp8", "mxfp8"] = "bf16"
    """Precision of matrix products with parameters."""
    all_to_all: AllToAll = "linear"
    """Our all-to-all that is most similar to the dispatcher of the system; deepep for kernels that forward tokens between and
    inside nodes at the same time (DeepEP, HybridEP)."""
    overlapped: bool = False
    """Whether all-to-alls overlap with the computing of another micro-batch."""
    hides_parameters: bool = True
    """See `StepModel.hides_parameters`."""
    hides_gradients: bool = True
    """See `StepModel.hides_gradients`."""
    fused_loss: bool = True
    """Whether one or a few kernels compute the loss, without a float32 copy of the logits."""
    float32_states: bool = True
    """Whether gradients and moments have four bytes per element."""
    stepwise: tuple[str, ...] = ()
    """Operations that run step by step in eager PyTorch instead of in fused or compiled kernels: keys of `COSTS`."""
    score_kernel: ScoreKernel = "best"
    """Kernel of the attention scores: the fastest one of the device, FlashAttention-2, or FlexAttention."""

    @property
    def is_narrow(self) -> bool:
        """Whether matrix products read elements of less than two bytes."""
        return ELEMENT_BYTES[self.precision] < 2

    def sequences(self, world: int) -> int:
        """Return the number of sequences per optimizer step on `world` ranks."""
        groups = world // (self.tp * self.cp * self.pp)
        return self.global_batch or groups * max(self.local_batch, self.micro_batch)

    def __post_init__(self) -> None:
        for part in self.recompute:
            if part not in PARTS:
                raise InputError(f"layout: recompute={part!r}: choose from {', '.join(PARTS)}")
        for operation in self.stepwise:
            if operation not in COSTS:
                raise InputError(f"layout: stepwise={operation!r}: choose from {', '.join(COSTS)}")
        Pipeline(schedule=self.schedule, ranks=self.pp, runs=self.virtual_pp)
        for field in fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name in ("global_batch", "local_batch", "virtual_layers", "mtp") else 1
            if field.type == "int" and value < least:
                raise InputError(f"layout: {field.name}={value}: must be at least {least}")


FUSED_LOSS_BYTES, LOSS_BYTES, TORCH_LOSS_BYTES = 10, 52, 36
"""Bytes read and written per logit of two bytes by three losses: that of Transformer Engine, in five passes; that of Megatron
alone, in eight steps on a float32 copy; and PyTorch's cross entropy of a float32 copy (see `StepModel.loss_bytes`)."""
STRATEGIES: dict[str, Sharded] = {
    "no_shard": "none", "optim": "optimizer", "optim_grads": "gradients", "optim_grads_params": "parameters",
}  # fmt: skip
"""Values of `sharded` by their names in Megatron's FSDP."""
RECIPES: dict[str, str] = dict.fromkeys(("delayed", "tensorwise", "blockwise"), "fp8") | {"mxfp8": "mxfp8"}
"""Precisions by the names of Transformer Engine's recipes for scaling."""
SCHEDULES: dict[str, str] = {
    "1F1B": "1f1b", "Interleaved1F1B": "1f1b", "InterleavedZeroBubble": "zb-h1", "ZBVZeroBubble": "zb-v",
    "DualPipeV": "dualpipev",
}  # fmt: skip
"""Pipeline schedules by their names in PyTorch."""
MODES: dict[str, tuple[Part, ...]] = {"none": (), "full": ("block",), "selective": ("layernorm", "moe")}
"""Recomputed parts by the names of torchtitan's modes. Mode selective keeps the scores and every second dense product, but no
grouped product, since that is not in `_op_sac_save_list` of torchtitan. Here it counts as if all dense products were kept."""


class Alone(NamedTuple):
    """A flag without a value, and the value that it sets; if `yields`, other flags for the same field win over it."""

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
"""Flags of Megatron, and of extensions of it (zero bubbles, DualPipeV), that define a layout. Each has the field that it sets,
and a function from its word to the value, a table from words to values, or `list` if it takes several words."""
APART = ("hides_parameters", "hides_gradients", "fused_loss")
"""Fields that are False in Megatron unless a flag sets them."""
RECOMPUTE = "activation-checkpoint:"
"""What torchtitan 0.3 writes before the name of a mode. It is a subcommand, after which no more flags may follow."""
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
"""Flags of torchtitan that define a layout, in the form of `MEGATRON`."""


def from_flags(flags: str) -> OthersLayout:
    """Return the layout that flags of Megatron or torchtitan define; other flags are ignored.

    Raises:
        InputError: if no flag is known, if a flag lacks its value, or if its value is unknown.
    """
    values: dict[str, Any] = {}
    try:
        words = _words(flags)
    except ValueError as error:
        raise InputError(f"--explain: the flags do not parse ({error}): close what is quoted") from error
    known, yielding = MEGATRON | TORCHTITAN, dict[str, Any]()
    named = {place: word.lstrip("-").replace("_", "-") for place, word in enumerate(words) if word.startswith("--")}
    for place, name in named.items():
        field, make = known.get(name, ("", None))
        if isinstance(make, Alone):
            (yielding if make.yields else values)[field] = make.value
        elif field:
            until = min((other for other in named if other > place), default=len(words))
            values[field] = _flag_value(words[place], words[place + 1 : until], make)
    values = yielding | values
    if not values:
        first = next((word for word in words if word.startswith("--")), "nothing")
        near = suggestion(first.lstrip("-"), list(known)) if first != "nothing" else ""
        raise InputError(f"--explain: found no flag of Megatron or torchtitan that splits a model, only {first}{near}")
    if any(name in TORCHTITAN for name in named.values()):
        # FSDP2 gathers parameters for every block, but keeps them whole between the micro-batches of a pipeline.
        local = values.get("local_batch", 1)
        micro = local if values.get("pp", 1) == 1 else values.get("micro_batch", 1)
        sharded: Sharded = "parameters" if values.get("pp", 1) == 1 else "gradients"
        return OthersLayout(**{"sharded": sharded, **values, "local_batch": local, "micro_batch": micro})
    # By default, Megatron splits experts over tp like attention, keeps the whole optimizer on every rank, does not overlap
    # parameters and gradients, and computes the loss step by step.
    return OthersLayout(**{"etp": values.get("tp", 1), "sharded": "none", **dict.fromkeys(APART, False), **values})


def _words(flags: str) -> list[str]:
    """Return the words of flags; `--a=b` is two, and torchtitan's subcommand for recomputation becomes a flag."""
    words = shlex.split(flags.replace(RECOMPUTE, "--activation-checkpoint.mode "))
    return [part for word in words for part in word.split("=", 1)]


SIZES: dict[str, Callable[[Job], int]] = {
    "seq-length": lambda job: job.model.seq_len, "training.seq-len": lambda job: job.model.seq_len,
    "num-layers": lambda job: job.model.num_layers, "hidden-size": lambda job: job.model.dim,
    "num-experts": lambda job: job.model.moe.num_experts, "moe-router-topk": lambda job: job.model.moe.top_k,
    "moe-ffn-hidden-size": lambda job: job.model.moe.hidden,
}  # fmt: skip
"""Flags for the sizes of a model, and the function that reads the same size from a job."""
ASSUMED = (
    "sequence-parallel", "use-megatron-fsdp", "recompute-method", "recompute-num-layers",
    "parallelism.data-parallel-shard-degree",
)  # fmt: skip
"""Flags that are not read because predictions assume their usual value."""
MATTERING = ("parallel", "pipeline", "offload", "overlap", "capacity", "dtype", "checkpoint", "recompute", "converters")
"""Words in names of flags that may change the time or the memory of a step."""


def unread_flags(flags: str, job: Job) -> list[str]:
    """Return the flags that may change the time or the memory of a step but that no prediction reads.

    Args:
        flags: flags of Megatron or torchtitan.
        job: the training job.

    Raises:
        InputError: if a flag gives a size of the model or a sequence length that is not that of the job.
    """
    words = _words(flags)
    names = {word: word.lstrip("-").replace("_", "-") for word in words if word.startswith("--")}
    for word, value in pairwise(words):
        size = SIZES.get(names.get(word, ""))
        if size is not None and value.isdecimal() and int(value) != size(job):
            flag = " (--seq-len)" if "seq" in word else ""
            raise InputError(f"--explain: {word} {value}, but the planned model has {size(job)}: make them agree{flag}")
    read = {*MEGATRON, *TORCHTITAN, *SIZES, *ASSUMED}
    return [word for word, name in names.items() if name not in read and any(part in name for part in MATTERING)]


def _flag_value(flag: str, words: list[str], make: Any) -> Any:
    """Return the value that the words after a flag give; `make` is the second entry of the flag in `MEGATRON`."""
    if make is list:
        if not words:
            raise InputError(f"--explain: {flag} is empty: name at least one of {', '.join(PARTS)}")
        return tuple(words)
    word = words[0] if words else ""
    if isinstance(make, dict):
        if word not in make:
            raise InputError(f"--explain: {flag}={word!r}: choose one of {', '.join(make)}")
        return make[word]
    try:
        return make(word)
    except ValueError as error:
        raise InputError(f"--explain: {flag} needs a whole number, got {word!r}") from error


def predict(job: Job, cluster: ClusterSpec, layout: OthersLayout) -> PlannedStep:
    """Return the predicted step under a layout of another system, with our most similar plan (without chunks).

    Blocks are split over the pipeline stages in runs; if the split is uneven, the first runs are longer. The last run has the
    output. Ranks that share a sequence each have a part of its tokens and an average share of its scores. They pass keys and
    values around in a ring, overlapped with the scores.

    Args:
        job: the training job; its batch is ignored.
        cluster: the cluster; the layout uses all of its ranks.
        layout: the layout.

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
    whole_step = replace(job, batch_size=groups * layout.micro_batch).step_model(cluster, groups)
    whole_step = replace(whole_step, micro_batches=batch // (groups * layout.micro_batch))
    step, simulator = _largest_stage(whole_step, layout), Simulator(cluster)
    step = replace(step, runs=_runs(job, whole_step, step, layout.mtp))
    cost_model, compiled = StepCostModel(step, grid, simulator), compile_plan(plan, grid)
    programs = compiled.forward, compiled.backward
    forward, backward = map(in_pieces, programs) if by_deepep else programs
    forward_run, backward_run = simulator.passes(forward, backward, step.layer, compiled.grid)
    both = cost_model.simulate_overlapped(forward, backward, compiled.grid) if step.overlapped else None
    ranks = [StepCostModel(each, grid, simulator) for each in _pipeline_ranks(whole_step, step)]
    return PlannedStep(
        plan=plan,
        grid=grid,
        estimate=cost_model.estimate(forward_run, backward_run, both),
        memory=max((each.memory(*programs, compiled.grid) for each in ranks), key=lambda memory: memory.total),
        bound_seconds=max(cost_model.compute_bound, cost_model.link_bound),
    )


def longer_by_narrow_rate(job: Job, cluster: ClusterSpec, layout: OthersLayout) -> tuple[float, float]:
    """Return the range of factors by which a step may take longer because the rate of narrow products is uncertain.

    The range is (1, 1) if products are not narrow, or if their rate was measured in training (`Device.narrow_between`).

    Args:
        job, cluster, layout: the arguments of `predict`.
    """
    device = cluster.device
    if not layout.is_narrow or not device.narrow_between:
        return 1.0, 1.0
    at_usual_rate = predict(job, cluster, layout).seconds

    def seconds(times: float) -> float:
        rates = replace(device.tflops, **{layout.precision: times * getattr(device.tflops, layout.precision)})
        return predict(job, replace(cluster, device=replace(device, tflops=rates)), layout).seconds

    slow, fast = map(seconds, device.narrow_between)
    return fast / at_usual_rate, slow / at_usual_rate


def _largest_stage(step: StepModel, layout: OthersLayout) -> StepModel:
    """Return the model of the pipeline rank with the most layers.

    Each rank has an equal share of the output here; `StepModel.runs`, in contrast, gives the output to one run.
    """
    blocks = step.num_layers + layout.mtp
    layers, runs = -(-blocks // layout.pp), layout.virtual_pp
    if layout.virtual_layers:
        runs, remainder = divmod(layers, layout.virtual_layers)
        if remainder:
            raise InputError(
                f"a stage of {layers} layers does not split into runs of {layout.virtual_layers}: choose a divisor"
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
        # Megatron requires sequence parallelism if a model has experts and tensor parallelism.
        sequence_parallel=layout.tp > 1,
        sharded=layout.sharded,
        parameter_bytes=4 if layout.float32_states else 2,
        # The FSDP of PyTorch and that of Megatron gather parameters in the precision of products, not the float32 master.
        gathered_bytes=step.layer.element_bytes,
    )


def _loss_bytes(layout: OthersLayout) -> int:
    """Return the bytes that the loss reads and writes per logit."""
    if "loss" in layout.stepwise:
        return TORCH_LOSS_BYTES
    return FUSED_LOSS_BYTES if layout.fused_loss else LOSS_BYTES


def _runs(job: Job, whole: StepModel, step: StepModel, mtp: int) -> tuple[StageRun, ...]:
    """Return the runs of layers of a pipeline; () without a pipeline.

    All runs have equally many blocks, or the first ones have one more. The blocks of multi-token prediction come last,
    followed by the output.
    """
    count = step.pipeline.num_runs
    if count == 1:
        return ()
    sparse = [job.model.is_sparse(block) for block in range(whole.num_layers)] + [True] * mtp
    return tuple(
        StageRun(len(run), int(run.sum()), step.outputs * (number == count - 1))
        for number, run in enumerate(np.array_split(np.array(sparse), count))
    )


def _pipeline_ranks(whole: StepModel, step: StepModel) -> list[StepModel]:
    """Return the model of every distinct pipeline rank: its blocks, and the embedding or the output if the rank has them."""
    if not step.runs:
        return [step]
    alive, models = step.pipeline.alive(step.micro_batches), []
    for rank, numbers in enumerate(step.pipeline.runs_of_ranks):
        runs = [step.runs[number] for number in numbers]
        embeds, ends = 0 in numbers, any(run.outputs for run in runs)
        models.append(
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
    return list(dict.fromkeys(models))


def layout_of(job: Job, planned: PlannedStep) -> OthersLayout:
    """Return the layout of other systems that is most similar to one of our plans."""
    grid, plan = planned.grid, planned.plan
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


def _check_supported(system: str, layout: OthersLayout, **known: tuple[Any, ...]) -> None:
    """Raise InputError if a layout has a value that a system does not support.

    Args:
        system: name of the system.
        layout: the layout.
        known: supported values by field of the layout.
    """
    for name, values in known.items():
        if getattr(layout, name) not in values:
            raise InputError(
                f"--emit {system}: {system} does not support {name}={getattr(layout, name)!r}: choose "
                f"{' or '.join(map(repr, values))}, or another system"
            )


ZERO_BUBBLES = {
    "1f1b": "", "zb-h1": "--enable-zero-bubble", "zb-v": "--enable-zero-bubble --zero-bubble-v-schedule",
    "dualpipev": "--schedules-method dualpipev",
}  # fmt: skip
"""Flags of pipeline schedules in Megatron and its extensions."""
PRECISIONS = {
    "bf16": "", "fp8": "--fp8-format hybrid --fp8-recipe tensorwise", "mxfp8": "--fp8-format e4m3 --fp8-recipe mxfp8",
}  # fmt: skip
"""Flags of precisions in Megatron."""


def _megatron(job: Job, layout: OthersLayout, planned: PlannedStep | None) -> list[str]:
    _check_supported("megatron", layout, schedule=tuple(ZERO_BUBBLES))
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


def _torchtitan(job: Job, layout: OthersLayout, planned: PlannedStep | None) -> list[str]:
    if layout.etp > 1:
        raise InputError(
            f"--emit torchtitan: torchtitan has no expert tensor parallelism, but the layout has etp {layout.etp}: pin --etp 1"
        )
    _check_supported("torchtitan", layout, mtp=(0,), recompute=tuple(MODES.values()), schedule=tuple(SCHEDULES.values()),
          precision=("bf16",))  # fmt: skip
    mode = next(mode for mode, parts in MODES.items() if parts == layout.recompute)
    lines = [
        f"--parallelism.tensor_parallel_degree {layout.tp}", "--parallelism.data_parallel_shard_degree -1",
        f"--parallelism.expert_parallel_degree {layout.ep}",
        f"--training.local_batch_size {max(layout.local_batch, layout.micro_batch)}",
        f"--training.seq_len {job.model.seq_len}",
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
    lines += ["--training.disable_cuda_graphs"] * (layout.ep > 1 or layout.pp > 1)  # refused with either
    return [*lines, f"{RECOMPUTE}{mode}"]


def _automodel(job: Job, layout: OthersLayout, planned: PlannedStep | None) -> list[str]:
    _check_supported("automodel", layout, schedule=tuple(SCHEDULES.values()), etp=(1,), mtp=(0,), precision=("bf16",),
          recompute=((), ("block",)))  # fmt: skip
    sizes = {"tp_size": layout.tp, "cp_size": layout.cp, "pp_size": layout.pp, "ep_size": layout.ep}
    sizes |= {"dp_replicate_size": layout.replicas} if layout.replicas > 1 else {}
    # A pipeline cuts the local batch of a data-parallel group into micro-batches.
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
    """Return the PyTorch name of the pipeline schedule of a layout."""
    names = [name for name, schedule in SCHEDULES.items() if schedule == layout.schedule]
    return names[-1 if layout.virtual_pp > 1 else 0]


def _moesaic(job: Job, layout: OthersLayout, planned: PlannedStep | None) -> list[str]:
    _check_supported("moesaic", layout, schedule=("1f1b",), cp=(1,), mtp=(0,), replicas=(1,), precision=("bf16",),
          recompute=((), ("block",)))  # fmt: skip
    mesh: dict[str, Any] = {"tp": layout.tp, "ep": layout.ep, "etp": layout.etp}
    mesh |= {} if planned is None else {"innermost": planned.grid.innermost}
    mesh |= {"pp": layout.pp, "parts-per-stage": layout.virtual_pp} if layout.pp > 1 else {}
    lines, default = [f"--mesh.{name} {value}" for name, value in mesh.items()], Plan()
    plan = Plan(all_to_all=layout.all_to_all) if planned is None else planned.plan
    for choice in fields(Plan):
        value = getattr(plan, choice.name)
        if value != getattr(default, choice.name):
            flag = choice.name.replace("_", "-")
            lines.append(f"--plan.{flag} {value}" if not isinstance(value, bool) else f"--plan.{flag}")
    if planned is not None:
        lines += [f"--batch-size {job.batch_size}", f"--accumulation {job.accumulation}"]
    return lines + ["--model.checkpoint-activations"] * bool(layout.recompute)


EMITTERS: dict[str, Callable[[Job, OthersLayout, PlannedStep | None], list[str]]] = {
    "megatron": _megatron, "torchtitan": _torchtitan, "automodel": _automodel, "moesaic": _moesaic,
}  # fmt: skip
"""Functions that write a layout as flags, by the name of the training system. The last argument is the plan of ours that the
layout comes from, or None; flags for its choices are included as far as the system has them."""
VERSIONS = {"megatron": "Megatron-LM 0.20", "torchtitan": "torchtitan 0.3.0"}
"""The versions whose flags are written."""
