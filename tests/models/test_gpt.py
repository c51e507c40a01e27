"""The language model: training, decoding, padding, activation checkpointing and configurations."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch

from helpers import TOP_K, refused
from moesaic import MoE
from moesaic.models.attention import KeyValueCache
from moesaic.models.config import ModelConfig, MoEConfig
from moesaic.models.gpt import GPT, GPTOutput, make_moe
from moesaic.routing.capacity import AbstractCapacity, Capacity, Dropless
from moesaic.routing.losses import Importance, LoadBalance, ZLoss
from moesaic.routing.routers import ON_MESH, ROUTERS, GroupLimited, SigmoidTopK

VOCAB = 11


def config(*, moe: dict[str, object] | None = None, **options: object) -> ModelConfig:
    sparse = MoEConfig(**{"num_experts": 4, "top_k": 2, "hidden": 16, **(moe or {})})
    return ModelConfig(
        **{"dim": 16, "num_layers": 2, "num_heads": 2, "seq_len": 12, "moe": sparse, **options}
    )


def tokens(batch: int = 2, length: int = 12) -> torch.Tensor:
    return torch.randint(0, VOCAB, (batch, length))


def step_counts(model: GPT) -> list[list[int]]:
    return [module.step_counts.tolist() for module in model.modules() if isinstance(module, MoE)]


def test_routings_have_no_graph() -> None:
    batch = tokens(2, 9)
    output = GPT(config(), VOCAB)(batch[:, :-1], batch[:, 1:])
    assert len(output.routings) == 2
    tensors = [
        value
        for routing in output.routings
        for value in vars(routing).values()
        if isinstance(value, torch.Tensor)
    ]
    assert not any(tensor.requires_grad for tensor in tensors)


@pytest.mark.parametrize(
    ("router", "chunks"),
    [("softmax", [1] * 8), ("sigmoid", [3, 1, 4]), ("hash", [3, 1, 4])],
    ids=str,
)
def test_decoding_with_a_cache_equals_the_whole_forward(router: str, chunks: list[int]) -> None:
    model = GPT(config(moe={"router": router}), VOCAB).double().eval()
    batch = tokens(2, 8)
    caches = [KeyValueCache() for _ in model.blocks]
    with torch.no_grad():
        whole = model(batch).logits
        parts = [model(part, caches=caches).logits for part in batch.split(chunks, dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-6, atol=1e-6)
    assert [cache.length for cache in caches] == [8, 8]


def test_no_position_sees_a_later_one() -> None:
    model = GPT(config(), VOCAB).eval()
    batch = tokens()
    changed = batch.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % VOCAB
    torch.testing.assert_close(model(batch).logits[:, :7], model(changed).logits[:, :7])
    assert not torch.allclose(model(batch).logits[:, 7:], model(changed).logits[:, 7:])


@pytest.mark.parametrize(
    "moe", [{}, {"router": "sigmoid"}, {"shared_hidden": 8}, {"experts": "gelu"}], ids=str
)
def test_active_parameters_are_all_but_the_experts_not_taken(moe: dict[str, object]) -> None:
    model = GPT(config(moe=moe), VOCAB)
    matrices = 2 if moe.get("experts") == "gelu" else 3
    idle = model.config.num_layers * 2 * matrices * 16 * 16
    assert model.num_parameters() == sum(parameter.numel() for parameter in model.parameters())
    assert model.num_active_parameters() == model.num_parameters() - idle


def test_the_dense_model_has_the_active_parameters_of_the_sparse_one() -> None:
    sparse, dense = (
        GPT(config(moe={"shared_hidden": 8}, ffn=ffn), VOCAB) for ffn in ("moe", "dense")
    )
    routers = 2 * 4 * 16
    assert (
        dense.num_parameters()
        == dense.num_active_parameters()
        == sparse.num_active_parameters() - routers
    )


def test_every_second_block_is_sparse_counted_from_the_last() -> None:
    model = GPT(config(num_layers=5, moe_every=2), VOCAB)
    assert [isinstance(block.ffn, MoE) for block in model.blocks] == [
        True,
        False,
        True,
        False,
        True,
    ]
    assert len(model(tokens()).routings) == 3


def test_padded_tokens_are_in_no_count_and_move_no_other() -> None:
    model = GPT(config(), VOCAB).double()
    batch = tokens(2, 10)
    mask = torch.ones(2, 10, dtype=torch.bool)
    mask[:, 6:] = False
    padded = model(batch, mask=mask)
    for routing in padded.routings:
        assert int(routing.num_valid) == 12
        assert int(routing.requested.sum()) == len(routing.token) == 24
    assert [sum(counts) for counts in step_counts(model)] == [24, 24]
    short = model(batch[:, :6])
    torch.testing.assert_close(padded.logits[:, :6], short.logits)
    for with_padding, alone in zip(padded.routings, short.routings):
        assert torch.equal(with_padding.requested, alone.requested)
        torch.testing.assert_close(with_padding.losses, alone.losses)


@pytest.mark.parametrize(
    ("router", "capacity"),
    [("softmax", "fixed"), ("noisy", "dropless"), ("sigmoid", "dropless"), ("gshard", "fixed")],
)
def test_checkpointing_gives_identical_loss_gradients_and_counts(
    router: str, capacity: str
) -> None:
    plain = GPT(config(moe={"router": router, "capacity": capacity, "z_loss": 0.01}), VOCAB)
    again = GPT(dataclasses.replace(plain.config, checkpoint_activations=True), VOCAB)
    again.load_state_dict(plain.state_dict())
    batch = tokens()
    outputs = []
    for model in (plain, again):
        torch.manual_seed(4)
        output: GPTOutput = model(batch[:, :-1], batch[:, 1:])
        output.loss.backward()
        outputs.append(output)
    assert torch.equal(outputs[0].loss, outputs[1].loss)
    for (name, one), two in zip(plain.named_parameters(), again.parameters()):
        assert torch.equal(one.grad, two.grad), name
    assert step_counts(plain) == step_counts(again)
    assert sum(map(sum, step_counts(plain))) > 0


def test_targets_of_minus_one_are_not_predicted() -> None:
    model = GPT(config(), VOCAB).eval()
    batch = tokens()
    targets = batch.clone()
    targets[:, 5:] = -1
    expected = torch.nn.functional.cross_entropy(
        model(batch).logits[:, :5].flatten(0, 1), batch[:, :5].flatten()
    )
    torch.testing.assert_close(model(batch, targets).loss, expected)
    assert model(batch).loss is None


@pytest.mark.parametrize("router", [*ROUTERS, *ON_MESH])
def test_every_router_that_a_config_names_trains(router: str) -> None:
    top_k = TOP_K.get(router, 2)
    model = GPT(config(moe={"router": router, "top_k": top_k}), VOCAB)
    batch = tokens()
    model(batch[:, :-1], batch[:, 1:]).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.isfinite().all(), name


def test_a_configs_options_reach_the_router() -> None:
    sigmoid = make_moe(
        8, MoEConfig(num_experts=8, router="sigmoid", router_options={"bias_rate": 0.5})
    ).router
    assert isinstance(sigmoid, SigmoidTopK)
    assert sigmoid.bias_rate == 0.5
    limited = make_moe(
        8,
        MoEConfig(
            num_experts=8, router="group_limited", router_options={"num_groups": 2, "top_groups": 1}
        ),
    ).router
    assert isinstance(limited, GroupLimited)
    assert (limited.num_groups, limited.top_groups) == (2, 1)


def test_matrices_start_with_their_deviations() -> None:
    model = GPT(
        config(dim=64, num_layers=2, num_heads=2, moe={"num_experts": 8, "hidden": 64}), 200
    )
    deviations = {
        "embedding.weight": 0.02,
        "blocks.0.attention.out.weight": 0.01,
        "blocks.1.ffn.experts.w2": 0.01,
        "blocks.0.ffn.experts.w13": 0.02,
        "blocks.0.ffn.router.weight": 0.02,
    }
    for name, deviation in deviations.items():
        assert float(model.get_parameter(name).detach().std()) == pytest.approx(
            deviation, rel=0.1
        ), name


def test_noise_and_temperature_start_as_their_papers_say() -> None:
    noisy = GPT(config(moe={"router": "noisy"}), VOCAB).blocks[0].ffn.router
    assert noisy.weight.any()
    assert not noisy.noise_weight.any()
    cosine = GPT(config(moe={"router": "cosine"}), VOCAB).blocks[0].ffn.router
    assert float(cosine.log_temperature.detach().exp()) == pytest.approx(0.07)
    assert float(cosine.projection.detach().std()) == pytest.approx(0.02, rel=0.1)


def test_decoding_with_gradients_extends_a_cache_once() -> None:
    model = GPT(config(checkpoint_activations=True), VOCAB)
    batch = tokens(2, 8)
    caches = [KeyValueCache() for _ in model.blocks]
    model(batch, caches=caches).logits.sum().backward()
    assert [cache.length for cache in caches] == [8, 8]


def test_each_coefficient_is_of_its_loss() -> None:
    config = MoEConfig(load_balance=0.1, load_balance_level="sequence", importance=0.2, z_loss=0.3)
    assert config.make_losses() == (LoadBalance(0.1, level="sequence"), Importance(0.2), ZLoss(0.3))
    assert MoEConfig(load_balance=0.0).make_losses() == ()


@pytest.mark.parametrize(
    ("fields", "capacity"),
    [
        ({}, Dropless()),
        ({"capacity": "fixed"}, Capacity.fixed(1.25)),
        (
            {"capacity": "fixed", "capacity_factor": 0.5, "capacity_scope": "rank"},
            Capacity.fixed(0.5, scope="rank"),
        ),
        (
            {"capacity": "fitted", "capacity_factor": 3.0, "capacity_order": "score"},
            Capacity.fitted(at_most=3.0, order="score"),
        ),
        (
            {"capacity": "padded", "capacity_factor": 1.5},
            Capacity.fixed(1.5, scope="rank", padded=True),
        ),
    ],
)
def test_fields_make_a_capacity(fields: dict[str, Any], capacity: AbstractCapacity) -> None:
    assert MoEConfig(**fields).make_capacity() == capacity


def test_a_dense_model_does_not_judge_how_experts_fit() -> None:
    assert config(ffn="dense", moe={"top_k": 5}).active_hidden == 80


BAD = [
    *(
        (lambda name=name: MoEConfig(**{name: 0}), f"model.moe.{name}=0: must be at least 1")
        for name in ("num_experts", "top_k", "hidden")
    ),
    (lambda: MoEConfig(shared_hidden=-1), "model.moe.shared_hidden=-1: must be at least 0"),
    *(
        (
            lambda name=name, bad=bad: MoEConfig(**{name: bad}),
            f"model.moe.{name}={bad}: must be 0 or more and finite",
        )
        for name in ("load_balance", "importance", "z_loss")
        for bad in (-1.0, float("nan"), float("inf"))
    ),
    *(
        (
            lambda bad=bad: MoEConfig(capacity_factor=bad),
            (
                f"model.moe.capacity_factor={bad}: must be a finite number above 0; .* write "
                "capacity=dropless"
            ),
        )
        for bad in (0.0, -1.0, float("nan"), float("inf"))
    ),
    (lambda: config(ffn="dense", dense_hidden=0), "model.dense_hidden=0: must be at least 1"),
    (lambda: config(dim=0), "model.dim=0: must be at least 1"),
    (
        lambda: config(dim=18, num_heads=4),
        "model.dim=18 does not split into model.num_heads=4 .* multiple of 8",
    ),
    (lambda: config(dim=6, num_heads=2), "heads of even width"),
    (lambda: config(moe_every=0), "model.moe_every=0: must be at least 1"),
    (lambda: config(moe={"top_k": 5}), "model.moe.top_k=5 does not fit model.moe.num_experts=4"),
    (
        lambda: config(moe={"router": "best"}),
        "model.moe.router='best' is unknown: choose one of softmax",
    ),
]


@pytest.mark.parametrize(("make", "message"), BAD)
def test_a_bad_config_is_refused_in_one_line(make, message: str) -> None:
    assert re.search(message, refused(make))
