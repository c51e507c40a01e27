"""PEFT's adapters of experts (`target_parameters`), where PEFT itself cannot apply them: experts on
several ranks, or in NF4.

PEFT gives every rank the factors for all experts and adds their product to the whole weight before
a call. Here each rank keeps the factors of its own experts, and the experts multiply rows by them.
Factors stay PEFT's parameters, under PEFT's names, so optimizers, trainers and `save_pretrained`
work as ever: a state dict has whole factors, gathered from all ranks together.

A *wrapper* is PEFT's module around a parameter of an experts module. Its factors, `lora_A` and
`lora_B`, are called inner and outer here, as in `moesaic.experts.frozen`. A *whole* factor is that
of all experts; E: experts, r: an adapter's rank, in PEFT's sense.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from moesaic.errors import InputError
from moesaic.experts.frozen import FrozenExperts, FrozenWeights
from moesaic.kernels import nf4
from moesaic.transformers import experts_backend
from moesaic.transformers.experts_backend import Matrices, gate_of, sorted_copies, split_inputs

SCALES = "_absmax"
"""Suffix of the parameter with the scales of a weight in NF4."""


def scales_name(name: str) -> str:
    """Return the name of the scales of a weight in NF4, as in bitsandbytes' `Experts4bit`."""
    return name.removesuffix("_proj") + SCALES


def groups_name(name: str) -> str:
    """Return the name of the second tensor of `nf4.compress`, which a weight in NF4 has if its
    scales are quantized too."""
    return f"{scales_name(name)}_groups"


def scales_of(module: nn.Module, name: str) -> Tensor:
    """Return the scales of this rank's part of a weight in NF4, float32."""
    scales = local_part(getattr(module, scales_name(name)))
    groups = getattr(module, groups_name(name), None)
    return scales if groups is None else nf4.expand(scales, local_part(groups))


def is_four_bit(experts: nn.Module) -> bool:
    """Return whether the weights of an experts module are in NF4."""
    return hasattr(experts, scales_name("down_proj"))


class FamilyFrozenExperts(FrozenExperts):
    """A transformers experts module as frozen experts. The parameters stay in the module, and the
    adapters in PEFT's modules.

    Args:
        module: this rank's part of the experts; `gate_of` must recognise its gate.
        num_experts: experts of all ranks together.
    """

    def __init__(self, module: Any, num_experts: int) -> None:
        gate = gate_of(module)
        if gate is None:
            raise InputError(
                f"{type(module).__name__} has its own gate or norm: experts in NF4, and adapters "
                "on several ranks, need one of docs/transformers.md: leave quantization_config "
                "out, or train with ep_size=1"
            )
        # the module is kept in a function: as an attribute it would become a part of this one
        self._read: Callable[[], FrozenWeights] = lambda: _weights_of(module)
        weights = _weights_of(module)
        super().__init__(
            weights.down.shape[1],
            num_experts,
            gated=bool(module.has_gate),
            activation=gate.activation,
            clamp=gate.clamp,
            form=weights.form,
        )
        self.is_spread = True  # the parameters are this rank's part

    def frozen_weights(self) -> FrozenWeights:
        """Return this rank's part of the module's tensors."""
        weights = self._read()
        self.form = weights.form  # anew, since adapters may have come since
        return weights


def _weights_of(module: Any) -> FrozenWeights:
    """Return the tensors of an experts module and of its adapters; those of adapters
    differentiable."""
    if is_four_bit(module):
        weights = _four_bit_weights_of(module)
    else:
        own = Matrices.of(module)
        weights = FrozenWeights(
            up=own.up, down=own.down, up_bias=own.up_bias, down_bias=own.down_bias
        )
    for name, wrapper in adapters_of(module).items():
        inner, outer = factors(wrapper)
        if name == "down_proj":
            weights = replace(weights, down_inner=inner, down_outer=outer)
        else:
            weights = replace(weights, up_inner=inner, up_outer=split_inputs(module, outer))
    return weights


def _four_bit_weights_of(module: Any) -> FrozenWeights:
    """Return the tensors of an experts module in NF4, without adapters."""
    up_name = "gate_up_proj" if module.has_gate else "up_proj"
    up_bias = None
    down_bias = None
    if module.has_bias:
        up_bias = split_inputs(module, local_part(getattr(module, f"{up_name}_bias")))
        down_bias = local_part(module.down_proj_bias)
    # codes and scales have the gate's rows first, whatever the family's layout
    up_matrices = (2 if module.has_gate else 1, -1)
    return FrozenWeights(
        up=local_part(getattr(module, up_name)).unflatten(1, up_matrices),
        down=local_part(module.down_proj),
        up_scales=scales_of(module, up_name).unflatten(1, up_matrices),
        down_scales=scales_of(module, "down_proj"),
        up_bias=up_bias,
        down_bias=down_bias,
    )


def hidden_of(module: nn.Module) -> int:
    """Return the inner width of a whole expert."""
    weights = _weights_of(module)
    per_element = 2 if weights.form.four_bit else 1  # a byte has two codes
    return weights.down.shape[2] * per_element


def adapters_of(module: nn.Module) -> dict[str, Any]:
    """Return PEFT's wrappers that adapt an experts module through `adopt`, by the name of the
    adapted parameter."""
    found: dict[str, Any] = module.__dict__.setdefault("_moesaic_adapters", {})
    return found


def factors(wrapper: Any) -> tuple[Tensor, Tensor]:
    """Return the factors of all adapters of a wrapper, (E, r, in) and (E, out, r). Inactive ones
    are scaled by zero."""
    inner = []
    outer = []
    is_off = wrapper.disable_adapters or wrapper.merged  # merged: the weights have them already
    for adapter in wrapper.lora_A:
        is_active = not is_off and adapter in wrapper.active_adapters
        inner.append(_inner_factor(wrapper, local_part(wrapper.lora_A[adapter].weight)))
        of_adapter = _outer_factor(wrapper, local_part(wrapper.lora_B[adapter].weight))
        outer.append(of_adapter * (wrapper.scaling[adapter] if is_active else 0.0))
    return torch.cat(inner, 1), torch.cat(outer, 2)  # the ranks r of all adapters together


def _inner_factor(wrapper: Any, lora_a: Tensor) -> Tensor:
    """Return (E, r, in) from PEFT's (E r, in)."""
    return lora_a.reshape(wrapper.num_experts, -1, lora_a.shape[1])


def _outer_factor(wrapper: Any, lora_b: Tensor) -> Tensor:
    """Return (E, out, r) from PEFT's (out, r E), in which experts count fastest."""
    return lora_b.reshape(len(lora_b), -1, wrapper.num_experts).permute(2, 0, 1)


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor; the gradient is sharded like the tensor."""
    if isinstance(tensor, DTensor):
        return tensor.to_local(grad_placements=tensor.placements)
    return tensor


def is_frozen(experts: nn.Module) -> bool:
    """Return whether an experts module runs as frozen experts: it is in NF4, or has adapters
    through `adopt_adapters`."""
    return is_four_bit(experts) or bool(adapters_of(experts))


def experts_forward(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Run a module's experts as `experts_backend.experts_forward` does; those in NF4, or with
    adapters through `adopt_adapters`, as frozen experts.

    Args:
        hidden_states: (tokens, dim).
        top_k_index: (tokens, K) experts. If transformers spread the experts, `num_experts` marks an
            expert of another rank.
        top_k_weights: (tokens, K) routing weights.

    Returns:
        (tokens, dim) in the dtype of `hidden_states`.

    Raises:
        InputError: experts in NF4 have a gate that Moesaic does not know.
    """
    if not is_frozen(self):
        return experts_backend.experts_forward(self, hidden_states, top_k_index, top_k_weights)
    weight, permutation = sorted_copies(self, top_k_index, top_k_weights)
    experts = FamilyFrozenExperts(self, self.num_experts)
    run = partial(experts.compute_tokens, permutation=permutation)
    y: Tensor = experts(hidden_states, weight, run=run)
    return y


def adopt_at_first_call(experts: nn.Module) -> None:
    """Call `adopt_adapters` when a model with these experts is first called."""

    # The hook is called before every module of the process; it does not keep the experts alive.
    reference = weakref.ref(experts)

    def adopt(module: nn.Module, _: Any) -> None:
        """Adopt the adapters if `module`, which is being called, holds the experts."""
        experts = reference()
        if experts is not None and any(each is experts for each in module.modules()):
            handle.remove()
            adopt_adapters(module)

    handle = register_module_forward_pre_hook(adopt)
    weakref.finalize(experts, handle.remove)


def adopt_adapters(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Let experts that are in NF4 or on several ranks run with the adapters that PEFT gave them.
    All ranks call it together.

    The first call of a model does this by itself. Earlier it frees memory: until then every rank
    has factors for all experts. After `peft.get_peft_model(..., low_cpu_mem_usage=True)` no rank
    ever has: factors on the meta device are drawn here, on the CPU, for one weight at a time. On
    several ranks, gradients of all adapters become those of the mean of the ranks' losses, as
    FSDP2's are.

    Args:
        model: a model from `peft.get_peft_model`. Adapters of layers on the meta device stay there.
        group: the ranks that share the model, or this stage of it; None for all.

    Raises:
        InputError: experts are on several ranks, and tensor or pipeline parallelism is on too.
    """
    spread: list[Any] = []  # wrappers of experts on several ranks
    implementations = []
    for wrapper in _as_peft_made(model):  # all modules: what follows skips those of no adapters
        if hasattr(wrapper, "reset_lora_parameters"):
            _draw(wrapper, getattr(model, "peft_config", {}))
        experts = _adapted(wrapper)
        if experts is None or wrapper.parameter_name in adapters_of(experts):
            continue
        adapters_of(experts)[wrapper.parameter_name] = wrapper
        # does nothing: PEFT would change the whole weight during a call
        wrapper._activate_lora = nullcontext
        implementation = _implementation_of(experts)
        if implementation is not None:
            _cut(wrapper, implementation.ep_mesh)
            implementation.exchange()
            spread.append(wrapper)
            implementations.append(implementation)
        _replace_merging(wrapper, experts)
    if spread:
        _average(model, spread, implementations[0], group)
        for part in model.modules():
            if getattr(part, "_tp_size", None) == 1:
                # else PEFT gathers the whole model to save an adapter
                part._tp_size = None  # type: ignore[assignment]


def _adapted(wrapper: Any) -> nn.Module | None:
    """Return the experts module that one of PEFT's wrappers of a parameter adapts, if PEFT cannot
    apply it."""
    if not hasattr(wrapper, "parameter_name") or not hasattr(wrapper, "lora_A"):
        return None
    experts: nn.Module = wrapper.get_base_layer()
    if is_four_bit(experts) or _implementation_of(experts) is not None:
        return experts
    return None


def _implementation_of(experts: nn.Module | None) -> Any:
    """Return the `MoesaicEP` that runs an experts module on several ranks; None if none does."""
    return getattr(experts, "_moesaic", None)


def _as_peft_made(model: nn.Module) -> list[Any]:
    """Return all modules, wrappers in PEFT's order of making them: of modules, then of parameters,
    inner first. Factors are then drawn in the order in which PEFT draws them."""
    place = {module: number for number, module in enumerate(model.modules())}

    def order(module: Any) -> tuple[bool, int, int]:
        """Return the key by which modules are sorted."""
        if hasattr(module, "parameter_name"):
            # wrappers of several parameters of one module lie in each other: the inner ones, made
            # first, have the later places
            return True, place[module.get_base_layer()], -place[module]
        return False, place[module], 0

    return sorted(place, key=order)


def _draw(layer: Any, configs: dict[str, Any]) -> None:
    """Give factors that PEFT left on the meta device their memory and initial values, before this
    rank's part is cut out.

    Args:
        layer: PEFT's wrapper of a module or of a parameter.
        configs: name of an adapter -> its configuration.
    """
    for adapter, inner in layer.lora_A.items():
        if not inner.weight.is_meta:
            continue
        outer = layer.lora_B[adapter]
        inner.to_empty(device="cpu").reset_parameters()
        outer.to_empty(device="cpu").reset_parameters()
        initial_values = getattr(configs.get(adapter), "init_lora_weights", True)
        layer.reset_lora_parameters(adapter, initial_values)
        if _implementation_of(_adapted(layer)) is None:  # else a part of it is moved
            device = next(layer.get_base_layer().parameters()).device
            inner.to(device)
            outer.to(device)


def factor_part(name: str, tensor: Tensor, experts: int, ranks: int, place: int) -> Tensor:
    """Return a rank's part of a factor of all experts, as PEFT keeps it.

    Args:
        name: "lora_A", (E r, in), or "lora_B", (out, r E), in which experts count fastest.
        tensor: the factor.
        experts: E.
        ranks: ranks that share the experts.
        place: the rank's place among them.
    """
    own = slice(place * experts // ranks, (place + 1) * experts // ranks)
    if name == "lora_A":
        return tensor.view(experts, -1, tensor.shape[1])[own].flatten(0, 1)
    return tensor.view(len(tensor), -1, experts)[:, :, own].flatten(1)


def whole_factor(name: str, joined: Tensor, experts: int, ranks: int) -> Tensor:
    """Return a factor of all experts, as PEFT keeps it, from the ranks' parts side by side;
    arguments as for `factor_part`."""
    if name == "lora_A":  # (E r, in): the experts of one rank follow those of another
        return joined
    parts = joined.view(len(joined), ranks, -1, experts // ranks)  # (out, ranks, r, own experts)
    return parts.transpose(1, 2).reshape(len(joined), -1)


def _cut(wrapper: Any, mesh: DeviceMesh) -> None:
    """Keep only the factors of this rank's experts in a wrapper."""
    ranks = mesh.size()
    place = mesh.get_local_rank()
    num_experts = wrapper.num_experts  # of all ranks

    def part_of(name: str, whole: Tensor) -> Tensor:
        """Return this rank's part of a whole factor, a DTensor; `name` is lora_A or lora_B."""
        part = factor_part(name, whole, num_experts, ranks, place)
        part = part.to(wrapper.get_param().device, copy=True)
        experts_dim = 1 if name == "lora_B" else 0
        return DTensor.from_local(part, mesh, [Shard(experts_dim)], run_check=False)

    def gather(_: Any, state: dict[str, Any], prefix: str, __: Any) -> None:
        """Save whole factors in place of those of this rank."""
        for name, key in _factor_keys(wrapper, prefix):
            if key in state:
                state[key] = whole_factor(name, _full(state[key]), num_experts, ranks)

    def cut(_: Any, state: dict[str, Any], prefix: str, *__: Any) -> None:
        """Load this rank's parts of whole factors."""
        for name, key in _factor_keys(wrapper, prefix):
            if key in state:  # PEFT may have sharded it, as if a rank's experts lay side by side
                state[key] = part_of(name, _full(state[key]))

    new_of: dict[nn.Parameter, nn.Parameter] = {}  # whole factor -> this rank's part
    for name in ("lora_A", "lora_B"):
        for linear in getattr(wrapper, name).values():
            old = linear.weight
            part = part_of(name, old.detach())
            linear.weight = nn.Parameter(part, requires_grad=old.requires_grad)
            new_of[old] = linear.weight
            # frees the whole factor, which a trainer's optimizer may hold until its first step
            old.data = old.data.new_empty(0)
    wrapper.num_experts = num_experts // ranks
    wrapper.register_state_dict_post_hook(gather)
    wrapper.register_load_state_dict_pre_hook(cut)
    handle = register_optimizer_step_pre_hook(
        lambda optimizer, *_: _exchange_parameters(optimizer, new_of)
    )
    weakref.finalize(wrapper, handle.remove)


def _full(tensor: Tensor) -> Tensor:
    """Return a DTensor's parts of all ranks as one tensor; any other tensor unchanged."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _exchange_parameters(optimizer: Optimizer, new_of: dict[nn.Parameter, nn.Parameter]) -> None:
    """Let an optimizer that was made before its parameters were cut step those that took their
    places.

    torch's fused and foreach steps cannot take plain tensors, such as adapters of attention,
    together with DTensors.
    """
    new = set(new_of.values())
    for group in optimizer.param_groups:
        group["params"][:] = [new_of.get(parameter, parameter) for parameter in group["params"]]
        if new.isdisjoint(group["params"]):
            continue
        if not all(isinstance(parameter, DTensor) for parameter in group["params"]):
            for option in ("fused", "foreach"):
                if option in group:
                    group[option] = False


def _factor_keys(wrapper: Any, prefix: str) -> Iterator[tuple[str, str]]:
    """Yield (lora_A or lora_B, key in a state dict) of each factor of a wrapper; `prefix` is the
    wrapper's own."""
    for name in ("lora_A", "lora_B"):
        for adapter in getattr(wrapper, name):
            yield name, f"{prefix}{name}.{adapter}.weight"


def added(wrapper: Any, module: Any, adapter: str) -> Tensor:
    """Return what an adapter adds to this rank's part of a weight, in the weight's own layout and
    the adapter's dtype."""
    inner = _inner_factor(wrapper, local_part(wrapper.lora_A[adapter].weight.detach()))
    outer = _outer_factor(wrapper, local_part(wrapper.lora_B[adapter].weight.detach()))
    delta = (outer * wrapper.scaling[adapter]) @ inner  # (E, out, in)
    return delta.transpose(1, 2) if module.is_transposed else delta


def _replace_merging(wrapper: Any, module: Any) -> None:
    """Make a wrapper merge its factors into this rank's weights, or say why that cannot be."""

    def delta_weight(adapter: str, *_: Any, **__: Any) -> Tensor:
        """Return what an adapter adds to the experts' weights, in their layout."""
        parameter = wrapper.get_param()
        if is_four_bit(module):
            raise InputError(
                "merge: experts in NF4 would round the adapters away: save the adapters, load "
                "the model without quantization_config, and merge there; moesaic finetune "
                "--merge merges into the numbers that NF4 stands for"
            )
        delta = added(wrapper, module, adapter).to(parameter.dtype)
        if not isinstance(parameter, DTensor):
            return delta
        if parameter.to_local().shape != delta.shape:
            raise InputError(
                "merge: experts have copies on several ranks: save the adapters, and merge in "
                "one process"
            )
        return DTensor.from_local(
            delta.contiguous(), parameter.device_mesh, parameter.placements, run_check=False
        )

    wrapper.get_delta_weight = delta_weight


class _Mean:
    """Replaces gradients of parameters by their means over ranks at the end of each backward pass.

    An accumulated gradient is the sum of an earlier mean, equal on all ranks, and a new part, so
    its mean is right too.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], group: Any) -> None:
        self._parameters = parameters
        self._group = group
        self._is_queued = False
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._note)

    def _note(self, _: Tensor) -> None:
        """Have `_finish` called once, at the end of the backward pass that runs."""
        if not self._is_queued:
            self._is_queued = True
            Variable._execution_engine.queue_callback(self._finish)

    @torch.no_grad()
    def _finish(self) -> None:
        """Replace the gradients by their means over the group, in one message."""
        self._is_queued = False
        gradients = []
        for parameter in self._parameters:
            if parameter.grad is None:  # no token of this rank has reached it
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(local_part(parameter.grad))
        joined = torch.cat([gradient.flatten().float() for gradient in gradients])
        dist.all_reduce(joined, group=self._group)
        joined /= dist.get_world_size(self._group)
        means = joined.split([gradient.numel() for gradient in gradients])
        for gradient, mean in zip(gradients, means):
            gradient.copy_(mean.view(gradient.shape))


def _average(
    model: nn.Module, wrappers: Sequence[Any], implementation: Any, group: dist.ProcessGroup | None
) -> None:
    """Make the gradients of all adapters those of the mean of the ranks' losses, and adapters that
    every rank has whole equal to those of the first rank of the group.

    Args:
        wrappers: those of experts on several ranks.
        implementation: the `MoesaicEP` of any of them.
        group: the ranks that share the model; None for all.
    """
    world = dist.get_world_size(group)
    mesh = implementation.ep_mesh  # the ranks over which experts are spread
    if implementation.tp_mesh.size() > 1 or world % mesh.size():
        raise InputError(
            "adapters of experts on several ranks need tp_size=1 and pp_size=1: change "
            "distributed_config"
        )
    linears = [
        linear
        for wrapper in wrappers
        for of_adapters in (wrapper.lora_A, wrapper.lora_B)
        for linear in of_adapters.values()
    ]
    of_experts = [linear.weight for linear in linears if linear.weight.requires_grad]

    # A gradient of an expert is the sum over the ranks of its mesh. Each of `copies` meshes has the
    # experts, and `_Mean` below takes the mean over these: with the factor 1 / (ranks of a mesh),
    # which is copies / world, that is the mean over all ranks.
    copies = world // mesh.size()
    for weight in of_experts:
        weight.register_hook(lambda gradient: gradient * (copies / world))
    if copies > 1 and of_experts:
        assert group is None, "experts of a part of the ranks have no copies within it"
        place_of_rank: list[int] = [0] * world
        dist.all_gather_object(place_of_rank, mesh.get_local_rank())
        # by place within a mesh: the ranks there, one of each mesh, which have the same experts
        ranks_at_place: list[list[int]] = [[] for _ in range(mesh.size())]
        for rank, place in enumerate(place_of_rank):
            ranks_at_place[place].append(rank)
        own_group, _ = dist.new_subgroups_by_enumeration(ranks_at_place)
        _Mean(of_experts, own_group)

    ids_of_experts = {id(weight) for weight in of_experts}
    others = [
        parameter
        for parameter in model.parameters()
        if parameter.requires_grad
        and id(parameter) not in ids_of_experts
        and not isinstance(parameter, DTensor)
        and not parameter.is_meta
    ]
    for parameter in others:
        dist.broadcast(parameter.data, group=group, group_src=0)
    if others:
        _Mean(others, group)
