"""The installed files: the wheel has the library and nothing of the laboratory, which has a wheel
of its own."""

from __future__ import annotations

import os
import tarfile
import zipfile
from pathlib import Path

import yaml
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

from moesaic.configfile import read_table

ROOT = Path(__file__).resolve().parent.parent


def names_in_wheel(project: Path, folder: Path) -> set[str]:
    """Build a project's wheel and return the names of its files, without its metadata."""
    (wheel,) = WheelBuilder(str(project)).build(directory=str(folder), versions=["standard"])
    with zipfile.ZipFile(wheel) as opened:
        return {name for name in opened.namelist() if ".dist-info/" not in name}


def tracked(folder: str) -> set[str]:
    """Return the files below a folder, relative to the folder from which its package is
    imported."""
    base = (ROOT / folder).parent
    return {
        Path(place, name).relative_to(base).as_posix()
        for place, _, names in os.walk(ROOT / folder)
        for name in names
        if "__pycache__" not in place
    }


def test_the_wheel_is_the_library_and_nothing_else(tmp_path: Path) -> None:
    names = names_in_wheel(ROOT, tmp_path)
    assert names == tracked("src/moesaic")
    assert not [
        name
        for name in names
        if "lab" in Path(name).parts[0] or name.startswith(("benchmarks", "tests"))
    ]


def test_the_source_distribution_has_what_the_wheel_is_built_from(tmp_path: Path) -> None:
    (archive,) = SdistBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    with tarfile.open(archive) as opened:
        names = {name.split("/", 1)[1] for name in opened.getnames()}
    assert {f"src/{name}" for name in tracked("src/moesaic")} <= names
    assert {"README.md", "LICENSE", "CITATION.cff", "CHANGELOG.md", "PKG-INFO"} <= names
    assert not [
        name
        for name in names
        if name.startswith(("lab/", "tests/", "docs/", "benchmarks/", "examples/"))
    ]


def test_the_metadata_is_ready_for_an_index() -> None:
    """Every supported Python is named, and the version is that of the citation; no address stands
    for a missing one."""
    project = read_table(ROOT / "pyproject.toml")["project"]
    named = {
        line.split(" :: ")[-1]
        for line in project["classifiers"]
        if line.startswith("Programming Language")
    }
    assert {f"3.{minor}" for minor in range(10, 15)} <= named
    assert project["authors"] == [{"name": "Moesaic developers"}]
    assert all(address.startswith("https://") for address in project.get("urls", {}).values())
    citation = (ROOT / "CITATION.cff").read_text("utf-8")
    assert f"\nversion: {project['version']}\n" in citation
    assert f"\nlicense: {project['license']}\n" in citation


def test_an_install_adds_nothing_to_anybodys_pytest() -> None:
    """A plugin of an entry point would be imported by every session of pytest: ten modules of ours,
    and sixteen of Python's, for whoever has both packages."""
    for file in ("pyproject.toml", "lab/pyproject.toml"):
        assert "pytest11" not in read_table(ROOT / file)["project"].get("entry-points", {})
    for plugin in ("src/moesaic/testing/plugin.py", "lab/moesaic_testbed/plugin.py"):
        module = ".".join(Path(plugin).with_suffix("").parts[1:])
        assert f"`pytest -p {module}`" in (ROOT / plugin).read_text("utf-8")


def test_public_ci_runs_what_everybody_can_run() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text("utf-8"))
    commands = {
        name: [step["run"] for step in job["steps"] if "run" in step]
        for name, job in workflow["jobs"].items()
    }
    assert commands["ci"][-1] == ".ci/run"
    assert all(line.startswith(("apt-get ", "git config ")) for line in commands["ci"][:-1])
    assert commands["places"] == ["python -m places ${{ matrix.place }}"]
    assert workflow["jobs"].keys() == {"ci", "places"}
    forms = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
    assert all(yaml.safe_load(form.read_text("utf-8")) for form in forms)
    assert len(forms) == 4


def test_a_release_waits_for_the_owners_word() -> None:
    """It publishes what `make dist` has tried: both packages, for a tag alone."""
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text("utf-8")
    release = yaml.safe_load(text)
    assert release[True] == {"push": {"tags": ["v*"]}}  # YAML reads the word "on" as true
    assert release["jobs"]["dist"]["if"] == "vars.PUBLISH == 'yes'"
    assert {"run": "make dist"} in release["jobs"]["dist"]["steps"]
    assert release["jobs"]["publish"]["needs"] == "dist"
    words = (ROOT / "CONTRIBUTING.md").read_text("utf-8").split("\n## Publishing\n")[1]
    assert "`PUBLISH`" in words
    assert "`[project.urls]`" in words


def test_the_newest_releases_are_resolved_and_run_every_month() -> None:
    newest = yaml.safe_load((ROOT / ".github" / "workflows" / "newest.yml").read_text("utf-8"))
    (schedule,) = newest[True]["schedule"]
    assert schedule["cron"].split()[2:] == ["1", "*", "*"]
    commands = [step["run"] for step in newest["jobs"]["newest"]["steps"] if "run" in step]
    assert commands[:2] == ['make places PLACES="resolution"', "make test-newest"]


def test_the_laboratory_has_a_wheel_of_its_own(tmp_path: Path) -> None:
    names = names_in_wheel(ROOT / "lab", tmp_path)
    assert names == tracked("lab/moesaic_lab") | tracked("lab/moesaic_testbed")
    assert {"moesaic_lab/configs/comm.toml", "moesaic_lab/reproduce/data/constants.toml"} <= names
