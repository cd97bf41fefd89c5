"""What routing decides by: reports, own books, and the costs of replicas. No Ray, no clock but the test's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from clock import Clock
from hypothesis import given
from hypothesis import strategies as st

from autoscale.curves import ForwardCost
from prefill_workers.modes import Mode
from prefill_workers.protocol import ChunkSpan, LinkRequest, PrefetchRequest, SessionRef
from serving.routing.decode_policy import DecodePolicy, DecodeReport
from serving.routing.ledger import STALE_PERIODS, Load
from serving.routing.policy import REGISTRY, parsed
from serving.routing.prefill_policy import (
    Chunk,
    PrefillAsk,
    PrefillPolicy,
    PrefillReport,
    PrefillView,
    estimate,
    mark_of,
    session_mark,
)

MARKS = [mark_of(f"chunk-{i}") for i in range(6)]
PACE, BANDWIDTH, BYTES = 1e-3, 1e8, 10_000  # seconds a token, bytes a second, bytes a token
FIXED = 16.0  # tokens that a forward costs besides
COST = ForwardCost(FIXED, PACE)


def prefill_report(hot: Collection[str] = (), queued: int = 0, requests: int = 0, **fields: Any) -> dict[str, Any]:
    marks = b"".join(map(mark_of, hot))
    report = PrefillReport(queued, requests, FIXED, PACE, BANDWIDTH, BYTES, marks, hash(marks))
    return {**asdict(report), **fields}


def link(
    *contents: str, tokens: int = 500, text: int = 20, mode: Mode = Mode.AUTO, patched: tuple[bool, ...] = ()
) -> tuple[str, tuple[Any, ...]]:
    """The call of a prompt of chunks with text behind them."""
    spans = [
        ChunkSpan(content, "image", i * tokens, (i + 1) * tokens, i * tokens, tokens)
        for i, content in enumerate(contents)
    ]
    request = LinkRequest("r", [0] * (len(contents) * tokens + text), tuple(spans), mode, patched=patched)
    return "link", (request, (), ())


# -- estimate ---------------------------------------------------------------------------------------------------------


def test_a_chunk_costs_nothing_where_it_is_hot_its_bytes_where_it_is_stored_and_its_tokens_where_it_is_not():
    ask = PrefillAsk(20, (Chunk(MARKS[0], 500, 0), Chunk(MARKS[1], 300, 0), Chunk(MARKS[2], 100, 0)))
    view = PrefillView(70, {MARKS[0]}, (), COST, BANDWIDTH, BYTES)
    found = estimate(ask, view, {MARKS[0], MARKS[1]})
    assert (found.queued, found.computed, found.loaded, found.held) == (70, 20 + 100, 300 * BYTES, 500)
    assert found.seconds == pytest.approx((70 + 120) * PACE + 300 * BYTES / BANDWIDTH)


def test_what_a_replicas_blocks_have_of_the_beginning_costs_nothing_in_any_mode():
    """The prompt: two images of 500 tokens, and text behind."""
    name, (request, *_) = link("a", "b", text=200, mode=Mode.EXACT)
    policy = PrefillPolicy(1.0)
    ask = policy.ask(name, (request,))
    assert [known.tokens for known in ask.beginnings] == [64, 96, 128, 192, 256, 384, 500, 512, 768, 1000, 1024]
    whole, inside = ask.beginnings[-1], ask.beginnings[-3]
    assert (whole.chunks, whole.text, inside.chunks, inside.text) == (2, 24, 1, 0)
    found = estimate(ask, PrefillView(0, {whole.mark}), ())
    assert (found.computed, found.held) == (200 - 24, 1024)
    found = estimate(ask, PrefillView(0, (), {inside.mark}), ())
    assert (found.computed, found.held) == (500 + 200, 768)
    report = prefill_report(begun=whole.mark)
    policy.reported("one", {**report, "sequence": 1})
    policy.reported("other", {**prefill_report(), "sequence": 1})
    ranked = policy.rank(ask, ["other", "one"])
    assert ranked is not None
    assert [(one.replica, one.reason) for one in ranked] == [("one", "hot"), ("other", "spread")]


def test_later_turns_follow_the_first_before_it_has_ended():
    policy, call = PrefillPolicy(1.0), link(text=900)
    for replica in ("one", "other"):
        policy.reported(replica, {**prefill_report(), "sequence": 1})
    policy.sent("other", "first", policy.ask(*call))
    later = policy.ask("link", (replace(call[1][0], token_ids=[0] * 900 + [1] * 50),))
    assert policy.view("other").expected >= {known.mark for known in policy.ask(*call).beginnings}
    assert later is not None
    assert estimate(later, policy.view("other"), ()).computed == 950 - 768


def test_tokens_that_a_mode_computes_all_the_same_are_no_reason_to_go_where_the_chunk_is():
    everything = PrefillAsk(20, (Chunk(MARKS[0], 500, 500),))
    some = PrefillAsk(20, (Chunk(MARKS[0], 500, 100),))
    hot, cold = PrefillView(0, {MARKS[0]}, bytes_per_token=BYTES), PrefillView(0, bytes_per_token=BYTES)
    assert estimate(everything, hot, MARKS) == estimate(everything, cold, MARKS)
    assert (estimate(some, hot, MARKS).computed, estimate(some, hot, MARKS).held) == (120, 400)
    assert estimate(some, cold, MARKS).loaded == 400 * BYTES


def test_a_chunk_that_no_patch_fits_is_computed_wherever_it_is_and_still_decides_between_equals():
    ask = PrefillAsk(20, (Chunk(MARKS[0], 500, 0), Chunk(MARKS[1], 300, 0, patched=False)))
    hot, cold = PrefillView(0, MARKS, bytes_per_token=BYTES), PrefillView(0, {MARKS[0]}, bytes_per_token=BYTES)
    here, elsewhere = estimate(ask, hot, MARKS), estimate(ask, cold, MARKS)
    assert here.computed == elsewhere.computed == 20 + 300
    assert here.loaded == elsewhere.loaded == 0
    assert here.seconds == elsewhere.seconds
    assert (here.held, elsewhere.held) == (800, 500)


chunks = st.lists(st.builds(Chunk, st.sampled_from(MARKS), st.integers(1, 3000), st.just(0), st.just(True)), max_size=5)
marks = st.sets(st.sampled_from(MARKS))


@given(st.integers(0, 500), chunks, marks, marks, marks, st.integers(0, 10_000), st.integers(0, 10_000))
def test_more_in_memory_or_a_shorter_queue_never_costs_more(text, listed, hot, more, stored, queued, longer):
    ask = PrefillAsk(text, tuple(listed))
    view = PrefillView(queued, hot, (), COST, BANDWIDTH, BYTES)
    fuller = PrefillView(queued, hot | more, (), COST, BANDWIDTH, BYTES)
    busier = PrefillView(queued + longer, hot, (), COST, BANDWIDTH, BYTES)
    known = stored | hot | more
    assert estimate(ask, fuller, known).seconds <= estimate(ask, view, known).seconds
    assert estimate(ask, view, known).seconds <= estimate(ask, busier, known).seconds


@given(st.integers(0, 500), chunks, marks, marks, st.integers(0, 10_000))
def test_every_token_of_a_prompt_is_held_loaded_or_computed(text, listed, hot, stored, queued):
    found = estimate(PrefillAsk(text, tuple(listed)), PrefillView(queued, hot, bytes_per_token=BYTES), stored)
    assert found.held + found.loaded // BYTES + found.computed == text + sum(chunk.tokens for chunk in listed)


# -- prefill ----------------------------------------------------------------------------------------------------------


def prefill() -> tuple[PrefillPolicy, Clock]:
    clock = Clock(100.0)
    return PrefillPolicy(1.0, clock=clock), clock


def best(policy: Any, call: tuple[str, tuple[Any, ...]], replicas: Collection[str] = ("a", "b")) -> tuple[str, str]:
    ranked = policy.rank(policy.ask(*call), replicas)
    assert ranked is not None
    assert {one.replica for one in ranked} == set(replicas)
    return ranked[0].replica, ranked[0].reason


def test_a_prompt_goes_where_its_chunks_are_until_that_queue_costs_more_than_loading_them():
    policy, _ = prefill()
    policy.reported("a", prefill_report(hot=["page"], sequence=0))
    policy.reported("b", prefill_report(sequence=0))
    loading = 500 * BYTES / BANDWIDTH
    assert best(policy, link("page")) == ("a", "hot")
    policy.reported("a", prefill_report(hot=["page"], queued=int(loading / PACE) - 5, sequence=1))
    assert best(policy, link("page")) == ("a", "hot")
    policy.reported("a", prefill_report(hot=["page"], queued=int(loading / PACE) + 5, sequence=2))
    assert best(policy, link("page")) == ("b", "spread")
    assert best(policy, link("another page")) == ("b", "least_loaded")


def test_a_set_goes_where_most_of_it_is_and_stays_there_whole():
    policy, _ = prefill()
    policy.reported("a", prefill_report(hot="abc", sequence=1))
    policy.reported("b", prefill_report(hot="cde", sequence=1))
    assert best(policy, link("a", "b", "d")) == ("a", "hot")
    assert best(policy, link("c", "d", "e")) == ("b", "hot")
    for turn in range(20):  # the set that "a" has two thirds of, in other orders and one after the other
        order = ["abd", "dba", "bad"][turn % 3]
        assert best(policy, link(*order)) == ("a", "hot")
        policy.sent("a", str(turn), policy.ask(*link(*order)))
        policy.completed("a", str(turn))
    assert policy.score(policy.ask(*link("a", "b", "d")), "a")[0].held == 3 * 500, "the third is there by now"


def test_a_session_stays_where_it_is_kept():
    policy, _ = prefill()

    def turn(*pages: str, tenant: str = "acme") -> tuple[str, tuple[Any, ...]]:
        method, (request, *rest) = link(*pages, tokens=100, text=300)
        return method, (replace(request, tenant=tenant, session=SessionRef("s")), *rest)

    for replica in ("a", "b"):
        policy.reported(replica, prefill_report(hot=["p"], sequence=0))
    policy.sent("b", "first", policy.ask(*turn("p")))
    policy.completed("b", "first")
    assert best(policy, turn("p", "q")) == ("b", "hot")
    policy, _ = prefill()
    mark = session_mark("acme", "s")
    for replica, marks in (("a", mark_of("p") + mark), ("b", mark_of("p"))):
        policy.reported(replica, prefill_report(sequence=9) | {"hot": marks, "hot_version": 9})
    assert best(policy, turn("p", "q")) == ("a", "hot"), "as the workers report it"
    assert {one.held for one in policy.score(policy.ask(*turn("p", tenant="other")), "ab")} == {100}


def test_a_fork_begins_where_its_parent_is_kept_and_stays_there():
    def turn(session: SessionRef) -> tuple[str, tuple[Any, ...]]:
        method, (request, *rest) = link("p", tokens=100, text=300)
        return method, (replace(request, tenant="acme", session=session), *rest)

    policy, _ = prefill()
    for replica, marks in (("a", mark_of("p")), ("b", mark_of("p") + session_mark("acme", "parent"))):
        policy.reported(replica, prefill_report(sequence=0) | {"hot": marks, "hot_version": 9})
    fork, clean = SessionRef("fork", parent="parent"), SessionRef("fork", parent="parent", clean=True)
    assert best(policy, turn(fork)) == ("b", "hot")
    assert {one.held for one in policy.score(policy.ask(*turn(clean)), "ab")} == {100}, "it takes nothing of that KV"
    hot = mark_of("p") + session_mark("acme", "fork")
    policy.reported("a", prefill_report(sequence=1) | {"hot": hot, "hot_version": 10})
    assert best(policy, turn(fork)) == ("a", "hot"), "it went on there, for its parent's worker was busy"


def test_a_fork_that_went_elsewhere_stays_there_and_its_parent_where_it_was():
    def turn(session: SessionRef) -> tuple[str, tuple[Any, ...]]:
        method, (request, *rest) = link(tokens=100, text=3000)
        return method, (replace(request, tenant="acme", session=session), *rest)

    for on_device in (None, b""):
        policy, _ = prefill()
        kept = {"hot": session_mark("acme", "parent"), "hot_version": 9}
        gpu = {"on_device": on_device, "bytes_per_token": 100_000}
        policy.reported("a", prefill_report(queued=90_000, sequence=0) | kept | gpu)
        policy.reported("b", prefill_report(sequence=0) | gpu)
        fork, parent = turn(SessionRef("fork", parent="parent")), turn(SessionRef("parent"))
        assert best(policy, fork) == ("b", "spread"), "the worker of its parent is busy"
        policy.sent("b", "first", policy.ask(*fork))
        assert session_mark("acme", "parent") not in policy.view("b").expected
        policy.completed("b", "first")
        policy.reported("a", prefill_report(sequence=1) | kept | gpu)
        assert best(policy, parent) == ("a", "hot")
        assert estimate(policy.ask(*parent), policy.view("a"), ()).brought == 0, "none is told to have sessions"
        assert best(policy, fork) == ("b", "hot"), "before its worker reports it"


def test_of_workers_with_gpus_that_is_chosen_whose_gpu_has_the_chunks():
    policy, _ = prefill()
    for replica, copies in (("a", b""), ("b", mark_of("p"))):
        report = prefill_report(hot=["p", "q"], bytes_per_token=100_000, sequence=0)
        policy.reported(replica, report | {"on_device": copies, "device_version": 1})
    ask = policy.ask(*link("p", "q", tokens=1000))
    costs = {one.replica: one.cost for one in policy.score(ask, "ab")}
    assert costs["a"] - costs["b"] == pytest.approx(1000 * 100_000 / 25e9)
    assert best(policy, link("p", "q", tokens=1000)) == ("b", "hot")
    policy.sent("a", "one", ask)
    costs = {one.replica: one.cost for one in policy.score(ask, "ab")}
    assert estimate(ask, policy.view("a"), ()).brought == 0, "they will be there by then"


def test_modes_that_reuse_nothing_go_where_the_queue_is_shortest():
    policy, _ = prefill()
    policy.reported("a", prefill_report(hot=["page"], queued=10, sequence=0))
    policy.reported("b", prefill_report(sequence=0))
    for mode in (Mode.EXACT, Mode.OFF, Mode.parse("cacheblend-100")):
        assert best(policy, link("page", mode=mode)) == ("b", "least_loaded")
    assert best(policy, link("page", mode=Mode.parse("mpic-32")))[0] == "a"


def test_requests_between_two_reports_spread():
    policy, _ = prefill()
    for replica in "abcd":
        policy.reported(replica, prefill_report(sequence=0))
    sent = Counter[str]()
    for number in range(40):
        call = link(f"page-{number}")
        replica, _ = best(policy, call, "abcd")
        policy.sent(replica, str(number), policy.ask(*call))
        sent[replica] += 1
    assert sent == dict.fromkeys("abcd", 10)
    assert policy.ledger.load("a") == Load(10 * 520, 10)


def test_a_link_follows_its_prefetch_and_the_next_prompt_follows_both():
    policy, _ = prefill()
    policy.reported("a", prefill_report(sequence=0))
    policy.reported("b", prefill_report(sequence=0))
    policy.reported("c", prefill_report(hot=["page"], queued=3000, requests=1, sequence=0))  # so it is stored
    prefetch = "prefetch", (PrefetchRequest(("page",)),)
    first, _ = best(policy, prefetch, "ab")
    policy.sent(first, "x", policy.ask(*prefetch))
    policy.completed(first, "x")
    for _ in range(5):
        assert best(policy, link("page"), "ab") == (first, "hot")
    new = link("new page")
    second, reason = best(policy, new, "ab")
    assert reason == "least_loaded"
    policy.sent(second, "y", policy.ask(*new))
    assert best(policy, new, "ab")[0] != second  # both would compute it, and `second` is busy
    policy.completed(second, "y")
    assert best(policy, new, "ab") == (second, "hot")


def test_what_a_replica_let_go_of_is_no_reason_to_go_there():
    policy, clock = prefill()
    policy.reported("a", prefill_report(hot=["page"], queued=9, sequence=0))
    policy.reported("b", prefill_report(sequence=0))
    assert best(policy, link("page"))[0] == "a"
    clock.now += 1
    policy.reported("a", prefill_report(queued=9, sequence=1))
    assert best(policy, link("page")) == ("b", "least_loaded")


def test_a_replica_without_a_fresh_report_is_taken_for_what_was_sent_there_and_none_at_all_says_nothing():
    policy, clock = prefill()
    assert policy.rank(policy.ask(*link("page")), "ab") is None
    assert best(policy, link("page"), "a") == ("a", "only")
    policy.reported("a", prefill_report(hot=["page"], sequence=0))
    assert best(policy, link("page")) == ("a", "hot")
    policy.reported("b", prefill_report(hot=["other"], sequence=0))
    clock.now += STALE_PERIODS + 0.5
    policy.reported("b", prefill_report(hot=["other"], sequence=1))
    policy.sent("b", "1", policy.ask(*link("new")))
    assert best(policy, link("page")) == ("a", "least_loaded")  # it is stored; neither is known to have it in memory
    clock.now += STALE_PERIODS + 0.5
    assert policy.rank(policy.ask(*link("page")), "ab") is None


def test_a_replica_whose_reports_stopped_is_taken_to_be_as_busy_with_others_requests_as_those_that_report():
    policy, clock = prefill()
    for replica in "abc":
        policy.reported(replica, prefill_report(queued=9000, sequence=0))
    clock.now += STALE_PERIODS + 0.5
    policy.reported("b", prefill_report(queued=200, sequence=1))
    policy.reported("c", prefill_report(queued=800, sequence=1))
    assert policy.ledger.load("a").work == 500
    assert best(policy, link("page"), "ab")[0] == "b"
    assert best(policy, link("page"), "ac")[0] == "a"
    policy.sent("a", "1", policy.ask(*link("new")))
    assert best(policy, link("page"), "ac")[0] == "c", "what was sent from here is known"


def test_a_replica_that_does_not_answer_comes_last_until_it_reports():
    policy, _ = prefill()
    policy.reported("a", prefill_report(hot=["page"], sequence=0))
    policy.reported("b", prefill_report(queued=5000, sequence=0))
    policy.ledger.lose("a")
    assert best(policy, link("page"))[0] == "b"
    policy.reported("a", prefill_report(hot=["page"], sequence=0))  # Serve brings the old one again
    assert best(policy, link("page"))[0] == "b"
    policy.reported("a", prefill_report(hot=["page"], sequence=1))
    assert best(policy, link("page"))[0] == "a"


def test_what_is_computed_for_want_of_a_patch_counts_in_the_queue_of_the_replica_that_it_is_sent_to():
    policy, _ = prefill()
    for replica in "ab":
        policy.reported(replica, prefill_report(hot=["page", "other"], sequence=0))
    for number, patched in enumerate([(True, False), (True, True), ()]):
        policy.sent("ab"[number % 2], str(number), policy.ask(*link("page", "other", patched=patched)))
    assert policy.ledger.load("a").work == (20 + 500) + 20
    assert policy.ledger.load("b").work == 20
    off = policy.ask(*link("page", "other", mode=Mode.OFF))
    assert (off.text, off.chunks) == (20 + 2 * 500, ()), "nothing is looked up"


def test_among_equals_the_nearest_is_preferred():
    policy, _ = prefill()
    for replica in "abc":
        policy.reported(replica, prefill_report(sequence=0))
    far = {"a": 2, "b": 0, "c": 1}
    ask = policy.ask(*link("page"))
    assert [one.replica for one in policy.rank(ask, "abc", far.__getitem__) or ()] == ["b", "c", "a"]
    policy.reported("b", prefill_report(queued=100, sequence=1))
    assert [one.replica for one in policy.rank(ask, "abc", far.__getitem__) or ()] == ["c", "a", "b"]


def test_a_report_of_another_version_is_none():
    assert parsed(PrefillReport, {}) is None
    assert parsed(PrefillReport, {"sequence": 1, "hot": b""}) is None
    assert parsed(PrefillReport, prefill_report(sequence=1, besides=2)) is not None
    policy, _ = prefill()
    policy.reported("a", {"sequence": 1})
    assert policy.ledger.fresh("a") is None
    assert policy.ask("flush", ()) is None


# -- a simulation -----------------------------------------------------------------------------------------------------


class Cluster:
    """Prefill replicas that compute, load, keep the last `memory` chunks, and report every `period` seconds."""

    def __init__(self, replicas: int, memory: int, period: float = 1.0) -> None:
        self.clock = Clock(100.0)
        self.policy = PrefillPolicy(period, clock=self.clock)
        self.names = [f"r{i}" for i in range(replicas)]
        self.memory, self.period = memory, period
        self.hot: dict[str, list[str]] = {name: [] for name in self.names}
        self.until = dict.fromkeys(self.names, self.clock.now)  # when its queue is empty
        self.under_way: list[tuple[float, str, str]] = []
        self.computed, self.hits, self.waits = Counter[str](), 0, list[float]()
        self._reports, self._next_report = 0, self.clock.now
        self._stored: set[str] = set()

    def run(self, contents: list[str], per_second: float, choose: Any = None) -> Cluster:
        for number, content in enumerate(contents):
            self.clock.now += 1 / per_second
            self._settle()
            call = link(content)
            ask = self.policy.ask(*call)
            ranked = self.policy.rank(ask, self.names)
            name = choose(self.names) if choose else (ranked or [SimpleNamespace(replica=self.names[0])])[0].replica
            self.policy.sent(name, str(number), ask)
            hit = content in self.hot[name]
            tokens = 20 if hit or content in self._stored else 520
            seconds = (tokens + FIXED) * PACE + (0 if hit or tokens == 520 else 500 * BYTES / BANDWIDTH)
            self.hits += hit
            self.computed[name] += tokens
            self.waits.append(max(0.0, self.until[name] - self.clock.now))
            self.until[name] = max(self.until[name], self.clock.now) + seconds
            self.under_way.append((self.until[name], name, str(number)))
            self.hot[name] = [content, *(one for one in self.hot[name] if one != content)][: self.memory]
            self._stored.add(content)
        return self

    def _settle(self) -> None:
        for ended in [one for one in self.under_way if one[0] <= self.clock.now]:
            self.under_way.remove(ended)
            self.policy.completed(*ended[1:])
        if self.clock.now >= self._next_report:
            self._next_report += self.period
            self._reports += 1
            for name in self.names:
                queued = int(max(0.0, self.until[name] - self.clock.now) / PACE)
                waiting = sum(one[1] == name for one in self.under_way)
                report = prefill_report(self.hot[name], queued, waiting, sequence=self._reports)
                self.policy.reported(name, report)

    @property
    def imbalance(self) -> float:
        """The most of any replica's computed tokens over their mean."""
        return max(self.computed.values()) / (sum(self.computed.values()) / len(self.names))


def zipf(documents: int, requests: int, seed: int = 0) -> list[str]:
    weights = 1 / np.arange(1, documents + 1)
    drawn = np.random.default_rng(seed).choice(documents, requests, p=weights / weights.sum())
    return [f"page-{number}" for number in drawn]


def test_replicas_share_the_documents_among_them_and_stay_balanced():
    contents, random_choice = zipf(40, 2000), np.random.default_rng(1).choice
    routed = Cluster(4, memory=12).run(contents, per_second=30)
    anyhow = Cluster(4, memory=12).run(contents, per_second=30, choose=random_choice)
    assert routed.hits > 1.25 * anyhow.hits
    assert routed.imbalance < 1.5


def test_one_viral_document_does_not_herd_onto_the_replica_that_has_it():
    served = Cluster(4, memory=12)
    served.run(["viral"] * 1500, per_second=80)  # one replica alone does 28 a second
    assert served.imbalance < 1.2
    assert max(served.waits) < 0.5
    assert served.hits > 1400  # it is in everybody's memory before long


def test_a_viral_document_stays_on_one_replica_while_that_keeps_up():
    served = Cluster(4, memory=12)
    served.run(["viral"] * 200, per_second=1)
    assert max(served.computed.values()) == sum(served.computed.values())
    assert served.hits == 199


# -- decode -----------------------------------------------------------------------------------------------------------


def decode_report(blocks: int = 0, sequences: int = 0, **fields: Any) -> dict[str, Any]:
    return {**asdict(DecodeReport(blocks, 100, sequences, 16, 16, 512)), **fields}


def generate(prompt: int, max_tokens: int | None, n: int = 1) -> tuple[str, tuple[Any, ...]]:
    return "generate", ([0] * prompt, {}, SimpleNamespace(max_tokens=max_tokens, n=n), "r", {})


def decode() -> DecodePolicy:
    policy = DecodePolicy(1.0, clock=Clock(100.0))
    for replica in "ab":
        policy.reported(replica, decode_report(sequence=0))
    return policy


def test_a_sequence_goes_where_the_most_kv_is_free_for_prompt_and_answer():
    policy = decode()
    policy.reported("a", decode_report(blocks=60, sequences=1, sequence=1))
    policy.reported("b", decode_report(blocks=40, sequences=1, sequence=1))
    assert best(policy, generate(100, 60)) == ("b", "least_pressure")
    policy.sent("b", "x", policy.ask(*generate(300, 100)))  # 25 blocks and one for a partial copy
    assert policy.ledger.load("b").work == 40 + 26
    assert best(policy, generate(100, 60)) == ("a", "least_pressure")
    assert best(policy, generate(500, 1000, n=2)) == ("a", "waits")  # 66 blocks: as long as the model allows
    policy.completed("b", "x")
    assert best(policy, generate(100, None))[0] == "b"


def test_sequences_count_where_blocks_are_plenty():
    policy = decode()
    policy.reported("a", decode_report(blocks=2, sequences=12, sequence=1))
    policy.reported("b", decode_report(blocks=10, sequences=2, sequence=1))
    assert best(policy, generate(10, 5)) == ("b", "least_pressure")


def test_a_burst_of_sequences_spreads_over_decode_replicas():
    policy = decode()
    sent = Counter[str]()
    for number in range(20):
        call = generate(100, 60)
        replica, _ = best(policy, call)
        policy.sent(replica, str(number), policy.ask(*call))
        sent[replica] += 1
    assert sent == {"a": 10, "b": 10}


def test_calls_that_generate_nothing_are_not_ranked():
    assert decode().ask("abandon", ({}, 1)) is None


def test_a_decode_workers_kv_use_is_told_while_it_is_there():
    def told(worker: str) -> float | None:
        return REGISTRY.get_sample_value("vllm:kv_cache_usage_perc", {"worker": worker})

    policy = decode()
    policy.reported("a", decode_report(blocks=250, sequence=1))
    policy.reported("b", decode_report(blocks=50, sequence=1))
    assert (told("a"), told("b")) == (1.0, 0.5), "what waits for room counts, up to all of it"
    policy.keep({"b"})
    assert (told("a"), told("b")) == (None, 0.5)
