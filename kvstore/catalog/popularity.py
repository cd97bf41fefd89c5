"""Decayed request counts per content, for placement and for compiling patches ahead."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable


class Popularity:
    """Decayed counts, per tenant. Not thread-safe.

    Args:
        remembered: requests of a tenant after which one counts 1/e of what it did.
        limit: contents that are counted; those that were asked for longest ago go first.
    """

    def __init__(self, remembered: int = 4096, limit: int = 1 << 16) -> None:
        self._growth, self._limit = 1 + 1 / remembered, limit
        self._weight: dict[str, float] = {}  # of a tenant's last request; those before keep what they had
        self._total: dict[str, float] = {}  # of all of a tenant's requests
        self._counts: OrderedDict[tuple[str, str], float] = OrderedDict()

    def observe(self, tenant: str, contents: Iterable[str]) -> None:
        """Count the contents of one request."""
        weight = self._weight.get(tenant, 1.0) * self._growth
        total = self._total.get(tenant, 0.0) + weight
        for content in set(contents):
            self._counts[tenant, content] = self._counts.pop((tenant, content), 0.0) + weight
        while len(self._counts) > self._limit:
            self._counts.popitem(last=False)
        if weight > 1e9:  # long before a float is full
            for key in [key for key in self._counts if key[0] == tenant]:
                self._counts[key] /= weight
            weight, total = 1.0, total / weight
        self._weight[tenant], self._total[tenant] = weight, total

    def asked(self, tenant: str, content: str) -> float:
        """Decayed number of a tenant's requests that brought a content; the last one counts 1."""
        count = self._counts.get((tenant, content), 0.0)
        return count / self._weight[tenant] if count else 0.0

    def share(self, tenant: str, content: str) -> float:
        """Decayed share of a tenant's requests that bring a content."""
        count = self._counts.get((tenant, content), 0.0)
        return count / self._total[tenant] if count else 0.0
