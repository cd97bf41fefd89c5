"""Image files that Pillow does not write: PNG and TIFF with more than 8 bits a channel, written by hand."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import numpy as np

_PNG_COLOURS = {1: 0, 2: 4, 3: 2, 4: 6}  # PNG's colour type by channels
_TIFF_TYPES = {"H": 3, "I": 4}


def png16(pixels: np.ndarray, transparent: tuple[int, ...] | None = None, orientation: int | None = None) -> bytes:
    """A PNG of 16 bits a channel. `pixels` [rows, columns, channels]; `transparent`: the value that is see-through."""
    rows, columns, channels = pixels.shape
    header = struct.pack(">IIBBBBB", columns, rows, 16, _PNG_COLOURS[channels], 0, 0, 0)
    data = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels)
    more = b""
    if orientation is not None:
        exif = b"MM\0*" + struct.pack(">IHHHIHHI", 8, 1, 0x0112, 3, 1, orientation, 0, 0)
        more += png_chunk(b"eXIf", exif)
    if transparent is not None:
        more += png_chunk(b"tRNS", struct.pack(f">{len(transparent)}H", *transparent))
    chunks = png_chunk(b"IHDR", header) + more + png_chunk(b"IDAT", zlib.compress(data)) + png_chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks


def png_chunk(kind: bytes, data: bytes) -> bytes:
    """A chunk of a PNG with its checksum."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def tiff(pixels: np.ndarray, photometric: int, *, order: str = "<", tags: dict[int, Any] | None = None) -> bytes:
    """An uncompressed TIFF of one strip, in the samples' own type. `pixels` [rows, columns, channels].

    `tags`: further ones, or others in place of those that the pixels make; (values, type) with a type of struct's.
    """
    rows, columns, channels = pixels.shape
    formats = {"u": 1, "i": 2, "f": 3}
    data = pixels.astype(pixels.dtype.newbyteorder(order)).tobytes()
    entries: dict[int, tuple[list[int], str]] = {
        256: ([columns], "I"),
        257: ([rows], "I"),
        258: ([pixels.dtype.itemsize * 8] * channels, "H"),
        259: ([1], "H"),
        262: ([photometric], "H"),
        273: ([8], "I"),
        277: ([channels], "H"),
        278: ([rows], "I"),
        279: ([len(data)], "I"),
        339: ([formats[pixels.dtype.kind]] * channels, "H"),
    } | (tags or {})
    directory, beyond = b"", b""
    after = 8 + len(data) + 2 + 12 * len(entries) + 4
    for tag, (values, kind) in sorted(entries.items()):
        packed = struct.pack(f"{order}{len(values)}{kind}", *values)
        if len(packed) > 4:
            packed, beyond = struct.pack(f"{order}I", after + len(beyond)), beyond + packed
        directory += struct.pack(f"{order}HHI", tag, _TIFF_TYPES[kind], len(values)) + packed.ljust(4, b"\0")
    head = {"<": b"II*\0", ">": b"MM\0*"}[order] + struct.pack(f"{order}I", 8 + len(data))
    return head + data + struct.pack(f"{order}H", len(entries)) + directory + bytes(4) + beyond
