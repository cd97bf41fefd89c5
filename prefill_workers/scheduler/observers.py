"""Observers: tokens of a forward whose attention tells what is important to a prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from prefill_workers.engine.batch import Observing
from prefill_workers.sequence import Run

if TYPE_CHECKING:
    from prefill_workers.scheduler.link_job import LinkJob


def observers(work: Sequence[tuple[LinkJob, Sequence[Run]]], ending: Sequence[int]) -> Iterator[Observing]:
    """Tokens to observe in a forward over `work`, of compacted links that it ends."""
    at, firsts = 0, []
    for _, runs in work:
        firsts.append(at)
        at += sum(map(len, runs))
    for i in ending:
        job, runs = work[i]
        if job.compaction is None:
            continue
        at, since = firsts[i], 0
        if job.compaction.observers is not None:
            since = len(job.plan.sequence) - job.compaction.observers
        for run in runs:
            skipped = min(len(run), max(0, since - run.start))
            if skipped < len(run):
                tokens = Run(at + skipped, at + len(run))
                yield Observing(job.name, tokens, run.start + skipped, job.plan.sequence.blocks)
            at += len(run)
