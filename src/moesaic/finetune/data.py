"""Reads the DATA of a fine-tuning run: texts or chats become sequences of tokens of one length."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moesaic.errors import InputError
from moesaic.files import open_file, read_bytes

AT_ONCE = 1000
"""Documents that are tokenized together."""


def sequences(data: str, tokenizer: Any, length: int, batch: int) -> Tensor:
    """Return DATA as sequences of tokens.

    Each document ends with the end-of-text token; all are joined and cut, and the rest is left out. The first sequences
    come again at the end so that `batch` divides their number.

    Args:
        data: as for `FinetuneOptions`.
        tokenizer: of transformers.

    Returns:
        (sequences, length) int64.

    Raises:
        InputError: DATA cannot be read, or has no text, or less than one sequence.
    """
    found: list[Tensor] = []
    documents, end = (
        _documents(data),
        [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id],
    )
    while some := list(islice(documents, AT_ONCE)):
        texts = [text for each in some if (text := _text(each, data, tokenizer))]
        texts = [
            text.encode(errors="replace").decode() for text in texts
        ]  # JSON may hold halves of surrogate pairs
        rows_of_ids = tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
        found += [torch.tensor([*ids, *end]) for ids in rows_of_ids]
    tokens = torch.cat(found) if found else torch.empty(0, dtype=torch.int64)
    if len(tokens) < length:
        missing = f"has {len(tokens)} tokens, fewer than one sequence: choose a --length of at most {len(tokens)}"
        raise InputError(f"{data}: {missing if len(tokens) else 'has no text'}, or name other data")
    rows = tokens[: len(tokens) // length * length].view(-1, length)
    return rows[torch.arange(-(-len(rows) // batch) * batch) % len(rows)]


def _text(document: Any, data: str, tokenizer: Any) -> str:
    """Return the text of a document, or of its messages by the tokenizer's chat template."""
    if isinstance(document, dict) and isinstance(document.get("text"), str):
        return str(document["text"])
    if not isinstance(document, dict) or not isinstance(document.get("messages"), list):
        raise InputError(
            f'{data}: an entry has neither "text" nor "messages": name data in which each has one'
        )
    if not tokenizer.chat_template:
        raise InputError(
            f'{data}: has "messages", and the model\'s tokenizer no chat template: give "text" instead'
        )
    try:
        return str(tokenizer.apply_chat_template(document["messages"], tokenize=False))
    except Exception as error:  # a template may raise anything
        raise InputError(
            f"{data}: the chat template refuses an entry's messages ({error}): correct them"
        ) from error


def _documents(data: str) -> Iterator[Any]:
    path = Path(data)
    try:
        if path.is_file() and path.suffix not in (".jsonl", ".json"):
            yield {"text": read_bytes(path).decode()}
        elif path.is_file():
            with open_file(path) as file:
                yield from (json.loads(line) for line in file if line.strip())
        else:
            yield from _dataset(data)
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"{data}: cannot be read as text or as JSON lines ({error}): correct it"
        ) from error


def _dataset(data: str) -> Any:
    """Return the split "train" of a dataset of `datasets`."""
    import datasets

    try:
        if Path(data, "state.json").exists() or Path(data, "dataset_dict.json").exists():
            loaded = datasets.load_from_disk(data)
            return loaded["train"] if isinstance(loaded, dict) else loaded
        return datasets.load_dataset(data, split="train")
    except Exception as error:  # of the hub, of a file, of a builder
        reason = " ".join(str(error).split())
        raise InputError(
            f"{data}: datasets cannot load its split train ({reason:.200}): name other data"
        ) from error
