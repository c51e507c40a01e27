"""Ranks of an emulated cluster whose results are kept: an interrupted run goes on from them.

What the ranks return is kept as JSON, and rebuilt by the return annotation of the function that
they ran.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from hashlib import blake2b
from itertools import repeat
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from moesaic_lab.claims import write_whole
from moesaic_testbed.bed import Bed
from moesaic_testbed.cluster import Cluster, Launcher

T = TypeVar("T")


class KeptRanks:
    """The ranks of a bed, which starts when a function runs whose results are not kept yet.

    Args:
        folder: the folder of the results; None to keep nothing.
    """

    def __init__(self, launcher: Launcher, bed: Bed, folder: Path | None) -> None:
        self.bed = bed
        self.label = ""
        """What runs, in words; files are named after it."""
        self._launcher = launcher
        self._folder = folder
        self._cluster: Cluster | None = None

    def cluster(self) -> Cluster:
        """Return the running cluster."""
        self._cluster = self._cluster or self._launcher.open(self.bed)
        return self._cluster

    def run(self, function: Callable[..., T], *args: Any) -> list[T]:
        """Return the result of a function on each rank, as `Cluster.run`: the kept one, if the
        function ran with the same arguments before."""
        if self._folder is None:
            return self.cluster().run(function, *args)

        # The file's name has the label for people, and a hash of function and arguments.
        call = repr((function.__qualname__, args))
        call_hash = blake2b(call.encode(), digest_size=4).hexdigest()
        name = re.sub(r"[^\w.]+", "-", self.label)[:80]
        path = self._folder / f"{name}-{call_hash}.json"

        if not path.exists():
            results = self.cluster().run(function, *args)
            write_whole(path, json.dumps(results, default=_plain))
        kind = get_type_hints(function)["return"]
        kept = json.loads(path.read_text(encoding="utf-8"))
        return [rebuilt(kind, each) for each in kept]

    def close(self) -> None:
        """End the cluster, if it was started."""
        if self._cluster is not None:
            self._cluster.close()


def rebuilt(kind: Any, data: Any) -> Any:
    """Return the value of type `kind` that JSON holds: a dataclass, tuple, list, dictionary of
    words, or plain value, and any of them inside others."""
    inner = get_args(kind)  # (str, int) of dict[str, int]
    origin = get_origin(kind) or kind
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        fields = {name: rebuilt(hints[name], value) for name, value in data.items()}
        return kind(**fields)  # type: ignore[operator]
    if origin is tuple:
        kinds = repeat(inner[0]) if inner[1:] == (...,) else inner  # tuple[int, ...] has any length
        return tuple(map(rebuilt, kinds, data))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {name: rebuilt(inner[1], value) for name, value in data.items()}
    if isinstance(origin, type) and issubclass(origin, Sequence) and origin is not str:
        return [rebuilt(inner[0], each) for each in data]
    return data


def _plain(value: Any) -> Any:
    """Return a dataclass or a number of numpy as JSON can hold it."""
    return vars(value) if is_dataclass(value) else value.item()
