"""Images on their way through the roles: what is stored is asked for ahead, and only the others are encoded."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from engine_client_support import DELIMITERS, Roles, client_of

from prefill_workers.modes import Mode, OperatingPoint
from prefill_workers.protocol import LinkRequest, LinkResult, PixelsNeeded, PrefetchRequest
from serving.api.chat import contents_of
from serving.frontend.documents import Documents
from serving.frontend.prompt_segments import Segments
from serving.frontend.report import OrbitOptions, RequestTrace


async def test_pixels_are_encoded_only_when_asked_for():
    roles = Roles(link=[PixelsNeeded([0]), None])
    client = client_of(roles)
    segments = Segments(
        items=(("image", "pixels"),), chunks=(SimpleNamespace(content="page", count=5),), token_ids=list(range(12))
    )
    trace = RequestTrace()
    result = await client._link(LinkRequest("request", list(range(12))), segments, trace)
    assert roles.calls == ["link", "encode", "link"]
    assert result.chunks[0].operating_point is OperatingPoint.ENCODED
    assert trace.report.vision_tokens_encoded == 5
    assert "vision" in trace.report.stages_ms


async def test_what_a_prefill_worker_takes_to_encode_is_vision_and_not_link(monkeypatch: pytest.MonkeyPatch):
    roles = Roles(link=[PixelsNeeded([0]), None])
    link = roles.link

    async def encoding(*asked: Any) -> LinkResult:
        await asyncio.sleep(0.05)
        result = await link(*asked)
        result.stages_ms["vision"] = 40.0
        return result

    monkeypatch.setattr(roles, "link", encoding)
    segments = Segments(
        items=(("image", "pixels"),), chunks=(SimpleNamespace(content="page", count=5),), token_ids=list(range(12))
    )
    trace = RequestTrace()
    await client_of(roles)._link(LinkRequest("request", list(range(12))), segments, trace)
    stages = trace.report.stages_ms
    assert 40 <= stages["vision"] < 50 <= stages["vision"] + stages["link"]


async def test_pixels_may_be_asked_for_again_but_not_the_same_twice():
    """Stored KV that is unreadable is only noticed when it is loaded."""
    contents = ("one", "two", "three")
    segments = Segments(
        items=tuple(("image", content) for content in contents),
        chunks=tuple(SimpleNamespace(content=content, count=5) for content in contents),
        token_ids=list(range(12)),
    )
    request = LinkRequest("request", list(range(12)))
    roles, trace = Roles(link=[PixelsNeeded([2]), PixelsNeeded([0]), None]), RequestTrace()
    await client_of(roles)._link(request, segments, trace)
    assert roles.calls == ["link", "encode", "link", "encode", "link"]
    assert trace.report.vision_tokens_encoded == 10
    with pytest.raises(RuntimeError, match="asked for again"):
        await client_of(Roles(link=[PixelsNeeded([2])] * 2))._link(request, segments, RequestTrace())


async def test_an_image_that_is_not_stored_is_encoded_while_its_link_is_planned():
    linking = asyncio.Event()

    class Slow(Roles):
        async def prefetch(self, request: PrefetchRequest) -> list[str]:
            await linking.wait()
            return await super().prefetch(request)

        async def link(self, request: LinkRequest, indices: Sequence[int], embeddings: Any) -> LinkResult:
            linking.set()
            for _ in range(10):
                await asyncio.sleep(0)
            return await super().link(request, indices, embeddings)

    roles, trace = Slow(link=[PixelsNeeded([0, 1]), None]), RequestTrace()
    roles.lacking = ["one"]
    client = client_of(roles)
    client.prefetch(["one", "two"], trace)
    result = await client._link(LinkRequest("request", list(range(12))), two_images(), trace)
    assert roles.calls == ["encode", "link", "encode", "link"]
    assert roles.encoded == [["one"], ["two"]]
    assert result.chunks[0].operating_point is OperatingPoint.ENCODED
    assert trace.report.vision_tokens_encoded == 10


async def test_a_link_comes_with_the_images_that_are_known_not_to_be_stored():
    roles, trace = Roles(), RequestTrace()
    roles.lacking = ["two"]
    client = client_of(roles)
    client.prefetch(["one", "two"], trace)  # the answer comes as soon as the prompt
    await client._link(LinkRequest("request", list(range(12))), two_images(), trace)
    assert roles.calls == ["encode", "link"]
    assert roles.encoded == [["two"]]
    assert trace.report.vision_tokens_encoded == 5


async def test_with_reuse_switched_off_images_are_encoded_before_the_only_link():
    roles, trace = Roles(), RequestTrace(OrbitOptions(mode="off"))
    await client_of(roles)._link(LinkRequest("request", list(range(12)), mode=Mode.OFF), two_images(), trace)
    assert roles.calls == ["encode", "link"]
    assert trace.report.vision_tokens_encoded == 10
    assert trace.report.stages_ms["vision"] > 0


def two_images() -> Segments:
    return Segments(
        items=(("image", "one"), ("image", "two")),
        chunks=tuple(SimpleNamespace(content=content, count=5) for content in ("one", "two")),
        token_ids=list(range(12)),
    )


@pytest.mark.parametrize(("mode", "contents", "sent"), [("auto", ["a", "b"], 1), ("off", ["a"], 0), ("auto", [], 0)])
async def test_stored_chunks_are_asked_for_before_the_prompt_is_rendered(mode: str, contents: list[str], sent: int):
    roles = Roles()
    trace = RequestTrace(OrbitOptions(mode=mode), tenant="acme", prefix_tokens=(1, 2))
    client_of(roles).prefetch(contents, trace)
    await asyncio.sleep(0)
    assert len(roles.prefetched) == sent
    for request in roles.prefetched:
        assert request == PrefetchRequest(("a", "b"), DELIMITERS, mode=Mode.AUTO, tenant="acme", prefix=(1, 2))


def test_the_chunks_of_a_request_are_found_in_its_order():
    image = {"type": "image_pil", "image_pil": None}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{**image, "uuid": "a"}, {"type": "text", "text": "and"}, {**image, "uuid": "b"}]},
        {"role": "user", "content": [{**image, "uuid": "a"}]},
    ]
    assert contents_of(messages, Documents(Mock())) == ["a", "b", "a"]
