"""Ports for servers that take them only seconds later."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from infra import ports


def test_a_port_can_be_taken_and_is_none_that_outgoing_connections_get():
    taken = {ports.free_port() for _ in range(20)}
    assert len(taken) > 15, "processes that ask at once must not get the same"
    for port in taken:
        assert 20_000 <= port < ports._first_ephemeral()
        with socket.create_server(("127.0.0.1", port)):
            pass


@pytest.mark.parametrize("text", ["", "no numbers", "1024 60999"])
def test_a_system_that_does_not_tell_its_range_is_taken_for_a_usual_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
):
    (tmp_path / "range").write_text(text)
    monkeypatch.setattr(ports, "_EPHEMERAL", tmp_path / "range")
    assert ports._first_ephemeral() == 32_768


def test_when_every_port_is_taken_that_is_an_error(monkeypatch: pytest.MonkeyPatch):
    with socket.create_server(("", 0)) as server:
        taken = server.getsockname()[1]
        monkeypatch.setattr(ports._random, "randrange", lambda *_: taken)
        with pytest.raises(OSError, match="no TCP port"):
            ports.free_port()
