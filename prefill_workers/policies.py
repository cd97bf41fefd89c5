"""Which operating point a chunk is linked at (DESIGN.md, "Operating points"). Pure functions."""

from __future__ import annotations

from enum import StrEnum


class Mode(StrEnum):
    """What a request allows."""

    AUTO = "auto"  # stored patches where they fit, exact otherwise
    EXACT = "exact"  # every chunk computed in context
    FULL_REUSE = "full-reuse"  # canonical KV wherever stored, no patch: the blind baseline
    OFF = "off"  # nothing looked up, nothing stored


class OperatingPoint(StrEnum):
    """How one chunk's KV came to be."""

    PATCHED = "patched"  # relocated and patched, no forward
    RELOCATED = "relocated"  # relocated only (blind), no forward
    RECOMPUTED = "recomputed"  # computed in context, from stored embeddings or from text
    ENCODED = "encoded"  # never seen: pixels encoded, then computed in context

    @property
    def reuses_kv(self) -> bool:
        """Whether the chunk needed no forward."""
        return self in (OperatingPoint.PATCHED, OperatingPoint.RELOCATED)


EXACT_POINTS = frozenset({OperatingPoint.RECOMPUTED, OperatingPoint.ENCODED})  # all others are approximate


def looks_up_patch(mode: Mode) -> bool:
    """Whether a stored patch could serve a request of this mode."""
    return mode is Mode.AUTO


def forms_patches(mode: Mode) -> bool:
    """Whether what a request of this mode computed is kept for later requests."""
    return mode is not Mode.OFF


def operating_point(mode: Mode, *, canonical: bool, patch: bool, embeddings: bool) -> OperatingPoint:
    """The cheapest point that `mode` allows, given what is stored for the chunk behind these antecedents."""
    if canonical and patch and mode is Mode.AUTO:
        return OperatingPoint.PATCHED
    if canonical and mode is Mode.FULL_REUSE:
        return OperatingPoint.RELOCATED
    return OperatingPoint.RECOMPUTED if embeddings and mode is not Mode.OFF else OperatingPoint.ENCODED
