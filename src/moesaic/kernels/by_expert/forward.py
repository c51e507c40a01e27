"""Forward, one block of rows at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from moesaic.kernels.activation import hidden_rows_into
from moesaic.kernels.by_expert.blocks import Blocks, Results, Scratch, Source
from moesaic.kernels.memory import empty
from moesaic.kernels.work import ExpertWork


@torch.no_grad()
def forward(work: ExpertWork, out_dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """Run the experts; see `ExpertKernel.forward`."""
    x, before, after = work.x, work.before, work.after
    blocks = Blocks(work, 1, 1)
    pre = [empty((work.num_rows, work.hidden), x.dtype, x.device) for _ in work.ups]
    results = Results(work, blocks, after)
    source, weights = Source(x, work, blocks), None if before is None else blocks.cut(before)
    pre_of, pre_at = list(map(blocks.cut, pre)), list(map(blocks.segments, pre))
    ups, down = [matrices.transpose(1, 2).unbind() for matrices in work.ups], work.down.transpose(1, 2).unbind()
    taken, wide = Scratch(blocks, x.shape[1], x), Scratch(blocks, work.hidden, x)
    for block in blocks.all:
        read = source.take(block, taken, None if weights is None else weights[block.index])
        hidden = wide.of(block)
        for up, (matrices, part) in enumerate(zip(ups, pre_at)):
            for segment, rows in zip(block.segments, read.segments):
                torch.mm(rows, matrices[segment.expert], out=part[segment.index])
                if work.up_biases:
                    part[segment.index].add_(work.up_biases[up][segment.expert])
        hidden_rows_into([part[block.index] for part in pre_of], work.activation, hidden.rows, clamp=work.clamp)
        for segment, rows, out in zip(block.segments, hidden.segments, results.of(block).segments):
            torch.mm(rows, down[segment.expert], out=out)
            if work.down_bias is not None:
                out.add_(work.down_bias[segment.expert])
        results.finish(block)
    return results.summed(out_dtype), pre
