"""The stages of a fine-tuning run: which layers a rank has, and how it loads them alone.

A stage is the model of transformers without the layers of others, the embedding, the last norm and
the head where they are elsewhere: what is missing hands on what it gets. The family's own code so
makes masks and positions in each stage. A family in which something else happens between the layers
is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers.distributed import DistributedConfig
from transformers.distributed.utils import TransformersDeviceMesh

from moesaic.comm.mesh import DeviceType, Mesh
from moesaic.comm.process_groups import keep_timeout
from moesaic.errors import InputError
from moesaic.train.ranks import Ranks
from moesaic.weights.load import load_model


class Absent(nn.Module):
    """A part of the model that another stage has: it hands on what it gets."""

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return `x`."""
        return x


class StageCut:
    """What one of several stages has of a model of transformers.

    Args:
        stage: the stage's number.
        count: number of stages.
        meshes: the ranks as transformers' meshes, in which the stages are an axis; None if a stage
            is one rank.
    """

    def __init__(
        self, stage: int, count: int, meshes: TransformersDeviceMesh | None = None
    ) -> None:
        self.stage = stage
        self.count = count
        self.meshes = meshes

    @property
    def is_last(self) -> bool:
        """Whether the stage has the head."""
        return self.stage == self.count - 1

    def layers(self, number: int) -> range:
        """Return the layers that the stage has, of a number of them: as many as other stages, or
        one more in the first ones."""
        per_stage, num_longer = divmod(number, self.count)
        start = self.stage * per_stage + min(self.stage, num_longer)
        length = per_stage + 1 if self.stage < num_longer else per_stage
        return range(start, start + length)

    def cut(self, model: Any) -> None:
        """Take what other stages have out of a model, before its weights are loaded."""
        decoder = decoder_of(model)
        own = self.layers(len(decoder.layers))
        for number in range(len(decoder.layers)):
            if number not in own:
                decoder.layers[number] = Absent()
        is_tied = bool(model.all_tied_weights_keys)
        has_embedding = self.stage == 0 or (is_tied and self.is_last)  # the head may be tied to it
        if not has_embedding:
            decoder.embed_tokens = Absent()
        if not self.is_last:
            decoder.norm = Absent()
            model.set_output_embeddings(Absent())
            model.all_tied_weights_keys = {}  # the head, which may be tied, is not here

    def class_of(self, kind: Any) -> Any:
        """Return a subclass of a class of transformers whose `from_pretrained` loads this stage
        alone; it has the name of its parent, which transformers writes and looks up."""
        cut = self

        class Stage(kind):
            @classmethod
            def prepare_distribute_model(
                cls, distributed_config: Any, device_map: Any = None
            ) -> tuple[Any, Any, Any]:
                """Return the meshes of the stage, in place of those of all ranks."""
                return distributed_config, device_map, cut.meshes

            @classmethod
            def maybe_distribute_model(cls, model: Any, *others: Any) -> Any:
                """Cut the model, then spread what is left over the ranks of the stage."""
                cut.cut(model)
                return super().maybe_distribute_model(model, *others)

        Stage.__name__ = kind.__name__
        Stage.__qualname__ = kind.__qualname__
        Stage.__module__ = kind.__module__
        return Stage

    @contextmanager
    def layers_on_meta(self, model: Any, whole: Any) -> Iterator[None]:
        """Let a stage have all layers of the whole model, those of others on the meta device: so
        adapters draw the numbers that they draw in one process.

        Args:
            model: the stage.
            whole: the model on the meta device, which is not used any more.
        """
        layers = decoder_of(model).layers
        others = decoder_of(whole).layers
        absent = {number: layer for number, layer in enumerate(layers) if isinstance(layer, Absent)}
        for number in absent:
            layers[number] = others[number]
        yield
        for number, layer in absent.items():
            layers[number] = layer


def decoder_of(model: Any) -> Any:
    """Return the part of a causal language model that has its layers."""
    return getattr(model, model.base_model_prefix)


def load_stage(source: str | Path, cut: StageCut, **options: Any) -> Any:
    """Return this rank's stage of a model, with its weights alone; all ranks call it together.

    Args:
        source: as for `load_model`.
        cut: the stage.
        options: as for `load_model`; `distributed_config` spreads experts over the ranks of a
            stage, and only then may be given.
    """
    options.setdefault("distributed_config", DistributedConfig(fsdp_size=1))
    return load_model(source, class_of=cut.class_of, **options)


def require_stages(model: Any, count: int, name: str) -> None:
    """Check that a model can be cut into stages; `model` is on the meta device, and left without
    its layers.

    Raises:
        InputError: its layers are no list, or something else happens between them.
    """
    reason = _unlike_stages(model)
    if reason is not None:
        raise InputError(
            f"--pp {count}: {model.config.model_type} {reason}, so {name} cannot be cut into "
            "stages: leave --pp out"
        )


def _unlike_stages(model: Any) -> str | None:
    """Return why a model cannot be cut into stages, as a predicate; None if it can.

    The model, on the meta device, then runs without its layers: if it can be cut, it returns the
    very tensor that it gets.
    """
    decoder: Any = getattr(model, model.base_model_prefix, None)
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        return "has no list of layers"
    for part in ("embed_tokens", "norm"):
        if not isinstance(getattr(decoder, part, None), nn.Module):
            return "has no embedding before its layers, or no norm after them"
    head = model.get_output_embeddings()
    known = {id(part) for part in (layers, decoder.embed_tokens, decoder.norm, decoder, head)}
    for owner in (model, decoder):
        for name, module in owner.named_children():
            has_parameters = any(True for _ in module.parameters())
            if id(module) not in known and has_parameters:
                return f"has {name} beside its layers"

    for number in range(len(layers)):
        layers[number] = Absent()
    decoder.embed_tokens = Absent()
    decoder.norm = Absent()
    model.set_output_embeddings(Absent())
    model.to_empty(device="cpu")  # of small buffers, such as frequencies of positions
    x = torch.zeros(1, 2, model.config.get_text_config().hidden_size)
    try:
        with torch.no_grad():
            out = model(inputs_embeds=x, use_cache=False).logits
    except Exception as error:  # of the family's code, which may ask a layer for anything
        reason = " ".join(str(error).split())
        return f"does not run without its layers ({reason:.100})"
    is_input = out is x or out._base is x  # a view of all of it, with the same shape
    if out.shape != x.shape or not is_input:
        return "changes what passes between its layers"
    return None


def ranks_in_stages(stages: int, device_type: DeviceType) -> tuple[Ranks, StageCut]:
    """Return all ranks in a number of stages, which divides them, and this rank's stage. The ranks
    of a stage share its experts."""
    per_stage = dist.get_world_size() // stages
    of_all = init_device_mesh(device_type, (stages, per_stage), mesh_dim_names=("pp", "stage"))
    group = keep_timeout(of_all)["stage"].get_group()
    mesh = Mesh.create(ep=per_stage, device_type=device_type, group=group)
    meshes = _meshes(device_type, stages, per_stage) if per_stage > 1 else None
    return Ranks(mesh, of_all), StageCut(of_all.get_local_rank("pp"), stages, meshes)


def _meshes(device_type: str, stages: int, per_stage: int) -> TransformersDeviceMesh:
    """Return all ranks as transformers' meshes, of dense layers and of experts: stages of
    `per_stage` ranks, which share experts (its axis ep) and have data of their own (fsdp)."""
    dense = init_device_mesh(
        device_type, (stages, 1, per_stage, 1), mesh_dim_names=("pp", "dp_replicate", "fsdp", "tp")
    )
    dense = keep_timeout(dense)
    of_experts = init_device_mesh(
        device_type, (stages, 1, 1, per_stage), mesh_dim_names=("pp", "dp_replicate", "efsdp", "ep")
    )
    return TransformersDeviceMesh(dense, keep_timeout(of_experts))
