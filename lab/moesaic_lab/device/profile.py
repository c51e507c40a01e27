"""Measures what the planner needs of a GPU: rates of matrix products, of experts by number of rows,
and of copies, and memory.

The result describes a cluster of one device, which `moesaic plan --cluster cluster.json` reads. One
GPU cannot measure links: copy the `[device]` table into a file that describes the links.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from pathlib import Path

import torch

from moesaic.configfile import as_json
from moesaic.measure.compute import expert_step
from moesaic.planner.cluster import ClusterSpec, Device, Tflops
from moesaic_lab.device.timing import GIB, dense_tflops, seconds_of


@dataclass(frozen=True, kw_only=True)
class ProfileSizes:
    """Sizes of the measured operations."""

    dense: int = 8192
    """Size of the square matrices whose product gives the rate of a dtype."""
    experts: tuple[int, int, int] = (4096, 1024, 16)
    """(dim, hidden, number) of the timed experts."""
    rows: tuple[int, ...] = (16, 64, 256, 1024, 4096)
    """Rows per expert, each timed by itself."""
    copied: int = 65536
    """Rows, of dim elements each, that a timed copy permutes."""


DRY = ProfileSizes(dense=64, experts=(32, 16, 2), rows=(4, 16), copied=64)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def cluster_of(sizes: ProfileSizes, device: str, name: str, memory_gib: float) -> ClusterSpec:
    """Measure one device and return its description as a cluster.

    Args:
        sizes: sizes of the measured operations.
        device: torch's name of the device, "cpu" or "cuda".
        name: the device's name in the description.
        memory_gib: the device's memory in GiB.
    """
    dim, hidden, num_experts = sizes.experts
    dense_rates = {
        dtype_name: dense_tflops(sizes.dense, dtype, device) for dtype_name, dtype in DTYPES.items()
    }
    dense_rates["tf32"] = _tf32(sizes.dense, device)

    expert_rates = {}  # TFLOP/s by rows per expert
    for rows in sizes.rows:
        step, flops = expert_step(rows, torch.bfloat16, sizes.experts, device)
        expert_rates[rows] = flops / seconds_of(step) / 1e12

    copied = torch.zeros(sizes.copied, dim, dtype=torch.bfloat16, device=device)
    order = torch.randperm(sizes.copied, device=device)
    copy_seconds = seconds_of(lambda: copied.index_select(0, order))
    bytes_per_second = 2 * copied.nbytes / copy_seconds  # each row is read and written
    return ClusterSpec(
        nodes=1,
        devices_per_node=1,
        name="gpu",
        description=f"one {name}, no links",
        source=(
            f"moesaic bench device, {datetime.datetime.now(datetime.timezone.utc):%F}, torch "
            f"{torch.__version__}"
        ),
        measured=(
            (
                f"device: products of {sizes.dense}; bfloat16 experts {dim} x {hidden}, "
                f"{num_experts} at once, both passes"
            ),
        ),
        device=Device(
            tflops=Tflops(**dense_rates),
            memory_gib=memory_gib,
            memory_gigabytes_per_second=bytes_per_second / 1e9,
            gemm_rows=tuple(map(float, expert_rates)),
            gemm_share=tuple(
                min(rate / dense_rates["bf16"], 1.0) for rate in expert_rates.values()
            ),
        ),
    )


def _tf32(size: int, device: str) -> float:
    """Return the rate of products in TF32, in TFLOP/s."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        return dense_tflops(size, torch.float32, device)
    finally:
        torch.set_float32_matmul_precision(before)


def profile(folder: Path, *, dry: bool) -> int:
    """Measure the device, write its description to cluster.json, and return the exit code 0."""
    if dry:
        cluster = cluster_of(DRY, "cpu", "dry run", 1.0)
    else:
        properties = torch.cuda.get_device_properties(0)
        cluster = cluster_of(ProfileSizes(), "cuda", properties.name, properties.total_memory / GIB)
    (folder / "cluster.json").write_text(as_json(cluster), encoding="utf-8")
    return 0
