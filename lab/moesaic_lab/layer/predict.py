"""What a plan should take on a bed with virtual accelerators: durations of its tasks, and the plans worth a trial.

The links' part is bytes over rate on the busiest link of the bed. The host's part is what the interpreter and Gloo take on
cores that several ranks share, fitted to steps of 16 ranks on 2 cores (17 plans, mean error 5 %). It only ranks plans and
orders tasks: what is claimed is measured.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from moesaic.cost.call_sizes import chunks_of, sizes_of
from moesaic.cost.row_bytes import LayerShape, row_bytes
from moesaic.cost.workload import Workload
from moesaic.plan import Compiled
from moesaic.program.all_to_all.volume import messages_of
from moesaic.program.bundles import bundles
from moesaic.program.grid import Grid
from moesaic.program.sizes import CallSizes, LayoutIndex
from moesaic.program.task import ONCE, Kind, Op, Program, Slot, Task
from moesaic.program.timeline import lay_out
from moesaic_lab.bounds import link_seconds
from moesaic_lab.layer.config import LayerPlace

TASK_SECONDS = 1e-4
"""Processor time of the interpreter per task."""
MOVEMENT_SECONDS = 6e-4
"""Processor time of a movement: posting, waking up, waiting for ranks that have no core at the moment."""
MESSAGE_SECONDS = 2e-5
"""Processor time of each of its messages on Gloo, sending and receiving."""
COPIED_BYTES_PER_SECOND = 2e9
"""Of rows that a rank puts in another order."""


class LayerPredictor:
    """Durations on one bed; sizes are kept between plans.

    Args:
        place: bed, accelerators and layer. Loads are balanced, so that rank 0 computes as much as any other.
        with_host: count the host's part; without it, durations are those of links and accelerators alone.
    """

    def __init__(self, place: LayerPlace, *, with_host: bool = True) -> None:
        self._place = place
        self._with_host = with_host
        self._shape = LayerShape(dim=place.dim, hidden=place.hidden, element_bytes=4, matrices=2)
        self._slow = max(place.bed.world / (os.cpu_count() or 1), 1.0)
        self._shapes: dict[tuple[Grid, int], LayoutIndex] = {}
        self._sizes: dict[tuple[Grid, int, bool, bool], CallSizes] = {}

    def task_seconds(self, program: Program, grid: Grid) -> dict[str, float]:
        """Return the seconds of every task by name, as the busiest rank or link needs them.

        Args:
            program: forward or backward.
            grid: of the compiled plan.
        """
        slots = {slot.name: slot for slot in program.slots}
        codecs = {task.of: task.codec for task in program.tasks if task.op is Op.PACK}
        sizes = self._sizes_of(program, grid)
        found = {}
        in_a_message = {number for bundle in bundles(program) for number in bundle[1:]}
        for number, task in enumerate(program.tasks):
            host = TASK_SECONDS
            if task.op in (Op.MOVE, Op.HOP):
                seconds, num_messages = self._moving(task, slots, codecs.get(task.of, ""), sizes)
                host += 0.0 if number in in_a_message else MOVEMENT_SECONDS + MESSAGE_SECONDS * num_messages
            else:
                seconds = self._computing(task, slots, sizes)
            found[task.name] = seconds + (self._slow * host if self._with_host else 0.0)
        return found

    def step_seconds(self, compiled: Compiled) -> float:
        """Return how long a step should take, forward and backward."""
        return sum(
            lay_out(p, self.task_seconds(p, compiled.grid), host_runs_compute=True).makespan
            for p in (compiled.forward, compiled.backward)
        )

    def most_promising(self, plans: Iterable[Compiled], count: int, at_most: float) -> list[Compiled]:
        """Return the plans with the least predicted step, best first, those of more than `at_most` seconds left out."""
        seconds = {id(plan): (self.step_seconds(plan), plan) for plan in plans}
        promising = [(length, plan) for length, plan in seconds.values() if length <= at_most]
        return [plan for _, plan in sorted(promising, key=lambda each: each[0])[:count]]

    def _moving(self, task: Task, slots: dict[str, Slot], codec: str, sizes: CallSizes) -> tuple[float, float]:
        """Return the seconds of the busiest link, and the messages per rank."""
        source = slots[task.of[0] if task.of else task.reads[0]]
        messages = [
            (here, there, row_bytes(source, codec, rows, self._shape))
            for here, there, rows in messages_of(task, slots, sizes)
        ]
        return max(link_seconds(messages, self._place.bed).values(), default=0.0), len(messages) / sizes.grid.world

    def _computing(self, task: Task, slots: dict[str, Slot], sizes: CallSizes) -> float:
        source = next((slots[name] for name in task.reads if slots[name].kind in (Kind.ROWS, Kind.TOKENS)), None)
        if task.op in (Op.PACK, Op.UNPACK) and task.of:
            source = slots[task.of[0] if task.op is Op.PACK else task.of[1]]
        num_bytes = 4 * self._place.dim * (sizes.num_rows(source.layout, 0) if source else 0)
        if task.op in (Op.EXPERT, Op.EXPERT_GRAD):
            weights = next(slots[name].layout for name in task.reads if slots[name].layout.flow == "weights")
            shards = len(sizes.shapes.pieces(weights, 0).number) / sizes.num_held(weights, 0) / sizes.grid.etp
            flops = num_bytes * self._place.hidden * shards  # 2 matrices, 2 flops each, on rows of 4 bytes a column
            return flops * (2 if task.op is Op.EXPERT_GRAD else 1) / (1e9 * self._place.gflops)
        coding = num_bytes / (1e6 * self._place.coded_mb_per_second) if task.codec else 0.0
        return coding + num_bytes / COPIED_BYTES_PER_SECOND

    def _sizes_of(self, program: Program, grid: Grid) -> CallSizes:
        """Return the sizes of a call under even routing."""
        place, chunks = self._place, chunks_of(program)
        is_cast = any(slot.layout.flow in ONCE for slot in program.slots)
        key = (grid, chunks, program.is_redundant, is_cast)
        if key not in self._sizes:
            if (grid, chunks) not in self._shapes:
                self._shapes[grid, chunks] = LayoutIndex(grid, place.num_experts, chunks)
            layer = Workload(
                tokens=place.tokens_per_rank * grid.tp, num_experts=place.num_experts, top_k=place.top_k, dim=place.dim,
                hidden=place.hidden, matrices=2, dtype="fp32",
            )  # fmt: skip
            self._sizes[key] = sizes_of(program, layer, grid, shapes=self._shapes[grid, chunks])
        return self._sizes[key]
