"""The features of a case, by which tests see that the drawn cases have them all."""

from __future__ import annotations

from moesaic.testing.cases import Case


def features(case: Case) -> list[str]:
    """Return the features of a case: `field=value`, or the name of a switch that is on."""
    plan = case.plan
    present = [
        f"{name}={getattr(case, name)}"
        for name in (
            "router",
            "experts",
            "precision",
            "apply_weight",
            "sequences",
            "placement",
            "experts_move",
        )
    ]
    names = (
        "schedule",
        "all_to_all",
        "codec",
        "backward_codec",
        "order",
        "chunks",
        "peer_groups",
        "gather_weights",
    )
    present += [f"{name}={getattr(plan, name)}" for name in names]
    present += [
        f"{axis}={getattr(case.grid, axis)}" for axis in ("world", "tp", "ep", "etp", "innermost")
    ]
    present += [f"loss={loss.name}" for loss in case.losses]
    at_random = plan.replication in ("shadow", "arbiter") and not case.by_policy
    present.append(f"replication={plan.replication}{' at random' * at_random}")
    switches = {
        "overlap_gather": plan.overlap_gather,
        "fuse": plan.fuse,
        "memory budget": plan.memory_budget is not None,
        "padding": case.padding,
        "recompute": case.recompute,
        "evaluate": case.evaluate,
        "shared": case.shared,
        "accumulation": len(case.lengths) > 1,
        "group without tokens": any(0 in of_groups for of_groups in case.lengths),
        "uneven groups": any(len(set(of_groups)) > 1 for of_groups in case.lengths),
        "coded, exact": case.is_exact and not plan.is_lossless,
        "several nodes": case.grid.node_of(case.grid.world - 1) > 0,
        "capacity": case.capacity.admits_by_score
        or case.capacity.spans_mesh
        or hasattr(case.capacity, "factor"),
        "capacity per rank": hasattr(case.capacity, "factor") and not case.capacity.spans_mesh,
        "padded capacity": case.capacity.is_padded,
        "admission by score": case.capacity.admits_by_score,
    }
    return present + [name for name, holds in switches.items() if holds]
