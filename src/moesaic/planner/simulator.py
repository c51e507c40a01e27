"""`Simulator`: predicts when each task of a program runs on a cluster. Needs no torch.

It simulates the program that the executor runs, with rows derived from the same layouts and paths.
Under an even workload one rank stands for all (`even.py`), so the number of ranks costs nothing.
With counts, or if few ranks send eagerly, every rank is simulated (`movement.py`). `task_times.py`
says how long tasks take.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

from moesaic.errors import InputError
from moesaic.planner.call_sizes import chunks_of, sizes_of
from moesaic.planner.cluster import ClusterSpec
from moesaic.planner.compute import rates_of
from moesaic.planner.even import MAX_RANKS_APART, AbstractEvenLayers, EvenLayers
from moesaic.planner.movement import RANKS_APART, AbstractVolumes, Counted, movements_of
from moesaic.planner.symmetry import UnlikeError
from moesaic.planner.task_times import Simulated, timed
from moesaic.planner.topology import Topology, one_node
from moesaic.planner.workload import Workload
from moesaic.program.all_to_all.all_to_all import legs_by_hop
from moesaic.program.grid import Grid
from moesaic.program.layouts import LayoutIndex
from moesaic.program.sizes import CallSizes
from moesaic.program.task import Program


def level_of(cluster: ClusterSpec, name: str) -> str:
    """Return the name of the level of a cluster to which a directed link belongs; the link's name
    begins with it."""
    levels = [link.name for link in cluster.links if name.startswith(link.name)]
    # of levels whose names begin alike the longest one; a link of no level is one by itself
    return max(levels, key=len, default=name)


class Simulator:
    """Simulates programs on one cluster, and caches what does not depend on the plan.

    Args:
        cluster: the cluster.
        even: source of the rows and messages of even layers; None: every layer is computed by
            itself.
    """

    def __init__(self, cluster: ClusterSpec, *, even: AbstractEvenLayers | None = None) -> None:
        self.cluster = cluster
        self._even = even or EvenLayers(cluster)
        self._topology = cache(partial(Topology, cluster))
        """`Topology` of this cluster, by the number of ranks and those of a node; not folded."""
        self.one_node = cache(partial(one_node, cluster))
        """Function of the same name for this cluster, whose results are kept."""
        self.rates_of = cache(partial(rates_of, cluster))
        """Function of the same name for this cluster, whose results are kept."""
        self._legs = cache(legs_by_hop)
        """Function of the same name, whose results are kept."""
        self._shapes = cache(LayoutIndex)
        """`LayoutIndex` by mesh, experts and chunks."""
        self.level_of = cache(partial(level_of, cluster))
        """Function of the same name for this cluster, whose results are kept."""
        self.forwards: dict[tuple[object, ...], Any] = {}
        """Results of `StepCostModel.forward` (`step.py`), by what they depend on."""

    def run(
        self, program: Program, workload: Workload, grid: Grid, *, sizes: CallSizes | None = None
    ) -> Simulated:
        """Simulate a program.

        Args:
            program: forward or backward, in the order of issue.
            workload: the layer and its tokens; even routing unless `sizes` is given.
            grid: the mesh, with etp factored as the plan requires.
            sizes: of a call with counts; every rank is then simulated separately.

        Raises:
            InputError: if the mesh does not fit the cluster, or the dtype's rate is unknown.
        """
        volumes = self.volumes(program, workload, grid, sizes=sizes)
        return timed(self.cluster, program, volumes, workload.products or workload.dtype)

    def passes(
        self,
        forward: Program,
        backward: Program,
        workload: Workload,
        grid: Grid,
        *,
        sizes: tuple[CallSizes | None, CallSizes | None] = (None, None),
    ) -> tuple[Simulated, Simulated]:
        """Simulate a layer's forward and backward pass.

        Args:
            forward: forward program of a compiled plan.
            backward: backward program of the same plan.
            workload: as in `run`.
            grid: mesh of the compiled plan.
            sizes: of a call with counts, one per pass; None: even routing.
        """
        forward_sizes, backward_sizes = sizes
        forward_run = self.run(forward, workload, grid, sizes=forward_sizes)
        backward_run = self.run(backward, workload, grid, sizes=backward_sizes)
        return forward_run, backward_run

    def layer_seconds(
        self, forward: Program, backward: Program, workload: Workload, grid: Grid
    ) -> float:
        """Return the seconds of a layer: both passes, and its time outside its programs. Arguments
        as in `passes`."""
        passes = self.passes(forward, backward, workload, grid)
        return self.cluster.host.layer_us * 1e-6 + sum(run.seconds for run in passes)

    def volumes(
        self, program: Program, workload: Workload, grid: Grid, *, sizes: CallSizes | None = None
    ) -> AbstractVolumes:
        """Return the rows and messages of a program. Arguments as in `run`."""
        if sizes is not None:
            return self._counted(sizes, workload)
        if self.cluster.host.messages == "eager" and grid.world <= RANKS_APART:
            # ranks drift apart even if they do the same, so each is simulated
            return self._counted(self._even_sizes(program, workload, grid), workload)
        try:
            volumes = self._even.volumes(program, workload, grid)
            movements_of(program, volumes)  # which also finds out whether ranks are unlike
        except UnlikeError as error:
            return self._one_actor_per_rank(program, workload, grid, error)
        return volumes

    def _one_actor_per_rank(
        self, program: Program, workload: Workload, grid: Grid, error: UnlikeError
    ) -> AbstractVolumes:
        """Return even rows with one actor per rank, for meshes and all-to-alls in which no rank can
        stand for the others."""
        if grid.world > MAX_RANKS_APART:
            raise InputError(
                f"a mesh of {grid.world} ranks in which {error} cannot be simulated by one rank "
                f"for all, and is too large to simulate each: choose {error.advice}, or at most "
                f"{MAX_RANKS_APART} ranks"
            ) from error
        return self._counted(sizes_of(program, workload, grid), workload)

    def _counted(self, sizes: CallSizes, workload: Workload) -> AbstractVolumes:
        """Return the rows of a call with one actor per rank."""
        topology = self._topology(sizes.grid.world, sizes.grid.ranks_per_node)
        return Counted(sizes, topology, layer=workload, legs=self._legs)

    def _even_sizes(self, program: Program, workload: Workload, grid: Grid) -> CallSizes:
        """Return sizes under even routing. The rows of each layout are computed once for all
        programs of a mesh."""
        if any(isinstance(slot.layout.chunk, str) for slot in program.slots):  # rows of replicas
            return sizes_of(program, workload, grid)
        shapes = self._shapes(grid, workload.num_experts, chunks_of(program))
        return sizes_of(program, workload, grid, shapes=shapes)
