"""Starting the application, where that cannot be: what is there already is left alone."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

import infra
from serving import launch
from serving.config import OrbitServeConfig


class Serve:
    """Ray Serve as `launch` asks it: with these applications running, and a port that may be taken."""

    def __init__(self, *applications: str, taken: bool = False, port: int = 8000) -> None:
        self.applications = dict.fromkeys(applications)
        self.http_config = SimpleNamespace(host="127.0.0.1", port=port)
        self._taken = taken

    def start(self, **_: Any) -> None:
        if self._taken:
            raise RuntimeError("Failed to bind to address")

    def status(self) -> SimpleNamespace:
        return SimpleNamespace(applications=self.applications)

    def delete(self, name: str) -> None:
        del self.applications[name]


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (Serve(launch.APPLICATION), "served on this Ray cluster already"),
        (Serve(launch.APPLICATION, taken=True), r"cannot listen on 127\.0\.0\.1:8000: Failed to bind"),
        (Serve(launch.APPLICATION, port=9000), r"listens on 127\.0\.0\.1:9000 already, not on 127\.0\.0\.1:8000"),
    ],
    ids=["served already", "port taken", "Serve listens elsewhere"],
)
def test_what_runs_already_is_left_alone(monkeypatch: pytest.MonkeyPatch, found: Serve, words: str):
    monkeypatch.setattr(launch, "serve", found)
    monkeypatch.setattr(launch, "_get_global_client", lambda: found)
    monkeypatch.setattr(launch, "ray_cluster", lambda **_: nullcontext())
    monkeypatch.setattr(launch, "_end_by_signal", lambda: None)
    config = OrbitServeConfig.model_validate(
        {"model": {"path": Path("somewhere")}, "http": {"host": "127.0.0.1", "port": 8000}}
    )
    with pytest.raises(launch.StartUpError, match=words), launch.application(config, Console()):
        pass
    assert launch.APPLICATION in found.applications


def test_a_cluster_of_ones_own_is_told_the_same():
    lines = (Path(infra.__path__[0]) / "cluster.env").read_text().splitlines()
    assert dict(line.split("=") for line in lines if not line.startswith("#")) == launch.FAST_REQUEST_PATH
