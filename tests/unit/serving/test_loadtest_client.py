"""The open loop and its accounting, against a server that injects delays and faults."""

from __future__ import annotations

import base64
import resource
import time
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import pytest
from aiohttp import web
from openai_mock import MockServer

from serving.loadtest import measures
from serving.loadtest.arrivals import Arrival
from serving.loadtest.bodies import Body
from serving.loadtest.client import Client, Endpoint, EndpointError, Sample, Tally, connections_allowed, open_loop
from serving.loadtest.session import Plan, Subject, load_test
from serving.loadtest.workloads import workload

TINY = {"columns": 2, "rows": 2, "pages": 4}


def sample(due: float, ttft_s: float | None, e2e_s: float, status: str = "ok", **fields: Any) -> Sample:
    """One whose answer's tokens came evenly; 10 output tokens unless given."""
    first = None if ttft_s is None else due + ttft_s
    values: dict[str, Any] = {"sent": due, "output_tokens": 10, **fields}
    return Sample(due=due, first=first, last=due + e2e_s, done=due + e2e_s, status=status, **values)


async def run(server: MockServer, arrivals: list[Arrival], tally: Tally | None = None, **options: Any) -> list[Sample]:
    kinds = {name: options.pop(name) for name in ("max_in_flight", "drain_s") if name in options}
    subject = Subject(Endpoint(server.url, **options), workload("mrag", **TINY), **kinds)
    return await subject.run(arrivals, tally)


# -- arithmetic -------------------------------------------------------------------------------------------------------


def test_percentiles_lie_between_the_nearest_two():
    found = measures.percentiles([4.0, 1.0, 3.0, 2.0])
    assert found == {"p50": 2.5, "p90": pytest.approx(3.7), "p99": pytest.approx(3.97), "mean": 2.5}
    assert measures.percentiles([]) is None


def test_latencies_of_a_sample_count_from_when_it_was_due():
    late = Sample(due=10.0, sent=11.0, first=11.5, last=13.5, done=13.6, status="ok", output_tokens=5)
    assert (late.lag_ms, late.ttft_ms, late.tpot_ms) == (1000.0, 1500.0, 500.0)
    assert late.e2e_ms == pytest.approx(3600.0)


def test_goodput_counts_answers_in_time_against_everything_that_was_asked():
    samples = [
        sample(0.0, 0.1, 1.0),
        sample(1.0, 0.2, 1.0),
        sample(2.0, 0.3, 1.0),
        sample(3.0, None, 1.0),  # no content
        sample(4.0, 0.1, 6.0, status="500"),
        sample(5.0, None, 0.0, status="429"),
        sample(6.0, 0.1, 2.0, status="timeout"),
        sample(9.0, 0.15, 1.0),
    ]
    report = measures.summary(samples, ttft_limit_ms=200.0)
    window = 9.05 * 8 / 7  # first tokens came within 9.05 s, which are seven of the gaps that eight requests have
    assert report["goodput"] == {"ttft_limit_ms": 200.0, "share": 3 / 8, "rps": round(3 / window, 4)}
    assert (report["ok"], report["without_content"]) == (5, 1)
    assert (report["rejected_429"], report["timeouts"], report["errors"]) == (1, 1, {"500": 1})
    assert report["completed_rps"] == round(5 / window, 4)
    assert report["offered_rps"] == round(7 / 9, 4)
    assert report["output_tokens_per_s"] == round(50 / window, 3)
    assert report["ttft_ms"]["p50"] == pytest.approx(175.0)  # of 100, 150, 200 and 300
    assert report["saturated"]


def test_hit_rate_is_of_tokens_and_absent_where_the_server_says_nothing():
    said = [
        sample(0, 0.1, 1, prompt_tokens=100, cached_tokens=90),
        sample(1, 0.1, 1, prompt_tokens=200, cached_tokens=10),
        sample(1, 0.1, 1, prompt_tokens=100),  # no hit: left out
        sample(2, 0.1, 1, status="500", prompt_tokens=300, cached_tokens=300),
    ]
    assert measures.hit_rate(said) == 0.25
    assert measures.hit_rate([sample(0, 0.1, 1, prompt_tokens=100)]) is None


def test_a_server_that_keeps_up_is_not_saturated_and_one_that_falls_behind_is():
    keeps_up = [sample(float(i), 0.1, 0.5) for i in range(20)]
    behind = [sample(float(i), 0.1, 0.5 + i) for i in range(20)]
    assert not measures.is_saturated(keeps_up)
    assert measures.is_saturated(behind)
    assert measures.completed_rps(behind) == pytest.approx(0.5)
    slow = [sample(float(i), 9.0, 10.0) for i in range(20)]
    hung = [*keeps_up[:-1], sample(19.0, None, 120.0, status="timeout")]
    for samples in (slow, hung):  # neither a long answer nor one that never comes says that it cannot keep up
        assert not measures.is_saturated(samples)
    assert measures.completed_rps(slow) == pytest.approx(1.0)
    assert measures.completed_rps(hung) == pytest.approx(0.95)


def test_of_requests_that_are_due_at_once_the_whole_time_counts():
    batched = [sample(0, 0.5, 10 + 1e-4 * number) for number in range(16)]
    assert measures.completed_rps(batched) == pytest.approx(1.6, rel=0.01)
    assert measures.offered_rps(batched) == measures.completed_rps(batched)
    hung = [*batched, sample(0, None, 120.0, status="timeout")]
    assert measures.completed_rps(hung) == measures.completed_rps(batched), "but not what never came"


def test_answers_that_end_together_were_not_computed_in_that_moment():
    """As vLLM's do under load: it takes two seconds for each prompt, and goes on with answers when none is left."""
    last = 40.0
    starved = [sample(0.25 * i, 2.0 * (i + 1) - 0.25 * i, last + 0.01 * i - 0.25 * i) for i in range(20)]
    assert measures.completed_rps(starved) == pytest.approx(0.5)
    assert measures.is_saturated(starved)


def test_a_late_generator_is_flagged_if_that_matters_beside_ttft():
    def lagging(lag_s: float, ttft_s: float) -> bool:
        samples = [sample(float(i), ttft_s, ttft_s + 1, sent=i + lag_s) for i in range(10)]
        return bool(measures.generator(samples)["late"])

    assert lagging(0.05, 0.2)
    assert not lagging(0.05, 10.0)  # half a per cent of it
    assert not lagging(0.005, 0.01)  # five milliseconds are what an event loop may take


# -- the open loop ----------------------------------------------------------------------------------------------------


async def test_a_server_that_stalls_does_not_hold_up_what_is_due_next():
    """One at a time at 0.1 s each, ten due at once: a closed loop would see 0.1 s ten times. (Coordinated omission.)"""
    async with MockServer(first_token_s=0.1, tokens=1, at_once=1).running() as server:
        tally = Tally()
        samples = await run(server, [Arrival(0.0)] * 10, tally)
    waited = sorted(sample.ttft_ms for sample in samples if sample.ttft_ms is not None)
    assert len(waited) == 10
    assert all(ttft >= 100 * (place + 1) for place, ttft in enumerate(waited))
    assert tally.peak == 10
    assert tally.held_back == 0


async def test_the_generators_own_stall_counts_as_latency():
    """The event loop is blocked when a request is due: it is sent late, and its TTFT contains that."""

    async def ask(content: bytes, due: float) -> Sample:
        sent = time.perf_counter()
        if content == b'{"n": 0}':
            time.sleep(0.3)  # the stall
        return Sample(due, sent, time.perf_counter(), None, time.perf_counter(), "ok")

    schedule = [(0.0, Body({"n": 0})), (0.05, Body({"n": 1}))]
    _, second = await open_loop(ask, schedule, Tally(), max_in_flight=10, drain_s=10)
    assert second.lag_ms >= 200
    assert second.ttft_ms is not None
    assert second.ttft_ms >= second.lag_ms


async def test_beyond_the_cap_requests_wait_and_their_waiting_counts():
    async with MockServer(first_token_s=0.1, tokens=1).running() as server:
        tally = Tally()
        samples = await run(server, [Arrival(0.0)] * 6, tally, max_in_flight=2)
    assert (tally.peak, tally.held_back) == (2, 4)
    assert sum(sample.ttft_ms >= 200 for sample in samples if sample.ttft_ms) >= 4
    assert max(sample.ttft_ms or 0 for sample in samples) >= 300


async def test_every_fault_has_its_name_and_fails_nothing_else():
    faults = {0: "500", 1: "429", 2: "drop", 3: "cut", 4: "error", 5: "malformed", 6: "hang", 7: "empty"}
    async with MockServer(faults=faults).running() as server:
        samples = await run(server, [Arrival(0.05 * i) for i in range(10)], timeout_s=3.0)
    status = [sample.status for sample in samples]
    assert status[:2] == ["500", "429"]
    assert status[2] == "connection"
    assert status[3:] == ["truncated", "stream error", "malformed", "timeout", "ok", "ok", "ok"]
    assert samples[7].ttft_ms is None
    assert "the engine died" in samples[4].message
    report = measures.summary(samples, None)
    assert report["first_messages"].keys() == {*status} - {"ok"}
    assert "goodput" not in report


async def test_nobody_listening_is_an_error_before_anything_is_sent():
    with pytest.raises(EndpointError, match="/v1/models"):
        await run(MockServer(url="http://127.0.0.1:9"), [Arrival(0.0)])
    async with MockServer().running() as server:
        with pytest.raises(EndpointError, match="no model 'other'; it has mock"):
            await run(server, [Arrival(0.0)], model="other")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ('{"data": null}', "is no list of models"),
        ('{"data": [{"object": "model"}]}', "is no list of models"),
        ('{"data": ["mock"]}', "is no list of models"),
        ('{"object": "list"}', "is no list of models"),
        ("[]", "is no JSON object"),
        ("", "is no JSON object"),
        ("<html>Welcome</html>", "is no JSON object"),
    ],
)
async def test_a_server_that_answers_otherwise_is_told(monkeypatch: pytest.MonkeyPatch, answer: str, words: str):
    async def other(self: MockServer, request: web.Request) -> web.Response:
        return web.Response(text=answer)

    monkeypatch.setattr(MockServer, "models", other)
    monkeypatch.setattr(MockServer, "files", other)
    async with MockServer().running() as server, Client(Endpoint(server.url)) as client:
        with pytest.raises(EndpointError, match=rf"{server.url}/v1/models: the answer {words}"):
            await client.model()
        with pytest.raises(
            EndpointError, match=rf"{server.url}/v1/files: the answer (is no JSON object|names no file)"
        ):
            await client.upload(b"", "page.png")


async def test_what_is_outstanding_when_the_run_is_drained_is_unfinished():
    async with MockServer(faults={1: "hang"}, first_token_s=0.05).running() as server:
        tally = Tally()
        samples = await run(server, [Arrival(0.0), Arrival(0.1), Arrival(0.2)], tally, drain_s=1.5, max_in_flight=1)
    assert [sample.status for sample in samples] == ["ok", "unfinished", "unfinished"]
    assert tally.in_flight == 0
    assert len(server.bodies) == 2  # the third one never got a connection


async def test_usage_operating_points_and_stages_are_read_from_the_stream():
    async with MockServer(tokens=4, token_s=0.02).running() as server:
        (only,) = await run(server, [Arrival(0.0)])
    assert (only.prompt_tokens, only.output_tokens, only.cached_tokens) == (40, 4, 30)
    assert only.points == {"patched": 1, "encoded": 1}
    assert only.stages_ms == {"link": 20.0, "decode": 5.0}
    assert only.tpot_ms is not None
    assert only.tpot_ms >= 15


@pytest.mark.parametrize(
    ("limits", "wanted", "allowed", "raised"),
    [
        ((1024, 1 << 20), 10_000, 10_000, 10_256),
        ((1024, 4096), 10_000, 3840, 4096),  # the hard limit leaves no more
        ((20_000, 1 << 20), 10_000, 10_000, None),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), 10_000, 10_000, None),
    ],
)
def test_as_many_connections_as_open_files_allow(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], wanted: int, allowed: int, raised: int | None
):
    set_to: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: set_to.append(new))
    assert connections_allowed(wanted) == allowed
    assert set_to == ([] if raised is None else [(raised, limits[1])])


# -- bodies -----------------------------------------------------------------------------------------------------------


def images_of(body: dict[str, Any]) -> list[dict[str, Any]]:
    return [part for message in body["messages"] for part in message["content"] if part["type"] != "text"]


async def test_inline_images_and_files_carry_the_same_pixels_and_files_are_uploaded_once():
    async with MockServer().running() as server:
        await run(server, [Arrival(0.01 * i) for i in range(8)])
        inline, server.bodies = server.bodies, []
        await run(server, [Arrival(0.01 * i) for i in range(8)], images="files", api_key="secret")
        filed, uploads = server.bodies, server.uploads
    assert server.headers[-1] == "Bearer secret"
    assert len(uploads) <= TINY["pages"]
    sent = {f"file-{i}": base64.b64encode(data).decode() for i, data in enumerate(uploads, 1)}
    urls = [[part["image_url"]["url"].removeprefix("data:image/png;base64,") for part in images_of(b)] for b in inline]
    files = [[sent[part["file"]["file_id"]] for part in images_of(body)] for body in filed]
    assert sorted(urls) == sorted(files), "in whichever order requests that leave 10 ms apart arrive"


async def test_orbit_is_sent_only_where_it_is_asked_for():
    async with MockServer().running() as server:
        await run(server, [Arrival(0.0)])
        await run(server, [Arrival(0.0)], orbit={"mode": "mpic-32", "order": "free"}, fields={"ignore_eos": True})
        subject = Subject(Endpoint(server.url, sessions=True), workload("agent", columns=2, rows=2, sessions=1))
        await subject.run([Arrival(0.0), Arrival(0.0)])
    plain, ours, *steps = server.bodies
    assert "orbit" not in plain
    assert [step["orbit"] for step in steps] == [{"session": {"id": "agent-0-0"}}] * 2
    assert "ignore_eos" not in plain
    assert (ours["orbit"], ours["ignore_eos"]) == ({"mode": "mpic-32", "order": "free"}, True)
    assert plain["model"] == "mock"
    assert plain["stream_options"] == {"include_usage": True}


async def test_a_traces_body_is_sent_as_it_is():
    messages = [{"role": "user", "content": "recorded"}]
    async with MockServer().running() as server:
        await run(server, [Arrival(0.0, {"messages": messages, "max_tokens": 5, "stream": False})])
    (body,) = server.bodies
    assert (body["messages"], body["max_tokens"], body["model"], body["stream"]) == (messages, 5, "mock", True)


async def test_a_load_test_warms_up_and_goes_on_with_the_workload():
    async with MockServer(details={}).running() as server:
        subject = Subject(Endpoint(server.url), workload("novel", columns=2, rows=2))
        shown: list[str] = []

        def watch(title: str, tally: Tally) -> Any:
            shown.append(title)
            return nullcontext()

        plan = Plan(rates=(50, 100), count=6, warmup=2)
        results = [result async for result in load_test(subject, plan, watch)]
    assert [(one.rate, len(one.samples)) for one in results] == [(50, 6), (100, 6)]
    assert shown == ["50/s, warm-up", "50/s", "100/s, warm-up", "100/s"]
    asked = [str(body["messages"]) for body in server.bodies]
    assert len(set(asked)) == 16
    assert measures.summary(results[0].samples, None)["cached_tokens_share"] is None


def spoken(server: MockServer) -> list[list[str]]:
    """What the assistant said, in the messages of every body that was sent."""
    told = [[m["content"] for m in body["messages"] if m["role"] == "assistant"] for body in server.bodies]
    return sorted(told, key=len)


async def test_answers_are_sent_back_as_they_were_given_and_turns_wait_for_them():
    made = workload("turns", columns=2, rows=2, chats=1, turns=3, image_turns=1)
    async with MockServer(tokens=2, first_token_s=0.1, token_s=0.1).running() as server:
        subject = Subject(Endpoint(server.url), made)
        first, second, third = await subject.run([Arrival(0.0), Arrival(0.01), Arrival(1.0)])
        (again,) = await subject.run([Arrival(0.0)])
    assert first.text
    assert spoken(server) == [[], [], [first.text], [first.text, second.text]]
    assert second.sent >= first.done
    assert second.lag_ms < 100, "what it waited for counts in no latency: no user sends that sooner"
    assert third.due - first.due == pytest.approx(1.0), "its answers were there"
    assert again.is_ok, "and a new chat begins"


async def test_an_answer_that_did_not_come_is_made_up():
    made = workload("turns", columns=2, rows=2, chats=1, turns=2, image_turns=1, max_tokens=5)
    async with MockServer(faults={0: "cut"}).running() as server:
        samples = await Subject(Endpoint(server.url), made).one_by_one(2)
    assert [sample.status for sample in samples] == ["truncated", "ok"]
    ((instead,),) = filter(None, spoken(server))
    assert len(instead.split()) == 5


async def test_one_by_one_waits_for_each_answer():
    async with MockServer(first_token_s=0.02).running() as server:
        samples = await Subject(Endpoint(server.url), workload("one-shot", columns=2, rows=2)).one_by_one(3)
    assert all(later.sent >= earlier.done for earlier, later in pairwise(samples))


async def test_a_client_refuses_an_upload_that_the_server_refuses():
    async with MockServer().running() as server, Client(Endpoint(f"{server.url}/nowhere")) as client:
        with pytest.raises(EndpointError, match="404"):
            await client.upload(b"", "page.png")
