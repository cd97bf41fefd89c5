"""A device that is none: host memory that stands for a GPU's, and counts what would have kept the host waiting."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_READS = {"aten._local_scalar_dense.default", "aten.equal.default", "aten.is_nonzero.default", "aten.nonzero.default"}
_INDEXING = {"aten.index.Tensor", "aten.index_put.default", "aten.index_put_.default"}


class CountingDevice(TorchDispatchMode):
    """While entered, watches every operation on tensors in the memory that `stream` gives out.

    What is computed of device tensors alone is on the device too. Copies of the stream are held back until something
    waits for them, so that what is read too early, or overwritten, is wrong.

    Attributes:
        pageable: operations between device and other host memory: copies that stop the host in stream order.
        waits: times that the host waited for the device.
        copies: of the stream.
        recorded: timed events, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pageable = self.waits = self.copies = 0
        self.recorded: list[StreamEvent] = []
        self.stream = _Stream(self)
        self._device: dict[int, Tensor] = {}  # kept, so that no other tensor gets their memory
        self._pinned: set[int] = set()

    def holds(self, tensor: Tensor) -> bool:
        """True if a tensor lies on the device."""
        return tensor.untyped_storage().data_ptr() in self._device

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._pinned

    def add(self, tensor: Tensor) -> Tensor:
        self._device[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def pin(self, tensor: Tensor) -> Tensor:
        self._pinned.add(tensor.untyped_storage().data_ptr())
        return tensor

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.numel()]
        if str(func) in _INDEXING:  # a mask becomes places where it lies, and these go there without a wait
            masks = [leaf for leaf in tree_leaves(args[1]) if isinstance(leaf, Tensor) and leaf.dtype is torch.bool]
            self.waits += any(map(self.holds, masks))
            given = [tensor for tensor in given if not any(tensor is mask for mask in masks)]
        there = [tensor for tensor in given if self.holds(tensor)]
        result = func(*args, **(kwargs or {}))
        if there:
            self.waits += str(func) in _READS
            self.pageable += len(there) < len(given)
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor) and leaf.numel() and len(there) == len(given):
                    self.add(leaf)
        return result


@dataclass(eq=False)
class StreamEvent:
    """A timed event of the forward's stream, which has no queue here: it is passed when the test says so."""

    device: CountingDevice
    passed: bool = False
    at: float = 0.0  # milliseconds

    def record(self) -> None:
        self.device.recorded.append(self)

    def query(self) -> bool:
        return self.passed

    def elapsed_time(self, end_event: StreamEvent) -> float:
        self.device.waits += not (self.passed and end_event.passed)
        return end_event.at - self.at


@dataclass
class _Event:
    stream: _Stream
    position: int

    def query(self) -> bool:
        return self.stream.done >= self.position

    def synchronize(self) -> None:
        if not self.query():
            self.stream.device.waits += 1
            self.stream.run(self.position)


class _Stream:
    """A `CopyStream` whose copies happen when something waits for them."""

    def __init__(self, device: CountingDevice) -> None:
        self.device = device
        self.done = 0
        self._queue: list[Callable[[], object]] = []

    def pinned(self, nbytes: int) -> Tensor:
        return self.device.pin(torch.zeros(nbytes, dtype=torch.uint8))

    def empty(self, nbytes: int) -> Tensor:
        return self.device.add(torch.zeros(nbytes, dtype=torch.uint8))

    def copy(self, target: Tensor, source: Tensor) -> None:
        assert self.device.is_pinned(source) != self.device.is_pinned(target)
        assert self.device.holds(source) != self.device.holds(target)
        assert source.is_contiguous()
        assert target.is_contiguous()
        self.device.copies += 1
        self._queue.append(lambda: target.numpy().__setitem__(slice(None), source.numpy()))

    def event(self) -> _Event:
        return _Event(self, len(self._queue))

    def precede(self, event: _Event) -> None:
        self.run(event.position)

    def follow(self) -> None:
        """Nothing is held back on the forward's stream."""

    def run(self, position: int) -> None:
        for copy in self._queue[self.done : position]:
            copy()
        self.done = max(self.done, position)
