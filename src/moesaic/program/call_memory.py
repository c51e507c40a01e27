"""Peak memory of one layer call on each rank, forward and backward: bytes, derived from the
programs that run.

This module follows the executor's walk through a program step by step (`life.py`). A slot, a named
value of the program, lives from the task that writes it to the last task that reads it, messages
from departure to landing, and experts keep and need what their kernels do. So each step holds a
number of bytes per row of some slots, in a table that is computed once. The rows of a call, which
every rank knows for all ranks, then give the bytes of the call.

A term is what bytes are counted per: a row of a slot's layout, a row of a hop's messages, or the
scratch memory (what a kernel allocates and frees) of an expert task. A packet is what one rank
sends another in an all-to-all, encoded by a codec.

The result lives to the end of the backward pass, since what reads it may keep it. Not counted:
memory allocated before the call (input, parameters, gradient of the result), and the router.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from moesaic.codecs import DTYPES, codec_spec, is_coded
from moesaic.program.expert_sizes import ExpertSizes, Phase
from moesaic.program.layouts import ends_of, move_of
from moesaic.program.life import Step, kept, life_of
from moesaic.program.row_counts import AbstractRowCounts, AbstractRowsMoved, HopRows
from moesaic.program.task import Kind, Lane, Layout, Op, Program, Slot, Task
from moesaic.program.transpose import SUFFIX

INDEX = 16
"""Bytes of a copy's token and expert index, both int64."""
WIDE = 4
"""Smallest number of bytes of the elements in which sums are accumulated."""
POSITION = 24
"""Bytes of index tensors of each row that experts read: its places among the rows that arrived and
that leave, and its token."""
CALL = 1024
"""Bytes of small tensors of a call, such as the ends of experts' rows."""
ALLOCATED_BEFORE = ("x", "w", "b")
"""Inputs that are alive before a call."""
CODED_ROWS = 4096
"""Number of rows over which the bytes of an encoded row are averaged."""


class _Scratch(NamedTuple):
    """The temporary memory of an expert task, which is no multiple of its rows."""

    layout: Layout
    """Of the rows."""
    shards: int
    """How many shards of the hidden width the task computes."""
    gathers_x: bool
    """This and the next three are those of `KernelCall`."""
    gathers_dy: bool
    places_x: bool
    phase: Phase


_Term = Layout | HopRows | _Scratch
Bytes = Mapping[int, float]
"""Bytes per row, by the number of a slot layout or hop (`_Terms`); for scratch memory, how many
times it is alive."""


class _Terms:
    """Numbers the layouts, hops and scratch memories of a layer, since numbers hash fast."""

    def __init__(self) -> None:
        self._number: dict[_Term, int] = {}
        """By term, its number, in the order in which terms were first met."""

    def bytes_of(self, term: _Term, size: float) -> Bytes:
        """Return one term's bytes per row, `size`; the term gets a number if it has none yet."""
        return {self._number.setdefault(term, len(self._number)): size}

    def of(self, numbers: Iterable[int]) -> list[_Term]:
        """Return the terms of some numbers."""
        terms = list(self._number)
        return [terms[number] for number in numbers]


class HeldBytes:
    """Computes the memory of calls under one plan.

    Args:
        programs: forward and backward, lowered.
        mesh: how it moves rows.
        experts: memory of the layer's experts.
    """

    def __init__(
        self, programs: tuple[Program, Program], mesh: AbstractRowsMoved, experts: ExpertSizes
    ) -> None:
        self.experts = experts
        terms = _Terms()
        forward_program, backward_program = programs
        forward = _Walk(forward_program, mesh, experts, terms)
        backward = _Walk(backward_program, mesh, experts, terms, earlier=forward)
        expert_tasks = [task for task in forward_program.tasks if task.op is Op.EXPERT]

        # What a call keeps from forward to backward: slots of the forward program that the backward
        # program reads, and the experts' own. All bytes here, of a step too, are by term number.
        shared = [
            name
            for name in backward_program.inputs
            if name in forward.slots and name in backward.slots
        ]
        kept_bytes = _total_bytes(
            [
                *(backward.slot_bytes(name) for name in shared if name not in ALLOCATED_BEFORE),
                *(forward.kept_inside(task) for task in expert_tasks),
            ]
        )

        kept_names = {*shared, *(kept(task.name) for task in expert_tasks)}
        steps = forward.steps(kept_names)
        result = _total_bytes([forward.slot_bytes(name) for name in forward_program.outputs])
        # The result lives beside every step of the backward pass.
        steps += [_total_bytes([result, step]) for step in backward.steps(set())]

        sums = _sums_over_slices(forward, experts, terms)
        # Each number once, in order.
        numbers = dict.fromkeys(number for each in (*steps, kept_bytes, sums) for number in each)
        self._terms = terms.of(numbers)
        """The term of each column of the tables."""

        def row(of: Bytes) -> tuple[float, ...]:
            """Return bytes per row of each term."""
            return tuple(of.get(number, 0) for number in numbers)

        self._steps = np.array(sorted(set(map(row, steps))), dtype=np.float64)
        """(steps, terms): bytes per row at each step, equal steps once."""
        # Bytes per row of each term, (terms,) each.
        self._kept, self._sums = np.array([row(kept_bytes), row(sums)], dtype=np.float64)

    def peak(self, counts: AbstractRowCounts) -> np.ndarray:
        """Return the peak bytes of a call on each rank if it runs unsliced, (ranks,)."""
        return self._most(self._rows(counts)) + CALL  # and its small tensors

    def of_slice(self, counts: AbstractRowCounts) -> tuple[np.ndarray, np.ndarray]:
        """Return the peak bytes of a slice of a call, including the sums over all slices, and the
        part of these bytes that the slice keeps for backward; both (ranks,)."""
        rows = self._rows(counts)
        return self._most(rows) + rows @ self._sums, rows @ self._kept

    def kept_and_peak(self, counts: AbstractRowCounts) -> tuple[np.ndarray, np.ndarray]:
        """Return the bytes that a call keeps for backward, and its peak, (ranks,) each."""
        rows = self._rows(counts)
        return rows @ self._kept, self._most(rows) + CALL

    def _most(self, rows: np.ndarray) -> np.ndarray:
        """Return the bytes of the fullest step on each rank, (ranks,), from (ranks, terms) rows."""
        most: np.ndarray = (rows @ self._steps.T).max(1)
        return most

    def _rows(self, counts: AbstractRowCounts) -> np.ndarray:
        """Return the rows of each term on each rank, (ranks, terms)."""
        columns = [self._term_rows(term, counts) for term in self._terms]
        return np.stack(columns, axis=1).astype(np.float64)

    def _term_rows(self, term: _Term, counts: AbstractRowCounts) -> np.ndarray:
        """Return a term's rows on each rank, or its bytes if it is the scratch of experts."""
        if isinstance(term, HopRows):
            return counts.hop_rows(term)
        if not isinstance(term, _Scratch):
            return counts.rows(term)
        # Ranks with equal rows of every expert need equal scratch memory, computed once.
        rows_of_ranks = np.ceil(counts.rows_per_expert(term.layout)).astype(np.int64).tolist()
        bytes_of: dict[tuple[int, ...], int] = {}
        for rows in set(map(tuple, rows_of_ranks)):
            kernel_bytes = self.experts.scratch(
                rows,
                term.shards,
                gathers_x=term.gathers_x,
                gathers_dy=term.gathers_dy,
                places_x=term.places_x,
                phase=term.phase,
            )
            bytes_of[rows] = POSITION * sum(rows) + kernel_bytes
        return np.array([bytes_of[tuple(rows)] for rows in rows_of_ranks])


def _sums_over_slices(forward: _Walk, experts: ExpertSizes, terms: _Terms) -> Bytes:
    """Return the bytes of the gradients of tokens and weights that are summed over the slices of a
    call, in float32 or wider, and of the tokens' gradients after a cast."""
    sum_bytes = max(WIDE, experts.element_bytes)
    tokens = forward.slots["x"].layout
    weights = forward.slots["w"].layout
    sums = [
        terms.bytes_of(tokens, experts.dim * sum_bytes),
        terms.bytes_of(weights, experts.unit_numbers * sum_bytes),
    ]
    if sum_bytes > experts.element_bytes:
        sums.append(terms.bytes_of(tokens, experts.dim * experts.element_bytes))
    return _total_bytes(sums)


class _Walk:
    """One program, with the memory of its slots and tasks.

    Args:
        program: lowered.
        mesh: how it moves rows.
        experts: memory of the layer's experts.
        terms: of the layer.
        earlier: the walk of the forward program, of a backward one.
    """

    def __init__(
        self,
        program: Program,
        mesh: AbstractRowsMoved,
        experts: ExpertSizes,
        terms: _Terms,
        earlier: _Walk | None = None,
    ) -> None:
        self._bytes_of = terms.bytes_of
        """Returns `Bytes` of one term, given the term and its bytes per row."""
        self.program = program
        self.mesh = mesh
        self.experts = experts
        self._earlier = earlier
        self._writers = {name: task for task in program.tasks for name in task.writes}
        """By slot, the task that writes it."""
        self.slots = {slot.name: slot for slot in program.slots}
        self._codecs = {task.of: task.codec for task in program.tasks if task.op is Op.PACK}
        """By lowered movement, given by its source and target slot, the codec of its rows."""
        lanes = {task.lane for task in program.tasks if task.op in (Op.MOVE, Op.HOP)}
        self.slowest = Lane.INTER if Lane.INTER in lanes else Lane.INTRA
        """The lane whose messages take longest; deferred products run while these are in flight."""

    def slot_bytes(self, name: str) -> Bytes:
        """Return the bytes per row of a slot."""
        slot = self.slots[name]
        return self._bytes_of(slot.layout, self._row_bytes(slot))

    def kept_inside(self, task: Task) -> Bytes:
        """Return the bytes that an expert task keeps for backward besides its input."""
        read = [self.slots[name] for name in task.reads]
        rows = next(slot for slot in read if slot.kind is Kind.ROWS)
        numbers_per_row = self.experts.kept * self._shards(task)
        return self._bytes_of(rows.layout, numbers_per_row * self.experts.element_bytes)

    def _shards(self, task: Task) -> int:
        """Return how many shards of the hidden width an expert task computes."""
        read = [self.slots[name] for name in task.reads]
        weights = next(slot for slot in read if slot.layout.flow == "weights")
        return self.mesh.num_shards(weights.layout)

    def scratch_of_experts(self, task: Task, phase: Phase) -> Bytes:
        """Return the scratch memory of an expert task."""
        x = task.reads[0]
        gathers_dy = False
        if task.op is Op.EXPERT_GRAD:  # reads the cotangent of the results first, then the rows
            gathers_dy, _ = self._order_of(task.reads[0])
            x = task.reads[1]
        gathers_x, places_x = self._order_of(x)
        scratch = _Scratch(
            self.slots[x].layout,
            self._shards(task),
            gathers_x=gathers_x,
            gathers_dy=gathers_dy,
            places_x=places_x,
            phase=phase,
        )
        return self._bytes_of(scratch, 1)  # alive once; `_term_rows` gives its bytes

    def _order_of(self, name: str) -> tuple[bool, bool]:
        """Return whether rows lie in another order than the experts', and whether their gradients
        are written in that order: `gathers_x` and `places_x` of an expert task.

        Args:
            name: the slot of the rows.
        """
        writer = self._writers.get(name)
        if writer is None:  # an input, which in a backward program the forward one may have written
            return (False, False) if self._earlier is None else self._earlier._order_of(name)
        if writer.op in (Op.PERMUTE, Op.TAKE):  # read through an index that is no permutation
            return True, False
        if writer.op is Op.UNPACK:  # read in the order in which rows arrived, and sent back in it
            return True, True
        if writer.op is not Op.MOVE:  # counted as written in the experts' order
            return False, False
        if self.stays(writer):  # rows lie as in the source
            return self._order_of(writer.reads[0])
        # Unless rows arrive in the slot's order, they are read in the order in which they arrived.
        _, _, in_place = self.messages(writer, joined=False)
        return not in_place, not in_place

    def _row_bytes(self, slot: Slot) -> int:
        """Return the bytes of a row of a slot."""
        experts = self.experts
        if slot.kind is Kind.LANE:
            return max(WIDE, experts.element_bytes)
        if slot.kind is Kind.INDEX:
            return INDEX
        if slot.kind is Kind.WEIGHT and slot.layout.flow == "weights":  # a row per hidden unit
            return experts.unit_numbers * experts.element_bytes
        return experts.dim * experts.element_bytes

    def steps(self, stay: set[str]) -> list[Bytes]:
        """Return the bytes that are alive at each step.

        Args:
            stay: names of what lives to the end besides the outputs.
        """
        alive = _Alive(self)
        life = life_of(self.program, frozenset({*stay, *self.program.outputs}))
        for place, step in enumerate(life.steps):
            for sender in step.lands:
                alive.land(sender)
            alive.run_deferred_before(step.reads)
            if step.sends:
                alive.depart(place, step)
            else:
                alive.compute(step)
            alive.free(place, step.dies)
        for sender in life.lands:
            alive.land(sender)
        return alive.bytes_by_step

    def messages(self, task: Task, *, joined: bool) -> tuple[Bytes, Bytes, bool]:
        """Return the bytes of a movement's send and receive buffers, and whether the receive buffer
        is the slot itself.

        Args:
            task: a move or a hop.
            joined: whether it travels with other movements as one message, so that rows are copied
                in and out.
        """
        source, move = ends_of(task, self.slots)
        target = self.slots[task.writes[0]]
        if task.op is Op.HOP:
            row_bytes = self.coded(source, self._codecs.get(task.of, ""))
            sent_rows = HopRows(move, task.link, task.group, task.hop, arrives=False)
            received_rows = sent_rows._replace(arrives=True)
            packets_sent = self._bytes_of(sent_rows, row_bytes)
            return packets_sent, self._bytes_of(received_rows, row_bytes), False
        sent, received = self.mesh.messages(move)
        # `uses` is how often each row of the slot occurs in messages.
        to_send: Bytes = {}
        sends_slot = not joined and sent.is_whole  # the slot itself
        if sent.uses and not sends_slot:
            to_send = self._bytes_of(source.layout, self._row_bytes(source) * sent.uses)
        if source.layout.flow == "weights":  # packed into rows first
            to_send = _total_bytes([to_send, self.slot_bytes(task.reads[0])])
        to_receive: Bytes = {}
        if received.uses:
            to_receive = self._bytes_of(target.layout, self._row_bytes(target) * received.uses)
        return to_send, to_receive, not joined and received.is_whole

    def _summand_bytes(self, name: str) -> Bytes:
        """Return the bytes of a summand of an ADD task, given by its slot, in the stack that is
        summed; of parameters, which are summed one after the other, those of the largest."""
        slot = self.slots[name]
        experts = self.experts
        writer = self._writers.get(name)
        is_by_experts = writer is not None and writer.op is Op.EXPERT_GRAD
        has_weight_gradients = is_by_experts and slot.layout.flow == "weights"
        if not (has_weight_gradients and experts.kernel):  # counted as a single tensor
            return self.slot_bytes(name)
        # Built-in experts (those with a kernel) have two weight tensors, whose gradients are added
        # one after the other. The larger one joins the matrices that read the token: all but the
        # last. A row of the slot is a hidden unit.
        bytes_per_unit = (experts.matrices - 1) * experts.dim * experts.element_bytes
        return self._bytes_of(slot.layout, bytes_per_unit)

    def stays(self, task: Task) -> bool:
        """Return whether a move leaves all rows where they are, on every rank."""
        return self.mesh.stays(move_of(task, self.slots))

    def coded(self, slot: Slot, codec: str | None) -> int:
        """Return the bytes of a slot's row in a message; "" and None stand for no codec."""
        if not codec or not is_coded(codec) or slot.kind not in (Kind.ROWS, Kind.TOKENS):
            return self._row_bytes(slot)
        dtype = DTYPES[self.experts.element_bytes]
        num_bytes = codec_spec(codec).num_bytes(CODED_ROWS, self.experts.dim, dtype)
        return int(np.ceil(num_bytes / CODED_ROWS))

    def packed(self, task: Task) -> Bytes:
        """Return the bytes of packets: sorted rows, and encoded ones if that makes them smaller."""
        assert task.of is not None
        source = self.slots[task.of[0]]  # of the whole movement
        coded = self.coded(source, task.codec)
        packets = self.slot_bytes(source.name)
        is_smaller = coded < self.coded(source, "")
        if not is_smaller:
            return packets
        return _total_bytes([packets, self._bytes_of(source.layout, coded)])

    def scratch(self, task: Task) -> Bytes:
        """Return the temporary bytes of a task while it runs, besides the slots that it reads and
        writes."""
        size = self.experts.element_bytes
        if task.op is Op.EXPERT:
            return self.scratch_of_experts(task, "forward")
        if task.op is Op.EXPERT_GRAD:
            return self.scratch_of_experts(task, "backward")
        if task.op is Op.COMBINE and size < WIDE:  # in float32: copies of the rows, and their sums
            rows = task.reads[0]
            tokens = self.slots[task.writes[0]].layout
            float32_row = self.experts.dim * WIDE
            row_bytes = float32_row
            is_gathered, _ = self._order_of(rows)
            if is_gathered:  # a copy in the experts' order
                row_bytes += self.experts.dim * size
            row_sums = self._bytes_of(tokens, float32_row)
            return _total_bytes([self._bytes_of(self.slots[rows].layout, row_bytes), row_sums])
        if task.op is Op.UNPACK:  # decoded rows, before they are in their places
            return self.slot_bytes(task.writes[0])
        if task.op is Op.ADD and size < WIDE:  # a stack of what is added
            return _total_bytes([self._summand_bytes(name) for name in task.reads])
        return {}


class _Flight(NamedTuple):
    """The messages of a step."""

    lane: Lane
    buffers: list[Bytes]
    """To send, to receive, and slots that are sent without a copy."""
    arrive: Mapping[str, tuple[Bytes, bool]]
    """By slot that the messages bring, its bytes, and whether the receive buffer is the slot
    itself."""

    @property
    def has_no_send_buffer(self) -> bool:
        """Whether slots are sent without a copy."""
        return not self.buffers[0]


class _Alive:
    """The memory that is alive while a program runs."""

    def __init__(self, walk: _Walk) -> None:
        self._walk = walk
        self.bytes_by_step: list[Bytes] = []
        """The bytes at each moment that `_record` noted, in order."""
        self._flights: dict[int, _Flight] = {}
        """By step, its messages in flight."""
        self._deferred: Bytes = {}
        """Temporary memory of deferred weight-gradient products, which run while rows are in
        flight."""
        self._summing: Bytes = {}
        """The same while the products run."""
        self._deferred_slots: set[str] = set()
        """Slots that the deferred products write."""
        self._storage_of: dict[str, str] = {}
        """By slot that a move leaves in place, the slot whose memory it shares."""
        self._users: dict[str, set[str]] = {}
        """By slot whose memory others share, all of these that live."""
        program = walk.program
        self._alive: dict[str, Bytes] = {}
        """By slot that lives, its bytes."""
        self._total: dict[int, float] = {}
        """Sum of `_alive`: whole numbers, so that adding and taking away is exact."""
        for name in program.inputs:
            if name not in ALLOCATED_BEFORE and not name.endswith(SUFFIX):
                self._add(name, walk.slot_bytes(name))
        for task in program.tasks:
            if task.op is Op.EXPERT_GRAD:
                self._add(kept(task.name), walk.kept_inside(task))

    def _add(self, name: str, size: Bytes) -> None:
        """Let a slot live, in place of what had its name."""
        self._remove(name)
        self._alive[name] = size
        for number, count in size.items():
            self._total[number] = self._total.get(number, 0) + count

    def _remove(self, name: str) -> Bytes | None:
        """Let a slot die, if it lives; return its bytes."""
        size = self._alive.pop(name, None)
        for number, count in (size or {}).items():
            self._total[number] -= count
        return size

    def land(self, sender: int) -> None:
        """Let the messages of a step arrive, if it sent any.

        Args:
            sender: the place of the step.
        """
        flight = self._flights.pop(sender, None)
        if flight is None:
            return
        if flight.lane is self._walk.slowest:
            self._run_deferred(flight.buffers)
        for name, (size, in_place) in flight.arrive.items():
            if not in_place:
                self._add(name, size)
        # Rows are copied from the receive buffer while both are alive; a slot in place replaces it.
        self._record(*flight.buffers)
        for name, (size, in_place) in flight.arrive.items():
            if in_place:
                self._add(name, size)

    def run_deferred_before(self, reads: Iterable[str]) -> None:
        """Run the deferred products if one of some slots is written by them."""
        if not self._deferred_slots.isdisjoint(reads):
            self._run_deferred(())

    def _run_deferred(self, buffers: Iterable[Bytes]) -> None:
        """Run the deferred products, beside the buffers of messages that are not in `_flights`."""
        if self._deferred:
            # `_record` counts `_deferred`: while the products run, that is what they need.
            self._deferred = self._summing
            self._record(*buffers)
        self._deferred = {}
        self._deferred_slots = set()

    def depart(self, place: int, step: Step) -> None:
        """Send the messages of a step. Slots whose rows stay share the memory of their sources."""
        walk = self._walk
        moving = [task for task in step.tasks if task.op is Op.HOP or not walk.stays(task)]
        for task in step.tasks:
            if task not in moving:
                self._share(task.writes[0], task.reads[0])
        if not moving:
            return
        to_send: list[Bytes] = []
        to_receive: list[Bytes] = []
        arrive = {}
        for task in moving:
            sent, received, in_place = walk.messages(task, joined=len(moving) > 1)
            to_send.append(sent)
            to_receive.append(received)
            if task.op is Op.HOP:  # its packets stay in the receive buffer
                arrive[task.writes[0]] = (received, True)
            else:
                arrive[task.writes[0]] = (walk.slot_bytes(task.writes[0]), in_place)
        buffers = [_total_bytes(to_send), _total_bytes(to_receive)]
        self._flights[place] = _Flight(step.tasks[0].lane, buffers, arrive)
        self._record()

    def _share(self, name: str, source: str) -> None:
        """Let a slot have the memory of another one, or of what that shares."""
        storage = self._storage_of.get(source, source)
        self._storage_of[name] = storage
        self._users.setdefault(storage, {source}).add(name)

    def compute(self, step: Step) -> None:
        """Run a task that involves no other rank."""
        walk = self._walk
        task = step.tasks[0]
        for name in task.writes:
            is_packed = walk.slots[name].kind is Kind.PACKETS
            self._add(name, walk.packed(task) if is_packed else walk.slot_bytes(name))
        if task.op is Op.EXPERT:
            self._add(kept(task.name), walk.kept_inside(task))
        self._record(walk.scratch(task))
        if task.op is Op.EXPERT_GRAD:
            self._deferred = walk.scratch_of_experts(task, "waiting")
            self._summing = walk.scratch_of_experts(task, "summing")
            self._deferred_slots = set(task.writes[2:])  # after those of rows and gates

    def free(self, place: int, names: Iterable[str]) -> None:
        """Free slots. One that is sent without a copy lives until its messages have arrived."""
        flight = self._flights.get(place)
        for name in names:
            storage = self._storage_of.get(name, name)
            users = self._users.get(storage, {name})
            users.discard(name)
            if users:  # another slot has the same memory
                continue
            freed = self._remove(storage)
            if freed and flight is not None and flight.has_no_send_buffer:
                flight.buffers.append(freed)

    def _record(self, *extra: Bytes) -> None:
        """Note the bytes that are alive now, with some others."""
        in_flight = [buffer for flight in self._flights.values() for buffer in flight.buffers]
        self.bytes_by_step.append(_total_bytes([self._total, *in_flight, self._deferred, *extra]))


def _total_bytes(parts: Iterable[Bytes]) -> Bytes:
    """Return the sum of some numbers of bytes by term."""
    total: dict[int, float] = {}
    for part in parts:
        for number, size in part.items():
            total[number] = total.get(number, 0) + size
    return total
