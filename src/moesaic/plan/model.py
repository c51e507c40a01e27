"""What of a training configuration decides how long a step takes and what memory it needs: `Job`. Read without torch.

One file serves `moesaic train` and `moesaic plan`. The model's fields are the trainer's own (`model_shape.py`); of the run
around it the few that matter stand here under the trainer's names, and a test holds their defaults together.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal

from moesaic.configfile import override
from moesaic.cost.cluster import ClusterSpec, Dtype
from moesaic.cost.step_model import StepModel
from moesaic.cost.workload import Workload
from moesaic.errors import InputError
from moesaic.plan.model_shape import ModelShape


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
        if self.model.is_dense:
            raise InputError('model.ffn="dense": a model without MoE layers has no plan to choose: set model.ffn="moe"')
        for where, value in (
            ("batch_size", self.batch_size), ("accumulation", self.accumulation), ("data.vocab_size", self.data.vocab_size),
        ):  # fmt: skip
            if value < 1:
                raise InputError(f"{where}={value}: must be at least 1")

    @property
    def dense_layers(self) -> int:
        """Blocks without an MoE layer."""
        return sum(not self.model.is_sparse(layer) for layer in range(self.model.num_layers))

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
            capacity_factor=moe.capacity_rule.factor if moe.capacity_rule.kind == "padded" else 1.0,
            **model.routing,  # type: ignore[arg-type]
        )
        return StepModel(
            num_layers=model.num_layers,
            layer=layer,
            seq_len=model.seq_len,
            moe_every=min(model.moe_every, model.num_layers),
            dense_hidden=model.active_hidden,
            vocab=self.data.vocab_size,
            recomputed=("block",) if model.checkpoint_activations else (),
            micro_batches=self.accumulation,
            shared_hidden=moe.shared_hidden,
            parameter_bytes=8 if self.precision == "float64" else 4,
            sparse_layers=model.num_layers - self.dense_layers,
            **model.around,  # type: ignore[arg-type]
        )


def job_of(table: dict[str, Any], source: str) -> Job:
    """Return the job of a training configuration as a table.

    Args:
        table: with any of its fields.
        source: where it comes from, for messages.

    Raises:
        InputError: as `read_job` does.
    """
    return override(Job(), _known(Job(), table, source), source=source)


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
        if is_dataclass(nested) and isinstance(value, dict):
            value = _known(nested, value, source, f"{prefix}{name}.")
        found[name] = value
    return found
