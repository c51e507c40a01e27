"""How long the simulator takes: every size that is timed is one that the simulator runs."""

from __future__ import annotations

from moesaic_lab.simulator import OF_MODEL, speeds


def test_every_size_runs() -> None:
    """A mesh that does not divide its world was found only by the whole benchmark's last part."""
    found = speeds(repeats=1)
    assert set(found) == {size.world for size in OF_MODEL}
    assert all(seconds > 0 for seconds in found.values())
