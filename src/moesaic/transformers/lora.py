"""PEFT's adapters of experts (`target_parameters`), where PEFT itself cannot apply them: experts on
several ranks, or in NF4.

PEFT gives every rank the factors for all experts and adds their product to the whole weight before
a call. Here each rank keeps the factors of its own experts, and the experts multiply rows by them.
Factors stay PEFT's parameters, under PEFT's names, so optimizers, trainers and `save_pretrained`
work as ever: a state dict has whole factors, gathered from all ranks together.
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
        self.is_spread = True

    def frozen_weights(self) -> FrozenWeights:
        """Return this rank's part of the module's tensors."""
        weights = self._read()
        self.form = weights.form
        return weights


def _weights_of(module: Any) -> FrozenWeights:
    """Return the tensors of an experts module and of its adapters; those of adapters
    differentiable."""
    if is_four_bit(module):
        names = ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
        up, down = (local_part(getattr(module, name)) for name in names)
        up_scales, down_scales = (scales_of(module, name) for name in names)
        parts = (2 if module.has_gate else 1, -1)
        biases = (
            [local_part(getattr(module, f"{name}_bias")) for name in names]
            if module.has_bias
            else [None, None]
        )
        weights = FrozenWeights(
            up=up.unflatten(1, parts),
            down=down,
            up_scales=up_scales.unflatten(1, parts),
            down_scales=down_scales,
            up_bias=None if biases[0] is None else split_inputs(module, biases[0]),
            down_bias=biases[1],
        )
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


def hidden_of(module: nn.Module) -> int:
    """Return the inner width of a whole expert."""
    weights = _weights_of(module)
    return weights.down.shape[2] * (2 if weights.form.four_bit else 1)


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
    for name, first in wrapper.lora_A.items():
        off = wrapper.disable_adapters or wrapper.merged or name not in wrapper.active_adapters
        a = local_part(first.weight)
        b = local_part(wrapper.lora_B[name].weight)
        inner.append(a.reshape(wrapper.num_experts, -1, a.shape[1]))
        whole = b.reshape(len(b), -1, wrapper.num_experts).permute(2, 0, 1)
        outer.append(whole * (0.0 if off else wrapper.scaling[name]))
    return torch.cat(inner, 1), torch.cat(outer, 2)


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor; the gradient is sharded like the tensor."""
    return (
        tensor.to_local(grad_placements=tensor.placements)
        if isinstance(tensor, DTensor)
        else tensor
    )


def is_frozen(experts: nn.Module) -> bool:
    """Return whether an experts module runs as frozen experts: it is in NF4, or has adapters
    through `adopt_adapters`."""
    return is_four_bit(experts) or bool(adapters_of(experts))


def experts_forward(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Run a module's experts as `experts.experts_forward` does; those in NF4 as frozen experts,
    with their adapters.

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

    def adopt(reference: Callable[[], nn.Module | None], module: nn.Module, _: Any) -> None:
        """Adopt the adapters if `module`, which is being called, holds the experts."""
        own = reference()
        if own is not None and any(each is own for each in module.modules()):
            handle.remove()
            adopt_adapters(module)

    handle = register_module_forward_pre_hook(partial(adopt, weakref.ref(experts)))
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
    spread: list[Any] = []
    for wrapper in _as_peft_made(model):
        if hasattr(wrapper, "reset_lora_parameters"):
            _draw(wrapper, getattr(model, "peft_config", {}))
        module = _adapted(wrapper)
        if module is None or wrapper.parameter_name in adapters_of(module):
            continue
        adapters_of(module)[wrapper.parameter_name] = wrapper
        # does nothing: PEFT would change the whole weight during a call
        wrapper._activate_lora = nullcontext
        implementation = getattr(module, "_moesaic", None)
        if implementation is not None:
            _cut(wrapper, implementation.ep_mesh)
            implementation.exchange()
            spread.append((wrapper, implementation))
        _replace_merging(wrapper, module)
    if spread:
        _average(model, [wrapper for wrapper, _ in spread], spread[0][1], group)
        for part in model.modules():
            if getattr(part, "_tp_size", None) == 1:
                # else PEFT gathers the whole model to save an adapter
                part._tp_size = None  # type: ignore[assignment]


def _adapted(wrapper: Any) -> nn.Module | None:
    """Return the experts module that one of PEFT's wrappers of a parameter adapts, if PEFT cannot
    apply it."""
    if not hasattr(wrapper, "parameter_name") or not hasattr(wrapper, "lora_A"):
        return None
    module = wrapper.get_base_layer()
    return module if is_four_bit(module) or getattr(module, "_moesaic", None) is not None else None


def _as_peft_made(model: nn.Module) -> list[Any]:
    """Return all modules, wrappers in PEFT's order of making them: of modules, then of parameters,
    inner first."""
    place = {module: number for number, module in enumerate(model.modules())}

    def made(module: Any) -> tuple[bool, int, int]:
        """Return what orders modules: adapters of modules first, by their places, inner ones
        first."""
        is_parameter = hasattr(module, "parameter_name")
        return (
            is_parameter,
            place[module.get_base_layer()] if is_parameter else place[module],
            -place[module],
        )

    return sorted(place, key=made)


def _draw(layer: Any, configs: dict[str, Any]) -> None:
    """Give factors that PEFT left on the meta device their memory and initial values, before this
    rank's part is cut out."""
    for name, linear in layer.lora_A.items():
        if linear.weight.is_meta:
            pair = linear, layer.lora_B[name]
            for each in pair:
                each.to_empty(device="cpu").reset_parameters()
            layer.reset_lora_parameters(name, getattr(configs.get(name), "init_lora_weights", True))
            implementation = getattr(_adapted(layer), "_moesaic", None)
            if implementation is None:
                for each in pair:
                    each.to(next(layer.get_base_layer().parameters()).device)


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
    if name == "lora_A":
        return joined
    parts = joined.view(len(joined), ranks, -1, experts // ranks)
    return parts.transpose(1, 2).reshape(len(joined), -1)


def _cut(wrapper: Any, mesh: DeviceMesh) -> None:
    """Keep only the factors of this rank's experts in a wrapper."""
    ranks = mesh.size()
    place = mesh.get_local_rank()
    whole = wrapper.num_experts

    def part_of(name: str, tensor: Tensor) -> Tensor:
        """Return this rank's part of a whole factor."""
        part = factor_part(name, tensor, whole, ranks, place)
        part = part.to(wrapper.get_param().device, copy=True)
        return DTensor.from_local(part, mesh, [Shard(name == "lora_B")], run_check=False)

    def gather(_: Any, state: dict[str, Any], prefix: str, __: Any) -> None:
        """Save whole factors in place of those of this rank."""
        for key, tensor in [
            (key, state[key]) for key in _factor_keys(wrapper, prefix) if key in state
        ]:
            joined = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            name = "lora_B" if ".lora_B." in key[len(prefix) - 1 :] else "lora_A"
            joined = whole_factor(name, joined, whole, ranks)
            state[key] = joined

    def cut(_: Any, state: dict[str, Any], prefix: str, *__: Any) -> None:
        """Load this rank's parts of whole factors."""
        for key in _factor_keys(wrapper, prefix):
            if key in state:  # PEFT may have sharded it, as if a rank's experts lay side by side
                name = "lora_B" if ".lora_B." in key[len(prefix) - 1 :] else "lora_A"
                factor = state[key].full_tensor() if isinstance(state[key], DTensor) else state[key]
                state[key] = part_of(name, factor)

    instead: dict[nn.Parameter, nn.Parameter] = {}
    for name in ("lora_A", "lora_B"):
        for linear in getattr(wrapper, name).values():
            old = linear.weight
            instead[old] = linear.weight = nn.Parameter(
                part_of(name, old.detach()), requires_grad=old.requires_grad
            )
            # a trainer's optimizer may hold it until its first step
            old.data = old.data.new_empty(0)
    wrapper.num_experts = whole // ranks
    wrapper.register_state_dict_post_hook(gather)
    wrapper.register_load_state_dict_pre_hook(cut)
    handle = register_optimizer_step_pre_hook(
        lambda optimizer, *_: _exchange_parameters(optimizer, instead)
    )
    weakref.finalize(wrapper, handle.remove)


def _exchange_parameters(optimizer: Optimizer, instead: dict[nn.Parameter, nn.Parameter]) -> None:
    """Let an optimizer that was made before its parameters were cut step those that took their
    places.

    torch's fused and foreach steps cannot take plain tensors, such as adapters of attention,
    together with DTensors.
    """
    own = set(instead.values())
    for group in optimizer.param_groups:
        group["params"][:] = [instead.get(each, each) for each in group["params"]]
        if own & set(group["params"]) and not all(
            isinstance(each, DTensor) for each in group["params"]
        ):
            group |= {name: False for name in ("fused", "foreach") if name in group}


def _factor_keys(wrapper: Any, prefix: str) -> Iterator[str]:
    for name in ("lora_A", "lora_B"):
        for adapter in getattr(wrapper, name):
            yield f"{prefix}{name}.{adapter}.weight"


def added(wrapper: Any, module: Any, adapter: str) -> Tensor:
    """Return what an adapter adds to this rank's part of a weight, in the weight's own layout and
    the adapter's dtype."""
    inner, outer = (
        local_part(layers[adapter].weight.detach()) for layers in (wrapper.lora_A, wrapper.lora_B)
    )
    outer = (
        outer.reshape(len(outer), -1, wrapper.num_experts).permute(2, 0, 1)
        * wrapper.scaling[adapter]
    )
    delta = outer @ inner.reshape(wrapper.num_experts, -1, inner.shape[1])
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
        if not self._is_queued:
            self._is_queued = True
            Variable._execution_engine.queue_callback(self._finish)

    @torch.no_grad()
    def _finish(self) -> None:
        """Replace the gradients by their means over the group, in one message."""
        self._is_queued = False
        for each in self._parameters:
            if each.grad is None:
                each.grad = torch.zeros_like(each)
        gradients = [local_part(each.grad) for each in self._parameters if each.grad is not None]
        joined = torch.cat([gradient.flatten().float() for gradient in gradients])
        dist.all_reduce(joined, group=self._group)
        joined /= dist.get_world_size(self._group)
        for gradient, mean in zip(
            gradients, joined.split([gradient.numel() for gradient in gradients])
        ):
            gradient.copy_(mean.view(gradient.shape))


def _average(
    model: nn.Module, wrappers: Sequence[Any], implementation: Any, group: dist.ProcessGroup | None
) -> None:
    """Make the gradients of all adapters those of the mean of the ranks' losses, and whole adapters
    those of the first rank of the group."""
    world = dist.get_world_size(group)
    mesh = implementation.ep_mesh
    if implementation.tp_mesh.size() > 1 or world % mesh.size():
        raise InputError(
            "adapters of experts on several ranks need tp_size=1 and pp_size=1: change "
            "distributed_config"
        )
    layers = [
        linear
        for wrapper in wrappers
        for each in (wrapper.lora_A, wrapper.lora_B)
        for linear in each.values()
    ]
    of_experts = [linear.weight for linear in layers if linear.weight.requires_grad]
    copies = world // mesh.size()
    for weight in of_experts:
        weight.register_hook(lambda gradient: gradient * (copies / world))
    if copies > 1 and of_experts:
        assert group is None, "experts of a part of the ranks have no copies within it"
        places: list[int] = [0] * world
        dist.all_gather_object(places, mesh.get_local_rank())
        alike = [
            [rank for rank in range(world) if places[rank] == place] for place in range(mesh.size())
        ]
        _Mean(of_experts, dist.new_subgroups_by_enumeration(alike)[0])
    known = {id(weight) for weight in of_experts}
    others = [
        each
        for each in model.parameters()
        if each.requires_grad
        and id(each) not in known
        and not isinstance(each, DTensor)
        and not each.is_meta
    ]
    for each in others:
        dist.broadcast(each.data, group=group, group_src=0)
    if others:
        _Mean(others, group)
