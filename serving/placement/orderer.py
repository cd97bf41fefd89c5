"""Orders for requests' chunks, from what one ingress knows of the library and of links.

| told by                                           | what                                                         |
|---------------------------------------------------|--------------------------------------------------------------|
| prefill workers, from time to time (`patch_feed`) | patches that they have formed since; if they use and sum any |
| every finished link (`learn`)                     | patches that served or were missed, tokens and times         |
| every request with chunks (`popularity.observe`)  | how often a tenant asks for what                             |

Nothing is asked of anybody while a request waits: an order comes from memory alone. Popularity is kept per tenant, so
that an order tells nobody what another tenant asks for.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from autoscale.curves import ForwardCost
from kvstore.catalog.index import Entry, PatchIndex, Scope, scopes_of
from kvstore.catalog.popularity import Popularity
from kvstore.operator.patch import PatchKind
from prefill_workers.link.keys import contexts
from prefill_workers.modes import FreeText, OperatingPoint, composed_antecedents, looks_up_patch
from prefill_workers.protocol import ChunkOutcome, LinkRequest, LinkResult
from prefill_workers.settings import FREE_TEXT
from serving.placement.search import Chunk, Problem, Stored, sums_of

_MAX_CONTENTS = 1 << 16  # whose tokens are kept
_USUAL_TOKENS = 256  # of a chunk that was never linked
_FORWARD_TOKENS = 64  # a forward over fewer says nothing of the cost of a token
_DECAY = 0.99  # of the sums, at every link


class LinkCosts:
    """Costs of a link per token: computing, placing, and weighing a sum of patches [s].

    From links, as decayed sums, so that they follow the load.

    They start with what benchmark `ttft` measured (250M parameters, two CPU cores), and with two layers out of
    16, one of them without its feed-forward network, for weighing. Embeddings are encoded wherever a new chunk stands,
    and a chunk's canonical KV is loaded wherever a patched one stands: neither tells one order from another.
    """

    def __init__(self, compute: float = 1.7e-3, place: float = 6e-5) -> None:
        self._computed = [compute * _USUAL_TOKENS, float(_USUAL_TOKENS)]  # seconds, tokens
        self._placed = [place * _USUAL_TOKENS, float(_USUAL_TOKENS)]
        self._weighed = [1.7e-4 * _USUAL_TOKENS, float(_USUAL_TOKENS)]

    @property
    def forward(self) -> ForwardCost:
        """Cost of a chunk's tokens in a link's forward, its fixed part spread over all tokens."""
        return ForwardCost(fixed_tokens=0.0, seconds_per_token=self._computed[0] / self._computed[1])

    @property
    def place(self) -> float:
        """Seconds per token that is relocated, patched and written."""
        return self._placed[0] / self._placed[1]

    @property
    def weigh(self) -> float:
        """Mean seconds per token of weighing summed patches; remembered weights cost none."""
        return self._weighed[0] / self._weighed[1]

    def learn(self, result: LinkResult) -> None:
        """Take up a finished link."""
        forward, weighing = result.compute_ms / 1e3, result.select_ms / 1e3
        placing = result.stages_ms.get("place", 0.0) / 1e3
        summed = sum(chunk.tokens for chunk in result.chunks if chunk.operating_point is OperatingPoint.COMPOSED)
        if forward and result.tokens_computed >= _FORWARD_TOKENS:
            self._add(self._computed, forward, result.tokens_computed)
        if placing and result.chunk_tokens_reused:
            self._add(self._placed, placing, result.chunk_tokens_reused)
        if summed:
            self._add(self._weighed, weighing, summed)

    def _add(self, sums: list[float], seconds: float, tokens: int) -> None:
        sums[:] = [sums[0] * _DECAY + seconds, sums[1] * _DECAY + tokens]

    def of(self, tokens: int, *, patched: bool) -> int:
        """Nanoseconds of linking a chunk of so many tokens."""
        return round((tokens * self.place if patched else self.forward.seconds(tokens)) * 1e9)

    def of_sum(self, tokens: int) -> int:
        """Nanoseconds of linking it where pair patches are summed."""
        return min(round(tokens * (self.place + self.weigh) * 1e9), self.of(tokens, patched=False))


class _Fitting(NamedTuple):
    """Patches that serve the last chunk of a list: for this order, for this set, or summed.

    A set's patch and each part serve from any scope. Without `parts` none are summed.
    """

    own: Entry
    behind_set: Sequence[Entry]
    parts: Sequence[Sequence[Entry]]

    @classmethod
    def of(cls, scopes: Sequence[Scope], contents: Sequence[str], summed_up_to: int) -> _Fitting:
        """Patches that serve the last of `contents` behind the others in these scopes.

        The first scope is the tenant's.
        """
        *before, content = contents
        summed = len(before) in composed_antecedents(summed_up_to) and len(set(contents)) == len(contents)
        return cls(
            Entry(scopes[0], content, tuple(before), ordered=True),
            [Entry(scope, content, tuple(before), ordered=False) for scope in scopes],
            [[Entry(scope, content, part, ordered=False) for scope in scopes] for part in ((), *zip(before)) if summed],
        )

    def known(self, index: PatchIndex) -> bool:
        """True if any of these patches is in the index."""
        summed = bool(self.parts) and all(any(entry in index for entry in part) for part in self.parts)
        return summed or any(entry in index for entry in (self.own, *self.behind_set))


@dataclass
class PatchAwareOrderer:
    """Not thread-safe: belongs to an ingress' event loop.

    `compose_up_to`: chunks behind which pair patches are summed; 0: never. `free_text`: see
    `prefill_workers.link.keys.contexts`. `patches_allowed`, `sums_allowed`: whether patches, and sums of them, are not
    switched off (see `prefill_workers.fidelity.monitor`); what is known of them meanwhile stays as it is.
    """

    index: PatchIndex = field(default_factory=PatchIndex)
    costs: LinkCosts = field(default_factory=LinkCosts)
    popularity: Popularity = field(default_factory=Popularity)
    compose_up_to: int = 0
    free_text: FreeText = FREE_TEXT
    patches_allowed: bool = True
    sums_allowed: bool = True
    _tokens: OrderedDict[str, int] = field(default_factory=OrderedDict)

    def problem(
        self,
        contents: Sequence[str],
        groups: Sequence[int | None],
        tenant: str,
        prefix: Sequence[int],
        patched: int | None = None,
    ) -> Problem:
        """Placement problem of a request's chunks.

        Those of one group may trade places.

        `patched`: patches that no text keys may serve so many of its first chunks; None: all.
        """
        tokens = [self._tokens.get(content, _USUAL_TOKENS) for content in contents]
        chunks = [
            Chunk(
                patched=self.costs.of(count, patched=True),
                computed=self.costs.of(count, patched=False),
                group=group,
                popularity=self.popularity.share(tenant, content),
                summed=self.costs.of_sum(count),
                name=content,
            )
            for content, count, group in zip(contents, tokens, groups, strict=True)
        ]
        known = contents[:patched] if self.patches_allowed else ()
        stored = self._stored(known, tenant, prefix) if known else Stored()
        return Problem(chunks, stored)

    def _stored(self, contents: Sequence[str], tenant: str, prefix: Sequence[int]) -> Stored:
        scopes = scopes_of(tenant, prefix, contents)
        sets = self.index.sets(scopes[0], contents)
        for scope in scopes[1:]:
            for mask, behind in self.index.sets(scope, contents).items():
                sets[mask] = sets.get(mask, 0) | behind
        sums = sums_of(sets, len(contents), self._sums_up_to)
        return Stored(sets, self.index.sequences(scopes[0], contents), sums)

    @property
    def _sums_up_to(self) -> int:
        return self.compose_up_to if self.sums_allowed else 0

    def patched(self, request: LinkRequest) -> tuple[bool, ...]:
        """For each chunk of a request, whether a patch or a sum of patches is known for it there.

        () where its mode uses none.
        """
        if not looks_up_patch(request.mode):
            return ()
        if not self.patches_allowed:
            return (False,) * len(request.chunks)
        return tuple(fitting.known(self.index) for fitting in self._fitting_of(request))

    def _fitting_of(self, request: LinkRequest) -> Iterator[_Fitting]:
        """Of each of a request's chunks the patches that may serve it there."""
        contents = [span.content for span in request.chunks]
        summed = self._sums_up_to
        for i, context in enumerate(contexts(request, self.free_text)):
            scopes = scopes_of(request.tenant, context, contents)
            yield _Fitting.of(scopes, contents[: i + 1], summed if context == request.prefix else 0)

    def learn(self, request: LinkRequest, result: LinkResult) -> None:
        """Take up a finished link: what it cost, and which patches it found or missed."""
        self.costs.learn(result)
        for span, fitting, outcome in zip(request.chunks, self._fitting_of(request), result.chunks, strict=False):
            self._tokens[span.content] = outcome.tokens
            self._tokens.move_to_end(span.content)
            self._learn_patch(fitting, outcome)
        while len(self._tokens) > _MAX_CONTENTS:
            self._tokens.popitem(last=False)

    def _learn_patch(self, fitting: _Fitting, outcome: ChunkOutcome) -> None:
        own, behind_set, parts = fitting
        summed = [[entry for entry in part if entry in self.index] for part in parts]
        if outcome.operating_point is OperatingPoint.PATCHED:
            if outcome.kind is PatchKind.own:
                self.index.add(own)
            elif outcome.kind in (PatchKind.orbit, PatchKind.pair):
                known = [entry for entry in behind_set if entry in self.index]
                self.index.add((known or behind_set)[0])
        elif outcome.operating_point is OperatingPoint.COMPOSED:
            for entry in chain(*summed):
                self.index.add(entry)
        elif outcome.missed:
            stale = chain(*summed) if all(summed) and not outcome.sums_off else ()  # one of them at least
            for entry in (own, *behind_set, *stale):
                self.index.discard(entry)

    def formed(self, entries: Iterable[Entry]) -> None:
        """Take up patches that are stored now."""
        for entry in entries:
            self.index.add(entry)

    def forget(self, content: str, tenant: str) -> None:
        """Drop the patches that name a deleted content, and its size; ids are salted by tenant."""
        self.index.discard_content(content)
        self._tokens.pop(content, None)
