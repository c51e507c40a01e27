"""The configuration of a training run and its presets.

The configuration is a tree of frozen dataclasses. The docstring under each field is its `--help` text, and the run
folder keeps the values.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from moesaic.balance import EXPERT_PLACERS, SAMPLE_PLACERS
from moesaic.balance.replication import NO_REPLICATION
from moesaic.configfile import override, read_number
from moesaic.errors import InputError
from moesaic.models.config import ModelConfig
from moesaic.planner.presets import PRESETS as MODELS
from moesaic.program.plan import Plan, StaticPlan, check_replication

UNMOVED = "none"
"""The value of `balance.samples` and `balance.experts` with which samples or experts are not moved."""
if TYPE_CHECKING:
    Placement: TypeAlias = str
else:
    Placement = Literal[(UNMOVED, *SAMPLE_PLACERS)]
"""Policies that place samples, from their registry; the command line lists them as choices."""
LEARNING, BY_COUNTS = "arbiter", "counts"
"""The replication policy that learns from measured times, and the suffix (after a colon) that turns the learning off."""
DECAYS = ("cosine", "linear", "wsd")
"""Learning-rate schedules, named after the shape of the decay."""
WARMUP, WARMUP_STEPS = "warmup=", 40
"""The prefix of the number of linear warm-up steps, and the default number."""
RECORDED, REPLAY = ("record:counts", "record:tokens"), "replay:"
"""Values of `routing` that record a trace, and the prefix of the trace file that is replayed."""
SHARE = "share:"
"""The prefix of the share of the data that is set aside for validation."""
EXPERTS_EVERY, KEPT = 50, 2
"""Default number of steps between decisions about expert placement, and default number of checkpoints to keep."""
MOST_PATIENCE = 1500.0
"""Seconds. Gloo times out by itself after 1,800 seconds, and does not say which rank it waited for."""
START_PATIENCE = 300.0
"""Default seconds that ranks wait for each other until the first step."""
TENSORBOARD, WANDB = "tensorboard", "wandb"
"""Trackers. `wandb` is followed by a colon and the project."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The data to train on, and how it is turned into tokens."""

    path: tuple[str, ...] = ()
    """Files, globs or folders. By its suffix a file holds tokens (.bin: raw little-endian integers, memory mapped), JSON
    lines (.jsonl), a table that the package datasets reads (.parquet, .arrow, .json, .csv), or text. Empty: the source
    text of this Python's standard library, without its tests."""
    text_field: str = "text"
    """The field of JSON lines and tables that holds the text."""
    val: tuple[str, ...] = (f"{SHARE}0.05",)
    """Validation data: files as for path, or share:0.05 to set aside that share of the data. Files are set aside by a
    hash of their names. With fewer than 20 files, and with `.bin` files, the last tokens are set aside."""
    vocab_size: int = 256
    """Size of the vocabulary. For text without a tokenizer, whose tokens are bytes, 256; in a larger one the other ids are
    unused. For `.bin` files: the largest id plus one. Their integer type is taken from the .json file of the same name,
    which moesaic tokenize writes. Without that file they have 16 bits, or 32 if vocab_size is above 65,536."""
    tokenizer: str = ""
    """A tokenizer.json of the tokenizers library, as models on the Hugging Face hub have it; its vocabulary then
    overrides vocab_size. Empty: one token per byte of text."""

    def __post_init__(self) -> None:
        if not self.val_path and not 0 < self.val_share < 1:
            written = " ".join(self.val)
            raise InputError(
                f"data.val={written}: name files, or write a share between 0 and 1 alone, such as {SHARE}0.05"
            )
        if self.vocab_size < 1:
            raise InputError(f"data.vocab_size={self.vocab_size}: must be at least 1")

    @property
    def val_path(self) -> tuple[str, ...]:
        """Files of validation data; empty if a share of the data is set aside instead."""
        return () if not self.val or any(name.startswith(SHARE) for name in self.val) else self.val

    @property
    def val_share(self) -> float:
        """Share of the data that is set aside for validation; not a number if `val` names no share."""
        return read_number(self.val[0].removeprefix(SHARE)) if len(self.val) == 1 and not self.val_path else math.nan


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW, its learning-rate schedule and gradient clipping."""

    lr: float = 3e-3
    """Peak learning rate."""
    rates: tuple[str, ...] = ()
    """Parts of the model with a learning rate of their own, as a multiple of lr at every step: experts:0.5 (routed
    experts only), routers:0 (routers keep their initial weights)."""
    schedule: str = "cosine:0.1"
    """Shape of the decay, and the last step's learning rate as a share of the peak (0.1 if omitted): cosine:0.1;
    linear:0; wsd:0.1 (warm-up, stable, decay), which is constant and then decays linearly over the last fifth of the
    steps. The number of linear warm-up steps may follow (40 if omitted): cosine:0.1:warmup=500."""
    weight_decay: float = 0.1
    """Weight decay of matrices; norms, biases and routers have none."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of AdamW's two moments."""
    clip_norm: float = 1.0
    """Largest allowed norm of the gradient over all parameters; 0 turns clipping off."""

    def __post_init__(self) -> None:
        if not 0 < self.lr < math.inf:
            raise InputError(f"optimizer.lr={self.lr}: must be above 0 and finite")
        for name in ("clip_norm", "weight_decay"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InputError(f"optimizer.{name}={getattr(self, name)}: must be 0 or more and finite")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise InputError(f"optimizer.betas={self.betas}: both must be at least 0 and below 1")
        if not re.fullmatch(rf"({'|'.join(DECAYS)})(:[^:=]+)?(:warmup=[0-9]{{1,18}})?", self.schedule) or not (
            0 <= self.final_share <= 1
        ):
            raise InputError(
                f"optimizer.schedule={self.schedule!r}: write one of {', '.join(DECAYS)}, optionally followed by a share "
                "from 0 to 1 and the warm-up steps, such as cosine:0.1:warmup=500"
            )
        names = [rate.partition(":")[0] for rate in self.rates]
        if set(names) - {"experts", "routers"} or len(names) > len(set(names)) or not all(
            0 <= self.rate_of(name) < math.inf for name in names
        ):  # fmt: skip
            raise InputError(
                f"optimizer.rates={' '.join(self.rates)}: write experts and routers once at most, each followed by a colon "
                "and a number of 0 or more, such as experts:0.5"
            )

    @property
    def decay(self) -> str:
        """The shape of the decay, one of `DECAYS`."""
        return self.schedule.partition(":")[0]

    @property
    def final_share(self) -> float:
        """Learning rate of the last step as a share of the peak."""
        shares = [word for word in self.schedule.split(":")[1:] if not word.startswith(WARMUP)]
        return read_number(shares[0]) if shares else 0.1

    @property
    def warmup_steps(self) -> int:
        """Number of linear warm-up steps."""
        last = self.schedule.split(":")[-1]
        return int(last.removeprefix(WARMUP)) if last.startswith(WARMUP) else WARMUP_STEPS

    def rate_of(self, what: str) -> float:
        """Return the learning rate of "experts" or "routers" as a multiple of `lr`."""
        rates = [rate.partition(":")[2] for rate in self.rates if rate.partition(":")[0] == what]
        return read_number(rates[0]) if rates else 1.0


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """How the ranks share the model. Data parallelism uses the ranks that the other axes leave over."""

    tp: int = 1
    """Tensor parallelism: this many ranks hold the same tokens, and each holds a part of attention and of the dense
    layers. Must divide model.num_heads."""
    ep: int = 1
    """Expert parallelism: the experts of a layer are split over this many ranks."""
    etp: int = 1
    """Expert tensor parallelism: each expert's inner width is split over this many ranks."""
    pp: tuple[int, ...] = (1,)
    """Pipeline parallelism: the blocks are split over this many stages, which share the ranks evenly. The accumulation
    micro-batches of a step flow through the stages. An optional second number gives each stage that many parts of the
    model, scheduled by interleaved 1F1B instead of 1F1B."""
    innermost: Literal["etp", "ep"] = "etp"
    """Which of etp and ep gets consecutive ranks, which usually share a node."""
    ranks_per_node: int | None = None
    """Number of consecutive ranks that share a node; None takes torchrun's LOCAL_WORLD_SIZE, or all ranks if it is not
    set."""
    transport: str = "auto"
    """Transport of the MoE layers' messages: gloo between CPUs, nccl between GPUs, or auto, which takes one of
    them; another package can offer further ones, such as the laboratory's sockets between CPUs."""
    sequence_parallel: bool = False
    """Between the layers, each rank of a tp group keeps only its part of the positions: less memory, the same bytes
    sent."""

    def __post_init__(self) -> None:
        if not 1 <= len(self.pp) <= 2 or min(self.pp) < 1:
            raise InputError(
                f"mesh.pp={self.pp_in_words}: write the number of stages, at least 1, optionally followed by the number of "
                "model parts per stage, such as 4 2"
            )
        if self.stages == 1 and self.parts_per_stage > 1:
            raise InputError(f"mesh.pp={self.pp_in_words}: one stage has the whole model: choose more stages")
        for name in ("tp", "ep", "etp", "ranks_per_node"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"mesh.{name}={value}: must be at least 1")

    @property
    def least_ranks(self) -> int:
        """The smallest world size that fits the mesh."""
        return self.stages * math.lcm(self.tp, self.ep * self.etp)

    @property
    def stages(self) -> int:
        """Pipeline stages."""
        return self.pp[0]

    @property
    def parts_per_stage(self) -> int:
        """Number of parts of the model in each stage."""
        return self.pp[1] if len(self.pp) > 1 else 1

    @property
    def pp_in_words(self) -> str:
        """The numbers of `pp`, as written on a command line."""
        return " ".join(map(str, self.pp))


@dataclass(frozen=True, kw_only=True)
class PlannerConfig:
    """How the plan of the MoE layers is chosen, and from which description of the cluster; see docs/planning.md."""

    plan: str = ""
    """Empty: use the fields of `plan` and `balance`. A file: use the plan written by moesaic show --write, or the mesh
    and plan written by moesaic plan --write. search: use the mesh and plan with the shortest predicted step on the
    available ranks. auto: change plans while training, by predicted times at first and by measured times as they come
    in; without cluster or profile, by timing candidate plans in the first steps. auto also searches for a mesh if the
    configured one does not fit the ranks. parm: choose S1 or S2 by Parm's Algorithm 1 (corrected), with times from the
    cluster or profile. --plan is short for this option."""
    cluster: str = ""
    """Source of predicted times, for plan=auto and for policies in `balance`: a preset, a description (.toml), or a
    profile that moesaic profile measured (.json). Empty: usual links are assumed if times are needed."""

    def __post_init__(self) -> None:
        if self.rule and not self.cluster:
            raise InputError(f"planner.plan={self.plan} needs the times of collectives from planner.cluster: name one")

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
    """Which copies are computed by ranks other than their experts' homes, decided in each call from its counts. none;
    shadow: send hot experts' weights to the ranks that hold their copies; published: shadow by FasterMoE's own rule;
    spill: give the excess copies of overloaded ranks to idle ones; least_loaded: spill without regard to time; eplb,
    lplb, laer: the rules of those systems, for comparison; arbiter: none, shadow, spill, both, another
    plan.gather_weights or the smart schedule, whichever is fastest by a cost model that measured times correct;
    arbiter:counts: the arbiter with an uncorrected cost model, so that runs repeat bit by bit."""
    memory_budget: int | None = None
    """Most bytes that one call of an MoE layer may hold on a rank, forward and backward, however skewed the routing is.
    Policies that replicate send the excess to helpers; otherwise the call runs in slices. As many slices as fit are
    kept for backward, and the others are recomputed. None: no limit."""
    samples: Placement = UNMOVED
    """Which rank holds each sample between MoE layers (NetMoE). none: the rank that loaded it; two_stage: minimise rows
    between nodes, then within nodes; weighed: minimise rows over the slower kind of link first; stay: run the same
    programs without moving samples. With replication=arbiter, samples move in the calls in which this is fastest."""
    experts: str = UNMOVED
    """Which rank stores each expert, decided by the load of previous steps. none: experts stay where they began;
    balanced: move experts if the gain until the next decision pays for the move; smartmoe: as published, whatever a
    move costs. The optimizer steps between decisions may follow (50 if omitted): balanced:100."""

    def __post_init__(self) -> None:
        check_replication("balance", self.policy, self.memory_budget)
        if ":" in self.replication and self.replication != f"{LEARNING}:{BY_COUNTS}":
            raise InputError(
                f"balance.replication={self.replication!r}: only {LEARNING} takes a suffix, {LEARNING}:{BY_COUNTS}"
            )
        for name, value, policies in (
            ("samples", self.samples, SAMPLE_PLACERS), ("experts", self.expert_policy, EXPERT_PLACERS)
        ):  # fmt: skip
            known = (UNMOVED, *policies)
            if value not in known:
                raise InputError(f"balance.{name}={value!r} is unknown: choose one of {', '.join(known)}")
        _, colon, steps = self.experts.partition(":")
        if colon and (not self.moves_experts or not steps.isdecimal() or int(steps) < 1):
            raise InputError(
                f"balance.experts={self.experts!r}: write the steps between decisions, at least 1, after the colon, such as "
                f"balanced:{EXPERTS_EVERY}"
            )

    @property
    def policy(self) -> str:
        """The replication policy, in the form that `Plan.replication` takes."""
        return self.replication.partition(":")[0]

    @property
    def learns(self) -> bool:
        """Whether measured times correct the arbiter's cost model."""
        return self.replication.partition(":")[2] != BY_COUNTS

    @property
    def expert_policy(self) -> str:
        """The policy that moves experts."""
        return self.experts.partition(":")[0]

    @property
    def experts_every(self) -> int:
        """Optimizer steps between decisions about expert placement."""
        return int(self.experts.partition(":")[2] or EXPERTS_EVERY)

    @property
    def moves_samples(self) -> bool:
        """Whether samples move between MoE layers."""
        return self.samples != UNMOVED

    @property
    def moves_experts(self) -> bool:
        """Whether experts move between steps."""
        return self.expert_policy != UNMOVED


@dataclass(frozen=True, kw_only=True)
class Saves:
    """When checkpoints are written, and how many are kept."""

    every: int
    """Steps between checkpoints."""
    keep: int
    """Number of checkpoints to keep."""
    in_background: bool
    """Whether checkpoints are written while training continues."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A training run."""

    out: str = "runs/gpt"
    """The run folder, which holds the configuration, metrics, checkpoints and TensorBoard events."""
    existing: Literal["refuse", "resume", "replace"] = "refuse"
    """If the folder already holds a run: refuse to start; resume from its last intact checkpoint; or replace it."""
    steps: int = 500
    """Number of optimizer steps."""
    batch_size: int = 16
    """Sequences per micro-batch, over all ranks."""
    accumulation: int = 1
    """Micro-batches per optimizer step."""
    seed: int = 0
    """Seed of initialisation, data order and routing noise."""
    device: str = "auto"
    """auto (CUDA if there is a GPU), cpu, cuda, cuda:1. With several ranks, each one takes a GPU of its own. A number
    after auto or cpu sets the CPU threads per rank, as in cpu:2; otherwise torch chooses."""
    precision: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    """Autocast dtype of the forward pass. auto: bfloat16 on GPUs that support it, and on CPUs whose bfloat16 matmul is
    measured at least 1.5 times as fast as float32; else float32. float64: the parameters too, for comparing runs."""
    patience: tuple[float, float] = (START_PATIENCE, 600.0)
    """Seconds without progress of a rank, before and after the first step, until all ranks end with a line that says
    which rank is missing. The first number, given as a flag, also limits how long ranks wait for each other to join."""
    log_every: int = 10
    """Steps between lines of metrics."""
    evaluate: tuple[int, int] = (100, 128)
    """Steps between evaluations (the last step is always evaluated), and the number of sequences of each, spread evenly
    over the validation data."""
    save: str = "250"
    """Steps between checkpoints (the last step is always saved). Options may follow: :keep=4 keeps the last four
    checkpoints instead of two; :background copies the tensors into CPU memory and writes them while training
    continues."""
    trackers: tuple[str, ...] = (TENSORBOARD,)
    """Where metrics are also sent: tensorboard writes event files, wandb:PROJECT logs to Weights & Biases."""
    routing: tuple[str, ...] = ()
    """Routing traces (docs/traces.md). record:counts writes the number of copies per sequence, rank and expert into the
    run folder; record:tokens writes every token's experts. replay:FILE takes every token's experts from a trace, and
    computes their weights with the router."""
    numbers: tuple[int, Literal["warn", "rollback"]] = (3, "warn")
    """Reaction to wrong numbers (docs/reliability.md). First: steps with a loss or gradient that is not finite are
    skipped on all ranks; this many of them in a row end the run (1: the first one does). Second: if the loss leaps far
    above the previous steps, warn reports it; rollback returns to the last checkpoint and skips the samples from there
    to the leap."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """The model."""
    data: DataConfig = DataConfig()
    """The data."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """The optimizer."""
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
            raise InputError("plan: is a StaticPlan here; replication and memory_budget are fields of balance")
        for name in ("steps", "batch_size", "accumulation", "log_every"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)}: must be at least 1")
        if min(self.evaluate) < 1:
            raise InputError(f"evaluate={self.evaluate}: both numbers must be at least 1")
        self.saving()
        if not 0 <= self.seed < 2**63:
            raise InputError(f"seed={self.seed}: choose 0 or more, below 2**63")
        if not all(1 <= seconds <= MOST_PATIENCE for seconds in self.patience):
            raise InputError(f"patience={self.patience}: choose both from 1 to {MOST_PATIENCE:g} seconds")
        kind, colon, number = self.device.partition(":")
        if colon and kind in ("auto", "cpu") and not re.fullmatch("[1-9][0-9]{0,3}", number):
            raise InputError(
                f"device={self.device}: write a number of CPU threads after the colon, at least 1, such as cpu:2"
            )
        for tracker in self.trackers:
            name, _, project = tracker.partition(":")
            if tracker != TENSORBOARD and not (name == WANDB and project):
                raise InputError(f"trackers: {tracker!r} is unknown: write {TENSORBOARD}, or {WANDB}:PROJECT")
        if self.model.num_heads % self.mesh.tp:
            raise InputError(
                f"mesh.tp={self.mesh.tp} does not divide model.num_heads={self.model.num_heads}: "
                "choose a tp that divides the heads"
            )
        if self.model.kv_heads % self.mesh.tp:
            raise InputError(
                f"mesh.tp={self.mesh.tp} does not divide the kv_heads={self.model.kv_heads} of model.block.attention: choose a "
                "divisor"
            )
        if self.numbers[0] < 1:
            raise InputError(f"numbers={self.numbers[0]} {self.numbers[1]}: the steps must be at least 1")
        self._check_routing()
        self._check_shards()
        self._check_stages()
        self._check_experts()
        self._check_samples()

    def _check_routing(self) -> None:
        recorded = [option for option in self.routing if option in RECORDED]
        replayed = [option for option in self.routing if option.startswith(REPLAY) and option != REPLAY]
        if len(recorded) + len(replayed) < len(self.routing) or len(recorded) > 1 or len(replayed) > 1:
            raise InputError(
                f"routing={' '.join(self.routing)}: write {' or '.join(RECORDED)} once at most, and {REPLAY}FILE once at most"
            )
        if self.rolls_back and self.replay_routing is not None:
            raise InputError(
                "numbers: rollback clashes with routing=replay, since a trace fixes the order of samples: leave one out"
            )

    def _check_shards(self) -> None:
        model, mesh = self.model, self.mesh
        sparse = [model.is_sparse(layer) for layer in range(model.num_layers)]
        divisions = [("mesh.ep", mesh.ep, "model.moe.num_experts", model.moe.num_experts)] if any(sparse) else []
        divisions += [("mesh.etp", mesh.etp, "model.moe.hidden", model.moe.hidden)] if any(sparse) else []
        if not all(sparse):
            divisions.append(("mesh.tp", mesh.tp, "the dense layers' inner width", model.active_hidden))
        if mesh.sequence_parallel:
            positions = "the positions of a sequence (for mesh.sequence_parallel)"
            divisions.append(("mesh.tp", mesh.tp, positions, model.seq_len))
        for axis, ranks, name, size in divisions:
            if size % ranks:
                raise InputError(f"{axis}={ranks} does not divide {name}={size}: choose sizes that divide")

    def _check_stages(self) -> None:
        stages, parts, option = self.mesh.stages, self.mesh.parts_per_stage, f"mesh.pp={self.mesh.pp_in_words}"
        if stages == 1:
            return
        if stages * parts > self.model.num_layers:
            raise InputError(
                f"{option}: needs {stages * parts} layers or more, but model.num_layers={self.model.num_layers}: choose fewer"
            )
        if self.accumulation % stages:
            raise InputError(
                f"{option}: {stages} stages do not divide accumulation={self.accumulation}, the micro-batches of a step that "
                f"flow through them: choose a multiple of {stages}"
            )
        balance = self.balance
        for name, value, off in (
            ("balance.samples", balance.samples, UNMOVED), ("balance.experts", balance.expert_policy, UNMOVED),
            ("balance.replication", balance.policy, NO_REPLICATION),
            ("balance.memory_budget", balance.memory_budget, None),
            ("planner.plan", "" if self.planner.file else self.planner.plan, ""),
            ("routing", " ".join(self.routing), ""),
        ):  # fmt: skip
            if value != off:
                raise InputError(
                    f"{option} clashes with {name}={value}, which needs all layers on every rank: leave one out"
                )

    def _check_experts(self) -> None:
        option = f"balance.experts={self.balance.expert_policy}"
        if not self.balance.moves_experts:
            return
        if self.model.is_dense:
            raise InputError(f'{option}: model.ffn="dense" has no experts to move: leave it none')
        if self.mesh.ep == 1 and not (
            self.planner.file or self.planner.searches
        ):  # a planned mesh is checked once it is known
            raise InputError(f"{option} with mesh.ep=1, where every rank has all experts: choose an ep above 1")

    def _check_samples(self) -> None:
        option = f"balance.samples={self.balance.samples}"
        if not self.balance.moves_samples:
            return
        reasons = (
            (self.model.is_dense, 'model.ffn="dense", which has no MoE layers'),
            (
                self.model.block.norm == "post_layer" or self.model.block.dropout > 0,
                "model.block: only models without norms after the residual and without dropout can move samples",
            ),
            (
                self.mesh.sequence_parallel,
                "mesh.sequence_parallel, which gives each rank a part of every sample's positions",
            ),
            (self.planner.is_auto, "planner.plan=auto, whose plans are predicted for samples that stay"),
        )
        for holds, what in reasons:
            if holds:
                raise InputError(f"{option} clashes with {what}; or set samples to none")

    @property
    def threads(self) -> int | None:
        """CPU threads per rank; None leaves the choice to torch."""
        kind, _, number = self.device.partition(":")
        return int(number) if number and kind in ("auto", "cpu") else None

    def saving(self) -> Saves:
        """Return the parsed `save`.

        Raises:
            InputError: if `save` is malformed.
        """
        match = re.fullmatch(r"([1-9][0-9]*)(?::keep=([1-9][0-9]*))?(:background)?", self.save)
        if match is None:
            raise InputError(
                f"save={self.save!r}: write the steps between checkpoints, at least 1, optionally followed by :keep=2 and "
                ":background in this order, such as 250:keep=4"
            )
        every, keep, background = match.groups()
        return Saves(every=int(every), keep=int(keep or KEPT), in_background=background is not None)

    @property
    def record_routing(self) -> Literal["none", "counts", "tokens"]:
        """What to record of the routing."""
        return "tokens" if RECORDED[1] in self.routing else "counts" if RECORDED[0] in self.routing else "none"

    @property
    def replay_routing(self) -> str | None:
        """The trace file to replay; None for none."""
        return next((option.removeprefix(REPLAY) for option in self.routing if option.startswith(REPLAY)), None)

    @property
    def rolls_back(self) -> bool:
        """Whether the run returns to its last checkpoint when the loss leaps."""
        return self.numbers[1] == "rollback"

    @property
    def layer_plan(self) -> Plan:
        """The plan of the MoE layers: `plan`, with replication and memory budget from `balance`."""
        static = {part.name: getattr(self.plan, part.name) for part in fields(StaticPlan)}
        return Plan(**static, replication=self.balance.policy, memory_budget=self.balance.memory_budget)

    def with_layer_plan(self, plan: Plan) -> TrainConfig:
        """Return a configuration with `plan` as its `layer_plan`."""
        static = StaticPlan(**{part.name: getattr(plan, part.name) for part in fields(StaticPlan)})
        balance = replace(self.balance, memory_budget=plan.memory_budget)
        if plan.replication != balance.policy:
            balance = replace(balance, replication=plan.replication)
        return replace(self, plan=static, balance=balance)

    @property
    def tokens_per_step(self) -> int:
        """Tokens per optimizer step."""
        return self.batch_size * self.accumulation * self.model.seq_len


WARM = {"lr": 6e-4, "schedule": "cosine:0.1:warmup=500"}
RUNS: dict[str, dict[str, Any]] = {
    "demo": {"out": "runs/demo/moe", "steps": 600, "save": "300"},
    "gpt-tiny": {"steps": 50, "evaluate": [25, 8], "optimizer": {"lr": 1e-2, "schedule": "cosine:0.1:warmup=10"}},
    "gpt-small": {
        "steps": 20_000, "evaluate": [500, 128], "save": "1000", "optimizer": WARM,
        "model": {"moe": {"losses": ["load_balance:0.01", "z_loss:0.001"]}},
    },
}  # fmt: skip
"""Training settings of each preset; presets that are not listed use `PUBLISHED`."""
PUBLISHED: dict[str, Any] = {
    "steps": 100_000, "evaluate": [1000, 128], "save": "1000", "model": {"conv_width": 1}, "optimizer": WARM,
}  # fmt: skip


def preset(name: str, settings: dict[str, Any] | None = None) -> TrainConfig:
    """Return the configuration that trains a model of `planner/presets.py`; None: with the settings that `RUNS` has for it."""
    config = override(TrainConfig(out=f"runs/{name}"), asdict(MODELS[name]), source=name)
    if config.model.moe.top_k == 1:  # the weight of one expert of one would be 1, and the router would learn nothing
        config = override(config, {"model": {"moe": {"router": "switch"}}}, source=name)
    return override(config, settings or RUNS.get(name, PUBLISHED), source=name)


def demo() -> TrainConfig:
    """Return the sparse half of `make demo`: a byte-level GPT-MoE that trains in about three minutes on two CPU cores.

    The experts are narrow on purpose: of the shapes tried, this one gained most over a dense model (docs/log.md).
    """
    return preset("demo")


def demo_dense() -> TrainConfig:
    """Return the dense half of `make demo`: the same active parameters, tokens and steps."""
    config = demo()
    return replace(config, out="runs/demo/dense", model=replace(config.model, ffn="dense"))


PRESETS: dict[str, Callable[[], TrainConfig]] = {
    "demo": demo, "demo-dense": demo_dense,
    **{name: partial(preset, name) for name, job in MODELS.items() if job.model.block.kind == "decoder" and name != "demo"},
}  # fmt: skip
