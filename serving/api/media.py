"""Content parts to chunks: fetched, bounded, checked and named before all else.

An image's name is the BLAKE3 of its bytes under the tenant's salt, or for a file of a vector store under the dynamic
library's, so that what is computed from a reference serves every tenant and nothing else passes between them. It is
handed to vLLM as the item's uuid, so that the processor cache, the chunk's keys and the file store agree on it; a
repeated image is opened lazily and never decoded.

A file that is text and no image becomes a document: a text chunk (see `serving.frontend.documents`). Of a file with
several pictures (GIF, TIFF, AVIF) the first is taken, as vLLM does; of an ICO the largest. A PDF or office file becomes
pages (see `serving.api.pdf_pages`); a `video_url` part, or a file that is MP4, MOV, WebM or MKV, clips (see
`serving.api.clips`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from kvstore.errors import UnknownFile
from kvstore.records.keys import DYNAMIC_TENANT, is_shared, owned_content_id
from kvstore.uploads.files import FileStore
from kvstore.uploads.vector_stores import VectorStores
from serving.api.clips import SHORT, Clip, Clips
from serving.api.errors import NotFound
from serving.api.fetching import MediaFetcher, bytes_of_data_url
from serving.api.image_limits import ImageLimits
from serving.api.images import ImageOpener, ResolvedImage, ResolvedText, refuse_misnamed, refuse_pages
from serving.api.pdf_pages import OpenedPdf, PageImage, PdfPages, png
from serving.api.pixel_budget import PixelBudget
from serving.api.request_budgets import ImageBudgets, RequestBudget, invalid, too_large
from serving.api.retrieval import Result
from serving.documents.office import has_pages
from serving.documents.passages import as_text
from serving.documents.video import is_video
from serving.frontend.documents import Documents, Mark
from serving.frontend.errors import InvalidRequest
from serving.frontend.video_options import VideoOptions
from serving.settings import HttpSettings

_MEDIA = ("image_url", "video_url", "file")
PIXELS = ("image_pil", "video_url")  # types of resolved parts that have pixels, or None, in a field of that name
FOUND = "orbit_found"  # type of a content part, and field: a Result of a search; none that a client can send
_AT_ONCE = 8  # parts of one request that are fetched, read and decoded beside one another
_Result = TypeVar("_Result")


_Resolved = ResolvedImage | Mark | Clip


class MediaResolver:
    """Resolver of the image and file parts of one deployment's requests.

    Without `documents` text files are refused. `max_characters`: of a request's text files, all together. `limits`: the
    model's own on images; None: it has none, or they are not known. `is_processed`: by content id, whether vLLM has an
    image's processed pixels, so that it need not be decoded. Without `pdfs` PDFs are refused; without `has_images`
    their pages are documents, of the text in them. Without `clips` videos are refused.
    """

    def __init__(
        self,
        settings: HttpSettings,
        files: FileStore,
        stores: VectorStores,
        documents: Documents | None = None,
        max_characters: int | None = None,
        limits: ImageLimits | None = None,
        is_processed: Callable[[str], bool] = lambda content: True,
        pdfs: PdfPages | None = None,
        has_images: bool = True,
        clips: Clips | None = None,
    ) -> None:
        self._settings, self._files, self._stores, self._documents = settings, files, stores, documents
        self._max_characters, self._limits, self._is_processed = max_characters, limits, is_processed
        self._pdfs, self._has_images, self._clips = pdfs, has_images, clips
        self._secret = files.settings.salt_secret.get_secret_value().encode()
        self._images = ImageOpener(settings, self._secret, limits, documents is not None)
        self._budget = PixelBudget(settings.max_decoded_pixels)
        self._web = MediaFetcher(settings)

    async def resolve_messages(
        self,
        messages: list[Any],
        tenant: str,
        pages: str | None = None,
        video: VideoOptions | None = None,
        notices: list[str] | None = None,
    ) -> list[Any]:
        """Replace images by vLLM's `image_pil` parts, documents by their marks, videos by clips.

        A PDF becomes its pages in order, or those that `pages` names, such as "1-3,7"; a video what `video` says. What
        of the parts is left out is told in `notices`.

        Raises:
            InvalidRequest, NotFound, TooLarge: naming the part.
        """
        resolved: list[Any] = []
        wanted: list[tuple[list[Any], int, str]] = []  # content, the part in it, where that is
        for m, message in enumerate(messages):
            content = message.get("content")
            if content is None or isinstance(content, str):
                resolved.append(message)
                continue
            parts = list(content)
            for p, part in enumerate(parts):
                where = f"messages[{m}].content[{p}]"
                kind = part.get("type") if isinstance(part, dict) else None
                if kind in _MEDIA or (kind == FOUND and isinstance(part.get(FOUND), Result)):
                    wanted.append((parts, p, where))
                    if len(wanted) > self._settings.max_images_per_request:
                        raise InvalidRequest(
                            f"more than {self._settings.max_images_per_request} images and documents in one request",
                            parameter=where,
                        )
                elif kind not in ("text", "refusal"):
                    raise InvalidRequest(
                        f"{where}: content parts of type {kind!r} are not supported; use text, image_url, video_url or "
                        "file",
                        parameter=where,
                    )
            resolved.append({**message, "content": parts})
        at_once = asyncio.Semaphore(_AT_ONCE)
        longest = None if self._limits is None else self._limits.max_tokens
        images = ImageBudgets(
            RequestBudget(self._settings.max_request_pixels, "images have {} pixels", too_large),
            RequestBudget(longest, "images take {} tokens, the most that a prompt can hold,", invalid),
            RequestBudget(
                None if self._clips is None else self._clips.max_pixels, "videos have {} sampled pixels", too_large
            ),
            RequestBudget(SHORT, "short videos have {} sampled pixels", too_large),
        )
        characters = RequestBudget(
            self._max_characters, "documents have {} characters, the most that a prompt can hold,", too_large
        )

        opened = _Opened()

        async def resolve(part: dict[str, Any], where: str) -> list[_Resolved]:
            async with at_once:
                if part["type"] == FOUND:
                    return [await self._found(part[FOUND], where, images, characters, opened)]
                return await self._resolve(part, tenant, where, images, characters, pages, video or VideoOptions())

        found = await _together(resolve(parts[p], where) for parts, p, where in wanted)
        if (count := sum(map(len, found))) > (most := self._settings.max_images_per_request):
            raise InvalidRequest(
                f"the request's images, documents, pages and clips are {count}, at most {most} are allowed "
                "(`http.max_images_per_request`); choose pages by orbit.pages",
                parameter="messages",
            )
        places = [(one, where) for several, (_, _, where) in zip(found, wanted, strict=True) for one in several]
        audible = {where: None for one, where in places if isinstance(one, Clip) and one.head.audio}
        if audible and notices is not None:
            notices.append(f"sound is left out: of {len(audible)} videos, first {next(iter(audible))}")
        decoded = await self._decode_new([one for one, _ in places], [where for _, where in places], at_once)

        for (parts, p, _), several in reversed(list(zip(wanted, found, strict=True))):  # places stay as they are
            parts[p : p + 1] = [
                part_of(decoded.get(one.content, one) if isinstance(one, ResolvedImage) else one) for one in several
            ]
        return resolved

    async def _resolve(
        self,
        part: dict[str, Any],
        tenant: str,
        where: str,
        images: ImageBudgets,
        characters: RequestBudget,
        pages: str | None,
        video: VideoOptions,
    ) -> list[_Resolved]:
        """An image, not decoded yet, or what stands for a document; of a PDF its pages, of a video its clips."""
        if part["type"] == "file":
            data, owner, is_stored = await self._file(part, tenant, where)
            if self._pdfs is not None and has_pages(data):
                content = owned_content_id(data, owner, self._secret)
                opened = await self._pdfs.open_in_turn(data, content, owner, where, is_stored)
                return [*await self._pages(opened, self._pdfs.numbers(opened, pages), where, images, characters)]
            if is_video(data):
                return [*await self._videos(data, owner, where, images, video, is_stored)]
            found = await asyncio.to_thread(self._images.identify_file, data, owner, where, images)
            if isinstance(found, ResolvedText):
                assert self._documents is not None
                characters.take(len(found.text), where)
                return [await self._documents.mark_soon(found.content, found.text)]
            return [found]
        data = await self._behind_url(part, where)
        if part["type"] == "video_url":
            return [*await self._videos(data, tenant, where, images, video, is_stored=False)]
        return [await asyncio.to_thread(self._images.identify, data, tenant, where, images)]

    async def _behind_url(self, part: dict[str, Any], where: str) -> bytes:
        """Bytes that an image_url or video_url part has or names."""
        kind = part["type"]
        given = part.get(kind)
        url = given.get("url") if isinstance(given, dict) else given
        if not isinstance(url, str):
            raise InvalidRequest(f"{where}: {kind} needs a url", parameter=where)
        most = self._opener(where).max_bytes if kind == "video_url" else self._settings.max_image_bytes
        return await self._web.fetch(url, where, most)

    async def image_bytes(self, part: dict[str, Any], tenant: str, where: str) -> bytes:
        """Bytes of the image of an image_url or file part, checked as one of a chat by its header.

        Raises:
            InvalidRequest, NotFound, TooLarge: naming the part.
        """
        of_file = part["type"] == "file"
        data = (await self._file(part, tenant, where))[0] if of_file else await self._behind_url(part, where)
        await asyncio.to_thread(self._images.identify, data, tenant, where)
        return data

    def _opener(self, where: str) -> Clips:
        if self._clips is None:
            raise InvalidRequest(f"{where}: the model takes no videos", parameter=where)
        return self._clips

    async def _videos(
        self, data: bytes, owner: str, where: str, images: ImageBudgets, options: VideoOptions, is_stored: bool
    ) -> list[Clip]:
        """Clips of a video.

        Those of a long one, of one that is known, and of one beside many short ones are not decoded yet.

        Those of an upload are noted: its deletion reaches what is computed from them.
        """
        opener = self._opener(where)
        content = owned_content_id(data, owner, self._secret)
        clips = await opener.open_in_turn(data, content, options, where, images.ahead.fits)
        images.clips.take(sum(clip.pixels for clip in clips), where)
        if is_stored:
            await asyncio.to_thread(self._note, content, owner, clips)
        return clips

    def _note(self, content: str, owner: str, clips: Sequence[Clip]) -> None:
        for clip in clips:
            self._files.parts.note_one(content, owner, *clip.part)

    async def _pages(
        self,
        opened: OpenedPdf,
        numbers: Sequence[int],
        where: str,
        images: ImageBudgets,
        characters: RequestBudget,
    ) -> list[ResolvedImage | Mark]:
        """Pages of a PDF as images, or for a model without images as documents."""
        if self._has_images:
            return [self._page(opened, number, f"{where} page {number}", images) for number in numbers]
        assert self._documents is not None
        assert self._pdfs is not None
        texts = await self._pdfs.read_in_turn(opened, where, partial(opened.texts, numbers))
        found: list[ResolvedImage | Mark] = []
        for number in numbers:
            if not texts[number].strip():
                raise InvalidRequest(
                    f"{where}: page {number} of the PDF has no text, and the model takes no images", parameter=where
                )
            characters.take(len(texts[number]), where)
            found.append(await self._documents.mark_soon(opened.content[number - 1], texts[number]))
        return found

    def _page(self, opened: OpenedPdf, number: int, where: str, images: ImageBudgets) -> ResolvedImage:
        content, (width, height) = opened.content[number - 1], opened.sizes[number - 1]
        tokens = 0 if self._limits is None else self._limits.check(width, height, where)
        images.pixels.take(width * height, where)
        images.tokens.take(tokens, where)
        is_needed = not self._images.has_decoded(content) or not self._is_processed(content)
        return ResolvedImage(content, opened.image(number, is_needed))

    async def _found(
        self, result: Result, where: str, images: ImageBudgets, characters: RequestBudget, opened: _Opened
    ) -> ResolvedImage | Mark:
        """A part that was found in a vector store: a page, a passage, or a picture."""
        hit, reference = result.hit, result.reference
        if hit.text and (hit.page is None or not self._has_images):
            if self._documents is None:
                raise InvalidRequest("orbit.retrieve: this deployment takes no documents", parameter="orbit.retrieve")
            characters.take(len(hit.text), where)
            return await self._documents.mark_soon(hit.content, hit.text)
        if not self._has_images:
            raise InvalidRequest(
                f"orbit.retrieve: {hit.filename} has no text there, and the model takes no images",
                parameter="orbit.retrieve",
            )
        owner = DYNAMIC_TENANT if is_shared(reference.content) else reference.tenant
        try:
            data = await asyncio.to_thread(self._stores.bytes_of, reference)
        except UnknownFile as error:
            raise NotFound(f"orbit.retrieve: {hit.filename} was deleted just now; ask again") from error
        if hit.page is None:
            return await asyncio.to_thread(self._images.identify, data, owner, where, images)
        assert self._pdfs is not None
        pdf = await opened.once(hit.file, partial(self._pdfs.open_in_turn, data, reference.content, owner, where, True))
        return self._page(pdf, hit.page, where, images)

    async def _decode_new(
        self, found: Sequence[_Resolved], places: Sequence[str], at_once: asyncio.Semaphore
    ) -> dict[str, ResolvedImage]:
        """Decode the images that are not known yet, or no longer processed, by content.

        Waits until there is memory for all of them.
        """
        new: dict[str, tuple[ResolvedImage, str]] = {}
        videos: dict[tuple[str, bytes], list[Clip]] = {}  # by place and file
        for one, where in zip(found, places, strict=True):
            if isinstance(one, Clip) and not self._is_processed(one.content):
                videos.setdefault((where, one.data), []).append(one)
            if not isinstance(one, ResolvedImage):
                continue
            if not self._images.has_decoded(one.content) or not self._is_processed(one.content):
                new.setdefault(one.content, (one, where))

        if not new and not videos:
            return {}
        clips = [clip for several in videos.values() for clip in several]
        share = await self._budget.take(
            sum(image.pixels for image, _ in new.values()) + sum(clip.pixels for clip in clips)
        )
        pages: dict[OpenedPdf, list[tuple[ResolvedImage, str]]] = {}
        images: list[tuple[ResolvedImage, str]] = []
        for image, where in new.values():
            pdf = image.image.opened if isinstance(image.image, PageImage) else None
            (images if pdf is None else pages.setdefault(pdf, [])).append((image, where))
        for clip in clips:
            share.held_by(clip)

        async def decode(image: ResolvedImage, where: str) -> list[ResolvedImage]:
            async with at_once:
                return [await asyncio.to_thread(self._images.decode, image, where, share)]

        async def decode_pages(pdf: OpenedPdf, several: list[tuple[ResolvedImage, str]]) -> list[ResolvedImage]:
            def decoded() -> list[ResolvedImage]:
                return [self._images.decode(image, where, share) for image, where in several]

            assert self._pdfs is not None
            async with at_once:
                return await self._pdfs.read_in_turn(pdf, several[0][1], decoded)

        async def decode_clips(several: list[Clip], where: str) -> None:
            async with at_once:
                await self._opener(where).decode_in_turn(several, where)

        try:
            await _together(decode_clips(several, where) for (where, _), several in videos.items())
            decoding = (*(decode(*one) for one in images), *(decode_pages(*one) for one in pages.items()))
            return {image.content: image for several in await _together(decoding) for image in several}
        except BaseException:
            share.give()
            raise

    async def page_picture(self, file_id: str, page: int, tenant: str) -> bytes | None:
        """A page of a PDF that a tenant may name, as a PNG file; None if it has none of that number.

        Raises:
            NotFound: no such file for this tenant. InvalidRequest: a PDF that cannot be read.
        """
        data, owner, _ = await self._file({"file": {"file_id": file_id}}, tenant, "file")
        if self._pdfs is None or not has_pages(data):
            return None
        content = owned_content_id(data, owner, self._secret)
        opened = await self._pdfs.open_in_turn(data, content, owner, "file", True)
        if not 1 <= page <= len(opened.sizes):
            return None
        return await self._pdfs.read_in_turn(opened, "file", partial(png, opened.image(page, is_needed=True)))

    def open_file(self, data: bytes, owner: str, where: str) -> ResolvedImage | ResolvedText:
        """Check a file's bytes, an image or UTF-8 text, and name it for its owner.

        Raises:
            InvalidRequest: neither, or broken. TooLarge: more bytes or pixels than allowed.
        """
        found = self._images.identify_file(data, owner, where)
        return found if isinstance(found, ResolvedText) else self._images.decode(found, where)

    async def open_for(
        self, purpose: str, data: bytes, owner: str, where: str, name: str = ""
    ) -> ResolvedImage | ResolvedText | OpenedPdf | list[Clip]:
        """Check an upload of one of OpenAI's purposes, by the name of its file, too.

        `vision` takes images and videos alone, the others what `open_file` takes, and PDFs.

        Raises:
            InvalidRequest: as `open_file`, and of a text that has the purpose `vision`. TooLarge: as `open_file`.
        """
        refuse_misnamed(name, data, where)
        if is_video(data):
            content = owned_content_id(data, owner, self._secret)
            return await self._opener(where).open_in_turn(data, content, VideoOptions(), where)
        if purpose != "vision" and self._pdfs is not None and has_pages(data):
            content = owned_content_id(data, owner, self._secret)
            return await self._pdfs.open_in_turn(data, content, owner, where, is_stored=True)
        return await asyncio.to_thread(self._open_as, purpose, data, owner, where)

    def _open_as(self, purpose: str, data: bytes, owner: str, where: str) -> ResolvedImage | ResolvedText:
        if purpose != "vision":
            return self.open_file(data, owner, where)
        refuse_pages(data, where)
        if self._documents is not None and as_text(data) is not None:
            raise InvalidRequest(
                f"{where}: a text, but purpose 'vision' is for images; upload it as 'user_data' or 'assistants'",
                parameter="purpose",
            )
        return self.open(data, owner, where)

    def open(self, data: bytes, owner: str, where: str) -> ResolvedImage:
        """Check an image's bytes and name it for its owner, a tenant or DYNAMIC_TENANT.

        Pixels are decoded only the first time this content is seen.

        Raises:
            InvalidRequest: not an image, or broken. TooLarge: more bytes or pixels than allowed.
        """
        return self._images.decode(self._images.identify(data, owner, where), where)

    async def _file(self, part: dict[str, Any], tenant: str, where: str) -> tuple[bytes, str, bool]:
        """A file's bytes, the owner of what is computed from it, and whether it is an upload.

        References come first: their KV serves everybody.
        """
        reference = part.get("file")
        given = reference if isinstance(reference, dict) else {}
        file_id, inline = given.get("file_id"), given.get("file_data")
        if isinstance(inline, str) and file_id is None:
            most = max(
                self._settings.max_file_bytes,
                0 if self._pdfs is None else self._pdfs.max_bytes,
                0 if self._clips is None else self._clips.max_bytes,
            )
            data = await asyncio.to_thread(bytes_of_data_url, inline, where, most)
            refuse_misnamed(given.get("filename"), data, where)
            return data, tenant, False
        if not isinstance(file_id, str):
            raise InvalidRequest(f"{where}: a file part needs file.file_id or file.file_data", parameter=where)
        with suppress(UnknownFile):
            return await asyncio.to_thread(self._stores.content, file_id), DYNAMIC_TENANT, True
        try:
            return await asyncio.to_thread(self._files.content, tenant, file_id), tenant, True
        except UnknownFile as error:
            raise NotFound(f"{where}: no such file: {file_id}") from error


def part_of(found: ResolvedImage | Mark | Clip) -> dict[str, Any]:
    """The content part of what was resolved, as vLLM's renderer takes it."""
    if isinstance(found, Clip):
        return {"type": "video_url", "video_url": found, "uuid": found.content}
    if isinstance(found, ResolvedImage):
        return {"type": "image_pil", "image_pil": found.image, "uuid": found.content}
    return {"type": "text", "text": found}


class _Opened:
    """PDFs that a request has opened, by file: the pages that it needs of one are drawn together."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[OpenedPdf]] = {}

    async def once(self, file: str, open_pdf: Callable[[], Coroutine[Any, Any, OpenedPdf]]) -> OpenedPdf:
        """The file, opened by whoever comes first."""
        if file not in self._tasks:
            self._tasks[file] = asyncio.create_task(open_pdf())
        return await self._tasks[file]


async def _together(calls: Iterable[Coroutine[Any, Any, _Result]]) -> list[_Result]:
    """Results of all tasks; the first error ends the others."""
    tasks = [asyncio.create_task(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
