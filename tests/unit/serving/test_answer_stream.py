"""Answers that begin on a prefill worker say what they would say had a decode engine given all of them."""

from __future__ import annotations

from itertools import chain
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

from infra.checkpoints import checkpoint_path
from prefill_workers.protocol import Sampling
from serving.frontend.answer_stream import AnswerStream, sampling_of

DELTA, CUMULATIVE, FINAL = RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY
TEXT = "né 星, two words 🚀 done"
CONTEXT, VOCABULARY = 64, 500
ALSO_EOS = 400  # no token of the text


@pytest.fixture(scope="module")
def processor() -> Any:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint_path("qwen2_5_vl-tiny"))
    return SimpleNamespace(
        tokenizer=tokenizer,
        generation_config_fields={"eos_token_id": [tokenizer.eos_token_id, ALSO_EOS]},
        renderer=SimpleNamespace(get_eos_token_id=lambda: tokenizer.eos_token_id),
        model_config=SimpleNamespace(max_model_len=CONTEXT),
    )


def begun(processor: Any, token: int, prompt: int = 3, **params: Any) -> AnswerStream:
    answer = AnswerStream([40] * prompt, SamplingParams(**params), processor)
    answer.begin(token)
    return answer


def decoded(ids: list[int], reason: str | None = None) -> RequestOutput:
    """An output of a decode engine that was asked for token ids alone."""
    completion = CompletionOutput(0, "", ids, None, None, finish_reason=reason)
    return RequestOutput("", None, None, None, [completion], reason is not None)


def outputs(processor: Any, ids: list[int], kind: RequestOutputKind, reason: str = "length") -> list[RequestOutput]:
    """All that a request is given whose answer is `ids`."""
    answer = begun(processor, ids[0], output_kind=kind, max_tokens=50)
    given = [answer.first(), *going_on(answer, ids[1:], kind, reason)]
    return [output for output in given if output is not None]


def going_on(answer: AnswerStream, rest: list[int], kind: RequestOutputKind, reason: str | None) -> list[RequestOutput]:
    """What becomes of all that a decode engine gives; `reason`: why it ends, None: it is lost."""
    given = []
    for i in range(1, len(rest) + 1):
        last = reason if i == len(rest) else None
        if kind == DELTA:
            given.append(answer.joined(decoded(rest[i - 1 : i], last)))
        elif kind == CUMULATIVE or last:
            given.append(answer.joined(decoded(rest[:i], last)))
    return given


def text_of(processor: Any, ids: list[int]) -> str:
    """What vLLM makes of an answer's tokens."""
    request = SimpleNamespace(request_id="", prompt_token_ids=[40] * 3, sampling_params=SamplingParams())
    detokenizer = IncrementalDetokenizer.from_new_request(processor.tokenizer, request)
    detokenizer.update(ids, False)
    return detokenizer.get_next_output_text(True, False)


# -- which may --------------------------------------------------------------------------------------------------------


def test_plain_requests_are_drawn_as_they_ask():
    params = SamplingParams(
        temperature=0.7, top_k=-1, top_p=0.9, min_p=0.1, seed=4, repetition_penalty=1.05, stop_token_ids=[5]
    )
    assert sampling_of(params, VOCABULARY) == Sampling(0.7, 0, 0.9, 0.1, 1.05, 4)
    assert sampling_of(SamplingParams(temperature=0, stop=[], max_tokens=None), VOCABULARY) == Sampling()
    letters = SamplingParams(temperature=0, allowed_token_ids=[4, 2])
    assert sampling_of(letters, VOCABULARY) == Sampling(allowed_token_ids=(4, 2))


@pytest.mark.parametrize(
    "asked",
    [
        {"n": 2},
        {"logprobs": 0},
        {"logprobs": 3},
        {"prompt_logprobs": 0},
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
        {"stop": ["x"]},
        {"min_tokens": 1},
        {"logit_bias": {5: 1.0}},
        {"allowed_token_ids": [1, VOCABULARY]},
        {"bad_words": ["no"]},
        {"structured_outputs": StructuredOutputsParams(regex="a+")},
        {"extra_args": {"something": 1}},
        {"stream_interval": 4},
        {"allowed_token_ids": []},
        {"stop_token_ids": [7, VOCABULARY]},
        {"prompt_logprob_token_ids": np.zeros((1, 2))},
    ],
    ids=str,
)
def test_what_the_first_token_cannot_heed_is_left_to_the_decode_engine(asked: dict[str, Any]):
    assert sampling_of(SamplingParams(**asked), VOCABULARY) is None


# -- what they say ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_text_and_tokens_are_those_of_the_whole_answer(processor: Any, kind: RequestOutputKind):
    """Wherever it begins and its first token ends: in a word, or in the middle of a character."""
    ids = processor.tokenizer.encode(TEXT, add_special_tokens=False)
    split = [i for i in range(len(ids)) if "\N{REPLACEMENT CHARACTER}" in processor.tokenizer.decode(ids[: i + 1])]
    assert split, "some character of the text must take several tokens"
    for start in range(len(ids) - 1):
        given = outputs(processor, ids[start:], kind)
        completions = [output.outputs[0] for output in given]
        texts, tokens = [c.text for c in completions], [list(c.token_ids) for c in completions]
        if kind == DELTA:
            texts, tokens = ["".join(texts)], [list(chain(*tokens))]
        assert tokens[-1] == ids[start:]
        assert texts[-1] == text_of(processor, ids[start:])
        assert [output.finished for output in given] == [False] * (len(given) - 1) + [True]


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_text_and_tokens_are_whole_too_where_another_engine_goes_on(processor: Any, kind: RequestOutputKind):
    ids = processor.tokenizer.encode(TEXT, add_special_tokens=False)
    for known in range(1, len(ids)):
        answer = begun(processor, ids[0], output_kind=kind, max_tokens=50)
        given = [answer.first(), *going_on(answer, ids[1:known], kind, None)]
        answer.go_on()
        told = 1 if kind == FINAL else known  # of an answer that comes as a whole nothing was heard
        assert (answer.prompt, answer.params.max_tokens) == ([40, 40, 40, *ids[:told]], 50 - told)
        given += going_on(answer, ids[told:], kind, "length")
        completions = [output.outputs[0] for output in given if output is not None]
        texts, tokens = [c.text for c in completions], [list(c.token_ids) for c in completions]
        if kind == DELTA:
            texts, tokens = ["".join(texts)], [list(chain(*tokens))]
        assert (texts[-1], tokens[-1]) == (text_of(processor, ids), ids)


def test_the_decode_engine_is_given_the_first_token_and_asked_for_the_rest(processor: Any):
    answer = begun(processor, 50, prompt=3, max_tokens=9, output_kind=DELTA)
    assert (answer.prompt, answer.params.max_tokens, answer.params.detokenize) == ([40, 40, 40, 50], 8, False)
    assert (answer.begun, answer.finished, answer.decoded) == (True, False, False)
    answer.joined(decoded([51]))
    assert answer.decoded


def test_without_a_first_token_nothing_is_changed(processor: Any):
    params = SamplingParams(n=2)
    answer = AnswerStream([1, 2], params, processor)
    assert (answer.prompt, answer.params, answer.begun, answer.finished) == ([1, 2], params, False, False)
    choices = [CompletionOutput(index, f"choice {index}", [5 + index], None, None) for index in range(2)]
    output = RequestOutput("x", None, None, None, choices, False)
    assert answer.first() is None
    assert answer.joined(output) is output
    assert [(one.text, list(one.token_ids)) for one in output.outputs] == [("choice 0", [5]), ("choice 1", [6])]


@pytest.mark.parametrize("kind", list(RequestOutputKind))
@pytest.mark.parametrize("first", [True, False], ids=["first token known", "all decoded"])
def test_the_tokens_of_prompt_and_answer_are_known_however_it_comes(
    processor: Any, kind: RequestOutputKind, first: bool
):
    ids = processor.tokenizer.encode(TEXT, add_special_tokens=False)
    answer = AnswerStream([1, 2], SamplingParams(output_kind=kind, max_tokens=50), processor)
    if first:
        answer.begin(ids[0])
    going_on(answer, ids[first:], kind, "length")
    assert answer.token_ids == [1, 2, *ids]


def test_a_stop_token_at_the_end_has_no_text(processor: Any):
    ids = [*processor.tokenizer.encode("word", add_special_tokens=False), processor.tokenizer.eos_token_id]
    assert len(ids) > 2
    given = outputs(processor, ids, FINAL, reason="stop")
    assert given[-1].outputs[0].text == "word"
    assert list(given[-1].outputs[0].token_ids) == ids


def test_text_that_is_not_wanted_is_not_made(processor: Any):
    answer = begun(processor, 50, detokenize=False, output_kind=DELTA)
    assert answer.first().outputs[0].text == ""
    assert answer.joined(decoded([51])).outputs[0].text == ""


# -- where the first token is the last --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", list(RequestOutputKind))
@pytest.mark.parametrize(
    ("token", "asked", "reason", "stop_reason"),
    [
        ("eos", {}, "stop", None),
        (ALSO_EOS, {}, "stop", ALSO_EOS),  # ends answers by the model's generation config
        (60, {"stop_token_ids": [60]}, "stop", 60),
        (60, {"max_tokens": 1}, "length", None),
        (60, {"prompt": CONTEXT - 1, "max_tokens": None}, "length", None),
    ],
    ids=str,
)
def test_an_answer_may_end_with_its_first_token(
    processor: Any, kind: RequestOutputKind, token: Any, asked: dict[str, Any], reason: str, stop_reason: Any
):
    number = processor.tokenizer.eos_token_id if token == "eos" else token
    answer = begun(processor, number, output_kind=kind, **asked)
    assert answer.finished
    output = answer.first()
    assert output.finished
    assert answer.first() is None, "it is said once"
    (completion,) = output.outputs
    assert (completion.finish_reason, completion.stop_reason) == (reason, stop_reason)
    assert list(completion.token_ids) == [number]
    assert completion.text == ("" if reason == "stop" else processor.tokenizer.decode([number]))


def test_an_end_that_is_to_be_ignored_is_none(processor: Any):
    assert not begun(processor, processor.tokenizer.eos_token_id, ignore_eos=True).finished
    assert not begun(processor, ALSO_EOS, ignore_eos=True).finished
