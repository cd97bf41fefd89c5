"""Asking a model about pages whose KV was put together in any way: a real engine, driven by hand.

A prompt is laid out as the server lays it out. Its pages' KV may be given; everything else is computed over it in one
forward, as the linker computes the text of a request (DESIGN, "Selective attention in one step").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image
from torch import Tensor

from serving.bench.requests import data_url

if TYPE_CHECKING:
    from prefill_workers.engine import PrefillEngine
    from prefill_workers.plan import ChunkSpan
    from prefill_workers.sequence import LinkSequence

_HEAD, _TAIL = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
_BUDGET = 4096  # tokens of one forward


@dataclass(frozen=True, eq=False)
class Page:
    """One picture as a chunk: its tokens with their delimiters, and what a forward needs to compute them."""

    token_ids: tuple[int, ...]
    span: ChunkSpan  # as if the chunk began at token 0
    embeddings: Tensor

    def chunk(self, start: int) -> ChunkSpan:
        """The chunk in a prompt where it begins at token `start`."""
        span = self.span
        return replace(span, start=start, stop=start + span.stop, first=start + span.first)


@dataclass(frozen=True, eq=False)
class Place:
    """A page in a prompt: the token at which it begins, and that token's position."""

    page: Page
    start: int
    position: int

    @property
    def stop(self) -> int:
        """The token behind its last."""
        return self.start + len(self.page.token_ids)


@dataclass(frozen=True, eq=False)
class Prompt:
    """A prompt with its answer behind it: the last `answers` tokens but one predict the answer, token by token."""

    token_ids: Tensor
    positions: Tensor
    places: tuple[Place, ...]
    answer: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(eq=False)
class Read:
    """What a prefill of a prompt gave.

    `answers`: log-probabilities [answer tokens, vocabulary] where the answer is predicted; `pages`: KV of the places
    that were to be kept, in the canonical frame, [layers, tokens, features].
    """

    answers: Tensor
    pages: list[Tensor] = field(default_factory=list)


class Reader:
    """One checkpoint on an engine of its own, to be closed after use."""

    def __init__(self, checkpoint: Path, trust_remote_code: bool = False, dtype: str = "float32") -> None:
        from vllm.renderers import renderer_from_config

        from prefill_workers.engine import EngineSpec, PrefillEngine
        from serving.segments import Delimiters

        spec = EngineSpec(
            model=str(checkpoint), dtype=dtype, max_model_len=4096, max_batch_tokens=2 * _BUDGET, hand_off=False,
            trust_remote_code=trust_remote_code,
        )  # fmt: skip
        self.checkpoint = checkpoint
        self.engine: PrefillEngine = PrefillEngine(spec)
        self._renderer: Any = renderer_from_config(self.engine.config)
        self._tokens = self._renderer.get_tokenizer()
        self._delimiters = Delimiters.of(self.engine.config.model_config)

    def close(self) -> None:
        """Stop the engine."""
        self.engine.shutdown()

    # -- prompts ------------------------------------------------------------------------------------------------------

    def pages(self, pictures: Sequence[Image.Image]) -> list[Page]:
        """Pictures as chunks, with their embeddings."""
        segments = self.rendered(pictures, "?")
        embeddings = self.engine.encode(segments.pixels(range(len(pictures))))
        found = []
        for span, rows in zip(segments.chunks, embeddings, strict=True):
            moved = replace(span, start=0, stop=len(span), first=span.first - span.start)
            found.append(Page(tuple(segments.token_ids[span.start : span.stop]), moved, rows))
        return found

    def rendered(self, pictures: Sequence[Image.Image], text: str) -> Any:
        """A chat turn of pictures and text as the server renders it (`serving.segments.Segments`)."""
        from vllm.renderers import ChatParams

        from serving.segments import segment

        content = [
            *({"type": "image_url", "image_url": {"url": data_url(picture)}} for picture in pictures),
            {"type": "text", "text": text},
        ]
        template = {"add_generation_prompt": True, "tokenize": False}
        _, (rendered,) = self._renderer.render_chat(
            [[{"role": "user", "content": content}]], ChatParams(chat_template_kwargs=template), skip_mm_cache=True
        )
        return segment(rendered, self._delimiters)

    def prompt(
        self,
        pages: Sequence[Page],
        question: str,
        answer: str,
        system: str = "",
        before: Sequence[str] = (),
    ) -> Prompt:
        """A chat turn of pages and a question. `system`: a system prompt; `before`: other text before each page."""
        head = f"<|im_start|>system\n{system}<|im_end|>\n" if system else ""
        tokens = self.ids(head + _HEAD)
        starts = []
        for i, page in enumerate(pages):
            tokens += self.ids(before[i]) if i < len(before) and before[i] else []
            starts.append(len(tokens))
            tokens += page.token_ids
        answered = self.ids(answer)
        tokens += self.ids(question + _TAIL) + answered[:-1]
        items = [
            (page.span.modality, page.span.grid, start + page.span.first, page.span.count)
            for page, start in zip(pages, starts, strict=True)
        ]
        positions, lag = self.engine.positions(tokens, items)
        positions = positions + lag
        first = positions if positions.dim() == 1 else positions[0]
        places = tuple(Place(page, start, int(first[start])) for page, start in zip(pages, starts, strict=True))
        return Prompt(torch.tensor(tokens, dtype=torch.int32), positions, places, tuple(answered))

    def ids(self, text: str) -> list[int]:
        """Token ids of text, with no special tokens added."""
        return list(self._tokens(text, add_special_tokens=False)["input_ids"]) if text else []

    def text(self, token: int) -> str:
        """What a token reads as."""
        return str(self._tokens.decode([token]))

    # -- KV -----------------------------------------------------------------------------------------------------------

    def alone(self, places: Sequence[Place], prefix: Sequence[int] = ()) -> list[Tensor]:
        """KV of every place's page computed by itself, [layers, tokens, features]: KV(B|∅), or behind neutral text.

        With `prefix` the page is computed behind these tokens and moved to position 0.
        """
        from kvstore.patch import relocate

        prompts = []
        for place in places:
            page = place.page
            tokens = [*prefix, *page.token_ids]
            item = (page.span.modality, page.span.grid, len(prefix) + page.span.first, page.span.count)
            positions, _ = self.engine.positions(tokens, [item])
            at = Place(page, len(prefix), int(positions.reshape(-1, len(tokens))[0, len(prefix)]))
            prompts.append(Prompt(torch.tensor(tokens, dtype=torch.int32), positions, (at,), (0,)))
        found = []
        for batch in self._batches(prompts):
            work = [(self._sequence(prompt, blocks), _whole(len(prompt))) for prompt, blocks in batch]
            self.engine.forward(work)
            for prompt, blocks in batch:
                (place,) = prompt.places
                kv = self.engine.read_kv(blocks, place.start, len(place.page.token_ids))
                found.append(relocate(kv, -place.position, self.engine.layout))
        return found

    def exact(self, prompts: Sequence[Prompt], keep: Sequence[int] | None = None) -> list[Read]:
        """Every prompt by a full prefill. `keep`: of which places the KV is read; None: of all."""
        return self.over(prompts, [[None] * len(prompt.places) for prompt in prompts], keep=keep)

    def over(
        self,
        prompts: Sequence[Prompt],
        pages: Sequence[Sequence[Tensor | None]],
        recomputed: Sequence[Sequence[Tensor | None]] | None = None,
        keep: Sequence[int] | None = (),
    ) -> list[Read]:
        """Every prompt over given KV of its pages; what is None is computed, all in one forward.

        Args:
            pages: per prompt and place, KV in the canonical frame or None.
            recomputed: per prompt and place, which of a page's tokens (sorted) are computed again in context.
            keep: of which places the KV is read afterwards; None: of all.
        """
        from kvstore.patch import apply, relocate

        layout, reads = self.engine.layout, list[Read]()
        for batch in self._batches(prompts):
            given: list[list[tuple[int, int]]] = []
            for i, (prompt, blocks) in enumerate(batch, start=len(reads)):
                kept: list[tuple[int, int]] = []
                for j, (place, kv) in enumerate(zip(prompt.places, pages[i], strict=True)):
                    if kv is None:
                        continue
                    moved = apply(kv, None, place.position, layout)
                    self.engine.write_kv(moved, self.engine.slots(blocks, place.start, place.stop))
                    kept += _kept(place.start, place.stop, recomputed[i][j] if recomputed is not None else None)
                given.append(kept)
            for (prompt, blocks), answered in zip(batch, self._answers(batch, given), strict=True):
                read = Read(answered)
                for place in prompt.places if keep is None else [prompt.places[index] for index in keep]:
                    kv = self.engine.read_kv(blocks, place.start, place.stop - place.start)
                    read.pages.append(relocate(kv, -place.position, layout))
                reads.append(read)
        return reads

    def _answers(
        self, batch: Sequence[tuple[Prompt, range]], given: Sequence[Sequence[tuple[int, int]]]
    ) -> list[Tensor]:
        """Compute everything that is not given; log-probabilities where each prompt's answer is predicted."""
        from prefill_workers.sequence import Run, complement

        work, sizes = [], []
        for (prompt, blocks), kept in zip(batch, given, strict=True):
            first = len(prompt) - len(prompt.answer)
            runs = complement([Run(*span) for span in kept], first)
            runs += [Run(i, i + 1) for i in range(first, len(prompt))]
            work.append((self._sequence(prompt, blocks), runs))
            sizes.append(len(runs))
        rows = self.engine.logits(work).float().log_softmax(-1).split(sizes)
        return [part[-len(prompt.answer) :] for part, (prompt, _) in zip(rows, batch, strict=True)]

    def _batches(self, prompts: Sequence[Prompt]) -> list[list[tuple[Prompt, range]]]:
        """The prompts in order, as many to a forward as its budget and the KV pool hold, each with its blocks."""
        batches: list[list[tuple[Prompt, range]]] = []
        used = tokens = 0
        for prompt in prompts:
            blocks = -(-len(prompt) // self.engine.block_size)
            if blocks >= self.engine.num_blocks:
                raise ValueError(f"a prompt of {len(prompt)} tokens does not fit the engine's KV pool")
            if not batches or tokens + len(prompt) > _BUDGET or 1 + used + blocks > self.engine.num_blocks:
                batches.append([])
                used = tokens = 0
            batches[-1].append((prompt, range(1 + used, 1 + used + blocks)))
            used, tokens = used + blocks, tokens + len(prompt)
        return batches

    def _sequence(self, prompt: Prompt, blocks: range) -> LinkSequence:
        from prefill_workers.sequence import Embedded, LinkSequence

        embedded = tuple(
            Embedded(place.start + place.page.span.first, place.page.embeddings, place.page.span.is_embed)
            for place in prompt.places
        )
        return LinkSequence(prompt.token_ids, prompt.positions, blocks, embedded)


def _whole(length: int) -> list[Any]:
    from prefill_workers.sequence import Run

    return [Run(0, length)]


def _kept(start: int, stop: int, again: Tensor | None) -> list[tuple[int, int]]:
    """The stretches of tokens `start` up to `stop` that are not computed `again` (indices within, sorted)."""
    edges = [start]
    for index in again.tolist() if again is not None else ():
        edges += [start + index, start + index + 1]
    edges.append(stop)
    return [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]
