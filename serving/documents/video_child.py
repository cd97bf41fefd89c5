"""Reader of one video in a process of its own: FFmpeg is C and videos come from anybody.

Standard input is a line of JSON, then the video: `bytes` (of it), `sites` (where PyAV and Pillow lie), `format`
(FFmpeg's demuxer, or webp), `codecs`, `max_seconds`, `max_frames` and `max_frame_pixels`. Standard output is one JSON
line ({"frames", "seconds", "width", "height", "audio"} or {"error"}). A second line of input is a list of times
(seconds from the first frame, rising); for each there is one JSON line ("width", "height", "bytes", and "matrix": a, b,
c, d of the display matrix), followed by so many bytes of RGB: of the frame that is shown then. `bounded_child` limits
the process.
"""

from __future__ import annotations

import io
import json
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

_UPRIGHT = (1, 0, 0, 1)
_LEAD = 1.0  # seconds before a frame to look for a key frame: files are in the order of decoding
_LOST = 1.0  # seconds at its end that a decoder may leave out


class Unusable(Exception):
    """A video that is not taken; the message says why."""


class _Later(Exception):
    """No key frame was found before the frame that is wanted."""


class Shown(NamedTuple):
    """A frame, and the seconds from the first one at which it is shown; `rgb` makes its bytes."""

    at: float
    width: int
    height: int
    rgb: Callable[[], bytes]
    matrix: tuple[int, int, int, int] = _UPRIGHT


def main() -> None:
    """Read the job and the video, write what was asked for."""
    job = json.loads(sys.stdin.buffer.readline())
    sys.path += job["sites"]
    data = sys.stdin.buffer.read(job["bytes"])
    try:
        (_read_webp if job["format"] == "webp" else _read)(data, job)
    except Unusable as error:
        _say({"error": str(error)})
    except MemoryError:
        _say({"error": "it takes more memory than is allowed"})
    except Exception:  # of FFmpeg and Pillow, which raise many things
        _say({"error": "it is broken, truncated, or no video"})


def _read(data: bytes, job: dict[str, Any]) -> None:
    import av

    av.logging.set_level(None)
    with av.open(io.BytesIO(data), format=job["format"]) as container:
        stream, audio = _pictures(container), len(container.streams.audio)
        context = stream.codec_context
        if context is None or context.name not in job["codecs"]:
            raise Unusable(f"its codec {getattr(context, 'name', None)!r} is not one of {', '.join(job['codecs'])}")
        _check_size(context.width, context.height, job)
        _check_count(stream.frames, job)
        width, height, base = context.width, context.height, float(stream.time_base)
        stamps, duration = _stamps(container.demux(stream), job)
    seconds = _say_head([stamp * base for stamp in stamps], duration * base, width, height, audio, job)
    if not (times := _times()):
        return
    slack = min(1.5 * base, 0.25 * seconds / len(stamps))  # containers round the times of frames
    last, wanted = (stamps[-1] - stamps[0]) * base, times[0] + slack
    for start in (wanted - _LEAD, 0.0):  # from a key frame before the first time, or from the first frame
        with av.open(io.BytesIO(data), format=job["format"]) as container, suppress(_Later):
            _write_frames(_decoded(container, stamps[0], start, wanted), times, last, job, slack)
            return


def _times() -> list[float]:
    """Seconds of the frames that are asked for; none: the head was enough."""
    line = sys.stdin.buffer.readline()
    return list(json.loads(line)) if line else []


def _pictures(container: Any) -> Any:
    """The stream that is a video; a recording's cover is none."""
    from av.stream import Disposition

    for stream in container.streams.video:
        if not stream.disposition & Disposition.attached_pic:
            return stream
    raise Unusable("it has no picture" + (", only sound" if container.streams.audio else ""))


def _stamps(packets: Any, job: dict[str, Any]) -> tuple[list[int], int]:
    """Time stamps at which frames are shown, in order, and for how long the last one is, or 0."""
    found: list[tuple[int, int]] = []
    last = 0
    for packet in packets:
        if packet.size == 0 or packet.is_discard:
            continue
        stamp = packet.pts if packet.pts is not None else packet.dts
        found.append((last if stamp is None else stamp, packet.duration or 0))
        last = sum(found[-1])
        _check_count(len(found), job)
    if not found:
        raise Unusable("it has no frames")
    found.sort()
    return [stamp for stamp, _ in found], found[-1][1]


def _decoded(container: Any, first: int, start: float, wanted: float) -> Iterator[Shown]:
    """Frames from the key frame before `start` seconds on.

    Raises _Later if they begin behind `wanted`.
    """
    import av

    stream = _pictures(container)
    stream.codec_context.thread_count = 1
    base = float(stream.time_base)
    is_sought = start > 0 and container.format.name != "gif"  # whose frames add to those before
    if is_sought:
        try:
            container.seek(first + int(start / base), stream=stream)
        except av.FFmpegError as error:
            raise _Later from error
    for frame in container.decode(stream):
        at = 0.0 if frame.pts is None else (frame.pts - first) * base
        if is_sought and (frame.pts is None or at > wanted):
            raise _Later
        is_sought = False
        matrix = frame.side_data.get("DISPLAYMATRIX")
        a, b, _, c, d = struct.unpack("=5i", bytes(matrix)[:20]) if matrix is not None else (1, 0, 0, 0, 1)
        yield Shown(at, frame.width, frame.height, partial(_rgb, frame), (a, b, c, d))
    if is_sought:
        raise _Later


def _rgb(frame: Any) -> bytes:
    plane, row = frame.reformat(format="rgb24").planes[0], frame.width * 3
    data, stride = bytes(plane), plane.line_size
    return b"".join(data[at : at + row] for at in range(0, frame.height * stride, stride))


def _read_webp(data: bytes, job: dict[str, Any]) -> None:
    """FFmpeg has no demuxer of animated WebP."""
    from PIL import Image

    width, height = (1 + int.from_bytes(data[at : at + 3], "little") for at in (24, 27))
    if data[12:16] != b"VP8X" or not data[20] & 2:
        raise Unusable("it is a WebP without animation: send it as an image")
    _check_size(width, height, job)
    stamps, at = [0.0], 12
    while at + 8 <= len(data):
        if data[at : at + 4] == b"ANMF":
            stamps.append(stamps[-1] + int.from_bytes(data[at + 20 : at + 23], "little") / 1000)
            _check_count(len(stamps) - 1, job)
        size = int.from_bytes(data[at + 4 : at + 8], "little")
        at += 8 + size + size % 2
    end = stamps.pop()
    if not stamps:
        raise Unusable("it has no frames")
    _say_head(stamps, end - stamps[-1], width, height, 0, job)
    if times := _times():
        with Image.open(io.BytesIO(data), formats=["WEBP"]) as image:

            def frames() -> Iterator[Shown]:
                for i, stamp in enumerate(stamps):
                    image.seek(i)
                    yield Shown(stamp, *image.size, image.convert("RGB").tobytes)

            _write_frames(frames(), times, stamps[-1], job, 1e-4)


def _check_size(width: int, height: int, job: dict[str, Any]) -> None:
    if not 0 < width * height <= job["max_frame_pixels"]:
        raise Unusable(f"its frames have {width}x{height} pixels, at most {job['max_frame_pixels']} are allowed")


def _check_count(count: int, job: dict[str, Any]) -> None:
    if count > job["max_frames"]:
        raise Unusable(f"it has more than the {job['max_frames']} frames that are allowed")


def _say_head(shown: Sequence[float], last: float, width: int, height: int, audio: int, job: dict[str, Any]) -> float:
    """Write the facts of a video whose frames are `shown` at these seconds, the last one for so long (0: not known).

    Returns its seconds.
    """
    known = shown[-1] - shown[0]
    seconds = known + (last if last > 0 else known / max(1, len(shown) - 1)) or 1.0
    if seconds > job["max_seconds"]:
        raise Unusable(f"it is {seconds:.1f} s long, at most {job['max_seconds']:g} s are allowed")
    _say({"frames": len(shown), "seconds": seconds, "width": width, "height": height, "audio": audio})
    return seconds


def _write_frames(frames: Iterator[Shown], times: list[float], last: float, job: dict[str, Any], slack: float) -> None:
    """Write the frame that is shown at each of `times`, in one pass.

    `last`: seconds at which the last frame is shown; `slack`: by which a time may be rounded.
    """
    waiting, shown = 0, None
    for one in frames:
        while waiting < len(times) and times[waiting] + slack < one.at:
            _write(shown or one, job)
            waiting += 1
        if waiting == len(times):
            return
        shown = one
    if shown is None:
        raise Unusable("no frame of it can be decoded")
    if waiting < len(times) and shown.at + _LOST < min(last, times[-1]):
        raise Unusable(f"its frames behind {shown.at:.2f} s cannot be decoded")
    for _ in times[waiting:]:
        _write(shown, job)


def _write(shown: Shown, job: dict[str, Any]) -> None:
    _check_size(shown.width, shown.height, job)
    pixels = shown.rgb()
    _say({"width": shown.width, "height": shown.height, "matrix": shown.matrix, "bytes": len(pixels)})
    sys.stdout.buffer.write(pixels)


def _say(line: dict[str, Any]) -> None:
    sys.stdout.buffer.write(json.dumps(line).encode() + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
