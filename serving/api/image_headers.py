"""Checks of image files whose header may promise fewer pixels than decoding makes.

| format | Pillow takes                                          | refused here                                     |
|--------|-------------------------------------------------------|--------------------------------------------------|
| TIFF   | any number of strips, and tiles of any size           | more strips or tiles than the picture has        |
| ICO    | the picture in it at the size that its own header has | one that the directory says another size of      |
| AVIF   | AV1 frames of any size, scaled to the header's        | frames with more pixels than the header accounts |

Pillow decodes an ICO where it opens it, and lists a TIFF's strips there: `check_container` comes before that.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator

from PIL import BmpImagePlugin, IcoImagePlugin, PngImagePlugin
from PIL.TiffImagePlugin import (
    IMAGELENGTH,
    IMAGEWIDTH,
    PLANAR_CONFIGURATION,
    ROWSPERSTRIP,
    SAMPLESPERPIXEL,
    STRIPOFFSETS,
    TILELENGTH,
    TILEOFFSETS,
    TILEWIDTH,
    ImageFileDirectory_v2,
)

_TIFF = (b"II*\0", b"MM\0*", b"II\0*", b"MM*\0", b"II+\0", b"MM\0+")
_ICO = b"\0\0\1\0"
_PNG = b"\x89PNG\r\n\x1a\n"
_MOST_STRIPS = 1 << 17
_OFFSET_BYTES = {3: 2, 4: 4, 13: 4, 16: 8}  # of an entry, by TIFF's type
_BYTES = (1, 2, 7)  # types that Pillow makes no numbers of
_MOST_NUMBERS = 1 << 20  # bytes of a tag's numbers, which become Python's
_SEPARATE_PLANES = 2
_CONTAINERS = (b"moov", b"trak", b"mdia", b"minf", b"stbl", b"meta")
_CHUNKS = {b"stco": 4, b"co64": 8}  # bytes of an offset, in MP4's lists of a film's chunks
_MOST_BOXES = 64
_MOST_UNITS = 1 << 16
_FIRST_FRAME = 1 << 16  # bytes of a film in which its first sequence header stands
_AV1_SEQUENCE = 1  # type of an AV1 unit that says the largest frame
_PICTURES = 4  # of an AVIF's size that are in it at most: itself, its alpha, thumbnail and gain map
_SMALLEST = 64 * 64  # pixels that any of them may have


class BadContainer(ValueError):
    """File that would decode to more than its header says; the message says how."""


def is_tiff(data: bytes) -> bool:
    """True for bytes that begin as a TIFF does."""
    return data.startswith(_TIFF)


def check_container(data: bytes, most_pixels: int) -> None:
    """Raise BadContainer for a TIFF or ICO that would decode to more than its header says.

    What is no such file at all is left to Pillow to refuse.
    """
    try:
        if is_tiff(data):
            _check_tiff(data, most_pixels)
        elif data.startswith(_ICO):
            _check_ico(data)
    except BadContainer:
        raise
    except Exception as error:  # Pillow raises many things at a broken file
        raise BadContainer(f"its header is broken: {error}") from error


def check_avif(data: bytes, pixels: int) -> None:
    """Raise BadContainer for an AVIF whose frames have more pixels than its header accounts for.

    Without frames it is refused too: they may stand where only the decoder finds them.
    """
    try:
        areas = _Avif(data).frame_areas()
    except (struct.error, IndexError) as error:
        raise BadContainer(f"its boxes are broken: {error}") from error
    if not areas:
        raise BadContainer("no AV1 picture was found in it")
    if sum(areas) > _PICTURES * max(pixels, _SMALLEST):
        raise BadContainer(f"its header says {pixels} pixels, the frames in it have {sum(areas)}")


def _check_tiff(data: bytes, most_pixels: int) -> None:
    file = io.BytesIO(data)
    header = file.read(16 if data[2:4] in (b"+\0", b"\0+") else 8)
    directory = ImageFileDirectory_v2(header)
    file.seek(directory.next)
    directory.load(file)  # within the file's own length, by Pillow's own check
    for tag, values in directory._tagdata.items():
        if directory.tagtype[tag] not in _BYTES and len(values) > _MOST_NUMBERS:
            raise BadContainer(f"its tag {tag} has {len(values)} bytes of numbers")
    width, height = int(directory[IMAGEWIDTH]), int(directory[IMAGELENGTH])
    columns, rows, kind = width, int(directory.get(ROWSPERSTRIP, height)), STRIPOFFSETS
    if STRIPOFFSETS not in directory:
        columns, rows, kind = int(directory[TILEWIDTH]), int(directory[TILELENGTH]), TILEOFFSETS
        if columns * rows > most_pixels:
            raise BadContainer(f"its tiles have {columns}x{rows} pixels, at most {most_pixels} are allowed")
    if min(width, height, columns, rows) < 1:
        raise BadContainer("it has no pixels, or strips or tiles without any")
    planes = int(directory.get(SAMPLESPERPIXEL, 1)) if directory.get(PLANAR_CONFIGURATION) == _SEPARATE_PLANES else 1
    wanted = -(-width // columns) * -(-height // rows) * planes
    found = len(directory._tagdata[kind]) // _OFFSET_BYTES[directory.tagtype[kind]]
    if found > min(wanted, _MOST_STRIPS):
        raise BadContainer(
            f"it lists {found} strips or tiles; its size makes {wanted}, and at most {_MOST_STRIPS} are read"
        )


def _check_ico(data: bytes) -> None:
    entry = IcoImagePlugin.IcoFile(io.BytesIO(data)).entry[0]  # the largest, which Pillow decodes
    picture = io.BytesIO(data)
    picture.seek(entry.offset)
    if data[entry.offset : entry.offset + len(_PNG)] == _PNG:
        size = PngImagePlugin.PngImageFile(picture).size
    else:
        width, height = BmpImagePlugin.DibImageFile(picture).size
        size = width, height // 2  # its lower half is the mask
    if size != entry.dim:
        told, found = ("x".join(map(str, one)) for one in (entry.dim, size))
        raise BadContainer(f"its directory says {told} pixels, the picture in it has {found}")


# -- AVIF: boxes within boxes, whose items and chunks are AV1 ---------------------------------------------------------


class _Avif:
    """An AVIF file's AV1 data. Work is bounded by the file's length, whatever its lists say."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._left = 2 * len(data) + _SMALLEST  # bytes and extents that may still be looked at
        self._units = _MOST_UNITS

    def frame_areas(self) -> list[int]:
        """Pixels of the largest frame, for every AV1 sequence in the file's pictures."""
        return [area for units in self._av1_data() for area in self._areas(units)]

    def _boxes(self) -> Iterator[tuple[bytes, int, int]]:
        """Boxes that say where AV1 data stands, with the place of their content."""
        data = self._data
        left = [(0, len(data))]
        found = 0
        while left:
            start, stop = left.pop()
            while start + 8 <= stop:
                size, kind = struct.unpack_from(">I4s", data, start)
                body = start + 8
                if size == 1:
                    (size,) = struct.unpack_from(">Q", data, body)
                    body += 8
                end = start + size if size else stop
                if not body <= end <= stop:
                    raise IndexError("a box is larger than what it stands in")
                if kind in _CONTAINERS:
                    left.append((body + 4 * (kind == b"meta"), end))
                elif kind in (b"iloc", b"idat", *_CHUNKS):
                    found += 1
                    if found > _MOST_BOXES:
                        raise BadContainer(f"it has more than {_MOST_BOXES} lists of pictures")
                    yield kind, body, end
                start = end

    def _av1_data(self) -> Iterator[bytes]:
        """The AV1 data of a file's pictures, and of its films up to the first frame."""
        boxes = list(self._boxes())
        stored = next((start for kind, start, _ in boxes if kind == b"idat"), 0)
        for kind, start, end in boxes:
            if kind == b"iloc":
                yield from self._items(start, stored)
            elif (width := _CHUNKS.get(kind)) and start + 8 + width <= end:
                first = int.from_bytes(self._data[start + 8 : start + 8 + width], "big")
                yield self._part(first, _FIRST_FRAME)

    def _items(self, at: int, stored: int) -> Iterator[bytes]:
        """The data of all items that an `iloc` box lists; `stored`: where that of `idat` begins."""
        version = self._data[at]
        at += 4

        def number(size: int) -> int:
            nonlocal at
            if at + size > len(self._data):
                raise IndexError("a list ends with the file")
            at += size
            return int.from_bytes(self._data[at - size : at], "big")

        sizes = number(2)
        offset_size, length_size, base_size, index_size = (sizes >> shift & 15 for shift in (12, 8, 4, 0))
        for _ in range(number(2 if version < 2 else 4)):
            number(2 if version < 2 else 4)  # its name
            method = number(2) & 15 if version else 0
            number(2)  # another file that it may stand in
            base = number(base_size) + (stored if method == 1 else 0)
            extents = []
            for _ in range(number(2)):
                number(index_size if version else 0)
                offset, length = base + number(offset_size), number(length_size)
                extents.append(self._part(offset, length or len(self._data)))
            yield b"".join(extents)

    def _part(self, start: int, length: int) -> bytes:
        part = self._data[start : start + length]
        self._left -= 1 + len(part)
        if self._left < 0:
            raise BadContainer("its pictures stand in one another")
        return part

    def _areas(self, units: bytes) -> Iterator[int]:
        """Pixels of the largest frames by the sequence headers in AV1 data; none in other data."""
        at = 0
        while at < len(units):
            self._units -= 1
            if self._units < 0:
                raise BadContainer(f"its pictures have more than {_MOST_UNITS} units")
            head, at = units[at], at + 1
            if head & 0b10000001:
                return  # of AV1 these bits are 0
            at += bool(head & 4)
            size = 0
            if head & 2:
                for shift in range(0, 56, 7):
                    if at >= len(units):
                        return
                    byte, at = units[at], at + 1
                    size |= (byte & 127) << shift
                    if byte < 128:
                        break
            else:
                size = len(units) - at
            if head >> 3 & 15 == _AV1_SEQUENCE:
                yield _sequence_area(units[at : at + min(size, 1024)])
            at += size


class _Bits:
    """Bits of some bytes, first to last; zeros behind the end."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def take(self, count: int) -> int:
        """The next bits as a number."""
        value = 0
        for i in range(self._at, self._at + count):
            byte = self._data[i >> 3] if i >> 3 < len(self._data) else 0
            value = value << 1 | byte >> (7 - i % 8) & 1
        self._at += count
        return value


def _sequence_area(header: bytes) -> int:
    """Pixels of the largest frame by an AV1 sequence header (section 5.5.1 of its specification)."""
    bits = _Bits(header)
    bits.take(4)  # profile, still picture
    if bits.take(1):  # reduced: of a still picture
        bits.take(5)
    else:
        delay = 0
        if bits.take(1):  # timing
            bits.take(64)
            if bits.take(1):
                zeros = 0
                while zeros < 32 and not bits.take(1):
                    zeros += 1
                bits.take(zeros if zeros < 32 else 0)
            if bits.take(1):  # decoder model
                delay = bits.take(5) + 1
                bits.take(42)
        initial_delay = bits.take(1)
        for _ in range(bits.take(5) + 1):  # operating points
            bits.take(12)
            if bits.take(5) > 7:
                bits.take(1)
            if delay and bits.take(1):
                bits.take(2 * delay + 1)
            if initial_delay and bits.take(1):
                bits.take(4)
    width_bits, height_bits = bits.take(4) + 1, bits.take(4) + 1
    return (bits.take(width_bits) + 1) * (bits.take(height_bits) + 1)
