"""Explaining factors: single axes, quotients, constants, and products that only other meshes distinguish."""

from __future__ import annotations

import pytest
import torch

from moesaic.program.grid import Grid
from moesaic.testing.factors import Cause, Product, axes_of, explain, fit, is_right, products

MESHES = [
    Grid(world=world, tp=tp, ep=ep, etp=etp)
    for world, tp, ep, etp in (
        (4, 2, 2, 1),
        (4, 1, 2, 2),
        (8, 2, 4, 1),
        (8, 4, 2, 2),
        (6, 3, 2, 1),
        (6, 2, 3, 1),
        (6, 2, 1, 3),
    )
]


FIRST = Grid(world=8, tp=2, ep=2, etp=2)


def cause_of(factor, first=FIRST, others=MESHES) -> Cause:
    _, causes = explain(first, others, axes_of, lambda grid: {"it": factor(grid)})
    return causes["it"]


@pytest.mark.parametrize(
    ("factor", "expected"),
    [
        (lambda g: g.ep, "ep"),
        (lambda g: g.etp, "etp"),
        (lambda g: g.tp, "tp"),
        (lambda g: g.edp, "edp"),
        (lambda g: g.dp, "dp"),
        (lambda g: 1 / g.dp, "1/dp"),
        (lambda g: g.dp / g.edp, "dp/edp"),
        (lambda g: g.ep * g.etp, "ep*etp"),
        (lambda g: g.ep * g.etp / g.tp, "dp/edp"),  # the same number on every mesh: dp * tp = edp * ep * etp
        (lambda g: g.tp**2 * g.ep, "ep*tp*tp"),
        (lambda g: 2.0, "2"),
        (lambda g: 1 / 3, "0.3333"),
    ],
)
def test_one_product_is_left(factor, expected):
    cause = cause_of(factor)
    assert [str(product) for product in cause.products] == [expected]
    assert cause.runs > 1


def test_what_no_mesh_can_tell_apart_is_all_named():
    first = Grid(world=4, tp=2, ep=2)
    assert [str(product) for product in cause_of(lambda g: g.tp, first, []).products] == ["ep", "tp", "dp"]
    alike = [Grid(world=size, tp=size, ep=size) for size in (2, 3, 4, 6)]
    cause = cause_of(lambda g: g.tp, alike[0], alike[1:])
    assert str(cause).endswith("division by ep (=2), or like a missing division by tp (=2)")


def test_a_factor_that_differs_on_another_mesh_is_no_axis():
    cause = cause_of(lambda g: 2.0 if g.world == 8 else 1.7)
    assert cause.products == ()
    assert str(cause) == "2.00 times too large: is not a product of the sizes of the mesh"


def test_a_mesh_that_a_layer_does_not_fit_is_left_out():
    def measure(grid):
        if grid.world == 6:
            raise ValueError("no experts for three ranks")
        return {"it": float(grid.ep)}

    _, causes = explain(Grid(world=8, tp=2, ep=2, etp=2), MESHES, axes_of, measure)
    assert str(causes["it"].products[0]) == "ep"


def test_what_is_wrong_on_the_first_mesh_is_raised():
    def measure(grid):
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        explain(MESHES[0], MESHES, axes_of, measure)


def test_what_is_right_has_no_cause():
    found, causes = explain(MESHES[0], MESHES[1:], axes_of, lambda grid: {"right": 1.0, "mixed": None})
    assert found == {"right": 1.0, "mixed": None}
    assert causes == {}


def test_sentences():
    sizes = {"ep": 2, "dp": 4, "edp": 2}

    def said(factor, *found):
        return str(Cause(factor, sizes, found, 3))

    assert said(2.0, Product(("ep",))) == "2.00 times too large: looks like a missing division by ep (=2)"
    assert said(0.25, Product((), ("dp",))) == "4.00 times too small: looks like one division too many by dp (=4)"
    quotient = "a missing division by dp (=4) and one division too many by edp (=2)"
    assert said(2.0, Product(("dp",), ("edp",))) == f"2.00 times too large: looks like {quotient}"
    assert said(2.0, Product(number=2.0)).endswith("looks like the same factor on every mesh (3 tried), so no axis")
    assert said(2.0, Product(("ep",)), Product(("edp",))).endswith("ep (=2), or like a missing division by edp (=2)")
    assert said(0.0) == "missing altogether"
    assert said(-1.0) == "-1 times what they should be, which is the wrong sign"


def test_fit():
    one, other = torch.randn(2, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert fit(2 * one, [one], 1e-9) == pytest.approx([2.0])
    assert fit(0.5 * one + 3 * other, [one, other], 1e-9) == pytest.approx([0.5, 3.0])
    assert fit(one.flip(0), [one], 1e-9) is None  # no factor
    assert fit(one, [one, 2 * one], 1e-9) is None  # not unique
    assert fit(one, [one, 0 * one], 1e-9) is None  # unknown
    assert fit(one * float("nan"), [one], 1e-9) is None
    assert is_right(1.0)
    assert not is_right(None)
    assert not is_right(1.01)


def test_products_are_simple_first_and_each_once():
    found = list(products(["ep", "tp"]))
    assert [str(product) for product in found[:4]] == ["ep", "tp", "1/ep", "1/tp"]
    assert len(set(found)) == len(found)
    assert "dp/edp" in map(str, products(["ep", "etp", "tp", "dp", "edp"]))
    assert "ep*etp/tp" not in map(str, products(["ep", "etp", "tp", "dp", "edp"]))
    assert all(not set(product.over) & set(product.under) for product in found)
