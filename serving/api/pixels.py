"""Decoding of images to RGB with 8 bits a channel; deeper ones are scaled, not clipped.

| pixels                              | become                                                                       |
|-------------------------------------|------------------------------------------------------------------------------|
| 8 bits or fewer                     | as vLLM makes them: turned by EXIF, transparency on white                    |
| unsigned, 12 or 16 bits             | their high 8 bits                                                            |
| signed or 32-bit integers           | scaled from 0..255, 0..65535 or 0..2^32-1, whichever first holds them all    |
| floats                              | scaled from 0..1, 0..255 or 0..65535, in the same way; NaN and inf: refused  |
| such, if the brightest is below 1/8 | stretched: the darkest is black, the brightest white                         |
| such, if some are below 0 or beyond | stretched                                                                    |

Turning and transparency are vLLM's own; it clips deep pixels. An unsigned file of 12 or 16 bits says itself what is
white, the others do not: a standard range is taken where the picture uses it, so that a dark scan stays dark.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image, TiffImagePlugin
from PIL.ImageFile import ImageFile
from vllm.multimodal.image import convert_image_mode, normalize_image

_DEEP_MODES = ("I", "I;16", "I;16B", "I;16L", "I;16N", "F")
_INTEGER_WHITES, _FLOAT_WHITES = (255, 65535, 2**32 - 1), (1, 255, 65535)
_USED = 1 / 8  # of a range, so that it is taken to be the picture's
_STRIP = 1 << 20  # pixels that are scaled at a time
_PREMULTIPLIED = {"RGBa": "RGBA", "La": "LA"}
_UNSIGNED, _WHITE_IS_ZERO = 1, 0  # values of TIFF's tags


class UnreadablePixels(ValueError):
    """Pixels that no picture can be made of; the message says why."""


class DeferredImage(Image.Image):
    """Image that is decoded, to RGB with 8 bits a channel, when its pixels are first read.

    Until then its size is the header's, before the picture is turned.
    """

    def __init__(self, opened: ImageFile) -> None:
        super().__init__()
        self._opened: ImageFile | None = opened
        self._mode, self._size = "RGB", opened.size

    def load(self) -> Any:
        """Decode the image unless it is; all that Pillow does with pixels begins here."""
        if self._opened is not None:
            decoded = decode(self._opened)
            self.im, self._size, self._opened = decoded.im, decoded.size, None
        return super().load()


def decode(opened: ImageFile) -> Image.Image:
    """The picture as RGB with 8 bits a channel.

    Raises:
        UnreadablePixels: some are not numbers.
        Exception: whatever Pillow raises at a broken file.
    """
    samples = _Samples.of(opened)
    opened.load()  # first: what turns an image swallows every error
    image: Image.Image = opened
    if image.mode in _DEEP_MODES:
        image = _scaled(image, samples)
    elif (plain := _PREMULTIPLIED.get(image.mode)) is not None:
        image = _unmultiplied(image, plain)
    return convert_image_mode(normalize_image(image), "RGB")


@dataclass(frozen=True)
class _Samples:
    """Meaning of a file's samples beyond what Pillow's mode says."""

    bits: int = 16
    is_signed: bool = True  # of 32-bit integers
    is_inverted: bool = False  # 0 is white

    @classmethod
    def of(cls, opened: ImageFile) -> _Samples:
        """Meaning of an opened file's samples."""
        if not isinstance(opened, TiffImagePlugin.TiffImageFile):
            return cls()
        tags = opened.tag_v2
        return cls(
            bits=int(tags.get(TiffImagePlugin.BITSPERSAMPLE, (1,))[0]),
            is_signed=int(tags.get(TiffImagePlugin.SAMPLEFORMAT, (_UNSIGNED,))[0]) != _UNSIGNED,
            is_inverted=tags.get(TiffImagePlugin.PHOTOMETRIC_INTERPRETATION) == _WHITE_IS_ZERO,
        )


def _scaled(image: Image.Image, samples: _Samples) -> Image.Image:
    """A grey picture of more than 8 bits as one of 8, with its transparent value as an alpha channel."""
    black, scale = (0.0, 0.0) if image.mode.startswith("I;16") else _range(image, samples)
    grey = np.empty((image.height, image.width), np.uint8)
    transparent = image.info.get("transparency")
    alpha = np.full_like(grey, 255) if isinstance(transparent, int) else None
    for top, values in _strips(image, samples):
        rows = slice(top, top + len(values))
        if image.mode.startswith("I;16"):
            grey[rows] = values >> (samples.bits - 8)
        else:
            grey[rows] = np.rint((values.astype(np.float64) - black) * scale)
        if alpha is not None:
            alpha[rows][values == transparent] = 0
    if samples.is_inverted:
        np.subtract(255, grey, out=grey)
    found = Image.fromarray(grey)
    if alpha is not None:
        found.putalpha(Image.fromarray(alpha))
    found.info = {name: value for name, value in image.info.items() if name != "transparency"}
    return found


def _range(image: Image.Image, samples: _Samples) -> tuple[float, float]:
    """Black, and what a step from there is in steps of 8 bits; see the module's table.

    Raises:
        UnreadablePixels: a pixel is not a finite number.
    """
    low, high = np.inf, -np.inf
    for _, values in _strips(image, samples):
        if image.mode == "F" and not np.isfinite(values).all():
            raise UnreadablePixels("the image has pixels that are not finite numbers (NaN or infinity)")
        low, high = min(low, float(values.min())), max(high, float(values.max()))
    for white in _FLOAT_WHITES if image.mode == "F" else _INTEGER_WHITES:
        if low >= 0 and white * _USED <= high <= white:
            return 0.0, 255 / white
    return low, 255 / (high - low) if high > low else 0.0


def _strips(image: Image.Image, samples: _Samples) -> Iterator[tuple[int, np.ndarray]]:
    """A grey picture's pixels [rows, width], some rows at a time, with the first row's number."""
    rows = max(1, _STRIP // image.width)
    for top in range(0, image.height, rows):
        values = np.asarray(image.crop((0, top, image.width, min(top + rows, image.height))))
        yield top, values.view(np.uint32) if image.mode == "I" and not samples.is_signed else values


def _unmultiplied(image: Image.Image, plain: str) -> Image.Image:
    """A picture whose colours were multiplied by their alpha, with plain colours."""
    if plain == "RGBA":
        return image.convert(plain)
    grey, alpha = image.split()  # Pillow converts colours alone
    colours = Image.merge("RGBa", (grey, grey, grey, alpha)).convert("RGBA")
    colours.info = image.info
    return colours
