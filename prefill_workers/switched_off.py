"""Which operating points are switched off, in a file beside the library: a process that starts finds them there.

An operator has to allow a point again, and a restart is no operator. Processes of a node share the file as they share
the library's directory. Without a directory, and on another node, a process that starts knows of none of itself; it
asks the others (`serving.fidelity_replica`).
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

from prefill_workers.policies import EXACT_POINTS, OperatingPoint

logger = logging.getLogger(__name__)

_FOLDER = ".operating-points"  # the library looks into no folder whose name begins with a dot


class SwitchedOff:
    """The points of one model that are switched off, and why.

    A file that cannot be read or written costs a warning, never a request: then only this process knows of them.

    Args:
        directory: the library's. None: nothing is kept.
        fingerprint: the model's, as the library has it.
    """

    def __init__(self, directory: Path | None, fingerprint: str) -> None:
        self._file = None if directory is None else directory / _FOLDER / f"{fingerprint}.json"

    def read(self) -> dict[OperatingPoint, str]:
        """The points, each with the reason."""
        if self._file is None:
            return {}
        try:
            return _read(self._file)
        except (OSError, ValueError) as error:
            logger.warning("%s: which operating points are switched off cannot be read: %s", self._file, error)
            return {}

    def add(self, point: OperatingPoint, reason: str) -> None:
        """Keep that a point is switched off; the first reason stays."""
        self._change(lambda points: points.setdefault(point, reason))

    def remove(self, point: OperatingPoint) -> None:
        """Keep that an operator allowed a point."""
        self._change(lambda points: points.pop(point, None))

    def _change(self, change: Callable[[dict[OperatingPoint, str]], object]) -> None:
        """Write what is kept anew, one process at a time."""
        if self._file is None:
            return
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            folder = os.open(self._file.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(folder, fcntl.LOCK_EX)
                points = self.read()
                change(points)
                fresh = self._file.with_suffix(".part")
                fresh.write_text(json.dumps(points, indent=1))
                fresh.replace(self._file)
            finally:
                os.close(folder)
        except OSError as error:
            logger.warning("%s: which operating points are switched off cannot be kept: %s", self._file, error)


def _read(file: Path) -> dict[OperatingPoint, str]:
    """Raises OSError, and ValueError if the file does not name approximate points with reasons."""
    try:
        found = json.loads(file.read_text())
    except FileNotFoundError:
        return {}
    if not isinstance(found, dict) or not all(isinstance(reason, str) for reason in found.values()):
        raise ValueError("it holds no object of operating points and reasons")
    points = {OperatingPoint(name): reason for name, reason in found.items()}
    if wrong := points.keys() & EXACT_POINTS:
        raise ValueError(f"{', '.join(sorted(wrong))} cannot be switched off")
    return points
