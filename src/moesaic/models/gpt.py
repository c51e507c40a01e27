"""A decoder, `GPT`, built from one configurable block with a dense or MoE feed-forward layer.

`generate` samples from a trained one, token by token, with a key-value cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call

from moesaic.experts import EXPERTS, AbstractExperts
from moesaic.initial_values import Draw, draw_globally
from moesaic.layer import MoE
from moesaic.models.attention import Attention, KeyValueCache, ShortConv
from moesaic.models.config import ModelConfig, MoEConfig
from moesaic.models.split import (
    LayerNorm,
    Norm,
    RowLinear,
    StackedLinear,
    bias_share,
    local_part,
    unembed,
)
from moesaic.routing.routing import Routing
from moesaic.runtime.routing_cache import checkpoint
from moesaic.shapes import BlockConfig


class GPTOutput(NamedTuple):
    """The result of a forward pass: a tuple, since FSDP2 before torch 2.12 finds no tensors in a
    dataclass."""

    logits: Tensor
    """(batch, positions, vocab_size)."""
    loss: Tensor | None
    """(): mean cross-entropy in nats per token over the targets that are not -1; None without
    targets."""
    routings: list[Routing]
    """The routing of each MoE layer, in order, detached from autograd and without logits."""


class Dense(nn.Module):
    """A dense feed-forward layer, made of built-in experts with one expert.

    Args:
        dim: width of the hidden states.
        hidden: inner width.
        kind: a key of `EXPERTS`.
        bias: add biases.
    """

    def __init__(self, dim: int, hidden: int, kind: str, bias: bool = False) -> None:
        super().__init__()
        make: Callable[..., AbstractExperts] = EXPERTS[kind]
        self.expert = make(dim, hidden, 1, bias=bias)  # one expert

    def init_normal(self, std: float, out_std: float, draw: Draw = draw_globally) -> None:
        """Draw the weights anew; see `AbstractExperts.init_normal`."""
        self.expert.init_normal(std, out_std, draw)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output for `x`; with sharded weights, this rank's part of it, which the caller
        sums."""
        x_TD = x.reshape(-1, x.shape[-1])
        # all rows belong to the one expert, and without routing weights (None) each counts once
        ends = torch.full((1,), len(x_TD), dtype=torch.int32, device=x.device)
        parameters = dict(self.expert.named_parameters())
        if not any(isinstance(parameter, DTensor) for parameter in parameters.values()):
            return self.expert(x_TD, None, ends).view(x.shape)
        # The weights are sharded: each rank computes with its part of the inner width, and the
        # caller sums.
        parts = {name: local_part(parameter) for name, parameter in parameters.items()}
        if "b2" in parts:  # no rank has a part of it, so each adds a share
            parts["b2"] = bias_share(parameters["b2"])
        y: Tensor = functional_call(self.expert, parts, (x_TD, None, ends))
        return y.view(x.shape)


def make_norm(dim: int, block: BlockConfig) -> Norm | LayerNorm:
    """Make a norm of a block's kind."""
    if block.norm == "rms":
        return Norm(dim, eps=block.norm_eps)
    # unlike RMSNorm, torch's LayerNorm takes no None for its own default
    return LayerNorm(dim) if block.norm_eps is None else LayerNorm(dim, eps=block.norm_eps)


class TransformerBlock(nn.Module):
    """A short convolution, which is optional, attention and a dense or MoE feed-forward layer."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        dim = config.dim
        block = config.block
        self.post_norm = block.norm == "post_layer"
        """Whether norms stand behind the sums of the residual stream; if not, before the layers."""
        self.dropout = block.dropout
        self.conv = ShortConv(dim, config.conv_width) if config.conv_width > 1 else None
        self.attention_norm = make_norm(dim, block)
        self.attention = Attention(dim, config.num_heads, block)
        self.ffn_norm = make_norm(dim, block)
        self.ffn: MoE | Dense  # the feed-forward layer
        if config.is_sparse(layer):
            self.ffn = make_moe(dim, config.moe)
        else:
            self.ffn = Dense(
                dim, hidden=config.active_hidden, kind=config.moe.experts, bias=block.bias
            )

    def forward(
        self, x: Tensor, tokens: Tensor | None, mask: Tensor | None, cache: KeyValueCache | None
    ) -> tuple[Tensor, Routing | None]:
        """Run the block: (batch, positions, dim) -> the same shape, and the MoE layer's routing."""
        return self.feed_forward(self.attend(x, cache), tokens, mask)

    def feed_forward(
        self, x: Tensor, tokens: Tensor | None, mask: Tensor | None
    ) -> tuple[Tensor, Routing | None]:
        """Apply the feed-forward layer: (batch, positions, dim) -> the same shape; an MoE layer
        also returns its routing."""
        if not isinstance(self.ffn, MoE):
            return self.add(x, self.ffn_norm, self.ffn), None
        routings: list[Routing] = []

        def moe(y: Tensor) -> Tensor:
            """Run the MoE layer and note its routing."""
            y, routing = self.ffn(y, mask=mask, token_ids=tokens, return_routing=True)
            routings.append(detached_routing(routing))
            return y

        x = self.add(x, self.ffn_norm, moe)
        return x, routings[0]

    def attend(self, x: Tensor, cache: KeyValueCache | None) -> Tensor:
        """Apply the convolution and self-attention: (batch, positions, dim) -> the same shape."""
        if self.conv is not None:
            x = self.conv(x, cache)
        return self.add(x, self.attention_norm, partial(self.attention, cache=cache))

    def add(self, x: Tensor, norm: nn.Module, layer: Callable[[Tensor], Tensor]) -> Tensor:
        """Apply a layer with its norm and add its output to the residual stream `x`. The norm is of
        the layer's input or, with `post_norm`, of the sum."""
        y = layer(x if self.post_norm else norm(x))
        if self.dropout:
            y = F.dropout(y, self.dropout, self.training)
        x = x + y
        return norm(x) if self.post_norm else x


class LearnedPositions(nn.Embedding):
    """Adds a learned vector per position to (batch, positions, dim)."""

    def __init__(self, seq_len: int, dim: int) -> None:
        super().__init__(seq_len, dim)

    def forward(self, x: Tensor, start: int = 0) -> Tensor:
        return x + self.weight[start : start + x.shape[1]]


def detached_routing(routing: Routing) -> Routing:
    """Return a routing without graph or logits: FSDP would start its backward pass at every block
    output that has a graph."""
    return replace(routing, weight=routing.weight.detach(), logits=None)


class GPT(nn.Module):
    """A language model that predicts the next token.

    Weights are drawn from N(0, 0.02), and matrices that write to the residual stream from N(0, 0.02
    / sqrt(2 * num_layers)), as in GPT-2. Routers and experts draw their own weights with these
    deviations (`init_normal`).

    Args:
        vocab_size: rows of the embedding, which is also the output matrix unless
            `config.block.tied` is false.
    """

    block: ClassVar[type[TransformerBlock]] = TransformerBlock
    """The class of the model's blocks."""
    last_norms: ClassVar[tuple[str, ...]] = ("norm",)
    """The norms behind the last block of each stack."""

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        self.config = config
        self.vocab_size = vocab_size
        dim = config.dim
        block = config.block
        # norms behind the sums: then one follows the embedding, and none the last block
        post_norm = block.norm == "post_layer"
        device = torch.get_default_device()
        with torch.device("meta"):  # each weight is drawn once, below
            self.embedding = nn.Embedding(vocab_size, dim)
            self.positions = (
                LearnedPositions(config.seq_len, dim) if block.positions == "learned" else None
            )
            self.embedding_norm = make_norm(dim, block) if post_norm else nn.Identity()
            self.blocks = nn.ModuleList(
                self.block(config, layer) for layer in range(config.num_layers)
            )
            self.norm = nn.Identity() if post_norm else make_norm(dim, block)
            self.unembedding = None if block.tied else nn.Linear(dim, vocab_size, bias=False)
        if device.type != "meta":
            self.to_empty(device=device)
            self.reset_parameters()

    def reset_parameters(self, draw: Draw = draw_globally) -> None:
        """Draw all weights anew, as described in the class docstring; see `reset_weights`."""
        reset_weights(self, self.config.num_layers, draw)

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
            mask: (batch, positions) bool, False for padding, which is excluded from routing.
            caches: a cache per block for decoding; `tokens` continue the cached positions.
                Activations are then not recomputed.
        """
        start = 0 if caches is None else caches[0].length
        x = embed(self, tokens, start)
        x, routings = self.run_blocks(range(len(self.blocks)), x, tokens, mask, caches)
        logits = self.unembed(self.norm(x))
        loss = None if targets is None else self.loss(logits, targets)
        return GPTOutput(logits, loss, routings)

    def unembed(self, x: Tensor) -> Tensor:
        """Return the logits, (batch, positions, vocab_size)."""
        return unembed(x, (self.unembedding or self.embedding).weight)

    def run_blocks(
        self,
        layers: Iterable[int],
        x: Tensor,
        tokens: Tensor | None,
        mask: Tensor | None,
        caches: list[KeyValueCache] | None = None,
        **block_arguments: Any,
    ) -> tuple[Tensor, list[Routing]]:
        """Run the blocks with these indices in order; return the result and the routings of their
        MoE layers. `caches` has one per block of the model; other arguments are passed to
        blocks."""
        routings: list[Routing] = []
        for index in layers:
            block = self.blocks[index]
            assert isinstance(block, TransformerBlock)
            cache = None if caches is None else caches[index]
            x, routing = self.run_block(block, x, tokens, mask, cache, **block_arguments)
            if routing is not None:
                routings.append(routing)
        return x, routings

    def run_block(
        self,
        block: TransformerBlock,
        x: Tensor,
        tokens: Tensor | None,
        mask: Tensor | None,
        cache: KeyValueCache | None,
        **block_arguments: Any,
    ) -> tuple[Tensor, Routing | None]:
        """Run a block, with activation checkpointing if the config asks for it; arguments are those
        of the block."""
        # Recomputation would extend the cache a second time.
        recompute = self.config.checkpoint_activations and cache is None and torch.is_grad_enabled()
        run = partial(checkpoint, block) if recompute else block
        result: tuple[Tensor, Routing | None] = run(x, tokens, mask, cache, **block_arguments)
        return result

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy over the targets that are not -1, in at least float32.

        Args:
            logits: (batch, positions, vocab_size).
            targets: (batch, positions) int64.
        """
        return token_loss(logits, targets)

    def num_parameters(self) -> int:
        """Return the number of parameters; of weights in NF4, that of the weights, without their
        scales."""
        return _number_of(self)

    def num_active_parameters(self) -> int:
        """Return the number of parameters that are used for one token: all but those of experts
        that it is not routed to."""
        total = self.num_parameters()
        for module in self.modules():
            if isinstance(module, MoE):
                num_idle = module.num_experts - module.top_k
                total -= _number_of(module.experts) * num_idle // module.num_experts
        return total


def _number_of(module: nn.Module) -> int:
    """Return the number of parameters of a module; a byte of NF4 codes stands for two weights."""
    total = 0
    for name, parameter in module.named_parameters():
        is_of_codes = parameter.dtype == torch.uint8
        if not name.endswith("_absmax"):  # the scales of NF4
            total += 2 * parameter.numel() if is_of_codes else parameter.numel()
    return total


def reset_weights(model: nn.Module, num_layers: int, draw: Draw = draw_globally) -> None:
    """Set every parameter and buffer of a `GPT`, or of a part of one, to its first value; see
    `GPT`.

    Args:
        model: the model, on its device, perhaps sharded.
        num_layers: number of layers of the full model.
        draw: what the numbers come from.
    """
    std = 0.02
    into_residual = std / math.sqrt(2 * num_layers)
    if isinstance(model, MoE | Dense):
        model.init_normal(std, into_residual, draw)
        return
    if isinstance(model, nn.Embedding | nn.Linear | StackedLinear):
        weight_std = into_residual if isinstance(model, RowLinear) else std
        draw(model.weight, partial(nn.init.normal_, std=weight_std))
        bias: Tensor | None = getattr(model, "bias", None)
        if bias is not None:
            nn.init.zeros_(bias)
    elif isinstance(model, Norm | LayerNorm | ShortConv | Attention):
        model.reset_parameters()
    for child in model.children():
        reset_weights(child, num_layers, draw)


def embed(model: Any, tokens: Tensor, start: int = 0) -> Tensor:
    """Return the input of the first block, (batch, positions, dim).

    Args:
        model: a `GPT`, or the first pipeline stage of one.
        tokens: (batch, positions) int64.
        start: the number of the first position.
    """
    x = model.embedding(tokens)
    x = model.embedding_norm(x if model.positions is None else model.positions(x, start))
    dropout = model.config.block.dropout
    return F.dropout(x, dropout, model.training) if dropout else x


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy; see `GPT.loss`."""
    precise = logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(precise, targets.flatten(), ignore_index=-1)


def flops_per_token(config: ModelConfig, active_parameters: int, length: int) -> float:
    """Return the FLOPs of one token, forward and backward, in a sequence of `length` positions.

    They are six per active parameter (Kaplan et al. 2020, section 2.1; the embedding counts once,
    as output matrix) plus 12 * num_layers * dim * length / 2 for causal attention.
    """
    return 6.0 * active_parameters + 6.0 * config.num_layers * config.dim * length


def make_moe(dim: int, config: MoEConfig) -> MoE:
    """Build the MoE layer for a configuration."""
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
    model: GPT,
    prompts: Sequence[Sequence[int]],
    *,
    num_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    seed: int = 0,
) -> list[list[int]]:
    """Sample `num_tokens` token ids that continue each prompt.

    All prompts advance together by one position at a time, so prompts of different lengths need no
    padding in front. Each prompt has its own random generator, so its result does not depend on the
    rest of the batch while all fit the context. When the context is full, its second half is read
    again as a new context.

    Args:
        model: a decoder in evaluation mode.
        prompts: token ids, at least one per prompt.
        num_tokens: tokens to sample per prompt.
        temperature: divides the logits; 0 always takes the likeliest token.
        top_k: sample among this many likeliest tokens; None for all tokens.
        top_p: sample among the likeliest tokens that together have this probability.
        seed: seed of each prompt's random generator.
    """
    device = model.embedding.weight.device
    generators = [torch.Generator(device="cpu").manual_seed(seed) for _ in prompts]
    limit = model.config.seq_len
    rows = [list(prompt) for prompt in prompts]
    ends = [len(row) + num_tokens for row in rows]  # length of each row once it is complete
    length = min(map(len, rows))  # positions that have been read after this round
    pending = min(length, limit)  # the last positions of these, which are read in this round
    caches = [KeyValueCache() for _ in model.blocks]
    while length < max(ends):
        if caches[0].length + pending > limit:  # full: read the second half of it anew
            caches = [KeyValueCache() for _ in model.blocks]
            pending = max(limit // 2, 1)
        batch = []
        for row in rows:
            padding = [0] * (length - len(row))  # of rows that have ended
            batch.append((row + padding)[length - pending : length])
        output = model(torch.tensor(batch, device=device), caches=caches)
        last_logits = output.logits[:, -1].float().cpu()
        for row, end, logits, generator in zip(rows, ends, last_logits, generators):
            is_in_prompt = length < len(row)
            has_ended = length >= end
            if not is_in_prompt and not has_ended:
                row.append(_draw(logits, temperature, top_k, top_p, generator))
        length = length + 1
        pending = 1
    return [row[len(prompt) :] for row, prompt in zip(rows, prompts)]


def _draw(
    logits: Tensor, temperature: float, top_k: int | None, top_p: float, generator: torch.Generator
) -> int:
    """Draw a token from the logits of a position, (vocab_size,); see `generate`."""
    if temperature == 0:
        return int(logits.argmax())
    if top_k is not None and top_k < len(logits):
        smallest_kept = logits.topk(top_k).values[-1]
        logits = logits.masked_fill(logits < smallest_kept, float("-inf"))
    # without the largest logit, small temperatures do not overflow
    probabilities = ((logits - logits.max()).double() / temperature).softmax(-1)
    if top_p < 1:
        descending, order = probabilities.sort(descending=True, stable=True)
        likelier = descending.cumsum(0) - descending  # probability of all likelier tokens
        left_out = order[likelier >= top_p]
        probabilities[left_out] = 0
    return int(torch.multinomial(probabilities, 1, generator=generator))
