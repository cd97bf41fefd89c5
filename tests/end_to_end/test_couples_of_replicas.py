"""Two prefill and two decode workers: who is asked, by what, and what happens when one is gone."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import httpx
import psutil
import pytest
import ray
from client import Service, picture, user
from prometheus_client.parser import text_string_to_metric_families

pytestmark = pytest.mark.service

PAGE = user("Look at ", picture(401), " and say what you see.")


def forwards(service: Service) -> list[int]:
    """How many forwards each prefill worker has run for requests, in one order."""
    return sorted(stats["loop"].forwards for stats in service.everywhere("PrefillWorker", "stats"))


def choices(service: Service) -> Counter[tuple[str, str]]:
    """How often replicas were chosen, by role and reason."""
    found = Counter[tuple[str, str]]()
    for family in text_string_to_metric_families(httpx.get(service.url + "/metrics").text):
        for sample in family.samples:
            if sample.name == "orbitserve_routing_choices_total":
                found[sample.labels["role"], sample.labels["reason"]] += int(sample.value)
    return found


def test_a_prompt_goes_where_it_was_and_a_crowd_spreads(couples: Service):
    couples.chat(PAGE)
    couples.settle()  # what is seen once is stored when the worker rests: a page that is not is linked twice
    counted = choices(couples)
    for _ in range(6):
        couples.chat(PAGE, max_tokens=2)
    found = choices(couples) - counted
    assert found["decode", "least_pressure"] == 6
    assert found["prefill", "hot"] + found["prefill", "spread"] == 6
    assert found["prefill", "hot"] > found["prefill", "spread"]  # a small page is soon loaded: any queue may spread it

    before, counted = forwards(couples), choices(couples)
    with ThreadPoolExecutor(24) as pool:
        answers = [pool.submit(couples.chat, PAGE, max_tokens=400, ignore_eos=True) for _ in range(24)]
        couples.wait_until(lambda: all(stats.running >= 6 for stats in couples.everywhere("DecodeWorker", "stats")), 30)
        bodies = [answer.result() for answer in answers]
    assert {body["usage"]["completion_tokens"] for body in bodies} == {400}
    assert all(now > then for now, then in zip(forwards(couples), before, strict=True))
    found = choices(couples) - counted
    assert found["decode", "least_pressure"] + found["decode", "waits"] == 24
    # A page that a busy host is too long in reading is computed: such a link comes again, with pixels.
    again = sum(body["orbit"]["vision_tokens_encoded"] > 0 for body in bodies)
    assert 24 <= found["prefill", "hot"] + found["prefill", "spread"] <= 24 + again


def test_streams_go_on_where_a_decode_engine_ends(couples: Service):
    asked = {"max_tokens": 300, "ignore_eos": True}
    said = said_by(couples.stream(PAGE, **asked))
    workers = [one for one in psutil.process_iter() if ":DecodeWorker" in command_of(one)]
    cores = [core for worker in workers for core in worker.children() if "EngineCore" in command_of(core)]
    assert len(cores) == 2
    counted = choices(couples)
    with ThreadPoolExecutor(6) as pool:
        streams = [pool.submit(couples.stream, PAGE, **asked) for _ in range(6)]
        couples.wait_until(lambda: all(stats.running >= 2 for stats in couples.everywhere("DecodeWorker", "stats")), 30)
        cores[0].kill()
        for stream in streams:
            events = stream.result()
            assert said_by(events) == said
            assert events[-1]["usage"]["completion_tokens"] == 300
    chosen = choices(couples) - counted
    links = sum(count for (role, _), count in chosen.items() if role == "prefill")
    assert links > 6, "none lived on the one that ended"


def command_of(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def said_by(events: list[dict[str, Any]]) -> str:
    return "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])


def test_a_prefill_worker_that_ends_is_not_asked_again_and_its_session_goes_on(couples: Service):
    steps = [[*user(picture(410 + n)), {"role": "assistant", "content": f"click button {n}"}] for n in range(5)]

    def ask(first: int) -> dict[str, Any]:
        messages = [message for step in steps[first : first + 3] for message in step]
        return couples.chat([*messages, *user("What next?")], orbit={"session": {"id": "agent"}})["orbit"]

    couples.chat(PAGE, max_tokens=2)
    ask(0)
    couples.settle()
    ask(1)
    couples.settle()
    (owner,) = [stats["name"] for stats in couples.everywhere("PrefillWorker", "stats") if stats["sessions"].sessions]
    names = [entry["name"] for entry in ray.util.list_named_actors(all_namespaces=True)]
    (worker,) = [name for name in names if name.startswith("SERVE_REPLICA::") and name.endswith(owner)]
    ray.kill(ray.get_actor(worker, namespace="serve"), no_restart=False)
    slid = ask(2)
    *stayed, new = [chunk["operating_point"] for chunk in slid["chunks"]]
    assert set(stayed) <= {"survived", "prefix"}, "from the disk that both share"
    assert new == "encoded"
    assert slid["tokens_reused"] >= sum(chunk["tokens"] for chunk in slid["chunks"][:-1])
    for _ in range(4):  # whichever worker it came to until now
        assert couples.chat(PAGE, max_tokens=2)["choices"]


@pytest.mark.slow
def test_a_lost_ingress_replica_costs_no_connection_and_no_stream_its_end(ingresses: Service):
    """Its streams are told so, and further requests go to the other one."""
    body = ingresses.body(user("Count."), max_tokens=400, ignore_eos=True, stream=True)
    streaming = threading.Event()

    def stream(_: int) -> str:
        with httpx.stream("POST", f"{ingresses.url}/v1/chat/completions", json=body, timeout=120) as response:
            last = ""
            for line in response.iter_lines():
                last = line or last
                streaming.set()
        return last

    def ask(_: int) -> int:
        body = ingresses.body(user("Hello."), max_tokens=4)
        return httpx.post(f"{ingresses.url}/v1/chat/completions", json=body, timeout=120).status_code

    with ThreadPoolExecutor(12) as pool:
        streams = [pool.submit(stream, number) for number in range(6)]
        assert streaming.wait(60)
        names = [entry["name"] for entry in ray.util.list_named_actors(all_namespaces=True)]
        one = next(name for name in names if name.startswith("SERVE_REPLICA::") and "#Ingress#" in name)
        ray.kill(ray.get_actor(one, namespace="serve"), no_restart=False)
        asked = list(pool.map(ask, range(30)))
        ends = [one.result() for one in streams]
    assert all(end == "data: [DONE]" or "the replica that answered was lost" in end for end in ends), ends
    assert any("lost" in end for end in ends), "none of the streams was on the replica that was lost"
    assert set(asked) <= {200, 503}
    assert asked.count(200) >= 24
