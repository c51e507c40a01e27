"""A GPT whose feed-forward layers are MoE layers: pre-norm blocks, RMSNorm, rotary attention, tied embeddings.

`generate` samples from a trained model, token by token, with a key-value cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call

from moesaic.experts import EXPERTS, AbstractExperts
from moesaic.layer import MoE
from moesaic.models.attention import Attention, KeyValueCache, ShortConv
from moesaic.models.config import ModelConfig, MoEConfig
from moesaic.models.split import Norm, local_part, unembed
from moesaic.routing.routing import Routing
from moesaic.runtime.routing_cache import checkpoint


@dataclass(frozen=True)
class GPTOutput:
    """What a forward pass returns."""

    logits: Tensor
    """(batch, positions, vocab_size)."""
    loss: Tensor | None
    """(): mean cross-entropy in nats per token over the targets that are not -1; None without targets."""
    routings: list[Routing]
    """One per MoE layer, in order, without graphs."""


class Dense(nn.Module):
    """A dense feed-forward layer: the built-in experts with one expert.

    Args:
        dim: width of a token.
        hidden: inner width.
        kind: a key of `EXPERTS`.
    """

    def __init__(self, dim: int, hidden: int, kind: str) -> None:
        super().__init__()
        self.expert: AbstractExperts = EXPERTS[kind](dim, hidden, 1)

    def init_normal(self, std: float, out_std: float) -> None:
        """Draw the weights anew; see `AbstractExperts.init_normal`."""
        self.expert.init_normal(std, out_std)

    def forward(self, x: Tensor) -> Tensor:
        x_TD = x.reshape(-1, x.shape[-1])
        ends = torch.full((1,), len(x_TD), dtype=torch.int32, device=x.device)
        parameters = dict(self.expert.named_parameters())
        if not any(isinstance(parameter, DTensor) for parameter in parameters.values()):
            return self.expert(x_TD, None, ends).view(x.shape)
        # Split over ranks: each computes with its part of the inner width, and the caller sums.
        parts = {name: local_part(parameter) for name, parameter in parameters.items()}
        y: Tensor = functional_call(self.expert, parts, (x_TD, None, ends))
        return y.view(x.shape)


class TransformerBlock(nn.Module):
    """A short convolution, attention, then a dense or sparse feed-forward layer, each with a residual.

    Args:
        config: the model's shape.
        layer: the block's index.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.conv = ShortConv(config.dim, config.conv_width)
        self.attention_norm = Norm(config.dim)
        self.attention = Attention(config.dim, config.num_heads)
        self.ffn_norm = Norm(config.dim)
        self.ffn: MoE | Dense
        if config.is_sparse(layer):
            self.ffn = make_moe(config.dim, config.moe)
        else:
            self.ffn = Dense(config.dim, config.active_hidden, config.moe.experts)

    def forward(
        self, x: Tensor, tokens: Tensor | None, mask: Tensor | None, cache: KeyValueCache | None
    ) -> tuple[Tensor, Routing | None]:
        x = self.attend(x, cache)
        if isinstance(self.ffn, MoE):
            y, routing = self.ffn(self.ffn_norm(x), mask=mask, token_ids=tokens, return_routing=True)
            return x + y, without_graph(routing)
        return x + self.ffn(self.ffn_norm(x)), None

    def attend(self, x: Tensor, cache: KeyValueCache | None) -> Tensor:
        """Return what stands in front of the feed-forward layer's norm: (batch, positions, dim), as x is."""
        x = self.conv(x, None if cache is None else cache.recent)
        attended: Tensor = x + self.attention(self.attention_norm(x), cache)
        return attended


def without_graph(routing: Routing) -> Routing:
    """Return a record without a graph: FSDP would start its backward pass at every output of a block that has one."""
    return replace(routing, weight=routing.weight.detach())


class GPT(nn.Module):
    """A decoder-only language model.

    Weights are drawn from N(0, 0.02), those that write to the residual stream from N(0, 0.02 / sqrt(2 * num_layers))
    as GPT-2 does. Routers and experts draw their own with these deviations (`init_normal`).

    Args:
        config: its shape.
        vocab_size: rows of the embedding, which is also the output matrix.
    """

    block: ClassVar[type[TransformerBlock]] = TransformerBlock
    """What its blocks are."""

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        self.config = config
        self.vocab_size = vocab_size
        self.embedding = nn.Embedding(vocab_size, config.dim)
        self.blocks = nn.ModuleList(self.block(config, layer) for layer in range(config.num_layers))
        self.norm = Norm(config.dim)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw all matrices anew; see the class."""
        std = 0.02
        into_residual = std / math.sqrt(2 * self.config.num_layers)
        self.embedding.weight.normal_(std=std)
        for block in self.blocks:
            assert isinstance(block, TransformerBlock)
            block.attention.qkv.weight.normal_(std=std)
            block.attention.out.weight.normal_(std=into_residual)
            block.ffn.init_normal(std, into_residual)

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        caches: list[KeyValueCache] | None = None,
    ) -> GPTOutput:
        """Predict the next token at every position.

        Args:
            tokens: (batch, positions) int64.
            targets: (batch, positions) int64, -1 where there is nothing to predict.
            mask: (batch, positions) bool, False for padding, which is kept out of routing.
            caches: one per block when decoding; tokens continue what they hold. Activations are then kept, never recomputed.
        """
        x = self.embedding(tokens)
        routings: list[Routing] = []
        for index, block in enumerate(self.blocks):
            assert isinstance(block, TransformerBlock)
            x, routing = self.run_block(block, x, tokens, mask, None if caches is None else caches[index])
            if routing is not None:
                routings.append(routing)
        logits = unembed(self.norm(x), self.embedding.weight)
        return GPTOutput(logits, None if targets is None else self.loss(logits, targets), routings)

    def run_block(
        self,
        block: TransformerBlock,
        x: Tensor,
        tokens: Tensor | None,
        mask: Tensor | None,
        cache: KeyValueCache | None,
        **more: Any,
    ) -> tuple[Tensor, Routing | None]:
        """Run a block, without keeping its activations where the model recomputes them; arguments as of the block."""
        # A recomputation would extend the cache a second time.
        recompute = self.config.checkpoint_activations and cache is None and torch.is_grad_enabled()
        run = partial(checkpoint, block) if recompute else block
        result: tuple[Tensor, Routing | None] = run(x, tokens, mask, cache, **more)
        return result

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy over the targets that are not -1, in at least float32.

        Args:
            logits: (batch, positions, vocab_size).
            targets: (batch, positions) int64.
        """
        return token_loss(logits, targets)

    def num_parameters(self) -> int:
        """Return how many parameters the model has."""
        return sum(parameter.numel() for parameter in self.parameters())

    def num_active_parameters(self) -> int:
        """Return how many parameters one token passes: all but the experts that it is not routed to."""
        total = 0
        for module in self.modules():
            own = sum(parameter.numel() for parameter in module.parameters(recurse=False))
            total += own
        for module in self.modules():
            if isinstance(module, MoE):
                expert = sum(parameter.numel() for parameter in module.experts.parameters())
                total -= expert * (module.num_experts - module.top_k) // module.num_experts
        return total

    def flops_per_token(self, length: int) -> float:
        """Return the floating-point operations of one token, forward and backward, at `length` positions.

        Six per active parameter (Kaplan et al. 2020, section 2.1; the embedding counts once, as output matrix) and
        12 * num_layers * dim * length / 2 for causal attention.
        """
        return flops_per_token(self.config, self.num_active_parameters(), length)


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy; see `GPT.loss`."""
    precise = logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(precise, targets.flatten(), ignore_index=-1)


def flops_per_token(config: ModelConfig, active_parameters: int, length: int) -> float:
    """Return the operations of one token through a model of so many active parameters; see `GPT.flops_per_token`."""
    return 6.0 * active_parameters + 6.0 * config.num_layers * config.dim * length


def make_moe(dim: int, config: MoEConfig) -> MoE:
    """Build the MoE layer that a config describes."""
    return MoE(
        dim,
        config.hidden,
        config.num_experts,
        config.top_k,
        router=config.router,
        router_options=config.router_options,
        experts=config.experts,
        capacity=config.make_capacity(),
        losses=config.make_losses(),
        shared_hidden=config.shared_hidden,
    )


@torch.inference_mode()
def generate(
    model: GPT, prompt: list[int], *, num_tokens: int, temperature: float = 1.0, top_k: int | None = None, seed: int = 0
) -> Iterator[int]:
    """Yield the ids that continue a prompt.

    When the context is full, the later half of it is read again as a fresh context.

    Args:
        model: in evaluation mode.
        prompt: at least one id.
        num_tokens: ids to yield.
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: sample among the so many likeliest tokens; None among all.
        seed: of the draws.
    """
    device = model.embedding.weight.device
    generator = torch.Generator(device="cpu").manual_seed(seed)
    limit = model.config.seq_len
    context = list(prompt)[-limit:]
    caches = [KeyValueCache() for _ in model.blocks]
    pending = context
    for _ in range(num_tokens):
        if caches[0].length + len(pending) > limit:
            caches = [KeyValueCache() for _ in model.blocks]
            context = context[-max(limit // 2, 1) :]
            pending = context
        logits = model(torch.tensor([pending], device=device), caches=caches).logits[0, -1].float().cpu()
        token = _draw(logits, temperature, top_k, generator)
        context.append(token)
        pending = [token]
        yield token


def _draw(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    if top_k is not None and top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], float("-inf"))
    probabilities = ((logits - logits.max()).double() / temperature).softmax(-1)  # no temperature overflows it
    return int(torch.multinomial(probabilities, 1, generator=generator))
