"""Prefix hits: blocks that a link begins with, shared with prompts that begin alike.

| when                 | what                                                                                     |
|----------------------|------------------------------------------------------------------------------------------|
| a link is planned    | how far is its beginning known? nothing is loaded or encoded for chunks inside it        |
| it is to have blocks | the same again, and now these are referred to: in between some may have been evicted     |
| before it computes   | a block that is known in part, or in another frame, is copied to one of its own          |
| it has ended         | its own blocks are named: nothing is written into them any more; of a long prompt after  |
|                      | each forward                                                                             |

What earlier prompts computed serves all of their tenant whose mode is `auto` or `exact`; what they linked approximately
only those who ask for it in the same mode (`form_of`), while that operating point is not switched off.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from prefill_workers.block_index import BlockIndex, ChunkForm, Forms, PrefixMatch
from prefill_workers.compaction.plan import observed
from prefill_workers.engine.device_timer import DeviceSpan
from prefill_workers.modes import EXACT_POINTS, ModeKind, OperatingPoint, looks_up_patch, uses_library
from prefill_workers.prefix_digests import PrefixChain, prefix_chain
from prefill_workers.protocol import LinkRequest

if TYPE_CHECKING:
    from prefill_workers.engine.engine import PrefillEngine
    from prefill_workers.fidelity.monitor import Fidelity
    from prefill_workers.link.plan import ChunkPlan, LinkPlan


class PrefixHits:
    """Prefix hits of one engine's links, by the index of its blocks."""

    def __init__(self, engine: PrefillEngine, index: BlockIndex, fidelity: Fidelity) -> None:
        self._engine, self.index, self._fidelity = engine, index, fidelity

    @property
    def epoch(self) -> int:
        """See `BlockIndex`."""
        return self.index.epoch

    def look_up(self, request: LinkRequest, frame: int) -> tuple[PrefixChain | None, PrefixMatch]:
        """Digests of a prompt's beginnings, and the longest known; none in a mode without reuse.

        `frame`: position of its first token.
        """
        if not uses_library(request.mode):
            return None, PrefixMatch()
        chain = prefix_chain(request.tenant, request.token_ids, request.chunks, self.index.block_size)
        return chain, self.match(request, chain, frame)

    def match(self, request: LinkRequest, chain: PrefixChain, frame: int, limit: int | None = None) -> PrefixMatch:
        """The longest beginning that is known.

        `limit`: its tokens at most; None: all but those that the link's own forward must compute.
        """
        limit = max(0, len(request.token_ids) - observed(request)) if limit is None else limit
        return self.index.match(chain, frame, limit, self.allows(request))

    def allows(self, request: LinkRequest) -> Callable[[ChunkForm], bool]:
        """Tell of a chunk's form whether it may serve a request."""
        asked = asked_by(request)
        takes_patches = looks_up_patch(request.mode) and self._fidelity.allows(OperatingPoint.PATCHED)
        takes_exact = request.mode.kind in (ModeKind.AUTO, ModeKind.EXACT)

        def allows(form: ChunkForm) -> bool:
            if form.is_exact:
                return takes_exact
            if form.asked != asked or not self._fidelity.allows(form.point):
                return False
            return takes_patches or not takes_exact

        return allows

    def place(self, plan: LinkPlan) -> None:
        """Copy what a link begins with and cannot refer to into blocks of its own, once."""
        if plan.is_prefix_placed:
            return
        plan.is_prefix_placed = True
        if not self._apart(plan.prefix):
            return
        began = time.perf_counter()
        spans = self.copy(plan.prefix, plan.sequence.blocks)
        plan.took("prefix", 0.0 if spans else time.perf_counter() - began, spans)

    def copy(self, match: PrefixMatch, blocks: Sequence[int]) -> list[DeviceSpan]:
        """Copy what a sequence in `blocks` begins with and cannot refer to.

        Returns: what of it a device computes when this has returned; nothing on a CPU.
        """
        copied, size, spans = self._apart(match), self.index.block_size, list[DeviceSpan]()

        def shift(i: int) -> int:
            return match.frame - match.blocks[i].frame

        for turned, group in groupby(sorted(copied, key=shift), key=shift):
            indices = list(group)
            tokens = min((indices[-1] + 1) * size, match.tokens) - indices[-1] * size  # of the last
            span = self._engine.copy_kv(
                [match.blocks[i].block for i in indices],
                [blocks[i] for i in indices],
                (len(indices) - 1) * size + tokens,
                turned,
            )
            spans += [] if span is None else [span]
        return spans

    def _apart(self, match: PrefixMatch) -> list[int]:
        """Blocks of a beginning that a sequence needs copies of."""
        return [i for i in range(len(match.blocks)) if not match.is_shared(i, self.index.block_size)]

    def keep(self, plan: LinkPlan, tokens: int | None = None) -> None:
        """Name the blocks of a link that has ended, and still holds them.

        `tokens`: of one under way, those computed so far; up to a chunk that is not known to have come in well.
        """
        if plan.chain is None:
            return
        forms = forms_of(plan)
        if tokens is not None:
            tokens = min([tokens, *(chunk.span.start for chunk in plan.chunks if chunk.is_loading)])
        if plan.session is not None and plan.session.shareable_tokens < len(plan.sequence):
            tokens = min(plan.session.shareable_tokens, len(plan.sequence) if tokens is None else tokens)
        self.index.add(plan.sequence.blocks, plan.chain, forms, plan.prefix, plan.frame, plan.epoch, tokens)

    def distrust(self, plan: LinkPlan) -> None:
        """Forget a link's blocks: its logits are not finite."""
        for block in plan.sequence.blocks:
            self.index.drop(block)

    def clear(self) -> None:
        """Forget all blocks."""
        self.index.clear()


def coming(leader: LinkPlan, follower: LinkPlan) -> int:
    """Tokens with which a link may begin once another, which is under way, has ended."""
    if leader.chain is None or follower.chain is None:
        return 0
    tokens = min(leader.chain.common(follower.chain), len(follower.sequence) - 1)
    if leader.session is not None:
        tokens = min(tokens, leader.session.shareable_tokens)
    if asked_by(leader.request) != asked_by(follower.request):
        tokens = min([tokens, *follower.chain.starts[:1]])
    return follower.chain.outside_chunks(tokens)


def asked_by(request: LinkRequest) -> str:
    """Mode and text of a request, which decide how its chunks are linked approximately."""
    return f"{request.mode} {request.text}"


def forms_of(plan: LinkPlan) -> Forms:
    """Forms of a finished link's chunks."""
    return tuple(form_of(plan.request, chunk) for chunk in plan.chunks)


def form_of(request: LinkRequest, chunk: ChunkPlan) -> ChunkForm:
    """Form of a finished link's chunk.

    Modes that are baselines (`full-reuse`, `mpic`, `cacheblend`) keep to themselves, computed chunks included.
    """
    if chunk.form is not None:
        return chunk.form
    outcome = chunk.outcome
    if outcome.operating_point in EXACT_POINTS:
        is_exact = request.mode.kind in (ModeKind.AUTO, ModeKind.EXACT)
        return ChunkForm(OperatingPoint.RECOMPUTED, "" if is_exact else asked_by(request))
    return ChunkForm(outcome.operating_point, asked_by(request), f"{outcome.kind} {outcome.rank}")
