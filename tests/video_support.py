"""Videos and sound as files, made with PyAV."""

from __future__ import annotations

import io

import av
import numpy as np

FPS = 4


def video(frames: int = 48, kind: str = "mp4", codec: str = "libx264", pixels: str = "yuv420p") -> bytes:
    """A video of `FPS` frames a second whose grey grows by 5 a frame."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=kind) as container:
        stream = container.add_stream(codec, rate=FPS)
        stream.width, stream.height, stream.pix_fmt = 96, 64, pixels
        for i in range(frames):
            shown = av.VideoFrame.from_ndarray(np.full((64, 96, 3), 5 * i, np.uint8), format="rgb24")
            container.mux(stream.encode(shown))
        container.mux(stream.encode())
    return buffer.getvalue()


def sound() -> bytes:
    """A moment of silence as MP4 without a picture."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("aac", rate=16000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 16000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return buffer.getvalue()
