"""Videos and sound as files, made with PyAV and Pillow."""

from __future__ import annotations

import io
import struct
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import av
import numpy as np
from av.stream import Disposition
from numpy.typing import NDArray
from PIL import Image

FPS = 4
SIZE = (64, 96)
_TICKS = 1000  # a second, of videos of variable rate


def grey(frames: int = 48) -> list[NDArray[np.uint8]]:
    """Pictures whose grey grows by 5 each."""
    return [np.full((*SIZE, 3), 5 * i, np.uint8) for i in range(frames)]


def corner() -> NDArray[np.uint8]:
    """A black picture whose upper left quarter is white."""
    picture = np.zeros((*SIZE, 3), np.uint8)
    picture[: SIZE[0] // 2, : SIZE[1] // 2] = 255
    return picture


def video(
    frames: int = 48,
    kind: str = "mp4",
    codec: str = "libx264",
    pixels: str = "yuv420p",
    pictures: Iterable[NDArray[np.uint8]] | None = None,
    times: Sequence[float] | None = None,
    rate: int = FPS,
    has_sound: bool = False,
    coding: Mapping[str, str] | None = None,
    **options: str,
) -> bytes:
    """A video of `rate` frames a second, or shown at `times`; by default its grey grows by 5 a frame.

    `coding`: FFmpeg's options of the encoder, `options` those of the container.
    """
    with NamedTemporaryFile() as file, av.open(file.name, "w", format=kind, options=options) as container:
        stream: Any = container.add_stream(codec, rate=rate, options=dict(coding or {}))
        stream.height, stream.width = SIZE
        stream.pix_fmt = pixels
        sound: Any = container.add_stream("aac", rate=16000) if has_sound else None
        if times is not None:
            stream.codec_context.time_base = Fraction(1, _TICKS)
        for i, picture in enumerate(grey(frames) if pictures is None else pictures):
            shown = av.VideoFrame.from_ndarray(picture, format="rgb24")
            if times is not None:
                shown.pts, shown.time_base = round(times[i] * _TICKS), Fraction(1, _TICKS)
            container.mux(stream.encode(shown))
        container.mux(stream.encode())
        if sound is not None:
            _silence(container, sound)
        container.close()
        return Path(file.name).read_bytes()


def sound(has_cover: bool = False) -> bytes:
    """A moment of silence as MP4, without a picture or with one on its cover."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("aac", rate=16000)
        if has_cover:
            cover: Any = container.add_stream("mjpeg", rate=FPS)
            cover.height, cover.width = SIZE
            cover.pix_fmt, cover.disposition = "yuvj420p", Disposition.attached_pic
            container.mux(cover.encode(av.VideoFrame.from_ndarray(corner(), format="rgb24")))
        _silence(container, stream)
    return buffer.getvalue()


def _silence(container: Any, stream: Any) -> None:
    frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
    frame.sample_rate = 16000
    container.mux(stream.encode(frame))
    container.mux(stream.encode())


def animation(kind: str, frames: int = 48, ms: Sequence[int] | int = 1000 // FPS) -> bytes:
    """The same pictures as an animated GIF or WEBP, each shown for `ms`."""
    first, *others = (Image.fromarray(picture) for picture in grey(frames))
    buffer = io.BytesIO()
    first.save(buffer, kind, save_all=True, append_images=others, duration=ms)
    return buffer.getvalue()


def shown_by(matrix: Sequence[int], data: bytes) -> bytes:
    """An MP4 whose display matrix says a, b, c, d: x' = a x + c y, y' = b x + d y."""
    a, b, c, d = (value << 16 for value in matrix)
    at = data.index(b"tkhd") + 44
    return data[:at] + struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30) + data[at + 36 :]


def declaring(frames: int, data: bytes) -> bytes:
    """An MP4 whose tables say that it has so many frames of one byte, in one chunk."""
    changed = bytearray(data)
    for box, offset, values in [
        (b"stsz", 8, (1, frames)),  # size of all, count
        (b"stts", 8, (1, frames, 1)),  # entries; count, ticks
        (b"stsc", 8, (1, 1, frames, 1)),  # entries; first chunk, frames in it, description
    ]:
        at = data.index(box) + offset
        changed[at : at + 4 * len(values)] = struct.pack(f">{len(values)}I", *values)
    at = changed.index(b"ctts")
    changed[at : at + 4] = b"free"
    return bytes(changed)
