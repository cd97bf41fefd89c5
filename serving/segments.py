"""Segments: a rendered prompt as text runs and chunks, in plain values a prefill worker understands."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.config import ModelConfig
from vllm.multimodal.inputs import MultiModalKwargsItem

from prefill_workers.plan import TEXT, ChunkSpan
from serving.documents import Document, places


@dataclass(frozen=True)
class Delimiters:
    """Token ids that open and close a chunk around its placeholders; empty where a family has none."""

    opening: frozenset[int]
    closing: frozenset[int]

    @classmethod
    def of(cls, model: ModelConfig) -> Delimiters:
        """Read the delimiters off a checkpoint's configuration."""
        config = model.hf_config
        opening = (getattr(config, name, None) for name in ("vision_start_token_id", "boi_token_id"))
        closing = (getattr(config, name, None) for name in ("vision_end_token_id", "eoi_token_id"))
        return cls(frozenset(t for t in opening if t is not None), frozenset(t for t in closing if t is not None))


@dataclass(frozen=True)
class Segments:
    """A prompt cut into chunks and what lies between them, with the processed pixels of each (None: a text chunk)."""

    token_ids: list[int]
    chunks: tuple[ChunkSpan, ...]
    items: tuple[tuple[str, MultiModalKwargsItem] | None, ...]

    def pixels(self, chunks: Sequence[int]) -> list[tuple[str, MultiModalKwargsItem]]:
        """What the vision encoder takes of these chunks, none of which may be a text chunk."""
        return [item for i in chunks if (item := self.items[i]) is not None]


def segment(engine_input: Any, delimiters: Delimiters, documents: Sequence[Document] = ()) -> Segments:
    """Cut vLLM's rendered prompt (`vllm.inputs.EngineInput`) into segments.

    vLLM's item hashes are our content ids: the API hands them to the renderer as the items' uuids. `documents` are the
    text chunks that were spliced into the prompt, in order.
    """
    token_ids = list(engine_input["prompt_token_ids"])
    found: list[tuple[ChunkSpan, tuple[str, MultiModalKwargsItem] | None]] = []
    for document, start in places(token_ids, documents):
        count = len(document.token_ids)
        found.append((ChunkSpan(document.content, TEXT, start, start + count, start, count), None))
    if engine_input.get("type") == "multimodal":
        found += _multimodal(engine_input, token_ids, delimiters)
    found.sort(key=lambda pair: pair[0].start)
    return Segments(token_ids, tuple(span for span, _ in found), tuple(item for _, item in found))


def _multimodal(
    engine_input: Any, token_ids: Sequence[int], delimiters: Delimiters
) -> Iterator[tuple[ChunkSpan, tuple[str, MultiModalKwargsItem]]]:
    for modality, ranges in engine_input["mm_placeholders"].items():
        hashes = engine_input["mm_hashes"][modality]
        items = engine_input["mm_kwargs"][modality]
        for place, content, item in zip(ranges, hashes, items, strict=True):
            start, stop = _widen(token_ids, place.offset, place.offset + place.length, delimiters)
            grid = MultiModalKwargsItem({k: v for k, v in item.items() if v.field.keep_on_cpu})
            span = ChunkSpan(
                content=content,
                modality=modality,
                start=start,
                stop=stop,
                first=place.offset,
                count=place.length,
                grid=grid,
                is_embed=place.is_embed,
            )
            yield span, (modality, item)


def _widen(token_ids: Sequence[int], start: int, stop: int, delimiters: Delimiters) -> tuple[int, int]:
    if start and stop < len(token_ids) and token_ids[start - 1] in delimiters.opening:
        start -= 1
        if token_ids[stop] in delimiters.closing:
            stop += 1
    return start, stop
