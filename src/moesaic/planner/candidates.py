"""The search space: the meshes that a job fits, and the plans of a space of choices that a mesh can
run.

The planner ranks these plans, and benchmarks try them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from moesaic.errors import InputError
from moesaic.planner.cluster import ClusterSpec
from moesaic.planner.job import Job
from moesaic.program.all_to_all import ALL_TO_ALLS
from moesaic.program.build import SCHEDULES
from moesaic.program.compile import Compiled, compile_plan
from moesaic.program.grid import Grid
from moesaic.program.passes.split import groups_inside_nodes
from moesaic.program.plan import AllToAll, Codec, Order, Plan, Schedule


@dataclass(frozen=True, kw_only=True)
class Pins:
    """Sizes of mesh axes that a search must use; None leaves an axis free."""

    tp: int | None = None
    """Tensor parallelism; if free, only sizes inside a node are tried."""
    ep: int | None = None
    """Expert parallelism."""
    etp: int | None = None
    """Expert tensor parallelism."""
    innermost: Literal["etp", "ep"] | None = None
    """Which of etp and ep has consecutive ranks."""


def layouts(job: Job, cluster: ClusterSpec, pins: Pins = Pins(), pp: int = 1) -> list[Grid]:
    """Return the meshes of the devices of one of `pp` equal pipeline stages that split a job
    evenly.

    Raises:
        InputError: if there are none; the message says why the mesh with the smallest sizes does
            not fit.
    """
    world = cluster.world // pp
    per_node = min(cluster.devices_per_node, world)
    if world * pp != cluster.world or world % per_node:
        raise InputError(
            f"{cluster.world} ranks in nodes of {cluster.devices_per_node} do not split into {pp} "
            "stages of whole nodes, or of equal parts of one"
        )
    grids = list(_grids(world, per_node, pins))
    fitting = [grid for grid in grids if not _refusal(job, grid)]
    if not fitting:
        if grids:
            why = f": the first one, {name_of(grids[0])}: {_refusal(job, grids[0])}"
        else:
            why = _which_do_not_divide(world, pins)
        raise InputError(f"the search space holds no layout of {world} ranks{why}")
    return fitting


def _which_do_not_divide(world: int, pins: Pins) -> str:
    """Return the end of a message: the pinned sizes that do not divide the ranks."""
    all_sizes: dict[str, int | None] = {"tp": pins.tp, "ep": pins.ep, "etp": pins.etp}
    pinned = {name: size for name, size in all_sizes.items() if size is not None}
    wrong = [name for name, size in pinned.items() if world % size]
    if not wrong:  # each divides the ranks, but ep times etp does not
        wrong = [name for name in pinned if name != "tp"]
    sizes = " x ".join(f"{name} {pinned[name]}" for name in wrong)
    flags = " and ".join(f"--{name}" for name in wrong)
    return (
        f": {sizes} does not divide them: choose a divisor, or leave {flags} out and every size "
        "is tried"
    )


def name_of(grid: Grid) -> str:
    """Return a layout in words, for example "tp 2, ep 8, etp 1"."""
    inner = ", ep innermost" if grid.innermost == "ep" else ""
    return f"tp {grid.tp}, ep {grid.ep}, etp {grid.etp}{inner}"


def _grids(world: int, per_node: int, pins: Pins) -> Iterator[Grid]:
    """Yield the meshes of a world that the pins allow; tp stays inside a node."""
    divisors = [size for size in range(1, world + 1) if world % size == 0]
    tps = [size for size in divisors if size <= per_node] if pins.tp is None else [pins.tp]
    eps = divisors if pins.ep is None else [pins.ep]
    etps = divisors if pins.etp is None else [pins.etp]
    for tp, ep, etp in itertools.product(tps, eps, etps):
        if world % tp or world % (ep * etp):
            continue
        orders: list[Literal["etp", "ep"]] = ["etp"]
        if pins.innermost is not None:
            orders = [pins.innermost]
        elif ep > 1 and etp > 1:  # else both orders are the same
            orders = ["etp", "ep"]
        for innermost in orders:
            yield Grid(
                world=world, tp=tp, ep=ep, etp=etp, innermost=innermost, ranks_per_node=per_node
            )


def _refusal(job: Job, grid: Grid) -> str:
    """Return the reason why a job does not fit a mesh; "" if it fits."""
    model = job.model
    # (divisor in words, divisor, name of the size, size)
    divisions = [
        (f"mesh.tp={grid.tp}", grid.tp, "model.num_heads", model.num_heads),
        (f"mesh.ep={grid.ep}", grid.ep, "model.moe.num_experts", model.moe.num_experts),
        (f"mesh.etp={grid.etp}", grid.etp, "model.moe.hidden", model.moe.hidden),
        (f"the data-parallel groups, {grid.dp}", grid.dp, "batch_size", job.batch_size),
    ]
    if job.dense_layers:
        divisions.append(
            (f"mesh.tp={grid.tp}", grid.tp, "the dense layers' inner width", model.active_hidden)
        )
    for divisor_in_words, divisor, name, size in divisions:
        if size % divisor:
            return f"{divisor_in_words} does not divide {name}={size}"
    return ""


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """The values of each choice of a plan that a search combines. The default has lossless plans
    only."""

    schedules: tuple[Schedule, ...] = tuple(SCHEDULES)
    fuse: tuple[bool, ...] = (False,)
    """With True, also plans that fuse the movements over ep and etp (baseline and s3)."""
    gather_weights: tuple[int, ...] | None = None
    """Values of Tutel's r besides etp (no weights move); None for 0 and every divisor of etp below
    etp."""
    chunks: tuple[int, ...] = (1, 2, 4)
    peer_groups: tuple[int, ...] = (1,)
    node_groups: bool = False
    """Whether to also try one peer group per node, or the fewest peer groups that stay inside
    nodes."""
    overlap_gather: tuple[bool, ...] = (False, True)
    all_to_alls: tuple[AllToAll, ...] = (
        *(name for name, link in ALL_TO_ALLS.items() if link.is_searched),
        "multicast",
    )
    orders: tuple[Order, ...] = ("optsche", "early", "fifo")
    """Orders of the tasks of a layer that is cut into chunks; without chunks, only the first one is
    tried."""
    codecs: tuple[Codec, ...] = ("none",)
    """Codecs of the forward pass. A lossy codec is tried only if it is listed."""
    backward_codecs: tuple[Codec, ...] = ("none",)
    """Codecs of the backward pass."""

    def __post_init__(self) -> None:
        for name, values in vars(self).items():
            may_be_empty = name == "gather_weights"  # it then has r = etp alone
            is_switch = isinstance(values, bool)
            if not values and not may_be_empty and not is_switch:
                raise InputError(f"search.{name} is empty: name at least one value")

    def values(self, grid: Grid) -> dict[str, tuple[Any, ...]]:
        """Return the values of every choice on a mesh, by the names of the fields of `Plan`.

        Args:
            grid: the mesh; the values of r and of peer groups per node depend on it.
        """
        gathered = self.gather_weights
        if gathered is None:
            # 0, and the divisors of etp below etp
            gathered = tuple(r for r in range(grid.etp) if r == 0 or grid.etp % r == 0)
        peer_groups = self.peer_groups
        if self.node_groups:
            peer_groups = (*peer_groups, groups_inside_nodes(grid))
        return {
            "schedule": self.schedules,
            "fuse": self.fuse,
            "gather_weights": (None, *gathered),  # None: r = etp
            "chunks": self.chunks,
            "peer_groups": tuple(dict.fromkeys(peer_groups)),  # each once
            "overlap_gather": self.overlap_gather,
            "all_to_all": self.all_to_alls,
            "codec": self.codecs,
            "backward_codec": self.backward_codecs,
            "order": self.orders,
        }

    def plans(self, grid: Grid) -> Iterator[Plan]:
        """Yield every combination of choices on a mesh, including combinations that do not fit
        it."""
        values = self.values(grid)
        for choice in itertools.product(*values.values()):
            plan = Plan(**dict(zip(values, choice)))
            if plan.chunks > 1 or plan.order == self.orders[0]:
                yield plan


def candidates(grid: Grid, space: SearchSpace | None = None) -> Iterator[Compiled]:
    """Yield the compiled plans that fit a mesh; of plans with equal programs, only the first.

    Args:
        grid: the mesh.
        space: the choices to combine; None for the default, lossless space.

    Raises:
        InputError: if no plan of the space fits; the message says why the last one does not.
    """
    space = space or SearchSpace()
    seen = set[bytes]()
    refusal = ""
    for plan in space.plans(grid):
        try:
            compiled = compile_plan(plan, grid)
        except InputError as error:
            refusal = str(error)
            continue
        if compiled.digest not in seen:
            seen.add(compiled.digest)
            yield compiled
    if not seen:
        raise InputError(f"no plan of the search space fits the mesh; the last one: {refusal}")
