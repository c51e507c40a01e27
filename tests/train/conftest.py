"""Skips the measurement of the machine's matmul rate in all tests of this folder."""

from __future__ import annotations

import pytest

from runs import skip_measuring


@pytest.fixture(autouse=True)
def _no_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    skip_measuring(monkeypatch)
