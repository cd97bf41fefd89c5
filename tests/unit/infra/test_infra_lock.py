"""The lock's hashes: CPU builds are looked for where `bootstrap.sh` finds them, everything else where pip looks."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from infra import lock


def test_only_cpu_builds_are_looked_for_in_their_index(monkeypatch: pytest.MonkeyPatch):
    asked: list[tuple[list[str], bool]] = []

    def run(command: list[str], **_: Any) -> None:
        pins = Path(command[command.index("-r") + 1]).read_text().split()
        asked.append((pins, lock.cpu_index() in command))
        install = [
            {
                "metadata": dict(zip(("name", "version"), pin.split("=="), strict=True)),
                "download_info": {"archive_info": {"hashes": {"sha256": pin}}},
            }
            for pin in pins
        ]
        Path(command[command.index("--report") + 1]).write_text(json.dumps({"install": install}))

    monkeypatch.setattr(subprocess, "run", run)
    pins = ["numpy==2.0", "torch==2.13.0+cpu"]
    assert lock.archive_hashes(pins) == {pin: pin for pin in pins}
    assert asked == [(["numpy==2.0"], False), (["torch==2.13.0+cpu"], True)]
    assert lock.cpu_index().startswith("https://")
