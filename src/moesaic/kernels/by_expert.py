"""The expert stage on a CPU: one expert after the other, from gathering its tokens to summing its
results.

An expert's rows are gathered, multiplied, activated, multiplied again and added to their tokens
while they are in the processor's cache. The only buffer of all rows is that of the pre-activations,
which are saved for backward; small calls also keep all results until they are summed
(`blocks.Results`). Otherwise a call needs scratch memory for one block of rows. Weight gradients
are written in place. Backward gathers the rows and computes the activations again. The stage is
deterministic: an expert has each token at most once, and the experts' results are summed in a fixed
order.

The wgrad products of the last block may be deferred until the rows' gradient has been sent: their
operands are in scratch memory that no later block overwrites.

`pre` are the pre-activations, and `behind` counts the rows that follow in memory, which a product
may overwrite (`products.rows_product`). The rest of the words are those of `blocks.py` and
`ExpertWork`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from moesaic.kernels.activation import hidden_gradient_into, hidden_rows_into
from moesaic.kernels.blocks import BlockRows, Blocks, Results, RowBlock, Scratch, Segment, Source
from moesaic.kernels.huge_pages import empty
from moesaic.kernels.permute import dot_rows
from moesaic.kernels.products import rows_product, sum_product
from moesaic.kernels.work import ExpertWork, Gradients, Wanted


@torch.no_grad()
def forward(work: ExpertWork, out_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Run the experts; see `ExpertKernel.forward`."""
    x = work.x
    num_ups = work.up.shape[1]
    # buffers for the hidden rows, and for the gathered inputs
    blocks = Blocks(work, hidden_buffers=1, dim_buffers=1)
    pre = empty((num_ups, work.num_rows, work.hidden), x.dtype, x.device)
    projections = _up_projections(work, pre, blocks)
    down = work.down.transpose(1, 2).unbind()
    source = Source(x, work.x_rows, blocks)
    weights = None if work.input_weights is None else blocks.cut(work.input_weights)
    results = Results(work, blocks, weights=work.result_weights, places=work.out_rows)
    input_scratch = Scratch(blocks, x.shape[1], x)
    hidden_scratch = Scratch(blocks, work.hidden, x)

    for block in blocks.all:
        weight = None if weights is None else weights[block.index]
        inputs = source.take(block, input_scratch, weight)
        for segment, rows, behind in zip(block.segments, inputs.segments, block.behind):
            for projection in projections:
                projection.run(segment, rows, behind)

        hidden = hidden_scratch.of(block)
        pre_of_block = [projection.pre_blocks[block.index] for projection in projections]
        hidden_rows_into(pre_of_block, work.activation, hidden.rows, clamp=work.clamp)

        for product in block.products(hidden, results.of(block)):
            rows_product(product.rows, down[product.expert], product.out, product.behind)
            if work.down_bias is not None:
                product.out.add_(work.down_bias[product.expert])
        results.finish(block)

    # the memory of each projection is contiguous; `backward` undoes this view
    return results.summed(out_dtype), pre.view(work.num_rows, num_ups * work.hidden)


class _UpProjection(NamedTuple):
    """One of an expert's projections to the hidden width: the only one, or the gate and the other
    one."""

    matrices: Sequence[Tensor]
    """(dim, hidden) of each expert."""
    biases: Sequence[Tensor] | None
    """(hidden,) of each expert."""
    pre_blocks: Sequence[Tensor]
    """The pre-activations, by block."""
    pre_segments: Sequence[Tensor]
    """The same memory, by segment."""

    def run(self, segment: Segment, rows: Tensor, behind: int) -> None:
        """Write the pre-activations of the rows of a segment."""
        pre = self.pre_segments[segment.index]
        rows_product(rows, self.matrices[segment.expert], pre, behind)
        if self.biases is not None:
            pre.add_(self.biases[segment.expert])


def _up_projections(work: ExpertWork, pre: Tensor, blocks: Blocks) -> list[_UpProjection]:
    """Return the projections of a call, which write (projections, rows, hidden) pre-activations."""
    projections = []
    for index, own_pre in enumerate(pre.unbind()):
        projection = _UpProjection(
            matrices=work.up[:, index].transpose(1, 2).unbind(),
            biases=None if work.up_bias is None else work.up_bias[:, index].unbind(),
            pre_blocks=blocks.cut(own_pre),
            pre_segments=blocks.segments(own_pre),
        )
        projections.append(projection)
    return projections


SMALLEST_DIVISOR = 1e-10
"""The smallest routing weight that a product may be divided by. In float32's range neither weight
nor product underflows."""


@torch.no_grad()
def backward(work: ExpertWork, pre: Tensor, dy: Tensor, wanted: Wanted) -> Gradients:
    """Compute the gradients; see `ExpertKernel.backward`."""
    run = _Backward(work, pre, dy, wanted)
    for block in run.blocks.all:
        run.run_block(block)
    return run.gradients()


class _Backward:
    """One backward pass: the inputs, cut into blocks, the scratch memory and the gradients."""

    def __init__(self, work: ExpertWork, pre: Tensor, dy: Tensor, wanted: Wanted) -> None:
        x = work.x
        num_ups = work.up.shape[1]
        self.work = work
        self.wanted = wanted
        # (rows, hidden): the hidden rows, and d_pre with one for each up matrix; (rows, dim): what
        # is gathered, and weighted rows or gradients
        self.blocks = blocks = Blocks(work, hidden_buffers=1 + num_ups, dim_buffers=2)
        pre_by_projection = pre.reshape(num_ups, work.num_rows, work.hidden)  # as `forward` wrote
        self.pre = [blocks.cut(part) for part in pre_by_projection.unbind()]
        """The pre-activations of each projection, by block."""
        self.x = Source(x, work.x_rows, blocks)
        self.dy = Source(dy, work.y_rows, blocks)
        self.up = work.up.unbind()  # of each expert, (up matrices, hidden, dim)
        self.down = work.down.unbind()  # of each expert, (dim, hidden)

        # weights and their gradients, (rows,) of each block
        input_weights = work.input_weights
        result_weights = work.result_weights
        self.input_weights = None if input_weights is None else blocks.cut(input_weights)
        self.result_weights = None if result_weights is None else blocks.cut(result_weights)
        wants_gates = wanted.gates and work.gates is not None
        self.d_gates = x.new_empty(work.num_rows) if wants_gates else None  # (R,)
        self.d_gate_blocks = None if self.d_gates is None else blocks.cut(self.d_gates)
        self.weighs_early = False
        """Whether result weights are applied in the gather of dy; see `_down_gradients`."""
        if result_weights is not None:
            self.weighs_early = not wants_gates or _can_divide_by(result_weights)

        self.d_rows: Results | None = None
        """Collects the gradients of the input rows; None if nothing reads them."""
        if wanted.x or (wants_gates and work.gates_first):
            self.d_rows = Results(work, blocks, weights=input_weights, places=work.d_x_rows)
        self.d_up = self._new_gradient(work.up)
        self.d_up_bias = self._new_gradient(work.up_bias)
        self.d_down = self._new_gradient(work.down)
        self.d_down_bias = self._new_gradient(work.down_bias)
        # views of each expert's gradient: (up matrices * hidden, dim) and (dim, hidden)
        self.d_up_by_expert = () if self.d_up is None else self.d_up.flatten(1, 2).unbind()
        self.d_down_by_expert = () if self.d_down is None else self.d_down.unbind()
        self._zero_idle_experts()

        may_wait = wanted.deferred_wgrad and work.dispatch is None
        self.last = blocks.all[-1] if blocks.all and may_wait else None
        """The block whose weight gradients are deferred; None to defer nothing."""
        self.deferred: list[_WeightGradients] = []
        """The products that `Gradients.finish` is to write."""
        # the memory of one block for each
        self.hidden = Scratch(blocks, work.hidden, x)
        self.d_pre = Scratch(blocks, pre.shape[1], x)
        self.weighted = Scratch(blocks, x.shape[1], x)
        self.gathered_dy = Scratch(blocks, x.shape[1], x)
        # dy is no longer read when x is gathered, unless a product with it waits
        self.gathered_x = Scratch(blocks, x.shape[1], x) if may_wait else self.gathered_dy

    def _new_gradient(self, weight: Tensor | None) -> Tensor | None:
        """Return memory for a parameter's gradient; None if there is none or it is not wanted."""
        if weight is None or not self.wanted.weights:
            return None
        return empty(weight.shape, weight.dtype, weight.device)

    def run_block(self, block: RowBlock) -> None:
        """Compute the gradients of one block of rows."""
        pre = [part[block.index] for part in self.pre]
        hidden = self.hidden.of(block)
        d_pre = self.d_pre.of(block)
        d_first = d_pre
        d_second = None
        if len(pre) > 1:
            first_rows, d_second = self.work.halves(d_pre.rows)
            d_first = BlockRows.of(first_rows, block)

        # d_first holds the gradient of `hidden`, and d_second the activated gate, until
        # `hidden_gradient_into` replaces both by the gradients of the pre-activations
        hidden_rows_into(pre, self.work.activation, hidden.rows, d_second, self.work.clamp)
        self._down_gradients(block, hidden, d_first)
        hidden_gradient_into(pre, self.work.activation, d_first.rows, d_second, self.work.clamp)
        self._up_gradients(block, d_pre)

    def gradients(self) -> Gradients:
        """Return the gradients, once all blocks are done."""
        work = self.work
        if not self.deferred:  # free the scratch memory before the tokens' gradients are allocated
            buffers = (self.hidden, self.d_pre, self.gathered_dy, self.gathered_x, self.weighted)
            for scratch in buffers:
                scratch.free()
        d_x = None
        if self.d_rows is not None and self.wanted.x:
            d_x = self.d_rows.summed(work.x.dtype)
        d_gates = None
        if self.d_gates is not None and work.gates is not None:
            d_gates = self.d_gates.to(work.gates.dtype)
        return Gradients(
            x=d_x,
            gates=d_gates,
            up=self.d_up,
            up_bias=self.d_up_bias,
            down=self.d_down,
            down_bias=self.d_down_bias,
            finish=partial(_write_deferred, self.deferred) if self.deferred else None,
        )

    def _write_wgrad(
        self, a: BlockRows, b: BlockRows, out: Sequence[Tensor], block: RowBlock
    ) -> None:
        """Write a block's weight gradients `a.T @ b` now or, for the last block, when
        `Gradients.finish` is called."""
        if block is self.last:
            self.deferred.append(_WeightGradients(a, b, out, block))
        else:
            _accumulate_products(a, b, out, block)

    def _down_gradients(self, block: RowBlock, hidden: BlockRows, grad: BlockRows) -> None:
        """Compute the gradients of the down projection and of routing weights after it; write that
        of `hidden` to `grad`.

        Routing weights are applied in the gather of dy, where they cost nothing. The gradient of a
        weight is then the dot product of two rows, of which one has the weight as a factor, divided
        by the weight. If some weight is too small to divide by, the weights are applied after the
        dot products instead.
        """
        weight = None if self.result_weights is None else self.result_weights[block.index]
        gather_weight = weight if self.weighs_early else None
        dy = self.dy.take(block, self.gathered_dy, gather_weight)
        for product in block.products(dy, grad):
            rows_product(product.rows, self.down[product.expert], product.out, product.behind)

        if weight is not None and self.d_gate_blocks is not None:
            dots = self._dots_with_results(block, dy, hidden, grad)
            d_gates = self.d_gate_blocks[block.index]
            if gather_weight is None:
                d_gates.copy_(dots)
            else:
                torch.div(dots, gather_weight, out=d_gates)

        if weight is not None and gather_weight is None:
            column = weight.unsqueeze(1)
            weighted = self.weighted.of(block)
            grad.rows.mul_(column)
            torch.mul(dy.rows, column, out=weighted.rows)
            dy = weighted

        if self.d_down is not None:
            self._write_wgrad(dy, hidden, self.d_down_by_expert, block)
        if self.d_down_bias is not None:
            _accumulate_sums(dy, self.d_down_bias, block)

    def _dots_with_results(
        self, block: RowBlock, dy: BlockRows, hidden: BlockRows, grad: BlockRows
    ) -> Tensor:
        """Return the dot product of each row of dy with the expert's unweighted result: (rows,).

        The result is `hidden @ down.T + bias`, so its product with dy is that of `hidden` with
        `grad = dy @ down`, which is at hand, plus that of the bias with dy.
        """
        dots = dot_rows(grad.rows, hidden.rows, self.blocks.row_numbers[: block.rows])
        if self.work.down_bias is not None:
            for segment, rows, out in zip(block.segments, dy.segments, dots.split(block.sizes)):
                out += torch.mv(rows, self.work.down_bias[segment.expert])
        return dots

    def _up_gradients(self, block: RowBlock, d_pre: BlockRows) -> None:
        """Compute the gradients of the up projection, of the input rows and of routing weights
        before them."""
        inputs = self.x.take(block, self.gathered_x)
        if self.d_rows is not None:
            d_rows = self.d_rows.of(block)
            for product in block.products(d_pre, d_rows):
                # flatten copies weights that are not contiguous: those from other ranks, or
                # interleaved by a checkpoint.
                matrix = self.up[product.expert].flatten(0, 1)
                rows_product(product.rows, matrix, product.out, product.behind)
            if self.input_weights is not None and self.d_gate_blocks is not None:
                # a weight multiplies the input row: its gradient is the product of both rows
                row_numbers = self.blocks.row_numbers[: block.rows]
                dots = dot_rows(d_rows.rows, inputs.rows, row_numbers)
                self.d_gate_blocks[block.index].copy_(dots)
            self.d_rows.finish(block)

        if self.input_weights is not None:
            column = self.input_weights[block.index].unsqueeze(1)
            weighted = self.weighted.of(block)
            torch.mul(inputs.rows, column, out=weighted.rows)
            inputs = weighted
        if self.d_up is not None:
            self._write_wgrad(d_pre, inputs, self.d_up_by_expert, block)
        if self.d_up_bias is not None:
            _accumulate_sums(d_pre, self.d_up_bias.flatten(1), block)

    def _zero_idle_experts(self) -> None:
        """Set the gradients of experts without rows to zero, since no block writes them."""
        idle = [expert for expert, num_rows in enumerate(self.blocks.counts) if num_rows == 0]
        for gradient in (self.d_up, self.d_up_bias, self.d_down, self.d_down_bias):
            if gradient is None:
                continue
            for expert in idle:
                gradient[expert].zero_()


class _WeightGradients(NamedTuple):
    """The products `a.T @ b` of a block that are still to be written: the gradients of each
    expert's matrix."""

    a: BlockRows
    b: BlockRows
    out: Sequence[Tensor]
    """The gradient of each expert's matrix."""
    block: RowBlock


@torch.no_grad()
def _write_deferred(deferred: list[_WeightGradients]) -> None:
    """Write the deferred weight gradients, and drop the operands of each."""
    while deferred:
        _accumulate_products(*deferred.pop())


def _can_divide_by(weights: Tensor) -> bool:
    """Return whether dividing a product by its weight recovers the other factor: no weight is too
    small for that."""
    # not in a dtype with a smaller range than that, such as float16; and no weights have no minimum
    if torch.finfo(weights.dtype).tiny > SMALLEST_DIVISOR or not weights.numel():
        return False
    return float(weights.abs().min()) >= SMALLEST_DIVISOR


def _accumulate_products(
    a: BlockRows, b: BlockRows, out: Sequence[Tensor], block: RowBlock
) -> None:
    """Write each expert's `a.T @ b`, or add it to the result of the expert's earlier blocks."""
    for segment, a_rows, b_rows in zip(block.segments, a.segments, b.segments):
        sum_product(a_rows, b_rows, out[segment.expert], adds=not segment.is_first)


def _accumulate_sums(rows: BlockRows, out: Tensor, block: RowBlock) -> None:
    """Write the sum of each expert's rows, or add it to that of the expert's earlier blocks."""
    for segment, part in zip(block.segments, rows.segments):
        if segment.is_first:
            torch.sum(part, 0, out=out[segment.expert])
        else:
            out[segment.expert] += part.sum(0)
