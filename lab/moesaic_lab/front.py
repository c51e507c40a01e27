"""`moesaic bench front`: README, from its first line on, in an empty environment.

What is committed is cloned, an environment without packages gets README's `pip install`, and every
Python block runs as a file, in order, one for several ranks under torchrun. The claim is the
seconds of all of it, if every step succeeds; they depend on where pip finds torch.

    moesaic bench front --json benchmarks/results/front.json
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from moesaic_lab.benchmark import Benchmark, BenchmarkOptions, Shown, Told, notes_of
from moesaic_lab.claims import ROOT, Claim

LAUNCH = re.compile(r"# (?:python|torchrun --nproc-per-node (\d+)) (\w+\.py)\b")
"""The first line of a block that says how to start it, under which name."""
TEN_MINUTES = 600.0


def blocks_of(page: Path) -> list[tuple[str, str, str]]:
    """Return ranks ("" for one process without torchrun), file name and code of each block that
    runs; one that cannot says why in a comment in front of it."""
    blocks: list[tuple[str, str, str]] = []
    pattern = r"(<!-- not run: [^\n]+ -->\n)?```python\n(.*?)```"
    for reason, code in re.findall(pattern, page.read_text("utf-8"), re.DOTALL):
        # "# FILE.py" begins a file that moesaic_lab.extending puts where it says.
        if reason or re.match(r"# \S+\.py\b", code):
            continue
        launch = LAUNCH.match(code)
        ranks, name = launch.groups("") if launch else ("", f"block{len(blocks)}.py")
        blocks.append((ranks, name, code))
    return blocks


def measure(options: BenchmarkOptions, cases: None, told: Told) -> list[dict[str, Any]]:
    """Follow README and time each step."""
    rows = []
    with TemporaryDirectory() as name:
        clone = Path(name, "moesaic")
        python = Path(name, "moesaic", ".venv", "bin", "python")
        readme = (ROOT / "README.md").read_text("utf-8")
        (wanted,) = re.findall(r"&& cd moesaic\n    pip install \"(.+)\"", readme)
        steps: dict[str, Sequence[str]] = {
            "git clone": ["git", "clone", "--quiet", "--local", str(ROOT), str(clone)],
            "environment": [sys.executable, "-m", "venv", str(clone / ".venv")],
            "newest pip": [str(python), "-m", "pip", "install", "--quiet", "--upgrade", "pip"],
            f"pip install {wanted}": [str(python), "-m", "pip", "install", "--quiet", wanted],
        }
        for ranks, file, code in blocks_of(ROOT / "README.md"):
            launcher = ["-m", "torch.distributed.run", "--nproc-per-node", ranks] if ranks else []
            Path(name, file).write_text(code, encoding="utf-8")
            steps[file] = [str(python), *launcher, str(Path(name, file))]
        for step, command in steps.items():
            told(step)
            start = time.perf_counter()
            folder = clone if clone.exists() else name  # the first step makes the clone
            done = subprocess.run(command, cwd=folder, capture_output=True, check=False)
            rows.append(
                {
                    "step": step,
                    "seconds": time.perf_counter() - start,
                    "succeeds": done.returncode == 0,
                }
            )
    return rows


def claims(rows: list[dict[str, Any]]) -> list[Claim]:
    """Return the claim: the seconds of all steps."""
    failed = [row["step"] for row in rows if not row["succeeds"]]
    seconds = None if failed else sum(row["seconds"] for row in rows)
    reason = f"{', '.join(failed)} failed" if failed else ""
    return [
        Claim(
            name="front.readme_seconds", value=seconds, unit="s", target=TEN_MINUTES, reason=reason
        )
    ]


BENCHMARK = Benchmark(
    name="front",
    description="Follow README in an empty environment.",
    options=BenchmarkOptions,
    notes=notes_of(__doc__),
    measure=measure,
    claims=claims,
    columns=(Shown(title="README, step by step", columns=("step", "seconds", "succeeds")),),
)
