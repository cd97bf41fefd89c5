"""Weights of sums that were measured before."""

from __future__ import annotations

import torch

from kvstore.records.keys import DYNAMIC_TENANT
from prefill_workers.link.compose import KnownWeights


def test_the_latest_are_kept_and_a_use_counts() -> None:
    known = KnownWeights(limit=8)  # bytes: of two such weights
    for number, key in enumerate("abc"):
        known.put("acme", key, torch.tensor([float(number)]), known.epoch)
        assert known.get("acme", "a") is not None  # so that `b` is the oldest when `c` comes
    assert len(known) == 2
    assert known.get("acme", "b") is None
    assert known.get("acme", "c") == torch.tensor([2.0])
    known.put("acme", "c", torch.ones(2), known.epoch)
    assert (len(known), known.get("acme", "a")) == (1, None)
    known.put("acme", "d", torch.ones(3), known.epoch)
    assert len(known) == 0, "larger than all there may be"
    known.put("acme", "e", torch.ones(2), known.epoch)
    known.clear()
    known.put("acme", "f", torch.ones(2), known.epoch)
    assert len(known) == 1


def test_they_are_a_tenants_own_and_go_with_its_contents_or_everybodys() -> None:
    known = KnownWeights()
    for tenant in ("acme", "other"):
        known.put(tenant, "a", torch.ones(1), known.epoch)
    assert known.get("third", "a") is None
    known.forget("a", "acme")
    assert known.get("acme", "a") is None
    assert known.get("other", "a") is not None
    known.forget("a", DYNAMIC_TENANT)
    assert len(known) == 0


def test_what_was_measured_before_something_was_dropped_is_not_taken_up() -> None:
    known = KnownWeights()
    planned = known.epoch
    known.forget("a", "acme")
    known.put("acme", "a", torch.ones(1), planned)
    assert len(known) == 0
    planned = known.epoch
    known.clear()
    known.put("acme", "a", torch.ones(1), planned)
    assert len(known) == 0
