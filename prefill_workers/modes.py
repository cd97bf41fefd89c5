"""Modes that requests choose, and operating points at which chunks are linked.

Pure functions and values.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, NamedTuple


class ModeKind(StrEnum):
    """Kinds of modes."""

    AUTO = "auto"  # stored patches where they fit, exact otherwise
    EXACT = "exact"  # every chunk computed in context
    FULL_REUSE = "full-reuse"  # canonical KV wherever stored, no patch: the blind baseline
    OFF = "off"  # nothing looked up, nothing stored
    MPIC = "mpic"  # as full-reuse, but a chunk's first tokens are computed in context (mpic.md §4.2)
    CACHEBLEND = "cacheblend"  # as full-reuse, but the tokens are whose KV deviates most (CacheBlend, §4)


class FreeText(NamedTuple):
    """Longest text [tokens] that keys no patch: between two chunks, and before the first.

    The fixed prefix, and what the chat template writes around it, are no part of the latter.
    """

    between: int
    before: int


class Text(StrEnum):
    """Treatment of the text around chunks in the keys of their patches."""

    AUTO = "auto"  # text before and between chunks, where it is long (`keys.contexts`)
    STRICT = "strict"  # all text before a chunk
    FREE = "free"  # none but the fixed prefix

    def keys(self, before: int, between: int, free: FreeText) -> bool:
        """True if text keys the patch of a chunk.

        Args:
            before: tokens of text before the request's first chunk.
            between: tokens of the longest stretch between the chunks up to this one.
        """
        return self is Text.STRICT or (self is Text.AUTO and (before > free.before or between > free.between))


_LARGEST = {ModeKind.MPIC: 4096, ModeKind.CACHEBLEND: 100}
_WITH_AMOUNT = re.compile(r"(mpic|cacheblend)-([0-9]{1,4})")
MODES = "auto, exact, full-reuse, off, mpic-K (K from 0 to 4096) or cacheblend-R (R from 0 to 100)"


@dataclass(frozen=True)
class Mode:
    """Mode of a request: the reuse that it allows.

    `amount` is how much of a chunk with stored KV is computed in context all the same: the first so many tokens (mpic),
    or so many per cent of its tokens (cacheblend). Other kinds have none.
    """

    kind: ModeKind
    amount: int = 0

    AUTO: ClassVar[Mode]
    EXACT: ClassVar[Mode]
    FULL_REUSE: ClassVar[Mode]
    OFF: ClassVar[Mode]

    def __post_init__(self) -> None:
        if not 0 <= self.amount <= _LARGEST.get(self.kind, 0):
            raise ValueError(f"amount {self.amount} of mode {self.kind!r} is out of range; use {MODES}")

    @classmethod
    def parse(cls, text: str) -> Mode:
        """Parse a mode as a request writes it, such as `auto` or `mpic-32`.

        Raises:
            ValueError: naming what is allowed.
        """
        named = _NAMED.get(text)
        if named is not None:
            return named
        written = _WITH_AMOUNT.fullmatch(text)
        if written is None or int(written[2]) > _LARGEST[ModeKind(written[1])]:
            raise ValueError(f"unknown mode {text!r}; use {MODES}")
        return cls(ModeKind(written[1]), int(written[2]))

    def __str__(self) -> str:
        return f"{self.kind}-{self.amount}" if self.is_selective else str(self.kind)

    def selected(self, tokens: int) -> int:
        """Number of a chunk's `tokens` that are computed in context although KV is stored.

        A share of a token counts as one.
        """
        return -(-tokens * self.amount // 100) if self.kind is ModeKind.CACHEBLEND else min(self.amount, tokens)

    @property
    def is_selective(self) -> bool:
        """True if only some tokens of a chunk with stored KV may be computed in context."""
        return self.kind in _LARGEST

    @property
    def needs_recompute(self) -> bool:
        """True if some tokens of every chunk with stored KV are computed in context."""
        return self.amount > 0

    @property
    def needs_partial_forward(self) -> bool:
        """True if only a partial forward tells which tokens are computed in context."""
        return self.kind is ModeKind.CACHEBLEND and 0 < self.amount < _LARGEST[self.kind]


Mode.AUTO, Mode.EXACT = Mode(ModeKind.AUTO), Mode(ModeKind.EXACT)
Mode.FULL_REUSE, Mode.OFF = Mode(ModeKind.FULL_REUSE), Mode(ModeKind.OFF)
_NAMED = {str(mode): mode for mode in (Mode.AUTO, Mode.EXACT, Mode.FULL_REUSE, Mode.OFF)}


class OperatingPoint(StrEnum):
    """Origin of one chunk's KV."""

    PREFIX = "prefix"  # in blocks of an earlier prompt that begins alike, as they were made; or a session's exact KV
    PATCHED = "patched"  # relocated and patched, no forward
    COMPOSED = "composed"  # relocated and patched by a weighted sum of pair patches (see `link.compose`)
    SURVIVED = "survived"  # conditioned KV of a session, something before it left; relocated, no forward
    RELOCATED = "relocated"  # relocated only (blind), no forward
    SELECTED = "selected"  # relocated, and some tokens computed in context
    RECOMPUTED = "recomputed"  # computed in context, from stored embeddings or from text
    ENCODED = "encoded"  # never seen: pixels encoded, then computed in context

    @property
    def is_reuse(self) -> bool:
        """True if KV that is there already is used."""
        return self not in (OperatingPoint.RECOMPUTED, OperatingPoint.ENCODED)

    @property
    def needs_forward(self) -> bool:
        """True if a forward computes tokens of the chunk."""
        return self in (OperatingPoint.SELECTED, OperatingPoint.RECOMPUTED, OperatingPoint.ENCODED)


# All others are approximate. A prefix counts as the point at which it was made (`ChunkPlan.made_at`).
EXACT_POINTS = frozenset({OperatingPoint.RECOMPUTED, OperatingPoint.ENCODED, OperatingPoint.PREFIX})


def looks_up_patch(mode: Mode) -> bool:
    """True if a stored patch could serve a request of this mode."""
    return mode.kind is ModeKind.AUTO


def composed_antecedents(compose_up_to: int) -> range:
    """Numbers of antecedents behind which pair patches are summed; empty where none are.

    From 2: behind one antecedent the pair patch itself serves, behind none the canonical KV.
    """
    return range(2, compose_up_to + 1)


def uses_session(mode: Mode) -> bool:
    """True if a request of this mode may take KV that a session kept, and keep what it links."""
    return mode.kind in (ModeKind.AUTO, ModeKind.EXACT)


def uses_canonical_alone(mode: Mode) -> bool:
    """True if stored canonical KV serves a request of this mode without a patch."""
    return mode.kind is ModeKind.FULL_REUSE or mode.is_selective


def uses_library(mode: Mode) -> bool:
    """True unless a request of this mode looks nothing up and leaves nothing behind."""
    return mode.kind is not ModeKind.OFF


def operating_point(
    mode: Mode, *, canonical: bool, patch: bool, computable: bool, parts: bool = False
) -> OperatingPoint:
    """Cheapest point that `mode` allows, given what is stored for the chunk.

    `computable`: whether a forward can run over the chunk without encoding pixels: its embeddings are stored, or it is
    text. `parts`: whether the patch is to be summed of several. `canonical` and `patch`: whether they are stored, the
    patch behind these antecedents.
    """
    if canonical and patch and looks_up_patch(mode):
        return OperatingPoint.COMPOSED if parts else OperatingPoint.PATCHED
    if canonical and mode.kind is ModeKind.FULL_REUSE:
        return OperatingPoint.RELOCATED
    if canonical and mode.is_selective and (computable or not mode.needs_recompute):
        return OperatingPoint.SELECTED
    return OperatingPoint.RECOMPUTED if computable else OperatingPoint.ENCODED
