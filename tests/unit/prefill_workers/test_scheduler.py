"""Links under way in one loop, whatever their forwards compute: what one that fails costs the others."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from prefill_workers.engine.engine import PrefillEngine
from prefill_workers.link.linker import Linker
from prefill_workers.link.plan import ChunkPlan, LinkPlan
from prefill_workers.modes import OperatingPoint
from prefill_workers.protocol import ChunkOutcome, ChunkSpan, LinkRequest
from prefill_workers.scheduler.cost_model import ForwardCostModel
from prefill_workers.scheduler.link_job import LinkJob
from prefill_workers.scheduler.scheduler import LinksUnderWay
from prefill_workers.sequence import LinkSequence, Run


class Engine:
    """Fails forwards over some sequences."""

    accepts_layerwise_kv = False

    def __init__(self) -> None:
        self.broken: set[LinkSequence] = set()
        self.computed: list[tuple[LinkSequence, list[Run]]] = []
        self.finished_writes = 0

    def forward(self, work: Sequence[tuple[LinkSequence, list[Run]]], *_: Any) -> None:
        if any(sequence in self.broken for sequence, _ in work):
            raise RuntimeError("injected")
        self.computed += work

    def finish_writes(self) -> None:
        self.finished_writes += 1


def job(tokens: int, reused: int = 0) -> LinkJob:
    """A link of a prompt, of which a stored chunk is the first `reused` tokens."""
    chunks = []
    if reused:
        span = ChunkSpan("content", "image", 0, reused, 0, reused)
        chunks.append(ChunkPlan(span, "key", "patch", (), 0, ChunkOutcome(reused, OperatingPoint.PATCHED, 0, "")))
    sequence = LinkSequence(torch.zeros(tokens, dtype=torch.int32), torch.arange(tokens), ())
    return LinkJob(LinkPlan(LinkRequest("request", [0] * tokens), sequence, chunks), Future(), 0.0)


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def freed() -> list[LinkJob]:
    return []


@pytest.fixture
def links(engine: Engine, freed: list[LinkJob]) -> LinksUnderWay:
    linker = cast(Linker, SimpleNamespace(advance=lambda plan: None))
    cost_model = ForwardCostModel(fixed=0.0, seconds_per_token=1e-6)  # nobody joins another's forward
    return LinksUnderWay(cast(PrefillEngine, engine), linker, cost_model, 4096, freed.append)


def test_a_forward_that_fails_fails_the_links_in_it_alone(links: LinksUnderWay, engine: Engine, freed: list[LinkJob]):
    wrong, right = job(10), job(100)
    for one in (right, wrong):
        links.add(one)
    engine.broken.add(wrong.plan.sequence)
    assert links.turn() == []
    with pytest.raises(RuntimeError, match="injected"):
        wrong.done.result(0)
    assert (list(links), freed, links.failing) == ([right], [wrong], 1)
    assert not right.done.done()
    assert right.pending == [Run(0, 100)], "it has lost nothing"
    assert links.turn() == [right]
    assert (engine.computed, links.failing) == ([(right.plan.sequence, [Run(0, 100)])], 0)


def test_what_was_written_for_another_link_is_there_before_it_ends_although_the_forward_failed(
    links: LinksUnderWay, engine: Engine
):
    wrong, written = job(10), job(50, reused=50)
    for one in (wrong, written):
        links.add(one)
    engine.broken.add(wrong.plan.sequence)
    assert links.turn() == [written]
    assert engine.finished_writes == 1
