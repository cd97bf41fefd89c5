"""The first token of an answer, drawn where its prompt is linked.

The forward that ends a prompt has the hidden state that the first token comes from. Drawn there, the token is with the
client while the KV is still handed off; the decode engine is given it as the prompt's last token and goes on behind it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from prefill_workers.protocol import Sampling


def are_finite(logits: Tensor) -> list[bool]:
    """Per row of logits [rows, vocabulary]: True unless one is NaN or +inf, or all are -inf.

    A model may rule tokens out by -inf.
    """
    return logits.amax(-1).isfinite().tolist()  # NaN is the largest of any


def draw(logits: Tensor, sampling: Sampling, prompt: Tensor) -> int:
    """A token from the logits [vocabulary] fp32 behind `prompt` [tokens], its token ids.

    In the order of vLLM's sampler: allowed ids, penalty, temperature, min-p, top-k, top-p. A seed gives the same token
    again, but not the one that vLLM draws from it.
    """
    if sampling.allowed_token_ids:
        allowed = torch.tensor(sampling.allowed_token_ids)
        logits = torch.full_like(logits, -torch.inf).index_copy(0, allowed, logits[allowed])
    if sampling.repetition_penalty != 1.0:
        logits = _penalised(logits, sampling.repetition_penalty, prompt)
    if sampling.temperature == 0:
        return int(logits.argmax())
    probabilities = (logits / sampling.temperature).softmax(-1)
    tokens: Tensor | None = None  # what the probabilities are of, the likeliest first; None: of all tokens, as they are
    if sampling.min_p > 0:
        probabilities = probabilities.where(probabilities >= sampling.min_p * probabilities.max(), 0)
    if 0 < sampling.top_k < len(probabilities):
        probabilities, tokens = probabilities.topk(sampling.top_k)
    if sampling.top_p < 1:
        if tokens is None:
            probabilities, tokens = probabilities.sort(descending=True)
        share = probabilities.cumsum(-1) / probabilities.sum()
        before = share.roll(1)  # of the likelier ones
        before[0] = 0
        probabilities = probabilities.where(before < sampling.top_p, 0)
    waits = torch.empty_like(probabilities).exponential_(generator=_generator(sampling.seed))
    drawn = int((probabilities / waits).argmax())  # the first of races at these rates: one draw from them
    return drawn if tokens is None else int(tokens[drawn])


def _penalised(logits: Tensor, penalty: float, prompt: Tensor) -> Tensor:
    """The logits of tokens that the prompt has, made less likely."""
    said = prompt[(prompt >= 0) & (prompt < len(logits))].long().unique()
    scores = logits[said]
    return logits.index_copy(0, said, torch.where(scores > 0, scores / penalty, scores * penalty))


def _generator(seed: int | None) -> torch.Generator | None:
    if seed is None:
        return None
    # not the seed itself: the decode engine draws the second token with that, which would depend on the first one
    return torch.Generator().manual_seed((seed * 0x9E3779B97F4A7C15 + 1) % 2**63)
