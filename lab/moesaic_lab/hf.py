"""Moesaic inside transformers: tiny models of all families against their own expert loop, and ranks
against one process.

Errors of logits and gradients are relative to the largest value of each tensor, in float64 if the
family computes in it. On several ranks models compute in float32, and the one process in float64.

moesaic bench hf --json benchmarks/results/hf.json
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

import moesaic.transformers
from moesaic import Plan
from moesaic.testing.runner import on_ranks
from moesaic_lab.benchmark import Benchmark, BenchmarkOptions, Shown, Told, notes_of
from moesaic_lab.claims import Claim
from moesaic_lab.families import Family, build, families, text

FAMILIES_ASKED = 55
WORLDS = (2, 4, 8)
IN_FLOAT32 = ("BeamExperts", "NemotronHExperts", "OpenAIPrivacyFilterExperts", "MuseSparkExperts")
"""Experts that compute in float32 for inputs of any dtype."""
TOKENS = 6


Step = tuple[Tensor, dict[str, Tensor]]
"""Logits of a rank's sequence, and every gradient, gathered from all ranks."""


@dataclass(frozen=True)
class RankCase:
    """A model on a mesh, to run on several ranks."""

    folder: str
    ep: int
    tp: int = 1
    plan: dict[str, Any] | None = None
    """Fields of a plan to register under a name of its own; None for the default plan of
    "moesaic"."""
    then: dict[str, Any] = field(default_factory=dict)
    """Fields of a plan for a second step, whose results are then compared; empty for one step
    only."""
    recompute: bool = False


def batch(sequences: int) -> Tensor:
    """Return token ids, (sequences, TOKENS)."""
    return torch.randint(3, 60, (sequences, TOKENS), generator=torch.Generator().manual_seed(7))


def whole(tensor: Tensor) -> Tensor:
    """Return the whole of a tensor that may be sharded over ranks."""
    if not isinstance(tensor, DTensor):
        return tensor.detach().cpu()
    if "ep" not in (tensor.device_mesh.mesh_dim_names or ()):
        return tensor.full_tensor().detach().cpu()
    # `full_tensor` would not join the parts of a strided shard in the order of the ranks.
    place = (tensor.device_mesh.get_local_rank("ep"), dist.get_rank())
    part = tensor.to_local().detach().cpu()
    places_and_parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(places_and_parts, (place, part))
    in_order = sorted(places_and_parts, key=lambda entry: entry[0])
    return torch.cat([part for _, part in in_order])


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return every gradient by name, gathered from all ranks."""
    return {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def load(case: RankCase, **options: Any) -> Any:
    """Return the case's model on this rank."""
    name = "moesaic"
    if case.plan is not None:
        name = "of-the-test"
        moesaic.transformers.register_plan(name, Plan(**case.plan))
    config = moesaic.transformers.distributed_config(
        case.ep, tp_size=case.tp, ep_implementation=name
    )
    options = {"dtype": torch.float32, "attn_implementation": "eager", **options}
    model = AutoModelForCausalLM.from_pretrained(case.folder, distributed_config=config, **options)
    return model.train()


def step(model: Any, ids: Tensor) -> Step:
    """Run a model forward and backward; return its logits and gradients."""
    ids = ids.to(model.device)
    out = model(input_ids=ids, labels=ids, use_cache=False)
    out.loss.backward()
    return out.logits.detach().cpu(), gradients(model)


def as_launched(device: str = "cpu") -> None:
    """Set the environment variables of a launcher. Ranks on GPUs share the first one, as if each
    were alone on its node."""
    os.environ["RANK"] = str(dist.get_rank())
    os.environ["LOCAL_RANK"] = str(dist.get_rank() if device == "cpu" else 0)
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ[name] = str(dist.get_world_size())


def steps(device: str, cases: list[RankCase]) -> list[Step]:
    """Run the cases; return for each the logits of this rank's sequence and all gradients, on the
    CPU."""
    as_launched(device)
    results = []
    for case in cases:
        model = load(case)
        if case.recompute:
            model.activation_checkpointing_enable()
        # The ranks of a tensor-parallel group share a sequence.
        sequences = batch(dist.get_world_size() // case.tp)
        ids = sequences[dist.get_rank() // case.tp].unsqueeze(0)
        result = step(model, ids)
        if case.then:
            moesaic.transformers.use_plan(model, Plan(**case.then))
            model.zero_grad()
            result = step(model, ids)
        results.append(result)
    return results


def outcome(model: Any, implementation: str) -> Step:
    """Run a model with an implementation of experts; return its logits (hidden states without a
    head) and gradients."""
    model.set_experts_implementation(implementation)
    model.zero_grad()
    torch.manual_seed(0)
    out = model(input_ids=text(model), use_cache=False)
    outputs = out.logits if hasattr(out, "logits") else out[0]
    # A loss in which each output has a slope of its own, so that no two errors cancel.
    slopes = torch.linspace(0, 1, outputs.numel(), dtype=torch.float64).view(outputs.shape)
    (outputs.double() * slopes).sum().backward()
    return outputs.detach(), {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }


def tolerance_of(model: Any) -> float:
    """Return the largest error of a family's logits that rounding explains; gradients may have ten
    times as much."""
    rounds = any(type(module).__name__ in IN_FLOAT32 for module in model.modules())
    return 1e-5 if rounds or next(model.parameters()).dtype != torch.float64 else 1e-12


def family_errors(model: Any) -> tuple[float, float]:
    """Return the errors of logits and gradients against the family's own loop, relative to each
    tensor's largest value."""
    y, actual_gradients = outcome(model, "moesaic")
    expected, expected_gradients = outcome(model, "eager")
    assert actual_gradients.keys() == expected_gradients.keys()
    largest = max(float(gradient.abs().max()) for gradient in expected_gradients.values())
    gradient_errors = []
    for name, gradient in actual_gradients.items():
        wanted = expected_gradients[name]
        # Of a gradient that is zero but for rounding, no relative error can be told.
        scale = max(float(wanted.abs().max()), 1e-6 * largest)
        error = float((gradient - wanted).abs().max())
        gradient_errors.append(error / scale)
    logits_error = float((y - expected).abs().max())
    logits_scale = float(expected.abs().max())
    return logits_error / logits_scale, max(gradient_errors)


SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_local_experts": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def write_models(path: Path) -> tuple[str, str, str]:
    """Save a tiny Mixtral, a tiny gpt-oss, and a gpt-oss that routes every token to experts 0 and
    1; return their folders."""
    torch.manual_seed(0)
    MixtralForCausalLM(MixtralConfig(**SIZES)).double().save_pretrained(path / "mixtral")
    model = GptOssForCausalLM(
        GptOssConfig(**SIZES, num_experts_per_tok=2, layer_types=["full_attention"] * 2)
    ).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    model.save_pretrained(path / "gpt_oss")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("router.bias"):
                # Beside these, no logit of the other six experts counts.
                parameter.copy_(torch.tensor([50.0, 40.0, *[0.0] * 6]))
    model.save_pretrained(path / "skewed")
    return str(path / "mixtral"), str(path / "gpt_oss"), str(path / "skewed")


def cases_on(world: int, mixtral: str, gpt_oss: str, skewed: str) -> list[RankCase]:
    """Return the cases to run on `world` ranks."""
    if world > 2:
        return [
            RankCase(mixtral, ep=world),
            RankCase(gpt_oss, ep=world // 2),  # two copies of every expert
            RankCase(skewed, ep=world, plan={"chunks": 2}),
            RankCase(mixtral, ep=world, tp=2),
        ]
    return [
        RankCase(mixtral, ep=2),
        RankCase(gpt_oss, ep=2),
        RankCase(skewed, ep=2),  # the second rank gets no token
        RankCase(mixtral, ep=2, plan={"chunks": 2, "all_to_all": "multicast"}),
        RankCase(mixtral, ep=2, plan={"chunks": 2}, then={"all_to_all": "hier2d"}),
        RankCase(skewed, ep=2, plan={"replication": "eplb"}),
        RankCase(mixtral, ep=2, tp=2),
        RankCase(mixtral, ep=2, tp=2, plan={"schedule": "s2"}),
        RankCase(mixtral, ep=2, recompute=True),
    ]


def ep_errors(
    world: int, cases: Sequence[RankCase], results: Sequence[Sequence[Step]]
) -> list[float]:
    """Return each case's largest error of a logit or gradient on any rank, against one process in
    float64.

    Args:
        world: number of ranks.
        cases: the cases that were run.
        results: the results of `steps`, by rank and case.
    """
    errors = []
    for number, case in enumerate(cases):
        model = AutoModelForCausalLM.from_pretrained(
            case.folder,
            dtype=torch.float64,
            attn_implementation="eager",
            experts_implementation="eager",
        )
        ids = batch(world // case.tp)
        all_logits, expected_gradients = step(model, ids)
        largest = max(float(gradient.abs().max()) for gradient in expected_gradients.values())
        worst = 0.0
        for rank in range(world):
            logits, actual_gradients = results[rank][number]
            assert actual_gradients.keys() == expected_gradients.keys(), (
                f"{case}: parameters with a gradient differ on rank {rank}"
            )
            expected = all_logits[rank // case.tp]
            error = (logits[0] - expected).abs().max()
            worst = max(worst, float(error / expected.abs().max()))
            for name, gradient in actual_gradients.items():
                wanted = expected_gradients[name]
                # A small gradient is a sum of larger terms, whose float32 rounding it has.
                scale = max(float(wanted.abs().max()), 0.02 * largest)
                error = (gradient - wanted).abs().max()
                worst = max(worst, float(error) / scale)
        errors.append(worst)
    return errors


@dataclass(frozen=True, kw_only=True)
class HFOptions(BenchmarkOptions):
    """Families and ranks to run."""

    only: str | None = None
    """Run only these families, separated by commas."""
    ranks: bool = True
    """Also run experts sharded over 2, 4 and 8 processes."""


def chosen(options: HFOptions) -> list[Family]:
    """Return the families that the options select."""
    names = options.only.split(",") if options.only else None
    return [family for family in families() if names is None or family.name in names]


def measure(options: HFOptions, selected: list[Family], told: Told) -> list[dict[str, Any]]:
    """Return a row per family, and a row per case on several ranks."""
    rows: list[dict[str, Any]] = []
    for family in selected:
        told(family.name)
        try:
            model = build(family)
        except LookupError as reason:
            rows.append({"family": family.name, "reason": f"no tiny model: {reason}"})
            continue
        logits, gradient = family_errors(model)
        bound = tolerance_of(model)
        is_equal = logits <= bound and gradient <= 10 * bound
        rows.append(
            {"family": family.name, "logits": logits, "gradients": gradient, "is_equal": is_equal}
        )
    for world in WORLDS if options.ranks else ():
        told(f"{world} processes")
        rows += _on_ranks(world)
    return rows


def _on_ranks(world: int) -> list[dict[str, Any]]:
    """Return the rows about models on a number of ranks."""
    with tempfile.TemporaryDirectory() as folder:
        cases = cases_on(world, *write_models(Path(folder)))
        errors = ep_errors(world, cases, on_ranks(world, steps, "cpu", cases))
    rows = []
    for case, error in zip(cases, errors):
        fields = {**(case.plan or {}), **case.then}
        without_fields = "recomputed" if case.recompute else "auto"
        rows.append(
            {
                "world": world,
                "model": Path(case.folder).name,
                "ep": case.ep,
                "tp": case.tp,
                "plan": str(fields) if fields else without_fields,
                "error": error,
            }
        )
    return rows


def claims(rows: list[dict[str, Any]]) -> list[Claim]:
    """Return the claims: how many families are equal, and the largest error on several ranks."""
    equal = sum(row.get("is_equal", False) for row in rows)
    errors = [row["error"] for row in rows if "error" in row]
    reason = "" if errors else "run without ranks (--no-ranks)"
    return [
        Claim(name="hf.families_equal", value=equal, target=FAMILIES_ASKED, op=">="),
        Claim(name="hf.ep_worst", value=max(errors, default=None), target=1e-5, reason=reason),
    ]


ERROR = "{:.1e}".format
COLUMNS = ("family", "logits", "gradients", "world", "model", "plan", "error", "reason")

BENCHMARK = Benchmark(
    name="hf",
    description=(
        "Compare Moesaic inside transformers with its own loop: all families, and sharded experts."
    ),
    options=HFOptions,
    notes=notes_of(__doc__),
    cases=chosen,
    measure=measure,
    claims=claims,
    columns=(Shown(title="families", columns=COLUMNS),),
    packages=("torch", "transformers"),
)
