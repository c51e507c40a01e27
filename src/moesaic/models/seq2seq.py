"""An encoder-decoder of the same blocks: the first half of a sequence is the source, the second half what it becomes.

Id 0 pads both halves, begins the second and ends what is written in it, so that one array of ids holds a pair.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moesaic.errors import InputError
from moesaic.models.attention import KeyValueCache
from moesaic.models.config import ModelConfig
from moesaic.models.gpt import GPT, NORMS, GPTOutput

PADDING = 0
"""The id that pads, begins and ends."""


class EncoderDecoder(GPT):
    """A Transformer that maps one sequence to another; the first half of its blocks is the encoder.

    Args:
        config: its shape, of `kind` "encoder_decoder".
        vocab_size: rows of the embedding, which both halves use.
    """

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__(config, vocab_size)
        block = config.block
        self.memory_norm = nn.Identity() if block.norm == "post_layer" else NORMS[block.norm](config.dim)

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        caches: list[KeyValueCache] | None = None,
    ) -> GPTOutput:
        """Predict the second half of each sequence from the first.

        Args:
            tokens: (batch, positions) int64, padded by 0; at most `seq_len` positions, the first `seq_len / 2` the source.
            targets: (batch, positions) int64, the next token at each position; those of the source and of padding do not count.
            mask: is made of the padding; None.
            caches: None: decoding reads its own tokens again.

        Returns:
            logits of the second half.
        """
        if mask is not None or caches is not None:
            raise InputError("an encoder_decoder takes neither mask nor caches: pad with id 0, pass all tokens")
        split = self.config.seq_len // 2
        source, written = tokens[:, :split], tokens[:, split:]
        seen, told = source != PADDING, _told(written)
        middle = len(self.blocks) // 2
        memory, routings = self.run_blocks(range(middle), self.embed(source), source, seen)
        x, more = self.run_blocks(
            range(middle, len(self.blocks)), self.embed(written), written, told,
            memory=self.memory_norm(memory), memory_mask=seen,
        )  # fmt: skip
        logits = self.unembed(self.norm(x))
        loss = None if targets is None else self.loss(logits, targets[:, split:].masked_fill(~told, -1))
        return GPTOutput(logits, loss, routings + more)

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the mean over sequences of the mean over their targets that are not -1: no mesh changes it."""
        precise = logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
        losses = F.cross_entropy(precise, targets.flatten(), ignore_index=-1, reduction="none").view(targets.shape)
        return (losses.sum(1) / (targets != -1).sum(1).clamp_min(1)).mean()


def _told(written: Tensor) -> Tensor:
    """Return which positions of the second half have a next token: the first, and those that are not padding."""
    told = written != PADDING
    told[:, :1] = True
    return told


@torch.inference_mode()
def translate(model: EncoderDecoder, sources: list[list[int]]) -> list[list[int]]:
    """Return the likeliest next token again and again for each source, until id 0 or the end of the second half.

    Args:
        model: in evaluation mode.
        sources: ids, cut to half of `seq_len`.
    """
    half = model.config.seq_len // 2
    rows = [[*source[:half], *[PADDING] * (half - len(source[:half])), PADDING] for source in sources]
    tokens = torch.tensor(rows, device=model.embedding.weight.device)
    for _ in range(half - 1):
        following = model(tokens).logits[:, -1:].argmax(-1)
        # What ended stays at its end.
        following[(tokens[:, half + 1 :] == PADDING).any(1)] = PADDING
        tokens = torch.cat([tokens, following], 1)
        if bool((tokens[:, half + 1 :] == PADDING).any(1).all()):
            break
    written = tokens[:, half + 1 :].tolist()
    return [row[: row.index(PADDING)] if PADDING in row else row for row in written]


def make_language_model(config: ModelConfig, vocab_size: int) -> GPT:
    """Build the model that a configuration describes."""
    return (EncoderDecoder if config.block.kind == "encoder_decoder" else GPT)(config, vocab_size)
