"""What an operator relies on: keys and tenants, refusals under load, and a service that outlives its workers."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
from client import CHECKPOINT, Service, picture, png, user
from typer.testing import CliRunner

from infra.checkpoints import checkpoint_path
from serving.cli.main import app as cli

pytestmark = pytest.mark.service

RESTART_SECONDS = 180.0  # of a worker


def ask(service: Service, key: str | None, messages: list[dict[str, Any]], **fields: Any) -> httpx.Response:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return service.post(service.body(messages, **fields), headers=headers)


def replica(role: str) -> Any:
    """The actor of a role's only replica."""
    names = [entry["name"] for entry in ray.util.list_named_actors(all_namespaces=True)]
    (name,) = [name for name in names if name.startswith("SERVE_REPLICA::") and f"#{role}#" in name]
    return ray.get_actor(name, namespace="serve")


def test_keys_are_needed_and_tenants_are_apart(guarded: Service):
    assert ask(guarded, None, user("?")).status_code == 401
    assert ask(guarded, "key-of-nobody", user("?")).status_code == 401
    assert httpx.get(guarded.url + "/health").status_code == 200
    headers = {"Authorization": "Bearer key-of-one"}
    upload = {"files": {"file": ("a.png", png(1))}, "data": {"purpose": "vision"}}
    file_id = httpx.post(guarded.url + "/v1/files", headers=headers, **upload).json()["id"]
    part = {"type": "file", "file": {"file_id": file_id}}
    first = ask(guarded, "key-of-one", user(part, "?"))
    assert first.status_code == 200
    assert ask(guarded, "key-of-two", user(part, "?")).status_code == 404
    guarded.settle()
    points = {
        key: ask(guarded, key, user(picture(1), "?")).json()["orbit"]["chunks"][0]["operating_point"]
        for key in ("key-of-one", "key-of-two")
    }
    assert points == {"key-of-one": "patched", "key-of-two": "encoded"}


def test_a_burst_beyond_the_queue_is_told_to_come_back_and_nothing_is_lost(guarded: Service):
    messages = user("word " * 250)

    def one(_: int) -> httpx.Response:
        return ask(guarded, "key-of-one", messages, max_tokens=2)

    with ThreadPoolExecutor(24) as pool:
        answers = list(pool.map(one, range(48)))
    refused = [answer for answer in answers if answer.status_code == 429]
    assert {answer.status_code for answer in answers} == {200, 429}
    assert all(answer.headers["Retry-After"] == "1" for answer in refused)
    assert all(answer.json()["error"]["code"] == 429 for answer in refused)

    def nothing_held() -> bool:
        loop = guarded.role("PrefillWorker", "stats")["loop"]
        return loop.leases == 0 and loop.blocks_free == loop.blocks_total

    guarded.wait_until(nothing_held)


def test_a_library_is_checked_copied_and_emptied_while_it_serves(guarded: Service, tmp_path: Path):
    def library(*arguments: str) -> str:
        options = ["--library", str(guarded.root / "library")]
        result = CliRunner().invoke(cli, ["library", *arguments, *options], env={"COLUMNS": "200"})
        assert result.exit_code == 0, result.output
        return result.output

    messages = user(picture(8), "What?")
    ask(guarded, "key-of-one", messages)
    guarded.settle()
    assert "0 corrupt" in library("verify")
    library("export", str(tmp_path / "all.tar"))
    library("gc", "--shrink", "0")
    assert "all: 0 records" in library("ls")
    again = ask(guarded, "key-of-one", messages)
    assert again.json()["choices"][0]["message"]["content"]
    guarded.settle()
    library("import", str(tmp_path / "all.tar"), "--model", str(checkpoint_path(CHECKPOINT)))
    assert "0 corrupt" in library("verify")


@pytest.mark.parametrize(
    "role", ["PrefillWorker", "DecodeWorker", pytest.param("VisionEncoder", marks=pytest.mark.slow)]
)
def test_the_service_outlives_a_worker(guarded: Service, role: str):
    before = ask(guarded, "key-of-one", user(picture(7), "What?"), orbit={"mode": "off"}).json()
    ray.kill(replica(role), no_restart=False)
    asked = user(picture(7), "What?")
    deadline = time.monotonic() + RESTART_SECONDS
    while (after := ask(guarded, "key-of-one", asked, orbit={"mode": "off"})).status_code != 200:
        assert after.status_code == 503, "who meets the worker's end, or comes before the next one is there, is told so"
        assert "worker was lost" in after.json()["error"]["message"]
        assert after.headers["Retry-After"]
        assert time.monotonic() < deadline, after.text
    assert after.json()["choices"][0]["message"] == before["choices"][0]["message"]
