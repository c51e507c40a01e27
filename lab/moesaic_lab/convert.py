"""Does a checkpoint survive every format bit by bit, and how much memory does that take?

Tiny random models of nine families are converted from the hub's names into every format and back, and through all formats in a
row; bytes that differ at the end are counted. A larger model, of one layer, is converted from every format into every other in
a process of its own. Its peak resident memory, beyond that after converting a tiny model, is divided by the largest tensor.

    moesaic bench convert --json benchmarks/results/convert.json
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from safetensors.torch import load_file

import moesaic
from moesaic.errors import InputError
from moesaic.weights.checkpoint import FORMATS
from moesaic.weights.layout import BUFFER
from moesaic_lab.benchmark import Benchmark, BenchmarkOptions, Shown, Told, notes_of
from moesaic_lab.claims import Claim
from moesaic_lab.tables import Column

FAMILIES = (
    "mixtral", "qwen2_moe", "qwen3_moe", "qwen3_next", "olmoe", "deepseek_v3", "glm4_moe", "gpt_oss", "granitemoe",
)  # fmt: skip
SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 24, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "num_hidden_layers": 2, "first_k_dense_replace": 1,
    "shared_expert_intermediate_size": 24, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "qk_nope_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "layer_types": None, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
"""Configuration of the tiny models; each family uses the fields that it has."""


@dataclass(frozen=True, kw_only=True)
class ConvertBenchOptions(BenchmarkOptions):
    """Sizes of the model whose memory is measured."""

    hidden: int = 1024
    """Token width of the larger model."""
    intermediate: int = 6144
    """Inner width of each of the larger model's eight experts."""


def save_model(kind: str, folder: Path, dtype: torch.dtype, **sizes: Any) -> None:
    """Save a random model of a family in the hub's files."""
    config = transformers.AutoConfig.for_model(kind, **{**SIZES, **sizes})
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder)


def trip(folder: Path, family: str, through: Sequence[str]) -> dict[str, Any]:
    """Convert a model through formats and back to the hub's names; return the row."""
    row: dict[str, Any] = {"family": family, "through": ", ".join(through), "different_bytes": None, "reason": ""}
    with TemporaryDirectory(dir=folder) as temporary:
        source, here = folder / family, Path(temporary)
        try:
            for number, to in enumerate([*through, "hf"]):
                moesaic.convert(source, here / str(number), to=to, logits=False)
                source = here / str(number)
        except InputError as error:
            return row | {"reason": str(error)}
        before, after = (load_file(path / "model.safetensors") for path in (folder / family, source))
    if before.keys() != after.keys():
        return row | {"different_bytes": sum(tensor.nbytes for tensor in before.values())}
    bits = (
        ((tensor.view(-1).view(torch.uint8), after[name].view(-1).view(torch.uint8))) for name, tensor in before.items()
    )
    return row | {"different_bytes": sum(int((a != b).sum()) if a.shape == b.shape else len(a) for a, b in bits)}


def peak_row(folder: Path, hidden: int, intermediate: int) -> dict[str, Any]:
    """Convert a larger model from every format into every other in another process; return the row of its memory."""
    save_model("mixtral", folder / "tiny", torch.float32)
    sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "num_local_experts": 8, "num_hidden_layers": 1}
    save_model("mixtral", folder / "large", torch.float32, **sizes)
    command = [sys.executable, "-m", "moesaic_lab.convert", str(folder)]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    largest = 8 * 2 * intermediate * hidden * 4
    beyond = json.loads(process.stdout)["beyond"]
    return {
        "largest_bytes": largest,
        "buffer_bytes": BUFFER,
        "peak_bytes": beyond,
        "peak_over_largest": beyond / largest,
    }


def convert_all(folder: Path) -> int:
    """Convert both models from every format into every other; return by how much the larger one raises the peak memory."""
    for name in ("tiny", "large"):
        base = _resident("VmRSS")
        (folder / name).rename(folder / f"{name}-hf")
        for source, to in sorted(permutations(FORMATS, 2), key=lambda pair: pair[0] != "hf"):
            out = folder / f"{name}-{to}" if source == "hf" else folder / f"{name}-{source}-{to}"
            moesaic.convert(folder / f"{name}-{source}", out, to=to, logits=False)
            if source != "hf":
                for path in sorted(out.rglob("*"), reverse=True):
                    path.unlink() if path.is_file() else path.rmdir()
    return _resident("VmHWM") - base


def _resident(which: str) -> int:
    """Return a figure of this process's memory in bytes: "VmRSS" now, "VmHWM" at the peak."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{which}:")]
    return int(line.split()[1]) * 1024


def measure(options: ConvertBenchOptions, cases: None, told: Told) -> list[dict[str, Any]]:
    """Run all conversions, and measure the memory of the larger model."""
    rows = []
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for family in FAMILIES:
            told(family)
            save_model(family, folder / family, torch.bfloat16)
            rows += [trip(folder, family, [name]) for name in FORMATS]
            if all(row["different_bytes"] is not None for row in rows if row["family"] == family):
                rows.append(trip(folder, family, list(FORMATS)))
        told("memory")
        if os.path.exists("/proc/self/status"):
            rows.append(peak_row(folder, options.hidden, options.intermediate))
    return rows


def claims(rows: list[dict[str, Any]]) -> list[Claim]:
    """Return the claims of issue 18."""
    trips = [row for row in rows if "through" in row]
    worst = max(row["different_bytes"] for row in trips if row["different_bytes"] is not None)
    peaks = [row["peak_over_largest"] for row in rows if "peak_over_largest" in row]
    nowhere = sum(row["different_bytes"] is None for row in trips)
    return [
        Claim(name="convert.roundtrip_worst", value=worst, unit="bytes", target=0, op="<="),
        Claim(
            name="convert.peak_over_largest", value=max(peaks, default=None), unit="1", target=1.2, op="<=",
            reason="" if peaks else "memory of a process is read on Linux only",
        ),
        Claim(name="convert.families_without_a_place", value=nowhere, unit="1", op="<="),
    ]  # fmt: skip


BENCHMARK = Benchmark(
    name="convert", description="Convert checkpoints of nine families between all formats.", options=ConvertBenchOptions,
    notes=notes_of(__doc__), measure=measure, claims=claims, is_proof=True,
    columns=(
        Shown(
            title="there and back", where={"family": FAMILIES}, group_by=("family",),
            columns=(
                Column(key="family", title="family", is_text=True), Column(key="through", title="through", is_text=True),
                Column(key="different_bytes", title="different bytes"),
            ),
        ),
        Shown(title="memory of a larger model", where={"buffer_bytes": (BUFFER,)}),
    ),
    packages=("torch", "numpy", "transformers", "safetensors"),
)  # fmt: skip

if __name__ == "__main__":
    print(json.dumps({"beyond": convert_all(Path(sys.argv[1]))}))
