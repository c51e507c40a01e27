"""Hidden tokens and pairs of texts: which tokens are hidden, the layout of a pair's row, refusals,
and the default pairs."""

from __future__ import annotations

import gettext
import json
import random
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from moesaic.errors import InputError
from moesaic.train.config import DataConfig
from moesaic.train.data import Batches, as_batch
from moesaic_lab.paper_train.data import (
    LANGUAGES,
    django_catalogues,
    hidden_tokens,
    load_hidden,
    load_pairs,
    read_pairs,
)
from moesaic_lab.paper_train.models import PADDING
from runs import write_text

MASK = 99
HIDE = partial(hidden_tokens, mask=MASK)


def test_an_encoder_finds_a_fixed_share_of_tokens_most_of_them_hidden() -> None:
    data = np.random.default_rng(0).integers(MASK, size=200 * 40 + 1).astype(np.uint16)
    seen, found = as_batch(data, list(range(200)), 40, HIDE)
    whole = torch.from_numpy(data[:-1].astype(np.int64)).view(200, 40)
    chosen = found != -1
    assert chosen.sum(1).tolist() == [6] * 200
    assert torch.equal(found[chosen], whole[chosen])
    assert torch.equal(seen[~chosen], whole[~chosen])
    assert float((seen[chosen] == MASK).float().mean()) == pytest.approx(0.8, abs=0.04)
    assert float((seen[chosen] == whole[chosen]).float().mean()) == pytest.approx(0.1, abs=0.03)
    again = as_batch(data, [3], 40, HIDE)
    assert torch.equal(again[0][0], seen[3])


def test_every_epoch_hides_other_tokens_and_every_part_the_same() -> None:
    data = np.arange(81, dtype=np.uint16) % MASK
    whole = Batches(data, 20, 4, seed=0, objective=HIDE)
    halves = [Batches(data, 20, 4, seed=0, part=(index, 2), objective=HIDE) for index in range(2)]
    for index in range(3):
        for one, parts in zip(whole.get(index), zip(*(half.get(index) for half in halves))):
            assert torch.equal(one, torch.cat(parts))
    assert not torch.equal((whole.get(0)[1] != -1).sum(0), (whole.get(1)[1] != -1).sum(0))


def test_an_encoders_vocabulary_has_the_mask(tmp_path: Path) -> None:
    corpus = load_hidden(DataConfig(path=(str(write_text(tmp_path / "a.txt")),)), None)
    seen, found = as_batch(corpus.train, list(range(20)), 16, corpus.objective)
    assert (corpus.vocab_size, int(seen.max()), corpus.val_bytes) == (257, 256, len(corpus.val))
    assert int(found.max()) < 256


def write_rows(path: Path, count: int = 200) -> dict[str, str]:
    draw = random.Random(0)
    pairs = {f"{word:x}" * draw.randint(1, 3): f"-{word}" for word in range(count)}
    path.write_text(
        "".join(json.dumps({"source": a, "target": b}) + "\n" for a, b in pairs.items())
    )
    return pairs


def test_a_pair_is_a_row_and_no_source_is_in_both_parts(tmp_path: Path) -> None:
    pairs = write_rows(tmp_path / "a.jsonl")
    corpus = load_pairs(DataConfig(path=(str(tmp_path / "a.jsonl"),), val_share=0.2), 20, None)
    found = {}
    for part in (corpus.train, corpus.val):
        for row in part[:-1].reshape(-1, 20):
            source, target = (
                bytes(half[half != 0].astype(np.uint8)).decode() for half in (row[:10], row[10:])
            )
            assert row[10] == 0
            assert row[-1] == 0
            assert source not in found
            found[source] = target
    assert found == {source: target for source, target in pairs.items() if len(source) <= 10}
    assert len(corpus.val) < len(corpus.train) / 2


def test_pairs_of_a_catalogue_are_those_that_gettext_reads() -> None:
    path = max(django_catalogues(), key=lambda path: path.stat().st_size)
    with path.open("rb") as file:
        catalogue = gettext.GNUTranslations(file)
    pairs = read_pairs(path)
    assert len(pairs) > 200
    times = Counter(source for source, _ in pairs)  # a message may have several contexts
    texts = [(a.decode(), b.decode()) for a, b in pairs if times[a] == 1]
    plain = [(source, target) for source, target in texts if catalogue.gettext(source) != source]
    assert len(plain) > 200
    assert all(catalogue.gettext(source) == target for source, target in plain)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "hello\n", '{"text": "a"}\n', "[1]\n", '{"source": 1, "target": "b"}\n']
)
def test_what_holds_no_pairs_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(InputError, match=r"a\.jsonl holds no pairs"):
        load_pairs(DataConfig(path=(str(tmp_path / "a.jsonl"),)), 20, None)


def test_pairs_of_which_none_fits_are_refused(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.jsonl")
    with pytest.raises(InputError, match="must fit 2 tokens a side"):
        load_pairs(DataConfig(path=(str(tmp_path / "a.jsonl"),)), 4, None)


def test_no_message_of_django_is_in_both_parts_in_whatever_language() -> None:
    corpus = load_pairs(DataConfig(), 128, None)

    def messages(tokens: np.ndarray) -> Counter[bytes]:
        rows = tokens[:-1].reshape(-1, 128)[:, :64]
        texts = [bytes(row[row != PADDING].astype(np.uint8)) for row in rows]
        assert {text.partition(b": ")[0].decode() for text in texts} == set(LANGUAGES)
        return Counter(text.partition(b": ")[2] for text in texts)

    train = messages(corpus.train)
    held = messages(corpus.val)
    assert len(held) > 30
    assert max(held.values()) == len(LANGUAGES)
    assert not set(train) & set(held)
