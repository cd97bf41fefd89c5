"""The Containerfile: pinned, from the locks, without privileges. CI has no builder."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

CONTAINERFILE = Path("infra/Containerfile")


def instructions() -> list[tuple[str, str]]:
    """Instructions in their order, each with its arguments in one line."""
    text = re.sub(r"^#.*\n", "", CONTAINERFILE.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in text.splitlines() if line.strip())]


def of_stage(target: str) -> list[tuple[str, str]]:
    """Instructions of a stage and of those that it is built on."""
    stages: dict[str, list[tuple[str, str]]] = {}
    current: list[tuple[str, str]] = []
    for name, rest in instructions():
        if name == "FROM":
            base, _, stage = rest.split()
            current = stages[stage] = list(stages.get(base, ()))
        current.append((name, rest))
    return stages[target]


@pytest.mark.parametrize(("target", "lock"), [("cpu", "cpu-py311.lock"), ("cuda", "gpu-py311.lock")])
def test_a_target_has_its_locks_packages_checked_by_hash_and_no_privileges(target: str, lock: str):
    found = of_stage(target)
    runs = [rest for name, rest in found if name == "RUN"]
    (packages,) = [run for run in runs if "--requirement" in run]
    assert "--require-hashes --no-deps" in packages
    assert packages.split()[-1] == lock
    assert Path("infra/locks", lock).is_file()
    assert any(name == "COPY" and f"infra/locks/{lock}" in rest for name, rest in found)
    assert all("--no-deps" in run for run in runs if "pip install" in run), "else pip would choose versions"
    user = "root"
    for name, rest in found:
        user = rest if name == "USER" else user
        assert user == "orbitserve" or "pip install" not in rest, "nothing of ours is installed as root"
    assert user == "orbitserve"


def test_the_image_for_gpus_has_what_triton_builds_its_launchers_with():
    """Python's headers come with the base: it is no Debian Python."""
    installed = " ".join(rest for name, rest in of_stage("cuda") if name == "RUN" and "apt-get install" in rest)
    assert {"gcc", "libc6-dev"} <= set(installed.split())


def test_the_bases_are_pinned_and_the_python_is_the_locks():
    known: set[str] = set()
    for name, rest in instructions():
        if name == "FROM":
            base, _, stage = rest.split()
            assert base in known or re.fullmatch(r"python:3\.11\.\d+-slim-\w+", base)
            known.add(stage)


def test_what_the_image_is_built_from_leaves_out_environments_and_tests():
    left_out = Path(".dockerignore").read_text().split()
    assert {".git", ".venv", ".orbitserve", "tests"} <= set(left_out)
