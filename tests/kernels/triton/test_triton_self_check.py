"""A GPU whose compiler has been wrong is checked before the first product, and only then."""

from __future__ import annotations

import pytest
import torch

from helpers import refused
from moesaic.kernels.triton import self_check
from moesaic.kernels.triton.rows.tiles import TileDevice

B200 = TileDevice(name="B200", capability=(10, 0), multiprocessors=2, shared_bytes=232_448)


@pytest.fixture
def multiplied(monkeypatch):
    """Pretend that the device is a B200; the list of the products that were compared."""
    products = []
    product = self_check.outer_products
    monkeypatch.setattr(self_check, "device_of", lambda _: B200)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(
        self_check,
        "outer_products",
        lambda *given: products.append(product(*given)) or products[-1],
    )
    self_check._error.cache_clear()
    yield products
    self_check._error.cache_clear()


def test_right_products_pass_and_are_compared_once(multiplied, device):
    for _ in range(3):
        self_check.check_products(torch.device(device))
    assert len(multiplied) == 1


def test_wrong_products_are_refused_in_every_call(multiplied, device, monkeypatch):
    right = self_check.outer_products
    monkeypatch.setattr(self_check, "outer_products", lambda *given: right(*given) * 1.1)
    for _ in range(2):
        said = refused(lambda: self_check.check_products(torch.device(device)))
        assert "multiplies wrongly on B200 (error 0.1" in said
    assert len(multiplied) == 1


def test_nothing_is_compared_in_a_capture_or_on_another_gpu(multiplied, device, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        self_check.check_products(torch.device(device))
    monkeypatch.undo()
    self_check.check_products(torch.device(device))
    assert multiplied == []
