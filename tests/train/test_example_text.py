"""The text of a run that names none is the same for everybody, or the run does not start."""

from __future__ import annotations

import shutil
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from helpers import refused
from moesaic.train.config import DataConfig
from moesaic.train.data import fingerprint, load_corpus
from moesaic.train.example_text import LEFT_OUT, PACKAGE, SHA256, VERSION, digest, example_text
from moesaic.train.tokenizer import ByteTokenizer

ROOT = Path(__file__).resolve().parents[2]
REPAIR = (
    f"pip install --force-reinstall --no-deps {PACKAGE}=={VERSION}, or name text with data.path"
)


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of the package's text, which is found in place of the package."""
    root = tmp_path / "first on the path" / PACKAGE
    shutil.copytree(example_text()[1], root, ignore=shutil.ignore_patterns("__pycache__", "tests"))
    monkeypatch.delitem(sys.modules, PACKAGE, raising=False)
    monkeypatch.syspath_prepend(str(root.parent))
    return root


def test_the_text_is_the_source_of_a_pinned_package():
    files, root = example_text()
    assert version(PACKAGE) == VERSION
    assert root.name == PACKAGE
    names = [path.relative_to(root).as_posix() for path in files]
    assert names == sorted(names)
    assert {"core/expr.py", "solvers/solvers.py"} <= set(names)
    assert not {part for name in names for part in name.split("/")} & LEFT_OUT
    assert digest(files, root) == SHA256
    assert (len(files), sum(path.stat().st_size for path in files)) == (818, 15_854_120)


def test_a_run_without_a_path_trains_on_it_and_everybody_gets_the_same_tokens():
    corpus = load_corpus(DataConfig())
    assert corpus.vocab_size == 256
    assert isinstance(corpus.tokenizer, ByteTokenizer)
    assert f"files of {PACKAGE} {VERSION}" in corpus.description
    assert corpus.val_bytes == len(corpus.val)
    assert fingerprint(corpus.train) == "49310ae7490c09002ba657f2a08cb33e"
    assert fingerprint(corpus.val) == "62347e69aec875b9f250f3d004026a5b"
    assert (len(corpus.train), len(corpus.val)) == (14_869_094, 985_836)


def test_the_folder_of_the_package_does_not_matter(copy):
    files, root = example_text()
    assert root == copy
    assert digest(files, root) == SHA256


@pytest.mark.parametrize("change", ["edited", "added", "removed", "renamed"])
def test_another_text_is_refused_in_one_line(copy, change):
    file = copy / "core" / "expr.py"
    if change == "edited":
        file.write_bytes(file.read_bytes().replace(b"\n", b"\r\n", 1))
    elif change == "added":
        (copy / "mine.py").write_text("x = 1\n")
    elif change == "removed":
        file.unlink()
    else:
        file.rename(copy / "core" / "expression.py")
    line = refused(load_corpus, DataConfig())
    assert f"source of {PACKAGE} {VERSION}, and the files in {copy} are others" in line
    assert REPAIR in line


@pytest.mark.parametrize("found", [None, "a module"])
def test_a_missing_package_is_named(tmp_path, monkeypatch, found):
    (tmp_path / f"{PACKAGE}.py").write_text("")
    monkeypatch.delitem(sys.modules, PACKAGE, raising=False)
    monkeypatch.setattr("sys.path", [str(tmp_path)] if found else [])
    line = refused(example_text)
    assert f"{PACKAGE} is not installed" in line
    assert REPAIR in line


def test_the_pages_and_the_help_name_the_text():
    for page in ("README.md", "docs/training.md", "docs/start.md", "src/moesaic/train/config.py"):
        assert f"{PACKAGE} {VERSION}" in (ROOT / page).read_text("utf-8"), page
