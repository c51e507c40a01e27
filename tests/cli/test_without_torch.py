"""The core alone (`pip install .`): every command that docs/planning.md lists runs with torch out
of reach."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from moesaic.configfile import as_toml
from moesaic.planner.cluster import ClusterSpec, Device, Host, Link, Tflops

ROOT = Path(__file__).resolve().parents[2]
TRACE = ROOT / "benchmarks" / "traces" / "gpt-tiny-unbalanced"
BLOCKED = """import contextlib, io, json, os, sys
class Blocked:
    def find_spec(self, name, *_):
        if name.split('.')[0] in ('torch', 'safetensors', 'tensorboard', 'plotly', 'triton'):
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Blocked())
from moesaic.cli.main import main
ended = {}
for name, words in json.loads(sys.argv[1]).items():
    out, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        try:
            code = main(words)
        except SystemExit as done:
            code = done.code or 0
    ended[name] = code, out.getvalue(), error.getvalue()
print(json.dumps([ended, os.listdir()]))
"""
PROFILE = ClusterSpec(
    nodes=2,
    devices_per_node=2,
    device=Device(tflops=Tflops(fp32=0.03), memory_gib=8, memory_gigabytes_per_second=3),
    links=(
        Link(name="inside", devices=2, gbps=(0.4,), carries="inside", shared=True),
        Link(name="outside", devices=2, gbps=(0.2,), carries="outside"),
    ),
    host=Host(runs_compute=True, layer_us=1000, task_us=200),
)
NARROW = [
    "--tp",
    "1",
    "--schedules",
    "s1",
    "--all-to-alls",
    "linear",
    "--chunks",
    "1",
    "--orders",
    "fifo",
    "--json",
]


def documented() -> list[str]:
    """Return the commands that docs/planning.md says the core has."""
    text = (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")
    section = text.split("## Install")[1].split("\n## ")[0]
    listed = re.search(r"Without torch, (.*?) run; every other command refuses", section, re.DOTALL)
    return re.findall(r"`(?:moesaic )?([a-z ]+)`", listed[1])


COMMANDS = {
    "plan": ["plan", "--model", "gpt-tiny", "--cluster", "cluster.toml", "--pp", "1", *NARROW],
    "show": [
        "show",
        "--plan.schedule",
        "s1",
        "--mesh.world",
        "4",
        "--mesh.ep",
        "4",
        "--mesh.etp",
        "1",
        "--json",
    ],
    "trace": ["trace", "show", str(TRACE), "--json"],
}
"""A quick use of each."""
OTHERS = {
    "help": ["train", "--preset", "demo", "--help-all"],
    "refused": ["train", "--config", "config.json"],
    "train": ["train", "--preset", "gpt-tiny"],
    "profile": ["profile", "--out", "p.toml"],
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, str]]:
    """Return exit code, output and errors of each command in a process without torch and the other
    extras."""
    folder = tmp_path_factory.mktemp("core")
    (folder / "cluster.toml").write_text(as_toml(PROFILE))
    (folder / "config.json").write_text('{"optimizer": {"lr": Infinity}}')
    told = [sys.executable, "-c", BLOCKED, json.dumps(COMMANDS | OTHERS)]
    done = subprocess.run(
        told, cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    found, left = json.loads(done.stdout)
    assert sorted(left) == ["cluster.toml", "config.json"]
    return {name: tuple(each) for name, each in found.items()}


def test_the_page_lists_the_commands_that_are_tried_here() -> None:
    assert sorted(documented()) == sorted(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_of_the_core_runs_without_torch(
    name: str, ended: dict[str, tuple[int, str, str]]
) -> None:
    code, out, error = ended[name]
    assert code == 0, error
    found = json.loads(out)
    assert found
    if name == "plan":
        assert found["ranking"][0]["parts"]["routing"] == pytest.approx(2 * 1e-3)


def test_help_of_training_needs_no_torch(ended: dict[str, tuple[int, str, str]]) -> None:
    code, out, error = ended["help"]
    assert code == 0, error
    assert {"--mesh.transport", "--model.moe.router", "topology", "--plan.schedule"} <= set(
        re.findall(r"[\w.-]+", out)
    )


def test_settings_of_training_are_refused_without_torch(
    ended: dict[str, tuple[int, str, str]],
) -> None:
    """A process that has loaded torch takes seconds to end, and more on a busy machine."""
    assert ended["refused"] == (
        2,
        "",
        "moesaic train: optimizer.lr=inf: must be above 0 and finite\n",
    )


def test_the_layer_imports_nothing_that_one_process_has_no_use_for() -> None:
    """What one imports to train takes little more than torch itself: not time is looked at, but
    what is imported.

    A CPU runs the layer without the kernels of GPUs.
    """
    slow = (
        "torch.distributed.tensor",
        "torch.distributed.fsdp",
        "torch._dynamo",
        "torch._inductor",
        "torch.export",
        "sympy",
        "scipy.optimize",
        "scipy.sparse",
        "moesaic.kernels.triton",
        "moesaic.report",
        "moesaic.train",
    )
    code = (
        "import sys, torch; before = set(sys.modules); from moesaic import MoE; "
        f"print([name for name in {slow!r} if name in set(sys.modules) - before]); "
        "MoE(8, 8, 4)(torch.randn(3, 8)).sum().backward(); "
        "print([name for name in sys.modules if name.startswith('moesaic.kernels.triton')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout.split() == ["[]", "[]"], done.stdout + done.stderr


@pytest.mark.parametrize("name", ["train", "profile"])
def test_other_commands_say_what_to_install(
    name: str, ended: dict[str, tuple[int, str, str]]
) -> None:
    code, _, error = ended[name]
    assert code == 2
    assert error.count("\n") == 1
    assert 'pip install ".[train]"' in error
