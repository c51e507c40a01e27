"""Every plan that a mesh can run, out of a space of choices: what a planner ranks and a benchmark tries."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from moesaic.errors import InputError
from moesaic.plan.compile import Compiled, Durations, compile_plan
from moesaic.plan.plan import AllToAll, Codec, Order, Plan, Schedule
from moesaic.program.all_to_all import ALL_TO_ALLS
from moesaic.program.build import SCHEDULES
from moesaic.program.grid import Grid
from moesaic.program.passes.split import groups_inside_nodes


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """Which values of each choice to combine. The default holds lossless plans only."""

    schedules: tuple[Schedule, ...] = tuple(SCHEDULES)
    fuse: tuple[bool, ...] = (False,)
    """With True also the one movement over ep and etp of baseline and s3."""
    gather_weights: tuple[int, ...] | None = None
    """Values of Tutel's r beside "no weight moves"; None takes 0 and every divisor of etp below etp."""
    chunks: tuple[int, ...] = (1, 2, 4)
    peer_groups: tuple[int, ...] = (1,)
    node_groups: bool = False
    """Also the smart schedule by topology: one group of peers per node, or the fewest that stay inside nodes."""
    overlap_gather: tuple[bool, ...] = (False, True)
    all_to_alls: tuple[AllToAll, ...] = (*ALL_TO_ALLS, "multicast")
    orders: tuple[Order, ...] = ("optsche",)
    codecs: tuple[Codec, ...] = ("none",)
    """Of the forward pass. A lossy codec is tried only where it is listed here."""
    backward_codecs: tuple[Codec, ...] = ("none",)

    def __post_init__(self) -> None:
        for name, values in vars(self).items():
            if values is not None and values is not False and not values and name != "gather_weights":
                raise InputError(f"search.{name} is empty: name at least one value")

    def groups(self, grid: Grid) -> tuple[int, ...]:
        """Return the numbers of peer groups to try on a mesh."""
        by_node = (groups_inside_nodes(grid),) if self.node_groups else ()
        return tuple(dict.fromkeys((*self.peer_groups, *by_node)))

    def plans(self, grid: Grid) -> Iterator[Plan]:
        """Yield every combination, those that do not fit the mesh among them.

        Args:
            grid: tells the values of r.
        """
        shards = self.gather_weights
        if shards is None:
            shards = tuple(r for r in range(grid.etp) if r == 0 or grid.etp % r == 0)
        for values in itertools.product(
            self.schedules, self.fuse, (None, *shards), self.chunks, self.groups(grid), self.overlap_gather,
            self.all_to_alls, self.codecs, self.backward_codecs, self.orders,
        ):  # fmt: skip
            schedule, fuse, r, chunks, groups, overlap, links, codec, backward_codec, order = values
            yield Plan(
                schedule=schedule, fuse=fuse, gather_weights=r, chunks=chunks, peer_groups=groups, overlap_gather=overlap,
                all_to_all=links, codec=codec, backward_codec=backward_codec, order=order,
            )  # fmt: skip


def candidates(
    grid: Grid,
    space: SearchSpace | None = None,
    *,
    bias: bool = False,
    durations: Durations | None = None,
    host_runs_compute: bool = False,
) -> Iterator[Compiled]:
    """Yield the compiled plans that fit a mesh, each different program once: of equal ones, the first of the space.

    Args:
        grid: the mesh.
        space: of choices; None is the default, lossless one.
        bias, durations, host_runs_compute: as for `compile_plan`.

    Raises:
        InputError: if no plan of the space fits; the line repeats why the last one does not.
    """
    seen: set[bytes] = set()
    refusal = ""
    for plan in (space or SearchSpace()).plans(grid):
        try:
            compiled = compile_plan(plan, grid, bias=bias, durations=durations, host_runs_compute=host_runs_compute)
        except InputError as error:
            refusal = str(error)
            continue
        if compiled.digest not in seen:
            seen.add(compiled.digest)
            yield compiled
    if not seen:
        raise InputError(f"no plan of the search space fits the mesh; the last one: {refusal}")
