"""The sample placer that moves nothing, with which placement is compared."""

from __future__ import annotations

from moesaic.balance.samples import AbstractPlacer, Homes, SampleLoad


class Stay(AbstractPlacer):
    """A sample placer that moves nothing."""

    def decide(self, load: SampleLoad) -> Homes:
        """Return the present homes."""
        return load.homes
