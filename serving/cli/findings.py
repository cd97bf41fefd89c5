"""A finding of the doctor."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CheckResult:
    """One finding. `remedy` says what to do when `ok` is false and is empty otherwise."""

    name: str
    ok: bool
    detail: str
    remedy: str = ""
