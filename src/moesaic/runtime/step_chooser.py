"""What chooses the plan of layers between the optimizer steps of a run: it hears of calls and steps, on all ranks alike.

A step ends where an optimizer has stepped and a layer is called again with gradients. All ranks step together.
"""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from moesaic.comm.mesh import Mesh
from moesaic.experts.experts import AbstractExperts
from moesaic.runtime.expert_parallel import AbstractPlanChooser, ExpertParallel
from moesaic.runtime.routing_cache import is_recomputing

Self = TypeVar("Self", bound="AbstractStepChooser")


class AbstractStepChooser(AbstractPlanChooser):
    """Chooses the plan of all layers on a mesh that asked for it, between steps. Get it with `of`.

    Args:
        mesh: of the layers.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._grid, self._transport = mesh.grid, mesh.transport
        self._everyone = tuple(range(mesh.grid.world))
        self._layers: list[tuple[weakref.ref[ExpertParallel], weakref.ref[AbstractExperts], dict[str, int]]] = []
        self._parameters: list[Callable[[], Iterable[Tensor]]] = []
        self._ours: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()
        self._call = (0, 1, 4)
        self._steps, self._stepped = 0, False
        me = weakref.ref(self)
        handle = register_optimizer_step_post_hook(lambda optimizer, *_: _note_step(me(), optimizer))
        weakref.finalize(self, handle.remove)

    @classmethod
    def of(cls: type[Self], mesh: Mesh) -> Self:
        """Return the one of a mesh."""
        found: Self = mesh.shared.setdefault(cls, None) or cls(mesh)
        mesh.shared[cls] = found
        return found

    def join(
        self, on_mesh: ExpertParallel, experts: AbstractExperts, hidden: int, parameters: Callable[[], Iterable[Tensor]]
    ) -> None:
        """Take a layer in. What was found before is forgotten: it was found for other layers.

        Args:
            on_mesh: how the layer runs; it calls `begin` before each of its calls.
            experts: its experts.
            hidden: inner width of one of them, whole.
            parameters: those of the layer, when asked: wrappers put others in their place.
        """
        if self._grid.world == 1:
            return
        sizes = {"dim": experts.dim, "hidden": hidden, "num_experts": experts.num_experts}
        self._layers.append((weakref.ref(on_mesh), weakref.ref(experts), sizes))
        self._parameters.append(parameters)
        self._steps = 0
        self._ours.clear()
        self._forget()
        on_mesh.auto = self

    @abstractmethod
    def _forget(self) -> None:
        """Forget what was found."""

    @abstractmethod
    def _end_step(self) -> None:
        """A step has ended, the next one begins; `_steps` counts it already."""

    def begin(self, tokens: int, top_k: int, dtype: torch.dtype) -> None:
        if not torch.is_grad_enabled() or is_recomputing():
            return
        self._call = (tokens, top_k, dtype.itemsize)
        if self._stepped:
            self._stepped = False
            self._steps += 1
            self._end_step()

    def note_step(self, optimizer: Optimizer) -> None:
        """Hear of an optimizer's step; those of optimizers that hold none of the layers' trained parameters do not count.

        Args:
            optimizer: any of this process.
        """
        if optimizer not in self._ours:
            trained = {id(each) for found in self._parameters for each in found() if each.requires_grad}
            held = {id(each) for group in optimizer.param_groups for each in group["params"]}
            self._ours[optimizer] = not trained or bool(trained & held)
        self._stepped = self._stepped or self._ours[optimizer]

    def _members(self) -> Iterator[tuple[ExpertParallel, AbstractExperts, dict[str, int]]]:
        """Yield the layers that are still there, and still want to be chosen for."""
        for of_layer, of_experts, sizes in self._layers:
            on_mesh, experts = of_layer(), of_experts()
            if on_mesh is not None and experts is not None and on_mesh.auto is self:
                yield on_mesh, experts, sizes


def _note_step(chooser: AbstractStepChooser | None, optimizer: Optimizer) -> None:
    if chooser is not None:
        chooser.note_step(optimizer)
