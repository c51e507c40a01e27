"""Runs experts for tokens whose experts another library's router chose: the part of a layer that
such a library hands over.

Shape letters at the end of names: T tokens, D dim, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor

from moesaic.comm.mesh import Mesh
from moesaic.errors import InputError
from moesaic.experts.experts import AbstractExperts
from moesaic.kernels.permute import sort_by_expert
from moesaic.policies import AUTO, calls_of, load
from moesaic.program.compile import Compiled
from moesaic.program.plan import Plan
from moesaic.routing.capacity import count
from moesaic.runtime.expert_parallel import ExpertParallel
from moesaic.runtime.graph_breaks import outside_graphs


class ChosenExperts:
    """Runs borrowed experts on the tokens that a router chose for them, on one rank or over a mesh.

    Gradients are those of a plain all-to-all: an expert's is the sum over all tokens that reach the
    expert; those of a token and of its routing weights are complete.

    Args:
        experts: the experts of all ranks; on a mesh, each rank reads its part of the parameters.
        hidden: inner width of one whole expert.
        mesh: the ranks, all of which construct and call this together; None to run on this rank
            alone.
        plan: the plan to run on the mesh; None to choose it during training, as
            `MoE.parallelize(..., "auto")` does.
        parameters: returns the parameters, whose optimizer steps end a training step.

    Raises:
        InputError: the plan does not fit the mesh, or ranks differ in plan or experts. Raised on
            every rank.
    """

    def __init__(
        self,
        experts: AbstractExperts,
        hidden: int,
        parameters: Callable[[], Iterable[Tensor]],
        mesh: Mesh | None = None,
        plan: Plan | Compiled | None = None,
    ) -> None:
        self.experts = experts
        self._hidden = hidden
        self._parameters = parameters
        self._mesh = mesh
        self._is_auto = plan is None

        self.on_mesh: ExpertParallel | None = None
        if mesh is None:
            return
        names = ("num_experts", "dim", "activation", "clamp", "bias")
        settings: dict[str, object] = {f"experts.{name}": getattr(experts, name) for name in names}
        settings["whether plan is auto"] = plan is None
        self.on_mesh = ExpertParallel(
            mesh.grid,
            mesh.transport,
            plan=plan or Plan(),
            experts=experts,
            weight_first=False,
            calls_under=partial(calls_of, num_experts=experts.num_experts, dim=experts.dim),
            settings=settings,
        )
        self._join()

    def _join(self) -> None:
        """Let the search for a plan, if there is one, switch the plans of these experts."""
        if self._is_auto and self._mesh is not None and self.on_mesh is not None:
            load(AUTO).of(self._mesh).join(
                self.on_mesh, self.experts, self._hidden, self._parameters
            )

    def exchange(self, experts: AbstractExperts) -> None:
        """Run other experts of the same sizes from the next call on, such as these with adapters.
        All ranks call it."""
        self.experts = experts
        if self.on_mesh is not None:
            self.on_mesh.exchange(experts)
            self._join()

    def __call__(self, x_TD: Tensor, expert_TK: Tensor, weight_TK: Tensor) -> Tensor:
        """Return each token's weighted sum of expert outputs, (tokens, dim), in the dtype of
        `x_TD`.

        Args:
            x_TD: (tokens, dim), this rank's tokens; any number of them, including none.
            expert_TK: (tokens, K) int64, the distinct experts of each token, counted over all
                ranks.
            weight_TK: (tokens, K) routing weights.
        """
        if self.on_mesh is not None:
            return outside_graphs(
                partial(self._run_on_mesh, self.on_mesh, x_TD, expert_TK, weight_TK)
            )
        num_tokens, top_k = expert_TK.shape
        # one entry per copy, token after token
        expert = expert_TK.reshape(-1)
        all_tokens = torch.arange(num_tokens, device=expert.device)
        token = all_tokens.repeat_interleave(top_k, output_size=len(expert))
        counts = count(expert, None, self.experts.num_experts)
        permutation = sort_by_expert(token, expert, counts, num_tokens, top_k)
        run = partial(self.experts.compute_tokens, permutation=permutation)
        y: Tensor = self.experts(x_TD, weight_TK.reshape(-1), run=run)
        return y

    def _run_on_mesh(
        self, on_mesh: ExpertParallel, x_TD: Tensor, expert_TK: Tensor, weight_TK: Tensor
    ) -> Tensor:
        """Run the experts over the mesh; see `__call__`."""
        routed = on_mesh.route_chosen(x_TD, expert_TK, weight_TK)
        return on_mesh.run_experts(self.experts, x_TD, routed, None)

    def use_plan(self, plan: Plan | Compiled) -> None:
        """Run under another plan from the next call on, and search for none any more; the arguments
        are those of `MoE.use_plan`."""
        if self.on_mesh is None:
            raise InputError(
                "use_plan: the experts are on no mesh: give ChosenExperts a mesh first"
            )
        self.on_mesh.use(plan, self.experts)
        self.on_mesh.auto = None
