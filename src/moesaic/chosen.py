"""The name that `moesaic.given_routing` had before: import from there."""

from moesaic.given_routing import ChosenExperts

__all__ = ["ChosenExperts"]
