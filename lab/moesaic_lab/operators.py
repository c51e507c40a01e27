"""`moesaic bench operators`: what a call of the layer costs the host and keeps, besides its
experts' products.

Operators of one call with defaults (64 tokens, width 64, 16 experts, top-2, load-balance loss),
counted by a dispatch mode: every operator that reaches torch's dispatcher, views and allocations
too, those inside Moesaic's own operators included, a Triton launch as one; the expert stage is not
counted. gpu: CPU tensors on the GPU's path, kernels under Triton's interpreter, in the forms of
`FORMS`. cpu: float32. mesh: the rank with most of 4, CPU, float32. host_over_hand: seconds of a
step, forward and backward, over those of a hand-written layer of plain torch operators on the same
tiny tensors, in turn, both by grouped_mm. kept_over_need: bytes that autograd keeps for backward,
over x, the pre-activations, one (T, E) float32 matrix and 48 bytes per copy; bfloat16.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from moesaic.comm.mesh import Mesh
from moesaic.experts.experts import compute_dtype
from moesaic.kernels import router_product
from moesaic.layer import MoE
from moesaic.routing.routers import ROUTERS
from moesaic.testing.runner import on_ranks
from moesaic_lab.benchmark import Benchmark, BenchmarkOptions, Shown, Told, notes_of
from moesaic_lab.claims import Claim, claimed, figures
from moesaic_lab.local_copies import unseen
from moesaic_lab.measure import in_turn, over_ranks, paired, without_collections

TOKENS = 64
DIM = 64
HIDDEN = 32
EXPERTS = 16
WORLD = 4
MOST = {"forward": 40, "backward": 25}
"""The most operators of a pass."""
FORMS: dict[str, tuple[torch.dtype, torch.dtype, dict[str, Any]]] = {
    "gpu": (torch.float32, torch.float32, {}),
    "gpu.bfloat16": (torch.bfloat16, torch.bfloat16, {}),
    "gpu.autocast": (torch.float32, torch.float32, {}),
    "gpu.autocast.bfloat16": (torch.float32, torch.bfloat16, {}),
    "gpu.shared": (
        torch.bfloat16,
        torch.bfloat16,
        {"shared_hidden": 32, "shared_gate": True, "bias": True},
    ),
    "gpu.capacity": (torch.bfloat16, torch.bfloat16, {"capacity": 1.25}),
    "gpu.noisy": (torch.bfloat16, torch.bfloat16, {"router": "noisy"}),
}
"""The forms of a call on a GPU: dtypes of the parameters and of the tokens, and the layer's
options. Those whose name has "autocast" run under autocast in bfloat16."""
CLAIMED = ("gpu", "gpu.bfloat16", "gpu.autocast", "gpu.autocast.bfloat16")
"""The forms that `MOST` holds for."""
MOST_ON_MESH = {"forward": 60, "backward": 40}
EXPERT_STAGE = ("expert_forward", "expert_backward")
PICKERS = ("permute", "choice", "top_k", "router_product")
"""The modules in `moesaic.kernels` that ask which kernels a device runs."""
BY_TRITON = "triton"
"""The argument of this module as a program: count the GPU's path, and print a row as JSON."""


class OperatorCounter(TorchDispatchMode):
    """Lists the operators of this thread, besides the expert stage, in `names`."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note an operator and run it; of one of Moesaic note those in the function behind it,
        which eager calls run."""
        kwargs = kwargs or {}
        if func.namespace != "moesaic":
            self.names.append(str(func))
            return func(*args, **kwargs)
        if func._opname in EXPERT_STAGE:
            return func(*args, **kwargs)
        with self:
            return func.function(*args, **kwargs)


def counted(
    layer: Callable[[Tensor], Tensor],
    parameters: Sequence[Tensor],
    dtype: torch.dtype = torch.float32,
) -> dict[str, list[str]]:
    """Return the operators of the second forward and backward pass of a layer on tokens of a
    dtype; the first pass makes what later ones reuse."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4, TOKENS // 4, DIM, generator=generator).to(dtype)
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = None
        leaf = x.clone().requires_grad_()
        with OperatorCounter() as forward:
            y = layer(leaf)
        dy = torch.ones_like(y)
        with OperatorCounter() as backward:
            y.backward(dy)
    return {"forward": forward.names, "backward": backward.names}


def make_layer(**options: Any) -> MoE:
    """Return a layer with defaults."""
    torch.manual_seed(0)
    return MoE(DIM, HIDDEN, EXPERTS, **options)


def count_on_mesh(mesh: Mesh | None = None) -> dict[str, list[str]]:
    """Return the operators of this rank's layer on a mesh, of all processes by default, without the
    experts'."""
    layer = make_layer()
    layer.parallelize(mesh or Mesh.create(ep=WORLD))
    experts: Any = layer.experts
    gradients = experts.gradients

    def seen_as_the_stage(
        call: Any, kept: Any, dy: Tensor, deferred: list[Callable[[], None]] | None = None
    ) -> Any:
        """Compute the gradients uncounted, and so what they leave for later in `deferred`."""
        results = unseen(gradients)(call, kept, dy, deferred)
        if deferred is not None:
            deferred[:] = map(unseen, deferred)
        return results

    experts.run = unseen(experts.run)
    experts.gradients = seen_as_the_stage
    return counted(layer, list(layer.parameters()))


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Run the GPU's path on CPU tensors, with the kernels under Triton's interpreter; a launch is
    noted as one operator."""
    from triton.runtime import interpreter

    from moesaic_lab.device.interpreter import mend_the_interpreter

    mend_the_interpreter()
    launch = interpreter.GridExecutor.__call__

    def noted(self: Any, *args: Any, **kwargs: Any) -> None:
        mode = torch.utils._python_dispatch._get_current_dispatch_mode()
        if isinstance(mode, OperatorCounter):
            mode.names.append(f"triton.{self.fn.__name__}")
        with _disable_current_modes():
            launch(self, *args, **kwargs)

    # The tensors are on the CPU: what asks for their device is told that Triton's kernels run.
    patches: list[Any] = [mock.patch.object(interpreter.GridExecutor, "__call__", noted)]
    for name in PICKERS:
        module = importlib.import_module(f"moesaic.kernels.{name}")
        if hasattr(module, "kind_of"):
            patches.append(mock.patch.object(module, "kind_of", return_value="triton"))
    patches.append(mock.patch.object(router_product, "_takes_pieces", return_value=True))
    patches.append(mock.patch.object(router_product, "product", _product))
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Multiply 16-bit matrices into float32, which a GPU does in one operator."""
    mode = torch.utils._python_dispatch._get_current_dispatch_mode()
    if isinstance(mode, OperatorCounter):
        mode.names.append("aten.mm.dtype")
    with _disable_current_modes():
        return a.float() @ b.float()


def count_form(name: str) -> dict[str, list[str]]:
    """Return the operators of a form of `FORMS`; call it `as_on_a_gpu`."""
    parameters_in, tokens_in, options = FORMS[name]
    layer = make_layer(**options).to(parameters_in)
    layer.experts.begin_step()
    with torch.autocast("cpu", torch.bfloat16, enabled="autocast" in name):
        return counted(layer, list(layer.parameters()), tokens_in)


def _row(path: str, names: dict[str, list[str]]) -> list[dict[str, Any]]:
    """Return a row for each pass of a path, with the names of its operators."""
    return [
        {"path": path, "pass": each, "operators": len(ops), "names": " ".join(ops)}
        for each, ops in names.items()
    ]


def _count_by_triton() -> list[dict[str, Any]]:
    """Return the rows of the GPU's path, counted in a process of its own: Triton chooses its
    interpreter when imported."""
    if find_spec("triton") is None:
        return []
    command = [sys.executable, "-m", __name__, BY_TRITON]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    rows: list[dict[str, Any]] = json.loads(process.stdout)
    return rows


class HandWritten(nn.Module):
    """A softmax top-k layer of SwiGLU experts with a load-balance loss, in about forty operators of
    plain torch.

    Args:
        layer: the layer whose weights it copies.
    """

    def __init__(self, layer: MoE) -> None:
        super().__init__()
        weight, w13, w2 = (
            each.detach().clone()  # type: ignore[operator]
            for each in (layer.router.weight, layer.experts.w13, layer.experts.w2)
        )
        self.router = nn.Parameter(weight)
        self.w13 = nn.Parameter(w13.flatten(1, 2))
        self.w2 = nn.Parameter(w2)
        self.top_k = layer.top_k
        self.coefficient = layer.losses[0].coefficient

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return y and the loss, times its coefficient, for x of (..., dim)."""
        # Route.
        tokens = x.view(-1, x.shape[-1])
        logits = F.linear(tokens, self.router)
        probs = logits.softmax(1)
        top, expert = logits.topk(self.top_k, dim=1)
        weight = top.softmax(1).view(-1)
        expert = expert.view(-1)
        counts = torch.zeros(len(self.router), dtype=expert.dtype).scatter_add_(
            0, expert, torch.ones_like(expert)
        )

        # Switch Transformer's loss: experts times the sum over experts of the share of copies times
        # the mean probability.
        share = counts / (counts.sum() * len(tokens))
        loss = self.coefficient * len(self.router) * (probs.sum(0) * share).sum()

        # Dispatch: copies in the order of their experts.
        order = expert.argsort(stable=True)
        token = order // self.top_k
        rows = tokens.index_select(0, token)

        ends = counts.cumsum(0).to(torch.int32)
        gate_up = F.grouped_mm(rows, self.w13.transpose(1, 2), offs=ends)
        gate, up = gate_up.chunk(2, 1)
        hidden = F.silu(gate) * up
        out = F.grouped_mm(hidden, self.w2.transpose(1, 2), offs=ends)

        # Combine: the weighted sum of each token's copies.
        out = out * weight.index_select(0, order).unsqueeze(1)
        y = torch.zeros_like(tokens).index_add(0, token, out)
        return y.view(x.shape), loss


def hand_step(layer: HandWritten, x: Tensor) -> Tensor:
    """Run a step of the hand-written layer, with the loss injected as `MoE` does; return the
    result."""
    y, loss = layer(x)
    slopes = [torch.ones_like(y), torch.ones_like(loss)]
    torch.autograd.backward([y, loss], slopes)
    return y


def _host_over_hand(repeats: int) -> dict[str, Any]:
    """Return the row with our seconds of a step over those of the hand-written layer."""
    layer = make_layer(kernel="grouped_mm")
    hand = HandWritten(layer)
    x = torch.randn(4, TOKENS // 4, DIM)

    def run(module: nn.Module, step: Callable[[Tensor], object]) -> Callable[[], object]:
        def once() -> None:
            module.zero_grad()
            step(x.clone().requires_grad_())

        return once

    dy = torch.ones_like(x)
    methods = {
        "ours": run(layer, lambda x: layer(x).backward(dy)),
        "hand": run(hand, lambda x: hand_step(hand, x)),
    }
    with without_collections():
        seconds = over_ranks([in_turn(methods, repeats, barrier=lambda: None, warmup=10)])
    ratio = paired(seconds["ours"], seconds["hand"])
    return {"path": "host", "host_over_hand": ratio.median, "low": ratio.low, "high": ratio.high}


def kept_bytes(layer: MoE, x: Tensor, **options: Any) -> int:
    """Return the bytes that autograd keeps for the backward pass of a call, besides parameters and
    their casts."""
    dtype = compute_dtype(x.dtype, x.device)
    casts = [weight for weights in layer.experts.weights_in(dtype) for weight in weights]
    weights_at = {weight.untyped_storage().data_ptr() for weight in (*layer.parameters(), *casts)}
    # By address: tensors that share a storage count once.
    bytes_at: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights_at:
            bytes_at[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = layer(x, **options)  # while y lives, no address is used again
        total = sum(bytes_at.values())
    del y
    return total


def kept_row(router: str, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """Return the row of a layer with a router: what it keeps, and what backward needs.

    Args:
        dtype: that of tokens and parameters; float32 runs under autocast in bfloat16.
    """
    tokens = 2048
    dim = 256
    hidden = 128
    experts = 32
    torch.manual_seed(0)
    top_k = {"switch": 1, "base": 1}.get(router, 2)
    layer = MoE(dim, hidden, experts, top_k, router=router, dtype=dtype)
    layer.experts.begin_step()
    x = torch.randn(tokens, dim, dtype=dtype).requires_grad_()
    copies = tokens * top_k
    # x and the two pre-activations in 16 bits, a (T, E) matrix in float32, 48 bytes per copy.
    need = 2 * tokens * dim
    need += 2 * 2 * copies * hidden
    need += 4 * tokens * experts
    need += 48 * copies
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
        kept = kept_bytes(layer, x, token_ids=torch.arange(tokens))
    return {
        "path": "kept" if dtype == torch.bfloat16 else "kept under autocast",
        "router": router,
        "kept_bytes": kept,
        "need_bytes": need,
        "kept_over_need": kept / need,
    }


@dataclass(frozen=True, kw_only=True)
class OperatorOptions(BenchmarkOptions):
    """Options of the benchmark."""

    repeats: int = 200
    """Timed steps of our layer and of the hand-written one."""


def measure(options: OperatorOptions, _: None, told: Told) -> list[dict[str, Any]]:
    """Count and time, and return the rows."""
    layer = make_layer()
    rows = _row("cpu", counted(layer, list(layer.parameters())))
    told("the GPU's path")
    rows += _count_by_triton()
    told(f"{WORLD} ranks")
    of_ranks = on_ranks(WORLD, count_on_mesh)
    most_names = {
        direction: max((names[direction] for names in of_ranks), key=len) for direction in MOST
    }
    rows += _row("mesh", most_names)
    told("time on the host")
    rows.append(_host_over_hand(options.repeats))
    dtypes = (torch.bfloat16, torch.float32)
    return rows + [kept_row(router, dtype) for router in ROUTERS for dtype in dtypes]


def claims(rows: list[dict[str, Any]]) -> list[Claim]:
    """Return the claims on operators, the host's time and kept memory."""
    made = []
    for direction, most in MOST.items():
        targets = dict.fromkeys((*CLAIMED, "cpu"), most) | {"mesh": MOST_ON_MESH[direction]}
        for path in (*FORMS, "cpu", "mesh"):
            of_pass = [row for row in rows if row.get("pass") == direction and row["path"] == path]
            value = partial(_first, of_pass, "operators")
            # The path named "gpu" has no suffix.
            suffix = f"_{path}".removeprefix("_gpu").replace(".", "_")
            made.append(claimed(f"layer.operators_{direction}{suffix}", value, targets.get(path)))
    made.append(claimed("layer.host_over_hand", partial(_first, rows, "host_over_hand"), 1.3))
    return [
        *made,
        claimed("layer.kept_over_need", lambda: max(figures(rows, "kept_over_need")), 1.02),
    ]


def _first(rows: Sequence[dict[str, Any]], key: str) -> float:
    return figures(rows, key)[0]


COLUMNS = (
    "path",
    "pass",
    "operators",
    "host_over_hand",
    "low",
    "high",
    "router",
    "kept_bytes",
    "need_bytes",
    "kept_over_need",
)

BENCHMARK = Benchmark(
    name="operators",
    description=(
        "Count what a call of a layer costs the host and keeps, besides its experts' products."
    ),
    options=OperatorOptions,
    notes=notes_of(__doc__),
    measure=measure,
    claims=claims,
    columns=(Shown(title="One call", columns=COLUMNS),),
    packages=("torch", "triton"),
)

if __name__ == "__main__" and sys.argv[1:] == [BY_TRITON]:
    with as_on_a_gpu():
        print(json.dumps([row for form in FORMS for row in _row(form, count_form(form))]))
