"""What of a training configuration decides how long a step takes and what memory it needs: `Job`. Read without torch.

One file serves `moesaic train` and `moesaic plan`. The model's fields are the trainer's own (`model_shape.py`); of the run
around it the few that matter stand here under the trainer's names, and a test holds their defaults together.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal

from moesaic.configfile import override, read_table, suggestion
from moesaic.cost.cluster import ClusterSpec, Dtype
from moesaic.cost.step import StepModel
from moesaic.cost.workload import Workload
from moesaic.errors import InputError
from moesaic.plan.hub import is_hub_config, read_shape
from moesaic.plan.model_shape import ModelShape, MoEShape


@dataclass(frozen=True, kw_only=True)
class DataShape:
    """The data."""

    vocab_size: int = 256
    """Tokens."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training run, as far as its speed and memory go."""

    batch_size: int = 16
    """Sequences per micro-batch, over all ranks."""
    accumulation: int = 1
    """Micro-batches per optimizer step."""
    precision: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    """Of products and activations; auto takes bfloat16 where the cluster's rate of it is known. Parameters stay float32."""
    model: ModelShape = field(default_factory=ModelShape)
    """The model."""
    data: DataShape = DataShape()
    """The data."""

    def __post_init__(self) -> None:
        if self.model.ffn == "dense":
            raise InputError('model.ffn="dense": a model without MoE layers has no plan to choose: set model.ffn="moe"')
        for where, value in (
            ("batch_size", self.batch_size), ("accumulation", self.accumulation), ("data.vocab_size", self.data.vocab_size),
        ):  # fmt: skip
            if value < 1:
                raise InputError(f"{where}={value}: must be at least 1")

    @property
    def active_hidden(self) -> int:
        """Inner width that a token passes in one feed-forward layer."""
        return self.model.active_hidden

    @property
    def dense_layers(self) -> int:
        """Blocks without an MoE layer."""
        return sum(not self.model.is_sparse(layer) for layer in range(self.model.num_layers))

    @property
    def parameter_bytes(self) -> int:
        """Of a parameter, of its gradient, and of each of Adam's two moments."""
        return 8 if self.precision == "float64" else 4

    def dtype(self, cluster: ClusterSpec) -> Dtype:
        """Return the dtype of products on a cluster.

        Raises:
            InputError: if the cluster's rate of it is not known.
        """
        names: dict[str, Dtype] = {"float32": "fp32", "bfloat16": "bf16", "float64": "fp64"}
        rates = cluster.device.tflops
        if self.precision == "auto":
            return "bf16" if rates.bf16 and rates.bf16 >= 1.5 * rates.fp32 else "fp32" if rates.fp32 else "bf16"
        found = names[self.precision]
        rates.of(found)
        return found

    def step_model(self, cluster: ClusterSpec, dp: int) -> StepModel:
        """Return a step as its model of time and memory takes it, for so many data-parallel groups.

        Raises:
            InputError: if the batch does not split over them.
        """
        model, moe = self.model, self.model.moe
        if self.batch_size % dp:
            raise InputError(f"batch_size={self.batch_size} does not split over {dp} data-parallel groups")
        layer = Workload(
            tokens=self.batch_size // dp * model.seq_len,
            num_experts=moe.num_experts,
            top_k=moe.top_k,
            dim=model.dim,
            hidden=moe.hidden,
            matrices=3 if moe.experts == "swiglu" else 2,
            dtype=self.dtype(cluster),
            capacity_factor=moe.capacity_factor if moe.capacity == "padded" else 1.0,
            **model.routing,
        )
        return StepModel(
            num_layers=model.num_layers,
            layer=layer,
            seq_len=model.seq_len,
            moe_every=min(moe.every, model.num_layers),
            dense_hidden=model.active_hidden,
            vocab=self.data.vocab_size,
            checkpoint_activations=model.checkpoint_activations,
            micro_batches=self.accumulation,
            shared_hidden=moe.shared_hidden,
            parameter_bytes=self.parameter_bytes,
            sparse_layers=model.num_layers - self.dense_layers,
            **model.around,  # type: ignore[arg-type]
        )


PRESETS: dict[str, Job] = {
    "demo": Job(
        batch_size=8,
        model=ModelShape(dim=128, num_layers=4, num_heads=4, seq_len=256, moe=MoEShape(num_experts=64, hidden=64)),
    ),
    "gpt-tiny": Job(
        batch_size=4,
        model=ModelShape(dim=32, num_layers=2, num_heads=2, seq_len=64, moe=MoEShape(num_experts=4, hidden=32)),
    ),
    "gpt-small": Job(
        batch_size=16,
        accumulation=4,
        model=ModelShape(
            dim=768, num_layers=12, num_heads=12, seq_len=1024, moe=MoEShape(num_experts=8, hidden=1024),
            checkpoint_activations=True,
        ),
        data=DataShape(vocab_size=16_384),
    ),
}  # fmt: skip
"""The sparse ones of `moesaic train --preset`, by the same names."""


TOKENS = 1 << 22
"""Tokens of an optimizer step of a model of the hub, about, unless the batch says otherwise."""


def read_job(name: str, *, seq_len: int = 4096, world: int = 1) -> Job:
    """Return a job.

    Args:
        name: a preset, or the path of a training configuration: TOML, or JSON as a run folder has it. Fields that change
            neither time nor memory are passed over. A model's `config.json` of the hub is trained in bfloat16 with one
            sequence per rank and micro-batch, and as many micro-batches as make about `TOKENS`.
        seq_len: tokens of a sequence, of a model of the hub only.
        world: ranks, of a model of the hub only.

    Raises:
        InputError: for an unknown preset, a file that does not parse, none of whose fields is known, a misspelt field, or a
            value that cannot be.
    """
    if not name.endswith((".toml", ".json")):
        if name not in PRESETS:
            raise InputError(
                f"model {name!r} is unknown{suggestion(name, list(PRESETS))}; or give a path that ends in .toml"
            )
        return PRESETS[name]
    table = read_table(Path(name))
    if is_hub_config(table):
        shape = read_shape(table, f"model {name}", seq_len=seq_len)
        batches = max(1, round(TOKENS / (world * seq_len)))
        return Job(batch_size=world, accumulation=batches, model=shape, data=DataShape(vocab_size=shape.vocab))
    known = [each.name for each in fields(Job)]
    job = job_of(table, f"model {name}")
    if not any(field in known for field in table):
        raise InputError(
            f"model {name}: planning reads {', '.join(known)} of a training configuration, and the file has none of them: "
            "write the sizes as [model] and [model.moe], as a run folder's config.json has them, or give a config.json of the "
            "Hugging Face hub"
        )
    return job


def job_of(table: dict[str, Any], source: str) -> Job:
    """Return the job of a training configuration as a table.

    Args:
        table: with any of its fields.
        source: where it comes from, for messages.

    Raises:
        InputError: as `read_job` does.
    """
    return override(Job(), _known(Job(), table, source), source=source)


def with_batch(job: Job, batch_size: int | None) -> Job:
    """Return the job with another batch; None leaves it."""
    return job if batch_size is None else replace(job, batch_size=batch_size)


def _known(shape: Any, table: dict[str, Any], source: str, prefix: str = "") -> dict[str, Any]:
    """Return the fields of a table that planning reads, nested ones too; a name that is nearly one of them is refused."""
    names = [each.name for each in fields(shape)]
    found = {}
    for name, value in table.items():
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1, cutoff=0.84)
            if near:
                raise InputError(f"{source}: unknown field {prefix}{name}: did you mean {near[0]}?")
            continue
        nested = getattr(shape, name)
        inner = is_dataclass(nested) and isinstance(value, dict)
        found[name] = _known(nested, value, source, f"{prefix}{name}.") if inner else value
    return found
