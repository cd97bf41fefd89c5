"""Timed streamed chat requests, and schedules of them sent when due (open loop).

An open loop: the next request does not wait for an answer, so a server that falls behind is shown to (but for a
request that sends an answer back: it is due when that is there, if that is later). Latencies are
counted from when a request was *due*, not from when it was sent ("coordinated omission"): where the generator itself
falls behind, its requests look slower, never faster, and `Sample.lag_ms` says by how much.
"""

from __future__ import annotations

import asyncio
import json
import resource
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import aiohttp

if TYPE_CHECKING:
    from serving.loadtest.bodies import Body

OK, REJECTED, TIMEOUT, UNFINISHED = "ok", "429", "timeout", "unfinished"
_NO_LIST = (404, 405, 501)  # of a server that lists no models
_SPARE_FILES = 256  # file descriptors for everything that is not a connection
_START_SECONDS = 0.05  # between the schedule's zero and now, so that the first request is not late


class EndpointError(RuntimeError):
    """The server cannot be tested: not reached, no such model, or it took no file.

    `status`: what it answered.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Endpoint:
    """A server and how it is asked.

    `orbit` is sent as the request's object of that name; None leaves it out, for servers that are not ours.
    `sessions`: requests of a conversation name it as their session.
    `images`: `inline` sends data URLs; `files` uploads every picture once to /v1/files and names it.
    """

    url: str
    model: str = ""
    api_key: str | None = None
    orbit: Mapping[str, Any] | None = None
    images: Literal["inline", "files"] = "inline"
    timeout_s: float = 120.0
    sessions: bool = False
    fields: Mapping[str, Any] = field(default_factory=dict)  # further fields of every request's body

    @property
    def base(self) -> str:
        """The address with /v1 at its end, given with or without."""
        return f"{self.url.rstrip('/').removesuffix('/v1')}/v1"


@dataclass(frozen=True)
class Sample:
    """One request.

    Times are `time.perf_counter` seconds; `status` is `ok`, an HTTP status, or what went wrong.
    """

    due: float
    sent: float
    first: float | None  # first event with content
    last: float | None  # last event with content
    done: float
    status: str
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None  # None: the server does not say
    points: Mapping[str, int] = field(default_factory=dict)  # chunks by operating point, from `orbit`
    stages_ms: Mapping[str, float] = field(default_factory=dict)  # what took how long, from `orbit`
    message: str = ""
    text: str = ""  # of the answer

    @property
    def is_ok(self) -> bool:
        """True if the answer came whole."""
        return self.status == OK

    @property
    def lag_ms(self) -> float:
        """Milliseconds that the generator sent it late."""
        return (self.sent - self.due) * 1e3

    @property
    def ttft_ms(self) -> float | None:
        """From when it was due to its first content; None for an answer without any."""
        return None if self.first is None else (self.first - self.due) * 1e3

    @property
    def e2e_ms(self) -> float:
        """From when it was due to the end of its answer."""
        return (self.done - self.due) * 1e3

    @property
    def tpot_ms(self) -> float | None:
        """Milliseconds per output token after the first; None for fewer than two."""
        if self.first is None or self.last is None or self.output_tokens < 2:
            return None
        return (self.last - self.first) * 1e3 / (self.output_tokens - 1)


@dataclass
class Tally:
    """Progress of a run, for display."""

    planned: int = 0
    sent: int = 0
    held_back: int = 0  # due while `max_in_flight` were outstanding
    peak: int = 0  # most outstanding at once
    samples: list[Sample] = field(default_factory=list)

    @property
    def in_flight(self) -> int:
        """Sent and not answered."""
        return self.sent - len(self.samples)


class Client:
    """Connections to one endpoint; as many as are asked for."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint

    async def __aenter__(self) -> Client:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=self.endpoint.timeout_s),
            headers={"Authorization": f"Bearer {self.endpoint.api_key}"} if self.endpoint.api_key else {},
            read_bufsize=1 << 20,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def model(self) -> str:
        """The endpoint's model, or the first one that the server names.

        A server that lists no models is taken to have the one that is asked for.

        Raises:
            EndpointError: the server does not answer, or does not have the model.
        """
        try:
            listed = await self._json("GET", "models")
        except EndpointError as error:
            if self.endpoint.model and error.status in _NO_LIST and await self._takes_chats():
                return self.endpoint.model
            raise
        try:
            names = [str(entry["id"]) for entry in listed["data"]]
        except (LookupError, TypeError) as error:
            raise EndpointError(f"{self.endpoint.base}/models: the answer is no list of models") from error
        wanted = self.endpoint.model or (names[0] if names else "")
        if wanted not in names:
            raise EndpointError(f"{self.endpoint.base} has no model {wanted!r}; it has {', '.join(names) or 'none'}")
        return wanted

    async def _takes_chats(self) -> bool:
        """True if chats may be posted here.

        Other requests are not told that there is no such path.
        """
        try:
            await self._json("GET", "chat/completions")
        except EndpointError as error:
            return error.status not in (None, 404)
        return True

    async def upload(self, picture: bytes, name: str) -> str:
        """Upload a PNG file; its id.

        Raises:
            EndpointError: the server does not take it.
        """
        form = aiohttp.FormData()
        form.add_field("purpose", "vision")
        form.add_field("file", picture, filename=name, content_type="image/png")
        stored = await self._json("POST", "files", data=form)
        if "id" not in stored:
            raise EndpointError(f"{self.endpoint.base}/files: the answer names no file")
        return str(stored["id"])

    async def _json(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        url = f"{self.endpoint.base}/{path}"
        try:
            async with self._session.request(method, url, **options) as response:
                if response.status != 200:
                    answered = (await response.text())[:300]
                    raise EndpointError(f"{url} answered {response.status}: {answered}", response.status)
                answer = await response.read()
        except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError) as error:
            raise EndpointError(
                f"{self.endpoint.url} is no URL of a server: it begins with http:// or https://, and a port is a number"
            ) from error
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise EndpointError(f"{url}: {error or type(error).__name__}") from error
        try:
            document = json.loads(answer)
        except ValueError:
            document = None
        if not isinstance(document, dict):
            raise EndpointError(f"{url}: the answer is no JSON object")
        return document

    async def ask(self, content: bytes, due: float | None = None) -> Sample:
        """Send a streaming chat request and read its answer; never raises for what the server does."""
        sent = time.perf_counter()
        due = sent if due is None else due
        heard = _Heard()
        headers = {"Content-Type": "application/json"}
        try:
            url = f"{self.endpoint.base}/chat/completions"
            async with self._session.post(url, data=content, headers=headers) as response:
                if response.status != 200:
                    return heard.sample(due, sent, str(response.status), (await response.text())[:300])
                async for line in response.content:
                    heard.take(line)
        except TimeoutError:
            return heard.sample(due, sent, TIMEOUT, f"no whole answer within {self.endpoint.timeout_s:g} s")
        except asyncio.CancelledError:
            return heard.sample(due, sent, UNFINISHED, "still running when the run was drained")
        except (aiohttp.ClientError, OSError) as error:
            return heard.sample(due, sent, "connection", str(error) or type(error).__name__)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            return heard.sample(due, sent, "malformed", f"an event of the stream is not understood: {error!r}")
        return heard.sample(due, sent)


class _Heard:
    """A stream's events as they come."""

    def __init__(self) -> None:
        self.first: float | None = None
        self.last: float | None = None
        self._ended = False
        self._error = ""
        self._events = 0
        self._prompt, self._completion = 0, None
        self._cached: int | None = None
        self._points: dict[str, int] = {}
        self._stages: dict[str, float] = {}
        self._text: list[str] = []

    def take(self, line: bytes) -> None:
        """One line of the stream."""
        if not line.startswith(b"data:"):
            return
        data = line[len(b"data:") :].strip()
        if data == b"[DONE]":
            self._ended = True
            return
        event = json.loads(data)
        if "error" in event:
            self._error = json.dumps(event["error"])[:300]
        if usage := event.get("usage"):
            self._prompt, self._completion = usage.get("prompt_tokens", 0), usage.get("completion_tokens")
            self._cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        if orbit := event.get("orbit"):
            self._points = dict(Counter(chunk["operating_point"] for chunk in orbit.get("chunks", [])))
            self._stages = dict(orbit.get("stages_ms") or {})
        for choice in event.get("choices") or []:
            delta = choice.get("delta") or {}
            self._text.append(delta.get("content") or "")
            if any(delta.get(name) for name in ("content", "reasoning_content", "reasoning", "tool_calls")):
                self.last = time.perf_counter()
                self.first = self.first or self.last
                self._events += 1

    def sample(self, due: float, sent: float, status: str | None = None, message: str = "") -> Sample:
        """The request's sample; its status is by default what the stream itself says."""
        if status is None and self._error:
            status, message = "stream error", self._error
        elif status is None and not self._ended:
            status, message = "truncated", "the stream ended without [DONE]"
        return Sample(
            due,
            sent,
            self.first,
            self.last,
            time.perf_counter(),
            status or OK,
            self._prompt,
            self._events if self._completion is None else self._completion,
            self._cached,
            self._points,
            self._stages,
            message,
            "".join(self._text),
        )


async def open_loop(
    ask: Callable[[bytes, float], Any],
    schedule: Sequence[tuple[float, Body]],
    tally: Tally,
    max_in_flight: int,
    drain_s: float,
) -> list[Sample]:
    """Send every body when it is due; wait at most `drain_s` after the last for answers.

    Args:
        ask: sends one request, as `Client.ask`.
        schedule: (seconds from the start, body) in order.
        tally: kept up to date while it runs.
        max_in_flight: outstanding requests beyond which one waits to be sent. Its latency still counts from when it
            was due, and `tally.held_back` tells of it.

    Returns samples in the order of the schedule.
    """
    gate = asyncio.Semaphore(max_in_flight)
    tally.planned += len(schedule)

    async def one(body: Body, content: bytes | None, due: float) -> Sample:
        try:
            if content is None:
                waits = not body.is_complete
                content = await body.content()
                due = max(due, time.perf_counter()) if waits else due
            tally.held_back += gate.locked()
            async with gate:
                tally.sent += 1
                tally.peak = max(tally.peak, tally.in_flight)
                sample: Sample = await ask(content, due)
        except asyncio.CancelledError:  # held back to the end
            now = time.perf_counter()
            tally.sent += 1
            sample = Sample(due, now, None, None, now, UNFINISHED, message="never sent")
        tally.samples.append(sample)
        body.answered(sample)
        return sample

    start = time.perf_counter() + _START_SECONDS
    tasks = []
    for at, body in schedule:
        content = await body.content() if body.is_complete else None  # before it is due
        await asyncio.sleep(max(0.0, start + at - time.perf_counter()))
        tasks.append(asyncio.create_task(one(body, content, start + at)))
    _, late = await asyncio.wait(tasks, timeout=drain_s)
    for task in late:
        task.cancel()
    return list(await asyncio.gather(*tasks))


def connections_allowed(wanted: int) -> int:
    """Connections of `wanted` that the open-file limit allows, after raising it if possible."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = wanted + _SPARE_FILES
    if hard != resource.RLIM_INFINITY:
        files = min(files, hard)
    if soft != resource.RLIM_INFINITY and soft < files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    return max(1, min(wanted, files - _SPARE_FILES))
