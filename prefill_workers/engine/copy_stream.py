"""Copies between host and device that the forward's stream does not wait for.

    library (pageable) ──► ring of page-locked blocks ──► device memory ──event──► the forward's stream

A copy from pageable memory holds up the host until the device has come to it in stream order. `PinnedRing` copies to
page-locked blocks on the host and lets the device fetch these on a stream of its own; the forward's stream waits for an
event, the host for nothing but a block that is still being fetched.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

RING_BYTES = 64 << 20  # page-locked
_ALIGNMENT = 256  # bytes, of each tensor in device memory
_BLOCKS = 4  # of a ring: one is filled while others are fetched


class CopyEvent(Protocol):
    """A point in a stream, as `torch.Event`."""

    def query(self) -> bool:
        """True if the device has passed it."""

    def synchronize(self) -> None:
        """Wait for that."""


class CopyStream(Protocol):
    """A stream of copies beside the stream of the forward."""

    def pinned(self, nbytes: int) -> Tensor:
        """Page-locked host memory, uint8."""

    def empty(self, nbytes: int) -> Tensor:
        """Device memory, uint8, for copies of this stream that the forward's stream reads."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Enqueue a copy between contiguous tensors, one page-locked and one on the device."""

    def event(self) -> CopyEvent:
        """An event behind all that is enqueued here."""

    def precede(self, event: CopyEvent) -> None:
        """Have the forward's stream wait for an event of this one."""

    def follow(self) -> None:
        """Have this stream wait for all that is enqueued on the forward's."""


class CudaCopyStream:
    """`CopyStream` of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def pinned(self, nbytes: int) -> Tensor:
        """See `CopyStream`."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def empty(self, nbytes: int) -> Tensor:
        """See `CopyStream`."""
        with torch.cuda.stream(self._stream):
            memory = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        memory.record_stream(torch.cuda.current_stream(self._device))  # not reused while a forward reads it
        return memory

    def copy(self, target: Tensor, source: Tensor) -> None:
        """See `CopyStream`."""
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def event(self) -> CopyEvent:
        """See `CopyStream`."""
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def precede(self, event: CopyEvent) -> None:
        """See `CopyStream`."""
        assert isinstance(event, torch.cuda.Event)
        torch.cuda.current_stream(self._device).wait_event(event)

    def follow(self) -> None:
        """See `CopyStream`."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))


class PinnedRing:
    """Sends host tensors to the device, and fetches device tensors, through page-locked memory.

    Args:
        nbytes: of page-locked memory.
    """

    def __init__(self, stream: CopyStream, nbytes: int) -> None:
        self._stream = stream
        self._block = nbytes // _BLOCKS // _ALIGNMENT * _ALIGNMENT
        memory = stream.pinned(_BLOCKS * self._block)
        self._free = deque[tuple[Tensor, CopyEvent | None]]((block, None) for block in memory.split(self._block))

    def send(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Contiguous copies in device memory, for what the forward's stream does next."""
        (copies,) = self.send_groups([tensors])
        return copies

    def send_groups(self, groups: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
        """`send`, where each group is in memory of its own: it is freed when the group is."""
        sent, block, used = list[list[Tensor]](), None, 0
        try:
            for tensors in groups:
                starts = list(accumulate((_aligned(tensor.nbytes) for tensor in tensors), initial=0))
                memory = self._stream.empty(starts[-1])
                pieces = deque(
                    placed
                    for tensor, start in zip(tensors, starts, strict=False)
                    for placed in _pieces(tensor, self._block - _ALIGNMENT, start)
                )
                while pieces:
                    if block is None:
                        block, used = self._next(), 0
                    first = end = pieces[0][0]
                    begin = first // _ALIGNMENT * _ALIGNMENT  # views are aligned as the memory's are
                    while pieces and used + pieces[0][0] + pieces[0][1].nbytes - begin <= self._block:
                        at, piece = pieces.popleft()
                        end = at + piece.nbytes
                        place = block[used + at - begin : used + end - begin]
                        place.view(piece.dtype).view(piece.shape).copy_(piece)
                    if end > first:
                        self._stream.copy(memory[first:end], block[used + first - begin : used + end - begin])
                        used += _aligned(end - begin)
                    if pieces:
                        self._free.append((block, self._stream.event()))
                        block = None
                sent.append(
                    [
                        memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                        for tensor, start in zip(tensors, starts, strict=False)
                    ]
                )
        finally:  # also where the device has no memory left
            if block is not None:
                self._free.append((block, self._stream.event()))
        self._stream.precede(self._stream.event())
        return sent

    def fetch(self, tensor: Tensor, out: Tensor | None = None) -> Tensor:
        """Copy of a contiguous device tensor in host memory; waits for the forward's stream.

        `out`: where to, contiguous; None: new memory.
        """
        out = torch.empty(tensor.shape, dtype=tensor.dtype) if out is None else out
        source, target = (part.view(-1).view(torch.uint8) for part in (tensor, out))
        self._stream.follow()
        coming: deque[tuple[Tensor, Tensor, CopyEvent]] = deque()
        for part, place in zip(source.split(self._block), target.split(self._block), strict=True):
            if len(coming) == _BLOCKS - 1:
                self._take(*coming.popleft())
            block = self._next()
            self._stream.copy(block[: part.numel()], part)
            coming.append((block, place, self._stream.event()))
        while coming:
            self._take(*coming.popleft())
        return out

    def _next(self) -> Tensor:
        """A block that the device does not use."""
        block, event = self._free.popleft()
        if event is not None:
            event.synchronize()
        return block

    def _take(self, block: Tensor, place: Tensor, event: CopyEvent) -> None:
        event.synchronize()
        place.copy_(block[: place.numel()])
        self._free.append((block, None))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _pieces(tensor: Tensor, limit: int, start: int) -> Iterator[tuple[int, Tensor]]:
    """The tensor in slices of at most so many bytes, and where each begins in memory in which it begins at `start`."""
    if not tensor.numel():
        return
    row = tensor.nbytes // len(tensor)
    if row > limit:
        for index, part in enumerate(tensor):
            yield from _pieces(part, limit, start + index * row)
        return
    rows = limit // row
    for index, part in enumerate(tensor.split(rows)):
        yield start + index * rows * row, part
