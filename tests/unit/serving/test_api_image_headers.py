"""Files whose header promises fewer pixels than decoding them makes are refused before that."""

from __future__ import annotations

import io
import struct

import numpy as np
import pytest
from image_files import tiff
from PIL import Image

from serving.api.image_headers import BadContainer, check_avif, check_container

MOST = 1_000_000
GREY = np.zeros((4, 4, 1), np.uint8)


def saved(kind: str, size: tuple[int, int] = (40, 30), mode: str = "RGB", frames: int = 1) -> bytes:
    buffer = io.BytesIO()
    first, *more = [Image.new(mode, size, (i * 40,) * len(mode)) for i in range(frames)]
    first.save(buffer, kind, **({"save_all": True, "append_images": more} if more else {}))
    return buffer.getvalue()


def ico(told: int, picture: bytes) -> bytes:
    """An icon whose directory says that the picture in it has so many rows and columns."""
    return struct.pack("<HHH", 0, 1, 1) + struct.pack("<BBBBHHII", told, told, 0, 0, 1, 32, len(picture), 22) + picture


@pytest.mark.parametrize("kind", ["TIFF", "ICO"])
@pytest.mark.parametrize("mode", ["RGB", "RGBA"])
def test_common_files_pass(kind: str, mode: str):
    check_container(saved(kind, (48, 48), mode), MOST)


def test_an_icons_picture_has_the_size_that_its_directory_says():
    check_container(ico(64, saved("PNG", (64, 64))), MOST)
    check_container(ico(0, saved("PNG", (256, 256))), MOST)  # 0 is 256
    with pytest.raises(BadContainer, match="directory says 16x16 pixels, the picture in it has 3000x3000"):
        check_container(ico(16, saved("PNG", (3000, 3000))), MOST)
    lower = saved("BMP", (3000, 3000))[14:]  # without its file header
    with pytest.raises(BadContainer, match="16x16 pixels, the picture in it has 3000x1500"):
        check_container(ico(16, lower), MOST)


@pytest.mark.parametrize(
    ("tags", "words"),
    [
        ({273: ([8] * 500, "I")}, "lists 500 strips or tiles; its size makes 1"),
        ({257: ([200_000], "I"), 278: ([1], "I"), 273: ([8] * 200_000, "H")}, "at most 131072 are read"),
        ({278: ([0], "I")}, "without any"),
        ({65000: ([1] * 300_000, "I")}, "tag 65000 has 1200000 bytes"),
    ],
    ids=["more-strips", "too-many", "no-rows", "numbers"],
)
def test_a_tiff_lists_no_more_than_its_size_makes(tags: dict, words: str):
    with pytest.raises(BadContainer, match=words):
        check_container(tiff(GREY, 1, tags=tags), MOST)


def test_a_tiff_has_no_tile_larger_than_an_image_may_be():
    def tiled(side: int) -> bytes:
        data = tiff(GREY, 1, tags={322: ([side], "I"), 323: ([side], "I"), 324: ([8], "I"), 325: ([16], "I")})
        return data.replace(struct.pack("<HH", 273, 4), struct.pack("<HH", 272, 4))  # no strips beside tiles

    check_container(tiled(256), MOST)
    with pytest.raises(BadContainer, match="tiles have 50000x50000 pixels"):
        check_container(tiled(50_000), MOST)


def test_a_strip_as_long_as_can_be_said_is_one_strip():
    check_container(tiff(GREY, 1, tags={278: ([2**32 - 1], "I")}), MOST)


@pytest.mark.parametrize("data", [b"II*\0", b"II*\0\xff\xff\xff\x7f", b"\0\0\1\0\1\0", b"\0\0\1\0\0\0"])
def test_a_broken_header_is_said_to_be(data: bytes):
    with pytest.raises(BadContainer, match="header is broken"):
        check_container(data, MOST)


@pytest.mark.parametrize(("mode", "frames"), [("RGB", 1), ("RGBA", 1), ("RGB", 3)])
@pytest.mark.parametrize("size", [(1, 1), (40, 30), (333, 7)])
def test_an_avif_accounts_for_its_frames(mode: str, frames: int, size: tuple[int, int]):
    check_avif(saved("AVIF", size, mode, frames), size[0] * size[1])


def test_an_avif_with_larger_frames_than_it_says_is_refused():
    data = bytearray(saved("AVIF", (600, 500)))
    said = data.find(b"ispe") + 8
    data[said : said + 8] = struct.pack(">II", 16, 16)
    with Image.open(io.BytesIO(data)) as opened:
        assert opened.size == (16, 16), "Pillow believes the header"
    with pytest.raises(BadContainer, match="says 256 pixels, the frames in it have 300000"):
        check_avif(bytes(data), 256)


def box(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I4s", 8 + len(content), kind) + content


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "no AV1 picture"),
        (box(b"iloc", bytes(4) + b"\0\0" + b"\xff\xff"), "boxes are broken"),
        (
            box(b"iloc", bytes(4) + b"\0\0" + struct.pack(">H", 3) + struct.pack(">HHH", 1, 0, 0xFFFF) * 3),
            "one another",
        ),
        (struct.pack(">I4s", 1 << 30, b"meta"), "boxes are broken"),
        (box(b"iloc", bytes(4)) * 65, "more than 64 lists"),
    ],
    ids=["none", "ends", "extents", "box", "lists"],
)
def test_an_avif_whose_lists_lie_costs_nothing(content: bytes, words: str):
    with pytest.raises(BadContainer, match=words):
        check_avif(box(b"ftyp", b"avif" + bytes(4)) + content, MOST)


def test_an_avif_of_small_units_without_end_is_refused():
    units = b"\x12\0" * 70_000  # temporal delimiters
    head = box(b"ftyp", b"avif" + bytes(4))
    listed = struct.pack(">H", 1) + struct.pack(">HHHII", 1, 0, 1, len(head) + 8, len(units))
    data = head + box(b"mdat", units) + box(b"iloc", bytes(4) + b"\x44\0" + listed)
    with pytest.raises(BadContainer, match="more than 65536 units"):
        check_avif(data, MOST)
