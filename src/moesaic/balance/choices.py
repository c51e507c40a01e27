"""What policies know of a plan: the few choices that they read or change, so that they need not know the compiler."""

from __future__ import annotations

from dataclasses import Field, dataclass
from typing import Any, ClassVar, Protocol, TypeVar

NO_REPLICATION = "none"
"""In place of the name of a policy that replicates experts."""


class PlanChoices(Protocol):
    """A plan, as policies see it: a dataclass with these fields, of which `plan.Plan` says what they mean."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def replication(self) -> str:
        """Name of the policy that replicates experts, or none."""

    @property
    def replicates(self) -> bool:
        """Whether there is such a policy."""

    @property
    def gather_weights(self) -> int | None:
        """Shards of an expert that a token visits; None for all."""

    @property
    def peer_groups(self) -> int:
        """Groups of neighbours that exchange one after the other."""

    @property
    def chunks(self) -> int:
        """Parts that each run of copies is cut into."""


AnyPlan = TypeVar("AnyPlan", bound=PlanChoices)


@dataclass(frozen=True, kw_only=True)
class Choices:
    """These choices alone, as a plan has them unless it is told otherwise."""

    replication: str = NO_REPLICATION
    gather_weights: int | None = None
    peer_groups: int = 1
    chunks: int = 1

    @property
    def replicates(self) -> bool:
        """Whether a policy replicates experts."""
        return self.replication != NO_REPLICATION
