"""Whether all ranks were started with the same settings: found out before the first collective that needs it."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence

import torch

from moesaic.comm.collectives import all_gather
from moesaic.comm.transport import AbstractTransport
from moesaic.errors import InputError

MISSING = "nothing"
"""What an error says a rank has where it does not have the field at all."""
ADVICE = "start every rank with the same settings"
"""What to do about most differences."""


def check_same(
    transport: AbstractTransport,
    fields: Mapping[str, object],
    *,
    peers: tuple[int, ...] | None = None,
    advice: Mapping[str, str] | None = None,
) -> None:
    """Compare settings over the ranks of a transport.

    Every rank sends a message of one fixed size first: how many fields, a digest of their names and values, and how long they
    are as text. If those differ, the texts follow, so that all ranks raise the same error. Nothing hangs, whatever the
    fields of each rank.

    Args:
        transport: this rank's.
        fields: dotted names to values; two values are the same if their `as_text` is. The order does not count.
        peers: ascending ranks that compare, this one among them; None for all.
        advice: what to do where a field differs, by the name of the field, if not `ADVICE`.

    Raises:
        InputError: on every rank, naming the first field that differs, its values and who has them.
    """
    found = {name: as_text(value) for name, value in fields.items()}
    text = json.dumps(found).encode()
    everyone = tuple(range(transport.world)) if peers is None else peers
    heads = [tuple(head.tolist()) for head in all_gather(transport, everyone, _head(found, text).to(transport.device))]
    if len({(count, *digest) for count, _, *digest in heads}) == 1:
        return
    longest = max(length for _, length, *_ in heads)
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    texts = all_gather(transport, everyone, padded.to(transport.device))
    of_ranks = [json.loads(bytes(text[: head[1]].tolist())) for head, text in zip(heads, texts)]
    raise InputError(_difference(dict(zip(everyone, of_ranks)), advice or {}))


def as_text(value: object) -> str:
    """Return what ranks compare a value by: its `str` in one line, without where objects lie in memory."""
    return " ".join(re.sub(r" at 0x[0-9a-f]+", "", str(value)).split())


def _head(found: Mapping[str, str], text: bytes) -> torch.Tensor:
    digest = hashlib.blake2b(json.dumps(sorted(found.items())).encode(), digest_size=16).digest()
    halves = [int.from_bytes(digest[at : at + 8], "little", signed=True) for at in (0, 8)]
    return torch.tensor([len(found), len(text), *halves])


def _difference(of_ranks: Mapping[int, Mapping[str, str]], advice: Mapping[str, str]) -> str:
    """Describe the first field that differs, in the first rank's order, then the order of others' further fields."""
    names = dict.fromkeys(name for fields in of_ranks.values() for name in fields)
    for name in names:
        holders: dict[str | None, list[int]] = {}
        for rank, fields in of_ranks.items():
            holders.setdefault(fields.get(name), []).append(rank)
        if len(holders) > 1:
            values = (f"{MISSING if value is None else value} on {_ranks(ranks)}" for value, ranks in holders.items())
            return f"{name} differs: {', '.join(values)}: {advice.get(name, ADVICE)}"
    raise AssertionError("the digests differ and the fields do not")


def _ranks(ranks: Sequence[int]) -> str:
    """Write ascending ranks: "rank 3", "ranks 0-2", "ranks 0-2 and 5"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return ("rank " if len(ranks) == 1 else "ranks ") + " and ".join(texts)
