"""Requests and tokens a minute, by tenant."""

from __future__ import annotations

import gc
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from clock import Clock
from vllm.sampling_params import SamplingParams

from serving.frontend.bounded_outputs import metered
from serving.frontend.errors import RateLimited
from serving.frontend.rate_limits import RateLimits
from serving.frontend.report import RequestTrace
from serving.settings import TenantLimits


def limits(clock: Clock, replicas: int = 1, **of_acme: int) -> RateLimits:
    known = {"acme": TenantLimits(**of_acme)}
    return RateLimits(lambda tenant: known.get(tenant, TenantLimits()), replicas, clock)


def test_requests_beyond_the_limit_are_refused_until_the_bucket_fills():
    clock = Clock()
    bounded = limits(clock, requests_per_minute=60)
    for _ in range(60):
        bounded.take("acme", "requests")
    with pytest.raises(RateLimited, match="60 requests a minute") as refused:
        bounded.take("acme", "requests")
    assert refused.value.retry_after_s == pytest.approx(1)
    clock.now += 1
    bounded.take("acme", "requests")


def test_tokens_that_were_not_generated_are_given_back():
    clock = Clock()
    bounded = limits(clock, tokens_per_minute=1000)
    bounded.take("acme", "tokens", 900)
    with pytest.raises(RateLimited):
        bounded.take("acme", "tokens", 200)
    bounded.give("acme", "tokens", 800)
    bounded.take("acme", "tokens", 200)


def test_a_request_larger_than_the_limit_takes_a_full_bucket_and_is_owed():
    clock = Clock()
    bounded = limits(clock, tokens_per_minute=600)
    bounded.take("acme", "tokens", 1200)
    with pytest.raises(RateLimited) as refused:
        bounded.take("acme", "tokens", 10)
    assert refused.value.retry_after_s == pytest.approx(61)


def test_what_is_charged_for_an_answer_under_way_is_never_refused_but_owed():
    clock = Clock()
    bounded = limits(clock, tokens_per_minute=600)
    bounded.take("acme", "tokens", 500)
    bounded.charge("acme", "tokens", 400)
    bounded.charge("other", "tokens", 400)
    with pytest.raises(RateLimited) as refused:
        bounded.take("acme", "tokens", 10)
    assert refused.value.retry_after_s == pytest.approx(31)


def test_headers_tell_what_is_left_as_openai_does():
    clock = Clock()
    bounded = limits(clock, requests_per_minute=60, tokens_per_minute=6000)
    bounded.take("acme", "requests")
    bounded.take("acme", "tokens", 4500)
    assert bounded.headers("acme") == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1s",
        "x-ratelimit-limit-tokens": "6000",
        "x-ratelimit-remaining-tokens": "1500",
        "x-ratelimit-reset-tokens": "45s",
    }


def test_tenants_without_limits_have_neither_bounds_nor_headers():
    bounded = limits(Clock(), requests_per_minute=1)
    for _ in range(100):
        bounded.take("other", "requests")
        bounded.take("acme", "tokens", 10_000)
    assert bounded.headers("other") == {}


def test_every_replica_has_its_share():
    clock = Clock()
    half = limits(clock, replicas=2, requests_per_minute=60)
    for _ in range(30):
        half.take("acme", "requests")
    with pytest.raises(RateLimited, match="60 requests a minute"):
        half.take("acme", "requests")


def test_what_never_begins_gives_its_tokens_back():
    bounded = limits(Clock(), tokens_per_minute=1000)
    params, trace = SamplingParams(max_tokens=400), RequestTrace(tenant="acme")

    async def outputs() -> AsyncGenerator[Any, None]:
        yield None

    begun = [metered(outputs(), 1, 400, params, trace, bounded) for _ in range(2)]
    with pytest.raises(RateLimited):
        metered(outputs(), 1, 400, params, trace, bounded)
    del begun
    gc.collect()
    assert bounded.headers("acme")["x-ratelimit-remaining-tokens"] == "1000"
