"""Multimodal RAG: right pages and answers, and the time of retrieval.

| part   | pages                    | what is compared                                                                 |
|--------|--------------------------|----------------------------------------------------------------------------------|
| read   | drawn, no text layer     | answers over 4 pages found by the bundled model's own tower (embedder `model`),  |
|        |                          | and over the right page given                                                    |
| first  | noise of 512 tokens      | `orbit.retrieve` of 4 pages in orders by chance, and a search outside with       |
|        |                          | vLLM's server and its prefix cache, which is sent them inline                    |
| middle | noise of 1,024 tokens    | the pause of a second `file_search`, 4 pages beside 4, and sending the           |
|        |                          | conversation with its pages to vLLM again                                        |

Pages of `first` and `middle` are found by words, by both sides in the same search. The same sets were asked about
before, by both sides: what is stored of them serves, and nothing is compiled ahead. The model of `middle` has random
weights: a grammar has it call the tool, and it searches for what it is biased to and has not said yet. Its requests
leave the text before the pages out of patches' keys (`text: free`): with the bundled tokenizers a token is a letter,
and a call alone longer than what `auto` leaves out.

| arm            | what is timed                                                                        |
|----------------|--------------------------------------------------------------------------------------|
| outside        | search over HTTP, then vLLM's first token                                            |
| retrieve       | ours: one request with `orbit.retrieve`                                              |
| prefill        | vLLM, the conversation with 8 pages, of which it has computed nothing                |
| prefill, known | the same, all before the last 4 pages in its prefix cache                            |
| pause          | ours: from the second call's last token to the next token                            |
"""

from __future__ import annotations

import json
import statistics
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from rich.console import Console

from infra.checkpoints import checkpoint_path
from infra.reference import DEFAULT_MODEL, weights
from infra.reference.vocabulary import THINGS, question
from serving.api.file_search import FUNCTION
from serving.bench.harness import Arm, Benchmark, Outcome
from serving.bench.models import CHECKPOINT, measured_dtype
from serving.cli.demo import open_client
from serving.cli.demo_rag import pdf_of
from serving.loadtest.images import Timed, data_url, noise, timed_chat
from tests.benchmarks import load_arms
from tests.benchmarks.mrag_pages import (
    LEVELS,
    draw_pages,
    draw_questions,
    files_of,
    fill,
    pictures,
    place_of,
    word_of,
    worded,
)
from tests.benchmarks.servers import Server, ours, vllm_alone

_DESCRIPTIONS = {
    "outside": "search over HTTP, then vLLM's OpenAI server with prefix caching",
    "retrieve": "OrbitServe, orbit.retrieve",
    "prefill": "vLLM, the conversation sent again; nothing of it computed before",
    "prefill, known": "vLLM, the conversation sent again; all before the last pages in its prefix cache",
    "pause": "OrbitServe, the second file_search of an answer",
}
RETRIEVED = 4
_CONTEXT = 16384
_BY_WORDS = {"hybrid_search": {"embedding_weight": 0.0, "text_weight": 1.0}}
_CALLED = "78"  # what the two searches of an answer look for: digits, which no other part of the prompt has
_QUESTION = 24  # letters
_WARM = 2  # times that a set is asked about before it is timed: computed, then linked
_FAVOURED = (100.0, 70.0)  # added to the digits' logits: far more than these differ by, or lie below 0
_UNSAID = 1e4  # repetition penalty: a digit that was searched for is not taken again
_TOOLS = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}


@dataclass(frozen=True)
class _Scale:
    pages: int  # of `read`
    questions: int
    known: int  # pages of `first`
    sets: int  # of them that are asked about
    first: int  # tokens of a page
    turns: int
    middle: int  # tokens of a page
    answers: int


_FULL = _Scale(pages=1000, questions=100, known=8, sets=3, first=512, turns=6, middle=1024, answers=3)
_QUICK = _Scale(pages=60, questions=6, known=6, sets=2, first=256, turns=2, middle=256, answers=2)


def run(quick: bool, console: Console) -> Outcome:
    """Measure all parts; `quick`: few pages, and the bundled model for all of them."""
    scale, bundled = _QUICK if quick else _FULL, weights(DEFAULT_MODEL)
    checkpoint = bundled if quick else checkpoint_path(CHECKPOINT)
    prefill = {"orbit_chunks": 0, "subset_forwards": 0, "pair_forwards": 0}
    timed = {"model": {"max_model_len": _CONTEXT, **_TOOLS}, "prefill": prefill}
    reading = {**timed, "model": {**timed["model"], "dtype": "float32"}, "retriever": {"embedder": "model"}}
    with ExitStack() as stack, httpx.Client(timeout=600) as web:
        service = stack.enter_context(_service(bundled, console, reading))
        read = _read(web, service, scale, console)
        if not quick:
            stack.close()  # one service at a time
        alone = stack.enter_context(vllm_alone(checkpoint, context=_CONTEXT))
        alone.settle()
        if not quick:
            service = stack.enter_context(_service(checkpoint, console, timed))
        first, computed = _first(web, alone, service, scale, console)
        middle = _Conversation(web, alone, service, scale)
        paused, linked = middle.measure(console)
    samples = first | paused
    arms = [Arm(name, text, samples[name]) for name, text in _DESCRIPTIONS.items()]
    middle_ms = {name: statistics.median(paused[name][middle.case]) for name in paused}
    at_first = {name: statistics.median(first[name][_case(1)]) for name in first}
    figures = {
        "found": read["found"],
        "right_over_oracle": read["right"] / read["oracle"],
        "ttft_over_outside": at_first["retrieve"] / at_first["outside"],
        "pause_over_prefill": middle_ms["pause"] / middle_ms["prefill"],
        "pause_over_known": middle_ms["pause"] / middle_ms["prefill, known"],
        "pause_vision_tokens": max(linked["vision_tokens_encoded"]),
    }
    tables = {
        "read": {"share of the questions": {**read}},
        "first: prompt tokens computed": {"": computed},
        "middle: tokens of the second link": {"": {name: statistics.median(n) for name, n in linked.items()}},
    }
    workload = {
        "drawn_pages": scale.pages,
        "questions": scale.questions,
        "model": checkpoint.name,
        "dtype": measured_dtype(),
        "pages": scale.known,
        "sets": scale.sets,
        "retrieved": RETRIEVED,
        "image_tokens": {"first": scale.first, "middle": scale.middle},
        "turns": {"first": scale.turns, "middle": scale.answers},
        "in_flight": 1,
    }
    return Outcome(workload, arms, figures, tables)


@contextmanager
def _service(checkpoint: Path, console: Console, sections: Mapping[str, Any]) -> Iterator[Server]:
    """Our service, with roles on Ray Serve in quick runs too: the retriever is one."""
    with ours(checkpoint, console, quick=False, **sections) as service:
        yield replace(service, settle=load_arms.settle)


def _ask(web: httpx.Client, server: Server, messages: list[dict[str, Any]], **fields: Any) -> Timed:
    """A chat with its time to first token. Raises RuntimeError if there is none: the answer has no text."""
    timed = timed_chat(web, server.url, server.model, messages, **fields)
    if not timed.ttft_ms:
        raise RuntimeError(f"{server.url} answered without text, so that nothing was timed")
    return timed


def _case(searches: int) -> str:
    return " + ".join([str(RETRIEVED)] * searches) + " pages"


# -- read -------------------------------------------------------------------------------------------------------------


def _read(web: httpx.Client, service: Server, scale: _Scale, console: Console) -> dict[str, float]:
    """Shares of questions: right page found, found in the first place, answered right, and given the page."""
    generator = torch.Generator().manual_seed(47)
    scenes = draw_pages(scale.pages, generator)
    asked = draw_questions(scenes, scale.questions, RETRIEVED, generator)
    pages = pictures(scenes)
    store, ids = fill(open_client(service.url), "drawn", dict(files_of(pages)))
    console.print(f"  {scale.pages} pages are indexed", highlight=False)
    chat = partial(timed_chat, web, service.url, service.model)
    counted = {"found": 0, "found first": 0, "right": 0, "oracle": 0}
    for one in asked:
        retrieve = {"vector_store_ids": [store], "query": one.query, "max_num_results": RETRIEVED}
        answer = chat([{"role": "user", "content": one.question}], orbit={"retrieve": retrieve})
        results = sorted(answer.orbit["retrieval"]["results"], key=lambda result: -result["score"])
        file, number = place_of(one.page)
        places = [(result["file_id"], result["page"]) == (ids[file], number) for result in results]
        counted["found"] += any(places)
        counted["found first"] += places[:1] == [True]
        counted["right"] += answer.text.strip() == one.colour
        page = {"type": "image_url", "image_url": {"url": data_url(pages[one.page])}}
        content = [page, {"type": "text", "text": one.question}]
        given = chat([{"role": "user", "content": content}], orbit={"mode": "exact"})
        counted["oracle"] += given.text.strip() == one.colour
    console.print(f"  {len(asked)} questions: {counted}", highlight=False)
    return {name: count / len(asked) for name, count in counted.items()}


# -- first ------------------------------------------------------------------------------------------------------------


def _first(
    web: httpx.Client, alone: Server, service: Server, scale: _Scale, console: Console
) -> tuple[dict[str, dict[str, list[float]]], dict[str, float]]:
    """Milliseconds to the first token over retrieved pages, and prompt tokens computed in the median."""
    pages = [worded(number, scale.first) for number in range(scale.known)]
    files = {f"{number}.pdf": pdf_of([picture], [words]) for number, (picture, words) in enumerate(pages)}
    store, ids = fill(open_client(service.url), "noise", files)
    urls = {ids[f"{number}.pdf"]: data_url(picture) for number, (picture, _) in enumerate(pages)}
    search = {"max_num_results": RETRIEVED, "ranking_options": _BY_WORDS}

    def outside(query: str, asked: str) -> tuple[float, Timed]:
        body = {"query": query, **search}
        answer = web.post(f"{service.url}/v1/vector_stores/{store}/search", json=body).raise_for_status()
        found = [{"type": "image_url", "image_url": {"url": urls[one["file_id"]]}} for one in answer.json()["data"]]
        content = [*found, {"type": "text", "text": asked}]
        timed = _ask(web, alone, [{"role": "user", "content": content}])
        return answer.elapsed.total_seconds() * 1e3 + timed.ttft_ms, timed

    def retrieve(query: str, asked: str) -> tuple[float, Timed]:
        orbit = {"order": "free", "retrieve": {"vector_store_ids": [store], "query": query, **search}}
        timed = _ask(web, service, [{"role": "user", "content": asked}], orbit=orbit)
        if (found := len(timed.orbit["chunks"])) != RETRIEVED:
            raise RuntimeError(f"{query!r} found {found} pages, not {RETRIEVED}")
        return timed.ttft_ms, timed

    arms: dict[str, Callable[[str, str], tuple[float, Timed]]] = {"outside": outside, "retrieve": retrieve}
    samples: dict[str, list[float]] = {name: [] for name in arms}
    computed: dict[str, list[int]] = {name: [] for name in arms}
    random = np.random.default_rng(47)
    sets = [random.choice(scale.known, RETRIEVED, replace=False) for _ in range(scale.sets)]
    warm_up = _WARM * scale.sets
    for turn in range(-warm_up, scale.turns):
        chosen = random.permutation(sets[turn % scale.sets])
        query = " ".join(word_of(int(page), LEVELS - 1 - place) for place, page in enumerate(chosen))
        asked = question([THINGS[int(random.integers(len(THINGS)))]])
        for name in arms if turn % 2 else reversed(arms):
            ms, timed = arms[name](query, asked)
            if turn >= 0:
                samples[name].append(ms)
                computed[name].append(timed.computed_tokens)
            service.settle()  # or the other arm would be asked beside it
    console.print("  retrieval before the answer is done")
    tokens = {name: statistics.median(counts) for name, counts in computed.items()}
    return {name: {_case(1): times} for name, times in samples.items()}, tokens


def _letters(random: np.random.Generator) -> str:
    return "".join(random.choice([*string.ascii_lowercase], _QUESTION))


# -- middle -----------------------------------------------------------------------------------------------------------


def _call(query: str) -> str:
    """The model's call of the tool, as its template has it."""
    return f'<tool_call>\n{{"name": "file_search", "arguments": {{"query": "{query}"}}}}\n</tool_call>'


def _file(digit: str) -> str:
    return f"{'abc'[_CALLED.index(digit)]}.pdf"


class _Conversation:
    """An answer that searches twice, and the same conversation as vLLM is sent it.

    Pages of what is searched for first stand before the others where both are: `_warm_up` has them in that order.
    """

    case = _case(2)

    def __init__(self, web: httpx.Client, alone: Server, service: Server, scale: _Scale) -> None:
        self._web, self._alone, self._service, self._scale = web, alone, service, scale
        self._random = np.random.default_rng(48)
        numbers = iter(range(scale.known, scale.known + RETRIEVED * len(_CALLED)))  # others than those of `first`
        self._pages = {digit: [noise(scale.middle, next(numbers)) for _ in range(RETRIEVED)] for digit in _CALLED}
        words = {digit: f"{digit} {digit}" if i == 0 else f"{digit} x" for i, digit in enumerate(_CALLED)}
        files = {_file(digit): pdf_of(pages, [words[digit]] * RETRIEVED) for digit, pages in self._pages.items()}
        self._alphabet = self._tokens(string.ascii_lowercase)
        self._bias = {str(self._tokens(digit)[0]): most for digit, most in zip(_CALLED, _FAVOURED, strict=True)}
        self._store, _ = fill(open_client(service.url), "groups", files)
        self._tool = {
            "type": "file_search",
            "vector_store_ids": [self._store],
            "max_num_results": RETRIEVED,
            "ranking_options": _BY_WORDS,
        }

    def measure(self, console: Console) -> tuple[dict[str, dict[str, list[float]]], dict[str, list[int]]]:
        """Milliseconds of all arms, and tokens of the second search's link, by what became of them."""
        self._warm_up()
        samples: dict[str, list[float]] = {"prefill": [], "prefill, known": [], "pause": []}
        linked: dict[str, list[int]] = {}
        for turn in range(-1, self._scale.answers):  # one to warm up
            rounds = self._searched_twice()
            self._service.settle()
            if turn < 0:
                continue
            samples["pause"].append(rounds[1]["pause_ms"])
            for name, ms in zip(("prefill", "prefill, known"), self._sent(turn), strict=True):
                samples[name].append(ms)
            for name in ("prompt_tokens", "tokens_reused", "tokens_computed", "vision_tokens_encoded"):
                linked.setdefault(name, []).append(rounds[1][name])
        console.print("  retrieval in mid-answer is done")
        return {name: {self.case: times} for name, times in samples.items()}, linked

    def _warm_up(self) -> None:
        """Have all pages stored, and what they take up from one another, in the order in which they will stand."""
        retrieve = {
            "vector_store_ids": [self._store],
            "query": " ".join(_CALLED),
            "max_num_results": 2 * RETRIEVED,
            "ranking_options": _BY_WORDS,
        }
        for _ in range(_WARM):
            messages = [{"role": "user", "content": _letters(self._random)}]
            service = self._service
            timed_chat(
                self._web, service.url, service.model, messages, tools=[self._tool], orbit={"retrieve": retrieve}
            )
            service.settle()

    def _tokens(self, text: str) -> list[int]:
        body = {"model": self._service.model, "prompt": text, "add_special_tokens": False}
        answer = self._web.post(f"{self._service.url}/tokenize", json=body).raise_for_status().json()
        found: list[int] = answer["tokens"]
        return found

    def _searched_twice(self) -> list[dict[str, Any]]:
        """Rounds of an answer that searched for one digit and then for the other. Raises RuntimeError if it did not."""
        rounds = self._answer()
        if [(one["query"], one["results"]) for one in rounds[:2]] != [(digit, RETRIEVED) for digit in _CALLED]:
            raise RuntimeError(f"an answer did not search for {' and then '.join(_CALLED)}: {rounds}")
        return rounds

    def _answer(self) -> list[dict[str, Any]]:
        """Rounds of an answer that has room for two calls, and none for a third."""
        regex = _call(f"[{_CALLED}]").replace("{", r"\{").replace("}", r"\}")
        body = {
            "model": self._service.model,
            "messages": [{"role": "user", "content": _letters(self._random)}],
            "tools": [self._tool],
            "temperature": 0,
            "logit_bias": self._bias,
            "repetition_penalty": _UNSAID,
            "max_tokens": 2 * len(_call(_CALLED[0])) + 6,  # a token is a letter, or more than one
            "structured_outputs": {"regex": regex},
            "orbit": {"text": "free"},
        }
        response = self._web.post(f"{self._service.url}/v1/chat/completions", json=body)
        if response.status_code != 200:
            raise RuntimeError(f"{self._service.url} answered {response.status_code}: {response.text}")
        rounds: list[dict[str, Any]] = (response.json()["orbit"]["retrieval"] or {}).get("rounds", [])
        return rounds

    def _sent(self, number: int) -> tuple[float, float]:
        """Milliseconds to vLLM's first token behind the whole conversation.

        First of one that begins as none before it; then of the same with its last pages in another order, so that what
        stands before these is known.
        """
        begin = f"{number:06d}"[::-1] + json.dumps(FUNCTION)
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": begin},
            {"role": "user", "content": _letters(self._random)},
        ]
        at = 1
        for digit, pages in self._pages.items():
            lines = [f"[{at + i}] {_file(digit)}, page {i + 1}" for i in range(len(pages))]
            told = {"type": "text", "text": "\n".join(["Found, in the order shown:", *lines])}
            shown = [{"type": "image_url", "image_url": {"url": data_url(page)}} for page in pages]
            messages += [{"role": "assistant", "content": _call(digit)}, {"role": "user", "content": [*shown, told]}]
            at += len(pages)
        whole = self._ask_vllm(messages)
        turned = {"role": "user", "content": [*shown[1:], shown[0], told]}
        return whole, self._ask_vllm([*messages[:-1], turned])

    def _ask_vllm(self, messages: Sequence[dict[str, Any]]) -> float:
        return _ask(self._web, self._alone, [*messages], allowed_token_ids=self._alphabet).ttft_ms


BENCHMARK = Benchmark(
    "mrag",
    "Multimodal RAG: right pages and answers, and the time of retrieval before and in mid-answer, against vLLM's.",
    run,
    {
        "found": (">=", 0.95),
        "right_over_oracle": (">=", 0.95),
        "ttft_over_outside": ("<=", 0.35),
        "pause_over_prefill": ("<=", 0.15),
        "pause_vision_tokens": ("<=", 0),
    },
)
