"""Sampling: greedy and seeded draws, and contexts that exceed the model's."""

from __future__ import annotations

import pytest
import torch

from moesaic.models.config import ModelConfig, MoEConfig
from moesaic.models.gpt import GPT, generate

VOCABULARY = 48
PROMPT = [3, 1, 4]


@pytest.fixture
def model() -> GPT:
    torch.manual_seed(0)
    shape = ModelConfig(
        dim=16, num_layers=2, num_heads=2, seq_len=8, moe=MoEConfig(num_experts=4, hidden=16)
    )
    model = GPT(shape, VOCABULARY).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2 and name != "embedding.weight":
                parameter.mul_(50)
    return model


def draw(model: GPT, prompt: list[int] = PROMPT, num_tokens: int = 5, **options) -> list[int]:
    return generate(model, [prompt], num_tokens=num_tokens, **options)[0]


def test_greedy_takes_the_likeliest_token_of_the_whole_context(model):
    context = list(PROMPT)
    for _ in range(5):
        context.append(int(model(torch.tensor([context])).logits[0, -1].argmax()))
    assert draw(model, temperature=0) == context[3:]
    assert draw(model, temperature=0, seed=1) == context[3:]
    assert len(set(context[3:])) > 1


def test_a_seed_gives_the_same_draws(model):
    first = draw(model, num_tokens=20, seed=3)
    torch.manual_seed(99)
    assert draw(model, num_tokens=20, seed=3) == first
    assert draw(model, num_tokens=20, seed=4) != first
    assert all(0 <= token < VOCABULARY for token in first)


def test_drawing_leaves_the_global_generator_alone(model):
    before = torch.get_rng_state()
    draw(model)
    assert torch.equal(torch.get_rng_state(), before)


def test_top_k_draws_among_the_likeliest(model):
    logits = model(torch.tensor([PROMPT])).logits[0, -1]
    likeliest = set(logits.topk(3).indices.tolist())
    drawn = {
        draw(model, num_tokens=1, top_k=3, temperature=50.0, seed=seed)[0] for seed in range(25)
    }
    assert drawn == likeliest
    everything = {
        draw(model, num_tokens=1, top_k=1000, temperature=50.0, seed=seed)[0] for seed in range(20)
    }
    assert len(everything) > 10


def test_top_p_draws_among_the_likeliest_that_make_it_up(model):
    scores = model(torch.tensor([PROMPT])).logits[0, -1] / 20
    actual, order = scores.softmax(-1).sort(descending=True)
    few = int((actual.cumsum(0) < 0.2).sum()) + 1
    drawn = {
        draw(model, num_tokens=1, top_p=0.2, temperature=20.0, seed=seed)[0] for seed in range(25)
    }
    assert drawn <= set(order[:few].tolist())
    assert 1 < len(drawn) <= few < VOCABULARY


def test_a_batch_draws_what_each_prompt_draws_alone(model):
    prompts = [[3, 1, 4], [1], [5, 9, 2, 6, 5]]
    together = generate(model, prompts, num_tokens=3, top_p=0.9, temperature=2.0, seed=5)
    assert together == [
        draw(model, prompt, 3, top_p=0.9, temperature=2.0, seed=5) for prompt in prompts
    ]


def test_a_full_context_goes_on_from_its_later_half(model):
    tokens = draw(model, num_tokens=14, temperature=0)
    assert len(tokens) == 14
    context = PROMPT + tokens
    expected = int(model(torch.tensor([context[5:9]])).logits[0, -1].argmax())
    assert context[9] == expected


def test_a_prompt_longer_than_the_model_keeps_its_end(model):
    long = list(range(30))
    assert draw(model, prompt=long, temperature=0) == draw(model, prompt=long[-8:], temperature=0)


def test_nothing_asked_nothing_drawn(model):
    assert draw(model, num_tokens=0) == []
