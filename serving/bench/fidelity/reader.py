"""Questions about pages with any assembled KV, on a real engine driven by hand.

A prompt is laid out as the server lays it out. Its pages' KV may be given; everything else is computed over it in one
forward, as the linker computes the text of a request (`prefill_workers.engine.worker_extension`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

if TYPE_CHECKING:
    from prefill_workers.engine.engine import PrefillEngine
    from prefill_workers.engine.image_batches import Pixels
    from prefill_workers.protocol import ChunkSpan
    from prefill_workers.sequence import Embedded, LinkSequence, Run
    from serving.frontend.prompt_segments import Segments

_HEAD, _TAIL = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
_BUDGET = 4096  # tokens that one forward computes
_HELD = 32768  # tokens of the prompts in one forward, computed or given: their KV is written in one piece


@dataclass(frozen=True, eq=False)
class Page:
    """One picture as a chunk, or text: its tokens with delimiters, and inputs of its forward."""

    token_ids: tuple[int, ...]
    span: ChunkSpan  # as if the chunk began at token 0
    pixels: Pixels | None = None
    embeddings: Tensor | None = None

    @classmethod
    def of_text(cls, token_ids: Sequence[int]) -> Page:
        """Text that is linked like a picture."""
        from prefill_workers.protocol import TEXT, ChunkSpan

        count = len(token_ids)
        return cls(tuple(token_ids), ChunkSpan("", TEXT, 0, count, 0, count))

    @property
    def position_items(self) -> list[tuple[str, Any, int]]:
        """Item that positions depend on: modality, grid, first placeholder; none for text."""
        span = self.span
        return [(span.modality, span.grid, span.first)] if span.needs_embeddings else []

    def embedded(self, start: int) -> list[Embedded]:
        """Embeddings in a sequence where the page begins at token `start`; none for text."""
        from prefill_workers.sequence import Embedded

        if self.embeddings is None:
            return []
        return [Embedded(start + self.span.first, self.embeddings, self.span.is_embed)]

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
    """A prompt with its answer behind it, but for the answer's last token.

    Its last `len(answer)` tokens predict the answer, token by token; the first `head` are the template's and the system
    prompt's.
    """

    token_ids: Tensor
    positions: Tensor
    places: tuple[Place, ...]
    answer: tuple[int, ...]
    head: int = 0

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def pages_only(self) -> Prompt:
        """The prompt up to its last page's end, of which no answer is asked."""
        stop = self.places[-1].stop
        return replace(self, token_ids=self.token_ids[:stop], positions=self.positions[..., :stop], answer=(0,))


@dataclass(eq=False)
class Read:
    """Result of a prompt's prefill.

    `answers`: log-probabilities [answer tokens, vocabulary] where the answer is predicted; `pages`: KV of the places
    that were to be kept, in the canonical frame, [layers, tokens, features].
    """

    answers: Tensor
    pages: list[Tensor] = field(default_factory=list)


class Reader:
    """One checkpoint on an engine of its own, to be closed after use."""

    def __init__(self, checkpoint: Path, trust_remote_code: bool = False) -> None:
        from vllm.renderers import renderer_from_config

        from prefill_workers.engine.engine import PrefillEngine
        from prefill_workers.engine.spec import EngineSpec
        from serving.frontend.prompt_segments import Delimiters

        spec = EngineSpec(
            model=str(checkpoint), dtype="float32", max_model_len=4096, max_batch_tokens=2 * _BUDGET, hand_off=False,
            trust_remote_code=trust_remote_code,
        )  # fmt: skip
        self.checkpoint = checkpoint
        self.engine: PrefillEngine = PrefillEngine(spec)
        try:
            pictures: Any = self.engine.config.model_config.multimodal_config
            if pictures is not None:  # thousands are read, each once: gigabytes would be kept of them
                pictures.mm_processor_cache_gb = 0.0
            self._renderer: Any = renderer_from_config(self.engine.config)
            self._tokens = self._renderer.get_tokenizer()
            self._delimiters = Delimiters.of(self.engine.config.model_config, self._tokens)
            layout = self.engine.layout  # memory that is kept: fresh pages of it cost more than what is done in them
            self._moved = torch.empty(layout.layers, _HELD, layout.features, dtype=self.engine.dtype)
        except BaseException:
            self.engine.shutdown()
            raise

    def close(self) -> None:
        """Stop the engine."""
        self.engine.shutdown()

    @property
    def end_tokens(self) -> frozenset[int]:
        """Tokens that end the model's answers."""
        named = self.engine.config.model_config.try_get_generation_config().get("eos_token_id")
        ends = named if isinstance(named, list) else [named]
        return frozenset(end for end in (*ends, self._tokens.eos_token_id) if end is not None)

    # -- prompts ------------------------------------------------------------------------------------------------------

    def pages(self, pictures: Sequence[Image.Image]) -> list[Page]:
        """Pictures as chunks, with their embeddings."""
        return self._chunks(self.rendered(pictures, "?"))

    def clips(self, clips: Sequence[tuple[NDArray[np.uint8], dict[str, Any]]]) -> list[Page]:
        """Clips as chunks, with their embeddings.

        Each is frames [n, height, width, 3] and vLLM's metadata of them.
        """
        from vllm.renderers.inputs.preprocess import parse_model_prompt

        from serving.frontend.prompt_segments import segment

        model = self.engine.config.model_config
        written = dict(self._delimiters.written)["video"]
        prompt = {"prompt_token_ids": [*written] * len(clips), "multi_modal_data": {"video": list(clips)}}
        (rendered,) = self._renderer.render_cmpl([parse_model_prompt(model, prompt)], skip_mm_cache=True)
        return self._chunks(segment(rendered, self._delimiters))

    def _chunks(self, segments: Segments) -> list[Page]:
        pixels = segments.pixels(range(len(segments.chunks)))
        found = []
        for span, item, rows in zip(segments.chunks, pixels, self.engine.encode(pixels), strict=True):
            moved = replace(span, start=0, stop=len(span), first=span.first - span.start)
            found.append(Page(tuple(segments.token_ids[span.start : span.stop]), moved, item, rows))
        return found

    def rendered(self, pictures: Sequence[Image.Image], text: str) -> Any:
        """A chat turn of pictures and text as the server renders it.

        See `serving.frontend.prompt_segments.Segments`.
        """
        from vllm.renderers import ChatParams

        from serving.frontend.prompt_segments import segment

        content = [
            *({"type": "image_pil", "image_pil": picture} for picture in pictures),
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
        """A chat turn of pages and a question.

        `system`: a system prompt; `before`: other text before each page.
        """
        head = f"<|im_start|>system\n{system}<|im_end|>\n" if system else ""
        words = [self.ids(text) for text in before]
        return self.lay_out(self.ids(head + _HEAD), pages, self.ids(question + _TAIL), self.ids(answer), words)

    def lay_out(
        self,
        head: Sequence[int],
        pages: Sequence[Page],
        question: Sequence[int],
        answer: Sequence[int],
        before: Sequence[Sequence[int]] = (),
    ) -> Prompt:
        """Pages between a head and a question, all in token ids. `before`: words before each page."""
        tokens, starts = [*head], list[int]()
        for i, page in enumerate(pages):
            tokens += before[i] if i < len(before) else ()
            starts.append(len(tokens))
            tokens += page.token_ids
        tokens += [*question, *answer[:-1]]
        items = [
            (modality, grid, start + first, page.span.count)
            for page, start in zip(pages, starts, strict=True)
            for modality, grid, first in page.position_items
        ]
        positions, lag = self.engine.positions(tokens, items)
        positions = positions + lag
        first = positions if positions.dim() == 1 else positions[0]
        places = tuple(Place(page, start, int(first[start])) for page, start in zip(pages, starts, strict=True))
        return Prompt(torch.tensor(tokens, dtype=torch.int32), positions, places, tuple(answer), len(head))

    def ids(self, text: str) -> list[int]:
        """Token ids of text, with no special tokens added."""
        return list(self._tokens(text, add_special_tokens=False)["input_ids"]) if text else []

    # -- KV -----------------------------------------------------------------------------------------------------------

    def alone(self, places: Sequence[Place], prefix: Sequence[int] = ()) -> list[Tensor]:
        """KV of every page computed by itself, [layers, tokens, features]: KV(B|∅).

        Or behind neutral text.

        With `prefix` the page is computed behind these tokens and moved to position 0.
        """
        prompts = []
        for place in places:
            page = place.page
            tokens = [*prefix, *page.token_ids]
            items = [
                (modality, grid, len(prefix) + first, page.span.count) for modality, grid, first in page.position_items
            ]
            positions, _ = self.engine.positions(tokens, items)
            at = Place(page, len(prefix), int(positions.reshape(-1, len(tokens))[0, len(prefix)]))
            prompts.append(Prompt(torch.tensor(tokens, dtype=torch.int32), positions, (at,), (0,)))
        found = []
        for batch in self._batches(prompts):
            work = [(self.sequence(prompt, blocks), _whole(len(prompt))) for prompt, blocks in batch]
            self.engine.forward(work)
            for prompt, blocks in batch:
                found.append(self._canonical(blocks, prompt.places[0]))
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
        apart: int = 0,
    ) -> list[Read]:
        """Every prompt over given KV of its pages; what is None is computed, all in one forward.

        Args:
            pages: per prompt and place, KV in the canonical frame or None.
            recomputed: per prompt and place, which of a page's tokens (sorted) are computed again in context.
            keep: of which places the KV is read afterwards; None: of all.
            apart: in so many layers, the first, the pages are computed without seeing anything but themselves, while
                the text sees what is given of them. All pages must be given, and all of their tokens recomputed.
        """
        given = [
            [
                span
                for j, (place, kv) in enumerate(zip(prompt.places, pages[i], strict=True))
                if kv is not None
                for span in _kept(place.start, place.stop, recomputed[i][j] if recomputed is not None else None)
            ]
            for i, prompt in enumerate(prompts)
        ]
        reads: list[Read] = []
        for batch in self._batches(prompts, given, apart > 0):
            which = slice(len(reads), len(reads) + len(batch))
            self._write(batch, pages[which])
            for (prompt, blocks), answered in zip(batch, self._answers(batch, given[which], apart), strict=True):
                read = Read(answered)
                for place in prompt.places if keep is None else [prompt.places[index] for index in keep]:
                    read.pages.append(self._canonical(blocks, place))
                reads.append(read)
        return reads

    def _write(self, batch: Sequence[tuple[Prompt, range]], pages: Sequence[Sequence[Tensor | None]]) -> None:
        """Store given KV of prompts' pages, those at the same position together."""
        from kvstore.operator.apply import relocate

        together: dict[int, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        for (prompt, blocks), given in zip(batch, pages, strict=True):
            for place, kv in zip(prompt.places, given, strict=True):
                if kv is not None:
                    together[place.position].append((kv, self.engine.slots(blocks, place.start, place.stop)))
        for position, parts in together.items():
            tokens = [len(slots) for _, slots in parts]
            moved = self._moved[:, : sum(tokens)]
            for (kv, _), out in zip(parts, moved.split(tokens, 1), strict=True):
                relocate(kv, position, self.engine.layout, out=out)
            self.engine.write_kv(moved, torch.cat([slots for _, slots in parts]))

    def _canonical(self, blocks: range, place: Place) -> Tensor:
        """The KV of a place as it is in the pool now, in the canonical frame."""
        from kvstore.operator.apply import relocate

        kv = self.engine.read_kv(blocks, place.start, place.stop - place.start)
        return relocate(kv, -place.position, self.engine.layout, out=kv)

    def _answers(
        self, batch: Sequence[tuple[Prompt, range]], given: Sequence[Sequence[tuple[int, int]]], apart: int
    ) -> list[Tensor]:
        """Compute all missing KV; log-probabilities where each prompt's answer is predicted."""
        from prefill_workers.sequence import Run, complement

        work: list[tuple[LinkSequence, list[Run]]] = []
        first: list[tuple[LinkSequence, list[Run]]] = []
        sizes: list[int] = []
        for (prompt, blocks), kept in zip(batch, given, strict=True):
            answer = len(prompt) - len(prompt.answer)
            last = [Run(i, i + 1) for i in range(answer, len(prompt))]
            sequence = self.sequence(prompt, blocks)
            work.append((sequence, complement([Run(*span) for span in kept], answer) + last))
            sizes.append(len(work[-1][1]))
            if apart:
                first += self._apart(prompt, blocks, sequence, last)
        logits = self.engine.logits(work, first=(first, apart) if apart else None)
        rows = logits.float().log_softmax(-1).split(sizes)
        return [part[-len(prompt.answer) :] for part, (prompt, _) in zip(rows, batch, strict=True)]

    def _apart(
        self, prompt: Prompt, blocks: range, whole: LinkSequence, last: list[Run]
    ) -> list[tuple[LinkSequence, list[Run]]]:
        """A prompt's tokens in order, every page in a sequence of its own behind shared blocks."""
        from prefill_workers.sequence import LinkSequence, Run

        work, done, block = [], 0, blocks.stop
        for place in prompt.places:
            if done < place.start:
                work.append((whole, [Run(done, place.start)]))
            inside, size = slice(place.start, place.stop), place.stop - place.start
            count = -(-size // self.engine.block_size)
            page = LinkSequence(
                prompt.token_ids[inside],
                prompt.positions[..., inside],
                range(block, block + count),
                place.page.embedded(0),
            )
            work.append((page, [Run(0, size)]))
            done, block = place.stop, block + count
        return [*work, (whole, [Run(done, last[0].start), *last])]

    def _batches(
        self, prompts: Sequence[Prompt], given: Sequence[Sequence[tuple[int, int]]] | None = None, apart: bool = False
    ) -> list[list[tuple[Prompt, range]]]:
        """Prompts in order, grouped to fit a forward's budget and the KV pool, with their blocks.

        `given`: which tokens of each are not computed. `apart`: blocks for the pages by themselves follow, too.
        """
        size = self.engine.block_size
        batches: list[list[tuple[Prompt, range]]] = []
        used = tokens = held = 0
        for i, prompt in enumerate(prompts):
            blocks = -(-len(prompt) // size)
            more = sum(-(-(place.stop - place.start) // size) for place in prompt.places) if apart else 0
            if blocks + more >= self.engine.num_blocks:
                raise ValueError(f"a prompt of {len(prompt)} tokens does not fit the engine's KV pool")
            computed = len(prompt) - sum(b - a for a, b in given[i]) if given is not None else len(prompt)
            full = tokens + computed > _BUDGET or held + len(prompt) > _HELD
            if not batches or full or 1 + used + blocks + more > self.engine.num_blocks:
                batches.append([])
                used = tokens = held = 0
            batches[-1].append((prompt, range(1 + used, 1 + used + blocks)))
            used, tokens, held = used + blocks + more, tokens + computed, held + len(prompt)
        return batches

    def sequence(self, prompt: Prompt, blocks: range) -> LinkSequence:
        """A prompt as the engine takes it, with the embeddings of all its pages."""
        from prefill_workers.sequence import LinkSequence

        embedded = [one for place in prompt.places for one in place.page.embedded(place.start)]
        return LinkSequence(prompt.token_ids, prompt.positions, blocks, embedded)


def _whole(length: int) -> list[Any]:
    from prefill_workers.sequence import Run

    return [Run(0, length)]


def _kept(start: int, stop: int, again: Tensor | None) -> list[tuple[int, int]]:
    """Stretches of tokens `start` to `stop` that are not recomputed (`again`: indices, sorted)."""
    edges = [start]
    for index in again.tolist() if again is not None else ():
        edges += [start + index, start + index + 1]
    edges.append(stop)
    return [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]
