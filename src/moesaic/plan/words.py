"""A plan in a few words, for tables and logs."""

from __future__ import annotations

from moesaic.codecs import is_coded
from moesaic.plan.plan import Plan


def plan_in_words(plan: Plan) -> str:
    """Return what of a plan is not the plain one."""
    words: list[str] = [plan.schedule, plan.all_to_all]
    words += [f"{plan.chunks} chunks"] * (plan.chunks > 1) + ["fused"] * plan.fuse
    words += [] if plan.gather_weights is None else [f"r = {plan.gather_weights}"]
    words += [f"{plan.peer_groups} peer groups"] * (plan.peer_groups > 1) + ["overlapped gather"] * plan.overlap_gather
    words += [f"{plan.codec} forward"] * is_coded(plan.codec)
    words += [f"{plan.backward_codec} backward"] * is_coded(plan.backward_codec)
    words += [f"replication {plan.replication}"] * plan.replicates
    words += [] if plan.token_budget is None else [f"at most {plan.token_budget} rows"]
    return ", ".join([*words, *([plan.order] if plan.order != Plan().order else [])])
