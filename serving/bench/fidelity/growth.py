"""Table 6: accuracy and time to the first token of the product's modes as pages grow in number (MPIC, Figs. 9 and 13).

The linker and the prefill loop themselves, in one process: a request in `exact` mode first, which teaches the library;
then the same request in every mode, in turns, with what it learnt in memory: `auto` so finds own patches of this order.
Time is from the plan to the answer's first token, which the worker draws.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from infra.reference.scenes import Form, Split
from serving.bench.fidelity.items import items
from serving.bench.fidelity.reader import Prompt
from serving.bench.fidelity.study import Study

if TYPE_CHECKING:
    from torch import Tensor

    from prefill_workers.linker import Linker
    from prefill_workers.worker import PrefillLoop

PAGES = (2, 4, 6, 8, 10)
MODES = ("exact", "auto", "full-reuse", "mpic-32", "cacheblend-15")
RANK = 16


def form(pages: int) -> Form:
    """Pages of 144 tokens."""
    return Form(pages, 4, 36)


class Modes:
    """A prefill worker in this process, whose requests are a reader's prompts."""

    def __init__(self, study: Study, linker: Linker, loop: PrefillLoop) -> None:
        self.study, self.linker, self.loop = study, linker, loop

    def ask(self, prompt: Prompt, mode: str) -> tuple[float, int]:
        """Milliseconds until the answer's first token is there, and the token."""
        from prefill_workers.first_token import Sampling
        from prefill_workers.plan import LinkRequest, PixelsNeeded
        from prefill_workers.policies import Mode
        from prefill_workers.worker import drain

        tokens = prompt.token_ids[: len(prompt) - len(prompt.answer) + 1]
        chunks = tuple(place.page.chunk(place.start) for place in prompt.places)
        request = LinkRequest("bench", tokens.tolist(), chunks, Mode.parse(mode), sampling=Sampling())
        began = time.perf_counter()
        try:
            plan = self.linker.plan(request)
        except PixelsNeeded as needed:
            given: dict[int, Tensor] = {i: prompt.places[i].page.embeddings for i in needed.chunks}
            plan = self.linker.plan(request, given)
        result = self.loop.submit(plan).result()
        took = (time.perf_counter() - began) * 1e3
        drain(self.loop)
        self.linker.library.flush()
        self.loop.abandon(result.lease)
        assert result.first_token is not None  # it was asked for
        return took, result.first_token


@contextmanager
def modes(study: Study) -> Iterator[Modes]:
    """A worker with an empty library in memory."""
    from kvstore.library import Library
    from kvstore.patch_form import PatchForm
    from kvstore.settings import LibrarySettings
    from prefill_workers.linker import Linker
    from prefill_workers.patch_compiler import PatchCompiler
    from prefill_workers.settings import CompileLimits
    from prefill_workers.worker import PrefillLoop

    engine, patches = study.reader.engine, PatchForm(RANK)
    with Library(LibrarySettings(directory=None), engine.fingerprint) as library:
        linker = Linker(engine, library, patches, PatchCompiler(library, patches).compile)
        loop = PrefillLoop(
            engine, linker, budget=4096, max_queue=4, lease_seconds=600, owner="bench",
            compiles=CompileLimits(orbit_chunks=0), patience_seconds=0.0,
        )  # fmt: skip
        loop.start()
        try:
            yield Modes(study, linker, loop)
        finally:
            loop.stop()


def growth(study: Study, pages: int, count: int) -> dict[str, tuple[list[bool], list[float]]]:
    """By mode, of `count` multi-hop items of that many pages: whether its answer is right, and after how many ms."""
    right: dict[str, list[bool]] = defaultdict(list)
    took: dict[str, list[float]] = defaultdict(list)
    with modes(study) as worker:
        for number, item in enumerate(items(study.reader, study.kind, Split.multi, count, form(pages))):
            prompt = item.prompt(study.reader)
            worker.ask(prompt, "exact")
            for mode in MODES if number % 2 else reversed(MODES):
                ms, answered = worker.ask(prompt, mode)
                took[mode].append(ms)
                right[mode].append(answered == prompt.answer[0])
    return {mode: (right[mode], took[mode]) for mode in MODES}
