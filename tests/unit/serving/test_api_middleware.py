"""Who may ask, how much, and how many at once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from vllm.exceptions import RetryableRequestError

from serving.api.auth import Authenticate, BoundHeaders, Limit
from serving.api.errors import RetryLater, answer_errors
from serving.api.metrics import Metrics, exposition
from serving.api_keys import KeyRing
from serving.frontend.rate_limits import RateLimits
from serving.settings import ApiKey, HttpSettings, TenantLimits, TenantsSettings


def limits(max_body: int = 1000, at_once: int = 2, body_timeout_s: float = 120) -> HttpSettings:
    return HttpSettings(max_body_bytes=max_body, max_concurrent_requests=at_once, body_timeout_s=body_timeout_s)


def api(
    keys: dict[str, ApiKey] | None = None,
    http: HttpSettings | None = None,
    admin_paths: Sequence[str] = (),
    tenants: TenantsSettings | None = None,
) -> FastAPI:
    app = FastAPI()
    app.state.gate = asyncio.Event()
    app.state.metrics = Metrics()

    @app.post("/tokenize")
    @app.post("/v1/files")
    @app.post("/v1/vector_stores")
    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> dict:
        body = await request.body()
        if b"wait" in body:
            await app.state.gate.wait()
        return {"tenant": request.state.tenant, "bytes": len(body)}

    @app.get("/v1/files/{file}/content")
    @app.get("/v1/vector_stores/{store}/files/{file}/content")
    @app.get("/v1/orbit/files/{file}/pages/{page}")
    async def download() -> dict:
        await app.state.gate.wait()
        return {}

    @app.get("/metrics")
    @app.get("/health")
    async def health() -> dict:
        return {}

    @app.get("/v1/models")
    async def models(request: Request) -> dict:
        return {"tenant": request.state.tenant, "admin": request.state.admin}

    answer_errors(app)
    http = http or limits()
    rates = None if tenants is None else RateLimits(tenants.of)
    alone = None if tenants is None else tenants.most_of_one(http.max_concurrent_requests)
    app.add_middleware(Limit, http, app.state.metrics, rates, alone)
    app.add_middleware(Authenticate, KeyRing(keys or {}), admin_paths)
    app.add_middleware(BoundHeaders)
    return app


def client(app: FastAPI, **headers: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", headers=headers)


TWO = {"one": ApiKey(tenant="acme"), "two": ApiKey(tenant="other")}


async def test_slow_bodies_take_their_tenants_places_and_not_all():
    async def slow():
        yield b"x"
        await asyncio.Event().wait()

    app = api(TWO, limits(at_once=4), tenants=TenantsSettings(reserve=0.25))
    async with client(app, Authorization="Bearer one") as one, client(app, Authorization="Bearer two") as two:
        slowly = [asyncio.create_task(one.post("/v1/chat/completions", content=slow())) for _ in range(3)]
        await asyncio.sleep(0.05)
        refused = await one.post("/v1/chat/completions", content=b"x")
        served = await two.post("/v1/chat/completions", content=b"x")
        for task in slowly:
            task.cancel()
        await asyncio.gather(*slowly, return_exceptions=True)
        again = await one.post("/v1/chat/completions", content=b"x")
    assert (refused.status_code, served.status_code, again.status_code) == (429, 200, 200)
    assert "3 of your requests" in refused.json()["error"]["message"]


async def test_requests_a_minute_are_limited_by_tenant_and_told_in_headers():
    app = api(TWO, tenants=TenantsSettings(named={"acme": TenantLimits(requests_per_minute=2)}))
    async with client(app, Authorization="Bearer one") as one, client(app, Authorization="Bearer two") as two:
        answers = [await one.post("/v1/chat/completions", content=b"x") for _ in range(3)]
        upload = await one.post("/v1/files", content=b"x")
        other = await two.post("/v1/chat/completions", content=b"x")
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert [answer.headers["x-ratelimit-remaining-requests"] for answer in answers] == ["1", "0", "0"]
    assert 1 <= int(answers[2].headers["Retry-After"]) <= 30
    assert (upload.status_code, other.status_code) == (200, 200)
    assert not [name for name in other.headers if name.startswith("x-ratelimit")]


async def test_without_keys_everyone_is_the_local_tenant_and_administrator():
    async with client(api()) as c:
        assert (await c.get("/v1/models")).json() == {"tenant": "local", "admin": True}


async def test_an_administrators_key_is_marked_as_one():
    keys = HttpSettings.model_validate({"api_keys": {"a": "acme", "b": {"tenant": "acme", "admin": True}}}).api_keys
    for key, admin in (("a", False), ("b", True)):
        async with client(api(keys), Authorization=f"Bearer {key}") as c:
            assert (await c.get("/v1/models")).json() == {"tenant": "acme", "admin": admin}


def counted(metrics: Metrics) -> list[str]:
    """What the metrics say of requests, by status."""
    lines = exposition(metrics.collect()).decode().splitlines()
    return [line for line in lines if line.startswith("orbitserve_requests_total{")]


@pytest.mark.parametrize(
    ("header", "status"),
    [("Bearer one", 200), ("bearer one", 200), ("Bearer two", 401), ("Basic one", 401), ("one", 401), ("", 401)],
)
async def test_a_key_is_a_tenant_and_anything_else_is_refused(header: str, status: int):
    async with client(api({"one": ApiKey(tenant="acme")}), Authorization=header) as c:
        answer = await c.get("/v1/models")
    assert answer.status_code == status
    if status == 200:
        assert answer.json() == {"tenant": "acme", "admin": False}
    else:
        assert answer.headers["WWW-Authenticate"] == "Bearer"
        assert answer.json()["error"]["code"] == 401


async def test_health_needs_no_key():
    async with client(api({"one": ApiKey(tenant="acme")})) as c:
        assert (await c.get("/health")).status_code == 200


async def test_a_body_is_bounded_whether_announced_or_streamed():
    async def streamed():
        for _ in range(20):
            yield b"x" * 100

    async with client(api()) as c:
        announced = await c.post("/v1/chat/completions", content=b"x" * 1001)
        chunked = await c.post("/v1/chat/completions", content=streamed())
        fits = await c.post("/v1/chat/completions", content=b"x" * 1000)
    assert (announced.status_code, chunked.status_code, fits.status_code) == (413, 413, 200)
    for refused in (announced, chunked):
        assert "1000 bytes" in refused.json()["error"]["message"]


async def test_what_has_no_pages_in_it_is_bounded_closer():
    async with client(api(http=limits(max_body=128 << 20))) as c:
        fits = await c.post("/v1/vector_stores", content=b"x" * (4 << 20))
        larger = await c.post("/v1/vector_stores", content=b"x" * ((4 << 20) + 1))
    assert (fits.status_code, larger.status_code) == (200, 413)


async def test_a_body_that_does_not_come_gives_its_place_back():
    async def halting():
        yield b"x"
        await asyncio.Event().wait()

    async with client(api(http=limits(at_once=1, body_timeout_s=0.05))) as c:
        late = await c.post("/v1/chat/completions", content=halting())
        assert (late.status_code, late.json()["error"]["code"]) == (408, 408)
        assert "0.05 s" in late.json()["error"]["message"]
        assert (await c.post("/v1/chat/completions", content=b"x")).status_code == 200


async def test_bodies_are_bounded_in_all_and_one_alone_is_let_in():
    async def announced_by_nobody():
        yield b"x" * 300

    http = HttpSettings(max_body_bytes=1000, max_bodies_bytes=500)
    app = api(http=http)
    async with client(app) as c:
        held = asyncio.create_task(c.post("/v1/chat/completions", content=b"wait" * 75))
        await asyncio.sleep(0.05)
        for body in (b"x" * 300, announced_by_nobody()):
            refused = await c.post("/v1/files", content=body)
            assert (refused.status_code, refused.headers["Retry-After"]) == (429, "1")
            assert refused.json()["error"]["message"].startswith("requests in progress have 300 bytes already")
        assert (await c.post("/v1/files", content=b"x" * 200)).status_code == 200
        app.state.gate.set()
        assert (await held).status_code == 200
        app.state.gate.clear()
        alone = asyncio.create_task(c.post("/v1/chat/completions", content=b"wait" * 225))
        await asyncio.sleep(0.05)
        assert (await c.get("/v1/models")).status_code == 200, "what has no body takes no memory for one"
        app.state.gate.set()
        assert (await alone).status_code == 200


async def test_what_came_in_time_may_take_longer_to_answer():
    app = api(http=limits(body_timeout_s=0.05))
    async with client(app) as c:
        held = asyncio.create_task(c.post("/v1/chat/completions", content=b"wait"))
        await asyncio.sleep(0.15)
        app.state.gate.set()
        assert (await held).status_code == 200


async def test_what_is_no_route_is_told_in_openais_shape():
    async with client(api()) as c:
        answers = [await c.get("/v1/responses"), await c.get("/v1/chat/completions")]
    assert [answer.json()["error"]["code"] for answer in answers] == [404, 405]


async def test_an_upload_is_bounded_by_the_largest_file_there_may_be():
    files = HttpSettings(max_image_bytes=1000, max_document_bytes=2000)
    envelope = 64 * 1024
    async with client(api(http=files)) as c:
        fits = await c.post("/v1/files", content=b"x" * (2000 + envelope))
        larger = await c.post("/v1/files", content=b"x" * (2001 + envelope))
        chat = await c.post("/v1/chat/completions", content=b"x" * (2001 + envelope))
    assert (fits.status_code, larger.status_code, chat.status_code) == (200, 413, 200)


async def test_under_a_prefix_the_same_paths_are_open_and_limited():
    app = api({"one": ApiKey(tenant="acme")}, limits(at_once=1))
    mounted = httpx.ASGITransport(app, root_path="/orbit")
    async with httpx.AsyncClient(transport=mounted, base_url="http://test/orbit") as c:
        assert (await c.get("/health")).status_code == 200
        assert (await c.get("/v1/models")).status_code == 401
        key = {"Authorization": "Bearer one"}
        held = asyncio.create_task(c.post("/v1/chat/completions", content=b"wait", headers=key))
        await asyncio.sleep(0.05)
        assert (await c.post("/v1/chat/completions", content=b"x", headers=key)).status_code == 429
        app.state.gate.set()
        assert (await held).status_code == 200
    assert 'orbitserve_requests_total{status="200"} 1.0' in counted(app.state.metrics)


async def test_further_requests_are_told_to_come_back_and_places_come_free_again():
    app = api()
    async with client(app) as c:
        held = [asyncio.create_task(c.post("/v1/chat/completions", content=b"wait")) for _ in range(2)]
        await asyncio.sleep(0.05)
        refused = await c.post("/v1/chat/completions", content=b"x")
        assert refused.status_code == 429
        assert refused.headers["Retry-After"] == "1"
        assert refused.json()["error"]["code"] == 429
        assert (await c.get("/v1/models")).status_code == 200, "what costs nothing is not counted"
        app.state.gate.set()
        assert [answer.status_code for answer in await asyncio.gather(*held)] == [200, 200]
        assert (await c.post("/v1/chat/completions", content=b"x")).status_code == 200
    assert 'orbitserve_requests_total{status="429"} 1.0' in counted(app.state.metrics)


@pytest.mark.parametrize("path", ["/tokenize", "/v1/files"])
async def test_tokenisation_and_uploads_take_a_place_but_are_no_generation_requests(path: str):
    app = api(http=limits(at_once=1))
    async with client(app) as c:
        held = asyncio.create_task(c.post(path, content=b"wait"))
        await asyncio.sleep(0.05)
        for path in ("/tokenize", "/detokenize", "/v1/files", "/v1/vector_stores", "/v1/chat/completions"):
            refused = await c.post(path, content=b"x")
            assert (refused.status_code, refused.headers["Retry-After"]) == (429, "1")
        app.state.gate.set()
        assert (await held).status_code == 200
    counted = [
        line
        for line in exposition(app.state.metrics.collect()).decode().splitlines()
        if "orbitserve_requests_total{" in line
    ]
    assert counted == ['orbitserve_requests_total{status="429"} 1.0']


@pytest.mark.parametrize(
    "path", ["/v1/files/a/content", "/v1/vector_stores/vs/files/a/content", "/v1/orbit/files/a/pages/1"]
)
async def test_downloads_of_files_and_pages_take_a_place(path: str):
    app = api(http=limits(at_once=1))
    async with client(app) as c:
        held = asyncio.create_task(c.get(path))
        await asyncio.sleep(0.05)
        assert [(await c.request(method, path)).status_code for method in ("GET", "HEAD")] == [429, 429]
        assert (await c.get("/v1/models")).status_code == 200
        app.state.gate.set()
        assert (await held).status_code == 200


async def test_a_cancelled_request_gives_its_place_back():
    app = api(http=limits(at_once=1))
    async with client(app) as c:
        held = asyncio.create_task(c.post("/v1/chat/completions", content=b"wait"))
        await asyncio.sleep(0.05)
        held.cancel()
        await asyncio.gather(held, return_exceptions=True)
        assert (await c.post("/v1/chat/completions", content=b"x")).status_code == 200


async def test_what_goes_wrong_inside_is_counted_too():
    app = FastAPI()

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> dict:
        raise RuntimeError("injected")

    @app.exception_handler(Exception)  # as vLLM does: it stands outside of the middleware
    async def answer(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"error": str(error)}, 500)

    metrics = Metrics()
    app.add_middleware(Limit, limits(), metrics)
    app.add_middleware(Authenticate, KeyRing({}))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as c:
        assert (await c.post("/v1/chat/completions", content=b"x")).status_code == 500
    counted = [
        line for line in exposition(metrics.collect()).decode().splitlines() if "orbitserve_requests_total{" in line
    ]
    assert counted == ['orbitserve_requests_total{status="500"} 1.0']


async def test_the_administrators_paths_take_their_key():
    keys = {"one": ApiKey(tenant="acme"), "boss": ApiKey(tenant="ops", admin=True)}
    app = api(keys, admin_paths=["/metrics"])
    for path, key, status in (
        ("/metrics", "", 401),
        ("/metrics", "two", 401),
        ("/metrics", "one", 403),
        ("/metrics", "boss", 200),
        ("/docs", "", 200),
        ("/health", "", 200),
    ):
        async with client(app, Authorization=f"Bearer {key}") as c:
            assert (await c.get(path)).status_code == status, (path, key)
    async with client(api(keys)) as c:
        assert (await c.get("/metrics")).status_code == 200


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("/v1/models", {"Authorization": "Bearer " + "x" * 70_000}),
        ("/v1/models", {f"X-{n}": "x" * 1000 for n in range(70)}),
        ("/v1/models?" + "x" * 40_000, {"X": "x" * 40_000}),
    ],
    ids=["one", "many", "with the URL"],
)
async def test_large_headers_are_refused_before_keys_are_looked_at(
    path: str, headers: dict[str, str], monkeypatch: pytest.MonkeyPatch
):
    app = api({"one": ApiKey(tenant="acme")})
    monkeypatch.setattr(Authenticate, "_owner", lambda *_: pytest.fail("a key was looked at"))
    async with client(app, **headers) as c:
        answer = await c.get(path)
    assert answer.status_code == 431
    assert answer.json()["error"]["code"] == 431


async def test_every_503_says_when_to_try_again_and_nothing_else_does():
    app = FastAPI()
    answer_errors(app)
    app.add_middleware(RetryLater)

    @app.get("/lost")
    async def lost() -> None:
        raise RetryableRequestError("a worker was lost")

    @app.get("/said/{status}")
    async def said(status: int) -> JSONResponse:
        return JSONResponse({}, status, headers={"Retry-After": "60"} if status == 503 else {})

    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        answer = await client.get("/lost")
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "5")
        assert (await client.get("/said/503")).headers.get_list("Retry-After") == ["60"]
        assert "Retry-After" not in (await client.get("/said/500")).headers


async def test_responses_are_limited_as_chats_are():
    tenants = TenantsSettings(named={"acme": TenantLimits(requests_per_minute=1)})
    app = api(TWO, limits(max_body=128 << 20), tenants=tenants)

    @app.post("/v1/responses")
    async def responses(request: Request) -> dict[str, int]:
        return {"bytes": len(await request.body())}

    async with client(app, Authorization="Bearer one") as one:
        answers = [await one.post("/v1/responses", content=b"x" * (5 << 20)) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 429]


async def test_a_post_to_an_open_path_without_a_key_is_no_failure():
    async with client(api(TWO)) as stranger:
        assert (await stranger.post("/health")).status_code in (404, 405)
