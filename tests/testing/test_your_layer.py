"""The pytest plugin: the example runs as users would run it, and the comparison's messages are
right."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from moesaic.program.grid import Grid
from moesaic.testing.certify import assert_equivalent, small_meshes

ROOT = Path(__file__).parent.parent.parent


def pytest_on(*paths: Path) -> subprocess.CompletedProcess:
    plugin = ["-p", "moesaic.testing.plugin"]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *plugin, *map(str, paths)]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )


def test_the_example_finds_its_bug_and_a_failing_layer_fails_and_says_why(tmp_path):
    example = ROOT / "examples" / "test_your_layer.py"
    mine = tmp_path / "test_mine.py"
    text = example.read_text()
    correct = "finish=average_all\n"
    assert text.count(correct) == 1
    mine.write_text(text.replace(correct, "finish=average_all_but_experts\n"))
    done = pytest_on(example, mine)
    assert done.returncode == 1
    assert "3 failed, 35 passed" in done.stdout, (
        "each mesh with experts on several ranks, in the copy alone"
    )
    assert "gradient of weight on tp=1 ep=2 etp=1 of 2 ranks, rank 0" in done.stdout
    assert "it is 2 times what it should be" in done.stdout


def test_small_meshes():
    assert [mesh.world for mesh in small_meshes(1)] == [1]
    assert {(m.world, m.ep) for m in small_meshes(4, ("ep",))} == {
        (1, 1),
        (2, 1),
        (2, 2),
        (4, 1),
        (4, 2),
        (4, 4),
    }
    assert all(m.world % (m.ep * m.etp) == 0 and m.world % m.tp == 0 for m in small_meshes(8))
    assert max(m.world for m in small_meshes(8)) == 8


class Scaled(nn.Module):
    def __init__(self, by: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), 2.0, dtype=torch.float64))
        self.by = by

    def forward(self, x):
        return x * self.weight * self.by


@pytest.mark.parametrize("world", [1, 2, 4])
def test_outputs_are_compared(world):
    def check(by: float) -> None:
        assert_equivalent(
            lambda rank: Scaled(by),
            Scaled(1.0),
            Grid(world=world),
            dim=3,
            shard=lambda name, gradients, rank: gradients[name],
            finish=lambda layer, rank: setattr(
                layer.weight, "grad", rank.all_reduce(layer.weight.grad, "dp") / rank.grid.dp
            ),
        )

    check(1.0)
    with pytest.raises(AssertionError, match=r"output .* it is 1\.5 times what it should be"):
        check(1.5)


@pytest.mark.parametrize(
    ("factor", "named"),
    [(lambda grid: grid.dp, "2"), (lambda grid: 1 / grid.tp, "0.5"), (lambda grid: 0.0, "0")],
)
def test_a_wrong_ratio_is_named(factor, named):
    def finish(layer, rank):
        layer.weight.grad = (
            rank.all_reduce(layer.weight.grad, "dp") / rank.grid.dp * factor(rank.grid)
        )

    with pytest.raises(
        AssertionError, match=rf"gradient of weight .* it is {named} times what it should be"
    ):
        assert_equivalent(
            lambda rank: Scaled(1.0),
            Scaled(1.0),
            Grid(world=4, tp=2),
            dim=3,
            shard=lambda name, gradients, rank: gradients[name],
            finish=finish,
        )


def test_values_in_other_places_have_no_factor():
    def finish(layer, rank):
        layer.weight.grad = (rank.all_reduce(layer.weight.grad, "dp") / rank.grid.dp).flip(0)

    with pytest.raises(AssertionError, match=r"relative error .*: no single factor explains it"):
        assert_equivalent(
            lambda rank: Scaled(1.0),
            Scaled(1.0),
            Grid(world=2),
            dim=3,
            shard=lambda name, gradients, rank: gradients[name],
            finish=finish,
        )


def test_rows_go_where_they_are_sent_whatever_their_number():
    from moesaic.comm.loopback import run_ranks
    from moesaic.comm.mesh import Mesh
    from moesaic.testing.certify import Rank

    def run(transport):
        rank = Rank(Mesh(Grid(world=4, ep=4), transport))
        parts = [torch.full((peer + rank.number, 2), 10 * rank.number + peer) for peer in range(4)]
        return rank.all_to_all(parts, "ep")

    for rank, received in enumerate(run_ranks(4, run)):
        for source, part in enumerate(received):
            assert part.tolist() == [[10 * source + rank] * 2] * (source + rank)
