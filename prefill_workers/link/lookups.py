"""Look-ups: search of the library for the KV of a request's chunks, beside everything else.

A look-up says early whether a chunk's KV is *coming* (its patch is stored, or its canonical KV where that is enough),
long before anything of it is loaded. So a request learns at once which of its images miss and must be encoded, while
the hits of all tiers go on loading (mpic.md §3.2).

    a patch is stored ──▶ coming ── patch ∥ canonical KV ──▶ found: KV
          └── none ──────────┴── failed, slow or damaged ──▶ embeddings ──▶ found: embeddings, or nothing

Where no patch of the set is stored, the patches behind each of its members may be, whose weighted sum serves in its
place (see `compose`): they all load beside one another, and count as one.

Modes that link canonical KV without a patch begin at the canonical; those that compute some of a chunk's tokens all the
same load its embeddings beside.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import NamedTuple, cast

from torch import Tensor

from kvstore.errors import ShapeMismatch
from kvstore.library import Library, Place
from kvstore.operator.basis import SharedBasis
from kvstore.operator.layout import Layout
from kvstore.operator.patch import Patch
from kvstore.records.record import CanonicalRecord, EmbeddingRecord, PatchRecord, RecordKind
from kvstore.tiers.loading import Loading
from prefill_workers.link.compose import can_be_weighed
from prefill_workers.link.keys import ChunkKeys
from prefill_workers.modes import Mode, looks_up_patch, uses_canonical_alone, uses_library

_THREADS = 128  # they wait for tiers; the library bounds the reads themselves
_KEPT_SECONDS = 5.0  # a prompt is rendered, and its new images are encoded, in less
_MOST_KEPT = 1024


Stored = tuple[RecordKind, str, str]  # a record: its kind, key and owner


@dataclass(frozen=True)
class Found:
    """Outcome of a look-up: KV to place, embeddings to compute with, or nothing.

    Both come together where some tokens of stored KV are computed all the same, and where `parts` are still to be
    weighed: patches behind the fixed prefix alone, which is also `patch`, and behind each antecedent.
    `is_unsure`: a patch's load failed or was late, or a tier did not answer: this is no evidence of a miss.
    `is_unfit`: what is stored is of other tokens than the chunk has. `stored`: the records that all this was read from.
    """

    canonical: CanonicalRecord | None = None
    patch: PatchRecord | None = None
    embeddings: Tensor | None = None
    parts: tuple[Patch, ...] = ()
    is_unsure: bool = False
    is_unfit: bool = False
    stored: tuple[Stored, ...] = ()

    def check(self, tokens: int, layout: Layout, basis: SharedBasis | None) -> None:
        """Raises ShapeMismatch unless KV and patches are those of so many tokens."""
        assert self.canonical is not None
        kv = self.canonical.kv
        layout.check(kv)
        if kv.shape[1] != tokens:
            raise ShapeMismatch(f"KV of {kv.shape[1]} tokens for {tokens}")
        for patch in self.parts or ([self.patch.patch] if self.patch else []):
            patch.bind(basis).check(kv, layout)


class _PatchPlaces(NamedTuple):
    """Stored records that serve as a chunk's patch: one, the parts of a sum, or none."""

    places: list[Place]
    summed: bool
    certain: bool  # all tiers have answered


class Lookup:
    """Search of the library for one chunk, under way or ended."""

    def __init__(self, epoch: int = 0) -> None:
        self.epoch = epoch  # of `Lookups`, when it was started
        self._coming: Future[bool] = Future()
        self._found: Future[Found] = Future()
        self._loads: tuple[Loading, Loading | None] | None = None

    def lacks_pixels(self) -> Future[bool]:
        """True if nothing serves: no KV is coming, and no embeddings are stored."""
        lacks: Future[bool] = Future()
        lacks.set_running_or_notify_cancel()  # who waits for it may go, the answer comes all the same
        self._coming.add_done_callback(
            lambda coming: lacks.set_result(not coming.result() and self.found().embeddings is None)
        )
        return lacks

    def is_coming(self, timeout_s: float) -> bool:
        """True if the chunk's KV is stored and on its way; False if unknown after `timeout_s`."""
        try:
            return self._coming.result(timeout_s)
        except TimeoutError:
            return False

    @property
    def loads(self) -> tuple[Loading, Loading | None] | None:
        """Loads of canonical KV and patch that `found` waits for, once they have begun."""
        return self._loads

    def done(self) -> bool:
        """True if `found` answers at once."""
        return self._found.done()

    def found(self) -> Found:
        """Wait for the outcome."""
        return self._found.result()

    def when_done(self, call: Callable[[], object]) -> None:
        """Call when the look-up ends; at once if it has ended."""
        self._found.add_done_callback(lambda _: call())

    def begin(self, canonical: Loading, patch: Loading | None) -> None:
        """Note the loads that the outcome waits for."""
        self._loads = canonical, patch

    def decide(self, *, coming: bool) -> None:
        """Say whether the chunk's KV is coming; the first word holds."""
        if not self._coming.done():
            self._coming.set_result(coming)

    def end(self, found: Found) -> None:
        """End with an outcome."""
        self._found.set_result(found)
        self.decide(coming=found.canonical is not None)

    def fail(self, error: BaseException) -> None:
        """End with an error, which `found` raises."""
        self._found.set_exception(error)
        self.decide(coming=True)


class Lookups:
    """Look-ups in one library, and those kept for prompts that are still to come.

    `basis`: the shared one that its patches are coefficients of, if any.

    What is looked up for a prompt that is still to come is kept for it, a few seconds at most: asking a tier costs
    milliseconds, and processor time of two processes. Thread-safe.
    """

    def __init__(self, library: Library, basis: SharedBasis | None = None) -> None:
        self._library, self._basis = library, basis
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="look-up")
        self._lock = threading.Lock()
        self._epoch = 0  # ends when anything may have been deleted: what was looked up before is not kept any more
        self._kept: dict[tuple[ChunkKeys, Mode], tuple[float, Lookup]] = {}  # oldest first, with when it was started

    def start(self, keys: ChunkKeys, mode: Mode) -> Lookup:
        """Start a look-up for a request of this mode, or take the one that is kept for it.

        A kept look-up serves once.
        """
        with self._lock:
            self._drop_stale()
            _, lookup = self._kept.pop((keys, mode), (0.0, None))
        return self._start(keys, mode) if lookup is None else lookup

    def start_ahead(self, keys: ChunkKeys, mode: Mode) -> Lookup:
        """Start a look-up for a request that is still to come, and keep it for that."""
        lookup = self._start(keys, mode)
        self.keep(keys, mode, lookup)
        return lookup

    def keep(self, keys: ChunkKeys, mode: Mode, lookup: Lookup) -> None:
        """Keep a look-up that was started just now for the next request with these keys."""
        with self._lock:
            if lookup.epoch != self._epoch:
                return
            self._kept.pop((keys, mode), None)
            self._kept[keys, mode] = time.monotonic(), lookup
            self._drop_stale()

    def _drop_stale(self) -> None:
        """Drop kept look-ups that nobody asked for in time.

        The records they hold count towards no memory bound.
        """
        oldest = time.monotonic() - _KEPT_SECONDS
        while self._kept and (len(self._kept) > _MOST_KEPT or next(iter(self._kept.values()))[0] < oldest):
            del self._kept[next(iter(self._kept))]

    def lacks_pixels(self, keys: ChunkKeys, mode: Mode) -> Future[bool]:
        """Answer `Lookup.lacks_pixels` without loading anything."""
        return self._threads.submit(self._lacks_pixels, keys, mode)

    def _lacks_pixels(self, keys: ChunkKeys, mode: Mode) -> bool:
        if not uses_library(mode):
            return True
        library = self._library
        serves = bool(self._patches(keys).places) if looks_up_patch(mode) else uses_canonical_alone(mode)
        if serves and library.stored("canonical", [(keys.canonical, keys.owner)]):
            return False
        return keys.embedding is None or not library.stored("embedding", [(keys.embedding, keys.owner)])

    def forget(self, content: str, tenant: str) -> None:
        """Drop every kept look-up, whatever it found: it may be deleted now."""
        self.clear()

    def clear(self) -> None:
        """Drop every kept look-up."""
        with self._lock:
            self._epoch += 1
            self._kept.clear()

    def _start(self, keys: ChunkKeys, mode: Mode) -> Lookup:
        lookup = Lookup(self._epoch)
        if not uses_library(mode):
            lookup.end(Found())
        else:
            self._threads.submit(self._run, lookup, keys, mode)
        return lookup

    def _run(self, lookup: Lookup, keys: ChunkKeys, mode: Mode) -> None:
        try:
            library, key = self._library, keys.embedding
            beside = library.load("embedding", key, keys.owner) if key is not None and mode.needs_recompute else None
            found, until = self._kv(lookup, keys, mode)
            if key is not None and (found.canonical is None or beside is not None or found.parts):
                loading = beside or library.load("embedding", key, keys.owner)
                record = library.wait(loading, until if found.canonical is not None else None)
                if record is not None:
                    stored = (*found.stored, ("embedding", key, keys.owner))
                    found = replace(found, embeddings=cast(EmbeddingRecord, record).embeddings, stored=stored)
            lookup.end(found)
        except BaseException as error:  # a defect: whoever asked must hear of it, not wait for ever
            lookup.fail(error)

    def _kv(self, lookup: Lookup, keys: ChunkKeys, mode: Mode) -> tuple[Found, float]:
        """Load canonical KV and the patch that the mode needs, as far as they are stored.

        Returns these, and until when all are waited for.
        """
        library, patches = self._library, list[Loading]()
        summed, until = False, math.inf
        stored: list[Stored] = [("canonical", keys.canonical, keys.owner)]
        if looks_up_patch(mode):
            # Without a patch the canonical KV is of no use: nothing is moved until one is known to be stored.
            patch = self._patches(keys)
            if not patch.places:
                return Found(is_unsure=not patch.certain), until
            patches, summed = [library.load("patch", *place) for place in patch.places], patch.summed
            stored += [("patch", *place) for place in patch.places]
        elif not uses_canonical_alone(mode):
            return Found(), until
        canonical = library.load("canonical", keys.canonical, keys.owner)
        if not summed:
            lookup.begin(canonical, patches[0] if patches else None)
        if library.stored("canonical", [(keys.canonical, keys.owner)]):
            lookup.decide(coming=True)
        until = time.monotonic() + library.settings.load_timeout_s
        kv = cast(CanonicalRecord | None, library.wait(canonical, until))
        loaded = [cast(PatchRecord | None, library.wait(patch, until)) for patch in patches]
        records = tuple(record for record in loaded if record is not None)
        if len(records) < len(patches):
            return Found(is_unsure=True), until
        if summed:
            parts = tuple(record.patch.bind(self._basis) for record in records)
            found = Found(kv, records[0], parts=parts, stored=tuple(stored)) if can_be_weighed(parts) else Found()
            return found, until
        return Found(kv, records[0] if records else None, stored=tuple(stored)), until

    def _patches(self, keys: ChunkKeys) -> _PatchPlaces:
        """Find the stored records that serve as a chunk's patch."""
        whole = [(key, owner) for key in (keys.own_patch, keys.set_patch) for owner in keys.patch_owners]
        owners = dict.fromkeys((*keys.patch_owners, keys.owner))  # of a reference behind references: everybody
        parts = [[(key, owner) for owner in owners] for key in keys.parts]

        def wanted(found: set[Place]) -> list[Place]:
            """Places better than all that was found: of parts none once a whole patch was."""
            better = list(takewhile(lambda place: place not in found, whole))
            if len(better) < len(whole):
                return better
            return [*whole, *(place for part in parts if found.isdisjoint(part) for place in part)]

        stored, certain = self._library.look_up("patch", wanted(set()), wanted)
        for place in whole:
            if place in stored:
                return _PatchPlaces([place], summed=False, certain=certain)
        chosen = [next((place for place in part if place in stored), None) for part in parts]
        places = [place for place in chosen if place is not None] if None not in chosen else []
        return _PatchPlaces(places, summed=True, certain=certain)
