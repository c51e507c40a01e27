"""Collectives over loopback: values, order of summation, bytes, autograd, groups of different
sizes."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from moesaic.comm import collectives
from moesaic.comm.collectives import (
    DIRECT_BYTES,
    all_gather,
    all_gather_rows,
    all_reduce_max,
    all_reduce_sum,
    all_to_all,
    broadcast,
    reduce_scatter_sum,
    share,
    share_of,
    slice_rows,
)
from moesaic.comm.loopback import LoopbackTransport, run_ranks
from moesaic.comm.transport import AbstractTransport
from moesaic.program.grid import Grid

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.int16,
    torch.uint8,
]
LARGE = DIRECT_BYTES // 4 + 5


def on_all(
    world: int, function: Callable[[AbstractTransport, tuple[int, ...]], object], seed: int = 0
) -> list[object]:
    return run_ranks(
        world,
        lambda transport: function(transport, tuple(range(world))),
        seed=seed,
        in_order=bool(seed % 2),
    )


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 5, shape, generator=generator).to(dtype)


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        *((dtype, (LARGE,)) for dtype in DTYPES),
        *((torch.float32, shape) for shape in ((), (0, 4), (3, 2))),
    ],
    ids=str,
)
def test_values_for_every_dtype_and_shape(dtype, shape):
    world = 4
    tensors = [values(rank, shape, dtype) for rank in range(world)]
    stacked = torch.stack([tensor.double() for tensor in tensors])

    def rank(transport: AbstractTransport, peers: tuple[int, ...]) -> list[Tensor]:
        mine = values(transport.rank, shape, dtype)
        results = [
            all_reduce_sum(transport, peers, mine),
            broadcast(transport, peers, mine, 2),
            *all_gather(transport, peers, mine),
        ]
        if dtype != torch.float8_e4m3fn:  # PyTorch has no maximum for this dtype
            results.append(all_reduce_max(transport, peers, mine))
        assert all(
            tensor.dtype == dtype and tensor.shape == torch.Size(shape) for tensor in results
        )
        return [tensor.double() for tensor in results]

    expected = [stacked.sum(0), stacked[2], *stacked, stacked.amax(0)]
    for results in on_all(world, rank):
        for a, b in zip(results, expected):
            assert torch.equal(a, b)


@pytest.mark.parametrize(("size", "dtype"), [(7, torch.bfloat16), (LARGE, torch.float32)], ids=str)
def test_sums_are_in_the_order_of_ranks_and_the_same_bits_everywhere(size, dtype, monkeypatch):
    world = 5
    parts = [
        torch.randn(size, generator=torch.Generator().manual_seed(r)).to(dtype) * 90.0**r
        for r in range(world)
    ]
    in_order = parts[0].float()
    for part in parts[1:]:
        in_order = in_order + part.float()
    backwards = sum(part.float() for part in reversed(parts))
    assert not torch.equal(in_order, backwards)
    for limit in (0, DIRECT_BYTES, 2**30):
        monkeypatch.setattr(collectives, "DIRECT_BYTES", limit)
        for seed in range(2):
            for result in on_all(
                world,
                lambda transport, peers: all_reduce_sum(transport, peers, parts[transport.rank]),
                seed,
            ):
                assert torch.equal(result, in_order.to(dtype))


@pytest.mark.parametrize("world", [2, 3, 8])
def test_bytes_of_a_large_sum_are_those_of_the_best_algorithm(world):
    num_bytes = 8 * DIRECT_BYTES * world

    def rank(transport: AbstractTransport, peers: tuple[int, ...]) -> int:
        assert isinstance(transport, LoopbackTransport)
        all_reduce_sum(transport, peers, torch.ones(num_bytes // 4))
        all_gather(transport, peers, torch.ones(0))  # after this, all ranks have sent
        return sum(
            moved
            for (source, _), moved in transport.mailbox.bytes_sent.items()
            if source == transport.rank
        )

    assert on_all(world, rank) == [2 * (world - 1) * num_bytes // world] * world


def test_results_share_no_memory_with_the_input():
    def rank(transport: AbstractTransport) -> None:
        mine = torch.ones(3, requires_grad=True)
        for peers in ((transport.rank,), (0, 1)):
            for result in (
                all_reduce_sum(transport, peers, mine),
                all_reduce_max(transport, peers, mine),
                broadcast(transport, peers, mine, peers[0]),
                all_gather_rows(transport, peers, mine, 3 * len(peers)),
            ):
                assert not result.requires_grad
                result.fill_(9)
        assert torch.equal(mine, torch.ones(3))

    run_ranks(2, rank)


@pytest.mark.parametrize("seed", range(2))
def test_groups_of_a_grid_with_different_sizes_each_stay_in_step(seed):
    """Groups reduce tensors of different sizes, some direct and some by segments, then meet in
    another group."""
    grid = Grid(world=8, tp=4, ep=2, etp=2)

    def rank(transport: AbstractTransport) -> tuple[float, float, float]:
        tp = grid.group(transport.rank, ("tp",))
        dp = grid.group(transport.rank, ("dp",))
        size = LARGE if tp[0] == 0 else 3
        a = all_reduce_sum(transport, tp, torch.full((size,), float(transport.rank)))
        b = all_reduce_max(transport, dp, a[:1])
        c = all_reduce_sum(transport, (transport.rank,), b)
        return float(a[-1]), float(b), float(c)

    assert run_ranks(8, rank, seed=seed) == [(6.0, 22.0, 22.0)] * 4 + [(22.0, 22.0, 22.0)] * 4


def test_max_of_nan_and_of_booleans():
    def rank(
        transport: AbstractTransport, peers: tuple[int, ...]
    ) -> tuple[list[float], list[bool]]:
        numbers = torch.tensor(
            [float("nan") if transport.rank == 1 else 2.0, float(transport.rank)]
        )
        flags = torch.tensor([transport.rank == 2, False])
        return all_reduce_max(transport, peers, numbers).tolist(), all_reduce_max(
            transport, peers, flags
        ).tolist()

    for numbers, flags in on_all(3, rank):
        assert str(numbers) == "[nan, 2.0]"
        assert flags == [True, False]


@pytest.mark.parametrize("seed", range(8))
def test_uneven_shares_are_joined(seed):
    rng = random.Random(seed)
    world = rng.randint(1, 6)
    num_rows = rng.randint(0, 9)
    whole = torch.randn(num_rows, 2, generator=torch.Generator().manual_seed(seed))
    peers = tuple(sorted(rng.sample(range(world), rng.randint(1, world))))

    def rank(transport: AbstractTransport) -> bool:
        mine = peers if transport.rank in peers else (transport.rank,)
        part = whole[share_of(num_rows, mine.index(transport.rank), len(mine))]
        return torch.equal(all_gather_rows(transport, mine, part, num_rows), whole)

    assert run_ranks(world, rank, seed=seed) == [True] * world
    assert sum(len(whole[share_of(num_rows, i, len(peers))]) for i in range(len(peers))) == num_rows


@pytest.mark.parametrize(("num_rows", "world"), [(0, 3), (8, 1), (11, 4)])
def test_a_reduce_scatter_is_a_share_of_the_sum_and_an_all_to_all_a_transpose(num_rows, world):
    tensors = [
        torch.randn(num_rows, generator=torch.Generator().manual_seed(r)) for r in range(world)
    ]
    total = sum(tensors[1:], tensors[0].clone())

    def rank(transport: AbstractTransport, peers: tuple[int, ...]) -> None:
        rows = share_of(num_rows, transport.rank, world)
        assert torch.equal(
            reduce_scatter_sum(transport, peers, tensors[transport.rank]), total[rows]
        )
        for got, source in zip(
            all_to_all(transport, peers, tensors[transport.rank]), tensors, strict=True
        ):
            assert torch.equal(got, source[rows])

    on_all(world, rank, seed=num_rows)


@pytest.mark.parametrize(("num_rows", "world"), [(0, 2), (3, 4), (8, 1), (11, 4)])
def test_sharing_and_slicing_give_the_gradients_of_one_process(world, num_rows):
    """Replicated weight and rows: each rank computes its share of the rows; their losses add up to
    the whole."""
    weight = torch.randn(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x = torch.randn(num_rows, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    scale = torch.arange(float(num_rows), dtype=torch.float64).unsqueeze(1) + 1

    def rank(transport: AbstractTransport, peers: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
        w = weight.clone().requires_grad_()
        mine = x.clone().requires_grad_()
        rows = share_of(num_rows, transport.rank, world)
        part = torch.tanh(slice_rows(transport, peers, mine * 2) @ share(transport, peers, w * 1))
        (part * scale[rows]).sum().backward()
        return part.detach(), mine.grad, w.grad

    w, whole = weight.clone().requires_grad_(), x.clone().requires_grad_()
    y = torch.tanh(whole * 2 @ w)
    (y * scale).sum().backward()
    results = on_all(world, rank, seed=num_rows)
    torch.testing.assert_close(
        torch.cat([part for part, _, _ in results]), y.detach(), rtol=0, atol=1e-12
    )
    for _, dx, dw in results:
        torch.testing.assert_close(dx, whole.grad, rtol=0, atol=1e-12)
        torch.testing.assert_close(dw, w.grad, rtol=0, atol=1e-11)


def test_a_tensor_without_gradient_is_shared_and_sliced_without_messages():
    def rank(transport: AbstractTransport, peers: tuple[int, ...]) -> tuple[bool, list[float]]:
        shared = share(transport, peers, torch.ones(2))
        return shared.requires_grad, slice_rows(transport, peers, torch.arange(4.0)).tolist()

    assert on_all(2, rank) == [(False, [0, 1]), (False, [2, 3])]


@pytest.mark.parametrize("peers", [(1,), (1, 0), (0, 0, 1)])
def test_wrong_peers_are_our_own_mistake(peers):
    with pytest.raises(AssertionError):
        run_ranks(2, lambda transport: all_gather(transport, peers, torch.ones(1)))
