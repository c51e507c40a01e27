"""Routing over several ranks: in one exchange per call, every rank gets the counts of all ranks.

From these numbers every rank derives the same limits, drops and losses. They do not depend on how
the tokens are spread over ranks, and no rank waits for the decision of another. The exchange also
verifies that all ranks run the same plan and have the same router.

A message has, all as float64: the sizes (valid tokens, tokens, copies with a weight that is not
finite, a hash of the router's weights), counts by choice and expert (K, E), the sums of the losses,
the extras (counts of node tokens, the batch of a tensor-parallel group), and the digest, a hash of
the plan and of a call's arguments. P peers exchange messages. Copies are alive if they are neither
padding nor held back by the router. Node tokens are the nodes and ranks to which multicast sends
each token (`node_tokens.py`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.comm.collectives import all_gather_rows, as_text, check_same
from moesaic.comm.transport import AbstractTransport, number_in_flight
from moesaic.errors import InputError
from moesaic.program.grid import Grid
from moesaic.routing.losses import RouterStatistics
from moesaic.routing.node_tokens import NodeTokens
from moesaic.routing.routing import Choice

_SIZES = 4
_DIGEST = 4
"""How many numbers of a message are sizes and a hash, at its beginning, and how many are the
digest, at its end."""
_WORDS = {1: torch.int8, 2: torch.int16}
"""The type in which `hash_of` reads numbers of so many bytes; wider ones are read as several of 4
bytes."""
_PRIME = 2**53 - 111
_ODD = 0x9E3779B97F4A7C15 - 2**64
"""The largest prime that a float64 holds, and a multiplier without small factors."""
CHUNKS = 4
"""The number of chunks for whose visits and stops a message has room; counts of more chunks are
exchanged separately."""
BATCH = 5
"""How many numbers describe the batch of a tensor-parallel group."""
SAMPLED = 8
"""The tokens whose activations are compared in a tensor-parallel group."""
ROUNDING = 0.02
"""Differences of activations up to this part of their norm are taken for those of rounding."""
ANNOUNCES = -1
"""The first number of a message that announces the length of the next message. In other messages it
is a number of tokens."""
CALLS = "call the layer identically on every rank"
"""The advice in an error message if ranks call a layer differently."""
ON_SOME = ("call.micro_batch", "call.set_loss_scale")
"""Settings that only some calls have."""
SEQUENCES = (
    "pad the batch with sequences whose mask is False, or choose another level of LoadBalance"
)
"""The advice in an error message if ranks have different numbers of sequences."""


@dataclass
class Gathered:
    """The messages that the ranks exchanged in one call."""

    values: Tensor
    """(P, n) float64: the message of each rank. The properties below are parts of the messages."""
    num_slots: int
    """K: the number of choices that are counted separately; 1 if the order of choices does not
    matter."""
    num_experts: int
    """E."""
    num_extras: int
    """m: the number of values from `Peers.extras`."""
    sent: Tensor | None = None
    """(P, E) int64: copies that each rank sends to each expert under a capacity; None for all."""
    with_gradients: bool = True
    """Whether gradients were on; a reentrant checkpoint turns them on for the recomputation
    alone."""
    sets_loss_scale: bool = False
    """Whether the caller had set a scale of the losses, which it may do until the backward pass."""
    micro_batch: int | None = None
    """The number of the micro-batch, if several are in flight; a recomputation runs alone."""

    @classmethod
    def exchange(
        cls,
        peers: Peers,
        counts: Tensor,
        *,
        num_experts: int,
        num_valid: Tensor,
        num_tokens: int | None,
        nonfinite: Tensor,
        sums: Sequence[Tensor],
        extras: Sequence[Tensor],
    ) -> Gathered:
        """Exchange counts and sums with the peers.

        Args:
            peers: the ranks of the exchange.
            counts: (K E,) int64, this rank's copies before capacity, by choice and expert.
            num_experts: E.
            num_valid: (), this rank's tokens that are not padding.
            num_tokens: this rank's tokens, padding included; None if no token is padding.
            nonfinite: (), this rank's copies whose routing weight is NaN or infinite.
            sums: those of this rank's tokens that the losses read, (n,) each.
            extras: the further values from `peers.extras`.
        """
        tokens = num_valid
        if num_tokens is not None:
            tokens = torch.full((), num_tokens, device=counts.device)
        with torch.no_grad():
            parts = [
                torch.stack([num_valid, tokens, nonfinite]),
                peers.weights_hash(counts.device),
                counts,
                *sums,
                *extras,
                peers.digest_on(counts.device),
            ]
            message = torch.cat(parts)  # float64, as the digest is
        values = peers.gather(message)
        peers.compare_groups()
        return cls(
            values,
            num_slots=len(counts) // num_experts,
            num_experts=num_experts,
            num_extras=sum(map(len, extras)),
            with_gradients=torch.is_grad_enabled(),
            sets_loss_scale=peers.sets_loss_scale,
            micro_batch=number_in_flight(),
        )

    def totals(self, parts: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the sums over all ranks of this rank's `parts`, which were exchanged as sums."""
        totals = self._total[self._sums].to(parts[0].dtype)
        return [totals] if len(parts) == 1 else totals.split([len(part) for part in parts])

    @property
    def _counts(self) -> slice:
        """Where a message has the counts."""
        return slice(_SIZES, _SIZES + self.num_slots * self.num_experts)

    @property
    def _sums(self) -> slice:
        """Where a message has the sums of the losses."""
        return slice(self._counts.stop, -_DIGEST - self.num_extras)

    @cached_property
    def _total(self) -> Tensor:
        """(n,) float64: the sum of all ranks' messages."""
        return self.values.sum(0)

    @cached_property
    def valid(self) -> Tensor:
        """(P,) int64: tokens of each rank that are not padding."""
        return self.values[:, 0].long()

    @cached_property
    def tokens(self) -> Tensor:
        """(P,) int64: tokens of each rank, padding included."""
        return self.values[:, 1].long()

    @cached_property
    def counts(self) -> Tensor:
        """(P, K, E) int64: copies before capacity, by rank, choice and expert."""
        counts = self.values[:, self._counts].long()
        return counts.view(-1, self.num_slots, self.num_experts)

    @property
    def by_rank(self) -> Tensor:
        """(P, E) int64: copies that each rank sends to each expert."""
        return self.counts.sum(1) if self.sent is None else self.sent

    @cached_property
    def counted(self) -> tuple[Tensor, Tensor, Tensor]:
        """Over all ranks: copies of each expert before capacity, (E,) int64, copies whose routing
        weight is NaN or infinite, () int64, and tokens that are not padding, () int64."""
        total = self._total.long()
        copies = total[self._counts]
        if self.num_slots > 1:
            copies = copies.view(self.num_slots, self.num_experts).sum(0)
        return copies, total[2], total[0]

    @cached_property
    def _all_on_host(self) -> np.ndarray:
        """(P, n + E) float64: `values` and `sent`, copied to the host together. The host waits for
        the device only here."""
        whole = self.values if self.sent is None else torch.cat([self.values, self.sent], 1)
        return whole.cpu().numpy()

    @property
    def on_host(self) -> np.ndarray:
        """(P, n) float64: `values`, on the host."""
        return self._all_on_host[:, : self.values.shape[1]]

    @cached_property
    def sent_on_host(self) -> np.ndarray:
        """(P, E) int64: `sent`, or all copies, on the host."""
        if self.sent is not None:
            return self._all_on_host[:, self.values.shape[1] :].astype(np.int64)
        counts = self.on_host[:, self._counts].reshape(-1, self.num_slots, self.num_experts)
        return counts.sum(1).astype(np.int64)

    @property
    def hashes_on_host(self) -> np.ndarray:
        """(P,) float64: every rank's `Peers.weights_hash`, on the host."""
        return self.on_host[:, 3]

    @property
    def digests_on_host(self) -> np.ndarray:
        """(P, 4) float64: every rank's `Peers.digest`, on the host."""
        return self.on_host[:, -_DIGEST:]

    @property
    def extras_on_host(self) -> np.ndarray:
        """(P, m) float64: the values from every rank's `Peers.extras`, on the host."""
        return self.on_host[:, -_DIGEST - self.num_extras : -_DIGEST]

    def statistics(
        self, local: RouterStatistics, peers: Peers, earlier_counts_E: Tensor | None
    ) -> RouterStatistics:
        """Return the statistics of all ranks' tokens, differentiable in this rank's part.

        Args:
            local: the statistics of this rank's tokens.
            peers: the ranks of the exchange.
            earlier_counts_E: (E,) int64, copies of the optimizer step before this call, over all
                ranks.
        """
        own = torch.cat(local.parts())
        # the exchange has cut the gradient, which this rank's own part still has
        rows = list(self.values[:, self._sums].to(own))
        rows[peers.place] = own
        return local.joined(torch.stack(rows), peers.slices, earlier_counts_E)


def places_before(counts_PKE: Tensor) -> Tensor:
    """Return the queue position of each rank's first copy of each choice, per expert, (P, K, E)
    int64.

    In an expert's queue all first choices come before all second ones, and within a choice copies
    are in rank order.
    """
    by_choice = counts_PKE.sum(0)
    earlier_choices = by_choice.cumsum(0) - by_choice
    earlier_ranks = counts_PKE.cumsum(0) - counts_PKE
    return earlier_choices + earlier_ranks


def kept_copies(gathered: Gathered, rows: Tensor | None) -> Tensor:
    """Return the copies that each rank may send to each expert, (P, E) int64.

    Args:
        gathered: copies before capacity.
        rows: (), the rows that an expert takes from all ranks together, or (P,), from each rank;
            None for no limit.
    """
    if rows is None:  # all copies
        return gathered.by_rank
    is_by_rank = rows.dim() == 1
    if is_by_rank:
        return torch.minimum(gathered.by_rank, rows.unsqueeze(1))
    # in one queue, what is left for a rank's copies of a choice behind those before them
    room = (rows - places_before(gathered.counts)).clamp_min(0)
    return torch.minimum(room, gathered.counts).sum(1)


class Peers:
    """The ranks that route the tokens of one call, in the order of their tokens. Each rank routes
    its own tokens.

    The peers are one rank of each data-parallel group. If the ranks of a tensor-parallel group
    route slices of its tokens, the peers are all ranks.

    Args:
        transport: the transport between all ranks.
        grid: the mesh.
        slices: whether each rank of a tensor-parallel group routes a slice of the group's tokens.
        digest: 16 bytes, the same on all ranks that run the same programs.
        find: under multicast, returns the node tokens of copies sorted by slot, from (token, slot,
            number of tokens); None under other plans.
        slots: maps experts to the slots that hold them, in the order in which ranks store experts.
    """

    def __init__(
        self,
        transport: AbstractTransport,
        grid: Grid,
        slices: bool,
        digest: bytes,
        find: Callable[[Tensor, Tensor, int], NodeTokens] | None = None,
        slots: Callable[[Tensor], Tensor] = lambda expert: expert,
    ) -> None:
        self._transport = transport
        self.ranks = tuple(range(grid.world)) if slices else grid.group(transport.rank, ("dp",))
        """The ranks of the peers, this one included, in the order of their tokens."""
        self.number = len(self.ranks)
        """P, the number of peers, this rank included."""
        self.place = self.ranks.index(transport.rank)
        """The index of this rank among the peers."""
        self.slices = grid.tp if slices else 1
        """The number of neighbouring peers, a tensor-parallel group, that hold slices of one batch
        of tokens; 1 if every peer has whole sequences."""
        self._tensor_ranks = grid.tp
        """How many neighbouring ranks of the world share their tokens."""
        self.slice = grid.coordinate(transport.rank, "tp") if slices else 0
        """The index of this rank's slice."""
        self._plan_digest = digest  # without the arguments of a call
        self._settings: dict[str, object] = {}
        """The arguments by name with which the layer is called, see `call_with`."""
        self.digest = _as_numbers(digest)
        """(4,) float64: a digest of the plan and of this rank's arguments of a call."""
        self._device_digest = (self.digest[:0], torch.empty(0))
        """The `digest` that was copied last, and its copy on a device."""
        # only the messages of all ranks bring the counts of every rank
        self._find_node_tokens = find if self.number == transport.world else None
        self._slots_of = slots
        self._node_tokens_length = _num_node_tokens(grid)
        """The length of the extras: a count for each chunk, and each node and place of ep."""
        self._node_tokens: tuple[Choice, NodeTokens] | None = None
        """The node tokens that `extras` found, and the choice that they belong to, until
        `node_tokens` takes them."""
        self._sorted_experts: tuple[Tensor, Tensor] | None = None
        """Experts that `extras` sorted, and their order, until `order` takes it."""
        self.all_agree = True
        """Whether all ranks are known to run the same programs; False after a switch of plans."""
        # an announcement is at least a mark, a length and the digest
        self.length = 2 + len(self.digest)
        """The length of the last message, the same on all ranks; before the first message, the
        length of an announcement."""
        self.skips_digests = False
        """Whether a rank that calls the layer with unchanged settings does not compare digests in
        this call."""
        self.weights: Mapping[str, Tensor] = {}
        """The router's weights by name, and what it adapts, which are the same on all ranks that
        route tokens of their own."""
        self.advice: Mapping[str, str] = {}
        """What to do if they are not, by their names."""
        self.sets_loss_scale = False
        """Whether the caller of the next call has set a scale of the losses."""
        self.batch: Tensor | None = None
        """(5,) float64: the `batch_in_numbers` of the next call; None for zeros."""
        self.compares_groups = False
        """Whether the next call has a message more, in which `compare_groups` compares batches."""

    @property
    def _batch_length(self) -> int:
        """How many of the extras describe the batch of this rank's tensor-parallel group."""
        return BATCH if self._tensor_ranks > 1 else 0

    def weights_hash(self, device: torch.device) -> Tensor:
        """Return a hash of `weights`, (1,) int64; 0 if there is nothing to compare them with."""
        # no other group's tokens: all peers route slices of the same ones
        is_alone = self.number <= self.slices
        hashed = None if is_alone else hash_of(self.weights.values())
        return torch.zeros(1, dtype=torch.int64, device=device) if hashed is None else hashed

    def extras(
        self,
        choice: Choice,
        alive_N: Tensor | None,
        num_tokens: int,
        num_experts: int,
        *,
        may_drop: bool,
    ) -> list[Tensor]:
        """Return the further values that this rank sends with its counts: counts of node tokens,
        and what describes the batch of its tensor-parallel group.

        The message has room for them under every plan: ranks with different plans must be able to
        exchange digests.

        Args:
            choice: the copies of this rank's tokens.
            alive_N: (N,) bool, the copies that are sent; None for all.
            num_tokens: number of tokens that this rank routes.
            may_drop: whether the capacity may still drop some of these copies.

        Returns:
            m values in all; m is the same in every call on every rank.
        """
        zeros = partial(torch.zeros, dtype=torch.float64, device=choice.expert.device)
        extras = []
        if self._node_tokens_length:
            counts = zeros(self._node_tokens_length)
            if self._find_node_tokens is not None and not may_drop:
                counts = self._counts_of_node_tokens(
                    choice, alive_N, num_tokens, num_experts, counts
                )
            extras.append(counts)
        if self._batch_length:
            extras.append(zeros(BATCH) if self.batch is None else self.batch)
        return extras

    def check_batches(self, gathered: Gathered) -> None:
        """Check that the ranks of each tensor-parallel group, which route slices of one batch,
        called the layer with the same batch.

        Args:
            gathered: the messages of the call.

        Raises:
            InputError: on every rank, if those of a group did not.
        """
        if self.slices > 1:  # all ranks are peers
            self._check_batches(gathered.extras_on_host[:, -self._batch_length :])

    def compare_groups(self) -> None:
        """In a call with `compares_groups`, compare digests of all ranks, and the batches of each
        tensor-parallel group.

        Raises:
            InputError: on every rank, if they differ.
        """
        if not self.compares_groups:
            return
        assert self.batch is not None
        own = torch.cat([self.batch, self.digest_on(self.batch.device)])
        world = tuple(range(self._transport.world))
        messages = self._gathered(world, own).cpu()
        self.check(messages[:, BATCH:], world)
        self._check_batches(messages[:, :BATCH].numpy())

    def _check_batches(self, batches: np.ndarray) -> None:
        """Raise InputError if ranks of a tensor-parallel group have other batches, given those of
        all ranks of the world, (world, 5)."""
        for first in range(0, len(batches), self._tensor_ranks):
            of_group = batches[first : first + self._tensor_ranks]
            words = [in_words(batch) for batch in of_group]
            for index, batch in enumerate(of_group):
                if is_same_batch(batch, batches[first]):
                    continue
                other = first + index
                raise InputError(
                    f"ranks {first} and {other} of a tensor-parallel group call a layer with "
                    f"different tokens: {words[0]} on rank {first}, {words[index]} on rank "
                    f"{other}: give all ranks of the group the same x, mask and token_ids"
                )

    def _counts_of_node_tokens(
        self,
        choice: Choice,
        alive_N: Tensor | None,
        num_tokens: int,
        num_experts: int,
        padding: Tensor,
    ) -> Tensor:
        """Return the counts of this rank's node tokens, padded to the length of `padding`;
        `padding` if they do not fit.

        Keeps the order by expert for `order`, and the node tokens for `node_tokens`.
        """
        assert self._find_node_tokens is not None
        token = choice.token
        expert = self._slots_of(choice.expert)
        if alive_N is not None and expert.device.type == "cpu":
            token = token[alive_N]
            expert = expert[alive_N]
        elif alive_N is not None:
            # a GPU does not remove copies, whose number the host would wait for
            expert = expert.masked_fill(~alive_N, num_experts)
        order = stable_order(expert)
        self._sorted_experts = (expert, order)
        node_tokens = self._find_node_tokens(
            token.index_select(0, order), expert.index_select(0, order), num_tokens
        )
        num_missing = len(padding) - node_tokens.counts.numel()
        if num_missing < 0:  # more chunks than `CHUNKS`, whose counts are exchanged separately
            return padding
        self._node_tokens = (choice, node_tokens)
        return F.pad(node_tokens.counts.flatten().double(), (0, num_missing))

    def digest_on(self, device: torch.device) -> Tensor:
        """Return `digest` on a device. Each digest is copied once."""
        digest, copy = self._device_digest
        if digest is not self.digest:
            copy = torch.from_numpy(self.digest).to(device)
            self._device_digest = (self.digest, copy)
        return copy

    def order(self, expert: Tensor) -> Tensor:
        """Return the stable order of rows by expert, (rows,) int64. Reuses the order if `extras`
        has sorted the same tensor."""
        cached = self._sorted_experts
        self._sorted_experts = None
        if cached is not None:
            sorted_expert, order = cached
            if sorted_expert is expert:
                return order
        return stable_order(expert)

    def node_tokens(self, choice: Choice, gathered: Gathered | None) -> NodeTokens | None:
        """Return the node tokens of a call with the counts of all ranks; None if the call's
        exchange did not include them.

        They are returned only once per call; a recomputation computes them again.

        Args:
            choice: the copies that the call chose.
            gathered: the messages of the call; None on one rank.
        """
        cached = self._node_tokens
        self._node_tokens = None
        if cached is None or gathered is None:
            return None
        cached_choice, own = cached
        if cached_choice is not choice:
            return None
        # without the padding behind the counts
        of_all = gathered.extras_on_host[:, : own.counts.numel()].astype(np.int64)
        return own.with_counts(of_all.reshape(-1, *own.counts.shape), self.place)

    def gather(self, message: Tensor) -> Tensor:
        """Return the messages of all peers, (P, n) float64, given this rank's, (n,) float64.

        The length of a message depends on the numbers of choices, sums and experts. Ranks that call
        the layer differently thus have messages of different lengths, which no transport accepts.
        Therefore, if its message differs in length from the previous one, a rank first sends an
        announcement of the previous length, with the new length and its digest.

        After a switch of plans, ranks may disagree about which ranks are peers. The first message
        then goes to all ranks, and no rank waits for one that does not send. Without tensor
        parallelism all ranks are peers anyway, and comparing the digests in the exchange of counts
        is enough.

        Raises:
            InputError: on every rank, if the ranks do not run the same.
        """
        knows_peers = self.all_agree or self._tensor_ranks == 1
        ranks = self.ranks if knows_peers else tuple(range(self._transport.world))
        if len(message) != self.length:
            self._announce(ranks, message)
        messages = self._gathered(ranks, message)
        if knows_peers:
            return messages
        # the digest is the end of a message
        self.check(messages[:, -len(self.digest) :].cpu(), ranks)
        self.all_agree = True
        return messages[list(self.ranks)]

    def _gathered(self, ranks: tuple[int, ...], message: Tensor) -> Tensor:
        """Return the messages of ranks, one in a row, given this rank's, (n,)."""
        return all_gather_rows(self._transport, ranks, message.unsqueeze(0), len(ranks))

    def _announce(self, ranks: tuple[int, ...], message: Tensor) -> None:
        """Announce to the ranks that messages change their length, and verify that all ranks
        announce the same length."""
        # as long as the previous message: a mark, the new length, zeros, and the digest at the end
        head = torch.zeros(self.length, dtype=message.dtype, device=message.device)
        head[0] = ANNOUNCES
        head[1] = len(message)
        head[-len(self.digest) :] = self.digest_on(head.device)
        heads = self._gathered(ranks, head).cpu()
        self.check(heads[:, -len(self.digest) :], ranks, together=not self.skips_digests)
        announces = heads[:, 0] == ANNOUNCES
        has_same_length = heads[:, 1] == len(message)
        if not bool((announces & has_same_length).all()):
            settings = ", ".join(
                f"{name}={as_text(value)}" for name, value in self._settings.items()
            )
            raise InputError(
                f"ranks call a layer differently; rank {self._transport.rank}: {settings}: {CALLS}"
            )
        self.length = len(message)

    def call_with(self, settings: Mapping[str, object]) -> bool:
        """Store the settings of the next calls of the layer, and return whether they differ from
        the previous settings.

        Args:
            settings: arguments, by name, that must be the same on all ranks; ranks compare them as
                text.
        """
        if settings == self._settings:
            return False
        self._settings = dict(settings)
        text_by_name = {name: as_text(value) for name, value in settings.items()}
        text = json.dumps(text_by_name, sort_keys=True).encode()
        hashed = hashlib.blake2b(self._plan_digest + text, digest_size=len(self._plan_digest))
        self.digest = _as_numbers(hashed.digest())
        return True

    def check(self, digests: Tensor, ranks: tuple[int, ...], *, together: bool = True) -> None:
        """Check by their digests that ranks run the same.

        Args:
            digests: (ranks, 4), the `digest` of each rank.
            ranks: the ranks, ascending, including this one.
            together: whether all of `ranks` call this method with the same digests. If these
                differ, the ranks then exchange their settings to report the difference.

        Raises:
            InputError: if the ranks do not run the same.
        """
        differs = (digests != digests[0]).any(1).tolist()  # of each rank, from the first one's
        if not any(differs):
            return
        if together:
            # the settings may differ, which is raised here; `advice` says by name of a setting what
            # to do about it
            names = (*self._settings, *ON_SOME)
            advice = dict.fromkeys(names, CALLS) | {"call.sequences": SEQUENCES}
            check_same(self._transport, self._settings, peers=ranks, advice=advice)
        # their settings are the same, so that the plans differ; without a comparison either may
        wrong = [rank for rank, is_other in zip(ranks, differs) if is_other]
        calls = "" if together else f", or call the layer with another {', '.join(self._settings)},"
        raise InputError(
            f"ranks {wrong} run another plan or mesh{calls} than rank {ranks[0]}: give every rank "
            "the same plan, and its replication policy the same settings"
        )


def _num_node_tokens(grid: Grid) -> int:
    """Return how many counts of node tokens a message has: some where a plan may multicast."""
    casts = grid.ep > 1 and bool(grid.nodes_per_replica) and grid.has_shards_inside_nodes
    return CHUNKS * sum(grid.cast_levels) if casts else 0


def batch_in_numbers(x_TD: Tensor, valid_T: Tensor | None, token_ids: Tensor | None) -> Tensor:
    """Return numbers, (5,) float64, that tell a batch of tokens from another one: tokens, tokens
    that are not padding, sums of their places and ids, and of a sample of the activations a
    weighed sum and a norm, which differ by rounding between ranks that added in another order."""
    num_tokens = len(x_TD)
    place = torch.arange(1, num_tokens + 1, dtype=torch.float64, device=x_TD.device)
    step = max(num_tokens // SAMPLED, 1)
    sample = x_TD.detach()[::step][:SAMPLED].double()
    valid = place.new_ones(num_tokens) if valid_T is None else valid_T.double()
    if valid_T is not None:
        sample = sample.masked_fill(~valid_T[::step][:SAMPLED].unsqueeze(1), 0.0)
    ids = valid if token_ids is None else token_ids.double() * valid
    weights = torch.arange(sample.numel(), dtype=torch.float64, device=x_TD.device).cos()
    return torch.stack(
        [
            place.new_full((), num_tokens),
            valid.sum(),
            place @ (valid + ids),
            sample.flatten() @ weights,
            sample.norm(),
        ]
    )


def is_same_batch(one: np.ndarray, other: np.ndarray) -> bool:
    """Return whether two results of `batch_in_numbers` are of one batch."""
    if not np.array_equal(one[:3], other[:3]):
        return False
    if not np.isfinite([one[3:], other[3:]]).all():  # NaN, of which no sum tells anything
        return True
    return bool((abs(one[3:] - other[3:]) <= ROUNDING * max(one[4], other[4])).all())


def in_words(batch: np.ndarray) -> str:
    """Return a result of `batch_in_numbers` in words."""
    tokens, valid, _, weighed, _ = batch
    padding = "" if valid == tokens else f" ({int(tokens - valid)} of padding)"
    return f"{int(tokens)} tokens{padding} of sum {weighed:.4g}"


def hash_of(tensors: Iterable[Tensor]) -> Tensor | None:
    """Return a hash of tensors' bits, (1,) int64 on their device, which a float64 holds exactly;
    None without tensors.

    Every word of at most 32 bits is multiplied by odd squares, one of its row and one of its
    column: opposite changes do not cancel. Gradients must be off.
    """
    total: Tensor | None = None
    for tensor in tensors:
        matrix = torch.atleast_2d(tensor).flatten(1).contiguous()
        words = matrix.view(_WORDS.get(matrix.element_size(), torch.int32))
        height, width = words.shape
        # of 1, 3, 5 and so on: a factor for each row, then one for each column
        squares = torch.arange(1, 2 * (height + width), 2, device=words.device).square_()
        row_factors, column_factors = squares.split([height, width])
        hashed = ((words * column_factors).sum(1) * row_factors).sum(0, keepdim=True)
        # like a digit in base `_ODD`, so that the order of the tensors counts
        total = hashed if total is None else total * _ODD + hashed
    return None if total is None else total.remainder(_PRIME)


def _as_numbers(digest: bytes) -> np.ndarray:
    """Return each 4 bytes as a number, float64, which holds it exactly."""
    return np.frombuffer(digest, dtype=np.uint32).astype(np.float64)


def stable_order(values: Tensor) -> Tensor:
    """Return the indices, (n,) int64, that stably sort non-negative integers, (n,) int64.

    On a CPU numpy sorts 16-bit integers by radix, in a third of the time that torch needs for any
    type.
    """
    if values.device.type != "cpu" or not len(values):
        return values.argsort(stable=True)
    numbers = values.numpy()
    if numbers.max() < 2**16:
        numbers = numbers.astype(np.uint16)
    return torch.from_numpy(numbers.argsort(kind="stable"))
