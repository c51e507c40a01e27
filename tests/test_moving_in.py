"""docs/moving_in.md: each layer runs as it was, where its package is, and as it is here; some are
compared on equal weights."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forked import Forked
from moesaic import MoE

PAGE = (Path(__file__).parent.parent / "docs" / "moving_in.md").read_text(encoding="utf-8")
SYSTEMS = {
    section.split("\n", 1)[0]: re.search(
        (
            r"<!-- not run: needs ([\w.]+)(, and CUDA)? "
            r"-->\n```python\n(.*?)```\n\n```python\n(.*?)```"
        ),
        section,
        re.DOTALL,
    )
    for section in PAGE.split("\n## ")[1:]
}
"""By system: its package, whether it needs a GPU, and the layer before and after."""


def needed(system: str) -> None:
    """Skip unless the system's package is here, and a GPU if it needs one."""
    found = SYSTEMS[system]
    if find_spec(found[1].split(".")[0]) is None:
        pytest.skip(f"{found[1]} is not installed")
    if found[2] and not torch.cuda.is_available():
        pytest.skip(f"{found[1]} needs a GPU")


def test_every_system_has_a_layer_before_and_after() -> None:
    names = [
        "Tutel",
        "FastMoE",
        "DeepSpeed-MoE",
        "Megatron-Core",
        "torchtitan",
        "MegaBlocks",
        "transformers",
    ]
    assert list(SYSTEMS) == names
    assert all(SYSTEMS.values())


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_layer_before_runs(system: str, tmp_path: Path) -> None:
    needed(system)
    found = SYSTEMS[system]
    (tmp_path / "before.py").write_text(found[3], encoding="utf-8")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    command = Forked(
        [*(launcher if found[3].startswith("# torchrun") else ()), str(tmp_path / "before.py")], {}
    )
    _, err = command.communicate(timeout=300)
    assert command.returncode == 0, err


def from_transformers(theirs: Any, ours: MoE) -> dict[str, Tensor]:
    """Return our parameters with the values of a block of transformers."""
    return {
        "router.weight": theirs.gate.weight,
        "experts.w13": theirs.experts.gate_up_proj.unflatten(1, (2, ours.hidden)),
        "experts.w2": theirs.experts.down_proj,
    }


def from_torchtitan(theirs: Any, ours: MoE) -> dict[str, Tensor]:
    """Return our parameters with the values of a layer of torchtitan."""
    experts = theirs.routed_experts.inner_experts
    return {
        "router.weight": theirs.router.gate.weight,
        "experts.w13": torch.stack([experts.w1_EFD, experts.w3_EFD], 1),
        "experts.w2": experts.w2_EDF,
    }


def from_deepspeed(theirs: Any, ours: MoE) -> dict[str, Tensor]:
    """Return our parameters with the values of a layer of DeepSpeed, whose experts are two
    `nn.Linear`s."""
    experts = theirs.deepspeed_moe.experts.deepspeed_experts
    stacked = [
        torch.stack([getattr(e[at], kind) for e in experts])
        for at in (0, 2)
        for kind in ("weight", "bias")
    ]
    names = ("experts.w1", "experts.b1", "experts.w2", "experts.b2")
    return {
        "router.weight": theirs.deepspeed_moe.gate.wg.weight,
        **dict(zip(names, stacked, strict=True)),
    }


COPIES: dict[str, tuple[Callable[[Any, MoE], dict[str, Tensor]], float]] = {
    "transformers": (from_transformers, 1e-5),
    "torchtitan": (from_torchtitan, 2e-2),
    "DeepSpeed-MoE": (from_deepspeed, 1e-5),
}
"""How weights go from a system's layer to ours, and how far results may differ; torchtitan's
experts round to bfloat16."""


@pytest.mark.parametrize("system", COPIES)
def test_the_layer_after_computes_what_the_one_before_does(system: str) -> None:
    needed(system)
    found = SYSTEMS[system]
    if found[3].startswith("# torchrun"):
        torch.distributed.init_process_group(
            "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
        )
    before: dict[str, Any] = {}
    after: dict[str, Any] = {}
    torch.manual_seed(0)
    alive = found[3].replace("dist.destroy_process_group()\n", "")
    exec(alive, before)
    exec(found[4], after)
    copied, tolerance = COPIES[system]
    weights = copied(before["moe"], after["moe"])
    missing, unexpected = after["moe"].load_state_dict(
        {k: v.detach() for k, v in weights.items()}, strict=False
    )
    assert not unexpected
    assert not [name for name in missing if "weight" in name or "experts" in name]
    x = torch.randn(4, 16, 64)
    theirs = before["moe"](x)
    ours = after["moe"](x)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    theirs = theirs[0] if isinstance(theirs, tuple) else theirs
    largest = float(theirs.detach().abs().max())
    assert float((theirs - ours).detach().abs().max()) <= tolerance * largest
