"""Elastic Cache at a budget: answers, perplexity, speed and room (elastic_cache.md).

| arm       | entries that stay of a prompt, as many in each layer                                          |
|-----------|-----------------------------------------------------------------------------------------------|
| evict     | ours: first four, text behind the last image, what the last 32 tokens attend to most           |
| cover     | ours: the same text; of each image an equal share, tokens whose values differ most               |
| merge     | ours: all text, means within each image                                                       |
| paper     | eq. 1 to 3 as printed                                                                         |
| eq1       | the paper's anchors, the others left out                                                      |
| h2o       | half the last ones, and what all tokens attend to most                                        |
| local     | first four and last ones                                                                      |
| uniform   | evenly spread, first and last one among them                                                  |
| random    | drawn by chance, first and last one among them                                                |

`before`: the question is part of what is compacted; `after`: pages are compacted before it is asked, as by a chat's
next turn. All on the product's own engine: observed, compacted and gone on from as a request's KV is.
"""

from __future__ import annotations

import importlib
import math
import os
import pydoc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from torch import Tensor

from decode_workers.admission import blocks_needed
from infra.checkpoints import checkpoint_path
from infra.reference import weights
from infra.reference.families import FAMILIES
from infra.reference.scenes import ASKED, Split
from infra.vllm_env import vllm_environment
from prefill_workers.compaction.plan import OBSERVERS, SINKS, CompactionPlan, compaction_plan
from prefill_workers.protocol import ChunkSpan, Compaction, CompactionPolicy, LinkRequest
from prefill_workers.sequence import Run
from serving.bench.harness import Benchmark, Outcome
from serving.bench.kept import Kept, digest_of
from serving.bench.models import CHECKPOINT, measured_dtype
from serving.loadtest.records import versions

if TYPE_CHECKING:
    from prefill_workers.engine.engine import PrefillEngine
    from prefill_workers.sequence import LinkSequence

BUDGET = 0.2
BUDGETS = (0.8, 0.5, 0.3, 0.2, 0.1)
KINDS = {"gqa": "qwen2_5_vl", "mha": "llava"}
SPLITS = (Split.single, Split.multi)
ITEMS, QUICK_ITEMS = 100, 12
DOCUMENTS, QUICK_DOCUMENTS = 100, 12
PROMPT, CONTINUATION = 448, 64  # tokens of a document
CONTEXT, BATCH, ANSWER = 8192, 8, 256  # of the speed
ARMS = ("evict", "cover", "merge", "paper", "eq1", "h2o", "local", "uniform", "random")
_ROOT = Path(__file__).parents[2]
_CODE = [Path(__file__), *(_ROOT / "prefill_workers" / name for name in ("compaction", "engine/compactor.py"))]
_SMOLLM2 = Path(os.environ.get("ORBITSERVE_SMOLLM2", ".orbitserve/models/smollm2"))
_MODULES = """
argparse asyncio collections itertools random re socket threading unittest zipfile ast base64 bisect calendar
cmath codecs concurrent.futures configparser contextlib copy csv ctypes curses dataclasses datetime decimal
difflib dis email enum fileinput fnmatch fractions ftplib functools gc getopt getpass gettext glob gzip hashlib
heapq hmac html http.client http.server imaplib inspect io ipaddress json keyword linecache locale logging lzma
mailbox math mimetypes mmap multiprocessing netrc numbers operator os pathlib pdb pickle pickletools platform
plistlib poplib pprint profile pstats queue quopri sched secrets select selectors shelve shlex shutil signal
smtplib socketserver sqlite3 ssl stat statistics string struct subprocess symtable sysconfig tarfile tempfile
textwrap timeit token tokenize trace traceback tracemalloc types typing urllib.request uuid venv warnings wave
weakref xml.dom.minidom xmlrpc.client zipapp zipimport zoneinfo turtle tkinter optparse doctest bdb
""".split()  # noqa: SIM905


def run(quick: bool, console: Console, work: Path | None = None) -> Outcome:
    """Measure answers of bundled models, perplexity of SmolLM2 if present, speed and room.

    Finished parts are kept in `work`, from where a run that was cut off goes on.
    """
    kept = Kept(work, (quick, versions()), digest_of(_CODE))
    os.environ.update(vllm_environment(kv_cache_gib=2, threads=1))
    torch.set_num_threads(1)
    tables: dict[str, dict[str, dict[str, float]]] = {}
    figures: dict[str, float] = {"concurrency": concurrency(2048, 32)}
    with torch.inference_mode():
        for kind, family in KINDS.items():
            count, budgets = (QUICK_ITEMS, (BUDGET,)) if quick else (ITEMS, BUDGETS)
            found = kept.once(kind, partial(answers, family, count, budgets, console))
            tables |= {f"{kind}: right answers, {name}": rows for name, rows in found.items()}
            for when in ("before", "after"):
                rows = found[f"asked {when}"]
                figures[f"{kind}.{when}_over_full"] = _best(rows) / rows["full"][f"{BUDGET:g}"]
        if (_SMOLLM2 / "config.json").exists():
            count, budgets = (QUICK_DOCUMENTS, (BUDGET,)) if quick else (DOCUMENTS, (0.5, BUDGET))
            table = kept.once("perplexity", partial(perplexities, count, budgets, console))
            tables["perplexity of the next 64 tokens, SmolLM2"] = table
            ours = table["evict"][f"{BUDGET:g}"]
            for other in ("h2o", "local", "full", "paper"):
                figures[f"ppl_over_{other}"] = ours / table[other][f"{BUDGET:g}"]
        times = kept.once("speed", partial(throughput, 3 if quick else 15, console))
        figures["throughput_8k"] = times["full"] / times[f"budget {BUDGET:g}"]
        tables["ms of one step, CPU time"] = {f"batch {BATCH}": times}
    workload = {
        "models": KINDS | {"perplexity": "smollm2", "speed": CHECKPOINT},
        "items": QUICK_ITEMS if quick else ITEMS,
        "documents": QUICK_DOCUMENTS if quick else DOCUMENTS,
        "context": CONTEXT,
        "batch": BATCH,
    }
    return Outcome(workload, [], figures, tables, axis="budget")


def _best(rows: dict[str, dict[str, float]]) -> float:
    """Ours: the best of the policies for the situation."""
    return max(rows[arm][f"{BUDGET:g}"] for arm in ("evict", "cover", "merge"))


# -- arms -------------------------------------------------------------------------------------------------------------


def arms_of(request: LinkRequest, budget: float, last: Tensor, every: Tensor) -> Iterator[tuple[str, Any, Tensor]]:
    """Plans and importance of all arms.

    `last`, `every`: importance [layers, tokens] by the queries of the last tokens, and of all.
    """

    def asked(policy: CompactionPolicy) -> CompactionPlan | None:
        return compaction_plan(replace(request, compaction=Compaction(budget, policy)), 1)

    ours = asked(CompactionPolicy.EVICT)
    assert ours is not None
    n, kept = ours.tokens, ours.kept
    order = torch.arange(n, dtype=torch.float32).expand(len(last), -1)
    spread = torch.zeros(n)
    spread[torch.linspace(0, n - 1, kept).round().long()] = 1.0
    inner = replace(ours, reducible=(Run(1, n - 1),))
    yield "evict", ours, last
    yield "cover", asked(CompactionPolicy.COVER), last
    yield "merge", asked(CompactionPolicy.MERGE), last
    yield "paper", asked(CompactionPolicy.PAPER), every
    yield "eq1", inner, every
    yield "h2o", replace(ours, reducible=(Run(0, n - kept // 2),)), every
    yield "local", replace(ours, reducible=(Run(min(SINKS, n - 1), n - 1),)), order
    yield "uniform", inner, spread.expand(len(last), -1)
    chance = torch.rand(n, generator=torch.Generator().manual_seed(n))
    yield "random", inner, chance.expand(len(last), -1)


def _importance(engine: PrefillEngine, sequence: LinkSequence) -> tuple[Tensor, Tensor]:
    """Compute a sequence's KV; importance of its tokens by the last queries, and by all."""
    from prefill_workers.engine.batch import Observing

    n = len(sequence)
    first = max(0, n - OBSERVERS)
    observed = [
        Observing("last", Run(first, n), first, sequence.blocks),
        Observing("all", Run(0, n), 0, sequence.blocks),
    ]
    engine.forward([(sequence, [Run(0, n)])], observed=observed)
    last, every = engine.take_importance("last"), engine.take_importance("all")
    assert last is not None
    assert every is not None
    return last, every


def _behind(engine: PrefillEngine, tokens: Tensor, kept: int, blocks: Sequence[int], again: int = 1) -> Tensor:
    """Log-probabilities [tokens + again, vocabulary] behind `kept` entries in blocks, and behind each of `tokens`.

    The last `again` entries are computed once more, of the ids that come first in `tokens`.
    """
    from prefill_workers.sequence import LinkSequence

    whole = torch.cat([torch.zeros(kept - again, dtype=torch.int32), tokens.int()])
    at = torch.arange(len(whole))
    sequence = LinkSequence(whole, at.expand(3, -1) if engine.uses_mrope else at, blocks)
    runs = [Run(i, i + 1) for i in range(kept - again, len(whole))]
    return engine.logits([(sequence, runs)]).log_softmax(-1)


# -- answers ----------------------------------------------------------------------------------------------------------


def answers(
    family: str, count: int, budgets: Sequence[float], console: Console
) -> dict[str, dict[str, dict[str, float]]]:
    """Share of right answers by when it is asked, arm and budget, mean over the splits."""
    from serving.bench.fidelity.items import items
    from serving.bench.fidelity.reader import Reader

    reader, kind = Reader(weights(family)), FAMILIES[family]
    right: dict[str, dict[str, dict[str, list[float]]]] = {"asked before": {}, "asked after": {}}
    try:
        for split in SPLITS:
            for item in items(reader, kind, split, count, ASKED[split]):
                for when, arm, budget, good in _answered(reader, item.prompt(reader), budgets):
                    right[when].setdefault(arm, {}).setdefault(f"{budget:g}", []).append(float(good))
            console.print(f"  {family}, {split}: done")
    finally:
        reader.close()
    return {
        when: {arm: {budget: statistics.mean(found) for budget, found in row.items()} for arm, row in rows.items()}
        for when, rows in right.items()
    }


def _answered(reader: Any, prompt: Any, budgets: Sequence[float]) -> Iterator[tuple[str, str, float, bool]]:
    engine, wanted = reader.engine, torch.tensor(prompt.answer)
    n, stop = len(prompt) - len(wanted) + 1, prompt.places[-1].stop
    size = engine.block_size
    first, second = range(1, 2 + len(prompt) // size), range(2 + len(prompt) // size, 4 + 2 * len(prompt) // size)
    chunks = tuple(place.page.chunk(place.start) for place in prompt.places)
    axis = prompt.positions if prompt.positions.dim() == 1 else prompt.positions[0]
    for when, end in (("asked before", n), ("asked after", stop)):
        # the token behind the last one that is compacted stands at the position that equals its index
        shift = end - (int(axis[end]) if end < len(prompt) else int(axis[-1]) + 1)
        sequence = reader.sequence(replace_prompt(prompt, end, shift), first)
        importance = _importance(engine, sequence)
        request = LinkRequest("bench", prompt.token_ids[:end].tolist(), _before(chunks, end))
        behind = prompt.token_ids[n - 1 :] if when == "asked before" else prompt.token_ids[stop:]
        again = int(when == "asked before")

        def is_right(blocks: Sequence[int], kept: int, behind: Tensor = behind, again: int = again) -> bool:
            said = _behind(engine, behind, kept, blocks, again)[-len(wanted) :].argmax(-1)
            return bool((said == wanted).all())

        full = is_right(first, end)
        for budget in budgets:
            yield when, "full", budget, full
            for arm, plan, scores in arms_of(request, budget, *importance):
                if plan is None:  # as much text as entries
                    yield when, arm, budget, full
                    continue
                engine.give_importance("bench", scores)
                engine.compact("bench", first, plan, second)
                yield when, arm, budget, is_right(second, plan.kept)


def replace_prompt(prompt: Any, end: int, shift: int) -> Any:
    """A prompt's first `end` tokens, moved."""
    return replace(prompt, token_ids=prompt.token_ids[:end], positions=prompt.positions[..., :end] + shift)


def _before(chunks: Sequence[ChunkSpan], end: int) -> tuple[ChunkSpan, ...]:
    return tuple(chunk for chunk in chunks if chunk.stop <= end)


# -- perplexity -------------------------------------------------------------------------------------------------------


def perplexities(count: int, budgets: Sequence[float], console: Console) -> dict[str, dict[str, float]]:
    """Perplexity of a document's next tokens behind its compacted beginning, by arm and budget."""
    from prefill_workers.engine.engine import PrefillEngine
    from prefill_workers.engine.spec import EngineSpec
    from prefill_workers.sequence import LinkSequence

    engine = PrefillEngine(EngineSpec(model=str(_SMOLLM2), dtype="float32", max_model_len=2048, hand_off=False))
    losses: dict[str, dict[str, list[float]]] = {}
    try:
        size = engine.block_size
        first, second = range(1, 2 + (PROMPT + CONTINUATION) // size), range(40, 42 + (PROMPT + CONTINUATION) // size)
        for tokens in documents(engine._llm.get_tokenizer(), count):
            sequence = LinkSequence(tokens[:PROMPT], torch.arange(PROMPT), first)
            importance = _importance(engine, sequence)
            behind, wanted = tokens[PROMPT - 1 : -1], tokens[PROMPT:].long()

            def loss(blocks: Sequence[int], kept: int, behind: Tensor = behind, wanted: Tensor = wanted) -> float:
                return float(-_behind(engine, behind, kept, blocks).gather(1, wanted[:, None]).mean())

            full = loss(first, PROMPT)
            for budget in budgets:
                losses.setdefault("full", {}).setdefault(f"{budget:g}", []).append(full)
                request = LinkRequest("bench", tokens[:PROMPT].tolist())
                for arm, plan, scores in arms_of(request, budget, *importance):
                    if plan is None:  # text is not merged
                        continue
                    engine.give_importance("bench", scores)
                    engine.compact("bench", first, plan, second)
                    losses.setdefault(arm, {}).setdefault(f"{budget:g}", []).append(loss(second, plan.kept))
    finally:
        engine.shutdown()
    console.print(f"  perplexity of {count} documents: done")
    table = {arm: {b: math.exp(statistics.mean(found)) for b, found in row.items()} for arm, row in losses.items()}
    for arm, row in table.items():
        for budget in list(row):
            apart = [a - b for a, b in zip(losses[arm][budget], losses["evict"][budget], strict=True)]
            spread = statistics.stdev(apart) / math.sqrt(len(apart)) if len(apart) > 1 else 0.0
            row[f"{budget} ±"] = 1.96 * spread * row[budget]
    return table


def documents(tokenizer: Any, count: int) -> Iterator[Tensor]:
    """Beginnings of the documentation of Python's modules, as tokens."""
    found = 0
    for name in _MODULES:
        try:
            text = pydoc.plain(pydoc.render_doc(importlib.import_module(name)))[:12000]
        except ImportError:
            continue
        tokens = tokenizer(text)["input_ids"][: PROMPT + CONTINUATION]
        if len(tokens) == PROMPT + CONTINUATION:
            yield torch.tensor(tokens, dtype=torch.int32)
            found += 1
        if found == count:
            return
    raise ValueError(f"only {found} documents are long enough")


# -- speed and room ---------------------------------------------------------------------------------------------------


def throughput(turns: int, console: Console) -> dict[str, float]:
    """Milliseconds of a decode step of a batch over full contexts, and at the budget.

    By one thread's CPU time, the least of the turns: what others do on the machine does not count.
    """
    from prefill_workers.engine.engine import PrefillEngine
    from prefill_workers.engine.spec import EngineSpec
    from prefill_workers.sequence import LinkSequence

    spec = EngineSpec(
        model=str(checkpoint_path(CHECKPOINT)), dtype=measured_dtype(), max_model_len=CONTEXT + 128, hand_off=False
    )
    engine = PrefillEngine(spec)
    try:
        compacted = compaction_plan(
            LinkRequest("bench", [0] * CONTEXT, compaction=Compaction(BUDGET)), engine.block_size
        )
        assert compacted is not None
        each = -(-CONTEXT // engine.block_size)

        def step(length: int) -> Callable[[], float]:
            at = torch.arange(length)
            positions = at.expand(3, -1) if engine.uses_mrope else at
            work = [
                (
                    LinkSequence(
                        torch.ones(length, dtype=torch.int32), positions, range(1 + i * each, 1 + (i + 1) * each)
                    ),
                    [Run(length - 1, length)],
                )
                for i in range(BATCH)
            ]

            def timed() -> float:
                began = time.process_time()
                engine.forward(work, ends=range(BATCH))
                return (time.process_time() - began) * 1e3

            return timed

        steps = {"full": step(CONTEXT), f"budget {BUDGET:g}": step(compacted.kept + 1)}
        times = {name: min(one() for _ in range(turns + 1)) for name, one in steps.items()}
    finally:
        engine.shutdown()
    console.print("  speed: done")
    return times


def concurrency(blocks: int, block_size: int) -> float:
    """Answers that a decode worker admits at once at the budget, over those with all KV."""
    plan = compaction_plan(LinkRequest("bench", [0] * CONTEXT, compaction=Compaction(BUDGET)), block_size)
    assert plan is not None
    full, compacted = (blocks // blocks_needed(tokens + 1 + ANSWER, 1, block_size) for tokens in (CONTEXT, plan.kept))
    return compacted / full


BENCHMARK = Benchmark(
    "elastic",
    "What answers and text lose when decode is given a fifth of a prompt's KV, against other ways to choose it.",
    run,
    {
        **{f"{kind}.before_over_full": (">=", 0.97) for kind in KINDS},
        **{f"{kind}.after_over_full": (">=", 0.85) for kind in KINDS},
        "ppl_over_h2o": ("<=", 1.0),
        "ppl_over_local": ("<=", 1.0),
        "ppl_over_full": ("<=", 1.3),
        "throughput_8k": (">=", 1.6),
        "concurrency": (">=", 4.0),
    },
    takes_work=True,
)
