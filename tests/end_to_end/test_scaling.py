"""Roles that follow their load on the real service: 1 to 2 replicas and back, with answers under way all the time.

Without a disk or any other tier: a chunk that is linked again after the shrink was handed over.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from client import Service, model, picture, user
from ray import serve

from infra.reference import DEFAULT_MODEL
from serving.deploy.launch import APPLICATION
from tests.steady_load import SteadyLoad

pytestmark = [pytest.mark.service, pytest.mark.slow, pytest.mark.timeout(2400)]

PAGES = range(501, 511)
REUSED = "full-reuse"  # canonical KV alone: patches that others form come by a tier
PATIENCE_S = 600.0  # for a start on a busy host, and for the time that a shrink waits


@pytest.fixture
def scaled(only_service: Callable[..., Service], tmp_path_factory: pytest.TempPathFactory) -> Service:
    between, log = {"min": 1, "max": 2}, tmp_path_factory.mktemp("plans") / "plans.jsonl"
    return only_service(
        "scaled",
        "float32",
        model=model(DEFAULT_MODEL),
        library={"directory": None, "memory_bytes": 1 << 30, "object_store_bytes": 0},
        prefill={"replicas": between, "kv_cache_gib": 0.5, "self_check": False},
        decode={"replicas": between, "kv_cache_gib": 0.5, "max_num_seqs": 4},
        autoscale={"mode": "act", "headroom": 10.0, "settle_s": 5.0, "log": str(log)},
    )


def running(name: str) -> int:
    states = serve.status().applications[APPLICATION].deployments[name].replica_states
    return states.get("RUNNING", 0) if set(states) <= {"RUNNING"} else -1


def replicas() -> tuple[int, int]:
    return running("PrefillWorker"), running("DecodeWorker")


def until(service: Service, prefill: int, decode: int) -> None:
    """Wait for so many replicas; what the planner says is told if they do not come."""
    try:
        service.wait_until(lambda: replicas() == (prefill, decode), PATIENCE_S)
    except AssertionError:
        plans = httpx.get(f"{service.url}/v1/orbit/autoscale", timeout=60).json()
        pytest.fail(f"{replicas()} replicas, not {(prefill, decode)}: {json.dumps(plans, indent=1)}")


def ask(service: Service, page: int, mode: str) -> dict[str, Any]:
    return service.chat(user("Look at ", picture(page), " and say what you see."), mode)


def test_roles_grow_and_shrink_under_load_and_neither_an_answer_nor_a_chunk_is_lost(scaled: Service):
    scaled.settle()
    assert replicas() == (1, 1)
    began = time.monotonic()
    url, name = scaled.url, scaled.model
    with SteadyLoad(url, name, 9, 3) as many, SteadyLoad(url, name, 1) as few:
        until(scaled, 2, 2)
        grown = time.monotonic() - began
        for page in PAGES:  # each by one of the two
            ask(scaled, page, "exact")
        scaled.settle()
        held = [stats["library"].bytes for stats in scaled.everywhere("PrefillWorker", "stats")]
        assert len(held) == 2
        assert min(held) > 0, "both have linked pages"
        before = {page: ask(scaled, page, REUSED) for page in PAGES}
        before = {page: answer for page, answer in before.items() if answer["orbit"]["tokens_reused"]}
        assert len(before) >= 3, "some come to the one where they are known"
        answers = many.stop()
        scaled.wait_until(lambda: running("DecodeWorker") == 1, PATIENCE_S)  # one client still asks
        answers += few.stop()
        until(scaled, 1, 1)
    assert set(answers) == {""}, answers
    print(
        f"{answers['']} answers; 2 and 2 replicas after {grown:.0f} s, 1 and 1 after {time.monotonic() - began:.0f} s"
    )

    for page, answer in before.items():
        again = ask(scaled, page, REUSED)
        assert again["orbit"]["vision_tokens_encoded"] == 0, f"page {page} is found again after the shrink"
        assert again["orbit"]["tokens_reused"] == answer["orbit"]["tokens_reused"]
        assert again["choices"][0]["message"]["content"] == answer["choices"][0]["message"]["content"]

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
