"""Every kernel compiles for Ampere, Ada and Hopper, fits the device and uses its tensor cores; no
GPU needed."""

from __future__ import annotations

import itertools
import re
from functools import partial

import pytest
import torch

from helpers import refused

pytest.importorskip("triton", reason='the GPU extra is not installed: pip install ".[gpu]"')

import triton
import triton.language as tl

from moesaic import MoE
from moesaic.comm.loopback import run_ranks
from moesaic.comm.mesh import Mesh
from moesaic.compile_ahead import warm_up
from moesaic.kernels.activation import Clamp
from moesaic.kernels.choice import empty_chosen
from moesaic.kernels.choice_call import ChoiceGradients, ChoiceRule, WantedSums
from moesaic.kernels.codecs.codec import split
from moesaic.kernels.codecs.eight import Fp8, Int8
from moesaic.kernels.triton import expert_stage, quantise
from moesaic.kernels.triton.grouped import rows_times
from moesaic.kernels.triton.outer import outer_products
from moesaic.kernels.triton.rows.choose import choose_backward_by_triton, choose_by_triton
from moesaic.kernels.triton.rows.permute import sum_tokens
from moesaic.kernels.triton.rows.sort import sort
from moesaic.kernels.triton.rows.tiles import Shape, Tile, default_tile, shared_bytes
from moesaic.kernels.triton.up import up
from moesaic.kernels.work import Dispatch, ExpertWork, Places, Wanted
from moesaic.program.grid import Grid
from moesaic_lab.device.compiled import (
    DEVICES,
    CompiledKernel,
    chained_products,
    compiling_for,
    counting_for,
)
from moesaic_lab.device.mlp import moe_mlp

PRODUCTS = {"_up_kernel", "_rows_kernel", "_down_grad_kernel", "_outer_kernel"}
TOKENS = 512
TOP_K = 8
EXPERTS = 16
DIM = 1024
HIDDEN = 256
SPILLED_BYTES = 64
"""The most spilled bytes per thread: a few in an epilogue cost nothing, hundreds mean that the
epilogue does not fit."""
FLOAT_ATOMIC = re.compile(r"\b(atom|red)\.\S*\.(f16|bf16|f32|f64)")

capabilities = pytest.mark.parametrize("capability", DEVICES)


def zeros(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(*sizes, dtype=dtype, requires_grad=dtype.is_floating_point)


def run_layer(dtype: torch.dtype, *, gated: bool, tokens: int = TOKENS) -> None:
    """Run a layer forward and backward on zeros."""
    order = sort(torch.zeros(tokens * TOP_K, dtype=torch.int32), EXPERTS)
    up = zeros(EXPERTS, 2 if gated else 1, HIDDEN, DIM, dtype=dtype)
    down = zeros(EXPERTS, DIM, HIDDEN, dtype=dtype)
    weight = zeros(tokens * TOP_K, dtype=torch.float32)
    x = zeros(tokens, DIM, dtype=dtype)
    activation = "silu" if gated else "gelu"
    moe_mlp(x, up, down, weight, *order, top_k=TOP_K, activation=activation).sum().backward()


def check(kernels: list[CompiledKernel], capability: int) -> set[str]:
    """Check compiled kernels against the limits of the device; return the names of those that use
    its tensor cores."""
    room = DEVICES[capability].shared_bytes
    assert {
        kernel.name: kernel.shared_bytes for kernel in kernels if kernel.shared_bytes > room
    } == {}
    assert {
        kernel.name: kernel.spilled_bytes
        for kernel in kernels
        if kernel.spilled_bytes > SPILLED_BYTES
    } == {}
    assert [kernel.name for kernel in kernels if kernel.is_serialized] == []
    assert [kernel.name for kernel in kernels if chained_products(kernel.ttir)] == []
    assert [kernel.name for kernel in kernels if FLOAT_ATOMIC.search(kernel.ptx)] == [], (
        "the same bits in every run"
    )
    expected = (
        "tcgen05.mma"
        if capability in (100, 103)
        else "wgmma.mma_async"
        if capability == 90
        else "mma.sync"
    )
    return {kernel.name for kernel in kernels if expected in kernel.ptx}


@pytest.mark.parametrize(
    "capability", [pytest.param(each, marks=[pytest.mark.slow] * (each != 90)) for each in DEVICES]
)
def test_what_gpt_oss_runs_fits_the_registers(capability, tmp_path):
    """Biases and clamped SwiGLU, forward and backward."""
    rows = TOKENS * TOP_K
    token = torch.zeros(rows, dtype=torch.int64)
    made = [
        zeros(EXPERTS, *sizes).detach()
        for sizes in ((2, HIDDEN, DIM), (2, HIDDEN), (DIM, HIDDEN), (DIM,))
    ]
    work = ExpertWork(
        x=zeros(TOKENS, DIM).detach(),
        gates=torch.zeros(rows),
        gates_first=False,
        activation="silu",
        dispatch=Dispatch(
            token=token, by_token=token, starts=torch.arange(0, rows, TOP_K), per_token=TOP_K
        ),
        ends=torch.zeros(EXPERTS, dtype=torch.int32),
        clamp=Clamp(7.0, 1.702, 1.0),
        **dict(zip(("up", "up_bias", "down", "down_bias"), made)),
    )
    with compiling_for(capability, tmp_path) as kernels:
        y, pre = expert_stage.forward(work, torch.bfloat16)
        expert_stage.backward(work, pre, y, Wanted())
    assert check(kernels, capability) == PRODUCTS
    assert [kernel.name for kernel in kernels].count("_bias_grad_kernel") == 2


HOPPER = (90, torch.bfloat16, True)
"""The layer that is compiled in every run of the tests."""
LAYERS = [
    (capability, *form)
    for capability in DEVICES
    for form in ((torch.bfloat16, True), (torch.float16, False))
]


@pytest.mark.parametrize(
    ("capability", "dtype", "gated"),
    [pytest.param(*layer, marks=[] if layer == HOPPER else pytest.mark.slow) for layer in LAYERS],
    ids=str,
)
def test_a_layer_runs_on_the_tensor_cores(capability, dtype, gated, tmp_path):
    with compiling_for(capability, tmp_path) as kernels:
        run_layer(dtype, gated=gated, tokens=TOKENS // 2)  # for the default tiles
    assert check(kernels, capability) == PRODUCTS
    if capability == 90:
        widths = {
            each.name: set(re.findall(r"wgmma\.mma_async\.\S*?m64n(\d+)k", each.ptx))
            for each in kernels
        }
        assert widths["_up_kernel"] == {"128"}, (
            "gate and up in one instruction, whose operands shared memory can feed"
        )
        (ptx,) = (each.ptx for each in kernels if each.name == "_down_grad_kernel")
        accesses = re.findall(r"\b(ld|st)\.global\.v4", ptx)
        waits = list(itertools.pairwise(accesses)).count(("ld", "st"))
        assert 0 < waits <= 4, "the eight parts of a tile are read by pairs"


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("precision", ["highest", "high"])
def test_a_layer_in_float32_fits_the_registers(capability, precision, tmp_path):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        with compiling_for(capability, tmp_path) as kernels:
            run_layer(torch.float32, gated=True)
    finally:
        torch.set_float32_matmul_precision(before)
    assert check(kernels, capability) == (PRODUCTS if precision == "high" else set())


@pytest.mark.slow
def test_hopper_fetches_weights_by_descriptor(tmp_path):
    """Rows in expert order are loaded by descriptor too; persistent programs flatten their
    loops."""
    tile = Tile(rows=128, columns=128, depth=64, warps=8, stages=3, programs=1, descriptors=1)
    ends = torch.tensor([TOKENS], dtype=torch.int32)
    with compiling_for(90, tmp_path) as kernels, torch.no_grad():
        rows_times(zeros(TOKENS, DIM), zeros(1, HIDDEN, DIM), ends, tile, transposed=True)
        up(zeros(TOKENS, DIM), zeros(1, 1, HIDDEN, DIM), ends, tile, activation="silu")
    assert check(kernels, 90) == {"_rows_kernel", "_up_kernel"}
    assert all(
        "cp.async.bulk.tensor" in kernel.ptx for kernel in kernels if kernel.name in PRODUCTS
    )


@pytest.mark.slow
@capabilities
def test_weight_gradients_have_the_room_that_their_tile_says(capability, tmp_path):
    """Checks rows in expert order, as on a mesh, gathered tokens, and operands of more than 2^31
    elements."""
    rows = TOKENS * TOP_K
    token = torch.zeros(TOKENS * TOP_K, dtype=torch.int32)
    p = zeros(rows, DIM)
    x = zeros(TOKENS, HIDDEN)
    ends = torch.zeros(EXPERTS, dtype=torch.int32)
    large = torch.empty(2**20, 2**11, dtype=torch.bfloat16, device="meta")
    shape = Shape(
        product="weight_grad",
        rows=rows,
        num_experts=EXPERTS,
        columns=HIDDEN,
        depth=rows,
        itemsize=2,
    )
    tile = default_tile(shape, DEVICES[capability])
    steps = {}
    with compiling_for(capability, tmp_path) as kernels, torch.no_grad():
        for name, q, q_token in (
            ("rows", zeros(rows, HIDDEN), None),
            ("tokens", x, token),
            ("large", large, token),
        ):
            outer_products(p, q, ends, tile, q_token=q_token)
            steps[name] = kernels[-1].ptx
    assert check(kernels, capability) == {"_outer_kernel"}
    assert max(
        each.shared_bytes for each in kernels if each.name == "_outer_kernel"
    ) <= shared_bytes(tile, shape)
    by_descriptor = {name: ptx.count("cp.async.bulk.tensor") for name, ptx in steps.items()}
    assert (
        (by_descriptor["rows"] > by_descriptor["tokens"] > 0)
        if capability >= 90
        else not any(by_descriptor.values())
    )


MODELS = {
    "Qwen3-30B-A3B": (2048, 768, 128, 65_536),
    "Mixtral 8x7B": (4096, 14_336, 2, 4096),
    "DeepSeek-V3": (7168, 2048, 16, 4096),
    "gpt-oss-120b": (2880, 2880, 16, 4096),
    "OLMoE": (2048, 1024, 64, 65_536),
    "odd widths": (100, 60, 8, 2048),
    "odd widths, few rows": (99, 61, 8, 200),
}
"""Width of a token and of an expert, experts, of which some models have fewer here, and rows."""


@pytest.mark.slow
@capabilities
@pytest.mark.parametrize("clamp", [None, Clamp(7.0, 1.702, 1.0)], ids=["swiglu", "clamped"])
@pytest.mark.parametrize("model", MODELS)
def test_models_and_odd_widths_fit_the_registers(model, clamp, capability, tmp_path_factory):
    dim, hidden, experts, rows = MODELS[model]
    new = partial(torch.empty, dtype=torch.bfloat16)
    token = torch.zeros(rows, dtype=torch.int64)
    biased = clamp is not None
    work = ExpertWork(
        x=new(rows // 4, dim),
        gates=torch.zeros(rows),
        gates_first=False,
        activation="silu",
        dispatch=Dispatch(
            token=token, by_token=token, starts=torch.arange(0, rows, 4), per_token=4
        ),
        ends=torch.zeros(experts, dtype=torch.int32),
        clamp=clamp,
        up=new(experts, 2, hidden, dim),
        up_bias=new(experts, 2, hidden) if biased else None,
        down=new(experts, dim, hidden),
        down_bias=new(experts, dim) if biased else None,
    )
    cache = tmp_path_factory.getbasetemp() / "models"  # most models have the same kernels
    cache.mkdir(exist_ok=True)
    with compiling_for(capability, cache) as kernels:
        y, pre = expert_stage.forward(work, torch.bfloat16)
        expert_stage.backward(work, pre, y, Wanted())
    check(kernels, capability)


@triton.jit
def chained_kernel(a, b, out, steps):
    at = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    total = tl.zeros((16, 16), tl.float32)
    for _ in range(steps):
        total = tl.dot(tl.load(a + at), tl.load(b + at), total)
        total = tl.dot(tl.load(b + at), tl.load(a + at), total)
    tl.store(out + at, total)


def test_two_products_into_one_accumulator_are_found(tmp_path):
    with compiling_for(100, tmp_path) as kernels:
        a = torch.zeros(16, 16, dtype=torch.bfloat16)
        chained_kernel[(1,)](a, a, a.float(), 4)
    assert [len(chained_products(kernel.ttir)) for kernel in kernels] == [1]


def choose_on_device(rule: ChoiceRule, num_experts: int) -> None:
    """Run the kernels of the choice forward and backward on zeros."""
    logits = torch.zeros(TOKENS, num_experts)
    wanted = WantedSums(balance=True, z=True, reduced=True)
    chosen = empty_chosen(logits, rule, wanted)
    bias = torch.zeros(num_experts) if rule.by_sigmoid else None
    choose_by_triton(logits, bias, torch.ones(TOKENS, dtype=torch.bool), None, rule, wanted, chosen)
    numbers = (
        chosen.expert,
        chosen.counts,
        chosen.num_valid,
        chosen.weight,
        chosen.balance,
        chosen.z,
    )
    choose_backward_by_triton(ChoiceGradients(logits, None, *numbers), rule, wanted)


@pytest.mark.slow
@capabilities
def test_everything_else_compiles(capability, tmp_path):
    with compiling_for(capability, tmp_path) as kernels:
        for rule in (
            ChoiceRule(TOP_K, by_sigmoid=False, normalize=True, scale=1.0),
            ChoiceRule(TOP_K, True, True, 1.0, num_groups=4, top_groups=2, by_best_two=True),
        ):
            for num_experts in (EXPERTS, 256):
                choose_on_device(rule, num_experts)
        sort(torch.zeros(TOKENS * TOP_K, dtype=torch.int32), EXPERTS)
        weight = torch.zeros(TOKENS * TOP_K)
        starts = torch.arange(0, TOKENS * TOP_K, TOP_K)
        by_token = torch.zeros(TOKENS * TOP_K, dtype=torch.int64)
        for per_token in (TOP_K, 0):
            for weights in (None, weight):
                sum_tokens(
                    torch.zeros(TOKENS * TOP_K, DIM),
                    by_token,
                    starts,
                    weights,
                    per_token,
                    torch.bfloat16,
                )
        rows = zeros(TOKENS, DIM).detach()
        for codec, encode, decode in (
            (Int8(), quantise.int8_encode, quantise.decode),
            (Fp8(), quantise.fp8_encode, quantise.decode),
        ):
            message = torch.zeros(codec.num_bytes(*rows.shape, rows.dtype), dtype=torch.uint8)
            fields = split(message, codec.layout(*rows.shape, rows.dtype))
            encode(rows, *fields)
            decode(*fields, rows.dtype)
    assert check(kernels, capability) == set()
    assert {kernel.name for kernel in kernels} >= {
        "_choose_kernel",
        "_sum_kernel",
        "_choose_backward_kernel",
        "_place_kernel",
        "_sum_tokens_kernel",
        "_int8_encode_kernel",
        "_fp8_encode_kernel",
    }


def choose_for(num_tokens: int) -> None:
    rule = ChoiceRule(1, by_sigmoid=False, normalize=True, scale=1.0)
    wanted = WantedSums(False, False, reduced=True)
    logits = torch.zeros(num_tokens, EXPERTS)
    choose_by_triton(logits, None, None, None, rule, wanted, empty_chosen(logits, rule, wanted))


@pytest.mark.random
def test_the_choice_is_not_compiled_again_for_other_numbers_of_tokens(tmp_path):
    with compiling_for(90, tmp_path) as kernels:
        for num_tokens in (8, 17, 1000, 1008, 8191, 8192):
            choose_for(num_tokens)
    assert len({kernel.ptx for kernel in kernels if kernel.name == "_choose_kernel"}) == 1


VARIANTS = 4
"""The most variants of a product: heights of tiles, of which there are 16, 32, 64 and 128."""
PRODUCTS_OF = {"_rows_kernel": 2, "_outer_kernel": 2}
"""How many products a kernel computes, where it is not one."""


@pytest.mark.parametrize("capability", [80, 89, 90, 100, 120])
def test_few_variants_serve_all_numbers_of_tokens(capability):
    """Also those of ranks that get 16 to 512 rows an expert."""
    few = (1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 100)
    many = (255, 256, 500, 512, 1000, 1001, 1024, 2000, 4095, 4096, 8000, 8191, 8192)
    with counting_for(capability) as variants:
        for num_tokens in (*few, *many):
            choose_for(num_tokens)
            run_layer(torch.bfloat16, gated=True, tokens=num_tokens)
    assert {*variants} >= PRODUCTS | {"_choose_kernel", "_place_kernel", "_sum_tokens_kernel"}
    more = {
        name: len(keys)
        for name, keys in variants.items()
        if len(keys) > VARIANTS * PRODUCTS_OF.get(name, 1)
    }
    assert more == {}


def run_on_a_rank(experts: int, rows: int) -> None:
    """Run the experts of a rank of a mesh, each on `rows` rows that lie anywhere."""
    number = experts * rows
    place = torch.zeros(number, dtype=torch.int32)
    work = ExpertWork(
        x=zeros(number, DIM).detach(),
        dispatch=None,
        gates=torch.zeros(number),
        gates_first=False,
        activation="silu",
        ends=torch.zeros(experts, dtype=torch.int32),
        up=zeros(experts, 2, HIDDEN, DIM).detach(),
        up_bias=None,
        down=zeros(experts, DIM, HIDDEN).detach(),
        down_bias=None,
        places=Places(x=place, y=place, d_x=place),
    )
    y, pre = expert_stage.forward(work, torch.bfloat16)
    expert_stage.backward(work, pre, y, Wanted())


@pytest.mark.parametrize("capability", [80, 90])
def test_few_variants_serve_the_ranks_of_a_mesh(capability):
    with counting_for(capability) as variants:
        for rows in (
            16,
            17,
            20,
            31,
            33,
            48,
            63,
            64,
            65,
            99,
            100,
            128,
            200,
            255,
            256,
            300,
            400,
            512,
        ):
            run_on_a_rank(4, rows)
    assert {*variants} >= PRODUCTS
    assert all(len(keys) <= VARIANTS * PRODUCTS_OF.get(n, 1) for n, keys in variants.items())


@pytest.mark.random
@pytest.mark.parametrize("name", ["plain", "shared", "mesh", "autocast"])
def test_after_a_warm_up_no_number_of_tokens_compiles_a_kernel(name, monkeypatch):
    for module in ("pick", "permute", "choice"):
        monkeypatch.setattr(f"moesaic.kernels.{module}.kind_of", lambda _: "triton")
    monkeypatch.setattr("moesaic.compile_ahead.kind_of", lambda _: "triton")
    # no kernel writes the rows of copies
    monkeypatch.setattr("moesaic.kernels.triton.rows.sort.torch.empty_like", torch.zeros_like)
    sizes = (DIM, HIDDEN, EXPERTS, TOP_K)
    layer = MoE(*sizes, shared_hidden=64 * (name == "shared"), bias=name == "shared")
    layer = layer if name == "autocast" else layer.bfloat16()
    if name == "mesh":
        run_ranks(1, lambda rank: layer.parallelize(Mesh(Grid(world=1), rank)))
    low = torch.autocast("cpu", torch.bfloat16, enabled=name == "autocast", cache_enabled=False)
    with counting_for(90) as variants, low:
        warm_up(layer, 1000)
        assert {*variants} >= PRODUCTS | {"_choose_kernel", "_choose_backward_kernel"}
        before = {kernel: set(keys) for kernel, keys in variants.items()}
        for tokens in (1, 7, 8, 33, 100, 128, 500, 999, 1000):
            if name == "mesh":
                run_on_a_rank(EXPERTS, tokens)
            else:
                dtype = torch.float32 if name == "autocast" else torch.bfloat16
                layer(zeros(tokens, DIM, dtype=dtype)).sum().backward()
        assert {
            kernel: len(keys - before.get(kernel, set())) for kernel, keys in variants.items()
        } == (dict.fromkeys(variants, 0))


def test_a_warm_up_is_refused_or_does_nothing_where_it_has_no_meaning():
    layer = MoE(8, 8, 4)
    assert "max_tokens=0: give the most tokens" in refused(lambda: warm_up(layer, 0))
    warm_up(layer, 8)
