"""Parameters whose places others took, and the optimizers that still hold them.

Spreading experts makes DTensors of their parameters, and FSDP2 makes new parameters. An optimizer
that was made before would go on with the old ones, which have no gradients: nothing would train,
and the loss of a model would fall all the same. The old object cannot become the new one: a DTensor
has slots that a parameter lacks, so `torch.utils.swap_tensors` refuses, and FSDP2 keeps its own.
Such an optimizer is therefore refused, in the next forward pass for training at the latest, unless
another optimizer holds the new parameters. An optimizer is any object with a method `step` that
holds parameters in lists and dicts of its own, of torch or not. What is not found so, such as a
function that steps parameters, or objects that `gc.freeze` hides, is refused in its first step: it
reads the gradient of a replaced parameter, which raises the error. Hooks of a parameter move to the
one that took its place.

A succession is one such replacement. It is stale if an optimizer holds the old parameter and none
holds the new one.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from types import FunctionType, ModuleType
from typing import Any

from torch import nn

from moesaic.errors import InputError
from moesaic.initial_values import is_dtensor


@dataclass(frozen=True)
class OwnedParameter:
    """A parameter and its place."""

    owner: nn.Module
    """The module that it is in."""
    name: str
    """Its name there."""
    number: int
    """Its `id`."""
    parameter: Callable[[], nn.Parameter | None]
    """A weak reference to it."""

    @classmethod
    def of(cls, owner: nn.Module, name: str, parameter: nn.Parameter) -> OwnedParameter:
        """Return the record of a parameter."""
        return cls(owner, name, id(parameter), weakref.ref(parameter))


@dataclass(frozen=True)
class Succession:
    """A parameter that another one replaced in its module."""

    name: str
    """The parameter's name in its module."""
    old: Callable[[], nn.Parameter | None]
    """Returns the replaced parameter; None if nobody holds it any more."""
    new: int
    """`id` of the parameter that took its place. A weak reference would keep torch from moving
    it."""
    owner: Callable[[], nn.Module | None]
    """Returns the module that it is in."""

    @property
    def trains(self) -> bool:
        """Whether the parameter that is in its place now is trained; it may have been frozen, or
        unfrozen, since."""
        parameter = getattr(self.owner(), self.name, None)
        return parameter is not None and parameter.requires_grad


class ReplacedParameters:
    """The replaced parameters of one layer that somebody still holds. A copy of the layer has
    none."""

    def __init__(self) -> None:
        self._successions: list[Succession] = []
        """What was noted, in order, until nobody holds the old parameter."""
        self._references: list[tuple[int, bool]] = []
        """At the last look, for each succession: how many references the old parameter had, and
        whether the new one trained."""

    def note(self, old: OwnedParameter, new: nn.Parameter) -> None:
        """Note that `new` took the place of `old`, and of the parameters whose place `old` had
        taken before. `new` gets the hooks of `old`."""
        _move_hooks(old.parameter(), new)
        for index, succession in enumerate(self._successions):
            if succession.new == old.number:
                self._successions[index] = replace(succession, new=id(new))
        owner = weakref.ref(old.owner)
        succession = Succession(old.name, old=old.parameter, new=id(new), owner=owner)
        self._successions.append(succession)
        _refuse_reads(succession)

    def check(self) -> None:
        """Look for optimizers that hold replaced parameters, if any were made or ended since the
        last look, or if parameters were unfrozen.

        Raises:
            InputError: if one does, and none holds what took their places.
        """
        if not self._successions:
            return
        self._successions = [each for each in self._successions if each.old() is not None]
        # an optimizer that is made or ends changes how many hold its parameters
        references = [(sys.getrefcount(each.old()), each.trains) for each in self._successions]
        if not references or references == self._references:
            return
        if self._stale(_optimizers()):
            # an optimizer that nobody uses any more may be waiting for the collection
            gc.collect()
            self.refuse(_optimizers())
        self._references = references

    def refuse(self, optimizers: Iterable[object]) -> None:
        """Raise InputError if one of these optimizers holds a replaced parameter, and none what
        took its place."""
        optimizers = list(optimizers)
        stale = self._stale(optimizers)
        if not stale:
            return
        stale_ids = {id(succession.old()) for succession in stale}
        holders = [optimizer for optimizer in optimizers if stale_ids & _ids(optimizer)]
        raise InputError(
            f"{type(holders[0]).__name__} was made before the model was spread over ranks: it "
            f"holds {len(stale)} parameters that are no longer in the model, such as "
            f"{stale[0].name}, and would not train them: make the optimizer after parallelize"
        )

    def _stale(self, optimizers: Iterable[object]) -> list[Succession]:
        """Return the successions whose old parameter is held by one of the optimizers, and whose
        new one by none."""
        held_ids = set[int]()
        for optimizer in optimizers:
            held_ids |= _ids(optimizer)

        stale = []
        for succession in self._successions:
            holds_old = id(succession.old()) in held_ids
            holds_new = succession.new in held_ids
            if succession.trains and holds_old and not holds_new:
                stale.append(succession)
        return stale

    def __deepcopy__(self, memo: dict[int, object]) -> ReplacedParameters:
        return ReplacedParameters()

    def __reduce__(self) -> tuple[type[ReplacedParameters], tuple[()]]:
        return ReplacedParameters, ()


DEPTH = 6
"""An optimizer holds a parameter through at most so many containers: its attributes, groups, a
group, the group's list."""
_CONTAINERS = (list, tuple, dict, set, frozenset)
_NO_OPTIMIZERS = (nn.Module, type, ModuleType, FunctionType)


def _optimizers() -> list[object]:
    """Return all objects of this process that have a method `step` and are no modules."""
    is_optimizer: dict[type, bool] = {}
    found = []
    for each in gc.get_objects():
        kind = type(each)
        if kind not in is_optimizer:
            # read from the classes' dicts: `hasattr` could run code of strange classes
            has_step = any(callable(vars(base).get("step")) for base in kind.__mro__)
            is_optimizer[kind] = has_step and not issubclass(kind, _NO_OPTIMIZERS)
        if is_optimizer[kind]:
            found.append(each)
    return found


def _ids(optimizer: object) -> set[int]:
    """Return the `id`s of what an optimizer holds, itself or in its containers: parameters too."""
    found: set[int] = set()
    containers = [optimizer]
    for _ in range(DEPTH):
        referents = [each for each in gc.get_referents(*containers) if id(each) not in found]
        found.update(id(each) for each in referents)
        containers = [each for each in referents if issubclass(type(each), _CONTAINERS)]
    return found


def _move_hooks(old: nn.Parameter | None, new: nn.Parameter) -> None:
    """Register the hooks of a parameter with the one that takes its place."""
    if old is None or not new.requires_grad:
        return
    for hook in (old._backward_hooks or {}).values():
        new.register_hook(hook)
    for hook in (old._post_accumulate_grad_hooks or {}).values():
        new.register_post_accumulate_grad_hook(hook)


def _refuse_reads(succession: Succession) -> None:
    """Make a replaced parameter raise InputError where its gradient is read, as optimizers do,
    unless one holds what is in its place."""
    old = succession.old()
    if old is None:
        return
    kind: Any = type(old)
    is_covered = False

    def read(parameter: nn.Parameter) -> Any:
        nonlocal is_covered
        if not is_covered and succession.trains:
            new = id(getattr(succession.owner(), succession.name))
            is_covered = any(new in _ids(optimizer) for optimizer in _optimizers())
            if not is_covered:
                raise InputError(
                    f"the gradient of {succession.name} is read by what was made before the model "
                    "was spread over ranks: it holds a parameter that is no longer in the model, "
                    "and would not train it: make the optimizer after parallelize"
                )
        return kind.grad.__get__(parameter)

    def write(parameter: nn.Parameter, value: Any) -> None:
        kind.grad.__set__(parameter, value)

    # an object's own property is one of its class
    old.__class__ = type(kind.__name__, (kind,), {"grad": property(read, write)})


def owned_parameters(module: nn.Module) -> list[OwnedParameter]:
    """Return all parameters of a tree of modules, except those of classes that torch may have to
    swap."""
    return [
        OwnedParameter.of(owner, name, parameter)
        for owner in module.modules()
        for name, parameter in owner.named_parameters(recurse=False)
        if type(parameter) is nn.Parameter or is_dtensor(parameter)
    ]
