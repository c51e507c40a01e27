"""Tensor parallelism of an image classifier's dense parts: attention by heads, feed-forward layers by their inner width.

Megatron-LM's scheme (Shoeybi et al. 2019, section 3), as language models have it: column-wise, then row-wise, one sum per pair.
Patches, merging, norms and the head are on every rank.
"""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from moesaic.errors import InputError
from moesaic.train.parallel import SplitParameters
from moesaic_lab.vision.attention import WindowAttention
from moesaic_lab.vision.swin import FeedForward, SwinMoE


def split_dense(model: SwinMoE, tp: DeviceMesh) -> None:
    """Split the dense parts of a model in place; all ranks call it with the same weights.

    Args:
        model: its MoE layers are on a mesh with this tensor parallelism already.
        tp: of one dimension.

    Raises:
        InputError: for heads or inner widths that do not divide.
    """
    config, styles = model.config, dict[str, ParallelStyle]()
    for stage, heads in enumerate(config.heads):
        for what, size in ((f"heads[{stage}]", heads), (f"the inner width of stage {stage}", config.hidden(stage))):
            if size % tp.size():
                raise InputError(f"tp={tp.size()} does not divide {what}={size} of the model: choose a divisor")
    for name, module in model.named_modules():
        if isinstance(module, WindowAttention):
            module.tp = tp
            styles[f"{name}.qkv"] = SplitParameters({"weight": 1}, takes=Replicate(), gives=None)
            styles[f"{name}.out"] = SplitParameters({"weight": 1}, takes=None, gives=Replicate())
        elif isinstance(module, FeedForward):
            styles[f"{name}.0"], styles[f"{name}.2"] = ColwiseParallel(), RowwiseParallel()
    parallelize_module(model, tp, styles, src_data_rank=None)
