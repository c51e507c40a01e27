"""Two micro-batches in flight: while the messages of one travel, the other computes.

    for losses in in_flight(loss_of, micro_batches):  # of two at a time
        (torch.stack(losses).sum() / len(micro_batches)).backward()

Both are freed before the next two start. Each micro-batch runs in a greenlet of the caller's
thread. It hands its turn over where a MoE layer on a mesh has issued messages and would wait for
them (`runtime/paused_calls.py`), so the model's code stays as it is. The backward passes of the two
interleave by themselves, if one `backward` runs both. Where a turn is handed over depends on the
programs of the layers alone, so all ranks issue their messages in one order. Under the layers' plan
"auto", the first call of each micro-batch says whether it hands its turn over at all (`auto.py`):
one that does not is done before the next one starts. A *number* is a micro-batch's index in the
step. References to losses and batches are deleted early (`del`), since they keep a whole graph in
memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, get_args

import torch
from torch import Tensor

from moesaic.comm.transport import TURN, AbstractTurn
from moesaic.errors import InputError, to_install
from moesaic.runtime.gathered_units import GatheredUnits, enter_again
from moesaic.runtime.torch_state import TorchState, check_torch

if TYPE_CHECKING:
    from greenlet import greenlet

T = TypeVar("T")
AtOnce = Literal["auto", 1, 2]
"""How many micro-batches run at a time."""
MOST_EXITS = 100
"""How often a micro-batch may go on with another layer after it was told to end."""


def in_flight(
    loss_of: Callable[[T], Tensor], micro_batches: Collection[T], *, at_once: AtOnce = "auto"
) -> Iterator[list[Tensor]]:
    """Compute the losses of micro-batches two at a time, the one while the messages of the other
    travel. All ranks call this together.

    Call `backward` once on the sum of the losses that belong together, before the next two start.
    While you do, the layers' auxiliary losses weigh 1/len(micro_batches), unless `set_loss_scale`
    was called.

    A micro-batch draws its random numbers from a seed of its own, drawn from the default generator;
    so they are the same whether another one is in flight or not. Grad mode, autocast, modes, hooks
    of saved tensors, the default dtype and device, deterministic mode and checkpoints' routing
    records belong to the micro-batch that sets them. Other settings of the process that code
    changes around a layer are shared.

    Args:
        loss_of: computes a micro-batch's loss, on its own: what it writes elsewhere, both write.
        micro_batches: the micro-batches of a step, any objects; read two at a time.
        at_once: how many run at a time, the same on all ranks. "auto": two, unless the layers have
            the plan "auto", which times both and keeps one where two are not faster.

    Yields:
        the losses of two micro-batches; of one, if one runs at a time, if their number is odd, or
        if the model sends no messages.

    Raises:
        InputError: greenlet is not installed, torch lacks what a switch needs, `micro_batches` has
            no length, `at_once` is unknown, or `loss_of` returns no tensor.
    """
    if at_once not in get_args(AtOnce):
        raise InputError(f'in_flight: at_once={at_once!r}: write 1, 2 or "auto"')
    try:
        count = len(micro_batches)
    except TypeError:
        raise InputError(
            f"in_flight: micro_batches is a {type(micro_batches).__name__}, which has no length: "
            "pass a list"
        ) from None
    check_torch()
    _greenlets()
    return _steps(loss_of, iter(micro_batches), count, None if at_once == "auto" else at_once)


def _greenlets() -> Any:
    """Return the package greenlet, which nothing else needs."""
    try:
        import greenlet
    except ModuleNotFoundError:
        raise InputError(f"in_flight needs greenlet: {to_install('.[train]')}") from None
    return greenlet


def _steps(
    loss_of: Callable[[T], Tensor], batches: Iterator[T], count: int, at_once: int | None
) -> Iterator[list[Tensor]]:
    """Yield the losses of micro-batches that ran together; their backward passes are weighted for a
    mean over `count`."""
    number = 0
    while True:
        turns, losses = _run_together(loss_of, batches, number, at_once)
        if not losses:
            return
        number += len(losses)
        with _weighed(turns, 1 / count):
            del turns
            yield losses
        del losses


def _run_together(
    loss_of: Callable[[T], Tensor], batches: Iterator[T], number: int, at_once: int | None
) -> tuple[list[_Turn], list[Tensor]]:
    """Run the next micro-batch, and the one after it beside it if the first hands its turn over;
    return their turns and losses."""
    micro_batches: list[_MicroBatch[T]] = []
    units = GatheredUnits()  # FSDP2's units that stay gathered while one in them pauses
    try:
        for batch in batches:
            # FSDP2 must not free what the one that pauses still computes with
            for earlier in micro_batches:
                earlier.holds = units.hold()
            turn = _Turn(number + len(micro_batches), at_once)
            newest = _MicroBatch(loss_of, batch, turn)
            del batch
            micro_batches.append(newest)
            newest.take_turn()
            # a first one that is done never handed its turn over
            if len(micro_batches) == 2 or newest.is_done:
                break

        while not all(each.is_done for each in micro_batches):
            for each in micro_batches:
                if not each.is_done:
                    each.take_turn()
                # it pauses, perhaps in a unit that the other one is about to leave
                if not each.is_done and len(micro_batches) == 2:
                    each.holds = units.hold()
    except BaseException:
        for each in micro_batches:
            each.stop()
        raise
    finally:
        units.restore()
    turns = [each.turn for each in micro_batches]
    losses = [each.take_loss() for each in micro_batches]
    return turns, losses


class _Turn(AbstractTurn):
    """The turn of a micro-batch in a greenlet, which hands it over to the greenlet's parent."""

    def hand_over(self) -> None:
        self.at_once = 2  # another one runs beside it now: too late for layers to choose
        parent = _greenlets().getcurrent().parent
        assert parent is not None
        parent.switch()


class _MicroBatch(Generic[T]):
    """A micro-batch that runs in a greenlet, with a state of torch of its own."""

    def __init__(self, loss_of: Callable[[T], Tensor], batch: T, turn: _Turn) -> None:
        self.turn = turn
        self.holds: list[Any] = []
        """The parameter groups of FSDP2 that it is in, and that stay gathered anyway."""
        self._loss: Tensor | None = None
        self._state = TorchState.now()
        """Its own settings of torch while another micro-batch runs."""
        seed = int(torch.randint(2**62, (), device="cpu"))
        self._greenlet: greenlet = _greenlets().greenlet(_run)
        # context variables of its own, in which its code finds its turn
        self._greenlet.gr_context = copy_context()
        self._greenlet.gr_context.run(TURN.set, self.turn)
        self._arguments: tuple[Any, ...] = (loss_of, batch, seed)
        """Those of `_run` for the first turn, which starts it; () afterwards."""

    @property
    def is_done(self) -> bool:
        """Whether the loss is known, or the micro-batch has failed."""
        return bool(self._greenlet.dead)

    def take_turn(self) -> None:
        """Run on to where the turn is handed over, or to the end, where the loss is returned. The
        batch is not kept beyond the first turn."""
        arguments = self._arguments
        self._arguments = ()
        enter_again(self.holds)
        with self._own_state():
            result = self._greenlet.switch(*arguments)
            del arguments
        if self.is_done:
            self._loss = result

    def take_loss(self) -> Tensor:
        """Return the loss, which is not kept."""
        loss = self._loss
        self._loss = None
        if not isinstance(loss, Tensor):
            raise InputError(
                f"in_flight: loss_of returned {type(loss).__name__}: return the loss, a tensor"
            )
        return loss

    def stop(self) -> None:
        """End the micro-batch where it is, unless it has ended."""
        for _ in range(MOST_EXITS):
            if self.is_done or not self._greenlet:  # false before it has started
                return
            with self._own_state():
                self._greenlet.throw()  # GreenletExit, where it paused

    @contextmanager
    def _own_state(self) -> Iterator[None]:
        """Run with this micro-batch's own state of torch, kept from turn to turn."""
        outside = TorchState.now()
        self._state.set()
        for context in self.turn.contexts:  # those that it is in and that set modules' attributes
            context.resume()
        try:
            yield
        finally:
            for context in reversed(self.turn.contexts):
                context.suspend()
            self._state = TorchState.now()
            outside.set()


def _run(loss_of: Callable[[T], Tensor], batch: T, seed: int) -> Tensor:
    """Compute a micro-batch's loss from its own random numbers."""
    torch.manual_seed(seed)
    return loss_of(batch)


@contextmanager
def _weighed(turns: list[_Turn], scale: float) -> Iterator[None]:
    """Set the weight of the auxiliary losses, in the layers that ran, to `scale` unless
    `set_loss_scale` was called, and take it back."""
    layers = {}  # by identity, since both turns may have run a layer
    for turn in turns:
        for key, layer in turn.injecting.items():
            if not layer.loss_scale_is_set:
                layers[key] = layer
    for layer in layers.values():
        layer.loss_scale.fill_(scale)
        layer.loss_scale_is_set = True
    try:
        yield
    finally:
        for layer in layers.values():
            layer.loss_scale.fill_(1.0)
            layer.loss_scale_is_set = False
