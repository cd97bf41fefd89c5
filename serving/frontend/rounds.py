"""Answers in rounds: a tool's call ends one, and its result begins the next.

    prompt ─→ link, decode ─→ call ─→ search ─→ prompt + generated tokens + tool turn ─→ link, decode ─→ …

The next prompt holds the tokens as they were generated, not rendered again from what was parsed of them: it begins with
all of the last prompt, whose KV is found by that. Computed are the generated tokens and the tool turn's words.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams

from serving.frontend.prompt_segments import Segments
from serving.frontend.report import RequestTrace


@dataclass(frozen=True)
class Piece:
    """Sizes of a round's part of the answer: characters that are shown, and tokens."""

    characters: int
    tokens: int


class RoundLog:
    """Rounds of one answer, for who reads it.

    `is_required`: whether the first round must call some tool; later ones need not. `pieces`: of rounds that ended with
    a call. `is_ending`: whether the output given last ends such a round. `prompt_tokens`, `cached_tokens`: of all
    rounds' prompts so far together, the one that is read included.
    """

    def __init__(self, is_required: bool = False) -> None:
        self.is_required = is_required
        self.pieces: list[Piece] = []
        self.is_ending = False
        self.prompt_tokens = self.cached_tokens = 0


class RetrievalSite:
    """Place where an answer's pages stand: those of later searches beside the first ones."""

    def __init__(self) -> None:
        self._end: int | None = None  # token behind the pages; None: there are none yet

    def joined(self, segments: Segments, token_ids: Sequence[int], turn: Segments) -> Segments:
        """The next prompt: the last one, what was generated behind it, and the tool's turn."""
        said = Segments([*segments.token_ids, *token_ids], segments.chunks, segments.items)
        if self._end is None or not turn.chunks:
            at = len(said.token_ids)
            if turn.chunks:
                self._end = at + turn.chunks[-1].stop
            return said.spliced(at, turn)
        pages, words = turn.apart()
        site, self._end = self._end, self._end + len(pages.token_ids)
        said = said.spliced(site, pages)
        return said.spliced(len(said.token_ids), words)


class ToolRounds(Protocol):
    """A tool that the service answers itself."""

    log: RoundLog
    is_forced: bool  # whether the first round is the call alone

    def call_params(self, params: SamplingParams) -> SamplingParams:
        """Sampling of a forced call."""

    def later_params(self, params: SamplingParams) -> SamplingParams:
        """Sampling of rounds behind the first."""

    async def next(
        self, segments: Segments, text: str, token_ids: Sequence[int], trace: RequestTrace
    ) -> tuple[Segments, RequestTrace] | None:
        """The prompt of the next round and its trace; None: the round's text calls for no other one.

        Args:
            segments: the round's prompt.
        """


Generate = Callable[[Segments, SamplingParams, str, RequestTrace], AsyncGenerator[RequestOutput, None]]


async def in_rounds(
    generate: Generate,
    tool: ToolRounds,
    segments: Segments,
    params: SamplingParams,
    request_id: str,
    trace: RequestTrace,
) -> AsyncGenerator[RequestOutput, None]:
    """Outputs of all rounds as those of one answer.

    Tokens of all of them count against `max_tokens`; the text of a forced call is not given. The prompt's tokens in an
    output are those of its round; the log has those of all.
    """
    is_delta, asked = params.output_kind == RequestOutputKind.DELTA, params
    before_text, before_ids = "", list[int]()
    is_call, number = tool.is_forced, 0
    while True:
        own = asked if not before_ids else _rest(asked, len(before_ids))
        if is_call:
            own = tool.call_params(own)
        elif number:
            own = tool.later_params(own)
        text, ids, is_counted = "", list[int](), False
        following: tuple[Segments, RequestTrace] | None = None
        name = request_id if number == 0 else f"{request_id}-round{number}"
        async with aclosing(generate(segments, own, name, trace)) as outputs:
            async for output in outputs:
                output.request_id = request_id
                if not is_counted:
                    tool.log.prompt_tokens += len(segments.token_ids)
                    tool.log.cached_tokens += output.num_cached_tokens or 0
                    is_counted = True
                (completion,) = output.outputs
                new = list(completion.token_ids) if is_delta else list(completion.token_ids)[len(ids) :]
                text = text + completion.text if is_delta else completion.text
                ids += new
                if output.finished and completion.finish_reason == "stop" and _is_left(asked, before_ids, ids):
                    following = await tool.next(segments, text, ids, trace)
                shown = "" if is_call else text
                if is_delta:
                    completion.text = "" if is_call else completion.text
                else:
                    completion.text, completion.token_ids = before_text + shown, [*before_ids, *ids]
                if following is not None:
                    _go_on(output, completion)
                    tool.log.is_ending = True
                if is_delta or following is None:
                    yield output
        if following is None:
            return
        shown = "" if is_call else text
        tool.log.pieces.append(Piece(len(shown), len(ids)))
        tool.log.is_ending = False
        before_text, before_ids = before_text + shown, [*before_ids, *ids]
        (segments, trace), is_call, number = following, False, number + 1


def _is_left(params: SamplingParams, before: Sequence[int], ids: Sequence[int]) -> bool:
    """True if tokens may follow."""
    return params.max_tokens is None or len(before) + len(ids) < params.max_tokens


def _rest(params: SamplingParams, said: int) -> SamplingParams:
    """Sampling of an answer behind `said` tokens of it."""
    own = params.clone()
    if params.max_tokens is not None:
        own.max_tokens = params.max_tokens - said
    own.min_tokens = max(0, params.min_tokens - said)
    if params.seed is not None:
        own.seed = params.seed + said
    return own


def _go_on(output: RequestOutput, completion: CompletionOutput) -> None:
    """Make a round's last output one in the middle of an answer."""
    output.finished = False
    completion.finish_reason = completion.stop_reason = None
