"""What makes a checkpoint another one for the library."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save, save_file

from prefill_workers.engine.fingerprint import fingerprint

FILES = {
    "config.json": b"{}",
    "preprocessor_config.json": b"{}",
    "processor_config.json": b"{}",
    "tokenizer.json": b"{}",
    "tiktoken.model": b"YQ== 0",
    "image_processing.py": b"SIZE = 1",
    "model.safetensors": save({"weight": torch.arange(256, dtype=torch.uint8)}),
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


@pytest.mark.parametrize("name", ["layers.3.weight", "projector.weight"])
def test_a_single_tensor_that_was_trained_on_makes_another_checkpoint(checkpoint: Path, name: str):
    tensors = {f"layers.{number}.weight": torch.randn(1 << 18) for number in range(8)}
    tensors["projector.weight"] = torch.randn(1 << 12)
    save_file(tensors, checkpoint / "model.safetensors")
    before = fingerprint(checkpoint)
    tensors[name] = torch.randn_like(tensors[name])
    save_file(tensors, checkpoint / "model.safetensors")
    assert fingerprint(checkpoint) != before


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.gguf"])
def test_weights_of_other_formats_count_where_there_are_no_safetensors(checkpoint: Path, name: str):
    without = fingerprint(checkpoint)
    (checkpoint / name).write_bytes(bytes(1 << 20))
    assert fingerprint(checkpoint) == without, "they are not what is loaded"
    (checkpoint / "model.safetensors").unlink()
    before = fingerprint(checkpoint)
    (checkpoint / name).write_bytes(bytes(range(256)) * (1 << 12))
    assert fingerprint(checkpoint) != before


@pytest.mark.parametrize("data", [b"", b"short", bytes(range(256)), (2).to_bytes(8, "little") + b"[]"])
def test_a_file_that_is_no_safetensors_is_named(checkpoint: Path, data: bytes):
    (checkpoint / "model.safetensors").write_bytes(data)
    with pytest.raises(ValueError, match=r"model\.safetensors is no safetensors file"):
        fingerprint(checkpoint)


def test_made_up_weights_are_another_model_whatever_lies_there(checkpoint: Path):
    made_up = fingerprint(checkpoint, "dummy")
    assert made_up != fingerprint(checkpoint) == fingerprint(checkpoint, "safetensors")
    (checkpoint / "model.safetensors").unlink()
    assert made_up == fingerprint(checkpoint, "dummy") != fingerprint(checkpoint)
