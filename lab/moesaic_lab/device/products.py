"""`moesaic bench device --part operations --only products`: each matrix product on a CPU beside
torch's own.

Each product of `moesaic.kernels` that runs on a CPU, with one operand in each layout in memory and
the others dense: dense; rows with gaps behind them; transposed; one of three matrices side by side,
as weights travel. Ours and torch's in turn, each call with new inputs, the best call of five
rounds; a ratio above 2 is measured again and the smaller one counts. The shapes are fixed.
by_onednn is the float32 operator that the experts use on AMD's processors from Zen 5 on; here it is
measured on every processor that has it.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.kernels import nf4
from moesaic.kernels.expert_ffn import expert_ffn
from moesaic.kernels.grouped_matmul import outer_products, rows_times
from moesaic.kernels.products import (
    has_onednn,
    product_by_onednn,
    product_in_dtype,
    rows_product,
    sum_product,
)
from moesaic.kernels.router_product import router_backward, router_forward
from moesaic.kernels.work import ExpertWork
from moesaic_lab.benchmark import Told, each_kept
from moesaic_lab.claims import Claim, claimed, figures
from moesaic_lab.device.cases import DTYPES

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "dense": lambda x: x,
    "rows with gaps": lambda x: F.pad(x, (0, x.shape[-1]))[..., : x.shape[-1]],
    "transposed": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
    "one of three": lambda x: torch.cat([x, x, x], -1)[..., x.shape[-1] : 2 * x.shape[-1]],
}
"""By name: a function that lays matrices out in memory."""
SHAPES = ((250, 256, 256), (40, 512, 512))
"""Number of rows (an eighth of a router's tokens), input width and output width. The second has too
few rows for a copy of the matrix."""
EXPERTS = 4
WANTED = (True, True)
"""The router's gradients of tokens and of the matrix are both wanted."""
ROUNDS = 5
CALLS = 4
"""Rounds, and calls of both methods in each: a single one of 0.1 ms tells little where other
programs run."""
LIMIT = 2.0
"""The largest ratio to torch's time that a claim allows."""
COLUMNS = (
    "dtype",
    "product",
    "operand",
    "layout",
    "rows",
    "widths",
    "seconds",
    "torch_seconds",
    "over_torch",
)
Row = dict[str, Any]
Sizes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class CpuProduct:
    """A product of `moesaic.kernels` and torch's own for the same operands."""

    sizes: Callable[[int, int, int], Sizes]
    """The sizes of the operands by name, for a number of rows and two widths."""
    ours: Callable[..., object]
    """Our product, a function of the operands."""
    plain: Callable[..., object]
    """Torch's own, a function of the same operands."""
    dtypes: Sequence[str] = tuple(DTYPES)
    """Dtypes of the operands, keys of `DTYPES`."""
    calls: int = CALLS
    """Calls in each round."""


def _into(
    product: Callable[..., object], a: Tensor, b: Tensor, height: int, **options: Any
) -> Tensor:
    """Run a product that writes its result, of this height, into memory."""
    out = a.new_zeros(height, b.shape[1])
    product(a, b, out, **options)
    return out


@functools.cache
def _ends(rows: int) -> Tensor:
    """Return the ends of the experts' rows, whose numbers differ: (E,) int32."""
    shares = torch.arange(1, EXPERTS + 1)
    return (shares.cumsum(0) * rows // int(shares.sum())).to(torch.int32)


def _by_expert(x: Tensor) -> Sequence[Tensor]:
    """Return the rows of each expert, as views."""
    return x.tensor_split(_ends(len(x))[:-1].long())


def _plain_rows_times(x: Tensor, w: Tensor) -> Tensor:
    """Return each expert's rows times its matrix, one expert after the other."""
    return torch.cat([part @ matrix for part, matrix in zip(_by_expert(x), w)])


def _plain_outer_products(a: Tensor, b: Tensor) -> Tensor:
    """Return each expert's sum over its rows, one expert after the other."""
    return torch.stack([x.t() @ y for x, y in zip(_by_expert(a), _by_expert(b))])


@functools.cache
def _codes(height: int, width: int) -> tuple[Tensor, Tensor]:
    """Return codes and scales of the experts' matrices, the same in each call."""
    matrices = torch.randn(EXPERTS, height, width, generator=torch.Generator().manual_seed(0))
    return nf4.quantize(matrices)


def _nf4(x: Tensor, *, transposed: bool) -> Tensor:
    """Return our product of the experts' rows and square NF4 matrices."""
    codes, scales = _codes(x.shape[1], x.shape[1])
    return nf4.rows_times(x, codes, scales, _ends(len(x)), transposed)


def _plain_nf4(x: Tensor, *, transposed: bool) -> Tensor:
    """Return the same by torch's products of the dequantized matrices."""
    w = nf4.dequantize(*_codes(x.shape[1], x.shape[1]), x.dtype)
    return _plain_rows_times(x, w.transpose(1, 2) if transposed else w)


@torch.enable_grad()
def _experts(x: Tensor, up: Tensor, down: Tensor, dy: Tensor) -> Sequence[Tensor]:
    """Run the expert stage with SwiGLU, forward and backward; return all gradients."""
    leaves = [each.detach().requires_grad_() for each in (x, up, down)]
    work = ExpertWork(
        x=leaves[0],
        dispatch=None,
        gates=None,
        gates_first=False,
        ends=_ends(len(x)),
        up=leaves[1],
        up_bias=None,
        down=leaves[2],
        down_bias=None,
        activation="silu",
    )
    return torch.autograd.grad(expert_ffn(work), leaves, dy)


@torch.enable_grad()
def _plain_experts(x: Tensor, up: Tensor, down: Tensor, dy: Tensor) -> Sequence[Tensor]:
    """Return the same one expert after the other, differentiated by autograd."""
    leaves = [each.detach().requires_grad_() for each in (x, up, down)]
    x, up, down = leaves
    hidden = [
        F.silu(rows @ gate.t()) * (rows @ linear.t())
        for rows, (gate, linear) in zip(_by_expert(x), up)
    ]
    y = torch.cat([rows @ matrix.t() for rows, matrix in zip(hidden, down)])
    return torch.autograd.grad(y, leaves, dy)


def _router_backward(x: Tensor, weight: Tensor, grad: Tensor) -> Sequence[Tensor]:
    return router_backward(x, weight, grad.float(), *WANTED)


def _plain_router_backward(x: Tensor, weight: Tensor, grad: Tensor) -> Sequence[Tensor]:
    grad = grad.float()
    return (grad @ weight.float()).to(x.dtype), (grad.t() @ x.float()).to(weight.dtype)


PRODUCTS = {
    "rows_product": CpuProduct(
        sizes=lambda rows, inner, width: {"rows": (rows, inner), "matrix": (inner, width)},
        ours=lambda a, b: _into(rows_product, a, b, len(a)),
        plain=torch.mm,
    ),
    "by_onednn": CpuProduct(
        sizes=lambda rows, inner, width: {"rows": (rows, inner), "matrix": (width, inner)},
        ours=product_by_onednn,
        plain=lambda a, b: a @ b.t(),
        dtypes=("float32",) if has_onednn() else (),
    ),
    "sum_product": CpuProduct(
        sizes=lambda rows, inner, width: {"a": (rows, inner), "b": (rows, width)},
        ours=lambda a, b: _into(sum_product, a, b, a.shape[1]),
        plain=lambda a, b: a.t() @ b,
    ),
    "sum_product, adding": CpuProduct(
        sizes=lambda rows, inner, width: {"a": (rows, inner), "b": (rows, width)},
        ours=lambda a, b: _into(sum_product, a, b, a.shape[1], adds=True),
        plain=lambda a, b: a.new_zeros(a.shape[1], b.shape[1]).addmm_(a.t(), b),
    ),
    "product_in_dtype": CpuProduct(
        sizes=lambda rows, inner, width: {"a": (rows, inner), "b": (inner, width)},
        ours=product_in_dtype,
        plain=torch.mm,
    ),
    "rows_times": CpuProduct(
        sizes=lambda rows, inner, width: {
            "rows": (rows, inner),
            "matrices": (EXPERTS, inner, width),
        },
        ours=lambda x, w: rows_times(x, w, _ends(len(x))),
        plain=_plain_rows_times,
    ),
    "outer_products": CpuProduct(
        sizes=lambda rows, inner, width: {"a": (rows, inner), "b": (rows, width)},
        ours=lambda a, b: outer_products(a, b, _ends(len(a))),
        plain=_plain_outer_products,
    ),
    "router_forward": CpuProduct(
        sizes=lambda rows, inner, _: {"tokens": (8 * rows, inner), "matrix": (16, inner)},
        ours=router_forward,
        plain=lambda x, w: x.float() @ w.float().t(),
        dtypes=("bfloat16",),
    ),
    "router_backward": CpuProduct(
        sizes=lambda rows, inner, _: {
            "tokens": (8 * rows, inner),
            "matrix": (16, inner),
            "gradient": (8 * rows, 16),
        },
        ours=_router_backward,
        plain=_plain_router_backward,
        dtypes=("bfloat16",),
    ),
    "nf4.rows_times": CpuProduct(
        sizes=lambda rows, inner, _: {"rows": (rows, inner)},
        ours=partial(_nf4, transposed=True),
        plain=partial(_plain_nf4, transposed=True),
    ),
    "nf4.rows_times, gradient": CpuProduct(
        sizes=lambda rows, inner, _: {"rows": (rows, inner)},
        ours=partial(_nf4, transposed=False),
        plain=partial(_plain_nf4, transposed=False),
    ),
    "expert_ffn, both passes": CpuProduct(
        sizes=lambda rows, inner, width: {
            "rows": (rows, inner),
            "up": (EXPERTS, 2, width, inner),
            "down": (EXPERTS, inner, width),
            "dy": (rows, inner),
        },
        ours=_experts,
        plain=_plain_experts,
        calls=1,
    ),
}
"""By name. Products of 8-bit floats and those by Triton and QuACK need a GPU."""


def measure(
    told: Told, keep: str | None, threads: int, shapes: Sequence[tuple[int, int, int]] = SHAPES
) -> list[Row]:
    """Measure all products and return a row for each operand, layout, shape and dtype.

    Args:
        told: called with the name of each product before it is measured.
        keep: folder for the rows of each product; those that are there are not measured again. None
            for none.
        threads: number of torch's threads.
        shapes: numbers of rows and two widths each.
    """
    torch.set_num_threads(threads)
    runs = {}
    for name, product in PRODUCTS.items():
        for dtype in product.dtypes:
            runs[f"products {name} {dtype}"] = partial(_rows, name, dtype, shapes)
    return [row for _, rows in each_kept(keep, runs, told) for row in rows]


def claims(rows: Sequence[Row]) -> list[Claim]:
    """Return a claim for each product and dtype: the largest ratio to torch's time, of all
    operands, layouts and shapes."""
    all_claims = []
    for name, product in PRODUCTS.items():
        label = name.replace(", ", "_").replace(" ", "_").replace(".", "_")
        for dtype in product.dtypes:
            claim = f"kernels.products.{label}.{dtype}.over_torch"
            largest = partial(_largest_ratio, rows, name, dtype)
            all_claims.append(claimed(claim, largest, LIMIT))
    return all_claims


def _largest_ratio(rows: Sequence[Row], product: str, dtype: str) -> float:
    """Return the largest ratio to torch's time in the rows of a product and dtype."""
    return max(figures(rows, "over_torch", product=product, dtype=dtype))


def worst(rows: Sequence[Row]) -> list[Row]:
    """Return the row with the largest ratio of each product, dtype and layout."""
    by_case: dict[tuple[str, ...], Row] = {}
    for row in rows:
        case = (row["dtype"], row["product"], row["layout"])
        by_case[case] = max(by_case.get(case, row), row, key=lambda each: each["over_torch"])
    return list(by_case.values())


def _rows(name: str, dtype: str, shapes: Sequence[tuple[int, int, int]]) -> list[Row]:
    """Return the rows of one product and dtype."""
    product = PRODUCTS[name]
    rows = []
    for shape in shapes:
        sizes = product.sizes(*shape)
        for index, operand in enumerate(sizes):
            for layout in LAYOUTS:
                if layout == "dense" and index > 0:
                    continue  # all operands are dense, as in the first operand's case
                make_operands = partial(operands, sizes, operand, layout, DTYPES[dtype])
                rows.append(
                    {
                        "part": "products",
                        "dtype": dtype,
                        "product": name,
                        "operand": operand,
                        "layout": layout,
                        "rows": shape[0],
                        "widths": f"{shape[1]} x {shape[2]}",
                        **_timed(product, make_operands),
                    }
                )
    return rows


def operands(
    sizes: Sizes, operand: str, layout: str, dtype: torch.dtype, seed: int
) -> list[Tensor]:
    """Return random operands of these sizes; the one of this name lies in memory by this layout of
    `LAYOUTS`, the others are dense."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.rand(size, generator=generator).sub_(0.5).to(dtype)
        for name, size in sizes.items()
    }
    return [LAYOUTS[layout](each) if name == operand else each for name, each in tensors.items()]


def _timed(product: CpuProduct, make_operands: Callable[[int], list[Tensor]]) -> Row:
    """Return the best seconds of both methods; measured again if the ratio is above the limit, and
    then the better ratio."""
    seconds = best(product, make_operands)
    if _ratio(seconds) > LIMIT:
        seconds = min(seconds, best(product, make_operands), key=_ratio)
    our_seconds, torch_seconds = seconds
    return {
        "seconds": our_seconds,
        "torch_seconds": torch_seconds,
        "over_torch": our_seconds / torch_seconds,
    }


def _ratio(seconds: tuple[float, float]) -> float:
    """Return our time over torch's."""
    our_seconds, torch_seconds = seconds
    return our_seconds / torch_seconds


@torch.no_grad()
def best(product: CpuProduct, make_operands: Callable[[int], list[Tensor]]) -> tuple[float, float]:
    """Return the seconds of the best call of ours and of torch's own, after one call of each that
    is not timed.

    Args:
        product: both methods.
        make_operands: returns the operands for a seed; every call gets new ones.
    """
    methods = (product.ours, product.plain)
    shortest = [float("inf"), float("inf")]
    for pair in range(1 + ROUNDS * product.calls):
        order = (0, 1) if pair % 2 == 0 else (1, 0)  # neither method always runs first
        for position, method in enumerate(order):
            tensors = make_operands(2 * pair + position)
            start = time.perf_counter()
            methods[method](*tensors)
            seconds = time.perf_counter() - start
            if pair > 0:
                shortest[method] = min(shortest[method], seconds)
    return shortest[0], shortest[1]
