"""Blocks about how reuse answers, from the records of the four reference models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from serving.bench.fidelity.bench import KINDS, REAL, TARGETS
from serving.bench.fidelity.windows import BEHIND_UNITS, OF_WINDOWS, SAME_TOKENS, SLIDES, TURNED
from serving.bench.harness import UNCERTAINTY
from tests.benchmarks.documents.records import (
    RESULTS,
    Record,
    Rows,
    aim,
    cell,
    judged,
    markdown,
    measured,
    number,
    with_interval,
)
from tests.benchmarks.documents.records import fidelity as recorded

BUNDLED = "gqa"
SPLITS = {
    "single": "one page",
    "multi": "several pages",
    "legend": "legend",
    "frames": "frames",
    "chain": "chains",
    "tally": "counted",
}
ARMS = {
    "exact": "`exact`: all computed",
    "patch_8": "own patch, rank 8",
    "patch_16": "own patch, rank 16",
    "orbit": "orbit patch, rank 16",
    "composed": "pair patches, summed",
    "mpic_32": "`mpic-32`",
    "cacheblend_15": "`cacheblend-15`",
    "blind": "`full-reuse`",
}
ASKED = ("before", "after")  # compaction
ALIKE = "ROUGE-L of 128 tokens with the full cache's, SmolLM2"
KV_ARMS = {
    "full": "all of them",
    "evict": "`evict`",
    "cover": "`cover`",
    "merge": "`merge`",
    "paper": "`paper`",
    "eq1": "the paper's anchors, the others left out",
    "h2o": "H2O",
    "local": "the first four, and the last",
    "uniform": "evenly spread",
    "random": "by chance",
}
# Rows of the first page: arm, what serves the chunk, in the words of the modes.
FIRST_PAGE = (
    ("exact", "`exact`, `off`"),
    ("patch_8", "`auto`, this order came before (own patch, rank 8)"),
    ("orbit", "`auto`, this set came before (orbit patch, rank 16)"),
    ("composed", "`auto`, the set is new, its pairs are known (summed)"),
    ("mpic_32", "`mpic-32`"),
    ("cacheblend_15", "`cacheblend-15`"),
    ("blind", "`full-reuse`"),
)
SITUATIONS = {
    "same": "nothing",
    "reordered": "the pages' order",
    "one word before": "a word before the pages",
    "one word between": "a word between pages",
    "a sentence before": "a sentence before the pages",
    "a sentence between": "a sentence between pages",
    "a sentence before each": "a sentence before each page",
    "another word before each": "another word before each page",
    "another sentence before each": "another sentence before each page",
    "another system prompt": "the system prompt",
    "one twice": "a page twice in front",
    "1 more": "one page more in front",
    "3 more": "three pages more in front",
    "one replaced": "one page of the set",
    "all replaced": "all pages of the set",
}
ROLLING = {
    "same": "same text and order",
    "other order": "another order",
    "one word before": "a word before the pages",
    "one word between": "a word between pages",
    "a sentence before": "a sentence before the pages",
    "a sentence between": "a sentence between pages",
    "sums": "sums of pairs, weighed",
    "plain sums": "sums without weights",
    "turned basis": "a damaged patch",
    "wrong page": "another page's patch",
    "blind": "no patch",
}
BEHIND = range(2, 7)
COMPARED = (("own", "own"), ("measured", "by KV"), ("placed", "by attention"), ("sum", "plain"))
RULE = "linker's rule"
STORAGE = {
    "uniform": "bf16, the same rank in every layer",
    "spread": "bf16, rank spread over layers",
    "int8": "8 bits, the same rank",
    "int8_spread": "8 bits, spread (the default)",
    "neutral": "bf16, the same rank, behind a neutral prefix",
    "neutral_int8_spread": "8 bits, spread, behind a neutral prefix",
}
# What the papers say otherwise: (table, row, column, words); see the arms in `serving.bench.fidelity.arms`.
PAPERS = (
    ("eta", "deep", "multi", "η of 16 ranks in the deeper half of the layers, several pages"),
    ("eta", "deep", "tally", "the same, counted"),
    ("eta", "patch_16", "multi", "η of 16 ranks in all layers, several pages"),
    ("eta by layers computed", "multi reprefill", "80%", "η with all layers but the first computed from stored states"),
    ("eta by layers computed", "multi shallow", "40%", "η with the first two of five layers computed in context"),
    ("eta", "asked_15", "multi", "η with 15 % of the tokens exact, chosen by the question, several pages"),
    ("eta", "asked_15", "tally", "the same, counted"),
    ("eta", "lowrank_k_16", "multi", "η of low-rank keys (ShadowKV), several pages"),
    ("eta at equal bytes", "shared_within_6", "multi", "η of a shared basis at 6 % of the bytes, several pages"),
    ("eta at equal bytes", "patch_within_6", "multi", "η of a patch with directions of its own at 6 %"),
    ("deficit spread", "multi", "tokens for 90%", "tokens of a page that hold 0.9 of the deficit, several pages"),
    ("deficit spread", "frames", "tokens for 90%", "the same, frames"),
    ("deficit spread", "multi", "directions for 90%", "directions that hold 0.9 of it, several pages"),
    ("deficit spread", "frames", "directions for 90%", "the same, frames"),
)


def family(kind: str) -> Record:
    """A family's records as one."""
    found = recorded(kind)
    assert found is not None, kind
    return found


def modes() -> str:
    """Accuracy of each way of reuse on the bundled model: the first page's table."""
    splits = ("single", "multi", "frames", "tally")
    rows = []
    for arm, words in FIRST_PAGE:
        computed = cell(BUNDLED, "computed", arm, "multi")
        answers = (f"{cell(BUNDLED, 'accuracy', arm, split):.2f}" for split in splits)
        rows.append((words, *answers, f"{computed:.2f}"))
    lost = cell("deepstack", "accuracy", "exact", "chain"), cell("deepstack", "accuracy", "composed", "chain")
    header = ("share of right answers", *(SPLITS[split] for split in splits), "pages computed")
    return markdown(header, rows) + (
        "\n\nSums lose a page that refers to a page that refers to a third: another model answers "
        f"{lost[0]:.2f} of such questions computed and {lost[1]:.2f} by sums, and ships with sums off."
    )


def sources() -> str:
    """The records of each family."""
    rows = []
    for kind, folder in (KINDS | REAL).items():
        names = sorted(path.name for path in RESULTS.glob(f"fidelity-{kind}-*.json"))
        links = (f"[{name.removeprefix(f'fidelity-{kind}-').rpartition('-')[0]}](results/{name})" for name in names)
        if names:
            model = f"[`{folder}`](../../infra/reference/weights/{folder})" if kind in KINDS else f"`{folder}`"
            rows.append((kind, model, ", ".join(links)))
    return markdown(("family", "model", "records"), rows)


def answers() -> str:
    """Shares of right answers by arm and split, a table a family."""
    parts = []
    for kind, folder in KINDS.items():
        found = family(kind)
        right, computed = found.table(f"{kind}: accuracy"), found.table(f"{kind}: computed")
        stored = found.table(f"{kind}: bytes_fraction")
        rows = []
        for arm, words in ARMS.items():
            beside = f"{stored[arm]['multi']:.2f}" if arm in stored and arm != "exact" else ""
            shares = (with_interval(right[arm], split) for split in SPLITS)
            rows.append((words, *shares, beside, f"{computed[arm]['multi']:.2f}"))
        header = (f"{kind} (`{folder}`)", *SPLITS.values(), "bytes beside the KV", "computed")
        parts.append(markdown(header, rows))
    return "\n\n".join(parts)


def pages() -> str:
    """Right answers and time to first token behind ten pages, by family and mode."""
    rows = []
    for kind in KINDS:
        for mode in ("exact", "auto", "mpic-32", "cacheblend-15", "full-reuse", "off"):
            right = family(kind).table(f"{kind}: accuracy by pages")[mode]
            ms = family(kind).table(f"{kind}: median TTFT by pages, ms")[mode]
            rows.append(
                (kind, f"`{mode}`", *(with_interval(right, count) for count in ("2", "6", "10")), f"{ms['10']:.0f}")
            )
    header = ("", "mode", "2 pages", "6 pages", "10 pages", "first token behind 10, ms")
    return markdown(header, rows)


def sums() -> str:
    """Right answers of sums of pair patches behind two to six pages, beside own patches."""
    parts = []
    for kind in KINDS:
        found, rows = family(kind), []
        for split, words in SPLITS.items():
            by_size = found.table(f"{kind}: accuracy by composition, {split}")
            cells = (_compared(by_size.get(f"|S| = {size}")) for size in BEHIND)
            rows.append((words, *cells))
        header = (f"{kind}: exact; {', '.join(words for _, words in COMPARED)}", *(f"behind {size}" for size in BEHIND))
        parts.append(markdown(header, rows))
    return "\n\n".join(parts)


def _compared(cells: Mapping[str, float] | None) -> str:
    if cells is None:
        return ""
    return f"{cells['exact']:.2f}; " + ", ".join(f"{cells[arm]:.2f}" for arm, _ in COMPARED)


def orders() -> str:
    """Own and orbit patches in orders that the orbit patch has not seen."""
    rows = []
    for kind in KINDS:
        closed, right = family(kind).table(f"{kind}: η by order"), family(kind).table(f"{kind}: accuracy by order")
        for size, cells in closed.items():
            etas = (with_interval(cells, arm) for arm in ("transfer", "orbit"))
            answered = (with_interval(right[size], arm) for arm in ("exact", "orbit", "blind"))
            rows.append((kind, size.removeprefix("K = "), *etas, *answered))
    header = ("", "pages in front", "η, own patch of another order", "η, orbit patch")
    return markdown((*header, "right: `exact`", "right: orbit patch", "right: `full-reuse`"), rows)


def drift() -> str:
    """η of a stored own patch when something changed, and the share of answers that it changes."""
    rows = []
    for situation, words in SITUATIONS.items():
        cells = (
            f"{cell(kind, 'η by drift', situation, 'stale'):.2f}, "
            f"{cell(kind, 'answers changed by drift', situation, 'stale'):.3f}"
            for kind in KINDS
        )
        rows.append((words, *cells))
    for patch in ("own", "orbit"):
        cells = (f"{cell(kind, 'rule', RULE, f'false reuse, {patch}'):.3f}" for kind in KINDS)
        rows.append((f"**whatever the linker's rule allows**, {patch} patches: answers changed", *cells))
    return markdown(("what changed: η, answers changed", *KINDS), rows)


def rolling_kl() -> str:
    """Mean KL to exact of served answers, by situation: the source of the default bounds."""
    rows = [
        (words, *(f"{cell(kind, 'rolling KL by situation', situation, 'mean'):.2f}" for kind in KINDS))
        for situation, words in ROLLING.items()
    ]
    return markdown(("mean KL, nats", *KINDS), rows)


def equal_bytes() -> str:
    """Share of the loss that a patch closes beyond the best token-keeping arm of equal bytes."""
    splits = ("multi", "legend", "frames", "tally")
    rows = []
    for kind in KINDS:
        margins = family(kind).table(f"{kind}: eta of the patch over tokens at equal bytes")
        for share, cells in margins.items():
            shown = (f"{cells[split]:+.3f}" if split in cells else "" for split in splits)
            rows.append((kind, share, *shown))
    header = ("", "of the KV's bytes", *(SPLITS[split] for split in splits))
    return markdown(header, rows)


def storage() -> str:
    """η of patches of rank 4 and as many bytes, by how they are stored."""
    rows = [
        (words, *(f"{cell(kind, 'equal bytes', way, 'eta'):.4f}" for kind in KINDS)) for way, words in STORAGE.items()
    ]
    return markdown(("η, several pages", *KINDS), rows)


def survivors() -> str:
    """Survivors of a window that slides: loss closed, and tokens answered as by `exact`."""
    rows = []
    for kind, split, found in _windows():
        lost = found["kl"][f"blind_after_{SLIDES[-1]}"][split]
        arms = (
            ", ".join(_eta(found, f"{arm}_after_{slides}", split) for slides in SLIDES)
            for arm in ("kept", "removal", "refreshed")
        )
        same = found[SAME_TOKENS]
        answered = (f"{same[f'{arm}_after_{SLIDES[-1]}'][split]:.2f}" for arm in ("blind", "kept", "refreshed"))
        rows.append((kind, SPLITS.get(split, split), f"{lost:.2g}", *arms, ", ".join(answered)))
    closed = (f"{words}: η" for words in ("kept", "removal patch, rank 32", "oldest refreshed"))
    after = ", ".join(map(str, SLIDES))
    header = (f"after {after} slides", "", "KL, blind", *closed, "tokens as `exact`: blind, kept, refreshed")
    return markdown(header, rows)


def recalled() -> str:
    """Patches of a chunk that comes back, as the window in front of it turns over."""
    rows = []
    for kind, split, found in _windows():
        lost = found["kl"]["blind_recalled"][split]
        stale = (_eta(found, f"stale_{100 * turned // BEHIND_UNITS}", split) for turned in TURNED)
        rows.append((kind, SPLITS.get(split, split), f"{lost:.2g}", *stale, _eta(found, "rebuilt", split)))
    stale_header = (f"{100 * turned // BEHIND_UNITS} % turned over" for turned in TURNED)
    return markdown(("η of a patch of rank 32", "", "KL, blind", *stale_header, "full rank, fresh"), rows)


def _windows() -> Iterator[tuple[str, str, Mapping[str, Rows]]]:
    """Recorded windows: family, split, and by figure a table of arms and splits."""
    for kind in (*KINDS, *REAL):
        record = recorded(kind)
        if record is None or f"{kind}: kl{OF_WINDOWS}" not in record.document["tables"]:
            continue
        found = {figure: record.table(f"{kind}: {figure}{OF_WINDOWS}") for figure in ("kl", "eta", SAME_TOKENS)}
        for split in found["kl"]["fresh"]:
            if not split.endswith(UNCERTAINTY):
                yield kind, split, found


def _eta(found: Mapping[str, Rows], arm: str, split: str) -> str:
    value = found["eta"].get(arm, {}).get(split)
    return "" if value is None else f"{value:.2f}"


def missed() -> str:
    """The targets that some family misses, with all families' figures."""
    rows = []
    for name, target in TARGETS.items():
        found = {kind: family(kind).figures.get(f"{kind}.{name}") for kind in KINDS}
        cells = ["" if value is None else judged(value, target) for value in found.values()]
        if any(cell.startswith("**") for cell in cells):
            rows.append((f"`{name}`", *cells, aim(target)))
    return markdown(("split, arm, figure", *KINDS, "aimed at"), rows)


def less_kv() -> str:
    """Answers and text from a fifth of the KV, by how its entries are chosen."""
    found, budget = measured("elastic", "C"), "0.2"
    answered = [found.table(f"{kind}: right answers, asked {when}") for kind in ("gqa", "mha") for when in ASKED]
    text = [found.table(name) for name in ("perplexity of the next 64 tokens, SmolLM2", ALIKE)]
    rows = []
    for arm, words in KV_ARMS.items():
        values = (f"{table[arm][budget]:.2f}" if arm in table else "" for table in (*answered, *text))
        rows.append((words, *values))
    asked = (f"{kind}, asked {when}" for kind in ("gqa", "mha") for when in ASKED)
    return markdown(("a fifth of the entries", *asked, "perplexity", "ROUGE-L"), rows)


def papers() -> str:
    """Figures that differ from the papers'."""
    rows = [
        (words, *(number(cell(kind, table, row, column)) for kind in KINDS)) for table, row, column, words in PAPERS
    ]
    return markdown(("", *KINDS), rows)


BLOCKS: dict[str, Callable[[], str]] = {
    "modes": modes,
    "fidelity-records": sources,
    "answers": answers,
    "pages": pages,
    "sums": sums,
    "orders": orders,
    "drift": drift,
    "rolling-kl": rolling_kl,
    "equal-bytes": equal_bytes,
    "storage": storage,
    "survivors": survivors,
    "recalled": recalled,
    "less-kv": less_kv,
    "papers": papers,
    "missed": missed,
}
