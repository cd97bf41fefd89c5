"""Model card: what `orbitserve lazy` keeps beside the weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from prefill_workers.engine.fingerprint import fingerprint
from prefill_workers.model_card import FILE, BadModelCard, composition_for, measured, write_lazy_blocks


def test_lazy_blocks_are_written_beside_what_the_card_says_already(tmp_path: Path):
    (tmp_path / FILE).write_text('{"compose_up_to": 5, "weigh_by": "attention"}')
    write_lazy_blocks(tmp_path, ((2, 3), (5, 6, 7)))
    card = measured(tmp_path)
    assert card is not None
    assert (card.compose_up_to, card.weigh_by, card.lazy_blocks) == (5, "attention", ((2, 3), (5, 6, 7)))


def test_a_card_of_lazy_blocks_alone_says_nothing_of_sums(tmp_path: Path):
    before = composition_for(tmp_path, None, None)
    assert write_lazy_blocks(tmp_path, ((0, 1),)).read_text() == '{"lazy_blocks":[[0,1]]}\n'
    after = composition_for(tmp_path, None, None)
    assert (after.compose_up_to, after.weigh_by) == (before.compose_up_to, before.weigh_by)


@pytest.mark.parametrize(
    "blocks", ["[[2]]", "[[2, 4]]", "[[3, 2]]", "[[1, 2], [2, 3]]", "[[4, 5], [1, 2]]", "[[-1, 0]]"]
)
def test_blocks_that_are_none_are_refused_by_name(tmp_path: Path, blocks: str):
    (tmp_path / FILE).write_text(f'{{"lazy_blocks": {blocks}}}')
    with pytest.raises(BadModelCard, match=r"lazy_blocks: .*neighbouring layers"):
        measured(tmp_path)


def test_a_model_with_lazy_blocks_is_another_one_for_the_library(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    plain = fingerprint(tmp_path)
    (tmp_path / FILE).write_text('{"compose_up_to": 2}')
    assert fingerprint(tmp_path) == plain
    write_lazy_blocks(tmp_path, ((0, 1),))
    assert fingerprint(tmp_path) != plain
