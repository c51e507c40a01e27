"""Layouts: intersections of blocks, matching indices, and tensors gathered from any partition into
any other."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import state_dict_saver

from helpers import refused

pytest.importorskip("transformers", reason='pip install ".[transformers]"')

from moesaic.weights import layout as layouts
from moesaic.weights.layout import (
    GatheredTensor,
    Layout,
    StoredBlock,
    _intersect,
    full_region,
    identity,
    pieces,
)
from moesaic.weights.tensor_files import read_dcp

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Held:
    """A tensor in memory."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.dtype = torch.int32
        self.shape = array.shape

    def read(self, at: layouts.Region) -> np.ndarray:
        index = tuple(
            dim if isinstance(dim, int) else slice(dim.start, dim.stop, dim.step) for dim in at
        )
        return self.array[index].copy()


@st.composite
def partitions(draw: st.DrawFn, shape: tuple[int, int, int]) -> list[StoredBlock]:
    """Draw a layout for a tensor (experts, rows, columns): per expert or stacked, halves or
    interleaved, transposed or not."""
    experts, rows, columns = shape
    turned = draw(st.booleans())
    halves = draw(st.sampled_from(["whole", "halves", "turns"]))
    single = draw(st.booleans())
    both = draw(st.booleans())
    parts = {
        "whole": [range(rows)],
        "halves": [range(rows // 2), range(rows // 2, rows)],
        "turns": [range(0, rows, 2), range(1, rows, 2)],
    }[halves]
    blocks = []
    for number, part in enumerate(parts):
        name, start = ("one", number * len(part)) if both else (f"part {number}", 0)
        for expert in range(experts) if single else [range(experts)]:
            place = (range(start, start + len(part)), range(columns))
            place = place[::-1] if turned else place
            lead = () if single else (expert,)
            stored = f"{name} of {expert}" if single else name
            blocks.append(
                StoredBlock(
                    stored, (*lead, *place), "tensor", (expert, part, range(columns)), turned
                )
            )
    return blocks


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_two_ways_to_keep_a_tensor_convert_into_each_other(data: st.DataObject) -> None:
    shape = (
        data.draw(st.integers(1, 3)),
        2 * data.draw(st.integers(1, 3)),
        data.draw(st.integers(1, 4)),
    )
    shapes = {"tensor": shape}
    whole = {"tensor": Held(np.arange(np.prod(shape), dtype=np.int32).reshape(shape))}
    one, other = (Layout(data.draw(partitions(shape)), shapes, "it") for _ in range(2))
    first = {
        name: Held(
            GatheredTensor(name, one, identity(shapes), whole).read(full_region(one.shapes[name]))
        )
        for name in one.shapes
    }
    found = {name: GatheredTensor(name, other, one, first) for name in other.shapes}
    expected = {name: GatheredTensor(name, other, identity(shapes), whole) for name in other.shapes}
    for name, tensor in found.items():
        assert tensor.shape == expected[name].shape
        for region in pieces(tensor.shape, 4):
            np.testing.assert_array_equal(tensor.read(region), expected[name].read(region))
    back = GatheredTensor("tensor", identity(shapes), other, found).read(full_region(shape))
    np.testing.assert_array_equal(back, whole["tensor"].array)


@given(
    st.integers(0, 9),
    st.integers(0, 9),
    st.sampled_from([1, 2, 3]),
    st.integers(0, 9),
    st.integers(0, 9),
)
def test_what_two_rows_share(start: int, length: int, step: int, other: int, size: int) -> None:
    a = range(start, start + length * step, step)
    b = range(other, other + size)
    for shared in (_intersect(a, b), _intersect(b, a)):
        assert list(shared or ()) == sorted(set(a) & set(b))  # type: ignore[arg-type]


def test_pieces_follow_each_other_and_fit_the_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "BUFFER", 40)
    for shape in [(3, 4, 5), (7,), (), (100,), (2, 1, 50), (0, 4)]:
        array = np.arange(np.prod(shape, dtype=int), dtype=np.int32).reshape(shape)
        held = [Held(array).read(region) for region in pieces(shape, 4)]
        np.testing.assert_array_equal(
            np.concatenate(
                [array[:0].reshape(-1) if shape else [], *(piece.reshape(-1) for piece in held)]
            ),
            array.reshape(-1),
        )
        assert all(piece.nbytes <= 40 for piece in held)


def test_a_format_without_a_place_or_with_two_is_refused() -> None:
    shapes = {"a": (2, 3), "b": (4,)}
    half = StoredBlock("x", full_region((1, 3)), "a", (range(1), range(3)))
    assert "it has no place for a, b: convert this model to another format" in refused(
        Layout, [half], shapes, "it"
    )
    with pytest.raises(AssertionError):
        Layout(
            [half, StoredBlock("x", full_region((1, 3)), "a", (range(1, 2), range(3)))],
            {"a": (2, 3)},
            "it",
        )


def test_parts_that_torch_saved_in_another_order_are_read(tmp_path: Path) -> None:
    tensor = torch.arange(24.0).view(4, 6)
    tensors = {
        "turned": tensor.T,
        "cut": tensor[1:3, 2:5],
        "scalar": torch.tensor(3.0),
        "empty": tensor[:0],
    }
    state_dict_saver.save(tensors, checkpoint_id=tmp_path, no_dist=True)
    found, others = read_dcp(tmp_path)
    assert others == []
    for name, expected in tensors.items():
        values = torch.from_numpy(found[name].read(full_region(found[name].shape))).view(
            torch.float32
        )
        assert torch.equal(values, expected)
    part = found["turned"].read((range(1, 6, 2), 3))
    assert torch.equal(torch.from_numpy(part).view(torch.float32), tensor.T[1:6:2, 3])
