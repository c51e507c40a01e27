"""Compute time of a rank: experts by their rows, copies and codecs by their bytes.

Small matrix products run far below a device's peak. So an expert's time comes from a curve of the
share of the peak by rows, and is never below the time to read its weights. All other tasks take the
time of their bytes.

An actor is a rank that is simulated: every rank, or one that stands for all. A slot is a named
value of a program, such as the rows of experts; its layout says which of these rows a rank has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from moesaic.codecs import name_of
from moesaic.planner.cluster import ELEMENT_BYTES, ClusterSpec
from moesaic.planner.movement import AbstractVolumes, of_each, row_bytes
from moesaic.planner.workload import Workload
from moesaic.program.task import Kind, Op, Slot, Task


@dataclass(frozen=True, kw_only=True)
class DeviceRates:
    """A device's rates for one dtype."""

    flops: float
    """Operations per second of large dense products."""
    grouped_flops: float
    """Operations per second of large grouped products."""
    rows: tuple[float, ...]
    """Row counts at which `share` is known."""
    share: tuple[float, ...]
    """Share of the rate that a product of that many rows reaches."""
    memory: float
    """Bytes per second of copies."""
    codec: float | None
    """Bytes of rows encoded or decoded per second; None: as copies."""
    codecs: Mapping[str, float] = field(default_factory=dict)
    """The same of single codecs, by name; the others have the rate above."""
    activation_traffic: float = 0.0
    """As in `Device`."""
    cast_bytes: float = 0.0
    """Bytes read and written per value that a product reads, if its numbers are narrower than those
    in memory. Two bytes are read, and one is written by rows and one by columns, for the products
    of the gradients."""

    @cached_property
    def _log_rows(self) -> np.ndarray:
        """Logarithms of `rows`."""
        return np.log(self.rows)

    def product_seconds(
        self, rows: np.ndarray, flops_per_row: float, weight_bytes: float, *, grouped: bool = False
    ) -> np.ndarray:
        """Return the seconds of dense products, or of grouped ones of an expert each, (n,).

        The share is interpolated over the logarithm of the rows. Below the first point a product
        takes as long as at that point; above the last point the share is constant. No product is
        faster than reading its weights.

        Args:
            rows: (n,) rows of each product.
            flops_per_row: 2 * columns in * columns out, summed over the matrices.
            weight_bytes: bytes of one product's weights.
            grouped: whether the products are those of experts, each with rows of its own.
        """
        flops = self.grouped_flops if grouped else self.flops
        has_rows = rows > 0
        clamped_rows = np.maximum(rows[has_rows], self.rows[0])
        share = np.interp(np.log(clamped_rows), self._log_rows, self.share)
        computing = clamped_rows * flops_per_row / (flops * share)
        reading = weight_bytes / self.memory
        seconds = np.zeros(len(rows))
        seconds[has_rows] = np.maximum(computing, reading)
        return seconds

    def traffic_seconds(
        self, rows: np.ndarray, dim: int, units: float, matrices: int, element_bytes: int
    ) -> np.ndarray:
        """Return the seconds in which experts' activations are read and written between products,
        (n,).

        A row is read, each product's result is written, read by the next step and written again,
        and the last result is written.

        Args:
            rows: (n,) rows of each expert.
            dim: width of a row.
            units: units of the hidden width.
            matrices: matrices per expert.
            element_bytes: bytes of an activation.
        """
        # the row and the last result once each; the first products' results (matrices - 1) and that
        # of the activation, both written and read
        bytes_per_row = (2 * dim + 2 * matrices * units) * element_bytes
        # what products read: the row, and the activation's result
        cast_bytes_per_row = self.cast_bytes * (dim + units)
        moved_per_row = self.activation_traffic * bytes_per_row + cast_bytes_per_row
        return rows * (moved_per_row / self.memory)


def rates_of(spec: ClusterSpec, dtype: str) -> DeviceRates:
    """Return the rates of a cluster's devices; if they differ, those of the slowest.

    Raises:
        InputError: if the rate of this dtype is unknown.
    """
    device = spec.device
    slowest = min(spec.speeds, default=1.0)
    codec = device.codec_gigabytes_per_second
    return DeviceRates(
        flops=device.flops(dtype) * slowest,
        grouped_flops=device.flops(dtype, grouped=True) * slowest,
        rows=device.gemm_rows,
        share=device.gemm_share,
        memory=device.memory_gigabytes_per_second * 1e9 * slowest,
        codec=None if codec is None else codec * 1e9 * slowest,
        codecs={each.name: each.gigabytes_per_second * 1e9 * slowest for each in device.codecs},
        activation_traffic=device.activation_traffic,
        cast_bytes=4.0 if ELEMENT_BYTES[dtype] < 2 else 0.0,
    )


def sort_seconds(spec: ClusterSpec, copies: float) -> float:
    """Return the seconds in which a rank sorts copies of tokens by expert."""
    # from microseconds for a thousand copies to seconds for one
    return spec.device.sort_us_per_1000_copies * 1e-9 * copies


def router_seconds(
    spec: ClusterSpec, tokens: float, dim: int, num_experts: int, element_bytes: int
) -> tuple[float, float]:
    """Return the seconds in which a rank routes its tokens, forward and backward, without sorting
    the copies.

    Tokens are cast to float32, whose product with the router's matrix gives the scores, as in
    `moesaic.routing`. Both count twice backward, and the small kernels behind them half.
    """
    device = spec.device
    slowest = min(spec.speeds, default=1.0)
    dtype = "fp32" if device.tflops.fp32 else "bf16"  # 0: the rate of float32 is unknown
    product = 2.0 * tokens * dim * num_experts / (device.flops(dtype) * slowest)
    cast = tokens * dim * (element_bytes + 4) / (device.memory_gigabytes_per_second * 1e9 * slowest)
    small_kernels = device.router_us * 1e-6
    forward = small_kernels + product + cast
    backward = small_kernels / 2 + 2 * (product + cast)
    return forward, backward


def compute_seconds(
    task: Task, slots: Mapping[str, Slot], volumes: AbstractVolumes, rates: DeviceRates
) -> np.ndarray:
    """Return the seconds that each actor computes on a task, (actors,); for a movement, the copies
    before and after it.

    On one rank no program runs: the experts' products read tokens in place and write rows in
    experts' order, so nothing is copied before and behind them.

    Args:
        task: any task.
        slots: slots of its program, by name.
        volumes: the rows.
        rates: rates of the devices.
    """
    if task.op in (Op.EXPERT, Op.EXPERT_GRAD):
        return _experts(task, slots, volumes, rates)
    # a move has `of` if a kernel sends its rows as they lie
    needs_no_copies = task.op is Op.MOVE and task.of is not None
    reads_in_place = volumes.topology.world == 1 and task.op in (Op.MOVE, Op.PERMUTE)
    # a hop's messages are packed and unpacked by other tasks; power 0 multiplies by 1
    is_free = task.op is Op.HOP or (task.op is Op.SCALE and task.power == 0)
    if is_free or needs_no_copies or reads_in_place:
        return np.zeros(volumes.num_actors)
    if task.op in (Op.PACK, Op.UNPACK):
        return _coding(task, slots, volumes, rates)
    written = _bytes(task.writes, slots, volumes)
    if task.op is Op.PERMUTE:  # which reads a token for each of its rows
        return 2 * written / rates.memory
    return (_bytes(task.reads, slots, volumes) + written) / rates.memory


def _experts(
    task: Task, slots: Mapping[str, Slot], volumes: AbstractVolumes, rates: DeviceRates
) -> np.ndarray:
    """Return the seconds of a task of experts, (actors,); arguments as of `compute_seconds`."""
    layer = volumes.layer
    read_slots = [slots[name] for name in task.reads]
    rows = next(slot for slot in read_slots if slot.kind is Kind.ROWS)
    weights = next(slot for slot in read_slots if slot.layout.flow == "weights")
    units = layer.hidden * volumes.shards(weights.layout)  # of each expert's hidden width
    flops_per_row = 2.0 * layer.dim * units * layer.matrices
    weight_bytes = layer.dim * units * layer.matrices * layer.weight_bytes
    is_backward = task.op is Op.EXPERT_GRAD
    passes = layer.backward_products if is_backward else 1

    rows_by_expert = volumes.rows_per_expert(rows.layout)  # (actors, experts)
    seconds_by_expert = rates.product_seconds(
        rows_by_expert.reshape(-1), flops_per_row, weight_bytes, grouped=True
    ).reshape(rows_by_expert.shape)
    if rates.activation_traffic or rates.cast_bytes:
        seconds_by_expert += rates.traffic_seconds(
            rows_by_expert, layer.dim, units, layer.matrices, layer.element_bytes
        )
    seconds: np.ndarray = seconds_by_expert.sum(axis=1) * passes
    if layer.frozen_bytes:
        further = frozen_seconds(rows_by_expert, units, layer, rates, is_backward=is_backward)
        seconds += further.sum(axis=1)
    return seconds


def frozen_seconds(
    rows: np.ndarray, units: float, layer: Workload, rates: DeviceRates, *, is_backward: bool
) -> np.ndarray:
    """Return the seconds that frozen experts take in a pass besides their products, in the shape of
    `rows`.

    Weights of fewer bits are read, and written once in the dtype of activations. Adapters take
    their traffic, which exceeds their operations: rows are read, and the result of the second
    factor is written, read and added (`moesaic.experts.frozen.Product`); backward reads rows and
    gradients again for the gradients of both factors.

    Args:
        rows: rows of each expert.
        units: units of the hidden width.
        layer: the layer.
        rates: rates of the devices.
        is_backward: whether it is a backward pass.
    """
    moved_bytes: np.ndarray = np.zeros(rows.shape)
    if layer.frozen_bytes < layer.element_bytes:
        weights = layer.dim * units * layer.matrices
        moved_bytes = (rows > 0) * weights * (layer.frozen_bytes + layer.element_bytes)
    if layer.adapters:
        # Values that adapters read and write per row: of its width, and of each hidden unit.
        # Forward moves each value of a product's input once and of its result 4 times, backward 6
        # and 3 times. The width is that of the first products' input and of the last one's result.
        input_times, result_times = (6, 3) if is_backward else (1, 4)
        row_values = (input_times + result_times) * layer.dim
        # results of the first products, and the input of the last one
        unit_values = result_times * (layer.matrices - 1) + input_times
        values_per_row = row_values + unit_values * units
        moved_bytes = moved_bytes + rows * values_per_row * layer.element_bytes
    seconds: np.ndarray = moved_bytes / rates.memory
    return seconds


def _coding(
    task: Task, slots: Mapping[str, Slot], volumes: AbstractVolumes, rates: DeviceRates
) -> np.ndarray:
    """Return the seconds of encoding rows into messages, or of decoding messages into rows,
    (actors,)."""
    assert task.of is not None
    source, target = task.of  # slots of the movement whose messages are coded
    slot = slots[source if task.op is Op.PACK else target]
    rows = volumes.rows(slot.layout)
    plain_bytes = volumes.bytes_of(slot)
    codec = task.codec if slot.kind is Kind.ROWS else ""  # "": rows are sent as they are
    # also before a rate that needs none, since it refuses rows that the codec does not support
    coded_bytes = of_each(rows, lambda count: row_bytes(slot, codec, count, volumes.layer))
    # plain bytes per second of this codec, else of any; None: as fast as copies
    rate = rates.codecs.get(name_of(codec), rates.codec) if codec else None
    if rate is not None:
        return plain_bytes / rate
    return (plain_bytes + coded_bytes) / rates.memory


def _bytes(
    names: tuple[str, ...], slots: Mapping[str, Slot], volumes: AbstractVolumes
) -> np.ndarray:
    """Return the bytes of rows, tokens and routing weights in some slots, (actors,); packets are
    counted by `_coding`."""
    total = np.zeros(volumes.num_actors)
    for name in names:
        slot = slots[name]
        if slot.kind is not Kind.PACKETS:
            total += volumes.bytes_of(slot)
    return total
