"""The watch over a run on several ranks. It reports in one line which rank is missing if a run
hangs or a rank dies.

A thread on every rank does three things every few seconds. It writes a heartbeat into the store
that all ranks share. It reads where the main thread is. And it asks whether some rank has given the
run up.

A run hangs if a rank has ended no step, called no layer and not moved for longer than the patience,
while no rank makes progress in saving or evaluating. The ranks may wait for those two as long as it
takes. Seconds in which the process was stopped do not count. All ranks that still answer then write
down where they are and for whose bytes they wait. The lowest of them puts that into one line and
into the run folder's `hang.json`, and all end with code 1.

The training code calls the watch only where a step may take long. The position of a rank is read
from the frames of its threads: the frame that runs a program holds the task, the message, and the
ranks that it comes from.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from moesaic.comm.transport import AbstractTransport, Handle
from moesaic.errors import InputError, TrainingError, in_one_line
from moesaic.files import MOST_TEXT, read_bytes
from moesaic.layer import MoE
from moesaic.runtime.executor import LayerRun, drive, interpret, run_backward
from moesaic.train.launch import (
    ANSWER_SECONDS,
    Roll,
    SignalHandler,
    ask_store,
    handle_ends,
    is_of_lost_message,
    naming_dead_ranks,
    process_name,
    store_keeper,
)
from moesaic.train.numbers import in_words
from moesaic.train.run_folder import FLIGHT, HANG, RunFolder

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

_OWN = str(Path(__file__).parents[1]) + os.sep
_SCHEDULES = "torch.distributed.pipelining.schedules"


@dataclass(frozen=True)
class Position:
    """Where a rank is, and what it waits for."""

    rank: int
    process: str
    """Process id and host."""
    at: str
    """What the rank is doing, in words that are equal for ranks that do the same."""
    waits_for: Mapping[str, int] = field(default_factory=dict)
    """Bytes that the rank still waits for, by sending rank (as text)."""
    stack: tuple[str, ...] = ()
    """The main thread's calls, outermost first: file, line and function."""


@dataclass
class _Seen:
    """What the watch of a rank has seen up to its last round."""

    at_seconds: float
    """The time of the round, or of the start before the first one."""
    place: tuple[str, list[int], list[tuple[int, int]]] | None = None
    """What `Watch._place` returned; None before the first round."""
    num_bytes: int = 0
    """Bytes that the process had read and written."""
    still_seconds: float = 0.0
    """How long this rank has not moved, while no rank made progress in a long function."""
    progress: int = 0
    """How often any rank was seen to make progress in a long function."""
    failures: int = 0
    """How many ranks had failed."""


class Watch:
    """Watches one rank of a run while its `with` block runs. A run of one process is not watched.

    Args:
        folder: the run folder; None if it does not exist yet, so that nothing is written into it.
        patience: seconds that a rank may stay at one place.
        step: returns what the run is doing, such as "step 12".
        advice: returns how to continue after the run has ended.
        command: the command that runs, as lines about it name it.
    """

    def __init__(
        self,
        model: nn.Module,
        folder: RunFolder | None,
        patience: float,
        step: Callable[[], str],
        advice: Callable[[], str],
        command: str = "moesaic train",
    ) -> None:
        self._command = command
        self._is_long = False
        """Whether the main thread is in a block of `long`."""
        self._names: dict[int, str] = {}
        """Names of the model's modules, by the modules' ids."""
        self._layers: dict[int, str] = {}
        """Names of its MoE layers, by the ids of their experts, which a frame of a layer has."""
        self._transports: set[AbstractTransport] = set()
        """What carries the layers' messages."""
        for name, module in model.named_modules():
            if name:
                self._names[id(module)] = name
            if isinstance(module, MoE):
                self._layers[id(module.experts)] = name
                if module.on_mesh is not None:
                    self._transports.add(module.on_mesh.transport)
        self._folder = folder
        self._patience = patience
        self._step = step
        self._advice = advice
        self._pause = min(5.0, patience / 10)
        """Seconds between two rounds of the watch."""
        self._answer_seconds = min(ANSWER_SECONDS, patience / 2)
        """Seconds that the store may take to answer."""
        self._round_seconds = 2 * self._pause + 1
        """Seconds in which every live rank has read the store once."""
        self._main = threading.get_ident()
        """The main thread, by id."""
        self._stopped = threading.Event()
        """Set to end the watch thread."""
        self._thread: threading.Thread | None = None
        """The watch thread; None if the run is not watched."""
        self._previous_handlers: dict[signal.Signals, SignalHandler] = {}
        """What handled the signals before this watch."""

    def __enter__(self) -> Watch:
        if dist.is_initialized() and dist.get_world_size() > 1:
            self._rank = dist.get_rank()
            self._world = dist.get_world_size()
            # Use a separate connection, since a connection is locked while it waits for a key. Use
            # the store below the prefix of torch's group, where the ranks signed before they met.
            store: Any = dist.distributed_c10d._get_default_store()
            shared_store = getattr(store, "underlying_store", store)
            try:
                self._roll = ask_store(partial(self._sign, shared_store), ANSWER_SECONDS)
            except ConnectionError:
                raise TrainingError(f"{store_keeper()} does not answer, {self._when()}") from None
            self._store: Store = self._roll.store
            self._previous_handlers = handle_ends(self._roll, self._when)
            self._thread = threading.Thread(target=self._run, name="moesaic-watch", daemon=True)
            self._thread.start()
        return self

    def _sign(self, store: Any) -> Roll:
        """Return the signed roll, with a connection of its own to the store."""
        store = store.clone()
        store.set_timeout(timedelta(seconds=max(4 * self._pause, 10)))
        roll = Roll(store, self._rank, self._world, self._pause)
        roll.command = self._command
        roll.sign()
        roll.beat(0)
        return roll

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._thread is None:
            return
        if is_of_lost_message(error):  # perhaps since another rank died
            if self._is_given_up():
                # never returns: the watch thread ends the process of a run that was given up
                self._thread.join()
            try:
                with naming_dead_ranks(self._roll, self._when()):
                    raise error
            finally:  # keep watching until then, since asking the store may block for ever
                self._stopped.set()
        else:
            for number, handler in self._previous_handlers.items():
                signal.signal(number, handler)
        self._stopped.set()

    @contextmanager
    def long(self) -> Iterator[None]:
        """Let this rank make the others wait for longer than the patience while the block runs, as
        long as it makes progress: it moves on in the code, or reads and writes bytes."""
        before = self._is_long
        self._is_long = True
        try:
            yield
        finally:
            self._is_long = before

    def _when(self) -> str:
        """Return what the run is doing and how to continue, for an error message."""
        return f"in {self._step()}; {self._advice()}"

    def _run(self) -> None:
        """Watch until stopped: in each round, tell the others that this rank lives, and end the run
        if it stood still for too long, if a rank gave the run up, or if nobody answers."""
        beats = 0
        seen = _Seen(at_seconds=time.monotonic())
        while not self._stopped.wait(self._pause):
            beats = beats + 1
            makes_progress = self._look(seen)
            is_over = seen.still_seconds > self._patience
            try:
                self._ask_others(seen, beats, is_over=is_over, makes_progress=makes_progress)
            except ConnectionError:  # the store does not answer
                if is_over:
                    self._end_alone()

    def _look(self, seen: _Seen) -> bool:
        """Look at this rank, once in a round, and update what was seen. Return whether it makes
        progress in a long function."""
        # A stopped process (or machine) does not hang, so each round counts no more seconds than it
        # may take: the pause, what the store may take, and as much as a pause for all else.
        longest_round = 2 * self._pause + self._answer_seconds
        now = time.monotonic()
        seen.still_seconds += min(now - seen.at_seconds, longest_round)
        seen.at_seconds = now

        num_bytes = _moved_bytes()
        place = self._place()
        has_moved = place != seen.place
        has_moved_bytes = num_bytes != seen.num_bytes
        seen.num_bytes = num_bytes
        seen.place = place
        if has_moved:
            seen.still_seconds = 0.0
        return self._is_long and (has_moved or has_moved_bytes)

    def _ask_others(self, seen: _Seen, beats: int, *, is_over: bool, makes_progress: bool) -> None:
        """Tell the other ranks how this one fares, update what was seen of them, and end a run that
        is given up. Raise ConnectionError if the store does not answer."""
        is_given_up, progress, failures = ask_store(
            partial(self._exchange, beats, is_over, makes_progress), self._answer_seconds
        )
        had_failures = seen.failures > 0
        if self._roll.is_kept_by_rank_0 and failures and had_failures:
            self._leave()  # another rank has said why, and rank 0 waits for this one
        seen.failures = failures
        if is_given_up:
            # it waits for two rounds itself, and does not return
            ask_store(self._give_up, self._answer_seconds + 2 * self._round_seconds)
        if progress != seen.progress:  # some rank works in a long function
            seen.progress = progress
            seen.still_seconds = 0.0

    def _place(self) -> tuple[str, list[int], list[tuple[int, int]]]:
        """Return a value that changes when this rank moves on: its step, the tags of its layers'
        next messages, and the main thread's position in the code.

        The position alone is not enough: a thread that waits for a GPU in every step is always seen
        at that wait.
        """
        next_tags = [transport.next_tag for transport in self._transports]
        # no variable of the caller may hold the frame, which holds the tensors of its layer
        return self._step(), next_tags, _place_of(sys._current_frames()[self._main])

    def _end_alone(self) -> None:
        """End the run, since this rank stood still for too long and the store does not answer."""
        alone = (
            f"{self._step()} has stood still for {self._patience:g} s: rank {self._rank} is "
            f"{self._activity()}"
        )
        keeper = f"rank 0 {self._roll.fate(0)}, " if self._roll.is_kept_by_rank_0 else ""
        line = f"{alone}, {keeper}and nothing answers where the ranks' store was; {self._advice()}"
        self._end(line, [])

    def _exchange(self, beats: int, is_over: bool, makes_progress: bool) -> tuple[bool, int, int]:
        """Write a heartbeat, and give the run up if `is_over`.

        Returns:
            whether any rank has given the run up, how often any rank was seen to make progress in a
            long function, and how many ranks have failed.
        """
        self._roll.beat(beats)
        # `add` returns the counter's new value; adding 0 only reads it
        is_given_up = bool(self._store.add("watch/given_up", int(is_over)))
        progress = self._store.add("watch/works", int(makes_progress))
        failures = self._store.add("roll/failures", 0)
        return is_given_up, progress, failures

    def _is_given_up(self) -> bool:
        """Return whether the run was given up; False if the store does not answer in time.

        The caller is handling an error, which it must still report: a second one would hide it.
        """
        try:
            # Adding 0 reads a counter; `get` would wait until some rank has written the key.
            return bool(
                ask_store(partial(self._store.add, "watch/given_up", 0), self._answer_seconds)
            )
        except ConnectionError:
            return False

    def _give_up(self) -> None:
        """Write down this rank's position. The lowest rank that answers collects all positions and
        reports them. End the process."""
        self._store.set(f"watch/position/{self._rank}", json.dumps(asdict(self._position())))
        self._write_flight_recordings()
        time.sleep(self._round_seconds)  # by then every live rank has written its position

        positions = []
        for rank in range(self._world):
            key = f"watch/position/{rank}"
            if self._store.check([key]):
                positions.append(Position(**json.loads(self._store.get(key))))

        lowest = positions[0].rank
        if lowest == self._rank:
            present = {position.rank for position in positions}
            absent = [rank for rank in range(self._world) if rank not in present]
            fates = {rank: self._roll.fate(rank) for rank in absent}
            line = f"{describe_hang(self._step(), self._patience, positions, fates)}; "
            line += self._advice()
            if self._folder:
                line += f"; moesaic why-hung {self._folder.path} shows every rank's calls"
            self._end(line, positions)
        time.sleep(self._round_seconds)  # the lowest rank speaks first
        self._leave()

    def _write_flight_recordings(self) -> None:
        """Write PyTorch's recordings of this rank's last collectives into the run folder."""
        # NCCL has a separate recorder
        for library, name in (("gloo", "_dump_fr_trace_json"), ("nccl", "_dump_nccl_trace_json")):
            dump = getattr(torch._C._distributed_c10d, name, None)
            if dump is not None and self._folder is not None:
                with suppress(OSError):
                    self._folder.write(FLIGHT.format(library=library, rank=self._rank), dump())

    def _end(self, line: str, positions: Sequence[Position]) -> None:
        """Print a line, write it into the run folder, and end the process even if its main thread
        is blocked."""
        table = {"line": line, "ranks": [asdict(position) for position in positions]}
        if self._folder is not None:
            with suppress(OSError):
                self._folder.write(HANG, json.dumps(table, indent=1))
        print(in_one_line(f"{self._command}: {line}"), file=sys.stderr, flush=True)
        try:
            raise TrainingError(line)
        except TrainingError as error:
            # torchrun's summary shows the exception that is being handled
            get_error_handler().record_exception(error)
        self._leave()

    def _leave(self) -> None:
        """End the process; rank 0 waits for the others if it keeps the store."""
        with suppress(ConnectionError):
            ask_store(self._roll.fail, self._answer_seconds)
        self._roll.outlast()
        os._exit(1)

    def _position(self) -> Position:
        """Return where this rank is: what it does, whose messages it waits for, and its stack."""
        at = self._activity()

        waits_for = {}
        # a function that waits for a message has the message's handle as a local variable
        handle = next(_locals(self._frames().values(), Handle), None)
        if handle is not None:
            for peer, tensor in handle.transfer.receives.items():
                waits_for[str(peer)] = tensor.nbytes

        main_frames = list(_outward(self._frames()[self._main]))
        stack = [
            f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
            for frame in reversed(main_frames)
        ]
        return Position(
            self._rank, process=process_name(), at=at, waits_for=waits_for, stack=tuple(stack)
        )

    def _activity(self) -> str:
        """Return what this rank is doing, in words: the task of an MoE layer's program, a message
        between pipeline stages, or a line of code."""
        frames = self._frames()
        run = next(_locals(frames.values(), LayerRun), None)
        if run is not None:
            return self._layer_in_words(run, list(_all_frames(frames.values())))
        main = list(_outward(frames[self._main]))
        message = between_stages(main)
        if message:
            return message
        return self._line_in_words(main)

    def _layer_in_words(self, run: LayerRun, frames: Sequence[FrameType]) -> str:
        """Return in words which layer runs, in which pass, and which task of its program waits.

        Args:
            frames: the frames of all threads.
        """
        name = self._layers.get(id(run.call.experts), "of no name")
        is_backward = any(frame.f_code is run_backward.__code__ for frame in frames)
        direction = "backward" if is_backward else "forward"
        drivers = [frame for frame in frames if frame.f_code is drive.__code__]
        task = _task_in_words(drivers[0]) if drivers else ""
        return f"in {direction} of layer {name}{task}"

    def _line_in_words(self, main: Sequence[FrameType]) -> str:
        """Return the innermost line of our code that runs, with the function of torch.distributed
        and the module that it is in, if any.

        Args:
            main: the main thread's frames, innermost first.
        """
        own_frames = [frame for frame in main if _is_own(frame)]
        place = own_frames[0] if own_frames else main[0]
        collectives = [
            frame.f_code.co_name for frame in main if "distributed_c10d" in frame.f_code.co_filename
        ]
        modules = [name for name in map(self._module_name, main) if name]
        words = []
        if collectives:
            words.append(f"in {collectives[0]}")
        if modules:
            words.append(f"of module {modules[0]}")
        file = place.f_code.co_filename.removeprefix(_OWN)
        words.append(f"at {file}:{place.f_lineno} in {place.f_code.co_name}")
        return " ".join(words)

    def _module_name(self, frame: FrameType) -> str:
        """Return the name of the module that a frame works on; empty if none."""
        for value in list(frame.f_locals.values()):
            if isinstance(value, nn.Module) and id(value) in self._names:
                return self._names[id(value)]
        return ""

    def _frames(self) -> dict[int, FrameType]:
        """Return the innermost frames of all other threads by thread id. On GPUs, the backward pass
        has a thread of its own."""
        own = threading.get_ident()
        return {number: frame for number, frame in sys._current_frames().items() if number != own}


def describe_hang(
    step: str, patience: float, positions: Sequence[Position], silent: Mapping[int, str]
) -> str:
    """Return one line that says which ranks have not arrived, and where the others wait.

    Args:
        step: what the run does, such as "step 12".
        patience: seconds that it has stood still.
        positions: those of the ranks that answered.
        silent: what is known about each rank that did not answer, by rank.
    """
    parts = [f"rank {rank} {fate}" for rank, fate in silent.items()]
    groups: dict[str, list[Position]] = {}
    for position in positions:
        groups.setdefault(position.at, []).append(position)
    # the smallest group comes first, since it is likely to be what the others wait for
    for group in sorted(groups.values(), key=len):
        parts.append(_group_in_words(group))
    line = f"{step} has stood still for {patience:g} s: {'; '.join(parts)}"
    if len(parts) == 1:  # one group, and no silent rank
        line += ": all are there, so look at the links between their nodes"
    return line


def _group_in_words(group: Sequence[Position]) -> str:
    """Return which ranks wait at the same place, and for how many bytes of which ranks."""
    missing_bytes: Counter[str] = Counter()
    for position in group:
        missing_bytes.update(position.waits_for)
    ranks = [position.rank for position in group]
    from_outside = {
        peer: num_bytes for peer, num_bytes in missing_bytes.items() if int(peer) not in ranks
    }
    reported = from_outside or missing_bytes  # who waits for another group tells more
    missing = [f"{reported[peer]:,} bytes of rank {peer}" for peer in sorted(reported, key=int)]
    verb = "is" if len(group) == 1 else "are"
    words = f"{in_words(ranks)} {verb} {group[0].at}"
    if missing:
        words += f", waiting for {', '.join(missing)}"
    return words


def read_hang(folder: Path) -> tuple[str, list[Position]]:
    """Return the line and the ranks' positions that a hanging run wrote down.

    Raises:
        InputError: if the run did not hang, or the file is damaged.
    """
    path = folder / HANG
    try:
        table = json.loads(read_bytes(path, at_most=MOST_TEXT))
        return str(table["line"]), [Position(**position) for position in table["ranks"]]
    except FileNotFoundError:
        raise InputError(
            f"{path}: there is none: no run in {folder} was given up because it stood still"
        ) from None
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise InputError(
            f"{path}: cannot be read ({type(error).__name__}): it is damaged, delete it"
        ) from error


def between_stages(frames: Sequence[FrameType]) -> str:
    """Return in words between which pipeline stages a thread waits for a message; empty if for
    none.

    Args:
        frames: the thread's frames, innermost first.
    """
    callers = [
        frame.f_back
        for frame in frames
        if frame.f_code.co_name == "_wait_batch_p2p" and frame.f_globals["__name__"] == _SCHEDULES
    ]
    if not callers or callers[0] is None:
        return ""
    words = "in a message between pipeline stages"

    # schedules of several stages per rank have the stage as a variable, others as an attribute
    values = callers[0].f_locals
    stage = values.get("stage") or getattr(values.get("self"), "_stage", None)
    if stage is None:
        return words

    # torch calls a part of the model a stage
    rank_of_part = stage.stage_index_to_group_rank
    neighbours = []
    for part in (stage.stage_index - 1, stage.stage_index + 1):
        if part in rank_of_part:  # the first and the last part have one neighbour
            rank = rank_of_part[part]
            if stage.group is not None:
                rank = dist.get_global_rank(stage.group, rank)
            neighbours.append(rank)
    return f"{words}: part {stage.stage_index}, whose neighbours are on {in_words(neighbours)}"


def _task_in_words(frame: FrameType) -> str:
    """Return which task of a layer's program waits for a message, in words; empty if none.

    Args:
        frame: the frame of `executor.drive`, which runs the generator of `executor.interpret`.
    """
    generator_frame = getattr(frame.f_locals["steps"], "gi_frame", None)
    # the generator has ended, or is another one
    if generator_frame is None or generator_frame.f_code is not interpret.__code__:
        return ""
    request = frame.f_locals.get("request")
    if not isinstance(request, Handle):  # it waits for no message
        return ""
    program = generator_frame.f_locals["program"]
    call = generator_frame.f_locals["call"]
    number = request.transfer.tag - call.first_tag  # each task has the tag of its number
    if number >= len(program.tasks):
        return ""
    task = program.tasks[number]
    words = task.name
    for slot in (*task.reads, *task.writes):  # the first slot of a chunk names the task's chunk
        chunk = program.slot(slot).layout.chunk
        if isinstance(chunk, int):
            words += f", chunk {chunk}"
            break
    return f", task {number} ({words}) of its program"


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and its callers, innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _place_of(innermost: FrameType) -> list[tuple[int, int]]:
    """Return a value that changes when a thread moves on: code and instruction of its frames,
    innermost first. Frames inside a wait are left out, since a wait may loop while no message
    arrives."""
    place: list[tuple[int, int]] = []
    for frame in _outward(innermost):
        if frame.f_code.co_name == "wait" and _is_own(frame):
            place = []
        else:
            place.append((id(frame.f_code), frame.f_lasti))
    return place


def _moved_bytes() -> int:
    """Return how many bytes the other threads of this process have read and written; 0 if the
    system does not say."""
    own = str(threading.get_native_id())
    num_bytes = 0
    for path in Path("/proc/self/task").glob("*/io"):
        with suppress(OSError):
            if path.parent.name != own:
                lines = path.read_text(encoding="ascii").splitlines()
                for line in lines[:2]:  # "rchar: 123", "wchar: 123"
                    num_bytes += int(line.split()[1])
    return num_bytes


def _is_own(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_OWN)


def _all_frames(innermost: Sequence[FrameType] | Any) -> Iterator[FrameType]:
    for frame in innermost:
        yield from _outward(frame)


def _locals(innermost: Any, kind: type[Any]) -> Iterator[Any]:
    """Yield local variables of type `kind` from the frames of some threads, innermost first."""
    for frame in _all_frames(innermost):
        for value in list(frame.f_locals.values()):
            if isinstance(value, kind):
                yield value
