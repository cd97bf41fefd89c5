"""Parser of answers in rounds: each by itself, without the calls that the service answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from vllm.entrypoints.generate.base.protocol import DeltaMessage, FunctionCall
from vllm.parser.abstract_parser import Parser

from serving.frontend.rounds import Piece, RoundLog


class RoundsParser(Parser):
    """Parser that begins anew with every round.

    Args:
        make: makes vLLM's parser of one round.
        hidden: the tool whose calls are not the client's.
    """

    def __init__(self, make: Callable[[], Parser], log: RoundLog, hidden: str) -> None:
        self._make, self._log, self._hidden = make, log, hidden
        self._parser, self._round = make(), 0
        self._calls: dict[int, int | None] = {}  # by index within the round: index in the answer; None: not shown
        self._shown = 0

    @property
    def reasoning_parser(self) -> Any:
        return self._parser.reasoning_parser

    @property
    def tool_parser(self) -> Any:
        return self._parser.tool_parser

    def adjust_request(self, request: Any) -> Any:
        return self._parser.adjust_request(request)

    def set_prompt_token_ids(self, prompt_token_ids: Sequence[int]) -> None:
        self._parser.set_prompt_token_ids(prompt_token_ids)

    def is_reasoning_end(self, input_ids: list[int]) -> bool:
        return self._parser.is_reasoning_end(input_ids)

    def count_reasoning_tokens(self, token_ids: Sequence[int]) -> int:
        return sum(self._make().count_reasoning_tokens(ids) for _, ids in self._pieces("", token_ids))

    def parse(
        self,
        model_output: str,
        request: Any,
        enable_auto_tools: bool = False,
        model_output_token_ids: Sequence[int] = (),
    ) -> tuple[str | None, str | None, list[FunctionCall] | None]:
        """Reasoning, content and calls of all rounds."""
        reasonings, contents, calls = list[str](), list[str](), list[FunctionCall]()
        for number, (text, ids) in enumerate(self._pieces(model_output, model_output_token_ids)):
            if not text:
                continue
            asked = self._asked(request, number)
            reasoning, content, called = self._make().parse(text, asked, enable_auto_tools, ids)
            reasonings += [reasoning] if reasoning else []
            contents += [content] if content else []
            calls += [call for call in called or () if call.name != self._hidden]
        return "\n".join(reasonings) or None, "".join(contents) or None, calls or None

    def parse_delta(
        self,
        delta_text: str,
        delta_token_ids: list[int],
        request: Any,
        prompt_token_ids: list[int] | None = None,
        *,
        finished: bool,
    ) -> DeltaMessage | None:
        """Delta for the client; None where there is nothing for it."""
        if self._round != len(self._log.pieces):
            self._parser, self._round, self._calls = self._make(), len(self._log.pieces), {}
        if not delta_text and not finished and not self._log.is_ending:
            return None
        finished = finished or self._log.is_ending
        asked = self._asked(request, self._round)
        delta = self._parser.parse_delta(delta_text, delta_token_ids, asked, prompt_token_ids, finished=finished)
        if delta is None or not delta.tool_calls:
            return delta
        shown = []
        for call in delta.tool_calls:
            if call.index not in self._calls and call.function is not None and call.function.name:
                is_hidden = call.function.name == self._hidden
                self._calls[call.index] = None if is_hidden else self._shown
                self._shown += not is_hidden
            if (index := self._calls.get(call.index)) is not None:
                shown.append(call.model_copy(update={"index": index}))
        delta.tool_calls = shown
        return delta if shown or delta.content or delta.reasoning else None

    def _asked(self, request: Any, number: int) -> Any:
        """The request as a round has it: a call that is required is the first one's."""
        if not self._log.is_required:
            return request
        return request.model_copy(update={"tool_choice": "auto" if number else "required"})

    def _pieces(self, text: str, token_ids: Sequence[int]) -> list[tuple[str, Sequence[int]]]:
        """Text and tokens of every round."""
        found, character, token = list[tuple[str, Sequence[int]]](), 0, 0
        for piece in (*self._log.pieces, Piece(len(text), len(token_ids))):
            to_character, to_token = character + piece.characters, token + piece.tokens
            found.append((text[character:to_character], token_ids[token:to_token]))
            character, token = to_character, to_token
        return found
