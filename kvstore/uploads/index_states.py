"""States of vector stores' files: whether they can be searched yet.

    store-index/<store>/<file>.<added>.completed
    store-index/<store>/<file>.<added>.cancelled
    store-index/<store>/<file>.<added>.failed          JSON: why
    store-index/<store>/<file>.<added>.changed-<stamp>  its attributes are others since

A file without a key is in progress. A state has a key of its own, and names when the file was added: one that is
written late, of a file that was taken out meanwhile, brings nothing back. All states are known from a listing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import pyarrow as pa

from kvstore.tiers.base import Tier
from kvstore.uploads.ids import next_stamp

ROOT = "store-index/"
State = Literal["in_progress", "completed", "failed", "cancelled"]
_KEY = re.compile(
    r"store-index/(?P<store>[^/]+)/(?P<file>[^./]+)\.(?P<added>\d+)\.(?P<state>[a-z]+)(?:-(?P<stamp>\d+))?"
)
_STRONGER: tuple[State, ...] = ("completed", "cancelled", "failed")  # of two, the one that comes first holds


@dataclass(frozen=True)
class IndexState:
    """State of a file in a store; `changed`: stamp of its latest change of attributes, 0: none."""

    state: State = "in_progress"
    changed: int = 0


Known = Mapping[tuple[str, int], IndexState]  # by file and when it was added


class IndexStates:
    """States of files in a tier. Thread-safe; all methods raise TierUnavailable."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier

    def of(self, store: str) -> Known:
        """States of a store's files; what is not in it is in progress."""
        return states_of(self._tier.keys(f"{ROOT}{store}/"))

    def one(self, store: str, file: str, added: int) -> State:
        """State of one file."""
        known = states_of(self._tier.keys(f"{ROOT}{store}/{file}.{added}."))
        return known.get((file, added), IndexState()).state

    def note(self, store: str, file: str, added: int, state: State, error: tuple[str, str] | None = None) -> None:
        """Note a file's state; `error`: code and message of one that failed."""
        prefix = f"{ROOT}{store}/{file}.{added}."
        if state == "in_progress":
            self._tier.delete_all([prefix + one for one in _STRONGER])
            return
        body = b"" if error is None else json.dumps({"code": error[0], "message": error[1]}).encode()
        self._tier.put(prefix + state, [pa.py_buffer(body)])
        if state == "completed":
            self._tier.delete_all([prefix + "failed", prefix + "cancelled"])

    def try_again(self, store: str, file: str, added: int) -> None:
        """Put a file that failed, or was cancelled, in progress."""
        self._tier.delete_all([f"{ROOT}{store}/{file}.{added}.{one}" for one in ("failed", "cancelled")])

    def note_change(self, store: str, file: str, added: int) -> None:
        """Note that a file's attributes changed."""
        prefix = f"{ROOT}{store}/{file}.{added}.changed-"
        before = list(self._tier.keys(prefix))
        latest = next_stamp(int(key.removeprefix(prefix)) for key in before)
        self._tier.put(f"{prefix}{latest}", [pa.py_buffer(b"")])
        self._tier.delete_all(before)

    def drop(self, store: str, file: str) -> None:
        """Delete all states of a file that is taken out of a store."""
        self._tier.delete_all(list(self._tier.keys(f"{ROOT}{store}/{file}.")))

    def error(self, store: str, file: str, added: int) -> tuple[str, str] | None:
        """Code and message of a file that failed."""
        found = self._tier.get(f"{ROOT}{store}/{file}.{added}.failed")
        if found is None:
            return None
        try:
            told = json.loads(memoryview(found).tobytes())
            return str(told["code"]), str(told["message"])
        except (KeyError, TypeError, ValueError):
            return "server_error", "the file could not be indexed"

    def orphans(self, there: Collection[tuple[str, str]]) -> list[str]:
        """Keys of files that are not `there`, by store and file."""
        keys = ((key, _KEY.fullmatch(key)) for key in self._tier.keys(ROOT))
        return [key for key, match in keys if match and (match["store"], match["file"]) not in there]


def latest(known: Known) -> dict[str, State]:
    """States by file: of one that was taken out and added again, the later one."""
    return {file: state.state for (file, _), state in sorted(known.items(), key=lambda item: item[0])}


def states_of(keys: Iterable[str]) -> Known:
    """States by file and when it was added, of a listing."""
    found: dict[tuple[str, int], IndexState] = {}
    for key in keys:
        match = _KEY.fullmatch(key)
        if match is None:
            continue
        place = match["file"], int(match["added"])
        known = found.get(place, IndexState())
        if match["state"] == "changed":
            found[place] = IndexState(known.state, max(known.changed, int(match["stamp"] or 0)))
        elif match["state"] in _STRONGER:
            both = [one for one in _STRONGER if one in (match["state"], known.state)]
            found[place] = IndexState(both[0], known.changed)
    return found
