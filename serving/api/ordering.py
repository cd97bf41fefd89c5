"""Which chunks of a request may trade places, and the messages in another order.

Only `order: "free"` moves anything, and then only chunks of one *run*: content parts of one user message that follow
one another with no words between them. What a text says by place ("the second image") or about an order ("what
changed?") would change its meaning, so a request with such words keeps its order, and so does one in a language whose
words are not known (`serving.api.order_words`): when in doubt, nothing moves.
Chunks behind text that keys patches, such as those of a conversation's later turns, keep their order, too: what is
stored for them is stored for the order that they were sent in.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, TypeVar

from prefill_workers.modes import FreeText, Mode, Text, looks_up_patch
from serving.api.media import PIXELS
from serving.api.order_words import dependence
from serving.api.prefix import leads
from serving.frontend.documents import Documents
from serving.frontend.report import Alternative, ChunkCosts, OrderReport, RequestTrace
from serving.placement.orderer import PatchAwareOrderer
from serving.placement.search import Edge, Placement, Problem, Rejected, place, rejected

Found = TypeVar("Found")

_MOVED_ROLES = ("user", "tool")
_UNIT = (
    r"(?:images?|pictures?|photo(?:graph)?s?|pages?|documents?|docs?|files?|figures?|fig\.|charts?|slides?|screenshots?|"
    r"screens?|frames?|attachments?|diagrams?)"
)
_TURN = 4  # tokens that a template writes between two messages, about
_MOST_TEXT = 1 << 16  # characters; the event loop stands still meanwhile
_ORDINAL = (
    r"(?:first|second|third|fourth|fifth|sixth|seventh|eighth|ninth|tenth|last|final|next|previous|preceding|"
    r"earlier|later|middle|\d+(?:st|nd|rd|th))"
)
_NUMBER = r"(?:\d+|(?-i:[A-H])|one|two|three|four|five|six|seven|eight|nine|ten)"
_SIDE = r"(?:(?:left|right|top|bottom)(?:most|-hand)?|upper|lower)"
_END = r"(?:very )?(?:beginning|start|end|front|back|middle|cent(?:re|er))"
_ORDER = r"(?:order\b(?! to\b)|sequence\b)"  # not: in order to
_SAID = r"(?:given|same|very|exact|right|correct|original|reversed?|opposite|shown)"
_AS_SENT = (  # behind "in the order", which may also be one of goods
    r"(?:in which|that|as|given|shown|sent|seen|listed|named|uploaded|attached|provided|presented|received|displayed|"
    r"supplied|posted|printed|numbered|above|below|of (?:the|their|these|those|appearance)|they|these|those|I|you|we)"
)
_KEEP = r"(?:keep|preserv|maintain|retain|respect|follow|revers|chang)\w*(?: to)?"
_BY_PLACE = re.compile(  # in text whose runs of white space are single spaces: \s* twice in a row is quadratic in them
    rf"\b{_ORDINAL} (?:\w+ )?(?:{_UNIT}|ones?)\b"  # the second image, the last two pages, the first one
    rf"|\b{_UNIT} ?(?:no\.?|number|\#)? ?{_NUMBER}\b"  # page #3
    rf"|\bthe {_ORDINAL}(?: {_NUMBER})?(?: (?:and|or|of|in|to|with|from|is|are|shows?|says?)\b| ?(?:[,.;:?!]|$))"
    rf"|\b{_SIDE} (?:{_UNIT}|ones?)\b"  # the left picture, the right one
    rf"|\b(?:{_UNIT}|ones?) (?:(?:in|on|at|to) (?:the|its) {_SIDE}|(?:on|at) {_SIDE}|above|below)\b"
    rf"|\b(?:{_UNIT}|ones?) (?:at|in) the {_END}\b"
    r"|\b(?:former|latter|respectively|chronological(?:ly)?)\b"
    rf"|\bin (?:(?:this|that|what|which|their|(?:(?:the|their) )?{_SAID}) )?{_ORDER}"
    rf"|\bin the {_ORDER} {_AS_SENT}\b"
    rf"|\b{_KEEP} (?:the|this|that|their) (?:{_SAID} )?{_ORDER}",
    re.IGNORECASE,
)


def words_by_place(texts: Sequence[str]) -> str | None:
    """First words that name a chunk by its place, or the order itself; None: there are none."""
    collapsed = (" ".join(text.split()) for text in texts)
    found = next((match for match in map(_BY_PLACE.search, collapsed) if match), None)
    return None if found is None else found[0]


class Ordering:
    """Chunks of resolved messages, in order: their parts, and which may trade places."""

    def __init__(self, messages: list[Any], documents: Documents) -> None:
        self._messages, self._documents = messages, documents
        self.contents: list[str] = []  # content ids
        self.texts: list[str] = []  # what is said, in all messages
        self.groups: list[int | None] = []  # the run that a chunk belongs to; None: it is alone in it, or may not move
        self.gaps: list[int] = []  # of every chunk, about how many tokens of text stand between the last one and it
        self._places: list[tuple[int, int]] = []  # message and part of every chunk
        self.before = 0  # about how many tokens of the conversation stand before its first chunk
        self._gap, leading = 0, True
        for m, message in enumerate(messages):
            if leading and not leads(message):
                leading = False
                self._gap = self._gap if self._places else -_TURN  # the opening is no text of the conversation
            self._read(m, message)
        sizes = {group: self.groups.count(group) for group in self.groups}
        self.groups = [group if sizes[group] > 1 else None for group in self.groups]

    def _read(self, m: int, message: Any) -> None:
        content, run = message.get("content"), len(self._places)
        self._gap += _TURN
        if isinstance(content, str):
            self._say(content)
        if not isinstance(content, list):
            return
        for p, part in enumerate(content):
            chunk = self._chunk(part)
            if chunk is not None:
                self.contents.append(chunk)
                self.groups.append(run if message.get("role") in _MOVED_ROLES else None)
                self.gaps.append(self._gap if self._places else 0)
                self.before = self.before if self._places else self._gap
                self._places.append((m, p))
                self._gap = 0
            elif part.get("type") == "text":
                self._say(part["text"])
                run = len(self._places) if part["text"].strip() else run

    def _say(self, text: str) -> None:
        self.texts.append(text)
        self._gap += len(text.split())

    def before_text(self, text: Text, free: FreeText) -> int:
        """Number of chunks before text that keys the patches of all behind it.

        See `prefill_workers.link.keys`.

        Words are counted: tokens are not known yet, and text has more of them.
        """
        longest = accumulate(self.gaps, max)
        keyed = (i for i, most in enumerate(longest) if text.keys(self.before, most, free))
        return next(keyed, len(self.gaps))

    def _chunk(self, part: dict[str, Any]) -> str | None:
        if part.get("type") in PIXELS:
            return str(part["uuid"])
        marked = self._documents.marked([part["text"]]) if part.get("type") == "text" else []
        return marked[0].content if marked else None

    def in_order(self, order: Sequence[int]) -> list[Any]:
        """The messages with chunk `order[i]` in the place of the i-th."""
        parts = [self._messages[m]["content"][p] for m, p in self._places]
        moved = [
            {**message, "content": list(message["content"])} if isinstance(message.get("content"), list) else message
            for message in self._messages
        ]
        for (m, p), chunk in zip(self._places, order, strict=True):
            moved[m]["content"][p] = parts[chunk]
        return moved


async def ordered(request: Ordering, trace: RequestTrace, orderer: PatchAwareOrderer) -> list[Any]:
    """A request's messages in the order that placement chooses, which the request's report says.

    Placement is asked where it may choose, and where its costs are to be explained.
    """
    options, contents = trace.options, request.contents
    orderer.popularity.observe(trace.tenant, contents)
    known = request.before_text(options.text, orderer.free_text)
    kept = _why_kept(request, trace, known)
    if not contents or (kept is not None and not options.explain):
        if options.order == "free":
            trace.report.order = OrderReport(chunks=list(range(len(contents))), reason=kept or "no chunks")
        return request.in_order(range(len(contents)))
    began = time.perf_counter()
    groups = [None if kept or i >= known else group for i, group in enumerate(request.groups)]
    trace.groups = groups
    uses_patches = looks_up_patch(Mode.parse(options.mode))
    problem = orderer.problem(contents, groups, trace.tenant, trace.prefix_tokens, known if uses_patches else 0)
    placement = await _searched(problem, place, problem)
    took = (time.perf_counter() - began) * 1e3
    trace.report.order = OrderReport(chunks=list(placement.order), reason=kept or "the cheapest order found")
    if options.explain:
        trace.costs = await _searched(problem, _costs, problem, placement)
        if uses_patches:
            trace.report.order.cost_ms = _ms(placement.cost)
            trace.report.order.arrival_ms = _ms(placement.arrival_cost)
        trace.report.order.plan_ms = round(took, 3)
    return request.in_order(placement.order)


async def _searched(problem: Problem, search: Callable[..., Found], *arguments: Any) -> Found:
    """Result of a search; one that takes long runs in a thread."""
    return search(*arguments) if problem.is_small else await asyncio.to_thread(search, *arguments)


def _why_kept(request: Ordering, trace: RequestTrace, known: int) -> str | None:
    """Why a request's order is not chosen; None if it is, among its first `known` chunks."""
    options = trace.options
    if options.order == "fixed":
        return "order: fixed"
    if not looks_up_patch(Mode.parse(options.mode)):
        return f"mode {options.mode} uses no patches"
    if options.text is Text.STRICT:
        return "text: strict keys patches by text: of no other order are any known"
    if not any(group is not None for group in request.groups):
        return "no two images or documents follow one another without words between them"
    if not any(group is not None for group in request.groups[:known]):
        return "text before those that could trade places keys their patches: of no other order are any known"
    if sum(map(len, request.texts)) > _MOST_TEXT:
        return f"more than {_MOST_TEXT} characters of text: it is not looked through for words by place"
    words = words_by_place(request.texts)
    return dependence(request.texts) if words is None else f"the text names chunks by their place: {words!r}"


def _costs(problem: Problem, placement: Placement) -> list[ChunkCosts]:
    """By place in the prompt."""
    found = []
    for edge, other in zip(problem.edges(placement.order), rejected(problem, placement), strict=True):
        chunk = problem.chunks[edge.chunk]
        if other is None and edge.patched:
            instead = Edge(edge.chunk, False, chunk.computed)
            other = Rejected(instead, placement.cost - edge.cost + chunk.computed)
        alternative = other and Alternative(
            chunk=other.edge.chunk,
            operating_point="composed" if other.edge.summed else "patched" if other.edge.patched else "computed",
            cost_ms=_ms(other.edge.cost),
            order_ms=_ms(other.total),
        )
        found.append(ChunkCosts(_ms(chunk.patched), _ms(chunk.summed), _ms(chunk.computed), alternative))
    return found


def _ms(nanoseconds: int) -> float:
    return round(nanoseconds / 1e6, 3)
