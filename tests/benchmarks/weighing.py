"""Time to weigh a sum of pair patches: a request whose pairs are stored, in a new order.

| arm       | what weighs                                                                                  |
|-----------|----------------------------------------------------------------------------------------------|
| known     | nothing: the order came before, its weights are remembered                                   |
| attention | the first layer's queries and keys of the pages                                              |
| kv        | a forward over the pages through the first layer and to the second's KV                      |
| exact     | nothing is reused: the pages' embeddings are there, everything else is computed              |

KV and patches are random, so what comes out means nothing; what is timed does the same as with real ones.
"""

from __future__ import annotations

import os
import statistics
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console

from infra.checkpoints import checkpoint_path
from infra.vllm_env import vllm_environment
from serving.bench.harness import Arm, Benchmark, Outcome, clock_ms, in_turns
from serving.bench.models import CHECKPOINT
from serving.bench.worker import TENANT, Prompt, Worker, prompt_over, worker
from serving.loadtest.images import noise

if TYPE_CHECKING:
    from kvstore.library import Library
    from prefill_workers.engine.engine import PrefillEngine

PAGES, RANK = 4, 32
SIZES = (256, 512)
_DESCRIPTIONS = {
    "known": "weights remembered",
    "attention": "weighed by the first layer's queries and keys",
    "kv": "weighed by the second layer's KV",
    "exact": "every page computed, none encoded",
}


def run(quick: bool, console: Console) -> Outcome:
    """Measure every page size, the arms in turns."""
    os.environ.update(vllm_environment(kv_cache_gib=1, threads=os.cpu_count()))
    from prefill_workers.engine.engine import PrefillEngine
    from prefill_workers.engine.spec import EngineSpec

    console.print("starting a prefill engine")
    engine = PrefillEngine(EngineSpec(model=str(checkpoint_path(CHECKPOINT)), max_model_len=4096, hand_off=False))
    sizes, turns = (SIZES[:1], 3) if quick else (SIZES, 15)
    samples: dict[str, dict[str, list[float]]] = {name: {} for name in _DESCRIPTIONS}
    figures: dict[str, float] = {}
    try:
        for tokens in sizes:
            times, weighed = _measured(engine, tokens, turns)
            for name in _DESCRIPTIONS:
                samples[name][str(tokens)] = times[name]
            medians = {name: statistics.median(times[name]) for name in _DESCRIPTIONS}
            for name in ("attention", "kv"):
                figures[f"weighing_ms_{name}_{tokens}"] = statistics.median(weighed[name])
                figures[f"{name}_over_known_{tokens}"] = medians[name] / medians["known"]
            figures[f"weighing_over_kv_{tokens}"] = (
                figures[f"weighing_ms_attention_{tokens}"] / figures[f"weighing_ms_kv_{tokens}"]
            )
            console.print(f"  {PAGES} pages of {tokens} tokens done")
    finally:
        engine.shutdown()
    workload = {"model": CHECKPOINT, "dtype": "bfloat16", "pages": PAGES, "page_tokens": sizes, "rank": RANK}
    return Outcome(workload, [Arm(name, text, samples[name]) for name, text in _DESCRIPTIONS.items()], figures)


def _measured(engine: PrefillEngine, tokens: int, turns: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Milliseconds of a link in every turn by arm, and of its weighing."""
    from kvstore.library import Library
    from kvstore.records.patch_form import PatchForm
    from kvstore.settings import LibrarySettings
    from prefill_workers.settings import Weighing

    prompt = prompt_over(engine, [noise(tokens, number) for number in range(PAGES)])
    weighed: dict[str, list[float]] = {str(way): [] for way in Weighing}
    with ExitStack() as stack:
        library = stack.enter_context(Library(LibrarySettings(directory=None), engine.fingerprint))
        form = PatchForm(RANK)
        workers = {
            str(way): stack.enter_context(
                worker(engine, library, form, learns=False, composing={"compose_up_to": PAGES - 1, "weigh_by": way})
            )
            for way in Weighing
        }
        first = workers[Weighing.KV]
        _fill(engine, library, first, prompt)

        def link(name: str, *, forget: bool, asked: Prompt = prompt) -> float:
            opened = workers[name]
            if forget:
                opened.linker.forgets.start("", TENANT)
            results: list[Any] = []
            taken = clock_ms(lambda: results.append(opened.link(asked)))
            points = [str(chunk.operating_point) for chunk in results[0].chunks]
            if asked is prompt and points != ["patched"] * 2 + ["composed"] * (PAGES - 2):
                raise RuntimeError(f"not linked as they should be: {results[0].chunks}")
            if forget:
                weighed[name].append(results[0].stages_ms["select"])
            return taken

        arms = {
            "known": lambda: link("kv", forget=False),
            "attention": lambda: link("attention", forget=True),
            "kv": lambda: link("kv", forget=True),
            "exact": lambda: link("kv", forget=False, asked=prompt.in_mode("exact")),
        }
        link("kv", forget=True)
        in_turns(arms, 1)
        for taken in weighed.values():
            taken.clear()
        return in_turns(arms, turns), weighed


def _fill(engine: PrefillEngine, library: Library, opened: Worker, prompt: Prompt) -> None:
    """Store every page's embeddings, random KV, and random pair patches behind earlier pages.

    And one behind nothing.
    """
    from kvstore.operator.patch import PatchKind
    from kvstore.records.record import CanonicalRecord, EmbeddingRecord, PatchRecord

    generator, layout = torch.Generator().manual_seed(0), engine.layout
    common: dict[str, Any] = {"fingerprint": engine.fingerprint, "tenant": TENANT}
    chunks = prompt.request.chunks
    embeddings = engine.encode(prompt.items)
    for keys, chunk, rows in zip(opened.linker.keys(prompt.request), chunks, embeddings, strict=True):
        shape = (layout.layers, len(chunk), layout.features)
        kv = torch.randn(shape, generator=generator).to(engine.dtype)
        library.put(CanonicalRecord(key=keys.canonical, kv=kv, layout=layout, **common))
        assert keys.embedding is not None
        library.put(EmbeddingRecord(key=keys.embedding, embeddings=rows, **common))
        for key in keys.parts or (keys.own_patch,):
            delta = torch.randn(shape, generator=generator)
            kind = PatchKind.pair if keys.parts else PatchKind.own
            patch = opened.linker.form.form(delta, layout, kind, engine.dtype)
            library.put(PatchRecord(key=key, patch=patch, layout=layout, **common))
    library.flush()


BENCHMARK = Benchmark(
    "weighing",
    "A request whose pairs are all known in an order that is new: by what its sums are weighed.",
    run,
    {f"weighing_over_kv_{SIZES[0]}": ("<=", 0.5)},
)
