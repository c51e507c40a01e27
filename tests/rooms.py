"""Small made-up packages for tests of what reads source code."""

from __future__ import annotations

from pathlib import Path


def package(folder: Path, **files: str) -> Path:
    """Write a package named `rooms`; `a__b` stands for a/b.py."""
    made = folder / "rooms"
    for name, text in files.items():
        path = made / (name.replace("__", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for path in [made, *made.rglob("*")]:
        if path.is_dir():
            path.joinpath("__init__.py").touch()
    return made
