"""Segments of prompts, manifests, and which kept KV serves: pure functions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from prefill_workers.protocol import ChunkSpan, LinkRequest
from prefill_workers.sessions.alignment import align
from prefill_workers.sessions.manifest import KeptKV, KeptSegment, Session
from prefill_workers.sessions.segments import SHORTEST_CUT, Segment, segments
from prefill_workers.sessions.survivors import choose

PAGE = [900] * 3
HOUR = 3600.0


def request(*parts: list[int] | str, tenant: str = "acme") -> LinkRequest:
    """A request of texts (token ids) and pages (content ids)."""
    tokens: list[int] = []
    spans = []
    for part in parts:
        if isinstance(part, str):
            spans.append(ChunkSpan(part, "image", len(tokens), len(tokens) + len(PAGE), len(tokens), len(PAGE)))
            tokens += PAGE
        else:
            tokens += part
    return LinkRequest("request", tokens, tuple(spans), tenant=tenant)


def words(seed: int, count: int = SHORTEST_CUT) -> list[int]:
    return [1000 * seed + i for i in range(1, count + 1)]


# -- segments ---------------------------------------------------------------------------------------------------------


def test_segments_are_chunks_and_the_text_between_them():
    found = segments(request(words(1), "a", "b", words(2, 2)))
    assert [(one.start, one.stop, one.chunk) for one in found] == [
        (0, 8, None),
        (8, 11, 0),
        (11, 14, 1),
        (14, 16, None),
    ]
    assert len({one.id for one in found}) == 4
    other = segments(request(words(1), "a", "b", words(2, 2), tenant="other"))
    assert {one.id for one in found}.isdisjoint(one.id for one in other), "ids are a tenant's own"


def test_a_text_that_goes_on_is_cut_where_the_earlier_prompt_ended():
    asked, answer = words(1), words(2)
    first = segments(request("a", asked))
    second = segments(request("a", asked + answer, "b", words(3)), [asked])
    assert [one.id for one in second[:2]] == [one.id for one in first]
    assert len(second) == 5
    third = segments(request("a", asked + answer, "b", words(3) + words(4)), [asked, answer, words(3)])
    assert [one.id for one in third[:5]] == [one.id for one in second]


def test_a_text_is_found_behind_words_that_took_a_pages_place():
    action = words(5)
    (head, placeholder, kept, page) = segments(request([*words(1), 7, 7, *action], "b"), [words(1), action])
    assert [len(one) for one in (head, placeholder, kept, page)] == [8, 2, 8, 3]
    assert kept.id == segments(request(action))[0].id


texts = st.lists(st.integers(0, 3), max_size=30)


@settings(max_examples=200)
@given(texts, st.lists(texts, max_size=4))
def test_segments_cover_a_text_once_and_in_order(text: list[int], known: list[list[int]]):
    found = segments(request(text), known)
    edges = [0, *(one.stop for one in found)]
    assert [one.start for one in found] == edges[:-1]
    assert edges[-1] == len(text)
    assert all(len(one) for one in found)


# -- choice -----------------------------------------------------------------------------------------------------------


def row(ids: str, short: str = "") -> list[Segment]:
    """A prompt of chunks, but for the ids in `short`, which are texts of two tokens."""
    return [Segment(id, 2 * i, 2 * i + 2, None if id in short else i) for i, id in enumerate(ids)]


def kept(id: str, behind: str, *, exact: bool = True, refreshed: str | None = None) -> KeptSegment:
    again = None if refreshed is None else KeptKV(f"{id} again", tuple(refreshed), True, 1)
    return KeptSegment(id, 2, conditioned=KeptKV(id, tuple(behind), exact, 1), refreshed=again)


def chosen(new: str, old: list[KeptSegment], short: str = "", **options: int) -> list[str | None]:
    prompt = row(new, short)
    matches = align([one.id for one in old], [one.id for one in prompt])
    found = choose(prompt, matches, old, **{"exact": False, "refreshed": True, **options}, free_text=4)
    return [None if kv is None else kv.key for kv in found]


def mended(id: str, behind: str, front: str) -> KeptSegment:
    """A segment with a patch that takes out what is not in `front`."""
    one = kept(id, behind)
    assert one.conditioned is not None
    patched = replace(one.conditioned, behind=tuple(front), is_exact=False, patch=f"{id} patch", patch_nbytes=3)
    return replace(one, mended=patched)


WINDOW = [kept("h", ""), kept("A", "h"), kept("B", "hA", refreshed="h"), kept("C", "hAB", refreshed="h")]


def test_the_oldest_survivor_takes_what_idle_time_made_of_it():
    assert chosen("hBCX", WINDOW) == ["h", "B again", "C", None]
    assert chosen("hCX", WINDOW) == ["h", "C again", None]
    assert chosen("hBCX", WINDOW, refreshed=False) == ["h", "B", "C", None]


def test_what_stands_behind_something_unseen_is_not_taken():
    assert chosen("hZABC", WINDOW) == ["h", None, None, None, None]
    assert chosen("hAXC", WINDOW) == ["h", "A", None, None]
    assert chosen("htBC", WINDOW, short="t") == ["h", None, "B again", "C"], "but for a few words"
    assert chosen("htuvBC", WINDOW, short="tuv") == ["h", None, None, None, None, None], "no more than a few"


def test_behind_something_unseen_the_first_are_computed_up_to_the_cascades_budget():
    assert chosen("hZABC", WINDOW, cascade_tokens=1) == ["h", None, None, "B", "C"]
    assert chosen("hZABC", WINDOW, cascade_tokens=2) == ["h", None, None, "B", "C"]
    assert chosen("hZABC", WINDOW, cascade_tokens=3) == ["h", None, None, None, "C"]
    assert chosen("hBCX", WINDOW, cascade_tokens=1) == ["h", "B again", "C", None], "nothing is unseen"
    assert chosen("hZABC", WINDOW, cascade_tokens=1, exact=True) == ["h", None, None, None, None]


def test_a_removal_patch_serves_where_it_is_asked_for_and_something_has_left():
    window = [kept("h", ""), kept("A", "h"), mended("B", "hA", "h"), mended("C", "hAB", "hB")]

    def patches(new: str, **options: Any) -> list[str | None]:
        prompt = row(new)
        matches = align("hABC", new)
        found = choose(prompt, matches, window, exact=False, refreshed=True, free_text=4, **options)
        return [None if kv is None else kv.patch for kv in found]

    assert patches("hBCX", mended=True) == ["", "B patch", "C patch", None]
    assert patches("hBCX") == ["", "", "", None]
    assert patches("hCX", mended=True) == ["", "C patch", None], "of two the one that knows less of what left"
    assert patches("hABCX", mended=True) == ["", "", "", "", None]


def test_exact_takes_exact_kv_behind_just_what_it_was_computed_behind():
    assert chosen("hABCX", WINDOW, exact=True) == ["h", "A", "B", "C", None]
    assert chosen("hBCX", WINDOW, exact=True) == ["h", "B again", None, None]
    survived = [kept("h", ""), kept("B", "h", exact=False), kept("C", "hB", exact=False)]
    assert chosen("hBCX", survived, exact=True) == ["h", None, None, None]
    assert chosen("hBCX", survived) == ["h", "B", "C", None]


# -- manifest ---------------------------------------------------------------------------------------------------------


def test_a_manifest_is_read_as_it_was_written():
    kv = KeptKV("k", ("h", "A"), False, 9, points=("patched",), made=3.5)
    text = KeptSegment("t", 2, text=(5, 6), conditioned=kv)
    page = replace(WINDOW[2], content="page")
    segments = (WINDOW[0], page, text, KeptSegment("n", 1), mended("C", "hAB", "hB"))
    session = Session("s", "acme", 1.0, 2.0, segments, ("gone",), "parent")
    assert Session.from_json(session.to_json()) == session
    undated = session.to_json().replace(b',"made":0.0', b"").replace(b',"made":3.5', b"")
    of_no_time = replace(text, conditioned=replace(kv, made=0.0))
    read = Session.from_json(undated)
    assert read.segments == (*segments[:2], of_no_time, *segments[3:]), "one of before KV was dated"


def test_writing_a_manifest_copies_no_ids_that_kv_stands_behind():
    class Front(tuple[str, ...]):
        walks = 0

        def __iter__(self):
            Front.walks += 1
            return super().__iter__()

    page = KeptSegment("A", 2, "page A", conditioned=KeptKV("k", Front(("h", "t")), True, 1))
    assert b'"behind":[0,1]' in Session("s", "acme", 0, 0, (page,)).to_json()
    assert Front.walks == 2, "for their places, and to write these"


def test_a_deleted_content_takes_all_along_that_was_computed_behind_it():
    first = replace(WINDOW[1], content="page A")
    left = Session("s", "acme", 0, 0, (WINDOW[0], first, *WINDOW[2:])).without("page A")
    assert [one.id for one in left.segments] == ["h", "B", "C"]
    assert [one.conditioned for one in left.segments] == [WINDOW[0].conditioned, None, None]
    assert [kv.key for kv in left.records()] == ["h", "B again", "C again"]
    patched = Session("s", "acme", 0, 0, (WINDOW[0], first, mended("B", "hA", "h"))).without("page A")
    assert patched.segments[1].mended is None, "it is a patch of what knows the page"
