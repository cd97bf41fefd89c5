"""Which operating points are switched off, in a file beside the library: a process that starts finds them there.

An operator has to allow a point again, and a restart is no operator. Processes of a node share the file as they share
the library's directory. Without a directory, and on another node, a process that starts knows of none of itself; it
asks the others (`serving.replicas.fidelity_mixin`).
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from prefill_workers.modes import EXACT_POINTS, OperatingPoint

logger = logging.getLogger(__name__)

_FOLDER = ".operating-points"  # the library looks into no folder whose name begins with a dot


class DisabledPoint(NamedTuple):
    """Why and since when (Unix seconds) a point is switched off."""

    reason: str
    since: float


class DisabledPoints:
    """The points of one model that are switched off. Thread-safe.

    A file that cannot be read or written costs a warning, never a request: then only this process knows of them. A
    thread of its own writes, so that a directory that hangs holds up none.

    Args:
        directory: the library's. None: nothing is kept.
        fingerprint: the model's, as the library has it.
    """

    def __init__(self, directory: Path | None, fingerprint: str) -> None:
        self._file = None if directory is None else directory / _FOLDER / f"{fingerprint}.json"
        self._writing = ThreadPoolExecutor(1, thread_name_prefix="switched-off")

    def read(self) -> dict[OperatingPoint, DisabledPoint]:
        """The points, as the file has them."""
        if self._file is None:
            return {}
        try:
            return _read(self._file)
        except (OSError, ValueError) as error:
            logger.warning("%s: which operating points are switched off cannot be read: %s", self._file, error)
            return {}

    def add(self, point: OperatingPoint, reason: str, since: float) -> None:
        """Keep that a point is switched off, soon; the first reason stays."""
        self._change(lambda points: points.setdefault(point, DisabledPoint(reason, since)))

    def remove(self, point: OperatingPoint) -> None:
        """Keep that an operator allowed a point, soon."""
        self._change(lambda points: points.pop(point, None))

    def flush(self) -> None:
        """Wait until everything that changed before is written."""
        self._writing.submit(lambda: None).result()

    def _change(self, change: Callable[[dict[OperatingPoint, DisabledPoint]], object]) -> None:
        if self._file is not None:
            self._writing.submit(self._write, self._file, change)

    def _write(self, file: Path, change: Callable[[dict[OperatingPoint, DisabledPoint]], object]) -> None:
        """Write what is kept anew, one process at a time."""
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            folder = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(folder, fcntl.LOCK_EX)
                points = self.read()
                change(points)
                fresh = file.with_suffix(".part")
                fresh.write_text(json.dumps({point: off._asdict() for point, off in points.items()}, indent=1))
                fresh.replace(file)
            finally:
                os.close(folder)
        except OSError as error:
            logger.warning("%s: which operating points are switched off cannot be kept: %s", file, error)


def _read(file: Path) -> dict[OperatingPoint, DisabledPoint]:
    """Raises OSError, and ValueError if the file does not say of approximate points why and since when."""
    try:
        found = json.loads(file.read_text())
    except FileNotFoundError:
        return {}
    try:
        points = {
            OperatingPoint(name): DisabledPoint(str(off["reason"]), float(off["since"])) for name, off in found.items()
        }
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError("it does not say of operating points why and since when") from error
    if wrong := points.keys() & EXACT_POINTS:
        raise ValueError(f"{', '.join(sorted(wrong))} cannot be switched off")
    return points
