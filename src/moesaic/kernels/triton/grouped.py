"""The grouped product of rows: each expert's rows times that expert's matrix.

Eager: `torch.cat([x[a:b] @ w[e].T for each expert e])`. One kernel serves four of a layer's
products. They differ in their epilogue, what is done with a tile of the product while it is in
registers. That of `rows_times` stores it: the forward of the down projection, and the gradient of
the up projection's input rows. `up.py` and `down_grad.py` have the others. FLOPs: 2 R K N. Bytes:
R K + R N + E K N elements at least; tiles of one expert that run at the same time share its matrix
and its rows in L2. Sums are accumulated in float32, in a fixed order: deterministic.

R rows of depth K, E matrices, N columns of the product. Columns and depth of a product are N and K.
A schedule lists the tiles of rows (`parts.row_tiles`); a gathered input has one row per token, read
through the row's token. Constants of a kernel are in capitals.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from moesaic.kernels.triton.parts import RowTile, Schedules, place, rows_of_tile
from moesaic.kernels.triton.rows.launch import as_operand, num_programs, tile_constants, unit_stride
from moesaic.kernels.triton.rows.tiles import Tile
from moesaic.kernels.triton.rows.varying import VARYING


class Form(NamedTuple):
    """The constants for which the kernel of grouped products is compiled."""

    product: str
    """The name of the product, by which profiles tell kernels apart."""
    parts: int
    """Matrices of an expert whose tiles are multiplied at once, side by side: 2 with a gate."""
    is_stacked: bool
    """Whether the matrices are (E, parts, N, K)."""
    transposed: bool
    """Whether the matrices are (E, N, K), else (E, K, N)."""
    rows_by_descriptor: bool
    """Whether rows are loaded through a tensor descriptor (TMA on Hopper), else by pointers."""
    matrix_by_descriptor: bool
    """The same for matrices."""
    precision: str
    """The `input_precision` of `tl.dot`."""
    flatten: bool
    """Whether a persistent program's loop over tiles and the loop over their depth become one, so
    that the next tile's loads start before this one's epilogue."""
    block_r: int
    """Rows of a tile."""
    block_n: int
    """Columns of a tile in each part."""
    block_k: int
    """Elements of the reduction per step."""
    group: int
    """See `Tile.group`."""
    activation: str = ""
    """A key of `ACTIVATIONS`, applied to the gate, if any."""
    is_gated: bool = False
    """Whether an expert has two pre-activations, of which the first gates the second."""
    clamp: tuple[float, ...] | None = None
    """The constants of clamped SwiGLU."""
    splits: int = 1
    """In how many parts of its columns the epilogue processes a tile."""


class Stored(NamedTuple):
    """The tensors of the epilogue of `rows_times`."""

    out: tl.tensor
    places: tl.tensor
    """See `rows_times`."""


def rows_times(
    x: Tensor,
    w: Tensor,
    ends: Tensor | Schedules,
    tile: Tile,
    *,
    transposed: bool,
    bias: Tensor | None = None,
    weight: Tensor | None = None,
    places: Tensor | None = None,
) -> Tensor:
    """Multiply each expert's rows by its matrix.

    Args:
        x: (R, K) rows in expert order.
        w: (E, N, K) if `transposed`, as `nn.Linear` stores it, else (E, K, N).
        ends: (E,) int32, one past the last row of each expert; or the schedules of a pass.
        transposed: multiply by the transpose of each matrix.
        bias: (E, N), added to each row of its expert.
        weight: (R,) factors of the bias, since the rows have theirs already; None for 1.
        places: (R,) int32, the row of the result that each row becomes; None for expert order.

    Returns:
        (R, N) in the dtype of the rows; rows from `ends[-1]` on are uninitialised.
    """
    out = x.new_empty(len(x), w.shape[1] if transposed else w.shape[2])
    run_grouped(
        x,
        w,
        ends,
        tile,
        store_rows,
        Stored(out, places),
        product="rows",
        transposed=transposed,
        bias=bias,
        bias_weight=weight,
    )
    return out


def run_grouped(
    x: Tensor,
    w: Tensor,
    ends: Tensor | Schedules,
    tile: Tile,
    epilogue: JITFunction,
    tensors: Any,
    *,
    transposed: bool,
    token: Tensor | None = None,
    bias: Tensor | None = None,
    bias_weight: Tensor | None = None,
    **constants: Any,
) -> None:
    """Multiply each expert's rows by its matrix and give each tile of the product to an epilogue.

    Args:
        x, ends, tile, bias, bias_weight: see `rows_times`.
        w: (E, N, K) if `transposed`, else (E, K, N); or (E, C, N, K), C matrices side by side.
        epilogue: called with the tile and its `RowTile`, the number of the tile's columns, those of
            the product, `tensors` and the `Form`.
        tensors: a named tuple of the tensors that the epilogue reads and fills.
        token: (R,) int32, the token of each row; None if `x` is in expert order.
        constants: the fields of `Form` that the epilogue reads.
    """
    x = x.contiguous()
    w = unit_stride(w)
    num_rows = len(x if token is None else token)
    if transposed:
        columns, depth = w.shape[-2:]
    else:
        depth, columns = w.shape[-2:]
    if num_rows == 0 or columns == 0:
        return
    # The schedule says on the device which expert and rows each tile has, and how many tiles there
    # are. The host knows only `max_tiles`, the most that there can be.
    schedule, max_tiles = Schedules.of(ends, num_rows).tiles(tile.rows)
    rows, matrix, form = _operands(x, w, tile, transposed=transposed, gathered=token is not None)
    programs = num_programs(tile, max_tiles * triton.cdiv(columns, tile.columns), x.device)
    _grouped_kernel[(programs,)](
        rows,
        matrix,
        bias=None if bias is None else bias.contiguous(),
        bias_weight=bias_weight,
        token=token,
        tensors=tensors,
        schedule=schedule,
        capacity=max_tiles,
        columns=columns,
        depth=depth,
        stride_x=x.stride(0),
        stride_expert=w.stride(0),
        stride_part=w.stride(1),  # of (E, C, N, K); the kernel does not read it for other matrices
        stride_w=w.stride(-2),
        EPILOGUE=epilogue,
        FORM=Form(**form, **tile_constants(tile, x.dtype), **constants),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def _operands(
    x: Tensor, w: Tensor, tile: Tile, *, transposed: bool, gathered: bool
) -> tuple[Tensor | TensorDescriptor, Tensor | TensorDescriptor, dict[str, Any]]:
    """Return the rows and the matrices as the kernel loads them, and the constants that say how."""
    # None: gathered rows are loaded by pointers
    rows, rows_by_descriptor = as_operand(x, (tile.rows, tile.depth), None if gathered else tile)
    is_stacked = w.ndim == 4
    # a load fetches a tile of one expert's matrix, or of all matrices side by side
    matrix_block = (tile.columns, tile.depth) if transposed else (tile.depth, tile.columns)
    matrix, matrix_by_descriptor = as_operand(w, (1, *w.shape[1:-2], *matrix_block), tile)
    constants = {
        "parts": w.shape[1] if is_stacked else 1,
        "is_stacked": is_stacked,
        "transposed": transposed,
        "rows_by_descriptor": rows_by_descriptor,
        "matrix_by_descriptor": matrix_by_descriptor,
    }
    return rows, matrix, constants


def _name(call: Any) -> str:
    """Return the name of a compiled kernel."""
    return f"_{call.constants['FORM'].product}_kernel"


@triton.jit(do_not_specialize=VARYING, repr=_name)
def _grouped_kernel(
    x: tl.tensor,
    w: tl.tensor,
    bias: tl.tensor,
    bias_weight: tl.tensor,
    token: tl.tensor,
    tensors: tl.tuple,
    schedule: tl.tensor,
    capacity: tl.tensor,
    columns: tl.tensor,
    depth: tl.tensor,
    stride_x: tl.tensor,
    stride_expert: tl.tensor,
    stride_part: tl.tensor,
    stride_w: tl.tensor,
    EPILOGUE: tl.constexpr,
    FORM: tl.constexpr,
) -> None:
    """Compute tiles of the product and give each to EPILOGUE; see `run_grouped`. A program has one
    tile, or if persistent every `num_programs`-th. `capacity` is the most tiles of rows that the
    schedule can have."""
    BLOCK_R: tl.constexpr = FORM.block_r
    BLOCK_N: tl.constexpr = FORM.block_n
    BLOCK_K: tl.constexpr = FORM.block_k
    GROUP: tl.constexpr = FORM.group
    ROWS_BY_DESCRIPTOR: tl.constexpr = FORM.rows_by_descriptor
    column_tiles = tl.cdiv(columns, BLOCK_N)
    num_row_tiles = tl.load(schedule)
    for index in tl.range(
        tl.program_id(0), num_row_tiles * column_tiles, tl.num_programs(0), flatten=FORM.flatten
    ):
        row_tile, column_tile = place(index, num_row_tiles, column_tiles, GROUP)
        rows = rows_of_tile(schedule, capacity, token, row_tile, BLOCK_R)
        column = column_tile * BLOCK_N  # the tile's first

        total = bias_tile(bias, bias_weight, rows, column, columns, FORM)
        for k in tl.range(0, depth, BLOCK_K):
            a = rows_tile(
                x,
                rows,
                k=k,
                depth=depth,
                stride_x=stride_x,
                BY_DESCRIPTOR=ROWS_BY_DESCRIPTOR,
                BLOCK_K=BLOCK_K,
            )
            b = matrix_tile(
                w,
                rows.expert,
                column=column,
                k=k,
                columns=columns,
                depth=depth,
                stride_expert=stride_expert,
                stride_part=stride_part,
                stride_w=stride_w,
                FORM=FORM,
            )
            total = tl.dot(a, b, total, input_precision=FORM.precision)
        EPILOGUE(total, rows, column_tile, columns, tensors, FORM)


@triton.jit
def bias_tile(
    bias: tl.tensor,
    weight: tl.tensor,
    rows: RowTile,
    column: tl.tensor,
    columns: tl.tensor,
    FORM: tl.constexpr,
) -> tl.tensor:
    """Return the float32 tile to which a product is added, its parts side by side: zeros, or each
    row's weight times the bias.

    Biases are stored (parts, columns) for each expert. As initial sums they take no registers
    beside those of the product.
    """
    BLOCK_R: tl.constexpr = FORM.block_r
    WIDTH: tl.constexpr = FORM.parts * FORM.block_n
    total = tl.zeros((BLOCK_R, WIDTH), tl.float32)
    if bias is not None:
        factor = weights_of(weight, rows, FORM)
        # column n of the tile is column n % block_n of part n // block_n
        n = tl.arange(0, WIDTH)
        column_of_part = column + n % FORM.block_n
        first = bias + rows.expert.to(tl.int64) * FORM.parts * columns
        pointers = first + n // FORM.block_n * columns + column_of_part
        values = tl.load(pointers, mask=column_of_part < columns, other=0.0).to(tl.float32)
        total += factor[:, None] * values[None, :]
    return total


@triton.jit
def weights_of(weight: tl.tensor, rows: RowTile, FORM: tl.constexpr) -> tl.tensor:
    """Return the weights of rows in float32; 1 without weights."""
    factor = tl.full((FORM.block_r,), 1.0, tl.float32)
    if weight is not None:
        factor = tl.load(weight + rows.row, mask=rows.is_row, other=0.0).to(tl.float32)
    return factor


@triton.jit
def rows_tile(
    x: tl.tensor,
    rows: RowTile,
    k: tl.tensor,
    depth: tl.tensor,
    stride_x: tl.tensor,
    BY_DESCRIPTOR: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> tl.tensor:
    """Load BLOCK_K columns of rows, from column k on; zero beyond the rows and columns.

    A descriptor loads consecutive rows instead, including rows of the next expert, whose results
    are not written.
    """
    if BY_DESCRIPTOR:
        tile = x.load([rows.first, k])
    else:
        step = k + tl.arange(0, BLOCK_K)
        pointers = x + rows.source.to(tl.int64)[:, None] * stride_x + step[None, :]
        tile = tl.load(pointers, mask=rows.is_row[:, None] & (step < depth)[None, :], other=0.0)
    return tile


@triton.jit
def matrix_tile(
    w: tl.tensor,
    expert: tl.tensor,
    column: tl.tensor,
    k: tl.tensor,
    columns: tl.tensor,
    depth: tl.tensor,
    stride_expert: tl.tensor,
    stride_part: tl.tensor,
    stride_w: tl.tensor,
    FORM: tl.constexpr,
) -> tl.tensor:
    """Load the (block_k, parts block_n) tile of an expert's matrix that starts at (k, column), its
    parts side by side; elements beyond the matrix are zero.

    The matrix is stored (parts, columns, depth), (columns, depth) or (depth, columns); see `Form`.
    `stride_w` lies between the rows of a stored matrix, `stride_part` between parts,
    `stride_expert` between experts. A descriptor checks the bounds itself.
    """
    WIDTH: tl.constexpr = FORM.parts * FORM.block_n
    # column n of the tile is column n % block_n of part n // block_n
    n = tl.arange(0, WIDTH)
    column_of_part = column + (n % FORM.block_n if FORM.is_stacked else n)
    step = k + tl.arange(0, FORM.block_k)
    if FORM.matrix_by_descriptor:
        if FORM.is_stacked:
            tile = tl.trans(w.load([expert, 0, column, k]).reshape(WIDTH, FORM.block_k))
        elif FORM.transposed:
            tile = tl.trans(w.load([expert, column, k]).reshape(WIDTH, FORM.block_k))
        else:
            tile = w.load([expert, k, column]).reshape(FORM.block_k, WIDTH)
    else:
        inside = (step < depth)[:, None] & (column_of_part < columns)[None, :]
        first = w + expert.to(tl.int64) * stride_expert
        if FORM.is_stacked:
            column_offset = n // FORM.block_n * stride_part + column_of_part * stride_w
            pointers = first + column_offset[None, :] + step[:, None]
        elif FORM.transposed:
            pointers = first + column_of_part[None, :] * stride_w + step[:, None]
        else:
            pointers = first + step[:, None] * stride_w + column_of_part[None, :]
        tile = tl.load(pointers, mask=inside, other=0.0)
    return tile


@triton.jit
def store_rows(
    total: tl.tensor,
    rows: RowTile,
    column_tile: tl.tensor,
    columns: tl.tensor,
    tensors: Stored,
    FORM: tl.constexpr,
) -> None:
    """Store `total`, a tile of the product of `columns` columns, each row in its place of the
    result."""
    column = column_tile * FORM.block_n + tl.arange(0, FORM.block_n)
    out_row = rows.row
    if tensors.places is not None:
        out_row = tl.load(tensors.places + rows.row, mask=rows.is_row, other=0)
    pointers = tensors.out + out_row.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(
        pointers,
        total.to(tensors.out.dtype.element_ty),
        mask=rows.is_row[:, None] & (column < columns)[None, :],
    )
