"""Clients of a steady load: which answers count as failed, and why."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.steady_load import SteadyLoad, failure, page, user


def event(finish: str | None) -> str:
    return json.dumps({"choices": [{"delta": {"content": "a"}, "finish_reason": finish}]})


ANSWERS = {
    "whole": (200, [event(None), event("length"), "[DONE]"], ""),
    "cut": (200, [event(None)], "cut"),
    "empty": (200, [], "cut"),
    "stopped": (200, [event("stop"), "[DONE]"], "ended by stop"),
    "error": (200, [event(None), json.dumps({"error": {"message": "lost"}}), "[DONE]"], "lost"),
    "refused": (503, [], "503"),
}


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        status, lines, _ = ANSWERS[asked["model"]]
        self.send_response(status)
        self.end_headers()
        for line in lines:
            self.wfile.write(f"data: {line}\n\n".encode())

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.mark.parametrize("kind", ANSWERS)
def test_an_answer_is_whole_or_told_by_its_fault(url: str, kind: str):
    fault = failure(url, kind, user("Look: ", page(1)), 2)
    assert (fault == "") == (kind == "whole")
    assert ANSWERS[kind][2] in fault


def test_clients_ask_until_they_are_stopped_and_all_answers_are_counted(url: str):
    with SteadyLoad(url, "whole", 1, 1) as well, SteadyLoad(url, "cut", 1) as badly:
        while min(well.answered, badly.answered) < 3:
            time.sleep(0.01)
        assert set(well.stop()) == {""}
    assert well.failed == 0
    assert badly.failed >= 3
    assert failure("http://127.0.0.1:1", "none", user("?"), 2).startswith("ConnectError")
