"""Answers that begin on a prefill worker: which may, and how the first token is joined with what a decode engine adds.

    link ─→ first token ─→ client                       decode engine: prompt + first token ─→ the rest ─→ client

The decode engine sends token ids alone: one detokenizer, here, turns all of an answer into text, so that characters of
several tokens come out whole wherever its first token came from.
"""

from __future__ import annotations

from typing import Any

from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.engine.input_processor import InputProcessor

from prefill_workers.first_token import Sampling

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
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "output_kind",
    "skip_clone",
}
_PLAIN = SamplingParams()


def sampling_of(params: SamplingParams) -> Sampling | None:
    """How a prefill worker draws a request's first token; None where that must be left to the decode engine."""
    others = (name for name in SamplingParams.__struct_fields__ if name not in _HEEDED and not name.startswith("_"))
    if any(_asked(getattr(params, name)) != _asked(getattr(_PLAIN, name)) for name in others):
        return None
    return Sampling(
        temperature=params.temperature,
        top_k=max(params.top_k, 0),
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        seed=params.seed,
    )


def _asked(value: Any) -> Any:
    """A parameter's value; None for an empty list or mapping. Whatever cannot be compared is unlike all others."""
    return (None if not value else id(value)) if isinstance(value, list | dict | set) else value


class Answer:
    """An answer that a decode engine gives from the start.

    Attributes:
        prompt: token ids that the decode engine is given.
        params: what it is asked for.
        begun: whether the first token is known before.
        finished: whether that is the last one too.
        decoded: whether the decode engine has given some of the answer.
    """

    begun = finished = False

    def __init__(self, prompt: list[int], params: SamplingParams) -> None:
        self.prompt, self.params, self.decoded = prompt, params, False

    def first(self) -> RequestOutput | None:
        """The output that the known first token makes, if there is one."""
        return None

    def joined(self, output: RequestOutput) -> RequestOutput:
        """The decode engine's output as one of the whole answer."""
        self.decoded = True
        return output


class BegunAnswer(Answer):
    """An answer whose first token is known: the decode engine is given it, and asked for the rest as token ids."""

    begun = True

    def __init__(self, token: int, prompt: list[int], params: SamplingParams, processor: InputProcessor) -> None:
        super().__init__([*prompt, token], params.clone())
        if params.max_tokens is not None:
            self.params.max_tokens = params.max_tokens - 1
        self.params.detokenize = False
        self._kind = params.output_kind
        self._taken = 0  # tokens of the decode engine's that the detokenizer has had
        self._ids = [token]
        self._reason, self._stop_reason = _end(token, len(self.prompt), params, processor)
        self.finished = self._reason is not None
        self._text = IncrementalDetokenizer.from_new_request(
            processor.tokenizer if params.detokenize else None,
            EngineCoreRequest(
                request_id="",
                prompt_token_ids=prompt,
                mm_features=None,
                sampling_params=params,
                pooling_params=None,
                arrival_time=0.0,
                lora_request=None,
                cache_salt=None,
                data_parallel_rank=None,
            ),
        )
        self._text.update([token], self._reason == "stop")
        self._told = False

    def first(self) -> RequestOutput | None:
        """See `Answer.first`; None too if only a finished answer is wanted and this is none, and a second time."""
        if self._told or (self._kind == RequestOutputKind.FINAL_ONLY and not self.finished):
            return None
        self._told = True
        completion = CompletionOutput(
            index=0,
            text=self._next_text(self.finished),
            token_ids=list(self._ids),
            cumulative_logprob=None,
            logprobs=None,
            finish_reason=self._reason,
            stop_reason=self._stop_reason,
        )
        return RequestOutput("", None, None, None, [completion], self.finished)

    def joined(self, output: RequestOutput) -> RequestOutput:
        """See `Answer.joined`."""
        self.decoded = True
        (completion,) = output.outputs
        ids = list(completion.token_ids)
        delta = self._kind == RequestOutputKind.DELTA
        new = ids if delta else ids[self._taken :]
        self._taken += len(new)
        self._ids += new
        self._text.update(new, completion.finish_reason == "stop")
        completion.text = self._next_text(output.finished)
        completion.token_ids = new if delta else list(self._ids)
        return output

    def _next_text(self, finished: bool) -> str:
        return self._text.get_next_output_text(finished, self._kind == RequestOutputKind.DELTA)


def _end(
    token: int, length: int, params: SamplingParams, processor: InputProcessor
) -> tuple[str | None, int | str | None]:
    """Why an answer ends with its first token, as vLLM finds it: finish and stop reason; (None, None): it goes on.

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
