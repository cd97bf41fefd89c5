"""Which forwards patches may be formed from."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
import torch

from kvstore.records.patch_form import PatchForm
from prefill_workers.link.plan import ChunkPlan, LinkPlan
from prefill_workers.modes import OperatingPoint
from prefill_workers.patches.harvester import Harvester


class Chunk:
    """A chunk that was linked at an operating point; equal to no other."""

    is_cacheable = True

    def __init__(self, point: OperatingPoint) -> None:
        self.outcome = SimpleNamespace(operating_point=point)


def plan(points: list[OperatingPoint]) -> LinkPlan:
    return cast(LinkPlan, SimpleNamespace(chunks=cast(list[ChunkPlan], list(map(Chunk, points)))))


@pytest.mark.parametrize("front", OperatingPoint)
def test_patches_are_formed_behind_chunks_that_were_computed_alone(front: OperatingPoint):
    harvester = Harvester(SimpleNamespace(dtype=torch.float32), None, PatchForm(), lambda job: None)  # type: ignore[arg-type]
    made = plan([OperatingPoint.RECOMPUTED, front, OperatingPoint.ENCODED, OperatingPoint.RECOMPUTED])
    formed = [harvester.forms_patch(made, chunk) for chunk in made.chunks]
    exact = front in (OperatingPoint.RECOMPUTED, OperatingPoint.ENCODED)
    assert formed == [True, True, exact, exact]
