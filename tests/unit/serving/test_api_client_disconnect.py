"""A client that leaves ends what is computed for it, though vLLM answers in a task that does not end by itself."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fastapi import FastAPI, Request
from vllm.entrypoints.serve.utils.api_utils import with_cancellation

from serving.api.client_disconnect import CancelOnDisconnect, answering


class Answers:
    """One route that answers when `gate` is set, as vLLM's routes do."""

    def __init__(self, noted: bool = True) -> None:
        self.app, self.gate = FastAPI(), asyncio.Event()
        self.began, self.left = asyncio.Event(), asyncio.Event()

        @self.app.get("/{name}")
        @with_cancellation
        async def answer(name: str, raw_request: Request) -> dict[str, str]:
            if noted:
                answering(raw_request)
            self.began.set()
            try:
                await self.gate.wait()
            except asyncio.CancelledError:
                self.left.set()
                raise
            return {"said": name}

        self.app.add_middleware(CancelOnDisconnect)

    def ask(self, sent: list[Any]) -> asyncio.Task[None]:
        """A request whose client says no more than that."""
        scope = {"type": "http", "method": "GET", "path": "/it", "headers": [], "query_string": b"", "state": {}}

        said = iter([{"type": "http.request", "body": b"", "more_body": False}])

        async def receive() -> Any:
            return next(said, None) or await asyncio.Event().wait()

        async def send(message: Any) -> None:
            sent.append(message)

        return asyncio.ensure_future(self.app(scope, receive, send))


async def test_an_answer_ends_with_its_request():
    answers = Answers()
    request = answers.ask([])
    await answers.began.wait()
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    await asyncio.wait_for(answers.left.wait(), 10)


async def test_an_answer_that_is_waited_for_is_given():
    answers, sent = Answers(), list[Any]()
    request = answers.ask(sent)
    await answers.began.wait()
    answers.gate.set()
    await request
    assert b"".join(message.get("body", b"") for message in sent) == b'{"said":"it"}'
    assert not answers.left.is_set()


async def test_vllm_alone_goes_on_answering():
    """Should this fail, `CancelOnDisconnect` is not needed any more."""
    answers = Answers(noted=False)
    request = answers.ask([])
    await answers.began.wait()
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    await asyncio.sleep(0.1)
    assert not answers.left.is_set()
    answers.gate.set()
