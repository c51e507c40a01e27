"""The cost of a lossy codec in quality, like ScheMoE's Table 6: a language model, and on a GPU a
translation, three seeds.

Every run trains with its experts split over two processes, so half of all token copies cross
between them, encoded. For each seed, runs share data, weights and steps, and differ only in the
codec; a dense model with equally many active parameters is added for comparison. Scores are of
held-back text: perplexity per byte, and BLEU by sacrebleu. With the first seed, the dense model and
the one without a codec also train twice as long, which changes their scores by less than seeds
differ if they have converged. On two cores, a run of the language model takes 2 to 7 minutes, all
of them two hours.

    moesaic bench codec_convergence --keep runs/codecs \
        --json benchmarks/results/codec_convergence.json

For the paper's sizes: --translation transformer-moe --language gpt2-tiny-moe --device cuda, with
enough steps.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from moesaic.configfile import override
from moesaic.errors import InputError
from moesaic.program.plan import StaticPlan
from moesaic.train.config import MeshConfig, TrainConfig
from moesaic.train.state import Trained, load_trained
from moesaic_lab.benchmark import Benchmark, KeptOptions, Shown, Told, each_kept, notes_of
from moesaic_lab.claims import Claim, NotMeasuredError, claimed, figures
from moesaic_lab.paper_train.command import paper_preset, task_of
from moesaic_lab.paper_train.data import load_pairs
from moesaic_lab.paper_train.models import PADDING, EncoderDecoder, translate
from moesaic_lab.reproduce.records import read_book
from moesaic_lab.training import short_run, trained_on

Task = Literal["translation", "language"]
DENSE = "dense"
PLAIN = "none"
"""Names of the dense model and of the sparse one without a codec, used in place of a codec."""
CODECS = ("bf16", "fp16", "int8", "fp8", "zfp")
WORLD = 2
CHANGES: dict[str, dict[str, Any]] = {
    "gpt-tiny": {
        "batch_size": 16,
        "evaluate": {"sequences": 2048},
        "model": {"moe": {"num_experts": 16}},
    }
}
"""Settings with which small presets converge within minutes, and their experts gain more than seeds
differ."""
BOOK = read_book()
PUBLISHED = {
    (codec, "none"): tuple(BOOK.value(f"schemoe.{unit}.{codec}") for unit in ("bleu", "perplexity"))
    for codec in (DENSE, "none", "fp16", "int8", "zfp")
}
"""BLEU and perplexity of ScheMoE's Table 6, by the codecs of the forward and backward passes."""
SENTENCES = 64
"""Batch size of translation."""


@dataclass(frozen=True, kw_only=True)
class CodecConvergenceOptions(KeptOptions):
    """Command-line options."""

    translation: str = ""
    """Preset of the encoder-decoder, which needs a GPU to converge; empty to skip translation."""
    language: str = "gpt-tiny"
    """Preset of the language model; empty to skip it."""
    translation_steps: int = 20_000
    """Optimizer steps of each translation run; the learning-rate schedule ends with them."""
    language_steps: int = 4000
    """Optimizer steps of each language-model run; the learning-rate schedule ends with them."""
    codecs: tuple[str, ...] = (PLAIN, *CODECS)
    """Codecs of the forward pass, optionally with one for gradients after a slash. A dense model is
    always trained as well."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of initialization and data order."""
    most_sentences: int = 512
    """Largest number of held-back messages to translate."""
    device: str = "cpu"
    """cpu or cuda."""


def configuration(
    name: str, out: Path, steps: int, seed: int, codecs: str, device: str = "cpu"
) -> TrainConfig:
    """Return the configuration of a run on two ranks.

    Args:
        name: name of the preset.
        out: folder of the run.
        steps: optimizer steps.
        seed: seed of weights and data order.
        codecs: one of `CodecConvergenceOptions.codecs`, or `DENSE`.
        device: cpu or cuda.
    """
    base = override(paper_preset(name), CHANGES.get(name, {}), source=name)
    forward, backward = pair(codecs)
    where: dict[str, Any] = {"device": device, "threads": 1 if device == "cpu" else None}
    config = short_run(base, steps, out=str(out), existing="replace", seed=seed, **where)
    if codecs == DENSE:
        return replace(
            config, model=replace(base.model, ffn="dense"), mesh=MeshConfig(), plan=StaticPlan()
        )
    return replace(
        config, mesh=MeshConfig(ep=WORLD), plan=StaticPlan(codec=forward, backward_codec=backward)
    )


def pair(codecs: str) -> tuple[str, str]:
    """Return the codecs of the forward and backward passes. For the dense model, the first is
    `DENSE`."""
    forward, _, backward = codecs.partition("/")
    return forward, backward or "none"


def one_run(task: Task, config: TrainConfig, most_sentences: int) -> dict[str, float]:
    """Train; return the validation loss in nats and the task's score (BLEU or perplexity)."""
    lines = trained_on(WORLD, config, backend="gloo" if config.device.startswith("cpu") else "nccl")
    loss = next(line["val_loss"] for line in reversed(lines) if "val_loss" in line)
    if task == "language":
        return {"val_loss": loss, "score": math.exp(loss)}
    return {
        "val_loss": loss,
        "score": bleu(
            load_trained(Path(config.out), config.device, task_of(config)), most_sentences
        ),
    }


def bleu(trained: Trained, most: int) -> float:
    """Return the BLEU of a model's translations of held-back messages.

    Args:
        trained: a trained encoder-decoder.
        most: largest number of messages.
    """
    import sacrebleu

    pairs = list(itertools.islice(held_back(trained), most))
    assert isinstance(trained.model, EncoderDecoder)
    translations: list[str] = []
    for start in range(0, len(pairs), SENTENCES):
        sources = [source for source, _ in pairs[start : start + SENTENCES]]
        translations += map(trained.tokenizer.decode, translate(trained.model, sources))
    references = [trained.tokenizer.decode(target) for _, target in pairs]
    return float(sacrebleu.corpus_bleu(translations, [references]).score)


def held_back(trained: Trained) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the token ids of held-back messages and their translations, with the same split as in
    the model's training run."""
    length = trained.config.model.seq_len
    tokens = load_pairs(trained.config.data, length, trained.folder / "tokenizer.json").val
    for row in tokens[: len(tokens) // length * length].reshape(-1, length).tolist():
        half = length // 2
        source, target = (
            [token for token in part if token != PADDING] for part in (row[:half], row[half + 1 :])
        )
        yield source, target


def cases(options: CodecConvergenceOptions) -> None:
    """Refuse translation on a CPU, where it would not converge."""
    if options.translation and options.device == "cpu":
        raise InputError(
            f"--translation {options.translation}: takes hours to converge on a CPU: add "
            "--device cuda"
        )


def measure(options: CodecConvergenceOptions, cases: None, told: Told) -> list[dict[str, Any]]:
    """Train every model under every codec, seed by seed, and the two without a codec twice as long
    with the first seed."""
    tasks: dict[Task, tuple[str, int]] = {
        "translation": (options.translation, options.translation_steps),
        "language": (options.language, options.language_steps),
    }
    trained = [
        (task, name, codecs, times * steps)
        for task, (name, steps) in tasks.items()
        for codecs, times in (
            (DENSE, 1),
            *((each, 1) for each in options.codecs),
            (DENSE, 2),
            (PLAIN, 2),
        )
        if name
    ]

    def run(task: Task, config: TrainConfig) -> dict[str, float]:
        with TemporaryDirectory() as out:
            return one_run(
                task, replace(config, out=str(Path(out) / "run")), options.most_sentences
            )

    def label(task: Task, name: str, codecs: str, steps: int, seed: int) -> str:
        return f"{task}-{name}-{steps}-{codecs.replace('/', '+').replace(':', '_')}-{seed}"

    runs = {
        label(task, name, codecs, steps, seed): partial(
            run, task, configuration(name, Path(), steps, seed, codecs, options.device)
        )
        for seed in options.seeds
        for task, name, codecs, steps in trained
        if seed == options.seeds[0] or steps == tasks[task][1]
    }
    results = dict(each_kept(options.keep, runs, told))
    labels = {each: [label(*each, seed) for seed in options.seeds] for each in trained}
    return [
        row(*each, [results[one] for one in of_seeds if one in results])
        for each, of_seeds in labels.items()
    ]


def row(
    task: Task, name: str, codecs: str, steps: int, results: list[dict[str, float]]
) -> dict[str, Any]:
    """Return a row of the table from the results of its seeds."""
    scores, losses = ([result[key] for result in results] for key in ("score", "val_loss"))
    forward, backward = pair(codecs)
    published = PUBLISHED.get((forward, backward))
    return {
        "task": task,
        "model": name,
        "codec": forward,
        "backward_codec": backward,
        "steps": steps,
        "score": statistics.mean(scores),
        "least": min(scores),
        "most": max(scores),
        "scores": scores,
        "val_loss": statistics.mean(losses),
        "published": None if published is None else published[task == "language"],
    }


def claims(rows: list[dict[str, Any]]) -> list[Claim]:
    """Return the claims about the translation and the language model."""
    translated, written = (
        [r for r in rows if r["task"] == task] for task in ("translation", "language")
    )
    return [*claims_of(translated, "bleu", 1), *claims_of(written, "perplexity", -1)]


def claims_of(rows: list[dict[str, Any]], unit: str, better: int) -> list[Claim]:
    """Return the claims about one task.

    The experts gain over the dense model with every seed; without a codec, seeds differ by less
    than that; twice the steps change the first seed's score by less than seeds differ; and so do
    codecs change the mean, in either direction.

    Args:
        rows: the task's rows.
        unit: what scores are.
        better: the sign of a score's change for the better.
    """
    steps = min((row["steps"] for row in rows), default=0)

    def scores(codec: str, times: int = 1) -> list[float]:
        return figures(rows, "scores", codec=codec, backward_codec=PLAIN, steps=times * steps)[0]  # type: ignore[return-value]

    def gains() -> list[float]:
        return [
            better * (sparse - dense)
            for sparse, dense in zip(scores(PLAIN), scores(DENSE), strict=True)
        ]

    def spread(codec: str = PLAIN) -> float:
        return max(scores(codec)) - min(scores(codec))

    def apart(first: list[float], second: list[float]) -> float:
        """Return the difference of the means over the seeds that both have."""
        return abs(statistics.mean(first[: len(second)]) - statistics.mean(second))

    def int8_over_zfp() -> float:
        """Return by how much int8 moves the mean more than zfp does, as the paper finds."""
        moved = [apart(scores(codec), scores(PLAIN)) for codec in ("int8", "zfp")]
        return moved[0] - moved[1]

    def below(name: str, value: Callable[[], float], bound: Callable[[], float]) -> Claim:
        try:
            return Claim(name=f"codec.{name}_{unit}", value=value(), unit=unit, target=bound())
        except NotMeasuredError as reason:
            return Claim(name=f"codec.{name}_{unit}", value=None, unit=unit, reason=str(reason))

    return [
        claimed(f"codec.moe_over_dense_{unit}", lambda: min(gains()), 0.0, ">=", unit),
        below("spread", spread, lambda: statistics.mean(gains())),
        below(
            "plateau_dense", lambda: apart(scores(DENSE), scores(DENSE, 2)), lambda: spread(DENSE)
        ),
        below("plateau_moe", lambda: apart(scores(PLAIN), scores(PLAIN, 2)), spread),
        *(
            below(f"{each}_gap", lambda each=each: apart(scores(each), scores(PLAIN)), spread)  # type: ignore[misc]
            for each in CODECS
        ),
        claimed(f"codec.int8_over_zfp_{unit}", int8_over_zfp, 0.0, ">=", unit),
    ]


COLUMNS = ("codec", "backward_codec", "steps", "score", "least", "most", "val_loss", "published")
TITLES = {"translation": "BLEU of translations", "language": "perplexity"}

BENCHMARK = Benchmark(
    name="codec_convergence",
    description="Train a language model under each codec, and a translation on a GPU.",
    options=CodecConvergenceOptions,
    notes=notes_of(__doc__),
    cases=cases,
    measure=measure,
    claims=claims,
    columns=tuple(
        Shown(title=title, where={"task": (task,)}, columns=COLUMNS)
        for task, title in TITLES.items()
    ),
    packages=("torch", "numpy", "sacrebleu", "django", "zfpy"),
)
