"""Tool `file_search`: a search in mid-answer, whose pages are linked.

One constant function is shown to the model: stores and filters stay with the service, so that the prompt begins the
same for all of them, and patches are known under one prefix. Pages of a first search stand in the tool's turn, before
its words; those of later searches beside them, for patches are keyed by the text between chunks, and the words since
then are computed again in one run. A search's words name its pages by number, and answers cite them so: [2].
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from pydantic import ConfigDict, Field, ValidationError
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser.abstract_parser import Parser
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

from kvstore.errors import StoreError
from serving.api.errors import NotAvailable, NotFound, TooLarge
from serving.api.media import FOUND, MediaResolver
from serving.api.retrieval import Result, Retrieval, SearchOptions
from serving.api.retrieve import found_reports, in_reading_order, number_chunks
from serving.errors import RoleUnavailable
from serving.frontend.documents import Document, Documents
from serving.frontend.engine_client import LinkedEngineClient
from serving.frontend.errors import InvalidRequest
from serving.frontend.prompt_segments import Segments
from serving.frontend.report import RequestTrace, RetrievalReport, RoundReport
from serving.frontend.rounds import RetrievalSite, RoundLog

logger = logging.getLogger(__name__)

NAME = "file_search"
MOST_ROUNDS = 4  # searches of one answer
_LONGEST_QUERY = 1024  # characters
_CALL_ID = "search001"  # nine letters and digits, as some templates want them
_PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"query": {"type": "string", "description": "Words to search by.", "maxLength": _LONGEST_QUERY}},
    "required": ["query"],
    "additionalProperties": False,
}
FUNCTION: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "Search the user's files. What fits is shown: pages, passages. Cite it by number, such as [1].",
        "parameters": _PARAMETERS,
    },
}
# A forced call is short: without a tool parser nothing but its end tells when a model that cannot call tools is done.
_FORCED = json.dumps({**_PARAMETERS, "properties": {"query": {"type": "string", "minLength": 1, "maxLength": 64}}})
_FORCED_TOKENS = 256


class FileSearchTool(SearchOptions):
    """The tool in a request, as OpenAI has it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: str = Field(NAME, pattern=f"^{NAME}$")
    vector_store_ids: tuple[str, ...] = Field(min_length=1, max_length=16, description="Stores that are searched.")
    max_num_results: int = Field(4, ge=1, le=50, description="Most pages and passages that a search adds.")


def take_tool(data: Mapping[str, Any]) -> tuple[dict[str, Any], FileSearchTool | None, bool]:
    """A request's fields without the tool; the tool; whether its call is forced.

    Raises:
        ValueError: what is wrong with it.
    """
    tools = data.get("tools")
    if not isinstance(tools, list):
        return dict(data), None, False
    places = [i for i, tool in enumerate(tools) if isinstance(tool, dict) and tool.get("type") == NAME]
    if not places:
        return dict(data), None, False
    if len(places) > 1:
        raise ValueError(f"tools[{places[1]}]: file_search is there already; name all stores in one")
    try:
        tool = FileSearchTool.model_validate(tools[places[0]])
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(".".join([f"tools[{places[0]}]", *map(str, first["loc"])]) + f": {first['msg']}") from None
    for other in tools:
        name = isinstance(other, dict) and (other.get("function") or other).get("name")
        if name == NAME:
            raise ValueError(f"tools: a function may not be called {NAME} beside the tool of that name")
    kept: dict[str, Any] = {**data, "tools": [one for i, one in enumerate(tools) if i not in places] or None}
    choice = data.get("tool_choice")
    is_forced = choice == {"type": NAME} or (choice == "required" and kept["tools"] is None)
    if is_forced or (kept["tools"] is None and choice in ("auto", "none", None)):
        kept.pop("tool_choice", None)
    if kept["tools"] is None:
        del kept["tools"]
    return kept, tool if choice != "none" else None, is_forced


class FileSearch:
    """Searches of one answer; see `serving.frontend.rounds.ToolRounds`.

    Args:
        render: a chat request to vLLM's engine input.
        parser: makes vLLM's parser of one round; None: the model has no tool parser.
    """

    def __init__(
        self,
        tool: FileSearchTool,
        is_forced: bool,
        retrieval: Retrieval,
        media: MediaResolver,
        documents: Documents,
        client: LinkedEngineClient,
        render: Callable[[ChatCompletionRequest], Awaitable[Any]],
        trace: RequestTrace,
        request: Any,
        parser: Callable[[], Parser] | None,
    ) -> None:
        self.log, self.is_forced = RoundLog(request.tool_choice == "required"), is_forced
        self.searches: list[tuple[str, list[Result]]] = []  # queries, and what was found for the first time or again
        self._tool, self._retrieval, self._media, self._documents = tool, retrieval, media, documents
        self._client, self._render, self._trace, self._parser = client, render, trace, parser
        self._request = request
        self._grammar = request.extract_structured_outputs() if self.log.is_required else None  # a call has its own
        self._numbers: dict[tuple[str, int], int] = {}  # of what stands in the prompt, by file and part
        self._site = RetrievalSite()

    def call_params(self, params: SamplingParams) -> SamplingParams:
        """Sampling of a forced call: nothing but its arguments."""
        own = params.clone()
        own.structured_outputs = StructuredOutputsParams(json=_FORCED)
        own.max_tokens = min(params.max_tokens or _FORCED_TOKENS, _FORCED_TOKENS)
        return own

    def later_params(self, params: SamplingParams) -> SamplingParams:
        """Sampling behind a search: no call is required now, and the client's grammar holds."""
        if not self.log.is_required:
            return params
        own = params.clone()
        own.structured_outputs = self._grammar
        return own

    async def next(
        self, segments: Segments, text: str, token_ids: Sequence[int], trace: RequestTrace
    ) -> tuple[Segments, RequestTrace] | None:
        """Search, if that is what the round's text calls for, and put what is found behind it."""
        arguments = self._call(text, token_ids)
        if arguments is None or len(self.log.pieces) >= MOST_ROUNDS:
            return None
        began = time.perf_counter()
        if self.log.is_required:
            self._request.tool_choice = "auto"  # what is said now need not be a call
        report, results = await self._searched(arguments)
        new = [one for one in results if (one.hit.file, one.hit.number) not in self._numbers]
        following = trace.of_round()
        turn = await self._turn(report, new, results, arguments, following, self._room(segments, token_ids))
        ended = bool(token_ids) and token_ids[-1] in self._client.end_tokens
        turn_tokens = turn.behind(1) if ended and turn.token_ids[0] in self._client.end_tokens else turn
        prompt = self._site.joined(segments, token_ids, turn_tokens)
        retrieval = self._trace.report.retrieval
        assert retrieval is not None
        number_chunks(retrieval, self._trace.found, [span.content for span in prompt.chunks])
        self._client.prefetch([span.content for span in prompt.chunks], following)
        report.stages_ms["prompt"] = round((time.perf_counter() - began) * 1e3, 3)
        following.on_first_token = self._linked(report, following, began)
        return prompt, following

    def _room(self, segments: Segments, token_ids: Sequence[int]) -> int:
        return self._client.model_config.max_model_len - len(segments.token_ids) - len(token_ids) - 1

    def _linked(self, report: RoundReport, trace: RequestTrace, began: float) -> Callable[[], None]:
        """Callback that notes how a round was linked, once its first token is there."""

        def note() -> None:
            report.pause_ms = round((time.perf_counter() - began) * 1e3, 3)
            link = trace.report
            report.prompt_tokens, report.tokens_reused = link.prompt_tokens, link.tokens_reused
            report.tokens_computed, report.vision_tokens_encoded = link.tokens_computed, link.vision_tokens_encoded
            self._trace.report.chunks = link.chunks

        return note

    def _call(self, text: str, token_ids: Sequence[int]) -> dict[str, Any] | None:
        """Arguments of a round's call; None: it calls for no search, or for a client's tool besides."""
        if self.is_forced and not self.log.pieces:
            return _read(text)
        if self._parser is None:
            return None
        _, _, calls = self._parser().parse(text, self._request, True, token_ids)
        if not calls or any(call.name != NAME for call in calls):
            return None
        return _read(calls[0].arguments)

    async def _searched(self, arguments: Mapping[str, Any]) -> tuple[RoundReport, list[Result]]:
        """A search's results, and its report, which is the request's from now on."""
        query, found, stages, error, degraded = arguments.get("query"), list[Result](), {}, None, None
        if not isinstance(query, str) or not query.strip():
            query, error = "", 'the call needs a "query", a string'
        else:
            self.searches.append((query, found))
            try:
                best, answers = await self._retrieval.search(
                    self._trace.tenant, self._tool.vector_store_ids, [query[:_LONGEST_QUERY]], self._tool
                )
                found += in_reading_order(best)
                stages, degraded = dict(answers[0].stages_ms), answers[0].degraded
            except (RoleUnavailable, NotAvailable, StoreError) as unavailable:
                logger.warning("file_search: %s", unavailable)
                error = "the search failed"
        report = self._trace.report.retrieval
        if report is None:
            report = self._trace.report.retrieval = RetrievalReport(query=query, results=[], stages_ms={})
        own = RoundReport(
            query=query, results=0, stages_ms={name: round(ms, 3) for name, ms in stages.items()}, error=error
        )
        report.query, report.stages_ms, report.degraded = query, own.stages_ms, degraded or report.degraded
        report.rounds.append(own)
        return own, found

    async def _turn(
        self,
        report: RoundReport,
        new: Sequence[Result],
        results: Sequence[Result],
        arguments: Mapping[str, Any],
        trace: RequestTrace,
        room: int,
    ) -> Segments:
        """The tool's turn and the next one's beginning, from the end of the call's on.

        Pages that do not fit `room` tokens are left out, from the last on.
        """
        while True:
            told = self._words(report, new, results)
            content = [*({"type": FOUND, FOUND: result} for result in new), {"type": "text", "text": told}]
            try:
                (message,) = await self._media.resolve_messages([{"role": "tool", "content": content}], trace.tenant)
            except (InvalidRequest, NotFound, TooLarge):  # more than any prompt holds, or a file that went just now
                if not new:
                    raise
                dropped = max(1, len(new) // 8)
            else:
                marks = self._documents.marked(part["text"] for part in message["content"] if part["type"] == "text")
                turn = await self._rendered(message, arguments, marks)
                if len(turn.token_ids) <= room or not new:
                    break
                sizes = [len(span) for span in turn.chunks]
                over, dropped = len(turn.token_ids) - room, 0
                while dropped < len(sizes) and over > 0:
                    dropped += 1
                    over -= sizes[-dropped]
            new = new[: len(new) - dropped]
            kept = {id(result) for result in new}
            results = [one for one in results if id(one) in kept or (one.hit.file, one.hit.number) in self._numbers]
        report.results = len(new)
        retrieval = self._trace.report.retrieval
        assert retrieval is not None
        for number, result in enumerate(new, len(retrieval.results) + 1):
            self._numbers[result.hit.file, result.hit.number] = number
        self._trace.found += [result.hit.content for result in new]
        retrieval.results += found_reports(new, len(retrieval.results))
        trace.documents += marks
        if self.searches and not report.error:
            self.searches[-1][1][:] = results
        return turn

    def _words(self, report: RoundReport, new: Sequence[Result], results: Sequence[Result]) -> str:
        """The tool's words behind the pages."""
        if report.error is not None:
            return f"Error: {report.error}."
        if not results:
            return "Nothing was found."
        retrieval = self._trace.report.retrieval
        linked = 0 if retrieval is None else len(retrieval.results)
        number = {id(result): linked + i for i, result in enumerate(new, 1)}
        lines = []
        for result in results:
            hit = result.hit
            at = number.get(id(result)) or self._numbers[hit.file, hit.number]
            page = "" if hit.page is None else f", page {hit.page}"
            lines.append(f"[{at}] {hit.filename}{page}")
        return "Found, in the order shown:\n" + "\n".join(lines)

    async def _rendered(self, message: dict[str, Any], arguments: Mapping[str, Any], marks: list[Document]) -> Segments:
        """The template's text behind a call's last token: the difference of two conversations' prompts."""
        call = {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": _CALL_ID, "type": "function", "function": {"name": NAME, "arguments": json.dumps(arguments)}}
            ],
        }
        answer = {**message, "tool_call_id": _CALL_ID, "name": NAME}
        called = {**call, "content": json.dumps(arguments)}
        del called["tool_calls"]
        variants = [(call, answer), (called, {**message, "role": "user"})]
        if self.is_forced and self._parser is None:  # a template without tools writes no calls
            variants.reverse()
        for before, behind in variants:
            try:
                turn = await self._difference(before, behind, marks)
            except (TemplateError, ValueError, TypeError) as error:
                logger.info("the chat template writes no %s turn: %s", behind["role"], error)
                continue
            if turn is not None:
                return turn
        raise InvalidRequest("tools: the model's chat template takes no tool's result", parameter="tools")

    async def _difference(
        self, before: dict[str, Any], behind: dict[str, Any], marks: list[Document]
    ) -> Segments | None:
        """None: the template does not write the later message, or changes what stands before it."""
        first = {"role": "user", "content": "."}
        asked = ChatCompletionRequest(messages=[first], chat_template_kwargs=self._request.chat_template_kwargs)
        open_ended = {"add_generation_prompt": False, "continue_final_message": False}
        effort = {"reasoning_effort": self._request.reasoning_effort}
        short = asked.model_copy(update={"messages": [first, before], **open_ended, **effort})
        whole = asked.model_copy(update={"messages": [first, before, behind], **effort})
        prompts = []
        for request in (short, whole):
            rendered = await self._render(request)
            if not isinstance(rendered, tuple):  # vLLM's error
                raise ValueError(rendered.error.message)
            prompts.append(rendered[1][0])
        shorter, longer = prompts
        head = list(shorter["prompt_token_ids"])
        segments = self._client.segments(longer, marks)
        ends = [i for i, token in enumerate(head) if token in self._client.end_tokens]
        at = ends[-1] if ends else len(head)
        wanted = sum(part["type"] != "text" for part in behind["content"]) + len(marks)
        if segments.token_ids[:at] != head[:at] or len(segments.chunks) != wanted:
            return None
        return segments.behind(at)


def of_all_rounds(usage: Mapping[str, Any], log: RoundLog) -> dict[str, Any]:
    """A chat's usage with the prompts of all rounds so far, as OpenAI counts its own tools'."""
    details = {**(usage.get("prompt_tokens_details") or {}), "cached_tokens": log.cached_tokens}
    total = log.prompt_tokens + (usage.get("completion_tokens") or 0)
    return {**usage, "prompt_tokens": log.prompt_tokens, "total_tokens": total, "prompt_tokens_details": details}


def _read(arguments: str) -> dict[str, Any]:
    """A call's arguments; {} of what is no object."""
    try:
        found = json.loads(arguments)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
