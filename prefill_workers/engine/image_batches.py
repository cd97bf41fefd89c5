"""Processed images on their way to the vision tower, in groups that it takes at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor
from vllm.multimodal.inputs import MultiModalKwargsItem

from infra.groups import within

Pixels = tuple[str, MultiModalKwargsItem]  # a processed image and its modality


def handfuls(items: Sequence[Pixels], most: int) -> Iterator[list[Pixels]]:
    """Images in groups, in order, of at most `most` pixel numbers; a larger one by itself."""
    return within(most, items, lambda item: _numbers(list(item[1].get_data().values())))


def _numbers(data: Any) -> int:
    """Count of numbers in tensors, lists of them, or lists of those."""
    if isinstance(data, Tensor):
        return data.numel()
    return sum(map(_numbers, data)) if isinstance(data, list | tuple) else 0
