"""What `program/expert_sizes.py` says that a kernel needs beside its rows is what it allocates."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from helpers import pairwise
from moesaic.kernels import by_expert, whole_batch
from moesaic.kernels.products import converts
from moesaic.kernels.work import ExpertWork, Places, Wanted
from moesaic.program.expert_sizes import SCRATCH, KernelCall, most_block_rows
from moesaic_lab.balance.tracked_memory import Alive

WANTED = Wanted(x=True, gates=True, weights=True, deferred_wgrad=True)
KERNELS = {"cpu": by_expert, "other": whole_batch}
DIM = 64


def work_of(
    rows: list[int], units: int, ups: int, dtype: torch.dtype, *, placed: bool, dim: int = DIM
) -> ExpertWork:
    """Return a call whose rows lie in another order, or in the experts' own."""
    total = sum(rows)
    order = torch.randperm(total)
    return ExpertWork(
        x=torch.randn(total, dim, dtype=dtype),
        dispatch=None,
        gates=torch.rand(total, dtype=dtype) + 0.5,
        gates_first=False,
        ends=torch.tensor(rows).cumsum(0).int(),
        up=torch.randn(len(rows), ups, units, dim, dtype=dtype),
        up_bias=None,
        down=torch.randn(len(rows), dim, units, dtype=dtype),
        down_bias=None,
        activation="silu",
        places=Places(x=order, y=order, d_x=order) if placed else None,
    )


@pytest.mark.parametrize(
    ("kernel", "rows", "units", "ups", "dtype", "placed"),
    pairwise(
        KERNELS,
        ((256, 256), (5000, 3000), (30000,), (7, 0, 1200)),
        (8, 64, 256),
        (1, 2),
        (torch.float32, torch.bfloat16),
        (False, True),
    ),
)
def test_scratch_is_what_a_kernel_allocates_beside_its_results(
    kernel: str, rows: tuple[int, ...], units: int, ups: int, dtype: torch.dtype, placed: bool
) -> None:
    torch.manual_seed(0)
    work = work_of(list(rows), units, ups, dtype, placed=placed)
    module = KERNELS[kernel]
    call = {
        "rows": rows,
        "dim": DIM,
        "units": units,
        "matrices": ups + 1,
        "element_bytes": dtype.itemsize,
        "gathers_x": placed,
        "gathers_dy": placed,
        "places_x": placed,
        "converts": converts(dtype) if kernel == "cpu" else "nothing",
    }
    with Alive() as alive:
        y, pre = module.forward(work, dtype)
    results = (y.numel() + pre.numel()) * dtype.itemsize
    stated = SCRATCH[kernel](KernelCall(**call, phase="forward"))
    assert alive.peak_bytes <= results + stated
    dy = torch.randn_like(y)
    with Alive() as alive:
        found = module.backward(work, pre, dy, WANTED)
    gradients = [found.x, found.up, found.down]
    results = sum(each.numel() * dtype.itemsize for each in gradients if each is not None)
    stated = SCRATCH[kernel](KernelCall(**call, phase="backward"))
    assert alive.peak_bytes <= results + stated
    if kernel == "cpu":
        assert results + stated <= 1.12 * alive.peak_bytes


@pytest.mark.parametrize(
    ("rows", "dim", "units", "ups", "orders"),
    pairwise(
        # of one block, and of several, of which the last is large or small
        ((256, 256), (5000, 3000), (17000,), (30000,), (7, 0, 1200)),
        (33, 64),
        (7, 65, 256),
        (1, 2),
        # which rows lie in another order: inputs, results' gradients, inputs' gradients
        (
            (False, False, False),
            (True, False, False),
            (False, True, False),
            (True, True, False),
            (True, True, True),
        ),
    ),
)
def test_scratch_of_float16_is_what_products_and_dot_products_in_float32_allocate(
    rows: tuple[int, ...], dim: int, units: int, ups: int, orders: tuple[bool, bool, bool]
) -> None:
    torch.manual_seed(0)
    dtype = torch.float16
    gathers_x, gathers_dy, places_x = orders
    call = KernelCall(
        rows=rows,
        dim=dim,
        units=units,
        matrices=ups + 1,
        element_bytes=dtype.itemsize,
        gathers_x=gathers_x,
        gathers_dy=gathers_dy,
        places_x=places_x,
        phase="backward",
        converts=converts(dtype),
        weights_late=True,
    )
    work = work_of(list(rows), units, ups, dtype, placed=False, dim=dim)
    order = torch.randperm(sum(rows))
    x_order = order if gathers_x else None

    places = Places(x=x_order, y=order if places_x else None)
    with Alive() as alive:
        y, pre = by_expert.forward(replace(work, places=places), dtype)
    results = (y.numel() + pre.numel()) * dtype.itemsize
    _assert_bounds(replace(call, phase="forward"), alive.peak_bytes - results, alive.peak_bytes)

    places = Places(x=x_order, y=order if gathers_dy else None, d_x=order if places_x else None)
    dy = torch.randn_like(y)
    with Alive() as alive:
        found = by_expert.backward(replace(work, places=places), pre, dy, WANTED)
    gradients = [found.x, found.up, found.down]
    results = sum(each.numel() * dtype.itemsize for each in gradients if each is not None)
    _assert_bounds(call, alive.peak_bytes - results, alive.peak_bytes)


def _assert_bounds(call: KernelCall, scratch: int, peak: int) -> None:
    """Check the stated bytes of scratch memory against those measured: not fewer, and more by at
    most a tenth of the call's peak."""
    stated = SCRATCH["cpu"](call)
    assert scratch <= stated
    assert stated - scratch <= 0.1 * peak


def test_blocks_take_several_small_experts_or_part_of_a_large_one() -> None:
    assert most_block_rows((3, 3, 3), 7) == 6
    assert most_block_rows((20, 2), 7) == 7
    assert most_block_rows((8,), 7) == 7
    assert most_block_rows((0, 0), 7) == 0
