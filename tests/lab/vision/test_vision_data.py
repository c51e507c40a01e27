"""Images of digits: what is in them, how they are split, which ones a batch holds; and what is said
without scikit-learn."""

from __future__ import annotations

import sys

import pytest
import torch

from moesaic.errors import InputError
from moesaic_lab.vision.data import ImageBatches, Images, load_digits, moved


def numbered(count: int) -> Images:
    """Images that say their number."""
    numbers = torch.arange(count)
    return Images(numbers.view(-1, 1, 1, 1).float(), numbers)


def test_without_scikit_learn_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(
        InputError,
        match=r'the digits need scikit-learn: in a clone .*, pip install "./lab\[vision\]"',
    ):
        load_digits()


def test_digits_are_split_whole_and_the_same_each_time() -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    train, val = load_digits()
    assert (len(train), len(val)) == (1438, 359)
    assert train.pixels.shape == (1438, 1, 8, 8)
    assert (train.pixels.dtype, train.labels.dtype) == (torch.float32, torch.int64)
    assert (float(train.pixels.min()), float(train.pixels.max())) == (-1.0, 1.0)
    every = torch.cat([train.pixels, val.pixels]).flatten(1)
    labelled = {
        tuple(row)
        for row in torch.cat([every, torch.cat([train.labels, val.labels])[:, None]], 1).tolist()
    }
    pixels, labels = datasets.load_digits(return_X_y=True)
    assert labelled == {
        (*(row / 8 - 1).tolist(), float(label)) for row, label in zip(pixels, labels)
    }
    assert torch.equal(load_digits()[0].pixels, train.pixels)
    assert not torch.equal(load_digits(seed=1)[0].labels, train.labels)
    assert len(load_digits(val_share=0.5)[1]) == 898


@pytest.mark.parametrize("share", [0.0, 1.0, -0.1])
def test_a_share_that_leaves_nothing_is_refused(share: float) -> None:
    pytest.importorskip("sklearn.datasets")
    with pytest.raises(InputError, match=f"val_share={share}: must leave images on both sides"):
        load_digits(val_share=share)


def test_every_epoch_has_each_image_once_in_an_order_of_its_own() -> None:
    batches = ImageBatches(numbered(12), 4, seed=3)
    epochs = [
        [label for index in range(3) for label in batches.get(3 * epoch + index)[1].tolist()]
        for epoch in (0, 1)
    ]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(12))
    assert epochs[0] != epochs[1]
    assert epochs[0] != list(range(12))
    assert batches.get(1)[1].tolist() == epochs[0][4:8]  # whatever was asked for before
    assert ImageBatches(numbered(12), 4, seed=4).get(0)[1].tolist() != epochs[0][:4]


def test_batches_that_reach_past_an_epoch_take_from_the_next() -> None:
    batches = ImageBatches(numbered(5), 12)
    seen = [label for index in range(5) for label in batches.get(index)[1].tolist()]
    assert [sorted(seen[at : at + 5]) for at in range(0, 60, 5)] == [list(range(5))] * 12


def test_images_keep_their_labels_and_parts_make_the_whole() -> None:
    whole = ImageBatches(numbered(10), 6).get(2)
    parts = [ImageBatches(numbered(10), 6, part=(part, 3)).get(2) for part in range(3)]
    assert torch.equal(torch.cat([labels for _, labels in parts]), whole[1])
    assert whole[0].flatten().tolist() == whole[1].tolist()
    assert parts[0][0].shape == (2, 1, 1, 1)


def test_varied_images_are_other_ones_each_time_and_parts_make_the_whole() -> None:
    data = Images(
        torch.rand(6, 1, 8, 8, generator=torch.Generator().manual_seed(0)) * 2 - 1, torch.arange(6)
    )
    whole = ImageBatches(data, 6, varied=True)
    first, again, later = (whole.get(index)[0] for index in (1, 1, 7))
    assert torch.equal(first, again)
    assert not torch.equal(first, later)
    parts = [ImageBatches(data, 6, part=(part, 3), varied=True).get(1) for part in range(3)]
    torch.testing.assert_close(torch.cat([pixels for pixels, _ in parts]), first)
    assert torch.equal(torch.cat([labels for _, labels in parts]), whole.get(1)[1])
    assert first.min() >= -1
    assert first.max() <= 1


def test_images_are_moved_by_what_is_asked_for() -> None:
    pixels = torch.full((2, 1, 8, 8), -1.0)
    pixels[:, :, 2, 5] = 1.0
    assert torch.allclose(moved(pixels, torch.zeros(2, 4)), pixels, atol=1e-6)
    # an eighth of 8 pixels
    right = moved(pixels, torch.tensor([[0.0, 0.0, -1.0, 0.0]]).expand(2, 4))
    expected = torch.full_like(pixels, -1.0)
    expected[:, :, 2, 6] = 1.0
    torch.testing.assert_close(right, expected, rtol=0, atol=1e-5)
    gone = moved(pixels, torch.tensor([[0.0, 0.0, 0.0, 1.0]]).expand(2, 4))
    expected = torch.full_like(pixels, -1.0)
    expected[:, :, 1, 5] = 1.0
    torch.testing.assert_close(gone, expected, rtol=0, atol=1e-5)
    plus = torch.full((1, 1, 9, 9), -1.0)
    plus[:, :, 4] = plus[:, :, :, 4] = 1.0
    turned = moved(plus, torch.tensor([[1.0, 0.0, 0.0, 0.0]]))
    # a cross is alike after a quarter turn
    torch.testing.assert_close(turned.rot90(1, (2, 3)), turned)
    assert (turned - plus).abs().max() > 0.3


@pytest.mark.parametrize("size", [0, 5])
def test_batches_that_do_not_split_are_refused(size: int) -> None:
    with pytest.raises(
        InputError, match=f"batch_size={size} does not split over 2 data parallel groups"
    ):
        ImageBatches(numbered(8), size, part=(0, 2))


def test_no_images_are_refused() -> None:
    with pytest.raises(InputError, match="batches need images, got none"):
        ImageBatches(numbered(0), 4)
