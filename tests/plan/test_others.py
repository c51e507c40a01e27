"""Layouts of other systems: Megatron's flags, what they are predicted to reach, and ours in the words of others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from moesaic.cost.cluster_file import read_cluster
from moesaic.cost.simulate import Simulator
from moesaic.cost.step import StepCostModel
from moesaic.errors import InputError
from moesaic.plan.findings import Settings
from moesaic.plan.hub import read_shape
from moesaic.plan.layouts import Pins
from moesaic.plan.model import DataShape, Job
from moesaic.plan.others import EMITTERS, OthersLayout, from_megatron, predict
from moesaic.plan.search import search
from moesaic.program.grid import Grid
from plan.hub_configs import DEEPSEEK_V3, MIXTRAL, QWEN3_30B

H100 = read_cluster("dgx-h100", nodes=4)


def job(table: dict[str, Any], **fields: Any) -> Job:
    shape = read_shape(table, "config.json", seq_len=2048)
    return Job(
        **{"batch_size": 32, "accumulation": 4, "model": shape, "data": DataShape(vocab_size=shape.vocab), **fields}
    )


QWEN = job(QWEN3_30B)


def seconds(layout: OthersLayout, of: Job = QWEN) -> float:
    return predict(of, H100, layout).seconds


def test_megatrons_flags_say_how_a_model_is_split() -> None:
    flags = (
        "--num-layers 48 --tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size=4 "
        "--expert-model-parallel-size 8 --moe-token-dispatcher-type flex --moe-enable-deepep --micro-batch-size 1 "
        "--global-batch-size 512 --recompute-granularity full --overlap-moe-expert-parallel-comm --bf16 "
        "--use-distributed-optimizer"
    )
    assert from_megatron(flags) == OthersLayout(
        tp=2,
        etp=2,
        pp=4,
        ep=8,
        all_to_all="multicast",
        micro_batch=1,
        global_batch=512,
        recompute=True,
        overlapped=True,
    )
    assert from_megatron("--tensor-model-parallel-size 2 --expert-tensor-parallel-size 1").etp == 1


@pytest.mark.parametrize(
    ("flags", "sharded"),
    [
        ("", "none"),
        ("--use-distributed-optimizer", "optimizer"),
        ("--data-parallel-sharding-strategy optim_grads --use-distributed-optimizer", "gradients"),
        ("--use-distributed-optimizer --data-parallel-sharding-strategy optim_grads_params", "parameters"),
        ("--use-distributed-optimizer --data-parallel-sharding-strategy=no_shard", "none"),
    ],
)
def test_megatrons_flags_say_what_lies_in_parts(flags: str, sharded: str) -> None:
    assert from_megatron(f"--expert-model-parallel-size 8 {flags}").sharded == sharded


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--expert-model-parallel-size many", "needs a whole number, got 'many'"),
        ("--expert-model-parallel-size", "needs a whole number, got ''"),
        ("--expert-model-paralel-size 8", "did you mean expert-model-parallel-size?"),
        ("", "no flag of Megatron that splits a model is there, but nothing"),
        (
            "--data-parallel-sharding-strategy half",
            "'half': choose one of no_shard, optim, optim_grads, optim_grads_params",
        ),
        ("--expert-model-parallel-size 0", "ep=0: must be at least 1"),
    ],
)
def test_flags_that_say_nothing_are_one_line(flags: str, words: str) -> None:
    with pytest.raises(InputError) as refusal:
        from_megatron(flags)
    assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (OthersLayout(tp=3), "32 ranks do not split into tp 3"),
        (OthersLayout(ep=8, global_batch=33), "a global batch of 33 does not split over 32 data-parallel groups"),
        (OthersLayout(ep=32, etp=1, pp=1, cp=2, global_batch=5), "does not split over 16 data-parallel groups"),
    ],
)
def test_layouts_that_cannot_be_are_one_line(layout: OthersLayout, words: str) -> None:
    with pytest.raises(InputError, match=words):
        predict(QWEN, H100, layout)


def test_a_pipeline_waits_for_its_ends_and_less_with_more_micro_batches_or_virtual_stages() -> None:
    few = predict(QWEN, H100, OthersLayout(pp=4, ep=8, global_batch=32))
    parts = few.estimate.parts
    busy = few.seconds - parts["pipeline"] - parts.get("parameters", 0.0) - parts["optimizer"]
    assert parts["pipeline"] == pytest.approx(busy * 3 / 4)
    virtual = predict(QWEN, H100, OthersLayout(pp=4, virtual_pp=3, ep=8, global_batch=32)).estimate.parts
    assert virtual["pipeline"] == pytest.approx(parts["pipeline"] / 3)
    many = predict(QWEN, H100, OthersLayout(pp=4, ep=8, global_batch=320)).estimate.parts
    assert many["pipeline"] == pytest.approx(parts["pipeline"])


def test_overlap_recomputation_and_context_parallelism_do_what_they_are_for() -> None:
    plain = OthersLayout(ep=32, global_batch=128)
    assert seconds(replace(plain, overlapped=True)) < seconds(plain) < seconds(replace(plain, recompute=True))
    long = job(QWEN3_30B | {}, batch_size=32)
    whole = predict(long, H100, OthersLayout(ep=8, global_batch=128))
    split = predict(long, H100, OthersLayout(ep=8, cp=4, global_batch=128))
    assert split.memory.activations < 0.5 * whole.memory.activations
    assert split.seconds == pytest.approx(whole.seconds, rel=0.5)


def test_a_distributed_optimizer_keeps_whole_parameters_and_moves_them_once_per_step() -> None:
    once = predict(QWEN, H100, OthersLayout(ep=8, global_batch=320))
    each = predict(QWEN, H100, OthersLayout(ep=8, global_batch=320, sharded="parameters"))
    shape = QWEN.model
    experts = shape.num_layers * 3 * shape.dim * shape.moe.hidden * shape.moe.num_experts
    around = shape.parameters() - experts
    assert once.memory.weights == pytest.approx(2 * (around + experts / 8))
    assert once.memory.gradients == 2 * once.memory.weights
    assert once.memory.optimizer == pytest.approx(12 * (around / 32 + experts / 32))
    assert each.memory.weights < once.memory.weights
    assert once.estimate.limits["gathering parameters"] < 0.1 * each.estimate.limits["gathering parameters"]


def test_runs_of_a_stage_are_given_by_number_or_by_layers() -> None:
    flags = "--pipeline-model-parallel-size 4 --expert-model-parallel-size 8 --num-layers-per-virtual-pipeline-stage"
    by_layers = replace(from_megatron(f"{flags} 4"), global_batch=32)
    assert seconds(by_layers) == seconds(replace(by_layers, virtual_layers=0, virtual_pp=3))
    with pytest.raises(InputError, match="a stage of 12 layers has no whole runs of 5: choose a divisor"):
        seconds(replace(by_layers, virtual_layers=5))


def test_a_further_token_costs_a_block_a_projection_and_an_output() -> None:
    one, two = (predict(QWEN, H100, from_megatron(f"--expert-model-parallel-size 8{more}"))
                for more in ("", " --mtp-num-layers 1"))  # fmt: skip
    shape = QWEN.model
    block = shape.attention + 2 * shape.dim**2 + shape.dim * shape.moe.num_experts
    block += shape.moe.num_experts / 8 * 3 * shape.dim * shape.moe.hidden
    assert two.memory.weights - one.memory.weights == pytest.approx(2 * block)
    assert two.estimate.parts["unembed"] == pytest.approx(2 * one.estimate.parts["unembed"])
    for part in ("moe forward", "moe backward"):
        assert two.estimate.parts[part] == pytest.approx(49 / 48 * one.estimate.parts[part])


def test_what_lies_in_parts_decides_memory_and_what_moves_in_a_step() -> None:
    """Whole parameters of a rank: all but the experts, and an eighth of these. Ten micro-batches."""
    of = {
        name: predict(QWEN, H100, OthersLayout(ep=8, global_batch=320, sharded=name))
        for name in ("none", "optimizer", "gradients")
    }
    shape = QWEN.model
    experts = shape.num_layers * 3 * shape.dim * shape.moe.hidden * shape.moe.num_experts
    around = shape.parameters() - experts
    block = (around - 2 * shape.vocab * shape.dim + experts / 8) / shape.num_layers
    whole, part = around + experts / 8, (around + experts) / 32
    for name, gradients, stepped in (
        ("none", whole, whole),
        ("optimizer", whole, part),
        ("gradients", part + block, part),
    ):
        memory = of[name].memory
        assert memory.weights == pytest.approx(2 * whole)
        assert memory.gradients == pytest.approx(4 * gradients)
        assert memory.optimizer == pytest.approx(12 * stepped)
        assert of[name].estimate.parts["optimizer"] == pytest.approx(stepped * 7 * 4 / 2850e9)
    # Reduced once and gathered once at half the width; both at full width; reduced ten times and gathered once.
    moved = {name: found.estimate.limits["gathering parameters"] for name, found in of.items()}
    assert moved["none"] / moved["optimizer"] == pytest.approx(2 / 1.5)
    assert moved["gradients"] / moved["optimizer"] == pytest.approx(10.5 / 1.5)


def test_sums_of_sequence_parallelism_go_by_rings_whatever_the_switch_adds_up() -> None:
    rings = replace(H100, links=tuple(replace(link, adds=False) for link in H100.links))
    layout = OthersLayout(tp=8, ep=8, global_batch=128)
    split, of_rings = (predict(QWEN, spec, layout).estimate.parts["attention"] for spec in (H100, rings))
    assert split == of_rings
    grid = Grid(world=32, tp=8, ep=8, ranks_per_node=8)
    ours, by_rings = (
        StepCostModel(QWEN.step_model(spec, 4), grid, Simulator(spec)).attention for spec in (H100, rings)
    )
    assert ours < by_rings


def test_every_emitter_says_what_was_found() -> None:
    small = job(MIXTRAL | {"num_hidden_layers": 4, "hidden_size": 1024, "intermediate_size": 2048})
    found = search(small, H100, Settings(pins=Pins(tp=2, ep=8, etp=1)), progress=lambda *_: None).best
    megatron = " ".join(EMITTERS["megatron"](small, found))
    read = from_megatron(megatron)
    assert (read.tp, read.ep, read.etp, read.pp, read.micro_batch, read.global_batch) == (2, 8, 1, 1, 2, 128)
    assert "--num-experts 8 --moe-router-topk 2" in megatron
    titan = " ".join(EMITTERS["torchtitan"](small, found))
    assert "tensor_parallel_degree 2" in titan
    assert "expert_parallel_degree 8" in titan
    assert "--mesh.tp 2 --mesh.ep 8 --mesh.etp 1" in " ".join(EMITTERS["moesaic"](small, found))
    limited = job(DEEPSEEK_V3 | {"num_hidden_layers": 4, "first_k_dense_replace": 1, "hidden_size": 512})
    assert "--moe-router-num-groups 8 --moe-router-group-topk 4" in EMITTERS["megatron"](limited, found)
    with pytest.raises(InputError, match="it has no expert tensor parallelism, the best layout etp 2: pin --etp 1"):
        EMITTERS["torchtitan"](small, replace(found, grid=replace(found.grid, ep=4, etp=2)))
