"""Decoding over chosen KV entries in plain torch: transformers' model, without blocks, runs or shifts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM, AutoModelForImageTextToText, DynamicCache

from infra.checkpoints import checkpoint_path
from infra.families import Family
from prefill_workers.sequence import LinkSequence, Run

Entries = list[tuple[Tensor, Tensor]]  # of each layer keys and values, [1, heads, entries, width]


@dataclass(frozen=True)
class Prompt:
    """A prompt's KV, and by how much each of its tokens attends to each other: [layers, tokens, tokens]."""

    kv: Entries
    attention: Tensor


class Lazy:
    """Attention by the definition of visual lazy attention (q_cache.md eq. 7), of one prompt at a time."""

    def __init__(self, leaders: dict[int, int], visual: Tensor) -> None:
        self._leaders, self._visual = leaders, visual
        self._noted: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float, **_: Any
    ) -> tuple[Tensor, Tensor]:
        layer = module.layer_idx
        if layer in self._leaders:
            rows = self._visual[None, None, :, None]
            led = self._noted[self._leaders[layer]]
            query, key = (torch.where(rows, other, own) for own, other in zip((query, key), led, strict=True))
        self._noted[layer] = query, key
        groups, n = query.shape[1] // key.shape[1], query.shape[2]
        keys, values = (x.repeat_interleave(groups, 1) for x in (key, value))
        scores = query @ keys.transpose(-1, -2) * scaling
        scores = scores.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf)
        shares = scores.softmax(-1)
        return (shares @ values).transpose(1, 2).contiguous(), shares


class TorchModel:
    """A family's tiny model, in fp32."""

    def __init__(self, family: Family, attention: Any = None) -> None:
        """`attention`: a function in place of transformers' own."""
        kind = AutoModelForImageTextToText if family.image else AutoModelForCausalLM
        path = checkpoint_path(family.checkpoint)
        model: Any = kind.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
        if attention is not None:
            AttentionInterface.register("ours", attention)
            model.model.language_model.set_attn_implementation("ours")
        self._text = model.model.language_model if family.image else model.model
        self._head = model.lm_head

    @torch.inference_mode()
    def logprobs(self, sequence: LinkSequence) -> Tensor:
        """Log-probabilities [vocabulary] behind a prompt."""
        return self._head(self._forward(sequence).last_hidden_state)[0, -1].float().log_softmax(-1)

    @torch.inference_mode()
    def prompt(self, sequence: LinkSequence) -> Prompt:
        """The whole prompt, at the positions that the linker computes it at."""
        out = self._forward(sequence, output_attentions=True)
        kv = [(layer.keys, layer.values) for layer in out.past_key_values.layers]
        return Prompt(kv, torch.stack([part[0].mean(0) for part in out.attentions]))

    def _forward(self, sequence: LinkSequence, **options: Any) -> Any:
        embeddings = self._text.get_input_embeddings()(sequence.token_ids.long())
        rows, mask = sequence.embedding_rows(torch.arange(len(sequence)))
        if rows is not None:
            embeddings[mask] = rows.float()
        positions = sequence.positions[:, None] if sequence.positions.dim() == 2 else sequence.positions[None]
        return self._text(inputs_embeds=embeddings[None], position_ids=positions, use_cache=True, **options)

    @torch.inference_mode()
    def decode(
        self,
        kv: Entries,
        token: int,
        position: int,
        steps: int,
        axes: int,
        seen: Callable[[int], Tensor] = torch.arange,
    ) -> tuple[list[int], Tensor]:
        """Greedy tokens behind `token`, which stands at `position`, and their log-probabilities [steps, vocabulary].

        `seen`: of so many entries, the indices of those that a step attends to.
        """
        ids, logprobs = [], []
        for step in range(steps):
            count = kv[0][0].shape[2]
            at = seen(count) if step else torch.arange(count)
            cache = DynamicCache()
            for layer, (keys, values) in enumerate(kv):
                cache.update(keys[:, :, at], values[:, :, at], layer)
            embeddings = self._text.get_input_embeddings()(torch.tensor([[token]]))
            places = torch.full((axes, 1, 1) if axes > 1 else (1, 1), position + step)
            out = self._text(inputs_embeds=embeddings, position_ids=places, past_key_values=cache, use_cache=True)
            new = [(layer.keys[:, :, -1:], layer.values[:, :, -1:]) for layer in out.past_key_values.layers]
            kv = [(torch.cat([k, a], 2), torch.cat([v, b], 2)) for (k, v), (a, b) in zip(kv, new, strict=True)]
            logprobs.append(self._head(out.last_hidden_state)[0, -1].float().log_softmax(-1))
            token = int(logprobs[-1].argmax())
            ids.append(token)
        return ids, torch.stack(logprobs)


def evicted(prompt: Prompt, kept: int, last: int, observers: int, first: int = 4) -> Entries:
    """The first tokens, the last ones, and those that the last `observers` attend to most."""
    entries = []
    for (keys, values), attention in zip(prompt.kv, prompt.attention, strict=True):
        scores = attention[-observers:].sum(0)
        inner = scores[first : len(scores) - last].topk(kept - first - last).indices + first
        at = sorted([*range(first), *inner.tolist(), *range(len(scores) - last, len(scores))])
        entries.append((keys[:, :, at], values[:, :, at]))
    return entries


def merged(prompt: Prompt, kept: int, images: Sequence[Run], observers: int) -> Entries:
    """All text, and of each image's tokens the means around its anchors."""
    entries, n = [], prompt.attention.shape[-1]
    inside = [t for run in images for t in range(run.start, run.stop)]
    for (keys, values), attention in zip(prompt.kv, prompt.attention, strict=True):
        scores = attention[-observers:].sum(0)
        best = {run.start + int(scores[run.start : run.stop].argmax()) for run in images}
        ranked = sorted((t for t in inside if t not in best), key=lambda t: -float(scores[t]))
        at = best | set(ranked[: kept - (n - len(inside)) - len(best)])
        groups = [[t] for t in range(n) if t not in inside]
        for run in images:
            mine = sorted(t for t in at if run.start <= t < run.stop)
            borders = [run.start, *((a + b) // 2 + 1 for a, b in itertools.pairwise(mine)), run.stop]
            groups += [list(range(a, b)) for a, b in itertools.pairwise(borders)]
        groups.sort()
        entries.append(tuple(torch.stack([x[:, :, g].mean(2) for g in groups], 2) for x in (keys, values)))
    return entries
