"""Reads the DATA of a fine-tuning run: texts or chats become sequences of tokens of one length."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
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
WRITTEN = ("content", "tool_calls")
"""Fields of a message that a chat template must write."""
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Fields that it must write of the last message; of earlier ones it may leave them out."""
NAMES = ("type", "id")
"""Fields whose texts a template may read instead of writing them."""
BESIDE = ("image", "images", "video", "videos", "audio", "audios", "documents")
"""Fields of a row that would be lost."""
WEIGHTS = ("weight", "train", "training", "loss")
"""Fields of a message that say whether it is trained on; all are."""
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
    tokens_of_documents = [torch.empty(0, dtype=torch.int64)]
    documents = _documents(data)
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    while at_once := list(islice(documents, AT_ONCE)):
        texts = [_text(document, f"{data}: {where}", tokenizer) for where, document in at_once]
        # JSON may hold halves of surrogate pairs
        texts = [text.encode(errors="replace").decode() for text in texts if text]
        ids_of_texts = tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
        # a tensor of no number would be of floats
        tokens_of_documents += [torch.tensor([*ids, *end]).long() for ids in ids_of_texts]

    tokens = torch.cat(tokens_of_documents)
    if len(tokens) < length:
        reason = "has no text"
        if len(tokens):
            reason = (
                f"has {len(tokens)} tokens, fewer than one sequence: choose a --length of at most "
                f"{len(tokens)}"
            )
        raise InputError(f"{data}: {reason}, or name other data")

    num_whole = len(tokens) // length
    rows = tokens[: num_whole * length].view(-1, length)
    num_rows = -(-num_whole // batch) * batch  # the next multiple of the batch
    return rows[torch.arange(num_rows) % num_whole]


def _text(document: Any, where: str, tokenizer: Any) -> str:
    """Return the text of a document, or of its messages by the tokenizer's chat template.

    Args:
        document: an entry of DATA, maybe no table at all.
        where: names it in messages.

    Raises:
        InputError: it has neither, or the template leaves out something of it.
    """
    row = document if isinstance(document, dict) else {}
    for name in BESIDE:
        if row.get(name):
            raise InputError(f'{where}: has "{name}", which no text is made of: leave it out')
    messages = row.get("messages")
    if not messages and isinstance(row.get("text"), str):  # as in TRL, messages come first
        return str(row["text"])
    if not isinstance(messages, list):
        raise InputError(
            f'{where}: has neither "text" nor "messages" ({document!r:.60}): give it one of '
            "them, or leave it out"
        )
    if not tokenizer.chat_template:
        raise InputError(
            f'{where}: has "messages", and the model\'s tokenizer no chat template: give '
            '"text" instead'
        )
    return _written(document, where, tokenizer)


def _written(document: dict[str, Any], where: str, tokenizer: Any) -> str:
    """Return what the tokenizer's chat template makes of a document's messages; errors of
    `_text`."""
    messages = document["messages"]
    words: dict[str, int] = {}
    """Words that stand in place of texts, and the number of the message of each."""
    marked = []  # messages of these words
    for number, message in enumerate(messages, 1):
        _require_message(message, f"{where}: message {number}")
        fields = WRITTEN + REASONING if number == len(messages) else WRITTEN
        given = {name: message[name] for name in fields if name in message}
        marked.append(message | _marked(given, number, words))
    tools = _tools(document.get("tools"), where)
    try:
        options = document.get("chat_template_kwargs") or {}
        write = partial(tokenizer.apply_chat_template, tokenize=False, **options)
        text = str(write(messages, tools=tools))
        told = str(write(marked, tools=tools))
        ignores_tools = tools and text == str(write(messages))
    except Exception as error:  # a template may raise anything
        reason = " ".join(str(error).split())
        raise InputError(
            f"{where}: the chat template refuses its messages ({reason:.200}): correct them"
        ) from error
    if ignores_tools:
        raise InputError(
            f'{where}: has "tools", which the model\'s chat template does not write: leave them out'
        )
    lost = [number for word, number in words.items() if word not in told]
    for number, message in enumerate(messages, 1):
        content = message.get("content")
        # a template that takes a list for a text writes Python's own form of it
        if number in lost or (isinstance(content, list) and repr(content) in text):
            raise InputError(
                f"{where}: message {number}, of role {message['role']!r}, is not as it stands, "
                "with its calls and reasoning, in what the model's chat template writes: correct "
                "its role, or leave out what is not written"
            )
    return text


def _require_message(message: Any, where: str) -> None:
    """Raise InputError if a template would find no role or no content in a message."""
    has_role = isinstance(message, dict) and isinstance(message.get("role"), str)
    if not has_role or not (
        isinstance(message.get("content"), str | list) or message.get("tool_calls")
    ):
        raise InputError(
            f'{where} has no "role" and "content" ({message!r:.60}): give it both, or leave it out'
        )
    for name in WEIGHTS:
        if message.get(name) not in (None, True):  # 1 equals True
            raise InputError(
                f'{where} has "{name}" {message[name]!r}, but all tokens are trained on alike: '
                "leave it out"
            )


def _marked(value: Any, number: int, words: dict[str, int]) -> Any:
    """Return a part of a message with a new word in place of each text, which `words` gets with the
    message's number: so a text that a template leaves out is missed, also if another one has
    it."""
    if isinstance(value, str) and value.strip():
        word = f"q{len(words)}z"
        words[word] = number
        return word
    if isinstance(value, list):
        return [_marked(each, number, words) for each in value]
    if isinstance(value, dict):
        return {
            name: each if name in NAMES else _marked(each, number, words)
            for name, each in value.items()
        }
    return value


def _tools(tools: Any, where: str) -> list[Any] | None:
    """Return a document's tools, a list of JSON schemas or the text of one; None if it has none.

    Raises:
        InputError: they are something else.
    """
    found = tools or None
    if isinstance(tools, str) and tools.strip():
        with suppress(ValueError, RecursionError):
            found = json.loads(tools)
    is_list = isinstance(found, list) and all(isinstance(each, dict) for each in found)
    if found is None or is_list:
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
        if not path.is_file() or suffix in TABLES:  # a dataset of `datasets`, or a table
            for number, row in enumerate(_dataset(data), 1):
                yield f"row {number}", row
        elif suffix not in (LINES, LIST):  # a text, one document
            text = read_bytes(path).decode("utf-8-sig")
            if "\0" in text:
                raise ValueError("it has zero bytes")
            yield "the text", {"text": text}
        elif suffix == LIST and _is_list(path):  # one list of JSON
            for number, entry in enumerate(parsed(read_bytes(path)), 1):
                yield f"entry {number}", entry
        else:  # JSON lines
            with open_file(path) as file:
                for number, line in enumerate(file, 1):
                    where = f" line {number}:"
                    if number == 1:
                        line = line.removeprefix(BOM)
                    if line.strip(SPACE):
                        yield f"line {number}", parsed(line)
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
        return file.read(4096).lstrip(SPACE).startswith(b"[")


def _dataset(data: str) -> Any:
    """Return the split "train" of a dataset of `datasets`, or the rows of a table."""
    import datasets

    try:
        # a folder that `datasets` saved: one split, or several by name
        if Path(data, "state.json").exists() or Path(data, "dataset_dict.json").exists():
            loaded = datasets.load_from_disk(data)
            return loaded["train"] if isinstance(loaded, dict) else loaded
        if Path(data).is_file():  # a table
            builder = TABLES[suffix_of(Path(data))]
            return datasets.load_dataset(builder, data_files=data, split="train")
        return datasets.load_dataset(data, split="train")
    except Exception as error:  # of the hub, of a file, of a builder
        reason = " ".join(str(error).split())
        raise InputError(
            f"{data}: datasets cannot load its split train ({reason:.200}): name other data"
        ) from error
