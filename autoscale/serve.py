"""Autoscaling policy of a deployment for Ray Serve: the planner's last target.

Serve ships this module by value to its controller, and calls the policy within the controller's event loop: nothing
here waits. A question to the planner is answered by the time of the next call.
"""

from __future__ import annotations

from typing import Any

import ray


class RolePolicy:
    """Policy of one role's deployment.

    Args:
        role: name of the role.
        planner, namespace: the planner's actor.
    """

    def __init__(self, role: str, planner: str, namespace: str) -> None:
        self._role, self._planner, self._namespace = role, planner, namespace
        self._actor: Any = None
        self._asked: Any = None

    def __call__(self, ctx: Any) -> tuple[int, dict[str, Any]]:
        """The replicas that the deployment should have, and no state."""
        target = ctx.target_num_replicas
        told = self._answer()
        if self._asked is None:
            self._ask(len(ctx.running_replicas or ()), target)
        if told is None:
            return target, {}
        return max(ctx.capacity_adjusted_min_replicas, min(ctx.capacity_adjusted_max_replicas, told)), {}

    def _answer(self) -> int | None:
        """The answer to the last question, if it has come and there is a plan."""
        if self._asked is None:
            return None
        ready, _ = ray.wait([self._asked], timeout=0)
        if not ready:
            return None
        asked, self._asked = self._asked, None
        try:
            answer: int | None = ray.get(asked)
        except ray.exceptions.RayError:
            self._actor = None  # it died; there may be another one
            return None
        return answer

    def _ask(self, running: int, target: int) -> None:
        try:
            if self._actor is None:
                self._actor = ray.get_actor(self._planner, namespace=self._namespace)
            self._asked = self._actor.target.remote(self._role, running, target)
        except (ValueError, ray.exceptions.RayError):  # no such actor yet
            self._actor = None
