"""Requests and tokens a minute by tenant, told in OpenAI's `x-ratelimit-*` headers.

A limit is a bucket that holds a minute's worth and fills steadily. A request takes its prompt and the longest answer
that it allows from the tokens, and gives back what was not generated. Every ingress replica has its share of a limit:
Serve spreads requests over them evenly.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Literal

from serving.frontend.errors import RateLimited
from serving.settings import TenantLimits

Resource = Literal["requests", "tokens"]
_MINUTE = 60.0


class Bucket:
    """Token bucket: `limit` at most, filled at `limit` a minute."""

    def __init__(self, limit: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit, self._clock = limit, clock
        self._left, self._at = limit, clock()

    @property
    def left(self) -> float:
        """Amount that can be taken now."""
        now = self._clock()
        self._left = min(self.limit, self._left + (now - self._at) * self.limit / _MINUTE)
        self._at = now
        return self._left

    def seconds_until(self, amount: float) -> float:
        """Seconds until so much can be taken; of more than the limit, until it is full."""
        return max(0.0, min(amount, self.limit) - self.left) * _MINUTE / self.limit

    def take(self, amount: float) -> bool:
        """Take an amount if it is there; a full bucket gives more than it holds, and owes the rest."""
        if self.left < min(amount, self.limit):
            return False
        self._left -= amount
        return True

    def give(self, amount: float) -> None:
        """Put back what was taken and not used."""
        self._left = min(self.limit, self.left + amount)


class RateLimits:
    """Buckets of all tenants on one of `replicas` ingress replicas."""

    def __init__(
        self,
        limits: Callable[[str], TenantLimits],
        replicas: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits, self._replicas, self._clock = limits, replicas, clock
        self._buckets: dict[tuple[str, Resource], Bucket] = {}

    def take(self, tenant: str, resource: Resource, amount: float = 1) -> None:
        """Take an amount of a tenant's limit.

        Raises:
            RateLimited: it is used up for now.
        """
        bucket = self._bucket(tenant, resource)
        if bucket is None or bucket.take(amount):
            return
        seconds, asked = bucket.seconds_until(amount), f"{amount:g} {resource}" if amount > 1 else "another request"
        raise RateLimited(
            f"rate limit of {bucket.limit * self._replicas:g} {resource} a minute reached: {asked} can be taken in "
            f"{_duration(seconds)}",
            resource,
            seconds,
        )

    def charge(self, tenant: str, resource: Resource, amount: float) -> None:
        """Take an amount for what is under way already: what is not left of the limit is owed."""
        if (bucket := self._bucket(tenant, resource)) is not None:
            bucket.give(-amount)

    def give(self, tenant: str, resource: Resource, amount: float) -> None:
        """Put back what was taken and not used."""
        if (bucket := self._bucket(tenant, resource)) is not None:
            bucket.give(amount)

    def headers(self, tenant: str) -> Mapping[str, str]:
        """OpenAI's headers for a tenant's limits; none for a tenant without."""
        found: dict[str, str] = {}
        for resource in ("requests", "tokens"):
            if (bucket := self._bucket(tenant, resource)) is not None:
                found[f"x-ratelimit-limit-{resource}"] = f"{math.floor(bucket.limit)}"
                found[f"x-ratelimit-remaining-{resource}"] = f"{max(0, math.floor(bucket.left))}"
                found[f"x-ratelimit-reset-{resource}"] = _duration(bucket.seconds_until(bucket.limit))
        return found

    def _bucket(self, tenant: str, resource: Resource) -> Bucket | None:
        limits = self._limits(tenant)
        limit = limits.requests_per_minute if resource == "requests" else limits.tokens_per_minute
        if limit is None:
            return None
        share = max(1.0, limit / self._replicas)
        bucket = self._buckets.get((tenant, resource))
        if bucket is None:
            bucket = self._buckets[tenant, resource] = Bucket(share, self._clock)
        return bucket


def _duration(seconds: float) -> str:
    """A time as OpenAI's headers have it: 250ms, 6s, 1m30s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1e3)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
