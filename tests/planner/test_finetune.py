"""Predictions of fine-tunes whose base models are frozen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from moesaic.errors import InputError
from moesaic.planner.answer import SPEED_RATIOS
from moesaic.planner.cluster import Link, read_cluster
from moesaic.planner.finetune import (
    CODED,
    IN_FLIGHT,
    FinetuneJob,
    FinetunePrediction,
    predict_finetune,
)
from moesaic.planner.halves import COST, seconds_in_flight, seconds_in_turn
from moesaic.planner.job import DataShape
from moesaic.planner.presets import read_job
from moesaic.planner.simulator import Simulator
from moesaic.planner.step import StepCostModel
from moesaic.program.compile import compile_plan
from moesaic.program.grid import Grid
from moesaic.program.plan import Plan
from moesaic.shapes import ModelShape

QWEN = read_job("qwen3-30b-a3b").model
GIB = 2**30


def predict(shape: ModelShape = QWEN, **changed: Any) -> FinetunePrediction:
    sizes = {
        "ranks": 4,
        "memory_bytes": 24 * GIB,
        "tokens": 4096,
        "length": 4096,
        "method": "qlora",
        "rank": 8,
    }
    return predict_finetune(shape, **{**sizes, **changed})


def test_frozen_experts_take_four_bits_and_are_spread() -> None:
    experts = 48 * 128 * 3 * 2048 * 768
    assert predict(ranks=1).parts["experts"] == experts * (0.5 + 4 / 64)
    assert predict(ranks=4).parts["experts"] == experts * (0.5 + 4 / 64) / 4
    assert predict(method="lora").parts["experts"] == experts * 2 / 4
    assert (
        predict(method="qlora-double").parts["experts"] == experts * (0.5 + (1 + 4 / 256) / 64) / 4
    )
    # A block's scales are in float32 while it runs, beside a copy of its experts that FSDP2 makes.
    block, plain = (
        predict(method=name, logits=256).parts["a block's activations"]
        for name in ("qlora-double", "qlora")
    )
    smaller = (4 - (1 + 4 / 256)) / 64  # bytes of a weight's share of a scale
    assert block - plain == pytest.approx(experts / 48 / 4 * (1 / 16 - smaller))


def test_adapters_alone_have_gradients_and_states() -> None:
    of_expert = (2048 + 2 * 768) + (768 + 2048)
    of_attention = (2048 + 32 * 128) + (2048 + 4 * 128)
    adapters = 8 * 48 * (128 / 4 * of_expert + of_attention)
    parts = predict().parts
    assert (parts["adapters"], parts["gradients"], parts["optimizer"]) == (
        4 * adapters,
        4 * adapters,
        8 * adapters,
    )


def test_a_large_vocabulary_is_the_peak_unless_logits_are_made_in_parts() -> None:
    assert (
        predict().parts["logits and loss"]
        == 4096 * 151_936 * 12 + 151_936 * 2048 * 2 + 4096 * 2048 * 4
    )
    assert "a block's activations" in predict(logits=256).parts
    assert predict(logits=256).bytes < predict().bytes - 5 * GIB


def test_what_fits_leaves_room_for_the_framework() -> None:
    needed = predict().bytes
    assert predict(memory_bytes=needed).fits is False
    assert predict(memory_bytes=1.05 * needed + GIB).fits
    assert predict(memory_bytes=None).fits is None


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"ranks": 3}, "128 experts do not split over 3 ranks"),
        ({"tokens": 100}, "not whole sequences of length=4096"),
        ({"ranks": 0}, "ranks=0: must be at least 1"),
        ({"shape": ModelShape()}, "give a model's config.json or its folder"),
    ],
)
def test_sizes_that_do_not_fit_each_other_are_refused(
    changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        predict(**changed)


def test_frozen_weights_have_no_gradient_products_and_only_adapters_are_stepped() -> None:
    cluster = read_cluster("4x4090-pcie")
    grid = Grid(world=4, ep=4)
    job = FinetuneJob(batch_size=4, model=QWEN, data=DataShape(vocab_size=151_936))
    frozen = StepCostModel(job.step_model(cluster, 4), grid, Simulator(cluster))
    trained = StepCostModel(
        super(FinetuneJob, job).step_model(cluster, 4), grid, Simulator(cluster)
    )
    saved = trained.around["attention"] - frozen.around["attention"]
    assert saved == pytest.approx(48 * frozen.forward.projections)
    assert trained.around["unembed"] - frozen.around["unembed"] == pytest.approx(
        frozen.forward.output
    )
    adapters = predict().parts["adapters"] / 4
    assert frozen.optimizer_seconds == pytest.approx(adapters * 40 / 850e9)
    assert frozen.optimizer_seconds < trained.optimizer_seconds / 20


FEW = {"ranks": 2, "memory_bytes": None}


def test_splits_of_layers_keep_micro_batches_in_flight_and_one_rank_at_a_time_does_not() -> None:
    found = predict(**FEW, cluster=read_cluster("2x4090-pcie"))
    splits = found.splits
    pipeline = splits["layers, micro-batches"]
    alone = splits["layers, one rank at a time"]
    # 8 micro-batches in 2 stages: 9 turns of a stage instead of 16; the last one also has the
    # output.
    assert pipeline.tokens_per_second / alone.tokens_per_second == pytest.approx(16 / 9, rel=0.02)
    assert found.tokens_per_second == splits["experts"].tokens_per_second
    assert found.tokens_per_second == pytest.approx(SPEED_RATIOS[1] * 2 * 4 * 4096 / found.seconds)
    assert found.interval[0] < found.tokens_per_second < found.interval[1]
    assert splits[found.fastest].tokens_per_second == max(
        each.tokens_per_second for each in splits.values()
    )


def test_slow_ports_bind_and_faster_ports_or_fewer_bits_help() -> None:
    slow = read_cluster("2x1x4090-10gbe")
    found = predict(**FEW, cluster=slow)
    assert found.bottleneck.startswith("nic")
    assert predict(**FEW, cluster=slow.with_links("outside", 2.0)).seconds < 0.8 * found.seconds
    assert predict(**FEW, cluster=slow, codecs=CODED).seconds < 0.9 * found.seconds


def test_a_cluster_of_another_size_is_refused() -> None:
    with pytest.raises(InputError, match="2x4090-pcie has 2 devices, not 4"):
        predict(cluster=read_cluster("2x4090-pcie"))


def test_halves_in_flight_are_ranked_where_rows_are_exchanged_and_sequences_split() -> None:
    cluster = read_cluster("2x2x4090-10gbe")
    sizes = {"ranks": 4, "memory_bytes": None, "length": 1024, "cluster": cluster}
    whole = predict(tokens=1024, **sizes).splits
    assert not any(name.endswith(IN_FLIGHT) for name in whole)
    splits = predict(tokens=8192, logits=256, **sizes).splits
    flying = {name for name, split in splits.items() if split.in_flight == 2}
    assert flying == {"experts" + IN_FLIGHT, "2 stages of 2 ranks" + IN_FLIGHT}
    for name in flying:
        halves = splits[name]
        in_turn = splits[name.removesuffix(IN_FLIGHT)]
        assert (halves.stages, halves.bottleneck) == (in_turn.stages, in_turn.bottleneck)
        assert halves.bytes < in_turn.bytes
    # One half's gradients of experts exist at a time: five widths of the token, four of an expert,
    # and the rank. One width more of the other half is on its way, and the factors are there twice
    # in 16 bits.
    halved = 8192 * 8 * ((5 - 1) * 2048 + 4 * 768 + 8)
    factors = 8 * 128 / 4 * ((2048 + 2 * 768) + (768 + 2048))
    saved = splits["experts"].bytes - splits["experts" + IN_FLIGHT].bytes
    assert saved == pytest.approx(halved - 2 * factors)


def test_halves_in_flight_are_recommended_where_whole_micro_batches_do_not_fit() -> None:
    sizes = {"tokens": 8192, "length": 1024, "logits": 256, "cluster": read_cluster("4x4090-pcie")}
    roomy = predict(**sizes).splits
    halves = roomy["experts" + IN_FLIGHT]
    assert all(each.fits for each in roomy.values())
    # with fragments and what the framework uses, as much as halves need
    tight = predict(**{**sizes, "memory_bytes": 1.05 * halves.bytes + GIB})
    fitting = {name for name, split in tight.splits.items() if split.fits}
    assert "experts" not in fitting
    assert "experts" + IN_FLIGHT in fitting
    assert tight.recommended.in_flight == 2


def test_parts_are_those_of_what_is_in_flight() -> None:
    sizes = {"tokens": 8192, "length": 1024, "cluster": read_cluster("4x4090-pcie")}
    splits = predict(**sizes).splits
    for in_flight, name in ((1, "experts"), (2, "experts" + IN_FLIGHT)):
        found = predict(**sizes, in_flight=in_flight)
        assert found.bytes == splits[name].bytes
        assert found.splits == splits


def test_each_half_has_logits_of_its_own_unless_a_stage_joins_them() -> None:
    sizes = {"ranks": 4, "tokens": 8192, "length": 1024}
    logits = 8192 * 151_936

    def loss(**changed: Any) -> float:
        return predict(**sizes, **changed).parts["logits and loss"]

    assert loss() - loss(in_flight=2) == logits * 4
    staged = {"stages": (2, 4)}
    assert loss(**staged) == loss(**staged, in_flight=2) == loss() + logits * 2


def test_halves_in_flight_gain_what_they_hide_and_no_more() -> None:
    def half_of(gbps: float) -> StepCostModel:
        """Return the cost model of halves on four devices whose ports have a rate."""
        ports = Link(name="port", devices=1, gbps=(gbps,), carries="all")
        cluster = replace(read_cluster("4x4090-pcie"), links=(ports,))
        job = FinetuneJob(
            batch_size=4,
            model=replace(QWEN, seq_len=1024, checkpoint_activations=True),
            data=DataShape(vocab_size=QWEN.vocab),
        )
        grid = Grid(world=4, ep=4)
        return StepCostModel(job.step_model(cluster, 4), grid, Simulator(cluster))

    for gbps in (10.0, 100.0, 1e5):
        half = half_of(gbps)
        compiled = compile_plan(Plan(), half.grid)
        forward, backward = half.simulator.passes(
            compiled.forward, compiled.backward, half.model.layer, half.grid
        )
        in_turn = 2 * seconds_in_turn(half, Plan())
        flying = seconds_in_flight(half, Plan()) / COST
        # messages of one half hide behind what the other computes, but for what is recomputed
        layers = half.model.moe_layers
        waits = forward.seconds - forward.compute_seconds
        waits += backward.seconds - backward.compute_seconds
        assert in_turn - 2 * layers * waits <= flying * (1 + 1e-9)
        assert flying <= in_turn * (1 + 1e-9)
        if gbps == 100.0:
            assert flying < 0.95 * in_turn
        if gbps == 1e5:
            assert flying == pytest.approx(in_turn, rel=0.05)


def test_all_splits_are_corrected_by_published_steps_alike() -> None:
    """Else the ranking would lean to those that are not."""
    found = predict(cluster=read_cluster("4x4090-pcie"))
    shares = [split.interval[0] / split.tokens_per_second for split in found.splits.values()]
    assert len(shares) > 2
    assert shares == pytest.approx([shares[0]] * len(shares))
