"""What makes a checkpoint another one for the library."""

from __future__ import annotations

from pathlib import Path

import pytest

from prefill_workers.fingerprint import fingerprint

FILES = {
    "config.json": b"{}",
    "preprocessor_config.json": b"{}",
    "processor_config.json": b"{}",
    "tokenizer.json": b"{}",
    "model.safetensors": bytes(range(256)) * 4096,
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    for name, data in FILES.items():
        (tmp_path / name).write_bytes(data)
    return tmp_path


@pytest.mark.parametrize("name", FILES)
def test_whatever_kv_depends_on_changes_it(checkpoint: Path, name: str):
    before = fingerprint(checkpoint)
    assert fingerprint(checkpoint) == before
    (checkpoint / name).write_bytes(FILES[name][:-1] + b"!")
    assert fingerprint(checkpoint) != before


def test_what_kv_does_not_depend_on_leaves_it(checkpoint: Path):
    before = fingerprint(checkpoint)
    (checkpoint / "README.md").write_text("other words")
    (checkpoint / "orbitserve.json").write_text("{}")
    (checkpoint / "generation_config.json").write_text("{}")
    assert fingerprint(checkpoint) == before
