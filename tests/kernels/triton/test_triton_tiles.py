"""The choice of tiles, the search for faster ones and the file of its results; no kernel runs."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from helpers import refused

pytest.importorskip("triton", reason='the GPU extra is not installed: pip install ".[gpu]"')

from moesaic.kernels.triton import expert_stage
from moesaic.kernels.triton.expert_stage import shapes
from moesaic.kernels.triton.rows.measured import bucket, tile_for
from moesaic.kernels.triton.rows.tiles import Shape, Tile, TileDevice, default_tile, shared_bytes
from moesaic_lab.device.search import Tuned, candidates, fits, load, save, search

DEVICES = [
    TileDevice(name="Ampere", capability=(8, 0), multiprocessors=108, shared_bytes=166_912),
    TileDevice(name="Ada", capability=(8, 9), multiprocessors=128, shared_bytes=101_376),
    TileDevice(name="Hopper", capability=(9, 0), multiprocessors=132, shared_bytes=232_448),
]
LAYERS = [
    (327_680, 128, 768, 256),
    (262_144, 64, 4096, 2048),
    (524_288, 256, 4096, 256),
    (40, 3, 40, 24),
    (0, 1, 8, 8),
]


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)
@pytest.mark.parametrize("sizes", LAYERS, ids=str)
@pytest.mark.parametrize("itemsize", [2, 4])
def test_every_tile_on_offer_fits_the_device(device, sizes, itemsize):
    for shape in shapes(*sizes, itemsize, gated=True).values():
        actual = list(candidates(shape, device))
        assert actual[0] == default_tile(shape, device)
        assert len(set(actual)) == len(actual) <= 16
        for tile in actual:
            assert shared_bytes(tile, shape) <= device.shared_bytes
            assert not tile.descriptors or device.capability >= (9, 0)
            assert min(tile.rows, tile.columns, tile.depth) >= 16
            assert not (tile.programs and shape.is_doubled), (
                "the assembler serialises the products of such a tile"
            )


def test_few_rows_per_expert_make_low_tiles():
    device = DEVICES[2]
    assert [
        default_tile(shapes(r, 64, 768, 256, 2, gated=True)["down"], device).rows
        for r in (64 * 20, 64 * 200)
    ] == [32, 128]


def test_a_tile_that_spills_or_wastes_is_left_out():
    shape = shapes(262_144, 64, 4096, 1024, 2, gated=True)["down"]
    tile = Tile(rows=128, columns=256, depth=64, warps=4, stages=3)
    assert not fits(tile, shape, DEVICES[2])
    assert fits(Tile(rows=128, columns=256, depth=64, warps=8, stages=3), shape, DEVICES[2])
    assert not fits(
        Tile(rows=128, columns=256, depth=64, warps=8, stages=3, programs=2), shape, DEVICES[2]
    )


def test_a_layer_takes_the_nearest_measured_tile_of_its_generation():
    h200 = TileDevice(
        name="NVIDIA H200", capability=(9, 0), multiprocessors=132, shared_bytes=232_448
    )
    wide = Tile(rows=128, columns=256, depth=64, warps=8, stages=3, programs=1, descriptors=1)
    measured = shapes(262_144, 128, 4096, 512, 2, gated=True)
    near = shapes(8192 * 8, 64, 2048, 1024, 2, gated=True)
    far = shapes(327_680, 128, 768, 256, 2, gated=True)
    models = [
        shapes(8192 * top_k, experts, dim, hidden, 2, gated=True)
        for dim, hidden, experts, top_k in (
            (2048, 768, 128, 8),
            (4096, 14336, 8, 2),
            (7168, 2048, 256, 8),
            (2880, 2880, 128, 4),
        )
    ]
    for device in (h200, DEVICES[2]):
        assert {tile_for(shape["down"], device) for shape in (measured, near, *models)} == {wide}
        assert tile_for(measured["up"], device) == replace(wide, columns=128, programs=0)
        assert {name: tile_for(shape, device) for name, shape in far.items()} == {
            name: default_tile(shape, device) for name, shape in far.items()
        }
    for other in (DEVICES[0], replace(h200, shared_bytes=101_376)):
        assert tile_for(measured["down"], other) == default_tile(measured["down"], other)
    exact = shapes(262_144, 128, 4096, 512, 4, gated=True)["down"]
    assert tile_for(exact, h200) == default_tile(exact, h200), "float32 has tiles of its own"
    plain = shapes(262_144, 128, 4096, 512, 2, gated=False)["up"]
    assert tile_for(plain, h200) == default_tile(plain, h200), (
        "a tile with a gate holds its columns twice"
    )


def test_odd_widths_get_small_tiles_everywhere():
    for device in DEVICES:
        odd = shapes(262_144, 128, 4100, 512, 2, gated=True)
        assert {tile_for(shape, device) for name, shape in odd.items() if name != "up"} == {
            Tile(
                rows=64,
                columns=64,
                depth=32,
                warps=8,
                stages=3,
                descriptors=int(device.capability >= (9, 0)),
            )
        }


def test_the_tiles_of_a_layer_are_chosen_once(monkeypatch):
    chosen = []
    monkeypatch.setattr(
        expert_stage, "tile_for", lambda shape, device: chosen.append(shape) or DEVICES[0]
    )
    for _ in range(3):
        expert_stage._tiles_of((77_777, 64, 128, 64, 2), True, DEVICES[2])
    assert len(chosen) == len(expert_stage.TILES)


def a_shape() -> Shape:
    return shapes(327_680, 128, 768, 256, 2, gated=True)["down"]


def test_search_keeps_the_fastest_and_survives_tiles_that_fail():
    device = DEVICES[2]
    said = []

    def seconds_of(tile: Tile) -> float:
        if tile.programs:
            raise RuntimeError("out of resources\nand more" if tile.rows > 64 else "")
        return 1.0 / (tile.rows * tile.columns)

    actual, is_done = search(a_shape(), device, seconds_of, say=said.append)
    assert is_done
    assert (actual.rows * actual.columns, actual.programs) == (128 * 256, 0)
    assert any("RuntimeError: out of resources" in line and "more" not in line for line in said)


def test_search_stays_with_the_default_for_noise_failures_and_deadlines():
    device = DEVICES[2]
    shape = a_shape()
    first = default_tile(shape, device)
    assert search(shape, device, lambda tile: 1.0 if tile == first else 0.99) == (first, True)
    assert search(shape, device, lambda tile: 1 / 0) == (first, False)
    tried: list[Tile] = []
    assert search(shape, device, lambda tile: tried.append(tile) or 1.0, deadline=0.0) == (
        first,
        False,
    )
    assert tried == []


def test_a_file_serves_only_the_device_it_was_made_on(tmp_path):
    path = tmp_path / "deep" / "tiles.json"
    shape = a_shape()
    tile = Tile(rows=64, columns=64, depth=64, warps=4, stages=2)
    here = Tuned(device=DEVICES[2]).with_tile(shape, tile)
    there = Tuned(device=DEVICES[1])
    save(path, here)
    save(path, there.with_tile(shape, default_tile(shape, DEVICES[1])))
    assert load(path, DEVICES[2]).by_bucket == {bucket(shape): tile}
    assert load(path, DEVICES[0]).by_bucket == {}
    assert len(json.loads(path.read_text())) == 2
    assert [entry.name for entry in path.parent.iterdir()] == ["tiles.json"]
    layer = shapes(327_680, 128, 768, 256, 2, gated=True)
    tiles = load(path, DEVICES[2]).tiles(layer)
    assert tiles["down"] == tile
    assert tiles["up"] == default_tile(layer["up"], DEVICES[2])


@pytest.mark.parametrize("text", ["", "[1]", '{"a": 1}', '{"a": {"b": 1}}'])
def test_another_file_is_refused_in_one_line(tmp_path, text):
    path = tmp_path / "tiles.json"
    path.write_text(text)
    assert "is not a file of tuned tiles: delete it, or name another file" in refused(
        lambda: load(path, DEVICES[0])
    )


def test_tiles_of_unknown_fields_are_refused(tmp_path):
    path = tmp_path / "tiles.json"
    path.write_text(json.dumps({Tuned(device=DEVICES[0]).key: {"down-1": {"rows": 16}}}))
    assert "lack fields or have unknown ones" in refused(lambda: load(path, DEVICES[0]))
