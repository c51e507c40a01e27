"""Tokenizers: single bytes, or a byte-level BPE trained on the corpus with the `tokenizers` library."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from moesaic.errors import InputError, to_install
from moesaic.train.config import DataConfig

BYTES, LEAST_BPE = 256, 300
"""Vocabulary size of text as bytes, and the smallest one of a byte-level BPE."""


class AbstractTokenizer(ABC):
    """Maps text to token ids; the id `separator` separates documents."""

    vocab_size: int
    separator: int

    @abstractmethod
    def encode(self, data: bytes) -> np.ndarray:
        """Return the ids of a document, (tokens,) of an unsigned integer dtype, without a separator."""

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids. Bytes that are not UTF-8 become the replacement character."""


class ByteTokenizer(AbstractTokenizer):
    """One token per byte; byte 0 separates documents."""

    vocab_size = BYTES
    separator = 0

    def encode(self, data: bytes) -> np.ndarray:
        return np.frombuffer(data, dtype=np.uint8)

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(int(i) % 256 for i in ids).decode("utf-8", errors="replace")


class BPETokenizer(AbstractTokenizer):
    """A byte-level BPE. Token 0 separates documents; no text is encoded as token 0, not even "<|end|>".

    Bytes that are not UTF-8 become the tokens of the single bytes, so the ids represent the data exactly.

    Args:
        tokenizer: a `tokenizers.Tokenizer` with `<|end|>` as id 0.
    """

    separator = 0

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._tokenizer.encode_special_tokens = True  # encode them as text; saved files lack this setting
        self.vocab_size = int(tokenizer.get_vocab_size())
        self._byte_ids = [tokenizer.token_to_id(letter) for letter in _byte_letters()]

    @classmethod
    def train(cls, documents: Iterable[bytes], vocab_size: int) -> BPETokenizer:
        """Train on documents. The result is deterministic for the same documents in the same order."""
        library = _library()
        tokenizer = library.Tokenizer(library.models.BPE())
        tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = library.decoders.ByteLevel()
        trainer = library.trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=["<|end|>"],
            initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator((data.decode("utf-8", errors="ignore") for data in documents), trainer)
        return cls(tokenizer)

    @classmethod
    def load(cls, path: Path) -> BPETokenizer:
        """Read a tokenizer that `save` wrote.

        Raises:
            InputError: if it is missing or damaged.
        """
        library = _library()
        try:
            return cls(library.Tokenizer.from_str(path.read_text(encoding="utf-8")))
        except FileNotFoundError as error:
            raise InputError(
                f"{path}: the tokenizer is missing: restore it, or name another with data.tokenizer"
            ) from error
        except Exception as error:  # the library raises Exception itself for a file that does not parse
            raise InputError(f"{path}: the tokenizer is damaged ({error}): restore it, or name another") from error

    @property
    def text(self) -> str:
        """The tokenizer as JSON."""
        return str(self._tokenizer.to_str(pretty=True))

    def save(self, path: Path) -> None:
        """Write the tokenizer as JSON."""
        path.write_text(self.text, encoding="utf-8", newline="\n")

    def encode(self, data: bytes) -> np.ndarray:
        # Python decodes a byte that is not UTF-8 to a lone surrogate, which the library does not accept.
        parts = _STRAY_BYTES.split(data.decode("utf-8", errors="surrogateescape"))
        ids: list[int] = []
        for place, part in enumerate(parts):
            if place % 2:
                ids += [self._byte_ids[byte] for byte in part.encode("utf-8", errors="surrogateescape")]
            elif part:
                ids += self._tokenizer.encode(part, add_special_tokens=False).ids
        return np.asarray(ids, dtype=np.uint16 if self.vocab_size <= 65_536 else np.uint32)

    def decode(self, ids: Iterable[int]) -> str:
        return str(self._tokenizer.decode([int(i) for i in ids]))


class ExternalTokenizer(BPETokenizer):
    """A tokenizer.json from elsewhere, as models on the Hugging Face hub have it. Special tokens in text are encoded as
    text.

    Bytes that are not UTF-8 become the replacement character, unless the vocabulary has tokens for single bytes.

    Args:
        tokenizer: a `tokenizers.Tokenizer`. The first of `ENDS` in its vocabulary, or else token 0, separates
            documents.
    """

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer)
        ids = [tokenizer.token_to_id(name) for name in ENDS]
        self.separator = next((token_id for token_id in ids if token_id is not None), 0)
        self.vocab_size = max(tokenizer.get_vocab().values()) + 1

    def encode(self, data: bytes) -> np.ndarray:
        if None not in self._byte_ids:
            return super().encode(data)
        ids = self._tokenizer.encode(data.decode("utf-8", errors="replace"), add_special_tokens=False).ids
        return np.asarray(ids, dtype=np.uint16 if self.vocab_size <= 65_536 else np.uint32)


ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")
"""Tokens that end a text in vocabularies of the hub."""


def saved_tokenizer(config: DataConfig, file: Path | None) -> AbstractTokenizer | None:
    """Return the tokenizer of a run if it needs no training; None for a BPE that must still be trained.

    Args:
        file: the tokenizer in the run's folder; None if it does not exist yet.
    """
    if config.tokenizer:
        return ExternalTokenizer.load(file if file is not None and file.exists() else Path(config.tokenizer))
    if config.vocab_size == BYTES:
        return ByteTokenizer()
    return BPETokenizer.load(file) if file else None


_STRAY_BYTES = re.compile("([\udc80-\udcff]+)")
"""Runs of lone surrogates, which `surrogateescape` makes of bytes that are not UTF-8."""


def _byte_letters() -> list[str]:
    """Return the letter that represents each byte in a byte-level vocabulary: GPT-2's table."""
    plain = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte if byte in plain else next(others)) for byte in range(256)]


def _library() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise InputError(f"data.vocab_size above 256 needs the package tokenizers: {to_install('.[bpe]')}") from error
    return tokenizers
