"""Time to first token of an agent's steps, whose window of screenshots slides.

Each step appends an action and a new screenshot, and the oldest screenshot leaves with its action. Both arms are sent
the same prompts. Between two steps, while the agent acts, ours works off what it does in idle time, up to a window that
is exact again; the clock stands, and what that took is told (`idle ms`).

The longest window takes half of the whole. With `--work` finished windows are kept; `--only 3` measures one.

| arm           | what answers                                                                                  |
|---------------|-----------------------------------------------------------------------------------------------|
| vllm          | vLLM's OpenAI server with prefix caching: of a window that slid it knows the head             |
| session       | ours with `orbit.session`: what stays is relocated                                            |
| recall        | the same, asked to look at a screenshot again that has left, without a new one                |
| recall, exact | ours, mode `exact`: the same prompt                                                           |
"""

from __future__ import annotations

import string
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import count
from pathlib import Path
from statistics import mean, median
from typing import Any

import httpx
import numpy as np
from rich.console import Console

from infra.checkpoints import checkpoint_path
from serving.bench.harness import Arm, Benchmark, Outcome
from serving.bench.kept import Kept, digest_of
from serving.bench.models import CHECKPOINT, measured_dtype
from serving.loadtest.images import Timed, image_url, timed_chat
from serving.loadtest.records import versions
from tests.benchmarks.servers import Server, ours, vllm_alone

_DESCRIPTIONS = {
    "vllm": "vLLM's OpenAI server with prefix caching",
    "session": "OrbitServe, a session of survivors: refresh",
    "recall": "OrbitServe, the session: a screenshot that left, behind the window",
    "recall, exact": "OrbitServe, mode exact: the same prompt",
}
_STEPS = {3: 6, 6: 5, 12: 3}  # by window: a step of the longest one, idle work and all, takes five minutes of two cores
_RECALLED_AT = 6  # the window of look-backs
_HEAD = 60  # tokens; of text letters, with the bundled tokenizers
_ACTIONS = (20, 200)  # tokens of the shortest and the longest action
_LOOK_BACK_EVERY = 4  # steps
_CODE = [Path(__file__), Path(__file__).parents[2] / "prefill_workers"]
_CONTEXT = {256: 6144, 1024: 16384}  # tokens of the longest prompt, by those of a screenshot


@dataclass
class _Window:
    """Measurements of one window's steps, by arm; `idle_ms` behind each of the session's, `same`: of look-backs."""

    ttft_ms: dict[str, list[float]] = field(default_factory=dict)
    computed: dict[str, list[int]] = field(default_factory=dict)
    idle_ms: list[float] = field(default_factory=list)
    same: list[bool] = field(default_factory=list)


def run(quick: bool, console: Console, work: Path | None = None, only: Collection[str] | None = None) -> Outcome:
    """Measure both arms, step by step, window by window, or `only` some windows.

    Finished windows are kept in `work`, from where a run that was cut off goes on.
    """
    size, steps = (256, dict.fromkeys(_STEPS, 3)) if quick else (1024, _STEPS)
    kept = Kept(work, (quick, versions(), measured_dtype()), digest_of(_CODE))
    found: dict[int, _Window] = {}
    with ExitStack() as stack:
        servers = cache(partial(_servers, stack, size, quick, console))
        for window, count_of in steps.items():
            if not only or str(window) in only:
                measure = partial(_measured, window, count_of, size, servers, console)
                found[window] = kept.once(str(window), measure)
    arms = {
        name: Arm(name, text, {str(w): one.ttft_ms[name] for w, one in found.items() if name in one.ttft_ms})
        for name, text in _DESCRIPTIONS.items()
    }
    figures = {f"ttft_over_vllm_{w}": arms["session"].median_ms(str(w)) / arms["vllm"].median_ms(str(w)) for w in found}
    if {min(steps), max(steps)} <= found.keys():
        longest, shortest = (arms["session"].median_ms(str(w)) for w in (max(steps), min(steps)))
        figures["longest_over_shortest"] = longest / shortest
    if _RECALLED_AT in found:
        at, same = str(_RECALLED_AT), found[_RECALLED_AT].same
        figures["recall_over_exact"] = arms["recall"].median_ms(at) / arms["recall, exact"].median_ms(at)
        figures["recall_same_answer"] = sum(same) / len(same)
    workload = {
        "model": CHECKPOINT,
        "dtype": measured_dtype(),
        "image_tokens": size,
        "steps": {str(window): steps[window] for window in found},
        "action_tokens": list(_ACTIONS),
        "head_tokens": _HEAD,
        "look_backs": sum(len(one.same) for one in found.values()),
        "in_flight": 1,
    }
    tables = {
        "tokens computed": {
            name: {str(w): mean(one.computed[name]) for w, one in found.items() if name in one.computed}
            for name in _DESCRIPTIONS
        },
        "idle ms": {"session": {str(w): median(one.idle_ms) for w, one in found.items()}},
    }
    return Outcome(workload, [*arms.values()], figures, tables, axis="screenshots")


@dataclass(frozen=True)
class _Servers:
    web: httpx.Client
    alone: Server
    service: Server


def _servers(stack: ExitStack, size: int, quick: bool, console: Console) -> _Servers:
    """Both arms' servers, started when the first window needs them."""
    checkpoint, model = checkpoint_path(CHECKPOINT), {"max_model_len": _CONTEXT[size]}
    alone = stack.enter_context(vllm_alone(checkpoint, context=_CONTEXT[size]))
    service = stack.enter_context(ours(checkpoint, console, quick, model=model))
    alone.settle()
    return _Servers(stack.enter_context(httpx.Client(timeout=600)), alone, service)


def _measured(window: int, count_of: int, size: int, servers: Callable[[], _Servers], console: Console) -> _Window:
    """Measure so many steps of one window."""
    one, found = servers(), _Window()
    agent, session = _Agent(window, size), {"id": f"agent-{window}"}
    _warm_up(one.web, [one.alone, one.service], agent, session)

    def ask(arm: str, server: Server, messages: list[dict[str, Any]], **orbit: Any) -> Timed:
        timed = timed_chat(one.web, server.url, server.model, messages, **({"orbit": orbit} if orbit else {}))
        found.ttft_ms.setdefault(arm, []).append(timed.ttft_ms)
        found.computed.setdefault(arm, []).append(timed.computed_tokens)
        return timed

    for step in range(count_of):
        messages, turns = agent.step(), [("vllm", one.alone, {}), ("session", one.service, {"session": session})]
        for arm, server, orbit in turns if step % 2 else reversed(turns):
            ask(arm, server, messages, **orbit)
            if arm == "session":  # or the other arm would be asked beside what idle time is for
                began = time.perf_counter()
                one.service.settle()
                found.idle_ms.append((time.perf_counter() - began) * 1e3)
        last = {arm: round(times[-1]) for arm, times in found.ttft_ms.items() if arm in ("vllm", "session")}
        console.print(f"  window of {window}, step {step + 1} of {count_of}: {last} ms")
        if window == _RECALLED_AT and step % _LOOK_BACK_EVERY == 0:
            back = [*messages, *agent.look_back()]
            recalled = ask("recall", one.service, back, session=session)
            one.service.settle()
            exact = ask("recall, exact", one.service, back, mode="exact")
            one.service.settle()
            found.same.append(recalled.text == exact.text)
    return found


class _Agent:
    """Conversation of one agent: its window slides by a screenshot a step."""

    def __init__(self, window: int, size: int) -> None:
        self._window, self._size = window, size
        self._letters = np.random.default_rng(window)
        self._head = self._words(_HEAD)
        self._numbers = count(1000 * window)
        self._taken: list[tuple[int, str]] = []  # screenshots, with the actions that followed them

    def step(self) -> list[dict[str, Any]]:
        """The next prompt: the window's screenshots, with the actions between them."""
        self._taken.append((next(self._numbers), self._words(int(self._letters.integers(*_ACTIONS, endpoint=True)))))
        shown = self._taken[-self._window :]
        messages: list[dict[str, Any]] = [{"role": "system", "content": self._head}]
        for number, action in shown:
            messages += [self._seen(number), {"role": "assistant", "content": action}]
        return messages[:-1]

    def look_back(self) -> list[dict[str, Any]]:
        """Messages that show the screenshot that left last again, behind a prompt of `step`."""
        number, _ = self._taken[-self._window - 1]
        return [{"role": "assistant", "content": "show that once more"}, self._seen(number)]

    def _seen(self, number: int) -> dict[str, Any]:
        image = {"type": "image_url", "image_url": {"url": image_url(self._size, number)}}
        return {"role": "user", "content": [image]}

    def _words(self, tokens: int) -> str:
        return "".join(self._letters.choice([*string.ascii_lowercase], tokens))


def _warm_up(web: httpx.Client, servers: list[Server], agent: _Agent, session: dict[str, str]) -> None:
    """Fill the window, and let it slide once."""
    for _ in range(agent._window + 1):
        messages = agent.step()
        for server, fields in zip(servers, ({}, {"orbit": {"session": session}}), strict=True):
            timed_chat(web, server.url, server.model, messages, **fields)
        servers[1].settle()


TARGETS = {
    "ttft_over_vllm_3": ("<=", 0.5),
    "ttft_over_vllm_6": ("<=", 0.3),
    "ttft_over_vllm_12": ("<=", 0.18),
    "longest_over_shortest": ("<=", 2.3),
    "recall_over_exact": ("<=", 0.15),
}


def applies(name: str, figures: Mapping[str, float]) -> bool:
    """True if the windows that a target is about were measured."""
    return name in figures


BENCHMARK = Benchmark(
    "agent",
    "Time to first token of an agent's steps while its window of screenshots slides: vLLM's prefix caching, and ours.",
    run,
    TARGETS,
    takes_work=True,
    takes_only=tuple(map(str, _STEPS)),
    applies=applies,
)
