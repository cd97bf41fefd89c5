"""The benchmark `patch-rank` measures what it says: on random weights, what must hold whatever the weights are."""

from __future__ import annotations

import pytest
import torch
from rich.console import Console

from prefill_workers.engine.engine import PrefillEngine
from tests.benchmarks.patch_rank import Probe

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def measured(fp32: PrefillEngine):
    with torch.inference_mode():
        return Probe(fp32).measure(2, (1, 8, 32, None), Console(quiet=True))


def test_full_rank_closes_the_whole_loss_and_rank_closes_more_of_it(measured):
    assert measured.blind > 1e-3
    for kind in ("own", "update"):
        etas = [measured.eta(kind, rank) for rank in (1, 8, 32, None)]
        assert etas == sorted(etas), kind
        assert etas[-1] == pytest.approx(1, abs=1e-4), kind


def test_what_was_held_out_is_not_known(measured):
    for kind in ("orbit", "transfer", "stale", "composed", "deep"):
        assert measured.eta(kind, None) < 0.999, kind
    assert measured.eta("orbit", None) > measured.eta("stale", None)
    assert measured.eta("update", 8) > measured.eta("stale", 8)


def test_bytes_are_those_of_the_factors(measured):
    kept = measured.kept_bytes
    assert kept["deep"][8] == kept["own"][8] / 2
    assert kept["shared"][8] < kept["own"][8]
    assert kept["composed"][8] == 4 * kept["own"][8]  # three pairs and the base
