"""Real text on SmolLM2 behind a compacted beginning (benchmark `elastic`).

Beginnings of the documentation of Python's modules, compacted; then their own next tokens, and what the model says
next by itself beside what it says from all KV.
"""

from __future__ import annotations

import importlib
import math
import os
import pydoc
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from prefill_workers.protocol import LinkRequest
from prefill_workers.sequence import LinkSequence
from serving.bench.fidelity.scores import average
from serving.bench.harness import UNCERTAINTY
from tests.benchmarks.elastic_arms import Held, compacted, greedy, logprobs, observe

if TYPE_CHECKING:
    from prefill_workers.engine.engine import PrefillEngine

PROMPT, NEXT, SAID = 448, 64, 128  # tokens of a document, of its continuation, and of the model's own
OURS, OTHERS = "evict", ("h2o", "local", "full", "paper")
MODEL = Path(os.environ.get("ORBITSERVE_SMOLLM2", ".orbitserve/models/smollm2"))
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
http.cookiejar http.cookies logging.handlers logging.config unittest.mock urllib.parse multiprocessing.pool
multiprocessing.managers xml.etree.ElementTree xml.sax.handler email.message email.header importlib.metadata
asyncio.events asyncio.streams concurrent.futures.process json.encoder wsgiref.handlers cProfile code codeop
""".split()  # noqa: SIM905
Values = dict[str, dict[str, list[float]]]  # by arm and budget; one a document


def perplexities(count: int, budgets: Sequence[float], console: Console) -> Values:
    """Mean loss in nats of each document's next tokens behind its compacted beginning."""
    return _measured(partial(_loss, budgets=budgets), count, "perplexity", console)


def continuations(count: int, budget: float, console: Console) -> Values:
    """ROUGE-L of the model's continuation of each compacted beginning with that of all KV."""
    return _measured(partial(_alike, budget=budget), count, "continuations", console)


def _measured(
    measure: Callable[[PrefillEngine, Tensor, Held], Iterator[tuple[str, float, float]]],
    count: int,
    name: str,
    console: Console,
) -> Values:
    """`measure` of every document on SmolLM2: arm, budget, value."""
    from prefill_workers.engine.engine import PrefillEngine
    from prefill_workers.engine.spec import EngineSpec

    values: Values = {}
    engine = PrefillEngine(EngineSpec(model=str(MODEL), dtype="float32", max_model_len=2048, hand_off=False))
    try:
        whole = Held(range(1, 2 + (PROMPT + max(NEXT, SAID)) // engine.block_size), PROMPT)
        drawn = documents(engine._llm.get_tokenizer(), count)
        for tokens in track(drawn, f"  {name}", total=count, console=console, transient=True):
            for arm, budget, value in measure(engine, tokens, whole):
                values.setdefault(arm, {}).setdefault(f"{budget:g}", []).append(value)
    finally:
        engine.shutdown()
    console.print(f"  {name}: {count} documents")
    return values


def _held(engine: PrefillEngine, tokens: Tensor, whole: Held, budgets: Sequence[float]) -> Iterator[tuple[float, Any]]:
    """Entries of a document's beginning by budget and arm; text is not merged."""
    seen = observe(engine, LinkSequence(tokens[:PROMPT], torch.arange(PROMPT), whole.blocks))
    request = LinkRequest("bench", tokens[:PROMPT].tolist())
    for budget in budgets:
        yield budget, {"full": whole} | compacted(engine, request, budget, seen, whole)


def _loss(
    engine: PrefillEngine, tokens: Tensor, whole: Held, budgets: Sequence[float]
) -> Iterator[tuple[str, float, float]]:
    wanted = tokens[PROMPT:].long()[:, None]
    for budget, held in _held(engine, tokens, whole, budgets):
        said = logprobs(engine, tokens[PROMPT - 1 : -1], list(held.values()))
        yield from ((arm, budget, -float(rows.gather(1, wanted).mean())) for arm, rows in zip(held, said, strict=True))


def _alike(engine: PrefillEngine, tokens: Tensor, whole: Held, budget: float) -> Iterator[tuple[str, float, float]]:
    for _, held in _held(engine, tokens, whole, [budget]):
        said = dict(zip(held, greedy(engine, int(tokens[PROMPT - 1]), list(held.values()), SAID), strict=True))
        yield from ((arm, budget, rouge_l(words, said["full"])) for arm, words in said.items())


def rouge_l(one: Sequence[int], other: Sequence[int]) -> float:
    """F measure of the longest common subsequence of two token sequences (ROUGE-L)."""
    row, words = np.zeros(len(other) + 1, dtype=np.int64), np.asarray(other)
    for word in one:
        longer = np.maximum(row[1:], row[:-1] + (words == word))
        row[1:] = np.maximum.accumulate(longer)
    return 2 * int(row[-1]) / max(len(one) + len(other), 1)


def perplexity_table(losses: Mapping[str, Mapping[str, Sequence[float]]]) -> dict[str, dict[str, float]]:
    """Perplexity by arm and budget.

    Its interval is that of the distance to ours, document by document.
    """
    table: dict[str, dict[str, float]] = {}
    for arm, by_budget in losses.items():
        table[arm] = {budget: math.exp(average(found).value) for budget, found in by_budget.items()}
        for budget, found in by_budget.items():
            apart = average(np.subtract(found, losses[OURS][budget]))
            table[arm][f"{budget} {UNCERTAINTY}"] = apart.uncertainty * table[arm][budget]
    return table


def ratios(losses: Mapping[str, Mapping[str, Sequence[float]]], budget: float) -> dict[str, dict[str, float]]:
    """Our perplexity over others' at a budget, with intervals over documents."""
    table: dict[str, dict[str, float]] = {}
    for other in OTHERS:
        found = average(np.subtract(losses[OURS][f"{budget:g}"], losses[other][f"{budget:g}"]))
        half = (math.exp(found.high) - math.exp(found.low)) / 2
        table[f"over {other}"] = {"ratio": math.exp(found.value), f"ratio {UNCERTAINTY}": half}
    return table


def documents(tokenizer: Any, count: int) -> Iterator[Tensor]:
    """Beginnings of the documentation of Python's modules, as tokens.

    Raises:
        ValueError: fewer are long enough.
    """
    found = 0
    for name in _MODULES:
        if found == count:
            return
        try:
            text = pydoc.plain(pydoc.render_doc(importlib.import_module(name)))[:12000]
        except ImportError:
            continue
        tokens = tokenizer(text)["input_ids"][: PROMPT + NEXT]
        if len(tokens) == PROMPT + NEXT:
            yield torch.tensor(tokens, dtype=torch.int32)
            found += 1
    if found < count:
        raise ValueError(f"only {found} documents are long enough")
