"""Starting the application, where that cannot be: what is there already is left alone."""

from __future__ import annotations

import io
import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from certificates import self_signed
from ray.serve.exceptions import RayServeException
from rich.console import Console

import infra
from serving.config import OrbitServeConfig
from serving.deploy import launch
from serving.settings import ModelSettings


class Serve:
    """Ray Serve as `launch` asks it: with these applications running, and a port that may be taken."""

    RunTarget = staticmethod(lambda *_, **__: None)

    def __init__(self, *applications: str, taken: bool = False, port: int = 8000, prefix_taken: bool = False) -> None:
        self._prefix_taken = prefix_taken
        self.applications = dict.fromkeys(applications)
        self.http_config = SimpleNamespace(host="127.0.0.1", port=port, ssl_certfile=None)
        self._taken = taken

    def start(self, **_: Any) -> None:
        if self._taken:
            raise RuntimeError("Failed to bind to address")

    def status(self) -> SimpleNamespace:
        return SimpleNamespace(applications=self.applications)

    def delete(self, name: str, _blocking: bool = True) -> None:
        del self.applications[name]

    def run_many(self, *_: Any, **__: Any) -> None:
        if self._prefix_taken:
            raise RayServeException("Prefix / is being used by application other")


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
    patched(monkeypatch, found)
    with pytest.raises(launch.StartUpError, match=words), launch.application(config_of("127.0.0.1"), Console()):
        pass
    assert launch.APPLICATION in found.applications


@pytest.mark.parametrize(
    ("host", "where", "url"),
    [("127.0.0.1", "EveryNode", "127.0.0.1"), ("0.0.0.0", "EveryNode", "0.0.0.0"), ("10.1.2.3", "HeadOnly", "10.1.2.3"),
     ("::1", "EveryNode", "[::1]")],
)  # fmt: skip
def test_a_proxy_is_started_where_it_can_listen(host: str, where: str, url: str, monkeypatch: pytest.MonkeyPatch):
    found, given = Serve(), dict[str, Any]()
    found.http_config.host = host
    monkeypatch.setattr(found, "start", lambda **options: given.update(options))
    monkeypatch.setattr(found, "run_many", lambda *_, **__: found.applications.update({launch.APPLICATION: None}))
    patched(monkeypatch, found)
    with launch.application(config_of(host), Console(quiet=True)) as served:
        assert served == f"http://{url}:8000"
    assert given["proxy_location"] == where
    assert not found.applications


def test_tls_is_the_proxys_and_its_files_are_tried_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    certificate, key = self_signed(tmp_path / "one")
    other_key = self_signed(tmp_path / "other")[1]
    found, given = Serve(), dict[str, Any]()
    monkeypatch.setattr(found, "start", lambda **options: given.update(options["http_options"]))
    monkeypatch.setattr(found, "run_many", lambda *_, **__: found.applications.update({launch.APPLICATION: None}))
    patched(monkeypatch, found)
    for file in (other_key, tmp_path / "none.pem"):
        config = config_of("127.0.0.1", tls_certificate=certificate, tls_key=file)
        with pytest.raises(launch.StartUpError, match="cannot use http"), launch.application(config, Console()):
            pass
    assert not given
    config = config_of("127.0.0.1", tls_certificate=certificate, tls_key=key)
    with pytest.raises(launch.StartUpError, match="runs already with the TLS certificate None"):
        launch.application(config, Console()).__enter__()
    found.http_config.ssl_certfile = str(certificate)
    with launch.application(config, Console(quiet=True)) as served:
        assert served == "https://127.0.0.1:8000"
    assert (given["ssl_certfile"], given["ssl_keyfile"]) == (str(certificate), str(key))


def test_a_prefix_that_another_application_has_is_told(monkeypatch: pytest.MonkeyPatch):
    found = Serve("other", prefix_taken=True)
    patched(monkeypatch, found)
    with (
        pytest.raises(launch.StartUpError, match="Prefix / is being used"),
        launch.application(config_of("127.0.0.1"), Console()),
    ):
        pass
    assert [*found.applications] == ["other"]


@pytest.mark.parametrize(
    ("stored", "asked", "has_bf16", "warned"),
    [
        ({"text_config": {"torch_dtype": "bfloat16"}}, "auto", False, True),
        ({"dtype": "float32"}, "bfloat16", False, True),
        ({"dtype": "bfloat16"}, "float32", False, False),
        ({"dtype": "float32"}, "auto", False, False),
        ({"dtype": "bfloat16"}, "auto", True, False),
    ],
)
def test_bf16_where_the_processor_has_no_products_of_it_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: dict[str, Any], asked: Any, has_bf16: bool, warned: bool
):
    (tmp_path / "config.json").write_text(json.dumps(stored))
    monkeypatch.setattr(launch, "is_cpu_build", lambda: True)
    monkeypatch.setattr(launch, "multiplies_bf16", lambda: has_bf16)
    out = io.StringIO()
    launch._warn_of_slow_products(ModelSettings(path=tmp_path, dtype=asked), Console(file=out))
    assert ("model.dtype: float32" in out.getvalue()) == warned


def patched(monkeypatch: pytest.MonkeyPatch, found: Serve) -> None:
    monkeypatch.setattr(launch, "serve", found)
    monkeypatch.setattr(launch, "_get_global_client", lambda: found)
    monkeypatch.setattr(launch, "ray_cluster", lambda **_: nullcontext())
    monkeypatch.setattr(launch, "driver_handle", handle_that_knows(longest=10))
    left_out = ("_refuse_too_few_gpus", "_warn_of_apart", "_warn_of_slow_products", "_wait_until_ready", "build")
    for name in ("_end_by_signal", *left_out):
        monkeypatch.setattr(launch, name, lambda *_: None)


def handle_that_knows(**facts: int) -> Any:
    answer = {name: SimpleNamespace(remote=lambda: SimpleNamespace(result=lambda: 10)) for name in facts}
    return lambda *_: SimpleNamespace(**answer)


def config_of(host: str, **http: Any) -> OrbitServeConfig:
    http = {"host": host, "port": 8000, **http}
    return OrbitServeConfig.model_validate({"model": {"path": Path("somewhere")}, "http": http})


def test_a_cluster_of_ones_own_is_told_the_same():
    lines = (Path(infra.__path__[0]) / "cluster.env").read_text().splitlines()
    assert dict(line.split("=") for line in lines if not line.startswith("#")) == launch.FAST_REQUEST_PATH
