"""Answers in rounds: behind a search an answer goes on as behind its whole prompt, linked at once.

Prompts are joined as those of `file_search` are: the generated tokens as they were, pages of a later search beside
those of the first one, and the words since then behind them.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from rig import Linked, Part, Rig, apart

from prefill_workers.prefix_digests import GRAIN
from serving.frontend.prompt_segments import Segments
from serving.frontend.rounds import RetrievalSite

pytestmark = pytest.mark.engine

QUESTION: list[Part] = ["You search before you answer. What mixes air and fuel?"]
TURNS: list[list[Part]] = [[1, 2, "Found: [1], [2]."], [3, 0, "Found: [3], [4]."]]
SAID = 12  # tokens of a round
LETTERS = range(64, 96)  # token ids that an answer may have
Rounds = list[tuple[Segments, Linked, list[int]]]


def rounds(rig: Rig, mode: str) -> Rounds:
    """Prompts, links and answers of a question and two searches."""
    found, site, prompt = Rounds(), RetrievalSite(), rig.render(QUESTION)
    for turn in (*TURNS, None):
        linked, said = rig.answer(prompt, LETTERS, SAID, mode)
        found.append((prompt, linked, said))
        if turn is not None:
            prompt = site.joined(prompt, said, rig.render(turn))
    return found


@pytest.mark.parametrize(
    ("mode", "is_known"),
    [("exact", False), ("auto", False), ("auto", True)],
    ids=["pages computed in context", "pages without patches", "pages with patches"],
)
def test_a_later_round_answers_token_for_token_as_a_prompt_computed_whole(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, mode: str, is_known: bool
):
    before = make_rig()
    for turn in TURNS:
        before.link(turn)  # pages that were asked about, or precomputed
    if is_known:
        rounds(before, mode)
    rig, encoded = make_rig(keeps_prefixes=True, library=before.library), list[object]()
    encode = rig.engine.encode
    monkeypatch.setattr(rig.engine, "encode", lambda pixels: encoded.append(pixels) or encode(pixels))
    first, second, third = answered = rounds(rig, mode)
    assert not encoded, "no vision tokens"
    for (earlier, *_), (_, later, _) in ((first, second), (second, third)):
        shared = earlier.chunks[-1].stop if earlier.chunks else len(earlier.token_ids) // GRAIN * GRAIN
        assert later.result.prefix_tokens_reused >= shared
    assert third[1].points[:2] == ["prefix", "prefix"]
    assert third[1].points[2:] == ["patched" if is_known else "recomputed"] * 2

    whole = make_rig()
    for prompt, linked, said in answered:
        expected, again = whole.answer(prompt, LETTERS, SAID, "off")
        assert said == again
        assert apart(linked.kv, expected.kv) < 2e-5
        assert float((linked.logprobs - expected.logprobs).abs().max()) < 1e-4
    assert len({tuple(said) for _, _, said in answered}) == 3, "what is found changes what is said"
