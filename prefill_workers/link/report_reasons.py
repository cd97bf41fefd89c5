"""Reasons in a request's report: why a chunk was linked at its operating point."""

from __future__ import annotations

from prefill_workers.link.lookups import Found
from prefill_workers.link.plan import ChunkPlan, ChunkState
from prefill_workers.modes import Mode, OperatingPoint, operating_point


def expected(mode: Mode) -> OperatingPoint:
    """Operating point at which a mode links a chunk of which everything is stored."""
    return operating_point(mode, canonical=True, patch=True, computable=True)


def reason(mode: Mode, point: OperatingPoint, found: Found, chunk: ChunkPlan) -> str:
    """Reason for a chunk's operating point, given what was found for it."""
    if point is OperatingPoint.COMPOSED:
        return f"weighted sum of the stored pair patches behind {chunk.outcome.antecedents} antecedents"
    if point is OperatingPoint.PATCHED and found.patch is not None:
        return f"stored {found.patch.patch.kind} patch for these antecedents"
    if point is OperatingPoint.RELOCATED:
        return "mode full-reuse: canonical KV, no patch"
    if point is OperatingPoint.SELECTED:
        return selected(mode, chunk)
    if chunk.is_barred:
        return f"operating point {chunk.ruled_out} is switched off: computed in context"
    if mode in (Mode.EXACT, Mode.OFF):
        return f"mode {mode}: computed in context"
    if found.is_unfit:
        return "what is stored of it does not fit its tokens"
    if found.patch is not None:
        return "a patch is stored, but no canonical KV could be loaded"
    if found.is_unsure:
        return "what is stored of it could not be loaded in time"
    if found.canonical is not None:
        return "canonical KV is stored, but no embeddings for the tokens to compute"
    if chunk.ruled_out is not None:
        return f"no patch stored for these antecedents, and operating point {chunk.ruled_out} is switched off"
    return "no patch stored for these antecedents" if mode == Mode.AUTO else "no canonical KV stored"


def selected(mode: Mode, chunk: ChunkPlan) -> str:
    """Reason for a chunk of which a mode selects tokens."""
    if chunk.state is ChunkState.TO_WEIGH:
        return f"mode {mode}: deviations are to be measured"
    return f"mode {mode}: {sum(map(len, chunk.selected))} of {len(chunk.span)} tokens computed in context"
