"""Numbers of a prefill loop at one moment, and how to wait until nothing is left."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prefill_workers.background.patch_precompiler import CompileStats

if TYPE_CHECKING:
    from prefill_workers.scheduler.prefill_loop import PrefillLoop


@dataclass(frozen=True)
class LoopStats:
    """Snapshot of the loop, for health, metrics and tests."""

    waiting: int
    running: int
    harvest: int
    blocks_free: int  # cached ones included
    blocks_cached: int  # without a lease, that prompts may begin with
    blocks_total: int
    leases: int
    forwards: int
    forwards_by_layer: int  # of these: beside loads that kept ahead of them
    forwards_partial: int  # besides these: to choose tokens by how far their KV deviates
    tokens_forwarded: int
    tokens_queued: int  # that waiting and running links have still to compute, of links not planned yet an estimate
    fixed_tokens: float  # that a forward costs besides, whatever it computes
    seconds_per_token: float | None  # that every token adds to a forward; None: not known yet
    leases_expired: int
    harvest_failures: int
    compiled: CompileStats


def drain(loop: PrefillLoop, seconds: float = 60.0) -> LoopStats:
    """Wait until nothing is queued, running or to be harvested (tests, orderly shutdown).

    Raises:
        TimeoutError: it still had work after `seconds`.
    """
    deadline = time.monotonic() + seconds
    while True:
        loop.hasten()
        stats = loop.stats()
        if not (stats.waiting or stats.running or stats.harvest):
            loop.hasten(0)
            return stats
        if time.monotonic() > deadline:
            raise TimeoutError(f"prefill loop still busy after {seconds} s: {stats}")
        time.sleep(0.01)
