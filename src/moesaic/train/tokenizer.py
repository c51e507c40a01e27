"""Tokenizers: single bytes, or a `tokenizer.json` of the tokenizers library, as models on the
Hugging Face hub have it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from moesaic.errors import InputError, to_install
from moesaic.files import read_text
from moesaic.train.config import DataConfig

BYTES = 256
"""Vocabulary size of text as bytes."""
ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")
"""Tokens that end a text in vocabularies of the hub."""


class AbstractTokenizer(ABC):
    """Maps text to token ids; the id `separator` separates documents."""

    vocab_size: int
    separator: int

    @property
    @abstractmethod
    def text(self) -> str:
        """The tokenizer as a `tokenizer.json` of the tokenizers library."""

    @abstractmethod
    def encode(self, data: bytes) -> np.ndarray:
        """Return the ids of a document, (tokens,) of an unsigned integer dtype, without a
        separator."""

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids. Bytes that are not UTF-8 become the replacement character."""


class ByteTokenizer(AbstractTokenizer):
    """One token per byte; byte 0 separates documents."""

    vocab_size = BYTES
    separator = 0

    @property
    def text(self) -> str:
        """A byte-level BPE without merges, which shows each byte as one letter."""
        tokenizers = _library()
        byte_level = tokenizers.pre_tokenizers.ByteLevel
        letters = set(byte_level.alphabet())
        # bytes that are no visible character are shown as further letters, in the order of both
        characters = {chr(byte) for byte in range(BYTES)}
        further_letters = iter(sorted(letters - characters))
        vocabulary = {}
        for byte in range(BYTES):
            letter = chr(byte) if chr(byte) in letters else next(further_letters)
            vocabulary[letter] = byte
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
        tokenizer.pre_tokenizer = byte_level(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        return str(tokenizer.to_str(pretty=True))

    def encode(self, data: bytes) -> np.ndarray:
        return np.frombuffer(data, dtype=np.uint8)

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(int(i) % BYTES for i in ids).decode("utf-8", errors="replace")


class HubTokenizer(AbstractTokenizer):
    """A tokenizer of the tokenizers library. Special tokens in a text are encoded as text.

    Args:
        tokenizer: a `tokenizers.Tokenizer`. The first of `ENDS` in its vocabulary, or else token 0,
            separates documents.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._tokenizer.encode_special_tokens = True  # saved files lack this setting
        self.separator = 0
        for name in reversed(ENDS):  # the first one that exists is assigned last
            token_id = tokenizer.token_to_id(name)
            if token_id is not None:
                self.separator = token_id
        self.vocab_size = max(tokenizer.get_vocab().values()) + 1

    @classmethod
    def load(cls, path: Path) -> HubTokenizer:
        """Read a `tokenizer.json`.

        Raises:
            InputError: if it is missing or damaged.
        """
        tokenizers = _library()
        try:
            return cls(tokenizers.Tokenizer.from_str(read_text(path)))
        except FileNotFoundError as error:
            raise InputError(
                f"{path}: the tokenizer is missing: restore it, or name another with data.tokenizer"
            ) from error
        except Exception as error:
            # the library raises Exception itself for a file that does not parse
            raise InputError(
                f"{path}: the tokenizer is damaged ({error}): restore it, or name another"
            ) from error

    @property
    def text(self) -> str:
        return str(self._tokenizer.to_str(pretty=True))

    def encode(self, data: bytes) -> np.ndarray:
        ids = self._tokenizer.encode(
            data.decode("utf-8", errors="replace"), add_special_tokens=False
        ).ids
        return np.asarray(ids, dtype=np.uint16 if self.vocab_size <= 65_536 else np.uint32)

    def decode(self, ids: Iterable[int]) -> str:
        return str(self._tokenizer.decode([int(i) for i in ids]))


def _library() -> Any:
    """Return the module tokenizers; InputError if it is not installed."""
    try:
        import tokenizers
    except ImportError as error:
        raise InputError(
            f"data.tokenizer needs the package tokenizers: {to_install('.[data]')}"
        ) from error
    return tokenizers


def make_tokenizer(config: DataConfig, file: Path | None) -> AbstractTokenizer:
    """Return the tokenizer of a run: the one in `file` if that exists, the one that the
    configuration names, or bytes."""
    if file is not None and file.exists():
        return HubTokenizer.load(file)
    return HubTokenizer.load(Path(config.tokenizer)) if config.tokenizer else ByteTokenizer()
