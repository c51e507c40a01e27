"""The configuration of a training run: frozen dataclasses, a docstring under each field, written into the run folder; and
its presets."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from moesaic.balance import EXPERT_PLACERS, SAMPLE_PLACERS
from moesaic.balance.replication import NO_REPLICATION
from moesaic.comm import TransportName
from moesaic.configfile import override, read_number
from moesaic.errors import InputError
from moesaic.models.config import ModelConfig
from moesaic.plan.plan import Plan, StaticPlan, check_replication
from moesaic.plan.presets import PRESETS as MODELS

UNMOVED = "none"
"""In place of the name of a policy that moves samples or experts."""
if TYPE_CHECKING:
    Placement: TypeAlias = str
else:
    Placement = Literal[(UNMOVED, *SAMPLE_PLACERS)]
"""Names of a registry; a command line lists them as choices."""
LEARNING, BY_COUNTS = "arbiter", "counts"
"""The replication that learns from what calls take, and the word behind a colon that keeps it from it."""
WAYS_DOWN = ("cosine", "linear", "wsd")
"""Of the learning rate."""
WARMUP, WARMUP_STEPS = "warmup=", 40
"""In front of the steps of linear warm-up, and as many where nobody says another number."""
RECORDED, REPLAY = ("record:counts", "record:tokens"), "replay:"
"""Ways to record the routing, and what stands in front of the trace that is replayed."""
SHARE = "share:"
"""In front of the share of the data that is set aside, where no files of validation data are named."""
EXPERTS_EVERY, KEPT = 50, 2
"""Steps between decisions about experts, and checkpoints that stay, where nobody says another number."""
MOST_PATIENCE = 1500.0
"""Seconds. Gloo gives up by itself after 1,800, and does not say for whom it waited."""
START_PATIENCE = 300.0
"""Seconds, where nobody says another number."""
TENSORBOARD, WANDB = "tensorboard", "wandb"
"""Trackers; the project stands behind the second one and a colon."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What is read, and how it becomes tokens."""

    path: tuple[str, ...] = ()
    """Files, globs or folders of text, of JSON lines, of Arrow or Parquet tables (which need pyarrow), told apart by their
    content and compressed or not; or `.bin` files of tokens (raw little-endian integers, memory mapped). Empty: the source text
    of this Python's standard library, without its tests."""
    text_field: str = "text"
    """The field of JSON lines, JSON arrays and tables that holds the text. Empty: JSON is text as it stands."""
    val: tuple[str, ...] = (f"{SHARE}0.05",)
    """Validation data: files as of path, or the share of the data that is set aside, share:0.05. It is taken of the files, by a
    hash of their names; of fewer than 20 files, and of `.bin` files, it is the last tokens."""
    vocab_size: int = 256
    """Tokens. 256: one per byte of text. 300 and more: a byte-level BPE, trained on the training files, kept in the run folder.
    Of `.bin` files: the largest id plus one. Their integers have the type that the .json file of the same name says, which
    moesaic tokenize writes; without one they have 16 bits, and 32 where vocab_size is above 65,536."""
    tokenizer: str = ""
    """A tokenizer.json of the tokenizers library, as models of the hub have it; its vocabulary counts. Empty: as vocab_size
    says."""

    def __post_init__(self) -> None:
        if not self.val_path and not 0 < self.val_share < 1:
            said = " ".join(self.val)
            raise InputError(
                f"data.val={said}: name files, or write a share between 0 and 1 alone, such as {SHARE}0.05"
            )
        if self.vocab_size < 1:
            raise InputError(f"data.vocab_size={self.vocab_size}: must be at least 1")

    @property
    def val_path(self) -> tuple[str, ...]:
        """Files of validation data; empty where a share is set aside."""
        return () if not self.val or any(each.startswith(SHARE) for each in self.val) else self.val

    @property
    def val_share(self) -> float:
        """Share of the data that is set aside; not a number where `val` says none."""
        return read_number(self.val[0].removeprefix(SHARE)) if len(self.val) == 1 and not self.val_path else math.nan


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW with warm-up and a way down."""

    lr: float = 3e-3
    """Peak learning rate."""
    rates: tuple[str, ...] = ()
    """What learns at another rate than lr, with that rate over lr at every step: experts:0.5 (the routed ones), routers:0,
    which leaves them as they were drawn."""
    schedule: str = "cosine:0.1"
    """The way down, and the learning rate at the last step over the peak: cosine:0.1; linear:0; wsd:0.1, none until a line over
    the last fifth of the steps (warm-up, stable, decay). The number may be left out: 0.1. Behind it stand the steps of linear
    warm-up, 40 where none do: cosine:0.1:warmup=500."""
    weight_decay: float = 0.1
    """On matrices; norms, biases and routers have none."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decays of AdamW's two moments."""
    clip_norm: float = 1.0
    """Largest norm of the gradient over all parameters; 0 turns clipping off."""

    def __post_init__(self) -> None:
        if not 0 < self.lr < math.inf:
            raise InputError(f"optimizer.lr={self.lr}: must be above 0 and finite")
        for name in ("clip_norm", "weight_decay"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InputError(f"optimizer.{name}={getattr(self, name)}: must be 0 or more and finite")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise InputError(f"optimizer.betas={self.betas}: both must be at least 0 and below 1")
        if not re.fullmatch(rf"({'|'.join(WAYS_DOWN)})(:[^:=]+)?(:warmup=[0-9]{{1,18}})?", self.schedule) or not (
            0 <= self.final_share <= 1
        ):
            raise InputError(
                f"optimizer.schedule={self.schedule!r}: write one of {', '.join(WAYS_DOWN)}, and behind colons a share from 0 "
                "to 1 and steps of warm-up, such as cosine:0.1:warmup=500"
            )
        names = [each.partition(":")[0] for each in self.rates]
        if set(names) - {"experts", "routers"} or len(names) > len(set(names)) or not all(
            0 <= self.rate_of(name) < math.inf for name in names
        ):  # fmt: skip
            raise InputError(
                f"optimizer.rates={' '.join(self.rates)}: write experts and routers once at most, each with a number of 0 or "
                "more behind a colon, such as experts:0.5"
            )

    @property
    def way_down(self) -> str:
        """One of `WAYS_DOWN`."""
        return self.schedule.partition(":")[0]

    @property
    def final_share(self) -> float:
        """Learning rate at the last step over the peak."""
        shares = [word for word in self.schedule.split(":")[1:] if not word.startswith(WARMUP)]
        return read_number(shares[0]) if shares else 0.1

    @property
    def warmup_steps(self) -> int:
        """Steps of linear warm-up."""
        last = self.schedule.split(":")[-1]
        return int(last.removeprefix(WARMUP)) if last.startswith(WARMUP) else WARMUP_STEPS

    def rate_of(self, what: str) -> float:
        """Return the learning rate of the experts, or of the routers, over `lr`."""
        said = [each.partition(":")[2] for each in self.rates if each.partition(":")[0] == what]
        return read_number(said[0]) if said else 1.0


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """How the ranks that torchrun started share the model; data parallelism takes the ranks that are left over."""

    tp: int = 1
    """Tensor parallelism: so many ranks hold the same tokens and each a part of attention and of dense layers; must divide
    model.num_heads."""
    ep: int = 1
    """Expert parallelism: the experts of a layer are split over so many ranks."""
    etp: int = 1
    """Expert tensor parallelism: each expert's inner width is split over so many ranks."""
    pp: tuple[int, ...] = (1,)
    """Pipeline parallelism: the blocks are split over so many stages, which share the ranks evenly; a step's `accumulation`
    micro-batches flow through them. A second number has each stage take so many parts of the model, by interleaved 1F1B in
    place of 1F1B."""
    innermost: Literal["etp", "ep"] = "etp"
    """Which of etp and ep has consecutive ranks, which usually share a node."""
    ranks_per_node: int | None = None
    """Consecutive ranks that share a node; None takes what torchrun says (LOCAL_WORLD_SIZE)."""
    transport: TransportName = "auto"
    """What carries the messages of MoE layers: auto takes gloo between CPUs and nccl between GPUs; sockets is another one
    between CPUs."""
    sequence_parallel: bool = False
    """Between the layers a rank of a tp group keeps only its part of the positions: less memory, the same bytes sent."""

    def __post_init__(self) -> None:
        if not 1 <= len(self.pp) <= 2 or min(self.pp) < 1:
            raise InputError(
                f"mesh.pp={self.pp_in_words}: write the stages, at least 1, and behind them the parts of the model that each "
                "has, where these are several, such as 4 2"
            )
        if self.stages == 1 and self.parts_per_stage > 1:
            raise InputError(f"mesh.pp={self.pp_in_words}: one stage has the whole model: choose more stages")
        for name in ("tp", "ep", "etp", "ranks_per_node"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"mesh.{name}={value}: must be at least 1")

    @property
    def least_ranks(self) -> int:
        """The smallest world that the mesh fits."""
        return self.stages * math.lcm(self.tp, self.ep * self.etp)

    @property
    def stages(self) -> int:
        """Pipeline stages."""
        return self.pp[0]

    @property
    def parts_per_stage(self) -> int:
        """Parts of the model that each stage has."""
        return self.pp[1] if len(self.pp) > 1 else 1

    @property
    def pp_in_words(self) -> str:
        """The numbers of `pp`, as a command line has them."""
        return " ".join(map(str, self.pp))


@dataclass(frozen=True, kw_only=True)
class PlannerConfig:
    """Where the plan of the MoE layers comes from, and what is known of the cluster; docs/planning.md."""

    plan: str = ""
    """Empty: the plan is what `plan` and `balance` say. A file: the plan that moesaic show --write wrote, or mesh and plan that
    moesaic plan --write wrote. search: mesh and plan with the shortest predicted step on the ranks that there are. auto: plans
    change while training, by predicted times at first, by measured ones as they come (without cluster and profile the first
    steps time them); the mesh is searched where the configured one does not fit the ranks. parm, parm_printed: S1
    or S2 by Parm's Algorithm 1, corrected or as printed, from the cluster or the profile. --plan says the same."""
    cluster: str = ""
    """From which times are predicted, for plan=auto and for policies in `balance`: a preset, a description that ends in .toml,
    or what moesaic profile measured, which ends in .json. Empty: usual links are assumed where some are needed."""

    def __post_init__(self) -> None:
        if self.rule and not self.cluster:
            raise InputError(f"planner.plan={self.plan} takes the times of collectives from planner.cluster: name one")

    @property
    def is_auto(self) -> bool:
        """Whether plans change while training."""
        return self.plan == "auto"

    @property
    def searches(self) -> bool:
        """Whether mesh and plan are found when the run starts."""
        return self.plan == "search"

    @property
    def rule(self) -> str:
        """The rule that chooses the schedule; empty for none."""
        if not self.plan or self.is_auto or self.searches:
            return ""
        from moesaic.plan.algorithm1 import RULES  # the simulator with it

        return self.plan if self.plan in RULES else ""

    @property
    def file(self) -> str:
        """The file that holds the plan; empty for none."""
        return "" if self.is_auto or self.searches or self.rule else self.plan


@dataclass(frozen=True, kw_only=True)
class BalanceConfig:
    """What is done where routing is skewed; docs/balance.md."""

    replication: str = NO_REPLICATION
    """Which copies are computed by other ranks than their experts' homes, decided at each call from its counts. none; shadow:
    hot experts' weights go to the ranks whose copies they get; published: so, by FasterMoE's own rule; spill: what overloads a
    rank goes to idle ones; least_loaded: spill with no regard to time; eplb, lplb, laer: those systems' rules, to
    compare with; arbiter: none, shadow, spill, both, another
    plan.gather_weights or the smart schedule, whichever is fastest by the cost model, which measured times correct;
    arbiter:counts: so, each call from its counts alone, so that a run can be repeated bit by bit."""
    memory_budget: int | None = None
    """Most bytes that one call of an MoE layer holds on a rank, forward and backward, however routing is skewed; what is beyond
    it goes to helpers under policies that replicate, else the call runs in slices, of which as many as fit are kept for
    backward and the others are recomputed. None: no limit."""
    samples: Placement = UNMOVED
    """Where samples live between MoE layers (NetMoE). none: where they are; two_stage: fewest rows between nodes, then within
    them; weighed: the slower kind of link first. stay: nobody moves, by the same
    programs. With replication=arbiter, samples move in the calls in which that gains most."""
    experts: str = UNMOVED
    """Where experts live, decided by the load of the steps before. none: where they began; balanced: they move where the gain
    until the next decision pays for it; smartmoe: as published, whatever a move costs. Behind a colon stand the optimizer steps
    between decisions: balanced:100; 50 where none do."""

    def __post_init__(self) -> None:
        check_replication("balance", self.policy, self.memory_budget)
        if ":" in self.replication and self.replication != f"{LEARNING}:{BY_COUNTS}":
            raise InputError(f"balance.replication={self.replication!r}: only {LEARNING}:{BY_COUNTS} takes a word")
        for name, value, policies in (
            ("samples", self.samples, SAMPLE_PLACERS), ("experts", self.expert_policy, EXPERT_PLACERS)
        ):  # fmt: skip
            known = (UNMOVED, *policies)
            if value not in known:
                raise InputError(f"balance.{name}={value!r} is unknown: choose one of {', '.join(known)}")
        _, colon, steps = self.experts.partition(":")
        if colon and (not self.moves_experts or not steps.isdecimal() or int(steps) < 1):
            raise InputError(
                f"balance.experts={self.experts!r}: write the steps between decisions, at least 1, behind the colon, such as "
                f"balanced:{EXPERTS_EVERY}"
            )

    @property
    def policy(self) -> str:
        """The name of the replication, as `Plan.replication` has it."""
        return self.replication.partition(":")[0]

    @property
    def learns(self) -> bool:
        """Whether measured times correct the arbiter's model."""
        return self.replication.partition(":")[2] != BY_COUNTS

    @property
    def expert_policy(self) -> str:
        """The name of the policy that moves experts."""
        return self.experts.partition(":")[0]

    @property
    def experts_every(self) -> int:
        """Optimizer steps between decisions about experts."""
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
    """When checkpoints are written, and which stay."""

    every: int
    """Steps between them."""
    keep: int
    """How many stay."""
    in_background: bool
    """Whether they are written while training goes on."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A training run."""

    out: str = "runs/gpt"
    """The run folder: config, metrics, checkpoints, TensorBoard events."""
    existing: Literal["refuse", "resume", "replace"] = "refuse"
    """If the folder holds a run already: refuse; resume from its last good checkpoint; or replace it."""
    steps: int = 500
    """Optimizer steps."""
    batch_size: int = 16
    """Sequences per micro-batch, over all ranks."""
    accumulation: int = 1
    """Micro-batches per optimizer step."""
    seed: int = 0
    """Of initialisation, data order and routing noise."""
    device: str = "auto"
    """auto (CUDA where there is a GPU), cpu, cuda, cuda:1. Of several ranks each takes a GPU of its own. Behind auto and cpu
    stand the CPU threads of a rank, cpu:2; where none do, torch chooses."""
    precision: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    """Autocast of the forward pass. auto: bfloat16 where a matmul of it is measured at least 1.5 times as fast. float64: the
    parameters too, for comparing runs."""
    patience: tuple[float, float] = (START_PATIENCE, 600.0)
    """Seconds that a rank of several may stand at one place before all end, with a line that says who is missing: until the
    first step, and after it. The first one as a flag is also how long ranks wait for each other to come."""
    log_every: int = 10
    """Steps between lines of metrics."""
    evaluate: tuple[int, int] = (100, 128)
    """Steps between evaluations (the last step is always evaluated), and the sequences of each, spread evenly over the
    validation data."""
    save: str = "250"
    """Steps between checkpoints; the last step is always saved. Behind them, :keep=4 keeps the last four in place of two, and
    :background copies what is saved into the CPU's memory and writes it while training goes on."""
    trackers: tuple[str, ...] = (TENSORBOARD,)
    """Who is told the metrics besides: tensorboard writes event files, wandb:PROJECT tells Weights & Biases."""
    routing: tuple[str, ...] = ()
    """Traces of the routing (docs/traces.md). record:counts writes one into the run folder, copies per sequence, rank and
    expert; record:tokens, every token's experts; replay:FILE takes every token's experts from one, their weights from the
    router."""
    numbers: tuple[int, Literal["warn", "rollback"]] = (3, "warn")
    """What happens where numbers go wrong (docs/reliability.md). Steps in a row whose loss or gradient is not finite: each is
    left out on all ranks, and the last of so many ends the run; with 1 the first does. And where the loss leaps far above that
    of the steps before: warn says so; rollback goes back to the last checkpoint, and leaves out the samples from there to the
    leap."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """The model."""
    data: DataConfig = DataConfig()
    """The data."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """The optimizer."""
    mesh: MeshConfig = MeshConfig()
    """How the ranks share the model."""
    plan: StaticPlan = field(default_factory=StaticPlan)
    """How the MoE layers run on the mesh; one process has no use for it."""
    planner: PlannerConfig = PlannerConfig()
    """Where the plan comes from besides."""
    balance: BalanceConfig = BalanceConfig()
    """What is done where routing is skewed."""

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
                f"device={self.device}: write a number of CPU threads behind the colon, at least 1, such as cpu:2"
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
        recorded = [each for each in self.routing if each in RECORDED]
        replayed = [each for each in self.routing if each.startswith(REPLAY) and each != REPLAY]
        if len(recorded) + len(replayed) < len(self.routing) or len(recorded) > 1 or len(replayed) > 1:
            raise InputError(
                f"routing={' '.join(self.routing)}: write {' or '.join(RECORDED)} once at most, and {REPLAY}FILE once at most"
            )
        if self.goes_back and self.replay_routing is not None:
            raise InputError(
                "numbers: rollback clashes with routing=replay, whose trace is of samples in their order: leave one out"
            )

    def _check_shards(self) -> None:
        model, mesh = self.model, self.mesh
        sparse = [model.is_sparse(layer) for layer in range(model.num_layers)]
        wanted = [("mesh.ep", mesh.ep, "model.moe.num_experts", model.moe.num_experts)] if any(sparse) else []
        wanted += [("mesh.etp", mesh.etp, "model.moe.hidden", model.moe.hidden)] if any(sparse) else []
        if not all(sparse):
            wanted.append(("mesh.tp", mesh.tp, "the dense layers' inner width", model.active_hidden))
        if mesh.sequence_parallel:
            length = model.seq_len // (2 if model.block.kind == "encoder_decoder" else 1)
            wanted.append(("mesh.tp", mesh.tp, "the positions of a sequence (for mesh.sequence_parallel)", length))
        for axis, ranks, name, size in wanted:
            if size % ranks:
                raise InputError(f"{axis}={ranks} does not divide {name}={size}: choose sizes that divide")

    def _check_stages(self) -> None:
        stages, parts, asked = self.mesh.stages, self.mesh.parts_per_stage, f"mesh.pp={self.mesh.pp_in_words}"
        if stages == 1:
            return
        if stages * parts > self.model.num_layers:
            raise InputError(
                f"{asked}: wants {stages * parts} parts of a model of model.num_layers={self.model.num_layers}: choose fewer"
            )
        if self.accumulation % stages:
            raise InputError(
                f"{asked}: {stages} stages do not divide accumulation={self.accumulation}, the micro-batches of a step that "
                f"flow through them: choose a multiple of {stages}"
            )
        balance, kind = self.balance, self.model.block.kind
        for name, value, off in (
            ("balance.samples", balance.samples, UNMOVED), ("balance.experts", balance.expert_policy, UNMOVED),
            ("balance.replication", balance.policy, NO_REPLICATION),
            ("balance.memory_budget", balance.memory_budget, None),
            ("planner.plan", "" if self.planner.file else self.planner.plan, ""),
            ("model.block.kind", "encoder_decoder" if kind == "encoder_decoder" else "", ""),
            ("routing", " ".join(self.routing), ""),
        ):  # fmt: skip
            if value != off:
                raise InputError(
                    f"{asked} clashes with {name}={value}, which looks at all layers at once: leave one out"
                )

    def _check_experts(self) -> None:
        asked = f"balance.experts={self.balance.expert_policy}"
        if not self.balance.moves_experts:
            return
        if self.model.is_dense:
            raise InputError(f'{asked}: model.ffn="dense" has no experts to move: leave it none')
        if self.mesh.ep == 1 and not (
            self.planner.file or self.planner.searches
        ):  # a planned mesh is looked at once it is known
            raise InputError(f"{asked} with mesh.ep=1, where every rank has all experts: choose an ep above 1")

    def _check_samples(self) -> None:
        asked = f"balance.samples={self.balance.samples}"
        if not self.balance.moves_samples:
            return
        reasons = (
            (self.model.is_dense, 'model.ffn="dense", which has no MoE layers'),
            (
                self.model.block.kind != "decoder"
                or self.model.block.norm == "post_layer"
                or self.model.block.dropout > 0,
                "model.block: only decoders without norms behind the residual and without dropout move samples",
            ),
            (
                self.mesh.sequence_parallel,
                "mesh.sequence_parallel, which leaves each rank a part of every sample's positions",
            ),
            (self.planner.is_auto, "planner.plan=auto, whose plans are predicted for samples that stay"),
        )
        for holds, what in reasons:
            if holds:
                raise InputError(f"{asked} clashes with {what}; or leave samples none")

    @property
    def threads(self) -> int | None:
        """CPU threads; None leaves torch's choice."""
        kind, _, number = self.device.partition(":")
        return int(number) if number and kind in ("auto", "cpu") else None

    def saving(self) -> Saves:
        """Return what `save` says.

        Raises:
            InputError: if it says nothing that is known.
        """
        found = re.fullmatch(r"([1-9][0-9]*)(?::keep=([1-9][0-9]*))?(:background)?", self.save)
        if found is None:
            raise InputError(
                f"save={self.save!r}: write the steps between checkpoints, at least 1, and behind them :keep=2 and :background "
                "where you want them, in this order, such as 250:keep=4"
            )
        every, keep, background = found.groups()
        return Saves(every=int(every), keep=int(keep or KEPT), in_background=background is not None)

    @property
    def record_routing(self) -> Literal["none", "counts", "tokens"]:
        """What of the routing is recorded."""
        return "tokens" if RECORDED[1] in self.routing else "counts" if RECORDED[0] in self.routing else "none"

    @property
    def replay_routing(self) -> str | None:
        """The trace that is replayed; None for none."""
        return next((each.removeprefix(REPLAY) for each in self.routing if each.startswith(REPLAY)), None)

    @property
    def goes_back(self) -> bool:
        """Whether a leap of the loss takes the run back to its last checkpoint."""
        return self.numbers[1] == "rollback"

    @property
    def layer_plan(self) -> Plan:
        """What the MoE layers run by: `plan` with what `balance` says of replication and the memory budget."""
        static = {each.name: getattr(self.plan, each.name) for each in fields(StaticPlan)}
        return Plan(**static, replication=self.balance.policy, memory_budget=self.balance.memory_budget)

    def with_layer_plan(self, plan: Plan) -> TrainConfig:
        """Return the configuration whose `layer_plan` is this one."""
        static = StaticPlan(**{each.name: getattr(plan, each.name) for each in fields(StaticPlan)})
        balance = replace(self.balance, memory_budget=plan.memory_budget)
        if plan.replication != balance.policy:
            balance = replace(balance, replication=plan.replication)
        return replace(self, plan=static, balance=balance)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step."""
        return self.batch_size * self.accumulation * self.model.seq_len


WARM = {"lr": 6e-4, "schedule": "cosine:0.1:warmup=500"}
RUNS: dict[str, dict[str, Any]] = {
    "demo": {"out": "runs/demo/moe", "steps": 600, "save": "300"},
    "gpt-tiny": {"steps": 50, "evaluate": [25, 8], "optimizer": {"lr": 1e-2, "schedule": "cosine:0.1:warmup=10"}},
    "bert-tiny": {"steps": 250, "evaluate": [100, 4096], "model": {"conv_width": 8}, "optimizer": {"lr": 1e-2}},
    "seq2seq-tiny": {"steps": 1000, "evaluate": [100, 512], "optimizer": {"lr": 1e-2}},
    "gpt-small": {
        "steps": 20_000, "evaluate": [500, 128], "save": "1000", "optimizer": WARM,
        "model": {"moe": {"losses": ["load_balance:0.01", "z_loss:0.001"]}},
    },
}  # fmt: skip
"""How a model is trained, by its name; PUBLISHED for those that are not here."""
PUBLISHED: dict[str, Any] = {
    "steps": 100_000, "evaluate": [1000, 128], "save": "1000", "model": {"conv_width": 1}, "optimizer": WARM,
}  # fmt: skip


def preset(name: str) -> TrainConfig:
    """Return the configuration of a model of `plan/presets.py`."""
    config = override(TrainConfig(out=f"runs/{name}"), asdict(MODELS[name]), source=name)
    if config.model.moe.top_k == 1:  # the weight of one expert of one would be 1, and the router would learn nothing
        config = override(config, {"model": {"moe": {"router": "switch"}}}, source=name)
    return override(config, RUNS.get(name, PUBLISHED), source=name)


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
    "demo": demo, "demo-dense": demo_dense, **{name: partial(preset, name) for name in MODELS if name != "demo"}
}  # fmt: skip
