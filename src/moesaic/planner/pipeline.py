"""Pipeline schedules: the order in which each rank runs its passes, and their times, to count bubbles and activations.

A stage is a run of consecutive layers. A pass is one micro-batch through one stage: forward (F), backward for inputs
(I), backward for weights (W), or backward for both (B). The orders are 1F1B and interleaved 1F1B (Narayanan et al.
2021), ZB-H1 and ZB-V (Qi et al. 2023, sections 3 and 6), DualPipe (DeepSeek-V3, section 3.2.1), which overlaps a
forward pass with another micro-batch's backward pass, and its half, DualPipeV.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from moesaic.errors import InputError

Kind = Literal["F", "I", "W", "B"]


class PipelinePass(NamedTuple):
    """One pass: one micro-batch through one stage."""

    kind: Kind
    stage: int
    micro_batch: int


SETTLED = 6
"""Number of micro-batches per rank after which a schedule repeats itself."""
Step = tuple[PipelinePass, ...]
"""Passes that a rank runs at once: a single pass, or a forward pass overlapped with a backward pass."""


@dataclass(frozen=True, kw_only=True)
class PassSeconds:
    """Seconds that a stage takes per micro-batch."""

    forward: float
    inputs: float
    """Backward pass for inputs, recomputation included."""
    weights: float
    """Backward pass for weights."""
    together: float
    """A forward pass overlapped with a whole backward pass of another micro-batch."""
    hop: float = 0.0
    """Transfer from a stage to the next one."""
    shares: tuple[float, ...] = ()
    """By stage, a factor on the seconds of its passes; () if all stages are equal."""

    def of(self, step: Step) -> float:
        """Return the seconds of a step."""
        factor = sum(self.shares[pipeline_pass.stage] for pipeline_pass in step) / len(step) if self.shares else 1.0
        if len(step) == 2:
            return factor * self.together
        seconds_by_kind = {"F": self.forward, "I": self.inputs, "W": self.weights, "B": self.inputs + self.weights}
        return factor * seconds_by_kind[step[0].kind]


@dataclass(frozen=True, kw_only=True)
class LaidOut:
    """A schedule laid out in time."""

    seconds: float
    """Seconds until the last rank has ended."""
    idle: float
    """Seconds of this time that passes do not fill, on the rank where that is most."""
    alive: tuple[int, ...]
    """By rank, the largest number of forward passes whose activations are kept at once."""


@dataclass(frozen=True, kw_only=True)
class PipelineSchedule:
    """A pipeline schedule."""

    order: Callable[[int, int, int, int], Iterable[Step]]
    """Yields the steps of a rank, from the rank, the numbers of ranks, runs per rank and micro-batches."""
    runs: int = 0
    """Runs of layers per rank; 0 for any number."""
    folds: bool = False
    """The second run of a rank is as far from the end as its first run is from the start (a V). If False, runs go round
    the ranks."""
    pairs: bool = False
    """The schedule overlaps forward passes with backward passes."""
    both_ways: bool = False
    """Micro-batches enter at both ends. Every rank holds two whole stages, and each stage is held by two ranks."""


def one_forward_one_backward(rank: int, ranks: int, runs: int, count: int) -> Iterator[Step]:
    """Yield a rank's steps of 1F1B, interleaved if the rank has several runs of layers."""
    yield from _alternating(rank, ranks, runs, count, ahead=(2 if runs > 1 else 1) * (ranks - 1 - rank), late=None)


def zero_bubble_h1(rank: int, ranks: int, runs: int, count: int) -> Iterator[Step]:
    """Yield a rank's steps of ZB-H1.

    A rank computes its weights' gradients as many micro-batches late as there are ranks before it. So all ranks keep as
    many activations as the first rank does under 1F1B.
    """
    yield from _alternating(rank, ranks, runs, count, ahead=ranks - 1 - rank, late=rank)


def _alternating(rank: int, ranks: int, runs: int, count: int, *, ahead: int, late: int | None) -> Iterator[Step]:
    """Yield forward passes, then alternating forward and backward passes, then backward passes.

    Args:
        rank, ranks, runs, count: as in `PipelineSchedule.order`.
        ahead: forward passes of a rank's last run before its first backward pass.
        late: number of backward passes by which gradients of weights are delayed; None: they are computed at once.
    """
    rounds = max(1, count // ranks)
    if runs > 1 and count % rounds:
        raise InputError(
            f"{count} micro-batches do not make {rounds} equal rounds of a pipeline of {ranks} stages of {runs} runs: choose "
            f"a multiple of {ranks}"
        )
    per_round = count // rounds if runs > 1 else count
    total, num_warmup = runs * count, min((runs - 1) * per_round + ahead, runs * count)

    def nth_pass(number: int, kind: Kind) -> PipelinePass:
        lap, place = divmod(number, per_round * runs)
        run, micro_batch = divmod(place, per_round)
        run = run if kind == "F" else runs - 1 - run
        return PipelinePass(kind, run * ranks + rank, lap * per_round + micro_batch)

    for number in range(total + num_warmup):
        if number < total:
            yield (nth_pass(number, "F"),)
        if number >= num_warmup:
            yield (nth_pass(number - num_warmup, "B" if late is None else "I"),)
            if late is not None and number - num_warmup >= late:
                yield (nth_pass(number - num_warmup - late, "W"),)
    for number in range(total - min(late or 0, total), total if late is not None else 0):
        yield (nth_pass(number, "W"),)


class _Folded:
    """The passes of a rank with two runs in a V. Each kind of pass of a run is counted by itself."""

    def __init__(self, rank: int, ranks: int) -> None:
        self._stages = (rank, 2 * ranks - 1 - rank)
        self._next: dict[tuple[Kind, int], int] = {}
        self.pending: list[PipelinePass] = []
        """Passes for gradients of weights that are still to run, oldest first."""

    def next_pass(self, kind: Kind, run: int) -> PipelinePass:
        """Return the next pass of a kind and a run. B and I share a count."""
        counted: Kind = "I" if kind == "B" else kind
        number = self._next.get((counted, run), 0)
        self._next[counted, run] = number + 1
        if kind == "I":
            self.pending.append(PipelinePass("W", self._stages[run], number))
        return PipelinePass(kind, self._stages[run], number)

    def pending_weights(self) -> Iterator[Step]:
        """Yield the oldest waiting pass for gradients of weights, if any."""
        if self.pending:
            yield (self.pending.pop(0),)


def zero_bubble_v(rank: int, ranks: int, runs: int, count: int) -> Iterator[Step]:
    """Yield a rank's steps of ZB-V. If the micro-batches do not fill the pipeline, the steps of a full one are yielded
    without those of missing micro-batches."""
    for step in _zero_bubble_v(rank, ranks, max(count, 2 * ranks - 1)):
        if step[0].micro_batch < count:
            yield step


def _zero_bubble_v(rank: int, ranks: int, count: int) -> Iterator[Step]:
    passes = _Folded(rank, ranks)
    for _ in range(2 * (ranks - rank) - 1):
        yield (passes.next_pass("F", 0),)
    for _ in range(rank):
        yield (passes.next_pass("F", 1),)
        yield (passes.next_pass("F", 0),)
    for _ in range(ranks - rank):
        yield (passes.next_pass("F", 1),)
        yield (passes.next_pass("I", 1),)
        yield from passes.pending_weights()
    num_first, num_second = 2 * ranks - rank - 1, ranks
    while num_second < num_first or num_first < count:
        if num_first < count:
            num_first += 1
            yield (passes.next_pass("F", 0),)
        yield (passes.next_pass("I", 0),)
        yield from passes.pending_weights()
        num_second += 1
        yield (passes.next_pass("F", 1),)
        yield (passes.next_pass("I", 1),)
        yield from passes.pending_weights()
    for _ in range(rank):
        yield (passes.next_pass("I", 0),)
        yield (passes.next_pass("I", 1),)
    # The first run's last I passes wait for those of later ranks, so W passes fill the gaps.
    for _ in range(ranks - rank):
        yield (passes.next_pass("I", 0),)
        yield from passes.pending_weights()
    while passes.pending:
        yield from passes.pending_weights()


def dual_pipe_v(rank: int, ranks: int, runs: int, count: int) -> Iterator[Step]:
    """Yield a rank's steps of DualPipeV. DualPipe runs the same steps on half of the ranks, for half of the
    micro-batches."""
    if count < 2 * ranks:
        raise InputError(
            f"{count} micro-batches do not fill a pipeline of {2 * ranks} stages that overlaps forward and backward passes: "
            f"choose at least {2 * ranks}, or another schedule"
        )
    passes = _Folded(rank, ranks)

    def overlapped(forward: int, backward: int) -> Step:
        return (passes.next_pass("F", forward), passes.next_pass("B", backward))

    ranks_after = ranks - rank - 1
    for _ in range(2 * ranks_after):
        yield (passes.next_pass("F", 0),)
    for _ in range(rank + 1):
        yield (passes.next_pass("F", 0),)
        yield (passes.next_pass("F", 1),)
    for _ in range(ranks_after):
        yield (passes.next_pass("I", 1),)
        yield from passes.pending_weights()
        yield (passes.next_pass("F", 1),)
    for number in range(count - 2 * ranks + rank + 1):
        if (
            number == 0 and not ranks_after
        ):  # the last rank has just run this stage forward, so separate passes are faster
            yield (passes.next_pass("F", 0),)
            yield (passes.next_pass("B", 1),)
        else:
            yield overlapped(0, 1)
        yield overlapped(1, 0)
    for _ in range(ranks_after):
        yield (passes.next_pass("B", 1),)
        yield overlapped(1, 0)
    # From the middle on, W passes are left for the gaps at the end.
    for number in range(2 * (rank + 1)):
        yield (passes.next_pass("I" if number >= rank + 1 else "B", (number + 1) % 2),)
    for _ in range(ranks_after):
        yield from passes.pending_weights()
        yield (passes.next_pass("I", 0),)
    while passes.pending:
        yield from passes.pending_weights()


SCHEDULES: dict[str, PipelineSchedule] = {
    "1f1b": PipelineSchedule(order=one_forward_one_backward),
    "zb-h1": PipelineSchedule(order=zero_bubble_h1),
    "zb-v": PipelineSchedule(order=zero_bubble_v, runs=2, folds=True),
    "dualpipev": PipelineSchedule(order=dual_pipe_v, runs=2, folds=True, pairs=True),
    "dualpipe": PipelineSchedule(order=dual_pipe_v, runs=2, folds=True, pairs=True, both_ways=True),
}
"""Schedules by name."""


def lay_out(orders: list[list[Step]], rank_of: Mapping[int, int], seconds: PassSeconds) -> LaidOut:
    """Lay a schedule out in time. Every rank runs its steps in order, each as soon as its inputs have arrived.

    Args:
        orders: steps of each rank.
        rank_of: rank of each stage.
        seconds: durations of passes.

    Raises:
        ValueError: if steps wait for each other in a cycle.
    """
    last = len(rank_of) - 1
    ends: dict[PipelinePass, float] = {}
    clock, position = [0.0] * len(orders), [0] * len(orders)
    waiting = {rank for rank, order in enumerate(orders) if order}
    while waiting:
        progressed = False
        for rank in sorted(waiting):
            while position[rank] < len(orders[rank]):
                step = orders[rank][position[rank]]
                inputs_ready = [_ready(pipeline_pass, ends, last, rank_of, seconds.hop) for pipeline_pass in step]
                if any(ready is None for ready in inputs_ready):
                    break
                end = max(clock[rank], *(ready or 0.0 for ready in inputs_ready)) + seconds.of(step)
                clock[rank], progressed = end, True
                position[rank] += 1
                ends.update(dict.fromkeys(step, end))
            else:
                waiting.discard(rank)
        if not progressed and waiting:
            raise ValueError(f"ranks {sorted(waiting)} of the pipeline wait for each other")
    busy = [sum(map(seconds.of, order)) for order in orders]
    return LaidOut(seconds=max(clock), idle=max(clock) - min(busy), alive=tuple(map(_alive, orders)))


def _ready(
    pipeline_pass: PipelinePass, ends: Mapping[PipelinePass, float], last: int, rank_of: Mapping[int, int], hop: float
) -> float | None:
    """Return the time at which the inputs of a pass arrive; None if the pass that produces them has not run yet."""
    kind, stage, number = pipeline_pass
    if kind == "W":
        return ends.get(PipelinePass("I", stage, number))
    if kind == "F":
        if stage == 0:
            return 0.0
        previous, end = stage - 1, ends.get(PipelinePass("F", stage - 1, number))
    elif stage == last:
        return ends.get(PipelinePass("F", stage, number))
    else:
        previous, whole_end = stage + 1, ends.get(PipelinePass("B", stage + 1, number))
        end = ends.get(PipelinePass("I", stage + 1, number), whole_end)
    return None if end is None else end + hop * (rank_of[previous] != rank_of[stage])


def _alive(order: list[Step]) -> int:
    """Return the largest number of passes of a rank whose activations are kept at once: from F to the end of W, or of B."""
    largest = current = 0
    for step in order:
        current += sum(pipeline_pass.kind == "F" for pipeline_pass in step)
        largest = max(largest, current)
        current -= sum(pipeline_pass.kind in "WB" for pipeline_pass in step)
    return largest


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """The pipeline of a model: its schedule, ranks and runs."""

    schedule: str = "1f1b"
    """Key of `SCHEDULES`."""
    ranks: int = 1
    """Number of ranks along the pipeline."""
    runs: int = 1
    """Runs of layers per rank; leave it at 1 if the schedule fixes the number."""

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise InputError(f"schedule={self.schedule!r}: choose one of {', '.join(SCHEDULES)}")
        if self.ranks < 1 or self.runs < 1:
            raise InputError(f"a pipeline of {self.ranks} ranks and {self.runs} runs: both must be at least 1")
        if self._schedule.runs and self.runs not in (1, self._schedule.runs):
            raise InputError(
                f"schedule {self.schedule} has {self._schedule.runs} runs of layers per rank, not {self.runs}: leave runs at 1"
            )
        if self._schedule.both_ways and self.ranks % 2:
            raise InputError(f"schedule {self.schedule} needs an even number of stages, not {self.ranks}")

    @property
    def _schedule(self) -> PipelineSchedule:
        return SCHEDULES[self.schedule]

    @property
    def pairs(self) -> bool:
        """Whether the schedule overlaps forward with backward passes."""
        return self._schedule.pairs

    @property
    def parts(self) -> int:
        """Number of runs into which the layers that a rank works through per micro-batch are cut."""
        return 1 if self._schedule.both_ways else self._schedule.runs or self.runs

    @property
    def num_runs(self) -> int:
        """Number of runs into which a model's layers are cut."""
        return self.ranks if self._schedule.both_ways else self.ranks * (self._schedule.runs or self.runs)

    @property
    def runs_of_ranks(self) -> list[list[int]]:
        """The model's runs that each rank has."""
        if self._schedule.folds:
            return [[rank, self.num_runs - 1 - rank] for rank in range(self.ranks)]
        return [list(range(rank, self.num_runs, self.ranks)) for rank in range(self.ranks)]

    @property
    def copies(self) -> int:
        """Number of copies of every layer in the pipeline."""
        return 2 if self._schedule.both_ways else 1

    def alive(self, micro_batches: int) -> tuple[float, ...]:
        """Return, by rank, the largest number of micro-batches whose activations it keeps at once. A run that is a part
        of the rank's layers counts as that part."""
        if self.num_runs == 1:
            return (1.0,)
        unit_seconds = PassSeconds(forward=1.0, inputs=1.0, weights=1.0, together=3.0)
        return tuple(
            alive * self.ranks / self.copies / self.num_runs
            for alive in self.laid_out(micro_batches, unit_seconds).alive
        )

    def laid_out(self, micro_batches: int, seconds: PassSeconds) -> LaidOut:
        """Lay the schedule out in time.

        If there are many micro-batches, only some are simulated, and the repeating middle is extrapolated.

        Args:
            micro_batches: number per optimizer step.
            seconds: durations of the passes of one run of layers.

        Raises:
            InputError: if the schedule does not support this number of micro-batches.
        """
        copies = self.copies
        if micro_batches % copies:
            raise InputError(f"schedule {self.schedule} needs an even number of micro-batches, not {micro_batches}")
        ranks, count = self.ranks // copies, micro_batches // copies
        runs = self._schedule.runs or self.runs
        stages = range(ranks * runs)
        rank_of = {
            stage: 2 * ranks - 1 - stage if self._schedule.folds and stage >= ranks else stage % ranks
            for stage in stages
        }

        def simulate(number: int) -> LaidOut:
            return lay_out(
                [list(self._schedule.order(rank, ranks, runs, number)) for rank in range(ranks)], rank_of, seconds
            )

        num_simulated = min(count, SETTLED * ranks + count % ranks)
        laid_out = simulate(num_simulated)
        # One period of the middle covers as many micro-batches as there are ranks.
        shorter, periods = (
            (simulate(num_simulated - ranks), (count - num_simulated) / ranks)
            if count > num_simulated
            else (laid_out, 0.0)
        )
        return LaidOut(
            seconds=laid_out.seconds + periods * (laid_out.seconds - shorter.seconds),
            idle=laid_out.idle + periods * (laid_out.idle - shorter.idle),
            alive=laid_out.alive + laid_out.alive[::-1] * (copies - 1),
        )
