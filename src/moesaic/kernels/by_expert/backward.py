"""Backward, one block of rows at a time: the rows are gathered again, the activation computed again."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moesaic.kernels.activation import hidden_gradient_into, hidden_rows_into
from moesaic.kernels.by_expert.blocks import Block, Blocks, Source
from moesaic.kernels.by_expert.results import Results, split
from moesaic.kernels.dots import dot_rows
from moesaic.kernels.memory import empty
from moesaic.kernels.work import ExpertWork, Gradients, Wanted, counts


@torch.no_grad()
def backward(work: ExpertWork, pre: Sequence[Tensor], dy: Tensor, wanted: Wanted) -> Gradients:
    """Run the transpose; see `ExpertKernel.backward`."""
    run = _Backward(work, pre, dy, wanted)
    for block in run.blocks.all:
        run.work_on(block)
    return run.found()


class _Backward:
    """One backward pass: inputs cut into blocks, scratch memory, room for the gradients."""

    def __init__(self, work: ExpertWork, pre: Sequence[Tensor], dy: Tensor, wanted: Wanted) -> None:
        x = work.x
        self.work, self.wanted = work, wanted
        self.blocks = blocks = Blocks(work, 1 + len(pre), 2)
        self.pre, self.x, self.dy = list(map(blocks.cut, pre)), Source(x, work, blocks), Source(dy, work, blocks)
        before = work.before
        self.before = None if before is None else blocks.cut(before)
        self.after = None if work.after is None else blocks.cut(work.after)
        self.ups, self.down = [matrices.unbind() for matrices in work.ups], work.down.unbind()
        self.wide = [x.new_empty(blocks.most_rows, work.hidden) for _ in range(1 + len(pre))]
        self.taken, self.weighted = (x.new_empty(blocks.most_rows, x.shape[1]) for _ in range(2))
        wants_gates = wanted.gates and work.gates is not None
        self.d_gates = x.new_empty(work.num_rows) if wants_gates else None
        self.d_gates_of = None if self.d_gates is None else blocks.cut(self.d_gates)
        reaches_rows = wanted.x or (wants_gates and work.gates_first)
        self.d_rows = Results(work, blocks, before) if reaches_rows else None
        self.d_ups = list(map(_like, work.ups)) if wanted.weights else []
        self.d_up_biases = list(map(_like, work.up_biases)) if wanted.weights else []
        self.d_down = _like(work.down) if wanted.weights else None
        self.d_down_bias = _like(work.down_bias) if wanted.weights and work.down_bias is not None else None
        self._clear_idle()

    def work_on(self, block: Block) -> None:
        """Work on one block."""
        parts = [part[block.index] for part in self.pre]
        hidden, grad, *gate = (part[: block.rows] for part in self.wide)
        hidden_rows_into(parts, self.work.activation, hidden, *gate)
        self._through_down(block, hidden, grad)
        hidden_gradient_into(parts, self.work.activation, grad, *gate)
        self._through_ups(block, [grad, *gate])

    def found(self) -> Gradients:
        """Return the gradients, once all blocks are done."""
        work = self.work
        return Gradients(
            x=self.d_rows.summed(work.x.dtype) if self.d_rows is not None and self.wanted.x else None,
            gates=None if self.d_gates is None or work.gates is None else self.d_gates.to(work.gates.dtype),
            ups=self.d_ups,
            up_biases=self.d_up_biases,
            down=self.d_down,
            down_bias=self.d_down_bias,
        )

    def _through_down(self, block: Block, hidden: Tensor, grad: Tensor) -> None:
        """Find the gradients of the matrix that writes and of weights after it; `grad` becomes that of `hidden`."""
        work = self.work
        dy = self.dy.take(block, self.taken)
        for segment, rows, out in zip(block.segments, split(dy, block), split(grad, block)):
            torch.mm(rows, self.down[segment.expert], out=out)
        if self.after is not None:
            weight = self.after[block.index]
            if self.d_gates_of is not None:
                d_gates = dot_rows(grad, hidden)
                if work.down_bias is not None:
                    for segment, rows, out in zip(block.segments, split(dy, block), split(d_gates, block)):
                        out += torch.mv(rows, work.down_bias[segment.expert])
                self.d_gates_of[block.index].copy_(d_gates)
            grad.mul_(weight)
            dy = torch.mul(dy, weight, out=self.weighted[: block.rows])
        if self.d_down is not None:
            _products(dy, hidden, self.d_down, block)
        if self.d_down_bias is not None:
            _column_sums(dy, self.d_down_bias, block)

    def _through_ups(self, block: Block, grads: list[Tensor]) -> None:
        """Find the gradients of the matrices that read, of the rows and of weights before them."""
        read = self.x.take(block, self.taken)
        if self.d_rows is not None:
            d_rows = self.d_rows.of(block)
            for index, (grad, matrices) in enumerate(zip(grads, self.ups)):
                for segment, rows, out in zip(block.segments, split(grad, block), split(d_rows, block)):
                    if index:
                        out.addmm_(rows, matrices[segment.expert])
                    else:
                        torch.mm(rows, matrices[segment.expert], out=out)
            if self.before is not None and self.d_gates_of is not None:
                self.d_gates_of[block.index].copy_(dot_rows(d_rows, read))
            self.d_rows.finish(block)
        if self.before is not None:
            read = torch.mul(read, self.before[block.index], out=self.weighted[: block.rows])
        for grad, gradients in zip(grads, self.d_ups):
            _products(grad, read, gradients, block)
        for grad, gradients in zip(grads, self.d_up_biases):
            _column_sums(grad, gradients, block)

    def _clear_idle(self) -> None:
        """Set the gradients of experts without rows to zero."""
        gradients = [*self.d_ups, *self.d_up_biases, self.d_down, self.d_down_bias]
        for expert, rows in enumerate(counts(self.work.ends)):
            for gradient in () if rows else gradients:
                if gradient is not None:
                    gradient[expert].zero_()


def _like(weights: Tensor) -> Tensor:
    return empty(weights.shape, weights.dtype, weights.device)


def _products(a: Tensor, b: Tensor, out: Tensor, block: Block) -> None:
    """Write each expert's `a.T @ b`, or add it to what earlier blocks of the expert wrote."""
    for segment, a_rows, b_rows in zip(block.segments, split(a, block), split(b, block)):
        if segment.is_first:
            torch.mm(a_rows.t(), b_rows, out=out[segment.expert])
        else:
            out[segment.expert].addmm_(a_rows.t(), b_rows)


def _column_sums(rows: Tensor, out: Tensor, block: Block) -> None:
    for segment, part in zip(block.segments, split(rows, block)):
        if segment.is_first:
            torch.sum(part, 0, out=out[segment.expert])
        else:
            out[segment.expert] += part.sum(0)
