"""`orbitserve compile-trace` without engines: what it says of what it cannot use."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from prefill_workers.path_worker import Compiled
from serving.cli import app
from serving.compile_trace import compile_paths


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    path = tmp_path / "orbitserve.yaml"
    path.write_text(f"model: {{path: {tmp_path / 'model'}}}\nlibrary: {{directory: null}}\n")
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "access-one.jsonl").touch()
    return path


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["none.jsonl"], "no such file"),
        (["log", "--model", "nowhere"], "holds no config.json"),
        (["log", "--prefix", "@nowhere.txt"], "--prefix @nowhere.txt: cannot be read"),
        (["log"], "neither a directory nor a url"),
        (["log", "--bytes", "much"], "is not a size"),
        (["log", "--kind", "triples"], "triples"),
    ],
)
def test_what_cannot_be_used_is_named(config: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str):
    monkeypatch.chdir(config.parent)
    result = CliRunner().invoke(app, ["compile-trace", *arguments, "--config", str(config)])
    assert result.exit_code == 2
    assert words in " ".join(result.output.split())


@pytest.mark.parametrize(("seconds", "begun"), [(0.0, [0]), (0.3, [1, 2]), (60.0, [5])])
def test_no_patch_is_begun_when_the_time_is_up(seconds: float, begun: list[int]):
    flushed: list[int] = []

    def compile_one(path: int) -> Compiled:
        time.sleep(0.2)
        return Compiled("stored")

    worker: Any = SimpleNamespace(compile=compile_one)
    library: Any = SimpleNamespace(flush=lambda: flushed.append(1))
    paths: Any = range(5)
    assert len(list(compile_paths(worker, library, paths, seconds))) in begun
    assert flushed, "what was compiled is stored"
