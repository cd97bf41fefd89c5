"""The environment of the S3 server: made once, and anew where it cannot be used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from infra import s3_server


def test_an_environment_is_made_once_and_anew_where_it_was_moved_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ran: list[list[Any]] = []
    monkeypatch.setattr(s3_server, "_run", lambda command, failure: ran.append(command))
    here, there = tmp_path / "here", tmp_path / "there"
    for _ in range(2):
        assert s3_server.install(here) == here / "bin" / "python"
    assert len(ran) == 2, "a virtual environment, and what goes into it"
    here.rename(there)
    s3_server.install(there)
    assert len(ran) == 4, "its scripts name an interpreter that is not there any more"
