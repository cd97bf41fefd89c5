"""Numba loop of `kvstore.search.vectors`, compiled once and cached on disk."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit


@njit(nogil=True, cache=True)
def dots(rows: Any, query: Any, out: Any) -> None:
    """out[r] = rows[r] · query, in int32; both are int8."""
    for r in range(rows.shape[0]):
        total = np.int32(0)
        for i in range(query.size):
            total += np.int32(np.int16(rows[r, i]) * np.int16(query[i]))
        out[r] = total
