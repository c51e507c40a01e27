"""The image model: published sizes, gradients everywhere, one rank or four, recomputed,
evaluated."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from moesaic import Capacity, Dropless, MoE, Plan, average_gradients, replay_contexts
from moesaic.comm.loopback import run_ranks
from moesaic.comm.mesh import Mesh
from moesaic.comm.transport import AbstractTransport
from moesaic.errors import InputError
from moesaic.program.grid import Grid
from moesaic.routing.routers import CosineTopK, SoftmaxTopK
from moesaic_lab.vision.config import PRESETS, SwinConfig
from moesaic_lab.vision.swin import PatchMerging, SwinBlock, SwinMoE

TINY = SwinConfig(
    ffn="moe",
    image_size=8,
    channels=2,
    num_classes=5,
    patch_size=1,
    window=2,
    dim=4,
    depths=(2, 2),
    heads=(2, 2),
    mlp_ratio=2.0,
    num_experts=4,
    dense_stages=0,
)


def drawn(config: SwinConfig, std: float = 0.5) -> SwinMoE:
    """A model whose parameters are all away from where they start, in float64."""
    torch.manual_seed(0)
    model = SwinMoE(config).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, mean=1.0 if parameter.dim() == 1 else 0.0, std=std)
    return model


def batch(config: SwinConfig, count: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = (count, config.channels, config.image_size, config.image_size)
    images = torch.randn(shape, generator=generator, dtype=torch.float64)
    return images, torch.randint(config.num_classes, (count,), generator=generator)


def gradients(model: SwinMoE, images: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and the gradients of one backward pass."""
    model.zero_grad()
    loss = F.cross_entropy(model(images), labels)
    loss.backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    missing = [name for name, gradient in found.items() if gradient is None]
    assert not missing, missing
    return loss.detach(), {
        name: gradient.clone() for name, gradient in found.items() if gradient is not None
    }


PUBLISHED = [
    # preset, experts, top_k, total and active parameters in millions
    ("swinv2-s", 0, 1, 65.8, 65.8),
    ("swinv2-moe-s", 8, 1, 173.3, 65.8),
    ("swinv2-moe-s", 128, 1, 2016, 65.8),
    ("swinv2-b", 0, 1, 109.3, 109.3),
    ("swinv2-moe-b", 32, 2, 955.3, 136.6),
]


@pytest.mark.parametrize(("preset", "experts", "top_k", "total", "active"), PUBLISHED)
def test_sizes_are_the_published_ones(
    preset: str, experts: int, top_k: int, total: float, active: float
) -> None:
    """Tutel's table 10 counts all but the routers."""
    config = replace(PRESETS[preset], top_k=top_k, num_experts=max(experts, 1))
    with torch.device("meta"):
        model = SwinMoE(config)
    routers = sum(
        parameter.numel() for layer in model.moe_layers() for parameter in layer.router.parameters()
    )
    digits = 0 if total > 1000 else 1
    assert len(model.moe_layers()) == (10 if experts else 0)
    assert round((model.num_parameters() - routers) / 1e6, digits) == total
    assert round((model.num_active_parameters() - routers) / 1e6, 1) == active


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("router", ["switch", "cosine"])
@pytest.mark.parametrize("ffn", ["moe", "dense"])
def test_every_parameter_has_a_gradient(ffn: str, router: str, norm: str) -> None:
    config = replace(TINY, ffn=ffn, router=router, norm=norm, capacity=Dropless())
    _, found = gradients(drawn(config), *batch(config))
    zero = [
        name
        for name, gradient in found.items()
        if not gradient.any() or not gradient.isfinite().all()
    ]
    assert zero == []


def test_behind_a_norm_the_routing_weight_of_one_expert_is_lost() -> None:
    """Why presets with MoE layers normalise in front of a layer: LayerNorm(g * y) is
    LayerNorm(y)."""
    share = {}
    for norm in ("post", "pre"):
        config = replace(TINY, norm=norm, balance_loss=0.0)
        _, found = gradients(drawn(config), *batch(config))
        share[norm] = max(float(g.norm()) for name, g in found.items() if ".router." in name)
    assert share["post"] < 1e-3 * share["pre"]
    assert (
        PRESETS["swinv2-moe-b"].norm
        == PRESETS["swinv2-moe-s"].norm
        == PRESETS["swin-tiny"].norm
        == "pre"
    )


def test_one_batch_is_learnt_by_heart() -> None:
    config = replace(PRESETS["swin-tiny"], capacity=Capacity.fixed(1.25))
    torch.manual_seed(0)
    model = SwinMoE(config)
    images, labels = batch(config)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(60):
        loss = F.cross_entropy(model(images.float()), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[0] == pytest.approx(2.303, abs=0.25)  # ln 10
    assert losses[-1] < 0.05


def test_matrices_start_small_and_biases_at_zero() -> None:
    model = SwinMoE(replace(PRESETS["swin-tiny"], dim=64))
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", ".b1", ".b2")) and not name.startswith("patches"):
            assert not parameter.any(), name
        elif parameter.dim() > 1 and parameter.numel() > 1000 and not name.startswith("patches"):
            assert float(parameter.detach().std()) == pytest.approx(0.02, rel=0.15), name


def test_logits_are_of_the_mean_token() -> None:
    model = drawn(replace(TINY, norm="pre"))
    normed = []
    model.norm.register_forward_hook(lambda module, inputs, y: normed.append(y))
    logits = model(batch(TINY)[0])
    torch.testing.assert_close(logits, model.head(normed[0].flatten(1, 2).sum(1) / 16))


def test_it_starts_as_the_identity_where_norms_stand_behind_layers() -> None:
    config = replace(TINY, norm="post")
    block = SwinMoE(config).blocks[0]
    x = torch.randn(2, 8, 8, 4)
    assert torch.equal(block(x), x)
    assert not torch.equal(SwinMoE(replace(config, norm="pre")).blocks[0](x), x)


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_merging_reads_tiles_column_by_column(norm: str) -> None:
    merge = PatchMerging(3, norm)
    x = torch.randn(2, 4, 6, 3)
    merged = merge(x)
    assert merged.shape == (2, 2, 3, 6)
    tile = torch.cat([x[1, 2, 4], x[1, 3, 4], x[1, 2, 5], x[1, 3, 5]])
    expected = merge.norm(merge.reduce(tile)) if norm == "post" else merge.reduce(merge.norm(tile))
    torch.testing.assert_close(merged[1, 1, 2], expected)


GRIDS = [
    (Grid(world=4, ep=4), Plan(schedule="s1")),
    (Grid(world=4, ep=2), Plan(schedule="baseline", chunks=2)),
    (Grid(world=4, tp=2, ep=2, etp=2), Plan(schedule="s2")),
]


@pytest.mark.parametrize(
    ("grid", "plan", "capacity"),
    [
        (*each, capacity)
        for each, capacity in zip(GRIDS, (Capacity.fixed(1.0), Dropless(), Capacity.fixed(1.0)))
    ],
    ids=["ep 4", "ep 2, edp 2", "tp 2, ep 2, etp 2"],
)
def test_four_ranks_have_the_loss_and_gradients_of_one(
    grid: Grid, plan: Plan, capacity: Capacity
) -> None:
    config = replace(TINY, norm="pre", capacity=capacity)
    whole = drawn(config)
    images, labels = batch(config)
    loss, expected = gradients(copy.deepcopy(whole), images, labels)

    def rank(transport: AbstractTransport) -> tuple[Tensor, dict[str, Tensor]]:
        mesh = Mesh(grid, transport)
        model = copy.deepcopy(whole)
        for layer in model.moe_layers():
            layer.parallelize(mesh, plan)
        group = grid.coordinate(transport.rank, "dp")
        mean = F.cross_entropy(model(images.chunk(grid.dp)[group]), labels.chunk(grid.dp)[group])
        mean.backward()
        average_gradients(model, mesh)
        found = {
            name: parameter.grad
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
        }
        return mean.detach(), found

    results = run_ranks(4, rank)
    torch.testing.assert_close(torch.stack([mean for mean, _ in results]).mean(), loss)
    for at, (_, found) in enumerate(results):
        assert found.keys() == expected.keys()
        for name, gradient in found.items():
            wanted = (
                part_of(expected[name], name, grid, at) if ".experts." in name else expected[name]
            )
            torch.testing.assert_close(
                gradient, wanted, msg=lambda text, name=name: f"{name}: {text}"
            )


def part_of(whole: Tensor, name: str, grid: Grid, rank: int) -> Tensor:
    """A rank's part of an expert gradient: experts over ep, the inner width over etp."""
    part = whole.chunk(grid.ep)[grid.coordinate(rank, "ep")]
    split = {"w1": 1, "b1": 1, "w2": 2}.get(name.rpartition(".")[2])
    return part if split is None else part.chunk(grid.etp, split)[grid.coordinate(rank, "etp")]


def by_torch(model: SwinMoE) -> SwinMoE:
    """Every block through torch's own checkpoint with our context."""
    again = copy.deepcopy(model)
    for block in again.blocks:
        assert isinstance(block, SwinBlock)
        run = block.forward
        context = partial(replay_contexts, block)
        block.forward = partial(torch_checkpoint, run, use_reentrant=False, context_fn=context)  # type: ignore[method-assign]
    return again


@pytest.mark.parametrize("router", ["switch", "noisy"])
def test_recomputation_changes_no_bit(router: str) -> None:
    model = drawn(
        replace(TINY, router=router, top_k=2, capacity=Capacity.fixed(1.0, order="score"))
    )
    again = by_torch(model)
    calls = [0]
    for layer in again.moe_layers():
        layer.experts.register_forward_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))
    results = []
    for one in (model, again):
        torch.manual_seed(3)
        results.append(gradients(one, *batch(TINY)))
    assert calls == [2 * len(again.moe_layers())]  # it did run twice
    assert torch.equal(results[0][0], results[1][0])
    for name, gradient in results[0][1].items():
        assert torch.equal(gradient, results[1][1][name]), name
    assert [layer.step_counts.tolist() for layer in model.moe_layers()] == [
        layer.step_counts.tolist() for layer in again.moe_layers()
    ]


def dropped(model: SwinMoE, images: Tensor) -> list[int]:
    """Copies that each layer drops."""
    found = []

    def look(layer: MoE, inputs: tuple[Tensor], y: Tensor) -> None:
        if not isinstance(y, tuple):
            found.append(int(layer(inputs[0], return_routing=True)[1].dropped))

    for layer in model.moe_layers():
        layer.register_forward_hook(look)  # type: ignore[arg-type]
    model(images)
    return found


def test_evaluation_has_a_capacity_of_its_own() -> None:
    images, _ = batch(TINY)
    config = replace(TINY, capacity=Dropless(), eval_capacity=Capacity.fixed(0.5))
    model = drawn(config)
    tight = drawn(replace(TINY, capacity=Capacity.fixed(0.5)))
    torch.testing.assert_close(model.eval()(images), tight(images))
    assert not torch.allclose(model.train()(images), tight(images))
    assert dropped(copy.deepcopy(model).train(), images) == [0, 0]
    tokens = [8 * 64, 8 * 16]
    assert all(
        count >= half
        for count, half in zip(dropped(model.eval(), images), (t // 2 for t in tokens))
    )


def test_a_config_reaches_its_layers() -> None:
    by_score = Capacity.fixed(0.75, order="score")
    config = replace(TINY, capacity=by_score, top_k=2, router="cosine", balance_loss=0.5)
    for layer in SwinMoE(config).moe_layers():
        assert layer.capacity is by_score
        assert layer.eval_capacity is None
        assert (layer.top_k, layer.num_experts, layer.losses[0].coefficient) == (2, 4, 0.5)
        assert isinstance(layer.router, CosineTopK)
        assert float(layer.router.log_temperature.detach().exp()) == pytest.approx(0.5)
    linear = SwinMoE(replace(TINY, balance_loss=0.0)).moe_layers()
    assert all(isinstance(layer.router, SoftmaxTopK) and layer.losses == () for layer in linear)
    assert [(layer.dim, layer.hidden) for layer in linear] == [(4, 8), (8, 16)]
    assert SwinMoE(replace(TINY, ffn="dense")).moe_layers() == []


def test_images_of_another_shape_are_refused() -> None:
    with pytest.raises(
        InputError, match=r"images of shape \(1, 3, 8, 8\): give \(batch, 2, 8, 8\)"
    ):
        SwinMoE(TINY)(torch.randn(1, 3, 8, 8))
    assert SwinMoE(TINY)(torch.randn(0, 2, 8, 8)).shape == (0, 5)


def test_autocast_keeps_the_loss() -> None:
    model = drawn(replace(TINY, norm="pre"), std=0.2).float()
    images, labels = batch(TINY)
    exact = F.cross_entropy(model(images.float()), labels)
    with torch.autocast("cpu", torch.bfloat16):
        rough = F.cross_entropy(model(images.float()).float(), labels)
    rough.backward()
    assert float(rough.detach()) == pytest.approx(float(exact.detach()), rel=0.05)
