"""The OpenAI surface, through the official client: what it offers, and what it answers to bad input."""

from __future__ import annotations

import base64
import json
import re
import time
import zlib
from typing import Any

import httpx
import openai
import pytest
from client import (
    MAX_BODY_BYTES,
    MAX_IMAGE_BYTES,
    MAX_MODEL_LEN,
    ORIGIN,
    Service,
    inline,
    picture,
    png,
    text,
    user,
)

pytestmark = pytest.mark.service


# -- what it offers ---------------------------------------------------------------------------------------------------


def test_models_health_and_openapi(service: Service):
    (model,) = httpx.get(service.url + "/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"]) == (service.model, MAX_MODEL_LEN)
    assert [model.id for model in service.openai().models.list()] == [service.model]
    health = httpx.get(service.url + "/health")
    assert (health.status_code, health.json()) == (200, {"status": "ok"})
    paths = httpx.get(service.url + "/openapi.json").json()["paths"]
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/files", "/health", "/metrics"} <= set(paths)
    assert httpx.get(service.url + "/docs").status_code == 200


def test_the_official_client_streams(service: Service):
    stream = service.openai().chat.completions.create(
        model=service.model, messages=user("Hello"), max_tokens=6, temperature=0, stream=True
    )
    words = [event.choices[0].delta.content or "" for event in stream]
    assert "".join(words) == service.chat(user("Hello"), max_tokens=6)["choices"][0]["message"]["content"]


def test_n_gives_choices_that_differ_and_a_seed_repeats_them(service: Service):
    def ask(seed: int) -> list[str]:
        answer = service.chat(user(picture(201), "Go on."), n=3, temperature=1.0, seed=seed)
        return [choice["message"]["content"] for choice in answer["choices"]]

    first = ask(1)
    assert len(first) == 3
    assert len(set(first)) == 3
    assert ask(1) == first
    assert ask(2) != first


def test_a_seed_repeats_an_answer(service: Service):
    """Of a prompt that is linked in the same way: in `auto` a patch may have been formed meanwhile."""

    def ask(seed: int) -> str:
        answer = service.chat(user(picture(206), "Go on."), "exact", temperature=1.0, top_p=0.95, seed=seed)
        assert answer["orbit"]["first_token"] == "prefill"
        return answer["choices"][0]["message"]["content"]

    first = ask(1)
    assert ask(1) == first
    assert ask(2) != first


def test_a_browser_is_told_which_pages_may_call(service: Service):
    def allowed(origin: str) -> str | None:
        asked = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        return httpx.options(service.url + "/v1/chat/completions", headers=asked).headers.get(
            "Access-Control-Allow-Origin"
        )

    assert allowed(ORIGIN) == ORIGIN
    assert allowed("https://another.example") is None


def test_an_answer_may_be_one_token_long(service: Service):
    before = service.holdings()
    whole = service.chat(user("Tell me."), max_tokens=4, return_token_ids=True)["choices"][0]
    one = service.chat(user("Tell me."), max_tokens=1, return_token_ids=True)
    assert one["choices"][0]["token_ids"] == whole["token_ids"][:1]
    assert (one["choices"][0]["finish_reason"], one["usage"]["completion_tokens"]) == ("length", 1)
    stopped = service.chat(user("Tell me."), max_tokens=4, stop_token_ids=whole["token_ids"][:1])
    assert (stopped["choices"][0]["finish_reason"], stopped["usage"]["completion_tokens"]) == ("stop", 1)
    assert not stopped["choices"][0]["message"]["content"]
    assert stopped["orbit"]["first_token"] == "prefill"
    service.wait_until_nothing_is_left_since(before)


def test_what_needs_the_decode_engine_from_the_start_gets_it(service: Service):
    for fields in (
        {"logprobs": True},
        {"stop": ["never said"]},
        {"presence_penalty": 0.5},
        {"n": 2, "temperature": 1.0},
    ):
        assert service.chat(user("Tell me."), **fields)["orbit"]["first_token"] == "decode"


def test_stop_ends_the_answer_before_the_word(service: Service):
    whole = service.chat(user("Tell me."), max_tokens=20)["choices"][0]["message"]["content"]
    word = whole[8:11]
    answer = service.chat(user("Tell me."), max_tokens=20, stop=[word])["choices"][0]
    assert answer["message"]["content"] == whole[: whole.index(word)]
    assert answer["finish_reason"] == "stop"


def test_max_tokens_and_finish_reason(service: Service):
    answer = service.chat(user("Tell me."), max_tokens=3)
    assert answer["usage"]["completion_tokens"] == 3
    assert answer["choices"][0]["finish_reason"] == "length"


def test_logprobs_of_the_chosen_token_lead_its_alternatives(service: Service):
    answer = service.chat(user(picture(202), "?"), logprobs=True, top_logprobs=3)
    for position in answer["choices"][0]["logprobs"]["content"]:
        assert len(position["top_logprobs"]) == 3
        assert position["logprob"] == max(entry["logprob"] for entry in position["top_logprobs"])


def test_structured_output_obeys_its_schema_and_its_pattern(service: Service):
    schema = {"type": "json_schema", "json_schema": {"name": "colour", "schema": {"enum": ["red", "blue"]}}}
    answer = service.chat(user(picture(203), "Which colour?"), response_format=schema)
    assert json.loads(answer["choices"][0]["message"]["content"]) in ("red", "blue")
    answer = service.chat(user(picture(203), "When?"), structured_outputs={"regex": "20[0-9]{2}-[01][0-9]"})
    assert re.fullmatch("20[0-9]{2}-[01][0-9]", answer["choices"][0]["message"]["content"])


def test_a_forced_tool_call_comes_back_as_one(service: Service):
    function = {"name": "weather", "strict": True, "parameters": {"enum": ["Oslo", "Rome"]}}
    answer = service.chat(
        user("What is the weather?"),
        max_tokens=60,
        tools=[{"type": "function", "function": function}],
        tool_choice={"type": "function", "function": {"name": "weather"}},
    )
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"]) in ("Oslo", "Rome")


def test_completions_take_text_and_token_ids(service: Service):
    client = service.openai()
    prompt = "The quick brown fox"
    tokens = service.post({"model": service.model, "prompt": prompt}, "/tokenize").json()["tokens"]
    options: dict[str, Any] = {"model": service.model, "max_tokens": 6, "temperature": 0}
    answers = {client.completions.create(prompt=p, **options).choices[0].text for p in (prompt, tokens)}
    assert len(answers) == 1


def test_files_are_kept_listed_served_and_deleted(service: Service):
    client = service.openai()
    data = png(204)
    made = client.files.create(file=("page.png", data), purpose="vision")
    assert (made.bytes, made.filename, made.object, made.purpose) == (len(data), "page.png", "file", "vision")
    assert made.id in [file.id for file in client.files.list()]
    assert client.files.retrieve(made.id).id == made.id
    assert client.files.content(made.id).read() == data
    assert client.files.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(made.id)


def test_a_file_may_be_larger_than_a_message_between_replicas_is_by_default(service: Service):
    client = service.openai()
    data = png(206) + bytes(5 << 20)
    made = client.files.create(file=("page.png", data), purpose="vision")
    assert client.files.content(made.id).read() == data
    assert client.files.delete(made.id).deleted


def test_a_file_expires(service: Service):
    client = service.openai()
    made = client.files.create(
        file=("page.png", png(205)), purpose="vision", expires_after={"anchor": "created_at", "seconds": 1}
    )
    assert made.expires_at == made.created_at + 1
    time.sleep(2.1)
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(made.id)
    response = service.post(service.body(user({"type": "file", "file": {"file_id": made.id}}, "?")))
    assert response.status_code == 404


# -- bad input --------------------------------------------------------------------------------------------------------


def bomb() -> bytes:
    """A PNG of a few kilobytes whose header promises 30,000 by 30,000 pixels."""

    def piece(kind: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    header = (30_000).to_bytes(4, "big") * 2 + bytes([8, 2, 0, 0, 0])
    return (
        b"\x89PNG\r\n\x1a\n"
        + piece(b"IHDR", header)
        + piece(b"IDAT", zlib.compress(bytes(1 << 20)))
        + piece(b"IEND", b"")
    )


FILE = {"type": "file", "file": {"file_id": "file-0000"}}
BAD: dict[str, tuple[dict[str, Any], int, str]] = {
    "not an image": ({"messages": user(inline(b"hello, I am text"), "?")}, 400, "not an image"),
    "an empty image": ({"messages": user(inline(b""), "?")}, 400, "empty"),
    "a truncated image": ({"messages": user(inline(png(1)[:2000]), "?")}, 400, "truncated or broken"),
    "a broken image": ({"messages": user(inline(png(1)[:500] + b"\0" * 500 + png(1)[1000:]), "?")}, 400, "broken"),
    "too many pixels": ({"messages": user(inline(bomb()), "?")}, 413, "pixels"),
    "too many bytes": ({"messages": user(inline(png(1) + bytes(MAX_IMAGE_BYTES)), "?")}, 413, str(MAX_IMAGE_BYTES)),
    "broken base64": (
        {"messages": user({"type": "image_url", "image_url": {"url": "data:image/png;base64,@@@"}})}, 400, "base64"),
    "a data URL without data": (
        {"messages": user({"type": "image_url", "image_url": {"url": "data:image/png"}})}, 400, "base64"),
    "an http URL": (
        {"messages": user({"type": "image_url", "image_url": {"url": "http://a.example/a.png"}})}, 400, "not allowed"),
    "a file URL": (
        {"messages": user({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}})}, 400, "must be data:"),
    "no URL": ({"messages": user({"type": "image_url", "image_url": {}})}, 400, "url"),
    "an unknown file": ({"messages": user(FILE, "?")}, 404, "file-0000"),
    "a file id that climbs": (
        {"messages": user({"type": "file", "file": {"file_id": "../../etc/passwd"}})}, 404, "no such file"),
    "an unknown part": ({"messages": user({"type": "input_audio", "input_audio": {}})}, 400, "input_audio"),
    "too many images": ({"messages": user(*[picture(1)] * 9)}, 400, "more than 8 images"),
    "an unknown model": ({"model": "gpt-none", "messages": user("?")}, 404, "gpt-none"),
    "too long a prompt": ({"messages": user("word " * 2000)}, 400, "2048"),
    "too long a prompt with images": ({"messages": user(picture(1), "word " * 2000)}, 400, "2048"),
    "messages of a wrong type": ({"messages": "hello"}, 400, "messages"),
    "no messages": ({"messages": []}, 400, "at least one message"),
    "a temperature of a wrong type": ({"messages": user("?"), "temperature": "warm"}, 400, "temperature"),
    "a temperature out of range": ({"messages": user("?"), "temperature": -1}, 400, "temperature"),
    "no tokens asked for": ({"messages": user("?"), "max_tokens": 0}, 400, "max_tokens"),
    "an unknown mode": ({"messages": user("?"), "orbit": {"mode": "fast"}}, 400, "orbit.mode"),
    "too many tokens to compute": ({"messages": user("?"), "orbit": {"mode": "mpic-4097"}}, 400, "K from 0 to 4096"),
    "fewer tokens than none": ({"messages": user("?"), "orbit": {"mode": "mpic--1"}}, 400, "K from 0 to 4096"),
    "more than all tokens": ({"messages": user("?"), "orbit": {"mode": "cacheblend-101"}}, 400, "R from 0 to 100"),
    "an unknown orbit field": ({"messages": user("?"), "orbit": {"moode": "auto"}}, 400, "orbit.moode"),
    "orbit of a wrong type": ({"messages": user("?"), "orbit": "auto"}, 400, "orbit"),
    "prompt_logprobs": ({"messages": user("?"), "prompt_logprobs": 1}, 400, "prompt_logprobs"),
    "no prompt_logprobs but the prompt's": ({"messages": user("?"), "prompt_logprobs": 0}, 400, "prompt_logprobs"),
    "a transfer of one's own": ({"messages": user("?"), "kv_transfer_params": {"host": "x"}}, 400, "kv_transfer"),
    "a broken schema": (
        {"messages": user("?"), "response_format": {"type": "json_schema", "json_schema": {"name": "x",
         "schema": {"type": "nonsense"}}}}, 400, ""),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_requests_are_told_what_is_wrong_and_leave_nothing(service: Service, name: str):
    fields, status, words = BAD[name]
    before = service.holdings()
    response = service.post({"model": service.model, "max_tokens": 4, **fields})
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error.keys() >= {"message", "type", "param", "code"}
    assert words in error["message"] + str(error["param"])
    assert error["code"] == status
    service.wait_until_nothing_is_left_since(before)


def test_malformed_json_is_a_400(service: Service):
    response = httpx.post(
        service.url + "/v1/chat/completions", content=b'{"model": ', headers={"Content-Type": "application/json"}
    )
    assert response.status_code == 400
    assert "json" in response.json()["error"]["message"].lower()


def test_too_large_a_body_is_a_413_whether_announced_or_not(service: Service):
    body = json.dumps(service.body(user("x" * (MAX_BODY_BYTES + 1)))).encode()
    headers = {"Content-Type": "application/json"}
    url = service.url + "/v1/chat/completions"
    announced = httpx.post(url, content=body, headers=headers)
    blocks = (body[i : i + 65536] for i in range(0, len(body), 65536))
    chunked = httpx.post(url, content=blocks, headers=headers)
    assert announced.status_code == chunked.status_code == 413
    assert str(MAX_BODY_BYTES) in announced.json()["error"]["message"]


@pytest.mark.parametrize(
    ("data", "status"),
    [(b"", 400), (b"hello", 400), (png(1)[:3000], 400), (bomb(), 413)],
    ids=["empty", "text", "truncated", "bomb"],
)
def test_bad_uploads_are_refused_and_not_kept(service: Service, data: bytes, status: int):
    before = service.holdings()
    response = httpx.post(
        service.url + "/v1/files", files={"file": ("a.png", data)}, data={"purpose": "vision"}, timeout=30
    )
    assert response.status_code == status, response.text
    assert response.json()["error"]["message"]
    service.wait_until_nothing_is_left_since(before)


@pytest.mark.parametrize(
    "fields",
    [{}, {"purpose": "fine-tune"}, {"purpose": "vision", "expires_after[seconds]": "60"},
     {"purpose": "vision", "expires_after[anchor]": "created_at", "expires_after[seconds]": "-5"}],
    ids=str,
)  # fmt: skip
def test_bad_upload_fields_are_refused(service: Service, fields: dict[str, str]):
    response = httpx.post(service.url + "/v1/files", files={"file": ("a.png", png(1))}, data=fields)
    assert response.status_code == 400, response.text
    assert "error" in response.json()


def test_an_unknown_file_is_a_404_everywhere(service: Service):
    for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
        assert httpx.request(method, f"{service.url}/v1/files/file-none{path}").status_code == 404


def test_a_request_the_decode_pool_can_never_hold_is_a_400(service: Service):
    response = service.post(service.body(user("?"), n=100_000))
    assert response.status_code == 400, response.text


def test_data_urls_need_not_name_the_right_type(service: Service):
    url = f"data:image/jpeg;base64,{base64.b64encode(png(1)).decode()}"
    assert service.chat(user({"type": "image_url", "image_url": {"url": url}}, text("?")))["choices"]
