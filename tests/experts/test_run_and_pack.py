"""Experts without autograd: `run` and `gradients` equal autograd of `compute`, and `unpack` inverts
`pack`."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from helpers import pairwise
from moesaic.errors import InputError
from moesaic.experts import AbstractExperts, GatedExperts, ModuleExperts, PlainExperts
from moesaic.experts.experts import ExpertCall, Weights

DIM = 6
HIDDEN = 4


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(DIM, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, DIM, bias=False))


class Biased(nn.Module):
    """A user-defined expert with parameters of odd shapes, one of them a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(()))
        self.shift = nn.Parameter(torch.randn(1, DIM))
        self.cube = nn.Parameter(torch.randn(2, 3, DIM))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x.sin() + self.shift * (x @ self.cube.flatten(0, 1).T)[:, :1]


MAKERS = {
    "swiglu": lambda n: GatedExperts(DIM, HIDDEN, n),
    "swiglu with biases": lambda n: GatedExperts(DIM, HIDDEN, n, bias=True),
    **{
        kind: partial(lambda a, n: PlainExperts(DIM, HIDDEN, n, activation=a), kind)
        for kind in ("gelu", "relu", "silu")
    },
    "gelu with biases": lambda n: PlainExperts(DIM, HIDDEN, n, bias=True),
    "modules": lambda n: ModuleExperts(two_layers, DIM, n),
    "odd modules": lambda n: ModuleExperts(Biased, DIM, n),
}
COUNTS = [[0], [4], [0, 0, 0], [3, 0, 2], [1, 5, 1, 0]]


def ends_of(counts: list[int]) -> Tensor:
    return torch.tensor(counts).cumsum(0).to(torch.int32)


def weights_of(experts: AbstractExperts) -> tuple[Weights, Weights]:
    sharded, common = experts.weights()
    return tuple(w.detach() for w in sharded), tuple(w.detach() for w in common)


@pytest.mark.parametrize(
    ("kind", "counts", "weighted", "shards"),
    pairwise(MAKERS, COUNTS, (True, False), (1, 2), empty=lambda _, counts, *__: not any(counts)),
    ids=str,
)
def test_explicit_products_equal_autograd(
    kind: str, counts: list[int], weighted: bool, shards: int
) -> None:
    experts = MAKERS[kind](len(counts)).double()
    rows, dy = torch.randn(2, sum(counts), DIM, dtype=torch.float64)
    gates = torch.rand(sum(counts), dtype=torch.float64) + 0.1 if weighted else None
    sharded, common = weights_of(experts)
    leaves = [leaf.clone().requires_grad_() for leaf in (rows, *sharded, *common)]
    gate = None if gates is None else gates.clone().requires_grad_()
    cut = 1 + len(sharded)
    expected = experts.compute(
        ExpertCall(
            tuple(leaves[1:cut]), tuple(leaves[cut:]), leaves[0], gate, ends_of(counts), shards
        )
    )
    wanted = leaves if gate is None else [*leaves, gate]
    grads = torch.autograd.grad(expected, wanted, dy, materialize_grads=True)

    call = ExpertCall(sharded, common, rows, gates, ends_of(counts), shards)
    out, kept = experts.run(call)
    assert not out.requires_grad
    torch.testing.assert_close(out, expected.detach())
    found = experts.gradients(call, kept, dy)
    d_rows, d_gates, d_sharded, d_common = found
    torch.testing.assert_close(d_rows, grads[0])
    torch.testing.assert_close(d_sharded, grads[1:cut])
    torch.testing.assert_close(d_common, grads[cut : len(leaves)])
    assert (d_gates is None) == (gates is None)
    if d_gates is not None:
        torch.testing.assert_close(d_gates, grads[-1])


@pytest.mark.parametrize("kind", MAKERS)
def test_the_number_of_kept_tensors_does_not_depend_on_the_rows(kind: str) -> None:
    experts = MAKERS[kind](3)
    kept = [
        experts.run(ExpertCall(*weights_of(experts), torch.randn(sum(c), DIM), None, ends_of(c)))[1]
        for c in ([0] * 3, [2, 0, 5])
    ]
    assert len(kept[0]) == len(kept[1])


@pytest.mark.parametrize("kind", ["swiglu", "swiglu with biases", "gelu", "gelu with biases"])
def test_shards_add_up_to_the_whole(kind: str) -> None:
    """With half of the hidden width and half of the common bias on each shard, results and row
    gradients sum to the whole."""
    counts = [3, 0, 2]
    experts = MAKERS[kind](3).double()
    sharded, common = weights_of(experts)
    names = experts.names[0]
    rows, dy = torch.randn(2, 5, DIM, dtype=torch.float64)
    gates = torch.rand(5, dtype=torch.float64)
    call = ExpertCall(sharded, common, rows, gates, ends_of(counts))
    whole, kept = experts.run(call)
    whole_grads = experts.gradients(call, kept, dy)
    out = torch.zeros_like(whole)
    d_rows = torch.zeros_like(rows)
    d_gates = torch.zeros_like(gates)
    parts = []
    for shard in range(2):
        own = tuple(w.chunk(2, experts.shard_dim(n))[shard] for n, w in zip(names, sharded))  # type: ignore[arg-type]
        call = ExpertCall(own, common, rows, gates, ends_of(counts), 2)
        part, kept = experts.run(call)
        grads = experts.gradients(call, kept, dy)
        out = out + part
        d_rows = d_rows + grads[0]
        assert grads[1] is not None
        d_gates = d_gates + grads[1]
        parts.append(grads)
    torch.testing.assert_close(out, whole)
    torch.testing.assert_close(d_rows, whole_grads[0])
    torch.testing.assert_close(d_gates, whole_grads[1])
    for at, name in enumerate(names):
        both = torch.cat([grads[2][at] for grads in parts], experts.shard_dim(name))  # type: ignore[arg-type]
        torch.testing.assert_close(both, whole_grads[2][at])
    for at in range(len(common)):
        torch.testing.assert_close(sum(grads[3][at] for grads in parts), whole_grads[3][at])


@pytest.mark.parametrize("num_experts", [1, 3])
@pytest.mark.parametrize("kind", MAKERS)
def test_what_is_packed_comes_out_again(kind: str, num_experts: int) -> None:
    experts = MAKERS[kind](num_experts)
    sharded, _ = weights_of(experts)
    rows = experts.pack(sharded)
    assert rows.shape[0] == num_experts * experts.num_units(sharded)
    assert rows.numel() == sum(w.numel() for w in sharded)
    again = experts.unpack(rows, num_experts)
    assert len(again) == len(sharded)
    for one, other in zip(sharded, again):
        assert torch.equal(one, other)


@pytest.mark.parametrize("kind", MAKERS)
def test_unpacked_experts_of_other_ranks_compute_what_they_do_at_home(kind: str) -> None:
    """Six experts from a rank that stores two: the module defines how to compute, the arguments
    have the weights."""
    whole = MAKERS[kind](6).double()
    home = MAKERS[kind](2).double()
    sharded, common = weights_of(whole)
    counts = [1, 0, 2, 1, 0, 3]
    rows = torch.randn(7, DIM, dtype=torch.float64)
    again = home.unpack(whole.pack(sharded), 6)
    expected = whole.compute(ExpertCall(sharded, common, rows, None, ends_of(counts)))
    torch.testing.assert_close(
        home.compute(ExpertCall(again, common, rows, None, ends_of(counts))), expected
    )


def test_dropout_draws_the_same_again_in_backward() -> None:
    make = lambda: nn.Sequential(nn.Linear(DIM, 64), nn.Dropout(0.5), nn.Linear(64, DIM))  # noqa: E731
    experts = ModuleExperts(make, DIM, 2).double()
    sharded, common = weights_of(experts)
    rows, dy = torch.randn(2, 5, DIM, dtype=torch.float64)
    ends = ends_of([2, 3])
    call = ExpertCall(sharded, common, rows, None, ends)
    torch.manual_seed(5)
    out, kept = experts.run(call)
    torch.randn(100)
    before = torch.get_rng_state()
    found = experts.gradients(call, kept, dy)
    assert torch.equal(torch.get_rng_state(), before), (
        "the recomputation leaves the generator where it was"
    )

    torch.manual_seed(5)
    leaves = [leaf.clone().requires_grad_() for leaf in (rows, *sharded)]
    again = experts.compute(ExpertCall(tuple(leaves[1:]), (), leaves[0], None, ends))
    assert torch.equal(again, out)
    grads = torch.autograd.grad(again, leaves, dy)
    torch.testing.assert_close((found[0], *found[2]), grads)
    torch.manual_seed(6)
    assert not torch.equal(experts.run(call)[0], out), "there is dropout at all"


def test_keeping_some_experts_keeps_their_names_and_parameters() -> None:
    experts = ModuleExperts(two_layers, DIM, 6)
    before = dict(experts.named_parameters())
    experts.keep_only(range(2, 4), copies=1)
    after = dict(experts.named_parameters())
    assert set(after) == {name for name in before if name.split(".")[1] in ("2", "3")}
    assert all(after[name] is before[name] for name in after)
    assert experts.names == (tuple(after), ())
    assert list(experts.state_dict()) == list(after)
    rows = torch.randn(3, DIM)
    ends = ends_of([1, 2])
    out = experts(rows, None, ends)
    torch.testing.assert_close(out[:1], experts.experts["2"](rows[:1]))  # type: ignore[index]
    torch.testing.assert_close(out[1:], experts.experts["3"](rows[1:]))  # type: ignore[index]


@pytest.mark.parametrize("kind", ["swiglu", "gelu with biases"])
def test_bfloat16_rows_and_float32_gates(kind: str) -> None:
    """Under autocast, rows and weights are 16-bit; routing weights and their gradient stay
    float32."""
    experts = MAKERS[kind](2)
    sharded, common = (tuple(w.bfloat16() for w in weights) for weights in weights_of(experts))
    rows = torch.randn(5, DIM).bfloat16()
    dy = torch.randn(5, DIM).bfloat16()
    gates = torch.rand(5)
    ends = ends_of([2, 3])
    call = ExpertCall(sharded, common, rows, gates, ends)
    out, kept = experts.run(call)
    d_rows, d_gates, d_sharded, d_common = experts.gradients(call, kept, dy)
    assert {t.dtype for t in (out, d_rows, *d_sharded, *d_common)} == {torch.bfloat16}
    assert d_gates.dtype == torch.float32
    exact, kept = experts.run(ExpertCall(*weights_of(experts), rows.float(), gates, ends))
    torch.testing.assert_close(out.float(), exact, rtol=5e-2, atol=5e-2)


class Buffered(nn.Module):
    """An expert with a result that depends on a tensor that is not a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(DIM, DIM))
        self.register_buffer("scale", torch.randn(()))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight * self.scale


@pytest.mark.parametrize("make", [Buffered, nn.Identity])
def test_what_would_stay_behind_does_not_travel(make: type[nn.Module]) -> None:
    experts = ModuleExperts(make, DIM, 2)
    with pytest.raises(
        InputError,
        match=f"experts like {make.__name__} cannot be sent.*leave plan.gather_weights at none",
    ):
        experts.pack(weights_of(experts)[0])
    out = experts(torch.randn(3, DIM), None, ends_of([1, 2]))
    assert out.shape == (3, DIM)


def test_modules_of_different_kinds_are_refused() -> None:
    kinds = iter([two_layers, Biased, two_layers])
    with pytest.raises(
        InputError,
        match="must have parameters of the same names and shapes: create all in the same way",
    ):
        ModuleExperts(lambda: next(kinds)(), DIM, 3)


def test_experts_run_within_functional_call() -> None:
    """Inside `functional_call` parameters are plain tensors: an MoE layer as a user-defined expert,
    torch.func."""
    for make in MAKERS.values():
        experts = make(2).double()
        rows = torch.randn(3, DIM, dtype=torch.float64)
        ends = ends_of([1, 2])
        doubled = {name: 2 * parameter.detach() for name, parameter in experts.named_parameters()}
        out = torch.func.functional_call(experts, doubled, (rows, None, ends))
        experts.load_state_dict(doubled)
        torch.testing.assert_close(out, experts(rows, None, ends).detach())
