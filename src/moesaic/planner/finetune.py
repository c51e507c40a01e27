"""Memory and speed of a fine-tune of adapters whose base model is frozen, with experts in NF4 or in
16 bits, on small cards.

It runs as `moesaic.transformers` does: blocks are recomputed, experts are spread over all ranks,
FSDP2 shards the rest, and adapters are float32. Frozen parameters have neither gradients nor
states. Steps are those of `step.py`; beside expert parallelism stand splits of the layers over the
ranks: into stages whose ranks share experts, one rank each, and one rank at a time as with
`device_map`. Where ranks exchange rows, the halves of a micro-batch may be in flight (`halves.py`).

`rank` is the rank of the adapters' factors; `ranks` are processes, one per device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from moesaic.errors import InputError
from moesaic.planner.answer import SPEED_RATIOS, speed_of
from moesaic.planner.candidates import Pins
from moesaic.planner.cluster import ClusterSpec, Device, Link, Tflops
from moesaic.planner.halves import seconds_in_flight, seconds_in_turn, without_chunks
from moesaic.planner.hub import HubShape
from moesaic.planner.job import DataShape, Job
from moesaic.planner.other_systems import OthersLayout, predict, rank_models
from moesaic.planner.predicted_plans import ENDLESS_GIB
from moesaic.planner.presets import CONFIGS
from moesaic.planner.rank_memory import FRAGMENTED, GIB
from moesaic.planner.search import LOSSLESS, Settings, search
from moesaic.planner.simulated_plans import PlannedStep
from moesaic.planner.simulator import Simulator
from moesaic.planner.step import StepCostModel, StepModel
from moesaic.program.grid import Grid
from moesaic.program.plan import Codec, Plan
from moesaic.shapes import ModelShape

Projections = Literal[2, 4]
Method = Literal["qlora", "qlora-double", "lora"]
"""Whether frozen experts are in NF4, in NF4 with scales in 8 bits, or in 16 bits."""
WEIGHT_BYTES: dict[Method, float] = {
    "qlora": 0.5 + 4 / 64,
    "qlora-double": 0.5 + (1 + 4 / 256) / 64,
    "lora": 2.0,
}
"""Bytes of a frozen weight of experts: a code of 4 bits and its share of a float32 scale for each
64, or of one in 8 bits and of a float32 scale for each 256 of those; or 16 bits."""
RESERVED = 1.0 * GIB
"""Memory of a device that the framework uses besides tensors."""
LOGIT_BYTES = (4, 8)
"""Bytes of each logit that the loss keeps for backward, and further ones where backward needs most:
float32 log-probabilities, and their gradient and the logits' (transformers' `ForCausalLMLoss` over
PyTorch's cross entropy; the logits in 16 bits are free by then)."""
TOKEN_BYTES = 18
"""Bytes of each value of a token that a recomputed block keeps, and its gradients: float32 copies
for two norms and two adapters, 16 bits for the gradient of the residual stream."""
COPY_VALUES = 5
"""Values of the token's width that backward of frozen experts has for each copy of a token: rows,
the results' gradient without and with routing weights, the rows' gradient and its adapters' part.
Of the hidden width it has the results of each matrix but the last and the rows that the last one
reads, and the gradients of both (`FrozenExperts.gradients`)."""
RECEIVED_VALUES = 2
"""Further values of the token's width for each copy on several ranks: rows and results' gradients
as they arrived, beside those in the order of the experts."""
FACTOR_BYTES = 5
"""Bytes of each parameter of a block's adapters of experts while it runs backward: copies in 16
bits, their gradients, and, for the factors that shards of an expert have in common, which are about
half, these again as one tensor."""
COPY_BYTES = 58
"""Bytes of indices, routing weights and order of each copy."""
CODED: tuple[Codec, ...] = ("none", "fp8")
"""Codecs of messages among which "fewer bits on the wire" chooses."""
LOSS_TOKENS = 256
"""Tokens whose logits exist at once where `moesaic finetune` computes the loss."""
BLOCK = "a block's activations"
"""Name of the part of memory that a block's recomputed activations are."""
IN_FLIGHT = ", in flight"
"""End of the name of a split under which the halves of a micro-batch are in flight."""
STEPWISE = ("norms",)
"""Operations of transformers' blocks that run step by step (`StepModel.stepwise`)."""


@dataclass(frozen=True, kw_only=True)
class FinetuneJob(Job):
    """A fine-tune; sequences, micro-batches and model as in `Job`."""

    precision: Literal["auto", "float32", "bfloat16", "float64"] = "bfloat16"
    method: Method = "qlora"
    """Storage of experts."""
    rank: int = 8
    """Rank of the adapters."""
    logits: int | None = None
    """Tokens whose logits exist at once; None for those of a micro-batch."""
    projections: Projections = 2
    """Linear layers of attention with adapters: 2 for queries and values, 4 for all."""
    in_flight: Literal[1, 2] = 1
    """With 2, a micro-batch runs as two halves in flight; tells memory, not time."""

    def step_model(self, cluster: ClusterSpec, dp: int) -> StepModel:
        """Return the model of a step that trains adapters alone: that of a step which trains the
        whole model, with experts frozen, and with the number of adapter parameters on a rank."""
        of_training = super().step_model(cluster, dp)
        # "qlora-double" counts as "qlora": before its products, a call of a layer decodes the
        # scales from 8 bits to 32
        read_as: Method = "lora" if self.method == "lora" else "qlora"
        frozen_layer = replace(of_training.layer, frozen_bytes=WEIGHT_BYTES[read_as], adapters=True)
        of_attention, of_all_experts = _adapters(of_training, self)
        of_own_experts = of_all_experts / cluster.world  # experts are spread over all ranks
        return replace(
            of_training,
            layer=frozen_layer,
            adapters=(of_attention, of_own_experts),
            stepwise=STEPWISE,
            gathered_bytes=frozen_layer.element_bytes,  # as activations are
        )


@dataclass(frozen=True, kw_only=True)
class SplitPrediction:
    """A way to split a model over ranks."""

    stages: int | None
    """`--pp` of `moesaic finetune`; None if it has no such split."""
    in_flight: int = 1
    """`--micro-batches-in-flight` of `moesaic finetune`."""
    tokens_per_second: float
    """Of all ranks together."""
    bytes: float
    """Bytes of tensors on the fullest rank."""
    fits: bool
    """Whether a device holds them."""
    bottleneck: str
    """What takes longest: computation, a link, or gathering parameters."""
    parts: dict[str, float] = field(default_factory=dict)
    """`bytes` by part."""
    interval: tuple[float, float] | None = None
    """Likely range of `tokens_per_second`, by the errors of predicted training steps; no fine-tune
    is among them."""


@dataclass(frozen=True, kw_only=True)
class FinetunePrediction:
    """What a fine-tune needs, and how fast it is if the cluster is known."""

    parts: dict[str, float]
    """Bytes of tensors on the fullest rank at the peak of a step that accumulates gradients, under
    even routing."""
    fits: bool | None
    """Whether a device holds `bytes`, with fragments and what the framework uses; None if its
    memory is not given."""
    seconds: float | None = None
    """Seconds of an optimizer step with expert parallelism."""
    tokens_per_second: float | None = None
    """Of all ranks together, with expert parallelism."""
    interval: tuple[float, float] | None = None
    """Likely range of `tokens_per_second`, by the errors of predicted training steps; no fine-tune
    is among them."""
    bottleneck: str | None = None
    """The largest of `limits`."""
    limits: dict[str, float] = field(default_factory=dict)
    """Lower bounds on the seconds of a step, one per resource."""
    plan: Plan | None = None
    """The fastest plan of the MoE layers."""
    splits: dict[str, SplitPrediction] = field(default_factory=dict)
    """Ways to split the model: over experts, over layers in stages that share experts, over layers
    as a pipeline of micro-batches, over layers one rank at a time. The name of a way whose
    micro-batches' halves are in flight ends in `IN_FLIGHT`."""

    @property
    def bytes(self) -> float:
        """Sum of the parts."""
        return sum(self.parts.values())

    @property
    def fastest(self) -> str:
        """Name of the fastest split among those that fit, or of all if none fits."""

        splits = self.splits
        return max(splits, key=lambda name: (splits[name].fits, splits[name].tokens_per_second))

    @property
    def recommended(self) -> SplitPrediction | None:
        """The fastest split of those that fit and that `moesaic finetune` has; None if none
        fits."""
        found = [each for each in self.splits.values() if each.fits and each.stages]
        return max(found, key=lambda each: each.tokens_per_second, default=None)


def predict_finetune(
    shape: ModelShape,
    *,
    ranks: int,
    memory_bytes: float | None,
    tokens: int,
    length: int,
    method: Method,
    rank: int,
    cluster: ClusterSpec | None = None,
    logits: int | None = None,
    accumulation: int = 4,
    codecs: tuple[Codec, ...] = ("none",),
    stages: tuple[int, int] = (1, 1),
    projections: Projections = 2,
    in_flight: Literal[1, 2] = 1,
) -> FinetunePrediction:
    """Predict a fine-tune with gradient checkpointing, of adapters on experts and on attention.

    Args:
        shape: from `read_job` or `read_shape`.
        ranks: ranks that share the experts, each with tokens of its own.
        memory_bytes: memory of a rank's device; None for that of the cluster, if there is one.
        tokens: tokens of a rank's micro-batch, whole sequences of `length`.
        length: tokens of a sequence.
        method: "qlora" for experts in NF4, "lora" for 16 bits.
        rank: rank of the adapters.
        cluster: the cluster, of as many devices as ranks; None predicts memory only.
        logits: tokens whose logits exist at once; None for those of a micro-batch, as in
            transformers.
        accumulation: micro-batches of a rank per optimizer step.
        codecs: codecs of messages that the plan may use.
        stages: the number of stages, of whose layers `parts` tells the bytes, and the micro-batches
            that a rank of one gets per optimizer step. Other splits do not depend on it.
        projections: linear layers of attention with adapters: 2 for queries and values, 4 for all.
        in_flight: 2 for `parts` of micro-batches that run as two halves in flight. `splits` do not
            depend on it.

    Raises:
        InputError: the model is none of the Hugging Face hub, or the sizes do not fit each other or
            the cluster.
    """
    sizes = {"ranks": ranks, "tokens": tokens, "length": length, "rank": rank}
    sizes["accumulation"] = accumulation
    _check(shape, cluster, sizes, stages[0])
    job = FinetuneJob(
        batch_size=ranks * tokens // length,
        accumulation=accumulation,
        method=method,
        rank=rank,
        logits=logits,
        projections=projections,
        in_flight=in_flight,
        model=replace(shape, seq_len=length, checkpoint_activations=True),
        data=DataShape(vocab_size=shape.vocab),  # type: ignore[attr-defined]
    )
    return _predicted(
        job, cluster=cluster, memory_bytes=memory_bytes, codecs=codecs, stages=stages, ranks=ranks
    )


def unnamed(ranks: int) -> ClusterSpec:
    """Return a node of this many devices for predictions of memory, which ask for no rate."""
    return ClusterSpec(
        name="unnamed",
        nodes=1,
        devices_per_node=ranks,
        device=Device(tflops=Tflops(bf16=1.0), memory_gib=1.0, memory_gigabytes_per_second=1.0),
        links=(Link(name="inside", devices=1, gbps=(1.0,), carries="inside"),),
    )


def _predicted(
    job: FinetuneJob,
    *,
    ranks: int,
    cluster: ClusterSpec | None,
    memory_bytes: float | None,
    codecs: tuple[Codec, ...],
    stages: tuple[int, int],
) -> FinetunePrediction:
    """Return the memory that a fine-tune needs and, if the cluster is known, its speed."""
    machine = cluster or unnamed(ranks)
    if memory_bytes is None and cluster is not None:
        memory_bytes = cluster.device.memory_gib * GIB
    num_stages, count = stages  # count: micro-batches of a rank
    if num_stages == 1:
        parts = spread_parts(job, machine)
    else:
        by_stage = stage_parts(job, machine, num_stages, count)
        parts = _fullest(by_stage)
    fits = None if memory_bytes is None else _fits(sum(parts.values()), memory_bytes)
    found = FinetunePrediction(parts=parts, fits=fits)
    if cluster is None:
        return found
    return _with_speed(found, replace(job, in_flight=1), cluster, memory_bytes or 0.0, codecs)


def _with_speed(
    found: FinetunePrediction,
    job: FinetuneJob,
    cluster: ClusterSpec,
    memory_bytes: float,
    codecs: tuple[Codec, ...],
) -> FinetunePrediction:
    """Return a prediction of memory with the speed on a cluster, and the other splits of the
    model."""
    ranks = cluster.world
    best = spread_experts(job, cluster, codecs)
    speed = speed_of(job, best, cluster, devices=ranks, sequences=job.batch_size * job.accumulation)
    low, high = speed.interval
    parts = spread_parts(job, cluster)
    needed = sum(parts.values())
    of_experts = SplitPrediction(
        stages=1,
        tokens_per_second=ranks * speed.tokens_per_second,
        bytes=needed,
        fits=_fits(needed, memory_bytes),
        bottleneck=best.estimate.bottleneck,
        parts=parts,
        interval=(ranks * low, ranks * high),
    )
    splits = {"experts": of_experts}
    flying = spread_in_flight(job, cluster, best)
    if flying is not None:
        of_halves = [spread_parts(replace(job, in_flight=2), cluster)]
        speedup = best.seconds / flying
        splits["experts" + IN_FLIGHT] = _flying(of_experts, speedup, of_halves, memory_bytes)
    return replace(
        found,
        seconds=best.seconds,
        tokens_per_second=of_experts.tokens_per_second,
        interval=of_experts.interval,
        bottleneck=of_experts.bottleneck,
        limits=best.estimate.limits,
        plan=best.plan,
        splits=splits | layer_splits(job, cluster, memory_bytes),
    )


def _flying(
    split: SplitPrediction, speedup: float, parts: list[dict[str, float]], memory_bytes: float
) -> SplitPrediction:
    """Return a split with the halves of its micro-batches in flight, from the bytes of its ranks by
    part."""
    fullest = _fullest(parts)
    needed = sum(fullest.values())
    low, high = split.interval or (0.0, 0.0)
    return replace(
        split,
        in_flight=2,
        tokens_per_second=speedup * split.tokens_per_second,
        bytes=needed,
        fits=_fits(needed, memory_bytes),
        parts=fullest,
        interval=(speedup * low, speedup * high),
    )


def _fullest(parts: list[dict[str, float]]) -> dict[str, float]:
    """Return the bytes of the fullest of some ranks, which are given by part."""
    return max(parts, key=lambda each: sum(each.values()))


def _check(
    shape: ModelShape, cluster: ClusterSpec | None, sizes: Mapping[str, int], stages: int
) -> None:
    """Raise InputError if the sizes of a fine-tune do not fit each other."""
    ranks = sizes["ranks"]
    tokens = sizes["tokens"]
    length = sizes["length"]
    if not isinstance(shape, HubShape):
        raise InputError(
            "fine-tuning is planned for models of the Hugging Face hub: name one "
            f"({', '.join(CONFIGS)}), or give a model's config.json or its folder"
        )
    for name, value in sizes.items():
        if value < 1:
            raise InputError(f"{name}={value}: must be at least 1")
    if tokens % length:
        raise InputError(
            f"tokens={tokens} are not whole sequences of length={length}: choose a multiple"
        )
    if ranks % stages or shape.moe.num_experts % (ranks // stages):
        raise InputError(
            f"{shape.moe.num_experts} experts do not split over {ranks} ranks in {stages} stages: "
            "choose a divisor"
        )
    if cluster is not None and cluster.world != ranks:
        raise InputError(
            f"{cluster.name} has {cluster.world} devices, not {ranks}: choose another size"
        )


def spread_experts(
    job: FinetuneJob, cluster: ClusterSpec, codecs: tuple[Codec, ...] = ("none",)
) -> PlannedStep:
    """Return the fastest step of a fine-tune whose experts are spread over all devices of a
    cluster, of any memory.

    Raises:
        InputError: if the experts or the sequences do not split over the devices.
    """
    roomy = replace(cluster, device=replace(cluster.device, memory_gib=ENDLESS_GIB))
    space = replace(LOSSLESS, codecs=codecs, backward_codecs=codecs)
    pins = Pins(tp=1, ep=cluster.world)
    return search(job, roomy, Settings(space=space, pins=pins, keep=1, give_up=1.5)).best


def spread_in_flight(job: FinetuneJob, cluster: ClusterSpec, spread: PlannedStep) -> float | None:
    """Return the seconds of a step with experts spread and the halves of a micro-batch in flight.

    Args:
        job: the fine-tune.
        cluster: the cluster.
        spread: the step with whole micro-batches; its plan is used without chunks.

    Returns:
        None if there is nothing to hide, or if a rank's sequences do not split into halves.
    """
    if spread.grid.ep == 1 or not _has_halves(job, cluster):
        return None
    simulator = Simulator(cluster)
    model = _with_half(job).step_model(cluster, spread.grid.dp)
    half = StepCostModel(model, spread.grid, simulator)
    outside = ("pipeline", "parameters", "optimizer")  # not of micro-batches
    seconds = spread.estimate.parts
    in_turn = sum(seconds[name] for name in seconds if name not in outside)
    flying = job.accumulation * seconds_in_flight(half, without_chunks(spread.plan))
    return spread.seconds - in_turn + flying


def _has_halves(job: FinetuneJob, cluster: ClusterSpec) -> bool:
    """Whether the sequences of a rank's micro-batch split into halves."""
    return job.batch_size // cluster.world % 2 == 0


def _with_half(job: FinetuneJob) -> FinetuneJob:
    """Return a fine-tune whose micro-batches have half the sequences."""
    return replace(job, batch_size=job.batch_size // 2)


def layer_splits(
    job: FinetuneJob, cluster: ClusterSpec, memory_bytes: float
) -> dict[str, SplitPrediction]:
    """Return the splits of the layers over all ranks, if there are several ranks and as many
    layers.

    Args:
        job: the fine-tune; a micro-batch of the pipeline has the sequences of a rank's micro-batch.
        cluster: the cluster.
        memory_bytes: memory of a device.
    """
    ranks = cluster.world
    splits = {}
    for stages in range(2, ranks + 1):
        sharing = ranks // stages  # ranks of a stage
        is_uneven = ranks % stages or job.model.moe.num_experts % sharing
        if is_uneven or stages > job.model.num_layers:
            continue
        name = "layers, micro-batches" if sharing == 1 else f"{stages} stages of {sharing} ranks"
        # a rank's micro-batches, so that a step has as many sequences as with experts spread
        count = stages * job.accumulation
        in_turn = _of_stages(job, cluster, (stages, count), memory_bytes)
        splits[name] = in_turn
        speedup = staged_speedup(job, cluster, stages, count)
        if speedup is not None:
            of_halves = stage_parts(replace(job, in_flight=2), cluster, stages, count)
            splits[name + IN_FLIGHT] = _flying(in_turn, speedup, of_halves, memory_bytes)
    if "layers, micro-batches" in splits:  # the same stages, with a single micro-batch
        one_by_one = _of_stages(job, cluster, (ranks, 1), memory_bytes)
        splits["layers, one rank at a time"] = replace(one_by_one, stages=None)
    return splits


def _of_stages(
    job: FinetuneJob, cluster: ClusterSpec, stages: tuple[int, int], memory_bytes: float
) -> SplitPrediction:
    """Return a split into stages; `stages` is their number and that of a rank's micro-batches."""
    num_stages, count = stages
    layout = _stages_layout(job, cluster.world, num_stages, count)
    step = staged_step(job, cluster, num_stages, count)
    parts = _fullest(stage_parts(job, cluster, num_stages, count))
    needed = sum(parts.values())
    simulated = layout.global_batch * job.model.seq_len / step.seconds
    low, middle, high = SPEED_RATIOS  # as `speed_of` corrects spread experts
    return SplitPrediction(
        stages=num_stages,
        tokens_per_second=middle * simulated,
        bytes=needed,
        fits=_fits(needed, memory_bytes),
        bottleneck=step.estimate.bottleneck,
        parts=parts,
        interval=(low * simulated, high * simulated),
    )


def staged_step(job: FinetuneJob, cluster: ClusterSpec, stages: int, count: int) -> PlannedStep:
    """Return the step of a fine-tune whose layers are split into stages; arguments as of
    `stage_parts`."""
    return predict(job, cluster, _stages_layout(job, cluster.world, stages, count))


def staged_speedup(job: FinetuneJob, cluster: ClusterSpec, stages: int, count: int) -> float | None:
    """Return how much faster a step in stages is with the halves of a micro-batch in flight;
    arguments as of `stage_parts`.

    A stage computes a micro-batch in fewer seconds, and the schedule is as long as its slowest
    stage takes.

    Returns:
        None if there is nothing to hide, or if a rank's sequences do not split into halves.
    """
    if stages == cluster.world or not _has_halves(job, cluster):
        return None
    whole_stages = _stage_models(job, cluster, stages, count)
    half_stages = _stage_models(_with_half(job), cluster, stages, count)
    plan = Plan()  # that of `moesaic finetune` with stages
    in_turn = max(seconds_in_turn(stage, plan) for stage in whole_stages)
    flying = max(seconds_in_flight(stage, plan) for stage in half_stages)
    return in_turn / flying


def _stages_layout(job: FinetuneJob, ranks: int, stages: int, count: int) -> OthersLayout:
    """Return the layout of stages whose ranks share experts, for a number of micro-batches of each
    rank."""
    sequences = job.batch_size // ranks
    return OthersLayout(
        pp=stages,
        ep=ranks // stages,
        micro_batch=sequences,
        global_batch=ranks // stages * count * sequences,
        recompute=("block",),
        sharded="parameters",
        stepwise=(*STEPWISE, "loss"),
    )


def spread_parts(job: FinetuneJob, cluster: ClusterSpec) -> dict[str, float]:
    """Return the bytes of a rank by part, with experts spread over all devices of a cluster."""
    ranks = cluster.world
    grid = Grid(world=ranks, ep=ranks, ranks_per_node=cluster.devices_per_node)
    whole = StepCostModel(job.step_model(cluster, grid.dp), grid, Simulator(cluster))
    return _memory(whole, job)


def stage_parts(
    job: FinetuneJob, cluster: ClusterSpec, stages: int, count: int
) -> list[dict[str, float]]:
    """Return the bytes of a rank of each stage by part, without repeating equal ones.

    Args:
        job: the fine-tune; a micro-batch has the sequences of a rank's micro-batch.
        cluster: the cluster.
        stages: number of stages, which divides the ranks.
        count: micro-batches of a rank per optimizer step.
    """
    layout = _stages_layout(job, cluster.world, stages, count)
    message_bytes = 2.0 * layout.micro_batch * job.model.seq_len * job.model.dim
    by_stage = []
    for cost_model in _stage_models(job, cluster, stages, count):
        stage = cost_model.model
        parts = _memory(cost_model, job)
        is_last = stage.outputs > 0
        is_first = stage.vocab > 0 and not is_last
        # torch's schedules receive every micro-batch of a step into a buffer of its own:
        # activations, which are the inputs of the first block, and gradients. An output stays until
        # it is backward's turn, and one more while it is sent.
        kept_messages = stage.alive
        if not is_first:  # receives activations
            kept_messages += count
            parts["blocks' inputs"] -= stage.alive * message_bytes
        if not is_last:  # receives gradients
            kept_messages += count
        if not (is_first or is_last):  # the output that is being sent
            kept_messages += 1
        if is_last and BLOCK in parts:
            parts[BLOCK] += 2 * message_bytes  # the last norm keeps its input in float32
        parts["messages of stages"] = kept_messages * message_bytes
        by_stage.append(parts)
    return by_stage


def _stage_models(
    job: FinetuneJob, cluster: ClusterSpec, stages: int, count: int
) -> list[StepCostModel]:
    """Return the cost model of every distinct stage; arguments as of `stage_parts`."""
    layout = _stages_layout(job, cluster.world, stages, count)
    sharing = layout.ep  # ranks of a stage
    per_node = min(cluster.devices_per_node, sharing)
    grid = Grid(world=sharing, ep=sharing, ranks_per_node=per_node)
    simulator = Simulator(cluster)
    sequences = sharing * layout.micro_batch
    whole = replace(job, batch_size=sequences).step_model(cluster, sharing)
    models = rank_models(job, whole, layout, count)
    return [StepCostModel(model, grid, simulator) for model in models]


def _fits(num_bytes: float, memory_bytes: float) -> bool:
    """Return whether a device of `memory_bytes` holds tensors of `num_bytes`."""
    return num_bytes * FRAGMENTED + RESERVED <= memory_bytes


def _adapters(model: StepModel, job: FinetuneJob) -> tuple[float, float]:
    """Return the parameters of all blocks' adapters: those of attention, and those of all
    experts."""
    # the factors of a product have as many parameters as the rank times its rows and columns
    layer = model.layer
    rank = job.rank
    queries = model.attention_result or layer.dim
    values = (model.key_values or 2 * layer.dim) / 2
    # queries and values read a token and have these widths; four projections count as twice these
    attention = rank * (2 * layer.dim + queries + values) * job.projections / 2
    # the first products of an expert have one adapter together, and the last one has its own
    expert_sides = (layer.dim + (layer.matrices - 1) * layer.hidden) + (layer.hidden + layer.dim)
    experts = model.moe_layers * layer.num_experts * rank * expert_sides
    return model.num_layers * attention, experts


def _memory(cost_model: StepCostModel, job: FinetuneJob) -> dict[str, float]:
    """Return the bytes of a rank by part, at the peak of a step."""
    model = cost_model.model
    grid = cost_model.grid
    layer = cost_model.model.layer
    attention, experts = _adapters(model, job)
    adapters = attention + experts / grid.ep
    micro_batch_inputs = model.num_layers * layer.tokens * layer.dim * 2.0
    frozen_bytes = model.expert_parameters * WEIGHT_BYTES[job.method]
    # parts into which all experts are divided: those of one layer on one rank
    expert_parts = grid.ep * max(model.moe_layers, 1)
    block = _peak_block_bytes(cost_model, experts / expert_parts, job)
    logits = _loss_bytes(model, job)
    # what FSDP2 makes whole: the output, or a block's dense parameters, and copies of its experts,
    # although the rank has them
    if grid.dp > 1:
        dense_parameters, _ = cost_model.block_parameters
        logits += model.vocab * layer.dim * 2.0
        block += 4 * dense_parameters + frozen_bytes / expert_parts
    if job.method == "qlora-double":  # 32-bit scales of one layer exist while it runs
        block += model.expert_parameters / expert_parts * 4 / 64  # 4 bytes for each 64 weights
    if job.in_flight == 2 and grid.ep == 1:
        # One half runs backward after the other: gradients of the one, also that of what the first
        # block reads, wait for those of the other, while half the blocks' inputs are free.
        waiting = 4 * adapters + micro_batch_inputs / model.num_layers
        block += max(waiting - micro_batch_inputs / 2, 0.0)
    # only the larger one counts, since they do not exist at once
    peaks = {"logits and loss": model.outputs * logits, BLOCK: block}
    largest = max(peaks, key=lambda name: peaks[name])
    return {
        "experts": frozen_bytes / grid.ep,
        "other weights": (model.dense_parameters + model.shared_parameters) * 2 / grid.dp,
        "adapters": 4 * adapters,
        "gradients": 4 * adapters,
        "optimizer": 8 * adapters,
        "blocks' inputs": cost_model.alive * micro_batch_inputs,
        largest: peaks[largest],
    }


def _loss_bytes(model: StepModel, job: FinetuneJob) -> float:
    """Return the bytes of logits and of what the loss makes of them, where it needs most, and of
    the last norm's input in float32."""
    kept_bytes: float
    running_bytes: float
    kept_bytes, running_bytes = LOGIT_BYTES
    tokens = job.logits or model.layer.tokens
    if job.logits is None and model.stages > 1:
        kept_bytes += 2  # torch's schedules keep the logits of the last stage, of both halves
    elif job.logits is None:
        running_bytes /= job.in_flight  # each half has a loss of its own; they run one by one
    of_logits = tokens * model.vocab * (kept_bytes + running_bytes)
    return of_logits + 4 * model.layer.tokens * model.layer.dim


def _peak_block_bytes(cost_model: StepCostModel, adapters: float, job: FinetuneJob) -> float:
    """Return the bytes of a block's recomputed activations where its backward pass needs most: in
    the gradients of experts, or of a dense layer.

    Backward passes of two halves in flight take turns at the messages of experts. So blocks of both
    are recomputed before one half computes the gradients of its experts, while the other one's are
    on their way to it. On one rank there are no messages, and the halves run one after the other.

    Args:
        cost_model: of the fine-tune's step.
        adapters: parameters of the experts' adapters of one block on this rank.
        job: the fine-tune.
    """
    half = 2  # bytes of a value in 16 bits
    model = cost_model.model
    layer = cost_model.model.layer
    is_spread = cost_model.grid.ep > 1
    running = layer.tokens / job.in_flight  # tokens whose gradients are computed at a time
    recomputed = layer.tokens if is_spread else running  # tokens whose activations exist

    # values of a copy that are kept until its gradients are there, and those of the gradients
    kept = (layer.matrices - 1) * layer.hidden
    made = COPY_VALUES * layer.dim + (layer.matrices + 1) * layer.hidden
    made += job.rank  # the gradient between the factors of an adapter
    factor_bytes = FACTOR_BYTES
    if is_spread:
        kept += RECEIVED_VALUES * layer.dim
        if job.in_flight == 2:
            made += layer.dim  # the results' gradient that the other half sends
            factor_bytes += half  # the other half's call has copies in 16 bits of its own
    copies_per_token = layer.copies / layer.tokens
    kept_bytes = half * copies_per_token * kept
    made_bytes = half * copies_per_token * made
    copies = recomputed * kept_bytes + running * made_bytes + layer.copies * COPY_BYTES

    # Frozen projections do not keep the input of attention. Its adapters do, in float32, which
    # `TOKEN_BYTES` counts. Norms of queries and keys keep them in float32, 16 bits more.
    attention = half * (model.attention_kept - layer.dim + model.attention_normed)
    if job.projections == 4:  # further copies in float32: the inputs of keys and of the output
        attention += 4 * (layer.dim + (model.attention_result or layer.dim))
    # in float32: what is between the factors of these adapters, and the router's probabilities
    attention += 4 * (job.projections * job.rank + layer.num_experts)
    # values and gradients
    shared = half * layer.matrices * model.shared_hidden * (recomputed + running)
    dense = 0.0
    if model.moe_layers < model.num_layers:
        # no messages, no turns: the other half is still in a block with experts
        dense = 2 * half * layer.matrices * model.inner * running
        dense += (recomputed - running) * kept_bytes
    # A block has either experts or a dense layer, and one block at a time is recomputed.
    feed_forward = max(copies, dense)
    per_token = TOKEN_BYTES * layer.dim + attention
    return recomputed * per_token + shared + feed_forward + factor_bytes * adapters
