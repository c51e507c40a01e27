"""What a call of a layer on a mesh runs, and which copies it lends, once its counts are known to all ranks.

Under most plans that is the plan's program; under plans that lend, the policy's table decides whether the program with
lending is needed at all; under `lending="arbiter"` the arbiter picks among several programs and tables. A recomputation
finds what its forward pass decided: decisions depend on earlier ones, and both must run the same program.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from torch.utils.weak import WeakIdKeyDictionary

from moesaic.errors import InputError
from moesaic.plan import Compiled
from moesaic.plan.arbiter import Arbiter, Arbitration, Verdict
from moesaic.plan.compile import for_call
from moesaic.plan.lending import LENDERS
from moesaic.plan.lending.lender import AbstractLender, Load
from moesaic.routing.route import RoutingRecord
from moesaic.runtime.arbiter_moves import MoveArbiter
from moesaic.runtime.relocate import SampleMove

KEPT = 1024
"""Decisions of a layer that are kept at most until somebody takes them."""


class Chooser:
    """Chooses for the calls of one layer under one plan.

    Args:
        compiled: of the layer.
        lender: decides in place of the policy that the plan names; None for that policy.
        num_experts: of the layer.
        dim: width of a token.

    Raises:
        InputError: for a lender other than an `Arbiter` under `lending="arbiter"`.
    """

    def __init__(self, compiled: Compiled, lender: AbstractLender | None, num_experts: int, dim: int) -> None:
        self.compiled, self.num_experts, self.dim = compiled, num_experts, dim
        self._lender = (lender or _named(compiled.plan.lending)) if compiled.lends else None
        self._arbitration: Arbitration | None = None
        if compiled.options:
            if not isinstance(self._lender, Arbiter):
                raise InputError(
                    f"plan.lending=arbiter was given the lender {type(self._lender).__name__}: give an Arbiter, or choose "
                    "another plan.lending"
                )
            self._arbitration = self._lender.start(compiled.plan, [option.plan for option in compiled.options])
            self._moves = MoveArbiter(self._lender)
        self._verdicts: deque[Verdict] = deque(maxlen=KEPT)
        self._of_call = WeakIdKeyDictionary()

    def choose(self, record: RoutingRecord, copies: np.ndarray, units: int) -> tuple[Compiled, np.ndarray | None]:
        """Return the programs of a call, and its lent copies, (world, num_experts, ep) int64; None where it lends none.

        Args:
            record: of its routing; a recomputation has that of its forward pass.
            copies: (world, num_experts) int64 that each origin has for each expert.
            units: hidden units of one shard of an expert.
        """
        if self._lender is None:
            return self.compiled, None
        load = Load(self.compiled.grid, copies, self.num_experts, units, self.dim)
        if self._arbitration is None:
            lent = self._lender.decide(load)
            compiled = for_call(self.compiled, lent)
            return compiled, lent if compiled.lends else None
        verdict: Verdict | None = self._of_call.get(record.by_rank)
        if verdict is None:
            verdict = self._arbitration.choose(load)
            self._moves.note_others(verdict)
            self._verdicts.append(verdict)
            self._of_call[record.by_rank] = verdict
        return self.compiled.options[verdict.program], verdict.lent

    @property
    def bare(self) -> Compiled:
        """The programs under which samples may move: the arbiter's without lending, else those of the plan."""
        return self.compiled.options[0] if self.compiled.options else self.compiled

    def stays(self, move: SampleMove) -> bool:
        """Return whether samples stay in a call that might move them, so that the layer runs like any other.

        Args:
            move: of the call; it is decided once.
        """
        if self._arbitration is None:
            return False
        if move.stays is None:
            if move.goal is not None:
                move.stays = move.before.same_as(move.goal)
            else:
                move.stays = not self._moves.prefers_moving()
                move.goal = move.before if move.stays else None
        return move.stays

    def note_move(self, record: RoutingRecord, move: SampleMove, copies: np.ndarray, units: int) -> None:
        """Take down a call in which samples move; arguments as of `choose`."""
        if self._arbitration is None or record.by_rank in self._of_call:
            return
        verdict = self._arbitration.choose(Load(self.compiled.grid, copies, self.num_experts, units, self.dim))
        self._of_call[record.by_rank] = self._moves.note_move(move, verdict, self.dim)
        self._verdicts.append(self._of_call[record.by_rank])

    def take(self) -> list[Verdict]:
        """Return the arbiter's decisions since the last `take`, oldest first."""
        found = list(self._verdicts)
        self._verdicts.clear()
        return found


def _named(policy: str) -> AbstractLender:
    return Arbiter() if policy == "arbiter" else LENDERS[policy]()
