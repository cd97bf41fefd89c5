"""Request bodies: pictures drawn and uploaded once each, and answers sent back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from serving.loadtest.arrivals import Arrival
from serving.loadtest.images import data_url, png
from serving.loadtest.workloads import Ask, Part, Picture, Reply, Workload

if TYPE_CHECKING:
    from serving.loadtest.client import Client, Endpoint, Sample

_STREAMED: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
_Answer = asyncio.Future[str | None]  # None: there was no whole answer


@dataclass(frozen=True, eq=False)
class Body:
    """A request's body, whose messages may hold answers that are still to come.

    `replies`: such messages of `document`, with the answer of each and what is sent where there is none. `told`: takes
    the request's own answer, if a later one sends it back.
    """

    document: Mapping[str, Any]
    replies: Sequence[tuple[dict[str, Any], _Answer, str]] = ()
    told: _Answer | None = None

    @property
    def is_complete(self) -> bool:
        """True if no answer is missing."""
        return all(answer.done() for _, answer, _ in self.replies)

    async def content(self) -> bytes:
        """The body as JSON, once it is complete."""
        for message, answer, instead in self.replies:
            message["content"] = await asyncio.shield(answer) or instead
        return json.dumps(self.document).encode()

    def answered(self, sample: Sample) -> None:
        """Pass the request's answer on."""
        if self.told is not None and not self.told.done():
            self.told.set_result(sample.text if sample.is_ok else None)


class Bodies:
    """Bodies for one endpoint. Uploaded pictures and answers stay known from run to run."""

    def __init__(self, endpoint: Endpoint, workload: Workload) -> None:
        self._endpoint, self._workload = endpoint, workload
        self._parts: dict[Picture, dict[str, Any]] = {}
        self._answers: dict[int, _Answer] = {}

    async def body(self, arrival: Arrival, model: str, client: Client) -> Body:
        """The body of an arrival: its own, or the workload's next request.

        Raises:
            EndpointError: a picture could not be uploaded.
        """
        options = dict(self._endpoint.orbit or {})
        orbit = {"orbit": options} if options else {}
        if arrival.body is not None:
            return Body({"model": model, **orbit, **self._endpoint.fields, **arrival.body, **_STREAMED})
        ask = self._workload.ask(arrival.images, arrival.max_tokens)
        if self._endpoint.sessions and ask.conversation:
            orbit = {"orbit": {**options, "session": {"id": ask.conversation}}}
        replies: list[tuple[dict[str, Any], _Answer, str]] = []
        messages = [await self._message(role, parts, client, replies) for role, parts in ask.messages]
        own = {"model": model, "messages": messages, "max_tokens": ask.max_tokens, "temperature": 0}
        return Body({**own, **orbit, **self._endpoint.fields, **_STREAMED}, replies, self._told(ask))

    def _told(self, ask: Ask) -> _Answer | None:
        if not self._workload.sends_back:
            return None
        answer = self._answers[ask.number] = asyncio.get_running_loop().create_future()
        return answer

    async def _message(
        self, role: str, parts: tuple[Part, ...], client: Client, replies: list[tuple[dict[str, Any], _Answer, str]]
    ) -> dict[str, Any]:
        if any(isinstance(part, Picture) for part in parts):
            return {"role": role, "content": [await self._part(part, client) for part in parts]}
        message = {"role": role, "content": " ".join(part for part in parts if isinstance(part, str))}
        replies += [(message, self._answers[part.request], part.instead) for part in parts if isinstance(part, Reply)]
        return message

    async def _part(self, part: Part, client: Client) -> dict[str, Any]:
        if isinstance(part, Picture):
            if part not in self._parts:
                self._parts[part] = await self._picture(part, client)
            return self._parts[part]
        return {"type": "text", "text": str(part)}

    async def _picture(self, picture: Picture, client: Client) -> dict[str, Any]:
        if self._endpoint.images == "inline":
            return {"type": "image_url", "image_url": {"url": data_url(picture.draw())}}
        file_id = await client.upload(png(picture.draw()), f"page-{picture.number}.png")
        return {"type": "file", "file": {"file_id": file_id}}
