"""The largest entries of each row against a stable sort in float64: ties, padding columns, NaN and zeros of both signs."""

from __future__ import annotations

import pytest
import torch
from triton_references import RowOrder

from helpers import ODD_LOGITS, pairwise, ranked
from moesaic.kernels.top_k import top_k_indices_reference
from moesaic.kernels.triton.rows.sort import sort
from moesaic.kernels.triton.rows.top_k import top_k_columns
from moesaic.routing.routers import SigmoidTopK, SoftmaxTopK
from moesaic.routing.routing import Scores

SIZES = [(0, 4, 2), (1, 1, 1), (3, 5, 5), (7, 5, 2), (40, 64, 8), (300, 16, 1)]


@pytest.mark.parametrize(
    ("size", "values", "dtype"),
    pairwise(SIZES, ("distinct", "ties"), (torch.float32, torch.bfloat16), empty=lambda size, *_: size[0] == 0),
    ids=str,
)
def test_chooses_as_a_stable_sort_does(size, values, dtype, device):
    num_rows, num_columns, top_k = size
    rank_by = torch.randn(num_rows, num_columns)
    rank_by = (rank_by.round() * 0.5 if values == "ties" else rank_by).to(dtype)
    actual = top_k_columns(rank_by.to(device), top_k)
    assert actual.dtype == torch.int32
    assert torch.equal(actual.long().cpu(), top_k_indices_reference(rank_by.double(), top_k))


def test_equal_zeros_of_both_signs_go_to_the_lowest_index(device):
    rank_by = torch.tensor([[0.0, -0.0, 0.0], [-0.0, 0.0, -1.0]], device=device)
    assert top_k_columns(rank_by, 2).tolist() == [[0, 1], [0, 1]]


@pytest.mark.parametrize("score", ["softmax", "switch", "sigmoid"])
@pytest.mark.parametrize("top_k", [1, 2, 3, 5])
def test_odd_rows_are_routed_as_on_a_cpu(score, top_k, device):
    """Routers choose the same experts as on a CPU, even for NaN; every chosen expert exists."""
    logits = torch.tensor(list(ODD_LOGITS.values()))
    router = {
        "softmax": SoftmaxTopK(1, 5), "switch": SoftmaxTopK(1, 5, normalize="before"), "sigmoid": SigmoidTopK(1, 5),
    }[score]  # fmt: skip
    gates = logits.sigmoid() if score == "sigmoid" else logits.softmax(1)
    rank_by = gates if score == "sigmoid" else logits
    choice = router.choose(Scores(logits, logits.softmax(1), gates, rank_by), top_k, None, None)
    expert = top_k_columns(rank_by.to(device), top_k)
    assert torch.equal(expert.long().cpu().flatten(), choice.expert)
    if score != "sigmoid":
        assert expert.tolist() == [ranked(row)[:top_k] for row in ODD_LOGITS.values()]
    order = RowOrder(*sort(expert.flatten(), 5))
    assert int(order.ends[-1]) == expert.numel()
    assert sorted(order.row.tolist()) == list(range(expert.numel()))


@pytest.mark.parametrize("num_columns", [5, 6, 7, 9])
def test_rows_of_nan_have_columns_that_exist(num_columns, device):
    rank_by = torch.full((3, num_columns), float("nan"), device=device)
    assert top_k_columns(rank_by, num_columns).tolist() == [list(range(num_columns))] * 3


def test_the_operator_holds_what_it_promises(device):
    torch.library.opcheck(top_k_columns, (torch.randn(4, 6, device=device), 2))
