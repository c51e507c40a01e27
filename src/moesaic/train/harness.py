"""A run's decoder as a model of EleutherAI's lm-evaluation-harness, to evaluate it on the harness's tasks.

    pip install "moesaic[eval]"

    import lm_eval
    from moesaic.train.harness import HarnessModel
    print(lm_eval.simple_evaluate(HarnessModel.of_run("runs/gpt-small"), tasks=["lambada_openai", "hellaswag"])["results"])

The harness needs three things: the log-likelihood of a continuation after a context, the log-likelihood of a text, and
text generated up to a stop string. Texts longer than the model's context lose their beginning, as in the harness's own
models.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from moesaic.errors import InputError
from moesaic.models.gpt import GPT, generate
from moesaic.train.state import load_trained
from moesaic.train.tokenizer import AbstractTokenizer

try:
    from lm_eval.api.model import TemplateLM
except ImportError as error:
    raise InputError('lm-eval is not installed: pip install "moesaic[eval]"') from error

MOST_NEW_TOKENS = 256
"""Number of tokens to generate if a task does not set it."""


class HarnessModel(TemplateLM):
    """A decoder that answers the harness's requests.

    Args:
        model: a model in evaluation mode.
        tokenizer: the model's tokenizer.
        batch_size: number of requests that are scored at once.
    """

    def __init__(self, model: GPT, tokenizer: AbstractTokenizer, *, batch_size: int = 8) -> None:
        super().__init__()
        if model.config.block.kind != "decoder":
            raise InputError(f"lm-eval asks for continuations, which an {model.config.block.kind} does not write")
        self.model, self.text, self._batch_size = model, tokenizer, batch_size
        self.longest = model.config.seq_len
        """Tokens of the model's context."""

    @classmethod
    def of_run(cls, folder: str | Path, *, device: str = "auto", batch_size: int = 8) -> HarnessModel:
        """Return the model of a run's newest checkpoint.

        Args:
            device: auto, cpu or cuda.

        Raises:
            InputError: if there is no run, its tokenizer is unknown, or its model is not a decoder.
        """
        trained = load_trained(Path(folder), device)
        return cls(trained.model, trained.tokenizer, batch_size=batch_size)

    @property
    def eot_token_id(self) -> int:
        """The id that precedes a text without context: that of a line break, which separates documents."""
        return int(self.tok_encode("\n")[0])

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Return the ids of a text."""
        ids: list[int] = self.text.encode(string.encode()).tolist()
        return ids

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        pairs = [(context, continuation) for _, context, continuation in requests]
        return [scored for start in range(0, len(pairs), self._batch_size) for scored in self._scored(pairs, start)]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each text in nats. Texts are cut into chunks that fit the context."""
        likelihoods = []
        for request in requests:
            ids = [self.eot_token_id, *self.tok_encode(request.args[0])]
            cuts = range(0, len(ids) - 1, self.longest)
            pairs = [(ids[at : at + 1], ids[at + 1 : at + 1 + self.longest]) for at in cuts]
            likelihoods.append(
                sum(value for value, _ in self._loglikelihood_tokens([(("", ""), *pair) for pair in pairs]))
            )
        return likelihoods

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the text generated after each context, up to the first stop string."""
        texts = []
        for request in requests:
            context, options = request.args
            ends = [options["until"]] if isinstance(options.get("until"), str) else list(options.get("until") or ())
            prompt = (self.tok_encode(context) or [self.eot_token_id])[-self.longest :]
            temperature = float(options.get("temperature") or 0.0) if options.get("do_sample") else 0.0
            ids = generate(
                self.model,
                [prompt],
                num_tokens=int(options.get("max_gen_toks") or MOST_NEW_TOKENS),
                temperature=temperature,
                top_p=float(options.get("top_p") or 1.0),
            )[0]
            text = self.text.decode(ids)
            texts.append(text[: min([text.find(end) for end in ends if end and end in text], default=len(text))])
        return texts

    @torch.inference_mode()
    def _scored(self, pairs: Sequence[tuple[list[int], list[int]]], start: int) -> Iterator[tuple[float, bool]]:
        """Yield the log-likelihood of each continuation of a batch, and whether each of its tokens is the most likely
        one."""
        batch = pairs[start : start + self._batch_size]
        rows = [(context + continuation)[-(self.longest + 1) :] for context, continuation in batch]
        width = max(map(len, rows)) - 1
        device = self.model.embedding.weight.device
        tokens = torch.tensor([row[:-1] + [0] * (width + 1 - len(row)) for row in rows], device=device)
        scores = self.model(tokens).logits.float().log_softmax(-1).cpu()
        for row, (_, continuation), table in zip(rows, batch, scores):
            targets = torch.tensor(row[-len(continuation) :][-(len(row) - 1) :])
            log_probabilities = table[len(row) - 1 - len(targets) : len(row) - 1]
            likelihood = log_probabilities.gather(1, targets[:, None]).sum()
            yield float(likelihood), bool((log_probabilities.argmax(1) == targets).all())
