"""Fidelity of patches: η and KL by rank and kind, on any checkpoint, by the real engine.

Pages A1..A3 and B are linked behind one another and a question follows. B's canonical KV is relocated into a sequence
whose other tokens are exact, with nothing (blind) or with a patch added; then the question's tokens are computed over
it. KL is that of their next-token distributions from an exact prefill's, and η = 1 - KL(patched) / KL(blind)
(kamera.md §5): the share of the loss that a patch closes.

| kind | patch of B |
|---|---|
| own | the deficit behind these pages in this order |
| orbit | the mean deficit over all other orders of the pages: the tested one is held out |
| transfer | the own patch of the reverse order |
| stale | the own patch behind a set in which another page stands for A1 |
| update | stale, and an update of the same rank on top |
| deep | own, the deepest half of the layers only |
| shared | own, projected on a basis that was pooled from the other items |
| composed | the scaled sum of pair patches behind each page alone; the scale is fitted to the other items |

Pages are pictures for a vision model and documents for a text model.
"""

from __future__ import annotations

import json
import logging
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image, ImageDraw
from rich.console import Console
from rich.progress import track
from torch import Tensor

from infra.checkpoints import STAMP, checkpoint_path
from infra.vllm_env import vllm_environment
from serving.bench.harness import Benchmark, Outcome
from serving.loadtest.images import data_url

if TYPE_CHECKING:
    from kvstore.operator.basis import SharedBasis
    from kvstore.operator.patch import Patch
    from prefill_workers.engine.engine import PrefillEngine
    from prefill_workers.link.plan import ChunkPlan, LinkPlan
    from serving.frontend.prompt_segments import Segments

CHECKPOINT = "qwen2_5_vl-tiny"
QUESTION = "Which shapes are on more than one page, and where?"
PREDECESSORS = 3
RANKS: tuple[int | None, ...] = (1, 2, 4, 8, 16, 32, 64, None)
QUICK_RANKS: tuple[int | None, ...] = (8, 32, None)
_PIXELS, _SHAPES = 336, 12


def run(quick: bool, console: Console, model: Path | None = None) -> Outcome:
    """Measure every kind at every rank on `model`, or on the bundled one."""
    os.environ.update(vllm_environment(kv_cache_gib=1, threads=os.cpu_count()))
    from prefill_workers.engine.engine import PrefillEngine
    from prefill_workers.engine.spec import EngineSpec

    checkpoint = model or checkpoint_path(CHECKPOINT)
    is_random = (checkpoint / STAMP).exists()
    console.print(f"starting a prefill engine for {checkpoint.name}")
    engine = PrefillEngine(
        EngineSpec(
            model=str(checkpoint),
            dtype="float32" if is_random else "auto",
            max_model_len=4096,
            hand_off=False,
            trust_remote_code=is_random,
        )
    )
    # vLLM would say at every picture that an engine in the same process keeps its threads.
    logging.getLogger("vllm.v1.worker.cpu_worker").setLevel(logging.ERROR)
    ranks = QUICK_RANKS if quick else RANKS
    try:
        with torch.inference_mode():
            measured = Probe(engine).measure(3 if quick else 8, ranks, console)
    finally:
        engine.shutdown()
    if is_random:
        console.print("  random weights: this checks the operator, it says nothing about what a trained model loses")
    figures = {
        "kl_blind": measured.blind,
        **{f"eta_{kind}_32": measured.eta(kind, 32) for kind in measured.kl},
        **{f"eta_{kind}_full": measured.eta(kind, None) for kind in measured.kl},
    }
    workload = {
        "model": checkpoint.name,
        "family": json.loads((checkpoint / "config.json").read_text())["model_type"],
        "layout": engine.layout.family,
        "dtype": str(engine.dtype).removeprefix("torch."),
        "random_weights": is_random,
        "items": measured.items,
        "predecessors": PREDECESSORS,
        "chunk_tokens": measured.chunk_tokens,
        "question_tokens": measured.question_tokens,
    }
    return Outcome(workload, [], figures, measured.tables())


@dataclass
class PatchRanks:
    """KL in nats, mean over items and question tokens, by kind and rank (None: full)."""

    blind: float
    kl: dict[str, dict[int | None, float]]
    kept_bytes: dict[str, dict[int | None, float]]  # of a patch, as a share of the KV that it patches
    items: int
    chunk_tokens: int
    question_tokens: int

    def eta(self, kind: str, rank: int | None) -> float:
        """The share of the blind loss that patches of this kind and rank close."""
        return 1 - self.kl[kind][rank] / self.blind

    def tables(self) -> dict[str, dict[str, dict[str, float]]]:
        """η, KL and bytes by kind and rank."""

        def by_name(values: dict[int | None, float]) -> dict[str, float]:
            return {"full" if rank is None else str(rank): value for rank, value in values.items()}

        eta = {kind: {rank: self.eta(kind, rank) for rank in by_rank} for kind, by_rank in self.kl.items()}
        found = {"η by rank": eta, "KL by rank": self.kl, "bytes / KV bytes by rank": self.kept_bytes}
        return {name: {kind: by_name(values) for kind, values in rows.items()} for name, rows in found.items()}


@dataclass
class Item:
    """One item's deficits of B [layers, tokens, features], and the prompt to try them in."""

    plan: LinkPlan
    target: ChunkPlan
    exact: Tensor  # log-probabilities [question tokens, vocabulary] behind the exact KV
    canonical: Tensor
    own: Tensor
    orbit: Tensor  # the mean over all orders but the tested one
    transfer: Tensor
    stale: Tensor
    pairs: list[Tensor]
    base: Tensor  # behind the fixed prefix alone


class Probe:
    """Runs prompts on an engine and tries patches in them."""

    def __init__(self, engine: PrefillEngine) -> None:
        from kvstore.library import Library
        from kvstore.records.patch_form import PatchForm
        from kvstore.settings import LibrarySettings
        from prefill_workers.link.linker import Linker
        from prefill_workers.patches.harvester import Harvester

        self._engine = engine
        library = Library(LibrarySettings(directory=None), engine.fingerprint)
        self._linker = Linker(engine, library, PatchForm())
        self._harvester = Harvester(engine, library, PatchForm(), lambda job: None)
        self._pages = Pages(engine)
        half = engine.num_blocks // 2
        self._blocks, self._scratch = range(1, half), range(half, engine.num_blocks)

    def measure(self, items: int, ranks: Sequence[int | None], console: Console) -> PatchRanks:
        """Gather all items' deficits, then try every kind and rank in every item."""
        gathered = [self._gather(i) for i in track(range(items), "deficits", console=console, transient=True)]
        blind: list[Tensor] = []
        kl: dict[str, dict[int | None, list[Tensor]]] = {}
        kept: dict[str, dict[int | None, float]] = {}
        for item in track(gathered, "patches", console=console, transient=True):
            self._forward(item.plan, self._blocks)
            blind.append(self._kl(item, None))
            others = [other for other in gathered if other is not item]
            for kind, form in self._kinds(item, self._basis(others), _composition_scale(others)).items():
                for rank in ranks:
                    patch = form(rank)
                    kl.setdefault(kind, {}).setdefault(rank, []).append(self._kl(item, patch))
                    kept.setdefault(kind, {})[rank] = patch.nbytes / item.canonical.nbytes
        mean = {kind: {rank: _mean(values) for rank, values in by_rank.items()} for kind, by_rank in kl.items()}
        return PatchRanks(_mean(blind), mean, kept, items, gathered[0].canonical.shape[1], len(gathered[0].exact))

    def _gather(self, number: int) -> Item:
        from kvstore.operator.apply import deficit_at
        from kvstore.operator.patch import mean_deficit, orderings
        from prefill_workers.patches.scratch import Scratch, at_once

        first = number * (PREDECESSORS + 2)
        *pages, b, other = range(first, first + PREDECESSORS + 2)
        tested, *others = orderings(pages)
        plan = self._plan([*tested, b])
        self._forward(plan, self._blocks)
        target = plan.chunks[-1]
        size = self._engine.block_size
        scratch = Scratch(self._scratch, size, lambda left: len(self._scratch) * size)
        canonical = at_once(self._harvester.canonical(plan, target, scratch)).kv

        def of(run: LinkPlan, chunk: ChunkPlan) -> Tensor:
            kv = self._harvester.conditioned(run, chunk)
            return deficit_at(kv, canonical, chunk.start_position, self._engine.layout)

        def behind(order: Sequence[int]) -> Tensor:
            run = self._plan([*order, b])
            self._forward(run, self._scratch)
            return of(run, run.chunks[-1])

        orders = [behind(order) for order in others]
        return Item(
            plan=plan,
            target=target,
            exact=self._answer(plan, target),
            canonical=canonical,
            own=of(plan, target),
            orbit=mean_deficit(orders),
            transfer=orders[-1],
            stale=behind([other, *pages[1:]]),
            pairs=[behind([page]) for page in pages],
            base=behind([]),
        )

    def _kinds(self, item: Item, basis: SharedBasis, scale: float) -> dict[str, Callable[[int | None], Patch]]:
        from kvstore.operator.patch import PatchKind, compose, form_patch, remainder

        layout, dtype = self._engine.layout, self._engine.dtype

        def formed(delta: Tensor, rank: int | None, kind: PatchKind = PatchKind.own, **form: Any) -> Patch:
            return form_patch(delta, layout, rank, kind=kind, dtype=dtype, **form)

        def updated(rank: int | None) -> Patch:
            stale = formed(item.stale, rank)
            return compose([stale, formed(remainder(item.own, stale), rank, PatchKind.update)])

        return {
            "own": lambda rank: formed(item.own, rank),
            "orbit": lambda rank: formed(item.orbit, rank, PatchKind.orbit),
            "transfer": lambda rank: formed(item.transfer, rank),
            "stale": lambda rank: formed(item.stale, rank),
            "update": updated,
            "deep": lambda rank: formed(item.own, rank, depth=0.5),
            "shared": lambda rank: formed(item.own, rank, basis=basis),
            "composed": lambda rank: compose(
                [formed(pair, rank, PatchKind.pair) for pair in item.pairs], scale, formed(item.base, rank)
            ),
        }

    def _basis(self, others: Sequence[Item]) -> SharedBasis:
        """Pooled from the other items only: what it says about the tested one is said of the model."""
        from kvstore.operator.basis import pool_basis
        from kvstore.operator.patch import form_patch

        layout = self._engine.layout
        widest = max(segment.features for segment in layout.segments)
        return pool_basis([form_patch(other.own, layout) for other in others], widest)

    def _plan(self, numbers: Sequence[int]) -> LinkPlan:
        from prefill_workers.modes import Mode
        from prefill_workers.protocol import LinkRequest, PixelsNeeded

        segments = self._pages.prompt(numbers)
        request = LinkRequest("bench", segments.token_ids, segments.chunks, Mode.EXACT)
        try:
            return self._linker.plan(request)
        except PixelsNeeded as needed:
            encoded = self._engine.encode(segments.pixels(needed.chunks))
            plan = self._linker.plan(request, dict(zip(needed.chunks, encoded, strict=True)))
            for chunk in plan.chunks:
                self._harvester.keep_embeddings(plan, chunk)
            return plan

    def _forward(self, plan: LinkPlan, blocks: range) -> None:
        from prefill_workers.sequence import Run

        if len(plan.sequence) > len(blocks) * self._engine.block_size:
            raise ValueError(f"a prompt of {len(plan.sequence)} tokens does not fit half of the engine's KV pool")
        plan.sequence.blocks = blocks
        self._engine.forward([(plan.sequence, [Run(0, len(plan.sequence))])])

    def _answer(self, plan: LinkPlan, target: ChunkPlan) -> Tensor:
        """Log-probabilities [question tokens, vocabulary] over the KV in the plan's blocks."""
        from prefill_workers.sequence import Run

        tail = range(target.span.stop, len(plan.sequence))
        return self._engine.logits([(plan.sequence, [Run(i, i + 1) for i in tail])]).float().log_softmax(-1)

    def _kl(self, item: Item, patch: Patch | None) -> Tensor:
        """KL(exact ‖ linked) of every question token, with B's KV relocated and patched."""
        from kvstore.operator.apply import apply

        span = item.target.span
        kv = apply(item.canonical, patch, item.target.start_position, self._engine.layout)
        self._engine.write_kv(kv, self._engine.slots(item.plan.sequence.blocks, span.start, span.stop))
        linked = self._answer(item.plan, item.target)
        return (item.exact.exp() * (item.exact - linked)).sum(-1)


def _mean(kl: Sequence[Tensor]) -> float:
    """Mean over all items' tokens, at least 0.

    Where the distributions agree, rounding may have left less than nothing.
    """
    return max(0.0, float(torch.cat(list(kl)).mean()))


def _composition_scale(items: Sequence[Item]) -> float:
    """The c of Δ(B|P) + c·Σ (Δ(B|P,A_i) - Δ(B|P)) that is nearest to these items' own deficits."""
    along = across = 0.0
    for item in items:
        added = torch.stack([pair - item.base for pair in item.pairs]).sum(0)
        along += float((added * (item.own - item.base)).sum())
        across += float(added.square().sum())
    return along / across


class Pages:
    """Prompts of numbered pages and a question, rendered by the checkpoint's own chat template."""

    def __init__(self, engine: PrefillEngine) -> None:
        from vllm.renderers import renderer_from_config

        from serving.frontend.documents import Documents
        from serving.frontend.prompt_segments import Delimiters

        self._config = engine.config.model_config
        self._renderer: Any = renderer_from_config(engine.config)
        self._delimiters = Delimiters.of(self._config, self._renderer.get_tokenizer())
        self._documents = Documents(self._renderer.get_tokenizer())
        self._documents.install(self._renderer)

    def prompt(self, numbers: Sequence[int]) -> Segments:
        """The pages of these numbers, then the question, in one user turn."""
        from vllm.renderers import ChatParams

        from serving.frontend.prompt_segments import segment

        parts = [self._part(number) for number in numbers]
        marked = self._documents.marked(part["text"] for part in parts if part["type"] == "text")
        content = [*parts, {"type": "text", "text": QUESTION}]
        template = {"add_generation_prompt": True, "tokenize": False}
        _, (rendered,) = self._renderer.render_chat(
            [[{"role": "user", "content": content}]], ChatParams(chat_template_kwargs=template), skip_mm_cache=True
        )
        return segment(rendered, self._delimiters, marked)

    def _part(self, number: int) -> dict[str, Any]:
        content = f"{number:064x}"
        if not self._config.is_multimodal_model:
            return {"type": "text", "text": self._documents.mark(content, described(number))}
        return {"type": "image_url", "image_url": {"url": data_url(drawn(number))}, "uuid": content}


_COLOURS = ("red", "orange", "gold", "green", "teal", "blue", "purple", "black")


def _shapes(number: int) -> list[tuple[str, str, int, int, int]]:
    """(form, colour, column, row, size) of a page's shapes."""
    chance = random.Random(number)
    return [
        (chance.choice(("disc", "square")), chance.choice(_COLOURS), chance.randrange(6), chance.randrange(6),
         chance.randrange(1, 4))
        for _ in range(_SHAPES)
    ]  # fmt: skip


def drawn(number: int) -> Image.Image:
    """A page with shapes, as a picture."""
    page = Image.new("RGB", (_PIXELS, _PIXELS), "white")
    pen, cell = ImageDraw.Draw(page), _PIXELS // 6
    for form, colour, column, row, size in _shapes(number):
        box = (column * cell, row * cell, column * cell + size * cell // 2, row * cell + size * cell // 2)
        (pen.ellipse if form == "disc" else pen.rectangle)(box, fill=colour)
    return page


def described(number: int) -> str:
    """The same page in words."""
    shapes = (
        f"a {colour} {form} of size {size} at {column},{row}" for form, colour, column, row, size in _shapes(number)
    )
    return f"Page {number} shows {', '.join(shapes)}. "


BENCHMARK = Benchmark(
    "patch-rank",
    "What patches restore: η and KL by rank and kind on any checkpoint, against blind reuse and an exact prefill.",
    run,
    {},
    takes_model=True,
)
