"""Draws random test cases. A case is a mesh, a plan, a layer and its tokens; its seed alone
reproduces it.

A group is the ranks that share their tokens (a data-parallel group). A copy is a token at one of
its experts; a replicated copy is computed by a helper, another rank than the expert's home. Every
draw from a generator counts: one more, or another order, changes the cases of all seeds.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, Literal, TypeVar, get_args

import numpy as np
import torch

from moesaic.balance import replication_policy
from moesaic.balance.replication.cost import CallLoad
from moesaic.balance.replication.policy import (
    AbstractChooser,
    AbstractReplicationPolicy,
    CallDecision,
    Replicated,
)
from moesaic.balance.selector.options import option_plans
from moesaic.codecs import CODECS, codec_spec, is_coded
from moesaic.errors import InputError
from moesaic.kernels.codecs import codec_named
from moesaic.policies import REPLICATION
from moesaic.program.all_to_all import ALL_TO_ALLS
from moesaic.program.build import SCHEDULES
from moesaic.program.compile import compile_plan
from moesaic.program.grid import Grid
from moesaic.program.plan import NO_REPLICATION, Crossing, Order, Plan
from moesaic.program.rates import Rates
from moesaic.program.replications import Replications
from moesaic.routing.capacity import AbstractCapacity, Capacity, Dropless
from moesaic.routing.losses import AbstractLoss, Importance, LoadBalance, ZLoss
from moesaic.routing.router import AbstractRouter
from moesaic.routing.routers import (
    ROUTERS,
    CosineTopK,
    Hash,
    RouterFactory,
    SigmoidTopK,
    group_limited_sigmoid,
)

T = TypeVar("T")
Precision = Literal["float64", "float32", "autocast"]
"""autocast: float32 under bfloat16 autocast."""

TOLERANCES: dict[Precision, float] = {"float64": 1e-10, "float32": 1e-4, "autocast": 0.12}
"""Largest error that passes, relative to the largest expected value."""

DRAWN_ROUTERS = (*ROUTERS, "softmax", "sigmoid", "noisy")
"""Every router; the common ones twice, so that they are drawn more often."""
EXPERTS = ("swiglu", "swiglu", "gelu", "modules")
"""Kinds of experts (see `Case.experts`), the common one twice."""
_COMMON: Precision = "float64"
_PRECISIONS: tuple[Precision, ...] = (*[_COMMON] * 10, "float32", "autocast")
"""What a precision is drawn from: mostly float64."""
LOSSY = [name for name, spec in CODECS.items() if not spec.is_lossless]
"""Codecs that round what they encode."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One case. `draw_case(seed)` draws it again."""

    seed: int
    """Seed of the weights, the tokens and the order in which ranks advance."""
    grid: Grid
    plan: Plan
    num_experts: int
    top_k: int
    router: str
    """Key of `ROUTERS`."""
    experts: str
    """swiglu, gelu (with biases) or modules."""
    shared: bool
    """Add a shared expert."""
    apply_weight: Literal["after", "before"]
    """Whether routing weights multiply the experts' results or their inputs."""
    capacity: AbstractCapacity
    losses: tuple[AbstractLoss, ...]
    sequences: int
    """Number of sequences in each group's micro-batch."""
    lengths: tuple[tuple[int, ...], ...]
    """Tokens per sequence, by micro-batch, then by data-parallel group."""
    padding: bool
    """Mask some tokens out as padding."""
    skew: float
    """Size of a common offset added to all tokens. A large offset leaves some experts empty."""
    recompute: bool
    """Run under activation checkpointing."""
    evaluate: bool
    """Also run a forward-only pass under inference mode, after the first micro-batch."""
    precision: Precision
    placement: Literal["none", "random", "solved"] = "none"
    """Whether samples change their home in every call: to random ranks, or to the ranks that a
    policy finds cheapest. The results return to the original ranks."""
    by_policy: bool = False
    """For plans that replicate: let the plan's own policy decide, with the costs of a machine so
    slow that replication pays even for these few rows. If False, copies are replicated at random
    under "shadow", and the arbiter chooses at random."""
    experts_move: bool = False
    """Put the experts into a random order during the step. They are moved home before the gradients
    are compared."""

    @property
    def is_exact(self) -> bool:
        """Whether the expected values include the codecs' rounding. If not, they are those of the
        layer without codecs."""
        # only then does a row's rounding not depend on the rows beside it
        rounds_rows = all(
            codec_spec(codec).rows_per_block == 1
            for codec in (self.plan.codec, self.plan.backward_codec)
        )
        # only then is it known how often each row is rounded: where one movement sends rows to all
        # shards of their experts and one returns them, over one link, and nothing else moves rows
        moves_rows_once = (
            self.plan.program.delivers_at_once
            and self.plan.crossing is Crossing.LINK
            and self.plan.gather_weights is None
            and not self.plan.replicates
            and not self.capacity.is_padded
            and not self.experts_move
        )
        # only then does the reference follow rows through the codecs
        is_followed = self.precision == "float64" and self.experts != "modules"
        return self.plan.is_lossless or (rounds_rows and moves_rows_once and is_followed)

    @property
    def tolerance(self) -> float:
        """Largest error that passes, relative to the largest expected value."""
        if self.is_exact:
            return TOLERANCES[self.precision]
        lossy = sum(
            codec_spec(codec).tolerance for codec in (self.plan.codec, self.plan.backward_codec)
        )
        return TOLERANCES[self.precision] + lossy

    @property
    def replicates_bits(self) -> bool:
        """Whether replicas must agree bit for bit.

        In the baseline schedule, each rank of a tensor-parallel group sends copies of its own.
        Their rows lie at different positions of a matrix product, so the ranks agree only up to
        rounding.
        """
        return not self.plan.program.is_redundant or self.grid.tp == 1

    @property
    def policy(self) -> AbstractReplicationPolicy | None:
        """Decides which copies are replicated; None if none are, or if the plan's own policy needs
        no costs."""
        if self.by_policy:
            return slow_policy(self.plan.replication)
        if self.plan.replication == "arbiter":
            return AnyOption(seed=self.seed)
        if self.plan.replication != "shadow":
            return None
        # shadow: copies are replicated at random
        experts_per_rank = self.num_experts // self.grid.ep
        # the place of ep that stores each expert
        home = np.arange(self.num_experts) // experts_per_rank
        return Replicated(random_replication(self.grid, home, np.random.default_rng(self.seed)))


def slow_policy(replication: str) -> AbstractReplicationPolicy | None:
    """Return a policy for a machine that computes so slowly that sending an expert's weights pays
    even for a single copy."""
    costs = Rates(tflops=1e-9)
    return None if replication == NO_REPLICATION else replication_policy(replication, costs)


def draw_case(seed: int, *, world: int | None = None) -> Case:
    """Draw a case from a seed.

    Plans that `compile_plan` refuses on the mesh are drawn again, as are plans with a codec that is
    not installed.

    Args:
        seed: the same seed gives the same case on any machine on which the same codecs are
            installed.
        world: number of ranks; None to draw it too.
    """
    rng = random.Random(seed)
    size = rng.choice([1, 2, 2, 2, 4, 4, 4, 8])  # drawn in any case, since every draw counts
    if world is not None:
        size = world
    while True:
        grid = _draw_grid(rng, size)
        plan = draw_plan(rng)
        grid = _with_levels(random.Random(f"levels {seed}"), grid, plan)
        try:
            compile_plan(_ordered_early(plan), grid)
            for codec in (plan.codec, plan.backward_codec):
                codec_named(codec)
        except InputError:
            continue
        case = _draw_rest(rng, seed, grid, plan)
        # each with a generator of its own, so that a change of one leaves the others as they are
        case = _with_placement(random.Random(f"placement {seed}"), case)
        case = _with_moves(random.Random(f"moves {seed}"), case)
        return _with_budget(random.Random(f"budget {seed}"), case)


def _ordered_early(plan: Plan) -> Plan:
    """Return the plan with order "early": legal on the same meshes, since every order is, but
    compiled without a search."""
    return replace(plan, order="early")


def _with_levels(rng: random.Random, grid: Grid, plan: Plan) -> Grid:
    """Return a grid on which a multicast usually has two levels, if the plan uses multicast; else
    the same grid."""
    # with fewer ranks, there are no two nodes of two ranks
    if plan.crossing is not Crossing.MULTICAST or grid.world < 4:
        return grid
    return replace(grid, ep=grid.world, etp=1, ranks_per_node=rng.choice([1, 2, 2, 2]))


def draw_plan(rng: random.Random) -> Plan:
    """Draw every field of a plan independently; the combination may be illegal."""
    codec = rng.choice((*LOSSY, "zfp:16")) if rng.random() < 0.15 else "none"
    backward_codec = rng.choice(LOSSY) if is_coded(codec) and rng.random() < 0.3 else "none"
    schedules = []
    for name in SCHEDULES:
        # with these, the cases of codecs can be exact (see `Case.is_exact`): twice as likely
        delivers_at_once = Plan(schedule=name).program.delivers_at_once
        schedules += [name] * (2 if delivers_at_once else 1)
    usual_link = Plan().link
    other_links = [name for name in ALL_TO_ALLS if name != usual_link]
    return Plan(
        schedule=rng.choice(schedules),
        fuse=rng.random() < 0.2,
        gather_weights=rng.choice([0, 1, 2]) if rng.random() < 0.3 else None,
        chunks=rng.choice([1, 1, 1, 2, 3]),
        peer_groups=rng.choice([1, 1, 1, 1, 2, 4]),
        overlap_gather=rng.random() < 0.2,
        # multicast is none of `ALL_TO_ALLS`; twice, so that it is drawn more often
        all_to_all=_mostly(rng, usual_link, [*other_links, "multicast", "multicast"]),
        codec=codec,
        backward_codec=backward_codec,
        replication=_mostly(rng, "none", tuple(REPLICATION)) if rng.random() < 0.4 else "none",
        order=_mostly(rng, "early", _others(Order, "early")),
    )


def _others(names: Any, *excluded: str) -> list[Any]:
    """Return the values of a `Literal` type without those in `excluded`."""
    return [name for name in get_args(names) if name not in excluded]


def _mostly(rng: random.Random, usual: T, others: Sequence[T]) -> T:
    """Draw the usual value in half of the cases."""
    return usual if rng.random() < 0.5 else rng.choice(others)


def _draw_grid(rng: random.Random, world: int) -> Grid:
    """Draw a mesh of `world` ranks."""
    divisors = [size for size in (1, 2, 4, 8) if world % size == 0]
    pairs = []
    for ep in divisors:
        for etp in divisors:
            if etp <= 4 and world % (ep * etp) == 0:
                pairs.append((ep, etp))
    ep, etp = rng.choice(pairs)
    return Grid(
        world=world,
        tp=rng.choice([size for size in divisors if size <= 4]),
        ep=ep,
        etp=etp,
        innermost=rng.choice(["etp", "etp", "ep"]),
        ranks_per_node=rng.choice([None, *divisors]),
    )


def _draw_rest(rng: random.Random, seed: int, grid: Grid, plan: Plan) -> Case:
    """Draw the fields of a case that has a mesh and a plan."""
    # A router that looks across tokens needs all of them on one rank, as the reference has them.
    # Some schedules have each rank of a tp group route a slice of its tokens.
    one_sees_all = grid.dp == 1 and (not plan.program.routes_slices or grid.tp == 1)
    routers = [name for name in DRAWN_ROUTERS if one_sees_all or not looks_across_tokens(name)]
    router = rng.choice(routers)
    num_experts = grid.ep * rng.choice([1, 1, 2, 3])
    while not fitting_top_k(router, num_experts):  # until the router can train with so many
        num_experts += grid.ep

    micro_batches = rng.choice([1, 1, 1, 1, 2])
    longest = rng.choice([1, 3, 5, 5])
    lengths = tuple(
        tuple(rng.randint(0, longest) for _ in range(grid.dp)) for _ in range(micro_batches)
    )
    capacity = _draw_capacity(rng)
    is_even = rng.random() < 0.2  # whether all groups have as many tokens
    # whether the plan allows a capacity that pads
    can_pad = plan.crossing is Crossing.LINK and not plan.replicates
    if is_even and can_pad and rng.random() < 0.5:
        longest += -longest % grid.tp  # up to a multiple of tp
        capacity = Capacity.fixed(rng.choice([0.3, 1.0, 1.5]), scope="rank", padded=True)
    if is_even:
        lengths = _all_as_long(lengths, longest)
    return Case(
        seed=seed,
        grid=grid,
        plan=plan,
        num_experts=num_experts,
        top_k=draw_top_k(rng, router, num_experts),
        router=router,
        # modules of torch cannot be split over etp
        experts=rng.choice([name for name in EXPERTS if name != "modules" or grid.etp == 1]),
        shared=rng.random() < 0.2,
        apply_weight=rng.choice(["after", "after", "before"]),
        capacity=capacity,
        losses=_draw_losses(rng),
        sequences=rng.choice([1, 2]),
        lengths=lengths,
        padding=rng.random() < 0.3,
        skew=rng.choice([0.0, 1.0, 4.0]),
        recompute=rng.random() < 0.15,
        evaluate=rng.random() < 0.15,
        precision=rng.choice(_PRECISIONS) if plan.is_lossless else "float64",
    )


def _with_placement(rng: random.Random, case: Case) -> Case:
    """Let samples move in some of the cases that allow it. Every rank then gets the same number of
    samples of one length."""
    # only then does a sample's routing not depend on the rank that has it
    routes_alone = not looks_across_tokens(case.router) and not draws_noise(case.router)
    if not routes_alone or case.grid.world == 1 or rng.random() > 0.4:
        return case
    plan = replace(case.plan, codec="none", backward_codec="none")
    # most plans return results home first; half of the cases get a plan that need not
    if rng.random() < 0.5:
        plan = replace(
            plan, schedule="s1", replication="none", gather_weights=None, all_to_all=plan.link
        )
    elif not (plan.replicates or case.capacity.is_padded) and rng.random() < 0.3:
        plan = replace(plan, replication="arbiter")
    try:
        compile_plan(_ordered_early(plan), case.grid)
    except InputError:
        return case
    longest = max(1, *(max(lengths_of_groups) for lengths_of_groups in case.lengths))
    return replace(
        case,
        plan=plan,
        placement=rng.choice(["random", "random", "solved"]),
        sequences=case.sequences * case.grid.tp,  # split over the ranks of a tp group
        lengths=_all_as_long(case.lengths, longest),
    )


def _all_as_long(lengths: tuple[tuple[int, ...], ...], length: int) -> tuple[tuple[int, ...], ...]:
    """Return lengths by micro-batch and group, all replaced by `length`."""
    return tuple((length,) * len(lengths_of_groups) for lengths_of_groups in lengths)


def _with_budget(rng: random.Random, case: Case) -> Case:
    """Give some of the cases a memory budget, in rows, so small that most of them run in slices,
    spill, or both."""
    if case.capacity.is_padded or rng.random() > 0.2:
        return case
    return replace(case, plan=replace(case.plan, memory_budget=rng.choice([1, 2, 3, 5, 8, 12])))


def _with_moves(rng: random.Random, case: Case) -> Case:
    """Let the plan's policy decide in some of the cases that replicate, and move experts in some of
    those with ep above 1."""
    # the share of cases that the plan's policy decides; only "shadow" and "arbiter" have a random
    # one in its place (see `Case.policy`)
    share = {"none": 0.0, "shadow": 0.5, "arbiter": 0.5}.get(case.plan.replication, 1.0)
    by_policy = rng.random() < share
    can_move = case.grid.ep > 1
    return replace(case, by_policy=by_policy, experts_move=can_move and rng.random() < 0.25)


def draw_top_k(rng: random.Random, router: str, num_experts: int) -> int:
    """Draw top_k: the smallest with which the router can train, one of the four smallest, or the
    largest."""
    fitting = fitting_top_k(router, num_experts)
    return rng.choice([fitting[0], rng.choice(fitting[:4]), fitting[-1]])


def _draw_capacity(rng: random.Random) -> AbstractCapacity:
    """Draw a capacity."""
    if rng.random() < 0.4:
        return Dropless()
    scope = rng.choice(["mesh", "mesh", "rank"])
    order = rng.choice(["position", "position", "score"])
    factor = rng.choice([0.3, 0.7, 1.0, 1.5])
    kind = rng.choice(["fixed", "fixed", "fitted", "at_most"])
    if kind == "fixed":
        return Capacity.fixed(factor, order=order, scope=scope)  # type: ignore[arg-type]
    at_most = factor if kind == "at_most" else None
    return Capacity.fitted(at_most=at_most, order=order, scope=scope)  # type: ignore[arg-type]


def _draw_losses(rng: random.Random) -> tuple[AbstractLoss, ...]:
    """Draw up to three auxiliary losses."""
    level = rng.choice(["micro_batch", "sequence", "global_batch"])
    losses: list[AbstractLoss] = [LoadBalance(0.7, level=level), Importance(0.3), ZLoss(0.2)]  # type: ignore[arg-type]
    return tuple(rng.sample(losses, rng.choice([0, 1, 2, 3])))


def random_replication(grid: Grid, home: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return a random number of replicated copies per (rank, expert, helper), (world, num_experts,
    ep) int64.

    The numbers may exceed the copies that exist; see `limited_to_existing`.

    Args:
        grid: the mesh.
        home: (num_experts,) the place of ep that stores each expert.
        rng: draws the numbers.
    """
    replicated: np.ndarray = rng.integers(0, 4, size=(grid.world, len(home), grid.ep))
    is_kept = rng.random(replicated.shape) < rng.choice([0.1, 0.5, 1.0])
    replicated *= is_kept
    replicated[:, np.arange(len(home)), home] = 0  # an expert's home is no helper of it
    return replicated


def limited_to_existing(load: CallLoad, replicated: np.ndarray) -> np.ndarray:
    """Return the table limited to the copies that exist, earlier helpers first.

    Args:
        load: has the copies per (rank, expert).
        replicated: copies per (rank, expert, helper), as `random_replication` returns them.
    """
    at_earlier_helpers = np.cumsum(replicated, axis=2) - replicated
    left = np.maximum(load.copies[:, :, None] - at_earlier_helpers, 0)  # per helper
    limited: np.ndarray = np.minimum(replicated, left)
    return limited


@dataclass(frozen=True, kw_only=True)
class AnyOption(AbstractReplicationPolicy):
    """A policy that chooses a random option of the arbiter for every call, the same on all
    ranks."""

    has_choice = True
    seed: int
    """Seed of the choices."""

    def decide(self, load: CallLoad) -> np.ndarray:
        """Return a random table of replicated copies."""
        rng = np.random.default_rng(self.seed)
        return limited_to_existing(load, random_replication(load.grid, load.home, rng))

    def option_plans(self, plan: Plan, grid: Grid) -> dict[str, Plan]:
        """Return the plans among which the arbiter chooses."""
        return option_plans(plan, grid)

    def start(self, plans: Mapping[str, Plan]) -> AbstractChooser:
        """Return the object that chooses for one layer."""
        return _Drawing(self.seed, plans)


class _Drawing(AbstractChooser):
    """Chooses a random option for each call of one layer, seeded by the call's number."""

    def __init__(self, seed: int, plans: Mapping[str, Plan]) -> None:
        self._seed = seed
        self._plans = plans
        """The arbiter's options: plans by name of their program."""
        self._calls = 0
        """Number of calls so far."""

    def choose(self, load: CallLoad) -> CallDecision:
        """Return a random decision for a call."""
        rng = np.random.default_rng((self._seed, self._calls))
        self._calls += 1
        programs = list(self._plans)
        program = programs[int(rng.integers(len(programs)))]
        replicated = None
        if self._plans[program].replicates:
            table = random_replication(load.grid, load.home, rng)
            replicated = Replications.of(limited_to_existing(load, table))
        return CallDecision(option=program, program=program, replicated=replicated, seconds={})


DIM = 4
"""Width of a token."""


def small_router(name: str, num_experts: int, top_k: int) -> RouterFactory:
    """Return a factory for the router `name`, with options that suit few tokens and experts if the
    defaults do not.

    Args:
        name: key of `ROUTERS`.
        num_experts: number of experts of the layer.
        top_k: experts per token.
    """
    # each of the two groups of "group_limited" has half of the experts
    top_groups = 2 if top_k > num_experts // 2 else 1
    options: dict[str, RouterFactory] = {
        "cosine": partial(CosineTopK, projection=3, temperature=0.5),
        "hash": partial(Hash, buckets=16),
        "group_limited": partial(
            group_limited_sigmoid, num_groups=2, top_groups=top_groups, bias_rate=0.1
        ),
        "sigmoid": partial(SigmoidTopK, bias_rate=0.1),
    }
    return options.get(name, ROUTERS[name])


@lru_cache(maxsize=1024)
def fitting_top_k(name: str, num_experts: int) -> tuple[int, ...]:
    """Return every top_k with which a router can train, ascending; empty if no such router can be
    built."""
    fitting = []
    with torch.random.fork_rng(devices=[]):
        for top_k in range(1, num_experts + 1):
            try:
                small_router(name, num_experts, top_k)(DIM, num_experts).check(top_k)
            except InputError:
                continue
            fitting.append(top_k)
    return tuple(fitting)


@lru_cache(maxsize=64)
def looks_across_tokens(name: str) -> bool:
    """Whether a router's choice for a token depends, in training, on the rank's other tokens."""
    return _smallest_router(name).looks_across_tokens


@lru_cache(maxsize=64)
def draws_noise(name: str) -> bool:
    """Whether a router draws random numbers in training."""
    router = _smallest_router(name)
    with torch.random.fork_rng(devices=[]):
        return router.draw(1, torch.device("cpu")) is not None


def _smallest_router(name: str) -> AbstractRouter:
    """Return a router with as few experts as it can have, in training mode."""
    num_experts = 1
    while not fitting_top_k(name, num_experts):
        num_experts += 1
    smallest_top_k = fitting_top_k(name, num_experts)[0]
    with torch.random.fork_rng(devices=[]):
        router = small_router(name, num_experts, smallest_top_k)(DIM, num_experts)
    return router.train()
