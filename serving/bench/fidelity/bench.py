"""The fidelity tables of all reference models, and the figures that are taken from them."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import torch
from rich.console import Console

from infra.reference import WEIGHTS, digest
from infra.reference.families import FAMILIES
from infra.reference.scenes import ASKED, Split
from infra.vllm_env import vllm_environment
from prefill_workers.model_card import FILE, ModelCard
from prefill_workers.settings import Weighing
from serving.bench.fidelity import windows
from serving.bench.fidelity.arms import COMMON, Arms
from serving.bench.fidelity.composition import holds_up_to
from serving.bench.fidelity.tables import (
    AT_EQUAL_BYTES,
    BUDGETS,
    BY_COMPOSITION,
    BY_LAYERS,
    MAIN,
    MARGIN,
    Section,
    Table,
    loses,
    tables,
)
from serving.bench.fidelity.window_cases import ACTION, PAGE, Prose
from serving.bench.fidelity.windows import OF_WINDOWS, SAME_TOKENS
from serving.bench.harness import UNCERTAINTY, Benchmark, Outcome
from serving.bench.kept import Kept, digest_of
from serving.loadtest.records import versions

ITEMS = 500
KINDS = {"gqa": "qwen2_5_vl", "deepstack": "qwen3_vl", "mla": "kimi_vl", "mha": "llava"}
REAL = {"real": "smollm2"}  # what `orbitserve fetch` gets; measured on windows of prose alone
COMPOSE_UP_TO, BY_ATTENTION = "compose_up_to", "compose_up_to_by_attention"
LATENT = "mla"  # its attention is not told by queries and keys alone
Tables = dict[str, Table]
_ROOT = Path(__file__).parents[3]
_CODE = [
    _ROOT / name
    for name in (
        "serving/bench/fidelity", "serving/frontend/prompt_segments.py", "prefill_workers", "kvstore",
        "infra/reference", "infra/checkpoints", "infra/cpu", "infra/vllm_env.py", "infra/vllm_plugin.py",
    )
]  # fmt: skip


def run(
    quick: bool,
    console: Console,
    model: Path | None = None,
    items: int | None = None,
    work: Path | None = None,
    only: Collection[str] | None = None,
) -> Outcome:
    """Measure the bundled reference models, or the one in `model`, on `items` items a split.

    Finished parts are kept in `work`, from where a run that was cut off goes on. `only`: some sections of the tables.

    Raises:
        FileNotFoundError: `model`, or the bundled weights, are none of the models.
        ValueError: a text model is asked for sections about pictures.
    """
    sections = only or tuple(Section)
    code = digest_of(_CODE)
    os.environ.update(vllm_environment(kv_cache_gib=1, threads=len(os.sched_getaffinity(0))))
    shipped = {kind: WEIGHTS / family for kind, family in KINDS.items() if (WEIGHTS / family).exists()}
    if model is not None:
        shipped = {kind: model for kind, family in (KINDS | REAL).items() if family == model.name}
    if shipped.keys() & REAL.keys():
        if only is not None and set(only) != {Section.windows}:
            raise ValueError(f"{model} reads no pictures: it is measured with --only {Section.windows} alone")
        sections = (Section.windows,)
    if not shipped:
        raise FileNotFoundError(f"none of {', '.join(KINDS.values())} is in {model or WEIGHTS}")
    figures: dict[str, float] = {}
    found: Tables = {}
    items = items or (24 if quick else ITEMS)
    for kind, folder in shipped.items():
        for name, table in tables_of(kind, folder, items, console, work, sections, code):
            found[f"{kind}: {name}"] = table
        figures |= figures_of(kind, found)
        if Section.composition in sections:
            content = to_be_kept(kind, figures).model_dump_json(include=SUMMED)
            console.print(f"{kind}: to be kept beside the weights, in {FILE}: [bold]{content}[/bold]")
    workload = {
        "models": {kind: folder.name for kind, folder in shipped.items()},
        "weights": {kind: digest(folder) for kind, folder in shipped.items()},
        "items": items,
        "sections": [*sections],
        "pages": {kind: _pages(folder) for kind, folder in shipped.items()},
    }
    return Outcome(workload, [], figures, found)


def _pages(folder: Path) -> dict[str, str]:
    if folder.name not in FAMILIES:
        return {"prose": f"of {PAGE} tokens, {ACTION[0]} to {ACTION[1]} behind each"}
    forms = {split: FAMILIES[folder.name].form(form) for split, form in ASKED.items()}
    return {str(split): f"{form.pages} of {form.cells} tokens" for split, form in forms.items()}


def tables_of(
    kind: str, folder: Path, items: int, console: Console, work: Path | None, sections: Collection[str], code: bytes
) -> Iterator[tuple[str, Table]]:
    """One model's tables of these sections, as they come."""
    from serving.bench.fidelity.reader import Reader
    from serving.bench.fidelity.study import Study

    console.print(f"[bold]{kind}[/bold]: starting an engine for {folder.name}")
    reader = Reader(folder, trust_remote_code=kind == "mla")
    # vLLM would say at every picture that an engine in the same process keeps its threads.
    logging.getLogger("vllm.v1.worker.cpu_worker").setLevel(logging.ERROR)
    try:
        with torch.inference_mode():
            kept = kept_parts(work, folder.name, reader.engine.fingerprint, items, code)
            if kind in REAL:
                made = windows.tables(Prose(reader), Arms.of(reader), reader, items, kept, console)
            else:
                made = tables(Study(reader, FAMILIES[folder.name]), items, kept, console, sections)
            for name, table in made:
                console.print(f"  {kind}: {name}")
                yield name, table
    finally:
        reader.close()


def kept_parts(work: Path | None, family: str, fingerprint: str, items: int, code: bytes) -> Kept:
    """Finished parts of a model's tables, measured by the same code and packages."""
    return Kept(work, (family, fingerprint, items, versions()), code)


def figures_of(kind: str, whole: Tables) -> dict[str, float]:
    """Figures `<family>.<split>.<arm>.<figure>` of the tables that give some.

    These are main, equal-byte, computed-layer and window tables. Beside what they hold: `blind.lost`, the accuracy that
    blind reuse loses; `orbit.below_own`, how much less of the loss an orbit patch closes than the own patch of that
    rank; `patch_within_p.margin`, how much more of it a patch closes than the best arm that keeps tokens of as many
    bytes. Of the whole family `compose_up_to`, by `composition.holds_up_to`, and how far weights by attention hold.
    """
    found: dict[str, float] = {}
    for figure in (*MAIN, SAME_TOKENS):
        for table in (f"{kind}: {figure}{of}" for of in ("", AT_EQUAL_BYTES, OF_WINDOWS)):
            for arm, cells in whole.get(table, {}).items():
                found |= {f"{kind}.{split}.{arm}.{figure}": value for split, value in _defined(cells)}
    for row, cells in whole.get(f"{kind}: {BY_LAYERS}", {}).items():
        split, arm = row.split(" ")
        at = f"{kind}.{split}.{arm}"
        found |= {f"{at}_{share.removesuffix('%')}.eta": value for share, value in _defined(cells)}
    for budget, cells in whole.get(f"{kind}: {MARGIN}", {}).items():
        at = f"patch_within_{budget.removesuffix('%')}.margin"
        found |= {f"{kind}.{split}.{at}": value for split, value in _defined(cells)}
    for split in dict.fromkeys(name.split(".")[1] for name in found):
        at = f"{kind}.{split}"
        found |= _less(found, f"{at}.blind.lost", f"{at}.exact.accuracy", f"{at}.blind.accuracy")
        found |= _less(found, f"{at}.orbit.below_own", f"{at}.patch_{COMMON}.eta", f"{at}.orbit.eta")
    start = f"{kind}: accuracy{BY_COMPOSITION}"
    composed = {name.removeprefix(start): table for name, table in whole.items() if name.startswith(start)}
    if composed:
        found[f"{kind}.{COMPOSE_UP_TO}"] = float(holds_up_to(composed))
        found[f"{kind}.{BY_ATTENTION}"] = float(holds_up_to(composed, "placed"))
    return found


def _defined(cells: Mapping[str, float]) -> list[tuple[str, float]]:
    """A row's cells, but for uncertainties and what is not defined."""
    return [(name, value) for name, value in cells.items() if not name.endswith(UNCERTAINTY) and value == value]


SUMMED = {"compose_up_to", "weigh_by"}  # a model card's facts that these tables measure


def to_be_kept(kind: str, figures: Mapping[str, float]) -> ModelCard:
    """Measured facts to keep beside a model's weights (its model card).

    Sums are weighed by attention where that holds as far as by KV.
    """
    by_kv, by_attention = (int(figures[f"{kind}.{name}"]) for name in (COMPOSE_UP_TO, BY_ATTENTION))
    if kind != LATENT and by_attention >= max(by_kv, 2):
        return ModelCard(compose_up_to=by_attention, weigh_by=Weighing.ATTENTION)
    return ModelCard(compose_up_to=by_kv)


def _less(found: Mapping[str, float], name: str, more: str, less: str) -> dict[str, float]:
    return {name: found[more] - found[less]} if more in found and less in found else {}


def applies(name: str, figures: Mapping[str, float]) -> bool:
    """True if a target's split was measured and, for reuse arms, blind reuse loses LOST there."""
    family, split, arm, _ = name.split(".")
    lost = figures.get(f"{family}.{split}.blind.lost")
    return lost is not None and (arm in ("exact", "blind") or loses(lost))


MULTI_HOP = (Split.multi, Split.frames, Split.tally)  # answers that refer to, change or count what earlier pages show
_OF_MULTI_HOP = {
    "exact.accuracy": (">=", 0.90),
    "patch_64.eta": (">=", 0.95),
    "patch_64.flip_recover": (">=", 0.95),
    "orbit.below_own": ("<=", 0.03),
    **{f"patch_within_{percent}.margin": (">=", 0.0) for percent in BUDGETS},
}
TARGETS = {
    "single.exact.accuracy": (">=", 0.95),
    "single.blind.lost": ("<=", 0.02),  # "unchanged": what chance may make of 500 items
    **{f"{split}.{name}": target for split in MULTI_HOP for name, target in _OF_MULTI_HOP.items()},
}

BENCHMARK = Benchmark(
    "fidelity",
    "What every way of reuse answers, by split and family of the reference models, against an exact prefill.",
    run,
    {f"{kind}.{name}": target for kind in KINDS for name, target in TARGETS.items()},
    takes_model=True,
    takes_items=True,
    takes_work=True,
    takes_only=tuple(Section),
    folders=(*KINDS.values(), *REAL.values()),
    applies=applies,
)
