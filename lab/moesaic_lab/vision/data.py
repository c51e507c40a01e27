"""Images with labels: scikit-learn's handwritten digits, which need no download, or folders of
pictures; and micro-batches.

A micro-batch is a pure function of (data, seed, index), as for text: resuming needs only the index.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from hashlib import sha256
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.errors import InputError, to_install

TURN = 15.0
SCALE = 0.15
SHIFT = 0.125
"""Largest random changes of training images: rotation in degrees, scaling as a share, shift as a
share of a side."""


@dataclass(frozen=True)
class Images:
    """Images and their labels."""

    pixels: Tensor
    """(images, channels, height, width) float32, between -1 and 1."""
    labels: Tensor
    """(images,) int64 classes."""

    def __len__(self) -> int:
        return len(self.labels)


def load_digits(val_share: float = 0.2, seed: int = 0) -> tuple[Images, Images]:
    """Return scikit-learn's 1,797 digits of 8x8 pixels, split at random into training and
    validation.

    Both parts have images by the same writers, so validation is easier than recognising unknown
    writers.

    Raises:
        InputError: without scikit-learn, or if `val_share` leaves one part empty.
    """
    package = find_spec("sklearn")
    if package is None or package.origin is None:
        raise InputError(f"the digits need scikit-learn: {to_install('./lab[vision]')}")
    # scikit-learn's own loader would import the whole package, which takes longer than a short
    # training.
    file = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    table = np.loadtxt(file, delimiter=",")
    pixels = table[:, :-1]
    labels = table[:, -1]
    num_val = round(len(labels) * val_share)
    if not 0 < num_val < len(labels):
        raise InputError(
            f"val_share={val_share}: must leave images on both sides: choose it above 0 and below 1"
        )
    order = np.random.default_rng(seed).permutation(len(labels))
    scaled = (pixels[order] / 8 - 1).astype(np.float32)  # pixels are 0 to 16
    images = torch.from_numpy(scaled).view(-1, 1, 8, 8)
    classes = torch.from_numpy(labels[order].astype(np.int64))
    train = Images(images[num_val:], classes[num_val:])
    val = Images(images[:num_val], classes[:num_val])
    return train, val


def load_folder(
    root: Path, size: int, channels: int = 3, val_share: float = 0.05
) -> tuple[Images, Images]:
    """Return the pictures of a folder with a subfolder per class, as squares, split into training
    and validation.

    A picture is scaled until its shorter side fits, and its middle is cut out. A hash of its name
    decides its part.

    Args:
        root: the folder with the subfolders; classes are numbered in their alphabetical order.
        size: height and width of the returned images in pixels.
        channels: 3 for RGB, 1 for grey.
        val_share: share of the pictures for validation.

    Raises:
        InputError: without Pillow, or if the folders do not have enough pictures.
    """
    try:
        image_of = import_module("PIL.Image")
        fit = import_module("PIL.ImageOps").fit
    except ImportError as error:
        raise InputError(f"pictures need Pillow: {to_install('./lab[vision]')}") from error
    train: list[tuple[Tensor, int]] = []
    val: list[tuple[Tensor, int]] = []
    folders = sorted(path for path in root.glob("*") if path.is_dir())
    for label, folder in enumerate(folders):
        for path in sorted(folder.rglob("*")):
            if path.suffix.lower() not in (".png", ".jpg", ".jpeg", ".bmp", ".webp"):
                continue
            with image_of.open(path) as opened:
                converted = opened.convert("RGB" if channels == 3 else "L")
                square = np.asarray(fit(converted, (size, size)), dtype=np.float32)
            pixels = torch.from_numpy(square / 127.5 - 1).view(size, size, channels)
            digest = sha256(f"{folder.name}/{path.name}".encode()).digest()
            draw = int.from_bytes(digest[:8], "big") / 2**64  # in 0 to 1
            part = val if draw < val_share else train
            part.append((pixels.permute(2, 0, 1), label))
    if not val or not train:
        raise InputError(
            f"images={root}: {len(train)} pictures to train on, {len(val)} to "
            "validate with: give a folder with a folder of .png or .jpg pictures per class, and "
            "more of them"
        )
    return _stacked(train), _stacked(val)


def _stacked(pictures: list[tuple[Tensor, int]]) -> Images:
    """Return pictures, (channels, height, width) each with its label, as images."""
    pixels = torch.stack([picture for picture, _ in pictures])
    return Images(pixels, torch.tensor([label for _, label in pictures]))


class ImageBatches:
    """Micro-batches of images, shuffled anew in each epoch. A micro-batch may span the end of an
    epoch.

    Args:
        batch_size: images per micro-batch.
        seed: seed of the order and of the random changes.
        part: (index, count): return only part `index` of the `count` equal parts of each
            micro-batch.
        varied: change each image randomly with `moved`, differently each time.

    Raises:
        InputError: if a micro-batch does not split into `count` parts, or there are no images.
    """

    def __init__(
        self,
        data: Images,
        batch_size: int,
        seed: int = 0,
        part: tuple[int, int] = (0, 1),
        *,
        varied: bool = False,
    ) -> None:
        if batch_size < 1 or batch_size % part[1]:
            raise InputError(
                f"batch_size={batch_size} does not split over {part[1]} data parallel groups: "
                f"choose a multiple of {part[1]}"
            )
        if not len(data):
            raise InputError("batches need images, got none")
        self.data = data
        self.batch_size = batch_size
        self.seed = seed
        self.part = part
        self.varied = varied

    def get(self, index: int) -> tuple[Tensor, Tensor]:
        """Return this part of micro-batch `index`: (batch_size / parts, channels, height, width)
        and (batch_size / parts,)."""
        part, num_parts = self.part
        size = self.batch_size // num_parts
        start = part * size  # of this part within the micro-batch
        first = index * self.batch_size + start  # counted over all epochs
        rows: list[int] = []
        while len(rows) < size:
            epoch, within = divmod(first + len(rows), len(self.data))
            order = np.random.default_rng([self.seed, epoch]).permutation(len(self.data))
            missing = size - len(rows)
            rows += order[within : within + missing].tolist()
        pixels = self.data.pixels[rows]
        if self.varied:
            random = np.random.default_rng([self.seed, index, 1])
            # for the whole micro-batch, so that its split into parts changes nothing
            draws = random.uniform(-1, 1, (self.batch_size, 4))
            amounts = draws[start : start + size].astype(np.float32)
            pixels = moved(pixels, torch.from_numpy(amounts))
        return pixels, self.data.labels[rows]


def moved(pixels: Tensor, amounts: Tensor) -> Tensor:
    """Return images rotated, scaled and shifted; uncovered areas are black.

    Args:
        pixels: (images, channels, height, width) float32, between -1 and 1.
        amounts: (images, 4) float32 between -1 and 1: factors on `TURN`, on `SCALE`, and on `SHIFT`
            sideways and up.
    """
    angle = amounts[:, 0] * math.radians(TURN)
    scale = 1 + SCALE * amounts[:, 1]
    cosine = scale * angle.cos()
    sine = scale * angle.sin()
    shift = 2 * SHIFT * amounts[:, 2:]  # coordinates go from -1 to 1: a side is 2 long
    # rows of the affine matrices that map output to input positions
    first = torch.stack([cosine, -sine, shift[:, 0]], 1)
    second = torch.stack([sine, cosine, shift[:, 1]], 1)
    matrices = torch.stack([first, second], 1)  # (images, 2, 3)
    places = F.affine_grid(matrices, list(pixels.shape), align_corners=False)
    # outside of an image is 0, which must be black: -1
    return F.grid_sample(pixels + 1, places, align_corners=False) - 1
