"""The indices of the rows that move, made where the rows are.

The host knows rows as runs (`Runs`): some hundred numbers for the whole of a call, where there are many thousand rows. On a GPU
the runs are brought there, those of all tasks of a call in one copy from pinned memory, for which nobody waits, and become
row after row there. On a CPU they are made by numpy.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from moesaic.kernels.memory import uploaded
from moesaic.kernels.pick import waits
from moesaic.program.sizes import Runs


class Indices:
    """What was made for one call; kept for those that come after with the same sizes. A table is known by its object."""

    def __init__(self) -> None:
        self._tables: dict[int, tuple[Runs | np.ndarray, Tensor]] = {}
        self._rows: dict[int, Tensor] = {}
        self._inverse: dict[int, Tensor] = {}

    def bring(self, tables: Iterable[Runs | np.ndarray], device: torch.device) -> None:
        """Bring tables to a device that are not there yet, as one; nothing on a CPU."""
        if not waits(device):
            return
        new = {id(table): table for table in tables if id(table) not in self._tables}
        if not new:
            return
        flat = [_as_numbers(table) for table in new.values()]
        there = uploaded(np.concatenate(flat).astype(np.int32), device).split([len(numbers) for numbers in flat])
        self._tables |= {key: (table, numbers) for (key, table), numbers in zip(new.items(), there)}

    def of(self, runs: Runs, device: torch.device) -> Tensor:
        """Return the rows of runs: (total,), int32 on a GPU, int64 on a CPU."""
        if not waits(device):
            return torch.from_numpy(runs.rows)
        if not runs.total:
            return torch.empty(0, dtype=torch.int32, device=device)
        if id(runs) not in self._rows:
            self.bring([runs], device)
            offsets, sizes = self._tables[id(runs)][1].split(len(runs.sizes))
            rows = offsets.repeat_interleave(sizes, output_size=runs.total)
            if not runs.is_constant:
                rows = rows + torch.arange(runs.total, dtype=torch.int32, device=device)
            self._rows[id(runs)] = rows
        return self._rows[id(runs)]

    def inverse(self, runs: Runs, device: torch.device) -> Tensor:
        """Return at which place each row stands, where the runs are a permutation; types as for `of`."""
        if not waits(device):
            inverse = np.empty_like(runs.rows)
            inverse[runs.rows] = np.arange(runs.total)
            return torch.from_numpy(inverse)
        if not runs.total:
            return torch.empty(0, dtype=torch.int32, device=device)
        if id(runs) not in self._inverse:
            rows = self.of(runs, device)
            place = torch.arange(runs.total, dtype=torch.int32, device=device)
            self._inverse[id(runs)] = torch.empty_like(place).scatter_(0, rows.long(), place)
        return self._inverse[id(runs)]

    def numbers(self, table: np.ndarray, device: torch.device) -> Tensor:
        """Return a table as it is, int32."""
        if not waits(device):
            return torch.from_numpy(table.astype(np.int32))
        self.bring([table], device)
        return self._tables[id(table)][1]


def _as_numbers(table: Runs | np.ndarray) -> np.ndarray:
    return np.concatenate([table.offsets, table.sizes]) if isinstance(table, Runs) else table
