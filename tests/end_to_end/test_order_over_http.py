"""Requests that leave the order of their pages free, through the whole service."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import httpx
import pytest
from client import Service, picture, user

from kvstore.catalog.index import prefix_key
from kvstore.library import Library
from kvstore.operator.patch import PatchKind
from kvstore.records.format import decode, read_metadata
from kvstore.records.keys import antecedent_key
from kvstore.records.patch_form import PatchForm
from kvstore.records.record import PatchRecord
from kvstore.settings import LibrarySettings
from serving.access_log import read

pytestmark = pytest.mark.service

FREE = {"order": "free"}
SETTLED = "What is on these pages?"
LARGE = 4 + 12 + 4  # patches of a set of four: own ones, pairs, and each behind nothing; and some of parts
HEARD_S = 2.0  # twice `ingress.index_period_s`


def points(answer: dict[str, Any]) -> list[str]:
    return [chunk["operating_point"] for chunk in answer["orbit"]["chunks"]]


def indexed(service: Service) -> int:
    """Patches that the ingress knows of."""
    lines = httpx.get(service.url + "/metrics").text.splitlines()
    return int(float(next(line for line in lines if line.startswith("orbitserve_patch_index_entries{")).split()[1]))


def serve_once(service: Service, numbers: list[int], patches: int) -> None:
    """Serve pages in this order, and wait until the ingress has heard of the patches that come of it."""
    service.settle()
    before = -1
    while before != (before := indexed(service)):  # what earlier tests left is still to be heard of
        time.sleep(HEARD_S)
    service.chat(user(*map(picture, numbers), SETTLED))
    service.settle()
    service.wait_until(lambda: indexed(service) >= before + patches)


def test_pages_go_back_to_the_order_that_was_served_before(service: Service):
    """Four pages are more than get orbit patches: only the order that was served needs no sum of pair patches."""
    pages = [901, 902, 903, 904]
    serve_once(service, pages, patches=LARGE)
    mixed = [903, 901, 904, 902]
    placed = service.chat(user(*map(picture, mixed), SETTLED), orbit={**FREE, "explain": True})
    orbit = placed["orbit"]
    assert orbit["order"]["chunks"] == [1, 3, 0, 2]
    assert points(placed) == ["patched"] * 4
    assert not any("sum" in chunk["reason"] for chunk in orbit["chunks"])
    assert orbit["order"]["cost_ms"] < orbit["order"]["arrival_ms"]
    same = service.chat(user(*map(picture, pages), SETTLED))
    assert placed["choices"][0]["message"] == same["choices"][0]["message"]

    fixed = service.chat(user(*map(picture, mixed), SETTLED))
    assert ["sum" in chunk["reason"] for chunk in fixed["orbit"]["chunks"]] == [False, False, True, True]
    assert points(fixed) == ["patched", "patched", "composed", "composed"], (
        "pairs that were compiled when idle serve any order, by sums"
    )
    assert "order" not in fixed["orbit"]


def test_the_access_log_says_which_pages_could_trade_places_and_how_each_was_linked(service: Service):
    logged = len(list(read(service.logs))) if service.logs.exists() else 0
    answers = [service.chat(user(picture(905), picture(906), SETTLED), orbit=orbit) for orbit in (FREE, None)]
    service.wait_until(lambda: len(list(read(service.logs))) == logged + len(answers))
    lines = list(read(service.logs))[logged:]
    assert [[chunk.group is not None for chunk in line.chunks] for line in lines] == [[True] * 2, [False] * 2]
    assert [[chunk.point for chunk in line.chunks] for line in lines] == [points(answer) for answer in answers]
    assert [line.model for line in lines] == [service.model] * 2


def test_a_set_whose_pairs_are_compiled_is_all_patched(service: Service):
    serve_once(service, [911, 912, 913], patches=3 + 6)
    answer = service.chat(user(*map(picture, [913, 911, 912]), SETTLED), orbit=FREE)
    assert set(points(answer)) <= {"patched", "composed"}
    assert sorted(answer["orbit"]["order"]["chunks"]) == [0, 1, 2]


def test_an_explanation_says_what_every_chunk_costs_and_what_was_rejected(service: Service):
    serve_once(service, [921, 922, 923, 924], patches=LARGE)
    answer = service.chat(user(*map(picture, [923, 922, 921, 925]), SETTLED), orbit={**FREE, "explain": True})
    orbit = answer["orbit"]
    assert orbit["order"]["chunks"] == [2, 1, 0, 3]
    assert points(answer) == ["patched", "patched", "patched", "encoded"]
    first, _, third, new = orbit["chunks"]
    assert first["cost_ms"] < new["cost_ms"]
    assert third["alternative"]["chunk"] == 3
    assert third["alternative"]["operating_point"] == "computed"
    assert third["alternative"]["order_ms"] > orbit["order"]["cost_ms"]
    assert "alternative" not in new, "nothing else is left for the last place"
    assert orbit["order"]["plan_ms"] > 0


def test_a_fixed_order_can_be_explained_too(service: Service):
    serve_once(service, [931], patches=1)
    answer = service.chat(user(picture(931), SETTLED), orbit={"explain": True})
    (chunk,) = answer["orbit"]["chunks"]
    assert chunk["alternative"]["operating_point"] == "computed"
    assert chunk["alternative"]["cost_ms"] > chunk["cost_ms"]
    assert answer["orbit"]["order"]["reason"] == "order: fixed"


def test_words_that_name_a_page_by_its_place_keep_the_order(service: Service):
    serve_once(service, [941, 942], patches=2)
    messages = user(picture(942), picture(941), "What is on the second page?")
    order = service.chat(messages, orbit=FREE)["orbit"]["order"]
    assert order["chunks"] == [0, 1]
    assert "second page" in order["reason"]


def test_the_order_is_streamed_too(service: Service):
    serve_once(service, [951, 952, 953, 954], patches=LARGE)
    events = service.stream(user(*map(picture, [953, 952, 951]), SETTLED), orbit=FREE)
    assert events[-1]["orbit"]["order"]["chunks"] == [2, 1, 0]
    assert [chunk["operating_point"] for chunk in events[-1]["orbit"]["chunks"]] == ["patched"] * 3


def test_the_ingress_hears_of_patches_that_another_process_stores(service: Service):
    serve_once(service, [961], patches=1)
    stored = next((service.root / "library/records").glob("*/patch/*/*/*.arrow")).read_bytes()
    document = read_metadata(stored)
    names = {f"expect_{name}": document[name] for name in ("key", "fingerprint", "tenant")}
    record = decode(stored, **names)
    assert isinstance(record, PatchRecord)
    before, antecedent = indexed(service), antecedent_key([1, 2, 3], ["other"], ordered=True)
    key = PatchForm().key(record.canonical, antecedent, PatchKind.own)
    other = replace(record, key=key, antecedent=antecedent, antecedents=("0" * 64,), prefix=prefix_key([1, 2, 3]))
    with Library(LibrarySettings(directory=service.root / "library"), record.fingerprint) as library:
        library.put(replace(other, patch=replace(record.patch, kind=PatchKind.own)))
    service.wait_until(lambda: indexed(service) > before)


@pytest.mark.parametrize("order", ["any", 3, None])
def test_an_unknown_order_is_refused_by_name(service: Service, order: Any):
    response = service.post(service.body(user("Hello"), orbit={"order": order}))
    assert response.status_code == 400
    assert "orbit.order" in response.json()["error"]["message"]
