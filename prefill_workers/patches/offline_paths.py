"""Path worker: patches of chunks behind others, from the library's contents alone.

No request is at hand: a chunk is put together again from its shape (see `ChunkShape`), its stored embeddings or, of
text, its stored tokens. Chunks stand back to back behind the prompt's opening, as in `orbit_patches`. Keys are the
linker's, deficits and patches the harvester's: what is stored here is what a request finds.

    paths  a b c, a b d     one forward: a b c; then only d, behind the a b that lies in the blocks
"""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from vllm.multimodal.inputs import MultiModalBatchedField, MultiModalFieldElem, MultiModalKwargsItem

from kvstore.library import Library
from kvstore.operator.patch import PatchKind, set_kind
from kvstore.records.keys import antecedent_key, owner_of
from kvstore.records.patch_form import PatchForm
from kvstore.records.record import CanonicalRecord
from prefill_workers.engine.engine import PrefillEngine
from prefill_workers.link.linker import Linker
from prefill_workers.modes import Mode
from prefill_workers.patches.harvester import Harvester
from prefill_workers.patches.orbit_patches import OrbitChunk, arrange
from prefill_workers.patches.patch_compiler import PatchCompiler
from prefill_workers.patches.scratch import Scratch, at_once
from prefill_workers.patches.set_patches import SetPatches
from prefill_workers.protocol import TEXT, ChunkSpan, LinkRequest, PixelsNeeded
from prefill_workers.sequence import Run, forwards

_CHUNKS_AT_HAND = 64  # with their embeddings


class Unbuildable(Exception):
    """A chunk that cannot be computed again; the message says why."""


@dataclass(frozen=True)
class ChunkShape:
    """A chunk as its span in a prompt of its own.

    `token_ids` are empty in a text chunk, whose tokens the library knows; `length` counts them all the same. Of others
    they are delimiters and placeholders.
    """

    content: str
    modality: str
    length: int
    token_ids: tuple[int, ...] = ()
    first: int = 0
    count: int = 0
    grid: Any = None
    is_embed: Tensor | None = None

    @property
    def span(self) -> ChunkSpan:
        """The chunk at the start of a prompt."""
        count = self.length if self.modality == TEXT else self.count
        return ChunkSpan(self.content, self.modality, 0, self.length, self.first, count, self.grid, self.is_embed)


@dataclass(frozen=True)
class Path:
    """A patch to make: of the last chunk behind the others, in this order (`ordered`) or any.

    `opening`: what requests with this fixed prefix have before their chunks; see `LinkRequest.opening`.
    """

    tenant: str  # who owns the patch
    prefix: tuple[int, ...]
    ordered: bool
    chunks: tuple[ChunkShape, ...]
    opening: tuple[int, ...]


class Compiled(NamedTuple):
    """Outcome of a path: stored, present or skipped (why), and the tokens computed."""

    status: Literal["stored", "present", "skipped"]
    tokens: int = 0
    reason: str = ""


class _Rebuilt(NamedTuple):
    chunk: OrbitChunk
    canonical: CanonicalRecord


def grid_item(fields: dict[str, Tensor]) -> MultiModalKwargsItem:
    """A processed item with nothing but the fields that fix positions."""
    field = MultiModalBatchedField(keep_on_cpu=True)
    return MultiModalKwargsItem({name: MultiModalFieldElem(data=data, field=field) for name, data in fields.items()})


class PathWorker:
    """Not thread-safe. Paths that share a beginning should follow one another.

    Args:
        form: of the patches; it is part of their keys.
        budget: tokens of one forward at most.
    """

    def __init__(self, engine: PrefillEngine, library: Library, form: PatchForm, budget: int) -> None:
        self._engine, self._library, self._form, self._budget = engine, library, form, budget
        self._compiler = PatchCompiler(library, form)
        self._linker = Linker(engine, library, form)
        self._harvester = Harvester(engine, library, form, self._compiler.compile)
        self._sets = SetPatches(self._harvester)
        self._blocks = range(1, engine.num_blocks)  # block 0 is vLLM's null block
        self._rebuilt: OrderedDict[tuple[str, str], _Rebuilt] = OrderedDict()
        self._lying: tuple[tuple[int, ...], list[str]] = ((), [])  # opening and chunks whose KV is in the blocks

    @torch.inference_mode()
    def compile(self, path: Path) -> Compiled:
        """Make one patch, unless it is stored, and hand it to the library (see `flush`)."""
        try:
            keys = [self._keys(path, shape) for shape in path.chunks]
            kind = PatchKind.own if path.ordered else set_kind(len(keys) - 1)
            antecedent = antecedent_key(path.prefix, keys[:-1], ordered=path.ordered)
            if self._library.persisted("patch", self._form.key(keys[-1], antecedent, kind), path.tenant):
                return Compiled("present")
            return self._compile(path, kind)
        except Unbuildable as error:
            return Compiled("skipped", reason=str(error))

    def _compile(self, path: Path, kind: PatchKind) -> Compiled:
        whole = len(path.opening) + sum(shape.length for shape in path.chunks)
        if (whole + max(shape.length for shape in path.chunks)) > (len(self._blocks) - 1) * self._engine.block_size:
            raise Unbuildable("longer than the KV pool (prefill.kv_cache_gib)")
        rebuilt = [self._rebuild(path.tenant, shape) for shape in path.chunks]
        order = [each.chunk for each in rebuilt]
        sequence, placed = arrange(path.opening, order, self._blocks)
        names = [chunk.key for chunk in order]
        opening, lying = self._lying
        same = 0
        while opening == path.opening and same < min(len(names) - 1, len(lying)) and names[same] == lying[same]:
            same += 1
        start = placed[same].start if same else 0
        self._lying = ((), [])
        began = time.perf_counter()
        for work in forwards([(sequence, [Run(start, len(sequence))])], self._budget):
            self._engine.forward(work)
        per_token = (time.perf_counter() - began) / (len(sequence) - start)
        self._lying = (path.opening, names)
        self._sets.keep_last(
            placed, rebuilt[-1].canonical, kind, path.prefix, path.tenant, self._blocks,
            seconds=per_token * path.chunks[-1].length,
        )  # fmt: skip
        return Compiled("stored", len(sequence) - start)

    def _keys(self, path: Path, shape: ChunkShape) -> str:
        """A chunk's canonical key."""
        request = LinkRequest("path", shape.token_ids, (shape.span,), Mode.EXACT, path.tenant)
        return self._linker.keys(request)[0].canonical

    def _rebuild(self, tenant: str, shape: ChunkShape) -> _Rebuilt:
        """The chunk with its embeddings, and its canonical KV, which is computed if it was evicted.

        Raises:
            Unbuildable: embeddings or tokens are not stored.
        """
        name = (owner_of(tenant, shape.content), shape.content)
        if name in self._rebuilt:
            self._rebuilt.move_to_end(name)
            return self._rebuilt[name]
        if shape.modality != TEXT and self._engine.uses_mrope and not shape.grid:
            raise Unbuildable("the log does not hold its grid")
        token_ids = shape.token_ids or self._text(tenant, shape)
        request = LinkRequest("path", token_ids, (shape.span,), Mode.EXACT, tenant)
        try:
            plan = self._linker.plan(request)
        except PixelsNeeded as error:
            raise Unbuildable("its embeddings are not stored") from error
        forming = at_once(self._sets.forming(plan))
        if forming is None:
            raise Unbuildable("its embeddings are not stored")
        size = self._engine.block_size
        spare = self._blocks[-shape.length // size :]  # the last ones: paths lie in the first
        scratch = Scratch(spare, size, lambda left: self._budget)
        canonical = at_once(self._harvester.canonical(plan, plan.chunks[0], scratch))
        found = self._rebuilt[name] = _Rebuilt(forming.chunks[0], canonical)
        while len(self._rebuilt) > _CHUNKS_AT_HAND:
            self._rebuilt.popitem(last=False)
        return found

    def _text(self, tenant: str, shape: ChunkShape) -> tuple[int, ...]:
        (keys,) = self._linker.keys(LinkRequest("path", (), (shape.span,), Mode.EXACT, tenant))
        stored = self._library.get_canonical(keys.canonical, keys.owner)
        if stored is None or stored.token_ids is None:
            raise Unbuildable("the tokens of a text document are not stored")
        return stored.token_ids
