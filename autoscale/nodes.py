"""Nodes for planned replicas, asked of Ray's autoscaler before Serve starts them.

A cluster has one request of this kind (`ray.autoscaler.sdk.request_resources`): the cluster is to have room for all of
its bundles, whatever runs there. It stays until another one takes its place, so that the end of the application must
withdraw it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

logger = logging.getLogger(__name__)

AGAIN_S = 60.0  # between two requests of the same: somebody else's may have taken its place


@dataclass(frozen=True)
class Bundle:
    """Reservation of a replica on one node, as Ray has it: resources by name, and labels."""

    resources: Mapping[str, float] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)


class NodeRequests:
    """The cluster's request for nodes, kept up to date.

    Args:
        ask: `request_resources` of Ray, by bundles and their label selectors.
    """

    def __init__(self, ask: Callable[[list[dict[str, float]], list[dict[str, str]]], Any]) -> None:
        self._ask = ask
        self._last: list[Bundle] | None = None
        self._asked = float("-inf")

    def want(self, bundles: Sequence[Bundle], now: float) -> None:
        """Have room for so many bundles.

        Asked when they change, and now and then; what fails is tried again.
        """
        wanted = [bundle for bundle in bundles if any(bundle.resources.values())]
        if wanted == self._last and now - self._asked < AGAIN_S:
            return
        try:
            self._ask([dict(one.resources) for one in wanted], [dict(one.labels) for one in wanted])
        except Exception as error:  # of the cluster's head, which is busy or starts anew
            logger.warning("nodes for %d replicas are not asked for: %s", len(wanted), error)
            return
        self._last, self._asked = wanted, now

    def withdraw(self) -> None:
        """Want no nodes any more."""
        if self._last is not None:
            self.want([], float("inf"))
            self._last = None
