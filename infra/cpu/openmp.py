"""OpenMP threads (libgomp) of CPU engines: how they wait for each other, and when they end.

An engine's forward is hundreds of parallel regions, some of them microseconds long. What it takes depends on how its
threads wait between two of them, and both ways cost where they do not fit (benchmark `shared-cores`):

- threads that look for the next region keep a processor meanwhile. Where another process wants it, the very thread
  that they wait for may be the one that does not get it;
- threads that sleep have to be woken for every region, which takes longer than most regions.

So engines look while no other process computes, and sleep otherwise (`consider_others`). The number of threads stays
what it is: vLLM keeps matrix kernels that were made for it.

Every thread that computes has a team of its own. The team of a thread that computes no more has to be let go
(`release`): with more threads in all teams than there are processors libgomp has every one sleep, and eigenvectors of
small matrices, say, take seven times as long. The same rule is what makes them sleep here: it is looked at whenever a
thread begins to wait, so a further team, which does nothing, is kept as long as they should.

torch is imported late: OpenMP reads its variables when it is loaded, and who sets them imports this too.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

CONSIDER = "ORBITSERVE_CONSIDER_OTHERS"  # "0": `consider_others` does nothing
_LOOKS, _PAUSE_SECONDS = 3, 0.0003  # in all longer than a thread looks for a region (`serving.replicas.process.SPIN`)
_SOFT = 1  # omp_pause_soft: threads end, settings stay
_PARALLEL = 1 << 17  # elements that torch works on with all threads


def consider_others() -> None:
    """Make this process's OpenMP threads sleep between regions if others need the processors.

    Where the system does not tell who runs, nobody does. Of a container with a quota it tells who runs on its host.
    """
    if os.environ.get(CONSIDER) == "0":
        return
    import torch

    free = (os.cpu_count() or 1) - _others()
    _brake().set(free < torch.get_num_threads())


@contextmanager
def alone() -> Iterator[None]:
    """Run the block on the calling thread alone, without a team."""
    before = _call("omp_get_max_threads")
    _call("omp_set_num_threads", 1)
    mkl_before = _call("MKL_Set_Num_Threads_Local", 1)  # it has a number of its own once torch has set one
    try:
        yield
    finally:
        _call("omp_set_num_threads", before or 1)
        _call("MKL_Set_Num_Threads_Local", mkl_before or 0)


def release() -> None:
    """End the threads that take part in what the calling thread computes.

    If it computes again, it gets new ones.
    """
    _call("omp_pause_resource_all", _SOFT)


class _Brake:
    """A thread that has a team, which it does not use, while it is set."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._wanted = self._is_set = False
        threading.Thread(target=self._run, name="openmp-brake", daemon=True).start()

    def set(self, wanted: bool) -> None:
        """Return at once."""
        if wanted != self._wanted:
            with self._changed:
                self._wanted = wanted
                self._changed.notify()

    def _run(self) -> None:
        import torch

        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._wanted != self._is_set)
                self._is_set = wanted = self._wanted
            if wanted:
                torch.zeros(_PARALLEL)
            else:
                release()


@cache
def _brake() -> _Brake:
    return _Brake()


os.register_at_fork(after_in_child=_brake.cache_clear)  # a child has neither its parent's threads nor their teams


def _others() -> int:
    """Number of runnable threads on the machine besides the calling one; 0 if unknown."""
    others = _running()
    for _ in range(_LOOKS):  # one of them may be of the calling thread's own team, and look for a region
        if not others:
            break
        time.sleep(_PAUSE_SECONDS)
        others = min(others, _running())
    return others


def _running() -> int:
    file = _load()
    return 0 if file is None else int(os.pread(file, 128, 0).split()[3].split(b"/")[0]) - 1


@cache
def _load() -> int | None:
    with suppress(OSError):
        return os.open("/proc/loadavg", os.O_RDONLY)
    return None


def _call(name: str, *arguments: int) -> Any:
    """A function of the OpenMP or MKL that torch uses; None where it has none."""
    function = _function(name)
    return None if function is None else function(*arguments)


@cache
def _function(name: str) -> Any:
    import torch

    for path in (None, torch._C.__file__):  # one that was loaded before torch's own is what torch uses too
        with suppress(OSError, AttributeError):
            return getattr(ctypes.CDLL(path), name)
    return None
