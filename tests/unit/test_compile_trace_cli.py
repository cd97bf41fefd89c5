"""`orbitserve compile-trace` without engines: what it says of what it cannot use."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from serving.cli import app


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
