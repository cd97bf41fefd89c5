"""Access: keys from a file, TLS, administrators' paths, headers, shares of tenants, files on the disk."""

from __future__ import annotations

import os
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import pytest
from certificates import self_signed
from client import Service, picture, png, user
from openai import OpenAI

from serving.api_keys import hashed_entry
from serving.proxy_protocol import HEADER_SECONDS, MAX_HEADER_BYTES

pytestmark = pytest.mark.service

ONE, OPS = "key-of-one", "key-of-ops"
BOSS, STAFF = "a-boss", "a-clerk"  # of the service with a file of keys
ENTRIES = {BOSS: hashed_entry(BOSS, "ops", admin=True), STAFF: hashed_entry(STAFF, "acme", admin=False)}
ADMIN_PATHS = ["/metrics", "/docs", "/redoc", "/openapi.json"]


@pytest.fixture(scope="session")
def secrets_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Keys, certificate and its key."""
    folder = tmp_path_factory.mktemp("secrets")
    self_signed(folder / "tls")
    return folder


def write_keys(folder: Path, *names: str) -> None:
    """Rewrite the file of keys as an editor does."""
    fresh = folder / "fresh"
    fresh.touch(0o600)
    fresh.write_text("\n".join(ENTRIES[name] for name in names))
    fresh.rename(folder / "keys.yaml")


@pytest.fixture
def private(only_service: Callable[..., Service], secrets_folder: Path) -> Service:
    """A service behind TLS, with hashed keys in a file, whose metrics and documentation are the administrator's."""
    write_keys(secrets_folder, BOSS, STAFF)
    http = {
        "api_keys_file": secrets_folder / "keys.yaml",
        "admin_paths": ADMIN_PATHS,
        "tls_certificate": secrets_folder / "tls" / "certificate.pem",
        "tls_key": secrets_folder / "tls" / "key.pem",
    }
    return only_service("private", "float32", vision={"replicas": 0}, http=http)


@pytest.fixture
def tls(secrets_folder: Path) -> Iterator[httpx.Client]:
    """A client that trusts the service's certificate alone."""
    trusting = ssl.create_default_context(cafile=secrets_folder / "tls" / "certificate.pem")
    with httpx.Client(verify=trusting, timeout=300) as client:
        yield client


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_everything_goes_through_tls(private: Service, tls: httpx.Client):
    assert private.url.startswith("https://")
    answer = tls.post(
        f"{private.url}/v1/chat/completions", json=private.body(user("Hello"), max_tokens=4), headers=bearer(STAFF)
    )
    assert answer.status_code == 200, answer.text
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{private.url}/health")
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"{private.url.replace('https', 'http')}/health")


def test_metrics_and_documentation_are_the_administrators_where_they_are_said_to_be(
    private: Service, tls: httpx.Client
):
    for path in ADMIN_PATHS:
        answers = [tls.get(private.url + path, headers=headers) for headers in ({}, bearer(STAFF), bearer(BOSS))]
        assert [answer.status_code for answer in answers] == [401, 403, 200], path
    assert tls.get(f"{private.url}/health").status_code == 200


def test_a_key_is_taken_and_given_while_the_service_runs(private: Service, tls: httpx.Client, secrets_folder: Path):
    def models(key: str) -> int:
        return tls.get(f"{private.url}/v1/models", headers=bearer(key)).status_code

    assert [models(BOSS), models(STAFF), models(ENTRIES[STAFF].split('"')[1])] == [200, 200, 401]
    write_keys(secrets_folder, BOSS)
    private.wait_until(lambda: models(STAFF) == 401, seconds=10)
    (secrets_folder / "keys.yaml").write_text("")
    time.sleep(2)
    assert [models(BOSS), models(STAFF)] == [200, 401], "a file that cannot be used changes nothing"
    write_keys(secrets_folder, BOSS, STAFF)
    private.wait_until(lambda: models(STAFF) == 200, seconds=10)


def test_what_is_deleted_while_it_is_listed_is_deleted_whole(private: Service, tls: httpx.Client):
    client = OpenAI(base_url=f"{private.url}/v1", api_key=BOSS, http_client=tls, max_retries=0)
    files = [client.files.create(file=(f"{n}.txt", b"words"), purpose="user_data").id for n in range(7)]
    stores = [client.vector_stores.create(name=str(n)).id for n in range(24)]
    client.vector_stores.file_batches.create(stores[0], file_ids=files)
    take_out = partial(client.vector_stores.files.delete, vector_store_id=stores[0])
    assert [f.id for f in client.vector_stores.files.list(stores[0], limit=2) if take_out(f.id)] == files[::-1]
    assert [s.id for s in client.vector_stores.list() if client.vector_stores.delete(s.id)] == stores[::-1]
    assert [f.id for f in client.files.list(limit=5) if client.files.delete(f.id)] == files[::-1]
    assert [*client.files.list(), *client.vector_stores.list()] == []


def test_metrics_need_no_key_by_default(guarded: Service):
    assert httpx.get(f"{guarded.url}/metrics").status_code == 200


def test_the_model_tells_no_path(guarded: Service):
    (model,) = httpx.get(f"{guarded.url}/v1/models", headers=bearer(ONE)).json()["data"]
    assert model["root"] == guarded.model
    assert os.sep not in str(model)


def test_what_is_written_is_for_one_user_alone(guarded: Service):
    client = guarded.openai(OPS)
    file = client.files.create(file=("page.png", png(881)), purpose="vision").id
    store = client.vector_stores.create(name="pages", file_ids=[file])
    for order in ((882, 883), (883, 882)):
        client.chat.completions.create(
            model=guarded.model,
            messages=user(*map(picture, order), "What?"),
            max_tokens=2,  # type: ignore[arg-type]
        )
    guarded.settle()
    guarded.wait_until(lambda: any(guarded.logs.iterdir()))
    below = [path for root in (guarded.root, guarded.logs) for path in root.rglob("*")]
    assert any(path.suffix == ".arrow" for path in below)
    opened = {str(path): f"{mode:o}" for path in [*below, guarded.logs] if (mode := path.stat().st_mode & 0o077)}
    assert opened == {}
    client.vector_stores.delete(store.id)
    client.files.delete(file)


def test_a_flood_of_one_tenant_leaves_places_for_another(guarded: Service):
    """First come, first served would answer the small question behind all that came before it."""
    ended = Counter[str]()

    def flood(number: int) -> None:
        body = guarded.body(user(f"Count from {number}."), max_tokens=150, ignore_eos=True)
        while guarded.post(body, headers=bearer("key-of-one")).status_code == 429:  # the prefill queue is short here
            time.sleep(0.05)
        ended["one"] += 1

    with ThreadPoolExecutor(48) as pool:
        work = [pool.submit(flood, number) for number in range(48)]
        guarded.wait_until(lambda: ended["one"] > 0)
        before = ended["one"]
        body = guarded.body(user("Hello."), max_tokens=2)
        while (answer := guarded.post(body, headers=bearer("key-of-two"))).status_code == 429:
            time.sleep(0.05)
        between = ended["one"] - before
        for one in work:
            one.result()
    assert answer.status_code == 200
    assert between <= 16, "more answers ended before it than there are places"


@pytest.mark.slow
def test_the_proxy_bounds_headers_and_the_time_for_them(guarded: Service):
    host, _, port = guarded.url.removeprefix("http://").rpartition(":")

    def said(*parts: bytes) -> tuple[bytes, float]:
        """The answer to what is sent of a request, and the seconds until the connection was closed."""
        with socket.create_connection((host, int(port)), timeout=HEADER_SECONDS * 2) as connection:
            began, found = time.monotonic(), b""
            for part in parts:
                connection.sendall(part)
            while piece := connection.recv(1 << 16):
                found += piece
            return found, time.monotonic() - began

    begin = b"GET /v1/models HTTP/1.1\r\nhost: here\r\n"
    large, _ = said(begin, b"authorization: Bearer " + b"x" * MAX_HEADER_BYTES, b"\r\n\r\n")
    assert large.startswith(b"HTTP/1.1 431")
    assert b"content-length: 0" in large, "it is the proxy's answer, not an ingress replica's"
    slow, seconds = said(begin + b"authorization: ")
    assert slow.startswith(b"HTTP/1.1 408")
    assert HEADER_SECONDS - 1 < seconds < HEADER_SECONDS + 5
    nothing, seconds = said()
    assert (nothing, seconds < HEADER_SECONDS + 5) == (b"", True)
    whole = httpx.get(f"{guarded.url}/v1/models", headers={**bearer(ONE), "x-long": "x" * (MAX_HEADER_BYTES - 2000)})
    assert whole.status_code == 200
