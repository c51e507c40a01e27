"""The layer compiles with the Triton versions of the other supported torch versions, for Hopper or
Ampere in turn, and runs under their interpreters.

`make test-random` installs them in build/triton/<version>. Each is imported in a process of its
own. `make test-triton` compiles everything with each of them, for every GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason='the GPU extra is not installed: pip install ".[gpu]"')

ROOT = Path(__file__).parents[3]
FOUND = sorted(path.parents[1] for path in ROOT.glob("build/triton/*/triton/__init__.py"))
TRIED = [
    pytest.param(path, (90, 80)[number % 2], id=path.name) for number, path in enumerate(FOUND)
]
PLUGIN = (
    "import triton\n\ndef pytest_sessionfinish():\n    print('Triton is', triton.__version__)\n"
)


@pytest.mark.random
@pytest.mark.skipif(not FOUND, reason="no other Triton is in build/triton: run make test-random")
@pytest.mark.parametrize(("triton", "capability"), TRIED)
def test_the_layer_compiles_by_another_triton(
    triton: Path, capability: int, tmp_path: Path
) -> None:
    layer = f"test_a_layer_runs_on_the_tensor_cores and bfloat16 and {capability}"
    assert "1 passed" in run_with(triton, tmp_path, "test_triton_compiled.py", "-k", layer)


@pytest.mark.random
@pytest.mark.skipif(not FOUND, reason="no other Triton is in build/triton: run make test-random")
@pytest.mark.parametrize("triton", [pytest.param(path, id=path.name) for path in FOUND])
def test_kernels_run_under_the_interpreter_of_another_triton(triton: Path, tmp_path: Path) -> None:
    files = ("test_triton_expert_stage.py", "test_triton_permute.py", "test_triton_pick.py")
    quick = ("-m", "not slow and not random")
    assert " passed" in run_with(triton, tmp_path, *files, *quick, TRITON_INTERPRET="1")


def run_with(triton: Path, folder: Path, *words: str, **variables: str) -> str:
    """Run tests of this folder with the Triton of a folder; return what pytest printed. They must
    pass."""
    (folder / "named.py").write_text(PLUGIN)
    paths = os.pathsep.join(filter(None, (str(triton), str(folder), os.environ.get("PYTHONPATH"))))
    environment = (
        os.environ
        | {"PYTHONPATH": paths, "TRITON_CACHE_DIR": str(folder), "OMP_NUM_THREADS": "1"}
        | variables
    )
    command = [sys.executable, "-m", "pytest", *words, "-p", "no:cacheprovider", "-p", "named"]
    process = subprocess.run(
        command,
        cwd=Path(__file__).parent,
        env=environment,
        capture_output=True,
        text=True,
        timeout=550,
        check=False,
    )
    assert process.returncode == 0, process.stdout[-4000:] + process.stderr[-2000:]
    assert f"Triton is {triton.name}\n" in process.stdout
    return process.stdout
