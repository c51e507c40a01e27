"""Each device gets its kernels, and Triton is only imported where it runs."""

from __future__ import annotations

import pytest
import torch

from moesaic.kernels import by_expert, pick, whole_batch


@pytest.mark.parametrize(
    ("device", "capability", "installed", "kind"),
    [
        ("cpu", (9, 0), True, "cpu"),
        ("cuda", (9, 0), True, "triton"),
        ("cuda", (8, 0), True, "triton"),
        ("cuda:1", (8, 9), True, "triton"),
        ("cuda", (7, 5), True, "other"),
        ("cuda", (9, 0), False, "other"),
        ("meta", (9, 0), True, "other"),
    ],
)
def test_the_kernels_of_a_device(device, capability, installed, kind, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(
        pick.importlib.util, "find_spec", lambda name: object() if installed else None
    )
    pick._can_run_triton.cache_clear()
    assert pick.kind_of(torch.device(device)) == kind
    pick._can_run_triton.cache_clear()


def test_a_device_without_kernels_of_its_own_runs_torchs_operations() -> None:
    kernel = pick.expert_kernel(torch.device("meta"))
    assert (kernel.forward, kernel.backward) == (whole_batch.forward, whole_batch.backward)
    assert pick.expert_kernel(torch.device("cpu")).forward is by_expert.forward
