"""Megatron-Core checkpoints of format torch_dist: Megatron's names, in files of
torch.distributed.checkpoint.

If all layers have the same structure, Megatron stacks each kind of tensor over all layers, with the
layer as first dimension. Otherwise each layer's names contain its number. Gate and up projection
are the upper and lower half of one tensor. Queries, keys and values are one tensor too, interleaved
by groups of heads: a group is a key head, its value head, and the query heads that attend to them.

The rules below name transformers' tensors on the left and Megatron's on the right; a `Place` says
which rows of a joint tensor are ours.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from moesaic.errors import InputError
from moesaic.files import write, writing
from moesaic.weights.layout import Computed, Readable, Region, StoredBlock
from moesaic.weights.model_tensors import (
    LAYER,
    AbstractFormat,
    Architecture,
    Part,
    Place,
    Rules,
    by_rules,
    half,
)
from moesaic.weights.tensor_files import opened, read_dcp, write_dcp

OUTSIDE = {
    "model.embed_tokens.weight": "embedding.word_embeddings.weight",
    "model.norm.weight": "decoder.final_layernorm.weight",
    "lm_head.weight": "output_layer.weight",
}


def grouped(projection: str) -> Place:
    """Return the place of a projection, "q", "k" or "v", in Megatron's joint tensor.

    In blocks of one head's rows, the joint tensor holds group after group, of a group its queries,
    their gates (if any), its key and its value.
    """

    def place(part: Part, config: Any) -> Iterator[tuple[str, range, range]]:
        """Yield (suffix of the name, rows of the part, rows of the joint tensor) of each block."""
        num_groups = config.num_key_value_heads
        queries_per_group = config.num_attention_heads // num_groups
        has_gates = config.model_type == "qwen3_next"
        gates_per_group = queries_per_group if has_gates else 0
        key_within_group = queries_per_group + gates_per_group
        value_within_group = key_within_group + 1
        blocks_per_group = value_within_group + 1

        # by block of the part, its place within its group's blocks of the joint tensor
        places = {"q": [], "k": [key_within_group], "v": [value_within_group]}[projection]
        if projection == "q":  # of each head its query and then, if there are gates, its gate
            for query in range(queries_per_group):
                places.append(query)
                if has_gates:
                    places.append(queries_per_group + query)

        num_blocks = num_groups * len(places)
        block_rows = part.shape[part.rows] // num_blocks
        for block in range(num_blocks):
            group, place_in_group = divmod(block, len(places))
            joint_block = group * blocks_per_group + places[place_in_group]
            yield "", _block(block, block_rows), _block(joint_block, block_rows)

    return place


def _block(number: int, width: int) -> range:
    """Return the rows of one of consecutive blocks of `width` rows."""
    return range(number * width, (number + 1) * width)


def cut(part: Part, config: Any) -> Iterator[tuple[str, range, range]]:
    """Split an input projection of linear attention, or its convolution, into tensors for q, k, v,
    z, beta and alpha.

    Yields:
        (suffix of the tensor's name, rows of the part, rows of that tensor).
    """
    heads = config.linear_num_key_heads
    key_rows = config.linear_key_head_dim
    value_heads_per_key = config.linear_num_value_heads // heads
    value_rows = value_heads_per_key * config.linear_value_head_dim

    # Rows that a head has of each kind: the part holds all kinds of the first head, then of the
    # second one, except in the convolution, which holds all heads of a kind.
    rows_of = {"query": key_rows, "key": key_rows, "value": value_rows, "z": value_rows}
    if part.tensor.endswith("in_proj_ba.weight"):
        rows_of = {"beta": value_heads_per_key, "alpha": value_heads_per_key}
    elif part.tensor.endswith("conv1d.weight"):
        rows_of = {"query": heads * key_rows, "key": heads * key_rows, "value": heads * value_rows}
        heads = 1

    row = 0
    for head in range(heads):
        for kind, num_rows in rows_of.items():
            yield f".{kind}", range(row, row + num_rows), _block(head, num_rows)
            row += num_rows


ATTENTION: Rules = {
    **{
        f"self_attn.{name}_proj.{kind}": (f"self_attention.linear_qkv.{kind}", grouped(name))
        for name in "qkv"
        for kind in ("weight", "bias")
    },
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "self_attn.o_proj.weight": "self_attention.linear_proj.weight",
    "self_attn.o_proj.bias": "self_attention.linear_proj.bias",
    "self_attn.q_norm.weight": "self_attention.q_layernorm.weight",
    "self_attn.k_norm.weight": "self_attention.k_layernorm.weight",
    "self_attn.sinks": "self_attention.core_attention.softmax_offset",
}
LINEAR_ATTENTION: Rules = {
    "input_layernorm.weight": "self_attention.in_proj.layer_norm_weight",
    "linear_attn.in_proj_qkvz.weight": ("self_attention.in_proj.weight", cut),
    "linear_attn.in_proj_ba.weight": ("self_attention.in_proj.weight", cut),
    "linear_attn.conv1d.weight": ("self_attention.conv1d.weight", cut),
    "linear_attn.norm.weight": "self_attention.out_norm.weight",
    "linear_attn.out_proj.weight": "self_attention.out_proj.weight",
    "linear_attn.A_log": "self_attention.A_log",
    "linear_attn.dt_bias": "self_attention.dt_bias",
}
LATENT_ATTENTION: Rules = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attn.q_proj.weight": "self_attention.linear_q_proj.weight",
    "self_attn.q_a_proj.weight": "self_attention.linear_q_down_proj.weight",
    "self_attn.q_a_layernorm.weight": "self_attention.linear_q_up_proj.layer_norm_weight",
    "self_attn.q_b_proj.weight": "self_attention.linear_q_up_proj.weight",
    "self_attn.kv_a_proj_with_mqa.weight": "self_attention.linear_kv_down_proj.weight",
    "self_attn.kv_a_layernorm.weight": "self_attention.linear_kv_up_proj.layer_norm_weight",
    "self_attn.kv_b_proj.weight": "self_attention.linear_kv_up_proj.weight",
    "self_attn.o_proj.weight": "self_attention.linear_proj.weight",
}
DENSE: Rules = {
    "post_attention_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
    "mlp.gate_proj.weight": ("mlp.linear_fc1.weight", half(0)),
    "mlp.up_proj.weight": ("mlp.linear_fc1.weight", half(1)),
    "mlp.down_proj.weight": "mlp.linear_fc2.weight",
}
SPARSE: Rules = {
    "post_attention_layernorm.weight": "pre_mlp_layernorm.weight",
    "mlp.gate.weight": "mlp.router.weight",
    "mlp.gate.e_score_correction_bias": "mlp.router.expert_bias",
    "mlp.router.weight": "mlp.router.weight",
    "mlp.router.bias": "mlp.router.bias",
    "block_sparse_moe.router.weight": "mlp.router.weight",
    "mlp.shared_expert_gate.weight": "mlp.shared_experts.gate_weight",
    **{
        f"mlp.{shared}.{name}_proj.weight": ("mlp.shared_experts.linear_fc1.weight", half(number))
        for shared in ("shared_expert", "shared_experts")
        for number, name in enumerate(("gate", "up"))
    },
    **{
        f"mlp.{shared}.down_proj.weight": "mlp.shared_experts.linear_fc2.weight"
        for shared in ("shared_expert", "shared_experts")
    },
    **{
        f"{moe}.experts.{name}{ending}": (f"mlp.experts.experts.linear_fc1.{kind}", half(number))
        for moe in ("mlp", "block_sparse_moe")
        for ending, kind in (("", "weight"), ("_bias", "bias"))
        for number, name in enumerate(("gate", "up"))
    },
    **{
        f"{moe}.experts.down{ending}": f"mlp.experts.experts.linear_fc2.{kind}"
        for moe in ("mlp", "block_sparse_moe")
        for ending, kind in (("", "weight"), ("_bias", "bias"))
    },
}


class Megatron(AbstractFormat):
    """Megatron-Core's torch_dist format.

    Reads the newest iteration below the given folder, or the given folder itself if it is that of
    an iteration.
    """

    title = "Megatron-Core"
    folder = "release"
    """Folder of a checkpoint that does not belong to an iteration."""

    def _inside(self, folder: Path) -> Path:
        """Return the folder of the latest iteration, or the folder itself if none is noted."""
        mark = folder / "latest_checkpointed_iteration.txt"
        if not mark.exists():
            return folder
        with opened(mark) as file:
            # a number, or "release" for weights of no iteration
            iteration = file.read(100).decode(errors="replace").strip()
        if iteration.isdecimal() and len(iteration) < 10:
            return folder / f"iter_{int(iteration):07}"
        return folder / self.folder

    def recognises(self, folder: Path) -> bool:
        inside = self._inside(folder)
        if not (inside / ".metadata").exists():
            return False
        tensors, _ = read_dcp(inside)
        return OUTSIDE["model.embed_tokens.weight"] in tensors

    def read(self, folder: Path) -> tuple[Mapping[str, Readable], list[str]]:
        tensors, others = read_dcp(self._inside(folder))
        return {name.removeprefix("chained_0."): tensor for name, tensor in tensors.items()}, others

    def write(self, folder: Path, tensors: Mapping[str, Readable]) -> None:
        """Write a checkpoint as Megatron does, with the files by which it recognises one."""
        inside = folder / self.folder
        write_dcp(inside, tensors)
        kind = {
            "sharded_backend": "torch_dist",
            "sharded_backend_version": 1,
            "common_backend": "torch",
            "common_backend_version": 1,
        }
        write(inside / "metadata.json", json.dumps(kind))
        with writing(inside / "common.pt") as file:
            torch.save({"checkpoint_version": 3.0, "iteration": 0}, file)
        write(folder / "latest_checkpointed_iteration.txt", "release")

    def converted(self, stored: str, tensor: Readable, *, to_model: bool) -> Readable:
        """Add 1 to norms that Megatron stores minus one, or subtract it.

        Reading raises InputError where rounding would lose the value.
        """
        if not stored.endswith("self_attention.out_norm.weight"):
            return tensor

        def make(at: Region) -> torch.Tensor:
            """Return the converted values of a region."""
            values = torch.from_numpy(tensor.read(at)).view(tensor.dtype)
            moved = values + 1 if to_model else values - 1
            if not to_model and not torch.equal(moved + 1, values):
                raise InputError(
                    f"{stored} is stored minus one, which {tensor.dtype} cannot undo: convert "
                    "to another format"
                )
            return moved

        return Computed(tensor.dtype, tensor.shape, make)

    def stored_name(self, stored: str, state: str | None) -> str | None:
        if state == "step":
            return None  # Megatron keeps one step for all parameters, in another file
        return stored if state is None else f"optimizer.state.{state}.{stored}"

    def blocks(self, model: Architecture, names: Collection[str]) -> Iterator[StoredBlock]:
        """Yield where each tensor lies in Megatron's checkpoint, whose layers are stacked if all
        are alike."""
        layers: dict[int, set[str]] = {}  # number of a layer -> names of its tensors
        for name in model.shapes:
            if match := LAYER.fullmatch(name):
                layers.setdefault(int(match[1]), set()).add(match[2])
        if names:  # a checkpoint that is read tells it by its names
            is_stacked = not any(name.startswith("decoder.layers.0.") for name in names)
        else:
            is_stacked = len({frozenset(tensors) for tensors in layers.values()}) == 1

        has_latent_attention = any("kv_a_proj_with_mqa" in name for name in model.shapes)
        linear_layers = {
            layer for layer, tensors in layers.items() if "linear_attn.A_log" in tensors
        }
        # names of experts modules are as model.layers.N.mlp.experts
        sparse_layers = {int(name.split(".")[2]) for name in model.experts}

        def rules(layer: int) -> Rules:
            """Return the rules of a layer, given its number."""
            attention = LATENT_ATTENTION if has_latent_attention else ATTENTION
            if layer in linear_layers:
                attention = LINEAR_ATTENTION
            return {**attention, **(SPARSE if layer in sparse_layers else DENSE)}

        prefix = "decoder.layers." if is_stacked else "decoder.layers.{}."
        return by_rules(model, OUTSIDE, rules, layer_prefix=prefix, stacked=is_stacked)
