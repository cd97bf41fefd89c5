"""Files of videos: each kind is read right, or refused by what is wrong with it."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from video_support import FPS, animation, corner, declaring, shown_by, sound, video

from serving.documents.settings import VideoSettings
from serving.documents.video import UnreadableVideo, is_video, read_frames, read_head

_KEYS = {"g": "12"}  # a key frame every three seconds
FILES: dict[str, Callable[[], bytes]] = {
    "MP4": lambda: video(movflags="faststart"),  # its tables stand first
    "MP4, open groups": lambda: video(coding=_KEYS | {"x264-params": "open-gop=1:bframes=3"}),
    "fragmented MP4": lambda: video(movflags="frag_keyframe+empty_moov"),
    "HEVC MOV": lambda: video(kind="mov", codec="libx265", coding=_KEYS | {"x265-params": "log-level=none"}),
    "10-bit MKV": lambda: video(kind="matroska", pixels="yuv420p10le", coding=_KEYS),
    "AV1 MP4": lambda: video(codec="libsvtav1", coding=_KEYS),
    "VP9 WebM": lambda: video(kind="webm", codec="libvpx-vp9", coding=_KEYS),
    "VP8 WebM": lambda: video(kind="webm", codec="libvpx"),
    "GIF": lambda: animation("GIF"),
    "WebP": lambda: animation("WEBP"),
}


@cache
def file(kind: str) -> bytes:
    return FILES[kind]()


@pytest.mark.parametrize("kind", FILES)
def test_the_frame_of_a_time_is_the_one_shown_then(kind: str):
    data = file(kind)
    head = read_head(data, VideoSettings())
    assert (head.frames, head.width, head.height, head.audio) == (48, 96, 64, 0)
    assert head.fps == pytest.approx(FPS, rel=1e-3)
    frames = read_frames(data, [0, 1.0, 5.25, 11.75], VideoSettings())
    assert [frame.shape for frame in frames] == [(64, 96, 3)] * 4
    assert [float(frame.mean()) for frame in frames] == pytest.approx([0, 20, 105, 235], abs=4)
    assert is_video(data) != (kind in ("GIF", "WebP")), "which are images where they come as files"


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "matroska"])
def test_of_variable_rate_the_frame_that_is_shown_then_is_taken(kind: str):
    ms = [100, 1000, 100, 800]
    data = video(4, kind, times=[0, 0.1, 1.1, 1.2]) if kind == "matroska" else animation(kind, 4, ms)
    head = read_head(data, VideoSettings())
    assert head.frames == 4
    if kind != "matroska":  # which does not tell for how long its last frame is shown
        assert head.seconds == pytest.approx(2.0)
    frames = read_frames(data, [0, 0.5, 1.05, 1.15, 1.9], VideoSettings())
    assert [float(frame.mean()) for frame in frames] == pytest.approx([0, 5, 5, 10, 15], abs=3)


def test_a_rate_that_a_container_rounds_takes_no_frame_twice():
    """Matroska's times are milliseconds: of a frame at 66.7 ms it says 67."""
    data = video(45, "matroska", rate=30)
    with av.open(io.BytesIO(data)) as container:
        every = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    fps = read_head(data, VideoSettings()).fps
    frames = read_frames(data, [i / fps for i in range(45)], VideoSettings())
    assert all(np.array_equal(*pair) for pair in zip(frames, every, strict=True))


@pytest.mark.parametrize("kind", ["MP4, open groups", "HEVC MOV", "AV1 MP4", "VP9 WebM", "10-bit MKV", "GIF"])
def test_frames_behind_a_key_frame_are_those_of_a_decoder_that_began_at_the_first(kind: str):
    data = file(kind)
    whole = read_frames(data, [i / FPS for i in range(48)], VideoSettings())
    for first in (13, 30, 47):
        late = read_frames(data, [i / FPS for i in range(first, 48)], VideoSettings())
        assert all(np.array_equal(*pair) for pair in zip(late, whole[first:], strict=True))


@pytest.mark.parametrize(
    ("matrix", "expected"),
    [
        ((1, 0, 0, 1), corner()),
        ((0, 1, -1, 0), np.rot90(corner(), -1)),
        ((-1, 0, 0, -1), np.rot90(corner(), 2)),
        ((0, -1, 1, 0), np.rot90(corner())),
        ((-1, 0, 0, 1), corner()[:, ::-1]),
        ((1, 0, 0, -1), corner()[::-1]),
        ((0, 1, 1, 0), corner().swapaxes(0, 1)),
        ((0, -1, -1, 0), np.rot90(corner(), 2).swapaxes(0, 1)),
    ],
    ids=["upright", "clockwise", "upside down", "counter-clockwise", "mirrored", "flipped", "turned over", "both"],
)
def test_a_display_matrix_turns_frames_as_players_do(matrix: tuple[int, ...], expected: np.ndarray):
    data = shown_by(matrix, video(pictures=[corner()] * 2))
    (frame,) = read_frames(data, [0.0], VideoSettings())
    assert frame.shape == expected.shape
    assert np.abs(frame.astype(int) - expected).mean() < 8


WRONG: dict[str, tuple[Callable[[], bytes], dict[str, Any], str]] = {
    "empty": (lambda: b"", {}, "empty"),
    "text": (lambda: b"no video at all", {}, "not MP4"),
    "first bytes": (lambda: video()[:400], {}, "it is truncated"),
    "truncated MP4": (lambda: file("MP4")[:-40], {}, "it is truncated"),
    "truncated WebM": (lambda: file("VP9 WebM")[:-40], {}, "it is truncated"),
    "truncated GIF": (lambda: file("GIF")[:-40], {}, "it is truncated"),
    "truncated WebP": (lambda: file("WebP")[:-40], {}, "it is truncated"),
    "MP4 without tables": (lambda: file("MP4").replace(b"moov", b"mooo"), {}, "broken"),
    "no frames": (lambda: declaring(0, video()), {}, "no frames"),
    "only sound": (sound, {}, "no picture, only sound"),
    "sound with a cover": (lambda: sound(has_cover=True), {}, "no picture, only sound"),
    "long": (video, {"max_seconds": 5.0}, "it is 12.0 s long, at most 5 s"),
    "many frames": (video, {"max_frames": 10}, "more than the 10 frames"),
    "many frames of WebP": (lambda: file("WebP"), {"max_frames": 10}, "more than the 10 frames"),
    "millions declared": (lambda: declaring(2_000_000, video()), {}, "more than the 100000 frames"),
    "billions declared": (lambda: declaring(4_000_000_000, video()), {}, "more than the 100000 frames"),
    "large": (video, {"max_frame_pixels": 1000}, "96x64 pixels, at most 1000"),
    "large WebP": (lambda: file("WebP"), {"max_frame_pixels": 1000}, "96x64 pixels, at most 1000"),
    "still WebP": (lambda: animation("WEBP", 1), {}, "WebP without animation"),
    "another codec": (lambda: video(4, codec="mpeg2video"), {}, "its codec 'mpeg2video' is not one of"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_named(case: str):
    make, bounds, words = WRONG[case]
    with pytest.raises(UnreadableVideo, match=words):
        read_head(make(), VideoSettings(**bounds))


def test_a_reader_that_takes_too_long_is_ended():
    with pytest.raises(UnreadableVideo, match=r"took longer than 0\.001 s"):
        read_head(video(4), VideoSettings(timeout_s=0.001))


def test_sound_is_told_and_left_alone():
    data = video(4, has_sound=True)
    assert read_head(data, VideoSettings()).audio == 1
    assert len(read_frames(data, [0, 0.5], VideoSettings())) == 2


@settings(max_examples=40)
@given(
    kind=st.sampled_from(["MP4", "10-bit MKV", "VP9 WebM", "GIF", "WebP"]),
    place=st.floats(0, 1, exclude_max=True),
    put=st.binary(min_size=1, max_size=32),
    kept=st.sampled_from([0.4, 0.9, 1.0, 1.0, 1.0]),
)
def test_a_damaged_file_is_frames_or_a_refusal(kind: str, place: float, put: bytes, kept: float):
    data = file(kind)
    at = int(place * len(data))
    damaged = (data[:at] + put + data[at + len(put) :])[: int(kept * len(data))]
    frames: list[Any] = []
    with suppress(UnreadableVideo):
        frames = read_frames(damaged, [0.0, 1.0], VideoSettings(timeout_s=20))
    assert [frame.ndim for frame in frames] in ([], [3, 3])
