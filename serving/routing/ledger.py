"""Ledger of one router: calls under way on each replica, beside the replica's reports.

A replica's load is what this process has under way there, which is known exactly and at once, and what others have:
the part of its last report that this process cannot account for, or, where that is stale, as much as others have on the
replicas that do report, on average. Nobody's clock but this process' own is read, so that a report was made at an
unknown time in the last two periods: this process accounts for the most that it had under way there at once since then.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

STALE_PERIODS = 5  # a report that is older says nothing
EXPECTED_PERIODS = 3  # what was sent to a replica must show in its reports within this time
_FORGOTTEN_SECONDS = 1800.0  # Serve does not tell of a call that is cancelled in the instant in which it is sent

R = TypeVar("R")


class Load(NamedTuple):
    """Load of a replica: tokens to compute or KV blocks to hold, and sequences."""

    work: float = 0
    sequences: float = 0

    def plus(self, other: Load) -> Load:
        """Both."""
        return Load(self.work + other.work, self.sequences + other.sequences)

    def at_least(self, other: Load) -> Load:
        """The larger of both, by each measure."""
        return Load(max(self.work, other.work), max(self.sequences, other.sequences))

    def less(self, other: Load) -> Load:
        """Difference of both, nothing at least."""
        return Load(max(0, self.work - other.work), max(0, self.sequences - other.sequences))


NOTHING = Load()


class _Call(NamedTuple):
    load: Load
    kept: Collection[bytes]
    sent: float


@dataclass(eq=False)
class _Account(Generic[R]):
    report: R | None = None
    sequence: int = -1
    arrived: float = 0.0
    lost: bool = False
    others: Load = NOTHING
    own: Load = NOTHING
    most: Load = NOTHING  # own at once since the last report
    most_before: Load = NOTHING  # and between that and the one before it
    calls: dict[str, deque[_Call]] = field(default_factory=lambda: defaultdict(deque))
    expected: dict[bytes, float] = field(default_factory=dict)  # when by latest


class Ledger(Generic[R]):
    """By replica. `R`: a role's reports; `period_s`: how often they come. Belongs to one thread."""

    def __init__(self, period_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._fresh_s, self._expected_s = STALE_PERIODS * period_s, EXPECTED_PERIODS * period_s
        self._clock = clock
        self._accounts: dict[str, _Account[R]] = defaultdict(_Account)

    # -- what is told -------------------------------------------------------------------------------------------------

    def keep(self, replicas: Collection[str]) -> None:
        """Forget all other replicas."""
        for gone in self._accounts.keys() - set(replicas):
            del self._accounts[gone]

    def is_news(self, replica: str, sequence: int) -> bool:
        """True if the replica's report of this number is not known yet."""
        return self._accounts[replica].sequence != sequence

    def report(self, replica: str, sequence: int, load: Load, report: R) -> None:
        """A replica's next report."""
        account, now = self._accounts[replica], self._clock()
        for name in [name for name, calls in account.calls.items() if now - calls[0].sent > _FORGOTTEN_SECONDS]:
            self.completed(replica, name)
        account.report, account.sequence, account.arrived, account.lost = report, sequence, now, False
        account.others = load.less(account.most.at_least(account.most_before))
        account.most, account.most_before = account.own, account.most
        account.expected = {mark: until for mark, until in account.expected.items() if until > now}

    def lose(self, replica: str) -> None:
        """A replica does not answer; until its next report it comes last."""
        account = self._accounts[replica]
        account.report, account.others, account.lost = None, NOTHING, True

    def sent(
        self,
        replica: str,
        call: str,
        load: Load = NOTHING,
        coming: Collection[bytes] = (),
        kept: Collection[bytes] = (),
    ) -> None:
        """Note that a call was sent.

        Calls may share a name; they are then taken to end in the order in which they were sent.

        Args:
            coming: marks of chunks that the replica has in memory soon; `kept`: those that it has after the call.
        """
        account = self._accounts[replica]
        account.own = account.own.plus(load)
        account.most = account.most.at_least(account.own)
        account.calls[call].append(_Call(load, kept, self._clock()))
        self._expect(account, coming)

    def completed(self, replica: str, call: str) -> Collection[bytes]:
        """Note that a call has ended; returns the marks that were to be kept.

        Calls that were not sent from here do not count.
        """
        account = self._accounts.get(replica)
        if account is None or call not in account.calls:
            return ()
        ended = account.calls[call].popleft()
        if not account.calls[call]:
            del account.calls[call]
        account.own = account.own.less(ended.load)
        self._expect(account, ended.kept)
        return ended.kept

    def _expect(self, account: _Account[R], marks: Collection[bytes]) -> None:
        account.expected.update(dict.fromkeys(marks, self._clock() + self._expected_s))

    # -- what is known ------------------------------------------------------------------------------------------------

    def is_lost(self, replica: str) -> bool:
        """True if the replica did not answer lately."""
        return self._accounts[replica].lost

    def fresh(self, replica: str) -> R | None:
        """A replica's last report, if it is not stale."""
        account = self._accounts[replica]
        return account.report if self._clock() - account.arrived <= self._fresh_s else None

    def all_fresh(self) -> Iterator[R]:
        """All reports that are not stale."""
        reports = (self.fresh(replica) for replica in list(self._accounts))
        return (report for report in reports if report is not None)

    def load(self, replica: str, drained_per_s: float = 0.0) -> Load:
        """Load under way on a replica.

        `drained_per_s`: the work of others that it gets done in a second.
        """
        account = self._accounts[replica]
        if self.fresh(replica) is not None:
            return account.own.plus(self._of_others(replica, drained_per_s))
        others = [self._of_others(one, drained_per_s) for one in list(self._accounts) if self.fresh(one)]
        mean = Load(*(sum(part) / len(others) for part in zip(*others, strict=True))) if others else NOTHING
        return account.own.plus(mean)

    def _of_others(self, replica: str, drained_per_s: float) -> Load:
        account = self._accounts[replica]
        done = drained_per_s * (self._clock() - account.arrived)
        left = max(0.0, account.others.work - done)
        share = left / account.others.work if account.others.work else 1.0
        return Load(left, account.others.sequences * share)

    def expected(self, replica: str) -> Collection[bytes]:
        """Marks of chunks that a replica has in memory, going by what was sent there lately."""
        return self._accounts[replica].expected.keys()
