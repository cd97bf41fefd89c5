"""Settling of a chunk: its operating point, by what was found of it once its load has ended."""

from __future__ import annotations

import logging
from dataclasses import replace

from torch import Tensor

from kvstore.errors import ShapeMismatch
from kvstore.operator.basis import SharedBasis
from kvstore.operator.layout import Layout
from prefill_workers.link import report_reasons as reasons
from prefill_workers.link.compose import KnownWeights, weighted_sum
from prefill_workers.link.lookups import Found
from prefill_workers.link.plan import ChunkPlan
from prefill_workers.link.token_selection import selected_by_place
from prefill_workers.modes import Mode, OperatingPoint, looks_up_patch, operating_point
from prefill_workers.protocol import LinkRequest

logger = logging.getLogger(__name__)


class ChunkSettler:
    """Settles the chunks of one linker's plans.

    Args:
        layout: of the engine's KV.
        basis: that patches are stored in, if any.
        weights: of sums of pair patches, as earlier links have measured them.
    """

    def __init__(self, layout: Layout, basis: SharedBasis | None, weights: KnownWeights) -> None:
        self._layout, self._basis, self._weights = layout, basis, weights
        self._told_of_unfit = False

    def settle(self, chunk: ChunkPlan, request: LinkRequest, found: Found) -> Found:
        """Fix a chunk's operating point by what was found for it.

        Embeddings that came with the request go first.

        Returns what was found, with the patch that its parts sum up to if their weights are known.
        """
        found = self._fitting(chunk, found)
        chunk.stored = found.stored
        mode = Mode.EXACT if chunk.is_barred else request.mode
        weights = self._weights.get(request.tenant, chunk.keys.own_patch) if found.parts else None
        unweighed = bool(found.parts) and weights is None
        fresh = chunk.embeddings is not None
        if not fresh:
            chunk.embeddings = found.embeddings
        point = operating_point(
            mode,
            canonical=found.canonical is not None,
            patch=found.patch is not None and not (unweighed and chunk.is_missing_embeddings),
            computable=not (fresh or chunk.is_missing_embeddings),
            parts=bool(found.parts),
        )
        patch = found.patch.patch if found.patch and point is OperatingPoint.PATCHED else None
        to_weigh: Found | None = None
        if point is OperatingPoint.COMPOSED and weights is None:
            to_weigh = found
        elif point is OperatingPoint.SELECTED and mode.needs_partial_forward:
            to_weigh = Found(found.canonical)
        elif point is OperatingPoint.SELECTED:
            chunk.selected = selected_by_place(mode, chunk.span.start, chunk.span.stop)
        chunk.settle(point, to_weigh)
        chunk.outcome = replace(
            chunk.outcome,
            operating_point=point,
            reason=reasons.reason(mode, point, found, chunk),
            rank=patch.rank if patch else None,
            kind=patch.kind if patch else None,
            missed=looks_up_patch(mode) and found.patch is None and not found.is_unsure,
            sums_off=chunk.ruled_out is OperatingPoint.COMPOSED,
        )
        return found if weights is None or point is not OperatingPoint.COMPOSED else summed(chunk, found, weights)

    def _fitting(self, chunk: ChunkPlan, found: Found) -> Found:
        """Drop what was found but does not fit the chunk.

        Names tell models and contents apart, not the versions of what cuts an image into tokens.
        """
        try:
            if found.canonical is not None:
                found.check(len(chunk.span), self._layout, self._basis)
            if found.embeddings is not None and len(found.embeddings) != chunk.span.embedded:
                raise ShapeMismatch(f"{len(found.embeddings)} embeddings for {chunk.span.embedded} placeholders")
        except ShapeMismatch as error:
            if not self._told_of_unfit:
                self._told_of_unfit = True
                logger.warning(
                    "what is stored of chunk %s does not fit it: %s. Such chunks are computed and stored again; "
                    "was vLLM or transformers replaced? This is said once",
                    chunk.span.content[:16],
                    error,
                )
            chunk.is_unfit = True
            return Found(is_unsure=found.is_unsure, is_unfit=True)
        return found


def summed(chunk: ChunkPlan, found: Found, weights: Tensor) -> Found:
    """Replace the parts that were found by the patch that they sum up to, also in the outcome."""
    assert found.patch is not None
    base, *pairs = found.parts
    patch = weighted_sum(base, pairs, weights[:, None])
    chunk.outcome = replace(chunk.outcome, rank=patch.rank, kind=patch.kind)
    return replace(found, patch=replace(found.patch, patch=patch))
