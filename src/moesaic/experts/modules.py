"""User-defined experts: any `nn.Module` that maps (rows, dim) to (rows, dim)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call

from moesaic.errors import InputError
from moesaic.experts.experts import AbstractExperts, ExpertCall, Weights, reset_all
from moesaic.initial_values import Draw, draw_globally, key_of


class ModuleExperts(AbstractExperts):
    """One module per expert, run one after another.

    An expert without tokens still runs, on zero rows. Then its parameters get zero gradients
    instead of none, and wrappers that wait for every gradient do not hang. Row counts are needed on
    the host, which costs one sync per call.

    Args:
        factory: called once per expert; returns a module that maps (rows, dim) to (rows, dim), for
            zero rows too. All modules must have parameters of the same names and shapes.
        dim: width of a token.

    Raises:
        InputError: if modules have different parameters.
    """

    def __init__(self, factory: Callable[[], nn.Module], dim: int, num_experts: int) -> None:
        super().__init__(dim, num_experts)
        self.experts: nn.ModuleList | nn.ModuleDict = nn.ModuleList(
            factory() for _ in range(num_experts)
        )
        shapes = [_shapes(module) for module in self.experts.children()]
        if any(of_module != shapes[0] for of_module in shapes):
            raise InputError(
                "user-defined experts must have parameters of the same names and shapes: "
                "create all in the same way"
            )

    @property
    def names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return tuple(name for name, _ in self.named_parameters()), ()

    def init_normal(self, std: float, out_std: float, draw: Draw = draw_globally) -> None:
        """Keep the initialisation that `factory` chose."""

    def reset_parameters(self) -> None:
        """Reset the modules. On a mesh each expert has a seed of its own, as in `draw_globally`."""
        if not self.is_spread:
            super().reset_parameters()
            return
        seed = torch.randint(2**62, (), device="cpu").item()
        devices = {parameter.device for parameter in self.parameters() if parameter.is_cuda}
        with torch.random.fork_rng(devices):
            for expert, module in self.experts.named_children():
                torch.manual_seed(key_of(seed, expert))
                reset_all(module)

    def compute(self, call: ExpertCall) -> Tensor:
        """Run the experts on their rows, each with its own of the weights that the call brings;
        those of other ranks run in the modules that this rank has."""
        ends = call.ends.tolist()
        starts = [0, *ends[:-1]]
        modules = list(self.experts.children())
        per_module = len(call.sharded) // max(len(ends), 1)  # parameters of one expert
        results = []
        for index, (start, end) in enumerate(zip(starts, ends)):
            # a call may bring more experts than there are modules, which differ only in weights
            module = modules[index % len(modules)]
            names = [name for name, _ in module.named_parameters()]
            weights = call.sharded[index * per_module : (index + 1) * per_module]
            parameters = dict(zip(names, weights))
            results.append(functional_call(module, parameters, (call.rows[start:end],)))
        out = torch.cat(results)
        if out.shape != call.rows.shape:
            raise InputError(
                f"a user-defined expert must map (rows, {self.dim}) to the same shape, got "
                f"{tuple(out.shape)}"
            )
        if call.gates is None:
            return out
        return out * call.gates.to(out.dtype).unsqueeze(1)

    def keep_only(self, experts: range, copies: int) -> None:
        """Drop the modules of experts that live on other ranks. The others keep their names.

        Args:
            experts: indices of the experts to keep.
            copies: number of ranks that keep the same experts; `copies_of` returns it for each
                parameter.
        """
        by_name = dict(self.experts.named_children())
        kept_names = [str(expert) for expert in experts]
        self.experts = nn.ModuleDict({name: by_name[name] for name in kept_names})
        # the attribute that `copies_of` reads
        self.mark(lambda parameter: setattr(parameter, _MARK, copies))

    def first(self, sharded: Weights, num_experts: int) -> Weights:
        """Return the parameters of the first experts. `sharded` has the parameters of one module
        after those of another."""
        module = next(self.experts.children())
        per_module = len(list(module.parameters()))
        return sharded[: num_experts * per_module]

    def num_units(self, sharded: Weights) -> int:
        """Return 1: an expert is sent as one row."""
        return 1

    def pack(self, sharded: Weights) -> Tensor:
        """Return (num_experts, parameters of one): each expert's parameters, flattened into one
        row.

        Raises:
            InputError: if the modules have no parameters, or have buffers, which would not be sent.
        """
        module = next(self.experts.children())
        per_module = len(list(module.parameters()))
        if not per_module or list(module.buffers()):
            raise InputError(
                f"plan.gather_weights: experts like {type(module).__name__} cannot be sent, since "
                "they have buffers, or no parameters: leave plan.gather_weights at none"
            )
        rows = []
        for first in range(0, len(sharded), per_module):
            parameters = sharded[first : first + per_module]
            rows.append(torch.cat([parameter.reshape(-1) for parameter in parameters]))
        return torch.stack(rows)

    def unpack(self, rows: Tensor, num_experts: int) -> Weights:
        """Return the parameters from the rows of `pack`, as views."""
        shapes = [parameter.shape for parameter in next(self.experts.children()).parameters()]
        sizes = [shape.numel() for shape in shapes]
        parameters = []
        for row in rows:
            for part, shape in zip(row.split(sizes), shapes):
                parameters.append(part.view(shape))
        return tuple(parameters)


def copies_of(parameter: nn.Parameter) -> int | None:
    """Return how many ranks keep this parameter of a user's module that is spread over a mesh; None
    for other parameters."""
    copies: int | None = getattr(parameter, _MARK, None)
    return copies


_MARK = "_copies_of_expert"
"""The attribute of a parameter that holds the result of `copies_of`."""


def _shapes(module: nn.Module) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in module.named_parameters()}
