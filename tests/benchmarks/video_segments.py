"""Answers about drawn videos over one clip, over its segments, and over their stored KV.

A video shows a scene a second: things that move, change their colour, leave, and come back in pencil, as on the pages
of the fidelity tables (`infra.reference.scenes`). A question asks for a thing's colour. All arms see the same frames.

| arm | what is linked |
|---|---|
| images | every scene as a picture: what the models were trained on; exact |
| whole | one clip, computed in context |
| segments | the clip cut into segments, each a chunk, computed in context |
| patch_16 | the segments' canonical KV with own patches of rank 16 |
| blind | their canonical KV, relocated |

KL and agreement compare the answer with that over the whole clip; `of segments` with that over segments computed in
context, which is what reuse loses beside the cut. The reference models were trained on pictures and never on videos: a
scene that stands still for a second is to their towers what a picture is, its times are new to their language models.
"""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track

from infra.reference import WEIGHTS, digest
from infra.reference.families import FAMILIES
from infra.reference.scenes import Form, Split
from infra.vllm_env import vllm_environment
from serving.bench.harness import UNCERTAINTY, Benchmark, Outcome
from serving.documents.video import video_metadata

if TYPE_CHECKING:
    from serving.bench.fidelity.reader import Page, Prompt, Read, Reader
    from serving.bench.fidelity.scores import Scores

KINDS = {"gqa": "qwen2_5_vl", "deepstack": "qwen3_vl"}
SPLITS = (Split.single, Split.multi, Split.frames)
FORM = Form(6, 6, 6)  # scenes of a video, things of each, cells that show a thing
SEGMENT_SECONDS, FPS = 2, 2
RANK = 16
_BATCH = 8
Frames = tuple[NDArray[np.uint8], dict[str, Any]]


def run(quick: bool, console: Console, items: int | None = None) -> Outcome:
    """Measure both families' reference models."""
    os.environ.update(vllm_environment(kv_cache_gib=1, threads=len(os.sched_getaffinity(0))))
    from serving.bench.fidelity.reader import Reader

    count = items or (8 if quick else 100)
    figures: dict[str, float] = {}
    tables: dict[str, dict[str, dict[str, float]]] = {}
    for kind, family in KINDS.items():
        console.print(f"[bold]{kind}[/bold]: starting an engine for {family}")
        reader = Reader(WEIGHTS / family)
        # vLLM would say at every clip that an engine in the same process keeps its threads.
        logging.getLogger("vllm.v1.worker.cpu_worker").setLevel(logging.ERROR)
        try:
            with torch.inference_mode():
                for split in SPLITS:
                    table = table_of(reader, family, split, count, console)
                    tables[f"{kind}: {split}"] = table
                    figures |= {
                        f"{kind}.{split}.{arm}.{name}": value
                        for arm, cells in table.items()
                        for name, value in cells.items()
                        if not name.endswith(UNCERTAINTY)
                    }
        finally:
            reader.close()
    workload = {
        "models": {family: digest(WEIGHTS / family) for family in KINDS.values()},
        "trained_on_video": False,
        "items": count,
        "seconds": FORM.pages,
        "segment_seconds": SEGMENT_SECONDS,
        "fps": FPS,
        "tokens_a_second": FORM.cells,
    }
    return Outcome(workload, [], figures, tables)


def table_of(reader: Reader, family: str, split: Split, count: int, console: Console) -> dict[str, dict[str, float]]:
    """Accuracy, KL and agreement by arm, over `count` videos."""
    from serving.bench.fidelity.items import items
    from serving.bench.fidelity.scores import Scores

    by_whole: dict[str, Scores] = defaultdict(Scores)
    by_segments: dict[str, Scores] = defaultdict(Scores)
    drawn = items(reader, FAMILIES[family], split, count, FORM)
    for _ in track(range(-(-count // _BATCH)), f"  {split}", console=console, transient=True):
        group = list(islice(drawn, _BATCH))
        asked = [(item.question, item.answer) for item in group]
        cut = [segments(reader, item.pictures) for item in group]
        whole = [reader.clips([frames_of(item.pictures, 0, FORM.pages)]) for item in group]
        images = reader.exact([item.prompt(reader) for item in group], keep=())
        prompts = [reader.prompt(clips, *words) for clips, words in zip(cut, asked, strict=True)]
        exact = reader.exact(prompts)
        over = reader.exact([reader.prompt(clip, *words) for clip, words in zip(whole, asked, strict=True)], keep=())
        found = {"images": images, "whole": over, "segments": exact, **reused(reader, prompts, exact)}
        for arm, reads in found.items():
            for read, one, parts, prompt in zip(reads, over, exact, prompts, strict=True):
                by_whole[arm].add(read.answers, one.answers, prompt.answer)
                by_segments[arm].add(read.answers, parts.answers, prompt.answer)
    return {arm: _row(arm, by_whole, by_segments) for arm in by_whole}


def segments(reader: Reader, pictures: Sequence[Any]) -> list[Page]:
    """A video's segments as chunks."""
    starts = range(0, FORM.pages, SEGMENT_SECONDS)
    return reader.clips([frames_of(pictures, start, start + SEGMENT_SECONDS) for start in starts])


def frames_of(pictures: Sequence[Any], start: int, stop: int) -> Frames:
    """The frames of a video between two seconds; each of `pictures` is shown for one."""
    shown = [np.asarray(picture) for picture in pictures[start:stop] for _ in range(FPS)]
    return np.stack(shown), video_metadata(range(start * FPS, stop * FPS), FPS, FORM.pages * FPS)


def reused(reader: Reader, prompts: Sequence[Prompt], exact: Sequence[Read]) -> dict[str, list[Read]]:
    """Answers over the segments' stored KV, with patches and without."""
    from kvstore.operator.apply import apply
    from kvstore.operator.patch import deficit, form_patch

    layout = reader.engine.layout
    alone = iter(reader.alone([place for prompt in prompts for place in prompt.places]))
    canonical = [[next(alone) for _ in prompt.places] for prompt in prompts]
    patched = [
        [
            apply(stored, form_patch(deficit(kv, stored), layout, RANK, dtype=stored.dtype), 0, layout)
            for kv, stored in zip(read.pages, parts, strict=True)
        ]
        for read, parts in zip(exact, canonical, strict=True)
    ]
    return {f"patch_{RANK}": reader.over(prompts, patched), "blind": reader.over(prompts, canonical)}


def _row(arm: str, by_whole: dict[str, Scores], by_segments: dict[str, Scores]) -> dict[str, float]:
    """One arm's cells; `x ±` is half of the 95 % interval of `x`."""
    from serving.bench.fidelity.scores import average

    own = by_whole[arm]
    values: dict[str, Sequence[float]] = {
        "accuracy": own.right,
        "kl": own.kl,
        "agreement": _agree(own, by_whole["whole"]),
    }
    if arm not in ("images", "whole"):
        values |= {"kl of segments": by_segments[arm].kl, "agreement of segments": _agree(own, by_whole["segments"])}
    found = {name: average(list(map(float, several))) for name, several in values.items()}
    return {name: one.value for name, one in found.items()} | {
        f"{name} {UNCERTAINTY}": one.uncertainty for name, one in found.items()
    }


def _agree(one: Scores, other: Scores) -> list[bool]:
    return [ours == theirs for ours, theirs in zip(one.top, other.top, strict=True)]


BENCHMARK = Benchmark(
    "video-segments",
    "What cutting a clip into segments changes in answers about drawn videos, and what patches and blind reuse lose.",
    run,
    {},
    takes_items=True,
)
