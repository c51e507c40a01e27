"""Each device gets its kernels, and Triton is only imported where it runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moesaic.kernels import by_expert, pick, router_product, whole_batch


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


def test_an_amd_gpu_runs_torchs_operations(monkeypatch) -> None:
    """Its capability, (9, 4), is not that of a Hopper."""
    device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 4))
    monkeypatch.setattr(pick.importlib.util, "find_spec", lambda _: object())
    pick._can_run_triton.cache_clear()
    assert pick.kind_of(device) == "triton"
    assert pick.runs_grouped_mm(device, torch.bfloat16)
    assert router_product._takes_pieces(device)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    pick._can_run_triton.cache_clear()
    assert pick.kind_of(device) == "other"
    assert not pick.runs_grouped_mm(device, torch.bfloat16), "it loops over experts there"
    assert not router_product._takes_pieces(device), "its products have their operands' dtype"
    pick._can_run_triton.cache_clear()


@pytest.mark.parametrize(
    ("capability", "expected"),
    [((7, 0), False), ((8, 9), False), ((10, 3), True), ((12, 0), False)],
)
def test_torchs_grouped_product_is_taken_where_it_is_one_kernel(
    capability, expected, monkeypatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert pick.runs_grouped_mm(torch.device("cuda"), torch.bfloat16) == expected
    assert not pick.runs_grouped_mm(torch.device("cuda"), torch.float16)


def test_the_page_says_where_our_kernels_were_compiled_and_where_they_are_refused() -> None:
    page = (Path(__file__).parents[2] / "docs" / "kernels_gpu.md").read_text()
    _, table = page.split("| device | our kernels | ran on one |\n|---|---|---|\n")
    rows = [line.strip("| ").split(" | ") for line in table.split("\n\n")[0].splitlines()]
    refused = {device for device, kernels, _ in rows if "refused" in kernels}
    assert refused == {"AMD", "V100, T4", "Apple (MPS), Intel (XPU)"}
    for device, kernels, _ in rows:
        assert device in refused or kernels.startswith("compiled, interpreted"), device
    assert [device for device, _, ran in rows if "measured" in ran] == ["H100, H200"]
