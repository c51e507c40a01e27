"""First values of weights: what they depend on, and that a rank's part of a tensor has the whole
tensor's values."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

from moesaic import GatedExperts, Mesh, ModuleExperts, MoE, Plan
from moesaic.initial_values import SeededDraw, draw_globally, draw_nothing, held, key_of
from moesaic.parallel import clip_grad_norm_, parallelize_model, shard_over_data
from worlds import on_ranks

NORMAL = partial(nn.init.normal_, std=0.5)


def drawn(
    experts: int, *, seed: int = 3, name: str = "weight", dtype: torch.dtype = torch.float32
) -> Tensor:
    module = nn.Module()
    module.register_parameter(name, nn.Parameter(torch.empty(experts, 5, 7, dtype=dtype)))
    SeededDraw(seed, module)(module.get_parameter(name), NORMAL, by_expert=True)
    return module.get_parameter(name).detach()


def test_a_value_depends_on_seed_name_and_expert_alone():
    four = drawn(4)
    torch.manual_seed(99)
    assert torch.equal(drawn(8)[:4], four)
    assert len({tuple(expert.flatten().tolist()) for expert in drawn(8)}) == 8
    for other in (drawn(4, seed=4), drawn(4, name="other")):
        assert not torch.isclose(other, four).any()
    assert 0.4 < float(drawn(64).std()) < 0.6
    assert abs(float(drawn(64).mean())) < 0.05


def test_the_numbers_do_not_depend_on_the_number_of_threads():
    one = drawn(8)
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        assert torch.equal(drawn(8), one)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes_round_the_same_numbers(dtype):
    assert torch.equal(drawn(2, dtype=dtype), drawn(2).to(dtype))


def test_drawing_leaves_torchs_generator_alone():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    drawn(2)
    assert torch.equal(torch.get_rng_state(), before)


def test_keys_tell_words_apart():
    assert (
        len({key_of(1, "a"), key_of("1a"), key_of(1, "a", ""), key_of(2, "a"), key_of(1, "b")}) == 5
    )
    assert 0 <= key_of(0) < 2**63


def test_nothing_is_drawn_for_weights_that_a_file_has():
    x = torch.full((3,), 7.0)
    draw_nothing(x, NORMAL)
    assert torch.equal(x, torch.full((3,), 7.0))
    draw_globally(x, NORMAL)
    assert not (x == 7).any()


SHARDED = {"even": (8, 6, 4), "uneven": (6, 5, 7), "fewer than ranks": (3, 1, 2)}


def parts() -> None:
    """Assert that `held` names what each rank holds, for plain shards and for FSDP over them along
    the same dimension."""
    two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    rank = dist.get_rank()
    for shape in SHARDED.values():
        whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
        for dim in (0, 2):
            for other in (0, 1):
                inner = distribute_tensor(whole, two["model"], [Shard(other)], src_data_rank=None)
                module = nn.ParameterList([nn.Parameter(inner)])
                place = Shard(dim)
                if dim == 0 or inner.to_local().shape[dim] % 2 == 0:  # FSDP2 refuses others
                    fully_shard(
                        module, mesh=two["data"], shard_placement_fn=lambda _, place=place: place
                    )
                found = module[0]
                ranges = tuple(slice(each.start, each.stop) for each in held(found))
                local = found.to_local()
                assert local.numel() == whole[ranges].numel(), (rank, shape, dim, other)
                assert not local.numel() or torch.equal(local, whole[ranges]), (
                    rank,
                    shape,
                    dim,
                    other,
                )


def test_a_rank_knows_which_part_it_holds():
    on_ranks(4, parts)


def layer(kind: str, device: str) -> MoE:
    experts: Any = {"gated": partial(GatedExperts, bias=True), "modules": own_modules}[kind]
    with torch.device(device):
        return MoE(8, 8, 4, 2, experts=experts, shared_hidden=4)


def own_modules(dim: int, hidden: int, num_experts: int) -> ModuleExperts:
    return ModuleExperts(lambda: nn.Linear(dim, dim), dim, num_experts)


def deferred(kind: str, sizes: dict[str, int], fsdp: bool, way: str) -> dict[str, Tensor]:
    """Return the tensors of a layer that was put on a mesh on the meta device, and then initialised
    as torchtitan does."""
    mesh = Mesh.create(**sizes)
    moe = layer(kind, "meta")
    parallelize_model(moe, mesh, Plan(), fsdp=[] if fsdp else False)
    moe.to_empty(device="cpu")
    torch.manual_seed(5)
    moe.reset_parameters() if way == "reset_parameters" else moe.init_normal(0.02, 0.01)
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in moe.state_dict().items()
    }


DEFERRED = [
    ("gated", {"ep": 2}, False, "reset_parameters"),
    ("gated", {"ep": 4}, False, "init_normal"),
    ("gated", {"ep": 2, "etp": 2}, False, "reset_parameters"),
    ("modules", {"ep": 2}, False, "reset_parameters"),
]


def all_deferred() -> list[dict[str, Tensor]]:
    return [deferred(*case) for case in DEFERRED]


def test_a_layer_that_is_initialised_on_a_mesh_has_distinct_experts_and_equal_copies():
    by_rank = on_ranks(4, all_deferred)
    for (kind, _, _, _), *states in zip(DEFERRED, *by_rank):
        experts = {}
        for state in states:
            for name, value in state.items():
                if ".experts." in f".{name}":
                    assert torch.equal(experts.setdefault(name, value), value), name
                else:
                    assert torch.equal(states[0][name], value), name
        weights = (
            experts["experts.w13"]
            if kind == "gated"
            else [experts[f"experts.experts.{e}.weight"] for e in range(4)]
        )
        assert len({tuple(weight.flatten().tolist()) for weight in weights}) == 4
        assert all(torch.isfinite(value).all() for value in experts.values())
    same_seed = [experts_of(states[0]) for states in zip(*by_rank)]
    assert torch.equal(same_seed[0], same_seed[2])  # whatever the mesh


def experts_of(state: dict[str, Tensor]) -> Tensor:
    return next(value for name, value in state.items() if name.startswith("experts."))


def gradients(kind: str, device: str, fsdp: bool) -> tuple[dict[str, Tensor], float]:
    """Return the gradients of a layer with ep 2 on two ranks, made on a device and then
    materialised, and their norm."""
    mesh = Mesh.create(ep=2)
    torch.manual_seed(0)
    source = layer(kind, "cpu").state_dict()
    moe = layer(kind, device)
    if device == "cpu":
        moe.load_state_dict(source)
    moe.parallelize(mesh, Plan())
    if fsdp:
        shard_over_data(moe, mesh)
    if device == "meta":
        moe.to_empty(device="cpu")
        with torch.no_grad():
            for name, parameter in moe.named_parameters():
                local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                local.copy_(
                    source[name][tuple(slice(each.start, each.stop) for each in held(parameter))]
                )
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(mesh.rank))
    moe(x).square().mean().backward()
    found = {
        name: p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
        for name, p in moe.named_parameters()
    }
    return found, float(clip_grad_norm_(moe.parameters(), 1e9))


def both_ways(kind: str, fsdp: bool) -> tuple[Any, Any]:
    return gradients(kind, "cpu", fsdp), gradients(kind, "meta", fsdp)


@pytest.mark.parametrize(("kind", "fsdp"), [("gated", True), ("modules", True), ("modules", False)])
def test_what_a_mesh_set_on_parameters_outlives_to_empty(kind, fsdp):
    for (direct, norm), (deferred_, deferred_norm) in on_ranks(2, both_ways, kind, fsdp):
        assert direct.keys() == deferred_.keys()
        for name, gradient in direct.items():
            torch.testing.assert_close(deferred_[name], gradient, msg=name)
        assert deferred_norm == pytest.approx(norm)
