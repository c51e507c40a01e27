"""Dequantizes the hub's quantized weights as they are read: `fp8.py`'s, mxfp4 (gpt-oss),
`four_bit.py`'s NF4.

The values are those that transformers computes on loading: an element times its scale, in bfloat16.
For mxfp4 that is exact. Only the region that is read is computed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moesaic.errors import InputError
from moesaic.files import read_text
from moesaic.weights import four_bit, fp8
from moesaic.weights.layout import Computed, Readable, Region, ranges
from moesaic.weights.tensor_files import Stored

BLOCKS = "_blocks"
SCALES = "_scales"
"""Suffixes of the tensors of an mxfp4 weight: 16 bytes for each 32 values, and the power of two
that scales these."""
HALF = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP4 = torch.tensor([*HALF, *(-value for value in HALF)])
"""Value of each four-bit code (Open Compute Project, Microscaling Formats, E2M1)."""
METHODS = ("fp8", "mxfp4")
"""Quantizations whose weights can be converted."""
LOADED = (*METHODS, "bitsandbytes")
"""Quantizations whose weights can be loaded."""
QUANTIZATION = "hf_quant_config.json"
"""The file in which NVIDIA's Model Optimizer says how it quantized, if config.json does not."""


def dequantized(
    stored: Mapping[str, Stored], folder: Path
) -> tuple[dict[str, Readable], list[str]]:
    """Return a checkpoint's tensors with quantized ones replaced by their values, in bfloat16 or,
    of NF4, in float32.

    Args:
        stored: the stored tensors, by the hub's names.
        folder: the checkpoint's folder; its config.json gives the block size of fp8.

    Returns:
        the tensors, and what was left behind: scales of activations and of caches of keys and
        values.

    Raises:
        InputError: scales are missing, do not fit the block size or the weights, or weights are in
            another form.
    """
    tensors: dict[str, Readable] = dict(stored)
    table = quantization(folder / "config.json")
    of_fp8 = fp8.Fp8(stored, table, folder)
    left_behind = of_fp8.left_behind
    for name in left_behind:
        del tensors[name]

    for name, tensor in stored.items():
        # the name of the scales if this is a weight of bitsandbytes' `Experts4bit`
        absmax = name.removesuffix("_proj") + "_absmax"
        if name.endswith(BLOCKS) and name.removesuffix(BLOCKS) + SCALES in stored:  # mxfp4
            weight = name.removesuffix(BLOCKS)
            tensors[weight] = _of_mxfp4(stored, weight, folder)
            del tensors[name], tensors[weight + SCALES]
        elif of_fp8.is_weight(name):
            tensors[name], scale_names = of_fp8.values(name)
            for scale_name in scale_names:
                del tensors[scale_name]
        elif name.endswith(four_bit.STATE):  # NF4 of a linear layer
            weight = name.removesuffix(four_bit.STATE)
            tensors[weight] = four_bit.of_linear(stored, weight, folder)
            for part in four_bit.PARTS:
                tensors.pop(weight + part, None)
        elif tensor.dtype == torch.uint8 and absmax in stored:  # NF4 of stacked experts
            hidden = _table(folder / "config.json").get("hidden_size")
            width = hidden if type(hidden) is int else 0  # 0 is refused
            tensors[name] = four_bit.of_experts(
                tensor, scales=stored[absmax], name=name, hidden=width, folder=folder
            )
            del tensors[absmax]
    reasons = [f"{name}: of activations or of a cache, not of a weight" for name in left_behind]
    return tensors, reasons


def _of_mxfp4(stored: Mapping[str, Stored], weight: str, folder: Path) -> Computed:
    """Return the values of an mxfp4 weight, (experts, columns, rows); InputError if its tensors do
    not belong together."""
    blocks = stored[weight + BLOCKS]
    scales = stored[weight + SCALES]
    are_bytes = blocks.dtype == scales.dtype == torch.uint8
    if not are_bytes or blocks.shape != (*scales.shape[:3], 16):
        raise InputError(
            f"{folder}: {weight + BLOCKS} and {weight + SCALES} are not mxfp4 of one shape: "
            "fetch them again"
        )
    experts, rows, groups = scales.shape
    make = partial(_from_mxfp4, blocks, scales)
    return Computed(torch.bfloat16, (experts, 32 * groups, rows), make)


def quantization(path: Path) -> dict[str, Any]:
    """Return how the weights beside a config.json are quantized: its `quantization_config`, or what
    `QUANTIZATION` says.

    Returns:
        the table, empty if they are not quantized.

    Raises:
        InputError: it is no table, or the file is damaged.
    """
    table = _table(path).get("quantization_config")
    if isinstance(table, dict):
        return table
    if table is not None:
        raise InputError(
            f"{path}: quantization_config is not a table of settings: restore the file"
        )

    other_path = path.parent / QUANTIZATION
    if not other_path.exists():
        return {}
    settings = _table(other_path).get("quantization")
    if not isinstance(settings, dict):
        raise InputError(
            f"{other_path}: has no table of settings named quantization: restore the file"
        )
    return {"quant_method": "modelopt", **settings} if settings.get("quant_algo") else {}


def refused_quantization(path: Path, methods: Sequence[str]) -> str:
    """Return why weights that are quantized as a config.json says are not read; empty if they are
    read, or not quantized.

    Args:
        methods: quantizations that the caller can read.

    Raises:
        InputError: see `quantization`.
    """
    table = quantization(path)
    kind, detail = _kind_of(table)
    if not table or kind in methods:
        return ""
    named = f"{table.get('quant_method')}, {detail}" if detail else str(table.get("quant_method"))
    known = f"{', '.join(methods[:-1])} and {methods[-1]}"
    # who only loads weights (`LOADED`) converts nothing, and is to name another checkpoint
    verb = "convert" if tuple(methods) == METHODS else "name"
    return (
        f"the weights are quantized ({named}), and only {known} are read: {verb} the checkpoint "
        "that they were quantized from"
    )


def _kind_of(table: Mapping[str, Any]) -> tuple[str, str]:
    """Return the quantization of `LOADED` that a table describes ("" for another one), and how it
    says that weights are stored ("" if nothing is to be said)."""
    method = table.get("quant_method")
    if method == "fbgemm_fp8":
        return "fp8", ""
    if method in LOADED:
        return str(method), ""
    algorithm = table.get("quant_algo")
    if method == "modelopt" and isinstance(algorithm, str):  # it names the numbers
        is_fp8 = re.match(r"(MX)?FP8|MIXED_PRECISION", algorithm)
        return ("fp8" if is_fp8 else ""), algorithm

    # The others describe the numbers of weights in tables, of which all must be fp8.
    of_weights = []
    settings = table.get("global_quant_config")
    if method in ("compressed-tensors", "modelopt"):
        sparse = table.get("sparsity_config")
        if isinstance(sparse, dict) and sparse.get("format", "dense") != "dense":
            return "", f"sparse, {sparse['format']}"
        groups = table.get("config_groups")
        tables = groups.values() if isinstance(groups, dict) else ()
        of_weights = [each.get("weights") for each in tables if isinstance(each, dict)]
    elif method == "quark" and isinstance(settings, dict):
        of_weights = [settings.get("weight")]

    kinds = {_in_words(each) for each in of_weights if isinstance(each, dict)}
    are_fp8 = bool(kinds) and kinds <= {"float of 8 bits", "fp8_e4m3", "fp8_e5m2"}
    return ("fp8" if are_fp8 else ""), " and ".join(sorted(kinds))


def _in_words(weights: Mapping[str, Any]) -> str:
    """Return the numbers in which a table of compressed-tensors or quark says that weights are
    stored."""
    if "dtype" in weights:
        return str(weights["dtype"])
    return f"{weights.get('type')} of {weights.get('num_bits')} bits"


def _table(path: Path) -> dict[str, Any]:
    """Return the entries of a config.json; empty if there is none, and one that is no configuration
    if it is damaged."""
    try:
        table = json.loads(read_text(path)) if path.exists() else {}
    except (OSError, ValueError, RecursionError):
        table = None
    # `quantization` refuses a quantization_config that is text
    return table if isinstance(table, dict) else {"quantization_config": "damaged"}


def _from_mxfp4(blocks: Stored, scales: Stored, at: Region) -> Tensor:
    """Return a region of a weight (experts, columns, rows) in bfloat16.

    Args:
        blocks: (experts, rows, groups, 16 bytes), two FP4 codes a byte, the first in the low bits.
        scales: (experts, rows, groups), the power of two of each group of 32 columns, plus 127.
    """
    experts, columns, rows = ranges(at)
    groups = range(columns[0] // 32, columns[-1] // 32 + 1)
    packed = torch.from_numpy(blocks.read((experts, rows, groups, range(16)))).view(torch.uint8)
    biased = torch.from_numpy(scales.read((experts, rows, groups))).view(torch.uint8)
    powers = biased.int() - 127

    low = FP4[(packed & 15).long()]
    high = FP4[(packed >> 4).long()]
    of_groups = torch.stack([low, high], -1).flatten(-2)  # (experts, rows, groups, 32)
    scaled = torch.ldexp(of_groups, powers.unsqueeze(-1))
    values = scaled.bfloat16().flatten(-2)  # (experts, rows, columns of these groups)

    picked = values[..., torch.tensor(list(columns)) - 32 * groups[0]]
    sizes = [len(dim) for dim in at if isinstance(dim, range)]
    return picked.transpose(1, 2).reshape(sizes)
