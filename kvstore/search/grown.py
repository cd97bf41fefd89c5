"""Array of numbers that grows at its end."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


class GrownArray:
    """One-dimensional array with room behind its end, doubled when it is full."""

    def __init__(self, dtype: Any) -> None:
        self._whole, self._size = np.zeros(1024, dtype), 0

    @property
    def filled(self) -> Array:
        """View of what was appended; writes go through."""
        return self._whole[: self._size]

    def append(self, value: float) -> None:
        """Add a number."""
        if self._size == len(self._whole):
            self._whole = np.concatenate([self._whole, np.zeros_like(self._whole)])
        self._whole[self._size] = value
        self._size += 1
