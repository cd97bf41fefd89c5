"""Roles that follow their load on the real service: 1 to 2 replicas and back, with answers under way all the time."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from client import Service, model, picture, user
from ray import serve

from infra.reference import DEFAULT_MODEL
from serving.deploy.launch import APPLICATION

pytestmark = [pytest.mark.service, pytest.mark.slow, pytest.mark.timeout(1200)]

PAGE = user("Look at ", picture(501), " and say what you see.")
PATIENCE_S = 400.0


@pytest.fixture
def scaled(only_service: Callable[..., Service], tmp_path_factory: pytest.TempPathFactory) -> Service:
    between, log = {"min": 1, "max": 2}, tmp_path_factory.mktemp("plans") / "plans.jsonl"
    return only_service(
        "scaled",
        "float32",
        model=model(DEFAULT_MODEL),
        library={"memory_bytes": 64 << 20, "object_store_bytes": 0},
        prefill={"replicas": between, "kv_cache_gib": 0.5, "self_check": False},
        decode={"replicas": between, "kv_cache_gib": 0.5, "max_num_seqs": 4},
        autoscale={"mode": "act", "headroom": 4.0, "settle_s": 5.0, "period_s": 1.0, "log": str(log)},
    )


def running(name: str) -> int:
    states = serve.status().applications[APPLICATION].deployments[name].replica_states
    return states.get("RUNNING", 0) if set(states) <= {"RUNNING"} else -1


class Load:
    """Clients that ask one after another until told to stop; answers by what was wrong with them, "" if nothing."""

    def __init__(self, service: Service, clients: int) -> None:
        self._service, self._ended = service, threading.Event()
        self.answers: Counter[str] = Counter()
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(clients)]
        for thread in self._threads:
            thread.start()

    def _ask(self, number: int) -> None:
        asked = 0
        while not self._ended.is_set():
            asked += 1
            parts = user(f"Question {number}.{asked}: ", picture(500 + asked % 4), "?")
            body = self._service.body(parts, max_tokens=120, ignore_eos=True, stream=True)
            self.answers[self._failure(body)] += 1

    def _failure(self, body: dict[str, object]) -> str:
        try:
            with httpx.stream("POST", f"{self._service.url}/v1/chat/completions", json=body, timeout=300) as response:
                if response.status_code != 200:
                    return f"{response.status_code}: {response.read()!r}"
                lines = [line for line in response.iter_lines() if line]
        except httpx.HTTPError as error:
            return repr(error)
        if lines[-1] != "data: [DONE]":
            return f"cut: {lines[-1]}"
        reason = None
        for line in lines[:-1]:
            with suppress(LookupError):
                reason = json.loads(line[len("data: ") :])["choices"][0]["finish_reason"] or reason
        return "" if reason == "length" else f"ended by {reason}"

    def stop(self) -> Counter[str]:
        """Wait for the answers under way; returns all of them."""
        self._ended.set()
        for thread in self._threads:
            thread.join()
        return self.answers


def test_roles_grow_and_shrink_under_load_and_no_answer_is_cut(scaled: Service):
    before = scaled.chat(PAGE)["choices"][0]["message"]["content"]
    scaled.settle()
    assert (running("PrefillWorker"), running("DecodeWorker")) == (1, 1)
    began = time.monotonic()
    many, few = Load(scaled, 10), Load(scaled, 1)
    scaled.wait_until(lambda: (running("PrefillWorker"), running("DecodeWorker")) == (2, 2), PATIENCE_S)
    grown = time.monotonic() - began
    answers = many.stop()
    scaled.wait_until(lambda: (running("DecodeWorker")) == 1, PATIENCE_S)  # one client still asks
    answers += few.stop()
    scaled.wait_until(lambda: (running("PrefillWorker"), running("DecodeWorker")) == (1, 1), PATIENCE_S)
    assert set(answers) == {""}, answers
    print(
        f"{answers['']} answers; 2 and 2 replicas after {grown:.0f} s, 1 and 1 after {time.monotonic() - began:.0f} s"
    )

    again = scaled.chat(PAGE)
    assert again["choices"][0]["message"]["content"] == before
    points = {chunk["operating_point"] for chunk in again["orbit"]["chunks"]}
    assert points <= {"canonical", "prefix", "patched", "exact"}, points
    assert again["orbit"]["tokens_reused"] > 0, "the page is found again after the shrink"

    plans = httpx.get(f"{scaled.url}/v1/orbit/autoscale").json()
    assert plans["mode"] == "act"
    assert plans["roles"]["prefill"]["turns"] == plans["roles"]["decode"]["turns"] == 1
    metrics = httpx.get(f"{scaled.url}/metrics").text
    assert 'orbitserve_autoscale_target{role="decode"} 1.0' in metrics


def test_decisions_are_logged_with_what_they_follow_from(scaled: Service):
    (log,) = {Path(path) for path in Path(scaled.root.parent).rglob("plans.jsonl")}
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert {line["role"] for line in lines} == {"prefill", "decode"}
    assert all(line["reason"] and line["signals"] for line in lines if line["reason"] != "unknown")
