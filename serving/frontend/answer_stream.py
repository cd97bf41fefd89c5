"""Answers that begin on a prefill worker: the first token, joined with a decode engine's.

    link ─→ first token ─→ client                       decode engine: prompt + first token ─→ the rest ─→ client

The decode engine sends token ids alone: one detokenizer, here, turns all of an answer into text, so that characters of
several tokens come out whole wherever its first token came from. If that engine is lost, another one goes on behind
what was said by then, as this one did behind the first token.
"""

from __future__ import annotations

from typing import Any

from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.engine.input_processor import InputProcessor

from prefill_workers.compaction.plan import placeholder_ids
from prefill_workers.protocol import Sampling

# What a first token drawn elsewhere heeds. Whatever else a request asks for (constraints, penalties on what was said,
# log-probabilities, stop strings, several answers, what a later vLLM adds) is the decode engine's from the start.
_HEEDED = {
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "seed",
    "max_tokens",
    "ignore_eos",
    "stop_token_ids",
    "allowed_token_ids",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "output_kind",
    "skip_clone",
}
_PLAIN = SamplingParams()


def sampling_of(params: SamplingParams, vocabulary: int) -> Sampling | None:
    """Sampling of a request's first token on a prefill worker.

    None where that must be left to the decode engine.

    To that one too are left stop tokens and allowed ones that the `vocabulary` does not have, for it to refuse.
    """
    others = (name for name in SamplingParams.__struct_fields__ if name not in _HEEDED and not name.startswith("_"))
    if any(_asks(getattr(params, name), getattr(_PLAIN, name)) for name in others):
        return None
    if params.allowed_token_ids == []:  # vLLM refuses that, too
        return None
    allowed = params.allowed_token_ids or ()
    if any(not 0 <= token < vocabulary for token in (*(params.stop_token_ids or ()), *allowed)):
        return None
    return Sampling(
        temperature=params.temperature,
        top_k=max(params.top_k, 0),
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        seed=params.seed,
        allowed_token_ids=tuple(allowed),
    )


def _asks(value: Any, plain: Any) -> bool:
    """True if a parameter is set.

    `plain` is its value where it is not; an empty list or mapping counts as not set.
    """
    if plain is None or isinstance(plain, list | dict):
        return value is not None and not (isinstance(value, list | dict) and not value)
    return bool(value != plain)


class AnswerStream:
    """An answer on its way.

    A decode engine gives it from the start or, once it has `begun`, goes on with it.

    Attributes:
        prompt: token ids of the prompt, and what is known of the answer.
        params: what it is asked for; behind a known first token the rest of the answer, as token ids.
        begun: whether the first token is known.
        finished: whether that is the last one too.
        decoded: whether the decode engine has given some of the answer.
    """

    def __init__(self, prompt: list[int], params: SamplingParams, processor: InputProcessor) -> None:
        self.prompt, self.params, self._processor = prompt, params, processor
        self._behind, self._asked = prompt, params
        self._given = 0  # tokens of the answer that the decode engine was given
        self.begun = self.finished = self.decoded = False
        self._first: RequestOutput | None = None
        self._delta = params.output_kind == RequestOutputKind.DELTA
        self._ids: list[int] = []
        self._text = IncrementalDetokenizer()

    def begin(self, token: int) -> None:
        """The first token is known."""
        params, processor = self._asked, self._processor
        self._text = IncrementalDetokenizer.from_new_request(
            processor.tokenizer if params.detokenize else None, _request(self.prompt, params)
        )
        self.begun, self._ids = True, [token]
        self.go_on()
        reason, stop_reason = _end(token, len(self.prompt), params, processor)
        self.finished = reason is not None
        self._text.update([token], reason == "stop")
        if self.finished or params.output_kind != RequestOutputKind.FINAL_ONLY:
            text = self._text.get_next_output_text(self.finished, self._delta)
            completion = CompletionOutput(0, text, [token], None, None, finish_reason=reason, stop_reason=stop_reason)
            self._first = RequestOutput("", None, None, None, [completion], self.finished)

    def go_on(self) -> None:
        """Have a decode engine go on behind what is known by now, at least the first token."""
        asked, self._given = self._asked, len(self._ids)
        self.prompt = [*self._behind, *self._ids]
        self.params = asked.clone()
        self.params.detokenize = False
        if asked.max_tokens is not None:
            self.params.max_tokens = asked.max_tokens - self._given
        if asked.seed is not None:  # a second engine does not draw again what the first one drew
            self.params.seed = asked.seed + self._given - 1

    @property
    def token_ids(self) -> list[int]:
        """Token ids of the prompt and of the answer so far, unless several are asked for."""
        return [*self._behind, *self._ids]

    def given(self, linked: int, kept: int) -> list[int]:
        """Token ids for a decode engine that pulls `kept` entries of the `linked` first tokens."""
        return [*placeholder_ids(self.prompt[:linked], kept), *self.prompt[linked:]]

    def first(self) -> RequestOutput | None:
        """The output that the known first token makes; None if it makes none, and a second time."""
        first, self._first = self._first, None
        return first

    def joined(self, output: RequestOutput) -> RequestOutput:
        """The decode engine's output as one of the whole answer."""
        self.decoded = True
        if self._asked.n != 1:
            return output
        (completion,) = output.outputs
        ids = list(completion.token_ids)
        if not self.begun:
            self._ids += ids if self._delta else ids[len(self._ids) :]
            return output
        new = ids if self._delta else ids[len(self._ids) - self._given :]
        self._ids += new
        self._text.update(new, completion.finish_reason == "stop")
        completion.text = self._text.get_next_output_text(output.finished, self._delta)
        completion.token_ids = new if self._delta else list(self._ids)
        return output


def _request(prompt: list[int], params: SamplingParams) -> EngineCoreRequest:
    """The request as a detokenizer needs it."""
    return EngineCoreRequest(
        request_id="",
        prompt_token_ids=prompt,
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


def _end(
    token: int, length: int, params: SamplingParams, processor: InputProcessor
) -> tuple[str | None, int | str | None]:
    """Finish and stop reason of an answer that ends with its first token.

    As vLLM finds them; (None, None): it goes on.

    Args:
        length: tokens of the prompt and the first token.
    """
    params = params.clone()
    params.update_from_generation_config(processor.generation_config_fields, processor.renderer.get_eos_token_id())
    if token == params.eos_token_id:
        return "stop", None
    if token in (params.stop_token_ids or ()):
        return "stop", token
    if params.max_tokens == 1 or length >= processor.model_config.max_model_len:
        return "length", None
    return None, None
