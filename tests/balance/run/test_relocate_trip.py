"""Samples that move: exchanges of whole samples, the state of a trip, a language model, and error
messages."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from meshes import DIM, make_layer, tokens_of
from torch import Tensor

from helpers import refused, thinned
from moesaic.balance.run.moving import MovingMoE
from moesaic.balance.run.relocate import Following, Relocator, carry
from moesaic.balance.samples import Given, Homes, TwoStage
from moesaic.comm.loopback import run_ranks
from moesaic.comm.mesh import Mesh
from moesaic.comm.transport import AbstractTransport, NoTransport
from moesaic.errors import InputError
from moesaic.layer import MoE
from moesaic.models.attention import KeyValueCache
from moesaic.models.config import ModelConfig, MoEConfig
from moesaic.models.gpt import GPT
from moesaic.models.moving import MovingGPT
from moesaic.program.grid import Grid, LinkLevel
from moesaic.program.plan import Plan
from moesaic.routing.routers import SoftmaxTopK, TopologyRouter
from moesaic.runtime.data_parallel import average_gradients
from moesaic_lab.policies.stay import Stay
from moesaic_lab.recorder import Recorder

FOUR = Grid(world=4, ep=4, ranks_per_node=2)
BEFORE = Homes(np.array([[5, 0], [2, 7], [1, 3], [6, 4]]))
AFTER = Homes(np.array([[0, 1], [4, 2], [3, 7], [5, 6]]))


@pytest.mark.parametrize("times", [1, 3])
def test_gradients_go_back_the_way_samples_came(times: int) -> None:
    upstream = torch.randn(8, 3)

    def rank(transport: AbstractTransport) -> Tensor:
        x = torch.zeros(2, 3, requires_grad=True)
        y = (carry(transport, x, BEFORE, AFTER) * upstream[AFTER.samples[transport.rank]]).sum()
        for _ in range(times):
            y.backward(retain_graph=True)
        assert x.grad is not None
        return x.grad

    for at, found in enumerate(run_ranks(4, rank)):
        torch.testing.assert_close(found, times * upstream[BEFORE.samples[at]])


def test_only_samples_that_leave_cross_links() -> None:
    one_pair = Homes(np.array([[5, 0], [2, 7], [4, 3], [6, 1]]))

    def rank(transport: AbstractTransport) -> dict[int, int]:
        recorder = Recorder(transport)
        x = torch.zeros(2, 5, dtype=torch.float32)
        assert carry(recorder, x, BEFORE, BEFORE) is x  # type: ignore[arg-type]
        carry(recorder, x, BEFORE, one_pair)  # type: ignore[arg-type]
        return {m.target: m.num_bytes for each in recorder.ranges for m in each.messages}

    assert run_ranks(4, rank) == [{}, {}, {3: 20}, {2: 20}]


def gpt_config(**options: Any) -> ModelConfig:
    moe = MoEConfig(num_experts=4, top_k=2, hidden=8, z_loss=0.01, **options.pop("moe", {}))
    return ModelConfig(
        **{"dim": 8, "num_layers": 2, "num_heads": 2, "seq_len": 6, "moe": moe, **options}
    )


def gpt_step(
    model: GPT, tokens: Tensor, targets: Tensor, mask: Tensor | None
) -> tuple[Tensor, list[Tensor]]:
    output = model(tokens, targets, mask=mask)
    output.loss.backward()
    return output.loss.detach(), [routing.counts for routing in output.routings]


OPTIONS: list[dict[str, Any]] = [
    {},
    {"checkpoint_activations": True},
    {"moe": {"router": "hash"}},
    {"moe_every": 2, "moe": {"shared_hidden": 8}},
]


@pytest.mark.parametrize(
    ("options", "ends_home", "padded"),
    thinned(itertools.product(OPTIONS, (True, False), (True, False)), every=4),
    ids=str,
)
def test_a_language_model_computes_the_same(
    options: dict[str, Any], ends_home: bool, padded: bool
) -> None:
    """Compared with the same mesh without placement: mean loss, every gradient, every expert's
    load. Without padding, the residual is sent with the results."""
    torch.manual_seed(0)
    whole = MovingGPT(gpt_config(**copy.deepcopy(options)), 11).double()
    tokens = torch.randint(0, 11, (8, 6))
    targets = torch.randint(0, 11, (8, 6))
    targets[2, 1:] = -1
    targets[7] = -1
    mask = torch.rand(8, 6) > 0.2 if padded else None
    random = np.random.default_rng(0)
    homes = [Homes(random.permutation(8).reshape(4, 2)) for _ in range(4)]

    def rank(transport: AbstractTransport) -> list[tuple[Tensor, list[Tensor], dict[str, Tensor]]]:
        found = []
        for moves in (False, True):
            model = copy.deepcopy(whole)
            mesh = Mesh(FOUR, transport)
            for block in model.blocks:
                if isinstance(block.ffn, MoE):
                    block.ffn.parallelize(mesh, Plan(chunks=2))
            model.relocator = Relocator(mesh, Given(homes), ends_home=ends_home) if moves else None
            mine = slice(2 * transport.rank, 2 * transport.rank + 2)
            loss, counts = gpt_step(
                model, tokens[mine], targets[mine], None if mask is None else mask[mine]
            )
            average_gradients(model, mesh)
            found.append(
                (
                    loss,
                    counts,
                    {n: p.grad for n, p in model.named_parameters() if p.grad is not None},
                )
            )
        return found

    ranks = run_ranks(4, rank)
    for plain, moved in ranks:
        assert plain[2].keys() == moved[2].keys()
        for name, gradient in plain[2].items():
            torch.testing.assert_close(moved[2][name], gradient, rtol=1e-9, atol=1e-12)
        for one, other in zip(plain[1], moved[1], strict=True):
            assert torch.equal(one, other)
    losses = torch.tensor([[each[0] for each in pair] for pair in ranks], dtype=torch.float64)
    torch.testing.assert_close(losses[:, 1].mean(), losses[:, 0].mean(), rtol=1e-10, atol=1e-12)
    if ends_home:
        torch.testing.assert_close(losses[:, 1], losses[:, 0], rtol=1e-10, atol=1e-12)


def test_a_language_model_without_targets_gives_its_own_samples_logits() -> None:
    torch.manual_seed(0)
    whole = MovingGPT(gpt_config(), 11).double()
    tokens = torch.randint(0, 11, (8, 6))

    def rank(transport: AbstractTransport) -> Tensor:
        model = copy.deepcopy(whole)
        mesh = Mesh(FOUR, transport)
        for block in model.blocks:
            block.ffn.parallelize(mesh, Plan())
        model.relocator = Relocator(mesh, Given([AFTER, BEFORE]))
        with torch.inference_mode():
            return model(tokens[2 * transport.rank : 2 * transport.rank + 2]).logits.clone()

    torch.testing.assert_close(torch.cat(run_ranks(4, rank)), whole(tokens).logits.detach())


def test_in_evaluation_samples_stay() -> None:
    """In evaluation, ranks may have different numbers of samples."""
    model = MovingGPT(gpt_config(), 11).eval()
    model.relocator = Relocator(Mesh(Grid(world=1), NoTransport()))
    output = model(
        torch.zeros(1, 4, dtype=torch.int64), caches=[KeyValueCache() for _ in model.blocks]
    )
    assert output.logits.shape == (1, 4, 11)
    assert model.relocator.trip is None


def test_the_prediction_is_what_the_next_router_makes_of_this_layers_input() -> None:
    first = make_layer(seed=1)
    second = make_layer(seed=2)
    expected = [
        second(tokens_of(rank, 6).view(2, 3, DIM), return_routing=True)[1] for rank in range(4)
    ]

    def rank(transport: AbstractTransport) -> tuple[np.ndarray, np.ndarray | None, int]:
        mesh = Mesh(FOUR, transport)
        one = copy.deepcopy(first)
        two = copy.deepcopy(second)
        for layer in (one, two):
            layer.parallelize(mesh, Plan())
        trip = Relocator(mesh, TwoStage(least_gain=0.0)).start(
            [Following(layer.router, 2) for layer in (one, two)], 2, 3
        )
        move = trip.next()
        MovingMoE(one)(tokens_of(transport.rank, 6).view(2, 3, DIM), move=move)
        return move.load.copies, move.load.following, move.load.carried

    for copies, following, carried in run_ranks(4, rank):
        assert copies.sum() == 4 * 6 * 2
        assert carried == 3
        for at, routing in enumerate(expected):
            for sample in range(2):
                here = routing.expert[routing.token // 3 == sample]
                assert (
                    following[2 * at + sample].tolist()
                    == torch.bincount(here, minlength=4).tolist()
                )


def limited(dim: int, num_experts: int) -> TopologyRouter:
    level = LinkLevel(name="node", group=(0, 0, 1, 1), share=0.5)
    return TopologyRouter(SoftmaxTopK(dim, num_experts), grid=FOUR, levels=[level])


def run_trip(
    transport: AbstractTransport,
    *,
    plan: Plan | None = None,
    samples: int = 2,
    length: int = 3,
    **options: Any,
) -> Tensor:
    """Return one layer's call in a trip of two layers."""
    layer = make_layer(**options.pop("layer", {}))
    mesh = Mesh(FOUR, transport)
    layer.parallelize(mesh, plan or Plan())
    relocator = Relocator(mesh, Stay())
    trip = relocator.start([Following(layer.router, 2)] * 2, samples, length)
    x = tokens_of(transport.rank, samples * length).view(samples, length, DIM)
    y: Tensor = MovingMoE(layer)(options.pop("x", x), move=trip.next(), **options)
    return y


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"layer": {"router": "noisy"}}, r"router NoisyTopK, which draws random numbers"),
        ({"layer": {"router": "expert_choice"}}, r"router ExpertChoice, whose choice.*choose one"),
        (
            {"layer": {"router": limited}},
            r"router TopologyRouter, whose choice for a token depends on its rank",
        ),
        (
            {"x": torch.zeros(3, 3, DIM, dtype=torch.float64)},
            r"got 9 tokens, the trip was started for 2 samples of 3",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_forbids_moving_is_refused_in_one_line(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words) as refusal:
        run_ranks(4, lambda transport: run_trip(transport, **copy.deepcopy(options)))
    assert "\n" not in str(refusal.value)


def test_samples_that_do_not_split_evenly_are_refused_on_every_rank() -> None:
    def rank(transport: AbstractTransport, samples: int, length: int) -> str:
        return refused(run_trip, transport, samples=samples, length=length)

    texts = set(run_ranks(4, lambda transport: rank(transport, 3 if transport.rank == 2 else 2, 3)))
    assert len(texts) == 1
    assert (
        "rank 0 has 2 of 3 tokens, rank 2 has 3 of 3: give every rank equally many" in texts.pop()
    )
    texts = set(run_ranks(4, lambda transport: rank(transport, 2, 4 if transport.rank == 3 else 3)))
    assert "rank 3 has 2 of 4" in texts.pop()


def test_each_rank_of_a_tensor_group_must_answer_for_as_many_samples() -> None:
    def rank(transport: AbstractTransport) -> None:
        relocator = Relocator(Mesh(Grid(world=4, tp=2, ep=4), transport))
        relocator.start([Following(make_layer().router, 2)], 3, 3)

    assert "mesh.tp=2 needs a multiple of 2 samples per tensor group, got 3" in refused(
        run_ranks, 4, rank
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
def test_as_many_rows_of_each_sample_as_it_has_travel(dtype: torch.dtype) -> None:
    random = np.random.default_rng(0)
    of_sample = random.integers(0, 4, size=8)
    whole = [torch.randn(count, 2).mul(100).to(dtype) for count in of_sample]
    rows = of_sample[BEFORE.samples]

    def held(homes: Homes, rank: int) -> Tensor:
        return torch.cat([whole[sample] for sample in homes.samples[rank]])

    def rank(transport: AbstractTransport) -> tuple[Tensor, Tensor | None]:
        x = held(BEFORE, transport.rank)
        x = x.requires_grad_() if dtype.is_floating_point else x
        y = carry(transport, x, BEFORE, AFTER, rows)
        if dtype.is_floating_point:
            (y * y.detach()).sum().backward()
        return y.detach(), x.grad

    for at, (found, gradient) in enumerate(run_ranks(4, rank, seed=1)):
        assert torch.equal(found, held(AFTER, at))
        assert gradient is None or torch.equal(gradient, held(BEFORE, at))


def test_a_layer_on_no_mesh_cannot_move_samples() -> None:
    layer = make_layer()
    trip = Relocator(Mesh(Grid(world=1), NoTransport())).start([Following(layer.router, 2)], 2, 3)
    with pytest.raises(InputError, match="the layer is on no mesh: call parallelize"):
        MovingMoE(layer)(tokens_of(0, 6).view(2, 3, DIM), move=trip.next())


def test_a_residual_cannot_go_before_it_is_decided_where() -> None:
    trip = Relocator(Mesh(Grid(world=1), NoTransport())).start(
        [Following(make_layer().router, 2)] * 2, 2, 3
    )
    assert "call the layer with this move first" in refused(
        lambda: trip.next().carry(torch.zeros(2, 3, DIM))
    )


def test_caches_forbid_moving() -> None:
    model = MovingGPT(gpt_config(), 11)
    model.relocator = Relocator(Mesh(Grid(world=1), NoTransport()))
    with pytest.raises(InputError, match=r"clashes with key-value caches.*call model\.eval\(\)"):
        model(torch.zeros(1, 4, dtype=torch.int64), caches=[KeyValueCache() for _ in model.blocks])
