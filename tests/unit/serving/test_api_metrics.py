"""What /metrics says where there are several ingress replicas."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client.parser import text_string_to_metric_families

from serving.api import metrics
from serving.api.metrics import Metrics, exposition, in_time, labelled
from serving.errors import RoleUnavailable
from serving.frontend.report import KVReport, OrbitReport


def test_replicas_series_stand_beside_one_another_under_one_family_each():
    first, second = Metrics(), Metrics()
    first.requests.labels(status="200").inc(3)
    second.requests.labels(status="200").inc(4)
    second.observe(OrbitReport(mode="auto", ttft_ms=30, tokens_reused=7))
    text = exposition(labelled({"a": first.collect(), "b": second.collect()})).decode()
    assert text.count("# TYPE orbitserve_requests_total counter") == 1
    families = {family.name: family for family in text_string_to_metric_families(text)}
    requests = {s.labels["replica"]: s.value for s in families["orbitserve_requests"].samples if "status" in s.labels}
    assert {name: value for name, value in requests.items() if value < 1e6} == {"a": 3, "b": 4}
    ttft = families["orbitserve_time_to_first_token_seconds"].samples
    counts = {s.labels["replica"]: s.value for s in ttft if s.name.endswith("_count")}
    assert counts == {"a": 0, "b": 1}
    assert {s.labels["le"]: s.value for s in ttft if s.labels.get("replica") == "b" and "le" in s.labels}["0.05"] == 1


def test_entries_and_bytes_handed_off_are_counted():
    counted = Metrics()
    counted.observe(OrbitReport(mode="auto", kv=KVReport(tokens=100, kept=30, bytes_handed_off=4000)))
    text = exposition(counted.collect()).decode()
    assert 'orbitserve_kv_entries_total{kept="true"} 30.0' in text
    assert 'orbitserve_kv_entries_total{kept="false"} 70.0' in text
    assert "orbitserve_handoff_bytes_total 4000.0" in text


def test_an_answer_waits_until_its_first_token_and_runs_until_its_end():
    counted = Metrics()

    def now(name: str) -> float | None:
        return counted.registry.get_sample_value(f"vllm:{name}")

    with counted.answering(), counted.answering() as generated:
        assert (now("num_requests_waiting"), now("num_requests_running")) == (2, 0)
        generated(1)
        generated(3)
        assert (now("num_requests_waiting"), now("num_requests_running")) == (1, 1)
    assert (now("num_requests_waiting"), now("num_requests_running")) == (0, 0)
    assert now("generation_tokens_total") == 4
    assert now("e2e_request_latency_seconds_count") == 1, "one was refused, or left, before it had a token"


@pytest.mark.parametrize("lost", [False, True])
async def test_a_scrape_goes_without_what_does_not_come_in_time(lost: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(metrics, "SCRAPE_SECONDS", 0.02)

    async def asked() -> int:
        if lost:
            raise RoleUnavailable("gone")
        await asyncio.sleep(5)
        return 1

    assert await in_time(asked(), 0, "others") == 0
