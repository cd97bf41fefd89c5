"""The offline worker: rendered prompts in, stored records out.

It has an engine, and no loop, leases or hand-off.

| record      | computed by                                                                           |
|-------------|---------------------------------------------------------------------------------------|
| embedding   | the vision tower, all missing ones of a batch at once                                  |
| canonical   | a forward over the chunk alone; many chunks and prompts share a forward                |
| own patch   | a forward over the whole prompt, against the canonical                                 |
| orbit patch | a forward for every order of the prompt's chunks, see `orbit_patches`                 |

Keys and positions are the linker's, deficits and patches the harvester's: what is stored here is what a request would
have stored.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, combinations

import torch
from torch import Tensor
from vllm.multimodal.inputs import MultiModalKwargsItem

from kvstore.library import Library
from kvstore.operator.patch import PatchKind, set_kind
from kvstore.records.keys import antecedent_key
from kvstore.records.patch_form import PatchForm
from kvstore.records.record import RecordKind
from prefill_workers.engine.engine import PrefillEngine
from prefill_workers.link.linker import Linker
from prefill_workers.link.plan import ChunkPlan, LinkPlan
from prefill_workers.modes import FreeText
from prefill_workers.patches.harvester import Harvester
from prefill_workers.patches.patch_compiler import PatchCompiler
from prefill_workers.patches.scratch import Scratch, at_once
from prefill_workers.patches.set_patches import SetPatches
from prefill_workers.protocol import LinkRequest, PixelsNeeded
from prefill_workers.sequence import LinkSequence, Run, forwards
from prefill_workers.settings import FREE_TEXT

Name = tuple[RecordKind, str]


@dataclass(eq=False)
class OfflineTask:
    """One prompt whose records are wanted.

    `request` has mode `exact`: nothing stored is linked. `items` are the processed pixels of its chunks (None: a text
    chunk), `wanted` the records that it needs, `missing` those of them that are to be computed.
    """

    request: LinkRequest
    items: Sequence[tuple[str, MultiModalKwargsItem] | None]
    wanted: Sequence[Name]
    missing: Set[Name] = frozenset()


@dataclass
class Work:
    """Cost of a task: records computed by kind, and tokens of its forwards."""

    embeddings: int = 0
    canonicals: int = 0
    patches: int = 0
    tokens: int = 0


@dataclass(eq=False)
class _Planned:
    """A task on its way: its plan, and what it has cost so far."""

    task: OfflineTask
    plan: LinkPlan
    work: Work = field(default_factory=Work)


class OfflineWorker:
    """Computes what tasks lack. Not thread-safe: one call at a time.

    Args:
        form: of the patches; it is part of their keys.
        budget: tokens of one forward at most.
        free_text: of the service that links what is computed (`prefill.free`); own patches are keyed by it.
    """

    def __init__(
        self, engine: PrefillEngine, library: Library, form: PatchForm, budget: int, free_text: FreeText = FREE_TEXT
    ) -> None:
        self.engine, self.library = engine, library
        self._compiler = PatchCompiler(library, form)
        self._linker = Linker(engine, library, form, free_text=free_text)
        self._harvester = Harvester(engine, library, form, self._compiler.compile)
        self._sets = SetPatches(self._harvester)
        self._budget = budget
        self._blocks = range(1, engine.num_blocks)  # block 0 is vLLM's null block
        self._scratch = Scratch(self._blocks, engine.block_size, lambda left: budget)

    @property
    def capacity(self) -> int:
        """Tokens of the longest prompt that the KV pool takes."""
        return len(self._blocks) * self.engine.block_size

    def wanted(self, request: LinkRequest, patches: PatchKind | None) -> list[Name]:
        """Records that make a request's link free of encoding and computing.

        Args:
            patches: own: in this order; orbit: in any order; None: no patches, only what they are formed from.
        """
        keys = self._linker.keys(request)
        names: list[Name] = [("canonical", chunk.canonical) for chunk in keys]
        names += [("embedding", chunk.embedding) for chunk in keys if chunk.embedding is not None]
        if patches is PatchKind.own:
            names += [("patch", chunk.own_patch) for chunk in keys]
        elif patches is PatchKind.orbit:
            for i, chunk in enumerate(keys):
                others = [other.canonical for other in keys[:i] + keys[i + 1 :]]
                for before in chain.from_iterable(combinations(others, size) for size in range(len(keys))):
                    behind = antecedent_key(request.prefix, before, ordered=False)
                    names.append(("patch", self._linker.form.key(chunk.canonical, behind, set_kind(len(before)))))
        return list(dict.fromkeys(names))

    @torch.inference_mode()
    def compute(self, tasks: Sequence[OfflineTask]) -> list[Work]:
        """Compute the tasks' missing records once each, for the library to persist on `flush`."""
        left = {name for task in tasks for name in task.missing}

        def take(kind: RecordKind, key: str) -> bool:
            name = (kind, key)
            found = name in left
            left.discard(name)
            return found

        planned = self._plan(tasks)
        jobs: list[tuple[LinkSequence, Callable[[Tensor, float], None]]] = []
        for item in planned:
            jobs += [
                (self._harvester.lone(item.plan, chunk, ()), partial(self._keep_canonical, item, chunk))
                for chunk in item.plan.chunks
                if take("canonical", chunk.keys.canonical)
            ]
        for item in planned:  # after all canonicals: deficits are measured against them
            unpatched = [chunk for chunk in item.plan.chunks if take("patch", chunk.keys.own_patch)]
            if unpatched:
                jobs.append((item.plan.sequence, partial(self._keep_patches, item, unpatched)))
        for (_, keep), (kv, seconds) in zip(jobs, self._forward([sequence for sequence, _ in jobs]), strict=True):
            keep(kv, seconds)
        for item in planned:
            orbits = {(kind, key) for kind, key in left & item.task.missing if kind == "patch"}
            if orbits:
                left -= orbits
                self._form_orbits(item)
        return [item.work for item in planned]

    def _plan(self, tasks: Sequence[OfflineTask]) -> list[_Planned]:
        """Plan with all embeddings; missing ones are encoded in one batch and stored."""
        pixels = {
            span.content: item
            for task in tasks
            for span, item in zip(task.request.chunks, task.items, strict=True)
            if item is not None and ("embedding", self.engine.embedding_key(span.content)) in task.missing
        }
        encoded = dict(zip(pixels, self.engine.encode(list(pixels.values())) if pixels else (), strict=True))
        planned = []
        for task in tasks:
            given = {i: encoded[c.content] for i, c in enumerate(task.request.chunks) if c.content in encoded}
            try:
                plan = self._linker.plan(task.request, given)
            except PixelsNeeded as needed:  # stored once, and not readable now
                again = self.engine.encode([item for i in needed.chunks if (item := task.items[i]) is not None])
                plan = self._linker.plan(task.request, given | dict(zip(needed.chunks, again, strict=True)))
            planned.append(_Planned(task, plan))
            for chunk in plan.chunks:
                if pixels.pop(chunk.span.content, None) is not None:
                    self._harvester.keep_embeddings(plan, chunk)
                    planned[-1].work.embeddings += 1
        return planned

    def _forward(self, sequences: Sequence[LinkSequence]) -> Iterator[tuple[Tensor, float]]:
        """KV [layers, tokens, features] of every sequence, in order, and its share of the time.

        A group is what fits the pool and the budget together; a sequence beyond the budget takes several forwards.
        """
        waiting = list(sequences)
        while waiting:
            group: list[LinkSequence] = []
            tokens, block = 0, self._blocks.start
            for sequence in waiting:
                end = block + -(-len(sequence) // self.engine.block_size)
                if group and (tokens + len(sequence) > self._budget or end > self._blocks.stop):
                    break
                sequence.blocks = range(block, end)
                group.append(sequence)
                tokens, block = tokens + len(sequence), end
            began = time.perf_counter()
            for work in forwards([(sequence, [Run(0, len(sequence))]) for sequence in group], self._budget):
                self.engine.forward(work)
            seconds = time.perf_counter() - began
            # All of them before the first is used: its user may compute in the same blocks.
            computed = [self.engine.read_kv(sequence.blocks, 0, len(sequence)) for sequence in group]
            for sequence, kv in zip(group, computed, strict=True):
                yield kv, seconds * len(sequence) / tokens
            waiting = waiting[len(group) :]

    def _keep_canonical(self, item: _Planned, chunk: ChunkPlan, kv: Tensor, seconds: float) -> None:
        self._harvester.keep_canonical(item.plan, chunk, kv, seconds)
        item.work.canonicals += 1
        item.work.tokens += kv.shape[1]

    def _keep_patches(self, item: _Planned, chunks: Sequence[ChunkPlan], kv: Tensor, seconds: float) -> None:
        """Store the own patches of `chunks`, given the whole prompt's KV [layers, tokens, features]."""
        plan = item.plan
        plan.compute_ms = seconds * 1e3
        item.work.tokens += kv.shape[1]
        for chunk in chunks:
            conditioned = kv[:, chunk.span.start : chunk.span.stop]
            at_once(self._harvester.harvest(plan, chunk, conditioned, self._scratch))
            item.work.patches += 1

    def _form_orbits(self, item: _Planned) -> None:
        forming = at_once(self._sets.forming(item.plan))
        if forming is None:
            return
        formed = self._compiler.formed
        while at_once(self._sets.orbit_step(forming, self._scratch)):
            item.work.tokens += forming.tokens
        item.work.patches += self._compiler.formed - formed
