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
    backend = "gloo" if config.device.startswith("cpu") else "nccl"
    lines = trained_on(WORLD, config, backend=backend)
    losses = [line["val_loss"] for line in lines if "val_loss" in line]
    loss = losses[-1]
    if task == "language":
        return {"val_loss": loss, "score": math.exp(loss)}
    trained = load_trained(Path(config.out), config.device, task_of(config))
    return {"val_loss": loss, "score": bleu(trained, most_sentences)}


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
    half = length // 2
    tokens = load_pairs(trained.config.data, length, trained.folder / "tokenizer.json").val
    num_rows = len(tokens) // length

    # A row: the padded message, one position of padding, and the padded translation.
    for row in tokens[: num_rows * length].reshape(-1, length).tolist():
        source = [token for token in row[:half] if token != PADDING]
        target = [token for token in row[half + 1 :] if token != PADDING]
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
    # Codecs, and the factor of the steps.
    variants = [(DENSE, 1), *((each, 1) for each in options.codecs), (DENSE, 2), (PLAIN, 2)]
    trained: list[tuple[Task, str, str, int]] = []
    for task, (name, steps) in tasks.items():
        if name:
            trained += [(task, name, codecs, factor * steps) for codecs, factor in variants]

    def run(task: Task, config: TrainConfig) -> dict[str, float]:
        with TemporaryDirectory() as out:
            return one_run(
                task, replace(config, out=str(Path(out) / "run")), options.most_sentences
            )

    def label(task: Task, name: str, codecs: str, steps: int, seed: int) -> str:
        return f"{task}-{name}-{steps}-{codecs.replace('/', '+').replace(':', '_')}-{seed}"

    runs = {}
    for seed in options.seeds:
        for task, name, codecs, steps in trained:
            _, usual_steps = tasks[task]
            if seed == options.seeds[0] or steps == usual_steps:
                config = configuration(name, Path(), steps, seed, codecs, options.device)
                runs[label(task, name, codecs, steps, seed)] = partial(run, task, config)
    results = dict(each_kept(options.keep, runs, told))

    rows = []
    for each in dict.fromkeys(trained):
        labels = [label(*each, seed) for seed in options.seeds]
        rows.append(row(*each, [results[one] for one in labels if one in results]))
    return rows


def row(
    task: Task, name: str, codecs: str, steps: int, results: list[dict[str, float]]
) -> dict[str, Any]:
    """Return a row of the table from the results of its seeds."""
    scores = [result["score"] for result in results]
    losses = [result["val_loss"] for result in results]
    forward, backward = pair(codecs)
    published = None
    if (forward, backward) in PUBLISHED:
        bleu_score, perplexity = PUBLISHED[forward, backward]
        published = perplexity if task == "language" else bleu_score
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
        "published": published,
    }


def claims(rows: list[dict[str, Any]]) -> list[Claim]:
    """Return the claims about the translation and the language model."""
    translated = [row for row in rows if row["task"] == "translation"]
    written = [row for row in rows if row["task"] == "language"]
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
        """Return the score of each seed, after `times` the usual steps."""
        return figures(rows, "scores", codec=codec, backward_codec=PLAIN, steps=times * steps)[0]  # type: ignore[return-value]

    def gains() -> list[float]:
        """Return by how much the experts are better than the dense model, with each seed."""
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
        by_int8 = apart(scores("int8"), scores(PLAIN))
        by_zfp = apart(scores("zfp"), scores(PLAIN))
        return by_int8 - by_zfp

    def below(name: str, value: Callable[[], float], bound: Callable[[], float]) -> Claim:
        """Claim that a value is at most a bound, which is measured too."""
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
