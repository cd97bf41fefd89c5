"""Calibration of lazy blocks by the loss that they cost (q_cache.md).

A lazy layer takes its leader's visual queries and keys.

Pages with questions, and the model's own greedy answers to them. Per candidate one forward over every prompt with its
answer: the loss is the KL divergence of its next-token distributions along the answer, its end included, from the
model's own. Layers are taken up from the cheapest on, as long as the loss of all together keeps a bound. How much alike
layers attend (eq. 3) is shown beside: by itself it does not tell what laziness costs. So is what the cheapest layers
together cost and would save, bound or not: a lazy layer's visual keys need be neither stored nor handed off.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from torch import Tensor

from infra.reference import DEFAULT_MODEL, weights
from infra.reference.families import FAMILIES
from infra.reference.pictures import page_picture
from infra.reference.scenes import ASKED, Split, draw_items
from infra.reference.vocabulary import THINGS, question
from infra.vllm_env import vllm_environment
from serving.bench.harness import Benchmark, Outcome

if TYPE_CHECKING:
    from serving.bench.fidelity.reader import Reader

ITEMS, QUICK_ITEMS = 100, 4  # of each split
SPLITS = (Split.single, Split.multi)
ANSWER = 8  # tokens of each answer, at most
MAX_KL = 0.01  # nats, of the benchmark
LOST = 0.01  # of answers that may come out otherwise
SEED = 78_000_001
_ROW = "row"  # the name under which a prompt's last token is observed


@dataclass(frozen=True, eq=False)
class Case:
    """Prompt with its answer, and the model's own distributions [answer, vocabulary]."""

    sequence: Any
    runs: list[Any]
    own: Tensor
    visual: Tensor  # [prompt tokens] bool
    row: Tensor  # [layers, prompt tokens]: attention of the prompt's last token, heads averaged


@dataclass(frozen=True)
class Loss:
    """Loss of lazy blocks: nats, and the share of answers of which a token comes out otherwise."""

    kl: float
    lost: float


def cases(reader: Reader, count: int, seed: int = SEED) -> Iterator[Case]:
    """Prompts of pages and a question, `count` of each split, with the model's answers."""
    generator = torch.Generator().manual_seed(seed)
    kind, things = FAMILIES.get(reader.checkpoint.name, FAMILIES[DEFAULT_MODEL]), tuple(THINGS)
    ends = reader.end_tokens
    for split in SPLITS:
        form = kind.form(ASKED[split])
        scenes, questions = draw_items(split, count, form, generator)
        for index in range(count):
            pictures = [page_picture(scenes, index, page, kind.cell) for page in range(form.pages)]
            asked = [things[thing] for thing in questions.things[index, 0].tolist()]
            yield _case(reader, reader.rendered(pictures, question(asked)), ends)


def _case(reader: Reader, segments: Any, ends: Collection[int]) -> Case:
    from prefill_workers.engine.batch import Observing
    from prefill_workers.sequence import Embedded, LinkSequence, Run

    engine, n = reader.engine, len(segments.token_ids)
    chunks = segments.chunks
    rows = engine.encode(segments.pixels(range(len(chunks))))
    embedded = [Embedded(c.first, e, c.is_embed) for c, e in zip(chunks, rows, strict=True)]
    items = [(chunk.modality, chunk.grid, chunk.first, chunk.count) for chunk in chunks]
    blocks = range(1, 2 + (n + ANSWER) // engine.block_size)
    if blocks.stop > engine.num_blocks:
        raise ValueError(f"a prompt of {n} tokens does not fit the engine's KV pool")

    def sequence(tokens: Sequence[int]) -> Any:
        positions, _ = engine.positions(tokens, items)
        return LinkSequence(torch.tensor(tokens, dtype=torch.int32), positions, blocks, embedded)

    tokens = list(segments.token_ids)
    observed = [Observing(_ROW, Run(n - 1, n), n - 1, blocks)]
    logits = engine.forward([(sequence(tokens), [Run(0, n)])], ends=[0], observed=observed)
    row = engine.take_importance(_ROW)
    assert row is not None
    own: list[Tensor] = []
    while True:
        assert logits is not None
        own.append(logits[0].log_softmax(-1))
        tokens.append(int(own[-1].argmax()))
        if tokens[-1] in ends or len(own) == ANSWER:
            break
        logits = engine.forward([(sequence(tokens), [Run(len(tokens) - 1, len(tokens))])], ends=[0])
    whole = sequence(tokens[:-1])
    visual = whole.embedding_rows(torch.arange(n))[1]
    runs = [Run(0, n), *(Run(at, at + 1) for at in range(n, len(whole)))]
    return Case(whole, runs, torch.stack(own), visual, row)


def loss_of(
    reader: Reader, found: Sequence[Case], blocks: Sequence[Sequence[int]], *, shares_all: bool = False
) -> Loss:
    """Loss of lazy blocks over all cases, one forward a case."""
    reader.engine.set_lazy(blocks, shares_all=shares_all)
    kl, lost = 0.0, 0.0
    try:
        for case in found:
            got = reader.engine.logits([(case.sequence, case.runs)]).log_softmax(-1)
            kl += float((case.own.exp() * (case.own - got)).sum(-1).mean())
            lost += float((case.own.argmax(-1) != got.argmax(-1)).any())
    finally:
        reader.engine.set_lazy(())
    return Loss(kl / len(found), lost / len(found))


def divergences(found: Sequence[Case]) -> dict[str, Tensor]:
    """Jensen-Shannon divergence [layers - 1] of neighbouring layers' last rows (eq. 2, 3).

    Of all tokens, and of visual and text tokens alone.
    """
    kinds: dict[str, list[Tensor]] = {"all": [], "visual": [], "text": []}
    for case in found:
        for kind, columns in (("all", ...), ("visual", case.visual), ("text", ~case.visual)):
            row = case.row[:, columns]
            kinds[kind].append(_divergence(row / row.sum(-1, keepdim=True).clamp_min(1e-9)))
    return {kind: torch.stack(rows).mean(0) for kind, rows in kinds.items()}


def _divergence(rows: Tensor) -> Tensor:
    first, second = rows[:-1], rows[1:]
    middle = (first + second) / 2

    def kl(side: Tensor) -> Tensor:
        return (side * (side.clamp_min(1e-12) / middle.clamp_min(1e-12)).log()).sum(-1)

    return (kl(first) + kl(second)) / 2


@dataclass(frozen=True)
class Calibration:
    """Lazy blocks within a bound, and tables of what was measured."""

    blocks: tuple[tuple[int, ...], ...]
    loss: Loss
    tables: dict[str, dict[str, dict[str, float]]]
    figures: dict[str, float]


def calibrate(reader: Reader, found: Sequence[Case], max_kl: float, console: Console) -> Calibration:
    """Measure every candidate; take up layers while the loss of all keeps its bounds.

    They are `max_kl` nats, and LOST.
    """
    from prefill_workers.engine.lazy_attention import blocks_of

    layers = reader.engine.layout.layers
    visual = sum(int(case.visual.sum()) for case in found) / sum(len(case.visual) for case in found)
    known: dict[tuple[tuple[int, ...], ...], Loss] = {}

    def together(lazy: Sequence[int]) -> Loss:
        blocks = blocks_of(lazy)
        if blocks not in known:
            known[blocks] = loss_of(reader, found, blocks)
        return known[blocks]

    def left(lazy: int) -> float:
        """Bytes of a prompt's KV with so many lazy layers, over all: they go without visual keys."""
        return 1 - visual * lazy / (2 * layers)

    similar = divergences(found)
    single: dict[str, dict[str, float]] = {}
    alone: dict[int, float] = {}
    for layer in range(1, layers):
        vla = together([layer])
        gla = loss_of(reader, found, blocks_of([layer]), shares_all=True)
        alone[layer] = vla.kl
        single[f"{layer} from {layer - 1}"] = {
            "KL": vla.kl,
            "lost": vla.lost,
            "KL, all tokens": gla.kl,
            **{f"JS {kind}": float(values[layer - 1]) for kind, values in similar.items()},
        }
        console.print(f"  layer {layer}: KL {vla.kl:.4f}, with its text {gla.kl:.4f}", highlight=False)
    order = sorted(alone, key=alone.__getitem__)
    ladder: dict[str, dict[str, float]] = {}
    for count, layer in enumerate(order, 1):
        cost, size = together(order[:count]), left(count)
        ladder[f"{count}: with {layer}"] = {"KL": cost.kl, "lost": cost.lost, "bytes": size}
        console.print(
            f"  {count} together, the last {layer}: KL {cost.kl:.4f}, {cost.lost:.1%} of answers differ, {size:.3f} of "
            "the bytes",
            highlight=False,
        )
    taken: list[int] = []
    for layer in (layer for layer in order if max_kl > 0 and alone[layer] <= max_kl):
        more = together([*taken, layer])
        if more.kl <= max_kl and more.lost <= LOST:
            taken.append(layer)
    loss = together(taken) if taken else Loss(0.0, 0.0)
    figures = {
        "lazy_layers": float(len(taken)),
        "kl": loss.kl,
        "lost": loss.lost,
        "visual_share": visual,
        "bytes_with_vla": left(len(taken)),
        "least_kl_of_a_layer": min(alone.values()),
    }
    tables = {"one lazy layer": single, "the cheapest lazy layers together": ladder}
    return Calibration(blocks_of(taken), loss, tables, figures)


def measure(
    model: Path, count: int, max_kl: float, console: Console, *, trust_remote_code: bool = False
) -> Calibration:
    """Calibrate a checkpoint on an engine of its own, whatever blocks its card names.

    Raises:
        UnsupportedEngine: the model keeps latents (MLA).
    """
    os.environ.update(vllm_environment(kv_cache_gib=1, threads=len(os.sched_getaffinity(0))))
    from serving.bench.fidelity.reader import Reader

    reader = Reader(model, trust_remote_code=trust_remote_code)
    try:
        with torch.inference_mode():
            reader.engine.set_lazy([(0, 1)])  # refuses what cannot be lazy
            reader.engine.set_lazy(())
            found = list(cases(reader, count))
            chosen = calibrate(reader, found, max_kl, console)
            return confirmed(reader, chosen, list(cases(reader, count, SEED + 1))) if chosen.blocks else chosen
    finally:
        reader.close()


def confirmed(reader: Reader, chosen: Calibration, fresh: Sequence[Case]) -> Calibration:
    """The calibration with the loss on prompts that had no part in the choice."""
    loss = loss_of(reader, fresh, chosen.blocks)
    return replace(chosen, loss=loss, figures=chosen.figures | {"kl": loss.kl, "lost": loss.lost})


def run(quick: bool, console: Console, model: Path | None = None, items: int | None = None) -> Outcome:
    """Calibrate the bundled models that can be lazy, or the one in `model`."""
    folders = [model] if model is not None else [weights(name) for name in (DEFAULT_MODEL, "llava")]
    count = items or (QUICK_ITEMS if quick else ITEMS)
    figures: dict[str, float] = {}
    tables: dict[str, dict[str, dict[str, float]]] = {}
    for folder in folders:
        console.print(f"[bold]{folder.name}[/bold]: starting an engine")
        found = measure(folder, count, MAX_KL, console)
        prefix = "" if model is not None else f"{folder.name}."
        figures |= {f"{prefix}{name}": value for name, value in found.figures.items()}
        tables |= {f"{folder.name}: {name}": rows for name, rows in found.tables.items()}
    for worst in ("bytes_with_vla", "lost"):
        figures[worst] = max(value for name, value in figures.items() if name.endswith(worst))
    workload = {
        "models": [folder.name for folder in folders],
        "items": count,
        "answers": count * len(SPLITS),
        "answer_tokens": ANSWER,
        "max_kl": MAX_KL,
        "lost": LOST,
    }
    return Outcome(workload, [], figures, tables)


BENCHMARK = Benchmark(
    "lazy",
    "What it costs when layers share visual queries and keys, layer by layer, and what it would save.",
    run,
    {"bytes_with_vla": ("<=", 0.85), "lost": ("<=", LOST)},
    takes_model=True,
    takes_items=True,
)
