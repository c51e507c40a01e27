"""Draws docs/images/rooms.svg: the rooms of the library, each above all rooms that it may import.

python -m moesaic_lab.rooms_picture
"""

from __future__ import annotations

from html import escape

from moesaic_lab.claims import ROOT
from moesaic_lab.import_graph import PARTS, TORCH_FREE

PICTURE = ROOT / "docs" / "images" / "rooms.svg"
FLOORS = {
    "Plain data": {
        "errors": "errors of one line",
        "files": "safe reads, writes and deletions",
        "resuming": "which checkpoint is intact",
        "configfile": "TOML and JSON with checked fields",
        "codecs": "the parts of coded messages",
        "shapes": "the sizes of a model",
        "traces": "recorded routing",
        "program": "a call as data: plan, compiler",
    },
    "Tools of a call": {
        "kernels": "products, permutation, codecs",
        "comm": "meshes, collectives, the wire",
        "initial_values": "first weights, from a seed",
        "draw": "old name of initial_values",
        "storage": "tensors in files, no pickle",
        "routing": "routers, capacity, losses, counts",
        "experts": "experts' weights and products",
        "runtime": "runs programs over the ranks",
    },
    "The layer": {
        "policies": "names of policies in higher rooms",
        "given_routing": "experts for others' routers",
        "chosen": "old name of given_routing",
        "layer": "MoE, the entry point",
        "interleaved": "two micro-batches in flight",
        "cuda_graphs": "a layer as CUDA graphs",
        "compile_ahead": "kernels before the first step",
    },
    "Choosing a plan": {
        "balance": "policies for skewed routing",
        "planner": "predicts time and memory; searches",
        "measure": "what moesaic profile measures",
        "auto": "finds a plan while training",
    },
    "Models and training": {
        "models": "a decoder to train",
        "parallel": "FSDP2 and DDP around the layers",
        "transformers": "layers in Hugging Face models",
        "train": "loop, data, checkpoints, metrics",
        "weights": "others' checkpoints, converted",
        "finetune": "adapters for Hugging Face models",
    },
    "What people see": {
        "testing": "the float64 reference, random cases",
        "report": "pages of runs, plans and traces",
        "cli": "the commands, a file each",
    },
}
"""The floors from the ground up; each has its rooms in the order of `PARTS`, with what they hold.
A line under a phone's window of 390 pixels has some 40 letters."""
WIDTH = 380
MARGIN = 10
ROW = 21
HEAD = 27
GAP = 8
"""Width of the picture, its margin, the heights of a room and of a floor's title, and the space
between floors, in pixels."""
TEXT_AT = 128
"""Where the text of a room begins."""
STYLE = """
  .page { fill: #ffffff } .floor { fill: #eef2f8 } .free { fill: #2f8f6f }
  text { font: 12.5px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #1f2733 }
  .title { font-weight: 600; fill: #2b5a8c }
  .room { font: 12px ui-monospace, Menlo, Consolas, monospace }
  @media (prefers-color-scheme: dark) {
    .page { fill: #14181f } .floor { fill: #232a35 } .free { fill: #5cc9a3 }
    text { fill: #e6eaf0 } .title { fill: #8fbcf0 }
  }
"""
"""Colours for light and dark. The page's own colour lies behind everything, so the picture can be
read on either."""


def picture() -> str:
    """Return the picture as SVG: the highest floor first, so that imports point down."""
    shapes: list[str] = []
    y = MARGIN
    for title, rooms in reversed(FLOORS.items()):
        height = HEAD + ROW * len(rooms) + 4
        shapes.append(_box("floor", MARGIN, y, WIDTH - 2 * MARGIN, height))
        shapes.append(_text("title", MARGIN + 9, y + 18, title))
        y += HEAD
        for room, what in reversed(rooms.items()):
            if room in TORCH_FREE:
                shapes.append(_box("free", MARGIN + 3, y + 3, 3, ROW - 6))
            shapes.append(_text("room", MARGIN + 9, y + 14, room))
            shapes.append(_text("what", TEXT_AT, y + 14, what))
            y += ROW
        y += 4 + GAP
    shapes.append(_box("free", MARGIN + 3, y + 2, 3, ROW - 6))
    shapes.append(_text("what", MARGIN + 9, y + 14, "works without torch"))
    y += ROW + MARGIN
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y}"'
    label = f"The {len(PARTS)} rooms of src/moesaic; a room imports only rooms below it"
    lines = [
        f'{head} viewBox="0 0 {WIDTH} {y}" role="img" aria-label="{label}">',
        f"<style>{STYLE}</style>",
        _box("page", 0, 0, WIDTH, y),
        *shapes,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _box(kind: str, x: int, y: int, width: int, height: int) -> str:
    """Return a rectangle of a class of `STYLE`."""
    size = f'width="{width}" height="{height}"'
    return f'<rect class="{kind}" x="{x}" y="{y}" {size} rx="{min(5, width // 2)}"/>'


def _text(kind: str, x: int, y: int, text: str) -> str:
    """Return a line of text of a class of `STYLE`."""
    return f'<text class="{kind}" x="{x}" y="{y}">{escape(text)}</text>'


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
