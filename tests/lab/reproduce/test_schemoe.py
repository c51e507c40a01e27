"""ScheMoE's layers, all-to-alls and steps."""

from __future__ import annotations

import pytest

from moesaic_lab.reproduce.records import read_book
from moesaic_lab.reproduce.schemoe import (
    ABLATION,
    CT_MOE,
    ScheMoECluster,
    cluster,
    exchange_gib,
    exchange_seconds,
    layers,
    sized,
)
from planner.schemoe_forms import in_turn_all_to_all, pipelined_all_to_all

BOOK = read_book()


def test_the_sweep_has_675_layers() -> None:
    found = list(layers())
    assert sum(count for _, count in found) == 675
    assert len({workload for workload, _ in found}) == len(found) == 375


def test_rows_are_as_large_as_the_paper_says() -> None:
    """8.63 MB in CT-MoE, 644 MB in the layer of the ablation."""
    assert CT_MOE.copies * CT_MOE.dim * 4 == pytest.approx(8.63e6, rel=1e-3)
    assert ABLATION.copies * ABLATION.dim * 4 == pytest.approx(644e6, rel=1e-3)


@pytest.mark.parametrize("size", [2**20, 2**28])
def test_all_to_alls_are_those_of_equations_16_and_17(size: int) -> None:
    spec = cluster(BOOK)
    start = 109e-6
    intra, inter = (8 * size / 32 / (link.gbps[0] * 1e9) for link in spec.links)
    linear, pipelined = (
        exchange_seconds(spec, name, sized(size)) for name in ("linear", "pipelined")
    )
    assert linear == pytest.approx(
        in_turn_all_to_all(32, 4, intra, inter) - intra + start, rel=1e-6
    )
    assert pipelined == pytest.approx(pipelined_all_to_all(32, 4, intra, inter) + start, rel=1e-6)


def test_the_leader_of_1dh_holds_five_times_as_much() -> None:
    assert exchange_gib("linear", 2**30) == 2
    assert exchange_gib("hier1d", 2**30) == 10


def test_the_ablation_falls_row_by_row_and_a_step_is_its_layers_and_the_rest() -> None:
    bed = ScheMoECluster(BOOK)
    rows = [bed.seconds(name, ABLATION) for name in ("naive", "zfp", "pipe", "schedule")]
    assert rows == sorted(rows, reverse=True)
    each = bed.step_ms("naive", 13) - bed.step_ms("naive", 12)
    assert each == pytest.approx(
        1e3 * bed.seconds("naive", CT_MOE) + BOOK.constant("schemoe.rest.layer")
    )
    assert bed.all_to_all_ms(24) == pytest.approx(2 * bed.all_to_all_ms(12))
