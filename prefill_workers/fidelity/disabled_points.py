"""Disabled operating points in a file beside the library, which outlives the process.

An operator has to allow a point again, and a restart is no operator. The library's keeper owns the file
(`serving.replicas.fidelity`); without a directory nothing outlives the service.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from kvstore.private_files import make_private_folder, private_opener
from prefill_workers.modes import EXACT_POINTS, OperatingPoint

logger = logging.getLogger(__name__)

_FOLDER = ".operating-points"  # the library looks into no folder whose name begins with a dot


class PointDecision(NamedTuple):
    """Decision about an operating point; `changed`: Unix seconds; `reason`: why it is disabled."""

    point: OperatingPoint
    allowed: bool
    changed: float
    reason: str = ""


class DisabledPoints:
    """The disabled points of one model. Thread-safe.

    A file that cannot be read or written costs a warning: then only this process knows of them. A thread of its own
    writes, so that a directory that hangs holds up none. Processes that share a directory share the file.

    Args:
        directory: the library's. None: nothing is kept.
        fingerprint: the model's, as the library has it.
    """

    def __init__(self, directory: Path | None, fingerprint: str) -> None:
        self._file = None if directory is None else directory / _FOLDER / f"{fingerprint}.json"
        self._writing = ThreadPoolExecutor(1, thread_name_prefix="disabled-points")

    def read(self) -> list[PointDecision]:
        """Decisions of the points that are disabled."""
        if self._file is None:
            return []
        try:
            return _read(self._file)
        except (OSError, ValueError) as error:
            logger.warning("%s: which operating points are switched off cannot be read: %s", self._file, error)
            return []

    def write(self, decision: PointDecision) -> None:
        """Keep a decision, soon; of a point that is disabled already the first reason stays."""
        if self._file is not None:
            self._writing.submit(self._write, self._file, decision)

    def flush(self) -> None:
        """Wait until every earlier decision is written."""
        self._writing.submit(lambda: None).result()

    def _write(self, file: Path, decision: PointDecision) -> None:
        """Rewrite the file, one process at a time."""
        try:
            make_private_folder(file.parent)
            folder = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(folder, fcntl.LOCK_EX)
                disabled = {known.point: known for known in self.read()}
                if decision.allowed:
                    disabled.pop(decision.point, None)
                else:
                    disabled.setdefault(decision.point, decision)
                document = {point: {"reason": off.reason, "since": off.changed} for point, off in disabled.items()}
                fresh = file.with_suffix(".part")
                with open(fresh, "w", opener=private_opener) as handle:
                    handle.write(json.dumps(document, indent=1))
                fresh.replace(file)
            finally:
                os.close(folder)
        except OSError as error:
            logger.warning("%s: which operating points are switched off cannot be kept: %s", file, error)


def _read(file: Path) -> list[PointDecision]:
    """Parse the file.

    Raises:
        OSError: it cannot be read.
        ValueError: it lacks reason and time of approximate points.
    """
    try:
        found = json.loads(file.read_text())
    except FileNotFoundError:
        return []
    try:
        decisions = [
            PointDecision(OperatingPoint(name), False, float(off["since"]), str(off["reason"]))
            for name, off in found.items()
        ]
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError("it does not say of operating points why and since when") from error
    if wrong := {decision.point for decision in decisions} & EXACT_POINTS:
        raise ValueError(f"{', '.join(sorted(wrong))} cannot be switched off")
    return decisions
