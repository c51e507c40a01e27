"""Runs the code blocks of docs/extending.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent.parent / "docs" / "extending.md"


def block(section: str) -> dict[str, Any]:
    """Return all names that the first code block of a section defines; the block is a whole
    file."""
    text = PAGE.read_text(encoding="utf-8").split(f"\n## {section}\n")[1].split("\n## ")[0]
    code, *_ = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    return names
