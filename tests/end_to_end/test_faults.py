"""Roles that are stopped, killed or lied to under a service: what health, clients and logs are told."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import msgspec
import psutil
import pytest
import ray
import zmq
from client import Service, user
from test_cluster import ask, replica

from prefill_workers.modes import Mode
from prefill_workers.protocol import LinkRequest

pytestmark = pytest.mark.service

KEY = "key-of-one"
NOTICED_SECONDS = 10.0  # after an engine has stopped
RESTART_SECONDS = 180.0


def process(name: str) -> psutil.Process:
    """The only process of this machine whose title names a role's replica or engine."""
    titles = {one: " ".join(one.info["cmdline"] or ()) for one in psutil.process_iter(["cmdline"])}
    (found,) = [one for one, title in titles.items() if title.startswith(("ray::", "VLLM")) and name in title]
    return found


@contextmanager
def stopped(one: psutil.Process) -> Iterator[None]:
    one.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        if one.is_running():
            one.send_signal(signal.SIGCONT)


def health(service: Service) -> httpx.Response:
    return httpx.get(service.url + "/health", timeout=60)


def well_again(service: Service) -> None:
    service.wait_until(lambda: health(service).status_code == 200, RESTART_SECONDS)
    service.wait_until(lambda: ask(service, KEY, user("?"), max_tokens=2).status_code == 200, RESTART_SECONDS)


@pytest.mark.parametrize(("name", "role"), [("EngineCore", "decode"), ("PrefillWorker", "prefill")])
def test_a_stopped_engine_is_unhealthy_in_time_and_well_when_it_goes_on(guarded: Service, name: str, role: str):
    well_again(guarded)
    with stopped(process(name)):
        began = time.monotonic()
        while (answer := health(guarded)).status_code == 200:
            assert time.monotonic() - began < NOTICED_SECONDS, "a stopped engine is called healthy"
            time.sleep(0.2)
        assert time.monotonic() - began < NOTICED_SECONDS
        assert answer.status_code == 503
        assert answer.json()["reason"].startswith(role)
    well_again(guarded)


@pytest.mark.slow
def test_an_engine_that_stays_stopped_is_restarted(guarded: Service):
    well_again(guarded)
    old = process("EngineCore")
    with stopped(old):
        guarded.wait_until(lambda: health(guarded).status_code == 503)
        well_again(guarded)
        guarded.wait_until(lambda: not old.is_running() or old.status() == psutil.STATUS_ZOMBIE, RESTART_SECONDS)
    assert process("EngineCore").pid != old.pid


@pytest.mark.slow
def test_a_busy_service_is_never_called_unhealthy(guarded: Service):
    """Canaries would wait behind all of this: what is computed for others proves the engines."""

    def one(_: int) -> int:
        return ask(guarded, KEY, user("word " * 200), max_tokens=200, ignore_eos=True).status_code

    well_again(guarded)
    with ThreadPoolExecutor(12) as pool:
        answers = [pool.submit(one, number) for number in range(48)]
        asked = []
        while not all(answer.done() for answer in answers):
            asked.append(health(guarded))
            time.sleep(0.5)
    assert {answer.result() for answer in answers} <= {200, 429}
    assert {answer.status_code for answer in asked} == {200}, [answer.text for answer in asked]


@pytest.mark.slow
def test_garbage_on_the_handshake_port_keeps_no_decode_worker_from_pulling(guarded: Service):
    well_again(guarded)
    linked = guarded.role("PrefillWorker", "link", LinkRequest("look", list(range(1, 9)), mode=Mode.OFF))
    guarded.role("DecodeWorker", "abandon", linked.transfer, 1)
    assert linked.transfer["remote_host"] == "127.0.0.1", "all of this cluster is on one machine"
    dropped = guarded.role("PrefillWorker", "stats")["handshakes_dropped"]
    garbage = [b"\xc1", b"", msgspec.msgpack.encode((b"get_meta_msg", 0, 7)), msgspec.msgpack.encode(["a", "b"])]
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(f"tcp://{linked.transfer['remote_host']}:{linked.transfer['remote_port']}")
        for message in garbage:
            socket.send_multipart([b"", message])
        guarded.wait_until(
            lambda: guarded.role("PrefillWorker", "stats")["handshakes_dropped"] >= dropped + len(garbage)
        )
    ray.kill(replica("DecodeWorker"), no_restart=False)  # the next one has to shake hands
    well_again(guarded)


def test_expected_refusals_leave_no_error_in_the_log(guarded: Service):
    def said() -> dict[Path, int]:
        return {path: path.stat().st_size for path in logs.glob("replica_*.log")}

    def one(client: httpx.Client, number: int) -> int:
        body = guarded.body(user(f"{number} " + "word " * 400), max_tokens=2)
        return client.post(guarded.url + "/v1/chat/completions", json=body).status_code

    well_again(guarded)
    logs = Path(ray._private.worker._global_node.get_logs_dir_path()) / "serve"
    before = said()
    assert before, "replicas write logs"
    statuses: set[int] = set()
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.Client(timeout=300, headers=headers) as client, ThreadPoolExecutor(24) as pool:
        for burst in range(8):  # a slow machine may send too slowly to fill the queue at once
            statuses.update(pool.map(one, [client] * 48, range(48 * burst, 48 * (burst + 1))))
            if 429 in statuses:
                break
    assert statuses == {200, 429}
    assert ask(guarded, KEY, user("?"), stop_token_ids=[10**7]).status_code == 400  # by the decode engine
    new = ""
    for path in said():
        with path.open() as log:
            log.seek(before.get(path, 0))
            new += log.read()
    assert "Traceback" not in new, new
    assert "ERROR" not in new, new
