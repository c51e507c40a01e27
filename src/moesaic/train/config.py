"""The configuration of a training run.

The configuration is a tree of frozen dataclasses. The docstring under each field is its `--help`
text, and the run folder keeps the values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Literal, TypeAlias

from moesaic.balance import EXPERT_PLACERS, SAMPLE_PLACERS, check_replication
from moesaic.errors import InputError, suggestion
from moesaic.models.config import ModelConfig
from moesaic.program.plan import NO_REPLICATION, Plan, StaticPlan, check_budget

UNMOVED = "none"
"""The value of `balance.samples` and `balance.experts` with which samples or experts are not
moved."""
if TYPE_CHECKING:
    Placement: TypeAlias = str
    ExpertPlacement: TypeAlias = str
else:
    Placement = Literal[(UNMOVED, *SAMPLE_PLACERS)]
    ExpertPlacement = Literal[(UNMOVED, *EXPERT_PLACERS)]
"""Policies that place samples and experts, from their registries; the command line lists them as
choices."""
SPLIT_BACKWARD = (
    "zb",
    "zerobubble",
    "scheduleinterleavedzerobubble",
    "schedulezbv",
    "dualpipe",
    "scheduledualpipe",
)
"""How the names of schedules begin, without hyphens, that run parts of a backward pass apart:
torch's, Megatron's and the papers'."""
PLANNERS = ["search", "auto", "parm"]
"""What `planner.plan` may be besides a file."""
MOST_PATIENCE = 1500.0
"""Seconds. Gloo times out by itself after 1,800 seconds, and does not say which rank it waited
for."""


def _require_at_least_one(config: object, names: tuple[str, ...], *, prefix: str = "") -> None:
    """Raise InputError for a field that is below 1; None is allowed."""
    for name in names:
        value = getattr(config, name)
        if value is not None and value < 1:
            raise InputError(f"{prefix}{name}={value}: must be at least 1")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The data to train on, and how it is turned into tokens."""

    path: tuple[str, ...] = ()
    """Files, globs or folders. By its suffix a file holds tokens (.bin: raw little-endian integers,
    memory mapped), JSON lines (.jsonl, .ndjson; .json may also hold a list), a table that the
    package datasets reads (.parquet, .arrow, .csv), or text. Empty: the source of sympy 1.14.0,
    which torch brings, without its tests; the same text on every machine."""
    text_field: str = "text"
    """The field of JSON lines and tables that holds the text."""
    val: tuple[str, ...] = ()
    """Files of validation data, as for path. Empty: val_share of the data is set aside."""
    val_share: float = 0.05
    """Share of the data that is set aside for validation if val names no files. Files are set aside
    by a hash of their names. With fewer than 20 files, and with `.bin` files, the last tokens are
    set aside."""
    vocab_size: int = 256
    """Size of the vocabulary. For text without a tokenizer, whose tokens are bytes, 256; in a
    larger one the other ids are unused. For `.bin` files: the largest id plus one. Their integer
    type is taken from the .json file of the same name, which moesaic tokenize writes. Without that
    file they have 16 bits, or 32 if vocab_size is above 65,536."""
    tokenizer: str = ""
    """A tokenizer.json of the tokenizers library, as models on the Hugging Face hub have it. Its
    vocabulary then overrides vocab_size, but for .bin files. Empty: one token per byte of text."""

    def __post_init__(self) -> None:
        if not 0 < self.val_share < 1:
            raise InputError(
                f"data.val_share={self.val_share}: must be above 0 and below 1; files are "
                "named by data.val"
            )
        _require_at_least_one(self, ("vocab_size",), prefix="data.")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW, its learning-rate schedule and gradient clipping."""

    lr: float = 3e-3
    """Peak learning rate."""
    expert_lr_scale: float = 1.0
    """Learning rate of the routed experts, as a multiple of lr at every step."""
    router_lr_scale: float = 1.0
    """Learning rate of the routers, as a multiple of lr at every step; with 0 they keep their
    initial weights."""
    schedule: Literal["cosine", "linear", "wsd"] = "cosine"
    """Shape of the decay. wsd (warm-up, stable, decay) is constant and then decays linearly over
    the last fifth of the steps."""
    final_share: float = 0.1
    """Learning rate of the last step as a share of the peak."""
    warmup_steps: int = 40
    """Number of linear warm-up steps."""
    weight_decay: float = 0.1
    """Weight decay of matrices; norms, biases and routers have none."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of AdamW's two moments."""
    clip_norm: float = 1.0
    """Largest allowed norm of the gradient over all parameters; 0 turns clipping off."""

    def __post_init__(self) -> None:
        if not 0 < self.lr < math.inf:
            raise InputError(f"optimizer.lr={self.lr}: must be above 0 and finite")
        for name in (
            "clip_norm",
            "weight_decay",
            "expert_lr_scale",
            "router_lr_scale",
            "warmup_steps",
        ):
            if not 0 <= getattr(self, name) < math.inf:
                raise InputError(
                    f"optimizer.{name}={getattr(self, name)}: must be 0 or more and finite"
                )
        if not all(0 <= beta < 1 for beta in self.betas):
            raise InputError(f"optimizer.betas={self.betas}: both must be at least 0 and below 1")
        if not 0 <= self.final_share <= 1:
            raise InputError(f"optimizer.final_share={self.final_share}: must be from 0 to 1")


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """How the ranks share the model. Data parallelism uses the ranks that the other axes leave
    over."""

    tp: int = 1
    """Tensor parallelism: this many ranks hold the same tokens, and each holds a part of attention
    and of the dense layers. Must divide model.num_heads."""
    ep: int = 1
    """Expert parallelism: the experts of a layer are split over this many ranks."""
    etp: int = 1
    """Expert tensor parallelism: each expert's inner width is split over this many ranks."""
    pp: int = 1
    """Pipeline parallelism: the blocks are split over this many stages, which share the ranks
    so that their time is even. The accumulation micro-batches of a step flow through the stages."""
    parts_per_stage: int = 1
    """Parts of the model in each pipeline stage. With more than one, interleaved 1F1B takes the
    place of 1F1B."""
    schedule: str = "1f1b"
    """Schedule of the stages: 1f1b, interleaved where parts_per_stage is above 1. Zero-bubble
    schedules and DualPipeV are refused, see docs/choose_a_split.md."""
    innermost: Literal["etp", "ep"] = "etp"
    """Which of etp and ep gets consecutive ranks, which usually share a node."""
    ranks_per_node: int | None = None
    """Number of consecutive ranks that share a node; None takes torchrun's LOCAL_WORLD_SIZE, or all
    ranks if it is not set."""
    transport: str = "auto"
    """Transport of the MoE layers' messages: gloo between CPUs, nccl between GPUs, or auto, which
    takes one of them; another package can offer further ones, such as the laboratory's sockets
    between CPUs."""
    sequence_parallel: bool = False
    """Between the layers, each rank of a tp group keeps only its part of the positions: less
    memory, the same bytes sent."""
    shard: Literal["auto", "all", "node", "none"] = "auto"
    """Over which data-parallel ranks parameters, gradients and optimizer states are sharded. all:
    over all of them; node: inside nodes, with replicas on the other nodes, so that parameters are
    never sent between nodes; none: every rank has all of them. auto: node if the ranks span several
    nodes and hold fits the memory, else all; see docs/choose_a_split.md."""
    hold: Literal["auto", "parameters", "gradients", "nothing"] = "auto"
    """What each rank holds whole between the micro-batches of a step. parameters: parameters and
    gradients, so that parameters are gathered and gradients reduced once a step; gradients:
    gradients alone; nothing: neither. auto: as much as fits in half of the rank's memory beside its
    part of parameters, gradients and optimizer states."""
    stage_precision: Literal["as activations", "bfloat16"] = "as activations"
    """Precision in which stages send activations and their gradients to each other. Between blocks
    activations are kept in the precision of the parameters."""
    replica_precision: Literal["as gradients", "bfloat16"] = "as gradients"
    """Precision in which gradients are sent between replicas, such as between nodes under
    shard=node."""

    def __post_init__(self) -> None:
        if self.pp == 1 and self.parts_per_stage > 1:
            raise InputError(
                f"mesh.parts_per_stage={self.parts_per_stage}: one stage has the whole model: "
                "choose mesh.pp above 1"
            )
        # written as `SPLIT_BACKWARD` writes names
        name = self.schedule.lower().replace("_", "").replace("-", "")
        if name.startswith(SPLIT_BACKWARD):
            raise InputError(
                f"mesh.schedule={self.schedule}: is not offered: it runs the two halves of a "
                "backward pass apart, and an MoE layer's is one node, which would run, and send "
                "its messages, up to twice: leave it 1f1b"
            )
        if name != "1f1b":
            raise InputError(f"mesh.schedule={self.schedule}: is unknown: choose 1f1b")
        _require_at_least_one(
            self, ("tp", "ep", "etp", "pp", "parts_per_stage", "ranks_per_node"), prefix="mesh."
        )

    @property
    def least_ranks(self) -> int:
        """The smallest world size that fits the mesh."""
        return self.pp * math.lcm(self.tp, self.ep * self.etp)


@dataclass(frozen=True, kw_only=True)
class PlannerConfig:
    """How the plan of the MoE layers is chosen, and from which description of the cluster; see
    docs/planning.md."""

    plan: str = ""
    """Empty: use the fields of `plan` and `balance`. A file: use the plan written by moesaic show
    --write, or mesh and plan by moesaic plan --write. search: use the mesh and plan with the
    shortest predicted step, and recompute blocks where it helps. auto: change plans while training,
    by predicted times, then by measured ones; without a cluster, by timing candidate plans in the
    first steps. auto also searches for a mesh if the configured one does not fit the ranks. parm:
    choose S1 or S2 by Parm's Algorithm 1 (corrected). --plan is short for this option."""
    cluster: str = ""
    """Source of predicted times, for plan=search, plan=auto and policies in `balance`: a preset, or
    a file that describes a cluster, such as one that moesaic profile wrote. Empty: usual links are
    assumed if times are needed."""

    def __post_init__(self) -> None:
        if self.file and not self.file.endswith((".toml", ".json")):
            raise InputError(
                f"planner.plan={self.plan} is unknown{suggestion(self.plan, PLANNERS)} (or give a "
                "file that moesaic plan --write wrote, .toml or .json)"
            )
        if self.rule and not self.cluster:
            raise InputError(
                f"planner.plan={self.plan} needs the times of collectives from "
                "planner.cluster: name one"
            )

    @property
    def is_auto(self) -> bool:
        """Whether plans change while training."""
        return self.plan == "auto"

    @property
    def searches(self) -> bool:
        """Whether mesh and plan are searched for when the run starts."""
        return self.plan == "search"

    @property
    def rule(self) -> str:
        """The rule that chooses the schedule; empty if none."""
        return self.plan if self.plan == "parm" else ""

    @property
    def file(self) -> str:
        """The file that holds the plan; empty if none."""
        return "" if self.is_auto or self.searches or self.rule else self.plan


@dataclass(frozen=True, kw_only=True)
class BalanceConfig:
    """How the MoE layers react to skewed routing; see docs/balance.md."""

    replication: str = NO_REPLICATION
    """Which copies are computed by ranks other than their experts' homes, decided in each call from
    its counts. none; shadow: send hot experts' weights to the ranks that hold their copies;
    published: shadow by FasterMoE's own rule; spill: give the excess copies of overloaded ranks to
    idle ones; eplb: DeepSeek's rule; arbiter: none, shadow, spill, eplb, another
    plan.gather_weights or the smart schedule, whichever is fastest by a cost model."""
    memory_budget: int | None = None
    """Most bytes that one call of an MoE layer may hold on a rank, forward and backward, however
    skewed the routing is. Policies that replicate send the excess to helpers; otherwise the call
    runs in slices. As many slices as fit are kept for backward, and the others are recomputed.
    None: no limit."""
    samples: Placement = UNMOVED
    """Which rank holds each sample between MoE layers (NetMoE). none: the rank that loaded it;
    two_stage: minimise rows between nodes, then within nodes; weighed: minimise rows over the
    slower kind of link first. With replication=arbiter, samples move in the calls in which this is
    fastest."""
    experts: ExpertPlacement = UNMOVED
    """Which rank stores each expert, decided by the load of previous steps. none: experts stay
    where they began; balanced: move experts if the gain until the next decision pays for the move;
    smartmoe: as published, whatever a move costs."""
    experts_every: int = 50
    """Optimizer steps between decisions about expert placement."""

    def __post_init__(self) -> None:
        check_budget("balance", self.memory_budget)
        if self.replication != NO_REPLICATION:
            check_replication("balance.replication", self.replication)
        for name, value, policies in (
            ("samples", self.samples, SAMPLE_PLACERS),
            ("experts", self.experts, EXPERT_PLACERS),
        ):
            known = (UNMOVED, *policies)
            if value not in known:
                raise InputError(
                    f"balance.{name}={value!r} is unknown: choose one of {', '.join(known)}"
                )
        _require_at_least_one(self, ("experts_every",), prefix="balance.")

    @property
    def moves_samples(self) -> bool:
        """Whether samples move between MoE layers."""
        return self.samples != UNMOVED

    @property
    def moves_experts(self) -> bool:
        """Whether experts move between steps."""
        return self.experts != UNMOVED


@dataclass(frozen=True, kw_only=True)
class AdaptersConfig:
    """Adapters (LoRA) of the experts of a model that another run trained; see docs/training.md."""

    base: str = ""
    """The folder of that run, which must stay as it is. Its model is frozen, with experts in NF4;
    only adapters are trained and saved. Empty: all parameters are trained."""
    rank: int = 16
    """Rank of the adapters."""

    def __post_init__(self) -> None:
        _require_at_least_one(self, ("rank",), prefix="adapters.")


@dataclass(frozen=True, kw_only=True)
class SaveConfig:
    """When checkpoints are written, and how many are kept."""

    every: int = 250
    """Steps between checkpoints; the last step is always saved."""
    keep: int = 2
    """Number of checkpoints to keep."""
    background: bool = False
    """Copy the tensors into CPU memory and write them while training continues."""

    def __post_init__(self) -> None:
        _require_at_least_one(self, ("every", "keep"), prefix="save.")


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """When the model is evaluated, and on how much."""

    every: int = 100
    """Steps between evaluations; the last step is always evaluated."""
    sequences: int = 128
    """Sequences of each evaluation, spread evenly over the validation data."""

    def __post_init__(self) -> None:
        _require_at_least_one(self, ("every", "sequences"), prefix="evaluate.")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A training run."""

    out: str = "runs/gpt"
    """The run folder, which holds the configuration, metrics, checkpoints and TensorBoard
    events."""
    existing: Literal["refuse", "resume", "replace"] = "refuse"
    """If the folder already holds a run: refuse to start; resume from its last intact checkpoint;
    or replace it."""
    steps: int = 500
    """Number of optimizer steps."""
    batch_size: int = 16
    """Sequences per micro-batch, over all ranks."""
    accumulation: int = 1
    """Micro-batches per optimizer step."""
    micro_batches_in_flight: int = 1
    """With 2, one micro-batch computes while the messages of another travel (`moesaic.in_flight`):
    for slow links. Losses stay the same, but where routers or dropout draw random numbers they draw
    others."""
    seed: int = 0
    """Seed of initialisation, data order and routing noise."""
    device: str = "auto"
    """auto (CUDA if there is a GPU), cpu, cuda, cuda:1. With several ranks, each one takes a GPU of
    its own."""
    threads: int | None = None
    """CPU threads per rank; None leaves the choice to torch."""
    precision: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    """Autocast dtype of the forward pass. auto: bfloat16 on GPUs that support it, and on CPUs that
    are measured to multiply one expert's rows 1.5 times as fast in it as in float32; else float32.
    float64: the parameters too, for comparing runs."""
    start_patience: float = 300.0
    """Seconds without progress of a rank, before the first step, until all ranks end with a line
    that says which rank is missing. Given as a flag, it also limits how long ranks wait for each
    other to join."""
    patience: float = 600.0
    """The same, after the first step."""
    log_every: int = 10
    """Steps between lines of metrics."""
    tensorboard: bool = True
    """Also write metrics as TensorBoard event files."""
    record_routing: Literal["none", "counts", "tokens"] = "none"
    """Write a routing trace into the run folder (docs/traces.md): the copies per sequence, rank and
    expert, or every token's experts."""
    replay_routing: str = ""
    """A trace from which every token's experts are taken; the router computes their weights. Empty
    for none."""
    nonfinite_steps: int = 3
    """Steps with a loss or gradient that is not finite are skipped on all ranks; this many of them
    in a row end the run (1: the first one does). See docs/reliability.md."""
    on_spike: Literal["warn", "rollback"] = "warn"
    """Reaction to a loss far above that of the previous steps. warn reports it; rollback returns to
    the last checkpoint and skips the samples from there to the spike."""
    evaluate: EvaluateConfig = EvaluateConfig()
    """When the model is evaluated."""
    save: SaveConfig = SaveConfig()
    """When checkpoints are written."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """The model."""
    data: DataConfig = DataConfig()
    """The data."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """The optimizer."""
    adapters: AdaptersConfig = AdaptersConfig()
    """Adapters of a frozen model."""
    mesh: MeshConfig = MeshConfig()
    """How the ranks share the model."""
    plan: StaticPlan = field(default_factory=StaticPlan)
    """How the MoE layers run on the mesh; unused with one process."""
    planner: PlannerConfig = PlannerConfig()
    """How the plan is chosen, if not by the fields of plan."""
    balance: BalanceConfig = BalanceConfig()
    """How skewed routing is handled."""

    def __post_init__(self) -> None:
        if isinstance(self.plan, Plan):
            raise InputError(
                "plan: is a StaticPlan here; replication and memory_budget are fields of balance"
            )
        _require_at_least_one(
            self, ("steps", "batch_size", "accumulation", "log_every", "nonfinite_steps", "threads")
        )
        if not 0 <= self.seed < 2**63:
            raise InputError(f"seed={self.seed}: choose 0 or more, below 2**63")
        for name in ("start_patience", "patience"):
            if not 1 <= getattr(self, name) <= MOST_PATIENCE:
                raise InputError(
                    f"{name}={getattr(self, name)}: must be from 1 to {MOST_PATIENCE:g} seconds"
                )
        if self.on_spike == "rollback" and self.replay_routing:
            raise InputError(
                "on_spike=rollback clashes with replay_routing, since a trace fixes the order "
                "of samples: leave one out"
            )
        if self.adapters.base and self.balance.moves_experts:
            raise InputError(
                "balance.experts clashes with adapters.base, whose experts have no optimizer "
                "states: leave it none"
            )
        self._check_in_flight()
        self._check_shards()
        self._check_stages()
        self._check_experts()
        self._check_samples()

    def _check_in_flight(self) -> None:
        """Raise InputError if micro-batches cannot be in flight as asked."""
        option = f"micro_batches_in_flight={self.micro_batches_in_flight}"
        if self.micro_batches_in_flight not in (1, 2):
            raise InputError(f"{option}: choose 1 or 2")
        if self.micro_batches_in_flight == 1:
            return
        clashes = [
            (self.accumulation == 1, "accumulation=1", "a step has one micro-batch: choose 2"),
            (
                self.mesh.pp > 1,
                f"mesh.pp={self.mesh.pp}",
                "stages have several in flight by themselves: choose 1 here",
            ),
            (
                self.record_routing != "none" or bool(self.replay_routing),
                "record_routing and replay_routing",
                "they set a router for one micro-batch at a time: choose 1 here",
            ),
        ]
        for is_so, other, why in clashes:
            if is_so:
                raise InputError(f"{option} clashes with {other}: {why}")

    def _check_shards(self) -> None:
        """Refuse sharding that the mesh or other options do not fit."""
        model = self.model
        mesh = self.mesh
        sparse = [model.is_sparse(layer) for layer in range(model.num_layers)]
        # each: field and size of an axis, name and size of what it must divide
        divisions = [
            ("mesh.tp", mesh.tp, "model.num_heads", model.num_heads),
            ("mesh.tp", mesh.tp, "model.block.kv_heads", model.kv_heads),
        ]
        if any(sparse):
            divisions.append(("mesh.ep", mesh.ep, "model.moe.num_experts", model.moe.num_experts))
            divisions.append(("mesh.etp", mesh.etp, "model.moe.hidden", model.moe.hidden))
        if not all(sparse):
            divisions.append(
                ("mesh.tp", mesh.tp, "the dense layers' inner width", model.active_hidden)
            )
        if mesh.sequence_parallel:
            positions = "the positions of a sequence (for mesh.sequence_parallel)"
            divisions.append(("mesh.tp", mesh.tp, positions, model.seq_len))
        for axis, ranks, name, size in divisions:
            if size % ranks:
                raise InputError(
                    f"{axis}={ranks} does not divide {name}={size}: choose sizes that divide"
                )

    def _check_stages(self) -> None:
        """Refuse stages that the model, the micro-batches or other options do not fit."""
        stages = self.mesh.pp
        parts = self.mesh.parts_per_stage
        option = f"mesh.pp={self.mesh.pp}"
        if stages == 1:
            return
        if stages * parts > self.model.num_layers:
            raise InputError(
                f"{option}: needs {stages * parts} layers or more, but "
                f"model.num_layers={self.model.num_layers}: choose fewer"
            )
        rounds = max(1, self.accumulation // stages)  # as torch's ScheduleInterleaved1F1B has it
        if parts > 1 and self.accumulation % rounds:
            raise InputError(
                f"{option}, mesh.parts_per_stage={parts}: interleaved 1F1B runs the micro-batches "
                f"of a step in {rounds} equal rounds, and accumulation={self.accumulation} does "
                f"not divide into them: choose a multiple of {stages}"
            )
        if self.mesh.hold == "nothing":
            raise InputError(
                f"{option} clashes with mesh.hold=nothing: stages reduce gradients after a step's "
                "last micro-batch, and hold them until then: choose gradients"
            )
        balance = self.balance
        chosen_while_training = "" if self.planner.file else self.planner.plan
        clashes = [
            (
                balance.moves_samples,
                f"balance.samples={balance.samples}",
                "a sample leaves a stage from the rank on which it came",
            ),
            (
                balance.moves_experts,
                f"balance.experts={balance.experts}",
                "decisions compare the experts of all layers on one rank",
            ),
            (
                bool(chosen_while_training),
                f"planner.plan={chosen_while_training}",
                "the time of a stage's step is that of the slowest stage, so it does not tell "
                "which plan of its own layers is faster",
            ),
            (
                bool(self.adapters.base),
                f"adapters.base={self.adapters.base}",
                "the frozen model is read whole by every rank",
            ),
        ]
        for is_so, other, why in clashes:
            if is_so:
                raise InputError(f"{option} clashes with {other}: {why}: leave one out")

    def _check_experts(self) -> None:
        """Refuse moving experts where there are none to move."""
        option = f"balance.experts={self.balance.experts}"
        if not self.balance.moves_experts:
            return
        if self.model.is_dense:
            raise InputError(f'{option}: model.ffn="dense" has no experts to move: leave it none')
        # such a mesh is checked once it is known
        is_planned = self.planner.file or self.planner.searches
        if self.mesh.ep == 1 and not is_planned:
            raise InputError(
                f"{option} with mesh.ep=1, where every rank has all experts: choose an ep above 1"
            )

    def _check_samples(self) -> None:
        """Refuse moving samples where a part of the model or of the run needs them to stay."""
        option = f"balance.samples={self.balance.samples}"
        block = self.model.block
        if not self.balance.moves_samples:
            return
        reasons = (
            (self.model.is_dense, 'model.ffn="dense", which has no MoE layers'),
            (
                block.norm == "post_layer",
                "model.block.norm=post_layer: a norm after the residual needs samples that stay",
            ),
            (block.dropout > 0, "model.block.dropout: its masks need samples that stay"),
            (
                self.mesh.sequence_parallel,
                "mesh.sequence_parallel, which gives each rank a part of every sample",
            ),
            (
                self.planner.is_auto,
                "planner.plan=auto, whose plans are predicted for samples that stay",
            ),
        )
        for is_so, other in reasons:
            if is_so:
                raise InputError(f"{option} clashes with {other}; or set samples to none")

    @property
    def layer_plan(self) -> Plan:
        """The plan of the MoE layers: `plan`, with replication and memory budget from `balance`."""
        static = {part.name: getattr(self.plan, part.name) for part in fields(StaticPlan)}
        return Plan(
            **static, replication=self.balance.replication, memory_budget=self.balance.memory_budget
        )

    def with_layer_plan(self, plan: Plan) -> TrainConfig:
        """Return a configuration with `plan` as its `layer_plan`."""
        static = StaticPlan(**{part.name: getattr(plan, part.name) for part in fields(StaticPlan)})
        balance = replace(
            self.balance, memory_budget=plan.memory_budget, replication=plan.replication
        )
        return replace(self, plan=static, balance=balance)

    @property
    def tokens_per_step(self) -> int:
        """Tokens per optimizer step."""
        return self.batch_size * self.accumulation * self.model.seq_len

    @property
    def matmul_shape(self) -> tuple[int, int, int]:
        """Rows, width and columns of a micro-batch's matmul with one expert under even load, or
        with a dense layer."""
        model = self.model
        tokens = self.batch_size * self.model.seq_len
        if model.ffn == "dense":
            return tokens, model.dim, model.active_hidden
        copies_per_expert = tokens * model.moe.top_k // model.moe.num_experts
        rows = max(1, copies_per_expert)  # the matmul is timed, and needs a row
        return rows, model.dim, model.moe.hidden
