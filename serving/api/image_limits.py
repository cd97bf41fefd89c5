"""Limits of the model's image processor, checked by an image's size before it is decoded.

| family             | its processor                                             | a thin image there                  |
|--------------------|-----------------------------------------------------------|-------------------------------------|
| Qwen2-VL and later | refuses an aspect ratio above 200                         | is refused, after it was decoded    |
| Kimi-VL            | pads to whole tokens, but its limit counts whole patches  | grows to a token's width, unbounded |
| LLaVA (CLIP)       | gives the shorter side its length, then cuts a square out | grows as much, before it is cut     |

vLLM's processing information of a model tells how many tokens an image of some size takes, and raises what the
processor would; the settings of the processor tell the rest.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from serving.api.errors import TooLarge
from serving.frontend.errors import InvalidRequest

if TYPE_CHECKING:
    from vllm.renderers import BaseRenderer

logger = logging.getLogger(__name__)

_SAMPLE = 64  # pixels of either side of an image that every processor takes
_BOUNDING = ("longest_edge", "height", "width", "max_height", "max_width", "max_pixels")  # sizes that bound a resize


class ImageLimits:
    """Checks of image sizes for one model.

    Args:
        tokens: of an image of some width and height; raises ValueError for one that the processor refuses. None: not
            known of this model.
        shortest_edge: to which the processor resizes the shorter side, however long the other becomes; None: it does
            something else.
        token_pixels: that a token stands for; 0: not known, or tokens do not grow with the image.
        max_tokens: of the longest prompt.
        max_resized_pixels: of an image after the processor has resized it.
    """

    def __init__(
        self,
        tokens: Callable[[int, int], int] | None,
        shortest_edge: int | None,
        token_pixels: int,
        max_tokens: int,
        max_resized_pixels: int,
    ) -> None:
        self._tokens, self._shortest_edge, self._token_pixels = tokens, shortest_edge, token_pixels
        self.max_tokens, self._max_resized_pixels = max_tokens, max_resized_pixels

    @classmethod
    def of(cls, renderer: BaseRenderer, max_resized_pixels: int) -> ImageLimits | None:
        """The limits of a renderer's model; None for a model without images."""
        if (processor := renderer.mm_processor) is None:
            return None
        info = processor.info
        if "image" not in info.get_supported_mm_limits():
            return None
        images = getattr(info.get_hf_processor(), "image_processor", None)
        longest = renderer.model_config.max_model_len
        return cls(_token_count(info), _unbounded_edge(images), _token_pixels(images), longest, max_resized_pixels)

    def check(self, width: int, height: int, where: str) -> int:
        """The tokens that an image takes in a prompt; 0 if that is not known.

        Raises:
            InvalidRequest: the processor refuses it, or nothing is left of it, or no prompt can hold it.
            TooLarge: the processor would make it larger than is allowed.
        """
        if (edge := self._shortest_edge) is not None:
            self._check_resized(width, height, edge * edge * max(width, height) // min(width, height), where)
        if self._tokens is None:
            return 0
        try:
            tokens = self._tokens(width, height)
        except Exception as error:  # processors raise what they like; a common image does not make them
            raise InvalidRequest(
                f"{where}: the model's processor refuses an image of {width}x{height} pixels: {error}", parameter=where
            ) from error
        if tokens < 1:
            raise InvalidRequest(
                f"{where}: the model's processor leaves nothing of an image of {width}x{height} pixels",
                parameter=where,
            )
        if tokens > self.max_tokens:
            raise InvalidRequest(
                f"{where}: an image of {width}x{height} pixels takes {tokens} tokens; the longest prompt has at most "
                f"{self.max_tokens}",
                parameter=where,
            )
        self._check_resized(width, height, tokens * self._token_pixels, where)
        return tokens

    def _check_resized(self, width: int, height: int, pixels: int, where: str) -> None:
        if pixels > self._max_resized_pixels:
            raise TooLarge(
                f"{where}: the model's processor would make an image of {width}x{height} pixels one of {pixels}; "
                f"at most {self._max_resized_pixels} are allowed (`http.max_resized_pixels`)"
            )


def _token_count(info: Any) -> Callable[[int, int], int] | None:
    """Function from width and height to tokens, of vLLM's processing information; None where that has none.

    What else the function takes differs from family to family.
    """
    ask = getattr(info, "get_num_image_tokens", None)
    if ask is None:
        return None
    known: dict[str, Callable[[], Any]] = {
        "processor": info.get_hf_processor,
        "image_processor": lambda: info.get_image_processor(),
        "mm_kwargs": dict,
    }
    parameters = inspect.signature(ask).parameters
    try:
        more = {name: known[name]() for name in parameters if name in known}

        def tokens(width: int, height: int) -> int:
            return int(ask(image_width=width, image_height=height, **more))

        tokens(_SAMPLE, _SAMPLE)
    except Exception as error:  # a family that says it in another way: its own processor still checks each image
        logger.warning("how many tokens an image takes is not known before it is processed: %s", error)
        return None
    return tokens


def _unbounded_edge(processor: Any) -> int | None:
    """Length that an image processor gives the shorter side, if nothing bounds the longer one."""
    size = getattr(processor, "size", None)
    if size is None or not getattr(processor, "do_resize", True):
        return None
    sizes = {"shortest_edge": size} if isinstance(size, int) else dict(size)
    if any(sizes.get(name) for name in _BOUNDING):
        return None
    return sizes.get("shortest_edge")


def _token_pixels(processor: Any) -> int:
    """Pixels behind one token of a processor that cuts an image into patches and merges them; else 0."""
    patch = getattr(processor, "patch_size", None)
    kernel = getattr(processor, "merge_kernel_size", None) or [getattr(processor, "merge_size", 0)] * 2
    return patch * patch * math.prod(kernel) if isinstance(patch, int) else 0
