"""transformers' expert parallelism with Moesaic's programs: processes over Gloo against one process
that loops over experts.

Ranks compute in float32, the single process in float64. Ranks cannot use float64: FSDP2 then
divides the gradients of experts without a replica twice, under transformers' own all-to-all as
well.
"""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason='pip install ".[transformers]"')

from ep_ranks import find_plan, lines, moved_experts

from moesaic.errors import InputError
from moesaic.transformers import distributed_config
from moesaic_lab.hf import cases_on, ep_errors, steps, write_models
from worlds import on_ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three tiny models."""
    path = tmp_path_factory.mktemp("models")
    write_models(path)
    return path


@pytest.mark.parametrize(
    "world", [2, pytest.param(4, marks=pytest.mark.random), pytest.param(8, marks=pytest.mark.slow)]
)
def test_ranks_equal_one_process(folder: Path, world: int) -> None:
    cases = cases_on(world, *(str(folder / name) for name in ("mixtral", "gpt_oss", "skewed")))
    for case, error in zip(cases, ep_errors(world, cases, on_ranks(world, steps, "cpu", cases))):
        assert 0 < error <= 1e-5, (case, error)


def test_an_optimizer_made_before_the_first_call_trains_the_experts(folder: Path) -> None:
    """transformers spreads experts as it loads a model: no optimizer of it can be made before."""
    for moved, number in on_ranks(2, moved_experts, str(folder / "mixtral")):
        assert moved == number > 0


def test_the_plan_is_found_while_training(folder: Path) -> None:
    for found in on_ranks(2, find_plan, str(folder / "mixtral")):
        assert found["plans"] == {found["candidates"][-1]}
        assert len(found["candidates"]) >= 4
        assert len(found["said"]) == 1


def test_ranks_say_in_one_line_what_does_not_fit(folder: Path) -> None:
    for said in on_ranks(2, lines, str(folder / "mixtral")):
        different, instead, without, taken = said
        assert (
            "plan.chunks differs: 2 on rank 1, 1 on rank 0" in different
            or "plan.chunks differs" in different
        )
        assert "MixtralExperts has its own gate" in instead
        assert "all_to_all" in instead
        assert 'load it with ep_implementation="moesaic"' in without
        assert "'all_to_all' is taken" in taken


def test_ranks_that_tp_leaves_have_batches_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The documentation gives no fsdp_size, which transformers would take as 1 and then refuse."""
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert distributed_config(ep_size=4).fsdp_size == 8
    assert distributed_config(ep_size=4, tp_size=2).fsdp_size == 4
    assert distributed_config(ep_size=4, fsdp_size=4).fsdp_size == 4
    assert (
        distributed_config(ep_size=4, ep_implementation="of-a-plan").ep_implementation
        == "of-a-plan"
    )
    with pytest.raises(
        InputError,
        match=r"^ep_size=3 does not divide .* 8 of them: start torchrun --nproc-per-node 3, or",
    ):
        distributed_config(ep_size=3)


def test_the_extra_brings_what_transformers_asks_for_on_several_ranks():
    named = [
        line
        for line in metadata.requires("moesaic") or ()
        if "extra == 'transformers'" in line.replace('"', "'")
    ]
    assert any(line.startswith("accelerate") for line in named), named
