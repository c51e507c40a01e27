"""Tutel's layers: parts, breakdown, r."""

from __future__ import annotations

import pytest

from moesaic.program.plan import Plan
from moesaic_lab.reproduce.records import read_book
from moesaic_lab.reproduce.tutel import (
    BYTES,
    FAIRSEQ_GATE,
    WORLDS,
    TutelCluster,
    TutelLayer,
    big,
    breakdown,
    cluster,
    exchanges,
    gains,
    mapped,
    single,
    sweep,
    swin_pictures,
)

BOOK = read_book()


def test_the_sweep_has_81_layers_and_cuts_half_experts_in_two() -> None:
    found = list(sweep(16))
    assert len(set(found)) == 81
    assert {(layer.grid.ep, layer.grid.etp, layer.workload.num_experts) for layer in found} == {
        (8, 2, 8),
        (16, 1, 16),
        (16, 1, 32),
    }


def test_gains_are_over_the_best_of_all_plans_of_each_layer() -> None:
    times = {("linear", 1): 2.0, ("linear", 8): 4.0, ("hier2d", 1): 3.0, ("hier2d", 8): 1.0}
    assert gains([times]) == pytest.approx({"linear1": 100.0, "hier2d1": 200.0, "worst": 300.0})


@pytest.mark.slow
def test_2dh_pays_for_small_messages_on_any_cluster_and_for_large_ones_on_a_large_one() -> None:
    """What the paper says of its figure 18."""
    found = exchanges(BOOK)
    gain = {
        (gpus, size): found["linear", gpus, size] / found["hier2d", gpus, size]
        for gpus in WORLDS
        for size in BYTES
    }
    assert min(gain[gpus, BYTES[0]] for gpus in WORLDS) > 1
    assert gain[WORLDS[0], BYTES[-1]] < 1 < gain[WORLDS[-1], BYTES[-1]]


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
    bed = TutelCluster(BOOK)
    layer = single(16)
    assert layer.rows_per_message == 1024
    small = TutelLayer(gpus=16, tokens=256, dim=2048, hidden=2048)
    assert bed.seconds(Plan(), layer, flexible=False) > bed.seconds(Plan(), layer)
    assert bed.seconds(Plan(), small, flexible=False) == bed.seconds(Plan(), small), (
        "here the issuing thread decides"
    )
    apart, together = (
        bed.runs(Plan(), small, flexible=flexible)[0].compute_seconds for flexible in (False, True)
    )
    assert apart > 1.1 * together


def test_every_part_of_the_breakdown_helps() -> None:
    parts = breakdown(TutelCluster(BOOK), 64)
    assert parts.fairseq > parts.kernels >= parts.hier2d > parts.flexible


def test_the_masks_of_fairseq_grow_with_the_square_of_the_tokens() -> None:
    bed = TutelCluster(BOOK)
    one, two = (
        bed.einsum_seconds(TutelLayer(gpus=16, tokens=tokens, dim=512, hidden=512))
        for tokens in (1024, 2048)
    )
    assert two == pytest.approx(4 * one)


def test_a_gate_costs_what_its_tokens_and_experts_are_many() -> None:
    """2,048 GPUs have 128 times the experts of 16: a product of half the experts' own operations,
    and passes over it."""
    bed = TutelCluster(BOOK)
    few, many = (bed.gate_seconds(single(gpus)) for gpus in (16, 2048))
    assert many > 50 * few
    product = 3 * 2 * 16384 * 2048 * 4096 / (BOOK.constant("tutel.tflops") * 1e12)
    passes = 16384 * 4096 * (102 + 32 + 86 + 16) / 1.7e12
    assert many == pytest.approx(product + passes)
    assert bed.gate_seconds(single(2048), passes=FAIRSEQ_GATE) > many
    assert bed.gate_seconds(single(2048), trains=False) == pytest.approx(
        product / 3 + 16384 * 4096 * 188 / 1.7e12
    )


def test_no_routing_weight_travels() -> None:
    forward, backward = TutelCluster(BOOK).runs(Plan(all_to_all="hier2d", chunks=2), single(16))
    crossing = {
        span.task.split("@")[0]
        for run in (forward, backward)
        for span in run.timeline.spans
        if "@" in span.task
    }
    assert crossing == {"h.0", "h.1", "z.0", "z.1", "out.0'", "out.1'", "rows.0'", "rows.1'"}


def test_parts_of_a_linear_all_to_all_start_up_once_per_expert() -> None:
    """Of dispatch and combine: a message to each of 248 peers on other nodes, or two parts of two
    messages to each."""
    bed = TutelCluster(BOOK)
    layer = TutelLayer(gpus=256, tokens=4096, dim=1024, hidden=1024)
    one = cluster(BOOK, 256)
    two = cluster(BOOK, 256, None, 2)
    assert [link.message_us for link in two.links] == [2 * link.message_us for link in one.links]
    assert two.links[1].connection_us == 2 * one.links[1].connection_us
    whole, parts = (
        bed.runs(Plan(chunks=chunks), layer)[0].link_seconds["nic out 0"] for chunks in (1, 2)
    )
    start_ups = 248 * (one.links[1].message_us + 248 * one.links[1].connection_us) * 1e-6
    assert parts - whole == pytest.approx(
        2 * 3 * start_ups, rel=1e-3
    )  # dispatch and combine: 1 start-up, then 2 parts of 2


def test_weights_travel_where_tokens_are_many_and_tokens_where_weights_are_large() -> None:
    bed = TutelCluster(BOOK)
    many = mapped(4096, 2048, 8.0)
    large = mapped(1024, 32768)
    tokens = Plan(gather_weights=4)
    weights = Plan(gather_weights=0)
    assert bed.seconds(weights, many) < bed.seconds(tokens, many)
    assert bed.seconds(tokens, large) < bed.seconds(weights, large)


def test_pictures_per_second_are_those_the_dense_part_was_fitted_to() -> None:
    bed = TutelCluster(read_book())
    fairseq, tutel = swin_pictures(bed, 8, "train")
    assert tutel == pytest.approx(274.0, rel=1e-3)
    assert fairseq < tutel
    assert swin_pictures(bed, 8, "infer")[1] == pytest.approx(1053.0, rel=1e-3)
