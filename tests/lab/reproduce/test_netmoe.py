"""NetMoE's volumes, by arithmetic and by placing samples."""

from __future__ import annotations

import pytest

from moesaic_lab.reproduce.netmoe import MODELS, NetMoECluster, before_mib, placed, step_gains
from moesaic_lab.reproduce.records import read_book


@pytest.mark.parametrize(
    ("devices", "model", "intra", "inter"),
    [(16, "S", 168, 192), (32, "S", 168, 576), (32, "M", 224, 768)],
)
def test_volumes_before_are_those_of_even_routing(
    devices: int, model: str, intra: float, inter: float
) -> None:
    """Papers.md 6.7: 4 * 1024 * 2 copies per device of D floats; 7 of J stay on the node, J - 8
    leave it."""
    assert before_mib(devices, MODELS[model]) == pytest.approx((intra, inter))


def test_samples_that_are_alike_save_little_and_unlike_ones_much() -> None:
    alike = placed(16, 1000.0, draws=2)
    unlike = placed(16, 0.5, draws=2)
    assert 0.9 < alike.inter <= 1.0
    assert unlike.inter < 0.6
    assert unlike.moved_nodes < unlike.moved_devices <= 1.0
    assert 0.3 < unlike.moved_nodes < 0.7  # of two nodes a random permutation would move half


def test_draws_are_repeatable() -> None:
    assert placed(16, 4.0, draws=1) == placed(16, 4.0, draws=1)


def test_scatter_grows_with_the_samples_and_computing_has_a_fixed_part() -> None:
    bed = NetMoECluster(read_book())
    (scatter2, compute2) = bed.table4_ms(2)
    (scatter4, compute4) = bed.table4_ms(4)
    assert scatter4 / scatter2 == pytest.approx(2.0, rel=0.02)
    assert 1.2 < compute4 / compute2 < 2.0


def test_moving_samples_makes_whole_steps_faster_but_not_by_more_than_their_volume() -> None:
    """Half of the volume between nodes is the least that is left, so no step can be twice as
    fast."""
    assert 1 < step_gains(read_book(), "S", 2, 2)["fastmoe"] < 2
