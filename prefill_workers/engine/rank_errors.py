"""A rank's error as an answer: in engines of several ranks it travels to another process."""

from __future__ import annotations

import pickle
from dataclasses import dataclass


@dataclass(frozen=True)
class Failure:
    """A rank's answer to a call that raised."""

    error: Exception


def portable(error: Exception) -> Exception:
    """An error as another process can have it: itself, or one that says the same."""
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return copy if isinstance(copy, Exception) else RuntimeError(f"{type(error).__name__}: {error}")
