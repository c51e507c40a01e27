"""The memory that experts need, as plain numbers, one function per kernel.

Scratch memory is what a kernel allocates and frees while it runs. A kernel may process rows in
blocks, so that its scratch memory fits the cache; a block has rows of several small experts, of
one, or of a part of a large one. The kernels import from here how many rows a block has; a test
compares every function with the bytes that its kernel allocates (tests/kernels/test_scratch.py).

`dim` is the width of a token, `units` the hidden width of an expert or of a shard of one.
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
    gathers_dy: bool
    """The gradients of the results lie in another order than the experts'; ignored in the forward
    pass."""
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
    """Return the most rows of a block whose scratch memory takes `row_bytes` a row, which may be
    0."""
    return max(CACHE_BYTES // max(row_bytes, 1), MIN_ROWS)


def block_sizes(rows: Sequence[int], limit: int) -> list[int]:
    """Return the rows of each block if experts' rows, in order, are cut into blocks of at most
    `limit` rows."""
    sizes: list[int] = []
    in_block = limit  # as if a full block came before the first
    for count in rows:
        for start in range(0, int(count), limit):
            size = min(limit, int(count) - start)
            if in_block + size > limit:  # a new block
                in_block = 0
                sizes.append(0)
            in_block += size
            sizes[-1] = in_block
    return sizes


def most_block_rows(rows: Sequence[int], limit: int) -> int:
    """Return the rows of the largest of these blocks; 0 if there are none."""
    return max(block_sizes(rows, limit), default=0)


def missing_rows(num_rows: int) -> int:
    """Return how many rows pad a product of 16-bit rows to one of few sizes, so that sizes recur:
    a multiple of `STEP`, and of a sixteenth to a 32nd of the number itself. Up to `STEP` rows are
    not padded."""
    if num_rows <= STEP:
        return 0
    next_power_of_two = 1 << num_rows.bit_length()  # above the number, at most twice it
    multiple = max(STEP, next_power_of_two >> 5)  # a 32nd of that power
    return -num_rows % multiple  # up to the next multiple


def by_expert_scratch(call: KernelCall) -> int:
    """Return the bytes that `kernels/by_expert.py` needs beside inputs, results and what it keeps:
    buffers of one block, what the products of an expert's rows copy, and numbers of every row."""
    size = call.element_bytes
    # Blocks are cut so that these buffers fit the cache. (rows, units): the hidden rows and,
    # backward, the gradients of the pre-activations. (rows, dim): gathered rows and, backward,
    # weighted ones.
    hidden_buffers = call.matrices if call.is_backward else 1
    dim_buffers = 2 if call.is_backward else 1
    limit = block_limit((hidden_buffers * call.units + dim_buffers * call.dim) * size)
    block_rows = most_block_rows(call.rows, limit)

    # of every row, its routing weight in the rows' dtype and that weight's gradient, forward too
    gate_bytes = 2 * size * call.total
    # all of a block's (rows, units) are alive throughout; how many (rows, dim) are, moments tell
    hidden_bytes = block_rows * (hidden_buffers * call.units * size + ROW_NUMBER)
    buffer_bytes = block_rows * call.dim * size
    most_at_a_moment = max(
        buffers * buffer_bytes + copied for buffers, copied in _moments(call, limit)
    )
    return gate_bytes + hidden_bytes + most_at_a_moment


Moment = tuple[int, int]
"""What is alive at one moment of a kernel: how many buffers of (block's rows, dim), and the bytes
that a product copies."""


def _moments(call: KernelCall, limit: int) -> list[Moment]:
    """Return the moments of a phase at which most memory may be alive.

    Forward: the products of the gathered rows, and the last product, whose result is then placed.
    Backward: the products with the weighted gradients of the results, and those with the gradients
    of what reads the token, whose rows are then placed. Sums over rows may be deferred until these
    rows are sent.

    Args:
        limit: the most rows of a block.
    """
    gathered = int(call.gathers_x)
    placed = int(call.places_x)
    if call.phase == "forward":
        first = _copied_bytes(call, limit, call.dim, call.units)
        last = _copied_bytes(call, limit, call.units, call.dim)
        # the gathered rows, and the results before they are in their places
        return [(gathered, first), (gathered + placed, last)]
    for_sums = 1 + gathered  # the weighted gradients of the results, and the gathered rows
    if call.phase == "waiting":
        return [(for_sums, 0)]
    down = _copied_bytes(call, limit, call.dim, call.units)
    up = _copied_bytes(call, limit, (call.matrices - 1) * call.units, call.dim)
    if call.phase == "summing":
        return [(for_sums, max(down, up))]
    if call.weights_late:
        # all buffers are there at up's products, and in later blocks at down's too
        at_products = (_late_buffers(call), max(down, up))
        return [*_moments_before_weights(call, limit), at_products]
    # the weighted gradients; then what sums read, and the rows' gradients before their places
    return [(1, down), (for_sums + placed, up)]


def _late_buffers(call: KernelCall) -> int:
    """Return how many buffers of (block's rows, dim) a backward pass has from its first block's end
    on if it applies weights late: one for the weighted gradients of the results, and one for each
    kind of rows in another order."""
    return 1 + int(call.gathers_dy) + int(call.gathers_x) + int(call.places_x)


def _moments_before_weights(call: KernelCall, limit: int) -> list[Moment]:
    """Return the moments of the dot products that come before weights are applied, of the first
    block and of the largest later one.

    Args:
        limit: the most rows of a block.
    """
    first, *later = block_sizes(call.rows, limit) or [0]
    # both factors as float32, and their product
    dot_bytes = 3 * 4 * call.units
    # Buffers are allocated at their first use and then kept. The first block has used that of the
    # gathered gradients of the results alone; for a later block, all are there.
    return [
        (int(call.gathers_dy), first * dot_bytes),
        (_late_buffers(call), max(later, default=0) * dot_bytes),
    ]


def _copied_bytes(call: KernelCall, limit: int, first: int, second: int) -> int:
    """Return the most bytes that a product of one expert's rows in a block copies: (rows, first) @
    (first, second), or (first, rows) @ (rows, second)."""
    if call.converts == "nothing":
        return 0
    counts = {min(int(count), limit) for count in call.rows}
    return max((_copied(call, count, first, second) for count in counts), default=0)


def _copied(call: KernelCall, rows: int, first: int, second: int) -> int:
    """Return the bytes that a product copies: (rows, first) @ (first, second), or (first, rows) @
    (rows, second). `FEWEST` and `WIDEST` say when a product is small."""
    matrix = first * second  # numbers of the matrix that it reads or makes
    float32_bytes = 4 * (rows * (first + second) + matrix)
    multiplications = rows * matrix
    if call.converts == "packed":
        return float32_bytes if multiplications >= FEWEST else 0
    is_small = matrix <= WIDEST and multiplications < FEWEST
    if call.converts == "all" or is_small:
        return float32_bytes
    # A larger product of 16-bit rows copies them only to pad them.
    missing = missing_rows(rows)
    bytes_of_16_bits = 2
    return bytes_of_16_bits * (rows + missing) * (first + second) if missing else 0


def whole_batch_scratch(call: KernelCall) -> int:
    """Return the bytes that `kernels/whole_batch.py` needs: buffers of all rows. For the Triton
    kernels, which need no more, it is an upper bound. Counted, not measured on a GPU."""
    # How many buffers of (rows, units) and of (rows, dim) are alive at once.
    gathered = int(call.gathers_x)
    placed = int(call.places_x)
    if call.is_backward:
        # The gradients of the pre-activations (one less than matrices), the hidden rows, their
        # gradients, and the products of these two that give the gradients of routing weights.
        hidden_buffers = call.matrices + 2
        # At most: weighted gradients of the results, and gradients of the inputs; the results'
        # gradients and the inputs, if gathered; and the rows that are then placed.
        dim_buffers = 2 + 2 * gathered + placed
    else:
        hidden_buffers = 1  # the hidden rows
        dim_buffers = 1 + gathered + placed  # results, gathered inputs, results before their places
    numbers_per_row = hidden_buffers * call.units + dim_buffers * call.dim
    return call.total * (numbers_per_row * call.element_bytes + ROW_NUMBER)


def products_scratch(call: KernelCall) -> int:
    """Return the bytes that grouped products without fused activations need: the activation's
    result, and backward its gradient and those of the products that read the token."""
    # Backward: two of the activation, and one of each matrix but the last.
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
            # of each matrix a row or a column, of each that reads the token a bias
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
        self,
        rows: Sequence[int],
        shards: int,
        *,
        gathers_x: bool,
        gathers_dy: bool,
        places_x: bool,
        phase: Phase,
    ) -> int:
        """Return the temporary bytes of an expert task.

        Args:
            rows: rows of each expert.
            shards: shards of the hidden width that the task computes.
            gathers_x, gathers_dy, places_x, phase: as in `KernelCall`.
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
            gathers_dy=gathers_dy,
            places_x=places_x,
            phase=phase,
            converts=self.converts,
            weights_late=self.weights_late,
        )
        return SCRATCH[self.kernel](call)
