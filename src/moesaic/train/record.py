"""Recording the routing of a training run, and replaying a recorded one.

    train --record-routing counts    copies per (sequence, expert), and so per (rank, expert); or tokens: every token's experts
    train --replay-routing FILE      experts come from a trace, weights from the router's scores

Recording uses the routing cache that also serves activation checkpointing (`runtime/routing_cache.py`), so nothing is
recorded twice if blocks are recomputed. Ranks keep what they routed and send it to the first rank one segment at a
time. If samples move between ranks, the trace holds them in the order of the batch, as if they had not moved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from moesaic.balance.run.relocate import SampleTrip
from moesaic.comm.collectives import share_of
from moesaic.errors import InputError
from moesaic.layer import MoE
from moesaic.models.moving import MovingGPT
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
from moesaic.train.distributed_checkpoint import checksum, flush
from moesaic.train.ranks import Ranks
from moesaic.train.state import RunState

SEGMENT_STEPS = 50
"""Most steps per segment. A checkpoint also ends a segment."""
SEGMENT_BYTES = 64 << 20
"""Most bytes of all ranks' tables that are kept in memory before they are written."""


class RoutingObserver:
    """Records the routing of a run, replays another's, or both, or neither."""

    def __init__(self, run: RunState) -> None:
        self._ranks, self._model = run.ranks, run.model
        self._layers = [module for module in run.model.modules() if isinstance(module, MoE)]
        self._replay = check_routing(run.config, run.step)
        with self._ranks.together():
            if self._ranks.is_first:
                prune(run.folder / FOLDER, run.step)
        if self._replay is not None:
            advice = "give every rank the same files"
            sums = [checksum(segment) for segment in segments_of(Path(self._replay.name))]
            self._ranks.require_same("the trace that is replayed", sums, advice)
        self._recorder: _Recorder | None = None
        if run.config.record_routing != "none":
            self._recorder = _Recorder(run.config, run.ranks, self._layers, run.folder / FOLDER)
            with self._ranks.together():
                if self._ranks.is_first:
                    self._recorder.check_continues()

    @contextmanager
    def call(self, step: int, micro: int, *, again: bool = False) -> Iterator[None]:
        """Record or replay while one micro-batch of training runs its forward pass. All ranks enter it together.

        Args:
            step: optimizer steps taken before.
            micro: number of the micro-batch in the step.
            again: whether this forward pass ran before, and is therefore already recorded.
        """
        recorder = None if again else self._recorder
        if recorder is not None and micro == 0 and recorder.is_full:
            recorder.flush()
        recording = nullcontext() if recorder is None else recorder.recording(step, micro, self._trip)
        replaying = nullcontext() if self._replay is None else self._replaying(self._replay, step, micro)
        with recording, replaying:
            yield

    def flush(self) -> None:
        """Write what was recorded. All ranks call it together.

        Raises:
            InputError: on every rank, if the first one cannot write.
        """
        if self._recorder is not None:
            self._recorder.flush()

    def _trip(self) -> SampleTrip | None:
        """Return the current or last forward pass with moving samples; None if samples do not move."""
        return self._model.trip if isinstance(self._model, MovingGPT) else None

    @contextmanager
    def _replaying(self, trace: Trace, step: int, micro: int) -> Iterator[None]:
        part = [_tokens_of_rank(layer, trace.shape.tokens, self._ranks) for layer in self._layers]

        def experts(place: int) -> Tensor:
            table, trip = trace.experts(place, step, micro), self._trip()
            if trip is None:
                here = table[part[place]]
            else:
                samples = trip.moves[place].before.samples[self._ranks.rank]
                here = table.reshape(trace.shape.sequences, -1, trace.shape.top_k)[samples]
            return torch.from_numpy(here.reshape(-1, trace.shape.top_k).astype(np.int64))

        with replayed([layer.router for layer in self._layers], experts):
            yield


class _Recorder:
    """Keeps the recorded routing of recent steps until it is written as a segment."""

    def __init__(self, config: TrainConfig, ranks: Ranks, layers: list[MoE], folder: Path) -> None:
        assert config.record_routing != "none"
        self._shape, self._holds, self._ranks, self._folder = shape_of(config), config.record_routing, ranks, folder
        self._layers = layers
        self._source = {
            "router": config.model.moe.router,
            "mesh": {"world": ranks.world, "dp": ranks.dp, "ep": config.mesh.ep, "etp": config.mesh.etp},
        }
        self._steps: list[int] = []
        self._tables: list[np.ndarray] = []
        self._places: list[np.ndarray] = []
        """Per micro-batch, where each sequence was, (layers, sequences). The list is empty if samples do not move."""
        self._was_sliced = False

    @property
    def is_full(self) -> bool:
        """Whether the segment is to be written: it is full, or the plan's kind of slicing changed. All ranks get the
        same answer."""
        at_most = max(1, min(SEGMENT_STEPS, SEGMENT_BYTES // self._shape.bytes_per_step(self._holds)))
        return len(self._steps) >= at_most or (bool(self._steps) and self._was_sliced != self._is_sliced)

    @contextmanager
    def recording(self, step: int, micro: int, trip: Callable[[], SampleTrip | None]) -> Iterator[None]:
        """Record one call of each layer while the block runs.

        Args:
            trip: returns the forward pass afterwards, if samples moved in it.
        """
        routing_cache = _RecordingCache()
        earlier_caches = [layer.routing_cache for layer in self._layers]
        try:
            for layer in self._layers:
                layer.routing_cache = routing_cache
            yield
        finally:
            for layer, earlier in zip(self._layers, earlier_caches):
                layer.routing_cache = earlier
        tables = torch.stack([self._table(layer, routing_cache.records[layer]) for layer in self._layers]).cpu().numpy()
        self._was_sliced = self._is_sliced
        if micro == 0:
            self._steps.append(step)
        self._tables.append(tables.astype(self._shape.dtype(self._holds)))
        forward_pass = trip()
        if forward_pass is not None:
            self._places.append(np.stack([move.before.place for move in forward_pass.moves]))

    def flush(self) -> None:
        """Collect the ranks' parts and write them as a segment."""
        shape, steps = self._shape, self._steps
        if not steps:
            return
        own_table = np.stack(self._tables).reshape(len(steps), shape.accumulation, *self._tables[0].shape)
        places = np.stack(self._places).reshape(*own_table.shape[:3], -1) if self._places else None
        self._steps, self._tables, self._places = [], [], []
        parts = self._collect(own_table)
        with self._ranks.together():
            if parts is not None:
                table = joined(parts, self._ranks.world // self._ranks.dp, self._was_sliced, self._holds == "tokens")
                table = table if places is None else in_batch_order(table, places)
                segment = TraceSegment(shape, self._holds, np.array(steps), table, self._ranks.dp, self._source)
                write_segment(segment, self._folder / segment_name(steps[0]))
                flush(self._folder)

    def check_continues(self) -> None:
        """Check that existing segments have this run's shape.

        Raises:
            InputError: if they do not.
        """
        for path in sorted(self._folder.glob(PATTERN))[:1]:
            header = read_header(path)
            problems = differences(header.shape, self._shape)
            if header.holds != self._holds:
                problems.append(f"holds={header.holds} (not {self._holds})")
            if problems:
                raise InputError(
                    f"{self._folder} holds a trace with {', '.join(problems)}: move it away, or resume as it was recorded"
                )

    @property
    def _is_sliced(self) -> bool:
        """Whether each rank of a tensor-parallel group routes a slice of the group's tokens. Otherwise each routes all
        of them."""
        return any(_routes_slices(layer) for layer in self._layers)

    def _table(self, layer: MoE, record: RoutingRecord) -> Tensor:
        """Return a call's part of the table: the tokens' experts, or counts per sequence of the data-parallel group."""
        choice, shape = record.choice, self._shape
        if self._holds == "tokens":
            return encoded(choice, shape.top_k)
        num_sequences = shape.sequences // self._ranks.dp
        slices = _routes_slices(layer)
        first = _tensor_slice(num_sequences * shape.seq_len, self._ranks).start if slices else 0
        cell = (choice.token + first) // shape.seq_len * shape.num_experts + choice.expert
        return count(cell, choice.sent, num_sequences * shape.num_experts).view(num_sequences, shape.num_experts)

    def _collect(self, own_table: np.ndarray) -> list[np.ndarray] | None:
        """Return every rank's part, by rank, on the first rank; None on the others."""
        if self._ranks.mesh is None:
            return [own_table]
        parts: list[np.ndarray] | None = [own_table] * self._ranks.world if self._ranks.is_first else None
        dist.gather_object(own_table, parts)
        return parts


class _RecordingCache(RoutingCache):
    """A routing cache that only records one call of each layer; reading from it returns nothing."""

    def __init__(self) -> None:
        super().__init__({})
        self.records: dict[RoutingCached, RoutingRecord] = {}

    def write(self, layer: RoutingCached, record: RoutingRecord) -> None:
        """Keep a record."""
        assert layer not in self.records
        self.records[layer] = record

    def read(self, layer: RoutingCached) -> RoutingRecord | None:
        """Return None, so that the layer routes as usual."""
        return None


def joined(parts: list[np.ndarray], tp: int, is_sliced: bool, by_token: bool) -> np.ndarray:
    """Return the ranks' tables as one table.

    Args:
        parts: the table of each rank, (steps, accumulation, layers, tokens or sequences, columns).
        tp: number of consecutive ranks in a tensor-parallel group.
        is_sliced: whether each of these ranks routed a slice of the group's tokens; else all routed the same tokens.
        by_token: whether rows are tokens; else they are the group's sequences, counted by each rank over its slice.
    """
    groups = [parts[first : first + tp] for first in range(0, len(parts), tp)]
    if not is_sliced:
        return np.concatenate([group[0] for group in groups], axis=3)
    if by_token:
        return np.concatenate([part for group in groups for part in group], axis=3)
    return np.concatenate([np.sum(group, axis=0, dtype=group[0].dtype) for group in groups], axis=3)


def in_batch_order(table: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Reorder a table with sequences in the order in which the ranks held them into the order of the batch.

    Args:
        table: (steps, accumulation, layers, tokens or sequences, columns), concatenated in rank order.
        places: (steps, accumulation, layers, sequences) int64: the position of each sequence in that order.
    """
    split = table.reshape(*places.shape, -1, table.shape[-1])
    return np.take_along_axis(split, places[..., None, None], axis=3).reshape(table.shape)


def _tokens_of_rank(layer: MoE, tokens: int, ranks: Ranks) -> slice:
    """Return which of a micro-batch's tokens a layer routes on this rank."""
    num_tokens = tokens // ranks.dp
    first = ranks.dp_index * num_tokens
    within = _tensor_slice(num_tokens, ranks) if _routes_slices(layer) else slice(0, num_tokens)
    return slice(first + within.start, first + within.stop)


def _routes_slices(layer: MoE) -> bool:
    """Return whether each rank of a tensor-parallel group routes a slice of the group's tokens (S1)."""
    return layer.on_mesh is not None and layer.on_mesh.compiled.routes_slices


def _tensor_slice(tokens: int, ranks: Ranks) -> slice:
    """Return this rank's slice of its tensor-parallel group's tokens."""
    assert ranks.mesh is not None
    grid = ranks.mesh.grid
    return share_of(tokens, grid.coordinate(ranks.rank, "tp"), grid.tp)


def check_routing(config: TrainConfig, step: int = 0) -> Trace | None:
    """Check that a run can record and replay as configured. Return the trace to replay, if any.

    Raises:
        InputError: for a model without MoE layers, a router where experts choose tokens, a trace of another model, a
            trace of counts only, or one that lacks some of the steps.
    """
    if config.record_routing == "none" and not config.replay_routing:
        return None
    option = "replay_routing" if config.replay_routing else f"record_routing={config.record_routing}"
    if not any(config.model.is_sparse(layer) for layer in range(config.model.num_layers)):
        raise InputError(f"{option}: the model has no MoE layers: set model.ffn=moe, or leave it out")
    by_token = bool(config.replay_routing) or config.record_routing == "tokens"
    if by_token and config.model.moe.router == "expert_choice":
        raise InputError(
            f"{option}: under model.moe.router=expert_choice tokens do not choose experts: record counts, or "
            "another router"
        )
    if not config.replay_routing:
        return None
    path = Path(config.replay_routing)
    out = Path(config.out).resolve()
    if out in (path.resolve(), *path.resolve().parents):
        raise InputError(f"replay_routing={path}: lies in out={config.out}, which this run writes: choose another out")
    trace = Trace.open(path)
    problems = differences(trace.shape, shape_of(config))
    if problems:
        raise InputError(
            f"replay_routing={path}: is of another model or batch, {', '.join(problems)}: set the same here"
        )
    if trace.holds != "tokens":
        raise InputError(
            f"replay_routing={path}: holds counts only: record the tokens' experts with --record-routing tokens"
        )
    if set(range(step, config.steps)) - set(trace.steps):
        raise InputError(
            f"replay_routing={path}: holds steps {steps_in_words(trace.steps)}, the run needs {step} to {config.steps - 1}: "
            "set fewer steps, or record more"
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
    """Remove the steps of a trace from `step` on, which a run that starts there records again. Step 0 removes all
    segments unread.

    Raises:
        InputError: if a segment that contains the step is damaged, or the folder cannot be changed.
    """
    for path in sorted(folder.glob(PATTERN)):
        header = read_header(path) if step else None
        if header is None or header.steps[0] >= step:
            try:
                path.unlink()
            except OSError as error:
                raise InputError(f"trace {path}: cannot be removed ({error.strerror}): check the folder") from error
        elif header.steps[-1] >= step:
            whole = TraceSegment(
                header.shape, header.holds, header.steps, read_table(header), header.groups, header.source
            )
            write_segment(whole.before(step), path)
