"""The papers' other objectives: hidden tokens (BERT), and pairs of texts (translation)."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from moesaic.errors import InputError, to_install
from moesaic.train.config import DataConfig
from moesaic.train.data import Corpus, draw_of, find_files, load_corpus
from moesaic.train.tokenizer import BYTES, AbstractTokenizer, HubTokenizer, make_tokenizer
from moesaic_lab.paper_train.models import PADDING

HIDDEN_SHARE = 0.15
"""Share of the tokens that an encoder must predict (BERT)."""
CATALOGUE = b"\xde\x12\x04\x95"
"""First bytes of a compiled little-endian gettext catalogue."""
LANGUAGES = (
    "af",
    "ca",
    "cs",
    "da",
    "de",
    "es",
    "et",
    "eu",
    "fi",
    "fr",
    "ga",
    "gl",
    "hu",
    "is",
    "it",
    "lt",
    "lv",
    "nb",
    "nl",
    "pl",
    "pt",
    "ro",
    "sk",
    "sl",
    "sq",
    "sv",
    "tr",
)
"""Languages of Django's messages that are used by default: those with Latin letters and many
messages. One catalogue has some 800 messages, too few to distinguish two models; 27 catalogues hold
more words than a small model can learn."""


def load_hidden(data: DataConfig, tokenizer_file: Path | None) -> Corpus:
    """Return the corpus of `load_corpus`, of which tokens are hidden. Its vocabulary has one more
    id, which hides tokens."""
    corpus = load_corpus(data, tokenizer_file)
    objective = partial(hidden_tokens, mask=corpus.vocab_size)
    return replace(
        corpus, vocab_size=corpus.vocab_size + 1, objective=objective, val_bytes=len(corpus.val)
    )


def hidden_tokens(
    windows: np.ndarray, seeds: Sequence[int], *, mask: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens, some of which are hidden, and the hidden ones as targets, -1 elsewhere;
    (windows, length - 1) each. Each seed chooses the hidden tokens of a window.

    `windows` are (windows, length) token ids, whose last token is only the target of a decoder;
    `mask` is the id that hides tokens.

    BERT's rule: of the hidden tokens, 80 % become the mask, 10 % another token, and 10 % stay. The
    number of hidden tokens is constant, so means over sequences equal means over tokens on any
    mesh.
    """
    seen = windows[:, :-1].copy()
    targets = np.full_like(windows[:, :-1], -1)
    num_hidden = max(1, round(HIDDEN_SHARE * seen.shape[1]))
    for row, target_row, seed in zip(seen, targets, seeds):
        random = np.random.default_rng(seed)
        chosen = random.permutation(len(row))[:num_hidden]
        kinds = random.random(num_hidden)
        others = random.integers(mask, size=num_hidden)
        target_row[chosen] = row[chosen]
        other_or_same = np.where(kinds < 0.9, others, row[chosen])
        row[chosen] = np.where(kinds < 0.8, mask, other_or_same)
    return seen, targets


def load_pairs(data: DataConfig, seq_len: int, tokenizer_file: Path | None) -> Corpus:
    """Read pairs of texts, each as one row of `seq_len` tokens in the form that `EncoderDecoder`
    takes.

    Args:
        data: `path` names compiled gettext catalogues (.mo) and JSON lines with `source` and
            `target`. If empty, the catalogues of the installed Django in `LANGUAGES` are read. Each
            message is then prefixed with its language ("fr: Yes"), and a message is in the same
            part in all languages.
        seq_len: tokens per row; pairs with a text longer than half a row are left out.
        tokenizer_file: as for `load_corpus`. Without it and without `data.tokenizer`, a
            `data.vocab_size` above 256 trains a byte-level BPE on the pairs.

    Raises:
        InputError: if there are no pairs, or too few to set some aside.
    """
    files = find_files(data.path, "data.path") if data.path else django_catalogues()
    pairs = _all_pairs(files) if data.path else _pairs_with_language(files)
    if data.val:
        val_pairs = _all_pairs(find_files(data.val, "data.val"))
    else:
        messages = [source if data.path else _without_language(source) for source, _ in pairs]
        draws = [draw_of(message) for message in messages]
        val_pairs = [pair for pair, draw in zip(pairs, draws) if draw < data.val_share]
        pairs = [pair for pair, draw in zip(pairs, draws) if draw >= data.val_share]
    texts = [text for pair in pairs for text in pair]
    tokenizer = _tokenizer(data, texts, tokenizer_file)
    train = _table(pairs, tokenizer, seq_len)
    val = _table(val_pairs, tokenizer, seq_len)
    if len(train) <= seq_len or len(val) <= seq_len:
        raise InputError(
            f"data: {len(pairs)} pairs to train on and {len(val_pairs)} to validate with, of "
            f"which at least one each must fit {seq_len // 2} tokens a side: give more in "
            "data.path, or a larger model.seq_len"
        )
    fit = f"{len(train) // seq_len:,} of {len(pairs):,} pairs fit"
    return Corpus(
        train, val, tokenizer, tokenizer.vocab_size, len(val), f"{len(files)} files, {fit}"
    )


Pair = tuple[bytes, bytes]
"""A text and its translation."""


def _all_pairs(files: Sequence[Path]) -> list[Pair]:
    """Return the pairs of all files in order, one translation per source: else the same sentence
    could be in both parts."""
    translations: dict[bytes, bytes] = {}
    for path in files:
        translations.update(read_pairs(path))
    return sorted(translations.items())


def _pairs_with_language(catalogues: Sequence[Path]) -> list[Pair]:
    """Return the pairs of catalogues in order, each source after the name of its language."""
    translations = {}
    for path in catalogues:
        language = path.parts[-3].encode()  # locale/LANGUAGE/LC_MESSAGES/FILE
        for source, target in read_pairs(path):
            translations[b"%s: %s" % (language, source)] = target
    return sorted(translations.items())


def _table(pairs: Sequence[Pair], tokenizer: AbstractTokenizer, seq_len: int) -> np.ndarray:
    """Return the tokens of all pairs that fit, a row of `seq_len` each, and one more: the last
    row's next token."""
    half = seq_len // 2
    first = half + 1  # of the target, which padding starts and ends
    rows = []
    for source, target in pairs:
        source_ids = tokenizer.encode(source)
        target_ids = tokenizer.encode(target)
        if len(source_ids) <= half and len(target_ids) <= half - 2:
            row = np.full(seq_len, PADDING, dtype=np.uint32)
            row[: len(source_ids)] = source_ids
            row[first : first + len(target_ids)] = target_ids
            rows.append(row)
    return np.concatenate([*rows, np.zeros(1, dtype=np.uint32)])


def read_pairs(path: Path) -> list[tuple[bytes, bytes]]:
    """Return the non-empty pairs of a file: messages and their translations, or `source` and
    `target` of JSON lines.

    Raises:
        InputError: if the file has another format, or is damaged.
    """
    content = path.read_bytes()
    try:
        if content[:4] == CATALOGUE:
            pairs = list(_messages(content))
        else:
            rows = [json.loads(line) for line in content.splitlines() if line.strip()]
            pairs = [(row["source"].encode(), row["target"].encode()) for row in rows]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, struct.error) as error:
        raise InputError(
            f"data: {path} holds no pairs ({type(error).__name__}: {error}): give gettext "
            "catalogues (.mo), or JSON lines with the texts source and target"
        ) from error
    return [(source, target) for source, target in pairs if source and target]


def _messages(content: bytes) -> Iterable[tuple[bytes, bytes]]:
    """Yield messages and translations of a compiled catalogue. Only the first plural form is used,
    and message contexts are dropped.

    gettext's format: at byte 8 the number of messages, and the places of two tables, of messages
    and of translations; an entry of a table is the length and the start of a text. Byte 0 separates
    plural forms, and byte 4 a context from its message.
    """
    count, sources, targets = struct.unpack_from("<3I", content, 8)
    for index in range(count):
        texts = []
        for table in (sources, targets):
            length, start = struct.unpack_from("<2I", content, table + 8 * index)
            forms = content[start : start + length].split(b"\0")
            texts.append(forms[0].split(b"\4")[-1])
        source, target = texts
        yield source, target


def django_catalogues() -> list[Path]:
    """Return the message catalogues of the installed Django in `LANGUAGES`; they are BSD-licensed.

    Raises:
        InputError: if Django is not installed.
    """
    package = find_spec("django")
    if package is None or package.origin is None:
        raise InputError(
            "data.path: without one, pairs are messages of Django: "
            f"{to_install('./lab[measure]')}, or name catalogues (.mo) or JSON lines with source "
            "and target"
        )
    root = Path(package.origin).parent
    catalogues: list[Path] = []
    for language in LANGUAGES:
        catalogues += root.rglob(f"locale/{language}/LC_MESSAGES/*.mo")
    return sorted(catalogues)


def _without_language(source: bytes) -> bytes:
    """Return a message without its language prefix."""
    return source.partition(b": ")[2]


def _tokenizer(data: DataConfig, texts: Iterable[bytes], file: Path | None) -> AbstractTokenizer:
    """Return the tokenizer of a run, or a byte-level BPE trained on texts, whose token 0 is in no
    text."""
    if data.tokenizer or data.vocab_size <= BYTES or (file is not None and file.exists()):
        return make_tokenizer(data, file)
    import tokenizers as library

    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=data.vocab_size,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    decoded = (text.decode("utf-8", errors="ignore") for text in texts)
    tokenizer.train_from_iterator(decoded, trainer)
    return HubTokenizer(tokenizer)
