"""The fidelity tables of all reference models, and the figures that are taken from them."""

from __future__ import annotations

import logging
import os
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console

from infra.reference import WEIGHTS
from infra.reference.families import FAMILIES
from infra.reference.scenes import Form, Split
from infra.vllm_env import vllm_environment
from serving.bench.harness import Benchmark, Outcome

if TYPE_CHECKING:
    from serving.bench.fidelity.scores import Scores
    from serving.bench.fidelity.study import Study

ITEMS = 500
STORED_RANK = 4  # low enough to tell ways of storing apart
KINDS = {"gqa": "qwen2_5_vl", "deepstack": "qwen3_vl", "mla": "kimi_vl", "mha": "llava"}
FORMS = {
    Split.single: Form(3, 12, 12), Split.multi: Form(3, 12, 12), Split.legend: Form(3, 8, 18),
    Split.frames: Form(3, 12, 12), Split.chain: Form(3, 12, 12), Split.retrieval: Form(6, 6, 12),
    Split.control: Form(3, 12, 12),
}  # fmt: skip
Tables = dict[str, dict[str, dict[str, float]]]


def run(quick: bool, console: Console, model: Path | None = None, items: int | None = None) -> Outcome:
    """Measure the reference models that are there, or the one in the folder `model`, on `items` items a split."""
    os.environ.update(vllm_environment(kv_cache_gib=1, threads=len(os.sched_getaffinity(0))))
    shipped = {kind: WEIGHTS / family for kind, family in KINDS.items() if (WEIGHTS / family).exists()}
    if model is not None:
        shipped = {kind: model for kind, family in KINDS.items() if family == model.name}
        if not shipped:
            raise ValueError(f"{model} is no reference model: its folder must be called one of {[*KINDS.values()]}")
    figures: dict[str, float] = {}
    tables: Tables = {}
    items = items or (24 if quick else ITEMS)
    for kind, folder in shipped.items():
        for name, table in measured(kind, folder, items, console):
            tables[f"{kind}: {name}"] = table
        figures |= figures_of(kind, tables)
    workload = {
        "models": {kind: folder.name for kind, folder in shipped.items()},
        "items": items,
        "pages": {str(split): f"{form.pages} of {form.cells} tokens" for split, form in FORMS.items()},
    }
    return Outcome(workload, [], figures, tables)


def measured(
    kind: str, folder: Path, items: int, console: Console
) -> Iterator[tuple[str, dict[str, dict[str, float]]]]:
    """All tables of one model, as they come."""
    from serving.bench.fidelity.reader import Reader
    from serving.bench.fidelity.study import Study

    console.print(f"[bold]{kind}[/bold]: starting an engine for {folder.name}")
    reader = Reader(folder, trust_remote_code=kind == "mla")
    # vLLM would say at every picture that an engine in the same process keeps its threads.
    logging.getLogger("vllm.v1.worker.cpu_worker").setLevel(logging.ERROR)
    try:
        with torch.inference_mode():
            study = Study(reader, FAMILIES[folder.name].cell)
            for name, table in _tables(study, items, console):
                console.print(f"  {kind}: {name}")
                yield name, table
    finally:
        reader.close()


def _tables(study: Study, items: int, console: Console) -> Iterator[tuple[str, dict[str, dict[str, float]]]]:
    from serving.bench.fidelity import composition, envelope, growth, online, reorder, storage
    from serving.bench.fidelity.study import Shape

    few = max(items // 5, 16)
    by_split: dict[Split, dict[str, Scores]] = {}
    shapes: dict[str, dict[str, float]] = {}
    basis = study.basis(FORMS[Split.multi])
    arms = study.arms.standard(basis)
    for split, form in FORMS.items():
        console.print(f"  {split}: {items} items")
        shape = Shape()
        by_split[split] = study.scored(study.gathered(split, items, form), arms, shape)
        shapes[str(split)] = {
            "tokens for 90%": statistics.mean(shape.tokens),
            "directions for 90%": statistics.mean(shape.ranks),
            **{f"layer {i}": statistics.mean(at) for i, at in enumerate(zip(*shape.depth, strict=True))},
        }
    yield from _main_tables(by_split)
    yield "deficit by split", shapes
    turned = {}
    for predecessors in reorder.FORMS:
        scores, apart = reorder.reorder(study, predecessors, few)
        turned[f"K = {predecessors}"] = {**_etas(scores), "orders apart": apart}
    yield "η by order", turned
    drifted = envelope.envelope(study, few)
    yield (
        "η by drift",
        {name: {arm: _figure(s, arm, "eta") for arm in s if arm != "exact"} for name, s in drifted.items()},
    )
    yield "answers changed by drift", {name: _changed(scores) for name, scores in drifted.items()}
    yield "rule", {"linker's rule": {"false reuse": envelope.false_reuse(drifted)}}
    yield "rolling KL by situation", online.table(online.online(study, -(-few // len(online.SPLITS))))
    for split, sizes in composition.SIZES.items():
        behind = {size: composition.compositions(study, split, size, few) for size in sizes}
        for figure in ("eta", "accuracy", "computed"):
            yield (
                f"{figure} by composition, {split}",
                {
                    f"|S| = {size}": {arm: _figure(scores, arm, figure) for arm in scores}
                    for size, scores in behind.items()
                },
            )
    grown = {pages: growth.growth(study, pages, few) for pages in growth.PAGES}
    yield "accuracy by pages", {mode: {str(n): grown[n][mode][0] for n in grown} for mode in growth.MODES}
    yield "median ms by pages", {mode: {str(n): grown[n][mode][1] for n in grown} for mode in growth.MODES}
    stored = storage.storage(study, Split.multi, STORED_RANK, few, FORMS[Split.multi])
    yield (
        "equal bytes",
        {
            arm: {name: _figure(stored, arm, name) for name in ("accuracy", "kl", "eta", "bytes_fraction")}
            for arm in stored
            if arm != "exact"
        },
    )


def _main_tables(by_split: Mapping[Split, Mapping[str, Scores]]) -> Iterator[tuple[str, dict[str, dict[str, float]]]]:
    for figure in ("accuracy", "kl", "eta", "flip_recover", "bytes_fraction", "computed"):
        table: dict[str, dict[str, float]] = {}
        for split, scores in by_split.items():
            for arm in scores:
                cells = table.setdefault(arm, {})
                cells[str(split)] = _figure(scores, arm, figure)
                if figure in ("accuracy", "eta"):
                    cells[f"{split} ±"] = _half_width(scores, arm, figure)
        yield figure, table


def _figure(scores: Mapping[str, Scores], arm: str, name: str) -> float:
    from serving.bench.fidelity.scores import figures

    if name in ("bytes_fraction", "computed"):
        return statistics.mean(getattr(scores[arm], name))
    found = figures(scores[arm], scores["blind"], scores["exact"])
    return found[name].value if name in found else float("nan")


def _etas(scores: Mapping[str, Scores]) -> dict[str, float]:
    return {arm: _figure(scores, arm, "eta") for arm in scores if arm not in ("exact", "blind")}


def _half_width(scores: Mapping[str, Scores], arm: str, name: str) -> float:
    from serving.bench.fidelity.scores import figures

    found = figures(scores[arm], scores["blind"], scores["exact"])
    return (found[name].high - found[name].low) / 2 if name in found else float("nan")


def _changed(scores: Mapping[str, Scores]) -> dict[str, float]:
    exact = scores["exact"].top
    return {
        arm: statistics.mean(a != b for a, b in zip(one.top, exact, strict=True))
        for arm, one in scores.items()
        if arm != "exact"
    }


def figures_of(kind: str, tables: Tables) -> dict[str, float]:
    """`<family>.<split>.<arm>.<figure>` of the main tables."""
    found: dict[str, Any] = {}
    for figure in ("accuracy", "kl", "eta", "flip_recover", "bytes_fraction"):
        for arm, cells in tables[f"{kind}: {figure}"].items():
            for split, value in cells.items():
                if not split.endswith("±") and value == value:
                    found[f"{kind}.{split}.{arm}.{figure}"] = value
    return found


BENCHMARK = Benchmark(
    "fidelity",
    "What every way of reuse answers, by split and family of the reference models, against an exact prefill.",
    run,
    {
        "gqa.single.exact.accuracy": (">=", 0.95),
        "gqa.multi.exact.accuracy": (">=", 0.90),
        "gqa.multi.patch_64.eta": (">=", 0.95),
        "gqa.multi.patch_64.flip_recover": (">=", 0.95),
    },
    takes_model=True,
    takes_items=True,
)
