"""Tutel's layers: parts, breakdown, r."""

from __future__ import annotations

import pytest

from moesaic.plan import Plan
from moesaic_lab.reproduce.records import read_book
from moesaic_lab.reproduce.tutel import (
    RLayer,
    TutelCluster,
    TutelLayer,
    big,
    breakdown,
    cluster,
    single,
    sweep,
    swin_pictures,
)

BOOK = read_book()


def test_the_sweep_has_81_layers_and_cuts_half_experts_in_two() -> None:
    found = list(sweep(16))
    assert len(set(found)) == 81
    assert {(layer.grid.ep, layer.grid.etp, layer.workload.num_experts) for layer in found} == {
        (8, 2, 8), (16, 1, 16), (16, 1, 32)
    }  # fmt: skip


def test_computing_and_moving_of_the_large_layer_are_those_it_was_fitted_to() -> None:
    computing, moving = TutelCluster(BOOK).parts_ms(big(16))
    assert computing == pytest.approx(BOOK.value("tutel.compute.16"), rel=2e-3)
    assert moving == pytest.approx(BOOK.value("tutel.a2a.16"), rel=5e-3)


def test_what_connections_and_the_fabric_cost_are_fields_of_the_cluster() -> None:
    nic = cluster(BOOK, 2048).links[1]
    assert nic.gbps == (BOOK.constant("tutel.nic"),)
    assert nic.fabric == BOOK.constant("tutel.fabric")
    assert nic.connection_gbps == BOOK.constant("tutel.connection")
    assert nic.connection_us == pytest.approx(1e-3 * BOOK.constant("tutel.message"))
    assert cluster(BOOK, 16).host.task_us == BOOK.constant("tutel.issue")


def test_products_message_by_message_are_slower() -> None:
    bed, layer = TutelCluster(BOOK), single(16)
    assert layer.rows_per_message == 1024
    small = TutelLayer(gpus=16, tokens=256, dim=2048, hidden=2048)
    assert bed.seconds(Plan(), layer, flexible=False) > bed.seconds(Plan(), layer)
    assert bed.seconds(Plan(), small, flexible=False) == bed.seconds(Plan(), small), "here the issuing thread decides"
    apart, together = (bed.runs(Plan(), small, flexible=flexible)[0].compute_seconds for flexible in (False, True))
    assert apart > 1.1 * together


def test_every_part_of_the_breakdown_helps() -> None:
    parts = breakdown(TutelCluster(BOOK), 64)
    assert parts.fairseq > parts.kernels >= parts.hier2d > parts.flexible


def test_the_masks_of_fairseq_grow_with_the_square_of_the_tokens() -> None:
    bed = TutelCluster(BOOK)
    one, two = (bed.einsum_seconds(TutelLayer(gpus=16, tokens=tokens, dim=512, hidden=512)) for tokens in (1024, 2048))
    assert two == pytest.approx(4 * one)


def test_weights_travel_where_tokens_are_many_and_tokens_where_weights_are_large() -> None:
    bed = TutelCluster(BOOK)
    many, large = RLayer(tokens=4096, hidden=2048), RLayer(tokens=1024, hidden=32768)
    assert bed.with_r(0, many, 8.0) < bed.with_r(4, many, 8.0)
    assert bed.with_r(4, large, 1.0) < bed.with_r(0, large, 1.0)


def test_pictures_per_second_are_those_the_dense_part_was_fitted_to() -> None:
    bed = TutelCluster(read_book())
    fairseq, tutel = swin_pictures(bed, 8, "train")
    assert tutel == pytest.approx(274.0, rel=1e-3)
    assert fairseq < tutel
    assert swin_pictures(bed, 8, "infer")[1] == pytest.approx(1053.0, rel=1e-3)
