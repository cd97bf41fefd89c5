"""`orbit.retrieve` in a chat: parts found stand before the question, as chunks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from serving.api.media import FOUND, MediaResolver
from serving.api.query_parts import IMAGES, Asked, read_query
from serving.api.retrieval import Result, Retrieval, RetrieveOptions
from serving.frontend.errors import InvalidRequest
from serving.frontend.report import FoundReport, RequestTrace, RetrievalReport

_CITED = re.compile(r"\[(\d{1,3})\]")


async def retrieved(
    messages: list[dict[str, Any]],
    tenant: str,
    asked: Mapping[str, Any],
    retrieval: Retrieval,
    media: MediaResolver,
    trace: RequestTrace,
) -> list[dict[str, Any]]:
    """The messages with what a search found before the last user message's content.

    The parts stand one after another without text between them: one run of chunks, which placement may order.

    Raises:
        InvalidRequest: nothing to search by, or options that cannot be read. UnknownVectorStore, NotAvailable.
    """
    try:
        options = RetrieveOptions.model_validate(asked)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(["orbit", "retrieve", *map(str, first["loc"])])
        raise InvalidRequest(f"{where}: {first['msg']}", parameter=where) from error
    last = next((m for m in reversed(range(len(messages))) if messages[m]["role"] == "user"), None)
    if last is None:
        raise InvalidRequest("orbit.retrieve: there is no user message", parameter="messages")
    content = messages[last].get("content")
    query, images = await _asked(options, content, last, media, tenant)
    if not query.strip() and not images:
        raise InvalidRequest(
            "orbit.retrieve: the last user message has nothing to search by; give orbit.retrieve.query",
            parameter="orbit.retrieve.query",
        )
    found_best_first, answers = await retrieval.search(tenant, options.vector_store_ids, [query], options, images)
    results = in_reading_order(found_best_first)
    trace.report.retrieval = RetrievalReport(
        query=query,
        results=found_reports(results, 0),  # until all of the request's chunks are known
        stages_ms={stage: round(ms, 3) for stage, ms in answers[0].stages_ms.items()},
        degraded=answers[0].degraded,
    )
    trace.found = [result.hit.content for result in results]
    trace.mark("retrieve")
    found: list[dict[str, Any]] = [{"type": FOUND, FOUND: result} for result in results]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else list(content or ())
    changed = {**messages[last], "content": [*found, *parts]}
    return [*messages[:last], changed, *messages[last + 1 :]]


def found_reports(results: Sequence[Result], first: int) -> list[FoundReport]:
    """Reports of results, whose chunks are numbered from `first` on."""
    return [
        FoundReport(
            chunk=number,
            file_id=result.hit.file,
            filename=result.hit.filename,
            score=round(result.hit.score, 6),
            page=result.hit.page,
            box=None if result.hit.box is None else list(result.hit.box),
        )
        for number, result in enumerate(results, first)
    ]


def in_reading_order(results: Sequence[Result]) -> list[Result]:
    """Results file by file, by the best of each, and within a file in its order.

    So a page stands behind those that it may refer to, and what is found together again stands in the same order.
    """
    files = list(dict.fromkeys(result.hit.file for result in results))
    return sorted(results, key=lambda result: (files.index(result.hit.file), result.hit.number))


def number_chunks(report: RetrievalReport, found: Sequence[str], contents: Sequence[str]) -> None:
    """Say which of a request's chunks (their content ids, as sent) are what was found."""
    for result, content in zip(report.results, found, strict=True):
        result.chunk = contents.index(content)


def citations(text: str | None, report: RetrievalReport | None) -> list[dict[str, Any]]:
    """Citations of an answer that names results by number, such as [2]."""
    if not text or report is None:
        return []
    found = []
    for match in _CITED.finditer(text):
        if 1 <= (number := int(match[1])) <= len(report.results):
            result = report.results[number - 1]
            cited = {"type": "file_citation", "file_id": result.file_id, "filename": result.filename}
            found.append(cited | {"index": match.start(), "page": result.page})
    return found


async def _asked(options: RetrieveOptions, content: Any, last: int, media: MediaResolver, tenant: str) -> Asked:
    """Query of a search: as given, else the last user message's text, else its images."""
    if isinstance(options.query, str):
        return Asked(options.query)
    if options.query is not None:
        return await read_query(options.query, media, tenant, "orbit.retrieve.query")
    words = _words(content)
    images = [part for part in _parts(content) if part.get("type") in IMAGES]
    if words.strip() or not images:
        return Asked(words)
    return await read_query(images, media, tenant, f"messages[{last}].content")


def _words(content: Any) -> str:
    texts = (part.get("text") for part in _parts(content) if part.get("type") == "text")
    return content if isinstance(content, str) else "\n".join(text for text in texts if isinstance(text, str))


def _parts(content: Any) -> list[dict[str, Any]]:
    return [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
