"""No codec: the bytes of the rows as they are."""

from __future__ import annotations

from typing import ClassVar, final

import torch
from torch import Tensor

from moesaic.kernels.codecs.codec import AbstractCodec


@final
class Identity(AbstractCodec):
    """The rows' own bytes, bit for bit, of any dtype. Contiguous rows are not copied: the message is a view of them."""

    name: ClassVar[str] = "none"

    def encode(self, rows: Tensor) -> Tensor:
        self._check(rows)
        return rows.detach().contiguous().view(-1).view(torch.uint8)

    def _write(self, rows: Tensor, fields: list[Tensor]) -> None:
        fields[0].copy_(rows)

    def _read(self, fields: list[Tensor], num_rows: int, dim: int, dtype: torch.dtype) -> Tensor:
        return fields[0]

    def _bound(self, rows: Tensor) -> Tensor:
        return torch.zeros(rows.shape, dtype=torch.float64, device=rows.device)
