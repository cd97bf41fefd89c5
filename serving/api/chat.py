"""Chat completions: vLLM's own, with chunks resolved and the `orbit` report added."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import aclosing
from functools import partial
from itertools import dropwhile, takewhile
from typing import Any

from fastapi import Request
from pydantic import BaseModel, ValidationError
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatCompletionToolsParam,
)
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.serve.engine.protocol import ErrorResponse, UsageInfo
from vllm.entrypoints.serve.tokenize.protocol import TokenizeChatRequest

from serving.api.chat_request import OrbitChatRequest
from serving.api.client_disconnect import answering
from serving.api.file_search import FUNCTION, NAME, FileSearch, FileSearchTool, of_all_rounds
from serving.api.media import PIXELS, MediaResolver
from serving.api.opening import Openings, token_ids_of
from serving.api.ordering import Ordering, ordered
from serving.api.pixel_budget import give_back
from serving.api.prefix import Prefixes, leads, tools_text
from serving.api.retrieval import Retrieval
from serving.api.retrieve import citations, number_chunks, retrieved
from serving.api.streams import opened
from serving.frontend.bounded_outputs import before_deadline
from serving.frontend.documents import Documents
from serving.frontend.errors import InvalidRequest
from serving.frontend.report import RequestTrace, current_trace, parse_options, set_trace
from serving.frontend.rounds_parser import RoundsParser

# What needs the prompt in the engine that decodes, which never sees it; and what would need another engine.
UNSUPPORTED = {
    "prompt_logprobs": "prompt_logprobs needs the prompt's own forward, which reused chunks do not have",
    "use_beam_search": "beam search is not supported",
    "echo": "echo is not supported",
    "return_prompt_text": "return_prompt_text is not supported",
    "mm_processor_kwargs": "mm_processor_kwargs is not supported: chunks are stored under one processor setting",
    "media_io_kwargs": "media_io_kwargs is not supported: images are read in one way, and named by their bytes",
    "kv_transfer_params": "kv_transfer_params belongs to the server",
    "cache_salt": "cache_salt is not supported: content is salted by tenant",
}
_ONE_ANSWER = {
    "logprobs": "log-probabilities are not given of an answer with file_search",
}
_ROLES = [("role", role) for role in ("system", "developer", "user", "assistant", "tool")]  # no text of a client's
_TEXTS = ("text", "refusal")  # types of parts that are text, in a field of the same name
_TOLD_BY_FIELDS = ("tools", "documents")  # what a template writes before the messages, see `fixed_prefix`


class OrbitServingChat(OpenAIServingChat):
    """vLLM's chat handler over linked chunks."""

    def __init__(
        self,
        *arguments: Any,
        media: MediaResolver,
        documents: Documents,
        default_max_tokens: int | None,
        retrieval: Retrieval,
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        if default_max_tokens is not None:
            self.default_sampling_params.setdefault("max_tokens", default_max_tokens)
        self._media, self._documents, self._retrieval = media, documents, retrieval
        tokenizer = self.renderer.get_tokenizer()
        self._prefixes = Prefixes(tokenizer, self.renderer._executor)
        self._openings = Openings(self._rendered_tokens)
        self._max_characters = self.model_config.max_model_len * tokenizer.max_chars_per_token

    async def create_chat_completion(
        self, request: ChatCompletionRequest, raw_request: Request | None = None
    ) -> AsyncGenerator[str, None] | ChatCompletionResponse | ErrorResponse:
        """Resolve the request's chunks, let vLLM answer it, and report how it was linked."""
        answering(raw_request)
        refuse_unsupported(request, UNSUPPORTED)
        for name in _TOLD_BY_FIELDS:
            if name in (request.chat_template_kwargs or {}):
                raise InvalidRequest(f"chat_template_kwargs: give {name} as a field of the request", parameter=name)
        options = parse_options((request.model_extra or {}).get("orbit"))
        tenant = raw_request.state.tenant if raw_request is not None else "local"
        trace = RequestTrace(options, tenant)
        if isinstance(request, OrbitChatRequest) and (tool := request.orbit_file_search) is not None:
            refuse_unsupported(request, _ONE_ANSWER)
            if (request.n or 1) > 1:
                raise InvalidRequest("n: with file_search there is one answer", parameter="n")
            await self.with_search(request, tool, request.orbit_forced, trace)
            request._tool_rounds = trace.tool
        await self.prepare(request, trace)
        answer = await super().create_chat_completion(request, raw_request)
        if isinstance(answer, ErrorResponse):
            return answer
        if isinstance(answer, ChatCompletionResponse):
            for choice in answer.choices:
                if cited := citations(choice.message.content, trace.report.retrieval):
                    choice.message.annotations = cited
            if trace.tool is not None:
                answer.usage = UsageInfo.model_validate(of_all_rounds(answer.usage.model_dump(), trace.tool.log))
            answer.orbit = trace.document()  # vLLM's response models take further fields
            return answer
        return await opened(self._reported(answer, trace))

    async def prepare(self, request: ChatCompletionRequest, trace: RequestTrace) -> None:
        """Resolve a request's messages, order their chunks, and begin to load these.

        The trace becomes the current one of this task.

        Raises:
            DeadlineExceeded: that took longer than the whole answer may.
        """
        async with before_deadline(trace.received, self.engine_client.request_timeout_s):
            await self._prepare(request, trace)

    async def _prepare(self, request: ChatCompletionRequest, trace: RequestTrace) -> None:
        options, tenant = trace.options, trace.tenant
        messages = readable(request.messages)
        prefix = fixed_prefix(messages, request)
        refuse_longer(messages, prefix, self._max_characters, request.chat_template_kwargs)
        if options.retrieve is not None:
            messages = await retrieved(messages, tenant, options.retrieve, self._retrieval, self._media, trace)
        trace.prefix_tokens = await self._prefixes.token_ids(tenant, prefix)
        messages = await self._media.resolve_messages(
            messages, tenant, options.pages, options.video, trace.report.notices
        )
        ordering = Ordering(messages, self._documents)
        if trace.report.retrieval is not None:
            number_chunks(trace.report.retrieval, trace.found, ordering.contents)
        request.messages = await ordered(ordering, trace, self.engine_client.orderer)
        trace.documents = self._documents.marked(part["text"] for part in parts_of(request.messages, "text"))
        contents = contents_of(request.messages, self._documents)
        if contents and request.truncate_prompt_tokens is not None:
            raise InvalidRequest(
                "truncate_prompt_tokens: a prompt with images or documents is not cut",
                parameter="truncate_prompt_tokens",
            )
        if contents or trace.tool is not None:  # whose pages come later
            trace.opening_tokens = await self._openings.token_ids(tenant, prefix, request, messages)
        trace.mark("media")
        set_trace(trace)
        self.engine_client.prefetch(contents, trace)

    async def with_search(
        self, request: ChatCompletionRequest, tool: FileSearchTool, is_forced: bool, trace: RequestTrace
    ) -> None:
        """Show the model the tool `file_search`, and have the answer in rounds.

        Raises:
            InvalidRequest: what cannot be searched in mid-answer. UnknownVectorStore, NotAvailable.
        """
        if trace.session is not None:
            raise InvalidRequest("orbit.session: not with file_search", parameter="orbit.session")
        can_call = self.enable_auto_tools and self.parser_cls is not None and self.parser_cls.tool_parser_cls
        if not can_call and not is_forced:
            raise InvalidRequest(
                "tools: the model cannot call file_search by itself, for the service has no parser of its calls "
                '(`model.tool_call_parser`); `tool_choice: {"type": "file_search"}` has it search first',
                parameter="tools",
            )
        await self._retrieval.check(tool.vector_store_ids, trace.tenant)
        shown = ChatCompletionToolsParam.model_validate(FUNCTION)
        request.tools = [shown, *(request.tools or ())]
        if not request.tool_choice or request.tool_choice == "none" or not can_call:
            request.tool_choice = "auto" if can_call else "none"
        parser = None
        if can_call:
            options = {"chat_template_kwargs": request.chat_template_kwargs, "model_config": self.model_config}
            parser = partial(self.parser_cls, self.renderer.get_tokenizer(), request.tools, **options)
        trace.tool = FileSearch(
            tool,
            is_forced,
            self._retrieval,
            self._media,
            self._documents,
            self.engine_client,
            self.rendered,
            trace,
            request,
            parser,
        )

    def _make_parser(self, request: Any, tokenizer: Any, chat_template_kwargs: Any) -> Any:
        make = partial(super()._make_parser, request, tokenizer, chat_template_kwargs)
        tool = request._tool_rounds if isinstance(request, OrbitChatRequest) else None
        return make() if tool is None else RoundsParser(make, tool.log, NAME)

    async def _rendered_tokens(self, request: ChatCompletionRequest) -> tuple[int, ...]:
        return token_ids_of(await self.online_renderer.render_chat(request, skip_mm_cache=True))

    async def render_chat_request(self, request: ChatCompletionRequest) -> Any:
        """Render as vLLM does, but with every item's processed fields.

        Those of repeated images come from the processor cache.
        """
        error = await self._check_model(request)
        if error is not None:
            return error
        self._preflight(request.n or 1)
        return await self.rendered(request)

    async def rendered(self, request: ChatCompletionRequest) -> Any:
        """Conversation and engine input of a request whose messages are resolved."""
        return await self.with_pixels(request, partial(self.online_renderer.render_chat, request, skip_mm_cache=True))

    async def with_pixels(self, request: ChatCompletionRequest, render: Callable[[], Awaitable[Any]]) -> Any:
        """Call `render` with the pixels of those of the request's images that need them.

        Raises:
            DeadlineExceeded: that took longer than the whole answer may.
        """
        whole = request.messages
        cache = self.renderer._mm_processor_only_cache
        if cache is not None:  # images that vLLM has processed need not be decoded
            request.messages = _only_named(whole, lambda uuid: cache.is_cached([uuid])[0])
        try:
            async with before_deadline(current_trace().received, self.engine_client.request_timeout_s):
                try:
                    return await render()
                except ValueError as missing:
                    if not str(missing).startswith("Cache miss"):
                        raise
                    request.messages = whole  # an image left the cache just now
                    return await render()
        finally:
            request.messages = _only_named(whole, lambda uuid: True)  # vLLM holds the request until its last token
            for part in parts_of(whole, *PIXELS):
                give_back(part[part["type"]])

    async def _reported(self, events: AsyncGenerator[str, None], trace: RequestTrace) -> AsyncGenerator[str, None]:
        """Add the report to every event that ends a choice, and to the usage event."""
        contents = defaultdict[int, str](str)
        async with aclosing(events):
            async for event in events:
                if trace.report.retrieval is not None or trace.tool is not None:
                    for choice, content in _contents_of(event):
                        contents[choice] += content
                yield with_report(event, trace, contents)


def _contents_of(event: str) -> list[tuple[int, str]]:
    """Texts that an event adds to the choices of an answer."""
    if '"content":"' not in event:
        return []
    choices = json.loads(event[len("data: ") :]).get("choices") or ()
    return [(choice["index"], choice["delta"].get("content") or "") for choice in choices]


def with_report(event: str, trace: RequestTrace, contents: Mapping[int, str]) -> str:
    """A server-sent event, with the `orbit` report if it is one of the stream's last.

    `contents`: texts of the answer's choices, whose citations stand in the events that end them.
    """
    if not event.startswith("data: {") or ('"finish_reason":"' not in event and '"usage":{' not in event):
        return event
    document = json.loads(event[len("data: ") :])
    choices, usage = document.get("choices"), document.get("usage")
    is_last = not choices or any(choice.get("finish_reason") for choice in choices)
    if usage and trace.tool is not None:
        document["usage"] = of_all_rounds(usage, trace.tool.log)
    elif not is_last:
        return event
    if is_last:
        document["orbit"] = trace.document()
        for choice in choices or ():
            cited = citations(contents.get(choice.get("index")), trace.report.retrieval)
            if choice.get("finish_reason") and cited:
                choice["delta"]["annotations"] = cited
    return f"data: {json.dumps(document, separators=(',', ':'), ensure_ascii=False)}\n\n"


def parts_of(messages: list[Any], *kinds: str) -> list[dict[str, Any]]:
    """The content parts of these types, in order."""
    parts = (part for message in messages if isinstance(message.get("content"), list) for part in message["content"])
    return [part for part in parts if part.get("type") in kinds]


def contents_of(messages: list[Any], documents: Documents) -> list[str]:
    """Content ids of resolved messages' images and documents, in order."""
    found: list[str] = []
    for part in parts_of(messages, *PIXELS, "text"):
        if part["type"] == "text":
            found += (document.content for document in documents.marked([part["text"]]))
        else:
            found.append(part["uuid"])
    return found


def readable(messages: Iterable[Any]) -> list[dict[str, Any]]:
    """Messages whose parts are checked and can be read more than once.

    pydantic leaves some of them to a one-shot iterator. Of a text its words are kept alone: by further fields of a part
    ("image_url" and "uuid", "image") vLLM or a template would take it for an image.

    Raises:
        InvalidRequest: a message has no role, for which vLLM takes it for one in another format, or a part no text.
    """
    found = []
    for m, message in enumerate(messages):
        where = f"messages[{m}]"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise InvalidRequest(f"{where}: a message needs a role", parameter=where)
        content = message.get("content")
        fields = {name: _whole(value, f"{where}.{name}") for name, value in message.items() if name != "content"}
        if content is not None and not isinstance(content, str):
            content = _readable_parts(content, f"{where}.content")
        found.append({**fields, "content": content} if "content" in message else fields)
    return found


def _whole(value: Any, where: str) -> Any:
    """A field's value; of a one-shot iterator, such as tool calls may be, a list."""
    if not isinstance(value, Iterator):
        return value
    try:
        return list(value)
    except ValidationError as error:
        raise InvalidRequest(f"{where}: {error.errors()[0]['msg']}", parameter=where) from error


def _readable_parts(content: Any, where: str) -> list[Any]:
    if isinstance(content, dict) or not isinstance(content, Iterable):
        raise InvalidRequest(f"{where}: neither a text nor a list of parts", parameter=where)
    parts: list[Any] = []
    try:
        for part in content:
            parts.append(_readable_part(part, f"{where}[{len(parts)}]"))
    except ValidationError as error:
        at = f"{where}[{len(parts)}]"
        raise InvalidRequest(f"{at}: {_why(error)}", parameter=at) from error
    return parts


def _why(error: ValidationError) -> str:
    """Reason why a part is refused: as one of the kind that it says it is."""
    errors = error.errors()
    others = {one["loc"][1:2]: one["input"] for one in errors if one["loc"][-1] == "type"}
    own = next((one for one in errors if one["loc"][1:2] not in others), None)
    if own is None:
        kind = next(iter(others.values()))
        return f"content parts of type {kind!r} are not supported; use text, image_url, video_url or file"
    return ": ".join((*filter(None, [".".join(map(str, own["loc"][2:]))]), own["msg"]))


def _readable_part(part: Any, where: str) -> Any:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in _TEXTS:
        return part
    if not isinstance(part.get(kind), str):
        raise InvalidRequest(f"{where}: a part of type {kind!r} needs {kind!r}, a string", parameter=where)
    return {"type": kind, kind: part[kind]}


def _only_named(messages: list[Any], which: Callable[[str], bool]) -> list[Any]:
    """The messages with the name alone of every image `which` (by its name) holds of: no pixels."""

    def named(part: Any) -> Any:
        has_pixels = isinstance(part, dict) and part.get("type") in PIXELS
        return {**part, part["type"]: None} if has_pixels and which(part["uuid"]) else part

    return [
        {**message, "content": [named(part) for part in message["content"]]}
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]


def refuse_longer(
    messages: list[dict[str, Any]], prefix: str, most: int, variables: Mapping[str, Any] | None = None
) -> None:
    """Raise InvalidRequest for more text than a prompt can hold, before anything is spent on it.

    `prefix`: see `fixed_prefix`. `variables`: what the request gives to the chat template.
    """
    fields = [
        {name: value for name, value in message.items() if name != "content" and (name, value) not in _ROLES}
        for message in messages
    ]
    contents = sum(map(_characters, dropwhile(leads, messages)))
    characters = len(prefix) + contents + _characters_within([*fields, variables])
    if characters > most:
        raise InvalidRequest(
            f"the messages and tools have {characters} characters; the model's longest prompt has at most {most}",
            parameter="messages",
        )


def _characters(message: dict[str, Any]) -> int:
    content = message.get("content") or ()
    if isinstance(content, str):
        return len(content)
    texts = (part.get(kind) for part in content if isinstance(part, dict) for kind in _TEXTS)
    return sum(len(text) for text in texts if isinstance(text, str))


def _characters_within(value: Any) -> int:
    """Characters of all strings in a value, however deep."""
    found, left = 0, [value]
    while left:
        one = left.pop()
        if isinstance(one, str):
            found += len(one)
        elif isinstance(one, BaseModel):
            left += vars(one).values()
        elif isinstance(one, Mapping):
            left += (*one.keys(), *one.values())
        elif isinstance(one, list | tuple):
            left += one
    return found


def fixed_prefix(messages: list[dict[str, Any]], request: ChatCompletionRequest | TokenizeChatRequest) -> str:
    """Text before every chunk of a conversation, whatever is asked.

    A template writes some of it before the messages; leading system messages are the rest.
    """
    texts = [tools_text(request.tools)] if request.tools else []
    if documents := getattr(request, "documents", None):
        texts.append(json.dumps(documents, sort_keys=True))
    for message in takewhile(leads, messages):
        content = message.get("content")
        if isinstance(content, str):
            texts.append(content)
        elif content is not None:
            texts += [part["text"] for part in content if isinstance(part, dict) and part.get("type") == "text"]
    return "\n".join(texts)


def refuse_unsupported(request: Any, reasons: dict[str, str]) -> None:
    """Raise InvalidRequest for the first field in `reasons` that the request sets."""
    for name, reason in reasons.items():
        value = getattr(request, name, None)
        if value or type(value) is int:  # of a number 0 is one too
            raise InvalidRequest(f"{name}: {reason}", parameter=name)
