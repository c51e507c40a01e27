"""The ranks that route the other tokens of a layer's call, over a transport; and whether all of them run the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.comm.agree import as_text, check_same
from moesaic.comm.collectives import all_gather
from moesaic.comm.transport import AbstractTransport, MessageSizeError
from moesaic.errors import InputError
from moesaic.program.grid import Grid
from moesaic.routing.peers import AbstractPeers
from moesaic.routing.route import RoutingRecord
from moesaic.routing.routing import Choice
from moesaic.runtime.node_tokens import NodeTokens
from moesaic.runtime.tasks import stable_order

CHUNKS = 4
"""For so many the message of counts has room for the visits and stops of a rank; where they do not fit they go apart."""
CALLS = "call the layer alike on every rank"
"""What to do where calls differ."""


class Peers(AbstractPeers):
    """Ranks that route different tokens: one per data-parallel group, or all where tensor groups slice theirs.

    Args:
        transport: between all ranks.
        grid: the mesh.
        slices: each rank of a tensor group routes a slice of the group's tokens.
        digest: 16 bytes, the same on all ranks that run the same programs.
        find: under multicast, finds visits of copies, (token, slot, number of tokens), sorted by slot.
        slots: from experts to the slots in which they are.
        tell: returns numbers that the ranks tell each other with the counts of a call, always as many.
    """

    def __init__(
        self,
        transport: AbstractTransport,
        grid: Grid,
        slices: bool,
        digest: bytes,
        find: Callable[[Tensor, Tensor, int], NodeTokens] | None = None,
        slots: Callable[[Tensor], Tensor] = lambda expert: expert,
        tell: Callable[[], Sequence[float]] = tuple,
    ) -> None:
        self._transport = transport
        self._hear_all = grid.tp == 1
        self.ranks = tuple(range(grid.world)) if slices else grid.group(transport.rank, ("dp",))
        self.number, self.place = len(self.ranks), self.ranks.index(transport.rank)
        self.slices = grid.tp if slices else 1
        self.slice = grid.coordinate(transport.rank, "tp") if slices else 0
        self._of_plan = digest
        self._settings: dict[str, object] = {}
        self.digest = _as_numbers(digest)
        self._find = find if self.number == transport.world else None
        self._slots_of, self._tell = slots, tell
        casts = grid.ep > 1 and bool(grid.nodes_per_replica) and grid.has_shards_inside_nodes
        self._room = CHUNKS * sum(grid.cast_levels) if casts else 0
        self._found: tuple[Choice, NodeTokens] | None = None
        self._sorted: tuple[Tensor, Tensor] | None = None
        self.all_agree = True
        """Whether it is known that all ranks of the world run the same; not so after a switch."""

    def also(self, choice: Choice | None, alive_N: Tensor | None, num_tokens: int) -> Tensor | None:
        """Return the counts of visits, then what is told besides, so that neither needs an exchange; see `AbstractPeers.also`.

        Whatever the plan, the message has room for both: ranks that brought different plans must be able to tell so.
        """
        node_tokens = self._counts_of_node_tokens(choice, alive_N, num_tokens)
        return torch.cat([node_tokens, torch.tensor(self._tell(), dtype=torch.float64, device=node_tokens.device)])

    def _counts_of_node_tokens(self, choice: Choice | None, alive_N: Tensor | None, num_tokens: int) -> Tensor:
        if self._find is not None and choice is not None:
            token, expert = choice.token, self._slots_of(choice.expert)
            if alive_N is not None:
                token, expert = token[alive_N], expert[alive_N]
            order = stable_order(expert)
            self._sorted = (expert, order)
            node_tokens = self._find(token.index_select(0, order), expert.index_select(0, order), num_tokens)
            empty = self._room - node_tokens.counts.numel()
            if empty >= 0:
                self._found = (choice, node_tokens)
                return F.pad(node_tokens.counts.flatten().double(), (0, empty))
        return torch.zeros(self._room, dtype=torch.float64)

    def order(self, expert: Tensor) -> Tensor:
        """Return the stable order of rows by expert, (rows,) int64; where `also` has sorted the same ones, without work."""
        known, self._sorted = self._sorted, None
        return known[1] if known is not None and known[0] is expert else stable_order(expert)

    def node_tokens(self, record: RoutingRecord) -> NodeTokens | None:
        """Return the visits that were told with a call's counts, with those of all ranks; None if they were not.

        They are handed out once: a recomputation finds them again.
        """
        found, self._found = self._found, None
        if found is None or found[0] is not record.choice or record.gathered is None:
            return None
        mine = found[1]
        of_all = record.gathered.more_on_host[:, : mine.counts.numel()].astype(np.int64)
        return replace(mine, of_all=of_all.reshape(-1, *mine.counts.shape))

    def gather(self, message: Tensor) -> Tensor:
        """Gather messages over the transport.

        After a switch, the ranks may have come to differ in who routes with whom. So that nobody waits for a rank that does
        not send, the first message goes to all ranks, with the digest of what this one runs. (Without
        tensor parallelism messages go to all ranks anyway, and the digest in the exchange of counts tells.)

        Raises:
            InputError: on every rank, if they do not run the same.
        """
        if self.all_agree or self._hear_all:
            return self._heard(self.ranks, message)
        everyone = tuple(range(self._transport.world))
        told = self._heard(everyone, torch.cat([message, self.digest.to(message)]))
        self.check(told[:, -len(self.digest) :].cpu(), everyone)
        self.all_agree = True
        return told[list(self.ranks), : -len(self.digest)]

    def _heard(self, ranks: tuple[int, ...], message: Tensor) -> Tensor:
        try:
            return torch.stack(all_gather(self._transport, ranks, message))
        except MessageSizeError as error:  # a message is as long as there are choices, sums and experts to tell of
            mine = ", ".join(f"{name}={as_text(value)}" for name, value in self._settings.items())
            raise InputError(
                f"ranks call a layer differently ({error}); rank {self._transport.rank}: {mine}: {CALLS}"
            ) from error

    def call_with(self, settings: Mapping[str, object]) -> bool:
        """Note how the layer is called from now on; return whether it was called otherwise before.

        Args:
            settings: what all ranks must call it with, by name; ranks compare it as text.
        """
        if settings == self._settings:
            return False
        self._settings = dict(settings)
        text = json.dumps({name: as_text(value) for name, value in settings.items()}, sort_keys=True).encode()
        self.digest = _as_numbers(hashlib.blake2b(self._of_plan + text, digest_size=len(self._of_plan)).digest())
        return True

    def check(self, digests: Tensor, ranks: tuple[int, ...], *, together: bool = True) -> None:
        """Make sure that ranks run the same.

        Args:
            digests: (ranks, 4) of `digest`, that of each rank.
            ranks: ascending, this one among them.
            together: all of them call this with the same digests; they then tell each other what their calls differ in.

        Raises:
            InputError: if they do not run the same.
        """
        if not bool((digests != digests[0]).any()):
            return
        if together:
            check_same(self._transport, self._settings, peers=ranks, advice=dict.fromkeys(self._settings, CALLS))
        wrong = [rank for rank, row in zip(ranks, digests) if bool((row != digests[0]).any())]
        calls = "" if together else f", or call the layer with another {', '.join(self._settings)},"
        raise InputError(
            f"ranks {wrong} run another plan or mesh{calls} than rank {ranks[0]}: give every rank the same plan, and the same "
            "settings to what replicates"
        )


def _as_numbers(digest: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(digest, dtype=np.uint32).astype(np.float64))
