"""The plug-in inside Ray Serve's routing: its own tasks and queues, replicas that only know their queue's length."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from ray.exceptions import ActorDiedError
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, RequestMetadata
from ray.serve.request_router import PendingRequest, ReplicaID

from prefill_workers.modes import Mode
from prefill_workers.protocol import ChunkSpan, LinkRequest
from serving.routing.policy import CHOICES
from serving.routing.prefill_policy import mark_of
from serving.routing.ray_router import PolicyRouter

DEPLOYMENT = DeploymentID(name="PrefillWorker", app_name="test")


class Replica:
    """What Serve asks of a replica."""

    def __init__(self, name: str, hot: str = "", queued: int = 0, node: str = "here", dead: bool = False) -> None:
        self.replica_id = ReplicaID(name, DEPLOYMENT)
        self.node_id, self.availability_zone = node, None
        self.multiplexed_model_ids: set[str] = set()
        self.max_ongoing_requests = 2
        self.ongoing, self.dead = 0, dead
        self.routing_stats: dict[str, Any] = {
            "queued_tokens": queued,
            "requests": 0,
            "fixed_tokens": 16.0,
            "seconds_per_token": 1e-3,
            "bytes_per_second": 1e9,
            "bytes_per_token": 1000,
            "hot": mark_of(hot) if hot else b"",
            "hot_version": 1,
            "begun": b"",
            "begun_version": 0,
            "on_device": None,
            "device_version": 0,
            "sequence": 1,
        }

    async def get_queue_len(self, *, deadline_s: float) -> int:
        if self.dead:
            raise ActorDiedError
        return self.ongoing


def router_of(*replicas: Replica, **options: Any) -> PolicyRouter:
    router = PolicyRouter(
        deployment_id=DEPLOYMENT,
        handle_source=DeploymentHandleSource.REPLICA,
        self_node_id="here",
        use_replica_queue_len_cache=True,
        **options,
    )
    router.initialize_state(role="prefill", report_period_s=1.0)
    router.update_replicas(list(replicas))
    return router


def call(content: str, call_id: str = "request", method: str = "link") -> PendingRequest:
    span = ChunkSpan(content, "image", 0, 500, 0, 500)
    request = LinkRequest("r", [0] * 520, (span,), Mode.AUTO)
    metadata = RequestMetadata(request_id=call_id, internal_request_id=call_id, call_method=method)
    return PendingRequest(args=[request, (), ()], kwargs={}, metadata=metadata)


async def chosen(router: PolicyRouter, pending: PendingRequest) -> str:
    replica = await asyncio.wait_for(router._choose_replica_for_request(pending), 10)
    router.on_send_request(replica.replica_id)
    return replica.replica_id.unique_id


def count(reason: str) -> float:
    return CHOICES.labels(role="prefill", reason=reason)._value.get()


async def test_a_request_goes_where_its_chunk_is_and_the_reason_is_counted():
    before = count("hot")
    router = router_of(Replica("a"), Replica("b", hot="page"), Replica("c"))
    assert await chosen(router, call("page")) == "b"
    assert count("hot") == before + 1


async def test_calls_of_one_http_request_get_each_the_replica_that_was_chosen_for_it():
    router = router_of(Replica("a", hot="first"), Replica("b", hot="second"))
    answers = await asyncio.gather(
        chosen(router, call("first")), chosen(router, call("second")), chosen(router, call("second"))
    )
    assert answers == ["a", "b", "b"]


async def test_a_full_replica_is_passed_over_for_the_next_best():
    full = Replica("a", hot="page")
    full.ongoing = full.max_ongoing_requests
    router = router_of(full, Replica("b", queued=100), Replica("c"))
    before = count("spread")
    assert await chosen(router, call("page")) == "c"
    assert count("spread") == before + 1


async def test_a_dead_replica_is_passed_over_and_not_asked_again():
    dead = Replica("a", hot="page", dead=True)
    router = router_of(dead, Replica("b"))
    assert await chosen(router, call("page")) == "b"
    assert [one.unique_id for one in router.curr_replicas] == ["b"]
    assert await chosen(router, call("page")) == "b"


async def test_a_burst_before_the_next_report_spreads():
    replicas = [Replica(name) for name in "abcd"]
    for replica in replicas:
        replica.max_ongoing_requests = 100
    router = router_of(*replicas)
    await asyncio.sleep(0.01)  # Serve has asked all of them for their queues
    pages = [call(f"page-{number}", str(number)) for number in range(80)]
    assert Counter(await asyncio.gather(*(chosen(router, page) for page in pages))) == dict.fromkeys("abcd", 20)
    for page in pages:
        for replica in replicas:
            router.on_request_completed(replica.replica_id, page.metadata.internal_request_id)
    assert {router._policy.ledger.load(name) for name in "abcd"} == {(0, 0)}


async def test_without_reports_the_shorter_of_two_queues_is_taken():
    replicas = Replica("a"), Replica("b")
    for replica in replicas:
        replica.routing_stats = {}
    replicas[0].ongoing = 1
    router = router_of(*replicas)
    await asyncio.sleep(0.01)
    before = count("stale")
    assert await chosen(router, call("page")) == "b"
    assert count("stale") == before + 1


async def test_other_calls_are_not_counted_and_go_anywhere():
    before = {reason: count(reason) for reason in ("hot", "spread", "least_loaded", "stale")}
    router = router_of(Replica("a"), Replica("b", hot="page"))
    assert await chosen(router, call("page", method="stats")) in "ab"
    assert before == {reason: count(reason) for reason in before}


async def test_the_same_node_is_preferred_among_equals_and_where_the_fallback_is_told_to():
    near, far = Replica("a"), Replica("b", node="there")
    near.max_ongoing_requests = far.max_ongoing_requests = 100
    router = router_of(far, near)
    assert await chosen(router, call("page")) == "a"
    near.routing_stats = far.routing_stats = {}
    router = router_of(far, near, prefer_local_node_routing=True)
    assert {await chosen(router, call("page")) for _ in range(10)} == {"a"}


async def test_a_request_for_a_multiplexed_model_goes_where_that_is_loaded():
    loaded = Replica("a")
    loaded.multiplexed_model_ids = {"adapter"}
    router = router_of(loaded, Replica("b", hot="page"), Replica("c", hot="page"))
    pending = call("page")
    pending.metadata.multiplexed_model_id = "adapter"
    assert await chosen(router, pending) == "a"


async def test_a_request_waits_for_a_replica_where_there_is_none():
    router = router_of()
    waiting = asyncio.create_task(chosen(router, call("page")))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    router.update_replicas([Replica("a")])
    assert await waiting == "a"


async def test_a_cancelled_request_leaves_nothing_behind():
    busy = Replica("a")
    busy.ongoing = busy.max_ongoing_requests
    router = router_of(busy)
    waiting = asyncio.create_task(chosen(router, call("page")))
    await asyncio.sleep(0.05)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    busy.ongoing = 0
    assert await chosen(router, call("page", "another")) == "a"
    assert router._policy.ledger.load("a") == (520, 1)


def test_serve_takes_the_router_as_it_is_configured():
    from serving.routing.reports import router_config
    from serving.settings import RoutingSettings

    config = router_config("decode", RoutingSettings(report_period_s=0.5))
    assert config.get_request_router_class().__name__ == "PolicyRouter"
    assert config.request_router_kwargs == {"role": "decode", "report_period_s": 0.5}
    assert config.request_routing_stats_period_s == 0.5
    assert router_config("decode", RoutingSettings(enabled=False)).is_default_request_router()
