"""Clips of a request's videos: whole, or segments cut at fixed times; each is a chunk.

A clip's content id follows from the video's bytes, the time range and the way it is sampled, so that a segment that
has been seen is linked wherever a later request's window begins. Times count from the video's first frame, also those
that Qwen3-VL writes between frames: a segment's tokens do not depend on the window either.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, MediaConnector
from vllm.multimodal.video import VIDEO_LOADER_REGISTRY, get_video_loader_backend_for_processor
from vllm.multimodal.video_decoders.base import VideoSourceMetadata, VideoTargetMetadata
from vllm.renderers import BaseRenderer
from vllm.transformers_utils.processor import get_video_processor_cls_name

from kvstore.records.keys import part_id
from serving.api.errors import TooLarge
from serving.documents.settings import VideoSettings
from serving.documents.video import UnreadableVideo, VideoHead, VideoReader, opened, video_metadata
from serving.frontend.errors import InvalidRequest
from serving.frontend.video_options import VideoOptions

_KNOWN = 4096  # videos whose heads are kept
SHORT = 8_000_000  # sampled pixels of a request that are decoded before there is a reservation for them
_SAMPLE = 64  # pixels of a side
_DEFAULT_FRAMES = 32  # vLLM's `VideoMediaIO`: most frames for models without a rule of their own


def _is_short(pixels: int) -> bool:
    return pixels <= SHORT


@dataclass
class Clip:
    """A video's part ready for vLLM's renderer, as `video_url` of a content part.

    `part`: form and number that its content id is made of. `indices` of frames in a video of constant rate; `frames` is
    empty until it is decoded, while it has one of the `readers`. `threads`: where it waits for one; None: anywhere.
    """

    content: str
    part: tuple[str, int]
    indices: tuple[int, ...]
    head: VideoHead
    settings: VideoSettings = field(repr=False)
    data: bytes = field(repr=False)
    frames: list[NDArray[np.uint8]] = field(default_factory=list, repr=False)
    readers: AbstractContextManager[object] = field(default_factory=nullcontext, repr=False, compare=False)
    threads: Executor | None = field(default=None, repr=False, compare=False)

    @property
    def pixels(self) -> int:
        """Pixels of all frames."""
        return len(self.indices) * self.head.width * self.head.height

    @property
    def decoded(self) -> tuple[NDArray[np.uint8], dict[str, Any]]:
        """vLLM's form: frames [n, height, width, 3] and their metadata.

        They are decoded now if they were not before.

        Raises:
            UnreadableVideo: frames of it cannot be decoded.
        """
        if not self.frames:
            with self.readers, opened(self.data, self.settings) as reader:
                fill([self], reader)
        return np.stack(self.frames), video_metadata(self.indices, self.head.fps, self.head.frames)


@MEDIA_CONNECTOR_REGISTRY.register("http")
class ClipConnector(MediaConnector):
    """vLLM's connector, which takes clips that are decoded as well as URLs."""

    async def fetch_video_async(self, video_url: Any, **options: Any) -> Any:
        """The clip's frames and metadata."""
        if isinstance(video_url, Clip):
            threads = None if video_url.frames else video_url.threads
            return await asyncio.get_running_loop().run_in_executor(threads, lambda: video_url.decoded)
        return await super().fetch_video_async(video_url, **options)


class Clips:
    """Opener of videos for one model. Thread-safe.

    What is `in_turn` waits without a thread for one of those that read videos.

    `processor`: class name of the model's video processor, which decides how vLLM samples.
    """

    def __init__(self, settings: VideoSettings, processor: str | None) -> None:
        self._settings = settings
        backend = get_video_loader_backend_for_processor(processor) or "opencv"
        self._sampler = VIDEO_LOADER_REGISTRY.load(backend)
        self._form = f"clip-{backend}-{settings.fps:g}-1"
        self._heads: OrderedDict[str, VideoHead] = OrderedDict()
        self._lock = threading.Lock()
        self._readers = threading.Semaphore(settings.readers)
        self._reading = ThreadPoolExecutor(settings.readers, "video")

    @classmethod
    def of(cls, renderer: BaseRenderer, settings: VideoSettings) -> Clips | None:
        """The opener for a renderer's model; None if it takes no videos."""
        if (processor := renderer.mm_processor) is None:
            return None
        if "video" not in processor.info.get_supported_mm_limits():
            return None
        return cls(settings, get_video_processor_cls_name(renderer.model_config))

    @property
    def max_bytes(self) -> int:
        """Most bytes of a video."""
        return self._settings.max_bytes

    @property
    def max_pixels(self) -> int:
        """Most pixels of all sampled frames of a request."""
        return self._settings.max_sampled_pixels

    def sample(self) -> Clip:
        """A decoded clip of a second in black, to learn by it how the model's are written."""
        frames = [np.zeros((_SAMPLE, _SAMPLE, 3), np.uint8)] * 4
        return Clip(
            "0" * 64, ("", 0), (0, 1, 2, 3), VideoHead(4, 1.0, _SAMPLE, _SAMPLE, 0), self._settings, b"", frames
        )

    def open(
        self,
        data: bytes,
        content: str,
        options: VideoOptions,
        where: str,
        decodes: Callable[[int], bool] = _is_short,
    ) -> list[Clip]:
        """The clips of a video with this content id.

        They are decoded already where the video is new and their frames are few: it takes a process to read it, and a
        camera's clips would take two each.

        Args:
            decodes: whether so many pixels are few.

        Raises:
            InvalidRequest: a video that cannot be read or is beyond a bound, or nothing of it in the range asked for.
            TooLarge: more bytes than allowed.
        """
        if len(data) > self.max_bytes:
            raise TooLarge(f"{where}: the video has more than the {self.max_bytes} bytes that are allowed")
        with self._lock:
            head = self._heads.get(content)
        if head is not None:
            return self._cut(data, content, head, options, where)
        try:
            with self._readers, opened(data, self._settings) as reader:
                with self._lock:
                    self._heads[content] = reader.head
                    if len(self._heads) > _KNOWN:
                        self._heads.popitem(last=False)
                clips = self._cut(data, content, reader.head, options, where)
                if decodes(sum(clip.pixels for clip in clips)):
                    fill(clips, reader)
                return clips
        except UnreadableVideo as error:
            raise InvalidRequest(f"{where}: {error}", parameter=where) from error

    async def open_in_turn(
        self, data: bytes, content: str, options: VideoOptions, where: str, decodes: Callable[[int], bool] = _is_short
    ) -> list[Clip]:
        """See `open`."""
        with self._lock:
            threads = None if content in self._heads else self._reading
        call = partial(self.open, data, content, options, where, decodes)
        return await asyncio.get_running_loop().run_in_executor(threads, call)

    def _cut(self, data: bytes, content: str, head: VideoHead, options: VideoOptions, where: str) -> list[Clip]:
        found = [self._clip(data, content, head, *one) for one in cut(head.seconds, options)]
        clips = [clip for clip in found if clip.indices]
        if not clips:
            raise InvalidRequest(
                f"{where}: the video has {head.seconds:.2f} s, and no frame of it is between orbit.video.start_seconds "
                "and end_seconds",
                parameter="orbit.video",
            )
        return clips

    def decode(self, clips: Sequence[Clip], where: str) -> None:
        """Decode clips of one video in one pass, those that are not decoded yet.

        Raises:
            InvalidRequest: frames of it cannot be decoded.
        """
        waiting = [clip for clip in clips if not clip.frames]
        if not waiting:
            return
        try:
            with self._readers, opened(waiting[0].data, self._settings) as reader:
                fill(waiting, reader)
        except UnreadableVideo as error:
            raise InvalidRequest(f"{where}: {error}", parameter=where) from error

    async def decode_in_turn(self, clips: Sequence[Clip], where: str) -> None:
        """See `decode`."""
        if not all(clip.frames for clip in clips):
            await asyncio.get_running_loop().run_in_executor(self._reading, self.decode, clips, where)

    def _clip(self, data: bytes, content: str, head: VideoHead, start: float, stop: float) -> Clip:
        first = math.ceil(start * head.fps - 1e-6)
        count = min(math.ceil(stop * head.fps - 1e-6), head.frames) - first
        part = f"{self._form}-{round(stop * 1000)}", round(start * 1000)
        name = part_id(content, *part)
        if count <= 0:
            return Clip(name, part, (), head, self._settings, data, readers=self._readers, threads=self._reading)
        source = VideoSourceMetadata(count, head.fps, count / head.fps)
        target = VideoTargetMetadata(_DEFAULT_FRAMES, self._settings.fps, self._settings.max_seconds)
        # of one frame, samplers that round down to pairs would take none
        sampled = [0] if count == 1 else self._sampler.compute_frames_index_to_sample(source, target)
        indices = tuple(first + index for index in sampled)
        return Clip(name, part, indices, head, self._settings, data, readers=self._readers, threads=self._reading)


def fill(clips: Sequence[Clip], reader: VideoReader) -> None:
    """Give clips of the reader's video their frames; raises UnreadableVideo."""
    fps = reader.head.fps
    wanted = sorted({index for clip in clips for index in clip.indices})
    frames = dict(zip(wanted, reader.frames([index / fps for index in wanted]), strict=True))
    for clip in clips:
        clip.frames = [frames[index] for index in clip.indices]


def cut(seconds: float, options: VideoOptions) -> list[tuple[float, float]]:
    """Time ranges of a video's clips: one, or segments between multiples of `segment_seconds`."""
    stop = min(seconds, options.end_seconds or seconds)
    if options.segment_seconds is None:
        return [(options.start_seconds, stop)] if options.start_seconds < stop else []
    size = options.segment_seconds
    first, last = math.floor(options.start_seconds / size + 1e-9), math.ceil(stop / size - 1e-9)
    return [(i * size, min((i + 1) * size, seconds)) for i in range(first, last)]
