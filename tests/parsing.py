"""Commands whose words are parsed, and which then end."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest


class ParsedError(BaseException):
    """Raised in place of running a command whose words have been parsed."""


def parse_only(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a command end after its words have been parsed."""
    parse = module.parse

    def stopping(*given: Any, **named: Any) -> None:
        parse(*given, **named)
        raise ParsedError

    for each in (module, *vars(module).values()):  # its subcommands are modules that it imports
        if getattr(each, "parse", None) is parse:
            monkeypatch.setattr(each, "parse", stopping)
