"""`orbitserve fidelity` against a server that answers as the service does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest
from typer.testing import CliRunner

from serving.cli.fidelity import _on_loopback
from serving.cli.main import app


@pytest.fixture
def asked() -> Iterator[tuple[str, list[str]]]:
    """The address of a server, and what it was asked with which key. It has pages for people where they may look."""
    heard: list[str] = []

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            pages = {"list": b"[]", "empty": b"{}", "null": b'{"data": null}'}
            self.wfile.write(pages.get(self.path.split("/")[1], b"<html>Welcome</html>"))

        def do_POST(self) -> None:
            heard.append(f"{self.path} {self.headers['Authorization']}")
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"replicas_allowed_again": 2}).encode())

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", heard
        server.shutdown()


def test_this_machine_is_asked_past_the_environments_proxy(asked, monkeypatch: pytest.MonkeyPatch):
    url, heard = asked
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    result = CliRunner().invoke(app, ["fidelity", "allow", "patched", "--url", url, "--api-key", "key"])
    assert result.exit_code == 0, result.output
    assert "patched is allowed again on 2 prefill workers" in result.output
    assert heard == ["/v1/orbit/operating_points/patched/allow Bearer key"]


@pytest.mark.parametrize("path", ["", "/list", "/empty", "/null"])
def test_a_server_of_another_kind_is_told(asked, path: str):
    url = f"{asked[0]}{path}"
    result = CliRunner().invoke(app, ["fidelity", "show", "--url", url], catch_exceptions=False)
    assert result.exit_code == 1
    assert f"error: {url} answers, but not as an OrbitServe service does" in result.output


@pytest.mark.parametrize("url", ["http://127.0.0.1:abc", "127.0.0.1:8000", "http://[::1", "127.0.0.1:abc"])
def test_what_is_no_url_is_told(url: str):
    result = CliRunner().invoke(app, ["fidelity", "show", "--url", url], catch_exceptions=False)
    assert result.exit_code == 1
    assert f"error: no service answers at {url}: " in result.output
    assert result.output.split(url)[1].strip(": \n")


@pytest.mark.parametrize(
    ("url", "loopback"),
    [
        ("http://localhost:8000", True),
        ("http://[::1]:8000", True),
        ("http://127.1.2.3", True),
        ("http://10.0.0.1:8000", False),
        ("http://orbit.example", False),
    ],
)
def test_only_this_machine_is(url: str, loopback: bool):
    assert _on_loopback(url) is loopback
