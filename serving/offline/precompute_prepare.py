"""From a manifest entry to what the offline worker computes.

    read        the bytes, from wherever fsspec finds them, or of a vector store (`precompute_store`)
    named       content ids, and with them the keys of all records: is anything missing?
    opened      checked and decoded                      by `api.media` and `api.clips`, as a request's are
    rendered    to the prompt of a request               by vLLM's renderer and `segments`

Content ids, keys and prompts come from the code that serves requests, so a request finds what is stored here. What is
stored already is known from the bytes alone, and of a video from its head: a job that is resumed decodes nothing twice.
"""

from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from PIL import Image
from pydantic import ValidationError
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionToolsParam
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.renderers import renderer_from_config
from vllm.renderers.chat_utils import load_chat_template
from vllm.renderers.online_renderer import OnlineRenderer

from kvstore.errors import StoreError
from kvstore.operator.patch import PatchKind
from kvstore.records.keys import owned_content_id
from kvstore.uploads.files import FileStore
from kvstore.uploads.vector_stores import VectorStores
from prefill_workers.modes import Mode
from prefill_workers.patches.offline import Name, OfflineTask, OfflineWorker
from prefill_workers.protocol import ChunkSpan, LinkRequest
from serving.api.chat import fixed_prefix
from serving.api.clips import Clip, Clips
from serving.api.errors import TooLarge
from serving.api.image_limits import ImageLimits
from serving.api.images import ResolvedImage
from serving.api.media import MediaResolver, part_of
from serving.config import OrbitServeConfig
from serving.documents.settings import VideoSettings
from serving.documents.video import is_video
from serving.engine_spec import front_end_config
from serving.frontend.client_text import ClientText
from serving.frontend.errors import InvalidRequest
from serving.frontend.prompt_segments import Delimiters, Segments, segment
from serving.frontend.video_options import VideoOptions
from serving.offline.precompute_manifest import Entry, ImageSource, ManifestError, file_system
from serving.offline.precompute_store import StorePictures

MAX_ORBIT_IMAGES = 5  # of more, not all orders are run, and not every order would link

_SAMPLE = ResolvedImage("0" * 64, Image.new("RGB", (64, 64)))
_Media = ResolvedImage | Clip


class EntryError(ValueError):
    """An entry that cannot be precomputed; the message says why."""


class Preparer:
    """Preparer of entries, many at once. Build it with `await Preparer.create(...)`."""

    def __init__(
        self, config: OrbitServeConfig, offline: OfflineWorker, is_stored: Callable[[Sequence[Name], str], bool]
    ) -> None:
        self._config, self._offline, self._is_stored = config, offline, is_stored
        self._secret = config.files.salt_secret.get_secret_value().encode()
        files = FileStore(config.files_url, config.files)
        self._prompts = Prompts(config)
        limits = self._prompts.image_limits(config.http.max_resized_pixels)
        self._clips = self._prompts.clips(config.video)
        self._media = MediaResolver(config.http, files, VectorStores(files), limits=limits)
        self._stored = StorePictures(config, files, self._media)
        self._delimiters: dict[str, tuple[list[int], list[int]]] = {}  # what opens and closes a chunk, by modality

    @classmethod
    async def create(cls, *arguments: Any) -> Preparer:
        """Create a preparer that has rendered one image, and one video for a model that takes them.

        That shows the delimiters of them all and warms the processor.
        """
        preparer = cls(*arguments)
        samples: list[_Media] = [_SAMPLE]
        if preparer._clips is not None:
            samples.append(preparer._clips.sample())
        segments = await preparer._prompts.render(Opening(), samples)
        tokens = segments.token_ids
        preparer._delimiters = {
            span.modality: (tokens[span.start : span.first], tokens[span.first + span.count : span.stop])
            for span in segments.chunks
        }
        return preparer

    async def task(self, entry: Entry) -> OfflineTask | None:
        """Task of an entry; None if all of it is stored. Raises EntryError."""
        self._check(entry)
        opening = Opening.of(entry)
        found = await asyncio.gather(*(asyncio.to_thread(self._found, source, entry) for source in entry.images))
        kind = None if entry.patches == "none" else PatchKind(entry.patches)
        chunks = [chunk for one in found for chunk in one.chunks]
        contents = [chunk.content for chunk in chunks]
        self._check_count(len(chunks), entry)
        if len(chunks) == 1 and kind is PatchKind.orbit:
            kind = PatchKind.own  # one chunk has one order
        if kind is PatchKind.orbit and len(set(contents)) < len(contents):
            raise EntryError("orbit patches need images that differ from each other")
        prefix = self._prompts.prefix_tokens(opening)
        names = self._offline.wanted(self._outline(chunks, entry.tenant, prefix), kind)
        if await asyncio.to_thread(self._is_stored, names, entry.tenant):
            return None
        opened = await asyncio.gather(*(asyncio.to_thread(self._opened, one) for one in found))
        images = [one for several in opened for one in several]
        segments = await self._prompts.render(opening, images)
        if len(segments.token_ids) > self._offline.capacity:
            raise EntryError(
                f"the prompt has {len(segments.token_ids)} tokens, the KV pool holds {self._offline.capacity}; "
                "raise prefill.kv_cache_gib"
            )
        named = (entry.name, segments.token_ids, segments.chunks, Mode.EXACT, entry.tenant, prefix)
        request = LinkRequest(*named, head=segments.chunks[0].start)  # the user says nothing before the images
        return OfflineTask(request, segments.items, self._offline.wanted(request, kind))

    def _check(self, entry: Entry) -> None:
        if entry.error is not None:
            raise EntryError(entry.error)
        self._check_count(len(entry.images), entry)

    def _check_count(self, count: int, entry: Entry) -> None:
        """Raise EntryError for more images and clips than a request may have, or than all orders are computed of."""
        most = self._config.http.max_images_per_request
        if count > most:
            raise EntryError(f"{count} images and clips, a request may have at most {most}")
        if entry.patches == "orbit" and count > MAX_ORBIT_IMAGES:
            raise EntryError(
                f"orbit patches of {count} images and clips: at most {MAX_ORBIT_IMAGES}, for all orders are computed"
            )

    def _outline(self, wanted: Sequence[_Chunk], tenant: str, prefix: tuple[int, ...]) -> LinkRequest:
        """A prompt of these chunks without their placeholders, which no key depends on."""
        chunks: list[ChunkSpan] = []
        tokens: list[int] = []
        for one in wanted:
            opening, closing = self._delimiters[one.modality]
            start, first = len(tokens), len(tokens) + len(opening)
            tokens += [*opening, *closing]
            chunks.append(ChunkSpan(one.content, one.modality, start, len(tokens), first, 0))
        return LinkRequest("outline", tokens, tuple(chunks), Mode.EXACT, tenant, prefix)

    @property
    def _most_bytes(self) -> int:
        return max(self._config.http.max_image_bytes, 0 if self._clips is None else self._clips.max_bytes)

    def _read(self, source: ImageSource) -> bytes:
        """Read an image or video, at most one byte more than it may have.

        A huge file fails then, instead of filling the memory.
        """
        if source.location is None:
            return source.data or b""
        try:
            files, path = file_system(source.location, self._config.precompute.storage_options)
            try:
                return files.cat_file(path, end=self._most_bytes + 1)
            except OSError as error:
                if error.errno == errno.EINVAL and files.size(path) == 0:
                    return b""  # S3 has no range of an empty object
                raise
        except FileNotFoundError as error:
            raise EntryError(f"{_named(source)}: no such file") from error
        except ManifestError as error:
            raise EntryError(str(error)) from error
        except Exception as error:  # file systems raise their own client's errors, which share no base class
            raise EntryError(f"{_named(source)}: cannot be read: {error}") from error

    def _found(self, source: ImageSource, entry: Entry) -> _Found:
        """An image, or a video's clips, by name: nothing is decoded yet."""
        where = _named(source)
        try:
            stored = None if source.location is None else self._stored.find(source.location)
        except (InvalidRequest, TooLarge, StoreError) as error:
            raise EntryError(f"{where}: {error}") from error
        if stored is not None:
            if stored.owner != entry.tenant:
                raise EntryError(f"{where} is not of tenant {entry.tenant!r}")
            return _Found([_Chunk(stored.content, "image")], lambda: [stored.open()])
        data = self._read(source)
        content = owned_content_id(data, entry.tenant, self._secret)
        if not is_video(data):
            return _Found([_Chunk(content, "image")], lambda: [self._media.open(data, entry.tenant, where)])
        clips = self._clips_of(data, content, entry, where)
        return _Found([_Chunk(clip.content, "video") for clip in clips], partial(self._decoded, clips, where))

    def _clips_of(self, data: bytes, content: str, entry: Entry, where: str) -> list[Clip]:
        if self._clips is None:
            raise EntryError(f"{where}: the model takes no videos")
        options = VideoOptions.model_validate_json(entry.video or "{}")
        try:
            clips = self._clips.open(data, content, options, where, decodes=lambda pixels: False)
        except (InvalidRequest, TooLarge) as error:
            raise EntryError(str(error.args[0])) from error
        if (pixels := sum(clip.pixels for clip in clips)) > self._clips.max_pixels:
            raise EntryError(f"{where}: {pixels} sampled pixels, at most {self._clips.max_pixels} are allowed")
        return clips

    def _decoded(self, clips: list[Clip], where: str) -> list[_Media]:
        assert self._clips is not None
        self._clips.decode(clips, where)
        return [*clips]

    def _opened(self, found: _Found) -> list[_Media]:
        try:
            return found.open()
        except (InvalidRequest, TooLarge) as error:
            raise EntryError(str(error.args[0])) from error


class _Chunk(NamedTuple):
    """A chunk of an entry, as far as its keys need it."""

    content: str
    modality: str


class _Found(NamedTuple):
    """Chunks of an image or video of an entry; `open` decodes it."""

    chunks: list[_Chunk]
    open: Callable[[], list[_Media]]


def _named(source: ImageSource) -> str:
    return "inline image" if source.location is None else source.location[:200]  # a data URL is long


@dataclass(frozen=True)
class Opening:
    """Opening of requests over an entry's images: tools, and a system message."""

    tools: tuple[ChatCompletionToolsParam, ...] = ()
    messages: tuple[Any, ...] = ()

    @classmethod
    def of(cls, entry: Entry) -> Opening:
        """Opening of an entry; raises EntryError for tools that no request may have."""
        try:
            tools = tuple(ChatCompletionToolsParam.model_validate(tool) for tool in json.loads(entry.tools or "[]"))
        except ValidationError as error:
            first = error.errors()[0]
            raise EntryError(f"tools: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
        return cls(tools, ({"role": "system", "content": entry.prefix},) if entry.prefix else ())


class Prompts:
    """Prompts over images and clips, rendered as the chat handler renders requests.

    The opening, then the images as a user's turn.
    """

    def __init__(self, config: OrbitServeConfig) -> None:
        vllm_config = front_end_config(config.model, processor_cache_gib=0)
        self._model = config.model.served_name
        self._renderer = renderer_from_config(vllm_config)
        ClientText.of(self._renderer, config.model.chat_template).install(self._renderer)
        self._online = OnlineRenderer(
            vllm_config.model_config,
            self._renderer,
            request_logger=None,
            chat_template=load_chat_template(config.model.chat_template),
            chat_template_content_format="auto",
        )
        self._delimiters = Delimiters.of(vllm_config.model_config, self._renderer.get_tokenizer())

    def image_limits(self, max_resized_pixels: int) -> ImageLimits | None:
        """The model's limits on images; None: it takes none."""
        return ImageLimits.of(self._renderer, max_resized_pixels)

    def clips(self, settings: VideoSettings) -> Clips | None:
        """Opener of the model's videos; None: it takes none."""
        return Clips.of(self._renderer, settings)

    def prefix_tokens(self, opening: Opening) -> tuple[int, ...]:
        """Token ids of a fixed prefix, as patches are keyed by."""
        text = fixed_prefix(list(opening.messages), self._request(opening))
        return tuple(self._renderer.get_tokenizer().encode(text, add_special_tokens=False))

    async def opening_tokens(self, opening: Opening) -> tuple[int, ...]:
        """Token ids before a prompt's first image.

        Raises EntryError for a model that takes none.
        """
        segments = await self.render(opening, [_SAMPLE])
        return tuple(segments.token_ids[: segments.chunks[0].start])

    async def render(self, opening: Opening, images: Iterable[_Media]) -> Segments:
        """The prompt in segments.

        Raises EntryError if it is too long, or an image too small for the processor.
        """
        parts = [part_of(found) for found in images]
        try:
            rendered = await self._online.render_chat(
                self._request(opening, {"role": "user", "content": parts}), skip_mm_cache=True
            )
        except ValueError as error:
            raise EntryError(str(error.args[0])) from error
        if isinstance(rendered, ErrorResponse):
            raise EntryError(rendered.error.message)
        _, (engine_input,) = rendered
        return segment(engine_input, self._delimiters)

    def _request(self, opening: Opening, *turns: Any) -> ChatCompletionRequest:
        # tool_choice: what the model may do, which no prompt says, but whether vLLM wants a parser for its answers
        request = ChatCompletionRequest(
            model=self._model,
            messages=[{"role": "user", "content": ""}],
            tools=list(opening.tools) or None,
            tool_choice="none",
        )
        request.messages = [*opening.messages, *turns]  # not validated: images are here, as they are behind `api.media`
        return request
