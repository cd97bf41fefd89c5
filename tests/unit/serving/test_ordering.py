"""Which chunks of a request may trade places, and what a request is told about it."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from kvstore.catalog.index import Entry, Scope, prefix_key
from prefill_workers.modes import FreeText, Text
from serving.api import ordering
from serving.api.ordering import Ordering, ordered, words_by_place
from serving.frontend.documents import Documents
from serving.frontend.report import ChunkReport, OrbitOptions, RequestTrace
from serving.placement import search as placement
from serving.placement.orderer import PatchAwareOrderer
from serving.placement.search import Placement, Problem


class Tokenizer:
    def encode(self, text: str, **options: Any) -> list[int]:
        return list(text.encode())


DOCUMENTS = Documents(Tokenizer())


def image(content: str) -> dict[str, Any]:
    return {"type": "image_pil", "image_pil": None, "uuid": content}


def document(content: str) -> dict[str, Any]:
    return {"type": "text", "text": DOCUMENTS.mark(content, f"text of {content}")}


def said(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def message(*parts: Any, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": list(parts)}


def read(*messages: Any) -> Ordering:
    return Ordering(list(messages), DOCUMENTS)


def test_text_is_looked_through_as_far_as_that_takes_no_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("serving.api.ordering._MOST_TEXT", 100)
    for words, reason in (("Well?", "the cheapest order found"), ("x" * 101, "more than 100 characters of text")):
        trace = RequestTrace(OrbitOptions(order="free"))
        asyncio.run(ordered(read(message(image("a"), image("b"), said(words))), trace, PatchAwareOrderer()))
        assert trace.report.order is not None
        assert trace.report.order.reason.startswith(reason)


def test_chunks_trade_places_where_no_words_stand_between_them():
    request = read(
        message(image("sys"), image("tem"), role="system"),
        {"role": "user", "content": "plain"},
        message(image("a"), said(" \n"), document("d"), said("And those:"), image("b"), image("c"), said("What now?")),
        message(image("e"), said("Well?"), role="assistant"),
        message(image("f"), said("and"), image("g")),
        message(image("h"), image("i")),
    )
    assert request.contents == ["sys", "tem", "a", "d", "b", "c", "e", "f", "g", "h", "i"]
    a, d, b, c = request.groups[2:6]
    assert a == d != b == c
    assert None not in (a, b)
    assert request.groups[:2] + request.groups[6:9] == [None] * 5
    assert request.groups[9] == request.groups[10] not in (a, b, None)
    assert request.texts == ["plain", " \n", "And those:", "What now?", "Well?", "and"]


def test_much_text_before_the_first_chunk_keeps_the_order_of_all():
    system, words = message(said("system " * 50), role="system"), said("word " * 20)
    for free, known in ((19, 0), (20, 2)):
        request = read(system, message(words, image("a"), image("b")))
        assert request.before_text(Text.AUTO, FreeText(between=8, before=free)) == known
    request = read(system, {"role": "user", "content": "one two"}, {"role": "assistant", "content": "three"},
                   message(image("a")))  # fmt: skip
    assert request.before == 3 + 2 * 4, "and what a template writes between turns"
    assert read(system, message(image("a"))).before == 0


def test_only_the_parts_that_trade_places_move():
    messages = [message(said("Look:"), image("a"), document("d"), said("What?")), {"role": "user", "content": "Well?"}]
    request = Ordering(messages, DOCUMENTS)
    moved = request.in_order([1, 0])
    assert moved == [message(said("Look:"), document("d"), image("a"), said("What?")), messages[1]]
    assert messages[0]["content"][1] == image("a"), "the request's own messages stay as they were"
    assert request.in_order([0, 1]) == messages


@pytest.mark.parametrize(
    "text",
    [
        "What is on the second image?",
        "Compare the first two pages.",
        "Look at image 2.",
        "As page #3 says",
        "In Figure B, what is red?",
        "What changed between the first and the last?",
        "The former shows a cat.",
        "Name their colours, respectively.",
        "Describe them in this order.",
        "Describe the 3rd picture",
        "Is the last one sharper than the previous screenshot?",
        "Compare the  first\n two\tpages.",
        "In  this \n order, please",
        "Which is newer, the first \n",
        "Is the left image brighter than the right one?",
        "Compare the top picture with the one on the left.",
        "Does the leftmost chart agree with the lower figure?",
        "Does the image above show what the one below shows?",
        "What differs between the first two?",
        "Describe the picture in the top left and the image to its right.",
        "Summarise the pages in the order given.",
        "Describe them in the order in which I sent them.",
        "Caption each picture, in the order they appear.",
        "Name them in the order shown.",
        "In the order sent, what do they say?",
        "In what order were these taken?",
        "Describe them in the order of their\nupload.",
        "Describe them in their original order.",
        "Keep their order.",
        "Please preserve the order of the pages",
        "What is in the image on top?",
        "Describe the image at left.",
        "What does the image at the beginning show?",
        "And the page at the very end?",
        "Describe the one in the middle, please.",
    ],
)
def test_words_that_name_chunks_by_their_place_are_found(text: str):
    assert words_by_place(["Hello.", text]) is not None


@pytest.mark.parametrize(
    "text",
    [
        "What do these images show?",
        "Look at the following pages.",
        "In order to answer, read the documents.",
        "Which page mentions the contract? Does any image a user sent show it?",
        "What does the contract say first?",
        "Which documents after 2019 mention it?",
        "What does the contract of the last two years say at the top, on the left?",
        "In  order \n to answer",
        "How many items are in the order? Who signed the purchase order, and what was on order then?",
        "Does the order name a customer, and does the document say what is in the order and in their orders?",
        "What is the sum at the end of the document?",
        "Does any image show a shop that keeps orders, or the order form?",
        "Read the pages to the end, in any order.",
        "",
    ],
)
def test_other_words_are_not(text: str):
    assert words_by_place([text]) is None


@pytest.mark.parametrize("space", [" ", "\n", " \n\t"])
@pytest.mark.parametrize(
    "before",
    [
        *("image", "image no.", "in", "in the", "the first", "the second word", "the first two", "the left", "first"),
        *("in the order", "in the very", "in their", "keep", "keep the", "keep the word", "image at", "image at the"),
    ],
)
def test_long_white_space_costs_no_time(before: str, space: str):
    began = time.process_time()
    assert words_by_place([f"{before}{space * 200_000}x"]) is None
    assert time.process_time() - began < 1


@pytest.mark.parametrize("words", ["in the order ", "in the very ", "keep the ", "the image at the ", "keep"])
def test_long_text_costs_no_time(words: str):
    began = time.process_time()
    assert words_by_place([words * 20_000]) is None
    assert words_by_place([words + "x" * 200_000]) is None
    assert time.process_time() - began < 1


def asked(orderer: PatchAwareOrderer, *messages: Any, **options: Any) -> tuple[list[str], RequestTrace]:
    trace = RequestTrace(OrbitOptions(**options))
    moved = asyncio.run(ordered(read(*messages), trace, orderer))
    return read(*moved).contents, trace


def orderer_with(*entries: tuple[str, tuple[str, ...]]) -> PatchAwareOrderer:
    orderer = PatchAwareOrderer()
    orderer.formed(Entry(Scope("local", prefix_key(())), *entry, ordered=True) for entry in entries)
    return orderer


def test_a_long_search_leaves_the_event_loop_alone(monkeypatch: pytest.MonkeyPatch):
    threads: list[threading.Thread] = []

    def place(problem: Problem) -> Placement:
        threads.append(threading.current_thread())
        return placement.place(problem)

    monkeypatch.setattr(ordering, "place", place)
    for pages in (placement.EXACT, placement.EXACT + 1):
        many = message(*(image(str(page)) for page in range(pages)), said("What?"))
        order, trace = asked(PatchAwareOrderer(), many, order="free", explain=True)
        assert len(order) == len(trace.costs) == pages
    assert [thread is threading.main_thread() for thread in threads] == [True, False]


PAGES = message(image("a"), image("b"), said("What?"))


def test_a_free_order_is_the_one_that_stored_patches_fit():
    order, trace = asked(orderer_with(("b", ()), ("a", ("b",))), PAGES, order="free")
    assert order == ["b", "a"]
    assert trace.document()["order"] == {"chunks": [1, 0], "reason": "the cheapest order found"}
    assert trace.groups == [0, 0]


def test_nothing_moves_unless_it_is_asked_for():
    order, trace = asked(orderer_with(("b", ()), ("a", ("b",))), PAGES)
    assert order == ["a", "b"]
    assert "order" not in trace.document()
    assert trace.groups == []


@pytest.mark.parametrize(
    ("messages", "options", "reason"),
    [
        ([PAGES], {"mode": "exact"}, "mode exact uses no patches"),
        ([PAGES], {"mode": "full-reuse"}, "mode full-reuse uses no patches"),
        ([PAGES, message(said("The last page?"))], {}, "names chunks by their place: 'last page'"),
        ([message(image("a"), said("and"), image("b"))], {}, "without words between"),
    ],
)
def test_why_an_order_was_kept_is_said(messages: list[Any], options: dict[str, Any], reason: str):
    order, trace = asked(orderer_with(("b", ()), ("a", ("b",))), *messages, order="free", **options)
    assert order == ["a", "b"]
    assert trace.report.order is not None
    assert trace.report.order.chunks == [0, 1]
    assert reason in trace.report.order.reason


def test_every_request_counts_for_popularity():
    orderer = PatchAwareOrderer()
    asked(orderer, message(image("b"), said("?")))
    assert asked(orderer, PAGES, order="free")[0] == ["b", "a"]
    assert orderer.popularity.asked("local", "a") == pytest.approx(1), "once"


def test_an_explanation_has_every_chunks_cost_and_the_best_rejected_order():
    orderer = orderer_with(("b", ()), ("a", ("b",)))
    _, trace = asked(orderer, PAGES, order="free", explain=True)
    report = trace.report.order
    assert report is not None
    patched, computed = (orderer.costs.of(256, patched=patched) / 1e6 for patched in (True, False))
    assert report.cost_ms == pytest.approx(2 * patched, abs=1e-3)
    assert report.arrival_ms == pytest.approx(2 * computed, abs=1e-3)
    first, second = trace.costs
    assert first.alternative is not None
    assert first.alternative.chunk == 0
    assert first.alternative.order_ms == report.arrival_ms
    assert second.alternative is not None, "it might be computed"
    assert (second.alternative.chunk, second.alternative.operating_point) == (0, "computed")
    linked = ChunkReport(index=1, tokens=256, operating_point="recomputed", antecedents=1, reason="evicted")
    assert second.of(linked).cost_ms == pytest.approx(computed, abs=1e-3), "what it was, not what was expected"


@pytest.mark.parametrize(
    ("mode", "point", "cost"), [("full-reuse", "relocated", "placed_ms"), ("exact", "recomputed", "computed_ms")]
)
def test_a_chunk_costs_what_was_done_with_it(mode: str, point: str, cost: str):
    _, trace = asked(orderer_with(("a", ())), PAGES, mode=mode, explain=True)
    assert trace.report.order is not None
    assert trace.report.order.cost_ms is None, "no order costs less than another without patches"
    linked = ChunkReport(index=0, tokens=256, operating_point=point, antecedents=0, reason="")
    (first, _) = trace.costs
    assert first.of(linked).cost_ms == round(getattr(first, cost), 3)
    assert first.placed_ms < first.computed_ms
    selected = linked.model_copy(update={"operating_point": "selected"})
    assert first.of(selected).cost_ms is None, "which tokens are computed is not known beforehand"


def test_a_rejected_sum_is_called_one():
    pairs = [(page, before) for page in "cd" for before in ((), ("a",), ("b",))]
    orderer = orderer_with(("a", ()), ("b", ("a",)))
    orderer.formed(Entry(Scope("local", prefix_key(())), *entry, ordered=False) for entry in pairs)
    orderer.compose_up_to = 2
    _, trace = asked(orderer, message(*map(image, "abcd"), said("?")), order="free", explain=True)
    assert trace.report.order is not None
    third = trace.costs[2].alternative
    assert third is not None
    assert (trace.report.order.chunks[2], third.chunk) in ((2, 3), (3, 2)), "either is summed behind a and b"
    assert third.operating_point == "composed"
    assert third.cost_ms == trace.costs[2].summed_ms
    assert trace.costs[2].placed_ms < trace.costs[2].summed_ms < trace.costs[2].computed_ms
    linked = ChunkReport(index=2, tokens=256, operating_point="composed", antecedents=2, reason="")
    assert trace.costs[2].of(linked).cost_ms == round(trace.costs[2].summed_ms, 3)


def test_modes_without_patches_are_explained_without_them():
    _, trace = asked(orderer_with(("a", ())), PAGES, mode="exact", explain=True)
    assert [costs.alternative for costs in trace.costs] == [None, None]
