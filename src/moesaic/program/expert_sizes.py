"""The memory that experts need, as plain numbers, one function per kernel.

The kernels import from here how many rows they process at a time; a test compares every function
with the bytes that its kernel allocates (tests/kernels/test_scratch.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

CACHE_BYTES = 2**23
"""The most bytes of a block's scratch memory on a CPU, a part of the last-level cache; measured,
see docs/kernels.md."""
MIN_ROWS = 512
"""`CACHE_BYTES` never limits a block to fewer rows than this: smaller products lose more time than
the cache saves."""
ROW_NUMBER = 16
"""Bytes of the number of a row of a block, int64, and of other single values of it."""
FEWEST = 2**22
"""The fewest multiplications for which a CPU's oneDNN is worth the copies; measured, see
docs/kernels.md."""
WIDEST = 2**16
"""The most numbers of a bfloat16 matrix that a CPU converts for a small product; measured, see
docs/kernels.md."""
STEP = 16
"""oneDNN gets a multiple of this number of rows."""
Phase = Literal["forward", "backward", "waiting", "summing"]
"""What a kernel does: the forward pass, the backward pass, nothing while deferred sums over rows
wait, and these sums."""
Converts = Literal["nothing", "small", "all", "packed"]
"""What a CPU's products copy (`kernels/products.py`): nothing, 16-bit operands of small products or
of all to float32, or float32 operands for oneDNN."""


@dataclass(frozen=True, kw_only=True)
class KernelCall:
    """What decides the scratch memory of a call of a kernel on one rank."""

    rows: Sequence[int]
    """Rows of each expert."""
    dim: int
    """Width of a row."""
    units: int
    """Hidden units of (a shard of) an expert."""
    matrices: int
    """Matrices of an expert."""
    element_bytes: int
    gathers_x: bool
    """The input rows lie in another order than the experts'."""
    places_x: bool
    """The gradients of the input rows, and in the forward pass the results, are written in another
    order than the experts'."""
    phase: Phase
    converts: Converts = "nothing"
    weights_late: bool = False
    """Routing weights are applied after their gradients' dot products, which are summed as float32,
    as with float16, whose weights may be too small to divide by."""

    @property
    def is_backward(self) -> bool:
        """Whether gradients are computed."""
        return self.phase != "forward"

    @property
    def total(self) -> int:
        """Rows of all experts."""
        return int(sum(self.rows))


def block_limit(row_bytes: int) -> int:
    """Return the most rows of a block whose scratch memory takes some bytes per row."""
    return max(CACHE_BYTES // max(row_bytes, 1), MIN_ROWS)


def most_block_rows(rows: Sequence[int], limit: int) -> int:
    """Return the rows of the largest block if experts' rows are cut into blocks of at most `limit`:
    several small experts, one, or part of a large one."""
    largest = filled = 0
    for count in rows:
        for start in range(0, int(count), limit):
            size = min(limit, int(count) - start)
            if filled + size > limit:
                filled = 0
            filled += size
            largest = max(largest, filled)
    return largest


def missing_rows(num_rows: int) -> int:
    """Return how many rows are missing to a number of 16-bit rows that comes again: from `STEP` on,
    at most 16 numbers per doubling do."""
    return -num_rows % max(STEP, 1 << num_rows.bit_length() >> 5) if num_rows > STEP else 0


def by_expert_scratch(call: KernelCall) -> int:
    """Return the bytes that `kernels/by_expert.py` needs beside inputs, results and what it keeps:
    buffers of one block, what the products of an expert's rows copy, and numbers of every row."""
    size = call.element_bytes
    hidden_buffers = call.matrices if call.is_backward else 1
    dim_buffers = 2 if call.is_backward else 1
    limit = block_limit((hidden_buffers * call.units + dim_buffers * call.dim) * size)
    block = most_block_rows(call.rows, limit)
    moments = _moments(call, limit)
    buffers = max(wide * block * call.dim * size + copied for wide, copied in moments)
    gates = 2 * size * call.total
    return gates + block * (hidden_buffers * call.units * size + ROW_NUMBER) + buffers


Moment = tuple[int, int]
"""Buffers of a block's rows as wide as a token that are alive, and bytes that a product copies."""


def _moments(call: KernelCall, limit: int) -> list[Moment]:
    """Return the moments of a phase.

    Forward: the products of the gathered rows, and the last product, whose result is then placed.
    Backward: the products with the weighted gradients of the results, and those with the gradients
    of what reads the token, whose rows are then placed. Sums over rows may be deferred until these
    rows are sent.
    """
    if call.phase == "forward":
        first = _copied_bytes(call, limit, call.dim, call.units)
        last = _copied_bytes(call, limit, call.units, call.dim)
        return [(call.gathers_x, first), (call.gathers_x + call.places_x, last)]
    summed = 1 + call.gathers_x
    if call.phase == "waiting":
        return [(summed, 0)]
    down = _copied_bytes(call, limit, call.dim, call.units)
    up = _copied_bytes(call, limit, (call.matrices - 1) * call.units, call.dim)
    if call.phase == "summing":
        return [(summed, max(down, up))]
    dots = 12 * most_block_rows(call.rows, limit) * (call.units + 4) * call.weights_late
    late = int(call.weights_late)
    first = 1 + (late and not call.places_x)  # rows in place are weighted as they are gathered
    return [(first, dots), (1 + late, down), (summed + late + call.places_x, up)]


def _copied_bytes(call: KernelCall, limit: int, first: int, second: int) -> int:
    """Return the most bytes that a product of one expert's rows, of one width, with a matrix, or a
    sum over them with rows of the other width, copies."""
    if call.converts == "nothing":
        return 0
    counts = {min(int(count), limit) for count in call.rows}
    return max((_copied(call, count, first, second, first * second) for count in counts), default=0)


def _copied(call: KernelCall, rows: int, first: int, second: int, size: int) -> int:
    """Return the bytes that a product copies of `rows` rows of two widths, `size` being the numbers
    of the matrix that it reads or makes."""
    numbers = rows * (first + second) + size
    if call.converts == "packed":
        return 4 * numbers if rows * size >= FEWEST else 0
    if call.converts == "all" or (size <= WIDEST and rows * size < FEWEST):
        return 4 * numbers
    missing = missing_rows(rows)
    return 2 * (rows + missing) * (first + second) if missing else 0


def whole_batch_scratch(call: KernelCall) -> int:
    """Return the bytes that `kernels/whole_batch.py` needs, and at most what the Triton kernels
    need: the same buffers of all rows. Counted, not measured on a GPU."""
    if call.is_backward:
        hidden_buffers = call.matrices + 2
        wide = 1 + 2 * call.gathers_x + call.places_x + 1
    else:
        hidden_buffers = 1
        wide = 1 + call.gathers_x + call.places_x
    return call.total * (
        (hidden_buffers * call.units + wide * call.dim) * call.element_bytes + ROW_NUMBER
    )


def products_scratch(call: KernelCall) -> int:
    """Return the bytes that grouped products without fused activations need: the activation's
    result, and backward its gradient and those of the products that read the token."""
    hidden_buffers = 1 + call.matrices if call.is_backward else 1
    return call.total * hidden_buffers * call.units * call.element_bytes


SCRATCH: dict[str, Callable[[KernelCall], int]] = {
    "cpu": by_expert_scratch,
    "triton": whole_batch_scratch,
    "other": whole_batch_scratch,
    "products": products_scratch,
}
"""Scratch memory by kind of device, as in `kernels.pick.KERNELS`, and that of other systems'
products."""


@dataclass(frozen=True, kw_only=True)
class ExpertSizes:
    """Memory of experts, in numbers of the layer's dtype."""

    dim: int
    """Width of a token."""
    units: int
    """Rows into which one shard of an expert is packed when weights are sent: its hidden units."""
    unit_numbers: int
    """Numbers per packed row."""
    kept: int
    """Numbers per row that experts keep from forward to backward besides the row."""
    forward: int = 0
    """Temporary numbers per row in the forward pass, besides input, result and what is kept, of
    experts without a `kernel`."""
    backward: int = 0
    """Temporary numbers per row in the backward pass, besides the input, its gradient, the result's
    gradient and what was kept, of experts without a `kernel`."""
    element_bytes: int
    kernel: str = ""
    """Key of `SCRATCH` for built-in experts, which then have no temporary numbers per row."""
    hidden: int = 0
    """Hidden units of one shard of a built-in expert."""
    matrices: int = 3
    """Matrices of a built-in expert."""
    converts: Converts = "nothing"
    """As in `KernelCall`."""
    weights_late: bool = False
    """As in `KernelCall`."""

    @classmethod
    def stacked(
        cls,
        dim: int,
        units: int,
        matrices: int,
        element_bytes: int,
        *,
        bias: bool = False,
        kernel: str = "cpu",
        converts: Converts = "nothing",
        weights_late: bool = False,
    ) -> ExpertSizes:
        """Return the sizes of built-in experts, which keep the results of all matrices that read
        the token.

        Args:
            dim: width of a token.
            units: hidden units of one shard of an expert.
            matrices: matrices per expert: 3 for SwiGLU, 2 for plain experts.
            element_bytes: bytes of a number.
            bias: whether experts have biases.
            kernel: key of `SCRATCH`.
            converts, weights_late: as in `KernelCall`.
        """
        return cls(
            dim=dim,
            units=units,
            unit_numbers=matrices * dim + (matrices - 1) * bias,
            kept=(matrices - 1) * units,
            element_bytes=element_bytes,
            kernel=kernel,
            hidden=units,
            matrices=matrices,
            converts=converts,
            weights_late=weights_late,
        )

    def scratch(
        self, rows: Sequence[int], shards: int, *, gathers_x: bool, places_x: bool, phase: Phase
    ) -> int:
        """Return the temporary bytes of an expert task.

        Args:
            rows: rows of each expert.
            shards: shards of the hidden width that the task computes.
            gathers_x, places_x, phase: as in `KernelCall`.
        """
        if not self.kernel:
            numbers = self.forward if phase == "forward" else self.backward
            return int(sum(rows)) * numbers * shards * self.element_bytes
        call = KernelCall(
            rows=rows,
            dim=self.dim,
            units=self.hidden * shards,
            matrices=self.matrices,
            element_bytes=self.element_bytes,
            gathers_x=gathers_x,
            places_x=places_x,
            phase=phase,
            converts=self.converts,
            weights_late=self.weights_late,
        )
        return SCRATCH[self.kernel](call)
