"""What pages are made of, and how one is written: a self-contained HTML file with plotly.js inside, which loads nothing.

The templates are in `templates/`; jinja2 escapes whatever they show.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import plotly.io
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from moesaic import __version__
from moesaic.errors import InputError


@dataclass(frozen=True)
class Picture:
    """A picture with its title and a caption."""

    title: str
    caption: str
    figure: go.Figure


@dataclass(frozen=True)
class PictureGrid:
    """Charts beside each other; those without a line are left out."""

    charts: Sequence[Picture]
    shape: str = ""
    """Empty: two in a row; quarter: four."""


@dataclass(frozen=True)
class Key:
    """A colour of a legend."""

    name: str
    colour: str
    is_thick: bool = False


@dataclass(frozen=True)
class Legend:
    """What colours mean."""

    keys: Sequence[Key]


@dataclass(frozen=True)
class Table:
    """Rows of text; the first cell of each is its head."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of a page under a title."""

    title: str
    run: str = ""
    """The run that it is about, behind the title."""
    colour: str = ""
    """Of the run; empty for none."""
    text: str = ""
    blocks: Sequence[PictureGrid | Legend | Table] = ()


class Drawn:
    """The charts of a page, in the order in which it shows them."""

    def __init__(self) -> None:
        self.figures: dict[str, go.Figure] = {}

    def add(self, figure: go.Figure) -> str:
        """Return the id of the element that a figure is drawn into."""
        name = f"chart-{len(self.figures) + 1}"
        self.figures[name] = figure
        return name

    def as_json(self) -> Markup:
        """Return the charts as the members of a JavaScript object."""
        text = ",\n".join(f'"{name}": {plotly.io.to_json(made)}' for name, made in self.figures.items())
        assert "</" not in text  # plotly writes < as an escape, so that no name can end the script
        return Markup(text)


def page_text(template: str, drawn: Drawn, **content: Any) -> str:
    """Return a whole HTML file.

    Args:
        template: name of a file in `templates/`.
        drawn: takes the charts that the page shows.
        content: what the template names.
    """
    pages = Environment(
        loader=PackageLoader("moesaic.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    return pages.get_template(template).render(
        drawn=drawn, version=__version__, plotly_js=Markup(get_plotlyjs()), **content
    )


def write_text(text: str, path: Path) -> Path:
    """Write a page; returns its path.

    Raises:
        InputError: if the path is a folder, or cannot be written.
    """
    if path.is_dir():
        raise InputError(f"{path}: is a folder: name a file, {path / 'page.html'} say")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror}): choose another place") from error
    return path
