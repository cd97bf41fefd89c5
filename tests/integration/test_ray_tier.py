"""The Ray object store as a tier, on a real cluster of two nodes: shared, zero-copy, and a miss when something dies."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import ray
import torch
from kvstore_support import FINGERPRINT, canonical
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from tier_conformance import TierConformance, buffers
from waiting import wait_for

from kvstore.errors import TierUnavailable
from kvstore.library import Library
from kvstore.settings import LibrarySettings
from kvstore.tiers.base import Tier
from kvstore.tiers.paths import MARKERS
from kvstore.tiers.ray import NAMESPACE, RayTier, directory_name

pytestmark = pytest.mark.cluster

MIB = 1 << 20
NODE = {"num_cpus": 1, "object_store_memory": 150 * MIB}
# Ray takes half a minute by default to believe that a node is dead.
WATCHFUL = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 2}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two nodes; this process is on the first."""
    cluster = Cluster(
        initialize_head=True, head_node_args={**NODE, "include_dashboard": False, "_system_config": WATCHFUL}
    )
    cluster.add_node(**NODE)
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture(scope="module")
def second_node(cluster: Cluster) -> str:
    here = ray.get_runtime_context().get_node_id()
    return next(node["NodeID"] for node in ray.nodes() if node["NodeID"] != here)


@pytest.fixture(scope="module")
def one_tier(cluster: Cluster) -> RayTier:
    return RayTier("of-the-tests", 64 * MIB)


@pytest.fixture
def empty(one_tier: RayTier) -> RayTier:
    for key in list(one_tier.keys()):
        one_tier.delete(key)
    return one_tier


class TestRayTier(TierConformance):
    @pytest.fixture
    def tier(self, empty: RayTier) -> Tier:
        return empty


def on(node: str, work: Callable[..., Any], *arguments: Any) -> Any:
    """Run a function in a worker of its own on a node; the worker ends with it."""
    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    task = ray.remote(num_cpus=0, max_calls=1, scheduling_strategy=strategy)(work)
    return ray.get(task.remote(*arguments), timeout=60)


def end(directory: str) -> None:
    """Kill a directory for good, and wait until it is gone."""
    actor = ray.get_actor(directory, namespace=NAMESPACE)
    pid = ray.get(actor.__ray_call__.remote(lambda _: os.getpid()))
    ray.kill(actor)
    wait_for(lambda: not Path(f"/proc/{pid}").exists())


def put_elsewhere(node: str, directory: str, key: str, blob: bytes) -> int:
    """Put a blob from another process on another node; returns that process's id once it has ended."""

    def work() -> int:
        RayTier(directory, 64 * MIB).put(key, [pa.py_buffer(blob)])
        return os.getpid()

    return on(node, work)


def test_reading_copies_nothing_on_a_node(empty: RayTier) -> None:
    empty.put("k", buffers(os.urandom(MIB)))
    one, two = empty.get("k"), empty.get("k")
    assert one is not None
    assert two is not None
    assert one.address == two.address
    assert not one.is_mutable
    mapped = (line.split() for line in Path("/proc/self/maps").read_text().splitlines())
    places = [line[5] for line in mapped if _contains(line[0], one.address)]
    assert "plasma" in places[0]


def _contains(span: str, address: int) -> bool:
    start, end = (int(place, 16) for place in span.split("-"))
    return start <= address < end


def test_a_blob_outlives_the_worker_that_put_it_and_is_read_from_another_node(empty: RayTier, second_node: str) -> None:
    blob = os.urandom(MIB)
    writer = put_elsewhere(second_node, "of-the-tests", "from/afar", blob)
    assert writer != os.getpid()
    wait_for(lambda: not Path(f"/proc/{writer}").exists())
    assert bytes(empty.get("from/afar") or b"") == blob


def test_the_directory_keeps_its_bytes_and_lets_go_of_what_was_used_last(cluster: Cluster) -> None:
    tier = RayTier("small", 3 * MIB)
    for key in ("a", "b", "c"):
        tier.put(key, buffers(bytes(MIB)))
    tier.touch("a")
    tier.put("d", buffers(bytes(MIB)))
    assert sorted(tier.keys()) == ["a", "c", "d"]
    with pytest.raises(TierUnavailable, match="4194304 bytes, the whole tier 3145728"):
        tier.put("e", buffers(bytes(4 * MIB)))
    assert tier.size_bytes() == 3 * MIB


def test_a_directory_that_outlived_the_application_takes_its_new_limit(cluster: Cluster) -> None:
    before = RayTier("resized", 3 * MIB)
    for key in ("a", "b", "c"):
        before.put(key, buffers(bytes(MIB)))
    smaller = RayTier("resized", 2 * MIB)
    assert sorted(smaller.keys()) == ["b", "c"]
    RayTier("resized", 4 * MIB).put("d", buffers(bytes(2 * MIB)))
    assert sorted(before.keys()) == ["b", "c", "d"]


def test_the_directory_keeps_markers_behind_all_that_they_stand_for(cluster: Cluster) -> None:
    tier = RayTier("small-with-markers", 3 * MIB)
    tier.put(MARKERS + "of/a", buffers(b"a"))
    for key in ("a", "b", "c"):
        tier.put(key, buffers(bytes(MIB)))
    assert sorted(tier.keys()) == ["b", MARKERS + "of/a", "c"]
    assert list(tier.keys(MARKERS)) == [MARKERS + "of/a"]
    assert tier.delete(MARKERS + "of/a")
    assert tier.size_bytes() == 2 * MIB
    for number in range(4):
        tier.put(f"{MARKERS}of/{number}", buffers(bytes(MIB)))
    assert sorted(tier.keys()) == [f"{MARKERS}of/{number}" for number in (1, 2, 3)]


def test_what_one_worker_stores_every_worker_finds(cluster: Cluster, second_node: str, tmp_path: Path) -> None:
    settings = LibrarySettings(directory=tmp_path / "one node's disk")
    record = canonical(tokens=2000)
    with Library(settings, FINGERPRINT) as library:
        library.put(record)
        library.flush()
        names = list(library.stats().tier_bytes)
    assert names == ["object-store", "disk"]

    files = list(settings.directory.rglob("*.arrow"))
    assert files
    for file in files:  # of the other node's disk only the name is the same
        file.unlink()

    def read() -> Any:
        with Library(settings, FINGERPRINT) as elsewhere:
            found = elsewhere.get_canonical(record.key, record.tenant)
            return found.kv.clone() if found else None

    assert torch.equal(on(second_node, read), record.kv)


def test_another_library_of_the_cluster_is_another_tier(tmp_path: Path) -> None:
    one, two = (directory_name(LibrarySettings(directory=tmp_path / name)) for name in "ab")
    assert one != two
    assert directory_name(LibrarySettings(directory=tmp_path / "a")) == one


def test_without_room_in_the_settings_there_is_no_such_tier(cluster: Cluster, tmp_path: Path) -> None:
    with Library(LibrarySettings(directory=tmp_path, object_store_bytes=0), FINGERPRINT) as library:
        assert list(library.stats().tier_bytes) == ["disk"]


def test_a_directory_that_dies_is_unavailable_and_comes_back_empty(cluster: Cluster) -> None:
    tier = RayTier("mortal", 64 * MIB)
    tier.put("k", buffers(os.urandom(MIB)))
    held = tier.get("k")
    assert held is not None
    before = bytes(held)
    end("mortal")
    with pytest.raises(TierUnavailable):
        tier.get("k")
    assert tier.get("k") is None
    tier.put("k", buffers(b"again"))
    assert bytes(tier.get("k") or b"") == b"again"
    assert bytes(held) == before, "whoever reads a blob keeps it"


def test_a_library_has_its_directory_started_before_it_is_used(cluster: Cluster, tmp_path: Path) -> None:
    settings = LibrarySettings(directory=tmp_path)
    with Library(settings, FINGERPRINT):
        assert directory_name(settings) in [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]


def test_a_library_survives_its_directory(cluster: Cluster, tmp_path: Path) -> None:
    settings = LibrarySettings(directory=tmp_path, memory_bytes=0)
    record = canonical(tokens=2000)
    with Library(settings, FINGERPRINT) as library:
        library.put(record)
        library.flush()
        end(directory_name(settings))
        found = library.get_canonical(record.key, record.tenant)
        assert found is not None, "the disk has it too"
        assert torch.equal(found.kv, record.kv)
        assert library.stats().tier_errors == 1


def test_a_node_that_dies_takes_its_blobs_but_those_that_were_moved(
    cluster: Cluster, empty: RayTier, second_node: str
) -> None:
    here = ray.get_runtime_context().get_node_id()

    def leave(seconds: float) -> tuple[int, int]:
        return RayTier("of-the-tests", 64 * MIB).leave([here], time.monotonic() + seconds)

    old, new = os.urandom(MIB), os.urandom(MIB)
    put_elsewhere(second_node, "of-the-tests", "old", b"z" * MIB)
    assert on(second_node, leave, 0.0) == (0, 1), "without time all is let go of: it would keep the node"
    put_elsewhere(second_node, "of-the-tests", "old", old)
    put_elsewhere(second_node, "of-the-tests", "new", new)
    put_elsewhere(second_node, "of-the-tests", "marker", b"small")
    assert on(second_node, leave, 30.0) == (2, 0)
    assert on(second_node, leave, 30.0) == (0, 0), "nothing is left there"
    put_elsewhere(second_node, "of-the-tests", "there", os.urandom(MIB))
    empty.put("here", buffers(b"x" * MIB))
    (node,) = (node for node in cluster.list_all_nodes() if node.node_id == second_node)
    cluster.remove_node(node, allow_graceful=False)
    wait_for(lambda: not all(node["Alive"] for node in ray.nodes()))
    assert empty.get("there") is None
    assert sorted(empty.keys()) == ["here", "marker", "new", "old"]
    assert [bytes(empty.get(key) or b"") for key in ("old", "new", "marker")] == [old, new, b"small"]
    assert bytes(empty.get("here") or b"") == b"x" * MIB
    empty.put("there", buffers(b"y" * MIB))
    assert bytes(empty.get("there") or b"") == b"y" * MIB


def test_the_library_does_not_need_ray(tmp_path: Path) -> None:
    code = (
        "import sys; from kvstore.library import Library; from kvstore.settings import LibrarySettings\n"
        f"Library(LibrarySettings(directory={str(tmp_path)!r}), 'model').close(); assert 'ray' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_process_outside_a_cluster_has_no_such_tier(tmp_path: Path) -> None:
    """Last: it leaves the cluster."""
    ray.shutdown()
    with pytest.raises(TierUnavailable, match="left its Ray cluster"):
        RayTier("any", MIB).get("k")
    assert not ray.is_initialized(), "asking must not start a cluster"
    with Library(LibrarySettings(directory=tmp_path), FINGERPRINT) as library:
        assert list(library.stats().tier_bytes) == ["disk"]
