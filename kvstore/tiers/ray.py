"""A tier in Ray's object stores: shared memory within a node, copies between nodes.

    worker ── bytes ──▶ its node's object store ◀── zero-copy view ── any worker of the node
       │ key                    ▲ owns                                any other node: Ray pulls it once
       └──────────▶ Directory, a named actor: key → object

Ray frees an object when its owner ends, and whoever puts an object owns it. So the directory has a task on the worker's
node take the object over: what a task returns belongs to its caller, and stays when the worker that put it is gone. The
directory is detached and on the head node: it outlives the application, which finds its memory warm when it is deployed
again. When it dies its objects go with it, and Ray starts an empty one. When a node dies, what it held is a miss; and
Ray's autoscaler takes no node that holds objects. So a worker that ends for good has them copied to others (`leave`).

What the directory lets go of stays in a node's memory for as long as a worker of the node holds on to it, in its own
memory of the library: leave the object store room for that. Ray is imported when a tier is used, not before.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import chain, cycle
from typing import Any

import numpy as np
import pyarrow as pa
from blake3 import blake3

from kvstore.errors import StoreError, TierUnavailable
from kvstore.settings import LibrarySettings
from kvstore.tiers.base import QUARANTINE, Entry, Lifetime, Tier, check_key
from kvstore.tiers.paths import MARKERS

logger = logging.getLogger(__name__)

NAMESPACE = "orbitserve"
_INLINE_BYTES = 64 << 10  # markers and other small blobs stay in the directory: Ray sends them inside its messages
_PROTOCOL = 4  # of the directory's methods: one that outlived the application may have others
_TIMEOUT_S = 10.0  # for an answer of the directory, and for pulling an object from another node
Payload = Any  # bytes, or a list of one ObjectRef: a bare one would be resolved on its way


def ray_is_running() -> bool:
    """True if this process belongs to a Ray cluster. Does not import Ray."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def directory_name(settings: LibrarySettings) -> str:
    """Name of the directory actor: one for all processes that share a library."""
    directory = "" if settings.directory is None else os.path.abspath(settings.directory)
    identity = repr((directory, settings.url, _PROTOCOL))
    return f"library-{blake3(identity.encode()).hexdigest()[:16]}"


class RayTier(Tier):
    """Blobs in the object stores of the Ray cluster that this process belongs to.

    Args:
        directory: name of the actor that knows them; tiers of one name are one tier.
        limit_bytes: beyond it the directory lets go of what was not used for longest.
    """

    lifetime = Lifetime.NODE  # of whichever node wrote a blob

    def __init__(self, directory: str, limit_bytes: int, name: str = "object-store") -> None:
        self.name = name
        self._actor_name, self._limit = directory, limit_bytes
        self._actor: Any = None

    def start(self) -> None:
        """Start the directory if there is none, so that no call waits the second this takes."""
        with suppress(TierUnavailable), self._directory("start", self._actor_name):
            pass

    def get(self, key: str) -> pa.Buffer | None:
        with self._directory("read", check_key(key)) as directory:
            blob = _answer(directory.lookup.remote(key))
            if blob is None or isinstance(blob, bytes):
                return None if blob is None else pa.py_buffer(blob)
            from ray.exceptions import ObjectLostError

            try:
                return pa.py_buffer(_answer(blob[0]))
            except ObjectLostError as error:
                logger.warning("%s: %s is lost with its node: %s", self.name, key, type(error).__name__)
                _answer(directory.discard.remote(key, blob))
                return None

    def put(self, key: str, buffers: Sequence[pa.Buffer]) -> None:
        size = sum(buffer.size for buffer in buffers)
        with self._directory("write", check_key(key)) as directory:
            blob: Payload
            if size <= _INLINE_BYTES:
                blob, node = b"".join(memoryview(buffer) for buffer in buffers), ""
            else:
                blob, node = self._put_object(directory, buffers)
            if not _answer(directory.store.remote(key, blob, size, node)):
                raise TierUnavailable(f"{self.name}: {key} has {size} bytes, the whole tier {self._limit}")

    def delete(self, key: str) -> bool:
        with self._directory("delete", check_key(key)) as directory:
            return bool(_answer(directory.delete.remote(key)))

    def contains(self, key: str) -> bool:
        return bool(self.stored([key]))

    def stored(self, keys: Collection[str]) -> set[str]:
        asked = [check_key(key) for key in keys]
        with self._directory("look up", ", ".join(asked)) as directory:
            return set(_answer(directory.stored.remote(asked)))

    def entries(self, prefix: str = "") -> Iterator[Entry]:
        with self._directory("list", prefix) as directory:
            yield from _answer(directory.entries.remote(prefix))

    def touch(self, key: str) -> None:
        with self._directory("touch", check_key(key)) as directory:
            directory.touch.remote(key)  # not awaited

    def quarantine(self, key: str) -> bool:
        with self._directory("quarantine", check_key(key)) as directory:
            return bool(_answer(directory.rename.remote(key, QUARANTINE + key)))

    def leave(self, nodes: Sequence[str], until: float) -> tuple[int, int]:
        """Copy the blobs on this node to others, the last used first, and let go of the rest.

        Args:
            nodes: ids of nodes that stay.
            until: when to stop (`time.monotonic`).

        Returns:
            How many were copied, and how many let go of.

        Raises:
            TierUnavailable: the directory does not answer; the rest stays as it is.
        """
        import ray

        here = str(ray.get_runtime_context().get_node_id())
        moved = 0
        with self._directory("move the blobs of", here) as directory:
            held = _answer(directory.at.remote(here))
            for (key, blob), node in zip(held, cycle(nodes), strict=False):
                left = until - time.monotonic()
                copy = _answer(directory.adopt.remote(blob, node)) if left > 0 else None
                if copy is None or not ray.wait(copy, timeout=left, fetch_local=False)[0]:
                    break
                _answer(directory.replace.remote(key, blob, copy, node))
                moved += 1
            for key, blob in held[moved:]:
                _answer(directory.discard.remote(key, blob))
        return moved, len(held) - moved

    def _put_object(self, directory: Any, buffers: Sequence[pa.Buffer]) -> tuple[Payload, str]:
        """Store the buffers as one object on this node that the directory owns; also the node's id."""
        import ray

        parts = [np.frombuffer(buffer, dtype=np.uint8) for buffer in buffers]
        mine = ray.put(parts[0] if len(parts) == 1 else np.concatenate(parts))
        node = str(ray.get_runtime_context().get_node_id())
        blob = _answer(directory.adopt.remote([mine], node))
        _answer(blob[0])  # a view of it on this node: the copy is made
        return blob, node

    @contextmanager
    def _directory(self, action: str, key: str) -> Iterator[Any]:
        """The directory; whatever Ray raises becomes TierUnavailable."""
        import ray

        if not ray.is_initialized():  # or the next call would start a cluster
            raise TierUnavailable(f"{self.name}: cannot {action} {key}: this process has left its Ray cluster")
        try:
            if self._actor is None:
                self._actor = self._start()
            yield self._actor
        except StoreError:
            raise
        except Exception as error:
            if isinstance(error, ray.exceptions.RayActorError):
                self._actor = None  # it may have ended for good: look for it again
            raise TierUnavailable(f"{self.name}: cannot {action} {key}: {type(error).__name__}: {error}") from error

    def _start(self) -> Any:
        """The directory of this name, started if there is none."""
        import ray

        options = {"name": self._actor_name, "namespace": NAMESPACE, "lifetime": "detached", "get_if_exists": True}
        on_head = {"node:__internal_head__": 0.001}  # no other node's death shall take the directory with it
        directory = ray.remote(Directory).options(num_cpus=0, resources=on_head, max_restarts=-1, **options)
        started = directory.remote(self._limit)
        started.resize.remote(self._limit)  # one that outlived the application may have another
        return started


def _answer(reference: Any) -> Any:
    import ray

    return ray.get(reference, timeout=_TIMEOUT_S)


@dataclass(frozen=True)
class _Held:
    blob: Payload
    size: int
    used: float
    node: str  # that the object lies on; "": the directory has the bytes themselves


class Directory:
    """Index of the blobs in a Ray tier, least recently used first.

    Runs as an actor, one call at a time.

    Markers (see `kvstore.tiers.paths`) go behind everything else: without them a deletion by content overlooks their
    records.
    """

    def __init__(self, limit_bytes: int) -> None:
        import ray

        self._limit = limit_bytes
        self._bytes = 0
        self._held: OrderedDict[str, _Held] = OrderedDict()
        self._markers: OrderedDict[str, _Held] = OrderedDict()
        self._copy = ray.remote(num_cpus=0, max_retries=0)(_same)

    def resize(self, limit_bytes: int) -> None:
        """Change the limit to that many bytes."""
        self._limit = limit_bytes
        self._make_room(0)

    def adopt(self, objects: list[Any], node: str) -> Payload:
        """A copy of an object on a node, which belongs to this actor; elsewhere if the node is gone."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        there = NodeAffinitySchedulingStrategy(node, soft=True)
        return [self._copy.options(scheduling_strategy=there).remote(objects[0])]

    def store(self, key: str, blob: Payload, size: int, node: str) -> bool:
        """Store a blob, replacing the key's. False if it is larger than the whole tier."""
        if size > self._limit:
            return False
        self.delete(key)
        self._make_room(size)
        self._among(key)[key] = _Held(blob, size, time.time(), node)
        self._bytes += size
        return True

    def _make_room(self, size: int) -> None:
        while self._bytes + size > self._limit:
            self.delete(next(iter(self._held or self._markers)))

    def _among(self, key: str) -> OrderedDict[str, _Held]:
        return self._markers if key.startswith(MARKERS) else self._held

    def lookup(self, key: str) -> Payload | None:
        """The blob: bytes, or the object that holds them."""
        held = self._among(key).get(key)
        return None if held is None else held.blob

    def stored(self, keys: list[str]) -> list[str]:
        """The keys that have a blob."""
        return [key for key in keys if key in self._among(key)]

    def delete(self, key: str) -> bool:
        """Release a blob. Ray frees its memory when its last reader does."""
        held = self._among(key).pop(key, None)
        self._bytes -= 0 if held is None else held.size
        return held is not None

    def discard(self, key: str, blob: Payload) -> None:
        """Delete a blob that turned out to be lost, unless another one has taken its place."""
        if self.lookup(key) == blob:
            self.delete(key)

    def at(self, node: str) -> list[tuple[str, Payload]]:
        """Blobs that lie on a node, the last used first."""
        return [(key, held.blob) for key, held in reversed(self._held.items()) if held.node == node]

    def replace(self, key: str, blob: Payload, copy: Payload, node: str) -> None:
        """Put the copy of a blob on another node in its place, unless it has changed or gone."""
        among = self._among(key)
        if key in among and among[key].blob == blob:
            among[key] = replace(among[key], blob=copy, node=node)

    def rename(self, key: str, target: str) -> bool:
        """Move a blob to another key."""
        held = self._among(key).get(key)
        if held is None:
            return False
        self.delete(key)
        return self.store(target, held.blob, held.size, held.node)

    def touch(self, key: str) -> None:
        """Mark a blob as used now."""
        among = self._among(key)
        if key in among:
            among[key] = replace(among[key], used=time.time())
            among.move_to_end(key)

    def entries(self, prefix: str) -> list[Entry]:
        """Every blob whose key starts with `prefix`."""
        everything = chain(self._held.items(), self._markers.items())
        return [Entry(key, held.size, held.used) for key, held in everything if key.startswith(prefix)]


def _same(array: Any) -> Any:
    return array
