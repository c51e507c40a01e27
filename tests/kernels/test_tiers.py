"""Implementations chosen by name. The GPU products are replaced by float64 products of the same
operands."""

from __future__ import annotations

import importlib
import inspect
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from helpers import refused
from moesaic import MoE
from moesaic.errors import InputError
from moesaic.experts import ModuleExperts
from moesaic.kernels import fp8_rowwise, mxfp8, pick, whole_batch
from moesaic.kernels.expert_ffn import expert_ffn
from moesaic.kernels.permute import sort_by_expert
from moesaic.kernels.work import ExpertWork

TOKENS = 150
TOP_K = 2
EXPERTS = 4
DIM = 64
HIDDEN = 96
SCALED = {"fp8": fp8_rowwise, "mxfp8": mxfp8}
BLOCKS = {"fp8": 0, "mxfp8": mxfp8.BLOCK}
"""The number of values that share a scale; 0 for a whole row."""
scaled = pytest.mark.parametrize("name", SCALED)


def work_of(kernel: str = "auto", dtype: torch.dtype = torch.bfloat16) -> ExpertWork:
    torch.manual_seed(0)
    # the last expert gets no rows
    expert = torch.rand(TOKENS, EXPERTS - 1).argsort(1)[:, :TOP_K].reshape(-1)
    token = torch.arange(TOKENS).repeat_interleave(TOP_K)
    permutation = sort_by_expert(
        token, expert, torch.bincount(expert, minlength=EXPERTS), TOKENS, TOP_K
    )

    def leaf(*size: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(size)).bfloat16().to(dtype).requires_grad_()

    return ExpertWork(
        x=leaf(TOKENS, DIM),
        dispatch=permutation.dispatch,
        gates=torch.rand(len(token)).to(dtype).requires_grad_(),
        gates_first=False,
        ends=permutation.ends,
        up_bias=None,
        down_bias=None,
        activation="silu",
        kernel=kernel,
        up=leaf(EXPERTS, 2, HIDDEN, DIM, scale=DIM**-0.5),
        down=leaf(EXPERTS, DIM, HIDDEN, scale=HIDDEN**-0.5),
    )


def results(work: ExpertWork) -> dict[str, Tensor]:
    """Return the result and all gradients."""
    y = expert_ffn(work)
    torch.manual_seed(1)
    leaves = {"x": work.x, "gates": work.gates, "up": work.up, "down": work.down}
    actual = torch.autograd.grad(
        y, list(leaves.values()), torch.randn(y.shape).bfloat16().to(y.dtype)
    )
    return {"y": y.detach(), **dict(zip(leaves, actual))}


def unswizzled(scale: Tensor, rows: int, columns: int) -> Tensor:
    """Undo cuBLAS's documented swizzling of scale tiles: return (rows, columns) scales in
    float32."""
    wide = -(-columns // 4)
    tiles = scale.reshape(-1, wide, 32, 4, 4)
    row = torch.arange(rows)[:, None]
    column = torch.arange(columns)[None, :]
    return tiles[row // 128, column // 4, row % 32, row % 128 // 32, column % 4].float()


def exact_scaled_grouped_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *, offs: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """Compute `torch._scaled_grouped_mm` in float64: rows by (E, K, N) matrices that are stored (E,
    N, K)."""
    meta = [
        each.to("meta") for each in (a, b, scale_a, scale_b, offs)
    ]  # the checks of torch: shapes, strides and dtypes
    shape = torch.ops.aten._scaled_grouped_mm(*meta[:4], offs=meta[4], out_dtype=out_dtype).shape
    out = torch.full(shape, float("nan"), dtype=torch.float64)
    start = 0
    first = 0
    blocks = a.shape[1] // 32
    is_mx = scale_a.dtype == torch.float8_e8m0fnu
    for e, end in enumerate(offs.tolist()):
        if is_mx:
            tiles = -(-(end - start) // 128) * 128
            of_rows = unswizzled(
                scale_a[first : first + tiles], end - start, blocks
            ).repeat_interleave(32, 1)
            of_matrix = unswizzled(scale_b[e], b.shape[2], blocks).repeat_interleave(32, 1)
            first += tiles
        else:
            of_rows = scale_a[start:end, None]
            of_matrix = scale_b[e, :, None]
        out[start:end] = (a[start:end].double() * of_rows) @ (b[e].t().double() * of_matrix).t()
        start = end
    return out.to(out_dtype)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the tiers on the CPU, with the exact product of their operands."""
    monkeypatch.setattr(torch, "_scaled_grouped_mm", exact_scaled_grouped_mm)
    monkeypatch.setattr(whole_batch, "require", lambda *_: None)


def to_8_bits(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Return values rounded to 8 bits, and the largest error of each, from the formats'
    definitions."""
    blocks = x.double().unflatten(-1, (-1, block or x.shape[-1]))
    scale = torch.exp2(
        torch.ceil(torch.log2(blocks.abs().amax(-1, keepdim=True) / 448)).nan_to_num(0, 0, 0)
    )
    rounded_blocks = (blocks / scale).to(torch.float8_e4m3fn).double() * scale
    return rounded_blocks.flatten(-2), torch.maximum(
        2.0**-4 * blocks.abs(), 2.0**-10 * scale
    ).flatten(-2)


@scaled
@pytest.mark.parametrize("stored", ["(E, N, K)", "(E, K, N)"])
def test_a_product_is_that_of_values_rounded_in_their_blocks(name, stored, on_gpu):
    """Every element is as near to the exact product as 8 bits allow."""
    torch.manual_seed(0)
    ends = torch.tensor([100, 100, 290], dtype=torch.int32)
    x = (
        torch.randn(300, 64) * torch.randn(300, 1).exp()
    ).bfloat16()  # rows after those of the last expert are undefined
    w = torch.randn(3, 96, 64) * torch.randn(3, 96, 1).exp()
    w = (w if stored == "(E, N, K)" else w.transpose(1, 2).contiguous().transpose(1, 2)).bfloat16()
    x[290:] = float("nan")
    x[5] = 0
    actual = SCALED[name].rows_times(x, w.transpose(1, 2), ends)
    (rows, rows_off) = to_8_bits(x, BLOCKS[name])
    (matrices, matrices_off) = to_8_bits(w, BLOCKS[name])
    for e, (start, end) in enumerate(((0, 100), (100, 100), (100, 290))):
        mine = actual[start:end].double()
        of = slice(start, end)
        torch.testing.assert_close(mine, rows[of] @ matrices[e].t(), rtol=2**-8, atol=1e-12)
        exact = x[of].double() @ w[e].double().t()
        bound = (
            x[of].double().abs() @ matrices_off[e].t()
            + rows_off[of] @ (w[e].double().abs() + matrices_off[e]).t()
        )
        assert bool(((mine - exact).abs() <= bound * (1 + 2**-8) + 2**-8 * exact.abs()).all())


@scaled
def test_a_layer_stays_within_its_bounds_of_the_float64_reference(name, on_gpu):
    """One rounding changes a value by 2.6 % (uniform, at most 2^-4 of it); a result depends on two
    to four roundings."""
    exact = results(work_of(dtype=torch.float64))
    actual = results(replace(work_of(), kernel=name))
    for each, true in exact.items():
        error = float(
            (actual[each].double() - true).square().mean().sqrt() / true.square().mean().sqrt()
        )
        assert 0.005 < error < 0.10, (each, error)
    assert not actual["up"][-1].any(), "an expert without rows gets zeros"


@scaled
def test_what_is_not_finite_stays_so_in_its_row(name, on_gpu):
    x = torch.randn(130, 64).bfloat16()
    w = torch.randn(2, 32, 64).bfloat16()
    ends = torch.tensor([60, 130], dtype=torch.int32)
    expected = SCALED[name].rows_times(x, w.transpose(1, 2), ends)
    for row, value in ((3, float("nan")), (70, float("inf")), (71, float("-inf"))):
        x[row, 5] = value
    actual = SCALED[name].rows_times(x, w.transpose(1, 2), ends)
    others = torch.ones(130, dtype=torch.bool)
    others[[3, 70, 71]] = False
    assert torch.equal(actual[others], expected[others])
    assert not actual[~others].isfinite().any()


def test_extreme_rows_have_a_scale():
    for value in (0.0, 2.0**-126, 448.0, 480.0, 1.75 * 2.0**127):
        rows, scale = fp8_rowwise.rounded(torch.full((1, 16), value).bfloat16())
        assert torch.equal(rows.float() * scale[:, None], torch.full((1, 16), value))


def quack_of(gemm) -> dict[str, ModuleType]:
    package = ModuleType("quack")
    interface = ModuleType("quack.gemm_interface")
    interface.gemm = gemm
    return {"quack": package, "quack.gemm_interface": interface}


def quack_gemm(
    a: Tensor, b: Tensor, *, cu_seqlens_m=None, cu_seqlens_k=None, tuned: bool
) -> Tensor:
    """Compute what `quack.gemm_interface.gemm` documents; elements that it does not write are
    NaN."""
    assert not tuned
    if cu_seqlens_m is not None:
        out = torch.full((len(a), b.shape[2]), float("nan"), dtype=a.dtype)
        for e, (start, end) in enumerate(
            zip(cu_seqlens_m[:-1].tolist(), cu_seqlens_m[1:].tolist())
        ):
            out[start:end] = a[start:end] @ b[e]
        return out
    bounds = list(zip(cu_seqlens_k[:-1].tolist(), cu_seqlens_k[1:].tolist()))
    return torch.stack(
        [
            a[:, i:j] @ b[i:j] if j > i else a.new_full((len(a), b.shape[1]), float("nan"))
            for i, j in bounds
        ]
    )


@pytest.mark.parametrize("name", ["grouped_mm", "quack"])
def test_other_products_give_the_same(name, monkeypatch):
    for module, fake in quack_of(quack_gemm).items():
        monkeypatch.setitem(sys.modules, module, fake)
    monkeypatch.delitem(sys.modules, "moesaic.kernels.quack", raising=False)
    monkeypatch.setattr(whole_batch, "require", lambda *_: None)
    pick._expert_kernel.cache_clear()
    exact = results(work_of(dtype=torch.float64))
    actual = results(replace(work_of(dtype=torch.float32), kernel=name))
    pick._expert_kernel.cache_clear()
    sys.modules.pop("moesaic.kernels.quack", None)
    for each, true in exact.items():
        torch.testing.assert_close(
            actual[each].double(), true, atol=1e-5 * float(true.abs().max()), rtol=0
        )


def test_quack_takes_the_arguments_that_it_is_given():
    interface = pytest.importorskip("quack.gemm_interface", reason="quack-kernels is not installed")
    x = torch.randn(9, 16).bfloat16()
    w = torch.randn(3, 16, 8).bfloat16()
    ends = torch.tensor([0, 4, 4, 9], dtype=torch.int32)
    torch.testing.assert_close(
        interface.gemm_ref(x, w, cu_seqlens_m=ends),
        quack_gemm(x, w, cu_seqlens_m=ends, tuned=False),
    )
    actual = interface.gemm_ref(x.t(), x, cu_seqlens_k=ends)
    expected = quack_gemm(x.t(), x, cu_seqlens_k=ends, tuned=False)
    torch.testing.assert_close(actual[[0, 2]], expected[[0, 2]])
    assert {"cu_seqlens_m", "cu_seqlens_k", "tuned"} <= set(
        inspect.signature(interface.gemm).parameters
    )


def test_quack_compiles_both_products_for_hopper(monkeypatch):
    """Runs the real package up to the launch, which needs a GPU: it accepts the operands and
    compiles the kernels."""
    package = pytest.importorskip("quack.gemm", reason="quack-kernels is not installed")
    monkeypatch.setenv("QUACK_ARCH", "sm_90")
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a")
    # this would ask the driver
    monkeypatch.setattr(package, "get_max_active_clusters", lambda *_, **__: 66)
    compiled = []
    monkeypatch.setattr(
        package, "launch_gemm", lambda plan, *_, **__: compiled.append(plan.compiled_fn)
    )
    quack = importlib.import_module("moesaic.kernels.quack")
    with FakeTensorMode():
        x, dy = (torch.empty(9, width, dtype=torch.bfloat16, device="cuda") for width in (16, 8))
        ends = torch.empty(3, dtype=torch.int32, device="cuda")
        w = x.new_empty(3, 16, 8)
        rows = quack.rows_times(x, w, ends)
        outer = quack.outer_products(dy, x, ends)
    assert (rows.shape, outer.shape) == ((9, 8), (3, 8, 16))
    assert len(compiled) == 2
    assert all(callable(each) for each in compiled)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("fp7", r"kernel='fp7' is unknown: choose one of auto, grouped_mm, quack, fp8, mxfp8"),
        (
            "fp8",
            r"kernel='fp8' needs a GPU of compute capability 9.x, got cpu; kernel='auto' runs here",
        ),
        (
            "mxfp8",
            (
                r"kernel='mxfp8' needs a GPU of compute capability 10.x, got cpu; kernel='auto' "
                r"runs here"
            ),
        ),
        (
            "quack",
            (
                r"kernel='quack' (cannot be imported here|needs a GPU of compute capability 9.x "
                r"or 10.x, got cpu)"
            ),
        ),
    ],
)
def test_a_tier_that_does_not_fit_is_one_line(name, wanted):
    with pytest.raises(InputError, match=wanted) as error:
        MoE(32, 32, 2, kernel=name)(torch.randn(3, 32))
    assert "\n" not in str(error.value)


def test_dtypes_and_widths_that_a_tier_does_not_have_are_one_line():
    on_gpu = replace(work_of("fp8"), x=torch.empty(2, 32, device="meta"))
    with pytest.raises(
        InputError,
        match=r"multiplies bfloat16, got torch.float32: use autocast; kernel='auto' runs here",
    ):
        pick.require(on_gpu, "fp8", (0, 9), 16)
    odd = replace(on_gpu, x=torch.empty(2, 24, device="meta", dtype=torch.bfloat16))
    assert "needs multiples of 16 as widths, got dim 24 and hidden 96" in refused(
        pick.require, odd, "fp8", (0, 9), 16
    )


def test_experts_of_the_users_own_have_no_kernel_to_choose():
    def make(dim: int, hidden: int, count: int) -> ModuleExperts:
        return ModuleExperts(lambda: torch.nn.Linear(dim, dim), dim, count)

    with pytest.raises(
        InputError, match=r"kernel='fp8' is only for built-in experts, got ModuleExperts"
    ):
        MoE(8, 8, 2, experts=make, kernel="fp8")


@scaled
def test_the_page_says_what_a_tier_is_for_that_rounds_weights_in_every_product(name):
    page = (Path(__file__).parents[2] / "docs" / "kernels_gpu.md").read_text()
    assert f"\n| `{name}`, for accuracy studies | " in page
