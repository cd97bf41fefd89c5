"""Time to first token of an agent's steps, whose window of screenshots slides.

Each step appends an action and a new screenshot, and the oldest screenshot leaves with its action. Both arms are sent
the same prompts. Between two steps, while the agent acts, ours works off what it does in idle time, up to a window that
is exact again; the clock stands, and what that took is told (`idle ms`).

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
from itertools import count
from statistics import median
from typing import Any

import httpx
import numpy as np
from rich.console import Console

from infra.checkpoints import checkpoint_path
from serving.bench.harness import Arm, Benchmark, Outcome
from serving.bench.models import CHECKPOINT, measured_dtype
from serving.loadtest.images import Timed, image_url, timed_chat
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
_CONTEXT = {256: 6144, 1024: 16384}  # tokens of the longest prompt, by those of a screenshot


def run(quick: bool, console: Console) -> Outcome:
    """Measure both arms, step by step, window by window."""
    size, steps = (256, dict.fromkeys(_STEPS, 3)) if quick else (1024, _STEPS)
    context, checkpoint = _CONTEXT[size], checkpoint_path(CHECKPOINT)
    samples: dict[str, dict[str, list[float]]] = {name: {} for name in _DESCRIPTIONS}
    computed: dict[str, dict[str, list[int]]] = {name: {} for name in _DESCRIPTIONS}
    idle: dict[str, list[float]] = {}
    same = list[bool]()
    model = {"max_model_len": context}
    with (
        vllm_alone(checkpoint, context=context) as alone,
        ours(checkpoint, console, quick, model=model) as service,
        httpx.Client(timeout=600) as web,
    ):
        alone.settle()

        def ask(arm: str, window: int, server: Server, messages: list[dict[str, Any]], **orbit: Any) -> Timed:
            fields = {"orbit": orbit} if orbit else {}
            timed = timed_chat(web, server.url, server.model, messages, **fields)
            samples[arm].setdefault(str(window), []).append(timed.ttft_ms)
            computed[arm].setdefault(str(window), []).append(timed.computed_tokens)
            return timed

        def settle(window: int) -> None:
            began = time.perf_counter()
            service.settle()
            idle.setdefault(str(window), []).append((time.perf_counter() - began) * 1e3)

        for window, count_of in steps.items():
            agent, session = _Agent(window, size), {"id": f"agent-{window}"}
            _warm_up(web, [alone, service], agent, session)
            for step in range(count_of):
                messages, turns = agent.step(), [("vllm", alone, {}), ("session", service, {"session": session})]
                for arm, server, orbit in turns if step % 2 else reversed(turns):
                    ask(arm, window, server, messages, **orbit)
                    if arm == "session":
                        settle(window)  # or the other arm would be asked beside it
                last = {arm: round(samples[arm][str(window)][-1]) for arm in ("vllm", "session")}
                console.print(f"  window of {window}, step {step + 1} of {count_of}: {last} ms")
                if window == _RECALLED_AT and step % _LOOK_BACK_EVERY == 0:
                    back = [*messages, *agent.look_back()]
                    recalled = ask("recall", window, service, back, session=session)
                    service.settle()
                    exact = ask("recall, exact", window, service, back, mode="exact")
                    service.settle()
                    same.append(recalled.text == exact.text)
    arms = {name: Arm(name, text, samples[name]) for name, text in _DESCRIPTIONS.items()}
    ratio = {w: arms["session"].median_ms(str(w)) / arms["vllm"].median_ms(str(w)) for w in steps}
    first, last, recalled_at = str(min(steps)), str(max(steps)), str(_RECALLED_AT)
    figures = {
        **{f"ttft_over_vllm_{w}": ratio[w] for w in steps},
        "longest_over_shortest": arms["session"].median_ms(last) / arms["session"].median_ms(first),
        "recall_over_exact": arms["recall"].median_ms(recalled_at) / arms["recall, exact"].median_ms(recalled_at),
        "recall_same_answer": sum(same) / len(same),
    }
    workload = {
        "model": CHECKPOINT,
        "dtype": measured_dtype(),
        "image_tokens": size,
        "steps": {str(window): count_of for window, count_of in steps.items()},
        "action_tokens": list(_ACTIONS),
        "head_tokens": _HEAD,
        "look_backs": len(same),
        "in_flight": 1,
    }
    tokens = {name: {w: sum(n) / len(n) for w, n in rows.items()} for name, rows in computed.items()}
    tables = {"tokens computed": tokens, "idle ms": {"session": {w: median(ms) for w, ms in idle.items()}}}
    return Outcome(workload, [*arms.values()], figures, tables, axis="screenshots")


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


BENCHMARK = Benchmark(
    "agent",
    "Time to first token of an agent's steps while its window of screenshots slides: vLLM's prefix caching, and ours.",
    run,
    {
        "ttft_over_vllm_3": ("<=", 0.5),
        "ttft_over_vllm_6": ("<=", 0.3),
        "ttft_over_vllm_12": ("<=", 0.18),
        "longest_over_shortest": ("<=", 2.3),
        "recall_over_exact": ("<=", 0.15),
    },
)
