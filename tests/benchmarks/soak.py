"""Mixed load while stored records are damaged: wrong answers, errors, memory, blocks.

Chats with text, documents and images in several modes come from a few clients at once, some leave in the middle of
their streams, files are uploaded and deleted, and all the while records change in place at random: bits, runs of
garbage and zeros, truncation. Patches have full rank and the model fp32, so every answer is the one that the same
request had alone, whatever was linked; the library's memory is small, so records are read again all the time.

| figure             | what                                                                        |
|--------------------|-----------------------------------------------------------------------------|
| `wrong_answers`    | that differ from the answer alone                                           |
| `errors`           | answers that are neither 200 nor 429, and streams that end with an error    |
| `silent_cuts`      | streams that end with neither `[DONE]` nor an error                         |
| `changes`          | records changed in place; `quarantined`: those that were noticed            |
| `growth_mib`       | memory of all processes at the end, over what it was after the first third  |
| `blocks_left`      | KV blocks and leases that are still held when all is quiet                  |
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
from rich.console import Console

from infra.checkpoints import checkpoint_path
from serving.bench.harness import Arm, Benchmark, Outcome
from serving.deploy.launch import APPLICATION, application
from serving.loadtest.images import image_url
from tests.benchmarks.load_arms import QUICK_CHECKPOINT, settle
from tests.benchmarks.servers import bench_config, tree

_CLIENTS = 4
_PAGE_TOKENS = 256
_CHANGES_PER_S = 18.0
_LEAVES, _UPLOADS = 0.15, 0.05  # shares of the requests
_LOOK_SECONDS = 2.0  # between two looks at the processes' memory
_MIB = 1 << 20


@dataclass(frozen=True)
class Ask:
    """One kind of request, and the answer that it has alone."""

    content: list[dict[str, Any]]
    mode: str
    alone: str = ""


def run(quick: bool, console: Console) -> Outcome:
    """Ask each kind alone, then all of them at once for a minute (quick), or ten."""
    seconds = 60.0 if quick else 600.0
    with tempfile.TemporaryDirectory(prefix="orbitserve-soak-") as root:
        config = bench_config(
            checkpoint_path(QUICK_CHECKPOINT),
            Path(root),
            model={"dtype": "float32"},
            patch={"rank": None, "factors": "model", "spread": False},
            library={"memory_bytes": _MIB, "object_store_bytes": 0},  # records are read from disk
        )
        with application(config, console) as url:
            client = Client(url, config.model.served_name)
            kinds = [Ask(content, mode, client.ask(content, "exact")) for content, mode in _kinds()]
            for kind in kinds:
                client.ask(kind.content, kind.mode)
            settle()
            before = _held()
            soak = Soak(client, kinds, Path(root) / "library" / "records")
            console.print(f"{seconds:g} s of load from {_CLIENTS} clients")
            memory = soak.run(seconds, console)
            settle()
            left = _left(before)
            quarantined = sum(stats["library"].quarantined for stats in _stats("PrefillWorker"))
    counts = soak.counts
    third = len(memory) // 3
    figures = {
        "requests": float(counts["requests"]),
        "wrong_answers": float(counts["wrong"]),
        "errors": float(counts["errors"]),
        "silent_cuts": float(counts["cut"]),
        "left_by_clients": float(counts["left"]),
        "changes": float(counts["changes"]),
        "quarantined": float(quarantined),
        "growth_mib": statistics.median(memory[-third:]) - statistics.median(memory[third : 2 * third]),
        "blocks_left": float(left),
    }
    for problem in soak.problems[:5]:
        console.print(f"[red]{problem}")
    latencies = {"all": [1e3 * value for value in soak.latencies]}
    workload = {"model": QUICK_CHECKPOINT, "seconds": seconds, "clients": _CLIENTS, "changes_per_s": _CHANGES_PER_S}
    arm = Arm("answers", "whole answers of 12 tokens under load", latencies)
    return Outcome(workload, [arm], figures)


def _kinds() -> list[tuple[list[dict[str, Any]], str]]:
    """Contents and modes of the requests."""
    pages = [{"type": "image_url", "image_url": {"url": image_url(_PAGE_TOKENS, number)}} for number in range(4)]

    def text(words: str) -> dict[str, Any]:
        return {"type": "text", "text": words}

    both = [text("See "), pages[1], text(" and "), pages[2], text(" and say what follows.")]
    return [
        ([text("Only text, and not much of it.")], "auto"),
        ([text("Words " * 60)], "exact"),
        ([pages[0], text("One picture.")], "auto"),
        ([pages[0], text("One picture.")], "exact"),
        (both, "auto"),
        (both, "auto"),
        ([pages[2], pages[1], text("The other way round.")], "auto"),
        ([*pages[:3], text("Three.")], "auto"),
        ([pages[3], text("Never kept.")], "off"),
    ]


class Client:
    """Client of the service."""

    def __init__(self, url: str, model: str) -> None:
        self._url, self._model = url, model
        self._http = httpx.Client(timeout=300, limits=httpx.Limits(max_connections=None))

    def ask(self, content: list[dict[str, Any]], mode: str, leave_after: int | None = None) -> str:
        """The streamed answer; of a client that leaves, what it has had.

        Raises:
            RuntimeError: an error, in words. EOFError: the stream ended without a word.
        """
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": 12,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "orbit": {"mode": mode},
        }
        said, events = "", 0
        with self._http.stream("POST", f"{self._url}/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                raise RuntimeError(f"{response.status_code}: {response.read()[:200]!r}")
            for line in response.iter_lines():
                if line == "data: [DONE]":
                    return said
                if not line.startswith("data: "):
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise RuntimeError(str(event["error"])[:200])
                said += event["choices"][0]["delta"].get("content") or ""
                events += 1
                if events == leave_after:
                    return said
        raise EOFError(said)

    def upload_and_delete(self) -> None:
        """Upload a text and delete it. Raises httpx.HTTPStatusError."""
        files = {"file": ("words.txt", random.randbytes(8).hex().encode() * 20)}
        made = self._http.post(f"{self._url}/v1/files", files=files, data={"purpose": "user_data"}).raise_for_status()
        self._http.delete(f"{self._url}/v1/files/{made.json()['id']}").raise_for_status()


class Soak:
    """Load, damage, and looks at the memory, side by side."""

    def __init__(self, client: Client, kinds: list[Ask], records: Path) -> None:
        self._client, self._kinds, self._records = client, kinds, records
        self.counts: Counter[str] = Counter()
        self.latencies: list[float] = []
        self.problems: list[str] = []
        self._stop = threading.Event()

    def run(self, seconds: float, console: Console) -> list[float]:
        """Run for so long; returns the MiB of all processes together, look by look."""
        memory: list[float] = []
        until, told = time.monotonic() + seconds, 0.0
        with ThreadPoolExecutor(_CLIENTS + 1) as pool:
            work = [pool.submit(self._load, random.Random(number)) for number in range(_CLIENTS)]
            work.append(pool.submit(self._damage, random.Random("damage")))
            while (left := until - time.monotonic()) > 0:
                memory.append(sum(_rss(process) for process in tree(psutil.Process())) / _MIB)
                if time.monotonic() - told > 30:
                    told = time.monotonic()
                    console.print(f"  {left:4.0f} s left, {memory[-1]:,.0f} MiB, {dict(self.counts)}")
                time.sleep(_LOOK_SECONDS)
            self._stop.set()
            for one in work:
                one.result()
        return memory

    def _load(self, rng: random.Random) -> None:
        while not self._stop.is_set():
            kind = rng.choice(self._kinds)
            self.counts["requests"] += 1
            try:
                if rng.random() < _UPLOADS:
                    self._client.upload_and_delete()
                elif rng.random() < _LEAVES:
                    self._client.ask(kind.content, kind.mode, leave_after=rng.randrange(1, 8))
                    self.counts["left"] += 1
                else:
                    self._compare(kind)
            except EOFError as error:
                self._problem("cut", f"a stream of {kind.mode} ended behind {str(error)!r}")
            except (RuntimeError, httpx.HTTPError) as error:
                if not str(error).startswith("429"):
                    self._problem("errors", f"{kind.mode}: {error}")

    def _compare(self, kind: Ask) -> None:
        began = time.perf_counter()
        said = self._client.ask(kind.content, kind.mode)
        self.latencies.append(time.perf_counter() - began)
        if said != kind.alone:
            self._problem("wrong", f"{kind.mode}: {said!r}, alone {kind.alone!r}")

    def _problem(self, name: str, words: str) -> None:
        self.counts[name] += 1
        self.problems.append(words)

    def _damage(self, rng: random.Random) -> None:
        began = time.monotonic()
        while not self._stop.is_set():
            files = [path for path in self._records.rglob("*.arrow") if path.is_file()]
            if files:
                with suppress(FileNotFoundError):  # it was quarantined just now
                    rng.choice(_DAMAGES)(rng, rng.choice(files))
                    self.counts["changes"] += 1
            due = began + self.counts["changes"] / _CHANGES_PER_S
            self._stop.wait(max(0.001, due - time.monotonic()))


def _overwrite(rng: random.Random, path: Path, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(rng.randrange(max(1, path.stat().st_size - len(data))))
        file.write(data)


def _truncate(rng: random.Random, path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(rng.randrange(path.stat().st_size + 1))


_DAMAGES: tuple[Callable[[random.Random, Path], None], ...] = (
    lambda rng, path: _overwrite(rng, path, rng.randbytes(1)),
    lambda rng, path: _overwrite(rng, path, rng.randbytes(4096)),
    lambda rng, path: _overwrite(rng, path, bytes(4096)),
    lambda rng, path: _overwrite(rng, path, b"\xff" * 4096),
    _truncate,
)


def _rss(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0


def _stats(role: str) -> list[Any]:
    from ray import serve

    called = serve.get_deployment_handle(role, APPLICATION).broadcast("stats")
    return list(called.results(timeout_s=60))


def _held() -> Mapping[str, int]:
    """Blocks and leases that are held now."""
    loops = [stats["loop"] for stats in _stats("PrefillWorker")]
    return {
        "prefill": sum(loop.blocks_total - loop.blocks_free + loop.leases for loop in loops),
        "decode": sum(stats.blocks_reserved for stats in _stats("DecodeWorker")),
    }


def _left(before: Mapping[str, int], seconds: float = 60.0) -> int:
    """Blocks and leases that are held beyond those of before, once all had time to come back."""
    until = time.monotonic() + seconds
    while True:
        left = sum(max(0, count - before[name]) for name, count in _held().items())
        if not left or time.monotonic() > until:
            return left
        time.sleep(0.5)


BENCHMARK = Benchmark(
    name="soak",
    description="Ten minutes of mixed load while stored records are damaged: wrong answers, errors, memory, blocks.",
    run=run,
    targets={
        "wrong_answers": ("<=", 0),
        "errors": ("<=", 0),
        "silent_cuts": ("<=", 0),
        "blocks_left": ("<=", 0),
        "growth_mib": ("<=", 100),
    },
)
