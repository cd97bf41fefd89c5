"""Reader of one video in a process of its own: FFmpeg is C and videos come from anybody.

    python -I -S video_child.py JOB

JOB is JSON: `site` (where PyAV lies), `memory_bytes`, `cpu_seconds`, `format` (FFmpeg's demuxer), `codecs`,
`max_seconds`, `max_frames`, `max_frame_pixels`, and `times` (seconds from the first frame, rising; null: the header
alone). The video comes on standard input. Standard output is one JSON line ({"frames", "seconds", "width", "height",
"audio"} or {"error"}), then for each time one JSON line ("width", "height", "rotation" in degrees counter-clockwise,
"bytes"), followed by so many bytes of RGB: of the frame that is shown at that time.
"""

from __future__ import annotations

import io
import json
import resource
import sys
from typing import Any

_EPSILON = 1e-4  # seconds by which a time may be rounded


def main() -> None:
    """Read the job and the video, write what was asked for."""
    job = json.loads(sys.argv[1])
    memory, seconds = job["memory_bytes"], job["cpu_seconds"]
    for limit, most in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (most, most))
    sys.path.append(job["site"])
    import av

    av.logging.set_level(None)
    data = sys.stdin.buffer.read()
    try:
        with av.open(io.BytesIO(data), format=job["format"]) as container:
            head, shown = _head(container, job)
        _say(head)
        if job["times"] is not None:
            with av.open(io.BytesIO(data), format=job["format"]) as container:
                _write_frames(container, shown, job["times"], job["max_frame_pixels"])
    except (ValueError, av.FFmpegError, EOFError, OverflowError, IndexError) as error:
        _say({"error": str(error) if type(error) is ValueError else "it is broken, truncated, or no video"})


def _head(container: Any, job: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
    """Facts of the container, and the time stamps at which frames are shown, in order."""
    if not container.streams.video:
        raise ValueError("it has no picture" + (", only sound" if container.streams.audio else ""))
    stream = container.streams.video[0]
    context = stream.codec_context
    if context is None or context.name not in job["codecs"]:
        raise ValueError(f"its codec {getattr(context, 'name', None)!r} is not one of {', '.join(job['codecs'])}")
    if not 0 < context.width * context.height <= job["max_frame_pixels"]:
        raise ValueError(
            f"its frames have {context.width}x{context.height} pixels, at most {job['max_frame_pixels']} are allowed"
        )
    stamps: list[int] = []
    last = 0
    for packet in container.demux(stream):
        if packet.size == 0 or packet.is_discard:
            continue
        stamp = packet.pts if packet.pts is not None else packet.dts
        stamps.append(stamp if stamp is not None else last)
        last = stamps[-1] + (packet.duration or 0)
        if len(stamps) > job["max_frames"]:
            raise ValueError(f"it has more than the {job['max_frames']} frames that are allowed")
    if not stamps:
        raise ValueError("it has no frames")
    stamps.sort()
    base = float(stream.time_base)
    known = (stamps[-1] - stamps[0]) * base
    seconds = known * len(stamps) / (len(stamps) - 1) if len(stamps) > 1 and known > 0 else 1.0
    if seconds > job["max_seconds"]:
        raise ValueError(f"it is {seconds:.1f} s long, at most {job['max_seconds']:g} s are allowed")
    head = {
        "frames": len(stamps),
        "seconds": seconds,
        "width": context.width,
        "height": context.height,
        "audio": len(container.streams.audio),
    }
    return head, stamps


def _write_frames(container: Any, stamps: list[int], times: list[float], max_pixels: int) -> None:
    """The frame that is shown at each of `times`, in one pass."""
    stream = container.streams.video[0]
    stream.codec_context.thread_count = 1
    base, first = float(stream.time_base), stamps[0]
    waiting, shown = 0, None
    for frame in container.decode(stream):
        at = ((frame.pts if frame.pts is not None else first) - first) * base
        while waiting < len(times) and times[waiting] + _EPSILON < at:
            _write(shown if shown is not None else frame, max_pixels)
            waiting += 1
        if waiting == len(times):
            return
        shown = frame
    if shown is None or (waiting < len(times) and times[-1] > (stamps[-1] - first) * base + 1):
        raise ValueError("no frame of it can be decoded")
    for _ in times[waiting:]:
        _write(shown, max_pixels)


def _write(frame: Any, max_pixels: int) -> None:
    if frame.width * frame.height > max_pixels:
        raise ValueError(f"a frame of it has {frame.width}x{frame.height} pixels, at most {max_pixels} are allowed")
    rgb = frame.reformat(format="rgb24")
    plane, row = rgb.planes[0], rgb.width * 3
    data, stride = bytes(plane), plane.line_size
    pixels = b"".join(data[at : at + row] for at in range(0, rgb.height * stride, stride))
    _say({"width": rgb.width, "height": rgb.height, "rotation": frame.rotation, "bytes": len(pixels)})
    sys.stdout.buffer.write(pixels)


def _say(line: dict[str, Any]) -> None:
    sys.stdout.buffer.write(json.dumps(line).encode() + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
