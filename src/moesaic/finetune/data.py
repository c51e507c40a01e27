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
from moesaic.train.documents import LINES, LIST

BOM = b"\xef\xbb\xbf"
SPACE = BOM + b" \t\r\n"
"""What may precede JSON."""
AT_ONCE = 1000
"""Documents that are tokenized together."""


def sequences(data: str, tokenizer: Any, length: int, batch: int) -> Tensor:
    """Return DATA as sequences of tokens.

    Each document ends with the end-of-text token; all are joined and cut, and the rest is left out.
    The first sequences come again at the end so that `batch` divides their number.

    Args:
        data: as for `FinetuneOptions`.
        tokenizer: of transformers.

    Returns:
        (sequences, length) int64.

    Raises:
        InputError: DATA cannot be read, or has no text, or less than one sequence.
    """
    found: list[Tensor] = []
    documents = _documents(data)
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    while some := list(islice(documents, AT_ONCE)):
        texts = [
            text for where, each in some if (text := _text(each, f"{data}: {where}", tokenizer))
        ]
        # JSON may hold halves of surrogate pairs
        texts = [text.encode(errors="replace").decode() for text in texts]
        rows_of_ids = tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
        found += [torch.tensor([*ids, *end]) for ids in rows_of_ids]
    tokens = torch.cat(found) if found else torch.empty(0, dtype=torch.int64)
    if len(tokens) < length:
        missing = (
            f"has {len(tokens)} tokens, fewer than one sequence: choose a --length of at most "
            f"{len(tokens)}"
        )
        raise InputError(f"{data}: {missing if len(tokens) else 'has no text'}, or name other data")
    rows = tokens[: len(tokens) // length * length].view(-1, length)
    return rows[torch.arange(-(-len(rows) // batch) * batch) % len(rows)]


def _text(document: Any, where: str, tokenizer: Any) -> str:
    """Return the text of a document, or of its messages by the tokenizer's chat template; `where`
    names it in messages."""
    if isinstance(document, dict) and isinstance(document.get("text"), str):
        return str(document["text"])
    if not isinstance(document, dict) or not isinstance(document.get("messages"), list):
        raise InputError(
            f'{where}: has neither "text" nor "messages" ({document!r:.60}): give it one of '
            "them, or leave it out"
        )
    if not tokenizer.chat_template:
        raise InputError(
            f'{where}: has "messages", and the model\'s tokenizer no chat template: give '
            '"text" instead'
        )
    tools = _tools(document.get("tools"), where)
    try:
        text = str(tokenizer.apply_chat_template(document["messages"], tools=tools, tokenize=False))
        is_read = tools is None or text != str(
            tokenizer.apply_chat_template(document["messages"], tokenize=False)
        )
    except Exception as error:  # a template may raise anything
        reason = " ".join(str(error).split())
        raise InputError(
            f"{where}: the chat template refuses its messages ({reason:.200}): correct them"
        ) from error
    if not is_read:
        raise InputError(
            f'{where}: has "tools", which the model\'s chat template does not write: leave them out'
        )
    return text


def _tools(tools: Any, where: str) -> list[Any] | None:
    """Return a document's tools, a list of JSON schemas or the text of one; None if it has none.

    Raises:
        InputError: they are something else.
    """
    try:
        found = json.loads(tools) if isinstance(tools, str) and tools.strip() else tools or None
    except (ValueError, RecursionError):
        found = tools
    if found is None or (isinstance(found, list) and all(isinstance(each, dict) for each in found)):
        return found or None
    raise InputError(
        f'{where}: its "tools" are no list of JSON schemas ({tools!r:.60}): correct them'
    )


def _documents(data: str) -> Iterator[tuple[str, Any]]:
    """Yield each document of DATA, after the words that name its place."""
    path = Path(data)
    where = ""
    try:
        if path.is_file() and path.suffix not in (LINES, LIST):
            yield "the text", {"text": read_bytes(path).decode()}
        elif path.is_file() and path.suffix == LIST and _is_list(path):
            yield from (
                (f"entry {number}", each)
                for number, each in enumerate(json.loads(read_bytes(path)), 1)
            )
        elif path.is_file():
            with open_file(path) as file:
                for number, line in enumerate(file, 1):
                    where = f" line {number}:"
                    if line.strip(SPACE):
                        yield (
                            f"line {number}",
                            json.loads(line.removeprefix(BOM) if number == 1 else line),
                        )
        else:
            yield from ((f"row {number}", each) for number, each in enumerate(_dataset(data), 1))
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        kind = {LINES: "JSON lines", LIST: "a list of JSON or JSON lines"}.get(path.suffix, "text")
        raise InputError(
            f"{data}:{where} cannot be read as {kind} ({error}): correct it"
        ) from error


def _is_list(path: Path) -> bool:
    """Whether a file begins as a list of JSON does."""
    with open_file(path) as file:
        return next(
            (part for part in iter(lambda: file.read(4096).lstrip(SPACE), b"") if part), b""
        ).startswith(b"[")


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
