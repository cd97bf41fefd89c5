"""Compaction inside a worker: importance during a forward, then KV in other blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from vllm.distributed import get_tensor_model_parallel_world_size, tensor_model_parallel_all_reduce

from kvstore.operator.apply import relocate
from kvstore.operator.layout import Layout
from prefill_workers.compaction.plan import CompactionPlan
from prefill_workers.compaction.reduction import anchors, buckets, coverage, importance, means
from prefill_workers.engine.attention import paid
from prefill_workers.engine.batch import Observing

_OBSERVED = 256  # links whose importance is remembered: a link is compacted soon after the forward that ends it
_BOUNDED = ("sliding_window", "logits_soft_cap", "alibi_slopes", "sinks")  # what an impl knows of bounded attention


class Compactor:
    """Reduction of sequences' KV on one rank.

    Args:
        layers: vLLM's attention layers.
        stored: `KVBlocks.stored`.
        update: `AttentionLayers.update`.
        latent: MLA, whose queries are compared with latents.

    Attributes:
        layout: this rank's features; set before anything is observed.
    """

    layout: Layout

    def __init__(
        self,
        layers: Sequence[Any],
        stored: Callable[[Sequence[int], int, int, Sequence[int]], Iterator[Tensor]],
        update: Callable[[int, Tensor, Tensor], None],
        dtype: torch.dtype,
        *,
        latent: bool,
    ) -> None:
        self._layers, self._stored, self._update, self._dtype, self._latent = layers, stored, update, dtype, latent
        self._scores: dict[str, Tensor] = {}  # [layers, tokens] by link; oldest first

    @property
    def refusal(self) -> str | None:
        """Reason why the model's KV cannot be reduced; None if it can.

        Where attention depends on the distance of entries beyond their rotation, fewer entries are other distances.
        """
        for name in _BOUNDED:
            values = {str(getattr(layer.impl, name, None)) for layer in self._layers}
            if values - {"None", "-1", "(-1, -1)", "0", "0.0"}:
                return f"its attention has {name.replace('_', ' ')}, which fewer entries would shift"
        if self._latent and not hasattr(self._layers[0], "W_UK_T"):
            return "this backend of latent attention does not tell how queries compare with latents"
        return None

    @contextmanager
    def observing(self, observed: Sequence[Observing]) -> Iterator[None]:
        """Add up, in every layer of a forward, the attention that `observed` tokens pay (eq. 1).

        What was observed of the same links before is forgotten.
        """
        for one in observed:
            self._scores.pop(one.link, None)
        with ExitStack() as hooks:
            for index, layer in enumerate(self._layers if observed else ()):
                hook = layer.register_forward_hook(partial(self._observe, index, observed))
                hooks.callback(hook.remove)
            yield
        while len(self._scores) > _OBSERVED:
            del self._scores[next(iter(self._scores))]

    def _observe(self, layer: int, observed: Sequence[Observing], module: Any, given: Any, output: Any) -> None:
        queries = given[0]
        for one in observed:
            count = one.first + len(one.tokens)
            (rows,) = self._stored(one.blocks, 0, count, [layer])
            mine = queries[one.tokens.start : one.tokens.stop]
            if self._latent:
                mine, keys = self._absorbed(module, mine), rows.float()[:, None]
            else:
                heads = self.layout.segments[0]
                keys = rows[:, : heads.features].float().unflatten(1, (heads.heads, heads.width))
            scores = importance(paid(mine, keys, one.first, float(module.impl.scale)))
            whole = self._scores.setdefault(one.link, scores.new_zeros(len(self._layers), 0))
            if count > whole.shape[1]:
                whole = self._scores[one.link] = torch.nn.functional.pad(whole, (0, count - whole.shape[1]))
            whole[layer, :count] += scores

    @staticmethod
    def _absorbed(module: Any, queries: Tensor) -> Tensor:
        """Queries [tokens, heads · (latent + rope)] as they meet latents: W_UK is taken into them."""
        nope, rope = queries.float().split([module.impl.qk_nope_head_dim, module.impl.qk_rope_head_dim], dim=-1)
        return torch.cat([torch.einsum("thp,hpl->thl", nope, module.W_UK_T.float()), rope], dim=-1).flatten(1)

    def take(self, link: str) -> Tensor | None:
        """Importance [layers, tokens] of a link's tokens, which is forgotten here.

        It is the mean over the heads of all ranks; None: nothing was observed.
        """
        scores, ranks = self._scores.pop(link, None), get_tensor_model_parallel_world_size()
        return tensor_model_parallel_all_reduce(scores) / ranks if scores is not None and ranks > 1 else scores

    def give(self, link: str, scores: Tensor) -> None:
        """Have `compact` go by other importance, equal on all ranks."""
        self._scores[link] = scores

    def _coverage(self, blocks: Sequence[int], plan: CompactionPlan) -> Tensor:
        """Scores [layers, tokens], all layers alike, by the first layer's unrotated features.

        That layer has read nothing but the token itself, which is what has to be told apart.
        """
        (rows,) = self._stored(blocks, 0, plan.tokens, [0])
        parts = zip(self.layout.segments, self.layout.split(rows), strict=True)
        content = torch.cat([part for segment, part in parts if not segment.rotary], dim=-1)
        ranks = get_tensor_model_parallel_world_size()
        found = coverage(content, plan, tensor_model_parallel_all_reduce if ranks > 1 else lambda part: part)
        return found.expand(len(self._layers), -1)

    def compact(self, link: str, blocks: Sequence[int], plan: CompactionPlan, slots: Tensor) -> None:
        """Write the sequence's KV in `plan.kept` entries to `slots`, keys moved by `plan.shift`.

        Ranks choose the same anchors, by the importance of all heads. A link of which nothing was observed, whose
        prompt ends without a forward, keeps its last tokens.
        """
        scores = self._coverage(blocks, plan) if plan.groups else self.take(link)
        if scores is None:
            scores = torch.arange(plan.tokens, device=slots.device).expand(len(self._layers), -1)
        at = anchors(scores, plan)
        bucket = buckets(at, plan) if plan.merges else None
        features = sum(segment.features for segment in self.layout.segments)
        kv = torch.empty(len(self._layers), plan.kept, features, dtype=self._dtype, device=slots.device)
        for layer, rows in enumerate(self._stored(blocks, 0, plan.tokens, range(len(self._layers)))):
            kept = rows.to(self._dtype)[at[layer]] if bucket is None else means(rows, bucket[layer], plan.kept)
            kv[layer].copy_(kept)
        for layer, rows in enumerate(relocate(kv, plan.shift, self.layout, out=kv)):
            self._update(layer, rows, slots)
