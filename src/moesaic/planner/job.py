"""`Job`: the part of a training configuration that determines the time and the memory of a step.
Needs no torch.

`moesaic train` and `moesaic plan` read the same files. The fields of the model are those of the
trainer (`model_shape.py`). The few other fields here have the names of the trainer's fields, and a
test checks that their defaults are equal.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal

from moesaic.configfile import override
from moesaic.errors import InputError
from moesaic.planner.cluster import ClusterSpec, Dtype
from moesaic.planner.step import StepModel
from moesaic.planner.workload import Workload
from moesaic.shapes import ModelShape


@dataclass(frozen=True, kw_only=True)
class DataShape:
    """The training data."""

    vocab_size: int = 256
    """Size of the vocabulary."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training run, reduced to what determines its speed and memory."""

    batch_size: int = 16
    """Sequences per micro-batch, over all ranks."""
    accumulation: int = 1
    """Micro-batches per optimizer step."""
    precision: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    """Precision of products and activations. auto: bfloat16 if the cluster computes it at least 1.5
    times as fast as float32, or if the rate of float32 is unknown; else float32. Parameters stay
    float32, except under float64."""
    model: ModelShape = field(default_factory=ModelShape)
    """The model."""
    data: DataShape = DataShape()
    """The training data."""

    def __post_init__(self) -> None:
        if self.model.is_dense:
            raise InputError(
                'model.ffn="dense": a model without MoE layers has no plan to choose: set '
                'model.ffn="moe"'
            )
        sizes = {
            "batch_size": self.batch_size,
            "accumulation": self.accumulation,
            "data.vocab_size": self.data.vocab_size,
        }
        for where, value in sizes.items():
            if value < 1:
                raise InputError(f"{where}={value}: must be at least 1")

    @property
    def recomputing(self) -> Job:
        """The job that recomputes its blocks in backward."""
        return replace(self, model=replace(self.model, checkpoint_activations=True))

    @property
    def dense_layers(self) -> int:
        """Blocks without an MoE layer."""
        is_sparse = [self.model.is_sparse(layer) for layer in range(self.model.num_layers)]
        return is_sparse.count(False)

    def dtype(self, cluster: ClusterSpec) -> Dtype:
        """Return the dtype of products on a cluster.

        Raises:
            InputError: if the cluster does not have the rate of that dtype.
        """
        names: dict[str, Dtype] = {"float32": "fp32", "bfloat16": "bf16", "float64": "fp64"}
        rates = cluster.device.tflops
        if self.precision == "auto":
            is_much_faster = rates.bf16 > 0 and rates.bf16 >= 1.5 * rates.fp32
            return "bf16" if is_much_faster or not rates.fp32 else "fp32"
        dtype = names[self.precision]
        rates.of(dtype)  # raises if it is unknown
        return dtype

    def step_model(self, cluster: ClusterSpec, dp: int) -> StepModel:
        """Return the model of time and memory of a step on `dp` data-parallel groups.

        Raises:
            InputError: if the batch does not split over the groups.
        """
        model = self.model
        moe = self.model.moe
        if self.batch_size % dp:
            raise InputError(
                f"batch_size={self.batch_size} does not split over {dp} data-parallel groups"
            )
        layer = Workload(
            tokens=self.batch_size // dp * model.seq_len,
            num_experts=moe.num_experts,
            top_k=moe.top_k,
            dim=model.dim,
            hidden=moe.hidden,
            matrices=3 if moe.experts == "swiglu" else 2,
            dtype=self.dtype(cluster),
            capacity_factor=moe.capacity_factor if moe.capacity == "padded" else 1.0,
            **model.routing,  # type: ignore[arg-type]
        )
        # fields about the parts outside MoE layers; a model of the hub has its own
        around = {
            "attention_kept": model.kept_values(on_cpu=cluster.host.runs_compute),
            "embeddings": 1 if model.tied else 2,
            **model.around,
        }
        return StepModel(
            num_layers=model.num_layers,
            layer=layer,
            seq_len=model.seq_len,
            dense_hidden=model.active_hidden,
            vocab=self.data.vocab_size,
            recomputed=("block",) if model.checkpoint_activations else (),
            micro_batches=self.accumulation,
            shared_hidden=moe.shared_hidden,
            parameter_bytes=8 if self.precision == "float64" else 4,
            sparse_layers=model.num_layers - self.dense_layers,
            # The loss's float32 copy, its log-softmax, and the gradients of both, the last one in
            # the logits' dtype; the logits stay.
            loss_kept=max(layer.element_bytes, 4) * 3 + layer.element_bytes,
            logits_kept=layer.element_bytes,
            table_bytes=moe.table_bytes,
            **around,  # type: ignore[arg-type]
        )

    def parameters(self, cluster: ClusterSpec) -> tuple[float, float]:
        """Return the number of parameters of the model, and of those that a token uses.

        Args:
            cluster: any cluster that can train the model; it changes neither.
        """
        step = self.step_model(cluster, dp=1)
        layer = step.layer
        shared = step.moe_layers * layer.matrices * layer.dim * step.shared_hidden
        around = step.dense_parameters + shared
        experts = step.expert_parameters
        used_experts = experts * layer.top_k / layer.num_experts
        return around + experts, around + used_experts


def job_of(table: dict[str, Any], source: str) -> Job:
    """Return the job of a training configuration.

    Args:
        table: the configuration as a table; missing fields have their defaults.
        source: origin of the table, for messages.

    Raises:
        InputError: as `read_job` does.
    """
    return override(Job(), _planning_fields(Job(), table, source), source=source)


def _planning_fields(
    shape: Any, table: dict[str, Any], source: str, prefix: str = ""
) -> dict[str, Any]:
    """Return the fields of a table that planning reads, including nested ones; raises InputError
    for misspelt ones.

    Args:
        shape: a `Job` or one of its parts, whose fields are those that planning reads.
        table: the configuration, or one of its tables.
        source: origin of the table, for messages.
        prefix: what stands before the name of a field in messages, such as "model.".
    """
    names = [each.name for each in fields(shape)]
    read = {}
    for name, value in table.items():
        if name not in names:
            # other fields of the trainer are ignored, unless they are spelt almost like one of ours
            near = difflib.get_close_matches(name, names, n=1, cutoff=0.84)
            if near:
                raise InputError(f"{source}: unknown field {prefix}{name}: did you mean {near[0]}?")
            continue
        nested = getattr(shape, name)
        if is_dataclass(nested) and isinstance(value, dict):
            value = _planning_fields(nested, value, source, f"{prefix}{name}.")
        read[name] = value
    return read
