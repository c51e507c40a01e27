"""When nobody is asked where samples go: to decide costs as much where nobody moves, so after such passes a policy rests.

Deciding takes an exchange of counts by sample, the next router on this layer's input and programs by sample: 3 to 7 % of a
step on an emulated cluster. What is told is the same on all ranks, so all of them rest in the same passes.
"""

from __future__ import annotations

from collections.abc import Sequence

PATIENCE = 2
"""Passes in a row in which nobody moves, before a policy may rest."""


class Rest:
    """Counts the passes of one relocator."""

    def __init__(self) -> None:
        self._still = self._left = 0

    def begins(self, rest: int, moved: Sequence[bool | None]) -> bool:
        """Return whether the pass that begins goes by unasked.

        Args:
            rest: passes that may go by unasked after some in which nobody moved; 0 for none.
            moved: of each layer in the pass before, which is over: whether a policy that was asked moved anybody; None where
                none was asked.
        """
        asked = [found for found in moved if found is not None]
        if asked:
            self._still = 0 if any(asked) else self._still + 1
            self._left = rest if self._still >= PATIENCE else 0
        elif self._left:
            self._left -= 1
        return self._left > 0
