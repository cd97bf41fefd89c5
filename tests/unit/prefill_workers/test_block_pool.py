"""The prefill side's blocks: nothing is lost, nothing is freed while somebody needs it."""

from __future__ import annotations

import pytest
from clock import Clock
from hypothesis import given
from hypothesis import strategies as st

from prefill_workers.block_pool import BlockPool, PoolExhausted


def pool(blocks: int = 8, clock: Clock | None = None) -> BlockPool:
    return BlockPool(range(1, 1 + blocks), 32, lease_seconds=10, owner="p", clock=clock or Clock())


def test_blocks_come_free_only_when_every_reader_has_read():
    p = pool()
    lease = p.allocate(100, readers=2)
    assert len(lease.blocks) == 4
    p.read(lease.id)
    assert p.free == 4
    p.read(lease.id)
    assert p.free == 8
    assert p.leases == 0


def test_a_background_hold_outlives_the_readers():
    p = pool()
    lease = p.allocate(32)
    p.hold(lease.id)
    p.read(lease.id)
    assert p.free == 7
    p.unhold(lease.id)
    assert p.free == 8


def test_a_second_notification_of_the_same_reader_does_not_free_a_held_lease():
    p = pool()
    lease = p.allocate(32)
    p.hold(lease.id)
    p.read(lease.id)
    p.read(lease.id)
    p.abandon(lease.id)
    assert p.free == 7


def test_an_exhausted_pool_says_so_and_keeps_its_blocks():
    p = pool(2)
    p.allocate(64)
    with pytest.raises(PoolExhausted, match="1 KV blocks needed, 0 of 2 free"):
        p.allocate(1)


def test_an_unread_lease_expires_and_a_renewed_one_does_not():
    clock = Clock()
    p = pool(clock=clock)
    dead, alive = p.allocate(32), p.allocate(32)
    clock.now = 9
    p.renew(alive.id)
    clock.now = 11
    assert p.expire() == [dead]
    assert p.free == 7
    p.read(dead.id)  # a late notification of an expired lease changes nothing
    assert p.free == 7


@given(st.lists(st.tuples(st.sampled_from(["allocate", "read", "abandon", "hold", "unhold"]), st.integers(0, 9))))
def test_no_sequence_of_calls_loses_or_doubles_a_block(calls):
    p = pool()
    live: list[tuple[str, list[int]]] = []
    for call, n in calls:
        if call == "allocate":
            try:
                lease = p.allocate(1 + 20 * n, readers=1 + n % 3)
            except PoolExhausted:
                continue
            live.append((lease.id, [1 + n % 3, 0]))
        elif live:
            lease_id, (readers, holds) = live[n % len(live)]
            if call == "hold":
                p.hold(lease_id)
                holds += 1
            elif call == "unhold" and holds:
                p.unhold(lease_id)
                holds -= 1
            elif call == "read":
                p.read(lease_id)
                readers = max(0, readers - 1)
            elif call == "abandon":
                p.abandon(lease_id)
                readers = 0
            else:
                continue
            live[n % len(live)] = (lease_id, [readers, holds])
            if not readers and not holds:
                live.pop(n % len(live))
    assert p.leases == len(live)
    for lease_id, (_, holds) in live:
        p.abandon(lease_id)
        for _ in range(holds):
            p.unhold(lease_id)
    assert p.free == p.total
    assert len({*p.allocate(p.total * 32).blocks}) == p.total


def test_what_is_known_of_a_lease():
    clock = Clock()
    p = pool(clock=clock)
    unread, read = p.allocate(4), p.allocate(4)
    assert [p.state(one) for one in (unread.id, read.id, "another-1")] == ["held", "held", "unknown"]
    p.read(read.id)
    clock.now = 9.5
    assert [p.state(lease.id) for lease in (unread, read)] == ["unknown", "read"], "one is about to expire"
    clock.now = 10.5
    assert p.expire() == [unread]
    assert [p.state(lease.id) for lease in (unread, read)] == ["unknown", "read"]
    for _ in range(5000):
        p.read(p.allocate(4).id)
    assert p.state(read.id) == "unknown", "no more than a few thousand are remembered"
