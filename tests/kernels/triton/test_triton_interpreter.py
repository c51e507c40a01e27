"""Runs the tests of this folder under Triton's interpreter, in a new process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason='the GPU extra is not installed: pip install ".[gpu]"')


@pytest.mark.parametrize(
    "which",
    ["not slow and not random", pytest.param("random and not slow", marks=pytest.mark.random)],
)
def test_kernels_under_the_interpreter(which):
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        str(Path(__file__).parent),
        "-m",
        which,
        "-x",
        "-p",
        "no:cacheprovider",
    ]
    process = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=550, check=False
    )
    assert process.returncode == 0, process.stdout[-4000:] + process.stderr[-2000:]
    assert " passed" in process.stdout
