"""Segments: a rendered prompt as text runs and chunks, in plain values a prefill worker understands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm.config import ModelConfig
from vllm.multimodal.inputs import MultiModalKwargsItem

from prefill_workers.plan import ChunkSpan


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
    """A prompt cut into chunks and what lies between them, with the processed pixels of each chunk."""

    token_ids: list[int]
    chunks: tuple[ChunkSpan, ...]
    items: tuple[tuple[str, MultiModalKwargsItem], ...]


def segment(engine_input: Any, delimiters: Delimiters) -> Segments:
    """Cut vLLM's rendered prompt (`vllm.inputs.EngineInput`) into segments.

    vLLM's item hashes are our content ids: the API hands them to the renderer as the items' uuids.
    """
    token_ids = list(engine_input["prompt_token_ids"])
    if engine_input.get("type") != "multimodal":
        return Segments(token_ids, (), ())
    found: list[tuple[ChunkSpan, tuple[str, MultiModalKwargsItem]]] = []
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
            found.append((span, (modality, item)))
    found.sort(key=lambda pair: pair[0].start)
    return Segments(token_ids, tuple(span for span, _ in found), tuple(item for _, item in found))


def _widen(token_ids: Sequence[int], start: int, stop: int, delimiters: Delimiters) -> tuple[int, int]:
    if start and stop < len(token_ids) and token_ids[start - 1] in delimiters.opening:
        start -= 1
        if token_ids[stop] in delimiters.closing:
            stop += 1
    return start, stop
