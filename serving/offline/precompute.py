"""Offline caching job: a manifest's images, encoded and stored (`orbitserve precompute`).

    Manifest ── one read task ──▶ entries, a few per block ── Ray Data ──▶ PrecomputeWorker, N of them ──▶ Ledger

A job is resumed by running it again: workers skip what the library holds. A worker that dies is started again and goes
on where it was; an entry that no worker survives is reported and left, as bad ones are.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TextIO

import pyarrow as pa
import ray
from ray.data import ActorPoolStrategy, DataContext, Datasource
from ray.data.block import BlockMetadata
from ray.data.datasource import ReadTask
from ray.exceptions import RayError
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from kvstore.private_files import private_opener
from serving.config import OrbitServeConfig
from serving.deploy.ray_cluster import ray_cluster
from serving.offline.precompute_ledger import Ledger, Outcome
from serving.offline.precompute_manifest import ANYBODY, ENTRY_SCHEMA, Entry, Manifest, Owners, StorageOptions, to_table
from serving.offline.precompute_worker import PrecomputeWorker
from serving.settings import reserved_gpus

_ENTRY_BYTES = 128  # of an entry with one path, in Arrow: sizes blocks
_SHOWN_FAILURES = 10
_TASKS_PER_WORKER = 4  # at least, so that workers share also a short manifest


class PrecomputeError(RuntimeError):
    """The job cannot run at all; the message says why."""


@dataclass
class Summary:
    """Counts of a job.

    `seconds` are from the first entry's start to the last one's end: without engines' start.
    """

    statuses: Counter[str] = field(default_factory=Counter)  # stored, present, failed
    images: int = 0
    embeddings: int = 0
    canonicals: int = 0
    patches: int = 0
    tokens: int = 0
    began: float = float("inf")
    ended: float = 0.0
    failures: list[Outcome] = field(default_factory=list)  # the first few

    def add(self, outcome: Outcome) -> None:
        """Count one entry."""
        self.statuses[outcome.status] += 1
        for name in ("images", "embeddings", "canonicals", "patches", "tokens"):
            setattr(self, name, getattr(self, name) + getattr(outcome, name))
        if outcome.ended:
            self.began, self.ended = min(self.began, outcome.began), max(self.ended, outcome.ended)
        if outcome.status == "failed" and len(self.failures) < _SHOWN_FAILURES:
            self.failures.append(outcome)

    @property
    def entries(self) -> int:
        return self.statuses.total()

    @property
    def seconds(self) -> float:
        return max(0.0, self.ended - self.began)

    @property
    def chunks_per_second(self) -> float:
        """Chunks whose canonical was computed, per second of work."""
        return self.canonicals / self.seconds if self.seconds else 0.0


class ManifestSource(Datasource):
    """A manifest as Ray Data reads it: one task, pulled as fast as workers take entries."""

    def __init__(self, url: str, storage_options: StorageOptions, entries: int, block: int, owners: Owners) -> None:
        """`entries`: how many to read; `block`: entries yielded together."""
        super().__init__()
        self._entries = entries
        self._read = partial(entry_blocks, url, storage_options, entries, block, owners)

    def estimate_inmemory_data_size(self) -> int | None:
        """Unknown: inline images may be of any size."""
        return None

    def get_read_tasks(self, parallelism: int, *_: object, **__: object) -> list[ReadTask]:
        """One task, whatever the parallelism: parsing entries is nothing beside computing them."""
        metadata = BlockMetadata(num_rows=self._entries, size_bytes=None, input_files=None, exec_stats=None)
        return [ReadTask(self._read, metadata, schema=ENTRY_SCHEMA)]


def entry_blocks(
    url: str, storage_options: StorageOptions, entries: int, block: int, owners: Owners = ANYBODY
) -> Iterator[pa.Table]:
    """The first `entries` entries of a manifest as tables of `ENTRY_SCHEMA`, `block` in each."""
    waiting: list[Entry] = []
    for entry in Manifest(url, storage_options, owners).entries(entries):
        waiting.append(entry)
        if len(waiting) == block:
            yield to_table(waiting)
            waiting = []
    if waiting:
        yield to_table(waiting)


def outcomes(config: OrbitServeConfig, manifest: Manifest, entries: int) -> Iterator[Outcome]:
    """Run the job on the first `entries` entries.

    Yields every entry's outcome, in the order in which they end.

    Joins a Ray cluster that is already there (RAY_ADDRESS, or one started on this machine), else starts one.

    Raises:
        PrecomputeError: the library keeps nothing, or no worker could be started.
    """
    if config.library.directory is None and config.library.url is None:
        raise PrecomputeError("the library has neither a directory nor a url: nothing would be kept")
    with ray_cluster():
        try:
            yield from _run(config, manifest, entries)
        except RayError as error:
            raise PrecomputeError(_last_line(error)) from error


def _run(config: OrbitServeConfig, manifest: Manifest, entries: int) -> Iterator[Outcome]:
    settings = config.precompute
    batch = max(1, min(settings.entries_per_task, entries // (_TASKS_PER_WORKER * settings.workers)))
    context = DataContext.get_current()
    context.enable_progress_bars = context.print_on_execution_start = False
    context.target_max_block_size = _ENTRY_BYTES * batch
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)

    ledger = ray.remote(Ledger).options(num_cpus=0).remote(entries)
    cpus = int(ray.cluster_resources().get("CPU", 1))
    here = {"ray.io/node-id": ray.get_runtime_context().get_node_id()}  # where a local manifest lies
    source = ManifestSource(manifest.url, settings.storage_options, entries, batch, manifest.owners)
    dataset = ray.data.read_datasource(source, override_num_blocks=1, num_cpus=0, label_selector=here).map_batches(
        PrecomputeWorker,
        fn_constructor_args=(config, settings.threads or max(1, cpus // settings.workers), ledger),
        compute=ActorPoolStrategy(
            size=settings.workers,
            max_tasks_in_flight_per_actor=3,
            max_concurrent_calls_per_actor=2,
            enable_true_multi_threading=True,
        ),
        batch_size=batch,
        batch_format="pyarrow",
        num_cpus=settings.num_cpus,
        num_gpus=reserved_gpus(settings.num_gpus, config.prefill.ranks),
    )
    for _ in dataset.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0):
        yield from ray.get(ledger.drain.remote())
    yield from ray.get(ledger.drain.remote())


def _last_line(error: BaseException) -> str:
    """The cause that a Ray error carries, without the remote traceback."""
    return next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)


# -- for people -------------------------------------------------------------------------------------------------------


def precompute(
    config: OrbitServeConfig, manifest: Manifest, limit: int | None, failures: Path | None, console: Console
) -> bool:
    """Run the job with a progress bar and print its summary.

    Returns whether every entry is stored.

    Args:
        limit: only so many entries, from the first; None: all.
        failures: JSONL file that gets a line per entry that failed, while the job runs.

    Raises:
        ManifestError: the manifest cannot be read. PrecomputeError: see `outcomes`. OSError: `failures` cannot be
            written.
    """
    entries = manifest.count(limit)
    summary = Summary()
    with ExitStack() as stack:
        log = stack.enter_context(open(failures, "w", opener=private_opener)) if failures is not None else None
        progress = stack.enter_context(
            Progress(
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                _Rate(),
                TextColumn("{task.fields[failed]} failed"),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=console,
            )
        )
        workers = config.precompute.workers
        bar = progress.add_task(f"starting {workers} worker{'s'[: workers > 1]}", start=False, total=entries, failed=0)
        try:
            for outcome in outcomes(config, manifest, entries):
                if not summary.entries:
                    progress.start_task(bar)
                summary.add(outcome)
                progress.update(bar, advance=1, description="precomputing", failed=summary.statuses["failed"])
                if log is not None and outcome.status == "failed":
                    _log(log, outcome)
        except KeyboardInterrupt:
            progress.update(bar, description="stopped; run it again to go on")
    show(summary, entries, failures, console)
    return summary.statuses["failed"] == 0 and summary.entries == entries


def _log(file: TextIO, outcome: Outcome) -> None:
    file.write(json.dumps({"number": outcome.number, "entry": outcome.name, "reason": outcome.reason}) + "\n")
    file.flush()


def show(summary: Summary, entries: int, failures: Path | None, console: Console) -> None:
    """Print the summary and the first failures."""
    counts = summary.statuses
    table = Table(box=None, show_header=False, padding=(0, 2))
    for name, value in {
        "entries": f"{summary.entries} of {entries}: {counts['stored']} stored now, {counts['present']} stored before, "
        f"{counts['failed']} failed",
        "images": str(summary.images),
        "computed": f"{summary.embeddings} embeddings, {summary.canonicals} canonicals, {summary.patches} patches; "
        f"{summary.tokens} tokens",
        "time": f"{summary.seconds:.1f} s, {summary.chunks_per_second:.2f} chunks/s",
    }.items():
        table.add_row(name, value)
    console.print(table)
    for outcome in summary.failures:
        console.print(f"  [red]failed[/red] {escape(outcome.name)}: {escape(outcome.reason or '')}", highlight=False)
    if counts["failed"] > len(summary.failures):
        where = f"see {failures}" if failures is not None else "pass --failures FILE for all of them"
        console.print(f"  ... and {counts['failed'] - len(summary.failures)} more; {where}")


class _Rate(ProgressColumn):
    """Entries per second, lately."""

    def render(self, task: Task) -> Text:
        return Text("" if task.speed is None else f"{task.speed:.1f}/s")


def dry_run(manifest: Manifest, limit: int | None, console: Console) -> bool:
    """Read the manifest alone and print what it asks for.

    Returns whether all entries are well-formed.
    """
    entries, images, bad = 0, 0, 0
    kinds: Counter[str] = Counter()
    tenants: Counter[str] = Counter()
    for entry in manifest.entries(limit):
        entries += 1
        if entry.error is not None:
            bad += 1
            if bad <= _SHOWN_FAILURES:
                console.print(f"  [red]bad entry[/red] {escape(entry.name)}: {escape(entry.error)}", highlight=False)
            continue
        images += len(entry.images)
        kinds[entry.patches] += 1
        tenants[entry.tenant] += 1
    console.print(f"{entries} entries, {bad} of them bad; {images} images; nothing was computed", highlight=False)
    console.print(f"patches: {_listed(kinds)}; tenants: {escape(_listed(tenants))}", highlight=False)
    return not bad


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} ({count})" for name, count in sorted(counts.items())) or "none"
