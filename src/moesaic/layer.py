"""`MoE`: a sparse Mixture-of-Experts layer that replaces a feed-forward layer. This is the
library's main entry point.

A call has four stages: route chooses experts for each token, dispatch brings the tokens to them,
expert computes, and combine adds up each token's results, weighted. A *copy* is one token for one
of its experts, a *load* the copies of each expert, and *padding* tokens that a mask leaves out.
On a mesh the experts are spread over ranks (`ep`), perhaps with several copies of all of them
(`edp`). Shape letters at the end of names: T tokens, D dim, E experts, K experts per token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import is_dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle

from moesaic.errors import InputError, suggestion
from moesaic.experts import EXPERTS, AbstractExperts, ExpertsFactory
from moesaic.experts.experts import StackedExperts, compute_dtype, in_product_dtype
from moesaic.initial_values import Draw, draw_globally
from moesaic.kernels.permute import sort_by_expert
from moesaic.kernels.pick import AUTO, check_tier
from moesaic.routing.capacity import AbstractCapacity, Dropless, as_capacity
from moesaic.routing.injection import InjectsLosses
from moesaic.routing.losses import AbstractLoss, LoadBalance
from moesaic.routing.route import Routed, RoutedCall, RoutingRecord, TokenInfo, route
from moesaic.routing.router import AbstractRouter, check_top_k, is_whole
from moesaic.routing.routers import ON_MESH, ROUTERS, RouterFactory, options_of
from moesaic.routing.routing import Routing
from moesaic.runtime.data_parallel import DataRanks, Group, UnpreparedForDDP, wrapped_by_ddp
from moesaic.runtime.routing_cache import RoutingCached, count_in_graph, is_recomputing

if TYPE_CHECKING:
    from moesaic.comm.mesh import Mesh
    from moesaic.policies import CallsOf
    from moesaic.program.compile import Compiled
    from moesaic.program.plan import Plan
    from moesaic.runtime.expert_parallel import ExpertParallel

DEFAULT_LOSSES: tuple[AbstractLoss, ...] = (LoadBalance(0.01),)
"""The auxiliary losses of a layer that is created without `losses`."""
MOST_ELEMENTS = 2**59
"""The most elements of one matrix of all experts: torch counts a tensor's bytes in 63 bits, and a
weight may hold two matrices, of 8 bytes an element."""


class CallArguments(NamedTuple):
    """The arguments of one call of a layer; `MoE.forward` explains them."""

    x: Tensor
    mask: Tensor | None
    token_ids: Tensor | None
    top_k: int | None
    capacity: AbstractCapacity | float | None


class MoE(InjectsLosses, RoutingCached):
    """A router, experts, and optionally a shared expert that every token passes.

    `y = moe(x)` takes x of (..., dim). `y, routing = moe(x, return_routing=True)` also returns the
    call's `Routing`. The layer injects the gradient of its auxiliary losses into the backward pass
    (see `routing/injection.py`), unless you collect the losses with `collect_losses(model)`. If the
    router adapts outside the loss, or a loss spans the global batch, call
    `balance_on_step(optimizer, model)` once.

    `copy.deepcopy` (and so `AveragedModel`) of a layer on a mesh copies the parameters; the copy
    shares the mesh and its connections. All ranks must make the copy and call it together, like the
    layer. `pickle` refuses a layer on a mesh, since connections cannot be stored in a file: save
    its `state_dict()` instead.

    Args:
        hidden: inner width of one expert.
        top_k: experts per token.
        router: a name in `ROUTERS` or `ON_MESH`, or a function of (dim, num_experts) that returns a
            router.
        experts: a name in `EXPERTS` ("swiglu", "clamped_swiglu", "geglu", "gelu", "relu", "relu2"),
            or a function of (dim, hidden, num_experts) that returns experts. For modules of your
            own, pass `lambda dim, hidden, n: ModuleExperts(make_one, dim, n)`.
        capacity: `Dropless()`, `Capacity.fixed(f)`, `Capacity.fitted()` or
            `Capacity.fitted(at_most=f)`; a number f stands for `Capacity.fixed(f)`. None for
            `Dropless()`.
        losses: one auxiliary loss or several; by default a load-balance loss per micro-batch with
            coefficient 0.01. `()` for none.
        shared_hidden: inner width of the shared expert; 0 for no shared expert.
        shared_gate: multiply the shared expert's result by a trained sigmoid of the token (Qwen2).
        router_options: keyword arguments for a router that is given by name: `{"scale": 2.5}`. A
            function that you pass as `router` sets its own options.
        apply_weight: multiply the expert's output ("after") or its input ("before") by the routing
            weight.
        eval_top_k: experts per token in evaluation; None for `top_k`.
        eval_capacity: capacity in evaluation; None for `capacity`.
        bias: add biases to experts that are given by name. A function that you pass as `experts`
            adds its own.
        kernel: the kernel for the experts' matrix products: "auto" chooses one for the device;
            "grouped_mm" is torch's, "quack" QuACK's; "fp8" and "mxfp8" round rows and weights to 8
            bits.
        device: device on which the parameters are created; None for torch's default device.
        dtype: dtype of the parameters; None for the dtype that the router and the experts choose,
            which is torch's default dtype. A router's balancing bias stays float32.

    Raises:
        InputError (a ValueError): if sizes do not fit together, with a one-line message.
    """

    step_counts: Tensor
    """(num_experts,) int64: copies per expert since the last optimizer step, on all ranks of the
    mesh, or on this rank if the layer is on no mesh."""

    def __init__(
        self,
        dim: int,
        hidden: int,
        num_experts: int,
        top_k: int = 2,
        *,
        router: str | RouterFactory = "softmax",
        experts: str | ExpertsFactory = "swiglu",
        capacity: AbstractCapacity | float | None = None,
        losses: AbstractLoss | Sequence[AbstractLoss] = DEFAULT_LOSSES,
        shared_hidden: int = 0,
        shared_gate: bool = False,
        router_options: Mapping[str, Any] | None = None,
        apply_weight: Literal["after", "before"] = "after",
        eval_top_k: int | None = None,
        eval_capacity: AbstractCapacity | float | None = None,
        bias: bool = False,
        kernel: str = "auto",
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check_sizes(dim=dim, hidden=hidden, num_experts=num_experts)
        check_top_k(top_k, num_experts)
        _check_shared(shared_hidden, has_gate=shared_gate)
        _check_apply_weight(apply_weight)
        self.dim = int(dim)
        self.hidden = int(hidden)
        self.num_experts = int(num_experts)
        self.top_k = int(top_k)
        self.apply_weight = apply_weight
        self.eval_top_k = eval_top_k

        router_factory = _pick(router, ROUTERS | ON_MESH, "router")
        make_router = _with_options(router_factory, router, router_options)
        experts_factory = _pick(experts, EXPERTS, "experts")
        make_experts = _with_bias(experts_factory, experts, bias)
        with nullcontext() if device is None else torch.device(device):
            self._add_router(make_router)
            self._add_experts(make_experts, int(shared_hidden), kernel)
            self.shared_gate = nn.Linear(self.dim, 1, bias=False) if shared_gate else None
        if dtype is not None:
            self.to(_floating_point(dtype))

        self.capacity = Dropless() if capacity is None else as_capacity(capacity, "capacity")
        self.eval_capacity: AbstractCapacity | None = None
        if eval_capacity is not None:
            self.eval_capacity = as_capacity(eval_capacity, "eval_capacity")
        self.losses = _as_losses(losses)
        # Not a buffer: DDP would overwrite it with the first rank's counts, and to_empty would
        # leave it undefined.
        self.step_counts = torch.zeros(self.num_experts, dtype=torch.int64, device="cpu")
        self.on_mesh: ExpertParallel | None = None
        self.data_ranks = DataRanks()

    def _add_router(self, make_router: RouterFactory) -> None:
        """Create the router, and check that it can choose as many experts as the layer asks for."""
        router = make_router(self.dim, self.num_experts)
        self.router: AbstractRouter = _made("router", router, AbstractRouter)
        self.router.check(self.top_k)
        self.router.check_fits(self.top_k if self.eval_top_k is None else self.eval_top_k)

    def _add_experts(self, make_experts: ExpertsFactory, shared_hidden: int, kernel: str) -> None:
        """Create the experts, and the shared expert if its inner width is not 0."""
        experts = make_experts(self.dim, self.hidden, self.num_experts)
        self.experts: AbstractExperts = _made("experts", experts, AbstractExperts)
        _use_kernel(self.experts, kernel)
        self.shared: AbstractExperts | None = None
        if shared_hidden:
            self.shared = make_experts(self.dim, shared_hidden, 1)
            _use_kernel(self.shared, kernel)

    def parallelize(
        self,
        mesh: Mesh | DeviceMesh | ProcessGroup,
        plan: Plan | Compiled | Literal["auto"] | None = None,
        *,
        calls: CallsOf | None = None,
        broadcast: bool = False,
    ) -> None:
        """Shard the experts over a mesh, in place. From then on, all ranks must call the layer
        together.

        Every rank must pass the whole layer with the same weights: one message compares the layer's
        settings and a hash of each tensor. Tensors on the meta device are not compared; the code
        that fills them later must give every rank the same values. Each expert's parameters become
        DTensors, sharded over ep and etp. The ranks of a tensor-parallel group pass the same tokens
        and get the same result.

        After a backward pass of the mean over a rank's own tokens, average the router's gradient
        over dp. An expert's gradient is the sum over all ranks that share its copy: sum it over edp
        and divide by dp. See docs/distributed.md.

        Args:
            mesh: `Mesh.create(ep=4)`; a torch `DeviceMesh` or a sub-mesh of one, whose dimension
                "ep" splits the experts (`Mesh.from_device_mesh` says what other names mean); or a
                process group, over all of whose ranks the experts are split. Other ranks of the
                world do not take part.
            plan: the plan to run under; None for `Plan()`. A compiled plan can serve several layers
                and ranks. "auto" starts with `Plan()`, times other plans during about the first 60
                steps of training, keeps the fastest and logs its choice in one line. If step times
                change later, it searches again. All layers of a mesh with "auto" run under one
                plan.
            calls: returns the call policy, which decides how each call runs, from a compiled plan,
                the number of experts and the width of a token; None for the policy that the plan
                names.
            broadcast: send the first rank's weights and persistent buffers to all ranks, instead of
                comparing them.

        Raises:
            InputError: if experts, plan and mesh do not fit together; on every rank, if settings or
                weights differ between ranks. The message names the first difference and the ranks'
                values.
        """
        if self.on_mesh is not None:
            raise InputError(
                "MoE.parallelize: the layer is on a mesh already: call it once, on a whole layer"
            )
        from moesaic.comm.mesh import Mesh
        from moesaic.policies import AUTO, calls_of, load

        mesh = Mesh.of(mesh)
        is_auto = self._is_auto(plan, mesh)
        on_mesh = self._make_runtime(
            mesh, plan, calls or calls_of, is_auto=is_auto, broadcast=broadcast
        )
        self._shard(mesh, broadcast=broadcast)
        self.on_mesh = on_mesh
        UnpreparedForDDP.mark(self)
        if is_auto:
            load(AUTO).of(mesh).join(on_mesh, self.experts, self.hidden, self.parameters)

    def _make_runtime(
        self,
        mesh: Mesh,
        plan: Plan | Compiled | str | None,
        calls: CallsOf,
        *,
        is_auto: bool,
        broadcast: bool,
    ) -> ExpertParallel:
        """Return the runtime of the layer on a mesh, after all ranks compared settings and
        weights."""
        from moesaic.program.plan import Plan
        from moesaic.runtime.deepep import DeepEP

        # imports torch's compiler, which takes seconds
        from moesaic.runtime.expert_parallel import ExpertParallel
        from moesaic.runtime.sharding import described

        return ExpertParallel(
            mesh.grid,
            mesh.transport,
            plan=Plan() if plan is None or isinstance(plan, str) else plan,
            experts=self.experts,
            weight_first=self.apply_weight == "before",
            calls_under=partial(calls, num_experts=self.num_experts, dim=self.dim),
            settings={**self._settings(), "broadcast": broadcast, "whether plan is auto": is_auto},
            weights=described(self, values=not broadcast),
            deepep=partial(DeepEP.of, mesh),
        )

    def _shard(self, mesh: Mesh, *, broadcast: bool) -> None:
        """Take the first rank's weights if `broadcast`, and keep this rank's part of the
        experts."""
        from moesaic.runtime.sharding import shard_experts, take_first

        if broadcast:
            take_first(self, mesh.transport)
        self.router.join_mesh(mesh.grid, mesh.grid.coordinate(mesh.rank, "dp"))
        self.router.check(self.top_k)
        shard_experts(self.experts, mesh.grid, mesh.rank, mesh.expert_mesh)

    def use_plan(self, plan: Plan | Compiled) -> None:
        """Run under another plan for the same mesh from the next call on, such as another schedule,
        r or number of chunks.

        Nothing is sent, since the weights have the same layout under every plan. Each plan is
        compiled once and kept, so switching back to one is a look-up. All ranks must call this
        between steps with the same plan. The next call detects a difference: its exchange of counts
        goes to all ranks, with a digest of their plans.

        The backward pass of a call before the switch still runs under the plan of its forward pass,
        unless it recomputes the forward pass. A layer with the plan "auto" keeps the new plan and
        stops searching.

        Args:
            plan: the new plan. A compiled plan can serve several layers, which then share its
                caches.

        Raises:
            InputError: if the layer is on no mesh, or if the plan does not fit the layer, which
                then keeps its plan; if the plan uses deepep and `parallelize` did not, since only
                `parallelize` can create deepep's process groups.
        """
        if self.on_mesh is None:
            raise InputError(
                "MoE.use_plan: the layer is on no mesh: call parallelize(mesh, plan) first"
            )
        self.on_mesh.use(plan, self.experts)
        self.on_mesh.auto = None

    if TYPE_CHECKING:

        @overload
        def __call__(
            self, x: Tensor, *, return_routing: Literal[True], **options: object
        ) -> tuple[Tensor, Routing]: ...
        @overload
        def __call__(
            self, x: Tensor, *, return_routing: Literal[False] = False, **options: object
        ) -> Tensor: ...
        def __call__(self, x: Tensor, **options: object) -> Tensor | tuple[Tensor, Routing]: ...

    def forward(
        self,
        x: Tensor,
        *,
        mask: Tensor | None = None,
        token_ids: Tensor | None = None,
        top_k: int | None = None,
        capacity: AbstractCapacity | float | None = None,
        return_routing: bool = False,
    ) -> Tensor | tuple[Tensor, Routing]:
        """Run the layer. On a mesh, the layer runs eagerly under `torch.compile`, and the code
        around it is compiled.

        Args:
            x: (..., dim). For losses per sequence, the last dimension but one is the sequence.
            mask: bool, of x's shape without dim. False marks padding, which may hold any values:
                padding goes to no expert (shared ones included), is not counted, has no loss, and
                its result is zero.
            token_ids: int64, of x's shape without dim; for routers that read token ids.
            top_k: experts per token in this call; None for the layer's.
            capacity: capacity of this call, a number for `Capacity.fixed`; None for the layer's.
            return_routing: also return the call's `Routing`.

        Returns:
            y, of x's shape and dtype (under autocast too, where `nn.Linear` returns the
            low-precision dtype); with `return_routing` the pair (y, routing).
        """
        call = CallArguments(x, mask, token_ids, top_k, capacity)
        self._check_call(call)
        if self.on_mesh is None:
            y, routing = self._run(call)
        else:
            from moesaic.runtime.graph_breaks import outside_graphs

            y, routing = outside_graphs(partial(self._run, call))
        return (y, routing) if return_routing else y

    def call_with(
        self,
        compute: Callable[[RoutedCall], Tensor],
        x: Tensor,
        *,
        mask: Tensor | None = None,
        token_ids: Tensor | None = None,
        top_k: int | None = None,
        capacity: AbstractCapacity | float | None = None,
    ) -> tuple[Tensor, Routing]:
        """Route x, compute the result with `compute`, and inject the losses: `forward` with other
        dispatch and experts.

        Wrappers that run the layer's experts in another way build on this. Hooks of the layer
        itself do not run. The arguments that are not listed here are those of `forward`.

        Args:
            compute: a function of the routed call that returns y of x's shape: the results of all
                experts, with the shared expert's added.

        Returns:
            (y, routing).
        """
        call = CallArguments(x, mask, token_ids, top_k, capacity)
        self._check_call(call)
        if self.on_mesh is None:
            return self._run(call, compute)
        from moesaic.runtime.graph_breaks import outside_graphs

        return outside_graphs(partial(self._run, call, compute))

    def _run(
        self, call: CallArguments, compute: Callable[[RoutedCall], Tensor] | None = None
    ) -> tuple[Tensor, Routing]:
        """Run a call after its arguments were checked; see `call_with`. Without `compute`, run the
        layer's own experts."""
        if self.on_mesh is not None and torch.is_grad_enabled():
            # raises if an optimizer trains parameters that were replaced, as by sharding
            self.experts.replaced.check()
        x = call.x
        x_TD = x.reshape(-1, self.dim)
        top_k = self._top_k_of(call)
        capacity = self._capacity_of(call)
        padded_rows = None  # rows per expert under a padded capacity
        if self.on_mesh is not None:
            padded_rows = self.on_mesh.padded_rows(capacity, len(x_TD), top_k)

        # all stages read the one copy that the products take
        cast_TD = in_product_dtype(x_TD)
        routed = self._route(cast_TD, call, top_k, capacity)
        if compute is not None:
            y = compute(RoutedCall(x, x_TD, call.mask, call.token_ids, routed, padded_rows))
        else:
            if self.on_mesh is None:
                y_TD = self._run_experts(cast_TD, routed.routing, x.dtype)
            else:
                y_TD = self.on_mesh.run_experts(
                    self.experts, cast_TD, routed, padded_rows, dtype=x.dtype
                )
            shared_TD = self.run_shared(cast_TD, call.mask, x.dtype)
            if shared_TD is not None:
                y_TD = y_TD + shared_TD
            y = y_TD.view(x.shape)

        if routed.loss is not None and torch.is_grad_enabled() and self.training:
            # on a mesh the loss is of all ranks' tokens, and its gradient is averaged over dp
            share = 1 if self.on_mesh is None else self.on_mesh.loss_share
            is_float16 = compute_dtype(x.dtype, x.device) is torch.float16
            y = self.inject_loss(y, routed.loss, share, is_float16)
        if padded_rows is None:
            return y, routed.routing
        return y, replace(routed.routing, padded_capacity=padded_rows)

    def finish_step(self, group: Group = "auto") -> None:
        """Let the router adapt to the load of this optimizer step, and reset the counts; see
        `balance_on_step`.

        Args:
            group: as for `balance_on_step`.
        """
        self.data_ranks.settle(group, self.parameters())  # which ranks train the layer
        load = self.step_counts
        if self.router.adapts and self.on_mesh is None:  # on a mesh, counts are of all its ranks
            load = self.data_ranks.total(load, purpose=type(self.router).__name__)
        self.router.update(load)
        self.step_counts.zero_()
        self.experts.begin_step()  # casts of the parameters are kept until they change
        if self.shared is not None:
            self.shared.begin_step()

    def reset_parameters(self) -> None:
        """Initialise all weights as in a new layer, and reset the router's adaptive state and the
        counts.

        For deferred initialisation: `torch.device("meta")`, then `to_empty`, then this.
        """
        self.router.reset_parameters()
        self.experts.reset_parameters()
        if self.shared is not None:
            self.shared.reset_parameters()
        if self.shared_gate is not None:
            self.shared_gate.reset_parameters()
        self.step_counts.zero_()

    def init_normal(self, std: float, out_std: float, draw: Draw = draw_globally) -> None:
        """Draw the weights of router and experts from normal distributions, as a model's
        initialisation asks for.

        Args:
            std: standard deviation of the matrices that read the token.
            out_std: standard deviation of the experts' matrices that write the result.
            draw: what the numbers come from: torch's global generator, or `SeededDraw`.
        """
        self.router.init_normal(std, draw)
        self.experts.init_normal(std, out_std, draw)
        if self.shared is not None:
            self.shared.init_normal(std, out_std, draw)
        if self.shared_gate is not None:
            draw(self.shared_gate.weight, partial(nn.init.normal_, std=std))
        self.step_counts.zero_()

    def extra_repr(self) -> str:
        """Return the sizes, for printing."""
        return (
            f"dim={self.dim}, hidden={self.hidden}, num_experts={self.num_experts}, "
            f"top_k={self.top_k}"
        )

    def _is_auto(self, plan: Plan | Compiled | str | None, mesh: Mesh) -> bool:
        """Return whether the plan is "auto". Refuse other strings, and capacities under which plans
        are not equivalent."""
        if plan is None or is_dataclass(plan):
            return False
        if plan != "auto":
            raise InputError(
                f'plan={plan!r} is unknown: write Plan(...), or "auto" to find one while training'
            )
        for name in ("capacity", "eval_capacity"):
            capacity = getattr(self, name)
            # no capacity of its own, no token dropped, or one limit for the copies of all ranks
            if capacity is None or capacity.never_drops or capacity.spans_mesh:
                continue
            if capacity.is_padded or mesh.grid.tp > 1:
                raise InputError(
                    f'plan="auto" clashes with {name}={capacity}, a capacity per rank: which '
                    "tokens it drops would depend on the plan. Choose Dropless(), or a capacity "
                    'with scope="mesh"'
                )
        return True

    def _settings(self) -> dict[str, object]:
        """Return the settings that must be the same on all ranks of a mesh."""
        names = (
            "dim",
            "hidden",
            "num_experts",
            "top_k",
            "eval_top_k",
            "capacity",
            "eval_capacity",
            "losses",
            "apply_weight",
        )
        settings = {f"layer.{name}": getattr(self, name) for name in names}

        settings["layer.router"] = type(self.router).__name__
        settings["layer.experts"] = type(self.experts).__name__
        for path, module in self.router.named_modules(prefix="layer.router"):
            for name, value in vars(module).items():
                is_setting = isinstance(value, bool | int | float | str)
                if is_setting and name != "training":
                    settings[f"{path}.{name}"] = value
        return settings

    def _top_k_of(self, call: CallArguments) -> int:
        """Return the experts per token of a call: its own, or the layer's for training or
        evaluation."""
        if call.top_k is not None:
            return int(call.top_k)
        if self.training or self.eval_top_k is None:
            return int(self.top_k)
        return int(self.eval_top_k)

    def _capacity_of(self, call: CallArguments) -> AbstractCapacity:
        """Return the capacity of a call: its own, or the layer's for training or evaluation."""
        if call.capacity is not None:
            return as_capacity(call.capacity, "capacity")
        if self.training or self.eval_capacity is None:
            return as_capacity(self.capacity, "capacity")
        return as_capacity(self.eval_capacity, "capacity")

    def _route(
        self, x_TD: Tensor, call: CallArguments, top_k: int, capacity: AbstractCapacity
    ) -> Routed:
        """Run the route stage, or replay it from the routing cache, and add its load to
        `step_counts` once."""
        replay = None
        if self.routing_cache is not None:
            replay = self.routing_cache.read(self)
        is_counted = replay is None and self._is_training_call()
        if self.on_mesh is not None:  # DDP must ignore experts that differ between ranks
            self.on_mesh.refuse_ddp(self.experts.parameters())
        elif is_counted:  # the ranks of DDP, if it wraps this call, are those to sum counts over
            self.data_ranks.note_wrapper()

        batch = self._token_info(call, is_counted=is_counted)
        run_route: Callable[..., Routed] = route
        if self.on_mesh is not None:
            run_route = partial(self.on_mesh.route, sets_loss_scale=self.loss_scale_is_set)
        routed = run_route(
            self.router,
            x_TD,
            top_k=top_k,
            capacity=capacity,
            losses=self.losses,
            batch=batch,
            replay=replay,
        )
        if self.routing_cache is not None and not self.routing_cache.is_replaying:
            self.routing_cache.write(self, routed.record)
        if is_counted:
            self._count(routed.record)
        return routed

    def _is_training_call(self) -> bool:
        """Return whether this call's load belongs to the optimizer step: it trains, and does not
        recompute a call that did."""
        # an activation checkpoint runs its forward pass without gradients, with a routing cache
        has_backward = torch.is_grad_enabled() or self.routing_cache is not None
        # a compiled graph asks each time it runs, in `count_in_graph`
        is_first_run = torch.compiler.is_compiling() or not is_recomputing()
        return self.training and has_backward and is_first_run

    def _token_info(self, call: CallArguments, *, is_counted: bool) -> TokenInfo:
        """Return what routing reads besides the activations; `is_counted` says whether the call's
        load will be added to `step_counts`."""
        step_losses = [loss for loss in self.losses if loss.needs_step]
        earlier_counts = None
        step_total = None
        if step_losses:
            earlier_counts = self.step_counts.to(call.x.device)
            if is_counted and self.on_mesh is None:
                purpose = f"the loss {step_losses[0].name}"
                # sums counts over all ranks that train the layer
                step_total = partial(self.data_ranks.total, purpose=purpose)
        return TokenInfo(
            valid_T=None if call.mask is None else call.mask.reshape(-1),
            token_ids=None if call.token_ids is None else call.token_ids.reshape(-1),
            # x is (sequences..., tokens, dim); a batch of no sequences counts as one
            num_sequences=math.prod(call.x.shape[:-2]) or 1,
            earlier_counts=earlier_counts,
            step_total=step_total,
        )

    def _count(self, record: RoutingRecord) -> None:
        """Add a call's copies to `step_counts`."""
        requested = record.requested
        if self.step_counts.device != requested.device:
            self.step_counts = self.step_counts.to(requested.device)
        if torch.compiler.is_compiling():
            count_in_graph(self.step_counts, requested)
        else:
            self.step_counts.add_(requested)
        if self.on_mesh is not None:
            self.on_mesh.note(record)

    def _run_experts(self, x_TD: Tensor, routing: Routing, dtype: torch.dtype) -> Tensor:
        """Run dispatch, experts and combine on one rank: (tokens, dim) -> (tokens, dim) in
        `dtype`."""
        permutation = sort_by_expert(
            routing.token,
            routing.expert,
            routing.counts,
            routing.num_tokens,
            routing.rows_per_token,
            has_unsent=routing.has_unsent,
        )
        run = partial(
            self.experts.compute_tokens,
            permutation=permutation,
            weight_first=self.apply_weight == "before",
            dtype=dtype,
        )
        return self.experts(x_TD, routing.weight, run=run)

    def run_shared(
        self, x_TD: Tensor, mask: Tensor | None, dtype: torch.dtype | None = None
    ) -> Tensor | None:
        """Return the shared expert's result, (tokens, dim), zero for padding; None if the layer has
        no shared expert.

        Args:
            x_TD: (tokens, dim).
            mask: bools, one per token, False for padding, which may hold any values, NaN included;
                None for no padding.
            dtype: dtype of the result; None for that of `x_TD`.
        """
        dtype = x_TD.dtype if dtype is None else dtype
        if self.shared is None:
            return None
        padding = None
        if mask is not None:
            padding = ~mask.reshape(-1, 1)
        tokens = x_TD if padding is None else x_TD.masked_fill(padding, 0.0)
        # one expert, whose rows end with the last token
        ends = torch.full((1,), len(x_TD), dtype=torch.int32, device=x_TD.device)
        result: Tensor = self.shared(tokens, None, ends).to(dtype)  # None: no routing weights
        if self.shared_gate is not None:
            result = result * self.shared_gate(tokens).sigmoid().to(dtype)
        return result if padding is None else result.masked_fill(padding, 0.0)

    def _check_call(self, call: CallArguments) -> None:
        """Raise InputError if a call's arguments do not fit the layer."""
        x = call.x
        mask = call.mask
        token_ids = call.token_ids
        if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
            raise InputError(
                "MoE was called under vmap or another transform of torch.func, which a layer "
                "that sorts its tokens does not support: batch by further dimensions of x, "
                "differentiate by torch.autograd"
            )

        _check_tensors(x=x, mask=mask, token_ids=token_ids)
        if x.dim() < 1 or x.shape[-1] != self.dim:
            raise InputError(
                f"MoE(dim={self.dim}) was called with x of shape {tuple(x.shape)}: its last "
                "size must be dim"
            )
        if not x.is_floating_point():
            raise InputError(
                f"MoE was called with x of dtype {x.dtype}: pass activations, in a "
                "floating-point dtype"
            )

        for name, value in (("mask", mask), ("token_ids", token_ids)):
            if value is not None and value.shape != x.shape[:-1]:
                raise InputError(
                    f"MoE: {name} has shape {tuple(value.shape)}, x has {tuple(x.shape)}: "
                    f"{name} must have shape {tuple(x.shape[:-1])}"
                )
        if mask is not None and mask.dtype != torch.bool:
            raise InputError(f"MoE: mask has dtype {mask.dtype}: pass bool, True for real tokens")
        if token_ids is not None and (token_ids.is_floating_point() or token_ids.is_complex()):
            raise InputError(
                f"MoE: token_ids have dtype {token_ids.dtype}: pass whole numbers, in torch.int64"
            )

        if self.router.needs_token_ids and token_ids is None:
            raise InputError(
                f"{type(self.router).__name__} routes by token ids: call the layer as moe(x, "
                "token_ids=ids)"
            )
        if call.top_k is not None:
            self.router.check_fits(call.top_k)


def finish_step(model: nn.Module, group: Group = "auto") -> None:
    """Call `MoE.finish_step` on every MoE layer of `model`. Call it once per optimizer step, before
    or after the step.

    Args:
        model: the whole model, with its DDP or FSDP2 wrapper if it has one.
        group: as for `balance_on_step`.
    """
    _set_data_ranks(model, group)
    for module in model.modules():
        if isinstance(module, MoE):
            module.finish_step()


def balance_on_step(
    optimizer: torch.optim.Optimizer, model: nn.Module, group: Group = "auto"
) -> RemovableHandle:
    """Call `finish_step(model)` before every step of `optimizer`.

    Layers on a mesh count the tokens of all ranks of the mesh. Other layers sum their counts over
    the ranks that train the same parameters: one small message per step for each layer with an
    adapting router, and one per call for a loss over the global batch. All of those ranks must step
    together.

    When a gradient scaler skips a step, `optimizer.step` is not called: no router adapts, and the
    tokens of the skipped step count towards the next step. A fused optimizer skips inside its
    kernel: its `step` is called, so routers adapt to the skipped step.

    Args:
        optimizer: a torch optimizer, or a wrapper with an attribute `optimizer` (Accelerate's,
            Fabric's).
        model: the whole model, with its DDP or FSDP2 wrapper if it has one.
        group: the ranks that train the layers together, each on tokens of its own: a process group;
            None if this process trains alone; "auto" for the ranks of DDP or FSDP2. With several
            processes and neither DDP nor FSDP2, "auto" cannot determine the ranks: an adapting
            router then refuses the step, and a loss over the global batch refuses the first forward
            pass.

    Returns:
        A handle; its `remove()` unregisters the hook.

    Raises:
        InputError: the arguments are of other kinds, or the optimizer was made before the experts
            were spread, so that it would train none.
    """
    wrapped = getattr(optimizer, "optimizer", None)
    while isinstance(wrapped, torch.optim.Optimizer):
        optimizer = wrapped
        wrapped = getattr(optimizer, "optimizer", None)
    if not isinstance(model, nn.Module) or not hasattr(optimizer, "register_step_pre_hook"):
        given = f"{type(optimizer).__name__} and {type(model).__name__}"
        raise InputError(f"balance_on_step takes an optimizer, then the model: got {given}")
    for module in model.modules():
        if isinstance(module, AbstractExperts):  # if it trains parameters that were replaced since
            module.replaced.refuse([optimizer])
    _set_data_ranks(model, group)
    return optimizer.register_step_pre_hook(lambda *_: finish_step(model))


def _set_data_ranks(model: nn.Module, group: Group) -> None:
    """Tell every layer which ranks train it, as far as they can be determined."""
    ddp_groups = wrapped_by_ddp(model) if group == "auto" else {}
    for module in model.modules():
        if isinstance(module, MoE):
            module.data_ranks.settle(ddp_groups.get(module, group), module.parameters())


def _pick(choice: str | Callable, table: dict, argument: str) -> Callable:
    """Return the entry of `table` that `choice` names, or `choice` itself if it is a function."""
    if isinstance(choice, nn.Module):
        raise InputError(
            f"{argument} is a module, {type(choice).__name__}: pass a function that makes it "
            "from the sizes"
        )
    if callable(choice):
        return choice
    if choice not in table:
        raise InputError(
            f"{argument}={choice!r} is unknown: choose one of {', '.join(table)}, or pass a "
            "function"
        )
    factory: Callable = table[choice]
    return factory


def _made(argument: str, module: Any, kind: type[Any]) -> Any:
    """Return what a function given as `router` or `experts` made, after a check of its class."""
    if isinstance(module, kind):
        return module
    more = ""
    if argument == "experts":
        more = ", or ModuleExperts(make_one, dim, num_experts) of your modules"
    raise InputError(
        f"{argument}: the function returned {type(module).__name__}: return an "
        f"{kind.__name__}{more}"
    )


def _check_sizes(**sizes: int) -> None:
    """Raise InputError unless all sizes are whole numbers of at least 1."""
    for name, size in sizes.items():
        if not is_whole(size) or size < 1:
            raise InputError(f"MoE: {name} must be a whole number of at least 1, got {size!r}")
    elements = math.prod(map(int, sizes.values()))
    if elements > MOST_ELEMENTS:
        product = " x ".join(f"{name}={size}" for name, size in sizes.items())
        raise InputError(
            f"MoE: {product} are {elements} elements of a weight, more than the {MOST_ELEMENTS} "
            "that a tensor can hold"
        )


def _check_tensors(**arguments: Tensor | None) -> None:
    """Raise InputError unless the arguments of a call that were given are dense tensors of
    values."""
    for name, value in arguments.items():
        if value is None and name != "x":
            continue
        if not isinstance(value, Tensor):
            raise InputError(f"MoE: {name} is a {type(value).__name__}: pass a torch.Tensor")
        if value.is_nested or value.layout != torch.strided:
            layout = "nested" if value.is_nested else "sparse"
            raise InputError(
                f"MoE: {name} is a {layout} tensor: pass a dense one, padded with a mask where "
                "sequences differ in length"
            )
        if value.is_meta:
            raise InputError(f"MoE: {name} is on the device meta, which holds no values to route")


def _check_shared(hidden: int, *, has_gate: bool) -> None:
    """Raise InputError if the shared expert's inner width is none, or a gate lacks its expert."""
    if not is_whole(hidden) or hidden < 0:
        raise InputError(
            f"shared_hidden={hidden}: give the shared expert's inner width, or 0 for none"
        )
    if has_gate and not hidden:
        raise InputError(
            "shared_gate=True needs a shared expert: give shared_hidden its inner width"
        )


def _check_apply_weight(choice: str) -> None:
    """Raise InputError if a layer's `apply_weight` is neither "after" nor "before"."""
    if choice not in ("after", "before"):
        raise InputError(f'apply_weight={choice!r} is unknown: write "after" or "before"')


def _floating_point(dtype: torch.dtype) -> torch.dtype:
    """Return a dtype that parameters can have; raise InputError for any other value."""
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise InputError(
            f"dtype={dtype!r}: pass a floating-point torch.dtype, such as torch.bfloat16"
        )
    return dtype


def _use_kernel(experts: AbstractExperts, name: str) -> None:
    """Make `experts` use the kernel `name`."""
    if check_tier(name) == AUTO:
        return
    if not isinstance(experts, StackedExperts):
        raise InputError(
            f"kernel={name!r} is only for built-in experts, got {type(experts).__name__}: "
            f"leave it at {AUTO}"
        )
    experts.kernel = name


def _with_bias(make: ExpertsFactory, choice: str | Callable, bias: bool) -> ExpertsFactory:
    """Return a factory of experts with biases if `bias` is set, else `make`."""
    if not bias:
        return make
    if callable(choice):
        raise InputError(
            "bias=True is only for experts given by name: let your function create them with biases"
        )
    return partial(make, bias=True)  # type: ignore[call-arg]


def _with_options(
    make: RouterFactory, choice: str | Callable, options: Mapping[str, Any] | None
) -> RouterFactory:
    """Return a factory of routers with `options`, or `make` if there are none."""
    if not options:
        return make
    if callable(choice):
        raise InputError(
            "router_options is only for a router given by name: set the options in your function"
        )
    if not isinstance(options, Mapping):
        raise InputError(
            f'router_options={options!r}: pass a dict of names and values, such as {{"bias": True}}'
        )
    option_names = options_of(make)
    for name in options:
        if name not in option_names:
            raise InputError(
                f"router_options: {name} is not an option of "
                f"router={choice!r}{suggestion(name, list(option_names))}"
            )

    def make_with_options(dim: int, num_experts: int) -> AbstractRouter:
        """Make the router, and name options that do not fit it."""
        try:
            return make(dim, num_experts, **options)
        except TypeError as error:
            raise InputError(
                f"router_options={dict(options)} do not fit router={choice!r}: {error}"
            ) from None

    return make_with_options


def _as_losses(losses: AbstractLoss | Sequence[AbstractLoss]) -> tuple[AbstractLoss, ...]:
    """Return the losses as a tuple, after a check that their names are unique."""
    if isinstance(losses, AbstractLoss):
        return (losses,)
    loss_tuple = tuple(losses) if isinstance(losses, Sequence) else (losses,)
    for loss in loss_tuple:
        if not isinstance(loss, AbstractLoss):
            raise InputError(
                f"MoE: losses holds {loss!r}, which is not a loss: write "
                "losses=(LoadBalance(0.01),), or () for none"
            )
    names = [loss.name for loss in loss_tuple]
    for name in names:
        if names.count(name) > 1:
            raise InputError(
                f"MoE: losses has {names.count(name)} of the name {name}: give it once, "
                "coefficients added"
            )
    return loss_tuple
