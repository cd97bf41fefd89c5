"""What a router has sent to replicas, and what they report: one book, in which nothing counts twice."""

from __future__ import annotations

from clock import Clock

from serving.routing.ledger import EXPECTED_PERIODS, STALE_PERIODS, Ledger, Load


def ledger() -> tuple[Ledger[str], Clock]:
    clock = Clock(100.0)
    return Ledger[str](1.0, clock), clock


def test_what_was_sent_counts_at_once_and_until_it_is_completed():
    books, _ = ledger()
    books.report("a", 0, Load(100, 1), "r")
    books.sent("a", "x", Load(50, 1))
    books.sent("a", "x", Load(7, 1))
    assert books.load("a") == Load(157, 3)
    books.completed("a", "x")
    assert books.load("a") == Load(107, 2)
    books.completed("a", "x")
    books.completed("a", "x")  # nobody's
    books.completed("b", "x")
    assert books.load("a") == Load(100, 1)


def test_a_report_does_not_count_twice_what_was_sent_from_here():
    books, clock = ledger()
    books.sent("a", "x", Load(50, 1))
    books.report("a", 0, Load(80, 2), "r")  # ours, and 30 of somebody else
    assert books.load("a") == Load(80, 2)
    clock.now += 1
    assert books.load("a", drained_per_s=10) == Load(50 + 20, 1 + 2 / 3)
    books.completed("a", "x")
    assert books.load("a", drained_per_s=100) == Load(0, 0)


def test_what_was_completed_while_a_report_was_on_its_way_is_nobody_elses():
    books, clock = ledger()
    for _ in range(10):
        books.sent("a", "x", Load(500, 1))
    for _ in range(10):
        books.completed("a", "x")
    books.report("a", 0, Load(5000, 10), "r")  # made before they were completed
    assert books.load("a") == Load(0, 0)
    clock.now += 1
    books.report("a", 1, Load(5100, 11), "r")  # so might this one be
    assert books.load("a") == Load(100, 1)
    clock.now += 1
    books.report("a", 2, Load(5100, 11), "r")
    assert books.load("a") == Load(5100, 11)


def test_a_report_is_stale_after_some_periods_and_then_only_own_books_count():
    books, clock = ledger()
    books.report("a", 0, Load(80, 2), "r")
    books.sent("a", "x", Load(5, 1))
    clock.now += STALE_PERIODS
    assert (books.fresh("a"), books.load("a")) == ("r", Load(85, 3))
    clock.now += 0.01
    assert (books.fresh("a"), books.load("a")) == (None, Load(5, 1))


def test_what_was_sent_is_expected_in_memory_for_a_while():
    books, clock = ledger()
    books.sent("a", "x", Load(5, 1), coming=[b"first"], kept=[b"second"])
    assert set(books.expected("a")) == {b"first"}
    assert list(books.completed("a", "x")) == [b"second"]
    assert set(books.expected("a")) == {b"first", b"second"}
    clock.now += EXPECTED_PERIODS
    books.report("a", 0, Load(), "r")
    assert not books.expected("a")


def test_a_call_that_serve_never_ends_is_forgotten_in_the_end():
    books, clock = ledger()
    books.sent("a", "x", Load(5, 1))
    clock.now += 3600
    books.sent("a", "y", Load(7, 1))
    books.report("a", 0, Load(), "r")
    assert books.load("a") == Load(7, 1)
