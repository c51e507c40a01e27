"""Layouts of other systems: Megatron's flags, what they are predicted to reach, and ours in the
words of others."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers import refused
from moesaic.errors import InputError
from moesaic.planner import other_systems
from moesaic.planner.candidates import Pins
from moesaic.planner.cluster import read_cluster
from moesaic.planner.emit import SYSTEMS, from_flags, layout_of, unread_flags
from moesaic.planner.hub import read_shape
from moesaic.planner.job import DataShape, Job
from moesaic.planner.other_systems import (
    OthersLayout,
    best_layout,
    fills_pipeline,
    longer_by_narrow_rate,
    predict,
    without_what_we_lack,
)
from moesaic.planner.presets import read_job
from moesaic.planner.rank_memory import GIB, usable_bytes
from moesaic.planner.search import Settings, search
from moesaic.planner.simulated_plans import PlannedStep
from moesaic.planner.simulator import Simulator
from moesaic.planner.step import LAUNCHES, LayerPass, StepCostModel, reduce_seconds
from moesaic.program.grid import Grid
from planner.hub_configs import DEEPSEEK_V3, MIXTRAL, QWEN3_30B

H100 = read_cluster("dgx-h100", nodes=4)


def job(table: dict[str, Any], **fields: Any) -> Job:
    shape = read_shape(table, "config.json", seq_len=2048)
    return Job(
        **{
            "batch_size": 32,
            "accumulation": 4,
            "model": shape,
            "data": DataShape(vocab_size=shape.vocab),
            **fields,
        }
    )


QWEN = job(QWEN3_30B)


def seconds(layout: OthersLayout, of: Job = QWEN) -> float:
    return predict(of, H100, layout).seconds


def test_what_we_lack_is_told_with_its_share() -> None:
    layout = OthersLayout(ep=16, all_to_all="deepep", overlapped=True, recompute=("moe_act",))
    gains = without_what_we_lack(QWEN, H100, layout)
    assert set(gains) == {"DeepEP", "recomputing parts of blocks"}, "without stages we overlap too"
    linear = OthersLayout(ep=16, overlapped=True, recompute=("moe_act",))
    assert gains["DeepEP"] == seconds(linear) / seconds(layout) > 1
    staged = replace(layout, pp=2, virtual_pp=2, ep=8, recompute=("block",))
    assert set(without_what_we_lack(QWEN, H100, staged)) == {
        "DeepEP",
        "micro-batches in flight with stages",
    }
    assert without_what_we_lack(QWEN, H100, OthersLayout(ep=16, overlapped=True)) == {}


def test_megatrons_flags_say_how_a_model_is_split() -> None:
    flags = (
        "--num-layers 48 --tensor-model-parallel-size 2 --sequence-parallel "
        "--pipeline-model-parallel-size=4 --expert-model-parallel-size 8 "
        "--moe-token-dispatcher-type flex --moe-enable-deepep --micro-batch-size 1 "
        "--global-batch-size 512 --recompute-activations --overlap-moe-expert-parallel-comm "
        "--bf16 --use-distributed-optimizer"
    )
    apart = dict.fromkeys(("hides_parameters", "hides_gradients", "fused_loss"), False)
    assert from_flags(flags) == OthersLayout(
        tp=2,
        etp=2,
        pp=4,
        ep=8,
        all_to_all="deepep",
        global_batch=512,
        recompute=("core_attn",),
        overlapped=True,
        **apart,  # type: ignore[arg-type]
    )
    assert from_flags("--tensor-model-parallel-size 2 --expert-tensor-parallel-size 1").etp == 1
    told = (
        "--use-distributed-optimizer --overlap-param-gather --overlap-grad-reduce "
        "--cross-entropy-loss-fusion"
    )
    assert from_flags(f"--expert-model-parallel-size 8 {told}") == OthersLayout(
        ep=8, sharded="optimizer"
    )


@pytest.mark.parametrize(
    ("flags", "sharded"),
    [
        ("", "none"),
        ("--use-distributed-optimizer", "optimizer"),
        ("--data-parallel-sharding-strategy optim_grads --use-megatron-fsdp", "gradients"),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params", "parameters"),
        ("--use-megatron-fsdp --use-distributed-optimizer", "parameters"),
        ("--use-distributed-optimizer --use-megatron-fsdp", "parameters"),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy=no_shard", "none"),
        ("--data-parallel-sharding-strategy optim_grads_params", "none"),
        ("--use-distributed-optimizer --data-parallel-sharding-strategy no_shard", "optimizer"),
    ],
)
def test_megatrons_flags_say_what_lies_in_parts(flags: str, sharded: str) -> None:
    assert from_flags(f"--expert-model-parallel-size 8 {flags}").sharded == sharded


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--expert-model-parallel-size many", "needs a whole number, got 'many'"),
        ("--expert-model-parallel-size", "needs a whole number, got ''"),
        ("--expert-model-paralel-size 8", "did you mean expert-model-parallel-size?"),
        (
            "",
            (
                "found no flag of Megatron or torchtitan that splits a model, only nothing: "
                "choose one of tensor-model-"
            ),
        ),
        (
            "--foo 3",
            "splits a model, only --foo: choose one of tensor-model-parallel-size, pipeline-model-",
        ),
        (
            "--data-parallel-sharding-strategy half",
            "'half': choose one of no_shard, optim, optim_grads, optim_grads_p",
        ),
        ("--expert-model-parallel-size 0", "ep=0: must be at least 1"),
        (
            "--recompute-modules --bf16",
            "--recompute-modules is empty: name at least one of block, core_attn",
        ),
        (
            "--recompute-activations --recompute-modules attention",
            "recompute='attention': choose from block, core_attn",
        ),
        (
            "--fp8-recipe int8",
            "--fp8-recipe='int8': choose one of delayed, tensorwise, blockwise, mxfp8",
        ),
        ("--parallelism.pipeline_parallel_schedule GPipe", "choose one of 1F1B, Interleaved1F1B"),
        ("--activation_checkpoint.mode memory_budget", "choose one of none, full, selective"),
        ("activation-checkpoint:memory-budget", "choose one of none, full, selective"),
        ("--moe-token-dispatcher-type allgather", "'allgather': choose one of alltoall, flex"),
        (
            "--recompute-granularity full --recompute-method some",
            "'some': choose one of uniform, block",
        ),
        (
            "--recompute-granularity full --recompute-num-layers 0",
            "recompute_layers=0: must be at least 1",
        ),
    ],
)
def test_flags_that_say_nothing_are_one_line(flags: str, words: str) -> None:
    line = refused(from_flags, flags)
    assert words in line
    assert len(line) < 400


def test_sizes_that_are_not_those_of_the_model_are_named() -> None:
    model = QWEN.model
    for flag, same, other in (
        ("--ffn-hidden-size", model.dense_hidden, 9),
        ("--ffn_hidden_size", model.moe.hidden, 9),
        ("--moe-shared-expert-intermediate-size", 0, 512),
        ("--vocab-size", QWEN.data.vocab_size - 200, 9),
        ("--padded-vocab-size", QWEN.data.vocab_size, 2 * QWEN.data.vocab_size),
        ("--moe-layer-freq", 1, 2),
        ("--moe-layer-freq", "[1]*48", "'([0]*3+[1]*45)'"),
        ("--moe-layer-freq", "'([1]*40 + [1]*8)'", "[1]*47"),
    ):
        assert unread_flags(f"{flag} {same}", QWEN) == []
        assert unread_flags(f"{flag} {other}", QWEN) == [flag]
    assert unread_flags("--vocab-size $VOCAB", QWEN) == ["--vocab-size"]


def test_flags_that_may_matter_and_are_not_read_are_named() -> None:
    flags = (
        "--num-layers 48 --seq-length=2048 --hidden-size 2048 --num-experts 128 "
        "--moe-router-topk 8 --swiglu --bf16 --expert-model-parallel-size 8 --sequence-parallel "
        "--decoder-last-pipeline-num-layers 10 --optimizer-cpu-offload "
        "--moe-expert-capacity-factor 1.0 --training.local_batch_size 4 --lr 1e-4"
    )
    assert unread_flags(flags, QWEN) == [
        "--decoder-last-pipeline-num-layers",
        "--optimizer-cpu-offload",
        "--moe-expert-capacity-factor",
    ]
    for system in ("megatron", "torchtitan"):
        assert (
            unread_flags(
                " ".join(
                    SYSTEMS[system].flags(
                        system, QWEN, OthersLayout(ep=8, recompute=("block",)), None
                    )
                ),
                QWEN,
            )
            == []
        )


@pytest.mark.parametrize(
    "flag",
    [
        "--use-torch-fsdp2",
        "--no-rope-fusion",
        "--cuda-graph-impl local",
        "--fp8-param-gather",
        "--optimizer muon",
        "--optimizer",
        "--transformer-impl local",
        "--delay-wgrad-compute",
        "--foo",
        "--moe_pad_expert_input_to_capacity",
        "--moe-shared-expert-overlap",
        "--hidden-dropout 0.1",
        "--attention-backend unfused",
        "--fim-data",
        "--compile.enable",
        "--moe-token-dispatcher-types alltoall",
    ],
)
def test_a_flag_that_nobody_called_harmless_is_named_once(flag: str) -> None:
    flags = f"--expert-model-parallel-size 8 {flag} --lr 1e-4 {flag} --optimizer_ adam"
    assert unread_flags(flags, QWEN) == [flag.split()[0], "--optimizer_"]


@pytest.mark.parametrize(
    "flag",
    [
        "--bf16 false",
        "--sequence-parallel=False",
        "--use_flash_attn no",
        "--moe-grouped-gemm=0",
        "--moe-permute-fusion off",
        "--no-sequence-parallel",
        "--num-attention-heads $HEADS",
    ],
)
def test_a_flag_that_takes_back_what_is_assumed_is_named(flag: str) -> None:
    name = flag.replace("=", " ").split()[0]
    assert unread_flags(f"--expert-model-parallel-size 8 {flag}", QWEN) == [name]


def test_variables_that_change_what_libraries_do_are_named() -> None:
    flags = (
        "CUDA_DEVICE_MAX_CONNECTIONS=1 NVTE_FLASH_ATTN=0 TP=2 NCCL_ALGO=Ring torchrun train.py "
        "--expert-model-parallel-size 8 --swiglu"
    )
    assert unread_flags(flags, QWEN) == ["NVTE_FLASH_ATTN=0", "NCCL_ALGO=Ring"]
    assert from_flags(flags).ep == 8


def test_flags_that_say_what_is_assumed_are_not_named() -> None:
    flags = (
        "--expert-model-parallel-size=8 --optimizer adam --transformer-impl=transformer_engine "
        "--attention-backend flash --hidden-dropout 0.0 --parallelism.data_parallel_shard_degree "
        "-1 --save-interval 100 --data_path 0.3 a 0.7 b --no-masked-softmax-fusion "
        "--attention-softmax-in-fp32"
    )
    assert unread_flags(flags, QWEN) == []


def test_a_degree_of_sharding_is_that_of_the_ranks_or_refused() -> None:
    split = (
        "--parallelism.expert_parallel_degree 8 --parallelism.tensor_parallel_degree 2 "
        "--parallelism.data_parallel_replicate_degree 2 --parallelism.data_parallel_shard_degree"
    )
    assert unread_flags(f"{split} 8", QWEN) == []
    assert from_flags(f"{split} -1").shards == 0
    assert seconds(from_flags(f"{split} 8")) == seconds(from_flags(f"{split} -1"))
    with pytest.raises(
        InputError, match=r"shard_degree 16: tp, cp and pp leave 16 of 32 .*: give 8, or -1"
    ):
        seconds(from_flags(f"{split} 16"))


@pytest.mark.parametrize(
    "flags",
    [
        "--cuda-graph-impl full_iteration --te-rng-tracker",
        "--cuda-graph-impl local --cuda-graph-scope full_iteration",
        "--cuda_graph_scope=full_iteration",
    ],
)
def test_flags_that_make_a_step_one_graph_leave_no_launches(flags: str) -> None:
    split = "--expert-model-parallel-size 8"
    layout = from_flags(f"{split} {flags}")
    assert layout == replace(from_flags(split), graphs=True)
    assert unread_flags(f"{split} {flags}", QWEN) == []
    cluster = read_cluster("dgx-h100", nodes=1)
    with_launches = predict(QWEN, cluster, replace(layout, graphs=False)).estimate.parts
    without = predict(QWEN, cluster, layout).estimate.parts
    assert without == {
        part: seconds for part, seconds in with_launches.items() if part != "launches"
    }
    assert with_launches["launches"] > 0
    assert from_flags(" ".join(SYSTEMS["megatron"].flags("megatron", QWEN, layout, None))).graphs


def test_graphs_of_parts_of_a_layer_are_named_and_not_read() -> None:
    flags = "--expert-model-parallel-size 8 --cuda-graph-impl local --cuda-graph-scope attn mlp"
    assert not from_flags(flags).graphs
    assert unread_flags(flags, QWEN) == ["--cuda-graph-impl", "--cuda-graph-scope"]
    assert unread_flags("--expert-model-parallel-size 8 --cuda-graph-impl none", QWEN) == []


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (
            "--recompute-activations --recompute-modules moe_act layernorm # note",
            ("moe_act", "layernorm"),
        ),
        (
            "# all\n--recompute-activations --recompute-modules moe_act # "
            "--tensor-model-parallel-size 4\n",
            ("moe_act",),
        ),
        (
            "--recompute-activations --recompute-modules moe_act \\\n layernorm #",
            ("moe_act", "layernorm"),
        ),
        (
            "--data-path 'a #b' --wandb-project a#b --recompute-activations "
            "--recompute-modules moe_act",
            ("moe_act",),
        ),
        (
            "#--recompute-granularity full\n--recompute-activations --recompute-modules moe_act",
            ("moe_act",),
        ),
    ],
)
def test_what_follows_a_hash_is_a_comment(flags: str, parts: tuple[str, ...]) -> None:
    read = from_flags(f"--expert-model-parallel-size 8 {flags}")
    assert (read.ep, read.tp, read.recompute) == (8, 1, parts)
    assert unread_flags(flags, QWEN) == []


def test_a_comment_ends_with_its_line_even_behind_a_backslash() -> None:
    flags = "--tensor-model-parallel-size 2 \\\n# --bf16 \\\n--expert-model-parallel-size 8 \\\n"
    read = from_flags(flags)
    assert (read.tp, read.ep) == (2, 8)


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (("--recompute-granularity selective", "--recompute-modules moe_act"), ("moe_act",)),
        (("--recompute-activations", "--recompute-modules moe_act"), ("moe_act",)),
        (("--recompute-granularity full", "--recompute-modules moe_act"), ("block",)),
        (("--recompute-granularity full", "--recompute-activations"), ("core_attn",)),
    ],
)
def test_the_order_of_flags_changes_nothing(flags: tuple[str, str], parts: tuple[str]) -> None:
    split = "--expert-model-parallel-size 8"
    for given in (flags, flags[::-1]):
        assert from_flags(" ".join((split, *given))).recompute == parts


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("-tensor-model-parallel-size 4", "is no flag: write two hyphens, --tensor-model-parallel"),
        ("--bf16 \u2013context-parallel-size 2", "write two hyphens, --context-parallel-size"),
        ("\u2014\u2014micro_batch_size 2", "write two hyphens, --micro-batch-size"),
        ("--overlap-grad-reduce false", "--overlap-grad-reduce takes no value, got 'false'"),
        ("--use-distributed-optimizer $MORE", "takes no value, got '$MORE'"),
        ("--micro-batch-size 1 2", "--micro-batch-size takes one value, got '1', '2'"),
        ("--fp8-format none", "--fp8-format='none': choose one of e4m3, hybrid"),
        (
            "--num-virtual-stages-per-pipeline-rank 2 --num-layers-per-virtual-pipeline-stage 2",
            "say the same in two ways: give one",
        ),
    ],
)
def test_a_word_that_nobody_would_read_is_one_line(flags: str, words: str) -> None:
    assert words in refused(from_flags, f"--expert-model-parallel-size 8 {flags}")


@pytest.mark.parametrize(
    "words",
    [
        "--bf16 tensor-model-parallel-size 4",
        "--bf16 tensor_model_parallel_size: 4",
        "--swiglu ++model.tensor_model_parallel_size=4",
        "--bf16 \\ --tensor-model-parallel-size 4",
        "--bf16 -tensor_model_parallel_size=4",
    ],
)
def test_a_setting_that_lacks_its_hyphens_is_one_line(words: str) -> None:
    assert "write two hyphens, --tensor-model-parallel-size" in refused(
        from_flags, f"--expert-model-parallel-size 8 {words}"
    )
    assert "write two hyphens" in refused(from_flags, f"{words} --expert-model-parallel-size 8")


@pytest.mark.parametrize(
    ("flags", "unread"),
    [
        ("--fp8-recipe mxfp8", ["--fp8-recipe"]),
        ("--recompute-num-layers 4", ["--recompute-num-layers"]),
        ("--recompute-modules moe_act", ["--recompute-modules"]),
        ("--recompute-activations --recompute-granularity full", ["--recompute-granularity"]),
        (
            "--overlap-moe-expert-parallel-comm --recompute-granularity full",
            ["--overlap-moe-expert-parallel-comm"],
        ),
        ("--moe-enable-deepep", ["--moe-enable-deepep"]),
        ("--moe-enable-deepep --moe-token-dispatcher-type flex", []),
        ("--data-parallel-sharding-strategy optim", ["--data-parallel-sharding-strategy"]),
        ("--data-parallel-sharding-strategy optim --use-megatron-fsdp", []),
        ("--use-distributed-optimizer --overlap-param-gather", []),
        (
            "--overlap-param-gather --num-distributed-optimizer-instances 2",
            ["--overlap-param-gather", "--num-distributed-optimizer-instances"],
        ),
        (
            "--num-virtual-stages-per-pipeline-rank 2 --enable-zero-bubble",
            ["--num-virtual-stages-per-pipeline-rank", "--enable-zero-bubble"],
        ),
        (
            "--pipeline-model-parallel-size 1 --num-layers-per-virtual-pipeline-stage 2",
            ["--num-layers-per-virtual-pipeline-stage"],
        ),
        ("--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2", []),
        (
            "--recompute-granularity selective --recompute-method block --recompute_num_layers 4",
            ["--recompute-method", "--recompute_num_layers"],
        ),
        (
            "--recompute-granularity full --recompute-modules moe_act --recompute-num-layers 2",
            ["--recompute-modules"],
        ),
        ("--moe-enable-deepep --moe-token-dispatcher-type alltoall", ["--moe-enable-deepep"]),
        ("--fp8-format e4m3 --fp8-recipe mxfp8", []),
        ("--seq-length 2048 4096", ["--seq-length"]),
        ("--vocab-size 151936 9", ["--vocab-size"]),
        ("--cp-comm-type p2p a2a", ["--cp-comm-type"]),
        ("--bf16 = false", ["--bf16"]),
        ("--job.config_file llama.toml", ["--job.config_file"]),
        ("--swiglu $MODEL_ARGS --lr 1 ${DATA_ARGS}", ["$MODEL_ARGS", "${DATA_ARGS}"]),
    ],
)
def test_a_flag_that_has_no_effect_beside_the_others_is_named(
    flags: str, unread: list[str]
) -> None:
    split = "--expert-model-parallel-size 8"
    assert unread_flags(f"{split} {flags}", QWEN) == unread
    if all(word[0] == "-" for word in unread):
        words = [f"--{each}" for each in flags.split("--")[1:]]
        used = " ".join(each for each in words if each.split()[0].split("=")[0] not in unread)
        assert from_flags(f"{split} {flags}") == from_flags(f"{split} {used}")


def test_torchs_interleaved_schedules_have_two_runs_on_a_rank() -> None:
    stages = (
        "--parallelism.pipeline_parallel_degree 2 --training.global_batch_size 64 "
        "--parallelism.expert_parallel_degree 8 --parallelism.pipeline_parallel_schedule"
    )
    for name, schedule, runs in (
        ("1F1B", "1f1b", 1),
        ("Interleaved1F1B", "1f1b", 2),
        ("InterleavedZeroBubble", "zb-h1", 2),
        ("ZBVZeroBubble", "zb-v", 1),
    ):
        layout = from_flags(f"{stages} {name}")
        assert (layout.schedule, layout.virtual_pp) == (schedule, runs)
        flags = SYSTEMS["torchtitan"].flags("torchtitan", QWEN, layout)
        assert from_flags(" ".join(flags)) == layout
    of_one = stages.replace("degree 2", "degree 1")
    assert from_flags(f"{of_one} Interleaved1F1B").virtual_pp == 1
    assert unread_flags(f"{of_one} Interleaved1F1B", QWEN) == [
        "--parallelism.pipeline_parallel_schedule"
    ]


def test_a_recipe_without_a_format_leaves_products_in_bf16() -> None:
    split = "--expert-model-parallel-size 8"
    assert from_flags(f"{split} --fp8-recipe mxfp8").precision == "bf16"
    for both in ("--fp8-recipe mxfp8 --fp8-format e4m3", "--fp8-format e4m3 --fp8-recipe mxfp8"):
        assert from_flags(f"{split} {both}").precision == "mxfp8"


def test_flags_of_another_attention_or_router_are_named() -> None:
    latent = (
        "--multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 "
        "--qk-pos-emb-head-dim 64 --v-head-dim 128 --moe-router-num-groups 8 "
        "--moe-router-group-topk 4"
    )
    grouped = "--num-query-groups 4 --kv-channels 128"
    same = "--swiglu --untie-embeddings-and-output-weights"
    deepseek = job(DEEPSEEK_V3)
    assert unread_flags(f"{latent} {same} --kv-channels 128", deepseek) == []
    assert unread_flags(f"{grouped} {same}", QWEN) == []
    assert unread_flags(latent, QWEN) == [word for word in latent.split() if word[0] == "-"]
    for flag in (
        "--num-query-groups 8",
        "--kv-channels 64",
        "--attention-output-gate",
        "--swiglu false",
    ):
        assert unread_flags(f"--expert-model-parallel-size 8 {flag}", QWEN) == [flag.split()[0]]
    demo = read_job("demo")
    assert unread_flags(f"--num-query-groups {demo.model.kv_heads}", demo) == []
    assert unread_flags("--num-query-groups 99", demo) == ["--num-query-groups"]


def test_flags_of_two_systems_for_one_choice_are_one_line() -> None:
    words = "--parallelism.tensor_parallel_degree 2 --tensor-model-parallel-size 4"
    assert "say the same: give the flags of one system" in refused(from_flags, words)


def test_torchtitans_defaults_and_spellings_are_read() -> None:
    layout = from_flags(
        "--parallelism.expert_parallel_degree 8 --training.global_batch_size -1 "
        "activation_checkpoint:full"
    )
    assert (layout.global_batch, layout.recompute) == (0, ("block",))


def test_lists_and_sizes_that_only_a_shell_knows_are_named() -> None:
    flags = (
        "--expert-model-parallel-size 8 --swiglu ${MOE_ARGS[@]} --num-layers $LAYERS -u x \u2013f"
    )
    assert unread_flags(flags, QWEN) == ["${MOE_ARGS[@]}", "--num-layers", "-u", "\u2013f"]


def test_lines_may_end_as_on_windows() -> None:
    flags = "--recompute-granularity selective \\\r\n --recompute-modules moe_act \\\r\n --bf16\r\n"
    assert from_flags(flags).recompute == ("moe_act",)


FULL = "--expert-model-parallel-size 8 --micro-batch-size 2 --recompute-granularity full"


def test_blocks_that_are_not_recomputed_take_memory_and_no_second_forward_pass() -> None:
    def step(flags: str) -> PlannedStep:
        return predict(QWEN, H100, from_flags(f"--use-distributed-optimizer {flags}"))

    none = step("--expert-model-parallel-size 8 --micro-batch-size 2")
    whole = step(f"{FULL} --recompute-method uniform --recompute-num-layers 1")
    some = [
        step(f"{FULL} --recompute-method block --recompute-num-layers {count}")
        for count in (4, 24, 48, 60)
    ]
    seconds = [none.seconds, *(each.seconds for each in some)]
    activations = [each.memory.activations for each in some]
    assert seconds == sorted(seconds)
    assert activations == sorted(activations, reverse=True)
    assert some[2] == some[3] == whole == step(FULL)
    # A twelfth of the blocks costs a twelfth of the second forward pass, and saves a twelfth of
    # what blocks keep.
    assert some[0].seconds - none.seconds == pytest.approx(
        (whole.seconds - none.seconds) / 12, rel=0.02
    )
    assert none.memory.activations > some[0].memory.activations > 0.9 * none.memory.activations


def test_the_first_blocks_of_every_run_are_recomputed() -> None:
    flags = (
        f"{FULL} --pipeline-model-parallel-size 4 --global-batch-size 64 --recompute-method block"
    )
    runs = " --num-virtual-stages-per-pipeline-rank 2"
    assert (
        predict(
            QWEN, H100, from_flags(f"{flags} --recompute-num-layers 6{runs}")
        ).memory.activations
        == predict(
            QWEN, H100, from_flags(f"{flags} --recompute-num-layers 99{runs}")
        ).memory.activations
    )
    assert (
        predict(QWEN, H100, from_flags(f"{flags} --recompute-num-layers 6")).memory.activations
        > predict(QWEN, H100, from_flags(f"{flags} --recompute-num-layers 12")).memory.activations
    )


def test_blocks_recomputed_together_keep_fewer_inputs_and_more_at_once() -> None:
    def activations(count: int) -> float:
        return predict(
            QWEN, H100, from_flags(f"{FULL} --recompute-num-layers {count}")
        ).memory.activations

    each = activations(1)
    four = activations(4)
    row = 2 * QWEN.model.seq_len * QWEN.model.dim * 2
    block = each - 48 * row
    assert four == pytest.approx(12 * row + 4 * block)


@pytest.mark.parametrize("system", ["torchtitan", "automodel", "moesaic"])
def test_a_system_that_recomputes_all_blocks_or_none_says_so(system: str) -> None:
    layout = from_flags(f"{FULL} --recompute-method block --recompute-num-layers 4")
    layout = replace(layout, sharded="parameters")
    assert "does not support recompute_method='block'" in refused(
        SYSTEMS[system].flags, system, QWEN, layout
    )
    assert from_flags(" ".join(SYSTEMS["megatron"].flags("megatron", QWEN, layout))) == layout


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            "--seq-length 8192",
            "--seq-length 8192, but the planned model has 2048: make them agree (--seq-len)",
        ),
        ("--training.seq_len=4096", "--training.seq_len 4096, but the planned model has 2048"),
        ("--num-layers 32", "--num-layers 32, but the planned model has 48: make them agree"),
    ],
)
def test_flags_of_another_model_or_other_sequences_are_one_line(flags: str, words: str) -> None:
    assert words in refused(unread_flags, f"{flags} --expert-model-parallel-size 8", QWEN)


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (OthersLayout(tp=3), "32 ranks do not split into tp 3"),
        (
            OthersLayout(ep=8, global_batch=33),
            "a global batch of 33 does not split over 32 data-parallel groups",
        ),
        (
            OthersLayout(ep=32, etp=1, pp=1, cp=2, global_batch=5),
            "does not split over 16 data-parallel groups",
        ),
    ],
)
def test_layouts_that_cannot_be_are_one_line(layout: OthersLayout, words: str) -> None:
    with pytest.raises(InputError, match=words):
        predict(QWEN, H100, layout)


def test_a_pipeline_waits_for_its_ends_and_less_with_more_micro_batches_or_virtual_stages() -> None:
    alike = job({**QWEN3_30B, "vocab_size": 8})
    few = predict(alike, H100, OthersLayout(pp=4, ep=8, global_batch=32))
    parts = few.estimate.parts
    busy = few.seconds - parts["pipeline"] - parts.get("parameters", 0.0) - parts["optimizer"]
    hops = parts["pipeline"] - busy * 3 / 4
    assert 0 < hops < 0.05 * busy
    virtual = predict(
        alike, H100, OthersLayout(pp=4, virtual_pp=3, ep=8, global_batch=32)
    ).estimate.parts
    assert virtual["pipeline"] == pytest.approx(parts["pipeline"] / 3, rel=0.15)
    many = predict(alike, H100, OthersLayout(pp=4, ep=8, global_batch=320)).estimate.parts
    assert many["pipeline"] == pytest.approx(parts["pipeline"])


def test_the_stage_with_the_output_keeps_a_pipeline_waiting() -> None:
    """All micro-batches pass the slowest stage one after the other; the others fill and drain the
    pipeline."""
    layout = OthersLayout(pp=4, ep=8, global_batch=320)
    found = predict(QWEN, H100, layout)
    bare = predict(job({**QWEN3_30B, "vocab_size": 8}), H100, layout)
    output = found.estimate.parts["unembed"]
    assert found.seconds - bare.seconds == pytest.approx(output * (1 + 3 / 40 / 4), rel=0.02)


def test_stages_of_unlike_length_take_their_own_time() -> None:
    """Nine layers on four stages are three, two, two and two: the first sets the pace, the others
    pass on sooner."""

    def found(layers: int, batch: int) -> PlannedStep:
        of = job({**QWEN3_30B, "vocab_size": 8, "num_hidden_layers": layers})
        return predict(of, H100, OthersLayout(pp=4, ep=8, global_batch=batch))

    many = found(9, 3200).estimate.parts
    assert 0 < many["pipeline"] < 0.01 * sum(many.values())
    assert found(8, 32).seconds < found(9, 32).seconds < 0.93 * found(12, 32).seconds


def test_keys_and_values_of_a_shared_sequence_hide_behind_its_scores_as_far_as_these_last() -> None:
    long = replace(QWEN, model=replace(QWEN.model, seq_len=65536))
    slow = H100.with_links("outside", 1e-3).with_links("inside", 1e-3)
    layout = OthersLayout(cp=8, ep=1, global_batch=128)
    for of, cluster, hidden in ((long, H100, True), (QWEN, slow, False)):
        step = replace(of.step_model(cluster, 32), sharded="optimizer")
        step = replace(
            step,
            layer=replace(step.layer, tokens=step.layer.tokens // 8),
            seq_len=step.seq_len // 8,
        )
        grid = Grid(world=32, ranks_per_node=8)
        alone, shared = (
            StepCostModel(
                replace(step, shares_sequence=ranks), grid, Simulator(cluster)
            ).forward.scores
            for ranks in (1, 8)
        )
        values = 2 * 4 * 128 * step.layer.tokens * 2
        passing = reduce_seconds(cluster, grid, 8 * values, 1, 8) / 2
        assert shared == pytest.approx(max(alone, passing))
        assert (shared == alone) == hidden
    assert (
        predict(QWEN, slow, layout).seconds > predict(QWEN, slow, replace(layout, cp=1)).seconds / 8
    )


def test_a_distributed_optimizer_keeps_whole_parameters_and_moves_them_once_per_step() -> None:
    once = predict(QWEN, H100, OthersLayout(ep=8, global_batch=320))
    each = predict(QWEN, H100, OthersLayout(ep=8, global_batch=320, sharded="parameters"))
    shape = QWEN.model
    experts = shape.num_layers * 3 * shape.dim * shape.moe.hidden * shape.moe.num_experts
    around = QWEN.parameters(H100)[0] - experts
    assert once.memory.weights == pytest.approx(2 * (around + experts / 8))
    assert once.memory.gradients == 2 * once.memory.weights
    assert once.memory.optimizer == pytest.approx(12 * (around / 32 + experts / 32))
    assert each.memory.weights < once.memory.weights
    assert (
        once.estimate.limits["gathering parameters"]
        < 0.1 * each.estimate.limits["gathering parameters"]
    )


def test_runs_of_a_stage_are_given_by_number_or_by_layers() -> None:
    flags = (
        "--pipeline-model-parallel-size 4 --expert-model-parallel-size 8 "
        "--num-layers-per-virtual-pipeline-stage"
    )
    by_layers = replace(from_flags(f"{flags} 4"), global_batch=32)
    assert seconds(by_layers) == seconds(replace(by_layers, virtual_layers=0, virtual_pp=3))
    with pytest.raises(
        InputError, match="a stage of 12 layers does not split into runs of 5: choose a divisor"
    ):
        seconds(replace(by_layers, virtual_layers=5))


def test_a_further_token_costs_a_block_a_projection_and_an_output() -> None:
    one, two = (
        predict(QWEN, H100, from_flags(f"--expert-model-parallel-size 8{more}"))
        for more in ("", " --mtp-num-layers 1")
    )
    shape = QWEN.model
    block = (
        shape.attention["attention_parameters"]
        + 2 * shape.dim**2
        + shape.dim * shape.moe.num_experts
    )
    block += shape.moe.num_experts / 8 * 3 * shape.dim * shape.moe.hidden
    assert two.memory.weights - one.memory.weights == pytest.approx(2 * block)
    assert two.estimate.parts["unembed"] == pytest.approx(2 * one.estimate.parts["unembed"])
    for part in ("moe forward", "moe backward"):
        assert two.estimate.parts[part] == pytest.approx(49 / 48 * one.estimate.parts[part])


def test_what_lies_in_parts_decides_memory_and_what_moves_in_a_step() -> None:
    """Whole parameters of a rank: all but the experts, and an eighth of these. Ten
    micro-batches."""
    of = {
        name: predict(QWEN, H100, OthersLayout(ep=8, global_batch=320, sharded=name))
        for name in ("none", "optimizer", "gradients")
    }
    shape = QWEN.model
    experts = shape.num_layers * 3 * shape.dim * shape.moe.hidden * shape.moe.num_experts
    around = QWEN.parameters(H100)[0] - experts
    block = (around - 2 * shape.vocab * shape.dim + experts / 8) / shape.num_layers
    whole = around + experts / 8
    part = (around + experts) / 32
    for name, gradients, stepped in (
        ("none", whole, whole),
        ("optimizer", whole, part),
        ("gradients", part + block, part),
    ):
        memory = of[name].memory
        assert memory.weights == pytest.approx(2 * whole)
        assert memory.gradients == pytest.approx(4 * gradients)
        assert memory.optimizer == pytest.approx(12 * stepped)
        # Ten times four bytes and a copy from four bytes to two of what is stepped; four times four
        # of whole gradients.
        passes = stepped * (10 * 4 + 6) + whole * 4 * 4
        assert of[name].estimate.parts["optimizer"] == pytest.approx(passes / 2850e9)
    # Reduced once and gathered once at half the width; both at full width; reduced ten times and
    # gathered once.
    moved = {name: found.estimate.limits["gathering parameters"] for name, found in of.items()}
    assert moved["none"] / moved["optimizer"] == pytest.approx(2 / 1.5)
    assert moved["gradients"] / moved["optimizer"] == pytest.approx(10.5 / 1.5)


def test_what_hides_behind_computing_takes_no_time_of_its_own() -> None:
    """On one node both hide; gradients of four bytes take twice as long as parameters of two."""
    layout = OthersLayout(ep=8, global_batch=320)
    node = read_cluster("dgx-h100", nodes=1)
    hidden = predict(QWEN, node, layout).estimate
    apart = [
        predict(QWEN, node, replace(layout, **{name: False})).estimate
        for name in ("hides_parameters", "hides_gradients")
    ]
    assert "parameters" not in hidden.parts
    gathered, reduced = (found.parts["parameters"] for found in apart)
    assert reduced == pytest.approx(2 * gathered)
    assert gathered + reduced == pytest.approx(hidden.limits["gathering parameters"])
    assert [found.seconds - hidden.seconds for found in apart] == pytest.approx([gathered, reduced])


def test_a_loss_that_is_not_fused_goes_over_float32_copies_of_the_logits() -> None:
    layout = OthersLayout(ep=8, global_batch=320)
    fused, apart = (
        predict(QWEN, H100, replace(layout, fused_loss=each)).estimate.parts
        for each in (True, False)
    )
    logits = 10 * 2048 * QWEN.model.vocab
    assert apart["unembed"] - fused["unembed"] == pytest.approx(logits * (52 - 10) / 2850e9)


def test_a_loss_in_eager_pytorch_goes_over_a_float32_copy_of_the_logits() -> None:
    fused, apart = (
        predict(QWEN, H100, replace(OthersLayout(ep=8), stepwise=each)).estimate.parts
        for each in ((), ("loss",))
    )
    assert apart["unembed"] - fused["unembed"] == pytest.approx(
        2048 * QWEN.model.vocab * (36 - 10) / 2850e9
    )


def test_kernels_of_attention_and_what_runs_step_by_step_are_part_of_a_layout() -> None:
    """The last bias moves 28 bytes more per value of a copy forward, and 40 back."""
    usual = OthersLayout(ep=8)
    other = OthersLayout(ep=8, stepwise=("last_bias",), score_kernel="flash2")
    fast, slow = (predict(QWEN, H100, each).estimate.parts for each in (usual, other))
    assert slow["small kernels"] == pytest.approx(48 * 2048 * 8 * 2048 * 68 / 2850e9)
    scores = 3 * 48 * 2048 * 2 * 2 * 32 * 128 * 1024 / 778e12
    assert slow["attention"] - fast["attention"] == pytest.approx(scores * (1 / 0.31 - 1 / 0.531))
    assert "layout: stepwise='dropout': choose from norms" in refused(
        OthersLayout, stepwise=("dropout",)
    )


def test_norms_and_rotations_of_queries_and_keys_read_and_write_them() -> None:
    """Qwen3 norms and rotates 32 + 4 heads of 128; without norms half of that is left."""
    plain = job(QWEN3_30B | {"use_qk_norm": False})
    normed, less = (
        predict(of, H100, OthersLayout(ep=8)).estimate.parts["attention"] for of in (QWEN, plain)
    )
    moved = 3 * 48 * 2048 * 2 * (32 + 4) * 128 * 2
    assert normed - less == pytest.approx(moved / 2850e9)


def test_narrow_products_keep_two_copies_of_weights_and_less_of_what_they_read() -> None:
    """Beside bfloat16 weights a byte by rows and one by columns; of normed inputs, experts' rows
    and results of activations one byte in place of two."""
    layout = OthersLayout(ep=8, micro_batch=2, global_batch=320)
    b200 = read_cluster("dgx-b200", nodes=4)
    wide, fp8, mxfp8 = (
        predict(QWEN, b200, replace(layout, precision=each)).memory
        for each in ("bf16", "fp8", "mxfp8")
    )
    shape = QWEN.model
    router = shape.num_layers * shape.dim * shape.moe.num_experts
    experts = shape.num_layers * 3 * shape.dim * shape.moe.hidden * shape.moe.num_experts
    multiplied = QWEN.parameters(H100)[0] - experts * 7 / 8 - 2 * shape.vocab * shape.dim - router
    assert fp8.weights - wide.weights == pytest.approx(2 * multiplied)
    assert mxfp8.weights - wide.weights == pytest.approx(2 * multiplied * (1 + 1 / 32))
    tokens = 2 * 2048
    copies = 2 * 2048 * shape.moe.top_k
    read = shape.num_layers * (tokens * shape.dim + copies * (shape.dim + shape.moe.hidden))
    assert wide.activations - fp8.activations == pytest.approx(read)
    assert (fp8.gradients, fp8.optimizer) == (wide.gradients, wide.optimizer)


def test_sums_of_sequence_parallelism_go_by_rings_whatever_the_switch_adds_up() -> None:
    rings = replace(H100, links=tuple(replace(link, adds=False) for link in H100.links))
    layout = OthersLayout(tp=8, ep=8, global_batch=128)
    split, of_rings = (
        predict(QWEN, spec, layout).estimate.parts["attention"] for spec in (H100, rings)
    )
    assert split == of_rings
    grid = Grid(world=32, tp=8, ep=8, ranks_per_node=8)
    ours, by_rings = (
        StepCostModel(QWEN.step_model(spec, 4), grid, Simulator(spec)).forward.attention
        for spec in (H100, rings)
    )
    assert ours < by_rings


def test_every_emitter_says_what_was_found() -> None:
    small = job(MIXTRAL | {"num_hidden_layers": 4, "hidden_size": 1024, "intermediate_size": 2048})
    found = search(
        small, H100, Settings(pins=Pins(tp=2, ep=8, etp=1)), progress=lambda *_: None
    ).best
    megatron = " ".join(
        SYSTEMS["megatron"].flags("megatron", small, layout_of(small, found), found)
    )
    read = from_flags(megatron)
    assert (read.tp, read.ep, read.etp, read.pp, read.micro_batch, read.global_batch) == (
        2,
        8,
        1,
        1,
        2,
        128,
    )
    assert "--num-experts 8 --moe-router-topk 2" in megatron
    titan = " ".join(
        SYSTEMS["torchtitan"].flags("torchtitan", small, layout_of(small, found), found)
    )
    assert "tensor_parallel_degree 2" in titan
    assert "expert_parallel_degree 8" in titan
    assert "--mesh.tp 2 --mesh.ep 8 --mesh.etp 1" in " ".join(
        SYSTEMS["moesaic"].flags("moesaic", small, layout_of(small, found), found)
    )
    limited = job(
        DEEPSEEK_V3 | {"num_hidden_layers": 4, "first_k_dense_replace": 1, "hidden_size": 512}
    )
    assert "--moe-router-num-groups 8 --moe-router-group-topk 4" in SYSTEMS["megatron"].flags(
        "megatron", limited, layout_of(limited, found), found
    )
    with pytest.raises(
        InputError, match=r"torchtitan 0\.3\.0 does not support etp=2: choose 1, or another system"
    ):
        SYSTEMS["torchtitan"].flags("torchtitan", small, OthersLayout(ep=4, etp=2))


@pytest.mark.parametrize("sharded", ["gradients", "parameters"])
def test_a_stage_of_dense_blocks_alone_needs_less_than_one_with_experts(sharded: Any) -> None:
    """DeepSeek-V3's first three blocks are dense: of 32 stages the first has none with experts."""
    found = predict(job(DEEPSEEK_V3), H100, OthersLayout(pp=32, sharded=sharded, global_batch=64))
    experts = 2 * 256 * 3 * 7168 * 2048 * (2 if sharded == "gradients" else 4)
    assert experts < found.memory.weights < 1.2 * experts


@pytest.mark.parametrize(("schedule", "runs"), [("zb-v", 1), ("1f1b", 4)])
def test_parts_add_up_where_next_to_nothing_waits_and_stages_are_unlike(
    schedule: str, runs: int
) -> None:
    """61 blocks on 16 stages: no rank has four blocks and a part of the output, which is what the
    parts begin with."""
    layout = OthersLayout(pp=16, ep=2, schedule=schedule, virtual_pp=runs, global_batch=8192)
    found = predict(job(DEEPSEEK_V3), H100, layout)
    assert sum(found.estimate.parts.values()) == pytest.approx(found.seconds, rel=1e-9)
    assert min(found.estimate.parts.values()) > 0
    assert max(found.estimate.limits.values()) <= found.seconds


def test_schedules_of_a_pipeline_wait_as_their_papers_say() -> None:
    """Backward passes in two halves wait less, and so do pairs; a V has embedding and output on one
    rank."""
    of = {
        name: predict(
            QWEN, H100, OthersLayout(pp=4, ep=8, global_batch=128, overlapped=True, schedule=name)
        )
        for name in ("1f1b", "zb-h1", "zb-v", "dualpipev")
    }
    waiting = {name: found.estimate.parts["pipeline"] for name, found in of.items()}
    assert waiting["zb-v"] < waiting["zb-h1"] < waiting["1f1b"]
    assert waiting["dualpipev"] < waiting["1f1b"]
    shape = QWEN.model
    whole = of["1f1b"].memory.weights
    assert of["zb-v"].memory.weights == pytest.approx(whole + 2 * shape.vocab * shape.dim, rel=1e-6)
    # The last rank keeps as much as the first, and has the loss before any backward pass.
    logits = 2048 * shape.vocab * 4
    buffers = max(of["1f1b"].memory.buffers, logits)
    assert of["zb-h1"].memory == replace(of["1f1b"].memory, buffers=buffers)


def test_the_rank_that_needs_most_decides_memory() -> None:
    """Of two stages of 24 blocks the first keeps two micro-batches, the last one and the output."""
    found = predict(QWEN, H100, OthersLayout(pp=2, ep=8, global_batch=128)).memory
    one = predict(QWEN, H100, OthersLayout(ep=8, global_batch=128)).memory
    shape = QWEN.model
    assert found.activations == pytest.approx(one.activations)  # half the blocks, twice
    assert found.weights == pytest.approx(one.weights / 2)
    # the loss of the last stage comes before any backward pass
    assert one.buffers == pytest.approx(max(found.buffers, 2048 * shape.vocab * 4))


@pytest.mark.parametrize(
    ("part", "values", "table"),
    [
        ("layernorm", lambda shape: 2 * shape.dim * shape.num_layers, QWEN3_30B),
        ("moe_act", lambda shape: shape.moe.top_k * shape.moe.hidden * shape.num_layers, QWEN3_30B),
        ("core_attn", lambda shape: 0, QWEN3_30B),
        ("mla_up_proj", lambda shape: 128 * (192 + 192 + 128) * shape.num_layers, DEEPSEEK_V3),
        ("mlp", lambda shape: 3 * 18432 * 3, DEEPSEEK_V3),
        ("shared_experts", lambda shape: 3 * 2048 * (shape.num_layers - 3), DEEPSEEK_V3),
    ],
)
def test_what_is_computed_again_is_not_kept_and_takes_time(
    part: Any, values: Any, table: dict[str, Any]
) -> None:
    """2,048 tokens of a rank, two bytes a value."""
    of = job(table)
    layout = OthersLayout(ep=8, hides_gradients=False)
    plain, again = (predict(of, H100, replace(layout, recompute=each)) for each in ((), (part,)))
    assert plain.memory.activations - again.memory.activations == pytest.approx(
        2048 * 2 * values(of.model)
    )
    whole = predict(of, H100, replace(layout, recompute=("block",))).seconds
    if part == "moe_act":  # its traffic is too little to count
        assert plain.seconds == again.seconds < whole
    else:
        assert plain.seconds < again.seconds < whole


def test_an_moe_layer_that_is_computed_again_keeps_its_input_and_sends_everything_twice() -> None:
    plain, again = (
        predict(QWEN, H100, OthersLayout(ep=32, recompute=parts)) for parts in ((), ("moe",))
    )
    assert again.estimate.parts["moe forward"] == pytest.approx(
        2 * plain.estimate.parts["moe forward"]
    )
    assert again.estimate.parts["attention"] == plain.estimate.parts["attention"]
    assert again.memory.activations < 0.5 * plain.memory.activations


def test_low_rank_attention_keeps_what_its_tensors_add_up_to() -> None:
    """Bytes per token of MLA beside its norms' inputs, with fused scores, tensor by tensor: 2 h of
    input, 4 (d_cq + d_c) of low ranks before and after their norms, 2 d_R of the shared key, 8 n
    d + 4 n d_R of queries, keys, values and the result."""
    shape = read_shape(DEEPSEEK_V3, "config.json", seq_len=4096)
    by_hand = 2 * 7168 + 4 * (1536 + 512) + 2 * 64 + 8 * 128 * 128 + 4 * 128 * 64
    assert 2 * shape.attention["attention_kept"] == pytest.approx(by_hand)
    plain = predict(job(DEEPSEEK_V3), H100, OthersLayout(ep=8)).memory.activations
    narrow = {**shape.attention, "attention_kept": shape.attention["attention_kept"] - 1000}
    less = replace(job(DEEPSEEK_V3), model=replace(job(DEEPSEEK_V3).model, attention=narrow))
    assert plain - predict(less, H100, OthersLayout(ep=8)).memory.activations == pytest.approx(
        2048 * 2 * 1000 * 61
    )


def test_copies_of_what_lies_in_parts_need_more_memory_and_reduce_once_more() -> None:
    """HSDP: parts of a quarter as many ranks; what is gathered stays in fewer ranks, gradients meet
    once more."""
    plain = OthersLayout(ep=8, global_batch=320, sharded="parameters")
    one, four = (predict(QWEN, H100, replace(plain, replicas=replicas)) for replicas in (1, 4))
    for part in ("weights", "gradients", "optimizer"):
        assert getattr(four.memory, part) == pytest.approx(4 * getattr(one.memory, part))
    assert four.memory.activations == pytest.approx(one.memory.activations)
    optimizers = [
        predict(QWEN, H100, OthersLayout(ep=8, global_batch=320, replicas=each)) for each in (1, 4)
    ]
    assert optimizers[1].memory.optimizer == pytest.approx(4 * optimizers[0].memory.optimizer)
    assert optimizers[1].memory.weights == optimizers[0].memory.weights
    with pytest.raises(
        InputError, match="3 replicas of the shards do not divide 32 data-parallel groups"
    ):
        predict(QWEN, H100, replace(plain, replicas=3))


def test_copies_gather_over_fewer_ranks_and_add_up_over_the_others() -> None:
    """Eight ranks of a node have the parts, four nodes the copies: parameters stay inside nodes,
    parts of gradients leave."""
    model = replace(QWEN.step_model(H100, 32), sharded="parameters")
    grid = Grid(world=32, ranks_per_node=8)
    size = 1e9
    inside = reduce_seconds(H100, grid, size, 1, 8)
    assert inside < reduce_seconds(H100, grid, size, 1, 32)
    around = StepCostModel(replace(model, vocab=0, replicas=4), grid, Simulator(H100))
    dense, experts = (count * 4 for count in around.block_parameters)
    copied = reduce_seconds(H100, grid, dense / 8, 8, 4) + reduce_seconds(
        H100, grid, experts / 8, 8, 4
    )
    gathered = (
        reduce_seconds(H100, grid, dense, 1, 8) / 2 + reduce_seconds(H100, grid, experts, 1, 8) / 2
    )
    moved = around.estimate(LayerPass(1.0, 0.0, {}), LayerPass(1.0, 0.0, {})).limits[
        "gathering parameters"
    ]
    assert moved == pytest.approx(4 * 48 * (3 * gathered + copied))


def test_narrow_products_are_faster_but_not_by_all_of_their_rate() -> None:
    """Only products with parameters are narrow, and their inputs are cast: scores, norms and
    messages take as long."""
    wide, narrow = (
        predict(QWEN, H100, OthersLayout(ep=8, global_batch=320, precision=each))
        for each in ("bf16", "fp8")
    )
    rates = H100.device.tflops
    assert wide.seconds / narrow.seconds < rates.fp8 / rates.bf16
    sent = {
        name: seconds
        for name, seconds in wide.estimate.limits.items()
        if "inside" in name or "nvlink" in name
    }
    assert sent
    assert sent.items() <= narrow.estimate.limits.items()
    assert narrow.estimate.parts["attention"] < wide.estimate.parts["attention"]
    with pytest.raises(InputError, match=r"cluster\.device\.tflops\.mxfp8 is not given"):
        predict(QWEN, H100, OthersLayout(ep=8, precision="mxfp8"))


@pytest.mark.parametrize("precision", ["fp8", "mxfp8"])
def test_no_step_is_shorter_than_its_bound_where_products_are_narrow(precision: Any) -> None:
    of = job(MIXTRAL)
    b200 = read_cluster("dgx-b200", nodes=2)
    wide, narrow = (
        predict(of, b200, OthersLayout(ep=8, global_batch=512, precision=each))
        for each in ("bf16", precision)
    )
    assert narrow.bound_seconds <= narrow.seconds
    assert narrow.bound_seconds < wide.bound_seconds


def test_what_nobody_measured_of_narrow_products_is_an_interval() -> None:
    """A preset's rate times 0.78 to 1.05; steps are not off by all of it, since not all of a step
    is products."""
    narrow = OthersLayout(ep=8, global_batch=320, precision="fp8")
    fast, slow = longer_by_narrow_rate(QWEN, H100, narrow)
    assert 1 / 1.05 < fast < 1 < slow < 1 / 0.78
    assert longer_by_narrow_rate(QWEN, H100, replace(narrow, precision="bf16")) == (1.0, 1.0)
    known = replace(H100, device=replace(H100.device, narrow_between=()))
    assert longer_by_narrow_rate(QWEN, known, narrow) == (1.0, 1.0)
    with pytest.raises(
        InputError, match=r"narrow_between=\[1\.0\]: give two numbers above 0, or none"
    ):
        replace(H100.device, narrow_between=(1.0,))
    b200 = read_cluster("dgx-b200", nodes=4)
    # Casts of many small experts' rows cost more than narrow products save; those of few large ones
    # do not.
    wide = OthersLayout(ep=8, global_batch=320)
    for of, gains in ((QWEN, False), (job(MIXTRAL), True)):
        assert (
            predict(of, b200, replace(wide, precision="mxfp8")).seconds
            < predict(of, b200, wide).seconds
        ) == gains


LAYOUTS = [
    OthersLayout(ep=8, pp=4, virtual_pp=2, micro_batch=2, global_batch=512, float32_reduced=False),
    OthersLayout(ep=8, pp=4, cp=2, recompute=("core_attn", "moe_act", "layernorm")),
    OthersLayout(ep=8, etp=2, tp=4, replicas=2, precision="fp8", mtp=1, recompute=("block",)),
    OthersLayout(
        ep=16, pp=2, virtual_pp=4, sharded="gradients", overlapped=True, all_to_all="deepep"
    ),
    OthersLayout(ep=16, precision="mxfp8", pp=2, sharded="none", hides_parameters=False),
]


@pytest.mark.parametrize(
    "layout", LAYOUTS, ids=lambda layout: f"{layout.schedule}-{layout.precision}-{layout.sharded}"
)
def test_megatron_says_a_layout_and_reads_it_back(layout: OthersLayout) -> None:
    assert from_flags(" ".join(SYSTEMS["megatron"].flags("megatron", QWEN, layout))) == layout


@pytest.mark.parametrize(
    "layout",
    [
        OthersLayout(
            ep=8,
            sharded="parameters",
            local_batch=4,
            micro_batch=4,
            replicas=2,
            recompute=("block",),
        ),
        OthersLayout(
            ep=8,
            pp=2,
            schedule="zb-v",
            sharded="gradients",
            local_batch=8,
            micro_batch=1,
            tp=2,
            cp=2,
        ),
        OthersLayout(
            ep=8,
            pp=2,
            schedule="dualpipev",
            sharded="gradients",
            local_batch=8,
            micro_batch=2,
            global_batch=64,
        ),
    ],
    ids=lambda layout: f"{layout.schedule}-{layout.sharded}",
)
def test_torchtitan_says_a_layout_and_reads_it_back(layout: OthersLayout) -> None:
    assert from_flags(" ".join(SYSTEMS["torchtitan"].flags("torchtitan", QWEN, layout))) == layout


@pytest.mark.parametrize(
    ("system", "layout", "words"),
    [
        (
            "megatron",
            OthersLayout(pp=2, schedule="zb-v"),
            (
                "emit megatron: Megatron-LM 0.20 does not support schedule='zb-v': choose "
                "'1f1b', or another system"
            ),
        ),
        (
            "torchtitan",
            OthersLayout(recompute=("moe",)),
            "0.3.0 does not support recompute=('moe',): choose () or",
        ),
        (
            "automodel",
            OthersLayout(recompute=("moe_act",)),
            "does not support recompute=('moe_act',): choose () or ('block',)",
        ),
        (
            "torchtitan",
            OthersLayout(precision="fp8"),
            "torchtitan 0.3.0 does not support precision='fp8': choose 'bf16'",
        ),
        (
            "torchtitan",
            OthersLayout(overlapped=True),
            "does not support overlapped=True: choose False, or another",
        ),
        ("torchtitan", OthersLayout(graphs=True), "does not support graphs=True: choose False"),
        (
            "torchtitan",
            OthersLayout(pp=2, virtual_pp=4),
            "PyTorch's 1f1b does not support virtual_pp=4: choose 1 or 2, or give --pp",
        ),
        (
            "automodel",
            OthersLayout(pp=2, schedule="zb-h1"),
            "PyTorch's zb-h1 does not support virtual_pp=1: choose 2, or give --pp",
        ),
        (
            "torchtitan",
            OthersLayout(pp=2, virtual_layers=3),
            "does not support virtual_layers=3: choose 0",
        ),
        (
            "moesaic",
            OthersLayout(pp=2, schedule="zb-h1"),
            "does not support schedule='zb-h1': choose '1f1b', or another system",
        ),
    ],
)
def test_what_a_system_has_not_is_one_line(system: str, layout: OthersLayout, words: str) -> None:
    assert words in refused(SYSTEMS[system].flags, system, QWEN, layout)


def test_automodel_is_told_what_its_recipes_have() -> None:
    layout = OthersLayout(
        pp=4,
        virtual_pp=2,
        ep=8,
        cp=2,
        replicas=2,
        global_batch=512,
        recompute=("block",),
        all_to_all="multicast",
    )
    assert " ".join(SYSTEMS["automodel"].flags("automodel", QWEN, layout)) == (
        "--distributed.strategy fsdp2 --distributed.tp_size 1 --distributed.cp_size 2 "
        "--distributed.pp_size 4 --distributed.ep_size 8 --distributed.dp_replicate_size 2 "
        "--step_scheduler.local_batch_size 4 --dataset.seq_length 2048 "
        "--step_scheduler.global_batch_size 512 --distributed.activation_checkpointing true "
        "--model.backend.dispatcher deepep --distributed.pipeline.pp_schedule interleaved1f1b "
        "--distributed.pipeline.pp_microbatch_size 1"
    )
    with pytest.raises(
        InputError,
        match=(
            "emit automodel: NeMo Automodel does not support etp=2: choose 1, or another system"
        ),
    ):
        SYSTEMS["automodel"].flags("automodel", QWEN, OthersLayout(ep=4, etp=2))


def test_the_worked_example_of_the_docs_is_what_the_code_gives() -> None:
    text = (Path(__file__).parents[2] / "docs" / "planning.md").read_text(encoding="utf-8")
    example = OthersLayout(
        pp=2,
        ep=4,
        recompute=("block",),
        global_batch=64,
        hides_parameters=False,
        hides_gradients=False,
    )
    cluster = read_cluster("dgx-h100", nodes=1)
    step = predict(read_job("qwen3-30b-a3b", seq_len=4096, world=8), cluster, example)
    rows = {
        line.split(" | ")[0].removeprefix("| "): line.split(" | ")[-1] for line in text.splitlines()
    }
    names = {
        "attention": "attention",
        "unembed": "unembed",
        "launches": "launches",
        "MoE layers, forward": "moe forward",
        "MoE layers, backward": "moe backward",
        "pipeline": "pipeline",
        "parameters": "parameters",
        "optimizer": "optimizer",
    }
    assert set(names.values()) == set(step.estimate.parts)
    for name, part in names.items():
        assert rows[name] == f"{step.estimate.parts[part] * 1e3:,.1f} |", name
    assert rows["step"] == f"{step.seconds * 1e3:,.1f} |"
    of_layer, of_expert = LAUNCHES
    assert step.estimate.parts["launches"] == pytest.approx(
        16 * 24 * (of_layer + 32 * of_expert) * 4 / 3
    )


SMALL = replace(job(QWEN3_30B | {"num_hidden_layers": 8}), batch_size=8, accumulation=8)
NODE = read_cluster("dgx-h100", nodes=1)


def test_no_layout_of_a_search_is_slower_than_its_neighbours_and_all_is_offered() -> None:
    offers = SYSTEMS["megatron"].offers
    found = best_layout(SMALL, NODE, offers)
    assert found is not None
    layout, step = found
    assert step.seconds == predict(SMALL, NODE, layout).seconds
    assert (layout.schedule, layout.virtual_pp) in offers.schedules
    assert layout.recompute in offers.recompute
    near = []
    for each in other_systems._neighbours(layout, offers):
        with suppress(InputError):  # it does not split
            near.append(predict(SMALL, NODE, each))
    fitting = [each for each in near if each.memory.total <= usable_bytes(NODE, 1.0)]
    assert step.seconds <= min(each.seconds for each in fitting)
    for ep, tp in ((1, 1), (4, 1), (8, 2), (8, 1)):
        for more in (
            {},
            {"overlapped": True},
            {"all_to_all": "deepep"},
            {"micro_batch": 2},
            {"precision": "fp8"},
        ):
            other = OthersLayout(ep=ep, tp=tp, global_batch=64, **more)  # type: ignore[arg-type]
            assert step.seconds <= predict(SMALL, NODE, other).seconds * (1 + 1e-9)
    plain = best_layout(SMALL, NODE, SYSTEMS["moesaic"].offers, stages=2)
    assert (plain[0].pp, plain[0].schedule, plain[0].overlapped, plain[0].precision) == (
        2,
        "1f1b",
        False,
        "bf16",
    )
    assert plain[0].all_to_all == "linear"


def test_blocks_are_recomputed_where_nothing_else_fits() -> None:
    offers = replace(SYSTEMS["moesaic"].offers, sharded="optimizer")
    sizes = {
        parts: min(
            predict(
                SMALL, NODE, OthersLayout(pp=2, ep=ep, tp=tp, global_batch=64, recompute=parts)
            ).memory.total
            for ep in (1, 2, 4)
            for tp in (1, 2, 4)
        )
        for parts in ((), ("block",))
    }
    reserve = NODE.device.memory_gib - 1.0501 * (sizes[()] + sizes["block",]) / 2 / GIB
    tight = best_layout(SMALL, NODE, offers, stages=2, reserve_gib=reserve)
    assert tight[0].recompute == ("block",)
    assert tight[1].memory.total <= usable_bytes(NODE, reserve)
    assert best_layout(SMALL, NODE, offers, stages=2, reserve_gib=79.9) is None


def test_long_sequences_may_be_shared() -> None:
    long = replace(SMALL, model=replace(SMALL.model, seq_len=65536))
    tight = best_layout(long, NODE, SYSTEMS["moesaic"].offers, reserve_gib=60)
    assert tight[0].cp > 1 or tight[0].tp > 1


def test_a_step_with_fewer_sequences_than_stages_does_not_fill_its_pipelines() -> None:
    assert fills_pipeline(QWEN, H100, OthersLayout(pp=4, ep=8, global_batch=32))
    assert not fills_pipeline(QWEN, H100, OthersLayout(pp=4, ep=8, global_batch=24))


def test_deepep_is_offered_and_accepted_where_links_carry_it() -> None:
    cards = read_cluster("8x4090-pcie", nodes=1)
    found = best_layout(SMALL, cards, SYSTEMS["megatron"].offers)
    assert found is not None
    assert not found[0].by_deepep
    words = refused(predict, SMALL, cards, OthersLayout(ep=8, all_to_all="deepep"))
    assert "DeepEP needs NVLink inside nodes and RDMA between them" in words
    assert NODE.carries_deepep
    assert not replace(NODE, links=(replace(NODE.links[0], deepep=False),)).carries_deepep
    slow_outside = replace(NODE, links=(NODE.links[0], replace(NODE.links[1], deepep=False)))
    assert slow_outside.carries_deepep, "one node needs no other links"
    assert not replace(slow_outside, nodes=2).carries_deepep
