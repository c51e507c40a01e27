"""The walk-throughs of pages, run as printed: their files, their Python blocks and their commands,
in the order of the page.

Words are added to a printed command only to make it short. What a page supposes in a reader's
folder (`SUPPOSED`) is made first.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from places.ground import Ground
from places.pages import Block, blocks, commands_in
from places.steps import Step

PAGES = ("start", "planning", "transformers", "distributed", "training")
SHORT = "--steps 8 --save.every 4 --evaluate.every 8 --evaluate.sequences 4"
SMALL = "--batch-size 8 --model.seq-len 64"
"""What makes a training of the demo end in minutes: all that is added to a printed command."""
QUICK = "--accept --repeats 3"
"""What is added to a measurement of the machine, which may have other work."""
ELSEWHERE = "... --nnodes Qwen/Qwen3-30B-A3B testbed"
"""Words of commands that a reader completes, or for machines, models or rights that a place
lacks."""
LAUNCHED = re.compile(r"# (?:python|torchrun --nproc-per-node (\d+)) (\w+\.py)\b")
SUPPOSED = {
    "training": ("runs/x", "runs/y", "corpus", "tokenizer.json"),
    "distributed": ("runs/x",),
    "planning": ("config.json",),
}
"""What the commands of a page find in a reader's folder."""
CORPUS = (
    "import pathlib, shutil, sys; pathlib.Path('corpus').mkdir(); "
    "[shutil.copy(page, f'corpus/{page.stem}.txt') "
    "for page in pathlib.Path(sys.argv[1]).glob('*.md')]"
)
MIXTRAL = "from transformers import MixtralConfig; MixtralConfig().save_pretrained('.')"


def supposed(page: str, ground: Ground, folder: str) -> Iterator[Step]:
    """Yield the steps that make what a page's commands find in a reader's folder."""
    pages = ground.inside("moesaic/docs")
    scripts = ground.inside("moesaic/lab/places")
    made = {
        "corpus": ("python", "-c", CORPUS, pages),
        "config.json": ("python", "-c", MIXTRAL),
        "tokenizer.json": ("python", f"{scripts}/tiny_model.py", "."),
    }
    train = f"moesaic train --preset demo {SHORT} {SMALL} --steps 4 --out".split()
    for name in SUPPOSED.get(page, ()):
        command = made.get(name, (*train, name))
        yield Step(name=f"{page}: has {name}", command=command, folder=folder)


def walk(page: str, text: str, ground: Ground) -> Iterator[Step]:
    """Yield the steps of a page. Each runs in a folder of the page's own, below the clone's parent.

    Args:
        page: its name, which its folder gets too.
        text: the page.
        ground: where it runs; the files that the page prints are written there.
    """
    folder = f"walks/{page}"
    ground.here(folder).mkdir(parents=True, exist_ok=True)
    yield from supposed(page, ground, folder)
    printed = blocks(text)
    files = [block for block in printed if block.language == "toml"]
    for name, block in zip(_names(text), files):
        ground.here(f"{folder}/{name}").write_text(block.text + "\n", encoding="utf-8")
    for number, block in enumerate(printed):
        if block.language == "inline" or block.text.startswith("git clone "):
            continue
        if block.language == "python":
            yield from _python(page, number, block, ground, folder)
        else:
            for words in commands_in(block):
                if runs_here(words):
                    yield _command(page, words, folder)


def runs_here(words: tuple[str, ...]) -> bool:
    """Return whether a printed command can run in a place: it needs no other machine, and names no
    file or folder by a word in capitals."""
    if words[0] == "pip":
        return False
    for word in words:
        if word in ELSEWHERE.split():
            return False
        if re.fullmatch(r"[A-Z]+", word):
            return False
    return True


def _names(text: str) -> list[str]:
    """Return the names of the TOML files that a page's commands read, in the order in which they
    are first named."""
    named = re.findall(r"--(?:config|model|cluster) (\w+\.toml)", text)
    return list(dict.fromkeys(named))


def _python(page: str, number: int, block: Block, ground: Ground, folder: str) -> Iterator[Step]:
    """Write a Python block into a file and yield the step that runs it, under torchrun if its first
    line says so. Without a name in that line, the file has the block's number."""
    launch = LAUNCHED.match(block.text)
    ranks, name = launch.groups("") if launch else ("", f"block{number}.py")
    ground.here(f"{folder}/{name}").write_text(block.text + "\n", encoding="utf-8")
    start = ["python"]
    if ranks:
        start = ["torchrun", "--nproc-per-node", ranks]
    yield Step(name=f"{page}: {name}", command=(*start, name), folder=folder)


def _command(page: str, words: tuple[str, ...], folder: str) -> Step:
    """Return the step of a printed command, with what makes it short."""
    more = []
    if "profile" in words:
        more += QUICK.split()
    if "train" in words:
        more += SHORT.split()
    if "--preset" in words:
        more += SMALL.split()
    start = 0
    if "moesaic" in words:
        start = words.index("moesaic")
    name = " ".join(words[start:])
    return Step(name=f"{page}: {name[:60]}", command=(*words, *more), folder=folder)
