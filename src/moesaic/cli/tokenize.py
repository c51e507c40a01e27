"""`moesaic tokenize`: turns text into a packed .bin file of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from moesaic.cli.arguments import parse
from moesaic.errors import InputError, in_one_line


@dataclass(frozen=True, kw_only=True)
class TokenizeOptions:
    """Options of `moesaic tokenize`."""

    path: Annotated[
        tuple[str, ...],
        tyro.conf.Positional,
        tyro.conf.arg(metavar="PATH ...", help_behavior_hint="(required)"),
    ]
    """Files, globs or folders of text, JSON lines (.jsonl) or tables (.parquet, .arrow, .json,
    .csv); each argument is one source."""
    out: str = "tokens.bin"
    """The .bin file to write."""
    tokenizer: str = ""
    """A tokenizer.json of the tokenizers library. Empty: one token per byte."""
    text_field: str = "text"
    """The field of JSON lines and tables that holds the text."""

    def __post_init__(self) -> None:
        if not self.path:
            raise InputError("name at least one file or folder with text: moesaic tokenize texts/")
        if not self.out.endswith(".bin"):
            raise InputError(f"out={self.out}: files of tokens end in .bin")


def run(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    options = parse(
        TokenizeOptions,
        arguments,
        prog="moesaic tokenize",
        description="Turn text into a packed file of tokens.",
    )
    from moesaic.train.config import DataConfig
    from moesaic.train.tokenize import pack

    data = DataConfig(tokenizer=options.tokenizer, text_field=options.text_field)
    packed = pack(Path(options.out), options.path, data)
    for source, tokens, documents in zip(options.path, packed.tokens, packed.documents):
        print(in_one_line(f"{source}: {tokens:,} tokens of {documents:,} documents"))
    tokenizer_flag = f" --data.tokenizer {packed.tokenizer}" if packed.tokenizer else ""
    flags = f"--data.path {packed.path} --data.vocab-size {packed.vocab_size}{tokenizer_flag}"
    print(in_one_line(f"train on it with moesaic train {flags}"))
    return 0
