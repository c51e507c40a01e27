"""The mailbox's checks, and lockstep: order, autograd, failures, generators."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moesaic.comm.loopback import Loopback, LoopbackTransport, run_ranks
from moesaic.comm.transport import AbstractTransport, Transfer


def exchange(transport: AbstractTransport, tensor: Tensor) -> list[Tensor]:
    """Send a tensor to every other rank. Return the tensors of all ranks, including this one's."""
    out = [
        tensor if rank == transport.rank else torch.empty_like(tensor)
        for rank in range(transport.world)
    ]
    others = [rank for rank in range(transport.world) if rank != transport.rank]
    receives = {rank: out[rank] for rank in others}
    transport.wait(
        transport.issue(
            Transfer(
                transport.rank, transport.take_tags(1), dict.fromkeys(others, tensor), receives
            )
        )
    )
    return out


def test_ranks_exchange_and_return_in_order():
    results = run_ranks(
        5, lambda transport: torch.cat(exchange(transport, torch.tensor([transport.rank]))).tolist()
    )
    assert results == [[0, 1, 2, 3, 4]] * 5


def interleaving(seed: int) -> list[int]:
    order: list[int] = []

    def rank(transport: AbstractTransport) -> None:
        for _ in range(6):
            order.append(transport.rank)
            exchange(transport, torch.ones(2))

    run_ranks(4, rank, seed=seed)
    return order


def test_the_seed_decides_the_order():
    orders = [interleaving(seed) for seed in range(3)]
    assert orders == [interleaving(seed) for seed in range(3)]
    assert len({tuple(order) for order in orders}) == 3


def test_one_rank_runs_at_a_time():
    inside: list[int] = []

    def rank(transport: AbstractTransport) -> None:
        for _ in range(20):
            inside.append(transport.rank)
            torch.randn(50, 50) @ torch.randn(50, 50)
            assert inside == [transport.rank]
            inside.pop()
            exchange(transport, torch.ones(1))

    run_ranks(8, rank)


def test_buffers_hold_nan_until_waited_for_and_handles_complete_in_any_order():
    def rank(transport: AbstractTransport) -> list[float]:
        peer = 1 - transport.rank
        handles = []
        first = transport.take_tags(5)
        for tag in range(first, first + 5):
            buffer = torch.zeros(1)
            handles.append(
                (
                    transport.issue(
                        Transfer(transport.rank, tag, {peer: torch.ones(1) * tag}, {peer: buffer})
                    ),
                    buffer,
                )
            )
        assert all(buffer.isnan().all() for _, buffer in handles)
        order = [3, 0, 4, 1, 2] if transport.rank else [2, 4, 0, 3, 1]
        for index in order:
            transport.wait(handles[index][0])
            transport.wait(handles[index][0])  # waiting again does nothing
            assert not handles[index][1].isnan().any()
        return [float(buffer) for _, buffer in handles]

    assert run_ranks(2, rank, seed=3) == [[0, 1, 2, 3, 4]] * 2


def test_ranks_that_wait_for_nobody_each_get_an_error():
    caught: dict[int, str] = {}

    def rank(transport: AbstractTransport) -> None:
        if transport.rank == 1:
            return
        try:
            transport.wait(transport.issue(Transfer(transport.rank, 7, {}, {1: torch.empty(1)})))
        except RuntimeError as error:
            caught[transport.rank] = str(error)
            raise

    message = (
        "ranks [0, 2] wait for messages that nobody sends: rank 0 for tag 7 with [1]; rank 2 for "
        "tag 7 with [1]"
    )
    with pytest.raises(RuntimeError) as error:
        run_ranks(3, rank)
    assert str(error.value) == message
    assert caught == {0: message, 2: message}


def test_ranks_that_send_before_they_receive_wait_for_ever():
    """A real transport may hold a large message until its receiver has posted the buffer."""

    def rank(transport: AbstractTransport) -> None:
        peer = 1 - transport.rank
        transport.wait(
            transport.issue(Transfer(transport.rank, transport.rank, {peer: torch.ones(1)}, {}))
        )
        transport.wait(transport.issue(Transfer(transport.rank, peer, {}, {peer: torch.empty(1)})))

    with pytest.raises(RuntimeError, match=r"ranks \[0, 1\] wait"):
        run_ranks(2, rank)


@pytest.mark.parametrize("seed", range(3))
def test_the_lowest_rank_that_raised_is_reported(seed):
    unwound: list[int] = []

    def rank(transport: AbstractTransport) -> None:
        exchange(transport, torch.ones(1))
        if transport.rank in (2, 3):
            raise ValueError(f"rank {transport.rank} is unwell")
        try:
            exchange(transport, torch.ones(1))
        except Exception:
            raise AssertionError("a rank that is stopped should not be able to go on") from None
        finally:
            unwound.append(transport.rank)

    with pytest.raises(ValueError, match="rank 2 is unwell"):
        run_ranks(5, rank, seed=seed)
    assert sorted(unwound) == [0, 1, 4]


def test_an_error_inside_backward_stops_all():
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, transport: AbstractTransport, tensor: Tensor) -> Tensor:
            ctx.transport = transport
            return tensor * 1

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
            if ctx.transport.rank == 1:
                raise KeyError("lost")
            return None, exchange(ctx.transport, gradient.contiguous())[0]

    with pytest.raises(KeyError, match="lost"):
        run_ranks(
            3,
            lambda transport: (
                Fails.apply(transport, torch.ones(2, requires_grad=True)).sum().backward()
            ),
        )


def test_what_is_left_over_is_an_error():
    def sends_more(transport: AbstractTransport) -> None:
        if transport.rank == 0:
            transport.issue(Transfer(0, 4, {1: torch.ones(1)}, {}))

    with pytest.raises(
        RuntimeError,
        match="never waited for: tag 4 on rank 0; never received: tag 4 from rank 0 to",
    ):
        run_ranks(2, sends_more)


def test_a_send_buffer_that_changes_too_early_is_an_error():
    def rank(transport: AbstractTransport) -> None:
        peer = 1 - transport.rank
        tensor = torch.ones(3)
        handle = transport.issue(
            Transfer(transport.rank, 0, {peer: tensor}, {peer: torch.empty(3)})
        )
        if transport.rank == 1:
            tensor.zero_()
        transport.wait(handle)

    with pytest.raises(AssertionError, match="rank 1 changed what it sends to 0"):
        run_ranks(2, rank)


@pytest.mark.parametrize("wrong", [torch.empty(2), torch.empty(3, dtype=torch.float64)])
def test_a_buffer_that_does_not_fit_is_an_error(wrong):
    def rank(transport: AbstractTransport) -> None:
        buffer = wrong.clone() if transport.rank else torch.empty(3)
        transport.wait(
            transport.issue(
                Transfer(
                    transport.rank,
                    0,
                    {1 - transport.rank: torch.ones(3)},
                    {1 - transport.rank: buffer},
                )
            )
        )

    with pytest.raises(AssertionError, match="rank 1 expects"):
        run_ranks(2, rank)


def test_each_rank_has_its_own_default_generator_and_the_callers_is_kept():
    def rank(transport: AbstractTransport) -> list[float]:
        first = float(torch.rand(()))
        torch.manual_seed(transport.rank)
        drawn = [first]
        for _ in range(3):
            exchange(transport, torch.ones(1))
            drawn.append(float(torch.rand(())))
        return drawn

    torch.manual_seed(99)
    before = torch.get_rng_state()
    results = run_ranks(4, rank, seed=5)
    assert torch.equal(torch.get_rng_state(), before)
    first = float(torch.rand(()))
    for number, drawn in enumerate(results):
        torch.manual_seed(number)
        assert drawn == [first, *(float(torch.rand(())) for _ in range(3))]


def test_modes_are_the_callers_and_then_each_ranks_own():
    def rank(transport: AbstractTransport) -> tuple[bool, bool, bool]:
        with torch.set_grad_enabled(transport.rank == 1):
            exchange(transport, torch.ones(1))
            return (
                torch.is_grad_enabled(),
                torch.is_inference_mode_enabled(),
                torch.is_autocast_enabled("cpu"),
            )

    assert run_ranks(2, rank) == [(False, False, False), (True, False, False)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert run_ranks(2, rank) == [(False, False, True), (True, False, True)]
    with torch.no_grad():
        assert run_ranks(2, lambda transport: torch.is_grad_enabled()) == [False, False]
    with torch.inference_mode():
        assert run_ranks(2, lambda transport: torch.is_inference_mode_enabled()) == [True, True]


def test_a_rank_that_never_ends_is_named():
    import threading

    release = threading.Event()
    with pytest.raises(TimeoutError, match=r"rank 0 of 1 was still running after 0\.2 seconds"):
        run_ranks(1, lambda transport: release.wait(10), timeout_seconds=0.2)
    release.set()


def test_bytes_are_counted_by_pair():
    def rank(transport: AbstractTransport) -> dict[tuple[int, int], int]:
        assert isinstance(transport, LoopbackTransport)
        exchange(transport, torch.ones(transport.world, dtype=torch.float16))
        exchange(transport, torch.ones(1))
        return transport.mailbox.bytes_sent

    assert run_ranks(3, rank)[0] == {(a, b): 10 for a in range(3) for b in range(3) if a != b}


def test_the_mailbox_alone_tells_who_is_missing():
    mail = Loopback()
    buffer = torch.zeros(2, dtype=torch.int32)
    receive = mail.issue(Transfer(0, 1, {}, {2: buffer}))
    assert (mail.missing(receive), buffer.tolist()) == ([2], [2**31 - 1] * 2)
    send = mail.issue(Transfer(2, 1, {0: torch.tensor([5, 6], dtype=torch.int32)}, {}))
    assert mail.missing(receive) == mail.missing(send) == []
    assert not mail.is_empty
    mail.wait(receive)
    mail.wait(send)
    assert (buffer.tolist(), mail.is_empty) == ([5, 6], True)
