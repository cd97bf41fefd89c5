"""Seal of a record's file: offsets of the layers and a digest of all other bytes.

It is checked before anything is parsed.

Arrow repeats the schema, and with it the seal, in the footer; the digest covers both copies with its own digits left
out. `Frame` collects the bytes around the layers while Arrow writes a file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
from blake3 import blake3

from kvstore.errors import CorruptRecord, ShapeMismatch

ReadThrough = Callable[[int, int], Iterable[memoryview]]

# JSON escapes every quote inside a string, so this text cannot occur in the record's JSON.
_SEAL_MARK = b'"orbit-seal"="'
_SEAL = re.compile(re.escape(_SEAL_MARK) + rb"(\d{20}) (\d{20}) (\d{20}) (\d{10}) ([0-9a-f]{64})\"")
_BLANK = "0" * 64
_DIGEST_END = 65  # the digest and the closing quote end the seal

_HEAD_BYTES = 1 << 16  # where the first copy of the seal is looked for before the whole file is


@dataclass(frozen=True)
class Seal:
    """Offsets of the layers' bytes in the file, and the digest of all other bytes."""

    first: int  # offset of layer 0
    stride: int  # from one layer's first byte to the next one's
    size: int  # bytes of a layer
    layers: int
    digest: str

    def text(self) -> bytes:
        numbers = f"{self.first:020d} {self.stride:020d} {self.size:020d} {self.layers:010d} {self.digest}"
        return _SEAL_MARK + numbers.encode() + b'"'

    @property
    def end(self) -> int:
        return self.first + (self.layers - 1) * self.stride + self.size

    def spans(self) -> list[tuple[int, int]]:
        starts = (self.first + layer * self.stride for layer in range(self.layers))
        return [(start, start + self.size) for start in starts]


def blank_seal(layers: int) -> bytes:
    """The seal's text before a file is written; as long as the seal that replaces it."""
    return Seal(0, 0, 0, layers, _BLANK).text()


class Frame:
    """A file for Arrow to write into.

    It keeps everything but the layers' bodies, which stay where they are.
    """

    closed = False

    def __init__(self, bodies: Sequence[pa.Buffer]) -> None:
        self._bodies = {body.address for body in bodies}
        self.gaps = [bytearray()]  # gaps[i] goes before the body of layer i, the last one after all of them
        self.starts: list[int] = []  # where in the file each body begins
        self.size = 0

    def write(self, data: pa.Buffer | bytes) -> int:
        nbytes = len(memoryview(data))
        if isinstance(data, pa.Buffer) and data.address in self._bodies:
            self.starts.append(self.size)
            self.gaps.append(bytearray())
        else:
            self.gaps[-1] += data
        self.size += nbytes
        return nbytes

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        """Nothing is buffered."""

    def close(self) -> None:
        """Nothing is held."""


def fill_seals(frame: Frame, bodies: Sequence[pa.Buffer]) -> None:
    """Fill in both copies of the seal: Arrow repeats the schema in the footer."""
    starts, size = frame.starts, bodies[0].size
    stride = starts[1] - starts[0] if len(starts) > 1 else size
    if len(starts) != len(bodies) or any(start != starts[0] + i * stride for i, start in enumerate(starts)):
        raise ShapeMismatch("record batches of equal size were laid out at unequal strides")
    blank = Seal(starts[0], stride, size, len(bodies), _BLANK).text()
    head, *middle, foot = (memoryview(gap) for gap in frame.gaps)
    places = []
    for gap, view in ((frame.gaps[0], head), (frame.gaps[-1], foot)):
        place = gap.find(_SEAL_MARK)
        view[place : place + len(blank)] = blank
        places.append(place + len(blank) - _DIGEST_END)
    (in_head, in_foot) = places
    around = [head[:in_head], head[in_head + 64 :], *middle, foot[:in_foot], foot[in_foot + 64 :]]
    digest = _frame_digest(around, frame.size).encode()
    head[in_head : in_head + 64] = foot[in_foot : in_foot + 64] = digest


def read_all(read: ReadThrough, start: int, end: int) -> None:
    """Wait until bytes have come in."""
    for _ in read(start, end):
        pass


def find_seal(buffer: pa.Buffer, read: ReadThrough | None = None) -> Seal:
    """The seal at the file's start, not checked yet but within the file's bounds.

    Raises CorruptRecord.

    `read` brings what comes before the layers, and more only if the seal is not where it should be.
    """
    view = memoryview(buffer)
    if read is not None:
        head = min(_HEAD_BYTES, len(view))
        read_all(read, 0, head)
        if not _SEAL.search(bytes(view[:head])):
            read_all(read, head, len(view))
    match = _SEAL.search(bytes(view[:_HEAD_BYTES])) or _SEAL.search(view)
    if match is None:
        raise CorruptRecord("not a record of this format, or its start is damaged")
    first, stride, size, layers = (int(number) for number in match.groups()[:4])
    seal = Seal(first, stride, size, layers, match.group(5).decode())
    if layers < 1 or size < 1 or stride < size or match.end() > first or seal.end > len(view):
        raise CorruptRecord("the record is truncated or its seal is damaged")
    if read is not None and first > _HEAD_BYTES:
        read_all(read, _HEAD_BYTES, first)
    return seal


def check_frame(buffer: pa.Buffer, seal: Seal) -> None:
    """Check everything but the layers against the seal. Raises CorruptRecord."""
    view = memoryview(buffer)
    places = _seal_places(buffer, seal)
    if any(bytes(view[place : place + len(seal.text())]) != seal.text() for place in places):
        raise CorruptRecord("the record's seals differ")
    if _frame_digest(_around(view, seal, places), len(view)) != seal.digest:
        raise CorruptRecord("the record's frame does not match its checksum")


def _seal_places(buffer: pa.Buffer, seal: Seal) -> tuple[int, int]:
    """Offsets of the two copies of the seal: Arrow repeats the schema in the footer.

    Raises CorruptRecord.
    """
    view = memoryview(buffer)
    before = bytes(view[: seal.first]).find(_SEAL_MARK)
    after = bytes(view[seal.end :]).find(_SEAL_MARK)
    if before < 0 or after < 0:
        raise CorruptRecord("the record's seal is missing")
    return before, seal.end + after


def _frame_digest(around: Iterable[memoryview], size: int) -> str:
    """BLAKE3 over the file's size and `around`.

    `around`: all bytes but the layers' and the digits of the seals' digests.
    """
    hasher = blake3(derive_key_context="orbitserve 2026 record frame v1")
    hasher.update(size.to_bytes(8, "little"))
    for part in around:
        hasher.update(part)
    return hasher.hexdigest()


def _around(view: memoryview, seal: Seal, places: tuple[int, int]) -> Iterator[memoryview]:
    """Byte ranges the frame digest covers, of a whole file whose seals are at `places`."""
    digits = len(seal.text()) - _DIGEST_END
    position = 0
    for start, end in sorted([*((place + digits, place + digits + 64) for place in places), *seal.spans()]):
        yield view[position:start]
        position = end
    yield view[position:]
