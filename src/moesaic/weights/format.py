"""What a format is: where its files are, what it calls tensors, and the rules by which it places a model's elements."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from moesaic.weights.layout import Readable, StoredBlock, every
from moesaic.weights.model import LAYER, Architecture, Part


class AbstractFormat(ABC):
    """A way to keep a model in files."""

    title: str
    """What it is called in a sentence."""

    @abstractmethod
    def finds(self, folder: Path) -> bool:
        """Return whether a folder looks like a checkpoint of this format."""

    @abstractmethod
    def read(self, folder: Path) -> tuple[Mapping[str, Readable], list[str]]:
        """Return a checkpoint's tensors by name, and the names of what is no tensor."""

    @abstractmethod
    def write(self, folder: Path, tensors: Mapping[str, Readable]) -> None:
        """Write tensors under their names."""

    @abstractmethod
    def blocks(self, model: Architecture, names: Collection[str]) -> Iterator[StoredBlock]:
        """Yield where each element of a model is.

        Args:
            model: to place.
            names: those of the checkpoint that is read, where a format has several ways; empty to write.
        """

    def kept(self, stored: str, tensor: Readable, *, back: bool) -> Readable:
        """Return a tensor as the format keeps it or, `back`, as the model has it; nearly all are kept as they are."""
        return tensor

    def called(self, stored: str, state: str | None) -> str | None:
        """Return the name of a tensor, or of the state that an optimizer keeps of it; None if that has no place."""
        return stored if state is None else None


Place: TypeAlias = Callable[[Part, Any], Iterator[tuple[str, range, range]]]
"""From a part and the model's configuration: endings of names, rows of the part, and rows of the tensors that they are."""
Rules: TypeAlias = "Mapping[str, str | tuple[str, Place]]"
"""A part of a layer to what the format calls its tensor inside the layer, and its place there; without one it is whole."""


def half(number: int) -> Place:
    """Put a part into the upper (0) or lower (1) half of a tensor."""

    def place(part: Part, config: Any) -> Iterator[tuple[str, range, range]]:
        rows = part.shape[part.rows]
        yield "", range(rows), range(number * rows, (number + 1) * rows)

    return place


def by_rules(
    model: Architecture,
    outside: Mapping[str, str],
    rules: Callable[[int], Rules],
    layer_prefix: str,
    *,
    stacked: bool = False,
) -> Iterator[StoredBlock]:
    """Yield the blocks that rules give; what no rule names has none.

    Args:
        model: to place.
        outside: names of the tensors outside the layers, the model's to the format's.
        rules: from a layer to what is in it: parts of the model to where they are.
        layer_prefix: in front of a layer's names; `{}` stands for its number.
        stacked: whether all layers are in one tensor, under a prefix without the number.
    """
    for tensor in model.shapes:
        if tensor in outside:
            yield model.whole(tensor).block(outside[tensor], every(model.shapes[tensor]))
        found = LAYER.fullmatch(tensor)
        if found is None:
            continue
        layer, key = int(found[1]), found[2]
        known = rules(layer)
        parts = [model.whole(tensor)] if key in known else model.parts(tensor)
        for part in parts:
            rule = known.get(part.name.split(".", 3)[3])
            if rule is None:
                continue
            name, place = (rule, None) if isinstance(rule, str) else rule
            stored = (layer_prefix if stacked else layer_prefix.format(layer)) + name
            lead = (layer,) if stacked else ()
            if place is None:
                yield part.block(stored, (*lead, *every(part.shape)))
                continue
            for ending, rows, at in place(part, model.config):
                spread = list(every(part.shape))
                spread[part.rows] = at
                yield part.block(stored + ending, (*lead, *spread), rows)
