"""The cost of a lossy codec in quality, like ScheMoE's Table 6: a translation and a language model, three seeds.

Every run trains with its experts split over two Gloo processes, so half of all token copies cross between them. For
each seed, runs share data, weights and steps, and differ only in the codec; a dense model with equally many active
parameters is added for comparison. Translation: the tiny encoder-decoder on Django's messages in 27 languages, with
BLEU by sacrebleu on held-back messages. Language model: the demo, with perplexity per byte of the held-back text. A gap
is meaningful if it is larger than the difference between seeds.

    moesaic bench codec_convergence --keep runs/codecs --json benchmarks/results/codec_convergence.json

For the paper's sizes: --translation transformer-moe --language gpt2-tiny-moe --device cuda, with enough steps.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from moesaic.program.plan import StaticPlan
from moesaic.train.config import MeshConfig, TrainConfig
from moesaic.train.state import Trained, load_trained
from moesaic_lab.benchmark import Benchmark, KeptOptions, Shown, Told, each_kept, notes_of
from moesaic_lab.claims import Claim
from moesaic_lab.paper_train.command import paper_preset, task_of
from moesaic_lab.paper_train.data import load_pairs
from moesaic_lab.paper_train.models import PADDING, EncoderDecoder, translate
from moesaic_lab.training import short_run, trained_on

Task = Literal["translation", "language"]
DENSE = "dense"
"""Name of the dense model, used in place of a codec."""
WORLD = 2
PUBLISHED = {
    (DENSE, "none"): (45.51, 128.8), ("none", "none"): (46.61, 106.8), ("fp16", "none"): (46.59, 106.85),
    ("int8", "none"): (46.68, 110.35), ("zfp", "none"): (46.58, 106.87),
}  # fmt: skip
"""BLEU and perplexity of ScheMoE's Table 6, by the codecs of the forward and backward passes."""
SENTENCES = 64
"""Batch size of translation."""


@dataclass(frozen=True, kw_only=True)
class CodecConvergenceOptions(KeptOptions):
    """Command-line options."""

    translation: str = "seq2seq-tiny"
    """Preset of the encoder-decoder; empty to skip translation."""
    language: str = "demo"
    """Preset of the language model; empty to skip it."""
    translation_steps: int = 600
    """Optimizer steps of each translation run; the learning-rate schedule ends with them."""
    language_steps: int = 120
    """Optimizer steps of each language-model run; the learning-rate schedule ends with them."""
    codecs: tuple[str, ...] = ("none", "bf16", "fp16", "int8", "fp8", "zfp", "int8/int8")
    """Codecs of the forward pass, optionally with one for gradients after a slash. A dense model is always trained as
    well."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of initialization and data order."""
    most_sentences: int = 512
    """Largest number of held-back messages to translate."""
    device: str = "cpu"
    """cpu or cuda."""


def configuration(name: str, out: Path, steps: int, seed: int, codecs: str, device: str = "cpu") -> TrainConfig:
    """Return the configuration of a run on two ranks.

    Args:
        name: name of the preset.
        out: folder of the run.
        steps: optimizer steps.
        seed: seed of weights and data order.
        codecs: one of `CodecConvergenceOptions.codecs`, or `DENSE`.
        device: cpu or cuda.
    """
    base, (forward, backward) = paper_preset(name), pair(codecs)
    where: dict[str, Any] = {"device": device, "threads": 1 if device == "cpu" else None}
    config = short_run(base, steps, out=str(out), existing="replace", seed=seed, **where)
    if codecs == DENSE:
        return replace(config, model=replace(base.model, ffn="dense"), mesh=MeshConfig(), plan=StaticPlan())
    return replace(config, mesh=MeshConfig(ep=WORLD), plan=StaticPlan(codec=forward, backward_codec=backward))


def pair(codecs: str) -> tuple[str, str]:
    """Return the codecs of the forward and backward passes. For the dense model, the first is `DENSE`."""
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
        "score": bleu(load_trained(Path(config.out), config.device, task_of(config)), most_sentences),
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
    """Yield the token ids of held-back messages and their translations, with the same split as in the model's training
    run."""
    length = trained.config.model.seq_len
    tokens = load_pairs(trained.config.data, length, trained.folder / "tokenizer.json").val
    for row in tokens[: len(tokens) // length * length].reshape(-1, length).tolist():
        half = length // 2
        source, target = ([token for token in part if token != PADDING] for part in (row[:half], row[half + 1 :]))
        yield source, target


def measure(options: CodecConvergenceOptions, cases: None, told: Told) -> list[dict[str, Any]]:
    """Train every model under every codec and seed."""
    tasks: dict[Task, tuple[str, int]] = {
        "translation": (options.translation, options.translation_steps),
        "language": (options.language, options.language_steps),
    }
    rows = []
    for task, (name, steps) in tasks.items():
        for codecs in (DENSE, *options.codecs) if name else ():

            def run(config: TrainConfig, task: Task = task) -> dict[str, float]:
                with TemporaryDirectory() as out:
                    return one_run(task, replace(config, out=str(Path(out) / "run")), options.most_sentences)

            head = f"{task}-{name}-{steps}-{codecs.replace('/', '+').replace(':', '_')}"
            runs = {
                f"{head}-{seed}": partial(run, configuration(name, Path(), steps, seed, codecs, options.device))
                for seed in options.seeds
            }
            results = [result for _, result in each_kept(options.keep, runs, told)]
            rows.append(row(task, name, codecs, steps, results))
    return rows


def row(task: Task, name: str, codecs: str, steps: int, results: list[dict[str, float]]) -> dict[str, Any]:
    """Return a row of the table from the results of all seeds."""
    scores, losses = ([result[key] for result in results] for key in ("score", "val_loss"))
    forward, backward = pair(codecs)
    published = PUBLISHED.get((forward, backward))
    return {
        "task": task, "model": name, "codec": forward, "backward_codec": backward, "steps": steps,
        "score": statistics.mean(scores), "least": min(scores), "most": max(scores), "scores": scores,
        "val_loss": statistics.mean(losses), "published": None if published is None else published[task == "language"],
    }  # fmt: skip


def gap(rows: list[dict[str, Any]], task: Task, codec: str) -> tuple[float, float] | None:
    """Return how much worse a codec scores than no codec (mean over seeds), and how much the seeds without a codec
    differ.

    Returns:
        both in BLEU, or in perplexity; None if one of the two was not run.
    """
    by_codec = {r["codec"]: r for r in rows if r["task"] == task and r["backward_codec"] == "none"}
    if codec not in by_codec or "none" not in by_codec:
        return None
    worse = by_codec["none"]["score"] - by_codec[codec]["score"]
    return (worse if task == "translation" else -worse), by_codec["none"]["most"] - by_codec["none"]["least"]


def claims(rows: list[dict[str, Any]]) -> list[Claim]:
    """Return what the experts gain over the dense model, and by how much each codec moves the score, in either direction.

    A codec must move it by less than the experts gain. If the seeds without a codec differ by more than that, nobody can
    tell, and the claim is missed too: its value is the larger of both.
    """
    result = []
    measured: tuple[tuple[Task, str], ...] = (("translation", "bleu"), ("language", "perplexity"))
    for task, what in measured:
        lost = gap(rows, task, DENSE)
        gain = None if lost is None else lost[0]
        missing = "" if lost is not None else "not run"
        result.append(
            Claim(name=f"codec.moe_over_dense_{what}", value=gain, unit=what, target=0.0, op=">=", reason=missing)
        )
        for codec in ("bf16", "fp16", "int8", "fp8", "zfp"):
            measured_gap, name = gap(rows, task, codec), f"codec.{codec}_gap_{what}"
            if measured_gap is None or gain is None:
                result.append(Claim(name=name, value=None, unit=what, reason="not run"))
            else:
                moved = max(abs(measured_gap[0]), measured_gap[1])
                result.append(Claim(name=name, value=moved, unit=what, target=max(gain, 0.0)))
    return result


COLUMNS = ("codec", "backward_codec", "steps", "score", "least", "most", "val_loss", "published")
TITLES = {"translation": "BLEU of translations", "language": "perplexity"}

BENCHMARK = Benchmark(
    name="codec_convergence", description="Train a translation and a language model under each codec.",
    options=CodecConvergenceOptions, notes=notes_of(__doc__), measure=measure, claims=claims,
    columns=tuple(Shown(title=title, where={"task": (task,)}, columns=COLUMNS) for task, title in TITLES.items()),
    packages=("torch", "numpy", "sacrebleu", "django", "zfpy"),
)  # fmt: skip
