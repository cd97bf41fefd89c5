"""A worker of the offline caching job: manifest entries in, one outcome per entry out.

prepared     images read, named and rendered to prompts, see `precompute_prepare`
claimed      what another worker computes just now, this one waits for, see `precompute_ledger`
computed     what is missing, see `prefill_workers.patches.offline`
reported     an entry is done when the farthest tier holds all its records
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Collection, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa
import ray

from infra.vllm_env import vllm_environment
from serving.config import OrbitServeConfig
from serving.engine_spec import prefill_spec
from serving.offline.precompute_ledger import Outcome, Status
from serving.offline.precompute_manifest import Entry, from_table

if TYPE_CHECKING:
    from prefill_workers.patches.offline import Name, OfflineTask, Work

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

MAX_ATTEMPTS = 3  # of an entry on which workers die: once beside others, then alone in its process
_LOOKS = 16  # records looked for at once: behind a URL each takes a round trip


@dataclass(frozen=True)
class _Prepared:
    """An entry with its task.

    Without one, either there is a reason why, or everything is stored.
    """

    entry: Entry
    began: float
    task: OfflineTask | None = None
    reason: str | None = None

    def outcome(self, status: Status, **fields: Any) -> Outcome:
        entry = self.entry
        return Outcome(
            entry.number, entry.name, status, images=len(entry.images), began=self.began, ended=time.time(), **fields
        )


class PrecomputeWorker:
    """Worker of the job, which Ray Data keeps in its actors.

    Two calls at a time, so that one prepares while one computes.
    """

    def __init__(self, config: OrbitServeConfig, threads: int, ledger: Any) -> None:
        os.environ.update(vllm_environment(kv_cache_gib=config.prefill.kv_cache_gib, threads=threads))
        from kvstore.library import Library
        from prefill_workers.engine.engine import PrefillEngine
        from prefill_workers.engine.self_check import require_self_check
        from prefill_workers.patches.offline import OfflineWorker
        from prefill_workers.patches.patch_compiler import load_form
        from serving.offline.precompute_prepare import Preparer

        self._config = config
        engine = PrefillEngine(prefill_spec(config, hand_off=False))
        if config.prefill.self_check:
            require_self_check(engine)
        # No write may be dropped, and nothing stored be taken for missing, because a tier failed a few times before:
        # nobody waits here. The flush after every group bounds the queue. And what serving keeps at hand in the
        # cluster's memory must not make way for what nobody has asked for yet.
        ours = {
            "write_queue_items": 1 << 20,
            "write_queue_bytes": 1 << 50,
            "object_store_bytes": 0,
            "tier_failures": 1 << 30,
        }
        self._library = Library(config.library.model_copy(update=ours), engine.fingerprint)
        form = load_form(config.patch, self._library)
        settings = config.prefill
        self._offline = OfflineWorker(engine, self._library, form, settings.max_batch_tokens, settings.free)
        self._engine_lock = threading.Lock()
        self._company = Company()
        self._look = ThreadPoolExecutor(_LOOKS, thread_name_prefix="look")
        self._events = asyncio.new_event_loop()
        threading.Thread(target=self._events.run_forever, name="prepare", daemon=True).start()
        self._preparer = self._await(Preparer.create(config, self._offline, self._is_stored))
        self._ledger, self._name = ledger, ray.get_runtime_context().get_actor_id()
        ray.get(ledger.restarted.remote(self._name))

    def __call__(self, table: pa.Table) -> Iterator[pa.Table]:
        """Settle a batch of entries and write their outcomes to the ledger.

        Yields their numbers, group by group.

        Ray Data runs a batch again when a worker dies on it. What the ledger has is not settled again.
        """
        entries = from_table(table)
        begun = ray.get(self._ledger.attempts.remote([entry.number for entry in entries]))
        attempts = {entry.number: times for entry, times in zip(entries, begun, strict=True) if times}
        unsettled = [entry for entry, times in zip(entries, begun, strict=True) if times is not None]
        for group in groups(unsettled, self._config.precompute.images_in_memory, alone=attempts):
            with self._company.keep(alone=group[0].number in attempts):
                self._end(group, attempts.get(group[0].number, 0))
            yield pa.table({"number": [entry.number for entry in group]})

    def _end(self, group: Sequence[Entry], attempts: int) -> None:
        """Tell the ledger what becomes of a group that was begun in vain so often."""
        if attempts < MAX_ATTEMPTS:
            # before anything can kill this process
            ray.get(self._ledger.begin.remote([entry.number for entry in group]))
            outcomes = self._settle(group)
        else:
            reason = f"the worker died on it, {MAX_ATTEMPTS} times"
            outcomes = [_Prepared(entry, time.time()).outcome("failed", reason=reason) for entry in group]
        ray.get(self._ledger.end.remote(outcomes))

    def _settle(self, group: Sequence[Entry]) -> list[Outcome]:
        prepared = self._await(self._prepare_all(group))
        outcomes = [
            item.outcome("failed", reason=item.reason) if item.reason else item.outcome("present")
            for item in prepared
            if item.task is None
        ]
        waiting = [item for item in prepared if item.task is not None]
        owner = f"{self._name}/{threading.get_ident()}"
        while waiting:
            records = [[key for _, key in item.task.wanted] for item in waiting if item.task]
            taken = ray.get(self._ledger.take.remote(owner, records))
            try:
                outcomes += self._complete([waiting[i] for i in taken])
            finally:
                self._ledger.release.remote(owner)
            waiting = [item for i, item in enumerate(waiting) if i not in taken]
        return outcomes

    async def _prepare_all(self, group: Sequence[Entry]) -> list[_Prepared]:
        return await asyncio.gather(*(self._prepare(entry) for entry in group))

    async def _prepare(self, entry: Entry) -> _Prepared:
        from serving.offline.precompute_prepare import EntryError

        began = time.time()
        try:
            return _Prepared(entry, began, await self._preparer.task(entry))
        except EntryError as error:
            return _Prepared(entry, began, reason=str(error))
        except Exception as error:  # a bad entry never stops the job
            logger.exception("entry %s could not be prepared", entry.name)
            return _Prepared(entry, began, reason=f"{type(error).__name__}: {error}")

    def _complete(self, items: Sequence[_Prepared]) -> list[Outcome]:
        tasks = [item.task for item in items if item.task is not None]
        for task, missing in zip(tasks, self._missing(tasks), strict=True):
            task.missing = missing
        lacking = [task for task in tasks if task.missing]
        results = iter(self._compute(lacking))
        self._library.flush()
        left = iter(self._missing(lacking))
        return [
            self._outcome(item, next(results), len(next(left))) if task.missing else item.outcome("present")
            for item, task in zip(items, tasks, strict=True)
        ]

    def _outcome(self, item: _Prepared, result: Work | Exception, left: int) -> Outcome:
        if isinstance(result, Exception):
            return item.outcome("failed", reason=f"{type(result).__name__}: {result}")
        if left:
            reason = f"{left} records could not be stored: is a tier of the library full or down?"
            return item.outcome("failed", reason=reason, **asdict(result))
        return item.outcome("stored", **asdict(result))

    def _missing(self, tasks: Sequence[OfflineTask]) -> list[set[Name]]:
        """Of every task's records, those that the farthest tier lacks."""
        names = [(kind, key, task.request.tenant) for task in tasks for kind, key in task.wanted]
        found = self._look.map(lambda name: self._library.persisted(*name), names)
        missing = {(kind, key) for (kind, key, _), there in zip(names, found, strict=True) if not there}
        return [missing.intersection(task.wanted) for task in tasks]

    def _is_stored(self, names: Sequence[Name], tenant: str) -> bool:
        return all(self._look.map(lambda name: self._library.persisted(name[0], name[1], tenant), names))

    def _await(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._events).result()

    def _compute(self, tasks: Sequence[OfflineTask]) -> Sequence[Work | Exception]:
        """Compute together what can be; if that fails, one by one, so that a task fails alone."""
        if not tasks:
            return []
        try:
            with self._engine_lock:
                return self._offline.compute(tasks)
        except Exception as error:
            logger.exception("%d tasks failed together", len(tasks))
            if len(tasks) == 1:
                return [error]
        return [result for task in tasks for result in self._compute([task])]


def groups(entries: Iterable[Entry], images: int, alone: Collection[int] = ()) -> Iterator[list[Entry]]:
    """The entries in order, in groups of at most so many images together.

    An entry with more images, and one whose number is in `alone`, is a group of its own.
    """
    group: list[Entry] = []
    count = 0
    for entry in entries:
        lone = entry.number in alone
        if group and (lone or count + len(entry.images) > images):
            yield group
            group, count = [], 0
        group.append(entry)
        count += len(entry.images)
        if lone:
            yield group
            group, count = [], 0
    if group:
        yield group


class Company:
    """Calls that run in this process at once.

    One that is to be alone waits for the others, and they for it.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running = 0
        self._alone = 0  # run alone, or wait for that

    @contextmanager
    def keep(self, *, alone: bool) -> Iterator[None]:
        """Run the block beside others, or alone."""
        with self._changed:
            self._alone += alone
            self._changed.wait_for(lambda: not (self._running if alone else self._alone))
            self._running += 1
        try:
            yield
        finally:
            with self._changed:
                self._running -= 1
                self._alone -= alone
                self._changed.notify_all()
