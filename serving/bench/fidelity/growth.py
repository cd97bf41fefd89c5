"""Table 6: accuracy and TTFT of the modes as pages grow in number (MPIC, Figs. 9 and 13).

The linker and the prefill loop themselves, in one process: a request in `exact` mode first, which teaches the library;
then the same request in every mode, in turns, with what it learnt in memory: `auto` so finds own patches of this order.
Time is from the plan to the answer's first token, which the worker draws; pictures come as processed pixels, which
`off`, that looks nothing up, encodes.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from infra.reference.scenes import Form, Split
from serving.bench import worker as workers
from serving.bench.fidelity.items import items
from serving.bench.fidelity.reader import Prompt
from serving.bench.fidelity.study import Study

if TYPE_CHECKING:
    from prefill_workers.protocol import LinkRequest

PAGES = (2, 4, 6, 8, 10)
MODES = ("off", "exact", "auto", "full-reuse", "mpic-32", "cacheblend-15")
RANK = 16


def form(pages: int) -> Form:
    """Pages of 144 tokens."""
    return Form(pages, 4, 36)


@contextmanager
def worker(study: Study) -> Iterator[workers.Worker]:
    """A prefill worker in this process, with an empty library in memory."""
    from kvstore.library import Library
    from kvstore.records.patch_form import PatchForm
    from kvstore.settings import LibrarySettings
    from prefill_workers.patches.patch_compiler import PatchCompiler
    from prefill_workers.settings import CompileLimits

    engine, patches = study.reader.engine, PatchForm(RANK)
    limits = CompileLimits(orbit_chunks=0)
    with Library(LibrarySettings(directory=None), engine.fingerprint) as library:
        compiler = PatchCompiler(library, patches).compile
        with workers.worker(engine, library, patches, compiler, compiles=limits, patience_seconds=0.0) as opened:
            yield opened


def request(prompt: Prompt) -> LinkRequest:
    """A reader's prompt, up to its predicted answer, as a request for the likeliest token."""
    from prefill_workers.protocol import LinkRequest, Sampling

    tokens = prompt.token_ids[: len(prompt) - len(prompt.answer) + 1]
    chunks = tuple(place.page.chunk(place.start) for place in prompt.places)
    return LinkRequest("bench", tokens.tolist(), chunks, sampling=Sampling(), head=prompt.head)


def ask(opened: workers.Worker, prompt: workers.Prompt) -> tuple[float, int]:
    """Milliseconds until the answer's first token is there, and the token."""
    began = time.perf_counter()
    result = opened.link(prompt)
    took = (time.perf_counter() - began) * 1e3
    opened.settle()
    assert result.first_token is not None  # it was asked for
    return took, result.first_token


def growth(study: Study, pages: int, count: int) -> dict[str, tuple[list[bool], list[float]]]:
    """Correctness and milliseconds by mode, of `count` multi-hop items of that many pages."""
    right: dict[str, list[bool]] = defaultdict(list)
    took: dict[str, list[float]] = defaultdict(list)
    with worker(study) as opened:
        for number, item in enumerate(items(study.reader, study.kind, Split.multi, count, form(pages))):
            prompt = item.prompt(study.reader)
            asked = workers.Prompt(request(prompt), [page.pixels for page in item.pages])
            ask(opened, asked.in_mode("exact"))
            for mode in MODES if number % 2 else reversed(MODES):
                ms, answered = ask(opened, asked.in_mode(mode))
                took[mode].append(ms)
                right[mode].append(answered == prompt.answer[0])
    return {mode: (right[mode], took[mode]) for mode in MODES}
