"""Offline patches for a known trace (`orbitserve compile-trace`).

    access log ──▶ trace ──▶ plans: sets, pairs ──▶ the one that saves more ──▶ PathWorker ──▶ library

The trace tells what to compile (`compile_plan`) and what a token costs; chunks come from the library. Everything up to
the plan runs without an engine. Run again, it computes nothing that is stored, and its seconds go into the rest.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from infra.vllm_env import vllm_environment
from kvstore.catalog.index import prefix_key
from serving.access_log import TEXT, BadLog, LoggedChunk, LoggedRequest, expanded, log_files, read
from serving.api.prefix import split_tools, with_tools_of_requests
from serving.config import OrbitServeConfig
from serving.offline.compile_plan import Kind, Plan, Terms, Trace, Wanted, plan, trace_of
from serving.offline.compile_report import Report, show_outcome, show_plan
from serving.offline.knapsack import UNBOUNDED, Cost
from serving.output_files import unwritable

if TYPE_CHECKING:
    from kvstore.library import Library
    from kvstore.operator.layout import Layout
    from prefill_workers.patches.offline_paths import ChunkShape, Compiled, PathWorker
    from prefill_workers.patches.offline_paths import Path as PatchPath
    from serving.placement.orderer import LinkCosts

_LOOKS = 16  # chunks that are looked for at once
_PATHS_PER_FLUSH = 32  # bounds what waits to be written


class CompileTraceError(RuntimeError):
    """The job cannot run at all; the message says why."""


@dataclass(frozen=True)
class Choice:
    """Request of a run: kind of patches, budget, fixed prefixes.

    `kind` None: whichever saves more. `prefixes`: texts of fixed prefixes.
    """

    kind: Kind | None = None
    budget: Cost = UNBOUNDED
    min_uses: int = 2
    prefixes: Sequence[str] = ()


class Planner:
    """Plans of what to compile for a trace.

    Needs the model's configuration, but no engine.

    Needs the model's configuration, but no engine.

    Raises:
        CompileTraceError: the library keeps nothing, or lacks the shared basis that the settings name.
    """

    def __init__(self, config: OrbitServeConfig, choice: Choice) -> None:
        if config.library.directory is None and config.library.url is None:
            raise CompileTraceError("the library has neither a directory nor a url: it holds nothing to compile from")
        from kvstore.library import Library
        from prefill_workers.engine.fingerprint import fingerprint
        from prefill_workers.patches.patch_compiler import UnknownBasis, load_form
        from serving.engine_spec import front_end_config
        from serving.placement.orderer import LinkCosts

        self.config, self.choice = config, choice
        self.model = front_end_config(config.model, processor_cache_gib=0).model_config
        # No write may be dropped: flushes bound the queue. What serving keeps in the cluster's memory is not ours.
        ours = {"write_queue_items": 1 << 20, "write_queue_bytes": 1 << 50, "object_store_bytes": 0}
        model = fingerprint(config.model.path, config.model.load_format)
        self.library: Library = Library(config.library.model_copy(update=ours), model)
        try:
            self.form = load_form(config.patch, self.library)
        except UnknownBasis as error:
            raise CompileTraceError(str(error)) from error
        self.costs: LinkCosts = LinkCosts()
        self.prefixes, self._texts = self._prefixes(choice.prefixes)

    def _prefixes(self, texts: Sequence[str]) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
        """Token ids of fixed prefixes by digest, and their texts.

        Of the empty one and of those given, also with tools as requests have them.
        """
        known = {"": ()}
        if texts:
            from vllm.tokenizers import get_tokenizer

            tokenizer = get_tokenizer(
                str(self.config.model.path), trust_remote_code=self.config.model.trust_remote_code
            )
            for text in [*texts, *map(with_tools_of_requests, texts)]:
                known[text] = tuple(tokenizer.encode(text, add_special_tokens=False))
        digests = {text: prefix_key(tokens) for text, tokens in known.items()}
        return {digests[text]: tokens for text, tokens in known.items()}, {digests[text]: text for text in known}

    def _openings(self, digests: Iterable[str]) -> dict[str, tuple[int, ...]]:
        """Token ids of prompts' openings by the digest of their fixed prefix.

        The prefix's own for a model that takes no images: no sample of a prompt can be rendered.
        """
        from serving.offline.precompute_prepare import EntryError, Opening, Prompts

        prompts, found = Prompts(self.config), dict[str, tuple[int, ...]]()
        for digest in digests:
            tools, system = split_tools(self._texts[digest])
            opening = Opening(tuple(tools), ({"role": "system", "content": system},) if system else ())
            try:
                found[digest] = asyncio.run(prompts.opening_tokens(opening))
            except EntryError:
                found[digest] = self.prefixes[digest]
        return found

    def trace(self, requests: Iterable[LoggedRequest]) -> Trace:
        """The requests that patches can serve; learns what tokens cost on the way."""
        return trace_of(self._learnt(requests), self.prefixes, self._unusable, self._why_not)

    def _learnt(self, requests: Iterable[LoggedRequest]) -> Iterator[LoggedRequest]:
        from prefill_workers.protocol import LinkResult

        for request in requests:
            if request.model == self.config.model.served_name:
                counts, stages = (request.reused, request.computed), {"place": request.place_ms}
                self.costs.learn(LinkResult("", {}, (), *counts, stages, compute_ms=request.forward_ms))
            yield request

    def _why_not(self, request: LoggedRequest) -> str | None:
        from prefill_workers.modes import Mode, Text, looks_up_patch

        if request.model != self.config.model.served_name:
            return f"logged of another model ({request.model})"
        try:
            keyed = Text(request.text).keys(request.before, request.between, self.config.prefill.free)
            if not looks_up_patch(Mode.parse(request.mode)):
                return f"mode {request.mode} uses no patches"
        except ValueError as error:
            return str(error)
        return "text keys its patches (orbit.text, prefill.free_text), and is not logged" if keyed else None

    def _unusable(self, owned: Sequence[tuple[str, LoggedChunk]]) -> list[str | None]:
        with ThreadPoolExecutor(_LOOKS) as look:  # behind a URL each takes a round trip
            return list(look.map(self._why_unusable, owned))

    def stored(self, trace: Trace, wanted: Collection[Wanted]) -> set[Wanted]:
        """Patches, of those given, that the library has already."""
        from kvstore.operator.patch import PatchKind, set_kind
        from kvstore.records.keys import antecedent_key

        canonical = {content: self._canonical(shape) for content, shape in trace.shapes.items()}

        def there(patch: Wanted) -> bool:
            *before, last = (canonical[content] for content in patch.contents)
            kind = PatchKind.own if patch.ordered else set_kind(len(before))
            antecedent = antecedent_key(self.prefixes[patch.scope.prefix], before, ordered=patch.ordered)
            return self.library.persisted("patch", self.form.key(last, antecedent, kind), patch.scope.owner)

        with ThreadPoolExecutor(_LOOKS) as look:
            return {patch for patch, found in zip(wanted, look.map(there, wanted), strict=True) if found}

    def _canonical(self, chunk: LoggedChunk) -> str:
        """A chunk's canonical key."""
        from kvstore.records.keys import canonical_key
        from prefill_workers.engine.fingerprint import precision

        delimiters: Sequence[int] = ()
        if chunk.modality != TEXT:
            ids = expanded(chunk.ids)
            delimiters = [*ids[: chunk.first], *ids[chunk.first + chunk.count :]]
        kept = precision(self._dtype, self.config.model.kv_cache_dtype)
        return canonical_key(self.library.fingerprint, chunk.content, delimiters, kept)

    @property
    def _dtype(self) -> str:
        return str(self.model.dtype).removeprefix("torch.")

    def _why_unusable(self, owned: tuple[str, LoggedChunk]) -> str | None:
        from kvstore.records.keys import embedding_key

        (owner, chunk), library = owned, self.library
        if chunk.modality != TEXT:
            key = embedding_key(library.fingerprint, chunk.content, self._dtype)
            return None if library.persisted("embedding", key, owner) else "embeddings are not stored"
        record = library.get_canonical(self._canonical(chunk), owner)
        return None if record and record.token_ids else "the tokens of a text document are not stored"

    def terms(self) -> Terms:
        """Terms of the choice: costs as learnt, bytes of the deployment's patches."""
        from prefill_workers.link.token_selection import MEASURED_LAYER
        from prefill_workers.settings import Weighing

        layout, form = outline(self.model), self.form
        weighable = form.first_layer(layout.layers) <= MEASURED_LAYER
        # Attention alone takes half as long as the two layers' forward (benchmark `weighing`).
        layers = MEASURED_LAYER + 1 if self.config.weigh_by is Weighing.KV else 1
        return Terms(
            forward=self.costs.forward,
            place=self.costs.place,
            patch_bytes=lambda tokens: form.footprint(tokens, layout, self.model.dtype).own,
            first_layers=min(1.0, layers / layout.layers),
            compose_up_to=self.config.compose_up_to if weighable else 0,
            longest=self.model.max_model_len,
            min_uses=self.choice.min_uses,
        )

    def report(self, trace: Trace) -> Report:
        """The plans of the kinds that are asked for, and the best of them."""
        terms = self.terms()
        kinds = [self.choice.kind] if self.choice.kind is not None else list(Kind)
        plans = [plan(trace, kind, terms, self.choice.budget, partial(self.stored, trace)) for kind in kinds]
        return Report(
            requests=len(trace.requests),
            chunks=sum(len(order) for _, order in trace.requests),
            compute_ms_per_token=terms.forward.added_seconds(1) * 1e3,
            place_ms_per_token=terms.place * 1e3,
            skipped=dict(trace.skipped),
            plans=plans,
            chosen=max(plans, key=lambda each: each.saves),
        )

    def paths(self, chosen: Plan, trace: Trace) -> Iterator[PatchPath]:
        """Paths of a plan, for a path worker."""
        from prefill_workers.patches.offline_paths import Path as PatchPath

        shapes: dict[str, ChunkShape] = {}
        openings = self._openings({wanted.scope.prefix for wanted in chosen.patches})
        for wanted in chosen.patches:
            for content in wanted.contents:
                if content not in shapes:
                    shapes[content] = shape_of(trace.shapes[content])
            chunks = tuple(shapes[content] for content in wanted.contents)
            scope = wanted.scope
            yield PatchPath(scope.owner, self.prefixes[scope.prefix], wanted.ordered, chunks, openings[scope.prefix])


def text_of(prefix: str) -> str:
    """A fixed prefix: its text, or @FILE, which holds it.

    A last line break is the file's, not the prefix's.

    Raises:
        CompileTraceError: the file cannot be read.
    """
    if not prefix.startswith("@"):
        return prefix
    try:
        return Path(prefix[1:]).read_text().removesuffix("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise CompileTraceError(f"--prefix {prefix}: cannot be read: {error}") from error


def outline(model: Any) -> Layout:
    """Layout of a model (vLLM's `ModelConfig`), but for the angles of its rotary embedding."""
    from kvstore.operator.layout import Layout
    from kvstore.operator.rotary import RotaryScheme

    layers, none = model.get_total_num_hidden_layers(), RotaryScheme((1.0,), "neox")
    if model.use_mla:
        text = model.hf_text_config
        return Layout.mla(layers, text.kv_lora_rank, text.qk_rope_head_dim, none)
    return Layout.gqa(layers, model.get_total_num_kv_heads(), model.get_head_size(), none)


def shape_of(chunk: LoggedChunk) -> ChunkShape:
    """A logged chunk as a path worker takes it.

    Raises:
        BadLog: its grid is none.
    """
    import torch

    from prefill_workers.patches.offline_paths import ChunkShape, grid_item

    try:
        grid = {name: torch.tensor(one.data, dtype=getattr(torch, one.dtype)) for name, one in chunk.grid.items()}
    except (TypeError, ValueError, RuntimeError) as error:
        raise BadLog(f"chunk {chunk.content[:16]}: its grid is no tensor: {error}") from error
    return ChunkShape(
        content=chunk.content,
        modality=chunk.modality,
        length=chunk.tokens,
        token_ids=tuple(expanded(chunk.ids)),
        first=chunk.first,
        count=chunk.count,
        grid=grid_item(grid) if grid else None,
        is_embed=None if chunk.mask is None else torch.tensor(expanded(chunk.mask), dtype=torch.bool),
    )


def compile_paths(
    worker: PathWorker, library: Library, paths: Iterable[PatchPath], seconds: float = math.inf
) -> Iterator[Compiled]:
    """Make patches and have them written, a few at a time.

    What fails is skipped with its reason.

    After so many `seconds` no other is begun.
    """
    from kvstore.errors import StoreError
    from prefill_workers.patches.offline_paths import Compiled

    deadline = time.monotonic() + seconds
    for number, path in enumerate(paths, 1):
        if time.monotonic() >= deadline:
            break
        try:
            yield worker.compile(path)
        except (StoreError, RuntimeError, OSError) as error:
            yield Compiled("skipped", reason=f"{type(error).__name__}: {error}")
        if number % _PATHS_PER_FLUSH == 0:
            library.flush()
    library.flush()


# -- for people -------------------------------------------------------------------------------------------------------


def compile_trace(
    config: OrbitServeConfig, log: Path, choice: Choice, console: Console, *, dry_run: bool, json_file: Path | None
) -> bool:
    """Plan, print the plan and, unless it is a dry run, compile it.

    Returns whether all of it is stored.

    Raises:
        BadLog: the log cannot be read. CompileTraceError: see `Planner`, `json_file` cannot be written, or the engine
            fails its self-check.
    """
    log_files(log)  # before anything slow
    if (problem := unwritable(json_file)) is not None:
        raise CompileTraceError(problem)
    os.environ.update(vllm_environment(kv_cache_gib=config.prefill.kv_cache_gib, threads=config.precompute.threads))
    planner = Planner(config, choice)
    try:
        with console.status("reading the access log"):
            trace = planner.trace(read(log))
        with console.status("planning"):
            report = planner.report(trace)
        show_plan(report, choice.budget, console)
        if not dry_run and report.chosen.patches:
            _compile(planner, trace, report, console)
    finally:
        planner.library.close()
    if json_file is not None:
        json_file.write_text(json.dumps(report.document(), indent=2) + "\n")
    if dry_run:
        console.print("dry run: nothing was compiled")
        return True
    return report.statuses["stored"] + report.statuses["present"] == len(report.chosen.patches) and not (
        report.unwritten or report.absent
    )


def _compile(planner: Planner, trace: Trace, report: Report, console: Console) -> None:
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
    ) as progress:
        bar = progress.add_task("starting the engine", start=False, total=len(report.chosen.patches))
        try:
            worker = _worker(planner)
            progress.start_task(bar)
            progress.update(bar, description="compiling")
            paths, seconds = planner.paths(report.chosen, trace), planner.choice.budget.seconds
            for compiled in compile_paths(worker, planner.library, paths, seconds):
                report.statuses[compiled.status] += 1
                report.tokens += compiled.tokens
                if compiled.reason:
                    report.not_compiled[compiled.reason] += 1
                progress.advance(bar)
            if left := len(report.chosen.patches) - report.statuses.total():
                report.not_compiled["the time is up; run it again to go on"] += left
        except KeyboardInterrupt:
            progress.update(bar, description="stopped; run it again to go on")
    planner.library.flush()
    report.unwritten = planner.library.stats().dropped_writes
    there = len(planner.stored(trace, report.chosen.patches))
    report.absent = max(0, report.statuses["stored"] + report.statuses["present"] - there)
    show_outcome(report, console)


def _worker(planner: Planner) -> PathWorker:
    from prefill_workers.engine.engine import PrefillEngine
    from prefill_workers.engine.self_check import SelfCheckError, require_self_check
    from prefill_workers.patches.offline_paths import PathWorker
    from serving.engine_spec import prefill_spec

    config = planner.config
    engine = PrefillEngine(prefill_spec(config, hand_off=False))
    if config.prefill.self_check:
        try:
            require_self_check(engine)
        except SelfCheckError as error:
            raise CompileTraceError(str(error)) from error
    return PathWorker(engine, planner.library, planner.form, config.prefill.max_batch_tokens)
