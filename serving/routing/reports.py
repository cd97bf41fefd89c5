"""Load reports of prefill and decode replicas to the routers (see `routing`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import count
from typing import TYPE_CHECKING, Any

from ray.serve.config import RequestRouterConfig

from serving.routing.decode_policy import DecodeReport
from serving.routing.prefill_policy import PrefillReport, mark_of, session_mark

if TYPE_CHECKING:
    from torch import Tensor

    from decode_workers.engine import DecodeEngine
    from kvstore.library import Library
    from prefill_workers.scheduler.prefill_loop import PrefillLoop
    from prefill_workers.sessions.store import SessionStore
    from serving.settings import RoutingSettings


def router_config(role: str, settings: RoutingSettings) -> RequestRouterConfig:
    """Configuration by which Ray Serve routes to the deployment of a role."""
    period = settings.report_period_s
    if not settings.enabled:
        return RequestRouterConfig(request_routing_stats_period_s=period)
    return RequestRouterConfig(
        request_router_class="serving.routing.ray_router.PolicyRouter",
        request_router_kwargs={"role": role, "report_period_s": period},
        request_routing_stats_period_s=period,
    )


class PrefillReporter:
    """Reports of a prefill replica.

    Args:
        bytes_per_token: of canonical KV.
        hot_chunks: chunks in memory that a report names at most, beginnings of prompts in blocks, and sessions.
        on_device: see `PrefillEngine.on_device`.
    """

    def __init__(
        self,
        loop: PrefillLoop,
        library: Library,
        bytes_per_token: int,
        hot_chunks: int,
        sessions: SessionStore | None = None,
        on_device: Callable[[Sequence[Tensor]], tuple[int, list[bool]] | None] = lambda chunks: None,
    ) -> None:
        self._loop, self._library, self._sessions, self._on_device = loop, library, sessions, on_device
        self._bytes_per_token, self._hot_chunks = bytes_per_token, hot_chunks
        self._numbers = count()
        self._versions, self._hot = (-1, -1), b""
        self._device: bytes | None = None
        self._begun_version, self._begun = -1, b""

    def stats(self) -> dict[str, Any]:
        """The next report."""
        loop, library = self._loop.stats(), self._library.stats()
        copies = self._on_device([])
        versions = self._library.hot_version, copies[0] if copies else 0
        if versions != self._versions:
            self._versions = versions
            self._hot, self._device = self._in_memory()
        begun_version = self._loop.marks_version
        if begun_version != self._begun_version:
            self._begun_version, self._begun = begun_version, self._loop.marks(self._hot_chunks)
        report = PrefillReport(
            queued_tokens=loop.tokens_queued,
            requests=loop.waiting + loop.running,
            fixed_tokens=loop.fixed_tokens,
            seconds_per_token=loop.seconds_per_token,
            bytes_per_second=library.loaded_bytes / library.load_ms * 1e3 if library.loaded_bytes else None,
            bytes_per_token=self._bytes_per_token,
            hot=self._hot,
            hot_version=versions[0],
            begun=self._begun,
            begun_version=begun_version,
            on_device=self._device,
            device_version=versions[1],
        )
        return {**asdict(report), "sequence": next(self._numbers)}

    def _in_memory(self) -> tuple[bytes, bytes | None]:
        """Marks of what memory holds, and of the chunks that a GPU has copies of."""
        records = self._library.hot(self._hot_chunks)
        served = [] if self._sessions is None else self._sessions.names(self._hot_chunks)
        chunks = dict.fromkeys(mark_of(record.content) for record in records)
        hot = b"".join([*chunks, *(session_mark(*name) for name in served)])
        copies = self._on_device([record.kv for record in records])
        if copies is None:
            return hot, None
        there = (record for record, is_there in zip(records, copies[1], strict=True) if is_there)
        return hot, b"".join(dict.fromkeys(mark_of(record.content) for record in there))


class DecodeReporter:
    """Reports of a decode replica."""

    def __init__(self, engine: DecodeEngine, max_sequences: int) -> None:
        self._engine, self._max_sequences = engine, max_sequences
        self._numbers = count()

    def stats(self) -> dict[str, Any]:
        """The next report."""
        return {**asdict(self.report()), "sequence": next(self._numbers)}

    def report(self) -> DecodeReport:
        """The report of this moment."""
        stats, alive = self._engine.stats(), self._engine.is_alive
        return DecodeReport(  # a dead engine has no load, but no room either
            blocks=stats.blocks_reserved + stats.blocks_awaited if alive else stats.blocks_total,
            blocks_total=stats.blocks_total,
            sequences=stats.running + stats.waiting if alive else self._max_sequences,
            max_sequences=self._max_sequences,
            block_size=self._engine.admission.block_size,
            max_model_len=self._engine.max_model_len,
        )
