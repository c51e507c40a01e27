"""Runs an MoE layer on a mesh: routes tokens in agreement with the other ranks, then runs the
compiled programs.

A call policy (`AbstractCallPolicy`) decides for each call which programs run. `PlainCalls` always
runs those of the plan.

A copy is one token for one of the experts that it chose, and a row in messages. Experts have slots,
which say on which rank they are stored (`expert_order.py`). Node tokens are those of multicast, in
which a token is sent to a node once. The ranks of a tensor-parallel group have the same tokens;
under some plans (`routes_slices`), such as S1, each routes a slice of them. Under the others each
routes all of them, and sends a share of the copies, or all (`is_redundant`). Suffixes of names give
the axes: T tokens, D model width, K choices per token, E experts.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from moesaic.comm.collectives import all_gather, broadcast, check_same, share, share_of, slice_rows
from moesaic.comm.transport import AbstractTransport, current_turn, number_in_flight
from moesaic.errors import InputError
from moesaic.experts.experts import AbstractExperts, Weights, compute_dtype, in_dtype
from moesaic.program.compile import Compiled
from moesaic.program.grid import Grid
from moesaic.program.plan import Crossing, Plan
from moesaic.program.replications import Replications
from moesaic.program.sizes import CallSizes
from moesaic.routing.capacity import AbstractCapacity, Capacity, count
from moesaic.routing.losses import AbstractLoss
from moesaic.routing.node_tokens import NodeTokens, find_node_tokens, places_of
from moesaic.routing.peers import Gathered, Peers, batch_in_numbers
from moesaic.routing.route import Routed, RoutingRecord, TokenInfo, route, route_chosen
from moesaic.routing.router import AbstractRouter
from moesaic.routing.routing import Routing
from moesaic.runtime.call_counts import CountedCall
from moesaic.runtime.data_parallel import UnpreparedForDDP
from moesaic.runtime.deepep import DeepEP, run_by_deepep
from moesaic.runtime.executor import LayerRun, run_program
from moesaic.runtime.expert_order import ExpertOrder
from moesaic.runtime.paused_calls import run_in_parts
from moesaic.runtime.sharding import compiled_for, description, fitting
from moesaic.runtime.tasks import Call, Codecs, Indices, known_codec

CHECKED_CALLS = 64
"""Ranks that need not wait for a call's counts (a padded capacity on GPUs) still compare digests in
every such call."""
DRIFTED = (
    "call moesaic.average_gradients(model, mesh) after every backward pass (DDP and FSDP2 "
    "average by themselves), and start every rank with the same weights: set one seed, or "
    "parallelize(..., broadcast=True)"
)
"""The advice in the error for routers that differ between ranks."""
ADAPTED = (
    "call balance_on_step or finish_step on every rank, once per optimizer step, and start every "
    "rank with the same state"
)
"""The same for what a router adapts to the load."""


class Chosen(NamedTuple):
    """What a call policy decided for one call."""

    compiled: Compiled
    replicated: Replications | None = None
    """Copies that helpers compute; None if the programs replicate nothing."""
    run_slices: Callable[[UncutCall, Tensor, Tensor, Weights, Weights], Tensor] | None = None
    """Runs the call slice by slice, given x, gates, split and common parameters; None if the call
    runs as a whole."""
    sizes: CallSizes | None = None
    """The sizes of the call, if they do not follow from its counts alone."""


class AbstractCallPolicy(ABC):
    """Decides how each call of one layer runs under one plan.

    All ranks decide identically, since decisions use only data that all ranks have.
    """

    def __init__(self, compiled: Compiled) -> None:
        self.compiled = compiled

    @property
    def digest(self) -> bytes:
        """16 bytes that are equal on two ranks if they run the same programs and decide
        identically."""
        return self.compiled.digest

    def refuse_padding(self) -> None:
        """Raise InputError if decisions need a call's counts, which no rank has under a padded
        capacity; by default they do not."""
        return

    @abstractmethod
    def choose(self, record: RoutingRecord, call: CountedCall) -> Chosen:
        """Return how a call runs.

        Args:
            record: the record of the call's routing. A recomputation has the record of its forward
                pass.
            call: the counts of the call, which all ranks have.
        """


class PlainCalls(AbstractCallPolicy):
    """Runs the plan's programs in every call, whatever the call's counts."""

    def choose(self, record: RoutingRecord, call: CountedCall) -> Chosen:
        return Chosen(self.compiled)


@dataclass(frozen=True)
class UncutCall:
    """A call of a layer that is to run slice by slice, with the data to do so."""

    whole: LayerRun
    """The run of the whole call. Its sizes, indices and tags are not those of any slice."""
    origins: tuple[int, ...]
    """The ranks that own the rows of this rank's routing: this rank alone, or all ranks of its
    tensor-parallel group."""
    token: Tensor
    """(rows,) int64: each row's token, sorted by expert."""
    expert: Tensor | None
    """(rows,) int64: each row's expert, ascending; may be None unless `find` reads it."""
    find: Callable[[Tensor, Tensor], NodeTokens] | None
    """Finds the node tokens of this rank's own rows from their tokens and experts, under multicast;
    None under other plans."""
    tokens: np.ndarray
    """(world,) int64: tokens of each rank."""
    units: int
    """Hidden units of one shard of an expert."""


@dataclass(frozen=True, kw_only=True)
class CallInputs:
    """What one rank brings into one call of a layer, after routing. Experts are given by their
    slots."""

    experts: AbstractExperts
    record: RoutingRecord
    """The record of the call's routing."""
    token: Tensor
    """(rows,) int64: the token of each of this rank's copies, sorted by expert; -1 for a padding
    row."""
    expert: Tensor | None
    """(copies,) int64: the expert of each of this rank's copies, ascending; under multicast."""
    gates: Tensor
    """(rows,) routing weights; differentiable."""
    node_tokens: NodeTokens | None
    """The node tokens of this rank's copies under multicast; None under other plans."""
    copies: np.ndarray
    """(world, num_experts) int64: copies that each rank sends to each expert."""
    tokens: np.ndarray
    """(world,) int64: tokens of each rank."""
    num_tokens: int
    """Tokens that this rank routed."""
    dtype: torch.dtype
    """Dtype of the products."""
    padded_rows: int | None = None
    """Rows that each expert is sent under a padded capacity; None under other capacities."""
    choose: Callable[[CountedCall], Chosen] | None = None
    """Decides how the call runs in place of the call policy."""


@dataclass(frozen=True)
class _PlanState:
    """A compiled plan and the objects that a layer keeps for it. Their memory is small compared
    with a weight."""

    compiled: Compiled
    peers: Peers
    deepep: DeepEP | None
    calls: AbstractCallPolicy
    """Decides how each call runs."""


class ExpertParallel:
    """Runs one layer on a mesh under a plan. All ranks create it together.

    Args:
        transport: the transport between the ranks.
        plan: the plan, compiled for this mesh or not compiled.
        experts: the experts of the layer, not sharded yet.
        weight_first: multiply by the routing weight before the expert.
        calls_under: returns the call policy for a compiled plan.
        settings, weights: settings and weights that must be the same on all ranks; see `fitting`.
        deepep: returns the DeepEP state that all layers of the mesh share; called only under plans
            with deepep.

    Raises:
        InputError: if the plan does not fit the mesh; on every rank, if plans or layers differ
            between ranks.
    """

    def __init__(
        self,
        grid: Grid,
        transport: AbstractTransport,
        plan: Plan | Compiled,
        experts: AbstractExperts,
        *,
        weight_first: bool,
        calls_under: Callable[[Compiled], AbstractCallPolicy],
        settings: Mapping[str, object] | None = None,
        weights: Mapping[str, str] | None = None,
        deepep: Callable[[], DeepEP] | None = None,
    ) -> None:
        compiled = fitting(plan, grid, transport, experts, settings, weights)
        self._mesh_grid = grid
        """The mesh; `grid` is the mesh as the present plan factors it."""
        self.transport = transport
        self.rank = transport.rank
        self._layer_number = transport.number_layer()
        """The layer's place among those of the transport, for messages and errors."""
        self.num_experts = experts.num_experts
        self._calls_under = calls_under
        """Returns the call policy for a compiled plan."""
        self.codecs: Codecs = known_codec
        """Returns the codec of a name. A benchmark may substitute codecs with the same message
        layout."""
        self.auto: Callable[[int, int, torch.dtype], None] | None = None
        """Called before every call with (tokens of the tensor-parallel group, experts per token,
        dtype) to choose the plan. None if the plan is fixed."""
        self._order: ExpertOrder | None = None
        """The slot of each expert; None until `order` is read."""
        self.weight_first = weight_first
        self._tensor_group = grid.group(self.rank, ("tp",))
        """The ranks of this rank's tensor-parallel group."""
        self._tp_place = grid.coordinate(self.rank, "tp")
        """This rank's place in that group."""
        deepep_state = None
        if compiled.plan.crossing is Crossing.DEEPEP:
            if weight_first:
                raise InputError(
                    'apply_weight="before" clashes with plan.all_to_all=deepep: choose multicast'
                )
            assert deepep is not None
            deepep_state = deepep()
        state = self._prepare(compiled, deepep_state)
        self._states: dict[Plan | bytes, _PlanState] = {_plan_key(plan): state}
        """The state of each plan that was used."""
        self._activate(state)

    def __deepcopy__(self, memo: dict[int, object]) -> ExpertParallel:
        """Return the state of a copy of the layer: the same connections and plans, with freshly
        initialised call policies."""
        duplicate = object.__new__(ExpertParallel)
        memo[id(self)] = duplicate
        duplicate.__dict__.update(self.__dict__)
        duplicate.auto = None  # the copy keeps its present plan
        duplicate._order = copy.deepcopy(self._order, memo)
        duplicate._states = {
            key: duplicate._prepare(state.compiled, state.deepep)
            for key, state in self._states.items()
        }
        states = duplicate._states.values()
        present = [state for state in states if state.compiled is self.compiled]
        duplicate._activate(present[0])
        return duplicate

    def use(self, plan: Plan | Compiled, experts: AbstractExperts) -> None:
        """Run under another plan from the next call on; see `MoE.use_plan`.

        Args:
            plan: the new plan. Its compiled state is kept, so switching back to it is a look-up.
            experts: the experts of the layer.

        Raises:
            InputError: if the plan does not fit the layer, or needs process groups that the layer
                does not have.
        """
        state = self._states.get(_plan_key(plan))
        if state is None:
            choices = plan if isinstance(plan, Plan) else plan.plan
            if choices.crossing is Crossing.DEEPEP:
                raise InputError(
                    "plan.all_to_all=deepep needs process groups, which only MoE.parallelize "
                    "makes: switch to multicast, or parallelize the layer with deepep"
                )
            compiled = compiled_for(plan, self._mesh_grid, self.transport, experts)
            state = self._prepare(compiled, deepep=None)
            self._states[_plan_key(plan)] = state
        if state.compiled is not self.compiled:
            # The length of the last message, by which all ranks know that of the next one.
            state.peers.length = self.peers.length
            self._activate(state)
            self.peers.all_agree = False  # until ranks have compared the new plan

    def exchange(self, experts: AbstractExperts) -> None:
        """Run other experts of the same sizes from the next call on. Plans are compiled again where
        those need it."""
        self._states.clear()
        self.use(self.compiled.plan, experts)

    def _prepare(self, compiled: Compiled, deepep: DeepEP | None) -> _PlanState:
        """Return what the layer keeps for a compiled plan."""
        find = partial(_find_nodes, self.num_experts, compiled) if compiled.is_multicast else None
        calls = self._calls_under(compiled)
        peers = Peers(
            self.transport,
            compiled.grid,
            slices=compiled.routes_slices,
            digest=calls.digest,
            find=find,
            slots=self._slots,
        )
        return _PlanState(compiled, peers, deepep, calls)

    def _activate(self, state: _PlanState) -> None:
        """Run calls by a plan's state from now on."""
        self.compiled = state.compiled
        self.grid = state.compiled.grid
        self.peers = state.peers
        self.calls = state.calls
        self._deepep = state.deepep
        self._digests_checked = False
        """Whether ranks have compared digests of the plan and of the present settings."""
        self._unchecked_calls = 0
        """Calls that needed no comparison, of which every `CHECKED_CALLS`-th makes one."""
        self._batches = 0
        """Calls since the batches of tensor-parallel groups were compared, modulo
        `CHECKED_CALLS`."""
        self._padded_tables: dict[tuple[int | None, int, int], tuple[CallSizes, Indices]] = {}
        """Sizes and indices of calls under a padded capacity, by (padded rows, tokens, units)."""

    @property
    def order(self) -> ExpertOrder:
        """The slot of each expert. Created at the first access, since experts move only if some
        code asks for their order."""
        if self._order is None:
            self._order = ExpertOrder(self.num_experts)
        return self._order

    def note(self, record: RoutingRecord) -> None:
        """Add a call's copies to the loads that `order` records, if `order` was ever accessed."""
        if self._order is not None:
            self._order.note(record)

    def _slots(self, expert: Tensor) -> Tensor:
        """Return the slot of each expert."""
        return expert if self._order is None else self._order.slots(expert)

    @property
    def loss_share(self) -> int:
        """Factor for a loss over all ranks' tokens, which compensates for averaging gradients over
        data-parallel groups."""
        return self.grid.dp

    def route(
        self,
        router: AbstractRouter,
        x_TD: Tensor,
        *,
        top_k: int,
        capacity: AbstractCapacity,
        losses: Sequence[AbstractLoss],
        batch: TokenInfo,
        replay: RoutingRecord | None,
        sets_loss_scale: bool = False,
    ) -> Routed:
        """Route this rank's tokens: under S1, its slice of the tensor-parallel group's tokens, else
        all; see `route`. `sets_loss_scale` says whether the caller has set a scale of the losses.
        """
        dtype = compute_dtype(x_TD.dtype, x_TD.device)
        if self.auto is not None and replay is None:  # choose the plan of the call
            self.auto(len(x_TD), top_k, dtype)
        # A recomputation runs as its first pass did.
        earlier = None if replay is None else replay.gathered
        with_gradients = torch.is_grad_enabled() if earlier is None else earlier.with_gradients
        settings: dict[str, object] = {
            "layer": self._layer_number,
            "gradients": with_gradients,
            # without gradients, no loss and no noise depends on it
            "training": router.training and with_gradients,
            "dtype": dtype,
            "top_k": top_k,
            "capacity": capacity,
            "losses": losses,
        }
        if earlier is not None:
            sets_loss_scale = earlier.sets_loss_scale
        self.peers.sets_loss_scale = sets_loss_scale
        if losses and sets_loss_scale:
            settings["set_loss_scale"] = True
        # sums per sequence are exchanged with the counts
        if any(loss.needs_sequences for loss in losses):
            settings["sequences"] = batch.num_sequences
        self._note_call(settings, earlier)
        if replay is None:
            batch = replace(batch, noise=self._draw(router, x_TD))
            self._describe_batch(x_TD, batch.valid_T, batch.token_ids)
        self._compare_router(router)
        sharing: AbstractContextManager[None] = nullcontext()
        if self.compiled.routes_slices:
            batch = self._slice_of(batch, len(x_TD))
            x_TD = slice_rows(self.transport, self._tensor_group, x_TD)
            sharing = parameters_as(router, self._shared)
        with sharing:
            return route(
                router,
                x_TD,
                top_k=top_k,
                capacity=capacity,
                losses=losses,
                batch=batch,
                replay=replay,
                peers=self.peers,
            )

    def _compare_router(self, router: AbstractRouter) -> None:
        """Let the ranks compare what should be equal on all of a router: its parameters, but for
        DTensors, which FSDP2 has sharded, and what it adapts to the load."""
        compared: dict[str, Tensor] = dict(router.named_parameters("router"))
        adapted = dict(router.named_buffers("router")) if router.adapts else {}
        self.peers.advice = dict.fromkeys(compared, DRIFTED) | dict.fromkeys(adapted, ADAPTED)
        compared |= adapted
        self.peers.weights = {
            name: weight for name, weight in compared.items() if not hasattr(weight, "placements")
        }

    def _describe_batch(
        self, x_TD: Tensor, valid_T: Tensor | None = None, token_ids: Tensor | None = None
    ) -> None:
        """Let the ranks of each tensor-parallel group compare their tokens in this call: in every
        one where they route slices on a CPU, else in the first of every so many, since that costs
        launches on a GPU, and otherwise messages."""
        if self.grid.tp == 1:
            return
        number = self._batches
        self._batches = (number + 1) % CHECKED_CALLS
        routes_slices = self.compiled.routes_slices
        is_free = routes_slices and x_TD.device.type == "cpu"
        compares = is_free or number == 0
        self.peers.batch = batch_in_numbers(x_TD, valid_T, token_ids) if compares else None
        # Ranks that route whole batches exchange nothing else in their group. The host waits for
        # it, which it must not while a graph is captured.
        self.peers.compares_groups = compares and not routes_slices and not _is_capturing()

    def _slice_of(self, batch: TokenInfo, num_tokens: int) -> TokenInfo:
        """Return what is known of this rank's slice of the tensor-parallel group's tokens."""
        own = share_of(num_tokens, self._tp_place, self.grid.tp)
        return replace(
            batch,
            valid_T=None if batch.valid_T is None else batch.valid_T[own],
            token_ids=None if batch.token_ids is None else batch.token_ids[own],
            noise=None if batch.noise is None else batch.noise[own],
            first_token=own.start,
            sequence_length=max(num_tokens // batch.num_sequences, 1),  # 1: without tokens
        )

    def _note_call(self, settings: Mapping[str, object], earlier: Gathered | None = None) -> None:
        """Note the call that begins: for messages about a rank that waits, what this rank is doing;
        for the ranks' comparison, the settings, by name, that must be equal on all ranks.

        `earlier` is what ranks exchanged in the first pass of a call that is recomputed; else None.
        """
        compared = {f"call.{name}": value for name, value in settings.items()}
        doing = f"the forward pass of layer {self._layer_number}"
        # None: only one micro-batch is in flight
        micro_batch = number_in_flight() if earlier is None else earlier.micro_batch
        if micro_batch is not None:
            compared["call.micro_batch"] = micro_batch
            doing += f" in micro-batch {micro_batch}"
        self.transport.doing = doing
        differs_from_last_call = self.peers.call_with(compared)
        if differs_from_last_call:  # the digests cover the settings: ranks compare them anew
            self._digests_checked = False

    def route_chosen(self, x_TD: Tensor, expert_TK: Tensor, weight_TK: Tensor) -> Routed:
        """Route this rank's tokens to experts that the caller chose; under S1, its slice of the
        tensor-parallel group's tokens.

        Args:
            x_TD: all tokens of the tensor-parallel group.
            expert_TK: (tokens, K) int64. x_TD, expert_TK and weight_TK are the same on all ranks of
                the group.
            weight_TK: (tokens, K) routing weights; every rank of the group gets their whole
                gradient.
        """
        dtype = compute_dtype(x_TD.dtype, x_TD.device)
        if self.auto is not None:  # choose the plan of the call
            self.auto(len(x_TD), expert_TK.shape[1], dtype)
        self._note_call(
            {
                "layer": self._layer_number,
                "gradients": torch.is_grad_enabled(),
                "dtype": dtype,
                "top_k": expert_TK.shape[1],
            }
        )
        self._describe_batch(x_TD)
        if self.compiled.routes_slices:
            expert_TK = expert_TK[share_of(len(x_TD), self._tp_place, self.grid.tp)]
            weight_TK = slice_rows(self.transport, self._tensor_group, weight_TK)
        return route_chosen(expert_TK, weight_TK, self.num_experts, self.peers)

    def _shared(self, parameter: nn.Parameter) -> Tensor:
        """Return a parameter whose gradient is summed over the tensor-parallel group, which uses it
        on different tokens."""
        trains = parameter.requires_grad and torch.is_grad_enabled()
        return share(self.transport, self._tensor_group, parameter) if trains else parameter

    def run_experts(
        self,
        experts: AbstractExperts,
        x_TD: Tensor,
        routed: Routed,
        padded_rows: int | None,
        inputs: CallInputs | None = None,
        *,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Run dispatch, experts and combine: (tokens, dim) -> (tokens, dim).

        Args:
            experts: the experts of the layer.
            x_TD: all tokens of the tensor-parallel group.
            routed: the result of `route`.
            padded_rows: the result of `padded_rows`.
            inputs: what this rank brings into the call; None for what follows from the other
                arguments.
            dtype: dtype of the result; None for that of `x_TD`.
        """
        if dtype is None:
            dtype = x_TD.dtype
        if self._deepep is not None:  # its kernels run the call, not a program
            self.check_digests(routed)
            by_slot = routed if self._order is None else self._order.routed(routed)
            return run_by_deepep(self._deepep, experts, x_TD, by_slot).to(dtype)
        if inputs is None:
            routing = self.in_slots(routed.routing)
            product_dtype = compute_dtype(x_TD.dtype, x_TD.device)
            if padded_rows is None:
                inputs = self._counted(experts, routed, routing, product_dtype)
            else:
                inputs = self._padded(experts, routed, routing, product_dtype, rows=padded_rows)
        y: Tensor = experts(x_TD, inputs.gates.unsqueeze(1), run=partial(self._run, inputs))
        self.transport.doing = ""
        return y.to(dtype)

    def in_slots(self, routing: Routing) -> Routing:
        """Return a routing to the slots of the experts."""
        return routing if self._order is None else self._order.in_slots(routing)

    def _counted(
        self, experts: AbstractExperts, routed: Routed, routing: Routing, dtype: torch.dtype
    ) -> CallInputs:
        """Return the inputs of a call whose counts all ranks have on the host. `routing` has slots
        for experts."""
        self.check_digests(routed)
        self.peers.skips_digests = False  # every call exchanges counts, and digests with them
        by_expert = self.peers.order(routing.expert)
        if routing.has_unsent:  # unsent copies come last
            assert routed.record.gathered is not None
            # the counts have a row for each of the ranks that route
            num_sent = int(routed.record.gathered.sent_on_host[self.peers.place].sum())
            by_expert = by_expert[:num_sent]
        token = routing.token.index_select(0, by_expert)
        gates = routing.weight.index_select(0, by_expert)
        copies, tokens = counts_of(routed.record, self.compiled)
        expert = None
        node_tokens = None
        if self.compiled.is_multicast:
            expert = routing.expert.index_select(0, by_expert)
            node_tokens = self.peers.node_tokens(routed.record.choice, routed.record.gathered)
            if node_tokens is None:  # the exchange of counts did not include them
                num_copies = int(copies[self.rank].sum())
                node_tokens = self._node_tokens(token, expert, routing.num_tokens, num_copies)
            elif len(node_tokens.copy_index) != len(by_expert):  # without unsent copies at the end
                sent_index = node_tokens.copy_index[: len(by_expert)]
                node_tokens = replace(node_tokens, copy_index=sent_index)
        if self._order is not None:
            copies = self._order.columns(copies)
        return CallInputs(
            experts=experts,
            record=routed.record,
            token=token,
            expert=expert,
            gates=gates,
            node_tokens=node_tokens,
            copies=copies,
            tokens=tokens,
            num_tokens=routing.num_tokens,
            dtype=dtype,
        )

    def _padded(
        self,
        experts: AbstractExperts,
        routed: Routed,
        routing: Routing,
        dtype: torch.dtype,
        *,
        rows: int,
    ) -> CallInputs:
        """Return the inputs of a call under a padded capacity, which needs no counts. `routing` has
        slots for experts."""
        # On a CPU comparing costs no wait; on a GPU only the first and every so many calls do it.
        checks_always = routing.token.device.type == "cpu"
        if checks_always or not self._digests_checked or self._is_due():
            self.check_digests(routed, together=checks_always)
        self.peers.skips_digests = not checks_always
        by_expert = self.peers.order(routing.expert)
        token = routing.token.index_select(0, by_expert)
        expert = routing.expert.index_select(0, by_expert)
        gates = routing.weight.index_select(0, by_expert)
        gates, token = pad_copies(gates, token, expert, self.num_experts, rows)
        copies, tokens = even_counts(self.compiled, self.num_experts, routing.num_tokens, rows)
        return CallInputs(
            experts=experts,
            record=routed.record,
            token=token,
            expert=expert,
            gates=gates,
            node_tokens=None,
            copies=copies,
            tokens=tokens,
            num_tokens=routing.num_tokens,
            dtype=dtype,
            padded_rows=rows,
        )

    def _run(
        self, inputs: CallInputs, x: Tensor, gate: Tensor | None, sharded: Weights, common: Weights
    ) -> Tensor:
        """Run a call with the parameters that `AbstractExperts.forward` passes: those that etp
        shards, and those that all shards of an expert have in common."""
        assert gate is not None
        experts = inputs.experts
        x = x.to(inputs.dtype)
        units = experts.num_units(sharded)
        sizes_of_experts = partial(experts.sizes, sharded, inputs.dtype)
        counted = CountedCall(inputs.copies, inputs.tokens, units, experts=sizes_of_experts)
        if inputs.choose:
            chosen = inputs.choose(counted)
        else:
            chosen = self.calls.choose(inputs.record, counted)
        node_tokens = None  # also of a call in slices, each of which finds its own
        if inputs.node_tokens is not None and not chosen.run_slices:
            node_tokens = self._with_all_counts(inputs.node_tokens)

        sizes, indices = self._tables(inputs, chosen, node_tokens, units)
        call = Call(
            rank=self.rank,
            sizes=sizes,
            experts=experts,
            weight_first=self.weight_first,
            codecs=self.codecs,
            has_empty_rows=inputs.padded_rows is not None,
            indices=indices,
        )
        if node_tokens is None:
            index_inputs = {"index": inputs.token.unsqueeze(1)}
        else:
            index_inputs = dict(node_tokens.indices)
        run = LayerRun(
            chosen.compiled, self.transport, call, indices=index_inputs, layer=self._layer_number
        )

        sharded = tuple(in_dtype(weight, inputs.dtype) for weight in sharded)
        common = tuple(in_dtype(weight, inputs.dtype) for weight in common)
        if chosen.run_slices is not None:
            uncut = self._uncut_call(run, inputs, units)
            return chosen.run_slices(uncut, x, gate, sharded, common)
        run.take_tags()
        turn = current_turn()
        if turn is None:  # no other micro-batch is in flight
            return run_program(run, x, gate, sharded, common)
        return run_in_parts(turn, run, x, gate, sharded, common)

    def _tables(
        self, inputs: CallInputs, chosen: Chosen, node_tokens: NodeTokens | None, units: int
    ) -> tuple[CallSizes, Indices]:
        """Return the sizes of a call and its index tensors; under a padded capacity, those of the
        first such call."""
        if chosen.sizes is not None:
            return chosen.sizes, Indices()
        key = (inputs.padded_rows, inputs.num_tokens, units)
        if inputs.padded_rows is not None and key in self._padded_tables:
            return self._padded_tables[key]
        counts_of_all_ranks = None if node_tokens is None else node_tokens.of_all
        sizes = chosen.compiled.sizes(
            inputs.copies,
            inputs.tokens,
            units=units,
            node_tokens=counts_of_all_ranks,
            replicated=chosen.replicated,
        )
        tables = sizes, Indices()
        if inputs.padded_rows is not None:
            self._padded_tables[key] = tables
        return tables

    def padded_rows(self, capacity: AbstractCapacity, num_tokens: int, top_k: int) -> int | None:
        """Return how many rows this rank's routing sends to each expert under a padded capacity;
        None under other capacities.

        Args:
            capacity: the capacity of the call.
            num_tokens: number of tokens of the tensor-parallel group, the same on all ranks.
            top_k: experts per token.

        Raises:
            InputError: if the plan's sizes depend on the routing, or the tokens do not split over
                tp.
        """
        if not isinstance(capacity, Capacity) or not capacity.is_padded:
            return None
        self.calls.refuse_padding()
        if self.compiled.replicates:
            raise InputError(
                f"a padded capacity clashes with replication={self.compiled.plan.replication}, "
                "which needs token counts that padding does not exchange: choose a capacity that "
                "is not padded, or replication none"
            )
        if self.compiled.is_multicast:
            raise InputError(
                "a padded capacity clashes with multicast, whose message sizes depend on the "
                "routing: choose another plan.all_to_all, or a capacity that is not padded"
            )
        if num_tokens % self.grid.tp:
            raise InputError(
                f"a padded capacity needs tokens that split over mesh.tp={self.grid.tp}, got "
                f"{num_tokens}: pad the batch"
            )
        num_routed = num_tokens // self.grid.tp if self.compiled.routes_slices else num_tokens
        rows = capacity.fixed_rows(num_routed, top_k, self.num_experts)
        multiple = self.compiled.capacity_multiple
        return -(-rows // multiple) * multiple  # rounded up

    @staticmethod
    def refuse_ddp(parameters: Iterable[nn.Parameter]) -> None:
        """Raise InputError if the DDP module that is now in its forward pass does not ignore these
        parameters.

        They belong to experts that are spread over a mesh, so they differ between ranks, but DDP
        would take them for copies.
        """
        if torch.compiler.is_compiling():
            return
        if DistributedDataParallel._get_active_ddp_module() is None:
            return
        if not all(hasattr(parameter, "_ddp_ignored") for parameter in parameters):
            raise InputError(UnpreparedForDDP.REFUSAL)

    def _draw(self, router: AbstractRouter, x_TD: Tensor) -> Tensor | None:
        """Draw the router's noise for all tokens of the tensor-parallel group, the same on each
        rank. Without noise, no seed is sent."""
        draws_noise = router.draw(0, x_TD.device) is not None  # asked for no tokens
        if self.grid.tp == 1 or not draws_noise:
            return router.draw(len(x_TD), x_TD.device)
        own_seed = torch.randint(2**62, (1,)).to(x_TD.device)
        first_rank = self._tensor_group[0]
        seed = broadcast(self.transport, self._tensor_group, own_seed, first_rank)
        with torch.random.fork_rng([x_TD.device] if x_TD.is_cuda else []):
            torch.manual_seed(int(seed))
            return router.draw(len(x_TD), x_TD.device)

    def _is_due(self) -> bool:
        """Count a call that needs no counts on the host, and return whether ranks compare digests
        in it: every `CHECKED_CALLS`-th, unless a graph is captured, where the host must not
        wait."""
        self._unchecked_calls += 1
        return (
            self._unchecked_calls % CHECKED_CALLS == 0
            and not torch.cuda.is_current_stream_capturing()
        )

    def check_digests(self, routed: Routed, *, together: bool = True) -> None:
        """Raise InputError on every rank if ranks run different programs, or a recomputation runs
        others than its forward pass, or if ranks with tokens of their own have different routers.

        `together` says whether all ranks check in this call.
        """
        assert routed.record.gathered is not None
        digests = routed.record.gathered.digests_on_host
        if not (digests == self.peers.digest).all():
            # raises if ranks differ; if they do not, all have changed since the forward pass
            self.peers.check(torch.from_numpy(digests), self.peers.ranks, together=together)
            raise InputError(
                "the layer's plan, or the dtype of the call, was changed between a forward pass "
                "and its recomputation: call MoE.use_plan between steps"
            )
        self._digests_checked = True
        self.peers.check_batches(routed.record.gathered)
        # The ranks of a tensor-parallel group may add in different orders: their copies may differ
        # by rounding. So only ranks at the same place of their groups are compared (columns).
        hashes = routed.record.gathered.hashes_on_host.reshape(-1, self.peers.slices)
        if (hashes != hashes[0]).any():
            values = {name: description(weight) for name, weight in self.peers.weights.items()}
            check_same(self.transport, values, peers=self.peers.ranks, advice=self.peers.advice)

    def _with_all_counts(self, node_tokens: NodeTokens) -> NodeTokens:
        """Return node tokens with the counts of every rank, which are exchanged now unless they
        were before."""
        if node_tokens.of_all is not None:  # the counts of all ranks
            return node_tokens
        counts = all_gather(self.transport, tuple(range(self.grid.world)), node_tokens.counts)
        return node_tokens.with_counts(torch.stack(counts).cpu().numpy(), self.rank)

    def _uncut_call(self, run: LayerRun, inputs: CallInputs, units: int) -> UncutCall:
        """Return the data of a call that runs slice by slice."""
        compiled = run.compiled
        find = None
        if compiled.is_multicast:
            find = partial(_find_nodes, self.num_experts, compiled, num_tokens=inputs.num_tokens)
        routes_for_itself = compiled.routes_slices or compiled.is_redundant
        origins = (self.rank,) if routes_for_itself else self._tensor_group
        return UncutCall(
            run,
            origins,
            token=inputs.token,
            expert=inputs.expert,
            find=find,
            tokens=inputs.tokens,
            units=units,
        )

    def _node_tokens(
        self, token: Tensor, expert: Tensor, num_tokens: int, num_copies: int
    ) -> NodeTokens:
        """Find the node tokens of the copies that this rank sends.

        Args:
            token: (copies,) int64, of each copy that this rank routed, sorted by expert.
            expert: (copies,) int64, ascending.
            num_tokens: tokens that this rank routed.
            num_copies: copies that this rank sends, all of them or a share.
        """
        tp = self.grid.tp
        if not self.compiled.routes_slices and tp > 1:
            # Ranks of the group routed the same copies; each sends its share of every expert's.
            counts_E = count(expert, alive_N=None, num_experts=self.num_experts)
            start_E = counts_E.cumsum(0) - counts_E
            place_in_run = torch.arange(len(expert), device=expert.device) - start_E[expert]
            first_E = counts_E * self._tp_place // tp
            end_E = counts_E * (self._tp_place + 1) // tp
            is_own = (place_in_run >= first_E[expert]) & (place_in_run < end_E[expert])
            own_places = places_of(is_own, num_copies)  # the positions of the True entries
            token = token[own_places]
            expert = expert[own_places]
        return _find_nodes(self.num_experts, self.compiled, token, expert, num_tokens)


def _find_nodes(
    num_experts: int, compiled: Compiled, token: Tensor, expert: Tensor, num_tokens: int
) -> NodeTokens:
    """Find the node tokens of copies on a plan's mesh."""
    return find_node_tokens(
        token, expert, num_experts, num_tokens, compiled.plan.chunks, compiled.grid
    )


def _is_capturing() -> bool:
    """Return whether a CUDA graph is captured."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _plan_key(plan: Plan | Compiled) -> Plan | bytes:
    """Return the key of a plan in the table of known plans."""
    return plan if isinstance(plan, Plan) else plan.digest


def counts_of(record: RoutingRecord, compiled: Compiled) -> tuple[np.ndarray, np.ndarray]:
    """Return copies (world, experts) and tokens (world,) of every rank, from the exchanged counts
    of a call's routing."""
    grid = compiled.grid
    assert record.gathered is not None
    copies = record.gathered.sent_on_host
    tokens = record.gathered.on_host[:, 1].astype(np.int64)  # messages begin: valid tokens, tokens
    if compiled.routes_slices:  # the counts are of ranks already, not of tensor-parallel groups
        return copies, tokens
    copies = np.repeat(copies, grid.tp, axis=0)
    tokens = np.repeat(tokens, grid.tp)
    if compiled.is_redundant:
        return copies, tokens
    tp_place = np.arange(grid.world) % grid.tp
    return _tp_share(copies, tp_place[:, None], grid.tp), _tp_share(tokens, tp_place, grid.tp)


def even_counts(
    compiled: Compiled, num_experts: int, num_tokens: int, rows: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return `counts_of` for the case that every rank routes `num_tokens` tokens and sends each
    expert `rows` rows.

    Nothing is read from the device.
    """
    grid = compiled.grid
    sends_all = compiled.is_redundant or compiled.routes_slices
    shares = 1 if sends_all else grid.tp
    copies = np.full((grid.world, num_experts), rows // shares)
    tokens = np.full(grid.world, num_tokens // shares)
    return copies, tokens


def _tp_share(counts: np.ndarray, place: np.ndarray, size: int) -> np.ndarray:
    """Return how much of its tensor-parallel group's rows each rank takes."""
    # where the share ends, less where it begins
    return counts * (place + 1) // size - counts * place // size


def pad_copies(
    gates: Tensor, token: Tensor, expert: Tensor, num_experts: int, rows: int
) -> tuple[Tensor, Tensor]:
    """Pad every expert's copies to the same number of rows; padding rows have token -1 and
    weight 0.

    Args:
        gates: (copies,) routing weights, sorted by expert; differentiable.
        token: (copies,) int64.
        expert: (copies,) int64, each expert at most `rows` times; `num_experts` for copies that no
            expert takes.
        num_experts: number of experts of the layer.
        rows: rows per expert after padding.

    Returns:
        (gates, tokens), each (num_experts * rows,).
    """
    counts_E = count(expert, alive_N=None, num_experts=num_experts + 1)
    start_E = counts_E.cumsum(0) - counts_E
    place_in_run = torch.arange(len(expert), device=expert.device) - start_E[expert]
    # copies that no expert takes go to one more row, which is cut off
    num_rows = num_experts * rows
    row = (expert * rows + place_in_run).clamp_max(num_rows)
    padded_gates = gates.new_zeros(num_rows + 1).scatter(0, row, gates)[:num_rows]
    padded_tokens = token.new_full((num_rows + 1,), -1).scatter(0, row, token)[:num_rows]
    return padded_gates, padded_tokens


@contextmanager
def parameters_as(module: nn.Module, value_of: Callable[[nn.Parameter], Tensor]) -> Iterator[None]:
    """Return a context in which a module computes with `value_of` each of its parameters."""
    parameters = [
        (part, name, value) for part in module.modules() for name, value in part._parameters.items()
    ]
    try:
        for part, name, value in parameters:
            part._parameters[name] = value if value is None else value_of(value)  # type: ignore[assignment]
        yield
    finally:
        for part, name, value in parameters:
            part._parameters[name] = value
