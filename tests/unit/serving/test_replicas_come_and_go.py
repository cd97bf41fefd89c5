"""Replicas that start shake hands with those of the other role; prefill replicas that go hand over, in time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from clock import Clock
from kvstore_support import FINGERPRINT, canonical

from kvstore import hand_over as handing
from kvstore.library import Library
from kvstore.settings import LibrarySettings
from kvstore.tiers.disk import DiskTier
from serving.replicas import first_transfer, hand_over
from serving.replicas.hand_over import HandOver
from serving.replicas.prefill import PrefillWorker
from serving.replicas.process import ONE_MACHINE


class Role:
    """A handle whose replicas give these answers; `calls` are the broadcasts."""

    def __init__(self, *answers: Any) -> None:
        self._answers = answers
        self.calls: list[tuple[Any, ...]] = []

    def broadcast(self, *call: Any) -> Any:
        self.calls.append(call)

        async def results_async(return_exceptions: bool) -> list[Any]:
            assert return_exceptions
            return list(self._answers)

        return SimpleNamespace(results_async=results_async)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Callable[[Role, int], None]:
    """`cluster(role, running)`: that role, of which so many replicas serve."""

    def of(role: Role, running: int) -> None:
        context = SimpleNamespace(app_name="orbitserve", deployment="PrefillWorker")
        monkeypatch.setattr(first_transfer.serve, "get_replica_context", lambda: context)
        monkeypatch.setattr(first_transfer, "replica_states", lambda *_: {"RUNNING": running, "STARTING": 1})
        monkeypatch.setattr(first_transfer, "DeploymentHandle", lambda name, app: role)

    return of


async def test_a_new_prefill_replica_has_each_decode_replica_pull(cluster: Callable[[Role, int], None]):
    linked: list[int] = []

    async def link(readers: int) -> dict[str, Any]:
        linked.append(readers)
        return {"remote_request_id": "tiny"}

    decode = Role(None, None)
    cluster(decode, 2)
    await first_transfer.pulled_by_decode(link)
    assert linked == [2], "one prompt, which two read"
    assert decode.calls == [("pull_tiny", {"remote_request_id": "tiny"})]
    cluster(alone := Role(), 0)
    await first_transfer.pulled_by_decode(link)
    assert (linked, alone.calls) == ([2], []), "a role without replicas is not called: it would not answer"


async def test_a_new_decode_replica_pulls_from_each_prefill_replica_and_once_more_where_roles_are_scaled(
    cluster: Callable[[Role, int], None], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(first_transfer, "_AGAIN_S", 0.01)
    pulled: list[str] = []

    async def pull(transfer: dict[str, Any]) -> None:
        pulled.append(transfer["from"])

    cluster(Role({"from": "a"}, {"from": "b"}), 2)
    assert await first_transfer.pull_from_prefill(pull, once_more=False) is None
    assert sorted(pulled) == ["a", "b"]
    again = await first_transfer.pull_from_prefill(pull, once_more=True)
    assert again is not None
    await again
    assert sorted(pulled) == ["a", "a", "a", "b", "b", "b"]


async def test_a_replica_that_cannot_shake_hands_serves_all_the_same(
    cluster: Callable[[Role, int], None], caplog: pytest.LogCaptureFixture
):
    async def pull(transfer: dict[str, Any]) -> None:
        raise AssertionError

    cluster(Role(ConnectionError("gone")), 1)
    await first_transfer.pull_from_prefill(pull, once_more=False)
    assert "has shaken hands" in caplog.text


class Sibling:
    """In the place of `RaySiblings`: another library of this process."""

    def __init__(self, library: Library) -> None:
        self._library = library

    async def lacking(self, paths: list[str]) -> list[list[str]]:
        return [handing.lacking(self._library, paths)]

    async def adopt(self, parcels: list[handing.Parcel]) -> int:
        return handing.adopt(self._library, parcels)


@pytest.fixture
def leaver_and_sibling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Library, Library]:
    settings = LibrarySettings(directory=None, deletion_grace_s=5.0)
    leaver, sibling = (Library(settings, FINGERPRINT, [DiskTier(tmp_path / name)]) for name in ("a", "b"))
    monkeypatch.setattr(hand_over, "RaySiblings", lambda: Sibling(sibling))
    leaver.put(canonical(recompute_seconds=1.0))
    leaver.flush()
    return leaver, sibling


async def test_what_lies_on_a_nodes_disk_is_handed_over_where_there_are_other_nodes(
    leaver_and_sibling: tuple[Library, Library], monkeypatch: pytest.MonkeyPatch
):
    leaver, sibling = leaver_and_sibling
    monkeypatch.setenv(ONE_MACHINE, "1")
    alone = hand_over.HandOver(leaver)
    assert alone.cost_s() == 0.0
    assert (await alone.give()).records == 0
    monkeypatch.delenv(ONE_MACHINE)
    among_nodes = hand_over.HandOver(leaver)
    assert 0 < among_nodes.cost_s() < 1.0, "sooner moved than computed"
    assert (await among_nodes.give()).records == 1
    assert (await among_nodes.give()).records == 0, "they have it now"
    assert sibling.is_resident("canonical", canonical().key, "acme")


async def test_nothing_is_handed_over_when_a_deletion_may_have_been_missed(leaver_and_sibling: tuple[Library, Library]):
    """Siblings keep deleted content out for five seconds."""
    clock = Clock()
    ending = hand_over.HandOver(leaver_and_sibling[0], clock)
    ending.called()
    clock.now += 4.5
    handed = await ending.give()
    assert (handed.records, handed.left) == (0, 1)
    ending.called()
    assert (await ending.give()).records == 1


@pytest.mark.parametrize(("nodes", "moved"), [(("b",), [["b"]]), (("here", "b"), []), ((), [])])
async def test_a_node_keeps_its_objects_while_a_replica_stays_there(
    nodes: tuple[str, ...], moved: list[list[str]], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(hand_over, "is_alone", lambda: False)
    monkeypatch.setattr(hand_over, "node_id", lambda: "here")
    monkeypatch.setattr(hand_over, "DeploymentHandle", lambda *_: Role(*nodes))
    context = SimpleNamespace(deployment="PrefillWorker", app_name="orbitserve")
    monkeypatch.setattr(hand_over.serve, "get_replica_context", lambda: context)
    seen: list[list[str]] = []
    library: Any = SimpleNamespace(leave_node=lambda nodes, until: seen.append(list(nodes)))
    await HandOver(library).leave_node()
    assert seen == moved


@pytest.mark.parametrize("in_time", [True, False])
async def test_a_worker_that_goes_hands_over_before_it_waits_for_patches_to_be_formed(in_time: bool):
    done: list[str] = []

    async def note(name: str) -> None:
        done.append(name)
        if name == "flush" and not in_time:
            raise TimeoutError

    worker: Any = SimpleNamespace(
        _hand_over=SimpleNamespace(give=partial(note, "give"), leave_node=partial(note, "leave node")),
        flush=partial(note, "flush"),
        _loop=SimpleNamespace(stats=lambda: SimpleNamespace(leases=0)),
        _close=partial(done.append, "close"),
    )
    await PrefillWorker._retire(worker)
    assert done == ["give", "flush", *(["give"] if in_time else []), "leave node", "close"]
