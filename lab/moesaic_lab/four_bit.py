"""Experts in NF4 with PEFT's adapters, as `moesaic finetune` trains them, in the form that
`moesaic certify` takes.

The adapters have full rank and hold what NF4 rounded away: A is the identity, and B the difference.
So the adapted experts are those of the dense reference, and the gradient of B is that of their
weights: all that adapters depend on is held against float64. Widths are padded with zeros to one
block of NF4.

moesaic certify moesaic_lab.four_bit:FourBitAdapters
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import peft
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from moesaic.kernels import nf4
from moesaic.testing.certify import AbstractRoutedExperts, LayerSpec, MoEWeights
from moesaic.transformers import MoesaicEP, adopt_adapters
from moesaic.transformers.lora import scales_name

WIDTH = nf4.BLOCK
"""Width of tokens and of experts after padding."""


class FourBitAdapters(AbstractRoutedExperts):
    """Mixtral's experts of transformers in NF4 on the ranks, with adapters of PEFT."""

    def __init__(self, spec: LayerSpec) -> None:
        """Quantize this rank's experts, and give their adapters what rounding took."""
        modeling: Any = import_module("transformers.models.mixtral.modeling_mixtral")
        own = spec.weights.owned(spec.group)
        (_, self._hidden, self._dim) = spec.weights.w1.shape
        config = transformers.MixtralConfig(
            hidden_size=WIDTH,
            intermediate_size=WIDTH,
            num_local_experts=own.num_experts,
            experts_implementation="moesaic",
        )
        experts = modeling.MixtralExperts(config)
        whole = {"gate_up_proj": _fused(spec.weights), "down_proj": _padded(spec.weights.w2)}

        # The frozen weights are this rank's codes; `rest` is what rounding took from all experts.
        rest: dict[str, Tensor] = {}
        for name, mine in (("gate_up_proj", _fused(own)), ("down_proj", _padded(own.w2))):
            codes, scales = nf4.quantize(mine)
            setattr(experts, name, nn.Parameter(codes, requires_grad=False))
            setattr(experts, scales_name(name), nn.Parameter(scales, requires_grad=False))
            getattr(experts, name).ds_shape = whole[name].shape  # where PEFT looks for it
            rounded = nf4.dequantize(*nf4.quantize(whole[name]), torch.float32)
            rest[name] = whole[name] - rounded
        experts._is_expert_parallel = True
        holder = nn.ModuleDict({"experts": experts})
        lora = peft.LoraConfig(
            r=WIDTH,
            lora_alpha=WIDTH,
            target_modules=[],
            target_parameters=[f"experts.{name}" for name in rest],
        )
        model: Any = peft.get_peft_model(holder, lora)

        # PEFT wraps each adapted parameter in a module that has its name.
        modules: list[Any] = list(model.modules())
        self._wrappers = {
            module.parameter_name: module for module in modules if hasattr(module, "parameter_name")
        }
        for name, wrapper in self._wrappers.items():
            _fill(wrapper, rest[name])
        mesh = init_device_mesh(
            "cpu", (1, spec.group.size(), 1), mesh_dim_names=("copies", "ep", "tp")
        )
        self.run_on_ranks = MoesaicEP(experts, mesh["ep"], mesh["tp"])
        adopt_adapters(model)

    def run(self, x: Tensor, experts: Tensor, gates: Tensor) -> Tensor:
        """Run the adapted experts."""
        padded = F.pad(x, (0, WIDTH - self._dim))
        y = self.run_on_ranks(padded, experts, gates)
        return y[:, : self._dim]

    def gradients(self) -> MoEWeights:
        """Return the gradients of the adapters' B, which are those of the weights."""
        gate, up = self._of("gate_up_proj").chunk(2, 1)
        down = self._of("down_proj")
        hidden = self._hidden
        dim = self._dim
        w1 = gate[:, :hidden, :dim]
        w3 = up[:, :hidden, :dim]
        w2 = down[:, :dim, :hidden]
        return MoEWeights(w1, w3, w2)

    def _of(self, name: str) -> Tensor:
        """Return the gradient of B, (experts, out, in), of the sum of the ranks' losses, of which
        adapters get the mean."""
        weight = self._wrappers[name].lora_B["default"].weight
        gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
        part = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        ranks = weight.device_mesh.size() if isinstance(weight, DTensor) else 1
        # PEFT's B is (out, in * experts), in which experts vary fastest.
        return part.view(len(part), WIDTH, -1).permute(2, 0, 1) * ranks


def _padded(weight: Tensor) -> Tensor:
    """Return matrices with zeros up to the width, in float32."""
    _, rows, columns = weight.shape
    added_rows = WIDTH - rows
    added_columns = WIDTH - columns
    return F.pad(weight.float(), (0, added_columns, 0, added_rows))


def _fused(weights: MoEWeights) -> Tensor:
    """Return gate and up as one matrix for each expert."""
    return torch.cat([_padded(weights.w1), _padded(weights.w3)], 1)


@torch.no_grad()
def _fill(wrapper: Any, rest: Tensor) -> None:
    """Make an adapter add `rest`, (experts, out, in), to its weights."""
    identities = torch.eye(WIDTH).repeat(len(rest), 1)
    differences = rest.permute(1, 2, 0).flatten(1)
    wrapper.lora_A["default"].weight.copy_(identities)
    wrapper.lora_B["default"].weight.copy_(differences)
