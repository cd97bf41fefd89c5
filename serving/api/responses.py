"""`/v1/responses`: vLLM's handler over linked chunks, and `file_search`; nothing is stored."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Depends, Request
from openai.types.responses import (
    FunctionTool,
    ResponseErrorEvent,
    ResponseFileSearchCallCompletedEvent,
    ResponseFileSearchCallInProgressEvent,
    ResponseFileSearchCallSearchingEvent,
    ResponseFileSearchToolCall,
    ResponseOutputItemAddedEvent,
    ResponseOutputItemDoneEvent,
)
from openai.types.responses.response_file_search_tool_call import Result as FoundItem
from openai.types.responses.response_output_text import AnnotationFileCitation
from pydantic import PrivateAttr
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.responses import api_router
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest, ResponsesResponse
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.entrypoints.openai.responses.utils import construct_input_messages, construct_tool_dicts
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.utils.api_utils import validate_json_request
from vllm.exceptions import GenerationError
from vllm.utils import random_uuid

from serving.api.chat import OrbitServingChat, readable, refuse_unsupported
from serving.api.client_disconnect import answering
from serving.api.file_search import FUNCTION, NAME, FileSearch, take_tool
from serving.api.retrieval import Result
from serving.api.retrieve import citations
from serving.frontend.errors import InvalidRequest
from serving.frontend.report import RequestTrace, parse_options, set_trace
from serving.frontend.rounds_parser import RoundsParser

_PATH = "/v1/responses"
_OPENING = ("response.created", "response.in_progress")  # types of events that say nothing yet
_UNSUPPORTED = {
    "background": "responses are not stored, so that none is made in the background",
    "previous_response_id": "responses are not stored; send the conversation as input",
    "previous_input_messages": "send the conversation as input",
    "prompt": "prompts are not stored; send instructions and input",
    "mm_processor_kwargs": "not supported: chunks are stored under one processor setting",
    "media_io_kwargs": "not supported: images are read in one way, and named by their bytes",
    "kv_transfer_params": "belongs to the server",
    "cache_salt": "not supported: content is salted by tenant",
}
_TOOLS = ("function", "custom", "namespace", NAME)
_FUNCTION = FunctionTool.model_validate({"type": "function", "strict": False, **FUNCTION["function"]})


class OrbitResponsesRequest(ResponsesRequest):
    """vLLM's request, and what was prepared for it."""

    _chat: ChatCompletionRequest | None = PrivateAttr(None)  # the same conversation, its messages resolved
    _trace: RequestTrace | None = PrivateAttr(None)


class OrbitServingResponses(OpenAIServingResponses):
    """vLLM's responses handler; conversations are prepared as those of chats."""

    def __init__(self, *arguments: Any, chat: OrbitServingChat, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._chat_handler = chat
        self.default_sampling_params = chat.default_sampling_params

    async def create_responses(self, request: ResponsesRequest, raw_request: Request | None = None) -> Any:
        """Resolve the request's chunks, let vLLM answer it, and report searches and links."""
        answering(raw_request)
        assert isinstance(request, OrbitResponsesRequest)
        trace = await self._prepared(request, raw_request.state.tenant if raw_request is not None else "local")
        include_results = "file_search_call.results" in (request.include or ())
        answer = await super().create_responses(request, raw_request)
        if isinstance(answer, ErrorResponse):
            return answer
        if isinstance(answer, ResponsesResponse):
            items = [_call_item(*search, include_results) for search in _searches(trace)]
            answer.output = [*items, *answer.output]
            _annotate(answer.output, trace)
            _count_rounds(answer, trace)
            answer.orbit = trace.document()
            return answer
        events = self._with_searches(answer, trace, include_results)
        await anext(events, None)  # what fails before the first word has a status
        return events

    def _convert_generation_error_to_streaming_response(self, error: GenerationError) -> str:
        raise error  # vLLM would make an event of it that is none of a response's

    async def _prepared(self, request: OrbitResponsesRequest, tenant: str) -> RequestTrace:
        """Trace of a request whose conversation was resolved. Raises InvalidRequest."""
        refuse_unsupported(request, _UNSUPPORTED)
        if request.truncation == "auto":
            raise InvalidRequest("truncation: a prompt is not cut here; send less", parameter="truncation")
        request.truncation = "disabled"  # null would have vLLM cut the prompt
        for i, tool in enumerate(request.tools):
            if tool.type not in _TOOLS:
                raise InvalidRequest(f"tools[{i}]: {tool.type!r} is not offered here", parameter=f"tools[{i}]")
        sent = {
            "tools": [tool.model_dump(exclude_none=True) for tool in request.tools],
            "tool_choice": _plain(request.tool_choice),
        }
        try:
            _, tool, is_forced = take_tool(sent)
        except ValueError as error:
            raise InvalidRequest(str(error), parameter="tools") from error
        trace = RequestTrace(parse_options((request.model_extra or {}).get("orbit")), tenant)
        chat = self._as_chat(request)
        if tool is not None:
            if request.is_include_output_logprobs():
                raise InvalidRequest(
                    "include: log-probabilities are not given of an answer with file_search", parameter="include"
                )
            await self._chat_handler.with_search(chat, tool, is_forced, trace)
            if is_forced:
                request.tool_choice = "auto"  # of later rounds
        await self._chat_handler.prepare(chat, trace)
        request._chat, request._trace = chat, trace
        return trace

    def _as_chat(self, request: ResponsesRequest) -> ChatCompletionRequest:
        """A request's conversation and functions as chats have them."""
        given = request.input
        if not isinstance(given, str):  # what was found for an earlier answer is not shown again
            given = [item for item in given if _field(item, "type") != f"{NAME}_call"]
        messages = construct_input_messages(request_instructions=request.instructions, request_input=given)
        messages = [_as_chats(message, f"input[{i}]") for i, message in enumerate(readable(messages))]
        functions = construct_tool_dicts([tool for tool in request.tools if tool.type != NAME], request.tool_choice)
        fields = {"tools": functions, "tool_choice": "auto"} if functions else {}
        chat = ChatCompletionRequest(
            messages=[{"role": "user", "content": "."}], chat_template_kwargs=request.chat_template_kwargs, **fields
        )
        chat.messages = messages
        chat.reasoning_effort = None if request.reasoning is None else request.reasoning.effort
        if functions and request.tool_choice == "required":
            chat.tool_choice, chat.structured_outputs = "required", request.extract_structured_outputs()
        return chat

    async def _render_resolved_response_inputs(
        self, request: Any, prev_response: ResponsesResponse | None, *, skip_mm_cache: bool = False
    ) -> Any:
        """Render the prepared conversation instead of the request's input."""
        chat, renderer = request._chat, self.online_renderer

        async def render() -> Any:
            tools = request.tools
            request.tools = [_FUNCTION if tool.type == NAME else tool for tool in tools]  # for the grammar of calls
            try:
                return await renderer.preprocess_chat(
                    request,
                    chat.messages,
                    default_template=self.chat_template,
                    default_template_content_format=self.chat_template_content_format,
                    default_template_kwargs=renderer.effective_chat_template_kwargs(request),
                    tool_dicts=[tool.model_dump() for tool in chat.tools] if chat.tools else None,
                    parser=renderer.parser,
                    skip_mm_cache=True,
                )
            finally:
                request.tools = tools

        _, prompts = await self._chat_handler.with_pixels(chat, render)
        return renderer._responses_render_result(chat.messages, prompts)

    def _make_response_parser(self, request: Any, tokenizer: Any, chat_template_kwargs: dict[str, Any]) -> Any:
        made = super()._make_response_parser(request, tokenizer, chat_template_kwargs)
        if made is None or request._trace.tool is None:
            return made

        def make() -> Any:
            return OpenAIServingResponses._make_response_parser(self, request, tokenizer, chat_template_kwargs)

        return RoundsParser(make, request._trace.tool.log, NAME)

    async def _with_searches(
        self, events: AsyncGenerator[Any, None], trace: RequestTrace, include_results: bool
    ) -> AsyncGenerator[Any, None]:
        """A response's events, with those of its searches before what is said behind them.

        The first item is None, once something was generated: until then a failure is raised, later it is an event.
        """
        set_trace(trace)  # the prompt is generated from when this is read
        places, items, next_place, number = dict[int, int](), list[Any](), 0, 0
        opening: list[Any] | None = []  # events that say nothing yet
        try:
            async with aclosing(events):
                async for event in events:
                    if opening is not None:
                        if event.type in _OPENING:
                            opening.append(event)
                            continue
                        yield None
                        for first in opening:
                            first.sequence_number, number = number, number + 1
                            yield first
                        opening = None
                    searches = _searches(trace)
                    for query, results in searches[len(items) :]:
                        item = _call_item(query, results, include_results)
                        items.append((next_place, item))
                        for own in _search_events(item, next_place):
                            own.sequence_number, number = number, number + 1
                            yield own
                        next_place += 1
                    if (index := getattr(event, "output_index", None)) is not None:
                        if index not in places:
                            places[index], next_place = next_place, next_place + 1
                        event.output_index = places[index]
                    if event.type == "response.output_item.done":
                        _annotate([event.item], trace)
                    if event.type in ("response.completed", "response.incomplete"):
                        response = event.response
                        said = [(places.get(i, next_place + i), item) for i, item in enumerate(response.output)]
                        response.output = [item for _, item in sorted([*items, *said], key=lambda pair: pair[0])]
                        _annotate(response.output, trace)
                        _count_rounds(response, trace)
                        response.orbit = trace.document()
                    event.sequence_number, number = number, number + 1
                    yield event
        except Exception as error:
            if opening is not None:
                raise
            told = self.create_error_response(error).error
            code, param = str(told.code), told.param
            yield ResponseErrorEvent(type="error", code=code, message=told.message, param=param, sequence_number=number)


def responses_router() -> APIRouter:
    """vLLM's endpoint that makes responses; those that read stored ones are not offered."""
    router = APIRouter()
    (vllms,) = (
        route
        for route in api_router.router.routes
        if getattr(route, "path", None) == _PATH and "POST" in getattr(route, "methods", ())
    )

    @router.post(
        _PATH,
        dependencies=[Depends(validate_json_request)],
        responses=vllms.responses,
        summary="Create a response",
    )
    async def create_responses(request: OrbitResponsesRequest, raw_request: Request) -> Any:
        return await api_router.create_responses(request, raw_request)

    return router


def _searches(trace: RequestTrace) -> list[tuple[str, list[Result]]]:
    return trace.tool.searches if isinstance(trace.tool, FileSearch) else []


def _call_item(query: str, results: Sequence[Result], include_results: bool) -> ResponseFileSearchToolCall:
    found = None
    if include_results:
        found = [
            FoundItem(
                attributes=dict(one.reference.attributes),
                file_id=one.hit.file,
                filename=one.hit.filename,
                score=one.hit.score,
                text=one.hit.text,
            )
            for one in results
        ]
    return ResponseFileSearchToolCall(
        id=f"fs_{random_uuid()}", queries=[query], status="completed", type="file_search_call", results=found
    )


def _search_events(item: ResponseFileSearchToolCall, place: int) -> Iterator[Any]:
    """Events of a search that is done."""
    at: dict[str, Any] = {"item_id": item.id, "output_index": place, "sequence_number": 0}
    begun = item.model_copy(update={"status": "in_progress", "results": None})
    yield ResponseOutputItemAddedEvent(
        type="response.output_item.added", item=begun, output_index=place, sequence_number=0
    )
    yield ResponseFileSearchCallInProgressEvent(type="response.file_search_call.in_progress", **at)
    yield ResponseFileSearchCallSearchingEvent(type="response.file_search_call.searching", **at)
    yield ResponseFileSearchCallCompletedEvent(type="response.file_search_call.completed", **at)
    yield ResponseOutputItemDoneEvent(
        type="response.output_item.done", item=item, output_index=place, sequence_number=0
    )


def _annotate(items: Sequence[Any], trace: RequestTrace) -> None:
    """Add citations to texts of an answer."""
    for item in items:
        for part in getattr(item, "content", None) or () if item.type == "message" else ():
            if part.type == "output_text":
                found = citations(part.text, trace.report.retrieval)
                part.annotations = [AnnotationFileCitation.model_validate(cited) for cited in found]


def _count_rounds(response: Any, trace: RequestTrace) -> None:
    """Have a response's usage count the prompts of all rounds."""
    if trace.tool is not None and (usage := response.usage) is not None:
        log = trace.tool.log
        usage.input_tokens, usage.total_tokens = log.prompt_tokens, log.prompt_tokens + usage.output_tokens
        usage.input_tokens_details.cached_tokens = log.cached_tokens


def _as_chats(message: dict[str, Any], where: str) -> dict[str, Any]:
    """A message with parts of chats."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts = [_as_chats_part(part, f"{where}.content[{i}]") for i, part in enumerate(content)]
    return {**message, "content": parts}


def _as_chats_part(part: Any, where: str) -> Any:
    kind = _field(part, "type")
    if kind in ("input_text", "output_text"):
        return {"type": "text", "text": _field(part, "text")}
    if kind == "input_image" and (url := _field(part, "image_url")):
        return {"type": "image_url", "image_url": {"url": url}}
    if kind in ("input_image", "input_file"):
        names = ("file_id", "file_data", "filename")
        file = {name: value for name in names if (value := _field(part, name)) is not None}
        if _field(part, "file_url") is not None:
            raise InvalidRequest(f"{where}: file_url is not supported; upload the file", parameter=where)
        return {"type": "file", "file": file}
    return part


def _field(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)


def _plain(value: Any) -> Any:
    return value.model_dump(exclude_none=True) if hasattr(value, "model_dump") else value
