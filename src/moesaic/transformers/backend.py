"""`experts_implementation="moesaic"`: what a model of transformers calls in place of its experts' loop."""

from __future__ import annotations

import warnings
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from moesaic.kernels.permute import sort_by_expert
from moesaic.routing.capacity import count
from moesaic.transformers.experts import FLAGS, refusal, run_tokens


def experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Run a module's experts on Moesaic's kernels; where those cannot, say so once and run the module's own loop.

    Args:
        self: the experts module.
        hidden_states: (tokens, dim).
        top_k_index: (tokens, K) experts. Where transformers spread the experts, `num_experts` stands for one elsewhere.
        top_k_weights: (tokens, K) routing weights.

    Returns:
        (tokens, dim) in the dtype of `hidden_states`.
    """
    reason = refusal(self)
    if reason is not None:
        say(f"{type(self).__name__} {reason}: it runs transformers' own loop over experts")
        own: Tensor = type(self).forward.__wrapped__(self, hidden_states, top_k_index, top_k_weights)
        return own
    num_tokens, top_k = top_k_index.shape
    expert, weight = top_k_index.reshape(-1).long(), top_k_weights.reshape(-1)
    token = torch.arange(num_tokens, device=expert.device).repeat_interleave(top_k, output_size=len(expert))
    if self._is_expert_parallel:
        here = (expert < self.num_experts).nonzero().squeeze(1)
        token, expert, weight = (each.index_select(0, here) for each in (token, expert, weight))
    counts = count(expert, None, self.num_experts)
    permutation = sort_by_expert(token, expert, counts, num_tokens, None if self._is_expert_parallel else top_k)
    return run_tokens(self, hidden_states, weight, permutation)


def tell_where_no_experts_are() -> None:
    """Let loading a model and `set_experts_implementation` say where "moesaic" changes nothing, which transformers does not."""
    load, choose = PreTrainedModel.from_pretrained.__func__, PreTrainedModel.set_experts_implementation

    @wraps(load)
    def from_pretrained(cls: type, *args: Any, **options: Any) -> Any:
        loaded = load(cls, *args, **options)
        _tell(loaded[0] if isinstance(loaded, tuple) else loaded)
        return loaded

    @wraps(choose)
    def set_experts_implementation(self: Any, experts_implementation: Any) -> None:
        choose(self, experts_implementation)
        if experts_implementation == "moesaic":
            _tell(self, is_asked=True)

    PreTrainedModel.from_pretrained = classmethod(from_pretrained)
    PreTrainedModel.set_experts_implementation = set_experts_implementation


def _tell(model: Any, is_asked: bool = False) -> None:
    is_asked = is_asked or getattr(model.config, "_experts_implementation", None) == "moesaic"
    if is_asked and not any(hasattr(module, FLAGS[0]) for module in model.modules()):
        name = type(model).__name__
        say(f'{name} has no experts with transformers\' interface: experts_implementation="moesaic" changes nothing')


def say(line: str) -> None:
    """Tell the user one line; Python shows the same line once."""
    warnings.warn(f"moesaic: {line}", stacklevel=3)
