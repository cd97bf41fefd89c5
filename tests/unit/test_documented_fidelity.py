"""What the documents say in words of how reuse answers is what the records beside them say, number by number."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from statistics import mean

import pytest
from fidelity_records import recorded

from infra.reference import scenes
from infra.reference.scenes import Split
from serving.bench.fidelity.bench import KINDS, MULTI_HOP

TEXT = " ".join(Path("tests/benchmarks/README.md").read_text().split())
NUMBER = r"(-?\d+(?:\.\d+)?)"
CHANGED, BY_DRIFT, RULE = "answers changed by drift", "η by drift", "linker's rule"
BETWEEN, EACH, OTHER = "a sentence between", "a sentence before each", "another sentence before each"
Value = Callable[[], float]


def cell(family: str, table: str, row: str, column: str) -> float:
    """One cell of a family's records."""
    document = recorded(family)
    assert document is not None
    return document["tables"][f"{family}: {table}"][row][column]


def at(family: str, table: str, row: str, column: str) -> Value:
    return partial(cell, family, table, row, column)


def over(values: Iterable[Value], of: Callable[[Iterable[float]], float]) -> Value:
    """What `of` makes of several."""
    taken = list(values)
    return lambda: of(value() for value in taken)


def span(values: Iterable[Value]) -> tuple[Value, Value]:
    """The least and the most of several."""
    taken = list(values)
    return over(taken, min), over(taken, max)


def less(whole: Value | float, part: Value) -> Value:
    return lambda: (whole() if callable(whole) else whole) - part()


def composed(family: str, split: str, behind: int, arm: str, quantity: str = "accuracy") -> Value:
    return at(family, f"{quantity} by composition, {split}", f"|S| = {behind}", arm)


def lost_by_sums(family: str, split: str, behind: int, by: str = "measured") -> Value:
    """How much less sums answer than own patches."""
    return less(composed(family, split, behind, "own"), composed(family, split, behind, by))


def patch_ahead(family: str, split: str, percent: int) -> Value:
    """How much more of the loss a patch closes than the best token arm of as many bytes."""
    return at(family, "eta of the patch over tokens at equal bytes", f"{percent}%", split)


def tokens_ahead(family: str, split: str, percent: int) -> Value:
    return less(0.0, patch_ahead(family, split, percent))


def apart(family: str, split: str, percent: int) -> Value:
    more = patch_ahead(family, split, percent)
    return lambda: abs(more())


def below_own(family: str, split: str) -> Value:
    return less(at(family, "eta", "patch_16", split), at(family, "eta", "orbit", split))


def by_pages(family: str, arm: str, pages: int = 10) -> Value:
    return at(family, "accuracy by pages", arm, str(pages))


def first_tokens(family: str) -> list[Value]:
    """Milliseconds until the answer's first token behind ten pages: linked, computed, and computed of encoded pages."""
    return [at(family, "median TTFT by pages, ms", arm, "10") for arm in ("auto", "exact", "off")]


def of_others(situation: str) -> tuple[Value, Value]:
    """Shares of answers that own patches change there, of all models but the bundled one."""
    return span(at(family, CHANGED, situation, "stale") for family in KINDS if family != "gqa")


GQA = {
    "stays as right as `exact` ({} and {} at 10 pages; `mpic-32` {}, `cacheblend-15` {}), with the first token after "
    "{} ms against {}, and {} with `off`, on A": (
        *(by_pages("gqa", arm) for arm in ("auto", "exact", "mpic-32", "cacheblend-15")),
        *first_tokens("gqa"),
    ),
    "own patches answer as `exact` does ({}), an orbit patch of rank 16 less ({})": (
        at("gqa", "accuracy", "patch_16", "frames"), at("gqa", "accuracy", "orbit", "frames"),
    ),
    "at a quarter of the bytes the patch closes {} more of the loss than the best of them": (
        patch_ahead("gqa", "tally", 25),
    ),
    "a word anywhere and a sentence before the pages (η {} and more)": (
        over(
            (
                at("gqa", BY_DRIFT, situation, "stale")
                for situation in ("reordered", "one word before", "one word between", "a sentence before")
            ),
            min,
        ),
    ),
    "another word before each page ({}), and mostly a page more in front ({}; two or three {})": (
        at("gqa", BY_DRIFT, "another word before each", "stale"), at("gqa", BY_DRIFT, "1 more", "stale"),
        at("gqa", BY_DRIFT, "3 more", "stale"),
    ),
    "A sentence between pages costs it {}, one before each page {}, another in the place of one before each {}": tuple(
        less(1.0, at("gqa", BY_DRIFT, situation, "stale")) for situation in (BETWEEN, EACH, OTHER)
    ),
    "these change {}, {} and {} of the answers": tuple(
        at("gqa", CHANGED, situation, "stale") for situation in (BETWEEN, EACH, OTHER)
    ),
    "with the other models {} to {}, {} to {} and {} to {}": (
        *of_others(BETWEEN), *of_others(EACH), *of_others(OTHER),
    ),
    "with all of them replaced η is {}": (at("gqa", BY_DRIFT, "all replaced", "stale"),),
    "(it answers {}, {} and {}, the stored patch {}, {} and {})": tuple(
        at("gqa", "accuracy by drift", situation, arm)
        for arm in ("exact", "stale")
        for situation in (BETWEEN, EACH, OTHER)
    ),
    "Of the reuses that it allows {} change the answer with own patches, {} with orbit patches": (
        at("gqa", "rule", RULE, "false reuse, own"), at("gqa", "rule", RULE, "false reuse, orbit"),
    ),
    "behind another system prompt, or with a page twice in front, η is {}": (
        over((at("gqa", BY_DRIFT, one, "stale") for one in ("another system prompt", "one twice")), min),
    ),
    "close {} of the loss on multi-hop, {} on legends, {} on frames and counted questions, and {} on chains": tuple(
        composed("gqa", split, 3, "measured", "eta") for split in ("multi", "legend", "frames", "chain")
    ),
    "of which the model answers few either way ({}; behind two {}, and sums {})": (
        composed("gqa", "chain", 3, "exact"), composed("gqa", "chain", 2, "exact"),
        composed("gqa", "chain", 2, "placed"),
    ),
    "two to six pages of 48 cells takes {} to {} times their KV's bytes (mha {} to {}), an own patch {}": (
        *(
            composed(family, "multi", behind, "placed", "bytes_fraction")
            for family in ("gqa", "mha")
            for behind in (2, 6)
        ),
        composed("gqa", "multi", 2, "own", "bytes_fraction"),
    ),
    "a plain sum closes {} on multi-hop, and answers {} of the control questions": (
        composed("gqa", "multi", 3, "sum", "eta"), composed("gqa", "control", 3, "sum"),
    ),
    "of counted questions behind two they answer {} where own patches answer {}": (
        composed("gqa", "tally", 2, "measured"), composed("gqa", "tally", 2, "own"),
    ),
    "(arm `placed`), without a forward, answer {} of those": (composed("gqa", "tally", 2, "placed"),),
    "they stop at legends behind six ({} where own patches answer {})": (
        composed("gqa", "legend", 6, "placed"), composed("gqa", "legend", 6, "own"),
    ),
}  # fmt: skip

DEEPSTACK = {
    "behind ten it does not answer any more ({}, `auto` as `exact`), up to eight it does ({})": (
        by_pages("deepstack", "exact"), by_pages("deepstack", "exact", 8),
    ),
    "lose {} of counted questions behind two; sums": (
        lost_by_sums("deepstack", "tally", 2),
    ),
    "close all of it for two antecedents, {} for three and {} for four": (
        composed("deepstack", "chain", 3, "conditioned_measured", "eta"),
        composed("deepstack", "chain", 4, "conditioned_measured", "eta"),
    ),
    "The bundled model cannot answer chains ({} by full prefill), so that there is little to lose by sums ({})": (
        at("gqa", "accuracy", "exact", "chain"), at("gqa", "accuracy", "composed", "chain"),
    ),
}  # fmt: skip

MHA = {
    "of chains behind two, of which it answers {} by full prefill and own patches {}, they answer {}": tuple(
        composed("mha", "chain", 2, arm) for arm in ("exact", "own", "measured")
    ),
    "Behind six it has itself forgotten the legend ({}), and of what is left they lose {} there and {} on multi-hop": (
        composed("mha", "legend", 6, "exact"),
        *(lost_by_sums("mha", split, 6) for split in ("legend", "multi")),
    ),
    "answer more than own patches on both (of legends {} and {}), but of frames behind four {} where own "
    "patches answer {}": (
        composed("mha", "legend", 6, "placed"), composed("mha", "legend", 6, "own"),
        composed("mha", "frames", 4, "placed"), composed("mha", "frames", 4, "own"),
    ),
    "and answers {} of control questions behind three": (composed("mha", "control", 3, "sum"),),
    "`exact` does ({} and {}; `mpic-32` {}, `cacheblend-15` {}), with the first token after {} ms against {}, and {} "
    "with `off`, on A. -": (
        *(by_pages("mha", arm) for arm in ("auto", "exact", "mpic-32", "cacheblend-15")),
        *first_tokens("mha"),
    ),
    "linker's rule allows {} of the answers change with own patches, {} with orbit patches (of deepstack none does)": (
        at("mha", "rule", RULE, "false reuse, own"), at("mha", "rule", RULE, "false reuse, orbit"),
    ),
}  # fmt: skip

MLA = {
    "Of multi-hop, frames and counted questions together it answers {}, of counted ones alone {}": (
        over((at("mla", "accuracy", "exact", split) for split in MULTI_HOP), mean),
        at("mla", "accuracy", "exact", "tally"),
    ),
    "close {} of the multi-hop loss at rank 8 ({} of the KV's bytes": (
        at("mla", "eta", "patch_8", "multi"), at("mla", "bytes_fraction", "patch_8", "multi"),
    ),
    "(at 12 % and more they differ by at most {})": (
        over((apart("mla", split, percent) for split in ("multi", "legend") for percent in (12, 25, 50)), max),
    ),
    "of frames lose {} behind five. But of counted questions, which it answers from three pages on ({} behind three)": (
        lost_by_sums("mla", "frames", 5), composed("mla", "tally", 3, "exact"),
    ),
    "they lose {} behind two ({}, own patches {}) and {} behind four and five": (
        lost_by_sums("mla", "tally", 2), composed("mla", "tally", 2, "measured"), composed("mla", "tally", 2, "own"),
        over((lost_by_sums("mla", "tally", behind) for behind in (4, 5)), max),
    ),
    "Weights by the first layer's attention lose {} of multi-hop behind two pages already": (
        lost_by_sums("mla", "multi", 2, "placed"),
    ),
    "A plain sum answers {} of multi-hop and {} of control questions behind three": (
        composed("mla", "multi", 3, "sum"), composed("mla", "control", 3, "sum"),
    ),
    "of counted ones behind two more than an exact prefill ({} and {})": (
        composed("mla", "tally", 2, "sum"), composed("mla", "tally", 2, "exact"),
    ),
    "none of the answers change with own patches, with orbit patches {} do": (
        at("mla", "rule", RULE, "false reuse, orbit"),
    ),
    "`exact` does ({} and {}; `mpic-32` {}, `cacheblend-15` {}), with the first token after {} ms against {}, and {} "
    "with `off`, on A. #": (
        *(by_pages("mla", arm) for arm in ("auto", "exact", "mpic-32", "cacheblend-15")),
        *first_tokens("mla"),
    ),
}  # fmt: skip

DIFFERS = {
    "16 ranks in the deeper half close {} (mla), {} (mha), {} (gqa) and {} (deepstack) of multi-hop": tuple(
        at(family, "eta", "deep", "multi") for family in ("mla", "mha", "gqa", "deepstack")
    ),
    "of chains {} to {}, of counted questions {} (mla), {} (gqa), {} (mha) and {} (deepstack)": (
        *span(at(family, "eta", "deep", "chain") for family in KINDS),
        *(at(family, "eta", "deep", "tally") for family in ("mla", "gqa", "mha", "deepstack")),
    ),
    "closes {} to {} of it but for one layer": span(
        at(family, "eta by layers computed", "multi reprefill", "80%") for family in KINDS
    ),
    "computing the first two in context closes {} to {} (deepstack {})": (
        *span(at(family, "eta by layers computed", "multi shallow", "40%") for family in ("gqa", "mha", "mla")),
        at("deepstack", "eta by layers computed", "multi shallow", "40%"),
    ),
    "0.9 of it is in {} (mha), {} (mla), {} (deepstack) and {} (gqa) of a page's tokens on multi-hop": tuple(
        at(family, "deficit spread", "multi", "tokens for 90%") for family in ("mha", "mla", "deepstack", "gqa")
    ),
    "in {} to {} on frames and legends": span(
        at(family, "deficit spread", split, "tokens for 90%") for family in KINDS for split in ("frames", "legend")
    ),
    "{} to {} directions hold 0.9": span(
        at(family, "deficit spread", split, "directions for 90%")
        for family in KINDS
        for split in ("single", "multi", "legend", "frames", "chain", "tally", "retrieval", "control")
    ),
    "{} to {} of multi-hop at 15 % of the tokens (counted questions: gqa {}, deepstack {}, mla {} and mha {})": (
        *span(at(family, "eta", "asked_15", "multi") for family in KINDS),
        *(at(family, "eta", "asked_15", "tally") for family in ("gqa", "deepstack", "mla", "mha")),
    ),
    "except with a latent (mla {})": (at("mla", "eta", "lowrank_k_16", "multi"),),
    "at 6 % of the bytes (mha {} to {}, mla {} to {}; not gqa, {} to {}, and deepstack, {} to {})": tuple(
        at(family, "eta at equal bytes", arm, "multi")
        for family in ("mha", "mla", "gqa", "deepstack")
        for arm in ("shared_within_6", "patch_within_6")
    ),
    "close {} of multi-hop's loss in uniform bf16, {} spread, {} in 8 bits, {} with both": tuple(
        at("gqa", "equal bytes", way, "eta") for way in ("uniform", "spread", "int8", "int8_spread")
    ),
    "helps gqa's uniform patches ({} ± 0.01)": (at("gqa", "equal bytes", "neutral", "eta"),),
    "not those of mha and mla ({} and {} with it, {} and {} without)": tuple(
        at(family, "equal bytes", way, "eta") for way in ("neutral", "uniform") for family in ("mha", "mla")
    ),
    "in the default form none (gqa {}, mha {}, mla {} with it, {}, {} and {} without)": tuple(
        at(family, "equal bytes", way, "eta")
        for way in ("neutral_int8_spread", "int8_spread")
        for family in ("gqa", "mha", "mla")
    ),
    "In bf16 spreading takes mla down, from {} to {}": (
        at("mla", "equal bytes", "uniform", "eta"), at("mla", "equal bytes", "spread", "eta"),
    ),
    "in 8 bits there are eight ({}, and {} spread)": (
        at("mla", "equal bytes", "int8", "eta"), at("mla", "equal bytes", "int8_spread", "eta"),
    ),
    "that have not seen the tested order close {} to {} of the loss behind three pages": span(
        at(family, "η by order", "K = 3", "orbit") for family in KINDS
    ),
    "on mha they lose as the set grows, {} behind four and {} behind six": (
        at("mha", "η by order", "K = 4", "orbit"), at("mha", "η by order", "K = 6", "orbit"),
    ),
    "the mean of all orders answers more than `exact` does in one ({} and {})": (
        at("mha", "accuracy by order", "K = 6", "orbit"), at("mha", "accuracy by order", "K = 6", "exact"),
    ),
    "On frames and chains they are {} to {} below own patches": span(
        below_own(family, split) for family in KINDS for split in ("frames", "chain")
    ),
    "gqa's patch closes {} less than the best token arm at 6 % of the bytes, mla's {} at 12 %": (
        tokens_ahead("gqa", "multi", 6), tokens_ahead("mla", "multi", 12),
    ),
    "gqa's closes {} of what the last page behind exact ones loses": (at("gqa", "equal bytes", "int8_spread", "eta"),),
    "rank 16, {} to {} of the bytes, closes {} to {} of the loss of the three splits and recovers {} to {} of the "
    "flips": (
        *span(at(family, "bytes_fraction", "patch_16", "multi") for family in KINDS),
        *span(at(family, "eta", "patch_16", split) for family in KINDS for split in MULTI_HOP),
        *span(at(family, "flip_recover", "patch_16", split) for family in KINDS for split in MULTI_HOP),
    ),
    "On frames orbit patches are {} to {} below own ones, and tokens are ahead by {} at 6 % (gqa), {}, {} and {} at 6, "
    "12 and 25 % (mla), {} at 12 % and {} at 25 % (mha)": (
        *span(below_own(family, "frames") for family in KINDS), tokens_ahead("gqa", "frames", 6),
        *(tokens_ahead("mla", "frames", percent) for percent in (6, 12, 25)),
        *(tokens_ahead("mha", "frames", percent) for percent in (12, 25)),
    ),
    "Of counted questions mla answers {} by full prefill, and its orbit patches are {} below own ones there": (
        at("mla", "accuracy", "exact", "tally"), below_own("mla", "tally"),
    ),
}  # fmt: skip


SAID = GQA | DEEPSTACK | MHA | MLA | DIFFERS


@pytest.mark.parametrize("words", SAID)
def test_the_words_about_fidelity_say_what_was_measured(words: str):
    values = SAID[words]
    found = re.findall(re.escape(words).replace(r"\{\}", NUMBER), TEXT)
    assert len(found) == 1, f"{len(found)} places say this"
    numbers = [found[0]] if isinstance(found[0], str) else found[0]
    for number, value in zip(numbers, values, strict=True):
        assert float(number) == pytest.approx(value(), abs=0.501 * 10.0 ** -len(number.partition(".")[2])), number


@pytest.mark.parametrize("family", KINDS)
def test_every_family_that_ships_answers_what_acceptance_asks(family: str):
    exact = partial(cell, family, "accuracy", "exact")
    assert exact("single") >= 0.95
    assert exact("multi") >= 0.90
    assert sum(map(exact, MULTI_HOP)) / len(MULTI_HOP) >= 0.90


def test_how_diffuse_the_splits_are_said_to_be_is_what_was_measured():
    spread = ("legend", "frames")
    values = (
        *span(at(family, "deficit spread", split, "tokens for 90%") for family in KINDS for split in spread),
        *span(
            at(family, "deficit spread", split, "tokens for 90%")
            for family in KINDS
            for split in Split
            if split not in spread
        ),
    )
    said = " ".join((scenes.__doc__ or "").split())
    (numbers,) = re.findall(
        r"0\.9 of it is in (0\.\d+) to (0\.\d+) of them, in the others in (0\.\d+) to (0\.\d+)", said
    )
    assert numbers == tuple(f"{value():.2f}" for value in values)
