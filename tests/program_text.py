"""Parses the tables that `moesaic.program.text.to_text` writes, so that tests see that the tables
are complete."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TypeVar, get_args

from moesaic.program.grid import Axis
from moesaic.program.sample_layouts import Placed
from moesaic.program.task import (
    FLOWS,
    Chunk,
    Kind,
    Lane,
    Layout,
    NamedChunk,
    Op,
    Program,
    Slot,
    Stage,
    State,
    Task,
    Which,
)
from moesaic.program.text import VERSION

T = TypeVar("T")


def from_text(text: str) -> Program:
    """Parse the output of `to_text`.

    Raises:
        ValueError: a line is wrong, which the message names, or the version is newer than
            `VERSION`.
    """
    name = ""
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    slots: list[Slot] = []
    tasks: list[Task] = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split()
        if not words:
            continue
        try:
            if words[0] == "program":
                name = _read_header(words)
            elif words[0] == "inputs":
                inputs = tuple(words[1:])
            elif words[0] == "outputs":
                outputs = tuple(words[1:])
            elif words[0] == "slot":
                slots.append(_read_slot(words))
            elif words[0] == "task":
                tasks.append(_read_task(line))
            else:
                raise ValueError(f"{words[0]!r} is not a kind of line")
        except (ValueError, IndexError) as error:
            raise ValueError(f"line {number}: {error}") from error
    return Program(
        name=name, slots=tuple(slots), tasks=tuple(tasks), inputs=inputs, outputs=outputs
    )


def _read_header(words: list[str]) -> str:
    if int(words[1]) > VERSION:
        raise ValueError(f"version {words[1]} is newer than {VERSION}")
    return " ".join(words[2:])


def _read_slot(words: list[str]) -> Slot:
    remaining = words[3:]
    states = []
    while remaining and (":" in remaining[0] or remaining[0] == "-"):
        word = remaining.pop(0)
        if word != "-":
            axis, value = word.split(":")
            states.append((_one_of(get_args(Axis), axis, "axis"), State(value)))
    layout = (Placed if "placed" in remaining else Layout)(
        flow=_one_of(FLOWS, remaining[0], "flow"),
        spread=() if remaining[2] == "own" else _axes(remaining[2]),
        whole_tp="whole-tp" in remaining,
        experts=_one_of(get_args(Which), remaining[remaining.index("at") + 1], "place of experts")
        if "at" in remaining
        else "all",
        chunk=_chunk(remaining[remaining.index("chunk") + 1]) if "chunk" in remaining else None,
        step=_step(remaining[remaining.index("step") + 1]) if "step" in remaining else None,
    )
    return Slot(name=words[1], kind=Kind(words[2]), layout=layout, state=tuple(states))


def _read_task(line: str) -> Task:
    head, _, tail = line.partition(" -> ")
    words = head.split()
    powers = [int(power) for power in re.findall(r"\^(-?\d+)", tail)]
    extras = dict(re.findall(r"(\w+)=(\S+)", tail))
    ends = tuple(extras["of"].split("/")) if "of" in extras else None
    return Task(
        name=words[1],
        op=Op(words[2]),
        stage=Stage(words[3]),
        lane=Lane(words[4]),
        group=() if words[5] == "-" else _axes(words[5]),
        reads=tuple(words[6:]),
        writes=tuple(re.sub(r"\^-?\d+|\w+=\S+", "", tail).split()),
        power=powers[0] if powers else 0,
        dual_power=powers[1] if powers else 0,
        link=extras.get("link", ""),
        codec=extras.get("codec", ""),
        hop=int(extras.get("hop", 0)),
        of=(ends[0], ends[1]) if ends else None,
    )


def _one_of(names: Iterable[T], word: str, what: str) -> T:
    for name in names:
        if word == name:
            return name
    raise ValueError(f"{word!r} is not a known {what}")


def _axes(words: str) -> tuple[Axis, ...]:
    return tuple(_one_of(get_args(Axis), word, "axis") for word in words.split("+"))


def _chunk(word: str) -> Chunk:
    if word.isdecimal():
        return int(word)
    named: NamedChunk = _one_of(get_args(NamedChunk), word, "chunk")
    return named


def _step(word: str) -> tuple[int, int]:
    step, _, steps = word.partition("/")
    return int(step), int(steps)
