"""The first token, drawn where a prompt is linked: the likeliest, or as often as vLLM's sampler would give it."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from vllm.model_executor.layers.utils import apply_penalties
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

from prefill_workers.engine.sampling import are_finite, draw
from prefill_workers.protocol import Sampling

VOCABULARY = 40
DRAWS = 4000
PROMPT = torch.tensor([3, 3, 7, 151_652, -1], dtype=torch.int32)  # placeholders may lie outside the vocabulary


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(5)) * 2


def expected(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Probabilities of all tokens, from vLLM's own steps."""
    scores = logits.clone()[None]
    said = PROMPT[(PROMPT >= 0) & (PROMPT < VOCABULARY)].long()[None]
    none, penalty = torch.zeros(1), torch.tensor([sampling.repetition_penalty])
    apply_penalties(scores, said, torch.full((1, 1), VOCABULARY), none, none, penalty)
    scores /= sampling.temperature
    probabilities = scores.softmax(-1)
    scores[probabilities < sampling.min_p * probabilities.max()] = -torch.inf
    k = torch.tensor([min(sampling.top_k or VOCABULARY, VOCABULARY)])
    return apply_top_k_top_p_pytorch(scores, k, torch.tensor([sampling.top_p])).softmax(-1)[0]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0),
        Sampling(temperature=0.5),
        Sampling(temperature=1.5, top_k=7),
        Sampling(temperature=1.0, top_p=0.8),
        Sampling(temperature=1.0, top_k=12, top_p=0.7),
        Sampling(temperature=2.0, min_p=0.1),
        Sampling(temperature=1.2, min_p=0.05, top_k=9, top_p=0.9, repetition_penalty=1.6),
        Sampling(temperature=1.0, top_k=500),
        Sampling(temperature=1.0, top_p=1e-6),
    ],
    ids=str,
)
def test_tokens_are_drawn_as_often_as_vllm_draws_them(logits: torch.Tensor, sampling: Sampling):
    torch.manual_seed(3)
    found = Counter(draw(logits, sampling, PROMPT) for _ in range(DRAWS))
    share = torch.tensor([found[token] / DRAWS for token in range(VOCABULARY)])
    wanted = expected(logits, sampling)
    assert not share[wanted == 0].any()
    deviation = (wanted * (1 - wanted) / DRAWS).sqrt()
    assert ((share - wanted).abs() <= 4.5 * deviation + 1 / DRAWS).all()


def test_logits_are_finite_unless_one_is_nan_or_infinite_or_all_are_ruled_out():
    rows = torch.zeros(5, 4)
    rows[1, 2], rows[2, 0], rows[3], rows[4, 1] = torch.nan, torch.inf, -torch.inf, -torch.inf
    assert are_finite(rows) == [True, False, False, False, True]


def test_without_a_temperature_it_is_the_likeliest(logits: torch.Tensor):
    assert draw(logits, Sampling(), PROMPT) == int(logits.argmax())


def test_none_but_allowed_tokens_are_drawn(logits: torch.Tensor):
    ranked = logits.argsort(descending=True).tolist()
    allowed = (ranked[-1], ranked[20], ranked[9])
    assert draw(logits, Sampling(allowed_token_ids=allowed), PROMPT) == ranked[9]
    torch.manual_seed(3)
    drawn = {draw(logits, Sampling(temperature=5.0, top_k=12, allowed_token_ids=allowed), PROMPT) for _ in range(200)}
    assert drawn == set(allowed)


def test_what_the_prompt_says_can_be_penalised(logits: torch.Tensor):
    logits[[3, 9]] = torch.tensor([20.0, 15.0])
    assert draw(logits, Sampling(), PROMPT) == 3
    assert draw(logits, Sampling(repetition_penalty=2.0), PROMPT) == 9
    assert logits[3] == 20, "the logits belong to the caller"


def test_a_seed_gives_the_same_token_again(logits: torch.Tensor):
    def drawn(seed: int) -> list[int]:
        return [draw(logits, Sampling(temperature=1.0, seed=seed), PROMPT) for _ in range(3)]

    assert all(len(set(drawn(seed))) == 1 for seed in (0, 1, 2**63 - 1, -4))
    assert len({drawn(seed)[0] for seed in range(40)}) > 5
