"""Experts in NF4 that a layer of its own holds, under the names and in the bytes of bitsandbytes'
`Experts4bit`.

NF4 codes are indices into 16 values, two in a byte; `nf4.BLOCK` successive inputs of a matrix share
a scale ("absmax"). Inner and outer are the two matrices of an adapter (LoRA's A and B). A field is
one of `FrozenWeights`, whose docstrings give the shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moesaic.errors import InputError
from moesaic.experts.experts import GatedExperts, PlainExperts, StackedExperts
from moesaic.experts.frozen import SPLIT, TRAINED, Form, FrozenExperts, FrozenWeights
from moesaic.initial_values import Draw, draw_globally
from moesaic.kernels import nf4
from moesaic.kernels.activation import Clamp

NAMES = {
    "up": "gate_up_proj",
    "down": "down_proj",
    "up_scales": "gate_up_absmax",
    "down_scales": "down_absmax",
    "up_bias": "gate_up_proj_bias",
    "down_bias": "down_proj_bias",
    "up_inner": "gate_up_lora_A",
    "up_outer": "gate_up_lora_B",
    "down_inner": "down_lora_A",
    "down_outer": "down_lora_B",
}
"""A field of `FrozenWeights` -> the parameter that holds it. The first four are those of
`Experts4bit`."""
STORED_FLAT = ("up", "down", "up_scales", "down_scales")
"""Fields that a state dict holds as (num_experts, numbers), as `Experts4bit` does."""


class FourBitExperts(FrozenExperts):
    """Experts in NF4 with a float32 scale for each 64 inputs, optionally with adapters, which alone
    are trained.

    In a state dict the frozen tensors have the names, the shapes and the bytes of bitsandbytes'
    `Experts4bit`: on one rank either loads what the other saved. On a mesh they are DTensors,
    sharded like all experts.

    Args:
        dim, hidden: widths, multiples of 64.
        gated, activation, clamp: as for `FrozenExperts`.
        bias: whether the experts have biases, which are frozen too.
        rank: the rank of the adapters of all matrices; 0 for none. They start as in PEFT: A as
            `nn.Linear`, B zero.
        device: device of the parameters; the frozen ones are undefined until they are loaded.
        dtype: dtype of adapters and biases; None for torch's default.

    Raises:
        InputError: a width is no multiple of 64.
    """

    def __init__(
        self,
        dim: int,
        hidden: int,
        num_experts: int,
        *,
        gated: bool = True,
        activation: str = "silu",
        clamp: Clamp | None = None,
        bias: bool = False,
        rank: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if dim % nf4.BLOCK or hidden % nf4.BLOCK:
            raise InputError(
                f"FourBitExperts: dim={dim} and hidden={hidden} must be multiples of "
                f"{nf4.BLOCK}, whose numbers share a scale"
            )
        form = Form(four_bit=True, bias=bias, ranks=(rank, rank))  # of up and down
        super().__init__(
            dim, num_experts, gated=gated, activation=activation, clamp=clamp, form=form
        )
        parts = 2 if gated else 1  # gate and up, or up alone
        shapes: dict[str, tuple[int, ...]] = {
            # of one expert; two codes in a byte
            "up": (parts, hidden, dim // 2),
            "down": (dim, hidden // 2),
            "up_scales": (parts, hidden, dim // nf4.BLOCK),
            "down_scales": (dim, hidden // nf4.BLOCK),
            "up_bias": (parts, hidden),
            "down_bias": (dim,),
            "up_inner": (rank, dim),
            "up_outer": (parts, hidden, rank),
            "down_inner": (rank, hidden),
            "down_outer": (dim, rank),
        }
        for field, shape in shapes.items():
            if not form.has(field):
                continue
            field_dtype = dtype
            if field in ("up", "down"):
                field_dtype = torch.uint8
            elif "scales" in field:
                field_dtype = torch.float32
            tensor = torch.zeros(num_experts, *shape, device=device, dtype=field_dtype)
            parameter = nn.Parameter(tensor, requires_grad=field in TRAINED)
            self.register_parameter(NAMES[field], parameter)
        self.reset_parameters()

    @classmethod
    def like(cls, experts: StackedExperts, *, rank: int = 0) -> FourBitExperts:
        """Return experts of the sizes and on the device of built-in ones; frozen tensors are
        undefined.

        Args:
            experts: all experts of a layer, not sharded.
            rank: the rank of the adapters; 0 for none.
        """
        num_experts, dim, hidden = experts.w2.shape
        return cls(
            dim=dim,
            hidden=hidden,
            num_experts=num_experts,
            gated=len(experts.ups) > 1,
            activation=experts.activation,
            clamp=experts.clamp,
            bias=experts.bias,
            rank=rank,
            device=experts.w2.device,
            dtype=experts.w2.dtype,
        )

    @classmethod
    @torch.no_grad()
    def of(cls, experts: StackedExperts, *, rank: int = 0) -> FourBitExperts:
        """Return built-in experts of one rank in NF4, on their device; the result holds no
        reference to them."""
        sharded, common = experts.weights()
        up, down, *up_bias = sharded
        if len(experts.ups) == 1:
            up = up.unsqueeze(1)  # the dimension of gate and up
        quantized = cls.like(experts, rank=rank)

        for field, weight in (("up", up), ("down", down)):
            stored_codes = quantized.get_parameter(NAMES[field])
            stored_scales = quantized.get_parameter(NAMES[f"{field}_scales"])
            # an expert at a time needs little memory besides the results
            for expert in range(experts.num_experts):
                codes, scales = nf4.quantize(weight[expert])
                stored_codes[expert].copy_(codes)
                stored_scales[expert].copy_(scales)

        # both are empty for experts without biases
        for field, biases in (("up_bias", up_bias), ("down_bias", common)):
            if biases:
                parameter = quantized.get_parameter(NAMES[field])
                parameter.copy_(biases[0].view(parameter.shape))
        return quantized

    @torch.no_grad()
    def merged(self) -> StackedExperts:
        """Return built-in experts, with what the adapters add to the numbers that the codes stand
        for; on one rank."""
        split_fields, common_fields = self.fields
        values: dict[str, Tensor] = {
            field: self.get_parameter(NAMES[field]) for field in (*split_fields, *common_fields)
        }
        for field in ("up", "down"):
            values[field] = nf4.dequantize(values[field], values[f"{field}_scales"], torch.float32)
        if any(self.form.ranks):
            # (E, C, H, r) @ (E, 1, r, D), by columns C: gate and up have one inner matrix
            values["up"] = values["up"] + values["up_outer"] @ values["up_inner"].unsqueeze(1)
            values["down"] = values["down"] + values["down_outer"] @ values["down_inner"]

        make = partial(GatedExperts, clamp=self.clamp) if self.gated else PlainExperts
        merged = make(
            dim=self.dim,
            hidden=values["down"].shape[2],
            num_experts=self.num_experts,
            activation=self.activation,
            bias=self.bias,
            device=values["up"].device,
            dtype=torch.float32,
        )
        split_names, common_names = merged.names
        names = (*split_names, *common_names)
        # names come in this order; without biases there are two
        for name, field in zip(names, ("up", "down", "up_bias", "down_bias")):
            parameter = merged.get_parameter(name)
            parameter.copy_(values[field].view(parameter.shape))
        return merged

    @property
    def names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        sharded, common = self.fields
        return tuple(NAMES[field] for field in sharded), tuple(NAMES[field] for field in common)

    def shard_dim(self, name: str) -> int | None:
        for field, dim in SPLIT.items():
            if NAMES[field] == name:
                return dim
        return None

    def frozen_weights(self) -> FrozenWeights:
        """Return the parameters; of a DTensor, this rank's part."""
        split, common = self.fields
        return FrozenWeights(**{name: self._local(NAMES[name]) for name in (*split, *common)})

    def reset_parameters(self, draw: Draw = draw_globally) -> None:
        """Initialise the adapters: A uniformly as `nn.Linear` is, B to zero. Frozen tensors come
        from a checkpoint."""
        for field in filter(self.form.has, ("up_inner", "down_inner")):
            parameter = self.get_parameter(NAMES[field])
            bound = parameter.shape[-1] ** -0.5
            draw(parameter, partial(nn.init.uniform_, a=-bound, b=bound), by_expert=True)
        for field in filter(self.form.has, ("up_outer", "down_outer")):
            nn.init.zeros_(self.get_parameter(NAMES[field]))

    def init_normal(self, std: float, out_std: float, draw: Draw = draw_globally) -> None:
        """Initialise the adapters as `reset_parameters` does, whatever the deviations."""
        self.reset_parameters(draw)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        """Move or convert the parameters; scales stay float32."""
        names = [NAMES["up_scales"], NAMES["down_scales"]]
        scales_before = [self.get_parameter(name).detach() for name in names]
        super()._apply(fn, recurse)
        for name, scales in zip(names, scales_before):
            applied = self.get_parameter(name)
            if applied.dtype != torch.float32:
                exact = nn.Parameter(scales.to(applied.device), requires_grad=False)
                setattr(self, name, exact)
        return self

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        """Save codes and scales flat, as other software stores them; DTensors as they are."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for field in STORED_FLAT:
            name = prefix + NAMES[field]
            is_dtensor = hasattr(destination[name], "placements")
            if not is_dtensor:
                destination[name] = destination[name].flatten(1)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *arguments: Any
    ) -> None:
        """Load weights that are stored flat in the shape of the module's own; DTensors as they
        are."""
        for field in STORED_FLAT:
            stored = state_dict.get(prefix + NAMES[field])
            own = self.get_parameter(NAMES[field])
            is_dtensor = hasattr(own, "placements")
            if is_dtensor or not isinstance(stored, Tensor):
                continue
            # another size stays as it is, so that torch names it in its error
            if stored.numel() == own.numel():
                state_dict[prefix + NAMES[field]] = stored.reshape(own.shape)
        super()._load_from_state_dict(state_dict, prefix, *arguments)
