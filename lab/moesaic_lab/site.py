"""A hook of mkdocs: the site's links to its repository come from `project.urls` of pyproject.toml,
as a package's do.

The table is empty until an owner names the repository; the site then has no such links.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moesaic.configfile import read_table

PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"


def on_config(config: Any, project: Path = PROJECT) -> Any:
    """Return the site's configuration with the repository's address, and where each page is
    edited."""
    address = read_table(project)["project"].get("urls", {}).get("Repository", "")
    if address:
        config.repo_url = address
        config.repo_name = "/".join(address.rstrip("/").split("/")[-2:])
        config.edit_uri = "edit/main/docs/"
    return config
