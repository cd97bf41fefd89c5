"""The OpenAPI document tells errors and keys, and what it tells is what is answered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from vllm.entrypoints.openai.chat_completion.api_router import router as chat_router
from vllm.entrypoints.openai.models.api_router import router as models_router

from kvstore.settings import FileSettings
from kvstore.uploads.files import FileStore
from kvstore.uploads.vector_stores import VectorStores
from prefill_workers.protocol import CompactionPolicy
from serving.api.auth import AnswerHead, Authenticate, Limit
from serving.api.errors import answer_errors
from serving.api.fidelity import fidelity_router
from serving.api.files import files_router
from serving.api.media import MediaResolver
from serving.api.metrics import Metrics
from serving.api.openapi import document_errors
from serving.api.vector_stores import vector_stores_router
from serving.api_keys import KeyRing
from serving.frontend.report import ElasticOptions
from serving.settings import ApiKey, HttpSettings

KEY = {"Authorization": "Bearer k"}


@pytest.fixture
def app(tmp_path: Path) -> FastAPI:
    async def on_delete(content: str, owner: str) -> None:
        pass

    files = FileStore(str(tmp_path), FileSettings())
    stores, http = VectorStores(files), HttpSettings()
    app = FastAPI()
    roles: Any = None
    media = MediaResolver(http, files, stores)
    app.include_router(files_router(files, stores, media, 1000, on_delete))
    app.include_router(vector_stores_router(stores, on_delete, media))
    app.include_router(fidelity_router(roles))
    app.include_router(chat_router)
    app.include_router(models_router)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    answer_errors(app)
    document_errors(app)
    app.add_middleware(AnswerHead)
    app.add_middleware(Limit, http, Metrics())
    app.add_middleware(Authenticate, KeyRing({"k": ApiKey(tenant="one")}))
    return app


@pytest.fixture
def client(app: FastAPI) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", headers=KEY)


def errors(document: dict, path: str, method: str) -> set[int]:
    return {int(status) for status in document["paths"][path][method]["responses"] if int(status) >= 400}


async def test_routes_tell_the_errors_that_they_answer(client: httpx.AsyncClient):
    document = (await client.get("/openapi.json")).json()
    told = {400, 401, 404, 408, 413, 429, 500, 503, 504}
    assert errors(document, "/v1/chat/completions", "post") >= told
    assert errors(document, "/v1/files", "post") == {400, 401, 408, 413, 429, 500}
    assert 429 in errors(document, "/v1/files/{file_id}/content", "get")
    assert 429 not in errors(document, "/v1/files/{file_id}", "get")
    assert 404 in errors(document, "/v1/files", "get"), "of a cursor that names no file"
    assert errors(document, "/v1/files/{file_id}", "delete") == {400, 401, 403, 404, 500}
    assert errors(document, "/v1/vector_stores/{store_id}", "post") >= {400, 401, 403, 404, 413, 429}
    assert 403 not in errors(document, "/v1/vector_stores/{store_id}", "get")
    assert errors(document, "/v1/orbit/operating_points/{point}/allow", "post") >= {401, 403, 404, 503}
    assert errors(document, "/health", "get") == {503}
    operations = [one for methods in document["paths"].values() for one in methods.values()]
    assert not any("422" in operation["responses"] for operation in operations), "it is never answered"


async def test_errors_have_the_documented_shape(client: httpx.AsyncClient):
    document = (await client.get("/openapi.json")).json()
    told = document["paths"]["/v1/files/{file_id}"]["get"]["responses"]["404"]["content"]["application/json"]["schema"]
    schema = document["components"]["schemas"][told["$ref"].rpartition("/")[2]]
    missing = await client.get("/v1/files/file-none")
    unknown = await client.get("/v1/models", headers={"Authorization": "Bearer no"})
    forbidden = await client.post("/v1/orbit/operating_points/patched/allow")
    bad = await client.post("/v1/vector_stores/x/search", content=b"{", headers={"content-type": "text/plain"})
    too_large = await client.post("/v1/files", content=b"x", headers={"content-length": "99999999999"})
    answers = {404: [missing], 400: [bad], 401: [unknown], 403: [forbidden], 413: [too_large]}
    for status, found in answers.items():
        for answer in found:
            assert answer.status_code == status, answer.text
            error = answer.json()["error"]
            inner = schema["properties"]["error"]
            assert set(inner["required"]) <= set(error) <= set(inner["properties"])
            assert error["code"] == status


def test_every_policy_of_less_kv_is_described():
    told = ElasticOptions.model_fields["policy"].description or ""
    assert [policy for policy in CompactionPolicy if f"{policy}:" not in told] == []


async def test_keys_are_a_bearer_scheme(client: httpx.AsyncClient):
    document = (await client.get("/openapi.json")).json()
    (name,) = document["components"]["securitySchemes"]
    assert document["components"]["securitySchemes"][name]["scheme"] == "bearer"
    assert document["security"] == [{name: []}]
    assert document["paths"]["/health"]["get"]["security"] == []
    assert "security" not in document["paths"]["/v1/files"]["get"]


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/chat/completions", "POST"),
        ("DELETE", "/v1/files", "GET, HEAD, POST"),
        ("PUT", "/v1/files/file-1", "DELETE, GET, HEAD"),
        ("POST", "/health", "GET, HEAD"),
        ("HEAD", "/v1/chat/completions", "POST"),
    ],
)
async def test_a_wrong_method_is_told_the_right_ones(client: httpx.AsyncClient, method: str, path: str, allowed: str):
    answer = await client.request(method, path)
    assert (answer.status_code, answer.headers["Allow"]) == (405, allowed)


@pytest.mark.parametrize("path", ["/health", "/v1/files", "/docs", "/openapi.json"])
async def test_head_answers_as_get_without_the_body(client: httpx.AsyncClient, path: str):
    answer = await client.head(path)
    got = await client.get(path)
    assert (answer.status_code, answer.content) == (200, b"")
    assert answer.headers["content-length"] == got.headers["content-length"] != "0"


async def test_head_needs_the_key_that_get_needs(client: httpx.AsyncClient):
    assert (await client.head("/v1/files", headers={"Authorization": "no"})).status_code == 401
