"""Patches behind sets of chunks: orbit patches, prefix subsets and pairs, ahead of requests.

Chunks stand back to back behind the prompt's opening (see `orbit_patches`), in scratch blocks; their deficits go where
those of links go, through the harvester.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from kvstore.operator.apply import deficit_at
from kvstore.operator.patch import PatchKind, set_kind
from kvstore.records.keys import antecedent_key, owner_of
from kvstore.records.record import CanonicalRecord
from prefill_workers.link.plan import LinkPlan
from prefill_workers.patches.harvester import Harvester
from prefill_workers.patches.orbit_patches import OrbitChunk, OrbitForming, Placed, arrange
from prefill_workers.patches.scratch import Pieces, Scratch


class SetPatches:
    """Patches behind sets of chunks, formed by forwards of their own."""

    def __init__(self, harvester: Harvester) -> None:
        self._harvester = harvester
        self.engine, self.library, self.form = harvester.engine, harvester.library, harvester.form

    # -- orbit ---------------------------------------------------------------------------------------------------------

    def unready(self, plan: LinkPlan) -> OrbitForming:
        """Orders of a plan's distinct chunks, with the embeddings that the plan has."""
        request, whole = plan.request, plan.sequence
        chunks = tuple(
            OrbitChunk(
                key=chunk.keys.canonical,
                content=chunk.span.content,
                token_ids=whole.token_ids[chunk.span.start : chunk.span.stop],
                positions=whole.positions[..., chunk.span.start : chunk.span.stop] - chunk.start_position,
                embeddings=chunk.embeddings,
                first=chunk.span.first - chunk.span.start,
                mask=chunk.span.is_embed,
                needs_embeddings=chunk.span.needs_embeddings,
            )
            for chunk in plan.chunks
        )
        return OrbitForming(request.prefix, chunks, request.tenant, request.opening)

    def ready(self, forming: OrbitForming) -> Pieces[OrbitForming | None]:
        """The same with all embeddings; None when some are missing."""
        found: list[OrbitChunk] = []
        for chunk in forming.chunks:
            embedded = yield from self._embedded(chunk, forming.tenant)
            if embedded is None:
                return None
            found.append(embedded)
        return OrbitForming(forming.prefix, tuple(found), forming.tenant, forming.opening)

    def _embedded(self, chunk: OrbitChunk, tenant: str) -> Pieces[OrbitChunk | None]:
        """The chunk with its embeddings, if it needs any; None when they are missing."""
        if not chunk.needs_embeddings or chunk.embeddings is not None:
            return chunk
        embeddings = yield from self._harvester.stored_embeddings(chunk.content, tenant)
        return None if embeddings is None else replace(chunk, embeddings=embeddings)

    def forming(self, plan: LinkPlan) -> Pieces[OrbitForming | None]:
        """Orders of a plan's distinct chunks; None when embeddings are missing."""
        return self.ready(self.unready(plan))

    def lacking(self, forming: OrbitForming) -> Pieces[OrbitForming | None]:
        """The set's orders, `ready` to be run.

        None if the patch behind all of it is stored, or on its way, or if embeddings are not stored.
        """
        keys = [chunk.key for chunk in forming.chunks]
        if len(keys) < 2 or len(set(keys)) < len(keys):
            return None
        behind = antecedent_key(forming.prefix, keys[:-1], ordered=False)
        whole_set = self.form.key(keys[-1], behind, set_kind(len(keys) - 1))
        owner = _set_owner(forming.tenant, forming.prefix, *(chunk.content for chunk in forming.chunks))
        if self._harvester.was_sent(whole_set, owner):
            return None
        stored = yield from self._harvester.stored_patch(whole_set, owner)
        return (yield from self.ready(forming)) if stored is None else None

    def orbit_step(self, forming: OrbitForming, scratch: Scratch) -> Pieces[bool]:
        """Run the next order of a forming set, send the patches it completes; False after the last."""
        order = next(forming.orders, None)
        if order is None:
            return False
        placed, seconds = yield from self._forward(forming.opening, order, scratch)
        for i, place in enumerate(placed):
            before = [(other.chunk.key, other.chunk.content) for other in placed[:i]]
            if not forming.wants(place.chunk.key, [key for key, _ in before]):
                continue
            owner = owner_of(forming.tenant, place.chunk.content)
            canonical = yield from self._harvester.stored_canonical(place.chunk.key, owner)
            if canonical is None:  # evicted meanwhile: nothing to measure the deficit against
                return False
            delta = self._deficit(place, canonical, scratch.blocks)
            mean = forming.add(place.chunk.key, [key for key, _ in before], delta)
            if mean is not None:
                self._harvester.submit(
                    kind=set_kind(len(before)),
                    delta=mean,
                    canonical=place.chunk.key,
                    content=place.chunk.content,
                    behind=sorted(before),
                    prefix=forming.prefix,
                    tenant=_set_owner(forming.tenant, forming.prefix, place.chunk.content, *(c for _, c in before)),
                    seconds=seconds * len(place.chunk.token_ids),
                )
        return True

    # -- prefix subsets and pairs --------------------------------------------------------------------------------------

    def prefix_subset_step(self, forming: OrbitForming, subset: Sequence[int], scratch: Scratch) -> Pieces[bool]:
        """Run some chunks of a set, in this order, and send off own patches not yet stored.

        Returns whether that took a forward: not if the last chunk's patch is stored, as the others' then are, and not
        if canonical KV or embeddings are gone.
        """
        order, tenant = [forming.chunks[i] for i in subset], forming.tenant
        keys = []
        for i, chunk in enumerate(order):
            behind = antecedent_key(forming.prefix, [other.key for other in order[:i]], ordered=True)
            keys.append(self.form.key(chunk.key, behind, PatchKind.own))
        if (yield from self._harvester.has_or_sent(keys[-1], tenant)):
            return False
        for chunk in order:
            if not (yield from self._may_condition(chunk, tenant)):
                return False
        ready = yield from self.ready(OrbitForming(forming.prefix, tuple(order), tenant, forming.opening))
        if ready is None:
            return False
        placed, seconds = yield from self._forward(forming.opening, ready.chunks, scratch)
        for i, key in enumerate(keys, 1):
            if not (yield from self._harvester.has_or_sent(key, tenant)):
                yield from self._keep_if_known(
                    placed[:i], PatchKind.own, forming.prefix, tenant, tenant, scratch.blocks, seconds
                )
        return True

    def pairs_step(
        self, forming: OrbitForming, batch: Sequence[int], limit: int, scratch: Scratch
    ) -> Pieces[tuple[int, int]]:
        """Run each chunk alone behind the first; send pair patches, and the first's behind nothing.

        The first one is computed once for all of them: their KV takes turns behind its own. Left out are those whose
        pair patch is stored, or whose canonical KV or embeddings are gone. If that leaves none, the first one is run
        alone where its patch behind nothing is not stored: no sum does without it. Returns how many were run, `limit`
        at most, and the tokens that this took.
        """
        prefix, opening, tenant = forming.prefix, forming.opening, forming.tenant
        first, *others = (forming.chunks[i] for i in batch)
        leading: OrbitChunk | None = None
        ran = tokens = 0
        for chunk in others:
            if ran == limit or not (yield from self._lacks(forming, first, chunk)):
                continue
            if not (yield from self._may_condition(first, tenant)):
                continue
            if not (yield from self._may_condition(chunk, tenant)):
                continue
            if ran:
                yield
            leading = leading or (yield from self._embedded(first, tenant))
            second = yield from self._embedded(chunk, tenant)
            if leading is None or second is None:
                continue
            sequence, placed = arrange(opening, (leading, second), scratch.blocks)
            start = placed[1].start if ran else 0
            seconds = yield from self._harvester.compute(sequence, scratch, start)
            alone = not ran and (yield from self._lacks(forming, first))
            for ends in [placed[:1], placed] if alone else [placed]:
                owner = _set_owner(tenant, prefix, *(place.chunk.content for place in ends))
                seconds_per_token = seconds / (len(sequence) - start)
                yield from self._keep_if_known(
                    ends, set_kind(len(ends) - 1), prefix, tenant, owner, scratch.blocks, seconds_per_token
                )
            ran, tokens = ran + 1, tokens + len(sequence) - start
        return (ran, tokens) if ran else (yield from self._leading_alone(forming, first, scratch))

    def _leading_alone(self, forming: OrbitForming, first: OrbitChunk, scratch: Scratch) -> Pieces[tuple[int, int]]:
        """Run a chunk alone, and send its patch behind nothing if that is not stored; returns as `pairs_step`."""
        prefix, opening, tenant = forming.prefix, forming.opening, forming.tenant
        if not ((yield from self._lacks(forming, first)) and (yield from self._may_condition(first, tenant))):
            return 0, 0
        leading = yield from self._embedded(first, tenant)
        if leading is None:
            return 0, 0
        placed, seconds_per_token = yield from self._forward(opening, [leading], scratch)
        owner = _set_owner(tenant, prefix, first.content)
        yield from self._keep_if_known(placed, set_kind(0), prefix, tenant, owner, scratch.blocks, seconds_per_token)
        return 1, len(opening) + len(first.token_ids)

    def _lacks(self, forming: OrbitForming, *chunks: OrbitChunk) -> Pieces[bool]:
        """True if the patch of the last chunk behind the others, in any order, is neither stored nor sent."""
        behind = antecedent_key(forming.prefix, [chunk.key for chunk in chunks[:-1]], ordered=False)
        key = self.form.key(chunks[-1].key, behind, set_kind(len(chunks) - 1))
        owner = _set_owner(forming.tenant, forming.prefix, *(chunk.content for chunk in chunks))
        return not (yield from self._harvester.has_or_sent(key, owner))

    def _may_condition(self, chunk: OrbitChunk, tenant: str) -> Pieces[bool]:
        """True if a chunk and its successors may be read: canonical KV neither evicted nor deleted."""
        return (yield from self._harvester.has("canonical", chunk.key, owner_of(tenant, chunk.content)))

    def _keep_if_known(
        self,
        placed: Sequence[Placed],
        kind: PatchKind,
        prefix: Sequence[int],
        tenant: str,
        owner: str,
        blocks: Sequence[int],
        seconds_per_token: float,
    ) -> Pieces[None]:
        """`keep_last`, unless the canonical KV is gone meanwhile; `owner`: the patch's."""
        chunk = placed[-1].chunk
        canonical = yield from self._harvester.stored_canonical(chunk.key, owner_of(tenant, chunk.content))
        if canonical is not None:
            self.keep_last(placed, canonical, kind, prefix, owner, blocks, seconds_per_token * len(chunk.token_ids))

    def keep_last(
        self,
        placed: Sequence[Placed],
        canonical: CanonicalRecord,
        kind: PatchKind,
        prefix: Sequence[int],
        tenant: str,
        blocks: Sequence[int],
        seconds: float = 0.0,
    ) -> None:
        """Send the patch of the last chunk that a forward has just run in `blocks`.

        `seconds`: what computing that chunk takes.
        """
        *before, last = placed
        behind = [(other.chunk.key, other.chunk.content) for other in before]
        self._harvester.submit(
            kind=kind,
            delta=self._deficit(last, canonical, blocks),
            canonical=last.chunk.key,
            content=last.chunk.content,
            behind=behind if kind is PatchKind.own else sorted(behind),
            prefix=prefix,
            tenant=tenant,
            seconds=seconds,
        )

    def _forward(
        self, opening: Sequence[int], order: Sequence[OrbitChunk], scratch: Scratch
    ) -> Pieces[tuple[list[Placed], float]]:
        """Run chunks behind one another; where each of them stands, and seconds per token."""
        sequence, placed = arrange(opening, order, scratch.blocks)
        seconds = yield from self._harvester.compute(sequence, scratch)
        return placed, seconds / len(sequence)

    def _deficit(self, place: Placed, canonical: CanonicalRecord, blocks: Sequence[int]) -> Tensor:
        """Deficit of a chunk in the last forward [layers, tokens, features], position-free."""
        kv = self.engine.read_kv(blocks, place.start, len(place.chunk.token_ids))
        return deficit_at(kv, canonical.kv, place.position, self.engine.layout)


def _set_owner(tenant: str, prefix: Sequence[int], *contents: str) -> str:
    """Owner of a patch behind a set.

    It has seen the prefix, with what the chat template writes around it, and these chunks, nothing else of the request;
    the prefix is the tenant's. (An own patch has also seen the tenant's text before the chunk: it is always the
    tenant's.)
    """
    return tenant if prefix else owner_of(tenant, *contents)
