"""Fast construction of replication tables by shadowing and spilling, without loops over experts,
ranks or copies.

Shadowing is FasterMoE's (He et al., PPoPP 2022, section 4.1) and takes the best prefix of hot
experts. Spilling follows `replication/spill.py` (least-loaded expert parallelism). A decision in
every call must cost almost nothing: all prefixes are evaluated at once, and givers are matched to
helpers by laying excess and room end to end.

Places, homes, helpers, origins and replicas are those of `replication/cost.py`. A *pair* is a place
and an expert of another place, and the pair's copies those that the place has for the expert: if
the pair is *shadowed*, the place computes them itself. A *giver* is a place above its limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moesaic.balance.replication.cost import ReplicaLoad
from moesaic.program.replications import NOTHING, Replications

DECIMALS = 12
"""Decimals to which modelled seconds are rounded before they are compared. Processors of different
ranks may differ in the last bits, but all ranks must decide identically."""


@dataclass(frozen=True)
class Rows:
    """The numbers of copies and weights that move between places under a table."""

    home: np.ndarray
    """(ep, ep) int64: copies of place i that place j computes as the home of their experts."""
    replicated: np.ndarray
    """(ep, ep) int64: copies of place i that place j computes as a helper."""
    fetched: np.ndarray
    """(ep, ep) int64: experts whose weights place i sends to place j, either its own weights or
    relayed ones."""
    held: int = 0
    """The largest number of experts that are replicated to one place."""


def rows_of(replica: ReplicaLoad, replicated: Replications) -> Rows:
    """Return the copies and weights that move between places if `replicated` is applied."""
    home = replica.load.home
    ep = len(replica.origins)
    per_place = replica.load.num_experts // ep
    at_home = replica.copies.reshape(ep, ep, per_place).sum(2)  # (origins, homes)
    if replicated.is_empty:
        nothing = np.zeros((ep, ep), dtype=np.int64)
        return Rows(at_home, nothing, nothing)
    leave_home = _between(replicated.origin, home[replicated.expert], replicated.amount, ep)
    to_helpers = _between(replicated.origin, replicated.helper, replicated.amount, ep)
    is_replicated = replicated.helped(replica.load.num_experts, ep)
    return Rows(
        at_home - leave_home,
        replicated=to_helpers,
        fetched=replica.sent(is_replicated),
        held=int(is_replicated.sum(0).max()),
    )


def _between(source: np.ndarray, target: np.ndarray, amount: np.ndarray, ep: int) -> np.ndarray:
    """Return the summed amounts from each source place to each target place, (ep, ep) int64."""
    sums = np.bincount(source * ep + target, amount, ep * ep)
    return sums.astype(np.int64).reshape(ep, ep)


def shadows(
    replica: ReplicaLoad,
    price: float = 0.0,
    *,
    at_most: int = 8,
    tries: int = 256,
    whole: bool = False,
) -> Replications:
    """Return the shadows of the fastest prefix of the (expert, place) pairs, ordered by copies.

    A shadow is an expert replicated to a place that then computes all its own copies for that
    expert.

    Args:
        price: additional seconds per expert at the place to which most experts are replicated.
        at_most: the most experts that may be replicated to one place.
        tries: the length of the longest prefix that is tried.
        whole: replicate an expert to all places or to none, as in the paper: fewer experts, with
            more copies each.
    """
    place, expert, most_held = _ranked(replica, at_most, tries, whole)
    if not len(place):
        return NOTHING
    amount = replica.copies[place, expert]
    # `seconds` and `most_held`: [n] is of the first n pairs, from none to all of them
    seconds = _prefix_seconds(replica, place, expert, amount)
    if whole:  # all pairs of an expert or none: no prefix may end among those of one
        lengths = np.arange(1, len(expert))  # without the empty prefix and that of all pairs
        ends_within = expert[lengths - 1] == expert[lengths]  # its last pair and the next one
        seconds[lengths[ends_within]] = np.inf
    end = int(np.argmin(np.round(seconds + price * most_held, DECIMALS)))
    prefix = slice(end)
    return Replications(
        place[prefix], expert=expert[prefix], helper=place[prefix], amount=amount[prefix]
    )


def shadows_above(
    replica: ReplicaLoad, least: float, *, at_most: int = 8, whole: bool = False
) -> Replications:
    """Return the shadows of all (place, expert) pairs with enough copies away from home; with
    `whole`, of all such experts.

    Args:
        replica, at_most, whole: as for `shadows`.
        least: the threshold, as a share of all copies; see `least_of`.
    """
    away = _away(replica)
    threshold = least * int(replica.copies.sum())
    if whole:
        place, expert = _hot_experts(away, threshold, at_most)
    else:
        place, expert = _hot_pairs(away, threshold, at_most)
    return Replications(place, expert, helper=place, amount=replica.copies[place, expert])


def _hot_experts(away: np.ndarray, threshold: float, at_most: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the (place, expert) pairs with copies of the experts with most copies, from a
    threshold on; experts with more copies come first."""
    per_expert = away.sum(0)
    hot = np.flatnonzero(per_expert >= threshold)
    hot = hot[np.argsort(-per_expert[hot], kind="stable")][:at_most]
    expert = np.repeat(hot, len(away))
    place = np.tile(np.arange(len(away)), len(hot))
    has_copies = away[place, expert] > 0
    return place[has_copies], expert[has_copies]


def _hot_pairs(away: np.ndarray, threshold: float, at_most: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the (place, expert) pairs with most copies, from a threshold on; pairs with more
    copies come first."""
    copies = away.reshape(-1)
    hot = np.flatnonzero(copies >= max(threshold, 1.0))  # never pairs without copies
    hot = hot[np.argsort(-copies[hot], kind="stable")]
    place, expert = np.divmod(hot, away.shape[1])
    place, expert, _ = _fitting(place, expert, len(away), at_most)
    return place, expert


def least_of(replica: ReplicaLoad, shadows: Replications, *, whole: bool = False) -> float:
    """Return the share of all copies from which a pair (with `whole`, an expert) is shadowed.

    The threshold is halfway between the coldest pair that is shadowed and the hottest pair that is
    not.

    Args:
        shadows: the nonempty return value of the function `shadows` for this load.
        whole: as for `shadows`.
    """
    away = _away(replica)
    total = max(1, int(replica.copies.sum()))
    if whole:
        copies = away.sum(0)
        shadowed = copies[np.unique(shadows.expert)]
    else:
        copies = away.reshape(-1)
        shadowed = shadows.amount
    coldest = int(shadowed.min())
    # in ascending order, the last one before those that are shadowed
    index = len(copies) - len(shadowed) - 1
    hottest_other = 0  # if all are shadowed
    if index >= 0:
        hottest_other = int(np.partition(copies, index)[index])
    # at most the coldest one, which must reach the threshold
    return (coldest + min(hottest_other, coldest)) / (2 * total)


def _away(replica: ReplicaLoad) -> np.ndarray:
    """Return the copies that each place has for experts of other places, (ep, num_experts) int64; 0
    for its own experts."""
    places = np.arange(len(replica.origins))
    is_home = places[:, None] == replica.load.home[None, :]
    return np.where(is_home, 0, replica.copies)


def _ranked(
    replica: ReplicaLoad, at_most: int, tries: int, whole: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (place, expert) pairs in the order of replication, and for every prefix of them, from
    the empty one on, the most experts on one place."""
    away = _away(replica)
    ep, num_experts = away.shape
    copies = away.reshape(-1)  # pair p is that of place p // num_experts
    if whole:
        # all pairs of the hottest experts, expert by expert
        hottest = np.argsort(-away.sum(0), kind="stable")[:at_most]
        first_of_place = np.arange(ep) * num_experts
        pairs = (first_of_place[None, :] + hottest[:, None]).reshape(-1)
    else:
        pairs = largest(copies, tries)
    pairs = pairs[copies[pairs] > 0]
    place, expert = np.divmod(pairs, num_experts)
    return _fitting(place, expert, ep, at_most)


def _fitting(
    place: np.ndarray, expert: np.ndarray, ep: int, at_most: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the first `at_most` pairs of each place, and for every prefix of these, from the empty
    one on, the most experts on one place."""
    is_at = place[:, None] == np.arange(ep)[None, :]  # (pairs, ep)
    # how many pairs of the same place there are up to each pair
    number = np.cumsum(is_at, axis=0)[np.arange(len(place)), place]
    fits = number <= at_most
    most_held = np.concatenate([[0], np.maximum.accumulate(number[fits])])
    return place[fits], expert[fits], most_held


def largest(values: np.ndarray, count: int) -> np.ndarray:
    """Return the indices of the largest values (of all, if fewer), (count,) int64, largest first,
    then in index order."""
    if len(values) < 4 * count:  # so few that all are sorted
        return np.argsort(-values, kind="stable")[:count]
    # sorting only the largest ones is faster
    position = len(values) - count
    threshold = np.partition(values, position)[position]
    among = np.flatnonzero(values >= threshold)
    indices: np.ndarray = among[np.argsort(-values[among], kind="stable")][:count]
    return indices


def _prefix_seconds(
    replica: ReplicaLoad, place: np.ndarray, expert: np.ndarray, amount: np.ndarray
) -> np.ndarray:
    """Return the modelled seconds of every prefix, (n + 1,), starting with the empty one. Relayed
    weights count once per node."""
    ep = len(replica.origins)
    links = replica.links
    owner = replica.load.home[expert]
    rows = rows_of(replica, NOTHING).home

    # each pair moves its copies from the owner's products to those of the place
    helps = np.eye(ep)[place]  # (n, ep): 1 at the place of each pair
    owns = np.eye(ep)[owner]
    gained = amount[:, None] * (helps - owns)
    computed = _largest_of_prefixes(rows.sum(0) * links.slowness, gained * links.slowness)

    # its tokens no longer travel
    spared = amount[:, None] * links.busy_by(place, owner)
    tokens = _largest_of_prefixes(links.busy(rows), -spared)

    # but weights do, first to the relay unless an earlier pair has brought them there; without
    # relays the owner stands for it, to which nothing travels
    relay = owner if links.via is None else links.via[owner, place]
    # `unique` finds the first pair of each expert and relay
    _, first_to_relay = np.unique(expert * ep + relay, return_index=True)
    is_new_message = np.zeros(len(place), dtype=bool)
    is_new_message[first_to_relay] = True
    to_relay = is_new_message[:, None] * links.busy_by(owner, relay)
    weights = _largest_of_prefixes(0.0, to_relay + links.busy_by(relay, place))
    return replica.closed_form(computed, tokens, weights)


def _largest_of_prefixes(start: np.ndarray | float, changes: np.ndarray) -> np.ndarray:
    """Return the largest of some values after every prefix of their changes, (n + 1,).

    Args:
        start: (values,), before any change, or one number for all of them.
        changes: (n, values).
    """
    sums = np.empty((len(changes) + 1, changes.shape[1]))
    sums[0] = start
    np.cumsum(changes, axis=0, out=sums[1:])
    sums[1:] += sums[0]
    # rounding may leave a little less than 0 where the changes take everything away
    largest: np.ndarray = sums.max(1, initial=0.0)
    return largest


def spills(
    replica: ReplicaLoad, replicated: Replications, limit: float, *, near_first: bool = False
) -> Replications:
    """Return the further replications that bring places below a limit.

    Places above the limit replicate their largest experts to places with room, the emptiest first.

    Args:
        replica: the load of one replica of the experts.
        replicated: the copies that are replicated already.
        limit: the copies that a place may compute, relative to its share if all places take equally
            long.
        near_first: prefer places on the same node.
    """
    ep = len(replica.origins)
    home = replica.load.home
    staying = replicated.staying(replica.copies)
    computed_at_home = np.bincount(home, staying.sum(0), ep)
    computed_as_helper = np.bincount(replicated.helper, replicated.amount, ep)
    loads = (computed_at_home + computed_as_helper).astype(np.int64)
    limits = replica.limits(limit)
    if (loads <= limits).all():
        return NOTHING

    groups = [np.arange(ep)]  # places that exchange copies, group after group
    if near_first:  # those of each node, and then all of them
        nodes = replica.links.nodes
        groups = [np.flatnonzero(nodes == node) for node in np.unique(nodes)] + groups
    replications = NOTHING
    for places in groups:
        moved = _matched(replica, staying, loads, places, limits)
        np.subtract.at(staying, (moved.origin, moved.expert), moved.amount)
        np.subtract.at(loads, home[moved.expert], moved.amount)
        np.add.at(loads, moved.helper, moved.amount)
        replications = replications.joined(moved)
    return replications


def seconds_under(replica: ReplicaLoad, replicated: Replications) -> float:
    """Return the modelled seconds of a call under a table of one replica of the experts."""
    rows = rows_of(replica, replicated)
    return replica.seconds_of(rows.home + rows.replicated, rows.fetched)


def spread(replicas: Sequence[ReplicaLoad], replicated: Sequence[Replications]) -> Replications:
    """Return the table over all ranks. The replicated copies of a place are taken from its ranks in
    their order.

    Args:
        replicas: the loads of the replicas of the experts.
        replicated: the replications between the places of each replica.
    """
    tables = [_by_rank(replica, table) for replica, table in zip(replicas, replicated)]
    return NOTHING.joined(*tables)


def within(replica: ReplicaLoad, replicated: Replications) -> Replications:
    """Return the part of a table over all ranks that is of one replica of the experts, with places
    for origins."""
    # of each rank; -1 in other replicas
    place = np.full(len(replica.load.copies), -1)
    place[replica.origins] = np.arange(len(replica.origins))[:, None]
    places = place[replicated.origin]
    return replicated._replace(origin=places).where(places >= 0)


def _by_rank(replica: ReplicaLoad, replicated: Replications) -> Replications:
    """Return the table of one replica of the experts with ranks, not places, as origins."""
    ranks_per_place = replica.origins.shape[1]
    num_experts = replica.load.num_experts
    if ranks_per_place == 1 or replicated.is_empty:  # each entry is of one rank
        return replicated._replace(origin=replica.origins[replicated.origin, 0])
    # a cell is an origin, here a place, and an expert that occur in the table
    cells, cell_of_entry = np.unique(
        replicated.origin * num_experts + replicated.expert, return_inverse=True
    )
    origin, expert = np.divmod(cells, num_experts)

    # the copies of each cell by helper and by rank of its origin, laid end to end
    by_helper = np.zeros((len(cells), len(replica.origins)), dtype=np.int64)
    np.add.at(by_helper, (cell_of_entry, replicated.helper), replicated.amount)
    by_rank = replica.load.copies[replica.origins[origin], expert[:, None]]
    shared = _overlaps(by_rank, by_helper)  # (cells, ranks of a place, helpers)

    cell, rank, helper = np.nonzero(shared)
    return Replications(
        replica.origins[origin[cell], rank],
        expert=expert[cell],
        helper=helper,
        amount=shared[cell, rank, helper],
    )


def _matched(
    replica: ReplicaLoad,
    staying: np.ndarray,
    loads: np.ndarray,
    places: np.ndarray,
    limits: np.ndarray,
) -> Replications:
    """Return the replications from those of `places` that are above `limits`, (ep,), to the others
    of `places`.

    The place with the largest excess comes first, and of its experts those with most copies, of
    which it gives until its excess is gone. Copies go to the helpers with most room first.

    Args:
        replica: the load of one replica of the experts.
        staying: (ep, num_experts), the copies that each origin has left at their home.
        loads: (ep,), the copies that each place computes.
        places: the places that exchange copies.
        limits: (ep,), the loads to reach.
    """
    excess = np.maximum(loads - limits, 0)
    room = np.maximum(limits - loads, 0)
    # all places, of which those without excess will give nothing
    givers = places[np.argsort(-excess[places], kind="stable")]
    helpers = places[np.argsort(-room[places], kind="stable")]

    # the experts of each giver and their copies, (givers, experts of a place), largest first
    per_place = replica.load.num_experts // len(replica.origins)
    totals = staying.sum(0).reshape(-1, per_place)[givers]
    largest = np.argsort(-totals, axis=1, kind="stable")
    totals = np.take_along_axis(totals, largest, 1)
    experts = (givers[:, None] * per_place + largest).reshape(-1)

    # how many copies each of them gives
    given_before = totals.cumsum(1) - totals
    excess_left = excess[givers][:, None] - given_before
    amounts = np.clip(excess_left, 0, totals).reshape(-1)
    gives = amounts > 0
    if not gives.any() or not room[places].any():
        return NOTHING
    experts = experts[gives]
    amounts = amounts[gives]

    # what is given and the helpers' room, laid end to end
    replicated = _overlaps(amounts[None], room[helpers][None])[0]
    return from_origins(replica, staying, experts, helpers, replicated)


def from_origins(
    replica: ReplicaLoad,
    staying: np.ndarray,
    experts: np.ndarray,
    helpers: np.ndarray,
    replicated: np.ndarray,
) -> Replications:
    """Return replications with their origins: the helper's own copies are taken first, which then
    need not travel, and those of the expert's home last, which travel only if they are taken.

    Args:
        replica: the load of one replica of the experts.
        staying: (ep, num_experts) int64, copies that are not replicated yet.
        experts: (k,), the replicated experts.
        helpers: (m,), the places that help.
        replicated: (k, m), copies of each expert that each helper computes.
    """
    # the helpers' own copies, (k, m)
    own_copies = np.minimum(replicated, staying[helpers][:, experts].T)
    expert_index, helper_index = np.nonzero(own_copies)
    own = Replications(
        helpers[helper_index],
        expert=experts[expert_index],
        helper=helpers[helper_index],
        amount=own_copies[expert_index, helper_index],
    )

    # the other copies, (k, ep), with origins in turn from the place after the home
    ep = len(replica.origins)
    copies_left = staying[:, experts].T.copy()
    copies_left[np.arange(len(experts))[:, None], helpers[None, :]] -= own_copies
    after_home = replica.load.home[experts] + 1
    origins = (after_home[:, None] + np.arange(ep)[None, :]) % ep
    copies_in_turn = np.take_along_axis(copies_left, origins, 1)
    shared = _overlaps(copies_in_turn, replicated - own_copies)
    expert_index, turn, helper_index = np.nonzero(shared)
    others = Replications(
        origins[expert_index, turn],
        expert=experts[expert_index],
        helper=helpers[helper_index],
        amount=shared[expert_index, turn, helper_index],
    )
    return own.joined(others)


def _overlaps(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return the overlaps of two partitions of each row, (k, a, b) int64, from the lengths of the
    parts, (k, a) and (k, b), which lie end to end."""
    ends = first.cumsum(1)[:, :, None]
    other_ends = second.cumsum(1)[:, None, :]
    own_starts = ends - first[:, :, None]
    other_starts = other_ends - second[:, None, :]
    starts = np.maximum(own_starts, other_starts)
    lengths: np.ndarray = np.maximum(np.minimum(ends, other_ends) - starts, 0)
    return lengths
