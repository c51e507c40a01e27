"""Training data: finding the text, splitting it, and cutting it into micro-batches.

A micro-batch is a pure function of (data, seed, index), so resuming needs no state but the index.
A window is a sequence of the data, named by its number w: the tokens from w * seq_len on, and one
more as the last target.
"""

from __future__ import annotations

import glob
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moesaic.configfile import read_table
from moesaic.errors import InputError, counted
from moesaic.train.config import DataConfig
from moesaic.train.documents import SAVED, SPLITS, read_documents
from moesaic.train.example_text import PACKAGE, VERSION, example_text
from moesaic.train.tokenizer import AbstractTokenizer, ByteTokenizer, make_tokenizer

FEW_FILES = 20
"""With fewer files than this, the validation data is the end of the text instead of whole files."""
FINGERPRINT_BLOCKS = 64
FINGERPRINT_BLOCK_BYTES = 64 * 1024
"""Most blocks of the training data that are hashed, and their size."""
BIN_DTYPES = ("uint8", "uint16", "uint32")
"""Integer types of `.bin` files."""
ID_CHECK_BLOCKS = 256
ID_CHECK_BLOCK_BYTES = 1024 * 1024
"""Most blocks of a `.bin` file that are checked for ids outside the vocabulary, and their size: the
full file up to 256 MiB."""


Objective = Callable[[np.ndarray, Sequence[int]], tuple[np.ndarray, np.ndarray]]
"""Maps windows, (rows, seq_len + 1) int64, with a seed for each to a model's inputs and targets,
(rows, seq_len) int64 each; a target of -1 does not count."""


def next_token(windows: np.ndarray, seeds: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens, and the next token at each position as targets."""
    return windows[:, :-1], windows[:, 1:]


@dataclass(frozen=True)
class Corpus:
    """Tokens for training and validation, and what a model is to predict of them."""

    train: np.ndarray
    """(tokens,) unsigned integers, memory mapped for `.bin` files."""
    val: np.ndarray
    """(tokens,)."""
    tokenizer: AbstractTokenizer | None
    """The tokenizer of the tokens; None for `.bin` files without a named tokenizer."""
    vocab_size: int
    """Size of the vocabulary; all ids are below it."""
    val_bytes: int
    """Bytes of the text behind `val`, for losses per byte. For `.bin` files it counts tokens."""
    description: str
    """One line that describes the data, to be printed."""
    objective: Objective = next_token
    """What the model is to predict."""


def load_corpus(config: DataConfig, tokenizer_file: Path | None = None) -> Corpus:
    """Find, read, split and tokenize the data.

    Args:
        config: names the data and its tokenizer.
        tokenizer_file: the tokenizer of the run that is resumed, if it exists.

    Raises:
        InputError: if data is missing, empty or unreadable, or has ids outside the vocabulary.
    """
    root: Path | None = None
    if config.path:
        files = find_files(config.path, "data.path")
    else:
        files, root = example_text()
    val_files = find_files(config.val, "data.val") if config.val else []
    if val_files and (files[0].suffix == ".bin") != (val_files[0].suffix == ".bin"):
        raise InputError(
            "data.path and data.val: .bin files and text files are mixed: give one kind in both"
        )
    if files[0].suffix == ".bin":
        return _load_bin(config, files, val_files, tokenizer_file)
    tokenizer = make_tokenizer(config, tokenizer_file)
    if isinstance(tokenizer, ByteTokenizer) and config.vocab_size < tokenizer.vocab_size:
        raise InputError(
            f"data.vocab_size={config.vocab_size}: text has {tokenizer.vocab_size} tokens as "
            "bytes: set it to that or more, or name a tokenizer.json with data.tokenizer"
        )
    # without empty files; one is kept if all are empty, for the error to name
    files = [path for path in files if path.stat().st_size] or files[:1]
    if not val_files and len(files) >= FEW_FILES:
        files, val_files = split_by_name(files, config.val_share, root)
    train_documents = _read(files, config.text_field)
    val_documents = _read(val_files, config.text_field)
    if not val_documents:
        train_documents, val_documents = _cut(train_documents or [b""], 1 - config.val_share)

    is_bytes = isinstance(tokenizer, ByteTokenizer)
    description = f"{len(files) + len(val_files)} files"
    if root is not None:
        description += f" of {PACKAGE} {VERSION}"
    num_separators = len(val_documents) - 1
    return Corpus(
        train=_join(tokenizer, train_documents),
        val=_join(tokenizer, val_documents),
        tokenizer=tokenizer,
        vocab_size=config.vocab_size if is_bytes else tokenizer.vocab_size,
        val_bytes=sum(map(len, val_documents)) + num_separators,
        description=description,
    )


def find_files(patterns: tuple[str, ...], where: str) -> list[Path]:
    """Return the files that paths, folders and globs name, sorted.

    From a folder, hidden files are left out. A folder that `datasets.save_to_disk` wrote counts as
    a file.

    Args:
        where: the field of the configuration that holds the patterns, for messages.

    Raises:
        InputError: if there are none, or text files and `.bin` files are mixed.
    """
    files: set[Path] = set()
    for pattern in patterns:
        path = Path(pattern)
        if path.is_file():
            files.add(path)
        elif path.is_dir():
            files.update(_data_files(path, where))
        else:
            matches = [Path(match) for match in glob.glob(pattern, recursive=True)]
            if not matches:
                raise InputError(
                    f"{where}: nothing at {pattern}: give a text file, a folder, a glob or a "
                    ".bin file"
                )
            files.update(match for match in matches if match.is_file())
    if not files:
        raise InputError(f"{where}: no text or .bin files in {', '.join(patterns)}")
    if len({path.suffix == ".bin" for path in files}) > 1:
        raise InputError(f"{where}: .bin files and text files are mixed: give one kind")
    return sorted(files)


def _data_files(folder: Path, where: str) -> list[Path]:
    """Return the data files of a folder: the folder itself if `datasets.save_to_disk` wrote it."""
    if (folder / SPLITS).exists():
        splits = sorted(path.parent for path in folder.glob(f"*/{SAVED}"))
        raise InputError(
            f"{where}: {folder} holds a dataset of several splits "
            f"({', '.join(split.name for split in splits)}): name one, as {folder / 'train'}"
        )
    if (folder / SAVED).exists():
        return [folder]
    files = []
    for path in folder.rglob("*"):
        names = path.relative_to(folder).parts
        is_hidden = any(name.startswith(".") for name in names)
        if path.is_file() and not is_hidden:
            files.append(path)
    return files


def split_by_name(
    files: list[Path], share: float, root: Path | None
) -> tuple[list[Path], list[Path]]:
    """Set files aside for validation by a hash of their names, so that adding files never moves
    others between the two parts.

    Args:
        share: average share of the files that go to validation; of two or more files, at least one
            does.
        root: the folder that names are relative to; None uses the last two parts of each path as
            the name.

    Returns:
        (training files, validation files).
    """

    def draw(path: Path) -> float:
        """Return a number from 0 to 1 that the file's name alone decides."""
        name = path.relative_to(root).as_posix() if root else "/".join(path.parts[-2:])
        return draw_of(name.encode())

    val = [path for path in files if draw(path) < share]
    if not val and len(files) > 1:
        val = [min(files, key=draw)]
    chosen = set(val)
    return [path for path in files if path not in chosen], val


def draw_of(data: bytes) -> float:
    """Return a number from 0 to 1 derived from a hash of `data`."""
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "big") / 2**64


def fingerprint(tokens: np.ndarray) -> str:
    """Return a hash of the number of tokens and of evenly spread blocks of them. It covers all
    tokens up to 4 MiB."""
    digest = hashlib.blake2b(str(len(tokens)).encode(), digest_size=16)
    block = FINGERPRINT_BLOCK_BYTES // tokens.itemsize
    for start in spread_blocks(len(tokens), block, FINGERPRINT_BLOCKS):
        digest.update(tokens[start : start + block].tobytes())
    return digest.hexdigest()


def spread_blocks(length: int, block: int, at_most: int) -> list[int]:
    """Return the start of each block of a sequence: of all blocks if there are `at_most` or fewer,
    else of `at_most` blocks spread evenly from the first to the last."""
    if length <= block * at_most:
        return list(range(0, length, block))
    return [int(start) for start in np.linspace(0, length - block, at_most).astype(np.int64)]


class Batches:
    """Micro-batches of consecutive, non-overlapping windows, in an order that is shuffled anew in
    each epoch.

    Args:
        tokens: (tokens,) the data.
        seed: seed of the order.
        part: (index, count): return only the index-th of count equal parts of each micro-batch.
        objective: what the model is to predict; its seeds differ between epochs.

    Raises:
        InputError: if the data is shorter than one sequence plus its last target, or `batch_size`
            is not divisible by `count`.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        seq_len: int,
        batch_size: int,
        seed: int,
        part: tuple[int, int] = (0, 1),
        objective: Objective = next_token,
    ) -> None:
        _, num_parts = part
        if batch_size % num_parts:
            raise InputError(
                f"batch_size={batch_size} does not split over {num_parts} data parallel groups: "
                f"choose a multiple of {num_parts}"
            )
        self.part = part
        self.objective = objective
        self.tokens = tokens
        self.seq_len = seq_len
        self.batch_size = batch_size
        self.seed = seed
        self.num_windows = (len(tokens) - 1) // seq_len
        if self.num_windows < 1:
            raise InputError(
                f"training data: {len(tokens)} tokens are fewer than model.seq_len + 1 = "
                f"{seq_len + 1}: give more data or a smaller model.seq_len"
            )
        self._epoch = -1
        """The epoch whose order is kept; -1 before the first."""
        self._order = np.empty(0, dtype=np.int64)
        """(num_windows,): the windows of that epoch, in their order."""

    def get(self, index: int) -> tuple[Tensor, Tensor]:
        """Return this part of micro-batch `index`: tokens and targets, (batch_size / parts,
        seq_len) int64 each."""
        part, num_parts = self.part
        size = self.batch_size // num_parts
        first = index * self.batch_size + part * size
        places = range(first, first + size)
        windows = [self._window(place) for place in places]
        return as_batch(self.tokens, windows, self.seq_len, self.objective, seeds=places)

    def _window(self, place: int) -> int:
        """Return the window at a place in the order of all epochs; its epoch's order is kept."""
        epoch, within = divmod(place, self.num_windows)
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = np.random.default_rng([self.seed, epoch]).permutation(self.num_windows)
        return int(self._order[within])


def even_windows(tokens: np.ndarray, seq_len: int, count: int) -> list[int]:
    """Return up to `count` windows spread evenly over the data, for evaluation."""
    available = (len(tokens) - 1) // seq_len
    if available < 1:
        raise InputError(
            f"validation data: {len(tokens)} tokens are fewer than model.seq_len + 1 = "
            f"{seq_len + 1}: give more with data.val, raise data.val_share or lower model.seq_len"
        )
    starts = np.linspace(0, available - 1, min(count, available))
    return sorted(set(starts.astype(int).tolist()))


def share(windows: list[int], index: int, count: int) -> list[int]:
    """Return the index-th of `count` consecutive parts of a list, of nearly equal length; some are
    empty if the list is short."""
    return windows[len(windows) * index // count : len(windows) * (index + 1) // count]


def as_batch(
    tokens: np.ndarray,
    windows: list[int],
    seq_len: int,
    objective: Objective = next_token,
    seeds: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return windows of the data as tokens and targets, (len(windows), seq_len) int64 each.

    Args:
        objective: what the model is to predict.
        seeds: a seed for each window; None takes the windows' numbers.
    """
    rows = []
    for window in windows:
        start = window * seq_len
        rows.append(tokens[start : start + seq_len + 1].astype(np.int64))
    table = np.array(rows, dtype=np.int64).reshape(-1, seq_len + 1)  # also without windows
    inputs, targets = objective(table, seeds or windows)
    return (
        torch.from_numpy(np.ascontiguousarray(inputs)),
        torch.from_numpy(np.ascontiguousarray(targets)),
    )


def _read(files: list[Path], field: str) -> list[bytes]:
    """Return the documents of files; an InputError if there is none."""
    documents = [document for path in files for document in read_documents(path, field)]
    if files and not documents:
        others = " and all others" if len(files) > 1 else ""
        raise InputError(f"data: {files[0]}{others} is empty: give files with text")
    return documents


def _cut(documents: list[bytes], share: float) -> tuple[list[bytes], list[bytes]]:
    """Return the documents before and after a share of their bytes, a separator between two of them
    counted as one byte. The document at the cut is divided."""
    num_bytes = sum(map(len, documents)) + len(documents) - 1
    cut = int(num_bytes * share)
    for number, document in enumerate(documents):
        if cut <= len(document):
            before = [*documents[:number], document[:cut]]
            return before, [document[cut:], *documents[number + 1 :]]
        cut -= len(document) + 1
    raise AssertionError("a cut lies in or behind a document")


def _join(tokenizer: AbstractTokenizer, documents: list[bytes]) -> np.ndarray:
    """Return the tokens of documents, with the separator between them."""
    parts: list[np.ndarray] = []
    for data in documents:
        ids = tokenizer.encode(data)
        if parts:
            parts.append(np.array([tokenizer.separator], dtype=ids.dtype))
        parts.append(ids)
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.uint8)


def _load_bin(
    config: DataConfig, files: list[Path], val_files: list[Path], tokenizer_file: Path | None
) -> Corpus:
    """Return the corpus of files of tokens; without validation files, their end is held out."""
    arrays = [_map_bin(path, config) for path in files]
    whole = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
    if val_files:
        train = whole
        val = np.concatenate([_map_bin(path, config) for path in val_files])
    else:
        cut = int(len(whole) * (1 - config.val_share))
        train = whole[:cut]
        val = whole[cut:]
    tokenizer = make_tokenizer(config, tokenizer_file) if config.tokenizer else None
    return Corpus(
        train,
        val,
        tokenizer,
        config.vocab_size,
        val_bytes=max(len(val), 1),  # losses are divided by it
        description=counted(len(files), "token file"),
    )


def _bin_dtype(path: Path, config: DataConfig) -> np.dtype[Any]:
    """Return the integer type of a `.bin` file, from the `.json` file of the same name if any, else
    from the vocabulary size."""
    sidecar = path.with_suffix(".json")
    name = "uint16" if config.vocab_size <= 2**16 else "uint32"
    if sidecar.exists():
        name = read_table(sidecar, "data").get("dtype", "")
    if name not in BIN_DTYPES:
        raise InputError(f"data: {sidecar}: dtype={name!r}: write one of {', '.join(BIN_DTYPES)}")
    return np.dtype(name).newbyteorder("<")


def _map_bin(path: Path, config: DataConfig) -> np.ndarray:
    """Map a file of tokens into memory, and refuse one whose size or sampled ids are wrong."""
    dtype = _bin_dtype(path, config)
    size = path.stat().st_size
    if size == 0 or size % dtype.itemsize:
        raise InputError(
            f"data: {path} has {size} bytes, not a whole number of {dtype.name}: check "
            f"data.vocab_size, or the dtype in {path.with_suffix('.json')}"
        )
    tokens = np.memmap(path, dtype=dtype, mode="r")
    block = ID_CHECK_BLOCK_BYTES // dtype.itemsize
    starts = spread_blocks(len(tokens), block, ID_CHECK_BLOCKS)
    largest = max(int(tokens[start : start + block].max()) for start in starts)
    if largest >= config.vocab_size:
        raise InputError(
            f"data: {path} holds token {largest}, data.vocab_size is {config.vocab_size}: set "
            f"it above {largest}"
        )
    return tokens
