"""Writes a program as a readable table of text."""

from __future__ import annotations

from moesaic.program.sample_layouts import Placed
from moesaic.program.task import Layout, Op, Program, Task

VERSION = 1
"""Version of the text format."""
NAMES = (
    "A task is called after the slot that it writes. h.0: chunk 0 of h; h~1: its peer group 1; "
    "h@0: the first hop of its all-to-all; h': its gradient; h/sums: its sums, before they are "
    "gathered."
)
"""What the names of slots and tasks mean."""


def to_text(program: Program) -> str:
    """Return the program as a table: a header, a line per slot, a line per task."""
    lines = [
        f"program {VERSION} {program.name}",
        f"inputs {' '.join(program.inputs)}",
        f"outputs {' '.join(program.outputs)}",
    ]
    width = max(len(slot.name) for slot in program.slots)
    for slot in program.slots:
        states = " ".join(f"{axis}:{state.value}" for axis, state in slot.state) or "-"
        lines.append(
            f"slot  {slot.name:<{width}}  {slot.kind.value:<6}  {states:<12}  "
            f"{_layout_text(slot.layout)}"
        )
    named = max(len(task.name) for task in program.tasks)
    for task in program.tasks:
        arrow = f"{' '.join(task.reads)} -> {' '.join(task.writes)}"
        group = "+".join(task.group) or "-"
        lines.append(
            f"task  {task.name:<{named}}  {task.op.value:<11}  {task.stage.value:<8}  "
            f"{task.lane.value:<7}  {group:<6}  {arrow}{_extras_text(task)}"
        )
    return "\n".join(lines) + "\n"


def _extras_text(task: Task) -> str:
    """Return the parts of a task's text that few tasks have."""
    extras = [f"^{task.power}", f"^{task.dual_power}"] if task.op is Op.SCALE else []
    extras += [f"of={'/'.join(task.of)}"] if task.of else []
    extras += [
        f"{key}={value}" for key, value in (("link", task.link), ("codec", task.codec)) if value
    ]
    extras += [f"hop={task.hop}"] if task.op is Op.HOP else []
    return "".join(f"  {extra}" for extra in extras)


def _layout_text(layout: Layout) -> str:
    """Return the text of a layout."""
    origins = "+".join(layout.spread) or "own"
    parts = [layout.flow, f"of {origins}{' whole-tp' if layout.whole_tp else ''}"]
    parts.append("" if layout.experts == "all" else f"at {layout.experts}")
    parts.append("" if layout.chunk is None else f"chunk {layout.chunk}")
    parts.append("" if layout.step is None else f"step {layout.step[0]}/{layout.step[1]}")
    parts.append("placed" if isinstance(layout, Placed) else "")
    return " ".join(part for part in parts if part)
