"""Videos on their way in: sampled as vLLM does, cut at fixed times into chunks."""

from __future__ import annotations

import asyncio
import base64
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from video_support import SIZE, video
from vllm.renderers import ChatParams, renderer_from_config
from vllm.renderers.params import TokenizeParams

from infra.reference import WEIGHTS
from kvstore.settings import FileSettings
from kvstore.uploads.files import FileStore
from kvstore.uploads.vector_stores import VectorStores
from serving.api.clips import Clip, Clips, cut
from serving.api.errors import TooLarge
from serving.api.media import MediaResolver
from serving.documents.settings import VideoSettings
from serving.documents.video import VideoReader, opened
from serving.engine_spec import front_end_config
from serving.frontend.errors import InvalidRequest
from serving.frontend.prompt_segments import Delimiters, Segments, segment
from serving.frontend.video_options import VideoOptions
from serving.settings import HttpSettings, ModelSettings

MP4 = video()


@pytest.mark.parametrize(
    ("options", "ranges"),
    [
        ({}, [(0, 10)]),
        ({"start_seconds": 3, "end_seconds": 7}, [(3, 7)]),
        ({"start_seconds": 11}, []),
        ({"segment_seconds": 4}, [(0, 4), (4, 8), (8, 10)]),
        ({"segment_seconds": 4, "start_seconds": 4}, [(4, 8), (8, 10)]),
        ({"segment_seconds": 4, "start_seconds": 5, "end_seconds": 7}, [(4, 8)]),
    ],
)
def test_segments_lie_between_fixed_times(options: dict[str, float], ranges: list[tuple[float, float]]):
    assert cut(10, VideoOptions(**options)) == ranges


@dataclass
class Front:
    """A front end without engines: the resolver and vLLM's renderer."""

    renderer: Any
    media: MediaResolver
    delimiters: Delimiters

    async def segments(self, data: bytes, notices: list[str] | None = None, **options: Any) -> Segments:
        url = f"data:video/mp4;base64,{base64.b64encode(data).decode()}"
        content = [{"type": "video_url", "video_url": {"url": url}}, {"type": "text", "text": "What happens?"}]
        messages = [{"role": "user", "content": content}]
        asked = VideoOptions(**options)
        resolved = await self.media.resolve_messages(messages, "local", video=asked, notices=notices)
        how = TokenizeParams(max_total_tokens=16384, add_special_tokens=False)
        params = ChatParams(chat_template_kwargs={"add_generation_prompt": True, "tokenize": False})
        _, (prompt,) = await self.renderer.render_chat_async([resolved], params, how, skip_mm_cache=True)
        return segment(prompt, self.delimiters)


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def front(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    model = ModelSettings(path=WEIGHTS / request.param, dtype="float32", max_model_len=8192)
    config = front_end_config(model, processor_cache_gib=0)
    renderer = renderer_from_config(config)
    files = FileStore(str(tmp_path_factory.mktemp("files")), FileSettings())
    clips = Clips.of(renderer, VideoSettings())
    media = MediaResolver(HttpSettings(), files, VectorStores(files), is_processed=lambda content: False, clips=clips)
    yield Front(renderer, media, Delimiters.of(config.model_config, renderer.get_tokenizer()))
    renderer.shutdown()


def chunk_tokens(segments: Segments) -> dict[str, list[int]]:
    return {chunk.content: segments.token_ids[chunk.start : chunk.stop] for chunk in segments.chunks}


async def test_a_clip_is_one_chunk_with_its_timestamps(front: Front):
    segments = await front.segments(MP4)
    (chunk,) = segments.chunks
    assert chunk.modality == "video"
    assert 0 < chunk.embedded <= chunk.count <= len(chunk)
    outside = segments.token_ids[: chunk.start] + segments.token_ids[chunk.stop :]
    vision = front.renderer.get_tokenizer().encode("<|vision_start|><|video_pad|><|vision_end|>")
    assert not set(vision) & set(outside), "delimiters and timestamps go with the clip"


async def test_a_window_that_slides_keeps_the_segments_that_stay(front: Front):
    first = await front.segments(MP4, segment_seconds=4, end_seconds=8)
    second = await front.segments(MP4, segment_seconds=4, start_seconds=4)
    before, after = chunk_tokens(first), chunk_tokens(second)
    assert (len(before), len(after)) == (2, 2)
    (stays,) = before.keys() & after.keys()
    assert stays == list(before)[1] == next(iter(after))
    assert before[stays] == after[stays]


async def test_sound_is_left_out_and_told_once(front: Front):
    notices: list[str] = []
    await front.segments(video(has_sound=True), notices, segment_seconds=4)
    assert notices == ["sound is left out: of 1 videos, first messages[0].content[0]"]
    await front.segments(MP4, notices)
    assert len(notices) == 1


async def test_a_clip_that_left_the_processor_cache_is_decoded_when_it_is_asked_for(front: Front):
    decoded = await front.segments(MP4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(front.media, "_is_processed", lambda content: True)
        later = await front.segments(MP4)
    assert later.token_ids == decoded.token_ids


async def test_a_video_that_cannot_be_read_is_refused_by_its_place(front: Front):
    with pytest.raises(InvalidRequest, match=r"messages\[0\].content\[0\]: the video cannot be read: it is truncated"):
        await front.segments(MP4[:400])
    for start in (60, 11.9):
        with pytest.raises(InvalidRequest, match=r"has 12.00 s, and no frame of it is between"):
            await front.segments(MP4, start_seconds=start)


def request_of(*videos: bytes) -> list[dict[str, Any]]:
    urls = [f"data:video/mp4;base64,{base64.b64encode(data).decode()}" for data in videos]
    return [{"role": "user", "content": [{"type": "video_url", "video_url": {"url": url}} for url in urls]}]


async def test_videos_beyond_a_bound_are_refused_by_its_number(front: Front, tmp_path: Path):
    files = FileStore(str(tmp_path), FileSettings())

    async def ask(url: str, **bounds: int) -> None:
        clips = Clips.of(front.renderer, VideoSettings(**bounds))
        media = MediaResolver(HttpSettings(), files, VectorStores(files), clips=clips)
        part = {"type": "video_url", "video_url": {"url": url}}
        await media.resolve_messages([{"role": "user", "content": [part, part]}], "local")

    url = request_of(MP4)[0]["content"][0]["video_url"]["url"]
    most = len(MP4) - 4
    with pytest.raises(TooLarge, match=rf"content\[0\]: larger than {most} bytes"):
        await ask(url, max_bytes=most)
    clips = Clips.of(front.renderer, VideoSettings(max_bytes=most))
    assert clips is not None
    with pytest.raises(TooLarge, match=rf"here: the video has more than the {most} bytes") as refused:
        clips.open(MP4, "f" * 64, VideoOptions(), "here")
    assert refused.value.http_status == 413
    pixels = sum(clip.pixels for clip in front.media._clips.open(MP4, "f" * 64, VideoOptions(), "here"))
    await ask(url, max_sampled_pixels=2 * pixels)
    with pytest.raises(TooLarge, match=f"the request's videos have more than {2 * pixels - 1} sampled pixels in all"):
        await ask(url, max_sampled_pixels=2 * pixels - 1)


async def test_a_requests_short_videos_are_decoded_ahead_up_to_a_bound_for_all(
    front: Front, monkeypatch: pytest.MonkeyPatch
):
    opener = front.media._clips
    assert opener is not None
    ahead: list[bool] = []

    def opened(*given: Any) -> list[Clip]:
        clips = Clips.open(opener, *given)
        ahead.extend(bool(clip.frames) for clip in clips)
        return clips

    monkeypatch.setattr(opener, "open", opened)
    videos = [video(frames=8 + n) for n in range(4)]  # new ones, of 4 or 5 or 6 sampled frames
    monkeypatch.setattr("serving.api.media.SHORT", 12 * SIZE[0] * SIZE[1])
    (message,) = await front.media.resolve_messages(request_of(*videos), "local")
    assert 1 <= sum(ahead) <= 3
    assert all(part["video_url"].frames for part in message["content"]), "the others once there was memory"


async def test_no_more_videos_are_read_at_once_than_there_are_readers(front: Front, monkeypatch: pytest.MonkeyPatch):
    running, most, lock = 0, 0, threading.Lock()

    @contextmanager
    def counted(data: bytes, settings: VideoSettings) -> Iterator[VideoReader]:
        nonlocal running, most
        with opened(data, settings) as reader:
            with lock:
                running += 1
                most = max(most, running)
            try:
                yield reader
            finally:
                time.sleep(0.05)  # others would come
                with lock:
                    running -= 1

    monkeypatch.setattr("serving.api.clips.opened", counted)
    clips = Clips.of(front.renderer, VideoSettings(readers=1))
    assert clips is not None
    names, options = [f"{n:064x}" for n in range(4)], VideoOptions()

    def read(name: str) -> None:
        for clip in clips.open(MP4, name, options, "here", lambda pixels: name == names[0]):
            assert len(clip.decoded[0]) == len(clip.indices)

    await asyncio.gather(*(asyncio.to_thread(read, name) for name in names))
    assert most == 1


async def test_videos_that_wait_to_be_read_take_no_thread_of_others(
    front: Front, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    gate = threading.Event()

    @contextmanager
    def gated(data: bytes, settings: VideoSettings) -> Iterator[VideoReader]:
        gate.wait()
        with opened(data, settings) as reader:
            yield reader

    monkeypatch.setattr("serving.api.clips.opened", gated)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
    files, clips = FileStore(str(tmp_path), FileSettings()), Clips.of(front.renderer, VideoSettings())
    media = MediaResolver(HttpSettings(), files, VectorStores(files), clips=clips)
    asked = request_of(*(video(frames=8 + n) for n in range(4)))
    waiting = asyncio.create_task(media.resolve_messages(asked, "local"))
    await asyncio.sleep(0.05)
    try:
        assert await asyncio.wait_for(asyncio.to_thread(lambda: "read"), 20) == "read"
    finally:
        gate.set()
    (message,) = await waiting
    assert len(message["content"]) == 4


async def test_models_without_videos_refuse_them(tmp_path: Path):
    files = FileStore(str(tmp_path), FileSettings())
    media = MediaResolver(HttpSettings(), files, VectorStores(files))
    part = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}
    with pytest.raises(InvalidRequest, match="takes no videos"):
        await media.resolve_messages([{"role": "user", "content": [part]}], "local")


async def test_the_clips_of_an_upload_are_noted_for_its_deletion(front: Front):
    files = front.media._files
    file = files.create("local", "a.mp4", "vision", MP4)
    part = {"role": "user", "content": [{"type": "file", "file": {"file_id": file.id}}]}
    (message,) = await front.media.resolve_messages([part], "local", video=VideoOptions(segment_seconds=4))
    clips = {part["uuid"] for part in message["content"]}
    assert clips == set(files.parts.of(file.content, "local"))
    files.parts.settle(file.content, "local")
    assert not files.parts.of(file.content, "local")
