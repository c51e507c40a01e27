"""Writes a program as a readable table of text: its slots, the named values, and its tasks, which
read and write them."""

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
    slot_width = max(len(slot.name) for slot in program.slots)
    for slot in program.slots:
        states = " ".join(f"{axis}:{state.value}" for axis, state in slot.state) or "-"
        lines.append(
            f"slot  {slot.name:<{slot_width}}  {slot.kind.value:<6}  {states:<12}  "
            f"{_layout_text(slot.layout)}"
        )
    task_width = max(len(task.name) for task in program.tasks)
    for task in program.tasks:
        arrow = f"{' '.join(task.reads)} -> {' '.join(task.writes)}"
        group = "+".join(task.group) or "-"
        lines.append(
            f"task  {task.name:<{task_width}}  {task.op.value:<11}  {task.stage.value:<8}  "
            f"{task.lane.value:<7}  {group:<6}  {arrow}{_extras_text(task)}"
        )
    return "\n".join(lines) + "\n"


def _extras_text(task: Task) -> str:
    """Return the parts of a task's text that few tasks have."""
    extras = list[str]()
    if task.op is Op.SCALE:
        extras += [f"^{task.power}", f"^{task.dual_power}"]
    if task.of:
        extras.append(f"of={'/'.join(task.of)}")
    if task.link:
        extras.append(f"link={task.link}")
    if task.codec:
        extras.append(f"codec={task.codec}")
    if task.op is Op.HOP:
        extras.append(f"hop={task.hop}")
    return "".join(f"  {extra}" for extra in extras)


def _layout_text(layout: Layout) -> str:
    """Return the text of a layout: its flow and origins, and what differs from the default."""
    parts: list[str] = [layout.flow, f"of {'+'.join(layout.spread) or 'own'}"]
    if layout.whole_tp:
        parts.append("whole-tp")
    if layout.experts != "all":
        parts.append(f"at {layout.experts}")
    if layout.chunk is not None:
        parts.append(f"chunk {layout.chunk}")
    if layout.step is not None:
        step, num_groups = layout.step
        parts.append(f"step {step}/{num_groups}")
    if isinstance(layout, Placed):
        parts.append("placed")
    return " ".join(parts)
