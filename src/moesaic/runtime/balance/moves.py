"""Whether the samples of a call stay where they are: what placement gains weighed against what replication gains.

Placement is solved while a call runs, so what it gains is known when the call is over. The next call of the layer decides
from that, and from what the best of the arbiter's options saved last; where samples stay, placement is tried again now and
then. All ranks know both, so they decide alike.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from moesaic.balance.replication.cost import ReplicationCosts
from moesaic.balance.selector.arbiter import Arbiter, CallDecision
from moesaic.balance.selector.options import ALONE
from moesaic.cost.alpha_beta import Machine
from moesaic.runtime.balance.samples.relocate import SampleMove

RELOCATE = "relocate"
"""The option of moving samples."""


@dataclass(frozen=True)
class Tried:
    """A call in which samples moved."""

    move: SampleMove
    alone_seconds: float
    """Of the call if it had been left alone."""
    dim: int
    """Width of a token."""


class MoveArbiter:
    """Decides for one layer between its samples' moving and the arbiter's other options.

    Args:
        settings: of the layer's arbiter.
    """

    def __init__(self, settings: Arbiter) -> None:
        self._settings = settings
        self._tried: Tried | None = None
        self._share: float | None = None
        """Of the time left alone, with samples that move; None before the first call."""
        self._other = 1.0
        """The same of the best other option."""
        self._moves, self._calls = True, 0

    def prefers_moving(self) -> bool:
        """Return whether samples may move in the next call."""
        self._calls += 1
        self._look_back()
        if self._share is None or self._calls >= self._settings.weigh_every:
            self._calls = 0
            return True
        mine, margin = self._share, 1 - self._settings.margin
        self._moves = mine < 1 and not self._other < margin * mine if self._moves else mine < margin * self._other
        return self._moves

    def note_others(self, decision: CallDecision) -> None:
        """Take down what the other options would do, or did.

        Args:
            decision: of the layer's arbiter, for this call.
        """
        if decision.is_trial:
            return
        alone = decision.seconds.get(ALONE, 0.0)
        self._other = decision.seconds[decision.option] / alone if alone else 1.0

    def note_move(self, move: SampleMove, decision: CallDecision, dim: int) -> CallDecision:
        """Take down that samples move in this call; what it gains is looked at when the next call comes.

        Args:
            move: of the call.
            decision: what the arbiter would have done with samples that stay.
            dim: width of a token.

        Returns:
            The decision that was taken instead.
        """
        self.note_others(decision)
        if move.goal is None:
            self._tried = Tried(move, decision.seconds.get(ALONE, 0.0), dim)
        (rows, _), (token_bytes, _) = decision.rows, decision.token_bytes
        before = replace(decision, rows=(rows, rows), token_bytes=(token_bytes, token_bytes), weight_bytes=0)
        return replace(before, option=RELOCATE, program=0, replicated=None, is_trial=False)

    def _look_back(self) -> None:
        if self._tried is None:
            return
        tried, self._tried = self._tried, None
        saved = saved_seconds(tried.move, self._settings.costs, tried.dim)
        share = 1 - saved / tried.alone_seconds if tried.alone_seconds else 1.0
        memory = self._settings.memory
        self._share = share if self._share is None else (1 - memory) * share + memory * self._share


def saved_seconds(move: SampleMove, costs: ReplicationCosts, dim: int) -> float:
    """Return what a move saves, this layer's results and the next one's copies together, spread over the ranks.

    Args:
        move: decided.
        costs: rates.
        dim: width of a token.
    """
    stay, moved = move.volumes()
    machine: Machine = costs.machine
    row_bits = 8 * dim * costs.element_bytes * (2 if costs.backward else 1)
    inside, across = stay.intra - moved.intra, stay.inter - moved.inter
    seconds = inside / machine.intra_gbps + across / machine.inter_gbps
    return row_bits * seconds / 1e9 / move.before.ranks
