"""Elastic Cache at a budget: answers, perplexity, speed and room (elastic_cache.md).

| part          | what is measured                                                               |
|---------------|--------------------------------------------------------------------------------|
| answers       | right answers of two reference models, asked before and after compaction       |
| perplexity    | SmolLM2, next 64 tokens of documents, behind 448                               |
| continuations | SmolLM2, 128 tokens of its own beside those that it says from all KV (ROUGE-L) |
| speed         | a decode step over 8 contexts of 8,192 tokens, and answers at once in one pool |

Arms are those of `elastic_arms`. `speed` alone wants a quiet machine. With `--work` finished parts are kept: measured
one by one with `--only`, they make the record of a whole run afterwards.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from enum import StrEnum, auto
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from infra.vllm_env import vllm_environment
from serving.bench.harness import Benchmark, Outcome
from serving.bench.kept import Kept, digest_of
from serving.bench.models import CHECKPOINT
from serving.loadtest.records import versions
from tests.benchmarks import elastic_answers, elastic_speed, elastic_text

BUDGET = 0.2
BUDGETS = (0.8, 0.5, 0.3, 0.2, 0.1)
KINDS = {"gqa": "qwen2_5_vl", "mha": "llava"}
ITEMS, QUICK_ITEMS = 100, 12  # of each split, and documents
_ROOT = Path(__file__).parents[2]
_CODE = [
    *Path(__file__).parent.glob("elastic*.py"),
    *(_ROOT / "prefill_workers" / name for name in ("compaction", "engine/compactor.py")),
]


class Part(StrEnum):
    """Part of the benchmark, measured as a whole."""

    answers = auto()
    perplexity = auto()
    continuations = auto()
    speed = auto()


TARGETS: dict[Part, dict[str, tuple[str, float]]] = {
    Part.answers: {
        "before_over_full": (">=", 0.97),
        "after_over_full": (">=", 0.85),
        "before_over_best": (">=", 1.0),
        "after_over_best": (">=", 1.0),
    },
    Part.perplexity: {"ppl_over_h2o": ("<=", 1.0), "ppl_over_local": ("<=", 1.0), "ppl_over_full": ("<=", 1.3)},
    Part.continuations: {},
    Part.speed: {"throughput_8k": (">=", 1.6), "concurrency": (">=", 4.0)},
}


def run(
    quick: bool,
    console: Console,
    items: int | None = None,
    work: Path | None = None,
    only: Collection[str] | None = None,
) -> Outcome:
    """Measure answers, text, speed and room, or some of these parts.

    Finished parts are kept in `work`, from where a run that was cut off goes on.

    Raises:
        FileNotFoundError: a part is asked for that needs SmolLM2, and it is not there.
    """
    parts = tuple(part for part in Part if not only or part in only)
    if {Part.perplexity, Part.continuations} & {*parts} and not (elastic_text.MODEL / "config.json").exists():
        raise FileNotFoundError(f"{elastic_text.MODEL} holds no model: `orbitserve fetch smollm2` writes it")
    count = items or (QUICK_ITEMS if quick else ITEMS)
    kept = Kept(work, (quick, count, versions()), digest_of(_CODE))
    os.environ.update(vllm_environment(kv_cache_gib=2, threads=1))
    torch.set_num_threads(1)
    tables: dict[str, dict[str, dict[str, float]]] = {}
    figures: dict[str, float] = {}
    with torch.inference_mode():
        if Part.answers in parts:
            by_kind = {}
            for kind, family in KINDS.items():
                budgets = (BUDGET,) if quick else BUDGETS
                measure = partial(elastic_answers.answers, family, count, budgets, console)
                by_kind[kind] = kept.once(kind, measure)
                for when, outcomes in by_kind[kind].items():
                    tables[f"{kind}: right answers, asked {when}"] = elastic_answers.shares(outcomes)
            figures |= elastic_answers.figures(by_kind, BUDGET)
        if Part.perplexity in parts:
            budgets = (BUDGET,) if quick else (0.5, BUDGET)
            losses = kept.once("perplexity", partial(elastic_text.perplexities, count, budgets, console))
            tables["perplexity of the next 64 tokens, SmolLM2"] = elastic_text.perplexity_table(losses)
            over = tables[f"our perplexity at budget {BUDGET:g}"] = elastic_text.ratios(losses, BUDGET)
            figures |= {f"ppl_{name.replace(' ', '_')}": row["ratio"] for name, row in over.items()}
        if Part.continuations in parts:
            alike = kept.once("continuations", partial(elastic_text.continuations, count, BUDGET, console))
            tables["ROUGE-L of 128 tokens with the full cache's, SmolLM2"] = elastic_answers.shares(alike)
        if Part.speed in parts:
            times = kept.once("speed", partial(elastic_speed.throughput, BUDGET, 3 if quick else 15, console))
            tables["ms of one step, CPU time"] = {f"batch {elastic_speed.BATCH}": times}
            figures["throughput_8k"] = times["full"] / times["budget"]
            figures["concurrency"] = elastic_speed.concurrency(BUDGET)
    workload = {
        "parts": [*parts],
        "models": KINDS | {"text": "smollm2", "speed": CHECKPOINT},
        "budget": BUDGET,
        "items_of_a_split": count,
        "documents": count,
        "context": elastic_speed.CONTEXT,
        "batch": elastic_speed.BATCH,
    }
    return Outcome(workload, [], figures, tables, axis="budget")


def applies(name: str, figures: Mapping[str, float]) -> bool:
    """True if a target's part was measured."""
    return any(name in targets and not targets.keys().isdisjoint(figures) for targets in TARGETS.values())


BENCHMARK = Benchmark(
    "elastic",
    "What answers and text lose when decode is given a fifth of a prompt's KV, against other ways to choose it.",
    run,
    {name: target for targets in TARGETS.values() for name, target in targets.items()},
    takes_items=True,
    takes_work=True,
    takes_only=tuple(Part),
    applies=applies,
)
