"""Chat requests with the tool `file_search`, which vLLM's own request does not know."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Depends, Request
from pydantic import PrivateAttr, model_validator
from vllm.entrypoints.openai.chat_completion import api_router
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.serve.utils.api_utils import validate_json_request

from serving.api.file_search import FileSearchTool, take_tool
from serving.frontend.rounds import ToolRounds

_PATH = "/v1/chat/completions"


class OrbitChatRequest(ChatCompletionRequest):
    """vLLM's request, and the tools that the service answers.

    `orbit_file_search`: the tool as it was sent among `tools`; `orbit_forced`: whether `tool_choice` names it.
    """

    orbit_file_search: FileSearchTool | None = None
    orbit_forced: bool = False
    _tool_rounds: ToolRounds | None = PrivateAttr(None)

    @model_validator(mode="before")
    @classmethod
    def _without_file_search(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        kept, tool, is_forced = take_tool(data)
        return {**kept, "orbit_file_search": tool, "orbit_forced": is_forced}


def chat_router() -> APIRouter:
    """vLLM's chat endpoint, without its batches, for requests with `file_search`."""
    router = APIRouter()
    (vllms,) = (route for route in api_router.router.routes if getattr(route, "path", None) == _PATH)

    @router.post(
        _PATH,
        dependencies=[Depends(validate_json_request)],
        responses=vllms.responses,
        summary="Create Chat Completion",
    )
    async def create_chat_completion(request: OrbitChatRequest, raw_request: Request) -> Any:
        return await api_router.create_chat_completion(request, raw_request)

    return router
