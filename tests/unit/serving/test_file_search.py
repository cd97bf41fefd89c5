"""Tool `file_search` over HTTP: a real front end and retriever, and roles that answer as they are told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from clock import Clock
from engine_client_support import Roles
from openai import AsyncOpenAI
from pdf_support import pdf
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams

from infra.checkpoints import checkpoint_path
from kvstore.library import Library
from kvstore.settings import LibrarySettings
from kvstore.uploads.files import FileStore
from kvstore.uploads.vector_stores import VectorStores
from prefill_workers.protocol import Overloaded
from serving.api.app import build_api
from serving.api.file_search import NAME
from serving.config import OrbitServeConfig
from serving.documents.passages import tokens_of
from serving.engine_spec import front_end_config
from serving.frontend.engine_client import LinkedEngineClient
from serving.frontend.rate_limits import RateLimits
from serving.retrieval.embedders.lexical import LexicalEmbedder
from serving.retrieval.indices import StoreIndices
from serving.retrieval.parts import FileSplitter
from serving.retrieval.settings import RetrieverSettings
from serving.settings import TenantLimits

MODEL = "qwen2_5_vl-tiny"
REUSED = 5  # tokens of every link, as `Roles` have it
MANUAL = pdf(["Chapter one", "Bolts and nuts"], ["Chapter two", "The carburettor mixes fuel"], ["Valves and pistons"])


def call(query: str, name: str = "file_search") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps({"query": query})}}}\n</tool_call>'


class Scripted(Roles):
    """Roles whose decode engine says the `texts` one after another, each up to the model's end token."""

    def __init__(self, texts: Sequence[str]) -> None:
        super().__init__()
        self.texts, self.tokenizer, self.end = list(texts), None, 0
        self.options: list[dict[str, Any]] = []  # of generations

    def said(self, text: str) -> list[int]:
        assert self.tokenizer is not None
        return [*self.tokenizer.encode(text, add_special_tokens=False), self.end]

    async def generate(
        self, token_ids: list[int], transfer: Any, params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncGenerator[Any, None]:
        self.options.append(options)
        self.generated.append((token_ids, params))
        text = self.texts.pop(0)
        ids = self.said(text)
        if params.output_kind != RequestOutputKind.DELTA:
            whole = CompletionOutput(0, text, ids, None, None, finish_reason="stop")
            yield RequestOutput(request_id, None, None, None, [whole], True)
            return
        for i, token in enumerate(ids):
            ends = i == len(ids) - 1
            piece = "" if ends else self.tokenizer.decode([token])
            one = CompletionOutput(0, piece, [token], None, None, finish_reason="stop" if ends else None)
            yield RequestOutput(request_id, None, None, None, [one], ends)


class Service:
    """The HTTP application with `MANUAL` in a vector store."""

    def __init__(self, folder: Path) -> None:
        self.config = OrbitServeConfig.model_validate(
            {
                "model": {
                    "path": checkpoint_path(MODEL).absolute(),
                    "dtype": "float32",
                    "max_model_len": 4096,
                    "enable_auto_tool_choice": True,
                    "tool_call_parser": "hermes",
                },
                "prefill": {"first_token": False},
                "library": {"directory": folder / "library"},
                "files_url": str(folder / "files"),
            }
        )
        self.roles = Scripted([])
        self.client = LinkedEngineClient(front_end_config(self.config.model, 0.1), self.roles)
        self.roles.tokenizer = self.client.renderer.get_tokenizer()
        self.roles.end = self.roles.tokenizer.convert_tokens_to_ids("<|im_end|>")
        files, embedder = FileStore(str(folder / "files")), LexicalEmbedder()
        library = LibrarySettings(directory=folder / "index", object_store_bytes=0)
        self.indices = StoreIndices(
            RetrieverSettings(follow_period_s=0.05),
            files,
            VectorStores(files),
            Library(library, embedder.fingerprint),
            embedder,
            FileSplitter(files, self.config.documents, tokens_of(folder), has_images=False),
            lambda store, names: self.indices.follow(store, names),
        )
        self.app: Any = None
        self.store = self.file = ""

    async def start(self) -> None:
        async def forget(content: str, owner: str) -> None:
            pass

        self.app = await build_api(self.client, self.config, forget, retriever=self.indices)
        sdk = self.sdk()
        self.store = (await sdk.vector_stores.create()).id
        file = await sdk.files.create(file=("manual.pdf", MANUAL), purpose="assistants")
        added = await sdk.vector_stores.files.create_and_poll(file.id, vector_store_id=self.store, poll_interval_ms=20)
        assert added.status == "completed", added.last_error
        self.file = file.id

    def sdk(self) -> AsyncOpenAI:
        http = httpx.AsyncClient(transport=httpx.ASGITransport(self.app, raise_app_exceptions=False))
        return AsyncOpenAI(base_url="http://test/v1", api_key="none", http_client=http, max_retries=0)

    def says(self, *texts: str) -> None:
        self.roles.texts, self.roles.linked, self.roles.generated = list(texts), [], []
        self.roles.prefetched, self.roles.options = [], []

    async def ask(self, question: str = "What mixes fuel?", tools: Sequence[Any] = (), **fields: Any) -> Any:
        tool: Any = {"type": "file_search", "vector_store_ids": [self.store], "max_num_results": 1}
        fields = {"max_tokens": 2000, **fields}  # a token is a letter
        return await self.sdk().chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": question}], tools=[tool, *tools], **fields
        )


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Service:
    service = Service(tmp_path_factory.mktemp("service"))
    asyncio.run(service.start())
    return service


async def test_an_answer_goes_on_behind_its_search_with_the_tokens_as_they_were(service: Service):
    said = "Let me look.\n" + call("carburettor")
    service.says(said, "The carburettor does [1].")
    answer = await service.ask()
    (choice,) = answer.choices
    assert choice.message.content == "Let me look.\nThe carburettor does [1]."
    assert (choice.finish_reason, choice.message.tool_calls) == ("stop", None)
    first, second = service.roles.linked
    generated = service.roles.said(said)
    assert second.token_ids[: len(first.token_ids) + len(generated)] == [*first.token_ids, *generated]
    tokenizer = service.roles.tokenizer
    turn = tokenizer.decode(second.token_ids[len(first.token_ids) + len(generated) :])
    assert turn.startswith("\n<|im_start|>user\n<tool_response>\n<|vision_start|>")
    assert turn.endswith("manual.pdf, page 2\n</tool_response><|im_end|>\n<|im_start|>assistant\n")
    (page,) = second.chunks
    (report,) = answer.orbit["retrieval"]["results"]
    assert (report["file_id"], report["page"], report["chunk"]) == (service.file, 2, 0)
    assert service.roles.prefetched[-1].contents == (page.content,)
    (cited,) = choice.message.annotations
    assert cited.type == "file_citation"
    assert (cited.file_id, cited.page, cited.index) == (service.file, 2, choice.message.content.index("[1]"))
    (round_,) = answer.orbit["retrieval"]["rounds"]
    assert (round_["query"], round_["results"]) == ("carburettor", 1)
    assert round_["pause_ms"] > 0
    said_tokens = len(generated) + len(service.roles.said("The carburettor does [1]."))
    prompt_tokens = len(first.token_ids) + len(second.token_ids)
    assert (answer.usage.completion_tokens, answer.usage.prompt_tokens) == (said_tokens, prompt_tokens)
    assert answer.usage.total_tokens == said_tokens + prompt_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens == 2 * REUSED


async def test_what_is_streamed_is_what_a_whole_answer_says(service: Service):
    service.says("Let me look.\n" + call("carburettor"), "The carburettor does [1].")
    events = [event async for event in await service.ask(stream=True, stream_options={"include_usage": True})]
    text = "".join(event.choices[0].delta.content or "" for event in events if event.choices)
    assert text == "Let me look.\nThe carburettor does [1]."
    assert not any(event.choices and event.choices[0].delta.tool_calls for event in events)
    last, usage = events[-2:]
    assert last.choices[0].finish_reason == "stop"
    assert last.choices[0].delta.annotations[0]["page"] == 2
    assert usage.orbit["retrieval"]["results"][0]["page"] == 2
    assert usage.usage.prompt_tokens == sum(len(linked.token_ids) for linked in service.roles.linked)
    assert usage.usage.prompt_tokens_details.cached_tokens == 2 * REUSED


async def test_pages_of_a_later_search_stand_beside_those_of_the_first(service: Service):
    service.says(call("carburettor"), "Now the rest." + call("valves"), call("carburettor"), "Done [2].")
    answer = await service.ask()
    assert answer.choices[0].message.content == "Now the rest.Done [2]."
    _, second, third, fourth = service.roles.linked
    (first,), both = second.chunks, third.chunks
    assert both[0] == first
    assert both[1].start == both[0].stop  # no words between them
    size = len(both[1])
    said = service.roles.said("Now the rest." + call("valves"))
    moved = [*third.token_ids[: first.stop], *third.token_ids[first.stop + size :]]
    assert moved[: len(second.token_ids) + len(said)] == [*second.token_ids, *said]
    assert fourth.chunks == both  # a page that is there is named again, not shown again
    assert "[1] manual.pdf, page 2" in service.roles.tokenizer.decode(fourth.token_ids[len(third.token_ids) :])
    assert [one["results"] for one in answer.orbit["retrieval"]["rounds"]] == [1, 1, 0]
    assert [(one["page"], one["chunk"]) for one in answer.orbit["retrieval"]["results"]] == [(2, 0), (3, 1)]


async def test_a_forced_search_takes_a_call_without_markup_and_hides_it(service: Service):
    service.says(json.dumps({"query": "bolts"}), "Chapter one [1].")
    answer = await service.ask(tool_choice={"type": "file_search"})
    assert answer.choices[0].message.content == "Chapter one [1]."
    assert answer.orbit["retrieval"]["results"][0]["page"] == 1
    forced, free = (params for _, params in service.roles.generated)
    assert json.loads(forced.structured_outputs.json)["required"] == ["query"]
    assert free.structured_outputs is None
    assert [options["reasoning_ended"] for options in service.roles.options] == [True, None]


async def test_a_bad_call_is_told_so_and_a_fifth_search_ends_the_answer(service: Service):
    bad = '<tool_call>\n{"name": "file_search", "arguments": {"words": 1}}\n</tool_call>'
    service.says(bad, *[call("bolts")] * 4)
    answer = await service.ask()
    rounds = answer.orbit["retrieval"]["rounds"]
    assert [one.get("error") for one in rounds] == ['the call needs a "query", a string', None, None, None]
    assert (answer.choices[0].finish_reason, answer.choices[0].message.content) == ("stop", None)


async def test_a_clients_own_call_is_the_clients_to_answer(service: Service):
    own: Any = {"type": "function", "function": {"name": "turn", "parameters": {"type": "object", "properties": {}}}}
    service.says(call("bolts"), call("left", "turn"))
    answer = await service.ask(tools=[own])
    (choice,) = answer.choices
    assert (choice.finish_reason, [one.function.name for one in choice.message.tool_calls]) == ("tool_calls", ["turn"])
    assert answer.orbit["retrieval"]["rounds"][0]["query"] == "bolts"


async def test_pages_that_do_not_fit_are_left_out(service: Service):
    tool: Any = {"type": "file_search", "vector_store_ids": [service.store], "max_num_results": 2}
    longest, found, size = service.client.model_config.max_model_len, [], 0
    for room in (longest, None):
        service.says(call("chapter"), "Done.")
        service.client.model_config.max_model_len = room or size - 1
        try:
            answer = await service.sdk().chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "?"}], tools=[tool], max_tokens=200
            )
        finally:
            service.client.model_config.max_model_len = longest
        found.append([one["page"] for one in answer.orbit["retrieval"]["results"]])
        size = len(service.roles.linked[1].token_ids)
        assert ("page 2" in service.roles.tokenizer.decode(service.roles.linked[1].token_ids)) == (2 in found[-1])
    assert found == [[1, 2], [1]]


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"n": 2}, "one answer"),
        ({"logprobs": True}, "log-probabilities"),
        ({"extra_body": {"orbit": {"session": {"id": "a"}}}}, "session"),
        ({"tools": [{"type": "file_search", "vector_store_ids": ["vs_1"]}]}, "there already"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool"),
    ],
)
async def test_what_cannot_be_is_refused(service: Service, fields: dict[str, Any], told: str):
    service.says()
    with pytest.raises(openai.BadRequestError, match=told):
        await service.ask(**fields)
    assert service.roles.linked == []


async def test_prompts_of_later_rounds_count_in_the_tenants_limit(service: Service, monkeypatch: pytest.MonkeyPatch):
    bounded = RateLimits(lambda tenant: TenantLimits(tokens_per_minute=100_000), clock=Clock())
    monkeypatch.setattr(service.client, "limits", bounded)
    for stream in (False, True):
        left = float(bounded.headers("local")["x-ratelimit-remaining-tokens"])
        service.says(call("carburettor"), call("valves"), "Done.")
        usage: dict[str, Any] = {"stream_options": {"include_usage": True}} if stream else {}
        answer: Any = await service.ask(stream=stream, **usage)
        if stream:
            answer = [event async for event in answer][-1]
        assert answer.usage.total_tokens > sum(len(linked.token_ids) for linked in service.roles.linked)
        taken = left - float(bounded.headers("local")["x-ratelimit-remaining-tokens"])
        assert taken == answer.usage.total_tokens


async def test_every_rounds_link_is_counted_and_one_time_to_first_token(
    service: Service, monkeypatch: pytest.MonkeyPatch
):
    observed: list[Any] = []
    monkeypatch.setattr(service.client, "observe", observed.append)
    service.says(call("carburettor"), "Done.")
    answer = await service.ask()
    assert [one.tokens_reused for one in observed] == [REUSED, REUSED]
    assert [one.ttft_ms is None for one in observed].count(False) <= 1
    assert sum(len(one.chunks) for one in observed) == len(answer.orbit["chunks"]) == 1


async def test_a_clients_grammar_holds_in_every_round(service: Service):
    service.says(call("carburettor"), "Done.")
    await service.ask(extra_body={"structured_outputs": {"regex": "a+"}})
    assert [params.structured_outputs.regex for _, params in service.roles.generated] == ["a+", "a+"]


async def test_the_fixed_prefix_of_a_search_is_no_text_before_its_pages(service: Service):
    service.says(call("carburettor"), "Done.")
    await service.ask()
    first, second = service.roles.linked
    words = len(second.token_ids[first.head : second.chunks[0].start])
    assert second.head == first.head > len(second.prefix)
    assert second.words_before == words < len(first.token_ids)


async def test_another_tenants_store_is_none(service: Service):
    with pytest.raises(openai.NotFoundError):
        await service.sdk().chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "?"}],
            tools=[{"type": "file_search", "vector_store_ids": ["vs_" + "0" * 40]}],  # type: ignore[list-item,typeddict-item]
        )


def file_search(service: Service) -> Any:
    return {"type": "file_search", "vector_store_ids": [service.store], "max_num_results": 1}


async def test_responses_search_and_cite(service: Service):
    service.says("I look." + call("carburettor"), "The carburettor [1].")
    answer = await service.sdk().responses.create(
        model=MODEL,
        instructions="Be short.",
        input=[{"role": "user", "content": [{"type": "input_text", "text": "What mixes fuel?"}]}],
        tools=[file_search(service)],
        include=["file_search_call.results"],
    )
    searched, message = answer.output
    assert (searched.type, searched.queries, searched.status) == ("file_search_call", ["carburettor"], "completed")
    assert "carburettor" in searched.results[0].text
    assert answer.output_text == "I look.The carburettor [1]."
    assert answer.usage.input_tokens == sum(len(linked.token_ids) for linked in service.roles.linked)
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert answer.usage.input_tokens_details.cached_tokens == 2 * REUSED
    (cited,) = message.content[0].annotations
    assert (cited.type, cited.file_id, cited.page) == ("file_citation", service.file, 2)
    assert answer.orbit["retrieval"]["rounds"][0]["query"] == "carburettor"
    again = [*answer.output, {"role": "user", "content": "And?"}]
    service.says("No more.")
    second = await service.sdk().responses.create(model=MODEL, input=again, tools=[file_search(service)])
    assert second.output_text == "No more."


async def test_responses_stream_their_searches(service: Service):
    service.says(call("carburettor"), "It is [1].")
    async with service.sdk().responses.stream(
        model=MODEL, input="What mixes fuel?", tools=[file_search(service)]
    ) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()
    types = [event.type for event in events]
    assert types.index("response.file_search_call.completed") < types.index("response.output_text.delta")
    assert [event.sequence_number for event in events] == sorted(event.sequence_number for event in events)
    assert [item.type for item in final.output] == ["file_search_call", "message"]
    assert final.output_text == "It is [1]."
    assert final.usage.input_tokens == sum(len(linked.token_ids) for linked in service.roles.linked)
    assert final.output[1].content[0].annotations[0].file_id == service.file


TURN: Any = {"type": "function", "function": {"name": "turn", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_is_required_is_made_once_and_then_the_answer_may_be_words(service: Service, stream: bool):
    service.says(call("carburettor"), "The carburettor [1].")
    answer_schema: Any = {"type": "json_schema", "json_schema": {"name": "words", "schema": {"type": "string"}}}
    answer = await service.ask(tools=[TURN], tool_choice="required", response_format=answer_schema, stream=stream)
    if stream:
        events = [event async for event in answer]
        text = "".join(event.choices[0].delta.content or "" for event in events)
        assert not any(event.choices[0].delta.tool_calls for event in events)
        finish = events[-1].choices[0].finish_reason
    else:
        (choice,) = answer.choices
        assert not choice.message.tool_calls
        text, finish = choice.message.content, choice.finish_reason
    assert (text, finish) == ("The carburettor [1].", "stop")
    required, free = (params.structured_outputs for _, params in service.roles.generated)
    assert required != free
    assert free.json == {"type": "string"}


async def test_a_response_that_must_call_a_tool_may_answer_in_words_behind_its_search(service: Service):
    service.says(call("carburettor"), "The carburettor [1].")
    own: Any = {"type": "function", "name": "turn", "parameters": {"type": "object", "properties": {}}, "strict": True}
    answer = await service.sdk().responses.create(
        model=MODEL, input="What mixes fuel?", tools=[file_search(service), own], tool_choice="required"
    )
    assert [item.type for item in answer.output] == ["file_search_call", "message"]
    assert answer.output_text == "The carburettor [1]."
    required, free = (params.structured_outputs for _, params in service.roles.generated)
    assert NAME in required.structural_tag, "a call of it fits the grammar"
    assert free is None


async def test_the_effort_of_reasoning_is_that_of_all_rounds(service: Service, monkeypatch: pytest.MonkeyPatch):
    efforts: list[Any] = []
    renderer = service.app.state.openai_serving_chat.online_renderer
    render = renderer.render_chat

    async def noted(request: Any, **options: Any) -> Any:
        efforts.append(request.reasoning_effort)
        return await render(request, **options)

    monkeypatch.setattr(renderer, "render_chat", noted)
    service.says(call("carburettor"), "Done.")
    await service.ask(reasoning_effort="low")
    service.says(call("carburettor"), "Done.")
    await service.sdk().responses.create(
        model=MODEL, input="What mixes fuel?", tools=[file_search(service)], reasoning={"effort": "low"}
    )
    assert len(efforts) >= 4
    assert set(efforts) == {"low"}


async def test_responses_take_files_and_refuse_what_is_stored(service: Service):
    service.says("Three pages.")
    part: Any = {"type": "input_file", "file_id": service.file}
    answer = await service.sdk().responses.create(
        model=MODEL, input=[{"role": "user", "content": [part, {"type": "input_text", "text": "How many?"}]}]
    )
    assert answer.output_text == "Three pages."
    assert len(service.roles.linked[0].chunks) == 3
    for fields in ({"previous_response_id": "resp_1"}, {"background": True}, {"tools": [{"type": "web_search"}]}):
        with pytest.raises(openai.BadRequestError):
            await service.sdk().responses.create(model=MODEL, input="?", **fields)  # type: ignore[arg-type]


async def test_a_responses_prompt_is_never_cut(service: Service):
    service.says("Yes.")
    answer = await service.sdk().responses.create(model=MODEL, input="?", extra_body={"truncation": None})
    assert answer.truncation == "disabled"
    service.says("Never.")
    with pytest.raises(openai.BadRequestError, match="4096"):
        await service.sdk().responses.create(model=MODEL, input="x" * 5000, extra_body={"truncation": None})
    assert service.roles.linked == []


async def test_a_streamed_response_that_fails_at_once_has_a_status_and_later_an_event(service: Service):
    service.says("never")
    service.roles.failures["link"] = [Overloaded("the queue is full")]
    with pytest.raises(openai.RateLimitError):
        await service.sdk().responses.create(model=MODEL, input="?", stream=True)
    service.says("I look it up. " + call("chapter"), "never")
    service.roles.failures["link"] = [None, Overloaded("the queue is full")]
    tool: Any = {"type": "file_search", "vector_store_ids": [service.store]}
    answer = await service.sdk().responses.create(model=MODEL, input="?", tools=[tool], stream=True)
    events = [one async for one in answer]
    assert events[0].type == "response.created"
    assert events[-1].type == "error"
    assert [event.sequence_number for event in events] == list(range(len(events)))
