"""Routing over several ranks: one exchange per call tells every rank every rank's counts.

From the same numbers every rank derives the same limits, the same drops and the same losses, so that none of them depends
on how the tokens are spread, and no rank waits for another's decision. The same exchange tells whether all ranks run the same.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.comm.collectives import all_gather, as_text, check_same
from moesaic.comm.transport import AbstractTransport
from moesaic.errors import InputError
from moesaic.kernels.memory import uploaded
from moesaic.program.grid import Grid
from moesaic.routing.losses import RouterStatistics
from moesaic.routing.node_tokens import NodeTokens
from moesaic.routing.routing import Choice

_SIZES, _DIGEST = 3, 4
"""Numbers at the beginning of a message, and at its end."""
CHUNKS = 4
"""For so many the message of counts has room for the visits and stops of a rank; where they do not fit they go apart."""
ANNOUNCES = -1
"""The first number of a message that says how long the next one is; elsewhere it is a number of tokens."""
CALLS = "call the layer alike on every rank"
"""What to do where calls differ."""
SEQUENCES = "pad the batch with sequences whose mask is False, or choose another level of LoadBalance"
"""What to do where ranks have different numbers of sequences."""


@dataclass(frozen=True)
class Gathered:
    """What the ranks told each other in one call."""

    values: Tensor
    """(P, n) float64: all of the below, side by side."""
    num_slots: int
    """K: choices that are counted apart; 1 where their order does not matter."""
    num_experts: int
    num_more: int
    """m: of `Peers.also`."""
    sent: Tensor | None = None
    """(P, E) int64 copies that each rank sends to each expert, once that is decided."""

    @classmethod
    def exchange(
        cls,
        peers: Peers,
        counts_KE: Tensor,
        num_valid: Tensor | None,
        num_tokens: int,
        nonfinite: Tensor,
        local: RouterStatistics | None,
        more: Tensor,
    ) -> Gathered:
        """Tell the peers this rank's counts and sums, and hear theirs.

        Args:
            counts_KE: (K, E) int64 copies before capacity, by choice and expert.
            num_valid: () tokens that are not padding; None for all.
            num_tokens: padding included.
            nonfinite: () copies whose routing weight is NaN or infinite.
            local: sums of this rank's tokens, if a loss reads them.
            more: what `peers.also` returned.
        """
        sizes = torch.full((_SIZES,), num_tokens, dtype=torch.float64, device=counts_KE.device)
        sizes[2] = nonfinite
        if num_valid is not None:
            sizes[0] = num_valid
        digest = peers.digest_on(sizes.device)
        sums = [] if local is None else [local.packed().detach().double()]
        message = torch.cat([sizes, counts_KE.reshape(-1).double(), *sums, more.to(digest), digest])
        return cls(
            peers.gather(message),
            num_slots=counts_KE.shape[0],
            num_experts=counts_KE.shape[1],
            num_more=len(more),
        )

    @cached_property
    def valid(self) -> Tensor:
        """(P,) int64 tokens that are not padding."""
        return self.values[:, 0].long()

    @cached_property
    def tokens(self) -> Tensor:
        """(P,) int64 tokens."""
        return self.values[:, 1].long()

    @cached_property
    def nonfinite(self) -> Tensor:
        """(P,) int64 copies whose routing weight is NaN or infinite."""
        return self.values[:, 2].long()

    @cached_property
    def counts(self) -> Tensor:
        """(P, K, E) int64 copies before capacity."""
        width = self.num_slots * self.num_experts
        return self.values[:, _SIZES : _SIZES + width].long().view(-1, self.num_slots, self.num_experts)

    @cached_property
    def _all_on_host(self) -> np.ndarray:
        """(P, n + E) float64: the values and `sent`, brought to the host at once: the one wait of a call."""
        parts = [self.values] if self.sent is None else [self.values, self.sent.double()]
        return torch.cat(parts, 1).cpu().numpy()

    @property
    def on_host(self) -> np.ndarray:
        """(P, n) float64: the values, on the host."""
        return self._all_on_host[:, : self.values.shape[1]]

    @cached_property
    def sent_on_host(self) -> np.ndarray:
        """(P, E) int64: `sent`, on the host."""
        assert self.sent is not None
        return self._all_on_host[:, self.values.shape[1] :].astype(np.int64)

    @property
    def digests_on_host(self) -> np.ndarray:
        """(P, 4) float64: every rank's `Peers.digest`, on the host."""
        return self.on_host[:, -_DIGEST:]

    @property
    def more_on_host(self) -> np.ndarray:
        """(P, m) float64: what every rank's `Peers.also` returned, on the host."""
        return self.on_host[:, -_DIGEST - self.num_more : -_DIGEST]

    def statistics(self, local: RouterStatistics, peers: Peers, earlier_counts_E: Tensor | None) -> RouterStatistics:
        """Return the sums over all ranks' tokens; differentiable in this rank's part.

        Args:
            local: this rank's sums.
            earlier_counts_E: (E,) int64 copies of the step before this call, over all ranks.
        """
        mine = local.packed()
        others = self.values[:, _SIZES + self.num_slots * self.num_experts : -_DIGEST - self.num_more].to(mine)
        rows = [mine if place == peers.place else others[place] for place in range(peers.number)]
        return local.joined(torch.stack(rows), peers.slices, earlier_counts_E)


def places_before(counts_PKE: Tensor) -> Tensor:
    """Return how many copies stand before each rank's first in the queue of an expert, (P, K, E) int64.

    All first choices come before all second ones, within a choice in the order of the ranks.
    """
    by_choice = counts_PKE.sum(0)
    earlier_choices = by_choice.cumsum(0) - by_choice
    earlier_ranks = counts_PKE.cumsum(0) - counts_PKE
    return earlier_choices + earlier_ranks


def kept_copies(counts_PKE: Tensor, rows: Tensor | None) -> Tensor:
    """Return the copies that each rank may send to each expert, (P, E) int64.

    Args:
        counts_PKE: (P, K, E) copies before capacity.
        rows: () rows that an expert takes from all ranks together, or (P,) from each rank; None for no limit.
    """
    if rows is None:
        return counts_PKE.sum(1) if counts_PKE.shape[1] > 1 else counts_PKE.squeeze(1)
    if rows.dim():
        return torch.minimum(counts_PKE.sum(1), rows.unsqueeze(1))
    room = (rows - places_before(counts_PKE)).clamp_min(0)
    return torch.minimum(room, counts_PKE).sum(1)


class Peers:
    """The ranks that route the tokens of one call, each its own, in the order of their tokens.

    They are one rank per data-parallel group, or all ranks where the ranks of a tensor group each route a slice of its tokens.

    Args:
        transport: the transport between all ranks.
        slices: whether each rank of a tensor group routes a slice of the group's tokens.
        digest: 16 bytes, the same on all ranks that run the same programs.
        find: under multicast, the function that finds the node tokens of copies sorted by slot, from (token, slot, number of
            tokens); None under other plans.
        slots: the function from experts to the slots in which they are.
        tell: returns numbers that the ranks tell each other with the counts of a call, the same number of them in every call.
    """

    number: int
    """P: how many ranks route, this one included."""
    place: int
    """This rank's place among them."""
    slices: int
    """How many neighbours hold slices of one batch of tokens (S1's tensor group); 1 if every rank has whole sequences."""
    slice: int
    """Which of the slices this rank holds."""
    digest: Tensor
    """(4,) float64: a digest of what the rank runs, the same on all ranks that run the same."""
    all_agree: bool
    """Whether it is known that all ranks of the world run the same; False after a switch."""
    length: int
    """How many numbers the last message had, the same on all ranks; at first those of an announcement."""
    skips_digests: bool
    """Whether ranks that call the layer as they did before read no digests in this call."""

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
        self._digest_there = (torch.empty(0), torch.empty(0))
        self._find = find if self.number == transport.world else None
        self._slots_of, self._tell = slots, tell
        casts = grid.ep > 1 and bool(grid.nodes_per_replica) and grid.has_shards_inside_nodes
        self._room = CHUNKS * sum(grid.cast_levels) if casts else 0
        self._found: tuple[Choice, NodeTokens] | None = None
        self._sorted: tuple[Tensor, Tensor] | None = None
        self.all_agree = True
        self.length = 2 + len(self.digest)
        self.skips_digests = False

    def also(
        self, choice: Choice, alive_N: Tensor | None, num_tokens: int, num_experts: int, *, may_drop: bool
    ) -> Tensor:
        """Return what else this rank tells in the exchange of counts: its counts of node tokens, then what `tell` returns.

        Whatever the plan, the message has room for both: ranks that brought different plans must be able to tell so.

        Args:
            choice: the copies of this rank's tokens.
            alive_N: (N,) bool, which of them are sent; None for all.
            num_tokens: how many tokens this rank routes.
            may_drop: the capacity may drop some copies, so that nobody knows yet which are sent.

        Returns:
            (m,) float64; m is the same in every call on every rank.
        """
        node_tokens = torch.zeros(self._room, dtype=torch.float64, device=choice.expert.device)
        if self._find is not None and not may_drop:
            node_tokens = self._counts_of_node_tokens(choice, alive_N, num_tokens, num_experts, node_tokens)
        told = np.array(self._tell(), dtype=np.float64)
        numbers = uploaded(told, node_tokens.device) if told.any() else node_tokens.new_zeros(len(told))
        return torch.cat([node_tokens, numbers])

    def _counts_of_node_tokens(
        self, choice: Choice, alive_N: Tensor | None, num_tokens: int, num_experts: int, room: Tensor
    ) -> Tensor:
        """Return the counts of this rank's node tokens, as long as `room`; room itself where they do not fit."""
        assert self._find is not None
        token, expert = choice.token, self._slots_of(choice.expert)
        if alive_N is not None and expert.device.type != "cpu":
            expert = expert.masked_fill(~alive_N, num_experts)
        elif alive_N is not None:
            token, expert = token[alive_N], expert[alive_N]
        order = stable_order(expert)
        self._sorted = (expert, order)
        node_tokens = self._find(token.index_select(0, order), expert.index_select(0, order), num_tokens)
        empty = len(room) - node_tokens.counts.numel()
        if empty < 0:
            return room
        self._found = (choice, node_tokens)
        return F.pad(node_tokens.counts.flatten().double(), (0, empty))

    def digest_on(self, device: torch.device) -> Tensor:
        """Return `digest` on a device; it goes there once."""
        if self._digest_there[0] is not self.digest:
            self._digest_there = self.digest, self.digest.to(device)
        return self._digest_there[1]

    def order(self, expert: Tensor) -> Tensor:
        """Return the stable order of rows by expert, (rows,) int64; where `also` has sorted the same ones, without work."""
        known, self._sorted = self._sorted, None
        return known[1] if known is not None and known[0] is expert else stable_order(expert)

    def node_tokens(self, choice: Choice, gathered: Gathered | None) -> NodeTokens | None:
        """Return the node tokens whose counts went with a call's counts, with the counts of all ranks; None if they did not.

        They are handed out once: a recomputation finds them again.

        Args:
            choice: the copies that the call chose.
            gathered: what the ranks told each other in the call.
        """
        found, self._found = self._found, None
        if found is None or found[0] is not choice or gathered is None:
            return None
        mine = found[1]
        of_all = gathered.more_on_host[:, : mine.counts.numel()].astype(np.int64)
        return mine.told(of_all.reshape(-1, *mine.counts.shape), self.place)

    def gather(self, message: Tensor) -> Tensor:
        """Return every rank's message, (P, n) float64, from this rank's, (n,) float64; the same on all ranks.

        A message is as long as there are choices, sums and experts to tell of, so ranks that call the layer differently have
        messages of different lengths, which no transport takes. A rank whose message is longer or shorter than those of
        the call before therefore sends one of that length first, which says how long its own is and has its digest in the
        same place.

        After a switch, the ranks may have come to differ in who routes with whom. So that nobody waits for a rank that does
        not send, the first message goes to all ranks. (Without tensor parallelism messages go to all ranks anyway, and the
        digest in the exchange of counts tells.)

        Raises:
            InputError: on every rank, if they do not run the same.
        """
        is_told_all = self.all_agree or self._hear_all
        ranks = self.ranks if is_told_all else tuple(range(self._transport.world))
        if len(message) != self.length:
            self._announce(ranks, message)
        told = torch.stack(all_gather(self._transport, ranks, message))
        if is_told_all:
            return told
        self.check(told[:, -len(self.digest) :].cpu(), ranks)
        self.all_agree = True
        return told[list(self.ranks)]

    def _announce(self, ranks: tuple[int, ...], message: Tensor) -> None:
        """Tell the ranks that messages have another length from now on, and hear that all of them say so."""
        head = torch.zeros(self.length, dtype=message.dtype, device=message.device)
        head[0], head[1], head[-len(self.digest) :] = ANNOUNCES, len(message), self.digest.to(head)
        heads = torch.stack(all_gather(self._transport, ranks, head)).cpu()
        self.check(heads[:, -len(self.digest) :], ranks, together=not self.skips_digests)
        if bool((heads[:, 0] != ANNOUNCES).any() | (heads[:, 1] != len(message)).any()):
            mine = ", ".join(f"{name}={as_text(value)}" for name, value in self._settings.items())
            raise InputError(f"ranks call a layer differently; rank {self._transport.rank}: {mine}: {CALLS}")
        self.length = len(message)

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
            advice = dict.fromkeys(self._settings, CALLS) | {"call.sequences": SEQUENCES}
            check_same(self._transport, self._settings, peers=ranks, advice=advice)
        wrong = [rank for rank, row in zip(ranks, digests) if bool((row != digests[0]).any())]
        calls = "" if together else f", or call the layer with another {', '.join(self._settings)},"
        raise InputError(
            f"ranks {wrong} run another plan or mesh{calls} than rank {ranks[0]}: give every rank the same plan, and the same "
            "settings to what replicates"
        )


def _as_numbers(digest: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(digest, dtype=np.uint32).astype(np.float64))


def stable_order(values: Tensor) -> Tensor:
    """Return the indices that sort whole numbers of at least 0, equal ones as they stand: (n,) int64 -> (n,) int64.

    On a CPU numpy sorts 16-bit numbers by radix, in a third of the time that torch takes for any type.
    """
    if values.device.type != "cpu" or not len(values):
        return values.argsort(stable=True)
    numbers = values.numpy()
    if numbers.max() < 2**16:
        numbers = numbers.astype(np.uint16)
    return torch.from_numpy(numbers.argsort(kind="stable"))
