"""Request bodies: every picture drawn once, and uploaded once where files are wanted."""

from __future__ import annotations

from typing import Any

from serving.loadtest.arrivals import Arrival
from serving.loadtest.client import Client, Endpoint
from serving.loadtest.images import data_url, png
from serving.loadtest.workloads import Ask, Part, Picture, Workload

_STREAMED: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}


class Bodies:
    """Bodies for one endpoint. Pictures that were uploaded stay known from one run to the next."""

    def __init__(self, endpoint: Endpoint, workload: Workload) -> None:
        self._endpoint, self._workload = endpoint, workload
        self._parts: dict[Picture, dict[str, Any]] = {}

    async def body(self, arrival: Arrival, model: str, client: Client) -> dict[str, Any]:
        """The body of an arrival: its own, or the workload's next request.

        Raises:
            EndpointError: a picture could not be uploaded.
        """
        orbit = {} if self._endpoint.orbit is None else {"orbit": dict(self._endpoint.orbit)}
        if arrival.body is not None:
            return {"model": model, **orbit, **self._endpoint.fields, **arrival.body, **_STREAMED}
        ask = self._workload.ask(arrival.images, arrival.max_tokens)
        messages = await self._messages(ask, client)
        own = {"model": model, "messages": messages, "max_tokens": ask.max_tokens, "temperature": 0}
        return {**own, **orbit, **self._endpoint.fields, **_STREAMED}

    async def _messages(self, ask: Ask, client: Client) -> list[dict[str, Any]]:
        return [
            {"role": role, "content": [await self._part(part, client) for part in parts]}
            if any(isinstance(part, Picture) for part in parts)
            else {"role": role, "content": " ".join(map(str, parts))}
            for role, parts in ask.messages
        ]

    async def _part(self, part: Part, client: Client) -> dict[str, Any]:
        if isinstance(part, str):
            return {"type": "text", "text": part}
        if part not in self._parts:
            self._parts[part] = await self._picture(part, client)
        return self._parts[part]

    async def _picture(self, picture: Picture, client: Client) -> dict[str, Any]:
        if self._endpoint.images == "inline":
            return {"type": "image_url", "image_url": {"url": data_url(picture.draw())}}
        file_id = await client.upload(png(picture.draw()), f"page-{picture.number}.png")
        return {"type": "file", "file": {"file_id": file_id}}
