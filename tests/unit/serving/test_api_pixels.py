"""Pixels of every depth come out as the 8-bit version of the same picture, neither clipped nor blank."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from image_files import png16, tiff
from PIL import Image

from serving.api.pixels import DeferredImage, UnreadablePixels, decode

GREY = np.array([[40, 200, 40], [200, 255, 0]], np.uint8)  # rows of another length than columns
COLOUR = np.stack([GREY, GREY[::-1], 255 - GREY], -1)
ALPHA = np.array([[255, 255, 0], [0, 255, 255]], np.uint8)
BLACK_IS_ZERO, WHITE_IS_ZERO, RGB, CMYK = 1, 0, 2, 5
UNASSOCIATED = {338: ([2], "H")}


def deep(pixels: np.ndarray) -> np.ndarray:
    """The same picture in 16 bits [rows, columns, channels]."""
    return (pixels.astype(np.uint16) * 257).reshape(*pixels.shape[:2], -1)


def plain(pixels: np.ndarray, mode: str | None = None) -> list:
    """The picture as an 8-bit PNG gives it."""
    buffer = io.BytesIO()
    Image.fromarray(pixels, mode).save(buffer, "PNG")
    return decoded(buffer.getvalue())


def decoded(data: bytes) -> list:
    return np.asarray(decode(Image.open(io.BytesIO(data)))).tolist()


def saved(pixels: np.ndarray, **options: Any) -> bytes:
    """A TIFF as Pillow writes it: signed 32-bit integers, floats, or unsigned 16 bits."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "TIFF", **options)
    return buffer.getvalue()


WITH_ALPHA = np.concatenate([COLOUR, ALPHA[..., None]], -1)
GREY_ALPHA = np.stack([GREY, ALPHA], -1)
INKS = np.concatenate([COLOUR, np.zeros_like(COLOUR[..., :1])], -1)


@pytest.mark.parametrize(
    ("data", "same"),
    [
        (png16(deep(GREY)), plain(GREY)),
        (png16(deep(COLOUR)), plain(COLOUR)),
        (png16(deep(WITH_ALPHA)), plain(WITH_ALPHA)),
        (png16(deep(GREY_ALPHA)), plain(GREY_ALPHA)),
        (tiff(deep(GREY), BLACK_IS_ZERO), plain(GREY)),
        (tiff(deep(GREY), BLACK_IS_ZERO, order=">"), plain(GREY)),
        (tiff(deep(255 - GREY), WHITE_IS_ZERO), plain(GREY)),
        (tiff(deep(COLOUR), RGB), plain(COLOUR)),
        (tiff(deep(COLOUR), RGB, order=">"), plain(COLOUR)),
        (tiff(deep(WITH_ALPHA), RGB, tags=UNASSOCIATED), plain(WITH_ALPHA)),
        (tiff(deep(INKS), CMYK), plain(255 - COLOUR)),
        (tiff(deep(GREY).astype(np.uint32) * 65537, BLACK_IS_ZERO), plain(GREY)),
        (tiff(GREY[..., None].astype(np.uint32), BLACK_IS_ZERO), plain(GREY)),
        (tiff(GREY[..., None].astype(np.int16), BLACK_IS_ZERO), plain(GREY)),
        (saved(deep(GREY)[..., 0]), plain(GREY)),
        (saved(deep(GREY)[..., 0], compression="tiff_deflate"), plain(GREY)),
        (saved(deep(GREY)[..., 0].astype(np.int32), compression="tiff_lzw"), plain(GREY)),
        (saved((GREY / 255).astype(np.float32)), plain(GREY)),
        (saved(GREY.astype(np.float32), compression="tiff_deflate"), plain(GREY)),
        (saved(deep(GREY)[..., 0].astype(np.float32)), plain(GREY)),
        (tiff((GREY[..., None] / 255).astype(np.float32), BLACK_IS_ZERO, order=">"), plain(GREY)),
        (tiff((1 - GREY[..., None] / 255).astype(np.float32), WHITE_IS_ZERO), plain(GREY)),
    ],
    ids=["png-grey", "png-rgb", "png-rgba", "png-grey-alpha", "tiff-grey", "tiff-grey-big-endian",
         "tiff-white-is-zero", "tiff-rgb", "tiff-rgb-big-endian", "tiff-rgba", "tiff-cmyk", "tiff-uint32",
         "tiff-uint32-small", "tiff-int16", "tiff-pillow-16", "tiff-deflate-16", "tiff-int32-of-16",
         "tiff-float-1", "tiff-float-255", "tiff-float-65535", "tiff-float-big-endian", "tiff-float-white-is-zero"],
)  # fmt: skip
def test_a_deep_picture_looks_like_its_8_bit_version(data: bytes, same: list):
    assert decoded(data) == same


def test_a_grey_picture_of_12_bits_is_scaled_by_its_own_white():
    values = GREY.astype(int) * 4095 // 255  # two samples in three bytes; of 3 columns a row has 5
    rows = []
    for row in values:
        bits = "".join(f"{value:012b}" for value in row).ljust(40, "0")
        rows += [int(bits[i : i + 8], 2) for i in range(0, 40, 8)]
    packed = np.array(rows, np.uint8).reshape(2, 5, 1)
    data = tiff(packed, BLACK_IS_ZERO, tags={256: ([3], "I"), 258: ([12], "H")})
    np.testing.assert_allclose(np.array(decoded(data))[..., 0], GREY, atol=1)


def test_a_deep_greys_see_through_value_shows_white_as_of_8_bits():
    found = decoded(png16(deep(GREY), transparent=(200 * 257,)))
    assert found == plain(np.where(GREY == 200, 255, GREY).astype(np.uint8))


def test_a_palette_stays_a_palette():
    buffer = io.BytesIO()
    Image.fromarray(COLOUR).quantize(6).save(buffer, "TIFF")
    assert decoded(buffer.getvalue()) == plain(COLOUR)


@pytest.mark.parametrize("values", [GREY.astype(np.float32) * 100 - 5000, GREY.astype(np.int32) * 1000,
                                    GREY.astype(np.float32) / 1e6, -GREY.astype(np.int32)[::-1]])  # fmt: skip
def test_values_that_no_range_fits_are_stretched(values: np.ndarray):
    found = np.array(decoded(saved(values)))[..., 0]
    assert (found.min(), found.max()) == (0, 255)
    assert (np.argsort(found.ravel(), kind="stable") == np.argsort(values.ravel(), kind="stable")).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_is_refused(value: float):
    pixels = (GREY / 255).astype(np.float32)
    pixels[1, 1] = value
    with pytest.raises(UnreadablePixels, match="NaN"):
        decoded(saved(pixels))


def test_a_picture_of_one_value_is_one_grey():
    assert {value for row in decoded(saved(np.full((2, 2), -7.0, np.float32))) for pixel in row for value in pixel} == {
        0
    }


def test_a_deep_picture_is_turned_as_a_plain_one():
    found = np.array(decoded(png16(deep(GREY), orientation=6)))[..., 0]
    assert found.tolist() == np.rot90(GREY, -1).tolist()


def test_premultiplied_transparency_shows_white():
    half = np.array([[[0, 0], [255, 255]]], np.uint8)  # grey, alpha
    data = tiff(half, BLACK_IS_ZERO, tags={338: ([1], "H")})
    assert decoded(data) == [[[255] * 3, [255] * 3]]


def test_a_deferred_image_is_decoded_where_it_is_used_and_once(monkeypatch: pytest.MonkeyPatch):
    image = DeferredImage(Image.open(io.BytesIO(png16(deep(GREY), orientation=6))))
    assert image.size == (3, 2)
    assert np.asarray(image).shape == (3, 2, 3)
    monkeypatch.setattr("serving.api.pixels.decode", pytest.fail)
    assert image.copy().size == image.resize((2, 3)).size == image.size == (2, 3)


def test_many_rows_are_scaled_as_few(monkeypatch: pytest.MonkeyPatch):
    values = np.arange(24, dtype=np.int32).reshape(8, 3) * 100_000
    whole = decoded(saved(values))
    monkeypatch.setattr("serving.api.pixels._STRIP", 5)
    assert decoded(saved(values)) == whole
