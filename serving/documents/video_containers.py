"""Containers of videos: their kinds by first bytes, and whether a file was cut off.

A demuxer takes a file that was cut off for a shorter video; what the container says of its own length tells it.
"""

from __future__ import annotations

_BOXES = frozenset(b"ftyp styp moov moof mdat sidx free skip wide uuid meta udta emsg prft pdin".split())
_MOST_BOXES = 1 << 16
_STILLS = (b"avif", b"avis", b"heic", b"mif1")  # brands of pictures in the same container
_EBML, _SEGMENT = b"\x1a\x45\xdf\xa3", b"\x18\x53\x80\x67"
_TRAILER = b"\0;"  # of a GIF: the last block's end
_BEHIND = 64  # bytes that programs leave behind it


def demuxer(data: bytes) -> str | None:
    """FFmpeg's demuxer of a file, or webp; None of anything else."""
    if data[4:8] == b"ftyp" and data[8:12] not in _STILLS:
        return "mov"
    if data[:4] == _EBML:
        return "matroska"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "webp"
    return "gif" if data[:4] == b"GIF8" else None


def is_cut_off(data: bytes, kind: str) -> bool:
    """True if a file's container says that more bytes belong to it."""
    if kind == "mov":
        return _end_of_boxes(data) > len(data)
    if kind == "matroska":
        return _end_of_segment(data) > len(data)
    if kind == "webp":
        return 8 + int.from_bytes(data[4:8], "little") > len(data)
    return _TRAILER not in data[-_BEHIND:]


def _end_of_boxes(data: bytes) -> int:
    at = 0
    for _ in range(_MOST_BOXES):
        if data[at + 4 : at + 8] not in _BOXES:
            break
        size, least = int.from_bytes(data[at : at + 4], "big"), 8
        if size == 1:
            size, least = int.from_bytes(data[at + 8 : at + 16], "big"), 16
        if size < least:  # 0: to the end, whatever that is
            break
        at += size
    return at


def _end_of_segment(data: bytes) -> int:
    """0 for one whose size is not known, as of a stream."""
    size, behind = _number(data, len(_EBML))
    at = behind + (size or 0)
    if data[at : at + 4] != _SEGMENT:
        return 0
    size, behind = _number(data, at + len(_SEGMENT))
    return 0 if size is None else behind + size


def _number(data: bytes, at: int) -> tuple[int | None, int]:
    """EBML's number at a place, None if it is not known, and where it ends."""
    first = data[at] if at < len(data) else 0
    length = 9 - first.bit_length()
    bits = 7 * length
    value = int.from_bytes(data[at : at + length], "big") & ((1 << bits) - 1)
    return None if value == (1 << bits) - 1 else value, at + length
