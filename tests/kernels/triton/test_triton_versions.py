"""The layer compiles for Hopper and Ampere with the Triton versions of the other supported torch versions.

`make test-random` installs them in build/triton/<version>. Each is imported in a process of its own. `make test-triton`
compiles everything with each of them, for every GPU.
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
LAYERS = "test_a_layer_runs_on_the_tensor_cores and bfloat16 and (80 or 90)"


@pytest.mark.random
@pytest.mark.skipif(not FOUND, reason="no other Triton is in build/triton: run make test-random")
@pytest.mark.parametrize("triton", FOUND, ids=lambda path: path.name)
def test_the_layer_compiles_by_another_triton(triton: Path, tmp_path: Path) -> None:
    paths = os.pathsep.join(filter(None, (str(triton), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONPATH": paths, "TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    asked = (sys.executable, "-c", "import triton; print(triton.__version__)")
    version = subprocess.run(asked, env=environment, capture_output=True, text=True, check=True).stdout.strip()
    assert version == triton.name
    tests = str(Path(__file__).with_name("test_triton_compiled.py"))
    command = [sys.executable, "-m", "pytest", tests, "-k", LAYERS, "-p", "no:cacheprovider", "--durations", "0"]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=550, check=False)
    assert process.returncode == 0, process.stdout[-4000:] + process.stderr[-2000:]
    assert "2 passed" in process.stdout
