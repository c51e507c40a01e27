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
from moesaic.train.documents import LINES, LIST, TABLES, parsed, suffix_of

BOM = b"\xef\xbb\xbf"
SPACE = BOM + b" \t\r\n"
"""What may precede JSON."""
TOOL_ROLES = ("tool", "function", "ipython")
END_OF_REASONING = "</think>"
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
    messages = document["messages"]
    for number, message in enumerate(messages, 1):
        _require_message(message, f"{where}: message {number}")
    try:
        text = str(tokenizer.apply_chat_template(messages, tools=tools, tokenize=False))
        is_read = tools is None or text != str(
            tokenizer.apply_chat_template(messages, tokenize=False)
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
    for number, message in enumerate(messages, 1):
        if not _is_written(message, text):
            raise InputError(
                f"{where}: message {number}, of role {message['role']!r}, is not as it stands in "
                "what the model's chat template writes: correct its role, or leave it out"
            )
    return text


def _require_message(message: Any, where: str) -> None:
    """Raise InputError if a template would find no role or no content in a message."""
    is_message = isinstance(message, dict) and isinstance(message.get("role"), str)
    if is_message and (isinstance(message.get("content"), str | list) or message.get("tool_calls")):
        return
    raise InputError(
        f'{where} has no "role" and "content" ({message!r:.60}): give it both, or leave it out'
    )


def _is_written(message: dict[str, Any], text: str) -> bool:
    """Return whether a message stands in the text that a template made of it. Templates may leave
    out earlier reasoning, and write what a tool returned in a form of their own."""
    if message["role"] in TOOL_ROLES:
        return True
    content = message.get("content") or ""
    parts = [{"text": content}] if isinstance(content, str) else content
    said = [part.get("text") or "" for part in parts if isinstance(part, dict)]
    said = [each.rpartition(END_OF_REASONING)[2].strip() for each in said]
    names = [
        function["name"]
        for call in message.get("tool_calls") or []
        if isinstance(call, dict)
        and isinstance(function := call.get("function", call), dict)
        and isinstance(function.get("name"), str)
    ]
    is_plain = isinstance(content, str) or repr(content) not in text
    return is_plain and all(each in text for each in (*said, *names))


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
    suffix = suffix_of(path)
    where = ""
    try:
        if not path.is_file() or suffix in TABLES:
            yield from ((f"row {number}", each) for number, each in enumerate(_dataset(data), 1))
        elif suffix not in (LINES, LIST):
            text = read_bytes(path).decode("utf-8-sig")
            if "\0" in text:
                raise ValueError("it has zero bytes")
            yield "the text", {"text": text}
        elif suffix == LIST and _is_list(path):
            yield from (
                (f"entry {number}", each) for number, each in enumerate(parsed(read_bytes(path)), 1)
            )
        else:
            with open_file(path) as file:
                for number, line in enumerate(file, 1):
                    where = f" line {number}:"
                    if line.strip(SPACE):
                        yield (
                            f"line {number}",
                            parsed(line.removeprefix(BOM) if number == 1 else line),
                        )
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        kind = {LINES: "JSON lines", LIST: "a list of JSON or JSON lines"}.get(suffix, "text")
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
    """Return the split "train" of a dataset of `datasets`, or the rows of a table."""
    import datasets

    try:
        if Path(data, "state.json").exists() or Path(data, "dataset_dict.json").exists():
            loaded = datasets.load_from_disk(data)
            return loaded["train"] if isinstance(loaded, dict) else loaded
        if Path(data).is_file():
            builder = TABLES[suffix_of(Path(data))]
            return datasets.load_dataset(builder, data_files=data, split="train")
        return datasets.load_dataset(data, split="train")
    except Exception as error:  # of the hub, of a file, of a builder
        reason = " ".join(str(error).split())
        raise InputError(
            f"{data}: datasets cannot load its split train ({reason:.200}): name other data"
        ) from error
