"""An encoder (BERT) and an encoder-decoder (the first Transformer), made of the decoder's parts.

The encoder predicts hidden tokens. The encoder-decoder maps the first half of each sequence, the
source, to the second half, the target. Token id 0 pads both halves, starts the target and ends it,
so one array of ids holds a pair.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moesaic.errors import InputError
from moesaic.models.attention import Attention, KeyValueCache, ShortConv
from moesaic.models.config import ModelConfig
from moesaic.models.gpt import GPT, GPTOutput, TransformerBlock, embed, make_norm
from moesaic.models.split import StackedLinear
from moesaic.routing.routing import Routing
from moesaic.shapes import BlockConfig

PADDING = 0
"""The token id that pads sequences, and starts and ends targets."""


class FullAttention(Attention):
    """Multi-head attention to all positions of a sequence.

    Args:
        cross: compute keys and values from another sequence than the queries.
    """

    def __init__(
        self, dim: int, num_heads: int, block: BlockConfig, *, cross: bool = False
    ) -> None:
        super().__init__(dim, num_heads, block)
        # between two sequences, positions have no distance
        self.rotates = self.rotates and not cross
        if cross and self.qkv is not None:  # else q and kv are apart already
            self.qkv = None
            self.q = StackedLinear(1, dim, num_heads * self.width, block.bias)
            self.kv = StackedLinear(2, dim, num_heads * self.width, block.bias)
        if cross and self.kv is not None:
            self.kv.input_is_whole = True  # the encoder's output

    def forward(
        self,
        x: Tensor,
        cache: KeyValueCache | None = None,
        *,
        memory: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Return the attention output, (batch, positions, dim).

        Args:
            x: (batch, positions, dim).
            cache: unused; all positions are computed at once.
            memory: (batch, keys, dim), the sequence that cross attention attends to.
            mask: (batch, keys) bool, False for keys that no position attends to.
        """
        q, k, v = self.project(x, x if memory is None else memory)
        # (batch, heads, queries, keys)
        attention_mask = None if mask is None else mask[:, None, None, :]
        return self.attend(q, k, v, attention_mask, is_causal=False)


class CentredConv(ShortConv):
    """A short convolution over the positions around each one: `y_t = x_t + sum_k w_k * x_{t-k}`, k
    through 1, -1, 2, -2, ..."""

    def forward(
        self, x: Tensor, cache: KeyValueCache | None = None, *, mask: Tensor | None = None
    ) -> Tensor:
        """Mix each position with its neighbours; those with a mask of False, (batch, positions),
        are read as zeros. All positions are computed at once, so that `cache` is unused."""
        offsets = []
        for number in range(len(self.taps)):  # 1, -1, 2, -2, ...
            distance = number // 2 + 1
            offsets.append(distance if number % 2 == 0 else -distance)
        before = max(offsets)
        after = -min(*offsets, 0)
        length = x.shape[1]
        masked = x if mask is None else x * mask[..., None]
        padded = F.pad(masked, (0, 0, before, after))
        y = x
        for offset, tap in zip(offsets, self.taps):
            start = before - offset
            y = y + padded[:, start : start + length] * tap.to(x.dtype)
        return y


class PaperBlock(TransformerBlock):
    """A block of an encoder, or of the decoder that reads an encoder's output."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        dim = config.dim
        heads = config.num_heads
        block = config.block
        self.decodes = config.is_decoder(layer)
        self.cross_norm = make_norm(dim, block) if self.decodes else None
        self.cross = FullAttention(dim, heads, block, cross=True) if self.decodes else None
        if not self.decodes:
            self.attention = FullAttention(dim, heads, block)
            self.conv = None if self.conv is None else CentredConv(dim, config.conv_width)

    def forward(
        self,
        x: Tensor,
        tokens: Tensor | None,
        mask: Tensor | None,
        cache: KeyValueCache | None,
        memory: Tensor | None = None,
        memory_mask: Tensor | None = None,
    ) -> tuple[Tensor, Routing | None]:
        """Return the output, (batch, positions, dim), and the routing of an MoE layer.

        Args:
            x: (batch, positions, dim).
            tokens: (batch, positions) ids, for routers that read them.
            mask: (batch, positions) bool, False for padding.
            cache: of the decoder's attention.
            memory: the encoder's output, which a decoder's block attends to.
            memory_mask: as `mask`, for the memory.
        """
        if self.decodes:
            x = self.attend(x, cache)
        else:
            if self.conv is not None:
                x = self.conv(x, mask=mask)
            x = self.add(x, self.attention_norm, partial(self.attention, mask=mask))
        if self.cross is not None and self.cross_norm is not None:
            x = self.add(x, self.cross_norm, partial(self.cross, memory=memory, mask=memory_mask))
        return self.feed_forward(x, tokens, mask)


class Encoder(GPT):
    """A model that predicts hidden tokens from all others; `mask` is False for padding, to which no
    position attends."""

    block = PaperBlock


class EncoderDecoder(GPT):
    """A transformer that maps one sequence to another. The first half of its blocks is the encoder.

    Args:
        vocab_size: rows of the embedding, which encoder and decoder share.
    """

    block = PaperBlock
    last_norms = ("norm", "memory_norm")

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__(config, vocab_size)
        block = config.block
        self.memory_norm = (
            nn.Identity() if block.norm == "post_layer" else make_norm(config.dim, block)
        )

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        caches: list[KeyValueCache] | None = None,
    ) -> GPTOutput:
        """Predict the second half of each sequence, the target, from the first half, the source.

        Args:
            tokens: (batch, positions) int64, padded with 0; at most `seq_len` positions. The first
                `seq_len / 2` are the source.
            targets: (batch, positions) int64, the next token at each position; the source and
                padding do not count.
            mask: must be None; it is derived from the padding.
            caches: must be None; decoding runs all tokens again.

        Returns:
            The logits have the positions of the second half.
        """
        if mask is not None or caches is not None:
            raise InputError(
                "an encoder_decoder takes neither mask nor caches: pad with id 0, pass all tokens"
            )
        split = self.config.seq_len // 2
        source = tokens[:, :split]
        target = tokens[:, split:]
        source_mask = source != PADDING
        target_mask = _has_next_token(target)
        middle = len(self.blocks) // 2
        memory, encoder_routings = self.run_blocks(
            range(middle), embed(self, source), source, source_mask
        )
        x, decoder_routings = self.run_blocks(
            range(middle, len(self.blocks)),
            embed(self, target),
            target,
            target_mask,
            memory=self.memory_norm(memory),
            memory_mask=source_mask,
        )
        logits = self.unembed(self.norm(x))
        loss = None
        if targets is not None:
            counted_targets = targets[:, split:].masked_fill(~target_mask, -1)
            loss = self.loss(logits, counted_targets)
        return GPTOutput(logits, loss, encoder_routings + decoder_routings)

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the mean over sequences of each one's mean loss over targets that are not -1; the
        same on every mesh."""
        dtype = torch.promote_types(logits.dtype, torch.float32)
        precise = logits.flatten(0, 1).to(dtype)
        flat_losses = F.cross_entropy(precise, targets.flatten(), ignore_index=-1, reduction="none")
        sums = flat_losses.view(targets.shape).sum(1)
        counts = (targets != -1).sum(1).clamp_min(1)
        return (sums / counts).mean()


def _has_next_token(target: Tensor) -> Tensor:
    """Return which positions of the target half have a next token: the first position, and those
    that are not padding."""
    has_next = target != PADDING
    has_next[:, :1] = True
    return has_next


@torch.inference_mode()
def translate(model: EncoderDecoder, sources: list[list[int]]) -> list[list[int]]:
    """Translate each source greedily, until the model predicts id 0 or the target half is full;
    return the token ids of each translation.

    Args:
        model: a model in evaluation mode.
        sources: token ids, each truncated to half of `seq_len`.
    """
    half = model.config.seq_len // 2
    first = half + 1  # of a target, which an id of padding starts
    rows = []
    for source in sources:
        kept = source[:half]
        padding = [PADDING] * (half - len(kept))
        rows.append([*kept, *padding, PADDING])
    tokens = torch.tensor(rows, device=model.embedding.weight.device)
    for _ in range(half - 1):
        following = model(tokens).logits[:, -1:].argmax(-1)
        has_ended = (tokens[:, first:] == PADDING).any(1)
        following[has_ended] = PADDING
        tokens = torch.cat([tokens, following], 1)
        if bool((tokens[:, first:] == PADDING).any(1).all()):
            break
    targets = tokens[:, first:].tolist()
    return [row[: row.index(PADDING)] if PADDING in row else row for row in targets]
