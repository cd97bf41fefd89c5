"""Finished parts of a measurement, and going on from them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from infra import vllm_env, vllm_plugin
from infra.cpu import kernels as cpu_kernels
from infra.cpu import latent as cpu_latent
from infra.cpu import openmp
from prefill_workers.engine import engine
from serving.bench.fidelity import bench
from serving.bench.kept import Kept, digest_of


def counted(calls: list[str], name: str) -> Callable[[], dict[str, float]]:
    def measure() -> dict[str, float]:
        calls.append(name)
        return {name: 1.5}

    return measure


def test_a_part_is_measured_once_and_others_by_their_names(tmp_path: Path):
    calls: list[str] = []
    for _ in range(2):
        kept = Kept(tmp_path / "parts", "a model")
        for name in ("single", "multi"):
            assert kept.once(name, counted(calls, name)) == {name: 1.5}
    assert calls == ["single", "multi"]


def test_what_was_measured_of_something_else_or_by_other_code_is_measured_again(tmp_path: Path):
    calls: list[str] = []
    code = tmp_path / "code"
    code.mkdir()
    (code / "a.py").write_text("1")
    for of in ("a model", "another", "a model"):
        Kept(tmp_path, of, digest_of([code])).once("single", counted(calls, of))
    assert calls == ["a model", "another"]
    (code / "a.py").write_text("2")
    Kept(tmp_path, "a model", digest_of([code])).once("single", counted(calls, "again"))
    assert calls[2:] == ["again"]


def test_tables_are_measured_again_with_other_packages_and_of_other_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    calls: list[str] = []
    vllm = "1"
    monkeypatch.setattr(bench, "versions", lambda: {"vllm": vllm})
    for fingerprint, vllm in (("a", "1"), ("a", "1"), ("b", "1"), ("a", "2"), ("b", "1")):
        kept = bench.kept_parts(tmp_path, "qwen2_5_vl", fingerprint, 24, b"code")
        kept.once("split", counted(calls, fingerprint + vllm))
    assert calls == ["a1", "b1", "a2"]


def test_the_code_whose_tables_are_kept_is_there_and_what_runs_the_engine_is_of_it():
    files = {path for part in bench._CODE for path in (part.rglob("*.py") if part.is_dir() else [part])}
    assert all(path.exists() for path in files)
    modules = (cpu_kernels, cpu_latent, openmp, vllm_env, vllm_plugin, engine)
    assert {Path(module.__file__) for module in modules} <= files


def test_a_part_that_failed_is_not_kept(tmp_path: Path):
    def broken() -> None:
        raise RuntimeError("injected")

    with pytest.raises(RuntimeError, match="injected"):
        Kept(tmp_path).once("single", broken)
    assert not list(tmp_path.iterdir())


def test_without_a_folder_everything_is_measured():
    calls: list[str] = []
    for _ in range(2):
        Kept(None).once("single", counted(calls, "single"))
    assert calls == ["single", "single"]
