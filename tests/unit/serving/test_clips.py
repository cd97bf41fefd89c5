"""Videos on their way in: read within bounds, sampled as vLLM does, cut at fixed times into chunks."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from video_support import FPS, sound, video
from vllm.renderers import ChatParams, renderer_from_config
from vllm.renderers.params import TokenizeParams

from infra.reference import WEIGHTS
from kvstore.settings import FileSettings
from kvstore.uploads.files import FileStore
from kvstore.uploads.vector_stores import VectorStores
from serving.api.clips import Clips, cut
from serving.api.media import MediaResolver
from serving.documents.settings import VideoSettings
from serving.documents.video import UnreadableVideo, read_frames, read_head
from serving.engine_spec import front_end_config
from serving.frontend.errors import InvalidRequest
from serving.frontend.prompt_segments import Delimiters, Segments, segment
from serving.frontend.video_options import VideoOptions
from serving.settings import HttpSettings, ModelSettings

MP4 = video()


@pytest.mark.parametrize(
    ("kind", "codec", "pixels"),
    [("mp4", "libx264", "yuv420p"), ("webm", "libvpx-vp9", "yuv420p"), ("matroska", "libx264", "yuv420p10le")],
)
def test_the_frame_of_a_time_is_the_one_shown_then(kind: str, codec: str, pixels: str):
    data = video(kind=kind, codec=codec, pixels=pixels)
    head = read_head(data, VideoSettings())
    assert (head.frames, head.width, head.height, head.audio) == (48, 96, 64, 0)
    assert head.fps == pytest.approx(FPS, rel=1e-2)
    frames = read_frames(data, [0, 1.0, 5.25, 11.75], VideoSettings())
    assert [frame.shape for frame in frames] == [(64, 96, 3)] * 4
    assert [float(frame.mean()) for frame in frames] == pytest.approx([0, 20, 105, 235], abs=4)


@pytest.mark.parametrize(
    ("data", "bounds", "words"),
    [
        (b"", {}, "empty"),
        (b"no video at all", {}, "not MP4"),
        (MP4[:400], {}, "broken, truncated"),
        (sound(), {}, "no picture, only sound"),
        (MP4, {"max_seconds": 5.0}, "at most 5 s"),
        (MP4, {"max_frames": 10}, "more than the 10 frames"),
        (MP4, {"max_frame_pixels": 1000}, "96x64 pixels, at most 1000"),
        (video(4, codec="mpeg2video"), {}, "its codec 'mpeg2video' is not one of"),
    ],
)
def test_what_is_wrong_is_named(data: bytes, bounds: dict[str, Any], words: str):
    with pytest.raises(UnreadableVideo, match=words):
        read_head(data, VideoSettings(**bounds))


@settings(max_examples=12, deadline=None)
@given(at=st.integers(0, len(MP4) - 1), flipped=st.binary(min_size=1, max_size=32), keep=st.integers(1, len(MP4)))
def test_a_damaged_file_is_frames_or_a_refusal(at: int, flipped: bytes, keep: int):
    damaged = (MP4[:at] + flipped + MP4[at + len(flipped) :])[:keep]
    frames: list[Any] = []
    with suppress(UnreadableVideo):
        frames = read_frames(damaged, [0.0, 1.0], VideoSettings(timeout_s=20))
    assert len(frames) in (0, 2)


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

    async def segments(self, data: bytes, **options: Any) -> Segments:
        url = f"data:video/mp4;base64,{base64.b64encode(data).decode()}"
        content = [{"type": "video_url", "video_url": {"url": url}}, {"type": "text", "text": "What happens?"}]
        messages = [{"role": "user", "content": content}]
        resolved = await self.media.resolve_messages(messages, "local", video=VideoOptions(**options))
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


async def test_a_video_that_cannot_be_read_is_refused_by_its_place(front: Front):
    with pytest.raises(InvalidRequest, match=r"messages\[0\].content\[0\]: the video cannot be read"):
        await front.segments(MP4[:400])
    with pytest.raises(InvalidRequest, match=r"none of them between"):
        await front.segments(MP4, start_seconds=60)


async def test_models_without_videos_refuse_them(tmp_path: Path):
    files = FileStore(str(tmp_path), FileSettings())
    media = MediaResolver(HttpSettings(), files, VectorStores(files))
    part = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}
    with pytest.raises(InvalidRequest, match="takes no videos"):
        await media.resolve_messages([{"role": "user", "content": [part]}], "local")
