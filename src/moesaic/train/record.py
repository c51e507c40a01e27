"""Recording the routing of a training run, and replaying a recorded one.

    train --record-routing counts    copies per (sequence, expert), and so per (rank, expert); or
                                     tokens: every token's experts
    train --replay-routing FILE      experts come from a trace, weights from the router's scores

Recording uses the routing cache that also serves activation checkpointing
(`runtime/routing_cache.py`), so nothing is recorded twice if blocks are recomputed. Ranks keep what
they routed and add it up on the first rank, one segment at a time. If samples move between ranks,
the trace holds them in the order of the batch, as if they had not moved.

A segment is a file with the tables of some consecutive steps. A layer's table of a micro-batch has
either a row for each token with its experts ("tokens"), or a row for each sequence with the copies
that each expert gets ("counts"). A place is the index of an MoE layer among those of this rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from moesaic.comm.collectives import share_of
from moesaic.errors import InputError
from moesaic.files import entries
from moesaic.layer import MoE
from moesaic.models.moving import MovingGPT
from moesaic.resuming import checksum, flush
from moesaic.routing.capacity import count
from moesaic.routing.replay import encoded, replayed
from moesaic.routing.route import RoutingRecord
from moesaic.runtime.routing_cache import RoutingCache, RoutingCached
from moesaic.traces.trace import (
    FOLDER,
    PATTERN,
    Trace,
    TraceSegment,
    TraceShape,
    differences,
    read_header,
    read_table,
    segment_name,
    segments_of,
    steps_in_words,
    write_segment,
)
from moesaic.train.config import TrainConfig
from moesaic.train.pipeline import PipelinedGPT
from moesaic.train.ranks import Ranks
from moesaic.train.state import RunState

SEGMENT_STEPS = 50
"""Most steps per segment. A checkpoint also ends a segment."""
SEGMENT_BYTES = 64 << 20
"""Most bytes of all ranks' tables that are kept in memory before they are written."""


class RoutingObserver:
    """Records the routing of a run, replays another's, or both, or neither."""

    def __init__(self, run: RunState) -> None:
        self._places = _Places(run)
        self._replay = check_routing(run.config, run.step)
        """The trace that is replayed, if any."""
        with run.ranks.together():
            if run.ranks.is_first:
                prune(run.folder / FOLDER, run.step)
        if self._replay is not None:
            advice = "give every rank the same files"
            sums = [checksum(segment) for segment in segments_of(Path(self._replay.name))]
            run.ranks.require_same("the trace that is replayed", sums, advice)
        self._recorder: _Recorder | None = None
        """What keeps the recorded routing, if it is recorded."""
        if run.config.record_routing != "none":
            self._recorder = _Recorder(
                run.config, run.ranks, self._places, folder=run.folder / FOLDER
            )
            with run.ranks.together():
                if run.ranks.is_first:
                    self._recorder.check_continues()

    def begin_step(self) -> None:
        """Write what was recorded if it fills a segment. All ranks call it together, before a
        step."""
        if self._recorder is not None and self._recorder.is_full:
            self._recorder.flush()

    @contextmanager
    def call(self, step: int, micro: int, *, again: bool = False) -> Iterator[None]:
        """Record or replay while one micro-batch of training runs its forward pass, through all
        layers of this rank or some of them.

        Args:
            step: optimizer steps taken before.
            micro: number of the micro-batch in the step.
            again: whether this forward pass ran before, and is therefore already recorded.
        """
        with ExitStack() as contexts:
            if self._recorder is not None and not again:
                contexts.enter_context(self._recorder.recording(step, micro))
            if self._replay is not None:
                contexts.enter_context(self._replaying(self._replay, step, micro))
            yield

    def flush(self) -> None:
        """Write what was recorded. All ranks call it together.

        Raises:
            InputError: on every rank, if the first one cannot write.
        """
        if self._recorder is not None:
            self._recorder.flush()

    @contextmanager
    def _replaying(self, trace: Trace, step: int, micro: int) -> Iterator[None]:
        """Route as one micro-batch of a trace did."""

        def experts(place: int) -> Tensor:
            """Return the recorded choices of the tokens that this rank's router at `place` gets,
            (tokens, top_k) int64."""
            experts_of_batch = trace.experts(self._places.numbers[place], step, micro)
            own_experts = experts_of_batch[self._places.tokens(place)]
            return torch.from_numpy(own_experts.astype(np.int64))

        with replayed([layer.router for layer in self._places.layers], experts):
            yield


class _Places:
    """The MoE layers of this rank, and which tokens of a micro-batch each of them routes here."""

    def __init__(self, run: RunState) -> None:
        self._ranks = run.ranks
        self._model = run.model
        self._config = run.config
        self.layers = [module for module in run.model.modules() if isinstance(module, MoE)]
        self.numbers: Sequence[int] = range(len(self.layers))
        """Their numbers among the MoE layers of the whole model."""
        if isinstance(run.model, PipelinedGPT):
            self.numbers = run.model.layers

    def tokens(self, place: int) -> np.ndarray:
        """Return the tokens that a layer routes on this rank, by their number in the batch,
        (tokens,) int64.

        If samples move, this is known once the layer is called.
        """
        ranks = self._ranks
        shape = shape_of(self._config)
        # each data-parallel group has consecutive sequences, unless samples move
        sequences = np.arange(shape.sequences).reshape(ranks.dp, -1)[ranks.dp_index]
        if isinstance(self._model, MovingGPT) and self._model.trip is not None:
            trip = self._model.trip
            # where samples were when the layer was called: the sample in each (rank, slot)
            homes = trip.moves[place].before
            # those in the slots of this rank's tensor-parallel group
            sequences = homes.samples[list(trip.relocator.group)].reshape(-1)
        first_tokens = sequences[:, None] * shape.seq_len
        tokens = (first_tokens + np.arange(shape.seq_len)).reshape(-1)
        if not self._routes_slices(place):
            return tokens
        assert ranks.mesh is not None
        grid = ranks.mesh.grid
        # this rank's slice of its group's tokens
        return tokens[share_of(len(tokens), grid.coordinate(ranks.mesh.rank, "tp"), grid.tp)]

    def are_recorded(self, place: int) -> bool:
        """Return whether this rank records what a layer routes here. Otherwise another rank of its
        tensor-parallel group routes the same tokens and records them."""
        mesh = self._ranks.mesh
        if mesh is None or self._routes_slices(place):
            return True
        return mesh.grid.coordinate(mesh.rank, "tp") == 0

    def _routes_slices(self, place: int) -> bool:
        """Return whether each rank of a tensor-parallel group routes a slice of the group's tokens
        (S1)."""
        on_mesh = self.layers[place].on_mesh
        return on_mesh is not None and on_mesh.compiled.routes_slices


class _Recorder:
    """Keeps the recorded routing of recent steps until it is written as a segment.

    Every rank has tables of the whole batch, in which only its own tokens count. Their sum over the
    ranks is the trace.
    """

    def __init__(self, config: TrainConfig, ranks: Ranks, places: _Places, folder: Path) -> None:
        assert config.record_routing != "none"
        self._shape = shape_of(config)
        self._holds = config.record_routing
        """What tables hold: "tokens" or "counts"."""
        self._ranks = ranks
        self._folder = folder
        self._places = places
        # written into the header of each segment
        self._source = {
            "router": config.model.moe.router,
            "mesh": {
                "world": ranks.world,
                "dp": ranks.dp,
                "ep": config.mesh.ep,
                "etp": config.mesh.etp,
            },
        }
        self._tables: dict[tuple[int, int], np.ndarray] = {}
        """By step and micro-batch, (layers, rows, columns) of the whole model; zero for layers of
        other stages."""

    @property
    def is_full(self) -> bool:
        """Whether the segment is to be written."""
        # there is a table for each step and micro-batch
        num_steps = len(self._tables) // self._shape.accumulation
        fitting_steps = SEGMENT_BYTES // self._shape.bytes_per_step(self._holds)
        # a step that does not fit by itself has a segment of its own
        return num_steps >= max(1, min(SEGMENT_STEPS, fitting_steps))

    @contextmanager
    def recording(self, step: int, micro: int) -> Iterator[None]:
        """Record one call of each layer that runs in the block."""
        routing_cache = _RecordingCache()
        layers = self._places.layers
        earlier_caches = [layer.routing_cache for layer in layers]
        try:
            for layer in layers:
                layer.routing_cache = routing_cache
            yield
        finally:
            for layer, earlier in zip(layers, earlier_caches):
                layer.routing_cache = earlier
        # under interleaved stages, a micro-batch passes this rank once for each of its parts
        tables = self._tables.setdefault((step, micro), self._no_tables())
        for place, layer in enumerate(layers):
            if layer in routing_cache.records:
                table = self._table(place, routing_cache.records[layer])
                tables[self._places.numbers[place]] = table

    def flush(self) -> None:
        """Add up the ranks' tables and write them as a segment."""
        if not self._tables:
            return
        steps = sorted({step for step, _ in self._tables})
        in_order = [self._tables[step_and_micro] for step_and_micro in sorted(self._tables)]
        self._tables = {}
        if self._ranks.mesh is not None:
            for tables in in_order:
                total = torch.from_numpy(tables.astype(np.int32))
                dist.reduce(total, dst=0)
                tables[...] = total.numpy()  # the sum on the first rank, which alone uses it
        with self._ranks.together():
            if self._ranks.is_first:
                # (steps, micro-batches, layers, rows, columns)
                whole = np.stack(in_order).reshape(
                    len(steps), self._shape.accumulation, *in_order[0].shape
                )
                segment = TraceSegment(
                    self._shape,
                    self._holds,
                    steps=np.array(steps),
                    table=whole,
                    groups=self._ranks.dp,
                    source=self._source,
                )
                write_segment(segment, self._folder / segment_name(steps[0]))
                flush(self._folder)

    def check_continues(self) -> None:
        """Check that existing segments have this run's shape.

        Raises:
            InputError: if they do not.
        """
        for path in entries(self._folder, PATTERN)[:1]:  # all segments have one shape
            header = read_header(path)
            problems = differences(header.shape, self._shape)
            if header.holds != self._holds:
                problems.append(f"holds={header.holds} (not {self._holds})")
            if problems:
                raise InputError(
                    f"{self._folder} holds a trace with {', '.join(problems)}: move it away, "
                    "or resume as it was recorded"
                )

    @property
    def _size(self) -> tuple[int, int]:
        """Rows and columns of a layer's table."""
        shape = self._shape
        if self._holds == "tokens":
            return shape.tokens, shape.top_k
        return shape.sequences, shape.num_experts

    def _no_tables(self) -> np.ndarray:
        """Return the tables of all layers of the model for a micro-batch, with nothing in them."""
        return np.zeros((self._shape.num_layers, *self._size), self._shape.dtype(self._holds))

    def _table(self, place: int, record: RoutingRecord) -> np.ndarray:
        """Return a call's part of the table of the layer at `place`, zero for all other tokens: the
        tokens' experts, or counts per sequence and expert."""
        choice = record.choice
        shape = self._shape
        tokens = self._places.tokens(place)
        rows, columns = self._size
        table = np.zeros((rows, columns), dtype=np.int64)
        if not self._places.are_recorded(place):
            return table
        if self._holds == "tokens":
            table[tokens] = encoded(choice, shape.top_k).cpu().numpy()
            return table
        sequence_of_token = torch.from_numpy(tokens // shape.seq_len).to(choice.token.device)
        # of each copy, its cell in the table, numbered row after row
        cell = sequence_of_token[choice.token] * columns + choice.expert
        counts = count(cell, choice.sent, table.size)
        return counts.cpu().numpy().reshape(rows, columns)


class _RecordingCache(RoutingCache):
    """A routing cache that only records one call of each layer; reading from it returns nothing."""

    def __init__(self) -> None:
        super().__init__({})
        self.records: dict[RoutingCached, RoutingRecord] = {}
        """What was recorded, by layer."""

    def write(self, layer: RoutingCached, record: RoutingRecord) -> None:
        """Keep a record."""
        assert layer not in self.records
        self.records[layer] = record

    def read(self, layer: RoutingCached) -> RoutingRecord | None:
        """Return None, so that the layer routes as usual."""
        return None


def check_routing(config: TrainConfig, step: int = 0) -> Trace | None:
    """Check that a run can record and replay as configured. Return the trace to replay, if any.

    Raises:
        InputError: for a model without MoE layers, a router where experts choose tokens, a trace of
            another model, a trace of counts only, or one that lacks some of the steps.
    """
    if config.record_routing == "none" and not config.replay_routing:
        return None
    option = f"record_routing={config.record_routing}"
    if config.replay_routing:
        option = "replay_routing"
    model = config.model
    if not any(model.is_sparse(layer) for layer in range(model.num_layers)):
        raise InputError(
            f"{option}: the model has no MoE layers: set model.ffn=moe, or leave it out"
        )
    by_token = bool(config.replay_routing) or config.record_routing == "tokens"
    if by_token and model.moe.router == "expert_choice":
        raise InputError(
            f"{option}: under model.moe.router=expert_choice tokens do not choose experts: record "
            "counts, or another router"
        )
    if not config.replay_routing:
        return None
    return _open_trace(config, step)


def _open_trace(config: TrainConfig, step: int) -> Trace:
    """Return the trace that a run replays from step `step` on; see `check_routing`."""
    path = Path(config.replay_routing)
    out = Path(config.out).resolve()
    if out in (path.resolve(), *path.resolve().parents):
        raise InputError(
            f"replay_routing={path}: lies in out={config.out}, which this run writes: choose "
            "another out"
        )
    trace = Trace.open(path)
    problems = differences(trace.shape, shape_of(config))
    if problems:
        raise InputError(
            f"replay_routing={path}: is of another model or batch, {', '.join(problems)}: set "
            "the same here"
        )
    if trace.holds != "tokens":
        raise InputError(
            f"replay_routing={path}: holds counts only: record the tokens' experts with "
            "--record-routing tokens"
        )
    if set(range(step, config.steps)) - set(trace.steps):
        raise InputError(
            f"replay_routing={path}: holds steps {steps_in_words(trace.steps)}, the run needs "
            f"{step} to {config.steps - 1}: set fewer steps, or record more"
        )
    return trace


def shape_of(config: TrainConfig) -> TraceShape:
    """Return the shape of a run's traces."""
    model = config.model
    return TraceShape(
        num_layers=sum(model.is_sparse(layer) for layer in range(model.num_layers)),
        num_experts=model.moe.num_experts,
        top_k=model.moe.top_k,
        sequences=config.batch_size,
        seq_len=model.seq_len,
        accumulation=config.accumulation,
    )


def prune(folder: Path, step: int) -> None:
    """Remove the steps of a trace from `step` on, which a run that starts there records again. Step
    0 removes all segments unread.

    Raises:
        InputError: if a segment that contains the step is damaged, or the folder cannot be changed.
    """
    for path in entries(folder, PATTERN):
        header = read_header(path) if step else None
        # step 0, or all steps of the segment are recorded again
        if header is None or header.steps[0] >= step:
            try:
                path.unlink()
            except OSError as error:
                raise InputError(
                    f"trace {path}: cannot be removed ({error.strerror}): check the folder"
                ) from error
        elif header.steps[-1] >= step:  # some of them: only the earlier ones are kept
            whole = TraceSegment(
                header.shape,
                header.holds,
                header.steps,
                table=read_table(header),
                groups=header.groups,
                source=header.source,
            )
            write_segment(whole.before(step), path)
