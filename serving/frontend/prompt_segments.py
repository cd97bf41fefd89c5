"""Segments: a rendered prompt as text runs and chunks, in plain values for prefill workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from PIL import Image
from vllm.config import ModelConfig
from vllm.multimodal.inputs import MultiModalKwargsItem
from vllm.renderers import BaseRenderer
from vllm.renderers.inputs.preprocess import parse_model_prompt

from prefill_workers.protocol import TEXT, ChunkSpan
from serving.frontend.documents import Document, places

_MODALITIES = ("image", "video")
_SAMPLE = (64, 64)  # pixels


@dataclass(frozen=True)
class Delimiters:
    """Tokens around a chunk's placeholders, which go with them wherever the chunk goes.

    `written`: modalities, and the token ids that the model's chat template writes for an item, its placeholder once.
    """

    written: tuple[tuple[str, tuple[int, ...]], ...] = ()

    @classmethod
    def of(cls, model: ModelConfig, tokenizer: Any) -> Delimiters:
        """Delimiters that a model's family writes, as this tokenizer reads them."""
        from vllm.model_executor.model_loader import get_model_cls

        family = get_model_cls(model)
        written = []
        for modality in _MODALITIES:
            try:
                text = family.get_placeholder_str(modality, 1)
            except (AttributeError, ValueError):  # it takes nothing but text, or nothing of this modality
                text = None
            if text:
                written.append((modality, tuple(tokenizer.encode(text, add_special_tokens=False))))
        return cls(tuple(written))

    def around(self, token_ids: Sequence[int], start: int, stop: int, modality: str = "") -> tuple[int, int]:
        """Span of placeholders with their delimiters; the same span where none stand around it.

        `modality`: where placeholders begin with something else, such as a video's first timestamp, its delimiters do.
        """
        for written, one in self.written:
            if token_ids[start] in one:
                places: Sequence[int] = (one.index(token_ids[start]),)
            else:
                places = range(1, len(one) - 1) if written == modality else ()
            for at in places:
                first, last = start - at, stop + len(one) - at - 1
                if first >= 0 and (*token_ids[first:start], *token_ids[stop:last]) == (*one[:at], *one[at + 1 :]):
                    return first, last
        return start, stop


@dataclass(frozen=True)
class Segments:
    """A prompt cut into chunks and text.

    With the processed pixels of each chunk (None: a text chunk).
    """

    token_ids: list[int]
    chunks: tuple[ChunkSpan, ...]
    items: tuple[tuple[str, MultiModalKwargsItem] | None, ...]

    def head(self, opening: Sequence[int]) -> int:
        """Number of first tokens, before any chunk, that the prompt has in common with `opening`."""
        stop = self.chunks[0].start if self.chunks else len(self.token_ids)
        pairs = zip(self.token_ids[:stop], opening, strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    def behind(self, start: int) -> Segments:
        """Tokens from `start` on, which no chunk stands across, and their chunks."""
        kept = [i for i, span in enumerate(self.chunks) if span.start >= start]
        spans = tuple(_moved(self.chunks[i], -start) for i in kept)
        return Segments(self.token_ids[start:], spans, tuple(self.items[i] for i in kept))

    def apart(self) -> tuple[Segments, Segments]:
        """Chunks one behind another, and the words around them."""
        ids, words, spans, last = list[int](), list[int](), list[ChunkSpan](), 0
        for span in self.chunks:
            spans.append(_moved(span, len(ids) - span.start))
            words += self.token_ids[last : span.start]
            ids += self.token_ids[span.start : span.stop]
            last = span.stop
        return Segments(ids, tuple(spans), self.items), Segments([*words, *self.token_ids[last:]], (), ())

    def spliced(self, at: int, other: Segments) -> Segments:
        """These tokens with others before the one at `at`, which no chunk stands across."""
        first = sum(span.stop <= at for span in self.chunks)
        inside = tuple(_moved(span, at) for span in other.chunks)
        later = tuple(_moved(span, len(other.token_ids)) for span in self.chunks[first:])
        return Segments(
            [*self.token_ids[:at], *other.token_ids, *self.token_ids[at:]],
            (*self.chunks[:first], *inside, *later),
            (*self.items[:first], *other.items, *self.items[first:]),
        )

    def pixels(self, chunks: Sequence[int]) -> list[tuple[str, MultiModalKwargsItem]]:
        """Processed pixels of these chunks, for the vision encoder; none may be a text chunk."""
        return [item for i in chunks if (item := self.items[i]) is not None]


def _moved(span: ChunkSpan, by: int) -> ChunkSpan:
    return replace(span, start=span.start + by, stop=span.stop + by, first=span.first + by)


def segment(engine_input: Any, delimiters: Delimiters, documents: Sequence[Document] = ()) -> Segments:
    """Cut vLLM's rendered prompt (`vllm.inputs.EngineInput`) into segments.

    vLLM's item hashes are our content ids: the API hands them to the renderer as the items' uuids. `documents` are the
    text chunks that were spliced into the prompt, in order.
    """
    token_ids = list(engine_input["prompt_token_ids"])
    found: list[tuple[ChunkSpan, tuple[str, MultiModalKwargsItem] | None]] = []
    if engine_input.get("type") == "multimodal":
        found += _multimodal(engine_input, token_ids, delimiters)
    # A document may hold what stands around an image.
    for document, start in places(token_ids, documents, [(span.start, span.stop) for span, _ in found]):
        count = len(document.token_ids)
        found.append((ChunkSpan(document.content, TEXT, start, start + count, start, count), None))
    found.sort(key=lambda pair: pair[0].start)
    return Segments(token_ids, tuple(span for span, _ in found), tuple(item for _, item in found))


def image_delimiters(renderer: BaseRenderer, delimiters: Delimiters) -> tuple[int, ...]:
    """Token ids around an image's placeholders; () for models without images.

    The placeholders of an image are the processor's to choose, so a sample is rendered.
    """
    written = next((one for modality, one in delimiters.written if modality == "image"), None)
    if written is None:
        return ()
    prompt = {"prompt_token_ids": list(written), "multi_modal_data": {"image": [Image.new("RGB", _SAMPLE)]}}
    (rendered,) = renderer.render_cmpl([parse_model_prompt(renderer.model_config, prompt)], skip_mm_cache=True)
    segments = segment(rendered, delimiters)
    (span,) = segments.chunks
    return tuple(segments.token_ids[span.start : span.first] + segments.token_ids[span.first + span.count : span.stop])


def _multimodal(
    engine_input: Any, token_ids: Sequence[int], delimiters: Delimiters
) -> Iterator[tuple[ChunkSpan, tuple[str, MultiModalKwargsItem]]]:
    for modality, ranges in engine_input["mm_placeholders"].items():
        hashes = engine_input["mm_hashes"][modality]
        items = engine_input["mm_kwargs"][modality]
        for place, content, item in zip(ranges, hashes, items, strict=True):
            start, stop = delimiters.around(token_ids, place.offset, place.offset + place.length, modality)
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
