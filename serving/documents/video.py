"""Frames of videos, decoded by PyAV, or Pillow, in a bounded process.

| file          | demuxer  |
|---------------|----------|
| MP4, MOV      | mov      |
| WebM, MKV     | matroska |
| animated GIF  | gif      |
| animated WebP | Pillow's |

The demuxer is chosen by the file's first bytes and never guessed: FFmpeg's playlists would open other files. Sound is
ignored. A video of variable rate is sampled as one of its mean rate: at each sampled time the frame that is shown then.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serving.documents.bounded_child import Child, bounded_child
from serving.documents.settings import VideoSettings
from serving.documents.video_containers import demuxer, is_cut_off

CODECS = ("h264", "hevc", "vp8", "vp9", "av1", "libdav1d", "libvpx", "libvpx-vp9", "mpeg4", "mjpeg", "gif")
_CHILD = Path(__file__).with_name("video_child.py")


class UnreadableVideo(ValueError):
    """A video that cannot be used; the message says why."""


@dataclass(frozen=True)
class VideoHead:
    """Size and length of a video.

    `width` and `height` are those of a frame before it is turned; `audio` counts sound tracks.
    """

    frames: int
    seconds: float
    width: int
    height: int
    audio: int

    @property
    def fps(self) -> float:
        """Mean frames a second."""
        return self.frames / self.seconds


def is_video(data: bytes) -> bool:
    """True for the first bytes of a container of videos alone, which GIF and WebP are not."""
    return demuxer(data) in ("mov", "matroska")


class VideoReader:
    """A video whose head is read, in a process that can decode it once."""

    def __init__(self, child: Child, settings: VideoSettings) -> None:
        self._child, self._settings = child, settings
        self.head = VideoHead(**self._line())

    def frames(self, times: Sequence[float]) -> list[NDArray[np.uint8]]:
        """Frames [height, width, 3] that are shown at `times`, turned upright.

        `times`: seconds from the first frame, rising.

        Raises:
            UnreadableVideo: frames cannot be decoded, change their size, or are beyond a bound.
        """
        self._child.send(list(times))
        found: list[NDArray[np.uint8]] = []
        for _ in times:
            line = self._line()
            width, height, size = int(line["width"]), int(line["height"]), int(line["bytes"])
            if width * height > self._settings.max_frame_pixels or size != width * height * 3:
                raise _Ended
            rgb = self._child.stdout.read(size)
            if len(rgb) < size:
                raise _Ended
            frame = np.frombuffer(rgb, np.uint8).reshape(height, width, 3)
            found.append(_upright(frame, *line["matrix"]))
        if any(frame.shape != found[0].shape for frame in found):
            raise UnreadableVideo("the video cannot be read: its frames change their size")
        return found

    def _line(self) -> dict[str, Any]:
        line = self._child.line()
        if line is None:
            raise _Ended
        if "error" in line:
            raise UnreadableVideo(f"the video cannot be read: {line['error']}")
        return line


class _Ended(Exception):
    """The process has ended before it had answered."""


@contextmanager
def opened(data: bytes, settings: VideoSettings) -> Iterator[VideoReader]:
    """Read a video's head; no frame is decoded before it is asked for.

    Raises:
        UnreadableVideo: empty, broken, truncated, without pictures, of another container or codec, beyond a bound.
    """
    if not data:
        raise UnreadableVideo("the video is empty (0 bytes)")
    if (kind := demuxer(data)) is None:
        raise UnreadableVideo("the video is not MP4, MOV, WebM, MKV, or an animated GIF or WebP")
    if is_cut_off(data, kind):
        raise UnreadableVideo("the video cannot be read: it is truncated, bytes are missing at its end")
    found = (find_spec(package) for package in ("av", "PIL"))
    job = {
        "sites": sorted({str(Path(spec.origin).parent.parent) for spec in found if spec and spec.origin}),
        "format": kind,
        "codecs": CODECS,
        "max_seconds": settings.max_seconds,
        "max_frames": settings.max_frames,
        "max_frame_pixels": settings.max_frame_pixels,
    }
    reader = bounded_child(_CHILD, job, data, settings.timeout_s, settings.memory_bytes)
    try:
        with reader as child:
            yield VideoReader(child, settings)
    except _Ended as error:
        late = f"took longer than {settings.timeout_s:g} s"
        why = late if child.is_late else "took too much memory, or broke the reader"
        raise UnreadableVideo(f"reading the video {why}") from error


def read_head(data: bytes, settings: VideoSettings) -> VideoHead:
    """Facts of a video; raises UnreadableVideo as `opened`."""
    with opened(data, settings) as reader:
        return reader.head


def read_frames(data: bytes, times: Sequence[float], settings: VideoSettings) -> list[NDArray[np.uint8]]:
    """Frames of a video as `VideoReader.frames`; raises UnreadableVideo as that and `opened`."""
    with opened(data, settings) as reader:
        return reader.frames(times)


def video_metadata(indices: Sequence[int], fps: float, total: int) -> dict[str, Any]:
    """vLLM's metadata of sampled frames: indices of a video of `total` frames, `fps` a second."""
    return {
        "total_num_frames": total,
        "fps": fps,
        "duration": total / fps,
        "video_backend": "pyav",
        "frames_indices": list(indices),
        "do_sample_frames": False,
    }


def _upright(frame: NDArray[np.uint8], a: int, b: int, c: int, d: int) -> NDArray[np.uint8]:
    """A frame as its display matrix shows it, in quarter turns: x' = a x + c y, y' = b x + d y, times some scale."""
    if abs(b) > abs(a):
        frame, a, d = frame.swapaxes(0, 1), c, b
    return frame[:: -1 if d < 0 else 1, :: -1 if a < 0 else 1]
