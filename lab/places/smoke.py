"""The smoke test: what a stranger does in the first half hour, with the commands that the pages
print.

A place is an environment to try; its ground (`ground.py`) is the folder there, with the variables
and the user of its commands. Each function here returns steps: commands with what they must leave
behind. README's section "Commands" prints two: one that trains, and one that plans.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from places.ground import Ground
from places.steps import Step
from places.walk import PAGES, walk

SMALL = "--batch-size 4 --model.seq-len 64 --evaluate.sequences 8"
"""Makes a step of the demo's training a matter of a second, on two cores too."""
RUN = "runs/places"
CASES = 150
"""Cases of `moesaic check`, with those on real processes: a minute on two cores."""
INSTALL_MINUTES = 30


def blocks(page: str) -> list[str]:
    """Return the Python blocks of a page, each a whole file."""
    return re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)


def commands(page: str, section: str) -> list[tuple[str, ...]]:
    """Return the commands that a section of a page prints: its indented lines, without comments."""
    _, after_title = page.split(f"\n## {section}\n", 1)
    text, *_ = after_title.split("\n## ", 1)
    lines = re.findall(r"^    (\S.*)$", text, re.MULTILINE)
    return [tuple(shlex.split(line, comments=True)) for line in lines]


def install_line(readme: str) -> tuple[str, ...]:
    """Return README's line that installs, as words."""
    installing = []
    for words in commands(readme, "Install"):
        if words[:2] == ("pip", "install"):
            installing.append(words)
    (line,) = installing
    return line


def readme_of(ground: Ground) -> str:
    """Return the README of the clone."""
    return (ground.here("moesaic") / "README.md").read_text(encoding="utf-8")


def write_blocks(ground: Ground, readme: str) -> None:
    """Write README's Python blocks into the place, each as a file."""
    for number, block in enumerate(blocks(readme), start=1):
        ground.here(f"block{number}.py").write_text(block, encoding="utf-8")


def set_up_from_readme(
    ground: Ground, python: str, *, without_transformers: bool, torch: str | None
) -> list[Step]:
    """Return the steps of README's install line in an empty environment.

    Args:
        python: the interpreter that makes the environment.
        without_transformers: take the extra that README names for Python 3.10.
        torch: a version to ask for; None for what pip chooses.
    """
    words = install_line(readme_of(ground))
    if without_transformers:
        *start, _ = words
        words = (*start, ".[train]")
    if torch is not None:
        words = (*words, f"torch=={torch}")
    environment = (python, "-m", "venv", ground.inside(ground.environment))
    return [
        Step(name="environment", command=environment),
        Step(name="install", command=words, minutes=INSTALL_MINUTES),
    ]


def set_up_from_make() -> list[Step]:
    """Return the step that CONTRIBUTING.md names, which makes the environment too."""
    return [Step(name="make setup", command=("make", "setup"), minutes=INSTALL_MINUTES)]


def train_and_look(readme: str) -> list[Step]:
    """Return training with a save, a resume on another mesh, a sample and the report."""
    train, _ = commands(readme, "Commands")
    short = f"--steps 20 --save.every 10 --out {RUN} {SMALL}".split()
    again = f"--config {RUN}/config.json --existing resume --steps 30 --mesh.ep 2"
    resume = f"torchrun --nproc-per-node 2 -m moesaic train {again}".split()
    sample = ("moesaic", "sample", RUN, "--prompt", "The ", "--tokens", "20")
    return [
        Step(name="train", command=(*train, *short), says="done: .* step 20", makes=(RUN,)),
        Step(name="resume on 2 ranks", command=tuple(resume), says="done: .* step 30"),
        Step(name="sample", command=sample, says="The "),
        Step(name="report", command=("moesaic", "report", RUN), makes=(f"{RUN}/report.html",)),
    ]


def readme_as_written(ground: Ground, readme: str, *, without_transformers: bool) -> list[Step]:
    """Return README's blocks, those for several ranks under torchrun, and its command of the
    planner."""
    steps = []
    for number, block in enumerate(blocks(readme), start=1):
        if without_transformers and "transformers" in block:
            continue
        start = ["python"]
        launch = re.match(r"# torchrun --nproc-per-node (\d+) ", block)
        if launch:
            start = ["torchrun", "--nproc-per-node", launch[1]]
        file = ground.inside(f"block{number}.py")
        steps.append(Step(name=f"README block {number}", command=(*start, file)))
    _, plan = commands(readme, "Commands")
    return [*steps, Step(name="README plan", command=plan, says="tokens/s")]


def fine_tune(ground: Ground, *, is_installed: bool) -> list[Step]:
    """Return `finetune` of a tiny model, after the install line of its page unless its extra is
    there."""
    model = ground.inside("tiny")
    out = f"{RUN}-finetune"
    options = f"--out {out} --steps 4 --save-every 2 --length 64 --batch 2 --merge".split()
    steps = []
    if not is_installed:
        install = ("pip", "install", ".[finetune]")
        steps.append(Step(name="install finetune", command=install, minutes=INSTALL_MINUTES))
    make_model = ("python", "lab/places/tiny_model.py", model)
    steps.append(Step(name="tiny model", command=make_model))
    steps.append(
        Step(
            name="finetune",
            command=("moesaic", "finetune", model, "README.md", *options),
            makes=(f"{out}/adapter_model.safetensors", f"{out}/merged/config.json"),
            says="step 4, loss",
        )
    )
    return steps


def check() -> Step:
    """Return a minute of random cases beside float64."""
    return Step(name="check", command=("moesaic", "check", "--cases", str(CASES)))


def whole(
    ground: Ground, set_up: list[Step], *, without_transformers: bool, has_finetune: bool
) -> list[Step]:
    """Return the whole smoke test after the steps that set up; `has_finetune` says that they
    install the extra for fine-tuning too."""
    readme = readme_of(ground)
    write_blocks(ground, readme)
    steps = [*set_up, *train_and_look(readme)]
    steps += readme_as_written(ground, readme, without_transformers=without_transformers)
    if not without_transformers:
        steps += fine_tune(ground, is_installed=has_finetune)
    return [*steps, check()]


def walks(ground: Ground, python: str) -> list[Step]:
    """Return README's install line, then the walk-throughs of pages as printed."""
    docs = ground.here("moesaic") / "docs"
    steps = set_up_from_readme(ground, python, without_transformers=False, torch=None)
    for page in PAGES:
        text = (docs / f"{page}.md").read_text("utf-8")
        steps += walk(page, text, ground)
    return steps


def planner_and_layer(ground: Ground, python: str) -> list[Step]:
    """Return what is expected to work on macOS and Windows: the planner without torch, then the
    layer on a CPU."""
    readme = readme_of(ground)
    write_blocks(ground, readme)
    environment = (python, "-m", "venv", ground.inside(ground.environment))
    _, plan = commands(readme, "Commands")
    (layer,) = [
        number
        for number, block in enumerate(blocks(readme), start=1)
        if "from moesaic import MoE  #" in block
    ]
    return [
        Step(name="environment", command=environment),
        Step(name="install", command=("pip", "install", "."), minutes=INSTALL_MINUTES),
        Step(name="README plan", command=plan, says="tokens/s"),
        Step(name="install train", command=("pip", "install", ".[train]"), minutes=INSTALL_MINUTES),
        Step(name=f"README block {layer}", command=("python", ground.inside(f"block{layer}.py"))),
    ]


def clone(repository: Path, commit: str, ground: Ground) -> list[Step]:
    """Return the steps that make a fresh clone of a commit, named as README names it."""
    target = str(ground.here("moesaic"))
    return [
        Step(
            name="clone",
            command=(
                "git",
                "clone",
                "--quiet",
                "--no-hardlinks",
                "--no-checkout",
                str(repository),
                target,
            ),
            folder=".",
        ),
        Step(name="checkout", command=("git", "checkout", "--quiet", "--detach", commit)),
    ]
