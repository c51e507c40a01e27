"""Jobs: the training configuration's own names and defaults, misspelt ones refused, and what the
simulator is told."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import refused
from moesaic.errors import InputError
from moesaic.models.gpt import GPT
from moesaic.planner.cluster import Tflops
from moesaic.planner.job import Job, job_of
from moesaic.planner.presets import PRESETS, read_job
from moesaic.shapes import BlockConfig, ModelShape, MoEShape
from moesaic.train.config import TrainConfig
from moesaic.train.presets import PRESETS as TRAIN_PRESETS
from moesaic_lab.paper_train.command import PRESETS as PAPER_PRESETS
from moesaic_lab.paper_train.command import paper_preset
from moesaic_lab.paper_train.models import Encoder, EncoderDecoder
from planner.clusters import DEVICE, flat

CLUSTER = flat(2, 4, device=DEVICE)


def pairs(one: Any, other: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield dotted names of a job's fields, its values and the training configuration's."""
    for each in fields(one):
        mine = getattr(one, each.name)
        theirs = getattr(other, each.name)
        if is_dataclass(mine):
            yield from pairs(mine, theirs, f"{prefix}{each.name}.")
        else:
            yield prefix + each.name, mine, theirs


def test_a_job_has_the_names_and_defaults_of_training() -> None:
    for name, mine, theirs in pairs(Job(), TrainConfig()):
        assert mine == theirs, name


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_those_of_training(name: str) -> None:
    for field, mine, theirs in pairs(PRESETS[name], paper_preset(name)):
        assert mine == theirs, field
    assert job_of(asdict(paper_preset(name)), "preset") == PRESETS[name]


def test_every_sparse_preset_of_training_can_be_planned() -> None:
    assert set(PRESETS) == {
        name for name, make in (TRAIN_PRESETS | PAPER_PRESETS).items() if make().model.ffn == "moe"
    }


def test_a_file_is_read_and_what_does_not_matter_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "gpt.toml"
    path.write_text(
        "batch_size = 8\nsteps = 9\n[optimizer]\nlr = 1e-3\n[model]\ndim = 64\nconv_width = 2\n"
        '[model.moe]\nnum_experts = 8\nrouter = "sigmoid"\nz_loss = 0.1\n'
    )
    moe = MoEShape(num_experts=8, router="sigmoid")
    assert read_job(str(path)) == Job(batch_size=8, model=ModelShape(dim=64, conv_width=2, moe=moe))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[model]\nnum_layer = 3\n", "unknown field model.num_layer: did you mean num_layers?"),
        (
            "[model.moe]\nnum_expert = 3\n",
            "unknown field model.moe.num_expert: did you mean num_experts?",
        ),
        ('[model]\nffn = "dense"\n', "a model without MoE layers has no plan to choose"),
        ("[model]\ndim = 1.5\n", "model.dim must be a whole number, got 1.5"),
        ("model = 3\n", "model must be a table of ffn, moe_every"),
        ("batch_size = 0\n", "batch_size=0: must be at least 1"),
        ("[model]\nmoe_every = 0\n", "model.moe_every=0: must be at least 1"),
        ("", "planning reads the fields batch_size, accumulation, precision, model, data"),
        (
            'model_type = "mixtral"\nhidden_size = 4096\n',
            (
                "has none of num_hidden_layers, n_layers, num_layers, so the model is of an "
                "unknown architecture"
            ),
        ),
    ],
)
def test_bad_files_are_one_line(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "gpt.toml"
    path.write_text(text)
    assert words in refused(lambda: read_job(str(path)))


def test_no_field_that_only_training_reads_is_taken_for_a_misspelt_one() -> None:
    job_of(asdict(TrainConfig()), "defaults")


def test_unknown_names_are_told_the_nearest() -> None:
    assert "model 'gpt-smal' is unknown: did you mean gpt-small?" in refused(read_job, "gpt-smal")


def test_the_simulator_is_told_a_micro_batch_of_one_group() -> None:
    job = Job(
        batch_size=16,
        accumulation=3,
        model=ModelShape(moe_every=3, moe=MoEShape(shared_hidden=7, experts="gelu")),
    )
    found = job.step_model(CLUSTER, 4)
    assert (found.layer.tokens, found.layer.matrices, found.moe_layers, found.micro_batches) == (
        4 * 256,
        2,
        2,
        3,
    )
    assert found.inner == 2 * 256 + 7
    assert job.dense_layers == 2
    padded = replace(
        job, model=replace(job.model, moe=MoEShape(capacity="padded", capacity_factor=1.5))
    )
    assert padded.step_model(CLUSTER, 4).layer.copies == 1.5 * 4 * 256 * 2
    assert "batch_size=16 does not split over 3" in refused(job.step_model, CLUSTER, 3)


@pytest.mark.parametrize(
    ("precision", "rates", "dtype"),
    [
        ("auto", {"bf16": 100, "fp32": 50}, "bf16"),
        ("auto", {"bf16": 10, "fp32": 50}, "fp32"),
        ("auto", {"bf16": 10}, "bf16"),
        ("auto", {"fp32": 10}, "fp32"),
        ("float32", {"bf16": 100, "fp32": 50}, "fp32"),
        ("float64", {"fp64": 1}, "fp64"),
    ],
)
def test_precision_becomes_a_dtype_that_the_cluster_knows(
    precision: Any, rates: dict, dtype: str
) -> None:
    cluster = replace(CLUSTER, device=replace(DEVICE, tflops=Tflops(**rates)))
    assert Job(precision=precision).dtype(cluster) == dtype


def test_a_rate_that_is_not_known_is_refused() -> None:
    with pytest.raises(
        InputError,
        match=r"cluster.device.tflops.fp64 is not given: add it, or choose one of fp32, bf16",
    ):
        Job(precision="float64").step_model(CLUSTER, 1)


@pytest.mark.parametrize("name", PRESETS)
def test_parameters_are_those_of_the_model_that_trains(name: str) -> None:
    config = paper_preset(name)
    kinds = {"encoder": Encoder, "encoder_decoder": EncoderDecoder}
    with torch.device("meta"):
        model = kinds.get(config.model.block.kind, GPT)(config.model, config.data.vocab_size)
    total, active = PRESETS[name].parameters(CLUSTER)
    # Norms, biases and learned positions are not counted.
    assert total == pytest.approx(model.num_parameters(), rel=0.01)
    assert active == pytest.approx(model.num_active_parameters(), rel=0.02)


@pytest.mark.parametrize("tied", [True, False])
def test_a_step_counts_a_tied_table_once(tied: bool) -> None:
    job = Job(model=ModelShape(block=BlockConfig(tied=tied)))
    assert job.step_model(CLUSTER, 1).embeddings == (1 if tied else 2)


def test_an_output_of_its_own_is_one_more_matrix() -> None:
    tied, untied = (Job(model=ModelShape(block=BlockConfig(tied=tied))) for tied in (True, False))
    assert (
        untied.parameters(CLUSTER)[0] - tied.parameters(CLUSTER)[0]
        == untied.data.vocab_size * untied.model.dim
    )


def test_heads_wider_than_a_token_have_their_scores() -> None:
    """Six heads of 16, of which two have keys, have as many parameters as four square matrices."""
    shape = ModelShape(dim=64, num_heads=6, block=BlockConfig(head_dim=16, kv_heads=2))
    assert shape.around["attention_parameters"] == 4 * 64 * 64
    assert shape.around["score_operations"] == 2 * shape.seq_len * 6 * 16
    assert ModelShape(dim=64, num_heads=4).around == {}


def test_what_norms_of_queries_and_keys_return_is_kept_without_rotations_too() -> None:
    shapes = {
        positions: ModelShape(
            dim=64,
            num_heads=4,
            conv_width=1,
            block=BlockConfig(qk_norm=True, positions=positions),  # type: ignore[arg-type]
        )
        for positions in ("learned", "rotary")
    }
    kept = {name: shape.kept_values(on_cpu=True) for name, shape in shapes.items()}
    assert kept["learned"] == kept["rotary"]
