"""Image and text processing of Kimi-VL, as the model's own checkpoints bring it: code beside the weights.

Copied into the checkpoint; vLLM loads it with `trust_remote_code`. An image is padded to whole tokens of
`merge_kernel_size` patches and cut into patches, row by row.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import BatchFeature, ProcessorMixin
from transformers.image_processing_utils import BaseImageProcessor

MEDIA_PAD = "<|media_pad|>"


class KimiVLImageProcessor(BaseImageProcessor):
    """Pixels to patches [patches, 3, patch size, patch size] and the grid [images, 2] of patches per image."""

    model_input_names = ["pixel_values", "image_grid_hws"]  # noqa: RUF012

    def __init__(
        self,
        patch_size: int = 14,
        merge_kernel_size: Sequence[int] = (2, 2),
        in_token_limit: int = 4096,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.patch_size, self.merge_kernel_size = patch_size, list(merge_kernel_size)
        self.in_token_limit = in_token_limit

    def preprocess(self, images: Any, return_tensors: str | None = None, **options: Any) -> BatchFeature:
        """Patches and grids of a list of images."""
        patches, grids = [], []
        for image in images if isinstance(images, (list, tuple)) else [images]:
            pixels = self._padded(image if isinstance(image, Image.Image) else Image.fromarray(np.asarray(image)))
            size = self.patch_size
            grid = (pixels.shape[1] // size, pixels.shape[2] // size)
            cut = pixels.unfold(1, size, size).unfold(2, size, size)  # [3, rows, columns, size, size]
            patches.append(cut.permute(1, 2, 0, 3, 4).flatten(0, 1))
            grids.append(grid)
        data = {"pixel_values": torch.cat(patches), "image_grid_hws": torch.tensor(grids)}
        return BatchFeature(data, tensor_type=return_tensors)

    def _padded(self, image: Image.Image) -> torch.Tensor:
        size = self.patch_size
        patches = (image.width // size) * (image.height // size)
        if patches > self.in_token_limit:
            scale = math.sqrt(self.in_token_limit / patches)
            image = image.resize((int(image.width * scale), int(image.height * scale)), Image.Resampling.BICUBIC)
        rows, columns = (kernel * size for kernel in self.merge_kernel_size)
        pixels = torch.from_numpy(np.asarray(image.convert("RGB")).copy()).permute(2, 0, 1).float() / 127.5 - 1.0
        return torch.nn.functional.pad(pixels, (0, -image.width % columns, 0, -image.height % rows))


class KimiVLProcessor(ProcessorMixin):
    """Text and images to model inputs: every image's placeholder is repeated once per token."""

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: str | None = None) -> None:
        self.image_token = MEDIA_PAD
        super().__init__(image_processor, tokenizer, chat_template=chat_template)

    def __call__(
        self, images: Any = None, text: Any = None, return_tensors: str | None = None, **options: Any
    ) -> BatchFeature:
        """Model inputs of one or more prompts and the images in them, in order."""
        found = self.image_processor(images, return_tensors="pt") if images else {}
        texts = [text] if isinstance(text, str) else list(text)
        if images:
            merged = math.prod(self.image_processor.merge_kernel_size)
            counts = iter((found["image_grid_hws"].prod(-1) // merged).tolist())
            texts = ["".join(self._expanded(part, counts) for part in self._parts(one)) for one in texts]
        return BatchFeature({**self.tokenizer(texts), **found}, tensor_type=return_tensors)

    def _parts(self, text: str) -> list[str]:
        head, *rest = text.split(MEDIA_PAD)
        return [head, *(piece for tail in rest for piece in (MEDIA_PAD, tail))]

    def _expanded(self, part: str, counts: Iterator[int]) -> str:
        return MEDIA_PAD * next(counts) if part == MEDIA_PAD else part
