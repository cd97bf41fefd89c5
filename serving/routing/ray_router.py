"""Request router of the prefill and decode deployments, a plug-in of Ray Serve.

It decides by `serving.routing.policy`.

Serve ships this module by value to every process that holds a handle, so it keeps no state of its own and names that
of others by their module. Who talks to a replica, queues, retries and drops dead replicas is Serve: a request is
offered to the replicas in the order of their cost until one takes it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from ray.serve.request_router import (
    LocalityMixin,
    MultiplexMixin,
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from serving.routing import policy as routing
from serving.routing.decode_policy import DecodePolicy
from serving.routing.prefill_policy import PrefillPolicy

_POLICIES: dict[str, type[PrefillPolicy] | type[DecodePolicy]] = {
    policy.role: policy for policy in (PrefillPolicy, DecodePolicy)
}


class _Choice(NamedTuple):
    pending: PendingRequest
    ask: Any
    reasons: Mapping[str, str]


class PolicyRouter(LocalityMixin, MultiplexMixin, RequestRouter):
    """Router by the policy of its role, and by the power of two choices where it has no say.

    Ray Serve pickles this class with all that it names: counters, which hold locks, are named by their module.
    """

    def initialize_state(self, role: str, report_period_s: float) -> None:
        """See RequestRouter; the arguments are those of the deployment's RequestRouterConfig."""
        self._policy = _POLICIES[role](report_period_s)
        self._choices: WeakKeyDictionary[Any, _Choice] = WeakKeyDictionary()  # by routing task

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """See RequestRouter."""
        if pending_request is None:
            return [self._two_choices(None)]
        metadata = pending_request.metadata
        ask = ranked = None
        if not metadata.multiplexed_model_id:
            ask = self._policy.ask(metadata.call_method, pending_request.args)
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        if ask is not None:
            ranks = self.rank_replicas_via_locality(candidate_replicas)
            far = {replica.replica_id.unique_id: i for i, rank in enumerate(ranks) for replica in rank}
            ranked = self._policy.rank(ask, by_name, far.__getitem__)
        reasons = {one.replica: one.reason for one in ranked or ()}
        self._choices[asyncio.current_task()] = _Choice(pending_request, ask, reasons)
        if ranked is None:
            return [self._two_choices(pending_request)]
        pending_request.routing_context.should_backoff = True  # between two rounds over all replicas
        return [[by_name[one.replica]] for one in ranked]

    def _two_choices(self, pending: PendingRequest | None) -> list[RunningReplica]:
        """Two replicas at random, of which Serve takes the one with the shorter queue."""
        if pending is not None and pending.metadata.multiplexed_model_id:
            ids = self.apply_multiplex_routing(pending)
        else:
            ids = self.apply_locality_routing(pending)
        known = [self._replicas[one] for one in ids]
        return random.sample(known, min(2, len(known)))

    def _fulfill_next_pending_request(self, replica: RunningReplica, request_metadata: Any = None) -> None:
        """Give the replica to the request that it was chosen for.

        Serve looks that up by the internal id, which all calls made for one HTTP request share.
        """
        choice = self._choices.pop(asyncio.current_task(), None)
        if choice is None or choice.pending.future.done():
            return
        pending, ask, name = choice.pending, choice.ask, replica.replica_id.unique_id
        self._record_queue_wait_time(pending)
        pending.future.set_result(replica)
        self._remove_pending_request_from_indices(pending)
        self._policy.sent(name, pending.metadata.internal_request_id, ask)
        if ask is not None and ask.is_counted:
            routing.CHOICES.labels(role=self._policy.role, reason=choice.reasons.get(name, "stale")).inc()

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """See RequestRouter. Reports come this way."""
        super().update_replicas(replicas)
        self._policy.keep([replica.replica_id.unique_id for replica in replicas])
        for replica in replicas:
            self._policy.reported(replica.replica_id.unique_id, replica.routing_stats)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """See RequestRouter."""
        self._policy.completed(replica_id.unique_id, internal_request_id)

    def on_replica_actor_unavailable(self, replica_id: ReplicaID) -> None:
        """See RequestRouter."""
        super().on_replica_actor_unavailable(replica_id)
        self._policy.ledger.lose(replica_id.unique_id)
