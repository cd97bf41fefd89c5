"""The link in a request's report."""

from __future__ import annotations

from dataclasses import asdict

from prefill_workers.protocol import Compaction, LinkResult
from serving.frontend.report import SURVIVORS_KNOW, ChunkReport, KVReport, RequestTrace, SessionReport


def note_link(
    trace: RequestTrace,
    prompt_tokens: int,
    result: LinkResult,
    compaction: Compaction,
    encoded: int,
    vision_ms: float,
    whole_ms: float,
) -> None:
    """Note in a request's report how it was linked.

    `encoded`: vision tokens; `whole_ms` with what encoding took.
    """
    report = trace.report
    report.chunks = [
        ChunkReport(
            index=i,
            tokens=outcome.tokens,
            operating_point=outcome.operating_point,
            antecedents=outcome.antecedents,
            reason=outcome.reason,
            rank=outcome.rank,
        )
        for i, outcome in enumerate(result.chunks)
    ]
    if trace.costs:
        report.chunks = [costs.of(chunk) for costs, chunk in zip(trace.costs, report.chunks, strict=True)]
    if result.session is not None and trace.session is not None:
        note = SURVIVORS_KNOW if result.session.survived else None
        report.session = SessionReport(id=trace.session.id, **asdict(result.session), note=note)
    report.prompt_tokens = prompt_tokens
    report.tokens_reused = result.tokens_reused
    report.tokens_computed = result.tokens_computed
    report.prefix_tokens_reused = result.prefix_tokens_reused
    report.vision_tokens_encoded = encoded
    if (kv := result.kv) is not None:
        policy = compaction.policy if kv.kept < kv.tokens else None
        report.kv = KVReport(
            tokens=kv.tokens, kept=kv.kept, bytes_handed_off=kv.bytes, policy=policy, window=compaction.window
        )
    report.stages_ms |= result.stages_ms
    report.stages_ms["link"] = whole_ms - vision_ms
    if encoded:
        report.stages_ms["vision"] = vision_ms
