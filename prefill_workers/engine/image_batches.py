"""Processed images on their way to the vision tower, in groups that it takes at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor
from vllm.multimodal.inputs import MultiModalKwargsItem

Pixels = tuple[str, MultiModalKwargsItem]  # a processed image and its modality


def handfuls(items: Sequence[Pixels], most: int) -> Iterator[list[Pixels]]:
    """Images in groups, in order, of at most `most` pixel numbers; a larger one by itself."""
    group, size = list[Pixels](), 0
    for item in items:
        own = _numbers(list(item[1].get_data().values()))
        if group and size + own > most:
            yield group
            group, size = [], 0
        group.append(item)
        size += own
    if group:
        yield group


def _numbers(data: Any) -> int:
    """Count of numbers in tensors, lists of them, or lists of those."""
    if isinstance(data, Tensor):
        return data.numel()
    return sum(map(_numbers, data)) if isinstance(data, list | tuple) else 0
