"""Retrieval over the whole service: a PDF goes in, its pages are found, linked, and linked again."""

from __future__ import annotations

import pytest
from client import Service, user
from pdf_support import pdf

pytestmark = pytest.mark.service

MANUAL = pdf(["Chapter one", "Bolts and nuts"], ["Chapter two", "The carburettor mixes air and fuel"], ["Index"])


def test_a_page_is_found_by_its_words_and_linked_by_the_next_question(service: Service):
    client = service.openai()
    store = client.vector_stores.create(name="manuals").id
    added = client.vector_stores.files.upload_and_poll(vector_store_id=store, file=("manual.pdf", MANUAL))
    assert added.status == "completed", added.last_error
    best, *_ = client.vector_stores.search(store, query="how is fuel mixed with air?")
    assert best.file_id == added.id
    assert (best.model_extra or {})["page"] == 2

    asked = {"retrieve": {"vector_store_ids": [store], "query": "carburettor", "max_num_results": 1}}
    reports = []
    for words in ("What mixes air and fuel?", "And what does chapter two say of it?"):
        reports.append(service.chat(user(words), orbit=asked)["orbit"])
        service.settle()
    for report in reports:
        assert [(one["file_id"], one["page"]) for one in report["retrieval"]["results"]] == [(added.id, 2)]
        assert len(report["chunks"]) == 1
    first, second = reports
    assert first["vision_tokens_encoded"] > 0
    assert second["vision_tokens_encoded"] == 0
    assert second["tokens_reused"] >= second["chunks"][0]["tokens"]
    client.vector_stores.delete(store)
    client.files.delete(added.id)


def test_an_answer_searches_before_it_goes_on(ingresses: Service):
    service, client = ingresses, ingresses.openai()
    store = client.vector_stores.create(name="manuals").id
    added = client.vector_stores.files.upload_and_poll(vector_store_id=store, file=("manual.pdf", MANUAL))
    tool = {"type": "file_search", "vector_store_ids": [store], "max_num_results": 1}
    forced = {"tools": [tool], "tool_choice": {"type": "file_search"}, "temperature": 0}
    answer = service.chat(user("What mixes air and fuel?"), **forced, max_tokens=300)
    retrieval = answer["orbit"]["retrieval"]
    (round_,) = retrieval["rounds"]
    assert round_.get("error") is None, round_
    (found,) = retrieval["results"]
    assert (found["file_id"], found["page"] in (1, 2, 3), found["chunk"]) == (added.id, True, 0)
    assert round_["tokens_reused"] > 0, "both prompts begin alike"
    assert round_["tokens_computed"] < round_["prompt_tokens"]
    first = answer["orbit"]["prompt_tokens"]
    assert answer["usage"]["prompt_tokens"] == round_["prompt_tokens"] + first

    response = client.responses.create(
        model=answer["model"], input="What mixes air and fuel?", max_output_tokens=300, **forced
    )
    assert response.output[0].type == "file_search_call"
    assert response.output[0].queries == [round_["query"]]  # the same prompt, whichever endpoint it came by
    assert (response.model_extra or {})["orbit"]["retrieval"]["rounds"][0]["vision_tokens_encoded"] == 0
    client.vector_stores.delete(store)
    client.files.delete(added.id)
