"""`orbitserve compile-trace` without engines: what it says of what it cannot use."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

from kvstore.catalog.index import prefix_key
from prefill_workers.patches.offline_paths import Compiled
from serving.api.chat import fixed_prefix
from serving.api.prefix import split_tools
from serving.cli.main import app
from serving.offline.compile_trace import Planner, compile_paths


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
        (["log", "--model", "nowhere"], "nowhere is no directory"),
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


def test_a_prefix_is_known_as_it_is_given_and_as_requests_with_these_tools_have_it(monkeypatch: pytest.MonkeyPatch):
    tokenizer = SimpleNamespace(encode=lambda text, **_: list(text.encode()))
    monkeypatch.setattr("vllm.tokenizers.get_tokenizer", lambda *_, **__: tokenizer)
    tools = [{"type": "function", "function": {"name": "look"}}]
    request = ChatCompletionRequest(messages=[], tools=tools)
    asked = fixed_prefix([{"role": "system", "content": "Be brief."}], request)
    given = f"{json.dumps(tools, indent=1)}\nBe brief."
    planner: Any = SimpleNamespace(config=SimpleNamespace(model=SimpleNamespace(path="m", trust_remote_code=False)))
    known, texts = Planner._prefixes(planner, [given, "Be kind."])
    assert {bytes(tokens).decode() for tokens in known.values()} == {"", given, asked, "Be kind."}
    assert all(prefix_key(tokens) == key for key, tokens in known.items())
    parts = [split_tools(texts[key]) for key in known]
    assert [([tool.function.name for tool in found], rest) for found, rest in parts] == [
        ([], ""), (["look"], "Be brief."), ([], "Be kind."), (["look"], "Be brief."),
    ]  # fmt: skip


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
